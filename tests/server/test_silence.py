"""Who connects and says nothing, more often than there are places, keeps nobody away: the session socket, gRPC."""

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore_client import Client
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.daemon.test_http import is_closed
from tests.nodes import block

BLOCK = 64 << 10
PLACES = 16
IDLE_S = 1.0
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The preface of a client and its settings: it may call now."""

FEW_PLACES = f"""
from kvstore.cli.entry import kvstored
from kvstore.server import grpc_service, listener, session

grpc_service.CONNECTIONS_MAX = {PLACES}
grpc_service.CONNECTION_IDLE_S = {IDLE_S}
listener.CLIENTS_MAX = {PLACES}
session.HELLO_WAIT_S = 600.0
kvstored()
"""


class SmallDaemon(RunningDaemon):
    """The daemon itself with few places for sessions, which silence alone ends never."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", FEW_PLACES, *super().command()[1:]]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallDaemon]:
    daemon = SmallDaemon(tmp_path, {"server.grpc": "127.0.0.1:0"})
    try:
        yield daemon
    finally:
        daemon.kill()


def test_the_longest_silence_makes_room_for_a_newcomer_and_sessions_stay(small: SmallDaemon) -> None:
    with contextlib.ExitStack() as over:

        def silent(count: int) -> list[socket.socket]:
            found = [over.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(count)]
            for sock in found:
                sock.settimeout(20)
                sock.connect(str(small.socket))
            return found

        before = over.enter_context(Client(small.endpoint))
        session = before.stats()["sessions"][0]["id"]
        first = silent(PLACES - 1)
        more = silent(5)
        eventually(lambda: all(map(is_closed, first[:5])), 5, "the oldest to make room")
        assert not any(map(is_closed, first[5:] + more))
        said = pb.Reply.FromString(first[0].recv(4096)[4:]).error
        assert (said.code, said.message) == (pb.RESOURCE_EXHAUSTED, f"no Hello yet, and {PLACES} clients are connected")
        for _ in range(3 * PLACES):
            silent(1)
            with Client(small.endpoint) as client:
                assert client.health().healthy
        assert before.health().healthy
        assert session in [row["id"] for row in before.stats()["sessions"]], "who has said Hello was left alone"


def test_grpc_connections_that_ask_for_nothing_are_ended_and_calls_under_way_are_not(small: SmallDaemon) -> None:
    """gRPC ends none for a newcomer, so theirs is a time; a client with a call under way keeps its connection."""
    address = small.grpc_endpoint.removeprefix("grpc://")
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as over, grpc.insecure_channel(address) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
        idle = over.enter_context(Client(small.grpc_endpoint))
        ns = idle.raw_namespace("idle", BLOCK)
        key = ns.key(b"before")
        assert ns.put([key], [block("before", BLOCK)]).stored == 1
        silent = [over.enter_context(socket.create_connection((host, int(port)), timeout=20)) for _ in range(PLACES)]
        for sock in silent:
            with contextlib.suppress(OSError):  # those above the number of places are closed at once
                sock.sendall(HTTP2)
        eventually(lambda: all(map(is_closed, silent)), IDLE_S + 20, "all of them to be ended")
        with Client(small.grpc_endpoint) as client:
            assert client.health().healthy
        assert ns.get([key]) == [block("before", BLOCK)], "a client that was idle for as long connects by itself"
        assert watching.is_active()
        watching.cancel()
