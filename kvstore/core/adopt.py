"""A store put together again from what an earlier daemon wrote down, in the memory that it left.

The order of things: segments, with all their slots taken; blocks; what sessions hold that may
still be alive; then whatever no block and no session has is free. What cannot be (a namespace
that is not there, a slot that does not exist, a second block of one key) is left out, and its
slot is free; nothing is ever believed twice.

The policy's order is by last use, what hangs from something after it, as if each block had just
been used in turn.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore.core.block import HINTED, NONE, SEALED
from kvstore.core.holds import INFINITY, Namespace, Session, Tenant
from kvstore.core.ledger import NO_LEDGER, Ledger
from kvstore.core.segments import BLOCK, GRANTED, Pool, Segment
from kvstore.core.store import Store
from kvstored.v1 import KEY_BYTES
from kvstored.v1.shm import EMPTY_KEY


@dataclass(frozen=True)
class NamespaceFound:
    """A namespace of a tenant, named by its place in `Found.tenants`."""

    tenant: int
    digest: bytes
    block_bytes: int
    label: str
    block_tokens: int


@dataclass(frozen=True)
class SegmentFound:
    """A segment whose memory is here; `tenant` is None where it was nobody's."""

    id: int
    size_bytes: int
    tenant: int | None
    block_bytes: int


@dataclass(frozen=True)
class SessionFound:
    """A session whose process lives, or may. `place` is where it is written down."""

    place: int
    tenant: int
    client: str
    pid: int
    born: int
    nonce: int
    nonce_before: int
    granted: list[int]
    leased: dict[int, int]


Row = tuple[int, bytes, bytes, int, int, float, float, float, float, int]
"""Slot, key, parent (32 zero bytes: none), namespace, depth, stored, used, ends of life and pin (0: none), hits."""


@dataclass
class Found:
    """What was written down."""

    tenants: list[str]
    namespaces: list[NamespaceFound]
    segments: list[SegmentFound]
    sessions: list[SessionFound]
    last_segment: int


@dataclass
class Adopted:
    """What became of it."""

    blocks: int = 0
    refused: list[int] = field(default_factory=list)
    """Slots whose rows are not true (any more): to be struck out."""
    without: list[int] = field(default_factory=list)
    """Segments that have no place any more: their memory is to be given up."""
    sessions: list[tuple[SessionFound, Session]] = field(default_factory=list)
    whole: set[int] = field(default_factory=set)
    """Of those sessions, by number, the ones of which every hold is here."""


def record(store: Store, ledger: Ledger | None) -> None:
    """From now on (or, None, no more) the store writes down what it does."""
    store.ledger = NO_LEDGER if ledger is None else ledger
    store.tree.ledger = store.segments.ledger = ledger


@contextmanager
def unrecorded(store: Store) -> Iterator[None]:
    """For what leaves nothing behind, within one step."""
    ledger = store.tree.ledger
    record(store, None)
    try:
        yield
    finally:
        record(store, ledger)


def write_uses(store: Store, rows_max: int) -> bool:
    """Writes down when blocks were last used, so many of them; True if there are more."""
    table, rows = store.table, store.tree.used_rows
    for _ in range(min(rows_max, len(rows))):
        row = rows.pop()
        if table.state[row] == SEALED:
            store.ledger.used(table.place[row], table.used[row], table.hits[row])
    return bool(rows)


class Adoption:
    """Fills a store that has nothing yet and makes no segments."""

    def __init__(self, store: Store, found: Found, now: float) -> None:
        self.store = store
        self.done = Adopted()
        self._found = found
        self._now = now
        self._tenants: list[Tenant] = []
        self._pools: dict[int, Pool] = {}
        """Segment -> its pool."""

    def begin(self) -> None:
        """Tenants, namespaces, and segments with every slot taken. Raises KVStoreError where that cannot be."""
        store, found = self.store, self._found
        self._tenants = [store.tenant(name) for name in found.tenants]
        for row in found.namespaces:
            tenant = self._tenants[row.tenant]
            store.open_namespace(tenant, row.digest, row.block_bytes, row.label, row.block_tokens)
        segments = store.segments
        segments.never_make(found.last_segment)
        for segment in found.segments:
            pool = self._pool_for(segment)
            fits = segment.size_bytes <= segments.spare_bytes and segment.id not in segments.live
            if fits and segment.tenant is None:
                segments.adopt_unowned(segment.id, segment.size_bytes)
            elif fits and pool is not None and pool.slot_bytes <= segment.size_bytes:
                segments.adopt(segment.id, segment.size_bytes, pool)
                self._pools[segment.id] = pool
            else:
                self.done.without.append(segment.id)

    def _pool_for(self, segment: SegmentFound) -> Pool | None:
        """As any namespace of that tenant with that block size has it; a segment of no namespace has no blocks."""
        namespace = self._namespace_of(segment.tenant, segment.block_bytes)
        return None if namespace is None else self.store.pool(namespace)

    def _namespace_of(self, tenant: int | None, block_bytes: int) -> Namespace | None:
        if tenant is None or not tenant < len(self._tenants):
            return None
        spaces = self._tenants[tenant].namespaces.values()
        return next((space for space in spaces if space.block_bytes == block_bytes), None)

    def blocks(self, rows: Iterable[Row]) -> None:
        """All of them; best in the order of their depth, which spares rows that stand in for parents."""
        store, table = self.store, self.store.table
        come: list[int] = []
        for found in rows:
            row = self._block(found)
            if row == NONE:
                self.done.refused.append(found[0])
            else:
                come.append(row)
        come.sort(key=lambda row: (table.used[row], -table.depth[row]))
        for row in come:
            order = store.tree.pool_of(row).order
            store.policy.add(order, row, orphan=store.tree.families.is_orphan(row))
        self.done.blocks = len(come)

    def _block(self, found: Row) -> int:
        ref, key, parent, number, depth, stored, used, life, pin, hits = found
        store = self.store
        pool = self._pools.get(ref >> 32)
        if pool is None or not 1 <= number <= len(store.namespaces) or key == EMPTY_KEY or 0 < life <= self._now:
            return NONE
        namespace, segment = store.namespaces[number - 1], store.segments.live[ref >> 32]
        slot = ref & 0xFFFFFFFF
        if (
            store.pool(namespace) is not pool
            or key in namespace.tenant.rows
            or not slot < len(segment.state)
            or segment.state[slot] != GRANTED
        ):
            return NONE
        above = parent if parent != bytes(KEY_BYTES) and parent != key else b""
        row = store.tree.seal(namespace, pool, key, ref, above, depth, min(used, self._now))
        store.table.stored[row] = stored
        store.table.hits[row] = hits
        if life:
            store.tree.set_until(row, HINTED, life)
        if pin > self._now:
            store.tree.pin(row, pin)
        return row

    def sessions(self) -> None:
        """What processes of before may still touch: in quarantine until they are gone or attach again."""
        for found in self._found.sessions:
            if not found.tenant < len(self._tenants):
                continue
            tenant = self._tenants[found.tenant]
            session = self.store.open_session(
                tenant, found.client, self._now, local=True, read_only=False, pid=found.pid, nonce=found.nonce
            )
            session.born = found.born
            lost = self._grants(session, found.granted) + self._leases(session, found.leased)
            for segment in self.store.segments.live.values():
                if segment.tenant == tenant.id:
                    segment.sessions.add(session.id)
            self.store.end_session(session, process_gone=False)
            self.done.sessions.append((found, session))
            if not lost:
                self.done.whole.add(session.id)

    def _at(self, session: Session, ref: int) -> tuple[Segment, Pool] | None:
        """Where a slot of a session's tenant is; None where its memory is not here."""
        pool = self._pools.get(ref >> 32)
        segment = self.store.segments.live.get(ref >> 32)
        if pool is None or segment is None or pool.tenant != session.tenant.id:
            return None
        return (segment, pool) if ref & 0xFFFFFFFF < len(segment.state) else None

    def _grants(self, session: Session, refs: list[int]) -> int:
        """Slots that it may be writing to. One that holds a block by now was committed; answers how many are lost."""
        lost = 0
        for ref in dict.fromkeys(refs):
            at = self._at(session, ref)
            if at is None:
                lost += 1
            elif at[0].state[ref & 0xFFFFFFFF] == GRANTED:
                session.grant([ref], at[1].block_bytes, at[1].slot_bytes, INFINITY)
                session.half_written.add(ref)
        return lost

    def _leases(self, session: Session, leased: dict[int, int]) -> int:
        """Slots that it may be looking at; what was removed meanwhile keeps its slot until then."""
        lost = 0
        for ref, count in leased.items():
            at = self._at(session, ref)
            if at is None or ref in session.granted or not 0 < count <= session.holds_left:
                lost += 1
                continue
            segment, pool = at
            slot = ref & 0xFFFFFFFF
            if segment.state[slot] == GRANTED:
                self._doomed(segment, pool, ref)
            if segment.state[slot] != BLOCK:
                lost += 1  # granted to somebody, and leased: this cannot be
                continue
            session.leased[ref] = count
            session.leases += count
            session.held_bytes += pool.slot_bytes
            self.store.tree.lease([segment.row[slot]] * count, session.tenant, pool, hit=False)
        return lost

    def _doomed(self, segment: Segment, pool: Pool, ref: int) -> None:
        """A block without a key, for whoever still leases it."""
        store, table = self.store, self.store.table
        namespace = self._namespace_of(pool.tenant, pool.block_bytes)
        assert namespace is not None, f"segment {segment.id} has a pool of no namespace"
        row = table.take()
        table.move(row, "doom")
        table.place[row], table.namespace[row] = ref, namespace.id
        table.used[row] = table.stored[row] = self._now
        table.hits[row] = table.depth[row] = 0
        store.segments.fill_slot(ref, row, self._now)
        pool.blocks -= 1
        pool.doomed += 1

    def end(self) -> Adopted:
        """What nobody has is free, and the rest of the memory is asked for."""
        segments = self.store.segments
        for number in list(segments.adopting):
            segments.adopted(number)
        segments.make_all()
        return self.done
