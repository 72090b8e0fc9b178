"""What the operating system refuses is no corruption: nothing is set aside, and all is there when it is over."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.moving.drops import Drops
from kvstore.tiers.ssd import catalogue as module
from kvstore.tiers.ssd.catalogue import Catalogue
from kvstore.tiers.ssd.directory import SsdDirectory
from kvstore.tiers.ssd.faults import CatalogueError, Unreadable, fault, with_next_step
from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import CATALOGUE_NAMES, EXTENTS, ROCKSDB
from tests.tiers.ssd.rig import Rig

WHERE = "While opening a file for sequentially reading: /ssd/catalogue/MANIFEST-000013"
REFUSED = [
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EMFILE,
    errno.ENFILE,
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOMEM,
    errno.ESTALE,
    errno.EISDIR,
]


@contextmanager
def immutable(*paths: Path) -> Iterator[None]:
    """Nobody may write to them, root neither."""
    subprocess.run(["chattr", "+i", *paths], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", *paths], check=True, timeout=60)


def written(path: Path, layout: str = EXTENTS) -> set[bytes]:
    """A closed SSD with some blocks in it; their keys."""
    rig = Rig(path, layout=layout)
    for number in range(3):
        assert rig.ask(rig.write(number, number)) == ""
    found = keys(rig.directory)
    rig.close()
    assert len(found) == 3
    return found


def keys(directory: SsdDirectory) -> set[bytes]:
    return {record.key for batch in directory.catalogue.records() for record in batch}


def asides(path: Path) -> list[Path]:
    return list(path.glob("aside-*"))


@pytest.mark.parametrize("opening", [True, False])
@pytest.mark.parametrize("number", REFUSED)
def test_what_the_operating_system_refuses_may_pass_however_the_binding_says_it(number: int, opening: bool) -> None:
    why = os.strerror(number)
    for text in (
        f"IO error: {WHERE}: {why}",
        f"Invalid argument: Found options incompatible with filesystem: IO error: {WHERE}: {why}",
        f"Corruption: Corruption: IO error: {WHERE}: {why}  The file MANIFEST-000013 may be corrupted.",
        f"{why} (os error {number})",
    ):
        assert type(fault(Exception(text), opening=opening)) is CatalogueError, text
    assert type(fault(OSError(number, why), opening=opening)) is CatalogueError


@pytest.mark.parametrize(
    "text",
    [
        "Corruption: CURRENT file does not end with newline",
        "Corruption: block checksum mismatch: stored = 1, computed = 2",
        f"Corruption: Corruption: IO error: No such file or directory: {WHERE}: No such file or directory",
        f"IO error: No such file or directory: {WHERE}: No such file or directory",
        "Invalid argument: leveldb.BytewiseComparator: does not match existing comparator",
        "Not implemented: Unsupported compression type",
    ],
)
def test_what_is_corrupt_missing_or_not_ours_is_unreadable(text: str) -> None:
    assert type(fault(Exception(text), opening=True)) is Unreadable


@pytest.mark.parametrize("name", ["rocksdict-config.json", "CURRENT", "LOG", "*"])
def test_files_that_may_not_be_written_set_nothing_aside(tmp_path: Path, layout: str, name: str) -> None:
    path = tmp_path / "ssd"
    there = written(path, layout)
    store = path / CATALOGUE_NAMES[layout]
    with immutable(*store.glob(name)), pytest.raises(CatalogueError, match="Operation not permitted"):
        SsdDirectory(path, layout=layout)
    assert not asides(path)
    directory = SsdDirectory(path, layout=layout)
    assert keys(directory) == there
    directory.close()


OPEN = """
import sys
from pathlib import Path
from kvstore.tiers.ssd.directory import SsdDirectory
from kvstore.tiers.ssd.faults import CatalogueError
try:
    SsdDirectory(Path(sys.argv[1]), layout=sys.argv[2])
except (CatalogueError, OSError) as e:
    print(type(e).__name__, e)
"""


@pytest.mark.parametrize(("mode", "name"), [(0o000, "CURRENT"), (0o400, "*")])
def test_files_that_their_mode_protects_set_nothing_aside(tmp_path: Path, layout: str, mode: int, name: str) -> None:
    """Of a daemon that is not root: here, root without the right to pass over modes."""
    path = tmp_path / "ssd"
    there = written(path, layout)
    files = list((path / CATALOGUE_NAMES[layout]).glob(name))
    for file in files:
        file.chmod(mode)
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    command += [sys.executable, "-c", OPEN, str(path), layout]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert "Permission denied" in done.stdout, done
    assert not asides(path)
    for file in files:
        file.chmod(0o600)
    directory = SsdDirectory(path, layout=layout)
    assert keys(directory) == there
    directory.close()


def test_a_record_that_the_disk_does_not_give_is_no_corruption() -> None:
    """The binding ends an iteration without an error; why it ended is asked for then."""

    class Ended:
        def seek(self, _: bytes) -> None: ...

        def valid(self) -> bool:
            return False

        def status(self) -> None:
            raise RuntimeError("IO error: While pread offset 0 len 4096: /ssd/catalogue/000009.sst: Input/output error")

    class Database:
        def iter(self) -> Ended:
            return Ended()

    assert type(module._why_ended(Database(), b"R")) is CatalogueError  # type: ignore[arg-type]


def test_a_catalogue_that_may_not_be_written_while_it_is_used_heals_with_a_probe(tmp_path: Path) -> None:
    made = Catalogue(tmp_path / "catalogue", FileLayer())
    made.write({b"Rone": b"1"})
    with immutable(*(tmp_path / "catalogue").iterdir()):
        with pytest.raises(CatalogueError, match="Operation not permitted"):
            made.write({b"Rtwo": b"2"})
        for _ in range(2):
            with pytest.raises(CatalogueError, match="Operation not permitted"):
                made.probe()
    made.probe()
    assert made._get([b"Rone"]) == [b"1"]
    made.close()


class Refusing(FileLayer):
    """Moves no file whose name begins so, and makes no directory beside what is there, as long as it `refuses`."""

    refuses = ""

    def rename(self, before: Path, after: Path) -> None:
        if self.refuses and before.name.startswith(self.refuses) and "aside" in str(after):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(before))
        super().rename(before, after)

    def make_directory(self, path: Path) -> None:
        if self.refuses == "aside":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        super().make_directory(path)


@pytest.mark.parametrize("refuses", ["aside", "catalogue", "segment-"])
def test_what_cannot_be_set_aside_stays_whole_names_both_causes_and_leaves_no_directory(
    tmp_path: Path, refuses: str
) -> None:
    path, layer = tmp_path / "ssd", Refusing()
    there = written(path)
    current = path / CATALOGUE_NAMES[EXTENTS] / "CURRENT"
    right = current.read_bytes()
    current.write_bytes(b"")
    layer.refuses = refuses
    for _ in range(2):
        with pytest.raises(CatalogueError, match=r"(?s)CURRENT file does not end.*Permission denied; check owner"):
            SsdDirectory(path, layer)
        assert not asides(path)
    current.write_bytes(right)
    directory = SsdDirectory(path, layer)
    assert keys(directory) == there
    directory.close()


def test_an_empty_directory_of_an_attempt_that_was_cut_off_is_removed_and_one_with_files_is_not(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    written(path)
    (path / "aside-20260101-000000").mkdir()
    (path / "aside-20260101-000001").mkdir()
    (path / "aside-20260101-000001" / "segment-00000001.kv").touch()
    directory = SsdDirectory(path)
    assert [aside.name for aside in asides(path)] == ["aside-20260101-000001"]
    directory.close()


@pytest.mark.parametrize(("layout", "other"), [(EXTENTS, ROCKSDB), (ROCKSDB, EXTENTS)])
def test_what_another_layout_left_is_told_with_its_files_and_bytes(tmp_path: Path, layout: str, other: str) -> None:
    path = tmp_path / "ssd"
    written(path, other)
    taken = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.name not in ("lock", "ballast"))
    directory = SsdDirectory(path, layout=layout)
    told = directory.other_layout
    assert told is not None
    assert told.name == other
    assert told.files > 5
    assert told.size_bytes == taken
    assert directory.leftovers == []
    directory.close()
    again = SsdDirectory(path, layout=layout)
    assert again.other_layout is None
    again.close()


def test_files_that_could_not_be_made_are_not_told_of_as_files_that_cannot_be_removed() -> None:
    drops = Drops()
    assert not drops.failed(7, "", 100.0)
    assert drops.trouble == ""
    assert drops.due(1000.0) == [7], "its row may be there, or its file"
    assert not drops.ended(7), "nothing was told of"
    drops.failed(8, "", 1000.0)
    assert drops.failed(8, "removing segment-00000008.kv: Permission denied", 1000.0)
    assert drops.trouble.startswith("1 segment files cannot be removed: removing segment-00000008.kv")
    assert drops.ended(8), "what was told of is over"
    assert drops.trouble == ""


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/ssd/x"),
            "/ssd/x: Permission denied; check owner and mode",
        ),
        (OSError(errno.EPERM, "a page written as a probe: Operation not permitted"), "check owner and mode of /ssd"),
        (CatalogueError("IO error: LOG: Read-only file system"), "mounted for writing"),
        (CatalogueError("IO error: LOG: Too many open files"), "LimitNOFILE"),
    ],
)
def test_what_is_refused_is_told_with_what_to_do(error: Exception, step: str) -> None:
    said = with_next_step(error, Path("/ssd"))
    assert step in said
    assert with_next_step(CatalogueError(said), Path("/ssd")) == said, "said twice"
