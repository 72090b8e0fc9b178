"""Blocks that come all at once are where they are when they come one by one; what cannot be is left out."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.core.adopt import Adoption, Found, NamespaceFound, SegmentFound
from kvstore.core.block import NONE, SEALED
from kvstore.core.evict import INNER, LEAF, ORPHAN
from kvstore.core.rebuild import FOUND, Rows
from kvstore.core.segments import PAGE_BYTES
from kvstore.core.store import Store
from tests.core.scene import Index, chain, key_of

SEGMENTS, SLOTS = 4, 16
NOW = 1000.0
NOTHING = bytes(32)


def rows(*blocks: tuple[int, bytes, bytes, int, float]) -> Rows:
    """Of slot, key, parent, depth and last use."""
    found = np.zeros(len(blocks), FOUND)
    for row, (slot, key, parent, depth, used) in zip(found, blocks, strict=True):
        row["ref"] = (1 + slot // SLOTS) << 32 | slot % SLOTS
        row["key"], row["parent"] = np.frombuffer(key, "<u8"), np.frombuffer(parent, "<u8")
        row["namespace"], row["depth"], row["stored"], row["used"] = 1, depth, used, used
    return found


def adoption() -> Adoption:
    store = Store(64 * SLOTS * PAGE_BYTES, Index())
    store.segments.segment_bytes = SLOTS * PAGE_BYTES
    store.segments.take_back()
    segments = [SegmentFound(1 + n, SLOTS * PAGE_BYTES, 0, PAGE_BYTES) for n in range(SEGMENTS)]
    found = Found(["default"], [NamespaceFound(0, NOTHING, PAGE_BYTES, "", 0)], segments, [], SEGMENTS)
    made = Adoption(store, found, NOW)
    made.begin()
    return made


def filled(found: Rows) -> Adoption:
    made = adoption()
    made.blocks(found)
    made.end()
    made.store.check(made.store.tree.index.published)  # type: ignore[attr-defined]
    return made


def kept(made: Adoption) -> set[bytes]:
    return set(made.store.tenants["default"].rows)


def parents(made: Adoption) -> Iterator[tuple[bytes, bytes | None]]:
    table = made.store.table
    for key, row in made.store.tenants["default"].rows.items():
        yield key, table.key[table.parent[row]] if table.parent[row] != NONE else None


def test_a_chain_hangs_together_in_whatever_order_it_is_found() -> None:
    keys = chain("a", 20)
    blocks = [(n, key, keys[n - 1] if n else NOTHING, n, 10.0) for n, key in enumerate(keys)]
    random.Random(7).shuffle(blocks)
    made = filled(rows(*blocks))
    assert dict(parents(made)) == {key: keys[n - 1] if n else None for n, key in enumerate(keys)}
    assert made.done.blocks == 20


def test_many_children_of_one_parent_are_one_list() -> None:
    root, children = key_of("root"), [key_of(f"child {n}") for n in range(40)]
    made = filled(rows((0, root, NOTHING, 0, 1.0), *((1 + n, key, root, 1, 2.0) for n, key in enumerate(children))))
    table = made.store.table
    below = table.children(made.store.tenants["default"].rows[root])
    assert sorted(table.key[row] or b"" for row in below) == sorted(children)


def test_blocks_whose_parent_is_not_here_are_orphans_and_go_first() -> None:
    away, orphans = key_of("away"), [key_of(f"orphan {n}") for n in range(3)]
    made = filled(
        rows(
            (0, key_of("root"), NOTHING, 0, 1.0),
            (1, orphans[0], away, 5, 9.0),
            (2, orphans[1], away, 3, 8.0),
            (3, orphans[2], key_of("elsewhere"), 0, 7.0),
        )
    )
    (pool,) = made.store.segments.filled()
    listed = [made.store.table.key[row] for row in made.store.policy.walk(pool.order, ORPHAN)]
    assert listed == [orphans[2], orphans[1], orphans[0]]
    tenant = made.store.tenants["default"]
    assert made.store.table.depth[tenant.missing[away]] == 2
    assert made.store.table.depth[tenant.rows[orphans[2]]] == 1


def test_the_least_recently_used_leaf_goes_first_and_parents_after_their_children() -> None:
    a, b = chain("a", 3), chain("b", 2)
    found = [(n, key, a[n - 1] if n else NOTHING, n, 5.0) for n, key in enumerate(a)]
    found += [(9 + n, key, b[n - 1] if n else NOTHING, n, 4.0) for n, key in enumerate(b)]
    made = filled(rows(*found))
    (pool,) = made.store.segments.filled()
    table, walk = made.store.table, made.store.policy.walk
    assert [table.key[row] for row in walk(pool.order, LEAF)] == [b[1], a[2]]
    assert [table.key[row] for row in walk(pool.order, INNER)] == [b[0], a[1], a[0]]


def test_a_block_that_is_called_a_root_and_names_a_parent_is_below_it_and_so_are_its_children() -> None:
    """What a client says may be both: a daemon that is replaced is not to fail at it."""
    away, root, child, grandchild = map(key_of, ("away", "root", "child", "grandchild"))
    made = filled(rows((0, root, away, 0, 1.0), (1, child, root, 1, 1.0), (2, grandchild, child, 2, 1.0)))
    assert dict(parents(made)) == {root: away, child: None, grandchild: child}


def test_a_block_that_is_no_deeper_than_its_parent_hangs_from_nothing() -> None:
    """So a circle, too, which nobody could write down, would be blocks that are found and no tree that never ends."""
    a, b = key_of("a"), key_of("b")
    made = filled(rows((0, a, b, 3, 1.0), (1, b, a, 3, 1.0)))
    assert dict(parents(made)) == {a: None, b: None}
    own = filled(rows((0, a, a, 3, 1.0)))
    assert dict(parents(own)) == {a: None}


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("a slot that there is not", {"ref": 1 << 32 | SLOTS}),
        ("a segment that there is not", {"ref": 9 << 32}),
        ("no namespace", {"namespace": 0}),
        ("a namespace that there is not", {"namespace": 2}),
        ("a namespace far from any", {"namespace": 0xFFFFFFFF}),
        ("an empty key", {"key": 0}),
        ("a life that has ended", {"life": NOW}),
    ],
)
def test_what_cannot_be_is_left_out_and_named(what: str, change: dict[str, float]) -> None:
    found = rows((0, key_of("good"), NOTHING, 0, 1.0), (1, key_of("bad"), NOTHING, 0, 1.0))
    for field, value in change.items():
        found[1][field] = value
    made = filled(found)
    assert kept(made) == {key_of("good")}, what
    assert made.done.refused == [int(found[1]["ref"])]


def test_neither_a_key_nor_a_slot_is_anybodys_twice() -> None:
    found = rows(
        (0, key_of("a"), NOTHING, 0, 1.0),
        (17, key_of("a"), NOTHING, 0, 1.0),
        (3, key_of("b"), NOTHING, 0, 1.0),
        (3, key_of("c"), NOTHING, 0, 1.0),
    )
    made = filled(found)
    assert kept(made) == {key_of("a"), key_of("b")}
    assert len(made.done.refused) == 2


def test_lives_pins_hits_and_last_uses_are_as_they_were() -> None:
    found = rows(*((n, key_of(f"{n}"), NOTHING, 0, float(n)) for n in range(4)))
    found["life"][1], found["pin"][2], found["hits"][3], found["used"][0] = NOW + 5, NOW + 9, 1 << 40, NOW + 50
    made = filled(found)
    store, of = made.store, made.store.tenants["default"].rows
    assert store.namespaces[0].pinned == 1
    assert store.table.hits[of[key_of("3")]] == 0xFFFF
    assert store.table.used[of[key_of("0")]] == NOW, "not in the time to come"
    store.expire(NOW + 6)
    assert key_of("1") not in of
    store.expire(NOW + 10)
    store.check()
    assert store.namespaces[0].pinned == 0
    assert all(store.table.state[row] == SEALED for row in of.values())


def test_a_store_of_which_nothing_is_left_is_an_empty_one() -> None:
    made = filled(rows())
    assert (made.done.blocks, made.done.refused) == (0, [])
