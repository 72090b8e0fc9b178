"""A kvstored whose disk answers when a test lets it: `python gated_disk.py GATES PATCHES [arguments of kvstored]`.

GATES is a directory with a file `read` and a file `write`: the daemon takes a shared flock on
it ahead of each such call, so a test that has it exclusively stops them (`Gates`). PATCHES is
JSON: names of kvstore.server.tickets or kvstore.core.movement and their values, for limits that a test cannot keep to.
"""

import contextlib
import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.cli.daemon import main
from kvstore.core import movement
from kvstore.server import tickets
from kvstore.tiers.ssd.files import FileLayer
from tests.conftest import RunningDaemon, eventually

READ, WRITE = "read", "write"

SILENT_S = 60.0
"""A gate that is closed for long, as it is where the machine is slow, is to be no silent disk."""


def gate_calls(gates: Path) -> None:
    """Calls of the file layer wait at their gates, with the GIL released, as a call that waits for a disk does."""
    for name in (READ, WRITE):
        setattr(FileLayer, name, _waiting(gates / name, getattr(FileLayer, name)))


def _waiting(gate: Path, call: Callable[..., int]) -> Callable[..., int]:
    def waiting(layer: FileLayer, descriptor: int, view: memoryview, offset: int) -> int:
        held = os.open(gate, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_SH)
        finally:
            os.close(held)
        return call(layer, descriptor, view, offset)

    return waiting


class GatedDaemon(RunningDaemon):
    """A daemon with gates."""

    def __init__(self, directory: Path, settings: dict[str, str], patches: dict[str, float] | None = None) -> None:
        self.gates = directory / "gates"
        self.gates.mkdir()
        for name in (READ, WRITE):
            (self.gates / name).touch()
        self.patches = {"SILENT_S": SILENT_S, **(patches or {})}
        super().__init__(directory, {"ssd.path": str(directory / "ssd"), **settings})

    def command(self) -> list[str]:
        script = [sys.executable, "-m", "tests.server.gated_disk", str(self.gates), json.dumps(self.patches)]
        return [*script, *super().command()[1:]]

    def opened(self) -> None:
        """Waits until all that is on the SSD is known."""
        eventually(lambda: "the SSD tier is open" in self.output(), what="the SSD to be open")

    @contextlib.contextmanager
    def closed(self, name: str) -> Iterator[None]:
        """Within this no such call of the disk gets anywhere."""
        gate = os.open(self.gates / name, os.O_RDWR)
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)
            yield
        finally:
            os.close(gate)


@contextlib.contextmanager
def gated(patches: dict[str, float] | None = None, **settings: str) -> Iterator[GatedDaemon]:
    """A daemon with gates and little memory, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvstored-test-") as directory:
        found = {"host.size": "4MiB", "ssd.size": "64MiB", "ssd.free_floor": "1MiB"}
        found.update((key.replace("__", "."), value) for key, value in settings.items())
        daemon = GatedDaemon(Path(directory), found, patches)
        try:
            daemon.opened()
            yield daemon
        finally:
            daemon.kill()


if __name__ == "__main__":
    gates, patched = Path(sys.argv[1]), json.loads(sys.argv[2])
    del sys.argv[1:3]
    for known, value in patched.items():
        (module,) = [module for module in (tickets, movement) if hasattr(module, known)]
        setattr(module, known, value)
    gate_calls(gates)
    main(prog_name="kvstored")
