"""In LMCache's environment: its own classes over our plugins. Called by test_lmcache.py through EngineProcess."""

import asyncio
import select
from collections.abc import Callable
from typing import Any

import torch
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.platform import consume_fd
from lmcache.v1.storage_backend.storage_manager import StorageManager

from kvstore_client.connectors.lmcache import locks

WAIT_S = 20.0
SHAPE, KIND = torch.Size((2, 4, 128, 64)), torch.bfloat16
CHUNK, LAYERS, HEADS, DIM, PAGE = 128, 4, 2, 32, 16

adapters: dict[str, Any] = {}
managers: dict[str, Any] = {}
clients: dict[str, Any] = {}
heard: list[list[Any]] = []


# -- the L2 adapter by itself


class _Listener:
    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        heard.append(["stored", len(keys), sum(sizes)])

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        heard.append(["accessed", len(keys)])

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        heard.append(["deleted", len(keys)])


def adapter(name: str, endpoint: str, params: dict[str, Any]) -> list[int]:
    """Makes one by LMCache's own loader; its three descriptors."""
    config = PluginL2AdapterConfig.from_dict(
        {
            "module_path": "kvstore_client.connectors.lmcache.l2",
            "class_name": "KVStoreL2Adapter",
            "adapter_params": {"endpoint": endpoint, **params},
        }
    )
    made = create_l2_adapter_from_registry(config)
    made.register_listener(_Listener())
    adapters[name] = made
    return [made.get_store_event_fd(), made.get_lookup_and_lock_event_fd(), made.get_load_event_fd()]


def adapter_error(endpoint: str, params: dict[str, Any]) -> str:
    try:
        adapter("refused", endpoint, params)
    except Exception as e:  # noqa: BLE001 (which one it is, the test looks at)
        return f"{type(e).__name__}: {e}"
    return ""


def _keys(count: int, fields: dict[str, Any]) -> list[Any]:
    first = fields.pop("first", 0)
    return [
        ObjectKey(**{"chunk_hash": b"chunk %d" % (first + i), "model_name": "tiny", "kv_rank": 1, **fields})
        for i in range(count)
    ]


def _objects(count: int, seed: int | None, shape: Any, kind: Any) -> list[Any]:
    """Objects of LMCache's; other bytes for each seed, zeroes for none."""
    made = []
    for i in range(count):
        raw = torch.zeros(shape.numel() * kind.itemsize, dtype=torch.uint8)
        if seed is not None:
            raw.random_(0, 256, generator=torch.Generator().manual_seed(seed * 1000 + i))
        meta = MemoryObjMetadata(shape, kind, 0, raw.numel(), 1, shapes=[shape], dtypes=[kind])
        made.append(TensorMemoryObj(raw, meta, None))
    return made


def _kind(fields: dict[str, Any]) -> tuple[Any, Any]:
    return torch.Size(fields.pop("shape", SHAPE)), getattr(torch, fields.pop("dtype", "bfloat16"))


def _wait(fd: int) -> None:
    ready, _, _ = select.select([fd], [], [], WAIT_S)
    assert ready, "nothing was signalled"
    consume_fd(fd)


def _bits(bitmap: Any, count: int) -> list[bool]:
    return [bool(bitmap.test(i)) for i in range(count)]


def store(name: str, count: int, seed: int, fields: dict[str, Any]) -> list[Any]:
    it, (shape, kind) = adapters[name], _kind(fields)
    task = it.submit_store_task(_keys(count, fields), _objects(count, seed, shape, kind))
    _wait(it.get_store_event_fd())
    results = it.pop_completed_store_tasks()
    assert list(results) == [task]
    return [results[task].is_successful(), results[task].bytes_transferred()]


def look_up(name: str, count: int, fields: dict[str, Any]) -> list[bool]:
    """Also that the answer is given once."""
    it, (shape, kind) = adapters[name], _kind(fields)
    described = {} if fields.pop("undescribed", False) else {0: MemoryLayoutDesc([shape], [kind])}
    task = it.submit_lookup_and_lock_task(_keys(count, fields), described)
    _wait(it.get_lookup_and_lock_event_fd())
    bitmap = it.query_lookup_and_lock_result(task)
    assert it.query_lookup_and_lock_result(task) is None
    return _bits(bitmap, count)


def load(name: str, count: int, seed: int, fields: dict[str, Any]) -> list[list[bool]]:
    """What was loaded, and whether it is what `store` had with that seed; what was not is as it was."""
    it, (shape, kind) = adapters[name], _kind(fields)
    objects = _objects(count, None, shape, kind)
    task = it.submit_load_task(_keys(count, fields), objects)
    _wait(it.get_load_event_fd())
    loaded = _bits(it.query_load_result(task), count)
    expected = _objects(count, seed, shape, kind)
    right = [
        torch.equal(got.raw_data, want.raw_data if there else torch.zeros_like(want.raw_data))
        for got, want, there in zip(objects, expected, loaded, strict=True)
    ]
    return [loaded, right]


def unlock(name: str, count: int, fields: dict[str, Any]) -> None:
    adapters[name].submit_unlock(_keys(count, fields))


def delete(name: str, count: int, fields: dict[str, Any]) -> None:
    adapters[name].delete(_keys(count, fields))


def status(name: str) -> dict[str, Any]:
    answer: dict[str, Any] = adapters[name].report_status()
    return answer


def lock_time(seconds: float) -> float:
    """Sets how long a lock lasts that nobody ends; as it was."""
    was, locks.LOCK_S = locks.LOCK_S, seconds
    return was


def closed(name: str) -> list[Any]:
    """Closes it in the middle of things, and what each call answers after that."""
    it, keys, described = adapters[name], _keys(1, {}), {0: MemoryLayoutDesc([SHAPE], [KIND])}
    it.close()
    store, found = (
        it.submit_store_task(keys, _objects(1, 1, SHAPE, KIND)),
        it.submit_lookup_and_lock_task(keys, described),
    )
    load = it.submit_load_task(keys, _objects(1, 1, SHAPE, KIND))
    it.submit_unlock(keys)
    it.delete(keys)
    it.close()
    return [
        it.pop_completed_store_tasks()[store].is_successful(),
        _bits(it.query_lookup_and_lock_result(found), 1),
        _bits(it.query_load_result(load), 1),
        it.report_status()["is_healthy"],
    ]


def notices() -> list[list[Any]]:
    said = list(heard)
    heard.clear()
    return said


def nonsense(name: str) -> list[Any]:
    """Tasks that cannot be carried out; each must be answered."""
    it, keys = adapters[name], _keys(2, {})
    task = it.submit_store_task(keys, [])
    _wait(it.get_store_event_fd())
    stored = it.pop_completed_store_tasks()[task].is_successful()
    task = it.submit_load_task(keys, [None, None])
    _wait(it.get_load_event_fd())
    loaded = _bits(it.query_load_result(task), 2)
    task = it.submit_lookup_and_lock_task([None, None], {})
    _wait(it.get_lookup_and_lock_event_fd())
    found = _bits(it.query_lookup_and_lock_result(task), 2)
    it.submit_unlock(keys)
    it.delete(keys)
    return [stored, loaded, found]


# -- `lmcache server`, by the client of LMCache's own benchmark


def connect(name: str, port: int) -> None:
    config = BenchConfig(
        rpc_url=f"tcp://127.0.0.1:{port}",
        http_url="",
        mode="cpu",
        transfer_mode="engine_driven",
        tp_size=1,
        use_mla=False,
        num_tokens=CHUNK * 4,
        kvcache_shape_spec=f"(2,64,{PAGE},{HEADS},{DIM}):bfloat16:{LAYERS}",
        num_blocks=64,
        block_size=PAGE,
    )
    clients[name] = ServerBenchClient(config, lambda line: None)
    clients[name].start()


def _cache(name: str, seed: int | None) -> list[Any]:
    """The engine's KV cache, with other bytes for each seed, zeroes for none."""
    tensors = list(clients[name]._workers[0].kv_caches.values())
    for i, tensor in enumerate(tensors):
        raw = tensor.view(torch.uint8)
        if seed is None:
            raw.zero_()
        else:
            raw.copy_(
                torch.randint(
                    0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed * 100 + i)
                )
            )
    return tensors


def _pages(tensors: list[Any], request: Any, chunks: int) -> list[Any]:
    first = request.block_offset
    return [tensor.view(torch.uint8)[:, first : first + chunks * CHUNK // PAGE].clone() for tensor in tensors]


def server_store(name: str, prompt: int, seed: int) -> bool:
    client = clients[name]
    _cache(name, seed)
    request = client.create_request(prompt, f"store {prompt} {seed}", "store")
    client.lookup(request)
    result = client.store(request, 0, request.num_full_tokens)
    client.end_session(request)
    return bool(result.succeeded)


def server_retrieve(name: str, prompt: int, seed: int) -> list[Any]:
    """Chunks found, and whether what was retrieved is what had been stored with that seed."""
    client = clients[name]
    request = client.create_request(prompt, f"retrieve {prompt} {seed} {len(heard)}", "retrieve")
    heard.append(["request"])
    found = client.lookup(request).hit_chunks
    right = None
    if found:
        expected = _pages(_cache(name, seed), request, found)
        tensors = _cache(name, None)
        client.retrieve(request, 0, found * CHUNK)
        right = all(map(torch.equal, _pages(tensors, request, found), expected))
    client.end_session(request)
    return [found, right]


def disconnect(name: str) -> None:
    clients.pop(name).close()


# -- the storage manager within an engine


def manager(name: str, endpoint: str, extra: dict[str, Any], model: str = "tiny") -> list[str]:
    """A storage manager with our connector; its backends."""
    plugin = "remote_storage_plugin.kvstored."
    config = LMCacheEngineConfig.from_dict(
        {
            "chunk_size": 256,
            "local_cpu": True,
            "max_local_cpu_size": 0.25,
            "remote_storage_plugins": ["kvstored"],
            "remote_serde": "naive",
            "extra_config": {
                f"{plugin}module_path": "kvstore_client.connectors.lmcache.remote",
                f"{plugin}class_name": "KVStoreConnector",
                f"{plugin}endpoint": endpoint,
                **{plugin + setting: value for setting, value in extra.items()},
            },
        }
    )
    metadata = LMCacheMetadata(
        model_name=model,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(4, 2, 256, 2, 32),
        role="worker",
        chunk_size=256,
    )
    managers[name] = StorageManager(config, metadata, EventManager()), metadata
    return [str(backend) for backend in managers[name][0].storage_backends]


def _engine_keys(count: int, model: str = "tiny") -> list[Any]:
    return [CacheEngineKey(model, 1, 0, i + 1, torch.bfloat16) for i in range(count)]


def _tensors(count: int, seed: int, tokens: int) -> list[Any]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, tokens, 64, generator=source).to(torch.bfloat16) for _ in range(count)]


def manager_put(name: str, count: int, seed: int, tokens: int = 256) -> None:
    it, metadata = managers[name]
    shapes = [torch.Size((2, 4, tokens, 64))]
    objects = []
    for tensor in _tensors(count, seed, tokens):
        thing = it.allocate(shapes, metadata.get_dtypes(), MemoryFormat.KV_2LTD)
        thing.tensor.copy_(tensor)
        objects.append(thing)
    it.batched_put(_engine_keys(count), objects)


def manager_forget(name: str) -> None:
    """Empties LMCache's own memory."""
    managers[name][0].storage_backends["LocalCPUBackend"].clear()


def manager_found(name: str, count: int) -> int:
    found: int = managers[name][0].batched_contains(_engine_keys(count))[0]
    return found


def manager_get(name: str, count: int, seed: int, tokens: int = 256) -> list[Any]:
    """For each chunk None, or whether it is what was put."""
    answers: list[Any] = []
    for key, want in zip(_engine_keys(count), _tensors(count, seed, tokens), strict=True):
        got = managers[name][0].get(key)
        answers.append(None if got is None else bool(torch.equal(got.tensor, want)))
        if got is not None:
            got.ref_count_down()
    return answers


def _connection(name: str) -> tuple[Any, Any]:
    """Our connector in a storage manager, and the loop that LMCache calls it in."""
    (backend,) = [backend for backend in managers[name][0].storage_backends.values() if hasattr(backend, "connection")]
    return backend.connection.getWrappedConnector(), backend.loop


def manager_gives_up(name: str, count: int) -> list[Any]:
    """LMCache stops waiting for a read under way: whether it did, and how many bytes more are in use after it."""
    connection, loop = _connection(name)
    memory = managers[name][0].storage_backends["LocalCPUBackend"].memory_allocator.pin_allocator

    async def begun_and_cancelled() -> bool:
        reading = asyncio.ensure_future(connection.batched_get(_engine_keys(count)))
        while memory.total_allocated_size == before and not reading.done():
            await asyncio.sleep(0)
        reading.cancel()
        try:
            for thing in await reading:
                thing.ref_count_down()
        except asyncio.CancelledError:
            return True
        return False

    before = memory.total_allocated_size
    cancelled = asyncio.run_coroutine_threadsafe(begun_and_cancelled(), loop).result(WAIT_S)
    asyncio.run_coroutine_threadsafe(connection.batched_get([]), loop).result(WAIT_S)  # so the one before is over
    return [cancelled, memory.total_allocated_size - before]


def _in_loop(name: str, call: Callable[[Any], Any]) -> Any:
    connection, loop = _connection(name)
    return asyncio.run_coroutine_threadsafe(call(connection), loop).result(WAIT_S)


def manager_tags(name: str, stored: dict[str, str], asked: dict[str, str]) -> list[bool]:
    """Whether a chunk that was stored with some tags is found by these, and by others."""
    it, metadata = managers[name]
    ours, others = (
        CacheEngineKey("tiny", 1, 0, 7, KIND, {f"lmcache.tag.{tag}": value for tag, value in tags.items()})
        for tags in (stored, asked)
    )
    assert ours != others
    thing = it.allocate([torch.Size((2, 4, 256, 64))], metadata.get_dtypes(), MemoryFormat.KV_2LTD)
    _in_loop(name, lambda connection: connection.batched_put([ours], [thing]))
    return [_exists(name, key) for key in (ours, others)]


def _exists(name: str, key: Any) -> bool:
    return bool(_in_loop(name, lambda connection: connection.exists(key)))


def manager_full(name: str, count: int) -> list[Any]:
    """All of LMCache's memory is in use: what a read answers; what it does when there is room again."""
    local, held = managers[name][0].storage_backends["LocalCPUBackend"], []
    shapes, kinds = [torch.Size((2, 4, 256, 64))], managers[name][1].get_dtypes()
    while (thing := local.allocate(shapes, kinds, busy_loop=False)) is not None:
        held.append(thing)
    without = _in_loop(name, lambda connection: connection.batched_get(_engine_keys(count)))
    for thing in held:
        thing.ref_count_down()
    objects = _in_loop(name, lambda connection: connection.batched_get(_engine_keys(count)))
    for thing in objects:
        thing.ref_count_down()
    return [thing is not None for thing in without + objects]


def manager_floods(name: str, calls: int) -> list[int]:
    """Puts, one right after the other; how often each object is still in use after they ended."""
    it, metadata = managers[name]
    connection, loop = _connection(name)
    shapes = [torch.Size((2, 4, 256, 64))]
    things = [it.allocate(shapes, metadata.get_dtypes(), MemoryFormat.KV_2LTD) for _ in range(calls)]
    keys = [CacheEngineKey("tiny", 1, 0, 1000 + i, KIND) for i in range(calls)]
    puts = [
        asyncio.run_coroutine_threadsafe(connection.batched_put([key], [thing]), loop)
        for key, thing in zip(keys, things, strict=True)
    ]
    for put in puts:
        put.result(WAIT_S)
    counts = [thing.get_ref_count() for thing in things]
    for thing in things:
        thing.ref_count_down()
    return counts


def manager_closed(name: str) -> list[Any]:
    """Closes our connector, and what its calls answer after that; the last: how often an object is still in use."""
    it, metadata = managers[name]
    thing = it.allocate([torch.Size((2, 4, 256, 64))], metadata.get_dtypes(), MemoryFormat.KV_2LTD)
    keys = _engine_keys(1)
    calls: list[Callable[[Any], Any]] = [
        lambda connection: connection.close(),
        lambda connection: connection.batched_put(keys, [thing]),
        lambda connection: connection.batched_get(keys),
        lambda connection: connection.batched_async_contains("", keys),
        lambda connection: connection.ping(),
    ]
    return [*(_in_loop(name, call) for call in calls), thing.get_ref_count()]


def close_all() -> None:
    for it in adapters.values():
        it.close()
    for it, _ in managers.values():
        it.close()
    for it in clients.values():
        it.close()
    for kept in (adapters, managers, clients, heard):
        kept.clear()
