"""Devices with memory: one interface (`device.Device`), CUDA's (`cuda_device`) and the host's (`host_device`).

Nothing here imports cupy or touches a driver before a device is asked for.
"""

from kvstored_cuda.devices.device import (
    Allocation,
    Device,
    DeviceMemory,
    DeviceUse,
    Direction,
    Event,
    Mapping,
    Stream,
)
from kvstored_cuda.devices.handles import GENERATION_BYTES, HANDLE_BYTES, Generation, Handle, HandleKind, Thing

__all__ = [
    "GENERATION_BYTES",
    "HANDLE_BYTES",
    "Allocation",
    "Device",
    "DeviceMemory",
    "DeviceUse",
    "Direction",
    "Event",
    "Generation",
    "Handle",
    "HandleKind",
    "Mapping",
    "Stream",
    "Thing",
]
