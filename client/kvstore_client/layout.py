"""What gives the bytes of a block their meaning."""

from dataclasses import dataclass, fields

from kvstored.v1.errors import InvalidArgument

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "fp8": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """KV cache of one rank: `[layer][K|V][token][head][dim]` for each block of `block_tokens` tokens.

    `num_layers` and `num_kv_heads` are those of this rank. `packing` names whatever else
    decides about the bytes: engine, attention backend, version of the arrangement. Every
    field is part of every key, so blocks that differ in any of them never meet.
    """

    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    revision: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    packing: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InvalidArgument(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens", "tp_size", "pp_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{name}={value!r} is not a whole number above 0")
        for rank, size in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
            value = getattr(self, rank)
            if not isinstance(value, int) or not 0 <= value < getattr(self, size):
                raise InvalidArgument(f"{rank}={value!r} is not between 0 and {size}={getattr(self, size)} - 1")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: 2 (K and V) x layers x tokens x heads x dim x bytes of the dtype."""
        return 2 * self.num_layers * self.block_tokens * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def identity(self) -> dict[str, str | int]:
        """Every field by name, for the namespace digest."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
