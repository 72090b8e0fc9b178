"""The catalogue: RocksDB (rocksdict), which block is where and what its segments are.

Rules:
- The binding holds the GIL in a write, so no write may wait: `no_slowdown` makes RocksDB
  refuse where it would stall, and the wait is here, without the GIL. `flush_wal`, which
  waits for the disk, releases it.
- The binding's iterators over items end without an error where a file is corrupt. That all
  records were seen is known by the key after the last of them (see format.py).
- RocksDB goes read-only after an error of the disk, and the binding cannot resume it:
  `probe` opens it again. For that nobody may be inside, which `_Gate` sees to.
- Its write-ahead log keeps the order of all writes: whatever is there after a crash, so is
  everything written before it. One log serves payload and records of the layout "rocksdb"
  (blobs.py), so a record that is there has its payload.
"""

import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from rocksdict import ColumnFamily, Rdict, WriteBatch, WriteOptions

from kvstore.tiers.ssd.budget import SIZE_BYTES, budget_of
from kvstore.tiers.ssd.faults import CatalogueError, StalledError, Unreadable, fault, is_gone, is_no_room
from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import (
    FORMAT_VERSION,
    NAMESPACE_KIND,
    PACKED_VERSION,
    PROBE_KEY,
    READABLE_VERSIONS,
    RECORD_KIND,
    SEGMENT_KIND,
    VERSION_KEY,
    NamespaceRow,
    Record,
    SegmentRow,
    pack_version,
    place_of,
    unpack_namespace,
    unpack_record,
    unpack_segment,
    unpack_version,
    with_use,
)
from kvstore.tiers.ssd.options import PAYLOAD_FAMILY, options, payload_options

STALL_WAIT_S = 30.0
"""How long a write waits for RocksDB to catch up."""

STALL_STEP_S = 0.005
REOPEN_WAIT_S = 30.0
"""How long opening again waits for calls that are inside, and calls for opening."""

RECORDS_BATCH = 4096
CURRENT_NAME, LOG_SUFFIX = "CURRENT", ".log"

_T = TypeVar("_T")


class Use(NamedTuple):
    """A record's last use and its hits, as they are now."""

    db_key: bytes
    used: float
    hits: int


class _Gate:
    """Any number inside, or one who has it to itself."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._alone = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._alone, REOPEN_WAIT_S):
                raise CatalogueError(f"the catalogue is being opened for more than {REOPEN_WAIT_S:.0f} s")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._alone and not self._inside, REOPEN_WAIT_S):
                raise CatalogueError(f"calls on the catalogue do not end within {REOPEN_WAIT_S:.0f} s")
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


class Catalogue:
    """One open catalogue. Safe in any thread; every call may raise CatalogueError or Unreadable."""

    def __init__(
        self,
        path: Path,
        layer: FileLayer,
        *,
        payload: bool = False,
        size_bytes: int = SIZE_BYTES,
        make_way: Callable[[], bool] = lambda: False,
    ) -> None:
        """Opens it, or makes one where nothing is; `payload`: with blocks in it. Raises OSError too.

        `size_bytes` is what the disk may be taken of. `make_way` is asked where there is no room
        to open it, and answers whether there is more now.
        """
        self._budget = budget_of(size_bytes)
        self._make_way = make_way
        self.path = path
        self._with_payload = payload
        self._layer = layer
        self._gate = _Gate()
        self._order = threading.Lock()
        """Held by whoever changes a record by what he read of it, and by everyone else who changes any."""
        self._write_options = WriteOptions()
        self._write_options.no_slowdown = True
        self.is_new = False
        """Nothing was in it."""
        self._db: Rdict | None = None
        self._payload: Rdict | None = None
        self._payload_handle: ColumnFamily | None = None
        self._open()
        try:
            self._check_version()
        except BaseException:
            with suppress(CatalogueError, Unreadable):
                self.close()
            raise

    def _open(self) -> None:
        try:
            self._open_once()
        except (CatalogueError, OSError) as e:
            if not is_no_room(e) or not self._make_way():
                raise
            self._open_once()

    def _open_once(self) -> None:
        names = self._layer.names(self.path)
        if not names:
            # With the mode that we want; RocksDB would make it by the umask.
            if not self.path.is_dir():
                self._layer.make_directory(self.path)
        elif CURRENT_NAME not in names:
            # RocksDB would begin a new one here, and delete the files of the old one.
            raise Unreadable(f"{self.path} has no file {CURRENT_NAME}")
        self._meet_hang()
        try:
            if self._with_payload:
                families = {PAYLOAD_FAMILY: payload_options(self._budget)}
                self._db = Rdict(str(self.path), options(self._budget, payload=True), families)
                self._payload = self._db.get_column_family(PAYLOAD_FAMILY)
                self._payload_handle = self._db.get_column_family_handle(PAYLOAD_FAMILY)
            else:
                self._db = Rdict(str(self.path), options(self._budget))
        except Exception as e:
            raise fault(e, opening=True) from e

    def _check_version(self) -> None:
        own = PACKED_VERSION if self._with_payload else FORMAT_VERSION
        version = self._call(lambda db: db.get(VERSION_KEY))
        if version is None:
            if self._call(lambda db: next(iter(db.keys()), None)) is not None:
                raise Unreadable(f"{self.path} has rows and no format version")
            self.write({VERSION_KEY: pack_version(own)})
            self.is_new = True
            return
        try:
            found = unpack_version(version)
        except struct.error as e:
            raise Unreadable(f"{self.path} has {version!r} as its format version") from e
        if found not in READABLE_VERSIONS:
            raise Unreadable(f"{self.path} has format version {found}; this release reads {READABLE_VERSIONS}")
        if found < own:
            self.write({VERSION_KEY: pack_version(own)})

    # -- what is there

    def namespaces(self) -> list[NamespaceRow]:
        """By number."""
        return [_parsed(unpack_namespace, value) for value in self._call(lambda db: _rows(db, NAMESPACE_KIND))]

    def segments(self) -> list[SegmentRow]:
        """By number."""
        return [_parsed(unpack_segment, value) for value in self._call(lambda db: _rows(db, SEGMENT_KIND))]

    def records(self, batch: int = RECORDS_BATCH) -> Iterator[list[Record]]:
        """All records in lists of at most `batch`, by namespace and key.

        Each list is as of the moment at which it is made: nothing is held between two, and
        what is written meanwhile is in a later one or is not.
        """
        after: bytes | None = RECORD_KIND
        while after is not None:
            found, after = self._call(partial(_next_records, start=after, batch=batch))
            if found:
                yield found

    # -- changes

    def write(self, puts: Mapping[bytes, bytes], deletes: Collection[bytes] = ()) -> None:
        """Deletes, then puts, as one batch that is on the disk afterwards."""
        with self._gate.inside():
            with self._order:
                self._apply(puts, deletes)
            self._inside(lambda db: db.flush_wal(True))

    def delete(self, keys: Collection[bytes]) -> None:
        """Deletes without waiting for the disk."""
        with self._gate.inside(), self._order:
            self._apply({}, keys)

    def unindex(self, db_key: bytes, segment: int, slot: int) -> None:
        """Deletes a record if it is still about this slot, without waiting for the disk.

        A block that was written again elsewhere meanwhile keeps its new record.
        """
        with self._gate.inside(), self._order:
            value = self._get([db_key])[0]
            if value is not None and _place(value) == (segment, slot):
                self._apply({}, (db_key,))

    def set_uses(self, uses: Sequence[Use]) -> None:
        """Writes last use and hits into the records that are still there, without waiting for the disk."""
        with self._gate.inside(), self._order:
            found = self._get([use.db_key for use in uses])
            puts = {
                use.db_key: with_use(value, use.used, use.hits)
                for use, value in zip(uses, found, strict=True)
                if value is not None
            }
            self._apply(puts, ())

    # -- payload

    def put_payload(self, key: bytes, value: bytes) -> None:
        """Puts one without waiting for the disk: it is there if anything is that is written later."""
        with self._gate.inside():
            self._apply_batch(lambda batch: batch.put(key, value, self._payload_handle))

    def payload(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """What was put under these keys. Unreadable means these, not the whole."""
        asked: Any = list(keys)
        try:
            return cast("list[bytes | None]", self._call(lambda _: self._of_payload().get(asked)))
        except CatalogueError as e:
            # RocksDB opens without a blob file that is gone: to be asked again would not bring it back.
            if is_gone(str(e)):
                raise Unreadable(str(e)) from e
            raise

    def drop_payload(self, begin: bytes, end: bytes) -> None:
        """Deletes all from `begin` to before `end`, without waiting for the disk."""
        with self._gate.inside():
            self._apply_batch(lambda batch: batch.delete_range(begin, end, self._payload_handle))

    def shorten_log(self) -> None:
        """Writes out the records that only the log has, and so keep it.

        RocksDB is to do so by itself when its log is long; with a second column family that is written far more it was
        seen not to, for good.
        """
        self._call(lambda db: db.flush(True))

    def delete_payload(self, keys: Sequence[bytes]) -> None:
        """Deletes these, without waiting for the disk."""

        def fill(batch: WriteBatch) -> None:
            for key in keys:
                batch.delete(key, self._payload_handle)

        with self._gate.inside():
            self._apply_batch(fill)

    def compact_payload(self, compact: Callable[[Rdict], None]) -> None:
        """What RocksDB does with all of it; `close` waits for its end."""
        self._call(lambda _: compact(self._of_payload()))

    def payload_from(self, key: bytes) -> bytes | None:
        """The first key of payload that is not before `key`."""
        found: Any = self._call(lambda _: next(iter(self._of_payload().keys(from_key=key)), None))
        return cast("bytes | None", found)

    def _of_payload(self) -> Rdict:
        assert self._payload is not None, "a catalogue without payload is asked for some"
        return self._payload

    # -- health

    def probe(self) -> None:
        """Writes something, waits for the disk and reads it back; opens the catalogue again where that fails."""
        try:
            self._probe()
        except CatalogueError:
            with self._gate.alone():
                # One that is broken says so again as it is closed; what it had taken is in its log.
                with suppress(CatalogueError, Unreadable):
                    self._close()
                self._open()
            self._probe()

    def physical_bytes(self) -> int:
        """What it takes on the disk. Raises OSError."""
        return self._layer.physical_bytes(self.path)

    def log_bytes(self) -> int:
        """Of that, its log: what is in it takes the disk once more when it is written out. Raises OSError."""
        logs = (name for name in self._layer.names(self.path) if name.endswith(LOG_SUFFIX))
        return sum(self._layer.physical_bytes(self.path / name) for name in logs)

    def close(self) -> None:
        """Writes out what is in memory and closes; may be called twice.

        What was acknowledged is on the disk also where this raises.
        """
        with self._gate.alone():
            self._close()

    @property
    def is_open(self) -> bool:
        """Whether RocksDB still has it: nobody may open or move it then."""
        return self._db is not None

    def _probe(self) -> None:
        said = os.urandom(16)
        self.write({PROBE_KEY: said})
        if self._call(lambda db: db.get(PROBE_KEY)) != said:
            raise CatalogueError("what was written to the catalogue as a probe came back as something else")

    def _close(self) -> None:
        db, self._db = self._db, None
        payload, self._payload, self._payload_handle = self._payload, None, None
        failed: Exception | None = None
        # Both in any case: either keeps RocksDB's lock, and it could not be opened again.
        for one in (payload, db):
            try:
                if one is not None:
                    one.close()
            except Exception as e:  # noqa: BLE001 (raised below)
                failed = failed or e
        if failed is not None:
            raise fault(failed) from failed

    # -- the binding

    def _call(self, call: Callable[[Rdict], _T]) -> _T:
        with self._gate.inside():
            return self._inside(call)

    def _inside(self, call: Callable[[Rdict], _T]) -> _T:
        if self._db is None:
            raise CatalogueError("the catalogue is closed")
        try:
            return call(self._db)
        except (Unreadable, CatalogueError):
            raise
        except Exception as e:
            raise fault(e) from e

    def _get(self, keys: list[bytes]) -> list[bytes | None]:
        # As a list, for which the binding releases the GIL.
        asked: Any = keys
        return cast("list[bytes | None]", self._inside(lambda db: db.get(asked)))

    def _apply(self, puts: Mapping[bytes, bytes], deletes: Collection[bytes]) -> None:
        def fill(batch: WriteBatch) -> None:
            for key in deletes:
                batch.delete(key)
            for key, value in puts.items():
                batch.put(key, value)

        self._apply_batch(fill)

    def _apply_batch(self, fill: Callable[[WriteBatch], None]) -> None:
        until = time.monotonic() + STALL_WAIT_S
        while True:
            # A new one each time: the binding takes a batch's content also where RocksDB refuses it.
            batch = WriteBatch(raw_mode=True)
            fill(batch)
            try:
                self._write_batch(batch)
            except StalledError as e:
                if time.monotonic() > until:
                    raise CatalogueError(f"RocksDB does not catch up within {STALL_WAIT_S:.0f} s: {e}") from e
                time.sleep(STALL_STEP_S)
            else:
                return

    def _write_batch(self, batch: WriteBatch) -> None:
        self._meet_hang()
        self._inside(lambda db: db.write(batch, self._write_options))

    def _meet_hang(self) -> None:
        """Waits for a file system that hangs here, without the GIL: inside RocksDB nobody would go on meanwhile."""
        with suppress(OSError):  # RocksDB says what is wrong
            os.utime(self.path)


def _next_records(db: Rdict, start: bytes, batch: int) -> tuple[list[Record], bytes | None]:
    """Records from the key `start` on, and the key to go on with; None after the last."""
    rows: list[tuple[Any, bytes]] = list(islice(db.items(from_key=start), batch + 1))
    following: bytes | None = None
    if rows and rows[-1][0][:1] != RECORD_KIND:
        rows = [row for row in rows if row[0][:1] == RECORD_KIND]
    elif len(rows) > batch:
        following = rows.pop()[0]
    else:
        raise _why_ended(db, rows[-1][0] if rows else start)
    try:
        return [unpack_record(key, value) for key, value in rows], following
    except struct.error as e:
        raise Unreadable(f"a record that is none: {e}") from e


def _rows(db: Rdict, kind: bytes) -> list[bytes]:
    """The values of all rows of a kind that is not the last."""
    values: list[bytes] = []
    at: Any = kind
    for key, value in db.items(from_key=kind):
        at = key
        if at[:1] != kind:
            return values
        values.append(value)
    raise _why_ended(db, at)


def _why_ended(db: Rdict, at: bytes) -> Exception:
    """Why an iteration ended before the last key."""
    iterator = db.iter()
    iterator.seek(at)
    while iterator.valid():
        iterator.next()
    try:
        iterator.status()
    except Exception as e:  # noqa: BLE001 (what it says is the answer)
        return fault(e, opening=True)
    return Unreadable(f"its rows end after {at.hex()}, before the format version")


def _place(value: bytes) -> tuple[int, int]:
    try:
        return place_of(value)
    except struct.error as e:
        raise Unreadable(f"a record that is none: {e}") from e


def _parsed(parse: Callable[[bytes], _T], value: bytes) -> _T:
    try:
        return parse(value)
    except (ValueError, KeyError, TypeError) as e:
        raise Unreadable(f"a row that is none: {value[:200]!r}: {e}") from e
