"""Page-locking: in chunks of at most 64 GiB, in parallel; what is refused is staged, and said."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored_cuda.devices import Device, Direction
from kvstored_cuda.devices.errors import DeviceLost, DeviceTimeout, InvalidAddress, PageLockRefused
from kvstored_cuda.devices.faults import Fault, FaultPlan
from kvstored_cuda.devices.host_device import HostDevice
from kvstored_cuda.devices.host_memory import leave_a_hole, map_anonymous
from kvstored_cuda.devices.pagelock import CHUNK_BYTES_MAX, PageLocks, Span, chunks
from kvstored_cuda.devices.staging import StagingBuffer
from tests.cuda.device_peer import HOST_BYTES, HOST_UUID, pattern, read

PAGE = mmap.PAGESIZE
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CALL_S = 30.0
HELD_UP_S = 2.0
"""For a call beside one that hangs: time enough for all that does not."""
DONTFORK = 10
"""MADV_DONTFORK, include/uapi/asm-generic/mman-common.h."""
BASE = 0x7000_0000_0000


@pytest.fixture
def pages() -> Iterator[Callable[[int], Span]]:
    """Memory of this process, by size."""
    spans: list[Span] = []

    def make(size_bytes: int) -> Span:
        spans.append(Span(map_anonymous(size_bytes), size_bytes))
        return spans[-1]

    yield make
    for span in spans:
        leave_a_hole(span.address, span.size_bytes)


def test_sizes_over_64_gib_are_cut_and_nothing_else_is() -> None:
    assert CHUNK_BYTES_MAX == 64 * GIB
    assert chunks(Span(BASE, 64 * GIB)) == [Span(BASE, 64 * GIB)]
    assert chunks(Span(BASE, 0)) == []
    assert [chunk.size_bytes for chunk in chunks(Span(BASE, 64 * GIB + PAGE))] == [64 * GIB, PAGE]
    assert [chunk.size_bytes for chunk in chunks(Span(BASE, 1000 * GIB))] == [64 * GIB] * 15 + [40 * GIB]


@given(pages=st.integers(0, 1 << 30), slot_pages=st.integers(1, 1 << 24))
def test_chunks_cover_every_byte_once_and_cut_no_slot(pages: int, slot_pages: int) -> None:
    slot_bytes = slot_pages * PAGE
    cut = chunks(Span(BASE, pages * PAGE), slot_bytes)
    assert sum(chunk.size_bytes for chunk in cut) == pages * PAGE
    assert all(0 < chunk.size_bytes <= CHUNK_BYTES_MAX for chunk in cut)
    assert all(one.address + one.size_bytes == other.address for one, other in pairwise(cut))
    assert all((chunk.address - BASE) % slot_bytes == 0 for chunk in cut)
    assert not cut or cut[0].address == BASE


def test_what_cannot_be_cut_is_refused() -> None:
    for span, align_bytes in (
        (Span(BASE + 1, PAGE), PAGE),
        (Span(BASE, PAGE + 1), PAGE),
        (Span(BASE, GIB), PAGE // 2),
        (Span(BASE, GIB), 65 * GIB),
    ):
        with pytest.raises(InvalidAddress):
            chunks(span, align_bytes)


def test_registered_memory_is_covered_until_it_is_unlocked(device: Device, pages: Callable[[int], Span]) -> None:
    locks, spans = PageLocks(device), [pages(2 * MIB), pages(4 * MIB)]
    answer = locks.lock(spans, CALL_S)
    assert (answer.locked_bytes, answer.refused, answer.pending_bytes) == (6 * MIB, (), 0)
    assert locks.covers(spans[0].address, 2 * MIB)
    assert not locks.covers(spans[0].address + PAGE, 2 * MIB)
    assert device.use().page_locked_bytes == locks.locked_bytes == 6 * MIB
    assert locks.unlock(spans[0]) == ()
    assert not locks.covers(spans[0].address, 1)
    assert locks.close() == ()
    assert device.use().nothing


def test_what_is_over_the_memlock_limit_is_refused_and_the_rest_is_locked(pages: Callable[[int], Span]) -> None:
    device = HostDevice(HOST_UUID, HOST_BYTES, memlock_bytes=5 * MIB)
    locks = PageLocks(device, parallel=1)
    spans = [pages(2 * MIB), pages(4 * MIB), pages(2 * MIB)]
    answer = locks.lock(spans, CALL_S)
    assert answer.locked_bytes == 4 * MIB
    (refused,) = answer.refused
    assert refused.span == spans[1]
    assert "the limit is" in refused.why
    assert locks.refused == answer.refused
    locks.unlock(spans[0])
    locks.unlock(spans[2])
    assert locks.lock(spans[1:2], CALL_S).locked_bytes == 4 * MIB
    assert locks.refused == ()
    locks.close()
    assert device.use().nothing


def test_a_mapping_that_may_only_be_read_wants_the_flag_and_is_never_written(kind: str, device: Device) -> None:
    descriptor = os.memfd_create("slab")
    os.ftruncate(descriptor, MIB)
    os.pwrite(descriptor, pattern(3, MIB), 0)
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
    address = libc.mmap(None, MIB, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    span, locks = Span(address, MIB), PageLocks(device)
    if locks.lock([span], CALL_S).locked_bytes:
        assert kind == "cuda"  # what a driver says to this is its own affair
        locks.unlock(span)
    if locks.lock([span], CALL_S, read_only=True).locked_bytes == 0:
        assert kind == "cuda"  # a GPU may refuse: then it is staged
        return
    segment, stream = device.allocate(2 * MIB), device.stream()
    device.copy(segment.address, address, MIB, Direction.HOST_TO_DEVICE, stream)
    assert read(device, segment.address, MIB, stream) == pattern(3, MIB)
    if isinstance(device, HostDevice):
        with pytest.raises(InvalidAddress, match="reading alone"):
            device.copy(address, segment.address, MIB, Direction.DEVICE_TO_HOST, stream)
    locks.close()
    libc.munmap(ctypes.c_void_p(address), MIB)
    os.close(descriptor)


def test_a_mapping_that_children_do_not_get_can_be_registered(device: Device, pages: Callable[[int], Span]) -> None:
    """The SDK maps the slab with MADV_DONTFORK."""
    span, locks = pages(2 * MIB), PageLocks(device)
    assert ctypes.CDLL(None).madvise(ctypes.c_void_p(span.address), ctypes.c_size_t(span.size_bytes), DONTFORK) == 0
    assert locks.lock([span], CALL_S).locked_bytes == 2 * MIB
    locks.close()


def test_memory_that_is_not_there_or_locked_already_is_refused(pages: Callable[[int], Span]) -> None:
    device, span = HostDevice(HOST_UUID, HOST_BYTES), pages(MIB)
    device.host_register(span.address, MIB, read_only=False)
    for address in (span.address, span.address + PAGE, BASE):
        with pytest.raises(PageLockRefused):
            device.host_register(address, PAGE, read_only=False)
    device.host_unregister(span.address)
    with pytest.raises(InvalidAddress):
        device.host_unregister(span.address)


def test_a_registration_that_hangs_is_pending_and_ends_itself_after_close(pages: Callable[[int], Span]) -> None:
    plan = FaultPlan(Fault("register", delay_s=60, times=1))
    device = HostDevice(HOST_UUID, HOST_BYTES, plan)
    locks, spans = PageLocks(device), [pages(MIB), pages(MIB)]
    answer = locks.lock(spans, HELD_UP_S)
    assert (answer.locked_bytes, answer.pending_bytes) == (MIB, MIB)
    locks.close()
    plan.release()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("page-lock")]:
        thread.join(CALL_S)
        assert not thread.is_alive()
    assert device.use().nothing


def test_chunks_are_registered_several_at_a_time(pages: Callable[[int], Span]) -> None:
    plan = FaultPlan(Fault("register", delay_s=60, times=3))
    device = HostDevice(HOST_UUID, HOST_BYTES, plan)
    locks = PageLocks(device, parallel=4)
    answer = locks.lock([pages(MIB) for _ in range(12)], HELD_UP_S)
    assert (answer.locked_bytes, answer.pending_bytes) == (9 * MIB, 3 * MIB)
    plan.release()
    locks.close()


@pytest.mark.parametrize("size_bytes", [1, 64 * KIB, 64 * KIB + 1, 1000 * KIB + 7])
def test_staging_moves_every_byte_both_ways(device: Device, size_bytes: int) -> None:
    staging = StagingBuffer(device, 128 * KIB)
    segment, stream = device.allocate(2 * MIB), device.stream()
    source, back = ctypes.create_string_buffer(pattern(size_bytes, size_bytes), size_bytes), bytearray(size_bytes)
    staging.to_device(segment.address, ctypes.addressof(source), size_bytes, stream, CALL_S)
    ctypes.memset(source, 0, size_bytes)  # it has been read when the call returns
    target = (ctypes.c_char * size_bytes).from_buffer(back)
    staging.from_device(ctypes.addressof(target), segment.address, size_bytes, stream, CALL_S)
    assert back == pattern(size_bytes, size_bytes)
    staging.close(CALL_S)
    segment.free()
    assert device.use().nothing


def test_staging_waits_for_slow_copies_both_ways() -> None:
    device = HostDevice(HOST_UUID, HOST_BYTES, FaultPlan(Fault("transfer", delay_s=0.01)))
    staging = StagingBuffer(device, 128 * KIB)
    segment, stream = device.allocate(MIB), device.stream()
    source, target = ctypes.create_string_buffer(pattern(5, MIB), MIB), ctypes.create_string_buffer(MIB)
    staging.to_device(segment.address, ctypes.addressof(source), MIB, stream, CALL_S)
    staging.from_device(ctypes.addressof(target), segment.address, MIB, stream, CALL_S)
    assert target.raw == pattern(5, MIB)
    staging.close(CALL_S)


def test_a_staging_copy_that_hangs_ends_by_its_deadline_and_its_buffer_is_not_touched_before() -> None:
    plan = FaultPlan(Fault("transfer", delay_s=60, times=1))
    device = HostDevice(HOST_UUID, HOST_BYTES, plan)
    staging = StagingBuffer(device, 128 * KIB)
    segment, stream = device.allocate(MIB), device.stream()
    source = ctypes.create_string_buffer(pattern(1, MIB), MIB)
    with pytest.raises(DeviceTimeout):
        staging.to_device(segment.address, ctypes.addressof(source), MIB, stream, 0.05)
    other = ctypes.create_string_buffer(pattern(2, MIB), MIB)
    with pytest.raises(DeviceTimeout):
        staging.to_device(segment.address, ctypes.addressof(other), MIB, stream, 0.05)
    with pytest.raises(DeviceTimeout):
        staging.close(0.05)
    plan.release()
    stream.synchronize(CALL_S)
    assert bytes(device.array(segment.address, 64 * KIB)) == pattern(1, MIB)[: 64 * KIB]
    staging.close(CALL_S)


def test_staging_on_a_lost_device_says_so_and_no_staging_is_an_answer() -> None:
    plan = FaultPlan(Fault("transfer", fail=DeviceLost))
    device = HostDevice(HOST_UUID, HOST_BYTES, plan)
    staging = StagingBuffer(device, 128 * KIB)
    segment, stream = device.allocate(MIB), device.stream()
    source = ctypes.create_string_buffer(MIB)
    with pytest.raises(DeviceLost):
        staging.from_device(ctypes.addressof(source), segment.address, MIB, stream, CALL_S)
    with pytest.raises(PageLockRefused):
        StagingBuffer(HostDevice(HOST_UUID, HOST_BYTES, memlock_bytes=KIB))
