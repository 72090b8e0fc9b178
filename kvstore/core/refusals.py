"""Why the store says no: what a call is checked for before it changes anything."""

from collections.abc import Sequence

from kvstore.core import holds
from kvstore.core.holds import Session, Tenant
from kvstore.core.segments import Pool, SegmentTable
from kvstored.v1 import KEY_BYTES
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from kvstored.v1.shm import EMPTY_KEY

SIZES_NAMED = 3
"""Other block sizes that a refusal speaks of: those that have most of the memory."""


def check_open(session: Session) -> None:
    """Only a session whose socket is there may ask for anything."""
    if session.ended:
        raise FailedPrecondition(f"session {session.id} has ended; connect again")


def check_may_hold(session: Session) -> None:
    """A read-only session has no leases and no slots to write to."""
    check_open(session)
    if session.read_only:
        raise FailedPrecondition("this session is read-only: it has no leases and no slots to write to")


def own_limit(session: Session, segments: SegmentTable, slot_bytes: int) -> int:
    """Further slots that this session may hold; one is always allowed to who holds none."""
    left = segments.tenant_bytes(session.tenant.id) // holds.SESSION_SHARE - session.held_bytes
    return min(max(left // slot_bytes, 0 if session.held_bytes else 1), session.holds_left)


def tenant_limit(session: Session, segments: SegmentTable, slot_bytes: int) -> int:
    """Further slots that all sessions of the tenant may hold; one is always allowed where nothing is held."""
    return tenant_left(session.tenant, segments, slot_bytes)


def tenant_left(tenant: Tenant, segments: SegmentTable, slot_bytes: int) -> int:
    """The same, of a tenant."""
    whole = segments.tenant_bytes(tenant.id)
    left = whole * holds.HELD_NUMERATOR // holds.HELD_DENOMINATOR - tenant.held_bytes
    return max(left // slot_bytes, 0 if tenant.held_bytes else 1)


def above_limits(session: Session, segments: SegmentTable, slot_bytes: int, more: int) -> str:
    """What to tell a session that may not hold `more` slots of this size on top."""
    if session.holds_left < more:
        return too_many_holds(session, more)
    whole = segments.tenant_bytes(session.tenant.id)
    return (
        f"session {session.id} ({session.client}) holds {session.held_bytes} bytes of at most "
        f"{whole // holds.SESSION_SHARE}, all sessions of tenant {session.tenant.name!r} hold "
        f"{session.tenant.held_bytes} of at most {whole * holds.HELD_NUMERATOR // holds.HELD_DENOMINATOR}; "
        f"no room for {more} of {slot_bytes} bytes more: release leases (kvstore-cli stats shows who holds what)"
    )


def no_slot(pool: Pool, table: SegmentTable, *, pending: bool) -> str:
    """What to tell a session for which no slot could be freed; also whose holds keep segments from this block size.

    `pending`: memory is being made or emptied, and nobody needs to let go of anything.
    """
    why = (
        f"no slot of {pool.block_bytes} bytes can be freed: {pool.leased} blocks leased, {pool.pinned} pinned, "
        f"{pool.granted} slots granted, {pool.quarantined} quarantined of {pool.slots}"
    )
    others = [other for other in table.filled() if other.tenant == pool.tenant and other is not pool]
    for other in sorted(others, key=lambda other: len(other.segments), reverse=True)[:SIZES_NAMED]:
        kept = [segment.held for segment in other.segments.values() if segment.held]
        if kept:
            why += (
                f"; blocks of {other.block_bytes} bytes have {len(other.segments)} segments, of which {len(kept)} "
                f"cannot go to another size for {sum(kept)} slots leased, pinned or granted in them"
            )
    return why + (
        "; memory is being made ready, try again" if pending else "; release or unpin some, or raise host.size"
    )


def no_stay(pool: Pool, high: float, tenant: Tenant) -> str:
    """What to tell an operator where a block that is stored goes at once, since nothing else may."""
    why = (
        f"what is stored is evicted at once: of {pool.slots} slots of {pool.block_bytes} bytes of tenant "
        f"{tenant.name!r}, {pool.pinned} are pinned, {pool.leased} leased, {pool.granted} granted, "
        f"{pool.quarantined} quarantined, and evict.high = {high:g} leaves no more in use"
    )
    most = max(tenant.namespaces.values(), key=lambda namespace: namespace.pinned, default=None)
    if most is not None and most.pinned:
        why += f"; most pins are of namespace {most.id}, {most.pinned} blocks, and end by their time or by ns.unpin"
    return why + "; kvstore-cli stats shows who holds what; raise host.size if all of it is needed"


def too_many_holds(session: Session, more: int) -> str:
    """What to tell a session that would hold more by number than a Resume can name."""
    return (
        f"session {session.id} ({session.client}) has {session.leases} leases and {len(session.granted)} slots "
        f"granted, and asks for {more} more; at most {holds.HOLDS_MAX} together: release some first"
    )


NO_LEDGER_ROOM = "there is no memory left to write down who holds what (host.persist): release some, or free memory"


def check_leases(session: Session, more: int) -> None:
    """Holds on one slot are counted too, not only slots."""
    if more > session.holds_left:
        raise ResourceExhausted(too_many_holds(session, more))


def check_commit(
    session: Session,
    segments: SegmentTable,
    pool: Pool,
    keys: Sequence[bytes],
    refs: Sequence[int],
    parents: Sequence[bytes],
    depths: Sequence[int],
    ttl_s: float,
) -> None:
    """Shapes, lengths, and that every slot is this session's and of the right size."""
    check_open(session)
    if not len(keys) == len(refs) == len(parents) == len(depths):
        raise InvalidArgument(
            f"{len(keys)} keys, {len(refs)} slots, {len(parents)} parents and {len(depths)} depths: "
            "a commit names as many of each"
        )
    if not 0 <= ttl_s < holds.INFINITY:
        raise InvalidArgument(f"ttl_s {ttl_s} is not a number of seconds from 0 (none) up")
    if len(set(refs)) != len(refs):
        raise InvalidArgument("a slot is named twice in one commit")
    granted, live = session.granted, segments.live
    for key, parent, ref in zip(keys, parents, refs, strict=True):
        if len(key) != KEY_BYTES or (parent and len(parent) != KEY_BYTES):
            raise InvalidArgument(f"a key is {KEY_BYTES} bytes, not {len(key)}; a parent also, or empty")
        if key == EMPTY_KEY:
            raise InvalidArgument("32 zero bytes are no key: the index means an empty place by them")
        if key == parent:
            raise InvalidArgument("a block cannot be its own parent")
        if ref not in granted:
            raise FailedPrecondition(f"slot {ref:#x} is not granted to this session (expired, or never was)")
        if ref in session.half_written:
            raise FailedPrecondition(
                f"slot {ref:#x} was reserved of a daemon before this one: give it back (abort) and reserve anew"
            )
        if live[ref >> 32].pool is not pool:
            raise InvalidArgument(f"slot {ref:#x} is not of {pool.block_bytes} bytes as this namespace needs")
