"""Field fault A19: streams took all server threads and calls queued unseen; a fork in a handler hung.

Seen as gRPC pull request 17747 and issues 7052 and 17093. Two hundred of every kind of call that can be
left standing are opened, one kind after another and then all at once: what answers in one step still does
within half a second, what is too much is refused and not made to wait, and nothing is held afterwards.
"""

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.server import grpc_health, grpc_service
from kvstore_client import Client
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.kvstore_pb2_grpc import KVStoreStub
from tests.conftest import RunningDaemon, eventually
from tests.nodes import Watch, block, running
from tests.server.grpc_edge import put_messages
from tests.stopwatch import Stopwatch

IDLE = 200
EACH = 80
"""Of each kind where all are there at once."""

ANSWERS_WITHIN_S = 0.5
BLOCK = 64 << 10
KEYS = [block(i, 32) for i in range(400)]
SERVICE = "/kvstored.v1.KVStore/"
WATCH, CHECK = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(server__grpc="127.0.0.1:0") as daemon:
        with grpc.insecure_channel(target_of(daemon)) as channel:
            stub = KVStoreStub(channel)
            number = stub.OpenNamespace(pb.OpenNamespaceRequest(digest=block("ns", 32), block_bytes=BLOCK)).namespace_id
            assert number == 1
            blocks = [block(("bytes", i), BLOCK) for i in range(len(KEYS))]
            stub.Put(iter(put_messages(number, KEYS, blocks)), timeout=20)
        yield daemon


def target_of(node: RunningDaemon) -> str:
    return node.grpc_endpoint.removeprefix("grpc://")


class Idle:
    """Calls that are begun and never ended, over two connections."""

    def __init__(self, node: RunningDaemon) -> None:
        self._channels = [grpc.insecure_channel(target_of(node), options=[("grpc.use_local_subchannel_pool", 1)])] * 2
        self._hang = threading.Event()
        self.calls: list[Any] = []

    def _silent(self, *messages: bytes) -> Iterator[bytes]:
        yield from messages
        self._hang.wait()

    def open(self, kind: str, count: int) -> None:
        for i in range(count):
            channel = self._channels[i % 2]
            if kind == "watches":
                self.calls.append(channel.unary_stream(WATCH)(b""))
            elif kind == "gets not read":
                request = pb.GetRequest(namespace_id=1, keys=KEYS).SerializeToString()
                self.calls.append(channel.unary_stream(SERVICE + "Get")(request))
            elif kind == "half puts":
                head = put_messages(1, [block(("half", i), 32)], [bytes(BLOCK)], BLOCK // 2)[:2]
                messages = [message.SerializeToString() for message in head]
                self.calls.append(channel.stream_unary(SERVICE + "Put").future(self._silent(*messages)))
            elif kind == "puts without a header":
                self.calls.append(channel.stream_unary(SERVICE + "Put").future(self._silent()))
            elif kind == "small calls without a message":
                name = ("Health", "Stats", "Match", "Get")[i % 4]
                self.calls.append(channel.stream_unary(SERVICE + name).future(self._silent()))
            elif kind == "reflection":
                self.calls.append(channel.stream_stream(REFLECTION)(self._silent(b"\x3a\x00")))

    def codes(self) -> list[Any]:
        """The status of those that have ended."""
        return [call.code() for call in self.calls if call.done()]

    def close(self) -> None:
        for call in self.calls:
            call.cancel()
        self._hang.set()
        for channel in self._channels:
            channel.close()


PLACES = {
    "watches": grpc_health.WATCHES_MAX,
    "gets not read": grpc_service.STREAMS_MAX,
    "half puts": grpc_service.STREAMS_MAX,
    "puts without a header": grpc_service.STREAMS_MAX,
    "small calls without a message": grpc_service.UNSAID_MAX,
    "reflection": grpc_health.REFLECTIONS_MAX,
}


@contextlib.contextmanager
def opened(node: RunningDaemon, kinds: dict[str, int], count: int) -> Iterator[Idle]:
    """`count` calls of each kind; those that find no place have been refused."""
    idle = Idle(node)
    try:
        for kind in kinds:
            idle.open(kind, count)
        yield idle
    finally:
        idle.close()


def answered(node: RunningDaemon) -> dict[str, float]:
    """Every call that is answered in one step, on a connection of its own: seconds each took."""
    took = {}
    with grpc.insecure_channel(target_of(node), options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = KVStoreStub(channel)
        calls: dict[str, Callable[[], Any]] = {
            "Health": lambda: stub.Health(pb.HealthRequest(), timeout=10),
            "Stats": lambda: stub.Stats(pb.StatsRequest(), timeout=10),
            "Check": lambda: channel.unary_unary(CHECK)(b"", timeout=10),
            "Match": lambda: stub.Match(pb.MatchRequest(namespace_id=1, keys=KEYS[:10]), timeout=10),
        }
        calls["Health"]()  # connects
        for name, call in calls.items():
            watch = Stopwatch()
            assert call()
            took[name] = watch.seconds
    return took


@pytest.mark.parametrize("kind", PLACES)
def test_two_hundred_idle_calls_leave_the_control_plane_alone(node: RunningDaemon, kind: str) -> None:
    watch = Watch(node)
    before = watch.state()["totals"]
    with opened(node, {kind: PLACES[kind]}, IDLE) as idle:
        eventually(lambda: len(idle.codes()) >= IDLE - PLACES[kind], what=f"{IDLE - PLACES[kind]} refusals of {kind}")
        assert idle.codes()[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        for name, seconds in answered(node).items():
            assert seconds < ANSWERS_WITHIN_S, f"{name} took {seconds:.3f} s beside {IDLE} {kind}"
        assert set(idle.codes()) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    eventually(lambda: watch.state()["totals"] == before, what="all holds to be given back")
    eventually(lambda: len(watch.state()["sessions"]) == 1, what="all sessions of calls to be gone")
    watch.client.close()


def test_all_kinds_at_once_leave_it_alone_and_local_clients_too(node: RunningDaemon) -> None:
    watch = Watch(node)
    before = watch.state()["totals"]
    with opened(node, PLACES, EACH) as idle, Client(node.endpoint) as client:
        places = sum(min(EACH, count) for count in PLACES.values()) - 2 * grpc_service.STREAMS_MAX
        eventually(lambda: len(idle.codes()) >= len(PLACES) * EACH - places, what="the refusals")
        # Those without a message end by themselves after a while.
        assert set(idle.codes()) <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
        for name, seconds in answered(node).items():
            assert seconds < ANSWERS_WITHIN_S, f"{name} took {seconds:.3f} s beside everything"
        watched = Stopwatch()
        ns = client.raw_namespace("local", BLOCK)
        assert ns.put([ns.key(b"k")], bytes(BLOCK)).rejected == 0
        assert ns.get([ns.key(b"k")]) == [bytes(BLOCK)]
        assert watched.seconds < ANSWERS_WITHIN_S
        assert ns.remove([ns.key(b"k")]) == 1
    eventually(lambda: len(watch.state()["sessions"]) == 1, what="all sessions of calls to be gone")
    after = watch.state()["totals"]
    assert {what: after[what] for what in after if what != "blocks"} == {
        what: before[what] for what in before if what != "blocks"
    }
    assert watch.client.health().healthy
    watch.client.close()


def test_whatever_callers_leave_standing_is_less_than_all_calls() -> None:
    """So that there is always room for a call that is answered at once."""
    standing = grpc_service.STREAMS_MAX + grpc_service.ADMINISTRATION_MAX + grpc_service.UNSAID_MAX
    standing += grpc_health.WATCHES_MAX + grpc_health.REFLECTIONS_MAX
    assert standing < grpc_service.RPCS_MAX


FORK = """
    import os, sys, time
    from kvstore_client import Client, FailedPrecondition
    client = Client(sys.argv[1])
    ns = client.raw_namespace("fork", 4096)
    ns.put([ns.key(b"k")], bytes(4096))
    child = os.fork()
    if not child:
        began = time.monotonic()
        try:
            ns.get([ns.key(b"k")])
        except FailedPrecondition:
            print("the old one refuses")
        with Client(sys.argv[1]) as mine:
            assert mine.raw_namespace("fork", 4096).get([ns.key(b"k")]) == [bytes(4096)]
        assert time.monotonic() - began < 20
        print("a new one reads", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ns.get([ns.key(b"k")]) == [bytes(4096)]
    client.close()
    print("the parent goes on")
"""


@pytest.mark.parametrize("way", ["session socket", "gRPC"])
def test_a_client_forked_after_it_connected_refuses_and_a_new_one_connects(node: RunningDaemon, way: str) -> None:
    endpoint = node.endpoint if way == "session socket" else node.grpc_endpoint
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK), endpoint],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        cwd=Path(__file__).parents[2],
        env=dict(os.environ),
    )
    said = ["the old one refuses", "a new one reads", "the parent goes on"]
    assert done.stdout.split("\n")[:3] == said, done.stdout + done.stderr
