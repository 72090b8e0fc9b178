"""A slab, an SSD directory and its workers, as the daemon would hold them; and file layers that go wrong."""

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from kvstore.core.segments import PAGE_BYTES
from kvstore.tiers.slab import Slab
from kvstore.tiers.ssd.directory import SsdDirectory
from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import EXTENTS, Record, record_key
from kvstore.tiers.ssd.jobs import Job, Make, Outcome, Read, Write
from kvstore.tiers.ssd.tier import SsdTier

BLOCK_BYTES = 60_000
SLOT_BYTES = 15 * PAGE_BYTES
SLOTS = 16
SEGMENT_BYTES = SLOTS * SLOT_BYTES
ANSWER_TIMEOUT_S = 30.0


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4


def block_of(key: bytes) -> bytes:
    """What the block of this key has in it, always."""
    return np.random.default_rng(int.from_bytes(key, "little")).bytes(BLOCK_BYTES)


def record_of(number: int, slot: int, segment: int = 1, **fields: Any) -> Record:
    """A record as the core hands it in."""
    made = Record(1, key_of(number), segment, slot, BLOCK_BYTES, 0, b"", 0, 1000.0, 1000.0, 0, 0.0, number)
    return made._replace(**fields)


class Rig:
    """One open SSD with its workers; the slab's slots are numbered as the disk's."""

    def __init__(
        self,
        path: Path,
        layer: FileLayer | None = None,
        *,
        readers: int = 4,
        writers: int = 2,
        segment: bool = True,
        layout: str = EXTENTS,
    ) -> None:
        """`segment`: makes segment 1 where it is not there."""
        self.path = path
        self.slab = Slab(huge_pages=False)
        self.slab.add(self.slab.make(1, SEGMENT_BYTES))
        self.directory = SsdDirectory(path, layer, layout)
        self.extents, self.catalogue = self.directory.extents, self.directory.catalogue
        self.outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self.batches: list[int] = []
        self.tier = SsdTier(self.extents, self.catalogue, self._report, readers=readers, writers=writers)
        if segment and 1 not in self.extents.existing():
            assert self.ask(Make(1, SEGMENT_BYTES, SLOT_BYTES, "tenant")) == ""

    def _report(self, outcomes: list[Outcome]) -> None:
        self.batches.append(len(outcomes))
        for outcome in outcomes:
            self.outcomes.put(outcome)

    def view(self, slot: int) -> memoryview:
        return self.slab.bytes_at(1, slot * SLOT_BYTES, SLOT_BYTES)

    def answer(self) -> Any:
        return self.outcomes.get(timeout=ANSWER_TIMEOUT_S)

    def ask(self, job: Job) -> str:
        """The error of one job, or the outcome of a read."""
        self.tier.submit(job)
        answer = self.answer()
        found: str = answer.outcome if isinstance(job, Read) else answer.error
        return found

    def write(self, number: int, slot: int, *, replaces: int | None = None, segment: int = 1) -> Write:
        """A job that writes block `number`, which lies in the slab's slot of the same number."""
        view = self.view(slot)
        view[:BLOCK_BYTES] = block_of(key_of(number))
        former = None if replaces is None else record_key(1, key_of(replaces))
        return Write(number, record_of(number, slot, segment), view, slot * SLOT_BYTES, former)

    def read(self, record: Record, into: int = 0) -> Read:
        """A job that reads a record's block into a slot of the slab that was wiped."""
        view = self.view(into)
        view[:] = bytes(SLOT_BYTES)
        return Read(1, record.segment, record.slot * SLOT_BYTES, view, record.length, record.key, record.checksum)

    def records(self) -> dict[bytes, Record]:
        return {record.key: record for batch in self.catalogue.records() for record in batch}

    def good(self, record: Record) -> bool:
        """Whether it reads back; if it does, its bytes are the right ones."""
        outcome = self.ask(self.read(record))
        if outcome == "ok":
            assert bytes(self.view(0)[:BLOCK_BYTES]) == block_of(record.key), "wrong bytes were called right"
        return outcome == "ok"

    def close(self) -> None:
        left = self.tier.close(ANSWER_TIMEOUT_S)
        assert left == ([], []), left
        self.directory.close()
        self.slab.close()

    def again(self, layer: FileLayer | None = None) -> "Rig":
        """Closes it and opens what is on the disk."""
        self.close()
        return Rig(self.path, layer, segment=False, layout=self.directory.layout)


class FaultLayer(FileLayer):
    """The real file system until a test says otherwise."""

    def __init__(self) -> None:
        self.read_error = self.write_error = self.sync_error = self.allocate_error = 0
        self.piece_bytes = 0
        """At most so many bytes go in one call."""
        self.direct_error = 0
        self.synced: list[int] = []
        self.reading: Callable[[], None] | None = None
        self.writing: Callable[[], None] | None = None
        self.syncing: Callable[[], None] | None = None

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            _fail(self.direct_error)
        return super().open(path, flags)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        _fail(self.allocate_error)
        super().allocate(descriptor, size_bytes)

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        if self.reading:
            self.reading()
        _fail(self.read_error)
        return super().read(descriptor, view[: self.piece_bytes or None], offset)

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        if self.writing:
            self.writing()
        _fail(self.write_error)
        return super().write(descriptor, view[: self.piece_bytes or None], offset)

    def sync(self, descriptor: int) -> None:
        if self.syncing:
            self.syncing()
        _fail(self.sync_error)
        self.synced.append(descriptor)
        super().sync(descriptor)


def _fail(number: int) -> None:
    if number:
        raise OSError(number, os.strerror(number))


class CrashLayer(FileLayer):
    """Keeps what was written and not synced in memory, as a disk's cache would, and loses it at `crash`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unsynced: dict[int, list[tuple[int, bytes]]] = {}

    def write(self, descriptor: int, view: memoryview, offset: int) -> int:
        with self._lock:
            self._unsynced.setdefault(descriptor, []).append((offset, bytes(view)))
        return len(view)

    def read(self, descriptor: int, view: memoryview, offset: int) -> int:
        came = super().read(descriptor, view, offset)
        with self._lock:
            for at, written in self._unsynced.get(descriptor, []):
                start, end = max(at, offset), min(at + len(written), offset + len(view))
                if start < end:
                    view[start - offset : end - offset] = written[start - at : end - at]
                    came = max(came, end - offset)
        return came

    def sync(self, descriptor: int) -> None:
        with self._lock:
            pending = self._unsynced.pop(descriptor, [])
        for offset, written in pending:
            self._put(descriptor, offset, written)
        super().sync(descriptor)

    def close(self, descriptor: int) -> None:
        with self._lock:
            self._unsynced.pop(descriptor, None)
        super().close(descriptor)

    @property
    def unsynced(self) -> int:
        with self._lock:
            return sum(map(len, self._unsynced.values()))

    def crash(self, chance: random.Random) -> None:
        """Of each unsynced write all pages, some, or none reach the disk."""
        with self._lock:
            for descriptor, pending in self._unsynced.items():
                for offset, written in pending:
                    kept = chance.choice(("all", "some", "none"))
                    for at in range(0, len(written), PAGE_BYTES):
                        if kept == "all" or (kept == "some" and chance.random() < 0.5):
                            self._put(descriptor, offset + at, written[at : at + PAGE_BYTES])
            self._unsynced.clear()

    def _put(self, descriptor: int, offset: int, written: bytes) -> None:
        aligned = np.empty(len(written) + PAGE_BYTES, np.uint8)
        start = -aligned.ctypes.data % PAGE_BYTES
        page = aligned[start : start + len(written)]
        page[:] = np.frombuffer(written, np.uint8)
        assert os.pwrite(descriptor, page.data, offset) == len(written)


def fill(path: Path) -> Path:
    """Takes all the space that is left on a small file system; unlink what it returns."""
    filler = path / "filler"
    with filler.open("wb", buffering=0) as file:
        for piece in (1 << 20, 4096, 512):
            with pytest.raises(OSError, match="No space left on device"):  # noqa: PT012
                while True:
                    file.write(bytes(piece))
    return filler


def open_files() -> int:
    """Descriptors that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for something that another thread brings about."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        pause.wait(0.002)
