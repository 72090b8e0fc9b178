"""Requests larger than what one session may hold at once, a buffer takes, or the pool has room for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client import Client, Hint, admin
from kvstore_client.paged import PagedKV
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.gpu.client_engine import keys_of, namespace_for, use_host_device
from tests.gpu.gpu_nodes import UUIDS, GpuNode

BLOCK = 1 << 20
COUNT = 40


class Large:
    """A cache of blocks of 1 MiB, each other bytes, on a device of this process."""

    def __init__(self, endpoint: str, uuid: str, timeout_s: float = 20.0, **device: Any) -> None:
        self.device = use_host_device(uuid, **device)
        self.stream = self.device.stream()
        pages = np.random.default_rng(3).integers(0, 1 << 16, (2 * COUNT, 16, BLOCK // 64), np.uint16)
        self.layers = [pages[:, :, : BLOCK // 128], pages[:, :, BLOCK // 128 :]]
        self.pages = pages
        self.kv = PagedKV([layer.copy() for layer in self.layers], "BND", device=f"gpu:{uuid}")
        self.client = Client(endpoint, name="large", timeout_s=timeout_s)
        self.ns = namespace_for(self.client, self.kv)
        self.keys = keys_of(self.ns, COUNT)

    def put(self, **said: Any) -> tuple[int, int, int]:
        result = self.ns.put(self.keys, self.kv.blocks(range(COUNT), stream=self.stream), **said)
        return result.stored, result.existing, result.rejected

    def get(self) -> int:
        """How many came; all of them have their bytes."""
        target = PagedKV([np.zeros_like(layer) for layer in self.layers], "BND", device=f"gpu:{self.device.uuid}")
        copied = self.ns.get_into(self.keys, target.blocks(range(COUNT, 2 * COUNT), stream=self.stream))
        self.stream.synchronize(30)
        for layer, (mine, theirs) in enumerate(zip(self.layers, target._owners, strict=True)):
            for i in range(copied):
                assert np.array_equal(mine[i], theirs[COUNT + i]), (layer, i)
        return copied

    def locked(self) -> None:
        """Something of what is mapped is page-locked."""
        eventually(lambda: self.client.device_stats()["devices"][self.device.uuid]["page_locked_bytes"] > BLOCK)

    @property
    def staged(self) -> int:
        """Blocks that went through a buffer."""
        return int(self.client.device_stats()["devices"][self.device.uuid]["staged_blocks"])

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def large() -> Iterator[Callable[..., Large]]:
    running: list[Large] = []

    def start(*arguments: Any, **said: Any) -> Large:
        running.append(Large(*arguments, **said))
        return running[-1]

    yield start
    for one in running:
        one.close()


def test_what_the_pool_has_no_room_for_goes_to_shared_memory(
    start_gpu_node: Callable[..., GpuNode], large: Callable[..., Large]
) -> None:
    node = start_gpu_node(gpu__size="16MiB", host__size="256MiB")
    one = large(node.endpoint, node.uuids[0])
    assert one.put(hint=Hint(conversation="a")) == (COUNT, 0, 0)
    assert one.put() == (0, COUNT, 0)
    assert one.get() == COUNT
    assert node.stats_of()["counters"]["committed"]
    eventually(lambda: node.stats_of()["leased"] == node.stats_of()["granted"] == 0)


def test_kernels_write_straight_to_shared_memory_what_no_pool_takes_where_the_daemon_has_the_device(
    start_gpu_node: Callable[..., GpuNode], large: Callable[..., Large]
) -> None:
    """Blocks twice as large as the pool."""
    node = start_gpu_node(gpu__size="1MiB", host__size="256MiB")
    one = large(node.endpoint, node.uuids[0])
    one.kv = PagedKV([layer.copy() for layer in one.layers], "BND", device=f"gpu:{one.device.uuid}", pages_per_slot=4)
    ns, count = namespace_for(one.client, one.kv), COUNT // 4
    keys, pages = keys_of(ns, count), one.kv.blocks(range(COUNT), stream=one.stream)
    assert ns.put(keys, pages).stored == count  # by a buffer: nothing is page-locked yet
    one.locked()
    expected = ns.get(keys)

    def straight() -> bool:
        """Whether not all of them go through a buffer, as they do to memory that is not page-locked yet."""
        staged = one.staged
        assert ns.clear() == count
        assert ns.put(keys, pages).stored == count
        return one.staged - staged < count

    eventually(straight, what="a kernel to write to shared memory")
    assert ns.get(keys) == expected
    assert not node.stats_of()["counters"]["committed"]


@pytest.mark.parametrize("device", [{}, {"memlock_bytes": 0}], ids=["page-locked", "by a buffer"])
def test_a_get_of_more_than_a_session_may_hold_waits_for_its_own_copies(
    start_daemon: Callable[..., RunningDaemon], large: Callable[..., Large], device: dict[str, Any]
) -> None:
    daemon = start_daemon(host__size="96MiB")
    one = large(daemon.endpoint, UUIDS[0], **device)
    assert one.put() == (COUNT, 0, 0)
    if not device:
        one.locked()
    assert one.get() == COUNT
    assert one.get() == COUNT


def test_a_durable_put_of_pages_is_on_the_ssd_when_it_returns(
    start_gpu_node: Callable[..., GpuNode], large: Callable[..., Large], tmp_path: Path
) -> None:
    node = start_gpu_node(host__size="128MiB", ssd__path=str(tmp_path / "ssd"), ssd__size="256MiB")
    one = large(node.endpoint, node.uuids[0])
    assert one.put(durable=True) == (COUNT, 0, 0)
    with Client(node.endpoint) as client:
        admin.evict(client, pb.EvictRequest(all=True, tier=pb.TIER_HOST))
    assert set(one.ns.match(one.keys).tiers) == {"ssd"}
    assert one.get() == COUNT
    assert one.ns.prefetch(one.keys, 20.0, to=f"gpu:{node.uuids[0]}").wait() > 0
