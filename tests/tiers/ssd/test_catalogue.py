"""The catalogue: what is written is there, what cannot be read says so, and a full disk heals."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.tiers.ssd import catalogue as module
from kvstore.tiers.ssd.catalogue import Catalogue, Use
from kvstore.tiers.ssd.faults import CatalogueError, Unreadable
from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import (
    VERSION_KEY,
    NamespaceRow,
    Record,
    SegmentRow,
    pack_record,
    pack_row,
    pack_version,
    record_key,
)
from tests.conftest import eventually
from tests.tiers.ssd.rig import fill, key_of, record_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalogue"


@pytest.fixture
def catalogue(path: Path) -> Iterator[Catalogue]:
    made = Catalogue(path, FileLayer())
    yield made
    made.close()


def put(catalogue: Catalogue, *records: Record) -> None:
    catalogue.write(dict(map(pack_record, records)))


def all_of(catalogue: Catalogue, batch: int = 4096) -> list[Record]:
    return [record for found in catalogue.records(batch) for record in found]


def many(path: Path, count: int = 20_000) -> None:
    """A closed catalogue with so many records that they fill several blocks of a table."""
    made = Catalogue(path, FileLayer())
    put(made, *(record_of(n, n % 100) for n in range(count)))
    made.close()


def reopened(path: Path) -> list[Record]:
    found = Catalogue(path, FileLayer())
    try:
        return all_of(found)
    finally:
        found.close()


def test_rows_and_records_come_back(catalogue: Catalogue, path: Path) -> None:
    rows: list[NamespaceRow | SegmentRow] = [
        NamespaceRow(1, "t", b"d" * 32, 60_000, 16, "model"),
        SegmentRow(1, 4096, 4096, "t"),
        SegmentRow(2, 8, 0, ""),
    ]
    records = [record_of(n, n, parent=key_of(n - 1) if n else b"", depth=n) for n in range(10)]
    catalogue.write(dict(map(pack_row, rows)))
    put(catalogue, *records)
    catalogue.close()
    again = Catalogue(path, FileLayer())
    assert [*again.namespaces(), *again.segments()] == rows
    assert sorted(all_of(again), key=lambda record: record.depth) == records
    again.close()


def test_a_new_catalogue_is_empty_and_private(catalogue: Catalogue, path: Path) -> None:
    assert (catalogue.namespaces(), catalogue.segments(), all_of(catalogue)) == ([], [], [])
    assert path.stat().st_mode & 0o777 == 0o700
    assert 0 < catalogue.physical_bytes() < 1 << 20


@pytest.mark.parametrize("batch", [1, 3, 9, 10, 11, 4096])
def test_all_records_come_once_whatever_the_batch(catalogue: Catalogue, batch: int) -> None:
    records = [record_of(n, n) for n in range(10)]
    put(catalogue, *records)
    assert sorted(all_of(catalogue, batch)) == sorted(records)
    assert max(map(len, catalogue.records(batch))) <= batch


def test_records_can_be_written_and_deleted_while_they_are_read(catalogue: Catalogue) -> None:
    put(catalogue, *(record_of(n, n) for n in range(10)))
    seen = catalogue.records(4)
    first = next(seen)
    catalogue.delete([record_key(1, record.key) for record in first])
    put(catalogue, record_of(100, 1))
    assert {record.sequence for batch in seen for record in batch} >= set(range(10)) - {r.sequence for r in first}


def test_deletes_come_before_puts(catalogue: Catalogue) -> None:
    key, value = pack_record(record_of(1, 1))
    catalogue.write({key: value}, [key])
    assert all_of(catalogue) == [record_of(1, 1)]


def test_a_record_is_unindexed_only_while_it_is_about_that_slot(catalogue: Catalogue) -> None:
    """A block may have been written again elsewhere by the time its old slot is taken."""
    put(catalogue, record_of(1, 5))
    for segment, slot in ((1, 4), (2, 5)):
        catalogue.unindex(record_key(1, key_of(1)), segment, slot)
    assert len(all_of(catalogue)) == 1
    catalogue.unindex(record_key(1, key_of(1)), 1, 5)
    assert all_of(catalogue) == []
    catalogue.unindex(record_key(1, key_of(1)), 1, 5)


def test_uses_are_written_into_records_that_are_there(catalogue: Catalogue) -> None:
    put(catalogue, record_of(1, 1), record_of(2, 2))
    catalogue.set_uses([Use(record_key(1, key_of(1)), 5000.5, 7), Use(record_key(1, key_of(9)), 1.0, 1)])
    assert sorted(all_of(catalogue)) == [record_of(1, 1, used=5000.5, hits=7), record_of(2, 2)]


@pytest.mark.parametrize("content", ["garbage", "MANIFEST-999999\n", ""])
def test_a_corrupt_current_is_unreadable(path: Path, content: str) -> None:
    many(path, 10)
    (path / "CURRENT").write_text(content)
    with pytest.raises(Unreadable):
        reopened(path)


@pytest.mark.parametrize("pattern", ["CURRENT", "MANIFEST-*", "*.sst"])
def test_a_missing_file_is_unreadable_and_the_others_stay(path: Path, pattern: str) -> None:
    """Without CURRENT, RocksDB alone would begin anew and delete the tables."""
    many(path)
    next(path.glob(pattern)).unlink()
    before = sorted(p.name for p in path.glob("*.sst"))
    with pytest.raises(Unreadable):
        reopened(path)
    assert sorted(p.name for p in path.glob("*.sst")) == before


@pytest.mark.parametrize("pattern", ["MANIFEST-*", "*.sst"])
def test_a_corrupt_file_is_unreadable(path: Path, pattern: str) -> None:
    """Of a table the binding's iterators would give what is before the fault, and end as if that were all."""
    many(path)
    corrupt(next(path.glob(pattern)))
    with pytest.raises(Unreadable, match="Corruption"):
        reopened(path)


def corrupt(file: Path) -> None:
    """Writes over the middle of a file."""
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(os.urandom(64))


@pytest.mark.parametrize("version", [pack_version(0), pack_version(3), b"", b"version 1"])
def test_another_format_version_is_unreadable(path: Path, version: bytes) -> None:
    made = Catalogue(path, FileLayer())
    made.write({VERSION_KEY: version})
    made.close()
    with pytest.raises(Unreadable, match="version"):
        Catalogue(path, FileLayer())


def test_rows_without_a_format_version_are_unreadable(path: Path) -> None:
    made = Catalogue(path, FileLayer())
    put(made, record_of(1, 1))
    made.delete([VERSION_KEY])
    with pytest.raises(Unreadable, match="before the format version"):
        all_of(made)
    made.close()
    with pytest.raises(Unreadable, match="no format version"):
        Catalogue(path, FileLayer())


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"s\0\0\0\1", b"{}"), (b"s\0\0\0\1", b"\xff"), (b"n\0\0\0\1", b"[]"), (b"b" + bytes(36), b"short"), (b"b1", b"")],
)
def test_rows_that_are_none_are_unreadable(catalogue: Catalogue, key: bytes, value: bytes) -> None:
    catalogue.write({key: value})
    with pytest.raises(Unreadable, match="that is none"):
        (catalogue.segments(), catalogue.namespaces(), all_of(catalogue))


def test_a_catalogue_that_another_has_open_is_not_unreadable(catalogue: Catalogue, path: Path) -> None:
    """It would be set aside under its owner."""
    with pytest.raises(CatalogueError, match="lock"):
        Catalogue(path, FileLayer())


def test_after_close_every_call_is_an_error(catalogue: Catalogue) -> None:
    catalogue.close()
    for call in (catalogue.segments, lambda: put(catalogue, record_of(1, 1)), lambda: all_of(catalogue)):
        with pytest.raises(CatalogueError, match="the catalogue is closed"):
            call()


def test_a_full_disk_is_an_error_and_a_probe_heals_it(mount: Callable[..., Path]) -> None:
    disk = mount("disk", size_bytes=32 << 20)
    made = Catalogue(disk / "catalogue", FileLayer())
    put(made, record_of(0, 0))
    filler = fill(disk)
    written = iter(range(1, 2000))

    def put_more() -> None:
        for batch in written:
            put(made, *(record_of(n, 1) for n in range(batch * 200, batch * 200 + 200)))

    with pytest.raises(CatalogueError, match="No space left on device"):
        put_more()
    failed = next(written) - 1
    with pytest.raises(CatalogueError, match="No space left on device"):
        made.probe()
    filler.unlink()
    made.probe()
    put(made, record_of(10**9, 1))
    found = {record.sequence for record in all_of(made)}
    assert {0, 10**9, *range(200, failed * 200)} <= found
    made.close()
    assert {record.sequence for record in reopened(disk / "catalogue")} == found


def test_a_stalled_write_waits_without_the_gil_and_goes_on(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls = iter(range(3))

    class Stalling:
        """The real one, which is busy three times."""

        def __init__(self, real: Any) -> None:
            self._real = real

        def write(self, *words: Any) -> None:
            if next(stalls, None) is not None:
                raise Exception("Result incomplete: Write stall")  # noqa: TRY002 (as the binding does)
            self._real.write(*words)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    catalogue._db = Stalling(catalogue._db)  # type: ignore[assignment]
    put(catalogue, record_of(1, 1))
    assert all_of(catalogue) == [record_of(1, 1)]
    monkeypatch.setattr(module, "STALL_WAIT_S", 0.0)
    stalls = iter(range(3))
    with pytest.raises(CatalogueError, match="does not catch up within 0 s"):
        put(catalogue, record_of(2, 2))


def test_opening_again_waits_for_calls_that_are_inside(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    with catalogue._gate.inside():
        monkeypatch.setattr(module, "REOPEN_WAIT_S", 0.01)
        with pytest.raises(CatalogueError, match="do not end within"):
            catalogue.close()
    put(catalogue, record_of(1, 1))
    with catalogue._gate.alone(), pytest.raises(CatalogueError, match="is being opened"):
        catalogue.segments()


def test_many_threads_change_it_while_it_is_opened_again(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = iter(range(40))

    def probe(self: Catalogue) -> None:
        if next(faults) % 2 == 0:
            raise CatalogueError("made to fail")

    monkeypatch.setattr(Catalogue, "_probe", probe)
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for n in range(first, first + 50):
                put(catalogue, record_of(n, n))
                catalogue.set_uses([Use(record_key(1, key_of(n)), 2.0, 2)])
                catalogue.unindex(record_key(1, key_of(n - 1)), 1, n - 1)
        except BaseException as e:  # noqa: BLE001 (asserted on below)
            errors.append(e)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        catalogue.probe()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert sorted(record.sequence for record in all_of(catalogue)) == [1049, 2049, 3049, 4049]


def test_a_log_that_is_torn_at_its_end_keeps_what_was_before(path: Path, tmp_path: Path) -> None:
    made = Catalogue(path, FileLayer())
    for n in range(10):
        put(made, record_of(n, n))
    copy = tmp_path / "copy"
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("LOCK"))
    made.close()
    log = max(copy.glob("*.log"), key=lambda file: file.name)
    content = log.read_bytes().rstrip(b"\0")
    log.write_bytes(content[:-20])
    assert sorted(record.sequence for record in reopened(copy)) == list(range(9))


def test_a_write_that_rocksdb_refuses_because_it_would_stall_arrives_when_it_has_caught_up(path: Path) -> None:
    """It was tried again with a batch that the binding had emptied already."""
    catalogue = Catalogue(path, FileLayer(), payload=True)
    assert catalogue._db is not None
    put(catalogue, record_of(1, 1))
    catalogue._db.set_options({"level0_slowdown_writes_trigger": "1", "level0_stop_writes_trigger": "1"})
    catalogue._db.flush(True)
    wrote: list[str] = []

    def write() -> None:
        put(catalogue, record_of(2, 2))
        wrote.append("record")

    def refused() -> bool:
        assert catalogue._db is not None
        return bool(catalogue._db.property_int_value("rocksdb.is-write-stopped"))

    eventually(refused)
    writer = threading.Thread(target=write)
    writer.start()
    writer.join(0.1)
    assert wrote == []
    catalogue._db.set_options({"level0_stop_writes_trigger": "36", "level0_slowdown_writes_trigger": "20"})
    writer.join(30)
    assert wrote == ["record"]
    assert {record.slot for record in all_of(catalogue)} == {1, 2}
    catalogue.close()
