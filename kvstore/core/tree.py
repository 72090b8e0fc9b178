"""The prefix tree over the block table: how a block comes, is used, is held and goes.

Each step here changes the table, the tenant's key dict, the tree, the policy's order, the
slot and the published index together, so that they never disagree between two calls.
Order of statements where readers look on: a block is published last when it comes and
withdrawn first when it goes.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from kvstore.core.block import HINTED, HITS_MAX, MISSING, NONE, PINNED, SEALED, BlockTable
from kvstore.core.evict import Policy, PoolOrder
from kvstore.core.families import DEPTH_MAX, Families
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.ledger import Ledger
from kvstore.core.segments import Pool, Segment, SegmentTable

RECENT_S = 1.0
"""A use of a block is one of all it hangs from, told to those not used for this long.

Without it every batch of a long prompt would walk up all that was stored before: 1.2 ms
a commit at 4,096 blocks. The policy loses nothing: a parent is younger than its children
by their being there, and is compared with them only when the last of them is gone.
"""

JUST_NOW_S = 0.02
"""Uses closer together than this are one: what reads a chain again and again need not move it each time."""

CLIMB_MAX = 4096
"""Blocks that nobody named and a call touches all the same, for being above what was named: 2 ms.

The way up from where a call stopped is gone on with later, nearer to the root.
"""

CLIMBS_MAX = 4096
"""Ways up that wait to be gone on with; of one more, the blocks above are not touched this time."""

SETTLE_STEP = 2048
"""Children that are told of a parent's coming or going in one step: about 3 ms."""

UNTIL_SLACK = 4096
"""Stale times kept beyond as many as there are live ones, before they are sifted."""

SIFT_STEP = 4
"""Times sifted with each that is set: a million at once would be half a second."""


Numbers = NDArray[Any]
"""One for each block."""


class IndexPort(Protocol):
    """Where visible blocks are published: the shared-memory index, or a dict in tests."""

    def publish(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int) -> None:
        """Readers may find the block from now on."""

    def fill(
        self, tenant: int, keys: list[bytes], refs: Numbers, offsets: Numbers, lengths: Numbers, namespaces: Numbers
    ) -> None:
        """Publishes many of a tenant that has none, before anybody reads."""

    def withdraw(self, tenant: int, key: bytes) -> None:
        """No reader may find the block from now on, or count a copy that is not finished."""


class PrefixTree:
    """All sealed and doomed blocks of all tenants."""

    def __init__(
        self, table: BlockTable, segments: SegmentTable, policy: Policy, index: IndexPort, namespaces: list[Namespace]
    ) -> None:
        self.table = table
        self.segments = segments
        self.policy = policy
        self.until: dict[int, float] = {}
        """row * 4 + mark -> when the pin or the life of that block ends."""
        self.untils: list[tuple[float, int]] = []
        """A heap of the same; those that `until` does not know (any more) are stale."""
        self.untils_before: list[tuple[float, int]] = []
        """The heap before that, which had too many stale ones: sifted a few at a time."""
        self.families = Families(table, segments, policy)
        self.climbs: dict[int, None] = {}
        """Where to go on marking what calls did not get to: it and all it hangs from were used."""
        self.ledger: Ledger | None = None
        self.used_rows: set[int] = set()
        """Of these the ledger does not know yet when they were used."""
        self.index = index
        self._namespaces = namespaces

    # -- coming

    def seal(
        self, namespace: Namespace, pool: Pool, key: bytes, ref: int, parent_key: bytes, depth: int, now: float
    ) -> int:
        """Makes a granted slot a visible block; `list_new` must follow before anything else does."""
        table, tenant = self.table, namespace.tenant
        row = tenant.missing.pop(key, NONE) if tenant.missing else NONE
        awaited = row != NONE
        if not awaited:
            row = table.take()
        deepest = table.depth[row] if awaited else DEPTH_MAX
        table.move(row, "commit")
        table.key[row] = key
        table.place[row] = ref
        table.namespace[row] = namespace.id
        table.used[row] = table.stored[row] = now
        table.hits[row] = 0
        self.segments.fill_slot(ref, row, now)
        self.families.hang(tenant, row, parent_key, depth, deepest)
        tenant.rows[key] = row
        if awaited:
            self.families.come(row)
        namespace.blocks += 1
        if self.ledger is not None:
            self.ledger.sealed(ref, key, parent_key, namespace.id, table.depth[row], now, now)
        offset = (ref & 0xFFFFFFFF) * pool.slot_bytes
        self.index.publish(tenant.id, key, ref, offset, namespace.block_bytes, namespace.id)
        return row

    def list_new(self, pool: Pool, new: list[int], now: float) -> None:
        """Gives new blocks their place in the policy's order, leaves first, and touches what they hang from."""
        parent, used, state = self.table.parent, self.table.used, self.table.state
        above: list[int] = []
        for row in reversed(new):
            up = parent[row]
            self.policy.add(pool.order, row, orphan=up != NONE and state[up] == MISSING)
            if up != NONE and used[up] < now - RECENT_S:
                above.append(up)
        if above:
            self._climb(above, now)

    # -- being used

    def touch(self, rows: Sequence[int], now: float) -> None:
        """Marks rows and all they hang from as used now: deepest first, so that roots end up newest."""
        if not rows or min(map(self.table.used.__getitem__, rows)) > now - JUST_NOW_S:
            return
        above = self._mark(rows, now)
        if above:
            self._climb(above, now)

    def _mark(self, rows: Sequence[int], now: float) -> list[int]:
        """Marks these rows as used; answers parents that were not used lately, unless they are among `rows`."""
        table = self.table
        used, place, parent = table.used, table.place, table.parent
        recent = now - RECENT_S
        number = NONE
        order: PoolOrder | None = None
        moved: list[int] = []
        above: list[int] = []
        for row in reversed(rows):
            if used[row] == now:
                continue
            used[row] = now
            if place[row] >> 32 != number:
                number = place[row] >> 32
                segment, pool = self._at(number)
                segment.used = now
                if order is not pool.order:
                    if order is not None:
                        self.policy.touch(order, moved)
                    order, moved = pool.order, []
            moved.append(row)
            if parent[row] != NONE and used[parent[row]] < recent:
                above.append(parent[row])
        if order is not None:
            self.policy.touch(order, moved)
        if self.ledger is not None:
            self.used_rows.update(rows)
        return above

    def _climb(self, rows: Sequence[int], now: float, blocks_max: int | None = None) -> int:
        """Marks rows that no caller named and all they hang from; answers how many more there might have been."""
        used, parent = self.table.used, self.table.parent
        left = CLIMB_MAX if blocks_max is None else blocks_max
        for start in rows:
            row, path = start, []
            while row != NONE and used[row] < now - RECENT_S:
                if not left:
                    if len(self.climbs) < CLIMBS_MAX:
                        self.climbs[row] = None
                    break
                path.append(row)
                row = parent[row]
                left -= 1
            path.reverse()
            self._mark(path, now)
        return left

    def catch_up(self, now: float) -> bool:
        """Goes on with what calls have left for later, one bounded step; True if there is more."""
        left = CLIMB_MAX
        while self.climbs and left:
            left = self._climb([self.climbs.popitem()[0]], now, left)
        return self.families.settle(SETTLE_STEP) or bool(self.climbs)

    def hit(self, rows: Sequence[int]) -> None:
        """Counts a hit on each row."""
        hits = self.table.hits
        for row in rows:
            if hits[row] != HITS_MAX:
                hits[row] += 1
        if self.ledger is not None:
            self.used_rows.update(rows)

    # -- going

    def drop(self, row: int) -> None:
        """A sealed block loses its key, and its slot now or with its last lease."""
        table = self.table
        key = table.key[row]
        assert key is not None, f"row {row} dropped twice"
        if self.ledger is not None:
            self.ledger.gone(table.place[row])
        namespace = self._namespaces[table.namespace[row] - 1]
        tenant, pool = namespace.tenant, self.pool_of(row)
        self.index.withdraw(tenant.id, key)
        del tenant.rows[key]
        namespace.blocks -= 1
        table.key[row] = None
        if table.marks[row]:
            self._drop_marks(row, pool)
        self.policy.remove(pool.order, row)
        if row in self.climbs:
            del self.climbs[row]
            above = table.parent[row]
            if above != NONE and table.state[above] == SEALED:
                self.climbs[above] = None
        self.families.leave(tenant, row)
        pool.blocks -= 1
        if table.child[row] != NONE:
            if table.leases[row]:
                self._doom_elsewhere(row, pool)
            else:
                self.segments.free_slot(table.place[row])
            self.families.stay_behind(tenant, key, row)
        elif table.leases[row]:
            table.move(row, "drop leased")
            pool.doomed += 1
        else:
            table.move(row, "drop")
            self.segments.free_slot(table.place[row])
            table.give_back(row)

    def _doom_elsewhere(self, row: int, pool: Pool) -> None:
        """The row of a leased block stays with its children: the block waits for its last lease in another."""
        table = self.table
        doomed = table.take()
        table.move(doomed, "doom")
        for column in (table.place, table.namespace, table.leases, table.hits, table.depth):
            column[doomed] = column[row]
        table.used[doomed], table.stored[doomed] = table.used[row], table.stored[row]
        segment, number = self.segments.at(table.place[row])
        segment.row[number] = doomed
        pool.doomed += 1

    def _drop_marks(self, row: int, pool: Pool) -> None:
        marks = self.table.marks[row]
        self.table.marks[row] = 0
        if marks & HINTED:
            del self.until[row * 4 + HINTED]
        if marks & PINNED:
            del self.until[row * 4 + PINNED]
            self._count_pin(row, pool, -1)
            if not self.table.leases[row]:
                self.segments.live[self.table.place[row] >> 32].held -= 1

    # -- being held

    def lease(self, rows: Sequence[int], tenant: Tenant, pool: Pool, *, hit: bool = True) -> None:
        """One hold more on each row; all are of one pool. Without `hit` it is no use of the block."""
        leases, marks, place, live = self.table.leases, self.table.marks, self.table.place, self.segments.live
        fresh, number = 0, NONE
        for row in rows:
            before = leases[row]
            leases[row] = before + 1
            if not before:
                fresh += 1
                if not marks[row] & PINNED:
                    if place[row] >> 32 != number:
                        number = place[row] >> 32
                        segment = live[number]
                    segment.held += 1
        pool.leased += fresh
        tenant.held_bytes += fresh * pool.slot_bytes
        if hit:
            self.hit(rows)

    def unlease(self, tenant: Tenant, holds: Mapping[int, int]) -> None:
        """Ends so many holds on the block in each of these slots."""
        leases, marks, state, listed = self.table.leases, self.table.marks, self.table.state, self.table.listed
        number = NONE
        for ref, count in holds.items():
            if ref >> 32 != number:
                number = ref >> 32
                segment, pool = self._at(number)
                row_of, slot_bytes = segment.row, pool.slot_bytes
            row = row_of[ref & 0xFFFFFFFF]
            left = leases[row] - count
            assert left >= 0, "more leases ended than there were"
            leases[row] = left
            if left:
                continue
            pool.leased -= 1
            tenant.held_bytes -= slot_bytes
            if state[row] != SEALED:
                segment.held -= 1
                self._last_release(row, ref, pool)
            elif not marks[row] & PINNED:
                segment.held -= 1
                if not listed[row]:
                    self.policy.add(pool.order, row, orphan=self.families.is_orphan(row))

    def _last_release(self, row: int, ref: int, pool: Pool) -> None:
        """A doomed block is gone with its last lease."""
        pool.doomed -= 1
        self.table.move(row, "release")
        self.segments.free_slot(ref)
        self.table.give_back(row)

    def pin(self, row: int, at: float) -> None:
        """Keeps a block from eviction until `at`."""
        if not self.table.marks[row] & PINNED:
            pool = self.pool_of(row)
            if not self.table.leases[row]:
                self.segments.live[self.table.place[row] >> 32].held += 1
            self._count_pin(row, pool, 1)
        self.set_until(row, PINNED, at)

    def unpin(self, row: int) -> None:
        """A pin ends."""
        table, pool = self.table, self.pool_of(row)
        table.marks[row] &= ~PINNED & 0xFF
        del self.until[row * 4 + PINNED]
        if self.ledger is not None:
            self.ledger.until(table.place[row], PINNED, 0.0)
        self._count_pin(row, pool, -1)
        if table.leases[row]:
            return
        self.segments.live[table.place[row] >> 32].held -= 1
        if not table.listed[row]:
            self.policy.add(pool.order, row, orphan=self.families.is_orphan(row))

    def _count_pin(self, row: int, pool: Pool, more: int) -> None:
        pool.pinned += more
        self._namespaces[self.table.namespace[row] - 1].pinned += more

    # -- until when

    def set_until(self, row: int, mark: int, at: float) -> None:
        """The pin or the life of a block ends at `at`, whatever was said before."""
        self.table.marks[row] |= mark
        self.until[row * 4 + mark] = at
        if self.ledger is not None:
            self.ledger.until(self.table.place[row], mark, at)
        heapq.heappush(self.untils, (at, row * 4 + mark))
        if self.untils_before:
            self._sift()
        elif len(self.untils) > 2 * len(self.until) + UNTIL_SLACK:
            self.untils, self.untils_before = [], self.untils

    def _sift(self) -> None:
        """A few times of the heap before this one: those that still hold go over, from its end, so it stays one."""
        for _ in range(min(SIFT_STEP, len(self.untils_before))):
            at, code = self.untils_before.pop()
            if self.until.get(code) == at:
                heapq.heappush(self.untils, (at, code))

    def due(self, now: float) -> bool:
        """Whether `next_due` has something to say."""
        return any(heap and heap[0][0] <= now for heap in (self.untils, self.untils_before))

    def next_due(self) -> tuple[int, int] | None:
        """The (row, mark) whose time comes first, once; None where that entry is stale."""
        before = self.untils_before
        at, code = heapq.heappop(before if before and before[0] < (self.untils or before)[0] else self.untils or before)
        return divmod(code, 4) if self.until.get(code) == at else None

    def pool_of(self, row: int) -> Pool:
        """The pool of a block's slot."""
        return self._at(self.table.place[row] >> 32)[1]

    def _at(self, number: int) -> tuple[Segment, Pool]:
        """A segment with a block in it, so that it has a pool."""
        segment = self.segments.live[number]
        assert segment.pool is not None
        return segment, segment.pool
