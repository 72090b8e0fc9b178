"""The SDK and blocks that only the SSD has: by shared memory and over gRPC, byte for byte."""

import asyncio
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client import Client, FailedPrecondition, Namespace, aio
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running, totals

BLOCK = 64 << 10
MEMORY_BLOCKS = 128
"""8 MiB."""

CHAIN = 40
AHEAD = 30
"""Less than a quarter of memory: what may wait to be brought ahead of use."""


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with (
        tempfile.TemporaryDirectory(prefix="kvstored-ssd-") as disk,
        running(
            host__size="8MiB",
            ssd__path=f"{disk}/ssd",
            ssd__size="1GiB",
            ssd__write_back="hits:1000",  # what is not durable does not get in the way of what is
            server__grpc="127.0.0.1:0",
        ) as daemon,
    ):
        with Client(daemon.endpoint) as client:
            opened(client)
        yield daemon


def opened(client: Client) -> None:
    eventually(lambda: client.stats()["ssd"]["state"] == "open", 20, "the SSD to be open")


@pytest.fixture(scope="module", params=["unix", "grpc"])
def endpoint(request: pytest.FixtureRequest, node: RunningDaemon) -> str:
    return node.endpoint if request.param == "unix" else node.grpc_endpoint


@pytest.fixture
def client(endpoint: str) -> Iterator[Client]:
    with Client(endpoint, name="ssd", timeout_s=10.0) as client:
        yield client


@pytest.fixture
def ns(client: Client, request: pytest.FixtureRequest) -> Namespace:
    return client.raw_namespace(request.node.name, BLOCK)


def chain(ns: Namespace, name: str = "b", count: int = CHAIN) -> list[bytes]:
    return [ns.key(f"{name}{i}".encode()) for i in range(count)]


def bytes_of(keys: list[bytes]) -> list[bytes]:
    return [block(key, BLOCK) for key in keys]


def store(ns: Namespace, keys: list[bytes]) -> None:
    """On the SSD, and in memory until something else is."""
    result = ns.put(keys, bytes_of(keys), durable=True)
    assert (result.stored, result.error) == (len(keys), None)


def push_out(node: RunningDaemon, ns: Namespace, keys: list[bytes]) -> None:
    """Others take the memory of these blocks, which only the SSD has then, and give it back."""
    with Client(node.endpoint, name="others", timeout_s=10.0) as others:
        own = others.raw_namespace("others", BLOCK)
        rounds = count()

        def gone() -> bool:
            some = chain(own, f"{ns.digest.hex()}-{next(rounds)}-", MEMORY_BLOCKS // 2)
            own.put(some, bytes_of(some))
            return "host" not in ns.match(keys).tiers

        eventually(gone, 10, "the blocks to leave memory")
        own.clear()
    assert ns.match(keys) == (len(keys), ["ssd"] * len(keys))


def on_disk(node: RunningDaemon, ns: Namespace, count: int = CHAIN) -> list[bytes]:
    keys = chain(ns, count=count)
    store(ns, keys)
    push_out(node, ns, keys)
    return keys


def test_what_only_the_ssd_has_is_read_byte_for_byte(node: RunningDaemon, ns: Namespace) -> None:
    keys = on_disk(node, ns)
    out = np.zeros(CHAIN * BLOCK, np.uint8)
    assert ns.get_into(keys, out) == CHAIN
    assert out.tobytes() == b"".join(bytes_of(keys))
    assert ns.match(keys).tiers == ["host"] * CHAIN


def test_a_read_goes_on_from_memory_to_the_ssd_and_back(node: RunningDaemon, ns: Namespace) -> None:
    keys = on_disk(node, ns)
    middle = keys[10:15]
    assert ns.get(middle) == bytes_of(middle)
    tiers = ns.match(keys).tiers
    assert tiers == ["ssd"] * 10 + ["host"] * 5 + ["ssd"] * 25
    assert ns.get(keys) == bytes_of(keys)


def test_a_read_from_the_middle_of_a_chain_ends_where_the_chain_does(node: RunningDaemon, ns: Namespace) -> None:
    keys = on_disk(node, ns)
    longer = [*keys, ns.key(b"nowhere"), ns.key(b"neither")]
    out = [np.zeros(BLOCK, np.uint8) for _ in longer[7:]]
    assert ns.get_into(longer, out, start=7) == CHAIN - 7
    assert [one.tobytes() for one in out[:-2]] == bytes_of(keys[7:])


def test_a_chain_larger_than_memory_is_read_whole(ns: Namespace) -> None:
    keys = chain(ns, count=2 * MEMORY_BLOCKS)
    for at in range(0, len(keys), 32):
        some = keys[: at + 32]
        result = ns.put(some, bytes_of(some[at:]), start=at, durable=True)
        assert (result.stored, result.error) == (32, None)
    assert ns.match(keys).blocks == len(keys)
    for _ in range(2):
        assert ns.get(keys) == bytes_of(keys)


def test_a_reader_that_asks_for_everything_reads_the_ssd_too(node: RunningDaemon) -> None:
    """Where shared memory alone cannot be trusted (index.SHARED_READS)."""
    with Client(node.endpoint, timeout_s=10.0) as client:
        client._transport._shared_reads = False  # type: ignore[attr-defined]
        ns = client.raw_namespace("by lease", BLOCK)
        keys = on_disk(node, ns)
        assert ns.get([*keys[10:20], *keys]) == bytes_of([*keys[10:20], *keys])
        assert ns.match(keys).blocks == CHAIN


def test_acquire_brings_blocks_in_and_holds_them(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    keys = on_disk(node, ns, 20)
    with ns.acquire(keys, timeout_s=10.0) as lease:
        assert len(lease) == 20
        assert [bytes(view) for view in lease.views] == bytes_of(keys)
        filled = chain(ns, "fill", MEMORY_BLOCKS)
        for at in range(0, len(filled), 32):
            ns.put(filled[: at + 32], bytes_of(filled[at : at + 32]), start=at)
        assert [bytes(view) for view in lease.views] == bytes_of(keys)
    eventually(lambda: totals(client.stats())["leased"] == 0, 10, "the leases to end")


def test_a_prefetch_brings_the_run_into_memory(node: RunningDaemon, ns: Namespace) -> None:
    keys = on_disk(node, ns, AHEAD)
    ticket = ns.prefetch(keys, deadline_s=20.0, priority=3)
    assert ticket.wait() == AHEAD, vars(ticket)
    assert (ticket.state, ticket.blocks, ticket.waiting, ticket.why) == ("done", AHEAD, 0, "")
    assert ticket.loaded == AHEAD
    assert ns.match(keys).tiers == ["host"] * AHEAD
    ticket.cancel()
    assert ticket.state == "done", "what is over stays so"


def test_a_prefetch_of_what_memory_has_is_done_at_once(ns: Namespace) -> None:
    keys = chain(ns, count=5)
    assert ns.prefetch(keys).wait() == 0
    ns.put(keys, bytes_of(keys))
    ticket = ns.prefetch([*keys, ns.key(b"nowhere")])
    assert (ticket.state, ticket.blocks, ticket.wait()) == ("done", 5, 5)


def test_a_block_that_only_the_ssd_has_is_not_stored_again(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    keys = on_disk(node, ns, 10)
    before = client.stats()["ssd"]["counters"]["written"]
    assert ns.put(keys, bytes_of(keys)) == (0, 10, 0, None)
    assert ns.put(keys, bytes_of(keys), durable=True) == (0, 10, 0, None)
    assert client.stats()["ssd"]["counters"]["written"] == before
    assert ns.match(keys).tiers == ["ssd"] * 10


def test_removed_blocks_are_gone_from_the_ssd_too(node: RunningDaemon, ns: Namespace) -> None:
    keys = on_disk(node, ns, 10)
    assert ns.remove(keys[5:]) == 5
    assert ns.get(keys) == bytes_of(keys[:5])


def test_reserved_slots_can_be_committed_durably(node: RunningDaemon, ns: Namespace) -> None:
    keys = chain(ns, count=4)
    with ns.reserve(4) as slots:
        for view, data in zip(slots.views, bytes_of(keys), strict=True):
            view[:] = data
        assert slots.commit(keys, durable=True) == (4, 0, 0, None)
    push_out(node, ns, keys)
    assert ns.get(keys) == bytes_of(keys)


def rows(client: Client, operation: int) -> dict[int, tuple[int, int, int]]:
    """Calls, hits and misses of an operation, by tier."""
    found = [row for row in client.stats()["operations"] if row["operation"] == operation]
    return {row["tier"]: (row["calls"], row["hits"], row["misses"]) for row in found}


def grown(before: dict[int, Any], after: dict[int, Any]) -> dict[int, tuple[int, ...]]:
    none = (0, 0, 0)
    found = {t: tuple(b - a for a, b in zip(before.get(t, none), after[t], strict=True)) for t in after}
    return {tier: row for tier, row in found.items() if any(row)}


def test_a_call_counts_in_the_row_of_the_slowest_tier_it_read_from(
    node: RunningDaemon, client: Client, ns: Namespace
) -> None:
    keys = on_disk(node, ns, 10)
    before = {operation: rows(client, operation) for operation in (pb.OPERATION_GET, pb.OPERATION_ACQUIRE)}
    longer = [*keys, ns.key(b"nowhere")]
    ns.get(longer)
    ns.get(longer)
    push_out(node, ns, keys)
    with ns.acquire(longer, timeout_s=10.0) as lease:
        assert len(lease) == 10
    ns.acquire(longer).release()
    for operation, was in before.items():
        assert grown(was, rows(client, operation)) == {pb.TIER_SSD: (1, 10, 1), pb.TIER_HOST: (1, 10, 1)}


def test_without_an_ssd_a_durable_put_is_refused_and_a_prefetch_done() -> None:
    with running() as daemon, Client(daemon.endpoint) as client:
        ns = client.raw_namespace("none", BLOCK)
        keys = chain(ns, count=3)
        with pytest.raises(FailedPrecondition, match="needs an SSD tier"):
            ns.put(keys, bytes_of(keys), durable=True)
        ns.put(keys, bytes_of(keys))
        with pytest.raises(FailedPrecondition, match="needs an SSD tier"):
            ns.put(keys, bytes_of(keys), durable=True)
        assert ns.prefetch(keys).wait() == 3


def test_durable_blocks_survive_a_killed_daemon_and_the_others_are_misses(tmp_path: Path) -> None:
    with (
        running(ssd__path=str(tmp_path / "ssd"), ssd__size="1GiB", ssd__write_back="hits:9") as daemon,
        Client(daemon.endpoint, timeout_s=10.0) as client,
    ):
        opened(client)
        ns = client.raw_namespace("kept", BLOCK)
        keys = chain(ns)
        assert ns.put(keys, bytes_of(keys)).stored == CHAIN
        assert ns.put(keys[:20], bytes_of(keys[:20]), durable=True) == (0, 20, 0, None), "they existed"
        daemon.kill()
        daemon.restart()
        eventually(lambda: client.health().reachable, 20, "the client to be back")
        opened(client)
        assert ns.match(keys) == (20, ["ssd"] * 20)
        assert ns.get(keys) == bytes_of(keys[:20])


def test_the_asynchronous_client_reads_the_ssd_prefetches_and_stores_durably(
    node: RunningDaemon, endpoint: str
) -> None:
    async def scenario() -> None:
        async with aio.Client(endpoint, timeout_s=10.0) as client:
            ns = await client.raw_namespace(f"aio {endpoint}", BLOCK)
            keys = [ns.key(b"%d" % i) for i in range(CHAIN)]
            assert await ns.put(keys, bytes_of(keys), durable=True) == (CHAIN, 0, 0, None)
            with Client(endpoint) as sync:
                same = sync.raw_namespace(f"aio {endpoint}", BLOCK)
                await asyncio.to_thread(push_out, node, same, keys)
                ticket = await ns.prefetch(keys[:10], deadline_s=20.0)
                assert await ticket.wait() == 10
                assert (ticket.state, ticket.loaded, ticket.waiting, ticket.why) == ("done", 10, 0, "")
                await asyncio.to_thread(push_out, node, same, keys)
                assert await ns.get(keys) == bytes_of(keys)
                await asyncio.to_thread(push_out, node, same, keys)
                async with ns.acquire(keys[:8], timeout_s=10.0) as lease:
                    assert [bytes(view) for view in lease.views] == bytes_of(keys[:8])

    asyncio.run(asyncio.wait_for(scenario(), 120.0))
