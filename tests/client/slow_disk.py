"""A daemon whose SSD answers when a test lets it: started as a program that stands between it and its files.

The disk hangs, for reads or for writes, while a file of that name is there.
"""

import sys
import threading
from functools import partial
from pathlib import Path

from kvstore.cli.daemon import main
from kvstore.core import movement
from kvstore.moving import mover
from kvstore.tiers.ssd.directory import SsdDirectory
from kvstore.tiers.ssd.files import FileLayer
from tests.conftest import RunningDaemon

LOOK_S = 0.002
SILENT_S = 60.0
"""What hangs is the client's to wait for as long as it may: the daemon takes the disk for silent much later."""


class HangingLayer(FileLayer):
    """Files whose reads, or writes, take as long as somebody wants."""

    def __init__(self, switches: Path) -> None:
        self._reads = switches / "reads"
        self._writes = switches / "writes"
        self._never = threading.Event()

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        self._wait(self._reads)
        return super().read(descriptor, view, offset)

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        self._wait(self._writes)
        return super().write(descriptor, view, offset)

    def _wait(self, switch: Path) -> None:
        while switch.exists():
            self._never.wait(LOOK_S)


class SlowDiskDaemon(RunningDaemon):
    """`reads` and `writes` of its disk hang while they are switched on."""

    def __init__(self, directory: Path, settings: dict[str, str]) -> None:
        self.switches = directory / "switches"
        self.switches.mkdir()
        super().__init__(directory, settings)

    def command(self) -> list[str]:
        return [sys.executable, __file__, str(self.switches), *super().command()[1:]]

    def hang(self, what: str) -> None:
        (self.switches / what).touch()

    def go_on(self, what: str) -> None:
        (self.switches / what).unlink(missing_ok=True)


if __name__ == "__main__":
    movement.SILENT_S = SILENT_S
    layer = HangingLayer(Path(sys.argv.pop(1)))
    setattr(mover, "SsdDirectory", partial(SsdDirectory, layer=layer))  # noqa: B010 (no name that it exports)
    main()
