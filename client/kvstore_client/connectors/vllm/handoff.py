"""Prefill in one engine, decode in another: what the router carries between them, and the block that is not full.

The router asks the prefill engine for one token with kv_transfer_params {"do_remote_decode": true}. The
answer has others, {"do_remote_prefill": true, "stored_tokens": N}, which it passes on to the decode engine
with the same prompt. That one waits for the N tokens to be in the store, HANDOFF_S at most, and loads them.

A prompt rarely ends with a block. For a prefill that is handed on, the block at its end is stored too, under
a name made of the block before and the tokens in it.
"""

import struct
from collections.abc import Mapping
from typing import Any

HANDOFF_S = 2.0
"""How long a decode engine waits for what it was promised, from the first lookup on."""

TAIL = b"tail of a prompt"


def asks_for(parameters: Mapping[str, Any]) -> bool:
    """Whether a prefill is to be handed on."""
    return parameters.get("do_remote_decode") is True


def promised_by(parameters: Mapping[str, Any]) -> int:
    """How many tokens another engine has stored, or is storing; 0 where none was asked to."""
    tokens = parameters.get("stored_tokens")
    if parameters.get("do_remote_prefill") is not True or type(tokens) is not int:
        return 0
    return max(tokens, 0)


def answer_to(tokens: int) -> dict[str, Any]:
    """What the router passes on."""
    return {"do_remote_prefill": True, "do_remote_decode": False, "stored_tokens": tokens}


def tail_of(request: Any, full_tokens: int) -> list[int]:
    """The prompt's tokens after its full blocks; none where they are not all that decides about their states."""
    if request.mm_features or request.prompt_embeds is not None or request.num_tokens < request.num_prompt_tokens:
        return []
    return list(request.all_token_ids[full_tokens : request.num_prompt_tokens])


def tail_name(parent: bytes, tokens: list[int]) -> bytes:
    """Names a block that has only these tokens, after those that `parent` names (b"": none)."""
    return TAIL + struct.pack("<I", len(parent)) + parent + struct.pack(f"<{len(tokens)}q", *tokens)
