"""The gRPC edge on a store and a slab of its own, in the process and on the event loop of the test.

`with_edge` runs a scenario against it and proves afterwards that nothing is held and that
every invariant of the store is true. Calls go through the generated stub, so protobuf's own
encoding meets the one written by hand.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash

from kvstore.core.segments import DropSegment, MakeSegment
from kvstore.core.store import Store
from kvstore.server import stats
from kvstore.server.calls import Node
from kvstore.server.grpc_service import GrpcEdge
from kvstore.tiers.index import Indexes
from kvstore.tiers.slab import Slab
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.kvstore_pb2_grpc import KVStoreStub

WAIT_S = 30.0
EPOCH = 12345


def key_of(name: object) -> bytes:
    return blake2b(repr(name).encode(), digest_size=32).digest()


def block_of(name: object, size_bytes: int) -> bytes:
    """Bytes that no other name has."""
    return (key_of(name) * (size_bytes // 32 + 1))[:size_bytes]


class Scene:
    """One edge, its store, and a client of it."""

    def __init__(self, size_bytes: int, ttl_s: float) -> None:
        self.slab = Slab(huge_pages=False)
        self.indexes = Indexes(EPOCH, 1024)
        self.store = Store(size_bytes, self.indexes)
        self.node = Node(
            store=self.store,
            slab=self.slab,
            indexes=self.indexes,
            epoch=EPOCH,
            version="test",
            problems=list,
            jobs_ready=self.run_jobs,
            memory_changed=self._memory_changed,
            started=time.monotonic(),
            lease_ttl_s=ttl_s,
        )
        self.run_jobs()
        self.edge = GrpcEdge(self.node, "127.0.0.1:0", self.stats)
        self.stub: Any = None
        self.blocking: Any = None
        self.channel: Any = None

    def run_jobs(self) -> None:
        for job in self.store.take_jobs():
            if isinstance(job, DropSegment):
                self.slab.drop(job.segment)
            else:
                assert isinstance(job, MakeSegment)
                self.slab.add(self.slab.make(job.segment, job.size_bytes))
                self.store.segments.made(job.segment)

    @staticmethod
    def _memory_changed() -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def stats(self) -> pb.StatsReply:
        return stats.build(self.node, loops=[], lock_error="", socket="", grpc=self.edge.address, http="")

    # -- calls

    async def namespace(self, block_bytes: int, name: str = "") -> int:
        """A namespace of that block size, by its number."""
        request = pb.OpenNamespaceRequest(digest=key_of((name, block_bytes)), block_bytes=block_bytes, label="test")
        number: int = (await self.stub.OpenNamespace(request)).namespace_id
        return number

    async def put(self, number: int, keys: Sequence[bytes], blocks: Sequence[bytes], **options: Any) -> list[int]:
        """A Put as it should be; answers the results."""
        timeout = options.pop("timeout", WAIT_S)
        reply = await self.answer(put_messages(number, keys, blocks, **options), timeout)
        return list(reply.results)

    async def answer(self, messages: Sequence[Any], timeout: float = WAIT_S, **options: Any) -> Any:
        """What the edge says to a Put of these messages.

        By a client in a thread: where the edge does not want all of them, grpc.aio's client
        may say INTERNAL instead of the status that it was given.
        """
        return await asyncio.to_thread(self.blocking.Put, iter(messages), timeout=timeout, **options)

    async def get(self, number: int, keys: Sequence[bytes]) -> tuple[int, list[bytes]]:
        """How many blocks a Get announced, and those that came whole."""
        announced, blocks, block = -1, [], b""
        async for chunk in self.stub.Get(pb.GetRequest(namespace_id=number, keys=keys), timeout=WAIT_S):
            if announced < 0:
                assert not chunk.data
                assert not chunk.HasField("checksum")
                announced = chunk.blocks
                continue
            assert not chunk.blocks
            block += chunk.data
            if chunk.HasField("checksum"):
                assert chunk.checksum == xxhash.xxh3_64_intdigest(block)
                blocks.append(block)
                block = b""
        assert not block
        return announced, blocks

    async def match(self, number: int, keys: Sequence[bytes]) -> int:
        blocks: int = (await self.stub.Match(pb.MatchRequest(namespace_id=number, keys=keys))).blocks
        return blocks

    # -- what must be true

    async def until(self, condition: Callable[[], Any]) -> None:
        """Lets the loop run until the condition is true."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0)

    def held(self) -> int:
        return sum(tenant.held_bytes for tenant in self.store.tenants.values())

    async def idle(self) -> None:
        """Waits until no call holds anything, and audits the store."""
        await self.until(lambda: not self.store.sessions and not self.held())
        self.store.check()

    def visible(self) -> int:
        """Blocks that can be found."""
        return sum(len(tenant.rows) for tenant in self.store.tenants.values())


def put_messages(
    number: int, keys: Sequence[bytes], blocks: Sequence[bytes], chunk_bytes: int = 1 << 20, **fields: Any
) -> list[pb.PutChunk]:
    """What a Put sends."""
    fields.setdefault("parents", [b"", *keys[:-1]][: len(keys)])
    fields.setdefault("depths", range(len(keys)))
    messages = [pb.PutChunk(header=pb.PutHeader(namespace_id=number, keys=keys, **fields))]
    for block in blocks:
        messages += [pb.PutChunk(data=block[at : at + chunk_bytes]) for at in range(0, len(block), chunk_bytes)]
        messages[-1].checksum = xxhash.xxh3_64_intdigest(block)
    return messages


def with_edge(scenario: Callable[[Scene], Awaitable[None]], size_bytes: int = 64 << 20, ttl_s: float = 30.0) -> Scene:
    """Runs the scenario; afterwards nothing is held, and nothing went wrong that is the daemon's fault."""

    async def run() -> Scene:
        scene = Scene(size_bytes, ttl_s)
        await scene.edge.start()
        try:
            with grpc.insecure_channel(scene.edge.address) as blocking:
                async with grpc.aio.insecure_channel(scene.edge.address) as channel:
                    scene.channel = channel
                    scene.stub, scene.blocking = KVStoreStub(channel), KVStoreStub(blocking)
                    await scenario(scene)
                    await scene.idle()
        finally:
            await scene.edge.stop(0)
        assert not scene.store.sessions
        scene.slab.close()
        scene.indexes.close()
        return scene

    return asyncio.run(asyncio.wait_for(run(), 120.0))


@contextlib.contextmanager
def refused(code: grpc.StatusCode, *words: str) -> Iterator[None]:
    """The call within fails with this status, and its message says these words."""
    with pytest.raises(grpc.RpcError) as raised:
        yield
    error: Any = raised.value
    assert error.code() is code, error
    for word in words:
        assert word in (error.details() or ""), error


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvstored-test-") as name:
        yield Path(name)
