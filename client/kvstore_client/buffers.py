"""Callers' memory as arrays of uint8, one a block, without copying.

Accepted: anything with the buffer protocol that is C-contiguous (bytes, bytearray,
memoryview, numpy), torch tensors on the CPU, and sequences of those.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstored.v1.errors import InvalidArgument

Bytes = NDArray[np.uint8]


def as_bytes(thing: Any, what: str) -> Bytes:
    """The memory of one object. Raises InvalidArgument where it is not contiguous memory of this process."""
    if isinstance(thing, np.ndarray):
        if thing.dtype == np.uint8 and thing.ndim == 1 and thing.flags.c_contiguous:
            return thing
        if thing.dtype.hasobject:
            raise InvalidArgument(f"{what} is an array of objects; expected one of numbers")
        if not thing.flags.c_contiguous:
            raise InvalidArgument(f"{what} is not C-contiguous; pass numpy.ascontiguousarray of it")
        return thing.reshape(-1).view(np.uint8)
    if hasattr(thing, "data_ptr"):
        return _tensor_bytes(thing, what)
    try:
        view = memoryview(thing)
        if not view.c_contiguous:
            raise InvalidArgument(f"{what} is not contiguous memory")
        return np.frombuffer(view.cast("B") if view.nbytes else b"", np.uint8)
    except TypeError as e:
        raise InvalidArgument(f"{what} is a {type(thing).__name__}; expected a buffer, array or CPU tensor") from e


def _tensor_bytes(tensor: Any, what: str) -> Bytes:
    if tensor.device.type != "cpu":
        raise InvalidArgument(f"{what} is on {tensor.device}; this release copies CPU memory only")
    if not tensor.is_contiguous():
        raise InvalidArgument(f"{what} is not contiguous; pass tensor.contiguous()")
    import torch  # the caller has it

    flat = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return np.asarray(flat, np.uint8)


def _is_buffer(thing: Any) -> bool:
    """Whether it is memory itself; array.array is also a sequence, of numbers."""
    try:
        memoryview(thing)
    except TypeError:
        return False
    return True


def as_blocks(things: Any, count: int, block_bytes: int, what: str) -> list[Bytes]:
    """`count` blocks from one buffer that holds all of them in a row, or from a sequence of one each."""
    if type(things) is list or (isinstance(things, Sequence) and not _is_buffer(things)):
        blocks = [as_bytes(thing, what) for thing in things]
        if len(blocks) != count:
            raise InvalidArgument(f"{len(blocks)} {what}s for {count} keys")
        for i, block in enumerate(blocks):
            if len(block) != block_bytes:
                raise InvalidArgument(f"{what} {i} has {len(block)} bytes; a block of this namespace has {block_bytes}")
        return blocks
    whole = as_bytes(things, what)
    if len(whole) != count * block_bytes:
        raise InvalidArgument(
            f"{what} has {len(whole)} bytes; {count} blocks of this namespace have {count * block_bytes}"
        )
    return [whole[i * block_bytes : (i + 1) * block_bytes] for i in range(count)]


def require_writable(blocks: list[Bytes], what: str) -> None:
    """Raises InvalidArgument where one of them is read-only memory."""
    for i, block in enumerate(blocks):
        if not block.flags.writeable:
            raise InvalidArgument(f"{what} {i} is read-only memory")
