"""A removal is over when its records are deleted on the disk: its own, and no others."""

import pytest

from kvstore.core import forgetting
from kvstore.core.durable import Durable
from kvstore.core.forgetting import Deletion
from kvstore.core.moves import ForgetRecords, Move, WriteBlock
from kvstore.core.segments import MakeSegment
from kvstored.v1.shm import HOST, SSD
from tests.core.scene import chain
from tests.core.ssd_scene import Node


def removed(node: Node, keys: list[bytes]) -> Deletion:
    """Removes blocks from both tiers, as the server does; who waits for it to be for good."""
    node.moving.remove_from_disk(node.ns, keys)
    node.memory.remove(node.ns, keys)
    return waits(node, keys)


def waits(node: Node, keys: list[bytes] | None) -> Deletion:
    told: list[Deletion] = []
    waiter = node.moving.writes.forgetting.wait_removed([node.ns.id], keys, told.append)
    assert bool(told) == (not waiter.left)
    return waiter


def job(node: Node, kind: type[Move]) -> Move:
    node.take()
    while isinstance(node.pending[0], MakeSegment):
        node.end(0)
        node.take()
    (found,) = [pending for pending in node.pending if isinstance(pending, kind)]
    return found


def records(node: Node) -> set[bytes]:
    return {key for _, key in node.disk.records}


def test_a_removal_is_over_with_the_deletion_of_its_records() -> None:
    node, keys = Node(), chain("a", 3)
    node.put(keys)
    node.run()
    waiter = removed(node, keys)
    assert waiter.left == 3
    forget = job(node, ForgetRecords)
    assert waiter.left == 3
    assert records(node) == set(keys), "handed out is not deleted"
    node.end(node.pending.index(forget))
    assert not waiter.left
    assert not waiter.why
    assert not records(node)
    node.check()


def test_a_removal_of_what_has_no_record_is_over_at_once() -> None:
    node, keys = Node(policy="evict"), chain("a", 2)
    node.put(keys)
    assert not removed(node, keys).left
    assert not removed(node, chain("never", 2)).left


def test_a_removal_waits_for_the_write_under_way_whose_record_must_not_stay() -> None:
    node, keys = Node(), chain("a", 1)
    node.put(keys)
    write = job(node, WriteBlock)
    waiter = removed(node, keys)
    assert waiter.left == 1, "its record is on its way"
    assert waits(node, None).left == 1, "to a clear as well"
    node.end(node.pending.index(write))
    assert waiter.left == 1
    assert records(node) == set(keys), "the record is there, and to be deleted"
    node.run()
    assert not waiter.left
    assert not waiter.why
    assert not records(node)


def test_a_removal_waits_for_the_record_of_what_was_evicted_a_moment_ago() -> None:
    node, keys = Node(), chain("a", 1)
    node.put(keys)
    node.run()
    row = node.joined.disk_of[node.ns.id].tenant.rows[keys[0]]
    node.store.evict(row)
    node.evict_memory(1)
    assert not node.tiers(keys[0])
    waiter = removed(node, keys)
    assert waiter.left == 1, "a start that comes now would find it"
    node.run()
    assert not waiter.left


def test_a_removal_waits_for_no_record_but_its_own() -> None:
    node, mine, others = Node(), chain("mine", 2), chain("others", 2)
    node.put(mine)
    node.put(others)
    node.run()
    waiter = removed(node, mine)
    forget = job(node, ForgetRecords)
    others_waiter = removed(node, others)
    node.end(node.pending.index(forget))
    assert not waiter.left
    assert others_waiter.left == 2


def test_a_clear_waits_for_what_went_before_it_and_for_nothing_later() -> None:
    node, before, later = Node(), chain("before", 2), chain("later", 2)
    node.put(before)
    node.put(later)
    node.run()
    node.moving.remove_from_disk(node.ns, before)
    node.memory.remove(node.ns, before)
    waiter = waits(node, None)
    forget = job(node, ForgetRecords)
    removed(node, later)
    node.end(node.pending.index(forget))
    assert not waiter.left
    assert records(node) == set(later)


def test_who_waits_for_a_removal_is_told_when_the_ssd_goes_out_of_use() -> None:
    node, keys = Node(), chain("a", 2)
    node.put(keys)
    node.run()
    waiter, cleared = removed(node, keys), waits(node, None)
    node.take()
    node.end(0, "input/output error")
    assert "input/output error" in waiter.why
    assert waiter.left == 2
    assert "input/output error" in cleared.why
    assert cleared.left == 2
    assert sorted(key for _, key in node.moving.writes.forgetting.not_deleted(None, None)) == sorted(keys)


def test_a_block_stored_again_while_its_removed_copy_was_written_is_written_after_that() -> None:
    """It was taken for one that is on its way already, and never was on the SSD."""
    node, keys = Node(), chain("a", 1)
    node.put(keys)
    write = job(node, WriteBlock)
    removed(node, keys)
    node.put(keys)
    node.end(node.pending.index(write))
    node.run()
    assert node.tiers(keys[0]) == HOST | SSD
    node.check()


def test_who_waits_for_a_block_stored_again_is_not_told_of_the_removed_one() -> None:
    node, keys = Node(), chain("a", 1)
    node.put(keys)
    first, second = list[Durable](), list[Durable]()
    node.moving.writes.wait_durable(node.ns, keys, first.append)
    write = job(node, WriteBlock)
    removed(node, keys)
    node.put(keys)
    node.moving.writes.wait_durable(node.ns, keys, second.append)
    node.end(node.pending.index(write))
    assert [waiter.why for waiter in first] == ["a block was removed before it was written"]
    assert not second
    node.run()
    assert [waiter.why for waiter in second] == [""]
    assert node.tiers(keys[0]) == HOST | SSD
    node.check()


def test_who_gives_up_waiting_for_a_block_removed_while_it_is_written_is_told_nothing() -> None:
    node, keys = Node(), chain("a", 1)
    node.put(keys)
    told: list[Durable] = []
    waiter = node.moving.writes.wait_durable(node.ns, keys, told.append)
    write = job(node, WriteBlock)
    removed(node, keys)
    node.moving.writes.forget_waiter(waiter)
    node.end(node.pending.index(write))
    node.run()
    assert not told
    assert not node.tiers(keys[0])
    node.check()


def test_many_deletions_are_handed_out_a_bounded_number_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that had gone while the SSD was out of use was, at once: 300,000 records took the loop 2.4 s."""
    monkeypatch.setattr(forgetting, "HANDED_OUT_MAX", 3)
    monkeypatch.setattr(forgetting, "FORGET_MAX", 2)
    node, keys = Node(), chain("a", 8)
    node.put(keys)
    node.run()
    waiter = removed(node, keys)
    turns = []
    while waiter.left:
        node.take()
        turns.append([len(job.names) for job in node.pending if isinstance(job, ForgetRecords)])
        while node.pending:
            node.end(0)
    assert turns == [[2, 1], [2, 1], [2]]
    assert not records(node)
    node.check()
