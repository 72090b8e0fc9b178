"""The kernels of paged.cu on a GPU: compiled by NVRTC at first use, launched on the caller's stream, through cupy.

cupy is imported when the first KernelCopies is made, nowhere else. It keeps what it compiled in its cache on disk
(CUPY_CACHE_DIR, else ~/.cupy/kernel_cache), so that a second process only loads it.

Nothing here waits for the device but making and dropping a KernelCopies: a copy is queued on the stream, and what
goes wrong on the device (an address that is not mapped) is seen by whoever waits for that stream, as cupy's or
torch's error, and ends the process's use of that device.
"""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvstored.v1.errors import FailedPrecondition, InvalidArgument
from kvstored_cuda.batches import Batch, Copies
from kvstored_cuda.devices.errors import DeviceError, NoDevice, from_code
from kvstored_cuda.layouts import PagedLayout, whole
from kvstored_cuda.plans import LARGE_ENTRIES, SMALL_ENTRIES, kernel_names, launches, plane_table

SOURCE = Path(__file__).with_name("paged.cu")

OPTIONS = ("--std=c++17",)

MULTIPROCESSORS_MAX = 1024
"""More than any device has; a request for more than this one has is for all of them."""

LARGE_ARGUMENTS = 12010
"""CUDA 12.1: from this compiler and driver on an argument may have 32,764 bytes; before, 4,096."""


def load_cupy() -> Any:
    """cupy, with at least one device; raises NoDevice, which says what is missing."""
    try:
        import cupy
    except ImportError as e:
        raise NoDevice(f"copies on a GPU need cupy, which cannot be imported: {e}") from e
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as e:
        raise failure(e, "counting devices") from e
    if not count:
        raise NoDevice("copies on a GPU need a GPU, and there is none")
    return cupy


def failure(e: RuntimeError, doing: str) -> DeviceError:
    """The error for one of cupy's: those of CUDA carry its code, others say what they could not load."""
    status = getattr(e, "status", None)
    return from_code(status, f"{doing}: {e}") if isinstance(status, int) else DeviceError(f"{doing}: {e}")


def stream_address(stream: Any) -> int:
    """The cudaStream_t of a stream of torch or cupy, or of whatever follows the stream protocol; a number is one."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for name in ("cuda_stream", "ptr", "pointer"):  # torch's, cupy's, and that of our own devices
        address = getattr(stream, name, None)
        if isinstance(address, int):
            return address
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1])
    raise InvalidArgument(f"a {type(stream).__name__} is not a stream, nor the address of one")


class KernelCopies(Copies):
    """The copies between one engine's paged KV cache and slots, on one device.

    Slots are addresses that this device can reach: of its own memory, of memory opened by CUDA IPC, or of host memory
    that this process has page-locked (registered), as the device sees it. Both directions are queued on the stream,
    in one launch for all layers and blocks (several where a call has more than about 2,000 slots); the caller records
    an event behind it, and leaves slots, pages and tensors alone until it has come.

    One object is for one layout; it may be used by several threads. Dropping it waits for the device, so it is not
    dropped on an event loop; a CUDA graph that has its copies in it needs it as long as it is replayed.
    """

    def __init__(self, layout: PagedLayout, device: int = 0) -> None:
        """`device`: this process's ordinal of the device that has the engine's tensors.

        Raises NoDevice where cupy or a GPU is missing, FailedPrecondition where the kernels cannot be compiled,
        InvalidArgument for a device that is not there and for addresses that are not its own, and what
        `devices.errors` has for the codes of CUDA.
        """
        super().__init__(layout)
        self.device = device
        self._cupy = cupy = load_cupy()
        runtime = cupy.cuda.runtime
        if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < runtime.getDeviceCount():
            raise InvalidArgument(f"device={device!r} is not one of {runtime.getDeviceCount()}")
        self._table = plane_table(layout)
        try:
            with cupy.cuda.Device(device):
                self._check_addresses()
                self._entries_max, self._kernels = load_kernels(device)
                self.multiprocessors = int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device))
                # Not of cupy's pool: freeing it waits for the device, so no kernel ever reads what another has by now.
                self._planes = cupy.cuda.Memory(self._table.nbytes)
                runtime.memcpy(
                    self._planes.ptr, self._table.ctypes.data, self._table.nbytes, runtime.memcpyHostToDevice
                )
                # From pageable memory the call comes back before the bytes have arrived; other streams do not wait.
                runtime.streamSynchronize(0)
        except RuntimeError as e:  # what cupy raises for CUDA is one
            raise failure(e, f"preparing copies on device {device}") from e

    def _queue(self, batch: Batch, stream: Any, multiprocessors: int | None) -> int:
        on = SimpleNamespace(ptr=stream_address(stream))  # all that cupy asks of a stream
        busy = self.multiprocessors
        if multiprocessors is not None:
            busy = min(busy, whole("multiprocessors", multiprocessors, 1, MULTIPROCESSORS_MAX))
        count = 0
        try:
            with self._cupy.cuda.Device(self.device):
                for launch in launches(batch, self._table, self._planes.ptr, busy, self._entries_max):
                    kernel = self._kernels[launch.kernel]
                    kernel((launch.grid,), (launch.threads,), (launch.call,), stream=on)
                    count += 1
        except RuntimeError as e:
            raise failure(e, f"launch {count} of a {batch.way} on device {self.device}") from e
        return count

    def _check_addresses(self) -> None:
        """That CUDA knows the first and the last byte of every part, as this device's or as page-locked."""
        runtime = self._cupy.cuda.runtime
        for layer, bases in enumerate(self.layout.bases):
            for number, base in enumerate(bases):
                for address in (base, base + self.layout.part_reach(number) - 1):
                    found = runtime.pointerGetAttributes(address)
                    other = found.type == runtime.memoryTypeDevice and found.device != self.device
                    if found.type == runtime.memoryTypeUnregistered or other:
                        where = f"device {found.device}" if other else "no device"
                        raise InvalidArgument(
                            f"layer {layer}, part {number}: address {address:#x} is memory of {where}, "
                            f"not of device {self.device}"
                        )


@cache
def load_kernels(device: int) -> tuple[int, dict[str, Any]]:
    """Compiles them for the device, which is the current one; answers the entries of their largest argument too."""
    cupy = load_cupy()
    major, minor = cupy.cuda.nvrtc.getVersion()
    large = min(major * 1000 + minor * 10, cupy.cuda.runtime.driverGetVersion()) >= LARGE_ARGUMENTS
    entries_max = LARGE_ENTRIES if large else SMALL_ENTRIES
    options = OPTIONS if large else (*OPTIONS, "-DKVSTORED_SMALL_ARGUMENTS")
    try:
        module = cupy.RawModule(code=SOURCE.read_text(), options=options, backend="nvrtc")
        return entries_max, {name: module.get_function(name) for name in kernel_names(entries_max)}
    except (cupy.cuda.compiler.CompileException, ImportError, OSError) as e:
        raise FailedPrecondition(f"device {device}: the kernels cannot be compiled: {e}") from e
