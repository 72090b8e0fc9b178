"""Administration over the session socket: who may is told by the credentials of the peer.

A read-only session may look; it changes nothing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvstore.core.holds import Session
from kvstore.server import admin
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition

if TYPE_CHECKING:
    from kvstore.server.session import ClientSession


async def inspect(client: "ClientSession", _: Session, request: pb.InspectRequest) -> pb.InspectReply:
    admin.check_allowed(client.peer)
    return await admin.inspect(client.server.node, request)


async def evict(client: "ClientSession", session: Session, request: pb.EvictRequest) -> pb.EvictReply:
    _check_changes(client, session)
    return await admin.evict(client.server.node, request)


async def end_session(client: "ClientSession", session: Session, request: pb.EndSessionRequest) -> pb.EndSessionReply:
    _check_changes(client, session)
    return await admin.end_session(client.server.node, request, session.id)


def _check_changes(client: "ClientSession", session: Session) -> None:
    admin.check_allowed(client.peer)
    if session.read_only:
        raise FailedPrecondition("this session is read-only: it may inspect, and neither evict nor end a session")


CALLS: dict[str, Callable[["ClientSession", Session, Any], Any]] = {
    "inspect": inspect,
    "evict": evict,
    "end_session": end_session,
}
