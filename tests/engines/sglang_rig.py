"""In SGLang's environment: host pools of its own, on the CPU, and our backend made by its factory.

Called by test_sglang.py through EngineProcess, so arguments and answers are JSON. Backends are named.
"""

import importlib.machinery
import sys
import types
from typing import Any


class _Absent(types.ModuleType):
    """Stands in for torchvision, which SGLang imports and has no use for here: any name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _without_torchvision() -> None:
    parts = ("", ".transforms", ".transforms.functional", ".transforms.v2", ".io")
    for name in (f"torchvision{part}" for part in parts):
        module = _Absent(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module


import transformers  # noqa: E402 (before torchvision is there, or it would be used)

_without_torchvision()

import torch  # noqa: E402
from sglang.srt.managers.cache_controller import storage_model_name  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_context, get_server_args  # noqa: E402
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: E402

from kvstore_client.connectors.sglang import ENGINE  # noqa: E402

LAYERS, HEADS, DIM, PAGE, TOKENS = 3, 2, 32, 16, 512
CPU = torch.device("cpu")

backends: dict[str, Any] = {}
pools: dict[str, dict[str, Any]] = {}
kept: dict[str, Any] = {}


def _addresses(tensors: tuple[Any, ...]) -> Any:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def _mha(layout: str, dtype: str, page: int, heads: int = HEADS) -> Any:
    kind = getattr(torch, dtype)
    k, v = (tuple(torch.zeros(TOKENS + page, heads, DIM, dtype=kind) for _ in range(LAYERS)) for _ in "kv")
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=_addresses(k), v_data_ptrs=_addresses(v), layout=next(iter(KVBufferLayout))
        ),
        page_size=page,
        head_num=heads,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=kind,
        device=CPU,
    )
    sizes = {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": LAYERS}
    return MHATokenToKVPoolHost(info, 2.0, 0, page, layout, pin_memory=False, device="cpu", **sizes)


def _mla(layout: str, dtype: str, page: int) -> Any:
    kind = getattr(torch, dtype)
    buffers = tuple(torch.zeros(TOKENS + page, 1, 64 + 16, dtype=kind) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=_addresses(buffers),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=page,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        kv_cache_dim=80,
        dtype=kind,
        device=CPU,
    )
    sizes = {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": LAYERS, "target_layer_num": LAYERS}
    return MLATokenToKVPoolHost(info, 2.0, 0, page, layout, pin_memory=False, device="cpu", **sizes)


def start(
    name: str, endpoint: str, pool: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **extra: Any
) -> None:
    """A backend of SGLang's factory over a host pool, attached as its cache controller does."""
    what = {"kind": "mha", "layout": "page_first", "dtype": "float32", "page": PAGE, **(pool or {})}
    host = {"mha": _mha, "mla": _mla}[what.pop("kind")](**what)
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": isinstance(host, MLATokenToKVPoolHost),
        "enable_storage_metrics": True,
        "is_page_first_layout": host.layout == "page_first",
        "model_name": storage_model_name("tiny", host),
        **(config or {}),
    }
    fields["extra_config"] = {
        "backend_name": "kvstored",
        "module_path": "kvstore_client.connectors.sglang",
        "class_name": "KVStoreHiCache",
        "interface_v1": 1,
        "endpoint": endpoint,
        **fields.get("extra_config", {}),
    }
    backend = StorageBackendFactory.create_backend("dynamic", HiCacheStorageConfig(**fields), host)
    backend.register_mem_pool_host(host)
    backend.on_host_pools_registered()
    backends[name], pools[name] = backend, {"kv": host}


def in_an_engine(directory: str, arguments: dict[str, Any]) -> None:
    """Publishes the arguments of an engine, as its own processes do; from here on this one has them."""
    transformers.LlamaConfig(num_hidden_layers=1, architectures=["LlamaForCausalLM"]).save_pretrained(directory)
    set_global_server_args_for_scheduler(
        ServerArgs(model_path=directory, device="cpu", skip_tokenizer_init=True, **arguments)
    )


def unknown_arguments(directory: str) -> list[str]:
    """Which of the arguments that name pages this release of SGLang does not have."""
    in_an_engine(directory, {})
    return [name for name in ENGINE if not hasattr(get_server_args(), name)]


def other_weights(field: str, value: str) -> None:
    """As SGLang's scheduler does when it was given others while it runs."""
    get_context().override("scheduler.weight_version", **{field: value})


def add_pool(name: str, pool_name: str, pool: dict[str, Any]) -> None:
    """Another pool of a hybrid model."""
    what = {"layout": "page_first", "dtype": "float32", "page": PAGE, **pool}
    host = _mha(**what)
    backends[name].register_mem_host_pool_v2(host, PoolName(pool_name))
    pools[name][pool_name] = host


def hashes(pages: int, seed: int = 0, page: int = PAGE) -> list[str]:
    """SGLang's own names of the pages of a prompt."""
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 1000, (pages * page,), generator=source).tolist()
    names: list[str] = get_storage_hash_str(tokens, None, page_size=page)
    return names


def fill(name: str, seed: int) -> None:
    """Other bytes in every pool, and remembers them."""
    for pool, host in pools[name].items():
        raw = host.kv_buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
        kept[f"{seed} {pool} {host.kv_buffer.shape}"] = raw.clone()


def wipe(name: str) -> None:
    for host in pools[name].values():
        host.kv_buffer.zero_()


def _indices(pages: int, first: int, page: int) -> Any:
    return torch.arange(first * page, (first + pages) * page)


def put(name: str, keys: list[str], first: int = 0, before: list[str] | None = None) -> list[bool]:
    """Stores pages that lie in the pool from page `first` on."""
    page = pools[name]["kv"].page_size
    extra = HiCacheStorageExtraInfo(prefix_keys=before)
    answers: list[bool] = backends[name].batch_set_v1(keys, _indices(len(keys), first, page), extra)
    return answers


def get(name: str, keys: list[str], first: int = 0) -> list[bool]:
    page = pools[name]["kv"].page_size
    answers: list[bool] = backends[name].batch_get_v1(keys, _indices(len(keys), first, page))
    return answers


def exists(name: str, keys: list[str]) -> int:
    found: int = backends[name].batch_exists(keys, HiCacheStorageExtraInfo())
    return found


def same(name: str, seed: int, pages: int, first: int = 0, was: int = 0, pool: str = "kv") -> list[bool]:
    """For each page from `first` on, whether its bytes are those that `fill(seed)` had put into pages from `was` on."""
    host = pools[name][pool]
    raw = host.kv_buffer.view(torch.uint8)
    old = kept[f"{seed} {pool} {host.kv_buffer.shape}"]
    return [torch.equal(_page(host, raw, first + i), _page(host, old, was + i)) for i in range(pages)]


def _page(host: Any, raw: Any, page: int) -> Any:
    """All of one page, in a buffer of the pool's shape."""
    at: Any = slice(page * host.page_size, (page + 1) * host.page_size)
    if host.layout in ("page_first_direct", "page_head"):
        at = page
    axis = (0 if isinstance(host, MLATokenToKVPoolHost) else 1) + (host.layout == "layer_first")
    return raw[(slice(None),) * axis + (at,)]


def _transfers(name: str, what: dict[str, Any]) -> list[Any]:
    return [
        PoolTransfer(
            name=PoolName(pool),
            host_indices=_indices(len(asked["keys"]), asked.get("first", 0), pools[name][pool].page_size),
            keys=asked["keys"],
            hit_policy=PoolHitPolicy(asked.get("policy", "all_pages")),
        )
        for pool, asked in what.items()
    ]


def exists_v2(name: str, keys: list[str], what: dict[str, Any]) -> list[Any]:
    found = backends[name].batch_exists_v2(keys, _transfers(name, what), HiCacheStorageExtraInfo())
    hits = {str(pool): pages for pool, pages in found.extra_pool_hit_pages.items()}
    return [found.kv_hit_pages, hits, found.restorable_prefix_pages]


def put_v2(name: str, what: dict[str, Any]) -> dict[str, list[bool]]:
    answers = backends[name].batch_set_v2(_transfers(name, what), extra_info=HiCacheStorageExtraInfo())
    return {str(pool): answer for pool, answer in answers.items()}


def get_v2(name: str, what: dict[str, Any]) -> dict[str, list[bool]]:
    answers = backends[name].batch_get_v2(_transfers(name, what), extra_info=HiCacheStorageExtraInfo())
    return {str(pool): answer for pool, answer in answers.items()}


def put_flat(name: str, keys: list[str]) -> bool:
    """As SGLang's cache controller does without the zero-copy calls."""
    host = pools[name]["kv"]
    done: bool = backends[name].batch_set(keys, [host.get_data_page(i * host.page_size) for i in range(len(keys))])
    return done


def get_flat(name: str, keys: list[str]) -> list[bool]:
    host = pools[name]["kv"]
    pages = backends[name].batch_get(keys, [host.get_dummy_flat_data_page() for _ in keys])
    for i, page in enumerate(pages):
        if page is not None:
            host.set_from_flat_data_page(i * host.page_size, page)
    return [page is not None for page in pages]


def one_by_one(name: str, key: str) -> list[bool]:
    """`set`, `exists` and `get` of single pages."""
    host, backend = pools[name]["kv"], backends[name]
    page = host.get_data_page(0)
    into = host.get_dummy_flat_data_page()
    return [
        backend.exists(key),
        backend.get(key, into) is None,
        backend.set(key, page),
        backend.exists(key),
        torch.equal(backend.get(key, into).view(torch.uint8), page.reshape(into.shape).view(torch.uint8)),
    ]


def nonsense(name: str) -> list[Any]:
    """Calls that no backend can carry out; each answer, none of which may be an exception."""
    backend, keys = backends[name], hashes(2)
    unknown = PoolTransfer(name=PoolName.MAMBA, host_indices=torch.arange(2), keys=keys)
    return [
        backend.batch_set_v1(keys, torch.arange(5)),
        backend.batch_get_v1(keys, None),
        backend.batch_exists([None]),
        list(backend.batch_set_v2([unknown]).values()),
        list(backend.batch_get_v2([unknown]).values()),
        backend.batch_exists_v2(keys, [unknown]).kv_hit_pages,
        backend.get("x"),
        backend.set("x"),
        backend.batch_get(keys, None),
        backend.batch_set(keys, None),
        backend.errors > 0,
    ]


def attach_error(*arguments: Any) -> str:
    """What attaching such a backend raises."""
    try:
        start("refused", *arguments)
    except Exception as e:  # noqa: BLE001 (which one it is, the test looks at)
        return f"{type(e).__name__}: {e}"
    return ""


def clear(name: str) -> None:
    backends[name].clear()


def stats(name: str) -> list[list[Any]]:
    figures = backends[name].get_stats()
    speeds = [bool(speed > 0) for speed in (*figures.prefetch_bandwidth, *figures.backup_bandwidth)]
    return [figures.prefetch_pgs, figures.backup_pgs, speeds]


def close_all() -> None:
    for backend in backends.values():
        backend.close()
    backends.clear()
    pools.clear()
    kept.clear()
