"""Layouts from tensors; a slot in canonical order is what the words say: `[layer][K|V][token][head][dim]`."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstored.v1.errors import InvalidArgument
from kvstored_cuda.layouts import PagedLayout, SlotOrder
from kvstored_cuda.tensors import paged_layout
from tests.cuda.kernel_rig import ShimCopies, plain_shim

LAYERS, SIZES = 3, {"B": 7, "K": 2, "N": 4, "H": 3, "D": 8}
PAGES, PAGES_PER_SLOT = [5, 0, 6, 3], 2

ENGINES = {
    "FlashAttention, K and V outermost": "KBNHD",
    "FlashInfer NHD": "BKNHD",
    "FlashInfer HND": "BKHND",
    "K and V of each token side by side": "BNKHD",
    "K and V of each head side by side": "BNHKD",
    "heads outermost": "HBKND",
}

Cache = npt.NDArray[np.uint16]


def caches(axes: str) -> list[Cache]:
    """One array a layer, every element another number."""
    shape = [SIZES[axis] for axis in axes]
    count = int(np.prod(shape))
    return [np.arange(layer * count, (layer + 1) * count, dtype=np.uint16).reshape(shape) for layer in range(LAYERS)]


def meaning(layers: list[Cache], axes: str, wanted: str) -> Cache:
    """`[slot, layer, K|V, token, head, dim]` of PAGES, by numpy's names for it alone."""
    ordered = np.stack([np.einsum(f"{axes}->B{wanted}", layer) for layer in layers])
    picked = ordered[:, PAGES].reshape(LAYERS, -1, PAGES_PER_SLOT, *ordered.shape[2:])
    tokens = 3 + wanted.index("N")  # behind layer, slot and page of the slot
    moved = np.moveaxis(picked, 2, tokens - 1)
    shape = list(moved.shape)
    shape[tokens - 1 : tokens + 1] = [PAGES_PER_SLOT * SIZES["N"]]
    return np.ascontiguousarray(moved.reshape(shape).swapaxes(0, 1))


def gathered(layout: PagedLayout) -> Cache:
    slots = np.zeros((len(PAGES) // PAGES_PER_SLOT, layout.slot_bytes), np.uint8)
    places = [slots.ctypes.data + i * layout.slot_bytes for i in range(len(slots))]
    assert ShimCopies(layout, plain_shim()).gather(PAGES, places, slot_bytes=layout.slot_bytes) == 1
    return slots.view(np.uint16)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_slot_means_the_same_whatever_the_engine(engine: str) -> None:
    axes = ENGINES[engine]
    layers = caches(axes)
    layout = paged_layout(layers, axes, pages_per_slot=PAGES_PER_SLOT)
    expected = meaning(layers, axes, "KNHD")
    assert np.array_equal(gathered(layout), expected.reshape(len(expected), -1))
    assert layout.packing == ""


@pytest.mark.parametrize(("axes", "wanted"), [("BNHD", "NHD"), ("BHND", "NHD"), ("BND", "ND")])
def test_k_and_v_apart_and_mla(axes: str, wanted: str) -> None:
    k, v = caches(axes), [layer + np.uint16(30_000) for layer in caches(axes)]
    one = gathered(paged_layout(k, axes, pages_per_slot=PAGES_PER_SLOT))
    expected = meaning(k, axes, wanted)
    assert np.array_equal(one, expected.reshape(len(expected), -1))
    both = gathered(paged_layout(list(zip(k, v, strict=True)), axes, pages_per_slot=PAGES_PER_SLOT))
    pair = np.stack([expected, meaning(v, axes, wanted)], axis=2)
    assert np.array_equal(both, pair.reshape(len(pair), -1))


def test_the_engines_own_order_is_a_page_as_it_lies_in_memory() -> None:
    """What the vLLM connector has on the CPU: `[layer][bytes of that layer's block]`."""
    for axes in ("BKNHD", "BKHND"):
        layers = caches(axes)
        layout = paged_layout(layers, axes, order=SlotOrder.ENGINE, pages_per_slot=PAGES_PER_SLOT)
        expected = [[layer[page] for layer in layers for page in pages] for pages in (PAGES[:2], PAGES[2:])]
        assert np.array_equal(gathered(layout), np.array(expected).reshape(2, -1))


def test_views_are_read_by_their_strides() -> None:
    """An engine that names its axes HND and has NHD in memory, as vLLM does."""
    layers = caches("BKNHD")
    turned = [layer.swapaxes(2, 3) for layer in layers]
    assert paged_layout(turned, "BKHND") == paged_layout(layers, "BKNHD")


def test_torch_tensors_of_every_dtype_are_read() -> None:
    torch = pytest.importorskip("torch", reason="torch is not here: tensors of torch were not tried")
    for name, size in (("bfloat16", 2), ("float16", 2), ("float8_e4m3fn", 1), ("uint8", 1), ("float32", 4)):
        layers = [torch.zeros(7, 2, 4, 3, 8, dtype=getattr(torch, name)) for _ in range(2)]
        found = paged_layout(layers, "BKNHD")
        assert found.element_bytes == size
        assert found.slot_bytes == 2 * 2 * 4 * 3 * 8 * size
        assert found.bases[1] == (layers[1].data_ptr(), layers[1].data_ptr() + 4 * 3 * 8 * size)
        permuted = [layer.permute(0, 1, 3, 2, 4) for layer in layers]
        assert paged_layout(permuted, "BKHND") == found


ARRAY = caches("BKNHD")[0]
WRONG: dict[str, tuple[list[Any], str, str]] = {
    "no layers": ([], "BKNHD", "0 layers"),
    "an axis twice": ([ARRAY], "BNNHD", "axes 'BNNHD'"),
    "an axis unknown": ([ARRAY], "BXNHD", "axes 'BXNHD'"),
    "no tokens": ([ARRAY], "BKHD", "axes 'BKHD'"),
    "an axis too few": ([ARRAY], "BNHD", "has not the axes 'BNHD'"),
    "three kinds": ([np.zeros((7, 3, 4, 3, 8), np.uint16)], "BKNHD", "axis K has size 3"),
    "k, v and more": ([(ARRAY, ARRAY, ARRAY)], "BKNHD", "this one has 3"),
    "a pair with an axis K": ([(ARRAY, ARRAY)], "BKNHD", "this one has 2"),
    "a list of numbers": ([[1, 2]], "BND", "a int is not a tensor"),
    "text": (["KV"], "BND", "a str is not a tensor"),
    "dims apart": ([ARRAY[..., ::2]], "BKNHD", "axis D has stride 4"),
    "dims backwards": ([ARRAY[..., ::-1]], "BKNHD", "axis D has stride -2"),
    "pages backwards": ([ARRAY[::-1]], "BKNHD", "does not fit"),
    "kinds backwards": ([ARRAY[:, ::-1]], "BKNHD", "axis K has stride"),
    "pages that are one": ([np.broadcast_to(ARRAY[:1], ARRAY.shape)], "BKNHD", "stride 0 does not fit"),
    "layers of two shapes": ([ARRAY, ARRAY[:6]], "BKNHD", "layer 1 has other shapes"),
    "layers of two strides": ([ARRAY, np.zeros((7, 2, 4, 3, 16), np.uint16)[..., :8]], "BKNHD", "layer 1 has other"),
    "one layer twice": ([ARRAY, ARRAY], "BKNHD", "overlap in memory"),
    "elements of 8 bytes": ([ARRAY.astype(np.int64)], "BKNHD", "element_bytes=8"),
}


@pytest.mark.parametrize("what", WRONG)
def test_tensors_that_cannot_be_read_are_refused(what: str) -> None:
    layers, axes, message = WRONG[what]
    with pytest.raises(InvalidArgument) as refused:
        paged_layout(layers, axes)
    assert message in str(refused.value)


def test_k_and_v_of_two_kinds_are_refused() -> None:
    k = caches("BNHD")[0]
    with pytest.raises(InvalidArgument, match="elements of different sizes"):
        paged_layout([(k, k.astype(np.uint8))], "BNHD")
    with pytest.raises(InvalidArgument, match="different numbers of pages or tokens"):
        paged_layout([(k, k[:5].copy())], "BNHD")
