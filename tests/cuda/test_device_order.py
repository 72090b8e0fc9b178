"""Who waits for an event never sees the bytes of before, however slow the copy; and events say what CUDA's say."""

import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from kvstored_cuda.devices import Device, Direction, Handle
from kvstored_cuda.devices.errors import DeviceError, DeviceTimeout, InvalidHandle
from kvstored_cuda.devices.faults import Fault, FaultPlan
from kvstored_cuda.devices.host_device import HostDevice
from kvstored_cuda.devices.host_events import EVENTS_MAX
from kvstored_cuda.devices.host_pages import address_of
from tests.cuda.device_peer import HOST_BYTES, HOST_UUID, Peer, PeerError, pattern, read, write

MIB = 1 << 20
EVENT_S = 30.0


def event_of(peer: Peer, do: str = "event") -> Handle:
    return Handle.from_bytes(bytes.fromhex(peer(do)))


def test_a_reader_that_waits_for_the_event_never_sees_old_bytes(device: Device, spawn: Callable[..., Peer]) -> None:
    segment = device.allocate(4 * MIB)
    peer = spawn(faults="transfer:delay=0.02")
    address = peer.open(segment.handle, device.generation)
    event = device.open_event(event_of(peer), peer.generation)
    for seed in range(1, 20):
        peer("write", address=address, seed=seed, size_bytes=4 * MIB)
        peer("record")
        event.synchronize(EVENT_S)
        assert read(device, segment.address, 4 * MIB, device.stream()) == pattern(seed, 4 * MIB)


def test_a_reader_that_does_not_wait_sees_a_torn_block_on_the_host_device(spawn: Callable[..., Peer]) -> None:
    """Or the test above could not fail."""
    device = HostDevice(HOST_UUID, HOST_BYTES)
    segment = device.allocate(MIB)
    peer = spawn(faults="transfer:delay=60")
    address = peer.open(segment.handle, device.generation)
    peer("write", address=address, seed=1, size_bytes=MIB)
    event = device.open_event(event_of(peer), peer.generation)
    until = time.monotonic() + EVENT_S
    while not device.array(segment.address, MIB)[: MIB // 2].any():
        assert time.monotonic() < until
    assert bytes(device.array(segment.address, MIB)) != pattern(1, MIB)
    assert not event.query()


def test_a_stream_that_waits_for_the_event_of_another_process_reads_new_bytes(
    device: Device, spawn: Callable[..., Peer]
) -> None:
    """What a get does: the wait is on the caller's stream, the caller's thread goes on."""
    segment = device.allocate(2 * MIB)
    peer = spawn(faults="transfer:delay=0.2")
    address = peer.open(segment.handle, device.generation)
    peer("write", address=address, seed=4, size_bytes=2 * MIB)
    event = device.open_event(event_of(peer), peer.generation)
    stream = device.wrap_stream(device.stream().pointer)
    host = device.host_allocate(2 * MIB)
    stream.wait(event)
    event.close()  # what waits already goes on waiting
    device.copy(host, segment.address, 2 * MIB, Direction.DEVICE_TO_HOST, stream)
    stream.synchronize(EVENT_S)
    assert ctypes.string_at(host, 2 * MIB) == pattern(4, 2 * MIB)
    device.host_free(host)


def test_an_event_goes_both_ways(device: Device, spawn: Callable[..., Peer]) -> None:
    """The owner fills a slot for a reader: the reader's stream waits for the owner's event."""
    segment = device.allocate(2 * MIB)
    peer = spawn()
    address = peer.open(segment.handle, device.generation)
    stream, event = device.stream(), device.event()
    write(device, segment.address, pattern(8, 2 * MIB), stream)
    event.record(stream)
    assert event.handle is not None
    peer("open_event", handle=event.handle.to_bytes().hex(), of=_said(device))
    peer("wait")
    assert bytes.fromhex(peer("read", address=address, size_bytes=2 * MIB)) == pattern(8, 2 * MIB)
    peer("close_event")


def _said(device: Device) -> list[object]:
    mine = device.generation
    return [mine.pid, mine.born, mine.nonce.hex()]


def test_an_event_that_was_never_recorded_is_complete(device: Device) -> None:
    event = device.event()
    assert event.query()
    event.synchronize(0)
    stream = device.stream()
    stream.wait(event)
    stream.synchronize(EVENT_S)
    event.close()
    assert device.use().nothing


def test_who_waits_for_an_event_that_is_closed_meanwhile_still_waits_for_the_work(
    spawn: Callable[..., Peer],
) -> None:
    """And its place is not given to another event before."""
    plan = FaultPlan(Fault("transfer", delay_s=60, times=1))
    device, peer = HostDevice(HOST_UUID, HOST_BYTES, plan), spawn()
    segment, stream, event = device.allocate(MIB), device.stream(), device.event()
    address = peer.open(segment.handle, device.generation)
    write(device, segment.address, pattern(1, MIB), stream)
    event.record(stream)
    assert event.handle is not None
    peer("open_event", handle=event.handle.to_bytes().hex(), of=_said(device))
    peer("wait")
    event.close()
    with pytest.raises(PeerError, match="InvalidHandle"):
        peer("query")
    others = [device.event() for _ in range(EVENTS_MAX - 1)]
    with pytest.raises(DeviceError):
        device.event()
    peer.start("read", address=address, size_bytes=MIB)
    threading.Timer(0.1, plan.release).start()
    assert bytes.fromhex(peer.answer()) == pattern(1, MIB)
    stream.synchronize(EVENT_S)
    others.append(device.event())
    for other in others:
        other.close()
    peer("close_event")
    assert device.use().events == 0


def test_an_event_of_this_process_alone_has_no_handle(device: Device) -> None:
    event, stream = device.event(interprocess=False), device.stream()
    assert event.handle is None
    event.record(stream)
    event.synchronize(EVENT_S)
    event.close()
    assert device.use().nothing


def test_an_event_tells_of_its_last_record_alone() -> None:
    plan = FaultPlan()
    device = HostDevice(HOST_UUID, HOST_BYTES, plan)
    segment, stream, event = device.allocate(MIB), device.stream(), device.event()
    event.record(stream)
    event.synchronize(EVENT_S)
    plan.add(Fault("transfer", delay_s=60))
    write(device, segment.address, pattern(1, MIB), stream)
    assert event.query()
    event.record(stream)
    assert not event.query()
    with pytest.raises(DeviceTimeout, match=r"did not end within 0\.05 s"):
        event.synchronize(0.05)
    plan.release()
    event.synchronize(EVENT_S)


def test_what_is_recorded_on_one_stream_does_not_wait_for_another() -> None:
    plan = FaultPlan(Fault("transfer", delay_s=60, times=1))
    device = HostDevice(HOST_UUID, HOST_BYTES, plan)
    segment, slow, quick, event = device.allocate(MIB), device.stream(), device.stream(), device.event()
    write(device, segment.address, pattern(1, MIB // 2), slow)
    _until_it_moves(device, segment.address)
    write(device, segment.address + MIB // 2, pattern(2, MIB // 2), quick)
    event.record(quick)
    event.synchronize(EVENT_S)
    assert not slow.query()
    plan.release()
    slow.synchronize(EVENT_S)


def _until_it_moves(device: HostDevice, address: int) -> None:
    until = time.monotonic() + EVENT_S
    while not device.array(address, 64).any():
        assert time.monotonic() < until


def test_a_closed_event_is_refused_here_and_with_its_importers(spawn: Callable[..., Peer]) -> None:
    device, peer = HostDevice(HOST_UUID, HOST_BYTES), spawn()
    handle = event_of(peer)
    event = device.open_event(handle, peer.generation)
    peer("close_event")
    with pytest.raises(InvalidHandle, match="closed"):
        event.query()
    peer("event")  # which takes the same place in the page
    with pytest.raises(InvalidHandle, match="closed"):
        event.query()
    with pytest.raises(InvalidHandle, match="closed"):
        device.open_event(handle, peer.generation)
    event.close()
    event.close()
    assert device.use().nothing


def test_there_are_as_many_events_as_the_page_has() -> None:
    device = HostDevice(HOST_UUID, HOST_BYTES)
    events = [device.event() for _ in range(EVENTS_MAX)]
    with pytest.raises(Exception, match=f"{EVENTS_MAX} events"):
        device.event()
    for event in events:
        event.close()
    device.event().close()
    assert device.use().nothing


@pytest.mark.parametrize("trusting", [False, True])
def test_what_an_event_of_a_dead_recorder_says_is_the_plans_choice(spawn: Callable[..., Peer], trusting: bool) -> None:
    """Both answers are possible with CUDA, so whoever asks must do well with either."""
    device = HostDevice(HOST_UUID, HOST_BYTES, FaultPlan(trusting=trusting))
    segment = device.allocate(MIB)
    peer = spawn(faults="transfer:delay=60")
    address = peer.open(segment.handle, device.generation)
    peer("write", address=address, seed=1, size_bytes=MIB)
    event = device.open_event(event_of(peer), peer.generation)
    assert not event.query()
    peer.kill()
    assert event.query() is trusting
    if not trusting:
        with pytest.raises(DeviceTimeout):
            event.synchronize(0.05)


def test_page_locked_memory_is_read_when_the_copy_runs_and_other_memory_at_the_call() -> None:
    """Who writes on into a page-locked buffer before its copy is done sends what he writes."""
    plan = FaultPlan(Fault("transfer", delay_s=60))
    device = HostDevice(HOST_UUID, HOST_BYTES, plan)
    segment, stream = device.allocate(2 * MIB), device.stream()
    locked = device.host_allocate(MIB)
    plain = bytearray(b"a" * MIB)
    ctypes.memset(locked, ord("a"), MIB)
    device.copy(segment.address, locked, MIB, Direction.HOST_TO_DEVICE, stream)
    device.copy(segment.address + MIB, address_of(plain), MIB, Direction.HOST_TO_DEVICE, stream)
    ctypes.memset(locked + MIB // 2, ord("b"), MIB // 2)
    plain[:] = b"b" * MIB
    threading.Timer(0.1, plan.release).start()
    stream.synchronize(EVENT_S)
    assert bytes(device.array(segment.address, 2 * MIB)) == b"a" * (MIB // 2) + b"b" * (MIB // 2) + b"a" * MIB
    device.host_free(locked)
