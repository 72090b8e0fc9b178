"""Sixteen local clients at once, each a process: puts and get_intos of 256 KiB mixed, beside plain copies."""

import multiprocessing
import multiprocessing.connection
import statistics
import time
from typing import Any

import numpy as np

from bench.local import DISTINCT, Arena, slab_memory
from bench.measure import Row
from kvstore_client import Client

CLIENTS = 16
BLOCK_BYTES = 256 << 10
PHASE_S = 3.0
PHASES = 3
BATCHES = (1, 16)


def rows(endpoint: str) -> list[Row]:
    """Share of the memcpy bandwidth of sixteen such processes, and the 99th percentile of a commit."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(CLIENTS):
        ours, theirs = context.Pipe()
        process = context.Process(target=_client, args=(theirs, endpoint, number), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            _receive(pipe)
        made = []
        for batch in BATCHES:
            shares, commits, rates = [], [], []
            for _ in range(PHASES):
                plain = _phase(pipes, "memcpy", batch)
                store = _phase(pipes, "store", batch)
                shares.append(sum(r["bytes"] for r in store) / sum(r["bytes"] for r in plain))
                rates.append(sum(r["bytes"] for r in store) / PHASE_S / 1e9)
                for result in store:
                    commits += result["commits"]
            name = f"16 clients, {batch} x 256 KiB put and get_into"
            bandwidth = f"{statistics.median(rates):.1f} GB/s"
            made.append(Row(name, statistics.median(shares), 0.7, True, "", bandwidth, "memcpy in 16 such processes"))
            p99 = float(np.percentile(commits, 99)) * 1e3
            made.append(Row(f"{name}: commit p99", p99, 5.0, False, " ms", f"{len(commits)} commits", "none"))
        return made
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(pipe: "multiprocessing.connection.Connection[Any, Any]") -> Any:
    assert pipe.poll(120), "a client of the benchmark does not answer"
    return pipe.recv()


def _phase(pipes: list[Any], kind: str, batch: int) -> list[dict[str, Any]]:
    for pipe in pipes:
        pipe.send((kind, batch, time.monotonic() + 0.3))
    return [_receive(pipe) for pipe in pipes]


def _client(pipe: Any, endpoint: str, number: int) -> None:
    """One of the sixteen. Its plain copies go to the slots of its first put, in phases in which nobody stores."""
    arena = Arena(BLOCK_BYTES)
    with Client(endpoint, name=f"bench-{number}", timeout_s=30) as client:
        ns = client.raw_namespace("bench-crowd", BLOCK_BYTES)
        keys = [ns.key(b"%d-%d" % (number, i)) for i in range(DISTINCT)]
        commits: list[float] = []
        _time_commits(client, commits)
        ns.put(keys, arena.source)
        slab = slab_memory(client, keys, BLOCK_BYTES)
        ns.get_into(keys, arena.target)
        pipe.send("ready")
        while True:
            kind, batch, start = pipe.recv()
            commits.clear()
            ns.remove(keys)
            while time.monotonic() < start:
                pass
            done, until, at = 0, start + PHASE_S, 0
            while time.monotonic() < until:
                part = slice(at, at + batch)
                if kind == "memcpy":
                    for target, source in zip(slab[part], arena.source[part], strict=True):
                        np.copyto(target, source)
                    for target, source in zip(arena.target[part], slab[part], strict=True):
                        np.copyto(target, source)
                else:
                    assert ns.put(keys[part], arena.source[part]).stored == batch
                    assert ns.get_into(keys[part], arena.target[part]) == batch
                done += 2 * batch * BLOCK_BYTES
                at = (at + batch) % DISTINCT
                if at == 0 and kind == "store":
                    ns.remove(keys)
            assert kind == "memcpy" or np.array_equal(arena.target[0], arena.source[0]), "a wrong byte"
            pipe.send({"bytes": done, "commits": list(commits)})


def _time_commits(client: Client, commits: list[float]) -> None:
    """Notes how long each Commit takes from request to reply."""
    transport: Any = client._transport
    session = transport._session
    plain = session.commit

    def commit(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        answer = plain(*args, **kwargs)
        commits.append(time.perf_counter() - begun)
        return answer

    session.commit = commit
