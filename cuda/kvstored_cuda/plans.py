"""The tables and launches of the kernels in paged.cu: pure numbers, the same for a GPU and for the CPU of the tests.

The layouts of `Plane` and `Call` here and in paged.cu are one format: change both. A launch carries slots and pages
in its argument, so that nothing is uploaded for it and nothing must be kept until its stream has come so far; what
does not fit one argument is several launches, of hundreds of slots each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstored_cuda.batches import Batch, Way
from kvstored_cuda.layouts import PagedLayout, SlotOrder

WIDTHS = (16, 8, 4, 2, 1)
"""Bytes that a thread moves at a time; there is a kernel for each."""

SMALL_ENTRIES, LARGE_ENTRIES = 500, 4080
"""Numbers in the argument of a launch: 4,056 and 32,696 bytes of it, limits 4,096 and (from CUDA 12.1 on) 32,764."""

THREADS_MAX = 256
WARP = 32
UNROLL = 4
"""Vectors that a thread has under way (paged.cu)."""

RESIDENT_THREADS, RESIDENT_BLOCKS = 1280, 16
"""Of one multiprocessor at a time: 5 blocks of THREADS_MAX, for which paged.cu leaves registers (__launch_bounds__),
with 80 KiB of loads under way; an H200 needs 16 KB/us x 1.2 us = 20 KiB for each of its 132 to fill its memory's
4.3 TB/s of reads and writes. A grid of more blocks than run at a time would end in a wave that is not full."""

PLANE_FIELDS = (
    "base",
    "page_stride",
    "outer_stride",
    "inner_stride",
    "inner_count",
    "run_bytes",
    "page_bytes",
    "slot_offset",
    "slot_page_stride",
)
PLANE = np.dtype([(name, np.int64) for name in PLANE_FIELDS])

Array = npt.NDArray[Any]


@cache
def call_type(entries: int) -> np.dtype[Any]:
    """`Call<entries>` of paged.cu."""
    counts = ("num_planes", "num_slots", "pages_per_slot", "tiles", "tile_vectors", "items")
    return np.dtype([("planes", np.int64), *((name, np.int64) for name in counts), ("table", np.int64, (entries,))])


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel, which takes `call`, one `Call<entries>`, by value."""

    kernel: str
    grid: int
    threads: int
    call: Array


def kernel_name(way: str, width: int, entries: int) -> str:
    """The name of the kernel in paged.cu."""
    return f"kvstored_{way}_{width}_{entries}"


def kernel_names(entries_max: int) -> list[str]:
    """All kernels whose argument has at most so many entries."""
    return [
        kernel_name(way, width, entries)
        for entries in (SMALL_ENTRIES, LARGE_ENTRIES)
        if entries <= entries_max
        for way in Way
        for width in WIDTHS
    ]


def plane_table(layout: PagedLayout) -> Array:
    """`PLANE` rows `[layer * parts + part]`, to be put where the kernels can read it."""
    table = np.zeros((layout.num_layers, len(layout.parts)), dtype=PLANE)
    table["base"] = layout.bases
    before = 0
    for number, part in enumerate(layout.parts):
        page_bytes = layout.part_bytes(number)
        rows = table[:, number]
        rows["page_stride"] = part.page_stride if layout.num_pages > 1 else 0
        rows["page_bytes"] = page_bytes
        rows["outer_stride"], rows["inner_stride"], rows["inner_count"], rows["run_bytes"] = runs(layout, number)
        by_page = layout.order is SlotOrder.ENGINE
        rows["slot_page_stride"] = layout.page_bytes if by_page else page_bytes
        first = before if by_page else before * layout.pages_per_slot
        rows["slot_offset"] = first + np.arange(layout.num_layers, dtype=np.int64) * layout.layer_bytes
        before += page_bytes
    return table.reshape(-1)


def runs(layout: PagedLayout, number: int) -> tuple[int, int, int, int]:
    """Of one part: outer stride, inner stride, inner count, run. Runs that touch are one, a single run has no strides.

    The outer count follows from the bytes of a page.
    """
    part = layout.parts[number]
    outer, inner = (part.token_stride, layout.page_tokens), (part.head_stride, part.heads)
    if layout.heads_outside(number):
        outer, inner = inner, outer
    run = part.head_bytes
    dims = [dim for dim in (outer, inner) if dim[1] > 1]
    while dims and dims[-1][0] == run:
        run *= dims.pop()[1]
    if not dims:
        return 0, 0, 1, run
    if len(dims) == 1:
        return dims[0][0], 0, 1, run
    return dims[0][0], dims[1][0], dims[1][1], run


def alignment(table: Array) -> int:
    """The widest copy that all addresses, strides and lengths of a plane table allow, but for the slots' addresses."""
    names = [name for name in PLANE_FIELDS if name != "inner_count"]
    return lowest_bit(int(np.bitwise_or.reduce(np.stack([table[name] for name in names]), axis=None)))


def lowest_bit(value: int) -> int:
    """The largest of WIDTHS that divides it."""
    value |= WIDTHS[0]
    return value & -value


def cut(vectors: int, copies: int, multiprocessors: int) -> tuple[int, int, int]:
    """How a page of a plane is cut into tiles: tiles, vectors of each, threads for each.

    A tile is what a block of threads moves without a loop, but smaller where there are too few to give every
    multiprocessor two, and even, so that the last is not a rest. `copies`: how many such pages there are.
    """
    tiles = -(-vectors // (THREADS_MAX * UNROLL))
    if tiles * copies < 2 * multiprocessors:
        tiles = max(tiles, min(-(-2 * multiprocessors // copies), -(-vectors // (WARP * 2))))
    each = -(-vectors // tiles)
    each = min(-(-each // 8) * 8, vectors)  # whole lines of 128 bytes at 16 a vector
    threads = min(-(-each // (WARP * UNROLL)) * WARP, THREADS_MAX)
    return -(-vectors // each), each, threads


def launches(
    batch: Batch, table: Array, address: int, multiprocessors: int, entries_max: int = LARGE_ENTRIES
) -> Iterator[Launch]:
    """What copies this batch: one launch, or several where its slots and pages do not fit one argument.

    `table` is `plane_table(batch.layout)`, which the kernels find at `address`. `multiprocessors`: how many may be
    kept busy; all of them for copies within the device, few for copies over the bus, which a few fill.
    """
    layout = batch.layout
    pages_per_slot, num_parts = layout.pages_per_slot, len(layout.parts)
    num_planes = batch.num_layers * num_parts
    page_bytes = int(table["page_bytes"].max())
    width_of_layout = alignment(table)
    room = entries_max // (1 + pages_per_slot)
    assert room, "PAGES_PER_SLOT_MAX fits the smallest argument"
    for start in range(0, len(batch), room):
        slots, pages = batch.slots[start : start + room], batch.pages[start : start + room]
        used = len(slots) + pages.size
        entries = SMALL_ENTRIES if used <= SMALL_ENTRIES else LARGE_ENTRIES
        width = min(width_of_layout, lowest_bit(int(np.bitwise_or.reduce(slots))))
        copies = pages.size * num_planes
        tiles, tile_vectors, threads = cut(page_bytes // width, copies, multiprocessors)
        items = copies * tiles
        call = np.zeros((), dtype=call_type(entries))
        call["planes"] = address + batch.first_layer * num_parts * PLANE.itemsize
        call["num_planes"], call["num_slots"], call["pages_per_slot"] = num_planes, len(slots), pages_per_slot
        call["tiles"], call["tile_vectors"], call["items"] = tiles, tile_vectors, items
        call["table"][: len(slots)] = slots
        call["table"][len(slots) : used] = pages.reshape(-1)
        resident = min(RESIDENT_THREADS // threads, RESIDENT_BLOCKS)
        grid = min(items, multiprocessors * resident)
        yield Launch(kernel_name(batch.way, width, entries), grid, threads, call)
