"""What systemd does with descriptors that a service asks it to keep, in a few lines.

It takes them from FDSTORE=1 messages by name, drops them by FDSTOREREMOVE=1, and hands all of them to the next
process of the service from descriptor 3 on, with LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES.
"""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from tests.conftest import START_S, RunningDaemon, eventually

LAUNCH = """
import fcntl, os, sys
count = int(sys.argv[1])
passed = list(map(int, sys.argv[2 : 2 + count]))
away = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10_000) for fd in passed]
for fd in passed:
    os.close(fd)
for to, fd in enumerate(away, 3):
    os.dup2(fd, to)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(count))
os.execv(sys.argv[2 + count], sys.argv[2 + count :])
"""


class DescriptorStore:
    """Listens on a notification socket until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: dict[str, int] = {}
        self.told: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._listen, name="fdstore")
        self._thread.start()

    def _listen(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 253)
            said = dict(line.partition("=")[::2] for line in data.decode().splitlines())
            if "END" in said:
                return
            name = said.get("FDNAME", "stored")
            if "FDSTORE" in said:
                (self.kept[name],) = descriptors
            elif "FDSTOREREMOVE" in said:
                descriptor = self.kept.pop(name, -1)
                if descriptor >= 0:
                    os.close(descriptor)
            else:
                self.told.append(data.decode())

    def settled(self) -> None:
        """Until it has read all that was sent until now."""
        before = len(self.told)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"STATUS=are you there?", str(self.path))
        eventually(lambda: len(self.told) > before, 10, "the messages to be read")

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"END=1", str(self.path))
        self._thread.join(60)
        self._socket.close()
        for descriptor in self.kept.values():
            os.close(descriptor)
        self.kept.clear()


class Service(RunningDaemon):
    """A daemon whose descriptors somebody keeps."""

    def __init__(self, directory: Path, store: DescriptorStore, settings: dict[str, str]) -> None:
        self.store = store
        super().__init__(directory, settings)

    def _start(self) -> None:
        self.begin()
        try:
            eventually(lambda: self._ready() or self.process.poll() is not None, START_S, "the daemon to be ready")
        except BaseException:
            self.kill()
            raise
        if self.process.poll() is not None:
            raise AssertionError(f"kvstored ended with {self.process.returncode}:\n{self.output()}")

    def begin(self) -> None:
        """Starts it, and waits for nothing."""
        kept = dict(self.store.kept)
        launch = [sys.executable, "-c", LAUNCH, str(len(kept)), *map(str, kept.values()), *self.command()]
        environment = {**os.environ, "NOTIFY_SOCKET": str(self.store.path), "LISTEN_FDNAMES": ":".join(kept)}
        self._log_path = self.directory / "kvstored.log"
        with self._log_path.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                launch,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=tuple(kept.values()),
            )

    def ready(self) -> bool:
        return self._ready()
