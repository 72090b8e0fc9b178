"""KV events: what whoever routes requests is told of blocks in the store, in vLLM's own words."""

from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvstore_client.connectors.vllm.messages import Run

MEDIUM = "kvstored"
"""Where the blocks are."""


def stored_event(request: Any, run: Run, block_tokens: int) -> Any:
    """That these blocks of a request are stored; their names are those that the engine's own events have."""
    lora = request.lora_request
    first, end = run.depth * block_tokens, (run.depth + len(run.hashes)) * block_tokens
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(name) for name in run.hashes],
        parent_block_hash=maybe_convert_block_hash(run.parent) if run.depth else None,
        token_ids=list(request.all_token_ids[first:end]),
        block_size=block_tokens,
        lora_id=lora.adapter_id if lora is not None else None,
        medium=MEDIUM,
        lora_name=lora.name if lora is not None else None,
        group_idx=run.group,
        session_id=request.session_id,
    )


def leading(event: Any, blocks: int) -> Any:
    """The event of its first `blocks` alone."""
    event.block_hashes, event.token_ids = event.block_hashes[:blocks], event.token_ids[: blocks * event.block_size]
    return event


def stored_of(events: Sequence[Any], stored: Sequence[int]) -> list[Any]:
    """What is true of them after only so many leading blocks of each were stored."""
    return [leading(event, blocks) for event, blocks in zip(events, stored, strict=True) if blocks]
