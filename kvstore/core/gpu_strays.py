"""Processes that may have work on a device and no session of its store: where to, or since when, nobody is told.

Those whose session here was lost with the device, which says nothing of their kernels where the
device hung for this daemon alone; those that were told of the device, and may write to memory
from there without ever holding a slot on it; and those of the daemon before this one. They are
known until the device says that nothing of them runs there (`AwaitQuiet`); no clock ends that.
"""

from collections.abc import Iterable

from kvstore.core.gpu_jobs import AwaitQuiet
from kvstore.core.gpu_link import GpuLink
from kvstore.core.holds import Session

Process = tuple[int, int]
"""Number, and start in ticks since boot."""


class Strays:
    """Of one device, whatever becomes of it."""

    def __init__(self, link: GpuLink) -> None:
        self._link = link
        self.known: set[Process] = set()
        self._ask: dict[Process, float] = {}
        """Those that are gone -> when to ask (again)."""
        self._asking: dict[int, Process] = {}
        """Number of an AwaitQuiet -> whom it is about."""

    def add(self, pid: int, born: int) -> None:
        """It may have work on the device from now on."""
        self.known.add((pid, born))

    def gone(self, pid: int, born: int) -> None:
        """It has exited, or nobody will tell when it does: the device is asked."""
        process = pid, born
        if process in self.known and process not in self._asking.values():
            self._ask.setdefault(process, 0.0)

    def quiet(self, pid: int, born: int) -> None:
        """Nothing of it runs there any more."""
        self.known.discard((pid, born))
        self._ask.pop((pid, born), None)

    def ask(self, now: float) -> None:
        """Adds the jobs that are due."""
        for process in [process for process, at in self._ask.items() if now >= at]:
            del self._ask[process]
            number = self._link.number()
            self._asking[number] = process
            self._link.counts.quiet_asked += 1
            self._link.jobs.append(AwaitQuiet(number, *process))

    def answered(self, number: int, error: str, again: float) -> bool:
        """The report of an AwaitQuiet; whether it was one of these. If it could not be told: asked at `again`."""
        process = self._asking.pop(number, None)
        if process is None:
            return False
        if error:
            if process in self.known:
                self._ask[process] = again
        else:
            self.quiet(*process)
        return True

    def lost(self, sessions: Iterable[tuple[Session, bool]]) -> None:
        """The device is, and with it these sessions; True with those whose process it was being asked about.

        Whom it was being asked about, it is asked about when it is back.
        """
        self._ask.update(dict.fromkeys(self._asking.values(), 0.0))
        self._asking.clear()
        for session, asked in sessions:
            self.add(session.pid, session.born)
            if asked:
                self.gone(session.pid, session.born)
