"""Carries out what the core wants moved between memory and the SSD, and tells it how each of it ended.

The directory is opened, and its records are read, in the background while memory serves
(life.py, records.py); until then nothing is on the SSD.

    core/movement --moves--> jobs (jobs.py) --> tiers/ssd workers --outcomes--> core/movement
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvstore.core.link import OPENING, Link
from kvstore.core.movement import Movement
from kvstore.core.moves import Move
from kvstore.core.segments import MakeSegment
from kvstore.logs import logger
from kvstore.moving.drops import Drops
from kvstore.moving.jobs import OF_NOBODY, Jobs
from kvstore.moving.life import Life, Opened
from kvstore.moving.numbers import NamespaceNumbers
from kvstore.moving.records import Records
from kvstore.moving.removals import Removals
from kvstore.moving.space import Space
from kvstore.moving.uses import Uses
from kvstore.tiers.slab import Slab
from kvstore.tiers.ssd.directory import SsdDirectory
from kvstore.tiers.ssd.faults import is_of_files
from kvstore.tiers.ssd.jobs import (
    Described,
    Drop,
    Dropped,
    Forgotten,
    Made,
    Outcome,
    Probed,
    ReadDone,
    Touched,
    Vacated,
    Wrote,
)

log = logger("kvstored.ssd")

TICK_S = 0.1


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
        removals: Removals,
    ) -> None:
        """`memory_came` is called after blocks came to memory or left it: somebody may wait for room."""
        self.path = path
        self.movement = movement
        self.space = Space(
            path,
            layout=layout,
            size_bytes=size_bytes,
            free_floor_bytes=free_floor_bytes,
            file_bytes=movement.link.disk.segments.size_bytes,
        )
        self.aside = 0
        """Directories there are of what could not be read."""
        self._low = low
        self._memory_came = memory_came
        self._loop = asyncio.get_running_loop()
        self._wall = time.time() - time.monotonic()
        self._numbers = NamespaceNumbers()
        self._jobs = Jobs(slab, self._numbers, self._wall)
        self.removals = removals
        removals.sequence = lambda: self._jobs.sequence
        self._records = Records(movement, self._jobs, self._numbers, removals, self._wall)
        self.life = Life(
            path,
            movement,
            self._records,
            open_directory=partial(SsdDirectory, path, layout=layout, size_bytes=size_bytes),
            measure=self._look,
            report=self._reported,
            changed=self._changed,
        )
        self.drops = Drops()
        self._uses = Uses(movement.link.disk)
        self._measuring = False
        self._said_no_file = ""
        movement.link.on_corrupt = self._say_corrupt
        movement.on_used = self._uses.note
        self._said = movement.link.trouble

    def start(self) -> None:
        """Begins to open the directory; never waits."""
        self.life.start()

    @property
    def link(self) -> Link:
        return self.movement.link

    # -- jobs

    def pump(self) -> None:
        """Hands the workers what there is to do."""
        opened = self.life.opened
        if opened is None:
            return
        for move in self.movement.take_moves(time.monotonic()):
            self._submit(opened, move)

    def _submit(self, opened: Opened, move: Move) -> None:
        why = self.space.take_file(move.size_bytes) if isinstance(move, MakeSegment) else ""
        if isinstance(move, MakeSegment) and why:
            self._loop.call_soon(self._no_file, move.segment, why)
            return
        for job in self._jobs.of(move):
            opened.tier.submit(job)

    # -- reports

    def _reported(self, outcomes: Sequence[Outcome]) -> None:
        movement, now = self.movement, time.monotonic()
        for outcome in outcomes:
            match outcome:
                case Wrote():
                    error = self._numbers.wrote(outcome.number)
                    movement.wrote(outcome.number, outcome.checksum, outcome.error or error, now, outcome.packed)
                case ReadDone():
                    movement.read(outcome.number, outcome.outcome, now)
                case Forgotten() if outcome.number > OF_NOBODY:
                    movement.forgotten(outcome.number, outcome.error)
                case Vacated() if outcome.number > OF_NOBODY:
                    movement.vacated(outcome.number, outcome.error)
                case Forgotten() | Vacated():
                    self._records.reported(outcome)
                case Probed():
                    movement.probed(outcome.error)
                case Made():
                    movement.made(outcome.segment, outcome.error, unwell=not is_of_files(outcome.error))
                    if outcome.error:
                        # Its row may be there, or its file: nobody knows before removing it has been tried.
                        self.drops.failed(outcome.segment, "", time.monotonic())
                    elif self._said_no_file:  # not when another attempt is due: it may end like the one before
                        self._said_no_file = ""
                        log.info("the SSD tier can grow again")
                case Dropped():
                    self._dropped(outcome)
                case Described() | Touched():
                    if isinstance(outcome, Described):
                        self._numbers.described(outcome.number, outcome.error)
                    else:
                        self._uses.touched(outcome.number, outcome.error)
                    if outcome.error:
                        self.link.go_out_of_use(f"writing the catalogue: {outcome.error}")
        self._changed()

    def _no_file(self, segment: int, why: str) -> None:
        """The limits allow no file more."""
        self.movement.made(segment, why)
        self._changed()

    def _dropped(self, outcome: Dropped) -> None:
        if outcome.error:
            self._drop_again(outcome.segment, outcome.error)
        elif self.drops.ended(outcome.segment):
            log.info("all segment files that could not be removed are gone")

    def _drop_again(self, segment: int, why: str) -> None:
        if self.drops.failed(segment, why, time.monotonic()):
            log.warning("a segment file cannot be removed", segment=segment, reason=why)

    def _changed(self) -> None:
        """What can be done has changed, or slots are free again."""
        if self.life.opened is None:
            self.drops.forget()
            self._uses.forget()
        self._say_trouble()
        self.pump()
        self._memory_came()

    # -- time

    def tick(self) -> bool:
        """One turn of the daemon's loop."""
        now = time.monotonic()
        self.movement.tick(now, self._low, self.life.busy)
        self.removals.step()
        if self.space.due(now, self.movement):
            self._loop.create_task(self._measure())
        opened = self.life.opened
        if opened is not None and self._uses.due(now):
            self._write_uses(opened, now)
        if opened is not None and not self.link.trouble:
            for segment in self.drops.due(now):
                opened.tier.submit(Drop(segment))
        self._say_trouble()
        self.pump()
        return False

    async def _measure(self) -> None:
        """What the file system has left, and what the catalogue takes: a disk that hangs must not stop the loop."""
        opened = self.life.opened
        if opened is None or self._measuring:
            return
        self._measuring = True
        try:
            call = self.life.call
            if self.life.state == "open" and not await call(opened.directory.is_in_place):
                self.life.replaced(opened)
                return
            await self._look(opened.directory)
            if self.space.unreadable is not None and self.space.unreadable[0] is opened.directory:
                self.life.unreadable(opened, self.space.unreadable[1])
            self.aside = await call(opened.directory.count_aside)
        except OSError as e:
            log.debug("the SSD's directory cannot be measured", reason=str(e))
        finally:
            self._measuring = False

    async def _look(self, directory: SsdDirectory) -> None:
        await self.space.measure(directory, self.life.call, self.movement)

    def _write_uses(self, opened: Opened, now: float) -> None:
        if not self.link.trouble:
            for touch in self._uses.take(now, self._wall, self._jobs.record_key):
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

    # -- leaving

    async def close(self) -> None:
        """Ends the workers and closes the directory."""
        if self.life.opened is not None:
            self._write_uses(self.life.opened, time.monotonic())
        await self.life.close()
        self.space.close()
