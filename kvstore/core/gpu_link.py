"""One device's store beside memory's, and what those who copy between the two share.

Blocks are named as memory's store names them, everywhere. Nothing of either store is changed
while it drops a block (the callbacks of `DeviceSide`): holds on what goes are put aside there
and end with the next step (`settle`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.core.block import NONE, SEALED
from kvstore.core.carrier import Carrier
from kvstore.core.gpu_jobs import GpuCounts, GpuJob
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.link import Block
from kvstore.core.movement import Movement
from kvstore.core.schedule import Kind, Scheduler
from kvstore.core.store import Store
from kvstore.core.tiered import DeviceSide, Joined
from kvstore.core.tree import IndexPort
from kvstored.v1.errors import InvalidArgument, KVStoreError, ResourceExhausted

HELD_SHARE = 1 / 8
"""Of a tenant's memory in a tier: blocks that are held because they wait for their copy to be begun."""


class Held:
    """Blocks of one store that are held while they wait: at most HELD_SHARE of a tenant's memory, but always one."""

    def __init__(self, store: Store, carrier: Carrier) -> None:
        self._store = store
        self._carrier = carrier
        self._bytes: dict[int, int] = {}
        """By tenant of that store."""

    def try_hold(self, namespace: Namespace, row: int) -> int | None:
        """The slot of a block that is held from now on; None where that would be too much."""
        tenant, slot_bytes = namespace.tenant, self._store.pool(namespace).slot_bytes
        held_bytes = self._bytes.get(tenant.id, 0)
        limit = self._store.segments.tenant_bytes(tenant.id) * HELD_SHARE
        if held_bytes and held_bytes + slot_bytes > limit:
            return None
        if not self._carrier.may_hold(namespace, 1):
            return None
        self._bytes[tenant.id] = held_bytes + slot_bytes
        return self._carrier.hold(tenant, row)

    def no_more(self, namespace: Namespace) -> None:
        """One of them waits no longer; whoever says so has its slot, and lets go of it."""
        self._bytes[namespace.tenant.id] -= self._store.pool(namespace).slot_bytes


class GpuLink:
    """Between memory and one device."""

    def __init__(
        self,
        uuid: str,
        memory: Store,
        moving: Movement | None,
        joined: Joined,
        index: IndexPort,
        *,
        size_bytes: int,
        pid: int,
        queue_bytes: dict[Kind, int],
        policy: str = "lru",
    ) -> None:
        """`index`: where readers on this device look; `moving`: between memory and the SSD, if there is one."""
        self.uuid = uuid
        self.memory = memory
        self.moving = moving
        self.joined = joined
        self.side = DeviceSide(joined, index)
        self.store = Store(size_bytes, self.side, policy=policy, lazily=True)
        self.side.table = self.store.table
        self.counts = GpuCounts()
        self.schedule: Scheduler[Block] = Scheduler(queue_bytes)
        self.jobs: list[GpuJob] = []
        self.on_memory = Carrier(memory, f"gpu {uuid}", pid)
        self.on_device = Carrier(self.store, "gpu", pid)
        self.held_memory = Held(memory, self.on_memory)
        self.held_device = Held(self.store, self.on_device)
        self.trouble = ""
        """Why the device is out of use; "" where it is in use. Nothing is begun on it, or known of it, meanwhile."""
        self._let_go: list[Callable[[], None]] = []
        self._last = 0

    def number(self) -> int:
        """For the next job."""
        self._last += 1
        return self._last

    @property
    def others_run(self) -> bool:
        """Copies are under way besides the one whose turn has come: their slots come back."""
        return sum(queue.running for queue in self.schedule.queues.values()) > 1

    # -- names

    def device_namespace(self, memory: Namespace) -> Namespace:
        """The same namespace on the device, made at first use.

        Raises what `Store.open_namespace` does: InvalidArgument where its blocks are larger than the device's memory.
        """
        found = self.side.device_of.get(memory.id)
        if found is None:
            tenant = self.store.tenant(memory.tenant.name)
            found = self.store.open_namespace(
                tenant, memory.digest, memory.block_bytes, memory.label, memory.block_tokens
            )
            self.side.pair(memory, found)
        return found

    def try_device_namespace(self, memory: Namespace) -> tuple[Namespace | None, str]:
        """The same for who gets no error: None and why where there can be none."""
        try:
            return self.device_namespace(memory), ""
        except KVStoreError as error:
            return None, str(error)

    def memory_namespace(self, block: Block) -> Namespace:
        return self.memory.namespaces[block[0] - 1]

    def memory_row(self, block: Block) -> int:
        """The row of a block in memory; NONE where it is not there."""
        number, key = block
        row = self.memory.namespaces[number - 1].tenant.rows.get(key, NONE)
        return row if row != NONE and self.memory.table.namespace[row] == number else NONE

    def device_row(self, block: Block) -> int:
        """The same on the device."""
        number, key = block
        namespace = self.side.device_of.get(number)
        if namespace is None:
            return NONE
        row = namespace.tenant.rows.get(key, NONE)
        return row if row != NONE and self.store.table.namespace[row] == namespace.id else NONE

    def block_at(self, row: int) -> Block:
        """The block in a row of the device's store."""
        key = self.store.table.key[row]
        assert key is not None, f"row {row} of the device has no key"
        return (self.side.memory_of[self.store.table.namespace[row]].id, key)

    def blocks_step(self, memory: Namespace, start: int, rows_max: int) -> list[Block]:
        """A namespace's blocks on the device, among `rows_max` rows from `start`."""
        device, table = self.side.device_of.get(memory.id), self.store.table
        if device is None:
            return []
        rows = range(start, min(start + rows_max, len(table)))
        here = (row for row in rows if table.state[row] == SEALED and table.namespace[row] == device.id)
        return [(memory.id, table.key[row] or b"") for row in here]

    def on_ssd(self, block: Block) -> bool:
        """Whether the SSD has it."""
        return self.moving is not None and self.moving.link.disk_row(block) != NONE

    def elsewhere(self, block: Block) -> bool:
        """Whether memory has it, or an SSD that is in use."""
        if self.memory_row(block) != NONE:
            return True
        return self.moving is not None and not self.moving.trouble and self.on_ssd(block)

    def only_here(self, block: Block) -> bool:
        """Whether it would be gone with this device."""
        namespace = self.memory_namespace(block)
        return not (self.elsewhere(block) or self.joined.gpu_flag(namespace.tenant.id, block[1], besides=self.side))

    @contextmanager
    def named(self) -> Iterator[None]:
        """Refusals of the device's store say which memory is short."""
        try:
            yield
        except (ResourceExhausted, InvalidArgument) as error:
            why = f"device {self.uuid}: {error}".replace("host.size", "gpu.size")
            raise type(error)(why) from None

    # -- holds on what goes

    def release_later(self, carrier: Carrier, tenant: Tenant, ref: int) -> None:
        """Ends a hold on a block that is just being dropped."""
        self._let_go.append(lambda: carrier.release(tenant, ref))

    def settle(self) -> None:
        """Ends what was put aside. At the beginning of every step that is not a callback."""
        let_go, self._let_go = self._let_go, []
        for release in let_go:
            release()
