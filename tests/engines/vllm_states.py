"""States as a store has them, and how far apart those of two engines are.

Tokens do not tell a wrong state from a right one: linear attention on a CPU is in bfloat16, and what a prefill
makes of a token is not, to the bit, what a decode makes of it. The numbers do. Of a layer a block has the inputs
of its convolution, the last 3, then its memory of all tokens, in float32. In the first layer those inputs come
from the last 3 tokens alone: with any other at the end they are others.
"""

from base64 import b64decode
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tests.engines.vllm_engines import Engine

LAYERS = 2
CONV_BYTES = 3 * (2 * 2 * 64 + 4 * 64) * 2
"""Of the model that vllm_models.py writes: 3 tokens, 2 heads of Q and of K, 4 of V, of 64 in bfloat16."""

State = list[torch.Tensor]
"""For each layer the inputs of its convolution, and its memory."""


class Apart(NamedTuple):
    """The largest differences, by the norm of what they differ from: 1.4 for states that have nothing in common."""

    last: float
    """In the first layer, of the last tokens."""
    first: float
    """In the first layer, of the memory."""
    deep: float
    """In the other, which sees what attention has made of noise."""


def states_of(engine: Engine, tokens: Sequence[int]) -> dict[int, State]:
    """What the store of this engine has, by how many of the tokens each has had."""
    return {int(end): _parts(b64decode(block)) for end, block in engine.do("kept", tokens=tokens).items()}


def _parts(block: bytes) -> State:
    size = len(block) // LAYERS
    parts = []
    for at in range(0, len(block), size):
        layer = bytearray(block[at : at + size])
        parts.append(torch.frombuffer(layer[:CONV_BYTES], dtype=torch.bfloat16).float())
        parts.append(torch.frombuffer(layer[CONV_BYTES:], dtype=torch.float32))
    return parts


def apart(states: dict[int, State], right: dict[int, State]) -> Apart:
    """Of all states that the first has; the second must have them too."""
    largest = [0.0] * 2 * LAYERS
    for tokens, state in states.items():
        for i, (part, other) in enumerate(zip(state, right[tokens], strict=True)):
            largest[i] = max(largest[i], float((part - other).norm() / other.norm()))
    last, first, *deep = largest
    return Apart(last, first, max(deep))
