"""A device that is lost: an Xid, a driver that restarts, a context that a fault has ended.

Its memory is gone, so nobody can touch a slot of it any more, and all sessions on it end at once.
Whoever waits for it is answered. Copies under way are left behind: their place among what is
under way and their slot on the device are free, but the slot of memory is not before the worker
reports (rule 5). Then sessions, rows and segments go in steps, while memory and SSD serve.
"""

from kvstore.core.block import SEALED
from kvstore.core.gpu_commits import PendingCommits
from kvstore.core.gpu_down import CopyDowns
from kvstore.core.gpu_jobs import WatchEvent
from kvstore.core.gpu_link import GpuLink
from kvstore.core.gpu_tickets import GpuTickets
from kvstore.core.holds import Session, Tenant


class GpuLosing:
    """Of one device, as often as it happens."""

    def __init__(self, link: GpuLink, downs: CopyDowns, tickets: GpuTickets, commits: PendingCommits) -> None:
        self._link = link
        self._downs = downs
        self._tickets = tickets
        self._commits = commits
        self._sessions: list[Session] = []
        self._at = 0
        """Row at which the next step goes on."""
        self._copied_from: dict[int, tuple[Tenant, int]] = {}
        """Copies up that were left behind, by number -> whose slot of memory is held for them."""
        self._copied_to: dict[int, tuple[Tenant, int]] = {}
        """The same of copies down, which have a slot that was taken."""
        self.over = False
        """It is lost, and nothing is left of it in the store."""

    @property
    def left_behind(self) -> int:
        """Copies whose slots of memory are not free because their worker has not reported."""
        return len(self._copied_from) + len(self._copied_to)

    def begin(self, why: str, sessions: list[Session]) -> None:
        """Nothing is begun any more, everybody who waits is answered; `sessions` are those of clients."""
        link = self._link
        link.trouble = why
        link.counts.losses += 1
        self.over = False
        self._at = 0
        self._sessions = sessions
        gone = f"device {link.uuid} is out of use: {why}"
        self._tickets.fail_all(gone)
        self._commits.fail_all(gone)
        self._downs.give_up_queue()
        self._copied_from.update(self._tickets.ups.leave_behind())
        self._copied_to.update(self._downs.leave_behind())
        self._commits.never_watched([job.number for job in link.jobs if isinstance(job, WatchEvent)])
        link.jobs.clear()
        link.store.room.give_up()
        segments = link.store.segments
        for number in list(segments.making):
            segments.failed(number)
        segments.jobs.clear()

    def ended_late(self, number: int) -> bool:
        """The report of a copy that was left behind; False where it was not."""
        memory = self._link.on_memory
        if number in self._copied_from:
            memory.release(*self._copied_from.pop(number))
        elif number in self._copied_to:
            memory.give_back(*self._copied_to.pop(number))
        else:
            return False
        return True

    def step(self, rows_max: int) -> bool:
        """Ends one session, or drops what is among so many rows, or one segment; True if there is more."""
        store, link = self._link.store, self._link
        if self.over:
            return False
        if self._sessions:
            store.end_session(self._sessions.pop(), process_gone=True)
            return True
        table = store.table
        stop = min(self._at + rows_max, len(table))
        for row in range(self._at, stop):
            if table.state[row] == SEALED:
                link.counts.lost += link.only_here(link.block_at(row))
                store.tree.drop(row)
        self._at = stop
        if stop < len(table):
            return True
        link.settle()
        if store.segments.live:
            store.segments.drop(next(iter(store.segments.live.values())))
            store.segments.jobs.clear()  # what is lost is not freed
            return True
        assert not store.segments.draining, "a segment drains that no session has"
        self.over = True
        return False
