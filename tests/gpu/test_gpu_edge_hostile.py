"""Messages about devices as a broken or hostile client writes them: an error that says why, and nothing changes."""

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvstored.v1 import DESCRIPTORS_MAX, KEYS_MAX
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, KVStoreError
from kvstored_cuda.devices.handles import HANDLE_BYTES, Generation, Handle, HandleKind, Thing
from tests.gpu.edge_program import DeviceProgram, Make, programs
from tests.gpu.gpu_nodes import GpuNode
from tests.server.ssd_program import keys_of


@pytest.fixture
def program(gpu_node: GpuNode) -> Iterator[Make]:
    """Makes clients; afterwards the daemon has met no bug of its own."""
    with programs(gpu_node) as make:
        yield make
        health = make().wire.call(health=pb.HealthRequest()).health
        assert health.healthy, list(health.problems)
        assert "Traceback" not in gpu_node.output()


@pytest.fixture
def one(program: Make) -> DeviceProgram:
    return program()


def real_event(one: DeviceProgram) -> Handle:
    handle = one.record().handle
    assert handle is not None
    return handle


def refused_event(one: DeviceProgram, slots: list[int], raw: bytes) -> str:
    with pytest.raises((InvalidArgument, FailedPrecondition)) as refused:
        one.commit_on_device(keys_of("x", len(slots)), slots, raw)
    return str(refused.value)


def test_an_event_of_another_length_is_refused_and_the_slots_stay_granted(one: DeviceProgram) -> None:
    slots, raw = one.reserve(1), real_event(one).to_bytes()
    for wrong in (raw[:-1], raw + b"\0", b"\0", b"x" * 64, bytes(HANDLE_BYTES)):
        assert "handle" in refused_event(one, slots, wrong)
    one.ask_device(abort=pb.AbortRequest(slots=slots))


def test_a_handle_that_is_no_event_of_this_device_and_process_is_refused(one: DeviceProgram) -> None:
    slots, event = one.reserve(1), real_event(one)
    one.write(slots, keys_of("x", 1))
    (memory,) = one.ask_device(segments=pb.SegmentsRequest(ids=[slots[0] >> 32])).segments.segments
    assert "handle of memory" in refused_event(one, slots, memory.handle)
    wrong = {
        "handle of memory": {"thing": Thing.MEMORY},
        "a kind that events": {"kind": HandleKind.DESCRIPTOR},
        "of device 'HOST-7'": {"uuid": "HOST-7"},
        "which began at": {"generation": Generation(1, 12345, b"12345678")},
    }
    for why, changes in wrong.items():
        assert why in refused_event(one, slots, dataclasses.replace(event, **changes).to_bytes())  # type: ignore[arg-type]
    assert "daemon" not in refused_event(one, slots, dataclasses.replace(event, generation=one.exporter).to_bytes())
    reply = one.commit_on_device(keys_of("x", 1), slots, event.to_bytes())
    assert one.ended_commit(reply).state == pb.TICKET_DONE


def test_one_session_has_the_events_of_one_life_of_its_process(one: DeviceProgram) -> None:
    event = real_event(one)
    slots = one.reserve(2)
    one.write(slots, keys_of("x", 2))
    assert one.ended_commit(one.commit_on_device(keys_of("x", 1), slots[:1], event.to_bytes())).state == pb.TICKET_DONE
    other = dataclasses.replace(event.generation, nonce=b"another!")
    why = refused_event(one, slots[1:], dataclasses.replace(event, generation=other).to_bytes())
    assert str(other) in why
    assert str(event.generation) in why


def test_an_event_that_its_exporter_has_closed_fails_the_commit_and_its_slots_can_be_given_back_alone(
    one: DeviceProgram,
) -> None:
    event = one.record()
    assert event.handle is not None
    raw = event.handle.to_bytes()
    event.close()
    slots = one.reserve(1)
    found = one.ended_commit(one.commit_on_device(keys_of("x", 1), slots, raw))
    assert found.state == pb.TICKET_FAILED
    with pytest.raises(FailedPrecondition, match="whose event failed"):
        one.commit_on_device(keys_of("x", 1), slots)
    one.stream.synchronize(10.0)
    one.ask_device(abort=pb.AbortRequest(slots=slots))
    with pytest.raises(InvalidArgument, match="not granted"):
        one.ask_device(abort=pb.AbortRequest(slots=slots))


def test_slots_of_others_cannot_be_committed_given_back_or_released(program: Make) -> None:
    one, other, keys = program(), program(), keys_of("y", 2)
    foreign = program(tenant="foreign", namespace="foreign")
    slots = one.reserve(1)
    one.stored_on_device(keys)
    leased = one.acquired_on_device(keys)
    for thief in (other, foreign):
        thief.reserve(1)
        for request in ({"abort": pb.AbortRequest(slots=slots)}, {"release": pb.ReleaseRequest(slots=leased)}):
            with pytest.raises(InvalidArgument):
                thief.ask_device(**request)
        with pytest.raises(FailedPrecondition, match="is not granted to this session"):
            thief.commit_on_device(keys_of("z", 1), slots)
    assert foreign.acquired_on_device(keys) == [], "another tenant's blocks"
    one.check_device(keys)
    one.ask_device(abort=pb.AbortRequest(slots=slots))


def test_segments_of_other_tenants_and_those_that_are_not_there_are_left_out(program: Make) -> None:
    one, foreign = program(), program(tenant="foreign", namespace="foreign")
    slots = one.reserve(1)
    foreign.reserve(1)
    asked = pb.SegmentsRequest(ids=[slots[0] >> 32, 12345, 0, 0xFFFFFFFF])
    assert not foreign.ask_device(segments=asked).segments.segments
    assert len(one.ask_device(segments=asked).segments.segments) == 1
    with pytest.raises(InvalidArgument, match="segments in one message"):
        one.ask_device(segments=pb.SegmentsRequest(ids=range(DESCRIPTORS_MAX + 1)))


def test_shapes_that_cannot_be_are_named(one: DeviceProgram) -> None:
    slots, keys = one.reserve(2), keys_of("x", 2)
    request = one.commit_request(keys, slots)
    changes: list[dict[str, Any]] = [
        {"keys": [*keys, *keys]},
        {"keys": [b"short", keys[1]]},
        {"slots": [slots[0], slots[0]]},
        {"parents": [b"short", b""]},
        {"depths": [0]},
        {"keys": [keys[0]] * (KEYS_MAX + 1)},
        {"hint": pb.Hint(ttl_s=-1.0)},
        {"hint": pb.Hint(conversation="x" * 300)},
    ]
    for change in changes:
        wrong = pb.CommitRequest()
        wrong.CopyFrom(request.commit)
        for name, value in change.items():
            wrong.ClearField(name)
            wrong.MergeFrom(pb.CommitRequest(**{name: value}))
        with pytest.raises(InvalidArgument):
            one.ask_device(commit=pb.DeviceCommitRequest(commit=wrong))
    for request_ in (
        {"abort": pb.AbortRequest(all=True)},
        {"release": pb.ReleaseRequest(all=True)},
        {"abort": pb.AbortRequest(slots=[slots[0], slots[0]])},
        {"reserve": pb.ReserveRequest(namespace_id=one.number, count=0)},
        {"reserve": pb.ReserveRequest(namespace_id=one.number, count=1000)},
        {"prefetch": pb.PrefetchRequest(namespace_id=one.number, keys=keys, deadline_ms=600_001)},
        {"acquire": pb.AcquireRequest(namespace_id=one.number, keys=[b"short"])},
    ):
        with pytest.raises(InvalidArgument):
            one.ask_device(**request_)
    with pytest.raises(FailedPrecondition, match="namespace 777"):
        one.ask_device(acquire=pb.AcquireRequest(namespace_id=777, keys=keys))
    one.ask_device(abort=pb.AbortRequest(slots=slots))


def test_closing_what_was_never_opened_changes_nothing(one: DeviceProgram) -> None:
    one.ask_device(closed=pb.DeviceClosedRequest(segments=[1, 2, 3, 0xFFFFFFFF]))
    keys = keys_of("x", 1)
    one.stored_on_device(keys)
    one.ask_device(closed=pb.DeviceClosedRequest(segments=[0xFFFFFFFF]))
    one.check_device(keys)


def test_requests_of_chance_are_answered_and_break_nothing(one: DeviceProgram, program: Make) -> None:
    r, keys = random.Random(7), keys_of("x", 4)
    event = real_event(one).to_bytes()
    slots = one.reserve(4)
    known = [*slots, 0, 1 << 32, 0xFFFFFFFFFFFFFFFF]

    def some(of: list[int]) -> list[int]:
        return r.choices(of, k=r.randrange(4))

    def chance() -> dict[str, object]:
        named = r.choices(keys, k=r.randrange(4))
        commit = pb.CommitRequest(
            namespace_id=r.choice([one.number, 0, 9]),
            keys=named,
            slots=some(known),
            parents=r.choices([b"", keys[0], b"x"], k=len(named)),
            depths=some([0, 1, 0xFFFFFFFF]),
        )
        raw = bytearray(event)
        raw[r.randrange(len(raw))] ^= 1 << r.randrange(8)
        return r.choice(
            [
                {"commit": pb.DeviceCommitRequest(commit=commit, event=r.choice([b"", bytes(raw), event]))},
                {"abort": pb.AbortRequest(slots=some(known))},
                {"release": pb.ReleaseRequest(slots=some(known))},
                {"acquire": pb.AcquireRequest(namespace_id=one.number, keys=named)},
                {"prefetch": pb.PrefetchRequest(namespace_id=one.number, keys=named, priority=r.randrange(-99, 99))},
                {"closed": pb.DeviceClosedRequest(segments=some([0, 1, 2, 99]))},
                {"segments": pb.SegmentsRequest(ids=some([0, 1, 2, 99]))},
                {"reserve": pb.ReserveRequest(namespace_id=one.number, count=r.randrange(3))},
            ]
        )

    for _ in range(300):
        with contextlib.suppress(KVStoreError):
            one.ask_device(**chance())
    sound = program()
    sound.stored_on_device(keys_of("sound", 2))
    sound.check_device(keys_of("sound", 2))
