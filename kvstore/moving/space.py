"""What the SSD's directory takes of its file system, and whether it may take more.

Two limits: `ssd.size`, physical bytes with the catalogue, and `ssd.free_floor`, what the file
system must keep. Measured now and then, in a thread; what was asked for since counts as taken.

Segment files take what they take when they are made, beside what the catalogue may yet grow to.
A payload in RocksDB takes what it takes when it is written, twice at its worst (log and blob
file), and its garbage stays until it is collected: writes are allowed ahead, by the worst case,
and garbage is collected before room runs out. So neither limit is passed, but for what others
write meanwhile and for SLACK_BYTES. Where there is too little garbage to be collected, the
coldest blocks go: at once where the directory is too large, after PATIENCE_S where it is the
file system that is too full, since that may be others' doing and pass.
"""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvstore.core.movement import Movement
from kvstore.core.schedule import Kind
from kvstore.logs import logger
from kvstore.moving.lone_thread import LoneThread
from kvstore.tiers.ssd.budget import FIXED_BYTES, budget_of
from kvstore.tiers.ssd.directory import Sizes, SsdDirectory
from kvstore.tiers.ssd.faults import CatalogueError, Unreadable
from kvstore.tiers.ssd.format import EXTENTS

log = logger("kvstored.ssd")

MEASURE_S, MEASURE_SOON_S = 1.0, 0.05
"""Between two measurements; and while a write waits for one, or garbage is being collected."""

PATIENCE_S = 60.0
SLACK_BYTES = 8 << 20
"""By which RocksDB's own files may pass a limit for a moment: tables, manifest, records of what was deleted."""

COLLECT_S = 2.0
"""A step of collecting that took longer is followed by a smaller one: whoever closes the directory waits for it."""

LOG_LONG = 2
"""Times what it should be at most, a log is shortened."""

COLLECT_AGAIN_S = 5.0
"""After an error."""

BALLAST_AGAIN_S = 60.0
"""The same for the ballast."""


class Space:
    """Of one directory."""

    def __init__(self, path: Path, *, layout: str, size_bytes: int, free_floor_bytes: int, file_bytes: int) -> None:
        """`file_bytes`: what segment files may take, the rest is the catalogue's."""
        self.free_bytes = 0
        self.physical_bytes = 0
        self._path = path
        self._in_files = layout == EXTENTS
        self._size_bytes = size_bytes
        self._free_floor_bytes = free_floor_bytes
        self._budget = budget_of(size_bytes)
        self._catalogue_bytes = 0
        self._catalogue_may_grow = size_bytes - file_bytes
        self._said_room = False
        self._measured_at = -MEASURE_S
        self._soon = False
        self._short_since: float | None = None
        self._collector = LoneThread("ssd-collect")
        self._collecting = False
        self._collect_at = 0.0
        self._ballast_at = 0.0
        self.unreadable: tuple[SsdDirectory, str] | None = None
        """A catalogue that collecting found to be corrupt, and how."""
        self._step_bytes = self._budget.step_bytes
        """Of the next step: less where the disk is slow."""

    @property
    def usable_bytes(self) -> int:
        """What the directory may take at present: `ssd.size`, or less where its file system has no room for that."""
        return max(min(self._size_bytes, self.physical_bytes + self.free_bytes - self._free_floor_bytes), 0)

    def _say_room(self) -> None:
        """Once: who writes a size larger than the disk should know how large the tier is."""
        if self._said_room or self.usable_bytes >= self._size_bytes:
            return
        self._said_room = True
        log.warning(
            "ssd.size is more than its file system has room for: the tier takes what there is, and evicts from then on",
            path=str(self._path),
            size_mib=self._size_bytes >> 20,
            room_mib=self.usable_bytes >> 20,
            missing_mib=(self._size_bytes - self.usable_bytes) >> 20,
            free_floor_mib=self._free_floor_bytes >> 20,
        )

    def due(self, now: float, movement: Movement) -> bool:
        """Whether it is time to measure again; the next one counts from here."""
        writing = bool(movement.link.schedule.queues[Kind.WRITE].level)
        soon = self._collecting or (writing and (self._soon or movement.link.packed.waits))
        if now < self._measured_at + (MEASURE_SOON_S if soon else MEASURE_S):
            return False
        self._measured_at = now
        return True

    async def measure(
        self, directory: SsdDirectory, read: Callable[[Callable[[], Sizes]], Awaitable[Sizes]], movement: Movement
    ) -> None:
        """Looks at the disk through `read`: one that hangs must not stop the loop. Raises OSError."""
        before = movement.link.packed.mark()
        sizes = await read(lambda: self._look(directory))
        self.free_bytes, self.physical_bytes = sizes.free, sizes.physical
        self._catalogue_bytes = sizes.catalogue
        self._say_room()
        if not self._in_files:
            self._bound(sizes, movement, before)
            self._collect_if_due(sizes, directory, movement)

    def _look(self, directory: SsdDirectory) -> Sizes:
        """In a thread."""
        sizes = directory.sizes()
        missing, room = sizes.ballast_missing, self._room(sizes)
        if (
            missing
            and time.monotonic() >= self._ballast_at
            and room >= missing + (self._budget.log_bytes if not self._in_files else missing)
        ):
            try:
                directory.load_ballast()
            except OSError as e:  # a quota, say: what is there is served all the same
                self._ballast_at = time.monotonic() + BALLAST_AGAIN_S
                log.warning("room to open with cannot be set aside on a full disk", reason=str(e))
            sizes = directory.sizes()
        return sizes

    def _room(self, sizes: Sizes) -> int:
        return min(self._size_bytes - sizes.physical, sizes.free - self._free_floor_bytes)

    # -- segment files

    def take_file(self, size_bytes: int) -> str:
        """Counts a segment as taken where both limits leave room for it, or says why they do not."""
        if not self._in_files:
            return ""  # it is a number
        left, taken = self.free_bytes - size_bytes, self.physical_bytes + size_bytes
        if left < self._free_floor_bytes + max(self._catalogue_may_grow - self._catalogue_bytes, 0):
            return f"{self._path} has {self.free_bytes >> 20} MiB free, of which ssd.free_floor keeps some"
        if taken > self._size_bytes:
            have = f"files and catalogue have {self.physical_bytes >> 20} MiB"
            return f"{self._path} would take more than ssd.size: {have}"
        self.free_bytes, self.physical_bytes = left, taken
        return ""

    # -- a payload in RocksDB

    def _spare(self, sizes: Sizes) -> int:
        """What writes may take: beside what the log takes once more, one step of collecting, and the ballast."""
        return self._room(sizes) - sizes.log - self._budget.step_bytes - sizes.ballast_missing

    def _bound(self, sizes: Sizes, movement: Movement, before: tuple[int, int]) -> None:
        spare, now = self._spare(sizes), time.monotonic()
        packed = movement.link.packed
        packed.allow(max(spare, 0) / 2, before)
        # Where the file system has less for us than `ssd.size`, blocks go for new ones before these find no room.
        packed.limit_bytes = self._budget.live_in(min(self._room(sizes) + sizes.physical, self._size_bytes))
        self._soon = spare < self._budget.step_bytes
        if spare >= self._budget.step_bytes // 2:
            self._short_since = None
            movement.make_less("", evict=False)
        elif not self._worth_collecting(sizes, movement) or now < self._collect_at:
            self._short_since = self._short_since or now
            too_large = self._size_bytes - sizes.physical <= sizes.free - self._free_floor_bytes
            why = "it takes as much as ssd.size lets it" if too_large else "no more is free than ssd.free_floor keeps"
            movement.make_less(why, evict=too_large or now - self._short_since > PATIENCE_S)

    def _worth_collecting(self, sizes: Sizes, movement: Movement) -> bool:
        """Whether a good part of a step is garbage, by what the blocks take that are there."""
        garbage = sizes.catalogue - sizes.log - FIXED_BYTES - movement.link.packed.bytes
        return garbage > self._budget.step_bytes // 4

    def _collect_if_due(self, sizes: Sizes, directory: SsdDirectory, movement: Movement) -> None:
        now = time.monotonic()
        short = self._spare(sizes) < self._budget.step_bytes and self._worth_collecting(sizes, movement)
        long = sizes.log > LOG_LONG * self._budget.log_bytes
        if not (short or long) or self._collecting or now < self._collect_at or not movement.ready or movement.trouble:
            return
        # A step that finds no room makes RocksDB read-only.
        step_bytes = min(self._step_bytes, sizes.free - sizes.log)
        if step_bytes < 2 * self._budget.buffer_bytes:
            return
        self._collecting = True
        collected = self._collector.submit(directory.make_room, step_bytes if short else 0)

        def done(_: object) -> None:
            """In the collector's thread."""
            error, budget = collected.exception(), self._budget
            slow = time.monotonic() - now > COLLECT_S
            self._step_bytes = max(self._step_bytes // 2, budget.buffer_bytes) if slow else budget.step_bytes
            if error is not None:
                self._collect_at = time.monotonic() + COLLECT_AGAIN_S
                if isinstance(error, Unreadable):
                    self.unreadable = (directory, str(error))
                known = isinstance(error, CatalogueError | Unreadable | OSError)
                log.warning("garbage was not collected", reason=str(error) if known else repr(error))
            self._collecting = False

        collected.add_done_callback(done)

    def close(self) -> None:
        """No step begins any more; the catalogue is closed when one under way has ended."""
        self._collector.shutdown()
