"""Page-locked memory of a process with a HostDevice: what may be copied asynchronously.

Nothing is locked in truth; what is refused is refused as CUDA does: more than the memlock
limit, what is registered already, what is not mapped, and a mapping that this process may
not write unless it is registered for reading alone.
"""

import ctypes
import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable

from kvstored_cuda.devices.errors import InvalidAddress, PageLockRefused
from kvstored_cuda.devices.host_memory import leave_a_hole, map_anonymous
from kvstored_cuda.devices.ranges import Ranges


def protection_of(address: int, size_bytes: int) -> str:
    """The least that /proc/self/maps grants to all of these bytes, "rw" or "r"; "" where some are not mapped."""
    granted, at, end = "rw", address, address + size_bytes
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, permissions = line.split(maxsplit=2)[:2]
            low, high = (int(part, 16) for part in span.split("-"))
            if high <= at:
                continue
            if low > at or permissions[0] != "r":
                return ""
            if permissions[1] != "w":
                granted = "r"
            at = high
            if at >= end:
                return granted
    return ""


class HostPages:
    """Registrations and allocations by address. Thread-safe."""

    def __init__(self, meet: Callable[[str], None], memlock_bytes: int | None) -> None:
        """meet: called with the name of each call, which fails as it raises."""
        self._meet = meet
        self._memlock_bytes = memlock_bytes
        self._ranges = Ranges("page-locked memory")
        self._lock = threading.Lock()
        self._read_only: set[int] = set()
        self._own: set[int] = set()

    @property
    def page_locked_bytes(self) -> int:
        return self._ranges.total_bytes

    def register(self, address: int, size_bytes: int, read_only: bool) -> None:
        """Raises PageLockRefused."""
        self._meet("register")
        if address % mmap.PAGESIZE or size_bytes % mmap.PAGESIZE or size_bytes <= 0:
            raise InvalidAddress(f"{size_bytes} bytes at {address:#x} are not whole pages of {mmap.PAGESIZE}")
        granted = protection_of(address, size_bytes)
        if not granted or (granted == "r" and not read_only):
            why = "may only be read" if granted else "are not mapped"
            raise PageLockRefused(f"{size_bytes} bytes at {address:#x} {why}; {PageLockRefused.remedy}")
        self._add(address, size_bytes)
        if read_only:
            with self._lock:
                self._read_only.add(address)

    def _add(self, address: int, size_bytes: int) -> None:
        with self._lock:
            locked_bytes = self._ranges.total_bytes
            if self._memlock_bytes is not None and locked_bytes + size_bytes > self._memlock_bytes:
                raise PageLockRefused(
                    f"{size_bytes} bytes more than the {locked_bytes} that are locked: the limit is "
                    f"{self._memlock_bytes}; {PageLockRefused.remedy}"
                )
            try:
                self._ranges.add(address, size_bytes)
            except InvalidAddress as e:
                raise PageLockRefused(str(e)) from e

    def unregister(self, address: int) -> None:
        self._meet("unregister")
        with self._lock:
            if address in self._own:
                raise InvalidAddress(f"{address:#x} was allocated, not registered")
            self._ranges.remove(address)
            self._read_only.discard(address)

    def allocate(self, size_bytes: int) -> int:
        self._meet("host_allocate")
        address = map_anonymous(size_bytes)
        try:
            self._add(address, size_bytes)
        except BaseException:
            leave_a_hole(address, size_bytes)
            raise
        with self._lock:
            self._own.add(address)
        return address

    def free(self, address: int) -> None:
        with self._lock:
            if address not in self._own:
                raise InvalidAddress(f"no page-locked memory was allocated at {address:#x}")
            self._own.remove(address)
            size_bytes = self._ranges.remove(address)
        leave_a_hole(address, size_bytes)

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether all of these bytes are page-locked by one registration."""
        return self._ranges.holds(address, size_bytes)

    def require_writable(self, address: int) -> None:
        """Raises InvalidAddress where the device may only read."""
        with self._lock:
            starts = sorted(self._read_only)
        at = bisect_right(starts, address)
        if at and self._ranges.holds(starts[at - 1], address - starts[at - 1] + 1):
            raise InvalidAddress(f"{address:#x} is registered for reading alone")


def address_of(buffer: bytearray | memoryview | mmap.mmap) -> int:
    """Where a writable buffer of this process lies. The caller keeps it alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
