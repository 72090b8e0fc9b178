"""gRPC calls that are a session's: the token that binds them, and their end with it.

A client without our SDK has its descriptors and its lifetime from the session socket and
makes its calls by gRPC; the token that Hello answered says that both are one client. It is
a secret of that session: tokens are kept and compared by their hash alone, so that neither
a look into a table nor the time of a comparison tells one.

What a bound call holds is the session's, or it ends with the session: a call under way is
cancelled and answers Unauthenticated.
"""

import asyncio
import contextlib
import re
import secrets
from collections.abc import Iterator
from hashlib import sha256

from kvstore.core.holds import Session
from kvstored.v1.errors import Unauthenticated

TOKEN_BYTES = 16
SPELLING = re.compile(rf"[0-9a-f]{{{2 * TOKEN_BYTES}}}")
"""Of a token in hex: this one and no other, as bytes.fromhex would take spaces and capitals."""


class Binding:
    """One session as gRPC sees it, and the calls of it that are under way."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._tasks: dict[asyncio.Task[object], int] = {}
        """Each with the number of its cancellations when it came."""
        self._ended = False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """What is within ends by Unauthenticated when the session ends."""
        task = asyncio.current_task()
        assert task is not None
        before = self._tasks[task] = task.cancelling()
        try:
            yield
        except asyncio.CancelledError:
            # Ours is one cancellation of possibly two: where the caller went away as well, it stays cancelled.
            if self._ended and task.uncancel() <= before:
                raise _unknown() from None
            raise
        finally:
            self._tasks.pop(task, None)

    def end(self) -> None:
        self._ended = True
        for task in self._tasks:
            task.cancel()


class Bindings:
    """Every session that gRPC calls may be bound to."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, Binding] = {}
        self._hashes: dict[int, bytes] = {}

    def bind(self, session: Session) -> bytes:
        """A new token for this session."""
        token = secrets.token_bytes(TOKEN_BYTES)
        hashed = sha256(token).digest()
        self._by_hash[hashed] = Binding(session)
        self._hashes[session.id] = hashed
        return token

    def find(self, text: str) -> Binding:
        """The session of a token in hex. Raises Unauthenticated where there is none, or none any more."""
        token = bytes.fromhex(text) if SPELLING.fullmatch(text) else b""
        found = self._by_hash.get(sha256(token).digest())
        if found is None:
            raise _unknown()
        return found

    def end(self, session: Session) -> None:
        """The session is over: its token means nothing, and its calls under way end."""
        hashed = self._hashes.pop(session.id, None)
        if hashed is not None:
            self._by_hash.pop(hashed).end()

    def __len__(self) -> int:
        return len(self._by_hash)


def _unknown() -> Unauthenticated:
    return Unauthenticated(
        "kvstored-session names no open session: it is HelloReply.token in hex, and ends with the session's socket"
    )
