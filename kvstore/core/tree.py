"""The prefix tree over the block table: how a block comes, is used, is held and goes.

Each step here changes the table, the tenant's key dict, the tree, the policy's order, the
slot and the published index together, so that they never disagree between two calls.
Order of statements where readers look on: a block is published last when it comes and
withdrawn first when it goes.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvstore.core.block import HINTED, HITS_MAX, NONE, PINNED, SEALED, BlockTable
from kvstore.core.evict import Policy, PoolOrder
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.segments import Pool, Segment, SegmentTable

RECENT_S = 1.0
"""A use of a block is one of all it hangs from, told to those not used for this long.

Without it every batch of a long prompt would walk up all that was stored before: 1.2 ms
a commit at 4,096 blocks. The policy loses nothing: a parent is younger than its children
by their being there, and is compared with them only when the last of them is gone.
"""

JUST_NOW_S = 0.02
"""Uses closer together than this are one: what reads a chain again and again need not move it each time."""

UNTIL_SLACK = 4096
"""Stale times kept beyond as many as there are live ones."""


class IndexPort(Protocol):
    """Where visible blocks are published: the shared-memory index, or a dict in tests."""

    def publish(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int) -> None:
        """Readers may find the block from now on."""

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
        self._index = index
        self._namespaces = namespaces

    # -- coming

    def seal(
        self, namespace: Namespace, pool: Pool, key: bytes, ref: int, parent_key: bytes, depth: int, now: float
    ) -> int:
        """Makes a granted slot a visible block; `list_new` must follow before anything else does."""
        table, tenant = self.table, namespace.tenant
        row = table.take()
        table.move(row, "commit")
        table.key[row] = key
        table.place[row] = ref
        table.namespace[row] = namespace.id
        table.used[row] = now
        table.hits[row] = 0
        table.depth[row] = depth
        self.segments.fill_slot(ref, row, now)
        if parent_key:
            parent = tenant.rows.get(parent_key, NONE)
            if parent != NONE:
                self._hang(parent, row)
            else:
                tenant.orphans.setdefault(parent_key, set()).add(row)
                tenant.orphan_parent[row] = parent_key
        tenant.rows[key] = row
        if key in tenant.orphans:
            self._adopt(tenant, key, row)
        namespace.blocks += 1
        offset = (ref & 0xFFFFFFFF) * pool.slot_bytes
        self._index.publish(tenant.id, key, ref, offset, namespace.block_bytes, namespace.id)
        return row

    def list_new(self, tenant: Tenant, pool: Pool, new: list[int], now: float) -> None:
        """Gives new blocks their place in the policy's order, leaves first, and touches what they hang from."""
        parent, used = self.table.parent, self.table.used
        orphan = tenant.orphan_parent
        for row in reversed(new):
            self.policy.add(pool.order, row, orphan=row in orphan)
            above = parent[row]
            if above != NONE and used[above] < now - RECENT_S:
                self._touch_up(above, now)

    def _hang(self, parent: int, row: int) -> None:
        if self.table.child[parent] == NONE:
            self.policy.gained_child(self.pool_of(parent).order, parent)
        self.table.add_child(parent, row)

    def _adopt(self, tenant: Tenant, key: bytes, row: int) -> None:
        """Orphans whose parent has just come hang from it, unless that would close a circle."""
        above = set()
        node = row
        while node != NONE:
            above.add(node)
            node = self.table.parent[node]
        for child in tenant.orphans.pop(key):
            del tenant.orphan_parent[child]
            order = self.pool_of(child).order
            listed = self.table.listed[child]
            if listed:
                self.policy.remove(order, child)
            if child not in above:
                self._hang(row, child)
            if listed:
                self.policy.add(order, child, orphan=False)

    # -- being used

    def touch(self, rows: Sequence[int], now: float) -> None:
        """Marks rows and all they hang from as used now: deepest first, so that roots end up newest."""
        table = self.table
        used, place, parent = table.used, table.place, table.parent
        if not rows or min(map(used.__getitem__, rows)) > now - JUST_NOW_S:
            return
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
        for row in above:
            if used[row] < recent:
                self._touch_up(row, now)

    def _touch_up(self, row: int, now: float) -> None:
        """The same for an ancestor that no caller named."""
        used, parent = self.table.used, self.table.parent
        path = []
        while row != NONE and used[row] < now - RECENT_S:
            path.append(row)
            row = parent[row]
        path.reverse()
        self.touch(path, now)

    def hit(self, rows: Sequence[int]) -> None:
        """Counts a hit on each row."""
        hits = self.table.hits
        for row in rows:
            if hits[row] != HITS_MAX:
                hits[row] += 1

    # -- going

    def drop(self, row: int) -> None:
        """A sealed block loses its key, and its slot now or with its last lease."""
        table = self.table
        key = table.key[row]
        assert key is not None, f"row {row} dropped twice"
        namespace = self._namespaces[table.namespace[row] - 1]
        tenant, pool = namespace.tenant, self.pool_of(row)
        self._index.withdraw(tenant.id, key)
        del tenant.rows[key]
        namespace.blocks -= 1
        table.key[row] = None
        if table.marks[row]:
            self._drop_marks(row, pool)
        self.policy.remove(pool.order, row)
        self._cut_out(tenant, key, row)
        pool.blocks -= 1
        if table.leases[row]:
            table.move(row, "drop leased")
            pool.doomed += 1
        else:
            table.move(row, "drop")
            self.segments.free_slot(table.place[row])
            table.give_back(row)

    def _drop_marks(self, row: int, pool: Pool) -> None:
        marks = self.table.marks[row]
        self.table.marks[row] = 0
        if marks & HINTED:
            del self.until[row * 4 + HINTED]
        if marks & PINNED:
            del self.until[row * 4 + PINNED]
            pool.pinned -= 1
            if not self.table.leases[row]:
                self.segments.live[self.table.place[row] >> 32].held -= 1

    def _cut_out(self, tenant: Tenant, key: bytes, row: int) -> None:
        """Takes a block out of the prefix tree: its children are orphans, its parent may be a leaf."""
        table = self.table
        if table.child[row] != NONE:
            for child in table.children(row):
                table.cut(child)
                tenant.orphans.setdefault(key, set()).add(child)
                tenant.orphan_parent[child] = key
                if table.listed[child]:
                    order = self.pool_of(child).order
                    self.policy.remove(order, child)
                    self.policy.add(order, child, orphan=True)
        parent = table.parent[row]
        if parent != NONE:
            table.cut(row)
            if table.child[parent] == NONE:
                self.policy.lost_child(self.pool_of(parent).order, parent, table.used[row])
            return
        missing = tenant.orphan_parent.pop(row, None)
        if missing is not None:
            siblings = tenant.orphans[missing]
            siblings.discard(row)
            if not siblings:
                del tenant.orphans[missing]

    # -- being held

    def lease(self, rows: Sequence[int], tenant: Tenant, pool: Pool) -> None:
        """One hold more on each row; all are of one pool."""
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
                    self.policy.add(pool.order, row, orphan=row in tenant.orphan_parent)

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
            pool.pinned += 1
        self.set_until(row, PINNED, at)

    def unpin(self, row: int) -> None:
        """A pin ends."""
        table, pool = self.table, self.pool_of(row)
        table.marks[row] &= ~PINNED & 0xFF
        del self.until[row * 4 + PINNED]
        pool.pinned -= 1
        if table.leases[row]:
            return
        self.segments.live[table.place[row] >> 32].held -= 1
        if not table.listed[row]:
            tenant = self._namespaces[table.namespace[row] - 1].tenant
            self.policy.add(pool.order, row, orphan=row in tenant.orphan_parent)

    # -- until when

    def set_until(self, row: int, mark: int, at: float) -> None:
        """The pin or the life of a block ends at `at`, whatever was said before."""
        self.table.marks[row] |= mark
        self.until[row * 4 + mark] = at
        heapq.heappush(self.untils, (at, row * 4 + mark))
        if len(self.untils) > 2 * len(self.until) + UNTIL_SLACK:
            self.untils = [(at, code) for code, at in self.until.items()]
            heapq.heapify(self.untils)

    def due(self, now: float) -> bool:
        """Whether `next_due` has something to say."""
        return bool(self.untils) and self.untils[0][0] <= now

    def next_due(self) -> tuple[int, int] | None:
        """The (row, mark) whose time comes first, once; None where that entry is stale."""
        at, code = heapq.heappop(self.untils)
        return divmod(code, 4) if self.until.get(code) == at else None

    def pool_of(self, row: int) -> Pool:
        """The pool of a block's slot."""
        return self._at(self.table.place[row] >> 32)[1]

    def _at(self, number: int) -> tuple[Segment, Pool]:
        """A segment with a block in it, so that it has a pool."""
        segment = self.segments.live[number]
        assert segment.pool is not None
        return segment, segment.pool
