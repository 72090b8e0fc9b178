"""What gives a block its meaning in vLLM: the namespace of each rank, cache group, adapter and salt.

A worker describes its own memory once it has it, and the scheduler is told: so both name the same
namespaces whatever layers, heads or backends a rank has. A description holds everything that decides
about bytes: weights, configuration, dtype, release of vLLM, attention backend, instruction set, shape of
every layer, rank. What differs in any of it never meets.

Weights are told apart by their files: names, sizes, and SAMPLES places in each. A hub's model without files
at hand goes by its name and commit.
"""

import functools
import hashlib
import json
import os
import platform
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvstore_client import Client, Layout, Namespace
from kvstore_client.connectors.vllm.messages import Space
from kvstore_client.connectors.vllm.settings import Settings
from kvstore_client.errors import InvalidArgument

FORMAT = 1
"""Of blocks as this connector lays them out: `[layer][what the engine has of it]`."""

NAMESPACES_MAX = 4096
"""Namespaces that are remembered; one that comes back later is named again, which takes microseconds."""

SAMPLES, SAMPLE_BYTES = 256, 4096
"""Of each file of weights."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
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


@functools.cache
def model_weights(model: str) -> str:
    """As `weights_of`; the model's own are loaded once."""
    return weights_of(model)


def weights_of(model: str) -> str:
    """A name for the weights at a path, from their files; of anything else the name itself."""
    path = Path(model)
    if not path.exists():
        return model
    files = [path] if path.is_file() else sorted(entry for entry in path.iterdir() if entry.suffix in WEIGHTS)
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size};".encode())
        with file.open("rb", buffering=0) as content:
            for at in sample_places(size):
                digest.update(os.pread(content.fileno(), SAMPLE_BYTES, at))
    return digest.hexdigest()


def sample_places(size: int) -> Iterator[int]:
    """Evenly from the start of a file to its end."""
    last = max(size - SAMPLE_BYTES, 0)
    return iter(sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)}))
