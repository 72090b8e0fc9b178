"""What an engine's paged KV cache is in memory, and how a block of the store holds it.

Words: a *page* is what an engine calls a block, the KV cache of `page_tokens` tokens in each layer; a *slot* is the
place of one block of the store, contiguous, `pages_per_slot` pages. A *part* is what a layer has as one array:
K, or V, or both in one (MLA's latent, or K and V side by side for each token).

The bytes of a slot do not depend on the engine's strides where the order is CANONICAL, `[layer][part][token][head]
[dim]`: engines whose heads come first (HND) and whose tokens do (NHD) can share blocks, whatever their page size.
Where it is ENGINE, `[layer][page][part][as the engine has it]`, which copies longer runs, and the layout's `packing`
says so. In both a range of layers is a range of bytes.

Everything is checked when a PagedLayout is made, on the host, before anything is launched. Addresses and strides are
bytes; only `element_bytes` is known of a dtype.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import combinations, pairwise

from kvstored.v1.errors import InvalidArgument

ELEMENT_BYTES = (1, 2, 4)
"""fp8 and int8; bf16 and fp16; fp32."""

LAYERS_MAX = 512
PARTS_MAX = 2
PAGES_PER_SLOT_MAX = 256
NUM_PAGES_MAX = (1 << 31) - 1
PART_BYTES_MAX = 1 << 30
"""Of one page of one part: paged.cu counts within it with 32 bits."""

ADDRESS_MAX = (1 << 63) - 1
"""paged.cu counts addresses with 64 bits and a sign; user space of every processor with CUDA is below 2^57."""


class SlotOrder(StrEnum):
    """How a slot holds a page."""

    CANONICAL = "canonical"
    """`[layer][part][token][head][dim]`, tokens through all pages of the slot."""
    ENGINE = "engine"
    """`[layer][page][part]`, and of heads and tokens first what has the larger stride in the engine."""


def whole(name: str, value: object, low: int, high: int) -> int:
    """`value`, if it is a whole number from `low` to `high`; else raises InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(f"{name}={value!r} is not a whole number from {low} to {high}")
    return value


@dataclass(frozen=True, kw_only=True)
class Part:
    """One array of a layer, `[page][token][head][head_bytes]` with these strides in bytes, the last contiguous.

    A stride along which there is only one of its kind means nothing and may be any number.
    """

    heads: int
    head_bytes: int
    page_stride: int
    token_stride: int
    head_stride: int

    @property
    def heads_first(self) -> bool:
        """Whether a page has all tokens of a head together (HND)."""
        return self.head_stride > self.token_stride


Dim = tuple[int, int]
"""Stride in bytes, and how many."""


def reach(dims: list[Dim], run: int) -> int:
    """Bytes from the first byte to behind the last."""
    return run + sum(stride * (count - 1) for stride, count in dims)


@dataclass(frozen=True, kw_only=True)
class PagedLayout:
    """One engine's paged KV cache, all layers of one rank that have the same shape, and the slots for it.

    `bases[layer][part]` are addresses of page 0: of device memory for the kernels, of host memory for the twins.
    Whoever makes a layout keeps the tensors alive while it is in use. Raises InvalidArgument, naming what is wrong:
    strides that do not fit, parts that overlap, addresses that are not aligned to elements, counts out of range.
    """

    element_bytes: int
    num_pages: int
    page_tokens: int
    parts: tuple[Part, ...]
    bases: tuple[tuple[int, ...], ...]
    order: SlotOrder = SlotOrder.CANONICAL
    pages_per_slot: int = 1

    def __post_init__(self) -> None:
        if self.element_bytes not in ELEMENT_BYTES:
            raise InvalidArgument(f"element_bytes={self.element_bytes!r} is not one of {ELEMENT_BYTES}")
        whole("num_pages", self.num_pages, 1, NUM_PAGES_MAX)
        whole("page_tokens", self.page_tokens, 1, PART_BYTES_MAX)
        whole("pages_per_slot", self.pages_per_slot, 1, PAGES_PER_SLOT_MAX)
        if not isinstance(self.order, SlotOrder):
            raise InvalidArgument(f"order={self.order!r} is not one of {', '.join(SlotOrder)}")
        if not isinstance(self.parts, tuple) or not 1 <= len(self.parts) <= PARTS_MAX:
            raise InvalidArgument(f"a layer has 1 to {PARTS_MAX} parts, as a tuple")
        for number, part in enumerate(self.parts):
            self._check_part(number, part)
        if not isinstance(self.bases, tuple) or not 1 <= len(self.bases) <= LAYERS_MAX:
            raise InvalidArgument(f"a layout has 1 to {LAYERS_MAX} layers, as a tuple of addresses for each")
        for layer, bases in enumerate(self.bases):
            if not isinstance(bases, tuple) or len(bases) != len(self.parts):
                raise InvalidArgument(f"bases of layer {layer} are not a tuple of {len(self.parts)}, one a part")
            for number, base in enumerate(bases):
                self._check_base(layer, number, base)
        self._check_apart()

    def _check_part(self, number: int, part: Part) -> None:
        name = f"part {number}"
        whole(f"{name}: heads", part.heads, 1, PART_BYTES_MAX)
        whole(f"{name}: head_bytes", part.head_bytes, 1, PART_BYTES_MAX)
        if part.head_bytes % self.element_bytes:
            raise InvalidArgument(
                f"{name}: head_bytes={part.head_bytes} are not whole elements of {self.element_bytes}"
            )
        if self.part_bytes(number) > PART_BYTES_MAX:
            raise InvalidArgument(f"{name}: a page of it has {self.part_bytes(number)} bytes, over {PART_BYTES_MAX}")
        for stride_name in ("page_stride", "token_stride", "head_stride"):
            whole(f"{name}: {stride_name}", getattr(part, stride_name), -ADDRESS_MAX, ADDRESS_MAX)
        below = part.head_bytes
        for stride, count in sorted(self.dims(number)):
            if stride % self.element_bytes:
                raise InvalidArgument(f"{name}: stride {stride} is not whole elements of {self.element_bytes} bytes")
            if stride < below:
                raise InvalidArgument(
                    f"{name}: stride {stride} does not fit: what lies along it has {below} bytes, so it would overlap"
                )
            below = stride * (count - 1) + below

    def _check_base(self, layer: int, number: int, base: object) -> None:
        address = whole(f"base of layer {layer}, part {number}", base, 1, ADDRESS_MAX)
        if address % self.element_bytes:
            raise InvalidArgument(f"base {address:#x} of layer {layer} is not aligned to {self.element_bytes} bytes")
        if address + self.part_reach(number) > ADDRESS_MAX:
            raise InvalidArgument(f"layer {layer}, part {number} reaches beyond the last address")

    def _check_apart(self) -> None:
        """Every byte of the engine belongs to one part of one layer."""
        planes = sorted(
            (base, number, layer) for layer, bases in enumerate(self.bases) for number, base in enumerate(bases)
        )
        if all(a[0] + self.part_reach(a[1]) <= b[0] for a, b in pairwise(planes)):
            return
        if self._lanes_apart():
            return
        for (base, number, layer), (other_base, other, other_layer) in combinations(planes, 2):
            mine = (sorted(self.dims(number), reverse=True), self.parts[number].head_bytes)
            theirs = (sorted(self.dims(other), reverse=True), self.parts[other].head_bytes)
            if meet(other_base - base, *mine, *theirs):
                raise InvalidArgument(
                    f"layer {layer}, part {number} and layer {other_layer}, part {other} overlap in memory"
                )

    def _lanes_apart(self) -> bool:
        """Whether parts that share their pages (layers side by side in each) keep to lanes of their own: the quick
        proof for what would else be every pair. False proves nothing."""
        strides = {part.page_stride for part in self.parts}
        if self.num_pages == 1 or len(strides) > 1:
            return False
        (stride,) = strides
        inside = [self.part_reach(number) - stride * (self.num_pages - 1) for number in range(len(self.parts))]
        lanes = sorted(
            (base % stride, base % stride + inside[number]) for bases in self.bases for number, base in enumerate(bases)
        )
        return all(a[1] <= b[0] for a, b in pairwise(lanes)) and lanes[-1][1] <= lanes[0][0] + stride

    # -- what follows from it

    def dims(self, number: int) -> list[Dim]:
        """Strides and counts of a part, those with a count above 1: pages, tokens, heads."""
        part = self.parts[number]
        counts = (
            (part.page_stride, self.num_pages),
            (part.token_stride, self.page_tokens),
            (part.head_stride, part.heads),
        )
        return [(stride, count) for stride, count in counts if count > 1]

    def part_reach(self, number: int) -> int:
        """Bytes from a base to behind the last byte of its last page."""
        return reach(self.dims(number), self.parts[number].head_bytes)

    def part_bytes(self, number: int) -> int:
        """Bytes of one page of a part."""
        part = self.parts[number]
        return self.page_tokens * part.heads * part.head_bytes

    @property
    def num_layers(self) -> int:
        return len(self.bases)

    @property
    def slot_tokens(self) -> int:
        """Tokens of one block of the store."""
        return self.page_tokens * self.pages_per_slot

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer, all parts."""
        return sum(self.part_bytes(number) for number in range(len(self.parts)))

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in a slot: layer i is at i * layer_bytes."""
        return self.pages_per_slot * self.page_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block of the store: what its namespace must have as block bytes."""
        return self.num_layers * self.layer_bytes

    def heads_outside(self, number: int) -> bool:
        """Whether a slot has heads before tokens in this part."""
        part = self.parts[number]
        both = part.heads > 1 and self.page_tokens > 1
        return both and self.order is SlotOrder.ENGINE and part.heads_first

    @property
    def packing(self) -> str:
        """What of the slot's bytes `Layout` does not say; "" where they are `[layer][K|V][token][head][dim]`.

        It belongs into the namespace of the blocks (`Layout.packing`, or a part of the raw namespace's name): two
        layouts with the same shapes and the same packing have the same bytes for the same KV cache.
        """
        inside = ["head,token" if self.heads_outside(n) else "token,head" for n in range(len(self.parts))]
        sizes = [part.heads * part.head_bytes for part in self.parts]
        by_page = self.order is SlotOrder.ENGINE and self.pages_per_slot > 1
        plain = not by_page or (len(self.parts) == 1 and inside == ["token,head"])
        if plain and len(self.parts) == PARTS_MAX and inside == ["token,head"] * 2 and sizes[0] == sizes[1]:
            return ""
        pages = "" if plain else f"page {self.page_tokens};"
        parts = (f"{order} {part.heads}x{part.head_bytes}" for order, part in zip(inside, self.parts, strict=True))
        return f"paged;{pages}{';'.join(parts)}"

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The engine's memory as (first address, address behind), ascending, from each base to its last page."""
        found: list[tuple[int, int]] = []
        for low, high in sorted(
            (base, base + self.part_reach(number)) for bases in self.bases for number, base in enumerate(bases)
        ):
            if found and low <= found[-1][1]:
                found[-1] = (found[-1][0], max(high, found[-1][1]))
            else:
                found.append((low, high))
        return tuple(found)


def meet(apart: int, mine: list[Dim], my_run: int, theirs: list[Dim], their_run: int) -> bool:
    """Whether two arrays of runs have a byte in common; the second begins `apart` bytes behind the first.

    Dims are nested, largest stride first. Exact where both have the same strides down to the last; from the first
    level where they differ on, arrays count as one run from their first byte to their last.
    """
    if not mine or not theirs or mine[0] != theirs[0]:
        return -reach(theirs, their_run) < apart < reach(mine, my_run)
    (stride, count), (mine, theirs) = mine[0], (mine[1:], theirs[1:])
    # The difference of two indexes along this level that brings the rest together: one of the two around the quotient.
    steps = apart // stride
    return any(
        abs(step) < count and meet(apart - step * stride, mine, my_run, theirs, their_run)
        for step in (steps, steps + 1)
    )
