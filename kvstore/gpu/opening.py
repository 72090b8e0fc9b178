"""Which devices there are for the daemon, or why there are none.

`devices_of` is the one place where devices come from: at the start, and again when one was lost.
A test puts its own in its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstored_cuda.devices import Device
from kvstored_cuda.devices.discovery import device_of, devices
from kvstored_cuda.devices.errors import DeviceError

ALL = ("all",)
"""`gpu.devices` where none is named."""


@dataclass(frozen=True)
class Opened:
    """What could be opened; `missing` says of each of the others why it was not."""

    devices: tuple[Device, ...]
    missing: tuple[str, ...]


def devices_of(wanted: Sequence[str]) -> Opened:
    """Opens devices by their UUIDs, or ALL of them. Enters the driver: it may take seconds, or hang."""
    there = devices()
    names = [one.uuid for one in there.found] if tuple(wanted) == ALL else list(wanted)
    if there.why or not names:
        return Opened((), (there.why or "there is no device",))
    opened: list[Device] = []
    missing: list[str] = []
    for uuid in names:
        try:
            device = device_of(uuid)
            device.memory()  # its context is made here, in a call that has a deadline
        except DeviceError as e:
            missing.append(str(e))
        else:
            opened.append(device)
    return Opened(tuple(opened), tuple(missing))
