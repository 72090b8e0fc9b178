"""Prefetches and durable puts larger than what fits at once: worked through in portions, as far as memory goes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore_client import Client, Namespace
from tests.conftest import eventually
from tests.nodes import block
from tests.server.gated_disk import WRITE, GatedDaemon, gated

BLOCK = 64 << 10
MEMORY_BLOCKS = 64
PORTION = MEMORY_BLOCKS // 16
LARGE = 4 * MEMORY_BLOCKS


@pytest.fixture(scope="module")
def node() -> Iterator[GatedDaemon]:
    """4 MiB of memory; nothing is written that nobody wants to be durable."""
    with gated(server__grpc="127.0.0.1:0", ssd__write_back="hits:1000") as daemon:
        yield daemon


@pytest.fixture(params=["unix", "grpc"])
def client(request: pytest.FixtureRequest, node: GatedDaemon) -> Iterator[Client]:
    endpoint = node.endpoint if request.param == "unix" else node.grpc_endpoint
    with Client(endpoint, timeout_s=10.0) as client:
        yield client


@pytest.fixture
def ns(client: Client, request: pytest.FixtureRequest) -> Iterator[Namespace]:
    ns = client.raw_namespace(request.node.name, BLOCK)
    yield ns
    ns.clear()


def chain(ns: Namespace, count: int) -> list[bytes]:
    return [ns.key(b"%d" % i) for i in range(count)]


def bytes_of(keys: list[bytes]) -> list[bytes]:
    return [block(key, BLOCK) for key in keys]


def test_a_durable_put_of_four_times_the_memory_is_all_on_the_ssd(ns: Namespace) -> None:
    keys = chain(ns, LARGE)
    assert ns.put(keys, bytes_of(keys), durable=True) == (LARGE, 0, 0, None)
    assert ns.match(keys).blocks == LARGE
    for at in range(0, LARGE, 16):
        assert ns.get(keys[at : at + 16]) == bytes_of(keys[at : at + 16])


def test_a_durable_put_waits_for_the_disk_before_it_puts_what_would_push_it_out(node: GatedDaemon) -> None:
    with Client(node.endpoint, timeout_s=10.0) as client, ThreadPoolExecutor(1) as threads:
        ns = client.raw_namespace("waits", BLOCK)
        keys = chain(ns, LARGE)
        with Client(node.endpoint) as watch, node.closed(WRITE):
            before = watch.stats()["counters"]["stored"]
            put = threads.submit(ns.put, keys, bytes_of(keys), durable=True)
            written = eventually(lambda: watch.stats()["counters"]["stored"] - before, what="a first portion")
            for _ in range(20):
                written = watch.stats()["counters"]["stored"] - before
            assert 0 < written <= 3 * PORTION
            assert not put.done()
        assert put.result() == (LARGE, 0, 0, None)
        ns.clear()


def test_what_exists_is_made_durable_in_portions_too(ns: Namespace) -> None:
    keys = chain(ns, MEMORY_BLOCKS - 16)
    assert ns.put(keys, bytes_of(keys)).stored == len(keys)
    assert ns.put(keys, bytes_of(keys), durable=True) == (0, len(keys), 0, None)
    assert ns.match(keys).blocks == len(keys)


def test_a_prefetch_larger_than_memory_brings_its_leading_run_and_says_that_the_rest_was_not_tried(
    ns: Namespace,
) -> None:
    keys = chain(ns, LARGE)
    assert ns.put(keys, bytes_of(keys), durable=True).error is None
    wanted = keys[: 2 * MEMORY_BLOCKS]
    ticket = ns.prefetch(wanted, deadline_s=10.0)
    blocks = ticket.wait()
    assert (ticket.state, blocks >= MEMORY_BLOCKS // 4) == ("done", True)
    assert ticket.why.startswith("the rest was not tried")
    tiers = ns.match(wanted).tiers
    assert tiers[:blocks] == ["host"] * blocks
    assert ns.get(wanted[:8]) == bytes_of(wanted[:8])


def test_a_prefetch_of_more_than_a_quarter_of_the_memory_comes_as_a_whole(ns: Namespace, node: GatedDaemon) -> None:
    keys = chain(ns, LARGE)
    assert ns.put(keys, bytes_of(keys), durable=True).error is None
    wanted = keys[: MEMORY_BLOCKS * 3 // 8]
    ticket = ns.prefetch(wanted, deadline_s=10.0)
    assert (ticket.wait(), ticket.state, ticket.why) == (len(wanted), "done", "")


def test_a_prefetch_that_has_ended_at_once_says_why(ns: Namespace, node: GatedDaemon) -> None:
    keys = chain(ns, LARGE)
    assert ns.put(keys, bytes_of(keys), durable=True).error is None
    for at in range(0, LARGE, MEMORY_BLOCKS // 4):
        ended = ns.prefetch(keys[at : at + MEMORY_BLOCKS // 4], deadline_s=10.0)
        ended.wait()
    last = ns.prefetch(keys[MEMORY_BLOCKS : 2 * MEMORY_BLOCKS], deadline_s=10.0)
    last.wait()
    assert (last.state == "done" and last.blocks == MEMORY_BLOCKS) == (last.why == "")
    assert last.why == "" or "the rest was not tried" in last.why
