"""Mooncake Store: mooncake_arm.py local|shared|remote|owner MASTER [CLIENT].

    local   the segment is in this very process
    shared  a `mooncake_client` process has it, reached by its RPC and shared memory
    remote  another process has it, reached over TCP
    owner   that other process: holds a segment until it is ended

The zero-copy calls are used, from and to registered memory. Segments are written once from
end to end beforehand: a first touch costs four to six times a put.
"""

import contextlib
import ctypes
import importlib
import importlib.metadata
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.peers.arm import BLOCK_BYTES_MAX, DISTINCT, Arena, Bytes, Store, serve

SEGMENT_BYTES = 640 << 20
BUFFER_BYTES = 320 << 20
"""Of a client: the arena is in it where memory is shared, staging elsewhere."""

ARENA_BYTES = 2 * DISTINCT * BLOCK_BYTES_MAX

Batch = tuple[list[str], list[int], list[int], list[int]]
"""Keys, where each block is copied from, where to, and its size."""


class Mooncake(Store):
    """One client."""

    def __init__(self, mode: str, master: str, client: str = "") -> None:
        store: Any = importlib.import_module("mooncake.store")
        self._store = store.MooncakeDistributedStore()
        if mode == "shared":
            rc = self._store.setup_dummy(SEGMENT_BYTES, BUFFER_BYTES, client)
        else:
            segment = 0 if mode == "remote" else SEGMENT_BYTES
            rc = self._store.setup("127.0.0.1", "P2PHANDSHAKE", segment, BUFFER_BYTES, "tcp", "", master)
        assert rc == 0, f"set-up failed: {rc}"
        if mode == "owner":
            return
        self.arena, self._base = self._shared_arena() if mode == "shared" else self._registered_arena()
        assert self._store.register_buffer(self._base, ARENA_BYTES) == 0, "the arena cannot be registered"
        self._warm()

    def _shared_arena(self) -> tuple[Arena, int]:
        base = self._store.alloc_from_mem_pool(ARENA_BYTES)
        assert base, "no memory in the pool"
        whole = np.ctypeslib.as_array((ctypes.c_uint8 * ARENA_BYTES).from_address(base))
        return Arena(whole[: ARENA_BYTES // 2], whole[ARENA_BYTES // 2 :]), base

    def _registered_arena(self) -> tuple[Arena, int]:
        self._whole = np.empty(ARENA_BYTES, np.uint8)
        return Arena(self._whole[: ARENA_BYTES // 2], self._whole[ARENA_BYTES // 2 :]), self._whole.ctypes.data

    def _warm(self) -> None:
        for i in range(SEGMENT_BYTES * 8 // 10 // BLOCK_BYTES_MAX):
            rc = self._store.put_from(f"warm {i}", self._base + i % DISTINCT * BLOCK_BYTES_MAX, BLOCK_BYTES_MAX)
            assert rc == 0, f"put {i} of the whole segment failed: {rc}"
        self.forget([])

    def facts(self) -> dict[str, str]:
        return {"version": f"mooncake {importlib.metadata.version('mooncake-transfer-engine-non-cuda')}"}

    def batch(self, tag: str, at: int, count: int) -> Batch:
        size = self.arena.block_bytes
        offsets = [i % DISTINCT * size for i in range(at, at + count)]
        return (
            [f"{size} {tag} {i}" for i in range(at, at + count)],
            [self._base + offset for offset in offsets],
            [self._base + ARENA_BYTES // 2 + offset for offset in offsets],
            [size] * count,
        )

    def put(self, batch: Batch, sources: Sequence[Bytes]) -> None:
        keys, places, _, sizes = batch
        if len(keys) == 1:
            rcs = [self._store.put_from(keys[0], places[0], sizes[0])]
        else:
            rcs = self._store.batch_put_from(keys, places, sizes)
        assert not any(rcs), f"not stored: {rcs}"

    def get(self, batch: Batch, targets: Sequence[Bytes]) -> None:
        keys, _, places, sizes = batch
        if len(keys) == 1:
            got = [self._store.get_into(keys[0], places[0], sizes[0])]
        else:
            got = self._store.batch_get_into(keys, places, sizes)
        assert got == sizes, f"not found: {got}"

    def lookup(self, batch: Batch) -> int:
        found: list[int] = self._store.batch_is_exist(batch[0])
        return found.count(1)

    def forget(self, batches: Sequence[Any]) -> None:
        self._store.remove_all()

    def close(self) -> None:
        self._store.close()


if __name__ == "__main__":
    if sys.argv[1] == "owner":
        owner = Mooncake(*sys.argv[1:])
        print("owner ready", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
        owner.close()
    else:
        serve(lambda: Mooncake(*sys.argv[1:]))
