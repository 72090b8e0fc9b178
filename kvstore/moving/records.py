"""Puts the records of an open directory back into the core, a few a turn of the loop.

What cannot be used is deleted, and its deletion waited for, before the first slot is given away:
after a crash such a record could be believed instead of the new one. Rows of namespaces that
nothing is of any more go, too: they would be read with each start, and are limited in number.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar

from kvstore.core.movement import Movement
from kvstore.core.restore import Restore
from kvstore.logs import logger
from kvstore.moving.jobs import OF_NOBODY, Jobs
from kvstore.moving.numbers import NamespaceNumbers
from kvstore.moving.removals import Removals, Struck
from kvstore.tiers.ssd.directory import SsdDirectory
from kvstore.tiers.ssd.faults import CatalogueError
from kvstore.tiers.ssd.format import NamespaceRow, Record, SegmentRow, namespace_key, record_key
from kvstore.tiers.ssd.jobs import Drop, Forget, Forgotten, Vacate, Vacated
from kvstore.tiers.ssd.payload import Place
from kvstore.tiers.ssd.tier import SsdTier

log = logger("kvstored.ssd")

T = TypeVar("T")

RECORDS_STEP = 256
"""Records put back in one turn of the loop: about 3 ms."""

NAMESPACES_STEP = 4096
"""Rows of namespaces noted in one turn: some milliseconds."""

PLACES_STEP = 1024
"""Runs of free slots in one job; their states are walked a segment at a time."""

PRUNED_MAX = 4096
"""Rows of namespaces deleted together."""


class Call(Protocol):
    """Makes a call in a thread that may wait for the disk."""

    async def __call__(self, call: Callable[[], T]) -> T: ...


class Records:
    """Of whichever directory is open."""

    def __init__(
        self, movement: Movement, jobs: Jobs, numbers: NamespaceNumbers, removals: Removals, wall: float
    ) -> None:
        """`wall` is what a time of the loop lacks to be one of the wall clock."""
        self.restore: Restore | None = None
        """While records are being put back."""
        self._movement = movement
        self._jobs = jobs
        self._numbers = numbers
        self._removals = removals
        self._wall = wall
        self._deleting: dict[int, asyncio.Future[str]] = {}
        """Deletions, of records and of what is in free slots, by the number of their job, which is below 0."""

    async def rows(self, directory: SsdDirectory, call: Call) -> tuple[list[NamespaceRow], list[SegmentRow]]:
        """What `put_back` begins with. `call` makes a call in another thread. Raises CatalogueError, Unreadable."""
        return await call(directory.catalogue.namespaces), await call(directory.catalogue.segments)

    async def put_back(
        self,
        rows: tuple[list[NamespaceRow], list[SegmentRow]],
        directory: SsdDirectory,
        tier: SsdTier,
        call: Call,
        check: Callable[[], None],
    ) -> Restore:
        """Reads all records; `check` raises what is to end it. Raises CatalogueError, Unreadable, OSError, too."""
        namespaces, segments = rows
        restore = self.restore = Restore(self._movement.link, time.monotonic(), self._numbers.means)
        missing = {number for number in directory.damaged if number not in directory.extents.existing()}
        for segment in segments:
            if segment.number not in missing:
                restore.segment(segment.number, segment.size_bytes)
        for at, row in enumerate(namespaces):
            self._numbers.found(row.number)
            restore.namespace(row.number, row.tenant, row.digest, row.block_bytes, row.label, row.block_tokens)
            if at % NAMESPACES_STEP == 0:
                await asyncio.sleep(0)
        await self._records(restore, namespaces, tier, directory.catalogue.records(), call, check)
        for number in restore.unused():
            tier.submit(Drop(number))
        while restore.done():
            await asyncio.sleep(0)
        while restore.order():
            await asyncio.sleep(0)
        free = (Place(*run) for run in self._movement.link.packed.free_runs())
        while places := tuple(islice(free, PLACES_STEP)):
            self._expect(tier, Vacate(self._next, places))
            await asyncio.sleep(0)
        for error in await asyncio.gather(*self._deleting.values()):
            check()
            if error:
                raise CatalogueError(f"deleting records that cannot be used: {error}")
        self._deleting.clear()
        for number in missing:  # whose records are gone by now: a row that stayed would be told of at each start
            tier.submit(Drop(number))
        await self._prune(restore, tier)
        await self._removals.mark(self._jobs.sequence)
        self.restore = None
        return restore

    def give_up(self) -> None:
        """What has been begun is begun anew, or not at all."""
        self.restore = None
        self._numbers.clear()
        for deleting in self._deleting.values():
            deleting.cancel()
        self._deleting.clear()

    def reported(self, outcome: Forgotten | Vacated) -> None:
        """How a deletion ended."""
        deleting = self._deleting.get(outcome.number)
        if deleting is not None and not deleting.done():
            deleting.set_result(outcome.error)

    async def _records(
        self,
        restore: Restore,
        namespaces: list[NamespaceRow],
        tier: SsdTier,
        batches: Iterator[list[Record]],
        call: Call,
        check: Callable[[], None],
    ) -> None:
        struck = (await self._removals.known()).of({row.number: (row.tenant, row.digest) for row in namespaces})
        self._jobs.sequence = max(self._jobs.sequence, struck.last)
        while (batch := await call(partial(next, batches, None))) is not None:
            check()
            refused: list[bytes] = []
            for at in range(0, len(batch), RECORDS_STEP):
                refused += [
                    record_key(record.namespace, record.key)
                    for record in batch[at : at + RECORDS_STEP]
                    if not self._put(restore, record, struck)
                ]
                await asyncio.sleep(0)
            if refused:
                self._expect(tier, Forget(self._next, tuple(refused)))

    def _put(self, restore: Restore, record: Record, struck: Struck) -> bool:
        self._jobs.sequence = max(self._jobs.sequence, record.sequence)
        if struck.has(record.namespace, record.key, record.sequence):
            return restore.refuse()
        return restore.record(
            (record.namespace, record.key),
            record.segment,
            record.slot,
            record.checksum,
            record.parent,
            record.depth,
            record.used - self._wall,
            record.hits,
            record.until - self._wall if record.until else 0.0,
            record.packed,
        )

    async def _prune(self, restore: Restore, tier: SsdTier) -> None:
        """Rows of namespaces without a record: after their records, since a number without a row means nothing."""
        keys = list(map(namespace_key, restore.without_blocks()))
        if not keys:
            return
        for at in range(0, len(keys), PRUNED_MAX):
            self._expect(tier, Forget(self._next, tuple(keys[at : at + PRUNED_MAX])))
        errors = [error for error in await asyncio.gather(*self._deleting.values()) if error]
        self._deleting.clear()
        if errors:  # they mean nothing, and are met again at the next start
            log.warning("namespaces without blocks stay in the SSD's catalogue", rows=len(keys), reason=errors[0])
        else:
            log.info("namespaces without blocks are gone from the SSD's catalogue", rows=len(keys))

    @property
    def _next(self) -> int:
        """A number for the next deletion."""
        return OF_NOBODY - len(self._deleting) - 1

    def _expect(self, tier: SsdTier, job: Forget | Vacate) -> None:
        self._deleting[job.number] = asyncio.get_running_loop().create_future()
        tier.submit(job)
