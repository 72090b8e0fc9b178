"""The devices of a node, each with a pool of its own, and what is asked of all of them at once.

With memory's store and `Movement` a call goes to every tier within one step of the event loop:
to the devices first, then to the SSD, then to memory, whose counts are those of the node.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvstore.core.block import NONE, PINNED
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
        self.added: Callable[[GpuPool], None] = lambda pool: None
        """Told of each pool that comes: a driver may take long to open its devices."""

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
        self.added(made)
        return made

    def pool(self, uuid: str) -> GpuPool:
        """The pool that a message names. Raises InvalidArgument, which says what there is."""
        found = self.pools.get(uuid)
        if found is None:
            raise InvalidArgument(f"there is no device {uuid!r} here; there are: {', '.join(self.pools) or 'none'}")
        return found

    # -- calls

    def has(self, namespace: Namespace, key: bytes) -> bool:
        """Whether a device that is in use has a block of memory's namespace."""
        return any(not pool.trouble and pool.has((namespace.id, key)) for pool in self.pools.values())

    def only_here(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """How many of these blocks devices have and neither memory nor the SSD does."""
        blocks = ((namespace.id, key) for key in dict.fromkeys(keys))
        return sum(bool(self._pools_of(block)) and not self._below(block) for block in blocks)

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

    def clear_step(self, namespace: Namespace, start: int, rows_max: int) -> tuple[int | None, int, int]:
        """Removes a namespace's copies among `rows_max` rows of one pool.

        `start` is 0 for the first step, and what the last one answered for the others. Answers where to go on (None
        at the end), how many copies, and of how many blocks they were the only ones.
        """
        pools = list(self.pools.values())
        at, row = divmod(start, 1 << 32)
        if not start:
            for pool in pools:
                pool.commits.clear(namespace)
        if at >= len(pools):
            return None, 0, 0
        blocks = pools[at].link.blocks_step(namespace, row, rows_max)
        only = sum(not self._below(block) and self._pools_of(block) == [pools[at]] for block in blocks)
        after = pools[at].clear_step(namespace, row, rows_max)
        if after is not None:
            return at << 32 | after, len(blocks), only
        return (at + 1) << 32 if at + 1 < len(pools) else None, len(blocks), only

    def _pools_of(self, block: Block) -> list[GpuPool]:
        return [pool for pool in self.pools.values() if pool.has(block)]

    def pin(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float, now: float) -> int:
        """Keeps copies on devices from eviction; how many blocks are there only."""
        for pool in self.pools.values():
            pool.pin(namespace, keys, ttl_s, now)
        return self.only_here(namespace, keys)

    def unpin(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Lets eviction have copies on devices again; how many blocks were pinned there, and neither in memory nor on
        the SSD."""
        unpinned = 0
        for key in keys:
            here = [pool.unpin(namespace, [key]) for pool in self.pools.values()]
            unpinned += any(here) and not self._pinned_below((namespace.id, key))
        return unpinned

    def _pinned_below(self, block: Block) -> bool:
        row = self._memory.namespaces[block[0] - 1].tenant.rows.get(block[1], NONE)
        if row != NONE and self._memory.table.namespace[row] == block[0] and self._memory.table.marks[row] & PINNED:
            return True
        disk = self._moving.link.disk_row(block) if self._moving is not None else NONE
        return disk != NONE and self._moving is not None and bool(self._moving.link.disk.table.marks[disk] & PINNED)

    def bring_down(self, namespace: Namespace, keys: Sequence[bytes]) -> list[Block]:
        """Has copied to memory what of the leading run devices have and neither memory nor an SSD in use; which.

        The run ends at a block that is nowhere, or cannot be copied now.
        """
        coming: list[Block] = []
        for key in keys:
            block = (namespace.id, key)
            pools = self._pools_of(block)
            if not any(pool.bring_down(block) for pool in pools):
                if not self._below(block):
                    break
            elif not pools[0].link.elsewhere(block):
                coming.append(block)
        return coming

    def coming_down(self, blocks: Sequence[Block]) -> list[Block]:
        """Those of these blocks that are on their way to memory still; the others are there, or do not come."""
        return [block for block in blocks if any(block in pool.downs.coming for pool in self.pools.values())]

    def end_session(self, client: Session, *, process_gone: bool) -> None:
        """As `Store.end_session` of memory's store, and as often."""
        for pool in self.pools.values():
            pool.end_session(client, process_gone=process_gone)

    def resume(self, old: Session, heir: Session, uses: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> None:
        """As `Store.resume` of memory's store, and before it; `uses`: device -> slots leased and granted there.

        Raises what `GpuPool.check_resume` does for any of them, before any is changed. Whoever calls this sees to it
        that memory's store will not refuse either (`leaving.check_resume`), or to repeat it.
        """
        for uuid in uses:
            self.pool(uuid)
        for uuid, pool in self.pools.items():
            pool.check_resume(old, heir, *uses.get(uuid, ((), ())))
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
