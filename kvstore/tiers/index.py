"""The writer of the shared-memory index; its readers are the clients (layout: kvstored.v1.shm).

One index a tenant. The daemon is the only writer: the memfd is sealed against any
further writable mapping as soon as the daemon has its own.

Growing or shedding tombstones builds a successor in steps of bounded time. Meanwhile
every publish and withdrawal goes to both; when all entries are in the successor, the old
index is marked as moved and is never written again, which every reader notices in its
last check.

A block whose probe has no free slot waits for the successor. At a quarter of the slots
used that takes 64 keys chosen to collide (2^-128 by chance), and no size would help: such
a block stays unpublished, is counted, and readers miss it. (Growing until it fits would
let a client that makes up 65 keys take all memory of the machine.)
"""

import fcntl
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvstore.core.tree import Numbers
from kvstore.logs import logger
from kvstore.tiers.slab import SEALS, sealed_memfd
from kvstored.mapping import Mapping
from kvstored.v1 import shm

log = logger("kvstored.index")

F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1 and later; not in Python's fcntl."""

LOAD_NUMERATOR, LOAD_DENOMINATOR = 7, 10
"""Above 70 % of slots used (tombstones included) the index moves to a successor."""

CAPACITY_MIN = 1024
CAPACITY_MAX = 1 << 28
COPY_ROWS = 64
_LOCATION = struct.Struct("<IIQHHI")


SLOT_LOCATION = ("segment", "length", "offset", "flags", "pool", "namespace")
SLOT = np.dtype(
    [
        ("sequence", "<u8"),
        ("key", "<u8", (4,)),
        *zip(SLOT_LOCATION, ("<u4", "<u4", "<u8", "<u2", "<u2", "<u4"), strict=True),
    ]
)
"""A slot as kvstored.v1.shm has it."""

assert SLOT.itemsize == shm.SLOT_BYTES

Location = tuple[int, int, int, int, int, int]
"""segment, length, offset, flags, pool, namespace: a slot's fields behind the key."""


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

    def write(self, at: int, key: bytes, location: Location) -> None:
        """Three separate steps: odd number, fields, even number."""
        word = at >> 3
        sequence = self.numbers[word]
        self.numbers[word] = sequence + 1
        shm.FIELDS.pack_into(self.bytes, at + shm.FIELDS_AT, key, *location)
        self.numbers[word] = sequence + 2

    def insert(self, key: bytes, location: Location) -> bool:
        """Publishes a key that is not there; False where its probe is full."""
        at = self.room_for(key)
        if at < 0:
            return False
        if self.numbers[at >> 3]:
            self.tombstones -= 1
        self.write(at, key, location)
        self.live += 1
        return True

    def fill(self, entries: "np.ndarray[Any, np.dtype[np.uint64]]") -> list[int]:
        """Writes many slots, eight words each, to a table that has none and no reader; answers which have no room.

        The n-th place of a probe is looked at by all that have found none, and of those that meet at one
        place the first has it: so nothing lies behind a place that was never used.
        """
        assert not self.live, "the index has entries"
        assert not self.tombstones, "the index had entries"
        slots = np.frombuffer(self.bytes, np.uint64, offset=shm.HEADER_BYTES).reshape(-1, shm.SLOT_BYTES >> 3)
        at, step = entries[:, 1].copy(), entries[:, 2] | np.uint64(1)
        left = np.arange(len(entries))
        for _ in range(shm.PROBE_MAX):
            places = at[left] & np.uint64(self.mask)
            free = np.flatnonzero(slots[places, 0] == 0)
            first = free[np.unique(places[free], return_index=True)[1]]
            slots[places[first]] = entries[left[first]]
            left = np.delete(left, first)
            if not len(left):
                break
            at[left] += step[left]
        self.live = len(entries) - len(left)
        return left.tolist()

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
        self._waiting: dict[bytes, Location] = {}
        """Published, and not in the table for want of a slot."""
        self._next: _Table | None = None
        self._waiting_next: dict[bytes, Location] = {}
        """The same of the successor."""
        self._cursor = 0
        self._late: list[bytes] = []
        """Keys that waited when the move began and have not been tried in the successor yet."""
        self._no_memory = ""
        self.notices = 0
        self._below_out = False

    def publish(self, key: bytes, location: Location) -> None:
        """Readers find `key` there from now on; or, if its probe is full, once the successor is ready."""
        homed = self._table.insert(key, location)
        if not homed:
            self._waiting[key] = location
        if self._next is not None:
            self._insert_next(key, location)
        elif self._table.overloaded or (not homed and capacity_for(2 * self._table.live) > self._table.capacity):
            self._begin(capacity_for(2 * (self._table.live + len(self._waiting))))

    def fill(self, keys: list[bytes], locations: Sequence["np.ndarray[Any, Any]"]) -> None:
        """Publishes many at once, into a new index that nobody reads yet; `locations` are columns of Location."""
        entries = np.zeros(len(keys), SLOT)
        entries["sequence"] = 2
        entries["key"] = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)
        for name, column in zip(SLOT_LOCATION, locations, strict=True):
            entries[name] = column
        for at in self._table.fill(entries.view(np.uint64).reshape(-1, shm.SLOT_BYTES >> 3)):
            self._waiting[keys[at]] = _LOCATION.unpack_from(entries[at].tobytes(), 40)

    def withdraw(self, key: bytes) -> None:
        """No reader finds `key` from now on, nor counts a copy that is not finished."""
        there = self._table.remove(key)
        waiting = self._waiting.pop(key, None)
        assert there or waiting is not None, f"key {key.hex()[:12]} withdrawn but not published"
        if self._next is not None and self._waiting_next.pop(key, None) is None:
            self._next.remove(key)

    def move(self, key: bytes, location: Location) -> None:
        """A published block has come to, or left, memory: no copy that is not finished counts."""
        at = self._table.find(key)
        if at >= 0:
            self._table.write(at, key, location)
        else:
            assert key in self._waiting, f"key {key.hex()[:12]} moved and not published"
            self._waiting[key] = location
        if self._next is None:
            return
        at = self._next.find(key)
        if at >= 0:
            self._next.write(at, key, location)
        elif key in self._waiting_next:
            self._waiting_next[key] = location

    def flag(self, key: bytes, flags: int) -> None:
        """Another tier has got, or lost, a copy. One byte is stored, and the number stays: no reader is disturbed."""
        for table, waiting in ((self._table, self._waiting), (self._next, self._waiting_next)):
            if table is None:
                continue
            at = table.find(key)
            if at >= 0:
                table.bytes[at + shm.FLAGS_AT] = flags
            elif key in waiting:
                segment, length, offset, _, pool, namespace = waiting[key]
                waiting[key] = (segment, length, offset, flags, pool, namespace)

    def read(self, key: bytes) -> tuple[int, int, int] | None:
        """Segment, offset and length by the rule for readers: the number alone, the fields, the number again."""
        table = self._table
        at = table.find(key)
        if at < 0:
            return None
        number = table.numbers[at >> 3]
        segment, length, offset, *_ = _LOCATION.unpack_from(table.bytes, at + 40)
        return None if number & 1 or table.numbers[at >> 3] != number else (segment, offset, length)

    @property
    def growing(self) -> bool:
        return self._next is not None

    def step(self, clock: Callable[[], float], budget_s: float) -> bool:
        """Goes on with a move for about `budget_s`; True while there is more to do."""
        if self._next is None:
            return False
        until = clock() + budget_s
        while self._copy_some():
            if clock() >= until:
                return True
        self._switch()
        return False

    def beat(self, now_ns: int) -> None:
        """Writes the heartbeat."""
        self._table.numbers[shm.AT_HEARTBEAT >> 3] = now_ns

    def set_below(self, out: bool) -> None:
        """Whether tiers below memory are out of use: readers count what only these have as absent."""
        self._below_out = out
        self._table.numbers[shm.AT_BELOW >> 3] = int(out)

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

    def _begin(self, capacity: int) -> None:
        """Begins a move; where there is no memory for it, the next publish tries again."""
        try:
            self._next = _Table(self._name, self._epoch, self._table.generation + 1, capacity)
        except OSError as e:
            if not self._no_memory:
                log.error("an index cannot grow", index=self._name, capacity=capacity, reason=str(e))  # noqa: TRY400
            self._no_memory = str(e)
            return
        self._no_memory = ""
        self._cursor = 0
        self._late = list(self._waiting)
        self._waiting_next = {}

    def _insert_next(self, key: bytes, location: Location) -> None:
        successor = self._next
        assert successor is not None
        if successor.insert(key, location):
            return
        self._waiting_next[key] = location
        if successor.overloaded and successor.capacity < CAPACITY_MAX:
            # More was published during the move than it was made for: a larger one from the start.
            os.close(successor.descriptor)
            self._next = None
            self._begin(successor.capacity * 2)

    def _copy_some(self) -> bool:
        """Brings a bounded number of entries to the successor; False when all are there."""
        successor = self._next
        for key, location in self._some():
            self._copy(key, location)
            if self._next is not successor:
                break  # begun again with a larger one
        return self._next is not None and bool(self._late or self._cursor < self._table.capacity)

    def _some(self) -> Iterator[tuple[bytes, Location]]:
        table = self._table
        if self._cursor < table.capacity:
            start, self._cursor = self._cursor, min(self._cursor + COPY_ROWS, table.capacity)
            for row in range(start, self._cursor):
                at = shm.HEADER_BYTES + row * shm.SLOT_BYTES
                key = bytes(table.bytes[at + 8 : at + 40])
                if key != shm.EMPTY_KEY:
                    yield key, _LOCATION.unpack_from(table.bytes, at + 40)
            return
        for _ in range(min(COPY_ROWS, len(self._late))):
            key = self._late.pop()
            if key in self._waiting:
                yield key, self._waiting[key]

    def _copy(self, key: bytes, location: Location) -> None:
        """For a key of the old index; one that was published again since the move began is in the successor already."""
        assert self._next is not None
        if self._next.find(key) < 0 and key not in self._waiting_next:
            self._insert_next(key, location)

    def _switch(self) -> None:
        old, new = self._table, self._next
        if new is None:
            return  # there was no memory for a larger successor
        new.numbers[shm.AT_NOTICE >> 3] = self.notices
        new.numbers[shm.AT_BELOW >> 3] = int(self._below_out)
        new.numbers[shm.AT_HEARTBEAT >> 3] = old.numbers[shm.AT_HEARTBEAT >> 3]
        self._table, self._next = new, None
        self._waiting, self._waiting_next = self._waiting_next, {}
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
        self._below_out = False

    def of(self, tenant: int) -> TenantIndex:
        """The tenant's index, made at first use."""
        found = self._of.get(tenant)
        return self.make(tenant, self._blocks_expected) if found is None else found

    def make(self, tenant: int, blocks: int) -> TenantIndex:
        """The index of a tenant that has none, large enough for that many blocks."""
        assert tenant not in self._of, f"tenant {tenant} has an index"
        made = self._of[tenant] = TenantIndex(f"kvstored-index-{tenant}", self.epoch, capacity_for(blocks))
        made.set_below(self._below_out)
        return made

    def expect(self, tenant: int, blocks: int) -> None:
        """So many are about to be published at once, before the index has had time to grow."""
        self.make(tenant, max(blocks, self._blocks_expected))

    def publish(
        self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int, flags: int = shm.HOST
    ) -> None:
        self.of(tenant).publish(key, (shm.ref_segment(ref), length, offset, flags, 0, namespace))

    def fill(
        self, tenant: int, keys: list[bytes], refs: Numbers, offsets: Numbers, lengths: Numbers, namespaces: Numbers
    ) -> None:
        nothing = np.zeros(len(keys), np.uint16)
        locations = refs >> np.uint64(32), lengths, offsets, nothing + shm.HOST, nothing, namespaces
        self.of(tenant).fill(keys, locations)

    def withdraw(self, tenant: int, key: bytes) -> None:
        self.of(tenant).withdraw(key)

    def move(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int, flags: int) -> None:
        self.of(tenant).move(key, (shm.ref_segment(ref), length, offset, flags, 0, namespace))

    def flag(self, tenant: int, key: bytes, flags: int) -> None:
        self.of(tenant).flag(key, flags)

    def set_below(self, out: bool) -> None:
        """Of all tenants, also of those that come later."""
        self._below_out = out
        for index in self._of.values():
            index.set_below(out)

    def find(self, tenant: int, key: bytes) -> tuple[int, int, int] | None:
        """Segment, offset and length of a block, as a reader finds them in the shared memory; None is a miss."""
        return self.of(tenant).read(key)

    @property
    def growing(self) -> bool:
        return any(index.growing for index in self._of.values())

    def step(self, clock: Callable[[], float], budget_s: float) -> bool:
        """Goes on with every move under way; True while there is more to do."""
        until = clock() + budget_s
        for index in self._of.values():
            if index.growing:
                index.step(clock, max(until - clock(), 0.0))
                if clock() >= until:
                    break
        return self.growing

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
