"""The client by gRPC means the same as by shared memory."""

import concurrent.futures
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore_client import (
    Client,
    FailedPrecondition,
    Hint,
    InvalidArgument,
    Namespace,
    ResourceExhausted,
    remote,
)
from kvstored.v1 import KEYS_MAX, chunks
from tests.conftest import RunningDaemon
from tests.nodes import block, running

BLOCK = 64 << 10


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(server__grpc="127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture
def client(node: RunningDaemon) -> Iterator[Client]:
    with Client(node.grpc_endpoint, name="remote") as client:
        yield client


@pytest.fixture
def ns(client: Client, request: pytest.FixtureRequest) -> Namespace:
    return client.raw_namespace(request.node.nodeid, BLOCK)


def some(ns: Namespace, count: int, name: str = "k") -> tuple[list[bytes], list[bytes]]:
    """Keys and blocks."""
    return [ns.key(f"{name}{i}".encode()) for i in range(count)], [
        block((name, i), ns.block_bytes) for i in range(count)
    ]


# -- the same calls, the same meaning


def test_what_one_client_puts_any_client_gets(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    keys, blocks = some(ns, 5)
    assert ns.put(keys, blocks).stored == 5
    assert ns.match([*keys, ns.key(b"absent")]).blocks == 5
    assert ns.match(keys).tiers == ["host"] * 5
    assert ns.get(keys) == blocks
    with Client(node.endpoint) as local:
        theirs = local.raw_namespace(ns_name(ns, client), BLOCK)
        assert theirs.digest == ns.digest
        assert theirs.get(keys) == blocks
        more, new = some(ns, 2, "local")
        assert theirs.put(more, new).stored == 2
    assert ns.get(more) == new


def ns_name(ns: Namespace, client: Client) -> str:
    """The raw name of a namespace, which is its label."""
    digest = ns.digest.hex()
    return str(next(n["label"] for n in client.stats()["namespaces"] if n["digest"] == digest))


def test_reads_take_what_leads_and_leave_the_rest(ns: Namespace) -> None:
    keys, blocks = some(ns, 6)
    ns.put(keys[:3], blocks[:3])
    ns.put(keys[:5], [blocks[4]], start=4)
    assert ns.match(keys).blocks == 3
    out = np.full((6, BLOCK), 7, np.uint8)
    assert ns.get_into(keys, out) == 3
    assert [row.tobytes() for row in out[:3]] == blocks[:3]
    assert (out[3:] == 7).all()
    assert ns.get_into(keys, out[1:], start=1) == 2
    assert ns.get_into(keys, out[4:], start=4) == 1
    assert out[4].tobytes() == blocks[4]
    assert ns.get_into([], []) == 0
    assert ns.get_into(keys, [bytearray(BLOCK) for _ in keys]) == 3


@pytest.mark.parametrize("size_bytes", [1, chunks.CHUNK_BYTES + 1, 5 << 20])
def test_any_size_of_block_comes_back_exact(client: Client, size_bytes: int) -> None:
    ns = client.raw_namespace("sizes", size_bytes)
    keys, blocks = some(ns, 2, str(size_bytes))
    assert ns.put(keys, blocks).stored == 2
    assert ns.get(keys) == blocks


def test_large_puts_and_gets_are_several_streams(ns: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 2 * BLOCK)
    keys, blocks = some(ns, 5)
    assert ns.put(keys, blocks).stored == 5
    assert ns.put(keys, blocks).existing == 5
    out = np.empty((6, BLOCK), np.uint8)
    assert ns.get_into([*keys, ns.key(b"absent")], out) == 5
    assert [row.tobytes() for row in out[:5]] == blocks
    assert len(ns.acquire(keys)) == 5


def test_more_keys_than_a_message_takes(client: Client) -> None:
    ns = client.raw_namespace("many", 64)
    count = KEYS_MAX + 10
    keys, blocks = some(ns, count)
    assert ns.put(keys, blocks).stored == count
    assert ns.match(keys).blocks == count
    out = np.empty((count, 64), np.uint8)
    assert ns.get_into(keys, out) == count
    assert out.tobytes() == b"".join(blocks)
    assert ns.pin(keys, 5) == count
    assert ns.unpin(keys) == count
    assert ns.remove(keys) == count


def test_a_lease_is_private_and_outlives_the_block(ns: Namespace, client: Client) -> None:
    keys, blocks = some(ns, 3)
    ns.put(keys, blocks)
    with ns.acquire([*keys, ns.key(b"absent")]) as lease:
        assert len(lease) == 3
        kept = lease.numpy(1)
        assert ns.remove(keys) == 3
        assert [bytes(view) for view in lease.views] == blocks
        assert lease.views[0].readonly
    assert kept.tobytes() == blocks[1]
    with pytest.raises(FailedPrecondition):
        lease.views  # noqa: B018
    assert not client.stats()["sessions"]
    assert len(ns.acquire(keys)) == 0


def test_reserved_slots_are_written_in_place_and_committed(ns: Namespace) -> None:
    keys, blocks = some(ns, 3)
    with ns.reserve(3) as slots:
        for view, bytes_ in zip(slots.views, blocks, strict=True):
            view[:] = bytes_
        assert ns.match(keys).blocks == 0
        assert slots.commit(keys[:2]).stored == 2
    assert ns.get(keys) == blocks[:2]
    with ns.reserve(1) as slots:
        slots.views[0][:] = blocks[2]
    assert ns.match(keys).blocks == 2


def test_management_and_hints(ns: Namespace, client: Client) -> None:
    keys, blocks = some(ns, 4)
    ns.put(keys, blocks, hint=Hint(conversation="c", priority=1, ttl_s=3600))
    assert ns.pin(keys, 60) == 4
    assert ns.unpin(keys[:1]) == 1
    assert ns.remove(keys[3:]) == 1
    assert ns.clear() == 3
    assert client.health().healthy
    with pytest.raises(InvalidArgument, match="ttl_s"):
        ns.pin(keys, 0)
    with pytest.raises(FailedPrecondition, match="durable=True needs an SSD tier"):
        ns.put(keys, blocks, durable=True)
    assert ns.prefetch(keys).wait() == 0


def test_reads_are_counted_exactly_and_make_blocks_recent(ns: Namespace, client: Client) -> None:
    keys, blocks = some(ns, 10)
    ns.put(keys, blocks)
    before = client.stats()["counters"]
    for _ in range(6):
        assert ns.get_into(keys, np.empty((10, BLOCK), np.uint8)) == 10
    for i in range(40):
        assert not ns.get_into([ns.key(b"absent%d" % i)], np.empty(BLOCK, np.uint8))
    after = client.stats()["counters"]
    assert {name: after[name] - before[name] for name in ("hits", "misses", "hit_bytes", "stored")} == {
        "hits": 60,
        "misses": 40,
        "hit_bytes": 60 * BLOCK,
        "stored": 0,
    }
    assert client.stats()["counters"] == after


def test_what_was_read_is_told_at_close(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    keys, blocks = some(ns, 2)
    ns.put(keys, blocks)
    before = client.stats()["counters"]["hits"]
    with Client(node.grpc_endpoint) as other:
        other.raw_namespace(ns_name(ns, client), BLOCK).get(keys)
    assert client.stats()["counters"]["hits"] == before + 2


def test_threads_share_a_client(ns: Namespace) -> None:
    def work(who: int) -> bool:
        keys, blocks = some(ns, 4, f"thread{who}-")
        return all((ns.put(keys, blocks).rejected == 0, ns.get(keys) == blocks, ns.remove(keys) == 4) for _ in range(5))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_a_full_store_rejects_what_finds_no_room(start_daemon: Callable[..., RunningDaemon]) -> None:
    daemon = start_daemon(server__grpc="127.0.0.1:0", host__size="4MiB", evict__high="1.0", evict__low="0.99")
    with Client(daemon.grpc_endpoint) as client:
        ns = client.raw_namespace("full", BLOCK)
        keys, blocks = some(ns, 64)
        assert ns.put(keys, blocks).stored == 64
        ns.pin(keys, 60)
        more, new = some(ns, 3, "more")
        began = time.monotonic()
        with pytest.raises(ResourceExhausted, match="pinned"):
            ns.put(more, new)
        assert time.monotonic() - began < 5.0
        result = ns.put([keys[0], *more], [blocks[0], *new])
        assert (result.stored, result.existing, result.rejected) == (0, 1, 3)
        assert isinstance(result.error, ResourceExhausted)
        with ns.reserve(1) as slots, pytest.raises(ResourceExhausted):
            slots.commit(more[:1])
        ns.unpin(keys)
        assert ns.put(more, new).stored == 3


def test_a_read_only_client_writes_nothing(node: RunningDaemon, ns: Namespace, client: Client) -> None:
    keys, blocks = some(ns, 1)
    ns.put(keys, blocks)
    with Client(node.grpc_endpoint, read_only=True) as reader:
        theirs = reader.raw_namespace(ns_name(ns, client), BLOCK)
        assert theirs.get(keys) == blocks
        for write in (lambda: theirs.put(keys, blocks), lambda: theirs.reserve(1)):
            with pytest.raises(FailedPrecondition, match="read-only"):
                write()
