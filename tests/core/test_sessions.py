"""How sessions end, what becomes of what they held, and how a process attaches again."""

from collections.abc import Callable

import pytest

from kvstore.core import holds
from kvstore.core.holds import INFINITY
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument
from tests.core.scene import Scene, chain, key_of

STORED = int(pb.STORED)


class TestSessions:
    """A session ends with its socket; its slots are reused when its process is gone."""

    def test_what_a_live_process_may_write_to_is_quarantined(self) -> None:
        scene = Scene(4)
        writer = scene.open()
        (ref,) = scene.reserve(1, session=writer)
        scene.store.end_session(writer, process_gone=False)
        pool = scene.store.pool(scene.ns)
        assert (pool.granted, pool.quarantined) == (0, 1)
        scene.check()
        for i in range(20):
            scene.tick()
            refs = scene.reserve(1)
            assert ref not in refs
            scene.commit([key_of(str(i))], refs)
        assert scene.store.sessions[writer.id] is writer
        scene.store.end_session(writer, process_gone=True)
        assert writer.id not in scene.store.sessions
        assert (pool.quarantined, scene.tenant.held_bytes) == (0, 0)
        scene.check()

    def test_views_of_a_live_process_keep_their_blocks(self) -> None:
        scene = Scene(8)
        keys = scene.fill()
        reader = scene.open()
        scene.acquire(keys[:1], session=reader)
        scene.store.end_session(reader, process_gone=False)
        for i in range(20):
            scene.tick()
            scene.put([key_of(f"new {i}")])
        assert scene.here(keys) == [0]
        scene.store.end_session(reader, process_gone=True)
        assert scene.store.pool(scene.ns).leased == 0
        scene.check()

    def test_the_death_of_a_process_ends_everything_at_once(self) -> None:
        scene = Scene(64)
        keys = chain("a", 4)
        scene.put(keys)
        client = scene.open()
        scene.acquire(keys, session=client)
        scene.reserve(4, session=client)
        scene.store.remove(scene.ns, keys[:1])
        scene.store.end_session(client, process_gone=True)
        pool = scene.store.pool(scene.ns)
        assert (pool.granted, pool.quarantined, pool.leased, pool.doomed) == (0, 0, 0, 0)
        assert scene.tenant.held_bytes == 0
        scene.check()

    def test_an_end_told_twice_is_one(self) -> None:
        scene = Scene(64)
        client = scene.open()
        scene.reserve(2, session=client)
        for gone in (False, False, True, True, False):
            scene.store.end_session(client, process_gone=gone)
            scene.check()
        assert scene.store.counts.sessions_ended == 1

    def test_an_ended_session_can_ask_for_nothing(self) -> None:
        scene = Scene(64)
        scene.put(chain("a", 1))
        client = scene.open()
        refs = scene.reserve(1, session=client)
        leased = scene.acquire(chain("a", 1), session=client)
        scene.store.end_session(client, process_gone=False)
        calls: list[Callable[[], object]] = [
            lambda: scene.reserve(1, session=client),
            lambda: scene.commit(chain("b", 1), refs, session=client),
            lambda: scene.store.abort(client, refs),
            lambda: scene.acquire(chain("a", 1), session=client),
            lambda: scene.store.release(client, leased),
        ]
        for call in calls:
            with pytest.raises(FailedPrecondition, match="has ended"):
                call()
        assert scene.store.top_up(client, scene.ns, 1) == []
        scene.check()

    def test_reservations_of_callers_without_shared_memory_expire(self) -> None:
        scene = Scene(64)
        remote = scene.open(local=False)
        early = scene.store.reserve(remote, scene.ns, 1, scene.now, scene.now + 10)
        late = scene.store.reserve(remote, scene.ns, 1, scene.now, scene.now + 20)
        scene.reserve(1)
        scene.store.expire(scene.tick(10))
        assert list(remote.granted) == late
        with pytest.raises(FailedPrecondition, match="expired"):
            scene.commit(chain("a", 1), early, session=remote)
        scene.check()
        scene.store.expire(scene.tick(1e6))
        assert not remote.granted
        assert len(scene.session.granted) == 1, "no clock ends what a live process may write to"
        assert scene.store.counts.reservations_expired == 2
        scene.check()


class TestResume:
    """A process attaches again and says what it still uses."""

    def old(self, scene: Scene) -> tuple[holds.Session, list[int], list[int]]:
        keys = chain("a", 4)
        scene.put(keys)
        client = scene.open()
        leased = scene.acquire(keys, session=client)
        scene.acquire(keys[:1], session=client)
        granted = scene.reserve(3, session=client)
        scene.store.remove(scene.ns, keys[3:])
        return client, leased, granted

    @pytest.mark.parametrize("ended", [False, True])
    def test_what_is_named_stays_and_the_rest_is_free(self, ended: bool) -> None:
        scene = Scene(64)
        old, leased, granted = self.old(scene)
        if ended:
            scene.store.end_session(old, process_gone=False)
        heir = scene.open()
        scene.store.resume(old, heir, [leased[0], leased[0], leased[3]], granted[1:2])
        assert heir.leased == {leased[0]: 2, leased[3]: 1}
        assert heir.granted == {granted[1]: INFINITY}
        pool = scene.store.pool(scene.ns)
        assert (pool.leased, pool.doomed, pool.granted, pool.quarantined) == (2, 1, 1, 0)
        assert old.id not in scene.store.sessions
        assert heir.id in scene.store.segments.live[leased[0] >> 32].sessions
        scene.check()
        assert scene.commit(chain("b", 1), granted[1:2], session=heir) == [STORED]
        scene.store.release(heir, [leased[0], leased[3], leased[0]])
        assert scene.tenant.held_bytes == 0
        scene.check()

    def test_one_process_takes_over_two_sessions(self) -> None:
        scene = Scene(64)
        keys = chain("a", 2)
        scene.put(keys)
        first, second, heir = scene.open(), scene.open(), scene.open()
        refs = scene.acquire(keys, session=first)
        scene.acquire(keys, session=second)
        scene.store.resume(first, heir, refs, [])
        scene.store.resume(second, heir, refs[:1], [])
        assert heir.leased == {refs[0]: 2, refs[1]: 1}
        scene.check()

    def test_a_lease_that_was_never_there_is_refused_and_nothing_changes(self) -> None:
        scene = Scene(64)
        old, leased, granted = self.old(scene)
        for wrong in ([leased[0]] * 3, [granted[0]], [1 << 50]):
            with pytest.raises(InvalidArgument):
                scene.store.resume(old, scene.open(), wrong, granted)
        assert not old.ended
        assert len(old.granted) == 3
        scene.check()

    def test_a_slot_committed_by_a_call_whose_answer_was_lost_is_passed_over(self) -> None:
        scene = Scene(64)
        old, _, granted = self.old(scene)
        scene.commit(chain("b", 1), granted[:1], session=old)
        heir = scene.open()
        scene.store.resume(old, heir, [], granted)
        assert list(heir.granted) == granted[1:]
        assert scene.here(chain("b", 1)) == [0]
        with pytest.raises(FailedPrecondition):
            scene.commit(chain("c", 1), granted[:1], session=heir)
        scene.check()

    def test_only_a_session_of_the_same_tenant_that_may_hold_is_an_heir(self) -> None:
        scene = Scene(64)
        old, leased, granted = self.old(scene)
        for heir in (scene.open(scene.store.tenant("other")), scene.open(read_only=True)):
            with pytest.raises(FailedPrecondition):
                scene.store.resume(old, heir, leased, granted)
        scene.store.end_session(old, process_gone=True)
        with pytest.raises(FailedPrecondition, match="no such session"):
            scene.store.resume(old, scene.open(), [], [])
        scene.check()

    def test_segments_that_the_process_may_have_mapped_stay_counted(self) -> None:
        scene = Scene(64)
        old, leased, _ = self.old(scene)
        scene.mapped(old, leased)
        heir = scene.open()
        scene.store.resume(old, heir, leased[:1], [])
        assert scene.store.segments.live[leased[0] >> 32].sessions == {heir.id}
        scene.check()
