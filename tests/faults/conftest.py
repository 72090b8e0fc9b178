"""Client processes for tests of what happens when they end badly."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import RunningDaemon, wait_for_line
from tests.nodes import running

CHECKOUT = Path(__file__).parents[2]


class Program:
    """A Python program in a process of its own; what it writes to stderr is kept."""

    def __init__(self, text: str, arguments: list[str], errors: Path) -> None:
        self._errors = errors
        with errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "always", "-c", text, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=CHECKOUT,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, timeout_s: float = 90.0) -> str:
        """The next line that it prints."""
        said = wait_for_line(self.process, timeout_s)
        assert said or self.process.poll() is None, f"it ended with {self.process.wait(10)}:\n{self.errors}"
        return said

    def tell(self, line: str) -> None:
        """A line for it to read."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(60)

    def finish(self, timeout_s: float = 90.0) -> int:
        """Closes its stdin and waits for its end; answers the exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout_s)

    @property
    def errors(self) -> str:
        """What it has written to stderr."""
        return self._errors.read_text()


@pytest.fixture
def start_program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts client programs: `start_program(text, endpoint, 7)`; all are gone after the test."""
    started: list[Program] = []

    def start(text: str, *arguments: object) -> Program:
        errors = tmp_path / f"stderr-{len(started)}"
        started.append(Program(text, [str(argument) for argument in arguments], errors))
        return started[-1]

    yield start
    for program in started:
        program.kill()
        for stream in (program.process.stdin, program.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    """One daemon of 64 MiB for all tests of a file."""
    with running() as daemon:
        yield daemon
