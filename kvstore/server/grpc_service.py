"""gRPC: everything for callers that share no memory with the daemon, and calls of sessions that do.

Runs on the daemon's event loop (grpc.aio). A Put or Get is a session of its own that holds
slots only while its bytes move (grpc_streams.py), and that ends with the call, however the
call ends; also with the session that it is bound to, whose holds it does not share: bytes
that the daemon writes are nobody's to resume.

Who calls is told by the metadata (grpc_caller.py), what the calls of one message do by a
table (grpc_calls.py).
"""

import asyncio
import contextlib
import inspect
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc

from kvstore.core.holds import Session
from kvstore.logs import logger
from kvstore.server import calls
from kvstore.server.auth import ANY_TENANT, Access
from kvstore.server.calls import Node
from kvstore.server.grpc_answers import Answers
from kvstore.server.grpc_caller import Caller, Gate, Places, Unsaid, caller_of
from kvstore.server.grpc_calls import ADMINISTRATION, CALLS, STREAMS, WAITS, Call, GiveBack
from kvstore.server.grpc_get import GetStream
from kvstore.server.grpc_health import OPEN_TO_ALL, HealthService, ReflectionService
from kvstore.server.grpc_listen import bind, credentials_of, keep_freed_memory
from kvstore.server.grpc_streams import Outcome, PutStream, parsed, unstalled
from kvstore.server.stats import keep_only
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import KVStoreError, ResourceExhausted

log = logger("kvstored.grpc")

SERVICE = "kvstored.v1.KVStore"

STREAMS_MAX = 64
"""Puts, Gets and Clears at once, over all connections; one more is refused, so that small calls always get through."""

ADMINISTRATION_MAX = 8
"""Inspections and evictions at once: each is a walk over the store in steps."""

WAITS_MAX = 128
"""Loads and Tickets at once, each of which may wait for a second."""

UNSAID_MAX = 128
UNSAID_WAIT_S = 5.0
"""Calls whose one message has not come, and how long it may take. gRPC itself would wait for ever."""

ANSWER_WAIT_S = 5.0
"""How long a caller may take to take what a bound call granted to it."""

RPCS_MAX = 512
"""Calls of any kind at work at once. All bounds on calls that take long are together smaller, whatever callers do, so
that there is always room for those that are answered at once. gRPC's own bound (`maximum_concurrent_rpcs`) also counts
calls whose answer nobody takes: one connection shut out everybody else."""

CONNECTION_STREAMS_MAX = 2048
"""HTTP/2 streams of one connection: far above RPCS_MAX, because what exceeds this one waits unseen in the client."""

CONNECTIONS_MAX = 1024
"""At once; further ones are closed. Each costs a descriptor and some 50 KiB."""

HANDSHAKE_S = 5.0
"""A connection that has not said by then that it speaks HTTP/2 (and TLS) is closed."""

CONNECTION_IDLE_S = 60.0
"""Without a call under way, also one that never made any: gRPC tells them not apart, and makes no room for newcomers.
Then a connection is told to go, and its client makes another with its next call. Else connections that ask for nothing
would keep others away for ever; now it is so long at most."""

MESSAGE_BYTES_MAX = 4 << 20
FRAME_BYTES = 4 << 20
"""HTTP/2 frames that are taken; with gRPC's 16 KiB a Get of 2 MiB blocks is a tenth slower."""

KEEPALIVE_S, KEEPALIVE_WAIT_S = 30.0, 30.0
"""How often a connection is asked for a sign of life, and how long it may take: one that reads nothing, so that not
even what no window holds back gets out, is closed."""

PING_INTERVAL_MIN_S = 0.5
"""Clients may send keepalive pings as often as this, also between calls."""

STATUS: dict[int, Any] = {code.value[0]: code for code in grpc.StatusCode}

T = TypeVar("T")


class GrpcEdge:
    """The service on one address."""

    def __init__(
        self, node: Node, address: str, stats: Callable[[], pb.StatsReply], access: Access | None = None
    ) -> None:
        """`address`: "HOST:PORT" or "unix:/path". Nothing listens before `start`.

        `access`: what TCP asks of callers; a Unix socket asks for nothing but its mode.
        """
        self.node = node
        self.address = address
        """As asked for; after `start` with the actual port."""
        self.stats = stats
        self._access = access or Access()
        self._tcp = not address.startswith("unix:")
        self._places = {
            STREAMS: Places(STREAMS_MAX, "Put, Get and Clear calls"),
            ADMINISTRATION: Places(ADMINISTRATION_MAX, "calls of the administration"),
            WAITS: Places(WAITS_MAX, "Load and Ticket calls"),
        }
        self._answers = Answers(RPCS_MAX)
        self._message = Unsaid(UNSAID_MAX, UNSAID_WAIT_S).message
        self._health = HealthService(node, SERVICE, self._guarded, self._message)
        self._reflection = ReflectionService(node, SERVICE, self._guarded)
        self._running: set[asyncio.Task[Any]] = set()
        self._server: Any = None

    async def start(self) -> None:
        """Binds and serves. Raises OSError naming the holder where the address is taken."""
        keep_freed_memory()
        tokens = self._access.tokens if self._tcp else None
        gates = [] if tokens is None else [Gate(tokens, OPEN_TO_ALL, status, self._refused)]
        self._server = grpc.aio.server(
            interceptors=gates,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.max_concurrent_streams", CONNECTION_STREAMS_MAX),
                ("grpc.http2.max_frame_size", FRAME_BYTES),
                ("grpc.http2.min_ping_interval_without_data_ms", int(PING_INTERVAL_MIN_S * 1000)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
                ("grpc.keepalive_timeout_ms", int(KEEPALIVE_WAIT_S * 1000)),
                ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_WAIT_S * 1000)),
                ("grpc.http2.max_pings_without_data", 0),  # also while an answer is stuck
                ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
                ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
                ("grpc.max_connection_idle_ms", int(CONNECTION_IDLE_S * 1000)),
            ],
        )
        own = grpc.method_handlers_generic_handler(SERVICE, self._handlers())
        self._server.add_generic_rpc_handlers((own, self._health.handlers(), self._reflection.handlers()))
        self.address = bind(self._server, self.address, credentials_of(self._access.certificate))
        await self._server.start()
        log.info(f"serving gRPC on {self.address}")

    async def stop(self, grace: float | None = None) -> None:
        """Refuses new calls, gives those under way `grace` seconds, ends them, and waits until they hold nothing."""
        if self._server is None:
            return
        self._health.stop()
        await self._server.stop(grace)
        running = [task for task in self._running if task is not asyncio.current_task()]
        await asyncio.gather(*running, return_exceptions=True)
        if not self._tcp:
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)

    def _handlers(self) -> dict[str, Any]:
        """Messages come as bytes and are parsed within the handler, where a malformed one is the caller's fault.

        All are taken as streams, so that it is ours for how long a first message is waited for.
        """
        stats = Call(pb.StatsRequest, lambda _, caller, __: self._stats(caller))
        handlers = {}
        for name, call in {**CALLS, "Stats": stats}.items():
            kind = grpc.stream_unary_rpc_method_handler
            if call.give_back is not None:  # it writes its answer itself (`_deliver`); on the wire that is the same
                kind = grpc.stream_stream_rpc_method_handler
            handlers[name] = kind(self._unary(name, call), None, None)
        handlers["Put"] = grpc.stream_unary_rpc_method_handler(self._put, None, None)
        handlers["Get"] = grpc.stream_stream_rpc_method_handler(self._get, None, None)
        return handlers

    # -- what every call goes through

    async def _answer(self, name: str, context: Any, work: Coroutine[Any, Any, T], *, counted: bool = True) -> T:
        """Turns what `work` raises into a status; by then everything it held is free."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        began = time.perf_counter()
        try:
            try:
                with self._answers.call(name, context.peer()) as way:
                    answer = await work
                    way.sent(answer)
            except KVStoreError as e:
                error = e
            except grpc.aio.InternalError as e:
                # A read or write on a call that is over: its caller is gone.
                log.debug("a caller left", call=name, peer=context.peer(), reason=str(e))
                raise asyncio.CancelledError from e
            except Exception as e:
                self.node.internal_errors += 1
                log.exception("a call failed", call=name, peer=context.peer())
                error = KVStoreError(f"internal error of the daemon: {type(e).__name__}; see its log")
            else:
                if counted:
                    self.node.figures.answer("grpc", name, began, failed=False)
                return answer
            if counted:
                self.node.figures.answer("grpc", name, began, failed=True)
            self._running.discard(task)
            await _abort(context, error)
        finally:
            work.close()  # where there is no room it never began
            self._running.discard(task)

    async def _guarded(self, name: str, context: Any, work: Coroutine[Any, Any, T]) -> T:
        """`_answer` for the standard services, whose calls are no work of the store's."""
        return await self._answer(name, context, work, counted=False)

    def _caller(self, context: Any) -> Caller:
        return caller_of(self.node, context, self._access.tokens, tcp=self._tcp)

    def _told(self, call: Call, name: str, context: Any) -> contextlib.AbstractContextManager[None]:
        """What refuses a call of the administration is logged."""
        if call.places != ADMINISTRATION:
            return contextlib.nullcontext()
        return self.node.refusals.told(name, {"peer": context.peer()})

    def _refused(self, method: str, peer: str, error: KVStoreError) -> None:
        """The gate let somebody not in."""
        name = method.removeprefix(f"/{SERVICE}/")
        if name in CALLS and CALLS[name].places == ADMINISTRATION:
            self.node.refusals.note(name, {"peer": peer}, error)

    def _stats(self, caller: Caller) -> pb.StatsReply:
        """A token for one tenant shows what is of that tenant."""
        reply = self.stats()
        if caller.grant is not None and caller.grant.tenant != ANY_TENANT:
            keep_only(reply, self.node, caller.grant.tenant)
        return reply

    def _unary(self, name: str, call: Call) -> Any:
        async def work(context: Any) -> bytes | None:
            request = parsed(self.node, call.kind, await self._message(context))
            with self._told(call, name, context):
                caller = self._caller(context)
            if name == "OpenNamespace":
                await context.send_initial_metadata((("kvstored-epoch", str(self.node.epoch)),))
            began = time.perf_counter()
            with self._places[call.places].one() if call.places else contextlib.nullcontext():
                reply: Any = call.answer(self.node, caller, request)
                if inspect.isawaitable(reply):
                    with caller.under_way():
                        reply = await reply
            if call.give_back is not None:
                await self._deliver(context, call.give_back, caller.bound(name), request, reply)
            if name in ("Match", "Acquire"):
                namespace = self.node.store.namespaces[request.namespace_id - 1]
                found = reply.blocks if name == "Match" else len(reply.slots)
                tier = max(reply.tiers, default=pb.TIER_HOST) if name == "Match" else pb.TIER_HOST  # the slowest
                self._saw(caller, name, (namespace, found, len(request.keys), tier, 0), began)
            if self.node.store.segments.jobs:
                self.node.jobs_ready()
            return reply.SerializeToString() if call.give_back is None else None

        async def handle(_: Any, context: Any) -> bytes | None:
            return await self._answer(name, context, work(context))

        return handle

    async def _deliver(self, context: Any, give_back: GiveBack, session: Session, request: Any, reply: Any) -> None:
        """Sends what a call granted, ahead of its status; what does not get out is given back.

        Where an answer goes with the status, gRPC tells nobody whether it got out. So no caller
        was told OK of what is given back here, and none may use it. Where the session gave
        something back by itself meanwhile, that may have been this, and another call's since:
        then it stays, and Abort or Release with `all` ends it.
        """
        gave_back = session.gave_back
        self._answers.done()
        try:
            async with unstalled(ANSWER_WAIT_S, "the answer was not taken", "a limit of calls that grant something"):
                await context.write(reply.SerializeToString())
        except BaseException:
            if session.gave_back == gave_back:
                give_back(self.node, session, request, reply)
                self.node.jobs_ready()
            raise

    @contextlib.contextmanager
    def _session(self, caller: Caller) -> Iterator[Session]:
        """A session for one call. Its end frees whatever the call still holds."""
        store = self.node.store
        with self._places[STREAMS].one(), caller.under_way():
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
                self.node.tickets.end(session)
                store.end_session(session, process_gone=True)
                self.node.jobs_ready()

    # -- figures of callers that do not tell what they do

    @contextlib.contextmanager
    def _counted(self, caller: Caller, name: str, stream: PutStream | GetStream) -> Iterator[None]:
        """Counts a stream that was answered, or found no room for anything; one that broke is none."""
        began = time.perf_counter()
        try:
            yield
        except ResourceExhausted:
            self._saw(caller, name, stream.outcome(), began)
            raise
        self._saw(caller, name, stream.outcome(), began)

    def _saw(self, caller: Caller, name: str, outcome: Outcome, began: float) -> None:
        if not caller.reports:
            namespace, found, asked, tier, busy = outcome
            self.node.figures.saw(name, namespace, found, asked, time.perf_counter() - began, tier, busy)

    # -- streams

    async def _put(self, _: Any, context: Any) -> bytes:
        async def work() -> bytes:
            caller = self._caller(context)
            caller.check_changes("put")
            with self._session(caller) as session:
                async with unstalled(self.node.lease_ttl_s, "the next chunk did not come") as stall:
                    stream = PutStream(self.node, session, context, stall)
                    with self._counted(caller, "Put", stream):
                        reply = await stream.run()
            return reply.SerializeToString()

        return await self._answer("Put", context, work())

    async def _get(self, _: Any, context: Any) -> None:
        async def work() -> None:
            request = parsed(self.node, pb.GetRequest, await self._message(context))
            caller = self._caller(context)
            # By itself it would go with the first message. Where that one is cut off, by the end of the session,
            # gRPC sends it again with the status, fails at that, and the caller never gets a status (seen).
            await context.send_initial_metadata(())
            with self._session(caller) as session:
                async with unstalled(self.node.lease_ttl_s, "the last chunk was not taken") as stall:
                    stream = GetStream(self.node, session, context, stall)
                    with self._counted(caller, "Get", stream):
                        await stream.run(request)

        await self._answer("Get", context, work())


def status(error: KVStoreError) -> Any:
    """gRPC's status of an error of ours."""
    return STATUS[error.code]


async def _abort(context: Any, error: KVStoreError) -> NoReturn:
    """Sends the status. Somebody who reads nothing does not get it either; by then the call holds nothing."""
    try:
        await context.abort(status(error), str(error))
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from error
    raise AssertionError("abort always raises")
