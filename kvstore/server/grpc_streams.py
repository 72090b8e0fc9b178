"""Put over gRPC: bytes of blocks from a stream to the slab; and what it has in common with Get (grpc_get.py).

Each runs within a session of its own and holds slots only while their bytes move. These
are the callers whose holds may end by a clock: a reservation expires after `lease.ttl`, and
who sends or takes nothing for as long is cut off.

Bytes are copied and hashed on the event loop, one chunk at a time (0.2 ms for 1 MiB): a
hop to a thread costs as much, and a slot that only the loop touches needs no watching.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import xxhash
from google.protobuf.message import DecodeError

from kvstore.core import refusals
from kvstore.core.durable import LEFT_AGAIN
from kvstore.core.holds import Namespace, Session
from kvstore.core.writeback import HELD_SHARE
from kvstore.server import calls
from kvstore.server.calls import Node
from kvstore.server.tickets import DURABLE_S, Saving
from kvstored.v1 import CHUNK_BYTES_MAX, KEY_BYTES, chunks, shm
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.chunks import Chunk
from kvstored.v1.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, ResourceExhausted

PUT_BLOCKS, PUT_BYTES = 16, 32 << 20
"""Blocks of one Put that wait for their commit together."""

LATE_S = 1.0
"""By how much a load or a durable put may end after its deadline; the loop looks at deadlines ten times a second."""

Outcome = tuple[Namespace, int, int, pb.Tier, int]
"""Of a stream: its namespace, blocks found or stored, blocks asked for, and the slowest tier that one came from."""


def parsed(node: Node, kind: Any, message: bytes) -> Any:
    """A message of that kind; anything else is the caller's fault."""
    try:
        return kind.FromString(message)
    except DecodeError as e:
        node.protocol_errors += 1
        raise InvalidArgument(f"{len(message)} bytes that are not a {kind.DESCRIPTOR.name}") from e


class Stall:
    """Ends what it guards once its caller has done nothing for so long; `alive` says that it did something.

    A timer that is set anew with each message took 3 % of a stream's time: this one is left
    alone, and looks when it is due how long ago that was.
    """

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._look)

    def alive(self) -> None:
        self._last = self._loop.time()

    def pause(self) -> None:
        """Until `alive` it is not the caller who is waited for."""
        self._last = float("inf")

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now, due = self._loop.time(), self._last + self._seconds
        if due > now:
            self._timer = self._loop.call_at(min(due, now + self._seconds), self._look)
        else:
            self._limit.reschedule(now)


@contextlib.asynccontextmanager
async def unstalled(seconds: float, what: str, whose: str = "lease.ttl") -> AsyncIterator[Stall]:
    """Ends the block by DeadlineExceeded unless it says again and again that its caller is alive."""
    try:
        async with asyncio.timeout(None) as limit:
            with contextlib.closing(Stall(limit, seconds)) as stall:
                yield stall
    except TimeoutError:
        raise DeadlineExceeded(f"{what} within {seconds:g} s ({whose})") from None


class PutStream:
    """One Put: a header, then each block's bytes in chunks, the last of them with their checksum.

    A slot is reserved when a block's turn comes, so what a slow caller holds is what it has
    sent. Blocks wait for their commit in small batches, never so long that the first one's
    reservation could expire while the caller keeps sending.
    """

    def __init__(self, node: Node, session: Session, context: Any, stall: Stall) -> None:
        self._node = node
        self._session = session
        self._context = context
        self._stall = stall
        self._header = pb.PutHeader()
        self._namespace: Namespace
        self._slot_bytes = 0
        self._results: list[int] = []
        self._waiting: list[int] = []
        """Slots of the last blocks: written and verified, not yet committed."""
        self._commit_by = 0.0
        self._saving: Saving | None = None
        """What is to be on the SSD before the answer."""
        self._not_durable = ""

    async def run(self) -> pb.PutReply:
        """Stores what it can; raises ResourceExhausted where that is nothing."""
        try:
            await self._receive_header()
            await self._receive_blocks()
            await self._saved()
            self._still_saved()
            return pb.PutReply(results=self._results, not_durable=self._not_durable)  # type: ignore[arg-type]
        finally:
            if self._saving is not None:
                self._saving.cancel()

    async def _receive_blocks(self) -> None:
        block_bytes = self._namespace.block_bytes
        batch = max(1, min(PUT_BLOCKS, PUT_BYTES // block_bytes))
        if self._header.durable:
            batch = min(batch, self._kept_blocks())
        existing: list[bytes] = []
        present_from = self._present_from()
        for i, key in enumerate(self._header.keys):
            if calls.present(self._node, self._namespace, [key]):
                self._commit()
                if i == present_from and present_from == self._present_from():
                    existing += self._header.keys[i:]
                    self._results += [pb.EXISTS] * (len(self._header.keys) - i)
                    break
                await self._skip(i)
                self._results.append(pb.EXISTS)
                existing.append(key)
                continue
            try:
                slot = await self._reserve()
            except ResourceExhausted as e:
                self._commit()
                self._cut_short(e)
                break
            await self._receive_block(i, slot)
            self._waiting.append(slot)
            if len(self._waiting) >= batch or time.monotonic() >= self._commit_by:
                self._commit()
                await self._saved()  # before what comes next needs their memory
        else:
            if await self._next() is not None:
                raise InvalidArgument(f"more bytes than the {len(self._header.keys)} blocks of the header")
            self._commit()
        if existing:
            calls.used(self._node, self._session.tenant, existing)
            self._node.store.counts.existing += len(existing)
            await self._save_existing(existing)

    def outcome(self) -> Outcome:
        """Blocks stored or found to exist count as found."""
        stored = len(self._results) - self._results.count(pb.REJECTED)
        return self._namespace, stored, len(self._header.keys), pb.TIER_HOST, 0

    def _kept_blocks(self) -> int:
        """How many blocks memory surely keeps until they are on the SSD."""
        store, namespace = self._node.store, self._namespace
        whole = store.segments.tenant_bytes(namespace.tenant.id)
        return max(1, int(whole * HELD_SHARE / 2) // store.pool(namespace).slot_bytes)

    def _save(self, keys: Sequence[bytes]) -> None:
        """These are to be on the SSD, where that is asked for."""
        if not self._header.durable or self._node.moving is None:
            return
        if self._saving is None:
            self._saving = Saving(self._node.moving)
        self._saving.add(self._namespace, keys)
        self._node.jobs_ready()

    async def _save_existing(self, keys: Sequence[bytes]) -> None:
        """In portions as well: what waits for the disk has to be kept until its turn."""
        size = self._kept_blocks()
        for at in range(0, len(keys), size):
            await self._saved()
            if self._not_durable:
                return
            self._save(keys[at : at + size])

    async def _saved(self) -> None:
        """Waits until what is to be on the SSD by now is there, or is known not to get there."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        self._stall.pause()  # the disk is waited for, and for a bounded time
        try:
            saving.begin()
            await saving.wait(DURABLE_S + LATE_S)
        finally:
            saving.cancel()
            self._stall.alive()
        self._not_durable = self._not_durable or saving.why

    def _still_saved(self) -> None:
        """Its last portion may have taken the place of its first."""
        moving = self._node.moving
        if not self._header.durable or self._not_durable or moving is None:
            return
        results = zip(self._header.keys, self._results, strict=True)
        keys = [key for key, result in results if result != pb.REJECTED]
        if moving.run_on_disk(self._namespace, keys) < len(keys):
            self._not_durable = LEFT_AGAIN

    async def _receive_header(self) -> None:
        first = await self._next()
        if not isinstance(first, pb.PutChunk) or not first.HasField("header"):
            raise InvalidArgument("the first message of a Put is its header")
        if first.data or first.HasField("checksum"):
            raise InvalidArgument("the header of a Put comes in a message of its own")
        header = self._header = first.header
        store = self._node.store
        self._namespace = store.namespace(self._session.tenant, header.namespace_id)
        self._slot_bytes = store.pool(self._namespace).slot_bytes
        calls.checked_keys(header.keys)
        if not len(header.keys) == len(header.parents) == len(header.depths):
            raise InvalidArgument(
                f"{len(header.keys)} keys, {len(header.parents)} parents and {len(header.depths)} depths: "
                "a Put names as many of each"
            )
        for i, parent in enumerate(header.parents):
            if parent and len(parent) != KEY_BYTES:
                raise InvalidArgument(f"parent {i} has {len(parent)} bytes; it is a key of {KEY_BYTES}, or empty")
        # Whatever of the header makes a commit impossible is said before the bytes come.
        if header.durable:
            calls.check_durable(self._node)
        empty = pb.PutHeader(hint=header.hint if header.HasField("hint") else None)
        calls.commit(self._node, self._session, self._namespace, empty, [])

    def _present_from(self) -> int:
        """From which block on all are there: their bytes need not come, and the answer may be given before them."""
        keys = self._header.keys
        first = len(keys)
        while first and calls.present(self._node, self._namespace, [keys[first - 1]]):
            first -= 1
        return first

    async def _reserve(self) -> int:
        """One slot. What waits is committed first where it is all that may be held.

        Not where memory is short: then what was just stored would go for what comes next.
        """
        session, segments, ttl_s = self._session, self._node.store.segments, self._node.lease_ttl_s
        limits = (refusals.own_limit, refusals.tenant_limit)
        if self._waiting and any(limit(session, segments, self._slot_bytes) < 1 for limit in limits):
            self._commit()
        if not self._waiting:
            self._commit_by = time.monotonic() + ttl_s / 2
        self._stall.pause()  # waiting for memory is not the caller's fault, and bounded by itself
        (slot,) = await calls.reserve(self._node, session, self._namespace, 1, time.monotonic() + ttl_s)
        self._stall.alive()
        return slot

    async def _receive_block(self, i: int, slot: int) -> None:
        """Into the slot, while it is ours; verified at the end."""
        left = self._namespace.block_bytes
        block = self._node.slab.bytes_at(shm.ref_segment(slot), shm.ref_slot(slot) * self._slot_bytes, left)
        digest = xxhash.xxh3_64()
        checksum: int | None = None
        while left:
            chunk, checksum = await self._chunk(i, left)
            if slot not in self._session.granted:
                raise FailedPrecondition(
                    f"block {i} came too slowly: its reservation expired after {self._node.lease_ttl_s:g} s (lease.ttl)"
                )
            block[-left:][: len(chunk)] = chunk
            digest.update(chunk)
            left -= len(chunk)
            del chunk  # its memory is for the next one
        if checksum != digest.intdigest():
            raise InvalidArgument(f"block {i} does not match its checksum (xxh3-64)")

    async def _skip(self, i: int) -> None:
        """Takes the bytes of a block that is there already."""
        left = self._namespace.block_bytes
        while left:
            left -= len((await self._chunk(i, left))[0])

    def _commit(self) -> None:
        """Makes what waits visible; slots that were not needed go back."""
        if not self._waiting:
            return
        slots, self._waiting = self._waiting, []
        first = len(self._results)
        part = slice(first, first + len(slots))
        header = self._header
        request = pb.PutHeader(
            keys=header.keys[part],
            parents=header.parents[part],
            depths=header.depths[part],
            hint=header.hint if header.HasField("hint") else None,
        )
        results = calls.commit(self._node, self._session, self._namespace, request, slots)
        self._results += results
        self._save([key for key, result in zip(request.keys, results, strict=True) if result != pb.REJECTED])
        unused = [slot for slot, result in zip(slots, results, strict=True) if result != pb.STORED]
        if unused:
            self._node.store.abort(self._session, unused)
        if self._node.store.segments.jobs:
            self._node.jobs_ready()

    def _cut_short(self, why: ResourceExhausted) -> None:
        """No room for the next block: those that follow are there already, or rejected. Raises `why` if nothing is."""
        store, namespace = self._node.store, self._namespace
        rest = self._header.keys[len(self._results) :]
        results = [pb.EXISTS if calls.present(self._node, namespace, [key]) else pb.REJECTED for key in rest]
        if all(result == pb.REJECTED for result in (*self._results, *results)):
            raise why
        self._results += results
        self._save([key for key, result in zip(rest, results, strict=True) if result == pb.EXISTS])
        store.counts.existing += results.count(pb.EXISTS)
        store.counts.rejected += results.count(pb.REJECTED)

    # -- messages

    async def _next(self) -> Chunk | pb.PutChunk | None:
        """A chunk as it is usually written, other messages parsed, None at the end."""
        message = await self._context.read()
        self._stall.alive()
        if message is grpc.aio.EOF:
            return None
        return chunks.decode(message) or parsed(self._node, pb.PutChunk, message)

    async def _chunk(self, i: int, left: int) -> Chunk:
        """The next bytes of a block of which `left` are to come; with the last of them, and only then, its checksum."""
        part = await self._next()
        if isinstance(part, pb.PutChunk):
            if part.HasField("header"):
                raise InvalidArgument(f"block {i}: a header where {left} more bytes were expected")
            part = memoryview(part.data), part.checksum if part.HasField("checksum") else None
        if part is None:
            raise InvalidArgument(f"block {i}: the stream ended where {left} more bytes were expected")
        data, checksum = part
        if not 1 <= len(data) <= min(CHUNK_BYTES_MAX, left):
            raise InvalidArgument(
                f"block {i}: a chunk of {len(data)} bytes; 1 to {min(CHUNK_BYTES_MAX, left)} are allowed here"
            )
        if (checksum is not None) != (len(data) == left):
            early = f"a checksum {left - len(data)} bytes before its end"
            raise InvalidArgument(f"block {i}: {'no checksum with its last bytes' if checksum is None else early}")
        return part
