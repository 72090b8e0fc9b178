"""Copies through a bounded page-locked buffer, for host memory that is not page-locked itself.

The buffer is two halves, each with an event: one is filled or emptied by the CPU while the
other is copied. A half is touched again only when its last copy is done, whatever became of
the call that started it.
"""

import ctypes
import threading
import time
from collections.abc import Iterator

from kvstored_cuda.devices.device import Device, Direction, Stream
from kvstored_cuda.devices.errors import DeviceError, DeviceTimeout

SIZE_BYTES = 32 << 20
"""Two halves of 16 MiB: so long that starting a copy costs little beside it, so small that it may always be had."""


class StagingBuffer:
    """For one device; calls take turns. Raises PageLockRefused where not even this much is to be had: then
    `Device.copy` itself stages (pageable copies, slower, on the thread of the caller)."""

    def __init__(self, device: Device, size_bytes: int = SIZE_BYTES) -> None:
        assert size_bytes >= 2, size_bytes
        self._device = device
        self._half_bytes = size_bytes // 2
        self._address = device.host_allocate(2 * self._half_bytes)
        try:
            self._events = [device.event(interprocess=False), device.event(interprocess=False)]
        except BaseException:
            device.host_free(self._address)
            raise
        self._turn = threading.Lock()
        self._broken = ""

    def to_device(self, to: int, source: int, size_bytes: int, stream: Stream, timeout_s: float) -> None:
        """Returns when the source has been read; the bytes are there when `stream` has come so far.

        Raises DeviceTimeout (part of it may be copied), InvalidAddress or DeviceLost.
        """
        with _Turn(self._turn, timeout_s) as left:
            for at, take, half in self._pieces(size_bytes):
                self._events[half].synchronize(left())
                ctypes.memmove(self._at(half), source + at, take)
                self._start(half, to + at, self._at(half), take, Direction.HOST_TO_DEVICE, stream)

    def from_device(self, to: int, source: int, size_bytes: int, stream: Stream, timeout_s: float) -> None:
        """Returns when all bytes are at `to`. Raises like `to_device`."""
        with _Turn(self._turn, timeout_s) as left:
            before: tuple[int, int, int] | None = None
            for piece in self._pieces(size_bytes):
                at, take, half = piece
                self._events[half].synchronize(left())
                self._start(half, self._at(half), source + at, take, Direction.DEVICE_TO_HOST, stream)
                if before:
                    self._empty(to, before, left())
                before = piece
            if before:
                self._empty(to, before, left())

    def _pieces(self, size_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(offset, bytes, half)."""
        if self._broken:
            raise DeviceError(f"the staging buffer is out of use: {self._broken}")
        for i, at in enumerate(range(0, size_bytes, self._half_bytes)):
            yield at, min(self._half_bytes, size_bytes - at), i % 2

    def _at(self, half: int) -> int:
        return self._address + half * self._half_bytes

    def _start(self, half: int, to: int, source: int, take: int, direction: Direction, stream: Stream) -> None:
        self._device.copy(to, source, take, direction, stream)
        try:
            self._events[half].record(stream)
        except BaseException as e:  # the copy runs, and nothing tells when it ends: this half is never safe again
            self._broken = f"{type(e).__name__}: {e}"
            raise

    def _empty(self, to: int, piece: tuple[int, int, int], timeout_s: float) -> None:
        at, take, half = piece
        self._events[half].synchronize(timeout_s)
        ctypes.memmove(to + at, self._at(half), take)

    def close(self, timeout_s: float) -> None:
        """Gives it back once no copy uses it. Raises DeviceTimeout: then it is kept."""
        with _Turn(self._turn, timeout_s) as left:
            if self._broken:
                raise DeviceError(f"the staging buffer stays as it is: {self._broken}")
            for event in self._events:
                event.synchronize(left())
            self._broken = "it is closed"
            for event in self._events:
                event.close()
            self._device.host_free(self._address)


class _Turn:
    """The buffer for one call, within one deadline; gives a function that says how much of it is left."""

    def __init__(self, lock: threading.Lock, timeout_s: float) -> None:
        self._lock = lock
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s

    def __enter__(self) -> "_Turn":
        if not self._lock.acquire(timeout=max(self._timeout_s, 0)):
            raise DeviceTimeout(f"other copies had the staging buffer for {self._timeout_s} s")
        return self

    def __call__(self) -> float:
        return max(self._until - time.monotonic(), 0)

    def __exit__(self, *_: object) -> None:
        self._lock.release()
