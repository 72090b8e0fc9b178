"""A client whose session the daemon ends hears the reason that the daemon gave, not how its socket failed."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvstore.core import holds
from kvstore_client import Client, KVStoreError, Namespace, ResourceExhausted, Unavailable, admin
from kvstore_client.session import Session
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running
from tests.wire import Wire

BLOCK = 4096
ENDED = "an administrator ended this session"


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running() as daemon:
        yield daemon


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, name="administrator", timeout_s=10.0) as client:
        yield client


@pytest.fixture
def ns(client: Client) -> Namespace:
    return client.raw_namespace("last words", BLOCK)


@pytest.fixture
def ended(daemon: RunningDaemon, client: Client, ns: Namespace) -> Session:
    """A session that an administrator has ended, and whose process has not looked since."""
    session = Session(str(daemon.socket), "idle", "default", 5.0, read_only=False)
    session.open(None, time.monotonic() + 5.0)
    number = session.call(pb.Request(open_namespace=ns._identity.opening())).open_namespace.namespace_id
    session.reserve(number, 2, [])
    (found,) = [s["id"] for s in client.stats()["sessions"] if s["client"] == "idle" and not s["ended"]]
    assert admin.end_session(client, found).found
    eventually(session._stream.hung_up, 5, "the daemon's end of the socket to be gone")
    assert not session.dead, "nobody has noticed yet"
    return session


def commit(session: Session) -> list[pb.CommitReply]:
    slot = next(iter(session.writing))
    return session.commit([(pb.Request(commit=pb.CommitRequest(slots=[slot])), [slot])], BLOCK, reuse=False)


CALLS: dict[str, Callable[[Session], object]] = {
    "call": lambda session: session.call(pb.Request(health=pb.HealthRequest())),
    "reserve": lambda session: session.reserve(1, 1, []),
    "acquire": lambda session: session.acquire(pb.Request(acquire=pb.AcquireRequest(keys=[b"k" * 32])), None),
    "commit": commit,
    "attach": lambda session: session.attach([1]),
    "refresh_index": lambda session: session.refresh_index(),
    "sync": lambda session: session.sync(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_on_a_session_that_was_ended_says_why(ended: Session, call: Callable[[Session], object]) -> None:
    """It said "Broken pipe": what is sent fails before what lies there is read."""
    with pytest.raises(Unavailable, match=ENDED):
        call(ended)


def leave(session: Session) -> None:
    session.grants[BLOCK] = [1]
    session.leave()


def give_back(session: Session) -> None:
    session.grants[BLOCK] = [1]
    session.return_idle_grants(0.0)


QUIET: dict[str, Callable[[Session], object]] = {
    "give_up": lambda session: session.give_up(next(iter(session.writing._owners.values()))),
    "return_idle_grants": give_back,
    "leave": leave,
    "hung_up": lambda session: session.hung_up(),
}


@pytest.mark.parametrize("tell", QUIET.values(), ids=QUIET)
def test_what_is_sent_without_a_reply_or_only_looked_at_notes_why(
    ended: Session, tell: Callable[[Session], object]
) -> None:
    tell(ended)
    assert ended.dead == ENDED
    assert not ended.settled, "the daemon has not heard that it is over"


def test_who_is_in_a_call_hears_why_although_another_thread_saw_the_end_first(ended: Session) -> None:
    with ended.lock:  # as in a call
        assert ended.hung_up()
        assert ended.dead == "the daemon closed the connection"
    with pytest.raises(Unavailable, match=ENDED):
        ended.call(pb.Request(health=pb.HealthRequest()))
    assert ended.dead == ENDED


def test_answers_that_lie_before_the_reason_do_not_hide_it(daemon: RunningDaemon) -> None:
    """Of calls that were given up, or sent ahead like the commits of a put."""
    session = Session(str(daemon.socket), "ahead", "default", 5.0, read_only=False)
    session.open(None, time.monotonic() + 5.0)
    session._stream.send(_frame(pb.Request(id=1000, index=pb.IndexRequest())))
    for number in range(1001, 1011):
        session._stream.send(_frame(pb.Request(id=number, stats=pb.StatsRequest())))
    session._stream.send(b"\xff\xff\xff\xff")
    eventually(session._stream.hung_up, 10, "the daemon to refuse that frame")
    session.die("for the test")
    with pytest.raises(Unavailable, match="a frame of 4294967295 bytes"):
        session.call(pb.Request(health=pb.HealthRequest()))


def _frame(request: pb.Request) -> bytes:
    payload = request.SerializeToString()
    return len(payload).to_bytes(4, "little") + payload


def test_a_hello_that_is_turned_away_raises_the_daemons_own_error(daemon: RunningDaemon) -> None:
    """A daemon with too many connections closes the next at once, with a word: that is no broken connection."""
    session = Session(str(daemon.socket), "late", "default", 5.0, read_only=False)
    session._stream.send(b"\xff\xff\xff\xff")
    eventually(session._stream.hung_up, 5, "the daemon to refuse that frame")
    with pytest.raises(KVStoreError, match="a frame of 4294967295 bytes") as caught:
        session.open(None, time.monotonic() + 5.0)
    assert type(caught.value).__name__ == "InvalidArgument"


def fill(crowd: ExitStack, daemon: RunningDaemon) -> None:
    """Opens one session more than there may be."""
    for _ in range(holds.SESSIONS_MAX + 1):
        crowd.enter_context(Wire(daemon.socket))


def test_a_daemon_with_no_room_for_a_session_is_not_reachable_and_health_says_so_without_raising() -> None:
    """It raised, in the one call that is there to say that something is wrong."""
    with running() as daemon, Client(daemon.endpoint, name="shut out", timeout_s=5.0) as client, ExitStack() as crowd:
        keeper = client._transport._keeper  # type: ignore[attr-defined]
        with keeper._connecting:  # it gets no other session before there is no room for one
            with Client(daemon.endpoint, name="administrator") as other:
                (found,) = [s["id"] for s in other.stats()["sessions"] if s["client"] == "shut out"]
                assert admin.end_session(other, found).found
            with pytest.raises(ResourceExhausted, match=str(holds.SESSIONS_MAX)):
                fill(crowd, daemon)
        health = client.health()
        assert not health.reachable
        assert str(holds.SESSIONS_MAX) in health.problems[0]
        with pytest.raises(ResourceExhausted, match=str(holds.SESSIONS_MAX)):
            Client(daemon.endpoint)


def test_a_put_of_an_idle_client_whose_session_was_ended_is_rejected_with_the_reason(
    daemon: RunningDaemon, client: Client
) -> None:
    with Client(daemon.endpoint, name="putter", timeout_s=5.0) as putter:
        ns = putter.raw_namespace("last words", BLOCK)
        keeper = putter._transport._keeper  # type: ignore[attr-defined]
        session = keeper.session
        with keeper._connecting:  # its thread sees the end, and can do nothing about it
            (found,) = [s["id"] for s in client.stats()["sessions"] if s["client"] == "putter"]
            assert admin.end_session(client, found).found
            eventually(session._stream.hung_up, 5, "the daemon's end of the socket to be gone")
            result = ns.put([ns.key(b"k")], block("k", BLOCK))
            assert (result.rejected, type(result.error)) == (1, Unavailable)
            assert ENDED in str(result.error)
        eventually(lambda: putter.health().reachable, 10, "the client to be back by itself")
        assert ns.put([ns.key(b"k")], block("k", BLOCK)).stored == 1
