"""Address ranges that do not overlap: what is allocated, open or page-locked."""

import threading
from bisect import bisect_right

from kvstored_cuda.devices.errors import InvalidAddress


class Ranges:
    """Addresses that may be touched, by their start. Thread-safe."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def total_bytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values())

    def add(self, address: int, size_bytes: int) -> None:
        """Raises InvalidAddress where it overlaps with one that is there."""
        with self._lock:
            at = bisect_right(self._starts, address)
            before = self._starts[at - 1] if at else None
            after = self._starts[at] if at < len(self._starts) else None
            if (before is not None and before + self._sizes[before] > address) or (
                after is not None and after < address + size_bytes
            ):
                raise InvalidAddress(f"{self._what}: {size_bytes} bytes at {address:#x} are there already, in part")
            self._starts.insert(at, address)
            self._sizes[address] = size_bytes

    def remove(self, address: int) -> int:
        """Its size. Raises InvalidAddress where none begins there."""
        with self._lock:
            if address not in self._sizes:
                raise InvalidAddress(f"{self._what}: nothing begins at {address:#x}")
            self._starts.remove(address)
            return self._sizes.pop(address)

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether one range has all of these bytes."""
        with self._lock:
            at = bisect_right(self._starts, address)
            if not at:
                return False
            start = self._starts[at - 1]
            return address + size_bytes <= start + self._sizes[start]

    def require(self, address: int, size_bytes: int) -> None:
        """Raises InvalidAddress unless one range has all of these bytes."""
        if size_bytes < 0 or not self.holds(address, size_bytes):
            raise InvalidAddress(f"{self._what}: {size_bytes} bytes at {address:#x} are not, or no longer, there")

    def inside(self, address: int, size_bytes: int) -> list[int]:
        """Where the ranges begin that lie in these bytes as a whole."""
        with self._lock:
            end = address + size_bytes
            return [at for at in self._starts if at >= address and at + self._sizes[at] <= end]
