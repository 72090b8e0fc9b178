"""Daemons with devices, for tests: HostDevices in a process of the daemon's own."""

import json
import sys
from pathlib import Path
from typing import Any

from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually

DEVICE_BYTES = 256 << 20
UUIDS = tuple(f"HOST-{number}0000000-0000-0000-0000-000000000000" for number in range(1, 5))


class GpuNode(RunningDaemon):
    """A daemon with HostDevices; `uuids` names them."""

    def __init__(
        self,
        directory: Path,
        settings: dict[str, str],
        devices: list[dict[str, Any]],
        limits: dict[str, float] | None = None,
    ) -> None:
        self._limits = limits or {}
        self._devices = {device["uuid"]: device for device in devices}
        self.uuids = [device["uuid"] for device in devices]
        self._file = directory / "devices"
        self._write()
        super().__init__(directory, {"gpu.size": "16MiB", **settings})

    def command(self) -> list[str]:
        script = [sys.executable, "-m", "tests.gpu.host_daemon", str(self._file), json.dumps(self._limits)]
        return [*script, *super().command()[1:]]

    def _write(self) -> int:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(list(self._devices.values())))
        fresh.rename(self._file)
        return self._file.stat().st_ino

    def _say(self) -> None:
        """Writes it, and waits until it is in force where the daemon runs."""
        written, seen = str(self._write()), self._file.with_suffix(".seen")
        if self.process.poll() is None:
            eventually(lambda: seen.exists() and seen.read_text() == written, what="the devices to do as they are told")

    # -- what the devices do from now on (tests/gpu/host_daemon.py)

    def device(self, uuid: str = "", **said: Any) -> None:
        """Changes what is said of one device, the first by default; None takes a word out."""
        device = self._devices[uuid or self.uuids[0]]
        device.update(said)
        for name in [name for name, value in device.items() if value is None]:
            del device[name]
        self._say()

    def faults(self, rules: str, uuid: str = "") -> None:
        """From now on calls of the device go so, until this is called again; delays under way end."""
        self.device(uuid, faults=rules)

    def lose(self, uuid: str = "", why: str = "an Xid of a test's") -> None:
        """The device is gone; waits until the daemon knows."""
        uuid = uuid or self.uuids[0]
        self.device(uuid, lost=why, away=True)
        eventually(lambda: self.stats_of(uuid)["trouble"], what="the daemon to see that its device is lost")

    def come(self, uuid: str = "") -> None:
        """It can be opened again; waits until it is in use."""
        uuid = uuid or self.uuids[0]
        self.device(uuid, lost=None, away=None)
        eventually(lambda: not self.stats_of(uuid)["trouble"], what="the daemon to use its device again")

    # -- what the daemon says

    def stats(self) -> dict[str, Any]:
        with Client(self.endpoint, name="stats") as client:
            found: dict[str, Any] = client.stats()
        return found

    def stats_of(self, uuid: str = "") -> dict[str, Any]:
        """Its GpuStats."""
        (found,) = [row for row in self.stats()["gpus"] if row["uuid"] == (uuid or self.uuids[0])]
        return dict(found)

    def degraded(self) -> list[str]:
        return list(self.stats()["daemon"]["degraded"])


def host_device(number: int = 0, size_bytes: int = DEVICE_BYTES, **said: Any) -> dict[str, Any]:
    """One device for `start_gpu_node`."""
    return {"uuid": UUIDS[number], "size_bytes": size_bytes, **said}
