"""Everything against everything: what must be true between any two calls of the store.

Each total is computed again from what it counts, and each link is followed both ways.
Runs after every step of the tests, and once when a daemon takes over another's memory.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.core.block import HINTED, NONE, PINNED, State
from kvstore.core.evict import INNER, LEAF, ORPHAN, OUT
from kvstore.core.segments import BLOCK, FREE, GRANTED, QUARANTINED, Pool, Segment

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


def column(values: Any) -> "NDArray[Any]":
    """A copy of a column: what is looked at in place could not grow as long as an error is."""
    return np.frombuffer(bytes(values), "u1" if isinstance(values, bytearray) else values.typecode)


def agree(what: str, right: "NDArray[np.bool_]", named: "NDArray[np.int64] | None" = None) -> None:
    """Many comparisons; the message names the first that fails."""
    if not right.all():
        first = int(np.flatnonzero(~right)[0])
        raise AssertionError(f"{what}: wrong of {first if named is None else int(named[first])}")


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
    state, row = column(segment.state), column(segment.row)
    free = np.flatnonzero(state == FREE)
    same(f"{name}: free slots", sorted(segment.free), free.tolist())
    same(f"{name}: open", pool.open.get(segment.id) is segment, bool(len(free)) and not segment.closed)
    blocks = np.flatnonzero(state == BLOCK)
    rows = row[blocks].astype(np.int64)
    agree(f"{name}: row of a slot without a block", np.delete(row, blocks) == NONE)
    agree(f"{name}: a row that there is", (rows >= 0) & (rows < len(table)), blocks)
    agree(f"{name}: place of the row of a slot", column(table.place)[rows] == segment.id << 32 | blocks, blocks)
    agree(f"{name}: row that is a block", np.isin(column(table.state)[rows], (State.SEALED, State.DOOMED)), blocks)
    kept = (column(table.leases)[rows] > 0) | (column(table.marks)[rows] & PINNED > 0)
    held = int(kept.sum()) + int(np.isin(state, (GRANTED, QUARANTINED)).sum())
    same(f"{name}: held", segment.held, held)


def counters(store: "Store", pool: Pool) -> None:
    """One pool's numbers, counted again in its segments."""
    same("pool's key", store.segments.pools.get((pool.tenant, pool.block_bytes)), pool)
    table = store.table
    state, leases, marks = column(table.state), column(table.leases), column(table.marks)
    found: Counter[str] = Counter()
    for number, segment in pool.segments.items():
        assert store.segments.live.get(number) is segment, f"segment {number} of a pool is not live"
        assert segment.pool is pool, f"segment {number} is in another pool"
        states = segment.state
        if not segment.closed:
            found["slots"] += len(states)
            found["free"] += states.count(FREE)
        found["granted"] += states.count(GRANTED)
        found["quarantined"] += states.count(QUARANTINED)
        row = column(segment.row)
        row = row[row != NONE]
        doomed = int((state[row] == State.DOOMED).sum())
        found["doomed"] += doomed
        found["blocks"] += len(row) - doomed
        found["leased"] += int((leases[row] > 0).sum())
        found["pinned"] += int((marks[row] & PINNED > 0).sum())
    for counter in POOL_COUNTERS:
        same(f"pool of {pool.block_bytes} bytes: {counter}", getattr(pool, counter), found[counter])
    assert pool.open.keys() <= pool.segments.keys(), "an open segment is not of the pool"


def rows(store: "Store") -> None:
    """Every row: its state against its key, slot, namespace and holds."""
    table, every = store.table, np.arange(len(store.table))
    state, marks, leases = column(table.state), column(table.marks), column(table.leases)
    keyed = np.fromiter((key is not None for key in table.key), bool, len(table))
    free = set(table.free)
    same("free rows, each once", len(table.free), len(free))
    agree("row free", np.isin(every, list(free)) == (state == State.GONE))
    heads = [head for pool in store.segments.pools.values() for head in pool.order.heads if head != NONE]
    agree("row is a list head", np.isin(every, heads) == (state == State.LIST))
    sealed, doomed, stands_in = state == State.SEALED, state == State.DOOMED, state == State.MISSING
    empty = ~(sealed | doomed)
    agree("row without a block: marks, leases", (marks == 0) & (leases == 0) | ~empty)
    agree("row: key", keyed == (sealed | stands_in))
    agree("row: marks of a doomed block", (marks == 0) | ~doomed)
    agree("row that is doomed is leased", (leases > 0) | ~doomed)
    agree("row: leases", leases == _leases(store))
    blocks = np.flatnonzero(~empty)
    agree("row lies in its pool", _pool_of_rows(store, blocks) == _pool_of_namespaces(store, blocks), blocks)
    namespace = column(table.namespace)[sealed]
    counted = np.bincount(namespace, minlength=len(store.namespaces) + 1)
    pinned = np.bincount(namespace, marks[sealed] & PINNED > 0, minlength=len(store.namespaces) + 1)
    for space in store.namespaces:
        same(f"namespace {space.id}: blocks", space.blocks, int(counted[space.id]))
        same(f"namespace {space.id}: pinned", space.pinned, int(pinned[space.id]))
    for tenant in store.tenants.values():
        same(f"tenant {tenant.name}: keys", len(tenant.rows), sum(n.blocks for n in tenant.namespaces.values()))
        leads = np.fromiter(tenant.rows.values(), np.int64, len(tenant.rows))
        agree(f"tenant {tenant.name}: a key leads to a block", sealed[leads], leads)
        of = {space.id for space in tenant.namespaces.values()}
        agree("row: its tenant", np.isin(column(table.namespace)[leads], list(of)), leads)
        for key, row in zip(tenant.rows, map(table.key.__getitem__, leads.tolist()), strict=True):
            assert key == row, f"tenant {tenant.name}: key {key.hex()[:12]} leads to the row of another"


def _leases(store: "Store") -> "NDArray[np.int64]":
    """Of each row, how many holds sessions have on what lies in its slot."""
    found = np.zeros(len(store.table), np.int64)
    for session in store.sessions.values():
        for ref, count in session.leased.items():
            assert count > 0, f"session {session.id} leases slot {ref:#x} {count} times"
            segment, number = store.segments.at(ref)
            row = segment.row[number]
            assert row != NONE, f"session {session.id} leases slot {ref:#x}, which has no block"
            found[row] += count
    return found


def _pool_of_rows(store: "Store", blocks: "NDArray[np.int64]") -> "NDArray[np.int64]":
    """By the segment that each lies in, where the slot says the same: a number of the pool."""
    number = {pool: n for n, pool in enumerate(store.segments.pools.values())}
    place = column(store.table.place)[blocks]
    ids, which = np.unique(place >> np.uint64(32), return_inverse=True)
    pools = np.empty(len(ids), np.int64)
    for n, segment_id in enumerate(ids.tolist()):
        segment = store.segments.live[segment_id]
        assert segment.pool is not None, f"segment {segment_id} has blocks and no pool"
        pools[n] = number[segment.pool]
        here = np.flatnonzero(which == n)
        slots = (place[here] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        agree(f"segment {segment_id}: what the slot of a row says", column(segment.row)[slots] == blocks[here], slots)
    found: NDArray[np.int64] = pools[which]
    return found


def _pool_of_namespaces(store: "Store", blocks: "NDArray[np.int64]") -> "NDArray[np.int64]":
    """The same, by the namespace that each is of."""
    number = {key: n for n, key in enumerate(store.segments.pools)}
    of = [-1, *(number.get((space.tenant.id, space.block_bytes), -1) for space in store.namespaces)]
    found: NDArray[np.int64] = np.array(of, np.int64)[column(store.table.namespace)[blocks]]
    return found


def links(store: "Store") -> None:
    """The prefix tree, from children to parents and from parents to children, and that it is one."""
    table, every = store.table, np.arange(len(store.table))
    state, depth = column(table.state), column(table.depth)
    parent, child = column(table.parent).astype(np.int64), column(table.child).astype(np.int64)
    after, before = column(table.sibling).astype(np.int64), column(table.sibling_before).astype(np.int64)
    unlinked = (parent == NONE) & (after == NONE) & (before == NONE)
    agree("row: links of what is not in the tree", unlinked | (state == State.SEALED))
    hangs = np.flatnonzero(parent != NONE)
    above = parent[hangs]
    agree("row hangs from a parent", np.isin(state[above], (State.SEALED, State.MISSING)), hangs)
    agree("row is deeper than what it hangs from", depth[hangs] > depth[above], hangs)
    agree("row without a parent has no siblings", (after == NONE) & (before == NONE) | (parent != NONE))
    for one, back in ((after, before), (before, after)):
        linked = np.flatnonzero(one != NONE)
        agree("row and its sibling: links", back[one[linked]] == linked, linked)
        agree("row and its sibling: parent", parent[one[linked]] == parent[linked], linked)
    firsts = np.flatnonzero((parent != NONE) & (before == NONE))
    agree("row that is the first child", child[parent[firsts]] == firsts, firsts)
    parents = np.flatnonzero(child != NONE)
    agree("row: its first child", (parent[child[parents]] == parents) & (before[child[parents]] == NONE), parents)
    # Each parent has one first child and each child one before it: what none of them leads to goes in a circle.
    ends, left = np.where(after == NONE, every, after), len(table)
    while left:
        ends, left = ends[ends], left >> 1
    agree("row is of a list of siblings that ends", after[ends] == NONE)


def lists(store: "Store") -> None:
    """Each block is in the one list where it belongs; only held ones may be in none, and unsettled ones elsewhere."""
    table = store.table
    seen = np.full(len(table), OUT, np.uint8)
    for n, pool in enumerate(store.segments.pools.values()):
        for which in (LEAF, INNER, ORPHAN):
            found = np.array(store.policy.walk(pool.order, which), np.int64)
            same(f"pool of {pool.block_bytes} bytes: length of list {which}", pool.order.listed[which], len(found))
            agree("row is in one list", seen[found] == OUT, found)
            agree("row is in a list of its pool", _pool_of_rows(store, found) == n, found)
            seen[found] = which
    state, parent, child = column(table.state), column(table.parent), column(table.child)
    sealed = state == State.SEALED
    agree("row that is listed is a block", sealed | (seen == OUT))
    by_child = np.where(child == NONE, LEAF, INNER).astype(np.uint8)
    orphan = (parent != NONE) & (state[parent] == State.MISSING)
    place = np.where(orphan, ORPHAN, by_child)
    unsettled = np.zeros(len(table), bool)
    unsettled[list(_unsettled(store))] = True
    agree_so_far = (seen == place) | unsettled & ((seen == ORPHAN) | (seen == by_child))
    held = (column(table.leases) > 0) | (column(table.marks) & PINNED > 0)
    agree("row: list", agree_so_far | held & (seen == OUT) | ~sealed)
    agree("row: listed", (column(table.listed) == seen) | ~sealed)


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
    standing = set(np.flatnonzero(column(table.state) == State.MISSING).tolist())
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
    for segment in table.live.values():
        if segment.id in table.adopting:
            continue
        taken = np.flatnonzero(np.isin(column(segment.state), (GRANTED, QUARANTINED))).tolist()
        unheld = [number for number in taken if segment.id << 32 | number not in states]
        assert not unheld, f"slots of segment {segment.id} granted to nobody: {unheld}"
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
    marks = column(table.marks)
    marked = {row * 4 + mark for mark in (PINNED, HINTED) for row in np.flatnonzero(marks & mark).tolist()}
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
