"""A socket that breaks under a client of a device: the process attaches again, and has what it names."""

import tempfile
from collections.abc import Callable, Iterator

import pytest

from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import InvalidArgument
from kvstored_cuda.devices.faults import Fault, FaultPlan
from tests.conftest import eventually
from tests.gpu.edge_program import DeviceProgram, Make, programs
from tests.gpu.gpu_nodes import GpuNode
from tests.server.ssd_program import keys_of


@pytest.fixture
def program(gpu_node: GpuNode) -> Iterator[Make]:
    """Makes clients; nothing of them is left on the device afterwards."""
    with programs(gpu_node) as make:
        yield make


def uses(of: DeviceProgram, leased: list[int] = [], granted: list[int] = []) -> pb.DeviceUses:  # noqa: B006
    return pb.DeviceUses(device=of.uuid, generation=of.generation, leased=leased, granted=granted)


def broken(gpu_node: GpuNode, of: DeviceProgram) -> None:
    """Its socket is gone, and the daemon has seen it."""
    sessions = len(gpu_node.stats()["sessions"])
    of.wire.close()
    eventually(lambda: any(one["ended"] for one in gpu_node.stats()["sessions"]), what="the end of its session")
    assert sessions


def test_leases_and_slots_on_a_device_outlive_a_socket(gpu_node: GpuNode, program: Make) -> None:
    before, keys = program(), keys_of("a", 3)
    before.stored_on_device(keys)
    leased, granted = before.acquired_on_device(keys), before.reserve(2)
    broken(gpu_node, before)
    resume = pb.Resume(nonce=before.hello.nonce, devices=[uses(before, leased[:2], granted[:1])])
    after = program(resume=resume)
    assert after.hello.resumed
    assert list(after.hello.devices) == [uses(before, leased[:2], granted[:1])]
    eventually(lambda: gpu_node.stats_of()["quarantined"] == 0, what="what it did not name to be free")
    assert (gpu_node.stats_of()["granted"], gpu_node.stats_of()["leased"]) == (1, 2)
    after.write(granted[:1], keys_of("b", 1))
    event = after.record()
    assert event.handle is not None
    reply = after.commit_on_device(keys_of("b", 1), granted[:1], event.handle.to_bytes())
    assert list(after.ended_commit(reply).results) == [pb.STORED]
    after.release_on_device(leased[:2])
    after.check_device(keys)


def test_a_resume_that_cannot_be_changes_nothing_and_the_next_one_has_all(gpu_node: GpuNode, program: Make) -> None:
    before, keys = program(), keys_of("a", 2)
    before.stored_on_device(keys)
    leased = before.acquired_on_device(keys)
    broken(gpu_node, before)
    right = uses(before, leased)
    for wrong in (
        pb.Resume(nonce=before.hello.nonce, devices=[uses(before, [*leased, 7 << 32])]),
        pb.Resume(nonce=before.hello.nonce, devices=[right, right]),
        pb.Resume(nonce=before.hello.nonce, devices=[right], leased=[1 << 32]),
    ):
        with pytest.raises(InvalidArgument):
            program(resume=wrong)
    after = program(resume=pb.Resume(nonce=before.hello.nonce, devices=[right]))
    assert list(after.hello.devices) == [right]
    after.release_on_device(leased)


def test_what_a_stored_slot_is_named_as_is_not_the_clients_any_more(gpu_node: GpuNode, program: Make) -> None:
    before, keys = program(), keys_of("a", 2)
    slots = before.reserve(3)
    before.write(slots[:2], keys)
    before.stream.synchronize(10.0)
    before.wire.post(1, device=before.request(commit=before.commit_request(keys, slots[:2])))  # and no answer is read
    broken(gpu_node, before)
    after = program(resume=pb.Resume(nonce=before.hello.nonce, devices=[uses(before, granted=slots)]))
    assert list(after.hello.devices) == [uses(before, granted=slots[2:])]
    after.check_device(keys)


def test_slots_in_a_commit_that_waited_are_the_clients_again_where_it_names_them(
    gpu_node: GpuNode, program: Make
) -> None:
    plan = FaultPlan(Fault("transfer", delay_s=60.0))
    before, keys = program(plan=plan), keys_of("a", 2)
    slots = before.reserve(2)
    before.write(slots, keys)
    event = before.record()
    assert event.handle is not None
    reply = before.commit_on_device(keys, slots, event.handle.to_bytes())
    broken(gpu_node, before)
    after = program(resume=pb.Resume(nonce=before.hello.nonce, devices=[uses(before, granted=slots)]))
    assert list(after.hello.devices) == [uses(before, granted=slots)]
    assert after.ticket(reply.ticket).state == pb.TICKET_NONE, "the ticket was of the session that has ended"
    assert after.match(keys) == []
    plan.release()
    before.stream.synchronize(10.0)
    results = after.commit_on_device(keys, slots).results
    assert list(results) == [pb.STORED] * 2
    after.check_device(keys)


def test_of_another_generation_or_device_nothing_is_held_and_the_session_is_taken_over(
    gpu_node: GpuNode, program: Make
) -> None:
    before, keys = program(), keys_of("a", 1)
    before.stored_on_device(keys)
    leased = before.acquired_on_device(keys)
    broken(gpu_node, before)
    old = uses(before, leased)
    old.generation += 1
    nowhere = pb.DeviceUses(device="HOST-9", generation=1, leased=[5])
    after = program(resume=pb.Resume(nonce=before.hello.nonce, devices=[old, nowhere]))
    assert after.hello.resumed
    assert not after.hello.devices
    eventually(lambda: gpu_node.stats_of()["leased"] == 0, what="what was not taken over to be free")


def test_a_commit_of_a_session_that_hung_up_never_becomes_visible(gpu_node: GpuNode, program: Make) -> None:
    plan = FaultPlan(Fault("transfer", delay_s=60.0))
    before, keys = program(plan=plan), keys_of("a", 1)
    before.put_on_device(keys)
    broken(gpu_node, before)
    plan.release()
    before.stream.synchronize(10.0)
    looking = program()
    assert looking.match(keys) == []
    assert gpu_node.stats_of()["counters"]["commits_failed"] == 1
    assert gpu_node.stats_of()["quarantined"] == 1, "its process lives"


def test_after_a_restart_memory_is_taken_over_and_of_devices_nothing_is(
    start_gpu_node: Callable[..., GpuNode],
) -> None:
    with tempfile.TemporaryDirectory(prefix="kvstored-test-", dir="/dev/shm") as directory:
        node = start_gpu_node(host__persist=f"{directory}/memory")
        _restart_and_resume(node)
        node.kill()


def _restart_and_resume(node: GpuNode) -> None:
    with programs(node) as make:
        before, keys = make(), keys_of("a", 2)
        before.put(keys, durable=False)
        held = list(before.load(keys).slots)
        assert before.prefetched(keys).state == pb.TICKET_DONE
        leased = before.acquired_on_device(keys)
        node.kill()
        node.restart()
        resume = pb.Resume(nonce=before.hello.nonce, leased=held, devices=[uses(before, leased)])
        after = make(resume=resume)
        assert after.hello.resumed
        assert not after.hello.devices, "the generation is the same by number, and the daemon's life another"
        assert after.exporter != before.exporter
        after.release(held)
        assert after.prefetched(keys).state == pb.TICKET_DONE
        after.check_device(keys)


def test_what_a_session_asked_for_ends_with_it(gpu_node: GpuNode, program: Make) -> None:
    one, keys = program(), keys_of("a", 2)
    one.put(keys, durable=False)
    gpu_node.faults("transfer:delay=60")
    request = pb.PrefetchRequest(namespace_id=one.number, keys=keys, deadline_ms=600_000)
    one.ask_device(prefetch=request)
    assert gpu_node.stats_of()["tickets"] == 1
    one.wire.close()
    eventually(lambda: gpu_node.stats_of()["tickets"] == 0, what="its prefetch to end")


def test_an_administrator_who_ends_a_session_is_told_of_its_slots_on_devices(gpu_node: GpuNode, program: Make) -> None:
    one, other = program(), program()
    slots = one.reserve(3)
    (number,) = [each["id"] for each in gpu_node.stats()["sessions"] if each["client"] == "wire"][:1]
    ended = other.wire.call(end_session=pb.EndSessionRequest(session=number)).end_session
    assert (ended.found, ended.quarantined) == (True, 3)
    assert one.wire.last_words() == "an administrator ended this session"
    assert gpu_node.stats_of()["quarantined"] == 3
    after = program(resume=pb.Resume(nonce=one.hello.nonce, devices=[uses(one, granted=slots)]))
    assert list(after.hello.devices[0].granted) == slots
    after.ask_device(abort=pb.AbortRequest(slots=slots))
    assert gpu_node.stats_of()["granted"] == 0
