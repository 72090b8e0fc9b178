"""Between transformers' KV cache and blocks of the store: the only model-specific part of the demo.

A `DynamicCache` holds, for each layer, keys and values of `[batch, kv_heads, tokens, head_dim]`.
A block is `[layer][K|V][token][head][dim]` of `BLOCK_TOKENS` consecutive tokens. Both ways
are one permutation and one copy for the whole prefix, however many blocks it has.
"""

from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvstore_client import Layout

SEED = 0
PROMPT_TOKENS = 2048
BLOCK_TOKENS = 128
VOCABULARY = 4096
LAYERS, KV_HEADS, HEAD_DIM = 8, 2, 64

CACHE_ARGUMENT = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""transformers renamed it on the way through version 5 and warns about the old name."""

Blocks = npt.NDArray[np.float32]
"""`[block, layer, 2, token, head, dim]`, contiguous."""


def build_model() -> Any:
    """A random Llama of about 28 million parameters, the same one in every process."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        initializer_range=0.08,
    )
    return LlamaForCausalLM(config).to(torch.float32).eval()


def build_prompt() -> Any:
    """Token ids `[1, PROMPT_TOKENS + 1]`: whole blocks, and one token that is left to compute."""
    source = torch.Generator().manual_seed(SEED)
    return torch.randint(3, VOCABULARY, (1, PROMPT_TOKENS + 1), generator=source)


def layout() -> Layout:
    """What a block of this model means. The seed stands for the weights' revision."""
    return Layout(
        model="demo-random-llama",
        revision=f"seed-{SEED}",
        dtype="float32",
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_tokens=BLOCK_TOKENS,
    )


def empty_blocks(count: int) -> Blocks:
    """One buffer for `count` blocks."""
    return np.empty((count, LAYERS, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM), dtype=np.float32)


def blocks_from_cache(cache: Any, count: int) -> Blocks:
    """The first `count` blocks of what the model computed. The last, open block is left out."""
    tokens = count * BLOCK_TOKENS
    pairs = [torch.stack((layer.keys[0, :, :tokens], layer.values[0, :, :tokens])) for layer in cache.layers]
    by_head = torch.stack(pairs).view(LAYERS, 2, KV_HEADS, count, BLOCK_TOKENS, HEAD_DIM)
    blocks: Blocks = by_head.permute(3, 0, 1, 4, 2, 5).contiguous().numpy()
    return blocks


def cache_from_blocks(blocks: Blocks) -> Any:
    """A cache that the model goes on from as if it had computed these tokens itself."""
    by_block = torch.from_numpy(blocks)
    kv = by_block.permute(1, 2, 4, 0, 3, 5).reshape(LAYERS, 2, 1, KV_HEADS, -1, HEAD_DIM)
    return DynamicCache([(kv[i, 0], kv[i, 1]) for i in range(LAYERS)])


def next_token(model: Any, tokens: Any, cache: Any) -> int:
    """One forward pass over `tokens`, which come after what `cache` holds; fills the cache."""
    with torch.no_grad():
        output = model(tokens, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    return int(output.logits[0, -1].argmax())


def warm_up(model: Any) -> None:
    """A short prompt, then one token after it: what a first call costs is paid before any clock starts."""
    tokens = torch.arange(3, 3 + 32).view(1, -1)
    cache = DynamicCache(config=model.config)
    next_token(model, tokens, cache)
    next_token(model, tokens[:, :1], cache)
