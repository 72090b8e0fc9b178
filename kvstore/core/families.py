"""Who hangs from whom: the links of the prefix tree, and the rows that stand in for parents that are not here.

A block names its parent by key. Where that is not here, a row without a block (MISSING)
stands in for it; what hangs from such a row is an orphan. A parent that comes takes its
row over, and the row of one that goes stays for its children: one step each, however many
children there are.

Only the policy has to hear of each child, since it lists orphans apart. It hears of
SETTLE_NOW at once and of the others from `settle`, in bounded steps; until then such a
child is listed as what it was (`unsettled` says from which one on).

A child is deeper than its parent, always: so no circle can close, and nobody has to walk
up a chain to see whether one would. A depth that a client told is corrected to that; a
block that fits nowhere between its parent and its children hangs from nothing.
"""

from kvstore.core.block import MISSING, NONE, BlockTable
from kvstore.core.evict import ORPHAN, OUT, Policy
from kvstore.core.holds import INFINITY, Tenant
from kvstore.core.segments import Pool, SegmentTable

DEPTH_MAX = 0xFFFFFFFF

SETTLE_NOW = 4
"""Children that the policy hears of in the same step: one, for all but the points where prompts part."""


class Families:
    """Links between rows. Rows are given to it when they have their slot, and taken away before they lose it."""

    def __init__(self, table: BlockTable, segments: SegmentTable, policy: Policy) -> None:
        self.unsettled: dict[int, int] = {}
        """Parent, here or MISSING -> the first child that the policy may have in the wrong list."""
        self._table = table
        self._segments = segments
        self._policy = policy

    def is_orphan(self, row: int) -> bool:
        """Whether the parent of a block is not here."""
        parent = self._table.parent[row]
        return parent != NONE and self._table.state[parent] == MISSING

    def hang(self, tenant: Tenant, row: int, parent_key: bytes, depth: int, deepest: int) -> None:
        """Gives a block that has just come its depth, at most `deepest`, and its parent (an empty key: none)."""
        table = self._table
        depth = min(depth, deepest)
        if parent_key:
            parent = tenant.rows.get(parent_key, NONE)
            if parent == NONE:
                depth = min(max(depth, 1), deepest)
                if depth:
                    self.wait_for(tenant, row, parent_key, depth)
            else:
                below = max(depth, table.depth[parent] + 1)
                if below <= deepest:
                    depth = below
                    if table.child[parent] == NONE:
                        self._policy.gained_child(self._pool(parent).order, parent)
                    table.add_child(parent, row)
        table.depth[row] = depth

    def wait_for(self, tenant: Tenant, row: int, parent_key: bytes, depth: int) -> None:
        """Hangs a block that is `depth` deep, at least 1, from a row that stands in for its parent."""
        table = self._table
        parent = tenant.missing.get(parent_key, NONE)
        if parent == NONE:
            parent = table.take()
            table.move(parent, "miss")
            self._stand_in(tenant, parent_key, parent)
            table.namespace[parent] = table.namespace[row]
            table.depth[parent] = depth - 1
        elif table.depth[parent] >= depth:
            table.depth[parent] = depth - 1
        table.add_child(parent, row)

    def come(self, row: int) -> None:
        """A parent has taken its row over: its children are orphans no more."""
        self._tell_policy(row)

    def leave(self, tenant: Tenant, row: int) -> None:
        """Takes a block away from its parent, which may be a leaf then, or needed by nobody."""
        table = self._table
        parent = table.parent[row]
        if parent == NONE:
            return
        if self.unsettled and self.unsettled.get(parent, NONE) == row:
            self._go_on_from(parent, table.sibling[row])
        table.cut(row)
        if table.child[parent] != NONE:
            return
        if table.state[parent] == MISSING:
            key = table.key[parent]
            assert key is not None, f"row {parent} stands in for nobody"
            del tenant.missing[key]
            table.move(parent, "forget")
            table.give_back(parent)
        else:
            self._policy.lost_child(self._pool(parent).order, parent, table.used[row])

    def stay_behind(self, tenant: Tenant, key: bytes, row: int) -> None:
        """The block of a row is gone and something hangs from it: the row stands in for it."""
        table = self._table
        assert table.child[row] != NONE, f"row {row} has nobody to stay for"
        table.move(row, "leave children")
        table.leases[row] = 0
        self._stand_in(tenant, key, row)
        self._tell_policy(row)

    def _stand_in(self, tenant: Tenant, key: bytes, row: int) -> None:
        self._table.key[row] = key
        self._table.used[row] = INFINITY  # so that who walks up from a child stops here
        tenant.missing[key] = row

    # -- what the policy has to hear

    def settle(self, children_max: int) -> bool:
        """Has the policy list so many children as what they are; True if there are more."""
        for parent in list(self.unsettled)[:children_max]:
            children_max = self._settle(parent, children_max)
            if not children_max:
                break
        return bool(self.unsettled)

    def _tell_policy(self, parent: int) -> None:
        self.unsettled[parent] = self._table.child[parent]
        self._settle(parent, SETTLE_NOW)

    def _settle(self, parent: int, children_max: int) -> int:
        """Lists children of one parent; answers how many more of others may be."""
        table, policy = self._table, self._policy
        orphans = table.state[parent] == MISSING
        child = self.unsettled[parent]
        while child != NONE and children_max:
            listed = table.listed[child]
            if listed != OUT and (listed == ORPHAN) != orphans:
                order = self._pool(child).order
                policy.remove(order, child)
                policy.add(order, child, orphan=orphans)
            child = table.sibling[child]
            children_max -= 1
        self._go_on_from(parent, child)
        return children_max

    def _go_on_from(self, parent: int, child: int) -> None:
        if child == NONE:
            del self.unsettled[parent]
        else:
            self.unsettled[parent] = child

    def _pool(self, row: int) -> Pool:
        pool = self._segments.live[self._table.place[row] >> 32].pool
        assert pool is not None
        return pool
