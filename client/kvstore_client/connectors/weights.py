"""A name for the parameters of a torch model, so that blocks computed with others are never found.

A model's name does not do: fine-tuning, another seed or a merged adapter keep it. The name is a digest of
every tensor's name, type, shape, and sums of the whole numbers that its bits are, which do not depend on threads or
device. The sums are taken by rows and by columns of a table: up to three changed words always change one of them, and
so does another order. Buffers that are not saved count as well: a model that was cast has other rotary frequencies.
"""

import hashlib
import itertools
import weakref
from typing import Any

import torch

from kvstore_client.errors import InvalidArgument

ROW, COLUMNS = 512, 4096
"""Words that are added up, one beside the other; and how many are in columns. What is not a whole line of the table is
in the digest itself."""

WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Weights:
    """The parameters and buffers of one model, which may change."""

    def __init__(self, model: Any, given: str | None = None) -> None:
        """`given` is the name of what is saved of them, from who knows it."""
        self._model = model
        self._given = given
        self._seen: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._name = ""

    def name(self) -> str:
        """The name of the weights as they are. Reads them all if they changed since it was last asked.

        Changes that torch itself does not see, through `.data`, in inference mode or by another process, are not seen.
        """
        tensors = itertools.chain(self._model.parameters(), self._model.buffers())
        now = [(tensor, 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
        before = [(ref(), version) for ref, version in self._seen]
        same = len(now) == len(before) and all(a is b and v == w for (a, v), (b, w) in zip(now, before, strict=True))
        if not self._name or not same:
            self._name = digest(self._model) if self._given is None else self._named()
            self._seen = [(weakref.ref(tensor), version) for tensor, version in now]
        return self._name + adapters(self._model)

    def _named(self) -> str:
        """With what no name of saved weights says: the buffers that are not saved."""
        unsaved = dict(self._model.named_buffers()).keys() - self._model.state_dict().keys()
        tensors = {name: tensor for name, tensor in self._model.named_buffers() if name in unsaved}
        return f"named {self._given} buffers {_digest(tensors)}"


def digest(model: Any) -> str:
    """Names the values of parameters and buffers. Raises InvalidArgument where they cannot be read."""
    return _digest({**dict(model.named_buffers()), **model.state_dict()})


def adapters(model: Any) -> str:
    """Which of peft's adapters each layer computes with, and how strongly: a switch changes no parameter."""
    used = [
        f"{name} {layer.active_adapters} {layer.disable_adapters} {sorted(getattr(layer, 'scaling', {}).items())}"
        for name, layer in model.named_modules()
        if isinstance(getattr(type(layer), "active_adapters", None), property)  # a method is the model's own
    ]
    return f" adapters {hashlib.blake2b(repr(used).encode(), digest_size=16).hexdigest()}" if used else ""


def _digest(tensors: dict[str, Any]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.is_meta:
            raise InvalidArgument(f"{name} is not in memory, so the weights cannot be read: name them with weights=")
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        try:
            sums = _sums(tensor.detach())
        except (RuntimeError, TypeError, KeyError, NotImplementedError) as e:
            raise InvalidArgument(f"{name} cannot be read ({e}): name the weights with weights=") from e
        for part in sums:
            total.update(part.cpu().numpy())
    return total.hexdigest()


def _sums(tensor: Any) -> list[Any]:
    """Of a tensor's words, by rows and by columns, and those that are left."""
    words = _words(tensor.reshape(-1))
    whole = words.numel() - words.numel() % COLUMNS
    table, rest = words[:whole], words[whole:]
    rows, columns = (table.view(-1, width) for width in (ROW, COLUMNS))
    return [rows.sum(1, dtype=torch.int64), columns.sum(0, dtype=torch.int64), rest]


def _words(flat: Any) -> Any:
    """The same memory as whole numbers, of 8 bytes where it has such: several times faster to add up."""
    size = flat.element_size()
    whole = flat.view(torch.uint8) if size not in WHOLE else flat.view(WHOLE[size])
    fits = not (flat.numel() * size % 8 or flat.storage_offset() * size % 8)
    return whole.view(torch.int64) if fits else whole
