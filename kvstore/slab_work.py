"""What the store wants done with the slab: segments made and dropped, and who waits for memory told that it came."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvstore.core.segments import DropSegment, MakeSegment
from kvstore.core.store import Store
from kvstore.logs import logger
from kvstore.tiers.index import Indexes
from kvstore.tiers.slab import Slab, SlabSegment

log = logger("kvstored")

WORKERS = 2
"""Segments that are made at a time."""


class SlabWork:
    """Of one slab, on one event loop."""

    def __init__(
        self,
        store: Store,
        slab: Slab,
        indexes: Indexes,
        *,
        index_grows: Callable[[], None],
        trouble: Callable[[str], None],
    ) -> None:
        """`index_grows` is called while an index is to go on growing; `trouble` is told why a segment could not be
        made, "" where it could."""
        self._store = store
        self._slab = slab
        self._indexes = indexes
        self._index_grows = index_grows
        self._trouble = trouble
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="segment")
        self._jobs: set[asyncio.Task[None]] = set()
        self._memory: asyncio.Future[None] | None = None

    async def make_all(self, progress: Callable[[int, int], None]) -> None:
        """All of a slab that begins empty; `progress(bytes done, bytes in all)`. Raises OSError."""
        sizes = {job.segment: job.size_bytes for job in self._store.take_jobs() if isinstance(job, MakeSegment)}
        await asyncio.get_running_loop().run_in_executor(None, self._slab.make_all, sizes, progress)
        for segment in sizes:
            self._store.segments.made(segment)

    def run(self) -> None:
        """Carries out what the store wants done with memory, and lets growing indexes go on."""
        for job in self._store.take_jobs():
            if isinstance(job, DropSegment):
                self._slab.drop(job.segment)
            else:
                task = asyncio.get_running_loop().create_task(self._make(job))
                self._jobs.add(task)
                task.add_done_callback(self._jobs.discard)
        for session in self._store.sessions.values():
            if session.detach or session.recall:
                self._indexes.notify(session.tenant.id)
        if self._indexes.growing:
            self._index_grows()

    async def _make(self, job: MakeSegment) -> None:
        loop, segments = asyncio.get_running_loop(), self._store.segments
        try:
            made: SlabSegment = await loop.run_in_executor(self._workers, self._slab.make, job.segment, job.size_bytes)
        except OSError as e:
            self._trouble(f"no memory for a segment of {job.size_bytes} bytes: {e}")
            log.error("no memory for a segment", size_bytes=job.size_bytes, reason=str(e))  # noqa: TRY400
            segments.failed(job.segment)
        else:
            self._trouble("")
            self._slab.add(made)
            segments.made(job.segment)
        self.memory_came()

    def memory_came(self) -> None:
        """Those who wait for memory look again."""
        if self._memory is not None:
            self._memory.set_result(None)
            self._memory = None

    def memory_future(self) -> asyncio.Future[None]:
        """Done when memory has come, or may have."""
        if self._memory is None:
            self._memory = asyncio.get_running_loop().create_future()
        return self._memory

    async def close(self) -> None:
        """Waits for what is being made."""
        await asyncio.gather(*self._jobs, return_exceptions=True)
        self._workers.shutdown()
