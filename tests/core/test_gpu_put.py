"""A put on a device: its event, its visibility, and what becomes of its slots when that never comes."""

import pytest

from kvstore.core import gpu_commits
from kvstore.core.gpu_jobs import AwaitQuiet, StopWatching, WatchEvent
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from kvstored.v1.kvstore_pb2 import EXISTS, STORED
from kvstored.v1.shm import GPU, HOST
from tests.core.gpu_scene import PAGE, Client, Event, GpuNode
from tests.core.scene import chain, key_of


@pytest.fixture
def node() -> GpuNode:
    return GpuNode()


@pytest.fixture
def client(node: GpuNode) -> Client:
    """Of a device that has memory already."""
    made = node.client()
    with pytest.raises(ResourceExhausted, match="memory is being made ready"):
        node.reserve(made, 1)
    node.gpu.run()
    return made


def test_a_block_goes_up_and_down_and_up_again(node: GpuNode, client: Client) -> None:
    """The life of one: put, event, visible, copied to memory, evicted from the device, found, brought back."""
    keys = chain("a", 3)
    event = node.put_on(keys, client)
    node.check()
    assert not any(node.gpu.has(key) or node.tiers(key) for key in keys)
    node.gpu.complete(event)
    for job in node.gpu.take():
        assert isinstance(job, WatchEvent)
        node.gpu.end(job)
    node.check()
    assert [node.tiers(key) for key in keys] == [GPU] * 3
    assert all(map(node.gpu.has, keys))
    assert node.commits[0].results == [STORED] * 3
    node.gpu.run()
    node.check()
    assert [node.tiers(key) for key in keys] == [GPU | HOST] * 3
    assert node.gpu.evict(3) == 3
    node.check()
    assert [node.tiers(key) for key in keys] == [HOST] * 3
    assert node.gpu.pool.counts.evicted_only == 0
    ticket = node.prefetch_to(keys)
    node.gpu.run()
    node.check()
    assert (ticket.state, ticket.copied, node.gpu.pool.tickets.blocks_now(ticket)) == ("done", 3, 3)
    assert [node.tiers(key) for key in keys] == [GPU | HOST] * 3


def test_memory_is_made_when_it_is_needed_and_out_of_memory_is_a_state(node: GpuNode) -> None:
    client, device = node.client(), node.gpu
    with pytest.raises(ResourceExhausted):
        node.reserve(client, 1)
    (job,) = device.take()
    device.end(job, "out of memory")
    assert device.pool.no_memory == "out of memory"
    with pytest.raises(ResourceExhausted):
        node.reserve(client, 1)
    assert not device.take(), "asked again at once"
    node.tick(6)
    assert not device.pool.no_memory
    with pytest.raises(ResourceExhausted):
        node.reserve(client, 1)
    device.run()
    assert node.reserve(client, 2)
    assert device.pool.counts.out_of_memory == 1
    node.check()


def test_a_commit_is_answered_when_its_blocks_are_visible_and_not_before(node: GpuNode, client: Client) -> None:
    event = node.put_on(chain("a", 2), client)
    node.gpu.take()
    assert not node.ended
    node.gpu.complete(event)
    assert not node.ended, "the daemon has not seen the event"
    node.gpu.run()
    assert node.ended == node.commits
    node.check()


def test_a_commit_without_an_event_is_over_at_once(node: GpuNode, client: Client) -> None:
    """Where no interprocess event is to be had the client waits for its copies before it commits."""
    (ref,) = node.reserve(client, 1)
    node.gpu.bytes[ref] = key_of("a")
    commit = node.gpu.pool.commit(
        client.session, node.ns, [key_of("a")], [ref], [b""], [0], None, node.now, node.ended.append
    )
    node.commits.append(commit)
    assert commit.state == "done"
    assert node.gpu.has(key_of("a"))
    node.check()


def test_the_first_of_two_writers_whose_event_comes_wins_and_the_other_keeps_its_slot(
    node: GpuNode, client: Client
) -> None:
    key, other = key_of("a"), node.client()
    first, second = node.put_on([key], client), node.put_on([key], other)
    node.gpu.complete(second)
    node.gpu.run()
    node.gpu.complete(first)
    node.gpu.run()
    assert [commit.results for commit in node.commits] == [[EXISTS], [STORED]]
    slot = node.commits[0].refs
    node.gpu.complete(node.put_on([key_of("b")], client, refs=slot))
    node.gpu.run()
    assert node.gpu.has(key_of("b"))
    node.check()


def test_a_slot_whose_event_has_not_come_can_neither_be_given_back_nor_committed_again(
    node: GpuNode, client: Client
) -> None:
    node.put_on([key_of("a")], client)
    refs = node.commits[0].refs
    with pytest.raises(FailedPrecondition, match="event has not come"):
        node.gpu.pool.abort(client.session, refs)
    with pytest.raises(FailedPrecondition, match="event has not come"):
        node.put_on([key_of("b")], client, refs=refs)
    node.check()


def test_a_block_whose_event_failed_is_never_visible_and_its_slot_stays_until_nothing_runs(
    node: GpuNode, client: Client
) -> None:
    event = node.put_on([key_of("a")], client)
    refs = node.commits[0].refs
    node.gpu.fail(event)
    node.gpu.run()
    commit = node.commits[0]
    assert (commit.state, commit.why) == ("failed", "its event failed: it failed")
    with pytest.raises(FailedPrecondition, match="event failed: Abort it once"):
        node.put_on([key_of("b")], client, refs=refs)
    segment, _ = node.gpu.pool.store.segments.at(refs[0])
    assert segment.held == 1
    node.die(client)
    assert segment.held == 1, "freed before the device said that nothing runs"
    node.gpu.run()
    assert segment.held == 0
    assert node.gpu.pool.counts.events_failed == 1
    node.check()


def test_events_that_fail_again_and_again_cost_a_client_that_aborts_their_slots_nothing(
    node: GpuNode, client: Client
) -> None:
    pool = node.gpu.pool
    for number in range(12):  # three times what its share has room for
        event = node.put_on([key_of(str(number))], client)
        node.gpu.take()
        with pytest.raises(FailedPrecondition, match="event has not come"):
            pool.abort(client.session, list(event.writes))
        node.gpu.fail(event)
        node.gpu.run()
        node.gpu.complete(event)
        pool.abort(client.session, list(event.writes))
        assert not pool.session_of(client.session).granted
        node.check()
    assert pool.counts.events_failed == 12
    with pytest.raises(InvalidArgument):
        pool.abort(client.session, list(event.writes))


def test_a_commit_whose_event_takes_too_long_fails_and_its_slot_is_free_when_it_comes(
    node: GpuNode, client: Client
) -> None:
    event = node.put_on([key_of("a")], client)
    segment, _ = node.gpu.pool.store.segments.at(node.commits[0].refs[0])
    node.gpu.take()
    node.tick(gpu_commits.EVENT_S)
    assert node.commits[0].state == "failed"
    assert segment.held == 1, "a clock has freed a slot"
    node.check()
    node.gpu.complete(event)
    node.gpu.run()
    assert segment.held == 0
    assert not node.gpu.has(key_of("a"))
    assert node.gpu.pool.counts.events_late == 1
    node.check()


def test_the_slots_of_a_client_that_died_before_its_event_are_kept_until_the_device_is_quiet(
    node: GpuNode, client: Client
) -> None:
    event = node.put_on([key_of("a")], client)
    refs = node.commits[0].refs
    node.gpu.take()
    node.hang_up(client)
    assert node.commits[0].why == "its session ended before its event came"
    node.die(client)
    jobs = [job for job in node.gpu.take() if isinstance(job, AwaitQuiet)]
    node.gpu.write(event)  # a kernel that it had launched
    assert len(jobs) == 1
    assert jobs[0].pid == client.session.pid
    segment, _ = node.gpu.pool.store.segments.at(refs[0])
    node.gpu.end(jobs[0], "it cannot be found out")
    assert segment.held == 1
    node.tick(6)
    node.gpu.run()
    assert segment.held == 0
    assert not node.gpu.has(key_of("a"))
    assert node.gpu.pool.counts.quiet_asked == 2
    node.check()


def test_what_an_event_says_after_its_session_ended_means_nothing(node: GpuNode, client: Client) -> None:
    event = node.put_on([key_of("a")], client)
    (watch,) = node.gpu.take()
    node.hang_up(client)
    node.gpu.complete(event)
    node.gpu.end(watch)
    assert not node.gpu.has(key_of("a"))
    assert node.commits[0].state == "failed"
    node.check()


def test_an_event_is_watched_no_longer_once_nobody_waits_for_it(node: GpuNode, client: Client) -> None:
    node.put_on([key_of("a")], client)
    (watch,) = node.gpu.take()
    node.die(client)
    stops = [job for job in node.gpu.pool.take_jobs(node.now) if isinstance(job, StopWatching)]
    assert isinstance(watch, WatchEvent)
    assert [stop.number for stop in stops] == [watch.number]


def test_a_removal_wins_over_a_commit_that_waits(node: GpuNode, client: Client) -> None:
    keys = chain("a", 3)
    event = node.put_on(keys, client)
    node.remove(keys[1:2])
    node.gpu.complete(event)
    node.gpu.run()
    assert node.commits[0].results == [STORED] * 3
    assert [node.gpu.has(key) for key in keys] == [True, False, True]
    node.gpu.complete(node.put_on(keys[:2], client, start=1))
    node.gpu.run()
    assert node.gpu.has(keys[1]), "it was stored anew"
    assert node.gpu.pool.counts.removed_pending == 1
    node.check()


def test_clear_takes_commits_that_wait_with_it(node: GpuNode, client: Client) -> None:
    keys = chain("a", 3)
    node.stored_on(keys[:1], client)
    event = node.put_on(keys, client, start=1)
    at: int | None = 0
    while at is not None:
        at = node.tier.clear_step(node.ns, at, 2)[0]
    node.gpu.complete(event)
    node.gpu.run()
    assert not any(map(node.gpu.has, keys))
    node.check()


def test_leases_keep_blocks_on_a_device_and_release_lets_go(node: GpuNode, client: Client) -> None:
    keys, pool = chain("a", 3), node.gpu.pool
    node.stored_on(keys, client)
    node.gpu.run()
    refs = pool.acquire(client.session, node.ns, keys, node.now)
    assert len(refs) == 3
    assert node.gpu.evict(3) == 0
    node.remove(keys)
    assert not any(map(node.gpu.has, keys))
    assert [node.gpu.bytes[ref] for ref in refs] == keys
    node.check()
    pool.release(client.session, refs)
    assert pool.store.pool(pool.link.device_namespace(node.ns)).doomed == 0
    node.check()


def test_a_block_of_a_device_ends_with_its_life(node: GpuNode, client: Client) -> None:
    node.gpu.complete(node.put_on([key_of("a")], client, ttl_s=5))
    node.gpu.run()
    assert node.tiers(key_of("a")) == GPU | HOST
    node.tick(6)
    assert node.tiers(key_of("a")) == 0
    node.check()


def test_memory_is_freed_when_no_importer_has_it_mapped(node: GpuNode, client: Client) -> None:
    device, other = node.gpu, node.client()
    keys = [key_of(str(at)) for at in range(4)]
    node.stored_on(keys, client)
    device.run()
    segment = next(iter(device.pool.store.segments.live.values()))
    node.map(other, device, [segment.id << 32])
    device.evict(4)
    device.pool.store.segments.drop(segment)
    device.take()
    assert not device.pending, "memory is freed that two processes have mapped"
    node.unmap(client, device)
    node.die(other)
    assert segment.id in device.pool.store.segments.draining
    device.run()
    assert segment.id not in device.allocated
    node.check()


def test_a_client_that_may_not_write_has_no_place_on_a_device(node: GpuNode) -> None:
    session = node.memory.open_session(node.ns.tenant, "reader", node.now, local=True, read_only=True, pid=1, nonce=1)
    with pytest.raises(FailedPrecondition, match="may write"):
        node.gpu.pool.session_of(session)


def test_a_block_larger_than_the_device_is_refused(node: GpuNode, client: Client) -> None:
    large = node.namespace("large", 20 * PAGE)
    with pytest.raises(InvalidArgument, match="block_bytes"):
        node.reserve(client, 1, ns=large)
    node.check()


def test_a_commit_that_is_refused_changes_nothing(node: GpuNode, client: Client) -> None:
    refs = node.reserve(client, 1)
    with pytest.raises(InvalidArgument):
        node.gpu.pool.commit(client.session, node.ns, [b"short"], refs, [b""], [0], Event(1, {}), 0, node.ended.append)
    assert not node.gpu.take()
    node.gpu.pool.abort(client.session, refs)
    node.check()


def test_a_session_has_so_many_commits_under_way(
    node: GpuNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_commits, "PENDING_OF_SESSION_MAX", 1)
    node.put_on([key_of("a")], client)
    refs = node.reserve(client, 1)
    with pytest.raises(ResourceExhausted, match="wait for their events"):
        node.put_on([key_of("b")], client, refs=refs)
    node.gpu.pool.abort(client.session, refs)
    node.check()


def test_a_process_that_attaches_again_has_what_it_names_and_the_rest_is_free(node: GpuNode, client: Client) -> None:
    pool, keys = node.gpu.pool, chain("a", 2)
    node.stored_on(keys, client)
    node.gpu.run()
    leased = pool.acquire(client.session, node.ns, keys, node.now)
    kept, forgotten = node.reserve(client, 2)
    node.hang_up(client)
    node.attach(client, {pool.uuid: (leased[:1], [kept])})
    session = pool.session_of(client.session)
    assert (dict(session.leased), set(session.granted)) == ({leased[0]: 1}, {kept})
    assert pool.store.pool(pool.link.device_namespace(node.ns)).quarantined == 0
    assert forgotten not in session.granted
    node.gpu.complete(node.put_on([key_of("b")], client, refs=[kept]))
    node.gpu.run()
    assert node.gpu.has(key_of("b"))
    assert {segment.id for segment in pool.store.segments.live.values() if session.id in segment.sessions}
    node.check()


def test_a_slot_that_a_copy_may_be_under_way_to_is_kept_from_one_session_to_the_next(
    node: GpuNode, client: Client
) -> None:
    """Neither a commit whose answer never arrived nor one that failed is named by who attaches again."""
    pool = node.gpu.pool
    failed, lost = node.put_on([key_of("a")], client), node.put_on([key_of("b")], client)
    node.gpu.fail(failed)
    node.gpu.run()
    node.hang_up(client)
    node.attach(client, {pool.uuid: ([], [])})
    node.gpu.write(lost)
    node.check()
    session = pool.session_of(client.session)
    assert set(session.granted) == {*failed.writes, *lost.writes}
    with pytest.raises(FailedPrecondition, match="event failed: Abort it once"):
        node.put_on([key_of("c")], client, refs=list(lost.writes))
    node.gpu.complete(lost)
    pool.abort(client.session, list(lost.writes))
    assert set(session.granted) == set(failed.writes), "its client says that its copies have ended"
    node.check()
    node.die(client)
    node.gpu.run()
    assert not pool.store.tenant("default").held_bytes
    node.check()


def test_what_is_named_and_was_never_there_is_refused(node: GpuNode, client: Client) -> None:
    node.reserve(client, 1)
    node.hang_up(client)
    with pytest.raises(InvalidArgument, match="did not hold"):
        node.attach(client, {node.gpu.pool.uuid: ([1 << 32], [])})
    with pytest.raises(InvalidArgument, match="no device"):
        node.attach(client, {"GPU-9": ([], [])})


def test_who_waits_for_a_process_to_have_left_the_device_is_told_once(node: GpuNode, client: Client) -> None:
    told: list[int] = []
    node.gpu.pool.on_quiet = told.append
    node.put_on([key_of("a")], client)
    node.gpu.take()
    node.die(client)
    assert not told
    node.gpu.run()
    assert told == [client.session.id]


def test_a_refusal_says_which_memory_is_short_and_whether_more_is_coming(node: GpuNode, client: Client) -> None:
    node.reserve(client, 4)
    with pytest.raises(ResourceExhausted, match=r"device GPU-0: session .* holds"):
        node.reserve(client, 1)
    other, large = node.client(), node.namespace("large", 8 * PAGE)
    assert not node.gpu.pool.room_is_coming
    with pytest.raises(ResourceExhausted, match="device GPU-0: no slot of 32768 bytes"):
        node.reserve(other, 1, ns=large)
    assert node.gpu.pool.room_is_coming
    node.gpu.run()
    assert node.reserve(other, 1, ns=large)
    node.check()
