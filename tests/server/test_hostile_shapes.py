"""Legal messages that make trees of extreme shape: no step of the loop takes long, whoever else calls is answered.

Each of these stopped the daemon for seconds once.
"""

import threading
from collections.abc import Callable, Iterator
from hashlib import blake2b

import pytest

from kvstore_client import Client, Namespace
from kvstored.v1 import KEYS_MAX
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import ResourceExhausted
from tests.conftest import RunningDaemon, eventually
from tests.nodes import running
from tests.stopwatch import Stopwatch
from tests.wire import Wire

BLOCK = 4096
MANY = 96 * 1024
LARGE = 300 << 20
LONGEST_S = 0.5


def key(name: str, number: int) -> bytes:
    return blake2b(f"{name} {number}".encode(), digest_size=32).digest()


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    """512 MiB: 131,072 blocks of 4 KiB, 2,048 a segment."""
    with running(host__size="512MiB") as daemon:
        yield daemon


@pytest.fixture
def answered(node: RunningDaemon) -> Iterator[list[float]]:
    """Another client asks for health all the time; the longest that it waited is short."""
    over, waits = threading.Event(), [0.0]

    def ask() -> None:
        with Wire(node.socket) as wire:
            while not over.is_set():
                watch = Stopwatch()
                assert wire.call(health=pb.HealthRequest()).health.healthy
                waits.append(watch.seconds)
                over.wait(0.002)
            wire.leave()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield waits
    finally:
        over.set()
        thread.join(20)
    assert not thread.is_alive()
    assert len(waits) > 10
    assert max(waits) < LONGEST_S, f"a call for health waited {max(waits):.3f} s"


class Hostile:
    """A client that stores 4 KiB blocks of any parents and depths."""

    def __init__(self, node: RunningDaemon) -> None:
        self.wire = Wire(node.socket)
        self.number = self.open("hostile", BLOCK)

    def open(self, name: str, block_bytes: int) -> int:
        request = pb.OpenNamespaceRequest(digest=key(name, 0), block_bytes=block_bytes, label=name)
        return self.wire.call(open_namespace=request).open_namespace.namespace_id

    def store(self, keys: list[bytes], parent: Callable[[int], bytes], depth: Callable[[int], int]) -> None:
        for at in range(0, len(keys), KEYS_MAX):
            part = range(at, min(at + KEYS_MAX, len(keys)))
            slots: list[int] = []
            while len(slots) < len(part):
                want = min(64, len(part) - len(slots))
                slots += self.wire.call(reserve=pb.ReserveRequest(namespace_id=self.number, count=want)).reserve.slots
            commit = pb.CommitRequest(
                namespace_id=self.number,
                keys=[keys[i] for i in part],
                slots=slots,
                parents=[parent(i) for i in part],
                depths=[depth(i) for i in part],
            )
            results = self.wire.call(commit=commit).commit.results
            assert set(results) == {pb.STORED}

    def remove(self, keys: list[bytes]) -> int:
        return self.wire.call(remove=pb.RemoveRequest(namespace_id=self.number, keys=keys)).remove.removed

    def clear(self) -> None:
        self.wire.call(clear=pb.ClearRequest(namespace_id=self.number))


@pytest.fixture
def hostile(node: RunningDaemon) -> Iterator[Hostile]:
    client = Hostile(node)
    with client.wire:
        yield client
        client.clear()
        client.wire.leave()


def test_a_chain_as_deep_as_the_memory_in_reverse(hostile: Hostile, answered: list[float]) -> None:
    """Each block adopted the one before, after a walk to the root of what it hung from."""
    keys = [key("deep", i) for i in range(MANY)]
    last = MANY - 1
    hostile.store(keys[::-1], lambda i: keys[last - i - 1] if i < last else b"", lambda i: last - i)
    for _ in range(3):
        hostile.wire.call(touch=pb.TouchRequest(keys=keys[-1:]))
    hostile.store([key("leaf", i) for i in range(1000)], lambda i: keys[last - i * 90], lambda i: MANY)
    assert hostile.remove(keys[:KEYS_MAX]) == KEYS_MAX


def test_a_parent_of_all_blocks_comes_and_goes(hostile: Hostile, answered: list[float]) -> None:
    """Every child was told in the same step."""
    children, root = [key("star", i) for i in range(MANY)], key("root", 0)
    hostile.store(children, lambda _: root, lambda _: 1)
    for _ in range(5):
        hostile.store([root], lambda _: b"", lambda _: 0)
        assert hostile.remove([root]) == 1


def test_a_block_size_that_has_nothing_takes_many_segments_apart(
    node: RunningDaemon, hostile: Hostile, answered: list[float]
) -> None:
    """All their blocks were dropped in the call that asked."""
    keys = [key("small", i) for i in range(MANY)]
    hostile.store(keys, lambda _: b"", lambda _: 0)
    with Client(node.endpoint) as client:
        large = client.raw_namespace("large", LARGE)
        eventually(lambda: stores(large), 30, "room for the large block")
        assert hostile.remove(keys[:KEYS_MAX]) < KEYS_MAX, "it was made of the others"
        assert large.clear() == 1


def stores(ns: Namespace) -> bool:
    try:
        return ns.put([ns.key(b"large")], bytes(LARGE)).stored == 1
    except ResourceExhausted:
        return False
