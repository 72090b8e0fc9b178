"""A segment goes to another process, which copies into it and records an event; the owner reads after the event."""

from collections.abc import Callable

import pytest

from kvstored_cuda.devices import Device, Handle, HandleKind
from tests.cuda.device_peer import Peer, pattern, read

MIB = 1 << 20
EVENT_S = 30.0


def test_bytes_that_another_process_copied_are_there_after_its_event(
    device: Device, spawn: Callable[..., Peer]
) -> None:
    segment = device.allocate(8 * MIB)
    peer = spawn()
    address = peer.open(segment.handle, device.generation)
    peer("write", address=address + MIB, seed=7, size_bytes=2 * MIB)
    handle = Handle.from_bytes(bytes.fromhex(peer("event")))

    event = device.open_event(handle, peer.generation)
    event.synchronize(EVENT_S)

    stream = device.stream()
    assert read(device, segment.address + MIB, 2 * MIB, stream) == pattern(7, 2 * MIB)
    event.close()
    peer("close_event")
    peer("close")
    assert peer("use") == [0, 0, 0, 0, 0]
    segment.free()
    assert device.use().nothing


@pytest.mark.parametrize("handle_kind", list(HandleKind))
def test_both_kinds_of_handle_reach_the_same_bytes(
    kind: str, device: Device, spawn: Callable[..., Peer], handle_kind: HandleKind
) -> None:
    if kind == "standin" and handle_kind == HandleKind.DESCRIPTOR:
        pytest.skip("in test_device_descriptors.py: it wants processes that load cuda-bindings over the stand-in")
    segment = device.allocate(2 * MIB, handle_kind)
    peer = spawn()
    address = peer.open(segment.handle, device.generation)
    peer("write", address=address, seed=3, size_bytes=2 * MIB)
    peer("synchronize")
    assert read(device, segment.address, 2 * MIB, device.stream()) == pattern(3, 2 * MIB)
    assert bytes.fromhex(peer("read", address=address, size_bytes=2 * MIB)) == pattern(3, 2 * MIB)
    peer("close")
    segment.free()
    assert device.use().nothing
