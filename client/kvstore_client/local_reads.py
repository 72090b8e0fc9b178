"""Reads of the daemon on this machine: straight from shared memory, and what is not there by a call first.

    get_into  index -> copy -> check (rule 1); no call. Where memory ends and the SSD goes on: Load -> copy -> Release
    acquire   Acquire (and Load) -> views; Release when the last user of them is gone
    prefetch  nothing, where all is in memory; else Prefetch, and Ticket until it ends

Each call captures one session and uses only that.
"""

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvstore_client.buffers import Bytes
from kvstore_client.index import SHARED_READS, IndexReader
from kvstore_client.keeper import Keeper
from kvstore_client.lease import Hold, Lease
from kvstore_client.loads import BYTES_PER_S, DEADLINE_MS_MAX, PART_SHARE, Loads, answer_s
from kvstore_client.reads import HOST
from kvstore_client.results import TIER_NAMES, Copied, Match
from kvstore_client.session import Session
from kvstore_client.tickets import STATES, Ticket, of_session
from kvstore_client.transport import Identity
from kvstored.v1 import KEYS_MAX, shm
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, ResourceExhausted, Unavailable

if TYPE_CHECKING:
    from kvstore_client.pools import Pools

log = logging.getLogger("kvstore_client")

LEASE_BLOCKS = 64
"""Blocks held together where reading is by lease."""

MOVES_MAX = 3
"""Looks at a block that is there, and has left memory or come to it between two questions, before it is a miss."""

IN_MEMORY = ("gpu", "host")

TIER_OF = [""] * 16
for _flags in range(1, 16):
    TIER_OF[_flags] = next(
        TIER_NAMES[tier]
        for bit, tier in (
            (shm.GPU, pb.TIER_GPU),
            (shm.HOST, pb.TIER_HOST),
            (shm.SSD, pb.TIER_SSD),
            (shm.REMOTE, pb.TIER_REMOTE),
        )
        if _flags & bit
    )


Held = tuple[list[int], Hold]
"""Slots that are leased, and what keeps them."""


class LocalReads:
    """What can be read through whatever session there is."""

    def __init__(self, path: str, client: str, tenant: str, timeout_s: float, read_only: bool) -> None:
        """Tries to connect once; a daemon that is away is no error here (it may come), another version is."""
        self._keeper = Keeper(path, client, tenant, timeout_s, read_only)
        self._shared_reads = SHARED_READS
        self._now, self._need, self._opened = self._keeper.now, self._keeper.need, self._keeper.opened
        self.reads = self._keeper.reads
        self.session_now, self.opened = self._keeper.now, self._keeper.opened
        self.timeout_s, self.shared_reads = timeout_s, SHARED_READS
        self._making = threading.Lock()
        self._pools: Pools | None = None

    @property
    def down(self) -> str:
        """Why there is no session, when there is none."""
        return self._keeper.down

    @property
    def pools(self) -> "Pools":
        """Memory of devices, from its first use on. Imports what the others do without."""
        with self._making:
            if self._pools is None:
                from kvstore_client.pools import Pools

                self._pools = Pools(self._keeper)
                weakref.finalize(self, self._pools.abandon).atexit = False
            return self._pools

    @property
    def uses_devices(self) -> bool:
        """Whether blocks on the daemon's devices can be read in this process, as far as is known."""
        pools = self._pools
        return pools is not None and pools.known_to_work

    @property
    def _session(self) -> Session | None:
        return self._keeper.session

    def match(self, ns: Identity, keys: Sequence[bytes], wait: bool) -> Match:
        session = self._now()
        if session is None or not keys:
            return Match(0, [])
        if not wait and not (self._shared_reads and session.index.current()):
            self._keeper.wake()  # which maps the index that is there now
            return Match(0, [])
        try:
            if not self._shared_reads:
                return self._match_by_call(session, ns, keys)
            count, flags = self.index_of(session).leading(keys, ns.block_bytes)
        except Unavailable:
            return Match(0, [])
        if session.hung_up():
            self._keeper.wake()
            return Match(0, [])
        if not self.uses_devices:  # to us they are no faster than the copy in memory, if there is one
            flags = [f & ~shm.GPU if f & shm.HOST else f for f in flags]
        return Match(count, [TIER_OF[f & 15] for f in flags])

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

    def get_into(self, ns: Identity, keys: Sequence[bytes], start: int, out: list[Bytes]) -> Copied:
        session, tier, busy = self._now(), HOST, 0
        if session is None:
            return Copied(0, HOST)
        try:
            if not self._shared_reads:
                return self._get_by_lease(session, ns, keys, start, out)
            copied = self._read(session, ns, keys, start, out)
            if copied < len(out) and not session.dead:
                more, tier, busy = self._read_below(session, ns, keys, start + copied, out[copied:])
                copied += more
        except Unavailable:
            self._keeper.wake()
            return Copied(0, HOST)
        if copied:
            session.reads.used(keys[: start + copied])
        return Copied(copied, tier, busy)

    def _read(self, session: Session, ns: Identity, keys: Sequence[bytes], start: int, out: list[Bytes]) -> int:
        copied = self._copy_out(session, self.index_of(session), ns, keys, start, out)
        if copied < 0:  # the index moved meanwhile: nothing counts, once more with the new one
            copied = max(self._copy_out(session, self.index_of(session), ns, keys, start, out), 0)
        return copied

    def _read_below(
        self, session: Session, ns: Identity, keys: Sequence[bytes], start: int, out: list[Bytes]
    ) -> Copied:
        """From where `_read` ended: what is not in memory is brought there, and what lies behind is read on."""
        if not self._in_memory(session, ns, [keys[start]]):
            return Copied(0, HOST)
        opened, copied, tier, busy, moves = self._opened(session, ns), 0, HOST, 0, 0
        try:
            until = time.monotonic() + session.timeout_s + len(out) * ns.block_bytes / BYTES_PER_S
            with self._loads(session, ns, keys, until, session.timeout_s) as loads:
                while copied < len(out):
                    part = loads.bring(start + copied)
                    if part is None:
                        # What is in memory now, also of what did not come in time for us.
                        at = start + copied
                        more = self._read(session, ns, keys, at, out[copied:])
                        moves += not more
                        if not more and (
                            loads.tried or moves > MOVES_MAX or not self._in_memory(session, ns, [keys[at]])
                        ):
                            break
                        copied += more
                        continue
                    session.attach(dict.fromkeys(map(shm.ref_segment, part.slots)))
                    for slot, target in zip(part.slots, out[copied:], strict=False):
                        np.copyto(target, slot_view(session, slot, opened.slot_bytes, ns.block_bytes))
                    copied += len(part.slots)
                    part.close()
                    tier = loads.tier
                if loads.busy:
                    busy = len(self._in_memory(session, ns, keys[start + copied : start + len(out)]))
        except Unavailable as e:
            log.debug("blocks that are not in memory count as missing: %s", e)
            self._keeper.wake()
        return Copied(copied, tier, busy)

    def _loads(self, session: Session, ns: Identity, keys: Sequence[bytes], until: float, part_s: float) -> Loads:
        opened = self._opened(session, ns)
        return Loads(session, opened, keys, lambda some: self._in_memory(session, ns, some), until, part_s)

    def _in_memory(self, session: Session, ns: Identity, keys: Sequence[bytes]) -> list[bool]:
        """The leading run that is present: for each block whether it is in memory."""
        if not self._shared_reads:
            return [tier in IN_MEMORY for tier in self._match_by_call(session, ns, keys).tiers]
        _, flags = self.index_of(session).leading(keys, ns.block_bytes)
        return [flag & shm.HOST != 0 for flag in flags]

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

    def _get_by_lease(
        self, session: Session, ns: Identity, keys: Sequence[bytes], start: int, out: list[Bytes]
    ) -> Copied:
        """Where shared memory alone cannot be trusted: hold, copy, let go."""
        copied, tier, busy = 0, HOST, 0
        share = session.hello.tenant_bytes // PART_SHARE // self._opened(session, ns).slot_bytes
        blocks = max(1, min(LEASE_BLOCKS, share))
        while copied < len(out):
            at = start + copied
            with self.hold(session, ns, keys[at : at + blocks], session.timeout_s) as lease:
                for view in lease.views:
                    np.copyto(out[copied], np.frombuffer(view, np.uint8))
                    copied += 1
                tier = max(tier, lease.tier)
                if not len(lease):
                    busy = lease.busy and len(self._in_memory(session, ns, keys[at : start + len(out)]))
                    break
        return Copied(copied, tier, busy)

    def index_of(self, session: Session) -> IndexReader:
        """The session's index, as it is now."""
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
            return self.hold(session, ns, keys[:KEYS_MAX], timeout_s)
        except Unavailable:
            self._keeper.wake()
            return Lease(list, 0)

    def hold(self, session: Session, ns: Identity, keys: Sequence[bytes], timeout_s: float) -> Lease:
        """What is in memory by one call; only where it ends before `keys` do is there more to ask."""
        until = time.monotonic() + timeout_s
        opened = self._opened(session, ns)
        held = [self._hold(session, opened, keys, answer_s(session, until))]
        slots, tier, busy = list(held[0][0]), HOST, 0
        if len(slots) < len(keys):
            tier, busy = self._hold_below(session, ns, keys, slots, held, until)
        # Now, not with the first view: what is held stays readable, and a daemon that is gone gives no descriptors.
        session.attach({slot >> 32 for slot in slots}, answer_s(session, until))

        def views() -> list[memoryview]:
            return [
                view
                for some, hold in held
                for view in held_views(session, some, opened.slot_bytes, ns.block_bytes, hold, writable=False)
            ]

        return Lease(views, len(slots), tier, busy)

    @staticmethod
    def _hold(session: Session, opened: pb.OpenNamespaceReply, keys: Sequence[bytes], timeout_s: float) -> Held:
        request = pb.Request()
        request.acquire.namespace_id = opened.namespace_id
        request.acquire.keys.extend(keys)
        reply, hold = session.acquire(request, timeout_s)
        return list(reply.acquire.slots), hold

    def _hold_below(
        self,
        session: Session,
        ns: Identity,
        keys: Sequence[bytes],
        slots: list[int],
        held: list[Held],
        until: float,
    ) -> tuple[int, int]:
        """Adds to what is held: what is brought into memory, and what was there behind it.

        Answers the slowest tier, and how many blocks behind are there and had no turn or room in time.
        """
        opened, tier, busy, moves = self._opened(session, ns), HOST, 0, 0
        try:
            with self._loads(session, ns, keys, until, inf) as loads:
                while len(slots) < len(keys):
                    part = loads.bring(len(slots))
                    if part is not None and part.hold is not None:
                        held.append((part.slots, part.hold))
                        slots += part.slots
                        tier = loads.tier
                        continue
                    here = self._in_memory(session, ns, [keys[len(slots)]])
                    if here == [True]:
                        more = self._hold(session, opened, keys[len(slots) :], answer_s(session, until))
                        if more[0]:
                            held.append(more)
                            slots += more[0]
                            continue
                    moves += 1
                    if loads.tried or moves > MOVES_MAX or not here:
                        break
                if loads.busy:
                    busy = len(self._in_memory(session, ns, keys[len(slots) :]))
        except (Unavailable, ResourceExhausted) as e:
            log.debug("blocks from %d on are not held: %s", len(slots), e)
        return tier, busy

    def may_wait(self, ns: Identity, keys: Sequence[bytes]) -> bool:
        session = self._now()
        if session is None or not self._shared_reads:
            return session is not None
        _, flags = session.index.leading(keys, ns.block_bytes)
        return any(not flag & shm.HOST for flag in flags)

    # -- ahead of use

    def prefetch(self, ns: Identity, keys: Sequence[bytes], deadline_s: float, priority: int) -> Ticket:
        keys, session = keys[:KEYS_MAX], self._now()
        if session is None:
            return Ticket("failed", 0, self._keeper.down or "the daemon is away")
        try:
            in_memory = self._in_memory(session, ns, keys)
            if all(in_memory) and not session.hung_up():
                return Ticket("done", len(in_memory))
            return self._prefetch(session, ns, keys, deadline_s, priority)
        except Unavailable as e:
            self._keeper.wake()
            return Ticket("failed", 0, str(e))
        except (ResourceExhausted, FailedPrecondition) as e:
            if session.forked:
                raise
            return Ticket("failed", 0, str(e))

    def _prefetch(
        self, session: Session, ns: Identity, keys: Sequence[bytes], deadline_s: float, priority: int
    ) -> Ticket:
        request = pb.Request()
        request.prefetch.namespace_id = self._opened(session, ns).namespace_id
        request.prefetch.keys.extend(keys)
        request.prefetch.deadline_ms = min(max(int(deadline_s * 1000), 1), DEADLINE_MS_MAX)
        request.prefetch.priority = priority
        until = time.monotonic() + deadline_s
        begun = session.call(request).prefetch
        if begun.state != pb.TICKET_RUNNING:
            return Ticket(STATES[begun.state], begun.blocks, begun.why)
        ticket = of_session(session, begun.ticket, until)
        ticket.blocks = begun.blocks
        return ticket


def slot_view(session: Session, slot: int, slot_bytes: int, block_bytes: int) -> Bytes:
    """Where to write a block, or copy it from; its segment is attached (the lock may be held, which that waits for)."""
    mapping = session.mappings.get(slot >> 32)
    if mapping is None:
        raise Unavailable(f"segment {slot >> 32} of a slot is gone")
    offset = shm.ref_slot(slot) * slot_bytes
    return mapping.bytes[offset : offset + block_bytes]


def held_views(
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
