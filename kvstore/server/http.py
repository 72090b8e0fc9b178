"""HTTP for those who watch: `/metrics`, `/healthz`, `/readyz`, and `/`, which names them.

Only GET and HEAD, no body is read, nothing changes the store. Everything that a caller can
make us wait for or keep is bounded: connections, the bytes of a request, and the time from
the begin of a connection to the end of the answer, however slowly it is asked or taken. A
connection has one request, so nothing is sent ahead of an answer and nothing waits for more.
Where all places are taken, who has asked keeps its place, and of the others the one that
has waited longest makes room: silence, in a loop or not, keeps nobody away.

A scrape costs milliseconds of the loop that all clients wait for, so there are at most ten a
second: who asks meanwhile shares the next one with all others, which is begun after they
asked. Nothing older than the question is ever answered.
"""

import asyncio
import json
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion10, HttpVersion11, RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from kvstore.logs import logger
from kvstore.server.addresses import bound, listen
from kvstore.server.frames import watch
from kvstore.server.metrics import wants_openmetrics
from kvstore.server.readiness import Answer

log = logger("kvstored.http")

CONNECTIONS_MAX = 64
"""At once; for one more, the one that has waited longest without a whole request is closed, or else it itself."""

ACCEPTS_A_TURN = 4
"""Of one listener. A connection whose request has come needs a few turns of the event loop until that is
known; so many new ones cannot push it out meanwhile."""

EXCHANGE_S = 10.0
"""From the begin of a connection until its request has come and the answer is taken; then it is closed."""

REQUEST_BYTES_MAX = 16 << 10
"""Line and headers, and whatever is sent behind them before the answer."""

BACKLOG = 64
SCRAPE_GAP_S = 0.1
READY_GAP_S = 0.05
ACCEPT_AGAIN_S = 1.0
"""Until it is tried again, where the daemon has no descriptor left."""

STOP_S = 1.0

VERSIONS = (HttpVersion10, HttpVersion11)
"""What is spoken. The library would answer HTTP/0.9, which has no status and no headers, with both."""

REFUSED = "refused"
"""Set on a request of another version."""

UNREADABLE = "this is not a request that can be read\n"

NO_LOG = logging.getLogger("kvstored.http.requests")
NO_LOG.setLevel(logging.CRITICAL)
"""Requests are counted by those who send them."""

INDEX = """kvstored

/metrics   figures for Prometheus
/healthz   the process answers
/readyz    a put and a get work, or what is in the way
"""

Bearer = Callable[[str], bool]
"""Whether somebody with that token may see the figures."""

T = TypeVar("T")


class Shared(Generic[T]):
    """An answer that is made at most once in `gap_s`; all who ask before it is begun get the same."""

    def __init__(self, gap_s: float, make: Callable[[], T]) -> None:
        self._gap_s = gap_s
        self._make = make
        self._next = 0.0
        self._waiting: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """Made after it was asked for."""
        if self._waiting is None:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            loop.call_at(max(self._next, loop.time()), self._run, self._waiting)
        return await asyncio.shield(self._waiting)

    def _run(self, future: asyncio.Future[T]) -> None:
        self._waiting = None
        try:
            made = self._make()
        except Exception as e:  # noqa: BLE001 (raised where it is awaited)
            future.set_exception(e)
            future.exception()  # seen, even if all who asked are gone
        else:
            future.set_result(made)
        self._next = future.get_loop().time() + self._gap_s


class HttpEdge:
    """The pages on one address."""

    def __init__(
        self,
        address: str,
        *,
        render: Callable[[str], tuple[bytes, str]],
        ready: Callable[[], Answer],
        bearer: Bearer | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`address`: "HOST:PORT" or "unix:/path". `render` makes the metrics for an Accept header."""
        self.address = address
        """As asked for; after `start` with the actual port."""
        self._bearer = bearer
        self._tls = tls
        self._render = render
        self._scrapes: dict[bool, Shared[tuple[bytes, str]]] = {}
        self._ready = Shared(READY_GAP_S, ready)
        self._server: web.Server | None = None
        self._listeners: list[socket.socket] = []
        self._serving: dict[asyncio.Task[None], _Connection] = {}
        """Whose places are taken, oldest first."""
        self._ending: set[asyncio.Task[None]] = set()
        """Those that made room, until they are gone."""
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Binds and serves. Raises OSError naming the holder where the address is taken."""
        self._listeners, self.address = listening(self.address)
        self._server = web.Server(self._answer, request_factory=self._asked)
        for listener in self._listeners:
            watch(self._loop, listener.fileno(), partial(self._accept, listener))
        log.info(f"serving HTTP on {self.address}")

    async def stop(self) -> None:
        """Stops listening and ends what is under way."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        tasks = [*self._serving, *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.shutdown(STOP_S)
        if self._listeners and self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)
        self._listeners = []

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:
                # Out of descriptors: those who wait stay in the backlog.
                log.error("an HTTP connection cannot be accepted", reason=e.strerror)  # noqa: TRY400
                self._loop.remove_reader(listener)
                self._loop.call_later(ACCEPT_AGAIN_S, self._accept_again, listener)
                return
            if len(self._serving) >= CONNECTIONS_MAX and not self._make_place():
                log.warning("an HTTP connection too many", at_most=CONNECTIONS_MAX)
                sock.close()
                continue
            sock.setblocking(False)
            assert self._server is not None
            connection = _Connection(self._server, self._loop)
            task = self._loop.create_task(self._serve(sock, connection))
            self._serving[task] = connection
            task.add_done_callback(self._over)

    def _make_place(self) -> bool:
        """Ends the connection that has waited longest without a whole request; False where all have asked."""
        silent = next((task for task, connection in self._serving.items() if not connection.asked), None)
        if silent is None:
            return False
        log.warning("an HTTP connection without a request made room for another", at_most=CONNECTIONS_MAX)
        del self._serving[silent]
        self._ending.add(silent)
        silent.cancel()
        return True

    def _over(self, task: asyncio.Task[None]) -> None:
        self._serving.pop(task, None)
        self._ending.discard(task)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            watch(self._loop, listener.fileno(), partial(self._accept, listener))

    async def _serve(self, sock: socket.socket, connection: "_Connection") -> None:
        """One connection, from the handshake to its end, within EXCHANGE_S."""
        try:
            async with asyncio.timeout(EXCHANGE_S):
                await self._loop.connect_accepted_socket(lambda: connection, sock, ssl=self._tls)
                await connection.ended
        except TimeoutError:
            log.debug("an HTTP connection took too long", at_most_s=EXCHANGE_S)
        except OSError as e:
            log.debug("an HTTP connection failed", reason=type(e).__name__)  # TLS that is none, or a caller that left
        finally:
            if connection.transport is not None:
                connection.transport.abort()
            elif not connection.ended.done():
                sock.close()  # it never came as far as a transport, which would own it

    # -- answers

    def _asked(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        """A whole request has come, or what will never be one."""
        assert isinstance(protocol, _Connection)
        protocol.asked = True
        refused = message.version not in VERSIONS
        if refused:
            message = message._replace(version=HttpVersion10)  # that of the answer, too
        request = web.BaseRequest(message, payload, protocol, writer, task, self._loop)
        request[REFUSED] = refused
        return request

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request[REFUSED]:
            log.warning("a malformed HTTP request", reason="its version", status=400)
            return _closing(_text(400, UNREADABLE))
        return _closing(await self._page(request))

    async def _page(self, request: web.BaseRequest) -> web.Response:
        page = PAGES.get(request.path)
        if page is None:
            return _text(404, "there is nothing here; / names what there is\n")
        if request.method not in ("GET", "HEAD"):
            response = _text(405, "only GET and HEAD\n")
            response.headers["Allow"] = "GET, HEAD"
            return response
        try:
            return await page(self, request)
        except Exception as e:
            log.exception("a page failed", page=request.path)
            return _text(500, f"internal error of the daemon: {type(e).__name__}; see its log\n")

    async def _index(self, _: web.BaseRequest) -> web.Response:
        return _text(200, INDEX)

    async def _health(self, _: web.BaseRequest) -> web.Response:
        return _text(200, "ok\n")

    async def _readiness(self, _: web.BaseRequest) -> web.Response:
        answer = await self._ready.get()
        body = json.dumps({"ready": answer.ready, "checks": answer.checks}, indent=1) + "\n"
        return web.Response(status=200 if answer.ready else 503, text=body, content_type="application/json")

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        if self._bearer is not None:
            kind, _, token = request.headers.get("Authorization", "").partition(" ")
            if kind.lower() != "bearer" or not self._bearer(token.strip()):
                response = _text(401, "metrics need a token: Authorization: Bearer TOKEN\n")
                response.headers["WWW-Authenticate"] = "Bearer"
                return response
        accept = ",".join(request.headers.getall("Accept", []))
        openmetrics = wants_openmetrics(accept)
        if openmetrics not in self._scrapes:
            self._scrapes[openmetrics] = Shared(SCRAPE_GAP_S, lambda: self._render(accept))
        body, content_type = await self._scrapes[openmetrics].get()
        return web.Response(body=body, headers={"Content-Type": content_type})


Page = Callable[[HttpEdge, web.BaseRequest], Awaitable[web.Response]]

PAGES: dict[str, Page] = {
    "/": HttpEdge._index,
    "/healthz": HttpEdge._health,
    "/readyz": HttpEdge._readiness,
    "/metrics": HttpEdge._metrics,
}


class _Connection(RequestHandler):
    """One request and its answer, with the bounds that the library leaves to others."""

    __slots__ = ("_received", "asked", "ended")

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            server,
            loop=loop,
            access_log=NO_LOG,
            lingering_time=0,
        )
        self._received = 0
        self.asked = False
        """An answer is being made, or is under way."""
        self.ended: asyncio.Future[None] = loop.create_future()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if not self.ended.done():
            self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._received <= REQUEST_BYTES_MAX:
            super().data_received(data)
        elif self.transport is not None:
            log.warning("an HTTP request too large", at_most_bytes=REQUEST_BYTES_MAX)
            self.transport.abort()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The caller sends no more. It is answered if it has asked; else, or with TLS, this is the end."""
        return True if self.asked and self.ssl_context is None else None

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What is no request. Not even its words are logged: they may be a token in the wrong place."""
        log.warning("a malformed HTTP request", reason=type(exc).__name__, status=status)
        return _closing(_text(status, UNREADABLE))


def _text(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text)


def _closing(response: web.Response) -> web.Response:
    """One request a connection: nothing can be sent ahead of an answer, and nothing waits for the next."""
    response.force_close()
    response.headers["Server"] = "kvstored"  # the library's own says which releases of what run here
    return response


# -- binding


def listening(address: str) -> tuple[list[socket.socket], str]:
    """Sockets that listen wherever `address` means, and the address with the actual port.

    Raises OSError naming who has it. Never SO_REUSEPORT: two daemons would share the port.
    """
    if address.startswith("unix:"):
        return [_unix(address.removeprefix("unix:"))], address
    sockets, address = bound(address, "server.http")
    listen(sockets, "server.http", BACKLOG)
    return sockets, address


def _unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    before = os.umask(0o177)
    try:
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as e:
        sock.close()
        raise OSError(e.errno, f"server.http: cannot listen on {path}: {e.strerror}") from e
    finally:
        os.umask(before)
    return sock
