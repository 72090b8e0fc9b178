"""Load, Prefetch and Ticket, over the session socket and over gRPC.

Without an SSD a Load is an Acquire and a prefetch is done at once. What is under way is kept by
its owner's `Tickets` (tickets.py); this turns messages into those and back.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from kvstore.core import refusals
from kvstore.core.holds import Namespace, Session, Tenant
from kvstore.core.link import Block
from kvstore.server import calls
from kvstore.server.calls import Node
from kvstore.server.tickets import WAIT_S, AllTickets, Tickets
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, ResourceExhausted

# -- loads


def load(
    node: Node, session: Session, request: pb.LoadRequest, *, counted: bool
) -> pb.LoadReply | Coroutine[Any, Any, pb.LoadReply]:
    """Answers at once where nothing is to be waited for. `counted`: its caller does not tell what it reads."""
    refusals.check_may_hold(session)
    if node.moving is None and node.gpu is None:
        return _acquired(node, session, request, counted=counted)
    tickets, number = node.tickets.of_session(session), request.ticket
    if request.give_up:
        tickets.give_up(number)
        return pb.LoadReply()
    if not number:
        namespace = node.store.namespace(session.tenant, request.namespace_id)
        keys, deadline = calls.checked_keys(request.keys), calls.deadline(request.deadline_ms)
        coming = node.gpu.tier.bring_down(namespace, keys) if node.gpu is not None else []
        if node.moving is None and not coming:
            return _acquired(node, session, request, counted=counted)
        try:
            number = begin(node, tickets, namespace, keys, deadline, coming)
        except ResourceExhausted as e:
            return _busy(node, namespace, keys, str(e), counted=counted)
    found = tickets.find_load(number)
    if found.over:
        return _taken(node, session, tickets, number, counted=counted)
    wait_s = min(request.wait_ms / 1000, WAIT_S)
    if not wait_s:
        return pb.LoadReply(ticket=number, busy=found.ticket.busy)
    return _waited(node, session, tickets, number, wait_s, counted=counted)


def begin(
    node: Node,
    tickets: Tickets,
    namespace: Namespace,
    keys: Sequence[bytes],
    deadline: float,
    coming: Sequence[Block],
) -> int:
    """A load, by its number; `coming`: what is copied down from devices for it. Raises ResourceExhausted."""
    if not coming:
        return tickets.load(namespace, keys, deadline)
    from kvstore.server.device_tickets import LoadFromDevices

    assert node.gpu is not None, "a node without devices"
    node.gpu.pump()
    return tickets.want(lambda: LoadFromDevices(node, namespace, keys, deadline, coming))


def _acquired(node: Node, session: Session, request: pb.LoadRequest, *, counted: bool) -> pb.LoadReply:
    """With no tier below memory."""
    if request.give_up:
        return pb.LoadReply()
    if request.ticket:
        raise FailedPrecondition(f"there is no load {request.ticket}: this daemon has no SSD to load from")
    began = time.perf_counter()
    namespace = node.store.namespace(session.tenant, request.namespace_id)
    keys = calls.checked_keys(request.keys)
    slots, why = hold_run(node, session, namespace, keys)
    if counted:
        node.figures.saw("Load", namespace, len(slots), len(keys), time.perf_counter() - began)
    return pb.LoadReply(slots=slots, why=why)


async def _waited(
    node: Node, session: Session, tickets: Tickets, number: int, wait_s: float, *, counted: bool
) -> pb.LoadReply:
    found = tickets.find_load(number)
    try:
        await found.wait(wait_s)
        found = tickets.find_load(number)  # given up meanwhile?
    except BaseException:
        tickets.give_up(number)  # who asked is gone, and nobody else knows its number
        raise
    if found.over:
        return _taken(node, session, tickets, number, counted=counted)
    return pb.LoadReply(ticket=number, busy=found.ticket.busy)


def _busy(node: Node, namespace: Namespace, keys: Sequence[bytes], why: str, *, counted: bool) -> pb.LoadReply:
    """So much is asked for that this one has not begun: no miss, and another try may be in time."""
    if counted:
        there = len(calls.present(node, namespace, keys))
        node.figures.saw("Load", namespace, 0, len(keys), 0.0, busy=there)
    return pb.LoadReply(why=why, busy=True)


def _taken(node: Node, session: Session, tickets: Tickets, number: int, *, counted: bool) -> pb.LoadReply:
    """What has come, held by the session from now on: by the load until then, so that nothing gets lost between."""
    found = tickets.find_load(number)
    try:
        slots, why = hold_run(node, session, found.namespace, found.keys)
    finally:
        tickets.give_up(number)
        node.jobs_ready()  # what the load held and the session does not may be what others wait for
    ticket = found.ticket
    if counted:
        seconds, tier = time.perf_counter() - found.began, pb.TIER_SSD if ticket.loaded else pb.TIER_HOST
        busy = found.missing(len(slots))
        node.figures.saw("Load", found.namespace, len(slots), len(found.keys), seconds, tier, busy)
    return pb.LoadReply(slots=slots, why=ticket.why or why, loaded=ticket.loaded, busy=ticket.busy)


def hold_run(node: Node, session: Session, namespace: Namespace, keys: Sequence[bytes]) -> tuple[list[int], str]:
    """Holds the leading run of `keys` in memory, or as much of it as may be held and why it is not all.

    Raises ResourceExhausted where that is nothing.
    """
    store, why = node.store, ""
    try:
        slots = acquire(node, session, namespace, keys)
    except ResourceExhausted as e:
        allowed = store.allowed(session, store.pool(namespace))
        if allowed < 1:
            raise
        slots, why = acquire(node, session, namespace, keys[:allowed]), str(e)
    return slots, why


def acquire(node: Node, session: Session, namespace: Namespace, keys: Sequence[bytes]) -> list[int]:
    """`Store.acquire`: a use of the blocks, also where the SSD has them."""
    now = time.monotonic()
    slots = node.store.acquire(session, namespace, keys, now)
    if node.moving is not None and slots:
        # After the answer: nobody waits for it, and it would be a third of the call.
        asyncio.get_running_loop().call_soon(node.moving.touch, session.tenant, keys[: len(slots)], now)
    return slots


# -- prefetches


def prefetch(node: Node, tenant: Tenant, session: Session | None, request: pb.PrefetchRequest) -> pb.PrefetchReply:
    """Begins to bring blocks into memory; a ticket of that session's, else of the tenant's."""
    namespace = node.store.namespace(tenant, request.namespace_id)
    keys, deadline = calls.checked_keys(request.keys), calls.deadline(request.deadline_ms)
    if node.moving is None:
        return pb.PrefetchReply(state=pb.TICKET_DONE, blocks=len(node.store.match(namespace, keys)))
    tickets = _of(node.tickets, tenant, session)
    number = tickets.prefetch(namespace, keys, deadline, request.priority)
    node.jobs_ready()
    found = tickets.find(number)
    assert found is not None, "a prefetch was forgotten at once"
    reply = found.reply()
    return pb.PrefetchReply(ticket=number, state=reply.state, blocks=reply.blocks, why=reply.why)


def ticket(
    node: Node, tenant: Tenant, session: Session | None, request: pb.TicketRequest
) -> pb.TicketReply | Coroutine[Any, Any, pb.TicketReply]:
    """How far it is what a ticket is of."""
    tickets = _of(node.tickets, tenant, session)
    found = tickets.find(request.ticket)
    if found is None:
        return pb.TicketReply()
    if request.cancel:
        found.cancel()
    wait_s = min(request.wait_ms / 1000, WAIT_S)
    if found.over or not wait_s:
        return found.reply()

    async def waited() -> pb.TicketReply:
        await found.wait(wait_s)
        return found.reply()

    return waited()


def _of(tickets: AllTickets, tenant: Tenant, session: Session | None) -> Tickets:
    return tickets.of_tenant(tenant) if session is None else tickets.of_session(session)
