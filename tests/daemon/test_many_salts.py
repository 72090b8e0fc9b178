"""More salts than a daemon knows namespaces: empty ones that are not used make room, and clients notice nothing."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_client import Client, Namespace, ResourceExhausted, admin, numbers
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.daemon.few_namespaces import IDLE_S, NAMESPACES
from tests.nodes import block

BLOCK = 4096


class FewNamespaces(RunningDaemon):
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.daemon.few_namespaces", *super().command()[1:]]


@pytest.fixture(params=["forgets", "persists"])
def node(request: pytest.FixtureRequest) -> Iterator[FewNamespaces]:
    with (
        tempfile.TemporaryDirectory(prefix="kvstored-test-") as base,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
    ):
        settings = {"server.grpc": "127.0.0.1:0", "host.size": "8MiB"}
        if request.param == "persists":
            settings["host.persist"] = shm
        one = FewNamespaces(Path(base), settings)
        yield one
        one.kill()


def used(ns: Namespace, client: Client) -> bool:
    """Stores and reads a block, and has it evicted; False where there is no room for the namespace yet."""
    key = ns.key(b"block")
    try:
        if ns.put([key], [block(key, BLOCK)]).stored != 1:
            return False
    except ResourceExhausted:
        return False
    assert ns.get([key]) == [block(key, BLOCK)]
    admin.evict(client, pb.EvictRequest(all=True))
    return True


@pytest.mark.parametrize("by", ["endpoint", "grpc_endpoint"])
def test_salts_without_end_are_served_and_the_first_one_again(
    node: FewNamespaces, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "GOOD_S", IDLE_S / 2)
    with Client(getattr(node, by), timeout_s=20.0) as client, Client(node.endpoint, name="admin") as others:
        first = client.raw_namespace("salted", BLOCK, salt="first")
        assert used(first, others)
        for i in range(3 * NAMESPACES):
            ns = client.raw_namespace("salted", BLOCK, salt=f"{i}")
            eventually(lambda ns=ns: used(ns, others), what=f"room for salt {i}")  # type: ignore[misc]
        eventually(lambda: used(first, others), what="room for the first again")
        kept = first.key(b"kept")
        assert first.put([kept], [block(kept, BLOCK)]).stored == 1
        labels = client.stats()["namespaces"]
        assert len(labels) <= NAMESPACES
    if "host.persist" in node.settings:
        node.kill()
        node.restart()
        with Client(node.endpoint, timeout_s=20.0) as client:
            again = client.raw_namespace("salted", BLOCK, salt="first")
            assert again.get([kept]) == [block(kept, BLOCK)]
            for i in range(NAMESPACES):
                ns = client.raw_namespace("salted", BLOCK, salt=f"after {i}")
                eventually(lambda ns=ns: used(ns, client), what="room after a start")  # type: ignore[misc]
