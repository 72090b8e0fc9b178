"""The workers of the SSD: threads that read, write and commit, and report how it went.

    submit -> reads   -> readers                       -> report
           -> writes  -> writers -> commits -> committer -> report
           -> commits ------------------------^

Reads have threads of their own and never wait behind writes. What writers have finished the
one committer takes together, as much as is there: one sync a segment, one batch, one sync of
the log. So the order that a crash must find is kept: the former owner's record goes, then
the payload is written and synced, then the record is written and synced.

An exception in a worker is the outcome of its job. The core bounds the bytes that are under
way; JOBS_MAX is the last line behind it.
"""

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, PriorityQueue, SimpleQueue
from typing import NamedTuple

from kvstore.tiers.ssd.catalogue import Catalogue
from kvstore.tiers.ssd.faults import Unreadable, with_next_step
from kvstore.tiers.ssd.format import SegmentRow, checksum_of, pack_record, pack_row, segment_key
from kvstore.tiers.ssd.jobs import (
    MISMATCH,
    OK,
    Describe,
    Drop,
    Forget,
    Job,
    Make,
    Outcome,
    Probe,
    Read,
    ReadDone,
    Touch,
    Vacate,
    Write,
    outcome_of,
)
from kvstore.tiers.ssd.payload import Damaged, Payload

READERS, WRITERS = 4, 2
GROUP_MAX = 64
"""Jobs that share one commit."""

GATHER_S = 0.01
"""How long a commit waits for writes that are under way: each sync of a disk holds up the writes around it."""

JOBS_MAX = 65536
"""Jobs that may be submitted and not answered; further ones are refused, by an outcome."""

CLOSING = "the SSD tier is closing"

Commit = Write | Forget | Touch | Describe | Make | Drop | Vacate | Probe


class Left(NamedTuple):
    """What `close` could not end; both are empty where all went well."""

    jobs: list[Job]
    """Still in a worker's hands, and so are their slots."""
    outcomes: list[Outcome]
    """Not taken by `report`, which raised."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A job for the committer; of a `Write` with what its writer found out."""

    job: Commit
    checksum: int = 0
    packed: int = 0


class _Turn(NamedTuple):
    """At the writers. Files come first: all that is to be written waits for one where there is no room left."""

    late: bool
    number: int
    job: Write | Make | None


class SsdTier:
    """Carries jobs out on an open directory. `close` it before what it was given."""

    def __init__(
        self,
        extents: Payload,
        catalogue: Catalogue,
        report: Callable[[list[Outcome]], None],
        *,
        readers: int = READERS,
        writers: int = WRITERS,
    ) -> None:
        """`report` is called in the workers' threads, and in `submit` and `close` for what they refuse."""
        self._extents = extents
        self._catalogue = catalogue
        self._report = report
        self._reads: SimpleQueue[Read | None] = SimpleQueue()
        self._writes: PriorityQueue[_Turn] = PriorityQueue()
        self._commits: SimpleQueue[_Ready | None] = SimpleQueue()
        self._submitting = threading.Lock()
        self._closing = False
        self._pending: dict[int, Job] = {}
        """Jobs that were taken and not answered, by their id()."""
        self._unwritten = 0
        """Jobs of the writers that the committer has not and may still get."""
        self._turns = itertools.count()
        self._unreported: list[Outcome] = []
        self.unreadable = ""
        """The first that a worker found in the catalogue which no other attempt will mend: it is to be set aside."""
        self._at: dict[str, tuple[float, str]] = {}
        """Since when each thread that writes or commits is at a call, and what that is."""
        self._readers = [self._thread(f"ssd-read-{n}", self._serve_read) for n in range(readers)]
        self._writers = [self._thread(f"ssd-write-{n}", self._serve_write) for n in range(writers)]
        self._committer = self._thread("ssd-commit", self._serve_commits)

    def submit(self, job: Job) -> None:
        """Takes a job; never waits. One that cannot be taken is answered at once, in this call."""
        with self._submitting:
            refusal = CLOSING if self._closing else ""
            if len(self._pending) >= JOBS_MAX:
                refusal = refusal or f"{JOBS_MAX} jobs wait for the SSD"
            if not refusal:
                self._pending[id(job)] = job
                match job:
                    case Read():
                        self._reads.put(job)
                    case Write() | Make():
                        self._unwritten += 1
                        self._writes.put(_Turn(isinstance(job, Write), next(self._turns), job))
                    case _:
                        self._commits.put(_Ready(job))
        if refusal:
            self._tell([(job, outcome_of(job, refusal))])

    @property
    def pending(self) -> int:
        """Jobs that were taken and not answered."""
        return len(self._pending)

    @property
    def busy(self) -> tuple[float, str] | None:
        """Since when the call under way that has taken longest is, but for reads, and what it is; None: there is none.

        A job that waits for a worker is not under way.
        """
        return min(list(self._at.values()), default=None)

    def close(self, timeout_s: float) -> Left:
        """Ends the threads: what waits for a reader or writer is answered with an error, the rest is finished.

        The committer finishes its queue, which is short work. Returns what did not end in
        time, which is still answered if it ends at all; may be called again.
        """
        until = time.monotonic() + timeout_s
        with self._submitting:
            first = not self._closing
            self._closing = True
        if first:
            self._refuse_waiting()
            for _ in self._readers:
                self._reads.put(None)
            for _ in self._writers:
                self._writes.put(_Turn(True, next(self._turns), None))
        for thread in (*self._readers, *self._writers):
            thread.join(max(until - time.monotonic(), 0))
        # Only when no writer can hand it anything more: what a slow one brings later is committed and answered.
        if not any(thread.is_alive() for thread in self._writers):
            self._commits.put(None)
            self._committer.join(max(until - time.monotonic(), 0))
        return Left(list(self._pending.values()), self._unreported)

    def _refuse_waiting(self) -> None:
        waiting: list[Job] = []
        with suppress(Empty):
            while True:
                read = self._reads.get_nowait()
                assert read is not None
                waiting.append(read)
        with suppress(Empty):
            while True:
                job = self._writes.get_nowait().job
                assert job is not None
                self._unwritten -= 1
                waiting.append(job)
        if waiting:
            self._tell([(job, outcome_of(job, CLOSING)) for job in waiting])

    def _thread(self, name: str, serve: Callable[[], bool]) -> threading.Thread:
        def run() -> None:
            # Each call has its own locals: between two jobs no view of the slab is held.
            while serve():
                pass

        # A disk that hangs must not keep the process from ending.
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _tell(self, answers: list[tuple[Job, Outcome]]) -> None:
        outcomes = [outcome for _, outcome in answers]
        for job, _ in answers:
            self._pending.pop(id(job), None)
        try:
            self._report(outcomes)
        except Exception:  # noqa: BLE001 (the event loop may be closed already; `close` returns them)
            self._unreported += outcomes

    # -- readers

    def _serve_read(self) -> bool:
        job = self._reads.get()
        if job is None:
            return False
        try:
            self._extents.read(job.segment, job.offset, job.view)
            right = checksum_of(job.view[: job.length], job.key) == job.checksum
            outcome = OK if right else MISMATCH
        except Damaged:
            outcome = MISMATCH
        except BaseException as e:  # noqa: BLE001 (whatever it is, it is this job's outcome)
            outcome = self._said(e)
        self._tell([(job, ReadDone(job.number, outcome))])
        return True

    # -- writers

    def _serve_write(self) -> bool:
        job = self._writes.get().job
        if job is None:
            return False
        try:
            self._commits.put(self._payload(job) if isinstance(job, Write) else self._file(job))
        except BaseException as e:  # noqa: BLE001 (whatever it is, it is this job's outcome)
            self._arrived()
            self._tell([(job, outcome_of(job, self._said(e)))])
        finally:
            self._at_nothing()
        return True

    def _begins(self, what: str) -> None:
        """A call that this thread makes now: how long it takes, `busy` tells."""
        self._at[threading.current_thread().name] = (time.monotonic(), what)

    def _at_nothing(self) -> None:
        self._at.pop(threading.current_thread().name, None)

    def _said(self, error: BaseException) -> str:
        """An error as a sentence, never an empty one, with what to do about it."""
        if isinstance(error, Unreadable):
            self.unreadable = self.unreadable or str(error)
        return with_next_step(error, self._catalogue.path.parent)

    def _payload(self, job: Write) -> _Ready:
        record = job.record
        self._begins("a write")
        if job.replaces is not None:
            self._catalogue.unindex(job.replaces, record.segment, record.slot)
        checksum = checksum_of(job.view[: record.length], record.key)
        packed = self._extents.write(record.segment, job.offset, job.view)
        return _Ready(job, checksum, packed)

    def _file(self, job: Make) -> _Ready:
        self._begins("making a file")
        self._extents.make(job.segment, job.size_bytes)
        return _Ready(job)

    # -- the committer

    def _serve_commits(self) -> bool:
        group, goes_on = self._group()
        if group:
            try:
                errors = self._commit(group)
            except BaseException as e:  # noqa: BLE001 (whatever it is, it is the outcome of these jobs)
                errors = dict.fromkeys(range(len(group)), self._said(e))
            finally:
                self._at_nothing()
            self._tell(
                [
                    (ready.job, outcome_of(ready.job, errors.get(n, ""), ready.checksum, ready.packed))
                    for n, ready in enumerate(group)
                ]
            )
        return goes_on

    def _group(self) -> tuple[list[_Ready], bool]:
        """All that is there or comes soon, at least one and at most GROUP_MAX; and whether there may be more."""
        group: list[_Ready] = []
        ready = self._commits.get()
        until = time.monotonic() + GATHER_S
        while ready is not None:
            group.append(ready)
            if isinstance(ready.job, Write | Make):
                self._arrived()
            if len(group) == GROUP_MAX:
                return group, True
            wait_s = max(until - time.monotonic(), 0) if self._unwritten else 0
            try:
                ready = self._commits.get(timeout=wait_s)
            except Empty:
                return group, True
        return group, False

    def _arrived(self) -> None:
        with self._submitting:
            self._unwritten -= 1
            assert self._unwritten >= 0, "more writes came than were submitted"

    def _commit(self, group: list[_Ready]) -> dict[int, str]:
        """Place in the group -> what went wrong, for the jobs that did not succeed."""
        errors: dict[int, str] = {}
        written = {ready.job.record.segment for ready in group if isinstance(ready.job, Write)}
        unsynced: dict[int, str] = {}
        for segment in sorted(written):
            self._begins("a sync")
            unsynced.update(self._extents.sync([segment]))
        changes: dict[bytes, bytes | None] = {}
        for n, ready in enumerate(group):
            job = ready.job
            if isinstance(job, Write) and job.record.segment in unsynced:
                errors[n] = unsynced[job.record.segment]
            else:
                changes.update(_changes(ready))
        failed = self._write(changes)
        for n, ready in enumerate(group):
            if n not in errors:
                error = self._rest(ready.job, failed)
                if error:
                    errors[n] = error
        return errors

    def _write(self, changes: dict[bytes, bytes | None]) -> str:
        """One batch: of two changes of one row the later one counts."""
        if not changes:
            return ""
        self._begins("a commit to the catalogue")
        try:
            self._catalogue.write(
                {key: value for key, value in changes.items() if value is not None},
                [key for key, value in changes.items() if value is None],
            )
        except BaseException as e:  # noqa: BLE001 (whatever it is, it is the outcome of this group)
            return self._said(e)
        return ""

    def _rest(self, job: Commit, failed: str) -> str:
        """What a job needs besides the batch, which `failed` or not; its error."""
        self._begins("a write")
        try:
            match job:
                case Touch():
                    self._catalogue.set_uses(job.uses)
                    return ""
                case Probe():
                    self._extents.probe()
                    self._catalogue.probe()
                    return ""
                case Vacate() if not failed:
                    self._extents.vacate(job.places)
                case Drop() if not failed:
                    self._extents.drop(job.segment)
                case Make() if failed:
                    self._extents.drop(job.segment)
        except BaseException as e:  # noqa: BLE001 (whatever it is, it is the outcome of this job)
            return self._said(e)
        return failed


def _changes(ready: _Ready) -> dict[bytes, bytes | None]:
    """Rows that a job puts, or (None) deletes."""
    job = ready.job
    match job:
        case Write():
            return dict([pack_record(job.record._replace(checksum=ready.checksum, packed=ready.packed))])
        case Forget():
            return dict.fromkeys(job.keys)
        case Describe():
            return dict(map(pack_row, job.rows))
        case Make():
            return dict([pack_row(SegmentRow(job.segment, job.size_bytes, job.slot_bytes, job.tenant))])
        case Drop():
            return {segment_key(job.segment): None}
    return {}
