"""`lmcache server` by its own client context: lmcache_arm.py URL_256KIB URL_2MIB.

One copy for each chunk, straight between the arena and the server's shared memory, which
was mapped and touched beforehand. A chunk is 256 tokens. The lookup that a retrieve needs
first, the release of its locks and the end of the request are outside the time that counts.
"""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.peers.arm import Bytes, Store, private_arena, serve

CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
ANSWER_S = 30.0
LAYERS, HEAD_DIM = 2, 128
HEADS = {256 << 10: 1, 2 << 20: 8}
"""KV heads that make a chunk of 256 tokens as large as the block: two layers, K and V, bfloat16."""

CLIENT = "lmcache.cli.commands.bench.server_bench"


@dataclass
class Batch:
    """One sequence of tokens, one request."""

    request: str
    lookup: Any
    transfer: Any
    chunks: int


class Lmcache(Store):
    """A client for each size of chunk: a server knows one."""

    def __init__(self, urls: dict[int, str]) -> None:
        self._make_key = importlib.import_module(f"{CLIENT}.helpers")._make_key
        self._clients = {size: self._connected(url, HEADS[size]) for size, url in urls.items()}
        self._uint8 = importlib.import_module("torch").uint8
        self._requests = 0
        self.arena = private_arena()
        self.open(2 << 20)

    def _connected(self, url: str, heads: int) -> Any:
        config = importlib.import_module(f"{CLIENT}.config").BenchConfig(
            rpc_url=url,
            http_url="",
            mode="cpu",
            transfer_mode="engine_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=CHUNK_TOKENS,
            kvcache_shape_spec=f"(2,64,{BLOCK_TOKENS},{heads},{HEAD_DIM}):bfloat16:{LAYERS}",
            num_blocks=64,
            block_size=BLOCK_TOKENS,
        )
        client = importlib.import_module(f"{CLIENT}.client").ServerBenchClient(config, lambda _: None)
        client.start()
        # The whole mapping is touched once, by one who wants no first touches in the figures.
        mapped = np.frombuffer(client._workers[0].transfer_context.engine_driven_context._shm_buffer, np.uint8)
        int(mapped[::4096].sum())
        return client

    def open(self, block_bytes: int) -> None:
        """Lookups are of chunks of 256 KiB here: a chunk of 256 tokens has no size of its choice."""
        super().open(block_bytes if block_bytes in self._clients else 256 << 10)
        client = self._clients[self.arena.block_bytes]
        worker = client._workers[0]
        self._rpc = client._req_client
        self._context = worker.transfer_context.engine_driven_context
        self._instance = worker.spec.instance_id

    def facts(self) -> dict[str, str]:
        return {"version": f"lmcache {importlib.metadata.version('lmcache')}"}

    def batch(self, tag: str, at: int, count: int) -> Batch:
        seed = [self.arena.block_bytes, at, *tag.encode()]
        tokens = np.random.default_rng(seed).integers(10, 128_000, count * CHUNK_TOKENS).tolist()
        self._requests += 1
        request = f"request {self._requests}"
        lookup, transfer = (
            self._make_key(tuple(tokens), request, 0, len(tokens), worker_id=worker, world_size=1)
            for worker in (None, 0)
        )
        return Batch(request, lookup, transfer, count)

    def put(self, batch: Batch, sources: Sequence[Bytes]) -> None:
        places, _ = self._context.prepare_store(batch.transfer, self._instance)
        assert len(places) == batch.chunks, f"room for {len(places)} of {batch.chunks} chunks"
        for place, source in zip(places, sources, strict=True):
            np.copyto(place.view(self._uint8).numpy().reshape(-1), source)
        assert self._context.commit_store(batch.transfer, self._instance, places)

    def ready(self, batch: Batch) -> None:
        assert self._found(batch) == batch.chunks

    def get(self, batch: Batch, targets: Sequence[Bytes]) -> None:
        places = self._context.prepare_retrieve(batch.transfer, self._instance)
        for place, target in zip(places, targets, strict=True):
            np.copyto(target, place.view(self._uint8).numpy().reshape(-1))
        assert self._context.commit_retrieve(batch.transfer, self._instance)

    def lookup(self, batch: Batch) -> int:
        return self._found(batch)

    def looked_up(self, batch: Batch) -> None:
        self._rpc.free_lookup_locks(batch.lookup, 1).result(timeout=ANSWER_S)

    def _found(self, batch: Batch) -> int:
        self._rpc.lookup(batch.lookup, 1).result(timeout=ANSWER_S)
        found: int = self._rpc.wait_prefetch_status(batch.request, ANSWER_S).result(timeout=ANSWER_S)
        return found

    def done(self, batch: Batch) -> None:
        self._rpc.end_session(batch.request).result(timeout=ANSWER_S)

    def forget(self, batches: Sequence[Any]) -> None:
        self._rpc.clear(True).result(timeout=ANSWER_S)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


if __name__ == "__main__":
    os.environ.update(LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="WARNING", DO_NOT_TRACK="1")
    serve(lambda: Lmcache({256 << 10: sys.argv[1], 2 << 20: sys.argv[2]}))
