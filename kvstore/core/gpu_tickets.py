"""Prefetches to a device: who wants which blocks there, and until when.

A ticket is for the leading run of its keys that is in any tier. What the device has counts as
come, what memory has is copied up, and what only the SSD has is first brought to memory by
`Movement`, PORTION_BLOCKS at a time, so that its blocks need not all be in memory at once. What
is nowhere but on another device ends the run.

A ticket ends done, failed or cancelled, by its deadline at the latest; copies under way go on to
their report, and a block that arrives late is on the device like any other. `ended` is called
once; who asked has to `close` it. What the SSD and copies tell is only noted, and acted on by
`feed`, so that nothing is asked of a tier while it is at something else.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.core.block import NONE
from kvstore.core.gpu_link import GpuLink
from kvstore.core.gpu_up import CopyUps
from kvstore.core.holds import Namespace
from kvstore.core.link import Block
from kvstore.core.loads import CANCELLED, DONE, FAILED, LATER, RUNNING, TICKET_BLOCKS_MAX, Ticket
from kvstored.v1.errors import KVStoreError, ResourceExhausted, Unavailable

TICKETS_MAX = 4096
"""Of one device."""

PORTION_BLOCKS = 32
"""Asked of the SSD at a time for one ticket."""

DISPLACED = "what it had brought was evicted from the device again"
NOT_LOADED = "it was evicted from memory before it was copied"


@dataclass(eq=False, slots=True)
class GpuTicket:
    """One caller's wish."""

    number: int
    namespace: Namespace
    """As memory has it."""
    keys: list[bytes]
    priority: int
    deadline: float
    ended: Callable[["GpuTicket"], None]
    state: str = RUNNING
    why: str = ""
    """Why not all of the run came."""
    busy: bool = False
    """That may pass: there was too much to do, or no room, for all of it to come."""
    at: int = 0
    """Which of `keys` is to be asked for next."""
    waiting: set[Block] = field(default_factory=set)
    """Blocks that are to be copied for it."""
    copied: int = 0
    below: Ticket | None = None
    """What it waits for of the SSD."""
    loaded_to: int = 0
    """Of `keys`, those before this were asked of the SSD, if they were there only."""
    loaded_why: str = ""
    """Why not all of these came."""


class GpuTickets:
    """Of one device."""

    def __init__(self, link: GpuLink) -> None:
        self.link = link
        self.ups = CopyUps(link, self._copied)
        self.tickets: dict[int, GpuTicket] = {}
        self._portions: list[tuple[int, int]] = []
        """A heap of tickets that are to go on: priority, the highest first, and number."""
        self._listed: set[int] = set()
        """Numbers in it."""
        self._last = 0

    # -- calls

    def ask(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        deadline: float,
        ended: Callable[[GpuTicket], None],
        priority: int = 0,
    ) -> GpuTicket:
        """Brings the leading run of `keys` to the device; `ended` may be called before this returns.

        Raises Unavailable where the device is out of use, and ResourceExhausted for too many tickets.
        """
        if self.link.trouble:
            raise Unavailable(f"device {self.link.uuid} is out of use: {self.link.trouble}")
        if len(self.tickets) >= TICKETS_MAX:
            raise ResourceExhausted(f"{TICKETS_MAX} prefetches to device {self.link.uuid} are under way already")
        self._last += 1
        ticket = GpuTicket(self._last, namespace, list(keys[:TICKET_BLOCKS_MAX]), priority, deadline, ended)
        self.tickets[ticket.number] = ticket
        self._go_on(ticket)
        return ticket

    def cancel(self, ticket: GpuTicket) -> None:
        """Ends a ticket that is running; one that is final stays as it is."""
        self._abandon(ticket, CANCELLED, "cancelled")

    def close(self, ticket: GpuTicket) -> None:
        """Its owner has what he wanted, or gives up."""
        self.cancel(ticket)
        self.tickets.pop(ticket.number, None)

    def blocks_now(self, ticket: GpuTicket) -> int:
        """How many leading blocks of a ticket are on the device now."""
        rows = (self.link.device_row((ticket.namespace.id, key)) for key in ticket.keys)
        return next((count for count, row in enumerate(rows) if row == NONE), len(ticket.keys))

    def expire(self, now: float) -> None:
        """Ends tickets whose deadline has passed."""
        for ticket in [t for t in self.tickets.values() if t.state == RUNNING and t.deadline <= now]:
            self._abandon(ticket, FAILED, "its deadline passed")

    def fail_all(self, why: str) -> None:
        """The device is lost: nobody waits for it."""
        for ticket in list(self.tickets.values()):
            self._abandon(ticket, FAILED, why)

    # -- going on

    def feed(self) -> None:
        """Acts on what was told since the last call, and asks for more. Ahead of each run of the queue."""
        self.ups.settle()
        for number in self.ups.ahead.displaced():
            ticket = self.tickets.get(number)
            if ticket is not None and ticket.state == RUNNING:
                self._stop(ticket, DISPLACED)
        again: list[GpuTicket] = []
        while self._portions:
            number = heapq.heappop(self._portions)[1]
            self._listed.discard(number)
            ticket = self.tickets.get(number)
            if ticket is None or ticket.state != RUNNING:
                continue
            self._take_loaded(ticket)
            if ticket.below is None and self._go_on(ticket, later=again.append):
                break  # the queue is full: nobody else's would fit either
        for ticket in again:
            self._list(ticket)

    def _list(self, ticket: GpuTicket) -> None:
        if ticket.number not in self._listed:
            self._listed.add(ticket.number)
            heapq.heappush(self._portions, (-ticket.priority, ticket.number))

    def _go_on(self, ticket: GpuTicket, later: Callable[[GpuTicket], None] | None = None) -> bool:
        """Asks for its blocks in their order, as many as are taken now; True where the queue takes no more."""
        while ticket.at < len(ticket.keys):
            block = (ticket.namespace.id, ticket.keys[ticket.at])
            if self.link.device_row(block) != NONE:
                ticket.at += 1
            elif block in self.ups.coming or self.link.memory_row(block) != NONE:
                why = "" if block in ticket.waiting else self.ups.want(block, ticket.number, ticket.priority)
                if why == LATER:
                    (later or self._list)(ticket)
                    return True
                if why:
                    ticket.why = ticket.why or why
                    break
                ticket.waiting.add(block)
                ticket.at += 1
            elif ticket.at < ticket.loaded_to:
                ticket.why = ticket.why or ticket.loaded_why or NOT_LOADED
                break
            elif self._load(ticket):
                return False
            else:
                break
        ticket.at = len(ticket.keys)
        self._end_if_over(ticket)
        return False

    def _load(self, ticket: GpuTicket) -> bool:
        """Has the SSD bring the next portion to memory; False where the run ends here."""
        link, moving, number = self.link, self.link.moving, ticket.namespace.id
        if moving is None or not link.on_ssd((number, ticket.keys[ticket.at])):
            return False
        if moving.trouble:
            ticket.why = ticket.why or f"the SSD is out of use: {moving.trouble}"
            return False
        portion: list[bytes] = []
        for key in ticket.keys[ticket.at : ticket.at + PORTION_BLOCKS]:
            if link.memory_row((number, key)) == NONE and not link.on_ssd((number, key)):
                break
            portion.append(key)
        ticket.loaded_to, ticket.loaded_why = ticket.at + len(portion), ""
        try:
            ticket.below = moving.prefetch(
                ticket.namespace, portion, ticket.deadline, lambda _: self._list(ticket), ticket.priority
            )
        except KVStoreError as error:
            ticket.busy = True
            ticket.why = ticket.why or str(error)
            return False
        self._list(ticket)  # it may have ended already
        return True

    def _take_loaded(self, ticket: GpuTicket) -> None:
        """What the SSD has brought, if it has ended."""
        below, moving = ticket.below, self.link.moving
        if below is None or moving is None or below.state == RUNNING:
            return
        ticket.loaded_why = below.why
        ticket.busy |= below.busy
        ticket.below = None
        moving.loads.close(below)

    # -- ends

    def _copied(self, block: Block, numbers: Sequence[int], why: str) -> None:
        """A copy is over, for all who want it."""
        for number in numbers:
            ticket = self.tickets.get(number)
            if ticket is None or block not in ticket.waiting:
                continue
            ticket.waiting.remove(block)
            if why:
                self.link.counts.up_failed += 1
                ticket.why = ticket.why or why
            else:
                ticket.copied += 1
            self._end_if_over(ticket)

    def _stop(self, ticket: GpuTicket, why: str) -> None:
        """The rest of it is not tried; what is under way comes."""
        ticket.at = len(ticket.keys)
        ticket.why = ticket.why or why
        ticket.busy = True
        self._close_below(ticket)
        for block in list(ticket.waiting):
            if self.ups.want_no_more(block, ticket.number):
                ticket.waiting.remove(block)
        self._end_if_over(ticket)

    def _end_if_over(self, ticket: GpuTicket) -> None:
        if ticket.waiting or ticket.below is not None or ticket.at < len(ticket.keys) or ticket.state != RUNNING:
            return
        self._end(ticket, FAILED if ticket.why else DONE)

    def _abandon(self, ticket: GpuTicket, state: str, why: str) -> None:
        if ticket.state != RUNNING:
            return
        self.link.counts.up_failed += len(ticket.waiting)
        for block in ticket.waiting:
            self.ups.want_no_more(block, ticket.number, begun=True)
        ticket.waiting.clear()
        self._close_below(ticket)
        ticket.why = ticket.why or why
        self._end(ticket, state)

    def _close_below(self, ticket: GpuTicket) -> None:
        below, ticket.below = ticket.below, None
        if below is not None and self.link.moving is not None:
            self.link.moving.loads.close(below)

    def _end(self, ticket: GpuTicket, state: str) -> None:
        ticket.state = state
        ticket.ended(ticket)
