"""An SSD that takes no writes: nobody waits for it, a queue is not taken for it, and it is used when it answers."""

from kvstore.core.movement import PROBE_S, SILENT_WRITE_S
from kvstore.core.moves import ProbeTier, WriteBlock
from kvstore.core.schedule import Kind
from kvstored.v1.shm import HOST, SSD
from tests.core.scene import chain
from tests.core.ssd_scene import Node


def writing(keys: list[bytes]) -> Node:
    """A node whose SSD has begun to write these."""
    node = Node()
    node.put(keys)
    while not any(isinstance(job, WriteBlock) for job in node.take()):
        node.end(0)
    return node


def test_a_write_that_hangs_puts_the_ssd_out_of_use_until_it_ends_and_a_probe_works() -> None:
    keys = chain("a", 3)
    node = writing(keys)
    ended: list[str] = []
    node.moving.writes.wait_durable(node.ns, keys, lambda waiter: ended.append(waiter.why))
    began = node.now
    node.now += SILENT_WRITE_S - 0.1
    node.moving.tick(node.now, 0.9, (began, "a sync"))
    assert not node.moving.trouble, "slow, but not for so long"
    assert not ended
    node.now += 0.2
    node.moving.tick(node.now, 0.9, (began, "a sync"))
    assert "a sync has been under way" in node.moving.trouble
    assert len(ended) == 1
    assert "a sync has been under way" in ended[0]
    node.moving.writes.wait_durable(node.ns, keys, lambda waiter: ended.append(waiter.why))
    assert len(ended) == 2, "who comes later waits for a write that may never end"
    assert ended[1]
    node.now += 10 * PROBE_S
    node.moving.tick(node.now, 0.9, (began, "a sync"))
    assert not any(isinstance(job, ProbeTier) for job in node.take()), "a probe would wait behind it"
    node.check()
    node.moving.tick(node.now, 0.9, None)
    node.run()
    assert not node.moving.trouble
    assert node.moving.writes.idle
    node.check()


def test_writes_that_wait_for_their_worker_for_an_hour_are_no_disk_that_hangs() -> None:
    node = writing(chain("a", 3))
    for _ in range(3600):
        node.now += 1
        node.moving.tick(node.now, 0.9, (node.now - 1, "a write"))
    assert not node.moving.trouble
    node.run()
    node.check()


def test_a_read_that_hangs_keeps_the_ssd_out_of_use_also_where_something_else_had_put_it_out_before() -> None:
    """A probe that worked had it in use for a moment, again and again: each time somebody waited for it."""
    node = Node()
    keys = chain("a", 2)
    node.put(keys)
    node.run()
    node.evict_memory(2)
    node.load(keys)
    node.take()
    node.now += 1
    node.moving.link.go_out_of_use("of a test's")
    for _ in range(30):
        node.now += PROBE_S
        node.moving.tick(node.now, 0.9)
        for job in [job for job in node.take() if isinstance(job, ProbeTier)]:
            node.end(node.pending.index(job))
        assert node.moving.trouble
    node.run()
    node.now += PROBE_S
    node.moving.tick(node.now, 0.9)
    node.run()
    assert not node.moving.trouble
    node.check()


def test_what_waited_to_be_written_when_the_ssd_went_out_of_use_is_written_when_it_is_back() -> None:
    """It was left in memory only, until somebody stored it again: a restart would have lost it."""
    node = Node()
    keys = chain("a", 12)
    node.put(keys)
    node.moving.link.go_out_of_use("of a test's")
    assert not node.moving.link.schedule.queues[Kind.WRITE].level
    assert node.moving.counts.writes_dropped == 12
    for _ in range(4):
        node.now += PROBE_S
        node.moving.tick(node.now, 0.9)
        node.run()
    assert [node.tiers(key) for key in keys] == [HOST | SSD] * 12
    node.check()


def test_what_was_on_a_directory_that_is_lost_is_written_to_the_next_one() -> None:
    node = Node()
    keys = chain("a", 12)
    node.put(keys)
    node.run()
    node.lose()
    for _ in range(4):
        node.now += PROBE_S
        node.moving.tick(node.now, 0.9)
        node.run()
    assert [node.tiers(key) for key in keys] == [HOST | SSD] * 12
    node.check()
