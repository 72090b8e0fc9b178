"""The peers' processes: started with a log, asked where they listen, ended by pid.

All of it happens in a network namespace of this run's own, where the system allows one:
some peers listen on every address though told one. Where it does not, such a peer is ended
at once and counts as missing.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
"""From sched.h, sockios.h and net/if.h."""

LISTEN = "0A"
STOP_S = 10.0


class Missing(Exception):
    """A peer cannot take part; the message says why."""


def own_network() -> bool:
    """Moves this process to a network of its own with a loopback device; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNET) != 0:
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        ask = struct.pack("16sh22x", b"lo", 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(probe, SIOCGIFFLAGS, ask))
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))
    return True


class Servers:
    """The processes of one run, ended in reverse order at its end."""

    def __init__(self, logs: Path, *, contained: bool) -> None:
        """`contained`: this process has a network of its own."""
        self.logs = logs
        self.contained = contained
        self.wide: dict[str, list[str]] = {}
        """Who listens on more than the loopback, and where."""
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, process in reversed(self._running):
            end(name, process)

    def start(
        self,
        name: str,
        command: list[str],
        ready: Callable[[], bool],
        limit_s: float,
        environment: Mapping[str, str] = {},
    ) -> None:
        """Starts one and waits until it is ready. Raises Missing with the end of its log otherwise."""
        log = self.logs / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **environment},
                cwd=self.logs,
                start_new_session=True,
            )
        self._running.append((name, process))
        until, pause = time.monotonic() + limit_s, threading.Event()
        while not ready():
            if ended(process) or time.monotonic() > until:
                why = "ended at once" if ended(process) else f"is not ready after {limit_s:g} s"
                raise Missing(f"{name} {why}: {last_line(log)}")
            pause.wait(0.05)
        self.check_addresses(name, process.pid)

    def check_addresses(self, name: str, pid: int) -> None:
        """Notes addresses that are not of the loopback. Raises Missing where nothing keeps others from them."""
        wide = sorted(address for address in listening(pid) if not address.startswith(("127.", "[::1]")))
        if wide and not self.contained:
            raise Missing(
                f"{name} listens on {', '.join(wide)}, and this machine allows no network namespace to keep it in"
            )
        if wide:
            self.wide[name] = wide


def end(name: str, process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM to the process, and SIGKILL to what is left of its session when it has ended or ten seconds are over.

    The session is one that we made, so nobody else is in it; and as long as its first
    process is not waited for, its number cannot become another's.
    """
    if process.returncode is not None:
        return
    os.kill(process.pid, signal.SIGTERM)
    if not wait_for_end(process, STOP_S):
        print(f"{name} does not end by itself")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ended(process: "subprocess.Popen[bytes]") -> bool:
    """Unlike `poll`, this leaves its number with the process."""
    return process.returncode is not None or (
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    )


def wait_for_end(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    """Whether it has ended within the limit."""
    until, pause = time.monotonic() + limit_s, threading.Event()
    while not ended(process):
        if time.monotonic() > until:
            return False
        pause.wait(0.02)
    return True


def last_line(log: Path) -> str:
    """What a log ends with, for people."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it logged nothing"


def connects(address: str | int) -> Callable[[], bool]:
    """Whether somebody accepts connections: on a Unix socket, or on a port of the loopback."""

    def ready() -> bool:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        with socket.socket(family) as probe:
            return probe.connect_ex(address if isinstance(address, str) else ("127.0.0.1", address)) == 0

    return ready


def logged(log: Path, text: str) -> Callable[[], bool]:
    return lambda: log.exists() and text in log.read_text(errors="replace")


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listening(pid: int) -> set[str]:
    """TCP addresses that a process and what it started listen on."""
    inodes = {link for one in family_of(pid) for link in _descriptors(one) if link.startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                found.add(_address(*fields[1].split(":")))
    return found


def family_of(pid: int) -> list[int]:
    """A process and everything it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [pid, *(one for child in children for one in family_of(int(child)))]


def _descriptors(pid: int) -> list[str]:
    found = []
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(str(entry.readlink()))
    except FileNotFoundError:
        return []
    return found


def _address(host: str, port: str) -> str:
    """As /proc/net spells it: words of 32 bits in the machine's order."""
    raw = b"".join(struct.pack("=I", int(host[i : i + 8], 16)) for i in range(0, len(host), 8))
    if len(raw) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, raw)}:{int(port, 16)}"
    shown = socket.inet_ntop(socket.AF_INET6, raw)
    if shown.startswith("::ffff:"):
        return f"{shown.removeprefix('::ffff:')}:{int(port, 16)}"
    return f"[{shown}]:{int(port, 16)}"
