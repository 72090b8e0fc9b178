"""How long something took, less the time in which this process itself had no turn.

A promise like "a health check is answered within half a second" is about the daemon. A machine that stands still for a
while, or a group of processes whose share of the processor is used up, stops who measures as well: a thread that wakes
every TICK_S sees it, and that time does not count. What holds Python's lock in this process stops that thread too, so
this is for calls that wait for another process, not for what a native call does here.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

TICK_S = 0.01
LATE_S = 0.03
"""A turn that comes so late is no stall yet: threads of this process wait for one another."""


class _Stalls:
    """Seconds without a turn, since the first use in this process."""

    def __init__(self) -> None:
        self._pid = 0
        self._starting = threading.Lock()
        self._lost_s, self._turn = 0.0, 0.0

    def seconds(self) -> float:
        """Until now; a stall that has just ended may not have been seen by the thread yet, and counts as well."""
        with self._starting:
            if self._pid != os.getpid():  # a forked child has no such thread
                self._pid, self._turn = os.getpid(), time.monotonic()
                threading.Thread(target=self._work, name="stopwatch", daemon=True).start()
        lost_s, turn = self._lost_s, self._turn
        return lost_s + _beyond(time.monotonic() - turn)

    def _work(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(TICK_S)
            now = time.monotonic()
            self._lost_s += _beyond(now - self._turn)
            self._turn = now


def _beyond(gap_s: float) -> float:
    return gap_s - TICK_S if gap_s > TICK_S + LATE_S else 0.0


_stalls = _Stalls()


class Stopwatch:
    """Runs from its making on, or from the last `restart`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._lost_s, self._began = _stalls.seconds(), time.monotonic()

    @property
    def seconds(self) -> float:
        """Until now."""
        gone_s = time.monotonic() - self._began
        return max(gone_s - (_stalls.seconds() - self._lost_s), 0.0)


def took(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    watch = Stopwatch()
    call()
    return watch.seconds


_stalls.seconds()
