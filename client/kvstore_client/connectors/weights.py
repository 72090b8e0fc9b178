"""A name for the parameters of a torch model, so that blocks computed with others are never found.

A model's name does not do: fine-tuning, another seed or a merged adapter keep it. The name is a digest of
every tensor's name, type, shape, sum and some of its elements, each as the whole numbers that its bits
are: such a sum does not depend on threads or device, and one changed weight changes it.
"""

import hashlib
import weakref
from typing import Any

import torch

from kvstore_client.errors import InvalidArgument

SAMPLES = 64
"""Elements of a tensor that are in the digest themselves, so that their order counts."""

WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Weights:
    """The parameters of one model, which may change."""

    def __init__(self, model: Any, given: str | None = None) -> None:
        """`given` is their name, from who knows it."""
        self._model = model
        self._given = given
        self._seen: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._name = ""

    def name(self) -> str:
        """The name of the parameters as they are. Reads them all if they changed since it was last asked.

        Changes that torch itself does not see, through `.data` or another process, are not seen.
        """
        if self._given is not None:
            return f"named {self._given}"
        now = [(tensor, 0 if tensor.is_inference() else tensor._version) for tensor in self._model.parameters()]
        before = [(ref(), version) for ref, version in self._seen]
        same = len(now) == len(before) and all(a is b and v == w for (a, v), (b, w) in zip(now, before, strict=True))
        if not self._name or not same:
            self._name = digest(self._model)
            self._seen = [(weakref.ref(tensor), version) for tensor, version in now]
        return self._name


def digest(model: Any) -> str:
    """Names the values of parameters and persistent buffers. Raises InvalidArgument where they are not in memory."""
    total = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.is_meta:
            raise InvalidArgument(f"{name} is not in memory, so the weights cannot be read: name them with weights=")
        flat = tensor.detach().reshape(-1)
        bits = flat.view(WHOLE[tensor.element_size()])
        sampled = bits[:: max(bits.numel() // SAMPLES, 1)].tolist()
        line = f"{name} {tensor.dtype} {tuple(tensor.shape)} {int(_words(bits).sum(dtype=torch.int64))} {sampled}\n"
        total.update(line.encode())
    return total.hexdigest()


def _words(bits: Any) -> Any:
    """The same memory in words of 8 bytes, where it has whole ones: several times faster to add up."""
    size = bits.element_size()
    return bits.view(torch.int64) if not (bits.numel() * size % 8 or bits.storage_offset() * size % 8) else bits
