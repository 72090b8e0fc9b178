"""Answers that nobody takes: they keep nobody else out of gRPC, and what they cost is bounded.

The client here is frames of HTTP/2 written by hand, with windows that let no byte of a message through.
"""

import asyncio
import struct

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.server import grpc_answers, grpc_service
from kvstore.server.grpc_answers import CALL_BYTES
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.kvstore_pb2_grpc import KVStoreStub
from tests.server.grpc_edge import WAIT_S, Scene, with_edge
from tests.server.test_grpc_bad_input import HEADERS, PREFACE, SETTINGS, frame
from tests.server.test_grpc_undelivered import ACK, DATA, END_HEADERS, END_STREAM, INITIAL_WINDOW_SIZE

OUR_HEALTH, CHECK = "/kvstored.v1.KVStore/Health", "/grpc.health.v1.Health/Check"
PLACES = 8


def text(said: str) -> bytes:
    """A string of HPACK, not compressed."""
    return bytes((len(said),)) + said.encode()


async def untaken_calls(scene: Scene, path: str, count: int, message: bytes = b"") -> asyncio.StreamWriter:
    """Makes so many calls on a connection of its own, which takes the answer of none."""
    host, _, port = scene.edge.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    # POST, http, :authority, :path; then each by its name, in no table.
    head = b"\x83\x86\x01" + text("localhost") + b"\x04" + text(path)
    for key, value in {"content-type": "application/grpc", "te": "trailers"}.items():
        head += b"\x00" + text(key) + text(value)
    writer.write(PREFACE + frame(SETTINGS, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)) + frame(SETTINGS, flags=ACK))
    for stream in range(1, 2 * count, 2):
        body = struct.pack(">BI", 0, len(message)) + message
        writer.write(frame(HEADERS, head, END_HEADERS, stream) + frame(DATA, body, END_STREAM, stream))
    return writer


async def others_are_answered(scene: Scene) -> None:
    """A newcomer is, by both kinds of health."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(scene.edge.address, options=options) as channel:
        for _ in range(2 * PLACES):
            assert (await KVStoreStub(channel).Health(pb.HealthRequest(), timeout=WAIT_S)).healthy
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)


def untaken_bytes(scene: Scene) -> int:
    return scene.edge._answers._bytes


async def until_untaken(scene: Scene, calls: int) -> None:
    answers = scene.edge._answers
    await scene.until(lambda: untaken_bytes(scene) >= calls * CALL_BYTES and not answers._at_work)


def health_calls(scene: Scene) -> tuple[int, int]:
    """Calls of Health that were answered, and those that were refused."""
    rows = [row for row in scene.stats().calls if (row.edge, row.call) == ("grpc", "Health")]
    return sum(sum(row.latencies) for row in rows), sum(row.errors for row in rows)


async def until_called(scene: Scene, calls: int) -> None:
    await scene.until(lambda: health_calls(scene)[0] >= calls)


async def gone(scene: Scene, *writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
    await scene.until(lambda: not scene.edge._answers._of)
    assert not untaken_bytes(scene)


@pytest.mark.parametrize("path", [OUR_HEALTH, CHECK, "/kvstored.v1.KVStore/Stats", "/kvstored.v1.KVStore/Match"])
def test_whoever_takes_no_answer_keeps_nobody_else_out(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each such call kept its place for ever: one connection without a token shut everybody out, health checks too."""
    monkeypatch.setattr(grpc_service, "RPCS_MAX", PLACES)

    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(64 << 10)
        message = pb.MatchRequest(namespace_id=number).SerializeToString() if path.endswith("Match") else b""
        writers = []
        for calls in range(PLACES, 5 * PLACES, PLACES):  # no more at once than there are places for calls at work
            writers.append(await untaken_calls(scene, path, PLACES, message))
            await until_untaken(scene, calls)
            await others_are_answered(scene)
        assert not scene.edge._running
        await gone(scene, *writers)

    with_edge(scenario)


def test_where_much_is_untaken_each_connection_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_answers, "CALLS_BYTES_MAX", 8 * CALL_BYTES)
    monkeypatch.setattr(grpc_answers, "SHARE_BYTES", 2 * CALL_BYTES)

    async def scenario(scene: Scene) -> None:
        writers = []
        for calls, untaken in ((20, 8), (40, 10), (60, 12)):
            writers.append(await untaken_calls(scene, OUR_HEALTH, 20))
            await until_called(scene, calls)
            assert health_calls(scene)[1] == calls - untaken
            assert untaken_bytes(scene) // CALL_BYTES == untaken
        await others_are_answered(scene)
        await gone(scene, *writers)

    with_edge(scenario)


def test_a_stream_that_is_cut_off_and_not_taken_counts_until_it_is_gone() -> None:
    """What it left behind, up to a chunk, stays in gRPC: without a count this grew with each such Get."""

    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(64 << 10)
        request = pb.GetRequest(namespace_id=number, keys=[bytes(32)]).SerializeToString()
        writer = await untaken_calls(scene, "/kvstored.v1.KVStore/Get", 3, request)
        await scene.until(lambda: untaken_bytes(scene) > 3 << 20)
        assert not scene.edge._running
        assert not scene.store.sessions
        await gone(scene, writer)

    with_edge(scenario, ttl_s=0.2)


def test_a_connection_that_gives_no_sign_of_life_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads nothing at all keeps even what no window holds back: refusals, and the ends of calls."""
    monkeypatch.setattr(grpc_service, "KEEPALIVE_S", 0.5)
    monkeypatch.setattr(grpc_service, "KEEPALIVE_WAIT_S", 0.5)

    async def scenario(scene: Scene) -> None:
        writer = await untaken_calls(scene, OUR_HEALTH, 5)  # and acknowledges no ping
        await until_untaken(scene, 5)
        await scene.until(lambda: not untaken_bytes(scene))
        await others_are_answered(scene)
        writer.close()

    with_edge(scenario)
