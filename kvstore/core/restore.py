"""What was on the SSD before this life of the daemon: its blocks, put back record by record.

Records come in the order of the catalogue, so each step is as small as its caller wants it,
and memory serves meanwhile. A block is found as soon as its record has been seen. A record
that cannot be (of a file that is not there, of a slot that another one has, of a namespace that
means something else by now) is to be forgotten. What a client removes before its record has
been seen is removed all the same.

The policy's order is by last use, to a factor of two in age: rows are collected by the age of
their use, and touched oldest first at the end.
"""

from math import isfinite

from kvstore.core.block import HINTED
from kvstore.core.holds import Namespace
from kvstore.core.link import Link
from kvstore.core.moves import Name
from kvstore.core.segments import GRANTED
from kvstored.v1.errors import KVStoreError
from kvstored.v1.shm import EMPTY_KEY, slot_ref

AGES = 40
"""Ages of last use that are told apart: up to 1 s, 2 s, 4 s and so on."""

ORDER_ROWS = 2048
"""Rows put in order in one step."""


class Restore:
    """Puts blocks back into the SSD's store. `done` makes what is left of the files free."""

    def __init__(self, link: Link, now: float) -> None:
        self.link = link
        self._now = now
        self.namespaces: dict[int, Namespace] = {}
        """Number in the catalogue -> the namespace of the SSD's store."""
        self._sizes: dict[int, int] = {}
        """Segments that there are, not all of which have been met in a record yet -> bytes."""
        self._by_age: list[list[int]] = [[] for _ in range(AGES)]
        self.restored = 0
        self.refused = 0

    def segment(self, number: int, size_bytes: int) -> None:
        """A file that is there."""
        self._sizes[number] = size_bytes
        self.link.disk.segments.never_make(number)

    def namespace(
        self, number: int, tenant: str, digest: bytes, block_bytes: int, label: str, block_tokens: int
    ) -> bool:
        """A namespace of the catalogue; False where nothing of it can be used any more."""
        link = self.link
        try:
            memory = link.memory.open_namespace(link.memory.tenant(tenant), digest, block_bytes, label, block_tokens)
        except KVStoreError:  # a client has opened it with another block size, or there are too many
            return False
        found = link.disk_namespace(memory)
        if found is None:
            return False
        self.namespaces[number] = found
        return True

    def record(
        self,
        name: Name,
        segment: int,
        slot: int,
        checksum: int,
        parent: bytes,
        depth: int,
        used: float,
        hits: int,
        until: float,
    ) -> bool:
        """A block that is there; `name` has the catalogue's number of its namespace. False: to be forgotten.

        Times are the daemon's clock: `used` may be below 0, `until` is 0 where there is no end.
        """
        link, namespace, key = self.link, self.namespaces.get(name[0]), name[1]
        if namespace is None or key == EMPTY_KEY or key in namespace.tenant.rows:
            return self._refuse()
        if not self._is_free(namespace, segment, slot):
            return self._refuse()
        memory = link.joined.memory_of[namespace.id]
        if (memory.id, key) in link.removals or 0 < until <= self._now or not isfinite(until):
            return self._refuse()
        if not isfinite(used):
            used = self._now
        disk, pool = link.disk, link.disk.pool(namespace)
        row = disk.tree.seal(namespace, pool, key, slot_ref(segment, slot), parent, depth, min(used, self._now))
        disk.policy.add(pool.order, row, orphan=disk.tree.families.is_orphan(row))
        disk.table.hits[row] = hits
        if until:
            disk.tree.set_until(row, HINTED, until)
        link.keep_checksum(row, checksum)
        age = int(max(self._now - used, 0.0)).bit_length()
        self._by_age[min(age, AGES - 1)].append(row)
        self.restored += 1
        return True

    def _refuse(self) -> bool:
        self.refused += 1
        return False

    def _is_free(self, namespace: Namespace, number: int, slot: int) -> bool:
        """Whether a record may say that its block is in that slot."""
        segments = self.link.disk.segments
        pool = self.link.disk.pool(namespace)
        segment = segments.live.get(number)
        if segment is None:
            size_bytes = self._sizes.get(number, 0)
            if not pool.slot_bytes <= size_bytes <= segments.spare_bytes:
                return False
            segments.adopt(number, size_bytes, pool)
            del self._sizes[number]
            segment = segments.live[number]
        elif number not in segments.adopting or segment.pool is not pool:
            return False
        return slot < len(segment.state) and segment.state[slot] == GRANTED

    def unused(self) -> list[int]:
        """Files in which no record has a block: to be removed."""
        return list(self._sizes)

    def order(self) -> bool:
        """After the last record: one step of ordering the blocks by their last use; True if there is more."""
        policy, tree, table = self.link.disk.policy, self.link.disk.tree, self.link.disk.table
        while self._by_age:
            rows = self._by_age[-1]
            if not rows:
                self._by_age.pop()
                continue
            some = [row for row in rows[-ORDER_ROWS:] if table.listed[row]]
            del rows[-ORDER_ROWS:]
            for row in some:
                policy.touch(tree.pool_of(row).order, [row])
            return True
        return False

    def done(self) -> None:
        """Nothing more comes: what no record has named is free."""
        for number in list(self.link.disk.segments.adopting):
            self.link.disk.segments.adopted(number)
