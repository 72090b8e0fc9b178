"""What goes wrong with a device is a typed error with something to do about it, and leaves nothing behind."""

import threading
from collections.abc import Callable

import pytest

from kvstored.v1 import errors as wire
from kvstored_cuda.devices import Device, Direction, Handle, host_device
from kvstored_cuda.devices import errors as device_errors
from kvstored_cuda.devices.errors import (
    CODES,
    DeviceError,
    DeviceLost,
    DeviceTimeout,
    InvalidAddress,
    InvalidHandle,
    IpcRefused,
    OutOfDeviceMemory,
    PageLockRefused,
    from_code,
)
from kvstored_cuda.devices.faults import Fault, FaultPlan
from kvstored_cuda.devices.host_device import HostDevice
from kvstored_cuda.devices.host_pages import address_of
from tests.cuda.device_peer import HOST_BYTES, HOST_UUID, Peer, PeerError, pattern, read, write

MIB = 1 << 20
EVENT_S = 30.0


def test_more_memory_than_there_is_takes_nothing(device: Device) -> None:
    memory = device.memory()
    assert 0 < memory.free_bytes <= memory.total_bytes
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(memory.total_bytes + (2 << 20))
    assert device.use().nothing
    segment = device.allocate(2 * MIB)
    segment.free()


def test_memory_that_runs_out_later_is_the_same_error_and_comes_back() -> None:
    device = HostDevice(HOST_UUID, 8 * MIB)
    segments = [device.allocate(2 * MIB) for _ in range(4)]
    with pytest.raises(OutOfDeviceMemory, match="0 are free"):
        device.allocate(1)
    segments.pop().free()
    device.allocate(2 * MIB)
    assert device.memory().free_bytes == 0


def test_a_copy_that_fails_loses_the_device_of_that_process_and_no_other(spawn: Callable[..., Peer]) -> None:
    device = HostDevice(HOST_UUID, HOST_BYTES)
    segment = device.allocate(2 * MIB)
    bad, good = spawn(faults="transfer:fail=DeviceLost,after=1"), spawn()
    addresses = [peer.open(segment.handle, device.generation) for peer in (bad, good)]
    bad("write", address=addresses[0], seed=1, size_bytes=MIB)
    bad("synchronize")
    bad("write", address=addresses[0], seed=2, size_bytes=MIB)
    with pytest.raises(PeerError, match="DeviceLost"):
        bad("synchronize")
    for again in ("event", "synchronize"):
        with pytest.raises(PeerError, match="DeviceLost"):
            bad(again)
    good("write", address=addresses[1] + MIB, seed=3, size_bytes=MIB)
    good("synchronize")
    assert read(device, segment.address + MIB, MIB, device.stream()) == pattern(3, MIB)


def test_an_event_after_a_copy_that_failed_is_never_complete(spawn: Callable[..., Peer]) -> None:
    """Whoever commits by the event never shows the block."""
    device = HostDevice(HOST_UUID, HOST_BYTES)
    segment = device.allocate(MIB)
    peer = spawn(faults="transfer:delay=3,fail=DeviceLost")
    address = peer.open(segment.handle, device.generation)
    peer("write", address=address, seed=1, size_bytes=MIB)
    handle = Handle.from_bytes(bytes.fromhex(peer("event")))
    event = device.open_event(handle, peer.generation)
    with pytest.raises(PeerError, match="DeviceLost"):
        peer("synchronize")
    assert not event.query()


def test_a_lost_device_refuses_all_and_still_lets_go_of_what_was_open(spawn: Callable[..., Peer]) -> None:
    device, peer = HostDevice(HOST_UUID, HOST_BYTES), spawn()
    segment, stream, event = device.allocate(MIB), device.stream(), device.event()
    handle = Handle.from_bytes(bytes.fromhex(peer("allocate", size_bytes=MIB)[1]))
    mapping = device.open(handle, peer.generation)
    imported = device.open_event(Handle.from_bytes(bytes.fromhex(peer("event"))), peer.generation)
    device.lose("Xid 79")
    raw = bytearray(MIB)
    for call in (
        lambda: device.allocate(MIB),
        lambda: device.open(handle, peer.generation),
        device.memory,
        device.stream,
        device.event,
        stream.query,
        lambda: event.record(stream),
        lambda: imported.record(stream),
        lambda: stream.wait(imported),
        lambda: device.copy(segment.address, address_of(raw), MIB, Direction.HOST_TO_DEVICE, stream),
    ):
        with pytest.raises(DeviceLost, match="Xid 79"):
            call()
    for end in (mapping.close, imported.close, event.close, segment.free):
        end()
    assert device.use().nothing


@pytest.mark.parametrize("call", ["memory", "query", "register"])
def test_a_device_that_any_call_finds_lost_stays_lost(call: str) -> None:
    device = HostDevice(HOST_UUID, HOST_BYTES, FaultPlan(Fault(call, fail=DeviceLost, times=1)))
    event = device.event()
    first: dict[str, Callable[[], object]] = {
        "memory": device.memory,
        "query": event.query,
        "register": lambda: device.host_register(0, 4096, read_only=False),
    }
    with pytest.raises(DeviceLost):
        first[call]()
    for again in first.values():
        with pytest.raises(DeviceLost, match=call):
            again()


def test_copies_outside_of_what_is_there_are_refused_at_the_call() -> None:
    device = HostDevice(HOST_UUID, HOST_BYTES)
    segment, stream, raw = device.allocate(MIB), device.stream(), bytearray(2 * MIB)
    host = address_of(raw)
    to_device, to_host, within = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST, Direction.DEVICE_TO_DEVICE
    for to, source, size_bytes, direction in (
        (segment.address, host, MIB + 1, to_device),
        (segment.address + 1, host, MIB, to_device),
        (segment.address - 1, host, 1, to_device),
        (host, segment.address + MIB, 1, to_host),
        (host, segment.address, -1, to_host),
        (segment.address, host, 1, within),
        (segment.address, segment.address, 1, to_device),
        (segment.address, segment.address, 1, to_host),
    ):
        with pytest.raises(InvalidAddress):
            device.copy(to, source, size_bytes, direction, stream)
    assert not device.array(segment.address, MIB).any()


def test_copies_within_the_device_move_every_byte(device: Device) -> None:
    segment, stream = device.allocate(4 * MIB), device.stream()
    write(device, segment.address, pattern(6, MIB + 13), stream)
    device.copy(segment.address + 2 * MIB + 7, segment.address, MIB + 13, Direction.DEVICE_TO_DEVICE, stream)
    raw = read(device, segment.address + 2 * MIB, MIB + 64, stream)
    assert raw[7 : 7 + MIB + 13] == pattern(6, MIB + 13)
    assert not any(raw[:7] + raw[7 + MIB + 13 :])
    segment.free()


def test_a_kernel_that_raises_loses_the_device() -> None:
    device = HostDevice(HOST_UUID, HOST_BYTES)
    stream = device.stream()

    def kernel() -> None:
        raise ZeroDivisionError("in the kernel")

    stream.enqueue(kernel)
    with pytest.raises(DeviceLost, match="in the kernel"):
        stream.synchronize(EVENT_S)


def test_every_call_that_the_plan_names_can_fail(spawn: Callable[..., Peer]) -> None:
    plan = FaultPlan()
    device, peer = HostDevice(HOST_UUID, HOST_BYTES, plan), spawn()
    handle = Handle.from_bytes(bytes.fromhex(peer("allocate", size_bytes=MIB)[1]))
    segment, stream, event = device.allocate(MIB), device.stream(), device.event()
    raw = bytearray(MIB)
    calls: dict[str, Callable[[], object]] = {
        "allocate": lambda: device.allocate(MIB),
        "open": lambda: device.open(handle, peer.generation),
        "copy": lambda: device.copy(segment.address, address_of(raw), MIB, Direction.HOST_TO_DEVICE, stream),
        "event": device.event,
        "record": lambda: event.record(stream),
        "query": event.query,
        "host_allocate": lambda: device.host_allocate(MIB),
        "memory": device.memory,
        "free": segment.free,
    }
    for name, call in calls.items():
        plan.add(Fault(name, fail=IpcRefused, times=1))
        with pytest.raises(IpcRefused, match=name):
            call()
        call()


def test_a_plan_reads_from_the_environment_what_its_rules_say() -> None:
    text = "open:delay=0.5; trusting; allocate:fail=OutOfDeviceMemory,after=2,times=1"
    plan = FaultPlan.from_environment({"KVSTORED_HOST_DEVICE_FAULTS": text})
    assert plan.trusting
    plan.meet("allocate")
    plan.meet("allocate")
    with pytest.raises(OutOfDeviceMemory):
        plan.meet("allocate")
    plan.meet("allocate")
    for wrong in ("opne:delay=1", "open:dealy=1", "open:fail=KeyError", "open:delay=x"):
        with pytest.raises(ValueError):
            FaultPlan.from_environment({"KVSTORED_HOST_DEVICE_FAULTS": wrong})


def kinds() -> list[type[DeviceError]]:
    found = [one for one in vars(device_errors).values() if isinstance(one, type) and issubclass(one, DeviceError)]
    assert len(found) == 14
    return found


@pytest.mark.parametrize("error", kinds())
def test_each_error_has_a_code_on_the_wire_and_a_remedy(error: type[DeviceError]) -> None:
    assert error.remedy
    assert wire.BY_CODE[error("x").code] in error.__mro__
    assert error is DeviceError or error.remedy != DeviceError.remedy


def test_the_names_of_the_codes_are_cudas() -> None:
    """cupy names a code without a driver, from the runtime it brings."""
    runtime = pytest.importorskip("cupy.cuda.runtime")
    for code, (name, _) in CODES.items():
        assert str(runtime.CUDARuntimeError(code)).split(":")[0] == name


def test_a_code_means_what_was_being_done() -> None:
    assert type(from_code(1, "copying 5 bytes")) is InvalidAddress
    assert type(from_code(1, "opening a segment (cuIpcOpenMemHandle_v2)")) is InvalidHandle
    assert type(from_code(2, "page-locking 5 bytes at 0x0")) is PageLockRefused
    assert type(from_code(2, "allocating 5 bytes")) is OutOfDeviceMemory
    for sticky in (46, 214, 220, 226, 700, 709, 710, 714, 719, 999):
        assert type(from_code(sticky, "copying")) is DeviceLost, sticky
    unknown = from_code(12345, "copying")
    assert type(unknown) is DeviceError
    assert "12345" in str(unknown)


def test_free_and_close_wait_for_copies_that_are_enqueued(spawn: Callable[..., Peer]) -> None:
    """As cudaFree does; or the copy would go on in memory that is gone."""
    plan = FaultPlan(Fault("transfer", delay_s=0.2))
    device, peer = HostDevice(HOST_UUID, HOST_BYTES, plan), spawn()
    handle = Handle.from_bytes(bytes.fromhex(peer("allocate", size_bytes=MIB)[1]))
    segment, mapping, stream = device.allocate(MIB), device.open(handle, peer.generation), device.stream()
    write(device, mapping.address, pattern(1, MIB), stream)
    mapping.close()
    assert stream.query()
    write(device, segment.address, pattern(1, MIB), stream)
    segment.free()
    assert stream.query()
    assert device.use().nothing


def test_a_free_does_not_wait_for_what_is_enqueued_after_it() -> None:
    device = HostDevice(HOST_UUID, HOST_BYTES)
    kept, segment, stream = device.allocate(MIB), device.allocate(MIB), device.stream()
    done = threading.Event()

    def busy() -> None:
        while not done.is_set():
            device.copy(kept.address, kept.address + MIB // 2, MIB // 2, Direction.DEVICE_TO_DEVICE, stream)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        segment.free()
    finally:
        done.set()
        thread.join(EVENT_S)
    assert device.use().allocations == 1


def test_a_free_that_waits_too_long_frees_nothing_and_can_be_asked_again(
    spawn: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_device, "FREE_S", 0.05)
    plan = FaultPlan(Fault("transfer", delay_s=60, times=1))
    device, peer = HostDevice(HOST_UUID, HOST_BYTES, plan), spawn()
    segment, stream = device.allocate(MIB), device.stream()
    write(device, segment.address, pattern(1, MIB), stream)
    with pytest.raises(DeviceTimeout):
        segment.free()
    plan.release()
    stream.synchronize(EVENT_S)
    monkeypatch.setattr(host_device, "FREE_S", EVENT_S)
    peer.open(segment.handle, device.generation)
    peer("close")
    segment.free()
    assert device.use().nothing


def test_a_closed_stream_still_does_what_was_enqueued() -> None:
    plan = FaultPlan(Fault("transfer", delay_s=0.1))
    device = HostDevice(HOST_UUID, HOST_BYTES, plan)
    segment, stream, event = device.allocate(MIB), device.stream(), device.event()
    write(device, segment.address, pattern(1, MIB), stream)
    other = device.stream()
    event.record(stream)
    other.wait(event)
    stream.close()
    other.close()
    event.synchronize(EVENT_S)
    assert bytes(device.array(segment.address, MIB)) == pattern(1, MIB)
    with pytest.raises(InvalidHandle):
        write(device, segment.address, pattern(2, MIB), stream)
    with pytest.raises(InvalidHandle):
        device.wrap_stream(stream.pointer)
    device.memory()
