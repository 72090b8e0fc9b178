"""What can go wrong with a device, each with what to do about it, and the one table from CUDA's codes to them.

    DeviceError                        a code that has no finer name here (INTERNAL)
    +-- NoDevice            FailedPrecondition   no such device here: the tier is off, the others go on
    +-- DeviceLost          Unavailable          all that was on it is gone; only a new process can use it again
    +-- OutOfDeviceMemory   ResourceExhausted    evict, or go on with fewer segments
    +-- StaleHandle         FailedPrecondition   a handle of another life of the exporter: ask for a fresh one
    +-- OwnHandle           InvalidArgument      the exporter has the memory already: use its own address
    +-- InvalidHandle       InvalidArgument      no handle, or freed: ask for a fresh one, once
    +-- IpcRefused          FailedPrecondition   this process may not map it: descriptors, else staging by the slab
    +-- OtherDriver         FailedPrecondition   another driver than the exporter's: staging by the slab
    +-- InvalidAddress      InvalidArgument      outside what is allocated and open: a bug of the caller
    +-- StillOpen           FailedPrecondition   freeing waits until every importer has closed it or is dead
    +-- PageLockRefused     ResourceExhausted    stage through a page-locked buffer
    +-- DeviceTimeout       DeadlineExceeded     whether it happened is not known: nothing of it is reused
    +-- TooManyCalls        ResourceExhausted    too many native calls hang: refuse new work of this owner

All are KVStoreErrors, so each has its code on the wire.
"""

from types import MappingProxyType

from kvstored.v1.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KVStoreError,
    ResourceExhausted,
    Unavailable,
)


class DeviceError(KVStoreError):
    """Root of the errors of devices. `remedy` is one line for stats and logs: what to do now."""

    remedy = "take it as a failed copy: a miss for the blocks concerned"


class NoDevice(DeviceError, FailedPrecondition):
    """There is no such device, or none at all."""

    remedy = "go on without the GPU tier"


class DeviceLost(DeviceError, Unavailable):
    """The device, or this process's context on it, is gone: Xid, ECC, driver restart, a fault of a kernel.

    CUDA's errors of this kind stick: every later call of this process answers the same.
    """

    remedy = "drop every block of this device, take it out of service, restart the process to use it again"


class OutOfDeviceMemory(DeviceError, ResourceExhausted):
    """The device has not so much memory free. Nothing was taken."""

    remedy = "evict, or go on with the segments there are"


class StaleHandle(DeviceError, FailedPrecondition):
    """A handle of another generation of the exporting process than the one that is spoken to."""

    remedy = "drop it and ask the daemon of now for a handle"


class OwnHandle(DeviceError, InvalidArgument):
    """A process cannot open what it exported itself."""

    remedy = "use the address of the allocation"


class InvalidHandle(DeviceError, InvalidArgument):
    """Not a handle, one of another device, or what it names has been freed or closed."""

    remedy = "ask for a fresh handle once, then go through the slab"


class IpcRefused(DeviceError, FailedPrecondition):
    """The driver does not let this process export or map: another container, WSL, no privilege."""

    remedy = "try a handle that is a descriptor, else go through the slab"


class OtherDriver(DeviceError, FailedPrecondition):
    """The two processes have different drivers, and handles do not cross."""

    remedy = "go through the slab, and load one driver in both processes"


class InvalidAddress(DeviceError, InvalidArgument):
    """A copy would touch memory that is not allocated or open."""

    remedy = "mend the caller"


class StillOpen(DeviceError, FailedPrecondition):
    """A segment was to be freed that a living importer maps. It was not freed."""

    remedy = "free it when every importer has closed it or is dead"


class PageLockRefused(DeviceError, ResourceExhausted):
    """Host memory was not page-locked: memlock limit, WSL, container, or read-only memory that must not be."""

    remedy = "copy through a page-locked staging buffer, and raise RLIMIT_MEMLOCK"


class DeviceTimeout(DeviceError, DeadlineExceeded):
    """No end within the deadline. The call or copy may still happen: its memory must not be reused before."""

    remedy = "take it as failed, and keep its memory out of use until it has ended"


class TooManyCalls(DeviceError, ResourceExhausted):
    """As many native calls of this owner as may are under way."""

    remedy = "refuse this owner's work until its calls have returned"


HEADER = "driver_types.h (enum cudaError) of CUDA 13.0; from 100 on cuda.h's CUresult has the same numbers"
"""The source of the codes below. Of those under 100 these four are the same in both: 1, 2, 3, 4."""

NOT_READY = 600
"""cudaErrorNotReady, CUDA_ERROR_NOT_READY: the answer of a query, not an error."""

NO_DRIVER = frozenset({34, 35})
"""cudaErrorStubLibrary, cudaErrorInsufficientDriver: what cupy answers where no driver is installed."""

_TABLE: dict[int, tuple[str, type[DeviceError]]] = {
    1: ("cudaErrorInvalidValue", InvalidAddress),
    2: ("cudaErrorMemoryAllocation", OutOfDeviceMemory),
    3: ("cudaErrorInitializationError", NoDevice),
    4: ("cudaErrorCudartUnloading", DeviceLost),
    17: ("cudaErrorInvalidDevicePointer", InvalidAddress),
    34: ("cudaErrorStubLibrary", NoDevice),
    35: ("cudaErrorInsufficientDriver", NoDevice),
    36: ("cudaErrorCallRequiresNewerDriver", OtherDriver),
    46: ("cudaErrorDevicesUnavailable", DeviceLost),
    100: ("cudaErrorNoDevice", NoDevice),
    101: ("cudaErrorInvalidDevice", NoDevice),
    201: ("cudaErrorDeviceUninitialized", IpcRefused),  # also the driver's answer to a process's own handle
    205: ("cudaErrorMapBufferObjectFailed", IpcRefused),
    214: ("cudaErrorECCUncorrectable", DeviceLost),
    217: ("cudaErrorPeerAccessUnsupported", IpcRefused),
    220: ("cudaErrorNvlinkUncorrectable", DeviceLost),
    226: ("cudaErrorContained", DeviceLost),
    304: ("cudaErrorOperatingSystem", IpcRefused),
    400: ("cudaErrorInvalidResourceHandle", InvalidHandle),
    401: ("cudaErrorIllegalState", InvalidHandle),
    700: ("cudaErrorIllegalAddress", DeviceLost),
    702: ("cudaErrorLaunchTimeout", DeviceLost),
    705: ("cudaErrorPeerAccessNotEnabled", IpcRefused),
    709: ("cudaErrorContextIsDestroyed", DeviceLost),
    710: ("cudaErrorAssert", DeviceLost),
    711: ("cudaErrorTooManyPeers", IpcRefused),
    712: ("cudaErrorHostMemoryAlreadyRegistered", PageLockRefused),
    713: ("cudaErrorHostMemoryNotRegistered", InvalidAddress),
    714: ("cudaErrorHardwareStackError", DeviceLost),
    715: ("cudaErrorIllegalInstruction", DeviceLost),
    716: ("cudaErrorMisalignedAddress", DeviceLost),
    717: ("cudaErrorInvalidAddressSpace", DeviceLost),
    718: ("cudaErrorInvalidPc", DeviceLost),
    719: ("cudaErrorLaunchFailure", DeviceLost),
    721: ("cudaErrorTensorMemoryLeak", DeviceLost),
    800: ("cudaErrorNotPermitted", IpcRefused),
    801: ("cudaErrorNotSupported", IpcRefused),
    802: ("cudaErrorSystemNotReady", DeviceLost),
    803: ("cudaErrorSystemDriverMismatch", OtherDriver),
    804: ("cudaErrorCompatNotSupportedOnDevice", OtherDriver),
    805: ("cudaErrorMpsConnectionFailed", DeviceLost),
    806: ("cudaErrorMpsRpcFailure", DeviceLost),
    810: ("cudaErrorMpsClientTerminated", DeviceLost),
    909: ("cudaErrorTimeout", DeviceTimeout),
    911: ("cudaErrorExternalDevice", DeviceLost),
    999: ("cudaErrorUnknown", DeviceLost),
}

CODES = MappingProxyType(_TABLE)
"""Code -> (CUDA's name, our class). Xid 48, 63, 79, 94, 95 reach a process as 214, 226, 719, 46 or 999: all of them
are DeviceLost. 999 is among them since nothing is known about the state it leaves: the careful reading."""

_PAGE_LOCK = (1, 2, 205, 304, 400, 712, 800, 801)
"""What cudaHostRegister answers where it will not: they mean the host's memory there, not the device's."""

_OPENING = MappingProxyType({1: InvalidHandle, 2: OutOfDeviceMemory, 17: InvalidHandle, 101: InvalidHandle})
"""Codes whose meaning is another one when a handle is opened or closed: the wrong value is the handle."""


def from_code(code: int, doing: str) -> DeviceError:
    """The error for a code of cupy's CUDARuntimeError.status or of a CUresult.

    doing: what was asked for, with the names of the function and the device; it begins the message.
    """
    name, kind = CODES.get(code, (f"code {code}", DeviceError))
    if doing.startswith("page-locking") and code in _PAGE_LOCK:
        kind = PageLockRefused
    elif doing.startswith(("opening", "closing")) and code in _OPENING:
        kind = _OPENING[code]
    return kind(f"{doing}: {name} ({code}); {kind.remedy}")
