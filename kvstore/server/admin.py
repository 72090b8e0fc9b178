"""Administration: looking at single things, and taking them away. The same over the session socket and over gRPC.

Whoever gets here may: the edges check it (`check_allowed` for the session socket). All that
walks over many blocks goes in steps of at most STEP_ROWS, a turn of the loop after each, so
that a million blocks hold up nobody else's call.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvstore.core import inspect as looking
from kvstore.core import reclaim
from kvstore.core.block import HINTED, PINNED
from kvstore.core.holds import Namespace, Session, Tenant
from kvstore.core.reclaim import Reclaimed
from kvstore.core.segments import FREE, GRANTED, QUARANTINED, Segment
from kvstore.core.store import Store
from kvstore.logs import logger
from kvstore.server import devices, removing, stats
from kvstore.server.audit import Who
from kvstore.server.calls import Node, SsdPort, checked_keys, checked_tenant
from kvstore.server.peer import Peer
from kvstore.server.removing import Removed
from kvstored.v1 import DIGEST_PREFIX_BYTES_MIN, KEY_BYTES
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, KVStoreError, Unauthenticated
from kvstored.v1.shm import ref_segment, ref_slot

log = logger("kvstored.admin")

STEP_ROWS = 1024
"""Rows looked at in a step: 0.5 ms, or 5 ms where all of them are dropped."""

COUNT_ROWS = 1 << 16
"""Rows in a step that only counts."""

PREFIX_ROWS = 1 << 14
"""Rows in a step that looks for keys by their beginning: 1 ms."""

NOTHING = "nothing to evict: name keys, a namespace, bytes above 0, or all"
CANDIDATES_NAMED = 10
SLOTS_SHOWN = 256

SUPERUSER = 0

FLUSH_WAIT_MS_MAX = 1000
VERIFY_BLOCKS_MAX, CURSOR_MAX = 1024, 1 << 40
NO_SSD = "this daemon has no SSD tier (ssd.path is off)"


def check_allowed(peer: Peer) -> None:
    """Over the session socket, administration is for the daemon's own user and root."""
    if not may_administer(peer):
        raise Unauthenticated(
            f"administration is for the daemon's own user (uid {os.geteuid()}) and root; "
            f"this process has uid {peer.uid}"
        )


def may_administer(peer: Peer) -> bool:
    return peer.uid in (os.geteuid(), SUPERUSER)


def _tenant(node: Node, name: str) -> Tenant | None:
    """The tenant of that name; a question about one that nobody has used does not make it."""
    return node.store.tenants.get(checked_tenant(name))


async def _in_steps(step: Callable[[int], int | None]) -> None:
    """Steps from where the last one stopped, until one says that it was the last; others have their turn between."""
    at = step(0)
    while at is not None:
        await asyncio.sleep(0)
        at = step(at)


# -- inspect


async def inspect(node: Node, request: pb.InspectRequest) -> pb.InspectReply:
    """One key, namespace, session or segment; nothing is set where there is none."""
    what = request.WhichOneof("what")
    if what in ("key", "namespace"):
        tenant = _tenant(node, request.tenant)
        if what == "key":
            _check_length("key", request.key, DIGEST_PREFIX_BYTES_MIN)
            return pb.InspectReply() if tenant is None else await _key(node, tenant, request.key)
        _check_length("namespace", request.namespace, DIGEST_PREFIX_BYTES_MIN)
        return pb.InspectReply() if tenant is None else await _namespace(node, tenant, request.namespace)
    if what == "session":
        session = node.store.sessions.get(request.session)
        return pb.InspectReply() if session is None else pb.InspectReply(session=_session(node, session))
    if what == "segment":
        segments, number = node.store.segments, request.segment
        segment = segments.live.get(number) or segments.draining.get(number)
        return pb.InspectReply() if segment is None else await _segment(node, segment)
    raise InvalidArgument("nothing that this daemon can inspect: name a key, a namespace, a session or a segment")


def _check_length(what: str, value: bytes, shortest: int) -> None:
    if not shortest <= len(value) <= KEY_BYTES:
        wanted = f"{KEY_BYTES}" if shortest == KEY_BYTES else f"{shortest} to {KEY_BYTES}"
        raise InvalidArgument(f"a {what} of {len(value)} bytes; {wanted} are wanted")


def _tiers(node: Node, tenant: Tenant) -> list[tuple[Store, Tenant]]:
    """Where a tenant's blocks may be, memory first: each store, and the tenant as it has it."""
    found = [(node.store, tenant)]
    if node.moving is not None:
        on_disk = node.moving.link.joined.disk_tenants.get(tenant.id)
        if on_disk is not None:
            found.append((node.moving.link.disk, on_disk))
    for pool in node.device_clients.pools():
        on_device = pool.link.side.device_tenants.get(tenant.id)
        if on_device is not None and not pool.trouble:
            found.append((pool.store, on_device))
    return found


async def _whole_key(node: Node, tenant: Tenant, prefix: bytes) -> bytes:
    """The key that begins so; what was asked for where there is none. Raises InvalidArgument where there are several.

    A walk over the rows: keys are in no order, and an index of them for this alone would cost every put.
    """
    if len(prefix) == KEY_BYTES:
        return prefix
    found: dict[bytes, None] = {}
    tiers = _tiers(node, tenant)
    for store, of in tiers:

        def step(start: int, store: Store = store, of: Tenant = of) -> int | None:
            after = looking.keys_step(of, store.table, prefix, start, PREFIX_ROWS, found)
            return after if len(found) <= CANDIDATES_NAMED else None

        await _in_steps(step)
    keys = sorted(key for key in found if any(key in of.rows for _, of in tiers))  # some may have gone meanwhile
    if len(keys) > 1:
        named = ", ".join([*(key.hex() for key in keys[:CANDIDATES_NAMED]), *["..."] * (len(keys) > CANDIDATES_NAMED)])
        raise InvalidArgument(f"{prefix.hex()} begins several keys: {named}")
    return keys[0] if keys else prefix


async def _key(node: Node, tenant: Tenant, prefix: bytes) -> pb.InspectReply:
    """From the first that has the block, of memory, the SSD and devices."""
    counted = 0
    key = await _whole_key(node, tenant, prefix)
    here = next(((store, of) for store, of in _tiers(node, tenant) if key in of.rows), None)
    if here is None:
        return pb.InspectReply()
    store, of = here
    table, row = store.table, of.rows[key]
    if looking.first_children(table, row)[1] is None:

        def step(start: int) -> int | None:
            nonlocal counted
            counted += looking.children_step(table, row, start, COUNT_ROWS)
            return start + COUNT_ROWS if start + COUNT_ROWS < len(table) and of.rows.get(key) == row else None

        await _in_steps(step)
    if of.rows.get(key) != row:
        return pb.InspectReply()  # it went meanwhile
    # From here in one step, so that the answer is of one moment.
    now = time.monotonic()
    children, count = looking.first_children(table, row)
    parent, parent_present = looking.parent_of(store, row)
    idle_s = now - table.used[row]
    return pb.InspectReply(
        key=pb.KeyInfo(
            key=key,
            namespace=stats.namespace_stats(node, _namespace_of(node, store, row)),
            copies=_copies(node, tenant, key),
            parent=parent,
            parent_present=parent_present,
            children=[table.key[child] or b"" for child in children],
            children_count=max(counted, len(children)) if count is None else count,
            depth=table.depth[row],
            hits=table.hits[row],
            idle_s=idle_s,
            age_s=max(now - table.stored[row], idle_s),
            leases=table.leases[row],
            pinned_s=looking.time_left(store, row, PINNED, now),
            ttl_s=looking.time_left(store, row, HINTED, now),
        )
    )


def _namespace_of(node: Node, store: Store, row: int) -> Namespace:
    """As memory's store has it."""
    number = store.table.namespace[row]
    if store is node.store:
        return store.namespaces[number - 1]
    if node.moving is not None and store is node.moving.link.disk:
        return node.moving.link.joined.memory_of[number]
    return next(pool.link.side for pool in node.device_clients.pools() if pool.store is store).memory_of[number]


def _copies(node: Node, tenant: Tenant, key: bytes) -> Iterator[pb.Copy]:
    """Where the block is, memory first."""
    uuids = {id(pool.store): pool.uuid for pool in node.device_clients.pools()}
    for store, of in _tiers(node, tenant):
        row = of.rows.get(key)
        if row is not None:
            place, device = store.table.place[row], uuids.get(id(store), "")
            yield pb.Copy(
                tier=pb.TIER_HOST if store is node.store else pb.TIER_GPU if device else pb.TIER_SSD,
                segment=ref_segment(place),
                slot=ref_slot(place),
                size_bytes=store.namespaces[store.table.namespace[row] - 1].block_bytes,
                device=device,
            )


async def _namespace(node: Node, tenant: Tenant, prefix: bytes) -> pb.InspectReply:
    namespaces = looking.named(tenant, prefix)
    if len(namespaces) > 1:
        raise InvalidArgument(f"{prefix.hex()} begins {len(namespaces)} namespaces: {_candidates(namespaces)}")
    if not namespaces:
        return pb.InspectReply()
    store, namespace, figures = node.store, namespaces[0], looking.NamespaceFigures()
    await _in_steps(lambda at: looking.namespace_step(store, namespace, at, STEP_ROWS, figures))
    now = time.monotonic()
    seen = figures.used_last > 0
    return pb.InspectReply(
        namespace=pb.NamespaceInfo(
            stats=stats.namespace_stats(node, namespace),
            pool=stats.pool_stats(store, store.pool(namespace)),
            leased=figures.leased,
            pinned=figures.pinned,
            roots=figures.roots,
            orphans=figures.orphans,
            deepest=figures.deepest,
            idle_s=now - figures.used_last if seen else 0.0,
            oldest_s=now - figures.used_first if seen else 0.0,
        )
    )


def _candidates(namespaces: Sequence[Namespace]) -> str:
    """The first of several by digest and label: what tells them apart is what is needed next."""
    named = [f"{n.digest.hex()} ({n.label})" for n in namespaces[:CANDIDATES_NAMED]]
    return ", ".join([*named, *(["..."] if len(namespaces) > CANDIDATES_NAMED else [])])


def _session(node: Node, session: Session) -> pb.SessionInfo:
    table, number = node.store.segments, session.id
    given = [s.id for of in (table.live, table.draining) for s in of.values() if number in s.sessions]
    return pb.SessionInfo(
        stats=stats.session_stats(node, session, time.monotonic()),
        granted=islice(session.granted, SLOTS_SHOWN),
        leased=islice(session.leased, SLOTS_SHOWN),
        segments=sorted(given),
    )


async def _segment(node: Node, segment: Segment) -> pb.InspectReply:
    store, figures = node.store, looking.SegmentFigures()
    await _in_steps(lambda at: looking.segment_step(store, segment, at, STEP_ROWS, figures))
    pool, state = segment.pool, segment.state
    return pb.InspectReply(
        segment=pb.SegmentInfo(
            id=segment.id,
            tenant=next((t.name for t in store.tenants.values() if t.id == segment.tenant), ""),
            size_bytes=segment.size_bytes,
            block_bytes=pool.block_bytes if pool is not None else 0,
            slot_bytes=pool.slot_bytes if pool is not None else 0,
            slots=len(state) if pool is not None else 0,
            free=state.count(FREE) if pool is not None else 0,
            granted=state.count(GRANTED),
            quarantined=state.count(QUARANTINED),
            blocks=figures.blocks,
            leased=figures.leased,
            pinned=figures.pinned,
            doomed=figures.doomed,
            idle_s=time.monotonic() - segment.used if segment.used else 0.0,
            sessions=sorted(segment.sessions),
            draining=segment.id in store.segments.draining,
        )
    )


# -- evict


async def evict(node: Node, request: pb.EvictRequest, who: Who) -> pb.EvictReply:
    """Drops what is asked for and held by nobody. A caller that hangs up stops it where it is."""
    done, what = Reclaimed(), request.WhichOneof("what")
    outcome, tiers = "stopped", _evict_from(node, request)
    from_disk = Removed(None, None) if tiers.from_ssd else None
    unknown = _not_known(node) if from_disk is not None else ""
    try:
        if unknown:
            from_disk = _remove_unknown(node, request)
        if what == "keys":
            tenant, keys = _tenant(node, request.tenant), list(checked_keys(request.keys.keys))
            if not unknown:
                from_disk = from_disk and Removed(_spaces_of(node, tenant, keys), keys)
            await _evict_keys(tiers, tenant, keys, done)
        elif what == "namespace":
            namespace = _whole_namespace(node, request)
            if not unknown:
                from_disk = from_disk and Removed([namespace.id], None)
            await _evict_rows(tiers.rows_steps(None, namespace), done)
        elif request.size_bytes or request.all:
            tenant = _tenant(node, request.tenant) if request.tenant else None
            if tenant is not None and not unknown:
                from_disk = from_disk and Removed([space.id for space in tenant.namespaces.values()], None)
            if request.tenant and tenant is None:
                pass  # nobody has ever used it, so there is nothing
            elif what == "all":
                await _evict_rows(tiers.rows_steps(tenant, None), done)
            else:
                while tiers.bytes_step(tenant, request.size_bytes, STEP_ROWS, done):
                    await asyncio.sleep(0)
        else:
            raise InvalidArgument(NOTHING)
        outcome = "done"
    except KVStoreError:
        outcome = "nothing"  # the request was wrong: its caller is told so, and nothing has changed
        raise
    finally:
        if outcome != "nothing":
            _log_evicted(request, outcome, tiers.sums(done), who)
        node.jobs_ready()
    removed = removing.begin(node, from_disk, removing.CLEARED_S) if from_disk is not None else None
    not_yet = await removed.decided() if removed else ""
    return pb.EvictReply(**vars(tiers.sums(done)), not_on_disk_yet=not_yet, ssd_not_known=unknown)


def _not_known(node: Node) -> str:
    """Why it is not known what the SSD has; "" where it is."""
    moving = node.moving
    return "" if moving is None or moving.ready else moving.trouble or "its records are being read"


def _remove_unknown(node: Node, request: pb.EvictRequest) -> Removed:
    """What is to go everywhere while it is not known what the SSD has: struck out before its records are met."""
    assert node.moving is not None, "there is no SSD"
    removals, what = node.moving.link.removals, request.WhichOneof("what")
    if what == "namespace":
        namespace = _whole_namespace(node, request)
        removals.clear(namespace)
        return Removed([namespace.id], None, whole=namespace)
    if what == "all" and request.all and not request.tenant:
        removals.everywhere(None, None)
        return Removed(None, None, everywhere="")
    name = checked_tenant(request.tenant)
    keys = list(checked_keys(request.keys.keys)) if what == "keys" else None
    if keys is None and not request.all:
        raise InvalidArgument(NOTHING)
    removals.everywhere(node.store.tenant(name), keys)  # what the SSD has of it may be all that there is
    return Removed(None, keys, everywhere=name)


def _spaces_of(node: Node, tenant: Tenant | None, keys: Sequence[bytes]) -> set[int]:
    """The namespaces that these keys have blocks in, by number."""
    if tenant is None:
        return set()
    tiers = _tiers(node, tenant)
    found = ((store, of.rows[key]) for key in keys for store, of in tiers if key in of.rows)
    return {_namespace_of(node, store, row).id for store, row in found}


def _log_evicted(request: pb.EvictRequest, outcome: str, done: Reclaimed, who: Who) -> None:
    what = request.WhichOneof("what")
    of = request.tenant or ("*" if what in ("all", "size_bytes") else "default")
    named = {"namespace": request.namespace.hex()} if what == "namespace" else {}
    names = ["blocks", "size_bytes", "held", "absent", *(["ssd_blocks", "ssd_bytes"] if done.ssd_blocks else [])]
    names += ["gpu_blocks", "gpu_bytes"] if done.gpu_blocks else []
    did = {name: getattr(done, name) for name in names}
    log.info("evicted as asked", what=what, tenant=of, **named, outcome=outcome, **did, **who)


async def _evict_rows(walks: Sequence[reclaim.Step], done: Reclaimed) -> None:
    for walk in walks:
        at = walk(0, STEP_ROWS, done)
        while at is not None:
            await asyncio.sleep(0)
            at = walk(at, STEP_ROWS, done)


def _evict_from(node: Node, request: pb.EvictRequest) -> reclaim.Tiers:
    """Where. What is to go from the SSD alone cannot, while it is not known what it has."""
    moving, tier, what = node.moving, request.tier, request.WhichOneof("what")
    if tier not in (pb.TIER_NONE, pb.TIER_GPU, pb.TIER_HOST, pb.TIER_SSD):
        raise InvalidArgument(f"tier {tier}: this daemon evicts from devices, the host tier, the SSD, or everywhere")
    if tier == pb.TIER_GPU and node.gpu is None:
        raise FailedPrecondition(devices.NO_DEVICE)
    if tier == pb.TIER_SSD and moving is None:
        raise FailedPrecondition(NO_SSD)
    if tier == pb.TIER_HOST or (tier == pb.TIER_NONE and what == "size_bytes"):
        return reclaim.InMemory(node.store)
    if node.gpu is not None and tier != pb.TIER_SSD:
        from kvstore.core.gpu_reclaim import Everywhere, OnDevices

        link = moving.link if moving is not None else None
        return OnDevices(node.gpu.tier) if tier == pb.TIER_GPU else Everywhere(node.store, link, node.gpu.tier)
    if moving is None:
        return reclaim.InMemory(node.store)
    if tier == pb.TIER_SSD and not moving.ready:
        raise FailedPrecondition(
            f"what the SSD has is not known yet ({moving.trouble or 'its records are being read'}): ask again when "
            "`kvstore-cli stats` says that it is open, or evict from both tiers: that is written down for it"
        )
    return reclaim.OnSsd(moving.link) if tier == pb.TIER_SSD else reclaim.Both(moving.link)


async def _evict_keys(tiers: reclaim.Tiers, tenant: Tenant | None, keys: list[bytes], done: Reclaimed) -> None:
    keys = list(dict.fromkeys(keys))
    if tenant is None:
        done.absent = len(keys)
        return

    def step(start: int) -> int | None:
        tiers.keys_step(tenant, keys[start : start + STEP_ROWS], done)
        return start + STEP_ROWS if start + STEP_ROWS < len(keys) else None

    await _in_steps(step)


def _whole_namespace(node: Node, request: pb.EvictRequest) -> Namespace:
    """Not a prefix: what one begins today may be another one tomorrow."""
    _check_length("namespace", request.namespace, KEY_BYTES)
    tenant = _tenant(node, request.tenant)
    found = tenant.namespaces.get(request.namespace) if tenant is not None else None
    if found is None:
        raise FailedPrecondition(f"tenant {request.tenant or 'default'!r} has no namespace {request.namespace.hex()}")
    return found


# -- the SSD as a whole


def _ssd(node: Node) -> SsdPort:
    if node.ssd is None:
        raise FailedPrecondition(NO_SSD)
    return node.ssd


async def flush(node: Node, request: pb.FlushRequest) -> pb.FlushReply:
    """Has what only memory has written to the SSD, and waits a bounded time for the end of it."""
    if request.wait_ms > FLUSH_WAIT_MS_MAX:
        raise InvalidArgument(f"wait_ms {request.wait_ms} is above {FLUSH_WAIT_MS_MAX}: ask again instead")
    return await _ssd(node).flush(request.wait_ms / 1000)


async def verify(node: Node, request: pb.VerifyRequest) -> pb.VerifyReply:
    """Reads some of what is on the SSD back."""
    if not 1 <= request.blocks_max <= VERIFY_BLOCKS_MAX:
        raise InvalidArgument(f"blocks_max {request.blocks_max} is not between 1 and {VERIFY_BLOCKS_MAX}")
    if request.cursor > CURSOR_MAX:
        raise InvalidArgument(f"cursor {request.cursor} is of no answer")
    return await _ssd(node).verify(request.cursor, request.blocks_max)


# -- ending a session


async def end_session(node: Node, request: pb.EndSessionRequest, who: Who, own: int = 0) -> pb.EndSessionReply:
    """Closes the connection of a session that is not `own`, the caller's.

    What its process may still write to is quarantined until that process exits. The session
    may be gone at once, or be there still as ended; it is not found again then.
    """
    number, store = request.session, node.store
    if number == own and own:
        raise InvalidArgument(f"session {number} is the caller's own; it ends when the caller closes it")
    session = store.sessions.get(number)
    if session is None:
        return pb.EndSessionReply()
    if session.ended:
        return pb.EndSessionReply(quarantined=node.device_clients.granted(session))
    close = node.closers.get(number)
    if close is None:
        raise FailedPrecondition(f"session {number} is a call under way ({session.client}); it ends by itself")
    log.info("session ended as asked", session=number, of_client=session.client, of_pid=session.pid, **who)
    close()
    return pb.EndSessionReply(found=True, quarantined=node.device_clients.granted(session))
