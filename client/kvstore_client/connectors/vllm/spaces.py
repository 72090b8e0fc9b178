"""What gives a block its meaning in vLLM: the namespace of each rank, cache group, adapter and salt.

A worker describes its own memory once it has it, and the scheduler is told: so both name the same
namespaces whatever layers, heads or backends a rank has. A description holds everything that decides
about bytes: weights, configuration, dtype, release of vLLM, attention backend, instruction set, shape of
every layer, rank. What differs in any of it never meets.

Weights are told apart by their files: names, sizes, and SAMPLES places in each; so is what lies beside them and
decides about bytes (DECIDING). A hub's model without files at hand goes by its name and commit; a hub's
adapter by nothing, since nobody says which commit of it the engine has.

Of the engine's arguments everything counts that is not known to say nothing of bytes (SILENT): one that a later
release adds costs hits, and never a wrong block.
"""

import functools
import hashlib
import json
import logging
import os
import platform
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm
from vllm.config.utils import get_hash_factors, hash_factors
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvstore_client import Client, Layout, Namespace
from kvstore_client.connectors.vllm.messages import Space
from kvstore_client.connectors.vllm.settings import Settings
from kvstore_client.errors import InvalidArgument

log = logging.getLogger("kvstore_client")

FORMAT = 1
"""Of blocks as this connector lays them out: `[layer][what the engine has of it]`."""

NAMESPACES_MAX = 4096
"""Namespaces that are remembered; one that comes back later is named again, which takes microseconds."""

SAMPLES, SAMPLE_BYTES = 256, 4096
"""Of each file of weights."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
DECIDING = (
    *("adapter_config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
)
"""Files beside weights that decide what is computed with them, and are not in the configuration that the engine
shows: an adapter's scaling, quantisation, how images become embeddings. Code (*.py) counts too."""

NAMED = {"model", "model_weights", "hf_config", "hf_text_config", "revision", "dtype", "quantization", "seed"}
"""Arguments of a model that stand in a description by themselves."""
ASIDE = {
    *("hf_config_path", "hf_overrides", "config_format", "hf_token"),  # seen in what they make of hf_config
    *("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"),  # keys are of token ids
    *("allowed_local_media_path", "allowed_media_domains", "served_model_name", "renderer_num_workers"),
    *("enforce_eager", "max_logprobs", "logprobs_mode", "use_fp64_gumbel", "return_sampling_mask"),
    *("generation_config", "override_generation_config", "logits_processors", "io_processor_plugin"),
    *("enable_trace_replay", "spec_target_max_model_len", "allow_deprecated_quantization"),
    *("enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend", "sleep_mode_offload_cudagraph"),
    *("enable_nccl_comm_suspend", "enable_cumem_allocator"),
    *("limit_per_prompt", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb"),
    *("mm_encoder_tp_mode", "skip_mm_profiling", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb", "interleave_mm_strings"),
}
"""Arguments that say nothing of what is computed from given ids."""
SILENT = NAMED | ASIDE
UNNAMED = ("_name_or_path", "transformers_version", "_commit_hash")
"""Fields of a configuration that say where it came from."""


class Group(NamedTuple):
    """One cache group of one rank."""

    number: int
    block_tokens: int
    block_bytes: int
    layout: dict[str, Any]
    """Arguments of Layout without `packing`; empty where a block is more or less than K and V of its tokens."""
    packing: str


@dataclass
class Description(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A rank's groups, from its worker to the scheduler."""

    groups: tuple[Group, ...]


class Rank(NamedTuple):
    """Which part of the model this worker has."""

    tp: int
    tp_size: int
    pp: int
    pp_size: int


class Namespaces:
    """Those of one rank, made when first asked for; never waits for the daemon."""

    def __init__(self, client: Client, description: Description) -> None:
        self._client = client
        self._groups = {group.number: group for group in description.groups}
        self._made: OrderedDict[tuple[int, Space], Namespace] = OrderedDict()

    def of(self, group: int, space: Space) -> Namespace:
        """Where the blocks of a request are that has this space."""
        found = self._made.get((group, space))
        if found is None:
            found = self._made[group, space] = self._make(self._groups[group], space)
            if len(self._made) > NAMESPACES_MAX:
                self._made.popitem(last=False)
        return found

    def _make(self, group: Group, space: Space) -> Namespace:
        packing = json.dumps([group.packing, space.era]) if space.era else group.packing
        if group.layout:
            layout = Layout(**group.layout, packing=packing)
            return self._client.namespace(layout, salt=space.salt, adapter=space.adapter, ahead=False)
        name = json.dumps(["vllm", packing, space.adapter])
        return self._client.raw_namespace(name, group.block_bytes, salt=space.salt, ahead=False)


class Adapters:
    """Names of adapters."""

    def __init__(self, config: Any) -> None:
        """`config`: the engine's LoRAConfig; None where it takes no adapters."""
        self._dtype = str(config.lora_dtype) if config is not None else ""
        self._names: dict[tuple[int, str, str], str | None] = {}

    def name(self, lora: Any) -> str | None:
        """Of a request's adapter; None where it cannot be told apart from others. "": the request has none.

        It is read when it is first met, as the engine does, or loads it anew in place.
        """
        if lora is None:
            return ""
        at = (lora.lora_int_id, lora.lora_name, lora.lora_path)
        if at not in self._names or getattr(lora, "load_inplace", False):
            weights = adapter_weights(lora.lora_path)
            if weights is None:
                log.warning(
                    "kvstored keeps no blocks of adapter %s: %s is no directory", lora.lora_name, lora.lora_path
                )
            self._names[at] = weights and f"{lora.lora_name} {weights} {self._dtype}"
        return self._names[at]


def describe_group(config: Any, settings: Settings, rank: Rank, group: int, spec: Any, layers: dict[str, Any]) -> Group:
    """`layers`: per layer name a list of what the engine has of one block, as (shape, dtype, bytes)."""
    model, cache = config.model_config, config.cache_config
    block_bytes = sum(size for parts in layers.values() for _, _, size in parts)
    packing = {
        "format": FORMAT,
        "vllm": vllm.__version__,
        "model": settings.model or model_weights(model.model),
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "config": config_digest(model.hf_config),
        "quantization": str(model.quantization),
        "arguments": arguments_digest(model),
        "load": [
            str(config.load_config.load_format),
            model.seed if "dummy" in str(config.load_config.load_format) else 0,
        ],
        "compute": str(model.dtype),
        "cache": str(cache.cache_dtype),
        "hash": str(cache.prefix_caching_hash_algo),
        "group": f"{type(spec).__name__} {group}",
        "window": getattr(spec, "sliding_window", None),
        "machine": machine(),
        "rank": list(rank),
        "backends": backends_of(config, layers),
        **({"state": state_of(spec)} if hasattr(spec, "mamba_type") else {}),
        "layers": [[name, [[list(shape), str(dtype)] for shape, dtype, _ in layers[name]]] for name in layers],
    }
    layout: dict[str, Any] = {
        "model": str(settings.model or model.model).rstrip("/").rpartition("/")[2],
        "revision": str(model.revision or ""),
        "dtype": str(getattr(spec, "dtype", "")).removeprefix("torch."),
        "num_layers": len(layers),
        "num_kv_heads": getattr(spec, "num_kv_heads", 0),
        "head_dim": getattr(spec, "head_size", 0),
        "block_tokens": spec.block_size,
        "tp_rank": rank.tp,
        "tp_size": rank.tp_size,
        "pp_rank": rank.pp,
        "pp_size": rank.pp_size,
    }
    try:
        fits = Layout(**layout).block_bytes == block_bytes
    except (ValueError, InvalidArgument):
        fits = False
    return Group(group, spec.block_size, block_bytes, layout if fits else {}, json.dumps(packing, sort_keys=True))


def machine() -> list[Any]:
    """What of this processor decides how the engine packs a block."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), bool(amx())]


def state_of(spec: Any) -> list[Any]:
    """What decides, besides shapes, how a state lies in its block."""
    fast = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)
    return [str(spec.mamba_type), spec.mamba_cache_mode, bool(fast())]


def backends_of(config: Any, layers: dict[str, Any]) -> list[str]:
    """The attention backends of these layers, where the engine says them."""
    known = config.compilation_config.static_forward_context
    found = set()
    for name in layers:
        backend = getattr(known.get(name), "get_attn_backend", None)
        found.add(backend().get_name() if backend is not None else "")
    return sorted(found)


def config_digest(hf_config: Any) -> str:
    """Of everything a model's configuration says, but where it came from."""
    fields = {name: value for name, value in hf_config.to_dict().items() if name not in UNNAMED}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def arguments_digest(model: Any) -> str:
    """Of the engine's arguments that may decide about bytes, among them the longest prompt (longrope goes by it).

    Of one that says nothing the same in another process (an object without a form in words) no block is shared.
    """
    try:
        factors = get_hash_factors(model, SILENT | {"multimodal_config"})
        if model.multimodal_config is not None:
            factors["multimodal"] = sorted(get_hash_factors(model.multimodal_config, SILENT).items())
        return str(hash_factors(factors))
    except TypeError as e:
        log.warning("kvstored keeps blocks of this engine for itself alone: an argument cannot be named: %s", e)
        return os.urandom(16).hex()


@functools.cache
def model_weights(model: str) -> str:
    """As `weights_of`; the model's own are loaded once."""
    return weights_of(model)


def adapter_weights(path: str) -> str | None:
    """A name for an adapter at a path; None where its files are not at hand: it may be any commit of a hub's."""
    expanded = str(Path(path).expanduser())
    return weights_of(expanded) if Path(expanded).is_dir() else None


def weights_of(model: str) -> str:
    """A name for the weights at a path, from their files; of anything else the name itself."""
    path = Path(model)
    if not path.exists():
        return model
    files = [path] if path.is_file() else sorted(entry for entry in path.iterdir() if decides(entry))
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size};".encode())
        with file.open("rb", buffering=0) as content:
            for at in sample_places(size):
                digest.update(os.pread(content.fileno(), SAMPLE_BYTES, at))
    return digest.hexdigest()


def decides(file: Path) -> bool:
    """Whether it is weights, or decides what is computed with them."""
    return file.suffix in (*WEIGHTS, ".py") or file.name in DECIDING


def sample_places(size: int) -> Iterator[int]:
    """Evenly from the start of a file to its end."""
    last = max(size - SAMPLE_BYTES, 0)
    return iter(sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}))
