"""The device under test, and how the time of what it does is taken: by its own events, or by the clock on HostDevice.

On HostDevice everything runs and no figure means anything: it is there so that the check itself is tested.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import kvstore_client.devices
from kvstored_cuda.devices import Device, Stream
from kvstored_cuda.devices.discovery import device_of, devices

WAIT_S = 30.0
"""For anything enqueued here."""

WARM = 5


@dataclass
class Rig:
    """One device of this process and a stream of its own."""

    uuid: str
    device: Device
    stream: Stream
    real: bool
    """A GPU, no HostDevice."""
    name: str = ""

    def seconds(self, enqueue: Callable[[int], object], rounds: int) -> list[float]:
        """What the device takes for what `enqueue(round)` puts on the stream, round by round, after some to warm up."""
        found = []
        for number in range(WARM + rounds):
            took = self._on_gpu(enqueue, number) if self.real else self._on_host(enqueue, number)
            if number >= WARM:
                found.append(took)
        return found

    def _on_gpu(self, enqueue: Callable[[int], object], number: int) -> float:
        import cupy

        on = cupy.cuda.ExternalStream(self.stream.pointer)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(on)
        enqueue(number)
        end.record(on)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3

    def _on_host(self, enqueue: Callable[[int], object], number: int) -> float:
        began = time.perf_counter()
        enqueue(number)
        self.stream.synchronize(WAIT_S)
        return time.perf_counter() - began

    def in_turn(self, arms: dict[str, Callable[[int], object]], rounds: int, parts: int = 5) -> dict[str, list[float]]:
        """Medians of each arm, one for each part of the run: the arms take turns, so that drift meets all of them."""
        medians: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(parts):
            for name, arm in arms.items():
                medians[name].append(statistics.median(self.seconds(arm, max(rounds // parts, 2))))
        return medians

    def close(self) -> None:
        gc.collect()
        self.stream.synchronize(WAIT_S)
        self.stream.close()


def open_rig(uuid: str = "") -> Rig:
    """The first device there is, or the one named. Raises NoDevice."""
    there = devices()
    found = next((one for one in there.found if not uuid or one.uuid == uuid), None)
    name = found.uuid if found is not None else uuid or "any"
    device = device_of(name)
    assert found is not None
    real = found.ordinal >= 0
    if real:
        import cupy

        cupy.cuda.Device(found.ordinal).use()
    kvstore_client.devices.use(device)
    return Rig(device.uuid, device, device.stream(), real, found.name)
