"""What was done and not told the daemon yet: recency and counts travel with later messages, never with a call.

One for a client, over all its sessions: what no session has told is told by the next one,
also of calls while the daemon was away. What was sent counts as told, so that nothing is
counted twice; a message that is lost, and what a process that dies has not told, is lost.

Notes are made by any thread, also by finalizers and signal handlers in the middle of
another note, or of adding up: so a note is one append, and only who has the lock adds up.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvstore_client.waiting import acquired
from kvstored.v1 import KEYS_MAX
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.latency import BUCKETS, bucket

CHAINS_MAX = 256
"""Reads remembered between two messages; of older ones only the counts are kept."""

REPORTS_MAX = 256
"""Reports in one message; the others wait for the next."""

NOTES_MAX = 4096
"""Calls that are not added up yet: half a megabyte. Who makes one more adds up."""

ADDING_WAIT_S = 1.0
"""How long who must tell now waits for another thread that adds up, which takes milliseconds."""

GET, ACQUIRE, MATCH, PUT = (
    int(pb.OPERATION_GET),
    int(pb.OPERATION_ACQUIRE),
    int(pb.OPERATION_MATCH),
    int(pb.OPERATION_PUT),
)
GPU, HOST, SSD = int(pb.TIER_GPU), int(pb.TIER_HOST), int(pb.TIER_SSD)


class Sum:
    """One operation on one tier in one namespace since it was last told."""

    __slots__ = ("busy", "calls_hit", "found", "latencies", "missed", "seconds")

    def __init__(self) -> None:
        self.calls_hit = self.found = self.missed = self.busy = 0
        self.seconds = 0.0
        self.latencies = [0] * BUCKETS

    def report(self, operation: int, tier: int, number: int) -> pb.Report:
        """As it is told, of a namespace that has this number."""
        return pb.Report(
            operation=operation,  # type: ignore[arg-type]
            namespace_id=number,
            calls=sum(self.latencies),
            calls_hit=self.calls_hit,
            hits=self.found,
            misses=self.missed,
            busy=self.busy,
            seconds=self.seconds,
            latencies=self.latencies,
            tier=tier,  # type: ignore[arg-type]
        )


class Named(Protocol):
    """What namespaces were answered when they were opened, by digest: a dict, or Numbers."""

    def get(self, digest: bytes, /) -> pb.OpenNamespaceReply | None: ...


class Reads:
    """Calls and uses that the daemon is to hear of."""

    def __init__(self, every_s: float) -> None:
        """Told at most once in `every_s`, unless somebody insists."""
        self._every_s = every_s
        self._chains: deque[tuple[tuple[bytes, ...], str]] = deque(maxlen=CHAINS_MAX)
        self._notes: deque[tuple[int, bytes, int, int, int, float, int]] = deque()
        self._sums: dict[tuple[bytes, int, int], Sum] = {}
        self._adding = threading.RLock()
        self._told_at = 0.0

    def used(self, keys: Sequence[bytes], conversation: str = "") -> None:
        """These blocks were read, or found to exist by who would have stored them."""
        self._chains.append((tuple(keys), conversation))

    def done(
        self, operation: int, digest: bytes, found: int, asked: int, began: float, tier: int = HOST, busy: int = 0
    ) -> None:
        """A call that began at `began` (of time.perf_counter) found `found` of `asked` blocks of that namespace.

        `tier`: the slowest that one of them came from. `busy`: of those not found, how many are there and were
        not brought, as too much was asked for or held. Costs half a microsecond, and as much when it is added up.
        """
        notes = self._notes
        notes.append((operation, digest, tier, found, asked, time.perf_counter() - began, busy))
        if len(notes) > NOTES_MAX:
            self._add_up()

    def due(self, opened: Named, *, now: bool = False) -> list[pb.TouchRequest]:
        """What to tell, if there is something and it is time; it counts as told.

        `opened`: the namespaces that have a number for who is told, by digest. Calls in
        others wait until they have one.
        """
        if not (self._chains or self._notes or self._sums):
            return []
        if not now and time.monotonic() < self._told_at + self._every_s:
            return []
        self._told_at = time.monotonic()
        reports = self._reports(opened, ADDING_WAIT_S if now else 0.0)
        messages = [pb.TouchRequest(keys=keys, hint=hint) for keys, hint in self._uses()]
        for at in range(0, len(reports), REPORTS_MAX):
            if at or not messages:
                messages.append(pb.TouchRequest())
            messages[-1].reports.extend(reports[at : at + REPORTS_MAX])
        return messages

    def namespaces(self) -> set[bytes]:
        """Digests of the namespaces that calls wait to be told of."""
        with self._added_up(0.0) as mine:
            return {digest for digest, _, _ in self._sums} if mine else set()

    def _uses(self) -> Iterator[tuple[list[bytes], pb.Hint | None]]:
        """Keys to touch, for each conversation those of its chains; the chain used last comes first."""
        by_conversation: dict[str, dict[bytes, None]] = {}
        left = KEYS_MAX
        while self._chains:
            newest, conversation = self._chains.pop()
            if len(newest) > left:
                continue  # it loses its recency, never its count
            keys = by_conversation.setdefault(conversation, {})
            left += len(keys)
            keys.update(dict.fromkeys(newest))
            left -= len(keys)
        for conversation, keys in by_conversation.items():
            yield list(keys), pb.Hint(conversation=conversation) if conversation else None

    def _reports(self, opened: Named, wait_s: float) -> list[pb.Report]:
        reports = []
        with self._added_up(wait_s) as mine:
            for key in list(self._sums) if mine else ():
                found = opened.get(key[0])
                if found is not None:
                    reports.append(self._sums.pop(key).report(*key[1:], found.namespace_id))
        return reports

    def _add_up(self) -> None:
        with self._added_up(0.0):
            pass

    @contextlib.contextmanager
    def _added_up(self, wait_s: float) -> Iterator[bool]:
        """Every note that was made is in the sums, which are ours meanwhile.

        False, and nothing is, where another thread has them, or this one in the middle of adding up.
        """
        if not acquired(self._adding, wait_s):
            yield False
            return
        try:
            for _ in range(len(self._notes)):
                operation, digest, tier, found, asked, seconds, busy = self._notes.popleft()
                total = self._sums.get((digest, operation, tier))
                if total is None:
                    total = self._sums[digest, operation, tier] = Sum()
                total.calls_hit += found > 0
                total.found += found
                total.missed += asked - found - busy
                total.busy += busy
                total.seconds += seconds
                total.latencies[bucket(seconds)] += 1
            yield True
        finally:
            self._adding.release()
