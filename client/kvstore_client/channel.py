"""A gRPC channel to one daemon: its calls, what their failures mean, and what a fork makes of it.

The channel connects by itself, and again after a restart.

A channel made before a fork refuses every call in the child and is never touched there, not
even freed: it shares the parent's connection. Where a call of ours was under way at the
fork, gRPC's own preparation for it did not run, and a new channel in the child would read
from that connection too (seen: the parent's stream broken); so none is made.
"""

import ctypes
import ipaddress
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.experimental

from kvstore_client import advice
from kvstored.v1 import PROTOCOL, errors
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.endpoint import CA_VARIABLE, TOKEN_FILE_VARIABLE, token_of_file
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, KVStoreError, Unavailable

log = logging.getLogger("kvstore_client")

SERVICE = "/kvstored.v1.KVStore/"
SMALL_CALLS = (
    *("OpenNamespace", "Match", "Touch", "Remove", "Pin", "Unpin", "Clear", "Stats", "Health"),
    *("Prefetch", "Ticket", "Inspect", "Evict", "EndSession", "Flush", "Verify"),
)

MESSAGE_BYTES_MAX = 4 << 20
FRAME_BYTES = 4 << 20
"""HTTP/2 frames that are taken; with gRPC's 16 KiB a Get of 2 MiB blocks is a tenth slower."""

FREED_ONCE_BYTES = 8 << 20
"""After such an allocation was freed, glibc keeps smaller ones that are freed for the next, up to twice this much.
Until then each message has pages that are new to the process: a third of a stream's time."""

RECONNECT_FIRST_S, RECONNECT_MAX_S = 0.05, 0.5
NO_TRUST = ("handshake", "verification")
"""In gRPC's words where TLS did not come about."""

KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 3.0, 5.0
"""A connection whose other end is gone without a word is given up after so long, and made anew."""

T = TypeVar("T")

_channels: "weakref.WeakSet[Channel]" = weakref.WeakSet()
_forked_in_a_call: list[int] = []
"""The process that forked this one while it had a call under way, if one did."""


class Channel:
    """Calls of any thread to one daemon. The errors they raise are those of kvstored."""

    def __init__(self, scheme: str, rest: str, client: str, tenant: str, trust: "Trust | None" = None) -> None:
        """Connects when first used. Raises FailedPrecondition, InvalidArgument."""
        if _forked_in_a_call:
            raise FailedPrecondition(
                f"process {_forked_in_a_call[0]} forked this one in the middle of a gRPC call, and gRPC does not work "
                "here; fork between calls, use spawn instead, or reach a daemon of this machine by unix://"
            )
        for what, value in (("tenant", tenant), ("name", client)):
            if not value.isascii() or not value.isprintable() or value != value.strip():
                raise InvalidArgument(f"{what}={value!r} is not printable ASCII, as gRPC metadata must be")
        self.endpoint = f"{scheme}://{rest}"
        self._trust = trust = trust or Trust()
        self.forked = self.closed = False
        self._metadata = (
            ("kvstored-tenant", tenant),
            ("kvstored-client", client),
            ("kvstored-protocol", str(PROTOCOL)),
            ("kvstored-reports", "1"),
            *trust.metadata(),
        )
        self._down = ""
        self._under_way = 0
        self._lock = threading.RLock()  # a signal handler may call in the middle of it
        bytearray(FREED_ONCE_BYTES)
        self._channel = _made(scheme, rest, trust)
        self._calls = {
            name: self._channel.unary_unary(SERVICE + name, None, getattr(pb, f"{name}Reply").FromString)
            for name in SMALL_CALLS
        }
        self.put = self._channel.stream_unary(SERVICE + "Put", None, pb.PutReply.FromString)
        """Takes serialised messages; call within `reach`, with `metadata`. So does `get`."""
        self.get = self._channel.unary_stream(SERVICE + "Get", None, None)
        _channels.add(self)

    def call(self, name: str, request: Any, timeout_s: float, epoch: str = "") -> Any:
        """One small call. Raises the error that the daemon answered, Unavailable or DeadlineExceeded."""
        return self.reach(
            lambda: self._calls[name](request.SerializeToString(), timeout=timeout_s, metadata=self.metadata(epoch))
        )

    def open_namespace(self, request: pb.OpenNamespaceRequest, timeout_s: float) -> tuple[int, str]:
        """The namespace's number and the life of the daemon in which it means that."""

        def call() -> tuple[int, str]:
            reply, call = self._calls["OpenNamespace"].with_call(
                request.SerializeToString(), timeout=timeout_s, metadata=self._metadata
            )
            return reply.namespace_id, dict(call.initial_metadata()).get("kvstored-epoch", "")

        return self.reach(call)

    def metadata(self, epoch: str) -> tuple[tuple[str, str], ...]:
        """Of a call that names a namespace of that life of the daemon."""
        return (*self._metadata, ("kvstored-epoch", epoch)) if epoch else self._metadata

    def reach(self, call: Callable[[], T]) -> T:
        """Runs a gRPC call; what it raises becomes an error of ours, and what it means for the daemon is noted."""
        self.check_usable()
        with self._lock:
            self._under_way += 1
        try:
            answer = call()
        except grpc.RpcError as e:
            error = self._error(e)
            if isinstance(error, Unavailable):
                if not self._down:
                    until = "that is put right" if _no_trust(e) else "it is back"
                    log.warning("%s; reads miss and puts are rejected until %s", error, until)
                self._down = str(error)
            raise error from e
        except ValueError:
            self.check_usable()  # a channel that was closed meanwhile says so by ValueError
            raise
        finally:
            with self._lock:
                self._under_way -= 1
        if self._down:
            log.warning("kvstored on %s is back", self.endpoint)
            self._down = ""
        return answer

    @property
    def down(self) -> bool:
        """Whether the last call found no daemon."""
        return bool(self._down)

    def check_usable(self) -> None:
        """Raises FailedPrecondition after `close` and in a forked child."""
        if self.forked:
            raise FailedPrecondition("this client was made before a fork; make a new Client in the child")
        if self.closed:
            raise FailedPrecondition("the client is closed")

    def close(self) -> None:
        """Calls under way in other threads end with FailedPrecondition."""
        if not self.forked and not self.closed:
            self.closed = True
            self._channel.close()

    def _error(self, e: Any) -> KVStoreError:
        """The error of ours that a status of gRPC's stands for."""
        code, details = e.code(), e.details() or ""
        if self.closed:
            return FailedPrecondition("the client is closed")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            socket_error = advice.in_words(details) if self.endpoint.startswith("grpc+unix:") else None
            if socket_error is not None:
                path = self.endpoint.removeprefix("grpc+unix://")
                return Unavailable(advice.no_answer(self.endpoint, path, socket_error, "with server.grpc = unix:PATH "))
            if _no_trust(e):
                return Unavailable(
                    f"what answers on {self.endpoint} is not trusted ({details}), which no waiting mends: "
                    f"its certificate must name this host and be signed by {self._trust.authorities}"
                )
            return Unavailable(f"no kvstored answers on {self.endpoint} ({details}); is it running, with server.grpc?")
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return FailedPrecondition(f"what answers on {self.endpoint} is not a kvstored of this release: {details}")
        if code is grpc.StatusCode.PERMISSION_DENIED:
            return errors.Unauthenticated(details)
        return errors.from_wire(code.value[0], details)


@dataclass(frozen=True, repr=False)
class Trust:
    """What makes both sides of a TCP connection sure of each other: a token, and authorities for the certificate."""

    token: str = ""
    roots: bytes | None = None
    authorities: str = "an authority of gRPC's own list; name another with ca= or $" + CA_VARIABLE

    @classmethod
    def of(cls, scheme: str, rest: str, token: str | None, ca: str | os.PathLike[str] | None) -> "Trust":
        """Of what a client was given, else of the environment. Raises InvalidArgument.

        A Unix socket needs neither: its mode says who comes in.
        """
        if scheme == "grpc+unix":
            return cls()
        if token is None:
            name = os.environ.get(TOKEN_FILE_VARIABLE)
            token = token_of_file(name, f" (${TOKEN_FILE_VARIABLE})") if name else ""
        if not token.isascii() or not token.isprintable() or " " in token:
            raise InvalidArgument("the token is not printable ASCII without spaces")
        if token and scheme == "grpc" and not _is_loopback(rest):
            raise InvalidArgument(f"grpc://{rest} would carry the token in plain text; use grpcs://")
        ca = ca or os.environ.get(CA_VARIABLE) or None
        if scheme != "grpcs" or ca is None:
            return cls(token)
        try:
            return cls(token, Path(ca).read_bytes(), f"an authority in {os.fspath(ca)}")
        except OSError as e:
            raise InvalidArgument(f"ca={os.fspath(ca)!r} cannot be read: {e.strerror}") from e

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries of it."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def _no_trust(error: Any) -> bool:
    """Whether somebody is there, and TLS did not come about."""
    details = (error.details() or "").lower()
    return error.code() is grpc.StatusCode.UNAVAILABLE and any(word in details for word in NO_TRUST)


def _is_loopback(rest: str) -> bool:
    host = rest.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _made(scheme: str, rest: str, trust: Trust) -> Any:
    options = [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.http2.max_frame_size", FRAME_BYTES),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", int(RECONNECT_FIRST_S * 1000)),
        ("grpc.min_reconnect_backoff_ms", int(RECONNECT_MAX_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(RECONNECT_MAX_S * 1000)),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A connection of its own: channels of one target would share one, and its back-off, otherwise.
        ("grpc.use_local_subchannel_pool", 1),
        (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
    ]
    if scheme == "grpcs":
        return grpc.secure_channel(rest, grpc.ssl_channel_credentials(trust.roots), options=options)
    return grpc.insecure_channel(f"unix:{rest}" if scheme == "grpc+unix" else rest, options=options)


def _in_child() -> None:
    for channel in list(_channels):
        channel.forked = True
        if channel._under_way and not _forked_in_a_call:
            _forked_in_a_call.append(os.getppid())
        channel._lock = threading.RLock()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel.__dict__))


os.register_at_fork(after_in_child=_in_child)
