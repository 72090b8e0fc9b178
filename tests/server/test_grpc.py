"""The gRPC service: who may call, what is refused and how, bounds, and its end."""

import contextlib
import os
import pickle
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.core.holds import SESSION_SHARE
from kvstore.server import grpc_get, grpc_service
from kvstore.server.grpc_service import STREAMS_MAX
from kvstored.v1 import KEYS_MAX, PROTOCOL, PROTOCOL_OLDEST
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.latency import BUCKETS
from tests.server.grpc_edge import EPOCH, Scene, block_of, directory, key_of, put_messages, refused, with_edge

BLOCK = 64 << 10
STORED, EXISTS, REJECTED = pb.STORED, pb.EXISTS, pb.REJECTED
Code = grpc.StatusCode

NAMED = {
    "Match": pb.MatchRequest,
    "Remove": pb.RemoveRequest,
    "Pin": pb.PinRequest,
    "Unpin": pb.UnpinRequest,
    "Clear": pb.ClearRequest,
}
"""Unary calls that name a namespace."""

KEYED = {name: kind for name, kind in NAMED.items() if name != "Clear"}


async def first_of_get(scene: Scene, number: int, keys: list[bytes], **options: Any) -> Any:
    call = scene.stub.Get(pb.GetRequest(namespace_id=number, keys=keys), timeout=10.0, **options)
    found = await call.read()
    if found is grpc.aio.EOF:
        await call
    call.cancel()
    return found


# -- every call


def test_every_call_answers() -> None:
    async def scenario(scene: Scene) -> None:
        number, keys = await scene.namespace(BLOCK), [key_of(i) for i in range(3)]
        assert await scene.put(number, keys, [block_of(i, BLOCK) for i in range(3)]) == [STORED] * 3
        stub = scene.stub
        match = await stub.Match(pb.MatchRequest(namespace_id=number, keys=keys))
        assert (match.blocks, list(match.tiers)) == (3, [pb.TIER_HOST] * 3)
        calls: dict[str, Any] = {"calls": 1, "calls_hit": 1, "latencies": [1] + [0] * (BUCKETS - 1)}
        report = pb.Report(operation=pb.OPERATION_GET, namespace_id=number, hits=3, misses=1, **calls)
        await stub.Touch(pb.TouchRequest(keys=keys, reports=[report]))
        assert (await stub.Pin(pb.PinRequest(namespace_id=number, keys=keys, ttl_s=5))).pinned == 3
        assert (await stub.Unpin(pb.UnpinRequest(namespace_id=number, keys=keys))).unpinned == 3
        assert (await stub.Remove(pb.RemoveRequest(namespace_id=number, keys=keys[2:]))).removed == 1
        assert (await stub.Health(pb.HealthRequest())).healthy
        stats = await stub.Stats(pb.StatsRequest())
        assert (stats.counters.hits, stats.counters.misses, stats.counters.hit_bytes) == (3, 1, 3 * BLOCK)
        assert stats.daemon.grpc == scene.edge.address
        assert (await stub.Clear(pb.ClearRequest(namespace_id=number))).removed == 2
        assert await scene.match(number, keys) == 0

    with_edge(scenario)


def test_an_unknown_namespace_is_refused_by_every_call() -> None:
    async def scenario(scene: Scene) -> None:
        keys = [key_of("k")]
        for number in (0, 1, 2**32 - 1):
            for name, kind in NAMED.items():
                with refused(Code.FAILED_PRECONDITION, "open it first"):
                    await getattr(scene.stub, name)(kind(namespace_id=number))
            with refused(Code.FAILED_PRECONDITION, "open it first"):
                await first_of_get(scene, number, keys)
            with refused(Code.FAILED_PRECONDITION, "open it first"):
                await scene.put(number, keys, [b"x"])
        number = await scene.namespace(BLOCK)
        with refused(Code.FAILED_PRECONDITION, "another", "open it first"):
            await first_of_get(scene, number, keys, metadata=(("kvstored-tenant", "another"),))

    with_edge(scenario)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([key_of(1), b"short"], "key 1 has 5 bytes"),
        ([key_of(1) + b"x"], "key 0 has 33 bytes"),
        ([b""], "key 0 has 0 bytes"),
        ([key_of(i) for i in range(KEYS_MAX + 1)], f"{KEYS_MAX + 1} keys in one message"),
    ],
)
def test_keys_that_are_none_are_refused_by_every_call(keys: list[bytes], said: str) -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        for name, kind in KEYED.items():
            with refused(Code.INVALID_ARGUMENT, said):
                await getattr(scene.stub, name)(kind(namespace_id=number, keys=keys))
        with refused(Code.INVALID_ARGUMENT, said):
            await first_of_get(scene, number, keys)
        with refused(Code.INVALID_ARGUMENT, said):
            await scene.stub.Touch(pb.TouchRequest(keys=keys))

    with_edge(scenario)


def test_a_durable_put_is_refused_before_its_bytes() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        for count in (0, 1):
            keys = [key_of(i) for i in range(count)]
            with refused(Code.FAILED_PRECONDITION, "durable=True needs an SSD tier"):
                await scene.answer(put_messages(number, keys, [], durable=True))

    with_edge(scenario)


# -- metadata


@pytest.mark.parametrize(
    "said", [str(PROTOCOL + 1), str(PROTOCOL_OLDEST - 1), "", "x", "-1", "1.0", "9" * 40, "1" * 40]
)
def test_another_protocol_is_refused_naming_both(said: str) -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        metadata = (("kvstored-protocol", said),)
        named = f"protocol {said[:32]}, this daemon"
        with refused(Code.FAILED_PRECONDITION, named, f"speaks {PROTOCOL_OLDEST} to {PROTOCOL}"):
            await scene.stub.Health(pb.HealthRequest(), metadata=metadata)
        with refused(Code.FAILED_PRECONDITION, named):
            await scene.answer(put_messages(number, [key_of("k")], [bytes(BLOCK)]), metadata=metadata)
        assert not scene.visible()

    with_edge(scenario)


def test_the_daemons_own_protocol_and_none_are_accepted() -> None:
    async def scenario(scene: Scene) -> None:
        for metadata in ((), (("kvstored-protocol", str(PROTOCOL)),), (("something", "else"), ("raw-bin", b"\xff"))):
            assert (await scene.stub.Health(pb.HealthRequest(), metadata=metadata)).healthy

    with_edge(scenario)


def test_a_namespace_of_another_life_of_the_daemon_is_refused() -> None:
    """Its number may name another namespace by now."""

    async def scenario(scene: Scene) -> None:
        request = pb.OpenNamespaceRequest(digest=key_of("ns"), block_bytes=BLOCK)
        call = scene.stub.OpenNamespace(request)
        assert dict(await call.initial_metadata())["kvstored-epoch"] == str(EPOCH)
        number = (await call).namespace_id
        of = {epoch: (("kvstored-epoch", epoch),) for epoch in (str(EPOCH), str(EPOCH + 1), "")}
        keys, match = [key_of("k")], pb.MatchRequest(namespace_id=number, keys=[key_of("k")])
        assert not (await scene.stub.Match(match, metadata=of[str(EPOCH)])).blocks
        for metadata in (of[str(EPOCH + 1)], of[""]):
            with refused(Code.FAILED_PRECONDITION, "restarted"):
                await scene.stub.Match(match, metadata=metadata)
            with refused(Code.FAILED_PRECONDITION, "restarted"):
                await scene.answer(put_messages(number, keys, [bytes(BLOCK)]), metadata=metadata)
            with refused(Code.FAILED_PRECONDITION, "restarted"):
                await first_of_get(scene, number, keys, metadata=metadata)

    with_edge(scenario)


def test_tenants_do_not_meet_and_names_are_checked() -> None:
    async def scenario(scene: Scene) -> None:
        request = pb.OpenNamespaceRequest(digest=key_of("ns"), block_bytes=BLOCK)
        numbers = {
            tenant: (await scene.stub.OpenNamespace(request, metadata=(("kvstored-tenant", tenant),))).namespace_id
            for tenant in ("a", "b")
        }
        assert numbers["a"] != numbers["b"]
        messages = put_messages(numbers["a"], [key_of("k")], [bytes(BLOCK)])
        await scene.answer(messages, metadata=(("kvstored-tenant", "a"),))
        for tenant, blocks in (("a", 1), ("b", 0)):
            match = pb.MatchRequest(namespace_id=numbers[tenant], keys=[key_of("k")])
            assert (await scene.stub.Match(match, metadata=(("kvstored-tenant", tenant),))).blocks == blocks
        with refused(Code.INVALID_ARGUMENT, "tenant 'no such/name'"):
            await scene.stub.OpenNamespace(request, metadata=(("kvstored-tenant", "no such/name"),))
        with refused(Code.INVALID_ARGUMENT, "name is at most"):
            await scene.stub.OpenNamespace(request, metadata=(("kvstored-client", "x" * 129),))

    with_edge(scenario)


# -- bytes from outside


class Marker:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_only_bytes() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            evil = pickle.dumps(Marker(marker), protocol)
            for name in ("OpenNamespace", "Match", "Touch", "Remove", "Pin", "Unpin", "Clear", "Stats", "Health"):
                with contextlib.suppress(grpc.RpcError):
                    await channel(scene).unary_unary(f"/kvstored.v1.KVStore/{name}")(evil)
            with refused(Code.INVALID_ARGUMENT):
                await channel(scene).stream_unary("/kvstored.v1.KVStore/Put")(iter([evil]))
            with contextlib.suppress(grpc.RpcError):
                await channel(scene).unary_stream("/kvstored.v1.KVStore/Get")(evil).read()
            stored = evil + bytes(BLOCK - len(evil))
            assert await scene.put(number, [key_of(protocol)], [stored]) == [STORED]
            assert await scene.get(number, [key_of(protocol)]) == (1, [stored])
        assert not marker.exists()
        assert not scene.node.internal_errors

    def channel(scene: Scene) -> Any:
        return channels.setdefault(0, grpc.aio.insecure_channel(scene.edge.address))

    channels: dict[int, Any] = {}
    with directory() as path:
        marker = path / "marker"
        with_edge(scenario)


def test_bytes_that_are_no_message_are_the_callers_fault() -> None:
    async def scenario(scene: Scene) -> None:
        async with grpc.aio.insecure_channel(scene.edge.address) as channel:
            for name in NAMED:
                with refused(Code.INVALID_ARGUMENT, f"4 bytes that are not a {name}Request"):
                    await channel.unary_unary(f"/kvstored.v1.KVStore/{name}")(b"\xff\xff\xff\xff")
            for what in (b"\xff\xff\xff\xff", b"\x12\xff\xff\xff\xff\xff\xff\xff\xff", b"\x12"):
                with refused(Code.INVALID_ARGUMENT):
                    await channel.stream_unary("/kvstored.v1.KVStore/Put")(iter([what]))
            with refused(Code.UNIMPLEMENTED):
                await channel.unary_unary("/kvstored.v1.KVStore/Format")(b"")
        assert scene.node.protocol_errors
        assert not scene.node.internal_errors

    with_edge(scenario)


# -- bounds


def test_streams_without_end_leave_the_small_calls_alone() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        idle = [scene.stub.Put() for _ in range(200)]
        await scene.until(lambda: len(scene.store.sessions) == STREAMS_MAX)
        began = time.monotonic()
        assert (await scene.stub.Health(pb.HealthRequest(), timeout=10)).healthy
        assert len((await scene.stub.Stats(pb.StatsRequest(), timeout=10)).sessions) == STREAMS_MAX
        assert await scene.match(number, [key_of("k")]) == 0
        assert time.monotonic() - began < 5.0
        for work in (
            scene.put(number, [key_of("k")], [bytes(BLOCK)]),
            first_of_get(scene, number, [key_of("k")]),
            scene.stub.Clear(pb.ClearRequest(namespace_id=number)),
        ):
            with refused(Code.RESOURCE_EXHAUSTED, f"{STREAMS_MAX} Put, Get and Clear calls"):
                await work
        for call in idle:
            call.cancel()
        await scene.idle()
        assert await scene.put(number, [key_of("k")], [bytes(BLOCK)]) == [STORED]

    with_edge(scenario)


def test_a_call_whose_message_never_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_service, "UNSAID_WAIT_S", 1.5)

    async def scenario(scene: Scene) -> None:
        for name in ("Health", "Match", "Clear", "Get"):
            call = scene.channel.stream_unary(f"/kvstored.v1.KVStore/{name}")()
            with refused(Code.DEADLINE_EXCEEDED, "did not come within 1.5 s"):
                await call
            with refused(Code.INVALID_ARGUMENT, "a call without a message"):
                await scene.channel.stream_unary(f"/kvstored.v1.KVStore/{name}")(iter([]))

    with_edge(scenario)


def test_where_nothing_can_be_freed_a_put_is_refused_at_once() -> None:
    async def scenario(scene: Scene) -> None:
        block_bytes = 1 << 20
        number = await scene.namespace(block_bytes)
        keys = [key_of(i) for i in range(16)]
        assert await scene.put(number, keys, [block_of(i, block_bytes) for i in range(16)]) == [STORED] * 16
        assert (await scene.stub.Pin(pb.PinRequest(namespace_id=number, keys=keys, ttl_s=60))).pinned == 16
        more, block = [key_of(("more", i)) for i in range(4)], bytes(block_bytes)
        began = time.monotonic()
        with refused(Code.RESOURCE_EXHAUSTED, "16 pinned"):
            await scene.put(number, more, [block] * 4)
        assert time.monotonic() - began < 5.0
        # What is there counts, what finds no room is rejected, and the rest of the bytes is not waited for.
        mixed = [more[0], keys[3], more[1], keys[4]]
        assert await scene.put(number, mixed, [block] * 4) == [REJECTED, EXISTS, REJECTED, EXISTS]
        await scene.stub.Unpin(pb.UnpinRequest(namespace_id=number, keys=keys[:2]))
        assert await scene.put(number, more, [block] * 4) == [STORED, STORED, REJECTED, REJECTED]
        assert await scene.get(number, more) == (2, [block] * 2)

    with_edge(scenario, size_bytes=16 << 20)


def test_a_put_larger_than_one_session_may_hold_commits_on_the_way() -> None:
    async def scenario(scene: Scene) -> None:
        block_bytes = 1 << 20
        number = await scene.namespace(block_bytes)
        count = 3 * 16 // SESSION_SHARE
        keys, blocks = [key_of(i) for i in range(count)], [block_of(i, block_bytes) for i in range(count)]
        assert await scene.put(number, keys, blocks) == [STORED] * count
        assert await scene.get(number, keys) == (count, blocks)

    with_edge(scenario, size_bytes=16 << 20)


def test_a_get_where_nothing_more_may_be_held_is_a_miss() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(1 << 20)
        keys = [key_of(i) for i in range(16)]
        await scene.put(number, keys, [block_of(i, 1 << 20) for i in range(16)])
        tenant = scene.store.tenant("default")
        others = [_session(scene, str(i)) for i in range(4)]
        namespace = scene.store.namespace(tenant, number)
        for i, session in enumerate(others[:3]):
            assert len(scene.store.acquire(session, namespace, keys[4 * i : 4 * i + 4], 0.0)) == 4
        assert await scene.get(number, keys[12:]) == (4, [])
        assert await scene.get(number, keys[:4]) == (4, [block_of(i, 1 << 20) for i in range(4)])
        for session in others:
            scene.store.end_session(session, process_gone=True)

    with_edge(scenario, size_bytes=16 << 20)


def _session(scene: Scene, name: str) -> Any:
    tenant = scene.store.tenant("default")
    return scene.store.open_session(tenant, name, 0.0, local=True, read_only=False, pid=1, nonce=0)


# -- eviction while bytes are sent


def test_a_block_being_sent_is_exact_though_it_is_removed_and_its_memory_wanted() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(4 << 20)
        keys = [key_of(i) for i in range(4)]
        blocks = [block_of(i, 4 << 20) for i in range(4)]
        await scene.put(number, keys, blocks)
        call = scene.stub.Get(pb.GetRequest(namespace_id=number, keys=keys), timeout=10.0)
        assert (await call.read()).blocks == 4
        got = (await call.read()).data
        await scene.stub.Clear(pb.ClearRequest(namespace_id=number))
        other = await scene.namespace(4 << 20, "other")
        for i in range(4):
            with contextlib.suppress(grpc.RpcError):
                await scene.put(other, [key_of(("other", i))], [bytes(4 << 20)])
        while (chunk := await call.read()) is not grpc.aio.EOF:
            got += chunk.data
        assert got == b"".join(blocks)[: len(got)]
        assert len(got) >= 4 << 20
        assert not len(got) % (4 << 20)

    with_edge(scenario, size_bytes=16 << 20)


def test_what_is_evicted_before_its_turn_ends_the_get_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_get, "GET_BLOCKS", 1)

    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(8 << 20)
        keys = [key_of(i) for i in range(4)]
        blocks = [block_of(i, 8 << 20) for i in range(4)]
        await scene.put(number, keys, blocks)
        call = scene.stub.Get(pb.GetRequest(namespace_id=number, keys=keys), timeout=10.0)
        assert (await call.read()).blocks == 4
        assert (await scene.stub.Remove(pb.RemoveRequest(namespace_id=number, keys=keys[3:]))).removed == 1
        got = b""
        while (chunk := await call.read()) is not grpc.aio.EOF:
            got += chunk.data
        assert await call.code() is Code.OK
        assert got == b"".join(blocks[:3])

    with_edge(scenario)


# -- the daemon's own faults, and clients that go away


def test_a_bug_is_internal_counted_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        keys = [key_of("k")]
        with monkeypatch.context() as broken:
            broken.setattr(scene.store, "match", lambda *_: 1 / 0)
            for work in (
                scene.match(number, keys),
                first_of_get(scene, number, keys),
                scene.put(number, keys, [bytes(BLOCK)]),
            ):
                with refused(Code.INTERNAL, "ZeroDivisionError; see its log"):
                    await work
        assert scene.node.internal_errors == 3
        assert await scene.put(number, keys, [bytes(BLOCK)]) == [STORED]

    with_edge(scenario)


def test_a_client_that_goes_away_is_no_fault_of_the_daemons() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(1 << 20)
        keys, blocks = [key_of(i) for i in range(16)], [block_of(i, 1 << 20) for i in range(16)]
        await scene.put(number, keys, blocks)
        for _ in range(5):
            async with grpc.aio.insecure_channel(scene.edge.address) as channel:
                get = channel.unary_stream("/kvstored.v1.KVStore/Get")
                call = get(pb.GetRequest(namespace_id=number, keys=keys).SerializeToString())
                await call.read()
                put = channel.stream_unary("/kvstored.v1.KVStore/Put")()
                for message in put_messages(number, [key_of("new")], [bytes(1 << 20)], 1 << 18)[:3]:
                    await put.write(message.SerializeToString())
                await scene.until(lambda: len(scene.store.sessions) == 2)
            await scene.idle()
        assert scene.visible() == 16
        assert not scene.node.internal_errors

    with_edge(scenario)


def test_stopping_ends_what_is_under_way_and_frees_it() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(1 << 20)
        calls = [scene.stub.Put() for _ in range(8)]
        for i, call in enumerate(calls):
            for message in put_messages(number, [key_of(i)], [bytes(1 << 20)], 1 << 18)[:3]:
                await call.write(message)
        await scene.until(lambda: sum(len(s.granted) for s in scene.store.sessions.values()) == 8)
        await scene.edge.stop(0.05)
        assert not scene.store.sessions
        assert not scene.held()
        with refused(Code.UNAVAILABLE):
            await scene.stub.Health(pb.HealthRequest())

    with_edge(scenario)


def test_the_constants_leave_room_for_small_calls() -> None:
    assert STREAMS_MAX < grpc_service.RPCS_MAX < grpc_service.CONNECTION_STREAMS_MAX
