"""One arm of the comparison: a process that puts, gets and looks up when it is its turn.

It reads one JSON object a line from its standard input and answers each with one on what
was its standard output; whatever a library prints goes to the log instead.

A turn is one walk over all 64 distinct blocks. Keys, and what a peer wants to be told
before, are made outside the time that counts; so is the check of the bytes that the last
get of a turn brought, whose target is wiped afterwards: a get that brings nothing is seen.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

DISTINCT = 64
BLOCK_BYTES_MAX = 2 << 20

Bytes = NDArray[np.uint8]


class Arena:
    """Private memory to copy from and to copy to: 64 blocks each, of any size up to 2 MiB."""

    def __init__(self, source: Bytes, target: Bytes) -> None:
        """Both have room for 64 blocks of 2 MiB; the source is filled with bytes that are alike in every process."""
        self._source, self._target = source, target
        source[:] = np.random.default_rng(1).integers(0, 256, len(source), np.uint8)
        target[:] = 1
        self.block_bytes = BLOCK_BYTES_MAX

    def sources(self, at: int, count: int) -> list[Bytes]:
        return [self._cut(self._source, i) for i in range(at, at + count)]

    def targets(self, at: int, count: int) -> list[Bytes]:
        return [self._cut(self._target, i) for i in range(at, at + count)]

    def _cut(self, whole: Bytes, i: int) -> Bytes:
        return whole[i * self.block_bytes : (i + 1) * self.block_bytes]


class Store:
    """What a peer's arm says of its peer. Everything but `put`, `get` and `lookup` is outside the time that counts."""

    arena: Arena

    def facts(self) -> dict[str, str]:
        """Its version."""
        return {}

    def open(self, block_bytes: int) -> None:
        """Blocks are of this size from now on."""
        self.arena.block_bytes = block_bytes

    def batch(self, tag: str, at: int, count: int) -> Any:
        """Names of blocks at..at+count, as put, get and lookup want them. Another tag, other names."""
        raise NotImplementedError

    def put(self, batch: Any, sources: Sequence[Bytes]) -> None:
        raise NotImplementedError

    def ready(self, batch: Any) -> None:
        """What a peer must be told before a get."""

    def get(self, batch: Any, targets: Sequence[Bytes]) -> Sequence[Any] | None:
        """Into the targets, or as buffers where that is what the peer's client does."""
        raise NotImplementedError

    def done(self, batch: Any) -> None:
        """What a peer must be told after a put, a get or a lookup."""

    def lookup(self, batch: Any) -> int:
        """How many of them are there."""
        raise NotImplementedError

    def looked_up(self, batch: Any) -> None:
        """What a peer must be told after a lookup, before `done`."""

    def forget(self, batches: Sequence[Any]) -> None:
        """These are all that is stored; afterwards nothing is."""
        raise NotImplementedError

    def close(self) -> None:
        """The end."""


def private_arena() -> Arena:
    """Memory of this process, where a peer does not bring its own."""
    size = DISTINCT * BLOCK_BYTES_MAX
    return Arena(np.empty(size, np.uint8), np.empty(size, np.uint8))


class Turns:
    """The turns of one arm."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = 0
        self._kept: list[Any] = []

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Seconds of each operation of a turn; nothing for what only prepares one."""
        do = ask["do"]
        if do == "open":
            self._store.open(ask["block_bytes"])
            return {}
        if do == "fill":
            self._fill(ask["blocks"], ask["batch"])
            return {}
        if do == "forget":
            self._store.forget(self._kept)
            self._kept = []
            return {}
        seconds = {"put": self._put, "get": self._get, "lookup": self._lookup}[do](ask["batch"])
        return {"seconds": seconds}

    def _fill(self, blocks: int, count: int) -> None:
        """What gets and lookups ask for. More blocks than the arena has are the same ones under other names."""
        for at in range(0, blocks, count):
            batch = self._store.batch("kept", at, count)
            self._store.put(batch, [self._store.arena.sources((at + i) % DISTINCT, 1)[0] for i in range(count)])
            self._store.done(batch)
            self._kept.append(batch)

    def _put(self, count: int) -> list[float]:
        self._turn += 1
        store, seconds, batches = self._store, [], []
        for at in range(0, DISTINCT, count):
            batch, sources = store.batch(f"turn {self._turn}", at, count), store.arena.sources(at, count)
            begun = time.perf_counter()
            store.put(batch, sources)
            seconds.append(time.perf_counter() - begun)
            store.done(batch)
            batches.append(batch)
        store.forget(batches)
        return seconds

    def _get(self, count: int) -> list[float]:
        store, seconds = self._store, []
        for at in range(0, DISTINCT, count):
            batch, targets = store.batch("kept", at, count), store.arena.targets(at, count)
            store.ready(batch)
            begun = time.perf_counter()
            got = store.get(batch, targets)
            seconds.append(time.perf_counter() - begun)
            if at + count == DISTINCT:
                self._check(at, targets, got)
            store.done(batch)
        return seconds

    def _check(self, at: int, targets: Sequence[Bytes], got: Sequence[Any] | None) -> None:
        right = self._store.arena.sources(at, len(targets))
        found = targets if got is None else [np.frombuffer(block, np.uint8) for block in got]
        for one, other in zip(found, right, strict=True):
            if not np.array_equal(one, other):
                raise SystemExit("a get brought other bytes than were put")
        for target in targets:
            target[:] = 0

    def _lookup(self, count: int) -> list[float]:
        store, seconds = self._store, []
        for _ in range(16):
            batch = store.batch("kept", 0, count)
            begun = time.perf_counter()
            found = store.lookup(batch)
            seconds.append(time.perf_counter() - begun)
            store.looked_up(batch)
            store.done(batch)
            if found != count:
                raise SystemExit(f"{found} of {count} blocks found")
        return seconds


def serve(make: Callable[[], Store]) -> None:
    """Makes the store and answers turns until the input ends; the store's facts go ahead of them."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        store = make()
        answers.write(json.dumps({"ready": store.facts()}) + "\n")
        turns = Turns(store)
        for line in sys.stdin:
            answers.write(json.dumps(turns.answer(json.loads(line))) + "\n")
        store.close()
