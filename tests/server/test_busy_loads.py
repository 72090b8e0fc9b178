"""Who waits for a block is refused for no prefetch, and a daemon that is too busy says so: that is no miss.

What must happen while a disk is busy is forced by a gate that the test holds (gated_disk.py).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvstore_client import Client, Namespace
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import ResourceExhausted
from tests.conftest import eventually
from tests.nodes import block
from tests.server.gated_disk import READ, GatedDaemon, gated
from tests.server.ssd_program import BLOCK, Program, keys_of, nothing_held, row_of

BUSY_S = 2.0


@pytest.fixture(scope="module")
def node() -> Iterator[GatedDaemon]:
    """One load of a session, and two prefetches and two durable commits, are all that may be under way."""
    with gated({"LOADS_MAX": 1, "RUNNING_MAX": 2, "GET_LOAD_S": 3.0}, server__grpc="127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture
def program(node: GatedDaemon) -> Iterator[Program]:
    with Program(node) as program:
        yield program
        program.release_all()
    nothing_held(node)


def stored(program: Program, name: str, count: int) -> list[bytes]:
    """On the SSD alone."""
    keys = keys_of(name, count)
    program.put(keys)
    program.fill_memory(f"{name} filler")
    return keys


def test_a_load_above_the_bound_is_answered_busy_and_comes_another_time(node: GatedDaemon, program: Program) -> None:
    keys = stored(program, "busy", 4)
    with node.closed(READ):
        first = program.ask(keys[:2], wait_ms=0)
        assert first.ticket
        second = program.ask(keys[2:])
        assert (second.ticket, list(second.slots), second.busy) == (0, [], True)
        assert "1 loads of this session" in second.why
    first = program.again(first.ticket)
    assert (len(first.slots), first.busy) == (2, False)
    second = program.load(keys[2:])
    assert (len(second.slots), second.busy, second.why) == (2, False, "")
    nowhere = program.load(keys_of("nowhere", 1))
    assert (len(nowhere.slots), nowhere.busy) == (0, False)
    program.release([*first.slots, *second.slots])


def test_prefetches_durable_commits_and_loads_do_not_keep_each_other_away(node: GatedDaemon, program: Program) -> None:
    keys = stored(program, "kinds", 6)
    with node.closed(READ):
        for at in (0, 1):
            assert program.prefetch(keys[at : at + 1]).ticket
        with pytest.raises(ResourceExhausted, match="2 prefetches"):
            program.prefetch(keys[2:3])
        number = program.ask(keys[3:4], wait_ms=0).ticket
        assert number
        program.put(keys_of("durable beside", 2))
    program.release(program.again(number).slots)


# -- the SDK


def below(client: Client, program: Program, name: str) -> tuple[Namespace, list[bytes]]:
    """Four blocks of the SDK's that only the SSD has."""
    ns = client.raw_namespace("sdk", BLOCK)
    keys = [ns.key(f"{name}{i}".encode()) for i in range(4)]
    assert ns.put(keys, [block(key, BLOCK) for key in keys], durable=True).error is None
    rounds = iter(range(10))

    def gone() -> bool:
        program.fill_memory(f"{name} {next(rounds)}")
        return ns.match(keys).tiers == ["ssd"] * 4

    eventually(gone, what="the blocks to leave memory")
    return ns, keys


def test_a_read_that_finds_the_daemon_busy_goes_on_when_it_is_not(node: GatedDaemon, program: Program) -> None:
    with Client(node.endpoint, timeout_s=5.0) as client, ThreadPoolExecutor(2) as threads:
        ns, keys = below(client, program, "again")
        before = client.stats()["counters"]
        outs = [np.zeros((2, BLOCK), np.uint8) for _ in range(2)]
        with node.closed(READ):
            first = threads.submit(ns.get_into, keys[:2], list(outs[0]))
            eventually(lambda: program.stats().ssd.tickets == 1, what="a load to be under way")
            second = threads.submit(ns.get_into, keys[2:], list(outs[1]))
            asked = loads(program)
            eventually(lambda: loads(program) > asked + 5, what="the other to be asked for again and again")
            assert not second.done()
        assert (first.result(), second.result()) == (2, 2)
        for at, key in enumerate(keys):
            assert outs[at // 2][at % 2].tobytes() == block(key, BLOCK)
        after = client.stats()["counters"]
    assert (after["busy"], after["misses"]) == (before["busy"], before["misses"])


def loads(program: Program) -> int:
    """Load calls that were answered."""
    return sum(row.calls for row in program.stats().calls if row.call == "Load")


@pytest.mark.parametrize("call", ["get_into", "acquire"])
def test_what_a_busy_daemon_did_not_bring_in_time_is_counted_apart_from_misses(
    node: GatedDaemon, program: Program, call: str
) -> None:
    with Client(node.endpoint, timeout_s=BUSY_S) as client, ThreadPoolExecutor(1) as threads:
        ns, keys = below(client, program, f"apart {call}")
        before = client.stats()["counters"]
        asked = [*keys[2:], ns.key(b"nowhere")]
        with node.closed(READ):
            waiting = threads.submit(ns.acquire, keys[:2], 10.0)
            eventually(lambda: program.stats().ssd.tickets == 1, what="a load to be under way")
            if call == "get_into":
                assert ns.get_into(asked, np.zeros((3, BLOCK), np.uint8)) == 0
            else:
                with ns.acquire(asked, timeout_s=BUSY_S) as lease:
                    assert (len(lease), lease.busy) == (0, 2)
        with waiting.result() as lease:
            assert len(lease) == 2
        after = client.stats()
    counters = after["counters"]
    assert (counters["busy"] - before["busy"], counters["misses"] - before["misses"]) == (2, 1)
    operation = pb.OPERATION_GET if call == "get_into" else pb.OPERATION_ACQUIRE
    row = row_of(program.stats(), operation, pb.TIER_HOST)
    assert row.busy >= 2


def test_a_caller_over_grpc_is_told_what_had_no_room_in_time(node: GatedDaemon, program: Program) -> None:
    """All that loads may hold is held by one that nobody takes, for as long as the Get waits."""
    with Client(node.grpc_endpoint, timeout_s=5.0) as client, Client(node.endpoint) as local:
        ns, keys = below(local, program, "remote")
        held = stored(program, "held", 16)
        eventually(lambda: ns.match(keys).tiers == ["ssd"] * 4, what="the blocks to be on the SSD alone")
        number = program.ask(held, wait_ms=0).ticket
        eventually(lambda: program.leased() == 16, what="all that may be held to be held")
        before = client.stats()["counters"]
        remote = client.raw_namespace("sdk", BLOCK)
        assert remote.get_into([*keys, ns.key(b"nowhere")], np.zeros((5, BLOCK), np.uint8)) == 0
        after = client.stats()["counters"]
        assert (after["busy"] - before["busy"], after["misses"] - before["misses"]) == (4, 1)
        assert len(program.again(number).slots) == 16
        program.release_all()
        assert remote.get(keys) == [block(key, BLOCK) for key in keys]
