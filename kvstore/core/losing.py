"""What was on the SSD is not there any more: its directory was set aside, deleted or replaced.

First nothing is begun any more (`Link.away`) and what is under way ends. What does not end in
time is left behind: its place among what is under way and its extent are free, since nobody
writes to those files any more, but its slot in memory is not until its worker reports (rule 5).
Then rows and files go, in steps, while memory serves.
"""

from kvstore.core.block import NONE, SEALED
from kvstore.core.holds import Tenant
from kvstore.core.in_order import InOrder
from kvstore.core.link import Link
from kvstore.core.loads import Loads
from kvstore.core.verify import Verification
from kvstore.core.writeback import WriteBack

WHY = "the SSD's directory is not in use any more"


class Losing:
    """Of one SSD, as often as it happens."""

    def __init__(
        self, link: Link, loads: Loads, writes: WriteBack, reports: InOrder, verification: Verification
    ) -> None:
        self.link = link
        self._loads = loads
        self._writes = writes
        self._reports = reports
        self._verification = verification
        self._at = 0
        """Row at which the next step goes on."""
        self._only_there = 0
        self._read_into: dict[int, tuple[Tenant, int]] = {}
        """Reads left behind, by number -> whose slot they have."""
        self._written_from: dict[int, tuple[Tenant, int]] = {}
        """The same of writes."""

    @property
    def left_behind(self) -> int:
        """Jobs whose slots in memory are not free because their worker has not reported."""
        return len(self._read_into) + len(self._written_from)

    def leave_behind(self) -> None:
        """Gives up what is under way; `ended_late` hears of its end. Whatever was to be begun is not."""
        assert self.link.away, "jobs are left behind of an SSD in use"
        segments = self.link.disk.segments
        self.link.disk.room.give_up()
        self._read_into.update(self._loads.leave_behind(WHY))
        self._reports.catch_up()  # of these no report comes any more
        self._written_from.update(self._writes.leave_behind(WHY))
        self._verification.leave_behind()
        for number in list(segments.making):
            segments.failed(number)
        segments.jobs.clear()
        self._writes.room_came()

    def ended_late(self, number: int) -> bool:
        """The report of a job, whatever it says: True if it is one that was left behind."""
        link = self.link
        if number in self._read_into:
            link.on_memory.give_back(*self._read_into.pop(number))
        elif number in self._written_from:
            link.on_memory.release(*self._written_from.pop(number))
        else:
            return False
        return True

    def step(self, rows_max: int) -> bool:
        """Loses what is among so many rows, then one file at a time; True if there is more."""
        link, disk = self.link, self.link.disk
        assert link.away, "an SSD in use is lost"
        assert not self._loads.under_way, "a directory is lost while it is read"
        assert not self._verification.jobs, "a directory is lost while it is verified"
        assert not disk.segments.making, "a directory is lost while a file is made in it"
        if self._writes.know_less(rows_max):
            return True
        table = disk.table
        stop = min(self._at + rows_max, len(table))
        for row in range(self._at, stop):
            key = table.key[row]
            if table.state[row] == SEALED and key is not None:
                memory = link.joined.memory_of[table.namespace[row]]
                self._only_there += link.memory_row((memory.id, key)) == NONE
                disk.tree.drop(row)
        self._at = stop
        return stop < len(table) or self._drop_file()

    def take_count(self) -> int:
        """How many of the blocks that went since the last call were nowhere else."""
        count, self._only_there = self._only_there, 0
        return count

    def _drop_file(self) -> bool:
        """After the last row."""
        segments = self.link.disk.segments
        if segments.adopting:
            segments.adopted(next(iter(segments.adopting)))
        elif segments.live:
            segments.drop(next(iter(segments.live.values())))
            segments.jobs.clear()  # what is lost is not deleted
        if segments.live:
            return True
        self._at = 0
        self.link.packed.lose_all()
        return False
