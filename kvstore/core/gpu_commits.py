"""Commits whose copies run on the client's own stream: each waits for its event, and only then are its blocks visible.

A client copies into slots that it was granted, records an interprocess event behind the copies
and commits with it. The commit is answered when it is over, not before: acknowledged means
visible, as in memory, and a client that wants to go on meanwhile does so without the answer.

Rules
  - From its Commit on a slot is the daemon's to give back, whatever the answer: a client neither
    aborts nor commits it again, but for what is answered EXISTS or REJECTED, which it keeps, and
    what is in the next rule.
  - A slot whose event has not come may still be written to. It is free again when the event has
    come after all, or when the process is gone and the device says that nothing of it runs any
    more (`AwaitQuiet`); by no clock, and not by an event that failed. Where that failed, its client
    alone knows by a mark of its own that the copies have ended, and may abort it then.
  - What an event says counts only while its session lives: CUDA does not define what one of a
    dead process says.
  - A removal wins over a commit that waits: the block is as if it had been stored and removed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.core import refusals
from kvstore.core.gpu_jobs import StopWatching, WatchEvent
from kvstore.core.gpu_link import GpuLink
from kvstore.core.holds import Namespace, Session
from kvstore.core.loads import DONE, FAILED, RUNNING
from kvstore.core.store import STORED
from kvstored.v1.errors import FailedPrecondition, ResourceExhausted

EVENT_S = 30.0
"""A commit whose event has not come by then has failed; its slots stay as they are until the event comes."""

PENDING_MAX = 4096
"""Events of one device that are watched at a time, those of commits that have ended already included."""

PENDING_OF_SESSION_MAX = 256
"""The same of one session."""


@dataclass(eq=False, slots=True)
class PendingCommit:
    """One Commit. `ended` is called once, when `state` is final; it may be before the call returns."""

    number: int
    session: Session
    """Of the device's store."""
    namespace: Namespace
    """As memory has it."""
    keys: list[bytes]
    refs: list[int]
    parents: list[bytes]
    depths: list[int]
    ttl_s: float
    conversation: int
    deadline: float
    ended: Callable[["PendingCommit"], None]
    state: str = RUNNING
    why: str = ""
    """Of one that failed."""
    results: list[int] = field(default_factory=list)
    """Of one that is done: as the contract's CommitResult, one for each key."""
    removed: set[bytes] = field(default_factory=set)
    """Keys that were removed meanwhile."""


class PendingCommits:
    """Of one device."""

    def __init__(self, link: GpuLink, stored: Callable[[Sequence[int]], None]) -> None:
        """`stored` is told the rows of blocks that have become visible."""
        self._link = link
        self._stored = stored
        self.watched: dict[int, PendingCommit] = {}
        """By the number of their event's job, until its report; those that have failed meanwhile among them."""
        self._of: dict[int, int] = {}
        """Session of the device's store -> how many of `watched` are its."""
        self._refs: set[int] = set()
        """Slots of `watched`."""
        self.spoiled: dict[int, set[int]] = {}
        """Session -> its slots that only its Abort or its end frees: their event failed."""
        self.orphaned: dict[int, set[int]] = {}
        """Session that has ended -> its slots whose event had not come."""
        self._given_up: set[int] = set()
        """Events whose report means nothing any more."""

    @property
    def pending(self) -> int:
        """Commits that have not ended."""
        return sum(commit.state == RUNNING for commit in self.watched.values())

    # -- calls

    def commit(
        self,
        session: Session,
        namespace: Namespace,
        keys: Sequence[bytes],
        refs: Sequence[int],
        parents: Sequence[bytes],
        depths: Sequence[int],
        event: Any,
        now: float,
        ended: Callable[[PendingCommit], None],
        ttl_s: float = 0.0,
        conversation: str = "",
    ) -> PendingCommit:
        """Takes a Commit; `event` None: the client has waited for its copies, and it is over at once.

        Raises what `Store.commit` does, FailedPrecondition for a slot that is in another Commit, and
        ResourceExhausted for too many; then nothing has changed.
        """
        link = self._link
        device = link.device_namespace(namespace)
        pool = link.store.pool(device)
        refusals.check_commit(session, link.store.segments, pool, keys, refs, parents, depths, ttl_s)
        self.check_own(session, refs)
        if event is not None and len(self.watched) >= PENDING_MAX:
            raise ResourceExhausted(f"{PENDING_MAX} commits wait for their events already; try again")
        if event is not None and self._of.get(session.id, 0) >= PENDING_OF_SESSION_MAX:
            raise ResourceExhausted(f"{PENDING_OF_SESSION_MAX} commits of this session wait for their events already")
        made = PendingCommit(
            link.number(),
            session,
            namespace,
            list(keys),
            list(refs),
            list(parents),
            list(depths),
            ttl_s,
            link.memory.conversations.seen(namespace.tenant.name, conversation),
            now + EVENT_S,
            ended,
        )
        if event is None:
            self._make_visible(made, now)
            return made
        self.watched[made.number] = made
        self._of[session.id] = self._of.get(session.id, 0) + 1
        self._refs.update(refs)
        link.jobs.append(WatchEvent(made.number, event))
        return made

    def check_own(self, session: Session, refs: Sequence[int]) -> None:
        """Raises FailedPrecondition for slots that a Commit has taken from this session."""
        self._check_not_waiting(refs)
        spoiled = self.spoiled.get(session.id, set())
        for ref in refs:
            if ref in spoiled:
                raise FailedPrecondition(
                    f"slot {ref:#x} is in a commit whose event failed: Abort it once its copies have ended"
                )

    def _check_not_waiting(self, refs: Sequence[int]) -> None:
        for ref in refs:
            if ref in self._refs:
                raise FailedPrecondition(f"slot {ref:#x} is in a commit whose event has not come")

    def abort(self, session: Session, refs: Sequence[int]) -> None:
        """Its client says that nothing writes to these any more, and they are free; also those whose event failed.

        Raises FailedPrecondition for slots in a Commit whose event is watched still, and what `Store.abort` does.
        """
        self._check_not_waiting(refs)
        self._link.store.abort(session, refs)
        spoiled = self.spoiled.get(session.id)
        if spoiled is not None:
            spoiled.difference_update(refs)
            if not spoiled:
                del self.spoiled[session.id]

    def taken_from(self, session: Session) -> set[int]:
        """Slots granted to a session that are in a Commit of it, or in one whose event failed."""
        watched = (ref for commit in self.watched.values() if commit.session is session for ref in commit.refs)
        return self.spoiled.get(session.id, set()).union(watched)

    def remove(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """These blocks do not become visible by a commit that waits; how many there are."""
        wanted, removed = set(keys), 0
        for commit in self._running(namespace):
            found = wanted.intersection(commit.keys) - commit.removed
            commit.removed |= found
            removed += len(found)
        self._link.counts.removed_pending += removed
        return removed

    def clear(self, namespace: Namespace) -> int:
        """The same of all blocks of a namespace."""
        removed = 0
        for commit in self._running(namespace):
            removed += len(set(commit.keys) - commit.removed)
            commit.removed.update(commit.keys)
        self._link.counts.removed_pending += removed
        return removed

    def _running(self, namespace: Namespace) -> list[PendingCommit]:
        return [c for c in self.watched.values() if c.namespace is namespace and c.state == RUNNING]

    # -- reports, time, ends

    def event_ended(self, number: int, error: str, now: float) -> None:
        """The report of a WatchEvent: the event is complete, or `error`."""
        if number in self._given_up:
            self._given_up.remove(number)
            return
        commit = self._unwatch(number)
        if error:
            self.spoiled.setdefault(commit.session.id, set()).update(commit.refs)
            if commit.state == RUNNING:
                self._link.counts.events_failed += 1
                self._fail(commit, f"its event failed: {error}")
        elif commit.state == RUNNING:
            self._make_visible(commit, now)
        else:  # nothing writes there any more, and its client was told that it has failed
            self._link.store.abort(commit.session, commit.refs)

    def expire(self, now: float) -> None:
        """Ends commits whose event takes too long; it is watched on."""
        for commit in list(self.watched.values()):
            if commit.deadline > now:
                break  # the others came later
            if commit.state == RUNNING:
                self._link.counts.events_late += 1
                self._fail(commit, f"its event has not come within {EVENT_S:.0f} s")

    def session_ended(self, session: Session) -> None:
        """Its socket has hung up: none of its commits becomes visible, and its slots are in quarantine."""
        for number in [number for number, commit in self.watched.items() if commit.session is session]:
            commit = self._give_up(number)
            self._link.jobs.append(StopWatching(number))
            self.orphaned.setdefault(session.id, set()).update(commit.refs)
            if commit.state == RUNNING:
                self._fail(commit, "its session ended before its event came")

    def session_forgotten(self, session: Session) -> None:
        """Its process is gone, and nothing of it runs: its slots are free."""
        self.spoiled.pop(session.id, None)
        self.orphaned.pop(session.id, None)

    def kept_from(self, old: Session, named: set[int]) -> set[int]:
        """Slots of a session that has ended which its process may write to, whether it names them as its own or not.

        Named, and not of an event that failed, a slot is its own again: it uses it after its copies have ended.
        """
        return self.spoiled.get(old.id, set()) | (self.orphaned.get(old.id, set()) - named)

    def inherit(self, heir: Session, kept: set[int]) -> None:
        """These have come to the next session of the same process."""
        if kept:
            self.spoiled.setdefault(heir.id, set()).update(kept)

    def fail_all(self, why: str) -> None:
        """The device is lost: there is nothing that could become visible."""
        for number in list(self.watched):
            commit = self._give_up(number)
            if commit.state == RUNNING:
                self._fail(commit, why)
        self.spoiled.clear()
        self.orphaned.clear()

    def never_watched(self, numbers: Sequence[int]) -> None:
        """These jobs were not handed out: no report of theirs comes."""
        self._given_up.difference_update(numbers)

    def _give_up(self, number: int) -> PendingCommit:
        self._given_up.add(number)
        return self._unwatch(number)

    def _unwatch(self, number: int) -> PendingCommit:
        commit = self.watched.pop(number)
        self._refs.difference_update(commit.refs)
        self._of[commit.session.id] -= 1
        if not self._of[commit.session.id]:
            del self._of[commit.session.id]
        return commit

    def _fail(self, commit: PendingCommit, why: str) -> None:
        self._link.counts.commits_failed += 1
        commit.state, commit.why = FAILED, why
        commit.ended(commit)

    def _make_visible(self, commit: PendingCommit, now: float) -> None:
        """Its copies are whole: what has not been removed is there for every reader of the device."""
        link, store, removed = self._link, self._link.store, commit.removed
        device = link.device_namespace(commit.namespace)
        kept = [at for at, key in enumerate(commit.keys) if key not in removed]
        commit.results = [STORED] * len(commit.keys)
        results, new, known = store.place(
            commit.session,
            device,
            [commit.keys[at] for at in kept],
            [commit.refs[at] for at in kept],
            [commit.parents[at] for at in kept],
            [commit.depths[at] for at in kept],
            now,
            commit.ttl_s,
        )
        for at, result in zip(kept, results, strict=True):
            commit.results[at] = result
        store.abort(commit.session, [ref for key, ref in zip(commit.keys, commit.refs, strict=True) if key in removed])
        for row in (*new, *known) if commit.conversation else new:
            store.table.conversation[row] = commit.conversation
        store.counts.stored += len(new)
        store.counts.existing += len(known)
        store.counts.rejected += len(results) - len(new) - len(known)
        link.counts.committed += len(new)
        link.counts.committed_bytes += len(new) * device.block_bytes
        self._stored(new)
        commit.state = DONE
        commit.ended(commit)
