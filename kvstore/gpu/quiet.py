"""Whether nothing of a process that is gone runs on a device any more: what the driver says, or that it cannot be told.

The driver ends the contexts of a process that has exited, but not before its exit is seen: until
then a kernel that it had launched may write to what it had mapped. So NVML is asked which
processes have a context on the device. Its answer counts only where this daemon, which has one
itself, is among them under its own number: in a container it may be empty, or name other numbers.
Where it cannot be told nothing is given back by a clock: what dead processes held is kept until
the device is lost or the daemon ends, and stats say so.
"""

import ctypes
import os
import threading
from typing import Protocol

from kvstore.gpu.processes import gone
from kvstored_cuda.devices import Device
from kvstored_cuda.devices.errors import DeviceError
from kvstored_cuda.devices.host_device import HostDevice

LIBRARY = "libnvidia-ml.so.1"

PROCESSES_MAX = 4096
"""Asked for at a time; a device with more of them cannot be told about."""

_COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"


class CannotTellError(DeviceError):
    """Nobody can say what runs on the device."""

    remedy = "let the daemon see NVML and the processes of the host (hostPID in containers)"


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, nvml.h of CUDA 13.0."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml(Protocol):
    """Which processes have a context on a device, by its UUID. Raises CannotTellError. May hang in the driver."""

    def __call__(self, uuid: str) -> set[int]: ...


class NvmlLibrary:
    """NVML, through ctypes: it releases Python's lock, and no package is wanted for three calls."""

    def __init__(self, path: str = LIBRARY) -> None:
        self._path = path
        self._starting = threading.Lock()
        self._library: ctypes.CDLL | None = None

    def __call__(self, uuid: str) -> set[int]:
        library = self._started()
        device, count = ctypes.c_void_p(), ctypes.c_uint(PROCESSES_MAX)
        found = (_Process * PROCESSES_MAX)()
        _check(library, "nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
        _check(library, _COMPUTE, device, ctypes.byref(count), found)
        return {int(process.pid) for process in found[: count.value]}

    def _started(self) -> ctypes.CDLL:
        with self._starting:
            if self._library is None:
                try:
                    library = ctypes.CDLL(self._path)
                except OSError as e:
                    raise CannotTellError(f"there is no NVML ({e}); {CannotTellError.remedy}") from e
                _check(library, "nvmlInit_v2")
                self._library = library
            return self._library


def _check(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    function = getattr(library, name, None)
    if function is None:
        raise CannotTellError(f"NVML has no {name}; {CannotTellError.remedy}")
    code = function(*arguments)
    if code:
        raise CannotTellError(f"{name} answered {code} (nvmlReturn_t); {CannotTellError.remedy}")


_nvml = NvmlLibrary()


def still_there(device: Device, pid: int, born: int, nvml: Nvml = _nvml) -> str:
    """Why a process may still have something running on a device; "" where it has not. May hang in the driver.

    Raises CannotTellError where nobody can say.
    born: in ticks since boot; 0 where nobody asked: then any process of that number is taken for it.
    """
    if not gone(pid, born):
        return f"process {pid} has not ended"
    if isinstance(device, HostDevice):
        return ""  # its streams are threads of that process
    there = nvml(device.uuid)
    if os.getpid() not in there:
        raise CannotTellError(f"NVML does not name this daemon itself on {device.uuid}; {CannotTellError.remedy}")
    return f"process {pid} has a context there" if pid in there else ""
