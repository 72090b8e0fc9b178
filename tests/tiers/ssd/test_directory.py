"""One directory: who holds it, what cannot be read in it, and what a crash left in it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import StartupError
from kvstore.tiers.ssd.directory import DirectoryHeld, SsdDirectory
from kvstore.tiers.ssd.faults import CatalogueError
from kvstore.tiers.ssd.format import VERSION_KEY, pack_version
from tests.conftest import wait_for_line
from tests.tiers.ssd.rig import SEGMENT_BYTES, SLOT_BYTES, FaultLayer, Rig, fill, open_files

CHECKOUT = Path(__file__).resolve().parents[3]
HOLD = """
import sys
from pathlib import Path
from kvstore.tiers.ssd.directory import SsdDirectory
held = SsdDirectory(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def written(path: Path, blocks: int = 3) -> None:
    """A closed SSD with some blocks in it."""
    rig = Rig(path)
    for number in range(blocks):
        assert rig.ask(rig.write(number, number)) == ""
    rig.close()


def content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_the_directory_is_private_whatever_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    path.mkdir(mode=0o755)
    directory = SsdDirectory(path)
    assert path.stat().st_mode & 0o777 == 0o700
    directory.close()


def test_a_path_that_is_not_safe_to_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StartupError, match="not a directory"):
        SsdDirectory(tmp_path / "file")


def test_a_place_where_nothing_can_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"/proc/nothing-there cannot be made .*: choose another path"):
        SsdDirectory(Path("/proc/nothing-there"))


def test_a_directory_that_another_holds_is_refused_and_the_holder_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "ssd")]
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert wait_for_line(other) == "held"
        with pytest.raises(DirectoryHeld, match=rf"(?s)pid {other.pid} \(.*holds .*/lock: stop it"):
            SsdDirectory(tmp_path / "ssd")
        other.kill()
        other.wait(30)
    SsdDirectory(tmp_path / "ssd").close()


def test_a_holder_that_cannot_be_named_holds_it_all_the_same(tmp_path: Path) -> None:
    first = SsdDirectory(tmp_path / "ssd")
    (tmp_path / "ssd" / "lock").write_text("1 1\n")
    with pytest.raises(DirectoryHeld, match="a process that cannot be named"):
        SsdDirectory(tmp_path / "ssd")
    first.close()


@pytest.mark.parametrize("pattern", ["CURRENT", "MANIFEST-*"])
def test_what_cannot_be_read_is_set_aside_whole_and_a_new_one_begun(tmp_path: Path, pattern: str) -> None:
    path = tmp_path / "ssd"
    written(path)
    next((path / "catalogue").glob(pattern)).write_bytes(b"garbage")
    segment = (path / "segment-00000001.kv").read_bytes()
    rig = Rig(path)
    (aside,) = rig.directory.set_aside_now
    assert "Corruption" in aside.reason
    assert aside.path.parent == path
    assert aside.size_bytes >= SEGMENT_BYTES
    assert (aside.path / "segment-00000001.kv").read_bytes() == segment
    assert next((aside.path / "catalogue").glob(pattern)).read_bytes() == b"garbage"
    assert (aside.path / "REASON").read_text().strip() == aside.reason
    assert rig.directory.all_set_aside() == [aside]
    assert rig.records() == {}
    assert rig.ask(rig.write(7, 0)) == ""
    rig = rig.again()
    assert len(rig.records()) == 1
    assert rig.directory.set_aside_now == []
    assert rig.directory.all_set_aside() == [aside]
    rig.close()


def test_two_set_aside_in_one_second_are_two(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    for _ in range(2):
        written(path, 1)
        (path / "catalogue" / "CURRENT").write_bytes(b"garbage")
    directory = SsdDirectory(path)
    assert len(directory.all_set_aside()) == 2
    directory.close()


def test_segment_files_without_a_catalogue_are_set_aside(tmp_path: Path) -> None:
    """Also what a crash in the middle of setting aside leaves."""
    path = tmp_path / "ssd"
    written(path)
    (path / "catalogue").rename(tmp_path / "gone")
    directory = SsdDirectory(path)
    assert [aside.reason for aside in directory.set_aside_now] == [f"1 segment files and no catalogue in {path}"]
    directory.close()


def test_another_format_version_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    rig = Rig(path)
    rig.catalogue.write({VERSION_KEY: pack_version(3)})
    rig = rig.again()
    assert "format version 3" in rig.directory.set_aside_now[0].reason
    rig.close()


def test_what_is_found_unreadable_later_can_be_set_aside_then(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    written(path)
    directory = SsdDirectory(path)
    aside = directory.set_aside("a table is corrupt")
    assert directory.all_set_aside() == [aside]
    assert list(directory.catalogue.records()) == []
    assert directory.extents.existing() == {}
    assert (aside.path / "segment-00000001.kv").stat().st_size == SEGMENT_BYTES
    directory.close()


def test_a_full_disk_sets_nothing_aside(mount: Callable[..., Path]) -> None:
    """What passes must not cost the blocks."""
    disk = mount("disk", size_bytes=64 << 20)
    written(disk)
    filler = fill(disk)
    with pytest.raises((CatalogueError, OSError), match="No space left on device"):
        SsdDirectory(disk)
    filler.unlink()
    rig = Rig(disk)
    assert rig.directory.all_set_aside() == []
    assert all(rig.good(record) for record in rig.records().values())
    assert len(rig.records()) == 3
    rig.close()


def test_segment_files_without_a_row_and_a_probes_are_removed_and_others_left(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    written(path)
    for name in ("segment-00000009.kv", "probe.tmp", "mine.txt", "segment-9.kv"):
        (path / name).write_bytes(bytes(4096))
    directory = SsdDirectory(path)
    assert directory.leftovers == ["probe.tmp", "segment-00000009.kv"]
    assert {"mine.txt", "segment-9.kv", "segment-00000001.kv"} <= {p.name for p in path.iterdir()}
    assert directory.extents.existing() == {1: SEGMENT_BYTES}
    directory.close()


def test_segments_whose_file_is_missing_or_short_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    written(path)
    os.truncate(path / "segment-00000001.kv", SLOT_BYTES)
    directory = SsdDirectory(path)
    assert directory.damaged == {1: f"segment-00000001.kv has {SLOT_BYTES} bytes of {SEGMENT_BYTES}"}
    directory.close()
    directory = SsdDirectory(path)
    assert directory.damaged == {}, "told of once: it has its size again, and no block has those bytes"
    assert directory.extents.existing() == {1: SEGMENT_BYTES}
    directory.close()
    (path / "segment-00000001.kv").unlink()
    directory = SsdDirectory(path)
    assert directory.damaged == {1: "segment-00000001.kv is missing"}
    directory.close()


def test_physical_bytes_are_what_du_says(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "ssd")
    assert rig.ask(rig.write(1, 1)) == ""
    files = [rig.path / "segment-00000001.kv", *(rig.path / "catalogue").iterdir(), rig.path / "catalogue"]
    sizes = rig.directory.sizes()
    assert sizes.physical == sum(file.stat().st_blocks * 512 for file in files)
    assert sizes.free > 0
    assert 0 < sizes.log < sizes.catalogue < sizes.physical
    rig.close()


def test_opening_that_fails_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    written(path)
    layer = FaultLayer()
    layer.direct_error = 5
    before = open_files()
    for _ in range(3):
        with pytest.raises(OSError, match="as a probe: Input/output error"):
            SsdDirectory(path, layer)
    assert open_files() == before
    directory = SsdDirectory(path)
    assert directory.set_aside_now == []
    directory.close()


def test_a_directory_that_others_may_write_to_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """Its mode was set to 0700: of /tmp, for a daemon of root's."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(StartupError, match="of the daemon's own below it"):
        SsdDirectory(shared)
    assert shared.stat().st_mode & 0o7777 == 0o1777
    assert not list(shared.iterdir())
