"""CudaDevice: a GPU, by cupy's runtime API where that releases Python's lock, else by the driver (`cuda_driver`).

Rules
- The primary context of the device is retained at the first need, not at construction, and
  is made current around each call and given back: a caller's current device is not touched.
- A segment is a multiple of SEGMENT_GRANULE_BYTES and is zeroed before it is given: what
  another tenant left must not be read through a new mapping.
- What was exported is freed by the owner's word alone: CUDA cannot tell who still maps it.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

from kvstored_cuda.devices import cuda_descriptors
from kvstored_cuda.devices.cuda_driver import (
    ATTRIBUTE_HOST_REGISTER,
    ATTRIBUTE_READ_ONLY_HOST_REGISTER,
    Driver,
)
from kvstored_cuda.devices.device import Allocation, Device, DeviceMemory, DeviceUse, Direction, Event, Mapping, Stream
from kvstored_cuda.devices.errors import InvalidAddress, InvalidHandle, NoDevice, PageLockRefused, from_code
from kvstored_cuda.devices.handles import TOKEN_BYTES, Generation, Handle, HandleKind, Thing
from kvstored_cuda.devices.opened import Opened

SEGMENT_GRANULE_BYTES = 2 << 20
"""cudaIpcGetMemHandle shares the block of 2 MiB that a smaller allocation lies in, with all else in it (CUDA
Programming Guide, Interprocess Communication): only multiples of it are exported."""

ZERO_S = 30.0
"""The longest wait for a new segment to be zeroed; 256 MiB take less than a millisecond."""

PORTABLE, MAPPED, READ_ONLY = 0x01, 0x02, 0x08
"""cudaHostRegisterPortable (= cudaHostAllocPortable), cudaHostRegisterMapped, cudaHostRegisterReadOnly; driver_types.h
of CUDA 13.0."""

_serials = itertools.count(1)


def _runtime() -> ModuleType:
    try:
        from cupy.cuda import runtime
    except ImportError as e:
        raise NoDevice(f"cupy is not installed: {e}") from e
    module: ModuleType = runtime
    return module


class CudaDevice(Device):
    """The device of that ordinal of this process now; from then on `uuid` names it. Raises NoDevice.

    driver, runtime: what tests put in the place of the driver's library and of cupy.cuda.runtime.
    """

    def __init__(self, ordinal: int, driver: Driver | None = None, runtime: ModuleType | None = None) -> None:
        self._runtime = runtime or _runtime()
        try:
            self._driver = driver or Driver.load()
        except OSError as e:
            raise NoDevice(f"no driver: {e}") from e
        named = self._driver.device(ordinal)
        self.uuid, self.name, self.driver = named.uuid, named.name, self._driver.version()
        self.ordinal = ordinal
        self.generation = Generation.mine()
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._context = 0
        self._opened = Opened()
        self._allocated: dict[int, int] = {}
        self._registered: dict[int, int] = {}
        self._events = self._imported_events = 0
        self._own_stream = 0

    @contextmanager
    def current(self, doing: str) -> Iterator[None]:
        """The device's context is the thread's inside; what cupy raises becomes an error of devices."""
        with self._driver.current(self._context or self._start()):
            try:
                yield
            except self._runtime.CUDARuntimeError as e:
                raise from_code(e.status, f"{doing} on {self.uuid}") from e

    def _start(self) -> int:
        with self._starting:
            if not self._context:
                context = self._driver.primary_context(self.ordinal)
                with self._driver.current(context):
                    self._own_stream = self._driver.create_stream()
                self._context = context
            return self._context

    # Memory

    def memory(self) -> DeviceMemory:
        with self.current("asking for free memory"):
            free_bytes, total_bytes = self._driver.memory()
        return DeviceMemory(total_bytes, free_bytes)

    def use(self) -> DeviceUse:
        with self._lock:
            return DeviceUse(
                len(self._allocated),
                sum(self._allocated.values()),
                len(self._opened) + self._imported_events,
                self._events,
                sum(self._registered.values()),
            )

    def allocate(self, size_bytes: int, kind: HandleKind = HandleKind.IPC) -> Allocation:
        if size_bytes <= 0:
            raise InvalidAddress(f"a segment of {size_bytes} bytes")
        whole_bytes = -(-size_bytes // SEGMENT_GRANULE_BYTES) * SEGMENT_GRANULE_BYTES
        doing = f"allocating {whole_bytes} bytes"
        with self.current(doing):
            if kind == HandleKind.DESCRIPTOR:
                address, descriptor = cuda_descriptors.create(whole_bytes, self.ordinal)
            else:
                address, descriptor = self._runtime.malloc(whole_bytes), -1
        segment = _CudaAllocation(self, address, descriptor, whole_bytes)
        try:
            with self.current(doing):
                self._zero(address, whole_bytes)
                token = bytes(TOKEN_BYTES) if descriptor >= 0 else self._driver.export_memory(address)
        except BaseException:
            segment.give_back()
            raise
        segment.handle = self._handle(Thing.MEMORY, kind, size_bytes, token, descriptor)
        segment.size_bytes = size_bytes
        with self._lock:
            self._allocated[address] = whole_bytes
        return segment

    def _zero(self, address: int, size_bytes: int) -> None:
        self._runtime.memsetAsync(address, 0, size_bytes, self._own_stream)
        CudaStream(self, self._own_stream, False).synchronize(ZERO_S)

    def _handle(self, thing: Thing, kind: HandleKind, size_bytes: int, token: bytes, descriptor: int = -1) -> Handle:
        serial = next(_serials)
        return Handle(thing, kind, self.generation, serial, self.uuid, self.driver, size_bytes, token, descriptor)

    def free_memory(self, address: int, descriptor: int, whole_bytes: int) -> None:
        """For allocations: the driver's part of it."""
        with self.current("freeing a segment"):
            if descriptor >= 0:
                cuda_descriptors.unmap(address, whole_bytes, self.ordinal)
            else:
                self._runtime.free(address)
        if descriptor >= 0:
            os.close(descriptor)
        with self._lock:
            self._allocated.pop(address, None)

    # Handles of others

    def open(self, handle: Handle, of: Generation) -> Mapping:
        self.check_handle(handle, of, Thing.MEMORY)

        def map_it() -> int:
            with self.current("opening a segment"):
                if handle.kind == HandleKind.DESCRIPTOR:
                    return cuda_descriptors.open_descriptor(handle.descriptor, handle.size_bytes, self.ordinal)
                return self._driver.open_memory(handle.token)

        def unmap(address: int) -> None:
            with self.current("closing a segment"):
                if handle.kind == HandleKind.DESCRIPTOR:
                    cuda_descriptors.unmap(address, handle.size_bytes, self.ordinal)
                else:
                    self._driver.close_memory(address)

        return self._opened.open(handle, map_it, unmap)

    # Streams, copies, events

    def stream(self) -> Stream:
        with self.current("making a stream"):
            return CudaStream(self, self._driver.create_stream(), True)

    def wrap_stream(self, pointer: int) -> Stream:
        return CudaStream(self, pointer, False)

    def copy(self, to: int, source: int, size_bytes: int, direction: Direction, stream: Stream) -> None:
        with self.current(f"copying {size_bytes} bytes ({direction.name.lower()})"):
            self._runtime.memcpyAsync(to, source, size_bytes, int(direction), stream.pointer)

    def event(self, interprocess: bool = True) -> Event:
        with self.current("making an event"):
            event = self._driver.create_event(interprocess)
            if not interprocess:
                return CudaEvent(self, event, None, False)
            try:
                token = self._driver.export_event(event)
            except BaseException:
                self._driver.destroy_event(event)
                raise
        handle = self._handle(Thing.EVENT, HandleKind.IPC, 0, token)
        return CudaEvent(self, event, handle, False)

    def open_event(self, handle: Handle, of: Generation) -> Event:
        self.check_handle(handle, of, Thing.EVENT)
        with self.current("opening an event"):
            event = self._driver.open_event(handle.token)
        return CudaEvent(self, event, None, True)

    def count_event(self, change: int, imported: bool) -> None:
        with self._lock:
            if imported:
                self._imported_events += change
            else:
                self._events += change

    # Page-locking

    def host_register(self, address: int, size_bytes: int, read_only: bool) -> None:
        if not self._driver.attribute(ATTRIBUTE_HOST_REGISTER, self.ordinal):
            raise PageLockRefused(f"{self.uuid} registers no host memory; {PageLockRefused.remedy}")
        if read_only and not self._driver.attribute(ATTRIBUTE_READ_ONLY_HOST_REGISTER, self.ordinal):
            raise PageLockRefused(f"{self.uuid} registers no read-only memory; {PageLockRefused.remedy}")
        flags = PORTABLE | MAPPED | (READ_ONLY if read_only else 0)
        with self.current(f"page-locking {size_bytes} bytes at {address:#x}"):
            self._runtime.hostRegister(address, size_bytes, flags)
        with self._lock:
            self._registered[address] = size_bytes

    def host_unregister(self, address: int) -> None:
        with self.current(f"ending the page-lock at {address:#x}"):
            self._runtime.hostUnregister(address)
        with self._lock:
            self._registered.pop(address, None)

    def host_allocate(self, size_bytes: int) -> int:
        with self.current(f"page-locking {size_bytes} new bytes"):
            address = int(self._runtime.hostAlloc(size_bytes, PORTABLE))
        with self._lock:
            self._registered[address] = size_bytes
        return address

    def host_free(self, address: int) -> None:
        with self.current("freeing a staging buffer"):
            self._runtime.freeHost(address)
        with self._lock:
            self._registered.pop(address, None)

    def close(self) -> None:
        with self._starting:
            if not self._context or not self.use().nothing:
                return  # what is held goes with the process; without its context it would fault
            context, self._context = self._context, 0
            with self._driver.current(context):
                self._driver.destroy_stream(self._own_stream)
            self._driver.release_context(self.ordinal)

    # For streams and events

    def query(self, name: str, thing: int, doing: str) -> bool:
        with self.current(doing):
            return self._driver.query(name, thing, f"{doing} on {self.uuid}")

    def on_driver(self, doing: str, call: Callable[[Driver], None]) -> None:
        with self.current(doing):
            call(self._driver)

    def stream_wait(self, stream: int, event: int) -> None:
        with self.current("waiting on a stream"):
            self._runtime.streamWaitEvent(stream, event)


class _CudaAllocation(Allocation):
    def __init__(self, device: CudaDevice, address: int, descriptor: int, whole_bytes: int) -> None:
        self.address = address
        self._device, self._descriptor, self._whole_bytes = device, descriptor, whole_bytes
        self._freeing = threading.Lock()
        self._freed = False

    def give_back(self) -> None:
        self._device.free_memory(self.address, self._descriptor, self._whole_bytes)

    def free(self) -> None:
        with self._freeing:
            if self._freed:
                raise InvalidHandle(f"segment {self.handle.serial} was freed already")
            self.give_back()
            self._freed = True


class CudaStream(Stream):
    """Of ours (`owned`), or a caller's."""

    def __init__(self, device: CudaDevice, pointer: int, owned: bool) -> None:
        self.pointer = pointer
        self._device, self._owned = device, owned

    def wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise InvalidHandle("an event of another kind of device")
        self._device.stream_wait(self.pointer, event.pointer)

    def query(self) -> bool:
        return self._device.query("cuStreamQuery", self.pointer, "asking a stream")

    def close(self) -> None:
        owned, self._owned = self._owned, False
        if owned:
            self._device.on_driver("closing a stream", lambda driver: driver.destroy_stream(self.pointer))


class CudaEvent(Event):
    """One of ours, or an imported one, which behaves like it."""

    def __init__(self, device: CudaDevice, pointer: int, handle: Handle | None, imported: bool) -> None:
        self.handle, self._imported = handle, imported
        self._device, self._pointer = device, pointer
        self._once = threading.Lock()
        self._closed = False
        device.count_event(1, imported)

    @property
    def pointer(self) -> int:
        """cudaEvent_t."""
        if self._closed:
            raise InvalidHandle("the event is closed")
        return self._pointer

    def record(self, stream: Stream) -> None:
        pointer = self.pointer
        self._device.on_driver("recording an event", lambda driver: driver.record(pointer, stream.pointer))

    def query(self) -> bool:
        return self._device.query("cuEventQuery", self.pointer, "asking an event")

    def close(self) -> None:
        if self._once.acquire(blocking=False):
            self._closed = True
            try:
                self._device.on_driver("closing an event", lambda driver: driver.destroy_event(self._pointer))
            finally:
                self._device.count_event(-1, self._imported)
