"""What an operator, and the end of the daemon, ask of the SSD tier: its figures, flush, verify, save.

Works through the mover and its movement, in turns of the event loop that stay short whatever
is stored. No wait is without an end: each has a limit that is named here.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, islice

from kvstore.core.block import NONE
from kvstore.core.link import OPENING, Block
from kvstore.core.loads import RUNNING
from kvstore.core.moves import Name
from kvstore.core.saving import Hottest
from kvstore.core.verify import Sweep, blocks_step
from kvstore.moving.mover import Mover
from kvstored.v1 import kvstore_pb2 as pb

LOOK_S = 0.01
"""Between two looks at what is being written."""

FLUSH_S = 3600.0
"""A flush that has not ended by then is over; what is left is told."""

WALK_ROWS = 4096
"""Rows looked at in one turn: about a millisecond."""

OFFERED_STEP, SETTLED_STEP = 1024, 4096
"""Blocks that one look may queue, and find written: some milliseconds each."""

COUNTED_STEP = 1024
"""Blocks counted in one turn: some milliseconds, with their order."""

VERIFY_S = 5.0
"""After which one call of verify begins no further read."""

VERIFY_END_S = 5.0
"""For its reads under way to end; a disk that does not answer is told as trouble."""

OPENING_S = 30.0
"""Opening a directory that takes longer is told as something that is wrong."""


class Upkeep:
    """Of one mover."""

    def __init__(self, mover: Mover, *, size_bytes: int, layout: str) -> None:
        self.mover = mover
        self._size_bytes = size_bytes
        self._layout = layout
        self._began = time.monotonic()
        self._left = 0
        self._flush: asyncio.Task[str] | None = None

    # -- figures

    def stats(self) -> pb.SsdStats:
        """As `kvstore-cli stats` and the metrics show it."""
        mover, movement = self.mover, self.mover.movement
        link, disk = movement.link, movement.link.disk
        pools = disk.segments.filled()
        return pb.SsdStats(
            path=str(mover.path),
            layout=self._layout,
            state=mover.life.state,
            trouble=link.trouble,
            no_file=link.no_file,
            direct_refused=mover.life.direct_refused,
            size_bytes=self._size_bytes,
            physical_bytes=mover.space.physical_bytes,
            free_bytes=mover.space.free_bytes,
            room_bytes=mover.space.usable_bytes,
            file_bytes=sum(segment.size_bytes for segment in disk.segments.live.values()),
            used_bytes=sum((pool.slots - pool.free) * pool.slot_bytes for pool in pools),
            blocks=sum(pool.blocks for pool in pools),
            aside=mover.aside,
            evicted=disk.counts.evicted,
            queues=[
                pb.QueueStats(
                    kind=kind.name.lower(),
                    waiting=len(queue.level),
                    waiting_bytes=queue.bytes,
                    running=queue.running,
                    refused=queue.refused,
                    moved_bytes=queue.moved_bytes,
                )
                for kind, queue in link.schedule.queues.items()
            ],
            counters=pb.MoveCounters(
                **{field.name: getattr(link.counts, field.name) for field in pb.MoveCounters.DESCRIPTOR.fields}
            ),
            tickets=sum(ticket.state == RUNNING for ticket in movement.loads.tickets.values()),
        )

    def degraded(self) -> list[str]:
        """What is not as it should be while memory serves all the same."""
        mover, link, found = self.mover, self.mover.link, []
        if link.trouble and (link.trouble != OPENING or time.monotonic() - self._began > OPENING_S):
            found.append(f"the SSD tier is out of use: {link.trouble}")
        if link.no_file:
            found.append(f"the SSD tier cannot grow: {link.no_file}")
        if mover.drops.trouble:
            found.append(f"the SSD tier: {mover.drops.trouble}")
        if mover.aside:
            found.append(f"{mover.aside} set aside in {mover.path}, for want of being readable: look, then remove it")
        return found

    def is_open(self) -> bool:
        """Whether all that is on the SSD is known."""
        return self.mover.movement.ready

    # -- flush and save

    async def flush(self, wait_s: float) -> pb.FlushReply:
        """Writes what only memory has, once for all who ask meanwhile, and waits up to `wait_s` for its end."""
        task = self._flush
        if task is None or task.done():
            task = self._flush = asyncio.get_running_loop().create_task(self._write_all(), name="ssd-flush")
        done, _ = await asyncio.wait({task}, timeout=wait_s)
        return pb.FlushReply(left=self._left, trouble=task.result() if done else "", done=bool(done))

    async def save(self, limit_s: float, progress: Callable[[int], None]) -> int:
        """Writes what only memory has, most recently used first; answers how many blocks did not make it in time."""
        until, movement = time.monotonic() + limit_s, self.mover.movement
        if self._blocks_in_memory():
            await self._opened(until)
        hottest = Hottest(movement.link)
        while hottest.look(WALK_ROWS):
            await asyncio.sleep(0)
        if len(hottest) and movement.ready:
            await self._write(hottest, len(hottest), until, progress)
        return await self._count(hottest, lambda block: movement.link.disk_row(block) == NONE)

    async def close(self) -> None:
        """Ends a flush."""
        if self._flush is not None:
            self._flush.cancel()
            await asyncio.gather(self._flush, return_exceptions=True)

    async def _write_all(self) -> str:
        """One flush; why it stopped, "" where it came to its end. `_left` says what is left."""
        until, movement = time.monotonic() + FLUSH_S, self.mover.movement
        self._left = self._blocks_in_memory()
        await self._opened(until)
        movement.writes.last_dropped = ""
        blocks: list[Block] = []
        at: int | None = 0
        while at is not None:
            at = movement.only_memory_step(at, WALK_ROWS, blocks)
            await asyncio.sleep(0)
        self._left = len(blocks)
        if blocks and movement.ready:
            self._left = await self._write(blocks, len(blocks), until, self._say_left)
        if not movement.ready:
            return movement.trouble or "its records are being read"
        return movement.trouble or movement.writes.last_dropped if self._left else ""

    def _blocks_in_memory(self) -> int:
        return sum(pool.blocks for pool in self.mover.link.memory.segments.filled())

    def _say_left(self, left: int) -> None:
        self._left = left

    async def _opened(self, until: float) -> None:
        """Waits for a directory that is being opened and read; not for one that cannot be."""
        movement = self.mover.movement
        while not movement.ready and movement.trouble in ("", OPENING) and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)

    async def _write(self, blocks: Iterable[Block], count: int, until: float, progress: Callable[[int], None]) -> int:
        """Has so many blocks written, and waits for these; how many are in memory and still not on the SSD."""
        movement, writes = self.mover.movement, self.mover.movement.writes
        waiting, coming, lost = iter(blocks), deque[Block](), deque[Block]()
        upcoming, left = next(waiting, None), count
        while (upcoming is not None or coming) and not movement.trouble and time.monotonic() < until:
            for _ in range(OFFERED_STEP):
                if upcoming is None or not writes.would_fit(upcoming):
                    break
                writes.offer(upcoming)
                coming.append(upcoming)
                upcoming = next(waiting, None)
            self.mover.pump()
            # In about the order in which they were queued: those behind one that takes long are seen with it.
            for _ in range(SETTLED_STEP):
                if not coming or writes.is_coming(coming[0]):
                    break
                block = coming.popleft()
                if movement.is_only_in_memory(block):
                    lost.append(block)
                else:
                    left -= 1
            progress(left)
            await asyncio.sleep(LOOK_S)
        first = [] if upcoming is None else [upcoming]
        left = await self._count(chain(lost, coming, first, waiting), movement.is_only_in_memory)
        progress(left)
        return left

    async def _count(self, blocks: Iterable[Block], which: Callable[[Block], bool]) -> int:
        """How many of them are so, looked at in bounded turns."""
        count, blocks = 0, iter(blocks)
        while some := list(islice(blocks, COUNTED_STEP)):
            count += sum(map(which, some))
            await asyncio.sleep(0)
        return count

    # -- verify

    async def verify(self, cursor: int, blocks_max: int) -> pb.VerifyReply:
        """Reads blocks back from `cursor` on; a cursor is the row to go on from, plus one."""
        movement = self.mover.movement
        disk, reply = movement.link.disk, pb.VerifyReply(cursor=max(cursor, 1))
        reply.total = sum(pool.blocks for pool in disk.segments.filled())
        reply.trouble = movement.trouble or ("" if movement.ready else "its records are being read")
        if reply.trouble:
            reply.opening = not movement.ready and movement.trouble in ("", OPENING)
            return reply
        found: list[tuple[int, Name]] = []
        at, more = max(cursor - 1, 0), True
        while more and len(found) < blocks_max:
            at, more = blocks_step(disk, at, WALK_ROWS, found, blocks_max)
            await asyncio.sleep(0)
        reply.cursor = at + 1 if more else 0
        sweep = await self._sweep(found)
        left = sweep.first_left()
        if left is not None:
            reply.cursor = left + 1
        reply.blocks, reply.size_bytes = sweep.blocks, sweep.size_bytes
        reply.bad, reply.failed = sweep.bad, sweep.failed
        reply.trouble = movement.trouble
        if sweep.under_way and not reply.trouble:
            reply.trouble = f"a read has been under way for more than {VERIFY_END_S:.0f} s"
        return reply

    async def _sweep(self, found: list[tuple[int, Name]]) -> Sweep:
        """As much of it as VERIFY_S lets it read; whoever gives up waiting stops it."""
        verification = self.mover.movement.verification
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end(_: Sweep) -> None:
            if not ended.done():
                ended.set_result(None)

        sweep = verification.ask(found, end)
        try:
            self.mover.pump()
            await asyncio.wait({ended}, timeout=VERIFY_S)
            verification.stop(sweep)
            await asyncio.wait({ended}, timeout=VERIFY_END_S)
        finally:
            verification.stop(sweep)
        return sweep
