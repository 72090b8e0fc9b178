"""The engine's memory as rows of blocks, and the copies between it and the store's.

A block in the store is `[layer][bytes of that layer's block]`. A copy of many blocks is one call into torch,
which lets go of the interpreter for all of it: a call a block would queue for it anew each time, behind
an engine that is busy in Python.
"""

import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from kvstore_client import Hint, Namespace, PutResult
from kvstore_client.connectors.vllm.device_memory import DeviceMemory, Mark, device_of
from kvstore_client.errors import InvalidArgument

WORD, WORD_BYTES = torch.int64, 8


class GroupMemory:
    """One cache group of this rank: for each part of each layer a row a block."""

    def __init__(self, rows: list[torch.Tensor], names: Sequence[str]) -> None:
        """`rows`: `[blocks, bytes]` each, uint8, contiguous within a row; `names`: the layer of each."""
        self.rows_until = {name: i + 1 for i, name in enumerate(names)}
        """For each layer how many rows must be there for it."""
        sizes = [row.shape[1] for row in rows]
        self.block_bytes = sum(sizes)
        aligned = all(
            not (row.shape[1] % WORD_BYTES or row.stride(0) % WORD_BYTES or row.data_ptr() % WORD_BYTES) for row in rows
        )
        self._dtype = WORD if aligned else torch.uint8
        self._rows = [row.view(self._dtype) for row in rows]
        self._sizes = [row.shape[1] for row in self._rows]

    def load(
        self, namespace: Namespace, keys: Sequence[bytes], blocks: Sequence[int], after: Mark, timeout_s: float
    ) -> int:
        """Brings leading blocks; answers how many. Raises ResourceExhausted where so many cannot be held at once."""
        with namespace.acquire(keys, timeout_s=timeout_s) as lease:
            if len(lease):
                self.fill(blocks[: len(lease)], lease.views)
            return len(lease)

    def store(
        self, namespace: Namespace, keys: Sequence[bytes], start: int, blocks: Sequence[int], after: Mark, hint: Hint
    ) -> PutResult:
        """Stores blocks as keys[start:]. Raises ResourceExhausted where there is no room for so many at once."""
        with namespace.reserve(len(blocks)) as slots:
            self.drain(blocks, slots.views)
            return slots.commit(keys, start=start, hint=hint)

    def fill(self, blocks: Sequence[int], views: Sequence[memoryview]) -> None:
        """From the store: views[i] goes to the engine's block blocks[i]."""
        mine, theirs = self._pieces(blocks, views)
        with torch.inference_mode():
            torch._foreach_copy_(mine, theirs)

    def fill_by_rows(self, blocks: Sequence[int], views: Sequence[memoryview], begun: Callable[[int], None]) -> None:
        """As `fill`, a row of all blocks after the other; `begun(n)` is told that the first n rows are there."""
        mine, theirs = self._pieces(blocks, views)
        count = len(self._rows)
        for row in range(count):
            with torch.inference_mode():
                torch._foreach_copy_(mine[row::count], theirs[row::count])
            begun(row + 1)

    def drain(self, blocks: Sequence[int], views: Sequence[memoryview]) -> None:
        """To the store: the engine's block blocks[i] goes to views[i]."""
        mine, theirs = self._pieces(blocks, views)
        with torch.inference_mode():
            torch._foreach_copy_(theirs, mine)

    def _pieces(
        self, blocks: Sequence[int], views: Sequence[memoryview]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        assert len(blocks) == len(views), "a view a block"
        rows, sizes, dtype = self._rows, self._sizes, self._dtype
        mine = [row[block] for block in blocks for row in rows]
        theirs = chain.from_iterable(torch.frombuffer(view, dtype=dtype).split(sizes) for view in views)
        return mine, list(theirs)


def memory_of(rows: list[torch.Tensor], names: Sequence[str]) -> GroupMemory | DeviceMemory:
    """By where it is. Raises InvalidArgument where its copies cannot be made, and what is missing for them."""
    device = device_of(rows[0])
    return DeviceMemory(rows, names, device) if device else GroupMemory(rows, names)


def rows_of(name: str, part: Any, num_blocks: int) -> torch.Tensor:
    """One tensor of a layer as `[blocks, bytes]`. Raises InvalidArgument where a block is not one run of memory."""
    tensor: torch.Tensor = part.detach()
    split, rest = divmod(tensor.shape[0], num_blocks)
    if rest or not split:
        raise InvalidArgument(f"the KV cache of {name} has shape {tuple(tensor.shape)}, not {num_blocks} blocks first")
    items = tensor[0].numel()
    if not tensor[0].is_contiguous() or (split > 1 and tensor.stride(0) != items):
        raise InvalidArgument(f"a block in the KV cache of {name} is not one run of memory: strides {tensor.stride()}")
    rows = tensor.as_strided((num_blocks, split * items), (split * tensor.stride(0), 1))
    return rows.view(torch.uint8)


def expect_read_only_views() -> None:
    """Has torch say now, to nobody, what it says once a process: that it knows no read-only tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(memoryview(bytes(1)), dtype=torch.uint8)
