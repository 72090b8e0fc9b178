"""Puts of paged KV: straight into memory of the device, else into page-locked shared memory, else by a buffer.

    device   Reserve there -> gather on the caller's stream -> event -> Commit with its handle; Ticket says its end
    slab     the same into slots of shared memory that the device may write to itself
    staged   gather into a buffer -> an ordinary put of it

Slots that a kernel may write to are kept (Afterwards) until it has ended, whatever comes up meanwhile.
"""

import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore_client.afterwards import too_late, wait_for
from kvstore_client.device_commits import DeviceCommit
from kvstore_client.holdings import DeviceHold
from kvstore_client.lease import Hold
from kvstore_client.local import COMMIT_BLOCKS, LocalTransport, commit_request, reserve_more
from kvstore_client.marks import Mark
from kvstore_client.paged import BUS_MULTIPROCESSORS
from kvstore_client.paged_blocks import PagedBlocks
from kvstore_client.pool import Pool
from kvstore_client.pools import Pools
from kvstore_client.results import Hint, PutResult
from kvstore_client.session import Session
from kvstore_client.slab_locks import SlabUse
from kvstore_client.staging import Half, Staging
from kvstore_client.tickets import DURABLE_BYTES_PER_S
from kvstore_client.transport import Identity
from kvstore_client.under_way import UnderWay
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1 import shm
from kvstored.v1.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    ResourceExhausted,
    Unavailable,
)

log = logging.getLogger("kvstore_client")

SHORT_S = 0.001
"""Copies that end as soon as that are waited for here: for the daemon to open their event and watch it takes longer."""

LATE = "the engine's stream did not come to the copies in time"


class PagedPut:
    """One put."""

    def __init__(
        self,
        transport: LocalTransport,
        pools: Pools,
        ns: Identity,
        keys: Sequence[bytes],
        start: int,
        blocks: PagedBlocks,
        hint: Hint | None,
        durable: bool,
    ) -> None:
        if blocks.layers is not None:
            raise InvalidArgument("a block is put whole: blocks(..., layers=) is for get_into")
        self._transport, self._pools, self._ns = transport, pools, ns
        self._keys, self._start, self._blocks = keys, start, blocks
        self._hint, self._durable = hint, durable
        self._kv, self._device = blocks.kv, blocks.kv.device
        self._marks = pools.marks(self._device)
        self._until = time.monotonic() + transport.timeout_s
        if durable:
            self._until += len(blocks) * ns.block_bytes / DURABLE_BYTES_PER_S
        self._stored = self._existing = 0
        self._error: KVStoreError | None = None

    def run(self) -> PutResult:
        """Stores what finds room; as Namespace.put."""
        count = len(self._keys) - self._start
        session = self._transport.session_now()
        if session is None:
            return PutResult(0, 0, count, Unavailable(self._transport.down or "the daemon went away"))
        try:
            self._transport.opened(session, self._ns)  # so that its memory is page-locked by when it is wanted
            todo = self._absent(session)
            if not self._durable:
                self._existing = count - len(todo)
                todo = self._to_device(todo)
                if todo and self._in_time():
                    todo = self._to_slab(session, todo)
            if todo and self._in_time():
                self._staged(todo)
        except (Unavailable, DeadlineExceeded, ResourceExhausted) as e:
            self._error = bare(e)
        if self._existing and not self._durable:
            session.reads.used(self._keys, self._hint.conversation if self._hint is not None else "")
        if session.hung_up():
            self._existing = 0  # what was found is the index of a daemon that is gone
            self._error = self._error or Unavailable(session.dead)
        rejected = count - self._stored - self._existing
        if isinstance(self._error, ResourceExhausted) and rejected == count:
            raise self._error
        return PutResult(self._stored, self._existing, rejected, self._error if rejected or self._durable else None)

    def _in_time(self) -> bool:
        """Whether there is time for another way."""
        if time.monotonic() < self._until:
            return True
        self._error = self._error or DeadlineExceeded("kvstored did not answer in time")
        return False

    def _absent(self, session: Session) -> list[int]:
        """Places in `keys` whose blocks no memory has. All, of a durable put: what is there is to be on the SSD."""
        places = range(self._start, len(self._keys))
        if self._durable:
            return list(places)
        index, absent = self._transport.index_of(session), []
        for i in places:
            entry = index.find(self._keys[i])
            if entry is None or entry[3] != self._ns.block_bytes or not entry[5] & (shm.GPU | shm.HOST):
                absent.append(i)
        return absent if index.current() else self._absent(session)

    def _gather(self, places: list[int], addresses: list[int], busy: int | None) -> None:
        """Enqueues the copies. What must outlive them has a mark of the stream before, since anything may be raised."""
        pages = self._blocks.pages[[i - self._start for i in places]]
        self._kv.copies.gather(
            pages, addresses, slot_bytes=self._ns.block_bytes, stream=self._blocks.stream, multiprocessors=busy
        )

    # -- the device's memory

    def _to_device(self, todo: list[int]) -> list[int]:
        """What found no room there, or is no better off there."""
        pool = self._pools.usable(self._device.uuid, self._until)
        while todo and pool is not None:
            hold: DeviceHold | None = None
            try:
                hold = pool.reserve(self._ns, min(len(todo), COMMIT_BLOCKS), self._until)
                part, rest = todo[: len(hold.slots)], todo[len(hold.slots) :]
                addresses = pool.addresses(hold.slots, self._ns.block_bytes, self._until)
            except KVStoreError as e:
                hold = None  # it ends here, whoever keeps the error and with it this frame
                log.debug("blocks go to shared memory, not to device %s: %s", self._device.uuid, e)
                break
            # First: whatever is raised from here on, it ends behind the copies.
            hold.release_after(self._marks.of(self._blocks.stream))
            self._gather(part, addresses, None)
            mark = self._marks.after(self._blocks.stream)
            hold.release_after(mark)
            try:
                commit = self._commit(pool, part, hold, mark)
            except KVStoreError as e:
                hold = None
                log.debug("blocks go to shared memory, not to device %s: %s", self._device.uuid, e)
                break
            if commit is None:
                self._error = too_late(mark, LATE)
                return []
            hold.release_after(None)
            mark.over()
            self._count(commit.results)
            if not commit.results:
                log.debug("blocks go to shared memory: a commit to device %s failed: %s", pool.key[0], commit.why)
                break
            todo = rest
        return todo

    def _commit(self, pool: Pool, part: list[int], hold: DeviceHold, mark: Mark) -> DeviceCommit | None:
        """Has slots published behind their copies; None where that takes too long. Raises like any call."""
        number = pool.session.number_of(self._ns, pool.session.timeout_s)
        request = commit_request(number, self._keys, part, list(hold.slots), self._hint, False, 0).commit
        done = wait_for(mark, min(time.monotonic() + SHORT_S, self._until))
        if not done and not mark.handle and not wait_for(mark, self._until):
            return None
        commit = pool.commit(request, b"" if done else mark.handle, hold, self._until)
        try:
            in_time = done or wait_for(mark, self._until)
        except BaseException:
            pool.later(commit)
            raise
        if not in_time:
            pool.later(commit)
            return None
        return commit if pool.ended(commit, self._until) else None

    def _count(self, results: Sequence[int]) -> None:
        self._until = max(self._until, time.monotonic() + self._transport.timeout_s)
        self._stored += results.count(pb.STORED)
        self._existing += results.count(pb.EXISTS)
        if pb.REJECTED in results:
            self._error = ResourceExhausted("the daemon has stored not all of what was written")

    # -- shared memory that the device writes to itself

    def _to_slab(self, session: Session, todo: list[int]) -> list[int]:
        """What cannot be written there straight."""
        locks = self._pools.locks(self._device)
        if session.hello.read_only or not locks.any or not self._pools.watches(self._device.uuid, session):
            return todo
        opened = self._transport.opened(session, self._ns)
        while todo:
            part = todo[:COMMIT_BLOCKS]
            slots: list[int] = []
            hold = session.write_hold(slots)
            session.take_granted(self._ns.block_bytes, len(part), slots)
            reserve_more(session, opened, slots, len(part))
            session.attach(slot >> 32 for slot in slots)
            uses = self._uses(session, slots)
            if uses is None:
                return todo  # and the hold gives the slots back
            part = part[: len(slots)]
            if not self._fill(session, opened, part, slots, (hold, *uses)):
                return []
            todo = todo[len(part) :]
        return todo

    def _uses(self, session: Session, slots: list[int]) -> list[SlabUse] | None:
        uses = []
        for segment in dict.fromkeys(slot >> 32 for slot in slots):
            mapping = session.mappings.get(segment)
            use = self._pools.locks(self._device).use(mapping) if mapping is not None else None
            if use is None:
                return None
            uses.append(use)
        return uses

    def _fill(
        self,
        session: Session,
        opened: pb.OpenNamespaceReply,
        part: list[int],
        slots: list[int],
        keep: tuple[Hold | SlabUse, ...],
    ) -> bool:
        """Fills slots of shared memory and commits them; whether to go on."""
        addresses = [session.mappings[slot >> 32].address + (slot & 0xFFFFFFFF) * opened.slot_bytes for slot in slots]
        copies = UnderWay(self._pools.afterwards, self._marks.of(self._blocks.stream), *keep)
        self._gather(part, addresses, BUS_MULTIPROCESSORS)
        copies.mark = self._marks.after(self._blocks.stream)
        if not wait_for(copies.mark, self._until):
            copies.leave()
            self._error = too_late(copies.mark, LATE)
            return False
        copies.over()
        want = min(opened.grant_max, len(part))
        request = commit_request(opened.namespace_id, self._keys, part, slots, self._hint, False, want)
        try:
            replies = session.commit([(request, slots)], self._ns.block_bytes, reuse=True)
        except (Unavailable, ResourceExhausted) as e:
            self._error = bare(e)
            return False
        slots.clear()  # stored, or granted ahead: no longer the hold's
        for reply in replies:
            self._count(list(reply.results))
        return True

    # -- by a buffer

    def _staged(self, todo: list[int]) -> None:
        staging = self._pools.staging(self._device)
        with staging.turn(self._ns.block_bytes, self._until) as room:
            before: tuple[Half, list[int]] | None = None
            for part in runs(todo, room):
                half = staging.half(self._until)
                self._fill_half(staging, half, part)
                if before is not None and not self._put_half(*before):
                    return
                before = half, part
            if before is not None:
                self._put_half(*before)

    def _fill_half(self, staging: Staging, half: Half, part: list[int]) -> None:
        """Enqueues copies to a half of the buffer."""
        size, stream = self._ns.block_bytes, self._blocks.stream
        addresses = [half.address + i * size for i in range(len(part))]
        half.mark = self._marks.of(stream)
        try:
            self._gather(part, addresses, BUS_MULTIPROCESSORS)
            staging.to_host(half, len(part) * size, stream, self._until)
            half.mark = self._marks.after(stream)
        except BaseException:
            staging.give_up()
            raise
        staging.used += len(part)

    def _put_half(self, half: Half, part: list[int]) -> bool:
        """Puts what was copied there; whether to go on."""
        assert half.mark is not None, "a half is put that was not filled"
        if not wait_for(half.mark, self._until):
            self._error = too_late(half.mark, LATE)
            return False
        keys, size = self._keys[: part[-1] + 1], self._ns.block_bytes
        views = [half.host[i * size : (i + 1) * size] for i in range(len(part))]
        try:
            result = self._transport.put(self._ns, keys, part[0], views, self._hint, self._durable)
        except ResourceExhausted as e:
            self._error = e
            return False
        self._count([pb.STORED] * result.stored + [pb.EXISTS] * result.existing)
        self._error = result.error or self._error
        return not result.rejected


def bare(error: KVStoreError) -> KVStoreError:
    """The same error without the frames it went through: who keeps it would keep what they hold."""
    return type(error)(str(error))


def runs(places: list[int], room: int) -> Iterator[list[int]]:
    """Places in a row, at most `room` at a time."""
    for row in np.split(np.array(places), np.flatnonzero(np.diff(places) != 1) + 1):
        for at in range(0, len(row), room):
            yield row[at : at + room].tolist()
