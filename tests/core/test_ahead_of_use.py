"""What is brought ahead of use: bounded, in portions, and never in the way of who waits."""

import pytest

from kvstore.core import loads
from kvstore.core.loads import DONE, FAILED, RUNNING
from kvstore.core.moves import WriteBlock
from kvstore.core.schedule import Kind
from kvstored.v1.errors import ResourceExhausted
from kvstored.v1.shm import HOST, SSD
from tests.core.scene import chain
from tests.core.ssd_scene import Node

BOTH = HOST | SSD


def on_disk(node: Node, name: str, count: int) -> list[bytes]:
    """A chain that only the SSD has."""
    keys = chain(name, count)
    for at in range(1, count + 1):
        node.put(keys[:at])
        node.run()
    node.evict_memory(count)
    assert [node.tiers(key) for key in keys] == [SSD] * count
    return keys


def test_prefetches_never_keep_who_waits_from_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loads.TICKETS_MAX, Kind.PREFETCH, 4)
    node = Node()
    keys = on_disk(node, "a", 6)
    for _ in range(4):
        assert node.prefetch(keys).state == RUNNING
    with pytest.raises(ResourceExhausted, match="4 prefetches"):
        node.prefetch(keys)
    assert node.load(keys[:2]).state == RUNNING
    node.run()
    assert [ticket.state for ticket in node.tickets] == [DONE] * 5
    node.moving.loads.close(node.tickets[0])
    assert node.prefetch(keys).state == DONE
    node.check()


def test_loads_have_a_bound_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loads.TICKETS_MAX, Kind.LOAD, 2)
    node = Node()
    keys = on_disk(node, "a", 6)
    node.load(keys[:1])
    node.load(keys[:1])
    with pytest.raises(ResourceExhausted, match="2 loads"):
        node.load(keys[:1])
    node.prefetch(keys)
    node.moving.loads.close(node.tickets[0])
    node.load(keys[:1])
    node.run()
    node.check()


def test_a_prefetch_larger_than_the_queue_is_worked_through_in_portions() -> None:
    node = Node(memory_pages=64, disk_pages=96, queue_pages=4)
    keys = on_disk(node, "a", 24)
    ticket = node.prefetch(keys)
    assert (ticket.state, len(ticket.waiting)) == (RUNNING, 4)
    while node.take() or node.pending:
        assert node.moving.link.schedule.queues[Kind.PREFETCH].bytes <= 4 * 4096
        node.end(0)
    assert (ticket.state, ticket.why, ticket.loaded) == (DONE, "", 24)
    assert [node.tiers(key) for key in keys] == [BOTH] * 24
    node.check()


def test_a_prefetch_larger_than_may_be_brought_ahead_is_done_with_its_leading_run() -> None:
    node = Node(memory_pages=32, disk_pages=96, queue_pages=4)
    keys = on_disk(node, "a", 24)
    ticket = node.prefetch(keys)
    node.run()
    brought = sum(node.tiers(key) == BOTH for key in keys)
    assert ticket.state == DONE
    assert ticket.why.startswith("the rest was not tried")
    assert 16 <= brought < 24, "half of the memory, and what was being read just then"
    assert [node.tiers(key) for key in keys] == [BOTH] * brought + [SSD] * (24 - brought)
    assert node.moving.loads.blocks_now(ticket) == brought
    assert node.moving.link.counts.loads_failed == 0, "nothing was tried in vain"
    again = node.prefetch(chain("b", 1) + keys[brought:])
    assert again.state == DONE, "of what is nowhere"
    late = node.prefetch(keys[brought:])
    node.run()
    assert (late.state, late.loaded) == (FAILED, 0)
    assert "the rest was not tried" in late.why
    node.check()


def test_a_prefetch_stops_when_it_would_push_out_what_it_brought() -> None:
    """Behind a run that memory has: 78 blocks were read, and 4 of them there at the end."""
    node = Node(memory_pages=32, disk_pages=96)
    keys = chain("a", 48)
    for at in range(1, 49):
        node.put(keys[:at])
        node.run()
    before = node.moving.loads.blocks_now(node.prefetch(keys))
    node.run()
    ticket = node.tickets[-1]
    assert ticket.state == DONE
    assert ticket.why == "the rest was not tried: there is no more room for it in memory"
    assert ticket.loaded <= 12
    assert node.moving.loads.blocks_now(ticket) >= before - 2
    node.check()


def test_a_prefetch_that_finds_the_queue_full_of_others_waits_for_its_turn_by_priority() -> None:
    node = Node(memory_pages=64, disk_pages=96, queue_pages=4)
    first, second, third = (on_disk(node, name, 8) for name in "abc")
    node.prefetch(first)
    low, high = node.prefetch(second), node.prefetch(third, priority=3)
    assert (low.state, high.state) == (RUNNING, RUNNING)
    order: list[bytes] = []
    while node.take() or node.pending:
        order.append(getattr(node.pending[0], "key", b""))
        node.end(0)
    assert (low.state, high.state) == (DONE, DONE)
    assert max(order.index(key) for key in third) < min(order.index(key) for key in second)
    node.check()


def test_a_prefetch_in_portions_ends_by_its_deadline_and_by_cancel() -> None:
    node = Node(memory_pages=64, disk_pages=96, queue_pages=4)
    keys = on_disk(node, "a", 24)
    late, cancelled = node.prefetch(keys, seconds=1.0), node.prefetch(keys)
    node.moving.loads.cancel(cancelled)
    node.now += 2
    node.moving.loads.expire(node.now)
    assert (late.state, late.why, cancelled.state) == (FAILED, "its deadline passed", "cancelled")
    node.run()
    assert not node.moving.loads.loading
    assert not node.moving.loads._portions
    node.check()


def test_a_load_that_too_much_stands_before_says_that_this_may_pass() -> None:
    node = Node(memory_pages=32, disk_pages=64, queue_pages=2)
    keys, other = on_disk(node, "a", 6), on_disk(node, "b", 2)
    whole = node.load(keys[:4])
    assert (whole.busy, whole.why) == (True, "too much is being loaded already")
    refused = node.load(other)
    assert (refused.state, refused.busy) == (FAILED, True)
    nowhere = node.load(chain("c", 2))
    assert (nowhere.state, nowhere.busy) == (DONE, False)
    node.run()
    node.moving.link.trouble = "broken"
    broken = node.load(other)
    assert (broken.state, broken.busy) == (FAILED, False)


def test_who_waits_for_what_could_only_be_queued_as_ahead_of_use_is_not_bound_by_what_was_prefetched() -> None:
    node = Node(memory_pages=16, disk_pages=64, queue_pages=6)
    first, second, wanted = on_disk(node, "a", 8), on_disk(node, "b", 6), on_disk(node, "c", 1)
    node.prefetch(first)
    node.run()
    node.prefetch(wanted)
    for key in second:
        node.load([key])
    load = node.load(wanted)
    assert node.moving.loads.loading[node.block(wanted[0])].kind is Kind.PREFETCH, "the queue of loads is full"
    for ticket in node.tickets[2:-1]:
        node.moving.loads.close(ticket)
    node.run()
    assert (load.state, load.why) == (DONE, "")
    node.check()


def test_what_loads_hold_does_not_have_the_ssd_write_one_by_one() -> None:
    node = Node(memory_pages=64, disk_pages=96)
    keys = on_disk(node, "a", 12)
    load = node.load(keys)
    node.run()
    assert len(load.held) == 12, "more than writes may hold"
    node.put(chain("b", 4))
    node.take()
    node.end(0)  # the file
    assert sum(isinstance(move, WriteBlock) for move in node.take()) == 4
    node.run()
    node.check()
