"""`kvstore-cli` as a process beside a real daemon, with and without a terminal."""

import logging
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from click.testing import CliRunner, Result

from kvstore.cli.admin import main
from tests.conftest import KVSTORED

CLI = KVSTORED.with_name("kvstore-cli")
WAIT_S = 90.0
NOWHERE = "unix:///nowhere/kvstored.sock"


def environment(**variables: str) -> dict[str, str]:
    """Ours without variables of kvstored's, and a terminal that understands little."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORED_")}
    return {**kept, "TERM": "xterm", "COLUMNS": "120", "LINES": "60", **variables}


def cli(*arguments: object, stdin: str = "", **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs it without a terminal until it ends."""
    return subprocess.run(
        [CLI, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env=environment(**variables),
    )


def within(*arguments: object) -> Result:
    """Runs it within this process, without a terminal, which spares the start of one."""
    sdk = logging.getLogger("kvstore_client")
    level = sdk.level
    try:
        return CliRunner().invoke(main, list(map(str, arguments)), prog_name="kvstore-cli")
    finally:
        sdk.setLevel(level)


def usage(*arguments: object) -> Result:
    """What ends before it looks for a daemon: there is none where it would look."""
    return within("--endpoint", NOWHERE, *arguments)


class Terminal:
    """A command at a terminal of its own: what it shows, and what is typed."""

    def __init__(self, *arguments: object, out: bool = True) -> None:
        """Without `out`, only stdin and stderr are the terminal; stdout is a pipe."""
        ours, theirs = pty.openpty()
        self._descriptor = ours
        self.process = subprocess.Popen(
            [CLI, *map(str, arguments)],
            stdin=theirs,
            stdout=theirs if out else subprocess.PIPE,
            stderr=theirs,
            env=environment(),
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""

    def until(self, text: str) -> str:
        """Reads until `text` is shown; fails where it is not in time. Answers all that was shown."""
        end = time.monotonic() + WAIT_S
        while text not in self.shown:
            readable, _, _ = select.select([self._descriptor], [], [], max(end - time.monotonic(), 0))
            assert readable, f"no {text!r} in {self.shown!r}"
            self.shown += self._read()
        return self.shown

    def _read(self) -> str:
        try:
            data = os.read(self._descriptor, 1 << 16)
        except OSError:  # EIO: the other end is closed
            data = b""
        assert data, f"it ended with {self.process.wait(WAIT_S)} and showed {self.shown!r}"
        return data.decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Waits for its end; the exit status."""
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self.process.stdout is not None:
            self.process.stdout.close()


def in_file(directory: Path, lines: Sequence[str]) -> Path:
    """A file of these lines."""
    path = directory / "keys"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
