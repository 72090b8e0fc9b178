"""The time to the first token of a decoder of 1.2 billion parameters, computed and fetched: pool, slab, SSD."""

import tempfile
import time
from collections.abc import Iterator
from typing import Any

from bench.gpu.decoder import PAGE_TOKENS, SMALL, Decoder, Shape
from bench.gpu.rig import WAIT_S, Rig
from bench.gpu.store import TIMEOUT_S, node
from bench.measure import Row
from kvstore_client import Client, Layout, Namespace
from kvstore_client.paged import PagedKV
from kvstored.v1 import kvstore_pb2 as pb

LENGTHS, QUICK_LENGTHS = (8192, 32768), (1024,)
REST = 16
"""Tokens behind the prefix, which are computed in any case."""

ROUNDS = 3
EVICT_S = 30.0


def rows(rig: Rig, quick: bool) -> Iterator[Row]:
    import torch

    shape, lengths = (SMALL, QUICK_LENGTHS) if quick else (Shape(), LENGTHS)
    where = f"cuda:{torch.cuda.current_device()}" if rig.real else "cpu"
    decoder = Decoder(shape, where, torch.bfloat16)
    with (
        tempfile.TemporaryDirectory(prefix="kvstored-gpu-check-", dir="/var/tmp") as ssd,
        node(quick, ssd) as daemon,
        Client(daemon.endpoint, name="model", timeout_s=TIMEOUT_S) as client,
    ):
        for length in lengths:
            yield from Prompt(rig, decoder, client, length).rows(1 if quick else ROUNDS)


class Prompt:
    """One length: a prefix in the store, and a few tokens behind it."""

    def __init__(self, rig: Rig, decoder: Decoder, client: Client, length: int) -> None:
        import torch

        self._rig, self._decoder, self._client, self._length = rig, decoder, client, length
        random = torch.Generator(device=decoder.device).manual_seed(length)
        blocks = length // PAGE_TOKENS
        self._ids = torch.randint(
            0, decoder.shape.vocabulary, (length + REST,), generator=random, device=decoder.device
        )
        self._cache = decoder.cache(blocks + 2)
        self._pages = torch.randperm(blocks + 1, generator=random, device=decoder.device) + 1
        self._kv = PagedKV(self._cache, "BKNHD", device=f"gpu:{rig.uuid}")
        self._ns: Namespace = client.namespace(
            Layout(
                model="random-1b",
                dtype="bfloat16",
                num_layers=decoder.shape.layers,
                num_kv_heads=decoder.shape.kv_heads,
                head_dim=decoder.shape.head_dim,
                block_tokens=PAGE_TOKENS,
                packing=self._kv.packing,
            )
        )
        self._keys = self._ns.keys(self._ids[:length])

    def _blocks(self) -> Any:
        stream = None if self._rig.real else self._rig.stream
        return self._kv.blocks(self._pages[: len(self._keys)].tolist(), stream=stream)

    def _wait(self) -> None:
        import torch

        if self._rig.real:
            torch.cuda.synchronize()
        else:
            self._rig.stream.synchronize(WAIT_S)

    def rows(self, rounds: int) -> Iterator[Row]:
        cold_s, cold = self._best(self._cold, rounds)
        before = [layer.clone() for layer in self._cache]
        result = self._ns.put(self._keys, self._blocks(), durable=True)
        assert result.stored == len(self._keys), f"{result} of {len(self._keys)} blocks"
        for tier, leave in (("pool", None), ("slab", pb.TIER_GPU), ("SSD", pb.TIER_HOST)):
            hit_s, hit = self._best(self._hit, rounds, leave)
            pages = self._pages[: len(self._keys)]
            for layer, old in zip(self._cache, before, strict=True):
                assert (layer[pages] == old[pages]).all(), f"other bytes came from the {tier}"
            assert int(hit.argmax()) == int(cold.argmax()), f"another token with what came from the {tier}"
            yield Row(
                f"first token, {self._length} tokens from the {tier}",
                cold_s / hit_s,
                None,
                True,
                "x",
                f"{hit_s * 1e3:.1f} ms",
                f"computed, {cold_s * 1e3:.1f} ms",
            )

    def _best(self, work: Any, rounds: int, leave: int | None = None) -> tuple[float, Any]:
        """The median of some rounds behind one that warms up; before each, blocks leave the tiers above."""
        seconds, found = [], None
        for number in range(rounds + 1):
            if leave is not None:
                self._evict(leave)
            self._wait()
            began = time.perf_counter()
            found = work()
            self._wait()
            if number:
                seconds.append(time.perf_counter() - began)
        return sorted(seconds)[len(seconds) // 2], found

    def _cold(self) -> Any:
        return self._decoder.first_token(self._ids, self._cache, self._pages, 0)

    def _hit(self) -> Any:
        for layer in self._cache:
            layer[self._pages[0]] = 0  # what comes must come from the store
        got = self._ns.get_into(self._keys, self._blocks())
        assert got == len(self._keys), f"{got} of {len(self._keys)} blocks came"
        return self._decoder.first_token(self._ids, self._cache, self._pages, self._length)

    def _evict(self, tier: int) -> None:
        """From that tier and those above it."""
        for one in (pb.TIER_GPU, pb.TIER_HOST)[: 1 if tier == pb.TIER_GPU else 2]:
            request = pb.EvictRequest(keys=pb.EvictKeys(keys=self._keys), tier=one)
            until = time.monotonic() + EVICT_S
            while self._client._transport.administer("Evict", request, TIMEOUT_S).held and time.monotonic() < until:
                self._wait()
