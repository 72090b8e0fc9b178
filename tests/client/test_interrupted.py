"""Signals in the middle of a call: a handler may call the client too, or end the call by an exception."""

import contextlib
import logging
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import numpy as np
import pytest

from kvstore_client import Client, KVStoreError, Namespace, Unavailable
from kvstore_client.session import Session
from kvstore_client.waiting import Wake, acquired
from kvstored.v1 import KEYS_MAX
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running

pytestmark = pytest.mark.timeout(method="thread")
"""The usual way is SIGALRM, which these tests have for themselves."""

TIMEOUT_S = 1.0
IN_TIME_S = 4 * TIMEOUT_S
"""A call, a call of the handler's in the middle of it, and twice as much for a slow machine."""
BLOCK = 4096
TURNS = 150


class Interrupted(BaseException):
    """As KeyboardInterrupt, but nobody else's."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running(host__size="16MiB") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, name="interrupted", timeout_s=TIMEOUT_S) as client:
        yield client


@contextlib.contextmanager
def interrupted(handler: Callable[[], object], after_s: float = 0.1) -> Iterator[None]:
    """`handler` is called once, in the middle of what this thread does then."""

    def handle(_: int, __: FrameType | None) -> None:
        handler()

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt() -> None:
    raise Interrupted


CALLS: dict[str, Callable[[Client, Namespace, list[bytes]], object]] = {
    "match": lambda client, ns, keys: ns.match(keys),
    "get_into": lambda client, ns, keys: ns.get_into(keys, np.empty(len(keys) * BLOCK, np.uint8)),
    "put": lambda client, ns, keys: ns.put([ns.key(b"new")], bytes(BLOCK)),
    "acquire": lambda client, ns, keys: ns.acquire(keys),
    "reserve": lambda client, ns, keys: ns.reserve(1),
    "remove": lambda client, ns, keys: ns.remove(keys[1:]),
    "clear": lambda client, ns, keys: ns.clear(),
    "stats": lambda client, ns, keys: client.stats(),
    "health": lambda client, ns, keys: client.health(),
    "close": lambda client, ns, keys: client.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_signal_handler_may_make_any_call_in_the_middle_of_another(
    daemon: RunningDaemon, client: Client, name: str
) -> None:
    """Those that took the session's lock without a limit waited for ever, for the very call that they interrupted."""
    ns = client.raw_namespace("handler", BLOCK)
    keys = [ns.key(b"%d" % i) for i in range(2)]
    ns.put(keys, [block(key, BLOCK) for key in keys])
    times: list[float] = []

    def handler() -> None:
        began = time.monotonic()
        with contextlib.suppress(KVStoreError):
            CALLS[name](client, ns, keys)
        times.append(time.monotonic() - began)

    session = client._transport._session  # type: ignore[attr-defined]
    daemon.pause()
    try:
        with interrupted(handler), pytest.raises(Unavailable):
            session.call(pb.Request(stats=pb.StatsRequest()))
    finally:
        daemon.resume()
    (took,) = times
    assert took < IN_TIME_S
    if name != "close":
        eventually(lambda: client.health().reachable, 10, "the client to be back")
        assert ns.put(keys, [block(key, BLOCK) for key in keys]).rejected == 0


def test_a_client_that_a_signal_handler_closed_in_the_middle_of_a_call_leaves_no_session(daemon: RunningDaemon) -> None:
    """As a handler of SIGTERM does."""
    client = Client(daemon.endpoint, name="terminated", timeout_s=TIMEOUT_S)
    client.raw_namespace("handler", BLOCK).reserve(2)
    session = client._transport._session  # type: ignore[attr-defined]
    with session.lock, interrupted(client.close):
        threading.Event().wait(0.2)
        assert client._transport._keeper.closed  # type: ignore[attr-defined]
    with Client(daemon.endpoint, name="other") as other:
        eventually(lambda: [s["client"] for s in other.stats()["sessions"]] == ["other"], 10, "it to be gone")


WAITING = ["remove", "reserve", "acquire", "put", "stats", "clear", "health"]


@pytest.mark.parametrize("name", WAITING)
def test_a_call_that_an_exception_ended_does_not_answer_the_next(
    daemon: RunningDaemon, client: Client, name: str
) -> None:
    ns = client.raw_namespace("exception", BLOCK)
    keys = [ns.key(b"%d" % i) for i in range(4)]
    data = [block(key, BLOCK) for key in keys]
    ns.put(keys, data)
    daemon.pause()
    try:
        with interrupted(interrupt), pytest.raises(Interrupted):
            CALLS[name](client, ns, keys)
    finally:
        daemon.resume()
    assert isinstance(client.stats()["daemon"]["pid"], int), "the next call gets its own answer"
    eventually(lambda: ns.put(keys, data).rejected == 0, 10, "puts to be taken again")
    assert ns.get(keys) == data
    assert ns.match(keys).blocks == 4
    eventually(lambda: [s["client"] for s in client.stats()["sessions"]] == ["interrupted"], 10, "one session")
    (mine,) = client.stats()["sessions"]
    assert mine["leased_slots"] == 0


def fill(session: Session, message: bytes) -> None:
    """Sends it until the daemon's socket is full, and longer."""
    for _ in range(100):
        session._send(message)


def test_a_message_that_an_exception_left_half_sent_is_never_continued(daemon: RunningDaemon, client: Client) -> None:
    """The daemon would take the next message for its end: keys and slots that nobody named."""
    before = client.stats()["counters"]["protocol_errors"]
    session = Session(str(daemon.socket), "half", "default", 10.0, read_only=False)
    session.open(None, time.monotonic() + 10.0)
    large = pb.Request(id=1000, remove=pb.RemoveRequest(namespace_id=1, keys=[b"k" * 32] * KEYS_MAX))
    daemon.pause()
    try:
        with interrupted(interrupt), pytest.raises(Interrupted):
            fill(session, _frame(large))
        with pytest.raises(Unavailable, match="an earlier call was interrupted"):
            session.call(pb.Request(health=pb.HealthRequest()))
    finally:
        daemon.resume()
    assert session.dead
    eventually(lambda: "half" not in [s["client"] for s in client.stats()["sessions"]], 10, "its session to end")
    assert client.stats()["counters"]["protocol_errors"] == before


def _frame(request: pb.Request) -> bytes:
    payload = request.SerializeToString()
    return len(payload).to_bytes(4, "little") + payload


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where it comes in a finalizer
def test_calls_that_exceptions_end_anywhere_leave_no_lock_taken(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was taken just before was never given back, and the client of no more use."""
    monkeypatch.setattr(logging.getLogger("kvstore_client"), "disabled", True)  # logging has such a lock, too
    with Client(daemon.endpoint, name="interrupted", timeout_s=10.0) as client:
        interrupt_often(client)


def interrupt_often(client: Client) -> None:
    ns = client.raw_namespace("leak", BLOCK)
    key = [ns.key(b"k")]
    assert ns.put(key, bytes(BLOCK)).rejected == 0
    keeper = client._transport._keeper  # type: ignore[attr-defined]
    for turn in range(TURNS):
        seen: list[int] = []

        def once(seen: list[int] = seen) -> None:
            seen.append(1)
            interrupt()

        with contextlib.suppress(Interrupted), interrupted(once, 0.0003 + 0.000013 * (turn % 97)):
            while not seen:
                keeper.need(lambda session: session.refresh_index())
                ns.put(key, bytes(BLOCK))
        assert acquired(keeper._connecting, 10), "the lock on connecting was never given back"
        keeper._connecting.release()
        session = keeper.session
        if session is not None:
            assert acquired(session.lock, 10), "the session's lock was never given back"
            session.lock.release()
    eventually(lambda: client.health().reachable, 10, "the client to be back")
    assert ns.put(key, bytes(BLOCK)).rejected == 0


# -- handlers that take their time


def use_up_the_time() -> None:
    """As a handler does that writes a profile."""
    threading.Event().wait(1.2 * TIMEOUT_S)


def test_an_answer_that_came_while_a_handler_used_up_the_time_is_an_answer(
    daemon: RunningDaemon, client: Client
) -> None:
    """poll() does not look again after a handler that outlasts it, and the session was taken for dead."""
    session = client._transport._session  # type: ignore[attr-defined]

    def handler() -> None:
        daemon.resume()
        assert select.select([session._stream._descriptor], [], [], 20)[0]
        use_up_the_time()

    daemon.pause()
    try:
        with interrupted(handler):
            assert session.call(pb.Request(health=pb.HealthRequest())).health.healthy
    finally:
        daemon.resume()
    assert client._transport._session is session  # type: ignore[attr-defined]
    assert not session.dead


def test_room_that_came_while_a_handler_used_up_the_time_is_room(daemon: RunningDaemon, client: Client) -> None:
    session = client._transport._session  # type: ignore[attr-defined]
    touch = _frame(pb.Request(touch=pb.TouchRequest()))

    def handler() -> None:
        daemon.resume()
        assert select.select([], [session._stream._descriptor], [], 20)[1]
        use_up_the_time()

    with session.lock:
        daemon.pause()
        try:
            while session._stream._send_some(touch):
                continue
            with interrupted(handler):
                session._stream.send(touch)
        finally:
            daemon.resume()
    assert client.health().reachable
    assert client._transport._session is session  # type: ignore[attr-defined]


def test_a_lock_that_came_free_while_a_handler_used_up_the_time_is_taken() -> None:
    lock, held, free = threading.RLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            free.wait(20)

    def handler() -> None:
        free.set()
        other.join()
        use_up_the_time()

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(20)
    with interrupted(handler):
        assert acquired(lock, TIMEOUT_S)


# -- calls in the middle of this thread's own

PATIENT_S = 60.0
AT_ONCE_S = 10.0


@pytest.mark.parametrize("lock", ["the session's", "on connecting"])
def test_in_the_middle_of_a_call_nothing_waits_for_that_call_and_a_well_daemon_is_not_called_away(
    daemon: RunningDaemon, lock: str
) -> None:
    """They waited out the whole time-out for the very call that they interrupted; then `health` said unreachable."""
    with Client(daemon.endpoint, name="patient", timeout_s=PATIENT_S) as client:
        ns = client.raw_namespace("middle", BLOCK)
        keys = [ns.key(b"k")]
        assert ns.put(keys, bytes(BLOCK)).rejected == 0
        keeper = client._transport._keeper  # type: ignore[attr-defined]
        began = time.monotonic()
        with keeper.session.lock if lock == "the session's" else keeper._connecting:
            for call in (client.stats, lambda: ns.remove(keys), lambda: ns.pin(keys, 1.0)):
                with pytest.raises(Unavailable, match="this thread is in the middle of another call"):
                    call()
            health = client.health()
            assert (health.reachable, len(health.problems)) == (True, 1)
            assert "this thread is in the middle of another call" in health.problems[0]
            assert ns.get(keys) == [bytes(BLOCK)], "reads need no call"
        assert time.monotonic() - began < AT_ONCE_S
        assert client.health().healthy
        assert ns.remove(keys) == 1


def test_a_wake_that_an_exception_ended_anywhere_can_be_called_again() -> None:
    """Of an Event the lock stayed taken: close() waited for ever."""
    wake = Wake()
    for turn in range(500):
        with contextlib.suppress(Interrupted), interrupted(interrupt, 0.001 + turn * 1e-6):
            while True:
                wake.set()
    wake.wait(0.0)
    wake.set()
    began = time.monotonic()
    wake.wait(30.0)
    assert time.monotonic() - began < 10.0
