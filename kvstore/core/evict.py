"""Which block goes when room is needed.

`Policy` is what the store needs of one; `LeafLru` is the first. A policy sees blocks as
rows and keeps its own order of them; the store tells it what happens to each, and asks
for a victim of one pool at a time, because only a slot of the same size is of use.

Rules that every policy keeps:
  - a block with a lease or a pin is never a victim: the store takes it out (`hold`);
  - orphans (their parent is not here, so no match can reach them) go first;
  - leaves go before their parents; only where every leaf is held, unheld inner blocks
    go, deepest first.
"""

from typing import Protocol

from kvstore.core.block import NONE, SEALED, BlockTable

INNER_WINDOW = 4096
"""Rows looked at for the deepest inner block when every leaf is held: about 0.3 ms."""

OUT, LEAF, INNER, ORPHAN = 0, 1, 2, 3
"""Values of BlockTable.listed: in no list, or in which."""


class PoolOrder:
    """One pool's lists: heads are rows, `after` of a head is its least recently used."""

    def __init__(self, table: BlockTable) -> None:
        self.heads = [NONE, *(self._head(table) for _ in (LEAF, INNER, ORPHAN))]
        self.listed = [0, 0, 0, 0]

    @staticmethod
    def _head(table: BlockTable) -> int:
        row = table.take()
        table.move(row, "list")
        table.before[row] = table.after[row] = row
        return row


class Policy(Protocol):
    """What the store tells a policy, and asks of it. Rows are sealed blocks throughout."""

    def add(self, order: PoolOrder, row: int, *, orphan: bool) -> None:
        """A block is here and may be evicted (new, or its last hold is gone)."""

    def hold(self, order: PoolOrder, row: int) -> None:
        """A block must not be evicted for now, or is about to go: forget its place."""

    def touch(self, order: PoolOrder, row: int) -> None:
        """A block was used; told of held ones too."""

    def gained_child(self, order: PoolOrder, row: int) -> None:
        """A leaf is about to become an inner block."""

    def lost_child(self, order: PoolOrder, row: int, child_used: float) -> None:
        """An inner block has become a leaf; its last child was last used at `child_used`."""

    def victim(self, order: PoolOrder) -> int:
        """The block to drop next; NONE where all are held."""

    def oldest_use(self, order: PoolOrder) -> float:
        """About when the next victim was last used; 0 for an orphan, infinity where there is none."""

    def walk(self, order: PoolOrder, which: int) -> list[int]:
        """Rows of one list, next victim first; for the audit."""


class LeafLru:
    """Least recently used leaf first.

    Leaves, inner blocks and orphans are three lists, each in order of last use, so that
    a victim is found in one step whatever is held. A block that becomes a leaf because
    its last child went is the next victim, unless it was used after that child was: then
    it counts as just used. (Where exactly it would belong takes a search, and such a
    parent is rare: a use of a child is a use of all it hangs from.)
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._listed = table.listed
        self._before = table.before
        self._after = table.after

    def add(self, order: PoolOrder, row: int, *, orphan: bool) -> None:
        assert not self._listed[row], f"row {row} is listed already"
        self._append(order, ORPHAN if orphan else LEAF if self._table.child[row] == NONE else INNER, row)

    def hold(self, order: PoolOrder, row: int) -> None:
        which = self._listed[row]
        if which:
            b, a = self._before[row], self._after[row]
            self._after[b] = a
            self._before[a] = b
            self._listed[row] = OUT
            order.listed[which] -= 1

    def touch(self, order: PoolOrder, row: int) -> None:
        which = self._listed[row]
        if not which:
            return
        before, after = self._before, self._after
        b, a = before[row], after[row]
        after[b] = a
        before[a] = b
        head = order.heads[which]
        last = before[head]
        after[last] = before[head] = row
        before[row] = last
        after[row] = head

    def gained_child(self, order: PoolOrder, row: int) -> None:
        if self._listed[row] == LEAF:
            self.hold(order, row)
            self._append(order, INNER, row)

    def lost_child(self, order: PoolOrder, row: int, child_used: float) -> None:
        if self._listed[row] != INNER:
            return
        self.hold(order, row)
        self._append(order, LEAF, row)
        if self._table.used[row] <= child_used:
            self._make_first(order, row)

    def victim(self, order: PoolOrder) -> int:
        listed = order.listed
        if listed[ORPHAN]:
            return self._after[order.heads[ORPHAN]]
        if listed[LEAF]:
            return self._after[order.heads[LEAF]]
        return self._deepest(order.heads[INNER])

    def oldest_use(self, order: PoolOrder) -> float:
        if order.listed[ORPHAN]:
            return 0.0
        for which in (LEAF, INNER):
            if order.listed[which]:
                return self._table.used[self._after[order.heads[which]]]
        return float("inf")

    def walk(self, order: PoolOrder, which: int) -> list[int]:
        rows, head = [], order.heads[which]
        row = self._after[head]
        while row != head:
            assert self._table.state[row] == SEALED, f"row {row} listed in state {self._table.state[row]}"
            assert self._before[self._after[row]] == row, f"row {row}: its neighbour in list {which} disagrees"
            rows.append(row)
            assert len(rows) <= order.listed[which], f"list {which} is longer than its count, or a circle"
            row = self._after[row]
        return rows

    def _deepest(self, head: int) -> int:
        best, best_depth = NONE, -1
        row = self._after[head]
        for _ in range(INNER_WINDOW):
            if row == head:
                break
            if self._table.depth[row] > best_depth:
                best, best_depth = row, self._table.depth[row]
            row = self._after[row]
        return best

    def _append(self, order: PoolOrder, which: int, row: int) -> None:
        head = order.heads[which]
        before, after = self._before, self._after
        last = before[head]
        after[last] = before[head] = row
        before[row] = last
        after[row] = head
        self._listed[row] = which
        order.listed[which] += 1

    def _make_first(self, order: PoolOrder, row: int) -> None:
        """Moves the last row of the leaves to the old end."""
        head = order.heads[LEAF]
        before, after = self._before, self._after
        b, first = before[row], after[head]
        if first == row:
            return
        after[b] = head
        before[head] = b
        after[head] = before[first] = row
        before[row] = head
        after[row] = first


POLICIES = {"lru": LeafLru}
"""Names that `evict.policy` may have."""
