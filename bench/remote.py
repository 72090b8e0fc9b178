"""One client by gRPC over a Unix socket against a bare grpcio stream of the same bytes: put, get, match.

The bare server is a process of its own, grpc.aio as kvstored's with the same options. Its
Put reads messages and drops them, its Get sends messages that were made beforehand: what is
left is what gRPC itself costs. Both are called through the SDK's own channel with messages
of the same size; the bare client neither makes messages nor copies or checks what comes.
"""

import asyncio
import multiprocessing
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bench.local import DISTINCT, Arena
from bench.measure import Row, Timed, absolute, in_turn, share, timed
from kvstore.server import grpc_listen
from kvstore.server import grpc_service as edge
from kvstore_client import Client
from kvstore_client.channel import Channel, Trust
from kvstored.v1 import chunks
from kvstored.v1 import kvstore_pb2 as pb

SHAPES = ((16, 2 << 20, 96), (1, 2 << 20, 480), (1, 256 << 10, 960))
"""Blocks of a call, their size, and the rounds that are taken."""

BAR = 0.8
CALL_S = 30.0
START_S = 30.0
_ASK = struct.Struct("<II")
"""Which block a bare Get begins with, and how many it is."""


def rows(endpoint: str, quick: bool) -> list[Row]:
    """put and get of 16 x 2 MiB have a bar; the others are for orientation."""
    taken = []
    with Client(endpoint, name="bench-grpc", timeout_s=CALL_S) as client:
        for count, size, rounds in SHAPES:
            with bare_server(size) as channel:
                taken += _shape_rows(client, channel, count, size, rounds, quick)
        taken.append(_match_row(client, quick))
    return taken


def _shape_rows(client: Client, bare: Channel, count: int, size: int, rounds: int, quick: bool) -> list[Row]:
    arena = Arena(size)
    ns = client.raw_namespace(f"bench-grpc-{size}", size)
    keys = [ns.key(b"%d" % i) for i in range(DISTINCT)]
    made = [_messages(block.data) for block in arena.source]
    assert ns.put(keys, arena.source).rejected == 0

    def place(number: int, turned: int = 0) -> slice:
        at = (number * count + turned) % DISTINCT
        return slice(at, at + count)

    def get(number: int) -> float:
        part = place(number)
        return timed(lambda: ns.get_into(keys[part], arena.target[part]))

    def put(number: int) -> float:
        part = place(number)
        if part.start == 0:
            ns.remove(keys)
        return timed(lambda: ns.put(keys[part], arena.source[part]))

    def bare_get(number: int) -> float:
        ask = _ASK.pack(place(number, DISTINCT // 2).start, count)
        return timed(lambda: sum(map(len, bare.get(ask, timeout=CALL_S))))

    def bare_put(number: int) -> float:
        part = place(number, DISTINCT // 2)
        return timed(lambda: bare.put(chain.from_iterable(made[part]), timeout=CALL_S))

    name = f"{count} x {size >> 20} MiB" if size >= 1 << 20 else f"{count} x {size >> 10} KiB"
    bar = BAR if count > 1 else None
    gets = in_turn({"get": get, "bare": bare_get}, rounds, 8, quick=quick)
    assert all(np.array_equal(*pair) for pair in zip(arena.target[:count], arena.source[:count], strict=True)), "wrong"
    puts = in_turn({"put": put, "bare": bare_put}, rounds, 8, quick=quick)
    ns.clear()
    said = "a bare grpcio stream"
    return [
        share(f"gRPC put, {name}, Unix socket", puts, "put", "bare", bar, said),
        share(f"gRPC get, {name}, Unix socket", gets, "get", "bare", bar, said),
    ]


def _match_row(client: Client, quick: bool) -> Row:
    ns = client.raw_namespace("bench-grpc-lookup", 4096)
    keys = [ns.key(b"%d" % i) for i in range(512)]
    ns.put(keys, np.zeros(512 * 4096, np.uint8))
    assert ns.match(keys).blocks == 512
    arms: dict[str, Timed] = {"match": lambda _: timed(lambda: ns.match(keys))}
    turns = in_turn(arms, 1000, 50, quick=quick)
    ns.clear()
    return absolute("gRPC match, 512 keys present, Unix socket", turns, "match", None)


def _messages(block: memoryview) -> list[bytes]:
    """A block's bytes as a client of kvstored cuts them, without checksums."""
    return [chunks.encode(block[at : at + chunks.CHUNK_BYTES]) for at in range(0, len(block), chunks.CHUNK_BYTES)]


@contextmanager
def bare_server(block_bytes: int) -> Iterator[Channel]:
    """A channel to a server that only streams, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "bare.sock"
        context = multiprocessing.get_context("spawn")
        ready = context.Event()
        process = context.Process(target=_serve_bare, args=(str(path), block_bytes, ready), daemon=True)
        process.start()
        try:
            assert ready.wait(START_S), "the bare server did not start"
            channel = Channel("grpc+unix", str(path), "bench", "", Trust())
            try:
                yield channel
            finally:
                channel.close()
        finally:
            process.kill()
            process.join()


def _serve_bare(path: str, block_bytes: int, ready: Any) -> None:
    import grpc

    blocks = [_messages(block.data) for block in Arena(block_bytes).source]

    async def put(_: Any, context: Any) -> bytes:
        while await context.read() is not grpc.aio.EOF:
            pass
        return pb.PutReply().SerializeToString()

    async def get(ask: bytes, context: Any) -> None:
        at, count = _ASK.unpack(ask)
        for message in chain.from_iterable(blocks[at : at + count]):
            await context.write(message)

    async def serve() -> None:
        server: Any = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", edge.MESSAGE_BYTES_MAX),
                ("grpc.max_concurrent_streams", edge.CONNECTION_STREAMS_MAX),
                ("grpc.http2.max_frame_size", edge.FRAME_BYTES),
            ]
        )
        handlers = {
            "Put": grpc.stream_unary_rpc_method_handler(put, None, None),
            "Get": grpc.unary_stream_rpc_method_handler(get, None, None),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(edge.SERVICE, handlers),))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        ready.set()
        await server.wait_for_termination()

    grpc_listen.keep_freed_memory()
    asyncio.run(serve())
