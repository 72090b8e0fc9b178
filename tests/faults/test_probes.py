"""Field fault A17: memory stood at 97 %, and 649 attempts to evict freed nothing.

Seen as Mooncake issue 2187 and pull request 3599: questions whether a key exists are suspected to have renewed
every lease. Here every way to ask is repeated for all keys while memory overflows: it keeps nothing from
eviction, and what is really leased stays.
"""

import threading
from collections.abc import Callable, Iterator

import pytest

from kvstore_client import Client
from kvstore_client.namespace import Namespace
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running
from tests.wire import Wire

SIZE_BYTES = 16 << 20
BLOCK = 64 << 10
SLOTS = SIZE_BYTES // BLOCK
HIGH, LOW = 0.9, 0.6
PROBES_A_S = 100


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(host__size=f"{SIZE_BYTES}B", evict__high=str(HIGH), evict__low=str(LOW)) as daemon:
        yield daemon


def by_match(ns: Namespace, keys: list[bytes], wire: Wire, number: int) -> None:
    ns.match(keys)


def one_by_one(ns: Namespace, keys: list[bytes], wire: Wire, number: int) -> None:
    for key in keys:
        ns.match([key])


def by_prefetch(ns: Namespace, keys: list[bytes], wire: Wire, number: int) -> None:
    for key in keys:
        ns.prefetch([key]).wait()


def by_call(ns: Namespace, keys: list[bytes], wire: Wire, number: int) -> None:
    for key in keys:
        wire.call(match=pb.MatchRequest(namespace_id=number, keys=[key]))


def by_leases_never_fetched(ns: Namespace, keys: list[bytes], wire: Wire, number: int) -> None:
    for key in keys[::8]:
        ns.acquire([key])


PROBES: dict[str, Callable[[Namespace, list[bytes], Wire, int], None]] = {
    "match": by_match,
    "match, key by key": one_by_one,
    "prefetch": by_prefetch,
    "a call for each key": by_call,
    "leases that nobody fetches": by_leases_never_fetched,
}


def stored_blocks(client: Client) -> int:
    return sum(pool["blocks"] for pool in client.stats()["pools"])


@pytest.mark.parametrize("probe", PROBES)
def test_probes_of_all_keys_keep_nothing_from_eviction(node: RunningDaemon, probe: str) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    rounds = 0
    with Client(node.endpoint, name="engine") as client, Client(node.endpoint, name="holder") as holder:
        ns = client.raw_namespace(f"probed {probe}", BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(3 * SLOTS)]
        leased = keys[:16]
        for i, key in enumerate(leased):
            assert ns.put([key], block(i, BLOCK)).stored == 1
        leases = [holder.raw_namespace(f"probed {probe}", BLOCK).acquire([key]) for key in leased]

        def ask() -> None:
            nonlocal rounds
            try:
                with Client(node.endpoint, name="prober") as prober, Wire(node.socket) as wire:
                    asked = prober.raw_namespace(f"probed {probe}", BLOCK)
                    request = pb.OpenNamespaceRequest(digest=asked.digest, block_bytes=BLOCK)
                    number = wire.call(open_namespace=request).open_namespace.namespace_id
                    while not stop.wait(1 / PROBES_A_S):
                        PROBES[probe](asked, keys, wire, number)
                        rounds += 1
                    wire.leave()
            except BaseException as e:  # noqa: BLE001 (told to the test)
                failures.append(e)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            before = client.stats()["counters"]["evicted"]
            for i, key in enumerate(keys[16:], 16):
                assert ns.put([key], block(i, BLOCK)).stored == 1, "puts succeed all the time"
            eventually(lambda: rounds >= 3, 20.0, "some rounds of probes")
            more = iter(range(100_000))

            def low_mark_is_reached() -> bool:
                """Puts go on: between the marks nothing need be evicted."""
                assert ns.put([ns.key(b"more %d" % next(more))], bytes(BLOCK)).stored == 1
                return stored_blocks(client) <= LOW * SLOTS + 8

            eventually(low_mark_is_reached, 10.0, "eviction to reach the low mark")
            assert client.stats()["counters"]["evicted"] - before >= 2 * SLOTS
            assert ns.match(keys[17:18]).blocks == 0, "the oldest are gone however often they were asked for"
        finally:
            stop.set()
            thread.join(60)
        assert not failures
        for i, lease in enumerate(leases):
            assert bytes(lease.views[0]) == block(i, BLOCK), "what is leased stays"
        assert all(ns.match([key]).blocks == 1 for key in leased)
        for lease in leases:
            lease.release()
        ns.clear()


def test_a_read_does_keep_what_it_reads(node: RunningDaemon) -> None:
    """The other side: what is fetched again and again outlives what is only asked for."""
    with Client(node.endpoint) as client:
        ns = client.raw_namespace("read", BLOCK)
        read, asked = [ns.key(b"read %d" % i) for i in range(16)], [ns.key(b"asked %d" % i) for i in range(16)]
        for key in (*read, *asked):
            assert ns.put([key], block(key, BLOCK)).stored == 1
        for i in range(2 * SLOTS):
            assert ns.put([ns.key(b"flood %d" % i)], bytes(BLOCK)).stored == 1
            if i % 8 == 0:
                for key in read:
                    assert ns.get([key]) == [block(key, BLOCK)]
                for key in asked:
                    ns.match([key])
                client.stats()  # tells the daemon what was read
        assert [ns.match([key]).blocks for key in asked] == [0] * 16
        assert [ns.match([key]).blocks for key in read] == [1] * 16
