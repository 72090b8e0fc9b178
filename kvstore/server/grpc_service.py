"""gRPC: everything for callers that share no memory with the daemon, block bytes as streams.

Runs on the daemon's event loop (grpc.aio). A Put or Get is a session of its own that holds
slots only while its bytes move (grpc_streams.py), and that ends with the call, however the
call ends.

Metadata of a call: `kvstored-tenant`, `kvstored-client`, `kvstored-protocol`, and
`kvstored-epoch`, which OpenNamespace answers as initial metadata. A caller that sends it
back learns of a restart as FAILED_PRECONDITION; without it, a namespace number of the life
before could name another namespace of this one.
"""

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.core.holds import Session
from kvstore.instance import port_holder
from kvstore.server import calls
from kvstore.server.calls import Node
from kvstore.server.grpc_streams import GetStream, PutStream, parsed, unstalled
from kvstored.v1 import CHUNK_BYTES_MAX, PROTOCOL, PROTOCOL_OLDEST
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import (
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

ABORT_WAIT_S = 1.0
"""How long a caller that reads nothing may keep us telling it so."""

PING_INTERVAL_MIN_S = 0.5
"""Clients may send keepalive pings as often as this, also between calls."""

MAPPED_FROM_BYTES = CHUNK_BYTES_MAX + (64 << 10)
"""Allocations as large as this get mappings of their own: just above the largest message with bytes."""

KEPT_BYTES = 16 << 20
"""Freed memory at the end of the heap that is not given back to the system."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From malloc.h."""

STATUS: dict[int, Any] = {code.value[0]: code for code in grpc.StatusCode}

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
        keep_freed_memory()
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
            request = parsed(self.node, kind, message)
            if name == "OpenNamespace":
                await context.send_initial_metadata((("kvstored-epoch", str(self.node.epoch)),))
            reply = call(self, caller, request)
            if self.node.store.segments.jobs:
                self.node.jobs_ready()
            return reply.SerializeToString()

        async def handle(message: bytes, context: Any) -> bytes:
            return await self._answer(name, context, work(message, context))

        return handle

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
            request = parsed(self.node, pb.ClearRequest, message)
            with self._long_call():
                reply = await calls.clear(self.node, calls.tenant_named(self.node.store, caller.tenant), request)
            return reply.SerializeToString()

        return await self._answer("Clear", context, work())

    async def _put(self, _: Any, context: Any) -> bytes:
        async def work() -> bytes:
            with self._session(self._caller(context)) as session:
                async with unstalled(self.node.lease_ttl_s, "the next chunk did not come") as limit:
                    reply = await PutStream(self.node, session, context, limit).run()
            return reply.SerializeToString()

        return await self._answer("Put", context, work())

    async def _get(self, message: bytes, context: Any) -> None:
        async def work() -> None:
            caller = self._caller(context)
            request = parsed(self.node, pb.GetRequest, message)
            with self._session(caller) as session:
                async with unstalled(self.node.lease_ttl_s, "the last chunk was not taken") as limit:
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


async def _abort(context: Any, error: KVStoreError) -> NoReturn:
    """Sends the status. Somebody who reads nothing does not get it either, and is left alone after a while."""
    try:
        async with asyncio.timeout(ABORT_WAIT_S):
            await context.abort(STATUS[error.code], str(error))
    except (TimeoutError, grpc.aio.InternalError):
        raise asyncio.CancelledError from error
    raise AssertionError("abort always raises")


def keep_freed_memory() -> None:
    """Lets malloc keep the memory of one message for the next.

    Otherwise each message has a mapping of its own, or is cut off the heap's end when it is
    freed, and every page of the next one is new: half of a stream's time. Where gRPC is on
    this replaces the smaller threshold that keeps the tables' heap compact (daemon.py).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, musl does not need it
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


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
