"""Waits that end in time."""

import contextlib
import threading
import time
from collections.abc import Iterator

from kvstored.v1.errors import Unavailable


def seconds_left(until: float) -> float:
    """Seconds until then; never none, which would mean the usual time-out."""
    return max(until - time.monotonic(), 1e-3)


@contextlib.contextmanager
def locked(lock: threading.Lock, timeout_s: float) -> Iterator[None]:
    """A lock, in time: in a row of many threads, each would wait for all before it. Raises Unavailable."""
    if not lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
        raise Unavailable(f"other calls of this process were not over within {timeout_s:.1f} s")
    try:
        yield
    finally:
        lock.release()
