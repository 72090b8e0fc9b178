"""A caller who does not want to wait: its short time-out is not the daemon's death."""

import threading

from kvstore_client import Client
from tests.conftest import RunningDaemon
from tests.nodes import block

BLOCK = 4096


def test_an_acquire_with_a_short_time_out_does_not_cost_the_session_where_the_daemon_is_slow(
    daemon: RunningDaemon,
) -> None:
    with Client(daemon.endpoint, timeout_s=40.0) as client:
        ns = client.raw_namespace("short", BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(8)]
        blocks = [block(key, BLOCK) for key in keys]
        assert ns.put(keys, blocks).stored == 8
        session = client._transport._session  # type: ignore[attr-defined]
        daemon.pause()
        resume = threading.Timer(0.2, daemon.resume)
        resume.start()
        with ns.acquire(keys, timeout_s=0.01) as lease:
            assert [bytes(view) for view in lease.views] == blocks
        resume.join()
        assert ns.get(keys) == blocks
        assert client._transport._session is session  # type: ignore[attr-defined]
        assert not session.dead
