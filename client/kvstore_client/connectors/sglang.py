"""SGLang's HiCache over kvstored: a storage backend that its "dynamic" loader makes.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvstored",
      "module_path": "kvstore_client.connectors.sglang", "class_name": "KVStoreHiCache", "interface_v1": 1}'

A page of a host pool is one block: its pieces (K and V, or each layer's, or the states of a Mamba layer) one
behind the other, copied once between the host pool and the store's memory. Pages are named by SGLang's own
hashes, which cover the tokens before them, LoRA and salt. All else that decides about their bytes (model,
ranks, layout, type, sizes, release) names the namespace, one a pool. An engine may be given other weights while it
runs: each call goes by those that SGLang says it has.

SGLang's threads die of an exception of a backend, so no call of theirs raises: it misses or is not stored, is
counted in `errors`, and logged. What cannot work is refused when the backend is attached.
"""

import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import sglang
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_model, get_server_args, get_serving

from kvstore_client import Client, Namespace
from kvstore_client.connectors import parts
from kvstore_client.errors import InvalidArgument, KVStoreError

log = logging.getLogger("kvstore_client")

SETTINGS = {"endpoint": None, "tenant": "default", "revision": "", "salt": "", "timeout_s": 0.5}
"""Ours in the extra config, with their defaults. `revision`: of the weights, which a model's name does not say."""

ENGINE = (
    *("revision", "dtype", "quantization", "quantization_param_path", "json_model_override_args"),
    *("load_format", "model_impl", "modelopt_quant", "rl_quant_profile"),
    *("kv_cache_dtype", "mamba_ssm_dtype", "attention_backend", "prefill_attention_backend"),
    *("speculative_draft_model_path", "speculative_draft_model_revision", "speculative_draft_model_quantization"),
    *("context_length", "trust_remote_code", "model_config_parser", "decrypted_config_file", "is_embedding"),
    *("custom_weight_loader", "model_loader_extra_config", "modelopt_checkpoint_restore_path", "quantize_and_serve"),
    *("kt_method", "kt_weight_path", "kt_num_gpu_experts", "enable_deepseek_v4_fp4_indexer", "qsa_indexer_dtype"),
    *("linear_attn_backend", "enable_mamba_cache_stochastic_rounding", "enable_int8_mamba_checkpoint"),
    *("enable_multimodal", "language_model_only", "mm_process_config", "image_processor_backend"),
    *("disable_fast_image_processor", "mm_attention_backend"),
)
"""The engine's own arguments that change what a page of the same size means."""

SGLANGS = {"backend_name", "module_path", "class_name", "interface_v1"}

LOG_EVERY_S = 10.0

Call = TypeVar("Call", bound=Callable[..., Any])


def _never_raises(otherwise: Callable[..., Any]) -> Callable[[Call], Call]:
    """A call of SGLang's threads: what is raised in it is counted and logged, and `otherwise(...)` answered."""

    def decorate(call: Call) -> Call:
        @functools.wraps(call)
        def guarded(self: "KVStoreHiCache", *arguments: Any, **more: Any) -> Any:
            try:
                return call(self, *arguments, **more)
            except Exception as e:  # noqa: BLE001 (a thread of the engine's would end with it)
                self._failed(call.__name__, e)
                return otherwise(*arguments, **more)

        return cast(Call, guarded)

    return decorate


Weights = tuple[str, str]
"""Path and version of a model's weights, as SGLang names them; nothing outside an engine."""


class _Pool:
    """A host pool and where its pages are kept."""

    def __init__(self, host: Any, writes: bool, open_for: Callable[[Weights], Namespace]) -> None:
        """`writes`: whether this rank stores; of pages that are the same on all ranks, one does."""
        self.host = host
        self.writes = writes
        self._open_for = open_for
        self._opened: dict[Weights, Namespace] = {}
        self.block_bytes = self.of(_weights()).block_bytes

    @property
    def namespace(self) -> Namespace:
        """That of the weights of now."""
        return self.of(_weights())

    def of(self, weights: Weights) -> Namespace:
        if weights not in self._opened:
            self._opened[weights] = self._open_for(weights)
        return self._opened[weights]

    def clear(self) -> None:
        for namespace in list(self._opened.values()):
            namespace.clear()


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types
    """One rank's backend. Safe to use from SGLang's threads."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Raises InvalidArgument for settings it does not know; connects, and does without a daemon that is away."""
        extra = dict(storage_config.extra_config or {})
        unknown = sorted(extra.keys() - SETTINGS.keys() - SGLANGS)
        if unknown:
            raise InvalidArgument(
                f"{', '.join(unknown)}: no such setting; kvstored's are {', '.join(sorted(SETTINGS))}"
            )
        settings = {**SETTINGS, **extra}
        self._config = storage_config
        self._zero_copy = bool(extra.get("interface_v1"))
        self._timeout_s = float(settings["timeout_s"])
        self._revision, self._salt = str(settings["revision"]), str(settings["salt"])
        self._client = Client(
            settings["endpoint"],
            tenant=settings["tenant"],
            name=f"sglang tp{storage_config.tp_rank} pp{storage_config.pp_rank}",
            timeout_s=self._timeout_s,
        )
        self._looked_up = _weights()
        """When pages were last asked for. Until then, those in the host pools may be of the weights before."""
        self._silence = parts.Silence(self._client, self._timeout_s)
        self._pools: dict[str, _Pool] = {}
        self._flat: _Pool | None = None
        """Pages as SGLang flattens them itself, for its calls that pass tensors."""
        self._lock = threading.Lock()
        self._figures = StorageMetrics()
        self._logged_at = -LOG_EVERY_S
        self.errors = 0

    # -- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of KV itself. Raises InvalidArgument, which fails the attach, where its pages have no addresses."""
        self.mem_pool_host = mem_pool_host
        if mem_pool_host.kv_buffer is None:
            return  # it only hands out indices: the data is in other pools
        if self._zero_copy:
            self._pools[str(PoolName.KV)] = self._opened(PoolName.KV, mem_pool_host)
            return
        page = mem_pool_host.get_dummy_flat_data_page()
        self._flat = self._named(PoolName.KV, mem_pool_host, [page.numel() * page.element_size()], "flat")

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Another pool, which the calls of the second version name. Raises like `register_mem_pool_host`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) not in self._pools and getattr(host_pool, "kv_buffer", host_pool) is not None:
            self._pools[str(host_pool_name)] = self._opened(host_pool_name, host_pool)

    def _opened(self, name: str, host: Any) -> _Pool:
        try:
            _, sizes = host.get_page_buffer_meta(torch.arange(_page_size(host)))
        except (ValueError, NotImplementedError, AttributeError) as e:
            raise InvalidArgument(f"pages of the {name} pool ({host.layout}) cannot be kept: {e}") from e
        return self._named(name, host, [int(size) for size in sizes], "pieces")

    def _named(self, name: str, host: Any, sizes: list[int], form: str) -> _Pool:
        """Opens the namespace of a pool: all that gives the bytes of its pages their meaning, but the tokens."""
        config = self._config
        replicated = config.is_mla_model and name != PoolName.MAMBA and not isinstance(host, MHATokenToKVPoolHost)
        identity = {
            "pool": str(name),
            "form": form,
            "sizes": sizes,
            "layout": host.layout,
            "dtypes": [str(getattr(host, field, "")) for field in ("dtype", "temporal_dtype")],
            "host": type(host).__name__,
            "page": _page_size(host),
            "layers": [getattr(host, "start_layer", None), getattr(host, "end_layer", None)],
            "tp": None if replicated else [config.tp_rank, config.tp_size],
            "pp": [config.pp_rank, config.pp_size],
            "cp": [config.attn_cp_rank, config.attn_cp_size],
            "dcp": [config.dcp_rank, config.dcp_size],
            "revision": self._revision,
            "engine": _engine_arguments(),
            "sglang": sglang.__version__,
        }

        def open_for(weights: Weights) -> Namespace:
            named = json.dumps({**identity, "weights": weights}, sort_keys=True)
            label = f"sglang {config.model_name} {name} {named}"
            return self._client.raw_namespace(label, sum(sizes), salt=self._salt)

        return _Pool(host, not replicated or config.is_storage_writer, open_for)

    # -- pages in place

    @_never_raises(lambda keys, *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages are there."""
        self._looked_up = _weights()
        pool = self._pools.get(str(PoolName.KV)) or self._flat
        if pool is None:
            return 0
        namespace = pool.namespace
        return namespace.match(_keys(namespace, keys)).blocks

    @_never_raises(lambda keys, *_, **__: [False] * len(keys))
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Copies leading pages into the host pool; for each key whether it was."""
        if self.mem_pool_host.kv_buffer is None:
            return [True] * len(keys)
        return self._get(self._pools[str(PoolName.KV)], keys, host_indices)

    @_never_raises(lambda keys, *_, **__: [False] * len(keys))
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Stores pages of the host pool that are not there; for each key whether it is there now."""
        if self.mem_pool_host.kv_buffer is None:
            return [True] * len(keys)
        return self._set(self._pools[str(PoolName.KV)], keys, host_indices, _before(extra_info))

    def _get(self, pool: _Pool, keys: list[str], host_indices: Any) -> list[bool]:
        began = time.perf_counter()
        pages = _pages(pool, host_indices, len(keys))

        def copy(number: int, view: memoryview) -> None:
            at = 0
            block = np.frombuffer(view, np.uint8)
            for piece in pages[number]:
                np.copyto(piece, block[at : at + len(piece)])
                at += len(piece)

        namespace = pool.namespace
        copied = parts.read(namespace, _keys(namespace, keys), self._timeout_s, copy)
        self._note(self._figures.prefetch_pgs, self._figures.prefetch_bandwidth, copied, pool, began)
        return [True] * copied + [False] * (len(keys) - copied)

    def _set(self, pool: _Pool, keys: list[str], host_indices: Any, before: Sequence[str] = ()) -> list[bool]:
        if not pool.writes:
            return [True] * len(keys)
        weights = self._looked_up
        if not self._may_store(weights):
            return [False] * len(keys)
        began = time.perf_counter()
        pages = _pages(pool, host_indices, len(keys))

        def fill(number: int, view: memoryview) -> None:
            at = 0
            block = np.frombuffer(view, np.uint8)
            for piece in pages[number - len(before)]:
                np.copyto(block[at : at + len(piece)], piece)
                at += len(piece)

        namespace = pool.of(weights)
        done, result = parts.write(namespace, _keys(namespace, [*before, *keys]), len(before), fill)
        self._silence.heard(result.error)
        if result.error is not None:
            self._failed("batch_set", result.error)
        self._note(self._figures.backup_pgs, self._figures.backup_bandwidth, result.stored, pool, began)
        return [True] * done + [False] * (len(keys) - done)

    def _may_store(self, weights: Weights) -> bool:
        """Not for a daemon that is away, nor what may have been computed before SGLang had the weights of now."""
        return not self._silence.lasts and _weights() == weights

    # -- several pools

    @_never_raises(lambda keys, *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The longest prefix that every pool can serve, each by its own rule; and all shorter ones that can be."""
        kv = len(keys) if self.mem_pool_host.kv_buffer is None else self.batch_exists(keys)
        hits: dict[Any, int] = {PoolName.KV: kv} if kv else {}
        restorable = list(range(1, kv + 1))
        for transfer in pool_transfers or []:
            if not restorable or transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # which answers for itself alone; a pool that is not named here has no verdict
            ends = self._ends(transfer, keys[:kv])
            if ends:
                hits[transfer.name] = ends[-1]
            allowed = set(ends)
            restorable = [length for length in restorable if length in allowed]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _ends(self, transfer: Any, keys: list[str]) -> list[int]:
        """Lengths of prefixes that one pool has what is needed of, ascending."""
        pool = self._pools[str(transfer.name)]
        namespace = pool.namespace
        names = _keys(namespace, keys)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return list(range(1, namespace.match(names).blocks + 1))
        window = max(1, len(transfer.keys or ()))
        return [
            i + 1
            for first, end in parts.runs(namespace, names, time.monotonic() + self._timeout_s)
            for i in range(first, end)
            if i + 1 - first >= min(window, i + 1)
        ]

    @_never_raises(lambda transfers, *_, **__: _none_of(transfers))
    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Copies pages of several pools into them; for each pool and key whether it was."""
        return {
            transfer.name: self._get(self._pools[str(transfer.name)], transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    @_never_raises(lambda transfers, *_, **__: _none_of(transfers))
    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        """Stores pages of several pools; for each pool and key whether it is there now."""
        return {
            transfer.name: self._set(
                self._pools[str(transfer.name)],
                transfer.keys or [],
                transfer.host_indices,
                _before(extra_info) if transfer.hit_policy == PoolHitPolicy.ALL_PAGES else (),
            )
            for transfer in transfers
        }

    # -- pages as tensors: what SGLang calls without "interface_v1"

    @_never_raises(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Copies a page into a flat tensor, and answers that; None where it is not there."""
        return self.batch_get([key], [target_location])[0]

    @_never_raises(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Leading pages, each in the flat tensor given for it; None for those that are not there."""
        if self._flat is None or not keys:
            return [None] * len(keys)
        targets = list(target_locations)
        namespace = self._flat.namespace
        copied = namespace.get_into(_keys(namespace, keys), targets)
        return targets[:copied] + [None] * (len(keys) - copied)

    @_never_raises(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores one page; whether it is there now."""
        return self.batch_set([key], [value])

    @_never_raises(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores pages; whether all of them are there now."""
        if self._flat is None:
            return False
        if not self._flat.writes:
            return True
        weights = self._looked_up
        if not self._may_store(weights):
            return False
        pages = [value.contiguous() for value in values]
        namespace = self._flat.of(weights)
        result = namespace.put(_keys(namespace, keys), pages)
        self._silence.heard(result.error)
        if result.error is not None:
            self._failed("batch_set", result.error)
        return result.rejected == 0

    @_never_raises(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return self.batch_exists([key]) == 1

    # -- the rest

    @_never_raises(lambda *_, **__: None)
    def clear(self) -> None:
        """Drops all pages of this model and rank, in every pool."""
        for pool in [*self._pools.values(), *([self._flat] if self._flat is not None else [])]:
            pool.clear()

    @_never_raises(lambda *_, **__: StorageMetrics())
    def get_stats(self) -> Any:
        """Pages and GB/s of each transfer since it was last asked, for SGLang's own metrics."""
        with self._lock:
            figures, self._figures = self._figures, StorageMetrics()
        return figures

    def close(self) -> None:
        """Ends the connection; calls after it miss."""
        self._client.close()

    def _note(self, pages: list[int], speeds: list[float], count: int, pool: _Pool, began: float) -> None:
        """Of a transfer, where SGLang asks for figures; nobody else would take them away."""
        if count and self._config.enable_storage_metrics:
            taken_s = max(time.perf_counter() - began, 1e-9)
            with self._lock:
                pages.append(count)
                speeds.append(count * pool.block_bytes / 1e9 / taken_s)

    def _failed(self, call: str, error: Exception) -> None:
        """Counts it, and logs it unless there was much of that lately; with a traceback if it is our own fault."""
        with self._lock:
            self.errors += 1
            now = time.monotonic()
            if now - self._logged_at < LOG_EVERY_S:
                return
            self._logged_at = now
        ours = None if isinstance(error, KVStoreError) else error
        log.warning("%s counts as a miss, or as not stored: %s", call, error, exc_info=ours)


def _engine_arguments() -> list[str]:
    try:
        arguments = get_server_args()
    except ValueError:  # not in an engine
        return []
    return [f"{name}={getattr(arguments, name, None)}" for name in ENGINE]


def _weights() -> Weights:
    """A path may be served under another's name, and replaced while the engine runs (`/update_weights_from_disk`)."""
    try:
        return str(get_model().model_path), str(get_serving().weight_version)
    except ValueError:  # not in an engine
        return "", ""


def _keys(namespace: Namespace, hashes: Sequence[str]) -> list[bytes]:
    return [namespace.key(name.encode()) for name in hashes]


def _before(extra_info: Any) -> list[str]:
    """Hashes of the pages ahead of a call's own, where SGLang passes them: parents in the prefix tree."""
    return list(getattr(extra_info, "prefix_keys", None) or [])


def _none_of(transfers: Any) -> dict[Any, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}


def _page_size(host: Any) -> int:
    """Tokens of a page, as the pool's indices count them."""
    return int(getattr(host, "logical_page_size", None) or host.page_size or 1)


def _pages(pool: _Pool, host_indices: Any, count: int) -> list[list[NDArray[np.uint8]]]:
    """The memory of `count` pages, each in its pieces. Raises InvalidArgument where the sizes are others."""
    if not count:
        return []
    if host_indices is None or len(host_indices) != count * _page_size(pool.host):
        given = 0 if host_indices is None else len(host_indices)
        raise InvalidArgument(f"{given} indices for {count} pages of {_page_size(pool.host)}")
    addresses, sizes = pool.host.get_page_buffer_meta(host_indices)
    pieces = len(addresses) // count
    arrays = [parts.memory_at(address, size) for address, size in zip(addresses, map(int, sizes), strict=True)]
    pages = [arrays[i * pieces : (i + 1) * pieces] for i in range(count)]
    for page in pages:
        if sum(map(len, page)) != pool.block_bytes:
            raise InvalidArgument(f"a page has {sum(map(len, page))} bytes; here it has {pool.block_bytes}")
    return pages
