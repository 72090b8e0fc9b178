"""A probe puts and takes back a block of nobody's, wherever the store is, and leaves no trace."""

from typing import Any

import pytest

from kvstore.core.block import NONE, State
from kvstore.core.holds import Namespace
from kvstore.core.probe import PROBE_TENANT, Probe
from kvstored.v1.errors import ResourceExhausted
from tests.core.scene import PAGE, Scene, chain, key_of


def trace(scene: Scene) -> dict[str, Any]:
    """All of the store that a client, or whoever looks at figures, can see; and all that decides what happens next."""
    store = scene.store
    table, segments = store.table, store.segments
    return {
        "counts": vars(store.counts).copy(),
        "tenants": [(t.name, dict(t.rows), t.held_bytes) for t in store.tenants.values()],
        "namespaces": [(n.id, n.blocks) for n in store.namespaces],
        "sessions": list(store.sessions),
        "published": dict(scene.index.published),
        "pools": {
            key: (p.slots, p.free, p.granted, p.blocks, list(p.open), list(p.segments))
            for key, p in segments.pools.items()
        },
        "segments": {
            n: (s.tenant, bytes(s.state), list(s.row), list(s.free), s.held, s.used) for n, s in segments.live.items()
        },
        "unowned": list(segments.unowned),
        "owned": dict(segments.owned),
        "spare": (segments.spare_bytes, list(segments.jobs), dict(segments.making)),
        "lists": {
            key: [store.policy.walk(pool.order, which) for which in (1, 2, 3)] for key, pool in segments.pools.items()
        },
        "blocks": [(row, table.used[row]) for row in range(len(table)) if table.state[row] == State.SEALED],
        "free rows": len(table) - table.rows_used if len(table) else 0,
    }


def put_and_taken_back(scene: Scene, probe: Probe) -> bool:
    """One whole probe; whether it had a slot of its own."""
    grown = len(scene.store.table)
    before = trace(scene)
    with probe.taken() as trial:
        own = trial.row == NONE
        if own:
            row = probe.commit(trial, scene.now)
            assert probe.find() == [row]
            assert (PROBE_TENANT, probe.key) in scene.index.published
    after = trace(scene)
    if not grown:
        before["free rows"] = after["free rows"]  # the table's first rows were made for it
    assert after == before
    scene.check()
    return own


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def probe(scene: Scene) -> Probe:
    return Probe(scene.store, key_of("nobody's"))


def test_before_the_first_client_a_segment_is_lent_and_is_nobodys_again(scene: Scene, probe: Probe) -> None:
    assert put_and_taken_back(scene, probe)
    assert not scene.store.segments.pools
    assert not scene.store.segments.owned


def test_with_blocks_there_a_free_slot_is_taken_and_given_back(probe: Probe, scene: Scene) -> None:
    scene.put(chain("a", 5))
    assert put_and_taken_back(scene, probe)


def test_the_last_free_slot_of_a_segment_comes_back_to_its_place() -> None:
    scene = Scene(64, in_segment=4)
    probe = Probe(scene.store, key_of("nobody's"))
    refs = scene.reserve(7)
    scene.commit(chain("a", 3), refs[:3])
    for _ in range(3):
        assert put_and_taken_back(scene, probe)
    assert scene.reserve(1), "and is granted to whoever asks next"
    scene.check()


def test_where_every_slot_has_a_block_one_that_may_go_shows_that_a_put_works(scene: Scene, probe: Probe) -> None:
    keys = scene.fill()
    assert not put_and_taken_back(scene, probe)
    assert scene.here(keys) == list(range(len(keys))), "nothing was evicted for it"


def test_where_every_block_is_pinned_it_is_refused_as_a_put_is(scene: Scene, probe: Probe) -> None:
    keys = scene.fill()
    scene.store.pin(scene.ns, keys, 60.0, scene.now)
    before = trace(scene)
    with pytest.raises(ResourceExhausted, match="pinned"), probe.taken():
        pass
    # Whoever looks for a victim puts held blocks aside until they are held no more.
    assert {**trace(scene), "lists": None} == {**before, "lists": None}
    scene.check()
    with pytest.raises(ResourceExhausted):
        scene.reserve(1)
    scene.store.unpin(scene.ns, keys[:1])
    assert not put_and_taken_back(scene, probe)


def test_where_sessions_hold_as_much_as_they_may_it_is_refused_as_a_put_is(scene: Scene, probe: Probe) -> None:
    keys = scene.fill()
    holders = [scene.open() for _ in range(3)]
    for i, session in enumerate(holders):
        scene.acquire(keys[16 * i : 16 * i + 1], session=session)
        for key in keys[16 * i + 1 : 16 * i + 16]:
            scene.acquire([key], session=session)
    with pytest.raises(ResourceExhausted, match="release leases"), probe.taken():
        pass
    with pytest.raises(ResourceExhausted):
        scene.reserve(1, session=scene.open())
    scene.store.end_session(holders[0], process_gone=True)
    assert not put_and_taken_back(scene, probe)


# -- whether what is put stays


def new_block_stays(scene: Scene, high: float, low: float) -> bool:
    """What becomes of a block that is put now, once the watermarks have been seen to; then it goes anyway."""
    key = key_of(f"new at {scene.tick()}")
    scene.put([key])
    while scene.store.evict_step(high, low, 128):
        pass
    stays = scene.present(key)
    scene.store.remove(scene.ns, [key])
    return stays


@pytest.mark.parametrize(("high", "low"), [(0.95, 0.9), (0.5, 0.25), (1.0, 0.5), (0.99, 0.0)])
def test_it_says_that_nothing_stays_just_where_nothing_does(high: float, low: float) -> None:
    """With every number of pins, up to all of the memory but the slot that a put needs."""
    scene = Scene(32)
    probe = Probe(scene.store, key_of("nobody's"))
    seen = set()
    for pins in range(1, 32):
        key = key_of(f"pinned {pins}")
        scene.put([key])
        scene.store.pin(scene.ns, [key], 60.0, scene.now)
        said = probe.stays(high)
        stays = new_block_stays(scene, high, low)
        assert stays == (not said), f"{pins} pins"
        assert scene.store.pool(scene.ns).pinned == pins
        seen.add(stays)
    assert seen == ({True} if int(32 * (1 - high)) == 0 else {True, False})
    scene.check()


def test_it_says_who_has_most_pins_and_how_they_end(scene: Scene, probe: Probe) -> None:
    other = scene.namespace("another")
    keys, few = scene.fill(), [key_of("other's")]
    scene.put(few, ns=other)
    scene.store.pin(other, few, 60.0, scene.now)
    assert probe.stays(0.95) == ""
    scene.store.pin(scene.ns, keys, 60.0, scene.now)
    said = probe.stays(0.95)
    assert "of tenant 'default', 64 are pinned" in said
    assert f"most pins are of namespace {scene.ns.id}, 63 blocks" in said
    assert "ns.unpin" in said
    scene.tick(61.0)
    while scene.store.expire(scene.now):
        pass
    assert probe.stays(0.95) == "", "the pins have ended"
    scene.check()


def test_memory_that_this_size_can_still_have_is_room(scene: Scene, probe: Probe) -> None:
    """Of nobody, or of another block size where nothing is held."""
    keys = chain("few", 4)
    scene.put(keys)
    scene.store.pin(scene.ns, keys, 60.0, scene.now)
    assert probe.stays(0.95) == "", "there is memory that is nobody's"
    large = scene.namespace("large", 4 * PAGE)
    with pytest.raises(ResourceExhausted):
        scene.reserve(1, large)  # its memory has to be made first
    assert probe.stays(0.95) == ""
    scene.run_jobs()
    assert probe.stays(0.95) == ""
    small = scene.namespace("small", 512)
    scene.fill(small)
    assert probe.stays(0.95) == ""
    assert new_block_stays(scene, 0.95, 0.9)
    scene.check()


# -- the rest


def test_memory_that_is_nobodys_is_lent_where_every_size_that_has_memory_may_have_no_more(
    scene: Scene, probe: Probe
) -> None:
    """A size without memory counts too, if it is the smallest of its tenant; another one is about to have some."""
    segments, tenant, other = scene.store.segments, scene.tenant, scene.store.tenant("other")
    scene.put([key_of("a")])
    tenant.held_bytes += segments.size_bytes
    with pytest.raises(ResourceExhausted, match="release leases"), probe.taken():
        pass
    large, small = (Namespace(0, other, b"", size, "") for size in (PAGE * 2, PAGE))
    scene.store.pool(large)
    tenant.held_bytes -= segments.size_bytes
    assert put_and_taken_back(scene, probe)
    tenant.held_bytes += segments.size_bytes
    assert segments.unowned
    with probe.taken() as trial:
        assert trial.pool.tenant == PROBE_TENANT
    smaller = scene.store.pool(small)
    assert segments.smallest[other.id] is smaller
    scene.store.pool(Namespace(0, other, b"", PAGE * 3, ""))
    assert segments.smallest[other.id] is smaller
    tenant.held_bytes -= segments.size_bytes
    scene.check()


def test_before_there_is_memory_it_is_refused() -> None:
    scene = Scene(ready=False)
    with pytest.raises(ResourceExhausted, match="no memory yet"), Probe(scene.store, key_of("nobody's")).taken():
        pass
    scene.check()


def test_a_probe_that_fails_half_way_leaves_nothing(scene: Scene, probe: Probe) -> None:
    scene.put([key_of("a")])
    before = trace(scene)

    def fails(*, commits: bool) -> None:
        with probe.taken() as trial:
            if commits:
                probe.commit(trial, scene.now)
            raise ZeroDivisionError

    for commits in (True, False):
        with pytest.raises(ZeroDivisionError):
            fails(commits=commits)
    assert trace(scene) == before
    scene.check()
