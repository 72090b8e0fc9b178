"""Get over gRPC: bytes of blocks from the slab to a stream, brought there first from where they are.

As Put (grpc_streams.py): a session of its own, slots held only while their bytes move, and a
caller who takes nothing for `lease.ttl` is cut off.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from kvstore.core.holds import Namespace, Session
from kvstore.core.link import Block
from kvstore.server import calls, loads
from kvstore.server.calls import Node
from kvstore.server.grpc_streams import LATE_S, Outcome, Stall
from kvstore.server.tickets import GET_LOAD_S, Prefetch
from kvstored.v1 import chunks, shm
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import ResourceExhausted

GET_BLOCKS, GET_BYTES = 16, 8 << 20
"""Blocks that a Get holds at once, and brings from the SSD at once."""

GET_AGAIN_S = 0.05
"""Until a Get looks again that may hold nothing at present."""


class GetStream:
    """One Get: how many blocks there are, then each one's bytes in chunks, the last of them with their checksum.

    Blocks are held while their bytes are sent, a few at a time. What is on the SSD is brought
    in before its turn, and the next part of it while one is sent; what only a device has is
    copied down at its turn. What eviction takes before its turn, or what does not come, ends the
    stream early: the caller counts whole blocks, not the announcement.
    """

    def __init__(self, node: Node, session: Session, context: Any, stall: Stall) -> None:
        self._node = node
        self._session = session
        self._context = context
        self._stall = stall
        self._namespace: Namespace
        self._sent = self._asked = 0
        self._tier: pb.Tier = pb.TIER_HOST
        self._refused = False
        """The last try met a limit on what is loaded, or held, at once."""
        self._busy = 0
        self._ahead: Prefetch | None = None

    def outcome(self) -> Outcome:
        """Blocks sent count as found."""
        return self._namespace, self._sent, self._asked, self._tier, self._busy

    async def run(self, request: pb.GetRequest) -> None:
        store, session = self._node.store, self._session
        self._asked = len(request.keys)
        namespace = self._namespace = store.namespace(session.tenant, request.namespace_id)
        slot_bytes = store.pool(namespace).slot_bytes
        keys = calls.checked_keys(request.keys)
        tiers = calls.tiers_of(self._node, namespace, keys)
        count = len(tiers)
        await self._write(pb.GetChunk(blocks=count).SerializeToString())
        batch = max(1, min(GET_BLOCKS, GET_BYTES // namespace.block_bytes))
        at = 0
        try:
            while at < count:
                slots = await self._hold(keys[at : min(at + batch, count)])
                if not slots:
                    self._ended_early(calls.tiers_of(self._node, namespace, keys[at:count]))
                    return
                self._bring_ahead(keys[at + len(slots) : min(at + len(slots) + batch, count)])
                for slot in slots:
                    await self._send_block(slot, slot_bytes, namespace.block_bytes)
                    store.release(session, [slot])
                    if tiers[self._sent] == pb.TIER_SSD:
                        self._came_from_ssd()
                    self._sent += 1
                at += len(slots)
        finally:
            if self._ahead is not None:
                self._ahead.cancel()

    async def _hold(self, keys: Sequence[bytes]) -> list[int]:
        """The leading run of `keys`, or what of it may be held and comes in time; none is a miss."""
        node, namespace, until = self._node, self._namespace, time.monotonic() + GET_LOAD_S
        while True:
            run = calls.present(node, namespace, keys)
            in_memory = run.index(False) if False in run else len(run)
            if in_memory:  # and the rest comes while this is sent
                slots = self._lease(keys[:in_memory])
            else:
                coming = node.gpu.tier.bring_down(namespace, keys) if node.gpu is not None else []
                if not run and not coming:
                    return []
                slots = await self._load(keys if coming else keys[: len(run)], coming, until)
            now = time.monotonic()
            if slots or now >= until or node.moving is None or node.moving.trouble:
                return slots
            # There is one, and no room or no right to hold it at present: others have all that may be held.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(node.memory_changed()), min(GET_AGAIN_S, until - now))

    async def _load(self, keys: Sequence[bytes], coming: Sequence[Block], until: float) -> list[int]:
        """`coming`: what is copied down from devices for it."""
        self._refused = True
        tickets = self._node.tickets.of_session(self._session)
        try:
            number = loads.begin(self._node, tickets, self._namespace, keys, until, coming)
        except ResourceExhausted:  # the whole node loads all that it may
            return []
        self._stall.pause()  # the disk is waited for, and for a bounded time
        try:
            load = tickets.find_load(number)
            await load.wait(max(until - time.monotonic(), 0.0) + LATE_S)
            self._refused = load.ticket.busy
            return self._lease(keys)
        finally:
            tickets.give_up(number)
            self._stall.alive()

    def _came_from_ssd(self) -> None:
        """A caller that tells what it read is told so."""
        if self._tier != pb.TIER_SSD:
            self._tier = pb.TIER_SSD
            self._say()

    def _ended_early(self, there: Sequence[pb.Tier]) -> None:
        """`there`: what is present of the blocks that were announced and not sent."""
        if self._refused:
            self._busy = len(there)
            self._say()

    def _say(self) -> None:
        said = {chunks.TIER_METADATA: self._tier, chunks.BUSY_METADATA: self._busy}
        self._context.set_trailing_metadata(tuple((name, str(value)) for name, value in said.items()))

    def _bring_ahead(self, keys: Sequence[bytes]) -> None:
        """The next part comes while this one is sent; nobody holds it, so a slow caller keeps no memory by it."""
        node, self._ahead = self._node, None
        if node.moving is None or all(calls.present(node, self._namespace, keys)):
            return
        with contextlib.suppress(ResourceExhausted):  # then it comes when its turn is there
            self._ahead = Prefetch(node.moving, self._namespace, keys, time.monotonic() + GET_LOAD_S, 0)
            node.jobs_ready()

    def _lease(self, keys: Sequence[bytes]) -> list[int]:
        """What of the leading run is in memory, or as much of it as may be held."""
        try:
            return loads.hold_run(self._node, self._session, self._namespace, keys)[0]
        except ResourceExhausted:
            self._refused = True
            return []

    async def _send_block(self, slot: int, slot_bytes: int, block_bytes: int) -> None:
        block = self._node.slab.bytes_at(shm.ref_segment(slot), shm.ref_slot(slot) * slot_bytes, block_bytes)
        for message in chunks.block_messages(block):
            await self._write(message)

    async def _write(self, message: bytes) -> None:
        await self._context.write(message)
        self._stall.alive()
