"""What gRPC callers have of the tier below memory: bytes streamed from it, tickets, durable Puts, honest figures."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
import xxhash

from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.kvstore_pb2_grpc import KVStoreStub
from tests.conftest import eventually
from tests.nodes import block
from tests.server.gated_disk import READ, WRITE, GatedDaemon, gated
from tests.server.grpc_edge import put_messages, refused
from tests.server.ssd_program import BLOCK, Program, keys_of, row_of

WAIT_S = 60.0
HOST, SSD = pb.TIER_HOST, pb.TIER_SSD
GET, MATCH, ACQUIRE = pb.OPERATION_GET, pb.OPERATION_MATCH, pb.OPERATION_ACQUIRE


@pytest.fixture(scope="module")
def node() -> Iterator[GatedDaemon]:
    with gated({"GET_LOAD_S": 3.0, "DURABLE_S": 5.0}, server__grpc="127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def stub(node: GatedDaemon) -> Iterator[Any]:
    with grpc.insecure_channel(node.grpc_endpoint.removeprefix("grpc://")) as channel:
        yield KVStoreStub(channel)


@pytest.fixture
def program(node: GatedDaemon) -> Iterator[Program]:
    """A session, for what the daemon says of itself; its namespace is that of the calls."""
    with Program(node) as program:
        yield program
        program.release_all()
        eventually(lambda: not program.leased() and not program.stats().ssd.tickets, what="all to be given back")


def put(stub: Any, number: int, keys: Sequence[bytes], *, durable: bool = False) -> pb.PutReply:
    messages = put_messages(number, keys, [block(key, BLOCK) for key in keys], durable=durable)
    reply: pb.PutReply = stub.Put(iter(messages), timeout=WAIT_S)
    return reply


def get(stub: Any, number: int, keys: Sequence[bytes]) -> tuple[int, list[bytes]]:
    """How many blocks were announced, and those that came whole and verified."""
    announced, blocks, data = -1, [], b""
    for chunk in stub.Get(pb.GetRequest(namespace_id=number, keys=keys), timeout=WAIT_S):
        if announced < 0:
            announced = chunk.blocks
            continue
        data += chunk.data
        if chunk.HasField("checksum"):
            assert chunk.checksum == xxhash.xxh3_64_intdigest(data)
            blocks.append(data)
            data = b""
    return announced, blocks


def test_a_get_streams_what_only_the_ssd_has_and_counts_in_its_row(stub: Any, program: Program) -> None:
    keys = keys_of("streamed", 100)  # more than memory holds
    for at in range(0, 100, 20):
        parents = [keys[i - 1] if i else b"" for i in range(at, at + 20)]
        part = keys[at : at + 20]
        messages = put_messages(
            program.number, part, [block(key, BLOCK) for key in part], parents=parents, depths=range(at, at + 20),
            durable=True,
        )  # fmt: skip
        reply = stub.Put(iter(messages), timeout=WAIT_S)
        assert (list(reply.results), reply.not_durable) == ([pb.STORED] * 20, "")
    before = program.stats()
    announced, blocks = get(stub, program.number, [*keys, *keys_of("absent", 1)])
    assert (announced, len(blocks)) == (100, 100)
    assert blocks == [block(key, BLOCK) for key in keys]
    after = program.stats()
    row, was = row_of(after, GET, SSD), row_of(before, GET, SSD)
    assert (row.calls - (was.calls if was else 0), row.hits - (was.hits if was else 0)) == (1, 100)
    assert row.misses - (was.misses if was else 0) == 1
    assert after.counters.hits - before.counters.hits == 100
    assert after.counters.misses - before.counters.misses == 1
    # What is in memory is of its row.
    assert len(get(stub, program.number, keys[-4:])[1]) == 4
    assert row_of(program.stats(), GET, HOST).hits == row_of(after, GET, HOST).hits + 4


def test_a_match_names_the_tier_of_each_block(stub: Any, program: Program) -> None:
    keys = keys_of("tiers", 80)
    program.put(keys)
    before = program.stats()
    reply = stub.Match(pb.MatchRequest(namespace_id=program.number, keys=keys))
    assert reply.blocks == len(reply.tiers) == 80
    assert list(reply.tiers) == program.match(keys)
    assert set(reply.tiers) == {HOST, SSD}
    row, was = row_of(program.stats(), MATCH, SSD), row_of(before, MATCH, SSD)
    assert row.hits - (was.hits if was else 0) == 80


def test_a_get_whose_part_does_not_come_ends_as_a_miss(node: GatedDaemon, stub: Any, program: Program) -> None:
    keys = keys_of("stuck", 8)
    program.put(keys)
    program.fill_memory("stuck filler")
    program.put(hot := keys_of("stuck hot", 1))
    with node.closed(READ):
        began = time.monotonic()
        assert get(stub, program.number, [*hot, *keys]) == (9, [block(hot[0], BLOCK)])
        assert get(stub, program.number, keys) == (8, [])
        assert time.monotonic() - began < WAIT_S / 3
        assert get(stub, program.number, hot)[1] == [block(hot[0], BLOCK)]
    eventually(lambda: len(get(stub, program.number, keys)[1]) == 8, what="the SSD to be well again")


def test_many_gets_of_more_than_may_be_held_all_end_whole(node: GatedDaemon, stub: Any, program: Program) -> None:
    """Each waits for its turn to hold something, and is served."""
    keys = keys_of("crowd", 100)
    program.put(keys)

    async def crowd() -> list[int]:
        async with grpc.aio.insecure_channel(node.grpc_endpoint.removeprefix("grpc://")) as channel:
            return await asyncio.gather(*(one(KVStoreStub(channel), i * 6) for i in range(12)))

    async def one(stub: Any, at: int) -> int:
        wanted, whole, data = keys[at : at + 30], 0, b""
        async for chunk in stub.Get(pb.GetRequest(namespace_id=program.number, keys=wanted), timeout=WAIT_S):
            data += chunk.data
            if chunk.HasField("checksum"):
                assert data == block(wanted[whole], BLOCK)
                whole, data = whole + 1, b""
        return whole

    assert asyncio.run(crowd()) == [30] * 12


def test_a_put_of_what_the_ssd_has_need_not_send_it(stub: Any, program: Program) -> None:
    keys = keys_of("put before", 4)
    program.put(keys)
    program.fill_memory("put before filler")
    assert program.match(keys) == [SSD] * 4
    before = program.stats().counters
    reply = put(stub, program.number, keys, durable=True)
    assert (list(reply.results), reply.not_durable) == ([pb.EXISTS] * 4, "")
    after = program.stats().counters
    assert (after.stored - before.stored, after.existing - before.existing) == (0, 4)


def test_a_put_that_the_disk_is_too_slow_for_is_stored_and_says_so(
    node: GatedDaemon, stub: Any, program: Program
) -> None:
    keys = keys_of("slow put", 4)
    with node.closed(WRITE):
        reply = put(stub, program.number, keys, durable=True)
    assert list(reply.results) == [pb.STORED] * 4
    assert "within" in reply.not_durable
    assert len(program.match(keys)) == 4


def test_prefetches_over_grpc_are_of_the_tenant(node: GatedDaemon, stub: Any, program: Program) -> None:
    keys = keys_of("prefetched", 8)
    program.put(keys)
    program.fill_memory("prefetched filler")
    request = pb.PrefetchRequest(namespace_id=program.number, keys=keys, deadline_ms=10_000)
    with node.closed(READ):
        started = stub.Prefetch(request)
        assert started.state == pb.TICKET_RUNNING
        waiting = stub.Ticket(pb.TicketRequest(ticket=started.ticket, wait_ms=10))
        assert (waiting.state, waiting.waiting) == (pb.TICKET_RUNNING, 8)
        other = (("kvstored-tenant", "another"),)
        assert stub.Ticket(pb.TicketRequest(ticket=started.ticket), metadata=other).state == pb.TICKET_NONE
        assert program.ticket(started.ticket, wait_ms=0).state == pb.TICKET_NONE  # a session has its own
    asked = pb.TicketRequest(ticket=started.ticket, wait_ms=1000)
    ended = eventually(lambda: (found := stub.Ticket(asked)).state != pb.TICKET_RUNNING and found)
    assert (ended.state, ended.blocks, ended.loaded, ended.why) == (pb.TICKET_DONE, 8, 8, "")
    assert program.match(keys) == [HOST] * 8


def test_a_load_over_grpc_is_for_a_session_and_is_its_own(node: GatedDaemon, stub: Any, program: Program) -> None:
    keys = keys_of("bound load", 8)
    program.put(keys)
    program.fill_memory("bound load filler")
    request = program.load_request(keys)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "Load is for calls bound to a session"):
        stub.Load(request)
    token, before = _token(program), row_of(program.stats(), ACQUIRE, SSD)
    with node.closed(READ):
        first = stub.Load(program.load_request(keys, wait_ms=0), metadata=token)
        assert first.ticket
    asked = pb.LoadRequest(ticket=first.ticket, wait_ms=1000)
    reply = eventually(lambda: not (found := stub.Load(asked, metadata=token)).ticket and found)
    assert (len(reply.slots), reply.loaded, reply.why) == (8, 8, "")
    program.check(keys, reply.slots)
    row = row_of(program.stats(), ACQUIRE, SSD)
    assert (row.calls - (before.calls if before else 0), row.hits - (before.hits if before else 0)) == (1, 8)


def test_a_load_over_grpc_whose_caller_goes_away_is_given_up(node: GatedDaemon, stub: Any, program: Program) -> None:
    keys = keys_of("gone caller", 8)
    program.put(keys)
    program.fill_memory("gone caller filler")
    token = _token(program)
    with node.closed(READ):
        call = stub.Load.future(program.load_request(keys), metadata=token)
        eventually(lambda: program.stats().ssd.tickets == 1, what="the load to wait")
        call.cancel()
        eventually(lambda: program.stats().ssd.tickets == 0, what="the load to be given up")
    assert program.leased() == 0


def _token(program: Program) -> tuple[tuple[str, str], ...]:
    return (("kvstored-session", program.token.hex()),)
