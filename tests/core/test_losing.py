"""A directory that is lost: in bounded steps, with what is under way left behind, and nothing of it believed later."""

import gc
import time

import pytest

from kvstore.core.moves import ReadBlock, VerifyBlock, WriteBlock
from kvstore.core.saving import Hottest
from kvstore.core.segments import GRANTED
from kvstored.v1.shm import HOST
from tests.core import ssd_scene
from tests.core.scene import chain, key_of
from tests.core.ssd_scene import PAGE, Node

ROWS = 200_000
IN_FILE = 4096
STEP = 2048
STEP_CPU_S = 0.25
"""Of this thread, whoever else is on the machine: 50 times what a step takes, a fraction of what all rows would."""


def gone(node: Node) -> None:
    """What is at the path now is another directory, and empty."""
    moving = node.moving
    moving.link.go_out_of_use("of a test's")
    moving.leave()
    moving.losing.leave_behind()
    node.disk.files.clear()
    node.disk.records.clear()
    while moving.losing.step(STEP):
        pass


def test_what_is_lost_is_in_memory_only_and_is_written_again() -> None:
    node = Node()
    keys = chain("a", 8)
    node.put(keys)
    node.run()
    node.evict_memory(2)
    gone(node)
    assert node.moving.losing.take_count() == 2
    assert [node.tiers(key) for key in keys] == [HOST] * 6 + [0] * 2
    node.moving.come()
    node.restore()
    node.check()
    node.moving.writes.offer_rows(row for row in range(len(node.memory.table)) if node.memory.table.key[row])
    node.run()
    assert all(node.moving.link.disk_row(node.block(key)) >= 0 for key in keys[:6])
    node.check()


@pytest.mark.parametrize("kind", [ReadBlock, WriteBlock, VerifyBlock])
def test_what_is_under_way_is_left_behind_with_its_slot_until_its_worker_reports(kind: type) -> None:
    node = Node()
    keys = chain("a", 4)
    node.put(keys)
    if kind is not WriteBlock:
        node.run()
        node.evict_memory(4)
    if kind is ReadBlock:
        node.load(keys)
    if kind is VerifyBlock:
        node.moving.verification.ask([(0, (node.store.namespaces[0].id, keys[0]))], lambda _: None)
    while not any(isinstance(job, kind) for job in node.take()):  # a file may have to be made first
        node.end(0)
    jobs = [job for job in node.pending if isinstance(job, kind)]
    assert jobs
    gone(node)
    node.moving.come()
    assert all(ticket.state == "failed" for ticket in node.tickets)
    assert node.moving.losing.left_behind == (0 if kind is VerifyBlock else len(jobs))
    for job in jobs:
        if isinstance(job, ReadBlock):
            segment, slot = node.memory.segments.at(job.target)
            assert segment.state[slot] == GRANTED, "a slot was given away while it is read into"
    node.put([key_of(f"new {n}") for n in range(4)])
    for job in jobs:  # it was a success, of files that are gone
        if isinstance(job, WriteBlock):
            node.moving.wrote(job.number, 1, "", node.now)
        elif isinstance(job, ReadBlock):
            node.slab[job.target] = job.key
            node.moving.read(job.number, "ok", node.now)
        node.pending.remove(job)
    assert node.moving.losing.left_behind == 0
    assert all(node.moving.link.disk_row(node.block(key)) < 0 for key in keys), (
        "a block of the old directory is promised"
    )
    node.restore()
    for ticket in node.tickets:
        node.moving.loads.close(ticket)
    node.run()
    node.check()


def test_nothing_ends_the_trouble_of_an_ssd_whose_directory_is_being_lost() -> None:
    node = Node()
    node.moving.link.go_out_of_use("of a test's")
    node.moving.leave()
    node.moving.tick(node.now + 60, 0.9)
    assert node.take() == [], "a probe of what is being lost"
    node.moving.probed("")
    assert node.moving.trouble == "of a test's"


def test_a_block_removed_while_its_directory_is_read_again_stays_removed() -> None:
    """What was to be deleted from it is remembered; what was only taken out is not: it is there to be found again."""
    node = Node()
    keys = chain("a", 4)
    node.put(keys)
    node.run()
    node.evict_memory(4)
    moving = node.moving
    moving.link.go_out_of_use("of a test's")
    moving.remove_from_disk(node.ns, keys[2:3])  # its record cannot be deleted now
    moving.leave()
    moving.losing.leave_behind()
    while moving.losing.step(1):
        pass
    moving.come()
    again = node.restore()
    assert again.restored == 3
    assert [node.tiers(key) > 0 for key in keys] == [True, True, False, True]
    node.check()


def large(monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node with ROWS blocks on its SSD, none of them in memory."""
    monkeypatch.setattr(ssd_scene, "IN_SEGMENT", IN_FILE)
    node = Node(disk_pages=ROWS + IN_FILE, memory_pages=IN_FILE)
    node.disk.namespaces[node.ns.digest] = node.ns
    per_file = node.store.segments.segment_bytes // PAGE
    for number in range(ROWS):
        file, slot = number // per_file + 1, number % per_file
        node.disk.files[file] = node.store.segments.segment_bytes
        node.disk.records[node.ns.digest, key_of(f"{number}")] = ((file << 32) | slot, 0, b"", 0)
    node.restore()
    assert node.store.pool(node.store.namespaces[0]).blocks == ROWS
    return node


def test_a_large_directory_is_lost_in_steps_that_do_not_grow_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    node = large(monkeypatch)
    moving = node.moving
    moving.link.go_out_of_use("of a test's")
    moving.leave()
    moving.losing.leave_behind()
    tenant = node.store.tenants["default"]
    turns, longest, most = 0, 0.0, 0
    gc.collect()
    gc.freeze()  # as the daemon does: a step is not to pay for what the tests before have left
    while True:
        before, began = len(tenant.rows), time.thread_time()
        more = moving.losing.step(STEP)
        longest, turns = max(longest, time.thread_time() - began), turns + 1
        most = max(most, before - len(tenant.rows))
        if not more:
            break
    gc.unfreeze()
    assert not tenant.rows
    assert most <= STEP
    assert turns >= ROWS / STEP
    assert longest < STEP_CPU_S, f"a turn of {longest:.3f} s of the processor"
    node.store.check()


def test_what_is_to_be_saved_is_found_in_steps_and_comes_most_recently_used_first() -> None:
    node = Node(memory_pages=64)
    keys = [key_of(f"{n}") for n in range(40)]
    for n, key in enumerate(keys):
        node.now += 1
        node.put([key])
        if n == 19:
            node.run()  # these are on the SSD
    node.now += 1
    node.memory.touch(node.ns.tenant, keys[25:26], node.now)
    hottest, turns = Hottest(node.moving.link), 1
    while hottest.look(4):
        turns += 1
    assert turns >= 10
    assert len(hottest) == 20
    wanted = [keys[25], *(key for key in reversed(keys[20:]) if key != keys[25])]
    assert [key for _, key in hottest] == wanted
