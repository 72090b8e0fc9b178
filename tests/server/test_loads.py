"""Load, Prefetch and Ticket over the session socket: byte-exact, bounded, and nothing left behind.

What must happen while a disk is busy is forced by a gate that the test holds (gated_disk.py).
"""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from tests.conftest import eventually, wait_for_line
from tests.server.gated_disk import READ, GatedDaemon, gated
from tests.server.ssd_program import Program, keys_of, nothing_held

HOST, SSD = pb.TIER_HOST, pb.TIER_SSD
PATCHES = {"ASK_AGAIN_S": 0.4, "RUNNING_MAX": 4}
"""Limits short enough to be met."""


@pytest.fixture(scope="module")
def node() -> Iterator[GatedDaemon]:
    with gated(server__grpc="127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def hasty() -> Iterator[GatedDaemon]:
    """The same with short limits."""
    with gated(PATCHES) as daemon:
        yield daemon


@pytest.fixture
def program(node: GatedDaemon) -> Iterator[Program]:
    with Program(node) as program:
        yield program
        program.release_all()
    nothing_held(node)


# -- loads


def test_a_load_brings_what_memory_lost_byte_exact(program: Program) -> None:
    keys = keys_of("lost", 120)
    program.put(keys)
    tiers = program.match(keys)
    assert len(tiers) == 120
    assert {HOST, SSD} == set(tiers)
    for at in range(0, len(keys), 12):
        part = keys[at : at + 12]
        reply = program.load(part)
        assert (len(reply.slots), reply.why, reply.ticket) == (12, "", 0)
        program.check(part, reply.slots)
        program.release(reply.slots)
    assert program.stats().ssd.counters.loaded >= 50


def test_a_load_of_what_is_in_memory_is_answered_at_once_and_read_from_no_disk(
    node: GatedDaemon, program: Program
) -> None:
    keys = keys_of("warm", 4)
    program.put(keys)
    with node.closed(READ):
        reply = program.ask([*keys, *keys_of("absent", 1)], wait_ms=0)
    assert (len(reply.slots), reply.loaded, reply.why) == (4, 0, "")
    program.release(reply.slots)


def test_a_load_ends_at_the_first_block_that_is_nowhere(program: Program) -> None:
    keys = keys_of("gap", 4)
    program.put(keys)
    program.fill_memory("gap filler")
    reply = program.load([*keys[:2], *keys_of("nowhere", 1), *keys[2:]])
    assert (len(reply.slots), reply.why) == (2, "")
    program.check(keys, reply.slots)
    program.release(reply.slots)
    assert not program.load(keys_of("nowhere", 1)).slots


def test_a_load_holds_what_a_session_may_hold_and_says_that_it_is_not_all(program: Program) -> None:
    keys = keys_of("much", 60)
    program.put(keys)
    program.fill_memory("much filler")
    reply = program.load(keys)
    assert len(reply.slots) == 16, "a quarter of the memory"
    assert "held" in reply.why
    program.check(keys, reply.slots)
    with pytest.raises(ResourceExhausted):  # who may hold no block more gets none: as with Acquire
        program.load(keys[16:])
    program.release(reply.slots[:4])
    reply = program.load(keys[16:])
    assert (len(reply.slots), "no room" in reply.why or "held" in reply.why) == (4, True)
    program.check(keys[16:], reply.slots)


def test_what_a_load_gave_is_not_reused_while_its_reader_stands_still(program: Program) -> None:
    keys = keys_of("still", 8)
    program.put(keys)
    program.fill_memory("still filler")
    reply = program.load(keys)
    for round_ in range(2):
        program.fill_memory(f"still filler {round_}")
        program.check(keys, reply.slots)
    program.release(reply.slots)


def test_waiting_for_a_disk_holds_up_no_other_call_of_the_session(node: GatedDaemon, program: Program) -> None:
    keys, warm = keys_of("cold", 4), keys_of("hot", 2)
    program.put(keys)
    program.fill_memory("cold filler")
    program.put(warm)
    with node.closed(READ):
        program.wire.post(900, load=program.load_request(keys))
        program.wire.post(901, match=pb.MatchRequest(namespace_id=program.number, keys=warm))
        program.wire.post(902, acquire=pb.AcquireRequest(namespace_id=program.number, keys=warm))
        assert program.wire.answer(901).match.blocks == 2
        slots = list(program.wire.answer(902).acquire.slots)
        program.put(keys_of("put meanwhile", 1), durable=False)
    reply = program.wire.answer(900).load
    if reply.ticket:
        reply = program.load(keys) if not reply.ticket else program.again(reply.ticket)
    program.check(keys, reply.slots)
    assert len(reply.slots) == 4
    program.release([*slots, *reply.slots])


def test_a_load_that_is_not_over_names_a_ticket_and_is_asked_for_again(node: GatedDaemon, program: Program) -> None:
    keys = keys_of("again", 4)
    program.put(keys)
    program.fill_memory("again filler")
    with node.closed(READ):
        reply = program.ask(keys, wait_ms=0)
        assert reply.ticket
        assert not reply.slots
        assert program.again(reply.ticket, wait_ms=20).ticket == reply.ticket
        with Program(node) as other, pytest.raises(FailedPrecondition, match="no load"):
            other.again(reply.ticket)
    final = program.again(reply.ticket)
    assert (len(final.slots), final.loaded, final.why) == (4, 4, "")
    program.check(keys, final.slots)
    with pytest.raises(FailedPrecondition, match="no load"):
        program.again(reply.ticket)
    program.release(final.slots)


def test_what_has_not_come_by_its_deadline_is_a_miss(node: GatedDaemon, program: Program) -> None:
    keys = keys_of("late", 4)
    program.put(keys)
    program.fill_memory("late filler")
    with node.closed(READ):
        reply = program.ask(keys, deadline_ms=50)
    assert (len(reply.slots), reply.ticket) == (0, 0)
    assert "deadline" in reply.why
    reply = program.load(keys)
    program.check(keys, reply.slots)
    assert len(reply.slots) == 4
    program.release(reply.slots)


def test_a_load_waits_for_others_that_hold_all_that_may_be_held(node: GatedDaemon, program: Program) -> None:
    """What is there and has no place at present is no miss."""
    keys, wanted = keys_of("all of it", 16), keys_of("no place", 4)
    program.put(keys)
    program.put(wanted)
    program.fill_memory("no place filler")
    number = program.ask(keys, wait_ms=0).ticket
    eventually(lambda: program.leased() == 16, what="a load that holds all that loads may hold")
    with Program(node) as other:
        reply = other.ask(wanted, wait_ms=300)
        assert reply.ticket, "neither an answer nor a miss"
        held = program.again(number).slots
        assert len(held) == 16
        reply = other.again(reply.ticket)
        assert (len(reply.slots), reply.why) == (4, "")
        other.check(wanted, reply.slots)
        other.release_all()


def test_a_load_that_is_given_up_holds_nothing(node: GatedDaemon, program: Program) -> None:
    keys = keys_of("given up", 4)
    program.put(keys)
    program.fill_memory("given up filler")
    with node.closed(READ):
        number = program.ask(keys, wait_ms=0).ticket
        given_up = program.wire.call(load=pb.LoadRequest(ticket=number, give_up=True)).load
        assert not given_up.slots
    with pytest.raises(FailedPrecondition, match="given up"):
        program.again(number)


def test_a_load_that_nobody_asks_for_again_is_given_up(hasty: GatedDaemon) -> None:
    keys = keys_of("forgotten", 4)
    with Program(hasty) as program:
        program.put(keys)
        program.fill_memory("forgotten filler")
        with hasty.closed(READ):
            number = program.ask(keys, wait_ms=0).ticket
            assert number
        eventually(lambda: not program.stats().ssd.tickets and not program.leased(), what="the load to be given up")
        with pytest.raises(FailedPrecondition, match="not asked for"):
            program.again(number)
    nothing_held(hasty)


def test_fifty_clients_that_want_one_prefix_read_it_once(node: GatedDaemon, program: Program) -> None:
    keys = keys_of("shared", 10)
    program.put(keys)
    program.fill_memory("shared filler")
    before = program.stats().ssd.counters.loaded
    programs = [Program(node) for _ in range(50)]
    with node.closed(READ):
        for other in programs:
            other.wire.post(900, load=other.load_request(keys))
        eventually(lambda: program.stats().ssd.tickets >= len(programs), what="all of them to wait")
    for other in programs:
        reply = other.wire.answer(900).load
        while reply.ticket:
            reply = other.again(reply.ticket)
        assert len(reply.slots) == 10
        other.check(keys, reply.slots)
    assert program.stats().ssd.counters.loaded == before + 10
    for other in programs:
        other.release_all()
        other.close()


LOADING = """
import sys
from pathlib import Path
from tests.server.ssd_program import Program, keys_of

class At:
    socket = Path(sys.argv[1])

program = Program(At)
print("ready", flush=True)
sys.stdin.readline()
print(program.ask(keys_of(sys.argv[2], 8), wait_ms=0).ticket, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("answered", [False, True])
def test_a_client_killed_while_it_loads_leaves_nothing_held(
    node: GatedDaemon, program: Program, *, answered: bool
) -> None:
    """In the middle of the reads, and when all has come and nobody took it."""
    keys = keys_of("killed", 8)
    program.put(keys)
    program.fill_memory(f"killed filler {answered}")
    command = [sys.executable, "-c", LOADING, str(node.socket), "killed"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert wait_for_line(child) == "ready"
            with node.closed(READ):
                assert child.stdin is not None
                child.stdin.write("\n")
                child.stdin.flush()
                assert int(wait_for_line(child)) > 0
                assert program.stats().ssd.tickets == 1
                if not answered:
                    child.kill()
            if answered:
                eventually(lambda: program.leased() == 8, what="all of it to come")
        finally:
            child.kill()
    eventually(lambda: not program.leased() and not program.stats().ssd.tickets, what="its holds to end")
    reply = program.load(keys)
    program.check(keys, reply.slots)
    assert len(reply.slots) == 8
    program.release(reply.slots)


def test_a_load_says_what_is_wrong_with_it(node: GatedDaemon, program: Program) -> None:
    with pytest.raises(InvalidArgument, match="deadline_ms"):
        program.ask(keys_of("wrong", 1), deadline_ms=600_001)
    with pytest.raises(InvalidArgument, match="32"):
        program.ask([b"short"])
    with pytest.raises(FailedPrecondition, match="namespace"):
        program.wire.call(load=pb.LoadRequest(namespace_id=999))
    with pytest.raises(FailedPrecondition, match="no load 12345"):
        program.again(12345)


# -- prefetches


def test_a_prefetch_brings_blocks_and_holds_none(program: Program) -> None:
    keys = keys_of("ahead", 12)
    program.put(keys)
    program.fill_memory("ahead filler")
    started = program.prefetch(keys)
    assert started.ticket
    found = eventually(lambda: program.ended_ticket(started.ticket))
    assert (found.state, found.blocks, found.waiting, found.why) == (pb.TICKET_DONE, 12, 0, "")
    assert found.loaded == 12
    assert program.leased() == 0
    assert program.match(keys) == [HOST] * 12
    # Its end is known for a while; of no other session's.
    assert program.ticket(started.ticket).state == pb.TICKET_DONE
    assert program.ticket(started.ticket + 1000).state == pb.TICKET_NONE


def test_a_prefetch_is_cancelled_and_another_session_does_not_see_it(node: GatedDaemon, program: Program) -> None:
    keys = keys_of("cancelled", 8)
    program.put(keys)
    program.fill_memory("cancelled filler")
    with node.closed(READ):
        number = program.prefetch(keys).ticket
        running_ = program.ticket(number, wait_ms=10)
        assert (running_.state, running_.waiting, running_.blocks) == (pb.TICKET_RUNNING, 8, 0)
        with Program(node) as other:
            assert other.ticket(number, cancel=True).state == pb.TICKET_NONE
        assert program.ticket(number, cancel=True).state == pb.TICKET_CANCELLED
    assert program.ticket(number).state == pb.TICKET_CANCELLED


def test_a_prefetch_whose_deadline_passes_has_failed(node: GatedDaemon, program: Program) -> None:
    keys = keys_of("too late", 4)
    program.put(keys)
    program.fill_memory("too late filler")
    with node.closed(READ):
        number = program.prefetch(keys, deadline_ms=50).ticket
        found = eventually(lambda: program.ended_ticket(number))
    assert found.state == pb.TICKET_FAILED
    assert "deadline" in found.why


def test_prefetches_of_a_session_are_bounded_and_end_with_it(hasty: GatedDaemon) -> None:
    keys = keys_of("many", 8)
    with Program(hasty) as program:
        program.put(keys)
        program.fill_memory("many filler")
        with hasty.closed(READ):
            for i in range(4):
                assert program.prefetch(keys[: i + 1]).state == pb.TICKET_RUNNING
            with pytest.raises(ResourceExhausted, match="4 prefetches"):
                program.prefetch(keys)
            program.close()
            with Program(hasty) as watch:
                eventually(lambda: not watch.stats().ssd.tickets, what="its prefetches to end with it")
    nothing_held(hasty)
