"""Copies between memory and a device: which, in which order, for whom and until when."""

import pytest

from kvstore.core import gpu_link, gpu_tickets, loads
from kvstore.core.gpu_copies import Copying, ParentsFirst
from kvstore.core.gpu_jobs import CopyDown, CopyUp
from kvstore.core.gpu_tier import GpuTier
from kvstore.core.schedule import Kind
from kvstore.core.segments import MakeSegment
from kvstore.core.store import STORED, Store
from kvstore.core.tiered import Joined
from kvstored.v1.errors import ResourceExhausted
from kvstored.v1.shm import GPU, HOST, SSD
from tests.core import scene
from tests.core.gpu_scene import PAGE, Client, GpuNode
from tests.core.scene import chain, key_of
from tests.core.ssd_scene import Index


def ready(node: GpuNode) -> Client:
    """A client of devices that have memory already."""
    client = node.client()
    for device in node.devices:
        with pytest.raises(ResourceExhausted):
            node.reserve(client, 1, device)
        device.run()
    return client


def test_with_evict_a_block_is_copied_down_ahead_of_its_eviction_and_not_before() -> None:
    node = GpuNode(write_back="evict", device_pages=8)
    client, device = ready(node), node.gpu
    keys = [key_of(str(at)) for at in range(8)]
    for key in keys:
        node.tick(1)
        node.stored_on([key], client)
        while device.run():
            pass
    node.tick()
    device.run()
    down = [key for key in keys if node.tiers(key) & HOST]
    assert down == keys[: len(down)], "the coldest first"
    assert 0 < len(down) < len(keys)
    node.check()


def test_a_block_that_the_ssd_has_simply_goes_from_the_device() -> None:
    node = GpuNode()
    client = ready(node)
    node.put([key_of("a")])
    node.run()
    node.evict_memory(1)
    assert node.tiers(key_of("a")) == SSD
    node.stored_on([key_of("a")], client)
    node.gpu.run()
    assert node.tiers(key_of("a")) == GPU | SSD
    assert node.gpu.pool.counts.copied_down == 0
    assert node.gpu.evict(1) == 1
    assert node.gpu.pool.counts.evicted_only == 0
    node.check()


def test_a_block_that_waits_for_its_copy_is_not_evicted_before_it_as_far_as_the_share_goes() -> None:
    node = GpuNode(device_pages=16)
    client = ready(node)
    keys = chain("a", 4)
    node.gpu.complete(node.put_on(keys, client))
    node.gpu.end(node.gpu.take()[0])
    held = [copying.held for copying in node.gpu.pool.downs.coming.values()]
    assert len([ref for ref in held if ref is not None]) == int(16 * gpu_link.HELD_SHARE)
    assert node.gpu.evict(4) == 2
    assert node.gpu.pool.counts.evicted_only == 2
    assert node.gpu.pool.counts.down_dropped == 2
    node.gpu.run()
    assert [node.tiers(key) for key in keys] == [GPU | HOST, GPU | HOST, 0, 0]
    node.check()


def test_what_the_queue_does_not_take_is_dropped_and_counted() -> None:
    node = GpuNode(gpu_queue_pages=2)
    client = ready(node)
    node.gpu.complete(node.put_on(chain("a", 4), client))
    node.gpu.end(node.gpu.take()[0])
    assert node.gpu.pool.counts.down_dropped == 2
    node.gpu.run()
    assert [node.tiers(key) for key in chain("a", 4)] == [GPU | HOST] * 2 + [GPU] * 2
    node.check()


def test_what_comes_from_a_device_to_memory_goes_on_to_the_ssd() -> None:
    node = GpuNode()
    client = ready(node)
    node.stored_on([key_of("a")], client)
    node.run_all()
    assert node.tiers(key_of("a")) == GPU | HOST | SSD
    node.check()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]])
def test_reports_in_any_order_come_to_memory_parents_first(order: list[int]) -> None:
    node = GpuNode()
    client, keys = ready(node), chain("a", 3)
    node.gpu.complete(node.put_on(keys, client))
    node.gpu.end(node.gpu.take()[0])
    jobs = [job for job in node.gpu.take() if isinstance(job, CopyDown)]
    assert [node.gpu.sources[job.number] for job in jobs] == keys
    for at in order:
        node.gpu.end(jobs[at])
        node.check()
        here = [node.tiers(key) & HOST for key in keys]
        assert here == sorted(here, reverse=True), "a child is in memory before its parent"
    assert node.memory.counts.evicted_orphans == 0
    assert all(node.tiers(key) & HOST for key in keys)


def test_a_child_does_not_wait_for_a_parent_whose_copy_failed_or_was_removed() -> None:
    node = GpuNode()
    client, keys = ready(node), chain("a", 3)
    node.gpu.complete(node.put_on(keys, client))
    node.gpu.end(node.gpu.take()[0])
    jobs = [job for job in node.gpu.take() if isinstance(job, CopyDown)]
    node.gpu.end(jobs[2])
    node.remove(keys[1:2])
    node.gpu.end(jobs[0], "it failed")
    node.gpu.end(jobs[1])
    assert [node.tiers(key) & HOST for key in keys] == [0, 0, HOST]
    assert node.gpu.pool.counts.down_failed == 1
    assert node.gpu.pool.counts.copies_vain == 1
    node.check()


def test_a_circle_of_parents_is_not_waited_for() -> None:
    node = GpuNode()
    placed: list[Copying] = []

    def place(copying: Copying, now: float) -> None:
        placed.append(coming.pop(copying.block))

    job = CopyDown(1, 1, 1, PAGE, PAGE)
    pair = [Copying((1, bytes([at])), node.ns, PAGE, job=job, parent=bytes([1 - at])) for at in range(2)]
    coming = {copying.block: copying for copying in pair}
    order = ParentsFirst(coming, place)
    for copying in pair:
        order.ended(copying, 0.0)
    assert placed == [pair[1], pair[0]]


def test_a_removal_wins_over_a_copy_under_way_both_ways() -> None:
    node = GpuNode()
    client, key = ready(node), key_of("a")
    node.stored_on([key], client)
    (down,) = (job for job in node.gpu.take() if isinstance(job, CopyDown))
    node.gpu.step(down)
    node.remove([key])
    node.gpu.end(down)
    assert node.tiers(key) == 0
    node.check()
    node.put([key])
    ticket = node.prefetch_to([key])
    (up,) = (job for job in node.gpu.take() if isinstance(job, CopyUp))
    node.gpu.step(up)
    node.remove([key])
    node.gpu.end(up)
    node.gpu.take()
    assert node.tiers(key) == 0
    assert (ticket.state, ticket.why) == ("failed", "it was removed")
    node.check()


def test_a_block_that_was_removed_and_stored_anew_is_copied_anew_while_the_old_copy_runs() -> None:
    node = GpuNode()
    client, key = ready(node), key_of("a")
    node.stored_on([key], client)
    (old,) = (job for job in node.gpu.take() if isinstance(job, CopyDown))
    node.remove([key])
    node.stored_on([key], client)
    (new,) = (job for job in node.gpu.take() if isinstance(job, CopyDown))
    assert new.source != old.source
    node.gpu.end(new)
    node.gpu.end(old)
    assert node.tiers(key) == GPU | HOST
    node.check()


def test_a_block_that_memory_has_no_room_for_stays_on_the_device_and_is_counted() -> None:
    node = GpuNode(memory_pages=8)
    client = ready(node)
    full = [key_of(f"full {at}") for at in range(8)]
    for key in full:
        node.put([key])
    node.memory.pin(node.ns, full, 60.0, node.now)
    node.stored_on([key_of("a")], client)
    node.gpu.run()
    assert node.gpu.pool.counts.down_dropped == 1
    assert node.tiers(key_of("a")) == GPU
    node.check()


def test_what_has_ended_and_waits_for_its_parent_is_given_up_with_the_device() -> None:
    node = GpuNode()
    client, keys = ready(node), chain("a", 2)
    node.gpu.complete(node.put_on(keys, client))
    node.gpu.end(node.gpu.take()[0])
    parent, child = (job for job in node.gpu.take() if isinstance(job, CopyDown))
    node.gpu.end(child)
    node.gpu.lose()
    node.check()
    assert node.gpu.late == [parent]
    node.gpu.end_late(parent, "it is gone")
    node.gpu.come()
    assert [node.tiers(key) for key in keys] == [0, 0]
    node.check()


def test_a_node_without_an_ssd_has_devices_too() -> None:
    joined = Joined(Index())
    memory = Store(16 * PAGE, joined.host)
    for made in memory.take_jobs():
        memory.segments.made(made.segment)
    tier = GpuTier(memory, None, joined, pid=1)
    pool = tier.add("GPU-0", scene.Index(), size_bytes=16 * PAGE, queue_bytes=dict.fromkeys(Kind, 1 << 20))
    tenant = memory.tenant("default")
    ns = memory.open_namespace(tenant, key_of("ns"), PAGE, "ns")
    session = memory.open_session(tenant, "client", 0.0, local=True, read_only=False, pid=7, nonce=7)
    with pytest.raises(ResourceExhausted):
        pool.reserve(session, ns, 1, 0.0)
    for job in pool.take_jobs(0.0):
        assert isinstance(job, MakeSegment)
        assert pool.made(job.segment, "", 0.0)
    refs = pool.reserve(session, ns, 1, 0.0)
    assert pool.commit(session, ns, [key_of("a")], refs, [b""], [0], None, 0.0, lambda _: None).results == [STORED]
    (down,) = pool.take_jobs(0.0)
    assert isinstance(down, CopyDown)
    pool.copied(down, "", 0.0)
    assert memory.match(ns, [key_of("a")])
    pool.store.evict(pool.link.device_row((ns.id, key_of("a"))))
    ticket = pool.prefetch(ns, [key_of("a"), key_of("b")], 1.0, lambda _: None)
    (up,) = pool.take_jobs(0.0)
    assert isinstance(up, CopyUp)
    pool.copied(up, "", 0.0)
    assert (ticket.state, pool.tickets.blocks_now(ticket)) == ("done", 1)
    assert tier.remove(ns, [key_of("a")]) + memory.remove(ns, [key_of("a")]) == 1
    memory.check()
    pool.store.check()


# -- prefetches


def test_a_prefetch_brings_what_only_the_ssd_has_by_way_of_memory() -> None:
    node = GpuNode()
    ready(node)
    keys = chain("a", 5)
    node.put(keys)
    node.run()
    node.evict_memory(3)
    assert [node.tiers(key) for key in keys] == [HOST | SSD] * 2 + [SSD] * 3
    ticket = node.prefetch_to([*keys, key_of("nowhere")])
    node.run_all()
    node.check()
    assert (ticket.state, ticket.why, ticket.copied) == ("done", "", 5)
    assert [node.tiers(key) for key in keys] == [GPU | HOST | SSD] * 5


def test_the_ssd_is_asked_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tickets, "PORTION_BLOCKS", 2)
    node = GpuNode()
    ready(node)
    keys = chain("a", 5)
    node.put(keys)
    node.run()
    node.evict_memory(5)
    ticket = node.prefetch_to(keys)
    node.gpu.take()
    node.take()
    assert len(node.pending) == 2
    node.run_all()
    assert (ticket.state, ticket.copied) == ("done", 5)
    node.check()


def test_what_the_device_has_counts_as_come_and_a_ticket_for_nothing_is_done() -> None:
    node = GpuNode()
    client, keys = ready(node), chain("a", 2)
    node.stored_on(keys, client)
    assert node.prefetch_to(keys).state == "done"
    ticket = node.prefetch_to([key_of("nowhere")])
    assert (ticket.state, node.gpu.pool.tickets.blocks_now(ticket)) == ("done", 0)
    node.check()


def test_a_deadline_or_a_cancel_ends_the_ticket_and_not_the_slot() -> None:
    node = GpuNode()
    ready(node)
    keys = chain("a", 2)
    node.put(keys)
    late, cancelled = node.prefetch_to(keys, seconds=1.0), node.prefetch_to(keys, seconds=9.0)
    jobs = node.gpu.take()
    node.tick(2)
    node.gpu.pool.tickets.cancel(cancelled)
    assert (late.state, late.why) == ("failed", "its deadline passed")
    assert cancelled.state == "cancelled"
    node.check()
    for job in jobs:
        node.gpu.end(job)
    assert all(map(node.gpu.has, keys)), "what arrives late is there like any other"
    node.check()


def test_a_ticket_that_waits_for_the_ssd_ends_by_its_deadline_too() -> None:
    node = GpuNode()
    ready(node)
    node.put([key_of("a")])
    node.run()
    node.evict_memory(1)
    ticket = node.prefetch_to([key_of("a")])
    node.gpu.take()
    node.take()
    node.tick(2)
    assert ticket.state == "failed"
    assert not [each for each in node.moving.loads.tickets.values() if each.state == "running"]
    node.run_all()
    node.check()


def test_a_ticket_that_the_ssd_takes_no_more_of_ends_and_says_that_it_may_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = GpuNode()
    ready(node)
    node.put([key_of("a")])
    node.run()
    node.evict_memory(1)
    monkeypatch.setitem(loads.TICKETS_MAX, Kind.PREFETCH, 0)
    ticket = node.prefetch_to([key_of("a")])
    assert (ticket.state, ticket.busy) == ("failed", True)
    assert "prefetches are under way already" in ticket.why
    node.check()


def test_a_block_is_copied_once_however_many_want_it() -> None:
    node = GpuNode()
    ready(node)
    node.put([key_of("a")])
    tickets = [node.prefetch_to([key_of("a")]) for _ in range(3)]
    assert len([job for job in node.gpu.take() if isinstance(job, CopyUp)]) == 1
    node.gpu.run()
    assert [ticket.state for ticket in tickets] == ["done"] * 3
    node.check()


def test_what_nobody_wants_any_more_and_was_not_begun_is_not_copied() -> None:
    node = GpuNode()
    ready(node)
    node.put([key_of("a")])
    ticket = node.prefetch_to([key_of("a")])
    node.gpu.pool.tickets.close(ticket)
    assert not node.gpu.take()
    node.check()


def test_a_ticket_larger_than_the_queue_goes_on_as_it_empties_and_the_more_urgent_one_first() -> None:
    node = GpuNode(gpu_queue_pages=2, device_pages=32)
    ready(node)
    node.put(keys := chain("a", 5))
    node.put(urgent := chain("b", 2))
    first, second = node.prefetch_to(keys), node.prefetch_to(urgent, priority=5)
    assert len(first.waiting) == 2
    node.gpu.take()  # the queue is empty again
    node.gpu.take()
    assert (len(second.waiting), len(first.waiting)) == (2, 2)
    node.gpu.run()
    assert (first.state, second.state) == ("done", "done")
    node.check()


def test_a_copy_that_fails_is_told_and_counted() -> None:
    node = GpuNode()
    ready(node)
    node.put([key_of("a")])
    ticket = node.prefetch_to([key_of("a")])
    node.gpu.run("an error")
    assert (ticket.state, ticket.why) == ("failed", "copying it failed: an error")
    assert node.gpu.pool.counts.up_failed == 1
    node.check()


def test_prefetches_stop_at_half_of_the_device_instead_of_evicting_what_they_brought() -> None:
    node = GpuNode(device_pages=8)
    ready(node)
    node.put(keys := chain("a", 8))
    ticket = node.prefetch_to(keys)
    node.gpu.run()
    assert ticket.state == "failed"
    assert "half of the device's memory" in ticket.why
    assert node.gpu.pool.tickets.blocks_now(ticket) == 4
    node.gpu.pool.touch(node.ns.tenant, keys, node.now)
    again = node.prefetch_to(keys)
    node.gpu.run()
    assert again.copied == 4 or node.gpu.pool.tickets.blocks_now(again) > 4
    node.check()


def test_what_waits_to_be_copied_up_is_held_in_memory() -> None:
    node = GpuNode()
    ready(node)
    node.put(keys := chain("a", 2))
    ticket = node.prefetch_to(keys)
    node.evict_memory(2)
    node.gpu.run()
    assert (ticket.state, ticket.copied) == ("done", 2)
    node.check()


def test_copies_for_who_waits_are_begun_before_copies_down() -> None:
    node = GpuNode()
    client = ready(node)
    node.put([key_of("a")])
    node.gpu.complete(node.put_on(chain("b", 3), client))
    node.gpu.end(node.gpu.take()[0])
    node.prefetch_to([key_of("a")])
    assert isinstance(node.gpu.take()[0], CopyUp)
    node.gpu.run()
    node.check()


def test_one_device_does_not_wait_for_another() -> None:
    node = GpuNode(devices=2)
    client, (one, other) = ready(node), node.devices
    node.put([key_of("a")])
    slow, quick = node.prefetch_to([key_of("a")], one), node.prefetch_to([key_of("a")], other)
    one.take()
    other.run()
    assert (slow.state, quick.state) == ("running", "done")
    node.check()
    one.run()
    node.stored_on([key_of("b")], client, one)
    node.stored_on([key_of("b")], client, other)
    node.run_all()
    node.check()
    for device in node.devices:
        assert node.tiers(key_of("b")) & GPU
        device.evict(2)
        node.check()
    assert node.tiers(key_of("b")) == HOST | SSD
