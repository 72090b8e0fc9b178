"""Rule 3, continued: a process attaches again after its connection broke, and takes over what it still uses."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.core import holds
from kvstore_client import Client, FailedPrecondition, InvalidArgument, Namespace, ResourceExhausted, Unavailable
from kvstore_client.session import Session
from kvstored.v1 import FRAME_BYTES_MAX, PROTOCOL
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block
from tests.rules.processes import (
    RAW,
    Program,
    exact,
    fill,
    held,
    names,
    pool,
    session,
    sessions,
    start_raw,
    store,
)
from tests.wire import Wire

BLOCK = 16 << 10
HASTY_S, IN_TIME_S = 1.0, 8.0
"""A client's time-out, and what a few of them in a row never come to."""


Start = Callable[..., Program]


@pytest.fixture
def daemon(start_daemon: Callable[..., RunningDaemon]) -> RunningDaemon:
    """4 MiB: 256 slots of 16 KiB."""
    return start_daemon(host__size="4MiB")


@pytest.fixture
def ns(client: Client) -> Namespace:
    return client.raw_namespace("rule 3", BLOCK)


# -- a daemon that does not answer


@pytest.fixture
def hasty(daemon: RunningDaemon) -> Iterator[Client]:
    """A client that waits for nobody longer than HASTY_S."""
    with Client(daemon.endpoint, name="hasty", timeout_s=HASTY_S) as client:
        yield client


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took <= seconds, f"took {took:.2f} s"


def test_calls_to_a_daemon_that_stands_still_end_in_time_and_the_client_resumes(
    daemon: RunningDaemon, client: Client, ns: Namespace, hasty: Client
) -> None:
    mine = hasty.raw_namespace("rule 3", BLOCK)
    keys = store(mine, names("before", 4))
    lease = mine.acquire(keys[:2])
    views = lease.views
    slots = mine.reserve(2)
    daemon.pause()
    out = np.empty(BLOCK, np.uint8)
    with within(IN_TIME_S):
        assert mine.get_into(keys[:1], out) == 1, "reads need no daemon"
    new = [mine.key(name) for name in names("new", 8)]
    with within(IN_TIME_S):
        result = mine.put(new, [block(key, BLOCK) for key in new])
    assert (result.stored, result.rejected) == (0, 8)
    assert isinstance(result.error, Unavailable)
    for call in (lambda: mine.remove(keys), hasty.stats, lambda: mine.pin(keys, ttl_s=1), lambda: mine.reserve(1)):
        with within(IN_TIME_S), pytest.raises(Unavailable):
            call()
    with within(IN_TIME_S):
        assert not hasty.health().reachable
    assert mine.get_into(keys[:1], out) == 0
    assert len(mine.acquire(keys)) == 0
    eventually_failed_again(hasty)
    daemon.resume()
    eventually(lambda: hasty.health().reachable, 10, "the client to be back")
    # All that it holds is with the new session: nothing is left behind until the process ends.
    eventually(lambda: len(sessions(client, "hasty")) == 1, 5, "one session to be left")
    (found,) = sessions(client, "hasty")
    assert found["leased_slots"] == 2
    assert found["granted_slots"] == 2
    assert "quarantined" not in held(client, BLOCK)
    others = fill(client, ns, "others")
    for view, key in zip(views, keys, strict=False):
        assert bytes(view) == block(key, BLOCK)
    for view in slots.views:
        view[:] = b"\xee" * BLOCK
    assert exact(ns, others) > 128
    slots.abort()
    lease.release()
    del view, views
    (found,) = sessions(hasty, "hasty")
    assert (found["leased_slots"], found["granted_slots"]) == (0, 0)
    assert mine.put(new, [block(key, BLOCK) for key in new]).rejected == 0


def eventually_failed_again(client: Client) -> None:
    """Until the client has tried to attach again more than once, and got no answer."""
    keeper = client._transport._keeper  # type: ignore[attr-defined]
    before = keeper._failures
    eventually(lambda: keeper._failures >= before + 2, 10, "further attempts to connect")


def test_slots_that_a_put_is_writing_to_when_its_connection_breaks_are_not_reused(
    client: Client, ns: Namespace, hasty: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = hasty.raw_namespace("rule 3", BLOCK)
    keys = [mine.key(name) for name in names("slow", 4)]
    copying, go_on = threading.Event(), threading.Event()
    copyto = np.copyto

    def slow_copyto(target: Any, source: Any, *more: Any) -> None:
        if threading.current_thread().name == "slow put":
            copyto(target[:4096], source[:4096])
            copying.set()
            assert go_on.wait(60)
        copyto(target, source, *more)

    monkeypatch.setattr(np, "copyto", slow_copyto)
    results: list[Any] = []
    put = threading.Thread(
        target=lambda: results.append(mine.put(keys, [bytes([0xEE]) * BLOCK] * 4)), name="slow put", daemon=True
    )
    put.start()
    try:
        assert copying.wait(20)
        (before,) = sessions(client, "hasty")
        assert before["granted_slots"] == 4
        hasty._transport._session._stream.shut()  # type: ignore[attr-defined]
        eventually(lambda: sessions(client, "hasty")[0]["ended"] or len(sessions(client, "hasty")) > 1, 10, "the end")
        others = fill(client, ns, "others")
        found = pool(client, BLOCK)
        assert found["quarantined"] + found["granted"] >= 4
        assert sum(s["held_bytes"] for s in sessions(client, "hasty")) == 4 * BLOCK
    finally:
        go_on.set()
        put.join(20)
    (result,) = results
    assert (result.stored, result.rejected) == (0, 4)
    assert isinstance(result.error, Unavailable)
    assert exact(ns, others) > 128
    eventually(lambda: hasty.health().reachable, 10, "the client to be back")
    eventually(lambda: [s["held_bytes"] for s in sessions(client, "hasty")] == [0], 5, "its slots to go back")
    assert mine.match(keys).blocks == 0


def test_a_lease_that_ends_while_the_client_attaches_again_is_released(
    client: Client, ns: Namespace, hasty: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = hasty.raw_namespace("rule 3", BLOCK)
    keys = store(mine, names("ends", 2))
    kept, views = mine.acquire(keys[:1]).views, mine.acquire(keys[1:]).views
    call = Session.call

    def call_and_drop(self: Session, request: pb.Request, timeout_s: float | None = None) -> pb.Reply:
        reply = call(self, request, timeout_s)
        if request.hello.resume.leased:
            views.clear()  # after it was named, and before anybody can be told
        return reply

    monkeypatch.setattr(Session, "call", call_and_drop)
    (before,) = sessions(client, "hasty")
    hasty._transport._session._stream.shut()  # type: ignore[attr-defined]
    eventually(lambda: [s["id"] for s in sessions(client, "hasty")] not in ([], [before["id"]]), 10, "a new session")
    eventually(lambda: not views, 10, "the answer to be there")
    eventually(lambda: [s["leased_slots"] for s in sessions(client, "hasty")] == [1], 5, "the other lease to end")
    assert bytes(kept[0]) == block(keys[0], BLOCK)


def test_a_client_that_is_closed_after_a_time_out_leaves_nothing_in_quarantine(
    daemon: RunningDaemon, client: Client, ns: Namespace
) -> None:
    """It stayed there until the process ended, which for an engine is for ever."""
    keys = store(ns, names("held", 4))
    hasty = Client(daemon.endpoint, name="hasty", timeout_s=HASTY_S)
    mine = hasty.raw_namespace("rule 3", BLOCK)
    lease, slots = mine.acquire(keys), mine.reserve(3)
    views = lease.views
    hasty._transport._keeper._retry_at = time.monotonic() + 60  # type: ignore[attr-defined]  # it attaches no more by itself
    daemon.pause()
    session = hasty._transport._session  # type: ignore[attr-defined]
    with pytest.raises(Unavailable):
        session.call(pb.Request(health=pb.HealthRequest()))
    assert session.dead
    daemon.resume()
    eventually(lambda: held(client, BLOCK) == {"quarantined": 3, "leased": 4}, 10, "the quarantine")
    del slots
    with within(IN_TIME_S):
        hasty.close()
    eventually(lambda: held(client, BLOCK) == {"leased": 4}, 5, "what nobody looks at to be free")
    assert [bytes(view) for view in views] == [block(key, BLOCK) for key in keys]
    del lease, views
    eventually(lambda: held(client, BLOCK) == {} and not sessions(client, "hasty"), 5, "the rest to follow its views")


def test_closing_while_the_daemon_stands_still_ends_in_time(daemon: RunningDaemon) -> None:
    hasty = Client(daemon.endpoint, name="hasty", timeout_s=HASTY_S)
    hasty.raw_namespace("rule 3", BLOCK).reserve(1)
    daemon.pause()
    hasty.health()
    with within(IN_TIME_S):
        hasty.close()
    daemon.resume()


def test_a_session_with_all_the_holds_it_may_have_can_be_resumed(
    daemon: RunningDaemon, client: Client, ns: Namespace
) -> None:
    """With more than 131,000 the message that names them was larger than a frame may be: it never came back."""
    largest = pb.Resume(nonce=(1 << 64) - 1, leased=[(1 << 64) - 1] * holds.HOLDS_MAX)
    hello = pb.HelloRequest(protocol=PROTOCOL, client="x" * 128, tenant="x" * 64, resume=largest)
    assert pb.Request(id=(1 << 64) - 1, hello=hello).ByteSize() < FRAME_BYTES_MAX
    keys = store(ns, names("held", 64))
    with Client(daemon.endpoint, name="many") as many:
        mine = many.raw_namespace("rule 3", BLOCK)
        leases = [mine.acquire(keys) for _ in range(holds.HOLDS_MAX // len(keys))]
        for more in (lambda: mine.acquire(keys[:1]), lambda: mine.reserve(1)):
            with pytest.raises(ResourceExhausted, match=f"at most {holds.HOLDS_MAX} together"):
                more()
        many._transport._session._stream.shut()  # type: ignore[attr-defined]
        eventually(lambda: many.health().reachable, 10, "the client to be back")
        (found,) = sessions(client, "many")
        assert found["leased_slots"] == len(keys)
        assert mine.get_into(keys[:1], np.empty(BLOCK, np.uint8)) == 1
        del leases
        eventually(lambda: held(client, BLOCK) == {}, 20, "every hold to be released")


# -- Resume in the wrong hands


def resume(wire: Wire, nonce: int, leased: list[int], granted: list[int]) -> pb.HelloReply:
    request = pb.Resume(nonce=nonce, leased=leased, granted=granted)
    return wire.call(hello=pb.HelloRequest(protocol=PROTOCOL, client="heir", resume=request)).hello


WAITS = RAW + 'hear()\nwire.close()\nsay("closed")\nhear()\n'


@pytest.mark.parametrize("closed", [False, True])
def test_another_process_cannot_take_over_a_session(
    daemon: RunningDaemon, client: Client, ns: Namespace, start_program: Start, closed: bool
) -> None:
    keys = store(ns, names("leased", 2))
    victim, (nonce, granted, leased) = start_raw(start_program, daemon, WAITS, ns, keys)
    if closed:
        victim.ask("close")
        eventually(lambda: held(client, BLOCK).get("quarantined") == 4, 5, "the quarantine")
    before = session(client, "raw")
    with Wire(daemon.socket, hello=False) as thief:
        assert not resume(thief, nonce, leased, granted).resumed
        commit = pb.CommitRequest(namespace_id=1, keys=[b"k" * 32], slots=granted[:1], parents=[b""], depths=[0])
        with pytest.raises(FailedPrecondition, match="not granted"):
            thief.call(commit=commit)
        with pytest.raises(InvalidArgument):
            thief.call(release=pb.ReleaseRequest(slots=leased))
        with pytest.raises(InvalidArgument):
            thief.call(abort=pb.AbortRequest(slots=granted))
    after = session(client, "raw")
    assert before is not None
    assert after is not None
    for what in ("granted_slots", "leased_slots", "held_bytes", "ended"):
        assert after[what] == before[what]


def test_a_nonce_that_nobody_has_resumes_nothing(daemon: RunningDaemon, client: Client) -> None:
    with Wire(daemon.socket, hello=False) as wire:
        assert not resume(wire, 12345, [1 << 32], [1 << 32 | 1]).resumed
        assert wire.call(stats=pb.StatsRequest()).stats.sessions[-1].held_bytes == 0
    with Wire(daemon.socket, hello=False) as wire:
        assert not resume(wire, 0, [], []).resumed


@pytest.fixture
def opened(daemon: RunningDaemon, ns: Namespace) -> Iterator[tuple[Wire, int, list[int], list[int]]]:
    """A session of this process: its socket, nonce, 3 slots to write to and 2 leased ones."""
    keys = store(ns, names("leased", 2))
    with Wire(daemon.socket, hello=False) as wire:
        nonce = wire.call(hello=pb.HelloRequest(protocol=PROTOCOL, client="old")).hello.nonce
        number = wire.call(
            open_namespace=pb.OpenNamespaceRequest(digest=ns.digest, block_bytes=BLOCK, label="old")
        ).open_namespace.namespace_id
        granted = list(wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=3)).reserve.slots)
        leased = list(wire.call(acquire=pb.AcquireRequest(namespace_id=number, keys=keys)).acquire.slots)
        yield wire, nonce, granted, leased


Opened = tuple[Wire, int, list[int], list[int]]


def test_slots_that_were_never_held_cannot_be_resumed_and_nothing_changes(
    daemon: RunningDaemon, client: Client, opened: Opened
) -> None:
    wire, nonce, granted, leased = opened
    sessions_before = len(client.stats()["sessions"])
    for too_much in ([*leased, leased[0]], [granted[0]], [1 << 40], [(1 << 64) - 1]):
        with Wire(daemon.socket, hello=False) as heir:
            with pytest.raises(InvalidArgument, match="did not hold slot"):
                resume(heir, nonce, too_much, granted)
            with pytest.raises(FailedPrecondition, match="first request of a session is Hello"):
                heir.call(health=pb.HealthRequest())
    assert wire.call(health=pb.HealthRequest()).health.healthy, "the old session goes on"
    assert len(client.stats()["sessions"]) == sessions_before
    found = session(client, "old")
    assert found is not None
    assert (found["granted_slots"], found["leased_slots"], found["ended"]) == (3, 2, False)


def test_what_is_not_named_is_freed_and_what_was_never_granted_is_passed_over(
    daemon: RunningDaemon, client: Client, opened: Opened
) -> None:
    wire, nonce, granted, leased = opened
    with Wire(daemon.socket, hello=False) as heir:
        assert resume(heir, nonce, leased[:1], [granted[0], granted[0] + 1000, 1 << 50]).resumed
        assert wire.receive() is None, "the old socket is hung up"
        found = session(client, "heir")
        assert found is not None
        assert (found["granted_slots"], found["leased_slots"], found["ended"]) == (1, 1, False)
        assert session(client, "old") is None
        assert pool(client, BLOCK)["leased"] == 1
        heir.call(abort=pb.AbortRequest(slots=granted[:1]))
        heir.call(release=pb.ReleaseRequest(slots=leased[:1]))


def test_a_session_is_resumed_by_its_old_name_when_the_answer_with_the_new_one_never_arrived(
    daemon: RunningDaemon, client: Client, opened: Opened
) -> None:
    """A client that gave up waiting for Hello's reply knows no other name of its session than the first."""
    wire, nonce, granted, leased = opened
    wire.close()
    for _ in range(3):
        with Wire(daemon.socket, hello=False) as lost:
            assert resume(lost, nonce, leased, granted).resumed  # and this reply is the one that gets lost
    with Wire(daemon.socket, hello=False) as heir:
        assert resume(heir, nonce, leased, granted).resumed
        (found,) = sessions(client, "heir")
        assert (found["granted_slots"], found["leased_slots"]) == (3, 2)
        assert "quarantined" not in held(client, BLOCK)
        heir.call(abort=pb.AbortRequest(slots=granted))
        heir.call(release=pb.ReleaseRequest(slots=leased))
    eventually(lambda: held(client, BLOCK) == {}, 5, "all of it to be free")


def test_a_hello_whose_sender_has_hung_up_takes_nothing_over(
    daemon: RunningDaemon, client: Client, opened: Opened
) -> None:
    """It lay in the socket of a daemon that stood still, and whoever sent it has attached by another one since."""
    _, nonce, granted, leased = opened
    daemon.pause()
    with Wire(daemon.socket, hello=False) as heir:
        request = pb.Resume(nonce=nonce, leased=leased, granted=granted)
        heir.post(1, hello=pb.HelloRequest(protocol=PROTOCOL, client="heir", resume=request))
        for _ in range(3):
            with Wire(daemon.socket, hello=False) as stale:
                stale.post(1, hello=pb.HelloRequest(protocol=PROTOCOL, client="stale", resume=request))
        daemon.resume()
        reply = heir.receive()
        assert reply is not None
        assert reply.hello.resumed
        assert heir.call(health=pb.HealthRequest()).health.healthy, "its socket is open"
        eventually(lambda: not sessions(client, "stale"), 5, "nothing of the stale ones to be left")
        (found,) = sessions(client, "heir")
        assert (found["granted_slots"], found["leased_slots"], found["ended"]) == (3, 2, False)
        heir.call(abort=pb.AbortRequest(slots=granted))
        heir.call(release=pb.ReleaseRequest(slots=leased))
