"""The way to the daemon of this machine: reads straight from shared memory, writes with one copy and one message.

    read    index -> copy -> check (rule 1); no call
    put     index -> slots granted ahead (or Reserve) -> copy -> Commit
    acquire Acquire -> views; Release when the last user of them is gone

Sessions come and go (keeper.py); each call captures one and uses only that.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvstore_client import stats
from kvstore_client.buffers import Bytes
from kvstore_client.index import SHARED_READS, IndexReader
from kvstore_client.keeper import Keeper
from kvstore_client.lease import Hold, Lease, Slots
from kvstore_client.results import TIER_NAMES, Health, Hint, Match, PutResult
from kvstore_client.session import Session
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

COMMIT_BLOCKS = 64
"""Blocks that slots are taken for together: what one Reserve may ask for."""

COMMIT_BYTES = 24 << 20
"""Copied before it is sent off to be committed, while the next is being copied: some milliseconds of memcpy."""

CLEAR_S = 30.0
"""Deadline of clear once the daemon has answered at all: a large namespace takes it long."""

OPERATIONS = {"Inspect": "inspect", "Evict": "evict", "EndSession": "end_session"}
"""Calls of the administration, as fields of Request and Reply."""

_TIER_OF = [""] * 16
for _flags in range(1, 16):
    _TIER_OF[_flags] = next(
        TIER_NAMES[tier]
        for bit, tier in (
            (shm.GPU, pb.TIER_GPU),
            (shm.HOST, pb.TIER_HOST),
            (shm.SSD, pb.TIER_SSD),
            (shm.REMOTE, pb.TIER_REMOTE),
        )
        if _flags & bit
    )


class LocalTransport:
    """The daemon of this machine, through whatever session there is."""

    def __init__(self, path: str, client: str, tenant: str, timeout_s: float, read_only: bool) -> None:
        """Tries to connect once; a daemon that is away is no error here (it may come), another version is."""
        self._keeper = Keeper(path, client, tenant, timeout_s, read_only)
        self._shared_reads = SHARED_READS
        self._now, self._need, self._opened = self._keeper.now, self._keeper.need, self._keeper.opened
        self.reads = self._keeper.reads

    @property
    def _session(self) -> Session | None:
        return self._keeper.session

    def open(self, ns: Identity) -> None:
        """Opens a namespace ahead of use, if the daemon is there."""
        self._keeper.known[ns.digest] = ns
        session = self._now()
        if session is not None:
            try:
                self._opened(session, ns)
            except Unavailable:
                self._keeper.wake()

    # -- reading

    def match(self, ns: Identity, keys: Sequence[bytes]) -> Match:
        session = self._now()
        if session is None or not keys:
            return Match(0, [])
        try:
            if not self._shared_reads:
                return self._match_by_call(session, ns, keys)
            count, flags = self._index(session).leading(keys, ns.block_bytes)
        except Unavailable:
            return Match(0, [])
        if session.hung_up():
            self._keeper.wake()
            return Match(0, [])
        return Match(count, [_TIER_OF[f & 15] for f in flags])

    def _match_by_call(self, session: Session, ns: Identity, keys: Sequence[bytes]) -> Match:
        number = self._opened(session, ns).namespace_id
        tiers: list[str] = []
        for at in range(0, len(keys), KEYS_MAX):
            part = keys[at : at + KEYS_MAX]
            reply = session.call(pb.Request(match=pb.MatchRequest(namespace_id=number, keys=part))).match
            tiers += [TIER_NAMES[tier] for tier in reply.tiers]
            if reply.blocks < len(part):
                break
        return Match(len(tiers), tiers)

    def get_into(self, ns: Identity, keys: Sequence[bytes], start: int, out: list[Bytes]) -> int:
        session = self._now()
        if session is None:
            return 0
        try:
            if not self._shared_reads:
                return self._get_by_lease(session, ns, keys, start, out)
            copied = self._copy_out(session, self._index(session), ns, keys, start, out)
            if copied < 0:  # the index moved meanwhile: nothing counts, once more with the new one
                copied = max(self._copy_out(session, self._index(session), ns, keys, start, out), 0)
        except Unavailable:
            self._keeper.wake()
            return 0
        if copied:
            session.reads.used(keys[: start + copied])
        return copied

    def _copy_out(
        self, session: Session, index: IndexReader, ns: Identity, keys: Sequence[bytes], start: int, out: list[Bytes]
    ) -> int:
        """Rule 1: number, fields, copy; then number, header and socket as before. -1 where the index moved."""
        find, mappings, length = index.find, session.mappings, ns.block_bytes
        numbers = index.numbers
        read: list[tuple[int, int]] = []
        for key, target in zip(keys[start:] if start else keys, out, strict=True):
            entry = find(key)
            if entry is None:
                break
            word, sequence, segment, found_length, offset, flags = entry
            if found_length != length or not flags & shm.HOST:
                break
            mapping = mappings.get(segment)
            if mapping is None:
                mapping = session.mapping(segment) if numbers[word] == sequence else None
                if mapping is None:
                    break
            if offset + length > mapping.size_bytes:
                break  # fields of two writes: the check below would refuse them too
            np.copyto(target, mapping.bytes[offset : offset + length])
            read.append((word, sequence))
        good = len(read)
        for i, (word, sequence) in enumerate(read):
            if numbers[word] != sequence:
                good = i
                break
        if session.hung_up():
            self._keeper.wake()
            return 0
        return good if index.current() else -1

    def _get_by_lease(self, session: Session, ns: Identity, keys: Sequence[bytes], start: int, out: list[Bytes]) -> int:
        """Where shared memory alone cannot be trusted: hold, copy, let go."""
        copied = 0
        for at in range(start, len(keys), COMMIT_BLOCKS):
            part = keys[at : at + COMMIT_BLOCKS]
            with self._acquire(session, ns, part, None) as lease:
                for view in lease.views:
                    np.copyto(out[copied], np.frombuffer(view, np.uint8))
                    copied += 1
                if len(lease) < len(part):
                    break
        return copied

    def _index(self, session: Session) -> IndexReader:
        index = session.index
        if not index.current():
            session.refresh_index()
            index = session.index
        return index

    def acquire(self, ns: Identity, keys: Sequence[bytes], timeout_s: float) -> Lease:
        session = self._now()
        if session is None or not keys:
            return Lease(list, 0)
        try:
            return self._acquire(session, ns, keys[:KEYS_MAX], timeout_s)
        except Unavailable:
            self._keeper.wake()
            return Lease(list, 0)

    def _acquire(self, session: Session, ns: Identity, keys: Sequence[bytes], timeout_s: float | None) -> Lease:
        opened = self._opened(session, ns)
        request = pb.Request()
        request.acquire.namespace_id = opened.namespace_id
        request.acquire.keys.extend(keys)
        slots, hold = session.acquire(request, timeout_s)

        def views() -> list[memoryview]:
            return _views(session, slots, opened.slot_bytes, ns.block_bytes, hold, writable=False)

        return Lease(views, len(slots))

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
        existing = len(blocks) - len(todo)
        if existing:
            if not todo and session.hung_up():  # what was found is the index of a daemon that is gone
                self._keeper.wake()
                return PutResult(0, 0, len(blocks), Unavailable(session.dead))
            session.reads.used(keys, hint.conversation if hint is not None else "")
            if durable and not todo:
                session.call(commit_request(opened.namespace_id, keys, [], [], hint, True, 0))
        stored = 0
        error: KVStoreError | None = None
        while todo and error is None:
            part, todo = todo[:COMMIT_BLOCKS], todo[COMMIT_BLOCKS:]
            done, known, error, left = self._put_part(session, ns, opened, keys, start, blocks, part, hint, durable)
            stored, existing, todo = stored + done, existing + known, left + todo
        if isinstance(error, Unavailable):
            existing = 0
        rejected = len(blocks) - stored - existing
        if isinstance(error, ResourceExhausted) and not stored and not existing:
            raise error
        return PutResult(stored, existing, rejected, error)

    def _absent(self, session: Session, ns: Identity, keys: Sequence[bytes], start: int) -> list[int]:
        """Places in `keys` from `start` whose blocks are not there."""
        index, length = self._index(session), ns.block_bytes
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
    ) -> tuple[int, int, KVStoreError | None, list[int]]:
        """Stores what it finds slots for: blocks stored, found to exist, why it stopped, what it did not get to."""
        slots: list[int] = []
        try:
            slots = session.take_granted(ns.block_bytes, len(part))
            if len(slots) < len(part):
                slots = self._reserve_more(session, opened, slots, len(part))
            part, left = part[: len(slots)], part[len(slots) :]
            session.attach(slot >> 32 for slot in slots)

            def steps() -> Iterator[tuple[pb.Request, list[int]]]:
                size = max(COMMIT_BYTES // ns.block_bytes, 1)
                for at in range(0, len(part), size):
                    places, mine = part[at : at + size], slots[at : at + size]
                    for slot, i in zip(mine, places, strict=True):
                        np.copyto(_slot_bytes(session, slot, opened.slot_bytes, ns.block_bytes), blocks[i - start])
                    want = min(opened.grant_max, len(part)) if at + size >= len(part) else 0
                    yield commit_request(opened.namespace_id, keys, places, mine, hint, durable, want), mine

            results = session.commit(steps(), ns.block_bytes, reuse=True)
        except (Unavailable, ResourceExhausted, FailedPrecondition) as e:
            session.give_up(slots)
            if isinstance(e, FailedPrecondition):
                raise
            self._keeper.wake()
            return 0, 0, e, []
        except BaseException:
            session.give_up(slots)
            raise
        return results.count(pb.STORED), results.count(pb.EXISTS), None, left

    @staticmethod
    def _reserve_more(session: Session, opened: pb.OpenNamespaceReply, slots: list[int], wanted: int) -> list[int]:
        """Asks for what the grants did not cover; some slots are enough to go on with."""
        try:
            return slots + session.reserve(opened.namespace_id, min(wanted - len(slots), opened.reserve_max))
        except ResourceExhausted:
            if not slots:
                raise
            return slots

    def reserve(self, ns: Identity, count: int) -> Slots:
        self._now()
        session = self._keeper.connect()
        opened = self._opened(session, ns)
        slots: list[int] = []
        try:
            while len(slots) < count:
                slots += session.reserve(opened.namespace_id, min(count - len(slots), opened.reserve_max))
            session.attach(dict.fromkeys(map(shm.ref_segment, slots)))
        except BaseException:
            session.give_up(slots)
            raise
        uncommitted = [[slot] for slot in slots]
        views = [
            _views(session, own, opened.slot_bytes, ns.block_bytes, session.write_hold(own), writable=True)[0]
            for slot, own in zip(slots, uncommitted, strict=True)
        ]

        def commit(keys: Sequence[bytes], start: int, hint: Hint | None, durable: bool) -> PutResult:
            part = list(range(start, len(keys)))
            results: list[int] = []
            for at in range(0, len(part), COMMIT_BLOCKS):
                some = part[at : at + COMMIT_BLOCKS]
                mine = slots[at : at + len(some)]
                request = commit_request(opened.namespace_id, keys, some, mine, hint, durable, 0)
                results += session.commit([(request, mine)], ns.block_bytes, reuse=False)
                for own, result in zip(uncommitted[at:], results[at:], strict=False):
                    if result == pb.STORED:
                        own.clear()
            stored, existing = results.count(pb.STORED), results.count(pb.EXISTS)
            return PutResult(stored, existing, len(results) - stored - existing)

        return Slots(views, commit)

    # -- management

    def remove(self, ns: Identity, keys: Sequence[bytes]) -> int:
        return self._each(ns, keys, lambda n, part: pb.Request(remove=pb.RemoveRequest(namespace_id=n, keys=part)))

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
            done += reply.remove.removed + reply.pin.pinned + reply.unpin.unpinned
        return done

    def clear(self, ns: Identity) -> int:
        def call(session: Session) -> pb.Reply:
            number = session.call(pb.Request(open_namespace=ns.opening())).open_namespace.namespace_id
            return session.call(pb.Request(clear=pb.ClearRequest(namespace_id=number)), CLEAR_S)

        return self._keeper.alone(call).clear.removed

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
        self._keeper.close()


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


def _slot_bytes(session: Session, slot: int, slot_bytes: int, block_bytes: int) -> Bytes:
    mapping = session.mappings.get(slot >> 32)  # attached before; here the lock is held, which attaching waits for
    if mapping is None:
        raise Unavailable(f"segment {slot >> 32} of a granted slot is gone")
    offset = shm.ref_slot(slot) * slot_bytes
    return mapping.bytes[offset : offset + block_bytes]


def _views(
    session: Session, slots: list[int], slot_bytes: int, block_bytes: int, hold: Hold, *, writable: bool
) -> list[memoryview]:
    """Views of slots; each, and whatever is made from it, keeps the hold and the mapping alive.

    They are slices of one exporter a segment, made for this hold alone.
    """
    whole: dict[int, memoryview] = {}
    for number in {slot >> 32 for slot in slots}:
        mapping = session.mapping(number)
        if mapping is None:
            raise Unavailable(f"segment {number} of a held slot is gone")
        exporter = mapping.exporter(0, mapping.size_bytes)
        exporter.hold = hold
        # Through an array, which the garbage collector does not look into: it would end the hold of a view in a
        # garbage cycle before the finalizers that may still use the view.
        view = np.frombuffer(exporter, np.uint8).data
        whole[number] = view if writable else view.toreadonly()
    views = []
    for slot in slots:
        at = (slot & 0xFFFFFFFF) * slot_bytes
        views.append(whole[slot >> 32][at : at + block_bytes])
    return views
