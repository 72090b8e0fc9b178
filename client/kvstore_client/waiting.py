"""Waits that end in time."""

import threading
import time
from collections.abc import Callable

from kvstored.v1.errors import Unavailable


def seconds_left(until: float) -> float:
    """Seconds until then; never none, which would mean the usual time-out."""
    return max(until - time.monotonic(), 1e-3)


def acquired(lock: threading.Lock, timeout_s: float) -> bool:
    """Takes a lock, in time, and never without saying so.

    An exception of a signal handler (KeyboardInterrupt) is raised after a call, before its
    answer is kept: with `if lock.acquire(): try:` the lock was held for ever. No handler runs
    while an iterator is unpacked, nor between `return` and the caller's `try`.
    """
    (got,) = map(lock.acquire, (True,), (min(timeout_s, threading.TIMEOUT_MAX),))
    return got


class locked:  # noqa: N801 (used as a statement)
    """A lock, in time: in a row of many threads, each would wait for all before it. Raises Unavailable.

    In a signal handler whose own thread has the lock, it would be waited for without end.
    """

    __slots__ = ("_lock", "_timeout_s")

    def __init__(self, lock: threading.Lock, timeout_s: float) -> None:
        self._lock = lock
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        if not acquired(self._lock, self._timeout_s):
            raise Unavailable(f"other calls of this process were not over within {self._timeout_s:.3g} s")

    @property
    def __exit__(self) -> Callable[..., None]:
        """The lock's own, not a function of Python's, at whose start an exception may come from a signal handler."""
        return self._lock.__exit__
