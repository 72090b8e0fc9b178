"""Evictions that an administrator asks for: named blocks, a namespace, so many bytes, everything.

What is held (a lease, a pin) stays and is counted. Each function is one bounded step that
leaves every invariant true; whoever calls it again for the rest gives the loop a turn in
between, and blocks that are committed meanwhile may or may not go.

With an SSD: in one tier alone, by its store, or everywhere (`Both`). Everywhere, a block that is
held stays in both; what only moves (is being written or loaded) is not held, and its move
comes to nothing, so that what is gone does not come back.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from kvstore.core.block import NONE, PINNED, SEALED
from kvstore.core.carrier import Carrier
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.link import Link
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
    ssd_blocks: int = 0
    """Copies that were dropped from the SSD; `blocks` are those of memory."""
    ssd_bytes: int = 0
    gpu_blocks: int = 0
    """The same from devices."""
    gpu_bytes: int = 0

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
    table = store.table
    if table.held(row):
        _keep(store, row, done, leased=table.leases[row] > 0)
    else:
        _drop(store, row, done)


def _keep(store: Store, row: int, done: Reclaimed, *, leased: bool) -> None:
    done.keep(store.tree.pool_of(row).slot_bytes, pinned=store.table.marks[row] & PINNED > 0, leased=leased)


def _drop(store: Store, row: int, done: Reclaimed) -> None:
    done.blocks += 1
    done.size_bytes += store.tree.pool_of(row).slot_bytes
    store.counts.evicted_asked += 1
    store.tree.drop(row)


Step = Callable[[int, int, Reclaimed], int | None]
"""From which row, how many; answers where to go on, None at the end."""


class Tiers(Protocol):
    """Where blocks are dropped: in one tier, or in several. Tenants and namespaces are memory's."""

    from_ssd: bool
    """Whether something may go from the SSD."""

    def keys_step(self, tenant: Tenant, keys: Sequence[bytes], done: Reclaimed) -> None: ...
    def rows_steps(self, tenant: Tenant | None, namespace: Namespace | None) -> Sequence[Step]:
        """Walks to be made one after another."""

    def bytes_step(self, tenant: Tenant | None, size_bytes: int, blocks_max: int, done: Reclaimed) -> bool: ...
    def sums(self, done: Reclaimed) -> Reclaimed:
        """What all steps together have done, by tier."""


class InMemory:
    """Memory alone: what other tiers have stays there."""

    from_ssd = False

    def __init__(self, store: Store) -> None:
        self._store = store

    def keys_step(self, tenant: Tenant, keys: Sequence[bytes], done: Reclaimed) -> None:
        keys_step(self._store, tenant, keys, done)

    def rows_steps(self, tenant: Tenant | None, namespace: Namespace | None) -> Sequence[Step]:
        return [partial(rows_step, self._store, tenant, namespace)]

    def bytes_step(self, tenant: Tenant | None, size_bytes: int, blocks_max: int, done: Reclaimed) -> bool:
        return bytes_step(self._store, tenant, size_bytes, blocks_max, done)

    def sums(self, done: Reclaimed) -> Reclaimed:
        return done


class OnSsd:
    """The SSD alone: what memory has stays there. A copy that is being read counts as leased."""

    from_ssd = True

    def __init__(self, link: Link) -> None:
        self._link = link

    def keys_step(self, tenant: Tenant, keys: Sequence[bytes], done: Reclaimed) -> None:
        of = self._link.joined.disk_tenants.get(tenant.id)
        if of is None:
            done.absent += len(keys)
        else:
            keys_step(self._link.disk, of, keys, done)

    def rows_steps(self, tenant: Tenant | None, namespace: Namespace | None) -> Sequence[Step]:
        joined = self._link.joined
        of = joined.disk_tenants.get(tenant.id) if tenant is not None else None
        only = joined.disk_of.get(namespace.id) if namespace is not None else None
        if (tenant is not None and of is None) or (namespace is not None and only is None):
            return []  # nothing of it was ever on the SSD
        return [partial(rows_step, self._link.disk, of, only)]

    def bytes_step(self, tenant: Tenant | None, size_bytes: int, blocks_max: int, done: Reclaimed) -> bool:
        of = self._link.joined.disk_tenants.get(tenant.id) if tenant is not None else None
        if tenant is not None and of is None:
            return False
        return bytes_step(self._link.disk, of, size_bytes, blocks_max, done)

    def sums(self, done: Reclaimed) -> Reclaimed:
        return replace(done, blocks=0, size_bytes=0, ssd_blocks=done.blocks, ssd_bytes=done.size_bytes)


class Both:
    """Memory and the SSD at once: each block goes from both, or stays in both."""

    from_ssd = True

    def __init__(self, link: Link) -> None:
        self._link = link

    def keys_step(self, tenant: Tenant, keys: Sequence[bytes], done: Reclaimed) -> None:
        on_disk = self._link.joined.disk_tenants.get(tenant.id)
        for key in keys:
            row = tenant.rows.get(key, NONE)
            disk_row = on_disk.rows.get(key, NONE) if on_disk is not None else NONE
            if row == NONE and disk_row == NONE:
                done.absent += 1
            else:
                self._drop(row, disk_row, done)

    def rows_steps(self, tenant: Tenant | None, namespace: Namespace | None) -> Sequence[Step]:
        return [partial(self._memory_step, tenant, namespace), partial(self._disk_step, tenant, namespace)]

    def bytes_step(self, tenant: Tenant | None, size_bytes: int, blocks_max: int, done: Reclaimed) -> bool:
        """Bytes are freed where they are short: in memory, until a caller names the SSD."""
        return bytes_step(self._link.memory, tenant, size_bytes, blocks_max, done)

    def sums(self, done: Reclaimed) -> Reclaimed:
        return done

    def _memory_step(
        self, tenant: Tenant | None, namespace: Namespace | None, start: int, rows_max: int, done: Reclaimed
    ) -> int | None:
        memory, link = self._link.memory, self._link
        table, stop = memory.table, min(start + rows_max, len(memory.table))
        for row in range(start, stop):
            if table.state[row] != SEALED:
                continue
            owner = memory.namespaces[table.namespace[row] - 1]
            if namespace in (None, owner) and tenant in (None, owner.tenant):
                self._drop(row, link.disk_row((owner.id, table.key[row] or b"")), done)
        return stop if stop < len(table) else None

    def _disk_step(
        self, tenant: Tenant | None, namespace: Namespace | None, start: int, rows_max: int, done: Reclaimed
    ) -> int | None:
        """What only the SSD has; what memory has as well has been met there, and stays."""
        disk, link = self._link.disk, self._link
        table, stop = disk.table, min(start + rows_max, len(disk.table))
        for row in range(start, stop):
            if table.state[row] != SEALED:
                continue
            owner = link.joined.memory_of[table.namespace[row]]
            if namespace not in (None, owner) or tenant not in (None, owner.tenant):
                continue
            if link.memory_row((owner.id, table.key[row] or b"")) == NONE:
                self._drop(NONE, row, done)
        return stop if stop < len(table) else None

    def _drop(self, row: int, disk_row: int, done: Reclaimed) -> None:
        """One block; NONE in a tier that does not have it."""
        memory, disk = self._link.memory, self._link.disk
        leased = row != NONE and _leases(memory, self._link.on_memory, row) > 0
        if row != NONE and (leased or memory.table.marks[row] & PINNED):
            _keep(memory, row, done, leased=leased)
            return
        if disk_row != NONE and disk.table.marks[disk_row] & PINNED:
            _keep(disk, disk_row, done, leased=False)
            return
        if row != NONE:
            _drop(memory, row, done)
        if disk_row != NONE:
            on_disk = Reclaimed()
            _drop(disk, disk_row, on_disk)
            done.ssd_blocks += on_disk.blocks
            done.ssd_bytes += on_disk.size_bytes


def _leases(store: Store, carrier: Carrier, row: int) -> int:
    """Leases of a block but for those of what moves it."""
    tenant = store.namespaces[store.table.namespace[row] - 1].tenant
    return store.table.leases[row] - carrier.holds(tenant, store.table.place[row])
