"""Parents and children at any number: what comes and goes is one step, and what is left for later is done later."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from kvstore.core import evict, families, room, tree
from kvstore.core.block import MISSING, NONE, State
from kvstore.core.evict import LEAF, ORPHAN, OUT, PoolOrder
from kvstored.v1.errors import ResourceExhausted
from tests.core.scene import PAGE, Scene, chain, key_of

ROOT = key_of("root")


def listed(scene: Scene, keys: Sequence[bytes], which: int) -> int:
    rows, column = scene.tenant.rows, scene.store.table.listed
    return sum(column[rows[key]] == which for key in keys)


def star(scene: Scene, count: int) -> list[bytes]:
    """Children of a root that is not here."""
    keys = [key_of(f"child {i}") for i in range(count)]
    for key in keys:
        scene.commit([key], scene.reserve(1), after=ROOT, depth=1)
    return keys


def test_however_many_children_a_parent_has_its_coming_and_going_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 100,000 of them the daemon stood still: each was moved in the call that stored or removed the parent."""
    monkeypatch.setattr(tree, "SETTLE_STEP", 10)
    scene = Scene(128, 4)
    keys = star(scene, 60)
    assert listed(scene, keys, ORPHAN) == 60
    scene.commit([ROOT], scene.reserve(1))
    assert listed(scene, keys, ORPHAN) == 60 - families.SETTLE_NOW
    scene.check()
    assert scene.store.expire(scene.now), "there is more"
    assert listed(scene, keys, ORPHAN) == 60 - families.SETTLE_NOW - 10
    scene.check()
    scene.store.remove(scene.ns, [ROOT])
    scene.check()
    while scene.store.expire(scene.now):
        scene.check()
    assert listed(scene, keys, ORPHAN) == 60
    scene.commit([ROOT], scene.reserve(1))
    while scene.store.expire(scene.now):
        scene.check()
    assert listed(scene, keys, LEAF) == 60
    assert not scene.store.tree.families.unsettled


def test_children_that_go_while_they_are_to_be_settled_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "SETTLE_NOW", 1)
    scene = Scene(64)
    keys = star(scene, 6)
    scene.commit([ROOT], scene.reserve(1))
    for key in reversed(keys):  # in the order in which they are settled
        assert scene.store.remove(scene.ns, [key]) == 1
        scene.check()
    assert not scene.store.tree.families.unsettled
    assert scene.store.remove(scene.ns, [ROOT]) == 1
    assert scene.store.table.rows_used == 3, "the list heads"


def test_a_stand_in_goes_with_its_last_child() -> None:
    scene = Scene(64)
    keys = star(scene, 2)
    row = scene.tenant.missing[ROOT]
    assert scene.store.table.state[row] == MISSING
    scene.store.remove(scene.ns, keys[:1])
    assert scene.tenant.missing == {ROOT: row}
    scene.store.remove(scene.ns, keys[1:])
    assert not scene.tenant.missing
    assert scene.store.table.state[row] == State.GONE
    scene.check()


def test_a_leased_parent_that_is_removed_is_doomed_and_its_children_wait_for_it() -> None:
    scene = Scene(64)
    keys = chain("a", 3)
    scene.put(keys)
    refs = scene.acquire(keys[:1])
    scene.store.remove(scene.ns, keys[:1])
    scene.check()
    assert scene.store.pool(scene.ns).doomed == 1
    scene.put(keys[:1])
    assert scene.acquire(keys[:1]) != refs, "the slot of the first is still looked at"
    assert scene.store.table.parent[scene.tenant.rows[keys[1]]] == scene.tenant.rows[keys[0]]
    scene.check()
    scene.store.release(scene.session, refs)
    assert scene.store.pool(scene.ns).doomed == 0
    scene.check()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]], ids=str)
@pytest.mark.parametrize("depths", [[0, 0, 0, 0], [9, 3, 3, 0], [0, 1, 2, 3], [0xFFFFFFFF] * 4], ids=str)
def test_a_child_is_deeper_than_its_parent_whatever_a_client_says(depths: list[int], order: list[int]) -> None:
    """So nothing has to be walked to find a circle, which took seconds on a chain of 100,000 blocks in reverse."""
    scene = Scene(64)
    keys = chain("a", 4)
    for i in order:
        above = [keys[i - 1] if i else b""]
        scene.store.commit(scene.session, scene.ns, [keys[i]], scene.reserve(1), above, [depths[i]], scene.now)
        scene.check()
    table, rows = scene.store.table, [scene.tenant.rows[key] for key in keys]
    hung = [table.parent[row] for row in rows[1:]]
    if depths == [0, 1, 2, 3]:
        assert hung == rows[:3]
        assert [table.depth[row] for row in rows] == depths
    elif order == [0, 1, 2, 3] and depths != [0xFFFFFFFF] * 4:
        assert hung == rows[:3], "in order, depths are put right"
    for row, parent in zip(rows[1:], hung, strict=True):
        assert parent == NONE or table.depth[row] > table.depth[parent]


def test_what_a_use_of_a_very_deep_block_touches_is_bounded_and_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "CLIMB_MAX", 8)
    scene = Scene(128, 4)
    keys = chain("a", 60)
    scene.put(keys)
    touched: list[int] = []
    touch = scene.store.policy.touch

    def count(order: PoolOrder, rows: Sequence[int]) -> None:
        touched.append(len(rows))
        touch(order, rows)

    monkeypatch.setattr(scene.store.policy, "touch", count)
    scene.tick()
    scene.store.touch(scene.tenant, keys[-1:], scene.now)
    assert sum(touched) == 1 + 8
    steps = 0
    while scene.store.tree.climbs:
        scene.check()
        touched.clear()
        scene.store.expire(scene.now)
        assert sum(touched) <= 8
        steps += 1
    assert steps == 7
    used = scene.store.table.used
    assert {used[scene.tenant.rows[key]] for key in keys} == {scene.now}
    scene.check()


def test_a_way_up_goes_on_when_the_block_it_stopped_at_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "CLIMB_MAX", 2)
    scene = Scene(64)
    keys = chain("a", 8)
    scene.put(keys)
    scene.tick()
    scene.store.touch(scene.tenant, keys[-1:], scene.now)
    (row,) = scene.store.tree.climbs
    assert row == scene.tenant.rows[keys[4]]
    scene.store.remove(scene.ns, [keys[4]])
    scene.check()
    while scene.store.expire(scene.now):
        scene.check()
    used = scene.store.table.used
    assert all(used[scene.tenant.rows[key]] == scene.now for key in keys if scene.present(key))
    scene.store.remove(scene.ns, keys)
    assert not scene.store.tree.climbs
    scene.check()


def test_ways_up_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "CLIMB_MAX", 1)
    monkeypatch.setattr(tree, "CLIMBS_MAX", 2)
    scene = Scene(64)
    chains = [chain(name, 5) for name in "abcd"]
    for keys in chains:
        scene.put(keys)
    scene.store.touch(scene.tenant, [keys[-1] for keys in chains], scene.tick())
    assert len(scene.store.tree.climbs) == 2
    scene.check()


def test_pins_that_are_set_again_and_again_are_sifted_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a million of them, one Pin sorted them all."""
    monkeypatch.setattr(tree, "UNTIL_SLACK", 4)
    scene = Scene(64)
    keys = chain("a", 10)
    scene.put(keys)
    found = scene.store.tree
    for i in range(300):
        scene.store.pin(scene.ns, [keys[i * 7 % 10]], 1000.0 - i, scene.now)
        assert len(found.untils) + len(found.untils_before) < 5 * len(keys)
        scene.check()
    ends = [found.until[code] for code in sorted(found.until)]
    assert len(ends) == 10
    for left in range(9, -1, -1):
        at = min(found.until.values())
        scene.store.expire(at - 0.001)
        assert len(found.until) == left + 1
        scene.store.expire(at)
        assert len(found.until) == left, "each ends in its turn"
    assert scene.store.pool(scene.ns).pinned == 0


def test_a_segment_taken_for_another_size_is_emptied_in_steps_and_nothing_is_put_there_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool with nothing to evict emptied whole segments in one call: 0.3 s and more each."""
    monkeypatch.setattr(room, "EMPTY_BLOCKS", 3)
    scene = Scene(32, 16)
    keys = [key_of(f"block {i}") for i in range(32)]
    for key in keys:
        scene.put([key])
    scene.store.touch(scene.tenant, keys[16:], scene.tick())
    large, other = scene.namespace("large", 8 * PAGE), scene.open()
    gone: list[int] = []
    while True:
        before = len(scene.here(keys))
        try:
            (ref,) = scene.reserve(1, large, other)
        except ResourceExhausted:
            gone.append(before - len(scene.here(keys)))
            assert scene.store.room.pending
            assert scene.store.pool(scene.ns).free == 0, "what is emptied is nobody's"
            scene.check()
        else:
            break
        scene.store.evict_step(1.0, 1.0, 1)
        scene.check()
    assert gone == [3] * len(gone)
    assert len(gone) == 3, "and a step each time that the loop comes by"
    assert scene.here(keys) == list(range(16, 32))
    assert scene.store.segments.live[ref >> 32].pool is scene.store.pool(large)
    scene.check()


@pytest.mark.parametrize("hold", ["lease", "pin"])
def test_a_segment_in_which_somebody_begins_to_hold_a_block_stays(hold: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "EMPTY_BLOCKS", 3)
    scene = Scene(16, 16)
    keys = [key_of(f"block {i}") for i in range(16)]
    for key in keys:
        scene.put([key])
    large, other = scene.namespace("large", 8 * PAGE), scene.open()
    with pytest.raises(ResourceExhausted):
        scene.reserve(1, large, other)
    assert scene.store.room.pending
    left = [keys[i] for i in scene.here(keys)]
    assert len(left) == 13
    if hold == "lease":
        scene.acquire(left[:1])
    else:
        scene.store.pin(scene.ns, left[:1], 60.0, scene.now)
    scene.check()
    scene.store.evict_step(1.0, 1.0, 1)
    assert not scene.store.room.pending
    assert scene.store.pool(scene.ns).free == 3
    assert len(scene.here(keys)) == 13
    scene.check()
    assert len(scene.reserve(3)) == 3, "its slots are its pool's again"


def test_held_blocks_are_passed_over_in_bounded_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needed room first after 650,000 leases walked past all of them: 0.2 s."""
    monkeypatch.setattr(evict, "PASS_MAX", 4)
    scene = Scene(64, 8)
    keys = scene.fill()
    scene.store.pin(scene.ns, keys[:14], 60.0, scene.now)
    pool = scene.store.pool(scene.ns)
    out = [listed(scene, keys, OUT)]
    while True:
        try:
            scene.reserve(1)
        except ResourceExhausted:
            assert scene.store.room.pending, "who waits is told when it is worth while to ask again"
        else:
            break
        scene.check()
        waits = scene.store.room.waits_ended
        while scene.store.room.pending:
            scene.store.evict_step(1.0, 1.0, 1)
            out.append(listed(scene, keys, OUT))
            scene.check()
        assert scene.store.room.waits_ended == waits + 1
    assert max(b - a for a, b in pairwise(out)) <= 3 * 4, "a few looks a step"
    assert scene.here(keys) == [*range(14), *range(15, len(keys))]
    assert not pool.order.passing
    scene.check()
