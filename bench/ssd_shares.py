"""Shares of a real disk: loads, prefetches and write-backs at once, each with more to do than the disk does.

What each kind moved is the daemon's own count of it, over those moments between which every kind
had jobs that waited, so that a client that is too slow on a small machine takes nothing off a share.
"""

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.synchronize import Event

import numpy as np

from bench.measure import Row
from bench.node import Node
from bench.ssd import gb_s, incompressible, said
from bench.ssd_daemon import folder, wait_open
from kvstore.core.schedule import SHARES, Kind
from kvstore_client import Client, Namespace, ResourceExhausted

BLOCK_BYTES = 2 << 20
HOST, SET_BLOCKS = "1GiB", 1024
"""What is read, of each kind, is twice the memory: by the time that it is asked for again it has left."""

SSD = "16GiB"
LOADERS, PART_BLOCKS = 4, 16
"""Clients that load, each so many blocks at once: more than may be read at once, and less than may be held."""

TICKETS, TICKET_BLOCKS = 4, 8
"""Prefetches under way."""

WRITES_AHEAD, WRITE_BLOCKS = 16, 4
"""Blocks that wait to be written, and that are put together: few, or they are evicted before their turn."""

WINDOW_S, QUICK_WINDOW_S = 10.0, 2.0
LOOK_S, SETTLE_S, LIMIT_S = 0.02, 1.0, 60.0
BAR = 0.20
CASES: tuple[tuple[Kind, ...], ...] = (
    tuple(Kind),
    (Kind.LOAD, Kind.PREFETCH),
    (Kind.LOAD, Kind.WRITE),
    (Kind.PREFETCH, Kind.WRITE),
)


def rows(quick: bool) -> list[Row]:
    """How far each kind's part of the bytes was from its share, for all kinds at once and for each pair."""
    with folder() as path, Node(host__size=HOST, ssd__path=str(path / "ssd"), ssd__size=SSD) as node:
        wait_open(node)
        with Client(node.endpoint, name="bench", timeout_s=LIMIT_S) as client:
            for kind in (Kind.LOAD, Kind.PREFETCH):
                _store(*_set_of(client, kind))
            return [_row(client, node.endpoint, case, QUICK_WINDOW_S if quick else WINDOW_S) for case in CASES]


def _set_of(client: Client, kind: Kind) -> tuple[Namespace, list[bytes]]:
    ns = client.raw_namespace(f"bench-{kind.name}", BLOCK_BYTES)
    return ns, [ns.key(b"%d" % n) for n in range(SET_BLOCKS)]


def _store(ns: Namespace, keys: Sequence[bytes]) -> None:
    data = incompressible(PART_BLOCKS * BLOCK_BYTES)
    for at in range(0, len(keys), PART_BLOCKS):
        result = ns.put(keys[at : at + PART_BLOCKS], data, durable=True)
        assert (result.rejected, result.error) == (0, None), result


def _row(client: Client, endpoint: str, case: Sequence[Kind], window_s: float) -> Row:
    with _busy(endpoint, case):
        moved, elapsed = _window(client, case, window_s)
    whole, shares = sum(moved.values()), sum(SHARES[kind] for kind in case)
    parts = {kind: moved[kind] / whole for kind in case}
    off = {kind: parts[kind] * shares / SHARES[kind] for kind in case}
    return Row(
        f"SSD, shares of {', '.join(kind.name.lower() for kind in case)}, {said(BLOCK_BYTES)}: off by",
        max(abs(one - 1) for one in off.values()),
        BAR,
        False,
        "",
        ", ".join(f"{kind.name.lower()} {parts[kind]:.3f} ({off[kind]:.2f} of its share)" for kind in case),
        f"{gb_s(whole, elapsed)} in {elapsed:.1f} s in which all of them had jobs that waited",
    )


def _window(client: Client, case: Sequence[Kind], window_s: float) -> tuple[dict[Kind, int], float]:
    """Bytes moved by kind while all had a backlog, `window_s` of such time in all."""
    pause, until = threading.Event(), time.monotonic() + LIMIT_S
    moved, elapsed = dict.fromkeys(case, 0), 0.0
    last: tuple[float, dict[Kind, int], bool] = (time.monotonic(), {}, False)
    begun: float | None = None
    while elapsed < window_s and time.monotonic() < until:
        pause.wait(LOOK_S)
        queues = {queue["kind"]: queue for queue in client.stats()["ssd"]["queues"]}
        now = time.monotonic()
        bytes_now = {kind: queues[kind.name.lower()]["moved_bytes"] for kind in case}
        waiting = all(queues[kind.name.lower()]["waiting"] for kind in case)
        begun = begun or (now if waiting else None)
        if waiting and last[2] and begun is not None and now - begun > SETTLE_S:
            elapsed += now - last[0]
            for kind in case:
                moved[kind] += bytes_now[kind] - last[1][kind]
        last = (now, bytes_now, waiting)
    if elapsed < window_s / 4:
        raise SystemExit(f"{case}: all had jobs that waited for {elapsed:.2f} s only")
    return moved, elapsed


# -- those who keep it busy


@contextmanager
def _busy(endpoint: str, case: Sequence[Kind]) -> Iterator[None]:
    """Processes of their own, ended afterwards."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    works = {Kind.LOAD: _loaders, Kind.PREFETCH: _prefetch, Kind.WRITE: _write}
    workers = [context.Process(target=works[kind], args=(endpoint, stop), daemon=True) for kind in case]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        stop.set()
        for worker in workers:
            worker.join(30)
            worker.kill()
            worker.join()


def _loaders(endpoint: str, stop: Event) -> None:
    """Clients of their own: those of one take turns."""
    threads = [threading.Thread(target=_load, args=(endpoint, stop, n)) for n in range(LOADERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _load(endpoint: str, stop: Event, number: int) -> None:
    with Client(endpoint, name=f"bench-load-{number}") as client:
        ns, keys = _set_of(client, Kind.LOAD)
        for part in _parts(keys, PART_BLOCKS, stop, number * len(keys) // LOADERS):
            with suppress(ResourceExhausted), ns.acquire(part, timeout_s=5.0):
                pass


def _prefetch(endpoint: str, stop: Event) -> None:
    """Several under way; what has come counts as used, or nothing more would be brought ahead."""
    with Client(endpoint, name="bench-prefetch") as client:
        ns, keys = _set_of(client, Kind.PREFETCH)
        under_way: deque[tuple[list[bytes], Callable[[], int]]] = deque()
        for part in _parts(keys, TICKET_BLOCKS, stop, 0):
            under_way.append((part, ns.prefetch(part, deadline_s=30.0).wait))
            if len(under_way) == TICKETS:
                came, wait = under_way.popleft()
                found = wait()
                with suppress(ResourceExhausted), ns.acquire(came[:found], timeout_s=0.5):
                    pass


def _write(endpoint: str, stop: Event) -> None:
    """New blocks, some ahead of the disk."""
    data, pause = incompressible(WRITE_BLOCKS * BLOCK_BYTES), threading.Event()
    views = list(np.split(data, WRITE_BLOCKS))
    with Client(endpoint, name="bench-write") as client:
        ns, number = client.raw_namespace("bench-WRITE", BLOCK_BYTES), count(time.time_ns())
        while not stop.is_set():
            queues = {queue["kind"]: queue for queue in client.stats()["ssd"]["queues"]}
            if queues["write"]["waiting"] >= WRITES_AHEAD:
                pause.wait(0.002)
                continue
            with suppress(ResourceExhausted):
                ns.put([ns.key(b"%d" % next(number)) for _ in views], views)


def _parts(keys: list[bytes], size: int, stop: Event, start: int) -> Iterator[list[bytes]]:
    """Round and round, until it is enough."""
    at = start
    while not stop.is_set():
        yield keys[at : at + size]
        at = (at + size) % len(keys)
