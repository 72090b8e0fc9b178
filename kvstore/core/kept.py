"""Blocks of memory that are held until they are on the SSD, for somebody who waits for that.

Their bytes are counted apart by tenant: what loads hold by the same sessions is much more at
times, and must not count for what writes may hold.
"""

from kvstore.core.holds import Tenant
from kvstore.core.link import Block, Link


class Kept:
    """Each block once, whoever and how many wait for it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._slots: dict[Block, int] = {}
        self._bytes: dict[int, int] = {}
        """By tenant of memory's store."""

    def __contains__(self, block: Block) -> bool:
        return block in self._slots

    def bytes_of(self, tenant: Tenant) -> int:
        return self._bytes.get(tenant.id, 0)

    def keep(self, block: Block, row: int) -> None:
        """Holds a block that is not held here."""
        assert block not in self._slots, "a block kept twice"
        self._slots[block] = self._link.on_memory.hold(self._tenant(block), row)
        self._count(block, 1)

    def take(self, block: Block) -> int:
        """Its slot; whoever takes it lets go of it."""
        self._count(block, -1)
        return self._slots.pop(block)

    def let_go(self, block: Block) -> None:
        """Of a block that may be held here."""
        if block in self._slots:
            self._link.on_memory.release(self._tenant(block), self.take(block))

    def _tenant(self, block: Block) -> Tenant:
        return self._link.memory.namespaces[block[0] - 1].tenant

    def _count(self, block: Block, sign: int) -> None:
        memory, tenant = self._link.memory, self._tenant(block).id
        size_bytes = memory.pool(memory.namespaces[block[0] - 1]).slot_bytes
        self._bytes[tenant] = self._bytes.get(tenant, 0) + sign * size_bytes
