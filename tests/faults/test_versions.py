"""Field fault A23: an old client met a new server and each read the other's fields wrong; hits were silently corrupt.

Seen as LMCache issues 4719 and 4267 and Dynamo issue 14416. Every version that may differ does: the protocol
(by the raw socket, by the SDK, by gRPC), fields that one side does not know, the layout of the shared index,
the size of a namespace's blocks. It works as documented, or is refused naming both sides.
"""

import os
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import grpc
import pytest

from kvstore_client import Client, FailedPrecondition, InvalidArgument
from kvstore_client import session as sessions
from kvstore_client.index import IndexReader
from kvstored.mapping import Mapping
from kvstored.v1 import KEY_BYTES, PROTOCOL, PROTOCOL_OLDEST, kvstore_pb2_grpc, shm
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import Watch, block, running
from tests.wire import Wire, frame

BLOCK = 4096
WRONG = [0, PROTOCOL_OLDEST - 1, PROTOCOL + 1, PROTOCOL + 1000, 2**32 - 1]


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(host__size="16MiB", server__grpc="127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def watch(node: RunningDaemon) -> Watch:
    watch = Watch(node)
    ns = watch.client.raw_namespace("versions", BLOCK)
    ns.put([ns.key(b"x")], block("x", BLOCK))
    eventually(lambda: watch.state()["totals"]["granted"] == 0, 5.0, "what was granted ahead to go back")
    return watch


@pytest.fixture
def before(watch: Watch) -> dict[str, Any]:
    """The daemon with nobody there but the one who watches."""
    eventually(lambda: len(watch.state()["sessions"]) == 1, 5.0, "earlier sessions to be gone")
    return watch.state()


def names_both(message: str, client: int) -> None:
    assert re.search(rf"the client speaks protocol {client}\b", message), message
    assert f"speaks {PROTOCOL_OLDEST} to {PROTOCOL}" in message, message
    assert version("kvstored") in message


# -- the protocol


@pytest.mark.parametrize("protocol", sorted(set(WRONG)))
def test_another_protocol_is_refused_naming_both_and_nothing_is_stored_or_read(
    node: RunningDaemon, watch: Watch, before: dict[str, Any], protocol: int
) -> None:
    ns = watch.client.raw_namespace("versions", BLOCK)
    with Wire(node.socket, hello=False) as wire:
        with pytest.raises(FailedPrecondition) as caught:
            wire.call(hello=pb.HelloRequest(protocol=protocol, client="other version"))
        names_both(str(caught.value), protocol)
        for op in (
            {"index": pb.IndexRequest()},
            {"segments": pb.SegmentsRequest(ids=[1])},
            {"open_namespace": pb.OpenNamespaceRequest(digest=ns.digest, block_bytes=BLOCK)},
            {"acquire": pb.AcquireRequest(namespace_id=1, keys=[ns.key(b"x")])},
            {"reserve": pb.ReserveRequest(namespace_id=1, count=1)},
        ):
            with pytest.raises(FailedPrecondition, match="the first request of a session is Hello"):
                wire.call(**op)
        assert wire.descriptors == [], "nothing to read with"
    eventually(lambda: watch.state() == before, 5.0, "the daemon to be as before")


@pytest.mark.parametrize("protocol", range(PROTOCOL_OLDEST, PROTOCOL + 1))
def test_every_documented_protocol_is_spoken_as_asked_for(node: RunningDaemon, protocol: int) -> None:
    with Wire(node.socket, hello=False) as wire:
        hello = wire.call(hello=pb.HelloRequest(protocol=protocol)).hello
        assert (hello.protocol, hello.oldest_protocol) == (protocol, PROTOCOL_OLDEST)
        assert hello.version == version("kvstored")
        wire.leave()


@pytest.mark.parametrize("protocol", [PROTOCOL + 1, 2**32 - 1])
def test_an_sdk_of_another_version_says_so_when_it_is_made(
    node: RunningDaemon, watch: Watch, before: dict[str, Any], monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    monkeypatch.setattr(sessions, "PROTOCOL", protocol)
    with pytest.raises(FailedPrecondition) as caught:
        Client(node.endpoint)
    names_both(str(caught.value), protocol)
    eventually(lambda: watch.state() == before, 5.0, "the daemon to be as before")


def test_a_daemon_of_another_version_that_comes_later_gives_misses_and_its_reason(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is there already, so it cannot refuse to be made: it misses, and says why."""
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("later", BLOCK)
        keys = [ns.key(b"x")]
        assert ns.put(keys, bytes(BLOCK)).stored == 1
        monkeypatch.setattr(sessions, "PROTOCOL", PROTOCOL + 1)
        daemon.kill()
        daemon.restart()
        assert ns.get(keys) == []
        result = eventually(lambda: explained(ns.put(keys, bytes(BLOCK))), 5.0, "the reason")
        assert result.rejected == 1
        with pytest.raises(FailedPrecondition) as caught:
            client.stats()
        names_both(str(caught.value), PROTOCOL + 1)


def explained(result: object) -> object:
    return result if "protocol" in str(getattr(result, "error", "")) else None


@pytest.mark.parametrize("protocol", ["0", str(PROTOCOL + 1), "9" * 30, "one", "-1", "1.0", ""])
def test_another_protocol_over_grpc_is_refused_naming_both(
    node: RunningDaemon, watch: Watch, before: dict[str, Any], protocol: str
) -> None:
    metadata = (("kvstored-protocol", protocol), ("kvstored-client", "other version"))
    with grpc.insecure_channel(node.grpc_endpoint.removeprefix("grpc://")) as channel:
        stub = kvstore_pb2_grpc.KVStoreStub(channel)
        request = pb.OpenNamespaceRequest(digest=block("grpc", KEY_BYTES), block_bytes=BLOCK)
        with pytest.raises(grpc.RpcError) as caught:
            stub.OpenNamespace(request, metadata=metadata, timeout=30)
        assert caught.value.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
        if protocol.isdecimal():
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert f"{PROTOCOL_OLDEST} to {PROTOCOL}" in caught.value.details()
        with pytest.raises(grpc.RpcError):
            stub.Match(pb.MatchRequest(namespace_id=1, keys=[b"k" * 32]), metadata=metadata, timeout=30)
    after = watch.state()
    assert after["totals"] == before["totals"]
    assert not any(n["digest"] == block("grpc", KEY_BYTES).hex() for n in watch.client.stats()["namespaces"])


# -- fields that one side does not know

UNKNOWN = {
    "a number": b"\xf8\x3f\x07",  # field 1023
    "bytes": b"\xfa\x3f\x05later",
    "a message": b"\xfa\x3f\x04\x08\x01\x10\x02",
    "eight bytes": b"\xf9\x3f" + bytes(8),
    "many": b"\xf8\x3f\x07" * 500,
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_fields_of_a_later_release_are_passed_over(node: RunningDaemon, kind: str) -> None:
    extra = UNKNOWN[kind]
    with Wire(node.socket, hello=False) as wire:

        def call(number: int, field: int, message: bytes) -> pb.Reply:
            inner = message + extra
            length = bytes([len(inner) & 0x7F | 0x80, len(inner) >> 7])
            wire.send(frame(bytes([8, number, field << 3 | 2]) + length + inner + extra))
            return wire.answer(number)

        assert call(1, 2, pb.HelloRequest(protocol=PROTOCOL).SerializeToString()).hello.protocol == PROTOCOL
        request = pb.OpenNamespaceRequest(digest=block(kind, KEY_BYTES), block_bytes=BLOCK)
        number = call(2, 5, request.SerializeToString()).open_namespace.namespace_id
        (slot,) = call(3, 6, pb.ReserveRequest(namespace_id=number, count=1).SerializeToString()).reserve.slots
        commit = pb.CommitRequest(namespace_id=number, keys=[b"k" * 32], slots=[slot], parents=[b""], depths=[0])
        assert list(call(4, 7, commit.SerializeToString()).commit.results) == [pb.STORED]
        match = pb.MatchRequest(namespace_id=number, keys=[b"k" * 32])
        assert call(5, 9, match.SerializeToString()).match.blocks == 1
        remove = pb.RemoveRequest(namespace_id=number, keys=[b"k" * 32])
        assert call(6, 13, remove.SerializeToString()).remove.removed == 1
        wire.leave()


def test_a_client_passes_over_fields_of_a_later_daemon() -> None:
    reply = pb.Reply(id=7, commit=pb.CommitReply(results=[pb.STORED])).SerializeToString()
    assert pb.Reply.FromString(reply + UNKNOWN["bytes"] + UNKNOWN["a number"]).commit.results == [pb.STORED]


def test_a_result_that_an_older_client_does_not_know_is_not_taken_for_stored() -> None:
    reply = pb.CommitReply.FromString(b"\x0a\x02\x00\x63")  # STORED, and number 99
    assert list(reply.results) == [pb.STORED, 99]
    assert list(reply.results).count(pb.STORED) == 1


# -- the layout of the shared index


def header(**changed: int) -> bytes:
    values = {"magic": shm.MAGIC, "version": shm.LAYOUT_VERSION, "epoch": 1, "generation": 1, "capacity": 1024}
    values.update(changed)
    page = bytearray(shm.index_bytes(1024))
    for at, name in (
        (shm.AT_MAGIC, "magic"),
        (shm.AT_VERSION, "version"),
        (shm.AT_EPOCH, "epoch"),
        (shm.AT_GENERATION, "generation"),
        (shm.AT_CAPACITY, "capacity"),
    ):
        page[at : at + 8] = values[name].to_bytes(8, "little")
    return bytes(page)


def reader(content: bytes) -> IndexReader:
    descriptor = os.memfd_create("index")
    try:
        os.write(descriptor, content)
        return IndexReader(descriptor, len(content))
    finally:
        os.close(descriptor)


def test_an_index_of_this_layout_is_read() -> None:
    assert reader(header()).find(b"k" * 32) is None


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"version": shm.LAYOUT_VERSION + 1},
            f"has layout {shm.LAYOUT_VERSION + 1}; .* reads layout {shm.LAYOUT_VERSION}",
        ),
        ({"version": 0}, f"has layout 0; .* reads layout {shm.LAYOUT_VERSION}"),
        ({"magic": shm.MAGIC + 1}, "reads layout"),
        ({"magic": 0}, "reads layout"),
        ({"capacity": 2048}, "an index of 2048 slots does not fit"),
        ({"capacity": 1000}, "an index of 1000 slots does not fit"),
        ({"capacity": 0}, "an index of 0 slots does not fit"),
    ],
)
def test_an_index_of_another_layout_is_refused_naming_both(changed: dict[str, int], told: str) -> None:
    with pytest.raises(FailedPrecondition, match=told):
        reader(header(**changed))


def test_the_daemons_index_has_the_layout_of_the_contract(node: RunningDaemon) -> None:
    with Wire(node.socket) as wire:
        reply = wire.call(index=pb.IndexRequest()).index
        (descriptor,) = wire.descriptors
        mapping = Mapping(descriptor, reply.size_bytes, writable=False)
        assert int.from_bytes(mapping.bytes[:8].tobytes(), "little") == shm.MAGIC
        assert int.from_bytes(mapping.bytes[8:16].tobytes(), "little") == shm.LAYOUT_VERSION
        wire.leave()


# -- a namespace means one size


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK + 1, 2 * BLOCK])
def test_one_digest_with_another_block_size_is_refused_naming_both(
    node: RunningDaemon, watch: Watch, before: dict[str, Any], size: int
) -> None:
    ns = watch.client.raw_namespace("versions", BLOCK)
    with Wire(node.socket) as wire:
        with pytest.raises(FailedPrecondition, match=rf"has blocks of {BLOCK} bytes, not {size}"):
            wire.call(open_namespace=pb.OpenNamespaceRequest(digest=ns.digest, block_bytes=size))
        wire.leave()
    eventually(lambda: watch.state() == before, 5.0, "the daemon to be as before")
    assert ns.get([ns.key(b"x")]) == [block("x", BLOCK)]


def test_blocks_of_another_size_are_neither_stored_nor_read(watch: Watch) -> None:
    ns = watch.client.raw_namespace("versions", BLOCK)
    for size in (BLOCK - 1, BLOCK + 1):
        with pytest.raises(InvalidArgument, match=f"have {BLOCK}|has {BLOCK}"):
            ns.put([ns.key(b"y")], bytes(size))
        with pytest.raises(InvalidArgument, match=f"have {BLOCK}|has {BLOCK}"):
            ns.get_into([ns.key(b"x")], bytearray(size))
    assert ns.match([ns.key(b"y")]).blocks == 0
