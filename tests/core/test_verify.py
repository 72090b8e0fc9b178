"""Reading the SSD back: everything once, nothing in anybody's way, and what is bad is not promised again."""

import pytest

from kvstore.core.moves import ProbeTier, ReadBlock, VerifyBlock
from kvstore.core.verify import PAUSE_S, PLACES, SWEEPS_MAX, Sweep, blocks_step
from kvstored.v1.errors import ResourceExhausted
from kvstored.v1.shm import HOST, SSD
from tests.core.scene import chain
from tests.core.ssd_scene import Node


def stored(count: int = 6, pages: int = 24) -> tuple[Node, list[bytes]]:
    """Blocks that are on the SSD alone."""
    node, keys = Node(memory_pages=pages, disk_pages=pages), chain("a", count)
    node.put(keys)
    node.run()
    node.evict_memory(count)
    assert [node.tiers(key) for key in keys] == [SSD] * count
    return node, keys


def ask(node: Node, blocks_max: int = 1000) -> tuple[Sweep, list[Sweep]]:
    """A sweep over what there is, and where its end is told."""
    found: list[tuple[int, tuple[int, bytes]]] = []
    blocks_step(node.store, 0, 1000, found, blocks_max)
    ended: list[Sweep] = []
    return node.moving.verification.ask(found, ended.append), ended


def test_each_block_is_read_once_and_nothing_comes_to_memory() -> None:
    node, keys = stored()
    before = [node.store.table.used[row] for row in range(len(node.store.table))]
    sweep, ended = ask(node)
    node.run()
    assert ended == [sweep]
    assert (sweep.blocks, sweep.bad, sweep.failed, sweep.first_left()) == (6, 0, 0, None)
    assert [node.tiers(key) for key in keys] == [SSD] * 6
    assert [node.store.table.used[row] for row in range(len(node.store.table))] == before, "it is no use of a block"
    assert not any(node.store.table.leases)
    node.check()


def test_blocks_are_found_in_steps_that_neither_miss_one_nor_name_one_twice() -> None:
    node, keys = stored()
    seen: list[bytes] = []
    at, more = 0, True
    while more:
        found: list[tuple[int, tuple[int, bytes]]] = []
        at, more = blocks_step(node.store, at, 3, found, 2)
        seen += [key for _, (_, key) in found]
        assert len(found) <= 2
    assert sorted(seen) == sorted(keys)


def test_a_bad_block_is_counted_and_removed_and_so_is_its_record() -> None:
    node, keys = stored()
    row = node.moving.link.disk_row(node.block(keys[2]))
    node.disk.bytes[node.store.table.place[row]] = b"rotten"
    sweep, _ = ask(node)
    node.run()
    assert (sweep.blocks, sweep.bad, sweep.failed) == (6, 1, 0)
    assert node.moving.counts.corrupt == 1
    assert node.tiers(keys[2]) == 0
    assert len(node.disk.records) == 5
    node.check()


def test_an_unreadable_block_stops_the_sweep_until_the_ssd_has_been_tried() -> None:
    node, _ = stored()
    sweep, ended = ask(node)
    node.take()
    assert len(node.pending) == PLACES
    node.end(0, "input/output error")
    assert node.moving.trouble
    left = sweep.first_left()
    while node.pending:
        node.end(0)
    assert ended == [sweep]
    assert (sweep.blocks, sweep.failed) == (PLACES, 1)
    assert sweep.first_left() is not None
    assert left is not None
    node.take()
    assert not [job for job in node.pending if isinstance(job, VerifyBlock)], "nothing is read while it is out of use"
    node.check()


def test_the_second_failure_of_a_block_removes_it() -> None:
    node, keys = stored(1)
    for expected in (SSD, 0):
        ask(node)
        node.take()
        node.end(0, "input/output error")
        assert node.tiers(keys[0]) == expected
        node.now += 10
        node.moving.tick(node.now, 0.8)
        node.run()
        assert not node.moving.trouble
    node.check()


def test_a_block_that_is_read_back_cannot_be_evicted_and_may_be_removed() -> None:
    node, keys = stored(2)
    sweep, ended = ask(node)
    node.take()
    extents = [job.extent for job in node.pending if isinstance(job, VerifyBlock)]
    node.moving.remove_from_disk(node.ns, keys)
    node.put(chain("b", 12))
    node.take()
    writes = {getattr(job, "extent", None) for job in node.pending if not isinstance(job, VerifyBlock)}
    assert not writes & set(extents), "an extent was given away while it was read"
    for job in [job for job in node.pending if isinstance(job, VerifyBlock)]:
        node.disk.bytes[job.extent] = b"rotten"
        node.end(node.pending.index(job))
    assert ended == [sweep]
    assert (sweep.bad, node.moving.counts.corrupt) == (0, 0), "what was removed meanwhile is nobody's loss"
    node.run()
    node.check()


def test_loads_go_first_and_a_sweep_gets_on_all_the_same() -> None:
    node, keys = stored(6, pages=96)
    other = chain("b", 20)
    node.put(other)
    node.run()
    node.evict_memory(20)
    ticket = node.load(other)
    node.take()
    loading = len(node.pending)
    sweep, _ = ask(node)
    node.take()
    behind = [job for job in node.pending[loading:] if isinstance(job, VerifyBlock)]
    assert len(behind) == 1, "one place, while loads wait"
    assert any(queue.level for queue in node.moving.link.schedule.queues.values()), "and some still wait"
    node.end(node.pending.index(behind[0]))
    node.take()
    assert not [job for job in node.pending if isinstance(job, VerifyBlock)], "no second one at once"
    node.now += PAUSE_S
    node.take()
    assert len([job for job in node.pending if isinstance(job, VerifyBlock)]) == 1
    node.run()
    assert ticket.state == "done"
    assert sweep.first_left() is None
    node.moving.loads.close(ticket)
    assert [node.tiers(key) for key in keys] == [SSD] * 6
    node.check()


def test_a_sweep_that_is_stopped_ends_with_what_is_under_way_and_says_where_to_go_on() -> None:
    node, keys = stored()
    sweep, ended = ask(node)
    node.take()
    node.moving.verification.stop(sweep)
    assert not ended
    node.run()
    assert ended == [sweep]
    assert sweep.blocks == PLACES
    rows = sorted(node.moving.link.disk_row(node.block(key)) for key in keys)
    assert sweep.first_left() == rows[PLACES]
    node.check()


def test_blocks_that_are_gone_are_passed_over() -> None:
    node, keys = stored(2)
    sweep, ended = ask(node)
    node.moving.remove_from_disk(node.ns, keys)
    node.run()
    assert ended == [sweep]
    assert sweep.blocks == 0
    node.check()


def test_one_sweep_too_many_is_refused_and_an_empty_one_is_over_at_once() -> None:
    node, _ = stored(2)
    for _ in range(SWEEPS_MAX):
        ask(node)
    with pytest.raises(ResourceExhausted, match="under way already"):
        ask(node)
    node.run()
    ended: list[Sweep] = []
    assert ended == [node.moving.verification.ask([], ended.append)]


def test_a_load_of_the_same_block_and_a_sweep_do_not_disturb_each_other() -> None:
    node, keys = stored(1)
    ticket = node.load(keys)
    sweep, _ = ask(node)
    node.take()
    assert {type(job) for job in node.pending if not isinstance(job, ProbeTier)} == {ReadBlock, VerifyBlock}
    node.run()
    assert (ticket.state, sweep.blocks, node.tiers(keys[0])) == ("done", 1, HOST | SSD)
    node.moving.loads.close(ticket)
    node.check()
