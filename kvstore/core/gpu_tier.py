"""The devices of a node, each with a pool of its own, and what is asked of all of them at once.

With memory's store and `Movement` a call goes to every tier within one step of the event loop:
to the devices first, then to the SSD, then to memory, whose counts are those of the node.
"""

from collections.abc import Iterator, Mapping, Sequence

from kvstore.core.block import NONE
from kvstore.core.gpu_jobs import GpuCounts
from kvstore.core.gpu_link import GpuLink
from kvstore.core.gpu_pool import GpuPool
from kvstore.core.holds import Namespace, Session, Tenant
from kvstore.core.link import Block
from kvstore.core.movement import Movement
from kvstore.core.schedule import Kind
from kvstore.core.store import Store
from kvstore.core.tiered import Joined
from kvstore.core.tree import IndexPort
from kvstored.v1.errors import InvalidArgument

ROWS_STEP = 512
"""Rows of a lost device dropped in one turn: 2 ms."""


class GpuTier:
    """All pools, by the UUID of their device: ordinals change with CUDA_VISIBLE_DEVICES."""

    def __init__(self, memory: Store, moving: Movement | None, joined: Joined, *, pid: int) -> None:
        """`memory` publishes to `joined.host`; `moving` is there where the node has an SSD."""
        self._memory = memory
        self._moving = moving
        self._joined = joined
        self._pid = pid
        self.pools: dict[str, GpuPool] = {}

    def add(
        self,
        uuid: str,
        index: IndexPort,
        *,
        size_bytes: int,
        queue_bytes: dict[Kind, int],
        write_back: str = "through",
        policy: str = "lru",
    ) -> GpuPool:
        """A device's pool, empty. `index` is where readers on this device look, for all tenants."""
        assert uuid not in self.pools, f"device {uuid} has a pool already"
        link = GpuLink(
            uuid,
            self._memory,
            self._moving,
            self._joined,
            index,
            size_bytes=size_bytes,
            pid=self._pid,
            queue_bytes=queue_bytes,
            policy=policy,
        )
        made = self.pools[uuid] = GpuPool(link, write_back)
        return made

    def pool(self, uuid: str) -> GpuPool:
        """The pool that a message names. Raises InvalidArgument, which says what there is."""
        found = self.pools.get(uuid)
        if found is None:
            raise InvalidArgument(f"there is no device {uuid!r} here; there are: {', '.join(self.pools) or 'none'}")
        return found

    # -- calls

    def has(self, namespace: Namespace, key: bytes) -> bool:
        """Whether a device has a block of memory's namespace."""
        return any(pool.has((namespace.id, key)) for pool in self.pools.values())

    def only_here(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """How many of these blocks devices have and neither memory nor the SSD does."""
        blocks = ((namespace.id, key) for key in dict.fromkeys(keys) if self.has(namespace, key))
        return sum(not self._below(block) for block in blocks)

    def _below(self, block: Block) -> bool:
        row = self._memory.namespaces[block[0] - 1].tenant.rows.get(block[1], NONE)
        in_memory = row != NONE and self._memory.table.namespace[row] == block[0]
        return in_memory or (self._moving is not None and self._moving.link.disk_row(block) != NONE)

    def touch(self, tenant: Tenant, keys: Sequence[bytes], now: float) -> None:
        """Blocks of memory's tenant were used, in whichever tier: their copies on devices are as recent."""
        for pool in self.pools.values():
            pool.touch(tenant, keys, now)

    def remove(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Removes copies on devices, ahead of those below; how many blocks are gone that were there only."""
        only = self.only_here(namespace, keys)
        for pool in self.pools.values():
            pool.remove(namespace, keys)
        return only

    def clear_step(self, namespace: Namespace, start: int, rows_max: int) -> int | None:
        """Removes a namespace's copies among `rows_max` rows of one pool; where to go on, None at the end.

        `start` is 0 for the first step, and what the last one answered for the others.
        """
        pools = list(self.pools.values())
        at, row = divmod(start, 1 << 32)
        if not start:
            for pool in pools:
                pool.commits.clear(namespace)
        if at >= len(pools):
            return None
        after = pools[at].clear_step(namespace, row, rows_max)
        if after is not None:
            return at << 32 | after
        return (at + 1) << 32 if at + 1 < len(pools) else None

    def pin(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float, now: float) -> int:
        """Keeps copies on devices from eviction; how many blocks are there only."""
        for pool in self.pools.values():
            pool.pin(namespace, keys, ttl_s, now)
        return self.only_here(namespace, keys)

    def unpin(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Lets eviction have copies on devices again."""
        for pool in self.pools.values():
            pool.unpin(namespace, keys)

    def end_session(self, client: Session, *, process_gone: bool) -> None:
        """As `Store.end_session` of memory's store, and as often."""
        for pool in self.pools.values():
            pool.end_session(client, process_gone=process_gone)

    def resume(self, old: Session, heir: Session, uses: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> None:
        """As `Store.resume` of memory's store, and before it; `uses`: device -> slots leased and granted there.

        Raises what `GpuPool.resume` does; devices before that one have been resumed then, and may be again.
        """
        for uuid in uses:
            self.pool(uuid)
        for uuid, pool in self.pools.items():
            pool.resume(old, heir, *uses.get(uuid, ((), ())))

    # -- time

    def tick(self, now: float, low: float) -> bool:
        """One turn of the daemon's loop; True while there is more to do."""
        return sum(pool.tick(now, low, ROWS_STEP) for pool in self.pools.values()) > 0  # every one of them

    def evict_step(self, high: float, low: float, blocks_max: int) -> bool:
        """Keeps every device between its watermarks; True if more remains to be done."""
        return sum(pool.evict_step(high, low, blocks_max) for pool in self.pools.values()) > 0

    def counts(self) -> GpuCounts:
        """Of all devices together."""
        sums = GpuCounts()
        for pool in self.pools.values():
            sums.add(pool.counts)
        return sums

    def detaching(self, client: Session) -> Iterator[tuple[str, set[int]]]:
        """What a client is asked to close: device, and its segments there."""
        for uuid, pool in self.pools.items():
            session = pool.session_here(client)
            if session is not None and session.detach:
                yield uuid, session.detach
