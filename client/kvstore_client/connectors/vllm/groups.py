"""Which of vLLM's cache groups can be kept block by block, and what each needs to go on. Knows vLLM's classes by name.

A block can be kept if its hash decides about its bytes, and nothing changes them once it is full. That is so
for attention, with or without a window. It is not so for layers with a state, whose block changes in place.
"""

from typing import Any

from kvstore_client.connectors.vllm.hits import Need

KEPT = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec")


def obstacle(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why nothing of this engine can be kept; "" where it can."""
    groups = kv_cache_config.kv_cache_groups
    cacheable = set(kv_cache_config.prefix_cacheable_group_ids)
    if not cacheable:
        return "it has no cache groups that can be found by prefix"
    for number, group in enumerate(groups):
        kind = type(group.kv_cache_spec).__name__
        if number not in cacheable or kind not in KEPT:
            return f"cache group {number} has {kind}, which cannot be kept block by block"
        if group.is_eagle_group:
            return f"cache group {number} has draft layers, whose blocks depend on the token after them"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "the scales of its KV cache are found while it runs"
    return ""


def need_of(spec: Any) -> Need:
    """What a cache group needs to go on."""
    return Need(spec.block_size, window=getattr(spec, "sliding_window", None) or 0)
