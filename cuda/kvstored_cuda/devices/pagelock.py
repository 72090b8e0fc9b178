"""Page-locked host memory: which ranges the devices may copy asynchronously, and why not the others.

Registered in chunks, several at a time, on threads of their own: a call may take
seconds, or hang. What is refused is a result, not an error: it is copied through a staging
buffer (`staging`), and stats say so.
"""

import mmap
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvstored_cuda.devices.device import Device
from kvstored_cuda.devices.errors import DeviceError, InvalidAddress
from kvstored_cuda.devices.ranges import Ranges

CHUNK_BYTES_MAX = 64 << 30
"""One cudaHostRegister of 512 GiB or more fails, and very large ones hold the driver's locks for minutes
(vllm-project/vllm#51080): 64 GiB are well below both."""

PARALLEL = 4
"""Chunks that are registered at a time."""


@dataclass(frozen=True)
class Span:
    """Memory of this process: whole pages."""

    address: int
    size_bytes: int


@dataclass(frozen=True)
class Refusal:
    """A chunk that was not page-locked, and the driver's word on it."""

    span: Span
    why: str


@dataclass(frozen=True)
class Locked:
    """The answer to `lock`: what is page-locked now, what was refused, what had not ended when it was due."""

    locked_bytes: int
    refused: tuple[Refusal, ...]
    pending_bytes: int


def chunks(span: Span, align_bytes: int = mmap.PAGESIZE, chunk_bytes_max: int = CHUNK_BYTES_MAX) -> list[Span]:
    """`span` in pieces of at most `chunk_bytes_max`, cut at multiples of `align_bytes` from its start.

    align_bytes: size of a slot (or of a segment), so that none lies across a cut: a copy must
    not span two registrations. It is taken up to whole pages. Raises InvalidAddress where a
    slot is larger than a chunk, or the span is not whole pages.
    """
    if span.address % mmap.PAGESIZE or span.size_bytes % mmap.PAGESIZE or span.size_bytes < 0:
        raise InvalidAddress(f"{span.size_bytes} bytes at {span.address:#x} are not whole pages of {mmap.PAGESIZE}")
    if align_bytes % mmap.PAGESIZE:
        raise InvalidAddress(f"cuts at multiples of {align_bytes} bytes do not lie between pages of {mmap.PAGESIZE}")
    chunk_bytes = chunk_bytes_max // align_bytes * align_bytes
    if chunk_bytes <= 0:
        raise InvalidAddress(f"a slot of {align_bytes} bytes is larger than a chunk of {chunk_bytes_max}")
    return [
        Span(span.address + at, min(chunk_bytes, span.size_bytes - at)) for at in range(0, span.size_bytes, chunk_bytes)
    ]


class _Job:
    """One call of `lock`: its workers outlive it where the driver hangs."""

    def __init__(self, spans: Sequence[Span], read_only: bool) -> None:
        self.waiting = deque(spans)
        self.read_only = read_only
        self.locked_bytes = 0
        self.refused: list[Refusal] = []
        self.pending_bytes = sum(span.size_bytes for span in spans)


class PageLocks:
    """The page-locked memory of one process, for all its devices (registrations are portable). Thread-safe."""

    def __init__(self, device: Device, parallel: int = PARALLEL) -> None:
        """device: the one whose driver registers."""
        self._device = device
        self._parallel = parallel
        self._ranges = Ranges("page-locked memory")
        self._changed = threading.Condition()
        self._closed = False
        self._refused: dict[int, Refusal] = {}

    @property
    def locked_bytes(self) -> int:
        return self._ranges.total_bytes

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """What is staged instead, for stats."""
        with self._changed:
            return tuple(self._refused.values())

    def covers(self, address: int, size_bytes: int) -> bool:
        """Whether a copy from or to all of these bytes is asynchronous; no: stage it."""
        return self._ranges.holds(address, size_bytes)

    def lock(
        self, spans: Sequence[Span], timeout_s: float, read_only: bool = False, align_bytes: int = mmap.PAGESIZE
    ) -> Locked:
        """Registers spans, waits for at most `timeout_s`, and says how far it came: the rest goes on behind.

        read_only: for mappings that this process may not write; the device then reads alone.
        """
        job = _Job([chunk for span in spans for chunk in chunks(span, align_bytes)], read_only)
        for i in range(min(self._parallel, len(job.waiting))):
            threading.Thread(target=self._work, args=(job,), name=f"page-lock-{i}", daemon=True).start()
        until = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not job.pending_bytes or self._closed, max(until - time.monotonic(), 0))
            return Locked(job.locked_bytes, tuple(job.refused), job.pending_bytes)

    def _work(self, job: _Job) -> None:
        while True:
            with self._changed:
                if self._closed or not job.waiting:
                    return
                span = job.waiting.popleft()
            why = self._register(span, job.read_only)
            with self._changed:
                job.pending_bytes -= span.size_bytes
                if why:
                    job.refused.append(Refusal(span, why))
                    self._refused[span.address] = job.refused[-1]
                else:
                    job.locked_bytes += span.size_bytes
                    self._refused.pop(span.address, None)
                self._changed.notify_all()

    def _register(self, span: Span, read_only: bool) -> str:
        """ "" where it is locked, else why not."""
        try:
            self._device.host_register(span.address, span.size_bytes, read_only)
        except DeviceError as e:
            return str(e)
        with self._changed:
            if not self._closed:
                self._ranges.add(span.address, span.size_bytes)
                return ""
        return self._unregister(span.address) or "page-locking ended meanwhile"

    def _unregister(self, address: int) -> str:
        try:
            self._device.host_unregister(address)
        except DeviceError as e:
            return f"page-lock at {address:#x} not ended: {e}"
        return ""

    def unlock(self, span: Span) -> tuple[str, ...]:
        """Ends the registrations inside `span`, before it is unmapped; what the driver said against it."""
        with self._changed:
            inside = self._ranges.inside(span.address, span.size_bytes)
            for address in inside:
                self._ranges.remove(address)
            for address in [at for at in self._refused if span.address <= at < span.address + span.size_bytes]:
                del self._refused[address]
        return tuple(why for address in inside if (why := self._unregister(address)))

    def close(self) -> tuple[str, ...]:
        """Ends all of them; those under way end themselves when their call returns."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return self.unlock(Span(0, 1 << 64))
