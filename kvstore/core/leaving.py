"""How a session ends, and what the next one of the same process takes over of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.core import refusals
from kvstore.core.holds import INFINITY, Session
from kvstore.core.ledger import GRANT, LEASE
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from kvstore.core.store import Store


def end(store: "Store", session: Session, *, process_gone: bool) -> None:
    """The socket has hung up. What a live process may still write to is quarantined.

    Called again when the process of a session that ended before it is gone too; once
    nothing is left of a session, a further call does nothing.
    """
    if session.id not in store.sessions:
        return
    if not session.ended:
        session.ended = True
        session.recall = False
        store.counts.sessions_ended += 1
        store.segments.silent.add(session.id)
        for ref in session.granted:
            store.segments.quarantine_slot(ref)
    if process_gone:
        _forget(store, session, keep_leased={}, keep_granted=set(), heir=None)


def resume(store: "Store", old: Session, heir: Session, leased: Sequence[int], granted: Sequence[int]) -> None:
    """The process of `old` attached again as `heir` and says what it still uses; the rest is free.

    A slot named in `granted` that is not granted (any more) is passed over: it was committed
    by a call whose answer never arrived, and its next Commit answers FailedPrecondition.
    """
    check_resume(store, old, heir, leased, granted)
    keep_leased = _counted(leased)
    end(store, old, process_gone=False)
    _forget(store, old, keep_leased, set(granted), heir)


def check_resume(store: "Store", old: Session, heir: Session, leased: Sequence[int], granted: Sequence[int]) -> None:
    """All that `resume` raises, and nothing is changed: it may be called for every store before the first is.

    A lease that was never there is an error: whoever looks at that slot must stop.
    """
    if old.tenant is not heir.tenant or old.id not in store.sessions:
        raise FailedPrecondition("there is no such session of this tenant to resume")
    if leased or granted:
        refusals.check_may_hold(heir)
    for ref, count in _counted(leased).items():
        if count > old.leased.get(ref, 0):
            raise InvalidArgument(f"the resumed session did not hold slot {ref:#x} {count} times")
    refusals.check_leases(heir, len(leased))
    if not store.ledger.has_room(heir, len(leased) + len(granted)):
        raise ResourceExhausted(refusals.NO_LEDGER_ROOM)


def _counted(refs: Sequence[int]) -> dict[int, int]:
    counted: dict[int, int] = {}
    for ref in refs:
        counted[ref] = counted.get(ref, 0) + 1
    return counted


def _forget(
    store: "Store", old: Session, keep_leased: dict[int, int], keep_granted: set[int], heir: Session | None
) -> None:
    segments = store.segments
    for ref in old.granted:
        pool = store.pool_at(ref)
        old.tenant.held_bytes -= pool.slot_bytes
        if heir is not None and ref in keep_granted:
            segments.unquarantine_slot(ref)
            heir.grant([ref], pool.block_bytes, pool.slot_bytes, INFINITY)
            if ref in old.half_written:
                heir.half_written.add(ref)
            segments.live[ref >> 32].sessions.add(heir.id)
        else:
            segments.free_slot(ref)
    ended: dict[int, int] = {}
    for ref, count in old.leased.items():
        kept = keep_leased.get(ref, 0)
        if kept and heir is not None:
            if ref not in heir.leased:
                heir.held_bytes += store.pool_at(ref).slot_bytes
            heir.leased[ref] = heir.leased.get(ref, 0) + kept
            heir.leases += kept
            segments.live[ref >> 32].sessions.add(heir.id)
        if count > kept:
            ended[ref] = count - kept
    store.tree.unlease(old.tenant, ended)
    if heir is not None:
        # Ahead of the end of the old one: who dies between the two leaves both, and nothing is reused.
        store.ledger.succeeds(heir, old.nonce)
        store.ledger.holds(heir, GRANT, list(heir.granted))
        store.ledger.holds(heir, LEASE, [ref for ref, count in heir.leased.items() for _ in range(count)])
    store.ledger.closed(old)
    old.granted.clear()
    old.half_written.clear()
    old.granted_of.clear()
    old.leased.clear()
    old.held_bytes = old.leases = 0
    segments.forget_session(old.id)
    del store.sessions[old.id]
