"""The slab as the core sees it: segments, the pools they serve, and the slots in them.

A segment is one piece of shared memory. It belongs to nobody, or to one tenant for the
rest of its life (a mapping cannot be taken back from a client), and serves one block
size at a time. A pool is what one tenant has for one block size.

All memory is counted once: the sizes of live segments, what is `draining` (taken back
from its holders and not yet known to be unmapped by all of them) and what is `spare`
(no segment at present) add up to the size of the slab, always.

Making and dropping segments is work for others: it goes out as `Job`s, and `made` comes
back when the memory is there.
"""

from array import array
from dataclasses import dataclass, field
from enum import IntEnum

from kvstore.core.evict import PoolOrder
from kvstore.core.ledger import Ledger
from kvstored.v1.shm import slot_ref

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
SEGMENT_BYTES_MAX = 256 << 20
SEGMENTS_WANTED = 64
LARGE_SLAB_BYTES = 256 << 30
"""Above this the slab is cut in 1024, which bounds descriptors and registrations."""


class Slot(IntEnum):
    """What a slot is: the only states in which memory can be."""

    FREE = 0
    GRANTED = 1  # a session may be writing to it
    BLOCK = 2  # holds a block
    QUARANTINED = 3  # its session ended and its process may still write to it


FREE, GRANTED, BLOCK, QUARANTINED = (int(state) for state in Slot)
"""The same as plain numbers, which cost a third of a member of an enum to look up."""


@dataclass(frozen=True)
class MakeSegment:
    """Allocate and prefault a segment; answer with `SegmentTable.made`."""

    segment: int
    size_bytes: int


@dataclass(frozen=True)
class DropSegment:
    """Punch the pages out and close the descriptor; clients may still have it mapped."""

    segment: int


Job = MakeSegment | DropSegment


def segment_bytes_for(slab_bytes: int, huge_pages: bool) -> int:
    """Size of an ordinary segment: slab / 64 up to 256 MiB, slab / 1024 above 256 GiB; whole pages."""
    page = HUGE_PAGE_BYTES if huge_pages else PAGE_BYTES
    if slab_bytes > LARGE_SLAB_BYTES:
        size = slab_bytes // 1024
    else:
        size = min(slab_bytes // SEGMENTS_WANTED, SEGMENT_BYTES_MAX)
    return max(size // page * page, page)


def pages(size_bytes: int, page_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages."""
    return -(-size_bytes // page_bytes) * page_bytes


@dataclass(eq=False, slots=True, repr=False)
class Pool:
    """One tenant's memory for one block size."""

    tenant: int
    block_bytes: int
    slot_bytes: int
    order: PoolOrder
    segments: dict[int, "Segment"] = field(default_factory=dict)
    open: dict[int, "Segment"] = field(default_factory=dict)
    """Segments with a free slot, the one in use first."""
    slots: int = 0
    """In segments that are not closed; and so is `free`."""
    free: int = 0
    granted: int = 0
    quarantined: int = 0
    blocks: int = 0
    doomed: int = 0
    leased: int = 0
    pinned: int = 0


@dataclass(eq=False, slots=True, repr=False)
class Segment:
    """A run of equal slots once it has a pool; `held` slots keep it from moving."""

    id: int
    size_bytes: int
    tenant: int | None = None
    pool: Pool | None = None
    state: bytearray = field(default_factory=bytearray)
    row: "array[int]" = field(default_factory=lambda: array("i"))
    free: "array[int]" = field(default_factory=lambda: array("I"))
    held: int = 0
    """Slots granted, quarantined, or whose block is leased, pinned or doomed."""
    closed: bool = False
    """On its way to another pool: its slots count in its own no more, and nothing new gets one."""
    used: float = 0.0
    """When a block in it was last used; 0 where the last one has gone."""
    sessions: set[int] = field(default_factory=set)
    """Sessions that were given its descriptor (the giver adds them) and have not said that they unmapped it."""


class SegmentTable:
    """Every segment, every pool, and the balance of the slab's bytes."""

    def __init__(self, size_bytes: int, huge_pages: bool, *, lazily: bool = False) -> None:
        """`lazily`: segments are made when a pool wants one, not all at the start."""
        self.size_bytes = size_bytes
        self.huge_pages = huge_pages
        self.page_bytes = HUGE_PAGE_BYTES if huge_pages else PAGE_BYTES
        self.segment_bytes = segment_bytes_for(size_bytes, huge_pages)
        self.live: dict[int, Segment] = {}
        self.unowned: dict[int, Segment] = {}
        self.draining: dict[int, Segment] = {}
        self.silent: set[int] = set()
        """Sessions that will never say that they unmapped anything: ended, but their process is alive."""
        self.pools: dict[tuple[int, int], Pool] = {}
        """All, of which tens of thousands may have no memory: what is done often walks `filled` instead."""
        self.smallest: dict[int, Pool] = {}
        """Tenant -> its pool of the smallest blocks."""
        self.owned: dict[int, int] = {}
        """Tenant -> bytes of its live segments."""
        self._owned_bytes = 0
        self.spare_bytes = size_bytes
        self.making: dict[int, int] = {}
        """Segment -> its size, until its memory is there."""
        self.making_for: dict[int, Pool] = {}
        """Segment in `making` -> the pool that asked for it; those made at the start are for anybody."""
        self.awaited: dict[Pool, None] = {}
        """Pools that get a new segment when enough of what drains is back, first come first."""
        self.starved = False
        """The last attempt to make a segment found no memory."""
        self.jobs: list[Job] = []
        self.none_made = False
        """Set by whoever makes segments, while there is no use in asking for one: what is there has to do."""
        self.adopting: set[int] = set()
        """Segments of an earlier life whose blocks are being put back: their slots are granted to nobody."""
        self.ledger: Ledger | None = None
        self._last_id = 0
        if not lazily:
            self.make_all()

    # -- segments

    def make_all(self) -> None:
        """Asks for ordinary segments of all memory that is spare; they are for anybody."""
        while self.spare_bytes >= self.segment_bytes:
            self._make(self.segment_bytes, None)

    def take_back(self) -> None:
        """Undoes `make_all`, before anybody has begun to make any: segments of an earlier life are to come first."""
        assert not self.live, "segments are there already"
        self.spare_bytes = self.size_bytes
        self.making.clear()
        self.jobs.clear()
        self._last_id = 0

    def made(self, segment: int) -> Segment:
        """The memory of a `MakeSegment` job is there: the pool that asked has it, else whoever is first."""
        made = Segment(segment, self.making.pop(segment))
        self.starved = False
        self.live[segment] = self.unowned[segment] = made
        pool = self.making_for.pop(segment, None)
        if pool is not None:
            self.assign(made, pool)
        return made

    def adopt(self, segment: int, size_bytes: int, pool: Pool) -> None:
        """A segment that was there before this life of the daemon: all its slots are taken until `adopted`.

        The bytes come out of what is spare, which the caller has seen to be enough.
        """
        assert segment not in self.live, f"segment {segment} is live already"
        assert segment not in self.making, f"segment {segment} is being made"
        assert size_bytes <= self.spare_bytes, f"{size_bytes} bytes adopted, {self.spare_bytes} spare"
        self.spare_bytes -= size_bytes
        self._last_id = max(self._last_id, segment)
        adopted = self.live[segment] = self.unowned[segment] = Segment(segment, size_bytes)
        self.assign(adopted, pool)
        count = len(adopted.state)
        adopted.state[:] = bytes([GRANTED]) * count
        adopted.free = array("I")
        adopted.held += count
        pool.free -= count
        pool.granted += count
        del pool.open[segment]
        self.adopting.add(segment)

    def adopt_unowned(self, segment: int, size_bytes: int) -> None:
        """The same of one that was nobody's."""
        assert segment not in self.live, f"segment {segment} is live already"
        assert size_bytes <= self.spare_bytes, f"{size_bytes} bytes adopted, {self.spare_bytes} spare"
        self.spare_bytes -= size_bytes
        self._last_id = max(self._last_id, segment)
        self.live[segment] = self.unowned[segment] = Segment(segment, size_bytes)

    def adopted(self, segment: int) -> None:
        """Every block that was in it has been put into its slot: the others are free."""
        self.adopting.remove(segment)
        first = slot_ref(segment, 0)
        state = self.live[segment].state
        for number in range(len(state) - 1, -1, -1):
            if state[number] == GRANTED:
                self.free_slot(first + number)

    def never_make(self, below: int) -> None:
        """Numbers up to this one are of segments that may still be there."""
        self._last_id = max(self._last_id, below)

    def failed(self, segment: int, *, starved: bool = True) -> None:
        """A `MakeSegment` job found no memory: its bytes stay out of use until somebody asks again.

        While they are `starved`, pools make do with what they have as they ask.
        """
        self.spare_bytes += self.making.pop(segment)
        self.making_for.pop(segment, None)
        self.starved = starved

    def size_for(self, block_bytes: int) -> int:
        """Size of a segment that a block of this size fits in."""
        return max(pages(block_bytes, self.page_bytes), self.segment_bytes)

    def add_pool(self, pool: Pool) -> None:
        """A new one, without memory."""
        self.pools[pool.tenant, pool.block_bytes] = pool
        smallest = self.smallest.setdefault(pool.tenant, pool)
        if pool.block_bytes < smallest.block_bytes:
            self.smallest[pool.tenant] = pool

    def filled(self) -> list[Pool]:
        """The pools that have memory, no more than there are segments; all that another one can say of itself is 0."""
        pools = dict.fromkeys(segment.pool for segment in self.live.values())
        return [pool for pool in pools if pool is not None]

    @property
    def idle_bytes(self) -> int:
        """Memory in no pool, made or not."""
        return self.spare_bytes * (not self.none_made) + sum(segment.size_bytes for segment in self.unowned.values())

    @property
    def drain_bytes(self) -> int:
        """Memory that comes back as soon as its holders have unmapped it, as they will."""
        return sum(s.size_bytes for s in self.draining.values() if s.sessions.isdisjoint(self.silent))

    def coming(self, pool: Pool) -> bool:
        """A segment that this pool could have is being made."""
        for segment, size in self.making.items():
            if size >= pool.slot_bytes and self.making_for.get(segment, pool) is pool:
                return True
        return False

    def want(self, pool: Pool) -> bool:
        """Sees to it that a segment for `pool` is being made, now or (False) when enough memory has come back."""
        size = self.size_for(pool.slot_bytes)
        coming = self.coming(pool)
        if not coming and self.idle_bytes < size:
            self.awaited[pool] = None
            return False
        self.awaited.pop(pool, None)
        if coming:
            return True
        while self.spare_bytes < size:
            self.drop(next(iter(self.unowned.values())))
        self._make(size, pool)
        return True

    def drop(self, segment: Segment) -> None:
        """Takes a segment out of use; its bytes are spare once no session can have it mapped."""
        assert not segment.held, f"segment {segment.id} dropped with {segment.held} held slots"
        self._leave_pool(segment)
        del self.live[segment.id]
        self.unowned.pop(segment.id, None)
        if segment.tenant is not None:
            self._owned_bytes -= segment.size_bytes
            self.owned[segment.tenant] -= segment.size_bytes
            if not self.owned[segment.tenant]:
                del self.owned[segment.tenant]
        self.jobs.append(DropSegment(segment.id))
        if segment.sessions:
            self.draining[segment.id] = segment
        else:
            self.spare_bytes += segment.size_bytes

    def forget_session(self, session: int, segments: list[int] | None = None) -> None:
        """`session` has unmapped these segments, or (None) is gone with all it had mapped.

        One that is still in use is not forgotten: its descriptor is with the session, and
        nothing but the end of that session says that it will not be mapped again.
        """
        if segments is None:
            self.silent.discard(session)
            for live in self.live.values():
                live.sessions.discard(session)
        for number in list(self.draining) if segments is None else segments:
            segment = self.draining.get(number)
            if segment is None:
                continue
            segment.sessions.discard(session)
            if not segment.sessions:
                del self.draining[number]
                self.spare_bytes += segment.size_bytes
                for pool in list(self.awaited):
                    self.want(pool)

    def assign(self, segment: Segment, pool: Pool) -> None:
        """Gives a segment with nothing in it to a pool of the tenant that owns it, or of anybody."""
        assert segment.tenant in (None, pool.tenant), "a segment never changes tenant"
        assert not segment.held, f"segment {segment.id} moved with {segment.held} held slots"
        self._leave_pool(segment)
        self.unowned.pop(segment.id, None)
        count = segment.size_bytes // pool.slot_bytes
        assert count, "a segment too small for its pool"
        if segment.tenant is None:
            self.owned[pool.tenant] = self.owned.get(pool.tenant, 0) + segment.size_bytes
            self._owned_bytes += segment.size_bytes
        segment.tenant, segment.pool = pool.tenant, pool
        segment.state = bytearray(count)
        segment.row = array("i", [-1]) * count
        segment.free = array("I", range(count - 1, -1, -1))
        # As new as anything is, so that nobody else takes it before whoever waits for it has come.
        segment.used = max(live.used for live in self.live.values())
        pool.segments[segment.id] = pool.open[segment.id] = segment
        pool.slots += count
        pool.free += count
        if self.ledger is not None:
            self.ledger.assigned(segment.id, pool.tenant, pool.block_bytes, count)

    def unassign(self, segment: Segment) -> None:
        """Undoes `assign`: a segment that was nobody's, and that no session has seen since, is nobody's again."""
        assert not segment.sessions, f"segment {segment.id} is known to sessions"
        assert segment.tenant is not None, f"segment {segment.id} is nobody's already"
        self._leave_pool(segment)
        self._owned_bytes -= segment.size_bytes
        self.owned[segment.tenant] -= segment.size_bytes
        if not self.owned[segment.tenant]:
            del self.owned[segment.tenant]
        segment.tenant, segment.used = None, 0.0
        segment.state, segment.row, segment.free = bytearray(), array("i"), array("I")
        self.unowned[segment.id] = segment

    def close(self, segment: Segment) -> None:
        """Begins to take a segment away from its pool: no slot of it is granted any more, and blocks in it may stay."""
        pool = segment.pool
        assert pool is not None, f"segment {segment.id} closed and in no pool"
        assert not segment.held, f"segment {segment.id} closed with {segment.held} held slots"
        assert not segment.closed, f"segment {segment.id} closed twice"
        segment.closed = True
        pool.slots -= len(segment.state)
        pool.free -= len(segment.free)
        pool.open.pop(segment.id, None)

    def reopen(self, segment: Segment) -> None:
        """It stays with its pool."""
        pool = segment.pool
        assert pool is not None and segment.closed, f"segment {segment.id} was not closed"  # noqa: PT018 (for mypy)
        segment.closed = False
        pool.slots += len(segment.state)
        pool.free += len(segment.free)
        if segment.free:
            pool.open[segment.id] = segment

    def tenant_bytes(self, tenant: int) -> int:
        """What a tenant can have: all but what other tenants own."""
        return self.size_bytes - self._owned_bytes + self.owned.get(tenant, 0)

    def _leave_pool(self, segment: Segment) -> None:
        pool = segment.pool
        if pool is None:
            return
        assert len(segment.free) == len(segment.state), f"segment {segment.id} moved with slots in use"
        if segment.closed:
            segment.closed = False
        else:
            pool.slots -= len(segment.state)
            pool.free -= len(segment.state)
            del pool.open[segment.id]
        del pool.segments[segment.id]
        segment.pool = None

    def _make(self, size_bytes: int, pool: Pool | None) -> None:
        self._last_id += 1
        self.spare_bytes -= size_bytes
        self.making[self._last_id] = size_bytes
        if pool is not None:
            self.making_for[self._last_id] = pool
        self.jobs.append(MakeSegment(self._last_id, size_bytes))

    # -- slots

    def take_slots(self, pool: Pool, count: int) -> list[int]:
        """Grants `count` free slots of a pool that has them; answers their references."""
        assert count <= pool.free, f"{count} slots asked of {pool.free} free"
        refs: list[int] = []
        while len(refs) < count:
            segment = next(iter(pool.open.values()))
            free, state, first = segment.free, segment.state, slot_ref(segment.id, 0)
            here = min(count - len(refs), len(free))
            for _ in range(here):
                number = free.pop()
                state[number] = GRANTED
                refs.append(first + number)
            segment.held += here
            if not free:
                del pool.open[segment.id]
        pool.free -= count
        pool.granted += count
        return refs

    def fill_slot(self, ref: int, row: int, now: float) -> None:
        """A granted slot now holds the block `row`."""
        segment, number = self.live[ref >> 32], ref & 0xFFFFFFFF
        assert segment.state[number] == GRANTED, f"slot {ref:#x} filled in state {segment.state[number]}"
        pool = segment.pool
        assert pool is not None
        segment.state[number] = BLOCK
        segment.row[number] = row
        segment.held -= 1
        segment.used = now
        pool.granted -= 1
        pool.blocks += 1

    def quarantine_slot(self, ref: int) -> None:
        """The session of a granted slot ended; its process may still write there."""
        segment, number = self.at(ref)
        assert segment.state[number] == GRANTED, f"slot {ref:#x} quarantined in state {segment.state[number]}"
        assert segment.pool is not None
        segment.state[number] = QUARANTINED
        segment.pool.granted -= 1
        segment.pool.quarantined += 1

    def unquarantine_slot(self, ref: int) -> None:
        """The process attached again and still writes to this slot: it is granted once more."""
        segment, number = self.at(ref)
        assert segment.state[number] == QUARANTINED, f"slot {ref:#x} in state {segment.state[number]}"
        assert segment.pool is not None
        segment.state[number] = GRANTED
        segment.pool.quarantined -= 1
        segment.pool.granted += 1

    def free_slot(self, ref: int) -> None:
        """Nothing that lives can touch this slot any more."""
        segment, number = self.live[ref >> 32], ref & 0xFFFFFFFF
        pool = segment.pool
        assert pool is not None
        state = segment.state[number]
        if state == BLOCK:
            segment.row[number] = -1
        elif state == GRANTED:
            pool.granted -= 1
            segment.held -= 1
        else:
            assert state == QUARANTINED, f"slot {ref:#x} freed twice"
            pool.quarantined -= 1
            segment.held -= 1
        segment.state[number] = FREE
        free = segment.free
        if not segment.closed:
            if not free:
                pool.open[segment.id] = segment
            pool.free += 1
        free.append(number)
        if len(free) == len(segment.state):
            segment.used = 0.0

    def at(self, ref: int) -> tuple[Segment, int]:
        """The segment and slot number of a reference that the core itself handed out."""
        return self.live[ref >> 32], ref & 0xFFFFFFFF

    def known(self, ref: int) -> bool:
        """Whether a reference from outside names a slot at all."""
        segment = self.live.get(ref >> 32)
        return segment is not None and (ref & 0xFFFFFFFF) < len(segment.state)
