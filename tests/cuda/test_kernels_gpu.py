"""The kernels on a GPU: the claims that the CPU's tests make, with slots in the pool's kind of memory and the slab's.

Needs cupy and one GPU; torch's streams are tried where torch has CUDA.
"""

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvstored.v1.errors import InvalidArgument
from kvstored_cuda.launching import KernelCopies, stream_address
from kvstored_cuda.layouts import PagedLayout, Part
from tests.cuda.kernel_claims import agrees_with_the_twin, every_kernel
from tests.cuda.kernel_rig import Bytes, Case, HostPlace, Place, World, cases
from tests.cuda.test_kernels_batches import small_world

pytestmark = pytest.mark.gpu

DEVICE = 0


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    with cupy.cuda.Device(DEVICE):
        yield cupy


class DevicePlace:
    """cudaMalloc, each piece by itself."""

    def __init__(self, cupy: Any) -> None:
        self.runtime, self.memory = cupy.cuda.runtime, cupy.cuda.Memory
        self.held: list[Any] = []

    def reserve(self, size: int) -> int:
        self.held.append(self.memory(size))
        return int(self.held[-1].ptr)

    def write(self, address: int, content: Bytes) -> None:
        self.runtime.memcpy(address, content.ctypes.data, content.nbytes, self.runtime.memcpyHostToDevice)
        self.runtime.streamSynchronize(0)  # from pageable memory the call comes back before the bytes have arrived

    def read(self, address: int, size: int) -> Bytes:
        found = np.empty(size, np.uint8)
        self.runtime.memcpy(found.ctypes.data, address, size, self.runtime.memcpyDeviceToHost)
        return found


class SlabPlace(HostPlace):
    """Shared memory that was page-locked afterwards, as the slab is."""

    PIECE_BYTES = 16 << 20

    def __init__(self, cupy: Any) -> None:
        super().__init__()
        self.runtime = cupy.cuda.runtime
        self.mapped: list[tuple[mmap.mmap, Bytes]] = []
        self.used = self.PIECE_BYTES

    def reserve(self, size: int) -> int:
        size = -(-size // 256) * 256
        assert size <= self.PIECE_BYTES
        if self.used + size > self.PIECE_BYTES:
            memory = mmap.mmap(-1, self.PIECE_BYTES)
            content = np.frombuffer(memory, np.uint8)
            content[:] = 0  # pages must be there
            self.runtime.hostRegister(content.ctypes.data, self.PIECE_BYTES, 0)
            self.mapped.append((memory, content))
            self.used = 0
        address = self.mapped[-1][1].ctypes.data + self.used
        self.used += size
        return int(address)

    def __del__(self) -> None:
        for _, content in self.mapped:
            self.runtime.hostUnregister(content.ctypes.data)
        super().__del__()


@pytest.fixture(params=["default", "cupy", "torch"])
def stream(request: pytest.FixtureRequest, cupy: Any) -> Iterator[Any]:
    """Of the caller's; those of cupy and torch do not wait for the default stream."""
    if request.param == "default":
        yield 0
    elif request.param == "cupy":
        yield cupy.cuda.Stream(non_blocking=True)
    else:
        torch = pytest.importorskip("torch", reason="torch is not here: its streams were not tried")
        if not torch.cuda.is_available():
            pytest.skip("torch has no CUDA: its streams were not tried")
        yield torch.cuda.Stream(DEVICE)


def wait_for(cupy: Any, stream: Any) -> None:
    cupy.cuda.runtime.streamSynchronize(stream_address(stream))


@pytest.mark.parametrize("slots_in", ["pool", "slab"])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_kernels_on_a_gpu_leave_what_their_twin_leaves(cupy: Any, stream: Any, slots_in: str, case: Case) -> None:
    place = DevicePlace(cupy)
    slots_place: Place = place if slots_in == "pool" else SlabPlace(cupy)
    agrees_with_the_twin(
        case,
        World(case, place, slots_place),
        lambda layout: KernelCopies(layout, DEVICE),
        lambda: wait_for(cupy, stream),
        stream=stream,
    )


def test_every_kernel_of_the_source_leaves_what_its_twin_leaves(cupy: Any) -> None:
    for case, _, _ in every_kernel():
        agrees_with_the_twin(
            case,
            World(case, DevicePlace(cupy)),
            lambda layout: KernelCopies(layout, DEVICE),
            cupy.cuda.runtime.deviceSynchronize,
            stream=0,
        )


def test_a_captured_copy_is_done_at_each_replay(cupy: Any) -> None:
    """Its argument is part of the graph: nothing is uploaded for it."""
    case = small_world().case
    world = World(case, DevicePlace(cupy))
    copies, size = KernelCopies(world.layout, DEVICE), world.layout.slot_bytes
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    assert copies.gather(case.pages, world.slots, slot_bytes=size, stream=stream) == 1
    assert copies.scatter(case.other_pages, world.slots, slot_bytes=size, stream=stream) == 1
    graph = stream.end_capture()
    before = world.slot_content(world.slots)
    graph.launch(stream)
    stream.synchronize()
    first = world.slot_content(world.slots)
    assert not any(np.array_equal(a, b) for a, b in zip(before, first, strict=True))
    copies.gather(case.other_pages, world.other_slots, slot_bytes=size, stream=stream)
    stream.synchronize()
    second = world.slot_content(world.other_slots)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_addresses_that_are_not_the_devices_are_refused(cupy: Any) -> None:
    on_host = small_world()
    with pytest.raises(InvalidArgument, match="memory of no device, not of device 0"):
        KernelCopies(on_host.layout, DEVICE)
    on_device = World(on_host.case, DevicePlace(cupy))
    for device in (-1, 99, True):
        with pytest.raises(InvalidArgument, match="is not one of"):
            KernelCopies(on_device.layout, device)


def test_a_call_that_cannot_be_is_refused_and_queues_nothing(cupy: Any) -> None:
    world = World(small_world().case, DevicePlace(cupy))
    copies, before = KernelCopies(world.layout, DEVICE), world.content()
    for pages, slots, size in (
        ([0, 1, 2, 10], world.slots, world.layout.slot_bytes),
        ([0, 1, 2, 3], world.slots, world.layout.slot_bytes - 2),
        ([0, 1, 2, 3], [world.slots[0]] * 2, world.layout.slot_bytes),
    ):
        with pytest.raises(InvalidArgument):
            copies.gather(pages, slots, slot_bytes=size, stream=0)
    cupy.cuda.runtime.deviceSynchronize()
    assert world.content() == before


def test_a_tensor_of_more_than_four_billion_bytes(cupy: Any) -> None:
    tokens, heads, run = 16, 8, 256
    page = tokens * heads * run
    num_pages = (5 << 30) // page
    place = DevicePlace(cupy)
    base = place.reserve(num_pages * page)
    part = Part(heads=heads, head_bytes=run, page_stride=page, token_stride=heads * run, head_stride=run)
    layout = PagedLayout(element_bytes=2, num_pages=num_pages, page_tokens=tokens, parts=(part,), bases=((base,),))
    random = np.random.default_rng(9)
    pages, others = [num_pages - 1, 0, num_pages // 2], [num_pages - 2, 1, num_pages // 2 + 1]
    content = [random.integers(0, 256, page, dtype=np.uint8) for _ in pages]
    for number, filled in zip(pages, content, strict=True):
        place.write(base + number * page, filled)
    slots = [place.reserve(page) for _ in pages]
    copies = KernelCopies(layout, DEVICE)
    copies.gather(pages, slots, slot_bytes=page, stream=0)
    copies.scatter(others, slots, slot_bytes=page, stream=0)
    cupy.cuda.runtime.deviceSynchronize()
    for number, filled, slot in zip(others, content, slots, strict=True):
        assert np.array_equal(place.read(slot, page), filled)
        assert np.array_equal(place.read(base + number * page, page), filled)
