"""What is on the disk, byte for byte: the only file that says so.

An SSD directory has

    lock                    whose flock its daemon holds
    catalogue/              RocksDB (rocksdict in raw mode), see below
    segment-00000001.kv     a run of equal slots: slot n begins at n * slot_bytes
    store/                  layout "rocksdb": catalogue and payload in one, instead of the two above
    removed/                of another layout, on its way out
    ballast                 takes room that is given back when there is none
    aside-20260131-235959/  what could not be opened, with its REASON; the same names inside

and the catalogue has, under keys whose first byte says what they are,

    b"b" + namespace (u32, big endian) + block key (32 bytes)  ->  Record
    b"n" + number (u32, big endian)                            ->  NamespaceRow (JSON)
    b"p"                                                       ->  what a probe last wrote
    b"s" + number (u32, big endian)                            ->  SegmentRow (JSON)
    b"v"                                                       ->  FORMAT_VERSION (u32)

The version's key is the last of all and always there, so whoever reads all records knows
that he has seen every one of them when he meets a key that is no record's.

A slot's payload is the block, then whatever lay behind it in the slot of the slab.

In the layout "rocksdb" a segment is a number and a size without a file, and a slot's payload
lies in the column family `payload` in pieces of at most PIECE_BYTES, each under

    segment (u32, big endian) + pages of a slot (u32) + page in the segment (u32)

as one byte that says how (PLAIN, PLANES) and then the bytes: plain ones, or a zstandard frame
of all even bytes followed by all odd ones.
"""

import json
import re
import struct
from typing import NamedTuple

import xxhash

FORMAT_VERSION, PACKED_VERSION = 1, 2
"""The second is the first with `Record.packed`, and is that of the layout "rocksdb": in the first it was 0."""

READABLE_VERSIONS = (1, 2)
"""A release reads the version before its own."""

EXTENTS, ROCKSDB = "extents", "rocksdb"
LOCK_NAME = "lock"
CATALOGUE_NAME = "catalogue"
CATALOGUE_NAMES = {EXTENTS: CATALOGUE_NAME, ROCKSDB: "store"}
"""By layout: what is there says which one it is."""

REMOVED_NAME = "removed"
PROBE_NAME, BALLAST_NAME = "probe.tmp", "ballast"
ASIDE_PREFIX = "aside-"
REASON_NAME = "REASON"

VERSION_KEY = b"v"
PROBE_KEY = b"p"
RECORD_KIND, NAMESPACE_KIND, SEGMENT_KIND = b"b", b"n", b"s"
BLOCK_KEY_BYTES = 32
SEED_BYTES = 8

_SEGMENT_NAME = re.compile(r"segment-(\d{8,10})\.kv")
_U32 = struct.Struct(">I")
_RECORD_KEY = struct.Struct(">cI32s")
_RECORD = struct.Struct("<IIIIQQIIddd")
"""segment, slot, length, packed, checksum, sequence, depth, hits, created, used, until; then the parent, if any."""

_PLACE = struct.Struct("<II")
_HITS_AT = 36
_HITS = struct.Struct("<I")
_USED_AT = 48
_USED = struct.Struct("<d")
HITS_MAX = 0xFFFFFFFF
PIECE_BYTES = 512 << 10
"""RocksDB is handed one at a time, with the GIL held: below a millisecond."""

PLAIN, PLANES = b"\0", b"\1"
_PIECE_KEY = struct.Struct(">III")


class Record(NamedTuple):
    """One block on the SSD."""

    namespace: int
    key: bytes
    segment: int
    slot: int
    length: int
    """Bytes of the block, from the start of its slot."""
    checksum: int
    """`checksum_of` those bytes and the key."""
    parent: bytes
    """The key of the block before it in its chain, or b""."""
    depth: int
    created: float
    """Wall-clock seconds, as are `used` and `until`."""
    used: float
    hits: int
    until: float
    """When it may be dropped unasked; 0: never."""
    sequence: int
    """Grows with every record written: where two records claim one slot, the higher one is right."""
    packed: int = 0
    """What it takes in the layout "rocksdb", with all that belongs to it; 0: not known, or it takes its slot."""


class NamespaceRow(NamedTuple):
    """What a namespace's number in the records means."""

    number: int
    tenant: str
    digest: bytes
    block_bytes: int
    block_tokens: int
    label: str


class SegmentRow(NamedTuple):
    """A segment file and how it is cut; `slot_bytes` is 0 and `tenant` empty while it belongs to nobody."""

    number: int
    size_bytes: int
    slot_bytes: int
    tenant: str


def checksum_of(block: memoryview, key: bytes) -> int:
    """xxh3-64 of a block's bytes, seeded with the first 8 bytes of its key (little endian).

    The seed makes a whole and sound payload that lies under another block's record a
    mismatch too: two swapped records, or a slot written again whose old record came back.
    """
    return xxhash.xxh3_64_intdigest(block, int.from_bytes(key[:SEED_BYTES], "little"))


def record_key(namespace: int, key: bytes) -> bytes:
    """Where the record of a block is in the catalogue."""
    assert len(key) == BLOCK_KEY_BYTES, f"a block's key has {BLOCK_KEY_BYTES} bytes, not {len(key)}"
    return _RECORD_KEY.pack(RECORD_KIND, namespace, key)


def pack_record(record: Record) -> tuple[bytes, bytes]:
    """Key and value in the catalogue."""
    assert len(record.parent) in (0, BLOCK_KEY_BYTES), f"a parent of {len(record.parent)} bytes"
    value = _RECORD.pack(
        record.segment,
        record.slot,
        record.length,
        record.packed,
        record.checksum,
        record.sequence,
        record.depth,
        min(record.hits, HITS_MAX),
        record.created,
        record.used,
        record.until,
    )
    return record_key(record.namespace, record.key), value + record.parent


def unpack_record(db_key: bytes, value: bytes) -> Record:
    """The record again. Raises struct.error where it is none."""
    _, namespace, key = _RECORD_KEY.unpack(db_key)
    segment, slot, length, packed, checksum, sequence, depth, hits, created, used, until = _RECORD.unpack_from(value)
    parent = value[_RECORD.size :]
    return Record(
        namespace, key, segment, slot, length, checksum, parent, depth, created, used, hits, until, sequence, packed
    )


def place_of(value: bytes) -> tuple[int, int]:
    """Segment and slot of a packed record. Raises struct.error where it is none."""
    segment, slot = _PLACE.unpack_from(value)
    return segment, slot


def with_use(value: bytes, used: float, hits: int) -> bytes:
    """A packed record with another last use and count of hits."""
    changed = bytearray(value)
    _HITS.pack_into(changed, _HITS_AT, min(hits, HITS_MAX))
    _USED.pack_into(changed, _USED_AT, used)
    return bytes(changed)


def pack_version(version: int) -> bytes:
    return _U32.pack(version)


def unpack_version(value: bytes) -> int:
    """Raises struct.error where it is none."""
    version: int = _U32.unpack(value)[0]
    return version


def namespace_key(number: int) -> bytes:
    return NAMESPACE_KIND + _U32.pack(number)


def segment_key(number: int) -> bytes:
    return SEGMENT_KIND + _U32.pack(number)


def pack_row(row: NamespaceRow | SegmentRow) -> tuple[bytes, bytes]:
    """Key and value in the catalogue."""
    fields = row._asdict()
    if isinstance(row, NamespaceRow):
        fields["digest"] = row.digest.hex()
        key = namespace_key(row.number)
    else:
        key = segment_key(row.number)
    return key, json.dumps(fields, separators=(",", ":")).encode()


def unpack_namespace(value: bytes) -> NamespaceRow:
    """Raises ValueError, KeyError or TypeError where it is none."""
    found = json.loads(value)
    return NamespaceRow(
        int(found["number"]),
        str(found["tenant"]),
        bytes.fromhex(found["digest"]),
        int(found["block_bytes"]),
        int(found["block_tokens"]),
        str(found["label"]),
    )


def unpack_segment(value: bytes) -> SegmentRow:
    """Raises ValueError, KeyError or TypeError where it is none."""
    found = json.loads(value)
    return SegmentRow(int(found["number"]), int(found["size_bytes"]), int(found["slot_bytes"]), str(found["tenant"]))


def piece_key(segment: int, slot_pages: int, page: int) -> bytes:
    """Where a piece of a slot's payload is; all of a segment lie together, in it all of one size of slots."""
    return _PIECE_KEY.pack(segment, slot_pages, page)


def segment_of_piece(key: bytes) -> int:
    segment: int = _PIECE_KEY.unpack(key)[0]
    return segment


def segment_name(number: int) -> str:
    return f"segment-{number:08d}.kv"


def segment_number(name: str) -> int | None:
    """Which segment a file is; None where its name is not a segment's."""
    found = _SEGMENT_NAME.fullmatch(name)
    if found is None or segment_name(int(found[1])) != name:
        return None
    return int(found[1])
