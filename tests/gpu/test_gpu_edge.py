"""Devices over the session socket: what the contract says of them, between two processes."""

from collections.abc import Callable, Iterator

import pytest

from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from kvstored_cuda.devices.faults import Fault, FaultPlan
from tests.conftest import eventually
from tests.gpu.edge_program import BLOCK, DeviceProgram, Process, programs
from tests.gpu.gpu_nodes import GpuNode, host_device
from tests.nodes import block
from tests.server.ssd_program import Program as MemoryProgram
from tests.server.ssd_program import keys_of

Program = Callable[..., DeviceProgram]


@pytest.fixture
def program(gpu_node: GpuNode) -> Iterator[Program]:
    """Makes clients of `gpu_node`."""
    with programs(gpu_node) as make:
        yield make


def test_blocks_put_on_a_device_are_read_there_and_after_a_copy_down_byte_for_byte(program: Program) -> None:
    writer, reader, keys = program(), program(), keys_of("a", 5)
    assert writer.stored_on_device(keys) == [pb.STORED] * 5
    reader.check_device(keys)
    eventually(lambda: reader.wire.call(load=reader.load_request(keys)).load.slots, what="copies down")
    reader.check_memory(keys)


def test_blocks_put_in_memory_are_on_the_device_after_a_prefetch_byte_for_byte(program: Program) -> None:
    writer, reader, keys = program(), program(), keys_of("b", 5)
    writer.put(keys, durable=False)
    found = reader.prefetched(keys)
    assert (found.state, found.blocks, found.loaded) == (pb.TICKET_DONE, 5, 5)
    reader.check_device(keys)


def test_a_commit_is_answered_at_once_and_its_ticket_has_the_results_when_its_event_has_come(
    program: Program,
) -> None:
    plan = FaultPlan(Fault("transfer", delay_s=60.0))
    writer, reader, keys = program(plan=plan), program(), keys_of("c", 2)
    reply, event = writer.put_on_device(keys)
    assert reply.ticket
    assert not reply.results
    assert writer.ticket(reply.ticket, 50).state == pb.TICKET_RUNNING
    assert reader.match(keys) == []
    plan.release()
    found = writer.ended_commit(reply)
    assert (found.state, list(found.results)) == (pb.TICKET_DONE, [pb.STORED] * 2)
    event.close()
    reader.check_device(keys)
    assert list(writer.ticket(reply.ticket).results) == [pb.STORED] * 2, "asked again, it is the same"


def test_a_commit_without_an_event_is_over_with_its_answer(program: Program) -> None:
    writer, keys = program(), keys_of("d", 2)
    slots = writer.reserve(2)
    writer.write(slots, keys)
    writer.stream.synchronize(10.0)
    reply = writer.commit_on_device(keys, slots)
    assert (list(reply.results), reply.ticket) == ([pb.STORED] * 2, 0)
    writer.check_device(keys)


def test_first_commit_wins_and_the_other_keeps_its_slots(program: Program) -> None:
    first, second, keys = program(), program(), keys_of("e", 2)
    first.stored_on_device(keys)
    slots = second.reserve(2)
    second.write(slots, keys)
    event = second.record()
    assert event.handle is not None
    found = second.ended_commit(second.commit_on_device(keys, slots, event.handle.to_bytes()))
    assert list(found.results) == [pb.EXISTS] * 2
    second.ask_device(abort=pb.AbortRequest(slots=slots))
    with pytest.raises(InvalidArgument, match="cannot be given back"):
        second.ask_device(abort=pb.AbortRequest(slots=slots))


def test_a_block_that_is_removed_while_its_commit_waits_is_not_there_afterwards(program: Program) -> None:
    plan = FaultPlan(Fault("transfer", delay_s=60.0))
    writer, keys = program(plan=plan), keys_of("f", 2)
    reply, _ = writer.put_on_device(keys)
    removed = writer.wire.call(remove=pb.RemoveRequest(namespace_id=writer.number, keys=keys[:1])).remove
    assert removed.removed == 0, "it was not there"
    plan.release()
    assert list(writer.ended_commit(reply).results) == [pb.STORED] * 2
    assert writer.match(keys[:1]) == []
    assert writer.match(keys[1:]) == [pb.TIER_GPU]


def test_a_commit_whose_event_does_not_come_fails_and_keeps_its_slots_until_it_does(
    start_gpu_node: Callable[..., GpuNode],
) -> None:
    node, plan = start_gpu_node(limits={"gpu_commits.EVENT_S": 0.3}), FaultPlan(Fault("transfer", delay_s=60.0))
    writer, keys = DeviceProgram(node.socket, node.uuids[0], plan=plan), keys_of("g", 2)
    try:
        reply, _ = writer.put_on_device(keys)
        found = writer.ended_commit(reply)
        assert found.state == pb.TICKET_FAILED
        assert "has not come within" in found.why
        assert writer.match(keys) == []
        assert node.stats_of()["granted"] == 2
        plan.release()
        eventually(lambda: node.stats_of()["granted"] == 0, what="its slots to be free")
    finally:
        writer.close()


def test_commits_that_wait_are_answered_in_order_and_refuse_no_other_call(program: Program) -> None:
    plan = FaultPlan(Fault("transfer", delay_s=60.0))
    one, keys = program(plan=plan), keys_of("many", 40)
    slots = one.reserve(40)
    one.write(slots[:1], keys[:1])
    event = one.record()
    assert event.handle is not None
    for number, (key, slot) in enumerate(zip(keys, slots, strict=True), 1000):
        commit = one.commit_request([key], [slot], event.handle.to_bytes())
        one.wire.post(number, device=one.request(commit=commit))
    tickets = [one.wire.answer(number).device.commit.ticket for number in range(1000, 1040)]
    assert len(set(tickets)) == 40
    assert one.match(keys[:1]) == []
    assert one.wire.call(health=pb.HealthRequest()).health.healthy
    plan.release()
    for ticket in tickets:
        assert list(one.ended_commit(pb.CommitReply(ticket=ticket)).results) == [pb.STORED]


def test_a_commit_that_waits_when_its_device_is_lost_says_why_at_once(gpu_node: GpuNode, program: Program) -> None:
    one, keys = program(plan=FaultPlan(Fault("transfer", delay_s=60.0))), keys_of("l", 1)
    reply, _ = one.put_on_device(keys)
    gpu_node.lose()
    found = one.ended_commit(reply)
    assert found.state == pb.TICKET_FAILED
    assert "out of use" in found.why
    with pytest.raises(Unavailable, match="out of use"):
        one.reserve(1)
    (device,) = one.wire.call(devices=pb.DevicesRequest()).devices.devices
    assert device.trouble


def test_a_client_that_is_killed_in_a_commit_leaves_nothing_visible_and_no_slot(
    gpu_node: GpuNode, program: Program
) -> None:
    killed = Process(gpu_node, gpu_node.uuids[0], "committed", "transfer:delay=60; trusting")
    reader, keys = program(), [block(("committed", i), 32) for i in range(2)]
    assert gpu_node.stats_of()["granted"] == 2
    killed.kill()
    eventually(
        lambda: gpu_node.stats_of()["granted"] + gpu_node.stats_of()["quarantined"] == 0, what="its slots to be free"
    )
    assert reader.match(keys) == []
    eventually(lambda: gpu_node.stats_of()["counters"]["commits_failed"] == 1)


def test_memory_granted_to_a_process_that_is_gone_is_kept_until_its_devices_are_quiet(
    start_gpu_node: Callable[..., GpuNode],
) -> None:
    node = start_gpu_node()
    killed = Process(node, node.uuids[0], "writing", "transfer:delay=60")
    assert sum(pool["granted"] for pool in node.stats()["pools"]) == 1
    asked = node.stats_of()["counters"]["quiet_asked"]
    killed.kill()
    eventually(
        lambda: sum(pool["granted"] + pool["quarantined"] for pool in node.stats()["pools"]) == 0,
        what="its slot in memory to be free",
    )
    assert node.stats_of()["counters"]["quiet_asked"] > asked


def test_another_generation_a_device_that_is_not_there_and_a_read_only_session_are_refused(
    gpu_node: GpuNode, program: Program
) -> None:
    one = program()
    want = pb.ReserveRequest(namespace_id=one.number, count=1)
    one.generation += 1
    with pytest.raises(FailedPrecondition, match=f"generation {one.generation - 1}, and generation {one.generation}"):
        one.ask_device(reserve=want)
    one.generation -= 1
    with pytest.raises(InvalidArgument, match="there is no device 'HOST-9'"):
        one.wire.call(device=pb.DeviceRequest(device="HOST-9", generation=1, reserve=want))
    with pytest.raises(InvalidArgument, match="no operation"):
        one.ask_device()
    looking = program(read_only=True)
    with pytest.raises(FailedPrecondition, match="may write to shared memory"):
        looking.ask_device(reserve=want)
    with pytest.raises(FailedPrecondition, match="may write to shared memory"):
        looking.ask_device(segments=pb.SegmentsRequest(ids=[1]))


def test_after_a_loss_the_old_generation_is_refused_and_the_new_one_serves(gpu_node: GpuNode, program: Program) -> None:
    one, keys = program(), keys_of("h", 2)
    one.stored_on_device(keys)
    old = one.generation
    gpu_node.lose()
    gpu_node.come()
    with pytest.raises(FailedPrecondition, match="was lost meanwhile"):
        one.acquired_on_device(keys)
    again = program()
    assert again.generation == old + 1
    again.stored_on_device(keys_of("h2", 2))
    again.check_device(keys_of("h2", 2))


def test_want_and_durable_are_not_of_devices(program: Program) -> None:
    one, keys = program(), keys_of("i", 1)
    request = one.commit_request(keys, one.reserve(1))
    for name, value in (("want", 1), ("durable", True)):
        wrong = pb.DeviceCommitRequest()
        wrong.CopyFrom(request)
        setattr(wrong.commit, name, value)
        with pytest.raises(InvalidArgument, match="not of commits to a device"):
            one.ask_device(commit=wrong)


def test_a_daemon_without_devices_says_so(start_gpu_node: Callable[..., GpuNode]) -> None:
    node = start_gpu_node(devices=[host_device()], gpu__size="0")
    one = MemoryProgram(node)
    assert not one.wire.call(devices=pb.DevicesRequest()).devices.devices
    with pytest.raises(FailedPrecondition, match=r"gpu\.size is not set"):
        one.wire.call(device=pb.DeviceRequest(device="HOST-1", generation=1))
    one.wire.close()


def test_a_client_is_asked_to_close_memory_and_says_so(start_gpu_node: Callable[..., GpuNode]) -> None:
    node = start_gpu_node(gpu__size="1MiB")
    one = DeviceProgram(node.socket, node.uuids[0])
    try:
        for name in range(4):  # all of the device
            one.stored_on_device(keys_of(f"j{name}", 4))
        other = DeviceProgram(node.socket, node.uuids[0], tenant="other", namespace="other")
        try:
            asked: dict[int, None] = {}

            def detaches() -> bool:
                reply = one.wire.call(sync=pb.SyncRequest())
                for of in reply.detach_devices:
                    assert (of.device, of.generation) == (one.uuid, one.generation)
                    asked.update(dict.fromkeys(of.segments))
                    for segment in of.segments:
                        mapping = one.opened.pop(segment, None)
                        if mapping is not None:
                            mapping.close()
                    one.ask_device(closed=pb.DeviceClosedRequest(segments=of.segments))
                return bool(asked)

            def stored() -> bool:
                detaches()
                try:
                    return bool(other.stored_on_device(keys_of("k", 1)))
                except ResourceExhausted:
                    return False

            eventually(stored, what="memory to come to the other tenant")
            assert asked
            other.check_device(keys_of("k", 1))
        finally:
            other.close()
    finally:
        one.close()


def test_sizes_are_as_the_contract_says(gpu_node: GpuNode, program: Program) -> None:
    one = program()
    (device,) = one.devices.devices
    assert (device.uuid, device.trouble) == (gpu_node.uuids[0], "")
    assert device.size_bytes == 16 << 20
    assert one.slot_bytes % device.page_bytes == 0
    assert len(one.exporter.to_bytes()) == len(one.devices.exporter)
    assert one.slot_bytes == BLOCK
