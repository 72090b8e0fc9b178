"""A client that is gone, however it went, leaves nothing out of use while its process lives on.

What a dead session held is kept from others until its process says what it still uses of it,
or exits, which for an engine is for ever.
"""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from kvstore_client import Client, Namespace, Unavailable, admin, farewell, keeper
from kvstore_client.farewell import Arguments
from kvstore_client.keeper import Keeper
from kvstore_client.session import Session
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running
from tests.rules.processes import held, names, sessions, store

BLOCK = 16 << 10
WAIT_S = 30.0
PATIENT_S, HASTY_S = 10.0, 0.3
"""For a call: of a daemon that is to answer, however busy the machine, and of one that stands still."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running(host__size="4MiB") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.endpoint, name="watch", timeout_s=PATIENT_S) as client:
        yield client


@pytest.fixture
def ns(client: Client) -> Namespace:
    return client.raw_namespace("farewell", BLOCK)


def keeper_of(client: Client) -> Keeper:
    return client._transport._keeper  # type: ignore[attr-defined,no-any-return]


def timed_out(daemon: RunningDaemon) -> Client:
    """A client that holds 3 slots and has mapped memory, whose session has died of a time-out."""
    hasty = Client(daemon.endpoint, name="hasty", timeout_s=PATIENT_S)
    keeper_of(hasty)._retry_at = time.monotonic() + 3600  # it attaches no more by itself
    session = keeper_of(hasty).session
    assert session is not None
    slots = hasty.raw_namespace("farewell", BLOCK).reserve(3)
    session.timeout_s = keeper_of(hasty)._timeout_s = HASTY_S
    daemon.pause()
    with contextlib.suppress(Unavailable):
        session.call(pb.Request(health=pb.HealthRequest()))
    eventually(lambda: session.dead, WAIT_S, "the time-out")  # perhaps of a call of its thread's
    assert "no answer within" in session.dead
    del slots
    return hasty


def gone(client: Client) -> bool:
    return held(client, BLOCK) == {} and not sessions(client, "hasty")


WAYS: dict[str, Callable[[Client], None]] = {
    "dropped": lambda client: None,
    "in a cycle": lambda client: client.__dict__.update(me=client),
    "closed": lambda client: client.close(),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("when", ["while it stands still", "when it goes on"])
def test_a_client_whose_session_died_of_a_time_out_leaves_nothing_in_quarantine(
    daemon: RunningDaemon, client: Client, ns: Namespace, way: Callable[[Client], None], when: str
) -> None:
    """Only a close() that the daemon answered did; others stayed in quarantine until the process ended."""
    store(ns, names("any", 1))
    hasty = [timed_out(daemon)]
    try:
        if when == "when it goes on":
            daemon.resume()
            eventually(lambda: held(client, BLOCK) == {"quarantined": 3}, WAIT_S, "the quarantine")
        way(hasty[0])
        alive = weakref.ref(keeper_of(hasty[0]))
        hasty.clear()
        gc.collect()
        eventually(lambda: alive() is None, WAIT_S, "its thread, which may be at work for it, to let go of it")
    finally:
        daemon.resume()
    eventually(lambda: gone(client), WAIT_S, "what it held to be free")


def test_a_session_that_ends_after_its_client_was_dropped_follows_the_last_view(
    daemon: RunningDaemon, client: Client, ns: Namespace
) -> None:
    keys = store(ns, names("viewed", 2))
    views = leased(daemon, keys)
    (found,) = sessions(client, "hasty")
    assert admin.end_session(client, found["id"]).found
    eventually(lambda: [s["id"] for s in sessions(client, "hasty")] not in ([], [found["id"]]), WAIT_S, "an heir")
    assert held(client, BLOCK)["leased"] == 2
    assert [bytes(view) for view in views] == [block(key, BLOCK) for key in keys]
    views.clear()
    eventually(lambda: gone(client), WAIT_S, "the leases to follow the views")


def leased(daemon: RunningDaemon, keys: list[bytes]) -> list[memoryview]:
    """Views of a client that nobody has any more."""
    return (
        Client(daemon.endpoint, name="hasty", timeout_s=PATIENT_S).raw_namespace("farewell", BLOCK).acquire(keys).views
    )


def test_it_gives_up_after_a_time_and_the_thread_ends(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def hurry(session: Session, arguments: Arguments) -> None:
        path, client, tenant, _, read_only = arguments
        farewell.see_off(session, (path, client, tenant, HASTY_S, read_only))

    monkeypatch.setattr(keeper, "see_off", hurry)
    monkeypatch.setattr(farewell, "FAREWELL_S", 0.5)
    hasty = timed_out(daemon)
    thread = keeper_of(hasty)._thread
    try:
        del hasty
        gc.collect()
        thread.join(WAIT_S)
        assert not thread.is_alive()
    finally:
        daemon.resume()
    assert "what a closed client held stays out of use" in caplog.text


def test_clients_that_come_and_go_leave_no_thread(daemon: RunningDaemon) -> None:
    before = threading.active_count()
    for turn in range(40):
        client = Client(daemon.endpoint if turn % 2 else "unix:///nowhere/kv.sock", name="passing", timeout_s=PATIENT_S)
        if turn % 4 < 2:
            client.close()
    del client
    eventually(lambda: threading.active_count() <= before, WAIT_S, "the threads to end")


def test_the_thread_of_a_dropped_client_hears_of_it_at_once(daemon: RunningDaemon) -> None:
    """It slept on, for as long as it would have before it looked for the daemon again."""
    client = Client(daemon.endpoint, name="passing", timeout_s=PATIENT_S)
    thread, session, asleep = keeper_of(client)._thread, keeper_of(client).session, keeper_of(client)._wake
    assert session is not None
    keeper_of(client)._retry_at = time.monotonic() + 3600
    session.die("for the test")
    looks, wait = threading.Event(), asleep.wait

    def slept(timeout_s: float) -> None:
        if timeout_s > 1000:
            looks.set()
        wait(timeout_s)

    asleep.wait = slept  # type: ignore[method-assign]
    asleep.set()
    assert looks.wait(WAIT_S)
    del client
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()
