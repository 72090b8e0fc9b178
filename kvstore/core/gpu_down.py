"""Which blocks of a device are copied to memory, when, and what has become of each.

`through`: as soon as they are there. `evict`: when they are about to be evicted, ahead of it.
What memory has, or an SSD in use, is not copied: it simply goes from the device. What is about
to be evicted and is nowhere else is copied with either policy.

What waits is held on the device as far as HELD_SHARE goes, so that it is not evicted before its
copy; of more than that the coldest may be lost for room, and is counted (`evicted_only`). From
its turn to the report its slots on both sides are held, whatever becomes of the block.
"""

from collections.abc import Iterable, Sequence

from kvstore.core.block import NONE, SEALED
from kvstore.core.gpu_copies import Copying, ParentsFirst
from kvstore.core.gpu_jobs import CopyDown
from kvstore.core.gpu_link import GpuLink
from kvstore.core.holds import Tenant
from kvstore.core.link import Block
from kvstore.core.schedule import Kind, Turn

THROUGH, EVICT = "through", "evict"

AHEAD_SHARE = 0.15
"""Of a pool's slots, its coldest: looked at ahead of eviction, as for the SSD (writeback.py)."""

AHEAD_BLOCKS = 4096
"""Cold blocks looked at in one turn: 1 ms. The next turn begins with the next pool."""

ABOVE_MAX = 256
"""Blocks that one about to be evicted hangs from, and that are copied ahead of it."""

AHEAD_PRIORITY = 1
"""What is about to be evicted goes before what was stored a moment ago."""

WANTED_PRIORITY = 2
"""What somebody waits for goes before both."""


class CopyDowns:
    """From one device to memory."""

    def __init__(self, link: GpuLink, policy: str) -> None:
        assert policy in (THROUGH, EVICT), f"no such policy: {policy}"
        self.link = link
        self.policy = policy
        self.coming: dict[Block, Copying] = {}
        """What waits or is under way, and is not cancelled."""
        self.under_way: dict[int, Copying] = {}
        """Copies that were begun and not reported, by the number of their job; cancelled ones too."""
        self.order = ParentsFirst(self.coming, self._place)
        self._pool_hand = 0

    # -- what is to be copied

    def stored(self, rows: Sequence[int]) -> None:
        """Blocks that a client has put on the device."""
        if self.policy == THROUGH:
            self.offer_rows(rows)

    def offer_rows(self, rows: Iterable[int], priority: int = 0) -> None:
        for row in rows:
            self.offer(row, priority)

    def offer(self, row: int, priority: int = 0) -> bool:
        """Queues one block, by its row on the device; False where it is not going to be copied, which is counted."""
        link = self.link
        block = link.block_at(row)
        if link.elsewhere(block):
            return True
        copying = self.coming.get(block)
        if copying is not None:
            self._hold(copying, row)
            return True
        namespace = link.memory_namespace(block)
        size_bytes = link.memory.pool(namespace).slot_bytes
        if not link.schedule.offer(Kind.WRITE, block, size_bytes, priority):
            link.counts.down_dropped += 1
            return False
        copying = self.coming[block] = Copying(block, namespace, size_bytes)
        self._hold(copying, row)
        return True

    def _hold(self, copying: Copying, row: int) -> None:
        if copying.held is None and copying.job is None:
            copying.held = self.link.held_device.try_hold(self.link.device_namespace(copying.namespace), row)

    def look_ahead(self, low: float) -> None:
        """What is about to go and is nowhere else, a bounded number of blocks a turn."""
        store = self.link.store
        if self.link.trouble or store.segments.idle_bytes >= store.segments.segment_bytes:
            return
        pools = store.segments.filled()
        self._pool_hand = (self._pool_hand + 1) % max(len(pools), 1)
        left = AHEAD_BLOCKS
        for pool in (*pools[self._pool_hand :], *pools[: self._pool_hand]):
            ahead = int(pool.slots * AHEAD_SHARE) + 1
            if left and pool.free < pool.slots * (1 - low) + ahead:
                for row in store.policy.coldest(pool.order, min(ahead, left)):
                    if not self._offer_chain(row):
                        return
                left -= min(ahead, left)

    def _offer_chain(self, row: int) -> bool:
        """A block that is about to go, after what it hangs from: alone it would be an orphan in memory."""
        link, table = self.link, self.link.store.table
        if link.elsewhere(link.block_at(row)):
            return True
        rows = [row]
        while len(rows) <= ABOVE_MAX:
            above = table.parent[rows[-1]]
            if above == NONE or table.state[above] != SEALED or link.elsewhere(link.block_at(above)):
                break
            rows.append(above)
        return all(self._would_fit(each) and self.offer(each, AHEAD_PRIORITY) for each in reversed(rows))

    def _would_fit(self, row: int) -> bool:
        """Whether `offer` would drop nothing."""
        block = self.link.block_at(row)
        size_bytes = self.link.memory.pool(self.link.memory_namespace(block)).slot_bytes
        return block in self.coming or self.link.schedule.fits(Kind.WRITE, size_bytes)

    # -- copying

    def begin(self, block: Block) -> Turn:
        """A copy's turn has come."""
        link, copying = self.link, self.coming[block]
        row, namespace = link.device_row(block), copying.namespace
        assert row != NONE, "a block that has left the device waits to be copied from it"
        if link.elsewhere(block):
            self._forget(copying)
            return Turn.OVER
        target = link.on_memory.take(namespace)
        if target is None:
            if link.memory.room.pending or link.others_run:
                return Turn.LATER
            link.counts.down_dropped += 1
            self._forget(copying)
            return Turn.OVER
        device = link.device_namespace(namespace)
        source = self._take_held(copying)
        if source is None:
            source = link.on_device.hold(device.tenant, row)
        copying.describe(link.store, row)
        copying.job = CopyDown(link.number(), source, target, copying.size_bytes, namespace.block_bytes)
        self.under_way[copying.job.number] = copying
        link.jobs.append(copying.job)
        return Turn.BEGUN

    def copied(self, number: int, error: str, now: float) -> None:
        """The report of a CopyDown."""
        copying = self.under_way.pop(number)
        self.link.schedule.ended(Kind.WRITE)
        copying.error = error
        self.order.ended(copying, now)

    def _place(self, copying: Copying, now: float) -> None:
        """What was copied becomes a block in memory, if it may."""
        link, job, namespace = self.link, copying.job, copying.namespace
        assert isinstance(job, CopyDown), "a copy that was never begun has ended"
        if not copying.cancelled:
            del self.coming[copying.block]
        link.on_device.release(link.device_namespace(namespace).tenant, job.source)
        if copying.error or copying.cancelled:
            link.on_memory.give_back(namespace.tenant, job.target)
            link.counts.down_failed += bool(copying.error)
            link.counts.copies_vain += not copying.error
            return
        memory, key = link.memory, copying.block[1]
        session, ttl_s = link.on_memory.session(namespace.tenant), copying.ttl_s(now)
        _, new, _ = memory.place(session, namespace, [key], [job.target], [copying.parent], [copying.depth], now, ttl_s)
        if not new:
            link.on_memory.give_back(namespace.tenant, job.target)
            link.counts.copies_vain += 1
            return
        memory.table.hits[new[0]] = copying.hits
        memory.table.conversation[new[0]] = copying.conversation
        link.counts.copied_down += 1
        link.counts.bytes_down += job.length
        if memory.watcher is not None:
            memory.watcher.stored(new, [])

    # -- what goes

    def left_device(self, block: Block) -> None:
        """A block leaves the device; one that is held was not evicted but removed."""
        copying = self.coming.pop(block, None)
        if copying is None:
            return
        copying.cancelled = True
        if copying.job is None:
            self.link.schedule.withdraw(Kind.WRITE, block)
            self.link.counts.down_dropped += 1
            source = self._take_held(copying)
            if source is not None:
                tenant = self.link.device_namespace(copying.namespace).tenant
                self.link.release_later(self.link.on_device, tenant, source)

    def give_up_queue(self) -> None:
        """The device is lost: what waits is not copied. Ends holds, so not within a callback."""
        for copying in list(self.coming.values()):
            if copying.job is None:
                self.link.schedule.withdraw(Kind.WRITE, copying.block)
                self.link.counts.down_dropped += 1
                self._forget(copying)

    def leave_behind(self) -> dict[int, tuple[Tenant, int]]:
        """Gives up what is under way; number of each copy -> the slot of memory that it must keep until its report."""
        link, left = self.link, dict[int, tuple[Tenant, int]]()
        for number, copying in self.under_way.items():
            assert copying.job is not None, "a copy under way has no job"
            left[number] = (copying.namespace.tenant, copying.job.target)
            link.schedule.ended(Kind.WRITE)
        for copying in self.order.take_all():
            assert copying.job is not None, "a copy that ended has no job"
            link.on_memory.give_back(copying.namespace.tenant, copying.job.target)
            self.under_way[copying.job.number] = copying
        for copying in self.under_way.values():
            assert copying.job is not None, "a copy under way has no job"
            link.on_device.release(link.device_namespace(copying.namespace).tenant, copying.job.source)
        link.counts.left_behind += len(left)
        self.under_way.clear()
        self.coming.clear()
        return left

    def _forget(self, copying: Copying) -> None:
        """It is not copied after all."""
        del self.coming[copying.block]
        source = self._take_held(copying)
        if source is not None:
            self.link.on_device.release(self.link.device_namespace(copying.namespace).tenant, source)

    def _take_held(self, copying: Copying) -> int | None:
        """The slot that it was held in while it waited, if it was; whoever takes it lets go of it."""
        held, copying.held = copying.held, None
        if held is not None:
            self.link.held_device.no_more(self.link.device_namespace(copying.namespace))
        return held
