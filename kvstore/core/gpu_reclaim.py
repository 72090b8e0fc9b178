"""Evictions that an administrator asks for (reclaim.py), where the node has devices.

From devices alone, or everywhere: a block that is held in one tier stays in all of them. What only
moves, between whichever tiers, is not held, and its move comes to nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from kvstore.core.block import NONE, PINNED, SEALED
from kvstore.core.carrier import Carrier
from kvstore.core.gpu_pool import GpuPool
from kvstore.core.gpu_tier import GpuTier
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.link import Block, Link
from kvstore.core.reclaim import Reclaimed, Step, bytes_step, keys_step, rows_step
from kvstore.core.store import Store


class OnDevices:
    """Devices alone: what other tiers have stays there. A copy that is being moved counts as leased."""

    from_ssd = False

    def __init__(self, tier: GpuTier) -> None:
        self._tier = tier

    def keys_step(self, tenant: Tenant, keys: Sequence[bytes], done: Reclaimed) -> None:
        """A key is absent that no device has."""
        absent = done.absent
        for key in keys:
            before, pools = done.absent, self._pools(tenant)
            for pool in pools:
                keys_step(pool.store, pool.link.side.device_tenants[tenant.id], [key], done)
            if done.absent - before == len(pools):
                absent += 1
            done.absent = absent

    def rows_steps(self, tenant: Tenant | None, namespace: Namespace | None) -> Sequence[Step]:
        return [
            partial(rows_step, pool.store, pool.link.side.device_tenants[tenant.id] if tenant else None, of)
            for pool in self._pools(tenant)
            if (of := pool.link.side.device_of.get(namespace.id) if namespace else None) or not namespace
        ]

    def bytes_step(self, tenant: Tenant | None, size_bytes: int, blocks_max: int, done: Reclaimed) -> bool:
        """One device after the other."""
        for pool in self._pools(tenant):
            of = pool.link.side.device_tenants[tenant.id] if tenant else None
            held = replace(done)
            if bytes_step(pool.store, of, size_bytes, blocks_max, done):
                return True
            if done.size_bytes >= size_bytes:
                return False
            _forget_held(done, held)  # what is left of it stays, and is counted once it is known that nobody has more
        for pool in self._pools(tenant):
            bytes_step(pool.store, pool.link.side.device_tenants[tenant.id] if tenant else None, size_bytes, 1, done)
        return False

    def sums(self, done: Reclaimed) -> Reclaimed:
        return replace(done, blocks=0, size_bytes=0, gpu_blocks=done.blocks, gpu_bytes=done.size_bytes)

    def _pools(self, tenant: Tenant | None) -> list[GpuPool]:
        """Those in use that have anything of it."""
        pools = (pool for pool in self._tier.pools.values() if not pool.trouble)
        return [pool for pool in pools if tenant is None or tenant.id in pool.link.side.device_tenants]


def _forget_held(done: Reclaimed, before: Reclaimed) -> None:
    for name in ("held", "held_bytes", "pinned", "pinned_bytes", "leased", "leased_bytes"):
        setattr(done, name, getattr(before, name))


class Everywhere:
    """Devices, memory and the SSD, where there is one: each block goes from all of them, or stays in all."""

    from_ssd = True

    def __init__(self, memory: Store, link: Link | None, tier: GpuTier) -> None:
        self._memory = memory
        self._link = link
        self._tier = tier

    def keys_step(self, tenant: Tenant, keys: Sequence[bytes], done: Reclaimed) -> None:
        for key in keys:
            blocks = dict.fromkeys(self._blocks(tenant, key))
            done.absent += not blocks
            for block in blocks:
                self._evict(block, done)

    def rows_steps(self, tenant: Tenant | None, namespace: Namespace | None) -> Sequence[Step]:
        stores = [self._memory, *([self._link.disk] if self._link else []), *(pool.store for pool in self._pools())]
        return [partial(self._step, at, store, tenant, namespace) for at, store in enumerate(stores)]

    def bytes_step(self, tenant: Tenant | None, size_bytes: int, blocks_max: int, done: Reclaimed) -> bool:
        """Bytes are freed where they are short: in memory, until a caller names another tier."""
        return bytes_step(self._memory, tenant, size_bytes, blocks_max, done)

    def sums(self, done: Reclaimed) -> Reclaimed:
        return done

    def _pools(self) -> list[GpuPool]:
        return [pool for pool in self._tier.pools.values() if not pool.trouble]

    def _step(
        self,
        nth: int,
        store: Store,
        tenant: Tenant | None,
        namespace: Namespace | None,
        start: int,
        rows_max: int,
        done: Reclaimed,
    ) -> int | None:
        """What this store has and none before it: what these have as well has been met there, and went or stays."""
        table, stop = store.table, min(start + rows_max, len(store.table))
        for row in range(start, stop):
            if table.state[row] != SEALED:
                continue
            block = self._block_at(store, row)
            owner = self._memory.namespaces[block[0] - 1]
            if namespace not in (None, owner) or tenant not in (None, owner.tenant):
                continue
            if store is next(self._copies(block))[0]:
                self._evict(block, done)
        return stop if stop < len(table) else None

    def _block_at(self, store: Store, row: int) -> Block:
        key, number = store.table.key[row] or b"", store.table.namespace[row]
        if store is self._memory:
            return number, key
        if self._link is not None and store is self._link.disk:
            return self._link.joined.memory_of[number].id, key
        return next(pool for pool in self._pools() if pool.store is store).link.block_at(row)

    def _blocks(self, tenant: Tenant, key: bytes) -> Iterator[Block]:
        """What has that key, in whichever tier and namespace."""
        if key in tenant.rows:
            yield self._block_at(self._memory, tenant.rows[key])
        on_disk = self._link.joined.disk_tenants.get(tenant.id) if self._link is not None else None
        if self._link is not None and on_disk is not None and key in on_disk.rows:
            yield self._block_at(self._link.disk, on_disk.rows[key])
        for pool in self._pools():
            row = pool.link.side.row(tenant.id, key)
            if row != NONE:
                yield pool.link.block_at(row)

    def _copies(self, block: Block) -> Iterator[tuple[Store, int, list[Carrier] | None]]:
        """Where a block is, memory first: the store, its row, and whose leases are moves (None: all of them)."""
        tenant, key = self._memory.namespaces[block[0] - 1].tenant, block[1]
        row = tenant.rows.get(key, NONE)
        if row != NONE and self._memory.table.namespace[row] == block[0]:
            carriers = [pool.link.on_memory for pool in self._tier.pools.values()]
            yield self._memory, row, [*carriers, *([self._link.on_memory] if self._link is not None else [])]
        row = self._link.disk_row(block) if self._link is not None else NONE
        if self._link is not None and row != NONE:
            yield self._link.disk, row, None
        for pool in self._pools():
            row = pool.link.device_row(block)
            if row != NONE:
                yield pool.store, row, [pool.link.on_device]

    def _evict(self, block: Block, done: Reclaimed) -> None:
        copies = list(self._copies(block))
        for store, row, carriers in copies:
            leased = carriers is not None and _leases(store, carriers, row) > 0
            pinned = bool(store.table.marks[row] & PINNED)
            if leased or pinned:
                done.keep(store.tree.pool_of(row).slot_bytes, pinned=pinned, leased=leased)
                return
        for store, row, _ in copies:
            slot_bytes = store.tree.pool_of(row).slot_bytes
            store.counts.evicted_asked += 1
            store.tree.drop(row)
            if store is self._memory:
                done.blocks, done.size_bytes = done.blocks + 1, done.size_bytes + slot_bytes
            elif self._link is not None and store is self._link.disk:
                done.ssd_blocks, done.ssd_bytes = done.ssd_blocks + 1, done.ssd_bytes + slot_bytes
            else:
                done.gpu_blocks, done.gpu_bytes = done.gpu_blocks + 1, done.gpu_bytes + slot_bytes


def _leases(store: Store, carriers: Sequence[Carrier], row: int) -> int:
    """Leases of a block but for those of what moves it."""
    tenant = store.namespaces[store.table.namespace[row] - 1].tenant
    place = store.table.place[row]
    return store.table.leases[row] - sum(carrier.holds(tenant, place) for carrier in carriers)
