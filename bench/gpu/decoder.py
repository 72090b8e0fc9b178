"""A decoder of a billion parameters with random weights and a paged KV cache, for the time to the first token.

Plain torch, as Llama 3.2 1B has it (16 layers, hidden 2,048, 32 heads of which 8 for K and V, RMS norm, SwiGLU, RoPE):
what is measured is a prefill that is computed beside one that is fetched, which needs no trained weights.
"""

from dataclasses import dataclass
from typing import Any

PAGE_TOKENS = 256
CHUNK = 4096
"""Tokens of a prefill at a time, which bounds its memory."""


@dataclass(frozen=True)
class Shape:
    """Of a model."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    mlp: int = 8192
    vocabulary: int = 128256

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SMALL = Shape(layers=4, hidden=256, heads=8, kv_heads=2, mlp=512, vocabulary=1024)


class Decoder:
    """Weights on one device; not trained."""

    def __init__(self, shape: Shape, device: str, dtype: Any) -> None:
        import torch

        self.shape, self.device, self.dtype = shape, device, dtype
        random = torch.Generator(device=device).manual_seed(1)

        def weight(rows: int, columns: int) -> Any:
            made = torch.empty(rows, columns, device=device, dtype=dtype)
            return made.normal_(0, columns**-0.5, generator=random)

        kv = shape.kv_heads * shape.head_dim
        self._embedding = weight(shape.vocabulary, shape.hidden)
        self._layers = [
            {
                "qkv": weight(shape.hidden + 2 * kv, shape.hidden),
                "out": weight(shape.hidden, shape.hidden),
                "up": weight(2 * shape.mlp, shape.hidden),
                "down": weight(shape.hidden, shape.mlp),
            }
            for _ in range(shape.layers)
        ]
        exponents = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
        self._frequencies = 500000.0**-exponents

    @property
    def parameters(self) -> int:
        return int(self._embedding.numel() + sum(w.numel() for layer in self._layers for w in layer.values()))

    def cache(self, pages: int) -> list[Any]:
        """A tensor a layer, [page][K|V][token][head][dim]; page 0 is nobody's."""
        import torch

        shape = (pages, 2, PAGE_TOKENS, self.shape.kv_heads, self.shape.head_dim)
        return [torch.zeros(shape, device=self.device, dtype=self.dtype) for _ in range(self.shape.layers)]

    def first_token(self, ids: Any, cache: list[Any], pages: Any, done: int) -> Any:
        """Computes tokens from `done` on, whose predecessors the cache has; the logits behind the last one.

        `ids`: a row of token ids; `pages`: the pages of the sequence in its order, as a tensor.
        """
        import torch

        with torch.inference_mode():
            for start in range(done, len(ids), CHUNK):
                last = self._chunk(ids[start : start + CHUNK], cache, pages, start)
            return last @ self._embedding.T

    def _chunk(self, ids: Any, cache: list[Any], pages: Any, start: int) -> Any:
        import torch

        state = self._embedding[ids]
        positions = torch.arange(start, start + len(ids), device=self.device)
        for layer, weights in zip(cache, self._layers, strict=True):
            state = state + self._attention(_norm(state), weights, layer, pages, positions)
            gate, up = (_norm(state) @ weights["up"].T).chunk(2, dim=-1)
            state = state + (torch.nn.functional.silu(gate) * up) @ weights["down"].T
        return _norm(state[-1])

    def _attention(self, state: Any, weights: dict[str, Any], layer: Any, pages: Any, positions: Any) -> Any:
        import torch
        from torch.nn.attention.bias import causal_lower_right

        shape, count, total = self.shape, len(state), int(positions[-1]) + 1
        kv = shape.kv_heads * shape.head_dim
        q, k, v = (state @ weights["qkv"].T).split([shape.hidden, kv, kv], dim=-1)
        q = self._turned(q.view(count, shape.heads, shape.head_dim), positions)
        k = self._turned(k.view(count, shape.kv_heads, shape.head_dim), positions)
        at, within = pages[positions // PAGE_TOKENS], positions % PAGE_TOKENS
        layer[at, 0, within], layer[at, 1, within] = k, v.view(count, shape.kv_heads, shape.head_dim)
        used = layer[pages[: -(-total // PAGE_TOKENS)]]
        keys, values = (used[:, part].flatten(0, 1)[:total] for part in (0, 1))
        group = shape.heads // shape.kv_heads
        keys, values = (x.repeat_interleave(group, dim=1).transpose(0, 1)[None] for x in (keys, values))
        mask = causal_lower_right(count, total)
        found = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, attn_mask=mask)
        return found[0].transpose(0, 1).reshape(count, shape.hidden) @ weights["out"].T

    def _turned(self, x: Any, positions: Any) -> Any:
        """RoPE."""
        import torch

        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _norm(x: Any) -> Any:
    """RMS norm with weights of one."""
    import torch

    return torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=1e-5)
