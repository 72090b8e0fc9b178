"""Durable commits, and what is done to both tiers at once: removing, clearing, pinning; over the session socket.

What must happen while a disk is busy is forced by a gate that the test holds (gated_disk.py).
"""

from collections.abc import Iterator

import pytest

from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition
from tests.conftest import eventually
from tests.nodes import running
from tests.server.gated_disk import READ, WRITE, GatedDaemon, gated
from tests.server.ssd_program import AT_ONCE, Program, keys_of, nothing_held

HOST, SSD = pb.TIER_HOST, pb.TIER_SSD


@pytest.fixture(scope="module")
def node() -> Iterator[GatedDaemon]:
    with gated() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def hasty() -> Iterator[GatedDaemon]:
    """The same with limits short enough to be met."""
    with gated({"DURABLE_S": 0.6, "RUNNING_MAX": 4}) as daemon:
        yield daemon


@pytest.fixture
def program(node: GatedDaemon) -> Iterator[Program]:
    with Program(node) as program:
        yield program
        program.release_all()
    nothing_held(node)


# -- durable


def test_a_durable_commit_is_answered_before_the_disk_and_ends_with_it(node: GatedDaemon, program: Program) -> None:
    keys = keys_of("durable", AT_ONCE)
    with node.closed(WRITE):
        reply = program.commit(keys, range(AT_ONCE), durable=True)
        assert list(reply.results) == [pb.STORED] * AT_ONCE
        assert reply.ticket
        # Stored means visible, and its slots are the daemon's, whatever becomes of the disk.
        assert program.match(keys) == [HOST] * AT_ONCE
        found = program.ticket(reply.ticket, wait_ms=20)
        assert (found.state, found.waiting) == (pb.TICKET_RUNNING, AT_ONCE)
    program.ended(reply)
    again = program.save(keys)
    assert (again.ticket, again.not_durable, list(again.results)) == (0, "", [])


def test_blocks_that_exist_are_made_durable_without_being_stored_again(program: Program) -> None:
    keys = keys_of("existing", 4)
    program.put(keys, durable=False)
    stored = program.stats().counters.stored
    program.ended(program.save(keys))
    assert program.stats().counters.stored == stored
    missing = program.save(keys_of("never stored", 1))
    assert missing.ticket == 0
    assert missing.not_durable


def test_what_is_not_on_the_disk_in_time_is_stored_and_said_not_to_be_durable(hasty: GatedDaemon) -> None:
    keys = keys_of("slow", 4)
    with Program(hasty) as program, hasty.closed(WRITE):
        reply = program.commit(keys, range(4), durable=True)
        found = eventually(lambda: program.ended_ticket(reply.ticket))
        assert found.state == pb.TICKET_FAILED
        assert "0.6 s" in found.why or "1 s" in found.why
        assert program.match(keys) == [HOST] * 4
    nothing_held(hasty)


def test_durable_commits_beyond_the_limit_are_stored_and_say_so(hasty: GatedDaemon) -> None:
    with Program(hasty) as program:
        with hasty.closed(WRITE):
            replies = [program.commit(keys_of(f"one of five {i}", 1), range(1), durable=True) for i in range(5)]
        assert [list(reply.results) for reply in replies] == [[pb.STORED]] * 5
        assert all(reply.ticket for reply in replies[:4])
        assert "under way already" in replies[4].not_durable
    nothing_held(hasty)


# -- both tiers at once


def test_a_removed_block_is_gone_from_both_tiers_and_counts_once(program: Program) -> None:
    keys = keys_of("removed", 80)
    program.put(keys)
    assert set(program.match(keys)) == {HOST, SSD}
    before = program.stats().counters.removed
    request = pb.RemoveRequest(namespace_id=program.number, keys=[*keys, keys[0]])
    assert program.wire.call(remove=request).remove.removed == 80
    assert program.stats().counters.removed == before + 80
    assert program.match(keys) == []
    assert [len(program.load([key]).slots) for key in (keys[0], keys[40], keys[79])] == [0, 0, 0]


def test_a_cleared_namespace_is_gone_from_both_tiers_and_counts_once(node: GatedDaemon) -> None:
    keys = keys_of("cleared", 80)
    with Program(node, "to be cleared") as program, Program(node, "stays") as other:
        kept = keys_of("kept", 4)
        other.put(kept)
        program.put(keys)
        assert program.wire.call(clear=pb.ClearRequest(namespace_id=program.number)).clear.removed == 80
        assert program.match(keys) == []
        assert len(other.match(kept)) == 4
    nothing_held(node)


def test_a_block_that_is_being_loaded_or_written_while_it_is_removed_does_not_come_back(
    node: GatedDaemon, program: Program
) -> None:
    keys = keys_of("raced", 4)
    program.put(keys)
    program.fill_memory("raced filler")
    with node.closed(READ):
        program.wire.post(900, load=program.load_request(keys))
        eventually(lambda: program.stats().ssd.queues[0].running == 4, what="the reads to be under way")
        assert program.wire.call(remove=pb.RemoveRequest(namespace_id=program.number, keys=keys)).remove.removed == 4
    reply = program.wire.answer(900).load
    while reply.ticket:
        reply = program.again(reply.ticket)
    assert not reply.slots
    assert program.match(keys) == []
    with node.closed(WRITE):
        saving = program.commit(keys, range(4), durable=True)
        assert program.wire.call(remove=pb.RemoveRequest(namespace_id=program.number, keys=keys)).remove.removed == 4
    found = eventually(lambda: program.ended_ticket(saving.ticket))
    assert found.state == pb.TICKET_FAILED
    assert program.match(keys) == []


def test_pins_count_a_block_once_whichever_tiers_it_is_in(program: Program) -> None:
    keys = keys_of("pinned", 70)
    program.put(keys)
    assert set(program.match(keys)) == {HOST, SSD}
    absent = keys_of("not there", 3)
    pin = pb.PinRequest(namespace_id=program.number, keys=[*keys, *absent], ttl_s=60)
    assert program.wire.call(pin=pin).pin.pinned == 70
    unpin = pb.UnpinRequest(namespace_id=program.number, keys=[*keys, *absent])
    assert program.wire.call(unpin=unpin).unpin.unpinned == 70
    assert program.wire.call(unpin=unpin).unpin.unpinned == 0


def test_a_put_of_what_only_the_ssd_has_is_in_memory_as_well(program: Program) -> None:
    keys = keys_of("put again", 4)
    program.put(keys)
    program.fill_memory("put again filler")
    assert program.match(keys) == [SSD] * 4
    program.put(keys)
    assert program.match(keys) == [HOST] * 4


def test_what_was_removed_and_cleared_is_gone_after_a_restart_as_well() -> None:
    with gated() as node:
        keys, cleared = keys_of("kept", 8), keys_of("cleared", 4)
        with Program(node) as program, Program(node, "cleared") as other:
            program.put(keys)
            other.put(cleared)
            program.wire.call(remove=pb.RemoveRequest(namespace_id=program.number, keys=keys[4:]))
            other.wire.call(clear=pb.ClearRequest(namespace_id=other.number))
        assert node.stop() == 0, node.output()
        node.restart()
        node.opened()
        with Program(node) as program, Program(node, "cleared") as other:
            assert program.match(keys) == [SSD] * 4
            assert other.match(cleared) == []
            reply = program.load(keys[:4])
            program.check(keys, reply.slots)
            assert len(reply.slots) == 4


# -- without an SSD


def test_without_an_ssd_a_load_is_an_acquire_and_a_prefetch_is_done_at_once() -> None:
    with running(host__size="4MiB") as daemon, Program(daemon) as program:
        keys = keys_of("no ssd", 4)
        program.put(keys, durable=False)
        reply = program.ask([*keys, *keys_of("absent", 1)])
        assert (len(reply.slots), reply.ticket, reply.loaded) == (4, 0, 0)
        program.check(keys, reply.slots)
        program.release(reply.slots)
        done = program.prefetch(keys)
        assert (done.state, done.blocks, done.ticket) == (pb.TICKET_DONE, 4, 0)
        assert program.ticket(1).state == pb.TICKET_NONE
        with pytest.raises(FailedPrecondition, match="needs an SSD"):
            program.commit(keys_of("durable", 1), range(1), durable=True)
        with pytest.raises(FailedPrecondition, match="needs an SSD"):
            program.save(keys)
        assert program.match(keys_of("durable", 1)) == []
