"""Paged KV between engines in processes of their own: by the pool, by page-locked shared memory, by a buffer."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore_client import Client, FailedPrecondition, InvalidArgument, Layout
from kvstore_client.paged import PagedKV, SlotOrder
from tests.conftest import RunningDaemon
from tests.gpu.client_engine import DTYPES, KINDS, TOKENS, Cache, Engine, keys_of, namespace_for, use_host_device
from tests.gpu.gpu_nodes import UUIDS, GpuNode

PAGES = 24

Start = Callable[..., Engine]


@pytest.fixture
def engine() -> Iterator[Start]:
    """Starts engines as processes."""
    running: list[Engine] = []

    def start(*arguments: Any, **said: Any) -> Engine:
        running.append(Engine(*arguments, **said))
        return running[-1]

    yield start
    for one in running:
        one.close()


def drawn(seed: int) -> dict[str, Any]:
    """An arrangement, the same for one seed."""
    chance = random.Random(seed)
    return {
        "kind": chance.choice(KINDS),
        "dtype": chance.choice(list(DTYPES)),
        "pages_per_slot": chance.choice((1, 2, 3)),
        "order": chance.choice(("canonical", "engine")),
    }


def block_tables(seed: int, blocks: int, each: int) -> list[int]:
    return random.Random(seed).sample(range(PAGES), blocks * each)


def expected(said: dict[str, Any], seed: int, pages: list[int]) -> list[bytes]:
    """Blocks of the cache that an engine of this seed was filled with."""
    cache, each = Cache(said["kind"], said["dtype"], PAGES, seed), said["pages_per_slot"]
    return [cache.block(pages[i : i + each]) for i in range(0, len(pages), each)]


def read(engine: Engine, count: int, pages: list[int]) -> list[bytes]:
    copied, blocks = engine("get", count=count, pages=pages)
    assert copied == len(blocks) == count
    return [bytes.fromhex(block) for block in blocks]


@pytest.mark.parametrize("seed", range(6))
def test_blocks_by_the_pool_have_the_bytes_of_the_pages(gpu_node: GpuNode, engine: Start, seed: int) -> None:
    said, count = drawn(seed), 6
    uuid = gpu_node.uuids[0]
    writer = engine(gpu_node.endpoint, uuid, pages=PAGES, seed=1, **said)
    pages = block_tables(seed, count, said["pages_per_slot"])
    assert writer("put", count=count, pages=pages) == [count, 0, 0, ""], said
    stats = gpu_node.stats_of()
    assert stats["counters"]["committed"] == count, "they went by the pool"
    reader = engine(gpu_node.endpoint, uuid, pages=PAGES, seed=2, **said)
    assert read(reader, count, block_tables(seed + 1, count, said["pages_per_slot"])) == expected(said, 1, pages), said
    assert reader("stats")["segments_open"]
    assert reader("stats")["devices"][uuid]["staged_blocks"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_without_a_pool_blocks_are_staged_into_page_locked_memory_and_read_straight_from_it(
    daemon: RunningDaemon, engine: Start, seed: int
) -> None:
    said, count = drawn(seed + 100), 6
    each = said["pages_per_slot"]
    writer = engine(daemon.endpoint, UUIDS[0], pages=PAGES, seed=1, **said)
    assert writer("put", count=1, pages=block_tables(seed, 1, each), name="first")[0] == 1
    assert writer("page_locked")
    before = writer("stats")["devices"][UUIDS[0]]["staged_blocks"]
    pages = block_tables(seed, count, each)
    assert writer("put", count=count, pages=pages) == [count, 0, 0, ""], said
    staged = writer("stats")["devices"][UUIDS[0]]["staged_blocks"] - before
    assert staged == count, "no kernel writes to shared memory where the daemon cannot tell when it has ended"
    reader = engine(daemon.endpoint, UUIDS[0], pages=PAGES, seed=2, **said)
    assert reader("get", count=1, pages=block_tables(seed, 1, each), name="none")[0] == 0
    assert reader("page_locked")
    assert read(reader, count, block_tables(seed + 1, count, each)) == expected(said, 1, pages), said
    assert reader("stats")["devices"][UUIDS[0]]["staged_blocks"] == 0


@pytest.mark.parametrize("device", [{"memlock_bytes": 0}, {"memlock_bytes": 80 << 20}], ids=["none", "a buffer"])
def test_where_memory_cannot_be_page_locked_blocks_go_by_a_buffer(
    start_daemon: Callable[..., RunningDaemon], engine: Start, device: dict[str, Any]
) -> None:
    daemon = start_daemon(host__size="512MiB")
    said, count = {"kind": "hnd", "dtype": "bf16", "pages_per_slot": 2, "order": "canonical"}, 8
    faults = {"device": {**device, "faults": "register:fail=PageLockRefused"}}
    writer = engine(daemon.endpoint, UUIDS[0], pages=PAGES, seed=1, **said, **faults)
    pages = block_tables(5, count, 2)
    assert writer("put", count=count, pages=pages) == [count, 0, 0, ""]
    reader = engine(daemon.endpoint, UUIDS[0], pages=PAGES, seed=2, **said, **faults)
    assert read(reader, count, block_tables(6, count, 2)) == expected(said, 1, pages)
    for one in (writer, reader):
        assert "a fault on purpose" in one("page_locked", figure="page_lock_refused")[0]
        state = one("stats")["devices"][UUIDS[0]]
        assert state["staged_blocks"] == count
        assert state["page_locked_bytes"] == 0


def test_what_an_engine_put_on_a_device_a_process_without_one_reads(gpu_node: GpuNode, engine: Start) -> None:
    said = {"kind": "hnd", "dtype": "bf16", "pages_per_slot": 1, "order": "canonical"}
    writer = engine(gpu_node.endpoint, gpu_node.uuids[0], pages=PAGES, seed=1, **said)
    pages = block_tables(1, 5, 1)
    assert writer("put", count=5, pages=pages)[0] == 5
    device = use_host_device(UUIDS[3])
    kv = Cache("hnd", "bf16", PAGES).kv(device.uuid)
    with Client(gpu_node.endpoint) as client:
        ns = namespace_for(client, kv)
        assert ns.get(keys_of(ns, 5)) == expected(said, 1, pages)


def test_tensors_of_torch_are_an_engines_pages_too(gpu_node: GpuNode) -> None:
    torch = pytest.importorskip("torch")
    device = use_host_device(gpu_node.uuids[0])
    stream = device.stream()
    layers = [torch.randn(2, 8, TOKENS, 2, 32).to(torch.bfloat16) for _ in range(3)]
    others = [torch.zeros_like(layer) for layer in layers]
    kv = PagedKV(layers, "KBNHD", device=f"gpu:{device.uuid}")
    out = PagedKV(others, "KBNHD", device=f"gpu:{device.uuid}")
    with Client(gpu_node.endpoint) as client:
        ns = namespace_for(client, kv)
        assert ns.put(keys_of(ns, 3), kv.blocks(torch.tensor([5, 1, 2]), stream=stream)).stored == 3
        assert ns.get_into(keys_of(ns, 3), out.blocks(np.array([0, 7, 3]), stream=stream)) == 3
        stream.synchronize(10)
    for layer, other in zip(layers, others, strict=True):
        assert torch.equal(layer[:, [5, 1, 2]], other[:, [0, 7, 3]])


def test_what_is_there_is_not_copied_again(gpu_node: GpuNode, engine: Start) -> None:
    writer = engine(gpu_node.endpoint, gpu_node.uuids[0], "nhd", "bf16", PAGES)
    assert writer("put", count=3, pages=[1, 2, 3]) == [3, 0, 0, ""]
    assert writer("put", count=5, pages=[4, 5, 6, 7, 8]) == [2, 3, 0, ""]
    assert writer("put", count=5, pages=[9, 10], start=3) == [0, 2, 0, ""]
    assert gpu_node.stats_of()["counters"]["committed"] == 5


def test_a_range_of_layers_is_read_alone(gpu_node: GpuNode) -> None:
    device = use_host_device(gpu_node.uuids[0])
    stream = device.stream()
    source, target = Cache("nhd", "bf16", 8, 1), Cache("nhd", "bf16", 8, 2)
    before = target.page(5).copy()
    with Client(gpu_node.endpoint) as client:
        kv = source.kv(device.uuid)
        ns = namespace_for(client, kv)
        assert ns.put(keys_of(ns, 1), kv.blocks([3], stream=stream)).stored == 1
        out = target.kv(device.uuid).blocks([5], stream=stream, layers=range(1, 2))
        assert ns.get_into(keys_of(ns, 1), out) == 1
        stream.synchronize(10)
        with pytest.raises(InvalidArgument, match="put whole"):
            ns.put(keys_of(ns, 1), kv.blocks([3], stream=stream, layers=range(1)))
    after = target.page(5)
    assert (after[1] == source.page(3)[1]).all()
    assert (after[[0, 2]] == before[[0, 2]]).all()


def test_wrong_pages_are_refused_and_nothing_is_written(gpu_node: GpuNode) -> None:
    device = use_host_device(gpu_node.uuids[0])
    cache = Cache("nhd", "bf16", 8, 1)
    kv = cache.kv(device.uuid, pages_per_slot=2)
    before = [cache.page(i).copy() for i in range(8)]
    with Client(gpu_node.endpoint) as client:
        ns = namespace_for(client, kv)
        keys = keys_of(ns, 2)
        for pages, why in (
            ([0, 1, 2, 8], "page 8 is not one"),
            ([0, 1, -1, 2], "page -1 is not one"),
            ([0, 1, 2], "are not 2 for each block"),
            ([0.5, 1, 2, 3], "whole numbers"),
        ):
            with pytest.raises(InvalidArgument, match=why):
                kv.blocks(pages)
        with pytest.raises(InvalidArgument, match="pages of 1 blocks for the 2 keys"):
            ns.put(keys, kv.blocks([0, 1]))
        assert ns.put(keys, kv.blocks([0, 1, 2, 3])).stored == 2
        with pytest.raises(InvalidArgument, match="page 5 is to be written twice"):
            ns.get_into(keys, kv.blocks([4, 5, 5, 6]))
        with pytest.raises(InvalidArgument, match="a block of these pages has"):
            client.raw_namespace("other", 4096).get_into(keys, kv.blocks([4, 5, 6, 7]))
    assert all((cache.page(i) == before[i]).all() for i in range(8))


def test_a_stream_that_is_another_one_on_each_thread_is_refused() -> None:
    device = use_host_device(UUIDS[0])
    kv = Cache("nhd", "bf16", 8).kv(device.uuid)
    for per_thread in (2, Pointer(2)):
        with pytest.raises(InvalidArgument, match="pass a stream of your own"):
            kv.blocks([0], stream=per_thread)


class Pointer:
    """As cupy's streams are."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def test_bytes_that_mean_something_else_are_refused(gpu_node: GpuNode) -> None:
    device = use_host_device(gpu_node.uuids[0])
    cache = Cache("hnd", "bf16", 8, 1)
    plain, packed = cache.kv(device.uuid), cache.kv(device.uuid, order=SlotOrder.ENGINE)
    assert (plain.packing == "") is not (packed.packing == "")
    layout = Layout(model="m", dtype="bfloat16", num_layers=3, num_kv_heads=2, head_dim=32, block_tokens=TOKENS)
    with Client(gpu_node.endpoint) as client:
        ns = client.namespace(layout)
        keys = ns.keys(list(range(2 * TOKENS)))
        with pytest.raises(InvalidArgument, match="these pages are packed"):
            ns.put(keys, packed.blocks([1, 2]))
        assert ns.put(keys, plain.blocks([1, 2])).stored == 2
        assert np.array_equal(np.frombuffer(ns.get(keys)[0], np.uint16), cache.page(1).ravel())


def test_by_grpc_pages_are_refused(start_gpu_node: Callable[..., GpuNode]) -> None:
    node = start_gpu_node(server__grpc="127.0.0.1:0")
    device = use_host_device(node.uuids[0])
    kv = Cache("nhd", "bf16", 8).kv(device.uuid)
    with Client(node.grpc_endpoint) as client:
        ns = namespace_for(client, kv)
        with pytest.raises(FailedPrecondition, match="connect by its socket"):
            ns.put(keys_of(ns, 1), kv.blocks([1]))
        with pytest.raises(FailedPrecondition, match="connect by its socket"):
            ns.acquire(keys_of(ns, 1), to=f"gpu:{device.uuid}")
