"""Making room: free slots in a pool, from nobody's memory, from eviction, or from other pools.

One step at a time, in this order:
  1. a segment that belongs to nobody and fits;
  2. a segment made of memory that is in no pool (asked for; the caller may wait);
  3. once a segment's worth of evictions: a segment of the same tenant whose last use is
     older than this pool's next victim, else one of a tenant above its share that is;
  4. this pool's next victim;
  5. where this pool has nothing to evict: segments of the same tenant's other block sizes
     and of tenants above their share, taken apart, if that is enough for a new segment.

Each step is bounded: by the number of segments (at most 1024 and a few) and, where there
is something else to evict, by EMPTY_BLOCKS. A segment with anything held never moves.
"""

from collections.abc import Callable, Iterator

from kvstore.core.block import NONE
from kvstore.core.evict import Policy
from kvstore.core.segments import Pool, Segment, SegmentTable

INFINITY = float("inf")

EMPTY_BLOCKS = 512
"""Blocks dropped at once of a segment that moves: 2 ms. A segment of 256 MiB can have thousands."""


class Room:
    """Finds free slots. `drop(row)` evicts a block and is the store's."""

    def __init__(self, segments: SegmentTable, policy: Policy, drop: Callable[[int], None]) -> None:
        self._segments = segments
        self._policy = policy
        self._drop = drop
        self._until_look: dict[Pool, int] = {}
        self._short: set[Pool] = set()
        """Pools that went above their high mark and are not down at the low one yet."""
        self.moved = 0
        """Segments that went to another block size."""

    @property
    def pending(self) -> bool:
        """Memory is on its way: being prefaulted, or waiting for old holders to unmap it."""
        return bool(self._segments.making) or self._segments.drain_bytes > 0

    def make(self, pool: Pool, slots: int, *, evict: bool = True, keep_since: float = INFINITY) -> None:
        """Tries to have `slots` free slots in `pool`; there may be fewer.

        Without `evict` no block goes for them. Blocks used at `keep_since` or later go only
        for the first slot: they are what the caller has just stored, and a chain would be
        eaten from its end by its own next blocks.
        """
        while pool.free < slots and self._step(pool, evict=evict, keep_since=keep_since):
            pass

    def evict_between(self, pool: Pool, high_free: int, low_free: int, blocks_max: int) -> bool:
        """Below `high_free` free slots, evicts until there are `low_free`, `blocks_max` a call; True until then."""
        if self._grows(pool) or pool.free >= (low_free if pool in self._short else high_free):
            self._short.discard(pool)
            return False
        self._short.add(pool)
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
        oldest = self._policy.oldest_use(pool.order)
        if self._look_elsewhere(pool, oldest) and self._take_colder(pool, oldest):
            self._until_look.pop(pool, None)  # the next may be colder than what is here, too
            return True
        return self._evict(pool)

    def _evict(self, pool: Pool) -> bool:
        row = self._policy.victim(pool.order)
        if row == NONE:
            return False
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
        self._until_look[pool] = max(self._segments.segment_bytes // pool.slot_bytes, 1)
        return len(self._segments.pools) > 1

    def _take_colder(self, pool: Pool, oldest: float) -> bool:
        """Takes a segment that was not used since `oldest`; False where there is none, or it has to be made anew."""
        own = next((s for s in self._own(pool) if s.size_bytes >= pool.slot_bytes), None)
        if own is not None and own.used < oldest:
            if self._emptied(own, pool, oldest):
                self._segments.assign(own, pool)
                self.moved += 1
                return True
            return False
        if oldest == INFINITY or self.pending:
            return False
        size = self._segments.size_for(pool.slot_bytes)
        other = next((s for s in self._others(pool) if s.size_bytes >= size), None)
        if other is not None and other.used < oldest and self._emptied(other, pool, oldest):
            self._segments.drop(other)
            self._segments.want(pool)
        return False

    def _take_apart(self, pool: Pool) -> None:
        """Takes whole segments back, coldest first, if a new one for `pool` can be made of them; else nothing."""
        table = self._segments
        size = table.size_for(pool.slot_bytes)
        found = table.idle_bytes + table.drain_bytes
        taken: list[Segment] = []
        for candidates in (self._own(pool), self._others(pool)):
            for segment in candidates:
                if found < size:
                    taken.append(segment)
                    found += segment.size_bytes
        if found < size:
            return
        for segment in taken:
            self._emptied(segment, pool, INFINITY)
            table.drop(segment)
        table.want(pool)

    def _emptied(self, segment: Segment, pool: Pool, oldest: float) -> bool:
        """Drops the blocks of a segment that `pool` is to have; part of them while the pool can help itself."""
        left = EMPTY_BLOCKS if oldest < INFINITY else len(segment.row)
        for row in reversed(segment.row):
            if row == NONE:
                continue
            if not left:
                self._until_look[pool] = 0
                return False
            self._drop(row)
            left -= 1
        return True

    def _own(self, pool: Pool) -> list[Segment]:
        """Segments of the same tenant's other pools that may move, coldest first."""
        return sorted(
            (s for s in self._segments.live.values() if s.tenant == pool.tenant and s.pool is not pool and not s.held),
            key=lambda segment: segment.used,
        )

    def _others(self, pool: Pool) -> Iterator[Segment]:
        """Segments that may be taken from other tenants, coldest first.

        A tenant keeps an equal share of the slab, but not while another one has nothing.
        """
        table = self._segments
        owned = dict(table.owned)
        share = table.size_bytes // len(owned.keys() | {pool.tenant})
        for segment in sorted(table.live.values(), key=lambda segment: segment.used):
            tenant = segment.tenant
            if tenant in (None, pool.tenant) or segment.held:
                continue
            left = owned[tenant] - segment.size_bytes
            if left >= share or (pool.tenant not in owned and owned[tenant] > share):
                owned[tenant] = left
                yield segment
