"""A kvstored of the benchmark's own, in a directory of its own, ended by pid."""

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

START_S = 120.0


class Node:
    """Runs `kvstored` with settings for the length of a `with` block."""

    def __init__(self, *, grpc: bool = False, **settings: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvstored-bench-")
        base = Path(self._directory.name)
        self.endpoint = f"unix://{base}/kvstored.sock"
        self.grpc_endpoint = f"grpc+unix://{base}/grpc.sock"
        """Where `grpc` was asked for."""
        self._log = base / "kvstored.log"
        arguments = [str(Path(sys.executable).parent / "kvstored")]
        given = {"server.socket": f"{base}/kvstored.sock", "server.state_dir": f"{base}/state"}
        if grpc:
            given["server.grpc"] = f"unix:{base}/grpc.sock"
        given |= {key.replace("__", "."): value for key, value in settings.items()}
        for key, value in given.items():
            arguments += ["--set", f"{key}={value}"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(arguments, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        until = time.monotonic() + START_S
        pause = threading.Event()
        while "ready: serving" not in self.said():
            if self.process.poll() is not None or time.monotonic() > until:
                self.close()
                raise SystemExit(f"kvstored did not start:\n{self.said()}")
            pause.wait(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._directory.cleanup()

    def said(self) -> str:
        """Its log so far."""
        return self._log.read_text()

    def close(self) -> None:
        """SIGTERM, then SIGKILL after ten seconds."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
