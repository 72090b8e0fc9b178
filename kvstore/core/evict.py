"""Which block goes when room is needed.

`Policy` is what the store needs of one; `LeafLru` is the first. A policy sees blocks as
rows and keeps its own order of them; the store tells it what happens to each, and asks
for a victim of one pool at a time, because only a slot of the same size is of use.

Rules that every policy keeps:
  - a block that is held (a lease or a pin, as the table says) is never a victim; the
    policy is not told when a hold begins, and looks when it needs a victim, because a
    block is held far more often than one is evicted;
  - orphans (their parent is not here, so no match can reach them) go first;
  - leaves go before their parents; only where every leaf is held, unheld inner blocks
    go, deepest first.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.core.block import NONE, SEALED, BlockTable

INNER_WINDOW = 1024
"""Rows looked at for the deepest inner block when every leaf is held: about 0.1 ms."""

PASS_MAX = 8192
"""Held blocks put aside in one look for a victim: 3 ms. Of a large slab, millions may be held at once."""

OUT, LEAF, INNER, ORPHAN = 0, 1, 2, 3
"""Values of BlockTable.listed: in no list, or in which."""


class PoolOrder:
    """One pool's lists: heads are rows, `after` of a head is its least recently used."""

    def __init__(self, table: BlockTable) -> None:
        self.heads = [NONE, *(self._head(table) for _ in (LEAF, INNER, ORPHAN))]
        self.listed = [0, 0, 0, 0]
        self.passing = False
        """The last look ended among held blocks, and the next goes on from there: what may go is not known yet."""

    @staticmethod
    def _head(table: BlockTable) -> int:
        row = table.take()
        table.move(row, "list")
        table.before[row] = table.after[row] = row
        return row


class Policy(Protocol):
    """What the store tells a policy, and asks of it. Rows are sealed blocks throughout."""

    def add(self, order: PoolOrder, row: int, *, orphan: bool) -> None:
        """A block is here and may be evicted: new, or the policy had put it aside and its last hold is gone."""

    def fill(self, order: PoolOrder, rows: NDArray[np.int32], orphan: NDArray[np.bool_]) -> None:
        """Many at once, least recently used first, none of which the policy has."""

    def remove(self, order: PoolOrder, row: int) -> None:
        """A block is about to go, or to be added again as something else: forget its place."""

    def touch(self, order: PoolOrder, rows: Sequence[int]) -> None:
        """Blocks were used, the last of them most recently."""

    def gained_child(self, order: PoolOrder, row: int) -> None:
        """A leaf is about to become an inner block."""

    def lost_child(self, order: PoolOrder, row: int, child_used: float) -> None:
        """An inner block has become a leaf; its last child was last used at `child_used`."""

    def victim(self, order: PoolOrder) -> int:
        """The block to drop next; NONE where all are held, or (`order.passing`) where one has to look again."""

    def oldest_use(self, order: PoolOrder) -> float:
        """About when the next victim was last used; 0 for an orphan or where one has to look again, infinity where all
        are held."""

    def coldest(self, order: PoolOrder, blocks_max: int) -> list[int]:
        """About the next victims, next one first, of so many looked at; held ones are left out. Changes nothing."""

    def walk(self, order: PoolOrder, which: int) -> list[int]:
        """Rows of one list, next victim first; for the audit."""


class LeafLru:
    """Least recently used leaf first.

    Leaves, inner blocks and orphans are three lists, each in order of last use, so that
    a victim is found in one step. Held blocks met at the old end leave their list until
    their last hold is gone (`listed` is OUT so long), so each is passed over once. A
    block that becomes a leaf because its last child went is the next victim, unless it
    was used after that child was: then it counts as just used. (Where exactly it would
    belong takes a search, and such a parent is rare: a use of a child is one of all that
    it hangs from.)
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._listed = table.listed
        self._before = table.before
        self._after = table.after

    def add(self, order: PoolOrder, row: int, *, orphan: bool) -> None:
        assert not self._listed[row], f"row {row} is listed already"
        self._append(order, ORPHAN if orphan else LEAF if self._table.child[row] == NONE else INNER, row)

    def fill(self, order: PoolOrder, rows: NDArray[np.int32], orphan: NDArray[np.bool_]) -> None:
        leaf = np.frombuffer(self._table.child, np.int32)[rows] == NONE
        listed, before, after = np.frombuffer(self._listed, np.uint8), *self._links()
        for which, part in ((ORPHAN, orphan), (LEAF, leaf & ~orphan), (INNER, ~(leaf | orphan))):
            new, head = rows[part], order.heads[which]
            assert not listed[new].any(), f"rows of list {which} are listed already"
            chain = np.concatenate(([before[head]], new, [head]))
            after[chain[:-1]], before[chain[1:]] = chain[1:], chain[:-1]
            listed[new] = which
            order.listed[which] += len(new)

    def _links(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return np.frombuffer(self._before, np.int32), np.frombuffer(self._after, np.int32)

    def remove(self, order: PoolOrder, row: int) -> None:
        which = self._listed[row]
        if which:
            b, a = self._before[row], self._after[row]
            self._after[b] = a
            self._before[a] = b
            self._listed[row] = OUT
            order.listed[which] -= 1

    def touch(self, order: PoolOrder, rows: Sequence[int]) -> None:
        listed, before, after, heads = self._listed, self._before, self._after, order.heads
        at, end = 0, len(rows)
        while at < end:
            first = last = rows[at]
            at += 1
            which = listed[first]
            if not which:
                continue
            # Neighbours move together: a chain that is used as one stays in one piece.
            while at < end and after[last] == rows[at]:
                last = rows[at]
                at += 1
            b, a, head = before[first], after[last], heads[which]
            after[b] = a
            before[a] = b
            newest = before[head]
            after[newest] = first
            before[first] = newest
            after[last] = head
            before[head] = last

    def gained_child(self, order: PoolOrder, row: int) -> None:
        if self._listed[row] == LEAF:
            self.remove(order, row)
            self._append(order, INNER, row)

    def lost_child(self, order: PoolOrder, row: int, child_used: float) -> None:
        if self._listed[row] != INNER:
            return
        self.remove(order, row)
        self._append(order, LEAF, row)
        if self._table.used[row] <= child_used:
            self._make_first(order, row)

    def victim(self, order: PoolOrder) -> int:
        order.passing = False
        for first in (ORPHAN, LEAF):
            row = self._first(order, first)
            if row != NONE or order.passing:
                return row
        return self._deepest(order)

    def oldest_use(self, order: PoolOrder) -> float:
        order.passing = False
        for which in (ORPHAN, LEAF, INNER):
            row = self._first(order, which)
            if order.passing:
                return 0.0
            if row != NONE:
                return 0.0 if which == ORPHAN else self._table.used[row]
        return float("inf")

    def coldest(self, order: PoolOrder, blocks_max: int) -> list[int]:
        found: list[int] = []
        for which in (ORPHAN, LEAF, INNER):
            head = order.heads[which]
            row = self._after[head]
            while row != head and blocks_max:
                blocks_max -= 1
                if not self._table.held(row):
                    found.append(row)
                row = self._after[row]
        return found

    def walk(self, order: PoolOrder, which: int) -> list[int]:
        rows, head, after = [], order.heads[which], self._after
        row = after[head]
        for _ in range(order.listed[which]):
            if row == head:
                break
            rows.append(row)
            row = after[row]
        assert row == head, f"list {which} is longer than its count, or a circle"
        before, state = self._before, self._table.state
        for row in rows:
            assert state[row] == SEALED, f"row {row} listed in state {state[row]}"
            assert before[after[row]] == row, f"row {row}: its neighbour in list {which} disagrees"
        return rows

    def _first(self, order: PoolOrder, which: int) -> int:
        """The old end of a list, held blocks put aside; NONE and `passing` after PASS_MAX of them."""
        head, after = order.heads[which], self._after
        for _ in range(PASS_MAX):
            row = after[head]
            if row == head:
                return NONE
            if not self._table.held(row):
                return row
            self.remove(order, row)
        order.passing = after[head] != head
        return NONE

    def _deepest(self, order: PoolOrder) -> int:
        best, best_depth = NONE, -1
        row = self._first(order, INNER)
        if row == NONE:
            return NONE
        for _ in range(INNER_WINDOW):
            if row == order.heads[INNER]:
                break
            if self._table.depth[row] > best_depth and not self._table.held(row):
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
