"""Places where memory outlives the daemon: a tmpfs directory, or systemd's store of file descriptors.

A place makes memory by name and has, by name, what an earlier daemon left. Whatever nobody
adopts is removed there; clients that still have it mapped keep their own until they let go.
"""

import ctypes
import fcntl
import os
import re
from collections.abc import Mapping as Named
from contextlib import suppress
from pathlib import Path

from kvstore.errors import ConfigError, StartupError
from kvstore.instance import describe_process, private_directory
from kvstore.sdnotify import Notifier
from kvstore.tiers.slab import PREFIX, sealed_memfd

TMPFS_MAGIC = 0x01021994
"""statfs(2), linux/magic.h."""

LOCK_NAME = "lock"
OURS = re.compile(r"ledger|(segment|rows)-[0-9]{1,10}")

_libc = ctypes.CDLL(None, use_errno=True)


class Directory:
    """A directory of the daemon's own on a tmpfs, one file a name.

    Files cannot be sealed: who may write to one can also cut it short, and so end the daemon.
    So only processes of the daemon's own user are given any to write to. Others may fill the file
    system: every page is made when its file is, or before it is touched, and none is punched out
    of a file that somebody may still have mapped.
    """

    kind = "directory"
    punches = False

    def __init__(self, path: Path) -> None:
        """Makes and locks it. Raises StartupError, and ConfigError for a path that can never be used."""
        self.path = path
        there = next(directory for directory in (path, *path.parents) if directory.exists())
        if _file_system(there) != TMPFS_MAGIC:
            raise ConfigError(f"host.persist: {path} is not on a tmpfs: name a directory such as /dev/shm/kvstored")
        private_directory(path)
        found = path.stat()
        # Never made so here: by root, of a path such as /dev/shm or /run, that would be the end of other programs.
        if found.st_uid != os.geteuid() or found.st_mode & 0o777 != 0o700:
            raise ConfigError(
                f"host.persist: {path} is not the daemon's alone (user {found.st_uid}, "
                f"mode {found.st_mode & 0o7777:o}): name a directory below it that is not there yet, or one of mode 700"
            )
        self._lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            words = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            os.close(self._lock)
            holder = describe_process(int(words)) if words.isdecimal() else "another process"
            raise StartupError(f"host.persist: {path} is used by {holder}: stop it or choose another path") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def found(self) -> dict[str, int]:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        return {path.name: os.open(path, flags) for path in self.path.iterdir() if OURS.fullmatch(path.name)}

    def make(self, name: str, size_bytes: int, *, huge_pages: bool = False) -> int:
        assert not huge_pages, "files of a tmpfs have no huge pages of their own"
        path = self.path / name
        path.unlink(missing_ok=True)  # whoever has the old one mapped keeps it, and sees nothing of the new one
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            (self.path / name).unlink()

    def tidy(self) -> None: ...

    def check_room(self, size_bytes: int) -> None:
        free_bytes = self.free_bytes
        if free_bytes is not None and size_bytes > free_bytes:
            raise StartupError(
                f"host.size: {-(-size_bytes >> 20)}MiB more have no room on the file system of host.persist = "
                f"{self.path}, which has {free_bytes >> 20}MiB free: free some, enlarge it (mount -o remount,size=), "
                "or make host.size smaller"
            )

    @property
    def free_bytes(self) -> int | None:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize if found.f_blocks else None

    def close(self) -> None:
        os.close(self._lock)

    @property
    def trouble(self) -> str:
        return ""


class DescriptorStore:
    """Memfds of which systemd keeps a descriptor, as long as the unit restarts and does not stop."""

    kind = "fdstore"
    punches = True

    def __init__(self, notifier: Notifier, left: Named[str, int]) -> None:
        """`left`: what systemd handed over, by name."""
        self._notifier = notifier
        self.path = ""
        self._left = dict(left)
        self._unremoved: set[str] = set()

    def found(self) -> dict[str, int]:
        left, self._left = self._left, {}
        return left

    def make(self, name: str, size_bytes: int, *, huge_pages: bool = False) -> int:
        self._unremoved.discard(name)
        descriptor = sealed_memfd(PREFIX + name, size_bytes, huge_pages=huge_pages)
        try:
            self._notifier.keep(PREFIX + name, descriptor)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def remove(self, name: str) -> None:
        if not self._notifier.keep_no_more(PREFIX + name):
            self._unremoved.add(name)

    def tidy(self) -> None:
        for name in list(self._unremoved):
            if not self._notifier.keep_no_more(PREFIX + name):
                break
            self._unremoved.discard(name)

    def check_room(self, size_bytes: int) -> None: ...
    def close(self) -> None: ...

    @property
    def free_bytes(self) -> int | None:
        return None

    @property
    def trouble(self) -> str:
        return "" if self._notifier.keeps else "host.persist is fdstore, and this is no service of systemd"


Lasting = Directory | DescriptorStore
"""A place where memory outlives the daemon."""


def _file_system(path: Path) -> int:
    """Its magic number: the first word of struct statfs."""
    found = (ctypes.c_long * 64)()
    if _libc.statfs(os.fsencode(path), found) != 0:
        number = ctypes.get_errno()
        raise StartupError(f"host.persist: {path} cannot be used: {os.strerror(number)}")
    return found[0]
