"""Client processes under a test's control, and what the daemon says of them."""

import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_client import Client, Namespace
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block

CHECKOUT = Path(__file__).resolve().parents[2]

PREAMBLE = """
import os, sys
import numpy as np
from kvstore_client import Client, FailedPrecondition, KVStoreError, ResourceExhausted, Unavailable
from kvstored.v1 import kvstore_pb2 as pb
from tests.nodes import block
from tests.wire import Wire

def say(*words):
    print(*words, flush=True)

def hear():
    line = sys.stdin.readline()
    assert line, "the test is gone"
    return line.strip()
"""


RAW = """
from kvstored.mapping import Mapping
from kvstored.v1 import PROTOCOL
from pathlib import Path
wire = Wire(Path(sys.argv[1]), hello=False)
hello = wire.call(hello=pb.HelloRequest(protocol=PROTOCOL, client="raw")).hello
digest = bytes.fromhex(sys.argv[2])
opened = wire.call(open_namespace=pb.OpenNamespaceRequest(digest=digest, block_bytes=16 << 10, label="raw"))
number = opened.open_namespace.namespace_id
slots = list(wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=4)).reserve.slots)
reply = wire.call(segments=pb.SegmentsRequest(ids=sorted({slot >> 32 for slot in slots}))).segments
mapped = {s.id: Mapping(fd, s.size_bytes, writable=True) for s, fd in zip(reply.segments, wire.descriptors)}
places = [mapped[slot >> 32].view((slot & 0xFFFFFFFF) * (16 << 10), 16 << 10) for slot in slots]
keys = [bytes.fromhex(key) for key in sys.argv[3:]]
leased = list(wire.call(acquire=pb.AcquireRequest(namespace_id=number, keys=keys)).acquire.slots) if keys else []
say(hello.nonce, *slots, *leased)
"""
"""A client that speaks for itself: 4 slots of 16 KiB reserved and mapped as `places`, and the given keys leased."""


class Program:
    """A Python program of a test's: it says and hears lines, can be stopped, and is gone with the test."""

    def __init__(self, text: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + text, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what lies in a buffer of ours is nothing that select could tell
            cwd=CHECKOUT,
        )
        self._said = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self, timeout_s: float = 90.0) -> str:
        """The next line it says; fails where it ends or says nothing in time."""
        assert self.process.stdout is not None
        until = time.monotonic() + timeout_s
        while b"\n" not in self._said:
            readable, _, _ = select.select([self.process.stdout], [], [], max(until - time.monotonic(), 0))
            assert readable, f"nothing from process {self.pid} within {timeout_s} s"
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            assert more, f"it ended with {self.process.wait(10)} and said nothing"
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    def ask(self, line: str, timeout_s: float = 90.0) -> str:
        self.say(line)
        return self.hear(timeout_s)

    def stop(self) -> None:
        """SIGSTOP, and waits until it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def finish(self, timeout_s: float = 90.0) -> int:
        """Waits for its own end; the exit status."""
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, unless it has ended, and waits until it is gone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def pool(client: Client, block_bytes: int) -> dict[str, int]:
    """What the daemon says of the slots of one block size; of one without memory it says nothing, which is all 0."""
    pools: list[dict[str, Any]] = client.stats()["pools"]
    return next((p for p in pools if p["block_bytes"] == block_bytes), Counter())


def session(client: Client, name: str) -> dict[str, Any] | None:
    """What the daemon says of the session of that name; None where there is none."""
    found = [s for s in client.stats()["sessions"] if s["client"] == name]
    assert len(found) < 2, f"{len(found)} sessions of {name}"
    return found[0] if found else None


def wait_for_loop(client: Client, name: str, runs: int) -> None:
    """Until a background loop of the daemon has run so often from now."""

    def done() -> int:
        return next(int(loop["runs"]) for loop in client.stats()["loops"] if loop["name"] == name)

    before = done()
    eventually(lambda: done() >= before + runs, 30, f"{runs} runs of the loop {name}")


def names(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix} {i}".encode() for i in range(count)]


def store(ns: Namespace, what: Sequence[bytes]) -> list[bytes]:
    """Puts blocks of their own, each a root; their keys. A block's bytes follow from its key (tests.nodes.block)."""
    keys = [ns.key(name) for name in what]
    for key in keys:
        ns.put([key], block(key, ns.block_bytes))
    return keys


def fill(client: Client, ns: Namespace, prefix: str) -> list[bytes]:
    """Stores blocks until twice as many as the memory holds were evicted for them; their keys."""
    keys: list[bytes] = []
    slots = client.stats()["host"]["size_bytes"] // ns.block_bytes
    evicted = client.stats()["counters"]["evicted"] + 2 * slots
    while client.stats()["counters"]["evicted"] < evicted:
        keys += store(ns, names(f"{prefix} {len(keys)}", 256))
    return keys


def exact(ns: Namespace, keys: Sequence[bytes]) -> int:
    """How many of these blocks are present; fails where any byte of one of them is wrong."""
    out = np.empty(ns.block_bytes, np.uint8)
    present = 0
    for key in keys:
        if ns.get_into([key], out):
            present += 1
            assert out.tobytes() == block(key, ns.block_bytes), f"wrong bytes under {key.hex()[:12]}"
    return present


def held(client: Client, block_bytes: int) -> dict[str, int]:
    """What is held of the slots of one block size, kind by kind."""
    found = pool(client, block_bytes)
    return {kind: found[kind] for kind in ("granted", "quarantined", "leased") if found[kind]}


def sessions(client: Client, name: str) -> list[dict[str, Any]]:
    """All sessions of that name."""
    return [s for s in client.stats()["sessions"] if s["client"] == name]


def start_raw(
    start: Callable[..., Program], daemon: RunningDaemon, text: str, ns: Namespace, keys: list[bytes]
) -> tuple[Program, Any]:
    """A client that speaks for itself, with 4 slots to write to and leases on these blocks: its nonce and slots."""
    program = start(text, daemon.socket, ns.digest.hex(), *[key.hex() for key in keys])
    nonce, *slots = map(int, program.hear().split())
    return program, (nonce, slots[:4], slots[4:])
