"""How much the SSD holds in the same `ssd.size`, by layout and kind of data, and what it takes of the disk meanwhile.

A daemon of its own each, whose SSD is filled with 2 MiB blocks beyond what it holds; then blocks
are removed at random and others written for them, so that what is left over lies everywhere and
has to be collected. What the directory takes is looked at all the time.
"""

import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measure import Row
from bench.node import Node
from bench.ssd import FOLDER, Data, incompressible, kv_like
from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import EXTENTS, ROCKSDB
from kvstore_client import Client

SIZE_BYTES, BLOCK_BYTES, AT_ONCE = 512 << 20, 2 << 20, 8
FILL, CHURN = 1.15, 0.3
"""Of ssd.size: bytes of blocks written to fill it, and then in place of others."""

DATA_BYTES = 64 << 20
LOOK_S = 0.02


class Watched:
    """What a directory takes at its most."""

    def __init__(self, path: Path) -> None:
        self.most = 0
        self._path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            self.most = max(self.most, FileLayer().physical_bytes(self._path))

    def __enter__(self) -> "Watched":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def rows(quick: bool) -> list[Row]:
    """Both layouts; bars are those of docs/decisions/0007: RocksDB holds more of what shrinks, and neither passes."""
    kinds = [("bf16", kv_like)] if quick else [("bf16", kv_like), ("incompressible", incompressible)]
    return [row for kind, data in kinds for row in _pair(kind, data)]


def _pair(kind: str, data: Callable[[int], Data]) -> list[Row]:
    extents, most_extents = held(EXTENTS, data)
    blobs, most_blobs = held(ROCKSDB, data)
    most = max(most_extents, most_blobs)
    return [
        Row(
            f"SSD: {kind} blocks held by rocksdb, to those by extents",
            blobs / extents,
            1.0 if kind == "bf16" else None,
            True,
            "x",
            f"{blobs} blocks of 2 MiB",
            f"extents: {extents}, both in an ssd.size of {SIZE_BYTES >> 20} MiB",
        ),
        Row(
            f"SSD: most that it took of ssd.size, {kind}",
            most / SIZE_BYTES,
            1.0,
            False,
            "x",
            f"rocksdb: {most_blobs >> 20} MiB of {SIZE_BYTES >> 20}",
            f"extents: {most_extents >> 20} MiB",
        ),
    ]


def held(layout: str, data: Callable[[int], Data]) -> tuple[int, int]:
    """Blocks, and the most bytes on the disk."""
    folder = Path(tempfile.mkdtemp(prefix="kvstored-bench-capacity-", dir=FOLDER))
    path, size = str(folder / "ssd"), f"{SIZE_BYTES}B"
    try:
        node = Node(host__size="256MiB", ssd__path=path, ssd__size=size, ssd__layout=layout, ssd__free_floor="64MiB")
        with node, Client(node.endpoint, timeout_s=60.0) as client, Watched(folder) as watched:
            _fill(client, data(DATA_BYTES))
            found: dict[str, Any] = client.stats()["ssd"]
        return found["blocks"], watched.most
    finally:
        shutil.rmtree(folder)


def _fill(client: Client, data: Data) -> None:
    ns, chance = client.raw_namespace("capacity", BLOCK_BYTES), random.Random(1)
    fill, churn = (int(SIZE_BYTES * share) // BLOCK_BYTES for share in (FILL, CHURN))

    def put(first: int) -> list[bytes]:
        keys = [ns.key(f"block {first + n}".encode()) for n in range(AT_ONCE)]
        places = [chance.randrange(0, DATA_BYTES - BLOCK_BYTES, 4096) for _ in keys]
        ns.put(keys, [data[place : place + BLOCK_BYTES] for place in places], durable=True)
        return keys

    keys = [key for first in range(0, fill, AT_ONCE) for key in put(first)]
    keys = [key for key in keys if ns.match([key]).blocks]
    for first in range(fill, fill + churn, AT_ONCE):
        chance.shuffle(keys)
        ns.remove(keys[-AT_ONCE:])
        keys[-AT_ONCE:] = put(first)
