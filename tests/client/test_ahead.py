"""Calls that never wait for the daemon: a namespace made without telling it, a match from shared memory alone."""

import time
from collections.abc import Callable

from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually

BLOCK = 4096
AT_ONCE_S = 3.0
"""Far below the client's time-out."""


def test_a_daemon_that_stands_still_is_not_waited_for(daemon: RunningDaemon) -> None:
    with Client(daemon.endpoint, timeout_s=15.0) as writer, Client(daemon.endpoint, timeout_s=15.0) as client:
        stored = writer.raw_namespace("a", BLOCK)
        keys = [stored.key(bytes([i])) for i in range(20)]
        stored.put(keys, [bytes([i]) * BLOCK for i in range(20)])
        daemon.pause()
        try:
            began = time.monotonic()
            ns = client.raw_namespace("a", BLOCK, ahead=False)
            assert client.connected
            assert ns.match(keys, wait=False).blocks == 20
            assert client.raw_namespace("b", BLOCK, ahead=False).match(keys, wait=False).blocks == 20, "keys say whose"
            assert time.monotonic() - began < AT_ONCE_S
        finally:
            daemon.resume()
        # What was not told ahead is told with the first call that needs it.
        late = client.raw_namespace("late", BLOCK, ahead=False)
        assert late.put([late.key(b"x")], [bytes(BLOCK)]).stored == 1
        assert late.get([late.key(b"x")]) == [bytes(BLOCK)]


def test_a_client_says_whether_it_is_connected(start_daemon: Callable[..., RunningDaemon]) -> None:
    daemon = start_daemon()
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("a", BLOCK)
        keys = [ns.key(b"x")]
        ns.put(keys, [bytes(BLOCK)])
        assert client.connected
        daemon.kill()
        assert not client.connected
        assert ns.match(keys, wait=False).blocks == 0
        daemon.restart()
        eventually(lambda: client.connected, 10, "the client to be connected again")
        assert ns.match(keys, wait=False).blocks == 0
        assert ns.put(keys, [bytes(BLOCK)]).stored == 1
        assert ns.match(keys, wait=False).blocks == 1
    assert not client.connected
