"""Making room: free slots in a pool, from nobody's memory, from eviction, or from other pools.

One step at a time, in this order:
  1. a segment that belongs to nobody and fits;
  2. a segment made of memory that is in no pool (asked for; the caller may wait);
  3. once a segment's worth of evictions: a segment of the same tenant whose last use is
     older than this pool's next victim, else one of a tenant above its share that is;
  4. this pool's next victim;
  5. where this pool has nothing to evict: segments of the same tenant's other block sizes
     and of tenants above their share, taken apart, if that is enough for a new segment.

A segment with blocks in it is taken in steps of EMPTY_BLOCKS: it is closed, so that its
pool puts nothing more there, and emptied a step with each call that wants it and with each
turn of the daemon's loop (`go_on`). So every call is bounded, by EMPTY_BLOCKS and by the
number of segments (at most 1024 and a few). A segment with anything held never moves; where
somebody holds a block of one that is being emptied, it is opened again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvstore.core.block import NONE, BlockTable
from kvstore.core.evict import Policy
from kvstore.core.segments import Pool, Segment, SegmentTable

INFINITY = float("inf")

STEP_POOLS = 8
"""Pools in which blocks are evicted in one step: 5 ms with the daemon's 128 blocks a pool."""

EMPTY_BLOCKS = 512
"""Blocks dropped in one call of segments that move: 2 ms. A segment of 256 MiB can have thousands."""


@dataclass(eq=False, slots=True)
class Taking:
    """Segments on their way from other pools to one: closed, and being emptied."""

    full: list[Segment]
    """With blocks still, the next one last."""
    slots: int
    """Of that next one: how many have yet to be looked at, from the end."""
    empty: list[Segment] = field(default_factory=list)


class Room:
    """Finds free slots. `drop(row)` evicts a block and is the store's."""

    def __init__(self, table: BlockTable, segments: SegmentTable, policy: Policy, drop: Callable[[int], None]) -> None:
        self._place = table.place
        self._segments = segments
        self._policy = policy
        self._drop = drop
        self._until_look: dict[Pool, int] = {}
        self._short: set[Pool] = set()
        """Pools that went above their high mark and are not down at the low one yet."""
        self._taking: dict[Pool, Taking] = {}
        self._looking: set[Pool] = set()
        """Pools with more held blocks than one look for a victim passes: looked through in the daemon's loop."""
        self._left = 0
        """Blocks that this call may yet drop of segments that move."""
        self._turn = 0
        self.moved = 0
        """Segments that went to another block size."""
        self.waits_ended = 0
        """Times that what was `pending` here came to its end, so that who waits should ask again."""

    @property
    def pending(self) -> bool:
        """Memory is on its way: being prefaulted, emptied or looked for, or waiting for old holders to unmap it."""
        return bool(self._segments.making or self._taking or self._looking) or self._segments.drain_bytes > 0

    @property
    def busy(self) -> bool:
        """Segments are being emptied."""
        return bool(self._taking)

    def make(self, pool: Pool, slots: int, *, evict: bool = True, keep_since: float = INFINITY) -> None:
        """Tries to have `slots` free slots in `pool`; there may be fewer.

        Without `evict` no block goes for them. Blocks used at `keep_since` or later go only
        for the first slot: they are what the caller has just stored, and a chain would be
        eaten from its end by its own next blocks.
        """
        self._left = EMPTY_BLOCKS
        while pool.free < slots and self._step(pool, evict=evict, keep_since=keep_since):
            pass

    def go_on(self) -> bool:
        """One step of what is being emptied, oldest wish first; True if there is more."""
        self._left = EMPTY_BLOCKS
        for pool in list(self._taking):
            if not self._left:
                break
            self._empty(pool)
        if self._looking:
            pool = self._looking.pop()
            self._policy.victim(pool.order)
            if pool.order.passing:
                self._looking.add(pool)
            else:
                self.waits_ended += 1
        return bool(self._taking or self._looking)

    def give_up(self) -> None:
        """Segments that are being emptied stay where they are."""
        for taking in self._taking.values():
            for segment in (*taking.full, *taking.empty):
                self._segments.reopen(segment)
        self._taking.clear()
        self._looking.clear()

    def evict_step(self, high: float, low: float, blocks_max: int) -> bool:
        """Keeps every full pool's use between two watermarks; True if more remains to be done.

        At most `blocks_max` blocks a pool; after STEP_POOLS pools that were short, the others wait for the next step.
        """
        more = self.go_on()
        pools = list({segment.pool: None for segment in self._segments.live.values()})
        start = self._turn % max(len(pools), 1)
        short = 0
        for pool in pools[start:] + pools[:start]:
            if short == STEP_POOLS:
                return True
            self._turn += 1
            if pool is None:
                continue
            before = pool.free
            above, below = _free_at(pool.slots, high), _free_at(pool.slots, low)
            more |= self.evict_between(pool, above, below, blocks_max)
            short += pool.free != before
        self._turn = 0
        return more

    def keeps(self, pool: Pool, high: float) -> bool:
        """Whether what is held leaves room for a block: else `evict_step` drops each as soon as it is stored."""
        table, slots = self._segments, pool.slots
        size = table.size_for(pool.slot_bytes)
        more = table.idle_bytes + table.drain_bytes + sum(segment.size_bytes for segment in self._others(pool))
        more += sum(s.size_bytes for s in self._free_to_move() if s.tenant == pool.tenant and s.pool is not pool)
        if not pool.free:  # the first of it goes for that block
            first = self._fits_unowned(pool)
            taken = first.size_bytes if first is not None else size if more >= size else 0
            slots += taken // pool.slot_bytes
            more -= taken
        if table.coming(pool) or more >= size:
            return True
        held = sum(segment.held for segment in pool.segments.values() if not segment.closed)
        return held + 1 <= slots - _free_at(slots, high)

    def evict_between(self, pool: Pool, high_free: int, low_free: int, blocks_max: int) -> bool:
        """Below `high_free` free slots, evicts until there are `low_free`, `blocks_max` a call; True until then."""
        if self._grows(pool) or pool.free >= (low_free if pool in self._short else high_free):
            self._short.discard(pool)
            return False
        self._short.add(pool)
        self._left = EMPTY_BLOCKS
        for _ in range(blocks_max):
            if pool.free >= low_free or not self._take_or_evict(pool):
                break
        else:
            if pool.free < low_free:
                return True
        self._short.discard(pool)
        return False

    def _grows(self, pool: Pool) -> bool:
        """Memory that this pool may have is there, or is being made, without taking it from anybody."""
        return self._fits_unowned(pool) is not None or self._segments.coming(pool)

    def _fits_unowned(self, pool: Pool) -> Segment | None:
        for segment in self._segments.unowned.values():
            if segment.size_bytes >= pool.slot_bytes:
                return segment
        return None

    def _step(self, pool: Pool, *, evict: bool, keep_since: float) -> bool:
        table = self._segments
        segment = self._fits_unowned(pool)
        if segment is not None:
            table.assign(segment, pool)
            return True
        if table.coming(pool) or table.idle_bytes >= table.size_for(pool.slot_bytes):
            asked_before = table.starved
            table.want(pool)
            if not asked_before:
                return False
        if not evict:
            return False
        if pool.free and self._policy.oldest_use(pool.order) >= keep_since:
            return self._take_colder(pool, keep_since)
        if self._take_or_evict(pool):
            return True
        if not self.pending:
            self._take_apart(pool)
        return False

    def _take_or_evict(self, pool: Pool) -> bool:
        """What was used longest ago goes: a segment of another block size, or a block of this one."""
        if pool in self._taking:
            if self._empty(pool):
                return True
        else:
            oldest = self._policy.oldest_use(pool.order)
            if self._look_elsewhere(pool, oldest):
                if self._take_colder(pool, oldest):
                    self._until_look.pop(pool, None)  # the next may be colder than what is here, too
                    return True
                if pool.slot_bytes > self._segments.segment_bytes and self._segments.coming(pool):
                    return False  # it is being made of what was colder: what is here need not go for it
        return self._evict(pool)

    def _evict(self, pool: Pool) -> bool:
        row = self._policy.victim(pool.order)
        if row == NONE:
            if pool.order.passing:
                self._looking.add(pool)
            return False
        if self._segments.live[self._place[row] >> 32].closed:  # which helps who takes that segment, and not this pool
            if not self._left:
                return False
            self._left -= 1
        self._drop(row)
        return True

    def _look_elsewhere(self, pool: Pool, oldest: float) -> bool:
        """Once a segment's worth of evictions, or when there is nothing to evict here."""
        if oldest == INFINITY:
            return True
        left = self._until_look.get(pool, 0)
        if left > 0:
            self._until_look[pool] = left - 1
            return False
        self._until_look[pool] = self._segments.segment_bytes // pool.slot_bytes
        return len(self._segments.pools) > 1

    def _take_colder(self, pool: Pool, oldest: float) -> bool:
        """Takes a segment that was not used since `oldest`; False where there is none, or it has to be made anew."""
        if pool in self._taking:
            return self._empty(pool)
        own = next((s for s in self._own(pool) if s.size_bytes >= pool.slot_bytes), None)
        if own is not None and own.used < oldest:
            return self._take(pool, [own])
        if oldest == INFINITY or self.pending:
            return False
        size = self._segments.size_for(pool.slot_bytes)
        other = next((s for s in self._others(pool) if s.size_bytes >= size), None)
        if other is not None and other.used < oldest:
            self._take(pool, [other])
        elif pool.slot_bytes > self._segments.segment_bytes:
            # None of the ordinary ones is large enough; or a pool of such blocks would live of its own last one.
            self._take_apart(pool, oldest)
        return False

    def _take_apart(self, pool: Pool, before: float = INFINITY) -> None:
        """Takes whole segments not used since `before`, coldest first, if one for `pool` can be made of them."""
        table = self._segments
        size = table.size_for(pool.slot_bytes)
        found = table.idle_bytes + table.drain_bytes
        taken: list[Segment] = []
        for candidates in (self._own(pool), self._others(pool)):
            for segment in candidates:
                if found < size and segment.used < before:
                    taken.append(segment)
                    found += segment.size_bytes
        if found < size:
            return
        self._take(pool, taken)

    def _take(self, pool: Pool, segments: list[Segment]) -> bool:
        """Begins to take these for `pool`; True where it has one at once."""
        for segment in segments:
            self._segments.close(segment)
        segments.reverse()
        self._taking[pool] = Taking(segments, len(segments[-1].row) if segments else 0)
        return self._empty(pool)

    def _empty(self, pool: Pool) -> bool:
        """Drops blocks of what `pool` is to have, as many as this call may; True when it has got a segment."""
        taking = self._taking[pool]
        full = taking.full
        if any(segment.held for segment in full):
            for segment in full + taking.empty:
                self._segments.reopen(segment)
            self._ended(pool)
            return False
        while full:
            rows = full[-1].row
            while taking.slots:
                row = rows[taking.slots - 1]
                if row != NONE:
                    if not self._left:
                        return False
                    self._left -= 1
                    self._drop(row)
                taking.slots -= 1
            taking.empty.append(full.pop())
            taking.slots = len(full[-1].row) if full else 0
        self._ended(pool)
        first = taking.empty[0] if len(taking.empty) == 1 else None
        if first is not None and first.tenant == pool.tenant and first.size_bytes >= pool.slot_bytes:
            self._segments.assign(first, pool)
            self.moved += 1
            return True
        for segment in taking.empty:
            self._segments.drop(segment)
        self._segments.want(pool)
        return False

    def _ended(self, pool: Pool) -> None:
        del self._taking[pool]
        self.waits_ended += 1

    def _own(self, pool: Pool) -> list[Segment]:
        """Segments of the same tenant's other pools that may move, coldest first."""
        return sorted(
            (s for s in self._free_to_move() if s.tenant == pool.tenant and s.pool is not pool),
            key=lambda segment: segment.used,
        )

    def _free_to_move(self) -> Iterator[Segment]:
        """Segments in which nothing is held and that nobody takes already."""
        return (segment for segment in self._segments.live.values() if not segment.held and not segment.closed)

    def _others(self, pool: Pool) -> Iterator[Segment]:
        """Segments that may be taken from other tenants, coldest first.

        A tenant keeps an equal share of the slab, but not while another one has nothing.
        """
        table = self._segments
        owned = dict(table.owned)
        share = table.size_bytes // len(owned.keys() | {pool.tenant})
        for segment in sorted(self._free_to_move(), key=lambda segment: segment.used):
            tenant = segment.tenant
            if tenant in (None, pool.tenant):
                continue
            left = owned[tenant] - segment.size_bytes
            if left >= share or (pool.tenant not in owned and owned[tenant] > share):
                owned[tenant] = left
                yield segment


def _free_at(slots: int, mark: float) -> int:
    """How many of so many slots are free where their use is at that watermark."""
    return int(slots * (1 - mark))
