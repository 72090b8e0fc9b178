"""One SSD directory: locked, opened, and set aside where it cannot be read.

What cannot be read is moved into a directory of its own inside (the path itself may be a
mount point) and a new catalogue begun; it is never deleted. Deleted are only segment files
that no row names, which a crash between the making of a file and its row, or between the
end of a row and its file, leaves behind, and what another layout left: whoever changes
`ssd.layout` begins with an empty SSD.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import StartupError
from kvstore.instance import describe_process, private_directory, start_ticks
from kvstore.tiers.ssd.ballast import Ballast
from kvstore.tiers.ssd.budget import SIZE_BYTES, budget_of
from kvstore.tiers.ssd.catalogue import CURRENT_NAME, Catalogue
from kvstore.tiers.ssd.emptied import knows_nothing
from kvstore.tiers.ssd.extents import Extents
from kvstore.tiers.ssd.faults import CatalogueError, Unreadable, with_next_step
from kvstore.tiers.ssd.files import DIRECTORY_MODE, FileLayer
from kvstore.tiers.ssd.format import (
    ASIDE_PREFIX,
    CATALOGUE_NAMES,
    EXTENTS,
    LOCK_NAME,
    PROBE_NAME,
    REASON_NAME,
    REMOVED_NAME,
    SegmentRow,
    segment_name,
    segment_number,
)
from kvstore.tiers.ssd.payload import Payload

LOCK_FILE_BYTES_MAX = 256
ASIDE_A_SECOND_MAX = 100


class DirectoryHeld(Exception):
    """Another process has it; the message names the process and says what to do."""


@dataclass(frozen=True)
class Aside:
    """What was set aside once. `size_bytes` is what it takes on the disk."""

    path: Path
    reason: str
    size_bytes: int


@dataclass(frozen=True)
class OtherLayout:
    """What was removed because `ssd.layout` is another now. `size_bytes` is what it took on the disk."""

    name: str
    files: int
    size_bytes: int


class Sizes(NamedTuple):
    """In bytes of the disk."""

    free: int
    physical: int
    """All of it; not what was set aside."""
    catalogue: int
    """Of that, all but the segment files."""
    log: int
    ballast_missing: int
    """Of what is to give way when there is no room: as much as there should be and is not."""


class SsdDirectory:
    """An open directory: its `catalogue`, its `extents`, and what was found on the way."""

    def __init__(
        self, path: Path, layer: FileLayer | None = None, layout: str = EXTENTS, size_bytes: int = SIZE_BYTES
    ) -> None:
        """Makes the directory where it is missing. `size_bytes` is what may be taken of the disk.

        Raises DirectoryHeld, StartupError (the path is not safe to use), and, for what may
        pass, CatalogueError or OSError; nothing is held then.
        """
        self.path = path.absolute()
        self.layout = layout
        self._layer = layer or FileLayer()
        self._catalogue_name = CATALOGUE_NAMES[layout]
        self.budget = budget_of(size_bytes)
        with_payload = layout != EXTENTS
        ballast_bytes = self.budget.ballast_bytes if with_payload else self.budget.catalogue_ballast_bytes
        self._ballast = Ballast(self.path, self._layer, ballast_bytes)
        self.set_aside_now: list[Aside] = []
        """What could not be read and was set aside since this object was made."""
        self.leftovers: list[str] = []
        """Files that a crash left behind, removed now."""
        self.other_layout: OtherLayout | None = None
        """What another layout left behind, removed now."""
        self.damaged: dict[int, str] = {}
        """Segments whose file is missing or too short, and how; their rows are in the catalogue."""
        if not self.path.parent.is_dir():
            # Made by us it would lie in the file system around the one that is not mounted.
            raise StartupError(
                f"{self.path.parent} is not there: mount its file system, or make it; "
                "no more than the last directory of ssd.path is made here"
            )
        private_directory(self.path)
        if self.path.stat().st_mode & 0o022:
            raise StartupError(f"others may write to {self.path}: name a directory of the daemon's own below it")
        self._lock = self._locked()
        try:
            if self.path.stat().st_mode & 0o777 != DIRECTORY_MODE:
                self._layer.chmod(self.path, DIRECTORY_MODE)
            # A directory that was just made must not be gone after a power cut, and what was acknowledged with it.
            with suppress(PermissionError):
                self._layer.sync_directory(self.path.parent)
            try:
                self._open()
            except Unreadable as e:
                self._move_aside(str(e))
                self._open_anew()
        except BaseException:
            self._layer.close(self._lock)
            raise

    catalogue: Catalogue
    extents: Payload

    def set_aside(self, reason: str) -> Aside:
        """Moves all that is there out of the way and begins anew; close every `SsdTier` on it before.

        For what is found unreadable later, in `Catalogue.records`. Raises CatalogueError, OSError,
        and Unreadable if even the new one is.
        """
        self.extents.close()
        with suppress(CatalogueError, Unreadable):
            self.catalogue.close()
        if self.catalogue.is_open:
            raise CatalogueError("a call on the catalogue does not end: it cannot be moved")
        self._move_aside(reason)
        self._open_anew()
        return self.set_aside_now[-1]

    def all_set_aside(self) -> list[Aside]:
        """What lies aside here, of now and of before, oldest first. Walks all of it. Raises OSError."""
        found = []
        for name in self._layer.names(self.path):
            if name.startswith(ASIDE_PREFIX):
                path = self.path / name
                found.append(Aside(path, self._reason(path), self._layer.physical_bytes(path)))
        return found

    def count_aside(self) -> int:
        """How many lie aside here: a look at one directory. Raises OSError."""
        return sum(name.startswith(ASIDE_PREFIX) for name in self._layer.names(self.path))

    def is_in_place(self) -> bool:
        """Whether its path leads to it and to what is in it: somebody may have deleted it under us. Raises OSError."""
        mine = self._layer.stat(self._lock)
        try:
            found = (self.path / LOCK_NAME).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        if (mine.st_dev, mine.st_ino) != (found.st_dev, found.st_ino):
            return False
        if CURRENT_NAME not in self._layer.names(self.path / self._catalogue_name):
            return False
        return not (isinstance(self.extents, Extents) and self.extents.any_unlinked())

    def sizes(self) -> Sizes:
        """What it takes, and what its file system has left. Raises OSError."""
        catalogue, ballast = self.catalogue.physical_bytes(), self._ballast.physical_bytes()
        return Sizes(
            free=self._layer.free_bytes(self.path),
            physical=catalogue + self.extents.physical_bytes() + ballast,
            catalogue=catalogue + ballast,
            log=self.catalogue.log_bytes(),
            ballast_missing=max(self._ballast.size_bytes - ballast, 0),
        )

    def make_room(self, step_bytes: int) -> None:
        """Layout "rocksdb": a log that is too long goes, and about so much of the garbage; takes its time.

        Raises CatalogueError, Unreadable, OSError.
        """
        if self.catalogue.log_bytes() > self.budget.log_bytes:
            self.catalogue.shorten_log()
        if step_bytes:
            self.extents.collect(step_bytes)

    def load_ballast(self) -> None:
        """Takes room that gives way when there is no other (ballast.py). Raises OSError."""
        self._ballast.load()

    def close(self) -> None:
        """Closes all and gives the lock back; close every `SsdTier` on it before."""
        try:
            self.extents.close()
            self.catalogue.close()
        finally:
            self._layer.close(self._lock)

    def _open(self) -> None:
        names = self._remove_other_layouts(self._layer.names(self.path))
        self._remove_empty_asides(names)
        segments = [name for name in names if segment_number(name) is not None]
        if segments and self._catalogue_name not in names:
            raise Unreadable(f"{len(segments)} segment files and no catalogue in {self.path}")
        with_payload = self.layout != EXTENTS
        store = self.path / self._catalogue_name
        if knows_nothing(store, self._layer.names(store), self.budget, payload=with_payload):
            raise Unreadable(f"tables and a manifest that knows nothing in {store}")
        self.catalogue = Catalogue(
            self.path / self._catalogue_name,
            self._layer,
            payload=with_payload,
            size_bytes=self.budget.size_bytes,
            make_way=self._ballast.drop,
        )
        try:
            self._check_not_emptied(segments)
            rows = {row.number: row for row in self.catalogue.segments()}
            self._remove_leftovers(names, {} if with_payload else rows)
            self.extents = _blobs(self.catalogue) if with_payload else Extents(self.path, self._layer)
        except BaseException:
            with suppress(CatalogueError, Unreadable):
                self.catalogue.close()
            raise
        self.damaged = _damaged(rows, self.extents.existing())
        for number in self.damaged.keys() & self.extents.existing().keys():
            with suppress(OSError):  # it stays short, and is told of and tried again at the next start
                self._lengthen(rows[number])

    def _lengthen(self, row: SegmentRow) -> None:
        """Gives a file that was cut short its size again. What is in the rest now has no block's checksum."""
        descriptor = self._layer.open(self.path / segment_name(row.number), os.O_RDWR)
        try:
            self._layer.allocate(descriptor, row.size_bytes)
            self._layer.sync(descriptor)
        finally:
            self._layer.close(descriptor)

    def _check_not_emptied(self, segments: list[str]) -> None:
        """A catalogue of which a part is missing may open as a new one: it is no reason to delete the files."""
        if segments and self.catalogue.is_new:
            raise Unreadable(f"{len(segments)} segment files and a catalogue that knows nothing in {self.path}")

    def _open_anew(self) -> None:
        try:
            self._open()
        except Unreadable as e:
            raise CatalogueError(f"a new catalogue cannot be read: {e}") from e

    def _remove_leftovers(self, names: list[str], rows: dict[int, SegmentRow]) -> None:
        for name in names:
            number = segment_number(name)
            if name == PROBE_NAME or (number is not None and number not in rows):
                self._layer.unlink(self.path / name)
                self.leftovers.append(name)

    def _remove_other_layouts(self, names: list[str]) -> list[str]:
        """What is left. A crash on the way leaves what is removed here the next time, or is seen as damaged files."""
        others = [name for name in CATALOGUE_NAMES.values() if name != self._catalogue_name and name in names]
        if others:
            gone = [name for name in names if segment_number(name) is not None]
            self.other_layout = self._described(others, gone)
            for name in gone:
                self._layer.unlink(self.path / name)
            self._layer.remove_tree(self.path / REMOVED_NAME)
            for name in others:
                # First out of the way as a whole: half a RocksDB would be taken for a broken one.
                self._layer.rename(self.path / name, self.path / REMOVED_NAME)
                self._layer.sync_directory(self.path)
                self._layer.remove_tree(self.path / REMOVED_NAME)
        elif REMOVED_NAME in names:
            self._layer.remove_tree(self.path / REMOVED_NAME)
        return self._layer.names(self.path)

    def _described(self, others: list[str], segments: list[str]) -> OtherLayout:
        """Of the layouts whose catalogues these are."""
        layouts = [layout for layout, name in CATALOGUE_NAMES.items() if name in others]
        inside = sum(len(self._layer.names(self.path / name)) for name in others)
        size_bytes = sum(self._layer.physical_bytes(self.path / name) for name in (*others, *segments))
        return OtherLayout(", ".join(layouts), inside + len(segments), size_bytes)

    def _move_aside(self, reason: str) -> None:
        """All or nothing of it: what cannot be moved stays where it is, to be met again."""
        try:
            aside = self._new_aside()
            self._move_into(aside)
        except OSError as e:
            step = with_next_step(e, self.path)
            raise CatalogueError(f"it cannot be read ({reason}) and not be set aside: {step}") from e
        try:
            self._write_reason(aside / REASON_NAME, f"{reason}\n".encode())
        except OSError as e:
            # A full disk is no reason to leave what cannot be read where it is.
            reason = f"{reason} (not written to {REASON_NAME}: {e.strerror})"
        # Before what may fail: it is moved, and lost with that.
        self.set_aside_now.append(Aside(aside, reason, self._layer.physical_bytes(aside)))
        self._layer.sync_directory(aside)
        self._layer.sync_directory(self.path)

    def _move_into(self, aside: Path) -> None:
        # The catalogue first: segment files that a crash leaves without one are set aside at the next start.
        names = self._layer.names(self.path)
        moving = [self._catalogue_name] if self._catalogue_name in names else []
        moving += [name for name in names if segment_number(name) is not None]
        moved: list[str] = []
        try:
            for name in moving:
                self._layer.rename(self.path / name, aside / name)
                moved.append(name)
        except OSError:
            with suppress(OSError):
                for name in reversed(moved):
                    self._layer.rename(aside / name, self.path / name)
                self._layer.remove_directory(aside)
            raise

    def _remove_empty_asides(self, names: list[str]) -> None:
        """As an attempt to set something aside leaves them that was cut off."""
        for name in names:
            if name.startswith(ASIDE_PREFIX):
                with suppress(OSError):  # most often that there is something in it
                    self._layer.remove_directory(self.path / name)

    def _write_reason(self, path: Path, reason: bytes) -> None:
        descriptor = self._layer.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            self._layer.write(descriptor, memoryview(reason), 0)
        finally:
            self._layer.close(descriptor)

    def _new_aside(self) -> Path:
        name = ASIDE_PREFIX + time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        for number in range(1, ASIDE_A_SECOND_MAX):
            path = self.path / (name if number == 1 else f"{name}-{number}")
            try:
                self._layer.make_directory(path)
            except FileExistsError:
                continue
            return path
        raise CatalogueError(f"{ASIDE_A_SECOND_MAX} catalogues were set aside in {self.path} within a second")

    def _reason(self, aside: Path) -> str:
        try:
            return (aside / REASON_NAME).read_text(errors="replace").strip()
        except FileNotFoundError:
            return "not written down"

    def _locked(self) -> int:
        path = self.path / LOCK_NAME
        descriptor = self._layer.open(path, os.O_RDWR | os.O_CREAT)
        try:
            self._take(descriptor, path)
        except BaseException:
            self._layer.close(descriptor)
            raise
        return descriptor

    def _take(self, descriptor: int, path: Path) -> None:
        if not self._layer.lock(descriptor):
            signed = bytearray(LOCK_FILE_BYTES_MAX)
            length = self._layer.read(descriptor, memoryview(signed), 0)
            holder = _holder(signed[:length].decode(errors="replace").split())
            raise DirectoryHeld(f"{holder} holds {path}: stop it, or give this daemon an ssd.path of its own")
        # Signed where there is room for it: the lock holds without.
        with suppress(OSError):
            self._layer.truncate(descriptor, 0)
            signature = f"{os.getpid()} {start_ticks(os.getpid())}\n"
            self._layer.write(descriptor, memoryview(signature.encode()), 0)


def _holder(signature: list[str]) -> str:
    """The process that signed the lock file, if it is the one that runs under its pid now."""
    if len(signature) == 2 and signature[0].isdecimal():
        pid = int(signature[0])
        if signature[1] == str(start_ticks(pid)):
            return describe_process(pid)
    return "a process that cannot be named from here"


def _blobs(catalogue: Catalogue) -> Payload:
    # Here, not above: zstandard is for those who have chosen this layout.
    from kvstore.tiers.ssd.blobs import Blobs

    return Blobs(catalogue)


def _damaged(rows: dict[int, SegmentRow], existing: dict[int, int]) -> dict[int, str]:
    found = {}
    for row in rows.values():
        size = existing.get(row.number)
        if size is None:
            found[row.number] = f"{segment_name(row.number)} is missing"
        elif size < row.size_bytes:
            found[row.number] = f"{segment_name(row.number)} has {size} bytes of {row.size_bytes}"
    return found
