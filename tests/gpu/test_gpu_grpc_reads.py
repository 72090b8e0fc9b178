"""Blocks that only a device has, read by who has none: over gRPC and by shared memory, byte for byte."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore_client import Client, admin
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import eventually
from tests.gpu.client_engine import Served, keys_of, namespace_for
from tests.gpu.gpu_nodes import GpuNode

COUNT = 40
"""More than a Get holds at once."""


@pytest.fixture(params=["memory alone", "with an SSD"])
def node(request: pytest.FixtureRequest, start_gpu_node: Callable[..., GpuNode], tmp_path: Path) -> GpuNode:
    ssd = {"ssd__path": str(tmp_path / "ssd"), "ssd__size": "64MiB", "ssd__free_floor": "1MiB"}
    return start_gpu_node(server__grpc="127.0.0.1:0", **({} if request.param == "memory alone" else ssd))


@pytest.fixture
def served(node: GpuNode) -> Iterator[Served]:
    one = Served(node.endpoint, node.uuids[0], "nhd", "bf16", 64)
    yield one
    one.close()


@pytest.fixture
def bytes_of(node: GpuNode, served: Served) -> list[bytes]:
    """Blocks that the device alone has, since memory and SSD have lost their copies."""
    assert served.put(COUNT, list(range(COUNT))) == [COUNT, 0, 0, ""]
    eventually(lambda: node.stats_of()["counters"]["copied_down"] == COUNT)
    with Client(node.endpoint, name="admin") as client:
        if "ssd.path" in node.settings:
            eventually(lambda: client.stats()["ssd"]["counters"]["written"] == COUNT, 20.0)
            admin.evict(client, pb.EvictRequest(all=True, tier=pb.TIER_SSD))
        admin.evict(client, pb.EvictRequest(all=True, tier=pb.TIER_HOST))
    assert served.ns.match(keys_of(served.ns, COUNT)).tiers == ["gpu"] * COUNT
    return [served.cache.block([i]) for i in range(COUNT)]


@pytest.mark.parametrize("by", ["grpc_endpoint", "endpoint"])
def test_what_only_a_device_has_is_read_by_who_has_none(
    node: GpuNode, served: Served, bytes_of: list[bytes], by: str
) -> None:
    with Client(getattr(node, by), timeout_s=10.0) as client:
        ns = namespace_for(client, served.kv)
        keys = keys_of(ns, COUNT)
        assert ns.match(keys).blocks == COUNT
        assert ns.get(keys) == bytes_of
        assert ns.get(keys[7:9]) == bytes_of[7:9]
    assert set(served.ns.match(keys).tiers) == {"gpu"}, "where it is read by who has the device"


@pytest.mark.parametrize("by", ["grpc_endpoint", "endpoint"])
def test_a_copy_down_that_does_not_end_is_a_miss_within_the_time_out(
    node: GpuNode, served: Served, bytes_of: list[bytes], by: str
) -> None:
    node.faults("transfer:delay=60")
    with Client(getattr(node, by), timeout_s=2.0) as client:
        ns = namespace_for(client, served.kv)
        assert ns.get(keys_of(ns, COUNT)) == []
        assert client.stats(), "and the session goes on"
