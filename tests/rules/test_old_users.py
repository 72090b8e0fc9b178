"""Rule 2: no slot is given back by an earlier user of it, and a view is held as long as it can be read.

Both were met by trying to break the store: a wrong byte was served.
"""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore_client import Client, KVStoreError
from tests.conftest import RunningDaemon, eventually

BLOCK = 64 << 10


def test_an_array_of_a_lost_commit_does_not_give_back_the_slots_next_use(
    start_daemon: Callable[..., RunningDaemon],
) -> None:
    daemon = start_daemon(host__size="8MiB")
    with Client(daemon.endpoint, timeout_s=2.0) as first, Client(daemon.endpoint) as second:
        ns, other = first.raw_namespace("old", BLOCK), second.raw_namespace("old", BLOCK)
        key = [ns.key(b"lost")]
        slots = ns.reserve(1)
        array = np.frombuffer(slots.views[0], np.uint8)
        array[:] = 1
        daemon.pause()
        with contextlib.suppress(KVStoreError):
            slots.commit(key)
        daemon.resume()
        eventually(lambda: first.health().reachable, 20, "the client to attach again")
        assert ns.match(key).blocks == 1, "the daemon stored it, only the answer was lost"
        assert ns.remove(key) == 1
        again = ns.reserve(1)
        del array, slots
        gc.collect()
        keys = [other.key(b"%d" % i) for i in range(40)]
        for one in keys:
            other.put([one], np.full(BLOCK, 2, np.uint8))
        again.views[0][:] = bytes([3]) * BLOCK  # still reserved, so nobody else's
        out = np.zeros(BLOCK, np.uint8)
        for one in keys:
            assert other.get_into([one], out) == 0 or bool((out == 2).all())
        again.abort()


def test_a_view_in_a_garbage_cycle_is_held_until_the_last_finalizer_is_done(
    start_daemon: Callable[..., RunningDaemon],
) -> None:
    daemon = start_daemon(host__size="8MiB")
    saved: list[Any] = []

    class Node:
        view: memoryview
        me: "Node"

        def __del__(self) -> None:
            saved.append(self.view)

    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("cycle", BLOCK)
        key = [ns.key(b"held")]
        ns.put(key, np.full(BLOCK, 7, np.uint8))
        node = Node()
        node.me, node.view = node, ns.acquire(key).views[0]
        del node
        gc.collect()
        assert len(saved) == 1
        ns.remove(key)
        for i in range(200):
            ns.put([ns.key(b"%d" % i)], np.full(BLOCK, 99, np.uint8))
        assert bytes(saved[0]) == bytes([7]) * BLOCK
        saved.clear()
