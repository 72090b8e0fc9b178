"""The byte layout of the shared-memory index, defined once for the daemon and every reader.

One memfd a tenant: a header page, then `capacity` slots of 64 bytes (a power of two).
All numbers are little-endian and naturally aligned; every u64 that two processes use at
the same time is read and written alone, in one 8-byte access.

Header, u64 at each offset:

      0  magic         "KVSTIDX1"
      8  version       of this layout (1)
     16  epoch         of the daemon's life; never 0
     24  generation    of this index; becomes the successor's when the index has moved
     32  heartbeat     CLOCK_MONOTONIC nanoseconds, about once a second; for people
     40  capacity      slots
     48  moved         0, or the generation of the index that took over
     56  notice        grows when the daemon wants a word with every session (send Sync)
     64  below         0, or 1 while what only a tier below memory has cannot be read: it counts as absent

Slot:

      0  u64 sequence  0: never used, a probe ends here; odd: being written; even: whole
      8  32 bytes key  all zero: nothing here now, the probe goes on
     40  u32 segment   where in the slab the block lies, if HOST is set
     44  u32 length    of the block in bytes
     48  u64 offset    in the segment, in bytes
     56  u16 flags     which tiers hold the block
     58  u16 pool      of GPU memory (0 until there is one)
     60  u32 namespace as this life of the daemon numbers it

A probe looks at slots `(a + i * b) mod capacity` for i = 0 .. 63, where a is the key's
first u64 and b its second with the lowest bit set. (Double hashing: at 70 % load and 10^8
keys the longest probe is about ln(10^8) / -ln(0.7) = 52; a linear one would be hundreds.)

A publish or withdrawal is three separate steps: the odd number, the fields, the even
number. The number changes only when the bytes in the slab move or go: adding a copy in
another tier only rewrites `flags`. It never decreases and survives deletion and reuse.

How a reader must read is in kvstore/README.md (rule 1); why a single unpack of the whole
slot is not a read is shown by tests/tiers/test_index_stress.py.
"""

import struct

MAGIC = int.from_bytes(b"KVSTIDX1", "little")
LAYOUT_VERSION = 1

HEADER_BYTES = 4096
AT_MAGIC, AT_VERSION, AT_EPOCH, AT_GENERATION, AT_HEARTBEAT, AT_CAPACITY, AT_MOVED, AT_NOTICE, AT_BELOW = range(
    0, 72, 8
)

SLOT_BYTES = 64
PROBE_MAX = 64
FIELDS = struct.Struct("<32sIIQHHI")
"""Everything of a slot behind its sequence number; starts 8 bytes into the slot."""
FIELDS_AT = 8
FLAGS_AT = 56
EMPTY_KEY = bytes(32)

GPU, HOST, SSD, REMOTE = 1, 2, 4, 8
"""Bits of `flags`, fastest tier first."""

HASHES = struct.Struct("<QQ16x")
"""A key as the two numbers that a probe starts from and steps by."""


def index_bytes(capacity: int) -> int:
    """Size of the memfd of an index with `capacity` slots."""
    return HEADER_BYTES + capacity * SLOT_BYTES


def slot_ref(segment: int, slot: int) -> int:
    """A place in the slab as messages spell it."""
    return segment << 32 | slot


def ref_segment(ref: int) -> int:
    return ref >> 32


def ref_slot(ref: int) -> int:
    return ref & 0xFFFFFFFF
