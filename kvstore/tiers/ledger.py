"""The ledger: private memory in which the daemon writes down what the next one needs to go on. No client gets it.

One file for who there is and who holds what, and one for each segment with a row for each of its
slots. This module is the one place where their bytes are defined; VERSION is raised with every
change, and another version is a clean start.

A process can be killed between any two stores, and what it had stored until then is there: the
memory is the kernel's, and stores of one process are seen in their order. So an entry is a mark
and fields: the mark is one word, stored last when the entry comes and first (0) when it goes.
An entry whose mark is there is whole. What a session holds is a log whose length is one word,
stored after what it counts; it is written anew, in the other half, before it is full.

Every page is made before it is stored to: on a tmpfs that is full, touching a new one is the end
of the process (SIGBUS).

    ledger    header | tenants | segments | namespaces | sessions | logs of sessions, two halves each
    rows-N    rows of segment N, by slot
"""

import os
import struct
from array import array
from collections.abc import Callable, Sequence

from kvstore.core import holds
from kvstore.core.block import HINTED
from kvstore.core.holds import Namespace, Session, Tenant
from kvstore.core.ledger import GRANT, LEASE
from kvstore.core.segments import PAGE_BYTES
from kvstore.logs import logger
from kvstored.mapping import Mapping
from kvstored.v1.errors import ResourceExhausted

log = logger("kvstored.ledger")

MAGIC = 0x4C5453564B  # "KVSTL"
VERSION = 1
SET = 1
"""A mark; 0 is none."""

NOBODY = 0xFFFFFFFF
"""In place of a segment's tenant."""

HEADER = struct.Struct("<QQQQQQQ16s")
"""Magic (stored last), version, host.size, page size, the daemon's pid, its start, highest segment ever, world."""
AT_PID, AT_BORN, AT_LAST = 32, 40, 48

TENANT_BYTES = 128
TENANT = struct.Struct("<I64s")
"""Length of the name, name."""

SEGMENTS_MAX = 4096
SEGMENT_BYTES = 64
SEGMENT = struct.Struct("<IIQQQQ")
"""Number, tenant, bytes, bytes of a block (0: in no pool), inodes of its memory and of its rows."""

NAMESPACE_BYTES = 384
NAMESPACE = struct.Struct("<QQQ32sI256s")
"""Tokens of a block (which may come later), tenant, bytes of a block, digest, length of the label, label."""

SESSION_BYTES = 256
SESSION = struct.Struct("<QQQQIII128s")
"""Log (half << 63 | entries), nonce, nonce before, start of the process, pid, tenant, length of the name, name."""
AT_LOG, AT_NONCE_BEFORE = 8, 24
"""Behind the mark."""

LOG_ENTRIES = 1 << 18
"""Of one half: twice as many as a session may hold, and some."""
LOG_FIRST = PAGE_BYTES // 8
"""Entries that have their pages when a session opens."""
KIND_SHIFT = 62
HALF_SHIFT = 63

ROW_BYTES = 128
ROW = struct.Struct("<Q32s32sIIddddQ8x")
"""Mark, key, parent (zeros: none), namespace, depth, stored, used, ends of life and pin (0: none), hits."""
_ROW = struct.Struct("<32s32sIIddddQ")
AT_DEPTH = 76
AT_USED, AT_LIFE, AT_PIN, AT_HITS = 88, 96, 104, 112
"""Those that change while the block is there: one word each, stored as one."""

TENANTS_AT = PAGE_BYTES
SEGMENTS_AT = TENANTS_AT + holds.TENANTS_MAX * TENANT_BYTES
NAMESPACES_AT = SEGMENTS_AT + SEGMENTS_MAX * SEGMENT_BYTES
SESSIONS_AT = NAMESPACES_AT + holds.NAMESPACES_MAX * NAMESPACE_BYTES
LOGS_AT = SESSIONS_AT + holds.SESSIONS_MAX * SESSION_BYTES
LEDGER_BYTES = LOGS_AT + holds.SESSIONS_MAX * 2 * LOG_ENTRIES * 8

assert LOG_ENTRIES >= 2 * holds.HOLDS_MAX + LOG_FIRST
assert not LOGS_AT % PAGE_BYTES


def rows_bytes(segment_bytes: int) -> int:
    """Size of the file of a segment's rows: one for each of the smallest slots there are."""
    return -(-segment_bytes // PAGE_BYTES * ROW_BYTES // PAGE_BYTES) * PAGE_BYTES


class _Log:
    """Where one session's holds are written down."""

    __slots__ = ("count", "half", "place", "room")

    def __init__(self, place: int) -> None:
        self.place = place
        self.half = 0
        self.count = 0
        self.room = LOG_FIRST


class SegmentRows:
    """The rows of one segment, and where it is written down itself."""

    __slots__ = ("inode", "mapping", "numbers", "place", "raw", "rows_inode", "times")

    def __init__(self, place: int, inode: int, descriptor: int, size_bytes: int) -> None:
        """The descriptor stays its owner's."""
        self.place = place
        self.inode = inode
        self.rows_inode = os.fstat(descriptor).st_ino
        self.mapping = Mapping(descriptor, rows_bytes(size_bytes), writable=True)
        self.raw = self.mapping.bytes.data
        self.numbers, self.times = self.raw.cast("Q"), self.raw.cast("d")


class Ledger:
    """Writes; `ledger_reader.py` reads. Owned by the event loop."""

    def __init__(self, descriptor: int) -> None:
        """On memory of LEDGER_BYTES, new (`begin` comes first) or an earlier daemon's. The descriptor is closed."""
        try:
            self.mapping = Mapping(descriptor, LEDGER_BYTES, writable=True)
        finally:
            os.close(descriptor)
        self.raw = self.mapping.bytes.data
        self.numbers = self.raw.cast("Q")
        self.segments: dict[int, SegmentRows] = {}
        self.rows_for: Callable[[int, int], int] = lambda number, size_bytes: -1
        """Makes memory for the rows of a segment of so many bytes; answers a descriptor."""
        self.rows_gone: Callable[[int], None] = lambda number: None
        self._places = set(range(SEGMENTS_MAX))
        self._logs: dict[int, _Log] = {}
        self._log_places = set(range(holds.SESSIONS_MAX))
        self._ready_to = NAMESPACES_AT
        """Pages of namespaces are made up to here."""
        self._failed = ""

    def begin(self, size_bytes: int, page_bytes: int, pid: int, born: int, world: bytes) -> None:
        """The first words of a new ledger. Raises OSError where there is no memory."""
        self.mapping.populate(write=True, size_bytes=NAMESPACES_AT)
        self._populate_sessions()
        HEADER.pack_into(self.raw, 0, 0, VERSION, size_bytes, page_bytes, pid, born, 0, world)
        self.numbers[0] = MAGIC

    def take_over(self, pid: int, born: int, namespaces: int) -> None:
        """An earlier daemon's ledger is this one's from now on. Raises OSError where there is no memory."""
        self.mapping.populate(write=True, size_bytes=NAMESPACES_AT)
        self._populate_sessions()
        end = NAMESPACES_AT + namespaces * NAMESPACE_BYTES
        self._ready_to = NAMESPACES_AT + (end - NAMESPACES_AT) // PAGE_BYTES * PAGE_BYTES
        self.numbers[AT_PID >> 3] = pid
        self.numbers[AT_BORN >> 3] = born

    def _populate_sessions(self) -> None:
        self.mapping.populate(write=True, start=SESSIONS_AT, size_bytes=LOGS_AT - SESSIONS_AT)

    # -- who there is

    def tenant(self, tenant: Tenant) -> None:
        at, name = TENANTS_AT + tenant.id * TENANT_BYTES, tenant.name.encode()
        TENANT.pack_into(self.raw, at + 8, len(name), name)
        self.numbers[at >> 3] = SET

    def namespace(self, namespace: Namespace) -> None:
        at = NAMESPACES_AT + (namespace.id - 1) * NAMESPACE_BYTES
        end = -(-(at + NAMESPACE_BYTES) // PAGE_BYTES) * PAGE_BYTES
        if end > self._ready_to:
            try:
                self.mapping.populate(write=True, start=self._ready_to, size_bytes=end - self._ready_to)
            except OSError as e:
                raise ResourceExhausted(f"no memory to write down a further namespace (host.persist): {e}") from e
            self._ready_to = end
        if self.numbers[at >> 3]:
            self.numbers[(at >> 3) + 1] = namespace.block_tokens
            return
        label = namespace.label.encode()
        NAMESPACE.pack_into(
            self.raw,
            at + 8,
            namespace.block_tokens,
            namespace.tenant.id,
            namespace.block_bytes,
            namespace.digest,
            len(label),
            label,
        )
        self.numbers[at >> 3] = SET

    # -- segments

    def made(self, number: int, size_bytes: int, inode: int) -> None:
        """A segment is there, and nobody's. Where it cannot be written down, nothing in it outlives the daemon."""
        if not self._places:
            self._say(f"{SEGMENTS_MAX} segments are written down already")
            return
        try:
            descriptor = self.rows_for(number, size_bytes)
            try:
                rows = SegmentRows(next(iter(self._places)), inode, descriptor, size_bytes)
            finally:
                os.close(descriptor)
        except OSError as e:
            self._say(str(e))
            return
        self._places.discard(rows.place)
        self.segments[number] = rows
        self.numbers[AT_LAST >> 3] = max(self.numbers[AT_LAST >> 3], number)
        self._write_segment(rows, number, NOBODY, size_bytes, 0)

    def adopted(self, number: int, rows: SegmentRows, slots: int) -> None:
        """A segment of an earlier daemon's is this one's, as it was written down; `slots` where it is in a pool."""
        self._places.discard(rows.place)
        self.segments[number] = rows
        if slots:
            self._make_rows(number, rows, slots)

    def assigned(self, segment: int, tenant: int, block_bytes: int, slots: int) -> None:
        rows = self.segments.get(segment)
        if rows is None:
            return
        _, _, size_bytes, *_ = SEGMENT.unpack_from(self.raw, SEGMENTS_AT + rows.place * SEGMENT_BYTES + 8)
        if self._make_rows(segment, rows, slots):
            self._write_segment(rows, segment, tenant, size_bytes, block_bytes)

    def _make_rows(self, number: int, rows: SegmentRows, slots: int) -> bool:
        """Where there is no memory for them the segment is written down no more, for good: rows could not be struck."""
        size_bytes = -(-slots * ROW_BYTES // PAGE_BYTES) * PAGE_BYTES
        try:
            rows.mapping.populate(write=True, size_bytes=size_bytes)
        except OSError as e:
            self._say(str(e))
            self._strike(number)
            return False
        return True

    def _write_segment(self, rows: SegmentRows, number: int, tenant: int, size_bytes: int, block_bytes: int) -> None:
        at = SEGMENTS_AT + rows.place * SEGMENT_BYTES
        self.numbers[at >> 3] = 0
        SEGMENT.pack_into(self.raw, at + 8, number, tenant, size_bytes, block_bytes, rows.inode, rows.rows_inode)
        self.numbers[at >> 3] = SET

    def dropping(self, number: int) -> None:
        """The memory of a segment goes."""
        self._strike(number)
        self.rows_gone(number)

    def _strike(self, number: int) -> None:
        rows = self.segments.pop(number, None)
        if rows is not None:
            self.strike_segment(rows.place)
            self._places.add(rows.place)

    def strike_segment(self, place: int) -> None:
        """What is written down there is of no segment any more."""
        self.numbers[(SEGMENTS_AT + place * SEGMENT_BYTES) >> 3] = 0

    def _say(self, why: str) -> None:
        if why != self._failed:
            log.error("some memory will not outlive the daemon", reason=why)
        self._failed = why

    # -- blocks

    def sealed(
        self, ref: int, key: bytes, parent: bytes, namespace: int, depth: int, used: float, stored: float
    ) -> None:
        rows = self.segments.get(ref >> 32)
        if rows is None:
            return
        at = (ref & 0xFFFFFFFF) * ROW_BYTES
        _ROW.pack_into(rows.raw, at + 8, key, parent, namespace, depth, stored, used, 0.0, 0.0, 0)
        rows.numbers[at >> 3] = SET

    def gone(self, ref: int) -> None:
        rows = self.segments.get(ref >> 32)
        if rows is not None:
            rows.numbers[(ref & 0xFFFFFFFF) * ROW_BYTES >> 3] = 0

    def until(self, ref: int, mark: int, at: float) -> None:
        rows = self.segments.get(ref >> 32)
        if rows is not None:
            where = (ref & 0xFFFFFFFF) * ROW_BYTES + (AT_LIFE if mark == HINTED else AT_PIN)
            rows.times[where >> 3] = at

    def used(self, ref: int, at: float, hits: int) -> None:
        rows = self.segments.get(ref >> 32)
        if rows is not None:
            row = (ref & 0xFFFFFFFF) * ROW_BYTES
            rows.times[(row + AT_USED) >> 3] = at
            rows.numbers[(row + AT_HITS) >> 3] = hits

    # -- sessions

    def opened(self, session: Session) -> None:
        if not session.local or session.read_only:
            return  # what they hold ends with the daemon
        if not self._log_places:
            raise ResourceExhausted(f"{holds.SESSIONS_MAX} sessions are written down already")
        kept = _Log(self._log_places.pop())
        try:
            for half in (0, 1):
                self.mapping.populate(write=True, start=log_at(kept.place, half), size_bytes=LOG_FIRST * 8)
        except OSError as e:
            self._log_places.add(kept.place)
            raise ResourceExhausted(f"no memory to write down what a further session holds (host.persist): {e}") from e
        at, name = SESSIONS_AT + kept.place * SESSION_BYTES, session.client.encode()[:128]
        who = session.nonce, 0, session.born, session.pid, session.tenant.id
        self.numbers[at >> 3] = 0
        SESSION.pack_into(self.raw, at + 8, 0, *who, len(name), name)
        self.numbers[at >> 3] = SET
        self._logs[session.id] = kept

    def kept(self, session: Session, place: int) -> None:
        """A session of an earlier daemon's: what it holds is written down there already, and is written anew."""
        self._log_places.discard(place)
        kept = self._logs[session.id] = _Log(place)
        word = self.numbers[(SESSIONS_AT + place * SESSION_BYTES + AT_LOG) >> 3]
        kept.half, kept.count = word >> HALF_SHIFT, word & (1 << HALF_SHIFT) - 1
        kept.room = max(LOG_FIRST, 1 << (kept.count - 1).bit_length()) if kept.count else LOG_FIRST
        live = session.leases + len(session.granted)
        while kept.room < 2 * live + LOG_FIRST:
            kept.room *= 2
        for half in (0, 1):
            self.mapping.populate(write=True, start=log_at(kept.place, half), size_bytes=kept.room * 8)
        self._rewrite(kept, session)

    def succeeds(self, heir: Session, nonce: int) -> None:
        kept = self._logs.get(heir.id)
        if kept is not None:
            self.numbers[(SESSIONS_AT + kept.place * SESSION_BYTES + AT_NONCE_BEFORE) >> 3] = nonce

    def has_room(self, session: Session, more: int) -> bool:
        kept = self._logs.get(session.id)
        if kept is None:
            return True
        wanted = 2 * (session.leases + len(session.granted) + more) + LOG_FIRST // 4
        if wanted <= kept.room:
            return True
        room = min(1 << (wanted - 1).bit_length(), LOG_ENTRIES)
        try:
            for half in (0, 1):
                self.mapping.populate(write=True, start=log_at(kept.place, half), size_bytes=room * 8)
        except OSError as e:
            self._say(str(e))
            return False
        kept.room = room
        return True

    def holds(self, session: Session, kind: int, refs: Sequence[int]) -> None:
        kept = self._logs.get(session.id)
        if kept is None:
            return
        if not session.leases and not session.granted:
            kept.count = 0
        elif kept.count + len(refs) > kept.room:
            self._rewrite(kept, session)
            return
        else:
            self._write(kept, kept.count, kind, refs)
            kept.count += len(refs)
        self._count(kept)

    def closed(self, session: Session) -> None:
        kept = self._logs.pop(session.id, None)
        if kept is not None:
            self.strike_session(kept.place)
            self._log_places.add(kept.place)

    def strike_session(self, place: int) -> None:
        """What is written down there is of no session any more."""
        self.numbers[(SESSIONS_AT + place * SESSION_BYTES) >> 3] = 0

    def _rewrite(self, kept: _Log, session: Session) -> None:
        """Only what there is, in the half that is not in use; then that one counts."""
        half, count = kept.half, 0
        kept.half = 1 - half
        leased = [ref for ref, times in session.leased.items() for _ in range(times)]
        for kind, refs in ((GRANT, list(session.granted)), (LEASE, leased)):
            self._write(kept, count, kind, refs)
            count += len(refs)
        kept.count = count
        self._count(kept)

    def _write(self, kept: _Log, at: int, kind: int, refs: Sequence[int]) -> None:
        first = (log_at(kept.place, kept.half) >> 3) + at
        tag = kind << KIND_SHIFT
        if len(refs) == 1:
            self.numbers[first] = tag | refs[0]
        else:
            self.numbers[first : first + len(refs)] = memoryview(array("Q", [tag | ref for ref in refs]))

    def _count(self, kept: _Log) -> None:
        word = (SESSIONS_AT + kept.place * SESSION_BYTES + AT_LOG) >> 3
        self.numbers[word] = kept.half << HALF_SHIFT | kept.count


def log_at(place: int, half: int) -> int:
    """Where a half of a session's log begins."""
    return LOGS_AT + (2 * place + half) * LOG_ENTRIES * 8
