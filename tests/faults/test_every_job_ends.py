"""Every load, prefetch and write ends, by its deadline, whatever the disk does; what comes late harms nobody.

The field fault: a load that was slow, failed or revoked was never reported, and its request
waited for ever, holding blocks.
"""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore_client import Client, Namespace
from tests.conftest import eventually
from tests.faults.conftest import Program
from tests.faults.faulty_disk import FaultyDaemon, faulty
from tests.faults.tiers import durably, keys_of, nothing_held, only_on_ssd, opened, present, put, settled, ssd
from tests.nodes import totals

BLOCK = 64 << 10
HANGS, FAILS = {"hangs": True}, {"errno": errno.EIO}
LATE_S = 5.0
"""How much later than its deadline a call may answer on a machine that is busy."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[FaultyDaemon]:
    with faulty(host__size="4MiB") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: FaultyDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, name="engine", timeout_s=1.0) as client:
        opened(client)
        yield client
        daemon.disk()
        opened(client)
        found = settled(client)
        assert found["tickets"] == 0
        nothing_held(client)


def on_ssd(client: Client, name: str, count: int) -> tuple[Namespace, list[bytes]]:
    """Blocks that only the SSD has."""
    ns = client.raw_namespace("ends", BLOCK)
    keys = keys_of(ns, name, count)
    for n in range(3):  # a time-out of a second is short for a busy machine
        if not put(ns, keys, durable=True):
            break
        assert n < 2, "blocks could not be stored"
    only_on_ssd(client, ns, keys)
    settled(client)
    return ns, keys


def took(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return call(), time.monotonic() - began


def test_a_read_that_never_comes_is_a_miss_in_time_and_never_in_the_callers_buffer(
    daemon: FaultyDaemon, client: Client
) -> None:
    ns, keys = on_ssd(client, "never", 8)
    out = np.full((8, BLOCK), 0xA5, np.uint8)
    daemon.disk(read=HANGS)
    found, seconds = took(lambda: ns.get_into(keys, list(out)))
    assert (found, seconds < 1.0 + LATE_S) == (0, True)
    assert ssd(client)["queues"][0]["running"] > 0, "its slots are still the disk's"
    daemon.disk()
    settled(client)
    assert (out == 0xA5).all(), "what came late went to a buffer that was given back"
    opened(client)
    assert present(ns, keys) == keys


@pytest.mark.parametrize("rule", [HANGS, FAILS], ids=["hangs", "fails"])
def test_a_prefetch_ends_by_its_deadline_and_says_why(
    daemon: FaultyDaemon, client: Client, rule: dict[str, Any]
) -> None:
    ns, keys = on_ssd(client, f"ahead {rule}", 8)
    daemon.disk(read=rule)
    ticket = ns.prefetch(keys, deadline_s=0.5)
    _, seconds = took(ticket.wait)
    assert ticket.state == "failed"
    assert seconds < 0.5 + LATE_S
    assert ticket.why


def test_a_cancelled_prefetch_is_cancelled_at_once_and_what_it_had_begun_comes_to_memory(
    daemon: FaultyDaemon, client: Client
) -> None:
    ns, keys = on_ssd(client, "revoked", 16)
    daemon.disk(read=HANGS)
    ticket = ns.prefetch(keys, deadline_s=30.0)
    eventually(lambda: ssd(client)["queues"][1]["running"], 5, "reads to be under way")
    _, seconds = took(ticket.cancel)
    assert ticket.state == "cancelled"
    assert seconds < LATE_S
    assert ssd(client)["queues"][1]["waiting"] == 0, "what nobody wants still waits"


def test_an_acquire_ends_in_time_and_holds_nothing_that_did_not_come(daemon: FaultyDaemon, client: Client) -> None:
    ns, keys = on_ssd(client, "held", 4)
    daemon.disk(read=HANGS)
    lease, seconds = took(lambda: ns.acquire(keys, timeout_s=0.5))
    with lease:
        assert (len(lease), seconds < 0.5 + LATE_S) == (0, True)


@pytest.mark.parametrize("call", ["write", "sync", "open", "allocate"])
def test_a_durable_put_ends_in_time_and_says_that_it_is_not(daemon: FaultyDaemon, client: Client, call: str) -> None:
    ns = client.raw_namespace("ends", BLOCK)
    durably(ns, keys_of(ns, f"before {call}", 1))
    daemon.disk(**{call: HANGS})
    keys = keys_of(ns, f"durable {call}", 4)
    errors, seconds = took(lambda: put(ns, keys, durable=True))
    # Files are only made for what does not fit into those there are.
    assert call in ("open", "allocate") or errors
    assert seconds < 1.0 + LATE_S
    assert present(ns, keys) == keys, "memory has them all the same"


def test_a_client_killed_while_its_load_or_its_durable_put_waits_leaves_nothing_held(
    daemon: FaultyDaemon, client: Client, start_program: Callable[..., Program]
) -> None:
    _, keys = on_ssd(client, "orphaned", 8)
    before = totals(client.stats())
    daemon.disk(read=HANGS, write=HANGS)

    def waiting(call: str) -> Program:
        program = start_program(WAITS, daemon.endpoint, BLOCK, call, *(key.hex() for key in keys))
        assert program.line() == "waiting"
        return program

    programs = [waiting("put")]  # before a read has hung for so long that no write is begun any more
    eventually(lambda: ssd(client)["queues"][2]["running"], 10, "I/O of the put")
    programs += [waiting(call) for call in LOADS]
    eventually(lambda: ssd(client)["queues"][0]["running"], 10, "I/O of a load")
    os.kill(programs[1].pid, signal.SIGSTOP)  # in the middle of its load
    for program in programs:
        program.kill()
    eventually(lambda: ssd(client)["tickets"] == 0, 10, "their tickets to be gone")
    daemon.disk()
    opened(client)
    settled(client)
    nothing_held(client)
    after = totals(client.stats())
    assert after["granted"] <= before["granted"]


LOADS = ("get", "acquire", "prefetch")
WAITS = """
import os, sys
import numpy as np
from kvstore_client import Client
from tests.nodes import block
endpoint, size, call, keys = sys.argv[1], int(sys.argv[2]), sys.argv[3], list(map(bytes.fromhex, sys.argv[4:]))
ns = Client(endpoint, name=call, timeout_s=60.0).raw_namespace("ends", size)
new = [ns.key(f"new {i}".encode()) for i in range(4)]
ns.match(keys)
print("waiting", flush=True)
if call == "get":
    ns.get_into(keys, list(np.empty((len(keys), size), np.uint8)))
elif call == "acquire":
    ns.acquire(keys, timeout_s=60.0)
elif call == "prefetch":
    ns.prefetch(keys, deadline_s=60.0).wait()
else:
    ns.put(new, [block(key, size) for key in new], durable=True)
"""


@pytest.mark.parametrize("call", ["any", "read", "write", "sync", "free_bytes", "physical_bytes", "names"])
def test_a_daemon_whose_disk_hangs_in_any_call_can_be_stopped(call: str) -> None:
    with faulty(host__size="4MiB") as daemon:
        with Client(daemon.endpoint, name="engine", timeout_s=2.0) as client:
            opened(client)
            ns, keys = on_ssd(client, "stop", 4)
            daemon.disk(**{call: HANGS})
            ns.prefetch(keys, deadline_s=30.0)
            put(ns, keys_of(ns, "unsaved", 16))
            eventually(lambda: not call.endswith("bytes") or ssd(client)["state"], 5, "the daemon to answer")
            assert client.health().healthy
        status, seconds = took(daemon.stop)
        assert status == 0
        assert seconds < 30


@pytest.mark.parametrize("call", ["any", "open", "names"])
def test_a_daemon_whose_disk_hangs_while_it_is_opened_serves_from_memory_and_can_be_stopped(call: str) -> None:
    with faulty(host__size="4MiB") as daemon:
        daemon.kill()
        daemon.disk(**{call: HANGS})
        daemon.restart()
        with Client(daemon.endpoint, name="engine", timeout_s=2.0) as client:
            ns = client.raw_namespace("ends", BLOCK)
            keys = keys_of(ns, "memory", 8)
            assert put(ns, keys) == []
            assert present(ns, keys) == keys
            assert put(ns, keys_of(ns, "durable", 1), durable=True)
        status, seconds = took(daemon.stop)
        assert (status, seconds < 30) == (0, True)
