"""What was on the SSD before this life of the daemon: its blocks, put back record by record.

Records come in the order of the catalogue, so each step is as small as its caller wants it,
and memory serves meanwhile. A block is found as soon as its record has been seen. A record
that cannot be (of a file that is not there, of a slot that another one has, of a namespace that
means something else by now) is to be forgotten. What a client removes before its record has
been seen is removed all the same.

The policy's order is by last use, to a factor of two in age: rows are collected by the age of
their use, and touched oldest first at the end.
"""

from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

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


class Described(NamedTuple):
    """What the catalogue says of a namespace."""

    tenant: str
    digest: bytes
    block_bytes: int
    label: str
    block_tokens: int


class Restore:
    """Puts blocks back into the SSD's store. `done` makes what is left of the files free."""

    def __init__(
        self, link: Link, now: float, opened: Callable[[int, Namespace], None] = lambda number, namespace: None
    ) -> None:
        """`opened` is told which namespace of the SSD's store a number in the catalogue is, once one needs it."""
        self.link = link
        self._now = now
        self._opened = opened
        self.namespaces: dict[int, Namespace] = {}
        """Number in the catalogue -> the namespace of the SSD's store."""
        self._described: dict[int, Described] = {}
        """Those that no record has been met of."""
        self._unusable: set[int] = set()
        """Of those: numbers that mean something else by now, or that another number means as well."""
        self._met: set[int] = set()
        """Namespaces of the SSD's store in `namespaces`."""
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
    ) -> None:
        """A namespace of the catalogue: it is opened when a record of it is met."""
        self._described[number] = Described(tenant, digest, block_bytes, label, block_tokens)

    def _namespace(self, number: int) -> Namespace | None:
        """The namespace of a record; None where nothing of it can be used any more."""
        row = self._described.get(number)
        if row is None or number in self._unusable:
            return self.namespaces.get(number)
        memory = self.link.memory
        try:
            opened = memory.open_namespace(
                memory.tenant(row.tenant), row.digest, row.block_bytes, row.label, row.block_tokens
            )
            found = self.link.disk_namespace(opened)
        except KVStoreError:  # a client has opened it with another block size, or there are too many
            found = None
        if found is None or found.id in self._met:
            self._unusable.add(number)
            return None
        del self._described[number]
        self.namespaces[number] = found
        self._met.add(found.id)
        self._opened(number, found)
        return found

    def without_blocks(self) -> list[int]:
        """After the last record: namespaces of the catalogue that nothing in it is of, and nobody will write by.

        A namespace that is in use in this life and has no record yet gets a number of its own with its first.
        """
        return list(self._described)

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
        packed: int = 0,
    ) -> bool:
        """A block that is there; `name` has the catalogue's number of its namespace. False: to be forgotten.

        Times are the daemon's clock: `used` may be below 0, `until` is 0 where there is no end.
        """
        link, namespace, key = self.link, self._namespace(name[0]), name[1]
        if namespace is None or key == EMPTY_KEY or key in namespace.tenant.rows:
            return self.refuse()
        if not self._is_free(namespace, segment, slot):
            return self.refuse()
        memory = link.joined.memory_of[namespace.id]
        if link.removals.has(memory, key) or 0 < until <= self._now or not isfinite(until):
            return self.refuse()
        if not isfinite(used):
            used = self._now
        disk, pool = link.disk, link.disk.pool(namespace)
        row = disk.tree.seal(namespace, pool, key, slot_ref(segment, slot), parent, depth, min(used, self._now))
        disk.policy.add(pool.order, row, orphan=disk.tree.families.is_orphan(row))
        disk.table.hits[row] = hits
        if until:
            disk.tree.set_until(row, HINTED, until)
        link.keep_checksum(row, checksum, packed)
        age = int(max(self._now - used, 0.0)).bit_length()
        self._by_age[min(age, AGES - 1)].append(row)
        self.restored += 1
        return True

    def refuse(self) -> bool:
        """A record that is to be forgotten."""
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

    def done(self) -> bool:
        """Nothing more comes: what no record has named in one more file is free; True if there is more."""
        segments = self.link.disk.segments
        if segments.adopting:
            segments.adopted(next(iter(segments.adopting)))
        return bool(segments.adopting)
