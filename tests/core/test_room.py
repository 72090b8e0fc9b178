"""Where room comes from: nobody's memory, eviction, other block sizes, other tenants; and when there is none."""

import contextlib

import pytest

from kvstore.core import room
from kvstore.core.holds import Namespace, Session
from kvstore.core.segments import MakeSegment
from kvstored.v1.errors import InvalidArgument, ResourceExhausted
from tests.core.scene import PAGE, Scene, chain, key_of


def sizes(scene: Scene, count: int) -> list[Namespace]:
    return [scene.namespace(f"{i} pages", i * PAGE) for i in range(1, count + 1)]


def segments_of(scene: Scene, ns: Namespace) -> int:
    return len(scene.store.pool(ns).segments)


def left(scene: Scene, keys: list[bytes]) -> list[bytes]:
    return [keys[i] for i in scene.here(keys)]


class TestSizes:
    """Segments go from one block size to another within a tenant."""

    def test_many_block_sizes_share_a_small_slab(self) -> None:
        """More sizes than segments: each is served in turn, and the one in use has most of the memory."""
        scene = Scene(64, 16)
        spaces = sizes(scene, 16)
        for turn in range(3):
            for i, ns in enumerate(spaces):
                for j in range(4):
                    scene.tick()
                    assert scene.put([key_of(f"{turn} {i} {j}")], ns=ns) == 1
                    scene.check()
        for i in range(200):
            scene.tick()
            scene.put([key_of(f"last {i}")], ns=spaces[0])
        assert segments_of(scene, spaces[0]) == 4
        assert scene.store.room.moved > 10
        scene.check()

    def test_a_segment_moves_when_it_is_colder_than_what_would_be_evicted(self) -> None:
        scene = Scene(8, 2)
        small, large = scene.ns, scene.namespace("two", 2 * PAGE)
        old = chain("old", 4)
        scene.put(old, ns=small)
        scene.tick()
        for i in range(2):
            scene.put([key_of(f"large {i}")], ns=large)
        assert (segments_of(scene, small), segments_of(scene, large)) == (2, 2)
        for i in range(2, 4):
            scene.tick()
            scene.put([key_of(f"large {i}")], ns=large)
        assert segments_of(scene, large) > 2, "the old small blocks went, not the newer large ones"
        assert scene.here([key_of(f"large {i}") for i in range(4)], large) == [0, 1, 2, 3][-segments_of(scene, large) :]
        scene.check()

    def test_a_segment_in_use_does_not_move(self) -> None:
        scene = Scene(8, 2)
        small, large = scene.ns, scene.namespace("two", 2 * PAGE)
        scene.fill(small)
        for i in range(4):
            scene.tick()
            scene.put([key_of(f"large {i}")], ns=large)
            scene.tick()
            rows = list(scene.tenant.rows)
            scene.store.touch(scene.tenant, rows, scene.now)
        assert segments_of(scene, small) >= 2
        scene.check()

    @pytest.mark.parametrize("hold", ["lease", "pin", "grant", "quarantine"])
    def test_a_segment_moves_only_when_nothing_in_it_is_held(self, hold: str) -> None:
        scene = Scene(4, 4)
        keys = chain("a", 3)
        scene.put(keys)
        other = scene.open()
        if hold == "lease":
            scene.acquire(keys[:1])
        elif hold == "pin":
            scene.store.pin(scene.ns, keys[:1], 60.0, scene.now)
        else:
            scene.reserve(1, session=other)
        if hold == "quarantine":
            scene.store.end_session(other, process_gone=False)
        scene.tick()
        large = scene.namespace("two", 2 * PAGE)
        third = scene.open()
        with pytest.raises(ResourceExhausted):
            scene.reserve(1, large, third)
        assert not scene.store.room.pending
        assert scene.here(keys) == [0, 1, 2], "nothing was dropped for nothing"
        scene.check()
        scene.store.release(scene.session, list(scene.session.leased))
        scene.store.unpin(scene.ns, keys)
        if not other.ended:
            scene.store.abort(other, list(other.granted))
        scene.store.end_session(other, process_gone=True)
        assert len(scene.reserve(1, large, third)) == 1
        assert scene.store.room.moved == 1
        scene.check()

    def test_a_refusal_names_the_block_size_whose_holds_keep_the_memory(self) -> None:
        """One lease in each segment kept every other size out for ever, and nothing said why."""
        scene = Scene(64, 4)
        keys = scene.fill()
        in_each = [scene.store.table.key[segment.row[0]] for segment in scene.store.segments.live.values()]
        held = [key for key in in_each if key in keys]
        scene.store.pin(scene.ns, held[1:], 60.0, scene.now)
        scene.acquire(held[:1])
        with pytest.raises(ResourceExhausted) as refused:
            scene.reserve(1, scene.namespace("four", 4 * PAGE), scene.open())
        assert (
            f"blocks of {PAGE} bytes have 16 segments, of which 16 cannot go to another size "
            "for 16 slots leased, pinned or granted in them"
        ) in str(refused.value)

    def test_an_empty_segment_is_the_first_to_move(self) -> None:
        scene = Scene(8, 2)
        small, large = scene.ns, scene.namespace("two", 2 * PAGE)
        keys = chain("a", 8)
        scene.put(keys, ns=small)
        scene.store.remove(small, keys[6:])
        pool = scene.store.pool(small)
        scene.tick()
        assert scene.put([key_of("large")], ns=large) == 1
        assert pool.blocks == 6
        scene.check()

    def test_a_segment_of_many_blocks_is_emptied_in_bounded_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """While the pool that gets it has something else to evict."""
        monkeypatch.setattr(room, "EMPTY_BLOCKS", 3)
        scene = Scene(32, 8)
        small, large = scene.ns, scene.namespace("two", 2 * PAGE)
        keys = chain("a", 24)
        scene.put(keys)
        scene.tick()
        for i in range(4):
            scene.put([key_of(f"large {i}")], ns=large)
        gone: list[int] = []
        while scene.store.room.moved == 0:
            scene.tick()
            before = len(scene.here(keys, small))
            assert scene.put([key_of(f"large {len(gone)} more")], ns=large) == 1
            gone.append(before - len(scene.here(keys, small)))
            scene.check()
        assert gone == [3, 3, 2]
        assert scene.store.counts.evicted_orphans == 0, "children went before their parents"

    def test_a_segment_that_another_size_has_just_got_is_not_taken_again(self) -> None:
        """Its blocks are yet to come, so no use of it is known; it counts as just used."""
        scene = Scene(16, 2)
        scene.fill()
        large, third = scene.namespace("large", 3 * PAGE), scene.namespace("third", 2 * PAGE)
        scene.tick()
        with pytest.raises(ResourceExhausted):
            scene.reserve(1, large)
        scene.run_jobs()
        assert len(scene.reserve(1, third, scene.open())) == 1
        assert scene.store.pool(large).slots == 1
        assert len(scene.reserve(1, large)) == 1
        scene.check()

    def test_a_block_larger_than_a_segment_gets_one_of_its_own(self) -> None:
        scene = Scene(64, 1)
        large = scene.namespace("large", 5 * PAGE + 1)
        key = key_of("large")
        with pytest.raises(ResourceExhausted):
            scene.reserve(1, large)
        make, drop = scene.waiting_jobs()
        assert [job.size_bytes for job in make] == [6 * PAGE]
        assert len(drop) == 6
        scene.check()
        scene.store.segments.made(make[0].segment)
        assert scene.put([key], ns=large) == 1
        assert scene.store.segments.live[make[0].segment].size_bytes == 6 * PAGE
        scene.check()

    def test_segments_with_blocks_are_taken_apart_for_a_large_block_coldest_first(self) -> None:
        scene = Scene(16)
        keys = scene.fill()
        scene.store.touch(scene.tenant, keys[:2], scene.tick())
        large = scene.namespace("large", 3 * PAGE)
        with pytest.raises(ResourceExhausted):
            scene.reserve(1, large)
        assert scene.run_jobs() == 1
        assert scene.here(keys) == [0, 1, *range(5, len(keys))]
        assert scene.put([key_of("large")], ns=large) == 1
        scene.check()

    def test_nothing_is_taken_apart_when_it_would_not_be_enough(self) -> None:
        scene = Scene(16)
        keys = scene.fill()
        scene.store.pin(scene.ns, keys[::2], 60.0, scene.now)
        large = scene.namespace("large", 10 * PAGE)
        for _ in range(3):
            with pytest.raises(ResourceExhausted):
                scene.reserve(1, large)
        assert len(scene.here(keys)) == len(keys)
        assert not scene.store.room.pending
        scene.check()

    def test_a_large_block_becomes_room_for_small_ones_again(self) -> None:
        scene = Scene(16)
        large = scene.namespace("large", 12 * PAGE)
        with pytest.raises(ResourceExhausted):
            scene.reserve(1, large)
        scene.run_jobs()
        scene.put([key_of("large")], ns=large)
        scene.tick()
        for i in range(12):
            scene.tick()
            assert scene.put([key_of(f"small {i}")]) == 1
        assert not scene.present(key_of("large"), large)
        scene.check()

    @pytest.mark.parametrize("size", [0, -1, 64 * PAGE + 1, 1 << 33])
    def test_a_block_that_can_never_fit_is_refused_when_its_namespace_is_opened(self, size: int) -> None:
        scene = Scene(64)
        with pytest.raises(InvalidArgument, match="not between 1 and 262144"):
            scene.namespace("too large", size)


class TestTenants:
    """Memory goes from one tenant to another only as bytes, never as a segment."""

    def other(self, scene: Scene) -> tuple[Namespace, Session]:
        tenant = scene.store.tenant("other")
        return scene.namespace("ns", tenant=tenant), scene.open(tenant)

    def test_a_tenant_that_comes_late_gets_a_segment_made_anew(self) -> None:
        scene = Scene(16)
        keys = scene.fill()
        old = set(scene.store.segments.live)
        ns, session = self.other(scene)
        with pytest.raises(ResourceExhausted):
            scene.reserve(1, ns, session)
        assert scene.run_jobs() == 1
        (ref,) = scene.reserve(1, ns, session)
        assert ref >> 32 not in old
        assert scene.here(keys) == list(range(1, len(keys))), "the coldest went"
        assert scene.dropped
        scene.check()

    def test_memory_counts_until_its_old_holders_have_unmapped_it(self) -> None:
        scene = Scene(16)
        scene.fill()
        for number in scene.store.segments.live:
            scene.mapped(scene.session, [number << 32])
        ns, session = self.other(scene)
        with pytest.raises(ResourceExhausted):
            scene.reserve(1, ns, session)
        make, drop = scene.waiting_jobs()
        assert (len(make), len(drop)) == (0, 1)
        assert scene.session.detach == {drop[0].segment}
        assert scene.store.room.pending
        with pytest.raises(ResourceExhausted):
            scene.reserve(1, ns, session)
        assert scene.waiting_jobs() == ([], []), "asked again, it waits for what is on its way"
        scene.check()
        scene.store.segments.forget_session(scene.session.id, [drop[0].segment])
        make, _ = scene.waiting_jobs()
        assert len(make) == 1, "made for who waits, without being asked again"
        scene.store.segments.made(make[0].segment)
        assert len(scene.reserve(1, ns, session)) == 1
        scene.check()

    def test_a_process_that_never_unmaps_does_not_starve_others(self) -> None:
        """Its session has ended and it lives: what it has mapped may never come back, so more is taken."""
        scene = Scene(16)
        scene.fill()
        for number in scene.store.segments.live:
            scene.mapped(scene.session, [number << 32])
        ns, session = self.other(scene)
        with pytest.raises(ResourceExhausted):
            scene.reserve(1, ns, session)
        scene.waiting_jobs()
        assert scene.store.room.pending
        scene.store.end_session(scene.session, process_gone=False)
        assert not scene.store.room.pending
        scene.check()
        scene.store.end_session(scene.session, process_gone=True)
        scene.run_jobs()
        assert len(scene.reserve(1, ns, session)) == 1
        scene.check()

    def test_tenants_share_by_use_down_to_an_equal_share(self) -> None:
        scene = Scene(64)
        keys = scene.fill()
        ns, session = self.other(scene)
        for i in range(3000):
            scene.tick()
            try:
                scene.put([key_of(f"other {i}")], ns=ns, session=session)
            except ResourceExhausted:
                scene.run_jobs()
            scene.run_jobs()
        owned = scene.store.segments.owned
        assert owned == {0: 32 * PAGE, 1: 32 * PAGE}
        assert len(scene.here(keys)) == 32
        scene.check()

    def test_a_tenant_that_uses_its_memory_keeps_it(self) -> None:
        scene = Scene(64)
        keys = scene.fill()
        ns, session = self.other(scene)
        for i in range(300):
            scene.tick()
            try:
                scene.put([key_of(f"other {i}")], ns=ns, session=session)
            except ResourceExhausted:
                scene.run_jobs()
            scene.store.touch(scene.tenant, keys, scene.now)
        assert len(scene.here(keys)) >= len(keys) - 1
        scene.check()

    def test_where_there_is_one_segment_tenants_take_turns(self) -> None:
        scene = Scene(4, 4)
        ns, session = self.other(scene)
        for turn in range(3):
            for space, who in ((scene.ns, scene.session), (ns, session)):
                scene.tick()
                if turn or who is session:
                    with pytest.raises(ResourceExhausted):
                        scene.reserve(1, space, who)
                    scene.run_jobs()
                assert scene.put([key_of(f"turn {turn}")], ns=space, session=who) == 1
                scene.check()

    def test_what_another_tenant_holds_is_not_taken(self) -> None:
        scene = Scene(16)
        keys = scene.fill()
        scene.acquire(keys[:1])
        scene.store.pin(scene.ns, keys[1:3], 600.0, scene.now)
        ns, session = self.other(scene)
        for i in range(12):
            scene.tick()
            try:
                scene.put([key_of(f"other {i}")], ns=ns, session=session)
            except ResourceExhausted:
                scene.run_jobs()
            scene.check()
        assert scene.here(keys)[:3] == [0, 1, 2]

    def test_a_segment_made_for_one_is_not_taken_by_who_comes_first(self) -> None:
        scene = Scene(16)
        scene.fill()
        ns, session = self.other(scene)
        with pytest.raises(ResourceExhausted):
            scene.reserve(1, ns, session)
        make, _ = scene.waiting_jobs()
        scene.store.segments.made(make[0].segment)
        scene.put([key_of("first")])
        assert len(scene.reserve(1, ns, session)) == 1
        scene.check()


class TestMaking:
    """Memory that is on its way, or that does not come."""

    def test_before_any_memory_is_there_a_reservation_waits(self) -> None:
        scene = Scene(64, ready=False)
        with pytest.raises(ResourceExhausted):
            scene.reserve(1)
        assert scene.store.room.pending
        make, _ = scene.waiting_jobs()
        assert len(make) == 64
        scene.store.segments.made(make[0].segment)
        assert len(scene.reserve(1)) == 1
        scene.check()

    def test_nothing_is_evicted_while_memory_is_being_made(self) -> None:
        scene = Scene(64, ready=False)
        make, _ = scene.waiting_jobs()
        scene.store.segments.made(make[0].segment)
        scene.put(chain("a", 1))
        assert not scene.store.evict_step(0.5, 0.1, 10)
        with pytest.raises(ResourceExhausted):
            scene.reserve(1)
        assert scene.store.counts.evicted == 0

    def test_where_memory_cannot_be_made_blocks_are_evicted_instead(self) -> None:
        scene = Scene(64, ready=False)
        make, _ = scene.waiting_jobs()
        for number in range(4):
            scene.store.segments.made(make[number].segment)
        for number in range(4, 64):
            scene.store.segments.failed(make[number].segment)
        for i in range(20):
            scene.tick()
            assert scene.put([key_of(f"block {i}")]) == 1
            for job in scene.store.take_jobs():
                assert isinstance(job, MakeSegment)
                scene.store.segments.failed(job.segment)
            scene.check()
        assert scene.store.counts.evicted == 16
        scene.put([key_of("one more")])
        asked, _ = scene.waiting_jobs()
        assert len(asked) == 1, "it is asked for again each time"
        scene.store.segments.made(asked[0].segment)
        assert not scene.store.segments.starved
        assert scene.run_jobs() == 0
        scene.check()

    def test_a_large_block_for_which_no_memory_is_made_is_refused(self) -> None:
        scene = Scene(16)
        large = scene.namespace("large", 4 * PAGE)
        for _ in range(3):
            with pytest.raises(ResourceExhausted):
                scene.reserve(1, large)
            for job in scene.waiting_jobs()[0]:
                scene.store.segments.failed(job.segment)
            scene.check()
        assert not scene.store.room.pending


class TestWatermarks:
    """Room is made ahead of need, in bounded steps."""

    def test_steps_are_bounded_and_go_on_until_the_low_mark(self) -> None:
        scene = Scene(256, 4)
        scene.fill()
        pool = scene.store.pool(scene.ns)
        steps = [pool.free]
        while scene.store.evict_step(0.9, 0.75, 10):
            steps.append(pool.free)
            scene.check()
        assert steps == [0, 10, 20, 30, 40, 50, 60]
        assert pool.free == 64

    def test_once_down_at_the_low_mark_nothing_goes_until_the_high_one(self) -> None:
        scene = Scene(256, 4)
        keys = scene.fill()
        assert scene.store.evict_step(0.9, 0.75, 10)
        scene.store.remove(scene.ns, left(scene, keys)[:60])
        assert not scene.store.evict_step(0.9, 0.75, 10)
        evicted = scene.store.counts.evicted
        scene.put([key_of(f"new {i}") for i in range(40)])
        assert scene.store.pool(scene.ns).free == 30
        assert not scene.store.evict_step(0.9, 0.75, 10)
        assert scene.store.counts.evicted == evicted

    def test_nothing_goes_below_the_high_mark(self) -> None:
        scene = Scene(256, 4)
        keys = scene.fill()
        scene.store.remove(scene.ns, keys[:30])
        assert not scene.store.evict_step(0.9, 0.5, 100)
        assert scene.store.counts.evicted == 1
        assert not scene.store.evict_step(0.85, 0.5, 10) or scene.store.counts.evicted == 11

    def test_nothing_goes_while_there_is_memory_that_nobody_owns(self) -> None:
        scene = Scene(256, 4)
        scene.put(chain("a", 8))
        assert not scene.store.evict_step(0.5, 0.1, 10)
        assert scene.store.counts.evicted == 0

    def test_a_pool_of_held_blocks_ends_the_step(self) -> None:
        scene = Scene(64)
        keys = scene.fill()
        scene.store.pin(scene.ns, keys, 60.0, scene.now)
        scene.store.evict_step(0.9, 0.5, 10)
        assert not scene.store.evict_step(0.9, 0.5, 10)
        assert len(scene.here(keys)) == len(keys)

    def test_every_pool_is_looked_after(self) -> None:
        scene = Scene(64, 2)
        small, large = scene.ns, scene.namespace("two", 2 * PAGE)
        for i in range(24):
            scene.tick()
            scene.put([key_of(f"small {i}"), key_of(f"small {i} b")], ns=small)
            scene.put([key_of(f"large {i}")], ns=large)
        pools = [scene.store.pool(ns) for ns in (small, large)]
        while scene.store.evict_step(0.8, 0.5, 4):
            pass
        for pool in pools:
            # Half of what it had when its turn came; segments may have moved to it meanwhile.
            assert pool.free >= int(pool.slots * 0.4)
        scene.check()


def test_blocks_larger_than_a_segment_take_colder_ones_apart_and_do_not_live_of_their_own_last_one() -> None:
    """Ten blocks of 2 MiB among older ones of 16 KiB left one of them, beside 62 colder segments."""
    scene = Scene(slots=32, in_segment=1)
    large = scene.namespace("large", 2 * PAGE)
    small = scene.fill()
    keys = [key_of(f"large {i}") for i in range(8)]
    for key in keys:
        scene.tick()
        with contextlib.suppress(ResourceExhausted):
            scene.put([key], ns=large)
        scene.run_jobs()  # for which a client is made to wait
        if not scene.present(key, large):
            scene.put([key], ns=large)
        scene.check()
    assert scene.here(keys, large) == list(range(8))
    assert len(scene.here(small)) == 32 - 2 * 8
