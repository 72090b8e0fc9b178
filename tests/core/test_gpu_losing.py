"""A device that is lost takes its blocks along and nothing else, and may come back; flags are true throughout."""

import itertools

import pytest

from kvstore.core.gpu_jobs import AwaitQuiet, CopyDown, CopyUp, WatchEvent
from kvstore.core.segments import MakeSegment
from kvstored.v1.errors import InvalidArgument, ResourceExhausted, Unavailable
from kvstored.v1.shm import GPU, HOST, SSD
from tests.core.gpu_scene import LOST, GpuNode
from tests.core.scene import chain, key_of
from tests.core.test_gpu_copies import ready

ORDERS = list(itertools.permutations("hsg"))


def test_everybody_who_waits_is_answered_and_memory_and_ssd_go_on() -> None:
    node = GpuNode()
    client, device = ready(node), node.gpu
    node.stored_on(there := chain("a", 2), client)
    node.run_all()
    node.put(below := chain("b", 2))
    ticket = node.prefetch_to(below)
    event = node.put_on([key_of("c")], client)
    node.stored_on([key_of("d")], client)
    device.take()
    for job in [job for job in device.pending if isinstance(job, MakeSegment)]:
        device.end(job)
    device.take()
    assert {CopyUp, CopyDown, WatchEvent} == {type(job) for job in device.pending}
    told = device.pool.lose(LOST)
    assert told == [client.session.id]
    assert ticket.state == "failed"
    assert LOST in ticket.why
    assert [commit.state for commit in node.commits] == ["done", "done", "failed", "done"]
    with pytest.raises(Unavailable, match=LOST):
        node.reserve(client, 1)
    with pytest.raises(Unavailable, match=LOST):
        node.prefetch_to(below)
    assert not device.pool.take_jobs(node.now)
    assert event.writes
    while device.pool.tick(node.now, 0.8, 1):
        pass
    assert [node.tiers(key) for key in there] == [HOST | SSD] * 2
    assert node.tiers(key_of("d")) == 0
    assert device.pool.counts.lost == 1
    assert device.pool.counts.losses == 1


def test_a_slot_of_memory_under_a_copy_is_kept_until_its_report_though_the_device_is_lost() -> None:
    node = GpuNode()
    client, device = ready(node), node.gpu
    node.put(keys := chain("b", 2))
    node.prefetch_to(keys)
    node.stored_on([key_of("d")], client)
    device.take()
    device.lose()
    node.check()
    device.come()
    node.check()
    assert device.pool.losing.left_behind == 3
    assert node.memory.table.leases[node.ns.tenant.rows[keys[0]]] == 1
    for job in list(device.late):
        device.end_late(job, LOST)
        node.check()
    assert device.pool.losing.left_behind == 0
    assert not device.pool.under_way


def test_a_device_that_comes_back_is_empty_and_works() -> None:
    node = GpuNode()
    client, device = ready(node), node.gpu
    node.stored_on(chain("a", 4), client)
    device.lose()
    device.come()
    node.check()
    again = ready(node)
    node.stored_on(chain("a", 4), again)
    device.run()
    assert all(node.tiers(key) == GPU | HOST for key in chain("a", 4))
    node.check()
    assert not device.take(), "a process that lives is asked about"
    node.die(client)
    (job,) = device.take()
    assert isinstance(job, AwaitQuiet), "what was begun before the loss may run still"
    pid, born = client.session.pid, client.session.born
    device.end(job, "it cannot be told")
    assert device.pool.knows(pid, born)
    assert not device.take()
    node.tick(6.0)
    device.run()
    assert not device.pool.knows(pid, born)
    assert not device.pool.strays.known - {(each.session.pid, each.session.born) for each in node.clients if each.alive}


def test_who_was_being_asked_about_when_a_device_was_lost_is_asked_about_when_it_is_back() -> None:
    node = GpuNode()
    client, waiting, device = ready(node), node.client(), node.gpu
    told: list[int] = []
    device.pool.on_quiet = told.append
    for each in (client, waiting):
        node.reserve(each, 1)
    node.die(client)
    assert any(isinstance(job, AwaitQuiet) for job in device.take())
    node.die(waiting)
    device.lose()
    assert device.pool.knows(client.session.pid, 0)
    assert device.pool.knows(waiting.session.pid, 0)
    assert not device.take(), "a lost device is asked"
    device.come()
    assert not told
    device.run()
    assert len(told) == 2
    assert not device.pool.knows(client.session.pid, 0)
    assert not device.pool.knows(waiting.session.pid, 0)


def test_the_blocks_of_a_lost_device_go_in_bounded_steps() -> None:
    node = GpuNode()
    client, device = ready(node), node.gpu
    node.stored_on([key_of(str(at)) for at in range(8)], client)
    device.run()
    device.lose()
    before = len(device.index.published)
    while device.pool.tick(node.now, 0.8, 2):
        assert before - len(device.index.published) <= 2
        before = len(device.index.published)
        node.check()
    assert not before


def test_a_device_lost_again_while_it_is_emptied_is_lost_once() -> None:
    node = GpuNode()
    ready(node)
    assert node.gpu.pool.lose(LOST)
    assert node.gpu.pool.lose("again") == []
    assert node.gpu.pool.trouble == LOST


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("leaving", ORDERS)
def test_flags_are_true_in_every_order_of_coming_and_going(order: tuple[str, ...], leaving: tuple[str, ...]) -> None:
    """The rows of three stores, put and dropped by hand; `check` compares flags with rows."""
    node = GpuNode()
    client, key = ready(node), key_of("a")
    link, flags = node.moving.link, {"h": HOST, "s": SSD, "g": GPU}
    disk = link.disk_namespace(node.ns)
    assert disk is not None
    there = 0
    for tier in order:
        if tier == "h":
            node.put([key])
        elif tier == "g":
            node.stored_on([key], client)
        else:
            if not link.disk.pool(disk).free:
                assert link.on_disk.take(disk) is None
                for job in link.disk.take_jobs():
                    link.disk.segments.made(job.segment)
            extent = link.on_disk.take(disk)
            assert extent is not None
            link.disk.place(link.on_disk.session(disk.tenant), disk, [key], [extent], [b""], [0], node.now)
        there |= flags[tier]
        assert node.tiers(key) == there
        ref = node.index.seen[node.ns.tenant.id, key][0]
        assert bool(ref) == bool(there & HOST)
    for tier in leaving:
        if tier == "h":
            node.memory.tree.drop(node.ns.tenant.rows[key])
        elif tier == "s":
            link.disk.tree.drop(disk.tenant.rows[key])
        else:
            side = node.gpu.pool.link.side
            node.gpu.pool.store.tree.drop(side.device_of[node.ns.id].tenant.rows[key])
        there &= ~flags[tier]
        assert node.tiers(key) == there


def test_pins_reach_every_tier_and_who_is_asked_for_counts_each_block_once() -> None:
    node = GpuNode(write_back="evict")
    client, keys = ready(node), chain("a", 2)
    node.stored_on(keys, client)
    assert node.tier.pin(node.ns, keys, 5.0, node.now) == 2
    assert node.gpu.evict(2) == 0
    node.tick(6)
    assert node.gpu.evict(2) == 2
    node.stored_on(keys, client)
    node.tier.pin(node.ns, keys, 5.0, node.now)
    node.tier.unpin(node.ns, keys)
    assert node.tier.remove(node.ns, keys) == 2
    node.check()


def test_a_device_that_is_not_there_is_named_in_the_error() -> None:
    with pytest.raises(InvalidArgument, match="there are: GPU-0"):
        GpuNode().tier.pool("GPU-7")


def test_a_stop_can_save_what_only_a_device_has() -> None:
    node = GpuNode(write_back="evict")
    client = ready(node)
    node.stored_on(keys := chain("a", 3), client)
    at: int | None = 0
    while at is not None:
        at = node.gpu.pool.save_step(at, 2)
    node.run_all()
    assert [node.tiers(key) for key in keys] == [GPU | HOST | SSD] * 3
    node.check()


def test_figures_of_all_devices_add_up() -> None:
    node = GpuNode(devices=2)
    client = ready(node)
    for device in node.devices:
        node.stored_on(chain(device.pool.uuid, 2), client, device)
    node.run_all()
    counts = node.tier.counts()
    assert (counts.committed, counts.copied_down) == (4, 4)
    assert counts.bytes_down == 4 * node.ns.block_bytes


def test_memory_that_is_short_on_a_device_asks_back_what_was_granted_ahead() -> None:
    node = GpuNode(device_pages=8)
    client, other = ready(node), node.client()
    assert node.gpu.pool.top_up(client.session, node.ns, 1) == []
    assert len(node.reserve(client, 2)) == 2
    with pytest.raises(ResourceExhausted):
        node.reserve(client, 2)
    session = node.gpu.pool.session_here(client.session)
    assert session is not None
    assert session.recall
    assert node.gpu.pool.session_here(other.session) is None
    node.check()
