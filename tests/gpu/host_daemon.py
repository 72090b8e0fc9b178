"""A kvstored whose devices are HostDevices: `python -m tests.gpu.host_daemon DEVICES LIMITS [arguments of kvstored]`.

DEVICES is a file of JSON that is read anew whenever it changes, one object for each device:

    {"uuid": "HOST-1", "size_bytes": 67108864}           a device of 64 MiB
    "memlock_bytes": 0                                   so much may be page-locked; left out: no limit
    "driver": 2                                          handles of the default one, 1, are refused
    "faults": "transfer:delay=60; trusting"              as kvstored_cuda/devices/faults.py reads them, in force from
                                                         now on in place of what was; delays under way end
    "lost": "an Xid"                                     the device is gone for the daemon; take it out again, and
                                                         one with the same name can be opened
    "away": true                                         there is no such device for who looks for one
    "hangs": true                                        nobody who looks for devices gets an answer

Beside it a file DEVICES.seen has the number (inode) of the file that is in force.

LIMITS is JSON: names of limits of the daemon and their values, `{"one_device.PROBE_S": 0.2}`.
"""

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore import daemon
from kvstore.cli.daemon import main
from kvstore.core import gpu_commits, gpu_pool
from kvstore.gpu import copier, device_memory, mover, one_device, opening, pagelocks, watching
from kvstore.gpu.opening import ALL, Opened
from kvstored_cuda.devices.faults import VARIABLE, FaultPlan
from kvstored_cuda.devices.host_device import HostDevice

LOOK_S = 0.01

MODULES = {
    "daemon": daemon,
    "gpu_commits": gpu_commits,
    "gpu_pool": gpu_pool,
    "copier": copier,
    "device_memory": device_memory,
    "mover": mover,
    "one_device": one_device,
    "pagelocks": pagelocks,
    "watching": watching,
}

SHORT = {"one_device.PROBE_S": 0.2, "gpu_pool.RETRY_S": 0.2}
"""Instead of what they are: most tests are not about how soon something is tried again."""


class Plan(FaultPlan):
    """The faults of one device, as the file says them."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        self._now = FaultPlan()

    def follow(self, text: str) -> None:
        if text != self._text:
            before, self._now = self._now, FaultPlan.from_environment({VARIABLE: text})
            self._text, self.trusting = text, self._now.trusting
            before.release()

    def meet(self, call: str) -> None:
        self._now.meet(call)


class HostDevices:
    """In place of `opening.devices_of`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._said: list[dict[str, Any]] = []
        self._plans: dict[str, Plan] = {}
        self._open: dict[str, HostDevice] = {}
        self._stamp = (0, 0)
        self._pause = threading.Event()
        self._lock = threading.Lock()
        self._look()
        threading.Thread(target=self._follow, name="host-devices", daemon=True).start()

    def _follow(self) -> None:
        while True:
            self._pause.wait(LOOK_S)
            self._look()

    def _look(self) -> None:
        """What the file says is in force when this returns."""
        with self._lock:
            found = self._path.stat()
            if (found.st_ino, found.st_mtime_ns) == self._stamp:
                return
            self._said = json.loads(self._path.read_text())
            self._stamp = (found.st_ino, found.st_mtime_ns)
            for said in self._said:
                self._plans.setdefault(said["uuid"], Plan()).follow(said.get("faults", ""))
                device = self._open.get(said["uuid"])
                if said.get("lost") and device is not None:
                    device.lose(said["lost"])
            self._path.with_suffix(".seen").write_text(str(found.st_ino))

    def __call__(self, wanted: Sequence[str]) -> Opened:
        self._look()
        while any(said.get("hangs") for said in self._said):
            self._pause.wait(LOOK_S)
        there = {said["uuid"]: said for said in self._said if not said.get("away")}
        names = list(there) if tuple(wanted) == ALL else list(wanted)
        missing = [f"no device {uuid}: there are {', '.join(there) or 'none'}" for uuid in names if uuid not in there]
        if not there:
            missing = ["no device: a test has none"]
        return Opened(tuple(self._device(there[uuid]) for uuid in names if uuid in there), tuple(missing))

    def _device(self, said: dict[str, Any]) -> HostDevice:
        settings = {name: said[name] for name in ("memlock_bytes", "driver") if name in said}
        made = HostDevice(said["uuid"], said["size_bytes"], self._plans[said["uuid"]], **settings)
        self._open[said["uuid"]] = made
        if said.get("lost"):
            made.lose(said["lost"])
        return made


if __name__ == "__main__":
    devices, limits = HostDevices(Path(sys.argv.pop(1))), json.loads(sys.argv.pop(1))
    for name, value in {**SHORT, **limits}.items():
        module, _, limit = name.partition(".")
        assert hasattr(MODULES[module], limit), name
        setattr(MODULES[module], limit, value)
    setattr(opening, "devices_of", devices)  # noqa: B010 (no method of anything: the daemon's one source of devices)
    main(prog_name="kvstored")
