"""A random Llama for tests with transformers, the same in every process, and what it computes after a prefix.

As a program it is a second engine process: `small_llama.py ENDPOINT DTYPE` loads the prompt and prints what came of it.
"""

import hashlib
import json
import sys
from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvstore_client import Client
from kvstore_client.connectors.transformers import PrefixCache

BLOCK_TOKENS = 16
PROMPT = 100
"""Tokens: six full blocks, and four that are always computed."""

FULL = PROMPT // BLOCK_TOKENS * BLOCK_TOKENS

CACHE_ARGUMENT = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def config(**fields: Any) -> LlamaConfig:
    """Four layers, two KV heads of 32."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
    }
    return LlamaConfig(**{**sizes, **fields})


def build(seed: int = 0, dtype: str = "float32", **fields: Any) -> Any:
    """A model ready to be used."""
    torch.set_num_threads(1)  # how many there are decides about the last bits
    torch.manual_seed(seed)
    return LlamaForCausalLM(config(**fields)).to(getattr(torch, dtype)).eval()


def prompt(tokens: int, seed: int = 1) -> Any:
    """Token ids `[1, tokens]`; a longer prompt of a seed begins with the shorter ones."""
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 512, (1, 2048), generator=source)[:, :tokens]


def compute(model: Any, ids: Any, cache: Any) -> Any:
    """One forward pass over what comes after the cache, which it fills; logits of the last token."""
    with torch.no_grad():
        return model(ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits[0, -1]


def continued(model: Any, ids: Any, cache: Any, tokens: int = 8) -> tuple[Any, list[int]]:
    """Logits after the prompt, and the tokens that follow it; `ids` are those that the cache lacks."""
    first = logits = compute(model, ids, cache)
    generated = [int(logits.argmax())]
    while len(generated) < tokens:
        logits = compute(model, torch.tensor([generated[-1:]]), cache)
        generated.append(int(logits.argmax()))
    return first, generated


def prefilled(model: Any, tokens: int = FULL, seed: int = 1) -> DynamicCache:
    """The cache after so many tokens of the prompt."""
    cache = DynamicCache(config=model.config)
    compute(model, prompt(tokens, seed), cache)
    return cache


def same_states(one: DynamicCache, other: DynamicCache, tokens: int) -> bool:
    """Whether two caches begin alike, bit by bit."""
    return len(one.layers) == len(other.layers) and all(
        torch.equal(a.keys[:, :, :tokens], b.keys[:, :, :tokens])
        and torch.equal(a.values[:, :, :tokens], b.values[:, :, :tokens])
        for a, b in zip(one.layers, other.layers, strict=True)
    )


def digest(logits: Any) -> str:
    return hashlib.blake2b(logits.view(torch.uint8).numpy().tobytes()).hexdigest()


def _second_process(endpoint: str, dtype: str) -> None:
    model, ids = build(dtype=dtype), prompt(PROMPT)
    with Client(endpoint) as client:
        cache, tokens = PrefixCache(client, model, block_tokens=BLOCK_TOKENS).load(ids)
    logits, generated = continued(model, ids[:, tokens:], cache)
    print(json.dumps({"tokens": tokens, "logits": digest(logits), "generated": generated}))


if __name__ == "__main__":
    _second_process(*sys.argv[1:])
