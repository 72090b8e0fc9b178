"""Blocks held on a device, in a caller's hands: as addresses, tensors, or whatever takes DLPack. Without a copy.

What is made from a lease keeps its blocks until it is gone itself, as with a Lease of memory. But a kernel refers to
nothing, so a lease does not end with the last object: it ends behind what is then enqueued on
  - the default stream (and with it, as CUDA has it, all streams that are not made non-blocking)
  - streams that were named, by `used_on` or `release(stream)`, also when a tensor that outlives the lease is used there
  - on a GPU, the streams of torch and cupy that were current when the lease was acquired, asked for a block and
    released, and when the last object went, each on the thread where that was
Kernels on any other stream are not waited for: name it. Blocks are not to be written to.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvstore_client.holdings import DeviceHold
from kvstore_client.marks import Uses
from kvstore_client.reads import GPU
from kvstored.v1.errors import FailedPrecondition, InvalidArgument
from kvstored_cuda.devices.device import Device
from kvstored_cuda.devices.errors import NoDevice

DLPACK_CPU, DLPACK_CUDA = 1, 2
"""DLDeviceType of dlpack.h: kDLCPU, kDLCUDA."""


class DeviceBlock:
    """One block as bytes on a device: follows the protocols of DLPack and of CUDA's arrays (a HostDevice's: numpy's).

    It, and whatever is made from it, keeps the block.
    """

    def __init__(self, address: int, size_bytes: int, ordinal: int | None, hold: object) -> None:
        """`ordinal`: of the GPU in this process; None for memory of the host."""
        self._hold = hold
        self._ordinal = ordinal
        interface = {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}
        if ordinal is None:
            self.__array_interface__ = interface
        else:
            self.__cuda_array_interface__ = interface
        self.address, self.size_bytes = address, size_bytes

    def __dlpack_device__(self) -> tuple[int, int]:
        return (DLPACK_CPU, 0) if self._ordinal is None else (DLPACK_CUDA, self._ordinal)

    def __dlpack__(self, *, stream: Any = None, **asked: Any) -> Any:
        """The capsule; what is in the block was there when it was acquired, so no stream has to wait."""
        array = self.array()
        return array.__dlpack__(stream=stream, **asked) if self._ordinal is not None else array.__dlpack__(**asked)

    def array(self) -> Any:
        """An array of cupy on a GPU, else of numpy."""
        if self._ordinal is None:
            return np.asarray(self)
        try:
            import cupy
        except ImportError as e:
            raise NoDevice(f"arrays on a GPU need cupy (pip install kvstored[cuda13], or [cuda12]): {e}") from e
        memory = cupy.cuda.UnownedMemory(self.address, self.size_bytes, self, self._ordinal)
        return cupy.ndarray((self.size_bytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))


class DeviceLease:
    """Leading blocks, held on a device until released."""

    tier = GPU

    def __init__(
        self,
        addresses: Sequence[int],
        block_bytes: int,
        holds: list[DeviceHold],
        device: Device | None,
        uses: Uses | None,
    ) -> None:
        """`uses`: the streams behind which the holds end; None where nothing is held."""
        self._addresses = list(addresses)
        self._block_bytes = block_bytes
        self._holds: list[DeviceHold] | None = holds
        self._device = device
        self._uses = uses
        self._name_current()

    def __len__(self) -> int:
        """How many blocks are held."""
        return len(self._addresses)

    @property
    def addresses(self) -> list[int]:
        """Where each block begins in this process's view of the device; not to be used after `release`."""
        self._held()
        return list(self._addresses)

    def dlpack(self, i: int) -> DeviceBlock:
        """Block `i` for torch.from_dlpack, cupy.from_dlpack and the like (numpy's, on a HostDevice), as uint8."""
        holds = self._held()
        self._name_current()
        if not isinstance(i, int) or not 0 <= i < len(self._addresses):
            raise InvalidArgument(f"block {i!r} is not one of the {len(self._addresses)} that are held")
        return DeviceBlock(self._addresses[i], self._block_bytes, getattr(self._device, "ordinal", None), tuple(holds))

    def torch(self, i: int, dtype: Any = None) -> Any:
        """Block `i` as a tensor on the device, of `dtype` (default uint8), one dimension. Not to be written to."""
        import torch

        tensor = torch.from_dlpack(self.dlpack(i))
        return tensor if dtype is None else tensor.view(dtype)

    def used_on(self, stream: Any) -> None:
        """Kernels on `stream` (torch's, cupy's, or its address) use the blocks, now or later: they are waited for.

        An address must be that of a stream that lives as long as anything made from the lease. Raises InvalidArgument
        for cudaStreamPerThread (2), which is another stream on each thread.
        """
        if self._uses is not None:
            self._uses.name(stream)

    def release(self, stream: Any = None) -> None:
        """Lets go. What was made from the lease keeps its blocks until it is gone itself.

        `stream`: as `used_on`. Without one kernels are waited for on the streams that this module names, no others.
        """
        if stream is not None:
            self.used_on(stream)
        self._name_current()
        self._holds = None

    def _name_current(self) -> None:
        if self._uses is not None:
            self._uses.name_current()

    def _held(self) -> list[DeviceHold]:
        if self._holds is None:
            raise FailedPrecondition("the lease was released")
        return self._holds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
