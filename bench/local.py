"""One local client against memcpy of the same blocks: get_into, put, match, acquire."""

import asyncio
import multiprocessing
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.measure import Row, Timed, absolute, in_turn, micro, share, timed
from kvstore_client import Client, Namespace

DISTINCT = 64
"""Blocks that both arms rotate over: a hot 2 MiB copies three times faster than memory allows."""

Blocks = list[NDArray[np.uint8]]


class Arena:
    """64 distinct blocks of private memory to copy from and 64 to copy to."""

    def __init__(self, block_bytes: int) -> None:
        size = DISTINCT * block_bytes
        random = np.random.default_rng(1)
        self.source = self._cut(random.integers(0, 256, size, np.uint8), block_bytes)
        self.target = self._cut(np.zeros(size, np.uint8) + 1, block_bytes)

    @staticmethod
    def _cut(whole: NDArray[np.uint8], block_bytes: int) -> Blocks:
        return [whole[i * block_bytes : (i + 1) * block_bytes] for i in range(DISTINCT)]


def slab_memory(client: Client, keys: Sequence[bytes], block_bytes: int) -> Blocks:
    """The very memory that these blocks lie in, so that both arms move the same bytes in the same places.

    Physical pages differ by 20 % in speed here from one allocation to the next. What the
    reference writes there is what is there already.
    """
    transport: Any = client._transport
    session = transport._session
    found = [session.index.find(key) for key in keys]
    return [session.mapping(segment).bytes[offset : offset + block_bytes] for _, _, segment, _, offset, _ in found]


def copy_all(targets: Blocks, sources: Blocks) -> None:
    """memcpy, block by block."""
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def get_rows(client: Client, quick: bool) -> list[Row]:
    """get_into of 16 and of one 2 MiB block, as shares of memcpy's speed."""
    arena = Arena(2 << 20)
    ns = client.raw_namespace("bench-get", 2 << 20)
    keys = [ns.key(b"%d" % i) for i in range(DISTINCT)]
    assert ns.put(keys, arena.source).rejected == 0
    slab = slab_memory(client, keys, 2 << 20)
    rows = [_get_row(ns, keys, arena, slab, count, bar, quick) for count, bar in ((16, 0.90), (1, 0.85))]
    for target, source in zip(arena.target, arena.source, strict=True):
        assert np.array_equal(target, source), "a wrong byte"
    ns.clear()
    return rows


def _get_row(ns: Namespace, keys: list[bytes], arena: Arena, slab: Blocks, count: int, bar: float, quick: bool) -> Row:
    """The arms are half a turn apart: neither finds what the other has just brought into the cache."""

    def get(number: int) -> float:
        at = number * count % DISTINCT
        return timed(lambda: ns.get_into(keys[at : at + count], arena.target[at : at + count]))

    def memcpy(number: int) -> float:
        at = (number * count + DISTINCT // 2) % DISTINCT
        return timed(lambda: copy_all(arena.target[at : at + count], slab[at : at + count]))

    turns = in_turn({"get": get, "memcpy": memcpy}, 2400 // count, 64, quick=quick)
    return share(f"get_into, {count} x 2 MiB", turns, "get", "memcpy", bar)


def put_rows(client: Client, quick: bool) -> list[Row]:
    """put of 16 x 2 MiB as a share of memcpy's speed; of one 256 KiB against an echo and a memcpy."""
    arena = Arena(2 << 20)
    ns = client.raw_namespace("bench-put", 2 << 20)
    keys = [ns.key(b"%d" % i) for i in range(DISTINCT)]

    assert ns.put(keys, arena.source).rejected == 0
    slab = slab_memory(client, keys, 2 << 20)

    def put(number: int) -> float:
        at = number * 16 % DISTINCT
        if at == 0:
            ns.remove(keys)
        part = slice(at, at + 16)
        return timed(lambda: ns.put(keys[part], arena.source[part]))

    def memcpy(number: int) -> float:
        at = (number * 16 + DISTINCT // 2) % DISTINCT
        return timed(lambda: copy_all(slab[at : at + 16], arena.source[at : at + 16]))

    turns = in_turn({"put": put, "memcpy": memcpy}, 160, 16, quick=quick)
    rows = [share("put, 16 x 2 MiB", turns, "put", "memcpy", 0.85)]
    ns.clear()
    with echo_server() as (echo, _):
        rows.append(_small_put(client, echo, quick))
    return rows


def _small_put(client: Client, echo: socket.socket, quick: bool) -> Row:
    arena = Arena(256 << 10)
    ns = client.raw_namespace("bench-small", 256 << 10)
    keys = [ns.key(b"%d" % i) for i in range(DISTINCT)]

    assert ns.put(keys, arena.source).rejected == 0
    slab = slab_memory(client, keys, 256 << 10)

    def put(number: int) -> float:
        i = number % DISTINCT
        if i == 0:
            ns.remove(keys)
        return timed(lambda: ns.put([keys[i]], [arena.source[i]]))

    def reference(number: int) -> float:
        i = (number + DISTINCT // 2) % DISTINCT

        def copy_and_echo() -> None:
            np.copyto(slab[i], arena.source[i])
            echo.sendall(b"x" * 100)
            echo.recv(4096)

        return timed(copy_and_echo)

    turns = in_turn({"put": put, "echo": reference}, 4000, 256, quick=quick)
    ns.clear()
    return Row(
        "put, one 256 KiB",
        turns["put"] / turns["echo"],
        1.6,
        False,
        "x",
        micro(turns["put"]),
        f"asyncio Unix socket echo + memcpy, {micro(turns['echo'])}",
        *turns.range("put", "echo"),
    )


def lookup_rows(client: Client, quick: bool) -> list[Row]:
    """match of 512 present keys; acquire and release of 64 blocks."""
    ns: Namespace = client.raw_namespace("bench-lookup", 4096)
    keys = [ns.key(b"%d" % i) for i in range(512)]
    ns.put(keys, np.zeros(512 * 4096, np.uint8))
    assert ns.match(keys).blocks == 512

    def hold() -> None:
        with ns.acquire(keys[:64]) as lease:
            assert len(lease.views) == 64

    arms: dict[str, Timed] = {"match": lambda _: timed(lambda: ns.match(keys)), "acquire": lambda _: timed(hold)}
    turns = in_turn(arms, 1000, 50, quick=quick)
    ns.clear()
    return [
        absolute("match, 512 keys present", turns, "match", 200),
        absolute("acquire + release, 64 blocks", turns, "acquire", 150),
    ]


@contextmanager
def echo_server() -> Iterator[tuple[socket.socket, Path]]:
    """A bare asyncio echo server in a process of its own: a client of it, and its path."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "echo.sock"
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        process = context.Process(target=_echo, args=(str(path), ready), daemon=True)
        process.start()
        try:
            assert ready.wait(30), "the echo server did not start"
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(path))
                yield sock, path
        finally:
            process.kill()
            process.join()


def _echo(path: str, ready: object) -> None:
    async def serve() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()

        server = await asyncio.start_unix_server(answer, path)
        ready.set()  # type: ignore[attr-defined]
        await server.serve_forever()

    asyncio.run(serve())
