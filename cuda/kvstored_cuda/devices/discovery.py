"""Which devices there are, or one line why there are none. Importing this never fails, asking creates no context.

KVSTORED_HOST_DEVICES names HostDevices instead (`UUID=bytes`, separated by commas): then no
GPU is looked for. It is for tests and for trying the tier without a GPU.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvstored_cuda.devices.cuda_driver import Driver
from kvstored_cuda.devices.device import Device
from kvstored_cuda.devices.errors import NO_DRIVER, DeviceError, NoDevice
from kvstored_cuda.devices.faults import FaultPlan
from kvstored_cuda.devices.host_device import HostDevice

VARIABLE = "KVSTORED_HOST_DEVICES"


@dataclass(frozen=True)
class Found:
    """A device that `device_of(uuid)` would give. ordinal: of this process now, -1 for a HostDevice."""

    uuid: str
    name: str
    total_bytes: int
    ordinal: int


@dataclass(frozen=True)
class Devices:
    """`found` may be empty: then `why` says so in one line for stats, else it is empty."""

    found: tuple[Found, ...]
    why: str


def devices(environment: Mapping[str, str] = os.environ) -> Devices:
    """What is there. Enters the driver (`Isolated`: it may take seconds), raises ValueError for a wrong VARIABLE."""
    named = environment.get(VARIABLE, "")
    if named:
        return Devices(tuple(_host_device(part.strip()) for part in named.split(",") if part.strip()), "")
    if importlib.util.find_spec("cupy") is None:
        return Devices((), "cupy is not installed (pip install kvstored[cuda13], or [cuda12])")
    return _gpus()


def _host_device(part: str) -> Found:
    uuid, _, size = part.partition("=")
    if not uuid or not size.isascii() or not size.isdigit():
        raise ValueError(f"{VARIABLE}: {part!r}; expected UUID=bytes, separated by commas")
    return Found(uuid, "host memory", int(size), -1)


def _gpus() -> Devices:
    """The driver is asked first: without one, cupy is not imported (it takes a second, and memory)."""
    try:
        named = [Found(one.uuid, one.name, one.total_bytes, one.ordinal) for one in Driver.load().devices()]
    except OSError as e:
        return Devices((), f"no driver: {e}")
    except DeviceError as e:
        return Devices((), f"no device: {e}")
    why = _why_not_cupy() if named else "no device: the driver names none"
    return Devices((), why) if why else Devices(tuple(named), "")


def _why_not_cupy() -> str:
    """Empty where cupy gets on with the driver."""
    try:
        from cupy.cuda import runtime
    except Exception as e:  # noqa: BLE001  a broken installation raises what it likes; the tier is off then, and says why
        return f"cupy cannot be imported: {str(e).splitlines()[0] if str(e) else type(e).__name__}"
    try:
        runtime.getDeviceCount()
    except runtime.CUDARuntimeError as e:
        return f"{'no driver that fits cupy' if e.status in NO_DRIVER else 'no device'}: {e}"
    return ""


def device_of(uuid: str, environment: Mapping[str, str] = os.environ) -> Device:
    """The device of that name. Raises NoDevice, naming those that are there or why there are none."""
    there = devices(environment)
    for one in there.found:
        if one.uuid == uuid:
            if one.ordinal < 0:
                return HostDevice(uuid, one.total_bytes, FaultPlan.from_environment(environment))
            from kvstored_cuda.devices.cuda_device import CudaDevice

            return CudaDevice(one.ordinal)
    names = ", ".join(one.uuid for one in there.found)
    raise NoDevice(f"no device {uuid}: {there.why or f'there are {names}'}")
