"""One published entry a block, whichever tiers have it: what two stores say of it, joined.

Memory's store and the SSD's each publish and withdraw as if they were alone. An entry's bytes
in the slab change (and with them its sequence number) only with memory's; the SSD's coming and
going changes flags alone, so no reader is disturbed by a write-back.
"""

from collections.abc import Callable
from typing import Protocol

from kvstore.core.block import NONE, BlockTable
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.tree import Numbers
from kvstored.v1.shm import HOST, SSD


class TieredIndex(Protocol):
    """The shared-memory indexes, or a dict in tests."""

    def publish(
        self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int, flags: int = HOST
    ) -> None:
        """Readers may find the block from now on; in memory only if `flags` has HOST."""

    def fill(
        self, tenant: int, keys: list[bytes], refs: Numbers, offsets: Numbers, lengths: Numbers, namespaces: Numbers
    ) -> None:
        """Publishes many of a tenant that has none, all of them in memory alone."""

    def withdraw(self, tenant: int, key: bytes) -> None:
        """No reader may find the block from now on, or count a copy that is not finished."""

    def move(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int, flags: int) -> None:
        """The bytes of a published block came to, or left, memory: no copy that is not finished counts."""

    def flag(self, tenant: int, key: bytes, flags: int) -> None:
        """Another tier has got, or lost, a copy; the bytes in memory stay where they are."""

    def set_below(self, out: bool) -> None:
        """Whether what only the SSD has cannot be read for now: readers are not to count on it."""


class Joined:
    """Which namespace of one store is which of the other, and what the index says of a block.

    Numbers of tenants and namespaces in the index are memory's: a namespace of the SSD's is
    paired with one of memory's before anything of it is stored.
    """

    def __init__(self, index: TieredIndex) -> None:
        self.index = index
        self.host = HostSide(self)
        self.ssd = SsdSide(self)
        self.disk_of: dict[int, Namespace] = {}
        """Number of a namespace of memory's store -> the same of the SSD's."""
        self.memory_of: dict[int, Namespace] = {}
        """And back."""
        self.disk_tenants: dict[int, Tenant] = {}
        """Number of a tenant of memory's store -> the same of the SSD's."""
        self.memory_tenants: dict[int, Tenant] = {}
        """And back."""
        self.host_tenants: dict[int, Tenant] = {}
        """Those of memory's store that have a namespace here, by number."""
        self.table: BlockTable
        """The SSD's; its store needs the ports above before it is there."""
        self.left_host: Callable[[bytes, int], None] = lambda key, row: None
        self.left_disk: Callable[[bytes, int], None] = lambda key, row: None
        """Told what goes, with its row, before it is gone."""

    def pair(self, memory: Namespace, disk: Namespace) -> None:
        """These are one namespace."""
        self.disk_of[memory.id], self.memory_of[disk.id] = disk, memory
        self.disk_tenants[memory.tenant.id], self.memory_tenants[disk.tenant.id] = disk.tenant, memory.tenant
        self.host_tenants[memory.tenant.id] = memory.tenant

    def disk_row(self, tenant: int, key: bytes) -> int:
        """The row of the SSD's copy; NONE where there is none."""
        found = self.disk_tenants.get(tenant)
        return NONE if found is None else found.rows.get(key, NONE)


class HostSide:
    """Where memory's store publishes."""

    def __init__(self, joined: Joined) -> None:
        self._joined = joined

    def publish(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int) -> None:
        joined = self._joined
        if joined.disk_row(tenant, key) == NONE:
            joined.index.publish(tenant, key, ref, offset, length, namespace, HOST)
        else:
            joined.index.move(tenant, key, ref, offset, length, namespace, HOST | SSD)

    def fill(
        self, tenant: int, keys: list[bytes], refs: Numbers, offsets: Numbers, lengths: Numbers, namespaces: Numbers
    ) -> None:
        assert tenant not in self._joined.disk_tenants, "the SSD's blocks come after memory's"
        self._joined.index.fill(tenant, keys, refs, offsets, lengths, namespaces)

    def withdraw(self, tenant: int, key: bytes) -> None:
        joined = self._joined
        row = joined.disk_row(tenant, key)
        if row == NONE:
            joined.index.withdraw(tenant, key)
        else:
            namespace = joined.memory_of[joined.table.namespace[row]]
            joined.index.move(tenant, key, 0, 0, namespace.block_bytes, namespace.id, SSD)
        here = joined.host_tenants.get(tenant)
        if here is not None:
            joined.left_host(key, here.rows[key])


class SsdSide:
    """Where the SSD's store publishes; its numbers of tenants and namespaces are its own."""

    def __init__(self, joined: Joined) -> None:
        self._joined = joined

    def publish(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int) -> None:
        joined = self._joined
        memory = joined.memory_of[namespace]
        if key in memory.tenant.rows:
            joined.index.flag(memory.tenant.id, key, HOST | SSD)
        else:
            joined.index.publish(memory.tenant.id, key, 0, 0, length, memory.id, SSD)

    def fill(
        self, tenant: int, keys: list[bytes], refs: Numbers, offsets: Numbers, lengths: Numbers, namespaces: Numbers
    ) -> None:
        raise AssertionError("the SSD's blocks come one by one")

    def withdraw(self, tenant: int, key: bytes) -> None:
        joined = self._joined
        memory = joined.memory_tenants[tenant]
        if key in memory.rows:
            joined.index.flag(memory.id, key, HOST)
        else:
            joined.index.withdraw(memory.id, key)
        joined.left_disk(key, joined.disk_tenants[memory.id].rows[key])
