"""What a client keeps until it tells: exact whatever interrupts it, bounded, and cheap for the call that is counted."""

import sys
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from kvstore_client import reads as reads_module
from kvstore_client.reads import CHAINS_MAX, GET, MATCH, NOTES_MAX, PUT, REPORTS_MAX, Reads
from kvstored.v1 import FRAME_BYTES_MAX, KEYS_MAX, latency
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.latency import BUCKETS

CALL_S = 6e-6
"""What counting may add to a call: 0.7 µs on the machine of bench/README.md, and some room for slower ones."""

NS = b"n" * 32
OPENED = {NS: pb.OpenNamespaceReply(namespace_id=7)}


def key_of(name: object) -> bytes:
    return blake2b(repr(name).encode(), digest_size=32).digest()


def noted(reads: Reads, found: int = 1, asked: int = 3, operation: int = GET, digest: bytes = NS) -> None:
    reads.done(operation, digest, found, asked, time.perf_counter())


def calls_in(messages: list[pb.TouchRequest]) -> int:
    return sum(report.calls for message in messages for report in message.reports)


def test_calls_are_told_once_by_operation_and_namespace() -> None:
    reads = Reads(0.0)
    for _ in range(3):
        noted(reads)
    noted(reads, found=0)
    noted(reads, operation=MATCH)
    (message,) = reads.due(OPENED)
    told = {report.operation: report for report in message.reports}
    get = told[pb.OPERATION_GET]
    assert (get.namespace_id, get.calls, get.calls_hit, get.hits, get.misses) == (7, 4, 3, 3, 9)
    assert (len(get.latencies), sum(get.latencies)) == (BUCKETS, 4)
    assert get.seconds > 0
    assert told[pb.OPERATION_MATCH].calls == 1
    assert reads.due(OPENED, now=True) == []


def test_nothing_is_told_before_its_time_unless_somebody_insists() -> None:
    reads = Reads(3600.0)
    noted(reads)
    reads.due(OPENED, now=True)
    noted(reads)
    assert reads.due(OPENED) == []
    assert calls_in(reads.due(OPENED, now=True)) == 1


def test_calls_wait_until_their_namespace_has_a_number() -> None:
    reads = Reads(0.0)
    noted(reads)
    noted(reads, digest=key_of("new"))
    assert calls_in(reads.due(OPENED, now=True)) == 1
    assert reads.namespaces() == {key_of("new")}
    assert reads.due(OPENED, now=True) == []
    assert calls_in(reads.due({key_of("new"): pb.OpenNamespaceReply(namespace_id=8)}, now=True)) == 1


def test_messages_stay_within_their_limits() -> None:
    """However many namespaces, conversations and keys there were."""
    reads = Reads(0.0)
    opened = {key_of(i): pb.OpenNamespaceReply(namespace_id=i + 1) for i in range(2 * REPORTS_MAX)}
    for digest in opened:
        noted(reads, digest=digest)
    for i in range(2 * CHAINS_MAX):
        reads.used([key_of((i, k)) for k in range(100)], f"conversation {i}")
    messages = reads.due(opened, now=True)
    assert calls_in(messages) == len(opened)
    assert max(len(message.reports) for message in messages) <= REPORTS_MAX
    assert sum(len(message.keys) for message in messages) <= KEYS_MAX
    assert sum(message.ByteSize() for message in messages) < FRAME_BYTES_MAX
    last = messages[0]
    assert last.hint.conversation == f"conversation {2 * CHAINS_MAX - 1}", "what was used last comes first"


def test_notes_are_added_up_before_they_are_many() -> None:
    reads = Reads(0.0)
    for _ in range(3 * NOTES_MAX):
        noted(reads)
    assert len(reads._notes) <= NOTES_MAX
    assert calls_in(reads.due(OPENED, now=True)) == 3 * NOTES_MAX


def test_whoever_interrupts_the_adding_up_loses_nothing(monkeypatch: Any) -> None:
    """A finalizer or a signal handler that runs between any two steps of it makes calls, and tells what it can."""
    reads, told = Reads(0.0), []
    inside = 0
    real: Callable[[float], int] = latency.bucket

    def interrupted(seconds: float) -> int:
        nonlocal inside
        if inside < 50:
            inside += 1
            noted(reads)
            told.extend(reads.due(OPENED))
        return real(seconds)

    monkeypatch.setattr(reads_module, "bucket", interrupted)
    for _ in range(10):
        noted(reads)
    while reads._notes:
        told.extend(reads.due(OPENED, now=True))
    assert calls_in(told) == 10 + inside


def test_threads_that_note_and_threads_that_tell_agree() -> None:
    reads, told = Reads(0.0), []
    calls, threads = 5000, 6
    done = threading.Event()

    def note() -> None:
        for _ in range(calls):
            noted(reads, operation=PUT)

    def tell() -> None:
        while not done.is_set():
            told.extend(reads.due(OPENED, now=True))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        teller = threading.Thread(target=tell)
        noters = [threading.Thread(target=note) for _ in range(threads)]
        for thread in (teller, *noters):
            thread.start()
        for thread in noters:
            thread.join()
        done.set()
        teller.join()
    finally:
        sys.setswitchinterval(before)
    told.extend(reads.due(OPENED, now=True))
    assert calls_in(told) == calls * threads


def test_counting_costs_a_call_microseconds() -> None:
    """With the adding up, and with the clock read twice; the fastest of several runs."""
    reads, count = Reads(0.0), 5000

    def once() -> float:
        began = time.perf_counter()
        for _ in range(count):
            reads.done(GET, NS, 1, 1, time.perf_counter())
        reads.due(OPENED, now=True)
        return (time.perf_counter() - began) / count

    assert min(once() for _ in range(10)) < CALL_S
