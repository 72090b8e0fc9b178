"""gRPC: everything for callers that share no memory with the daemon, block bytes as streams.

Runs on the daemon's event loop (grpc.aio). A Put or Get is a session of its own that holds
slots only while its bytes move, and that ends with the call, however the call ends. These
are the callers whose holds may end by a clock: who sends or takes nothing for
`lease.ttl` is cut off.

Bytes are copied and hashed on the loop, one chunk at a time (0.1 ms for 512 KiB): a hop to
a thread costs as much, and a slot that only the loop touches needs no watching.

Metadata of a call: `kvstored-tenant`, `kvstored-client`, `kvstored-protocol`, and
`kvstored-epoch`, which OpenNamespace answers as initial metadata. A caller that sends it
back learns of a restart as FAILED_PRECONDITION; without it, a namespace number of the life
before could name another namespace of this one.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import xxhash
from google.protobuf.message import DecodeError, Message

from kvstore.core.holds import Namespace, Session
from kvstore.instance import port_holder
from kvstore.server import calls
from kvstore.server.calls import Node
from kvstored.v1 import CHUNK_BYTES_MAX, KEY_BYTES, PROTOCOL, PROTOCOL_OLDEST, shm
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KVStoreError,
    ResourceExhausted,
)

log = logging.getLogger("kvstored.grpc")

SERVICE = "kvstored.v1.KVStore"

STREAMS_MAX = 64
"""Puts, Gets and Clears at once, over all connections; one more is refused, so that small calls always get through."""

RPCS_MAX = 512
"""Calls of any kind at once; gRPC itself refuses what comes on top."""

CONNECTION_STREAMS_MAX = 2048
"""HTTP/2 streams of one connection: far above RPCS_MAX, because what exceeds this one waits unseen in the client."""

MESSAGE_BYTES_MAX = 4 << 20
FRAME_BYTES = 4 << 20
"""HTTP/2 frames that are taken; with gRPC's 16 KiB a Get of 2 MiB blocks is a tenth slower."""

CHUNK_BYTES = 512 << 10
"""What Get sends in one message: of 256, 512 and 1024 KiB the fastest, since copy and hash stay in the cache."""

PUT_BLOCKS, PUT_BYTES = 16, 32 << 20
"""Blocks of one Put that wait for their commit together."""

GET_BLOCKS, GET_BYTES = 16, 8 << 20
"""Blocks that a Get holds at once."""

ABORT_WAIT_S = 1.0
"""How long a caller that reads nothing may keep us telling it so."""

PING_INTERVAL_MIN_S = 0.5
"""Clients may send keepalive pings as often as this, also between calls."""

STATUS: dict[int, Any] = {code.value[0]: code for code in grpc.StatusCode}
_DATA_TAG = 0x12
"""Field 2, length-delimited: `data` in PutChunk and GetChunk."""

T = TypeVar("T")


class GrpcEdge:
    """The service on one address."""

    def __init__(self, node: Node, address: str, stats: Callable[[], pb.StatsReply]) -> None:
        """`address`: "HOST:PORT" or "unix:/path". Nothing listens before `start`."""
        self.node = node
        self.address = address
        """As asked for; after `start` with the actual port."""
        self.stats = stats
        self._streams = 0
        self._running: set[asyncio.Task[Any]] = set()
        self._server: Any = None

    async def start(self) -> None:
        """Binds and serves. Raises OSError naming the holder where the address is taken."""
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=RPCS_MAX,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.max_concurrent_streams", CONNECTION_STREAMS_MAX),
                ("grpc.http2.max_frame_size", FRAME_BYTES),
                ("grpc.http2.min_ping_interval_without_data_ms", int(PING_INTERVAL_MIN_S * 1000)),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._handlers()),))
        self.address = bind(self._server, self.address)
        await self._server.start()
        log.info("serving gRPC on %s", self.address)

    async def stop(self, grace: float | None = None) -> None:
        """Refuses new calls, gives those under way `grace` seconds, ends them, and waits until they hold nothing."""
        if self._server is None:
            return
        await self._server.stop(grace)
        running = [task for task in self._running if task is not asyncio.current_task()]
        await asyncio.gather(*running, return_exceptions=True)
        if self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)

    def _handlers(self) -> dict[str, Any]:
        """Messages come as bytes and are parsed within the handler, where a malformed one is the caller's fault."""
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._unary(name, kind, call), None, None)
            for name, (kind, call) in SMALL_CALLS.items()
        }
        handlers["Clear"] = grpc.unary_unary_rpc_method_handler(self._clear, None, None)
        handlers["Put"] = grpc.stream_unary_rpc_method_handler(self._put, None, None)
        handlers["Get"] = grpc.unary_stream_rpc_method_handler(self._get, None, None)
        return handlers

    # -- what every call goes through

    async def _answer(self, name: str, context: Any, work: Awaitable[T]) -> T:
        """Turns what `work` raises into a status; by then everything it held is free."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            try:
                return await work
            except KVStoreError as e:
                error = e
            except grpc.aio.InternalError as e:
                # A read or write on a call that is over: its caller is gone.
                log.debug("%s of %s: %s", name, context.peer(), e)
                raise asyncio.CancelledError from e
            except Exception as e:
                self.node.internal_errors += 1
                log.exception("%s of %s failed", name, context.peer())
                error = KVStoreError(f"internal error of the daemon: {type(e).__name__}; see its log")
            await _abort(context, error)
        finally:
            self._running.discard(task)

    def _caller(self, context: Any) -> "Caller":
        """Who calls, by the metadata. Raises FailedPrecondition for another protocol or life of the daemon."""
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        protocol = metadata.get("kvstored-protocol", str(PROTOCOL))
        if not (protocol.isascii() and protocol.isdecimal() and PROTOCOL_OLDEST <= int(protocol[:9]) <= PROTOCOL):
            raise FailedPrecondition(
                f"the client speaks protocol {protocol[:32]}, this daemon (kvstored {self.node.version}) speaks "
                f"{PROTOCOL_OLDEST} to {PROTOCOL}: install the same release of kvstored on both sides"
            )
        if metadata.get("kvstored-epoch", str(self.node.epoch)) != str(self.node.epoch):
            raise FailedPrecondition("the daemon has restarted since the namespace was opened; open it again")
        client = metadata.get("kvstored-client", "")
        if len(client) > calls.NAME_BYTES_MAX:
            raise InvalidArgument(f"a client's name is at most {calls.NAME_BYTES_MAX} bytes")
        return Caller(metadata.get("kvstored-tenant", ""), client or context.peer())

    def _unary(self, name: str, kind: Any, call: Callable[["GrpcEdge", "Caller", Any], Message]) -> Any:
        async def work(message: bytes, context: Any) -> bytes:
            caller = self._caller(context)
            request = self._parsed(kind, message)
            if name == "OpenNamespace":
                await context.send_initial_metadata((("kvstored-epoch", str(self.node.epoch)),))
            reply = call(self, caller, request)
            if self.node.store.segments.jobs:
                self.node.jobs_ready()
            return reply.SerializeToString()

        async def handle(message: bytes, context: Any) -> bytes:
            return await self._answer(name, context, work(message, context))

        return handle

    def _parsed(self, kind: Any, message: bytes) -> Any:
        try:
            return kind.FromString(message)
        except DecodeError as e:
            self.node.protocol_errors += 1
            raise InvalidArgument(f"{len(message)} bytes that are not a {kind.DESCRIPTOR.name}") from e

    @contextlib.contextmanager
    def _long_call(self) -> Iterator[None]:
        if self._streams >= STREAMS_MAX:
            raise ResourceExhausted(f"{STREAMS_MAX} Put, Get and Clear calls are under way already; try again later")
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    @contextlib.contextmanager
    def _session(self, caller: "Caller") -> Iterator[Session]:
        """A session for one call. Its end frees whatever the call still holds."""
        store = self.node.store
        with self._long_call():
            session = store.open_session(
                calls.tenant_named(store, caller.tenant),
                caller.client,
                time.monotonic(),
                local=False,
                read_only=False,
                pid=0,
                nonce=0,
            )
            try:
                yield session
            finally:
                store.end_session(session, process_gone=True)
                self.node.jobs_ready()

    # -- calls that take long

    async def _clear(self, message: bytes, context: Any) -> bytes:
        async def work() -> bytes:
            caller = self._caller(context)
            request = self._parsed(pb.ClearRequest, message)
            with self._long_call():
                reply = await calls.clear(self.node, calls.tenant_named(self.node.store, caller.tenant), request)
            return reply.SerializeToString()

        return await self._answer("Clear", context, work())

    async def _put(self, _: Any, context: Any) -> bytes:
        async def work() -> bytes:
            with self._session(self._caller(context)) as session:
                async with _unstalled(self.node.lease_ttl_s, "the next chunk did not come") as limit:
                    reply = await PutStream(self, session, context, limit).run()
            return reply.SerializeToString()

        return await self._answer("Put", context, work())

    async def _get(self, message: bytes, context: Any) -> None:
        async def work() -> None:
            caller = self._caller(context)
            request = self._parsed(pb.GetRequest, message)
            with self._session(caller) as session:
                async with _unstalled(self.node.lease_ttl_s, "the last chunk was not taken") as limit:
                    await GetStream(self.node, session, context, limit).run(request)

        await self._answer("Get", context, work())


class Caller:
    """Who calls, as it says of itself."""

    def __init__(self, tenant: str, client: str) -> None:
        self.tenant = tenant
        self.client = client


def _tenant_call(call: Callable[[Node, Any, Any], Message]) -> Callable[[GrpcEdge, Caller, Any], Message]:
    return lambda edge, caller, request: call(edge.node, calls.tenant_named(edge.node.store, caller.tenant), request)


SMALL_CALLS: dict[str, tuple[Any, Callable[[GrpcEdge, Caller, Any], Message]]] = {
    "OpenNamespace": (pb.OpenNamespaceRequest, _tenant_call(calls.open_namespace)),
    "Match": (pb.MatchRequest, _tenant_call(calls.match)),
    "Touch": (pb.TouchRequest, _tenant_call(calls.touch)),
    "Remove": (pb.RemoveRequest, _tenant_call(calls.remove)),
    "Pin": (pb.PinRequest, _tenant_call(calls.pin)),
    "Unpin": (pb.UnpinRequest, _tenant_call(calls.unpin)),
    "Stats": (pb.StatsRequest, lambda edge, _, __: edge.stats()),
    "Health": (pb.HealthRequest, lambda edge, _, __: calls.health(edge.node)),
}
"""Answered in one step on the loop."""


class PutStream:
    """One Put: a header, then each block's bytes in chunks and their checksum.

    A slot is reserved when a block's turn comes, so what a slow caller holds is what it has
    sent. Blocks wait for their commit in small batches, never so long that the first one's
    reservation could expire while the caller keeps sending.
    """

    def __init__(self, edge: GrpcEdge, session: Session, context: Any, limit: asyncio.Timeout) -> None:
        self._edge = edge
        self._node = edge.node
        self._session = session
        self._context = context
        self._limit = limit
        self._header = pb.PutHeader()
        self._namespace: Namespace
        self._slot_bytes = 0
        self._results: list[int] = []
        self._waiting: list[int] = []
        """Slots of the last blocks: written and verified, not yet committed."""
        self._commit_by = 0.0

    async def run(self) -> pb.PutReply:
        """Stores what it can; raises ResourceExhausted where that is nothing."""
        await self._receive_header()
        block_bytes = self._namespace.block_bytes
        batch = max(1, min(PUT_BLOCKS, PUT_BYTES // block_bytes))
        existing: list[bytes] = []
        for i, key in enumerate(self._header.keys):
            if self._node.store.match(self._namespace, [key]):
                self._commit()
                await self._skip(i)
                self._results.append(pb.EXISTS)
                existing.append(key)
                continue
            try:
                slot = await self._reserve()
            except ResourceExhausted as e:
                self._cut_short(e)
                break
            await self._receive_block(i, slot)
            self._waiting.append(slot)
            if len(self._waiting) >= batch or time.monotonic() >= self._commit_by:
                self._commit()
        else:
            if await self._next() is not None:
                raise InvalidArgument(f"more bytes than the {len(self._header.keys)} blocks of the header")
            self._commit()
        if existing:
            self._node.store.touch(self._session.tenant, existing, time.monotonic())
            self._node.store.counts.existing += len(existing)
        return pb.PutReply(results=self._results)  # type: ignore[arg-type]

    async def _receive_header(self) -> None:
        first = await self._next()
        if not isinstance(first, pb.PutChunk) or first.WhichOneof("part") != "header":
            raise InvalidArgument("the first message of a Put is its header")
        header = self._header = first.header
        store = self._node.store
        self._namespace = store.namespace(self._session.tenant, header.namespace_id)
        self._slot_bytes = store.pool(self._namespace).slot_bytes
        calls.checked_keys(header.keys)
        if not len(header.keys) == len(header.parents) == len(header.depths):
            raise InvalidArgument(
                f"{len(header.keys)} keys, {len(header.parents)} parents and {len(header.depths)} depths: "
                "a Put names as many of each"
            )
        for i, parent in enumerate(header.parents):
            if parent and len(parent) != KEY_BYTES:
                raise InvalidArgument(f"parent {i} has {len(parent)} bytes; it is a key of {KEY_BYTES}, or empty")
        # Whatever of the header makes a commit impossible is said before the bytes come.
        empty = pb.PutHeader(hint=header.hint if header.HasField("hint") else None, durable=header.durable)
        calls.commit(self._node, self._session, self._namespace, empty, [])

    async def _reserve(self) -> int:
        """One slot; what waits is committed first where that is what is in the way."""
        ttl_s = self._node.lease_ttl_s
        if not self._waiting:
            self._commit_by = time.monotonic() + ttl_s / 2
        try:
            return (await self._reserve_one(ttl_s))[0]
        except ResourceExhausted:
            if not self._waiting:
                raise
        self._commit()
        self._commit_by = time.monotonic() + ttl_s / 2
        return (await self._reserve_one(ttl_s))[0]

    async def _reserve_one(self, ttl_s: float) -> list[int]:
        self._limit.reschedule(None)  # waiting for memory is not the caller's fault, and bounded by itself
        slots = await calls.reserve(self._node, self._session, self._namespace, 1, time.monotonic() + ttl_s)
        self._alive()
        return slots

    async def _receive_block(self, i: int, slot: int) -> None:
        """Into the slot, while it is ours; verified at the end."""
        segment, at = shm.ref_segment(slot), shm.ref_slot(slot) * self._slot_bytes
        end = at + self._namespace.block_bytes
        digest = xxhash.xxh3_64()
        while at < end:
            chunk = await self._chunk(i, end - at)
            if slot not in self._session.granted:
                raise FailedPrecondition(
                    f"block {i} came too slowly: its reservation expired after {self._node.lease_ttl_s:g} s (lease.ttl)"
                )
            self._node.slab.bytes_at(segment, at, len(chunk))[:] = chunk
            digest.update(chunk)
            at += len(chunk)
        if await self._checksum(i) != digest.intdigest():
            raise InvalidArgument(f"block {i} does not match its checksum (xxh3-64)")

    async def _skip(self, i: int) -> None:
        """Takes the bytes of a block that is there already."""
        left = self._namespace.block_bytes
        while left:
            left -= len(await self._chunk(i, left))
        await self._checksum(i)

    def _commit(self) -> None:
        """Makes what waits visible; slots that were not needed go back."""
        if not self._waiting:
            return
        slots, self._waiting = self._waiting, []
        first = len(self._results)
        part = slice(first, first + len(slots))
        header = self._header
        request = pb.PutHeader(
            keys=header.keys[part],
            parents=header.parents[part],
            depths=header.depths[part],
            hint=header.hint if header.HasField("hint") else None,
        )
        results = calls.commit(self._node, self._session, self._namespace, request, slots)
        self._results += results
        unused = [slot for slot, result in zip(slots, results, strict=True) if result != pb.STORED]
        if unused:
            self._node.store.abort(self._session, unused)
        if self._node.store.segments.jobs:
            self._node.jobs_ready()

    def _cut_short(self, why: ResourceExhausted) -> None:
        """No room for the next block: those that follow are there already, or rejected. Raises `why` if nothing is."""
        store = self._node.store
        rest = self._header.keys[len(self._results) :]
        results = [pb.EXISTS if store.match(self._namespace, [key]) else pb.REJECTED for key in rest]
        if all(result == pb.REJECTED for result in (*self._results, *results)):
            raise why
        self._results += results
        store.counts.existing += results.count(pb.EXISTS)
        store.counts.rejected += results.count(pb.REJECTED)

    # -- messages

    async def _next(self) -> memoryview | pb.PutChunk | None:
        """Bytes as a view, other messages parsed, None at the end."""
        message = await self._context.read()
        self._alive()
        if message is grpc.aio.EOF:
            return None
        return decode_data(message) or self._edge._parsed(pb.PutChunk, message)

    async def _chunk(self, i: int, left: int) -> memoryview:
        part = await self._next()
        if isinstance(part, pb.PutChunk) and part.WhichOneof("part") == "data":
            part = memoryview(part.data)
        if not isinstance(part, memoryview):
            raise InvalidArgument(f"block {i}: {_named(part)} where {left} more bytes were expected")
        if not 1 <= len(part) <= min(CHUNK_BYTES_MAX, left):
            raise InvalidArgument(
                f"block {i}: a chunk of {len(part)} bytes; 1 to {min(CHUNK_BYTES_MAX, left)} are allowed here"
            )
        return part

    async def _checksum(self, i: int) -> int:
        part = await self._next()
        if not isinstance(part, pb.PutChunk) or part.WhichOneof("part") != "checksum":
            raise InvalidArgument(f"block {i}: {_named(part)} where its checksum was expected")
        return part.checksum

    def _alive(self) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time() + self._node.lease_ttl_s)


class GetStream:
    """One Get: how many blocks there are, then each one's bytes in chunks and their checksum.

    Blocks are held while their bytes are sent, a few at a time. What eviction takes before
    its turn ends the stream early: the caller counts whole blocks, not the announcement.
    """

    def __init__(self, node: Node, session: Session, context: Any, limit: asyncio.Timeout) -> None:
        self._node = node
        self._session = session
        self._context = context
        self._limit = limit

    async def run(self, request: pb.GetRequest) -> None:
        store, session = self._node.store, self._session
        namespace = store.namespace(session.tenant, request.namespace_id)
        slot_bytes = store.pool(namespace).slot_bytes
        keys = calls.checked_keys(request.keys)
        count = len(store.match(namespace, keys))
        await self._write(pb.GetChunk(blocks=count).SerializeToString())
        batch = max(1, min(GET_BLOCKS, GET_BYTES // namespace.block_bytes))
        at = 0
        while at < count:
            slots = self._hold(namespace, keys[at : min(at + batch, count)])
            if not slots:
                return
            for slot in slots:
                await self._send_block(slot, slot_bytes, namespace.block_bytes)
                store.release(session, [slot])
            at += len(slots)

    def _hold(self, namespace: Namespace, keys: Any) -> list[int]:
        """The leading run of `keys`, or one block of it where holding all is too much; none is a miss."""
        store, now = self._node.store, time.monotonic()
        try:
            return store.acquire(self._session, namespace, keys, now)
        except ResourceExhausted:
            with contextlib.suppress(ResourceExhausted):
                return store.acquire(self._session, namespace, keys[:1], now)
            return []

    async def _send_block(self, slot: int, slot_bytes: int, block_bytes: int) -> None:
        segment, start = shm.ref_segment(slot), shm.ref_slot(slot) * slot_bytes
        digest = xxhash.xxh3_64()
        for at in range(start, start + block_bytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, start + block_bytes - at)
            message = encode_data(self._node.slab.bytes_at(segment, at, length))
            digest.update(memoryview(message)[-length:])
            await self._write(message)
        await self._write(pb.GetChunk(checksum=digest.intdigest()).SerializeToString())

    async def _write(self, message: bytes) -> None:
        await self._context.write(message)
        self._limit.reschedule(asyncio.get_running_loop().time() + self._node.lease_ttl_s)


@contextlib.asynccontextmanager
async def _unstalled(seconds: float, what: str) -> AsyncIterator[asyncio.Timeout]:
    """Ends the block by DeadlineExceeded unless the timeout is rescheduled again and again."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield limit
    except TimeoutError:
        raise DeadlineExceeded(f"{what} within {seconds:g} s (lease.ttl)") from None


async def _abort(context: Any, error: KVStoreError) -> NoReturn:
    """Sends the status. Somebody who reads nothing does not get it either, and is left alone after a while."""
    try:
        async with asyncio.timeout(ABORT_WAIT_S):
            await context.abort(STATUS[error.code], str(error))
    except TimeoutError:
        raise asyncio.CancelledError from error
    raise AssertionError("abort always raises")


def _named(part: memoryview | pb.PutChunk | None) -> str:
    if part is None:
        return "the stream ended"
    return "bytes" if isinstance(part, memoryview) else f"a {part.WhichOneof('part') or 'message without a part'}"


# -- chunks of bytes. Written and read by hand: protobuf copies `data` twice more on each side, which made
#    streams of 2 MiB blocks three times slower. Whatever does not look exactly like that is protobuf's to parse.


def encode_data(data: memoryview) -> bytes:
    """`PutChunk(data=...)` or `GetChunk(data=...)`, as protobuf serialises it."""
    head, left = bytearray((_DATA_TAG,)), len(data)
    while left > 0x7F:
        head.append(left & 0x7F | 0x80)
        left >>= 7
    head.append(left)
    return b"".join((head, data))


def decode_data(message: bytes) -> memoryview | None:
    """The bytes of a message that is `data` and nothing else; None for any other."""
    if len(message) < 2 or message[0] != _DATA_TAG:
        return None
    length, at = 0, 1
    for shift in range(0, 35, 7):
        if at >= len(message):
            return None
        byte = message[at]
        at += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            return memoryview(message)[at:] if length == len(message) - at and length else None
    return None


# -- binding


def bind(server: Any, address: str) -> str:
    """Binds every address that `address` means; answers it with the actual port. Raises OSError naming the holder."""
    if address.startswith("unix:"):
        before = os.umask(0o177)
        try:
            _add_port(server, address, None)
        finally:
            os.umask(before)
        return address
    host, _, port_text = address.rpartition(":")
    port = int(port_text)
    # One by one: of a name with two addresses gRPC is content with one, and who got the other would get our calls.
    for numeric in _addresses(host.removeprefix("[").removesuffix("]")):
        shown = f"[{numeric}]" if ":" in numeric else numeric
        port = _add_port(server, f"{shown}:{port}", (numeric, port))
    return f"{host}:{port}"


def _addresses(host: str) -> list[str]:
    """The addresses of this machine behind a host name."""
    found = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    usable = [numeric for numeric in dict.fromkeys(found) if _is_ours(numeric)]
    if not usable:
        raise OSError(errno.EADDRNOTAVAIL, f"server.grpc: {host} is no address of this machine")
    return usable


def _is_ours(numeric: str) -> bool:
    family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((numeric, 0))
    except OSError:
        return False
    return True


def _add_port(server: Any, address: str, tcp: tuple[str, int] | None) -> int:
    try:
        port: int = server.add_insecure_port(address)
    except RuntimeError as e:
        holder = port_holder(*tcp) if tcp is not None else None
        why = f"{holder} listens there" if holder else "it is in use, or not ours to bind"
        message = f"server.grpc: cannot listen on {address}: {why}; stop it or choose another address"
        raise OSError(errno.EADDRINUSE, message) from e
    return port
