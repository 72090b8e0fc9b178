"""Evictions that an administrator asks for, with an SSD: gone everywhere, or from one tier alone."""

from dataclasses import replace

from kvstore.core.reclaim import Both, InMemory, OnSsd, Reclaimed, Tiers
from kvstored.v1.shm import HOST, SSD
from tests.core.scene import chain
from tests.core.ssd_scene import PAGE, Node

BOTH = HOST | SSD


def stored(count: int = 4) -> tuple[Node, list[bytes]]:
    """Blocks in both tiers, the last of them on the SSD alone."""
    node, keys = Node(), chain("a", count)
    node.put(keys)
    node.run()
    node.evict_memory(1)
    assert [node.tiers(key) for key in keys] == [BOTH] * (count - 1) + [SSD]
    return node, keys


def being_written() -> tuple[Node, list[bytes]]:
    """A file with room, and two blocks on their way to it."""
    node, keys = Node(), chain("a", 2)
    node.put(chain("first", 1))
    node.run()
    node.put(keys)
    node.take()
    assert len(node.moving.writes.under_way) == 2
    return node, keys


def evict_all(node: Node, tiers: Tiers, done: Reclaimed | None = None) -> Reclaimed:
    done = done or Reclaimed()
    for walk in tiers.rows_steps(None, node.ns):
        at: int | None = 0
        while at is not None:
            at = walk(at, 2, done)
    return tiers.sums(done)


def test_a_namespace_is_gone_everywhere_and_does_not_come_back_with_a_crash() -> None:
    node, keys = stored()
    done = evict_all(node, Both(node.moving.link))
    assert (done.blocks, done.ssd_blocks, done.held) == (3, 4, 0)
    assert done.ssd_bytes == 4 * PAGE
    node.run()
    assert [node.tiers(key) for key in keys] == [0] * 4
    node.check()
    again = node.killed()
    assert [again.tiers(key) for key in keys] == [0] * 4


def test_memory_alone_leaves_the_copies_on_the_ssd() -> None:
    node, keys = stored()
    done = evict_all(node, InMemory(node.memory))
    assert (done.blocks, done.ssd_blocks) == (3, 0)
    assert [node.tiers(key) for key in keys] == [SSD] * 4
    node.check()


def test_the_ssd_alone_leaves_the_copies_in_memory() -> None:
    node, keys = stored()
    done = evict_all(node, OnSsd(node.moving.link))
    assert (done.blocks, done.ssd_blocks) == (0, 4)
    node.run()
    assert [node.tiers(key) for key in keys] == [HOST] * 3 + [0]
    node.check()


def test_a_leased_block_stays_in_both_tiers_and_is_counted_once() -> None:
    node, keys = stored()
    node.memory.acquire(node.session, node.ns, keys[:1], node.now)
    done = evict_all(node, Both(node.moving.link))
    assert (done.blocks, done.ssd_blocks, done.held, done.leased, done.pinned) == (2, 3, 1, 1, 0)
    assert [node.tiers(key) for key in keys] == [BOTH, 0, 0, 0]
    node.run()
    node.check()


def test_a_block_that_is_pinned_on_the_ssd_alone_stays() -> None:
    node, keys = stored()
    node.moving.pin_on_disk(node.ns, keys[3:], 60.0, node.now)
    done = evict_all(node, Both(node.moving.link))
    assert (done.blocks, done.ssd_blocks, done.held, done.pinned) == (3, 3, 1, 1)
    assert node.tiers(keys[3]) == SSD
    node.run()
    node.check()


def test_what_is_being_written_goes_too_and_its_record_does_not_stay() -> None:
    node, keys = being_written()
    done = evict_all(node, Both(node.moving.link))
    assert (done.blocks, done.held) == (3, 0), "a write under way is nobody who holds a block"
    node.run()
    assert [node.tiers(key) for key in keys] == [0] * 2
    assert not node.disk.records
    node.check()


def test_what_is_being_loaded_does_not_come_after_it_was_evicted() -> None:
    node, keys = stored()
    ticket = node.load(keys)
    node.take()
    done = evict_all(node, Both(node.moving.link))
    assert (done.held, done.ssd_blocks) == (0, 4)
    node.run()
    assert ticket.state == "failed"
    assert [node.tiers(key) for key in keys] == [0] * 4
    node.moving.loads.close(ticket)
    node.check()


def test_of_memory_alone_what_is_being_written_stays_and_is_written() -> None:
    node, keys = being_written()
    done = evict_all(node, InMemory(node.memory))
    assert (done.blocks, done.leased) == (1, 2)
    node.run()
    assert [node.tiers(key) for key in keys] == [BOTH] * 2


def test_keys_are_absent_where_no_tier_that_was_asked_has_them() -> None:
    tiers: list[type[Tiers]] = [OnSsd, Both]
    for kind, expected in zip(tiers, [(0, 4, 1), (3, 4, 1)], strict=True):
        node, keys = stored()
        done = Reclaimed()
        where = kind(node.moving.link)  # type: ignore[call-arg]
        where.keys_step(node.ns.tenant, [*keys, *chain("none", 1)], done)
        done = where.sums(done)
        assert (done.blocks, done.ssd_blocks, done.absent) == expected
        node.run()
        node.check()


def test_bytes_are_freed_in_the_tier_that_is_named() -> None:
    node, keys = stored()
    memory, ssd, done = InMemory(node.memory), OnSsd(node.moving.link), Reclaimed()
    while memory.bytes_step(None, 2 * PAGE, 1, done):
        pass
    assert replace(done, size_bytes=0) == Reclaimed(blocks=2)
    assert [node.tiers(key) for key in keys].count(SSD) == 3
    done = Reclaimed()
    while ssd.bytes_step(None, PAGE, 1, done):
        pass
    assert ssd.sums(done).ssd_blocks == 1
    node.run()
    node.check()
