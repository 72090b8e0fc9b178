"""The driver's calls: made without Python's lock, with the context of the device alone, and undone where they fail."""

import ctypes
import os

import pytest

from kvstored_cuda.devices import Direction, Handle, HandleKind
from kvstored_cuda.devices.cuda_device import SEGMENT_GRANULE_BYTES, CudaDevice
from kvstored_cuda.devices.cuda_driver import Driver
from kvstored_cuda.devices.errors import InvalidHandle, IpcRefused, OutOfDeviceMemory
from tests.cuda.device_peer import Peer
from tests.cuda.standin import have_bindings, library, standin_device

MIB = 1 << 20
BLOCK_S = 1.0
NEEDS_BINDINGS = pytest.mark.skipif(not have_bindings(), reason="cuda-bindings is not installed")


@pytest.fixture
def device() -> CudaDevice:
    return standin_device()


@pytest.fixture
def counts() -> ctypes.CDLL:
    """The stand-in's own counters."""
    return ctypes.CDLL(str(library()))


@pytest.mark.parametrize("kind", ["standin", pytest.param("bindings", marks=NEEDS_BINDINGS)])
def test_a_close_that_blocks_does_not_hold_pythons_lock(kind: str) -> None:
    """Or a thread of its own would help nobody: cupy's ipcCloseMemHandle keeps it."""
    owner, importer = Peer(kind), Peer(kind)
    try:
        way = HandleKind.DESCRIPTOR if kind == "bindings" else HandleKind.IPC
        _, raw = owner("allocate", size_bytes=2 * MIB, kind=int(way))
        number = owner("descriptor_number")
        descriptor = os.open(f"/proc/{owner.process.pid}/fd/{number}", os.O_RDWR) if number >= 0 else -1
        importer.open(Handle.from_bytes(bytes.fromhex(raw), descriptor), owner.generation)
        if descriptor >= 0:
            os.close(descriptor)
        assert importer("close_while_counting", block_s=BLOCK_S) > 1000
        assert importer("use") == [0, 0, 0, 0, 0]
    finally:
        owner.close()
        importer.close()


def test_a_uuid_with_zero_bytes_is_whole(device: CudaDevice) -> None:
    assert device.uuid == "GPU-00a1a2a3-00a5-a6a7-00a9-aaab00adaeaf"


def test_a_device_that_was_only_asked_its_name_has_no_context(counts: ctypes.CDLL) -> None:
    before = counts.standin_retained()
    device = standin_device()
    assert device.use().nothing
    assert counts.standin_retained() == before
    device.memory()
    assert counts.standin_retained() == before + 1
    device.close()
    assert counts.standin_retained() == before


def test_a_device_with_something_held_keeps_its_context(counts: ctypes.CDLL) -> None:
    device = standin_device()
    segment = device.allocate(MIB)
    held = counts.standin_retained()
    device.close()
    assert counts.standin_retained() == held
    segment.free()
    device.close()
    assert counts.standin_retained() == held - 1


def test_every_call_gives_the_callers_context_back_also_where_it_fails(device: CudaDevice, counts: ctypes.CDLL) -> None:
    segment, stream, event = device.allocate(MIB), device.stream(), device.event()
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(1 << 40)
    with pytest.raises(Exception, match="InvalidValue"):
        device.copy(segment.address, segment.address + 4 * MIB, 1, Direction.DEVICE_TO_DEVICE, stream)
    event.record(stream)
    stream.wait(event)
    for end in (event.close, stream.close, segment.free):
        end()
    with pytest.raises(InvalidHandle):
        event.query()
    assert counts.standin_depth() == 0
    assert device.use().nothing


def test_a_segment_is_whole_granules_and_its_handle_says_what_was_asked_for(device: CudaDevice) -> None:
    free_bytes = device.memory().free_bytes
    segment = device.allocate(MIB)
    assert segment.size_bytes == segment.handle.size_bytes == MIB
    assert free_bytes - device.memory().free_bytes == device.use().allocated_bytes == SEGMENT_GRANULE_BYTES
    segment.free()


def test_a_segment_that_cannot_be_exported_is_given_back(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = device.memory().free_bytes

    def refused(self: Driver, address: int) -> bytes:
        raise IpcRefused("exporting a segment")

    monkeypatch.setattr(Driver, "export_memory", refused)
    with pytest.raises(IpcRefused):
        device.allocate(MIB)
    assert device.memory().free_bytes == free_bytes
    assert device.use().nothing


def test_no_driver_is_an_oserror_that_names_the_library() -> None:
    with pytest.raises(OSError, match=r"libnowhere\.so"):
        Driver("libnowhere.so")
