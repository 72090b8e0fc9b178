"""While the SSD is out of use, nobody is promised what only it has; when it is back, all of it is there."""

import asyncio

from kvstore_client import Client, Namespace, admin, aio
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import eventually
from tests.faults.faulty_disk import FaultyDaemon, faulty
from tests.faults.tiers import HEALED_S, durably, keys_of, opened, put

BLOCK, COUNT = 64 << 10, 10
"""One file has room for 12: what fails need not take the place of one of them."""


def raw(client: Client) -> Namespace:
    return client.raw_namespace("below", BLOCK)


def over_aio(daemon: FaultyDaemon, keys: list[bytes]) -> int:
    async def match() -> int:
        async with aio.Client(daemon.endpoint) as client:
            return (await (await client.raw_namespace("below", BLOCK)).match(keys)).blocks

    return asyncio.run(match())


def matched(daemon: FaultyDaemon, keys: list[bytes]) -> set[int]:
    """How many blocks each way to ask says that there are; few keys are looked up otherwise than many."""
    found = {over_aio(daemon, keys)}
    for endpoint in (daemon.endpoint, daemon.grpc_endpoint):
        with Client(endpoint) as client:
            found.add(raw(client).match(keys).blocks)
            found.add(raw(client).match(keys[:3]).blocks // 3 * COUNT)
    with Client(daemon.endpoint) as client:  # a reader without shared memory
        client._transport._shared_reads = False  # type: ignore[attr-defined]
        found.add(raw(client).match(keys).blocks)
    return found


def drop_memory(client: Client) -> int:
    """Drops all copies in memory; how many."""
    return admin.evict(client, pb.EvictRequest(all=True, tier=pb.TIER_HOST)).blocks


def test_a_match_counts_what_only_the_ssd_has_when_it_can_be_read_and_not_before() -> None:
    with faulty({}, server__grpc="127.0.0.1:0") as daemon, Client(daemon.endpoint) as client:
        opened(client)
        keys = keys_of(raw(client), "cold", COUNT)
        durably(raw(client), keys)
        assert drop_memory(client) > 0
        assert raw(client).match(keys).tiers == ["ssd"] * COUNT
        daemon.disk(any={"errno": 5})
        put(raw(client), keys_of(raw(client), "failing", 1))
        eventually(lambda: client.stats()["ssd"]["trouble"], what="an SSD out of use")
        with Client(daemon.endpoint, tenant="late") as late:  # its index is made meanwhile
            put(raw(late), keys_of(raw(late), "late", 1))
        assert matched(daemon, keys) == {0}
        daemon.disk()
        eventually(lambda: not client.stats()["ssd"]["trouble"], HEALED_S, "an SSD in use")
        assert matched(daemon, keys) == {COUNT}
