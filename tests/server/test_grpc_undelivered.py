"""What a bound call granted, and whose answer did not get out, is given back.

The client here is frames of HTTP/2 written by hand: it lets no byte of an answer through
until it says so, and so the daemon is known to have granted and not to have answered.
"""

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Self

import grpc
import pytest

from kvstore.core.holds import Session
from kvstore.server import grpc_service
from kvstored.v1 import kvstore_pb2 as pb
from tests.server.grpc_edge import WAIT_S, Scene, block_of, key_of, refused, with_edge
from tests.server.test_grpc_bad_input import HEADERS, PREFACE, RST, SETTINGS, frame

BLOCK = 64 << 10
DATA, WINDOW_UPDATE = 0, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
CANCEL = 8
STREAM = 1
KEYS = [key_of(("undelivered", i)) for i in range(4)]


class Unread:
    """One call on a connection that takes nothing of its answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def call(cls, scene: Scene, session: Session, name: str, request: Any, timeout: str = "") -> Self:
        """`timeout`: as gRPC writes it."""
        host, _, port = scene.edge.address.rpartition(":")
        made = cls(*await asyncio.open_connection(host, int(port)))
        headers = {
            "content-type": "application/grpc",
            "te": "trailers",
            "kvstored-session": scene.node.bindings.bind(session).hex(),
            **({"grpc-timeout": timeout} if timeout else {}),
        }
        # POST, http, :authority, :path; then each by its name, in no table.
        head = b"\x83\x86\x01" + _text("localhost") + b"\x04" + _text(f"/kvstored.v1.KVStore/{name}")
        head += b"".join(b"\x00" + _text(key) + _text(value) for key, value in headers.items())
        message = request.SerializeToString()
        made._writer.write(
            PREFACE
            + frame(SETTINGS, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))
            + frame(SETTINGS, flags=ACK)
            + frame(HEADERS, head, END_HEADERS, STREAM)
            + frame(DATA, struct.pack(">BI", 0, len(message)) + message, END_STREAM, STREAM)
        )
        return made

    def cancel(self) -> None:
        self._writer.write(frame(RST, struct.pack(">I", CANCEL), stream=STREAM))

    def hang_up(self) -> None:
        self._writer.close()

    async def closed(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def answer(self) -> bytes:
        """Takes the answer after all: what comes until the stream is over."""
        self._writer.write(frame(WINDOW_UPDATE, struct.pack(">I", 1 << 20), stream=STREAM))
        data = b""
        while True:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            data += payload if kind == DATA else b""
            if stream == STREAM and (kind == RST or flags & END_STREAM):
                return data[5:]


def _text(text: str) -> bytes:
    """A string of HPACK, not compressed."""
    assert len(text) < 127
    return bytes((len(text),)) + text.encode()


Start = Callable[..., Awaitable[Unread]]


def with_session(scenario: Callable[[Scene, Session, int, Start], Awaitable[None]]) -> None:
    """Runs it with a session of a client on this machine, and a namespace with the blocks of KEYS[:3]."""

    async def run(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        await scene.put(number, KEYS[:3], [block_of(i, BLOCK) for i in range(3)])
        session = scene.store.open_session(
            scene.store.tenant("default"), "bound", 0.0, local=True, read_only=False, pid=1, nonce=0
        )

        calls: list[Unread] = []

        async def start(name: str, timeout: str = "") -> Unread:
            if name == "Commit":
                slots = scene.store.reserve(session, scene.store.namespaces[number - 1], 1, 0.0, float("inf"))
                request: Any = pb.CommitRequest(
                    namespace_id=number, keys=KEYS[3:], slots=slots, parents=[b""], depths=[0], want=2
                )
            elif name == "Reserve":
                request = pb.ReserveRequest(namespace_id=number, count=3)
            else:
                request = pb.AcquireRequest(namespace_id=number, keys=[*KEYS[:3], KEYS[0]])
            call = await Unread.call(scene, session, name, request, timeout)
            calls.append(call)
            await scene.until(lambda: len(session.granted) + session.leases == GRANTED[name])
            return call

        async with asyncio.timeout(WAIT_S):
            await scenario(scene, session, number, start)
        for call in calls:
            await call.closed()
        assert not scene.node.internal_errors
        scene.node.bindings.end(session)
        scene.store.end_session(session, process_gone=True)

    with_edge(run, size_bytes=64 << 20)


GRANTED = {"Reserve": 3, "Commit": 2, "Acquire": 4}
"""What is the session's, of slots granted and of leases, when the daemon has done the call."""


@pytest.mark.parametrize("name", GRANTED)
@pytest.mark.parametrize("end", [Unread.cancel, Unread.hang_up])
def test_what_a_call_granted_whose_caller_is_gone_before_the_answer_is_given_back(
    name: str, end: Callable[[Unread], None]
) -> None:
    """It stayed with the session until its end: 560 calls that were cancelled left 36 slots."""

    async def scenario(scene: Scene, session: Session, number: int, start: Start) -> None:
        end(await start(name))
        await scene.until(lambda: not session.granted and not session.leases)
        scene.store.check()
        # What a Commit made visible is not taken back: it is no grant.
        assert await scene.match(number, KEYS[3:]) == (name == "Commit")

    with_session(scenario)


@pytest.mark.parametrize("name", GRANTED)
def test_what_waits_to_be_taken_has_no_place_among_the_calls_at_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_service, "RPCS_MAX", 1)

    async def scenario(scene: Scene, session: Session, _: int, start: Start) -> None:
        call = await start(name)
        assert scene.edge._running
        assert (await scene.stub.Health(pb.HealthRequest(), timeout=WAIT_S)).healthy
        call.cancel()
        await scene.until(lambda: not session.granted and not session.leases)

    with_session(scenario)


def test_an_answer_that_is_not_taken_by_the_deadline_is_given_back() -> None:
    async def scenario(scene: Scene, session: Session, _: int, start: Start) -> None:
        await start("Reserve", "2S")
        await scene.until(lambda: not session.granted)

    with_session(scenario)


@pytest.mark.parametrize("name", GRANTED)
def test_an_answer_that_nobody_takes_for_a_while_is_given_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_service, "ANSWER_WAIT_S", 0.1)

    async def scenario(scene: Scene, session: Session, _: int, start: Start) -> None:
        await start(name)
        await scene.until(lambda: not session.granted and not session.leases)
        await scene.until(lambda: not scene.edge._running)

    with_session(scenario)


@pytest.mark.parametrize("name", GRANTED)
def test_an_answer_that_is_taken_late_is_the_sessions(name: str) -> None:
    async def scenario(_: Scene, session: Session, __: int, start: Start) -> None:
        call = await start(name)
        reply = {"Reserve": pb.ReserveReply, "Commit": pb.CommitReply, "Acquire": pb.AcquireReply}[name]
        slots = list(reply.FromString(await call.answer()).slots)  # type: ignore[attr-defined]
        assert len(slots) == GRANTED[name]
        assert set(slots) == session.granted.keys() | session.leased.keys()

    with_session(scenario)


def test_only_what_that_call_granted_is_given_back() -> None:
    """Another call's leases of the same blocks stay."""

    async def scenario(scene: Scene, session: Session, number: int, start: Start) -> None:
        namespace = scene.store.namespaces[number - 1]
        call = await start("Acquire")
        mine = scene.store.acquire(session, namespace, KEYS[:2], 0.0)
        call.cancel()
        await scene.until(lambda: session.leases == 2)
        assert session.leased == dict.fromkeys(mine, 1)
        scene.store.release(session, mine)

    with_session(scenario)


def test_what_the_session_gave_back_meanwhile_and_has_again_by_another_call_stays_its_own() -> None:
    """Abort with `all` while an answer is on its way: the same slots come with the next Reserve, and are written to."""

    async def scenario(scene: Scene, session: Session, number: int, start: Start) -> None:
        call = await start("Reserve")
        first = set(session.granted)
        metadata = (("kvstored-session", scene.node.bindings.bind(session).hex()),)
        await scene.stub.Abort(pb.AbortRequest(all=True), metadata=metadata, timeout=WAIT_S)
        assert not session.granted
        reserve = pb.ReserveRequest(namespace_id=number, count=3)
        again = set((await scene.stub.Reserve(reserve, metadata=metadata, timeout=WAIT_S)).slots)
        assert first & again
        call.cancel()
        await scene.until(lambda: not scene.edge._running)
        assert session.granted.keys() == again

    with_session(scenario)


def test_all_but_what_is_kept_is_given_back_at_the_sessions_word() -> None:
    """For who cancelled when the answer was sent already: it looked to the daemon as if it had been taken."""

    async def scenario(scene: Scene, session: Session, number: int, _: Start) -> None:
        stub, metadata = scene.stub, (("kvstored-session", scene.node.bindings.bind(session).hex()),)
        namespace = scene.store.namespaces[number - 1]
        kept, lost = scene.store.reserve(session, namespace, 2, 0.0, float("inf"))
        held = scene.store.acquire(session, namespace, [*KEYS[:3], KEYS[0]], 0.0)
        for request, words in (
            (pb.AbortRequest(all=True, slots=[kept]), "one of them"),
            (pb.AbortRequest(keep=[kept]), "keep goes with all"),
            (pb.AbortRequest(all=True, keep=[kept, kept]), "not held 2 times"),
            (pb.AbortRequest(all=True, keep=held[:1]), "not held 1 times"),
        ):
            with refused(grpc.StatusCode.INVALID_ARGUMENT, words):
                await stub.Abort(request, metadata=metadata, timeout=WAIT_S)
        await stub.Abort(pb.AbortRequest(all=True, keep=[kept]), metadata=metadata, timeout=WAIT_S)
        assert list(session.granted) == [kept] != [lost]
        await stub.Release(pb.ReleaseRequest(all=True, keep=held[:2]), metadata=metadata, timeout=WAIT_S)
        assert session.leased == dict.fromkeys(held[:2], 1)
        await stub.Abort(pb.AbortRequest(all=True), metadata=metadata, timeout=WAIT_S)
        await stub.Release(pb.ReleaseRequest(all=True), metadata=metadata, timeout=WAIT_S)
        assert not session.granted
        assert not session.leases
        scene.store.check()

    with_session(scenario)


@pytest.mark.parametrize("name", GRANTED)
def test_a_session_that_ends_before_its_answer_is_out_keeps_what_its_process_may_touch(name: str) -> None:
    async def scenario(scene: Scene, session: Session, _: int, start: Start) -> None:
        call = await start(name)
        scene.node.bindings.end(session)
        scene.store.end_session(session, process_gone=False)
        held = session.held_bytes
        call.cancel()
        await scene.until(lambda: not scene.edge._running)
        assert session.held_bytes == held > 0
        scene.store.check()

    with_session(scenario)
