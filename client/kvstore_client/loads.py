"""Blocks that are not in memory, for somebody who waits: Load, a part after the other, until a deadline.

A part is at most PART_BYTES and a small share of the tenant's memory, for it is held until it is
copied; the next one is asked for before the last is copied. The daemon is asked again and again,
TURN_MS at a time: a call has the session's lock, and nobody else's put may wait for a disk.

What does not come in time, or not at all, is a miss. Where the daemon has so much to bring that
this has no turn, it is asked again, within the deadline; what has not come then is counted
apart (`busy`). A session that ends raises Unavailable.
"""

import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from kvstore_client.lease import Hold
from kvstore_client.reads import HOST, SSD
from kvstore_client.session import Session
from kvstored.v1 import KEYS_MAX
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, KVStoreError, ResourceExhausted

log = logging.getLogger("kvstore_client")

PART_BYTES = 64 << 20
PART_SHARE = 16
"""A part is at most this fraction of the tenant's memory: two are held at once, and a session may hold a quarter."""

TURN_MS = 10
"""How long one question may keep the session's lock."""

PAUSE_S = 0.001
"""Between two questions: whoever waits for the lock has it then."""

BUSY_S, BUSY_S_MAX = 0.005, 0.1
"""Before a daemon that was too busy is asked again; twice as long each time."""

ANSWER_SHARE = 0.25
"""Of the client's time-out: a daemon has at least that long to answer, also when the deadline is near. One that does
not costs the session."""

BYTES_PER_S = 64 << 20
"""A read may take the client's time-out, and the time of its bytes at this rate, as long as some of them come."""

DEADLINE_MS_MAX = 600_000

Present = Callable[[Sequence[bytes]], list[bool]]
"""The leading run of keys that the daemon has: for each, whether it is in memory."""


class Part:
    """One Load: the leading run of `keys`, held once it is there. `close` ends it, whatever became of it."""

    def __init__(self, session: Session, namespace_id: int, keys: Sequence[bytes], until: float) -> None:
        """Begins it; waits for no disk. Raises Unavailable."""
        self.slots: list[int] = []
        self.hold: Hold | None = None
        """Keeps the slots."""
        self.asked = len(keys)
        self.loaded = 0
        """How many had to be brought."""
        self.refused = False
        """It was more than may be held: a smaller part may do."""
        self.busy = False
        """Not all came since too much was being loaded, or held, by all together."""
        self._session = session
        self._until = until
        self._ticket = 0
        left_ms = int((until - time.monotonic()) * 1000)
        if left_ms > 0:
            request = pb.Request()
            request.load.namespace_id = namespace_id
            request.load.keys.extend(keys)
            request.load.deadline_ms = min(left_ms, DEADLINE_MS_MAX)
            self._ask(request)

    def wait(self) -> list[int]:
        """The slots of its leading blocks that came by the deadline. Raises Unavailable."""
        while self._ticket:
            left_ms = int((self._until - time.monotonic()) * 1000)
            if left_ms <= 0:
                self.close()
                break
            self._ask(pb.Request(load=pb.LoadRequest(ticket=self._ticket, wait_ms=min(TURN_MS, left_ms))))
            if self._ticket:
                time.sleep(PAUSE_S)
        return self.slots

    def close(self) -> None:
        """Gives it up where it is not over, and lets go of its slots, unless who has taken `hold` keeps them."""
        self.hold, ticket, self._ticket = None, self._ticket, 0
        if ticket and not self._session.dead:
            try:
                self._session.acquire(
                    pb.Request(load=pb.LoadRequest(ticket=ticket, give_up=True)), answer_s(self._session, self._until)
                )
            except KVStoreError as e:
                log.debug("a load was not given up, and ends by itself: %s", e)

    def _ask(self, request: pb.Request) -> None:
        try:
            reply, hold = self._session.acquire(request, answer_s(self._session, self._until))
        except (ResourceExhausted, FailedPrecondition, InvalidArgument) as e:  # the latter two of an older daemon
            log.debug("blocks that are not in memory count as missing: %s", e)
            self._ticket, self.refused = 0, isinstance(e, ResourceExhausted)
            return
        self._ticket, self.busy = reply.load.ticket, reply.load.busy
        if not self._ticket:
            self.slots, self.hold, self.loaded = list(reply.load.slots), hold, reply.load.loaded
            if reply.load.why:
                log.debug("%d of %d blocks were brought into memory: %s", len(self.slots), self.asked, reply.load.why)


def answer_s(session: Session, until: float) -> float:
    """How long the daemon has to answer, whose answer waits for no disk."""
    return max(until - time.monotonic(), session.timeout_s * ANSWER_SHARE)


class Loads:
    """The loads of one call; use as a `with` block, which gives up what is under way at its end."""

    def __init__(
        self,
        session: Session,
        opened: pb.OpenNamespaceReply,
        keys: Sequence[bytes],
        present: Present,
        until: float,
        part_s: float,
    ) -> None:
        """All of it is over at `until`, and each part in `part_s`: a disk that is silent is not waited for again."""
        self._session = session
        self._opened = opened
        self._keys = keys
        self._present = present
        self._until = until
        self._part_s = part_s
        share_bytes = min(PART_BYTES, session.hello.tenant_bytes // PART_SHARE)
        self._part_keys = max(1, min(share_bytes // opened.slot_bytes, KEYS_MAX))
        self.tier = HOST
        """The slowest that a block came from."""
        self.busy = False
        """What did not come is there, and had no turn, or no room that may be held."""
        self.tried = False
        """Whether the last `bring` asked the daemon, or found nothing to ask for."""
        self._next: Part | None = None
        self._next_at = -1

    def bring(self, at: int) -> Part | None:
        """Blocks from keys[at] on, as many as a part has and came; None where none did, or none must be brought.

        The caller closes it, but not before it has used the slots.
        """
        ahead, self._next = self._next, None
        if ahead is not None and self._next_at != at:
            ahead.close()
            ahead = None
        part, pause_s = ahead or self._begin(at), BUSY_S
        self.busy, self.tried = False, part is not None
        while part is not None:
            if self._came(part):
                if part.loaded:
                    self.tier = SSD
                if len(part.slots) == part.asked:
                    self._next, self._next_at = self._begin(at + part.asked), at + part.asked
                return part
            part.close()
            self.busy = part.busy or part.refused
            if part.busy and time.monotonic() + pause_s < self._until:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, BUSY_S_MAX)
            elif part.refused and part.asked > 1:
                self._part_keys = max(1, part.asked // 4)
            else:
                return None
            part = self._begin(at)
        return None

    @staticmethod
    def _came(part: Part) -> bool:
        """Waits for it; one whose waiting is interrupted is given up."""
        try:
            return bool(part.wait())
        except BaseException:
            part.close()
            raise

    def _begin(self, at: int) -> Part | None:
        """Asks for what must be brought from keys[at] on; None where that one is in memory, or nowhere."""
        now = time.monotonic()
        if now >= self._until:
            return None
        in_memory = self._present(self._keys[at : at + self._part_keys])
        if not in_memory or in_memory[0]:
            return None
        while in_memory[-1]:  # what is read without a load, when this is done
            in_memory.pop()
        keys = self._keys[at : at + len(in_memory)]
        return Part(self._session, self._opened.namespace_id, keys, min(self._until, now + self._part_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._next is not None:
            self._next.close()
