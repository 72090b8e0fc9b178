"""Calls of the store: what they promise, what they refuse, and that refusing changes nothing."""

from collections.abc import Callable

import pytest

from kvstore.core import holds
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from tests.core.scene import PAGE, Scene, chain, key_of

STORED, EXISTS, REJECTED = int(pb.STORED), int(pb.EXISTS), int(pb.REJECTED)


class TestNames:
    """Tenants, namespaces, sessions."""

    def test_a_namespace_is_found_again_by_its_digest(self) -> None:
        scene = Scene(64)
        assert scene.namespace() is scene.ns
        assert scene.store.namespace(scene.tenant, scene.ns.id) is scene.ns
        with pytest.raises(FailedPrecondition, match="has blocks of 4096 bytes, not 100"):
            scene.namespace("ns", 100)
        with pytest.raises(InvalidArgument, match="32 bytes, not 3"):
            scene.store.open_namespace(scene.tenant, b"abc", PAGE, "short")

    @pytest.mark.parametrize("number", [0, -1, 2, 3, 1 << 31])
    def test_a_namespace_of_another_tenant_or_of_nobody_is_not_open(self, number: int) -> None:
        scene = Scene(64)
        scene.namespace("ns", tenant=scene.store.tenant("other"))
        with pytest.raises(FailedPrecondition, match="open it first"):
            scene.store.namespace(scene.tenant, number)

    def test_keys_of_one_namespace_or_tenant_are_not_there_in_another(self) -> None:
        """Even if a client computes the same key for both."""
        scene = Scene(64)
        other = scene.store.tenant("other")
        elsewhere, session = scene.namespace("ns", tenant=other), scene.open(other)
        sibling = scene.namespace("sibling")
        keys = chain("a", 3)
        scene.put(keys)
        assert scene.here(keys, sibling) == scene.here(keys, elsewhere) == []
        assert scene.acquire(keys, elsewhere, session) == scene.acquire(keys, sibling) == []
        assert scene.store.remove(sibling, keys) == scene.store.remove(elsewhere, keys) == 0
        assert scene.store.pin(sibling, keys, 10.0, scene.now) == 0
        scene.store.pin(scene.ns, keys, 10.0, scene.now)
        assert scene.store.unpin(sibling, keys) == 0
        assert scene.put(keys, ns=elsewhere, session=session) == 3
        scene.check()

    def test_there_is_an_end_to_tenants_namespaces_and_sessions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scene = Scene(64)
        for limit in ("TENANTS_MAX", "NAMESPACES_MAX", "SESSIONS_MAX"):
            monkeypatch.setattr(holds, limit, 2)
        calls: list[Callable[[int], object]] = [
            lambda i: scene.store.tenant(f"tenant {i}"),
            lambda i: scene.namespace(f"ns {i}"),
            lambda i: scene.open(),
        ]
        for call in calls:
            call(0)
            with pytest.raises(ResourceExhausted):
                call(1)
        assert scene.store.tenant("tenant 0").id == 1
        scene.check()


class TestCommit:
    """A block becomes visible in one step, once."""

    def test_the_first_commit_wins_and_the_second_keeps_its_slot(self) -> None:
        scene = Scene(64)
        other = scene.open()
        keys = chain("a", 1)
        (mine,), (theirs,) = scene.reserve(1), scene.reserve(1, session=other)
        assert scene.commit(keys, [mine]) == [STORED]
        assert scene.commit(keys, [theirs], session=other) == [EXISTS]
        assert list(other.granted) == [theirs]
        assert scene.index.published[scene.tenant.id, keys[0]][0] == mine
        assert scene.commit([key_of("b")], [theirs], session=other) == [STORED]
        scene.check()

    def test_when_the_first_writer_dies_the_second_commits(self) -> None:
        scene = Scene(64)
        first, second = scene.open(), scene.open()
        keys = chain("a", 1)
        (lost,) = scene.reserve(1, session=first)
        refs = scene.reserve(1, session=second)
        scene.store.end_session(first, process_gone=True)
        assert scene.commit(keys, refs, session=second) == [STORED]
        assert scene.store.segments.live[lost >> 32].held == 0
        scene.check()

    def test_a_key_twice_in_one_commit_is_stored_once(self) -> None:
        scene = Scene(64)
        key = key_of("a")
        refs = scene.reserve(2)
        results = scene.store.commit(scene.session, scene.ns, [key, key], refs, [b"", b""], [0, 0], scene.now)
        assert results == [STORED, EXISTS]
        assert list(scene.session.granted) == refs[1:]
        scene.check()

    def test_a_key_that_another_namespace_has_is_rejected(self) -> None:
        scene = Scene(64)
        sibling = scene.namespace("sibling")
        scene.put(chain("a", 1))
        assert scene.commit(chain("a", 1), scene.reserve(1), ns=sibling) == [REJECTED]
        assert len(scene.session.granted) == 1
        assert (scene.store.counts.stored, scene.store.counts.rejected) == (1, 1)
        scene.check()

    def test_what_exists_counts_as_used(self) -> None:
        scene = Scene(8)
        keys = scene.fill()
        scene.tick()
        refs = scene.reserve(1)
        assert scene.commit(keys[1:2], refs) == [EXISTS]
        scene.store.abort(scene.session, refs)
        for i in range(6):
            scene.tick()
            scene.put([key_of(f"new {i}")])
        assert scene.present(keys[1])
        scene.check()

    def test_published_is_where_the_slot_lies(self) -> None:
        scene = Scene(64, 8)
        odd = scene.namespace("odd", PAGE + 1)
        keys = chain("a", 4)
        scene.put(keys, ns=odd)
        places = [scene.index.published[scene.tenant.id, key] for key in keys]
        assert [place[1] for place in places] == [0, 2 * PAGE, 4 * PAGE, 6 * PAGE]
        assert {place[2] for place in places} == {PAGE + 1}
        assert {place[3] for place in places} == {odd.id}

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"keys": [b"short"]}, InvalidArgument),
            ({"keys": [bytes(32)]}, InvalidArgument),
            ({"keys": [key_of("a"), key_of("b")]}, InvalidArgument),
            ({"parents": [b"short"]}, InvalidArgument),
            ({"parents": [key_of("a")]}, InvalidArgument),
            ({"parents": []}, InvalidArgument),
            ({"depths": []}, InvalidArgument),
            ({"refs": [5 << 32]}, FailedPrecondition),
            ({"refs": [1 << 63]}, FailedPrecondition),
            ({"ttl_s": -1.0}, InvalidArgument),
            ({"ttl_s": float("inf")}, InvalidArgument),
            ({"ttl_s": float("nan")}, InvalidArgument),
        ],
    )
    def test_a_commit_that_is_wrong_changes_nothing(self, change: dict[str, object], error: type[Exception]) -> None:
        scene = Scene(64)
        refs = scene.reserve(1)
        call = {"keys": [key_of("a")], "refs": refs, "parents": [b""], "depths": [0], "now": scene.now, "ttl_s": 0.0}
        with pytest.raises(error):
            scene.store.commit(scene.session, scene.ns, **{**call, **change})  # type: ignore[arg-type]
        assert list(scene.session.granted) == refs
        assert not scene.index.published
        scene.check()

    def test_a_slot_named_twice_or_of_another_size_is_refused(self) -> None:
        scene = Scene(64, 8)
        large = scene.namespace("large", 2 * PAGE)
        (ref,) = scene.reserve(1)
        for ns, refs, keys in ((scene.ns, [ref, ref], chain("a", 2)), (large, [ref], chain("a", 1))):
            with pytest.raises(InvalidArgument):
                scene.commit(keys, refs, ns=ns)
        scene.check()

    def test_slots_of_another_session_are_refused(self) -> None:
        scene = Scene(64)
        refs = scene.reserve(1, session=scene.open())
        with pytest.raises(FailedPrecondition, match="not granted to this session"):
            scene.commit(chain("a", 1), refs)
        with pytest.raises(InvalidArgument):
            scene.store.abort(scene.session, refs)
        scene.check()

    def test_an_abort_names_each_slot_once(self) -> None:
        scene = Scene(64)
        refs = scene.reserve(2)
        with pytest.raises(InvalidArgument):
            scene.store.abort(scene.session, [refs[0], refs[0]])
        scene.store.abort(scene.session, refs)
        assert scene.tenant.held_bytes == 0
        with pytest.raises(InvalidArgument):
            scene.store.abort(scene.session, refs)
        scene.check()


class TestReading:
    """Probes pin nothing; leases do."""

    def test_a_match_is_the_leading_run(self) -> None:
        scene = Scene(64)
        keys = chain("a", 6)
        scene.put(keys)
        scene.store.remove(scene.ns, keys[3:4])
        assert len(scene.store.match(scene.ns, keys)) == 3
        assert len(scene.acquire(keys)) == 3
        assert scene.store.match(scene.ns, []) == []
        assert scene.acquire([key_of("absent")]) == []

    def test_probes_do_not_keep_blocks_from_eviction(self) -> None:
        """Asking for all keys all the time, eviction still reaches the low mark; what is leased survives."""
        scene = Scene(256, 4)
        keys = scene.fill()
        scene.acquire(keys[:20])
        pool = scene.store.pool(scene.ns)
        while True:
            for key in keys:
                scene.store.match(scene.ns, [key])
            if not scene.store.evict_step(0.9, 0.5, 16):
                break
        assert pool.free == 128
        assert scene.here(keys)[:20] == list(range(20))
        scene.check()
        scene.tick()
        assert scene.put(chain("new", 100)) == 100

    def test_a_leased_block_is_never_evicted(self) -> None:
        scene = Scene(8)
        keys = scene.fill()
        scene.acquire(keys[:1])
        for i in range(20):
            scene.tick()
            scene.put([key_of(f"new {i}")])
            scene.check()
        assert scene.here(keys) == [0]
        scene.store.release(scene.session, list(scene.session.leased))
        for i in range(8):
            scene.tick()
            scene.put([key_of(f"newer {i}")])
        assert scene.here(keys) == []
        scene.check()

    def test_a_removed_block_vanishes_at_once_and_its_slot_with_its_last_lease(self) -> None:
        scene = Scene(64)
        keys = chain("a", 3)
        scene.put(keys)
        other = scene.open()
        (ref,) = scene.acquire(keys[:1])
        assert scene.acquire(keys[:1], session=other) == [ref]
        assert scene.store.remove(scene.ns, keys) == 3
        assert scene.here(keys) == []
        pool = scene.store.pool(scene.ns)
        assert (pool.doomed, pool.blocks, pool.leased) == (1, 0, 1)
        scene.check()
        assert scene.put(keys[:1]) == 1
        assert scene.acquire(keys[:1]) != [ref]
        scene.store.release(scene.session, [ref])
        assert pool.doomed == 1
        scene.store.end_session(other, process_gone=True)
        assert pool.doomed == 0
        scene.check()

    def test_a_pin_outlasts_a_lease_and_a_lease_a_pin(self) -> None:
        scene = Scene(8)
        keys = scene.fill()
        for first in ("lease", "pin"):
            scene.acquire(keys[:1])
            scene.store.pin(scene.ns, keys[:1], 60.0, scene.now)
            if first == "lease":
                scene.store.release(scene.session, list(scene.session.leased))
            else:
                scene.store.unpin(scene.ns, keys[:1])
            scene.check()
            for i in range(10):
                scene.tick(0.01)
                scene.put([key_of(f"{first} {i}")])
            assert scene.present(keys[0])
            scene.store.release(scene.session, list(scene.session.leased))
            scene.store.unpin(scene.ns, keys[:1])
            scene.check()

    def test_each_hold_is_released_once(self) -> None:
        scene = Scene(64)
        keys = chain("a", 2)
        scene.put(keys)
        refs = scene.acquire(keys) + scene.acquire(keys) + scene.acquire([keys[0], keys[0]])
        assert scene.session.leased == {refs[0]: 4, refs[1]: 2}
        with pytest.raises(InvalidArgument, match="not leased 5 times"):
            scene.store.release(scene.session, [refs[0]] * 5)
        with pytest.raises(InvalidArgument):
            scene.store.release(scene.open(), refs[:1])
        scene.store.release(scene.session, [refs[0]] * 3)
        scene.check()
        scene.store.release(scene.session, [refs[1], refs[0], refs[1]])
        assert scene.session.held_bytes == scene.tenant.held_bytes == 0
        scene.check()


class TestExhausted:
    """Nothing can be had: said at once, and nothing is left behind."""

    @pytest.mark.parametrize("how", ["pinned", "leased", "granted"])
    def test_where_all_is_held_a_put_is_refused_and_works_after_letting_go(self, how: str) -> None:
        scene = Scene(4)
        others = [scene.open() for _ in range(4)]
        keys = chain("a", 4)
        if how != "granted":
            scene.put(keys)
        if how == "pinned":
            scene.store.pin(scene.ns, keys, 60.0, scene.now)
        for key, other in zip(keys[:3], others, strict=False):
            if how == "leased":
                scene.acquire([key], session=other)
            elif how == "granted":
                scene.reserve(1, session=other)
        if how == "leased":
            scene.store.pin(scene.ns, keys[3:], 60.0, scene.now)
        held = scene.tenant.held_bytes
        for _ in range(3):
            with pytest.raises(ResourceExhausted):
                scene.reserve(1)
            assert scene.store.top_up(scene.session, scene.ns, 1) == []
            assert not scene.store.room.pending
            assert (scene.tenant.held_bytes, scene.session.held_bytes) == (held, 0)
            scene.check()
        assert scene.store.counts.exhausted == 3
        scene.store.unpin(scene.ns, keys)
        for other in others:
            scene.store.release(other, list(other.leased))
            scene.store.abort(other, list(other.granted))
        assert scene.put([key_of("new")]) == 1
        scene.check()

    def test_the_message_says_who_holds_what(self) -> None:
        scene = Scene(8)
        keys = scene.fill()
        scene.store.pin(scene.ns, keys[1:], 60.0, scene.now)
        scene.reserve(1, session=scene.open())
        with pytest.raises(ResourceExhausted, match="0 blocks leased, 7 pinned, 1 slots granted, 0 quarantined of 8"):
            scene.reserve(1, session=scene.open())


class TestManagement:
    """Removing, clearing, pinning."""

    def test_a_clear_takes_one_namespace_and_leaves_the_others(self) -> None:
        scene = Scene(64)
        sibling = scene.namespace("sibling")
        scene.put(chain("a", 10))
        scene.put(chain("b", 10), ns=sibling)
        scene.acquire(chain("a", 2))
        at: int | None = 0
        steps = 0
        while at is not None:
            at = scene.store.clear_step(scene.ns, at, 100)
            steps += 1
            scene.check()
        assert steps == 11
        assert scene.here(chain("a", 10)) == []
        assert scene.here(chain("b", 10), sibling) == list(range(10))
        assert scene.store.counts.removed == 10
        assert (scene.ns.blocks, sibling.blocks) == (0, 10)

    @pytest.mark.parametrize("ttl_s", [0.0, -1.0, 31 * 86400.0, float("nan"), float("inf")])
    def test_a_pin_lasts_above_0_and_at_most_30_days(self, ttl_s: float) -> None:
        scene = Scene(64)
        with pytest.raises(InvalidArgument, match="30 days"):
            scene.store.pin(scene.ns, [], ttl_s, scene.now)

    def test_only_what_is_there_is_pinned_or_removed(self) -> None:
        scene = Scene(64)
        keys = chain("a", 4)
        scene.put(keys[:2])
        assert scene.store.pin(scene.ns, keys, 60.0, scene.now) == 2
        assert scene.store.unpin(scene.ns, keys[1:]) == 1
        assert scene.store.unpin(scene.ns, keys) == 1
        assert scene.store.remove(scene.ns, keys) == 2
        scene.store.touch(scene.tenant, keys, scene.now)
        scene.check()
