"""Waits that end in time."""

import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from kvstored.v1.errors import Unavailable


def seconds_left(until: float) -> float:
    """Seconds until then; never none, which would mean the usual time-out."""
    return max(until - time.monotonic(), 1e-3)


class InTheMiddle(Unavailable):
    """The call comes from a signal handler, or a finalizer, in the middle of another of this thread's: no wait helps.

    It says nothing of the daemon.
    """

    def __init__(self) -> None:
        super().__init__("this thread is in the middle of another call of this client, as in a signal handler")


def is_mine(lock: threading.RLock) -> bool:
    """Whether this thread has it."""
    mine: bool = lock._is_owned()  # type: ignore[attr-defined]
    return mine


def acquired(lock: threading.RLock, timeout_s: float) -> bool:
    """Takes a lock, in time, and never without saying so; never twice, and does not wait for this thread itself.

    An RLock, because it knows its owner: in a signal handler whose own thread has it, it
    would be waited for in vain.

    An exception of a signal handler (KeyboardInterrupt) is raised after a call, before its
    answer is kept: with `if lock.acquire(): try:` the lock was held for ever. No handler runs
    while an iterator is unpacked, nor between `return` and the caller's `try`.
    """
    if is_mine(lock):
        return False
    (got,) = map(lock.acquire, (True,), (min(timeout_s, threading.TIMEOUT_MAX),))
    if not got:  # a signal handler may have used up the time, and then it was not looked at again
        (got,) = map(lock.acquire, (False,))
    return got


class locked:  # noqa: N801 (used as a statement)
    """A lock, in time: in a row of many threads, each would wait for all before it. Raises Unavailable.

    In a signal handler whose own thread has the lock: InTheMiddle, at once.
    """

    __slots__ = ("_lock", "_timeout_s")

    def __init__(self, lock: threading.RLock, timeout_s: float) -> None:
        self._lock = lock
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        if not acquired(self._lock, self._timeout_s):
            if is_mine(self._lock):
                raise InTheMiddle
            raise Unavailable(f"other calls of this process were not over within {self._timeout_s:.3g} s")

    @property
    def __exit__(self) -> Callable[..., None]:
        """The lock's own, not a function of Python's, at whose start an exception may come from a signal handler."""
        return self._lock.__exit__


class Wake:
    """How a thread that waits is called: `threading.Event`, without its lock.

    An exception of a signal handler can end Event.set() just when it has that lock, which is never
    given back then, and the next call waits for ever. A SimpleQueue has none in Python, and its
    put may be called in the middle of itself.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Ends the wait there is, or the next one. Never waits."""
        if self._calls.empty():
            self._calls.put(None)

    def wait(self, timeout_s: float) -> None:
        """Until it is called, at most so long; what was called meanwhile counts once."""
        with contextlib.suppress(Empty):
            self._calls.get(timeout=timeout_s)
        while not self._calls.empty():
            self._calls.get()
