"""Which of vLLM's cache groups can be kept block by block, and what each needs to go on. Knows vLLM's classes by name.

A block can be kept if its hash decides about its bytes, and nothing changes them once it is full. That is so
for attention, with or without a window. The block of a state changes in place, and a table of such blocks does
not say which has what. Where vLLM keeps states at the ends of blocks ("align"), it says of a step which blocks
have, when it is over, the state at which end, and goes on in others: these can be kept.
"""

from typing import Any

from kvstore_client.connectors.vllm.hits import Need

STATE = "MambaSpec"
"""Any kind of state: of Mamba, of linear attention, of short convolutions."""

KEPT = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec", STATE)


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
        if kind == STATE and (why := obstacle_of_state(group.kv_cache_spec)):
            return f"cache group {number} has states {why}"
    if all(need_of(group.kv_cache_spec).state for group in groups):
        return "it has states only, and no attention whose blocks a prefix could be found by"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "the scales of its KV cache are found while it runs"
    return ""


def obstacle_of_state(spec: Any) -> str:
    """Why these states cannot be kept."""
    if spec.mamba_cache_mode != "align":
        return f"of the mode {spec.mamba_cache_mode!r}; only those of 'align' are known to be at the end of a block"
    if spec.num_speculative_blocks or spec.num_prefill_checkpoint_blocks:
        return "of tokens that are guessed, or checkpoints within a step"
    return ""


def need_of(spec: Any) -> Need:
    """What a cache group needs to go on."""
    return Need(spec.block_size, window=getattr(spec, "sliding_window", None) or 0, state=type(spec).__name__ == STATE)
