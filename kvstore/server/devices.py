"""Calls about memory of devices, over the session socket and over gRPC (where no descriptor travels).

A client maps a device's segments and copies on streams of its own; what it reserves, commits and
holds there is its session's, as with memory. A message names the device by its UUID and the
generation of its memory: what was of another one is nobody's, and naming it is refused.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.core.holds import Namespace, Session
from kvstore.server import calls
from kvstore.server.calls import MEMORY_WAIT_S, GpuPort, Node
from kvstored.v1 import DESCRIPTORS_MAX
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from kvstore.core.gpu_pool import GpuPool
    from kvstored_cuda.devices.handles import Handle

NO_DEVICE = "this daemon has no memory of devices (gpu.size is not set)"
NO_DESCRIPTORS = (
    "the daemon gives out memory of devices as descriptors, which do not travel over gRPC: ask for segments on the "
    'session socket, or set gpu.handles = "ipc" where processes share an IPC namespace'
)

Segments = tuple[pb.DeviceSegmentsReply, list[int]]
"""And the descriptors that travel beside it."""

Answer = pb.DeviceReply | Coroutine[Any, Any, pb.DeviceReply]


def devices(node: Node, session: Session) -> pb.DevicesReply:
    """What there is; nothing where gpu.size is not set. Whoever asks as a session may use it from then on."""
    gpu = node.gpu
    node.device_clients.told(session)
    found = [] if gpu is None else gpu.devices()
    return pb.DevicesReply(devices=found, exporter=gpu.exporter if gpu is not None and found else b"")


def device(node: Node, session: Session, request: pb.DeviceRequest) -> tuple[Answer, list[int]]:
    """One call about one device, and the descriptors that are to ride on its answer."""
    gpu, pool = _pool(node, session, request)
    what = request.WhichOneof("op")
    if what == "segments":
        reply, descriptors = _segments(gpu, pool, session, request.segments)
        return pb.DeviceReply(segments=reply), descriptors
    call = CALLS.get(what or "")
    if call is None:
        raise InvalidArgument("a DeviceRequest with no operation that this daemon knows")
    answer = call(node, pool, session, request)
    gpu.pump()
    return answer, []


def over_grpc(node: Node, session: Session, request: pb.DeviceRequest) -> Answer:
    """The same where no descriptor travels."""
    if request.WhichOneof("op") == "segments":
        gpu, pool = _pool(node, session, request)
        if any(handle.descriptor >= 0 for _, _, handle in _handles(gpu, pool, session, request.segments)):
            raise FailedPrecondition(NO_DESCRIPTORS)
    return device(node, session, request)[0]


def give_back(node: Node, session: Session, request: pb.DeviceRequest, reply: pb.DeviceReply) -> None:
    """Undoes what an answer granted that did not get out: nobody knows what it says."""
    pool = node.gpu.tier.pools.get(request.device) if node.gpu is not None else None
    here = pool.session_here(session) if pool is not None and pool.generation == request.generation else None
    if pool is None or here is None or here.ended:
        return
    if reply.WhichOneof("op") == "reserve":
        pool.abort(session, pool.own(session, reply.reserve.slots))
    elif reply.WhichOneof("op") == "acquire":
        named = Counter(reply.acquire.slots)
        held = {slot: min(count, here.leased.get(slot, 0)) for slot, count in named.items()}
        pool.release(session, list(Counter(held).elements()))


def _pool(node: Node, session: Session, request: pb.DeviceRequest) -> tuple[GpuPort, "GpuPool"]:
    """The device that is named, as it is now. Raises what is wrong with the device, its generation or the session."""
    gpu = node.gpu
    if gpu is None or gpu.off():
        raise FailedPrecondition(NO_DEVICE if gpu is None else f"this daemon has no device: {gpu.off()}")
    pool = gpu.tier.pool(request.device)
    _check_generation(pool, request.generation)
    if session.read_only or not session.local:
        raise FailedPrecondition("memory of a device is only for sessions that may write to shared memory")
    return gpu, pool


def _check_generation(pool: "GpuPool", named: int) -> None:
    if named != pool.generation:
        raise FailedPrecondition(
            f"the memory of device {pool.uuid} is of generation {pool.generation}, and generation {named} was named: "
            "the device was lost meanwhile, and nothing that was there is there any more; ask for Devices"
        )


# -- memory


def _segments(gpu: GpuPort, pool: "GpuPool", session: Session, request: pb.SegmentsRequest) -> Segments:
    found = _handles(gpu, pool, session, request)
    pool.mapped(session, [number for number, _, _ in found])
    reply = pb.DeviceSegmentsReply(
        segments=[
            pb.DeviceSegment(id=number, size_bytes=size_bytes, handle=handle.to_bytes())
            for number, size_bytes, handle in found
        ]
    )
    return reply, [handle.descriptor for _, _, handle in found if handle.descriptor >= 0]


def _handles(
    gpu: GpuPort, pool: "GpuPool", session: Session, request: pb.SegmentsRequest
) -> list[tuple[int, int, "Handle"]]:
    """Of the tenant's own segments: number, size and handle of each; those that are gone meanwhile are left out."""
    if len(request.ids) > DESCRIPTORS_MAX:
        raise InvalidArgument(f"{len(request.ids)} segments in one message; at most {DESCRIPTORS_MAX}")
    tenant, live = pool.session_of(session).tenant, pool.store.segments.live
    found = []
    for number in dict.fromkeys(request.ids):
        segment = live.get(number)
        handle = gpu.handle(pool.uuid, number) if segment is not None and segment.tenant == tenant.id else None
        if segment is not None and handle is not None:
            found.append((number, segment.size_bytes, handle))
    return found


def _closed(node: Node, pool: "GpuPool", session: Session, request: pb.DeviceRequest) -> pb.DeviceReply:
    pool.unmapped(session, list(request.closed.segments))
    return pb.DeviceReply(closed=pb.DeviceClosedReply())


# -- writing


async def _reserve(node: Node, pool: "GpuPool", session: Session, request: pb.DeviceRequest) -> pb.DeviceReply:
    """`GpuPool.reserve`, waiting a bounded time while memory for it is on its way, as memory's (calls.reserve)."""
    assert node.gpu is not None, "a device of a node without devices"
    namespace = _namespace(node, session, request.reserve.namespace_id)
    until = time.monotonic() + MEMORY_WAIT_S
    while True:
        _check_generation(pool, request.generation)
        try:
            slots = pool.reserve(session, namespace, request.reserve.count, time.monotonic())
        except ResourceExhausted:
            left = until - time.monotonic()
            if not pool.room_is_coming or left <= 0 or _keeps_draining(pool, session):
                raise
        else:
            return pb.DeviceReply(reserve=pb.ReserveReply(slots=slots))
        finally:
            node.gpu.pump()
        try:
            await asyncio.wait_for(asyncio.shield(node.memory_changed()), left)
        except TimeoutError:
            continue
        if session.ended:
            raise FailedPrecondition("the session ended while it waited for memory")


def _keeps_draining(pool: "GpuPool", session: Session) -> bool:
    """Whether this client must close memory first, which it does when it has its answer."""
    here = pool.session_here(session)
    return here is not None and any(here.id in segment.sessions for segment in pool.store.segments.draining.values())


def _commit(node: Node, pool: "GpuPool", session: Session, request: pb.DeviceRequest) -> pb.DeviceReply:
    """Begins it; what has no event to wait for is over at once."""
    from kvstore.server.device_tickets import DeviceCommit

    said, event = request.commit.commit, request.commit.event
    if said.want or said.durable:
        raise InvalidArgument("`want` and `durable` are not of commits to a device")
    keys = calls.checked_keys(said.keys)
    namespace = _namespace(node, session, said.namespace_id)
    conversation, ttl_s = calls.hinted(said.hint) if said.HasField("hint") else ("", 0.0)
    tickets = node.tickets.of_session(session)
    if event:
        _check_event(node, pool, session, event)
        tickets.check_room(DeviceCommit, len(keys))

    def begin(ended: Callable[[Any], None]) -> Any:
        slots, parents, depths = list(said.slots), list(said.parents), list(said.depths)
        now = time.monotonic()
        return pool.commit(
            session, namespace, keys, slots, parents, depths, event or None, now, ended, ttl_s, conversation
        )

    made = DeviceCommit(pool, session, len(keys), begin)
    calls.served(node, session.tenant, said.hint)
    reply = pb.DeviceReply(commit=pb.CommitReply(results=made.commit.results))  # type: ignore[arg-type]
    if not made.over:
        reply.commit.ticket = tickets.keep(made)
        assert reply.commit.ticket, "a commit was begun that nobody can ask for"
    return reply


def _check_event(node: Node, pool: "GpuPool", session: Session, raw: bytes) -> None:
    """Raises for what cannot be an event of this client on that device; the driver says the rest."""
    from kvstored_cuda.devices.errors import InvalidHandle
    from kvstored_cuda.devices.handles import Handle, HandleKind, Thing

    try:
        handle = Handle.from_bytes(raw)
    except InvalidHandle as e:
        raise InvalidArgument(f"event: {e}") from None
    if handle.thing != Thing.EVENT or handle.kind != HandleKind.IPC:
        raise InvalidArgument("event: a handle of memory, or of a kind that events do not have")
    if handle.uuid != pool.uuid:
        raise InvalidArgument(f"event: of device {handle.uuid!r}, and the slots are of {pool.uuid!r}")
    node.device_clients.check_exporter(session, handle)


def _abort(node: Node, pool: "GpuPool", session: Session, request: pb.DeviceRequest) -> pb.DeviceReply:
    pool.abort(session, _named(request.abort))
    session.gave_back += 1
    return pb.DeviceReply(abort=pb.AbortReply())


# -- reading


def _acquire(node: Node, pool: "GpuPool", session: Session, request: pb.DeviceRequest) -> pb.DeviceReply:
    """A use of the blocks, on whichever tier they are."""
    namespace = _namespace(node, session, request.acquire.namespace_id)
    keys, now = calls.checked_keys(request.acquire.keys), time.monotonic()
    slots = pool.acquire(session, namespace, keys, now)
    if slots:
        # After the answer, which nobody is to wait for.
        asyncio.get_running_loop().call_soon(calls.used_below, node, session.tenant, keys[: len(slots)])
    return pb.DeviceReply(acquire=pb.AcquireReply(slots=slots))


def _release(node: Node, pool: "GpuPool", session: Session, request: pb.DeviceRequest) -> pb.DeviceReply:
    pool.release(session, _named(request.release))
    session.gave_back += 1
    return pb.DeviceReply(release=pb.ReleaseReply())


def _prefetch(node: Node, pool: "GpuPool", session: Session, request: pb.DeviceRequest) -> pb.DeviceReply:
    from kvstore.server.device_tickets import DevicePrefetch

    said = request.prefetch
    namespace = _namespace(node, session, said.namespace_id)
    keys, deadline = calls.checked_keys(said.keys), calls.deadline(said.deadline_ms)
    tickets = node.tickets.of_session(session)
    tickets.check_room(DevicePrefetch, len(keys))
    made = DevicePrefetch(pool, namespace, keys, deadline, said.priority)
    number, reply = tickets.keep(made), made.reply()
    return pb.DeviceReply(
        prefetch=pb.PrefetchReply(ticket=number, state=reply.state, blocks=reply.blocks, why=reply.why)
    )


def _named(request: pb.AbortRequest | pb.ReleaseRequest) -> Sequence[int]:
    if request.all or request.keep:
        raise InvalidArgument("`all` and `keep` are not of devices: name the slots")
    return list(request.slots)


def _namespace(node: Node, session: Session, number: int) -> Namespace:
    return node.store.namespace(session.tenant, number)


CALLS: dict[str, Callable[[Node, "GpuPool", Session, pb.DeviceRequest], Answer]] = {
    "reserve": _reserve,
    "commit": _commit,
    "abort": _abort,
    "acquire": _acquire,
    "release": _release,
    "prefetch": _prefetch,
    "closed": _closed,
}
"""All but segments, whose answer has descriptors."""
