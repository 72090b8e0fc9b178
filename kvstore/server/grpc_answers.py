"""Calls from their beginning until their answer is taken, and how much of the daemon they may have.

gRPC hands an answer over when its caller lets it through, for which it waits without limit,
and it can let go of such a call by nothing but the end of its connection. So a call has a
place only while it is at work. What waits to be taken is counted by the memory that it
costs, and where that is much, by connection: whoever takes his answers always finds room,
whatever others leave untaken.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from kvstored.v1 import CHUNK_BYTES_MAX
from kvstored.v1.errors import ResourceExhausted

CALL_BYTES = 32 << 10
"""What a call costs, without its answer."""

CALLS_BYTES_MAX = 64 << 20
"""Calls and answers of all connections. From then on each connection has its share only."""

SHARE_BYTES = 512 << 10
"""What one connection may have then and still make another call: far above one whose answers are taken."""


class Way:
    """Of one call: `sent` says that nothing is left of it but its answer."""

    def __init__(self, name: str) -> None:
        self.answer_bytes = CHUNK_BYTES_MAX if name == "Get" else 0
        """Where it fails: perhaps a message that it wrote is still untaken, large only of a Get."""

    def sent(self, answer: object) -> None:
        """`answer`: what is handed over with the status."""
        self.answer_bytes = len(answer) if isinstance(answer, bytes) else 0


class Answers:
    """Those of one edge."""

    def __init__(self, calls_max: int) -> None:
        self._calls_max = calls_max
        self._at_work: set[asyncio.Task[Any]] = set()
        self._bytes = 0
        self._of: dict[str, int] = {}
        """Connection -> bytes, where it has any. All on Unix sockets are one: gRPC tells them not apart, and all are
        of one user."""

    @contextlib.contextmanager
    def call(self, name: str, peer: str) -> Iterator[Way]:
        """A call of `peer`, in the task that gRPC runs it in. Raises ResourceExhausted where there is no room."""
        if len(self._at_work) >= self._calls_max:
            raise ResourceExhausted(f"{self._calls_max} calls are under way already; try again later")
        if self._bytes >= CALLS_BYTES_MAX and self._of.get(peer, 0) >= SHARE_BYTES:
            raise ResourceExhausted("too many answers on this connection are not taken yet: read them first")
        way, size_bytes = Way(name), CALL_BYTES
        task = asyncio.current_task()
        assert task is not None
        self._at_work.add(task)
        self._count(peer, size_bytes)
        try:
            yield way
        finally:
            self._at_work.discard(task)
            self._count(peer, way.answer_bytes)
            size_bytes += way.answer_bytes
            # It ends when the answer is out, or its connection gone.
            task.add_done_callback(lambda _: self._count(peer, -size_bytes))

    def done(self) -> None:
        """The call of this task has nothing left to do but to hand over its answer by itself."""
        task = asyncio.current_task()
        assert task is not None
        self._at_work.discard(task)

    def _count(self, peer: str, size_bytes: int) -> None:
        self._bytes += size_bytes
        self._of[peer] = self._of.get(peer, 0) + size_bytes
        if not self._of[peer]:
            del self._of[peer]
