"""Copies of blocks beside what the device does by itself: the slab, a pool of another process, paged caches."""

import ctypes
import mmap
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from bench.gpu.exporter import exported
from bench.gpu.rig import Rig
from bench.measure import Row
from kvstored.mapping import Mapping
from kvstored_cuda import Copies, KernelCopies, PagedLayout, Part, TwinCopies
from kvstored_cuda.devices import Direction
from kvstored_cuda.devices.errors import DeviceError
from kvstored_cuda.devices.pagelock import PageLocks, Span

BLOCK = 2 << 20
BLOCKS, AT_ONCE = 64, 16
LAYERS, TOKENS, HEADS, HEAD_BYTES = 32, 16, 8, 256
"""Of the engine: 32 layers x (K and V) x 16 tokens x 8 heads x 128 of bf16 are a block of 2 MiB."""

LOCK_S = 30.0
TO, FROM, WITHIN = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST, Direction.DEVICE_TO_DEVICE


def row(name: str, arms: dict[str, list[float]], ours: str, reference: str, bar: float | None, moved: int) -> Row:
    """The speed of ours as a share of the reference's."""
    shares = [other / own for own, other in zip(arms[ours], arms[reference], strict=True)]
    seconds, other = statistics.median(arms[ours]), statistics.median(arms[reference])
    return Row(
        name,
        other / seconds,
        bar,
        True,
        "",
        f"{moved / seconds / 1e9:.1f} GB/s",
        f"{reference}, {moved / other / 1e9:.1f} GB/s",
        min(shares),
        max(shares),
    )


def turn(number: int) -> range:
    """Which blocks a round copies: never those of the round before."""
    first = number * AT_ONCE % BLOCKS
    return range(first, first + AT_ONCE)


@contextmanager
def slab(rig: Rig) -> Iterator[int]:
    """Shared memory as the daemon's, page-locked as a client does it; its address. Raises where it is refused."""
    import os

    descriptor = os.memfd_create("kvstored-gpu-check")
    os.ftruncate(descriptor, BLOCKS * BLOCK)
    mapping = Mapping(descriptor, BLOCKS * BLOCK, writable=True)
    ctypes.memset(mapping.address, 7, BLOCKS * BLOCK)
    locks = PageLocks(rig.device)
    locked = locks.lock([Span(mapping.address, BLOCKS * BLOCK)], LOCK_S)
    if locked.refused or locked.pending_bytes:
        raise DeviceError(f"the slab is not page-locked: {locked}")
    try:
        yield mapping.address
    finally:
        rig.stream.synchronize(LOCK_S)
        locks.close()


def registrations(rig: Rig) -> dict[str, str]:
    """What of shared memory can be page-locked: a mapping that no child inherits, one that may only be read."""
    import os

    found: dict[str, str] = {}
    descriptor = os.memfd_create("kvstored-gpu-check")
    os.ftruncate(descriptor, BLOCK)
    for name, writable, read_only in (
        ("DONTFORK, writable", True, False),
        ("read-only, cudaHostRegisterReadOnly", False, True),
    ):
        flags = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapped = mmap.mmap(descriptor, BLOCK, mmap.MAP_SHARED | mmap.MAP_POPULATE, flags)
        mapped.madvise(mmap.MADV_DONTFORK)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        try:
            rig.device.host_register(address, BLOCK, read_only)
            rig.device.host_unregister(address)
            found[name] = "page-locked"
        except DeviceError as e:
            found[name] = f"refused: {e}"
        del address
        with suppress(BufferError):
            mapped.close()
    os.close(descriptor)
    return found


def rows(rig: Rig, rounds: int) -> Iterator[Row]:
    """All of them, each as soon as it is measured."""
    size = BLOCKS * BLOCK
    mine, other = rig.device.allocate(size), rig.device.allocate(size)
    try:
        with slab(rig) as shared:
            plain = rig.device.host_allocate(size)
            ctypes.memset(plain, 9, size)
            yield from _slab(rig, rounds, mine.address, shared, plain)
            yield from _paged(rig, rounds, mine.address, other.address, shared, plain)
            rig.stream.synchronize(LOCK_S)
            rig.device.host_free(plain)
        with exported(rig, size) as pool:
            yield from _pool(rig, rounds, mine.address, other.address, pool.address)
    finally:
        rig.stream.synchronize(LOCK_S)
        mine.free()
        other.free()


def _copies(rig: Rig, to: int, source: int, direction: Direction) -> Callable[[int], None]:
    def enqueue(number: int) -> None:
        for block in turn(number):
            rig.device.copy(to + block * BLOCK, source + block * BLOCK, BLOCK, direction, rig.stream)

    return enqueue


def _slab(rig: Rig, rounds: int, device: int, shared: int, plain: int) -> Iterator[Row]:
    moved = AT_ONCE * BLOCK
    for name, direction in (("slab to GPU", TO), ("GPU to slab", FROM)):
        ends = [(device, host) if direction is TO else (host, device) for host in (shared, plain)]
        arms = rig.in_turn(
            {
                "ours": _copies(rig, *ends[0], direction),
                "a page-locked cudaMemcpyAsync": _copies(rig, *ends[1], direction),
            },
            rounds,
        )
        yield row(f"{name}, 16 x 2 MiB", arms, "ours", "a page-locked cudaMemcpyAsync", 0.95, moved)


def _pool(rig: Rig, rounds: int, device: int, other: int, pool: int) -> Iterator[Row]:
    moved = AT_ONCE * BLOCK
    for name, to, source in (("put to a pool by IPC", pool, device), ("get from a pool by IPC", device, pool)):
        arms = rig.in_turn(
            {
                "ours": _copies(rig, to, source, WITHIN),
                "a device-to-device copy": _copies(rig, other, device, WITHIN),
            },
            rounds,
        )
        yield row(f"{name}, 16 x 2 MiB", arms, "ours", "a device-to-device copy", 0.90, moved)


def engine(base: int, pages: int) -> PagedLayout:
    """An engine's cache of `pages` blocks at `base`: all layers one after the other, K and V in each page (NHD)."""
    part = TOKENS * HEADS * HEAD_BYTES
    layer = pages * 2 * part
    one = Part(
        heads=HEADS,
        head_bytes=HEAD_BYTES,
        page_stride=2 * part,
        token_stride=HEADS * HEAD_BYTES,
        head_stride=HEAD_BYTES,
    )
    return PagedLayout(
        element_bytes=2,
        num_pages=pages,
        page_tokens=TOKENS,
        parts=(one, one),
        bases=tuple((base + n * layer, base + n * layer + part) for n in range(LAYERS)),
    )


def copies_of(rig: Rig, layout: PagedLayout) -> Copies:
    """The kernels, or their twin on HostDevice."""
    if not rig.real:
        return TwinCopies(layout)
    import cupy

    return KernelCopies(layout, cupy.cuda.Device().id)


def _paged(rig: Rig, rounds: int, cache: int, pool: int, shared: int, plain: int) -> Iterator[Row]:
    copies, moved = copies_of(rig, engine(cache, BLOCKS)), AT_ONCE * BLOCK

    def paged(way: Callable[..., Any], slots: int) -> Callable[[int], None]:
        def enqueue(number: int) -> None:
            blocks = turn(number)
            way(list(blocks), [slots + n * BLOCK for n in blocks], slot_bytes=BLOCK, stream=rig.stream)

        return enqueue

    device = "a device-to-device copy"
    host = "a page-locked cudaMemcpyAsync"
    for name, way, slots, reference, raw, bar in (
        ("gather to the pool", copies.gather, pool, device, _copies(rig, pool, cache, WITHIN), 0.85),
        ("scatter from the pool", copies.scatter, pool, device, _copies(rig, cache, pool, WITHIN), 0.85),
        ("gather to the slab", copies.gather, shared, host, _copies(rig, plain, cache, FROM), None),
        ("scatter from the slab", copies.scatter, shared, host, _copies(rig, cache, plain, TO), None),
    ):
        arms = rig.in_turn({"ours": paged(way, slots), reference: raw}, rounds)
        yield row(f"{name}, 32 layers, 16 x 2 MiB", arms, "ours", reference, bar, moved)
