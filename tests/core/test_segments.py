"""Memory: how the slab is cut, where every byte is at any time, and what a slot can be."""

import pytest

from kvstore.core.block import BlockTable
from kvstore.core.evict import PoolOrder
from kvstore.core.segments import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    DropSegment,
    MakeSegment,
    Pool,
    SegmentTable,
    Slot,
    segment_bytes_for,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("slab", "huge", "expected"),
    [
        (64 << 20, False, 1 << 20),
        (100 << 20, False, (100 << 20) // 64 // PAGE_BYTES * PAGE_BYTES),
        (16 * GIB, False, 256 << 20),
        (256 * GIB, False, 256 << 20),
        (512 * GIB, True, 512 << 20),
        (1 << 40, True, 1 << 30),
        (64 << 20, True, HUGE_PAGE_BYTES),
        (100 << 10, False, PAGE_BYTES),
    ],
)
def test_the_slab_is_cut_in_64_or_1024_whole_pages(slab: int, huge: bool, expected: int) -> None:
    assert segment_bytes_for(slab, huge) == expected


def a_pool(table: SegmentTable, tenant: int = 0, size: int = PAGE_BYTES) -> Pool:
    pool = Pool(tenant, size, size, PoolOrder(BlockTable()))
    table.add_pool(pool)
    return pool


def ready(pages: int = 64) -> SegmentTable:
    table = SegmentTable(pages * PAGE_BYTES, False)
    for job in table.jobs:
        assert isinstance(job, MakeSegment)
        table.made(job.segment)
    table.jobs.clear()
    return table


def total(table: SegmentTable) -> int:
    parts = [s.size_bytes for s in (*table.live.values(), *table.draining.values())]
    return sum(parts) + sum(table.making.values()) + table.spare_bytes


def test_every_byte_is_counted_once_from_the_start() -> None:
    table = SegmentTable(100 * PAGE_BYTES + 5, False)
    assert total(table) == 100 * PAGE_BYTES + 5
    assert len(table.jobs) == 100
    for job in list(table.jobs[:7]):
        table.made(job.segment)
        assert total(table) == 100 * PAGE_BYTES + 5
    table.failed(table.jobs[7].segment)
    assert table.spare_bytes == PAGE_BYTES + 5
    assert total(table) == 100 * PAGE_BYTES + 5


def test_slots_are_granted_filled_quarantined_and_freed() -> None:
    table = ready()
    pool = a_pool(table)
    segment = table.live[1]
    table.assign(segment, pool)
    table.assign(table.live[2], pool)
    first, second = table.take_slots(pool, 2)
    assert (first, second) == (1 << 32, 2 << 32)
    assert not pool.open
    assert table.at(first) == (segment, 0)
    table.fill_slot(first, 7, now=3.0)
    assert (segment.row[0], segment.used, segment.held) == (7, 3.0, 0)
    table.quarantine_slot(second)
    assert table.live[2].state[0] == Slot.QUARANTINED
    table.unquarantine_slot(second)
    table.quarantine_slot(second)
    assert (pool.granted, pool.quarantined, pool.blocks, pool.free) == (0, 1, 1, 0)
    table.free_slot(second)
    table.free_slot(first)
    assert (pool.quarantined, pool.free) == (0, 2)
    assert segment.used == 0, "an empty segment is the first to go to another block size"


def test_a_slot_is_not_freed_twice_or_filled_unless_granted() -> None:
    table = ready()
    pool = a_pool(table)
    table.assign(table.live[1], pool)
    (ref,) = table.take_slots(pool, 1)
    table.free_slot(ref)
    with pytest.raises(AssertionError, match="freed twice"):
        table.free_slot(ref)
    with pytest.raises(AssertionError, match="filled in state"):
        table.fill_slot(ref, 1, 0.0)
    with pytest.raises(AssertionError, match="quarantined in state"):
        table.quarantine_slot(ref)
    with pytest.raises(AssertionError, match="in state"):
        table.unquarantine_slot(ref)
    with pytest.raises(AssertionError, match="2 slots asked of 1 free"):
        table.take_slots(pool, 2)


def test_references_from_outside_are_known_or_not() -> None:
    table = ready()
    table.assign(table.live[1], a_pool(table))
    assert table.known(1 << 32)
    assert not table.known(1 << 32 | 1)
    assert not table.known(999 << 32)
    assert not table.known(0)


def test_a_segment_never_changes_tenant() -> None:
    table = ready()
    table.assign(table.live[1], a_pool(table, tenant=0))
    with pytest.raises(AssertionError, match="never changes tenant"):
        table.assign(table.live[1], a_pool(table, tenant=1))


def test_a_segment_with_something_held_neither_moves_nor_goes() -> None:
    table = ready()
    pool = a_pool(table)
    table.assign(table.live[1], pool)
    table.take_slots(pool, 1)
    with pytest.raises(AssertionError, match="with 1 held slots"):
        table.drop(table.live[1])
    with pytest.raises(AssertionError, match="with 1 held slots"):
        table.assign(table.live[1], a_pool(table, size=2048))


def test_a_dropped_segment_is_spare_only_when_all_who_had_it_have_unmapped_it() -> None:
    table = ready()
    table.assign(table.live[1], a_pool(table))
    table.live[1].sessions |= {3, 4}
    table.drop(table.live[1])
    assert table.jobs == [DropSegment(1)]
    assert (table.spare_bytes, table.drain_bytes) == (0, PAGE_BYTES)
    table.forget_session(3, [1])
    table.forget_session(3, [1, 99])
    assert table.spare_bytes == 0
    table.forget_session(4)
    assert (table.spare_bytes, table.drain_bytes) == (PAGE_BYTES, 0)
    assert total(table) == table.size_bytes


def test_a_segment_in_use_stays_mapped_by_whoever_says_otherwise() -> None:
    table = ready()
    table.live[1].sessions.add(3)
    table.forget_session(3, [1])
    assert table.live[1].sessions == {3}
    table.forget_session(3)
    assert table.live[1].sessions == set()


def test_what_waits_for_a_session_that_will_never_answer_is_not_on_its_way() -> None:
    table = ready()
    table.live[1].sessions |= {3, 4}
    table.drop(table.live[1])
    table.silent.add(4)
    assert table.drain_bytes == 0
    table.forget_session(4)
    assert table.drain_bytes == PAGE_BYTES
    assert table.silent == set()


def test_tenant_bytes_are_all_that_others_do_not_own() -> None:
    table = ready(64)
    assert table.tenant_bytes(0) == 64 * PAGE_BYTES
    mine, other = a_pool(table, 0), a_pool(table, 1)
    for number in (1, 2, 3):
        table.assign(table.live[number], other)
    table.assign(table.live[4], mine)
    assert table.tenant_bytes(0) == 61 * PAGE_BYTES
    assert table.tenant_bytes(1) == 63 * PAGE_BYTES
    assert table.tenant_bytes(2) == 60 * PAGE_BYTES
    table.drop(table.live[1])
    assert table.tenant_bytes(0) == 62 * PAGE_BYTES


def test_a_segment_made_on_request_goes_to_who_asked() -> None:
    table = ready()
    large = a_pool(table, size=5 * PAGE_BYTES)
    assert table.want(large)
    assert table.want(large), "one is being made already"
    jobs = [job for job in table.jobs if isinstance(job, MakeSegment)]
    assert [job.size_bytes for job in jobs] == [5 * PAGE_BYTES]
    assert len([job for job in table.jobs if isinstance(job, DropSegment)]) == 5
    assert table.coming(large)
    assert not table.coming(a_pool(table))
    table.made(jobs[0].segment)
    assert (large.slots, large.free) == (1, 1)
    assert total(table) == table.size_bytes


def test_memory_that_is_not_there_yet_is_made_when_it_has_come_back() -> None:
    table = ready(4)
    pool, large = a_pool(table), a_pool(table, size=4 * PAGE_BYTES)
    for number in list(table.live):
        table.assign(table.live[number], pool)
        table.live[number].sessions.add(9)
        table.drop(table.live[number])
    assert not table.want(large)
    assert list(table.awaited) == [large]
    table.forget_session(9, [1, 2, 3])
    assert not table.making
    table.forget_session(9, [4])
    assert list(table.making.values()) == [4 * PAGE_BYTES]
    assert not table.awaited
