"""Keys as callers give them: a chain from its root, and where in it a call begins."""

from collections.abc import Sequence

from kvstored.v1 import keys as naming
from kvstored.v1.errors import InvalidArgument


def checked_keys(keys: Sequence[bytes]) -> Sequence[bytes]:
    """The keys, if they are a sequence of keys. Raises InvalidArgument naming what is not."""
    if type(keys) is not list and (isinstance(keys, (bytes, str)) or not isinstance(keys, Sequence)):
        raise InvalidArgument(f"keys are a list of bytes, not {type(keys).__name__}")
    naming.check_keys(keys)
    return keys


def checked_count(keys: Sequence[bytes], start: int) -> int:
    """How many keys there are from `start`. Raises InvalidArgument where it lies outside."""
    if not isinstance(start, int) or not 0 <= start <= len(keys):
        raise InvalidArgument(f"start={start!r} is not between 0 and the {len(keys)} keys")
    return len(keys) - start
