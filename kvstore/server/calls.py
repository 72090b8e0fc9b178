"""The calls that mean the same over the session socket and over gRPC.

Each takes a protobuf request and answers a protobuf reply or raises an error of the wire.
Limits on what a message may name are checked here, before the store sees it.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvstore.core import holds, refusals
from kvstore.core.holds import Namespace, Session, Tenant
from kvstore.core.movement import Movement
from kvstore.core.moves import Name
from kvstore.core.store import STORED, Store
from kvstore.server.audit import Refusals
from kvstore.server.bound import Bindings
from kvstore.server.device_clients import DeviceClients
from kvstore.server.figures import Figures
from kvstore.server.tickets import AllTickets
from kvstored.v1 import KEY_BYTES, KEYS_MAX
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from kvstore.core.gpu_tier import GpuTier
    from kvstored_cuda.devices.handles import Handle

DEADLINE_MS_MAX = 600_000
"""Of a load or prefetch."""

MEMORY_WAIT_S = 0.8
"""How long a reservation may wait for memory that is being prefaulted; with the message itself below 1 s."""

TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
NAME_BYTES_MAX = 128
LABEL_BYTES_MAX = 256
CONVERSATION_BYTES_MAX = 256


class SlabPort(Protocol):
    """What the edge needs of the slab."""

    def descriptor(self, segment: int, read_only: bool) -> int: ...
    def bytes_at(self, segment: int, offset: int, length: int) -> memoryview: ...


class IndexesPort(Protocol):
    """What the edge needs of the shared indexes."""

    def descriptor(self, tenant: int) -> tuple[int, int, int]: ...
    def figures(self, tenant: int) -> tuple[int, int, int, int, int, int]: ...
    def notify(self, tenant: int) -> None: ...
    def find(self, tenant: int, key: bytes) -> tuple[int, int, int] | None: ...


class SsdPort(Protocol):
    """What the edge needs of the SSD tier, besides its movement."""

    def stats(self) -> pb.SsdStats: ...
    def degraded(self) -> list[str]: ...
    async def flush(self, wait_s: float) -> pb.FlushReply: ...
    async def verify(self, cursor: int, blocks_max: int) -> pb.VerifyReply: ...


class PersistPort(Protocol):
    """Memory that outlives the daemon."""

    def stats(self) -> pb.PersistStats: ...
    def degraded(self) -> list[str]: ...


class GpuPort(Protocol):
    """What the edge needs of the devices whose memory the daemon owns.

    Whoever calls `GpuPool.lose` tells `Node.device_clients.quiet` of every number that it answers.
    """

    @property
    def tier(self) -> "GpuTier":
        """Pools of the devices that were opened."""

    @property
    def exporter(self) -> bytes:
        """This life of the daemon, as its handles name it."""

    def devices(self) -> list[pb.Device]: ...
    def handle(self, uuid: str, segment: int) -> "Handle | None":
        """Of a segment that is live in that device's pool; None where there is none (any more)."""

    def stats(self) -> list[pb.GpuStats]: ...
    def off(self) -> str:
        """Why there is no device although gpu.size is set; "" where there is one."""

    def degraded(self) -> list[str]: ...
    def pump(self) -> None:
        """Hands workers what there is to do: after every step that may have left something."""


class RemovalsPort(Protocol):
    """Where removals are written down that the SSD cannot be told of at present."""

    def last_record(self) -> int: ...
    async def note(self, tenant: str, digest: bytes, keys: Sequence[bytes] | None, upto: int) -> str: ...
    async def note_everywhere(self, tenant: str, keys: Sequence[bytes] | None) -> str: ...
    async def note_all(self, names: Sequence[Name]) -> str: ...


@dataclass
class Node:
    """What every edge shares: the store and the bytes behind it, and how the daemon is told of work."""

    store: Store
    slab: SlabPort
    indexes: IndexesPort
    epoch: int
    version: str
    problems: Callable[[], list[str]]
    jobs_ready: Callable[[], None]
    """To be called after a step that may have left jobs or index work."""
    memory_changed: Callable[[], asyncio.Future[None]]
    """A future that is done when a segment was made or given up, of the slab or of a device."""
    started: float = 0.0
    lease_ttl_s: float = 30.0
    witness: Callable[[int, int], tuple[int, str]] = lambda pid, uid: (0, "")
    """Of a process and its user: when it began (0: that does not matter), and why it must not write; "" if it may."""
    moving: Movement | None = None
    """Between memory and the SSD, where there is one."""
    ssd: SsdPort | None = None
    """What is asked of that tier as a whole."""
    persist: PersistPort | None = None
    """Where memory outlives the daemon."""
    removals: RemovalsPort | None = None
    """Where there is an SSD."""
    gpu: GpuPort | None = None
    """Where gpu.size is set."""
    protocol_errors: int = 0
    internal_errors: int = 0
    """Exceptions in calls that are bugs of the daemon; any makes it unhealthy for a while (readiness.py)."""
    figures: Figures = field(init=False)
    closers: dict[int, Callable[[], None]] = field(default_factory=dict)
    """How the edge that opened a session closes it, by the session's number."""

    bindings: Bindings = field(default_factory=Bindings)
    """Tokens by which gRPC calls are a session's."""

    refusals: Refusals = field(default_factory=Refusals)
    device_clients: DeviceClients = field(init=False)
    """How sessions end, in all tiers, and what their processes have of devices."""

    tickets: AllTickets = field(init=False)
    """What callers have asked the SSD, and devices, for."""

    def __post_init__(self) -> None:
        self.figures = Figures(self.store.counts)
        self.tickets = AllTickets(self.moving, self.jobs_ready)
        self.device_clients = DeviceClients(self)

    def degraded(self) -> list[str]:
        """What is out of use, or not as it should be, while all that is asked of the daemon works."""
        parts = (self.ssd, self.persist, self.gpu, self.device_clients)
        return [why for part in parts if part is not None for why in part.degraded()]


def checked_keys(keys: Sequence[bytes]) -> Sequence[bytes]:
    """The keys of a message, each of the right length and not too many."""
    if len(keys) > KEYS_MAX:
        raise InvalidArgument(f"{len(keys)} keys in one message; at most {KEYS_MAX}: split the call")
    keys = list(keys)
    if not set(map(len, keys)) <= {KEY_BYTES}:
        wrong = next(i for i, key in enumerate(keys) if len(key) != KEY_BYTES)
        raise InvalidArgument(f"key {wrong} has {len(keys[wrong])} bytes; a key has {KEY_BYTES}")
    return keys


def checked_tenant(name: str) -> str:
    """A tenant's name; "" is "default"."""
    name = name or "default"
    if not TENANT.match(name):
        raise InvalidArgument(f"tenant {name[:80]!r} is not 1 to 64 of the characters A-Z a-z 0-9 _ . -")
    return name


def tenant_named(store: Store, name: str) -> Tenant:
    """The tenant that a client says it is, made at first sight."""
    return store.tenant(checked_tenant(name))


def printable(name: str) -> str:
    """A name for people, without what would forge a line of a log or steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in name)


def open_namespace(node: Node, tenant: Tenant, request: pb.OpenNamespaceRequest) -> pb.OpenNamespaceReply:
    if len(request.label.encode()) > LABEL_BYTES_MAX:
        raise InvalidArgument(f"a label is at most {LABEL_BYTES_MAX} bytes")
    namespace = node.store.open_namespace(
        tenant, request.digest, request.block_bytes, printable(request.label), request.block_tokens
    )
    pool = node.store.pool(namespace)
    return pb.OpenNamespaceReply(
        namespace_id=namespace.id,
        slot_bytes=pool.slot_bytes,
        grant_max=node.store.grant_max(pool),
        reserve_max=holds.RESERVE_SLOTS_MAX,
        segments=list(pool.segments),
    )


def hinted(hint: pb.Hint) -> tuple[str, float]:
    """The conversation and the time to live of a hint."""
    if len(hint.conversation.encode()) > CONVERSATION_BYTES_MAX:
        raise InvalidArgument(f"a conversation is at most {CONVERSATION_BYTES_MAX} bytes")
    return hint.conversation, hint.ttl_s


def deadline(milliseconds: int) -> float:
    """When that is, from now."""
    if milliseconds > DEADLINE_MS_MAX:
        raise InvalidArgument(f"deadline_ms {milliseconds} is above {DEADLINE_MS_MAX}")
    return time.monotonic() + milliseconds / 1000


async def reserve(node: Node, session: Session, namespace: Namespace, count: int, expires: float) -> list[int]:
    """`Store.reserve`, waiting a bounded time while memory for it is on its way.

    Not for memory that the caller itself must unmap first: it does when it has its answer.
    """
    until = time.monotonic() + MEMORY_WAIT_S
    while True:
        try:
            return node.store.reserve(session, namespace, count, time.monotonic(), expires)
        except ResourceExhausted:
            left = until - time.monotonic()
            if not node.store.room.pending or left <= 0 or _keeps_draining(node, session):
                raise
        finally:
            node.jobs_ready()
        try:
            await asyncio.wait_for(asyncio.shield(node.memory_changed()), left)
        except TimeoutError:
            continue
        if session.ended:
            raise FailedPrecondition("the session ended while it waited for memory")


def _keeps_draining(node: Node, session: Session) -> bool:
    return any(session.id in segment.sessions for segment in node.store.segments.draining.values())


def commit(
    node: Node, session: Session, namespace: Namespace, request: pb.CommitRequest | pb.PutHeader, slots: Sequence[int]
) -> list[int]:
    keys = list(request.keys)  # lengths are checked by the store
    if len(keys) > KEYS_MAX:
        raise InvalidArgument(f"{len(keys)} keys in one message; at most {KEYS_MAX}: split the call")
    conversation, ttl_s = hinted(request.hint) if request.HasField("hint") else ("", 0.0)
    results = node.store.commit(
        session,
        namespace,
        keys,
        slots,
        list(request.parents),
        list(request.depths),
        time.monotonic(),
        ttl_s,
        conversation,
    )
    served(node, session.tenant, request.hint)
    node.figures.stored(results.count(STORED) * namespace.block_bytes)
    return results


def commit_into(reply: pb.CommitReply, node: Node, session: Session, request: pb.CommitRequest) -> None:
    """`commit`, and slots ahead for the next one. Fills the reply in place: a message given to another is copied.

    A durable one is committed all the same, and waits for no disk: what its slots mean must not depend on one.
    """
    namespace = node.store.namespace(session.tenant, request.namespace_id)
    if request.durable:
        _commit_durable(reply, node, session, namespace, request)
    else:
        reply.results.extend(commit(node, session, namespace, request, list(request.slots)))  # type: ignore[arg-type]
    if request.want:
        ahead = node.store.top_up(session, namespace, request.want)
        reply.slots.extend(ahead)
        if len(ahead) < request.want:
            node.jobs_ready()  # have some evicted before the next put asks


def _commit_durable(
    reply: pb.CommitReply, node: Node, session: Session, namespace: Namespace, request: pb.CommitRequest
) -> None:
    check_durable(node)
    refusals.check_may_hold(session)
    keys = checked_keys(request.keys)
    if request.slots or request.parents or request.depths:
        results = commit(node, session, namespace, request, list(request.slots))
        reply.results.extend(results)  # type: ignore[arg-type]
        keys = [key for key, result in zip(keys, results, strict=True) if result != pb.REJECTED]
    reply.ticket, reply.not_durable = node.tickets.of_session(session).save(namespace, keys)
    node.jobs_ready()


def check_durable(node: Node) -> None:
    """Raises FailedPrecondition where nothing can be made durable: before anything is stored."""
    if node.moving is None:
        raise FailedPrecondition("durable=True needs an SSD tier, and this daemon has none (ssd.path is off)")


def served(node: Node, tenant: Tenant, hint: pb.Hint) -> None:
    """A hint says that a conversation is being served: its blocks are not to leave memory for being idle."""
    if node.moving is not None and hint.conversation:
        node.moving.served(tenant.name, hint.conversation, hint.tokens_generated, time.monotonic())


def abort(node: Node, session: Session, request: pb.AbortRequest) -> pb.AbortReply:
    node.store.abort(session, _given_back(request, dict.fromkeys(session.granted, 1)))
    session.gave_back += 1
    return pb.AbortReply()


def release(node: Node, session: Session, request: pb.ReleaseRequest) -> pb.ReleaseReply:
    node.store.release(session, _given_back(request, session.leased))
    session.gave_back += 1
    return pb.ReleaseReply()


def _given_back(request: pb.AbortRequest | pb.ReleaseRequest, held: Mapping[int, int]) -> Sequence[int]:
    """The slots that are named; with `all` whatever is held, but for what is named to be kept."""
    if not request.all:
        if request.keep:
            raise InvalidArgument("keep goes with all = true")
        return list(request.slots)
    if request.slots:
        raise InvalidArgument("slots or all = true: one of them")
    keep = Counter(request.keep)
    for slot, count in keep.items():
        if held.get(slot, 0) < count:
            raise InvalidArgument(f"slot {slot:#x} is not held {count} times by this session, and cannot be kept")
    return list((Counter(held) - keep).elements())


def present(node: Node, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
    """The leading run of `keys` that is in any tier: for each whether it is in memory."""
    if node.moving is not None:
        return node.moving.match(namespace, keys)
    return [True] * len(node.store.match(namespace, keys))


def match(node: Node, tenant: Tenant, request: pb.MatchRequest) -> pb.MatchReply:
    namespace = node.store.namespace(tenant, request.namespace_id)
    if request.tier == pb.TIER_SSD:
        there = node.moving.run_on_disk(namespace, checked_keys(request.keys)) if node.moving is not None else 0
        return pb.MatchReply(blocks=there, tiers=[pb.TIER_SSD] * there)
    if request.tier != pb.TIER_NONE:
        raise InvalidArgument(f"tier {request.tier}: blocks are looked for on the SSD, or (TIER_NONE) anywhere")
    tiers = tiers_of(node, namespace, checked_keys(request.keys))
    return pb.MatchReply(blocks=len(tiers), tiers=tiers)


def tiers_of(node: Node, namespace: Namespace, keys: Sequence[bytes]) -> list[pb.Tier]:
    """The leading run of `keys` that can be read: the fastest tier of each block."""
    tiers = [pb.TIER_HOST if in_memory else pb.TIER_SSD for in_memory in present(node, namespace, keys)]
    if node.gpu is not None:
        tiers = _on_devices(node.gpu, node, namespace, keys, tiers)
    if node.moving is not None and node.moving.trouble and pb.TIER_SSD in tiers:
        tiers = tiers[: tiers.index(pb.TIER_SSD)]  # the rest is there, and cannot be read
    return tiers


def _on_devices(
    gpu: GpuPort, node: Node, namespace: Namespace, keys: Sequence[bytes], below: list[pb.Tier]
) -> list[pb.Tier]:
    """The fastest tier of each block of the leading run, where `below` is that of the run in other tiers."""
    tiers: list[pb.Tier] = []
    start = 0
    for at, key in enumerate(keys):
        if gpu.tier.has(namespace, key):
            tiers.append(pb.TIER_GPU)
            continue
        if at - start >= len(below):  # that run ended at a block that only a device has: another may begin here
            start = at
            below = [pb.TIER_HOST if here else pb.TIER_SSD for here in present(node, namespace, keys[at:])]
            if not below:
                break
        tiers.append(below[at - start])
    return tiers


def touch(node: Node, tenant: Tenant, request: pb.TouchRequest) -> pb.TouchReply:
    """What a client did; all of the message is counted, or nothing where something of it cannot be."""
    keys = checked_keys(request.keys)
    conversation = hinted(request.hint)[0] if request.HasField("hint") else ""
    if request.reports:
        node.figures.told(tenant, node.store.namespaces, request.reports)
        for report in request.reports:
            node.store.namespace(tenant, report.namespace_id)  # which is a use of the number
    used(node, tenant, keys, conversation)
    served(node, tenant, request.hint)
    return pb.TouchReply()


def used(node: Node, tenant: Tenant, keys: Sequence[bytes], conversation: str = "") -> None:
    """Blocks were used, wherever they are."""
    if node.gpu is not None:
        node.gpu.tier.touch(tenant, keys, time.monotonic())
    used_below(node, tenant, keys, conversation)


def used_below(node: Node, tenant: Tenant, keys: Sequence[bytes], conversation: str = "") -> None:
    """Blocks were used on a device, which knows: what of them is in memory and on the SSD is as recent."""
    now = time.monotonic()
    node.store.touch(tenant, keys, now, conversation)
    if node.moving is not None:
        node.moving.touch(tenant, keys, now)


def pin(node: Node, tenant: Tenant, request: pb.PinRequest) -> pb.PinReply:
    """In all tiers; a block counts once."""
    namespace = node.store.namespace(tenant, request.namespace_id)
    keys, now = checked_keys(request.keys), time.monotonic()
    pinned = node.store.pin(namespace, keys, request.ttl_s, now)
    if node.gpu is not None:
        pinned += node.gpu.tier.pin(namespace, keys, request.ttl_s, now)
    if node.moving is not None:
        pinned += node.moving.pin_on_disk(namespace, keys, request.ttl_s, now)
    return pb.PinReply(pinned=pinned)


def unpin(node: Node, tenant: Tenant, request: pb.UnpinRequest) -> pb.UnpinReply:
    namespace = node.store.namespace(tenant, request.namespace_id)
    keys, unpinned = checked_keys(request.keys), 0
    if node.gpu is not None:
        unpinned = node.gpu.tier.unpin(namespace, keys)
    if node.moving is not None:
        unpinned += node.moving.unpin_on_disk(namespace, keys)
    return pb.UnpinReply(unpinned=unpinned + node.store.unpin(namespace, keys))


def health(node: Node) -> pb.HealthReply:
    problems = node.problems()
    return pb.HealthReply(
        healthy=not problems,
        problems=problems,
        version=node.version,
        uptime_s=time.monotonic() - node.started,
        degraded=node.degraded(),
    )
