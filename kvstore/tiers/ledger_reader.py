"""Reads what an earlier daemon wrote down (layout: ledger.py), and sees what of it can be.

Nothing is believed that does not fit: another version, size or machine is a clean start, and a
segment whose memory is not the one that was written down is left out.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.core import holds
from kvstore.core.adopt import Found, NamespaceFound, SegmentFound, SessionFound
from kvstore.core.ledger import GRANT, LEASE, UNGRANT
from kvstore.core.rebuild import FOUND, Rows
from kvstore.core.segments import PAGE_BYTES, pages
from kvstore.tiers import ledger as layout
from kvstore.tiers.ledger import Ledger, SegmentRows
from kvstore.tiers.slab import segment_name

_ROW = np.dtype(
    {
        "names": [name for name in FOUND.names or () if name != "ref"],
        "formats": [FOUND[name] for name in FOUND.names or () if name != "ref"],
        "offsets": [8, 40, 72, layout.AT_DEPTH, 80, layout.AT_USED, layout.AT_LIFE, layout.AT_PIN, layout.AT_HITS],
        "itemsize": layout.ROW_BYTES,
    }
)
"""`ledger.ROW`."""


@dataclass(frozen=True)
class Header:
    """Of which daemon a ledger is."""

    version: int
    size_bytes: int
    page_bytes: int
    pid: int
    born: int
    last_segment: int
    world: bytes


class Unusable(Exception):
    """Why what was left is not adopted: the start is a clean one."""


def rows_name(segment: int) -> str:
    """Of the rows of a segment, in its place."""
    return f"rows-{segment}"


def read_header(descriptor: int) -> Header:
    """Raises Unusable where this is no ledger that can be read here. The descriptor stays its owner's."""
    if os.fstat(descriptor).st_size != layout.LEDGER_BYTES:
        raise Unusable("its ledger is of another release")
    # Not through a mapping: where the page was never made and the file system is full, that would end the process.
    magic, *rest = layout.HEADER.unpack(os.pread(descriptor, layout.HEADER.size, 0))
    found = Header(*rest)
    if magic != layout.MAGIC:
        raise Unusable("its ledger was not finished")
    if found.version != layout.VERSION:
        raise Unusable(f"its ledger has version {found.version}, this release writes {layout.VERSION}")
    return found


@dataclass
class Left:
    """What there is to adopt, and the rows of each segment to read it with."""

    found: Found
    rows: dict[int, SegmentRows]
    slots: dict[int, int]
    """Of each segment, how many slots it had; 0 where it was in no pool."""
    lost: list[int] = field(default_factory=list)
    """Places of segments whose memory is not there, or not the one that was written down."""

    def blocks(self) -> Rows:
        """Every row that is whole."""
        parts = [np.empty(0, FOUND)]
        for number in self.rows:
            slots = self._whole(number)
            if len(slots):
                whole = self._table(number)[slots].view(_ROW)[:, 0]
                part = np.empty(len(slots), FOUND)
                for name in FOUND.names or ():
                    part[name] = slots.astype(np.uint64) | np.uint64(number << 32) if name == "ref" else whole[name]
                parts.append(part)
        return np.concatenate(parts)

    def blocks_of(self) -> Counter[int]:
        """How many each tenant has."""
        found: Counter[int] = Counter()
        for segment in self.found.segments:
            if segment.tenant is not None:
                found[segment.tenant] += len(self._whole(segment.id))
        return found

    def _table(self, number: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        count = self.slots[number]
        return np.frombuffer(self.rows[number].raw[: count * layout.ROW_BYTES], np.uint8).reshape(count, -1)

    def _whole(self, number: int) -> "np.ndarray[Any, np.dtype[np.intp]]":
        """Slots of a segment whose rows have their mark."""
        if not self.slots[number]:
            return np.empty(0, np.intp)
        return np.flatnonzero(self._table(number).view("<u8")[:, 0] == layout.SET)


def namespaces_end(descriptor: int) -> int:
    """Up to where a ledger has pages for namespaces: one that was never made must not be looked at (see above)."""
    return min(os.lseek(descriptor, layout.NAMESPACES_AT, os.SEEK_HOLE), layout.SESSIONS_AT)


def read(ledger: Ledger, memory: dict[str, int], last_segment: int, made_to: int = layout.SESSIONS_AT) -> Left:
    """Everything that fits; `memory` has what was found, by name. Raises Unusable where the whole does not fit."""
    tenants = list(_tenants(ledger))
    if len(set(tenants)) != len(tenants):
        raise Unusable("its ledger names a tenant twice")
    namespaces = list(_namespaces(ledger, made_to))
    if any(not n.tenant < len(tenants) for n in namespaces):
        raise Unusable("its ledger has a namespace of no tenant")
    if len({(n.tenant, n.digest) for n in namespaces}) != len(namespaces):
        raise Unusable("its ledger names a namespace twice")
    left = Left(Found(tenants, namespaces, [], list(_sessions(ledger)), last_segment), {}, {})
    for place in range(layout.SEGMENTS_MAX):
        found = _segment(ledger, place, memory, left)
        if found is not None:
            left.found.segments.append(found)
        elif ledger.numbers[(layout.SEGMENTS_AT + place * layout.SEGMENT_BYTES) >> 3]:
            left.lost.append(place)
            ledger.strike_segment(place)
    left.found.segments.sort(key=lambda segment: segment.id)
    return left


def _tenants(ledger: Ledger) -> Iterator[str]:
    for number in range(holds.TENANTS_MAX):
        at = layout.TENANTS_AT + number * layout.TENANT_BYTES
        if ledger.numbers[at >> 3] != layout.SET:
            return
        length, name = layout.TENANT.unpack_from(ledger.raw, at + 8)
        yield _text(name, length)


def _namespaces(ledger: Ledger, made_to: int) -> Iterator[NamespaceFound]:
    for number in range((made_to - layout.NAMESPACES_AT) // layout.NAMESPACE_BYTES):
        at = layout.NAMESPACES_AT + number * layout.NAMESPACE_BYTES
        if ledger.numbers[at >> 3] != layout.SET:
            return
        tokens, tenant, block_bytes, digest, length, label = layout.NAMESPACE.unpack_from(ledger.raw, at + 8)
        if not 1 <= block_bytes <= 0xFFFFFFFF:
            raise Unusable(f"its ledger has a namespace with blocks of {block_bytes} bytes")
        yield NamespaceFound(tenant, digest, block_bytes, _text(label, length), tokens)


def _segment(ledger: Ledger, place: int, memory: dict[str, int], left: Left) -> SegmentFound | None:
    at = layout.SEGMENTS_AT + place * layout.SEGMENT_BYTES
    if ledger.numbers[at >> 3] != layout.SET:
        return None
    number, tenant, size_bytes, block_bytes, inode, rows_inode = layout.SEGMENT.unpack_from(ledger.raw, at + 8)
    memory_of, rows_of = memory.get(segment_name(number)), memory.get(rows_name(number))
    if memory_of is None or rows_of is None or number in left.rows:
        return None
    there, rows_there = os.fstat(memory_of), os.fstat(rows_of)
    wanted = size_bytes, inode, layout.rows_bytes(size_bytes), rows_inode
    if (there.st_size, there.st_ino, rows_there.st_size, rows_there.st_ino) != wanted:
        return None
    slots = size_bytes // pages(block_bytes, PAGE_BYTES) if block_bytes else 0
    left.rows[number] = SegmentRows(place, inode, rows_of, size_bytes)
    left.slots[number] = slots
    return SegmentFound(number, size_bytes, None if tenant == layout.NOBODY else tenant, block_bytes)


def _sessions(ledger: Ledger) -> Iterator[SessionFound]:
    for place in range(holds.SESSIONS_MAX):
        at = layout.SESSIONS_AT + place * layout.SESSION_BYTES
        if ledger.numbers[at >> 3] != layout.SET:
            continue
        word, nonce, before, born, pid, tenant, length, name = layout.SESSION.unpack_from(ledger.raw, at + 8)
        half, count = word >> layout.HALF_SHIFT, word & (1 << layout.HALF_SHIFT) - 1
        first = layout.log_at(place, half) >> 3
        granted: dict[int, None] = {}
        leased: Counter[int] = Counter()
        for entry in ledger.numbers[first : first + min(count, layout.LOG_ENTRIES)]:
            kind, ref = entry >> layout.KIND_SHIFT, entry & (1 << layout.KIND_SHIFT) - 1
            if kind == GRANT:
                granted[ref] = None
            elif kind == UNGRANT:
                granted.pop(ref, None)
            else:
                leased[ref] += 1 if kind == LEASE else -1
        held = {ref: times for ref, times in leased.items() if times > 0}
        yield SessionFound(place, tenant, _text(name, length), pid, born, nonce, before, list(granted), held)


def _text(raw: bytes, length: int) -> str:
    return raw[:length].decode(errors="replace")
