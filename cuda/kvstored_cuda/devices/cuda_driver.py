"""The calls of CUDA's driver that must not hold Python's lock, through ctypes.

cupy 14.2 (cupy_backends/cuda/api/runtime.pyx) enters CUDA with the GIL held in
ipcOpenMemHandle, ipcCloseMemHandle, ipcGetMemHandle, the same of events, eventCreate,
eventQuery, eventDestroy, streamCreate, streamDestroy, streamQuery, setDevice and memGetInfo.
One of them that blocks (a close while the peer dies, anything while a registration holds
the driver's lock) would stop every thread of the process, so it does not help to call it on
a thread of its own. ctypes releases the GIL for the length of a call. Runtime and driver
share contexts, and cudaStream_t and cudaEvent_t are CUstream and CUevent.

cupy also takes the UUID of a device as a C string, which a zero byte ends: here it is read as the 16 bytes it is.

Types and names: cuda.h of CUDA 13.0, with the suffixes its #defines put in.
"""

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvstored_cuda.devices.errors import NOT_READY, from_code
from kvstored_cuda.devices.handles import TOKEN_BYTES

LIBRARY = "libcuda.so.1"

IPC_LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the one flag that cuIpcOpenMemHandle takes."""

EVENT_DISABLE_TIMING, EVENT_INTERPROCESS = 0x2, 0x4
"""CU_EVENT_DISABLE_TIMING, which CU_EVENT_INTERPROCESS wants."""

STREAM_NON_BLOCKING = 0x1
"""CU_STREAM_NON_BLOCKING: does not wait for the default stream."""

ATTRIBUTE_HOST_REGISTER, ATTRIBUTE_READ_ONLY_HOST_REGISTER = 99, 113
"""CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED."""

_NAME_BYTES = 256


class Token(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle: 64 bytes, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * TOKEN_BYTES),)


_pointer, _int, _unsigned, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_address = ctypes.c_uint64
"""CUdeviceptr: unsigned long long."""

_to = ctypes.POINTER

PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_unsigned,),
    "cuDriverGetVersion": (_to(_int),),
    "cuDeviceGetCount": (_to(_int),),
    "cuDeviceGet": (_to(_int), _int),
    "cuDeviceGetName": (ctypes.c_char_p, _int, _int),
    "cuDeviceGetUuid_v2": (_pointer, _int),
    "cuDeviceTotalMem_v2": (_to(_size), _int),
    "cuDeviceGetAttribute": (_to(_int), _int, _int),
    "cuDevicePrimaryCtxRetain": (_to(_pointer), _int),
    "cuDevicePrimaryCtxRelease_v2": (_int,),
    "cuCtxPushCurrent_v2": (_pointer,),
    "cuCtxPopCurrent_v2": (_to(_pointer),),
    "cuMemGetInfo_v2": (_to(_size), _to(_size)),
    "cuIpcGetMemHandle": (_to(Token), _address),
    "cuIpcOpenMemHandle_v2": (_to(_address), Token, _unsigned),
    "cuIpcCloseMemHandle": (_address,),
    "cuIpcGetEventHandle": (_to(Token), _pointer),
    "cuIpcOpenEventHandle": (_to(_pointer), Token),
    "cuEventCreate": (_to(_pointer), _unsigned),
    "cuEventRecord": (_pointer, _pointer),
    "cuEventQuery": (_pointer,),
    "cuEventDestroy_v2": (_pointer,),
    "cuStreamCreate": (_to(_pointer), _unsigned),
    "cuStreamQuery": (_pointer,),
    "cuStreamDestroy_v2": (_pointer,),
}
"""Name in the library -> types of the arguments; all answer a CUresult."""


@dataclass(frozen=True)
class DeviceName:
    """What the driver says of a device without a context."""

    ordinal: int
    uuid: str
    name: str
    total_bytes: int


class Driver:
    """The driver's library. Raises OSError where there is none, and the errors of devices for what it answers."""

    def __init__(self, path: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(path)
        for name, types in PROTOTYPES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, _int

    @staticmethod
    @cache
    def load() -> "Driver":
        """The one of this process, initialised. Raises OSError without a driver, NoDevice without a device."""
        driver = Driver()
        driver.call("cuInit", 0, doing="starting the driver (cuInit)")
        return driver

    def call(self, name: str, *arguments: Any, doing: str) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise from_code(code, f"{doing} ({name})" if name not in doing else doing)

    def query(self, name: str, thing: int, doing: str) -> bool:
        """cuEventQuery, cuStreamQuery: whether it is done."""
        code = getattr(self._library, name)(thing)
        if code == NOT_READY:
            return False
        if code:
            raise from_code(code, f"{doing} ({name})")
        return True

    def version(self) -> int:
        """13000 for CUDA 13.0."""
        value = _int()
        self.call("cuDriverGetVersion", ctypes.byref(value), doing="asking the driver's version")
        return value.value

    def devices(self) -> list[DeviceName]:
        count = _int()
        self.call("cuDeviceGetCount", ctypes.byref(count), doing="counting devices")
        return [self.device(ordinal) for ordinal in range(count.value)]

    def device(self, ordinal: int) -> DeviceName:
        doing = f"asking for device {ordinal}"
        number, total = _int(), _size()
        raw, name = (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(_NAME_BYTES)
        self.call("cuDeviceGet", ctypes.byref(number), ordinal, doing=doing)
        self.call("cuDeviceGetUuid_v2", raw, number, doing=doing)
        self.call("cuDeviceGetName", name, _NAME_BYTES, number, doing=doing)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(total), number, doing=doing)
        title = name.value.decode(errors="replace")
        prefix = "MIG" if " MIG " in title else "GPU"
        return DeviceName(ordinal, f"{prefix}-{uuid.UUID(bytes=bytes(raw))}", title, total.value)

    def attribute(self, which: int, ordinal: int) -> int:
        value = _int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), which, ordinal, doing=f"asking device {ordinal}")
        return value.value

    def primary_context(self, ordinal: int) -> int:
        """Retains it, and makes it where it is not there: takes long, and memory of the device."""
        context = _pointer()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal, doing=f"starting device {ordinal}")
        return context.value or 0

    def release_context(self, ordinal: int) -> None:
        self.call("cuDevicePrimaryCtxRelease_v2", ordinal, doing=f"leaving device {ordinal}")

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Makes a context the thread's, and gives the caller's back: their current device is none of our business."""
        self.call("cuCtxPushCurrent_v2", context, doing="entering a device")
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(_pointer()), doing="leaving a device")

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the current device."""
        free, total = _size(), _size()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total), doing="asking for free memory")
        return free.value, total.value

    def export_memory(self, address: int) -> bytes:
        token = Token()
        self.call("cuIpcGetMemHandle", ctypes.byref(token), address, doing="exporting a segment")
        return bytes(token.reserved)

    def open_memory(self, token: bytes) -> int:
        address = _address()
        given = Token.from_buffer_copy(token)
        doing = "opening a segment"
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, IPC_LAZY_PEER_ACCESS, doing=doing)
        return address.value

    def close_memory(self, address: int) -> None:
        self.call("cuIpcCloseMemHandle", address, doing="closing a segment")

    def create_event(self, interprocess: bool) -> int:
        event = _pointer()
        flags = EVENT_DISABLE_TIMING | (EVENT_INTERPROCESS if interprocess else 0)
        self.call("cuEventCreate", ctypes.byref(event), flags, doing="making an event")
        return event.value or 0

    def export_event(self, event: int) -> bytes:
        token = Token()
        self.call("cuIpcGetEventHandle", ctypes.byref(token), event, doing="exporting an event")
        return bytes(token.reserved)

    def open_event(self, token: bytes) -> int:
        event = _pointer()
        given = Token.from_buffer_copy(token)
        self.call("cuIpcOpenEventHandle", ctypes.byref(event), given, doing="opening an event")
        return event.value or 0

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", event, stream, doing="recording an event")

    def destroy_event(self, event: int) -> None:
        self.call("cuEventDestroy_v2", event, doing="closing an event")

    def create_stream(self) -> int:
        stream = _pointer()
        self.call("cuStreamCreate", ctypes.byref(stream), STREAM_NON_BLOCKING, doing="making a stream")
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self.call("cuStreamDestroy_v2", stream, doing="closing a stream")
