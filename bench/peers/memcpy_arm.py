"""The reference: `numpy.copyto`, block by block, between private memory and shared memory.

The shared memory has pages of 4 KiB, as the slab has: numpy's own memory may have huge ones.
"""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.peers.arm import BLOCK_BYTES_MAX, DISTINCT, Bytes, Store, private_arena, serve


class Memcpy(Store):
    """Its store is 64 blocks of memory; it names none and finds none."""

    def __init__(self) -> None:
        self.arena = private_arena()
        self._whole = np.frombuffer(mmap.mmap(-1, DISTINCT * BLOCK_BYTES_MAX), np.uint8)
        self._whole[:] = 1

    def facts(self) -> dict[str, str]:
        return {"version": f"numpy {np.__version__}"}

    def batch(self, tag: str, at: int, count: int) -> list[Bytes]:
        size = self.arena.block_bytes
        return [self._whole[i * size : (i + 1) * size] for i in range(at, at + count)]

    def put(self, batch: list[Bytes], sources: Sequence[Bytes]) -> None:
        for place, source in zip(batch, sources, strict=True):
            np.copyto(place, source)

    def get(self, batch: list[Bytes], targets: Sequence[Bytes]) -> None:
        for place, target in zip(batch, targets, strict=True):
            np.copyto(target, place)

    def forget(self, batches: Sequence[Any]) -> None:
        """There is nothing to forget: the next put goes to the same memory."""


if __name__ == "__main__":
    serve(Memcpy)
