"""Blocks that change tiers between two questions of one read: the store has them all the time, so they are no miss."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Client, Namespace, admin
from kvstore_client.local_reads import MOVES_MAX
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running

BLOCK = 64 << 10
COUNT = 6


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with (
        tempfile.TemporaryDirectory(prefix="kvstored-moving-") as disk,
        running(host__size="16MiB", ssd__path=str(Path(disk) / "ssd"), ssd__size="256MiB") as daemon,
    ):
        with Client(daemon.endpoint) as client:
            eventually(lambda: client.stats()["ssd"]["state"] == "open", 20.0, "the SSD to be open")
        yield daemon


@pytest.fixture
def ns(node: RunningDaemon, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    with Client(node.endpoint, name="reader", timeout_s=10.0) as client:
        yield client.raw_namespace(request.node.name, BLOCK)


class Elsewhere:
    """Another process's doings with the same blocks, in this one."""

    def __init__(self, node: RunningDaemon, ns: Namespace, name: str) -> None:
        self.node, self.name = node, name
        self.keys = [ns.key(f"b{i}".encode()) for i in range(COUNT)]
        self.bytes_of = [block(key, BLOCK) for key in self.keys]
        assert ns.put(self.keys, self.bytes_of, durable=True).stored == COUNT
        self.to_disk()
        assert ns.match(self.keys).tiers == ["ssd"] * COUNT

    def to_disk(self) -> None:
        with Client(self.node.endpoint, name="admin", timeout_s=10.0) as client:
            admin.evict(client, pb.EvictRequest(all=True, tier=pb.TIER_HOST))

    def to_memory(self) -> None:
        with Client(self.node.endpoint, name="other", timeout_s=10.0) as client:
            ns = client.raw_namespace(self.name, BLOCK)
            assert ns.prefetch(self.keys, 10.0).wait() == COUNT


@pytest.fixture
def elsewhere(node: RunningDaemon, ns: Namespace, request: pytest.FixtureRequest) -> Elsewhere:
    """With all blocks on the SSD, and only there."""
    return Elsewhere(node, ns, request.node.name)


def around(one: Any, method: str, before: list[Callable[[], None] | None], after: list[Callable[[], None]]) -> None:
    """Has things happen before or after the first, second, ... call of a method."""
    call = getattr(one, method)

    def called(*arguments: Any) -> Any:
        happens = before.pop(0) if before else None
        if happens is not None:
            happens()
        answer = call(*arguments)
        if after:
            after.pop(0)()
        return answer

    setattr(one, method, called)


@pytest.mark.parametrize("leaves_again", [False, True])
def test_a_read_finds_what_comes_to_memory_between_its_looks(
    ns: Namespace, elsewhere: Elsewhere, leaves_again: bool
) -> None:
    before = [None, elsewhere.to_disk] if leaves_again else []
    around(ns._transport, "_read", before, [elsewhere.to_memory])
    assert ns.get(elsewhere.keys) == elsewhere.bytes_of


@pytest.mark.parametrize("leaves_again", [False, True])
def test_a_lease_holds_what_comes_to_memory_between_its_questions(
    ns: Namespace, elsewhere: Elsewhere, leaves_again: bool
) -> None:
    before = [None, elsewhere.to_disk] if leaves_again else []
    around(ns._transport, "_hold", before, [elsewhere.to_memory])
    with ns.acquire(elsewhere.keys, 10.0) as lease:
        assert [bytes(view) for view in lease.views] == elsewhere.bytes_of


def test_a_read_of_what_is_elsewhere_whenever_it_looks_ends(ns: Namespace, elsewhere: Elsewhere) -> None:
    looks: list[Callable[[], None] | None] = [elsewhere.to_disk] * 40
    around(ns._transport, "_read", looks, [elsewhere.to_memory] * 40)
    assert ns.get(elsewhere.keys) == []
    assert 40 - len(looks) <= MOVES_MAX + 2
