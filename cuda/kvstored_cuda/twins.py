"""The copies of paged.cu on the CPU, by numpy: the oracle of its tests, and what a machine without a GPU uses.

Written from the words in layouts.py, not from the kernels: views with the engine's strides, picked by page, and laid
into views of a slot. It reads nothing of plans.py. Addresses are of this process's memory.
"""

import ctypes
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstored_cuda.batches import Batch, Copies, Way
from kvstored_cuda.layouts import PagedLayout, SlotOrder

Bytes = npt.NDArray[np.uint8]


def memory_at(address: int, length: int) -> Bytes:
    """This process's memory as bytes that may be written."""
    return np.frombuffer(memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B"), dtype=np.uint8)


def engine_view(layout: PagedLayout, layer: int, number: int) -> Bytes:
    """One part of one layer as `[page][token][head][byte]`, heads and tokens the other way where a slot has it so."""
    part = layout.parts[number]
    whole = memory_at(layout.bases[layer][number], layout.part_reach(number))
    counts = (layout.num_pages, layout.page_tokens, part.heads, part.head_bytes)
    strides = (part.page_stride, part.token_stride, part.head_stride, 1)
    used = tuple(stride if count > 1 else 0 for stride, count in zip(strides, counts, strict=True))
    view = np.ndarray(counts, np.uint8, whole, 0, used)
    heads_first = layout.order is SlotOrder.ENGINE and used[2] > used[1] > 0
    return view.swapaxes(1, 2) if heads_first else view


def slot_view(layout: PagedLayout, slot: Bytes, layer: int, number: int, shape: tuple[int, ...]) -> Bytes:
    """Where this part of this layer is in a slot, as a view `[page of the slot, *shape]`."""
    own: Bytes = slot.reshape(layout.num_layers, -1)[layer]
    sizes = [layout.part_bytes(n) for n in range(len(layout.parts))]
    before, pages = sum(sizes[:number]), layout.pages_per_slot
    if layout.order is SlotOrder.CANONICAL:
        own = own[before * pages : (before + sizes[number]) * pages]
        return np.reshape(own, (pages, *shape))
    inside = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return np.ndarray((pages, *shape), np.uint8, own, before, (sum(sizes), *inside))


def copy(batch: Batch) -> None:
    """Does what the batch says, now."""
    layout = batch.layout
    slots = [memory_at(int(address), layout.slot_bytes) for address in batch.slots]
    for layer in range(batch.first_layer, batch.first_layer + batch.num_layers):
        for number in range(len(layout.parts)):
            engine = engine_view(layout, layer, number)
            for slot, pages in zip(slots, batch.pages, strict=True):
                place = slot_view(layout, slot, layer, number, engine.shape[1:])
                if batch.way is Way.GATHER:
                    place[:] = engine[pages]
                else:
                    engine[pages] = place


class TwinCopies(Copies):
    """As KernelCopies, for an engine whose memory is this process's own (a HostDevice's, or an engine on the CPU).

    Where the stream takes jobs (`enqueue`, a HostDevice's), a copy is one; else it is done on return. Answers 1 launch,
    or 0 for no slots. `multiprocessors` means nothing here.
    """

    def _queue(self, batch: Batch, stream: Any, multiprocessors: int | None) -> int:
        if not len(batch):
            return 0
        enqueue = getattr(stream, "enqueue", None)
        if enqueue is None:
            copy(batch)
        else:
            enqueue(partial(copy, batch))
        return 1
