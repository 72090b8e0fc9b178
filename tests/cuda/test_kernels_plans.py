"""Tables and launches: one launch for all layers and blocks, the widest copy, every byte once, 64 bits."""

import ctypes
import mmap
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored_cuda.batches import Way, check_batch
from kvstored_cuda.layouts import PAGES_PER_SLOT_MAX, PagedLayout, Part, SlotOrder
from kvstored_cuda.plans import (
    LARGE_ENTRIES,
    PLANE,
    PLANE_FIELDS,
    RESIDENT_THREADS,
    SMALL_ENTRIES,
    THREADS_MAX,
    UNROLL,
    WARP,
    Launch,
    alignment,
    call_type,
    cut,
    launches,
    plane_table,
    runs,
)
from kvstored_cuda.twins import TwinCopies, memory_at
from tests.cuda.kernel_rig import HERE, PACKAGE, ShimCopies, plain_shim

H200 = 132
"""Multiprocessors."""

BASE = 1 << 40


def llama(
    layers: int = 32,
    tokens: int = 16,
    pages_per_slot: int = 1,
    order: SlotOrder = SlotOrder.CANONICAL,
    hnd: bool = False,
) -> PagedLayout:
    """8 heads of 128 in bf16; 16 tokens of 32 layers are 2 MiB."""
    row, run = 8 * 256, 256
    part = Part(
        heads=8,
        head_bytes=run,
        page_stride=2 * tokens * row,
        token_stride=run if hnd else row,
        head_stride=tokens * run if hnd else run,
    )
    bases = tuple((BASE + (i << 36), BASE + (i << 36) + tokens * row) for i in range(layers))
    return PagedLayout(
        element_bytes=2,
        num_pages=100_000,
        page_tokens=tokens,
        parts=(part, part),
        bases=bases,
        order=order,
        pages_per_slot=pages_per_slot,
    )


def planned(
    layout: PagedLayout, slots: int, entries_max: int = LARGE_ENTRIES, shift: int = 0, layers: range | None = None
) -> list[Launch]:
    places = (1 << 46) + shift + np.arange(slots) * layout.slot_bytes
    pages = np.arange(slots * layout.pages_per_slot)
    batch = check_batch(layout, Way.GATHER, pages, places, slot_bytes=layout.slot_bytes, layers=layers)
    return list(launches(batch, plane_table(layout), 1 << 20, H200, entries_max))


@pytest.mark.parametrize("slots", [1, 16, 240, 2040])
def test_all_layers_and_blocks_are_one_launch(slots: int) -> None:
    (launch,) = planned(llama(), slots)
    entries = SMALL_ENTRIES if 2 * slots <= SMALL_ENTRIES else LARGE_ENTRIES
    assert launch.kernel == f"kvstored_gather_16_{entries}"
    assert launch.call.dtype == call_type(entries)
    assert launch.call["items"] == slots * 64 * launch.call["tiles"]


def test_more_than_an_argument_holds_is_several_launches() -> None:
    layout = llama()
    found = planned(layout, 5000)
    assert [int(launch.call["num_slots"]) for launch in found] == [2040, 2040, 920]
    pages = [launch.call["table"][n : 2 * n] for launch in found if (n := int(launch.call["num_slots"]))]
    assert np.array_equal(np.concatenate(pages), np.arange(5000))
    small = planned(layout, 5000, SMALL_ENTRIES)
    assert len(small) == 20
    assert {launch.kernel for launch in small} == {"kvstored_gather_16_500"}


def test_a_slot_of_the_most_pages_fits_the_smallest_argument() -> None:
    (launch,) = planned(llama(tokens=1, pages_per_slot=PAGES_PER_SLOT_MAX), 1, SMALL_ENTRIES)
    assert launch.call["num_slots"] == 1


def test_a_range_of_layers_begins_at_its_rows() -> None:
    (launch,) = planned(llama(), 4, layers=range(5, 8))
    assert launch.call["planes"] == (1 << 20) + 5 * 2 * PLANE.itemsize
    assert launch.call["num_planes"] == 6


def test_runs_are_as_long_as_the_layout_allows() -> None:
    whole = 16 * 8 * 256
    assert runs(llama(), 0) == (0, 0, 1, whole), "NHD: K of a page is one run"
    assert runs(llama(hnd=True), 0) == (256, 4096, 8, 256), "HND into canonical order: a head of a token"
    assert runs(llama(hnd=True, order=SlotOrder.ENGINE), 0) == (0, 0, 1, whole), "HND as it is: one run"
    padded = replace(llama().parts[0], token_stride=8 * 256 + 64)
    assert runs(replace(llama(), parts=(padded, padded), bases=((BASE, BASE << 1),)), 0) == (2112, 0, 1, 2048)


@pytest.mark.parametrize(("shift", "width"), [(0, 16), (8, 8), (4, 4), (2, 2), (16, 16), (24, 8)])
def test_the_width_is_what_every_address_allows(shift: int, width: int) -> None:
    (launch,) = planned(llama(), 4, shift=shift)
    assert launch.kernel == f"kvstored_gather_{width}_500"
    moved = replace(llama(), bases=tuple((k + shift, v + shift) for k, v in llama().bases))
    assert alignment(plane_table(moved)) == width


def test_a_width_follows_from_strides_and_runs_too() -> None:
    for head_bytes, width in ((80, 16), (72, 8), (68, 4), (66, 2)):
        part = Part(heads=2, head_bytes=head_bytes, page_stride=1 << 20, token_stride=4096, head_stride=1024)
        layout = PagedLayout(element_bytes=2, num_pages=9, page_tokens=4, parts=(part,), bases=((BASE,),))
        assert alignment(plane_table(layout)) == width
        strided = replace(part, head_bytes=64, token_stride=4096 + head_bytes)
        assert alignment(plane_table(replace(layout, parts=(strided,)))) == width


@given(vectors=st.integers(1, 1 << 30), copies=st.integers(1, 1 << 24), multiprocessors=st.integers(1, 200))
def test_tiles_cover_a_page_and_fit_a_block_of_threads(vectors: int, copies: int, multiprocessors: int) -> None:
    tiles, each, threads = cut(vectors, copies, multiprocessors)
    assert (tiles - 1) * each < vectors <= tiles * each
    assert threads % WARP == 0
    assert WARP <= threads <= THREADS_MAX
    assert each <= threads * UNROLL


@pytest.mark.parametrize("slots", [1, 16, 512])
@pytest.mark.parametrize("tokens", [1, 16, 128])
def test_a_grid_fills_the_device_and_no_more(slots: int, tokens: int) -> None:
    """From 128 KiB to 16 MiB a block, 32 layers."""
    (launch,) = planned(llama(tokens=tokens), slots)
    assert launch.grid * launch.threads <= H200 * RESIDENT_THREADS
    assert launch.grid <= launch.call["items"]
    moved = slots * llama(tokens=tokens).slot_bytes
    assert launch.grid >= min(H200, moved // (WARP * 2 * 16))


def test_tables_here_and_in_the_source_are_one_format() -> None:
    source = (PACKAGE / "paged.cu").read_text()
    plane = source[source.index("struct Plane {") : source.index("template <int ENTRIES>")]
    assert [line.split()[1].rstrip(";") for line in plane.splitlines() if line.startswith("    int64")] == [
        *PLANE_FIELDS
    ]
    call = source[source.index("struct Call {") : source.index("template <int WIDTH> struct VectorOf")]
    fields = [line.split("//")[0].split()[-1].rstrip(";") for line in call.splitlines() if line.startswith("    ")]
    assert [field.partition("[")[0] for field in fields] == list(call_type(1).names or ())
    assert all(f"KERNELS({entries})" in source for entries in (SMALL_ENTRIES, LARGE_ENTRIES))
    assert f"#define UNROLL {UNROLL}\n" in source
    assert f"__launch_bounds__({THREADS_MAX}, {RESIDENT_THREADS // THREADS_MAX})" in source
    assert (HERE / "kernel_shim.h").is_file()


NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux: memory that is only touched here and there."""


@pytest.mark.parametrize("order", list(SlotOrder))
@pytest.mark.parametrize("heads_outermost", [False, True], ids=["far pages", "far heads"])
def test_tensors_of_more_than_two_billion_elements(heads_outermost: bool, order: SlotOrder) -> None:
    """12 GiB of addresses a tensor, of which a few pages are touched: what 32 bits would wrap around."""
    size = 12 << 30
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE) as memory:
        base = ctypes.addressof(anchor := ctypes.c_char.from_buffer(memory))
        tokens, run = 16, 256
        page = tokens * run * (1 if heads_outermost else 2)
        part = Part(
            heads=2,
            head_bytes=run,
            page_stride=page,
            token_stride=page // tokens,
            head_stride=size // 2 if heads_outermost else run,
        )
        num_pages = size // (2 * tokens * run)
        layout = PagedLayout(
            element_bytes=1, num_pages=num_pages, page_tokens=tokens, parts=(part,), bases=((base,),), order=order
        )
        pages, others = [num_pages - 1, 0, num_pages // 2], [1, num_pages - 2, num_pages // 2 + 1]
        random = np.random.default_rng(5)
        for number in pages:
            for head in range(2):
                for token in range(tokens):
                    at = base + number * part.page_stride + token * part.token_stride + head * part.head_stride
                    memory_at(at, run)[:] = random.integers(0, 256, run, dtype=np.uint8)
        slots = np.zeros((2, 3, layout.slot_bytes), np.uint8)
        mine, twins = ([row.ctypes.data for row in rows] for rows in slots)
        shim, twin = ShimCopies(layout, plain_shim()), TwinCopies(layout)
        assert shim.gather(pages, mine, slot_bytes=layout.slot_bytes) == 1
        twin.gather(pages, twins, slot_bytes=layout.slot_bytes)
        assert slots[0].any()
        assert np.array_equal(slots[0], slots[1])
        shim.scatter(others, mine, slot_bytes=layout.slot_bytes)
        twin.gather(others, twins[::-1], slot_bytes=layout.slot_bytes)
        assert np.array_equal(slots[0], slots[1][::-1])
        del anchor
