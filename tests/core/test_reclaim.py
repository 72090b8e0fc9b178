"""Evictions that were asked for: what goes, in which order, what stays, and what is counted."""

from kvstore.core import reclaim
from kvstore.core.reclaim import Reclaimed
from tests.core.scene import PAGE, Scene, chain, key_of


def evict_bytes(scene: Scene, size_bytes: int, most: int = 2) -> Reclaimed:
    done = Reclaimed()
    while reclaim.bytes_step(scene.store, None, size_bytes, most, done):
        scene.check()
    scene.check()
    return done


def test_named_blocks_go_and_their_absence_is_told() -> None:
    scene = Scene(16)
    keys = chain("a", 4)
    scene.put(keys)
    done = Reclaimed()
    reclaim.keys_step(scene.store, scene.tenant, [keys[1], keys[3], key_of("never")], done)
    assert scene.here(keys) == [0, 2]
    assert done == Reclaimed(blocks=2, size_bytes=2 * PAGE, absent=1)
    assert scene.store.counts.evicted_asked == 2
    assert scene.store.counts.evicted == scene.store.counts.removed == 0
    scene.check()


def test_leased_and_pinned_blocks_stay_and_are_counted() -> None:
    scene = Scene(16)
    keys = chain("a", 5)
    scene.put(keys)
    refs = scene.acquire(keys[:2])
    scene.store.pin(scene.ns, [keys[4]], 60.0, scene.now)
    done = Reclaimed()
    reclaim.keys_step(scene.store, scene.tenant, keys, done)
    assert scene.here(keys) == [0, 1, 4]
    assert (done.blocks, done.held, done.pinned, done.leased) == (2, 3, 1, 2)
    assert (done.held_bytes, done.pinned_bytes, done.leased_bytes) == (3 * PAGE, PAGE, 2 * PAGE)
    scene.check()
    scene.store.release(scene.session, refs)
    scene.store.unpin(scene.ns, keys)
    reclaim.keys_step(scene.store, scene.tenant, keys, done)
    assert (done.blocks, done.held, done.absent) == (5, 3, 2)
    scene.check()


def test_a_block_that_was_dropped_under_its_lease_is_not_told_as_left() -> None:
    scene = Scene(16)
    keys = chain("a", 3)
    scene.put(keys)
    scene.acquire(keys[:2])
    scene.store.remove(scene.ns, [keys[1]])
    done = evict_bytes(scene, 100 * PAGE)
    assert (done.blocks, done.held, done.leased, done.pinned) == (1, 1, 1, 0)


def test_a_walk_drops_one_namespace_and_no_other() -> None:
    scene = Scene(16)
    other = scene.namespace("other")
    scene.put(chain("a", 3))
    scene.put(chain("b", 3), ns=other)
    done = Reclaimed()
    at: int | None = 0
    steps = []
    while at is not None:
        steps.append(at)
        at = reclaim.rows_step(scene.store, None, other, at, 256, done)
        scene.check()
    assert steps == [0, 256, 512, 768], "no step looks at more rows than it may"
    assert done.blocks == 3
    assert scene.here(chain("a", 3)) == [0, 1, 2]
    assert scene.here(chain("b", 3), other) == []


def test_bytes_come_from_what_was_used_longest_ago_over_all_pools() -> None:
    scene = Scene(32, 4)
    large = scene.namespace("large", 2 * PAGE)
    small_keys, large_keys = [key_of(f"s{i}") for i in range(4)], [key_of(f"l{i}") for i in range(4)]
    for small, big in zip(small_keys, large_keys, strict=True):
        scene.tick()
        scene.put([small])
        scene.tick()
        scene.put([big], ns=large)
    done = evict_bytes(scene, 5 * PAGE)
    assert done == Reclaimed(blocks=4, size_bytes=6 * PAGE)
    assert scene.here(small_keys) == scene.here(large_keys, large) == [2, 3]


def test_bytes_are_taken_of_one_tenant_where_it_is_named() -> None:
    scene = Scene(32)
    other = scene.store.tenant("other")
    space, writer = scene.namespace("ns", PAGE, other), scene.open(other)
    scene.put(chain("a", 3))
    scene.tick()
    scene.put(chain("b", 3), ns=space, session=writer)
    done = Reclaimed()
    assert not reclaim.bytes_step(scene.store, other, 100 * PAGE, 100, done)
    assert done.blocks == 3
    assert scene.here(chain("a", 3)) == [0, 1, 2]
    scene.check()


def test_where_all_is_held_fewer_bytes_are_had_and_what_is_held_is_told() -> None:
    scene = Scene(16)
    keys = chain("a", 6)
    scene.put(keys)
    scene.store.pin(scene.ns, keys[:4], 60.0, scene.now)
    assert evict_bytes(scene, 100 * PAGE) == Reclaimed(
        blocks=2, size_bytes=2 * PAGE, held=4, held_bytes=4 * PAGE, pinned=4, pinned_bytes=4 * PAGE
    )


def test_a_step_drops_no_more_than_it_may() -> None:
    scene = Scene(64)
    scene.put(chain("a", 40))
    done = Reclaimed()
    assert reclaim.bytes_step(scene.store, None, 40 * PAGE, 7, done)
    assert done.blocks == 7
