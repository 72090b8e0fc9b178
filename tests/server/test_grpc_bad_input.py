"""gRPC met by what is wrong, broken or hostile: typed errors, bounded memory, nothing held, and everybody else served.

`throughout` asks for health on a connection of its own all the while; every answer must come within half a second.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from kvstore.server import grpc_service
from kvstore.server.grpc_service import STREAMS_MAX
from kvstored.v1 import KEYS_MAX
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.kvstore_pb2_grpc import KVStoreStub
from tests.conftest import RunningDaemon, eventually
from tests.nodes import Watch, anonymous_bytes, block, running
from tests.server.grpc_edge import WAIT_S, Scene, block_of, key_of, put_messages, refused, with_edge
from tests.server.test_auth import REQUESTS
from tests.stopwatch import Stopwatch

BLOCK = 64 << 10
ANSWERS_WITHIN_S = 1.0
SERVICE = "/kvstored.v1.KVStore/"
Code = grpc.StatusCode
TYPED = {
    *(Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED),
    *(Code.UNAUTHENTICATED, Code.DEADLINE_EXCEEDED),
}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST, SETTINGS, PING = 1, 3, 4, 6
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(host__size="96MiB", server__grpc="127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture
def channel(node: RunningDaemon) -> Iterator[Any]:
    with grpc.insecure_channel(address_of(node)) as channel:
        yield channel


def address_of(node: RunningDaemon) -> str:
    return node.grpc_endpoint.removeprefix("grpc://")


class Asker:
    """Asks for health again and again, on a connection of its own."""

    def __init__(self, node: RunningDaemon) -> None:
        self.slowest, self.answers = 0.0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(address_of(node),))
        self._thread.start()

    def _run(self, address: str) -> None:
        with grpc.insecure_channel(address, options=OWN_CONNECTION) as channel:
            stub = KVStoreStub(channel)
            stub.Health(pb.HealthRequest(), timeout=30)
            while not self._over.wait(0.005):
                watch = Stopwatch()
                assert stub.Health(pb.HealthRequest(), timeout=30).healthy
                self.slowest = max(self.slowest, watch.seconds)
                self.answers += 1

    def close(self) -> None:
        self._over.set()
        self._thread.join(20)


@pytest.fixture(scope="module")
def asker(node: RunningDaemon) -> Iterator[Asker]:
    with contextlib.closing(Asker(node)) as asker:
        yield asker


@pytest.fixture(scope="module")
def watch(node: RunningDaemon) -> Iterator[Watch]:
    watch = Watch(node)
    yield watch
    watch.client.close()


@pytest.fixture(autouse=True)
def throughout(request: pytest.FixtureRequest) -> Iterator[None]:
    """Around every test on the daemon: health in time all the while, and nothing held afterwards."""
    if "node" not in request.fixturenames:
        yield
        return
    asker, watch = request.getfixturevalue("asker"), request.getfixturevalue("watch")
    asker.slowest = 0.0
    yield
    answers = asker.answers
    eventually(lambda: asker.answers > answers + 1, what="one more answer that was begun after the test")
    assert asker.slowest < ANSWERS_WITHIN_S, f"health took {asker.slowest:.3f} s meanwhile"
    eventually(lambda: len(watch.state()["sessions"]) == 1, what="the sessions of calls to be gone")
    held = watch.state()["totals"]
    assert not any(held[what] for what in ("granted", "quarantined", "leased", "doomed")), held
    assert not watch.state()["problems"]


def code_of(call: Callable[[], Any]) -> Any:
    try:
        call()
    except grpc.RpcError as e:
        return e.code()
    return Code.OK


def raw(channel: Any, name: str) -> Callable[..., Any]:
    """A call of bytes; its answer is read to the end."""
    if name == "Put":
        return lambda *messages, **more: channel.stream_unary(SERVICE + name)(iter(messages), **more)
    if name == "Get":
        return lambda message, **more: list(channel.unary_stream(SERVICE + name)(message, **more))
    call: Callable[..., Any] = channel.unary_unary(SERVICE + name)
    return call


def opened(channel: Any) -> int:
    request = pb.OpenNamespaceRequest(digest=block("bad input", 32), block_bytes=BLOCK, label="bad input")
    number: int = KVStoreStub(channel).OpenNamespace(request, timeout=10).namespace_id
    return number


def request_of(name: str, number: int) -> Any:
    """A request of that call that names the namespace, where it names one."""
    request = type(REQUESTS[name])()
    request.CopyFrom(REQUESTS[name])
    if "namespace_id" in request.DESCRIPTOR.fields_by_name:
        request.namespace_id = number
    return request


# -- messages


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", REQUESTS)
def test_random_bytes_are_an_error_of_a_known_kind(node: RunningDaemon, channel: Any, name: str, seed: int) -> None:
    print(f"seed {seed}")
    chance, call = random.Random(f"{name} {seed}"), raw(channel, name)
    for size in (0, 1, 2, 7, 100, 5000, 200_000):
        message = chance.randbytes(size)
        assert code_of(lambda message=message: call(message, timeout=10)) in TYPED  # type: ignore[misc]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_message_cut_short_or_changed_is_an_error_or_another_message(
    node: RunningDaemon, channel: Any, name: str
) -> None:
    number, chance, call = opened(channel), random.Random(name), raw(channel, name)
    request = put_messages(number, [block("cut", 32)], [])[0] if name == "Put" else request_of(name, number)
    whole = request.SerializeToString()
    wrong = [whole[:end] for end in range(len(whole))]
    for _ in range(20 if whole else 0):
        changed = bytearray(whole)
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        wrong.append(bytes(changed))
    for message in wrong:
        assert code_of(lambda message=message: call(message, timeout=10)) in TYPED  # type: ignore[misc]


@pytest.mark.parametrize("name", ["OpenNamespace", "Match", "Health", "Stats", "Touch", "Get"])
def test_fields_of_another_release_are_ignored(node: RunningDaemon, channel: Any, name: str) -> None:
    request = request_of(name, opened(channel))
    if name == "OpenNamespace":
        request.digest = block("another release", 32)
    unknown = b"\xfa\x3f\x03abc\xf8\x3f\x01\xfd\x3f\x00\x00\x00\x00"
    assert code_of(lambda: raw(channel, name)(request.SerializeToString() + unknown, timeout=10)) is Code.OK


@pytest.mark.parametrize(
    "method",
    [
        *("/kvstored.v1.KVStore/Format", "/kvstored.v1.KVStore/", "/kvstored.v2.KVStore/Health", "/x", "/"),
        *("/kvstored.v1.KVStore/health", "/grpc.health.v1.Health/List", "/" + "x" * 2000),
    ],
)
def test_a_method_that_there_is_not_is_unimplemented(node: RunningDaemon, channel: Any, method: str) -> None:
    with refused(Code.UNIMPLEMENTED):
        channel.unary_unary(method)(b"", timeout=10)
    with refused(Code.UNIMPLEMENTED):
        channel.stream_unary(method)(iter([b"", b""]), timeout=10)


@pytest.mark.parametrize("name", ["Match", "Touch", "Put", "Get", "Evict"])
def test_a_message_above_the_limit_is_refused_before_it_is_parsed(node: RunningDaemon, channel: Any, name: str) -> None:
    before = anonymous_bytes(node.pid)
    message = bytes(grpc_service.MESSAGE_BYTES_MAX + 1)
    for _ in range(2):
        assert code_of(lambda: raw(channel, name)(message, timeout=10)) is Code.RESOURCE_EXHAUSTED
    assert anonymous_bytes(node.pid) - before < 64 << 20


def test_the_largest_message_of_many_keys_is_an_answer_or_an_error_in_time(node: RunningDaemon, channel: Any) -> None:
    number, stub = opened(channel), KVStoreStub(channel)
    keys = [block(i, 32) for i in range(KEYS_MAX)]
    for kind in (pb.MatchRequest, pb.RemoveRequest, pb.UnpinRequest):
        call = getattr(stub, kind.DESCRIPTOR.name.removesuffix("Request"))
        call(kind(namespace_id=number, keys=keys), timeout=10)
        with refused(Code.INVALID_ARGUMENT, "split the call"):
            call(kind(namespace_id=number, keys=[*keys, *keys]), timeout=10)


@pytest.mark.parametrize("size", [100, 7000, 100_000])
def test_metadata_that_is_too_much_or_nonsense_is_an_error(node: RunningDaemon, channel: Any, size: int) -> None:
    match = KVStoreStub(channel).Match
    for key in ("kvstored-tenant", "kvstored-client", "kvstored-protocol", "kvstored-epoch", "kvstored-session"):
        metadata = ((key, "x" * size),)
        code = code_of(lambda metadata=metadata: match(pb.MatchRequest(), metadata=metadata, timeout=10))  # type: ignore[misc]
        assert code in TYPED - {Code.OK}, (key, code)


# -- deadlines and cancels


@pytest.mark.parametrize("name", REQUESTS)
def test_a_deadline_of_zero_or_less_ends_at_once_and_leaves_nothing(
    node: RunningDaemon, channel: Any, name: str
) -> None:
    call, message = raw(channel, name), REQUESTS[name].SerializeToString()
    watch = Stopwatch()
    assert code_of(lambda: call(message, timeout=-1)) is Code.DEADLINE_EXCEEDED
    for timeout in (0, 1e-9, 1e-4, 1e-3):
        # A machine may be faster than its clock is fine.
        assert code_of(lambda timeout=timeout: call(message, timeout=timeout)) in TYPED  # type: ignore[misc]
    assert watch.seconds < ANSWERS_WITHIN_S


def test_a_get_cancelled_after_any_of_its_messages_leaves_nothing() -> None:
    """After the count, in the middle of a block, between blocks, before the last message."""

    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(2 << 20)
        keys, blocks = [key_of(i) for i in range(12)], [block_of(i, 2 << 20) for i in range(12)]
        await scene.put(number, keys, blocks)
        for count in (*range(8), 23, 24):
            call = scene.stub.Get(pb.GetRequest(namespace_id=number, keys=keys), timeout=10.0)
            for _ in range(count):
                assert await call.read() is not grpc.aio.EOF
            call.cancel()
            await scene.idle()
        assert await scene.get(number, keys) == (12, blocks)
        assert not scene.node.internal_errors

    with_edge(scenario)


def test_small_calls_cancelled_at_once_leave_nothing(node: RunningDaemon, channel: Any) -> None:
    number, stub = opened(channel), KVStoreStub(channel)
    for _ in range(100):
        stub.Clear.future(pb.ClearRequest(namespace_id=number), timeout=10).cancel()
        stub.Match.future(pb.MatchRequest(namespace_id=number), timeout=10).cancel()


# -- clients that do not read, or only connect


def test_clients_that_stop_reading_cost_a_bounded_amount_of_memory(
    node: RunningDaemon, channel: Any, watch: Watch
) -> None:
    size, stub = 1 << 20, KVStoreStub(channel)
    request = pb.OpenNamespaceRequest(digest=block("unread", 32), block_bytes=size)
    number = stub.OpenNamespace(request, timeout=10).namespace_id
    keys = [block(("unread", i), 32) for i in range(32)]
    stub.Put(iter(put_messages(number, keys, [bytes(size)] * len(keys))), timeout=20)
    get = pb.GetRequest(namespace_id=number, keys=keys)
    assert sum(len(chunk.data) for chunk in stub.Get(get, timeout=20)) == size * len(keys)
    before = anonymous_bytes(node.pid)
    with contextlib.ExitStack() as stack:
        calls = []
        for _ in range(STREAMS_MAX):
            mine = stack.enter_context(grpc.insecure_channel(address_of(node), OWN_CONNECTION))
            calls.append(KVStoreStub(mine).Get(get))
        eventually(lambda: len(watch.state()["sessions"]) == STREAMS_MAX + 1, what="all streams to be there")
        eventually(lambda: watch.state()["totals"]["leased"], what="the streams to be under way")
        # A message on its way and one in gRPC's buffer each, of the 32 MiB that each of them asked for.
        assert anonymous_bytes(node.pid) - before < STREAMS_MAX * (3 << 20)
        for call in calls:
            call.cancel()
    stub.Clear(pb.ClearRequest(namespace_id=number), timeout=20)


@contextlib.contextmanager
def connections(node: RunningDaemon, count: int) -> Iterator[list[socket.socket]]:
    host, _, port = address_of(node).rpartition(":")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((host, int(port)), timeout=10)) for _ in range(count)]


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """A frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def sent_until_closed(sock: socket.socket, data: bytes, most: int) -> None:
    """The same bytes again and again; a daemon that closes has had enough."""
    with contextlib.suppress(OSError):
        sock.settimeout(1.0)
        for _ in range(most):
            sock.sendall(data)


def test_connections_that_say_nothing_or_half_of_hello_are_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_service, "HANDSHAKE_S", 0.5)

    async def scenario(scene: Scene) -> None:
        host, _, port = scene.edge.address.rpartition(":")
        async with asyncio.timeout(WAIT_S):
            streams = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
            for i, (_, writer) in enumerate(streams):
                writer.write((b"", PREFACE[:1], PREFACE[:10], PREFACE[:-1])[i % 4])
            for reader, writer in streams:
                with contextlib.suppress(ConnectionError):
                    await reader.read()  # until the daemon closes it, with our end open
                writer.close()
        assert (await scene.stub.Health(pb.HealthRequest())).healthy

    with_edge(scenario)


@pytest.mark.parametrize("seed", range(3))
def test_garbage_instead_of_http2_harms_nobody(node: RunningDaemon, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    with connections(node, 30) as socks:
        for i, sock in enumerate(socks):
            head = (b"", PREFACE, PREFACE + frame(SETTINGS), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00")[i % 5]
            sent_until_closed(sock, head + chance.randbytes(chance.choice((1, 9, 1000, 100_000))), 3)


FLOODS = {
    "settings": frame(SETTINGS, struct.pack(">HI", 3, 100)) * 200,
    "settings that are acknowledged": frame(SETTINGS, flags=1) * 200,
    "pings": frame(PING, bytes(8)) * 200,
    "frames of no kind": frame(200, bytes(100)) * 100,
    "frames that are too long": frame(0, bytes(1 << 20), stream=1),
    "headers that never end": frame(HEADERS, b"\x00\x01x\x7f" + bytes(100), stream=1) * 100,
    "resets": b"".join(
        frame(HEADERS, b"\x82\x84\x86", 4, s) + frame(RST, bytes(4), stream=s) for s in range(1, 400, 2)
    ),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_frames_harms_nobody_and_costs_little_memory(node: RunningDaemon, kind: str) -> None:
    before = anonymous_bytes(node.pid)
    with connections(node, 4) as socks:
        for sock in socks:
            sock.sendall(PREFACE + frame(SETTINGS))
            sent_until_closed(sock, FLOODS[kind], 50)
        assert anonymous_bytes(node.pid) - before < 64 << 20


def test_connections_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_service, "CONNECTIONS_MAX", 5)

    async def scenario(scene: Scene) -> None:
        assert (await scene.stub.Health(pb.HealthRequest())).healthy
        async with contextlib.AsyncExitStack() as stack:
            codes = []
            for _ in range(8):
                mine = grpc.aio.insecure_channel(scene.edge.address, OWN_CONNECTION)
                stub = KVStoreStub(await stack.enter_async_context(mine))
                try:
                    await stub.Health(pb.HealthRequest(), timeout=20.0)
                    codes.append(Code.OK)
                except grpc.RpcError as e:
                    codes.append(e.code())
            assert codes[:3] == [Code.OK] * 3
            assert set(codes[5:]) == {Code.UNAVAILABLE}
        assert (await scene.stub.Health(pb.HealthRequest())).healthy

    with_edge(scenario)
