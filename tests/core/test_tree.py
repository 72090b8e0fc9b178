"""Chains, branches and orphans in the store: what stays reachable when room is made."""

from collections.abc import Sequence

import pytest

from kvstore.core import tree
from kvstore.core.block import HITS_MAX, NONE, PINNED
from kvstore.core.evict import PoolOrder
from tests.core.scene import PAGE, Scene, chain, key_of


def row_of(scene: Scene, key: bytes) -> int:
    return scene.tenant.rows[key]


def keys_of(scene: Scene, rows: Sequence[int]) -> list[bytes | None]:
    return [scene.store.table.key[row] for row in rows]


def orphans(scene: Scene) -> dict[bytes, bytes]:
    """Blocks whose parent is not here, and the key of that parent."""
    table, found = scene.store.table, {}
    for key, row in scene.tenant.rows.items():
        if scene.store.tree.families.is_orphan(row):
            parent = table.key[table.parent[row]]
            assert parent is not None
            found[key] = parent
    return found


def evict(scene: Scene, count: int) -> None:
    """What goes when room for `count` blocks is needed."""
    for _ in range(count):
        row = scene.store.policy.victim(scene.store.pool(scene.ns).order)
        assert row != NONE
        scene.store.evict(row)
    scene.check()


def test_a_chain_hangs_together_in_whatever_order_it_comes() -> None:
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]):
        for batch in (1, 2, 4):
            scene = Scene(64)
            keys = chain("a", 4)
            for at in range(0, 4, batch):
                places = order[at : at + batch]
                wanted = [keys[i] for i in places]
                parents = [keys[i - 1] if i else b"" for i in places]
                refs = scene.reserve(batch)
                scene.store.commit(scene.session, scene.ns, wanted, refs, parents, places, scene.now)
                scene.check()
            table = scene.store.table
            for i, key in enumerate(keys):
                above = NONE if i == 0 else row_of(scene, keys[i - 1])
                assert table.parent[row_of(scene, key)] == above
            assert not scene.tenant.missing
            scene.fill()
            scene.check()


def test_an_orphan_is_adopted_when_its_parent_arrives_late() -> None:
    scene = Scene(64)
    keys = chain("a", 3)
    scene.commit(keys[1:], scene.reserve(2), after=keys[0], depth=1)
    assert orphans(scene) == {keys[1]: keys[0]}
    scene.check()
    scene.commit(keys[:1], scene.reserve(1))
    assert not orphans(scene)
    evict(scene, 1)
    assert scene.here(keys) == [0, 1], "no orphan any more, so the leaf goes first"


def test_held_orphans_are_adopted_too() -> None:
    for hold in ("lease", "pin"):
        scene = Scene(64)
        keys = chain("a", 3)
        scene.commit(keys[1:], scene.reserve(2), after=keys[0], depth=1)
        if hold == "lease":
            scene.acquire(keys[1:])
        else:
            scene.store.pin(scene.ns, keys[1:], 60.0, scene.now)
        evict_none(scene)
        scene.commit(keys[:1], scene.reserve(1))
        scene.check()
        scene.store.release(scene.session, list(scene.session.leased))
        scene.store.unpin(scene.ns, keys)
        scene.check()
        evict(scene, 2)
        assert scene.here(keys) == [0]


def evict_none(scene: Scene) -> None:
    """Has the policy look for a victim where all are held, so that it has put them aside."""
    assert scene.store.policy.victim(scene.store.pool(scene.ns).order) == NONE
    scene.check()


def test_one_parent_adopts_all_that_wait_for_it() -> None:
    scene = Scene(64)
    children = [key_of(f"child {i}") for i in range(5)]
    for child in children:
        scene.commit([child], scene.reserve(1), after=key_of("parent"), depth=1)
    scene.commit([key_of("parent")], scene.reserve(1))
    parent = row_of(scene, key_of("parent"))
    assert sorted(keys_of(scene, scene.store.table.children(parent)), key=str) == sorted(children, key=str)
    scene.check()


@pytest.mark.parametrize("length", [2, 3, 5])
def test_a_circle_that_a_hostile_client_offers_is_cut(length: int) -> None:
    scene = Scene(64)
    keys = chain("circle", length)
    for i, key in enumerate(keys):
        scene.store.commit(scene.session, scene.ns, [key], scene.reserve(1), [keys[i - 1]], [i], scene.now)
        scene.check()
    scene.store.touch(scene.tenant, keys, scene.tick())
    for i in range(64):
        scene.tick()
        scene.put([key_of(f"fill {i}")])
    assert scene.here(keys) == []
    scene.check()


def test_a_circle_in_one_commit_is_cut() -> None:
    scene = Scene(64)
    a, b = key_of("a"), key_of("b")
    scene.store.commit(scene.session, scene.ns, [a, b], scene.reserve(2), [b, a], [0, 0], scene.now)
    scene.check()
    assert scene.store.remove(scene.ns, [a, b]) == 2
    scene.check()


def test_a_parent_of_another_size_counts_in_its_own_pool() -> None:
    scene = Scene(64, 4)
    large = scene.namespace("large", 2 * PAGE)
    scene.put([key_of("parent")], ns=large)
    scene.commit([key_of("child")], scene.reserve(1), after=key_of("parent"), depth=1)
    scene.check()
    scene.store.remove(large, [key_of("parent")])
    scene.check()
    scene.put([key_of("parent")], ns=large)
    scene.check()
    scene.store.remove(scene.ns, [key_of("child")])
    scene.check()


def test_a_shared_prefix_survives_its_branches() -> None:
    scene = Scene(64)
    trunk = chain("trunk", 8)
    branches = [trunk + chain(f"branch {i}", 8) for i in range(5)]
    for branch in branches:
        scene.tick()
        scene.put(branch)
    for left in range(5 * 8, 0, -8):
        assert scene.here(trunk) == list(range(8))
        assert sum(len(scene.here(branch[8:])) for branch in branches) == left
        evict(scene, 8)
        gone = [i for i, branch in enumerate(branches) if not scene.here(branch[8:])]
        assert gone == list(range((40 - left) // 8 + 1)), "the oldest branch first, and all of it"
    evict(scene, 3)
    assert scene.here(trunk) == list(range(5))


def test_a_branch_in_use_outlives_its_elders() -> None:
    scene = Scene(64)
    trunk = chain("trunk", 4)
    branches = [trunk + chain(f"branch {i}", 4) for i in range(3)]
    for branch in branches:
        scene.tick()
        scene.put(branch)
    scene.store.touch(scene.tenant, branches[0], scene.tick())
    evict(scene, 8)
    assert [len(scene.here(branch)) for branch in branches] == [8, 4, 4]


def test_a_use_of_a_leaf_is_one_of_all_it_hangs_from() -> None:
    """A client may name only the end of what it read."""
    scene = Scene(64)
    keys = chain("a", 6)
    scene.put(keys)
    scene.store.touch(scene.tenant, keys[-1:], scene.tick())
    assert [scene.store.table.used[row_of(scene, key)] for key in keys] == [scene.now] * 6
    scene.tick(tree.RECENT_S / 2)
    scene.store.touch(scene.tenant, keys[-1:], scene.now)
    used = [scene.store.table.used[row_of(scene, key)] for key in keys]
    assert used == [scene.now - tree.RECENT_S / 2] * 5 + [scene.now], "told again only after a while"


def test_a_batch_added_to_a_long_chain_does_not_walk_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did: 1.2 ms a commit at 4,096 blocks."""
    scene = Scene(1024, 16)
    keys = chain("a", 600)
    touched: list[int] = []
    touch = scene.store.policy.touch

    def count(order: PoolOrder, rows: Sequence[int]) -> None:
        touched.append(len(rows))
        touch(order, rows)

    monkeypatch.setattr(scene.store.policy, "touch", count)
    for start in range(0, 600, 10):
        scene.tick(0.01)
        scene.commit(keys[start : start + 10], scene.reserve(10), after=keys[start - 1] if start else b"", depth=start)
    assert sum(touched) == 0
    scene.tick()
    scene.commit([key_of("end")], scene.reserve(1), after=keys[-1], depth=600)
    assert sum(touched) == 600
    scene.check()


def test_a_chain_larger_than_its_tier_keeps_its_leading_run() -> None:
    """Put in batches with eviction between them, again and again: what is kept can be matched."""
    scene = Scene(128, 4)
    for i in range(20):
        scene.tick()
        scene.put(chain(f"old {i}", 6))
    keys = chain("long", 400)
    for _ in range(3):
        for start in range(0, 400, 16):
            scene.tick(0.5)
            scene.store.touch(scene.tenant, keys[:start], scene.now)
            scene.put(keys[: start + 16], start=start, batch=16)
            scene.store.evict_step(0.95, 0.9, 64)
            scene.check()
        run = len(scene.store.match(scene.ns, keys))
        assert run >= 0.7 * 128
        scene.tick()
    assert scene.here(keys)[:run] == list(range(run))
    assert scene.store.counts.evicted_inner == 0


def test_orphans_go_before_anything_else() -> None:
    scene = Scene(64)
    scene.put(chain("kept", 10))
    scene.tick()
    keys = chain("a", 6)
    scene.put(keys)
    scene.store.remove(scene.ns, keys[2:3])
    assert orphans(scene) == {keys[3]: keys[2]}
    evict(scene, 3)
    assert scene.here(keys) == [0, 1]
    assert scene.here(chain("kept", 10)) == list(range(10))
    assert scene.store.counts.evicted_orphans == 3
    assert scene.store.counts.evicted_inner == 0


def test_where_every_leaf_is_held_the_deepest_inner_block_goes() -> None:
    scene = Scene(16)
    keys = chain("a", 12)
    scene.put(keys)
    scene.acquire(keys[:1], session=scene.open())
    pinned = keys[-1:]
    scene.store.pin(scene.ns, pinned, 60.0, scene.now)
    evict(scene, 1)
    assert scene.here(keys) == [i for i in range(12) if i != 10]
    assert scene.store.counts.evicted_inner == 1
    evict(scene, 8)
    assert scene.here(keys) == [0, 1, 11], "then from the new leaf up; the first is leased"
    scene.store.unpin(scene.ns, pinned)
    evict(scene, 1)
    assert scene.here(keys) == [0, 1], "the pinned one was an orphan since"


class TestUntil:
    """Pins and lives end at a time."""

    def test_a_pin_keeps_a_block_until_its_time(self) -> None:
        scene = Scene(8)
        keys = scene.fill()
        scene.store.pin(scene.ns, keys[:2], 30.0, scene.now)
        for i in range(12):
            scene.put([key_of(f"new {i}")])
        assert scene.here(keys) == [0, 1]
        scene.tick(29.9)
        assert not scene.store.expire(scene.now)
        assert scene.store.pool(scene.ns).pinned == 2
        scene.tick(0.1)
        assert not scene.store.expire(scene.now)
        assert scene.store.pool(scene.ns).pinned == 0
        scene.check()
        for i in range(12):
            scene.tick()
            scene.put([key_of(f"newer {i}")])
        assert scene.here(keys) == []

    def test_a_second_pin_replaces_the_first(self) -> None:
        scene = Scene(8)
        keys = chain("a", 1)
        scene.put(keys)
        for seconds in (60.0, 10.0, 30.0):
            assert scene.store.pin(scene.ns, keys, seconds, scene.now) == 1
        scene.store.expire(scene.tick(15))
        assert scene.store.pool(scene.ns).pinned == 1
        scene.store.expire(scene.tick(15))
        assert scene.store.pool(scene.ns).pinned == 0
        assert not scene.store.expire(scene.tick(100))
        scene.check()

    def test_a_block_with_a_life_is_dropped_at_its_end(self) -> None:
        scene = Scene(8)
        scene.put(chain("short", 2), ttl_s=10.0)
        scene.put(chain("long", 2))
        scene.store.expire(scene.tick(9.9))
        assert scene.here(chain("short", 2)) == [0, 1]
        scene.store.expire(scene.tick(0.1))
        assert scene.here(chain("short", 2)) == []
        assert scene.here(chain("long", 2)) == [0, 1]
        assert scene.store.counts.expired == 2
        scene.check()

    def test_a_life_ends_for_its_block_only_and_not_for_the_next_in_its_row(self) -> None:
        scene = Scene(8)
        key = key_of("a")
        scene.put([key], ttl_s=10.0)
        row = row_of(scene, key)
        scene.store.remove(scene.ns, [key])
        scene.put([key])
        assert row_of(scene, key) == row
        scene.store.expire(scene.tick(20))
        assert scene.present(key)
        scene.check()

    def test_a_life_ends_also_where_the_block_is_pinned_or_leased(self) -> None:
        scene = Scene(8)
        keys = chain("a", 2)
        scene.put(keys, ttl_s=10.0)
        scene.store.pin(scene.ns, keys[:1], 60.0, scene.now)
        scene.acquire(keys)
        scene.store.expire(scene.tick(10))
        assert scene.here(keys) == []
        assert scene.store.pool(scene.ns).doomed == 2
        scene.check()
        scene.store.release(scene.session, list(scene.session.leased))
        assert scene.store.pool(scene.ns).doomed == 0
        scene.check()

    def test_many_ends_are_worked_off_in_bounded_steps(self) -> None:
        scene = Scene(1024, 16)
        keys = [key_of(str(i)) for i in range(600)]
        for key in keys:
            scene.put([key], ttl_s=10.0)
        scene.tick(10)
        left = []
        while scene.store.expire(scene.now):
            left.append(len(scene.here(keys)))
        assert left == [344, 88]
        assert scene.here(keys) == []
        scene.check()

    def test_pinning_again_and_again_does_not_pile_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tree, "UNTIL_SLACK", 8)
        scene = Scene(8)
        keys = chain("a", 3)
        scene.put(keys)
        for i in range(200):
            scene.store.pin(scene.ns, keys, 1000.0 - i, scene.now)
            assert len(scene.store.tree.untils) <= 2 * 3 + 8
            scene.check()
        scene.store.unpin(scene.ns, keys)
        assert not scene.store.expire(scene.tick(2000))
        scene.check()


def test_hits_are_counted_up_to_their_column() -> None:
    scene = Scene(8)
    keys = chain("a", 1)
    scene.put(keys)
    row = row_of(scene, keys[0])
    scene.store.touch(scene.tenant, keys * 3, scene.tick())
    scene.acquire(keys)
    assert scene.store.table.hits[row] == 4
    scene.store.table.hits[row] = HITS_MAX - 1
    scene.store.touch(scene.tenant, keys * 3, scene.tick())
    assert scene.store.table.hits[row] == HITS_MAX


def test_a_dropped_row_keeps_no_mark() -> None:
    scene = Scene(8)
    keys = chain("a", 1)
    scene.put(keys, ttl_s=60.0)
    scene.store.pin(scene.ns, keys, 60.0, scene.now)
    row = row_of(scene, keys[0])
    assert scene.store.table.marks[row] & PINNED
    scene.store.remove(scene.ns, keys)
    assert scene.store.table.marks[row] == 0
    assert not scene.store.tree.until
    scene.check()
