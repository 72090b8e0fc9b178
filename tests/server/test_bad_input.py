"""What a broken or hostile client may send over the session socket: it is told what was expected, others never notice.

Whatever a test sends, the daemon afterwards has the sessions, holds, blocks, segments and
descriptors that it had before (`steady`).
"""

import os
import random
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core import holds
from kvstore.server.listener import CLIENTS_MAX
from kvstore.server.session import HELLO_WAIT_S
from kvstore_client import Client, FailedPrecondition, InvalidArgument
from kvstored.v1 import FRAME_BYTES_MAX, PROTOCOL
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import Watch, anonymous_bytes, block, descriptors, running
from tests.wire import LENGTH, Wire, frame

BLOCK = 4096
HELLO = pb.HelloRequest(protocol=PROTOCOL, client="wire")


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def watch(node: RunningDaemon) -> Watch:
    return Watch(node)


@pytest.fixture(autouse=True)
def steady(watch: Watch) -> Iterator[None]:
    """The daemon is after the test as it was before."""
    before = watch.state()
    assert not before["problems"]
    yield
    try:
        eventually(lambda: watch.state() == before, 10.0, "the daemon to be as it was")
    except AssertionError:
        assert watch.state() == before
        raise


def served(node: RunningDaemon) -> None:
    """Another client is served byte-exact."""
    with Client(node.endpoint, name="other") as client:
        ns = client.raw_namespace("other", BLOCK)
        keys = [ns.key(b"other")]
        assert ns.put(keys, block("other", BLOCK)).rejected == 0
        assert ns.get(keys) == [block("other", BLOCK)]
        assert ns.remove(keys) == 1


# -- bytes that are no frames


@pytest.mark.parametrize("hello", [False, True], ids=["before Hello", "after Hello"])
@pytest.mark.parametrize("length", [FRAME_BYTES_MAX + 1, 1 << 31, 0xFFFFFFFF])
def test_a_length_above_the_limit_ends_the_connection_and_is_named(
    node: RunningDaemon, length: int, hello: bool
) -> None:
    with Wire(node.socket, hello=hello) as wire:
        wire.send(LENGTH.pack(length) + b"x" * 100)
        assert wire.last_words() == f"a frame of {length} bytes; at most {FRAME_BYTES_MAX} are allowed"
    served(node)


@pytest.mark.parametrize("hello", [False, True], ids=["before Hello", "after Hello"])
@pytest.mark.parametrize(
    "payload",
    [b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64) + b"\x07", b"\x12\x05abc"],
    ids=["ones", "a field without an end", "HTTP", "chance", "a message cut short"],
)
def test_a_frame_that_is_no_request_ends_the_connection_and_is_named(
    node: RunningDaemon, payload: bytes, hello: bool
) -> None:
    with pytest.raises(Exception, match=r"."):
        pb.Request.FromString(payload)
    with Wire(node.socket, hello=hello) as wire:
        wire.send(frame(payload))
        assert wire.last_words() == f"{len(payload)} bytes that are not a Request"
    served(node)


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_harm_nobody(node: RunningDaemon, seed: int) -> None:
    chance = random.Random(seed)
    with Wire(node.socket, hello=bool(seed % 2)) as wire:
        for _ in range(20):
            data = chance.randbytes(chance.randrange(1, 3000))
            if seed % 4 >= 2:
                data = frame(data)
            try:
                wire.send(data)
            except (BrokenPipeError, ConnectionResetError):
                break
    if seed % 10 == 0:
        served(node)


@pytest.mark.parametrize("seed", range(20))
def test_mutated_requests_harm_nobody(node: RunningDaemon, watch: Watch, seed: int) -> None:
    """Frames that were right until some bits of them changed."""
    chance = random.Random(seed)
    with Wire(node.socket) as wire:
        number = wire.call(open_namespace=namespace("mutated")).open_namespace.namespace_id
        keys = [chance.randbytes(32) for _ in range(4)]
        wire.post(9, match=pb.MatchRequest(namespace_id=number, keys=keys))
        for _ in range(200):
            request = pb.Request(
                id=chance.randrange(3),
                acquire=pb.AcquireRequest(namespace_id=number, keys=keys),
            )
            data = bytearray(request.SerializeToString())
            for _ in range(chance.randrange(1, 6)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            try:
                wire.send(frame(bytes(data)))
            except (BrokenPipeError, ConnectionResetError):
                break
    assert watch.client.health().healthy


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 20], ids=lambda cut: f"after {cut} bytes")
def test_a_frame_cut_short_leaves_nothing(node: RunningDaemon, cut: int) -> None:
    with Wire(node.socket) as wire:
        wire.send(frame(pb.Request(id=5, stats=pb.StatsRequest()).SerializeToString() + bytes(40))[:cut])
    served(node)


def test_a_frame_may_come_byte_by_byte(node: RunningDaemon) -> None:
    with Wire(node.socket) as wire:
        for byte in frame(pb.Request(id=5, health=pb.HealthRequest()).SerializeToString()):
            wire.send(bytes([byte]))
        assert wire.answer(5).health.healthy
        wire.leave()


def test_the_largest_frame_is_taken(node: RunningDaemon) -> None:
    """Limits of what it names are the call's to refuse, and the session goes on."""
    with Wire(node.socket) as wire:
        request = pb.Request(id=7, match=pb.MatchRequest(namespace_id=1, keys=[b"k" * 32]))
        label = bytes(FRAME_BYTES_MAX - request.ByteSize() - 6)
        request.match.keys.append(label)
        assert request.ByteSize() == FRAME_BYTES_MAX
        wire.send(frame(request.SerializeToString()))
        with pytest.raises((InvalidArgument, FailedPrecondition)):
            wire.answer(7)
        assert wire.call(health=pb.HealthRequest()).health.healthy
        wire.leave()


# -- the order of things


@pytest.mark.parametrize("kind", ["index", "stats", "reserve", "commit", "sync", "health"])
def test_nothing_is_answered_before_hello(node: RunningDaemon, kind: str) -> None:
    with Wire(node.socket, hello=False) as wire:
        with pytest.raises(FailedPrecondition, match="the first request of a session is Hello"):
            wire.call(**{kind: {}})
        assert wire.call(hello=HELLO).hello.protocol == PROTOCOL
        wire.leave()


def test_a_second_hello_is_refused_and_changes_nothing(node: RunningDaemon) -> None:
    with Wire(node.socket) as wire:
        with pytest.raises(FailedPrecondition, match="hello is not a call of an open session"):
            wire.call(hello=pb.HelloRequest(protocol=PROTOCOL, tenant="another"))
        mine = [s for s in wire.call(stats=pb.StatsRequest()).stats.sessions if s.client == "wire"]
        assert [session.tenant for session in mine] == ["default"]
        wire.leave()


@pytest.mark.parametrize("tenant", ["a/b", "../x", "a b", "é", "x" * 65, "a\0b", "/", "a\n"], ids=repr)
def test_a_tenant_is_a_plain_name(node: RunningDaemon, tenant: str) -> None:
    with Wire(node.socket, hello=False) as wire:
        with pytest.raises(InvalidArgument, match=r"is not 1 to 64 of the characters A-Z a-z 0-9 _ \. -"):
            wire.call(hello=pb.HelloRequest(protocol=PROTOCOL, tenant=tenant))
        with pytest.raises(FailedPrecondition, match="Hello"):
            wire.call(index=pb.IndexRequest())


@pytest.mark.parametrize("name", ["x" * 129, "é" * 65])
def test_a_clients_name_is_short(node: RunningDaemon, name: str) -> None:
    with Wire(node.socket, hello=False) as wire, pytest.raises(InvalidArgument, match="at most 128 bytes"):
        wire.call(hello=pb.HelloRequest(protocol=PROTOCOL, client=name))


def test_names_forge_no_line_of_the_log(node: RunningDaemon) -> None:
    """Nor escape sequences of a terminal that shows them."""
    forged = "x\n2026-01-01 ERROR kvstored: \x1b[2J"
    with Wire(node.socket, hello=False) as wire:
        wire.call(hello=pb.HelloRequest(protocol=PROTOCOL, client=forged))
        wire.call(open_namespace=namespace("forged", label=forged))
        stats = wire.call(stats=pb.StatsRequest()).stats
        shown = [session.client for session in stats.sessions] + [ns.label for ns in stats.namespaces]
        wire.leave()
    for text in [*shown, *node.output().split("\n")]:
        assert text.isprintable(), repr(text)
    assert not any(line.startswith("2026-01-01 ERROR") for line in node.output().splitlines())


# -- those who ask and do not listen, or do not ask at all


@pytest.mark.parametrize("kind", ["stats", "segments", "reserve"])
def test_a_client_that_never_reads_stops_only_itself(node: RunningDaemon, watch: Watch, kind: str) -> None:
    with Wire(node.socket) as wire:
        number = wire.call(open_namespace=namespace("never read")).open_namespace.namespace_id
        refs = wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=1)).reserve.slots
        request = pb.Request(id=3)
        if kind == "stats":
            request.stats.SetInParent()
        elif kind == "segments":
            request.segments.ids.extend(range(1, 65))
        else:
            request.reserve.namespace_id, request.reserve.count = number, 0
        before = anonymous_bytes(node.pid)
        whole, rest = wire.stuff(request.SerializeToString())
        assert whole > 100
        assert anonymous_bytes(node.pid) - before < 8 << 20
        served(node)
        assert watch.client.health().healthy
        # Who listens again is answered again, and nothing was lost or mixed.
        for _ in range(whole):
            assert (reply := wire.receive()) is not None
            assert reply.id == 3
        if rest:
            wire.send(rest)
            assert (reply := wire.receive()) is not None
            assert reply.id == 3
        wire.post(abort=pb.AbortRequest(slots=refs))
        wire.leave()


def test_connections_that_say_nothing_keep_nobody_out_and_are_told_why_they_end(
    node: RunningDaemon, watch: Watch
) -> None:
    silent = 2000
    assert silent < CLIENTS_MAX
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < silent + 500:
        if hard < silent + 500:
            pytest.skip(f"the limit of descriptors is {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (silent + 500, hard))
    before = descriptors(node.pid)
    connections = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(silent)]
    one = Wire(node.socket, hello=False)
    try:
        for connection in connections:
            connection.connect(str(node.socket))
        assert watch.client.health().healthy
        served(node)
        eventually(lambda: descriptors(node.pid) <= before, HELLO_WAIT_S + 10, "silent connections to be closed")
        assert one.last_words() == f"no Hello within {HELLO_WAIT_S:.0f} s"
        served(node)
    finally:
        one.close()
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- descriptors


@pytest.mark.parametrize("count", [1, 100, 253])
@pytest.mark.parametrize("payload", [pb.Request(id=4, health=pb.HealthRequest()).SerializeToString(), b"\xff" * 9])
def test_descriptors_that_a_client_sends_are_not_kept(node: RunningDaemon, count: int, payload: bytes) -> None:
    read, write = os.pipe()
    before = descriptors(node.pid)
    with Wire(node.socket) as wire:
        wire.send(frame(payload), [write] * count)
        wire.receive()
        os.close(write)
        # The last copy of the writing end is gone: a reader sees the end of the pipe.
        assert select.select([read], [], [], 5.0)[0]
        assert os.read(read, 1) == b""
        assert descriptors(node.pid) <= before + 2
        if payload[0] != 0xFF:
            wire.leave()
    os.close(read)


# -- coming and going


@pytest.mark.parametrize("how", ["leaves", "hangs up", "hangs up with the index"])
def test_many_sessions_one_after_another_leave_nothing(node: RunningDaemon, how: str) -> None:
    for _ in range(200):
        with Wire(node.socket) as wire:
            if how == "hangs up with the index":
                wire.call(index=pb.IndexRequest())
            if how == "leaves":
                number = wire.call(open_namespace=namespace("many")).open_namespace.namespace_id
                refs = wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=2)).reserve.slots
                wire.call(segments=pb.SegmentsRequest(ids=[refs[0] >> 32]))
                wire.post(abort=pb.AbortRequest(slots=refs))
                wire.leave()


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_many_clients_one_after_another_leave_nothing(node: RunningDaemon, how: str) -> None:
    """A program that makes a client for each request must not fill the daemon, whether it closes them or forgets."""
    mine = descriptors(os.getpid())
    for i in range(30):
        client = Client(node.endpoint, name="one of many")
        ns = client.raw_namespace("many clients", BLOCK)
        keys = [ns.key(b"%d" % i)]
        assert ns.put(keys, block(i, BLOCK)).stored == 1
        assert ns.get(keys) == [block(i, BLOCK)]
        assert ns.remove(keys) == 1
        if how == "closed":
            client.close()
        del client, ns
    eventually(lambda: descriptors(os.getpid()) <= mine, 10.0, "own descriptors to be closed")


def test_a_process_that_ends_with_many_sessions_leaves_nothing(node: RunningDaemon) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kvstored.v1 import kvstore_pb2 as pb\n"
        "from tests.wire import Wire\n"
        "wires = [Wire(Path(sys.argv[1])) for _ in range(60)]\n"
        "for wire in wires:\n"
        "    opened = wire.call(open_namespace=pb.OpenNamespaceRequest(digest=b'm' * 32, block_bytes=4096))\n"
        "    number = opened.open_namespace.namespace_id\n"
        "    refs = wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=8)).reserve.slots\n"
        "    wire.call(segments=pb.SegmentsRequest(ids={ref >> 32 for ref in refs}))\n"
        "for wire in wires[::2]:\n"
        "    wire.close()\n"
    )
    command = [sys.executable, "-c", program, str(node.socket)]
    subprocess.run(command, check=True, timeout=60, cwd=Path(__file__).parents[2])


def test_the_table_of_sessions_has_an_end_and_a_message(node: RunningDaemon, watch: Watch) -> None:
    """Sessions of a live process above the limit are refused, and there is room again when some leave."""
    wires: list[Wire] = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < holds.SESSIONS_MAX + 500:
        pytest.skip(f"the limit of descriptors is {soft}")
    try:
        room = holds.SESSIONS_MAX - len(watch.client.stats()["sessions"])
        wires = [Wire(node.socket) for _ in range(room)]
        with pytest.raises(Exception, match=f"{holds.SESSIONS_MAX} sessions are open already"):
            Wire(node.socket)
        wires.pop().leave()
        wires.append(eventually(lambda: admitted(node), 5.0, "a place to come free"))
    finally:
        for wire in wires:
            wire.leave()


def admitted(node: RunningDaemon) -> Wire | None:
    wire = Wire(node.socket, hello=False)
    try:
        wire.call(hello=HELLO)
    except Exception:  # noqa: BLE001 (still full: asked again)
        wire.close()
        return None
    return wire


def namespace(name: str, *, label: str = "", block_bytes: int = BLOCK) -> pb.OpenNamespaceRequest:
    return pb.OpenNamespaceRequest(digest=block(name, 32), block_bytes=block_bytes, label=label or name)
