"""The client: one per engine process, shared by its threads."""

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from kvstore_client.layout import Layout
from kvstore_client.local import LocalTransport
from kvstore_client.namespace import Namespace
from kvstore_client.results import Health
from kvstore_client.transport import Identity, Transport
from kvstored.v1 import endpoint as endpoints
from kvstored.v1 import keys as naming
from kvstored.v1.errors import InvalidArgument

LABEL_BYTES_MAX = 200
SOCKET_PATH_BYTES_MAX = 107
"""Linux's sun_path, less the zero at its end."""


class Client:
    """A connection to a kvstored, which may come and go.

    `endpoint`: "unix:///path" (the daemon of this machine, by shared memory),
    "grpc://host:port", "grpcs://host:port" or "grpc+unix:///path" (bytes by gRPC); None:
    `$KVSTORED_ENDPOINT`, then the user's own socket, then the system's.

    A daemon that is away is not an error: reads miss, puts are rejected, `health()` says
    so, management raises Unavailable, and the client connects again by itself. A daemon
    of another protocol raises FailedPrecondition here. `timeout_s` bounds every call.

    Over TCP: `token` for a daemon that asks for one (None: what is in the file
    `$KVSTORED_TOKEN_FILE`), `ca` the file of the authorities (PEM) whose certificates
    grpcs:// believes (None: `$KVSTORED_CA`, then gRPC's own list). A token that the daemon does not
    know raises Unauthenticated, here and in every call.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        tenant: str = "default",
        name: str = "",
        timeout_s: float = 2.0,
        read_only: bool = False,
        token: str | None = None,
        ca: str | os.PathLike[str] | None = None,
    ) -> None:
        if not 0 < timeout_s < float("inf"):
            raise InvalidArgument(f"timeout_s={timeout_s!r} is not a number of seconds above 0")
        self.endpoint = endpoint or endpoints.default_endpoint()
        self._transport = _transport(
            self.endpoint, name or f"pid-{os.getpid()}", tenant, timeout_s, read_only, token=token, ca=ca
        )

    def namespace(self, layout: Layout, salt: str = "", adapter: str = "", *, ahead: bool = True) -> Namespace:
        """Blocks of one model as one rank lays them out; `adapter` (LoRA) and `salt` keep theirs apart.

        With `ahead` the daemon is told of it now, else with the first call that needs it: this one never waits.
        """
        identity = {**layout.identity(), "kind": "layout", "salt": salt, "adapter": adapter}
        label = f"{layout.model}+{adapter}" if adapter else f"{layout.model}"
        return self._namespace(identity, layout.block_bytes, label, layout.block_tokens, ahead, layout.packing)

    def raw_namespace(self, name: str, block_bytes: int, salt: str = "", *, ahead: bool = True) -> Namespace:
        """Opaque blocks of `block_bytes` each, named by `key(...)`; `ahead` as in `namespace`."""
        if not isinstance(block_bytes, int) or not 1 <= block_bytes < 1 << 32:
            raise InvalidArgument(f"block_bytes={block_bytes!r} is not between 1 and 4 GiB - 1")
        identity: dict[str, str | int] = {"kind": "raw", "name": name, "block_bytes": block_bytes, "salt": salt}
        return self._namespace(identity, block_bytes, name, 0, ahead)

    def _namespace(
        self,
        identity: dict[str, str | int],
        block_bytes: int,
        label: str,
        block_tokens: int,
        ahead: bool,
        packing: str | None = None,
    ) -> Namespace:
        _check_text(identity)
        label = label.encode()[:LABEL_BYTES_MAX].decode(errors="ignore")
        named = Identity(naming.namespace_digest(identity), block_bytes, label, block_tokens, packing)
        self._transport.open(named, ahead)
        return Namespace(self._transport, named)

    @property
    def connected(self) -> bool:
        """Whether the daemon was there when it was last heard of; asks nobody and never waits."""
        return self._transport.connected

    def stats(self) -> dict[str, Any]:
        """What the daemon says of itself, as nested dicts (StatsReply of the contract). Raises Unavailable."""
        return self._transport.stats()

    def device_stats(self) -> dict[str, Any]:
        """What this process does with GPUs, asked of nobody: empty where it has used none.

        pools: the daemon's devices, and why one cannot be used here ("": it can). segments_open: of these, mapped here.
        kept_for_copies: what waits for copies on streams. devices: for each, bytes of shared memory that are
        page-locked here, why others are not, blocks that went by a staging buffer, why events are not shared, and
        threads that are in a question about an event which the driver does not answer (queries_hanging).
        native_calls_running, native_calls_abandoned: calls into the driver that have not returned.
        """
        return self._transport.device_state()

    def health(self) -> Health:
        """Whether the daemon can be reached and is well; never raises because it is away.

        A signal handler in the middle of another call of its own thread cannot ask it: then
        `reachable` is whether the connection stands, and `problems` says that nobody was asked.
        """
        return self._transport.health()

    def close(self) -> None:
        """Ends the session. Arrays made from leased views stay valid until they are gone."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_text(identity: Mapping[str, Any]) -> None:
    """Every field is a number or text that has one spelling in UTF-8. Raises InvalidArgument."""
    for field, value in identity.items():
        if isinstance(value, int):
            continue
        if not isinstance(value, str):
            raise InvalidArgument(f"{field}={value!r} is not text")
        try:
            value.encode()
        except UnicodeEncodeError as e:
            raise InvalidArgument(f"{field}={value!r} is not text that UTF-8 can spell: {e.reason}") from e


def _transport(
    endpoint: str,
    name: str,
    tenant: str,
    timeout_s: float,
    read_only: bool,
    *,
    token: str | None,
    ca: str | os.PathLike[str] | None,
) -> Transport:
    scheme, separator, rest = endpoint.partition("://")
    if scheme == "unix" and rest.startswith("/"):
        if "\0" in rest or len(os.fsencode(rest)) > SOCKET_PATH_BYTES_MAX:
            raise InvalidArgument(f"endpoint {endpoint!r}: a socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes")
        return LocalTransport(rest, name, tenant, timeout_s, read_only)
    if separator and scheme in ("grpc", "grpcs", "grpc+unix") and rest:
        # These import grpc, which a local client has no use for.
        from kvstore_client.channel import Trust
        from kvstore_client.remote import GrpcTransport

        return GrpcTransport(scheme, rest, name, tenant, timeout_s, read_only, Trust.of(scheme, rest, token, ca))
    raise InvalidArgument(
        f"endpoint {endpoint!r} is none of unix:///path, grpc://host:port, grpcs://host:port, grpc+unix:///path"
    )
