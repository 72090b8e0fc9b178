"""Rule 4, where memory outlives the daemon: a client that is closed while there is none leaves nothing behind.

Its process lives on, so nothing but its own word tells the next daemon that it uses nothing any more.
"""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore_client import Client, farewell
from tests.conftest import RunningDaemon, eventually
from tests.daemon.test_warm_restart import place, put  # noqa: F401 (a fixture)
from tests.rules.processes import held, sessions

BLOCK = 16 << 10
WAIT_S = 30.0


@pytest.mark.parametrize("way", ["closed", "dropped"])
def test_what_a_client_held_is_free_soon_after_a_daemon_is_back_that_it_was_closed_without(
    start_daemon: Callable[..., RunningDaemon],
    place: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """However long that takes: the time for a farewell is of a daemon that does not answer, not of one that is away."""
    monkeypatch.setattr(farewell, "FAREWELL_S", 0.01)
    daemon = start_daemon(host__size="4MiB", host__persist=str(place))
    clients = [Client(daemon.endpoint, name="closed", timeout_s=2.0)]
    ns = clients[0].raw_namespace("meanwhile", BLOCK)
    keys = [ns.key(b"%d" % n) for n in range(4)]
    assert put(ns, keys) == 4
    lease, slots = ns.acquire(keys), ns.reserve(2)
    assert (len(lease.views), len(slots)) == (4, 2)
    daemon.kill()
    eventually(lambda: not clients[0].health().reachable, WAIT_S, "the client to see it")
    thread = clients[0]._transport._keeper._thread  # type: ignore[attr-defined]
    if way == "closed":
        clients[0].close()
    del lease, slots, ns
    clients.clear()
    gc.collect()
    thread.join(0.5)
    assert thread.is_alive(), "it has given up"
    daemon.restart()
    with Client(daemon.endpoint, name="watch") as watch:
        eventually(lambda: held(watch, BLOCK) == {}, WAIT_S, "what it held to be free")
        # Its last session has said what it uses, which is nothing, and goes with its next message.
        eventually(lambda: not sessions(watch, "closed"), WAIT_S, "its session to go")
    thread.join(WAIT_S)
    assert not thread.is_alive()
