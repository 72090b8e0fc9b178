"""Room on the SSD counted in bytes, where a block takes what it is packed to and not its slot.

There are more slots than bytes then, and what bounds the blocks is the sum of what they take,
known when each is written. Before a write begins it counts with what its slot would take if it
shrank as those that are there, and the coldest blocks go until it fits. Beside that, whoever
looks at the disk says how much may be begun until he looks again (`allow`): there a slot counts
as a whole, and a write that finds no room by that waits.

What left a slot is garbage only once it is deleted: free slots are handed out for that, and are
nobody's until it is reported.
"""

import re
from array import array
from collections.abc import Callable, Iterator

from kvstore.core.block import DOOMED, NONE
from kvstore.core.carrier import Carrier
from kvstore.core.holds import INFINITY, Namespace, Tenant
from kvstore.core.moves import VacateSlots
from kvstore.core.segments import BLOCK, FREE, Pool
from kvstore.core.store import Store

EVICT_MAX = 64
"""Blocks that go for one write, at most; if that is not enough, it waits for its next turn."""

VACATE_MAX = 256
"""Slots vacated together."""

SIZE_MAX = 0xFFFFFFFF
FREE_RUN = re.compile(b"%c+" % FREE)
"""In the states of a segment's slots."""

Slot = tuple[int, int]
"""Where, and its bytes: a segment that is cut anew has others in the same places, and what the old ones had is still
on the disk until something is written to the new ones (`Blobs`)."""


class Packed:
    """Of the SSD's store."""

    def __init__(self, disk: Store, carrier: Carrier, limit_bytes: int, block_bytes_max: int) -> None:
        """`limit_bytes`: for all blocks, 0 where slots are what they take. No larger block than `block_bytes_max`."""
        self.counts = bool(limit_bytes)
        self.limit_bytes = self.most_bytes = limit_bytes
        """What there is room for now, as others leave some on the disk; and what there may ever be."""
        self.bytes = 0
        """Of all blocks that are there."""
        self.may_begin: float = INFINITY
        """Bytes of slots that may yet be begun to be written."""
        self.waits = False
        """The last slot that was asked for is not there yet, but will be."""
        self.begun_bytes = 0
        """Of slots, ever."""
        self._slot_bytes = 0
        """Of the slots that the blocks of `bytes` have."""
        self._evicted_bytes = 0
        """Of blocks that went for a write which has no slot yet: as much does not go for it again."""
        self._disk = disk
        self._carrier = carrier
        self.block_bytes_max = block_bytes_max
        self._sizes = array("I")
        """By row."""
        self._of_tenant: dict[int, int] = {}
        self._coming: dict[int, int] = {}
        """Slots that are being written -> their bytes."""
        self._coming_bytes = 0
        self._left: dict[Slot, None] = {}
        """Slots that may have something in them that nobody needs."""
        self._vacating: dict[int, tuple[Slot, ...]] = {}
        """Job -> slots that are nobody's until its report."""
        self._busy: set[Slot] = set()
        """Those slots."""

    # -- writing

    def take(self, namespace: Namespace) -> int | None:
        """A slot to write to, with room for what it takes; None where there is none, or (`waits`) none yet."""
        self.waits = False
        if not self.counts:
            return self._carrier.take(namespace)
        slot_bytes = self._disk.pool(namespace).slot_bytes
        if slot_bytes > self.block_bytes_max:
            return None
        if slot_bytes > self.may_begin:
            self.waits = True
            return None
        if not self._make_room(namespace.tenant, slot_bytes):
            return None
        ref = self._carrier.take(namespace)
        if ref is not None and (ref, slot_bytes) in self._busy:
            self._carrier.give_back(namespace.tenant, ref)
            self.waits = True
            return None
        if ref is not None:
            self._evicted_bytes = 0
            self._coming[ref] = slot_bytes
            self._coming_bytes += slot_bytes
            self.begun_bytes += slot_bytes
            self.may_begin -= slot_bytes
        return ref

    def ended(self, ref: int, size_bytes: int) -> None:
        """What was written to that slot took so much; 0: not known."""
        slot_bytes = self._coming.pop(ref, 0)
        self._coming_bytes -= slot_bytes
        if slot_bytes:
            self._left[ref, slot_bytes] = None  # if no block has it after all
            if size_bytes:
                self.may_begin += max(slot_bytes - size_bytes, 0)

    def allow(self, size_bytes: float, before: tuple[int, int]) -> None:
        """So much more may take the disk than was there when `before`, the answer of `mark`, was asked for."""
        under_way, begun = before
        self.may_begin = size_bytes - under_way - (self.begun_bytes - begun)

    def mark(self) -> tuple[int, int]:
        """For `allow`: what is under way, and all that was ever begun."""
        return self._coming_bytes, self.begun_bytes

    def _make_room(self, tenant: Tenant, slot_bytes: int) -> bool:
        """Evicts the coldest, of this tenant and of those who have more than an equal share.

        False where that is not enough, or (`waits`) not yet.
        """
        shrink = self.bytes / self._slot_bytes if self._slot_bytes else 1.0
        coming, needed = int(self._coming_bytes * shrink), int(slot_bytes * shrink)
        before = self.bytes + self._evicted_bytes
        # Where others have taken the room, what is there stays, and only as much goes as comes.
        left = max(self.limit_bytes - coming - needed, min(before, self.most_bytes - coming) - needed)
        for _ in range(EVICT_MAX):
            if self.bytes <= left:
                return True
            row = self._coldest(tenant)
            if row == NONE:
                self.waits = bool(self._coming)
                return False
            self._disk.evict(row)
            self._evicted_bytes = before - self.bytes
        self.waits = True
        return False

    def _coldest(self, tenant: Tenant) -> int:
        policy = self._disk.policy
        pools = sorted(self._may_lose(tenant), key=lambda pool: policy.oldest_use(pool.order))
        return next((row for pool in pools if (row := policy.victim(pool.order)) != NONE), NONE)

    def _may_lose(self, tenant: Tenant) -> Iterator[Pool]:
        have = self._of_tenant
        share = self.limit_bytes // len(have.keys() | {tenant.id})
        for pool in self._disk.segments.filled():
            if pool.tenant == tenant.id or have.get(pool.tenant, 0) > share:
                yield pool

    # -- blocks that come and go

    def keep(self, row: int, size_bytes: int) -> None:
        """A block is there. Where it is not known what it takes, it is its slot."""
        if not self.counts:
            return
        short = len(self._disk.table) - len(self._sizes)
        if short > 0:
            self._sizes.extend([0] * short)
        tenant, slot_bytes = self._pool(row)
        size_bytes = min(size_bytes or slot_bytes, SIZE_MAX)
        self._sizes[row] = size_bytes
        self.bytes += size_bytes
        self._slot_bytes += slot_bytes
        self._of_tenant[tenant] = self._of_tenant.get(tenant, 0) + size_bytes

    def left(self, row: int) -> None:
        """A block goes."""
        if not self.counts:
            return
        size_bytes, (tenant, slot_bytes) = self._sizes[row], self._pool(row)
        self._sizes[row] = 0
        self.bytes -= size_bytes
        self._slot_bytes -= slot_bytes
        self._of_tenant[tenant] -= size_bytes
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        self._left[self._disk.table.place[row], slot_bytes] = None

    def _pool(self, row: int) -> tuple[int, int]:
        pool = self._disk.tree.pool_of(row)
        return pool.tenant, pool.slot_bytes

    # -- slots that nobody needs

    def hand_out(self, number: Callable[[], int]) -> list[VacateSlots]:
        """Slots that are still free, as jobs."""
        asked, self._left = self._left, {}
        slots = [slot for slot in asked if self._is_left(*slot)]
        jobs = [VacateSlots(number(), tuple(slots[at : at + VACATE_MAX])) for at in range(0, len(slots), VACATE_MAX)]
        for job in jobs:
            self._vacating[job.number] = job.slots
            self._busy.update(job.slots)
        return jobs

    def _is_left(self, ref: int, slot_bytes: int) -> bool:
        """Whether nobody has it now. Where somebody reads a block that has left, it is looked at again."""
        segment, slot = self._disk.segments.live.get(ref >> 32), ref & 0xFFFFFFFF
        if segment is None:
            return False  # went as a whole
        if segment.pool is None or segment.pool.slot_bytes != slot_bytes:
            return True  # cut anew since
        if segment.state[slot] == BLOCK and self._disk.table.state[segment.row[slot]] == DOOMED:
            self._left[ref, slot_bytes] = None
        return segment.state[slot] == FREE

    def vacated(self, number: int, error: str) -> None:
        """The report of that job."""
        slots = self._vacating.pop(number, ())
        self._busy.difference_update(slots)
        if error:
            self._left.update(dict.fromkeys(slots))

    def free_runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Segment, bytes of a slot, first slot and how many, of all that is free: a crash may have left bytes there."""
        for segment in list(self._disk.segments.live.values()) if self.counts else ():
            if segment.pool is not None:
                for run in FREE_RUN.finditer(bytes(segment.state)):
                    yield segment.id, segment.pool.slot_bytes, run.start(), run.end() - run.start()

    def lose_all(self) -> None:
        """All blocks have left, and so has what was in their slots."""
        self.may_begin = INFINITY
        self._left.clear()
        self._vacating.clear()
        self._busy.clear()
        self._coming.clear()
        self._coming_bytes = 0
