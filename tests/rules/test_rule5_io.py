"""Rule 5: a slot or a segment that somebody still works on is not reused.

In this release bytes move between memory only, so there are no loads, write-backs, pulls and
device copies yet; their tests come with the SSD tier. What there is: slots that gRPC
streams write to and read from, and segments that are made and given up meanwhile.
"""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest
import xxhash

from kvstore_client import Client, Namespace, ResourceExhausted
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.kvstore_pb2_grpc import KVStoreStub
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block
from tests.rules.processes import Program, exact, fill, names, pool, store, wait_for_loop

BLOCK = 16 << 10
SIZE = 4 << 20

Start = Callable[..., Program]


@pytest.fixture
def daemon(start_daemon: Callable[..., RunningDaemon]) -> RunningDaemon:
    """4 MiB in 64 segments of four 16 KiB slots; a stream that stalls is ended after 1.5 s."""
    return start_daemon(host__size="4MiB", server__grpc="127.0.0.1:0", lease__ttl="1500ms")


@pytest.fixture
def ns(client: Client) -> Namespace:
    return client.raw_namespace("rule 5", BLOCK)


@contextlib.contextmanager
def stub_of(daemon: RunningDaemon) -> Iterator[Any]:
    with grpc.insecure_channel(daemon.grpc_endpoint.removeprefix("grpc://")) as channel:
        yield KVStoreStub(channel)


def test_a_slot_whose_stream_went_silent_is_not_written_when_the_rest_of_its_bytes_arrives(
    daemon: RunningDaemon, client: Client, ns: Namespace
) -> None:
    """These callers have no shared memory: their reservation may end by a clock, and their bytes end with it."""
    key, go_on = ns.key(b"streamed"), threading.Event()
    with stub_of(daemon) as stub:
        request = pb.OpenNamespaceRequest(digest=ns.digest, block_bytes=BLOCK, label="stream")
        number = stub.OpenNamespace(request).namespace_id
        data = bytes([0xEE]) * BLOCK

        def messages() -> Iterator[pb.PutChunk]:
            yield pb.PutChunk(header=pb.PutHeader(namespace_id=number, keys=[key], parents=[b""], depths=[0]))
            yield pb.PutChunk(data=data[: BLOCK // 2])
            go_on.wait(90)
            yield pb.PutChunk(data=data[BLOCK // 2 :], checksum=xxhash.xxh3_64_intdigest(data))

        call = stub.Put.future(messages(), timeout=90)
        try:
            eventually(lambda: pool(client, BLOCK)["granted"] == 1, 10, "the stream to have a slot")
            eventually(lambda: pool(client, BLOCK)["granted"] == 0, 10, "the stream to lose it")
            others = fill(client, ns, "others")
        finally:
            go_on.set()
        with pytest.raises(grpc.RpcError) as failed:
            call.result()
    assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert exact(ns, others) > 128
    assert ns.match([key]).blocks == 0


def test_a_block_that_a_stream_is_sending_is_not_reused_under_it(
    daemon: RunningDaemon, client: Client, ns: Namespace
) -> None:
    keys = store(ns, names("sent", 16))
    with stub_of(daemon) as stub:
        request = pb.OpenNamespaceRequest(digest=ns.digest, block_bytes=BLOCK, label="stream")
        number = stub.OpenNamespace(request).namespace_id
        chunks = stub.Get(pb.GetRequest(namespace_id=number, keys=keys), timeout=30)
        assert next(chunks).blocks == 16
        assert ns.remove(keys[8:]) == 8
        others = store(ns, names("others", 300))
        data, received = b"", 0
        for chunk in chunks:
            data += chunk.data
            if not chunk.HasField("checksum"):
                continue
            assert data == block(keys[received], BLOCK)
            assert chunk.checksum == xxhash.xxh3_64_intdigest(data)
            data, received = b"", received + 1
    assert 8 <= received <= 16, "a block removed before its turn is left out"
    assert exact(ns, others) > 128


@pytest.fixture
def tenants(daemon: RunningDaemon) -> Iterator[tuple[Client, Client]]:
    """Clients of two tenants."""
    with (
        Client(daemon.endpoint, tenant="first", name="first") as first,
        Client(daemon.endpoint, tenant="second", name="second") as second,
    ):
        yield first, second


def tenant_pool(client: Client, tenant: str) -> dict[str, int]:
    return next(p for p in client.stats()["pools"] if p["tenant"] == tenant and p["block_bytes"] == BLOCK)


def stored(ns: Namespace, key: bytes) -> bool:
    """Whether there was room for this block now; there may be later, when others have unmapped what they lose."""
    try:
        return ns.put([key], block(key, ns.block_bytes)).rejected == 0
    except ResourceExhausted:
        return False


def test_memory_goes_to_another_tenant_but_not_the_segment_of_a_held_slot(tenants: tuple[Client, Client]) -> None:
    first, second = tenants
    mine, theirs = (client.raw_namespace("rule 5", BLOCK) for client in tenants)
    keys = store(mine, names("mine", 256))
    assert exact(mine, keys) > 200
    held = keys[100]
    lease = mine.acquire([held])
    array = lease.numpy(0)
    slots = mine.reserve(1)
    others: list[bytes] = []

    def second_has(segments: int) -> bool:
        others.extend(key for name in names(f"theirs {len(others)}", 16) if stored(theirs, key := theirs.key(name)))
        return bool(others) and tenant_pool(second, "second")["segments"] >= segments

    eventually(lambda: second_has(2), 20, "memory of the other tenant")
    assert exact(theirs, others) >= 4
    assert array.tobytes() == block(held, BLOCK)
    slots.views[0][:] = block(mine.key(b"late"), BLOCK)
    assert slots.commit([mine.key(b"late")]).stored == 1
    assert exact(mine, [mine.key(b"late"), held]) == 2
    exact(mine, keys)
    exact(theirs, others)
    stats = first.stats()
    assert stats["host"]["segments"] * stats["host"]["segment_bytes"] + stats["host"]["draining_bytes"] <= SIZE
    del array, lease, slots
    gc.collect()
    assert tenant_pool(first, "first")["leased"] == 0


STOPPED = """
client = Client(sys.argv[1], tenant="first", name="stopped")
ns = client.raw_namespace("rule 5", 16 << 10)
keys = [ns.key(b"stopped %d" % i) for i in range(256)]
for key in keys:
    ns.put([key], block(key, 16 << 10))
say("mapped")
hear()
right = wrong = 0
for key in keys:
    got = ns.get([key])
    right += got == [block(key, 16 << 10)]
    wrong += bool(got) and got != [block(key, 16 << 10)]
say("wrong", wrong)
hear()
"""


def test_memory_taken_from_a_stopped_client_counts_until_it_has_unmapped_it(
    daemon: RunningDaemon, client: Client, start_program: Start
) -> None:
    """Nobody else gets it meanwhile, and whoever asks is told so in time."""
    stopped = start_program(STOPPED, daemon.endpoint)
    assert stopped.hear() == "mapped"
    stopped.stop()
    with Client(daemon.endpoint, tenant="second", name="second") as second:
        theirs = second.raw_namespace("rule 5", BLOCK)
        others = [theirs.key(name) for name in names("theirs", 40)]
        assert not stored(theirs, others[0])
        host = client.stats()["host"]
        assert host["draining_bytes"] > 0
        assert host["segments"] * host["segment_bytes"] + host["draining_bytes"] <= SIZE
        wait_for_loop(client, "expire", 3)
        assert not stored(theirs, others[0])
        stopped.go_on()
        for key in others:
            eventually(partial(stored, theirs, key), 10, "memory of the other tenant")
        assert stopped.ask("read") == "wrong 0"
        assert exact(theirs, others) > 0
        eventually(lambda: client.stats()["host"]["draining_bytes"] == 0, 10, "all of it to be unmapped")
    stopped.say("end")
    assert stopped.finish() == 0
