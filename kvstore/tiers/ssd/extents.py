"""The payload: preallocated segment files, written and read straight from and to the slab.

With O_DIRECT the device itself copies between a slot of the slab and an extent, so views,
lengths and offsets are whole pages. Where the file system takes no O_DIRECT (asked once, by
a page really written and read back), `direct_refused` says why and everything is buffered.

Safe in any thread; the GIL is released while bytes move. A segment that is dropped while
somebody reads it is closed when the last of them is done: a descriptor that was closed too
early could be another file by the time it is used.
"""

import errno
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.core.segments import PAGE_BYTES
from kvstore.tiers.ssd.files import BLOCK_UNIT_BYTES, FILE_MODE, FileLayer
from kvstore.tiers.ssd.format import PROBE_NAME, segment_name, segment_number
from kvstore.tiers.ssd.payload import Place


class _File:
    """An open segment file."""

    __slots__ = ("descriptor", "dropped", "path", "users")

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.users = 0
        self.dropped = False


class Extents:
    """All segment files of one directory."""

    def __init__(self, path: Path, layer: FileLayer) -> None:
        """Opens the segment files that are there. Raises OSError."""
        self._path = path
        self._layer = layer
        self._lock = threading.Lock()
        self._files: dict[int, _File] = {}
        self._unremoved: set[int] = set()
        """Segments whose files should be gone and could not be unlinked: they take room until a `drop` succeeds."""
        self.direct_refused = self._why_not_direct()
        """Why bytes pass through the page cache; empty where they do not."""
        try:
            for name in layer.names(path):
                number = segment_number(name)
                if number is not None:
                    self._files[number] = self._open(path / name)
        except BaseException:
            self.close()
            raise

    def _why_not_direct(self) -> str:
        self.direct_refused = ""
        try:
            self.probe()
        except OSError as e:
            if e.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return f"the file system of {self._path} takes no O_DIRECT ({os.strerror(e.errno)})"
            if e.errno != errno.ENOSPC:
                raise
            # Full: what is there can be read, and opening says whether O_DIRECT is taken at all.
        return ""

    # -- segments

    def make(self, segment: int, size_bytes: int) -> None:
        """A file of this size, its blocks given to it at once, its name on the disk. Raises OSError, leaving none."""
        assert size_bytes % PAGE_BYTES == 0, f"a segment of {size_bytes} bytes"
        assert segment not in self._files, f"segment {segment} made twice"
        path = self._path / segment_name(segment)
        layer = self._layer
        # What a drop that failed half-way left behind.
        with suppress(FileNotFoundError):
            layer.unlink(path)
        try:
            descriptor = layer.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                layer.chmod(path, FILE_MODE)
                layer.allocate(descriptor, size_bytes)
                layer.sync(descriptor)
            finally:
                layer.close(descriptor)
            layer.sync_directory(self._path)
            made = self._open(path)
        except OSError as e:
            try:
                layer.unlink(path)
            except OSError as left:
                self._note_unremoved(segment, left.errno != errno.ENOENT)
            raise _said(e, f"making {path.name} of {size_bytes} bytes") from e
        with self._lock:
            self._files[segment] = made

    def drop(self, segment: int) -> None:
        """Unlinks a file; nothing where there is none. Raises OSError."""
        with self._lock:
            gone = self._files.pop(segment, None)
            if gone is not None:
                gone.dropped = True
                if not gone.users:
                    self._layer.close(gone.descriptor)
        path = self._path / segment_name(segment)
        try:
            self._layer.unlink(path)
            self._layer.sync_directory(self._path)
        except FileNotFoundError:
            pass
        except OSError as e:
            self._note_unremoved(segment, True)
            raise _said(e, f"removing {path.name}") from e
        self._note_unremoved(segment, False)

    def _note_unremoved(self, segment: int, unremoved: bool) -> None:
        with self._lock:
            (self._unremoved.add if unremoved else self._unremoved.discard)(segment)

    def existing(self) -> dict[int, int]:
        """Segment -> bytes in its file, as far as it goes. Raises OSError."""
        with self._lock:
            return {number: self._layer.stat(file.descriptor).st_size for number, file in self._files.items()}

    def any_unlinked(self) -> bool:
        """Whether somebody has deleted a file that is in use. Raises OSError."""
        with self._lock:
            return any(not self._layer.stat(file.descriptor).st_nlink for file in self._files.values())

    def physical_bytes(self) -> int:
        """What all segment files take on the disk. Raises OSError."""
        with self._lock:
            files = sum(self._layer.stat(f.descriptor).st_blocks * BLOCK_UNIT_BYTES for f in self._files.values())
            unremoved = list(self._unremoved)
        return files + sum(self._layer.physical_bytes(self._path / segment_name(segment)) for segment in unremoved)

    # -- bytes

    def write(self, segment: int, offset: int, view: memoryview) -> int:
        """Writes all of `view`; on the disk after `sync`. Raises OSError, with part of it written or none."""
        _check(offset, view)
        done = 0
        with self._using(segment) as file:
            what = f"writing {len(view)} bytes at {offset} of {file.path.name}"
            while done < len(view):
                try:
                    went = self._layer.write(file.descriptor, view[done:] if done else view, offset + done)
                except OSError as e:
                    raise _said(e, what) from e
                # The next piece must begin on a page as well.
                went -= went % PAGE_BYTES
                if not went:
                    raise OSError(errno.EIO, f"{what}: only {done} went")
                done += went
        return 0

    def vacate(self, places: Iterable[Place]) -> None:
        """An extent keeps what it had until it is written again."""

    def collect(self, size_bytes: int) -> None:
        """Nothing is left over: extents are written in place."""

    def read(self, segment: int, offset: int, view: memoryview) -> None:
        """Fills all of `view`. Raises OSError, also where the file ends before."""
        _check(offset, view)
        done = 0
        with self._using(segment) as file:
            what = f"reading {len(view)} bytes at {offset} of {file.path.name}"
            while done < len(view):
                try:
                    came = self._layer.read(file.descriptor, view[done:] if done else view, offset + done)
                except OSError as e:
                    raise _said(e, what) from e
                came -= came % PAGE_BYTES
                if not came:
                    raise OSError(errno.EIO, f"{what}: the file ends before")
                done += came

    def sync(self, segments: Iterable[int]) -> dict[int, str]:
        """Waits until what was written to these is on the disk; segment -> what went wrong, for those it did.

        What was written to a segment that is named in the answer may be lost, and another
        sync proves nothing about it: the kernel reports a failed write-out once.
        """
        failed: dict[int, str] = {}
        for segment in segments:
            try:
                with self._using(segment) as file:
                    self._layer.sync(file.descriptor)
            except OSError as e:
                failed[segment] = f"syncing {segment_name(segment)}: {e.strerror}"
        return failed

    def probe(self) -> None:
        """Writes a page to a file of its own, syncs it, and reads it back the way blocks go. Raises OSError."""
        path = self._path / PROBE_NAME
        page = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
        written, found = page[:PAGE_BYTES], page[PAGE_BYTES:]
        written[:] = os.urandom(PAGE_BYTES)
        try:
            with suppress(FileNotFoundError):
                self._layer.unlink(path)
            descriptor = self._layer.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | self._flags)
            try:
                went = self._layer.write(descriptor, written, 0)
                self._layer.sync(descriptor)
                came = self._layer.read(descriptor, found, 0)
            finally:
                self._layer.close(descriptor)
                self._layer.unlink(path)
        except OSError as e:
            # Where O_DIRECT is refused the file was made all the same.
            with suppress(OSError):
                self._layer.unlink(path)
            raise _said(e, f"a page written to {path} as a probe") from e
        if (went, came) != (PAGE_BYTES, PAGE_BYTES) or written != found:
            raise OSError(errno.EIO, f"a page written to {path} as a probe came back as another")

    def close(self) -> None:
        """Closes all files; one that a worker still uses, whose disk does not answer, is closed by that worker."""
        with self._lock:
            for file in self._files.values():
                file.dropped = True
                if not file.users:
                    self._layer.close(file.descriptor)
            self._files.clear()

    @property
    def _flags(self) -> int:
        return 0 if self.direct_refused else os.O_DIRECT

    def _open(self, path: Path) -> _File:
        return _File(path, self._layer.open(path, os.O_RDWR | self._flags))

    @contextmanager
    def _using(self, segment: int) -> Iterator[_File]:
        with self._lock:
            file = self._files.get(segment)
            if file is None:
                raise OSError(errno.ENOENT, f"{segment_name(segment)} is not there")
            file.users += 1
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1
                if file.dropped and not file.users:
                    self._layer.close(file.descriptor)


def _check(offset: int, view: memoryview) -> None:
    assert offset % PAGE_BYTES == 0, f"offset {offset} is not on a page"
    assert view.nbytes == len(view), f"a view of {view.itemsize}-byte items"
    assert len(view) > 0, "an empty view"
    assert len(view) % PAGE_BYTES == 0, f"a view of {len(view)} bytes is not whole pages"


def _said(error: OSError, what: str) -> OSError:
    """The same error with what was being done."""
    return OSError(error.errno, f"{what}: {error.strerror}")
