"""Device memory that crosses as a descriptor: cuda-bindings' calls, over the stand-in for the driver."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstored_cuda.devices import Handle, HandleKind
from kvstored_cuda.devices.errors import IpcRefused
from tests.cuda.device_peer import Peer, PeerError, pattern
from tests.cuda.standin import have_bindings, standin_device

MIB = 1 << 20
HAVE_BINDINGS = have_bindings()


@pytest.fixture
def pair() -> Iterator[tuple[Peer, Peer]]:
    """An owner and an importer."""
    owner, importer = Peer("bindings"), Peer("bindings")
    yield owner, importer
    owner.close()
    importer.close()


@pytest.mark.skipif(not HAVE_BINDINGS, reason="cuda-bindings is not installed")
def test_bytes_cross_and_the_memory_outlives_its_exporter(pair: tuple[Peer, Peer]) -> None:
    owner, importer = pair
    for warm in pair:
        warm("allocate", size_bytes=MIB, kind=int(HandleKind.DESCRIPTOR))
        warm("free")
    before = [peer("descriptors") for peer in pair]
    address, raw = owner("allocate", size_bytes=3 * MIB, kind=int(HandleKind.DESCRIPTOR))
    descriptor = os.open(f"/proc/{owner.process.pid}/fd/{owner('descriptor_number')}", os.O_RDWR)
    handle = Handle.from_bytes(bytes.fromhex(raw), descriptor)
    assert handle.kind == HandleKind.DESCRIPTOR
    assert bytes.fromhex(owner("read", address=address, size_bytes=3 * MIB)) == bytes(3 * MIB)
    theirs = importer.open(handle, owner.generation)
    assert importer.open(handle, owner.generation) == theirs
    importer("write", address=theirs, seed=4, size_bytes=3 * MIB)
    assert bytes.fromhex(owner("read", address=address, size_bytes=3 * MIB)) == pattern(4, 3 * MIB)
    owner("free")
    assert owner("use") == [0, 0, 0, 0, 0]
    assert owner("descriptors") == before[0]
    owner.kill()
    assert bytes.fromhex(importer("read", address=theirs, size_bytes=3 * MIB)) == pattern(4, 3 * MIB)
    importer("close")
    importer("close")
    assert importer("use") == [0, 0, 0, 0, 0]
    assert importer("descriptors") == before[1]
    os.close(descriptor)
    with pytest.raises(PeerError, match="StaleHandle"):
        importer.open(replace(handle, descriptor=-1), importer.generation)


@pytest.mark.skipif(HAVE_BINDINGS, reason="cuda-bindings is installed")
def test_without_cuda_bindings_this_kind_is_refused_and_nothing_is_taken() -> None:
    device = standin_device()
    with pytest.raises(IpcRefused, match="cuda-bindings"):
        device.allocate(2 * MIB, HandleKind.DESCRIPTOR)
    assert device.use().nothing
