"""The order in which blocks go, seen through the policy alone."""

import random
from collections.abc import Iterator

import pytest

from kvstore.core import evict
from kvstore.core.block import NONE, PINNED, BlockTable
from kvstore.core.evict import INNER, LEAF, ORPHAN, OUT, LeafLru, PoolOrder


class Trees:
    """Blocks of one pool, without keys and slots."""

    def __init__(self) -> None:
        self.table = BlockTable()
        self.order = PoolOrder(self.table)
        self.policy = LeafLru(self.table)
        self.now = 0.0

    def block(self, parent: int = NONE, *, orphan: bool = False) -> int:
        table = self.table
        row = table.take()
        table.move(row, "commit")
        self.now += 1
        table.used[row] = self.now
        if parent != NONE:
            if table.child[parent] == NONE:
                self.policy.gained_child(self.order, parent)
            table.add_child(parent, row)
            table.depth[row] = table.depth[parent] + 1
        self.policy.add(self.order, row, orphan=orphan)
        return row

    def chain(self, length: int, parent: int = NONE) -> list[int]:
        rows = []
        for _ in range(length):
            parent = self.block(parent)
            rows.append(parent)
        return rows

    def use(self, *rows: int) -> None:
        self.now += 1
        for row in rows:
            self.table.used[row] = self.now
        self.policy.touch(self.order, rows)

    def drop(self, row: int) -> None:
        table = self.table
        self.policy.remove(self.order, row)
        for child in table.children(row):
            table.cut(child)
            if table.listed[child]:
                self.policy.remove(self.order, child)
                self.policy.add(self.order, child, orphan=True)
        parent = table.parent[row]
        table.cut(row)
        if parent != NONE and table.child[parent] == NONE:
            self.policy.lost_child(self.order, parent, table.used[row])
        table.move(row, "drop")
        table.give_back(row)

    def victims(self) -> Iterator[int]:
        while (row := self.policy.victim(self.order)) != NONE:
            yield row
            self.drop(row)

    def listed(self) -> dict[int, list[int]]:
        return {which: self.policy.walk(self.order, which) for which in (LEAF, INNER, ORPHAN)}


def test_blocks_without_a_tree_go_least_recently_used_first() -> None:
    trees = Trees()
    a, b, c, d = (trees.block() for _ in range(4))
    trees.use(b)
    trees.use(a)
    assert list(trees.victims()) == [c, d, b, a]


def test_a_chain_goes_from_its_end() -> None:
    trees = Trees()
    rows = trees.chain(5)
    assert list(trees.victims()) == rows[::-1]


def test_all_of_an_old_chain_goes_before_any_of_a_new_one() -> None:
    trees = Trees()
    old, new = trees.chain(3), trees.chain(3)
    assert list(trees.victims()) == old[::-1] + new[::-1]
    old, new = trees.chain(3), trees.chain(3)
    trees.use(*old[::-1])
    assert list(trees.victims()) == new[::-1] + old[::-1]


def test_a_shared_prefix_survives_its_branches() -> None:
    trees = Trees()
    trunk = trees.chain(2)
    branches = [trees.chain(2, trunk[-1]) for _ in range(3)]
    gone = list(trees.victims())
    assert gone[:6] == [row for branch in branches for row in branch[::-1]]
    assert gone[6:] == trunk[::-1]


def test_a_parent_used_after_its_last_child_is_not_the_next_to_go() -> None:
    trees = Trees()
    parent, child = trees.chain(2)
    other = trees.block()
    trees.use(parent)
    assert list(trees.victims()) == [child, other, parent]


def test_orphans_go_first_however_new() -> None:
    trees = Trees()
    a, b = trees.block(), trees.block()
    orphan = trees.block(orphan=True)
    trees.use(orphan)
    assert trees.policy.oldest_use(trees.order) == 0
    assert list(trees.victims()) == [orphan, a, b]


def test_a_subtree_without_its_root_goes_from_its_top() -> None:
    trees = Trees()
    trees.block()
    top = trees.block(orphan=True)
    below = trees.chain(2, top)
    assert list(trees.victims())[:3] == [top, *below]


def test_held_blocks_are_never_victims_and_return_when_let_go() -> None:
    trees = Trees()
    a, b, c = (trees.block() for _ in range(3))
    trees.table.leases[a] = 1
    trees.table.marks[b] = PINNED
    assert trees.policy.victim(trees.order) == c
    assert trees.listed()[LEAF] == [c], "what was passed over is out of the way"
    assert (trees.table.listed[a], trees.table.listed[b]) == (OUT, OUT)
    trees.table.leases[a] = 0
    trees.policy.add(trees.order, a, orphan=False)
    assert list(trees.victims()) == [c, a]
    assert trees.policy.oldest_use(trees.order) == float("inf")


def test_a_held_leaf_leaves_other_leaves_to_go_before_its_parents() -> None:
    trees = Trees()
    held = trees.chain(3)
    others = [trees.block() for _ in range(2)]
    trees.table.leases[held[-1]] = 1
    gone = list(trees.victims())
    assert gone[:2] == others


def test_where_every_leaf_is_held_inner_blocks_go_deepest_first() -> None:
    trees = Trees()
    left, right = trees.chain(4), trees.chain(3)
    for leaf in (left[-1], right[-1]):
        trees.table.leases[leaf] = 1
    victims = trees.victims()
    assert next(victims) == left[2], "the deepest; what hung from it is an orphan, and what it hung from a leaf"
    assert list(victims) == [left[1], left[0], right[1], right[0]]
    assert trees.order.listed == [0, 0, 0, 0]


def test_a_held_inner_block_is_not_taken_for_the_deepest() -> None:
    trees = Trees()
    rows = trees.chain(5)
    for held in (rows[3], rows[4]):
        trees.table.leases[held] = 1
    assert list(trees.victims()) == [rows[2], rows[1], rows[0]]


def test_the_search_for_the_deepest_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evict, "INNER_WINDOW", 3)
    trees = Trees()
    rows = trees.chain(10)
    trees.use(*rows[::-1])
    trees.table.leases[rows[-1]] = 1
    assert trees.policy.victim(trees.order) == rows[8], "the oldest three are the deepest three"
    trees.use(rows[8])
    trees.use(rows[7])
    trees.use(rows[6])
    assert trees.policy.victim(trees.order) == rows[5]


def test_a_leaf_that_gains_a_child_while_held_comes_back_as_an_inner_block() -> None:
    trees = Trees()
    row = trees.block()
    trees.table.leases[row] = 1
    assert trees.policy.victim(trees.order) == NONE
    child = trees.block(row)
    trees.table.leases[row] = 0
    trees.policy.add(trees.order, row, orphan=False)
    assert trees.listed() == {LEAF: [child], INNER: [row], ORPHAN: []}


def test_touching_many_at_once_is_touching_one_after_another() -> None:
    """Neighbours are moved in one piece; the order must be the same as if they were not."""
    chance = random.Random(20)
    for _ in range(300):
        one, many = Trees(), Trees()
        size = chance.randrange(2, 9)
        for trees in (one, many):
            for _ in range(size):
                trees.block()
        rows = one.listed()[LEAF]
        assert rows == many.listed()[LEAF]
        for _ in range(4):
            start = chance.randrange(size)
            picked = rows[start : start + chance.randrange(1, size + 1)]
            if chance.random() < 0.5:
                picked = chance.sample(rows, chance.randrange(1, size + 1))
            many.use(*picked)
            for row in picked:
                one.use(row)
            assert one.listed() == many.listed()
            rows = one.listed()[LEAF]


def test_a_row_is_added_once() -> None:
    trees = Trees()
    row = trees.block()
    with pytest.raises(AssertionError, match="listed already"):
        trees.policy.add(trees.order, row, orphan=False)
