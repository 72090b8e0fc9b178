"""Conversations: which ones were seen, and which came back after eviction had taken a block of theirs.

An engine names the conversation that it stores blocks for (Hint). A block's row has the
number of the one it was last stored or used for; when the block is evicted for room, that
conversation is marked, and when it is seen again with a mark it counts as evicted while
alive, once, and the mark is gone. What was removed, cleared, expired or dropped on request
marks nothing.

Known are the KNOWN_MAX conversations seen last, by a hash of 64 bits over tenant and name:
no name is kept. Full, the table takes some 20 MB. A conversation that was forgotten and
comes back counts as a new one.

A number is given once and never again, so that a row can have one that is forgotten. They
are 32 bits, a column of the block table; when they run out (after weeks of a thousand new
conversations a second) all rows and the table forget theirs, and it begins anew.
"""

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

from kvstore.core.counts import Counts

KNOWN_MAX = 65536
NUMBERS_MAX = (1 << 32) - 1

NOBODY = 0
"""The number of no conversation."""


class Conversations:
    """Counts into `conversations` and `conversations_evicted` of `counts`."""

    def __init__(
        self,
        counts: Counts,
        forget_rows: Callable[[], None],
        known_max: int = KNOWN_MAX,
        numbers_max: int = NUMBERS_MAX,
    ) -> None:
        """`forget_rows` takes every number out of the block table."""
        self._counts = counts
        self._forget_rows = forget_rows
        self._known_max = known_max
        self._numbers_max = numbers_max
        self._known: OrderedDict[bytes, int] = OrderedDict()
        """Hash -> number, the one seen longest ago first."""
        self._marked: dict[int, bool] = {}
        """Number -> whether a block of it was evicted since it was last seen; of all that are known."""
        self._last = NOBODY

    def seen(self, tenant: str, name: str) -> int:
        """The number of a conversation that a put or touch names; "" is none."""
        if not name:
            return NOBODY
        digest = blake2b(f"{tenant}\0{name}".encode(), digest_size=8).digest()
        number = self._known.get(digest)
        if number is None:
            return self._new(digest)
        self._known.move_to_end(digest)
        if self._marked[number]:
            self._marked[number] = False
            self._counts.conversations_evicted += 1
        return number

    def evicted(self, number: int) -> None:
        """A block with this number was evicted for room."""
        if number in self._marked:
            self._marked[number] = True

    def _new(self, digest: bytes) -> int:
        if self._last == self._numbers_max:
            self._forget_rows()
            self._known.clear()
            self._marked.clear()
            self._last = NOBODY
        if len(self._known) == self._known_max:
            _, forgotten = self._known.popitem(last=False)
            del self._marked[forgotten]
        self._last += 1
        self._known[digest] = self._last
        self._marked[self._last] = False
        self._counts.conversations += 1
        return self._last

    def check(self) -> None:
        """What must be true between any two calls."""
        assert len(self._known) <= self._known_max, f"{len(self._known)} conversations are known"
        assert set(self._known.values()) == self._marked.keys(), "marks are not those of the conversations known"
        assert all(NOBODY < number <= self._last for number in self._marked), "a number that was never given"
