"""A daemon with an SSD: hits in memory while its disk is busy, and the start with many records in its catalogue."""

import multiprocessing
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.measure import Row, micro, timed
from bench.node import Node
from bench.ssd import FOLDER, gb_s, incompressible, said, written_bytes
from kvstore.tiers.ssd.directory import SsdDirectory
from kvstore.tiers.ssd.format import NamespaceRow, Record, SegmentRow, pack_record, pack_row, segment_name
from kvstore_client import Client, Namespace

HIT_SIZES = (2 << 20, 256 << 10)
HIT_BLOCKS = 32
HIT_BAR = 2.0
PHASES, QUICK_PHASES = 4, 2
"""Of idle and of busy seconds each, in turn."""

HITS, QUICK_HITS = 500, 100
"""A phase."""

PAUSE_S = 0.001
"""Between two hits: a client that only reads would be measured against the other processes of a small machine."""

FILL_BYTES, FILL_BATCH, AHEAD_BYTES = 2 << 20, 2, 128 << 20
"""Blocks that are put to keep the disk busy, and how far ahead of the disk: less than may wait for it."""

RECORDS, QUICK_RECORDS = 1_000_000, 100_000
SEGMENT_BYTES, BLOCK_BYTES = 16 << 20, 4096
PUT_RECORDS = 10_000
READY_BAR_S, RSS_BAR_MB = 5.0, 300.0
OPEN_S, TURN_S = 120.0, 30.0
OPEN_LINE = re.compile(r"the SSD tier is open.*blocks=(\d+)")


def rows(quick: bool) -> list[Row]:
    return [*hit_rows(quick), *start_rows(quick)]


@contextmanager
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvstored-bench-ssd-", dir=FOLDER))
    try:
        yield made
    finally:
        shutil.rmtree(made)


# -- hits beside writes


def hit_rows(quick: bool) -> list[Row]:
    """p99 of get_into of one block that memory has, the disk saturated by write-backs, as a multiple of it idle."""
    with folder() as path, Node(host__size="2GiB", ssd__path=str(path / "ssd"), ssd__size="8GiB") as node:
        wait_open(node)
        context = multiprocessing.get_context("spawn")
        busy, stop = context.Event(), context.Event()
        filler = context.Process(target=_fill, args=(node.endpoint, node.process.pid, busy, stop), daemon=True)
        filler.start()
        try:
            with Client(node.endpoint, name="bench") as client:
                return [_hit_row(client, node.process.pid, busy, size, quick) for size in HIT_SIZES]
        finally:
            stop.set()
            busy.set()
            filler.join(30)
            filler.kill()


def _hit_row(client: Client, pid: int, busy: Event, block_bytes: int, quick: bool) -> Row:
    ns = client.raw_namespace(f"bench-hits-{block_bytes}", block_bytes)
    keys = [ns.key(b"%d" % n) for n in range(HIT_BLOCKS)]
    assert ns.put(keys, incompressible(HIT_BLOCKS * block_bytes)).rejected == 0
    target = np.zeros(block_bytes, np.uint8)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    copies: dict[bool, list[float]] = {False: [], True: []}
    views = list(np.split(incompressible(HIT_BLOCKS * block_bytes), HIT_BLOCKS))
    moved, elapsed = 0, 0.0
    with ns.acquire(keys) as lease:
        assert len(lease.views) == HIT_BLOCKS
        for phase in range(2 * (QUICK_PHASES if quick else PHASES)):
            filling = bool(phase % 2)
            _turn(busy, pid, filling)
            written, start = written_bytes(str(pid)), time.perf_counter()
            for _ in range(QUICK_HITS if quick else HITS):
                number = len(seconds[filling])
                seconds[filling].append(_hit(ns, keys[number % HIT_BLOCKS], target))
                copies[filling].append(_copy(views[(number + HIT_BLOCKS // 2) % HIT_BLOCKS], target))
            if filling:
                moved += written_bytes(str(pid)) - written
                elapsed += time.perf_counter() - start
    busy.clear()
    idle, full = (float(np.percentile(seconds[filling], 99)) for filling in (False, True))
    bare_idle, bare_full = (float(np.percentile(copies[filling], 99)) for filling in (False, True))
    return Row(
        f"SSD busy, get_into of 1 x {said(block_bytes)} from memory: p99",
        full / idle,
        HIT_BAR,
        False,
        "x",
        f"{micro(full)} while the daemon writes {gb_s(moved, elapsed)}",
        f"idle: {micro(idle)}; a memcpy in its place: {micro(bare_idle)}, busy {bare_full / bare_idle:.1f}x",
    )


def _hit(ns: Namespace, key: bytes, target: NDArray[np.uint8]) -> float:
    threading.Event().wait(PAUSE_S)
    start = time.perf_counter()
    got = ns.get_into([key], [target])
    seconds = time.perf_counter() - start
    assert got == 1, "a hit that missed"
    return seconds


def _copy(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> float:
    """The same rhythm without a store: what the machine's other work does to it."""
    threading.Event().wait(PAUSE_S)
    return timed(lambda: np.copyto(target, source))


def _turn(busy: Event, pid: int, filling: bool) -> None:
    """Until the disk is as it is wanted: a quarter of a second with much written, or with nothing."""
    (busy.set if filling else busy.clear)()
    pause, until = threading.Event(), time.monotonic() + TURN_S
    while time.monotonic() < until:
        before = written_bytes(str(pid))
        pause.wait(0.25)
        if (written_bytes(str(pid)) - before > FILL_BATCH * FILL_BYTES) == filling:
            return
    raise SystemExit(f"the disk did not become {'busy' if filling else 'idle'} within {TURN_S:.0f} s")


def _fill(endpoint: str, pid: int, busy: Event, stop: Event) -> None:
    """In a process of its own: new blocks as fast as the daemon writes them to its SSD, while `busy` is set."""
    blocks = incompressible(FILL_BATCH * FILL_BYTES)
    pause = threading.Event()
    with Client(endpoint, name="bench-fill") as client:
        ns = client.raw_namespace("bench-fill", FILL_BYTES)
        number, put, began = 0, 0, -1
        while not stop.is_set():
            if not busy.is_set():
                began = -1
                busy.wait(1)
                continue
            if began < 0:
                put, began = 0, written_bytes(str(pid))
            if put - (written_bytes(str(pid)) - began) > AHEAD_BYTES:
                pause.wait(0.002)
                continue
            keys = [ns.key(b"%d" % (number + n)) for n in range(FILL_BATCH)]
            put += ns.put(keys, blocks).stored * FILL_BYTES
            number += FILL_BATCH


# -- the start


def start_rows(quick: bool) -> list[Row]:
    """The start with a million blocks on the SSD: until memory serves, until all are found, and what they take."""
    records = QUICK_RECORDS if quick else RECORDS
    with folder() as path:

        def node_of() -> Node:
            return Node(host__size="256MiB", ssd__path=str(path / "ssd"), ssd__size="8GiB")

        with node_of() as node:
            wait_open(node)
            empty = rss_anon_bytes(node.process.pid)
        make_records(path / "ssd", records)
        start = time.perf_counter()
        with node_of() as node:
            ready_s = time.perf_counter() - start
            restored = wait_open(node)
            open_s = time.perf_counter() - start
            assert restored == records, f"{restored} of {records} records were put back"
            grown = rss_anon_bytes(node.process.pid) - empty
    return [
        Row(
            f"start with {records} blocks on the SSD: until ready",
            ready_s,
            READY_BAR_S,
            False,
            " s",
            f"all of them are found after {open_s:.1f} s",
            "none",
        ),
        Row(
            "daemon, RssAnon per million blocks on the SSD",
            grown / records,
            RSS_BAR_MB,
            False,
            " MB",
            f"{grown / 1e6:.0f} MB for {records}",
            f"the same with an empty SSD: {empty / 1e6:.0f} MB",
        ),
    ]


def make_records(path: Path, count: int) -> None:
    """A catalogue as if so many blocks had been written, in files that are all holes."""
    a_segment = SEGMENT_BYTES // BLOCK_BYTES
    directory = SsdDirectory(path)
    try:
        rows = [SegmentRow(n, SEGMENT_BYTES, BLOCK_BYTES, "") for n in range(1, -(-count // a_segment) + 1)]
        for row in rows:
            file = path / segment_name(row.number)
            file.touch(0o600)
            os.truncate(file, row.size_bytes)
        namespace = NamespaceRow(1, "default", blake2b(b"bench", digest_size=32).digest(), BLOCK_BYTES, 16, "bench")
        directory.catalogue.write(dict([pack_row(namespace), *map(pack_row, rows)]))
        now = time.time()
        for at in range(0, count, PUT_RECORDS):
            some = range(at, min(at + PUT_RECORDS, count))
            keys = [blake2b(n.to_bytes(8, "little"), digest_size=32).digest() for n in some]
            directory.catalogue.write(
                dict(
                    pack_record(
                        Record(
                            1, key, 1 + n // a_segment, n % a_segment, BLOCK_BYTES, 0, b"", 0, now, now - n, 0, 0.0, n
                        )
                    )
                    for n, key in zip(some, keys, strict=True)
                )
            )
    finally:
        directory.close()


def wait_open(node: Node) -> int:
    """Until the SSD's blocks are all found; how many they are."""
    pause, until = threading.Event(), time.monotonic() + OPEN_S
    while time.monotonic() < until:
        found = OPEN_LINE.search(node.said())
        if found:
            return int(found[1])
        pause.wait(0.02)
    raise SystemExit(f"the SSD tier did not open:\n{node.said()}")


def rss_anon_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10
