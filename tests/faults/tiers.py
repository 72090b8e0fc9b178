"""What tests of the SSD tier ask of a daemon, and what must add up in its figures."""

import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.tiers.ssd.catalogue import Catalogue
from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import CATALOGUE_NAMES, EXTENTS, ROCKSDB, Record, SegmentRow
from kvstore_client import Client, Namespace
from tests.conftest import eventually
from tests.nodes import block, totals

LAYOUTS = (EXTENTS, ROCKSDB)
"""Of the SSD: what a test says of one it says of both. Faults injected between the daemon and the kernel reach extents
only, since RocksDB makes its own calls: what stands in for them is said by each test."""

HEALED_S = 60.0
"""Within which the tier is in use again once what was wrong is gone."""


def keys_of(ns: Namespace, name: str, count: int) -> list[bytes]:
    """Of blocks whose bytes follow from them."""
    return [ns.key(f"{name} {i}".encode()) for i in range(count)]


def put(ns: Namespace, keys: Sequence[bytes], *, durable: bool = False, at_once: int = 16) -> list[str]:
    """Stores blocks, each a root's or its neighbour's child; why some of them are not as wanted."""
    errors = []
    for at in range(0, len(keys), at_once):
        part = list(keys[at : at + at_once])
        result = ns.put(part, [block(key, ns.block_bytes) for key in part], durable=durable)
        if result.error is not None:
            errors.append(str(result.error))
    return errors


def durably(ns: Namespace, keys: Sequence[bytes]) -> None:
    """Stores blocks, and has them on the SSD."""
    assert put(ns, keys, durable=True) == []


def present(ns: Namespace, keys: Sequence[bytes], at_once: int = 32) -> list[bytes]:
    """Those that can be read, each of them byte by byte what it was; a miss between does not end it."""
    found: list[bytes] = []
    out = np.empty((at_once, ns.block_bytes), np.uint8)
    at = 0
    while at < len(keys):
        part = list(keys[at : at + at_once])
        count = ns.get_into(part, list(out[: len(part)]))
        for key, got in zip(part[:count], out, strict=False):
            assert got.tobytes() == block(key, ns.block_bytes), f"wrong bytes under {key.hex()[:12]}"
        found += part[:count]
        at += count + (count < len(part))
    return found


def only_on_ssd(client: Client, ns: Namespace, keys: Sequence[bytes]) -> None:
    """Has memory evict them: others are stored until none of them is there."""
    slots = client.stats()["host"]["size_bytes"] // ns.block_bytes
    for turn in range(20):
        if all(tier == "ssd" for key in keys for tier in ns.match([key]).tiers):
            return
        put(ns, keys_of(ns, f"others {turn} {keys[0].hex()}", slots))
    raise AssertionError("blocks stay in memory")


def ssd(client: Client) -> dict[str, Any]:
    """What the daemon says of the tier."""
    found: dict[str, Any] = client.stats()["ssd"]
    return found


def opened(client: Client) -> None:
    eventually(lambda: ssd(client)["state"] == "open" and not ssd(client)["trouble"], HEALED_S, "an SSD tier in use")


def settled(client: Client) -> dict[str, Any]:
    """Its figures once nothing waits and nothing is under way."""

    def quiet() -> dict[str, Any]:
        found = ssd(client)
        busy = any(queue["waiting"] or queue["running"] for queue in found["queues"])
        return {} if busy or found["tickets"] else found

    found: dict[str, Any] = eventually(quiet, 30, "the SSD tier to have nothing to do")
    return found


def nothing_held(client: Client) -> None:
    """Nobody has a slot that is not a block's, or a hold on one."""

    def free() -> bool:
        found = totals(client.stats())
        return not (found["leased"] or found["quarantined"] or found["doomed"])

    eventually(free, 10, f"no hold: {totals(client.stats())}")


def store_of(path: Path) -> Path:
    """Where RocksDB is in a directory, whichever layout it has."""
    (found,) = [path / name for name in CATALOGUE_NAMES.values() if (path / name).exists()]
    return found


def catalogue_of(path: Path) -> Catalogue:
    """The catalogue of a closed directory, to be closed again."""
    store = store_of(path)
    return Catalogue(store, FileLayer(), payload=store.name == CATALOGUE_NAMES[ROCKSDB])


def pieces(path: Path) -> set[tuple[int, int, int]]:
    """Layout "rocksdb": segment, pages of a slot, and slot of all payload in a closed directory."""
    opened = catalogue_of(path)
    found: set[tuple[int, int, int]] = set()
    try:
        key = opened.payload_from(b"")
        while key is not None:
            segment, slot_pages, page = struct.unpack(">III", key)
            found.add((segment, slot_pages, page // slot_pages))
            key = opened.payload_from(key + b"\0")
    finally:
        opened.close()
    return found


def catalogue(path: Path) -> tuple[list[Record], dict[int, SegmentRow]]:
    """What a closed directory says is in it."""
    opened = catalogue_of(path)
    try:
        records = [record for batch in opened.records() for record in batch]
        return records, {row.number: row for row in opened.segments()}
    finally:
        opened.close()


def du(path: Path) -> int:
    """Bytes that a directory takes on the disk; files may go meanwhile, as RocksDB's do."""
    found = subprocess.run(["du", "-s", "-B1", path], capture_output=True, text=True, check=False, timeout=30)
    other = [line for line in found.stderr.splitlines() if not line.endswith("No such file or directory")]
    assert not other, other
    return int(found.stdout.split()[0])


def metric(text: str, name: str) -> float:
    """One sample of the metrics."""
    (line,) = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
    return float(line.rpartition(" ")[2])
