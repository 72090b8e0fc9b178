"""The gRPC calls that are one message and one answer, as a table: what each takes, and what it does.

Three kinds: of any caller, of callers bound to a session (they share memory with the
daemon, so what they reserve and acquire is the session's and ends by no clock), and
administration.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from kvstore.core.holds import Session, Tenant
from kvstore.server import admin, calls, devices, loads, removing
from kvstore.server.auth import ANY_TENANT
from kvstore.server.calls import Node
from kvstore.server.grpc_caller import Caller
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import Unauthenticated

Answer = Callable[[Node, Caller, Any], Message | Awaitable[Message]]
GiveBack = Callable[[Node, Session, Any, Any], None]
"""Of the node: that session, its message, and the answer."""


@dataclass(frozen=True)
class Call:
    """One call: its message, what answers it, and how much of the daemon it may take."""

    kind: Any
    answer: Answer
    places: str = ""
    """Which bound on calls under way it counts for; "" for what is answered in one step or a bounded time."""
    give_back: GiveBack | None = None
    """Undoes what an answer grants to the session: for one that did not get out, of which nobody knows what it says."""


STREAMS, ADMINISTRATION, WAITS = "streams", "administration", "waits"


def _tenant(node: Node, caller: Caller) -> Tenant:
    return calls.tenant_named(node.store, caller.tenant)


def _of_tenant(call: Callable[[Node, Tenant, Any], Any]) -> Answer:
    return lambda node, caller, request: call(node, _tenant(node, caller), request)


def _changing(call: Callable[[Node, Tenant, Any], Any]) -> Answer:
    def answer(node: Node, caller: Caller, request: Any) -> Any:
        caller.check_changes("remove, pin or clear")
        return call(node, _tenant(node, caller), request)

    return answer


# -- bound to a session


async def _reserve(node: Node, caller: Caller, request: pb.ReserveRequest) -> pb.ReserveReply:
    session = caller.bound("Reserve")
    namespace = node.store.namespace(session.tenant, request.namespace_id)
    return pb.ReserveReply(slots=await calls.reserve(node, session, namespace, request.count, float("inf")))


def _commit(node: Node, caller: Caller, request: pb.CommitRequest) -> pb.CommitReply:
    reply = pb.CommitReply()
    calls.commit_into(reply, node, caller.bound("Commit"), request)
    return reply


def _give_back_slots(node: Node, session: Session, _: Any, reply: pb.ReserveReply | pb.CommitReply) -> None:
    if not session.ended:
        node.store.abort(session, [slot for slot in reply.slots if slot in session.granted])


def _abort(node: Node, caller: Caller, request: pb.AbortRequest) -> pb.AbortReply:
    return calls.abort(node, caller.bound("Abort"), request)


def _acquire(node: Node, caller: Caller, request: pb.AcquireRequest) -> pb.AcquireReply:
    session = caller.bound("Acquire")
    namespace = node.store.namespace(session.tenant, request.namespace_id)
    keys = calls.checked_keys(request.keys)
    return pb.AcquireReply(slots=loads.acquire(node, session, namespace, keys))


def _load(node: Node, caller: Caller, request: pb.LoadRequest) -> pb.LoadReply | Awaitable[pb.LoadReply]:
    return loads.load(node, caller.bound("Load"), request, counted=not caller.reports)


def _give_back_leases(node: Node, session: Session, _: Any, reply: pb.AcquireReply | pb.LoadReply) -> None:
    """One hold for each time that a slot is named, if they are there still."""
    if not session.ended:
        named = Counter(reply.slots)
        held = {slot: min(count, session.leased.get(slot, 0)) for slot, count in named.items()}
        node.store.release(session, list(Counter(held).elements()))


def _release(node: Node, caller: Caller, request: pb.ReleaseRequest) -> pb.ReleaseReply:
    return calls.release(node, caller.bound("Release"), request)


def _devices(node: Node, caller: Caller, _: pb.DevicesRequest) -> pb.DevicesReply:
    return devices.devices(node, caller.bound("Devices"))


def _device(node: Node, caller: Caller, request: pb.DeviceRequest) -> devices.Answer:
    return devices.over_grpc(node, caller.bound("Device"), request)


# -- of a session's, or of a tenant's where the call is no session's


def _prefetch(node: Node, caller: Caller, request: pb.PrefetchRequest) -> pb.PrefetchReply:
    return loads.prefetch(node, _tenant(node, caller), _session(caller), request)


def _ticket(node: Node, caller: Caller, request: pb.TicketRequest) -> pb.TicketReply | Awaitable[pb.TicketReply]:
    return loads.ticket(node, _tenant(node, caller), _session(caller), request)


def _session(caller: Caller) -> Session | None:
    return caller.binding.session if caller.binding is not None else None


# -- administration


def _inspect(node: Node, caller: Caller, request: pb.InspectRequest) -> Awaitable[pb.InspectReply]:
    with node.refusals.told("Inspect", caller.who()):
        _check_inspect(node, caller, request)
    return admin.inspect(node, request)


def _check_inspect(node: Node, caller: Caller, request: pb.InspectRequest) -> None:
    caller.check_admin()
    what = request.WhichOneof("what")
    if what == "session":
        _check_session(node, caller, request.session)
    elif what == "segment":
        segments = node.store.segments
        found = segments.live.get(request.segment) or segments.draining.get(request.segment)
        if found is not None:
            _check_scope(
                caller, next((t.name for t in node.store.tenants.values() if t.id == found.tenant), ANY_TENANT)
            )
    else:
        _name_own(caller, request)
        _check_scope(caller, request.tenant or "default")


def _evict(node: Node, caller: Caller, request: pb.EvictRequest) -> Awaitable[pb.EvictReply]:
    everybody = request.WhichOneof("what") in ("size_bytes", "all")
    with node.refusals.told("Evict", caller.who()):
        caller.check_admin()
        caller.check_changes("evict")
        if not everybody:
            _name_own(caller, request)
        _check_scope(caller, request.tenant or (ANY_TENANT if everybody else "default"))
    return admin.evict(node, request, caller.who())


def _end_session(node: Node, caller: Caller, request: pb.EndSessionRequest) -> Awaitable[pb.EndSessionReply]:
    with node.refusals.told("EndSession", caller.who()):
        caller.check_admin()
        caller.check_changes("end a session")
        _check_session(node, caller, request.session)
    own = caller.binding.session.id if caller.binding is not None else 0
    return admin.end_session(node, request, caller.who(), own)


def _flush(node: Node, caller: Caller, request: pb.FlushRequest) -> Awaitable[pb.FlushReply]:
    _check_node(node, caller, "Flush")
    return admin.flush(node, request)


def _verify(node: Node, caller: Caller, request: pb.VerifyRequest) -> Awaitable[pb.VerifyReply]:
    _check_node(node, caller, "Verify")
    return admin.verify(node, request)


def _check_node(node: Node, caller: Caller, call: str) -> None:
    """What is done with the whole of the SSD, whosever blocks are there."""
    with node.refusals.told(call, caller.who()):
        caller.check_admin()
        caller.check_changes(call.lower())
        _check_scope(caller, ANY_TENANT)


def _check_session(node: Node, caller: Caller, number: int) -> None:
    session = node.store.sessions.get(number)
    if session is not None:
        _check_scope(caller, session.tenant.name)


def _name_own(caller: Caller, request: pb.InspectRequest | pb.EvictRequest) -> None:
    """What names no tenant is about the token's own."""
    if caller.grant is not None and not request.tenant:
        request.tenant = caller.grant.own


def _check_scope(caller: Caller, tenant: str) -> None:
    """An administrator of one tenant has nothing to do with others. ANY_TENANT: what is asked for is all of them."""
    if caller.grant is None or caller.grant.tenant == ANY_TENANT:
        return
    if tenant == ANY_TENANT:
        raise Unauthenticated(f"this token is for tenant {caller.grant.tenant!r}, and not for all of them: name it")
    caller.grant.check_tenant(tenant)


CALLS: dict[str, Call] = {
    "OpenNamespace": Call(pb.OpenNamespaceRequest, _of_tenant(calls.open_namespace)),
    "Match": Call(pb.MatchRequest, _of_tenant(calls.match)),
    "Touch": Call(pb.TouchRequest, _of_tenant(calls.touch)),
    "Remove": Call(pb.RemoveRequest, _changing(removing.remove)),
    "Pin": Call(pb.PinRequest, _changing(calls.pin)),
    "Unpin": Call(pb.UnpinRequest, _changing(calls.unpin)),
    "Clear": Call(pb.ClearRequest, _changing(removing.clear), STREAMS),
    "Health": Call(pb.HealthRequest, lambda node, _, __: calls.health(node)),
    "Reserve": Call(pb.ReserveRequest, _reserve, give_back=_give_back_slots),
    "Commit": Call(pb.CommitRequest, _commit, give_back=_give_back_slots),
    "Abort": Call(pb.AbortRequest, _abort),
    "Acquire": Call(pb.AcquireRequest, _acquire, give_back=_give_back_leases),
    "Release": Call(pb.ReleaseRequest, _release),
    "Load": Call(pb.LoadRequest, _load, WAITS, give_back=_give_back_leases),
    "Devices": Call(pb.DevicesRequest, _devices),
    "Device": Call(pb.DeviceRequest, _device, give_back=devices.give_back),
    "Prefetch": Call(pb.PrefetchRequest, _prefetch),
    "Ticket": Call(pb.TicketRequest, _ticket, WAITS),
    "Inspect": Call(pb.InspectRequest, _inspect, ADMINISTRATION),
    "Evict": Call(pb.EvictRequest, _evict, ADMINISTRATION),
    "EndSession": Call(pb.EndSessionRequest, _end_session, ADMINISTRATION),
    "Flush": Call(pb.FlushRequest, _flush, ADMINISTRATION),
    "Verify": Call(pb.VerifyRequest, _verify, ADMINISTRATION),
}
"""All but Stats, which is the daemon's to answer."""
