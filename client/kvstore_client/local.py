"""The way to the daemon of this machine: reads straight from shared memory, writes with one copy and one message.

    read    local_reads.py
    put     index -> slots granted ahead (or Reserve) -> copy -> Commit

Sessions come and go (keeper.py); each call captures one and uses only that.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvstore_client import stats
from kvstore_client.buffers import Bytes
from kvstore_client.lease import Slots
from kvstore_client.local_reads import LocalReads, held_views, slot_view
from kvstore_client.removals import Removals
from kvstore_client.results import Health, Hint, PutResult
from kvstore_client.session import Session
from kvstore_client.tickets import Saving
from kvstore_client.transport import Identity
from kvstore_client.waiting import InTheMiddle
from kvstored.v1 import KEYS_MAX, shm
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    KVStoreError,
    ResourceExhausted,
    Unavailable,
)

log = logging.getLogger("kvstore_client")

COMMIT_BLOCKS = 64
"""Blocks that slots are taken for together: what one Reserve may ask for."""

COMMIT_BYTES = 24 << 20
"""Copied before it is sent off to be committed, while the next is being copied: some milliseconds of memcpy."""

CLEAR_S = 30.0
"""Deadline of clear once the daemon has answered at all: a large namespace takes it long."""

OPERATIONS = {
    "Inspect": "inspect",
    "Evict": "evict",
    "EndSession": "end_session",
    "Flush": "flush",
    "Verify": "verify",
}
"""Calls of the administration, as fields of Request and Reply."""


class LocalTransport(LocalReads):
    """The daemon of this machine, through whatever session there is: what is read, and all the rest."""

    def __init__(self, path: str, client: str, tenant: str, timeout_s: float, read_only: bool) -> None:
        """As LocalReads."""
        super().__init__(path, client, tenant, timeout_s, read_only)
        self._removals = Removals()

    @property
    def connected(self) -> bool:
        session = self._session
        if session is not None and not session.hung_up():
            return True
        self._keeper.wake()
        return False

    def open(self, ns: Identity, ahead: bool) -> None:
        """Makes a namespace known; `ahead`: opens it too, if the daemon is there and has room for one more."""
        self._keeper.known[ns.digest] = ns
        session = self._now() if ahead else None
        if session is not None:
            try:
                self._opened(session, ns)
            except Unavailable:
                self._keeper.wake()
            except ResourceExhausted as e:
                log.warning("%s: nothing of this one is stored until there is room", e)

    # -- writing

    def put(
        self, ns: Identity, keys: Sequence[bytes], start: int, blocks: list[Bytes], hint: Hint | None, durable: bool
    ) -> PutResult:
        session = self._now()
        if session is None:
            return PutResult(0, 0, len(blocks), Unavailable(self._keeper.down or "the daemon went away"))
        try:
            todo = self._absent(session, ns, keys, start)
            opened = self._opened(session, ns)
        except Unavailable as e:
            self._keeper.wake()
            return PutResult(0, 0, len(blocks), e)
        saving = Saving(session, len(blocks) * ns.block_bytes, opened.slot_bytes) if durable else None
        at_once = COMMIT_BLOCKS if saving is None else min(COMMIT_BLOCKS, saving.portion)
        existing = len(blocks) - len(todo)
        if existing:
            if not todo and session.hung_up():  # what was found is the index of a daemon that is gone
                self._keeper.wake()
                return PutResult(0, 0, len(blocks), Unavailable(session.dead))
            session.reads.used(keys, hint.conversation if hint is not None else "")
        stored = 0
        error: KVStoreError | None = None
        try:
            if saving is not None and existing:
                absent = set(todo)
                saving.ask(opened.namespace_id, [keys[i] for i in range(start, len(keys)) if i not in absent])
        except Unavailable as e:
            self._keeper.wake()
            return PutResult(0, 0, len(blocks), e)
        while todo and error is None:
            part, todo = todo[:at_once], todo[at_once:]
            replies, error, left = self._put_part(session, ns, opened, keys, start, blocks, part, hint, durable)
            results = [result for reply in replies for result in reply.results]
            stored, existing, todo = stored + results.count(pb.STORED), existing + results.count(pb.EXISTS), left + todo
            if saving is not None:
                saving.answered(replies, len(part))
        if isinstance(error, Unavailable):
            existing = 0
        rejected = len(blocks) - stored - existing
        if isinstance(error, ResourceExhausted) and not stored and not existing:
            raise error
        if saving is not None:
            error = error or saving.wait(opened.namespace_id, keys[start:])
        return PutResult(stored, existing, rejected, error)

    def _absent(self, session: Session, ns: Identity, keys: Sequence[bytes], start: int) -> list[int]:
        """Places in `keys` from `start` whose blocks are not there."""
        index, length = self.index_of(session), ns.block_bytes
        find = index.find
        absent = []
        for i in range(start, len(keys)):
            entry = find(keys[i])
            if entry is None or entry[3] != length:
                absent.append(i)
        if len(absent) < len(keys) - start and not index.current():
            return self._absent(session, ns, keys, start)  # found in an index that had moved
        return absent

    def _put_part(
        self,
        session: Session,
        ns: Identity,
        opened: pb.OpenNamespaceReply,
        keys: Sequence[bytes],
        start: int,
        blocks: list[Bytes],
        part: list[int],
        hint: Hint | None,
        durable: bool,
    ) -> tuple[list[pb.CommitReply], KVStoreError | None, list[int]]:
        """Stores what it finds slots for: what the daemon answered, why it stopped, what it did not get to."""
        slots: list[int] = []
        try:
            session.take_granted(ns.block_bytes, len(part), slots)
            reserve_more(session, opened, slots, len(part))
            part, left = part[: len(slots)], part[len(slots) :]
            session.attach(slot >> 32 for slot in slots)

            def steps() -> Iterator[tuple[pb.Request, list[int]]]:
                size = max(COMMIT_BYTES // ns.block_bytes, 1)
                for at in range(0, len(part), size):
                    places, mine = part[at : at + size], slots[at : at + size]
                    for slot, i in zip(mine, places, strict=True):
                        np.copyto(slot_view(session, slot, opened.slot_bytes, ns.block_bytes), blocks[i - start])
                    want = min(opened.grant_max, len(part)) if at + size >= len(part) else 0
                    yield commit_request(opened.namespace_id, keys, places, mine, hint, durable, want), mine

            replies = session.commit(steps(), ns.block_bytes, reuse=True)
        except (Unavailable, ResourceExhausted, FailedPrecondition) as e:
            session.give_up(slots)
            if isinstance(e, FailedPrecondition):
                raise
            self._keeper.wake()
            return [], e, []
        except BaseException:
            session.give_up(slots)
            raise
        return replies, None, left

    def reserve(self, ns: Identity, count: int) -> Slots:
        self._now()
        session = self._keeper.connect()
        opened = self._opened(session, ns)
        slots: list[int] = []
        try:
            while len(slots) < count:
                session.reserve(opened.namespace_id, min(count - len(slots), opened.reserve_max), slots)
            session.attach(dict.fromkeys(map(shm.ref_segment, slots)))
            views = [
                held_views(session, own, opened.slot_bytes, ns.block_bytes, session.write_hold(own), writable=True)[0]
                for own in ([slot] for slot in slots)
            ]
        except BaseException:
            session.give_up(slots)
            raise

        def commit(keys: Sequence[bytes], start: int, hint: Hint | None, durable: bool) -> PutResult:
            part = list(range(start, len(keys)))
            results: list[int] = []
            saving = Saving(session, len(part) * ns.block_bytes, opened.slot_bytes) if durable else None
            for at in range(0, len(part), COMMIT_BLOCKS):
                some = part[at : at + COMMIT_BLOCKS]
                mine = slots[at : at + len(some)]
                request = commit_request(opened.namespace_id, keys, some, mine, hint, durable, 0)
                replies = session.commit([(request, mine)], ns.block_bytes, reuse=False)
                if saving is not None:
                    saving.answered(replies, len(some))
                results += [result for reply in replies for result in reply.results]
            stored, existing = results.count(pb.STORED), results.count(pb.EXISTS)
            there = [keys[i] for i, result in zip(part, results, strict=True) if result != pb.REJECTED]
            error = saving.wait(opened.namespace_id, there) if saving is not None else None
            return PutResult(stored, existing, len(results) - stored - existing, error)

        return Slots(views, commit)

    # -- management

    def remove(self, ns: Identity, keys: Sequence[bytes]) -> int:
        def call(session: Session, part: Sequence[bytes]) -> tuple[Session, pb.RemoveReply]:
            number = self._opened(session, ns).namespace_id
            request = pb.RemoveRequest(namespace_id=number, keys=part, ticket=True)
            return session, session.call(pb.Request(remove=request)).remove

        parts = [keys[at : at + KEYS_MAX] for at in range(0, len(keys), KEYS_MAX)]
        answers = [self._need(partial(call, part=part)) for part in parts]
        for session, reply in answers:
            self._removals.wait(session, reply)
        return sum(reply.removed for _, reply in answers)

    def pin(self, ns: Identity, keys: Sequence[bytes], ttl_s: float) -> int:
        return self._each(
            ns, keys, lambda n, part: pb.Request(pin=pb.PinRequest(namespace_id=n, keys=part, ttl_s=ttl_s))
        )

    def unpin(self, ns: Identity, keys: Sequence[bytes]) -> int:
        return self._each(ns, keys, lambda n, part: pb.Request(unpin=pb.UnpinRequest(namespace_id=n, keys=part)))

    def _each(self, ns: Identity, keys: Sequence[bytes], request: Callable[[int, Sequence[bytes]], pb.Request]) -> int:
        """One call for as many keys as a message takes; answers the sum of what they did."""
        done = 0
        for at in range(0, len(keys), KEYS_MAX):
            part = keys[at : at + KEYS_MAX]

            def call(session: Session, part: Sequence[bytes] = part) -> pb.Reply:
                return session.call(request(self._opened(session, ns).namespace_id, part))

            reply = self._need(call)
            done += reply.pin.pinned + reply.unpin.unpinned
        return done

    def clear(self, ns: Identity) -> int:
        def call(session: Session) -> pb.Reply:
            number = session.call(pb.Request(open_namespace=ns.opening())).open_namespace.namespace_id
            return session.call(pb.Request(clear=pb.ClearRequest(namespace_id=number)), CLEAR_S)

        reply = self._keeper.alone(call).clear
        self._removals.said(reply.not_on_disk_yet)
        return reply.removed

    def administer(self, name: str, request: Any, timeout_s: float) -> Any:
        """A call of the administration, by its name in the contract; on a session of its own, and never twice."""
        op = OPERATIONS[name]
        reply = self._keeper.alone(lambda session: session.call(pb.Request(**{op: request}), timeout_s))
        return getattr(reply, op)

    def stats(self) -> dict[str, Any]:
        request = pb.Request(stats=pb.StatsRequest())
        session = self._now()
        if session is not None:
            self._keeper.tell(session)
        return stats.as_dict(self._need(lambda session: session.call(request)).stats)

    def health(self) -> Health:
        try:
            reply = self._need(lambda session: session.call(pb.Request(health=pb.HealthRequest()))).health
        except InTheMiddle as e:  # the daemon was not asked, so nothing is known but whether the connection stands
            session = self._session
            return Health(session is not None and not session.hung_up(), healthy=False, problems=[str(e)])
        except (Unavailable, ResourceExhausted, DeadlineExceeded) as e:
            return Health(reachable=False, healthy=False, problems=[str(e)])
        return Health(True, reply.healthy, list(reply.problems), reply.version, reply.uptime_s)

    def close(self) -> None:
        """Gives back what is held, tells what was read, ends the session. Views that live keep theirs until they go."""
        if self._pools is not None:
            self._pools.close()
        self._keeper.close()

    def device_state(self) -> dict[str, Any]:
        """What this process does with devices; empty where it has not used one."""
        return self._pools.state() if self._pools is not None else {}


def reserve_more(session: Session, opened: pb.OpenNamespaceReply, slots: list[int], wanted: int) -> None:
    """Adds what was not granted ahead; some slots are enough to go on with."""
    if len(slots) < wanted:
        try:
            session.reserve(opened.namespace_id, min(wanted - len(slots), opened.reserve_max), slots)
        except ResourceExhausted:
            if not slots:
                raise


def commit_request(
    number: int,
    keys: Sequence[bytes],
    places: list[int],
    slots: list[int],
    hint: Hint | None,
    durable: bool,
    want: int,
) -> pb.Request:
    """A Commit of keys[i] for i in `places`, each with its parent in the chain."""
    request = pb.Request()  # filled in place: a message given to a constructor is copied
    commit = request.commit
    commit.namespace_id = number
    commit.keys.extend([keys[i] for i in places])
    commit.slots.extend(slots)
    commit.parents.extend([keys[i - 1] if i else b"" for i in places])
    commit.depths.extend(places)
    commit.want = want
    commit.durable = durable
    if hint is not None:
        commit.hint.CopyFrom(hint.message())
    return request
