"""Handles that this process has open, each mapped once however often it is opened.

A mapping whose close has not returned still counts, so that what hangs can be seen; the
same handle opened meanwhile is mapped anew. No lock is held while the driver works, except
the one of the handle concerned: a call that hangs delays only who wants the same handle.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstored_cuda.devices.device import Mapping
from kvstored_cuda.devices.errors import DeviceTimeout
from kvstored_cuda.devices.handles import Handle

SAME_HANDLE_S = 60.0
"""The longest wait for another thread that is opening the same handle."""

Identity = tuple[bytes, int, int]


@dataclass
class _Entry:
    address: int = 0
    users: int = 0
    gone: bool = False
    opening: threading.Lock = field(default_factory=threading.Lock)


class Opened:
    """Mapped handles by identity. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Identity, _Entry] = {}
        self._closing = 0

    def __len__(self) -> int:
        """Mappings that are there, those being closed included."""
        with self._lock:
            return sum(1 for entry in self._entries.values() if entry.users) + self._closing

    def open(self, handle: Handle, map_it: Callable[[], int], unmap: Callable[[int], None]) -> Mapping:
        """A use of `handle`: `map_it` is called for the first one. Raises what it raises, or DeviceTimeout.

        unmap: called with the address when the last use ends.
        """
        while True:
            with self._lock:
                entry = self._entries.setdefault(handle.identity, _Entry())
            if not entry.opening.acquire(timeout=SAME_HANDLE_S):
                raise DeviceTimeout(f"another thread has been opening handle {handle.serial} for {SAME_HANDLE_S} s")
            try:
                with self._lock:
                    if entry.gone:
                        continue
                    if entry.users:
                        entry.users += 1
                        return _Use(self, entry, handle, unmap)
                address = self._first(handle, entry, map_it)
                with self._lock:
                    entry.address, entry.users = address, 1
                return _Use(self, entry, handle, unmap)
            finally:
                entry.opening.release()

    def _first(self, handle: Handle, entry: _Entry, map_it: Callable[[], int]) -> int:
        try:
            return map_it()
        except BaseException:
            with self._lock:
                entry.gone = True
                del self._entries[handle.identity]
            raise

    def close_one(self, handle: Handle, entry: _Entry, unmap: Callable[[int], None]) -> None:
        """Ends one use; the last one unmaps. After DeviceTimeout it is still mapped and counts: it may be asked again.
        After another error the driver has nothing mapped there any more."""
        with self._lock:
            if not entry.gone:
                assert entry.users > 0, "each use is closed once"
                entry.users -= 1
                if entry.users:
                    return
                entry.gone = True
                del self._entries[handle.identity]
                self._closing += 1
        try:
            unmap(entry.address)
        except DeviceTimeout:
            raise
        except BaseException:
            self._unmapped()
            raise
        self._unmapped()

    def _unmapped(self) -> None:
        with self._lock:
            self._closing -= 1


class _Use(Mapping):
    def __init__(self, opened: Opened, entry: _Entry, handle: Handle, unmap: Callable[[int], None]) -> None:
        self.address, self.size_bytes, self.handle = entry.address, handle.size_bytes, handle
        self._opened, self._entry, self._unmap = opened, entry, unmap
        self._once = threading.Lock()

    def close(self) -> None:
        if self._once.acquire(blocking=False):
            try:
                self._opened.close_one(self.handle, self._entry, self._unmap)
            except DeviceTimeout:
                self._once.release()
                raise
