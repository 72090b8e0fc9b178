"""The way round by a buffer, for blocks that a device cannot copy from or to where they lie.

Two halves take turns: while kernels use one, the processor fills or empties the other. A half is touched again only
when the mark behind its last copies has come. Its memory is page-locked, so that kernels read and write it themselves;
where not even that is to be had, kernels use memory of the device, which the driver copies from and to the host.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvstore_client.afterwards import wait_for
from kvstore_client.buffers import Bytes
from kvstore_client.marks import Mark
from kvstored.v1.errors import DeadlineExceeded
from kvstored_cuda.devices.device import Allocation, Device, Direction, Stream
from kvstored_cuda.devices.errors import DeviceError, PageLockRefused
from kvstored_cuda.devices.isolated import Isolated

HALF_BYTES = 32 << 20
"""Or one block, where that is larger."""

ALLOCATE_S = 10.0

CopyCall = Callable[[int, Stream], None]


class Half:
    """`address` is what kernels use, `host` what the processor does."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        self._device = device
        self.mark: Mark | None = None
        self._allocation: Allocation | None = None
        self._page_locked = 0
        try:
            self._page_locked = self.address = device.host_allocate(size_bytes)
            whole = (ctypes.c_ubyte * size_bytes).from_address(self.address)
            self.host: Bytes = np.frombuffer(memoryview(whole).cast("B"), np.uint8)
        except PageLockRefused:
            self._allocation = device.allocate(size_bytes)
            self.address = self._allocation.address
            self.host = np.empty(size_bytes, np.uint8)

    def to_host(self, size_bytes: int, stream: Stream) -> None:
        """Enqueues that the host sees what kernels have written; waits for it where memory is not page-locked."""
        if self._allocation is not None:
            self._device.copy(self.host.ctypes.data, self.address, size_bytes, Direction.DEVICE_TO_HOST, stream)

    def to_device(self, size_bytes: int, stream: Stream) -> None:
        """Enqueues that kernels see what the host has written."""
        if self._allocation is not None:
            self._device.copy(self.address, self.host.ctypes.data, size_bytes, Direction.HOST_TO_DEVICE, stream)

    def free(self) -> None:
        """Once no copy uses it."""
        if self._allocation is not None:
            self._allocation.free()
        else:
            self._device.host_free(self._page_locked)


class Staging:
    """Of one client and device."""

    def __init__(self, device: Device, isolated: Isolated) -> None:
        self._device = device
        self._isolated = isolated
        self._turn = threading.Lock()
        self._halves: list[Half] = []
        self._half_bytes = 0
        self._next = 0
        self.used = 0
        """Blocks that went through it."""

    @contextmanager
    def turn(self, block_bytes: int, until: float) -> Iterator[int]:
        """The buffer for one call: how many blocks a half has. Raises DeadlineExceeded, or what the device says."""
        if not self._turn.acquire(timeout=max(until - time.monotonic(), 0)):
            raise DeadlineExceeded("other copies had the staging buffer all that time")
        try:
            if self._half_bytes < block_bytes:
                self._grow(max(HALF_BYTES, block_bytes), until)
            yield self._half_bytes // block_bytes
        finally:
            self._turn.release()

    def _grow(self, half_bytes: int, until: float) -> None:
        for half in self._halves:
            if half.mark is not None and not wait_for(half.mark, until):
                raise DeadlineExceeded("copies through the staging buffer did not end in time")
        old, self._halves, self._half_bytes = self._halves, [], 0
        for half in old:
            self._free(half)

        def make() -> list[Half]:
            return [Half(self._device, half_bytes), Half(self._device, half_bytes)]

        self._halves = self._isolated.run(
            "making a staging buffer",
            make,
            timeout_s=min(ALLOCATE_S, max(until - time.monotonic(), 1e-3)),
            owner=self._device.uuid,
            late=free_all,
        )
        self._half_bytes = half_bytes

    def half(self, until: float) -> Half:
        """The next one, which no copy uses any more. Within `turn`. Raises DeadlineExceeded."""
        half = self._halves[self._next]
        if half.mark is not None:
            if not wait_for(half.mark, until):
                raise DeadlineExceeded("copies through the staging buffer did not end in time")
            half.mark.over()
            half.mark = None
        self._next = 1 - self._next
        return half

    def in_time(self, what: str, copy: CopyCall, size_bytes: int, stream: Stream, until: float) -> None:
        """`half.to_host` or `half.to_device`, with a deadline. Where it passes, the buffer is given up."""
        try:
            self._isolated.run(
                what,
                lambda: copy(size_bytes, stream),
                timeout_s=max(until - time.monotonic(), 1e-3),
                owner=self._device.uuid,
            )
        except DeviceError:
            self.give_up()
            raise

    def give_up(self) -> None:
        """What is under way in it may never be told the end of: the memory is left as it is."""
        _left.extend(self._halves)
        self._halves, self._half_bytes, self._next = [], 0, 0

    def _free(self, half: Half) -> None:
        self._isolated.dispose("freeing a staging buffer", half.free, owner=self._device.uuid)

    def close(self) -> None:
        """Once no copy uses it."""
        halves, self._halves, self._half_bytes = self._halves, [], 0
        for half in halves:
            if half.mark is None or half.mark.query():
                if half.mark is not None:
                    half.mark.over()
                self._free(half)
            else:
                _left.append(half)


def free_all(halves: list[Half]) -> None:
    """Of a buffer that was made too late."""
    for half in halves:
        half.free()


_left: list[Half] = []
"""Memory that copies may still touch, for as long as the process lives."""
