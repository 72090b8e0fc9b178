"""Prefixes of transformers' models: `load` before a prefill, `save` after it.

    prefix = PrefixCache(client, model)
    cache, tokens = prefix.load(input_ids)                 # tokens: how many of them need no computing
    model(input_ids[:, tokens:], past_key_values=cache, use_cache=True)
    prefix.save(input_ids, cache)

A block is `[layer][K|V][head][token][dim]` of `block_tokens` tokens, so each way is one copy a block, between
the store's memory and the cache's tensors. What the blocks mean is the namespace: the weights
(weights.py), the configuration, dtype, attention implementation and release of transformers.

Only what those and the token ids decide can be found by token ids. So one prompt at a time, without
padding, positions from 0; and refused by name is whatever would come back as something else: cache
layers other than DynamicLayer, keys that depend on a prompt's length, prompts that are not only tokens,
adapters with tokens of their own.

The store is never the model's trouble: a daemon that is away, full or slow is a miss, or blocks not stored.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvstore_client import Client, Hint, Layout, Namespace, PutResult
from kvstore_client.connectors import parts
from kvstore_client.connectors.weights import Weights
from kvstore_client.errors import (
    FailedPrecondition,
    InvalidArgument,
    KVStoreError,
    Unavailable,
)

log = logging.getLogger("kvstore_client")

PACKING = "transformers [layer][K|V][head][token][dim]"

UNNAMED = ("transformers_version", "_name_or_path", "_commit_hash", "architectures", "dtype", "torch_dtype")
"""Fields of a configuration that say where a model came from, or that the namespace has in words of its own."""

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings whose keys change with the length of the whole prompt."""


class PrefixCache:
    """Prefixes of one model. Safe to use from many threads."""

    def __init__(
        self,
        client: Client,
        model: Any,
        *,
        block_tokens: int = 128,
        weights: str | None = None,
        salt: str = "",
        adapter: str = "",
        timeout_s: float = 1.0,
    ) -> None:
        """Raises InvalidArgument for a model whose cache cannot be kept by its token ids.

        `weights` names the parameters, for whoever can: without it they are read once, and again when
        they have changed. `timeout_s` is how long a load may wait for blocks that are not in memory.
        """
        self._client = client
        self._model = model
        self._block_tokens = block_tokens
        self._salt, self._adapter = salt, adapter
        self._timeout_s = timeout_s
        self._weights = Weights(model, weights)
        _check_model(model)
        self._shape = _shape_of(model.config)
        self._opened: tuple[tuple[str, ...], Namespace] | None = None
        self.namespace()

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; a prefix is kept in whole blocks."""
        return self._block_tokens

    def namespace(self) -> Namespace:
        """Where the blocks of the model as it is now are; another one after its weights or attention have changed."""
        model = self._model
        if model.training:
            raise FailedPrecondition("the model is in training mode, where dropout is part of what it computes: eval()")
        _check_adapters(model)
        identity = (
            self._weights.name(),
            str(model.config._attn_implementation),
            str(model.dtype).removeprefix("torch."),
        )
        if self._opened is None or self._opened[0] != identity:
            self._opened = (identity, self._open(*identity))
        return self._opened[1]

    def _open(self, weights: str, attention: str, dtype: str) -> Namespace:
        config = self._model.config
        layout = Layout(
            model=(str(config.name_or_path).rstrip("/").rpartition("/")[2] or type(self._model).__name__),
            revision=f"weights {weights} config {config_digest(config)}",
            dtype=dtype,
            num_layers=self._shape.layers,
            num_kv_heads=self._shape.heads,
            head_dim=self._shape.dim,
            block_tokens=self._block_tokens,
            packing=f"{PACKING} {attention} {transformers.__version__}",
        )
        return self._client.namespace(layout, salt=self._salt, adapter=self._adapter)

    def load(self, input_ids: Any) -> tuple[DynamicCache, int]:
        """What is stored of a prompt, as a cache to go on from, and of how many tokens; an empty one and 0 on a miss.

        `input_ids`: one prompt, `[tokens]` or `[1, tokens]`. At least its last token is left to
        compute, which gives the next one. Raises InvalidArgument for anything else.
        """
        ids = one_prompt(input_ids)
        namespace = self.namespace()
        keys = namespace.keys(ids)[: max(len(ids) - 1, 0) // self._block_tokens]
        try:
            found = namespace.match(keys).blocks
            if found:
                states = self._shape.empty(found * self._block_tokens, self._model)
                copied = self._copy_out(namespace, keys[:found], states) * self._block_tokens
                if copied:
                    return self._cache_of(states[..., :copied, :]), copied
        except KVStoreError as e:
            _tell("a prefix is computed that might have been loaded", e)
        return DynamicCache(config=self._model.config), 0

    def _cache_of(self, states: Any) -> DynamicCache:
        """A cache over these tensors. DynamicCache([(keys, values), ...]) would copy them all once more."""
        cache = DynamicCache(config=self._model.config)
        for layer, (keys, values) in zip(cache.layers, states.unsqueeze(2), strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return cache

    def _copy_out(self, namespace: Namespace, keys: list[bytes], states: Any) -> int:
        """Leading blocks copied into `states`."""

        def copy(number: int, view: memoryview) -> None:
            at = number * self._block_tokens
            states[..., at : at + self._block_tokens, :].copy_(self._as_block(_tensor_over(view, states.dtype)))

        return parts.read(namespace, keys, self._timeout_s, copy)

    def save(self, input_ids: Any, cache: Any, *, hint: Hint | None = None) -> PutResult:
        """Stores the full blocks of a prompt that are not stored yet; counts are of blocks.

        `cache` holds the states of `input_ids` from the first on. Either may go on where the other ends: what
        both have is stored. Raises InvalidArgument for a cache that could not come back as what it is.
        """
        ids = one_prompt(input_ids)
        namespace = self.namespace()
        layers = self._layers_of(cache)
        keys = namespace.keys(ids[: layers[0][0].shape[2]] if layers else [])
        _, result = parts.write(namespace, keys, 0, lambda number, view: self._fill(view, layers, number), hint)
        if result.error is not None:
            _tell(f"{result.rejected} of {len(keys)} blocks of a prefix are not stored", result.error)
        return result

    def _fill(self, view: memoryview, layers: list[tuple[Any, Any]], number: int) -> None:
        """Writes one block where it will be read from."""
        at, tokens = number * self._block_tokens, self._block_tokens
        with torch.no_grad():  # a prefill with gradients is one like any other
            block = self._as_block(torch.frombuffer(view, dtype=layers[0][0].dtype))
            for into, states in zip(block, layers, strict=True):
                for half, tensor in zip(into, states, strict=True):
                    half.copy_(tensor[0, :, at : at + tokens])

    def _as_block(self, flat: Any) -> Any:
        return flat.view(self._shape.layers, 2, self._shape.heads, self._block_tokens, self._shape.dim)

    def _layers_of(self, cache: Any) -> list[tuple[Any, Any]]:
        """Keys and values of each layer, `[1, heads, tokens, dim]`; none of an empty cache.

        Raises InvalidArgument, with the name of what is otherwise.
        """
        if type(cache) is not DynamicCache:
            raise InvalidArgument(f"the cache is a {type(cache).__name__}; only DynamicCache itself can be stored")
        _check_layers(cache.layers)
        shape, tokens = self._shape, cache.get_seq_length()
        if not tokens:
            return []
        if len(cache.layers) != shape.layers:
            raise InvalidArgument(f"the cache has {len(cache.layers)} layers, the model {shape.layers}")
        for i, layer in enumerate(cache.layers):
            for what, tensor in (("keys", layer.keys), ("values", layer.values)):
                if tensor is None or tensor.dim() != 4:
                    raise InvalidArgument(
                        f"layer {i} of the cache has no {what} of its own, as where layers share them"
                    )
                if tensor.shape[0] != 1:
                    raise InvalidArgument(f"the cache holds a batch of {tensor.shape[0]} prompts; pass one at a time")
                if tensor.shape[1:] != (shape.heads, tokens, shape.dim) or tensor.dtype != self._model.dtype:
                    raise InvalidArgument(
                        f"{what} of layer {i} are {tuple(tensor.shape)} of {tensor.dtype}; by the model's "
                        f"configuration they would be {(1, shape.heads, tokens, shape.dim)} of {self._model.dtype}"
                    )
        return [(layer.keys, layer.values) for layer in cache.layers]


class _Shape(NamedTuple):
    """Of the model's KV cache."""

    layers: int
    heads: int
    dim: int

    def empty(self, tokens: int, model: Any) -> Any:
        """Memory for so many tokens: `[layer, K|V, head, token, dim]`."""
        size = (self.layers, 2, self.heads, tokens, self.dim)
        return torch.empty(size, dtype=model.dtype, device=model.device)


def _shape_of(config: Any) -> _Shape:
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return _Shape(config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, dim)


def _check_model(model: Any) -> None:
    """Raises InvalidArgument where token ids alone do not decide what is in the cache."""
    config, name = model.config, type(model).__name__
    if config.is_encoder_decoder:
        raise InvalidArgument(f"{name} has an encoder, whose input the cache depends on as well")
    if config.get_text_config(decoder=True) is not config:
        raise InvalidArgument(f"{name} takes more than tokens, and the cache depends on that as well")
    both_ways = (getattr(config, field, None) for field in ("use_bidirectional_attention", "prefix_lm"))
    if any(both_ways) or getattr(config, "is_causal", True) is False:
        raise InvalidArgument(f"{name} attends to later tokens, so no prefix is the same in two prompts")
    for rope_type in _rope_types([getattr(config, field, None) for field in ("rope_parameters", "rope_scaling")]):
        if rope_type in LENGTH_DEPENDENT:
            raise InvalidArgument(
                f"{name} has rotary embeddings of type {rope_type!r}: keys depend on a prompt's length"
            )
    devices = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    if len(devices) > 1:
        raise InvalidArgument(f"{name} is spread over {', '.join(sorted(devices))}; only models on one device are kept")
    _check_layers(DynamicCache(config=config).layers)


def _check_adapters(model: Any) -> None:
    """Raises InvalidArgument for peft's adapters by which a cache is not the states of the ids alone, in order."""
    for name, adapter in dict(getattr(model, "peft_config", None) or {}).items():
        kind = str(getattr(adapter, "peft_type", type(adapter).__name__)).rpartition(".")[2]
        if getattr(adapter, "is_prompt_learning", False):
            raise InvalidArgument(f"adapter {name!r} ({kind}) puts tokens of its own before a prompt's")
        if getattr(adapter, "alora_invocation_tokens", None):
            raise InvalidArgument(f"adapter {name!r} ({kind}) begins at its last invocation, which no prefix tells")


def _check_layers(layers: Sequence[Any]) -> None:
    for i, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            raise InvalidArgument(
                f"layer {i} of the cache is a {type(layer).__name__}; only DynamicLayer itself can be stored and loaded"
            )


def _rope_types(fields: Any) -> Iterator[Any]:
    """Every type of rotary embedding that a configuration names, however deep."""
    if isinstance(fields, dict):
        yield from (fields.get("rope_type"), fields.get("type"))
        fields = list(fields.values())
    if isinstance(fields, list):
        for value in fields:
            yield from _rope_types(value)


def config_digest(config: Any) -> str:
    """Names what a model's configuration says of its computation."""
    fields = {name: value for name, value in config.to_dict().items() if name not in UNNAMED}
    return hashlib.blake2b(json.dumps(fields, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def one_prompt(input_ids: Any) -> list[int]:
    """Token ids of one prompt as a list. Raises InvalidArgument for a batch, and for what is no row of ids."""
    ids = input_ids.tolist() if hasattr(input_ids, "tolist") else input_ids
    if not isinstance(ids, list | tuple):
        raise InvalidArgument(f"input_ids is a {type(input_ids).__name__}; pass one row of token ids")
    if ids and isinstance(ids[0], list | tuple):
        if len(ids) != 1:
            raise InvalidArgument(f"input_ids is a batch of {len(ids)} prompts; pass one at a time")
        ids = ids[0]
    return list(ids)


def _tensor_over(view: memoryview, dtype: Any) -> Any:
    """A tensor over memory that is only read, for as long as the view lives. Of a read-only buffer torch would warn."""
    address = np.frombuffer(view, np.uint8).ctypes.data
    return torch.frombuffer(parts.memory_at(address, view.nbytes).data, dtype=dtype)


def _tell(what: str, error: KVStoreError) -> None:
    """That a daemon is away, the client has said already."""
    log.log(logging.DEBUG if isinstance(error, Unavailable) else logging.WARNING, "%s: %s", what, error)
