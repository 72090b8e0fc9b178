"""HostDevice: a device whose memory is the host's, for tests and for machines without a GPU.

It behaves as CUDA does wherever a test could be fooled by something kinder:
- segments are memfds; a handle is 64 bytes that name one of the exporter's, or a descriptor
- the exporter cannot open its own handle; a second open gives the same address and counts
- opening a handle of a dead process, or of a freed segment, is InvalidHandle
- copies are asynchronous: page-locked host memory is read or written when the copy runs, in
  two halves with the fault `transfer` between them, so that who does not wait sees a torn
  block. Memory that is not page-locked is copied at the call (to the device), or the call
  waits (from it)
- a copy that fails as it runs loses the device for this process (sticky errors)
- an event that was never recorded is complete; one that its exporter closed is InvalidHandle
- what an event says whose recorder died is the plan's choice (`trusting`): never complete, or complete
- free and the last close wait for the work that is enqueued, as cudaFree does
- the total is the device's, each process sees what it allocated itself as used
Kinder, or harsher, on purpose:
- freeing what a living importer maps is StillOpen and frees nothing (CUDA: undefined)
- a copy from or to device memory that is not allocated or open is InvalidAddress at the call
- an address that was given back faults (SIGSEGV) and is never used again
- a mapping outlives its exporter (CUDA: not promised)
- registering a mapping that this process may not write needs `read_only`, and nothing is
  written there from the device
"""

import ctypes
import itertools
import os
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstored_cuda.devices.device import Allocation, Device, DeviceMemory, DeviceUse, Direction, Event, Mapping, Stream
from kvstored_cuda.devices.errors import (
    DeviceLost,
    InvalidAddress,
    InvalidHandle,
    OutOfDeviceMemory,
)
from kvstored_cuda.devices.faults import FaultPlan
from kvstored_cuda.devices.handles import Generation, Handle, HandleKind, Thing
from kvstored_cuda.devices.host_events import PAGE_BYTES, EventPage, HostEvent, index_in, slot_at
from kvstored_cuda.devices.host_memory import (
    claimed_for_freeing,
    descriptor_of,
    leave_a_hole,
    map_memory,
    reopened,
    segment_file,
    token_of,
)
from kvstored_cuda.devices.host_pages import HostPages
from kvstored_cuda.devices.host_stream import HostStream, drain_all
from kvstored_cuda.devices.opened import Opened
from kvstored_cuda.devices.ranges import Ranges

DRIVER = 1
"""The version that handles of HostDevices carry."""

FREE_S = 60.0
"""How long free, close and a copy into memory that is not page-locked wait for work that is enqueued."""

_serials = itertools.count(1)


def _descriptor(handle: Handle) -> int:
    if handle.kind == HandleKind.DESCRIPTOR:
        return reopened(handle.descriptor, handle.size_bytes)
    return descriptor_of(handle.token, handle.generation.pid, handle.size_bytes)


class _HostAllocation(Allocation):
    def __init__(self, address: int, handle: Handle, descriptor: int, free: Callable[[int, int], None]) -> None:
        self.address, self.size_bytes, self.handle = address, handle.size_bytes, handle
        self._descriptor, self._free = descriptor, free
        self._freeing = threading.Lock()
        self._freed = False

    def free(self) -> None:
        with self._freeing:
            if self._freed:
                raise InvalidHandle(f"segment {self.handle.serial} was freed already")
            self._free(self.address, self._descriptor)
            self._freed = True


class HostDevice(Device):
    """size_bytes: all that may be allocated. memlock_bytes: what may be page-locked, None for no limit.

    driver: another number than DRIVER is another driver, whose handles are refused.
    """

    def __init__(
        self,
        uuid: str,
        size_bytes: int,
        plan: FaultPlan | None = None,
        memlock_bytes: int | None = None,
        driver: int = DRIVER,
    ) -> None:
        self.uuid, self.name, self.driver = uuid, "host memory", driver
        self.generation = Generation.mine()
        self.plan = plan or FaultPlan()
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._lost = ""
        self._memory = Ranges(f"device {uuid}")
        self._allocated: dict[int, int] = {}
        self._descriptors: dict[int, int] = {}
        self._events = EventPage()
        self._opened = Opened()
        self._pages = HostPages(self.meet, memlock_bytes)
        self._pointers = itertools.count(0x1000, 0x10)
        self._streams: dict[int, HostStream] = {0: HostStream(self, 0)}

    # What sticks

    @property
    def lost(self) -> bool:
        return bool(self._lost)

    def lose(self, why: str) -> None:
        """The device is gone for this process: every later call raises DeviceLost."""
        self._lost = self._lost or why

    def meet(self, call: str) -> None:
        """What the plan has in store for this call. A device that it loses stays lost."""
        try:
            self.plan.meet(call)
        except DeviceLost as e:
            self.lose(str(e))
            raise

    def require_alive(self) -> None:
        if self._lost:
            raise DeviceLost(f"device {self.uuid} is lost: {self._lost}")

    # Memory

    def memory(self) -> DeviceMemory:
        self.meet("memory")
        self.require_alive()
        with self._lock:
            return DeviceMemory(self._size_bytes, self._size_bytes - sum(self._allocated.values()))

    def use(self) -> DeviceUse:
        with self._lock:
            allocations, allocated_bytes = len(self._allocated), sum(self._allocated.values())
        return DeviceUse(
            allocations, allocated_bytes, len(self._opened), self._events.live, self._pages.page_locked_bytes
        )

    def allocate(self, size_bytes: int, kind: HandleKind = HandleKind.IPC) -> Allocation:
        self.meet("allocate")
        self.require_alive()
        if size_bytes <= 0:
            raise InvalidAddress(f"a segment of {size_bytes} bytes")
        descriptor = segment_file(size_bytes)
        try:
            address = self._take(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._memory.add(address, size_bytes)
        handle = self._handle(Thing.MEMORY, kind, size_bytes, token_of(descriptor), descriptor)
        return _HostAllocation(address, handle, descriptor, self._free)

    def _take(self, descriptor: int, size_bytes: int) -> int:
        with self._lock:
            free_bytes = self._size_bytes - sum(self._allocated.values())
            if size_bytes > free_bytes:
                raise OutOfDeviceMemory(f"{size_bytes} bytes of device {self.uuid}, {free_bytes} are free")
            address = map_memory(descriptor, size_bytes)
            self._allocated[address] = size_bytes
        return address

    def _handle(self, thing: Thing, kind: HandleKind, size_bytes: int, token: bytes, descriptor: int = -1) -> Handle:
        sent = descriptor if kind == HandleKind.DESCRIPTOR else -1
        return Handle(thing, kind, self.generation, next(_serials), self.uuid, self.driver, size_bytes, token, sent)

    def _free(self, address: int, descriptor: int) -> None:
        self.meet("free")
        with claimed_for_freeing(descriptor):
            self._give_back(address, "freeing a segment")
        os.close(descriptor)
        with self._lock:
            del self._allocated[address]

    def _give_back(self, address: int, what: str) -> None:
        """Nothing new may touch it; what was enqueued ends; then it is unmapped."""
        size_bytes = self._memory.remove(address)
        try:
            self._drain(what)
        except BaseException:
            self._memory.add(address, size_bytes)
            raise
        leave_a_hole(address, size_bytes)

    def _drain(self, what: str) -> None:
        with self._lock:
            streams = list(self._streams.values())
        drain_all(streams, FREE_S, what)

    # Handles of others

    def open(self, handle: Handle, of: Generation) -> Mapping:
        self.check_handle(handle, of, Thing.MEMORY)
        self.require_alive()

        def map_it() -> int:
            self.meet("open")
            address = self._map(_descriptor(handle), handle.size_bytes)
            self._memory.add(address, handle.size_bytes)
            return address

        def unmap(address: int) -> None:
            self.meet("close")
            self._give_back(address, "closing a handle")
            os.close(self._descriptors.pop(address))

        return self._opened.open(handle, map_it, unmap)

    def _map(self, descriptor: int, size_bytes: int) -> int:
        try:
            address = map_memory(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptors[address] = descriptor
        return address

    # Streams and copies

    def stream(self) -> HostStream:
        self.require_alive()
        with self._lock:
            for pointer in [pointer for pointer, stream in self._streams.items() if stream.closed]:
                if self._streams[pointer].drain(0):
                    del self._streams[pointer]
            stream = HostStream(self, next(self._pointers))
            self._streams[stream.pointer] = stream
        return stream

    def wrap_stream(self, pointer: int) -> HostStream:
        with self._lock:
            stream = self._streams.get(pointer)
        if stream is None or stream.closed:
            raise InvalidHandle(f"device {self.uuid} has no stream {pointer:#x}")
        return stream

    def copy(self, to: int, source: int, size_bytes: int, direction: Direction, stream: Stream) -> None:
        self.meet("copy")
        self.require_alive()
        if not isinstance(stream, HostStream):
            raise InvalidHandle("a stream of another kind of device")
        onto_device = direction != Direction.DEVICE_TO_HOST
        off_device = direction != Direction.HOST_TO_DEVICE
        for address, on_device in ((to, onto_device), (source, off_device)):
            if on_device:
                self._memory.require(address, size_bytes)
            elif self._memory.holds(address, 1):
                raise InvalidAddress(f"{address:#x} is memory of the device, the copy says host")
        if onto_device and off_device:
            stream.enqueue(lambda: self._transfer(to, source, size_bytes))
        elif onto_device:
            staged = None if self._pages.holds(source, size_bytes) else ctypes.create_string_buffer(size_bytes)
            if staged is not None:
                ctypes.memmove(staged, source, size_bytes)
            stream.enqueue(lambda: self._transfer(to, ctypes.addressof(staged) if staged else source, size_bytes))
        else:
            locked = self._pages.holds(to, size_bytes)
            if locked:
                self._pages.require_writable(to)
            stream.enqueue(lambda: self._transfer(to, source, size_bytes))
            if not locked:
                drain_all([stream], FREE_S, "a copy into memory that is not page-locked")
                self.require_alive()

    def _transfer(self, to: int, source: int, size_bytes: int) -> None:
        half = size_bytes // 2
        ctypes.memmove(to, source, half)
        self.meet("transfer")
        ctypes.memmove(to + half, source + half, size_bytes - half)

    def array(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        """Memory of the device as bytes, for kernels' twins and for tests; not to be kept over `free` or `close`."""
        self._memory.require(address, size_bytes)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))

    # Events

    def event(self, interprocess: bool = True) -> Event:
        self.meet("event")
        self.require_alive()
        serial = next(_serials)
        slot, token = self._events.take(serial)
        event = HostEvent(slot, serial, self.plan, self, lambda: self._events.give_back(token))
        if interprocess:
            event.handle = Handle(
                Thing.EVENT, HandleKind.IPC, self.generation, serial, self.uuid, self.driver, 0, token
            )
        return event

    def open_event(self, handle: Handle, of: Generation) -> Event:
        self.check_handle(handle, of, Thing.EVENT)
        self.require_alive()
        index = index_in(handle.token)

        def map_it() -> int:
            self.meet("open_event")
            return self._map(descriptor_of(handle.token, handle.generation.pid, PAGE_BYTES), PAGE_BYTES)

        def unmap(address: int) -> None:
            leave_a_hole(address, PAGE_BYTES)
            os.close(self._descriptors.pop(address))

        def hold() -> Mapping:
            return self._opened.open(handle, map_it, unmap)

        mapping = hold()
        slot = slot_at(mapping.address, index)
        if slot.serial != handle.serial or slot.closed:
            mapping.close()
            raise InvalidHandle(f"event {handle.serial} has been closed by its exporter")
        return HostEvent(slot, handle.serial, self.plan, self, mapping.close, hold)

    # Page-locking

    def host_register(self, address: int, size_bytes: int, read_only: bool) -> None:
        self.require_alive()
        self._pages.register(address, size_bytes, read_only)

    def host_unregister(self, address: int) -> None:
        self._pages.unregister(address)

    def host_allocate(self, size_bytes: int) -> int:
        self.require_alive()
        return self._pages.allocate(size_bytes)

    def host_free(self, address: int) -> None:
        self._drain("freeing a staging buffer")
        self._pages.free(address)

    def close(self) -> None:
        with self._lock:
            streams = list(self._streams.values())
        self.lose("it was closed")
        for stream in streams:
            stream.end()
        self._events.close()
