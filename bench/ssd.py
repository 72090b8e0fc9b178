"""The SSD's bytes: its workers beside a raw O_DIRECT loop over files of the same size on the same file system.

Both arms move between the same slots of the same slab and take turns, so what the disk does
meanwhile meets both. Files are written once before: the first write of a preallocated block
is another thing than the next. Each turn ends when all of it is on the disk, synced. Reads
are in random order. The host's cache below a virtual disk cannot be dropped and serves both.
"""

import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from bench.measure import Row, Turns
from kvstore.tiers.slab import Slab
from kvstore.tiers.ssd.directory import SsdDirectory
from kvstore.tiers.ssd.format import CATALOGUE_NAMES, EXTENTS, ROCKSDB, Record, record_key
from kvstore.tiers.ssd.jobs import Job, Make, Outcome, Read, ReadDone, Write, Wrote
from kvstore.tiers.ssd.tier import SsdTier

THREADS = 4
FOLDER = Path(os.environ.get("KVSTORED_BENCH_DIR", "/var/tmp"))
"""Where the SSD is: not in memory, as /tmp may be."""

SIZES = {2 << 20: 256 << 20, 512 << 10: 128 << 20, 64 << 10: 64 << 20}
"""Bytes of a block -> bytes of a turn."""

TURNS, WARM, QUICK_TURNS = 9, 2, 3
BLOB_TURNS = 2
"""Of RocksDB's payload, which takes ten times as long."""

CHANNELS, OUTLIERS = 1024, 0.01
"""Of KV-like data: how many channels, and how many of them are twenty times as large."""

ANSWER_S = 60.0
READ_BAR, WRITE_BAR, AMPLIFICATION_BAR = 0.95, 0.90, 1.05
SEGMENT = 1

Data = NDArray[np.uint8]


def incompressible(size_bytes: int) -> Data:
    """Random bytes."""
    return np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)


def kv_like(size_bytes: int) -> Data:
    """bfloat16, each channel normal at a scale of its own, a few of them large."""
    chance = np.random.default_rng(1)
    scale = np.exp(chance.normal(0, 0.5, CHANNELS)) * np.where(chance.random(CHANNELS) < OUTLIERS, 20, 1)
    values = (chance.normal(0, 1, (size_bytes // 2 // CHANNELS, CHANNELS)) * scale).astype("<f4")
    halves: Data = (values.view("<u4") >> 16).astype("<u2").reshape(-1).view(np.uint8)
    return halves


class Disk:
    """An SSD directory with one segment, its workers, a raw file beside it, and a slab of as many slots."""

    def __init__(self, path: Path, block_bytes: int, total_bytes: int, data: Data, layout: str) -> None:
        self.path, self.block_bytes, self.count = path, block_bytes, total_bytes // block_bytes
        self.slab = Slab(huge_pages=False)
        self.slab.add(self.slab.make(SEGMENT, total_bytes))
        self.views = [self.slab.bytes_at(SEGMENT, n * block_bytes, block_bytes) for n in range(self.count)]
        np.copyto(np.frombuffer(self.slab.bytes_at(SEGMENT, 0, total_bytes), np.uint8), data)
        self.directory = SsdDirectory(path / "ssd", layout=layout)
        self.outcomes: SimpleQueue[list[Outcome]] = SimpleQueue()
        self.tier = SsdTier(self.directory.extents, self.directory.catalogue, self.outcomes.put)
        self.checksums: dict[int, int] = {}
        self._sequence = 0
        self._raw = os.open(path / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._raw, 0, total_bytes)
        self.ask([Make(SEGMENT, total_bytes, block_bytes, "bench")])

    def ask(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Hands jobs in and waits for all of them."""
        for job in jobs:
            self.tier.submit(job)
        answers: list[Outcome] = []
        while len(answers) < len(jobs):
            answers += self.outcomes.get(timeout=ANSWER_S)
        wrong = [one for one in answers if getattr(one, "error", "") or getattr(one, "outcome", "ok") != "ok"]
        assert not wrong, wrong[0]
        return answers

    def order(self, number: int) -> list[int]:
        """Every slot once, in an order of that turn's own."""
        slots = list(range(self.count))
        random.Random(number).shuffle(slots)
        return slots

    def write(self, number: int) -> None:
        """Through the tier: every block, over what its slot had."""
        jobs: list[Write] = []
        for slot in self.order(number):
            self._sequence += 1
            replaces = record_key(1, self._key(slot, number - 1)) if number else None
            record = Record(
                1, self._key(slot, number), SEGMENT, slot, self.block_bytes, 0, b"", 0, 0.0, 0.0, 0, 0.0, self._sequence
            )
            jobs.append(Write(slot, record, self.views[slot], slot * self.block_bytes, replaces))
        for answer in self.ask(jobs):
            assert isinstance(answer, Wrote)
            self.checksums[answer.number] = answer.checksum
        self._last = number

    def read(self, number: int) -> None:
        """Through the tier, verified."""
        jobs = [
            Read(
                slot,
                SEGMENT,
                slot * self.block_bytes,
                self.views[slot],
                self.block_bytes,
                self._key(slot, self._last),
                self.checksums[slot],
            )
            for slot in self.order(-number)
        ]
        assert all(isinstance(answer, ReadDone) for answer in self.ask(jobs))

    def raw_write(self, number: int) -> None:
        self._raw_loop(number, lambda view, offset: os.pwritev(self._raw, [view], offset))
        os.fdatasync(self._raw)

    def raw_read(self, number: int) -> None:
        self._raw_loop(-number, lambda view, offset: os.preadv(self._raw, [view], offset))

    def _raw_loop(self, number: int, move: Callable[[memoryview, int], int]) -> None:
        slots = self.order(number)
        failed: list[int] = []

        def some(mine: list[int]) -> None:
            moved = ((slot, move(self.views[slot], slot * self.block_bytes)) for slot in mine)
            failed.extend(slot for slot, went in moved if went != self.block_bytes)

        threads = [threading.Thread(target=some, args=(slots[n::THREADS],)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed, f"short: {failed}"

    def cool(self) -> None:
        """RocksDB's write buffers and what the page cache has of its files go: either layout reads from the disk."""
        if self.directory.layout == EXTENTS:
            return
        self.directory.catalogue._of_payload().flush(True)
        for path in (self.path / "ssd" / CATALOGUE_NAMES[self.directory.layout]).iterdir():
            # Compaction may have just removed it.
            with suppress(FileNotFoundError), path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @staticmethod
    def _key(slot: int, number: int) -> bytes:
        return slot.to_bytes(8, "little") + number.to_bytes(24, "little")

    def close(self) -> None:
        left = self.tier.close(ANSWER_S)
        assert left == ([], []), left
        self.directory.close()
        os.close(self._raw)
        self.views.clear()
        self.slab.close()


@dataclass
class Spent:
    """What the turns of one arm took."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    """Bytes that this process sent to the disk."""


@contextmanager
def disk(block_bytes: int, total_bytes: int, data: Data, layout: str = EXTENTS) -> Iterator[Disk]:
    """In a folder of its own, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kvstored-bench-ssd-", dir=FOLDER))
    try:
        made = Disk(folder, block_bytes, total_bytes, data, layout)
        try:
            yield made
        finally:
            made.close()
    finally:
        shutil.rmtree(folder)


def spend(made: Disk, turns: int) -> dict[str, Spent]:
    """All arms in turn; which of a pair goes first changes with every turn."""
    arms = {"write": made.write, "raw write": made.raw_write, "read": made.read, "raw read": made.raw_read}
    spent = {name: Spent() for name in arms}
    for number in range(turns + WARM):
        names = ["write", "raw write", "read", "raw read"] if number % 2 else ["raw write", "write", "raw read", "read"]
        for name in names:
            if name == "read":
                made.cool()
            written, cpu, start = written_bytes(), time.process_time(), time.perf_counter()
            arms[name](number)
            seconds = time.perf_counter() - start
            if number >= WARM:
                spent[name].seconds.append(seconds)
                spent[name].cpu_s.append(time.process_time() - cpu)
                spent[name].written.append(written_bytes() - written)
    return spent


def rows(quick: bool) -> list[Row]:
    """Each size of block through the extents; at 2 MiB what it costs besides."""
    found: list[Row] = []
    for block_bytes, total_bytes in SIZES.items():
        with disk(block_bytes, total_bytes, incompressible(total_bytes)) as made:
            spent = spend(made, QUICK_TURNS if quick else TURNS)
        large = block_bytes == 2 << 20
        found += speed_rows(f"SSD, {said(block_bytes)}", spent, total_bytes, bars=large)
        found.append(amplification_row(f"SSD, {said(block_bytes)}", spent, total_bytes, bar=large))
        if large:
            found += cpu_rows("SSD, 2 MiB", spent, total_bytes)
    return [*found, *blob_rows("bf16", kv_like, quick), *blob_rows("incompressible", incompressible, quick)]


def blob_rows(kind: str, data: Callable[[int], Data], quick: bool) -> list[Row]:
    """The layout "rocksdb" at 2 MiB, for orientation."""
    block_bytes, total_bytes, turns = 2 << 20, 256 << 20, 1 if quick else BLOB_TURNS
    name = f"SSD in RocksDB, 2 MiB {kind}"
    with disk(block_bytes, total_bytes, data(total_bytes), ROCKSDB) as made:
        made.write(0)
        first = made.directory.sizes().physical
        spent = spend(made, turns)
    return [
        *speed_rows(name, spent, total_bytes, bars=False),
        amplification_row(name, spent, total_bytes, bar=False),
        *cpu_rows(name, spent, total_bytes),
        Row(
            f"{name}: on the disk for each byte",
            first / total_bytes,
            None,
            False,
            "x",
            f"{first >> 20} MiB for {total_bytes >> 20} MiB, log included",
            "garbage is collected by the daemon: bench/ssd_capacity.py",
        ),
    ]


def speed_rows(name: str, spent: dict[str, Spent], total_bytes: int, *, bars: bool) -> list[Row]:
    turns = Turns({arm: one.seconds for arm, one in spent.items()})
    return [
        Row(
            f"{name}: {arm}",
            turns[f"raw {arm}"] / turns[arm],
            bar if bars else None,
            True,
            "",
            gb_s(total_bytes, turns[arm]),
            f"a raw O_DIRECT loop of {THREADS} threads, {gb_s(total_bytes, turns[f'raw {arm}'])}",
            *turns.range(f"raw {arm}", arm),
        )
        for arm, bar in (("read", READ_BAR), ("write", WRITE_BAR))
    ]


def amplification_row(name: str, spent: dict[str, Spent], total_bytes: int, *, bar: bool) -> Row:
    written = spent["write"].written
    raw = sum(spent["raw write"].written) / len(spent["raw write"].written) / total_bytes
    return Row(
        f"{name}: bytes written for each byte",
        sum(written) / len(written) / total_bytes,
        AMPLIFICATION_BAR if bar else None,
        False,
        "x",
        f"{sum(written) / 1e9:.2f} GB in /proc/self/io",
        f"the raw loop: {raw:.2f}x",
        min(written) / total_bytes,
        max(written) / total_bytes,
    )


def cpu_rows(name: str, spent: dict[str, Spent], total_bytes: int) -> list[Row]:
    return [
        Row(
            f"{name}: CPU of a {arm}",
            statistics.median(spent[arm].cpu_s) / total_bytes * 1e9,
            None,
            False,
            " s/GB",
            f"{statistics.median(spent[arm].cpu_s) * 1e3:.0f} ms for {total_bytes >> 20} MiB",
            f"the raw loop: {statistics.median(spent[f'raw {arm}'].cpu_s) / total_bytes * 1e9:.2f} s/GB",
        )
        for arm in ("read", "write")
    ]


def written_bytes(pid: str = "self") -> int:
    """What a process has sent to the disk since it began."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        name, _, value = line.partition(": ")
        if name == "write_bytes":
            return int(value)
    raise AssertionError("no write_bytes in /proc/PID/io")


def said(block_bytes: int) -> str:
    return f"{block_bytes >> 20} MiB" if block_bytes >= 1 << 20 else f"{block_bytes >> 10} KiB"


def gb_s(total_bytes: int, seconds: float) -> str:
    return f"{total_bytes / seconds / 1e9:.2f} GB/s"
