"""Reports of writes reach the store of the SSD parents first, in whatever order they come."""

import pytest

from kvstore.core.block import NONE
from kvstore.core.evict import ORPHAN
from kvstore.core.moves import WriteBlock
from tests.core.scene import chain, key_of
from tests.core.ssd_scene import Node, checksum_of


def writes(node: Node) -> list[WriteBlock]:
    return [move for move in node.moving.take_moves(node.now) if isinstance(move, WriteBlock)]


def report(node: Node, job: WriteBlock) -> None:
    node.moving.wrote(job.number, checksum_of(job.key), "", node.now)


def orphans(node: Node) -> int:
    table = node.store.table
    return sum(table.listed[row] == ORPHAN for row in range(len(table)))


def begun(node: Node, keys: list[bytes]) -> list[WriteBlock]:
    """Their writes, under way, in this order."""
    node.put(keys)
    jobs = {job.key: job for job in writes(node)}
    while len(jobs) < len(keys):  # a file is made first
        node.take()
        node.run()
        jobs |= {job.key: job for job in writes(node)}
    return [jobs[key] for key in keys]


def prepared() -> Node:
    """With a file that has room, so that writes begin at once."""
    node = Node()
    node.put(chain("first", 1))
    node.run()
    return node


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1), (1, 0, 2)])
def test_no_block_is_an_orphan_because_its_parent_takes_longer(order: tuple[int, ...]) -> None:
    """It would go first, for the next write: a durable put lost what it had just written."""
    node, keys = prepared(), chain("a", 3)
    jobs, reported = begun(node, keys), set()
    for at in order:
        report(node, jobs[at])
        reported.add(at)
        run = next((n for n in range(3) if n not in reported), 3)
        assert [node.moving.link.disk_row(node.block(key)) != NONE for key in keys] == [n < run for n in range(3)]
        assert orphans(node) == 0
    assert not node.moving.writes.under_way
    node.store.check()


def test_blocks_that_name_each_other_as_parents_do_not_wait_for_ever() -> None:
    node, (one, two) = prepared(), (key_of("one"), key_of("two"))
    for key, parent in ((one, two), (two, one)):
        (ref,) = node.memory.reserve(node.session, node.ns, 1, node.now)
        node.slab[ref] = key
        node.memory.commit(node.session, node.ns, [key], [ref], [parent], [1], node.now, 0.0)
    jobs = writes(node)
    assert len(jobs) == 2
    for job in jobs:
        report(node, job)
    assert not node.moving.writes.under_way
    assert all(node.moving.link.disk_row(node.block(key)) != NONE for key in (one, two))


def test_what_waits_for_a_parent_is_over_when_the_directory_is_lost() -> None:
    """Its own report is here: no other one would free its slot."""
    node, keys = prepared(), chain("a", 2)
    parent, child = begun(node, keys)
    report(node, child)
    node.moving.link.go_out_of_use("lost")
    node.moving.link.away = True
    node.moving.losing.leave_behind()
    assert node.moving.losing.left_behind == 1, "the parent's alone"
    assert node.moving.losing.ended_late(parent.number)
    assert node.moving.losing.left_behind == 0
