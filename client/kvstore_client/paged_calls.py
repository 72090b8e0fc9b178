"""The calls about devices as Namespace makes them: arguments checked, and the transport that can do it."""

from collections.abc import Sequence

from kvstore_client import device_reads
from kvstore_client.device_lease import DeviceLease
from kvstore_client.local import LocalTransport
from kvstore_client.paged_blocks import PagedBlocks
from kvstore_client.paged_get import PagedGet
from kvstore_client.paged_put import PagedPut
from kvstore_client.reads import HOST
from kvstore_client.results import Copied, Hint, PutResult
from kvstore_client.tickets import Ticket
from kvstore_client.transport import Identity, Transport
from kvstored.v1.errors import FailedPrecondition, InvalidArgument


class PagedCalls:
    """Of one client. Raises FailedPrecondition where it shares no memory with the daemon."""

    def __init__(self, transport: Transport) -> None:
        if not isinstance(transport, LocalTransport):
            raise FailedPrecondition(
                "memory of devices is for processes of the daemon's machine: connect by its socket (unix://...)"
            )
        self._transport = transport
        transport.session_now()  # raises in a forked child, whose parent's locks must not be waited for

    def put(
        self,
        ns: Identity,
        keys: Sequence[bytes],
        start: int,
        blocks: PagedBlocks,
        hint: Hint | None,
        durable: bool,
    ) -> PutResult:
        """As Namespace.put."""
        check(ns, len(keys) - start, blocks)
        if not len(blocks):
            return PutResult(0, 0, 0)
        return PagedPut(self._transport, self._transport.pools, ns, keys, start, blocks, hint, durable).run()

    def get(self, ns: Identity, keys: Sequence[bytes], start: int, out: PagedBlocks) -> Copied:
        """As Namespace.get_into."""
        check(ns, len(keys) - start, out)
        if not len(out):
            return Copied(0, HOST)
        return PagedGet(self._transport, self._transport.pools, ns, keys, start, out).run()

    def acquire(self, ns: Identity, keys: Sequence[bytes], timeout_s: float, to: str) -> DeviceLease:
        """As Namespace.acquire with `to`."""
        return device_reads.acquire(self._transport.pools, ns, keys, timeout_s, to)

    def prefetch(self, ns: Identity, keys: Sequence[bytes], deadline_s: float, priority: int, to: str) -> Ticket:
        """As Namespace.prefetch with `to`."""
        return device_reads.prefetch(self._transport.pools, ns, keys, deadline_s, priority, to)


def check(ns: Identity, count: int, blocks: PagedBlocks) -> None:
    """Pages that are blocks of this namespace, one block for each key. Raises InvalidArgument."""
    if len(blocks) != count:
        raise InvalidArgument(f"pages of {len(blocks)} blocks for the {count} keys from `start` on; pass theirs alone")
    kv = blocks.kv
    if kv.block_bytes != ns.block_bytes:
        raise InvalidArgument(
            f"a block of these pages has {kv.block_bytes} bytes; a block of this namespace has {ns.block_bytes}"
        )
    if not kv.named_by_owner and ns.packing is not None and ns.packing != kv.packing:
        raise InvalidArgument(
            f"these pages are packed {kv.packing!r}, and this namespace is for {ns.packing!r}, whose bytes mean "
            "something else; make it with Layout(packing=kv.packing)"
        )
