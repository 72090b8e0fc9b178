"""What clients do to both tiers at once, in the core: removals before all is known, clearing, pins, durable blocks."""

from collections.abc import Sequence

from kvstore.core import link
from kvstore.core.block import PINNED
from kvstore.core.durable import Durable
from kvstore.core.moves import WriteBlock
from kvstored.v1.shm import HOST, SSD
from tests.core.scene import chain
from tests.core.ssd_scene import PAGE, Node


def on_disk_only(node: Node, keys: Sequence[bytes]) -> None:
    """Stores blocks and evicts them from memory."""
    node.put(keys)
    node.run()
    node.evict_memory(len(keys))
    assert [node.tiers(key) for key in keys] == [SSD] * len(keys)


def clear(node: Node) -> tuple[int, int]:
    """All of the first namespace on the SSD, in steps of two rows: copies, and blocks that were nowhere else."""
    at: int | None = 0
    copies = only = 0
    while at is not None:
        at, more, alone = node.moving.clear_step(node.ns, at, 2)
        copies, only = copies + more, only + alone
    return copies, only


def test_what_is_removed_before_its_record_was_met_does_not_come_back() -> None:
    before, keys = Node(), chain("a", 4)
    on_disk_only(before, keys)
    node = Node(before.disk, restored=False)
    assert node.moving.remove_from_disk(node.ns, keys[2:]) == 0  # nobody knows them yet
    node.restore()
    assert [node.tiers(key) for key in keys] == [SSD, SSD, 0, 0]
    assert node.moving.link.removals.has(node.ns, keys[3]), "until all is known: records may be read once more"
    node.check()
    # What comes later under the same keys is not touched by it.
    node.put(keys)
    node.run()
    assert [node.tiers(key) for key in keys] == [HOST | SSD] * 4


def test_a_namespace_cleared_before_its_records_were_met_stays_empty() -> None:
    before, keys = Node(), chain("a", 4)
    on_disk_only(before, keys)
    node = Node(before.disk, restored=False)
    other = node.namespace("other", PAGE)
    assert clear(node) == (0, 0)
    node.moving.remove_from_disk(other, keys)
    node.restore()
    assert [node.tiers(key) for key in keys] == [0] * 4
    node.check()


def test_more_removals_than_are_remembered_clear_their_namespaces() -> None:
    removals, node = link.Removals(), Node()
    other = node.namespace("other", PAGE)
    removals.remove(node.ns, chain("a", link.REMOVALS_MAX))
    assert not removals.has(other, chain("a", 1)[0])
    assert not removals.has(node.ns, chain("b", 1)[0])
    removals.remove(node.ns, chain("c", 1))
    assert removals.has(node.ns, chain("b", 1)[0]), "one too many: all of that namespace is as removed"
    assert not removals.has(other, chain("a", 1)[0])
    removals.forget()
    assert not removals.has(node.ns, chain("a", 1)[0])


def test_what_goes_everywhere_goes_in_namespaces_that_come_later_too() -> None:
    removals, node, (a, b) = link.Removals(), Node(), chain("a", 2)
    removals.everywhere(node.ns.tenant, [a])
    later = node.namespace("later", PAGE)
    stranger = node.memory.open_namespace(node.memory.tenant("stranger"), chain("s", 1)[0], PAGE, "")
    assert [removals.has(space, key) for space in (later, stranger) for key in (a, b)] == [True, False, False, False]
    removals.everywhere(node.ns.tenant, chain("c", link.REMOVALS_MAX))
    assert removals.has(later, b), "one too many: all of that tenant is as removed"
    assert not removals.has(stranger, a)
    removals.everywhere(None, None)
    assert removals.has(stranger, a)
    removals.forget()
    assert not removals.has(stranger, a)
    assert not removals.has(later, a)


def test_a_block_removed_from_both_tiers_counts_once_however_often_it_is_named() -> None:
    node, keys = Node(), chain("a", 4)
    on_disk_only(node, keys)
    node.put(keys[:2])
    assert node.moving.remove_from_disk(node.ns, [*keys, *keys]) == 2
    assert node.memory.remove(node.ns, [*keys, *keys]) == 2
    node.run()
    assert [node.tiers(key) for key in keys] == [0] * 4
    node.check()


def test_clearing_takes_one_namespace_and_tells_what_was_on_the_ssd_alone() -> None:
    node, keys = Node(), chain("a", 4)
    other, kept = node.namespace("other", PAGE), chain("b", 2)
    on_disk_only(node, keys)
    node.put(kept, other)
    node.put(keys[:1])
    node.run()
    assert clear(node) == (4, 3)
    assert [node.tiers(key) for key in keys] == [HOST, 0, 0, 0]
    assert [node.tiers(key, other) for key in kept] == [HOST | SSD] * 2
    node.run()
    node.check()


def test_pins_keep_copies_on_the_ssd_and_count_each_block_once() -> None:
    node, keys = Node(), chain("a", 4)
    on_disk_only(node, keys)
    node.put(keys[:1])
    in_memory = node.memory.pin(node.ns, keys, 60.0, node.now)
    assert in_memory + node.moving.pin_on_disk(node.ns, keys, 60.0, node.now) == 4
    marks = node.store.table.marks
    assert all(marks[node.moving.link.disk_row(node.block(key))] & PINNED for key in keys)
    node.check()
    assert node.moving.unpin_on_disk(node.ns, keys) + node.memory.unpin(node.ns, keys) == 4
    assert node.moving.unpin_on_disk(node.ns, keys) + node.memory.unpin(node.ns, keys) == 0
    node.check()


def test_a_block_that_somebody_waits_for_is_not_evicted_before_it_is_written() -> None:
    """The tail of a chain is what is evicted first, and what a durable put has just stored."""
    node, keys, ended = Node(memory_pages=16, policy="hits:9"), chain("a", 4), list[Durable]()
    node.put(keys)
    waiter = node.moving.writes.wait_durable(node.ns, keys, ended.append)
    assert len(waiter.left) == 4
    node.evict_memory(16)
    # An eighth of the memory, and one, is held for it; what is not held may go, and is said to have gone.
    kept = [key for key in keys if node.tiers(key)]
    assert kept == keys[:3]
    node.run()
    assert [waiter.why for waiter in ended] == ["a block was evicted before it was written"]
    assert [node.tiers(key) for key in kept] == [HOST | SSD] * 3
    assert not node.memory.pool(node.ns).leased, "held until it was written, and no longer"
    node.check()


def test_who_waits_no_more_holds_nothing() -> None:
    node, keys = Node(policy="hits:9"), chain("a", 2)
    node.put(keys)
    first = node.moving.writes.wait_durable(node.ns, keys, lambda _: None)
    second = node.moving.writes.wait_durable(node.ns, keys[:1], lambda _: None)
    assert node.memory.pool(node.ns).leased == 2
    node.moving.writes.forget_waiter(first)
    assert node.memory.pool(node.ns).leased == 1
    node.moving.writes.forget_waiter(second)
    assert node.memory.pool(node.ns).leased == 0
    node.check()


def test_a_block_removed_while_it_is_kept_for_the_ssd_is_gone_and_leaves_nothing_held() -> None:
    node, keys, ended = Node(policy="hits:9"), chain("a", 1), list[Durable]()
    node.put(keys)
    node.moving.writes.wait_durable(node.ns, keys, ended.append)
    node.memory.remove(node.ns, keys)
    assert node.tiers(keys[0]) == 0
    node.check()
    node.run()
    assert [bool(waiter.why) for waiter in ended] == [True]
    assert not any(isinstance(job, WriteBlock) for job in node.pending)
    pool = node.memory.pool(node.ns)
    assert (pool.leased, pool.doomed) == (0, 0)
    node.check()


def test_a_troubled_ssd_lets_go_of_what_was_kept_for_it() -> None:
    node, keys, ended = Node(policy="hits:9"), chain("a", 2), list[Durable]()
    node.put(keys)
    node.moving.writes.wait_durable(node.ns, keys, ended.append)
    node.moving.link.go_out_of_use("a test says so")
    assert "out of use" in ended[0].why
    assert node.memory.pool(node.ns).leased == 0
    node.check()


def test_who_wants_what_is_being_read_for_others_asks_for_no_more_memory() -> None:
    """Found by fifty clients of one prefix: what was under way counted once more for each of them."""
    node, keys = Node(memory_pages=32), chain("a", 8)  # 8 blocks are all that may be held
    on_disk_only(node, keys)
    first = node.load(keys)
    node.take()
    others = [node.load(keys) for _ in range(5)]
    node.run()
    assert [(ticket.state, len(ticket.held), ticket.why) for ticket in (first, *others)] == [("done", 8, "")] * 6
    assert node.moving.counts.loaded == 8
    late = node.load(keys)
    assert (late.state, len(late.held)) == ("done", 8), "and what is held already"
    for ticket in (first, *others, late):
        node.moving.loads.close(ticket)
    assert not node.memory.pool(node.ns).leased
    node.check()
