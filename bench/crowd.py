"""Sixteen local clients at once, each a process: puts and get_intos of 256 KiB mixed, beside plain copies."""

import multiprocessing
import multiprocessing.connection
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.local import DISTINCT, Arena, echo_server, slab_memory
from bench.measure import Row
from kvstore_client import Client

CLIENTS = 16
BLOCK_BYTES = 256 << 10
PHASE_S = 3.0
PHASES = 3
QUICK_PHASE_S = 0.3
BATCHES = (1, 16)


def rows(endpoint: str, quick: bool) -> list[Row]:
    """Share of the memcpy bandwidth of sixteen such processes, and the 99th percentile of a commit."""
    with echo_server() as (_, path):
        return _with_clients(endpoint, path, QUICK_PHASE_S if quick else PHASE_S)


def _with_clients(endpoint: str, echo_path: Path, phase_s: float) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(CLIENTS):
        ours, theirs = context.Pipe()
        process = context.Process(target=_client, args=(theirs, endpoint, number, str(echo_path)), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            _receive(pipe)
        return [row for batch in BATCHES for row in _measured(pipes, batch, phase_s)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _measured(pipes: list[Any], batch: int, phase_s: float) -> list[Row]:
    shares, rates = [], []
    waits: dict[str, list[float]] = {"echo": [], "store": []}
    for _ in range(PHASES):
        plain = _phase(pipes, "memcpy", batch, phase_s)
        waits["echo"] += [wait for result in _phase(pipes, "echo", batch, phase_s) for wait in result["waits"]]
        store = _phase(pipes, "store", batch, phase_s)
        waits["store"] += [wait for result in store for wait in result["waits"]]
        shares.append(sum(r["bytes"] for r in store) / sum(r["bytes"] for r in plain))
        rates.append(sum(r["bytes"] for r in store) / phase_s / 1e9)
    p50, p99 = (float(np.percentile(waits["store"], q)) * 1e3 for q in (50, 99))
    echo99 = float(np.percentile(waits["echo"], 99)) * 1e3
    name = f"16 clients, {batch} x 256 KiB put and get_into"
    bandwidth = f"{statistics.median(rates):.1f} GB/s"
    return [
        Row(
            name,
            statistics.median(shares),
            0.7,
            True,
            "",
            bandwidth,
            "memcpy in 16 such processes",
            min(shares),
            max(shares),
        ),
        Row(
            f"{name}: commit p99",
            p99,
            5.0,
            False,
            " ms",
            f"median {p50:.2f} ms of {len(waits['store'])}",
            f"a bare echo among 16 such memcpys: p99 {echo99:.1f} ms",
        ),
    ]


def _receive(pipe: "multiprocessing.connection.Connection[Any, Any]") -> Any:
    assert pipe.poll(120), "a client of the benchmark does not answer"
    return pipe.recv()


def _phase(pipes: list[Any], kind: str, batch: int, phase_s: float) -> list[dict[str, Any]]:
    for pipe in pipes:
        pipe.send((kind, batch, time.monotonic() + 0.3, phase_s))
    return [_receive(pipe) for pipe in pipes]


def _client(pipe: Any, endpoint: str, number: int, echo_path: str) -> None:
    """One of the sixteen. Its plain copies go to the slots of its first put, in phases in which nobody stores."""
    arena = Arena(BLOCK_BYTES)
    with Client(endpoint, name=f"bench-{number}", timeout_s=30) as client, socket.socket(socket.AF_UNIX) as echo:
        echo.connect(echo_path)
        ns = client.raw_namespace("bench-crowd", BLOCK_BYTES)
        keys = [ns.key(b"%d-%d" % (number, i)) for i in range(DISTINCT)]
        waits: list[float] = []
        _time_commits(client, waits)
        ns.put(keys, arena.source)
        slab = slab_memory(client, keys, BLOCK_BYTES)
        ns.get_into(keys, arena.target)
        pipe.send("ready")
        while True:
            kind, batch, start, phase_s = pipe.recv()
            waits.clear()
            ns.remove(keys)
            while time.monotonic() < start:
                pass
            done, until, at = 0, start + phase_s, 0
            while time.monotonic() < until:
                part = slice(at, at + batch)
                if kind != "store":
                    for target, source in zip(slab[part], arena.source[part], strict=True):
                        np.copyto(target, source)
                    for target, source in zip(arena.target[part], slab[part], strict=True):
                        np.copyto(target, source)
                    if kind == "echo":
                        begun = time.perf_counter()
                        echo.sendall(b"x" * 100)
                        echo.recv(4096)
                        waits.append(time.perf_counter() - begun)
                else:
                    assert ns.put(keys[part], arena.source[part]).stored == batch
                    assert ns.get_into(keys[part], arena.target[part]) == batch
                done += 2 * batch * BLOCK_BYTES
                at = (at + batch) % DISTINCT
                if at == 0 and kind == "store":
                    ns.remove(keys)
            assert kind != "store" or np.array_equal(arena.target[0], arena.source[0]), "a wrong byte"
            pipe.send({"bytes": done, "waits": list(waits)})


def _time_commits(client: Client, waits: list[float]) -> None:
    """Notes how long each Commit is waited for once it is sent."""
    transport: Any = client._transport
    session = transport._session
    plain = session._reply

    def reply(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        answer = plain(*args, **kwargs)
        if answer.HasField("commit"):
            waits.append(time.perf_counter() - begun)
        return answer

    session._reply = reply
