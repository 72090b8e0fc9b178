"""Which pages go to, or come from, which slots: one call's worth, checked on the host before anything moves.

A Batch that exists is safe to copy as far as numbers can say it: every page is one of the engine's, nothing that is
written is written twice, no slot lies in the engine's memory. That an address is really mapped, on this device, is
the caller's to know.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstored.v1.errors import InvalidArgument
from kvstored_cuda.layouts import ADDRESS_MAX, PagedLayout

SLOTS_MAX = 1 << 16
"""Of one batch: 64 GiB of blocks of 1 MiB."""

Numbers = Sequence[int] | npt.NDArray[Any]


class Way(StrEnum):
    """Which way the bytes go."""

    GATHER = "gather"
    """From the engine's pages into slots."""
    SCATTER = "scatter"
    """From slots into the engine's pages."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Made by `check_batch` only."""

    layout: PagedLayout
    way: Way
    pages: npt.NDArray[np.int64]
    """`[slots, pages_per_slot]`."""
    slots: npt.NDArray[np.int64]
    """Addresses."""
    first_layer: int
    num_layers: int

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def copied_bytes(self) -> int:
        """How many bytes it moves."""
        return len(self.slots) * self.num_layers * self.layout.layer_bytes


class Copies(ABC):
    """The copies between one engine's paged KV cache and slots; how they are made is the kernels' or their twin's."""

    def __init__(self, layout: PagedLayout) -> None:
        self.layout = layout

    def gather(
        self,
        pages: Numbers,
        slots: Numbers,
        *,
        slot_bytes: int,
        layers: range | None = None,
        stream: Any = None,
        multiprocessors: int | None = None,
    ) -> int:
        """Queues copies from the engine's pages into slots; answers how many launches that were.

        `pages`: page ids, `pages_per_slot` for each slot. `slots`: the address of each, always of its layer 0.
        `slot_bytes`: the block size of the namespace. `layers`: only these. `stream`: torch's, cupy's, or its address;
        the twin does without. `multiprocessors`: of the device, how many may be kept busy; a few fill the bus to the
        host.

        Raises InvalidArgument, with nothing queued: a page out of range, slots that overlap, sizes that do not fit
        (all of it in `check_batch`). DeviceLost and its like where CUDA refuses the launch; earlier launches of the
        call may run then.
        """
        batch = check_batch(self.layout, Way.GATHER, pages, slots, slot_bytes=slot_bytes, layers=layers)
        return self._queue(batch, stream, multiprocessors)

    def scatter(
        self,
        pages: Numbers,
        slots: Numbers,
        *,
        slot_bytes: int,
        layers: range | None = None,
        stream: Any = None,
        multiprocessors: int | None = None,
    ) -> int:
        """Queues copies from slots into the engine's pages; arguments and errors as for `gather`.

        A page named twice is refused: which slot it had in the end would be chance.
        """
        batch = check_batch(self.layout, Way.SCATTER, pages, slots, slot_bytes=slot_bytes, layers=layers)
        return self._queue(batch, stream, multiprocessors)

    @abstractmethod
    def _queue(self, batch: Batch, stream: Any, multiprocessors: int | None) -> int:
        """What was checked; answers how many launches it was."""


def check_batch(
    layout: PagedLayout,
    way: Way,
    pages: Numbers,
    slots: Numbers,
    *,
    slot_bytes: int,
    layers: range | None = None,
) -> Batch:
    """A batch that may be copied; raises InvalidArgument, with nothing written, where it may not.

    `pages`: the block table, page ids of the first slot, then of the second, `pages_per_slot` each (flat, or
    `[slots, pages_per_slot]`). `slots`: the address of each slot, always of its layer 0, also where only some
    `layers` are copied. `slot_bytes`: what the store has as the size of these blocks.

    A page may be read, and a slot may be read, any number of times; what is written is written once.
    """
    if not isinstance(way, Way):
        raise InvalidArgument(f"way={way!r} is not one of {', '.join(map(repr, Way))}")
    if isinstance(slot_bytes, bool) or slot_bytes != layout.slot_bytes:
        raise InvalidArgument(
            f"a slot of {slot_bytes!r} bytes is not one of this layout, which has {layout.slot_bytes}"
        )
    table = _numbers("pages", pages, dims=(1, 2))
    places = _numbers("slots", slots, dims=(1,))
    if len(places) > SLOTS_MAX:
        raise InvalidArgument(f"{len(places)} slots are over {SLOTS_MAX}, the limit of one batch")
    want = (len(places), layout.pages_per_slot)
    if table.size != want[0] * want[1] or (table.ndim == 2 and table.shape != want):
        raise InvalidArgument(f"pages of shape {table.shape} are not {want[1]} for each of {want[0]} slots")
    wrong = (table < 0) | (table >= layout.num_pages)
    if wrong.any():
        raise InvalidArgument(f"page {table[wrong][0]} is not one of this engine's, 0 to {layout.num_pages - 1}")
    table = table.reshape(want)
    _check_places(layout, places)
    if way is Way.GATHER:
        ordered = np.sort(places)
        if (np.diff(ordered) < layout.slot_bytes).any():
            raise InvalidArgument("two slots to be written overlap")
    else:
        ordered = np.sort(table, axis=None)
        twice = ordered[1:][np.diff(ordered) == 0]
        if twice.size:
            raise InvalidArgument(f"page {twice[0]} is to be written twice")
    first, count = _layers(layout, layers)
    return Batch(layout, way, table, places, first, count)


def _numbers(name: str, given: Numbers, dims: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """As a new array of int64, which the caller cannot change any more."""
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, OverflowError) as e:
        raise InvalidArgument(f"{name} are not whole numbers in the memory of this host: {e}") from e
    if not array.size:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or array.ndim not in dims:
        raise InvalidArgument(f"{name} are not a list of whole numbers, but {array.dtype} of shape {array.shape}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > ADDRESS_MAX:
        raise InvalidArgument(f"{name}: {int(array.max()):#x} is over {ADDRESS_MAX:#x}")
    return array.astype(np.int64, order="C", copy=True)


def _check_places(layout: PagedLayout, places: npt.NDArray[np.int64]) -> None:
    if not len(places):
        return
    if int(places.min()) <= 0 or int(places.max()) > ADDRESS_MAX - layout.slot_bytes:
        raise InvalidArgument("the address of a slot is 0, below it, or too large")
    if (places % layout.element_bytes).any():
        raise InvalidArgument(f"the address of a slot is not aligned to elements of {layout.element_bytes} bytes")
    lows = np.array([low for low, _ in layout.spans], dtype=np.int64)
    highs = np.array([high for _, high in layout.spans], dtype=np.int64)
    before = np.searchsorted(lows, places + layout.slot_bytes, side="left") - 1
    if (highs[np.maximum(before, 0)][before >= 0] > places[before >= 0]).any():
        raise InvalidArgument("a slot lies in the engine's own memory")


def _layers(layout: PagedLayout, layers: range | None) -> tuple[int, int]:
    if layers is None:
        return 0, layout.num_layers
    if not isinstance(layers, range) or layers.step != 1 or not 0 <= layers.start < layers.stop <= layout.num_layers:
        raise InvalidArgument(f"layers={layers!r} is not a range of 1 or more within {layout.num_layers} layers")
    return layers.start, len(layers)
