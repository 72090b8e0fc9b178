"""The segments of one device, by the numbers that the core gives them: made, exported, freed.

A segment is whole or it is not there, and its bytes are zeros before anybody is given it: that is
the promise of `Device.allocate` (new memory of a HostDevice is zeros, a CudaDevice clears it).
Makes and frees are done one after the other, in the order in which they were asked for: what is
to be made needs the memory of what is freed before it.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from kvstore.core.segments import DropSegment, MakeSegment
from kvstore.gpu.tasks import Tasks
from kvstore.logs import logger
from kvstored_cuda.devices import Allocation, Device, Handle, HandleKind
from kvstored_cuda.devices.errors import DeviceError, DeviceLost, DeviceTimeout
from kvstored_cuda.devices.isolated import Isolated

log = logger("kvstored.gpu")

MAKE_S = 60.0
"""For one segment to be made, or freed; a device that takes longer is taken for lost."""


class SegmentMemory:
    """Of one life of one device."""

    def __init__(
        self,
        device: Device,
        kind: HandleKind,
        isolated: Isolated,
        tasks: Tasks,
        *,
        made: Callable[[int, str], bool],
        lost: Callable[[str], None],
    ) -> None:
        """`made` is told of each segment and why it could not be made, and answers whether it is wanted; `lost` why
        the device cannot be used any more."""
        self._device = device
        self._kind = kind
        self._isolated = isolated
        self._tasks = tasks
        self._made = made
        self._lost = lost
        self.live: dict[int, Allocation] = {}
        self.unfreed: list[Allocation] = []
        """What could not be freed, or belongs to nobody: to be freed when it can."""
        self._waiting: deque[MakeSegment | DropSegment] = deque()
        self._task: asyncio.Task[None] | None = None
        self.closed = False

    def submit(self, job: MakeSegment | DropSegment) -> None:
        """Takes a job; never waits."""
        self._waiting.append(job)
        if self._task is None or self._task.done():
            self._task = self._tasks.start(self._work(), f"memory of {self._device.uuid}")

    def handle(self, segment: int) -> Handle | None:
        """For clients."""
        found = self.live.get(segment)
        return None if found is None else found.handle

    def address(self, ref: int, slot_bytes: int) -> int:
        """Where a slot begins on the device."""
        return self.live[ref >> 32].address + (ref & 0xFFFFFFFF) * slot_bytes

    async def _work(self) -> None:
        while self._waiting:
            job = self._waiting.popleft()
            if isinstance(job, MakeSegment):
                await self._make(job)
            elif job.segment in self.live:
                await self._free(self.live.pop(job.segment), log.warning)

    async def _make(self, job: MakeSegment) -> None:
        device, why = self._device, "its device was lost"
        made: Allocation | None = None
        try:
            if not self.closed:
                made = await self._isolated.call(
                    f"allocating on {device.uuid}",
                    lambda: device.allocate(job.size_bytes, self._kind),
                    timeout_s=MAKE_S,
                    owner=device.uuid,
                    late=self.unfreed.append,
                )
        except (DeviceLost, DeviceTimeout) as e:
            why = str(e)
            self._lost(why)
        except DeviceError as e:
            why = str(e)
        if made is None or self.closed:
            self._made(job.segment, why)
        else:
            self.live[job.segment] = made  # before it is told: whoever is granted a slot of it asks for its handle
            if self._made(job.segment, ""):
                return
            del self.live[job.segment]
        if made is not None:
            self.unfreed.append(made)

    async def _free(self, memory: Allocation, say: Callable[..., None]) -> None:
        """Gives memory back that nobody has mapped; what cannot be freed now is kept.

        What was lost with its device is gone, and what hangs is freed when its call returns.
        """
        name = f"freeing memory of {self._device.uuid}"
        try:
            await self._isolated.call(name, memory.free, timeout_s=MAKE_S, owner=self._device.uuid)
        except (DeviceLost, DeviceTimeout) as e:
            self._lost(str(e))
        except DeviceError as e:
            say("memory of a device cannot be freed yet", device=self._device.uuid, reason=str(e))
            self.unfreed.append(memory)

    async def free_again(self) -> bool:
        """Tries what could not be freed once more; whether nothing is left of it."""
        left, self.unfreed = self.unfreed, []
        for memory in left:
            await self._free(memory, log.debug)
        return not self.unfreed

    def close(self) -> None:
        """The device is not used any more: what is asked for is not made, what is there is kept for `free_again`."""
        self.closed = True
        self.unfreed += self.live.values()
        self.live.clear()
