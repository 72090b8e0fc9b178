"""A file that takes room so that there is some when nothing else gives any.

RocksDB writes before it opens: its log is written out, a manifest is begun. On a file system
that is full to the last byte, of our own payload maybe, it would never open again, so nothing
could be made less. Then this file goes, and is made again when there is room for it.
"""

import os
from contextlib import suppress
from pathlib import Path

from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import BALLAST_NAME


class Ballast:
    """Of one directory."""

    def __init__(self, directory: Path, layer: FileLayer, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._path = directory / BALLAST_NAME
        self._layer = layer

    def physical_bytes(self) -> int:
        """What it takes. Raises OSError."""
        return self._layer.physical_bytes(self._path)

    def load(self) -> None:
        """Makes it, whole. Raises OSError, leaving none."""
        try:
            descriptor = self._layer.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                self._layer.allocate(descriptor, self.size_bytes)
            finally:
                self._layer.close(descriptor)
        except OSError:
            with suppress(OSError):
                self.drop()
            raise

    def drop(self) -> bool:
        """Whether the file system has more room now. Raises OSError."""
        if not self.physical_bytes():
            return False
        self._layer.unlink(self._path)
        return True
