"""CUDA's driver and cupy's runtime with host memory under them, so that CudaDevice's own code runs without a GPU.

The driver is C (`standin_driver.c`, built by the compiler that is here) behind the same
ctypes prototypes; the runtime answers to the names and types of cupy.cuda.runtime that
CudaDevice uses. It shows that calls, contexts, codes and clean-up are right; what a GPU
does, only the tests marked `gpu` show.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from kvstored_cuda.devices.cuda_device import CudaDevice
from kvstored_cuda.devices.cuda_driver import Driver
from kvstored_cuda.devices.host_memory import leave_a_hole, map_anonymous
from kvstored_cuda.devices.host_pages import protection_of

SOURCE = Path(__file__).with_name("standin_driver.c")
COMPILE_S = 60.0


@functools.cache
def library(named: bool = False) -> Path:
    """Built once a state of the source, in a directory of this user's.

    named: with the driver's own name inside, so that whoever asks for libcuda.so.1 in a process
    that has loaded it gets it: for processes that load cuda-bindings alone, never for pytest's.
    """
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"kvstored-standin-{os.getuid()}-{digest}"
    built = folder / ("libcuda.so.1" if named else "standin.so")
    if not built.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        assert folder.stat().st_uid == os.getuid(), f"{folder} is another user's"
        compiler = shutil.which("gcc") or shutil.which("cc") or "gcc"
        part = folder / f"{os.getpid()}.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(part), str(SOURCE), "-ldl"]
        named_so = ["-Wl,-soname,libcuda.so.1"] if named else []
        subprocess.run([*command, "-lpthread", *named_so], check=True, timeout=COMPILE_S)
        part.rename(built)
    return built


def have_bindings() -> bool:
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


def block(seconds: float, named: bool = False) -> None:
    """From now on a close blocks in the driver for so long (0: no more)."""
    ctypes.CDLL(str(library(named))).standin_block(ctypes.c_double(seconds))


class StandInError(RuntimeError):
    """As cupy's CUDARuntimeError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def _checked(status: int) -> None:
    if status:
        raise StandInError(status)


class StandInRuntime:
    """What CudaDevice uses of cupy.cuda.runtime (14.2, runtime.pyx), positional as there."""

    CUDARuntimeError = StandInError

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        for name, types in {
            "standin_malloc": [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t],
            "standin_free": [ctypes.c_uint64],
            "standin_copy": [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int],
            "standin_set": [ctypes.c_uint64, ctypes.c_int, ctypes.c_size_t],
        }.items():
            getattr(self.library, name).argtypes = types
        self.registered: dict[int, int] = {}
        self.allocated: dict[int, int] = {}

    def malloc(self, size: int) -> int:
        address = ctypes.c_uint64()
        _checked(self.library.standin_malloc(ctypes.byref(address), size))
        return address.value

    def free(self, ptr: int) -> None:
        _checked(self.library.standin_free(ptr))

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802  cupy's name
        assert isinstance(stream, int)
        _checked(self.library.standin_copy(dst, src, size, kind))

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:  # noqa: N802
        assert isinstance(stream, int)
        _checked(self.library.standin_set(ptr, value, size))

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:  # noqa: N802
        assert event
        assert isinstance(stream, int)
        _checked(self.library.standin_current())

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:  # noqa: N802
        _checked(self.library.standin_current())
        if ptr in self.registered:
            _checked(712)
        granted = protection_of(ptr, size)
        if not granted or (granted == "r" and not flags & 0x08):
            _checked(1)
        self.registered[ptr] = size

    def hostUnregister(self, ptr: int) -> None:  # noqa: N802
        _checked(self.library.standin_current())
        if self.registered.pop(ptr, None) is None:
            _checked(713)

    def hostAlloc(self, size: int, flags: int) -> int:  # noqa: N802
        _checked(self.library.standin_current() or (flags != 1))
        address = map_anonymous(size)
        self.allocated[address] = size
        return address

    def freeHost(self, ptr: int) -> None:  # noqa: N802
        leave_a_hole(ptr, self.allocated.pop(ptr))


def standin_device(named: bool = False) -> CudaDevice:
    """A CudaDevice on the stand-ins, as one whose driver has been started."""
    path = library(named)
    driver = Driver(str(path))
    driver.call("cuInit", 0, doing="starting the driver (cuInit)")
    runtime: Any = StandInRuntime(path)
    return CudaDevice(0, driver, cast(ModuleType, runtime))
