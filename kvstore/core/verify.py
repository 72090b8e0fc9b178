"""Reading the SSD back: whether the bytes of each record are still its own.

Each block is read into memory of the worker's own: nothing comes to the slab, and nothing of it
is a use. Its extent is held meanwhile, as for a load. A sweep gives way: while loads wait it
reads one block in PAUSE_S, so that it ends all the same. What is found is treated as if a load
had found it: a mismatch is removed, an error puts the SSD out of use until it has been tried.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.core.block import NONE, SEALED
from kvstore.core.link import Link
from kvstore.core.loads import Loads
from kvstore.core.moves import Name, VerifyBlock
from kvstore.core.schedule import Kind
from kvstore.core.store import Store
from kvstored.v1.errors import ResourceExhausted

SWEEPS_MAX = 2
PLACES = 3
"""Blocks read at once while nobody else reads: a load that comes finds a reader free."""

PAUSE_S = 0.25


def blocks_step(
    disk: Store, start: int, rows_max: int, found: list[tuple[int, Name]], blocks_max: int
) -> tuple[int, bool]:
    """Adds the blocks among `rows_max` rows from `start` with their rows, until there are `blocks_max`.

    Answers where to go on, and whether there is anything.
    """
    table = disk.table
    stop = min(start + rows_max, len(table))
    for row in range(start, stop):
        if table.state[row] == SEALED:
            if len(found) == blocks_max:
                return row, True
            found.append((row, (table.namespace[row], table.key[row] or b"")))
    return stop, stop < len(table)


@dataclass(eq=False, slots=True)
class Sweep:
    """Blocks that one caller wants read back. `ended` is called once, when nothing of it waits or is under way."""

    waiting: deque[tuple[int, Name]]
    ended: Callable[["Sweep"], None]
    under_way: dict[int, tuple[int, VerifyBlock]] = field(default_factory=dict)
    """Number of a job -> row and job."""
    blocks: int = 0
    """Read; `bad` and `failed` are among them."""
    size_bytes: int = 0
    bad: int = 0
    failed: int = 0
    unread: int | None = None
    """The first row that was not read to an end, once it was stopped."""

    def first_left(self) -> int | None:
        """The first row that has not been read to an end; None where all have."""
        rows = [row for row, _ in self.under_way.values()]
        return min([*rows, *(row for row, _ in list(self.waiting)[:1])], default=self.unread)


class Verification:
    """All sweeps of one SSD."""

    def __init__(self, link: Link, loads: Loads) -> None:
        self.link = link
        self._loads = loads
        self.sweeps: list[Sweep] = []
        self.jobs: dict[int, Sweep] = {}
        """Of reads under way, by their number."""
        self._began = float("-inf")

    def ask(self, blocks: list[tuple[int, Name]], ended: Callable[[Sweep], None]) -> Sweep:
        """Reads these back; `ended` may be called before this returns. Raises ResourceExhausted."""
        if len(self.sweeps) >= SWEEPS_MAX:
            raise ResourceExhausted(f"{SWEEPS_MAX} verifications are under way already")
        sweep = Sweep(deque(blocks), ended)
        self.sweeps.append(sweep)
        self._settle(sweep)
        return sweep

    def stop(self, sweep: Sweep) -> None:
        """Begins nothing more of it: it ends with the last report of what is under way."""
        if sweep.waiting:
            sweep.unread = sweep.waiting[0][0]
            sweep.waiting.clear()
            self._settle(sweep)

    def stop_all(self) -> None:
        for sweep in list(self.sweeps):
            self.stop(sweep)

    def hand_out(self, now: float) -> None:
        """Jobs for the workers, as far as others leave them room."""
        queues = [self.link.schedule.queues[kind] for kind in (Kind.LOAD, Kind.PREFETCH)]
        places = 1 if any(queue.active for queue in queues) else PLACES
        for sweep in list(self.sweeps):
            while sweep.waiting and len(self.jobs) < places:
                if any(queue.level for queue in queues) and now - self._began < PAUSE_S:
                    return
                if self._begin(sweep):
                    self._began = now

    def _begin(self, sweep: Sweep) -> bool:
        """The next block of a sweep; False where it is gone."""
        link, (at, (number, key)) = self.link, sweep.waiting.popleft()
        namespace = link.disk.namespaces[number - 1]
        row = namespace.tenant.rows.get(key, NONE)
        if row == NONE or link.disk.table.namespace[row] != number:
            self._settle(sweep)
            return False
        job = VerifyBlock(
            number=link.number(),
            extent=link.on_disk.hold(namespace.tenant, row),
            slot_bytes=link.disk.tree.pool_of(row).slot_bytes,
            length=namespace.block_bytes,
            key=key,
            checksum=link.checksums[row],
            namespace=namespace,
        )
        sweep.under_way[job.number] = (at, job)
        self.jobs[job.number] = sweep
        link.moves.append(job)
        return True

    def read(self, number: int, outcome: str) -> bool:
        """The report of a VerifyBlock: "ok", "mismatch", or what went wrong; False where it is another job's."""
        sweep = self.jobs.pop(number, None)
        if sweep is None:
            return False
        _, job = sweep.under_way.pop(number)
        link, namespace, disk = self.link, job.namespace, self.link.disk
        row = namespace.tenant.rows.get(job.key, NONE)
        still_there = row != NONE and disk.table.place[row] == job.extent
        link.on_disk.release(namespace.tenant, job.extent)
        sweep.blocks += 1
        sweep.size_bytes += job.length
        if outcome != "ok" and still_there:
            block = (link.joined.memory_of[namespace.id].id, job.key)
            if outcome == "mismatch":
                sweep.bad += 1
                self._loads.found_corrupt(block)
            else:
                sweep.failed += 1
                self._loads.found_unreadable(block, outcome)
        self._settle(sweep)
        return True

    def leave_behind(self) -> None:
        """Gives up reads under way, whose memory is their own."""
        for number, sweep in list(self.jobs.items()):
            _, job = sweep.under_way.pop(number)
            self.link.on_disk.release(job.namespace.tenant, job.extent)
            sweep.failed += 1
            self._settle(sweep)
        self.jobs.clear()

    def _settle(self, sweep: Sweep) -> None:
        """Ends a sweep of which nothing is left; once, whoever else has ended it meanwhile."""
        if sweep in self.sweeps and not sweep.waiting and not sweep.under_way:
            self.sweeps.remove(sweep)
            sweep.ended(sweep)
