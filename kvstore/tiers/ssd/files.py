"""The operating system's calls on files, in one place, so that a test can stand in their way.

Every method is one call and raises OSError as the kernel says it. The calls that move bytes
or wait for the disk release the GIL.
"""

import fcntl
import os
import shutil
from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
BLOCK_UNIT_BYTES = 512
"""What st_blocks counts in, whatever the file system's blocks are: stat(2)."""


class FileLayer:
    """The real thing; has no state."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor that no started program inherits; a symlink at the path is refused."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def chmod(self, path: Path, mode: int) -> None:
        path.chmod(mode)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """Gives a file its blocks at once; needs a descriptor without O_DIRECT where this is emulated."""
        os.posix_fallocate(descriptor, 0, size_bytes)

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        os.ftruncate(descriptor, size_bytes)

    def stat(self, descriptor: int) -> os.stat_result:
        return os.fstat(descriptor)

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        """How many bytes came, which may be fewer than the view has."""
        return os.preadv(descriptor, [view], offset)

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        """How many bytes went, which may be fewer than the view has."""
        return os.pwritev(descriptor, [view], offset)

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """After this the names in a directory are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path) -> None:
        path.mkdir(DIRECTORY_MODE)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        """A directory with everything below it; nothing where there is none."""
        if path.is_symlink():
            raise OSError(f"{path} is a symbolic link")
        if path.exists():
            shutil.rmtree(path)

    def remove_directory(self, path: Path) -> None:
        """An empty one, and no other."""
        path.rmdir()

    def rename(self, before: Path, after: Path) -> None:
        before.rename(after)

    def names(self, path: Path) -> list[str]:
        """What is in a directory, sorted; nothing where there is none."""
        try:
            return sorted(entry.name for entry in path.iterdir())
        except FileNotFoundError:
            return []

    def lock(self, descriptor: int) -> bool:
        """Whether the flock on a file is ours now."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def free_bytes(self, path: Path) -> int:
        """What this user can still write to the file system."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def physical_bytes(self, path: Path) -> int:
        """What a file, or a directory with everything below it, takes on the disk; 0 for what has just gone."""
        try:
            total = path.lstat().st_blocks * BLOCK_UNIT_BYTES
            if path.is_dir() and not path.is_symlink():
                total += sum(self.physical_bytes(path / name) for name in self.names(path))
        except FileNotFoundError:
            return 0
        return total
