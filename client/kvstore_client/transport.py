"""What a way to the daemon must offer; two exist: shared memory on this machine (local), gRPC (remote).

Arguments are checked before they get here: keys are 32 bytes, blocks are arrays of uint8
of the namespace's size, `start` lies within the keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvstore_client.buffers import Bytes
from kvstore_client.lease import Lease, Slots
from kvstore_client.reads import Reads
from kvstore_client.results import Copied, Health, Hint, Match, PutResult
from kvstore_client.tickets import Ticket
from kvstored.v1 import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstore_client.pools import Pools


@dataclass(frozen=True)
class Identity:
    """A namespace as transports know it. `packing`: as its Layout says it, None where blocks are opaque."""

    digest: bytes
    block_bytes: int
    label: str
    block_tokens: int = 0
    packing: str | None = None

    def opening(self) -> pb.OpenNamespaceRequest:
        """What opens it."""
        return pb.OpenNamespaceRequest(
            digest=self.digest, block_bytes=self.block_bytes, label=self.label, block_tokens=self.block_tokens
        )


class Transport(Protocol):
    """One daemon. Reads miss and puts are rejected while it is away; management raises Unavailable."""

    reads: Reads
    """Where whoever makes a call notes what came of it."""

    @property
    def connected(self) -> bool: ...
    @property
    def pools(self) -> "Pools | None":
        """Memory of devices; None where this way shares none with the daemon."""
        ...

    def device_state(self) -> dict[str, Any]: ...
    def open(self, ns: Identity, ahead: bool) -> None:
        """Makes a namespace known; `ahead`: opens it too, if the daemon is there."""
        ...

    def match(self, ns: Identity, keys: Sequence[bytes], wait: bool) -> Match: ...
    def put(
        self, ns: Identity, keys: Sequence[bytes], start: int, blocks: list[Bytes], hint: Hint | None, durable: bool
    ) -> PutResult: ...
    def get_into(self, ns: Identity, keys: Sequence[bytes], start: int, out: list[Bytes]) -> Copied: ...
    def acquire(self, ns: Identity, keys: Sequence[bytes], timeout_s: float) -> Lease: ...
    def may_wait(self, ns: Identity, keys: Sequence[bytes]) -> bool:
        """Whether a read of these may have to wait for a disk; a hint."""
        ...

    def prefetch(self, ns: Identity, keys: Sequence[bytes], deadline_s: float, priority: int) -> Ticket: ...
    def reserve(self, ns: Identity, count: int) -> Slots: ...
    def remove(self, ns: Identity, keys: Sequence[bytes]) -> int: ...
    def pin(self, ns: Identity, keys: Sequence[bytes], ttl_s: float) -> int: ...
    def unpin(self, ns: Identity, keys: Sequence[bytes]) -> int: ...
    def clear(self, ns: Identity) -> int: ...
    def administer(self, name: str, request: Any, timeout_s: float) -> Any: ...
    def stats(self) -> dict[str, Any]: ...
    def health(self) -> Health: ...
    def close(self) -> None: ...
