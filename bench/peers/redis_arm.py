"""Redis over a Unix socket: redis_arm.py PATH redis-py|resp.

`redis-py` is redis-py with hiredis: it takes bytes, which it sends faster than views, and
answers bytes of its own, one copy fewer than a get into the caller's memory. `resp` is the
protocol spoken as directly as it can be: `sendmsg` of the caller's memory, `recv_into` the
caller's memory.
"""

import importlib
import socket
import sys
from collections.abc import Sequence
from typing import Any

from bench.peers.arm import DISTINCT, Bytes, Store, private_arena, serve

SENT_PARTS_MAX = 1024
"""Buffers that one sendmsg takes (IOV_MAX)."""


Batch = tuple[list[bytes], list[bytes]]
"""Keys and values."""


class RedisPy(Store):
    """The usual client."""

    def __init__(self, path: str) -> None:
        redis: Any = importlib.import_module("redis")
        self._redis = redis.Redis(unix_socket_path=path)
        self.arena = private_arena()

    def facts(self) -> dict[str, str]:
        """Who answers, and by what it is asked."""
        importlib.import_module("hiredis")
        server = self._redis.info("server")
        name = server.get("server_name", "redis")
        version = server.get(f"{name}_version", server["redis_version"])
        return {"version": f"{name} {version}, redis-py {importlib.import_module('redis').__version__} with hiredis"}

    def open(self, block_bytes: int) -> None:
        super().open(block_bytes)
        self._values = [source.tobytes() for source in self.arena.sources(0, DISTINCT)]

    def batch(self, tag: str, at: int, count: int) -> Batch:
        numbers = range(at, at + count)
        return [b"%s %d" % (tag.encode(), i) for i in numbers], [self._values[i % DISTINCT] for i in numbers]

    def put(self, batch: Batch, sources: Sequence[Bytes]) -> None:
        keys, values = batch
        if len(keys) == 1:
            assert self._redis.set(keys[0], values[0])
            return
        pipe = self._redis.pipeline(transaction=False)  # three times as fast as mset here
        for key, value in zip(keys, values, strict=True):
            pipe.set(key, value)
        assert all(pipe.execute())

    def get(self, batch: Batch, targets: Sequence[Bytes]) -> Sequence[bytes] | None:
        keys, _ = batch
        found: list[bytes] = [self._redis.get(keys[0])] if len(keys) == 1 else self._redis.mget(keys)
        assert all(found)
        return found

    def lookup(self, batch: Batch) -> int:
        found: int = self._redis.exists(*batch[0])
        return found

    def forget(self, batches: Sequence[Batch]) -> None:
        """Not by FLUSHDB: that gives the memory back to the system, and the next puts cost three times as much."""
        for keys, _ in batches:
            self._redis.delete(*keys)


class Resp(RedisPy):
    """The short way; lookups and the rest are redis-py's."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.settimeout(60)

    def put(self, batch: Batch, sources: Sequence[Bytes]) -> None:
        keys, _ = batch
        parts: list[Any] = []
        for key, source in zip(keys, sources, strict=True):
            parts.append(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, len(source)))
            parts += [source.data, b"\r\n"]
        self._send(parts)
        self._expect(b"+OK\r\n" * len(keys))

    def get(self, batch: Batch, targets: Sequence[Bytes]) -> None:
        self._send([b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key) for key in batch[0]])
        for target in targets:
            self._expect(b"$%d\r\n" % len(target))
            self._fill(target.data)
            self._expect(b"\r\n")

    def _send(self, parts: list[Any]) -> None:
        parts = [memoryview(part) for part in parts]
        while parts:
            sent = self._socket.sendmsg(parts[:SENT_PARTS_MAX])
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def _expect(self, right: bytes) -> None:
        found = bytearray(len(right))
        self._fill(memoryview(found))
        assert found == right, bytes(found)

    def _fill(self, target: memoryview) -> None:
        at = 0
        while at < len(target):
            got = self._socket.recv_into(target[at:])
            assert got, "the server hung up"
            at += got


if __name__ == "__main__":
    kind = Resp if sys.argv[2] == "resp" else RedisPy
    serve(lambda: kind(sys.argv[1]))
