"""The writer of the shared-memory index; its readers are the clients (layout: kvstored.v1.shm).

One index a tenant. The daemon is the only writer: the memfd is sealed against any
further writable mapping as soon as the daemon has its own.

Growing or shedding tombstones builds a successor in steps of bounded time. Meanwhile
every publish and withdrawal goes to both; when all entries are in the successor, the old
index is marked as moved and is never written again, which every reader notices in its
last check. A block for which the old one has no free slot waits in the successor.
"""

import fcntl
import os
import struct
from collections.abc import Callable

from kvstore.tiers.slab import SEALS, sealed_memfd
from kvstored.mapping import Mapping
from kvstored.v1 import shm

F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1 and later; not in Python's fcntl."""

LOAD_NUMERATOR, LOAD_DENOMINATOR = 7, 10
"""Above 70 % of slots used (tombstones included) the index moves to a successor."""

CAPACITY_MIN = 1024
CAPACITY_MAX = 1 << 28
COPY_ROWS = 64
_LOCATION = struct.Struct("<IIQHHI")


class _Table:
    """One memfd of the index: slots, and how many are used."""

    def __init__(self, name: str, epoch: int, generation: int, capacity: int) -> None:
        self.capacity = capacity
        self.mask = capacity - 1
        self.generation = generation
        self.size_bytes = shm.index_bytes(capacity)
        self.live = 0
        self.tombstones = 0
        self.descriptor = sealed_memfd(name, self.size_bytes, seals=0)
        try:
            self.mapping = Mapping(self.descriptor, self.size_bytes, writable=True)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS | F_SEAL_FUTURE_WRITE)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.bytes = self.mapping.bytes.data
        self.numbers = self.bytes.cast("Q")
        for at, value in (
            (shm.AT_VERSION, shm.LAYOUT_VERSION),
            (shm.AT_EPOCH, epoch),
            (shm.AT_GENERATION, generation),
            (shm.AT_CAPACITY, capacity),
            (shm.AT_MAGIC, shm.MAGIC),
        ):
            self.numbers[at >> 3] = value

    def find(self, key: bytes) -> int:
        """Byte offset of the slot that holds `key`; -1 where there is none."""
        first: int
        step: int
        first, step = shm.HASHES.unpack(key)
        step |= 1
        raw, numbers, mask = self.bytes, self.numbers, self.mask
        for i in range(shm.PROBE_MAX):
            at = shm.HEADER_BYTES + ((first + i * step) & mask) * shm.SLOT_BYTES
            word = at >> 3
            if numbers[word + 1] == first and raw[at + 8 : at + 40] == key:
                return at
            if not numbers[word]:
                break
        return -1

    def room_for(self, key: bytes) -> int:
        """Byte offset of the slot to put a key into that `find` does not find; -1 where the probe is full."""
        first: int
        step: int
        first, step = shm.HASHES.unpack(key)
        step |= 1
        raw, numbers, mask = self.bytes, self.numbers, self.mask
        for i in range(shm.PROBE_MAX):
            at = shm.HEADER_BYTES + ((first + i * step) & mask) * shm.SLOT_BYTES
            if not numbers[(at >> 3) + 1] and raw[at + 8 : at + 40] == shm.EMPTY_KEY:
                return at
        return -1

    def write(self, at: int, key: bytes, location: tuple[int, int, int, int, int, int]) -> None:
        """Three separate steps: odd number, fields, even number."""
        word = at >> 3
        sequence = self.numbers[word]
        self.numbers[word] = sequence + 1
        shm.FIELDS.pack_into(self.bytes, at + shm.FIELDS_AT, key, *location)
        self.numbers[word] = sequence + 2

    def insert(self, key: bytes, location: tuple[int, int, int, int, int, int]) -> bool:
        """Publishes a key that is not there; False where its probe is full."""
        at = self.room_for(key)
        if at < 0:
            return False
        if self.numbers[at >> 3]:
            self.tombstones -= 1
        self.write(at, key, location)
        self.live += 1
        return True

    def remove(self, key: bytes) -> bool:
        """Leaves a tombstone; False where the key is not there."""
        at = self.find(key)
        if at < 0:
            return False
        self.write(at, shm.EMPTY_KEY, (0, 0, 0, 0, 0, 0))
        self.live -= 1
        self.tombstones += 1
        return True

    @property
    def overloaded(self) -> bool:
        return (self.live + self.tombstones) * LOAD_DENOMINATOR > self.capacity * LOAD_NUMERATOR


class TenantIndex:
    """The index of one tenant, through all its generations."""

    def __init__(self, name: str, epoch: int, capacity: int) -> None:
        self._name = name
        self._epoch = epoch
        self._table = _Table(name, epoch, 1, capacity)
        self._next: _Table | None = None
        self._cursor = 0
        self._waiting: dict[bytes, tuple[int, int, int, int, int, int]] = {}
        self.notices = 0

    def publish(self, key: bytes, location: tuple[int, int, int, int, int, int]) -> None:
        """Readers find `key` there from now on; or, if its probe is full, once the successor is ready."""
        homed = self._table.insert(key, location)
        if not homed:
            self._waiting[key] = location
        if self._next is not None:
            if not self._next.insert(key, location):
                self._restart()
        elif not homed or self._table.overloaded:
            self._begin(capacity_for(2 * (self._table.live + len(self._waiting))))

    def withdraw(self, key: bytes) -> None:
        """No reader finds `key` from now on, nor counts a copy that is not finished."""
        there = self._table.remove(key)
        waiting = self._waiting.pop(key, None)
        assert there or waiting is not None, f"key {key.hex()[:12]} withdrawn but not published"
        if self._next is not None:
            self._next.remove(key)

    @property
    def growing(self) -> bool:
        return self._next is not None

    def step(self, clock: Callable[[], float], budget_s: float) -> bool:
        """Goes on with a move for about `budget_s`; True while there is more to do."""
        if self._next is None:
            return False
        until = clock() + budget_s
        table = self._table
        while self._cursor < table.capacity:
            stop = min(self._cursor + COPY_ROWS, table.capacity)
            if not self._copy(self._cursor, stop):
                self._restart()
                return True
            self._cursor = stop
            if clock() >= until:
                return True
        self._switch()
        return False

    def beat(self, now_ns: int) -> None:
        """Writes the heartbeat."""
        self._table.numbers[shm.AT_HEARTBEAT >> 3] = now_ns

    def notify(self) -> None:
        """Tells idle clients to ask what is wanted of them."""
        self.notices += 1
        self._table.numbers[shm.AT_NOTICE >> 3] = self.notices

    @property
    def descriptor(self) -> int:
        return self._table.descriptor

    @property
    def size_bytes(self) -> int:
        return self._table.size_bytes

    @property
    def figures(self) -> tuple[int, int, int, int, int]:
        """generation, capacity, live, tombstones, waiting for the successor."""
        t = self._table
        return t.generation, t.capacity, t.live, t.tombstones, len(self._waiting)

    def close(self) -> None:
        os.close(self._table.descriptor)
        if self._next is not None:
            os.close(self._next.descriptor)

    def _restart(self) -> None:
        """The successor is too small (or unlucky): a larger one from the start."""
        assert self._next is not None
        os.close(self._next.descriptor)
        self._begin(self._next.capacity * 2)

    def _begin(self, capacity: int) -> None:
        assert capacity <= CAPACITY_MAX, f"an index of {capacity} slots"
        self._next = _Table(self._name, self._epoch, self._table.generation + 1, capacity)
        self._cursor = 0
        for key, location in self._waiting.items():
            if not self._next.insert(key, location):
                self._restart()
                return

    def _copy(self, start: int, stop: int) -> bool:
        table, successor = self._table, self._next
        assert successor is not None
        for number in range(start, stop):
            at = shm.HEADER_BYTES + number * shm.SLOT_BYTES
            key = bytes(table.bytes[at + 8 : at + 40])
            if key == shm.EMPTY_KEY or successor.find(key) >= 0:
                continue
            if not successor.insert(key, _LOCATION.unpack_from(table.bytes, at + 40)):
                return False
        return True

    def _switch(self) -> None:
        old, new = self._table, self._next
        assert new is not None
        new.numbers[shm.AT_NOTICE >> 3] = self.notices
        new.numbers[shm.AT_HEARTBEAT >> 3] = old.numbers[shm.AT_HEARTBEAT >> 3]
        self._table, self._next = new, None
        self._waiting.clear()
        old.numbers[shm.AT_MOVED >> 3] = new.generation
        old.numbers[shm.AT_GENERATION >> 3] = new.generation
        os.close(old.descriptor)


def capacity_for(blocks: int) -> int:
    """Slots for that many blocks at about half load; a power of two."""
    wanted = max(CAPACITY_MIN, min(2 * blocks, CAPACITY_MAX))
    return 1 << (wanted - 1).bit_length()


class Indexes:
    """The indexes of all tenants: what the store publishes to."""

    def __init__(self, epoch: int, blocks_expected: int) -> None:
        self.epoch = epoch
        self._blocks_expected = blocks_expected
        self._of: dict[int, TenantIndex] = {}

    def of(self, tenant: int) -> TenantIndex:
        """The tenant's index, made at first use."""
        found = self._of.get(tenant)
        if found is None:
            capacity = capacity_for(self._blocks_expected)
            found = self._of[tenant] = TenantIndex(f"kvstored-index-{tenant}", self.epoch, capacity)
        return found

    def publish(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int) -> None:
        self.of(tenant).publish(key, (shm.ref_segment(ref), length, offset, shm.HOST, 0, namespace))

    def withdraw(self, tenant: int, key: bytes) -> None:
        self.of(tenant).withdraw(key)

    @property
    def growing(self) -> bool:
        return any(index.growing for index in self._of.values())

    def step(self, clock: Callable[[], float], budget_s: float) -> bool:
        """Goes on with every move under way; True while there is more to do."""
        more = False
        for index in self._of.values():
            if index.growing:
                more |= index.step(clock, budget_s)
        return more

    def beat(self, now_ns: int) -> None:
        for index in self._of.values():
            index.beat(now_ns)

    def descriptor(self, tenant: int) -> tuple[int, int, int]:
        """descriptor (stays the index's), size in bytes, generation."""
        index = self.of(tenant)
        return index.descriptor, index.size_bytes, index.figures[0]

    def figures(self, tenant: int) -> tuple[int, int, int, int, int, int]:
        """generation, capacity, live, tombstones, waiting, size in bytes."""
        index = self.of(tenant)
        return (*index.figures, index.size_bytes)

    def notify(self, tenant: int) -> None:
        self.of(tenant).notify()

    def close(self) -> None:
        for index in self._of.values():
            index.close()
        self._of.clear()
