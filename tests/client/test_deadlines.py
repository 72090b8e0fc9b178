"""Calls end in their time, whoever else waits for the same daemon and whatever interrupts the process."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore_client import Client, KVStoreError, Unavailable
from kvstore_client.keeper import Keeper
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually

pytestmark = pytest.mark.timeout(method="thread")
"""The usual way is SIGALRM, which these tests have for themselves."""

TIMEOUT_S = 0.5
SLACK_S = 4.0
"""For a busy machine: what has no limit takes 20 s and more here."""

BLOCK = 4096


@pytest.fixture
def paused(daemon: RunningDaemon) -> Iterator[RunningDaemon]:
    daemon.pause()
    yield daemon
    daemon.resume()


@pytest.fixture
def hasty(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, name="hasty", timeout_s=TIMEOUT_S) as client:
        client.stats()
        yield client


def keeper_of(client: Client) -> Keeper:
    return client._transport._keeper  # type: ignore[attr-defined,no-any-return]


@contextlib.contextmanager
def signals(every_s: float) -> Iterator[list[int]]:
    """This process is interrupted all the time, as by a profiler."""
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
    signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
    try:
        yield seen
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def held_elsewhere(lock: threading.RLock) -> Iterator[None]:
    """By another thread, as in a call."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(20)
        yield
    finally:
        over.set()
        thread.join()


def took(call: Callable[[], object]) -> float:
    began = time.monotonic()
    with contextlib.suppress(KVStoreError):
        call()
    return time.monotonic() - began


def test_a_signal_now_and_then_prolongs_no_call(hasty: Client, paused: RunningDaemon) -> None:
    """Each began the kernel's time-out anew: with one every 20 ms a call to a stopped daemon never ended."""
    session = keeper_of(hasty).session
    assert session is not None
    with signals(0.02) as seen:
        assert took(lambda: session.call(pb.Request(health=pb.HealthRequest()))) < TIMEOUT_S + SLACK_S
        assert took(hasty.stats) < TIMEOUT_S + SLACK_S, "nor connecting"
    assert len(seen) > 10


def test_threads_that_wait_for_a_connection_give_up_in_time(
    hasty: Client, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is connecting takes as long as it takes; the others had no limit on their wait for it."""
    keeper = keeper_of(hasty)
    connecting, go_on = threading.Event(), threading.Event()
    attach = Keeper._attach

    def slow(self: Keeper, until: float) -> object:
        if self is keeper:
            connecting.set()
            assert go_on.wait(60)
        return attach(self, until)

    monkeypatch.setattr(Keeper, "_attach", slow)
    session = keeper.session
    assert session is not None
    session.die("for the test")
    keeper.wake()
    assert connecting.wait(20)
    times: list[float] = []
    ns = hasty.raw_namespace("deadlines", BLOCK)
    calls: list[Callable[[], object]] = [hasty.stats, hasty.health, lambda: ns.remove([ns.key(b"x")])] * 4
    threads = [threading.Thread(target=lambda call=call: times.append(took(call)), daemon=True) for call in calls]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(times) == len(calls)
        assert max(times) < TIMEOUT_S + SLACK_S
        assert ns.get_into([ns.key(b"x")], np.empty(BLOCK, np.uint8)) == 0
    finally:
        go_on.set()
    eventually(lambda: hasty.health().reachable, 10, "the client to be back")


def test_closing_while_another_thread_connects_ends_in_time_and_leaves_no_session(
    hasty: Client, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = keeper_of(hasty)
    connecting, go_on = threading.Event(), threading.Event()
    attach = Keeper._attach

    def slow(self: Keeper, until: float) -> object:
        found = attach(self, until)
        if self is keeper:
            connecting.set()
            assert go_on.wait(60)
        return found

    monkeypatch.setattr(Keeper, "_attach", slow)
    session = keeper.session
    assert session is not None
    session.die("for the test")
    keeper.wake()
    assert connecting.wait(20)
    try:
        assert took(hasty.close) < TIMEOUT_S + SLACK_S
    finally:
        go_on.set()
    with Client(daemon.endpoint, name="other") as other:
        names = eventually(lambda: only_one_session(other), 10, "the session to be gone as well")
    assert names == ["other"]


def only_one_session(client: Client) -> list[str]:
    names = [session["client"] for session in client.stats()["sessions"]]
    return names if len(names) == 1 else []


def test_a_call_waits_for_those_of_other_threads_no_longer_than_it_may_take(hasty: Client) -> None:
    session = keeper_of(hasty).session
    assert session is not None
    ns = hasty.raw_namespace("deadlines", BLOCK)
    with held_elsewhere(session.lock):
        assert took(hasty.stats) < TIMEOUT_S + SLACK_S
        with pytest.raises(Unavailable, match="other calls of this process"):
            ns.pin([ns.key(b"x")], ttl_s=1.0)
    assert hasty.health().reachable
    assert keeper_of(hasty).session is session, "it was only busy"
