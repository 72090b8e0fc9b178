"""Numbers that a daemon has given namespaces, as long as they are good.

A daemon gives a number that nobody has used for an hour to another namespace, when it needs one (protos/README.md). So
one that was not used for GOOD_S is asked for again before it is used.
"""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

GOOD_S = 1800.0

KEPT = 4096
"""Above so many, and each time that they have doubled, those that are good no more are forgotten."""

Opened = TypeVar("Opened")


class Numbers(Generic[Opened]):
    """What the daemon answered when each namespace was opened, by its digest. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: dict[bytes, tuple[Opened, float]] = {}
        """With when it was used last."""
        self._forget_at = KEPT

    def get(self, digest: bytes) -> Opened | None:
        """To be used now; None where it must be opened, for the first time or again."""
        found, now = self._of.get(digest), self._clock()
        if found is None or found[1] <= now - GOOD_S:
            return None
        self._of[digest] = found[0], now
        return found[0]

    def __setitem__(self, digest: bytes, opened: Opened) -> None:
        now = self._clock()
        if len(self._of) >= self._forget_at:
            for old, (_, used) in list(self._of.items()):
                if used <= now - GOOD_S:
                    self._of.pop(old, None)
            self._forget_at = max(KEPT, 2 * len(self._of))
        self._of[digest] = opened, now

    def good(self) -> dict[bytes, Opened]:
        """All that need not be opened again."""
        least = self._clock() - GOOD_S
        return {digest: opened for digest, (opened, used) in list(self._of.items()) if used > least}
