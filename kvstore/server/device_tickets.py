"""What callers wait for of a device: commits whose event has not come, and prefetches to it.

A commit is answered at once and its end is asked for, like everything that takes long: so the
answers of one session stay in the order of its calls, and none of its waits is an event's.
Nobody ends a commit but its event, its deadline (gpu_commits.EVENT_S), or the end of its session.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.core import loads as core
from kvstore.core.gpu_commits import PendingCommit
from kvstore.core.gpu_pool import GpuPool
from kvstore.core.gpu_tickets import GpuTicket
from kvstore.core.holds import Namespace, Session
from kvstore.core.link import Block
from kvstore.core.loads import DONE
from kvstore.core.schedule import Kind
from kvstore.core.store import STORED
from kvstore.logs import logger
from kvstore.server.tickets import STATES, Kept, Load, Wanted
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import ResourceExhausted

if TYPE_CHECKING:
    from kvstore.server.calls import Node

log = logger("kvstored.gpu")

DOWN_AGAIN_S = 0.05
"""Between two looks at copies that are under way: their end is told, too."""

LATE_S = 1.0
"""How much longer than its deadline a load may take to be over."""

Begin = Callable[[Callable[[PendingCommit], None]], PendingCommit]
"""Begins a commit, whose end is told to what it is given."""


class DeviceCommit(Kept):
    """One Commit to a device."""

    name = "commits to devices"

    def __init__(self, pool: GpuPool, client: Session, size: int, begin: Begin) -> None:
        """Raises what `GpuPool.commit` does; then nothing has changed."""
        super().__init__()
        self.size = size
        self._pool = pool
        self._client = client
        self._told = False
        self.commit = begin(lambda _: self._over.set())

    def cancel(self) -> None:
        """It ends by itself: the daemon cannot take back what the client's device is doing."""

    def reply(self) -> pb.TicketReply:
        commit = self.commit
        self._told |= self.over
        return pb.TicketReply(
            state=STATES[commit.state],
            waiting=0 if self.over else self.size,
            why=commit.why,
            results=commit.results,  # type: ignore[arg-type]
        )

    def forgotten(self) -> None:
        """Nobody was told which slots are the client's again: it was told that none is, so they go back."""
        commit, here = self.commit, self._pool.session_here(self._client)
        if self._told or commit.state != DONE or here is not commit.session or here.ended:
            return
        left = [ref for ref, result in zip(commit.refs, commit.results, strict=True) if result != STORED]
        self._pool.store.abort(here, [ref for ref in left if ref in here.granted])


class DevicePrefetch(Kept):
    """The leading run of some keys on its way to a device, held by nobody."""

    name = "prefetches to devices"

    def __init__(
        self, pool: GpuPool, namespace: Namespace, keys: Sequence[bytes], deadline: float, priority: int
    ) -> None:
        """Raises Unavailable where the device is out of use, ResourceExhausted where it has too many."""
        super().__init__()
        self._pool = pool
        self.size = len(keys)
        self._ticket = pool.prefetch(namespace, keys, deadline, self._ended, priority)

    def _ended(self, ticket: GpuTicket) -> None:
        self._pool.tickets.close(ticket)
        self._over.set()

    def cancel(self) -> None:
        self._pool.tickets.cancel(self._ticket)

    def reply(self) -> pb.TicketReply:
        ticket = self._ticket
        return pb.TicketReply(
            state=STATES[ticket.state],
            blocks=self._pool.tickets.blocks_now(ticket),
            loaded=ticket.copied,
            waiting=len(ticket.waiting),
            why=ticket.why,
        )


class LoadFromDevices(Wanted):
    """A load of what only devices have, among other blocks: copied down first, and then loaded like any other.

    What cannot be copied, and what has not come by the deadline, ends the run, as a block does that is nowhere.
    """

    def __init__(
        self, node: "Node", namespace: Namespace, keys: Sequence[bytes], deadline: float, coming: Sequence[Block]
    ) -> None:
        """`coming`: the blocks that are being copied."""
        super().__init__()
        self.namespace = namespace
        self.keys = keys
        self.began = time.perf_counter()
        self._node = node
        self._deadline = deadline
        self._load: Load | None = None
        self._before = core.Ticket(0, namespace, [], Kind.LOAD, 0, deadline, lambda _: None)
        """Until there is one, or in its place."""
        self._task = asyncio.get_running_loop().create_task(self._run(list(coming)), name="load from devices")

    @property
    def ticket(self) -> core.Ticket:
        return self._before if self._load is None else self._load.ticket

    def missing(self, found: int) -> int:
        return 0 if self._load is None else self._load.missing(found)

    def close(self) -> None:
        self._over.set()
        self._task.cancel()
        if self._load is not None:
            self._load.close()

    async def _run(self, coming: list[Block]) -> None:
        try:
            in_time = await self._in_time(coming)
            if in_time and self._node.moving is not None:
                self._load = Load(self._node.moving, self.namespace, self.keys, self._deadline, self._node.jobs_ready)
                await self._load.wait(max(self._deadline - time.monotonic(), 0.0) + LATE_S)
        except ResourceExhausted as e:
            self._before.busy, self._before.why = True, str(e)
        except Exception as e:
            self._node.internal_errors += 1
            log.exception("a load from devices failed")
            self._before.why = f"internal error of the daemon: {type(e).__name__}; see its log"
        finally:
            self._over.set()

    async def _in_time(self, coming: list[Block]) -> bool:
        """Waits until all of these are there, or do not come; False where the deadline was first."""
        node = self._node
        assert node.gpu is not None, "a node without devices"
        while coming := node.gpu.tier.coming_down(coming):
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._before.busy, self._before.why = True, "not all of it was copied from its device in time"
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(node.memory_changed()), min(left, DOWN_AGAIN_S))
        return True
