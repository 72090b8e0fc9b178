"""Administration over the session socket: who may is told by the credentials of the peer.

A read-only session may look; it changes nothing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvstore.core.holds import Session
from kvstore.server import admin
from kvstore.server.audit import Who, socket_user
from kvstored.v1 import ADMINISTRATION_CLIENT
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition

if TYPE_CHECKING:
    from kvstore.server.session import ClientSession


async def inspect(client: "ClientSession", session: Session, request: pb.InspectRequest) -> pb.InspectReply:
    node = client.server.node
    with node.refusals.told("Inspect", _who(client, session)):
        admin.check_allowed(client.peer)
    return await admin.inspect(node, request)


async def evict(client: "ClientSession", session: Session, request: pb.EvictRequest) -> pb.EvictReply:
    who = _checked(client, session, "Evict")
    return await admin.evict(client.server.node, request, who)


async def end_session(client: "ClientSession", session: Session, request: pb.EndSessionRequest) -> pb.EndSessionReply:
    who = _checked(client, session, "EndSession")
    return await admin.end_session(client.server.node, request, who, session.id)


async def flush(client: "ClientSession", session: Session, request: pb.FlushRequest) -> pb.FlushReply:
    _checked(client, session, "Flush")
    return await admin.flush(client.server.node, request)


async def verify(client: "ClientSession", session: Session, request: pb.VerifyRequest) -> pb.VerifyReply:
    _checked(client, session, "Verify")
    return await admin.verify(client.server.node, request)


def is_quiet(client: "ClientSession") -> bool:
    """Whether this connection is one of `kvstore-cli`: what it changes is logged, that it came and went is not."""
    session = client.session
    return session is not None and session.client == ADMINISTRATION_CLIENT and admin.may_administer(client.peer)


def _who(client: "ClientSession", session: Session) -> Who:
    return socket_user(client.peer.uid, client.peer.pid, session.client)


def _checked(client: "ClientSession", session: Session, call: str) -> Who:
    """Who changes something, once that is allowed."""
    who = _who(client, session)
    with client.server.node.refusals.told(call, who):
        admin.check_allowed(client.peer)
        if session.read_only:
            raise FailedPrecondition("this session is read-only: it may inspect, and change nothing")
    return who


CALLS: dict[str, Callable[["ClientSession", Session, Any], Any]] = {
    "inspect": inspect,
    "evict": evict,
    "end_session": end_session,
    "flush": flush,
    "verify": verify,
}
