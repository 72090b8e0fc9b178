"""One device with memory, as the GPU tier sees it: what both implementations promise.

Two sides use it. The owner (daemon) allocates segments and exports handles of them; an
importer (client) opens each handle once and closes it. Both copy on streams and tell each
other by interprocess events when a copy is done.

Rules
- Every method may block in the driver: none is called on an event loop (`Isolated`), none
  while a lock is held that others need. Waits have deadlines; `query` does not wait.
- Freeing what an importer still maps is undefined in CUDA. The owner frees a segment only
  when every importer has closed it or its process is gone.
- A process cannot open its own handle (OwnHandle), nor one of another generation than the
  one it speaks to (StaleHandle).
- An event that was never recorded counts as complete: a handle of an event travels only
  after `record`.
- What an event of a dead process says is not to be trusted: CUDA does not define it.
- Addresses are plain integers and stay the same for the life of allocation or mapping.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from threading import Event as Flag

from kvstored_cuda.devices.errors import DeviceTimeout, InvalidHandle, OtherDriver, OwnHandle, StaleHandle
from kvstored_cuda.devices.handles import Generation, Handle, HandleKind, Thing

POLL_FIRST_S, POLL_MAX_S = 0.00005, 0.001
"""Pauses between queries while something is waited for: short at first, since a block is copied in some 100 us."""


class Direction(IntEnum):
    """cudaMemcpyKind, driver_types.h of CUDA 13.0."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of the device: all, and free now (other processes use it too)."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class DeviceUse:
    """What this process holds of a device; all zero once everything has been closed.

    opened: handles of memory and events of others, those whose close has not returned included.
    """

    allocations: int
    allocated_bytes: int
    opened: int
    events: int
    page_locked_bytes: int

    @property
    def nothing(self) -> bool:
        return self == DeviceUse(0, 0, 0, 0, 0)


def until_true(done: "Stream | Event", timeout_s: float, what: str) -> None:
    """Asks `done.query()` until it says yes. Raises DeviceTimeout after `timeout_s`, or what the query raises."""
    until = time.monotonic() + timeout_s
    pause, pause_s = Flag(), POLL_FIRST_S
    while not done.query():
        left = until - time.monotonic()
        if left <= 0:
            raise DeviceTimeout(f"{what} did not end within {timeout_s} s")
        pause.wait(min(pause_s, left))
        pause_s = min(2 * pause_s, POLL_MAX_S)


class Stream(ABC):
    """Work in order. `pointer` is the raw cudaStream_t, for kernels and other libraries (0: the default stream)."""

    pointer: int

    @abstractmethod
    def wait(self, event: "Event") -> None:
        """What is enqueued after this runs when the work is done that `event` was last recorded after."""

    @abstractmethod
    def query(self) -> bool:
        """Whether all that was enqueued is done. Raises DeviceLost where it failed."""

    @abstractmethod
    def close(self) -> None:
        """Gives it back; what is enqueued still runs. A caller's stream (`wrap_stream`) is left alone."""

    def synchronize(self, timeout_s: float) -> None:
        """Waits until all that was enqueued is done. Raises DeviceTimeout or DeviceLost."""
        until_true(self, timeout_s, "the work on a stream")


class Event(ABC):
    """A mark in a stream that other processes can wait for. Without timing."""

    handle: Handle | None
    """To be sent to others (after `record`); None for one that was opened here, or is of this process alone."""

    @abstractmethod
    def record(self, stream: Stream) -> None:
        """Marks the end of all that is enqueued on the stream now; until it is reached, `query` says no."""

    @abstractmethod
    def query(self) -> bool:
        """Whether the work before the last `record` is done; true where there was none. Raises DeviceLost."""

    @abstractmethod
    def close(self) -> None:
        """Gives it back. The exporter keeps it until every importer has closed its own: CUDA leaves the rest open."""

    def synchronize(self, timeout_s: float) -> None:
        """Waits until `query` says yes. Raises DeviceTimeout or DeviceLost."""
        until_true(self, timeout_s, "the work before an event")


class Allocation(ABC):
    """A segment of this process on the device, to be exported by `handle` as a whole."""

    address: int
    size_bytes: int
    handle: Handle
    """A handle of kind DESCRIPTOR has its descriptor open until `free`."""

    @abstractmethod
    def free(self) -> None:
        """Gives it back, once. The caller has made sure that no importer maps it and no copy runs on it.

        Raises StillOpen where the device can tell that one does (HostDevice); nothing was freed then.
        """


class Mapping(ABC):
    """A segment of another process, opened here. Each `Device.open` is closed once."""

    address: int
    size_bytes: int
    handle: Handle

    @abstractmethod
    def close(self) -> None:
        """Ends this use; the last one unmaps, which may block for long while the exporter dies. Again: nothing, but
        after DeviceTimeout, which says that it is still mapped."""


class Device(ABC):
    """A device of this process. Made by `discovery.device_of`, or a HostDevice by a test."""

    uuid: str
    """As nvidia-smi writes it, `GPU-...` or `MIG-...`: ordinals change with CUDA_VISIBLE_DEVICES."""
    name: str
    driver: int
    generation: Generation

    @abstractmethod
    def memory(self) -> DeviceMemory: ...

    @abstractmethod
    def use(self) -> DeviceUse:
        """What this process holds. Does not enter the driver: it may be asked on an event loop."""

    @abstractmethod
    def allocate(self, size_bytes: int, kind: HandleKind = HandleKind.IPC) -> Allocation:
        """A segment that can be exported. Raises OutOfDeviceMemory, or IpcRefused where `kind` is not to be had."""

    @abstractmethod
    def open(self, handle: Handle, of: Generation) -> Mapping:
        """Maps a segment of `of`, the process that this one speaks to now; again: the same address, counted.

        Raises StaleHandle, OwnHandle, OtherDriver, InvalidHandle, IpcRefused or OutOfDeviceMemory.
        """

    @abstractmethod
    def stream(self) -> Stream:
        """A stream of our own that does not wait for the default stream."""

    @abstractmethod
    def wrap_stream(self, pointer: int) -> Stream:
        """A caller's stream, by its raw pointer (torch's `stream.cuda_stream`, cupy's `stream.ptr`)."""

    @abstractmethod
    def event(self, interprocess: bool = True) -> Event:
        """An event. Raises IpcRefused where an interprocess one is not to be had: the caller then waits for its copy
        (`Stream.synchronize`) before it tells others."""

    @abstractmethod
    def open_event(self, handle: Handle, of: Generation) -> Event:
        """An event of `of`, to be closed like one of our own. Raises like `open`."""

    @abstractmethod
    def copy(self, to: int, source: int, size_bytes: int, direction: Direction, stream: Stream) -> None:
        """Enqueues a copy. Host memory that is not page-locked is copied, or staged, before this returns;
        page-locked memory must stay as it is until the copy is done. A copy from the device into memory that is not
        page-locked waits without a deadline: `StagingBuffer` has one. Raises InvalidAddress or DeviceLost."""

    @abstractmethod
    def host_register(self, address: int, size_bytes: int, read_only: bool) -> None:
        """Page-locks memory of this process for this and all other devices. At most pagelock.CHUNK_BYTES_MAX a
        call, whole pages. Raises PageLockRefused. `read_only`: the device may only read (cudaHostRegisterReadOnly),
        the one way for a mapping that this process may not write."""

    @abstractmethod
    def host_unregister(self, address: int) -> None:
        """Ends a registration that began at this address. Raises InvalidAddress where there is none."""

    @abstractmethod
    def host_allocate(self, size_bytes: int) -> int:
        """Page-locked memory of our own (a staging buffer). Raises PageLockRefused."""

    @abstractmethod
    def host_free(self, address: int) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Ends the use of the device. What is still held goes with the process."""

    def check_handle(self, handle: Handle, of: Generation, thing: Thing) -> None:
        """What is known of a handle before the driver sees it. Raises as `open` does."""
        if handle.generation == self.generation:
            raise OwnHandle(f"handle {handle.serial} was exported by this process: use its own address")
        if handle.generation != of:
            raise StaleHandle(f"handle {handle.serial} is of {handle.generation}, not of {of}")
        if handle.thing != thing:
            raise InvalidHandle(f"a handle of {handle.thing.name.lower()} where one of {thing.name.lower()} is due")
        if handle.uuid != self.uuid:
            raise InvalidHandle(f"a handle of device {handle.uuid} given to device {self.uuid}")
        if handle.driver != self.driver:
            raise OtherDriver(f"the exporter has driver {handle.driver}, this process {self.driver}")
        if handle.kind == HandleKind.DESCRIPTOR and handle.descriptor < 0:
            raise InvalidHandle(f"handle {handle.serial} came without its descriptor")
