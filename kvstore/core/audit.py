"""Everything against everything: what must be true between any two calls of the store.

Each total is computed again from what it counts, and each link is followed both ways.
Runs after every step of the tests, and once when a daemon takes over another's memory.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvstore.core.block import HINTED, NONE, PINNED, State
from kvstore.core.evict import INNER, LEAF, ORPHAN, OUT
from kvstore.core.segments import BLOCK, FREE, GRANTED, QUARANTINED, Pool, Segment

if TYPE_CHECKING:
    from kvstore.core.store import Store

Published = tuple[int, int, int, int]
"""What an index says of a block: slot reference, offset in its segment, length, namespace."""

POOL_COUNTERS = ("slots", "free", "granted", "quarantined", "blocks", "doomed", "leased", "pinned")


def check(store: "Store", published: Mapping[tuple[int, bytes], Published] | None = None) -> None:
    """Raises AssertionError naming what disagrees.

    `published` is what an index was told, by tenant and key; None where it is not at hand.
    """
    memory(store)
    for segment in store.segments.live.values():
        slots(store, segment)
    for pool in store.segments.pools.values():
        counters(store, pool)
    same("filled pools", set(store.segments.filled()), {p for p in store.segments.pools.values() if p.segments})
    rows(store)
    links(store)
    lists(store)
    missing(store)
    holders(store)
    times(store)
    if published is not None:
        index(store, published)


def same(what: str, kept: object, found: object) -> None:
    """One comparison; the message says which of the two is kept and which was computed."""
    assert kept == found, f"{what}: kept as {kept!r}, found {found!r}"


def memory(store: "Store") -> None:
    """The bytes of the slab, and who owns the segments."""
    table = store.segments
    live = table.live.values()
    total = sum(s.size_bytes for s in live) + sum(table.making.values()) + table.spare_bytes
    same("slab", table.size_bytes, total + sum(s.size_bytes for s in table.draining.values()))
    assert table.spare_bytes >= 0, f"spare bytes {table.spare_bytes}"
    owned: Counter[int] = Counter()
    for number, segment in table.live.items():
        same("number of a live segment", number, segment.id)
        assert number not in table.draining, f"segment {number} is live and draining"
        assert number not in table.making, f"segment {number} is live and being made"
        same(f"segment {number} unowned", number in table.unowned, segment.tenant is None)
        same(f"segment {number} in a pool", segment.pool is not None, segment.tenant is not None)
        if segment.tenant is not None:
            owned[segment.tenant] += segment.size_bytes
        if segment.pool is not None:
            same(f"segment {number} and its pool: tenant", segment.tenant, segment.pool.tenant)
            assert segment.pool.segments.get(number) is segment, f"segment {number} is not among its pool's"
        assert segment.sessions <= store.sessions.keys(), f"segment {number} is mapped by sessions that are gone"
    taking = [s for taking in store.room._taking.values() for s in (*taking.full, *taking.empty)]
    same("segments taken, each once", sorted(s.id for s in taking), sorted(s.id for s in live if s.closed))
    assert table.unowned.keys() <= table.live.keys(), "an unowned segment is not live"
    same("bytes by tenant", table.owned, dict(owned))
    same("bytes of tenants", table._owned_bytes, sum(owned.values()))
    for number, segment in table.draining.items():
        assert segment.sessions, f"segment {number} drains though no session has it"
        assert segment.pool is None, f"segment {number} drains in a pool"
        assert segment.sessions <= store.sessions.keys(), f"segment {number} waits for sessions that are gone"
    assert table.making_for.keys() <= table.making.keys(), "a segment is promised that is not being made"
    same("silent sessions", table.silent, {s.id for s in store.sessions.values() if s.ended})


def slots(store: "Store", segment: Segment) -> None:
    """One segment: its slots against its lists and the rows of its blocks."""
    pool, table = segment.pool, store.table
    if pool is None:
        return
    name = f"segment {segment.id}"
    same(f"{name}: slots", len(segment.state), segment.size_bytes // pool.slot_bytes)
    same(f"{name}: row column", len(segment.row), len(segment.state))
    free = [number for number, state in enumerate(segment.state) if state == FREE]
    same(f"{name}: free slots", sorted(segment.free), free)
    same(f"{name}: open", pool.open.get(segment.id) is segment, bool(free) and not segment.closed)
    held = 0
    for number, state in enumerate(segment.state):
        row = segment.row[number]
        if state == BLOCK:
            assert 0 <= row < len(table), f"{name} slot {number}: no row {row}"
            same(f"{name} slot {number}: place of row {row}", table.place[row], segment.id << 32 | number)
            assert table.state[row] in (State.SEALED, State.DOOMED), f"{name} slot {number}: row {row} is no block"
            held += bool(table.leases[row] or table.marks[row] & PINNED)
        else:
            same(f"{name} slot {number}: row of a slot without a block", row, NONE)
            held += state in (GRANTED, QUARANTINED)
    same(f"{name}: held", segment.held, held)


def counters(store: "Store", pool: Pool) -> None:
    """One pool's numbers, counted again in its segments."""
    same("pool's key", store.segments.pools.get((pool.tenant, pool.block_bytes)), pool)
    found: Counter[str] = Counter()
    for number, segment in pool.segments.items():
        assert store.segments.live.get(number) is segment, f"segment {number} of a pool is not live"
        assert segment.pool is pool, f"segment {number} is in another pool"
        states = Counter(segment.state)
        if not segment.closed:
            found["slots"] += len(segment.state)
            found["free"] += states[FREE]
        found["granted"] += states[GRANTED]
        found["quarantined"] += states[QUARANTINED]
        for row in segment.row:
            if row != NONE:
                found["doomed" if store.table.state[row] == State.DOOMED else "blocks"] += 1
                found["leased"] += store.table.leases[row] > 0
                found["pinned"] += store.table.marks[row] & PINNED > 0
    for counter in POOL_COUNTERS:
        same(f"pool of {pool.block_bytes} bytes: {counter}", getattr(pool, counter), found[counter])
    assert pool.open.keys() <= pool.segments.keys(), "an open segment is not of the pool"


def rows(store: "Store") -> None:
    """Every row: its state against its key, slot, namespace and holds."""
    table = store.table
    leases: Counter[int] = Counter()
    for session in store.sessions.values():
        for ref, count in session.leased.items():
            assert count > 0, f"session {session.id} leases slot {ref:#x} {count} times"
            leases[ref] += count
    blocks: Counter[int] = Counter()
    pinned: Counter[int] = Counter()
    free = set(table.free)
    same("free rows, each once", len(table.free), len(free))
    heads = {head for pool in store.segments.pools.values() for head in pool.order.heads if head != NONE}
    for row in range(len(table)):
        state, key = table.state[row], table.key[row]
        same(f"row {row} free", row in free, state == State.GONE)
        same(f"row {row} is a list head", row in heads, state == State.LIST)
        if state in (State.GONE, State.LIST, State.MISSING):
            same(f"row {row}: marks, leases", (table.marks[row], table.leases[row]), (0, 0))
            same(f"row {row}: key", key is not None, state == State.MISSING)
            continue
        ref, namespace = table.place[row], store.namespaces[table.namespace[row] - 1]
        segment, number = store.segments.at(ref)
        same(f"row {row}: what its slot says", segment.row[number], row)
        pool = store.segments.pools[namespace.tenant.id, namespace.block_bytes]
        assert segment.pool is pool, f"row {row} lies in the wrong pool"
        same(f"row {row}: leases", table.leases[row], leases.pop(ref, 0))
        if state == State.SEALED:
            assert key is not None, f"row {row} is sealed and has no key"
            same(f"row {row}: what the key leads to", namespace.tenant.rows.get(key), row)
            blocks[namespace.id] += 1
            pinned[namespace.id] += table.marks[row] & PINNED > 0
        else:
            same(f"row {row}: key and marks of a doomed block", (key, table.marks[row]), (None, 0))
            assert table.leases[row], f"row {row} is doomed and nobody leases it"
    assert not leases, f"leases of what is no block: {leases}"
    for namespace in store.namespaces:
        same(f"namespace {namespace.id}: blocks", namespace.blocks, blocks[namespace.id])
        same(f"namespace {namespace.id}: pinned", namespace.pinned, pinned[namespace.id])
    for tenant in store.tenants.values():
        same(f"tenant {tenant.name}: keys", len(tenant.rows), sum(n.blocks for n in tenant.namespaces.values()))


def links(store: "Store") -> None:
    """The prefix tree, from children to parents and from parents to children, and that it is one."""
    table = store.table
    below: Counter[int] = Counter()
    for row in range(len(table)):
        parent = table.parent[row]
        if table.state[row] != State.SEALED:
            links = (parent, table.sibling[row], table.sibling_before[row])
            same(f"row {row}: links of what is not in the tree", links, (NONE,) * 3)
        if parent != NONE:
            assert table.state[parent] in (State.SEALED, State.MISSING), f"row {row} hangs from what is no parent"
            assert table.depth[row] > table.depth[parent], f"row {row} is no deeper than what it hangs from"
            below[parent] += 1
    for row in range(len(table)):
        before, child, count = NONE, table.child[row], 0
        while child != NONE:
            count += 1
            assert count <= below[row], f"row {row} has more children than rows say that it is their parent"
            same(f"row {child}: parent", table.parent[child], row)
            same(f"row {child}: sibling before", table.sibling_before[child], before)
            before, child = child, table.sibling[child]
        same(f"row {row}: children", count, below[row])


def lists(store: "Store") -> None:
    """Each block is in the one list where it belongs; only held ones may be in none, and unsettled ones elsewhere."""
    table = store.table
    seen: dict[int, int] = {}
    for pool in store.segments.pools.values():
        for which in (LEAF, INNER, ORPHAN):
            found = store.policy.walk(pool.order, which)
            same(f"pool of {pool.block_bytes} bytes: length of list {which}", pool.order.listed[which], len(found))
            for row in found:
                assert row not in seen, f"row {row} is in two lists"
                assert store.tree.pool_of(row) is pool, f"row {row} is in another pool's list"
                seen[row] = which
    unsettled = _unsettled(store)
    for row in range(len(table)):
        if table.state[row] != State.SEALED:
            assert row not in seen, f"row {row} is listed and no block"
            continue
        by_child = LEAF if table.child[row] == NONE else INNER
        place = ORPHAN if store.tree.families.is_orphan(row) else by_child
        if row in unsettled and seen.get(row) in (ORPHAN, by_child):
            place = seen[row]
        if table.held(row) and row not in seen:
            place = OUT
        same(f"row {row}: list", seen.get(row, OUT), place)
        same(f"row {row}: listed", table.listed[row], place)


def _unsettled(store: "Store") -> set[int]:
    """Blocks of which the policy may not have heard yet that their parent came or went."""
    table, found = store.table, set()
    for parent, child in store.tree.families.unsettled.items():
        same(f"row {child}: parent that it is to be settled with", table.parent[child], parent)
        while child != NONE:
            found.add(child)
            child = table.sibling[child]
    return found


def missing(store: "Store") -> None:
    """Which rows stand in for whom, both ways; and the rows from which on to mark what was used."""
    table = store.table
    standing = {row for row in range(len(table)) if table.state[row] == State.MISSING}
    for tenant in store.tenants.values():
        for key, row in tenant.missing.items():
            assert row in standing, f"row {row} stands in for a parent, and for nobody"
            standing.discard(row)
            same(f"row {row}: key", table.key[row], key)
            assert store.namespaces[table.namespace[row] - 1].tenant is tenant, f"row {row} of another tenant"
            assert key not in tenant.rows, f"row {row} stands in for a block that is here"
            assert table.child[row] != NONE, f"row {row} stands in for a parent without children"
            same(f"row {row}: last use of what is not here", table.used[row], float("inf"))
    assert not standing, f"rows that stand in for nobody knows whom: {standing}"
    for row in store.tree.climbs:
        same(f"row {row}: state of where to go on", table.state[row], State.SEALED)


def holders(store: "Store") -> None:
    """Who holds what, and the bytes of it."""
    table = store.segments
    states: dict[int, int] = {}
    for session in store.sessions.values():
        name, held = f"session {session.id}", 0
        sizes: Counter[int] = Counter()
        for ref in session.granted:
            segment, number = table.at(ref)
            assert segment.pool is not None, f"{name}: slot {ref:#x} in no pool"
            same(f"{name}: tenant of slot {ref:#x}", segment.tenant, session.tenant.id)
            same(f"{name}: slot {ref:#x}", segment.state[number], QUARANTINED if session.ended else GRANTED)
            assert ref not in states, f"slot {ref:#x} is granted twice"
            states[ref] = segment.state[number]
            sizes[segment.pool.block_bytes] += 1
            held += segment.pool.slot_bytes
        same(f"{name}: slots granted by size", session.granted_of, dict(sizes))
        for ref in session.leased:
            segment, number = table.at(ref)
            assert segment.pool is not None, f"{name}: slot {ref:#x} in no pool"
            same(f"{name}: tenant of leased slot {ref:#x}", segment.tenant, session.tenant.id)
            held += segment.pool.slot_bytes
        same(f"{name}: leases", session.leases, sum(session.leased.values()))
        same(f"{name}: bytes held", session.held_bytes, held)
        assert not session.recall or session.granted, f"{name} is asked to give back nothing"
    kept = Counter(
        {
            segment.id << 32 | number: state
            for segment in table.live.values()
            for number, state in enumerate(segment.state)
            if segment.id not in table.adopting
        }
    )
    unheld = [ref for ref, state in kept.items() if state in (GRANTED, QUARANTINED) and ref not in states]
    assert not unheld, f"slots granted to nobody: {unheld}"
    for tenant in store.tenants.values():
        pools = [pool for pool in table.pools.values() if pool.tenant == tenant.id]
        adopting = sum(
            segment.state.count(GRANTED) * pool.slot_bytes
            for pool in pools
            for segment in pool.segments.values()
            if segment.id in table.adopting
        )
        held = sum((pool.granted + pool.quarantined + pool.leased) * pool.slot_bytes for pool in pools) - adopting
        same(f"tenant {tenant.name}: bytes held", tenant.held_bytes, held)


def times(store: "Store") -> None:
    """Marks against the times at which they end."""
    table, tree = store.table, store.tree
    marked = {row * 4 + mark for row in range(len(table)) for mark in (PINNED, HINTED) if table.marks[row] & mark}
    same("rows with an end", set(tree.until), marked)
    waiting = {*tree.untils, *tree.untils_before}
    for code, at in tree.until.items():
        assert (at, code) in waiting, f"row {code // 4}: its mark {code % 4} never ends"


def index(store: "Store", published: Mapping[tuple[int, bytes], Published]) -> None:
    """Exactly the sealed blocks are visible, each where it lies."""
    table = store.table
    found: dict[tuple[int, bytes], Published] = {}
    for tenant in store.tenants.values():
        for key, row in tenant.rows.items():
            namespace, ref = store.namespaces[table.namespace[row] - 1], table.place[row]
            offset = (ref & 0xFFFFFFFF) * store.tree.pool_of(row).slot_bytes
            found[tenant.id, key] = (ref, offset, namespace.block_bytes, namespace.id)
            assert offset + namespace.block_bytes <= store.segments.live[ref >> 32].size_bytes, f"row {row} sticks out"
    for place in published.keys() | found.keys():
        same(f"what readers see of {place[1].hex()[:12]}", published.get(place), found.get(place))
