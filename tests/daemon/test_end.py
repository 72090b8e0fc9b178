"""How a daemon ends while a thread of it is inside RocksDB, and how it begins on a machine that is slow.

`python test_end.py MISHAP [arguments of kvstored]` is a kvstored with that mishap.
"""

import gc
import os
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from rocksdict import Options, Rdict

from kvstore.cli.daemon import main
from kvstore.errors import StartupError
from tests.conftest import RunningDaemon

SLOW_S = 1.8
"""Longer than an event loop may be late, and the beat it is measured by."""

STRAGGLERS = 3


def straggle() -> None:
    """Threads that are in RocksDB for ever, as those are that nobody waits for any more at the end."""
    database = Rdict(tempfile.mkdtemp(prefix="straggler-", dir=os.environ["SCRATCH"]), Options(raw_mode=True))

    def inside() -> None:
        while True:
            database.flush_wal(True)

    for _ in range(STRAGGLERS):
        threading.Thread(target=inside, daemon=True).start()


def collect_slowly() -> None:
    """The one step of a start that holds up the event loop takes long."""
    collect, pause = gc.collect, threading.Event()

    def slow(generation: int = 2) -> int:
        pause.wait(SLOW_S)
        return collect(generation)

    gc.collect = slow


MISHAPS = {"straggle": straggle, "collect slowly": collect_slowly}


class Unlucky(RunningDaemon):
    """A daemon with a mishap."""

    def __init__(self, directory: Path, mishap: str, settings: dict[str, str]) -> None:
        self.mishap = mishap
        super().__init__(directory, settings)

    def command(self) -> list[str]:
        scratch = f"SCRATCH={self.directory}"
        script = ["env", scratch, sys.executable, "-m", "tests.daemon.test_end", self.mishap]
        return [*script, *super().command()[1:]]


@pytest.mark.parametrize("ssd", [True, False])
def test_a_daemon_that_stops_while_a_thread_is_inside_rocksdb_ends_well(tmp_path: Path, ssd: bool) -> None:
    """Python ends such a thread by unwinding it, and frames of C++ and Rust abort the process for that."""
    path = {"ssd.path": str(tmp_path / "ssd"), "ssd.size": "64MiB", "ssd.free_floor": "1MiB"} if ssd else {}
    daemon = Unlucky(tmp_path, "straggle", {"host.size": "4MiB", **path})
    try:
        assert daemon.stop() == 0
        assert "stopped" in daemon.output().splitlines()[-1]
    finally:
        daemon.kill()


def test_a_start_that_fails_while_a_thread_is_inside_rocksdb_says_why_and_has_its_status(tmp_path: Path) -> None:
    taken = tmp_path / "no socket"
    taken.write_text("of somebody else")
    with pytest.raises(AssertionError, match=f"(?s)ended with {StartupError.exit_status}:.*not a socket"):
        Unlucky(tmp_path, "straggle", {"host.size": "4MiB", "server.socket": str(taken)})


def test_a_start_on_a_machine_that_is_slow_is_no_reason_to_give_up(tmp_path: Path) -> None:
    """The event loop does not turn while the daemon starts: that is not the lateness that clients would meet."""
    daemon = Unlucky(tmp_path, "collect slowly", {"host.size": "4MiB"})
    try:
        assert daemon.stop() == 0
    finally:
        daemon.kill()


if __name__ == "__main__":
    mishap = MISHAPS[sys.argv[1]]
    del sys.argv[1]
    mishap()
    main(prog_name="kvstored")
