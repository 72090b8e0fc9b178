"""What a payload takes of the disk: counted when it is written, given back when it is nobody's, and bounded."""

import errno
import os
from pathlib import Path

import pytest

from kvstore.core.segments import PAGE_BYTES
from kvstore.tiers.ssd.ballast import Ballast
from kvstore.tiers.ssd.budget import budget_of
from kvstore.tiers.ssd.catalogue import Catalogue
from kvstore.tiers.ssd.directory import SsdDirectory
from kvstore.tiers.ssd.faults import CatalogueError, is_no_room
from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import (
    BALLAST_NAME,
    EXTENTS,
    FORMAT_VERSION,
    PACKED_VERSION,
    ROCKSDB,
    VERSION_KEY,
    pack_version,
    piece_key,
    unpack_version,
)
from kvstore.tiers.ssd.jobs import Vacate, Wrote
from kvstore.tiers.ssd.payload import Place
from tests.tiers.ssd.rig import SLOT_BYTES, Rig, key_of
from tests.tiers.ssd.test_blobs import SLOT_PAGES, pieces

MIB = 1 << 20
LARGE = 1 << 20
SMALL, SMALLS = 256 << 10, 96
"""Four of them in a blob file, so that none is garbage as a whole."""


@pytest.mark.parametrize("layout", [EXTENTS, ROCKSDB])
def test_what_a_block_takes_is_told_and_in_its_record(tmp_path: Path, layout: str) -> None:
    rig = Rig(tmp_path / "ssd", layout=layout)
    rig.tier.submit(rig.write(1, 1))
    wrote = rig.answer()
    assert isinstance(wrote, Wrote)
    assert wrote.packed == rig.records()[key_of(1)].packed
    assert wrote.packed == 0 if layout == EXTENTS else SLOT_BYTES * 0.9 < wrote.packed < SLOT_BYTES * 1.1
    rig.close()


def test_slots_that_are_vacated_have_nothing_left_and_no_other_loses_anything(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "ssd", layout=ROCKSDB)
    for number in range(12):
        assert rig.ask(rig.write(number, number)) == ""
    assert (
        rig.ask(Vacate(1, (Place(1, SLOT_BYTES, 3, 1), Place(1, SLOT_BYTES, 5, 4), Place(1, SLOT_BYTES, 11, 1)))) == ""
    )
    left = {0, 1, 2, 4, 9, 10}
    assert pieces(rig) == [piece_key(1, SLOT_PAGES, slot * SLOT_PAGES) for slot in sorted(left)]
    assert all(rig.good(record) == (record.slot in left) for record in rig.records().values())
    assert rig.ask(rig.write(40, 3)) == ""
    assert rig.good(rig.records()[key_of(40)])
    rig.close()


def test_extents_are_vacated_by_being_written_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "ssd")
    assert rig.ask(rig.write(1, 1)) == ""
    assert rig.ask(Vacate(1, (Place(1, SLOT_BYTES, 1, 1),))) == ""
    assert rig.good(rig.records()[key_of(1)])
    rig.directory.make_room(MIB)
    rig.close()


def test_garbage_is_collected_a_step_at_a_time_and_what_lives_is_as_it_was(tmp_path: Path) -> None:
    directory = SsdDirectory(tmp_path / "ssd", layout=ROCKSDB, size_bytes=128 * MIB)
    directory.extents.make(1, SMALLS * SMALL)
    blocks: dict[int, bytes] = {}
    for turn in range(4):
        for slot in range(turn, SMALLS, 4 if turn else 1):
            blocks[slot] = os.urandom(SMALL)
            directory.extents.write(1, slot * SMALL, memoryview(blocks[slot]))
        directory.catalogue.compact_payload(lambda payload: payload.flush(True))
    before, steps = directory.sizes().physical, 0
    while directory.sizes().physical > SMALLS * SMALL + 8 * MIB:
        directory.make_room(directory.budget.step_bytes)
        steps += 1
        assert steps < 20, "garbage stays"
    assert before > SMALLS * SMALL + 12 * MIB, "there was none"
    for slot, block in blocks.items():
        found = bytearray(SMALL)
        directory.extents.read(1, slot * SMALL, memoryview(found))
        assert found == block
    directory.close()


def test_a_log_that_is_too_long_is_shortened(tmp_path: Path) -> None:
    directory = SsdDirectory(tmp_path / "ssd", layout=ROCKSDB, size_bytes=128 * MIB)
    directory.catalogue.write({b"p": bytes(PAGE_BYTES)})
    directory.extents.make(1, 64 * MIB)
    for slot in range(12):  # in the log until the record above is written out
        directory.extents.write(1, slot * LARGE, memoryview(os.urandom(LARGE)))
    directory.catalogue.compact_payload(lambda payload: payload.flush(True))
    directory.make_room(0)
    assert directory.sizes().log <= 2 * directory.budget.log_bytes
    directory.close()


@pytest.mark.parametrize("size_mib", [128, 256, 512, 2048, 65536, 1 << 20])
def test_all_parts_of_a_size_fit_in_it_at_their_worst(size_mib: int) -> None:
    budget = budget_of(size_mib * MIB)
    worst = budget.live_bytes / 0.9 + 2 * budget.log_bytes + budget.step_bytes + budget.ballast_bytes
    assert worst < budget.size_bytes
    assert budget.live_bytes > 0.65 * budget.size_bytes
    assert budget.live_in(budget.size_bytes // 2) < budget.live_bytes / 2
    assert budget.live_in(MIB) == 0


def test_ballast_takes_room_gives_it_back_once_and_leaves_nothing_where_there_is_none(tmp_path: Path) -> None:
    class Full(FileLayer):
        def allocate(self, descriptor: int, size_bytes: int) -> None:
            super().allocate(descriptor, size_bytes // 2)
            raise OSError(errno.ENOSPC, "No space left on device")

    ballast = Ballast(tmp_path, FileLayer(), 4 * MIB)
    assert not ballast.drop()
    ballast.load()
    assert ballast.physical_bytes() == 4 * MIB
    assert ballast.drop()
    assert not ballast.drop()
    with pytest.raises(OSError, match="No space"):
        Ballast(tmp_path, Full(), 4 * MIB).load()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layout", [EXTENTS, ROCKSDB])
def test_a_directory_says_what_ballast_it_lacks_and_counts_what_it_has(tmp_path: Path, layout: str) -> None:
    directory = SsdDirectory(tmp_path / "ssd", layout=layout, size_bytes=256 * MIB)
    before = directory.sizes()
    assert before.ballast_missing > 0
    directory.load_ballast()
    after = directory.sizes()
    assert after.ballast_missing == 0
    assert after.physical == before.physical + before.ballast_missing
    assert after.catalogue == before.catalogue + before.ballast_missing
    directory.close()
    assert (tmp_path / "ssd" / BALLAST_NAME).exists()


def test_a_catalogue_that_finds_no_room_asks_for_it_once_and_is_not_called_broken(tmp_path: Path) -> None:
    asked: list[bool] = []

    class Full(FileLayer):
        def names(self, path: Path) -> list[str]:
            if len(asked) < 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().names(path)

    def make_way() -> bool:
        asked.append(True)
        return len(asked) > 1

    with pytest.raises(OSError, match="No space") as caught:
        Catalogue(tmp_path / "catalogue", Full(), make_way=make_way)
    assert is_no_room(caught.value)
    assert len(asked) == 1
    Catalogue(tmp_path / "catalogue", Full(), make_way=make_way).close()
    assert len(asked) == 2
    assert is_no_room(CatalogueError("IO error: No space left on device: While appending to file"))
    assert not is_no_room(CatalogueError("IO error: Input/output error: While fsync"))


def test_a_store_of_the_version_before_is_read_and_has_the_own_one_then(tmp_path: Path) -> None:
    made = Catalogue(tmp_path / "store", FileLayer(), payload=True)
    made.write({VERSION_KEY: pack_version(FORMAT_VERSION)})
    made.close()
    again = Catalogue(tmp_path / "store", FileLayer(), payload=True)
    found = again._call(lambda db: db.get(VERSION_KEY))
    assert unpack_version(found or b"") == PACKED_VERSION
    again.close()
    extents = Catalogue(tmp_path / "catalogue", FileLayer())
    found = extents._call(lambda db: db.get(VERSION_KEY))
    assert unpack_version(found or b"") == FORMAT_VERSION, "a release before this one reads it"
    extents.close()
