"""The SSD's directory from one opening to the next: opened, its records put back, and given up when it is lost.

One task sees to it until the daemon ends. Whatever goes wrong on the way leaves the SSD out of use
with its reason, and is tried again; an error of our own too, with growing pauses. A directory is
lost when its catalogue cannot be read, at the start or later: then it is set aside and an empty
one begun; and when it was deleted or replaced under us: then what is at the path now is opened.

A call or a job that never ends must not keep the SSD away for ever. What is under way when a
directory is lost has LEAVE_S to end and is left behind then (core/losing.py); its threads use
only that directory's files, by descriptors of their own. But RocksDB goes by paths, with threads
that nobody else can stop: before it is closed no other catalogue may be opened, nor it be moved,
so a call that hangs in it keeps the SSD out of use until that call ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvstore.core.link import OPENING
from kvstore.core.movement import Movement
from kvstore.errors import StartupError
from kvstore.logs import logger
from kvstore.moving.lone_thread import LoneThread
from kvstore.moving.records import Records
from kvstore.tiers.ssd.catalogue import Catalogue
from kvstore.tiers.ssd.directory import DirectoryHeld, SsdDirectory
from kvstore.tiers.ssd.faults import CatalogueError, Unreadable, with_next_step
from kvstore.tiers.ssd.jobs import Outcome, ReadDone, Wrote
from kvstore.tiers.ssd.mounts import Home
from kvstore.tiers.ssd.tier import SsdTier

log = logger("kvstored.ssd")

T = TypeVar("T")

OPEN_AGAIN_S = 5.0
OPEN_AGAIN_MAX_S = 40.0
"""After errors of our own, and where one directory after the other is lost, pauses grow to this."""

SETTLED_S = 60.0
"""In use for so long, the SSD is well again."""

LEAVE_S = 10.0
"""For what is under way to end, when its directory is lost."""

LOSE_ROWS = 1024
"""Rows lost in one turn of the loop: some 5 ms."""

LOOK_S = 0.05
CLOSE_S = 10.0


class ReplacedError(Exception):
    """The path leads to something else than what is open."""


@dataclass(eq=False)
class Opened:
    """A directory that is open, and its workers."""

    directory: SsdDirectory
    tier: SsdTier = field(init=False)
    lost: asyncio.Future[None] = field(init=False)
    """Ends with the exception that says why it is."""


class Life:
    """Of one path, under one movement."""

    def __init__(
        self,
        path: Path,
        movement: Movement,
        records: Records,
        *,
        open_directory: Callable[[], SsdDirectory],
        measure: Callable[[SsdDirectory], Awaitable[None]],
        report: Callable[[Sequence[Outcome]], None],
        changed: Callable[[], None],
    ) -> None:
        """`report` gets outcomes of the directory that is open; `changed` is called when what can be done has."""
        self.path = path
        self.state = "opening"
        """"opening", "restoring", "open", or "closed"."""
        self.opened: Opened | None = None
        self.records = records
        self._movement = movement
        self._open_directory = open_directory
        self._measure = measure
        self._report = report
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._opener = LoneThread("ssd-open")
        self._home = Home(path)
        self._task: asyncio.Task[None] | None = None
        self._gone: tuple[Opened, str] | None = None
        """A directory that is lost and not closed yet, and why it is to be set aside ("": it is not)."""
        self._at_stake: tuple[int, str] | None = None
        """How many blocks only the directory that was given up had, until it is known whether they are lost; and why
        it was."""
        self._pause_s = 0.0
        self._open_at = float("inf")
        self._calling: float | None = None
        """Since when a call is under way in the other thread."""
        movement.link.trouble = OPENING
        movement.link.away = True

    def start(self) -> None:
        """Begins to open the directory; never waits."""
        self._task = self._loop.create_task(self._live(), name="ssd")

    @property
    def direct_refused(self) -> str:
        """Why bytes pass through the page cache."""
        return self.opened.directory.extents.direct_refused if self.opened is not None else ""

    @property
    def busy(self) -> tuple[float, str] | None:
        """Since when the call that takes longest is under way, but for reads of blocks, and what it is."""
        calling = self._calling
        looking = None if calling is None else (calling, "a look at its directory")
        working = None if self.opened is None else self.opened.tier.busy
        return min((found for found in (looking, working) if found is not None), default=None)

    async def call(self, call: Callable[[], T]) -> T:
        """One after the other, in a thread that may wait for the disk."""

        def timed() -> T:
            self._calling = time.monotonic()
            try:
                return call()
            finally:
                self._calling = None

        return await self._loop.run_in_executor(self._opener, timed)

    def replaced(self, opened: Opened) -> None:
        """Somebody has deleted or replaced that directory."""
        self._lose(opened, ReplacedError(f"{self.path} was deleted or replaced while it was in use"))

    def unreadable(self, opened: Opened, why: str) -> None:
        """Somebody has found that what is in that directory cannot be read."""
        self._lose(opened, Unreadable(why))

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
        except (CatalogueError, Unreadable, OSError) as e:
            log.warning("the SSD's directory was not closed well", reason=str(e))
        self._opener.shutdown()

    async def _close(self, opened: Opened | None) -> None:
        if opened is not None:
            # Not behind what the other thread may be waiting for.
            left = await self._loop.run_in_executor(LoneThread("ssd-close"), opened.tier.close, CLOSE_S)
            if left.jobs:
                log.warning("the SSD did not end what it was doing", jobs=len(left.jobs))
                return  # its threads may still use the files: they go with the process
        await self._loop.run_in_executor(self._opener, opened.directory.close if opened is not None else int)

    # -- from one opening to the next

    async def _live(self) -> None:
        while True:
            try:
                await self._until_lost()
                pause_s = self._pause(0.0)
            except (CatalogueError, Unreadable, DirectoryHeld, StartupError, OSError) as e:
                pause_s = OPEN_AGAIN_S
                self._out_of_use(f"{self.path} cannot be opened: {with_next_step(e, self.path)}")
            except Exception as e:
                log.exception("the SSD tier failed")
                pause_s = self._pause(OPEN_AGAIN_S)
                self._out_of_use(f"internal error of the daemon: {type(e).__name__}; see its log")
            await asyncio.sleep(pause_s)

    def _pause(self, first_s: float) -> float:
        """After what should not happen twice: longer each time that it does before the SSD was in use for a while."""
        if time.monotonic() - self._open_at > SETTLED_S:
            self._pause_s = 0.0
        pause_s = max(self._pause_s, first_s)
        self._pause_s = min(max(2 * pause_s, OPEN_AGAIN_S), OPEN_AGAIN_MAX_S)
        self._open_at = float("inf")
        return pause_s

    async def _until_lost(self) -> None:
        """Opens what is at the path, and ends when that is lost."""
        await self._take_out()  # an attempt may have ended anywhere
        await self._close_gone()
        opened = self.opened or await self._open()
        try:
            await self._put_back(opened)
            await opened.lost
        except Unreadable as e:
            await self._give_up(opened, f"its catalogue cannot be read: {e}", str(e))
        except ReplacedError as e:
            await self._give_up(opened, str(e), "")
        except Exception as e:
            # Nothing of it is to be promised while it waits for the next attempt.
            self._out_of_use(f"{self.path} cannot be read: {with_next_step(e, self.path)}")
            await self._take_out()
            raise

    async def _open(self) -> Opened:
        return self._is_open(await self.call(self._open_here))

    def _open_here(self) -> SsdDirectory:
        """In the other thread."""
        self._home.check()
        directory = self._open_directory()
        try:
            self._home.is_open()
        except BaseException:
            directory.close()
            raise
        return directory

    def _is_open(self, directory: SsdDirectory) -> Opened:
        opened = self.opened = Opened(directory)
        opened.lost = self._loop.create_future()
        opened.tier = SsdTier(directory.extents, directory.catalogue, partial(self._reported_in_thread, opened))
        if self.direct_refused:
            log.warning("the SSD tier goes through the page cache", reason=self.direct_refused)
        self._say_set_aside(directory)
        self._at_stake = None  # else it is all there again, to be read
        if (other := directory.other_layout) is not None:
            log.warning(
                "ssd.layout has changed: what the other layout had on the SSD is lost and removed",
                before=other.name,
                now=directory.layout,
                files=other.files,
                size_bytes=other.size_bytes,
            )
            directory.other_layout = None
        if directory.leftovers:
            log.warning("files that nothing in the catalogue speaks of were removed", files=len(directory.leftovers))
        for segment, why in directory.damaged.items():
            log.error("a segment file is damaged", segment=segment, reason=why)
        return opened

    async def _put_back(self, opened: Opened) -> None:
        began = time.monotonic()

        def check() -> None:
            if opened.lost.done():
                opened.lost.result()

        check()
        rows = await self.records.rows(opened.directory, self.call)
        await self._measure(opened.directory)
        self.state = "restoring"
        self._movement.come()
        restore = await self.records.put_back(rows, opened.directory, opened.tier, self.call, check)
        check()
        self.state, self._movement.ready = "open", True
        self._movement.link.removals.forget()
        self._open_at = time.monotonic()
        log.info(
            "the SSD tier is open",
            path=str(self.path),
            blocks=restore.restored,
            forgotten=restore.refused,
            seconds=round(time.monotonic() - began, 2),
        )
        self._changed()

    # -- what is lost

    def _lose(self, opened: Opened, why: Exception) -> None:
        if not opened.lost.done():
            opened.lost.set_exception(why)
            opened.lost.exception()  # whoever waits for it comes later, or never

    async def _give_up(self, opened: Opened, why: str, set_aside: str) -> None:
        """A directory is lost, and is closed before the next is opened.

        What was on it only is lost with it: at once if it was replaced, else when it has been set aside.
        """
        self._out_of_use(why)
        self._gone = (opened, set_aside)
        self._at_stake = (await self._take_out(opened), why)
        if not set_aside:
            self._say_lost()

    def _say_set_aside(self, directory: SsdDirectory) -> None:
        for aside in directory.set_aside_now:
            log.error("what cannot be read was set aside", path=str(aside.path), reason=aside.reason)
        if directory.set_aside_now:
            self._say_lost()
        directory.set_aside_now.clear()

    def _say_lost(self) -> None:
        """Once: what the directory had that was given up is out of reach."""
        if self._at_stake is not None:
            (lost, why), self._at_stake = self._at_stake, None
            self._movement.link.counts.lost += lost
            log.error("what was on the SSD only is lost", blocks=lost, reason=why)

    async def _take_out(self, gone: Opened | None = None) -> int:
        """Forgets what was put back, which is read again, or lost with the directory `gone`; how many blocks.

        Of those that are in memory, too, nothing is lost.
        """
        movement, until = self._movement, time.monotonic() + LEAVE_S
        movement.leave()
        self.state = "opening"
        self.records.give_up()
        while movement.under_way and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        if movement.under_way:
            log.warning("the SSD did not end what it was doing; its slots wait for it", seconds=LEAVE_S)
        movement.losing.leave_behind()
        if gone is not None:
            self.opened = None
        self._changed()
        while movement.losing.step(LOSE_ROWS):
            await asyncio.sleep(0)
        return movement.losing.take_count()

    async def _close_gone(self) -> None:
        """Closes a directory that was lost. Raises CatalogueError where it cannot be yet, OSError too."""
        if self._gone is None:
            return
        opened, set_aside = self._gone
        directory = opened.directory
        await self.call(partial(opened.tier.close, CLOSE_S))
        await self.call(partial(_close, directory.catalogue))
        if set_aside and not await self.call(directory.is_in_place):
            set_aside = ""  # what is at the path is something else, to be opened like any other
            self._say_lost()
        self._gone = None
        try:
            if set_aside:
                await self.call(partial(directory.set_aside, set_aside))
                self._is_open(directory)
                return
            await self.call(directory.close)
        except (CatalogueError, Unreadable, OSError) as e:
            if set_aside:
                self._say_set_aside(directory)
                await self.call(directory.close)
                raise
            log.warning("the SSD's directory was not closed well", reason=str(e))

    # -- reports

    def _reported_in_thread(self, opened: Opened, outcomes: list[Outcome]) -> None:
        self._loop.call_soon_threadsafe(self._reported, opened, outcomes)

    def _reported(self, opened: Opened, outcomes: list[Outcome]) -> None:
        if opened.tier.unreadable:
            self.unreadable(opened, opened.tier.unreadable)
        if opened is self.opened or self.state == "closed":
            self._report(outcomes)
            return
        for outcome in outcomes:  # of one that is lost: all that is still awaited of it is the end of what it held
            if isinstance(outcome, Wrote | ReadDone):
                self._movement.losing.ended_late(outcome.number)
        if not opened.tier.pending:
            self._loop.run_in_executor(self._opener, opened.tier.close, 0.0)  # its last threads
        self._changed()

    def _out_of_use(self, why: str) -> None:
        self._movement.link.go_out_of_use(why)
        self._changed()


def _close(catalogue: Catalogue) -> None:
    """Raises CatalogueError where a call is still under way in it."""
    with suppress(CatalogueError, Unreadable):
        catalogue.close()
    if catalogue.is_open:
        raise CatalogueError("a call on the catalogue that was open does not end: none can be opened before")
