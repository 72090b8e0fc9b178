"""In which order jobs of one tier run: demand loads, then prefetches, then write-backs, each with a share.

A queue a kind, each bounded in bytes: what does not fit is refused, and counted. Reads and
writes have places of their own among what is under way, so that a disk that takes a second to
write keeps no reader waiting; prefetches leave READS_KEPT places to demand loads.

Shares are those of start-time fair queueing (Goyal et al., 1996): each kind has a virtual time,
the bytes it has begun over its share. The most urgent kind goes first, until a less urgent one
is BURST_BYTES behind: so a burst is served at once, and what lasts gets its share. A kind that
wakes up starts with the one that is furthest behind: it has no claim on what it did not use. A
kind alone has all, and owes nothing for it: nobody is further behind another than BEHIND_BYTES,
whatever one did while the other was idle or could not. Only more urgent kinds can make one wait
that has a place: reads never wait for a disk that is slow to write. But what is read at once is
what the disk takes off its writes: those that had more than their share beside writes that are
under way have READS_BESIDE places, until writes have theirs.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Generic, TypeVar


class Kind(IntEnum):
    """Most urgent first."""

    LOAD = 0
    PREFETCH = 1
    WRITE = 2


SHARES = {Kind.LOAD: 0.6, Kind.PREFETCH: 0.25, Kind.WRITE: 0.15}
"""Of the bytes moved while all three have work."""

READS_MAX, WRITES_MAX = 8, 32
"""Jobs under way; a write is ended by a sync that many share, so more of them are: with 16 the writers waited for
the sync of all that were written, and beside reads a real disk gave writes 0.6 of their share (bench/ssd_shares.py)."""

READS_KEPT = 2
"""Places among the reads that prefetches leave to demand loads."""

READS_BESIDE = 1
"""Places of loads, and as many of prefetches, while writes have less than their share beside them: with 2, writes that
a disk takes at 2.2 GB/s alone got half of it (bench/ssd_shares.py)."""

BURST_BYTES = 64 << 20
"""Of virtual time: how far a less urgent kind must be behind before it goes before a more urgent one."""

BEHIND_BYTES = 1 << 30
"""Of virtual time: what a kind can have to make up for. More than the largest blocks take, less than a second."""

PRIORITY_MIN, PRIORITY_MAX = -8, 8
"""Of jobs of one kind, a higher one goes first; what callers say is cut to these."""

T = TypeVar("T", bound=Hashable)


class Turn(Enum):
    """What has become of a job whose turn came."""

    BEGUN = "begun"
    LATER = "later"  # it goes first when there is what it lacks
    OVER = "over"  # there is nothing to do for it


@dataclass
class Queue(Generic[T]):
    """Jobs of one kind: those that wait, by priority and oldest first, with their bytes; and how many are under way."""

    bytes_max: int
    levels: dict[int, OrderedDict[T, int]] = field(default_factory=dict)
    """A job comes to either end, and the first is found, without a walk over what a dict would be: a million are."""
    level: dict[T, int] = field(default_factory=dict)
    """The priority of each job that waits."""
    bytes: int = 0
    running: int = 0
    served: float = 0.0
    """Bytes started over the share: the virtual time of the kind."""
    refused: int = 0
    moved_bytes: int = 0
    """Of all jobs started."""

    @property
    def active(self) -> bool:
        return bool(self.level or self.running)

    def add(self, job: T, size_bytes: int, priority: int, *, first: bool = False) -> None:
        jobs = self.levels.setdefault(priority, OrderedDict())
        jobs[job] = size_bytes
        if first:
            jobs.move_to_end(job, last=False)
        self.level[job] = priority
        self.bytes += size_bytes

    def take(self, job: T) -> int:
        """Takes a job out; its bytes."""
        priority = self.level.pop(job)
        jobs = self.levels[priority]
        size_bytes = jobs.pop(job)
        if not jobs:
            del self.levels[priority]
        self.bytes -= size_bytes
        return size_bytes

    def first(self) -> T:
        return next(iter(self.levels[max(self.levels)]))

    def last(self, below: int) -> T | None:
        """The job that would be begun last of all, of those with a priority below; None where there is none."""
        lowest = min(self.levels, default=below)
        return next(reversed(self.levels[lowest])) if lowest < below else None


class Scheduler(Generic[T]):
    """Which job of a tier is next."""

    def __init__(self, bytes_max: dict[Kind, int]) -> None:
        self.queues: dict[Kind, Queue[T]] = {kind: Queue(bytes_max[kind]) for kind in Kind}

    def offer(self, kind: Kind, job: T, size_bytes: int, priority: int = 0) -> bool:
        """Queues a job; False where its kind's queue is full. A queue that is empty takes any one job."""
        queue = self.queues[kind]
        assert job not in queue.level, "a job offered twice"
        if not self.fits(kind, size_bytes):
            queue.refused += 1
            return False
        if not queue.active:
            others = [other.served for other in self.queues.values() if other.active]
            queue.served = max(queue.served, min(others, default=0.0))
        queue.add(job, size_bytes, max(PRIORITY_MIN, min(priority, PRIORITY_MAX)))
        return True

    def fits(self, kind: Kind, size_bytes: int) -> bool:
        """Whether a job of that size would be queued."""
        queue = self.queues[kind]
        return not queue.level or queue.bytes + size_bytes <= queue.bytes_max

    def waits(self, kind: Kind, job: T) -> bool:
        """Whether a job is queued and has not started."""
        return job in self.queues[kind].level

    def withdraw(self, kind: Kind, job: T) -> bool:
        """Takes a job back that has not started; False where it has."""
        if not self.waits(kind, job):
            return False
        self.queues[kind].take(job)
        return True

    def clear(self, kind: Kind) -> int:
        """Takes back all jobs of a kind that have not started; how many."""
        queue = self.queues[kind]
        count = len(queue.level)
        queue.levels.clear()
        queue.level.clear()
        queue.bytes = 0
        return count

    def run(self, begin: Callable[[Kind, T], Turn], without: Collection[Kind] = ()) -> None:
        """Begins all jobs that may; where one has to wait for something, its kind does, until the next call."""
        waiting = set(without)
        while (kind := self._next(waiting)) is not None:
            queue = self.queues[kind]
            job = queue.first()
            priority = queue.level[job]
            size_bytes = queue.take(job)
            queue.running += 1
            turn = begin(kind, job)
            if turn is Turn.BEGUN:
                queue.served += size_bytes / SHARES[kind]
                queue.moved_bytes += size_bytes
                for other in self.queues.values():
                    other.served = max(other.served, queue.served - BEHIND_BYTES)
                continue
            queue.running -= 1
            if turn is Turn.LATER:
                queue.add(job, size_bytes, priority, first=True)
                waiting.add(kind)

    def ended(self, kind: Kind) -> None:
        """A job of this kind that was begun is over."""
        queue = self.queues[kind]
        assert queue.running > 0, f"more jobs of {kind.name} ended than began"
        queue.running -= 1

    def _next(self, waiting: Collection[Kind]) -> Kind | None:
        """The most urgent kind that may begin a job, unless another one is far behind its share."""
        chosen: Kind | None = None
        for kind, queue in self.queues.items():
            if not queue.level or kind in waiting or not self._place(kind, waiting) or not self._due(kind, waiting):
                continue
            if chosen is None or queue.served + BURST_BYTES < self.queues[chosen].served:
                chosen = kind
        return chosen

    def _place(self, kind: Kind, waiting: Collection[Kind]) -> bool:
        """Whether one more of a kind may be under way."""
        loads, prefetches, writes = (self.queues[each] for each in Kind)
        if kind is Kind.WRITE:
            return writes.running < WRITES_MAX
        if loads.running + prefetches.running >= READS_MAX:
            return False
        behind = writes.running or (writes.level and Kind.WRITE not in waiting)
        if behind and writes.served + BURST_BYTES < self.queues[kind].served:
            return self.queues[kind].running < READS_BESIDE
        return kind is Kind.LOAD or prefetches.running < READS_MAX - READS_KEPT

    def _due(self, kind: Kind, waiting: Collection[Kind]) -> bool:
        """Whether a kind has not had more than its share beside more urgent ones that want more."""
        served = self.queues[kind].served
        more_urgent = (queue for other, queue in self.queues.items() if other < kind and other not in waiting)
        return all(served <= queue.served for queue in more_urgent if queue.level)
