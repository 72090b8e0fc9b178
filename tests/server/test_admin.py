"""Administration through real daemons: what Inspect tells, what Evict takes, how a session is ended, and who may."""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from kvstore.server.admin import check_allowed
from kvstore.server.peer import Peer
from kvstore_client import Client, Hint, Namespace, admin
from kvstored.v1 import PROTOCOL
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, KVStoreError, Unauthenticated
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running
from tests.rules.conftest import start_program
from tests.rules.processes import RAW, Program, pool, session, start_raw, store
from tests.stopwatch import Stopwatch
from tests.wire import Wire

__all__ = ["start_program"]  # a fixture

SIZE = 16 << 10
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(host__size="64MiB") as daemon:
        yield daemon


@pytest.fixture
def client(node: RunningDaemon) -> Iterator[Client]:
    with Client(node.endpoint, name="admin") as client:
        yield client
        admin.evict(client, pb.EvictRequest(all=True))


@pytest.fixture
def ns(client: Client, request: pytest.FixtureRequest) -> Namespace:
    return client.raw_namespace(request.node.name, SIZE)


def chain(ns: Namespace, name: str, length: int) -> list[bytes]:
    keys = [ns.key(f"{name} {i}".encode()) for i in range(length)]
    assert ns.put(keys, [block(key, SIZE) for key in keys]).stored == length
    return keys


def key_info(client: Client, key: bytes) -> pb.KeyInfo:
    reply = admin.inspect(client, pb.InspectRequest(key=key))
    assert reply.HasField("key")
    return reply.key


def counters(client: Client) -> dict[str, int]:
    found: dict[str, int] = client.stats()["counters"]
    return found


# -- inspect


def test_a_key_shows_where_it_lies_and_what_it_hangs_from(client: Client, ns: Namespace) -> None:
    keys = chain(ns, "a", 3)
    twin = ns.key(b"twin")
    ns.put([keys[0], twin], [block(twin, SIZE)], start=1)
    found = key_info(client, keys[0])
    assert (found.key, found.parent, found.parent_present, found.depth) == (keys[0], b"", False, 0)
    assert (set(found.children), found.children_count) == ({keys[1], twin}, 2)
    assert (found.namespace.digest, found.namespace.block_bytes) == (ns.digest, SIZE)
    (copy,) = found.copies
    assert (copy.tier, copy.size_bytes) == (pb.TIER_HOST, SIZE)
    below = key_info(client, keys[2])
    assert (below.parent, below.parent_present, below.depth, below.children_count) == (keys[1], True, 2, 0)
    ns.remove([keys[1]])
    assert (key_info(client, keys[2]).parent, key_info(client, keys[2]).parent_present) == (keys[1], False)


def test_a_key_shows_who_uses_it_and_how_long_it_has_left(client: Client, ns: Namespace) -> None:
    begun = time.monotonic()
    key = ns.key(b"one")
    ns.put([key], [block(key, SIZE)], hint=Hint(ttl_s=500))
    found = key_info(client, key)
    assert 0 <= found.idle_s <= found.age_s <= time.monotonic() - begun + 1
    assert (found.leases, found.pinned_s, found.hits) == (0, 0, 0)
    assert 400 < found.ttl_s <= 500
    ns.pin([key], ttl_s=60)
    with ns.acquire([key]), ns.acquire([key]):
        found = key_info(client, key)
        assert (found.leases, found.hits) == (2, 2)
        assert 50 < found.pinned_s <= 60
    eventually(lambda: key_info(client, key).leases == 0)
    ns.unpin([key])
    assert key_info(client, key).pinned_s == 0


def test_a_parent_of_thousands_shows_the_first_and_counts_all() -> None:
    with running(host__size="64MiB") as daemon, Wire(daemon.socket) as wire, Client(daemon.endpoint) as client:
        opened = wire.call(open_namespace=pb.OpenNamespaceRequest(digest=bytes(32), block_bytes=4096, label="wide"))
        number, root, count = opened.open_namespace.namespace_id, b"r" * 32, 3000
        keys = [root, *(i.to_bytes(32, "big") for i in range(1, count + 1))]
        while keys:
            slots = list(wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=64)).reserve.slots)
            part, keys = keys[: len(slots)], keys[len(slots) :]
            parents = [b"" if key == root else root for key in part]
            depths = [int(key != root) for key in part]
            commit = pb.CommitRequest(
                namespace_id=number, keys=part, slots=slots[: len(part)], parents=parents, depths=depths
            )
            assert set(wire.call(commit=commit).commit.results) == {pb.STORED}
        found = key_info(client, root)
        assert (len(set(found.children)), found.children_count) == (64, count)
        admin.evict(client, pb.EvictRequest(keys=pb.EvictKeys(keys=list(found.children))))
        eventually(lambda: key_info(client, root).children_count == count - 64)


def test_a_namespace_shows_its_blocks_and_the_pool_they_share(client: Client) -> None:
    ns = client.raw_namespace("shown", SIZE)
    keys = chain(ns, "a", 5)
    ns.pin(keys[:2], ttl_s=60)
    with ns.acquire(keys[:1]):
        found = admin.inspect(client, pb.InspectRequest(namespace=ns.digest[:4])).namespace
    assert (found.stats.label, found.stats.blocks, found.stats.digest) == ("shown", 5, ns.digest)
    assert (found.leased, found.pinned, found.roots, found.orphans, found.deepest) == (1, 2, 1, 0, 4)
    assert (found.pool.block_bytes, found.pool.tenant) == (SIZE, "default")
    assert 0 <= found.idle_s <= found.oldest_s < 60
    ns.unpin(keys)


def test_a_prefix_of_two_namespaces_is_refused_and_both_are_named(node: RunningDaemon, client: Client) -> None:
    twins = [b"twin" + bytes([i]) * 28 for i in (1, 2)]
    with Wire(node.socket) as wire:
        for label, digest in zip(("first", "second"), twins, strict=True):
            wire.call(open_namespace=pb.OpenNamespaceRequest(digest=digest, block_bytes=SIZE, label=label))
    with pytest.raises(InvalidArgument) as refused:
        admin.inspect(client, pb.InspectRequest(namespace=b"twin"))
    for label, digest in zip(("first", "second"), twins, strict=True):
        assert f"{digest.hex()} ({label})" in str(refused.value)
    assert admin.inspect(client, pb.InspectRequest(namespace=twins[1][:5])).namespace.stats.label == "second"


def test_a_session_and_a_segment_show_each_other(client: Client, ns: Namespace) -> None:
    keys = chain(ns, "a", 2)
    with ns.acquire(keys) as lease:
        assert len(lease) == 2
        (number,) = [s["id"] for s in client.stats()["sessions"] if s["client"] == "admin" and s["leased_slots"]]
        found = admin.inspect(client, pb.InspectRequest(session=number)).session
        assert (found.stats.client, found.stats.leased_slots, len(found.leased)) == ("admin", 2, 2)
        assert len(found.granted) == found.stats.granted_slots
        place = found.leased[0] >> 32
        assert place in found.segments
        segment = admin.inspect(client, pb.InspectRequest(segment=place)).segment
        assert number in segment.sessions
        assert (segment.block_bytes, segment.tenant, segment.draining) == (SIZE, "default", False)
        assert (segment.blocks, segment.leased) == (2, 2)
        assert segment.slots == segment.free + segment.granted + segment.quarantined + segment.blocks + segment.doomed


def test_what_is_not_there_is_an_answer_with_nothing_in_it(client: Client, ns: Namespace) -> None:
    for request in (
        pb.InspectRequest(key=bytes(32)),
        pb.InspectRequest(namespace=b"none"),
        pb.InspectRequest(tenant="stranger", key=bytes(32)),
        pb.InspectRequest(tenant="stranger", namespace=ns.digest),
        pb.InspectRequest(session=0),
        pb.InspectRequest(session=(1 << 64) - 1),
        pb.InspectRequest(segment=1 << 31),
    ):
        assert admin.inspect(client, request) == pb.InspectReply()
    assert "stranger" not in {index["tenant"] for index in client.stats()["indexes"]}, "asking made a tenant"


@pytest.mark.parametrize(
    ("op", "request_"),
    [
        ("inspect", pb.InspectRequest()),
        ("inspect", pb.InspectRequest(key=b"abc")),
        ("inspect", pb.InspectRequest(key=bytes(33))),
        ("inspect", pb.InspectRequest(namespace=b"abc")),
        ("inspect", pb.InspectRequest(namespace=bytes(33))),
        ("inspect", pb.InspectRequest(tenant="no/such", key=bytes(32))),
        ("evict", pb.EvictRequest()),
        ("evict", pb.EvictRequest(tenant="no such", all=True)),
        ("evict", pb.EvictRequest(all=False)),
        ("evict", pb.EvictRequest(size_bytes=0)),
        ("evict", pb.EvictRequest(namespace=b"abcd")),
        ("evict", pb.EvictRequest(keys=pb.EvictKeys(keys=[b"short"]))),
        ("evict", pb.EvictRequest(keys=pb.EvictKeys(keys=[bytes(32)] * 4097))),
    ],
    ids=str,
)
def test_nonsense_is_refused_and_changes_nothing(
    node: RunningDaemon, client: Client, ns: Namespace, op: str, request_: Any
) -> None:
    keys = chain(ns, "a", 2)
    with Wire(node.socket) as wire:
        with pytest.raises(InvalidArgument):
            wire.call(**{op: request_})
        wire.call(health=pb.HealthRequest())
    assert ns.match(keys).blocks == 2


# -- evict


def test_every_form_frees_what_it_says(client: Client, ns: Namespace) -> None:
    other = client.raw_namespace("other", 2 * SIZE)
    for request, blocks in (
        (pb.EvictRequest(keys=pb.EvictKeys(keys=[ns.key(b"a 9"), ns.key(b"a 8"), ns.key(b"a 9"), bytes(32)])), 2),
        (pb.EvictRequest(namespace=ns.digest), 10),
        (pb.EvictRequest(tenant="default", size_bytes=3 * SIZE), 3),
        (pb.EvictRequest(size_bytes=4 * SIZE - 1), 4),
        (pb.EvictRequest(tenant="default", all=True), 14),
        (pb.EvictRequest(all=True), 14),
        (pb.EvictRequest(tenant="stranger", all=True), 0),
        (pb.EvictRequest(tenant="stranger", size_bytes=SIZE), 0),
    ):
        admin.evict(client, pb.EvictRequest(all=True))
        chain(ns, "a", 10)
        store(other, [b"b %d" % i for i in range(4)])
        before = client.stats()
        done = admin.evict(client, request)
        after = client.stats()
        assert (done.blocks, done.held, done.absent) == (blocks, 0, int(request.HasField("keys")))
        kept = [sum(p["blocks"] for p in stats["pools"]) for stats in (before, after)]
        used = [sum(p["blocks"] * p["slot_bytes"] for p in stats["pools"]) for stats in (before, after)]
        assert (kept[0] - kept[1], used[0] - used[1]) == (done.blocks, done.size_bytes)
        assert after["counters"]["evicted_asked"] - before["counters"]["evicted_asked"] == blocks
        assert after["counters"]["evicted"] == before["counters"]["evicted"]
        assert after["counters"]["removed"] == before["counters"]["removed"]


def test_blocks_that_somebody_holds_stay_whole(client: Client, ns: Namespace) -> None:
    keys = chain(ns, "a", 6)
    ns.pin(keys[5:], ttl_s=60)
    with ns.acquire(keys[:2]) as lease:
        for request in (
            pb.EvictRequest(size_bytes=1 << 40),
            pb.EvictRequest(namespace=ns.digest),
            pb.EvictRequest(keys=pb.EvictKeys(keys=keys)),
            pb.EvictRequest(all=True),
        ):
            assert admin.evict(client, request).held == 3
        assert [bytes(view) for view in lease.views] == [block(key, SIZE) for key in keys[:2]]
        assert ns.get([keys[5]]) == [block(keys[5], SIZE)]
    eventually(lambda: pool(client, SIZE)["leased"] == 0)
    assert admin.evict(client, pb.EvictRequest(all=True)).blocks == 2
    ns.unpin(keys)


def test_a_namespace_that_nobody_opened_cannot_be_evicted(client: Client) -> None:
    with pytest.raises(FailedPrecondition, match="has no namespace"):
        admin.evict(client, pb.EvictRequest(namespace=bytes(32)))


def test_a_caller_that_hangs_up_stops_its_eviction() -> None:
    """A walk over a large store ends with its caller: Ctrl-C means it."""
    with running(host__size="256MiB") as daemon, Client(daemon.endpoint) as client:
        ns = client.raw_namespace("many", 4096)
        keys = [ns.key(b"%d" % i) for i in range(40_000)]
        ns.put(keys, np.zeros((len(keys), 4096), np.uint8))
        with Wire(daemon.socket) as wire:
            daemon.pause()
            wire.post(1, evict=pb.EvictRequest(all=True))
        daemon.resume()  # it finds the request and the end of who asked together
        eventually(lambda: "evicted as asked" in daemon.output())
        daemon.says("outcome=stopped")
        assert counters(client)["evicted_asked"] < len(keys)
        assert client.health().healthy


# -- ending a session

RAW_WAITS = RAW + 'say("ended:", wire.last_words())\nhear()\n'
"""The client that speaks for itself, and what the daemon says last to it."""


def test_an_ended_session_leaves_what_its_process_may_write_to_quarantined(
    node: RunningDaemon, client: Client, ns: Namespace, start_program: Callable[..., Program]
) -> None:
    keys = chain(ns, "a", 2)
    program, (_, granted, leased) = start_raw(start_program, node, RAW_WAITS, ns, keys)
    assert (len(granted), len(leased)) == (4, 2)
    raw = session(client, "raw")
    assert raw is not None
    reply = admin.end_session(client, raw["id"])
    assert (reply.found, reply.quarantined) == (True, 4)
    assert program.hear() == "ended: an administrator ended this session"
    assert pool(client, SIZE)["quarantined"] == 4
    ended = session(client, "raw")
    assert ended is not None
    assert (ended["id"], ended["ended"]) == (raw["id"], True)
    assert admin.evict(client, pb.EvictRequest(namespace=ns.digest)).held == 2
    again = admin.end_session(client, raw["id"])
    assert (again.found, again.quarantined) == (False, 4), "it was ended; what it held waits for its process"
    program.kill()
    eventually(lambda: session(client, "raw") is None)
    assert pool(client, SIZE)["quarantined"] == 0
    assert not admin.end_session(client, raw["id"]).found


def test_a_client_of_ours_that_was_ended_connects_again(node: RunningDaemon, client: Client) -> None:
    ns = client.raw_namespace("both", SIZE)
    keys = chain(ns, "a", 2)
    with Client(node.endpoint, name="victim") as victim:
        theirs = victim.raw_namespace("both", SIZE)
        assert theirs.match(keys).blocks == 2
        before = session(client, "victim")
        assert before is not None
        assert admin.end_session(client, before["id"]).found
        assert eventually(lambda: theirs.get(keys)) == [block(key, SIZE) for key in keys]
        after = session(client, "victim")
        assert after is not None
        assert after["id"] != before["id"]


def test_nobody_ends_his_own_session(node: RunningDaemon, client: Client) -> None:
    with Wire(node.socket) as wire:
        own = session(client, "wire")
        assert own is not None
        with pytest.raises(InvalidArgument, match="the caller's own"):
            wire.call(end_session=pb.EndSessionRequest(session=own["id"]))
        assert not wire.call(end_session=pb.EndSessionRequest(session=0)).end_session.found
        wire.call(health=pb.HealthRequest())


def test_a_call_under_way_over_grpc_ends_by_itself_and_says_so() -> None:
    """It is a session only while its bytes move: nothing is left of it that could be ended."""
    with running(host__size="16MiB", server__grpc="127.0.0.1:0") as daemon, Client(daemon.endpoint) as client:
        ns = client.raw_namespace("remote", 4096)
        number = client.stats()["namespaces"][0]["id"]
        header = pb.PutChunk(header=pb.PutHeader(namespace_id=number, keys=[ns.key(b"a")], parents=[b""], depths=[0]))
        chunks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        chunks.put(header.SerializeToString())
        with grpc.insecure_channel(daemon.grpc_endpoint.removeprefix("grpc://")) as channel:
            call = channel.stream_unary("/kvstored.v1.KVStore/Put").future(iter(chunks.get, None))
            found = eventually(lambda: [s for s in client.stats()["sessions"] if not s["local"]])
            with pytest.raises(FailedPrecondition, match=r"a call under way .* ends by itself"):
                admin.end_session(client, found[0]["id"])
            call.cancel()
            chunks.put(None)
            eventually(lambda: all(s["local"] for s in client.stats()["sessions"]))
            assert not admin.end_session(client, found[0]["id"]).found


# -- who may


def test_a_read_only_session_looks_and_changes_nothing(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    keys = chain(ns, "a", 1)
    own = next(s["id"] for s in client.stats()["sessions"] if s["client"] == "admin")
    with Wire(node.socket, hello=False) as wire:
        wire.call(hello=pb.HelloRequest(protocol=PROTOCOL, client="looker", read_only=True))
        assert wire.call(inspect=pb.InspectRequest(key=keys[0])).inspect.key.key == keys[0]
        for op in ({"evict": pb.EvictRequest(all=True)}, {"end_session": pb.EndSessionRequest(session=own)}):
            with pytest.raises(FailedPrecondition, match="read-only"):
                wire.call(**op)
    assert ns.match(keys).blocks == 1


def test_administration_is_for_the_daemons_own_user_and_root() -> None:
    for uid in (os.geteuid(), 0):
        check_allowed(Peer(1, uid, -1))
    with pytest.raises(Unauthenticated, match="uid 4711"):
        check_allowed(Peer(1, 4711, -1))


STRANGER = """
from kvstored.v1.errors import Unauthenticated
from pathlib import Path
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
with Wire(Path(sys.argv[1])) as wire:
    for op in (
        {"inspect": pb.InspectRequest(session=1)},
        {"evict": pb.EvictRequest(all=True)},
        {"end_session": pb.EndSessionRequest(session=1)},
    ):
        try:
            wire.call(**op)
            say("allowed")
        except Unauthenticated as e:
            say("refused")
    say(wire.call(health=pb.HealthRequest()).health.healthy)
"""


@needs_root
def test_another_user_whom_the_socket_lets_in_is_no_administrator(start_program: Callable[..., Program]) -> None:
    with running(host__size="16MiB") as daemon, Client(daemon.endpoint) as client:
        daemon.directory.chmod(0o711)
        daemon.socket.chmod(0o666)
        ns = client.raw_namespace("kept", 4096)
        keys = store(ns, [b"kept"])
        program = start_program(STRANGER, daemon.socket)
        assert [program.hear() for _ in range(4)] == ["refused", "refused", "refused", "True"]
        assert ns.match(keys).blocks == 1
        assert counters(client)["sessions_ended"] <= 1, "nobody was ended but the stranger by himself"


# -- a large store


def test_looking_at_many_blocks_and_evicting_them_holds_up_nobody() -> None:
    """100,000 blocks are inspected again and again, and then dropped, while another client's puts go on."""
    with running(host__size="512MiB") as daemon, Client(daemon.endpoint) as client, Client(daemon.endpoint) as other:
        ns = client.raw_namespace("many", 4096)
        keys = [ns.key(b"%d" % i) for i in range(100_000)]
        for at in range(0, len(keys), 1000):
            assert ns.put(keys[at : at + 1000], np.zeros((1000, 4096), np.uint8)).stored == 1000
        busy = other.raw_namespace("busy", 4096)
        waited: list[float] = []
        failed: list[KVStoreError] = []
        done = threading.Event()

        def put() -> None:
            number, watch = 0, Stopwatch()
            while not done.is_set():
                key, number = busy.key(b"%d" % number), number + 1
                watch.restart()
                try:
                    assert busy.put([key], [block(number, 4096)]).stored == 1
                except KVStoreError as e:
                    failed.append(e)
                waited.append(watch.seconds)

        writer = threading.Thread(target=put)
        writer.start()
        try:
            while len(waited) < 300:
                assert admin.inspect(client, pb.InspectRequest(namespace=ns.digest)).namespace.roots == 100
                assert admin.inspect(client, pb.InspectRequest(key=keys[-1][:8])).key.key == keys[-1]
            assert admin.evict(client, pb.EvictRequest(namespace=ns.digest)).blocks == len(keys)
        finally:
            done.set()
            writer.join()
        assert failed == []
        assert sorted(waited)[int(len(waited) * 0.95)] < 0.25, "one step of it is a few milliseconds"
