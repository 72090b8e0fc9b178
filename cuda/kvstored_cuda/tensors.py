"""A PagedLayout from the tensors that an engine registers: torch's, cupy's or numpy's, by what they say of themselves.

Axes are named by one letter each, in the order of the tensor's shape:

    B  page ("block" of the engine)         needed
    K  K and V, 1 or 2 of them              in a tensor that holds both
    N  token of the page                    needed
    H  head                                 left out where a token has one vector (MLA)
    D  what lies together for a head        needed, contiguous

Shapes say nothing about the order in memory, strides do: HND caches come as "BHND", or as "BNHD" with strides that
say the same. What engines have, as far as their sources were read:

    K and V apart                                     (k, v) a layer, "BNHD" or "BHND"
    FlashAttention in vLLM before its 4-D caches      "KBNHD", K and V outermost
    FlashInfer, later FlashAttention                  "BKNHD" (NHD) or "BKHND" (HND)
    vLLM's 4-D caches, K and V in the last axis       "BHND": one part, D is K then V of a head
    MLA                                               "BND"
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstored.v1.errors import InvalidArgument
from kvstored_cuda.layouts import LAYERS_MAX, PARTS_MAX, PagedLayout, Part, SlotOrder


class Seen(NamedTuple):
    """What a tensor says of itself, in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int


def paged_layout(
    layers: Sequence[Any],
    axes: str,
    *,
    order: SlotOrder = SlotOrder.CANONICAL,
    pages_per_slot: int = 1,
) -> PagedLayout:
    """The layout of these layers: a tensor each, or (k, v). All have the same shapes and strides.

    Keep the tensors alive while the layout is in use: it has their addresses only. Raises InvalidArgument.
    """
    if not 1 <= len(layers) <= LAYERS_MAX:
        raise InvalidArgument(f"{len(layers)} layers are not 1 to {LAYERS_MAX}")
    _check_axes(axes)
    seen = [tuple(map(look_at, layer if isinstance(layer, list | tuple) else (layer,))) for layer in layers]
    first = seen[0]
    for number, layer in enumerate(seen):
        if [part[1:] for part in layer] != [part[1:] for part in first]:
            raise InvalidArgument(f"layer {number} has other shapes, strides or elements than layer 0")
    if not 1 <= len(first) <= PARTS_MAX or ("K" in axes and len(first) > 1):
        raise InvalidArgument(f"a layer is one tensor, or k and v without an axis K; this one has {len(first)}")
    if len({part.element_bytes for part in first}) > 1:
        raise InvalidArgument("k and v have elements of different sizes")
    sizes = [_sizes(axes, part) for part in first]
    if any((s["B"], s["N"]) != (sizes[0]["B"], sizes[0]["N"]) for s in sizes):
        raise InvalidArgument("k and v have different numbers of pages or tokens")
    kinds = sizes[0].get("K", 1)
    if not 1 <= kinds <= PARTS_MAX:
        raise InvalidArgument(f"axis K has size {kinds}, not 1 or 2")
    step = first[0].strides[axes.index("K")] if kinds > 1 else 0
    if step < 0:
        raise InvalidArgument(f"axis K has stride {step}")
    return PagedLayout(
        element_bytes=first[0].element_bytes,
        num_pages=sizes[0]["B"],
        page_tokens=sizes[0]["N"],
        parts=tuple(_part(axes, part) for part in first for _ in range(kinds)),
        bases=tuple(tuple(part.address + step * kind for part in layer for kind in range(kinds)) for layer in seen),
        order=order,
        pages_per_slot=pages_per_slot,
    )


def look_at(tensor: Any) -> Seen:
    """Address, shape, strides and element size of a tensor of torch, cupy or numpy."""
    if hasattr(tensor, "data_ptr"):  # torch's interface for arrays knows neither bf16 nor fp8
        size = int(tensor.element_size())
        strides = tuple(int(stride) * size for stride in tensor.stride())
        return Seen(int(tensor.data_ptr()), tuple(map(int, tensor.shape)), strides, size)
    for name in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(tensor, name, None)
        if interface is not None:
            strides = tuple(map(int, tensor.strides))
            return Seen(int(interface["data"][0]), tuple(map(int, tensor.shape)), strides, int(tensor.dtype.itemsize))
    raise InvalidArgument(f"a {type(tensor).__name__} is not a tensor of torch, cupy or numpy")


def _check_axes(axes: str) -> None:
    if len(set(axes)) != len(axes) or not set("BND") <= set(axes) <= set("BKNHD"):
        raise InvalidArgument(f"axes {axes!r} are not B, N and D, with K or H or both, each once")


def _sizes(axes: str, seen: Seen) -> dict[str, int]:
    if len(seen.shape) != len(axes):
        raise InvalidArgument(f"a tensor of shape {seen.shape} has not the axes {axes!r}")
    return dict(zip(axes, seen.shape, strict=True))


def _part(axes: str, seen: Seen) -> Part:
    sizes = _sizes(axes, seen)
    strides = dict(zip(axes, seen.strides, strict=True))
    if sizes["D"] > 1 and strides["D"] != seen.element_bytes:
        raise InvalidArgument(f"axis D has stride {strides['D']}, not that of one element, {seen.element_bytes}")
    return Part(
        heads=sizes.get("H", 1),
        head_bytes=sizes["D"] * seen.element_bytes,
        page_stride=strides["B"],
        token_stride=strides["N"],
        head_stride=strides.get("H", 0),
    )
