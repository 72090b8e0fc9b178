"""Handles: opened once, of one life of one process, and of nothing else. Between real processes."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvstored_cuda.devices import GENERATION_BYTES, HANDLE_BYTES, Device, Generation, Handle, HandleKind, Thing
from kvstored_cuda.devices.errors import InvalidHandle, IpcRefused, OtherDriver, OwnHandle, StaleHandle
from kvstored_cuda.devices.handles import TOKEN_BYTES
from kvstored_cuda.devices.host_device import HostDevice
from tests.cuda.device_peer import HOST_BYTES, HOST_UUID, Peer, PeerError, pattern, read, write

MIB = 1 << 20


def exported(peer: Peer, size_bytes: int = 2 * MIB) -> Handle:
    """A segment of the other process."""
    _, raw = peer("allocate", size_bytes=size_bytes)
    return Handle.from_bytes(bytes.fromhex(raw))


def test_a_handle_reads_back_as_it_was_written() -> None:
    mine = Generation.mine()
    handle = Handle(Thing.MEMORY, HandleKind.IPC, mine, 7, HOST_UUID, 13000, 3 << 40, os.urandom(TOKEN_BYTES))
    raw = handle.to_bytes()
    assert len(raw) == HANDLE_BYTES
    assert Handle.from_bytes(raw) == handle
    assert Handle.from_bytes(raw, 5) == replace(handle, descriptor=5)


def test_a_generation_reads_back_as_it_was_written() -> None:
    mine = Generation.mine()
    assert Generation.from_bytes(mine.to_bytes()) == mine
    assert len(mine.to_bytes()) == GENERATION_BYTES
    assert mine.alive()
    with pytest.raises(InvalidHandle):
        Generation.from_bytes(mine.to_bytes()[:-1])


def test_a_forked_child_is_another_generation() -> None:
    program = (
        "import os\nfrom kvstored_cuda.devices import Generation\nmine = Generation.mine()\nr, w = os.pipe()\n"
        "if not os.fork():\n    os.write(w, Generation.mine().to_bytes()); os._exit(0)\n"
        "os.wait()\nprint(Generation.from_bytes(os.read(r, 99)).nonce != mine.nonce)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("at", range(5))
def test_bytes_that_are_no_handle_are_refused(at: int) -> None:
    handle = Handle(Thing.EVENT, HandleKind.IPC, Generation.mine(), 1, HOST_UUID, 1, 0, bytes(TOKEN_BYTES))
    raw = bytearray(handle.to_bytes())
    raw[at] ^= 0xFF
    with pytest.raises(InvalidHandle):
        Handle.from_bytes(bytes(raw))
    for wrong in (b"", bytes(HANDLE_BYTES), bytes(raw[:-1]), bytes(raw) + b"\0"):
        with pytest.raises(InvalidHandle):
            Handle.from_bytes(wrong)


def test_a_second_open_gives_the_same_address_and_counts(device: Device, spawn: Callable[..., Peer]) -> None:
    peer = spawn()
    handle = exported(peer)
    first, second = device.open(handle, peer.generation), device.open(handle, peer.generation)
    assert first.address == second.address
    assert device.use().opened == 1
    first.close()
    first.close()  # a use is closed once, however often it is asked
    assert device.use().opened == 1
    read(device, second.address, 2 * MIB, device.stream())
    second.close()
    assert device.use().nothing
    peer("free")


def test_a_handle_can_be_opened_again_after_its_last_close(device: Device, spawn: Callable[..., Peer]) -> None:
    peer = spawn()
    address, raw = peer("allocate", size_bytes=2 * MIB)
    handle = Handle.from_bytes(bytes.fromhex(raw))
    device.open(handle, peer.generation).close()
    peer("write", address=address, seed=9, size_bytes=2 * MIB)
    peer("synchronize")
    again = device.open(handle, peer.generation)
    assert read(device, again.address, 2 * MIB, device.stream()) == pattern(9, 2 * MIB)
    again.close()
    assert device.use().nothing


def test_the_exporter_cannot_open_its_own_handle(device: Device) -> None:
    segment, event = device.allocate(2 * MIB), device.event()
    assert event.handle is not None
    with pytest.raises(OwnHandle):
        device.open(segment.handle, device.generation)
    with pytest.raises(OwnHandle):
        device.open_event(event.handle, device.generation)
    event.close()
    segment.free()
    assert device.use().nothing


def test_a_handle_of_another_life_of_the_exporter_is_stale(device: Device, spawn: Callable[..., Peer]) -> None:
    before, now = spawn(), spawn()
    handle = exported(before)
    event = Handle.from_bytes(bytes.fromhex(before("event")))
    with pytest.raises(StaleHandle, match=f"process {before.generation.pid} .*not of process {now.generation.pid}"):
        device.open(handle, now.generation)
    with pytest.raises(StaleHandle):
        device.open_event(event, now.generation)
    same_number = replace(before.generation, nonce=b"another.")
    with pytest.raises(StaleHandle):
        device.open(handle, same_number)
    assert device.use().nothing


def test_handles_of_other_things_devices_and_drivers_are_typed_errors(
    device: Device, spawn: Callable[..., Peer]
) -> None:
    peer = spawn()
    handle = exported(peer)
    of = peer.generation
    with pytest.raises(InvalidHandle, match="of memory where one of event is due"):
        device.open_event(handle, of)
    with pytest.raises(InvalidHandle, match="GPU-elsewhere"):
        device.open(replace(handle, uuid="GPU-elsewhere"), of)
    with pytest.raises(OtherDriver, match="driver 5"):
        device.open(replace(handle, driver=5), of)
    with pytest.raises(InvalidHandle, match="without its descriptor"):
        device.open(replace(handle, kind=HandleKind.DESCRIPTOR), of)
    assert device.use().nothing


def test_a_process_with_another_driver_is_told_so() -> None:
    peer = Peer(driver=2)
    try:
        segment = HostDevice(HOST_UUID, HOST_BYTES).allocate(MIB)
        with pytest.raises(PeerError, match="OtherDriver"):
            peer.open(segment.handle, segment.handle.generation)
    finally:
        peer.close()


def test_a_handle_of_a_freed_segment_is_invalid(spawn: Callable[..., Peer]) -> None:
    device, peer = HostDevice(HOST_UUID, HOST_BYTES), spawn()
    handle = exported(peer)
    peer("free")
    with pytest.raises(InvalidHandle):
        device.open(handle, peer.generation)
    peer("allocate", size_bytes=2 * MIB)  # which takes the number of the descriptor that is free now
    with pytest.raises(InvalidHandle, match="not that segment any more"):
        device.open(handle, peer.generation)
    assert device.use().nothing


def test_a_handle_of_a_dead_process_is_invalid(device: Device, spawn: Callable[..., Peer]) -> None:
    peer = spawn()
    handle = exported(peer)
    peer.kill()
    with pytest.raises((InvalidHandle, IpcRefused)):  # CUDA's codes for it differ from driver to driver
        device.open(handle, peer.generation)
    assert not peer.generation.alive()
    assert device.use().nothing


def test_a_handle_that_says_more_bytes_than_there_are_is_invalid(spawn: Callable[..., Peer]) -> None:
    device, peer = HostDevice(HOST_UUID, HOST_BYTES), spawn()
    with pytest.raises(InvalidHandle, match="its handle says"):
        device.open(replace(exported(peer), size_bytes=4 * MIB), peer.generation)
    assert device.use().nothing


def test_memory_that_could_be_shrunk_or_is_anothers_is_refused(spawn: Callable[..., Peer]) -> None:
    """A client's event page that shrinks would kill the daemon by SIGBUS."""
    device, peer = HostDevice(HOST_UUID, HOST_BYTES), spawn()
    handle = exported(peer)
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, 2 * MIB)
    with pytest.raises(InvalidHandle, match="could be shrunk"):
        device.open(replace(handle, kind=HandleKind.DESCRIPTOR, descriptor=plain), peer.generation)
    os.close(plain)
    with pytest.raises(InvalidHandle, match="names process"):
        device.open(replace(handle, token=b"\1\0\0\0" + handle.token[4:]), peer.generation)
    assert device.use().nothing


def test_a_segment_is_zero_whatever_was_there_before(device: Device) -> None:
    stream = device.stream()
    for _ in range(3):
        segment = device.allocate(2 * MIB)
        assert read(device, segment.address, 2 * MIB, stream) == bytes(2 * MIB)
        write(device, segment.address, pattern(1, 2 * MIB), stream)
        stream.synchronize(30)
        segment.free()
