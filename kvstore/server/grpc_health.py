"""The standard services: health (grpc.health.v1) and reflection, for tools that know nothing of ours.

Health is "SERVING" while the daemon is healthy and not about to stop, for the whole server
("") and for our service alike. Watch streams and reflection streams stay open as long as
their client likes, so each kind has a number of places of its own: neither can take those
of the calls that must always be answered.

The servicer of grpcio-health-checking is not used: a watcher of it that leaves takes the
others' notification with it, and it has no bound.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvstore.server.calls import Node
from kvstore.server.grpc_caller import Places
from kvstore.server.grpc_streams import Stall, parsed, unstalled

WATCHES_MAX = 64
REFLECTIONS_MAX = 16
REFLECTION_IDLE_S = 30.0
POLL_S = 0.1
"""How often the daemon's health is looked at, while somebody watches it."""

HEALTH = str(health.SERVICE_NAME)
REFLECTION = str(reflection.SERVICE_NAME)
OPEN_TO_ALL = frozenset((f"/{HEALTH}/Check", f"/{HEALTH}/Watch"))
"""What a load balancer without a token may ask."""

_Status = health_pb2.HealthCheckResponse

Guard = Callable[[str, Any, Coroutine[Any, Any, Any]], Awaitable[Any]]
"""Runs a handler's work and turns its errors into a status."""

Message = Callable[[Any], Awaitable[bytes]]
"""The one message of a call, or the error of one that has none."""


class HealthService:
    """grpc.health.v1.Health of one edge."""

    def __init__(self, node: Node, service: str, guard: Guard, message: Message) -> None:
        self._node = node
        self._names = ("", service)
        self._guard = guard
        self._message = message
        self._stopping = False
        self._watches = Places(WATCHES_MAX, "Watch calls")
        self._watching = 0
        self._poll: asyncio.Task[None] | None = None
        self._changed: asyncio.Future[None] | None = None

    def handlers(self) -> Any:
        """For the server."""
        methods = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check, None, None),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, None, None),
        }
        return grpc.method_handlers_generic_handler(HEALTH, methods)

    def stop(self) -> None:
        """From now on not serving; those who watch are told so, and their streams end."""
        self._stopping = True
        self._tell()

    def serving(self) -> bool:
        return not self._stopping and not self._node.problems()

    def _status(self, name: str) -> int:
        if name not in self._names:
            return int(_Status.SERVICE_UNKNOWN)
        return int(_Status.SERVING if self.serving() else _Status.NOT_SERVING)

    async def _check(self, _: Any, context: Any) -> bytes:
        unknown = ""

        async def work() -> bytes:
            nonlocal unknown
            name = parsed(self._node, health_pb2.HealthCheckRequest, await self._message(context)).service
            status = self._status(name)
            if status == _Status.SERVICE_UNKNOWN:
                unknown = f"no service {name[:80]!r} here; there are {' and '.join(map(repr, self._names))}"
            answer: bytes = _Status(status=status).SerializeToString()
            return answer

        answer: bytes = await self._guard("Check", context, work())
        if unknown:
            await context.abort(grpc.StatusCode.NOT_FOUND, unknown)
        return answer

    async def _watch(self, _: Any, context: Any) -> None:
        async def work() -> None:
            name = parsed(self._node, health_pb2.HealthCheckRequest, await self._message(context)).service
            with self._watches.one():
                self._watching += 1
                try:
                    await self._send_changes(name, context)
                finally:
                    self._watching -= 1

        await self._guard("Watch", context, work())

    async def _send_changes(self, name: str, context: Any) -> None:
        last = -1
        while True:
            changed = self._next_change()  # asked for before the status, so that no change is missed
            status, stopping = self._status(name), self._stopping
            if status != last:
                await context.write(_Status(status=status).SerializeToString())
                last = status
            if stopping:
                return
            await asyncio.shield(changed)

    def _next_change(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if self._changed is None:
            self._changed = loop.create_future()
        if self._poll is None:
            self._poll = loop.create_task(self._look())
            self._poll.add_done_callback(self._looked)
        return self._changed

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None

    async def _look(self) -> None:
        """Tells those who watch of every change, until nobody does."""
        before = self.serving()
        while not self._stopping:
            await asyncio.sleep(POLL_S)
            if not self._watching:
                return
            now = self.serving()
            if now != before:
                before = now
                self._tell()

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._poll = None
        if not task.cancelled() and task.exception() is not None:
            self._node.internal_errors += 1
            self._tell()  # who watches looks again, and starts another one


class ReflectionService:
    """Server reflection of one edge: which services there are, and their messages."""

    def __init__(self, node: Node, service: str, guard: Guard) -> None:
        self._node = node
        self._guard = guard
        self._places = Places(REFLECTIONS_MAX, "reflection calls")
        self._servicer = reflection.aio.ReflectionServicer((service, HEALTH, REFLECTION))

    def handlers(self) -> Any:
        """For the server."""
        methods = {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(self._info, None, None)}
        return grpc.method_handlers_generic_handler(REFLECTION, methods)

    async def _info(self, _: Any, context: Any) -> None:
        async def work() -> None:
            await context.send_initial_metadata(())  # ahead of what may be cut off: see GrpcEdge._get
            with self._places.one():
                async with unstalled(
                    REFLECTION_IDLE_S, "the next question did not come", "a bound of the daemon"
                ) as stall:
                    async for answer in self._servicer.ServerReflectionInfo(self._questions(context, stall), context):
                        await context.write(answer.SerializeToString())

        await self._guard("ServerReflectionInfo", context, work())

    async def _questions(self, context: Any, stall: Stall) -> AsyncIterator[Any]:
        while (message := await context.read()) is not grpc.aio.EOF:
            stall.alive()
            yield parsed(self._node, reflection_pb2.ServerReflectionRequest, message)
