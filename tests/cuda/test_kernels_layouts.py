"""What an engine's memory may be, and what is refused before anything is launched."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvstored.v1.errors import InvalidArgument
from kvstored_cuda.layouts import LAYERS_MAX, PAGES_PER_SLOT_MAX, PagedLayout, Part, SlotOrder

HEAD = 128
"""Bytes: 64 elements of bf16."""


def nhd(heads: int = 4, tokens: int = 16, page_stride: int | None = None) -> Part:
    row = heads * HEAD
    stride = tokens * row if page_stride is None else page_stride
    return Part(heads=heads, head_bytes=HEAD, page_stride=stride, token_stride=row, head_stride=HEAD)


def hnd(heads: int = 4, tokens: int = 16) -> Part:
    return Part(
        heads=heads,
        head_bytes=HEAD,
        page_stride=heads * tokens * HEAD,
        token_stride=HEAD,
        head_stride=tokens * HEAD,
    )


K0, V0, K1, V1 = (0x7F00_0000_0000 + i * (1 << 24) for i in range(4))


def layout(**changes: Any) -> PagedLayout:
    said: dict[str, Any] = {
        "element_bytes": 2,
        "num_pages": 100,
        "page_tokens": 16,
        "parts": (nhd(), nhd()),
        "bases": ((K0, V0), (K1, V1)),
    }
    return PagedLayout(**(said | changes))


def test_a_slot_has_the_bytes_of_all_layers_and_parts() -> None:
    one = layout()
    assert one.page_bytes == 2 * 16 * 4 * HEAD
    assert one.slot_bytes == 2 * one.layer_bytes == 2 * one.page_bytes
    assert one.slot_tokens == 16
    four = layout(pages_per_slot=4)
    assert (four.slot_bytes, four.slot_tokens) == (4 * one.slot_bytes, 64)


def test_k_and_v_of_different_sizes_fit() -> None:
    wide = replace(nhd(), head_bytes=192, token_stride=4 * 192, head_stride=192, page_stride=16 * 4 * 192)
    one = layout(parts=(wide, nhd()))
    assert one.page_bytes == 16 * 4 * (192 + HEAD)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "elements of 3 bytes": ({"element_bytes": 3}, "element_bytes=3 is not one of"),
    "no pages": ({"num_pages": 0}, "num_pages=0 is not a whole number from 1"),
    "too many pages": ({"num_pages": 1 << 31}, "num_pages"),
    "no tokens": ({"page_tokens": 0}, "page_tokens"),
    "a boolean for a count": ({"num_pages": True}, "num_pages=True"),
    "half a page a slot": ({"pages_per_slot": 0.5}, "pages_per_slot=0.5"),
    "too many pages a slot": ({"pages_per_slot": PAGES_PER_SLOT_MAX + 1}, "pages_per_slot"),
    "an order by name": ({"order": "canonical!"}, "order='canonical!'"),
    "no parts": ({"parts": (), "bases": ((), ())}, "1 to 2 parts"),
    "three parts": ({"parts": (nhd(),) * 3}, "1 to 2 parts"),
    "no layers": ({"bases": ()}, "1 to 512 layers"),
    "too many layers": ({"bases": ((K0, V0),) * (LAYERS_MAX + 1)}, "1 to 512 layers"),
    "a layer with one base": ({"bases": ((K0, V0), (K1,))}, "bases of layer 1 are not a tuple of 2"),
    "an address of nothing": ({"bases": ((K0, V0), (K1, 0))}, "base of layer 1, part 1=0 is not"),
    "an address between elements": ({"bases": ((K0, V0), (K1 + 1, V1))}, "layer 1 is not aligned to 2 bytes"),
    "an address at the end": ({"bases": ((K0, V0), (K1, (1 << 63) - 16))}, "beyond the last address"),
    "half an element a head": ({"parts": (replace(nhd(), head_bytes=127),) * 2}, "not whole elements of 2"),
    "no heads": ({"parts": (replace(nhd(), heads=0),) * 2}, "part 0: heads=0"),
    "pages that overlap": ({"parts": (nhd(), nhd(page_stride=16 * 4 * HEAD - 2))}, "part 1: stride 8190 does not fit"),
    "tokens that overlap": ({"parts": (replace(nhd(), token_stride=4 * HEAD - 64),) * 2}, "does not fit"),
    "heads that overlap": ({"parts": (replace(nhd(), head_stride=HEAD // 2),) * 2}, "does not fit"),
    "a stride between elements": ({"parts": (nhd(page_stride=16 * 4 * HEAD + 1), nhd())}, "not whole elements"),
    "a stride backwards": ({"parts": (nhd(page_stride=-16 * 4 * HEAD), nhd())}, "does not fit"),
    "a page over 1 GiB": ({"page_tokens": 1 << 22}, "over 1073741824"),
    "k on v": ({"bases": ((K0, K0), (K1, V1))}, "layer 0, part 0 and layer 0, part 1 overlap"),
    "a layer into the next": ({"bases": ((K0, V0), (K0 + 16 * 4 * HEAD, V1))}, "layer 0, part 0 and layer 1, part 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_layout_that_cannot_be_is_refused(what: str) -> None:
    changes, message = WRONG[what]
    with pytest.raises(InvalidArgument) as refused:
        layout(**changes)
    assert message in str(refused.value)


def test_strides_of_a_single_one_mean_nothing() -> None:
    """torch says any number there."""
    lone = Part(heads=1, head_bytes=HEAD, page_stride=16 * HEAD, token_stride=HEAD, head_stride=1)
    assert layout(parts=(lone, lone)).slot_bytes == 2 * 2 * 16 * HEAD
    single = replace(nhd(), page_stride=-7)
    assert layout(parts=(single, single), num_pages=1).slot_bytes == layout().slot_bytes


PAGE = 16 * 4 * HEAD


@pytest.mark.parametrize(
    ("first", "page_stride", "apart"),
    [(K0, 2 * PAGE, PAGE), (K0, PAGE, 100 * PAGE), (K0, 4 * PAGE, PAGE), (K0, 2 * PAGE, 3 * PAGE)],
    ids=["side by side in each page", "one behind the other", "with a gap", "three pages behind"],
)
def test_k_and_v_may_share_an_allocation(first: int, page_stride: int, apart: int) -> None:
    part = nhd(page_stride=page_stride)
    assert layout(parts=(part, part), bases=((first, first + apart), (K1, V1)))
    with pytest.raises(InvalidArgument, match="overlap in memory"):
        layout(parts=(part, part), bases=((first, first + apart - HEAD), (K1, V1)))


def test_k_and_v_of_each_head_may_lie_side_by_side() -> None:
    part = Part(heads=4, head_bytes=HEAD, page_stride=2 * PAGE, token_stride=8 * HEAD, head_stride=2 * HEAD)
    assert layout(parts=(part, part), bases=((K0, K0 + HEAD), (K1, K1 + HEAD)))
    with pytest.raises(InvalidArgument, match="overlap"):
        layout(parts=(part, part), bases=((K0, K0 + HEAD + 2), (K1, K1 + HEAD)))


def test_layers_may_lie_side_by_side_in_each_page() -> None:
    layers = LAYERS_MAX
    part = nhd(page_stride=2 * layers * PAGE)
    bases = tuple((K0 + 2 * i * PAGE, K0 + (2 * i + 1) * PAGE) for i in range(layers))
    assert layout(parts=(part, part), bases=bases).num_layers == layers
    wrong = (*bases[:-1], (bases[-1][0], bases[-1][1] + 2))  # the last of a page into the first of the next
    with pytest.raises(InvalidArgument, match="overlap in memory"):
        layout(parts=(part, part), bases=wrong)


def test_nhd_and_hnd_share_blocks_in_canonical_order_only() -> None:
    first, other = layout(parts=(nhd(), nhd())), layout(parts=(hnd(), hnd()))
    assert first.packing == other.packing == ""
    own = layout(parts=(hnd(), hnd()), order=SlotOrder.ENGINE)
    assert own.packing == "paged;head,token 4x128;head,token 4x128"


def test_packing_tells_apart_whatever_orders_bytes() -> None:
    """Engines with the same packing and shapes have the same bytes; each of these has others."""
    mla = {"parts": (nhd(heads=1),), "bases": ((K0,), (K1,))}
    found = [
        layout().packing,
        layout(**mla).packing,
        layout(parts=(hnd(), hnd()), order=SlotOrder.ENGINE).packing,
        layout(pages_per_slot=2, order=SlotOrder.ENGINE).packing,
        layout(pages_per_slot=2, order=SlotOrder.ENGINE, page_tokens=8, parts=(nhd(tokens=8),) * 2).packing,
        layout(pages_per_slot=2, order=SlotOrder.ENGINE, parts=(hnd(), hnd())).packing,
        layout(parts=(nhd(), nhd(heads=2))).packing,
    ]
    assert len(set(found)) == len(found)


def test_packing_is_the_same_where_bytes_are() -> None:
    assert layout(order=SlotOrder.ENGINE).packing == ""
    assert layout(pages_per_slot=2).packing == ""
    small = layout(pages_per_slot=4, page_tokens=8, parts=(hnd(tokens=8), hnd(tokens=8)))
    assert small.packing == "", "canonical order does not know pages"
    mla = {"parts": (nhd(heads=1),), "bases": ((K0,), (K1,))}
    assert layout(**mla).packing == layout(**mla, pages_per_slot=2, order=SlotOrder.ENGINE).packing


@st.composite
def crowded(draw: st.DrawFn) -> tuple[dict[str, Any], list[int]]:
    """Layouts of a few bytes that often overlap, and all addresses of each, one a byte."""
    counts = [draw(st.integers(1, 3)) for _ in range(3)]
    pages, tokens, heads = counts
    parts = []
    for _ in range(draw(st.integers(1, 2))):
        run = draw(st.integers(1, 3))
        strides = [run, run * 2, run * heads, run * heads * tokens, run * heads * tokens * 2, 5, 7, 16, 24, 48, -4, 0]
        page, token, head = (draw(st.sampled_from(strides)) for _ in range(3))
        parts.append(Part(heads=heads, head_bytes=run, page_stride=page, token_stride=token, head_stride=head))
    if len(parts) == 2 and draw(st.booleans()):
        parts[1] = parts[0]
    layers = draw(st.integers(1, 2))
    bases = tuple(tuple(draw(st.integers(1000, 1060)) for _ in parts) for _ in range(layers))
    said = {
        "element_bytes": 1,
        "num_pages": pages,
        "page_tokens": tokens,
        "parts": tuple(parts),
        "bases": bases,
    }
    addresses = [
        base + part.page_stride * page + part.token_stride * token + part.head_stride * head + byte
        for layer in bases
        for base, part in zip(layer, parts, strict=True)
        for page in range(pages)
        for token in range(tokens)
        for head in range(heads)
        for byte in range(part.head_bytes)
    ]
    return said, addresses


@settings(max_examples=1500, deadline=None)
@given(drawn=crowded())
def test_every_layout_that_is_taken_has_each_byte_once(drawn: tuple[dict[str, Any], list[int]]) -> None:
    said, addresses = drawn
    try:
        layout = PagedLayout(**said)
    except InvalidArgument:
        event("refused")
    else:
        assert len(set(addresses)) == len(addresses)
        assert all(any(low <= address < high for low, high in layout.spans) for address in addresses)


def test_layouts_that_share_memory_without_overlap_are_among_those_taken() -> None:
    """So that the claim above is about something."""
    taken: list[bool] = []

    @settings(max_examples=400, deadline=None, database=None)
    @given(drawn=crowded())
    def draw_all(drawn: tuple[dict[str, Any], list[int]]) -> None:
        said, _ = drawn
        try:
            found = PagedLayout(**said)
        except InvalidArgument:
            return
        taken.append(len(found.spans) < found.num_layers * len(found.parts))

    draw_all()
    assert any(taken)
    assert not all(taken)
