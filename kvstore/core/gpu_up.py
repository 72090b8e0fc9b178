"""Blocks of memory that are copied to a device, each once, however many tickets want it.

A block that waits is held in memory as far as HELD_SHARE goes, so that it is not evicted before
its copy; from its turn to the report its slots on both sides are held. It is published only if
its slot in memory had it all the time, which the hold makes sure of: what leaves memory while it
is held was removed, and its copy comes to nothing.

What is brought and not used takes at most half of a tenant's memory on the device (ahead.py).
"""

from collections.abc import Callable, Sequence

from kvstore.core.ahead import Prefetched
from kvstore.core.block import NONE
from kvstore.core.gpu_copies import Copying, ParentsFirst
from kvstore.core.gpu_jobs import CopyUp
from kvstore.core.gpu_link import GpuLink
from kvstore.core.holds import Tenant
from kvstore.core.link import Block
from kvstore.core.loads import LATER
from kvstore.core.schedule import Kind, Turn

TOO_MUCH = "half of the device's memory has been prefetched and not used"
NO_ROOM = "there is no more room for it on the device"
REMOVED = "it was removed"
LEFT_MEMORY = "it was evicted from memory before it was copied"

Told = Callable[[Block, Sequence[int], str], None]
"""A block, numbers of the tickets that wanted it, and why it has not come; "" where it has."""


class CopyUps:
    """From memory to one device."""

    def __init__(self, link: GpuLink, tell: Told) -> None:
        self.link = link
        self._tell = tell
        self.coming: dict[Block, Copying] = {}
        """What waits or is under way, and is not cancelled."""
        self.under_way: dict[int, Copying] = {}
        """Copies that were begun and not reported, by the number of their job; cancelled ones too."""
        self.order = ParentsFirst(self.coming, self._place)
        self.ahead = Prefetched(link.store)
        """Blocks are named there by the device's number of their namespace."""
        self._gone: list[tuple[Block, Sequence[int], str]] = []
        """What is to be told when no store is being changed."""

    # -- what is to be copied

    def want(self, block: Block, ticket: int, priority: int) -> str:
        """For a block that memory has, or that is coming: "" where it comes, LATER where the queue is full, or why not.

        Tells its end, of the same block once for all tickets, and not before this returns.
        """
        link = self.link
        copying = self.coming.get(block)
        if copying is not None:
            copying.tickets.append(ticket)
            return ""
        row = link.memory_row(block)
        assert row != NONE, "a block that is not in memory cannot be copied from it"
        namespace = link.memory_namespace(block)
        _, why = link.try_device_namespace(namespace)
        if why:
            return why
        size_bytes = link.memory.pool(namespace).slot_bytes
        if not link.schedule.fits(Kind.PREFETCH, size_bytes):
            return LATER
        link.schedule.offer(Kind.PREFETCH, block, size_bytes, priority)
        copying = self.coming[block] = Copying(block, namespace, size_bytes, tickets=[ticket])
        copying.held = link.held_memory.try_hold(namespace, row)
        return ""

    def want_no_more(self, block: Block, ticket: int, *, begun: bool = False) -> bool:
        """One ticket waits no longer for what was not begun, or (`begun`) for anything; False where it waits on.

        What nobody else wants, and was not begun, is not copied.
        """
        copying = self.coming.get(block)
        if copying is None or ticket not in copying.tickets or (copying.job is not None and not begun):
            return False
        copying.tickets.remove(ticket)
        if not copying.tickets and copying.job is None:
            self.link.schedule.withdraw(Kind.PREFETCH, block)
            self._forget(copying)
        return True

    # -- copying

    def begin(self, block: Block) -> Turn:
        """A copy's turn has come."""
        link, copying = self.link, self.coming[block]
        namespace = copying.namespace
        device = link.device_namespace(namespace)
        if link.device_row(block) != NONE:
            self._over(copying, "")
            return Turn.OVER
        row = link.memory_row(block)
        assert row != NONE, "a block that has left memory waits to be copied from it"
        if not self.ahead.may_come(device):
            self._over(copying, TOO_MUCH)
            return Turn.OVER
        may_hold = copying.held is not None or link.on_memory.may_hold(namespace, 1)
        target = link.on_device.take(device) if may_hold else None
        if target is None:
            if link.store.room.pending or link.others_run:
                return Turn.LATER
            self._over(copying, NO_ROOM if may_hold else "more is held in memory than may be")
            return Turn.OVER
        source = self._take_held(copying)
        if source is None:
            source = link.on_memory.hold(namespace.tenant, row)
        copying.describe(link.memory, row)
        copying.job = CopyUp(link.number(), source, target, copying.size_bytes, namespace.block_bytes)
        self.under_way[copying.job.number] = copying
        link.jobs.append(copying.job)
        if link.moving is not None:
            link.moving.used([row])
        return Turn.BEGUN

    def copied(self, number: int, error: str, now: float) -> None:
        """The report of a CopyUp."""
        copying = self.under_way.pop(number)
        self.link.schedule.ended(Kind.PREFETCH)
        copying.error = error
        self.order.ended(copying, now)

    def _place(self, copying: Copying, now: float) -> None:
        """What was copied becomes a block on the device, if it may."""
        link, job, namespace, block = self.link, copying.job, copying.namespace, copying.block
        assert isinstance(job, CopyUp), "a copy that was never begun has ended"
        device = link.device_namespace(namespace)
        if not copying.cancelled:
            del self.coming[block]
            assert link.on_memory.holds(namespace.tenant, job.source), "a slot was let go of while it was copied from"
        link.on_memory.release(namespace.tenant, job.source)
        if copying.error or copying.cancelled:
            link.on_device.give_back(device.tenant, job.target)
            link.counts.copies_vain += not copying.error
            if not copying.cancelled:  # else it has been told
                self._tell(block, copying.tickets, f"copying it failed: {copying.error}")
            return
        session, ttl_s = link.on_device.session(device.tenant), copying.ttl_s(now)
        _, new, known = link.store.place(
            session, device, [block[1]], [job.target], [copying.parent], [copying.depth], now, ttl_s
        )
        if new:
            link.store.table.hits[new[0]] = copying.hits
            link.store.table.conversation[new[0]] = copying.conversation
            link.counts.copied_up += 1
            link.counts.bytes_up += job.length
            self.ahead.came((device.id, block[1]), tuple(copying.tickets))
        else:
            link.on_device.give_back(device.tenant, job.target)
            link.counts.copies_vain += 1
        self._tell(block, copying.tickets, "" if new or known else "its key is another namespace's")

    # -- what goes

    def left_host(self, block: Block) -> None:
        """A block leaves memory; one that is held was not evicted but removed."""
        copying = self.coming.pop(block, None)
        if copying is None:
            return
        copying.cancelled = True
        why = REMOVED
        if copying.job is None:
            self.link.schedule.withdraw(Kind.PREFETCH, block)
            source = self._take_held(copying)
            if source is not None:
                self.link.release_later(self.link.on_memory, copying.namespace.tenant, source)
            else:
                why = LEFT_MEMORY
        self._gone.append((block, copying.tickets, why))

    def settle(self) -> None:
        """Tells what could not be told from a callback."""
        gone, self._gone = self._gone, []
        for block, tickets, why in gone:
            self._tell(block, tickets, why)

    def leave_behind(self) -> dict[int, tuple[Tenant, int]]:
        """Gives up what is under way; number of each copy -> the slot of memory that is held until its report.

        The tickets have been ended before.
        """
        link, left = self.link, dict[int, tuple[Tenant, int]]()
        ended = self.order.take_all()
        for copying in (*self.under_way.values(), *ended):
            assert copying.job is not None, "a copy under way has no job"
            link.on_device.give_back(link.device_namespace(copying.namespace).tenant, copying.job.target)
            if copying in ended:
                link.on_memory.release(copying.namespace.tenant, copying.job.source)
            else:
                left[copying.job.number] = (copying.namespace.tenant, copying.job.source)
                link.schedule.ended(Kind.PREFETCH)
        link.counts.left_behind += len(left)
        self.under_way.clear()
        assert all(copying.job is not None for copying in self.coming.values()), "a copy waits that nobody wants"
        self.coming.clear()
        return left

    def _over(self, copying: Copying, why: str) -> None:
        """It is not copied: it is there, or cannot be."""
        self._forget(copying)
        self._tell(copying.block, copying.tickets, why)

    def _forget(self, copying: Copying) -> None:
        del self.coming[copying.block]
        source = self._take_held(copying)
        if source is not None:
            self.link.on_memory.release(copying.namespace.tenant, source)

    def _take_held(self, copying: Copying) -> int | None:
        """The slot that it was held in while it waited, if it was; whoever takes it lets go of it."""
        held, copying.held = copying.held, None
        if held is not None:
            self.link.held_memory.no_more(copying.namespace)
        return held
