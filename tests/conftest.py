"""Real daemons for tests: started as a user starts them, in a directory of their own, ended by pid.

Nothing here sleeps: whoever waits, waits for a line of the daemon's log, for a process to
end, or (`eventually`) for a condition with a deadline.
"""

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Client

START_S = 60.0
STOP_S = 60.0
PATIENCE_S = 20.0
"""Added to every wait of `eventually`: that a machine is slow, or stands still, is no fault of what is tested there.
What has to be over in time is measured by itself."""

KVSTORED = Path(sys.executable).parent / "kvstored"

# A shell starts what runs in its background with SIGINT ignored, and so would be whatever we start: they get it again.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """No example of Hypothesis fails since the machine is slow; tests/core/conftest.py says more for its own."""
    if find_spec("hypothesis") is None:
        return  # the environment of the engines
    from hypothesis import HealthCheck, settings  # here: programs that tests start import this module too

    settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("unhurried")


class RunningDaemon:
    """One kvstored process of a test's."""

    def __init__(self, directory: Path, settings: dict[str, str]) -> None:
        self.directory = directory
        self.socket = directory / "kvstored.sock"
        self.endpoint = f"unix://{self.socket}"
        self.settings = {
            "server.socket": str(self.socket),
            "server.state_dir": str(directory / "state"),
            "host.size": "64MiB",
            **settings,
        }
        self.log = ""
        self._start()

    def command(self) -> list[str]:
        """How it is started."""
        arguments = [str(KVSTORED)]
        for key, value in self.settings.items():
            arguments += ["--set", f"{key}={value}"]
        return arguments

    def _start(self) -> None:
        # Output goes to a file so that a daemon that says much never waits for its reader.
        self._log_path = self.directory / "kvstored.log"
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            eventually(lambda: self._ready() or self.process.poll() is not None, START_S, "the daemon to be ready")
        except BaseException:
            self.kill()
            raise
        if self.process.poll() is not None:
            raise AssertionError(f"kvstored ended with {self.process.returncode}:\n{self.output()}")

    def _ready(self) -> bool:
        return "ready: serving" in self.output()

    def output(self) -> str:
        """What this life of the daemon has logged."""
        with self._log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode()

    def says(self, words: str) -> None:
        """Waits until it has logged these words: a thread of its own writes the log, behind what is logged."""
        eventually(lambda: words in self.output(), what=f"{words!r} in the log")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def grpc_endpoint(self) -> str:
        """The gRPC address that it says it serves on."""
        (line,) = [line for line in self.output().splitlines() if "serving gRPC on " in line]
        address = line.rpartition("serving gRPC on ")[2].partition('"')[0]  # which ends it in JSON
        return f"grpc+unix://{address.removeprefix('unix:')}" if address.startswith("unix:") else f"grpc://{address}"

    @property
    def http_url(self) -> str:
        """Where it says it serves HTTP."""
        (line,) = [line for line in self.output().splitlines() if "serving HTTP on " in line]
        address = line.rpartition("serving HTTP on ")[2].partition('"')[0]
        return f"http://{address}"

    def stop(self) -> int:
        """SIGTERM; answers the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(STOP_S)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def restart(self, **settings: str) -> None:
        """Starts it again in the same directory (after stop or kill)."""
        self.settings.update({key.replace("__", "."): value for key, value in settings.items()})
        self._start()


def eventually(condition: Callable[[], Any], timeout_s: float = 10.0, what: str = "the condition") -> Any:
    """The first true answer of `condition`, asked again and again for `timeout_s` and PATIENCE_S."""
    pause = threading.Event()
    until = time.monotonic() + timeout_s + PATIENCE_S
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > until:
            raise AssertionError(f"waited {timeout_s + PATIENCE_S} s for {what}")
        pause.wait(0.005)


def wait_for_line(process: "subprocess.Popen[str]", timeout_s: float = 60.0) -> str:
    """The next line that a child process prints; fails when it ends or says nothing in time."""
    assert process.stdout is not None
    descriptor, line = process.stdout.fileno(), b""
    until = time.monotonic() + timeout_s
    # Byte by byte from the descriptor: a second line that arrives at once stays there for the next call.
    while not line.endswith(b"\n"):
        left = max(until - time.monotonic(), 0)
        readable, _, _ = select.select([descriptor], [], [], left)
        assert readable, f"nothing (more than {line!r}) from process {process.pid} within {timeout_s} s"
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return line.decode().strip()


@pytest.fixture
def start_daemon() -> Iterator[Callable[..., RunningDaemon]]:
    """Starts daemons: `start_daemon(host__size="16MiB", evict__high="0.9")`; all are gone after the test."""
    running: list[RunningDaemon] = []
    with tempfile.TemporaryDirectory(prefix="kvstored-test-") as base:

        def start(**settings: str) -> RunningDaemon:
            directory = Path(base) / str(len(running))
            directory.mkdir(mode=0o700)
            running.append(RunningDaemon(directory, {k.replace("__", "."): v for k, v in settings.items()}))
            return running[-1]

        try:
            yield start
        finally:
            for daemon in running:
                daemon.kill()


@pytest.fixture
def daemon(start_daemon: Callable[..., RunningDaemon]) -> RunningDaemon:
    """A daemon with 64 MiB, and gRPC on a free port."""
    return start_daemon(server__grpc="127.0.0.1:0")


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    """A client of `daemon` by shared memory."""
    with Client(daemon.endpoint, name="test") as client:
        yield client
