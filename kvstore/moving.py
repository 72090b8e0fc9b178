"""Carries out what the core wants moved between memory and the SSD, and tells it how each of it ended.

The directory is opened, and its records are read, in the background while memory serves; until
then nothing is on the SSD. Whatever fails on the way leaves the SSD out of use with its reason,
and is tried again. Times on disk are those of the wall clock, here they are the loop's.

    core/movement --moves--> slab views, records --> tiers/ssd workers --outcomes--> core/movement
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from pathlib import Path

from kvstore.core.link import OPENING, Link
from kvstore.core.movement import Movement
from kvstore.core.moves import ForgetRecords, Move, Name, ProbeTier, ReadBlock, VerifyBlock, WriteBlock
from kvstore.core.restore import Restore
from kvstore.core.segments import DropSegment, MakeSegment
from kvstore.errors import StartupError
from kvstore.logs import logger
from kvstore.lone_thread import LoneThread
from kvstore.numbers import NamespaceNumbers
from kvstore.tiers.slab import Slab
from kvstore.tiers.ssd.catalogue import CatalogueError, Unreadable
from kvstore.tiers.ssd.directory import DirectoryHeld, SsdDirectory
from kvstore.tiers.ssd.format import EXTENTS, Record, record_key
from kvstore.tiers.ssd.jobs import (
    Describe,
    Described,
    Drop,
    Dropped,
    Forget,
    Forgotten,
    Made,
    Make,
    Outcome,
    Probe,
    Probed,
    Read,
    ReadDone,
    Touched,
    Write,
    Wrote,
)
from kvstore.tiers.ssd.tier import SsdTier
from kvstore.uses import Uses

log = logger("kvstored.ssd")

OPEN_AGAIN_S = 5.0
RECORDS_STEP = 256
"""Records put back in one turn of the loop: about 3 ms."""

TICK_S = 0.1
CLOSE_S = 10.0
MEASURE_S = 1.0
OF_NOBODY = 0
"""Number of jobs whose end only matters if it is an error; the core counts from 1."""


@dataclass
class Opened:
    """A directory that is open, and its workers."""

    directory: SsdDirectory
    tier: SsdTier


class Mover:
    """One SSD directory under one movement."""

    def __init__(
        self,
        path: Path,
        movement: Movement,
        slab: Slab,
        *,
        layout: str,
        size_bytes: int,
        free_floor_bytes: int,
        low: float,
        memory_came: Callable[[], None],
    ) -> None:
        """`memory_came` is called after blocks came to memory or left it: somebody may wait for room."""
        self.path = path
        self.movement = movement
        self.state = "opening"
        """"opening", "restoring", "open", or "closed"."""
        self.restore: Restore | None = None
        """While records are being put back."""
        self.opened: Opened | None = None
        self.free_bytes = 0
        self.physical_bytes = 0
        self.direct_refused = ""
        self.aside = 0
        """Directories there are of what could not be read."""
        self._slab = slab
        self._layout = layout
        self._size_bytes = size_bytes
        self._free_floor_bytes = free_floor_bytes
        self._low = low
        self._memory_came = memory_came
        self._loop = asyncio.get_running_loop()
        self._wall = time.time() - time.monotonic()
        self._opener = LoneThread("ssd-open")
        self._task: asyncio.Task[None] | None = None
        self._sequence = 0
        self._numbers = NamespaceNumbers()
        self._refused: dict[int, asyncio.Future[str]] = {}
        """Deletions of records that could not be put back, by the number of their job, which is below 0."""
        self._uses = Uses(movement.link.disk)
        self._measured_at = 0.0
        self._measuring = False
        self._said_no_file = ""
        movement.link.on_corrupt = self._say_corrupt
        movement.on_used = self._uses.note
        movement.link.trouble = OPENING
        self._said = movement.link.trouble

    def start(self) -> None:
        """Begins to open the directory; never waits."""
        self._task = self._loop.create_task(self._open(), name="ssd")

    @property
    def link(self) -> Link:
        return self.movement.link

    # -- opening

    async def _open(self) -> None:
        """Until it is open: the directory, then its records."""
        while True:
            try:
                if self.opened is None:
                    opening = partial(SsdDirectory, self.path, layout=self._layout)
                    directory = await self._loop.run_in_executor(self._opener, opening)
                    self._opened(directory)
                await self._put_back()
            except Unreadable as e:
                if not await self._set_aside(str(e)):
                    await asyncio.sleep(OPEN_AGAIN_S)
            except (CatalogueError, DirectoryHeld, StartupError, OSError) as e:
                self._out_of_use(f"{self.path} cannot be opened: {e}")
                await self._take_out()
                await asyncio.sleep(OPEN_AGAIN_S)
            except Exception as e:
                log.exception("opening the SSD tier failed")
                self._out_of_use(f"internal error of the daemon: {type(e).__name__}; see its log")
                return
            else:
                return

    def _opened(self, directory: SsdDirectory) -> None:
        self.opened = Opened(directory, SsdTier(directory.extents, directory.catalogue, self._report))
        self.direct_refused = directory.extents.direct_refused
        if self.direct_refused:
            log.warning("the SSD tier goes through the page cache", reason=self.direct_refused)
        for aside in directory.set_aside_now:
            log.error("what cannot be read was set aside", path=str(aside.path), reason=aside.reason)
        if directory.leftovers:
            log.warning("files that nothing in the catalogue speaks of were removed", files=len(directory.leftovers))
        for segment, why in directory.damaged.items():
            log.error("a segment file is damaged", segment=segment, reason=why)

    async def _take_out(self) -> None:
        """Forgets what was put back, when nothing of it is under way: all of it is read again, or is gone."""
        while self.movement.loads.under_way:
            await asyncio.sleep(TICK_S)
        self.movement.lose_all()
        self.restore, self.state = None, "opening"
        for refused in self._refused.values():
            refused.cancel()
        self._refused.clear()

    async def _set_aside(self, reason: str) -> bool:
        """Begins anew with an empty directory, when nothing of the old one is under way; False where that fails."""
        opened = self.opened
        if opened is None:
            self._out_of_use(f"{self.path} cannot be opened: {reason}")
            return False
        self.link.go_out_of_use(f"its catalogue cannot be read: {reason}")
        await self._take_out()
        self.opened = None
        self._numbers.clear()
        try:
            await self._loop.run_in_executor(self._opener, opened.tier.close, CLOSE_S)
            aside = await self._loop.run_in_executor(self._opener, opened.directory.set_aside, reason)
        except (CatalogueError, OSError, Unreadable) as e:
            await self._loop.run_in_executor(self._opener, opened.directory.close)
            self._out_of_use(f"{self.path} cannot be set aside: {e}")
            return False
        log.error("what cannot be read was set aside", path=str(aside.path), reason=reason)
        self._opened(opened.directory)
        return True

    async def _open_what_is_there(self, opened: Opened) -> None:
        """What was on the SSD was deleted or replaced under us, and is lost with the end of this process at the latest.

        Nothing of it is promised any more; what is at the path now is opened.
        """
        movement, segments = self.movement, self.link.disk.segments
        movement.ready, self.state = False, "opening"
        while True:
            self._out_of_use(f"{self.path} was deleted or replaced while it was in use")
            if not (movement.under_way or segments.making):
                break
            await asyncio.sleep(TICK_S)
        await self._take_out()
        self.opened = None
        self._numbers.clear()
        left = await self._loop.run_in_executor(self._opener, opened.tier.close, CLOSE_S)
        try:
            if not left.jobs:
                await self._loop.run_in_executor(self._opener, opened.directory.close)
        except (CatalogueError, Unreadable, OSError) as e:
            log.warning("the SSD's directory was not closed well", reason=str(e))
        await self._open()

    async def _put_back(self) -> None:
        """Reads the catalogue, a few records a turn of the loop."""
        assert self.opened is not None
        began, catalogue, tier = time.monotonic(), self.opened.directory.catalogue, self.opened.tier
        read = self._loop.run_in_executor
        namespaces = await read(self._opener, catalogue.namespaces)
        segments = await read(self._opener, catalogue.segments)
        self.free_bytes = await read(self._opener, self.opened.directory.free_bytes)
        self.physical_bytes = await read(self._opener, self.opened.directory.physical_bytes)
        restore = self.restore = Restore(self.link, time.monotonic())
        self.state, self.link.trouble = "restoring", ""
        missing = {n for n in self.opened.directory.damaged if n not in self.opened.directory.extents.existing()}
        for segment in segments:
            if segment.number not in missing:
                restore.segment(segment.number, segment.size_bytes)
        for row in namespaces:
            self._numbers.found(row.number)
            if restore.namespace(row.number, row.tenant, row.digest, row.block_bytes, row.label, row.block_tokens):
                self._numbers.means(row.number, restore.namespaces[row.number])
        batches = catalogue.records()
        while (batch := await read(self._opener, next, batches, None)) is not None:
            refused: list[bytes] = []
            for at in range(0, len(batch), RECORDS_STEP):
                refused += [
                    record_key(record.namespace, record.key)
                    for record in batch[at : at + RECORDS_STEP]
                    if not self._put_record(restore, record)
                ]
                await asyncio.sleep(0)
            if refused:
                self._forget_refused(tier, refused)
        for number in restore.unused():
            tier.submit(Drop(number))
        restore.done()
        while restore.order():
            await asyncio.sleep(0)
        # A record whose slot is given away must be gone before: after a crash it could be believed instead of the new.
        for error in await asyncio.gather(*self._refused.values()):
            if error:
                raise CatalogueError(f"deleting records that cannot be used: {error}")
        self._refused.clear()
        self.restore = None
        self.state, self.movement.ready = "open", True
        self.link.removals.forget()
        log.info(
            "the SSD tier is open",
            path=str(self.path),
            blocks=restore.restored,
            forgotten=restore.refused,
            seconds=round(time.monotonic() - began, 2),
        )
        self.pump()

    def _forget_refused(self, tier: SsdTier, keys: list[bytes]) -> None:
        """Deletes records, and has `_put_back` know how that ended."""
        number = OF_NOBODY - len(self._refused) - 1
        self._refused[number] = self._loop.create_future()
        tier.submit(Forget(number, tuple(keys)))

    def _put_record(self, restore: Restore, record: Record) -> bool:
        self._sequence = max(self._sequence, record.sequence)
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
        )

    # -- jobs

    def pump(self) -> None:
        """Hands the workers what there is to do."""
        if self.opened is None:
            return
        for move in self.movement.take_moves(time.monotonic()):
            self._submit(self.opened, move)

    def _submit(self, opened: Opened, move: Move) -> None:
        match move:
            case WriteBlock():
                opened.tier.submit(self._write(opened, move))
            case ReadBlock():
                segment, slot = move.extent >> 32, move.extent & 0xFFFFFFFF
                view = self._view(move.target, move.slot_bytes)
                offset = slot * move.slot_bytes
                opened.tier.submit(Read(move.number, segment, offset, view, move.length, move.key, move.checksum))
            case VerifyBlock():
                segment, slot = move.extent >> 32, move.extent & 0xFFFFFFFF
                view = memoryview(mmap(-1, move.slot_bytes))  # the job's own: gone with it
                offset = slot * move.slot_bytes
                opened.tier.submit(Read(move.number, segment, offset, view, move.length, move.key, move.checksum))
            case ForgetRecords():
                opened.tier.submit(Forget(move.number, tuple(map(self._record_key, move.names))))
            case ProbeTier():
                opened.tier.submit(Probe(OF_NOBODY))
            case MakeSegment():
                self._make(opened, move)
            case DropSegment():
                opened.tier.submit(Drop(move.segment))

    def _write(self, opened: Opened, move: WriteBlock) -> Write:
        number, row = self._numbers.write(move.number, move.namespace)
        if row is not None:
            opened.tier.submit(Describe(number, (row,)))
        self._sequence += 1
        segment, slot = move.extent >> 32, move.extent & 0xFFFFFFFF
        record = Record(
            namespace=number,
            key=move.key,
            segment=segment,
            slot=slot,
            length=move.namespace.block_bytes,
            checksum=0,
            parent=move.parent,
            depth=move.depth,
            created=move.stored + self._wall,
            used=move.used + self._wall,
            hits=move.hits,
            until=move.until + self._wall if move.until else 0.0,
            sequence=self._sequence,
        )
        replaces = self._record_key(move.replaces) if move.replaces is not None else None
        return Write(move.number, record, self._view(move.source, move.slot_bytes), slot * move.slot_bytes, replaces)

    def _make(self, opened: Opened, move: MakeSegment) -> None:
        """A file more, if `ssd.size` (catalogue included) and `ssd.free_floor` leave room for it."""
        left, taken = self.free_bytes - move.size_bytes, self.physical_bytes + move.size_bytes
        why = ""
        if left < self._free_floor_bytes:
            why = f"{self.path} has {self.free_bytes >> 20} MiB free, of which ssd.free_floor keeps some"
        elif taken > self._size_bytes:
            why = f"{self.path} would take more than ssd.size: files and catalogue have {self.physical_bytes >> 20} MiB"
        if why:
            self._loop.call_soon(self._reported, [Made(move.segment, why)])
            return
        # Measured only once a second: what was asked for since is counted here.
        self.free_bytes, self.physical_bytes = left, taken
        opened.tier.submit(Make(move.segment, move.size_bytes))

    def _record_key(self, name: Name) -> bytes:
        return record_key(self._numbers[name[0]], name[1])

    def _view(self, ref: int, slot_bytes: int) -> memoryview:
        return self._slab.bytes_at(ref >> 32, (ref & 0xFFFFFFFF) * slot_bytes, slot_bytes)

    # -- reports

    def _report(self, outcomes: list[Outcome]) -> None:
        """In a worker's thread."""
        self._loop.call_soon_threadsafe(self._reported, outcomes)

    def _reported(self, outcomes: Sequence[Outcome]) -> None:
        movement, now = self.movement, time.monotonic()
        for outcome in outcomes:
            match outcome:
                case Wrote():
                    error = self._numbers.wrote(outcome.number)
                    movement.wrote(outcome.number, outcome.checksum, outcome.error or error, now)
                case ReadDone():
                    movement.read(outcome.number, outcome.outcome, now)
                case Forgotten() if outcome.number > OF_NOBODY:
                    movement.forgotten(outcome.number, outcome.error)
                case Forgotten():
                    refused = self._refused.get(outcome.number)
                    if refused is not None and not refused.done():
                        refused.set_result(outcome.error)
                case Probed():
                    movement.probed(outcome.error)
                case Made():
                    movement.made(outcome.segment, outcome.error)
                case Dropped() | Described() | Touched():
                    if isinstance(outcome, Described):
                        self._numbers.described(outcome.number, outcome.error)
                    if outcome.error:
                        self.link.go_out_of_use(f"writing the catalogue: {outcome.error}")
        self._say_trouble()
        self.pump()
        self._memory_came()

    # -- time

    def tick(self) -> bool:
        """One turn of the daemon's loop."""
        now = time.monotonic()
        self.movement.tick(now, self._low)
        if self._measured_at <= now:
            self._measured_at = now + MEASURE_S
            self._loop.create_task(self._measure())
        if self.opened is not None and self._uses.due(now):
            self._write_uses(self.opened, now)
        self._say_trouble()
        self.pump()
        return False

    async def _measure(self) -> None:
        """What the file system has left, and what the catalogue takes: a disk that hangs must not stop the loop."""
        opened = self.opened
        if opened is None or self._measuring:
            return
        self._measuring = True
        try:
            read = self._loop.run_in_executor
            if self.state == "open" and not await read(self._opener, opened.directory.is_in_place):
                self._task = self._loop.create_task(self._open_what_is_there(opened), name="ssd")
                return
            self.free_bytes = await read(self._opener, opened.directory.free_bytes)
            self.physical_bytes = await read(self._opener, opened.directory.physical_bytes)
            self.aside = await read(self._opener, opened.directory.count_aside)
            if self._layout != EXTENTS:
                # No file of ours is made for a payload in RocksDB, so nobody asks whether there is room for it.
                floor_met = self.free_bytes >= self._free_floor_bytes
                self.movement.make_less(not floor_met, self.physical_bytes > self._size_bytes)
        except OSError as e:
            log.debug("the SSD's directory cannot be measured", reason=str(e))
        finally:
            self._measuring = False

    def _write_uses(self, opened: Opened, now: float) -> None:
        if not self.link.trouble:
            for touch in self._uses.take(now, self._wall, self._record_key, OF_NOBODY):
                opened.tier.submit(touch)

    def _say_corrupt(self, key: bytes, extent: int) -> None:
        place = {"segment": extent >> 32, "slot": extent & 0xFFFFFFFF}
        log.error("a block on the SSD was not its own and is removed", key=key.hex(), **place)

    def _say_trouble(self) -> None:
        if self.link.no_file and not self._said_no_file:
            log.warning("the SSD tier cannot grow", reason=self.link.no_file)
        self._said_no_file = self.link.no_file
        trouble = self.link.trouble
        if trouble == self._said:
            return
        if trouble and trouble != OPENING and self._said in ("", OPENING):
            log.error("the SSD tier is out of use", reason=trouble)
        elif not trouble and self._said != OPENING:
            log.info("the SSD tier is in use again")
        self._said = trouble

    def _out_of_use(self, why: str) -> None:
        self.link.go_out_of_use(why)
        self._say_trouble()

    # -- leaving

    async def close(self) -> None:
        """Ends the workers and closes the directory."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        opened, self.opened, self.state = self.opened, None, "closed"
        try:
            async with asyncio.timeout(2 * CLOSE_S):
                await self._close(opened)
        except TimeoutError:
            log.warning("the SSD's directory was not closed: its disk does not answer", path=str(self.path))
        except (CatalogueError, OSError) as e:
            log.warning("the SSD's directory was not closed well", reason=str(e))
        self._opener.shutdown()

    async def _close(self, opened: Opened | None) -> None:
        if opened is not None:
            self._write_uses(opened, time.monotonic())
            # Not behind what the other thread may be waiting for.
            left = await self._loop.run_in_executor(LoneThread("ssd-close"), opened.tier.close, CLOSE_S)
            if left.jobs:
                log.warning("the SSD did not end what it was doing", jobs=len(left.jobs))
                return  # its threads may still use the files: they go with the process
        await self._loop.run_in_executor(self._opener, opened.directory.close if opened is not None else int)
