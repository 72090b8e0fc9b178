"""Blocks on a device as one process uses them: brought there ahead of use, held in place, as arrays and tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client import Client, InvalidArgument, admin, aio
from kvstored.v1 import kvstore_pb2 as pb
from kvstored_cuda.devices.errors import NoDevice
from tests.conftest import eventually
from tests.gpu.client_engine import Gate, Served, keys_of
from tests.gpu.gpu_nodes import UUIDS, GpuNode

COUNT = 6


@pytest.fixture
def served(gpu_node: GpuNode) -> Any:
    """An engine in this process."""
    one = Served(gpu_node.endpoint, gpu_node.uuids[0], "nhd", "bf16", 32)
    yield one
    one.gate.set()
    one.close()


def to(node: GpuNode) -> str:
    return f"gpu:{node.uuids[0]}"


def filled(served: Served, count: int = COUNT) -> list[bytes]:
    """Blocks that were put; their bytes."""
    assert served.put(count, list(range(count))) == [count, 0, 0, ""]
    return [served.cache.block([i]) for i in range(count)]


def evicted(node: GpuNode, *tiers: Any) -> None:
    """Copies there, of all blocks, once memory has them too."""
    eventually(lambda: not node.stats_of()["copying"], what="copies down to end")
    with Client(node.endpoint, name="admin") as client:
        for tier in tiers:
            admin.evict(client, pb.EvictRequest(all=True, tier=tier))


def test_what_was_evicted_from_the_device_is_brought_back_ahead_of_use(gpu_node: GpuNode, served: Served) -> None:
    bytes_of = filled(served)
    keys = keys_of(served.ns, COUNT)
    assert set(served.ns.match(keys).tiers) == {"gpu"}
    eventually(lambda: gpu_node.stats_of()["counters"]["copied_down"] == COUNT)
    evicted(gpu_node, pb.TIER_GPU)
    assert set(served.ns.match(keys).tiers) == {"host"}
    ticket = served.ns.prefetch(keys, 20.0, to=to(gpu_node))
    assert ticket.wait() == COUNT
    assert (ticket.state, ticket.why) == ("done", "")
    assert set(served.ns.match(keys).tiers) == {"gpu"}
    assert served.get(COUNT, list(range(10, 10 + COUNT))) == [COUNT, [one.hex() for one in bytes_of]]


def test_what_only_the_ssd_has_is_brought_to_the_device(start_gpu_node: Callable[..., GpuNode], tmp_path: Path) -> None:
    node = start_gpu_node(ssd__path=str(tmp_path / "ssd"), ssd__size="64MiB", ssd__free_floor="1MiB")
    served = Served(node.endpoint, node.uuids[0], "nhd", "bf16", 32)
    bytes_of = filled(served)
    eventually(lambda: node.stats()["ssd"]["counters"]["written"] == COUNT, 20.0)
    evicted(node, pb.TIER_GPU, pb.TIER_HOST)
    keys = keys_of(served.ns, COUNT)
    assert set(served.ns.match(keys).tiers) == {"ssd"}
    assert served.ns.prefetch(keys, 20.0, to=to(node)).wait() == COUNT
    assert set(served.ns.match(keys).tiers) == {"gpu"}
    assert served.get(COUNT, list(range(10, 10 + COUNT))) == [COUNT, [one.hex() for one in bytes_of]]
    evicted(node, pb.TIER_GPU, pb.TIER_HOST)
    assert served.get(COUNT, list(range(20, 20 + COUNT))) == [COUNT, [one.hex() for one in bytes_of]], "by memory"
    served.close()


def test_a_prefetch_to_a_device_has_a_deadline_and_can_be_cancelled(gpu_node: GpuNode, served: Served) -> None:
    filled(served)
    eventually(lambda: gpu_node.stats_of()["counters"]["copied_down"] == COUNT)
    evicted(gpu_node, pb.TIER_GPU)
    gpu_node.faults("transfer:delay=5,times=1")
    keys = keys_of(served.ns, COUNT)
    late = served.ns.prefetch(keys, 0.2, to=to(gpu_node))
    late.wait()
    assert late.state == "failed"
    assert late.why
    other = served.ns.prefetch(keys, 20.0, to=to(gpu_node), priority=3)
    other.cancel()
    assert other.state == "cancelled"
    gpu_node.faults("")


def test_a_lease_on_a_device_brings_what_is_missing_and_reads_in_place(gpu_node: GpuNode, served: Served) -> None:
    bytes_of = filled(served)
    eventually(lambda: gpu_node.stats_of()["counters"]["copied_down"] == COUNT)
    evicted(gpu_node, pb.TIER_GPU)
    keys = keys_of(served.ns, COUNT + 3)
    with served.ns.acquire(keys, 5.0, to=to(gpu_node)) as lease:
        assert len(lease) == COUNT
        assert gpu_node.stats_of()["leased"] == COUNT
        for i in range(COUNT):
            assert served.device.array(lease.addresses[i], served.kv.block_bytes).tobytes() == bytes_of[i]
            assert np.from_dlpack(lease.dlpack(i)).tobytes() == bytes_of[i]
        assert lease.dlpack(0).__dlpack_device__() == (1, 0)
        with pytest.raises(InvalidArgument, match="is not one of the 6"):
            lease.dlpack(COUNT)
    eventually(lambda: not gpu_node.stats_of()["leased"])


def test_a_tensor_keeps_its_block_when_the_lease_is_gone(gpu_node: GpuNode, served: Served) -> None:
    torch = pytest.importorskip("torch")
    bytes_of = filled(served)
    lease = served.ns.acquire(keys_of(served.ns, 2), to=to(gpu_node))
    tensor, array = lease.torch(1, torch.bfloat16), np.from_dlpack(lease.dlpack(0))
    assert tensor.view(torch.uint8).numpy().tobytes() == bytes_of[1]
    lease.release()
    part = array[10:20]
    del array
    evicted(gpu_node, pb.TIER_GPU)
    assert gpu_node.stats_of()["leased"] == 2
    assert part.tobytes() == bytes_of[0][10:20]
    del tensor, part
    eventually(lambda: not gpu_node.stats_of()["leased"])


def test_a_lease_ends_behind_what_was_enqueued_when_it_was_released(gpu_node: GpuNode, served: Served) -> None:
    filled(served)
    lease = served.ns.acquire(keys_of(served.ns, 2), to=to(gpu_node))
    served.hold_stream()
    lease.release(served.stream)
    other, gate = served.device.stream(), Gate()
    other.enqueue(gate.wait)
    second = served.ns.acquire(keys_of(served.ns, 1), to=to(gpu_node))
    second.release()  # without a stream: at once
    eventually(lambda: served.client.device_stats()["kept_for_copies"] == 1, what="only the first is kept")
    assert gpu_node.stats_of()["leased"] == 2
    served.let_go()
    eventually(lambda: not gpu_node.stats_of()["leased"])
    gate.set()


def test_a_get_holds_its_blocks_until_its_copies_have_run(gpu_node: GpuNode, served: Served) -> None:
    bytes_of = filled(served)
    served.hold_stream()
    out = served.kv.blocks(list(range(10, 10 + COUNT)), stream=served.stream)
    assert served.ns.get_into(keys_of(served.ns, COUNT), out) == COUNT, "enqueued, and nobody waited"
    evicted(gpu_node, pb.TIER_GPU)
    assert gpu_node.stats_of()["leased"] == COUNT
    served.let_go()
    served.stream.synchronize(10)
    assert [served.cache.block([10 + i]) for i in range(COUNT)] == bytes_of
    eventually(lambda: not gpu_node.stats_of()["leased"])


def test_a_device_that_is_not_here_is_said(gpu_node: GpuNode, served: Served) -> None:
    filled(served)
    keys = keys_of(served.ns, 2)
    with pytest.raises(NoDevice, match="no device GPU-1"):
        served.ns.acquire(keys, to="gpu:GPU-1")
    ticket = served.ns.prefetch(keys, to="gpu:GPU-1")
    assert (ticket.state, ticket.wait()) == ("failed", 0)
    assert "no device GPU-1" in ticket.why
    for name in ("cuda:0", "gpu:", "gpu:ä", UUIDS[0]):
        with pytest.raises(InvalidArgument, match="write gpu:UUID"):
            served.ns.acquire(keys, to=name)
        with pytest.raises(InvalidArgument, match="write gpu:UUID"):
            served.ns.prefetch(keys, to=name)


async def prefetched(endpoint: str, name: str, block_bytes: int, device: str) -> int:
    async with aio.Client(endpoint) as client:
        ns = await client.raw_namespace(name, block_bytes)
        ticket = await ns.prefetch([ns.key(f"k{i}".encode()) for i in range(COUNT)], deadline_s=20.0, to=device)
        return await ticket.wait()


def test_by_asyncio_blocks_are_brought_to_a_device_too(gpu_node: GpuNode, served: Served) -> None:
    import asyncio

    filled(served)
    name = f"paged-{served.kv.packing}"
    assert asyncio.run(prefetched(gpu_node.endpoint, name, served.kv.block_bytes, to(gpu_node))) == COUNT
