"""The model and the prompt of the demo, the same in every process, and one forward pass."""

from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

SEED = 0
PROMPT_TOKENS = 2048
BLOCK_TOKENS = 128
VOCABULARY = 4096

CACHE_ARGUMENT = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""transformers renamed it on the way through version 5 and warns about the old name."""


def build_model() -> Any:
    """A random Llama of about 28 million parameters, the same one in every process."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.08,
    )
    return LlamaForCausalLM(config).to(torch.float32).eval()


def build_prompt() -> Any:
    """Token ids `[1, PROMPT_TOKENS + 1]`: whole blocks, and one token that is left to compute."""
    source = torch.Generator().manual_seed(SEED)
    return torch.randint(3, VOCABULARY, (1, PROMPT_TOKENS + 1), generator=source)


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
