"""Who makes a gRPC call: what its metadata says, and what that allows.

kvstored-tenant, kvstored-client, kvstored-protocol
kvstored-epoch      the life of the daemon that the namespace numbers are of: OpenNamespace
                    answers it as initial metadata. Without it, a number of the life before
                    could name another namespace of this one
kvstored-reports    who sends "1" tells by Touch what it did; the calls of others are counted here
kvstored-session    binds the call to a session of the session socket (bound.py)
authorization       over TCP, where the daemon has tokens (auth.py)
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from kvstore.core.holds import Session
from kvstore.server import calls
from kvstore.server.audit import Who
from kvstore.server.auth import Grant, Tokens
from kvstore.server.bound import Binding
from kvstore.server.calls import Node
from kvstored.v1 import PROTOCOL, PROTOCOL_OLDEST
from kvstored.v1.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KVStoreError,
    ResourceExhausted,
    Unauthenticated,
)

Metadata = Iterable[tuple[str, str | bytes]] | None


def texts(metadata: Metadata) -> dict[str, str]:
    """The metadata that is text."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


@dataclass(frozen=True)
class Caller:
    """Who calls, and how it came in."""

    tenant: str
    """By name; "" is "default"."""
    client: str
    tcp: bool
    reports: bool = False
    """It tells what it does by Touch, so it is not counted here."""
    grant: Grant | None = None
    """What its token allows; None where the daemon asks for none."""
    binding: Binding | None = None
    peer: str = ""
    """Its address, as gRPC writes it."""

    def who(self) -> Who:
        """Who it is, for the log: by its token's name, never by the token."""
        of: dict[str, Any] = {"peer": self.peer, "client": self.client}
        if self.grant is not None:
            of = {"token_name": self.grant.name, "token_tenant": self.grant.tenant, **of}
        return {**of, "session": self.binding.session.id} if self.binding is not None else of

    def bound(self, call: str) -> Session:
        """The session that this call is of. Raises FailedPrecondition where it is of none."""
        if self.binding is None:
            raise FailedPrecondition(
                f"{call} is for calls bound to a session: say Hello on the session socket, take descriptors there "
                "(Index, Segments), and send HelloReply.token in hex as metadata kvstored-session. "
                "Who shares no memory with the daemon has Put and Get"
            )
        return self.binding.session

    def check_changes(self, what: str) -> None:
        """Raises FailedPrecondition where the session that this call is of is read-only."""
        if self.binding is not None and self.binding.session.read_only:
            raise FailedPrecondition(f"this session is read-only: it may not {what}")

    def check_admin(self) -> None:
        """A Unix socket of mode 0600 is proof enough; TCP needs an administrator's token. Raises Unauthenticated."""
        if self.grant is not None:
            self.grant.check_admin()
        elif self.tcp:
            raise Unauthenticated(
                "administration over TCP needs a token with admin = true (server.tokens); "
                "or use the session socket, or gRPC on a Unix socket"
            )

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """A call that takes more than one step ends with the session that it is bound to."""
        with self.binding.call() if self.binding is not None else contextlib.nullcontext():
            yield


def caller_of(node: Node, context: Any, tokens: Tokens | None, *, tcp: bool) -> Caller:
    """Who makes this call. Raises the error that it gets instead of an answer."""
    metadata = texts(context.invocation_metadata())
    grant = tokens.of_header(metadata.get("authorization")) if tcp and tokens is not None else None
    protocol = metadata.get("kvstored-protocol", str(PROTOCOL))
    if not (protocol.isascii() and protocol.isdecimal() and PROTOCOL_OLDEST <= int(protocol[:9]) <= PROTOCOL):
        raise FailedPrecondition(
            f"the client speaks protocol {protocol[:32]}, this daemon (kvstored {node.version}) speaks "
            f"{PROTOCOL_OLDEST} to {PROTOCOL}: install the same release of kvstored on both sides"
        )
    if metadata.get("kvstored-epoch", str(node.epoch)) != str(node.epoch):
        raise FailedPrecondition("the daemon has restarted since the namespace was opened; open it again")
    client = metadata.get("kvstored-client", "")
    if len(client) > calls.NAME_BYTES_MAX:
        raise InvalidArgument(f"a client's name is at most {calls.NAME_BYTES_MAX} bytes")
    tenant = metadata.get("kvstored-tenant", "")
    binding = node.bindings.find(metadata["kvstored-session"]) if "kvstored-session" in metadata else None
    if binding is not None:
        own = binding.session.tenant.name
        if tenant not in ("", own):
            raise InvalidArgument(f"the session is of tenant {own!r}, and kvstored-tenant is {tenant[:80]!r}")
        tenant, client = own, client or binding.session.client
    if grant is not None:
        tenant = tenant or grant.own
        grant.check_tenant(tenant)
    reports = metadata.get("kvstored-reports") == "1"
    return Caller(tenant, client or context.peer(), tcp, reports, grant, binding, context.peer())


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets nobody to any service without a token that is known, but for the methods in `open_to_all`.

    What a token allows is checked with the call (`caller_of`); this is so that a service
    added later is not open by oversight.
    """

    def __init__(
        self,
        tokens: Tokens,
        open_to_all: frozenset[str],
        status: Callable[[KVStoreError], Any],
        refused: Callable[[str, str, KVStoreError], None],
    ) -> None:
        """`refused`: is told the method, the peer and why."""
        self._tokens = tokens
        self._open_to_all = open_to_all
        self._status = status
        self._refused = refused

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        if details.method not in self._open_to_all:
            try:
                self._tokens.of_header(texts(details.invocation_metadata).get("authorization"))
            except Unauthenticated as e:
                return self._refusal(details.method, e)
        return await continuation(details)

    def _refusal(self, method: str, error: Unauthenticated) -> Any:
        """A handler for any kind of call: one that waits for no message."""

        async def refuse(_: Any, context: Any) -> None:
            self._refused(method, context.peer(), error)
            await context.abort(self._status(error), str(error))

        return grpc.stream_unary_rpc_method_handler(refuse, None, None)


class Places:
    """How many calls of one kind may be under way at once; one more is refused, not made to wait."""

    def __init__(self, count: int, what: str) -> None:
        self._count = count
        self._what = what
        self._taken = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        if self._taken >= self._count:
            raise ResourceExhausted(f"{self._count} {self._what} are under way already; try again later")
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


class Unsaid:
    """Calls whose one message has not come yet: all pass here, most for no time at all.

    gRPC itself would let them wait for ever. There are `count` at once, and one more ends the
    one that has waited longest: refusing the new one instead would let those who say nothing
    keep out everybody else.
    """

    def __init__(self, count: int, wait_s: float) -> None:
        self._count = count
        self._wait_s = wait_s
        self._waiting: dict[asyncio.Timeout, None] = {}

    async def message(self, context: Any) -> bytes:
        """The message. Raises InvalidArgument where there is none, DeadlineExceeded or ResourceExhausted."""
        if len(self._waiting) >= self._count:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())
        limit = asyncio.timeout(self._wait_s)
        try:
            async with limit:
                self._waiting[limit] = None
                message = await context.read()
        except TimeoutError:
            if limit in self._waiting:
                raise DeadlineExceeded(f"the message of this call did not come within {self._wait_s:g} s") from None
            raise ResourceExhausted(
                f"{self._count} calls without a message are under way; this one was first"
            ) from None
        finally:
            self._waiting.pop(limit, None)
        if message is grpc.aio.EOF:
            raise InvalidArgument("a call without a message")
        said: bytes = message
        return said
