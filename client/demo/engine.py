"""The two engine processes of the demo: transformers with kvstored beside it.

Both build the same model from the same seed, run a short warm-up and open their prefix cache before
any clock starts, as an engine does at its own start. Then `cold` computes the prompt and saves
its cache; `hit` loads it by the tokens of the same prompt and computes one token.
Each returns its figures as a dict of plain JSON values.
"""

import hashlib
import os
import sys
import time
from typing import Any

import torch
from model import BLOCK_TOKENS, PROMPT_TOKENS, build_model, build_prompt, next_token, warm_up
from transformers import DynamicCache

from kvstore_client import Client
from kvstore_client.connectors.transformers import PrefixCache

Report = dict[str, Any]

ROUNDS = 3
"""Both processes measure so often, each time from the start: one figure alone says little on a busy machine."""


def say(line: str) -> None:
    """Progress goes to stderr: stdout carries the figures."""
    print(line, file=sys.stderr, flush=True)


def _digest(cache: DynamicCache, tokens: int) -> str:
    """Of the keys and values of the first tokens, in all layers."""
    digest = hashlib.blake2b(digest_size=16)
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            digest.update(states[:, :, :tokens].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _milliseconds(times_s: list[float]) -> str:
    return ", ".join(f"{time_s * 1e3:.0f}" for time_s in times_s) + " ms"


def _ready_model() -> Any:
    torch.set_num_threads(os.cpu_count() or 1)
    model = build_model()
    warm_up(model)
    parameters = sum(p.numel() for p in model.parameters())
    say(f"  model ready: {parameters / 1e6:.1f} million parameters, {torch.get_num_threads()} threads")
    return model


def cold(endpoint: str) -> Report:
    """Computes the whole prompt and stores its full blocks."""
    model, prompt = _ready_model(), build_prompt()
    blocks = PROMPT_TOKENS // BLOCK_TOKENS
    with Client(endpoint) as client:
        prefix = PrefixCache(client, model, block_tokens=BLOCK_TOKENS)
        _, found = prefix.load(prompt)

        ttfts_s = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            cache = DynamicCache(config=model.config)
            token = next_token(model, prompt, cache)
            ttfts_s.append(time.perf_counter() - start)
        say(f"  prefill of {PROMPT_TOKENS + 1} tokens: {_milliseconds(ttfts_s)}")

        start = time.perf_counter()
        result = prefix.save(prompt, cache)
        put_s = time.perf_counter() - start
        size_bytes = blocks * prefix.namespace().block_bytes
    say(f"  stored {result.stored} blocks, {size_bytes / 2**20:.1f} MiB, in {put_s * 1e3:.1f} ms")
    return {
        "token": token,
        "ttfts_s": ttfts_s,
        "put_s": put_s,
        "found_before": found // BLOCK_TOKENS,
        "blocks": blocks,
        "stored": result.stored,
        "bytes": size_bytes,
        "digest": _digest(cache, PROMPT_TOKENS),
    }


def hit(endpoint: str) -> Report:
    """Loads what is stored of the prompt and computes the rest: one token, if all is there."""
    model, prompt = _ready_model(), build_prompt()
    ttfts_s, fetches_s = [], []
    with Client(endpoint) as client:
        prefix = PrefixCache(client, model, block_tokens=BLOCK_TOKENS)
        for _ in range(ROUNDS):
            start = time.perf_counter()
            cache, loaded = prefix.load(prompt)
            fetches_s.append(time.perf_counter() - start)
            token = next_token(model, prompt[:, loaded:], cache)
            ttfts_s.append(time.perf_counter() - start)
        blocks = loaded // BLOCK_TOKENS
        size_bytes = blocks * prefix.namespace().block_bytes
    say(f"  {blocks} blocks fetched, {prompt.shape[1] - loaded} token(s) computed: {_milliseconds(ttfts_s)}")
    return {
        "token": token,
        "ttfts_s": ttfts_s,
        "fetches_s": fetches_s,
        "blocks": blocks,
        "bytes": size_bytes,
        "digest": _digest(cache, loaded),
    }


ROLES = {"cold": cold, "hit": hit}
