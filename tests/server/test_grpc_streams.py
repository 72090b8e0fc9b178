"""Put and Get over gRPC: byte-exact or not there, and nothing held once a call is over."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.server import calls, grpc_service, grpc_streams
from kvstored.v1 import CHUNK_BYTES_MAX, KEYS_MAX, chunks
from kvstored.v1 import kvstore_pb2 as pb
from tests.server.grpc_edge import Scene, block_of, key_of, put_messages, refused, with_edge

BLOCK = 64 << 10
EXISTS, REJECTED, STORED = pb.EXISTS, pb.REJECTED, pb.STORED
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def keys_of(name: object, count: int) -> list[bytes]:
    return [key_of((name, i)) for i in range(count)]


def blocks_of(name: object, count: int, size_bytes: int = BLOCK) -> list[bytes]:
    return [block_of((name, i), size_bytes) for i in range(count)]


# -- the encoding


CHECKSUMS = st.none() | st.integers(0, 2**64 - 1)


@given(st.binary(max_size=300), CHECKSUMS)
def test_chunks_are_encoded_as_protobuf_does(data: bytes, checksum: int | None) -> None:
    message = chunks.encode(memoryview(data), checksum)
    if data:
        for kind in (pb.PutChunk, pb.GetChunk):
            assert message == kind(data=data, checksum=checksum).SerializeToString()
        found = chunks.decode(message)
        assert found is not None
        assert (bytes(found[0]), found[1]) == (data, checksum)
    else:
        assert pb.PutChunk.FromString(message) == pb.PutChunk(data=b"", checksum=checksum)
        assert chunks.decode(message) is None


@given(
    st.binary(max_size=24)
    | st.binary(max_size=12).map(lambda tail: b"\x12" + tail)
    | st.tuples(st.binary(max_size=5), st.binary(min_size=7, max_size=9)).map(
        lambda parts: b"\x12" + bytes((len(parts[0]),)) + parts[0] + b"\x19" + parts[1]
    )
)
def test_what_is_decoded_by_hand_is_what_protobuf_decodes(message: bytes) -> None:
    found = chunks.decode(message)
    if found is not None:
        assert pb.PutChunk.FromString(message) == pb.PutChunk(data=bytes(found[0]), checksum=found[1])


# -- round trips


@pytest.mark.parametrize("size_bytes", [1, 4097, chunks.CHUNK_BYTES, chunks.CHUNK_BYTES + 1, 3 << 20])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 70_001])
def test_blocks_come_back_byte_exact(size_bytes: int, chunk_bytes: int) -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(size_bytes)
        keys, blocks = keys_of(size_bytes, 3), blocks_of(size_bytes, 3, size_bytes)
        assert await scene.put(number, keys, blocks, chunk_bytes=chunk_bytes) == [STORED] * 3
        assert await scene.match(number, keys) == 3
        assert await scene.get(number, keys) == (3, blocks)
        assert await scene.get(number, [*keys[:2], key_of("absent"), keys[2]]) == (2, blocks[:2])
        assert await scene.get(number, [key_of("absent")]) == (0, [])

    with_edge(scenario)


def test_many_blocks_are_committed_in_batches_with_their_parents() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(4096)
        count = 3 * grpc_streams.PUT_BLOCKS + 1
        keys, blocks = keys_of("many", count), blocks_of("many", count, 4096)
        assert await scene.put(number, keys, blocks) == [STORED] * count
        assert await scene.get(number, keys) == (count, blocks)
        table, rows = scene.store.table, scene.store.tenant("default").rows
        for i, key in enumerate(keys):
            assert table.depth[rows[key]] == i
            assert not i or table.parent[rows[key]] == rows[keys[i - 1]]

    with_edge(scenario)


def test_blocks_that_exist_are_skipped_wherever_they_are() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        keys, blocks = keys_of("k", 6), blocks_of("k", 6)
        assert await scene.put(number, [keys[1], keys[3]], [blocks[1], blocks[3]]) == [STORED] * 2
        other = blocks_of("other", 6)
        results = await scene.put(number, keys, [*other[:2], blocks[2], *other[3:]])
        assert results == [STORED, EXISTS, STORED, EXISTS, STORED, STORED]
        expected = [other[0], blocks[1], blocks[2], blocks[3], other[4], other[5]]
        assert await scene.get(number, keys) == (6, expected)
        assert scene.store.counts.existing == 2
        twice = key_of("twice")
        assert await scene.put(number, [twice, twice], blocks[:2], parents=[b"", b""]) == [STORED, EXISTS]
        assert await scene.get(number, [twice]) == (1, blocks[:1])

    with_edge(scenario)


def test_a_put_of_blocks_that_all_exist_is_answered_before_their_bytes() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        keys, blocks = keys_of("k", 4), blocks_of("k", 4)
        await scene.put(number, keys, blocks)
        for _ in range(20):
            call = scene.stub.Put(timeout=10.0)
            await call.write(put_messages(number, keys, [])[0])
            assert list((await call).results) == [EXISTS] * 4
        assert await scene.put(number, keys, blocks) == [EXISTS] * 4
        assert await scene.put(number, [], []) == []

    with_edge(scenario)


def test_two_puts_of_one_key_store_it_once() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(1 << 20)
        keys = keys_of("k", 4)
        blocks = [blocks_of(who, 4, 1 << 20) for who in "ab"]
        results = await asyncio.gather(*(scene.put(number, keys, mine, chunk_bytes=100_000) for mine in blocks))
        for i in range(4):
            assert sorted(result[i] for result in results) == [STORED, EXISTS]
        _, found = await scene.get(number, keys)
        for i, block in enumerate(found):
            assert block in (blocks[0][i], blocks[1][i])

    with_edge(scenario)


def spelled(data: bytes, checksum: int | None) -> dict[str, bytes]:
    """One chunk as other writers may write it: fields in any order, more than once, and unknown ones."""
    whole = chunks.encode(memoryview(data), checksum)
    said = whole[len(chunks.encode(memoryview(data))) :]
    plain, other = whole[: len(whole) - len(said)], chunks.encode(memoryview(b"another"))
    unknown = b"\x78\x01" + b"\x82\x01\x03abc"
    return {
        "checksum first": said + plain,
        "data twice": other + whole,
        "an unknown field first": unknown + whole,
        "an unknown field behind": whole + unknown,
        "checksum twice": (b"\x19" + bytes(8) if said else b"") + whole,
    }


@pytest.mark.parametrize("how", spelled(b"", None))
def test_a_chunk_may_be_written_as_protobuf_allows_and_the_last_of_a_field_counts(how: str) -> None:
    keys, blocks = keys_of("spelled", 2), blocks_of("spelled", 2)

    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        put = scene.channel.stream_unary("/kvstored.v1.KVStore/Put", None, pb.PutReply.FromString)
        messages = [put_messages(number, keys, [])[0].SerializeToString()]
        for block in blocks:
            messages.append(spelled(block[:100], None)[how])
            messages.append(spelled(block[100:], xxhash.xxh3_64_intdigest(block))[how])
        assert list((await put(iter(messages))).results) == [STORED, STORED]
        assert await scene.get(number, keys) == (2, blocks)

    with_edge(scenario)


# -- what is refused, with nothing visible and nothing held


def bad_puts() -> dict[str, tuple[Callable[[int], list[Any]], str]]:
    keys, blocks = keys_of("bad", 2), blocks_of("bad", 2)
    digest = xxhash.xxh3_64_intdigest(blocks[1])

    def good(number: int, **fields: Any) -> list[Any]:
        return put_messages(number, keys, blocks, **fields)

    def with_part(at: int, **part: Any) -> Callable[[int], list[Any]]:
        def messages(number: int) -> list[Any]:
            found = good(number)
            found[at] = pb.PutChunk(**part)
            return found

        return messages

    short = keys[1][:31]
    return {
        "wrong checksum": (with_part(-1, data=blocks[1], checksum=7), "block 1 does not match its checksum"),
        "wrong bytes": (with_part(-1, data=bytes(BLOCK), checksum=digest), "block 1 does not match its checksum"),
        "no message": (lambda _: [], "the first message of a Put is its header"),
        "bytes first": (lambda n: good(n)[1:], "the first message of a Put is its header"),
        "header twice": (with_part(1, header=pb.PutHeader()), "a header where 65536 more bytes"),
        "an empty message": (with_part(1), "a chunk of 0 bytes; 1 to 65536"),
        "checksum alone": (with_part(1, checksum=7), "a chunk of 0 bytes; 1 to 65536"),
        "checksum too early": (with_part(1, data=b"x", checksum=7), "block 0: a checksum 65535 bytes before its end"),
        "checksum behind": (
            lambda n: [*good(n)[:1], pb.PutChunk(data=blocks[0]), pb.PutChunk(checksum=7)],
            "block 0: no checksum with its last bytes",
        ),
        "a message for each checksum, as it was before": (
            lambda n: [
                *good(n)[:1],
                pb.PutChunk(data=blocks[0]),
                pb.PutChunk(checksum=xxhash.xxh3_64_intdigest(blocks[0])),
            ],
            "block 0: no checksum with its last bytes",
        ),
        "checksums first": (
            lambda n: [*good(n)[:1], pb.PutChunk(checksum=digest), pb.PutChunk(data=blocks[0])],
            "block 0: a chunk of 0 bytes; 1 to 65536",
        ),
        "header with bytes": (
            lambda n: [pb.PutChunk(header=good(n)[0].header, data=b"x"), *good(n)[1:]],
            "in a message of its own",
        ),
        "header with a checksum": (
            lambda n: [pb.PutChunk(header=good(n)[0].header, checksum=0), *good(n)[1:]],
            "in a message of its own",
        ),
        "an empty chunk": (with_part(1, data=b""), "a chunk of 0 bytes; 1 to 65536"),
        "a chunk over the end": (with_part(1, data=bytes(BLOCK + 1)), "a chunk of 65537 bytes; 1 to 65536"),
        "bytes behind the last block": (lambda n: [*good(n), pb.PutChunk(data=b"x")], "more bytes than the 2 blocks"),
        "a short key": (lambda n: put_messages(n, [keys[0], short], blocks), "key 1 has 31 bytes"),
        "a short parent": (lambda n: good(n, parents=[b"", short]), "parent 1 has 31 bytes"),
        "a key of zeros": (lambda n: put_messages(n, [keys[0], bytes(32)], blocks), "zero"),
        "its own parent": (lambda n: good(n, parents=[b"", keys[1]]), "its own parent"),
        "too few parents": (lambda n: good(n, parents=[b""]), "2 keys, 1 parents and 2 depths"),
        "too few depths": (lambda n: good(n, depths=[0]), "2 keys, 2 parents and 1 depths"),
        "a time to live that is none": (lambda n: good(n, hint=pb.Hint(ttl_s=float("nan"))), "ttl_s"),
        "too many keys": (lambda n: put_messages(n, keys_of("many", KEYS_MAX + 1), []), f"{KEYS_MAX + 1} keys"),
    }


@pytest.mark.parametrize("what", bad_puts())
def test_a_put_that_is_wrong_stores_nothing(what: str) -> None:
    messages, said = bad_puts()[what]

    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        with refused(INVALID, said):
            await scene.answer(messages(number))
        await scene.idle()
        assert not scene.visible()

    scene = with_edge(scenario)
    assert not scene.node.internal_errors


def test_a_chunk_above_the_limit_is_refused() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(16 << 20)
        for size_bytes, code in (
            (CHUNK_BYTES_MAX + 1, INVALID),
            (grpc_service.MESSAGE_BYTES_MAX + 1, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            messages = put_messages(number, keys_of("k", 1), [bytes(16 << 20)], chunk_bytes=size_bytes)
            with refused(code):
                await scene.answer(messages)
            await scene.idle()
        assert not scene.visible()
        assert not scene.node.internal_errors

    with_edge(scenario)


def test_a_put_that_ends_too_early_stores_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        messages = put_messages(number, keys_of("k", 3), blocks_of("k", 3), chunk_bytes=BLOCK // 2)
        for end in range(len(messages)):
            with refused(INVALID):
                await scene.answer(messages[:end])
            await scene.idle()
            assert not scene.visible()

    with_edge(scenario)


def test_a_put_cancelled_anywhere_leaves_nothing_and_the_next_one_succeeds() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        keys, blocks = keys_of("k", 3), blocks_of("k", 3)
        messages = put_messages(number, keys, blocks, chunk_bytes=BLOCK // 2)
        for end in range(len(messages)):
            call = scene.stub.Put(timeout=10.0)
            for message in messages[:end]:
                await call.write(message)
            if end:
                # Its reservation is there before the other one comes.
                await scene.until(lambda: scene.store.sessions)
            call.cancel()
            await scene.idle()
            assert not scene.visible(), end
        assert await scene.put(number, keys, blocks) == [STORED] * 3
        assert not scene.node.internal_errors

    with_edge(scenario)


def test_half_a_put_is_in_nobodys_way() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        keys, blocks = keys_of("k", 1), blocks_of("k", 1)
        first = scene.stub.Put(timeout=10.0)
        for message in put_messages(number, keys, blocks_of("other", 1), chunk_bytes=BLOCK // 2)[:2]:
            await first.write(message)
        await scene.until(scene.held)
        assert await scene.match(number, keys) == 0
        assert await scene.put(number, keys, blocks) == [STORED]
        for message in put_messages(number, keys, blocks_of("other", 1), chunk_bytes=BLOCK // 2)[2:]:
            await first.write(message)
        await first.done_writing()
        assert list((await first).results) == [EXISTS]
        assert await scene.get(number, keys) == (1, blocks)

    with_edge(scenario)


# -- clocks


def test_a_put_that_stalls_is_ended_and_its_slots_are_free() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        messages = put_messages(number, keys_of("k", 2), blocks_of("k", 2), chunk_bytes=BLOCK // 2)
        for end in (0, 1, 2, 4):
            call = scene.stub.Put()
            for message in messages[:end]:
                await call.write(message)
            with refused(grpc.StatusCode.DEADLINE_EXCEEDED, "lease.ttl"):
                await call
            await scene.idle()
        assert not scene.visible()

    with_edge(scenario, ttl_s=0.1)


def test_bytes_behind_an_expired_reservation_are_not_written() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        messages = put_messages(number, keys_of("k", 1), [b"x" * BLOCK], chunk_bytes=BLOCK // 2)
        call = scene.stub.Put(timeout=10.0)
        for message in messages[:2]:
            await call.write(message)
        await scene.until(scene.held)
        (session,) = scene.store.sessions.values()
        (slot,) = session.granted
        half = scene.slab.bytes_at(slot >> 32, (slot & 0xFFFFFFFF) * BLOCK, BLOCK)
        await scene.until(lambda: bytes(half[: BLOCK // 2]) == b"x" * (BLOCK // 2))
        scene.store.expire(time.monotonic() + 2 * scene.node.lease_ttl_s)
        assert not scene.held()
        before = bytes(half)
        await call.write(messages[2])
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "its reservation expired"):
            await call
        assert bytes(half) == before
        assert scene.store.counts.reservations_expired == 1

    with_edge(scenario)


def test_a_whole_block_whose_reservation_expires_before_its_commit_is_not_stored() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        messages = put_messages(number, keys_of("k", 2), blocks_of("k", 2), chunk_bytes=BLOCK // 2)
        call = scene.stub.Put(timeout=10.0)
        for message in messages[:4]:
            await call.write(message)
        await scene.until(lambda: len(_granted(scene)) == 2)
        (session,) = scene.store.sessions.values()
        session.granted[_granted(scene)[0]] = 0.0
        scene.store.expire(time.monotonic())
        await call.write(messages[4])
        await call.done_writing()
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "not granted to this session"):
            await call
        assert not scene.visible()

    with_edge(scenario)


def test_a_slow_put_that_never_stalls_outlives_its_first_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for its batch is committed before it could expire."""
    ahead_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)

    async def scenario(scene: Scene) -> None:
        nonlocal ahead_s
        number = await scene.namespace(BLOCK)
        messages = put_messages(number, keys_of("k", 4), blocks_of("k", 4), chunk_bytes=BLOCK // 2)
        call = scene.stub.Put(timeout=10.0)
        await call.write(messages[0])
        for i in range(4):
            for message in messages[1 + 2 * i : 3 + 2 * i]:
                await call.write(message)
            if i < 3:  # it has all of the block, and a slot for the next one
                await scene.until(lambda i=i: len(_granted(scene)) + scene.visible() == i + 2)  # type: ignore[misc]
            else:
                await scene.until(lambda: scene.visible() == 4)
            ahead_s += 0.6 * scene.node.lease_ttl_s
            scene.store.expire(clock.monotonic())
        await call.done_writing()
        assert list((await call).results) == [STORED] * 4
        assert not scene.store.counts.reservations_expired

    monkeypatch.setattr(grpc_streams, "time", clock)
    monkeypatch.setattr(calls, "time", clock)
    with_edge(scenario)


def _granted(scene: Scene) -> list[int]:
    return [slot for session in scene.store.sessions.values() for slot in session.granted]


def test_a_deadline_that_is_over_at_once_leaves_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(BLOCK)
        keys, blocks = keys_of("k", 4), blocks_of("k", 4)
        for timeout in (0, 0.0005, 0.001, 0.002):
            codes = []
            try:
                await scene.put(number, keys, blocks, timeout=timeout)
            except grpc.RpcError as e:
                codes.append(e.code())
            assert codes in ([], [grpc.StatusCode.DEADLINE_EXCEEDED])
            await scene.idle()
        assert await scene.match(number, keys) in (0, 4)
        assert not scene.node.internal_errors

    with_edge(scenario)


def test_a_client_that_stops_reading_holds_nothing_after_a_while() -> None:
    async def scenario(scene: Scene) -> None:
        number = await scene.namespace(1 << 20)
        keys = keys_of("k", 32)
        assert await scene.put(number, keys, blocks_of("k", 32, 1 << 20)) == [STORED] * 32
        call = scene.stub.Get(pb.GetRequest(namespace_id=number, keys=keys))
        assert (await call.read()).blocks == 32
        await scene.until(scene.held)
        began = time.monotonic()
        await scene.until(lambda: not scene.held() and not scene.store.sessions)
        assert time.monotonic() - began < 20.0
        # Everybody else is served meanwhile.
        assert (await scene.stub.Health(pb.HealthRequest(), timeout=10)).healthy
        got = b""
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED, "lease.ttl"):
            while (chunk := await call.read()) is not grpc.aio.EOF:
                got += chunk.data
            await call
        assert len(got) < 32 << 20
        assert not scene.node.internal_errors

    with_edge(scenario, ttl_s=0.2)
