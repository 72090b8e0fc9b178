"""A slab of 4 GiB that outlives its daemon: killed and started again, until it is ready and until a client has a hit.

The client is the same all the time and attaches again by itself. The time begins with the exec of
kvstored, so it has the interpreter and its packages in it, which a start of an empty daemon shows.
"""

import re
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.measure import Row
from bench.node import Node
from kvstore_client import Client, Namespace

FOLDER = Path("/dev/shm")
SLAB_BYTES, QUICK_SLAB_BYTES = 4 << 30, 512 << 20
ROOM_BYTES = 512 << 20
"""Left free on the tmpfs at least, besides the slab."""

SIZES = (64 << 10, 2 << 20)
STARTS, QUICK_STARTS = 3, 1
BATCH_BYTES = 16 << 20
CHAIN = 64
"""Blocks of one prefix."""

BAR_S = 1.0
WAIT_S = 60.0
LOOK_S = 0.001
READY = "ready: serving"
ADOPTED = re.compile(r"memory of an earlier daemon adopted.*blocks=(\d+).*seconds=([0-9.]+)")


class Blocks:
    """Blocks that fill the slab, each of which says who it is."""

    def __init__(self, ns: Namespace, slab_bytes: int) -> None:
        self.ns, self.size = ns, ns.block_bytes
        self.keys = [ns.key(b"%d" % n) for n in range(slab_bytes // self.size)]
        self._batch = BATCH_BYTES // self.size
        self._data = np.random.default_rng(1).integers(0, 256, (self._batch, self.size), np.uint8)
        self._numbers = self._data[:, :8].view(np.uint64)[:, 0], self._data[:, -8:].view(np.uint64)[:, 0]

    def _at(self, first: int) -> NDArray[np.uint8]:
        for numbers in self._numbers:
            numbers[:] = np.arange(first, first + self._batch)
        return self._data

    def put(self) -> None:
        for first in range(0, len(self.keys), self._batch):
            for at in range(first, first + self._batch, CHAIN):
                here = slice(at, min(at + CHAIN, first + self._batch))
                data = self._at(first)[here.start - first : here.stop - first]
                assert self.ns.put(self.keys[here], data.reshape(-1)).stored == len(data)

    def exact(self) -> int:
        """How many are served as they were put; a block of other bytes ends the run."""
        found, out = 0, np.empty_like(self._data)
        for first in range(0, len(self.keys), self._batch):
            got = self.ns.get_into(self.keys[first : first + self._batch], out.reshape(-1))
            assert np.array_equal(out[:got], self._at(first)[:got]), "a wrong byte"
            found += got
        return found


def rows(quick: bool) -> list[Row]:
    slab_bytes = QUICK_SLAB_BYTES if quick else SLAB_BYTES
    if shutil.disk_usage(FOLDER).free < slab_bytes + ROOM_BYTES:
        raise SystemExit(f"{FOLDER} has no room for {slab_bytes >> 20} MiB")
    base = Path(tempfile.mkdtemp(prefix="kvstored-bench-", dir=FOLDER))
    settings = {
        "server__socket": str(base / "sock"),
        "host__size": f"{slab_bytes >> 20}MiB",
        "host__persist": str(base / "memory"),
        "evict__high": "1",
        "evict__low": "0.99",
    }
    try:
        empty_s = statistics.median(_empty(base) for _ in range(1 if quick else STARTS))
        node = Node(grpc=False, **settings)
        made = []
        try:
            _until_said(node, READY)
            with Client(f"unix://{base}/sock", name="bench", timeout_s=WAIT_S) as client:
                for size in SIZES:
                    blocks = Blocks(client.raw_namespace(f"bench-warm-{size}", size), slab_bytes)
                    blocks.put()
                    starts = []
                    for _ in range(QUICK_STARTS if quick else STARTS):
                        node.process.kill()
                        node.process.wait()
                        node.close()
                        node, *seconds = _start(settings, blocks)
                        starts.append(seconds)
                    made.append(_row(slab_bytes, blocks, starts, empty_s))
                    blocks.ns.clear()
        finally:
            node.close()
        return made
    finally:
        shutil.rmtree(base)


def _empty(base: Path) -> float:
    """Seconds until a daemon of 1 MiB is ready."""
    start = time.perf_counter()
    node = Node(server__socket=str(base / "empty"), host__size="1MiB")
    try:
        return _until_said(node, READY) - start
    finally:
        node.close()


def _start(settings: dict[str, str], blocks: Blocks) -> tuple[Node, float, float, float]:
    """From exec until it says that it is ready, until the first hit, and what it says of the adoption."""
    out, pause = np.empty(blocks.size, np.uint8), threading.Event()
    start = time.perf_counter()
    node = Node(grpc=False, **settings)
    ready = _until_said(node, READY)
    while not blocks.ns.get_into(blocks.keys[-1:], out):
        if time.perf_counter() > start + WAIT_S:
            raise SystemExit(f"no hit within {WAIT_S:.0f} s:\n{node.said()}")
        pause.wait(LOOK_S)
    hit = time.perf_counter()
    adopted = ADOPTED.search(node.said())
    assert adopted is not None, f"nothing was adopted:\n{node.said()}"
    assert int(adopted[1]) == len(blocks.keys), "blocks were lost"
    return node, ready - start, hit - start, float(adopted[2])


def _until_said(node: Node, what: str) -> float:
    until, pause = time.perf_counter() + WAIT_S, threading.Event()
    while what not in node.said():
        if node.process.poll() is not None or time.perf_counter() > until:
            raise SystemExit(f"kvstored did not say {what!r}:\n{node.said()}")
        pause.wait(LOOK_S)
    return time.perf_counter()


def _row(slab_bytes: int, blocks: Blocks, starts: list[list[float]], empty_s: float) -> Row:
    ready, hits, adopted = zip(*starts, strict=True)
    exact = blocks.exact()
    assert exact == len(blocks.keys), f"{exact} of {len(blocks.keys)} blocks are served"
    size = f"{blocks.size >> 20} MiB" if blocks.size >= 1 << 20 else f"{blocks.size >> 10} KiB"
    return Row(
        f"{slab_bytes / (1 << 30):g} GiB slab warm, blocks of {size}: exec to first hit",
        statistics.median(hits),
        BAR_S,
        False,
        " s",
        f"ready after {statistics.median(ready):.2f} s, {statistics.median(adopted):.2f} s of it for "
        f"{len(blocks.keys)} blocks, all served byte for byte",
        f"an empty daemon of 1 MiB is ready after {empty_s:.2f} s",
        min(hits),
        max(hits),
    )
