"""What LMCache's lookups keep in memory until it was loaded: leases, by the keys that LMCache unlocks.

A lock is let go of when its last key is unlocked, or LOCK_S after it was taken, whether or not anybody calls by then.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvstore_client import Lease, Namespace
from kvstore_client.connectors.parts import SMALLER
from kvstore_client.errors import KVStoreError, ResourceExhausted

log = logging.getLogger("kvstore_client")

LOCK_S = 30.0
"""A lock that nobody took back is given up then: what it held may be evicted again."""

LEAST_S = 0.01
"""Of a wait: none is asked for, or looked at again, in less."""


class _Lock:
    """A lease of some objects, let go of with the last of them."""

    __slots__ = ("keys", "lease", "left", "since")

    def __init__(self, lease: Lease, keys: Sequence[Any]) -> None:
        self.lease = lease
        self.keys = keys
        self.left = len(keys)
        self.since = time.monotonic()


class Locks:
    """All locks of one adapter. Safe to use from many threads."""

    def __init__(self) -> None:
        self._state = threading.Lock()
        self._of: dict[Any, list[_Lock]] = {}
        self._held: dict[_Lock, None] = {}
        """The oldest first."""
        self._timer: threading.Timer | None = None
        self._closed = False

    def __len__(self) -> int:
        """How many keys are locked."""
        with self._state:
            return len(self._of)

    def hold(self, namespace: Namespace, names: Sequence[bytes], keys: Sequence[Any], until: float) -> None:
        """Locks as many leading objects as may be held; `until` is when nobody waits any longer."""
        at, part = 0, len(names)
        while at < len(names) and (left_s := until - time.monotonic()) > 0:
            wanted = min(part, len(names) - at)
            try:
                lease = namespace.acquire(names[at : at + wanted], max(left_s, LEAST_S))
            except ResourceExhausted:
                if wanted == 1:
                    return
                part = max(wanted // SMALLER, 1)
                continue
            except KVStoreError as e:
                log.debug("%d objects are found without a lock: %s", len(names) - at, e)
                return
            if not len(lease):
                return
            self._add(_Lock(lease, keys[at : at + len(lease)]))
            at += len(lease)

    def _add(self, lock: _Lock) -> None:
        with self._state:
            if self._closed:
                lock.lease.release()
                return
            self._held[lock] = None
            for key in lock.keys:
                self._of.setdefault(key, []).append(lock)
            self._watch()

    def release(self, keys: Sequence[Any]) -> None:
        """Ends one lock of each key; the last of a lease lets go of it."""
        with self._state:
            for key in keys:
                locks = self._of.get(key)
                if not locks:
                    continue  # it was found without a lock, or the lock grew too old
                lock = locks.pop(0)
                lock.left -= 1
                if not lock.left:
                    lock.lease.release()
                    del self._held[lock]
                if not locks:
                    del self._of[key]

    def _watch(self) -> None:
        """Sees to it that the oldest lock ends in time; under `_state`."""
        oldest = next(iter(self._held), None)
        if self._timer is None and oldest is not None and not self._closed:
            in_s = max(oldest.since + LOCK_S - time.monotonic(), LEAST_S)
            self._timer = threading.Timer(in_s, self._drop_old)
            self._timer.daemon = True
            self._timer.start()

    def _drop_old(self) -> None:
        until = time.monotonic() - LOCK_S
        with self._state:
            self._timer = None
            try:
                for old in [lock for lock in self._held if lock.since <= until]:
                    self._forget(old)
            finally:
                self._watch()  # of those that are left, also if one could not be let go of

    def _forget(self, old: _Lock) -> None:
        del self._held[old]
        old.lease.release()
        for key in old.keys:
            others = [lock for lock in self._of.pop(key, []) if lock is not old]
            if others:
                self._of[key] = others

    def close(self) -> None:
        """Lets go of all."""
        with self._state:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            for lock in list(self._held):
                self._forget(lock)
