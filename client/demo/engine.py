"""The two engine processes of the demo: what an engine's connector does, in its shortest form.

Both build the same model from the same seed, run a short warm-up and open their namespace before
any clock starts, as an engine does at its own start. Then `cold` computes the prompt and stores
its blocks; `hit` finds them by the hash of the same prompt and computes one token.
Each returns its figures as a dict of plain JSON values.
"""

import hashlib
import os
import sys
import time
from typing import Any

import kv_blocks
import torch
from kv_blocks import BLOCK_TOKENS, PROMPT_TOKENS
from transformers import DynamicCache

from kvstore_client import Client

Report = dict[str, Any]

ROUNDS = 3
"""Both processes measure so often, each time from the start: one figure alone says little on a busy machine."""


def say(line: str) -> None:
    """Progress goes to stderr: stdout carries the figures."""
    print(line, file=sys.stderr, flush=True)


def _digest(blocks: kv_blocks.Blocks) -> str:
    return hashlib.blake2b(blocks.tobytes(), digest_size=16).hexdigest()


def _milliseconds(times_s: list[float]) -> str:
    return ", ".join(f"{time_s * 1e3:.0f}" for time_s in times_s) + " ms"


def _ready_model() -> Any:
    torch.set_num_threads(os.cpu_count() or 1)
    model = kv_blocks.build_model()
    kv_blocks.warm_up(model)
    parameters = sum(p.numel() for p in model.parameters())
    say(f"  model ready: {parameters / 1e6:.1f} million parameters, {torch.get_num_threads()} threads")
    return model


def cold(endpoint: str) -> Report:
    """Computes the whole prompt and stores its full blocks."""
    model, prompt = _ready_model(), kv_blocks.build_prompt()
    with Client(endpoint) as client:
        namespace = client.namespace(kv_blocks.layout())
        keys = namespace.keys(prompt[0].tolist())
        found = namespace.match(keys).blocks

        ttfts_s = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            cache = DynamicCache(config=model.config)
            token = kv_blocks.next_token(model, prompt, cache)
            ttfts_s.append(time.perf_counter() - start)
        say(f"  prefill of {PROMPT_TOKENS + 1} tokens: {_milliseconds(ttfts_s)}")

        blocks = kv_blocks.blocks_from_cache(cache, len(keys))
        start = time.perf_counter()
        result = namespace.put(keys, blocks)
        put_s = time.perf_counter() - start
        say(f"  stored {result.stored} blocks, {blocks.nbytes / 2**20:.1f} MiB, in {put_s * 1e3:.1f} ms")
    return {
        "token": token,
        "ttfts_s": ttfts_s,
        "put_s": put_s,
        "found_before": found,
        "blocks": len(keys),
        "stored": result.stored,
        "bytes": blocks.nbytes,
        "digest": _digest(blocks),
    }


def hit(endpoint: str) -> Report:
    """Fetches what is stored of the prompt and computes the rest: one token, if all is there."""
    model, prompt = _ready_model(), kv_blocks.build_prompt()
    ttfts_s, fetches_s = [], []
    with Client(endpoint) as client:
        namespace = client.namespace(kv_blocks.layout())
        for _ in range(ROUNDS):
            start = time.perf_counter()
            keys = namespace.keys(prompt[0].tolist())
            blocks = kv_blocks.empty_blocks(namespace.match(keys).blocks)
            copied = namespace.get_into(keys[: len(blocks)], blocks)
            fetches_s.append(time.perf_counter() - start)
            blocks = blocks[:copied]
            cache = kv_blocks.cache_from_blocks(blocks) if copied else DynamicCache(config=model.config)
            token = kv_blocks.next_token(model, prompt[:, copied * BLOCK_TOKENS :], cache)
            ttfts_s.append(time.perf_counter() - start)
    computed = prompt.shape[1] - copied * BLOCK_TOKENS
    say(f"  {copied} blocks fetched, {computed} token(s) computed: {_milliseconds(ttfts_s)}")
    return {
        "token": token,
        "ttfts_s": ttfts_s,
        "fetches_s": fetches_s,
        "blocks": copied,
        "bytes": blocks.nbytes,
        "digest": _digest(blocks),
    }


ROLES = {"cold": cold, "hit": hit}
