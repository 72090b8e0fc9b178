"""What movement keeps stays bounded, and what waits for the SSD to be opened is not lost."""

import pytest

from kvstore.core.link import OPENING
from kvstore.core.loads import DEADLINES_SPARE
from kvstore.core.segments import MakeSegment
from tests.core.scene import chain
from tests.core.ssd_scene import UNWELL, Node


def test_tickets_that_ended_long_before_their_deadline_are_not_kept_until_then() -> None:
    node = Node()
    keys = chain("a", 2)
    node.put(keys)
    node.run()
    node.evict_memory(2)
    for _ in range(4 * DEADLINES_SPARE):
        node.moving.loads.close(node.load(keys, seconds=600.0))
    assert len(node.moving.loads._deadlines) <= DEADLINES_SPARE + 2
    node.check()


def test_what_is_stored_while_the_ssd_is_being_opened_is_written_when_it_is_open() -> None:
    node = Node()
    node.moving.link.trouble = OPENING
    keys = chain("a", 3)
    node.put(keys)
    assert node.moving.link.counts.writes_dropped == 0
    node.moving.link.trouble = ""
    node.run()
    assert node.moving.link.counts.written == 3
    node.check()


def test_a_payload_that_files_do_not_bound_is_written_no_further_and_made_less() -> None:
    node = Node(memory_pages=64, disk_pages=128)
    node.put(chain("a", 20))
    node.run()
    node.moving.make_less("no more is free", evict=False)
    node.run()
    assert len(node.disk.records) == 20
    node.moving.make_less("no more is free", evict=True)
    node.run()
    assert node.moving.link.no_file == "no more is free"
    assert len(node.disk.records) == 19
    node.put(chain("b", 4))
    node.run()
    assert len(node.disk.records) == 19
    said: list[str] = []
    node.moving.writes.wait_durable(node.ns, chain("b", 2), lambda waiter: said.append(waiter.why))
    assert said == []
    node.moving.make_less("no more is free", evict=False)
    assert said == ["no room on the SSD: no more is free"], "somebody waits for what is not written"
    node.moving.make_less("", evict=False)
    node.run()
    assert not node.moving.link.no_file
    assert len(node.disk.records) == 21, "what nobody waits for is written when there is room again"
    node.check()


@pytest.mark.parametrize(("error", "left"), [(UNWELL, 4), ("no room", 0)])
def test_a_file_that_a_fault_of_the_disk_kept_from_being_made_costs_no_block_on_it(error: str, left: int) -> None:
    """Found here: an input/output error was taken for a full disk, and blocks were evicted for those that failed."""
    node = Node(memory_pages=64, disk_pages=32)
    first, then = chain("a", 4), chain("b", 4)
    node.put(first)
    node.run()
    node.put(then)
    node.take()
    (making,) = [n for n, job in enumerate(node.pending) if isinstance(job, MakeSegment)]
    node.end(making, error)
    node.run()
    found = {key for _, key in node.disk.records}
    assert len(found & set(first)) == left
    assert bool(node.moving.link.trouble) == bool(left)
    node.moving.link.trouble = ""  # as a probe that went well says
    node.moving.tick(node.now, 0.0)
    node.put(chain("c", 4))
    node.run()
    found = {key for _, key in node.disk.records}
    assert len(found & set(first)) == left, "evicted while a file was being made"
    assert len(found) == (12 if left else 4), "what was given up is written when the disk is well"
    node.check()


def test_a_record_that_is_not_its_own_is_told_by_key_and_place() -> None:
    node = Node()
    (key,) = chain("a", 1)
    node.put([key])
    node.run()
    node.evict_memory(1)
    extent = node.store.table.place[node.moving.link.disk_row(node.block(key))]
    node.disk.bytes[extent] = b"rotten"
    told: list[tuple[bytes, int]] = []
    node.moving.link.on_corrupt = lambda key, extent: told.append((key, extent))
    node.moving.loads.close(node.load([key]))
    node.load([key])
    node.run()
    assert told == [(key, extent)]
