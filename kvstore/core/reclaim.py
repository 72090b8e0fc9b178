"""Evictions that an administrator asks for: named blocks, a namespace, so many bytes, everything.

What is held (a lease, a pin) stays and is counted. Each function is one bounded step that
leaves every invariant true; whoever calls it again for the rest gives the loop a turn in
between, and blocks that are committed meanwhile may or may not go.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.core.block import NONE, PINNED, SEALED
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.segments import Pool
from kvstore.core.store import Store

INFINITY = float("inf")


@dataclass
class Reclaimed:
    """What the steps of one request have done so far."""

    blocks: int = 0
    size_bytes: int = 0
    """Of the slots that were freed."""
    held: int = 0
    """Blocks that were asked for and stay, for a lease or a pin."""
    held_bytes: int = 0
    """Of their slots. Of the two below, too: why they stay, one reason or both."""
    pinned: int = 0
    pinned_bytes: int = 0
    leased: int = 0
    leased_bytes: int = 0
    absent: int = 0
    """Keys that are not here."""

    def keep(self, slot_bytes: int, *, pinned: bool, leased: bool) -> None:
        """One block stays."""
        self.held += 1
        self.held_bytes += slot_bytes
        self.pinned += pinned
        self.pinned_bytes += pinned * slot_bytes
        self.leased += leased
        self.leased_bytes += leased * slot_bytes

    def keep_all(self, pool: Pool) -> None:
        """What is left of this pool stays."""
        self.held += pool.blocks
        self.held_bytes += pool.blocks * pool.slot_bytes
        self.pinned += pool.pinned
        self.pinned_bytes += pool.pinned * pool.slot_bytes
        leased = pool.leased - pool.doomed  # a doomed block is leased, and dropped already
        self.leased += leased
        self.leased_bytes += leased * pool.slot_bytes


def keys_step(store: Store, tenant: Tenant, keys: Sequence[bytes], done: Reclaimed) -> None:
    """Drops the blocks of these keys, whatever their namespace."""
    for key in keys:
        row = tenant.rows.get(key)
        if row is None:
            done.absent += 1
        else:
            _drop_unheld(store, row, done)


def rows_step(
    store: Store, tenant: Tenant | None, namespace: Namespace | None, start: int, rows_max: int, done: Reclaimed
) -> int | None:
    """Drops what a namespace, a tenant or (neither) everybody has among `rows_max` rows from `start`.

    Answers where to go on, None at the end.
    """
    table, namespaces = store.table, store.namespaces
    stop = min(start + rows_max, len(table))
    for row in range(start, stop):
        if table.state[row] != SEALED:
            continue
        owner = namespaces[table.namespace[row] - 1]
        if namespace in (None, owner) and tenant in (None, owner.tenant):
            _drop_unheld(store, row, done)
    return stop if stop < len(table) else None


def bytes_step(store: Store, tenant: Tenant | None, size_bytes: int, blocks_max: int, done: Reclaimed) -> bool:
    """Drops at most `blocks_max` blocks towards `size_bytes`, in the policy's order, the oldest of all pools first.

    True while more is to be done. At the end `done.held` is what is left where the bytes were not to be had.
    """
    policy = store.policy
    pools = list(_pools(store, tenant))
    order = [(policy.oldest_use(pool.order), at) for at, pool in enumerate(pools)]
    heapq.heapify(order)
    for _ in range(blocks_max):
        if done.size_bytes >= size_bytes:
            return False
        if not order or order[0][0] == INFINITY:
            for pool in pools:
                done.keep_all(pool)
            return False
        at = order[0][1]
        row = policy.victim(pools[at].order)
        if row == NONE:
            return True  # as many held blocks were passed over as one look may; the next goes on from there
        _drop_unheld(store, row, done)
        heapq.heapreplace(order, (policy.oldest_use(pools[at].order), at))
    return done.size_bytes < size_bytes


def _pools(store: Store, tenant: Tenant | None) -> Iterator[Pool]:
    """Pools that have memory: at most as many as there are segments, however many block sizes are known."""
    for pool in {segment.pool: None for segment in store.segments.live.values()}:
        if pool is not None and pool.blocks and (tenant is None or pool.tenant == tenant.id):
            yield pool


def _drop_unheld(store: Store, row: int, done: Reclaimed) -> None:
    table, slot_bytes = store.table, store.tree.pool_of(row).slot_bytes
    if table.held(row):
        done.keep(slot_bytes, pinned=table.marks[row] & PINNED > 0, leased=table.leases[row] > 0)
        return
    done.blocks += 1
    done.size_bytes += slot_bytes
    store.counts.evicted_asked += 1
    store.tree.drop(row)
