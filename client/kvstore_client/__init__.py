"""The SDK of kvstored: fetch the KV cache of a prefix by its hash, store it, hold it in place.

    client = Client()
    ns = client.namespace(Layout(model="llama", dtype="bfloat16", ...))
    keys = ns.keys(token_ids)
    copied = ns.get_into(keys, out)          # leading blocks that were there
    ns.put(keys, blocks, start=copied)       # the rest, computed

The same for asyncio: kvstore_client.aio. Blocks that go between an engine's pages on a GPU and the store, without
passing the processor: kvstore_client.paged; which GPUs those are: kvstore_client.devices.
"""

from kvstore_client.client import Client
from kvstore_client.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KVStoreError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from kvstore_client.layout import Layout
from kvstore_client.lease import Lease, Slots
from kvstore_client.namespace import Namespace
from kvstore_client.results import Health, Hint, Match, PutResult
from kvstore_client.tickets import Ticket

__all__ = [
    "Client",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Health",
    "Hint",
    "InvalidArgument",
    "KVStoreError",
    "Layout",
    "Lease",
    "Match",
    "Namespace",
    "PutResult",
    "ResourceExhausted",
    "Slots",
    "Ticket",
    "Unauthenticated",
    "Unavailable",
]
