"""Whether ssd.path leads to the file system that it led to before.

A disk that was unmounted under the daemon leaves its mount point, an ordinary directory of the
file system around it: blocks written there would fill that one, unseen, and be hidden when the
disk comes back. Before the first look nothing is known; so only the directory itself is ever
made (directory.py), never what it is in.
"""

import os
from pathlib import Path

from kvstore.errors import ConfigError, StartupError


def refuse_no_directory(path: Path) -> None:
    """Raises ConfigError where something is at the path, or on the way, that no disk coming back makes a directory."""
    for found in (path, *path.parents):
        try:
            if found.exists() and not found.is_dir():
                what = "is" if found == path else f"is below {found}, which is"
                raise ConfigError(f"ssd.path = {path} {what} not a directory: move that away, or choose another path")
        except OSError:
            return  # opening it says so, again and again: it may pass


class Home:
    """Of one path, for one life of the daemon."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._device: int | None = None
        self._around: set[int] = set()
        """The file systems in whose directories it was mounted."""

    def check(self) -> None:
        """Raises StartupError where a file system of its own has given way to the one around it, OSError too."""
        try:
            device = self._path.stat().st_dev
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                return  # which opening it says
            device = self._path.parent.stat().st_dev
        if device != self._device and device in self._around:
            raise StartupError(
                f"{self._path} was on a file system of its own that is not mounted any more: mount it, "
                "or restart the daemon to use the one around it"
            )

    def is_open(self) -> None:
        """It is in use as it is now. Raises OSError."""
        self._device = self._path.stat().st_dev
        around = Path(os.path.realpath(self._path)).parents
        self._around = {parent.stat().st_dev for parent in around} - {self._device}
