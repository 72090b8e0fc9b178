"""Blocks of an earlier daemon put into a store that has none, all at once.

What `PrefixTree.seal` does for a block, done for columns: 65,536 blocks take 0.1 s and not 0.6.
The audit (`Store.check`) knows nothing of this module, and runs on what it has made before
anybody is served.

Two things differ from blocks that come one by one, both where what was written down could not be
hung up then either: a block that is no deeper than what it names as its parent hangs from nothing;
and of two blocks with one key the later in the slab stays.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.core.block import HINTED, HITS_MAX, MISSING, NONE, SEALED
from kvstore.core.holds import Tenant
from kvstore.core.segments import BLOCK, GRANTED, Pool
from kvstore.core.store import Store
from kvstored.v1 import KEY_BYTES

FOUND = np.dtype(
    [
        ("ref", "<u8"),
        ("key", "<u8", (4,)),
        ("parent", "<u8", (4,)),
        ("namespace", "<u4"),
        ("depth", "<u4"),
        ("stored", "<f8"),
        ("used", "<f8"),
        ("life", "<f8"),
        ("pin", "<f8"),
        ("hits", "<u8"),
    ]
)
"""A block: slot, key, parent (zeros: none), ..., ends of life and pin (0: none). An empty key is no key."""

Rows = NDArray[Any]


def column(values: Any) -> Rows:
    """A column of the table as an array that writes to it; it cannot grow while that lives."""
    return np.frombuffer(values, "u1" if isinstance(values, bytearray) else values.typecode)


class Rebuild:
    """Fills a store whose segments have all their slots granted, by pool of each segment."""

    def __init__(self, store: Store, pools: dict[int, Pool], now: float) -> None:
        self.store = store
        self._pools = pools
        self._now = now
        self._refused: list[int] = []
        self._first = 0
        """Row of the first block."""

    def fill(self, found: Rows) -> tuple[int, list[int]]:
        """How many came, and the slots of the others."""
        found = self._without_doubles(self._keep(found, self._fits(found)))
        if len(found):
            self._columns(found)
            self._slots(found)
            self._families(found)
            self._marks(found)
            self._order(found)
            self._publish(found)
        return len(found), self._refused

    def _keep(self, found: Rows, which: NDArray[np.bool_]) -> Rows:
        self._refused += found["ref"][~which].tolist()
        return found[which]

    # -- which

    def _pool_numbers(self) -> tuple[dict[Pool, int], NDArray[np.int64]]:
        """A number for each pool, and by number of a namespace that of its pool; -1: none."""
        number = {pool: n for n, pool in enumerate(self.store.segments.pools.values())}
        spaces = [number.get(self.store.pool(namespace), -1) for namespace in self.store.namespaces]
        return number, np.array([-1, *spaces], np.int64)

    def _fits(self, found: Rows) -> NDArray[np.bool_]:
        """A slot that there is, once, in the pool of its namespace; a key; a life that has not ended."""
        number, of_namespace = self._pool_numbers()
        segments = sorted(self._pools)
        if not segments:
            return np.zeros(len(found), bool)
        ids = np.array(segments, np.uint64)
        of_segment = np.array([number[self._pools[segment]] for segment in segments], np.int64)
        slots = np.array([len(self.store.segments.live[segment].state) for segment in segments], np.uint64)
        segment = found["ref"] >> np.uint64(32)
        at = np.minimum(np.searchsorted(ids, segment), len(ids) - 1)
        namespace = np.minimum(found["namespace"], len(of_namespace))
        fits = (ids[at] == segment) & (found["ref"] & np.uint64(0xFFFFFFFF) < slots[at])
        fits &= np.append(of_namespace, -1)[namespace] == of_segment[at]
        fits &= found["key"].any(axis=1) & ~((found["life"] > 0) & (found["life"] <= self._now))
        once = np.zeros(len(found), bool)
        once[np.unique(found["ref"], return_index=True)[1]] = True
        return np.asarray(fits & once)

    def _without_doubles(self, found: Rows) -> Rows:
        """Gives each tenant its keys."""
        store = self.store
        stays = np.ones(len(found), bool)
        for _, which, keys in self._by_tenant(found, "key"):
            last = dict(zip(keys, which, strict=True))
            if len(last) < len(keys):
                stays[which] = [last[key] == row for key, row in zip(keys, which, strict=True)]
        found = self._keep(found, stays)
        self._first = store.table.take_run(len(found))
        for tenant, which, keys in self._by_tenant(found, "key"):
            assert not tenant.rows, f"tenant {tenant.name} has blocks already"
            tenant.rows.update(zip(keys, (which + self._first).tolist(), strict=True))
        return found

    def _by_tenant(self, found: Rows, field: str) -> list[tuple[Tenant, NDArray[np.int64], list[bytes]]]:
        """Each tenant with places in `found`, and that field of them as bytes."""
        of = np.array([-1, *(namespace.tenant.id for namespace in self.store.namespaces)])[found["namespace"]]
        parts = []
        for tenant in self.store.tenants.values():
            which = np.flatnonzero(of == tenant.id)
            if len(which):
                parts.append((tenant, which, split(found[field][which])))
        return parts

    # -- what seal does

    def _columns(self, found: Rows) -> None:
        table, here = self.store.table, slice(self._first, self._first + len(found))
        table.key[here] = split(found["key"])
        column(table.state)[here] = SEALED
        for values, field in ((table.place, "ref"), (table.namespace, "namespace"), (table.stored, "stored")):
            column(values)[here] = found[field]
        column(table.depth)[here] = found["depth"]
        column(table.hits)[here] = np.minimum(found["hits"], HITS_MAX)
        column(table.used)[here] = np.fmin(found["used"], self._now)
        counts = np.bincount(found["namespace"], minlength=len(self.store.namespaces) + 1)
        for namespace, count in zip(self.store.namespaces, counts[1:].tolist(), strict=True):
            namespace.blocks += count

    def _slots(self, found: Rows) -> None:
        segments, numbers = self.store.segments, found["ref"] >> np.uint64(32)
        used = np.fmin(found["used"], self._now)
        order = np.argsort(numbers, kind="stable")
        ids, starts = np.unique(numbers[order], return_index=True)
        for number, which in zip(ids.tolist(), np.split(order, starts[1:]), strict=True):
            segment, pool = segments.live[number], self._pools[number]
            slots = (found["ref"][which] & np.uint64(0xFFFFFFFF)).astype(np.int64)
            states = column(segment.state)
            assert (states[slots] == GRANTED).all(), f"slots of segment {number} are not to be had"
            states[slots] = BLOCK
            column(segment.row)[slots] = which + self._first
            segment.held -= len(which)
            segment.used = float(used[which].max())
            pool.granted -= len(which)
            pool.blocks += len(which)

    def _families(self, found: Rows) -> None:
        """Links to parents that are here, then rows that stand in for those that are not."""
        store, table = self.store, self.store.table
        named = found["parent"].any(axis=1) & (found["parent"] != found["key"]).any(axis=1)
        parent = np.full(len(found), NONE, np.int64)
        awaiting: list[tuple[Tenant, int, bytes]] = []
        for tenant, which, keys in self._by_tenant(found, "parent"):
            rows = np.fromiter((tenant.rows.get(key, NONE) for key in keys), np.int64, len(keys))
            parent[which] = rows
            away = np.flatnonzero(named[which] & (rows == NONE)).tolist()
            awaiting += [(tenant, int(which[at]), keys[at]) for at in away]
        depth = found["depth"].astype(np.int64)
        below = [at for _, at, _ in awaiting]
        depth[below] = np.maximum(depth[below], 1)  # something is above these, which their children have to be below
        column(table.depth)[self._first : self._first + len(found)] = depth
        above = depth[np.maximum(parent - self._first, 0)]
        parent[~named | (depth <= above)] = NONE
        self._hang(parent)
        for tenant, at, key in awaiting:
            store.tree.families.wait_for(tenant, self._first + at, key, int(depth[at]))

    def _hang(self, parent: NDArray[np.int64]) -> None:
        table, children = self.store.table, np.flatnonzero(parent != NONE)
        order = children[np.argsort(parent[children], kind="stable")]
        above, rows = parent[order], order + self._first
        column(table.parent)[rows] = above
        next_of_same = above[1:] == above[:-1]
        column(table.sibling)[rows[:-1][next_of_same]] = rows[1:][next_of_same]
        column(table.sibling_before)[rows[1:][next_of_same]] = rows[:-1][next_of_same]
        if len(rows):
            first = np.append(True, ~next_of_same)
            column(table.child)[above[first]] = rows[first]

    def _marks(self, found: Rows) -> None:
        tree = self.store.tree
        for at in np.flatnonzero(found["life"] > 0).tolist():
            tree.set_until(self._first + at, HINTED, float(found["life"][at]))
        for at in np.flatnonzero(found["pin"] > self._now).tolist():
            tree.pin(self._first + at, float(found["pin"][at]))

    def _order(self, found: Rows) -> None:
        """By last use, what hangs from something after it, as if each block had just been used in turn."""
        table, (number, of_namespace) = self.store.table, self._pool_numbers()
        here = slice(self._first, self._first + len(found))
        used, depth, parent = (np.array(column(c)[here]) for c in (table.used, table.depth, table.parent))
        orphan = (parent != NONE) & (np.array(column(table.state))[parent] == MISSING)
        pools = of_namespace[found["namespace"]]
        order = np.lexsort((-depth.astype(np.int64), used))
        for pool, n in number.items():
            which = order[pools[order] == n]
            if len(which):
                self.store.policy.fill(pool.order, (which + self._first).astype(np.int32), orphan[which])

    def _publish(self, found: Rows) -> None:
        sizes = np.array([(0, 0), *((n.block_bytes, self.store.pool(n).slot_bytes) for n in self.store.namespaces)])
        for tenant, which, keys in self._by_tenant(found, "key"):
            of = found[which]
            lengths, slot_bytes = sizes[of["namespace"]].T
            offsets = (of["ref"] & np.uint64(0xFFFFFFFF)) * slot_bytes.astype(np.uint64)
            self.store.tree.index.fill(tenant.id, keys, of["ref"], offsets, lengths, of["namespace"])


def split(keys: Rows) -> list[bytes]:
    """Each as bytes of its own."""
    found: list[bytes] = np.ascontiguousarray(keys).view(f"V{KEY_BYTES}").ravel().tolist()
    return found
