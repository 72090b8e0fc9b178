"""Copies between the slab and one device: in batches, one under way in each direction.

A batch is enqueued on the direction's own stream, an event is recorded behind it and waited for,
all in one call apart from the event loop. Slab memory that is page-locked is copied by the
device; the rest passes through a staging buffer, and where not even that is to be had the device
stages itself.

Rules
- A copy is reported when nothing of it runs any more, and not before: its slots are somebody
  else's then. So a batch that takes longer than BATCH_S makes the device lost, but its copies are
  reported when its call returns, however late.
- An error is of the copy that met it. What is enqueued is waited for all the same.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.core.gpu_jobs import CopyDown, CopyUp
from kvstore.gpu.device_memory import SegmentMemory
from kvstore.gpu.pagelocks import SlabLocks, address_of
from kvstore.gpu.slabs import SlabBytes
from kvstore.gpu.tasks import Tasks
from kvstore.logs import logger
from kvstored_cuda.devices import Device, Direction, Event, Stream
from kvstored_cuda.devices.errors import DeviceError, DeviceLost, DeviceTimeout, PageLockRefused
from kvstored_cuda.devices.host_stream import HostStream
from kvstored_cuda.devices.isolated import Isolated
from kvstored_cuda.devices.staging import StagingBuffer

log = logger("kvstored.gpu")

BATCH_COPIES = 64
"""Copies in one batch."""

BATCH_S = 30.0
"""For one batch. 64 blocks of 32 MiB take 0.2 s at 10 GB/s; a device that takes longer than this is lost."""

LEFT_S = 24 * 3600.0
"""How long the thread of a batch that nobody waits for stays with it."""

Copy = CopyUp | CopyDown

_LOST = -1
"""In place of a copy's number."""


@dataclass(frozen=True)
class _Placed:
    """A copy with its addresses; `kept` keeps the slab's memory mapped."""

    number: int
    up: bool
    host: int
    device: int
    size_bytes: int
    locked: bool
    kept: memoryview


class Copier:
    """In one direction, of one life of one device."""

    def __init__(
        self,
        device: Device,
        slab: SlabBytes,
        locks: SlabLocks,
        memory: SegmentMemory,
        isolated: Isolated,
        tasks: Tasks,
        *,
        copied: Callable[[Copy, str], None],
        ended: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        """`copied` is told how each copy ended, `ended` that a batch did, `lost` why the device is of no use."""
        self._device = device
        self._slab = slab
        self._locks = locks
        self._memory = memory
        self._isolated = isolated
        self._tasks = tasks
        self._copied = copied
        self._ended = ended
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Copy] = deque()
        self._left: dict[int, Copy] = {}
        """Under way, by number."""
        self._task: asyncio.Task[None] | None = None
        self._stream: Stream | None = None
        self._event: Event | None = None
        self._staging: StagingBuffer | None = None
        self.not_staged = ""
        """Why there is no staging buffer, though there was to be one."""
        self._closed = ""

    @property
    def busy(self) -> bool:
        """Copies wait, or have not been reported."""
        return bool(self._waiting or self._left)

    def submit(self, job: Copy) -> None:
        """Takes a copy; never waits."""
        self._waiting.append(job)
        if self._closed:
            self._loop.call_soon(self._refuse_waiting)
        elif self._task is None or self._task.done():
            self._task = self._tasks.start(self._work(), f"copies of {self._device.uuid}")

    def close(self, why: str) -> None:
        """The device is lost: what waits ends with that; what is under way is reported by its call."""
        self._closed = why
        self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        while self._waiting:
            self._copied(self._waiting.popleft(), self._closed)

    # -- on the event loop

    async def _work(self) -> None:
        while self._waiting and not self._closed:
            jobs = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH_COPIES))]
            self._left.update((job.number, job) for job in jobs)
            self._locks.enter()
            placed, errors = self._all_placed(jobs)
            try:
                errors = await self._isolated.call(
                    f"copies of {self._device.uuid}",
                    partial(self._run, placed, errors),
                    timeout_s=BATCH_S,
                    owner=self._device.uuid,
                    late=partial(self._late, jobs),
                )
            except DeviceTimeout as e:  # of the call: `_run` raises none
                self._lost(str(e))
                return
            except DeviceError as e:  # it was not begun
                self._locks.leave()
                errors = dict.fromkeys((job.number for job in jobs), str(e))
            self._report(jobs, errors)

    def _late(self, jobs: Sequence[Copy], errors: dict[int, str]) -> None:
        """In the thread of a batch that nobody waits for any more."""
        self._loop.call_soon_threadsafe(self._report, jobs, errors)

    def _report(self, jobs: Sequence[Copy], errors: dict[int, str]) -> None:
        lost = errors.pop(_LOST, "")
        for job in jobs:
            del self._left[job.number]
            self._copied(job, errors.get(job.number, lost))
        if lost:
            self._lost(lost)
        self._ended()

    def _all_placed(self, jobs: Sequence[Copy]) -> tuple[list[_Placed], dict[int, str]]:
        """Those that have a place, and why the others have none: that is reported with the batch."""
        placed, errors = list[_Placed](), dict[int, str]()
        for job in jobs:
            try:
                placed.append(self._placed(job))
            except Exception as e:
                log.exception("a copy has no place", device=self._device.uuid, number=job.number)
                errors[job.number] = f"{type(e).__name__}: {e}"
        return placed, errors

    def _placed(self, job: Copy) -> _Placed:
        up = isinstance(job, CopyUp)
        in_slab, on_device = (job.source, job.target) if up else (job.target, job.source)
        kept = self._slab.bytes_at(in_slab >> 32, (in_slab & 0xFFFFFFFF) * job.slot_bytes, job.length)
        host = address_of(kept)
        device = self._memory.address(on_device, job.slot_bytes)
        return _Placed(job.number, up, host, device, job.length, self._locks.covers(host, job.length), kept)

    # -- in a thread

    def _run(self, copies: Sequence[_Placed], errors: dict[int, str]) -> dict[int, str]:
        """Number -> why it failed, added to those that did before; at _LOST why the device is lost. When all have
        ended."""
        stream = self._stream
        try:
            if stream is None:
                stream = self._stream = self._device.stream()
            for copy in copies:
                try:
                    self._start(copy, stream)
                except DeviceLost:
                    raise
                except DeviceError as e:
                    errors[copy.number] = str(e)
            self._wait(stream)
        except BaseException as e:  # noqa: BLE001 (whatever it is: what is enqueued ends before anything is reported)
            errors[_LOST] = f"copying: {e}" if isinstance(e, DeviceError) else f"{type(e).__name__}: {e}"
            if stream is not None:
                _settle(stream)
        finally:
            self._locks.leave()
        return errors

    def _start(self, copy: _Placed, stream: Stream) -> None:
        staging = None if copy.locked else self._stage()
        if staging is None:
            to, source, direction = (
                (copy.device, copy.host, Direction.HOST_TO_DEVICE)
                if copy.up
                else (copy.host, copy.device, Direction.DEVICE_TO_HOST)
            )
            self._device.copy(to, source, copy.size_bytes, direction, stream)
        elif copy.up:
            staging.to_device(copy.device, copy.host, copy.size_bytes, stream, BATCH_S)
        else:
            staging.from_device(copy.host, copy.device, copy.size_bytes, stream, BATCH_S)

    def _stage(self) -> StagingBuffer | None:
        if self._staging is None and not self.not_staged:
            try:
                self._staging = StagingBuffer(self._device)
            except PageLockRefused as e:
                self.not_staged = str(e)
        return self._staging

    def _wait(self, stream: Stream) -> None:
        """Until all that is enqueued has ended."""
        if self._event is None:
            self._event = self._device.event(interprocess=False)
        self._event.record(stream)
        self._event.synchronize(LEFT_S)

    def end(self, timeout_s: float) -> None:
        """Gives stream and buffer back; in a thread, once nothing is under way. What the driver refuses stays."""
        try:
            if self._staging is not None:
                self._staging.close(timeout_s)
            if self._event is not None:
                self._event.close()
            if self._stream is not None:
                self._stream.close()
        except DeviceError as e:
            self.not_staged = str(e)


def _settle(stream: Stream) -> None:
    """Waits until nothing runs on a stream that something went wrong with.

    CUDA has ended what ran before it says that a device is lost; a HostDevice's thread may be in
    the middle of a copy.
    """
    while True:
        try:
            stream.synchronize(LEFT_S)
        except DeviceTimeout:
            continue
        except DeviceError:
            if isinstance(stream, HostStream):
                stream.drain(LEFT_S)
        return
