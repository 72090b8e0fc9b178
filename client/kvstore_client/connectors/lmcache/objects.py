"""Objects of LMCache's memory as we see them: their bytes in place, and what these mean."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Layout = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and type of each tensor in an object."""


def memory(thing: Any) -> NDArray[np.uint8]:
    """The bytes of an object, without a copy."""
    return np.frombuffer(memoryview(thing.byte_array).cast("B"), np.uint8)


def layout(shapes: Sequence[Any], dtypes: Sequence[Any]) -> Layout:
    return tuple((tuple(shape), str(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True))


def layout_of(thing: Any) -> Layout:
    """Of an object, which has lists of them only if it is of several tensors."""
    meta = getattr(thing, "meta", None)
    if meta is not None and meta.shapes is None:
        return layout([thing.get_shape()], [thing.get_dtype()])
    return layout(thing.get_shapes(), thing.get_dtypes())


def size_bytes(of: Layout) -> int:
    """What such an object takes."""
    return sum(int(np.prod(shape)) * getattr(torch, dtype.removeprefix("torch.")).itemsize for shape, dtype in of)
