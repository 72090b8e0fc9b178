"""The client by gRPC where things fail: the daemon, the connection, the bytes, and this process by a fork."""

import concurrent.futures
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash

from kvstore_client import (
    Client,
    FailedPrecondition,
    InvalidArgument,
    KVStoreError,
    Namespace,
    Unavailable,
    channel,
)
from kvstored.v1 import PROTOCOL, chunks
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running

AWAY = "grpc://127.0.0.1:1"
BLOCK = 64 << 10


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(server__grpc="127.0.0.1:0") as daemon:
        yield daemon


def some(ns: Namespace, count: int, name: str = "k") -> tuple[list[bytes], list[bytes]]:
    """Keys and blocks."""
    return [ns.key(f"{name}{i}".encode()) for i in range(count)], [
        block((name, i), ns.block_bytes) for i in range(count)
    ]


# -- a daemon that is away, comes back, or does not answer


def assert_away(client: Client, ns: Namespace) -> None:
    keys, blocks = some(ns, 2, "away")
    assert ns.match(keys).blocks == 0
    assert ns.get_into(keys, np.empty((2, BLOCK), np.uint8)) == 0
    assert ns.get(keys) == []
    assert len(ns.acquire(keys, timeout_s=0.2)) == 0
    result = ns.put(keys, blocks)
    assert (result.stored, result.existing, result.rejected) == (0, 0, 2)
    assert isinstance(result.error, Unavailable)
    health = client.health()
    assert not health.reachable
    assert not health.healthy
    assert health.problems


def test_a_daemon_that_is_not_there_is_a_miss() -> None:
    with Client(AWAY, timeout_s=1.0) as client:
        ns = client.raw_namespace("x", BLOCK)
        began = time.monotonic()
        assert_away(client, ns)
        keys = [ns.key(b"k")]
        calls: list[Callable[[], Any]] = [
            lambda: ns.remove(keys),
            lambda: ns.pin(keys, 1),
            lambda: ns.unpin(keys),
            ns.clear,
            client.stats,
            lambda: ns.reserve(1),
        ]
        for call in calls:
            with pytest.raises(Unavailable, match=r"no kvstored answers on grpc://127\.0\.0\.1:1 "):
                call()
        assert time.monotonic() - began < 20.0


@pytest.fixture
def address() -> Iterator[str]:
    """Where a daemon can listen again: a port may be somebody else's by then."""
    with tempfile.TemporaryDirectory(prefix="kvstored-test-") as path:
        yield f"unix:{path}/grpc"


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_client_finds_a_daemon_that_was_restarted(
    start_daemon: Callable[..., RunningDaemon], address: str, end: str
) -> None:
    daemon = start_daemon(server__grpc=address)
    with Client(daemon.grpc_endpoint, timeout_s=2.0) as client:
        names = ("first", "second")
        spaces = {name: client.raw_namespace(name, BLOCK) for name in names}
        for ns in spaces.values():
            keys, blocks = some(ns, 2)
            assert ns.put(keys, blocks).stored == 2
        getattr(daemon, end)()
        assert_away(client, spaces["first"])
        daemon.restart()
        # Somebody else is first, so that numbers of namespaces mean others than before.
        with Client(daemon.grpc_endpoint) as other:
            theirs = other.raw_namespace("third", BLOCK)
            assert theirs.put(*some(theirs, 2)).stored == 2
        eventually(lambda: client.health().reachable, 10.0, "the client to be back")
        for name in reversed(names):
            ns = spaces[name]
            keys, blocks = some(ns, 2)
            assert ns.match(keys).blocks == 0
            assert ns.get(keys) == []
            assert ns.put(keys, blocks).stored == 2
            assert ns.get(keys) == blocks
        by_label = {n["label"]: n["blocks"] for n in client.stats()["namespaces"]}
        assert by_label == {"first": 2, "second": 2, "third": 2}


def test_a_namespace_opened_while_the_daemon_was_away_is_used_when_it_comes(
    start_daemon: Callable[..., RunningDaemon], address: str
) -> None:
    daemon = start_daemon(server__grpc=address)
    endpoint = daemon.grpc_endpoint
    daemon.kill()
    with Client(endpoint) as client:
        ns = client.raw_namespace("x", BLOCK)
        daemon.restart()
        keys, blocks = some(ns, 1)
        eventually(lambda: ns.put(keys, blocks).rejected == 0, 10.0, "the daemon to be reached")
        assert ns.get(keys) == blocks


def test_a_daemon_that_does_not_answer_costs_no_more_than_the_deadline(
    start_daemon: Callable[..., RunningDaemon],
) -> None:
    daemon = start_daemon(server__grpc="127.0.0.1:0")
    with Client(daemon.grpc_endpoint, timeout_s=1.0) as client:
        ns = client.raw_namespace("x", BLOCK)
        keys, blocks = some(ns, 4)
        assert ns.put(keys, blocks).stored == 4
        daemon.pause()
        out = np.full((4, BLOCK), 7, np.uint8)
        began = time.monotonic()
        assert ns.get_into(keys, out) == 0
        assert ns.match(keys).blocks == 0
        assert ns.put(some(ns, 2, "new")[0], blocks[:2]).rejected == 2
        assert not client.health().reachable
        assert time.monotonic() - began < 4 * 1.0 + 4.0
        assert (out == 7).all()
        daemon.resume()
        eventually(lambda: ns.get_into(keys, out) == 4, 10.0, "the daemon to answer")
        assert out.tobytes() == b"".join(blocks)


class Proxy:
    """Passes bytes between clients and a daemon, until `go_silent`: then those connections lose all of them."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("grpc://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"grpc://127.0.0.1:{self._listener.getsockname()[1]}"
        self._silent = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def go_silent(self) -> None:
        self._silent.set()
        self._silent = threading.Event()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                daemon = socket.create_connection(self._target)
                self._sockets += [client, daemon]
                for ends in ((client, daemon), (daemon, client)):
                    self._threads.append(threading.Thread(target=self._pass, args=(*ends, self._silent)))
                    self._threads[-1].start()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, silent: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not silent.is_set():
                    target.sendall(data)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(10)


def test_a_connection_that_died_without_a_word_is_given_up(
    node: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "KEEPALIVE_S", 1.0)
    monkeypatch.setattr(channel, "KEEPALIVE_TIMEOUT_S", 0.5)
    with Proxy(node.grpc_endpoint) as proxy, Client(proxy.endpoint, timeout_s=1.0) as client:
        assert client.health().reachable
        proxy.go_silent()
        assert not client.health().reachable
        eventually(lambda: client.health().reachable, 10.0, "a new connection")


# -- another protocol, another server, a broken wire


def test_another_protocol_is_refused_when_the_client_is_made(
    node: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PROTOCOL", PROTOCOL + 1)
    with pytest.raises(FailedPrecondition, match=f"protocol {PROTOCOL + 1}, this daemon .* speaks"):
        Client(node.grpc_endpoint)


@pytest.mark.parametrize("options", [{"tenant": "no such/name"}, {"tenant": "späße"}, {"name": "line\nbreak"}])
def test_names_that_cannot_travel_are_refused(node: RunningDaemon, options: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument), Client(node.grpc_endpoint, **options) as client:  # type: ignore[arg-type]
        client.raw_namespace("x", BLOCK)


class FakeDaemon:
    """A gRPC server that answers Get with given messages, and nothing else as it should."""

    def __init__(self, messages: list[bytes], *, service: str = "kvstored.v1.KVStore") -> None:
        def get(_: bytes, __: Any) -> Iterator[bytes]:
            yield from messages

        unary = {"Health": pb.HealthReply(healthy=True), "OpenNamespace": pb.OpenNamespaceReply(namespace_id=1)}
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(lambda _, __, reply=reply: reply.SerializeToString())
            for name, reply in unary.items()
        }
        handlers["Get"] = grpc.unary_stream_rpc_method_handler(get)
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self.endpoint = f"grpc://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> "FakeDaemon":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()


def good(bytes_: bytes) -> list[bytes]:
    """A block in two chunks."""
    half, checksum = len(bytes_) // 2, xxhash.xxh3_64_intdigest(bytes_)
    return [chunks.encode(memoryview(bytes_)[:half]), chunks.encode(memoryview(bytes_)[half:], checksum)]


COUNT = pb.GetChunk(blocks=3).SerializeToString()
FIRST, SECOND = block("first", BLOCK), block("second", BLOCK)


@pytest.mark.parametrize(
    ("messages", "blocks"),
    [
        ([], 0),
        ([COUNT], 0),
        ([COUNT, *good(FIRST)], 1),
        ([COUNT, *good(FIRST), good(SECOND)[0]], 1),
        ([COUNT, *good(FIRST), good(SECOND)[0], good(FIRST)[1]], 1),
        ([COUNT, *good(FIRST), *good(SECOND[:-1])], 1),
        ([COUNT, *good(FIRST), *good(SECOND + b"x")], 1),
        ([COUNT, *good(FIRST), good(SECOND)[1]], 1),
        ([COUNT, *good(FIRST), good(SECOND)[0], good(SECOND)[0], good(SECOND)[1]], 1),
        ([COUNT, *good(FIRST), chunks.encode(memoryview(SECOND)), *good(SECOND)], 1),
        ([COUNT, *good(FIRST), pb.GetChunk(checksum=7).SerializeToString(), *good(SECOND)], 1),
        ([COUNT, *good(FIRST), pb.GetChunk(blocks=1, data=SECOND[:-1]).SerializeToString()], 1),
        ([COUNT, *good(FIRST), b"\xff\xff", *good(SECOND)], 1),
        ([COUNT, *good(FIRST), b"", *good(SECOND)], 1),
        ([COUNT, *good(FIRST), COUNT, *good(SECOND)], 1),
        ([COUNT, *good(FIRST) * 9], 3),
        # Unknown fields, a checksum ahead of its bytes, and twice: protobuf's to read, and the last counts.
        ([COUNT, good(FIRST)[0] + b"\x78\x01", b"\x19" + bytes(8) + good(FIRST)[1]], 1),
        ([COUNT, good(FIRST)[0], good(FIRST)[1] + b"\x19" + bytes(8)], 0),
    ],
)
def test_only_whole_and_right_blocks_count(messages: list[bytes], blocks: int) -> None:
    with FakeDaemon(messages) as fake, Client(fake.endpoint) as client:
        ns = client.raw_namespace("x", BLOCK)
        out = np.full((3, BLOCK), 7, np.uint8)
        keys = [ns.key(b"%d" % i) for i in range(3)]
        assert ns.get_into(keys, out) == blocks
        assert all(row.tobytes() == FIRST for row in out[:blocks])
        assert (out[blocks + 1 :] == 7).all()  # of the one behind them, bytes may have come
        with ns.acquire(keys) as lease:
            assert [bytes(view) for view in lease.views] == [FIRST] * blocks
            assert all(view.readonly for view in lease.views)


def test_another_service_is_told_apart() -> None:
    with (
        FakeDaemon([], service="another.Service") as fake,
        pytest.raises(FailedPrecondition, match="is not a kvstored"),
    ):
        Client(fake.endpoint)


# -- the end of a client


def test_a_closed_client_refuses(node: RunningDaemon) -> None:
    client = Client(node.grpc_endpoint)
    ns = client.raw_namespace("x", BLOCK)
    client.close()
    client.close()
    calls: list[Callable[[], Any]] = [
        lambda: ns.match([ns.key(b"k")]),
        lambda: ns.get([ns.key(b"k")]),
        lambda: ns.put([ns.key(b"k")], bytes(BLOCK)),
        lambda: ns.reserve(1),
        client.stats,
        client.health,
    ]
    for call in calls:
        with pytest.raises(FailedPrecondition, match="the client is closed"):
            call()


def test_closing_ends_the_calls_of_other_threads(start_daemon: Callable[..., RunningDaemon]) -> None:
    daemon = start_daemon(server__grpc="127.0.0.1:0")
    client = Client(daemon.grpc_endpoint, timeout_s=30.0)
    ns = client.raw_namespace("x", BLOCK)
    daemon.pause()
    errors: list[KVStoreError] = []
    begun = threading.Event()

    def call() -> None:
        begun.set()
        with pytest.raises(KVStoreError) as raised:
            ns.remove([ns.key(b"k")])
        errors.append(raised.value)

    thread = threading.Thread(target=call)
    thread.start()
    begun.wait(10)
    client.close()
    thread.join(25)
    assert not thread.is_alive()
    assert isinstance(errors[0], FailedPrecondition)


FORK = """
    import os, sys, threading
    from kvstore_client import Client, FailedPrecondition
    client = Client(sys.argv[1])
    ns = client.raw_namespace("fork", 65536)
    key = ns.key(b"k")
    assert ns.put([key], bytes(65536)).rejected == 0
    if sys.argv[2] == "busy":
        stop = threading.Event()
        def read():
            while not stop.is_set():
                assert ns.get([key]) == [bytes(65536)]
        reader = threading.Thread(target=read)
        reader.start()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        for call in (lambda: ns.match([key]), lambda: ns.get([key]), lambda: ns.put([key], bytes(65536)),
                     client.stats, client.health, lambda: ns.reserve(1), lambda: ns.acquire([key])):
            try:
                call()
            except FailedPrecondition as e:
                assert "made before a fork" in str(e), e
            else:
                raise AssertionError("not refused")
        client.close()
        try:
            with Client(sys.argv[1]) as mine:
                assert mine.raw_namespace("fork", 65536).get([key]) == [bytes(65536)]
                print("child: a new client works")
        except FailedPrecondition as e:
            assert "in the middle of a gRPC call" in str(e), e
            assert sys.argv[2] == "busy"
        print("child: done")
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(20):
        assert ns.get([key]) == [bytes(65536)]
    if sys.argv[2] == "busy":
        stop.set()
        reader.join(60)
    client.close()
    print("parent: done")
"""


@pytest.mark.parametrize("when", ["idle", "busy"])
def test_a_forked_child_refuses_and_the_parent_goes_on(node: RunningDaemon, when: str) -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(FORK), node.grpc_endpoint, when],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONWARNINGS": "default"},
        )
        said = done.stdout.split("\n")
        assert {"child: done", "parent: done"} <= set(said), done.stdout + done.stderr
        if when == "idle":
            assert "child: a new client works" in said
