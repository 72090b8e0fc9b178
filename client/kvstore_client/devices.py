"""The devices of this process by their UUID, and where its native calls run.

Devices are named as nvidia-smi names them (`GPU-...`), since ordinals change with CUDA_VISIBLE_DEVICES. `find`
gives the one that `use` has registered, else the GPU of that name. Native calls may block in a driver: each
runs in `isolated()`, with a deadline, so that one that hangs costs its caller that deadline and nobody else anything.

Importing this module touches no driver and imports neither cupy nor torch.
"""

import os
import threading

from kvstored.v1.errors import FailedPrecondition, InvalidArgument
from kvstored_cuda.devices.device import Device
from kvstored_cuda.devices.discovery import device_of, devices
from kvstored_cuda.devices.errors import DeviceError
from kvstored_cuda.devices.handles import Generation
from kvstored_cuda.devices.isolated import Isolated

SCHEME = "gpu:"

FIND_S = 30.0
"""For the driver to say what there is, and cupy to be imported: seconds on a cold machine."""

_lock = threading.Lock()
_devices: dict[str, Device] = {}
_isolated = Isolated()


def isolated() -> Isolated:
    """Where this process's native calls run, those of all its clients."""
    return _isolated


def _forked() -> None:
    """In the child: the parent's lock may be held, and its calls be counted, by threads that are not there."""
    global _lock, _isolated
    _lock, _isolated = threading.Lock(), Isolated()


os.register_at_fork(after_in_child=_forked)


def use(device: Device) -> None:
    """Makes this the device of its UUID in this process, instead of the GPU of that name."""
    with _lock:
        _devices[device.uuid] = device


def uuid_of(to: str) -> str:
    """The device that "gpu:UUID" names. Raises InvalidArgument for what does not say that."""
    uuid = to.removeprefix(SCHEME) if isinstance(to, str) and to.startswith(SCHEME) else ""
    if not uuid or not uuid.isascii() or not uuid.isprintable() or len(uuid) > 64:
        raise InvalidArgument(f"{to!r} names no device; write gpu:UUID, the UUID as nvidia-smi -L prints it")
    return uuid


def find(uuid: str) -> Device:
    """The device of that UUID. Enters the driver at first use.

    Raises NoDevice (a FailedPrecondition), which names those that are there or says why there are none;
    FailedPrecondition for one that was opened before a fork; DeadlineExceeded where the driver does not answer.
    """
    device = _devices.get(uuid)
    if device is None:
        try:
            found = _isolated.run("finding a device", lambda: device_of(uuid), timeout_s=FIND_S, owner=uuid)
        except DeviceError as e:
            raise explained(e) from e
        with _lock:
            device = _devices.setdefault(uuid, found)
    if device.generation != Generation.mine():
        raise FailedPrecondition(f"device {uuid} was opened before a fork: a child cannot use it; spawn processes")
    return device


def of_ordinal(ordinal: int) -> str:
    """The UUID of the GPU that this process numbers so. Raises InvalidArgument, saying which there are."""
    there = _isolated.run("finding devices", devices, timeout_s=FIND_S, owner="devices")
    for one in there.found:
        if one.ordinal == ordinal:
            return one.uuid
    names = ", ".join(f"{one.ordinal}: {one.uuid}" for one in there.found)
    raise InvalidArgument(f"no device {ordinal} in this process: {there.why or f'there are {names}'}")


def explained(error: DeviceError) -> DeviceError:
    """The same error, saying what to do now."""
    return error if error.remedy in str(error) else type(error)(f"{error}; {error.remedy}")
