"""Daemons that several tests share, and what must be as before when a test is over."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_client import Client
from tests.conftest import RunningDaemon

HOLDS = ("granted", "quarantined", "leased", "pinned", "doomed", "blocks")


@contextlib.contextmanager
def running(**settings: str) -> Iterator[RunningDaemon]:
    """A daemon of its own directory, gone afterwards: `running(host__size="16MiB")`."""
    with tempfile.TemporaryDirectory(prefix="kvstored-test-") as directory:
        daemon = RunningDaemon(Path(directory), {key.replace("__", "."): value for key, value in settings.items()})
        try:
            yield daemon
        finally:
            daemon.kill()


def block(name: object, size_bytes: int) -> bytes:
    """Bytes that no other name has, the same in every process, and that do not shrink by compression."""
    seed = int.from_bytes(blake2b(repr(name).encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.PCG64(seed)).bytes(size_bytes)


def totals(stats: dict[str, Any]) -> dict[str, int]:
    """What is held and stored, over all pools."""
    return {name: sum(pool[name] for pool in stats["pools"]) for name in HOLDS}


def descriptors(pid: int) -> int:
    """How many a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, in user and kernel mode (fields 14 and 15 of proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def anonymous_bytes(pid: int) -> int:
    """Private memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


class Watch:
    """What a daemon has, seen by a client that was there before: compared around a test."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.daemon = daemon
        self.client = Client(daemon.endpoint, name="watch")
        self.client.stats()

    def state(self) -> dict[str, Any]:
        """Holds, blocks, sessions, segments, descriptors and health."""
        stats = self.client.stats()
        return {
            "totals": totals(stats),
            "sessions": [session["id"] for session in stats["sessions"]],
            "segments": stats["host"]["segments"],
            "draining": stats["host"]["draining_bytes"],
            "descriptors": descriptors(self.daemon.pid),
            "problems": stats["daemon"]["problems"],
        }
