"""Calls about blocks, whichever tiers have them: devices are among them, and each block counts once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition
from tests.conftest import eventually
from tests.gpu.edge_program import DeviceProgram, Make, programs
from tests.gpu.gpu_nodes import GpuNode, host_device
from tests.nodes import block
from tests.server.ssd_program import keys_of

GPU, HOST, SSD = pb.TIER_GPU, pb.TIER_HOST, pb.TIER_SSD

HELD_DOWN = "transfer:delay=60"
"""The daemon's copies take that long: what is stored on a device stays the only copy."""


@pytest.fixture(params=["memory alone", "with an SSD"])
def node(request: pytest.FixtureRequest, start_gpu_node: Callable[..., GpuNode], tmp_path: Path) -> GpuNode:
    """With one device."""
    ssd = {"ssd__path": str(tmp_path / "ssd"), "ssd__size": "64MiB"}
    return start_gpu_node(**({} if request.param == "memory alone" else ssd))


@pytest.fixture
def program(node: GpuNode) -> Iterator[Make]:
    with programs(node) as make:
        yield make


def only_on_device(node: GpuNode, one: DeviceProgram, keys: list[bytes]) -> None:
    """Puts blocks there whose copies down do not end."""
    node.faults(HELD_DOWN)
    one.stored_on_device(keys)


def copied_down(one: DeviceProgram, keys: list[bytes]) -> None:
    def in_memory() -> bool:
        slots = one.ask(keys).slots
        if slots:
            one.release(slots)
        return len(slots) == len(keys)

    eventually(in_memory, what="copies down")


def inspect(one: DeviceProgram, key: bytes) -> pb.KeyInfo:
    return one.wire.call(inspect=pb.InspectRequest(key=key)).inspect.key


def evict(one: DeviceProgram, tier: int = 0, **what: object) -> pb.EvictReply:
    return one.wire.call(evict=pb.EvictRequest(tier=tier, **what)).evict  # type: ignore[arg-type]


def test_match_names_the_fastest_tier_of_each_block_and_counts_what_only_a_device_has(
    node: GpuNode, program: Make
) -> None:
    one, keys = program(), keys_of("a", 4)
    one.put(keys[:2], durable=False)
    assert one.prefetched(keys[1:2]).state == pb.TICKET_DONE
    only_on_device(node, one, keys[2:3])
    one.put(keys[3:], durable=False)
    assert one.match(keys) == [HOST, GPU, GPU, HOST]
    assert one.match(keys[2:3]) == [GPU]
    assert one.match([*keys, block("never", 32)]) == [HOST, GPU, GPU, HOST]


def test_inspect_shows_every_copy_and_the_device_that_has_it(node: GpuNode, program: Make) -> None:
    one, keys = program(), keys_of("a", 2)
    one.stored_on_device(keys)
    copied_down(one, keys)
    copies = {copy.tier: copy for copy in inspect(one, keys[1]).copies}
    assert {GPU, HOST} <= set(copies)
    assert copies[GPU].device == one.uuid
    assert copies[GPU].segment >= 1
    assert not copies[HOST].device
    only_on_device(node, one, [block("alone", 32)])
    found = inspect(one, block("alone", 32))
    assert [copy.tier for copy in found.copies] == [GPU]
    assert found.namespace.id == one.number
    assert not inspect(one, block("never", 32)).copies
    assert [copy.tier for copy in inspect(one, block("alone", 32)[:8]).copies] == [GPU], "by its beginning, too"


def test_remove_takes_a_block_from_every_tier_and_counts_it_once(node: GpuNode, program: Make) -> None:
    one, both, alone = program(), keys_of("both", 2), keys_of("alone", 2)
    one.stored_on_device(both)
    copied_down(one, both)
    only_on_device(node, one, alone)
    request = pb.RemoveRequest(namespace_id=one.number, keys=[*both, *alone, block("never", 32)])
    removed = one.wire.call(remove=request).remove
    assert (removed.removed, removed.not_on_disk_yet) == (4, "")
    assert one.match(both) == one.match(alone) == []
    node.faults("")
    other = program()
    assert other.match(both) == other.match(alone) == []
    assert other.acquired_on_device(both) == other.acquired_on_device(alone) == []


def test_clear_takes_a_namespace_from_every_tier_and_counts_each_block_once(node: GpuNode, program: Make) -> None:
    one, both, alone = program(), keys_of("both", 3), keys_of("alone", 2)
    other = program(namespace="other")
    other.stored_on_device(keys_of("other", 1))
    one.stored_on_device(both)
    copied_down(one, both)
    only_on_device(node, one, alone)
    cleared = one.wire.call(clear=pb.ClearRequest(namespace_id=one.number)).clear
    assert cleared.removed == 5
    assert one.match(both) == one.match(alone) == []
    assert other.match(keys_of("other", 1)) == [GPU]


def test_pins_count_each_block_once_and_keep_it_from_an_administrator(node: GpuNode, program: Make) -> None:
    one, both, alone = program(), keys_of("both", 2), keys_of("alone", 2)
    one.stored_on_device(both)
    copied_down(one, both)
    only_on_device(node, one, alone)
    keys = [*both, *alone]
    request = pb.PinRequest(namespace_id=one.number, keys=[*keys, block("never", 32)], ttl_s=60.0)
    assert one.wire.call(pin=request).pin.pinned == 4
    kept = evict(one, all=True)
    assert (kept.gpu_blocks, kept.held, kept.pinned) == (0, 4, 4)
    assert [len(one.match(each)) for each in (both, alone)] == [2, 2]
    unpin = pb.UnpinRequest(namespace_id=one.number, keys=keys)
    assert one.wire.call(unpin=unpin).unpin.unpinned == 4
    assert one.wire.call(unpin=unpin).unpin.unpinned == 0


def test_an_administrator_takes_copies_from_devices_alone(node: GpuNode, program: Make) -> None:
    one, keys = program(), keys_of("a", 4)
    one.stored_on_device(keys)
    copied_down(one, keys)
    held = one.acquired_on_device(keys[:1])
    gone = evict(one, GPU, keys=pb.EvictKeys(keys=[*keys[:2], block("never", 32)]))
    assert (gone.gpu_blocks, gone.gpu_bytes, gone.held, gone.leased, gone.absent) == (1, one.slot_bytes, 1, 1, 1)
    assert (gone.blocks, gone.ssd_blocks) == (0, 0)
    assert one.match(keys) == [GPU, HOST, GPU, GPU]
    assert evict(one, GPU, size_bytes=1).gpu_blocks == 1
    one.release_on_device(held)
    assert evict(one, GPU, all=True).gpu_blocks == 2
    assert one.match(keys) == [HOST] * 4
    one.check_memory(keys)


def test_everywhere_takes_each_block_from_all_tiers_or_leaves_it_in_all(node: GpuNode, program: Make) -> None:
    one, both, alone = program(), keys_of("both", 2), keys_of("alone", 1)
    one.stored_on_device(both)
    copied_down(one, both)
    only_on_device(node, one, alone)
    held = one.acquired_on_device(both[:1])
    gone = evict(one, namespace=block("ns", 32))
    assert (gone.blocks, gone.gpu_blocks, gone.held, gone.leased) == (1, 2, 1, 1)
    assert one.match(both) == [GPU]
    assert {copy.tier for copy in inspect(one, both[0]).copies} >= {GPU, HOST}
    assert one.match(both[1:]) == one.match(alone) == []
    one.release_on_device(held)
    gone = evict(one, keys=pb.EvictKeys(keys=[*both, *alone]))
    assert (gone.blocks, gone.gpu_blocks, gone.absent) == (1, 1, 2)
    assert one.match(both) == []


def test_a_load_brings_down_what_only_a_device_has_and_waits_for_it(node: GpuNode, program: Make) -> None:
    one, keys = program(), keys_of("a", 3)
    one.put(keys[:1], durable=False)
    node.faults("transfer:delay=60,times=2")
    slots = one.reserve(2)
    one.write(slots, keys[1:])
    one.stream.synchronize(10.0)
    one.commit_on_device(keys[1:], slots)
    reply = one.ask(keys, wait_ms=50)
    assert reply.ticket
    assert not reply.slots
    node.faults("")  # the copies end
    while reply.ticket:
        reply = one.again(reply.ticket)
    assert (len(reply.slots), reply.why) == (3, "")
    one.check(keys, reply.slots)
    one.release(reply.slots)


def test_a_load_of_what_does_not_come_down_ends_by_its_deadline_with_the_run_before_it(
    node: GpuNode, program: Make
) -> None:
    one, keys = program(), keys_of("a", 2)
    one.put(keys[:1], durable=False)
    only_on_device(node, one, keys[1:])
    reply = one.ask(keys, wait_ms=1000, deadline_ms=300)
    while reply.ticket:
        reply = one.again(reply.ticket)
    assert len(reply.slots) == 1
    assert "in time" in reply.why
    one.check(keys[:1], reply.slots)
    one.release(reply.slots)
    given_up = one.ask(keys, wait_ms=0)
    assert given_up.ticket
    one.wire.call(load=pb.LoadRequest(ticket=given_up.ticket, give_up=True))
    with pytest.raises(FailedPrecondition, match="no load"):
        one.again(given_up.ticket)


def test_what_is_stored_on_one_device_comes_to_another_by_way_of_memory(start_gpu_node: Callable[..., GpuNode]) -> None:
    node = start_gpu_node(devices=[host_device(0), host_device(1)])
    keys = keys_of("a", 3)
    first = DeviceProgram(node.socket, node.uuids[0])
    second = DeviceProgram(node.socket, node.uuids[1])
    try:
        first.stored_on_device(keys)
        copied_down(first, keys)
        found = second.prefetched(keys)
        assert (found.state, found.blocks) == (pb.TICKET_DONE, 3)
        second.check_device(keys)
        assert len({copy.device for copy in inspect(first, keys[0]).copies if copy.tier == GPU}) == 2
        assert evict(first, GPU, all=True).gpu_blocks == 6
    finally:
        first.close()
        second.close()


def test_a_prefetch_is_cancelled_and_ends_by_its_deadline(node: GpuNode, program: Make) -> None:
    one, keys = program(), keys_of("a", 2)
    one.put(keys, durable=False)
    node.faults(HELD_DOWN)
    request = pb.PrefetchRequest(namespace_id=one.number, keys=keys, deadline_ms=60_000)
    reply = one.ask_device(prefetch=request).prefetch
    assert reply.state == pb.TICKET_RUNNING
    assert one.ticket(reply.ticket, 0, cancel=True).state == pb.TICKET_CANCELLED
    found = one.prefetched(keys, deadline_ms=200)
    assert found.state == pb.TICKET_FAILED
    assert "deadline" in found.why
