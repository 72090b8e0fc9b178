"""The payload in RocksDB: lossless whatever the bytes, damage is a mismatch, and what is nobody's goes."""

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard

from kvstore.core.segments import PAGE_BYTES
from kvstore.tiers.ssd.directory import SsdDirectory
from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import (
    EXTENTS,
    PIECE_BYTES,
    PLAIN,
    PLANES,
    ROCKSDB,
    SegmentRow,
    pack_row,
    piece_key,
    record_key,
    segment_key,
)
from kvstore.tiers.ssd.jobs import Drop, Make
from tests.tiers.ssd.rig import BLOCK_BYTES, SEGMENT_BYTES, SLOT_BYTES, SLOTS, Rig, key_of
from tests.tiers.ssd.test_crash import right_slots, seeded

SLOT_PAGES = SLOT_BYTES // PAGE_BYTES


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "ssd", layout=ROCKSDB)
    yield made
    made.close()


def floats(size_bytes: int) -> bytes:
    """Upper halves of normal 4-byte floats, which bfloat16 is."""
    values = np.random.default_rng(1).normal(0, 1, size_bytes // 2).astype("<f4")
    return (values.view("<u4") >> 16).astype("<u2").tobytes()


def pieces(rig: Rig) -> list[bytes]:
    """Keys of all payload but a probe's."""
    found, key = [], rig.catalogue.payload_from(piece_key(1, 0, 0))
    while key is not None:
        found.append(key)
        key = rig.catalogue.payload_from(key + b"\0")
    return found


@pytest.mark.parametrize("size_bytes", [PAGE_BYTES, SLOT_BYTES, PIECE_BYTES + PAGE_BYTES, 2 << 20])
def test_any_bytes_come_back_as_they_were(rig: Rig, size_bytes: int) -> None:
    assert rig.ask(Make(2, 4 * size_bytes)) == ""
    chance = np.random.default_rng(size_bytes)
    half = chance.bytes(size_bytes // 2) + bytes(size_bytes - size_bytes // 2)
    contents = [chance.bytes(size_bytes), bytes(size_bytes), floats(size_bytes), half]
    for number, content in enumerate(contents):
        rig.extents.write(2, number * size_bytes, memoryview(content))
    for number, content in enumerate(contents):
        found = bytearray(b"\xaa" * size_bytes)
        rig.extents.read(2, number * size_bytes, memoryview(found))
        assert found == content


def test_floats_shrink_and_what_does_not_is_stored_as_it_is(rig: Rig) -> None:
    view = rig.view(0)
    key = piece_key(1, SLOT_PAGES, 0)
    view[:] = floats(SLOT_BYTES)
    rig.extents.write(1, 0, view)
    (value,) = rig.catalogue.payload([key])
    assert value is not None
    assert value[:1] == PLANES
    assert len(value) < 0.8 * SLOT_BYTES
    view[:] = np.random.default_rng(1).bytes(SLOT_BYTES)
    rig.extents.write(1, 0, view)
    assert rig.catalogue.payload([key]) == [PLAIN + bytes(view)]


def test_payload_that_is_not_what_was_written_is_a_mismatch_whatever_it_is(rig: Rig) -> None:
    assert rig.ask(rig.write(1, 1)) == ""
    record, key = rig.records()[key_of(1)], piece_key(1, SLOT_PAGES, SLOT_PAGES)
    huge = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 60)
    assert zstandard.frame_content_size(huge) == 1 << 60
    frame = zstandard.compress(bytes(SLOT_BYTES))
    bad = [b"", PLAIN, PLAIN + bytes(SLOT_BYTES), PLAIN + bytes(7), b"\x09" + bytes(SLOT_BYTES), PLANES]
    bad += [PLANES + b"garbage", PLANES + huge, PLANES + frame, PLANES + frame[:-3], PLANES + zstandard.compress(b"")]
    for value in bad:
        rig.catalogue.put_payload(key, value)
        assert rig.ask(rig.read(record)) == "mismatch", value[:20]
    rig.catalogue.drop_payload(key, key + b"\0")
    assert rig.ask(rig.read(record)) == "mismatch"


def test_a_changed_bit_in_a_file_costs_the_block_it_is_in(rig: Rig) -> None:
    for number in (1, 2):
        assert rig.ask(rig.write(number, number)) == ""
    rig.catalogue._of_payload().flush(True)
    (blobs,) = (rig.path / "store").glob("*.blob")
    content = bytearray(blobs.read_bytes())
    # The two lie one after the other.
    content[len(content) * 3 // 4] ^= 1
    blobs.write_bytes(content)
    outcomes = {number: rig.ask(rig.read(rig.records()[key_of(number)])) for number in (1, 2)}
    assert outcomes == {1: "ok", 2: "mismatch"}
    assert rig.ask(rig.write(3, 3)) == ""


@pytest.mark.parametrize("what", ["missing", "truncated", "zeroed"])
def test_a_file_that_is_not_what_it_was_costs_its_blocks_and_no_more(tmp_path: Path, what: str) -> None:
    rig = Rig(tmp_path / "ssd", layout=ROCKSDB)
    for number in (1, 2):
        assert rig.ask(rig.write(number, number)) == ""
    rig.close()
    (blobs,) = (tmp_path / "ssd" / "store").glob("*.blob")
    size_bytes = blobs.stat().st_size
    blobs.unlink()
    if what != "missing":
        blobs.write_bytes(bytes(size_bytes if what == "zeroed" else size_bytes // 2))
    rig = Rig(tmp_path / "ssd", layout=ROCKSDB)
    assert [rig.ask(rig.read(record)) for record in rig.records().values()] == ["mismatch", "mismatch"]
    assert rig.ask(rig.write(3, 3)) == ""
    assert rig.good(rig.records()[key_of(3)])
    rig.close()


def test_slots_of_a_former_size_go_when_a_segment_is_cut_anew_also_after_a_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "ssd", layout=ROCKSDB)
    for number in (1, 2):
        assert rig.ask(rig.write(number, number)) == ""
    rig = rig.again()
    page = memoryview(bytes(PAGE_BYTES))
    rig.extents.write(1, 5 * PAGE_BYTES, page)
    assert pieces(rig) == [piece_key(1, 1, 5)]
    rig.extents.write(1, 0, rig.view(0))
    assert pieces(rig) == [piece_key(1, SLOT_PAGES, 0)]
    rig.close()


def test_a_segment_that_is_dropped_takes_its_payload_with_it_and_no_other(rig: Rig) -> None:
    assert rig.ask(Make(2, SEGMENT_BYTES)) == ""
    for number, segment in ((1, 1), (2, 2)):
        assert rig.ask(rig.write(number, number, segment=segment)) == ""
    assert rig.ask(Drop(1)) == ""
    assert pieces(rig) == [piece_key(2, SLOT_PAGES, 2 * SLOT_PAGES)]
    assert rig.extents.existing() == {2: SEGMENT_BYTES}
    assert "segment 1 is not there" in rig.ask(rig.write(3, 3))
    assert rig.good(rig.records()[key_of(2)])


def test_payload_without_a_segment_as_a_crash_leaves_it_is_removed_at_the_start(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "ssd", layout=ROCKSDB)
    last = (1 << 32) - 1
    rig.catalogue.write(dict([pack_row(SegmentRow(last, SEGMENT_BYTES, 0, ""))]))
    rig = rig.again()
    for number, segment in ((1, 1), (2, last)):
        assert rig.ask(rig.write(number, number, segment=segment)) == ""
    rig.catalogue.write({}, [segment_key(last)])
    rig = rig.again()
    assert pieces(rig) == [piece_key(1, SLOT_PAGES, SLOT_PAGES)]
    assert set(rig.extents.existing()) == {1}
    rig.close()


@pytest.mark.parametrize(("before", "after"), [(EXTENTS, ROCKSDB), (ROCKSDB, EXTENTS)])
def test_another_layout_is_a_clean_start_and_gives_back_its_room(tmp_path: Path, before: str, after: str) -> None:
    rig = Rig(tmp_path / "ssd", layout=before)
    for number in range(SLOTS):
        assert rig.ask(rig.write(number, number)) == ""
    rig.close()
    # As if the last removal had ended half-way.
    (tmp_path / "ssd" / "removed").mkdir()
    (tmp_path / "ssd" / "removed" / "half").write_bytes(bytes(PAGE_BYTES))
    rig = Rig(tmp_path / "ssd", layout=after)
    assert rig.directory.set_aside_now == []
    assert rig.records() == {}
    assert rig.directory.damaged == {}
    names = {path.name for path in (tmp_path / "ssd").iterdir()}
    assert names == ({"lock", "store"} if after == ROCKSDB else {"lock", "catalogue", "segment-00000001.kv"})
    assert rig.ask(rig.write(1, 1)) == ""
    rig = rig.again()
    assert right_slots(rig) == {1: 1}
    rig.close()


def test_a_broken_store_is_set_aside_whole(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "ssd", layout=ROCKSDB)
    assert rig.ask(rig.write(1, 1)) == ""
    rig.close()
    (tmp_path / "ssd" / "store" / "CURRENT").write_bytes(b"garbage")
    rig = Rig(tmp_path / "ssd", layout=ROCKSDB)
    (aside,) = rig.directory.set_aside_now
    assert {path.name for path in aside.path.iterdir()} == {"store", "REASON"}
    assert rig.records() == {}
    rig.close()


def test_a_log_cut_anywhere_after_what_was_acknowledged_loses_none_of_that(tmp_path: Path) -> None:
    """What was not synced may be lost from any byte on: the cut falls into records, payload and between them."""
    chance = seeded()
    rig = Rig(tmp_path / "ssd", layout=ROCKSDB)
    kept: dict[int, int] = {}
    for number in range(1, 13):
        slot = chance.randrange(SLOTS)
        assert rig.ask(rig.write(number, slot, replaces=kept.get(slot))) == ""
        kept[slot] = number
    log = max((tmp_path / "ssd" / "store").glob("*.log"))
    acknowledged = log.stat().st_size
    for number in range(101, 105):
        # Written, and not synced: a writer takes over slots, one with its record.
        slot = chance.choice(sorted(kept))
        job = rig.write(number, slot)
        rig.catalogue.unindex(record_key(1, key_of(kept[slot])), 1, slot)
        rig.extents.write(1, job.offset, job.view)
    end = log.stat().st_size
    assert end > acknowledged + 4 * BLOCK_BYTES
    for round_number in range(12):
        copy = tmp_path / f"copy-{round_number}"
        shutil.copytree(tmp_path / "ssd", copy)
        with (copy / "store" / log.name).open("r+b") as file:
            file.truncate(acknowledged if not round_number else chance.randrange(acknowledged, end))
        cut = Rig(copy, layout=ROCKSDB)
        found = right_slots(cut)
        assert found.items() <= kept.items()
        assert round_number or found == kept
        cut.close()
    rig.close()


def test_a_directory_of_another_layout_that_cannot_be_removed_is_not_used(tmp_path: Path) -> None:
    Rig(tmp_path / "ssd", layout=EXTENTS).close()

    class Stuck(FileLayer):
        def remove_tree(self, path: Path) -> None:
            raise PermissionError(f"{path}: no")

    with pytest.raises(PermissionError, match="removed: no"):
        SsdDirectory(tmp_path / "ssd", Stuck(), ROCKSDB)
    SsdDirectory(tmp_path / "ssd", None, ROCKSDB).close()
