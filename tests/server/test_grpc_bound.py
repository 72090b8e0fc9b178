"""gRPC calls bound to a session: zero copy for a program that has only the contract, and an end with its socket.

The program here speaks the raw socket and generated stubs; nothing of the SDK is used.
"""

import asyncio
import contextlib
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.core.holds import Session, Tenant
from kvstore.server.bound import Bindings
from kvstore.server.grpc_get import GetStream
from kvstored.v1 import PROTOCOL
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import Unauthenticated
from kvstored.v1.kvstore_pb2_grpc import KVStoreStub
from tests.conftest import RunningDaemon, eventually, wait_for_line
from tests.nodes import Watch, block, running
from tests.server.grpc_edge import Scene, put_messages, refused, with_edge
from tests.wire import Wire

BLOCK = 64 << 10
Code = grpc.StatusCode
WAIT_S = 30.0


@pytest.fixture(scope="module", params=["tcp", "unix"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    address = "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path_factory.mktemp('grpc')}/s"
    with running(host__size="16MiB", server__grpc=address) as daemon:
        yield daemon


@pytest.fixture
def stub(node: RunningDaemon) -> Iterator[Any]:
    with grpc.insecure_channel(target_of(node)) as channel:
        yield KVStoreStub(channel)


def target_of(node: RunningDaemon) -> str:
    return node.grpc_endpoint.replace("grpc+unix://", "unix:").removeprefix("grpc://")


@pytest.fixture
def watch(node: RunningDaemon) -> Iterator[Watch]:
    """What was there before is there afterwards, blocks excepted."""
    watch = Watch(node)

    def state() -> dict[str, Any]:
        found = watch.state()
        del found["totals"]["blocks"], found["segments"], found["descriptors"]
        return found

    before = state()
    yield watch
    eventually(lambda: state() == before, what=f"everything to be given back: {before} and not {state()}")
    watch.client.close()


class Program:
    """A client that has the contract alone: a socket for descriptors and lifetime, stubs for calls."""

    def __init__(self, node: RunningDaemon, stub: Any, tenant: str = "", *, read_only: bool = False) -> None:
        self.wire, self.stub = Wire(node.socket, hello=False), stub
        hello = pb.HelloRequest(protocol=PROTOCOL, client="program", tenant=tenant, read_only=read_only)
        self.hello = self.wire.call(hello=hello).hello
        self.metadata = (("kvstored-session", self.hello.token.hex()),)
        self.maps: dict[int, mmap.mmap] = {}
        request = pb.OpenNamespaceRequest(digest=block("namespace", 32), block_bytes=BLOCK, label="bound")
        self.namespace = self.call("OpenNamespace", request)
        self.number = self.namespace.namespace_id

    def call(self, name: str, request: Any, *more: tuple[str, str], timeout: float = WAIT_S) -> Any:
        return getattr(self.stub, name)(request, metadata=(*self.metadata, *more), timeout=timeout)

    def memory(self, slot: int) -> memoryview:
        """The bytes of a slot, by a descriptor that came over the socket."""
        segment, number = slot >> 32, slot & 0xFFFFFFFF
        if segment not in self.maps:
            (found,) = self.wire.call(segments=pb.SegmentsRequest(ids=[segment])).segments.segments
            self.maps[segment] = mmap.mmap(self.wire.descriptors[-1], found.size_bytes)
        at = number * self.namespace.slot_bytes
        return memoryview(self.maps[segment])[at : at + BLOCK]

    def reserve(self, count: int) -> list[int]:
        return list(self.call("Reserve", pb.ReserveRequest(namespace_id=self.number, count=count)).slots)

    def commit(self, names: list[str], slots: list[int], want: int = 0) -> Any:
        keys = [block(name, 32) for name in names]
        parents, depths = [b"", *keys[:-1]], range(len(keys))
        return self.call(
            "Commit",
            pb.CommitRequest(
                namespace_id=self.number, keys=keys, slots=slots, parents=parents, depths=depths, want=want
            ),
        )

    def hang_up(self) -> None:
        self.wire.close()


def keys_of(*names: str) -> list[bytes]:
    return [block(name, 32) for name in names]


def test_a_program_without_the_sdk_writes_and_reads_in_place(node: RunningDaemon, stub: Any, watch: Watch) -> None:
    program = Program(node, stub)
    slots = program.reserve(3)
    for slot in slots:
        program.memory(slot)[:] = block(("in place", slot), BLOCK)
    assert list(program.commit(["a", "b"], slots[:2]).results) == [pb.STORED] * 2
    assert list(program.commit(["a"], slots[2:]).results) == [pb.EXISTS]
    program.call("Abort", pb.AbortRequest(slots=slots[2:]))
    keys = keys_of("a", "b", "absent")
    assert program.call("Match", pb.MatchRequest(namespace_id=program.number, keys=keys)).blocks == 2
    held = list(program.call("Acquire", pb.AcquireRequest(namespace_id=program.number, keys=keys)).slots)
    assert [bytes(program.memory(slot)) for slot in held] == [block(("in place", slot), BLOCK) for slot in slots[:2]]
    (mine,) = [s for s in watch.client.stats()["sessions"] if s["client"] == "program"]
    assert (mine["leased_slots"], mine["granted_slots"], mine["local"]) == (2, 0, True)
    program.call("Release", pb.ReleaseRequest(slots=held))
    # The SDK finds what the program stored.
    assert watch.client.stats()["counters"]["stored"] >= 2
    program.wire.leave()


def test_slots_that_a_commit_brings_ahead_are_the_sessions(node: RunningDaemon, stub: Any, watch: Watch) -> None:
    program = Program(node, stub)
    (slot,) = program.reserve(1)
    ahead = list(program.commit(["first of ahead"], [slot], want=2).slots)
    assert 1 <= len(ahead) <= program.namespace.grant_max
    assert list(program.commit(["second of ahead"], ahead[:1]).results) == [pb.STORED]
    program.call("Abort", pb.AbortRequest(slots=ahead[1:]))
    program.wire.leave()


CHILD = """
import sys
from pathlib import Path
import grpc
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.kvstore_pb2_grpc import KVStoreStub
from tests.server import test_grpc_bound as bound

class Node:
    socket = Path(sys.argv[1])

with grpc.insecure_channel(sys.argv[2]) as channel:
    program = bound.Program(Node, KVStoreStub(channel))
    slots = program.reserve(4)
    for slot in slots:
        program.memory(slot)[:] = bytes(bound.BLOCK)
    program.commit(["of the child"], slots[:1])
    program.call("Acquire", pb.AcquireRequest(namespace_id=program.number, keys=bound.keys_of("of the child")))
    print(program.hello.token.hex(), program.number, slots[1], flush=True)
    sys.stdin.read(1)
    program.hang_up()
    print("hung up", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def child_of(node: RunningDaemon) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds three slots and a lease by bound calls; it hangs up at the first byte."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(node.socket), target_of(node)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def test_what_a_bound_call_took_ends_with_its_socket_and_its_process(
    node: RunningDaemon, stub: Any, watch: Watch
) -> None:
    with child_of(node) as child:
        token, number, slot = wait_for_line(child).split()
        held = watch.state()["totals"]
        assert (held["granted"], held["leased"]) == (3, 1)
        assert child.stdin is not None
        child.stdin.write("x")
        child.stdin.flush()
        assert wait_for_line(child) == "hung up"
        # The process lives and has them mapped: they are nobody's, and not free yet.
        eventually(lambda: watch.state()["totals"]["quarantined"] == 3, what=str(watch.client.stats()["sessions"]))
        assert not watch.state()["totals"]["granted"]
        for name, request in (
            ("Reserve", pb.ReserveRequest(namespace_id=int(number), count=1)),
            ("Commit", pb.CommitRequest(namespace_id=int(number), keys=keys_of("late"), slots=[int(slot)])),
            ("Release", pb.ReleaseRequest(slots=[int(slot)])),
            ("Match", pb.MatchRequest(namespace_id=int(number))),
            ("Health", pb.HealthRequest()),
        ):
            with refused(Code.UNAUTHENTICATED, "names no open session"):
                getattr(stub, name)(request, metadata=(("kvstored-session", token),), timeout=WAIT_S)
    eventually(lambda: not any(watch.state()["totals"][what] for what in ("granted", "quarantined", "leased")))


def test_a_token_of_a_session_has_one_spelling() -> None:
    bindings, session = Bindings(), Session(1, Tenant(1, "default"), "x", True, False, 1, 1, 0.0)
    token = bindings.bind(session)
    assert bindings.find(token.hex()).session is session
    spaced = " ".join(token.hex()[at : at + 2] for at in range(0, 32, 2))
    for text in (f" {token.hex()}", f"{token.hex()}\n", spaced, "ab" * 15, "", "zz" * 16, f"0x{token.hex()}"):
        with pytest.raises(Unauthenticated):
            bindings.find(text)
    while not any(map(str.isalpha, token.hex())):
        token = bindings.bind(session)
    with pytest.raises(Unauthenticated):
        bindings.find(token.hex().upper())


def test_slots_of_a_bound_call_never_end_by_a_clock() -> None:
    """Their process was stopped for longer than any reservation lasts, and goes on to write."""
    with running(host__size="16MiB", server__grpc="127.0.0.1:0", lease__ttl="1ms") as node, child_of(node) as child:
        wait_for_line(child)
        os.kill(child.pid, signal.SIGSTOP)
        watch = Watch(node)
        expire = _runs(watch.client.stats(), "expire")
        eventually(lambda: _runs(watch.client.stats(), "expire") > expire + 2)
        assert watch.state()["totals"]["granted"] == 3
        assert not watch.client.stats()["counters"]["reservations_expired"]
        watch.client.close()


def _runs(stats: dict[str, Any], name: str) -> int:
    (runs,) = [loop["runs"] for loop in stats["loops"] if loop["name"] == name]
    return int(runs)


def test_streams_of_a_session_end_with_it_and_hold_nothing(node: RunningDaemon, stub: Any, watch: Watch) -> None:
    program = Program(node, stub)
    blocks = [block(i, BLOCK) for i in range(160)]
    keys = [block(("stream", i), 32) for i in range(160)]
    stub.Put(iter(put_messages(program.number, keys, blocks)), metadata=program.metadata, timeout=WAIT_S)
    messages = put_messages(program.number, keys_of("half a put"), [bytes(BLOCK)], BLOCK // 2)
    sent, go_on = iter(messages[:2]), Program(node, stub)

    def half() -> Iterator[Any]:
        yield from sent
        eventually(lambda: watch.state()["totals"]["granted"] == 1, what="the slot of the half put")
        eventually(lambda: len(watch.state()["sessions"]) >= 5, what="the get to be under way")
        program.hang_up()
        eventually(lambda: put.done(), what="the daemon's answer, with half of the bytes")

    put = stub.Put.future(half(), metadata=program.metadata, timeout=WAIT_S)
    get = stub.Get(pb.GetRequest(namespace_id=program.number, keys=keys), metadata=program.metadata, timeout=WAIT_S)
    assert next(get).blocks == len(keys)
    with refused(Code.UNAUTHENTICATED, "ends with the session's socket"):
        put.result()
    with refused(Code.UNAUTHENTICATED):
        for _ in get:
            pass
    eventually(lambda: not watch.state()["totals"]["granted"] and not watch.state()["totals"]["leased"])
    assert go_on.call("Health", pb.HealthRequest()).healthy
    assert not go_on.call("Match", pb.MatchRequest(namespace_id=go_on.number, keys=keys_of("half a put"))).blocks
    go_on.wire.leave()


UNBOUND = {
    "Reserve": pb.ReserveRequest(count=1),
    "Commit": pb.CommitRequest(),
    "Abort": pb.AbortRequest(),
    "Acquire": pb.AcquireRequest(),
    "Release": pb.ReleaseRequest(),
}


@pytest.mark.parametrize("name", UNBOUND)
def test_calls_on_shared_memory_need_a_session_and_say_how_to_get_one(stub: Any, watch: Watch, name: str) -> None:
    with refused(
        Code.FAILED_PRECONDITION, f"{name} is for calls bound to a session", "kvstored-session", "Put and Get"
    ):
        getattr(stub, name)(UNBOUND[name], timeout=WAIT_S)


@pytest.mark.parametrize("token", ["", "x", "00" * 16, "0" * 4096, "00" * 15, "zz" * 16])
def test_a_token_that_is_none_is_unauthenticated_in_every_call(stub: Any, watch: Watch, token: str) -> None:
    metadata = (("kvstored-session", token),)
    with refused(Code.UNAUTHENTICATED, "HelloReply.token in hex"):
        stub.Reserve(pb.ReserveRequest(namespace_id=1, count=1), metadata=metadata, timeout=WAIT_S)
    with refused(Code.UNAUTHENTICATED):
        stub.Put(iter([]), metadata=metadata, timeout=WAIT_S)
    with refused(Code.UNAUTHENTICATED):
        list(stub.Get(pb.GetRequest(namespace_id=1), metadata=metadata, timeout=WAIT_S))


def test_a_bound_call_is_of_the_sessions_tenant(node: RunningDaemon, stub: Any, watch: Watch) -> None:
    program = Program(node, stub, tenant="of-the-session")
    (slot,) = program.reserve(1)
    program.commit(["of a tenant"], [slot])
    match = pb.MatchRequest(namespace_id=program.number, keys=keys_of("of a tenant"))
    assert program.call("Match", match).blocks == 1
    assert program.call("Match", match, ("kvstored-tenant", "of-the-session")).blocks == 1
    for other in ("default", "another"):
        with refused(Code.INVALID_ARGUMENT, "'of-the-session'", other):
            program.call("Match", match, ("kvstored-tenant", other))
    program.wire.leave()


def test_another_sessions_slots_are_not_ones_own(node: RunningDaemon, stub: Any, watch: Watch) -> None:
    one, other = Program(node, stub), Program(node, stub)
    assert one.hello.token != other.hello.token
    assert len(one.hello.token) == 16
    slots = one.reserve(1)
    with refused(Code.FAILED_PRECONDITION, "not granted to this session"):
        other.commit(["stolen"], slots)
    with refused(Code.INVALID_ARGUMENT, "not granted"):
        other.call("Abort", pb.AbortRequest(slots=slots))
    assert list(one.commit(["kept"], slots).results) == [pb.STORED]
    for program in (one, other):
        program.wire.leave()


def test_a_read_only_session_stays_read_only_over_grpc(node: RunningDaemon, stub: Any, watch: Watch) -> None:
    program = Program(node, stub, read_only=True)
    number, keys = program.number, keys_of("read only")
    for name, request in (
        ("Reserve", pb.ReserveRequest(namespace_id=number, count=1)),
        ("Acquire", pb.AcquireRequest(namespace_id=number, keys=keys)),
        ("Remove", pb.RemoveRequest(namespace_id=number, keys=keys)),
        ("Pin", pb.PinRequest(namespace_id=number, keys=keys, ttl_s=1)),
        ("Unpin", pb.UnpinRequest(namespace_id=number, keys=keys)),
        ("Clear", pb.ClearRequest(namespace_id=number)),
        ("Evict", pb.EvictRequest(size_bytes=1)),
        ("EndSession", pb.EndSessionRequest(session=1)),
    ):
        # Over TCP the administration is closed before this is looked at.
        codes = (Code.FAILED_PRECONDITION, Code.UNAUTHENTICATED)
        with pytest.raises(grpc.RpcError) as raised:
            program.call(name, request)
        error: Any = raised.value
        assert error.code() in (codes if name in ("Evict", "EndSession") else codes[:1]), error
    with refused(Code.FAILED_PRECONDITION, "read-only"):
        stub.Put(iter(put_messages(number, keys, [bytes(BLOCK)])), metadata=program.metadata, timeout=WAIT_S)
    assert program.call("Match", pb.MatchRequest(namespace_id=number, keys=keys)).blocks == 0
    program.wire.leave()


def test_a_session_that_is_resumed_has_another_token(node: RunningDaemon, stub: Any, watch: Watch) -> None:
    first = Program(node, stub)
    slots = first.reserve(2)
    resume = pb.Resume(nonce=first.hello.nonce, granted=slots)
    with Wire(node.socket, hello=False) as wire:
        hello = wire.call(hello=pb.HelloRequest(protocol=PROTOCOL, client="again", resume=resume)).hello
        assert (hello.resumed, list(hello.granted)) == (True, slots)
        with refused(Code.UNAUTHENTICATED):
            first.commit(["resumed"], slots[:1])
        first.metadata = (("kvstored-session", hello.token.hex()),)
        assert list(first.commit(["resumed"], slots[:1]).results) == [pb.STORED]
        first.call("Abort", pb.AbortRequest(slots=slots[1:]))
        wire.leave()
    first.hang_up()


def test_the_store_is_sound_wherever_a_session_ends_under_its_streams() -> None:
    """A put after each of its messages, and a get that is not read: `Scene.idle` audits the store after each."""
    messages = put_messages(1, keys_of("x", "y"), [bytes(BLOCK)] * 2, BLOCK // 2)

    async def scenario(scene: Scene) -> None:
        await scene.stub.OpenNamespace(pb.OpenNamespaceRequest(digest=block("ns", 32), block_bytes=BLOCK))
        many = [block(i, 32) for i in range(200)]
        await scene.put(1, many, [bytes(BLOCK)] * 200)
        for end in range(len(messages)):
            session = scene.store.open_session(
                scene.store.tenant("default"), "bound", 0.0, local=True, read_only=False, pid=1, nonce=0
            )
            metadata = (("kvstored-session", scene.node.bindings.bind(session).hex()),)
            put, get = (
                scene.stub.Put(metadata=metadata),
                scene.stub.Get(pb.GetRequest(namespace_id=1, keys=many), metadata=metadata),
            )
            for message in messages[:end]:
                await put.write(message)
            assert (await get.read()).blocks == 200
            await scene.until(lambda: len(scene.store.sessions) == 3)
            scene.node.bindings.end(session)
            scene.store.end_session(session, process_gone=True)
            with refused(Code.UNAUTHENTICATED, "ends with the session's socket"):
                await put
            with refused(Code.UNAUTHENTICATED):
                while await get.read() is not grpc.aio.EOF:
                    pass
                await get
            await scene.idle()
            assert await scene.match(1, keys_of("x")) == 0
        assert not len(scene.node.bindings)
        assert not scene.node.internal_errors

    with_edge(scenario)


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_get_that_is_cut_off_in_any_of_its_messages_gets_its_status(
    monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """Also in the first: gRPC had begun to send the initial metadata with it, and never sent a status."""
    write = GetStream._write

    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        keys = [block(i, 32) for i in range(4)]
        await scene.put(number, keys, [bytes(BLOCK)] * 4)
        session = scene.store.open_session(
            scene.store.tenant("default"), "bound", 0.0, local=True, read_only=False, pid=1, nonce=0
        )
        written = 0

        async def cut_off(self: GetStream, message: bytes) -> None:
            nonlocal written
            written += 1
            if written == cut + 1:
                # Before the loop can learn that the message is out.
                asyncio.get_running_loop().call_soon(scene.node.bindings.end, session)
            await write(self, message)

        monkeypatch.setattr(GetStream, "_write", cut_off)
        metadata = (("kvstored-session", scene.node.bindings.bind(session).hex()),)
        get = scene.stub.Get(pb.GetRequest(namespace_id=number, keys=keys), metadata=metadata)
        async with asyncio.timeout(WAIT_S):
            with refused(Code.UNAUTHENTICATED, "ends with the session's socket"):
                while await get.read() is not grpc.aio.EOF:
                    pass
                await get
        scene.store.end_session(session, process_gone=True)

    with_edge(scenario)
