"""An engine's paged KV cache, so that blocks go between it and the store without passing the processor.

    kv = PagedKV(layers, "KBNHD")                                # the engine's tensors, one a layer, or (k, v)
    ns = client.namespace(Layout(..., packing=kv.packing))
    ns.put(keys, kv.blocks(page_ids, stream=stream), start)      # block table of the blocks, `pages_per_slot` ids each
    n = ns.get_into(keys, kv.blocks(page_ids, stream=stream), start)

`put` returns when the blocks are visible to others (or rejected). `get_into` returns when its copies are enqueued on
the stream: what the engine enqueues behind them sees the blocks. Leave tensors and page ids alone meanwhile.

Axes are named as in kvstored_cuda.tensors: B page, K "K and V", N token, H head, D what is contiguous.
"""

import sys
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvstore_client import devices
from kvstore_client.devices import uuid_of
from kvstore_client.paged_blocks import PagedBlocks
from kvstored.v1.errors import InvalidArgument
from kvstored_cuda import Copies, KernelCopies, PagedLayout, SlotOrder, TwinCopies, paged_layout
from kvstored_cuda.devices.device import Device, Stream
from kvstored_cuda.launching import stream_address

COMPILE_S = 120.0
"""For the kernels to be compiled at the first use of all; later processes load them."""

SYNCHRONIZE_S = 30.0

BUS_MULTIPROCESSORS = 16
"""How many multiprocessors copies to and from the host keep busy: a few fill the bus."""

STREAM_PER_THREAD = 2
"""cudaStreamPerThread, driver_types.h of CUDA 13.0: no stream, but a name for that of whichever thread says it."""

__all__ = ["PagedBlocks", "PagedKV", "SlotOrder"]


class PagedKV:
    """One engine's paged KV cache on one device. It keeps the tensors alive. Safe to use from many threads."""

    def __init__(
        self,
        layers: Sequence[Any],
        axes: str,
        *,
        device: str = "",
        order: SlotOrder = SlotOrder.CANONICAL,
        pages_per_slot: int = 1,
        named_by_owner: bool = False,
    ) -> None:
        """`layers`: what the engine has, a tensor each or (k, v). `device`: "gpu:UUID"; "": the one that has them.

        `pages_per_slot`: pages of the engine in a block of the store. `order`: ENGINE copies longer runs, and then
        only engines of this arrangement can read the blocks: `packing` says so. The first of all compiles the kernels.

        `named_by_owner`: the namespaces of the blocks say in words of the caller's what their bytes are, so that
        `packing` is not compared with theirs.

        Raises InvalidArgument (strides that do not fit, memory of another device), NoDevice, FailedPrecondition where
        the kernels cannot be compiled.
        """
        layout = paged_layout(layers, axes, order=order, pages_per_slot=pages_per_slot)
        self.named_by_owner = named_by_owner
        self._begin(layout, device or f"{devices.SCHEME}{devices.of_ordinal(_ordinal_of(layers))}", layers)

    @classmethod
    def of_layout(cls, layout: PagedLayout, device: str, *owners: Any) -> Self:
        """Of addresses; `owners` are kept alive."""
        made = cls.__new__(cls)
        made.named_by_owner = False
        made._begin(layout, device, owners)
        return made

    def _begin(self, layout: PagedLayout, device: str, owners: Any) -> None:
        self.layout = layout
        self.device: Device = devices.find(uuid_of(device))
        self._owners = owners
        ordinal = getattr(self.device, "ordinal", None)
        self.copies: Copies
        """The kernels; on a HostDevice their twins."""
        if ordinal is None:
            self.copies = TwinCopies(layout)
        else:
            self.copies = devices.isolated().run(
                "compiling kernels",
                lambda: KernelCopies(layout, ordinal),
                timeout_s=COMPILE_S,
                owner=self.device.uuid,
            )

    @property
    def packing(self) -> str:
        """What `Layout.packing` of the blocks' namespace has to be."""
        return self.layout.packing

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the store: what its namespace has to have."""
        return self.layout.slot_bytes

    def blocks(self, page_ids: Any, *, stream: Any = None, layers: range | None = None) -> PagedBlocks:
        """Pages for blocks in a row: `pages_per_slot` ids each, flat or `[blocks, pages_per_slot]`.

        `stream`: the engine's (torch's, cupy's, or its address), behind whose work copies run. None: torch's current
        one, where torch is in use; on a HostDevice its default one; else it has to be said. `layers`: copies only
        these (of `get_into`).

        Raises InvalidArgument: an id that is no page, a shape that does not fit, layers out of range, a stream that is
        none or is cudaStreamPerThread.
        """
        table = self._table(page_ids)
        if layers is not None and not (
            isinstance(layers, range) and layers.step == 1 and 0 <= layers.start < layers.stop <= self.layout.num_layers
        ):
            raise InvalidArgument(f"layers={layers!r} is not a range of 1 or more within {self.layout.num_layers}")
        return PagedBlocks(self, table, self._stream(stream), layers)

    def synchronize(self, stream: Any = None, timeout_s: float = SYNCHRONIZE_S) -> None:
        """Waits until all is done that is on a stream (named as in `blocks`): before the processor reads pages.

        Raises DeviceTimeout (a DeadlineExceeded) or DeviceLost.
        """
        self._stream(stream).synchronize(timeout_s)

    def _table(self, page_ids: Any) -> NDArray[np.int64]:
        layout = self.layout
        try:
            ids = np.asarray(page_ids.tolist() if hasattr(page_ids, "tolist") else page_ids)
        except (TypeError, ValueError, RuntimeError) as e:
            raise InvalidArgument(f"page ids are not whole numbers: {e}") from e
        if ids.size and ids.dtype.kind not in "iu":
            raise InvalidArgument(f"page ids are whole numbers, not {ids.dtype}")
        each = layout.pages_per_slot
        if ids.ndim not in (1, 2) or ids.size % each or (ids.ndim == 2 and ids.size and ids.shape[1] != each):
            raise InvalidArgument(f"page ids of shape {ids.shape} are not {each} for each block")
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= layout.num_pages):
            wrong = ids[(ids < 0) | (ids >= layout.num_pages)].flat[0]
            raise InvalidArgument(f"page {wrong} is not one of this engine's, 0 to {layout.num_pages - 1}")
        return ids.astype(np.int64).reshape(-1, each)

    def _stream(self, stream: Any) -> Stream:
        if stream is None:
            stream = self._usual_stream()
        address = stream_address(stream)
        if address == STREAM_PER_THREAD:
            raise InvalidArgument(
                "cudaStreamPerThread is another stream on each thread, and copies are looked after by several; pass a "
                "stream of your own"
            )
        return self.device.wrap_stream(address)

    def _usual_stream(self) -> Any:
        ordinal, torch = getattr(self.device, "ordinal", None), sys.modules.get("torch")
        if ordinal is None:
            return 0
        if torch is None or not torch.cuda.is_initialized():
            raise InvalidArgument("say which stream the engine's copies run on: stream=")
        return torch.cuda.current_stream(ordinal)


def _ordinal_of(layers: Sequence[Any]) -> int:
    """Of the GPU that has a tensor of torch or cupy."""
    first = layers[0] if layers else None
    first = first[0] if isinstance(first, list | tuple) and first else first
    device = getattr(first, "device", None)
    number = getattr(device, "index", getattr(device, "id", None))
    if callable(number) or not isinstance(number, int):
        raise InvalidArgument(f"a {type(first).__name__} says no GPU that has it; pass device='gpu:UUID'")
    return number
