"""Ours, through the SDK: kvstored_arm.py ENDPOINT. Two of them at one daemon have blocks of their own."""

import sys
from collections.abc import Sequence

from bench.peers.arm import Bytes, Store, private_arena, serve
from kvstore_client import Client

SIZES = (4096, 256 << 10, 2 << 20)


class Kvstored(Store):
    """A namespace for each size of block."""

    def __init__(self, endpoint: str) -> None:
        self._client = Client(endpoint, name="bench-peers", timeout_s=30)
        name = f"peers-{endpoint.partition(':')[0]}"
        self._spaces = {size: self._client.raw_namespace(f"{name}-{size}", size) for size in SIZES}
        self.arena = private_arena()
        self.open(2 << 20)

    def open(self, block_bytes: int) -> None:
        super().open(block_bytes)
        self._ns = self._spaces[block_bytes]

    def batch(self, tag: str, at: int, count: int) -> list[bytes]:
        return [self._ns.key(b"%s %d" % (tag.encode(), i)) for i in range(at, at + count)]

    def put(self, batch: list[bytes], sources: Sequence[Bytes]) -> None:
        assert self._ns.put(batch, sources).stored == len(batch)

    def get(self, batch: list[bytes], targets: Sequence[Bytes]) -> None:
        assert self._ns.get_into(batch, targets) == len(batch)

    def lookup(self, batch: list[bytes]) -> int:
        return self._ns.match(batch).blocks

    def forget(self, batches: Sequence[list[bytes]]) -> None:
        for batch in batches:
            self._ns.remove(batch)

    def close(self) -> None:
        self._client.close()


if __name__ == "__main__":
    serve(lambda: Kvstored(sys.argv[1]))
