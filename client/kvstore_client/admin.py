"""Administration by a client's own way to the daemon: for `kvstore-cli` and programs like it, not for engines.

Not among the client's public names: who holds a client of an engine's has no business here.
Errors are those of every call, and Unauthenticated where the daemon does not take this
process for an administrator.
"""

from kvstore_client.client import Client
from kvstored.v1 import kvstore_pb2 as pb

INSPECT_S = 30.0
EVICT_S = 600.0
"""A million blocks take the daemon some ten seconds beside its other calls. A caller that gives up stops it."""

END_SESSION_S = 10.0
FLUSH_S = 10.0
VERIFY_S = 30.0
"""Of one call, which the daemon itself ends long before."""


def inspect(client: Client, request: pb.InspectRequest) -> pb.InspectReply:
    """One key, namespace, session or segment; nothing is set where there is no such thing."""
    reply: pb.InspectReply = client._transport.administer("Inspect", request, INSPECT_S)
    return reply


def evict(client: Client, request: pb.EvictRequest) -> pb.EvictReply:
    """Drops what nobody holds; says how much that was. Interrupted, it has dropped a part."""
    reply: pb.EvictReply = client._transport.administer("Evict", request, EVICT_S)
    return reply


def end_session(client: Client, number: int) -> pb.EndSessionReply:
    """Ends another session; its client may connect again."""
    request = pb.EndSessionRequest(session=number)
    reply: pb.EndSessionReply = client._transport.administer("EndSession", request, END_SESSION_S)
    return reply


def flush(client: Client, wait_ms: int) -> pb.FlushReply:
    """Has what only memory has written to the SSD, and waits so long for it; to be asked again until it is done."""
    reply: pb.FlushReply = client._transport.administer("Flush", pb.FlushRequest(wait_ms=wait_ms), FLUSH_S)
    return reply


def verify(client: Client, cursor: int, blocks_max: int) -> pb.VerifyReply:
    """Has some of the SSD read back; to be asked again with the cursor of the answer until that is 0."""
    request = pb.VerifyRequest(cursor=cursor, blocks_max=blocks_max)
    reply: pb.VerifyReply = client._transport.administer("Verify", request, VERIFY_S)
    return reply
