"""Remove and Clear, and what becomes of the SSD's records of what was removed on purpose.

What is removed is gone for readers at once. The call is answered when it stays gone whatever
happens to the daemon: its records are deleted on the disk; or, while the SSD cannot do that, or
not in time, it is written down that they are to be (kvstore/moving/removals.py). Where that fails too
the answer says so. A removal waits for its own records alone, and a caller that leaves ends
nothing of it. Nobody waits for what the policy evicts, for the end of a pin or of a block's life:
these are not promised to anybody, and a block that is back is a block like others.
"""

import asyncio
import time
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.core.forgetting import Deletion
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.movement import Movement
from kvstore.logs import logger
from kvstore.server.calls import Node, checked_keys
from kvstore.server.tickets import Kept, Tickets
from kvstored.v1 import kvstore_pb2 as pb

log = logger("kvstored.removing")

REMOVED_S = 1.0
"""For the records of named blocks to be deleted; then it is written down that they are to be."""

CLEARED_S = 10.0
"""The same for many: of a million records it takes half of that."""

CLEAR_ROWS = 1024
CLEAR_ROUNDS_MAX = 4
BUSY = "too many calls of this session wait already; whether it is on the disk was not waited for"
ONLY_MEMORY = "its records are not known yet"


@dataclass(frozen=True)
class Removed:
    """What was removed, by the numbers of memory's namespaces (None: of all)."""

    spaces: Collection[int] | None
    keys: Sequence[bytes] | None
    """None: whatever was removed there so far."""
    whole: Namespace | None = None
    """A namespace that was cleared: all that was stored there before `upto`, where that is known."""
    upto: int = 0
    everywhere: str | None = None
    """A tenant in whose namespaces all of it is removed, also in those that are not known yet; "": of everybody."""


class Removing(Kept):
    """One removal, until it is decided whether it is for good."""

    name = "removals"

    def __init__(self, node: Node, moving: Movement, removed: Removed, limit_s: float) -> None:
        super().__init__()
        self.size = len(removed.keys or ())
        self.why = ""
        """Why what was removed may be back; "" where it will not be."""
        self._node = node
        self._moving = moving
        self._removed = removed
        self._until = time.monotonic() + limit_s
        self._waiter: Deletion | None = None
        self._task = asyncio.get_running_loop().create_task(self._run(), name="removal")

    async def decided(self) -> str:
        """Waits for its end; `why`. Who is cancelled meanwhile ends nothing."""
        await asyncio.shield(self._task)
        return self.why

    def cancel(self) -> None:
        """Whoever asked is gone: it goes on."""

    def reply(self) -> pb.TicketReply:
        state = pb.TICKET_RUNNING if not self.over else pb.TICKET_FAILED if self.why else pb.TICKET_DONE
        return pb.TicketReply(state=state, waiting=self._waiter.left if self._waiter is not None else 0, why=self.why)

    async def _run(self) -> None:
        try:
            self.why = await self._stays()
        except Exception as e:
            self._node.internal_errors += 1
            log.exception("a removal failed")
            self.why = f"internal error of the daemon: {type(e).__name__}; see its log"
        finally:
            self._over.set()

    async def _stays(self) -> str:
        moving, removed = self._moving, self._removed
        self._node.jobs_ready()
        if moving.ready and not moving.trouble:
            await self._deleted()
        if not moving.ready:
            return self._said(await self._note_unknown())
        left = moving.writes.forgetting.not_deleted(removed.spaces, removed.keys)
        if not left:
            return ""
        assert self._node.removals is not None, "there is no SSD"
        if removed.whole is not None and removed.upto:
            why = await self._node.removals.note(removed.whole.tenant.name, removed.whole.digest, None, removed.upto)
        else:
            why = await self._node.removals.note_all(left)
        return self._said(why)

    async def _deleted(self) -> None:
        """Waits until all of it is, in time, or it is known that nothing will be for now."""
        ended = asyncio.Event()
        waiter = self._moving.writes.forgetting.wait_removed(
            self._removed.spaces, self._removed.keys, lambda _: ended.set()
        )
        self._waiter = waiter
        try:
            async with asyncio.timeout(self._until - time.monotonic()):
                await ended.wait()
        except TimeoutError:
            pass
        finally:
            self._moving.writes.forgetting.stop(waiter)

    async def _note_unknown(self) -> str:
        """While it is not known which records there are."""
        node, removed = self._node, self._removed
        assert node.removals is not None, "there is no SSD"
        if removed.whole is not None:
            return await node.removals.note(removed.whole.tenant.name, removed.whole.digest, None, removed.upto)
        if removed.everywhere is not None:
            return await node.removals.note_everywhere(removed.everywhere, removed.keys)
        if removed.keys is None or removed.spaces is None:
            return ONLY_MEMORY
        spaces = [node.store.namespaces[number - 1] for number in removed.spaces]
        noted = [node.removals.note(space.tenant.name, space.digest, removed.keys, 0) for space in spaces]
        return next(filter(None, await asyncio.gather(*noted)), "")

    def _said(self, why: str) -> str:
        if not why:
            return ""
        trouble = self._moving.trouble
        return f"{f'the SSD is out of use: {trouble}' if trouble else 'records are not deleted yet'}; and {why}"


def begin(node: Node, removed: Removed, limit_s: float) -> Removing | None:
    """Sees to it that what was just removed stays so; None where that is so already."""
    moving = node.moving
    if moving is None or removed.keys == []:
        return None
    if moving.ready:
        waiter = moving.writes.forgetting.wait_removed(removed.spaces, removed.keys, lambda _: None)
        moving.writes.forgetting.stop(waiter)
        if not waiter.left:
            return None
    return Removing(node, moving, removed, limit_s)


def remove(
    node: Node, tenant: Tenant, request: pb.RemoveRequest, tickets: Tickets | None = None, *, may_wait: bool = True
) -> pb.RemoveReply | Coroutine[Any, Any, pb.RemoveReply]:
    """From all tiers; a block counts once. With a ticket of `tickets`, where one is asked for and to be had."""
    namespace = node.store.namespace(tenant, request.namespace_id)
    keys, count = checked_keys(request.keys), 0
    if node.gpu is not None:
        count = node.gpu.tier.remove(namespace, keys)
        node.gpu.pump()
    if node.moving is not None:
        count += node.moving.remove_from_disk(namespace, keys)
    node.store.counts.removed += count
    reply = pb.RemoveReply(removed=count + node.store.remove(namespace, keys))
    removing = begin(node, Removed([namespace.id], keys), REMOVED_S)
    if removing is None:
        return reply
    if request.ticket and tickets is not None:
        reply.ticket = tickets.keep(removing)
    if reply.ticket:
        return reply
    if not may_wait:
        reply.not_on_disk_yet = BUSY
        return reply

    async def waited() -> pb.RemoveReply:
        reply.not_on_disk_yet = await removing.decided()
        return reply

    return waited()


async def clear(node: Node, tenant: Tenant, request: pb.ClearRequest) -> pb.ClearReply:
    """Clears in bounded steps; blocks committed to the namespace meanwhile may or may not survive.

    Devices and the SSD come first, so that nothing of them is brought to memory that was cleared already; and once
    more after memory, for what was being copied or written meanwhile, until there was nothing.
    """
    namespace = node.store.namespace(tenant, request.namespace_id)
    counts, removed = node.store.counts, 0
    for round_ in range(CLEAR_ROUNDS_MAX):
        of_devices, of_disk = await _clear_devices(node, namespace), await _clear_disk(node, namespace)
        dropped, only = of_devices[0] + of_disk[0], of_devices[1] + of_disk[1]
        counts.removed += only
        removed += only
        if round_ and not dropped:
            break
        at: int | None = 0
        while at is not None:
            before = counts.removed
            at = node.store.clear_step(namespace, at, CLEAR_ROWS)
            removed += counts.removed - before
            await asyncio.sleep(0)
        if node.moving is None and node.gpu is None:
            break
    # After the last step: what was being written meanwhile and was cleared, too, has a number of its own.
    upto = node.removals.last_record() if node.removals is not None else 0
    removing = begin(node, Removed([namespace.id], None, whole=namespace, upto=upto), CLEARED_S)
    return pb.ClearReply(removed=removed, not_on_disk_yet=await removing.decided() if removing is not None else "")


async def _clear_devices(node: Node, namespace: Namespace) -> tuple[int, int]:
    """How many copies went from devices, and of how many blocks they were the only ones."""
    dropped, only = 0, 0
    at: int | None = 0
    while at is not None and node.gpu is not None:
        at, copies, blocks = node.gpu.tier.clear_step(namespace, at, CLEAR_ROWS)
        dropped, only = dropped + copies, only + blocks
        node.gpu.pump()
        await asyncio.sleep(0)
    return dropped, only


async def _clear_disk(node: Node, namespace: Namespace) -> tuple[int, int]:
    """How many copies went from the SSD, and of how many blocks they were the only ones."""
    dropped, only = 0, 0
    at: int | None = 0
    while at is not None and node.moving is not None:
        at, copies, blocks = node.moving.clear_step(namespace, at, CLEAR_ROWS)
        dropped, only = dropped + copies, only + blocks
        await asyncio.sleep(0)
    return dropped, only
