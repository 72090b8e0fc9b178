"""The client by gRPC: means the same as by shared memory, whatever becomes of the daemon or the wire."""

import concurrent.futures
import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore_client import (
    Client,
    FailedPrecondition,
    Hint,
    InvalidArgument,
    KVStoreError,
    Namespace,
    ResourceExhausted,
    Unavailable,
    channel,
    remote,
)
from kvstored.v1 import KEYS_MAX, PROTOCOL, chunks
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running

BLOCK = 64 << 10
CHECKOUT = Path(__file__).parents[2]
AWAY = "grpc://127.0.0.1:1"


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(server__grpc="127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture
def client(node: RunningDaemon) -> Iterator[Client]:
    with Client(node.grpc_endpoint, name="remote") as client:
        yield client


@pytest.fixture
def ns(client: Client, request: pytest.FixtureRequest) -> Namespace:
    return client.raw_namespace(request.node.nodeid, BLOCK)


def some(ns: Namespace, count: int, name: str = "k") -> tuple[list[bytes], list[bytes]]:
    """Keys and blocks."""
    return [ns.key(f"{name}{i}".encode()) for i in range(count)], [
        block((name, i), ns.block_bytes) for i in range(count)
    ]


# -- the same calls, the same meaning


def test_what_one_client_puts_any_client_gets(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    keys, blocks = some(ns, 5)
    assert ns.put(keys, blocks).stored == 5
    assert ns.match([*keys, ns.key(b"absent")]).blocks == 5
    assert ns.match(keys).tiers == ["host"] * 5
    assert ns.get(keys) == blocks
    with Client(node.endpoint) as local:
        theirs = local.raw_namespace(ns_name(ns, client), BLOCK)
        assert theirs.digest == ns.digest
        assert theirs.get(keys) == blocks
        more, new = some(ns, 2, "local")
        assert theirs.put(more, new).stored == 2
    assert ns.get(more) == new


def ns_name(ns: Namespace, client: Client) -> str:
    """The raw name of a namespace, which is its label."""
    digest = ns.digest.hex()
    return str(next(n["label"] for n in client.stats()["namespaces"] if n["digest"] == digest))


def test_reads_take_what_leads_and_leave_the_rest(ns: Namespace) -> None:
    keys, blocks = some(ns, 6)
    ns.put(keys[:3], blocks[:3])
    ns.put(keys[:5], [blocks[4]], start=4)
    assert ns.match(keys).blocks == 3
    out = np.full((6, BLOCK), 7, np.uint8)
    assert ns.get_into(keys, out) == 3
    assert [row.tobytes() for row in out[:3]] == blocks[:3]
    assert (out[3:] == 7).all()
    assert ns.get_into(keys, out[1:], start=1) == 2
    assert ns.get_into(keys, out[4:], start=4) == 1
    assert out[4].tobytes() == blocks[4]
    assert ns.get_into([], []) == 0
    assert ns.get_into(keys, [bytearray(BLOCK) for _ in keys]) == 3


@pytest.mark.parametrize("size_bytes", [1, chunks.CHUNK_BYTES + 1, 5 << 20])
def test_any_size_of_block_comes_back_exact(client: Client, size_bytes: int) -> None:
    ns = client.raw_namespace("sizes", size_bytes)
    keys, blocks = some(ns, 2, str(size_bytes))
    assert ns.put(keys, blocks).stored == 2
    assert ns.get(keys) == blocks


def test_large_puts_and_gets_are_several_streams(ns: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 2 * BLOCK)
    keys, blocks = some(ns, 5)
    assert ns.put(keys, blocks).stored == 5
    assert ns.put(keys, blocks).existing == 5
    out = np.empty((6, BLOCK), np.uint8)
    assert ns.get_into([*keys, ns.key(b"absent")], out) == 5
    assert [row.tobytes() for row in out[:5]] == blocks
    assert len(ns.acquire(keys)) == 5


def test_more_keys_than_a_message_takes(client: Client) -> None:
    ns = client.raw_namespace("many", 64)
    count = KEYS_MAX + 10
    keys, blocks = some(ns, count)
    assert ns.put(keys, blocks).stored == count
    assert ns.match(keys).blocks == count
    out = np.empty((count, 64), np.uint8)
    assert ns.get_into(keys, out) == count
    assert out.tobytes() == b"".join(blocks)
    assert ns.pin(keys, 5) == count
    assert ns.unpin(keys) == count
    assert ns.remove(keys) == count


def test_a_lease_is_private_and_outlives_the_block(ns: Namespace, client: Client) -> None:
    keys, blocks = some(ns, 3)
    ns.put(keys, blocks)
    with ns.acquire([*keys, ns.key(b"absent")]) as lease:
        assert len(lease) == 3
        kept = lease.numpy(1)
        assert ns.remove(keys) == 3
        assert [bytes(view) for view in lease.views] == blocks
        assert lease.views[0].readonly
    assert kept.tobytes() == blocks[1]
    with pytest.raises(FailedPrecondition):
        lease.views  # noqa: B018
    assert not client.stats()["sessions"]
    assert len(ns.acquire(keys)) == 0


def test_reserved_slots_are_written_in_place_and_committed(ns: Namespace) -> None:
    keys, blocks = some(ns, 3)
    with ns.reserve(3) as slots:
        for view, bytes_ in zip(slots.views, blocks, strict=True):
            view[:] = bytes_
        assert ns.match(keys).blocks == 0
        assert slots.commit(keys[:2]).stored == 2
    assert ns.get(keys) == blocks[:2]
    with ns.reserve(1) as slots:
        slots.views[0][:] = blocks[2]
    assert ns.match(keys).blocks == 2


def test_management_and_hints(ns: Namespace, client: Client) -> None:
    keys, blocks = some(ns, 4)
    ns.put(keys, blocks, hint=Hint(conversation="c", priority=1, ttl_s=3600))
    assert ns.pin(keys, 60) == 4
    assert ns.unpin(keys[:1]) == 1
    assert ns.remove(keys[3:]) == 1
    assert ns.clear() == 3
    assert client.health().healthy
    with pytest.raises(InvalidArgument, match="ttl_s"):
        ns.pin(keys, 0)
    with pytest.raises(FailedPrecondition, match="durable=True needs an SSD tier"):
        ns.put(keys, blocks, durable=True)
    assert ns.prefetch(keys).wait() == 0


def test_reads_are_counted_exactly_and_make_blocks_recent(ns: Namespace, client: Client) -> None:
    keys, blocks = some(ns, 10)
    ns.put(keys, blocks)
    before = client.stats()["counters"]
    for _ in range(6):
        assert ns.get_into(keys, np.empty((10, BLOCK), np.uint8)) == 10
    for i in range(40):
        assert not ns.get_into([ns.key(b"absent%d" % i)], np.empty(BLOCK, np.uint8))
    after = client.stats()["counters"]
    assert {name: after[name] - before[name] for name in ("hits", "misses", "hit_bytes", "stored")} == {
        "hits": 60,
        "misses": 40,
        "hit_bytes": 60 * BLOCK,
        "stored": 0,
    }
    assert client.stats()["counters"] == after


def test_what_was_read_is_told_at_close(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    keys, blocks = some(ns, 2)
    ns.put(keys, blocks)
    before = client.stats()["counters"]["hits"]
    with Client(node.grpc_endpoint) as other:
        other.raw_namespace(ns_name(ns, client), BLOCK).get(keys)
    assert client.stats()["counters"]["hits"] == before + 2


def test_threads_share_a_client(ns: Namespace) -> None:
    def work(who: int) -> bool:
        keys, blocks = some(ns, 4, f"thread{who}-")
        return all((ns.put(keys, blocks).rejected == 0, ns.get(keys) == blocks, ns.remove(keys) == 4) for _ in range(5))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_a_full_store_rejects_what_finds_no_room(start_daemon: Callable[..., RunningDaemon]) -> None:
    daemon = start_daemon(server__grpc="127.0.0.1:0", host__size="4MiB", evict__high="1.0", evict__low="0.99")
    with Client(daemon.grpc_endpoint) as client:
        ns = client.raw_namespace("full", BLOCK)
        keys, blocks = some(ns, 64)
        assert ns.put(keys, blocks).stored == 64
        ns.pin(keys, 60)
        more, new = some(ns, 3, "more")
        began = time.monotonic()
        with pytest.raises(ResourceExhausted, match="pinned"):
            ns.put(more, new)
        assert time.monotonic() - began < 1.0
        result = ns.put([keys[0], *more], [blocks[0], *new])
        assert (result.stored, result.existing, result.rejected) == (0, 1, 3)
        assert isinstance(result.error, ResourceExhausted)
        with ns.reserve(1) as slots, pytest.raises(ResourceExhausted):
            slots.commit(more[:1])
        ns.unpin(keys)
        assert ns.put(more, new).stored == 3


def test_a_read_only_client_writes_nothing(node: RunningDaemon, ns: Namespace, client: Client) -> None:
    keys, blocks = some(ns, 1)
    ns.put(keys, blocks)
    with Client(node.grpc_endpoint, read_only=True) as reader:
        theirs = reader.raw_namespace(ns_name(ns, client), BLOCK)
        assert theirs.get(keys) == blocks
        for write in (lambda: theirs.put(keys, blocks), lambda: theirs.reserve(1)):
            with pytest.raises(FailedPrecondition, match="read-only"):
                write()


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
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_client_finds_a_daemon_that_was_restarted(start_daemon: Callable[..., RunningDaemon], end: str) -> None:
    daemon = start_daemon(server__grpc="127.0.0.1:0")
    address = daemon.grpc_endpoint.removeprefix("grpc://")
    with Client(daemon.grpc_endpoint, timeout_s=2.0) as client:
        names = ("first", "second")
        spaces = {name: client.raw_namespace(name, BLOCK) for name in names}
        for ns in spaces.values():
            keys, blocks = some(ns, 2)
            assert ns.put(keys, blocks).stored == 2
        getattr(daemon, end)()
        assert_away(client, spaces["first"])
        daemon.restart(server__grpc=address)
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
    start_daemon: Callable[..., RunningDaemon],
) -> None:
    daemon = start_daemon(server__grpc="127.0.0.1:0")
    endpoint = daemon.grpc_endpoint
    daemon.kill()
    with Client(endpoint) as client:
        ns = client.raw_namespace("x", BLOCK)
        daemon.restart(server__grpc=endpoint.removeprefix("grpc://"))
        keys, blocks = some(ns, 1)
        eventually(lambda: ns.put(keys, blocks).rejected == 0, 10.0, "the daemon to be reached")
        assert ns.get(keys) == blocks


def test_a_daemon_that_does_not_answer_costs_no_more_than_the_deadline(
    start_daemon: Callable[..., RunningDaemon],
) -> None:
    daemon = start_daemon(server__grpc="127.0.0.1:0")
    with Client(daemon.grpc_endpoint, timeout_s=0.3) as client:
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
        assert time.monotonic() - began < 4 * 0.3 + 1.0
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
    with Proxy(node.grpc_endpoint) as proxy, Client(proxy.endpoint, timeout_s=0.3) as client:
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
    return list(chunks.block_messages(memoryview(bytes_)))


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
        ([COUNT, *good(FIRST), b"\xff\xff", *good(SECOND)], 1),
        ([COUNT, *good(FIRST), b"", *good(SECOND)], 1),
        ([COUNT, *good(FIRST), COUNT, *good(SECOND)], 1),
        ([COUNT, *good(FIRST) * 9], 3),
    ],
)
def test_only_whole_and_right_blocks_reach_the_callers_memory(messages: list[bytes], blocks: int) -> None:
    with FakeDaemon(messages) as fake, Client(fake.endpoint) as client:
        ns = client.raw_namespace("x", BLOCK)
        out = np.full((3, BLOCK), 7, np.uint8)
        keys = [ns.key(b"%d" % i) for i in range(3)]
        assert ns.get_into(keys, out) == blocks
        assert all(row.tobytes() == FIRST for row in out[:blocks])
        assert (out[blocks:] == 7).all()
        assert len(ns.acquire(keys)) == blocks


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
    thread.join(10)
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
        reader.join(10)
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
