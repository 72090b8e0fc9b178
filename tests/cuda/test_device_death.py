"""Processes die with segments open and copies under way: nobody else hangs, and nothing is freed under a user."""

from collections.abc import Callable

import pytest

from kvstored_cuda.devices import Device, Handle, HandleKind
from kvstored_cuda.devices.errors import InvalidHandle, StillOpen
from kvstored_cuda.devices.host_device import HostDevice
from tests.conftest import eventually
from tests.cuda.device_peer import HOST_BYTES, HOST_UUID, Peer, PeerError, pattern, read

MIB = 1 << 20
EXIT_S = 20.0


def test_an_importer_that_is_killed_leaves_a_segment_that_can_be_freed(
    device: Device, spawn: Callable[..., Peer]
) -> None:
    segment = device.allocate(4 * MIB)
    peer = spawn()
    address = peer.open(segment.handle, device.generation)
    peer.start("write_for_ever", address=address, size_bytes=4 * MIB)
    eventually(lambda: any(read(device, segment.address, 64, device.stream())), EXIT_S, "bytes of the importer")
    peer.kill()
    segment.free()
    assert device.use().nothing


def test_a_segment_that_a_living_importer_maps_is_not_freed(spawn: Callable[..., Peer]) -> None:
    device, peer, other = HostDevice(HOST_UUID, HOST_BYTES), spawn(), spawn()
    segment = device.allocate(MIB)
    address = peer.open(segment.handle, device.generation)
    other.open(segment.handle, device.generation)
    other("close")
    with pytest.raises(StillOpen):
        segment.free()
    assert device.use().allocations == 1
    peer("write", address=address, seed=2, size_bytes=MIB)
    peer("synchronize")
    assert bytes(device.array(segment.address, MIB)) == pattern(2, MIB)
    peer("close")
    segment.free()
    assert device.use().nothing
    with pytest.raises(InvalidHandle, match="freed already"):
        segment.free()
    with pytest.raises(PeerError, match="InvalidHandle"):
        other.open(segment.handle, device.generation)


def test_an_importer_goes_on_or_is_told_when_the_exporter_is_killed_while_it_copies(
    spawn: Callable[..., Peer],
) -> None:
    owner, importer = spawn(), spawn()
    _, raw = owner("allocate", size_bytes=4 * MIB)
    handle = Handle.from_bytes(bytes.fromhex(raw))
    address = importer.open(handle, owner.generation)
    importer.start("write_for_ever", address=address, size_bytes=4 * MIB)
    reader = spawn()
    mine = reader.open(handle, owner.generation)
    eventually(lambda: any(bytes.fromhex(reader("read", address=mine, size_bytes=64))), EXIT_S, "the first copy")
    owner.kill()
    assert bytes.fromhex(reader("read", address=mine, size_bytes=4 * MIB))
    reader("close")
    assert importer.process.poll() is None
    assert reader("use") == [0, 0, 0, 0, 0]
    with pytest.raises(PeerError, match="InvalidHandle"):
        reader.open(handle, owner.generation)


def test_what_was_closed_faults_where_it_is_touched(spawn: Callable[..., Peer]) -> None:
    """An address that was given back is a hole: its user dies there, and never reads another segment."""
    device, peer = HostDevice(HOST_UUID, HOST_BYTES), spawn()
    segment = device.allocate(MIB)
    address = peer.open(segment.handle, device.generation)
    peer("close")
    with pytest.raises(PeerError, match="InvalidAddress"):
        peer("write", address=address, seed=1, size_bytes=MIB)
    again = peer.open(segment.handle, device.generation)
    assert again != address
    peer.start("touch", address=address)
    with pytest.raises(PeerError, match="Gone"):
        peer.answer()
    assert peer.process.wait(EXIT_S) == -11


def test_a_descriptor_outlives_what_it_was_sent_for(spawn: Callable[..., Peer]) -> None:
    """Memory that crosses as a descriptor does not need its exporter: the other kind of handle does."""
    device, peer = HostDevice(HOST_UUID, HOST_BYTES), spawn()
    segment = device.allocate(MIB, HandleKind.DESCRIPTOR)
    address = peer.open(segment.handle, device.generation)
    with pytest.raises(StillOpen):
        segment.free()
    peer("close")
    segment.free()
    with pytest.raises(PeerError, match="InvalidAddress"):
        peer("read", address=address, size_bytes=MIB)
