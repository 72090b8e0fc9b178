"""Bytes between the slab and segment files: whole, aligned, and never another's."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.core.segments import PAGE_BYTES
from kvstore.tiers.slab import Slab
from kvstore.tiers.ssd.extents import Extents
from kvstore.tiers.ssd.files import FileLayer
from tests.tiers.ssd.rig import SEGMENT_BYTES, SLOT_BYTES, FaultLayer, fill, open_files


@pytest.fixture
def view() -> Iterator[memoryview]:
    """Four slots of a real slab, with random bytes in them."""
    slab = Slab(huge_pages=False)
    slab.add(slab.make(1, 4 * SLOT_BYTES))
    memory = slab.bytes_at(1, 0, 4 * SLOT_BYTES)
    memory[:] = os.urandom(4 * SLOT_BYTES)
    yield memory
    slab.close()


@pytest.fixture
def layer() -> FaultLayer:
    return FaultLayer()


@pytest.fixture
def extents(tmp_path: Path, layer: FaultLayer) -> Iterator[Extents]:
    """One segment, number 1."""
    made = Extents(tmp_path, layer)
    made.make(1, SEGMENT_BYTES)
    yield made
    made.close()


def test_a_slot_comes_back_as_it_went(extents: Extents, view: memoryview) -> None:
    assert extents.direct_refused == ""
    there, here = view[:SLOT_BYTES], view[SLOT_BYTES : 2 * SLOT_BYTES]
    extents.write(1, 3 * SLOT_BYTES, there)
    assert extents.sync([1]) == {}
    extents.read(1, 3 * SLOT_BYTES, here)
    assert here == there


def test_a_segment_is_private_and_has_its_space_at_once(extents: Extents, tmp_path: Path) -> None:
    found = (tmp_path / "segment-00000001.kv").stat()
    assert found.st_mode & 0o777 == 0o600
    assert found.st_size == SEGMENT_BYTES
    assert extents.physical_bytes() >= SEGMENT_BYTES
    assert extents.existing() == {1: SEGMENT_BYTES}


def test_a_segment_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = Extents(tmp_path, FileLayer())
        os.umask(0o277)
        made.make(1, SEGMENT_BYTES)
    finally:
        os.umask(before)
    assert (tmp_path / "segment-00000001.kv").stat().st_mode & 0o777 == 0o600
    made.close()


@pytest.mark.parametrize("piece", [PAGE_BYTES, 2 * PAGE_BYTES + 100])
def test_short_reads_and_writes_are_gone_on_with(
    extents: Extents, layer: FaultLayer, view: memoryview, piece: int
) -> None:
    there, here = view[:SLOT_BYTES], view[SLOT_BYTES : 2 * SLOT_BYTES]
    layer.piece_bytes = piece if extents.direct_refused else piece // PAGE_BYTES * PAGE_BYTES
    extents.write(1, 0, there)
    extents.read(1, 0, here)
    assert here == there


def test_a_write_that_makes_no_headway_is_an_error(
    extents: Extents, layer: FaultLayer, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileLayer, "write", lambda *_: 100)
    with pytest.raises(OSError, match=r"writing .* of segment-00000001.kv: only 0 went"):
        extents.write(1, 0, view[:SLOT_BYTES])


@pytest.mark.parametrize("size", [0, 2 * SLOT_BYTES + PAGE_BYTES, 2 * SLOT_BYTES + 100])
def test_reading_past_the_end_of_a_truncated_file_is_an_error(
    extents: Extents, tmp_path: Path, view: memoryview, size: int
) -> None:
    os.truncate(tmp_path / "segment-00000001.kv", size)
    with pytest.raises(OSError, match=r"segment-00000001.kv: the file ends before"):
        extents.read(1, 2 * SLOT_BYTES, view[:SLOT_BYTES])
    assert extents.existing() == {1: size}


@pytest.mark.parametrize(("what", "offset", "length"), [("offset", 100, 4096), ("whole pages", 0, 100)])
def test_what_is_not_in_whole_pages_is_our_own_bug(
    extents: Extents, view: memoryview, what: str, offset: int, length: int
) -> None:
    with pytest.raises(AssertionError, match=what):
        extents.write(1, offset, view[:length])
    with pytest.raises(AssertionError, match=what):
        extents.read(1, offset, view[:length])


def test_errors_say_what_was_being_done(extents: Extents, layer: FaultLayer, view: memoryview) -> None:
    layer.read_error = layer.write_error = layer.sync_error = errno.EIO
    with pytest.raises(OSError, match=rf"reading {SLOT_BYTES} bytes at 0 of segment-00000001.kv: Input/output error"):
        extents.read(1, 0, view[:SLOT_BYTES])
    with pytest.raises(OSError, match=rf"writing {SLOT_BYTES} bytes at 0 of segment-00000001.kv: Input/output error"):
        extents.write(1, 0, view[:SLOT_BYTES])
    assert extents.sync([1]) == {1: "syncing segment-00000001.kv: Input/output error"}
    assert extents.sync([9]) == {9: "syncing segment-00000009.kv: segment-00000009.kv is not there"}


def test_a_segment_that_does_not_fit_leaves_nothing_behind(mount: Callable[..., Path]) -> None:
    disk = mount("disk", size_bytes=8 << 20)
    extents = Extents(disk, FileLayer())
    before = FileLayer().free_bytes(disk)
    with pytest.raises(OSError, match=r"making segment-00000001\.kv of 1073741824 bytes: No space left on device"):
        extents.make(1, 1 << 30)
    assert FileLayer().free_bytes(disk) == before
    assert sorted(p.name for p in disk.iterdir()) == ["lost+found"]
    extents.close()


def test_a_full_disk_opens_and_can_be_read(mount: Callable[..., Path], view: memoryview) -> None:
    disk = mount("disk", size_bytes=8 << 20)
    extents = Extents(disk, FileLayer())
    extents.make(1, SEGMENT_BYTES)
    extents.write(1, 0, view[:SLOT_BYTES])
    extents.close()
    fill(disk)
    again = Extents(disk, FileLayer())
    again.read(1, 0, view[SLOT_BYTES : 2 * SLOT_BYTES])
    assert view[:SLOT_BYTES] == view[SLOT_BYTES : 2 * SLOT_BYTES]
    with pytest.raises(OSError, match="as a probe: No space left on device"):
        again.probe()
    (disk / "filler").unlink()
    again.probe()
    again.close()


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(
    mount: Callable[..., Path], view: memoryview
) -> None:
    disk = mount("memory", kind="ramfs")
    extents = Extents(disk, FileLayer())
    assert extents.direct_refused == f"the file system of {disk} takes no O_DIRECT (Invalid argument)"
    extents.make(1, SEGMENT_BYTES)
    assert extents.existing() == {1: SEGMENT_BYTES}
    extents.write(1, SLOT_BYTES, view[:SLOT_BYTES])
    assert extents.sync([1]) == {}
    extents.read(1, SLOT_BYTES, view[SLOT_BYTES : 2 * SLOT_BYTES])
    assert view[:SLOT_BYTES] == view[SLOT_BYTES : 2 * SLOT_BYTES]
    assert sorted(p.name for p in disk.iterdir()) == ["segment-00000001.kv"]
    extents.close()


def test_direct_io_that_is_refused_only_when_bytes_move_is_refused(tmp_path: Path, view: memoryview) -> None:
    """As some network file systems and devices with larger sectors do."""

    class Late(FileLayer):
        def __init__(self) -> None:
            self.direct: set[int] = set()

        def open(self, path: Path, flags: int) -> int:
            descriptor = super().open(path, flags)
            (self.direct.add if flags & os.O_DIRECT else self.direct.discard)(descriptor)
            return descriptor

        def write(self, descriptor: int, view: memoryview, offset: int) -> int:
            if descriptor in self.direct:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().write(descriptor, view, offset)

    extents = Extents(tmp_path, Late())
    assert "takes no O_DIRECT" in extents.direct_refused
    extents.make(1, SEGMENT_BYTES)
    extents.write(1, 0, view[:SLOT_BYTES])
    extents.close()
    assert not (tmp_path / "probe.tmp").exists()


def test_a_segment_dropped_under_a_reader_is_closed_when_he_is_done(
    extents: Extents, layer: FaultLayer, view: memoryview
) -> None:
    """Closed at once, its number could be another file's by the time the read happens."""
    inside, go = threading.Event(), threading.Event()

    def reading() -> None:
        inside.set()
        assert go.wait(30)

    extents.write(1, 0, view[:SLOT_BYTES])
    layer.reading = reading
    here = view[SLOT_BYTES : 2 * SLOT_BYTES]
    reader = threading.Thread(target=extents.read, args=(1, 0, here))
    reader.start()
    assert inside.wait(30)
    before = open_files()
    extents.drop(1)
    assert open_files() == before
    go.set()
    reader.join(30)
    assert here == view[:SLOT_BYTES]
    assert open_files() == before - 1
    layer.reading = None
    with pytest.raises(OSError, match=r"segment-00000001\.kv is not there"):
        extents.read(1, 0, here)


def test_a_dropped_segment_gives_its_space_back_and_may_be_dropped_twice(extents: Extents, tmp_path: Path) -> None:
    extents.drop(1)
    extents.drop(1)
    assert extents.physical_bytes() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_segment_is_made_over_the_remains_of_a_dropped_one(extents: Extents, tmp_path: Path) -> None:
    (tmp_path / "segment-00000002.kv").write_bytes(b"remains")
    extents.make(2, SEGMENT_BYTES)
    assert extents.existing() == {1: SEGMENT_BYTES, 2: SEGMENT_BYTES}


def test_a_symlink_is_not_followed(extents: Extents, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"mine")
    (tmp_path / "segment-00000003.kv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        Extents(tmp_path, FileLayer())
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"


def test_a_probe_that_comes_back_as_another_is_an_error(extents: Extents, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FileLayer.read

    def read(self: FileLayer, descriptor: int, view: memoryview, offset: int) -> int:
        came = real(self, descriptor, view, offset)
        view[17] ^= 1
        return came

    monkeypatch.setattr(FileLayer, "read", read)
    with pytest.raises(OSError, match="came back as another"):
        extents.probe()
