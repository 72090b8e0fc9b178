"""Between memory and the SSD: what is written when, what is loaded for whom, and how each of it ends."""

import pytest

from kvstore.core.moves import WriteBlock
from kvstore.core.schedule import Kind
from kvstored.v1.shm import EMPTY_KEY, HOST, SSD
from tests.core.scene import chain
from tests.core.ssd_scene import PAGE, Node

BOTH = HOST | SSD


def test_a_stored_block_is_written_through_and_readers_see_both_copies() -> None:
    node = Node()
    keys = chain("a", 3)
    node.put(keys)
    assert [node.tiers(key) for key in keys] == [HOST] * 3
    node.run()
    assert [node.tiers(key) for key in keys] == [BOTH] * 3
    node.check()


def test_an_evicted_block_is_found_on_the_ssd_and_loaded_byte_for_byte() -> None:
    node = Node()
    keys = chain("a", 3)
    node.put(keys)
    node.run()
    node.evict_memory(3)
    assert [node.tiers(key) for key in keys] == [SSD] * 3
    assert node.moving.match(node.ns, keys) == [False] * 3
    ticket = node.load(keys)
    node.run()
    assert (ticket.state, ticket.loaded) == ("done", 3)
    assert [node.tiers(key) for key in keys] == [BOTH] * 3
    node.check()
    node.moving.loads.close(ticket)
    node.check()


def test_fifty_clients_who_want_one_prefix_read_it_once() -> None:
    node = Node()
    keys = chain("a", 4)
    node.put(keys)
    node.run()
    node.evict_memory(4)
    tickets = [node.load(keys) for _ in range(50)]
    assert node.run() == 4
    assert {ticket.state for ticket in tickets} == {"done"}
    for ticket in tickets:
        node.moving.loads.close(ticket)
    node.check()


def test_a_mismatch_is_a_miss_and_the_record_is_removed() -> None:
    node = Node()
    keys = chain("a", 2)
    node.put(keys)
    node.run()
    node.evict_memory(2)
    extents = [node.store.table.place[node.moving.link.disk_row(node.block(key))] for key in keys]
    node.disk.bytes[extents[0]], node.disk.bytes[extents[1]] = keys[1], keys[0]
    ticket = node.load(keys)
    node.run()
    assert ticket.state == "failed"
    assert node.moving.counts.corrupt == 2
    assert [node.tiers(key) for key in keys] == [0, 0]
    assert not node.disk.records
    node.moving.loads.close(ticket)
    node.check()


def test_a_deadline_ends_the_ticket_and_not_the_slot() -> None:
    node = Node()
    (key,) = chain("a", 1)
    node.put([key])
    node.run()
    node.evict_memory(1)
    ticket = node.load([key], seconds=1.0)
    node.take()
    node.now += 1.5
    node.moving.tick(node.now, 0.9)
    assert ticket.state == "failed"
    node.check()
    node.run()
    assert node.tiers(key) == BOTH, "what comes late is in memory like any other block"
    node.check()


def test_a_disk_that_does_not_answer_keeps_nobody_waiting_and_is_used_again_when_it_does() -> None:
    node = Node()
    keys = chain("a", 2)
    node.put(keys)
    node.run()
    node.evict_memory(2)
    waiting = node.load(keys, seconds=60.0)
    node.take()
    node.now += 3.0
    node.moving.tick(node.now, 0.9)
    assert waiting.state == "failed"
    assert "under way" in node.moving.trouble
    assert node.load(keys, seconds=60.0).state == "failed"
    node.run()
    node.moving.tick(node.now, 0.9)
    node.run()
    assert not node.moving.trouble
    node.check()


def test_an_error_puts_the_ssd_out_of_use_until_a_probe_works() -> None:
    node = Node()
    node.put(chain("z", 2))
    node.run()
    node.put(chain("a", 2))
    node.take()
    node.run(error="no space left on device")
    assert "no space left" in node.moving.trouble
    node.put(chain("b", 2))
    node.moving.tick(node.now, 0.9)
    node.run(error="no space left on device")
    assert node.moving.trouble
    node.now += 10
    node.moving.tick(node.now, 0.9)
    node.run()
    assert not node.moving.trouble
    node.put(chain("c", 2))
    node.run()
    assert [node.tiers(key) for key in chain("c", 2)] == [BOTH] * 2
    node.check()


def test_a_block_removed_while_it_is_written_leaves_no_record() -> None:
    node = Node()
    keys = chain("a", 1)
    node.put(keys)
    node.take()  # the file
    node.end(0)
    node.take()
    node.step(0)
    node.memory.remove(node.ns, keys)
    node.end(0)
    node.run()
    assert not node.disk.records
    assert node.tiers(keys[0]) == 0
    node.check()


def test_a_block_removed_while_it_is_read_does_not_come_back() -> None:
    node = Node()
    keys = chain("a", 1)
    node.put(keys)
    node.run()
    node.evict_memory(1)
    ticket = node.load(keys)
    node.take()
    node.step(0)
    assert node.moving.remove_from_disk(node.ns, keys) == 1
    node.end(0)
    assert ticket.state == "failed"
    node.run()
    assert node.tiers(keys[0]) == 0
    assert not node.disk.records
    node.check()


def test_a_record_that_a_write_replaces_is_written_anew_only_after_that_write() -> None:
    """Its deletion, late, would take the new record with it: an acknowledged block would be lost at a restart."""
    node = Node(memory_pages=32, disk_pages=8)
    first, *others = [chain(f"{i}", 1)[0] for i in range(9)]
    node.put([first])
    node.run()
    node.moving.remove_from_disk(node.ns, [first])
    extent = node.moving.writes.forgetting.names[node.moving.link.joined.disk_of[node.ns.id].id, first][0]
    while True:  # until one of them is to be written where the first one was
        node.put([others.pop()])
        (write,) = [move for move in node.take() if isinstance(move, WriteBlock)]
        if write.extent == extent:
            break
    assert write.replaces is not None
    node.run_all_but(write)
    node.moving.writes.offer(node.block(first))
    node.run_all_but(write)
    assert len(node.pending) == 1
    node.run()
    assert node.tiers(first) == BOTH
    node.check()


def test_a_block_stored_again_while_its_old_record_is_deleted_keeps_the_new_one() -> None:
    node = Node()
    keys = chain("a", 1)
    node.put(keys)
    node.run()
    node.memory.remove(node.ns, keys)
    node.moving.remove_from_disk(node.ns, keys)
    node.put(keys)
    node.run()
    assert node.tiers(keys[0]) == BOTH
    assert len(node.disk.records) == 1
    node.check()


def test_hits_and_evict_write_only_what_they_say() -> None:
    node = Node(policy="hits:2")
    keys = chain("a", 2)
    node.put(keys)
    node.run()
    assert not node.disk.records
    for _ in range(2):
        node.now += 1
        node.memory.touch(node.ns.tenant, keys[:1], node.now)
    node.run()
    assert [node.tiers(key) for key in keys] == [BOTH, HOST]
    node = Node(policy="evict", memory_pages=16)
    keys = chain("a", 4)
    node.put(keys)
    node.moving.tick(node.now, 0.9)
    node.run()
    assert not node.disk.records, "there is room enough"
    node.put(chain("b", 12))
    node.moving.tick(node.now, 0.9)
    node.run()
    node.check()
    assert node.disk.records, "what is about to go has been written"
    node.check()


def test_memory_that_is_no_whole_segment_is_no_room_to_grow_in() -> None:
    """With a rest of a few pages beside its segments, a store that writes on eviction never wrote anything."""
    node = Node(policy="evict", memory_pages=18)
    assert node.memory.segments.spare_bytes == 2 * PAGE
    node.put(chain("a", 16))
    node.moving.tick(node.now, 0.9)
    node.run()
    assert node.disk.records
    node.check()


def test_a_durable_put_waits_for_its_record_also_of_what_was_there_before() -> None:
    node = Node(policy="hits:9")
    keys = chain("a", 2)
    node.put(keys)
    said: list[str] = []
    waiter = node.moving.writes.wait_durable(node.ns, keys, lambda waiter: said.append(waiter.why))
    assert not said
    node.run()
    assert said == [""]
    assert not waiter.left
    node.moving.writes.wait_durable(node.ns, keys, lambda waiter: said.append(waiter.why))
    assert said == ["", ""]
    node.check()


def test_a_durable_put_hears_of_the_error() -> None:
    node = Node(policy="hits:9")
    keys = chain("a", 2)
    node.put(keys)
    said: list[str] = []
    node.moving.writes.wait_durable(node.ns, keys, lambda waiter: said.append(waiter.why))
    node.take()
    node.end(0)  # the file
    node.run(error="input/output error")
    assert len(said) == 1
    assert "out of use" in said[0]
    node.check()


def test_prefetches_do_not_evict_what_they_have_just_brought() -> None:
    node = Node(memory_pages=16, disk_pages=64)
    keys = chain("a", 12)
    node.put(keys)
    node.run()
    node.evict_memory(12)
    ticket = node.prefetch(keys)
    node.run()
    assert ticket.state == "done"
    assert ticket.why == "the rest was not tried: half of the memory has been prefetched and not used"
    there = [node.tiers(key) == BOTH for key in keys]
    assert there == [True] * 8 + [False] * 4
    node.memory.touch(node.ns.tenant, keys[:8], node.now + 1)
    node.moving.loads.close(ticket)
    ticket = node.prefetch(keys)
    node.run()
    assert ticket.state == "done"
    node.check()


def test_demand_loads_go_before_prefetches_and_those_before_writes() -> None:
    node = Node(memory_pages=64, disk_pages=128)
    first, second, third = chain("a", 2), chain("b", 2), chain("c", 2)
    node.put(first)
    node.put(second)
    node.put(chain("d", 7))
    node.run()
    node.memory.remove(node.ns, [*first, *second])
    node.put(third)
    node.prefetch(second)
    node.load(first)
    order = [type(move).__name__ + str(getattr(move, "key", b"") in first) for move in node.take()]
    assert order[:4] == ["ReadBlockTrue", "ReadBlockTrue", "ReadBlockFalse", "ReadBlockFalse"]
    assert "WriteBlock" in order[4]


def test_a_prefetch_that_somebody_waits_for_becomes_a_demand_load() -> None:
    node = Node(memory_pages=64, disk_pages=128)
    keys = chain("a", 8)
    node.put(keys)
    node.run()
    node.evict_memory(8)
    node.prefetch(keys)
    ticket = node.load(keys[6:], seconds=1)
    assert [node.moving.loads.loading[node.block(key)].kind for key in keys[6:]] == [Kind.LOAD] * 2
    node.run()
    assert ticket.state == "done"


def test_a_new_life_finds_what_the_last_one_has_written() -> None:
    node = Node(memory_pages=32)
    keys = chain("a", 5)
    node.put(keys)
    node.run()
    node.check()
    node = node.killed(memory_pages=32)
    assert [node.tiers(key) for key in keys] == [SSD] * 5
    node.check()
    ticket = node.load(keys)
    node.run()
    assert ticket.state == "done"
    node.moving.loads.close(ticket)
    node.check()


def test_a_kill_in_the_middle_of_a_write_loses_that_block_alone() -> None:
    node = Node()
    keys = chain("a", 2)
    node.put(keys[:1])
    node.run()
    node.put(keys)
    node.take()
    node.step(0)
    node = node.killed()
    assert [node.tiers(key) for key in keys] == [SSD, 0]
    node.check()


def test_a_namespace_with_another_block_size_is_a_clean_miss_and_its_space_comes_back() -> None:
    node = Node()
    keys = chain("a", 4)
    node.put(keys)
    node.run()
    node = node.killed(restored=False)
    node.memory.namespaces[0].block_bytes = 2 * PAGE  # as if a client had opened it so before the catalogue was read
    node.restore()
    assert not node.disk.records
    assert not node.disk.files
    assert [node.tiers(key) for key in keys] == [0] * 4
    node.check()


@pytest.mark.parametrize("disk_pages", [8, 16])
def test_ten_times_the_limit_leaves_the_limit(disk_pages: int) -> None:
    node = Node(memory_pages=16, disk_pages=disk_pages)
    for i in range(10 * disk_pages):
        node.put(chain(f"{i}", 1))
        node.now += 1
        node.run()
        assert sum(node.disk.files.values()) <= disk_pages * PAGE
    node.check()
    assert len(node.disk.records) >= disk_pages - 8


def test_blocks_of_a_conversation_that_is_away_for_longer_than_usual_are_written_ahead() -> None:
    node = Node(policy="evict", memory_pages=64)
    for number in range(100):
        node.moving.served("default", f"{number}", 100, node.now)
        node.moving.served("default", f"{number}", 100, node.now + 10)
    node.now += 10
    keys = chain("a", 2)
    node.put(keys)
    node.memory.touch(node.ns.tenant, keys, node.now, "mine")
    node.moving.served("default", "mine", 100, node.now)
    node.now += 5
    node.moving.tick(node.now, 0.9)
    node.run()
    assert [node.tiers(key) for key in keys] == [HOST] * 2
    node.now += 20
    node.moving.tick(node.now, 0.9)
    node.run()
    assert [node.tiers(key) for key in keys] == [BOTH] * 2
    assert node.moving.counts.offloaded == 2
    node.check()


def test_a_record_whose_key_is_that_of_an_empty_slot_is_forgotten() -> None:
    """No client can store one; a catalogue may have anything, and the index cannot tell it from a free slot."""
    node = Node()
    (key,) = chain("a", 1)
    node.put([key])
    node.run()
    ((digest, _), record), *_ = node.disk.records.items()
    node.disk.records = {(digest, EMPTY_KEY): record}
    again = node.killed()
    assert not again.store.tenants["default"].rows
    assert not again.disk.records
    again.check()


def test_what_is_read_before_its_parent_waits_for_it_and_evicts_nothing_of_its_chain() -> None:
    """Children placed first would be orphans, and the first to go: 30 blocks were loaded and 15 of them there."""
    node = Node(memory_pages=32, disk_pages=64)
    keys = chain("a", 8)
    node.put(keys)
    node.run()
    node.evict_memory(8)
    node.put(chain("b", 24))
    node.run()
    ticket = node.prefetch(keys[:6])
    node.take()
    while node.pending:
        node.end(len(node.pending) - 1)  # the deepest comes first
        node.check()
        node.take()
    assert (ticket.state, ticket.loaded) == ("done", 6)
    assert [node.tiers(key) for key in keys[:6]] == [BOTH] * 6


def test_what_waits_for_a_parent_that_cannot_be_read_comes_without_it() -> None:
    node = Node(memory_pages=32, disk_pages=64)
    keys = chain("a", 3)
    node.put(keys)
    node.run()
    node.evict_memory(3)
    ticket = node.load(keys)
    node.take()
    node.end(2)
    node.end(1)
    node.check()
    assert node.tiers(keys[2]) == SSD
    node.disk.bytes[node.pending[0].extent] = b"rotten"  # type: ignore[union-attr]
    node.end(0)
    assert [node.tiers(key) for key in keys] == [0, BOTH, BOTH]
    assert ticket.state == "failed"
    node.moving.loads.close(ticket)
    node.run()
    node.check()


def test_a_durable_put_makes_the_queue_leave_out_what_nobody_waits_for() -> None:
    node = Node(memory_pages=64, disk_pages=128, queue_pages=4)
    node.put(chain("b", 12))
    (key,) = chain("a", 1)
    node.put([key])
    said: list[str] = []
    node.moving.writes.wait_durable(node.ns, [key], lambda waiter: said.append(waiter.why))
    node.run()
    assert said == [""]
    node.check()


def test_with_through_what_an_ssd_out_of_use_missed_is_written_when_it_is_back() -> None:
    node = Node(memory_pages=64, disk_pages=128)
    node.put(chain("z", 2))
    node.run()
    node.put(chain("a", 2))
    node.run(error="input/output error")
    node.put(chain("b", 4))
    node.run(error="input/output error")
    node.now += 10
    node.moving.tick(node.now, 0.9)
    node.run()
    assert not node.moving.trouble
    node.moving.tick(node.now, 0.9)
    node.run()
    assert [node.tiers(key) for key in (*chain("a", 2), *chain("b", 4))] == [BOTH] * 6
    assert not node.moving.counts.offloaded
    node.check()
