"""How much one session, all sessions, and what is granted ahead may hold."""

import pytest

from kvstore.core import holds, refusals
from kvstore.core.holds import HOLDS_MAX, Session
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from tests.core.scene import PAGE, Scene, chain, key_of


@pytest.mark.parametrize(
    ("slab_pages", "block_pages", "expected"),
    [(2048, 1, 16), (1024, 1, 16), (512, 1, 8), (2048, 4, 8), (2048, 33, 0), (64, 1, 1), (64, 2, 0)],
)
def test_granted_ahead_are_16_slots_or_a_64th_of_the_memory(slab_pages: int, block_pages: int, expected: int) -> None:
    scene = Scene(slab_pages, slab_pages // 64)
    ns = scene.namespace("sized", block_pages * PAGE)
    assert scene.store.grant_max(scene.store.pool(ns)) == expected
    refs = scene.store.top_up(scene.session, ns, 100)
    assert len(refs) == expected
    assert scene.store.top_up(scene.session, ns, 100) == [], "no more while these are held"
    scene.check()


def test_what_is_granted_ahead_counts_for_each_block_size_alone() -> None:
    scene = Scene(2048, 32)
    other = scene.namespace("two pages", 2 * PAGE)
    assert len(scene.store.top_up(scene.session, scene.ns, 16)) == 16
    assert len(scene.store.top_up(scene.session, other, 16)) == 16


def test_reserved_slots_count_as_granted_ahead() -> None:
    scene = Scene(2048, 32)
    scene.reserve(10)
    assert len(scene.store.top_up(scene.session, scene.ns, 16)) == 6


def test_a_session_holds_at_most_a_quarter_of_the_slots() -> None:
    scene = Scene(64)
    assert len(scene.reserve(64)) == 16
    with pytest.raises(ResourceExhausted, match="of at most 65536"):
        scene.reserve(1)
    assert scene.store.top_up(scene.session, scene.ns, 16) == []
    assert scene.store.counts.exhausted == 1
    scene.check()


def test_leases_and_grants_share_the_quarter() -> None:
    scene = Scene(64)
    keys = chain("a", 12)
    scene.put(keys)
    scene.reserve(8)
    with pytest.raises(ResourceExhausted):
        scene.acquire(keys)
    assert not scene.session.leased, "all of the run or nothing"
    assert len(scene.acquire(keys[:8])) == 8
    assert len(scene.acquire(keys[:8])) == 8, "slots held already are no new ones"
    with pytest.raises(ResourceExhausted):
        scene.reserve(1)
    scene.check()


def test_all_sessions_hold_at_most_three_quarters() -> None:
    scene = Scene(64)
    sessions = [scene.open() for _ in range(4)]
    for session in sessions[:3]:
        assert len(scene.reserve(64, session=session)) == 16
    with pytest.raises(ResourceExhausted, match="hold 196608 of at most 196608"):
        scene.reserve(1, session=sessions[3])
    scene.store.abort(sessions[0], list(sessions[0].granted)[:3])
    assert len(scene.reserve(64, session=sessions[3])) == 3
    scene.check()


def test_leases_count_for_all_sessions_too() -> None:
    scene = Scene(64)
    keys = chain("a", 40)
    scene.put(keys)
    for part in range(2):
        scene.acquire(keys[part * 16 : part * 16 + 16], session=scene.open())
    scene.reserve(16, session=scene.open())
    with pytest.raises(ResourceExhausted):
        scene.acquire(keys[32:33], session=scene.open())
    scene.check()


def test_a_lease_of_what_others_lease_adds_nothing_to_what_all_hold() -> None:
    scene = Scene(64)
    keys = chain("a", 16)
    scene.put(keys)
    readers = [scene.open() for _ in range(20)]
    for reader in readers:
        assert len(scene.acquire(keys, session=reader)) == 16
    assert scene.tenant.held_bytes == 16 * PAGE
    for reader in readers:
        scene.store.release(reader, list(reader.leased))
    assert scene.tenant.held_bytes == 0
    scene.check()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_in_a_tiny_slab_one_slot_is_always_allowed(slots: int) -> None:
    scene = Scene(slots)
    other = scene.open()
    for i in range(5):
        assert scene.put([key_of(f"block {i}")]) == 1
        assert scene.acquire([key_of(f"block {i}")], session=other) != []
        scene.store.release(other, list(other.leased))
    refs = scene.reserve(8)
    assert len(refs) == 1
    with pytest.raises(ResourceExhausted):
        scene.reserve(1)
    scene.check()


def test_two_sessions_hold_one_slot_each_where_three_quarters_have_room() -> None:
    scene = Scene(3)
    other = scene.open()
    assert len(scene.reserve(1)) == len(scene.reserve(1, session=other)) == 1
    with pytest.raises(ResourceExhausted):
        scene.reserve(1, session=scene.open())


def test_a_block_larger_than_a_quarter_can_be_stored_and_leased() -> None:
    scene = Scene(64)
    large = scene.namespace("large", 40 * PAGE)
    with pytest.raises(ResourceExhausted):
        scene.reserve(1, large)
    assert scene.store.room.pending
    scene.run_jobs()
    key = key_of("large")
    assert scene.put([key], ns=large) == 1
    assert len(scene.acquire([key], ns=large)) == 1
    scene.check()


def test_limits_follow_what_other_tenants_own() -> None:
    scene = Scene(64)
    other = scene.store.tenant("other")
    ns, session = scene.namespace("ns", tenant=other), scene.open(other)
    for i in range(32):
        scene.put([key_of(f"block {i}")], ns=ns, session=session)
    assert scene.store.segments.tenant_bytes(scene.tenant.id) == 32 * PAGE
    assert len(scene.reserve(64)) == 8
    scene.check()


def test_holds_on_one_slot_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The column of leases has 32 bits, and a session may hold a block as often as it likes."""
    assert HOLDS_MAX * holds.SESSIONS_MAX < 1 << 32
    monkeypatch.setattr(holds, "HOLDS_MAX", 10)
    scene = Scene(64)
    keys = chain("a", 2)
    scene.put(keys)
    for _ in range(5):
        scene.acquire(keys)
    with pytest.raises(ResourceExhausted, match="10 leases and 0 slots granted, and asks for 2 more; at most 10"):
        scene.acquire(keys)
    scene.store.release(scene.session, list(scene.session.leased))
    assert len(scene.acquire(keys)) == 2
    scene.check()


def test_a_refusal_names_what_was_asked_for_beside_what_is_held() -> None:
    """It spoke of one slot, for which there was room: "holds 0 bytes of at most 65536; no room for a slot of 4096"."""
    scene = Scene(64)
    keys = chain("a", 20)
    scene.put(keys)
    with pytest.raises(ResourceExhausted, match=f"holds 0 bytes of at most {16 * PAGE}, .*no room for 20 of {PAGE} "):
        scene.acquire(keys)
    assert len(scene.acquire(keys[:16])) == 16
    with pytest.raises(ResourceExhausted, match=f"holds {16 * PAGE} bytes of .*no room for 4 of {PAGE} bytes more"):
        scene.acquire(keys)


@pytest.mark.parametrize("pending", [True, False])
def test_who_waits_for_memory_that_comes_is_not_asked_to_release_any(pending: bool) -> None:
    scene = Scene(64)
    scene.put(chain("a", 1))
    (pool,) = scene.store.segments.pools.values()
    said = refusals.no_slot(pool, scene.store.segments, pending=pending)
    assert ("try again" in said, "release or unpin" in said) == (pending, not pending)


@pytest.mark.parametrize("count", [0, -1, 65])
def test_a_reservation_is_of_1_to_64_slots(count: int) -> None:
    with pytest.raises(InvalidArgument, match="not between 1 and 64"):
        Scene(64).reserve(count)


def test_a_read_only_session_holds_nothing() -> None:
    scene = Scene(64)
    reader = scene.open(read_only=True)
    scene.put(chain("a", 2))
    with pytest.raises(FailedPrecondition, match="read-only"):
        scene.reserve(1, session=reader)
    with pytest.raises(FailedPrecondition, match="read-only"):
        scene.acquire(chain("a", 2), session=reader)
    assert scene.store.top_up(reader, scene.ns, 1) == []


def test_callers_without_shared_memory_get_nothing_ahead() -> None:
    """What is granted ahead never expires, and only a live process that can be watched gives it back."""
    scene = Scene(2048, 32)
    assert scene.store.top_up(scene.open(local=False), scene.ns, 16) == []


class TestRecall:
    """Memory is short: what was granted ahead is asked back."""

    def held(self, scene: Scene, count: int = 16) -> list[Session]:
        sessions = [scene.open() for _ in range(count)]
        for session in sessions:
            scene.store.top_up(session, scene.ns, 16)
        return sessions

    def test_whoever_holds_grants_is_asked_when_no_slot_can_be_freed(self) -> None:
        scene = Scene(64)
        sessions = self.held(scene)
        keys = chain("a", 48)
        scene.put(keys)
        scene.store.pin(scene.ns, keys, 60.0, scene.now)
        with pytest.raises(ResourceExhausted, match="16 slots granted"):
            scene.reserve(1)
        assert all(session.recall for session in sessions)
        assert not scene.session.recall, "it holds nothing"
        scene.check()
        scene.store.abort(sessions[0], list(sessions[0].granted))
        assert not sessions[0].recall
        assert len(scene.reserve(1)) == 1

    def test_nothing_more_is_granted_ahead_until_all_has_come_back(self) -> None:
        scene = Scene(2048, 32)
        ahead = scene.store.top_up(scene.session, scene.ns, 16)
        scene.session.recall = True
        scene.store.abort(scene.session, ahead[:8])
        assert scene.store.top_up(scene.session, scene.ns, 16) == []
        scene.commit(chain("a", 8), ahead[8:])
        assert not scene.session.recall, "committed, they are not the session's any more"
        assert len(scene.store.top_up(scene.session, scene.ns, 16)) == 16
        scene.check()

    def test_a_session_at_its_own_limit_asks_nobody_else(self) -> None:
        scene = Scene(64)
        (other,) = self.held(scene, 1)
        scene.reserve(16)
        with pytest.raises(ResourceExhausted):
            scene.reserve(1)
        assert scene.session.recall
        assert not other.recall

    def test_a_tenant_at_its_limit_asks_its_own_sessions(self) -> None:
        scene = Scene(64)
        for _ in range(3):
            scene.reserve(16, session=scene.open())
        elsewhere = scene.store.tenant("other")
        stranger = scene.open(elsewhere)
        ns = scene.namespace("ns", tenant=elsewhere)
        scene.store.reserve(stranger, ns, 1, scene.now)
        with pytest.raises(ResourceExhausted):
            scene.reserve(1)
        assert [session.recall for session in scene.store.sessions.values()] == [False, True, True, True, False]
