"""kvstored as the remote storage of LMCache within an engine.

    remote_storage_plugins: ["kvstored"]
    extra_config:
      remote_storage_plugin.kvstored.module_path: kvstore_client.connectors.lmcache.remote
      remote_storage_plugin.kvstored.class_name: KVStoreConnector
      remote_storage_plugin.kvstored.endpoint: unix:///run/kvstored/kvstored.sock

A chunk is one block: its bytes, then LMCache's own metadata (length, shapes, types) at the end, so that a chunk that
is not full comes back as what it was. Copied once, by threads of ours: LMCache's event loop has others to serve.
What goes wrong is a miss, or a chunk not stored.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, TypeVar

import numpy as np
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvstore_client import Client
from kvstore_client.connectors import parts
from kvstore_client.connectors.lmcache.objects import memory
from kvstore_client.errors import InvalidArgument, KVStoreError

log = logging.getLogger("kvstore_client")

PREFIX = "remote_storage_plugin.kvstored."
SETTINGS = {"endpoint": None, "tenant": "default", "revision": "", "timeout_s": 0.5}
LMCACHES = {"module_path", "class_name"}

PUTS_MAX = 32
"""Calls that wait to be stored; more are not stored. Their chunks are LMCache's memory meanwhile."""

T = TypeVar("T")
Objects = list[Any]


class KVStoreConnector(RemoteConnector):  # type: ignore[misc]  # LMCache has no types
    """One worker's connector. Its plugin is to be called "kvstored", as its settings are."""

    def __init__(self, loop: Any, local_cpu_backend: Any, config: Any, metadata: Any = None) -> None:
        """Raises InvalidArgument for settings it does not know, and for layerwise chunks."""
        metadata = metadata or local_cpu_backend.metadata
        super().__init__(config, metadata)
        extra = config.extra_config or {}
        given = {name.removeprefix(PREFIX): value for name, value in extra.items() if name.startswith(PREFIX)}
        unknown = sorted(given.keys() - SETTINGS.keys() - LMCACHES)
        if unknown:
            raise InvalidArgument(f"{', '.join(unknown)}: no such setting; there are {', '.join(sorted(SETTINGS))}")
        if config.use_layerwise:
            raise InvalidArgument("use_layerwise is not supported: chunks are stored whole")
        settings = {**SETTINGS, **given}
        self._memory = local_cpu_backend
        self._timeout_s = float(settings["timeout_s"])
        self._client = Client(
            settings["endpoint"], tenant=settings["tenant"], name="lmcache", timeout_s=self._timeout_s
        )
        identity = {
            "shapes": [list(shape) for shape in self.meta_shapes],
            "dtypes": list(map(str, self.meta_dtypes)),
            "format": str(self.meta_fmt),
            "chunk": metadata.chunk_size,
            "serde": config.remote_serde,
            "hash": config.pre_caching_hash_algorithm,
            "revision": str(settings["revision"]),
            "lmcache": version("lmcache"),
        }
        self._chunks = self._client.raw_namespace(
            f"lmcache {metadata.model_name} {json.dumps(identity, sort_keys=True)}",
            self.full_chunk_size_bytes + self.remote_metadata_bytes,
        )
        self._silence = parts.Silence(self._client, self._timeout_s)
        self._puts = threading.Semaphore(PUTS_MAX)
        self._lookups, self._readers, self._writers = (
            ThreadPoolExecutor(1, f"kvstore-{name}") for name in ("lookup", "read", "write")
        )

    # -- what LMCache calls

    async def exists(self, key: Any) -> bool:
        return await self.batched_async_contains("", [key]) == 1

    def exists_sync(self, key: Any) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """How many leading chunks are there; shared memory answers, without a call."""
        return self._safely(lambda: self._found(keys), 0)

    async def batched_async_contains(self, lookup_id: str, keys: Objects, pin: bool = False) -> int:
        return await self._in(self._lookups, lambda: self._found(keys), 0)

    async def get(self, key: Any) -> Any:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Objects) -> Objects:
        """Leading chunks as objects of LMCache's memory; None for the others, and for what it has no room for."""
        try:
            reading = self._readers.submit(self._safely, lambda: self._get(keys), [None] * len(keys))
        except RuntimeError:  # it is closed
            return [None] * len(keys)
        try:
            return await asyncio.shield(asyncio.wrap_future(reading))
        except asyncio.CancelledError:  # LMCache waits no longer: what comes now, nobody would give back
            reading.cancel()
            reading.add_done_callback(_give_back)
            raise

    async def batched_get_non_blocking(self, lookup_id: str, keys: Objects) -> Objects:
        objects = await self.batched_get(keys)
        return objects[: objects.index(None)] if None in objects else objects

    async def put(self, key: Any, memory_obj: Any) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Objects, memory_objs: Objects) -> None:
        """Stores what is not there. Objects are held until they are copied, also where LMCache waits no longer.

        Not for a daemon that is away, and not behind PUTS_MAX others: LMCache's memory is what they hold.
        """
        if self._silence.lasts or not self._puts.acquire(blocking=False):
            log.debug("%d chunks are not stored: the daemon is away, or behind", len(keys))
            return
        for thing in memory_objs:
            thing.ref_count_up()

        def done(_: object) -> None:
            for thing in memory_objs:
                thing.ref_count_down()
            self._puts.release()

        try:
            writing = self._writers.submit(self._safely, lambda: self._put(keys, memory_objs), None)
        except RuntimeError:  # it is closed
            done(None)
            return
        writing.add_done_callback(done)
        await asyncio.shield(asyncio.wrap_future(writing))

    def remove_sync(self, key: Any) -> bool:
        return self._safely(lambda: self._chunks.remove(self._names([key])) == 1, otherwise=False)

    async def list(self) -> list[str]:
        """The store knows names by their hashes only."""
        return []

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        """0 for a daemon that answers."""
        return 0 if await self._in(self._lookups, lambda: self._client.health().reachable, otherwise=False) else 1

    async def close(self) -> None:
        for threads in (self._lookups, self._readers, self._writers):
            threads.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    # -- what the threads do

    def _found(self, keys: Sequence[Any]) -> int:
        return self._chunks.match(self._names(keys)).blocks

    def _get(self, keys: Sequence[Any]) -> Objects:
        objects: Objects = [None] * len(keys)

        def copy(number: int, view: memoryview) -> None:
            if number and objects[number - 1] is None:
                return  # there was no room, and what lies behind a gap is of no use
            block = np.frombuffer(view, np.uint8)
            metadata = RemoteMetadata.deserialize(block[self.full_chunk_size_bytes :].tobytes())
            # Not for as long as there is no room: reads behind this one, and what it holds, would wait for ever.
            thing = self._memory.allocate(metadata.shapes, metadata.dtypes, metadata.fmt, busy_loop=False)
            if thing is None:
                return
            into = memory(thing)
            if len(into) != metadata.length:
                thing.ref_count_down()
                raise InvalidArgument(f"a chunk of {metadata.length} bytes for an object of {len(into)}")
            np.copyto(into, block[: metadata.length])
            objects[number] = thing

        try:
            parts.read(self._chunks, self._names(keys), self._timeout_s, copy)
        except BaseException:
            for thing in objects:
                if thing is not None:
                    thing.ref_count_down()
            raise
        return objects

    def _put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        if self._silence.lasts:
            return  # so those that waited behind one that was in vain are given back at once
        fitting = [
            (key, thing)
            for key, thing in zip(keys, memory_objs, strict=True)
            if thing.get_size() <= self.full_chunk_size_bytes
        ]

        def fill(number: int, view: memoryview) -> None:
            thing = fitting[number][1]
            block, data = np.frombuffer(view, np.uint8), memory(thing)
            np.copyto(block[: len(data)], data)
            metadata = RemoteMetadata(len(data), thing.get_shapes(), thing.get_dtypes(), thing.get_memory_format())
            metadata.serialize_into(block[self.full_chunk_size_bytes :].data)

        _, result = parts.write(self._chunks, self._names([key for key, _ in fitting]), 0, fill)
        self._silence.heard(result.error)
        if result.error is not None:
            log.warning("%d chunks are not stored: %s", result.rejected, result.error)

    def _names(self, keys: Sequence[Any]) -> Sequence[bytes]:
        """The fields of a key. Its own text does not do: tags (LoRA, salt) may have its separators in them."""
        return [
            self._chunks.key(
                json.dumps(
                    [key.model_name, key.world_size, key.worker_id, key.chunk_hash_hex, str(key.dtype), key.tags],
                    default=repr,
                ).encode()
            )
            for key in keys
        ]

    async def _in(self, threads: ThreadPoolExecutor, work: Callable[[], T], otherwise: T) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, lambda: self._safely(work, otherwise))
        except RuntimeError:  # it is closed
            return otherwise

    @staticmethod
    def _safely(work: Callable[[], T], otherwise: T) -> T:
        try:
            return work()
        except Exception as e:
            ours = None if isinstance(e, KVStoreError) else e
            log.warning("chunks count as missing, or as not stored: %s", e, exc_info=ours)
            return otherwise


def _give_back(reading: "Future[Objects]") -> None:
    if not reading.cancelled():
        for thing in reading.result():
            if thing is not None:
                thing.ref_count_down()
