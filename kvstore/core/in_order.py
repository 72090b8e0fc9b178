"""Reports of writes, parents before children.

Two writers end in any order. A child that is on the SSD before its parent is an orphan there, and
orphans go first: the next write that needs room would take what was just written. So the report
of a child waits until that of its parent is here, which is already on its way.
"""

from typing import NamedTuple

from kvstore.core.writeback import WriteBack


class Report(NamedTuple):
    number: int
    checksum: int
    error: str
    now: float
    packed: int


class InOrder:
    """Between the workers' reports and `WriteBack.wrote`."""

    def __init__(self, writes: WriteBack) -> None:
        self._writes = writes
        self._behind: dict[int, list[Report]] = {}
        """Number of a write that has not been reported -> reports that wait for it. Never more than are under way."""
        self._waiting: set[int] = set()

    def wrote(self, report: Report) -> None:
        """Takes it at once, or when the nearest ancestor that is still being written was reported."""
        ready = [report]
        while ready:
            first = ready.pop()
            awaited = self._awaited(first.number)
            if awaited is not None:
                self._waiting.add(first.number)
                self._behind.setdefault(awaited, []).append(first)
                continue
            self._waiting.discard(first.number)
            self._writes.wrote(*first)
            ready += self._behind.pop(first.number, ())

    def catch_up(self) -> None:
        """Takes what waits, in any order: what it waits for is given up."""
        reports = [report for behind in self._behind.values() for report in behind]
        self._behind.clear()
        self._waiting.clear()
        for report in reports:
            self._writes.wrote(*report)

    def _awaited(self, number: int) -> int | None:
        """The write to wait for. A circle of parents, which a client may have made up, is not waited for."""
        at = self._parent(number)
        for _ in range(len(self._waiting) + 1):
            if at is None or at == number:
                return None
            if at not in self._waiting:
                return at
            at = self._parent(at)
        return None

    def _parent(self, number: int) -> int | None:
        """The number of the write of its parent, if that is under way."""
        writing = self._writes.under_way[number]
        return self._writes.numbers.get((writing.block[0], writing.job.parent))
