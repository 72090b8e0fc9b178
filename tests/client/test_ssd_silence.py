"""A disk that does not answer: memory is read and written as fast as ever, and every wait ends by its time-out."""

import asyncio
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Client, DeadlineExceeded, Namespace, aio
from tests.client.slow_disk import SlowDiskDaemon
from tests.conftest import eventually
from tests.nodes import block, totals
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.timeout(method="thread")
"""The usual way is SIGALRM, which these tests have for themselves."""

BLOCK = 64 << 10
CALL_S = 2.0
"""Time-out of clients: a durable put has the time on a slow machine, too."""

COLD, WARM = 12, 8
LATE_S = 4.0
"""How much later than its time-out a call may end on a machine that is busy."""

HIT_S = 0.5
"""For one read from memory, or one put, beside a disk that hangs; it takes a millisecond where nobody disturbs it."""


@contextmanager
def slow() -> Iterator[SlowDiskDaemon]:
    with tempfile.TemporaryDirectory(prefix="kvstored-test-") as directory:
        settings = {"host.size": "8MiB", "ssd.path": f"{directory}/ssd", "ssd.size": "1GiB"}
        settings |= {"ssd.write_back": "hits:1000", "server.grpc": f"unix:{directory}/grpc.sock"}
        daemon = SlowDiskDaemon(Path(directory), settings)
        try:
            yield daemon
        finally:
            daemon.kill()


@pytest.fixture(scope="module")
def shared() -> Iterator[SlowDiskDaemon]:
    with slow() as daemon:
        yield daemon


@pytest.fixture
def daemon(shared: SlowDiskDaemon) -> Iterator[SlowDiskDaemon]:
    """Its disk answers before a test and after it."""
    with Client(shared.endpoint, timeout_s=5.0) as client:
        ready(client)
        yield shared
        shared.go_on("reads")
        shared.go_on("writes")
        ready(client)


def ready(client: Client) -> None:
    def in_use() -> bool:
        ssd = client.stats()["ssd"]
        return ssd["state"] == "open" and not ssd["trouble"]

    eventually(in_use, 20, "the SSD to be in use")


@pytest.fixture
def client(daemon: SlowDiskDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, timeout_s=CALL_S) as client:
        yield client


@pytest.fixture
def ns(client: Client, request: pytest.FixtureRequest) -> Namespace:
    return client.raw_namespace(request.node.name, BLOCK)


def bytes_of(keys: list[bytes]) -> list[bytes]:
    return [block(key, BLOCK) for key in keys]


def cold_and_warm(ns: Namespace) -> tuple[list[bytes], list[bytes]]:
    """Blocks that only the SSD has, and others that are in memory."""
    cold = [ns.key(b"cold%d" % i) for i in range(COLD)]
    warm = [ns.key(b"warm%d" % i) for i in range(WARM)]
    assert ns.put(cold, bytes_of(cold), durable=True) == (COLD, 0, 0, None)
    rounds = count()

    def gone() -> bool:
        round_ = next(rounds)
        some = [ns.key(b"%d %d" % (round_, i)) for i in range(64)]
        ns.put(some, bytes_of(some))
        return "host" not in ns.match(cold).tiers

    eventually(gone, 10, "the blocks to leave memory")
    assert ns.match(cold) == (COLD, ["ssd"] * COLD)
    assert ns.put(warm, bytes_of(warm)) == (WARM, 0, 0, None)
    return cold, warm


def timed(call: Callable[[], object]) -> tuple[object, float]:
    watch = Stopwatch()
    answer = call()
    return answer, watch.seconds


@pytest.mark.parametrize("way", ["unix", "grpc"])
def test_a_silent_disk_is_waited_for_until_the_time_out(
    daemon: SlowDiskDaemon, ns: Namespace, way: str, request: pytest.FixtureRequest
) -> None:
    cold, warm = cold_and_warm(ns)
    with Client(daemon.endpoint if way == "unix" else daemon.grpc_endpoint, timeout_s=CALL_S) as reader:
        own = reader.raw_namespace(request.node.name, BLOCK)
        assert own.get(warm) == bytes_of(warm)
        daemon.hang("reads")
        out = np.zeros((WARM + COLD) * BLOCK, np.uint8)
        copied, seconds = timed(lambda: own.get_into([*warm, *cold], out))
        assert copied == WARM
        assert out[: WARM * BLOCK].tobytes() == b"".join(bytes_of(warm))
        assert seconds < CALL_S + (WARM + COLD) * BLOCK / (32 << 20) + LATE_S
        assert own.get(warm) == bytes_of(warm)
        daemon.go_on("reads")
        eventually(lambda: own.get(cold) == bytes_of(cold), 20, "the disk to be read again")


def test_memory_is_read_and_written_while_others_wait_for_the_disk(
    daemon: SlowDiskDaemon, ns: Namespace, request: pytest.FixtureRequest
) -> None:
    cold, warm = cold_and_warm(ns)
    with Client(daemon.endpoint, timeout_s=8.0) as patient:
        own = patient.raw_namespace(request.node.name, BLOCK)
        assert own.get(warm) == bytes_of(warm)
        daemon.hang("reads")
        got: list[list[bytes]] = []
        waiting = [threading.Thread(target=lambda: got.append(own.get(cold))) for _ in range(3)]
        for thread in waiting:
            thread.start()
        reads, puts = [], []
        for i in range(30):
            found, seconds = timed(lambda: own.get(warm))
            assert found == bytes_of(warm)
            reads.append(seconds)
            key = own.key(b"new%d" % i)
            stored, seconds = timed(lambda key=key: own.put([key], bytes_of([key])))  # type: ignore[misc]
            assert stored.stored == 1  # type: ignore[attr-defined]
            puts.append(seconds)
        assert all(thread.is_alive() for thread in waiting), "they were to wait all the time"
        assert (sorted(reads)[15] < HIT_S / 10, max(reads) < HIT_S) == (True, True), reads
        assert (sorted(puts)[15] < HIT_S / 4, max(puts) < HIT_S) == (True, True), puts
        for thread in waiting:
            thread.join(60)
            assert not thread.is_alive()
        assert got == [[], [], []]


def test_leases_end_with_a_load_that_was_given_up(daemon: SlowDiskDaemon, client: Client, ns: Namespace) -> None:
    cold, warm = cold_and_warm(ns)
    daemon.hang("reads")
    lease, seconds = timed(lambda: ns.acquire([*warm, *cold], timeout_s=0.3))
    assert seconds < 0.3 + LATE_S
    assert [bytes(view) for view in lease.views] == bytes_of(warm), "what was in memory"  # type: ignore[attr-defined]
    lease.release()  # type: ignore[attr-defined]
    del lease
    daemon.go_on("reads")
    eventually(lambda: client.stats()["ssd"]["tickets"] == 0, 10, "the load to be given up")
    eventually(lambda: totals(client.stats())["leased"] == 0, 10, "nothing to be leased")


def test_an_interrupted_read_gives_its_load_up(daemon: SlowDiskDaemon, client: Client, ns: Namespace) -> None:
    cold, warm = cold_and_warm(ns)
    assert ns.get(warm) == bytes_of(warm)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    daemon.hang("reads")
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            ns.get(cold)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    # It was in the middle of a question, or between two: in the first case it is another session that asks now.
    eventually(lambda: ns.get(warm) == bytes_of(warm), 10, "memory to be read")
    daemon.go_on("reads")
    eventually(lambda: ns.get(cold) == bytes_of(cold), 20, "the disk to be read")
    eventually(lambda: client.stats()["ssd"]["tickets"] == 0, 5, "the load to be given up")
    eventually(lambda: totals(client.stats())["leased"] == 0, 5, "nothing to be leased")


def test_a_prefetch_from_a_silent_disk_fails_by_its_deadline(daemon: SlowDiskDaemon, ns: Namespace) -> None:
    cold, warm = cold_and_warm(ns)
    daemon.hang("reads")
    ticket = ns.prefetch([*warm, *cold], deadline_s=0.4)
    assert ticket.state == "running"
    assert (ticket.blocks, ticket.waiting) == (WARM, COLD)
    blocks, seconds = timed(ticket.wait)
    assert (blocks, ticket.state) == (WARM, "failed")
    assert ticket.why
    assert seconds < 0.4 + LATE_S


def test_a_cancelled_prefetch_ends_at_once(daemon: SlowDiskDaemon, ns: Namespace) -> None:
    cold, _ = cold_and_warm(ns)
    daemon.hang("reads")
    ticket = ns.prefetch(cold, deadline_s=60.0)
    assert ticket.state == "running"
    _, seconds = timed(ticket.cancel)
    assert seconds < LATE_S
    assert (ticket.state, ticket.wait()) == ("cancelled", 0)


def test_a_ticket_whose_daemon_has_died_has_failed() -> None:
    with slow() as daemon, Client(daemon.endpoint, timeout_s=CALL_S) as client:
        ready(client)
        ns = client.raw_namespace("dies", BLOCK)
        cold, _ = cold_and_warm(ns)
        daemon.hang("reads")
        ticket = ns.prefetch(cold, deadline_s=60.0)
        assert ticket.state == "running"
        daemon.process.send_signal(signal.SIGKILL)
        _, seconds = timed(ticket.wait)
        assert (ticket.state, seconds < 20.0) == ("failed", True)


def test_a_durable_put_says_that_its_blocks_are_stored_and_not_durable(daemon: SlowDiskDaemon, ns: Namespace) -> None:
    daemon.hang("writes")
    keys = [ns.key(b"%d" % i) for i in range(4)]
    result, seconds = timed(lambda: ns.put(keys, bytes_of(keys), durable=True))
    assert result[:3] == (4, 0, 0)  # type: ignore[index]
    assert isinstance(result.error, DeadlineExceeded)  # type: ignore[attr-defined]
    assert seconds < CALL_S + LATE_S
    assert ns.get(keys) == bytes_of(keys)
    daemon.go_on("writes")
    eventually(lambda: ns.put(keys, bytes_of(keys), durable=True) == (0, 4, 0, None), 20, "them to be durable")


def test_tasks_that_wait_for_the_disk_leave_threads_for_those_that_read_memory(
    daemon: SlowDiskDaemon, ns: Namespace, request: pytest.FixtureRequest
) -> None:
    cold, warm = cold_and_warm(ns)

    async def scenario() -> None:
        async with aio.Client(daemon.endpoint, timeout_s=10.0) as client:
            own = await client.raw_namespace(request.node.name, BLOCK)
            assert await own.get(warm) == bytes_of(warm)
            daemon.hang("reads")
            waiting = [asyncio.create_task(own.get(cold)) for _ in range(aio.THREADS_MAX + 2)]
            tickets = [await own.prefetch(cold, deadline_s=0.8) for _ in range(aio.THREADS_MAX + 2)]
            ends = [asyncio.create_task(ticket.wait()) for ticket in tickets]
            watch = Stopwatch()
            for _ in range(5):
                assert await own.get(warm) == bytes_of(warm)
            assert watch.seconds < HIT_S * 2
            assert not any(task.done() for task in waiting)
            assert await asyncio.gather(*waiting) == [[]] * len(waiting)
            assert await asyncio.gather(*ends) == [0] * len(ends)
            assert {ticket.state for ticket in tickets} == {"failed"}

    asyncio.run(asyncio.wait_for(scenario(), 90.0))
