"""What the daemon says of itself: one message, built from the store and its surroundings."""

import os
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from kvstore import logs
from kvstore.core.counts import COUNT_MAX
from kvstore.core.holds import Namespace, Session
from kvstore.core.segments import Pool
from kvstore.core.spaces import NOBODY
from kvstore.core.store import Store
from kvstore.server.calls import Node
from kvstored.v1 import kvstore_pb2 as pb

NAMESPACES_SHOWN = 256
"""The newest; there may be 65,536."""


def shown(namespaces: Sequence[Namespace]) -> list[Namespace]:
    """The newest, but those whose number was given up."""
    return list(islice((space for space in reversed(namespaces) if space.tenant is not NOBODY), NAMESPACES_SHOWN))[::-1]


def rss_anon_bytes() -> int:
    """Private memory of this process (RssAnon of /proc/self/status): the slab and the indexes are not in it."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def host_stats(store: Store, lock_error: str) -> pb.HostStats:
    """The slab as a whole."""
    segments = store.segments
    pools = segments.filled()
    return pb.HostStats(
        size_bytes=segments.size_bytes,
        segment_bytes=segments.segment_bytes,
        segments=len(segments.live),
        unassigned_bytes=segments.spare_bytes + sum(s.size_bytes for s in segments.unowned.values()),
        draining_bytes=sum(s.size_bytes for s in segments.draining.values()),
        locked=not lock_error,
        locked_reason=lock_error,
        huge_pages=segments.huge_pages,
        used_bytes=sum((p.slots - p.free) * p.slot_bytes for p in pools),
        block_bytes=sum((p.blocks + p.doomed) * p.block_bytes for p in pools),
        partly_free_bytes=sum(_partly_free_bytes(pool) for pool in pools),
        slack_bytes=sum((p.blocks + p.doomed) * (p.slot_bytes - p.block_bytes) for p in pools),
    )


def _partly_free_bytes(pool: Pool) -> int:
    """Free slots of segments that hold something: blocks of this size can use them, and nobody else."""
    return sum(len(s.free) for s in pool.segments.values() if len(s.free) < len(s.state)) * pool.slot_bytes


def pool_stats(store: Store, pool: Pool) -> pb.PoolStats:
    """One pool."""
    return pb.PoolStats(
        tenant=next(t.name for t in store.tenants.values() if t.id == pool.tenant),
        block_bytes=pool.block_bytes,
        slot_bytes=pool.slot_bytes,
        segments=len(pool.segments),
        slots=pool.slots,
        free=pool.free,
        granted=pool.granted,
        quarantined=pool.quarantined,
        blocks=pool.blocks,
        leased=pool.leased,
        pinned=pool.pinned,
        doomed=pool.doomed,
        segments_held=sum(segment.held > 0 for segment in pool.segments.values()),
    )


def session_stats(node: Node, session: Session, now: float) -> pb.SessionStats:
    """One session, perhaps ended while its process lives; the daemon's own are as old as it is."""
    return pb.SessionStats(
        id=session.id,
        client=session.client,
        tenant=session.tenant.name,
        pid=session.pid,
        local=session.local,
        read_only=session.read_only,
        granted_slots=len(session.granted),
        leased_slots=len(session.leased),
        held_bytes=session.held_bytes,
        age_s=now - (session.opened or node.started),
        ended=session.ended,
    )


def namespace_stats(node: Node, namespace: Namespace) -> pb.NamespaceStats:
    """One namespace."""
    on_disk = node.moving.link.joined.disk_of.get(namespace.id) if node.moving is not None else None
    return pb.NamespaceStats(
        tenant=namespace.tenant.name,
        id=namespace.id,
        label=namespace.label,
        digest=namespace.digest,
        block_bytes=namespace.block_bytes,
        blocks=namespace.blocks,
        block_tokens=namespace.block_tokens,
        ssd_blocks=on_disk.blocks if on_disk is not None else 0,
    )


def index_stats(node: Node) -> Iterable[pb.IndexStats]:
    """The shared index of each tenant."""
    for tenant in node.store.tenants.values():
        generation, capacity, live, tombstones, waiting, size_bytes = node.indexes.figures(tenant.id)
        yield pb.IndexStats(
            tenant=tenant.name,
            generation=generation,
            capacity=capacity,
            live=live,
            tombstones=tombstones,
            unpublished=waiting,
            size_bytes=size_bytes,
        )


def build(
    node: Node, *, loops: Iterable[pb.LoopStats], lock_error: str, socket: str, grpc: str, http: str
) -> pb.StatsReply:
    """Everything that `kvstore-cli stats` shows."""
    store, now = node.store, time.monotonic()
    problems = node.problems()
    return pb.StatsReply(
        daemon=pb.DaemonStats(
            version=node.version,
            pid=os.getpid(),
            epoch=node.epoch,
            uptime_s=now - node.started,
            socket=socket,
            grpc=grpc,
            http=http,
            healthy=not problems,
            problems=problems,
            rss_anon_bytes=rss_anon_bytes(),
            internal_errors=node.internal_errors,
            log_lines_dropped=logs.dropped(),
            degraded=node.degraded(),
            open_descriptors=sum(1 for _ in Path("/proc/self/fd").iterdir()),
        ),
        host=host_stats(store, lock_error),
        pools=[pool_stats(store, pool) for pool in store.segments.filled()],
        sessions=[session_stats(node, session, now) for session in store.sessions.values()],
        counters=pb.Counters(
            protocol_errors=node.protocol_errors,
            segments_moved=store.room.moved,
            **{name: min(value, COUNT_MAX) for name, value in vars(store.counts).items()},
        ),
        indexes=list(index_stats(node)),
        loops=list(loops),
        namespaces=[namespace_stats(node, namespace) for namespace in shown(store.namespaces)],
        operations=list(node.figures.operation_stats()),
        calls=list(node.figures.call_stats()),
        ssd=node.ssd.stats() if node.ssd is not None else None,
        persist=node.persist.stats() if node.persist is not None else None,
        gpus=node.gpu.stats() if node.gpu is not None else [],
        gpus_off=node.gpu.off() if node.gpu is not None else "",
    )


def keep_only(reply: pb.StatsReply, node: Node, tenant: str) -> None:
    """Leaves out of the reply what is of other tenants: pools, sessions, indexes and namespaces.

    What is of the whole node stays: its memory, its SSD, its devices, counters, calls and loops name no tenant.
    """
    for rows in (reply.pools, reply.sessions, reply.indexes):
        kept = [row for row in rows if row.tenant == tenant]
        del rows[:]
        rows.extend(kept)  # type: ignore[arg-type]
    of = node.store.tenants.get(tenant)
    newest = [] if of is None else list(islice(reversed(of.namespaces.values()), NAMESPACES_SHOWN))
    del reply.namespaces[:]
    reply.namespaces.extend(namespace_stats(node, namespace) for namespace in reversed(newest))
