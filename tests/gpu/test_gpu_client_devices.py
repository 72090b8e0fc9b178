"""The SDK on a GPU, where there is one, and on a HostDevice everywhere: the same claims, a daemon by itself."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore_client import Client, Namespace
from kvstore_client.paged import PagedKV, SlotOrder
from kvstored_cuda.devices.discovery import devices
from tests.conftest import RunningDaemon, eventually
from tests.gpu.client_engine import DTYPES, KINDS, Cache, keys_of, namespace_for, use_host_device
from tests.gpu.gpu_nodes import UUIDS, GpuNode

PAGES, COUNT = 32, 6


class Host:
    """A HostDevice of this process and of the daemon's."""

    def __init__(self, start_gpu_node: Callable[..., GpuNode]) -> None:
        self._start = start_gpu_node
        self.uuid = UUIDS[0]
        self.device = use_host_device(self.uuid)
        self.stream = self.device.stream()

    def daemon(self, gpu_size: str) -> RunningDaemon:
        return self._start(gpu__size=gpu_size, host__size="128MiB")

    def on_device(self, array: Any) -> Any:
        return array

    def on_host(self, array: Any) -> Any:
        return array

    def synchronize(self) -> None:
        self.stream.synchronize(20)


class Cuda:
    """The first GPU."""

    def __init__(self, start_daemon: Callable[..., RunningDaemon]) -> None:
        import cupy

        self._cupy, self._start = cupy, start_daemon
        self.uuid = devices({}).found[0].uuid
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def daemon(self, gpu_size: str) -> RunningDaemon:
        return self._start(gpu__size=gpu_size, host__size="128MiB")

    def on_device(self, array: Any) -> Any:
        """Of cudaMalloc itself; there when this returns."""
        found = self._cupy.asarray(array)
        self._cupy.cuda.Device().synchronize()
        return found

    def on_host(self, array: Any) -> Any:
        return self._cupy.asnumpy(array)

    def synchronize(self) -> None:
        self.stream.synchronize()


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def on(
    request: pytest.FixtureRequest,
    start_gpu_node: Callable[..., GpuNode],
    start_daemon: Callable[..., RunningDaemon],
) -> Any:
    return Host(start_gpu_node) if request.param == "host" else Cuda(start_daemon)


class Engine:
    """A cache whose pages are known, on the device; and what it looks like from the host."""

    def __init__(self, on: Any, kind: str, dtype: str, seed: int, **said: Any) -> None:
        self.on, self.cache = on, Cache(kind, dtype, PAGES, seed)
        self.layers = [
            tuple(map(on.on_device, layer)) if isinstance(layer, tuple) else on.on_device(layer)
            for layer in self.cache.layers
        ]
        self.kv = PagedKV(self.layers, self.cache.axes, device=f"gpu:{on.uuid}", **said)

    def blocks(self, pages: list[int]) -> list[bytes]:
        """What the pages have now."""
        self.on.synchronize()
        self.cache.layers = [
            tuple(map(self.on.on_host, layer)) if isinstance(layer, tuple) else self.on.on_host(layer)
            for layer in self.layers
        ]
        each = self.kv.layout.pages_per_slot
        return [self.cache.block(pages[i : i + each]) for i in range(0, len(pages), each)]


def put(ns: Namespace, engine: Engine, pages: list[int], name: str = "k") -> list[bytes]:
    keys = keys_of(ns, len(pages) // engine.kv.layout.pages_per_slot, name)
    result = ns.put(keys, engine.kv.blocks(pages, stream=engine.on.stream))
    assert (result.stored, result.error) == (len(keys), None)
    return engine.blocks(pages)


def check(ns: Namespace, engine: Engine, pages: list[int], expected: list[bytes], name: str = "k") -> None:
    keys = keys_of(ns, len(expected), name)
    assert ns.get_into(keys, engine.kv.blocks(pages, stream=engine.on.stream)) == len(keys)
    assert engine.blocks(pages) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back_from_the_pool_and_from_shared_memory(on: Any, kind: str, dtype: str) -> None:
    """In the store's own order: what a process without a device reads is the same bytes."""
    daemon = on.daemon("32MiB")
    rng = np.random.default_rng(7)
    with Client(daemon.endpoint, timeout_s=20.0) as client:
        for order in (SlotOrder.CANONICAL, SlotOrder.ENGINE):
            writer = Engine(on, kind, dtype, 1, order=order, pages_per_slot=2)
            reader = Engine(on, kind, dtype, 2, order=order, pages_per_slot=2)
            ns = namespace_for(client, writer.kv, f"{kind}-{dtype}-{order}")
            pages = rng.permutation(PAGES)[: 2 * COUNT].tolist()
            expected = put(ns, writer, pages)
            check(ns, reader, rng.permutation(PAGES)[: 2 * COUNT].tolist(), expected)
            if order is SlotOrder.CANONICAL:
                assert ns.get(keys_of(ns, COUNT)) == expected
        assert client.stats()["gpus"][0]["counters"]["committed"] == 2 * COUNT


def figures(client: Client, on: Any) -> dict[str, Any]:
    found: dict[str, Any] = client.device_stats()["devices"][on.uuid]
    return found


def test_pages_go_by_shared_memory_where_there_is_no_pool(on: Any) -> None:
    daemon = on.daemon("0")
    with Client(daemon.endpoint, timeout_s=20.0) as client:
        engine, reader = Engine(on, "nhd", "bf16", 1), Engine(on, "nhd", "bf16", 2)
        ns = namespace_for(client, engine.kv)
        put(ns, engine, [0], "first")  # by a buffer: nothing is page-locked yet
        eventually(lambda: figures(client, on)["page_locked_bytes"], what="page-locked memory")
        before = figures(client, on)["staged_blocks"]
        pages = list(range(COUNT))
        expected = put(ns, engine, pages)
        staged = figures(client, on)["staged_blocks"]
        assert staged == before + COUNT, "no kernel writes where the daemon cannot tell when it has ended"
        check(ns, reader, list(range(10, 10 + COUNT)), expected)
        assert ns.get(keys_of(ns, COUNT)) == expected
        assert figures(client, on)["staged_blocks"] == staged, "what is read is read straight"


def test_a_lease_on_the_device_is_an_array_there(on: Any) -> None:
    daemon = on.daemon("32MiB")
    with Client(daemon.endpoint, timeout_s=20.0) as client:
        engine = Engine(on, "nhd", "bf16", 1)
        ns = namespace_for(client, engine.kv)
        expected = put(ns, engine, list(range(COUNT)))
        lease = ns.acquire(keys_of(ns, COUNT), to=f"gpu:{on.uuid}")
        assert len(lease) == COUNT
        arrays = [lease.dlpack(i).array() for i in range(COUNT)]
        assert [on.on_host(array).tobytes() for array in arrays] == expected
        lease.release(on.stream)
        assert client.stats()["gpus"][0]["leased"] == COUNT, "the arrays keep them"
        del arrays
        eventually(lambda: not client.stats()["gpus"][0]["leased"])


def test_a_tensor_of_torch_is_the_block(on: Any) -> None:
    torch = pytest.importorskip("torch")
    if isinstance(on, Cuda) and not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    daemon = on.daemon("32MiB")
    with Client(daemon.endpoint, timeout_s=20.0) as client:
        engine = Engine(on, "nhd", "bf16", 1)
        ns = namespace_for(client, engine.kv)
        expected = put(ns, engine, list(range(COUNT)))
        with ns.acquire(keys_of(ns, COUNT), to=f"gpu:{on.uuid}") as lease:
            tensor = lease.torch(2, torch.bfloat16)
            assert tensor.device.type == ("cuda" if isinstance(on, Cuda) else "cpu")
            assert tensor.view(torch.uint8).cpu().numpy().tobytes() == expected[2]
            del tensor
        eventually(lambda: not client.stats()["gpus"][0]["leased"])
