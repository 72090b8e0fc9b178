"""Blocks that were brought into memory ahead of use and were not used yet: how many may be, and whose they were.

A burst of prefetches must not evict what it has just brought. Two things stop it: such blocks
take at most PREFETCHED_SHARE of a tenant's memory; and where one of them is evicted all the
same (beside a long run that is in memory already, they are the leaves, which go first), what
was prefetching it brings no more.
"""

from kvstore.core.holds import Namespace
from kvstore.core.link import Block
from kvstore.core.store import Store

PREFETCHED_SHARE = 0.5
"""Of a tenant's memory."""


class Prefetched:
    """Of one memory."""

    def __init__(self, memory: Store) -> None:
        self._memory = memory
        self._tickets: dict[Block, tuple[int, ...]] = {}
        """Each block -> numbers of the tickets that it was brought for."""
        self._bytes: dict[int, int] = {}
        """By tenant."""
        self._displaced: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, block: Block) -> bool:
        return block in self._tickets

    def may_come(self, namespace: Namespace) -> bool:
        """Whether one block more may be brought."""
        tenant = namespace.tenant.id
        whole, size_bytes = self._memory.segments.tenant_bytes(tenant), self._memory.pool(namespace).slot_bytes
        return self._bytes.get(tenant, 0) + size_bytes <= whole * PREFETCHED_SHARE

    def came(self, block: Block, tickets: tuple[int, ...]) -> None:
        """A block is in memory that nobody has used."""
        assert block not in self._tickets, "a block that is in memory was brought again"
        self._tickets[block] = tickets
        self._count(block, 1)

    def used(self, block: Block) -> None:
        """A block was read, or is gone: it does not wait for its first use."""
        if self._tickets.pop(block, None) is not None:
            self._count(block, -1)

    def left_memory(self, block: Block) -> None:
        """A block was evicted or removed."""
        self._displaced.update(dict.fromkeys(self._tickets.get(block, ())))
        self.used(block)

    def displaced(self) -> list[int]:
        """Numbers of tickets that have lost a block since the last call."""
        found = list(self._displaced)
        self._displaced.clear()
        return found

    def _count(self, block: Block, sign: int) -> None:
        namespace = self._memory.namespaces[block[0] - 1]
        tenant, size_bytes = namespace.tenant.id, self._memory.pool(namespace).slot_bytes
        self._bytes[tenant] = self._bytes.get(tenant, 0) + sign * size_bytes
