"""Reads and writes in place of however many blocks: held a part at a time, since no session may hold much at once.

Both copy nothing themselves: whoever calls is given a view of each block, to copy from or to, once.
"""

import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore_client import Client, Hint, Namespace, PutResult
from kvstore_client.errors import KVStoreError, ResourceExhausted, Unavailable

PART_BYTES, PART_BLOCKS = 32 << 20, 64
"""Held at once, by a lease or a reservation."""

SMALLER = 4
"""By what a part is divided that is more than may be held just now."""

Copy = Callable[[int, memoryview], None]
"""Called with the place of a block in the keys and its bytes, which are to be let go of when it returns."""


def read(namespace: Namespace, keys: Sequence[bytes], timeout_s: float, copy: Copy) -> int:
    """Has the leading blocks that are present copied; answers how many. A daemon that is away has none.

    `timeout_s` is how long a part may take to come into memory.
    """
    copied, part = 0, _part_blocks(namespace)
    while copied < len(keys):
        wanted = min(part, len(keys) - copied)
        try:
            lease = namespace.acquire(keys[copied : copied + wanted], timeout_s)
        except ResourceExhausted:
            if wanted == 1:
                break
            part = max(wanted // SMALLER, 1)
            continue
        with lease:
            for view in lease.views:
                copy(copied, view)
                copied += 1
        if len(lease) < wanted:
            break
    return copied


def runs(namespace: Namespace, keys: Sequence[bytes], until: float = float("inf")) -> Iterator[tuple[int, int]]:
    """Which keys are there, also behind those that are not: places of the first of a run, and behind its last.

    What was not looked at by `until` is not there. Behind a gap it asks for few at once, so that a long list with many
    of them is not gone through for each.
    """
    first, at, part = 0, 0, len(keys)
    while at < len(keys) and time.monotonic() < until:
        wanted = min(part, len(keys) - at)
        found = namespace.match(keys[at : at + wanted]).blocks
        at += found
        part *= 2
        if found < wanted:
            if first < at:
                yield first, at
            first, part = at + 1, 1
            at = first
    if first < at:
        yield first, at


def write(
    namespace: Namespace, keys: Sequence[bytes], start: int, fill: Copy, hint: Hint | None = None
) -> tuple[int, PutResult]:
    """Stores keys[start:] that are not there yet, each filled by `fill`; `keys` is the chain from its root.

    Answers how many leading ones are there for certain, and the counts; `error` says why the others are not.
    """
    done = existing = stored = 0
    part = _part_blocks(namespace)
    error: KVStoreError | None = None
    try:
        if start < len(keys):
            done = existing = namespace.match(keys[start:]).blocks
    except KVStoreError as e:
        error = e
    while start + done < len(keys) and error is None:
        at = start + done
        count = min(part, len(keys) - at)
        try:
            with namespace.reserve(count) as slots:
                for i, view in enumerate(slots.views):
                    fill(at + i, view)
                result = slots.commit(keys[: at + count], at, hint=hint)
        except ResourceExhausted as e:
            part = max(count // SMALLER, 1)
            error = e if count == 1 else None
        except KVStoreError as e:
            error = e
        else:
            stored, existing = stored + result.stored, existing + result.existing
            if result.rejected:
                error = result.error or Unavailable("the daemon did not take all of them")
            else:
                done += count
    return done, PutResult(stored, existing, len(keys) - start - stored - existing, error)


def _part_blocks(namespace: Namespace) -> int:
    return max(1, min(PART_BLOCKS, PART_BYTES // namespace.block_bytes))


class Silence:
    """Stores to a daemon that is away wait for it once, not each of a row: engines' memory is what they hold."""

    def __init__(self, client: Client, wait_s: float) -> None:
        """`wait_s`: how long a store may take, and how long none is tried after one that was in vain."""
        self._client = client
        self._wait_s = wait_s
        self._until = 0.0

    @property
    def lasts(self) -> bool:
        """Whether there is no use in trying."""
        return time.monotonic() < self._until and not self._client.connected

    def heard(self, error: KVStoreError | None) -> None:
        """What came of a store."""
        if isinstance(error, Unavailable):
            self._until = time.monotonic() + self._wait_s


def memory_at(address: int, size_bytes: int) -> NDArray[np.uint8]:
    """Memory of this process that is named by its address, as an array; who calls keeps it alive."""
    return np.frombuffer(memoryview(_bytes_type(size_bytes).from_address(address)), np.uint8)


@functools.lru_cache(maxsize=256)
def _bytes_type(size_bytes: int) -> Any:
    """ctypes makes a class for each size, and forgets it with its last instance."""
    return ctypes.c_uint8 * size_bytes
