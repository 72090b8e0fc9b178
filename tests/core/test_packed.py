"""Room on the SSD in bytes: the coldest go ahead of a write, and what slots have left is garbage once it is deleted."""

import random

import pytest

from kvstore.core import packed as packed_module
from kvstore.core.moves import ForgetRecords, VacateSlots, VerifyBlock, WriteBlock
from kvstore.core.packed import EVICT_MAX
from kvstore.core.schedule import WRITES_MAX
from kvstore.core.verify import blocks_step
from kvstored.v1.shm import HOST, SSD
from tests.core.scene import chain
from tests.core.ssd_scene import PAGE, Node

THIRD = PAGE // 3
ON_ITS_WAY = WRITES_MAX * (PAGE - THIRD)


def packed(**settings: int) -> Node:
    """A node on whose SSD there is room for the bytes of eight slots, in 24 slots."""
    settings = {"packed_pages": 8, "memory_pages": 64, **settings}
    return Node(**settings)  # type: ignore[arg-type]


def test_blocks_are_as_many_as_their_bytes_let_there_be_not_as_slots() -> None:
    for size_bytes, blocks in ((THIRD, 24), (PAGE, 8), (0, 8)):
        node = packed()
        node.packed_bytes = size_bytes
        node.put(chain("a", 40))
        node.run()
        there = len(node.disk.records)
        assert blocks - 1 <= there <= blocks
        assert node.moving.link.packed.bytes == there * (size_bytes or PAGE)
        node.check()


def test_the_coldest_go_and_before_the_write_begins() -> None:
    node = packed()
    node.packed_bytes = PAGE
    for name in "abcdefgh":
        node.put(chain(name, 1))
        node.run()
        node.now += 1
    node.moving.touch(node.ns.tenant, chain("a", 1), node.now)
    node.put(chain("new", 1))
    (write,) = [job for job in node.take() if isinstance(job, WriteBlock)]
    assert node.tiers(chain("b", 1)[0]) == HOST, "the coldest is not gone while the new one is being written"
    node.run()
    assert write.number
    assert {key for _, key in node.disk.records} == {chain(name, 1)[0] for name in [*"acdefgh", "new"]}
    node.check()


def test_what_is_known_of_sizes_outlives_a_restart() -> None:
    node = packed()
    node.packed_bytes = THIRD
    node.put(chain("a", 20))
    node.run()
    again = node.killed(packed_pages=8, memory_pages=64)
    assert again.moving.link.packed.bytes == 20 * THIRD
    again.packed_bytes = PAGE
    for name in "bcde":
        again.put(chain(name, 1))
        again.run()
    assert again.moving.link.packed.bytes <= 8 * PAGE + PAGE - THIRD
    assert sum(again.moving.link.packed._sizes) == again.moving.link.packed.bytes
    again.check()


def test_a_slot_that_is_being_vacated_is_written_again_only_after_its_report() -> None:
    node = packed(disk_pages=16, packed_pages=8)
    node.packed_bytes = PAGE
    node.put(chain("a", 4))
    node.run()
    node.moving.remove_from_disk(node.ns, chain("a", 4))
    node.take()
    (vacate,) = [job for job in node.pending if isinstance(job, VacateSlots)]
    assert len(vacate.slots) == 4, "they are not told together"
    forget = next(n for n, job in enumerate(node.pending) if isinstance(job, ForgetRecords))
    assert forget < node.pending.index(vacate), "payload would go before its record"
    node.put(chain("b", 1))
    node.run_all_but(vacate)
    assert not node.moving.writes.under_way
    assert node.moving.writes.is_coming(node.block(chain("b", 1)[0]))
    node.run()
    assert [key for _, key in node.disk.records] == chain("b", 1)
    node.check()


def test_slots_taken_again_at_once_are_not_vacated_and_those_of_failed_writes_are() -> None:
    node = packed(disk_pages=8, packed_pages=8)
    node.packed_bytes = PAGE
    node.put(chain("a", 8))
    node.run()
    node.put(chain("b", 1))
    moves = node.take()
    assert not [job for job in moves if isinstance(job, VacateSlots)]
    node.run(error="no")
    node.moving.probed("")
    node.run()
    assert set(node.disk.bytes) == {extent for extent, *_ in node.disk.records.values()}
    node.check()


def test_the_slot_of_a_block_that_leaves_while_it_is_read_is_vacated_when_the_read_is_over() -> None:
    node, keys = packed(), chain("a", 1)
    node.put(keys)
    node.run()
    found: list[tuple[int, tuple[int, bytes]]] = []
    blocks_step(node.store, 0, 1000, found, 1)
    node.moving.verification.ask(found, lambda _: None)
    (verify,) = [job for job in node.take() if isinstance(job, VerifyBlock)]
    node.moving.remove_from_disk(node.ns, keys)
    node.run_all_but(verify)
    assert set(node.disk.bytes) == {verify.extent}, "vacated under who reads it"
    node.run()
    assert not node.disk.bytes
    node.check()


def test_what_a_segment_had_is_vacated_also_where_it_was_cut_anew_and_nothing_was_written_to_it() -> None:
    node = packed(disk_pages=4)
    two = node.namespace("two", 2 * PAGE)
    node.put(chain("a", 1))
    node.run()
    node.memory.remove(node.ns, chain("a", 1))
    node.moving.remove_from_disk(node.ns, chain("a", 1))
    node.put(chain("b", 1), two)
    node.take()
    forget, vacate, write = node.pending
    assert isinstance(forget, ForgetRecords)
    assert isinstance(vacate, VacateSlots)
    assert isinstance(write, WriteBlock)
    node.end(0)
    node.end(0, "no")
    node.memory.remove(two, chain("b", 1))
    node.moving.remove_from_disk(two, chain("b", 1))
    node.end(0, "no")
    assert set(node.disk.bytes) == {vacate.slots[0][0]}, "this is about what is still there"
    node.moving.probed("")
    node.run()
    assert not node.disk.bytes
    node.check()


def test_nothing_begins_beyond_what_was_allowed_and_what_shrank_is_given_back() -> None:
    node = packed()
    node.packed_bytes = THIRD
    packing = node.moving.link.packed
    node.put(chain("first", 1))
    node.run()
    packing.allow(2 * PAGE, packing.mark())
    node.put(chain("a", 6))
    writes = [job for job in node.take() if isinstance(job, WriteBlock)]
    assert len(writes) == 2
    before = packing.mark()
    assert before == (2 * PAGE, 3 * PAGE)
    node.run()
    assert len(node.disk.records) == 1 + 4, "what the first ones did not take was not given back"
    packing.allow(PAGE, before)
    assert packing.may_begin == PAGE - 2 * PAGE - 2 * PAGE
    assert not node.take()
    packing.allow(6 * PAGE, packing.mark())
    node.run()
    assert len(node.disk.records) == 7
    node.check()


def test_a_limit_that_falls_far_is_met_in_bounded_steps_and_the_write_waits_for_it() -> None:
    node = packed(disk_pages=512, packed_pages=400, memory_pages=512)
    node.packed_bytes = PAGE
    for n in range(250):
        node.put(chain(f"old {n}", 1))
        node.run()
    packing = node.moving.link.packed
    assert packing.bytes == 250 * PAGE
    packing.limit_bytes = packing.most_bytes = 50 * PAGE
    before = node.store.counts.evicted
    node.put(chain("new", 1))
    node.take()
    assert 0 < node.store.counts.evicted - before <= EVICT_MAX
    node.run()
    node.run()
    node.run()
    assert node.moving.counts.writes_dropped == 0
    assert node.tiers(chain("new", 1)[0]) & SSD
    assert packing.bytes <= 50 * PAGE
    node.check()


def test_where_others_have_taken_the_room_only_as_much_goes_as_comes() -> None:
    node = packed(disk_pages=512, packed_pages=400, memory_pages=512)
    node.packed_bytes = PAGE
    for n in range(100):
        node.put(chain(f"old {n}", 1))
        node.run()
    packing = node.moving.link.packed
    packing.limit_bytes = 0
    before = node.store.counts.evicted
    for n in range(10):
        node.put(chain(f"new {n}", 1))
        node.run()
    assert node.store.counts.evicted - before == 10
    assert packing.bytes == 100 * PAGE
    assert all(node.tiers(chain(f"new {n}", 1)[0]) & SSD for n in range(10))
    node.check()


def test_small_blocks_go_for_a_large_one_in_steps_and_no_more_of_them_than_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_module, "EVICT_MAX", 2)
    node = packed(disk_pages=512, packed_pages=64, memory_pages=96)
    large = node.namespace("large", 4 * PAGE)
    node.packed_bytes = PAGE
    for n in range(30):
        node.put(chain(f"old {n}", 1))
        node.run()
    node.moving.link.packed.limit_bytes = 0
    before = node.store.counts.evicted
    node.packed_bytes = 4 * PAGE
    node.put(chain("large", 1), large)
    node.take()
    assert node.store.counts.evicted - before == 2, "one step"
    for _ in range(4):
        node.run()
    assert node.tiers(chain("large", 1)[0], large) & SSD
    assert node.store.counts.evicted - before == 4
    node.check()


def test_a_tenant_keeps_an_equal_share_of_the_bytes() -> None:
    node = packed(disk_pages=48)
    node.packed_bytes = PAGE
    node.put(chain("a", 8))
    node.run()
    other = node.memory.open_namespace(node.memory.tenant("other"), bytes(range(32)), PAGE, "other")
    node.now += 1
    node.session = node.memory.open_session(
        other.tenant, "other", node.now, local=True, read_only=False, pid=8, nonce=8
    )
    node.put(chain("b", 12), other)
    node.run()
    have = {tenant.name: len(tenant.rows) for tenant in node.store.tenants.values()}
    assert have == {"default": 4, "other": 4}
    node.check()


def test_a_block_that_is_too_large_for_any_step_is_dropped_and_does_not_wait() -> None:
    node = packed(packed_block_pages=2, disk_pages=64)
    large = node.namespace("large", 4 * PAGE)
    node.put(chain("a", 1), large)
    node.run()
    assert node.moving.counts.writes_dropped == 1
    assert not node.moving.writes.is_coming((large.id, chain("a", 1)[0]))


@pytest.mark.parametrize("seed", range(20))
def test_the_sum_is_that_of_the_blocks_and_slots_without_one_are_empty_whatever_happens(seed: int) -> None:
    chance, node = random.Random(seed), packed(disk_pages=32, packed_pages=8)
    keys = chain("k", 1) + [chain(f"k{n}", 1)[0] for n in range(30)]
    for _ in range(300):
        node.packed_bytes = chance.choice((THIRD, PAGE // 2, PAGE))
        what = chance.random()
        if what < 0.5:
            node.put([chance.choice(keys)])
        elif what < 0.6:
            node.moving.remove_from_disk(node.ns, [chance.choice(keys)])
        elif what < 0.7:
            node.memory.remove(node.ns, [chance.choice(keys)])
        elif what < 0.75:
            node.moving.link.packed.allow(chance.choice((0, PAGE, 8 * PAGE)), node.moving.link.packed.mark())
        node.take()
        if node.pending and what > 0.4:
            node.end(chance.randrange(len(node.pending)), "no" if chance.random() < 0.05 else "")
        if node.moving.trouble and chance.random() < 0.5:
            node.moving.probed("")
        node.now += 1
        packing = node.moving.link.packed
        assert packing.bytes <= 8 * PAGE + ON_ITS_WAY, "more than was expected of what is on its way"
    node.moving.link.packed.allow(float("inf"), node.moving.link.packed.mark())
    node.moving.probed("")
    node.run()
    node.check()
    packing = node.moving.link.packed
    assert packing.mark()[0] == 0
    assert packing.bytes == sum(packing._sizes)
    assert set(node.disk.bytes) == {extent for extent, *_ in node.disk.records.values()}, "garbage that nobody deletes"
