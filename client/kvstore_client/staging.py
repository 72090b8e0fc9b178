"""The way round by a buffer, for blocks that a device cannot copy from or to where they lie.

Two halves take turns: while kernels use one, the processor fills or empties the other. A half is touched again only
when the mark behind its last copies has come; while the driver does not say whether it has, one call waits for that
until its deadline, and those after it have no buffer. Its memory is page-locked, so that kernels read and write it
themselves; where not even that is to be had, kernels use memory of the device, which the driver copies from and to
the host.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvstore_client.afterwards import Afterwards, too_late, wait_for
from kvstore_client.asking import Asker
from kvstore_client.buffers import Bytes
from kvstore_client.marks import Mark
from kvstored.v1.errors import DeadlineExceeded
from kvstored_cuda.devices.device import Allocation, Device, Direction, Stream
from kvstored_cuda.devices.errors import DeviceTimeout, PageLockRefused, TooManyCalls
from kvstored_cuda.devices.isolated import Isolated

HALF_BYTES = 32 << 20
"""Or one block, where that is larger."""

ALLOCATE_S = 10.0

LATE = "copies through the staging buffer did not end in time"


class _Returned(Mark):
    """The end of what a call enqueues that may still be under way when nobody waits for it any more."""

    __slots__ = ("_returned",)

    def __init__(self, stream: Stream, asker: Asker) -> None:
        super().__init__(stream, asker=asker)
        self._returned = threading.Event()

    def returned(self) -> None:
        """It has enqueued what it will."""
        self._returned.set()

    def query(self) -> bool:
        return self._returned.is_set() and super().query()


class Half:
    """`address` is what kernels use, `host` what the processor does."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        self._device = device
        self.mark: Mark | None = None
        """Behind all that uses it: set before anything does, so that no exception finds it without."""
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

    @property
    def page_locked(self) -> bool:
        """Whether kernels and the processor use the same memory."""
        return self._allocation is None

    def to_host(self, size_bytes: int, stream: Stream) -> None:
        """Enqueues that the host sees what kernels have written, where that is other memory; may wait for it."""
        self._device.copy(self.host.ctypes.data, self.address, size_bytes, Direction.DEVICE_TO_HOST, stream)

    def to_device(self, size_bytes: int, stream: Stream) -> None:
        """Enqueues that kernels see what the host has written, where that is other memory."""
        self._device.copy(self.address, self.host.ctypes.data, size_bytes, Direction.HOST_TO_DEVICE, stream)

    def free(self) -> None:
        """Once no copy uses it."""
        if self._allocation is not None:
            self._allocation.free()
        else:
            self._device.host_free(self._page_locked)


class Staging:
    """Of one client and device."""

    def __init__(self, device: Device, isolated: Isolated, afterwards: Afterwards, asker: Asker) -> None:
        self._device = device
        self._asker = asker
        self._isolated = isolated
        self._afterwards = afterwards
        self._turn = threading.Lock()
        self._halves: list[Half] = []
        self._half_bytes = 0
        self._next = 0
        self._silent: Mark | None = None
        """One that the driver has not said anything of, for as long as a call may take."""
        self._closed = False
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
            if self._closed:
                self.close()

    def _grow(self, half_bytes: int, until: float) -> None:
        for half in self._halves:
            if half.mark is not None:
                self._wait_for(half.mark, until)
        self.give_up()

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
            self._wait_for(half.mark, until)
            half.mark.over()
            half.mark = None
        self._next = 1 - self._next
        return half

    def _wait_for(self, mark: Mark, until: float) -> None:
        """Raises DeadlineExceeded: DeviceTimeout where the driver is silent, at once where it was silent before."""
        until = time.monotonic() if mark is self._silent and self._asker.slow else until
        if not wait_for(mark, until):
            error = too_late(mark, LATE)
            self._silent = mark if isinstance(error, DeviceTimeout) else None
            raise error
        self._silent = None

    def to_host(self, half: Half, size_bytes: int, stream: Stream, until: float) -> None:
        """As the half's, in time. Raises DeviceTimeout, TooManyCalls, or what the device says."""
        if not half.page_locked:
            self._in_time("copying to a buffer", half, half.to_host, size_bytes, stream, until)

    def to_device(self, half: Half, size_bytes: int, stream: Stream, until: float) -> None:
        """As the half's, in time. Raises the same."""
        if not half.page_locked:
            self._in_time("copying from a buffer", half, half.to_device, size_bytes, stream, until)

    def _in_time(
        self,
        what: str,
        half: Half,
        copy: Callable[[int, Stream], None],
        size_bytes: int,
        stream: Stream,
        until: float,
    ) -> None:
        half.mark = mark = _Returned(stream, self._asker)

        def work() -> None:
            try:
                copy(size_bytes, stream)
            finally:
                mark.returned()

        timeout_s = max(until - time.monotonic(), 1e-3)
        try:
            self._isolated.run(what, work, timeout_s=timeout_s, owner=self._device.uuid)
        except TooManyCalls:
            mark.returned()  # it was not begun
            raise

    def give_up(self) -> None:
        """Frees the buffer, each half once nothing uses it any more; the next turn makes another."""
        halves, self._halves, self._half_bytes, self._next = self._halves, [], 0, 0
        for half in halves:
            freeing = _Freeing(self._isolated, self._device.uuid, half)
            if half.mark is not None:
                self._afterwards.keep(half.mark, freeing)
            del freeing  # nothing else refers to it, so it is freed now where nothing uses it

    def close(self) -> None:
        """Gives the buffer up, or has whoever has the turn do it then. Never raises."""
        self._closed = True
        if self._turn.acquire(blocking=False):
            try:
                self.give_up()
            finally:
                self._turn.release()


class _Freeing:
    """Frees a half when the last reference to it goes, as a rule that of `Afterwards`."""

    def __init__(self, isolated: Isolated, owner: str, half: Half) -> None:
        self._isolated, self._owner, self._half = isolated, owner, half
        self._process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._process and not sys.is_finalizing():  # a child has no part in it; at the end all goes
            self._isolated.dispose("freeing a staging buffer", self._half.free, owner=self._owner)


def free_all(halves: list[Half]) -> None:
    """Of a buffer that was made too late."""
    for half in halves:
        half.free()
