"""The ledger: private memory in which the daemon writes down what the next one needs to go on. No client gets it.

One file for who there is and who holds what, and one for each segment with a row for each of its
slots. This module is the one place where their bytes are defined; VERSION is raised with every
change, and another version is a clean start.

A process can be killed between any two stores, and what it had stored until then is there: the
memory is the kernel's, and stores of one process are seen in their order. So an entry is a mark
and fields: the mark is one word, stored last when the entry comes and first (0) when it goes.
An entry whose mark is there is whole. What a session holds is a log whose length is one word,
stored after what it counts; it is written anew, in the other half, before it is full.

Every page is made before it is stored to or read: on a tmpfs that is full, touching a new one is
the end of the process (SIGBUS). Where there is no room for the rows of a segment, it is struck out
before anything happens in it that would be missing: what is believed is always whole. It is written
down again, from the beginning, when there is room (`begin_again`, `finish`).

    ledger    header | tenants | segments | namespaces | sessions | logs of sessions, two halves each
    rows-N    rows of segment N, by slot
"""

import os
import struct
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvstore.core import holds
from kvstore.core.block import HINTED
from kvstore.core.holds import Namespace, Session, Tenant
from kvstore.core.ledger import GRANT, LEASE
from kvstore.core.segments import PAGE_BYTES
from kvstore.logs import logger
from kvstored.mapping import Mapping
from kvstored.v1 import KEY_BYTES
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
NAMESPACES_FIRST_BYTES = 64 * PAGE_BYTES
"""Of so many there are pages from the beginning."""

NAMESPACE = struct.Struct("<QQQ32sI256s")
"""Tokens of a block (which may come later), tenant, bytes of a block, digest, length of the label, label."""
AT_DIGEST = 32

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

FIRST_BYTES = NAMESPACES_AT + NAMESPACES_FIRST_BYTES + LOGS_AT - SESSIONS_AT + holds.SESSIONS_MAX * 2 * LOG_FIRST * 8
"""Of a ledger that has just begun."""

assert LOG_ENTRIES >= 2 * holds.HOLDS_MAX + LOG_FIRST
assert not LOGS_AT % PAGE_BYTES


def rows_bytes(segment_bytes: int) -> int:
    """Size of the file of a segment's rows: one for each of the smallest slots there are."""
    return -(-segment_bytes // PAGE_BYTES * ROW_BYTES // PAGE_BYTES) * PAGE_BYTES


def room_bytes(slab_bytes: int) -> int:
    """Memory that a ledger of such a slab takes: rows of the smallest slots, and what `begin` makes.

    Not in it: more than some 600 namespaces, and logs of sessions with more than some 200 holds. Where they have no
    room, a further namespace or hold is refused.
    """
    return FIRST_BYTES + rows_bytes(slab_bytes)


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

    __slots__ = ("inode", "mapping", "numbers", "place", "raw", "rows_inode", "size_bytes", "times")

    def __init__(self, place: int, inode: int, descriptor: int, size_bytes: int) -> None:
        """The descriptor stays its owner's."""
        self.place = place
        self.inode = inode
        self.size_bytes = size_bytes
        self.rows_inode = os.fstat(descriptor).st_ino
        self.mapping = Mapping(descriptor, rows_bytes(size_bytes), writable=True)
        self.raw = self.mapping.bytes.data
        self.numbers, self.times = self.raw.cast("Q"), self.raw.cast("d")

    def make(self, slots: int) -> None:
        """Makes the pages of so many rows. Raises OSError."""
        self.mapping.populate(write=True, size_bytes=-(-slots * ROW_BYTES // PAGE_BYTES) * PAGE_BYTES)


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
        self.unwritten: dict[int, tuple[int, int]] = {}
        """Segments that serve, and of which nothing would outlive the daemon -> bytes, inode."""
        self._wanted = (0, 0)
        """Start and bytes of what was refused to a client for want of memory; none while it is (0, 0)."""
        self._places = set(range(SEGMENTS_MAX))
        self._logs: dict[int, _Log] = {}
        self._log_places = set(range(holds.SESSIONS_MAX))
        self._ready_to = NAMESPACES_AT
        """Pages of namespaces are made up to here."""
        self._failed = ""

    def begin(self, size_bytes: int, page_bytes: int, pid: int, born: int, world: bytes) -> None:
        """The first words of a new ledger. Raises OSError where there is no memory."""
        self._ready_to = NAMESPACES_AT + NAMESPACES_FIRST_BYTES
        self.mapping.populate(write=True, size_bytes=self._ready_to)
        self.mapping.populate(write=True, start=SESSIONS_AT, size_bytes=LOGS_AT - SESSIONS_AT)
        self._populate_logs()
        HEADER.pack_into(self.raw, 0, 0, VERSION, size_bytes, page_bytes, pid, born, 0, world)
        self.numbers[0] = MAGIC

    def take_over(self, pid: int, born: int, namespaces: int) -> None:
        """An earlier daemon's ledger is this one's from now on. Raises OSError where there is no memory."""
        self.mapping.populate(write=True, size_bytes=NAMESPACES_AT)
        self.mapping.populate(write=True, start=SESSIONS_AT, size_bytes=LOGS_AT - SESSIONS_AT)
        with suppress(OSError):  # of one of an earlier release, they may not be there: `opened` sees to it
            self._populate_logs()
        end = NAMESPACES_AT + namespaces * NAMESPACE_BYTES
        self._ready_to = NAMESPACES_AT + (end - NAMESPACES_AT) // PAGE_BYTES * PAGE_BYTES
        self.numbers[AT_PID >> 3] = pid
        self.numbers[AT_BORN >> 3] = born

    def _populate_logs(self) -> None:
        """Of all sessions that may come (8 MiB): none is refused because others have filled the tmpfs."""
        for place in range(holds.SESSIONS_MAX):
            for half in (0, 1):
                self.mapping.populate(write=True, start=log_at(place, half), size_bytes=LOG_FIRST * 8)

    @property
    def trouble(self) -> str:
        """Why not all that changes now would be there for the next daemon, or why clients are refused; "": neither."""
        if self.unwritten:
            lost = sum(size_bytes for size_bytes, _ in self.unwritten.values())
            return f"{len(self.unwritten)} segments with {lost >> 20} MiB would not outlive this daemon: {self._failed}"
        return f"further holds, or namespaces, are refused: {self._failed}" if self._wanted[1] else ""

    def try_again(self) -> None:
        """Whether there is memory by now for what was refused to a client."""
        start, size_bytes = self._wanted
        try:
            self.mapping.populate(write=True, start=start, size_bytes=size_bytes)
        except OSError as e:
            self._say(e.strerror or str(e))
            return
        self._wanted = 0, 0
        self._well()

    def _refuse(self, start: int, size_bytes: int, error: OSError) -> None:
        self._wanted = start, size_bytes
        self._say(error.strerror or str(error), "what a client asks for cannot be written down, and is refused")

    def _well(self) -> None:
        if self._failed and not self.unwritten and not self._wanted[1]:
            log.info("all memory will outlive the daemon")
            self._failed = ""

    # -- who there is

    def tenant(self, tenant: Tenant) -> None:
        at, name = TENANTS_AT + tenant.id * TENANT_BYTES, tenant.name.encode()
        TENANT.pack_into(self.raw, at + 8, len(name), name)
        self.numbers[at >> 3] = SET

    def namespace(self, namespace: Namespace) -> None:
        """A number may be another's by now: what it was of had no blocks, so half of each, after a kill, is nothing."""
        at = NAMESPACES_AT + (namespace.id - 1) * NAMESPACE_BYTES
        end = -(-(at + NAMESPACE_BYTES) // PAGE_BYTES) * PAGE_BYTES
        if end > self._ready_to:
            try:
                self.mapping.populate(write=True, start=self._ready_to, size_bytes=end - self._ready_to)
            except OSError as e:
                self._refuse(self._ready_to, end - self._ready_to, e)
                raise ResourceExhausted(f"a further namespace cannot be written down: {e.strerror}") from e
            self._ready_to = end
        if self.numbers[at >> 3] and self.raw[at + AT_DIGEST : at + AT_DIGEST + KEY_BYTES] == namespace.digest:
            self.numbers[(at >> 3) + 1] = namespace.block_tokens
            return
        label = namespace.label.encode()
        numbers = namespace.block_tokens, namespace.tenant.id, namespace.block_bytes
        NAMESPACE.pack_into(self.raw, at + 8, *numbers, namespace.digest, len(label), label)
        self.numbers[at >> 3] = SET

    # -- segments

    def made(self, number: int, size_bytes: int, inode: int) -> None:
        """A segment is there, and nobody's. Where it cannot be written down, nothing in it outlives the daemon."""
        # Ahead of all: a number that was had is never had again, also where nothing else is known of it.
        self.numbers[AT_LAST >> 3] = max(self.numbers[AT_LAST >> 3], number)
        self.unwritten[number] = size_bytes, inode
        if self.begin_again(number, 0):
            self.finish(number, NOBODY, 0)

    def begin_again(self, number: int, slots: int) -> bool:
        """Rows for a segment that is not written down. They are kept from now on, and believed after `finish`."""
        size_bytes, inode = self.unwritten[number]
        if not self._places:
            self._say(f"{SEGMENTS_MAX} segments are written down already")
            return False
        try:
            descriptor = self.rows_for(number, size_bytes)
        except OSError as e:
            self._say(e.strerror or str(e))
            return False
        try:
            rows = SegmentRows(next(iter(self._places)), inode, descriptor, size_bytes)
            rows.make(slots)
        except OSError as e:
            self._say(e.strerror or str(e))
            self.rows_gone(number)
            return False
        finally:
            os.close(descriptor)
        self._places.discard(rows.place)
        self.segments[number] = rows
        return True

    def finish(self, number: int, tenant: int, block_bytes: int) -> None:
        """All that is in the segment is in its rows."""
        del self.unwritten[number]
        rows = self.segments[number]
        self._write_segment(rows, number, tenant, rows.size_bytes, block_bytes)
        self._well()

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
        if self._make_rows(segment, rows, slots):
            self._write_segment(rows, segment, tenant, rows.size_bytes, block_bytes)
            if self.unwritten.pop(segment, None):  # it was being written again, and is empty
                self._well()

    def _make_rows(self, number: int, rows: SegmentRows, slots: int) -> bool:
        """Where there is no memory for them the segment is written down no more: rows could not be struck."""
        try:
            rows.make(slots)
        except OSError as e:
            self._say(e.strerror or str(e))
            self._strike(number)
            self.rows_gone(number)
            self.unwritten[number] = rows.size_bytes, rows.inode
            return False
        return True

    def _write_segment(self, rows: SegmentRows, number: int, tenant: int, size_bytes: int, block_bytes: int) -> None:
        at = SEGMENTS_AT + rows.place * SEGMENT_BYTES
        self.numbers[at >> 3] = 0
        SEGMENT.pack_into(self.raw, at + 8, number, tenant, size_bytes, block_bytes, rows.inode, rows.rows_inode)
        self.numbers[at >> 3] = SET

    def dropping(self, number: int) -> None:
        """The memory of a segment goes."""
        self.unwritten.pop(number, None)
        if number in self.segments:
            self._strike(number)
            self.rows_gone(number)
        self._well()

    def _strike(self, number: int) -> None:
        rows = self.segments.pop(number)
        self.strike_segment(rows.place)
        self._places.add(rows.place)

    def strike_segment(self, place: int) -> None:
        """What is written down there is of no segment any more."""
        self.numbers[(SEGMENTS_AT + place * SEGMENT_BYTES) >> 3] = 0

    def _say(self, why: str, what: str = "some memory will not outlive the daemon") -> None:
        if why != self._failed:
            log.error(what, reason=why)
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
            self._refuse(log_at(kept.place, half), LOG_FIRST * 8, e)
            raise ResourceExhausted(f"what a further session holds cannot be written down: {e.strerror}") from e
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
        room = kept.room  # there are pages for so much: it was a power of two, and held all that is counted
        live = session.leases + len(session.granted)
        while room < 2 * live + LOG_FIRST:
            room *= 2
        self._grow_log(kept, room)
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
        return self._grow_log(kept, min(1 << (wanted - 1).bit_length(), LOG_ENTRIES))

    def _grow_log(self, kept: _Log, room: int) -> bool:
        """False where there is no memory for it: what there is serves as before."""
        try:
            for half in (0, 1):
                self.mapping.populate(write=True, start=log_at(kept.place, half), size_bytes=room * 8)
        except OSError as e:
            self._refuse(log_at(kept.place, half), room * 8, e)
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
