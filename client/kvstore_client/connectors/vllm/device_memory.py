"""One cache group of this rank on a GPU: its blocks go between the engine and the store on streams of our own.

A load or save begins behind what the engine had enqueued when it was ordered (`Mark`), and its thread is done when its
copies are: an engine that is told so may use the blocks, or give them to somebody else, on any stream.
"""

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from kvstore_client import Hint, Namespace, PutResult
from kvstore_client.devices import SCHEME, of_ordinal
from kvstore_client.errors import InvalidArgument
from kvstore_client.paged import PagedKV
from kvstored_cuda.devices.discovery import VARIABLE, devices
from kvstored_cuda.devices.errors import DeviceTimeout

log = logging.getLogger("kvstore_client")

WAIT_S = 10.0
"""Copies that take longer are told of in the log, and waited for all the same: they write to the engine's blocks."""


def on_device(vllm_config: Any) -> bool:
    """Whether this engine's KV cache is a device's."""
    return bool(vllm_config.device_config.device_type != "cpu" or os.environ.get(VARIABLE))


Mark = Any
"""An event of torch's behind what the engine has enqueued; None where nothing is enqueued, on the host."""


def device_of(tensor: torch.Tensor) -> str:
    """ "gpu:UUID" of what has it; "" for this machine's memory. Raises InvalidArgument for a device of another kind.

    Where KVSTORED_HOST_DEVICES names a device, this machine's memory counts as its: to try this without a GPU.
    """
    if tensor.device.type == "cuda":
        return f"{SCHEME}{of_ordinal(tensor.device.index or 0)}"
    if tensor.device.type != "cpu":
        raise InvalidArgument(
            f"the KV cache is on {tensor.device}; kvstored copies memory of NVIDIA GPUs and of the host"
        )
    return f"{SCHEME}{devices().found[0].uuid}" if os.environ.get(VARIABLE) else ""


def mark() -> Mark:
    """Of the engine's thread: what is enqueued on its stream now."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class DeviceMemory:
    """As GroupMemory, for memory that this thread cannot touch."""

    def __init__(self, rows: list[torch.Tensor], names: Sequence[str], device: str) -> None:
        """`rows`: `[blocks, bytes]` each, uint8, of one size; `names`: the layer of each. Raises InvalidArgument."""
        self.rows_until = {name: i + 1 for i, name in enumerate(names)}
        sizes = {row.shape[1] for row in rows}
        if len(sizes) > 1:
            raise InvalidArgument(f"layers of one cache group have blocks of {sorted(sizes)} bytes on a GPU")
        self.block_bytes = sum(row.shape[1] for row in rows)
        whole = all(not (row.shape[1] % 4 or row.stride(0) % 4 or row.data_ptr() % 4) for row in rows)
        words = [row.view(torch.int32) if whole else row for row in rows]
        self._kv = PagedKV([row.unsqueeze(1) for row in words], "BND", device=device, named_by_owner=True)
        self._on = rows[0].device
        self._streams = threading.local()

    def load(
        self, namespace: Namespace, keys: Sequence[bytes], blocks: Sequence[int], after: Mark, timeout_s: float
    ) -> int:
        """Brings leading blocks; answers how many, when they are there."""
        stream = self._stream(after)
        try:
            return namespace.get_into(keys, self._kv.blocks(list(blocks), stream=stream))
        finally:
            self._wait(stream)

    def store(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, blocks: Sequence[int], after: Mark, hint: Hint
    ) -> PutResult:
        """Stores blocks as keys[start:]; they have been read when it returns."""
        stream = self._stream(after)
        try:
            return namespace.put(keys, self._kv.blocks(list(blocks), stream=stream), start, hint=hint)
        finally:
            self._wait(stream)

    def _stream(self, after: Mark) -> Any:
        """This thread's, behind a mark."""
        if self._on.type != "cuda":
            return 0
        if not hasattr(self._streams, "own"):
            self._streams.own = torch.cuda.Stream(self._on)
        if after is not None:
            self._streams.own.wait_event(after)
        return self._streams.own

    def _wait(self, stream: Any) -> None:
        """Until all is done that is on a stream of ours. Raises DeviceLost; the engine is lost, too, then."""
        wrapped = self._kv.device.wrap_stream(getattr(stream, "cuda_stream", stream))
        while True:
            try:
                return wrapped.synchronize(WAIT_S)
            except DeviceTimeout:
                log.warning("copies on %s have taken over %.0f s; still waiting", self._on, WAIT_S)
