"""What callers have asked other tiers for, and are not done with: loads, prefetches, durable commits.

Each is a ticket of its owner: the session, or for gRPC calls that are no session's the tenant.
Nobody waits in a call for as long as a disk may take: a call answers within WAIT_S with a
number to ask again by.

Rules
  - a load keeps what it brings until its owner takes it: one whose owner has not asked for
    ASK_AGAIN_S is given up, as all are when the session ends;
  - a prefetch and a durable commit end by themselves, by their deadlines; their end is known
    for KNOWN_S, or until too many others have ended since. So do those that are about a device
    (device_tickets.py), which there are without an SSD as well.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

from kvstore.core import loads as core
from kvstore.core.durable import Durable
from kvstore.core.holds import Namespace, Session, Tenant
from kvstore.core.movement import Movement
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, ResourceExhausted

WAIT_S = 1.0
"""The longest that one call waits."""

ASK_AGAIN_S = 10.0
KNOWN_S = 60.0

DURABLE_S = 30.0
"""For blocks to reach the SSD; then they are said to be stored, and not to be durable."""

GET_LOAD_S = 10.0
"""For a part of a Get to come from the SSD; what has not come is as if it were not there."""

LOAD_AGAIN_S = 0.05
"""Between two attempts at a load that may hold nothing at present."""

LOADS_MAX = 64
RUNNING_MAX = 256
"""Loads of one owner that are under way; and prefetches, and durable commits: neither keeps another from its own."""

KEYS_MAX = 1 << 17
"""Of all prefetches, and of all durable commits, of one owner under way; a million tokens in blocks of 16 are half."""

ENDED_MAX = 1024
"""Ends remembered of one owner."""

STATES = {
    core.RUNNING: pb.TICKET_RUNNING,
    core.DONE: pb.TICKET_DONE,
    core.FAILED: pb.TICKET_FAILED,
    core.CANCELLED: pb.TICKET_CANCELLED,
}


class Awaited:
    """Something that ends, and whoever waits for its end."""

    def __init__(self) -> None:
        self._over = asyncio.Event()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    async def wait(self, seconds: float) -> None:
        """Until the end, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()


class Wanted(Awaited):
    """Blocks on their way to memory for somebody who waits. Whoever made it must `close` it."""

    namespace: Namespace
    keys: Sequence[bytes]
    began: float
    """As time.perf_counter has it."""

    @property
    def ticket(self) -> core.Ticket:
        """How far it is."""
        raise NotImplementedError

    def missing(self, found: int) -> int:
        """How many blocks behind the first `found` are there, and did not come since too much was asked for or held."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is held for it any more."""
        raise NotImplementedError


class Load(Wanted):
    """The leading run of some keys on its way to memory, and held there.

    Where nothing of it may be held at present, since others hold all that may be, it is tried
    again until its deadline: that is no miss.
    """

    def __init__(
        self, moving: Movement, namespace: Namespace, keys: Sequence[bytes], deadline: float, begun: Callable[[], None]
    ) -> None:
        """`begun` is called when there is something new to read. Raises ResourceExhausted: too much is asked for."""
        super().__init__()
        self._moving = moving
        self._deadline = deadline
        self._begun = begun
        self._timer: asyncio.TimerHandle | None = None
        self.namespace = namespace
        self.keys = keys
        self.began = time.perf_counter()
        self._ticket = self._ask()

    @property
    def ticket(self) -> core.Ticket:
        return self._ticket

    def _ask(self) -> core.Ticket:
        ticket = self._moving.load(self.namespace, self.keys, self._deadline, self._ended)
        self._begun()
        return ticket

    def _ended(self, ticket: core.Ticket) -> None:
        if not self.over and ticket.state == core.FAILED and not ticket.held and self._may_come():
            self._timer = asyncio.get_running_loop().call_later(LOAD_AGAIN_S, self._again)
        else:
            self._over.set()

    def _may_come(self) -> bool:
        moving, first = self._moving, self.keys[:1]
        in_time = time.monotonic() + LOAD_AGAIN_S < self._deadline
        return in_time and not moving.trouble and bool(moving.match(self.namespace, first))

    def _again(self) -> None:
        self._timer = None
        self._moving.loads.close(self.ticket)
        try:
            self._ticket = self._ask()
        except ResourceExhausted:  # others were faster
            self.ticket.busy = True
            self._ended(self.ticket)

    def missing(self, found: int) -> int:
        if not self.ticket.busy:
            return 0
        return max(len(self._moving.match(self.namespace, self.keys)) - found, 0)

    def close(self) -> None:
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()
        self._moving.loads.close(self.ticket)


class Kept(Awaited):
    """One that its owner asks about by a number."""

    name = ""
    """What many of them are called."""
    size = 0
    """Keys that it is about."""

    def cancel(self) -> None:
        """Its owner does not want to know any more."""
        raise NotImplementedError

    def reply(self) -> pb.TicketReply:
        """How far it is."""
        raise NotImplementedError

    def forgotten(self) -> None:
        """It has ended, and its number means nothing any more."""


class Prefetch(Kept):
    """The leading run of some keys on its way to memory, held by nobody."""

    name = "prefetches"

    def __init__(
        self, moving: Movement, namespace: Namespace, keys: Sequence[bytes], deadline: float, priority: int
    ) -> None:
        super().__init__()
        self._moving = moving
        self.size = len(keys)
        self._ticket = moving.prefetch(namespace, keys, deadline, self._ended, priority)

    def _ended(self, ticket: core.Ticket) -> None:
        self._moving.loads.close(ticket)
        self._over.set()

    def cancel(self) -> None:
        self._moving.loads.cancel(self._ticket)

    def reply(self) -> pb.TicketReply:
        ticket = self._ticket
        return pb.TicketReply(
            state=STATES[ticket.state],
            blocks=self._moving.loads.blocks_now(ticket),
            loaded=ticket.loaded,
            waiting=len(ticket.waiting),
            why=ticket.why,
        )


class Saving(Kept):
    """Blocks on their way to the SSD, for somebody who wants to know that they are there."""

    name = "durable commits"

    def __init__(self, moving: Movement) -> None:
        super().__init__()
        self._moving = moving
        self._waiters: list[Durable] = []
        self._left = 0
        self.size = 0
        self.why = ""
        self._state = core.RUNNING
        self._timer: asyncio.TimerHandle | None = None

    def add(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Blocks that must be there as well. Before `begin`."""
        self._left += 1
        self.size += len(keys)
        self._waiters.append(self._moving.writes.wait_durable(namespace, keys, self._ended))

    def begin(self) -> None:
        """No more are added: it ends with the last of them, in DURABLE_S at the latest."""
        if self._left:
            self._timer = asyncio.get_running_loop().call_later(DURABLE_S, self._late)
        else:
            self._all_ended()

    def _ended(self, waiter: Durable) -> None:
        self._left -= 1
        self.why = self.why or waiter.why
        if not self._left and self._timer is not None:
            self._all_ended()

    def _all_ended(self) -> None:
        """Each of them was there once. What has left the SSD since is no more durable than what never came."""
        self.why = self.why or next((waiter.why for waiter in self._waiters if waiter.why), "")
        self._end(core.FAILED if self.why else core.DONE)

    def _late(self) -> None:
        self.why = self.why or f"it was not on the SSD within {DURABLE_S:.0f} s"
        self._end(core.FAILED)

    def cancel(self) -> None:
        """Nobody wants to know any more; the blocks go on."""
        if not self.over:
            self.why = self.why or "cancelled"
            self._end(core.CANCELLED)

    def _end(self, state: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._waiters:
            self._moving.writes.forget_waiter(waiter)
        self._waiters.clear()
        self._state = state
        self._over.set()

    def reply(self) -> pb.TicketReply:
        return pb.TicketReply(
            state=STATES[self._state],
            waiting=sum(len(waiter.left) for waiter in self._waiters),
            why=self.why,
        )


class Tickets:
    """Those of one owner."""

    def __init__(self, moving: Movement | None, numbers: Callable[[], int], begun: Callable[[], None]) -> None:
        """`moving`: where there is an SSD. Loads, prefetches to memory and durable commits are for who has one."""
        self._found = moving
        self._number = numbers
        self._begun = begun
        self._loads: dict[int, Wanted] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._running: dict[int, Kept] = {}
        self._ended: dict[int, Kept] = {}
        self._ends: deque[tuple[float, int]] = deque()
        """When each of `_ended` was seen to have ended."""

    @property
    def _moving(self) -> Movement:
        assert self._found is not None, "there is no SSD"
        return self._found

    # -- loads

    def load(self, namespace: Namespace, keys: Sequence[bytes], deadline: float) -> int:
        """Begins to bring the leading run of `keys`; answers the number to ask by."""
        return self.want(lambda: Load(self._moving, namespace, keys, deadline, self._begun))

    def want(self, begin: Callable[[], Wanted]) -> int:
        """Begins a load; answers the number to ask by."""
        if len(self._loads) >= LOADS_MAX:
            raise ResourceExhausted(f"{LOADS_MAX} loads of this session are under way already")
        load = begin()
        number = self._number()
        self._loads[number] = load
        self._await_owner(number)
        return number

    def find_load(self, number: int) -> Wanted:
        """A load whose owner asks for it again."""
        load = self._loads.get(number)
        if load is None:
            raise FailedPrecondition(
                f"this session has no load {number}: it was answered, given up, or not asked for in {ASK_AGAIN_S:.0f} s"
            )
        self._await_owner(number)
        return load

    def _await_owner(self, number: int) -> None:
        before = self._timers.get(number)
        if before is not None:
            before.cancel()
        self._timers[number] = asyncio.get_running_loop().call_later(ASK_AGAIN_S, self.give_up, number)

    def give_up(self, number: int) -> None:
        """Nothing is held for that load any more; one that is unknown has been given up already."""
        load = self._loads.pop(number, None)
        if load is not None:
            self._timers.pop(number).cancel()
            load.close()

    # -- prefetches and durable commits

    def prefetch(self, namespace: Namespace, keys: Sequence[bytes], deadline: float, priority: int) -> int:
        """Begins to bring the leading run of `keys` ahead of use."""
        self.check_room(Prefetch, len(keys))
        return self._keep(Prefetch(self._moving, namespace, keys, deadline, priority))

    def save(self, namespace: Namespace, keys: Sequence[bytes]) -> tuple[int, str]:
        """Has blocks written to the SSD ahead of others: a number to ask by, or 0 and why they are not there ("": are).

        Never raises: what is to be durable has been stored already.
        """
        why = self._too_many(Saving, len(keys))
        if why:
            return 0, why
        saving = Saving(self._moving)
        saving.add(namespace, keys)
        saving.begin()
        return (0, saving.why) if saving.over else (self._keep(saving), "")

    def check_room(self, kind: type[Kept], keys: int) -> None:
        """Raises ResourceExhausted where one more of that kind is not taken: before it is begun."""
        why = self._too_many(kind, keys)
        if why:
            raise ResourceExhausted(why)

    def keep(self, awaited: Kept) -> int:
        """A number to ask about it by; 0 where its owner has too many of that kind."""
        return 0 if self._too_many(type(awaited), awaited.size) else self._keep(awaited)

    def find(self, number: int) -> Kept | None:
        """The one of that number; None where there is none (any more)."""
        self._settle()
        return self._running.get(number) or self._ended.get(number)

    def _keep(self, awaited: Kept) -> int:
        number = self._number()
        self._running[number] = awaited
        return number

    def _too_many(self, kind: type[Kept], keys: int) -> str:
        """Why one more of that kind is not taken; "" where it is."""
        self._settle()
        running = [awaited.size for awaited in self._running.values() if isinstance(awaited, kind)]
        if len(running) >= RUNNING_MAX:
            return f"{RUNNING_MAX} {kind.name} are under way already: wait for some of them"
        if sum(running) + keys > KEYS_MAX:
            return f"{kind.name} of {KEYS_MAX} keys are under way already: wait for some of them"
        return ""

    def _settle(self) -> None:
        """What has ended is known for a while: for less long where there is much of it."""
        now = time.monotonic()
        for number in [number for number, awaited in self._running.items() if awaited.over]:
            self._ended[number] = self._running.pop(number)
            self._ends.append((now, number))
        while self._ends and (self._ends[0][0] <= now - KNOWN_S or self._above_limits()):
            self._ended.pop(self._ends.popleft()[1]).forgotten()

    def _above_limits(self) -> bool:
        return len(self._ended) > ENDED_MAX or sum(awaited.size for awaited in self._ended.values()) > KEYS_MAX

    def close(self) -> None:
        """The owner is gone."""
        for number in list(self._loads):
            self.give_up(number)
        for awaited in self._running.values():
            awaited.cancel()
        self._running.clear()
        self._ended.clear()
        self._ends.clear()


class AllTickets:
    """By owner."""

    def __init__(self, moving: Movement | None, begun: Callable[[], None]) -> None:
        """`begun` is called when there is something new for the SSD's workers; `moving`: where there is an SSD."""
        self._moving = moving
        self._begun = begun
        self._of: dict[tuple[str, int], Tickets] = {}
        self._numbers = count(1)

    def of_session(self, session: Session) -> Tickets:
        return self._find("session", session.id)

    def of_tenant(self, tenant: Tenant) -> Tickets:
        return self._find("tenant", tenant.id)

    def _find(self, kind: str, number: int) -> Tickets:
        found = self._of.get((kind, number))
        if found is None:
            found = self._of[kind, number] = Tickets(self._moving, lambda: next(self._numbers), self._begun)
        return found

    def end(self, session: Session) -> None:
        """A session is over, and so is what it asked for."""
        found = self._of.pop(("session", session.id), None)
        if found is not None:
            found.close()
