"""What was read and not told the daemon yet: recency and counts travel with later messages, never with a read."""

import threading
import time
from collections import deque
from collections.abc import Sequence

from kvstored.v1 import kvstore_pb2 as pb

KEYS_MAX = 4096
"""Keys in one message; chains that do not fit lose their recency, never their count."""

CHAINS_MAX = 256
"""Reads remembered between two messages; of older ones only the counts are kept."""


class Reads:
    """Noted by any thread, also by finalizers that run in the middle of another note."""

    def __init__(self, every_s: float) -> None:
        """Told at most once in `every_s`, unless somebody insists."""
        self._every_s = every_s
        self._chains: deque[tuple[bytes, ...]] = deque(maxlen=CHAINS_MAX)
        self._counts = [0] * 5
        self._lock = threading.RLock()
        self._told_at = 0.0

    def used(self, keys: Sequence[bytes]) -> None:
        """These blocks were found to exist by who would have stored them: a use, but no hit."""
        self._chains.append(tuple(keys))

    def read(self, keys: Sequence[bytes], start: int, found: int, block_bytes: int) -> None:
        """Of keys[start:], the first `found` were read."""
        if found:
            self._chains.append(tuple(keys[: start + found]))
        self.leased(found, len(keys) - start, block_bytes)

    def leased(self, found: int, asked: int, block_bytes: int) -> None:
        """`found` of `asked` blocks were acquired; the daemon knows that they were used."""
        with self._lock:
            counts = self._counts
            counts[0] += found
            counts[1] += asked - found
            counts[2] += found * block_bytes

    def matched(self, found: int, asked: int) -> None:
        """A match makes nothing more recent: a probe keeps nothing in memory."""
        with self._lock:
            self._counts[3] += found
            self._counts[4] += asked - found

    def due(self, *, now: bool = False) -> pb.TouchRequest | None:
        """What to tell, if there is something and it is time; it counts as told."""
        if not (self._chains or any(self._counts)) or (not now and time.monotonic() < self._told_at + self._every_s):
            return None
        self._told_at = time.monotonic()
        with self._lock:
            (hits, misses, hit_bytes, match_hits, match_misses), self._counts = self._counts, [0] * 5
        chains: dict[bytes, None] = {}
        while self._chains:
            newest = self._chains.pop()
            if len(chains) + len(newest) <= KEYS_MAX:
                chains.update(dict.fromkeys(newest))
        return pb.TouchRequest(
            keys=list(chains),
            hits=hits,
            misses=misses,
            hit_bytes=hit_bytes,
            match_hits=match_hits,
            match_misses=match_misses,
        )
