"""What the daemon goes on with after its answer, as whoever asked for it sees it: a prefetch, a durable commit."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvstore_client.loads import PAUSE_S, TURN_MS, answer_s
from kvstore_client.session import Session
from kvstored.v1 import KEYS_MAX
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import DeadlineExceeded, FailedPrecondition, KVStoreError, ResourceExhausted, Unavailable

log = logging.getLogger("kvstore_client")

LATE = "its deadline passed"
LEFT_AGAIN = "blocks left the SSD again before all were there: together they need more room than it has (ssd.size)"

STATES = {
    pb.TICKET_NONE: "failed",
    pb.TICKET_RUNNING: "running",
    pb.TICKET_DONE: "done",
    pb.TICKET_FAILED: "failed",
    pb.TICKET_CANCELLED: "cancelled",
}

Ask = Callable[[float, bool], pb.TicketReply]
"""Asks the daemon, which may wait so many seconds for the end of the prefetch, or cancels it."""


DURABLE_BYTES_PER_S = 32 << 20
"""A durable put may take the time-out and the time of its bytes at this rate: of a slow disk that is busy."""


class Ticket:
    """A prefetch. It always ends, by its deadline at the latest: done, failed or cancelled.

    blocks    leading blocks that are in memory
    loaded    blocks that were brought for it
    waiting   blocks still on their way
    why       why not all of the run that was there came; "" where it did. One that is done has a reason where it
              is larger than may be brought ahead of use: its leading run is there, and the rest was not tried

    These are as `state`, `wait` or `cancel` last heard them. Nothing is held for a prefetch: what it brought
    may be evicted again, and a `get_into` after it find fewer.
    """

    def __init__(
        self,
        state: str,
        blocks: int,
        why: str = "",
        *,
        ask: Ask | None = None,
        wait_s: float = 0.0,
        until: float = 0.0,
    ) -> None:
        """A running one is asked by `ask`, which may wait `wait_s`, and ends at `until` (of time.monotonic)."""
        assert (ask is None) == (state != "running"), "only who is still running is asked"
        self.blocks = blocks
        self.loaded = self.waiting = 0
        self.why = why
        self._state = state
        self._ask = ask
        self._wait_s = wait_s
        self._until = until
        self._noting = threading.Lock()

    @property
    def state(self) -> str:
        """ "running", "done", "failed" or "cancelled"; the last three are final. Asks the daemon while it runs."""
        return self.refresh()

    @property
    def known_state(self) -> str:
        """The state as it was last heard of, without a question."""
        if self._state == "running" and self._until <= time.monotonic():
            self._end("failed", LATE)
        return self._state

    def wait(self) -> int:
        """Waits for its end, never longer than its deadline; answers how many leading blocks are in memory then."""
        while self.refresh(self._wait_s) == "running":
            time.sleep(PAUSE_S)
        return self.blocks

    def cancel(self) -> None:
        """Ends a running prefetch; one that is final stays as it is. What has come stays in memory."""
        self.refresh(cancel=True)

    def refresh(self, wait_s: float = 0.0, *, cancel: bool = False) -> str:
        """Asks once, which may take `wait_s`; answers the state."""
        ask = self._ask
        if self._state != "running" or ask is None:
            return self._state
        left_s = self._until - time.monotonic()
        try:
            reply = ask(max(min(wait_s, left_s), 0.0), cancel)
        except (DeadlineExceeded, ResourceExhausted) as e:  # it may run nevertheless
            log.debug("a prefetch cannot be asked about: %s", e)
        except KVStoreError as e:
            self._end("failed", f"nobody can be asked about it any more: {e}")
        else:
            self._note(reply)
        if left_s <= wait_s and self._until <= time.monotonic():
            self._end("failed", LATE)
        return self._state

    def _note(self, reply: pb.TicketReply) -> None:
        with self._noting:
            if self._state != "running":
                return
            if reply.state == pb.TICKET_NONE:
                self._state, self._ask, self.why = "failed", None, "the daemon does not know it any more"
                return
            self.blocks, self.loaded, self.waiting = reply.blocks, reply.loaded, reply.waiting
            self._state, self.why = STATES[reply.state], reply.why
            if self._state != "running":
                self._ask = None

    def _end(self, state: str, why: str) -> None:
        with self._noting:
            if self._state == "running":
                self._state, self._ask, self.why = state, None, why


def of_session(session: Session, number: int, until: float) -> Ticket:
    """One that runs in a session; dead with it."""

    def ask(wait_s: float, cancel: bool) -> pb.TicketReply:
        question = pb.TicketRequest(ticket=number, wait_ms=int(wait_s * 1000), cancel=cancel)
        return session.call(pb.Request(ticket=question), answer_s(session, until)).ticket

    return Ticket("running", 0, ask=ask, wait_s=TURN_MS / 1000, until=until)


DURABLE_SHARE = 16
"""A durable put is at most this fraction of the tenant's memory ahead of the SSD: what is further ahead would have no
place among what is to be written, or be evicted before its turn."""


class Saving:
    """What one put wants to be on the SSD. The blocks are visible already, whatever becomes of this.

    A large one is put in portions: before the next one, all but the last is on the SSD.
    """

    def __init__(self, session: Session, size_bytes: int, slot_bytes: int) -> None:
        """`size_bytes` in all, in blocks that take `slot_bytes` each."""
        self._session = session
        self._until = time.monotonic() + session.timeout_s + size_bytes / DURABLE_BYTES_PER_S
        self.portion = max(session.hello.tenant_bytes // DURABLE_SHARE // slot_bytes, 1)
        """Blocks."""
        self._tickets: deque[tuple[int, int]] = deque()
        """With how many blocks each is about."""
        self._ahead = 0
        self._commits = 0
        self._why = ""

    def answered(self, replies: list[pb.CommitReply], blocks: int) -> None:
        """Commits that asked for it, of so many blocks; waits for those before, where that is too much at once."""
        self._commits += len(replies)
        for reply in replies:
            self._why = self._why or reply.not_durable
            if reply.ticket:
                share = len(reply.results) or blocks
                self._tickets.append((reply.ticket, share))
                self._ahead += share
        while self._ahead > self.portion and len(self._tickets) > 1:
            self._wait_for_first()

    def ask(self, namespace_id: int, keys: list[bytes]) -> None:
        """Blocks that exist already. Raises like any call; FailedPrecondition where the daemon has no SSD."""
        size = min(self.portion, KEYS_MAX)
        for at in range(0, len(keys), size):
            some = keys[at : at + size]
            request = pb.Request()
            request.commit.namespace_id = namespace_id
            request.commit.keys.extend(some)
            request.commit.durable = True
            self.answered([self._session.call(request).commit], len(some))

    def wait(self, namespace_id: int, keys: Sequence[bytes]) -> KVStoreError | None:
        """Waits for all of it, `keys`, in time; answers why not all is on the SSD."""
        while self._tickets:
            self._wait_for_first()
        if self._commits > 1 and not self._why:
            self._look_again(namespace_id, keys)
        return not_durable(self._why)

    def _look_again(self, namespace_id: int, keys: Sequence[bytes]) -> None:
        """Each commit was on the SSD when it was answered; one that came later may have taken its place."""
        try:
            for at in range(0, len(keys), KEYS_MAX):
                part = keys[at : at + KEYS_MAX]
                request = pb.MatchRequest(namespace_id=namespace_id, keys=part, tier=pb.TIER_SSD)
                if self._session.call(pb.Request(match=request)).match.blocks < len(part):
                    self._why = LEFT_AGAIN
                    return
        except (Unavailable, DeadlineExceeded, ResourceExhausted) as e:
            self._why = f"nobody can be asked about it any more: {e}"

    def _wait_for_first(self) -> None:
        number, blocks = self._tickets.popleft()
        self._ahead -= blocks
        ticket = of_session(self._session, number, self._until)
        ticket.wait()
        if ticket.state != "done":
            self._why = self._why or ticket.why


def not_durable(why: str) -> KVStoreError | None:
    """What a put answers whose blocks are stored, but not all on the SSD."""
    if not why:
        return None
    kind = DeadlineExceeded if why == LATE else FailedPrecondition
    return kind(f"stored in memory, but not durable: {why}")
