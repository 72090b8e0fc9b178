"""A store put together again from what an earlier daemon wrote down, in the memory that it left.

The order of things: segments, with all their slots taken; blocks; what sessions hold that may
still be alive; then whatever no block and no session has is free. What cannot be (a namespace
that is not there, a slot that does not exist, a second block of one key) is left out, and its
slot is free; nothing is ever believed twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore.core.block import HINTED, NONE, PINNED, SEALED
from kvstore.core.holds import INFINITY, Namespace, Session, Tenant
from kvstore.core.ledger import NO_LEDGER, Ledger
from kvstore.core.rebuild import Rebuild, Rows
from kvstore.core.segments import BLOCK, GRANTED, Pool, Segment
from kvstore.core.store import Store


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


def write_again(store: Store, segment: Segment, slots: range) -> None:
    """Writes down the blocks in these slots, of a segment that was not written down."""
    table, ledger = store.table, store.ledger
    for slot in slots:
        row = segment.row[slot]
        if row == NONE or table.state[row] != SEALED:
            continue
        key, parent, ref = table.key[row], table.parent[row], table.place[row]
        assert key is not None, f"row {row} is sealed and has no key"
        above = table.key[parent] if parent != NONE else None
        ledger.sealed(
            ref, key, above or b"", table.namespace[row], table.depth[row], table.used[row], table.stored[row]
        )
        ledger.used(ref, table.used[row], table.hits[row])
        for mark in (HINTED, PINNED):
            if table.marks[row] & mark:
                ledger.until(ref, mark, store.tree.until[row * 4 + mark])


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

    def blocks(self, rows: Rows) -> None:
        """All of them (rebuild.FOUND)."""
        self.done.blocks, self.done.refused = Rebuild(self.store, self._pools, self._now).fill(rows)

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
