"""Frames that do not become whole: each has a time, all together a bound, and who only died has broken no rule."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.server import frames
from kvstore.server.frames import PARTIAL_BYTES_MAX, Connection, Partial, watch
from kvstored.v1 import FRAME_BYTES_MAX
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import Watch, anonymous_bytes, running
from tests.wire import LENGTH, Wire, frame

WAIT_S = 30.0


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def watcher(node: RunningDaemon) -> Watch:
    return Watch(node)


def protocol_errors(watcher: Watch) -> int:
    return int(watcher.client.stats()["counters"]["protocol_errors"])


# -- all together


def test_half_frames_of_many_connections_are_bounded_together(node: RunningDaemon, watcher: Watch) -> None:
    """300 of them with nearly a MiB each held 300 MiB until they closed."""
    before, errors = anonymous_bytes(node.pid), protocol_errors(watcher)
    wires = [Wire(node.socket, hello=False) for _ in range(150)]
    try:
        half = LENGTH.pack(FRAME_BYTES_MAX) + bytes(FRAME_BYTES_MAX - 1)
        ended = 0
        for wire in wires:
            try:
                wire.send(half)
            except (BrokenPipeError, ConnectionResetError):
                ended += 1
        assert anonymous_bytes(node.pid) - before < PARTIAL_BYTES_MAX + (32 << 20)
        assert watcher.client.health().healthy
        words = {wire.last_words() for wire in wires[100:]}
        assert any(f"more than {PARTIAL_BYTES_MAX} bytes" in said for said in words), words
    finally:
        for wire in wires:
            wire.close()
    eventually(lambda: len(watcher.client.stats()["sessions"]) == 1, WAIT_S, "the connections to be gone")
    assert protocol_errors(watcher) == errors, "a want of room is no fault of the protocol"
    with Wire(node.socket) as wire:
        request = pb.Request(id=7, health=pb.HealthRequest()).SerializeToString()
        wire.send(frame(request)[:5])
        wire.send(frame(request)[5:])
        assert wire.answer(7).health.healthy, "what was kept counts no more"
        wire.leave()


# -- each in its time


class Ends:
    """A connection of ours and the other end of it, on a loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.partial = Partial()
        self.got: list[bytes] = []
        self.closed: asyncio.Future[str] = self.loop.create_future()
        ours, self.other = socket.socketpair()
        self.other.setblocking(False)
        self.connection = Connection(
            ours,
            self.loop,
            self.partial,
            lambda _, payload: self.got.append(payload),
            lambda _, why: self.closed.set_result(why),
        )
        self.connection.start()

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.other, data)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0)

    def close(self) -> None:
        self.connection.close()
        self.other.close()
        assert self.partial.size_bytes == 0


def test_a_frame_that_does_not_become_whole_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many bytes of it still come: the time is that of the whole frame."""
    monkeypatch.setattr(frames, "FRAME_S", 0.2)

    async def drips() -> None:
        ends = Ends()
        await ends.send(LENGTH.pack(1000))
        while not ends.closed.done():
            await ends.send(b"x")
            await asyncio.wait([ends.closed], timeout=0.01)
        assert ends.closed.result() == "a frame that was not whole within 0 s"
        assert not ends.connection.violated
        reply = pb.Reply.FromString((await ends.loop.sock_recv(ends.other, 4096))[4:])
        assert reply.error.code == pb.DEADLINE_EXCEEDED
        ends.close()

    asyncio.run(drips())


def test_the_clock_starts_anew_with_each_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is never between two frames is not one whose frame is late."""
    monkeypatch.setattr(frames, "FRAME_S", 1.5)

    async def overlapping() -> None:
        ends = Ends()
        whole = frame(b"y" * 100)
        await ends.send(whole[:50])
        until, sent = ends.loop.time() + 3.5, 0
        while ends.loop.time() < until:
            await ends.send(whole[50:] + whole[:50])
            sent += 1
            await ends.until(lambda sent=sent: len(ends.got) == sent)  # type: ignore[misc]
            await asyncio.wait([ends.closed], timeout=0.02)
        assert not ends.closed.done()
        ends.close()

    asyncio.run(overlapping())


def test_no_clock_runs_while_replies_wait_to_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stops reading stops itself, and keeps its session."""
    monkeypatch.setattr(frames, "FRAME_S", 0.2)

    async def unread() -> None:
        ends = Ends()
        await ends.send(LENGTH.pack(100) + b"z" * 50)
        await ends.until(lambda: ends.partial.size_bytes == 54)
        ends.connection.send(bytes(4 << 20))
        await asyncio.wait([ends.closed], timeout=0.6)
        assert not ends.closed.done()
        await ends.send(b"z" * 50)
        taken = 0
        while taken < (4 << 20) + 4:
            taken += len(await ends.loop.sock_recv(ends.other, 1 << 20))
        await ends.until(lambda: ends.got == [b"z" * 100])
        ends.close()

    asyncio.run(unread())


# -- what is a fault of the protocol


def test_a_client_that_was_killed_is_no_protocol_error(node: RunningDaemon, watcher: Watch) -> None:
    """Its connection may end with a reset, or in the middle of a message."""
    before = protocol_errors(watcher)
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from kvstored.v1 import kvstore_pb2 as pb\n"
        "from tests.wire import Wire, frame\n"
        "wires = [Wire(Path(sys.argv[1])) for _ in range(4)]\n"
        "for wire in wires[:2]:\n"
        "    wire.post(5, health=pb.HealthRequest())  # nobody reads the answer: a reset\n"
        "for wire in wires[2:]:\n"
        "    wire.send(frame(bytes(100))[:50])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program, str(node.socket)]
    subprocess.run(command, check=False, timeout=60, cwd=Path(__file__).parents[2])
    eventually(lambda: len(watcher.client.stats()["sessions"]) == 1, WAIT_S, "the sessions to end")
    assert protocol_errors(watcher) == before
    with Wire(node.socket) as wire:
        wire.send(frame(b"\xff" * 9))
        wire.last_words()
    assert protocol_errors(watcher) == before + 1, "this one is"


def test_calls_without_a_reply_that_fail_in_a_loop_do_not_flood_the_log(node: RunningDaemon) -> None:
    with Wire(node.socket) as wire:
        for _ in range(3000):
            wire.post(0, release=pb.ReleaseRequest(slots=[1 << 32]))
        assert wire.call(health=pb.HealthRequest()).health.healthy
        wire.leave()
    lines = [line for line in node.output().splitlines() if "without a reply" in line]
    assert 1 <= len(lines) <= 4, "one in ten seconds"


# -- descriptors and the loop


def test_a_descriptor_whose_number_was_watched_before_is_heard() -> None:
    """One closed behind the loop's back left its number watched for the loop and unknown to the kernel.

    The next of that number, a client's or the listening socket's, was then never heard.
    """

    async def reused() -> None:
        loop = asyncio.get_running_loop()
        heard = loop.create_future()
        for both in (False, True):
            old, other = socket.socketpair()
            number = old.fileno()
            loop.add_reader(number, lambda: None)
            if both:
                loop.add_writer(number, lambda: None)
            os.close(old.detach())
            other.close()
            new, other = socket.socketpair()
            assert number in (new.fileno(), other.fileno())
            if new.fileno() != number:
                new, other = other, new
            heard = loop.create_future()
            watch(loop, number, lambda heard=heard: heard.done() or heard.set_result(True))  # type: ignore[misc]
            other.send(b"Hello")
            assert await asyncio.wait_for(heard, WAIT_S)
            loop.remove_reader(number)
            new.close()
            other.close()

    asyncio.run(reused())
