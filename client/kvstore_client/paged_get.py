"""Gets of paged KV onto the caller's stream: from the device's memory, page-locked shared memory, or by a buffer.

    device   Acquire there -> scatter -> Release behind its event
    slab     Acquire (and Load, from the SSD) -> scatter straight from shared memory -> Release behind its event
    staged   an ordinary get_into of a buffer -> scatter

Blocks are held for as long as copies read them, so nothing has to be checked afterwards, and nobody waits for the
stream here: what is answered is how many blocks are on their way on it.
"""

import logging
import time
from collections.abc import Sequence

import numpy as np

from kvstore_client.holdings import DeviceHold
from kvstore_client.lease import Lease
from kvstore_client.loads import BYTES_PER_S, PART_SHARE
from kvstore_client.local import LocalTransport
from kvstore_client.local_reads import LEASE_BLOCKS
from kvstore_client.paged import BUS_MULTIPROCESSORS
from kvstore_client.paged_blocks import PagedBlocks
from kvstore_client.pools import Pools
from kvstore_client.reads import GPU, HOST
from kvstore_client.results import Copied
from kvstore_client.session import Session
from kvstore_client.slab_locks import SlabUse
from kvstore_client.staging import Half, Staging
from kvstore_client.transport import Identity
from kvstore_client.under_way import UnderWay
from kvstore_client.waiting import seconds_left
from kvstored.v1 import KEYS_MAX, shm
from kvstored.v1.errors import DeadlineExceeded, InvalidArgument, KVStoreError, ResourceExhausted, Unavailable
from kvstored_cuda.devices.errors import DeviceError, DeviceLost

log = logging.getLogger("kvstore_client")

SHARES = (1, 4, 16)
"""Of what is wanted: asked for less, where a session's share of the device's memory is held already."""


class PagedGet:
    """One get."""

    def __init__(
        self,
        transport: LocalTransport,
        pools: Pools,
        ns: Identity,
        keys: Sequence[bytes],
        start: int,
        out: PagedBlocks,
    ) -> None:
        named = np.sort(out.pages, axis=None)
        twice = named[1:][np.diff(named) == 0]
        if twice.size:
            raise InvalidArgument(f"page {twice[0]} is to be written twice")
        self._transport, self._pools, self._ns = transport, pools, ns
        self._keys, self._start, self._out = keys, start, out
        self._kv, self._device = out.kv, out.kv.device
        self._marks = pools.marks(self._device)
        self._until = time.monotonic() + transport.timeout_s
        self._end = self._until + len(out) * ns.block_bytes / BYTES_PER_S
        """As for any get_into: as long as more comes within the time-out, but not for ever."""
        self._tier, self._busy = 0, 0
        self._at = 0
        """Blocks that are on their way on the stream."""

    def run(self) -> Copied:
        """Enqueues the leading run; as Namespace.get_into."""
        session = self._transport.session_now()
        if session is None:
            return Copied(0, HOST)
        try:
            self._transport.opened(session, self._ns)  # so that its memory is page-locked by when it is wanted
            self._copy(session)
        except (Unavailable, DeadlineExceeded, ResourceExhausted) as e:
            if isinstance(e, DeviceLost) or (isinstance(e, DeviceError) and not self._at):
                raise
            log.debug("blocks count as missing: %s", e)
        if self._at:
            session.reads.used(self._keys[: self._start + self._at])
        return Copied(self._at, self._tier or HOST, self._busy)

    def _copy(self, session: Session) -> None:
        """Enqueues copies as long as blocks come; `_at` is how many, whatever it raises."""
        count = len(self._out)
        pool = self._pools.usable(self._device.uuid, self._until)
        index, keys = self._transport.index_of(session), self._keys[self._start :]
        _, flags = index.leading(keys, self._ns.block_bytes)
        on_device = [pool is not None and flag & shm.GPU != 0 for flag in flags]
        while self._at < count and time.monotonic() < self._until:
            at = self._at
            end = next((i for i in range(at, len(on_device)) if not on_device[i]), len(on_device))
            if end > at and not self._from_device(at, end):
                on_device = []  # they are on another device, or gone from this one
            if self._at == at and time.monotonic() < self._until:
                end = next((i for i in range(at + 1, len(on_device)) if on_device[i]), count)
                if not self._from_memory(session, at, end):
                    break

    def _scatter(self, at: int, addresses: Sequence[int], busy: int | None, *keep: object) -> None:
        """Enqueues copies to the pages from `at` on; `keep` lives as long as they run."""
        stream, pages = self._out.stream, self._out.pages[at : at + len(addresses)]
        # First: whatever is raised from here on, they are kept.
        copies = UnderWay(self._pools.afterwards, self._marks.of(stream), *keep)
        self._kv.copies.scatter(
            pages,
            addresses,
            slot_bytes=self._ns.block_bytes,
            layers=self._out.layers,
            stream=stream,
            multiprocessors=busy,
        )
        copies.mark = self._marks.after(stream)
        copies.leave()
        self._at = at + len(addresses)
        self._until = min(time.monotonic() + self._transport.timeout_s, self._end)

    def _from_device(self, at: int, end: int) -> bool:
        """Whether some came."""
        keys = self._keys[self._start + at : self._start + end][:KEYS_MAX]
        hold: DeviceHold | None = None
        try:
            pool = self._pools.pool(self._device.uuid, self._until)
            for share in SHARES:
                try:
                    slots, hold = pool.acquire(self._ns, keys[: max(len(keys) // share, 1)], self._until)
                    break
                except ResourceExhausted:
                    if share == SHARES[-1]:
                        raise
            if not slots:
                return False
            addresses = pool.addresses(slots, self._ns.block_bytes, self._until)
        except KVStoreError as e:
            hold = None  # it ends here, whoever keeps the error and with it this frame
            log.debug("blocks are read from shared memory, not from device %s: %s", self._device.uuid, e)
            return False
        self._scatter(at, addresses, None, hold)
        self._tier = max(self._tier, GPU)
        return True

    def _from_memory(self, session: Session, at: int, end: int) -> bool:
        """Whether some came."""
        locks = self._pools.locks(self._device)
        if not session.hello.read_only and self._transport.shared_reads and locks.any:
            share = session.hello.tenant_bytes // PART_SHARE // self._transport.opened(session, self._ns).slot_bytes
            blocks = max(1, min(LEASE_BLOCKS, share, end - at))
            keys = self._keys[self._start + at : self._start + at + blocks]
            lease = self._hold(session, keys)
            if not len(lease):
                self._busy = lease.busy
                return False
            self._tier = max(self._tier, lease.tier)
            addresses, uses = self._straight(session, lease)
            if uses is not None:
                views = lease.views
                lease.release()
                self._scatter(at, addresses, BUS_MULTIPROCESSORS, views, uses)
                return True
            end = at + len(lease)
        return self._staged(at, end)

    def _hold(self, session: Session, keys: Sequence[bytes]) -> Lease:
        """Leading blocks, held in shared memory. What copies under way still hold of our share is waited for."""
        try:
            return self._transport.hold(session, self._ns, keys, seconds_left(self._until))
        except ResourceExhausted:
            if not self._at or not self._pools.afterwards.wait_empty(self._until - time.monotonic()):
                raise
        return self._transport.hold(session, self._ns, keys, seconds_left(self._until))

    def _straight(self, session: Session, lease: Lease) -> tuple[list[int], list[SlabUse] | None]:
        """Where the device reads them itself; None where it may not."""
        addresses = [int(np.frombuffer(view, np.uint8).ctypes.data) for view in lease.views]
        uses = []
        for mapping in list(session.mappings.values()):
            end = mapping.address + mapping.size_bytes
            if any(mapping.address <= address < end for address in addresses):
                use = self._pools.locks(self._device).use(mapping)
                if use is None:
                    return addresses, None
                uses.append((mapping.address, end, use))
        covered = all(any(low <= address < high for low, high, _ in uses) for address in addresses)
        return addresses, [use for _, _, use in uses] if covered else None

    def _staged(self, at: int, end: int) -> bool:
        staging, size = self._pools.staging(self._device), self._ns.block_bytes
        with staging.turn(size, self._until) as room:
            half = staging.half(self._until)
            views = [half.host[i * size : (i + 1) * size] for i in range(min(room, end - at))]
            keys = self._keys[: self._start + at + len(views)]
            copied = self._transport.get_into(self._ns, keys, self._start + at, views)
            if not copied.blocks:
                self._busy = copied.busy
                return False
            self._scatter_half(staging, half, at, copied.blocks)
        self._tier = max(self._tier, copied.tier)
        return True

    def _scatter_half(self, staging: Staging, half: Half, at: int, blocks: int) -> None:
        size, stream = self._ns.block_bytes, self._out.stream
        half.mark = self._marks.of(stream)
        try:
            staging.to_device(half, blocks * size, stream, self._until)
            self._scatter(at, [half.address + i * size for i in range(blocks)], BUS_MULTIPROCESSORS)
            half.mark = self._marks.after(stream)
        except BaseException:
            staging.give_up()
            raise
        staging.used += blocks
