"""One published entry a block, whichever tiers have it: what the stores of a node say of it, joined.

Memory's store, the SSD's and those of devices each publish and withdraw as if they were alone.
An entry's bytes in the slab change (and with them its sequence number) only with memory's; what
comes to another tier or goes from it changes flags alone, so no reader is disturbed by a copy.

A device has an index of its own besides, with places in its memory: whoever finds GPU here looks
for the place there. A block that only a device has is an entry without a place, as is one that
only the SSD has.
"""

from collections.abc import Callable
from typing import Protocol

from kvstore.core.block import NONE, BlockTable
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.tree import IndexPort, Numbers
from kvstored.v1.shm import GPU, HOST, SSD


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

    Numbers of tenants and namespaces in the index are memory's: a namespace of the SSD's, or of a
    device's, is paired with one of memory's before anything of it is stored.
    """

    def __init__(self, index: TieredIndex) -> None:
        self.index = index
        self.host = HostSide(self)
        self.ssd = SsdSide(self)
        self.devices: list[DeviceSide] = []
        self.disk_of: dict[int, Namespace] = {}
        """Number of a namespace of memory's store -> the same of the SSD's."""
        self.memory_of: dict[int, Namespace] = {}
        """And back."""
        self.disk_tenants: dict[int, Tenant] = {}
        """Number of a tenant of memory's store -> the same of the SSD's."""
        self.memory_tenants: dict[int, Tenant] = {}
        """And back."""
        self.host_tenants: dict[int, Tenant] = {}
        """Those of memory's store that have a namespace here, or on a device, by number."""
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

    def keeps(self, memory: Namespace) -> bool:
        """Whether another tier has that namespace, or has had it since the daemon started."""
        return memory.id in self.disk_of or any(memory.id in side.device_of for side in self.devices)

    def disk_row(self, tenant: int, key: bytes) -> int:
        """The row of the SSD's copy; NONE where there is none."""
        found = self.disk_tenants.get(tenant)
        return NONE if found is None else found.rows.get(key, NONE)

    def ssd_flag(self, tenant: int, key: bytes) -> int:
        """SSD where that has a copy; else 0."""
        return SSD if self.disk_row(tenant, key) != NONE else 0

    def gpu_flag(self, tenant: int, key: bytes, besides: "DeviceSide | None" = None) -> int:
        """GPU where a device, `besides` that one, has a copy; else 0."""
        for side in self.devices:
            if side is not besides and side.row(tenant, key) != NONE:
                return GPU
        return 0

    def below_host(self, tenant: int, key: bytes) -> tuple[int, Namespace | None]:
        """Flags of the tiers besides memory that have a block, and its namespace as memory has it."""
        flags, namespace = 0, None
        row = self.disk_row(tenant, key)
        if row != NONE:
            flags, namespace = SSD, self.memory_of[self.table.namespace[row]]
        for side in self.devices:
            row = side.row(tenant, key)
            if row != NONE:
                flags, namespace = flags | GPU, side.memory_of[side.table.namespace[row]]
        return flags, namespace


class HostSide:
    """Where memory's store publishes."""

    def __init__(self, joined: Joined) -> None:
        self._joined = joined

    def publish(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int) -> None:
        joined = self._joined
        flags, _ = joined.below_host(tenant, key)
        if not flags:
            joined.index.publish(tenant, key, ref, offset, length, namespace, HOST)
        else:
            joined.index.move(tenant, key, ref, offset, length, namespace, HOST | flags)

    def fill(
        self, tenant: int, keys: list[bytes], refs: Numbers, offsets: Numbers, lengths: Numbers, namespaces: Numbers
    ) -> None:
        assert tenant not in self._joined.host_tenants, "the blocks of other tiers come after memory's"
        self._joined.index.fill(tenant, keys, refs, offsets, lengths, namespaces)

    def withdraw(self, tenant: int, key: bytes) -> None:
        joined = self._joined
        flags, namespace = joined.below_host(tenant, key)
        if namespace is None:
            joined.index.withdraw(tenant, key)
        else:
            joined.index.move(tenant, key, 0, 0, namespace.block_bytes, namespace.id, flags)
        here = joined.host_tenants.get(tenant)
        if here is not None:
            row = here.rows[key]
            joined.left_host(key, row)
            for side in joined.devices:
                side.left_host(key, row)


class SsdSide:
    """Where the SSD's store publishes; its numbers of tenants and namespaces are its own."""

    def __init__(self, joined: Joined) -> None:
        self._joined = joined

    def publish(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int) -> None:
        joined = self._joined
        memory = joined.memory_of[namespace]
        others = _host_flag(memory.tenant, key) | joined.gpu_flag(memory.tenant.id, key)
        if others:
            joined.index.flag(memory.tenant.id, key, others | SSD)
        else:
            joined.index.publish(memory.tenant.id, key, 0, 0, length, memory.id, SSD)

    def fill(
        self, tenant: int, keys: list[bytes], refs: Numbers, offsets: Numbers, lengths: Numbers, namespaces: Numbers
    ) -> None:
        raise AssertionError("the SSD's blocks come one by one")

    def withdraw(self, tenant: int, key: bytes) -> None:
        joined = self._joined
        memory = joined.memory_tenants[tenant]
        others = _host_flag(memory, key) | joined.gpu_flag(memory.id, key)
        if others:
            joined.index.flag(memory.id, key, others)
        else:
            joined.index.withdraw(memory.id, key)
        joined.left_disk(key, joined.disk_tenants[memory.id].rows[key])


class DeviceSide:
    """Where a device's store publishes: to the index of that device, and one flag to the node's.

    Its numbers of tenants and namespaces are its own; in both indexes they are memory's. A block
    is in the device's index before the node's says GPU, and leaves it after that is taken back.
    """

    def __init__(self, joined: Joined, index: IndexPort) -> None:
        self._joined = joined
        self._index = index
        self.device_of: dict[int, Namespace] = {}
        """Number of a namespace of memory's store -> the same of this device's."""
        self.memory_of: dict[int, Namespace] = {}
        """And back."""
        self.device_tenants: dict[int, Tenant] = {}
        """Number of a tenant of memory's store -> the same of this device's."""
        self.memory_tenants: dict[int, Tenant] = {}
        """And back."""
        self.table: BlockTable
        """The device's; its store needs this port before it is there."""
        self.left_host: Callable[[bytes, int], None] = lambda key, row: None
        self.left_device: Callable[[bytes, int], None] = lambda key, row: None
        """Told what goes from memory and from here, with its row there, before it is gone."""
        joined.devices.append(self)

    def pair(self, memory: Namespace, device: Namespace) -> None:
        """These are one namespace."""
        self.device_of[memory.id], self.memory_of[device.id] = device, memory
        self.device_tenants[memory.tenant.id], self.memory_tenants[device.tenant.id] = device.tenant, memory.tenant
        self._joined.host_tenants[memory.tenant.id] = memory.tenant

    def row(self, tenant: int, key: bytes) -> int:
        """The row of this device's copy, by memory's number of the tenant; NONE where there is none."""
        found = self.device_tenants.get(tenant)
        return NONE if found is None else found.rows.get(key, NONE)

    def publish(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int) -> None:
        joined, memory = self._joined, self.memory_of[namespace]
        number = memory.tenant.id
        self._index.publish(number, key, ref, offset, length, memory.id)
        if joined.gpu_flag(number, key, besides=self):
            return
        others = _host_flag(memory.tenant, key) | joined.ssd_flag(number, key)
        if others:
            joined.index.flag(number, key, others | GPU)
        else:
            joined.index.publish(number, key, 0, 0, length, memory.id, GPU)

    def fill(
        self, tenant: int, keys: list[bytes], refs: Numbers, offsets: Numbers, lengths: Numbers, namespaces: Numbers
    ) -> None:
        raise AssertionError("a device's blocks come one by one")

    def withdraw(self, tenant: int, key: bytes) -> None:
        joined, memory = self._joined, self.memory_tenants[tenant]
        if not joined.gpu_flag(memory.id, key, besides=self):
            others = _host_flag(memory, key) | joined.ssd_flag(memory.id, key)
            if others:
                joined.index.flag(memory.id, key, others)
            else:
                joined.index.withdraw(memory.id, key)
        self._index.withdraw(memory.id, key)
        self.left_device(key, self.device_tenants[memory.id].rows[key])


def _host_flag(tenant: Tenant, key: bytes) -> int:
    return HOST if key in tenant.rows else 0
