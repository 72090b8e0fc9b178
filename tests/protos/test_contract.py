"""The contract agrees with itself: error codes, numbers of the shared memory, generated code."""

import ast
import inspect
import subprocess
import sys
import warnings
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

import kvstored.v1
from kvstore.server.session import CALLS
from kvstored.v1 import errors, kvstore_pb2, kvstore_pb2_grpc, shm
from kvstored.v1 import kvstore_pb2 as pb

CONTRACT = Path(kvstored.v1.__file__).parent


# -- errors


def error_classes() -> list[type[errors.KVStoreError]]:
    found = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.KVStoreError)]
    assert len(found) == 7
    return found


def test_every_code_but_ok_has_one_error_and_every_error_one_code() -> None:
    codes = set(pb.Code.values()) - {pb.OK}
    assert {kind.code for kind in error_classes()} == codes
    assert {kind.code: kind for kind in error_classes()} == errors.BY_CODE


def test_codes_are_those_of_grpc() -> None:
    numbers = {status.name: status.value[0] for status in grpc.StatusCode}
    assert {name: numbers[name] for name, _ in pb.Code.items()} == dict(pb.Code.items())


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_an_error_comes_off_the_wire_as_it_went_on(kind: type[errors.KVStoreError]) -> None:
    sent = pb.Error(code=kind.code, message="why")  # type: ignore[arg-type]
    got = pb.Error.FromString(sent.SerializeToString())
    assert type(errors.from_wire(got.code, got.message)) is kind
    assert str(errors.from_wire(got.code, got.message)) == "why"


@pytest.mark.parametrize("code", [0, 1, 2, 17, 999, -1])
def test_an_unknown_code_is_an_error_still(code: int) -> None:
    assert type(errors.from_wire(code, "why")) is errors.KVStoreError


def test_the_sdk_offers_every_error() -> None:
    import kvstore_client

    for kind in error_classes():
        assert getattr(kvstore_client, kind.__name__) is kind
        assert kind.__name__ in kvstore_client.__all__


# -- shared memory


def test_the_header_is_numbers_one_after_another_within_its_page() -> None:
    places = [shm.AT_MAGIC, shm.AT_VERSION, shm.AT_EPOCH, shm.AT_GENERATION, shm.AT_HEARTBEAT]
    places += [shm.AT_CAPACITY, shm.AT_MOVED, shm.AT_NOTICE, shm.AT_BELOW]
    assert places == list(range(0, 72, 8))
    assert shm.HEADER_BYTES == 4096
    assert shm.HEADER_BYTES % shm.SLOT_BYTES == 0
    assert shm.MAGIC.to_bytes(8, "little") == b"KVSTIDX1"


def test_a_slot_is_its_number_and_then_its_fields() -> None:
    assert shm.FIELDS_AT == 8, "the sequence number is one u64, first"
    assert shm.FIELDS_AT + shm.FIELDS.size == shm.SLOT_BYTES == 64
    packed = shm.FIELDS.pack(b"k" * 32, 1, 2, 3, 4, 5, 6)
    slot = bytes(8) + packed
    assert slot[8:40] == b"k" * 32
    assert [int.from_bytes(slot[at:end], "little") for at, end in ((40, 44), (44, 48), (48, 56))] == [1, 2, 3]
    assert int.from_bytes(slot[shm.FLAGS_AT : shm.FLAGS_AT + 2], "little") == 4
    assert [int.from_bytes(slot[at:end], "little") for at, end in ((58, 60), (60, 64))] == [5, 6]


def test_numbers_that_two_processes_share_are_aligned() -> None:
    assert shm.SLOT_BYTES % 8 == 0
    assert (shm.HEADER_BYTES + shm.FIELDS_AT) % 8 == 0, "the first word of a key is compared as one number"
    assert shm.FLAGS_AT % 2 == 0


def test_flags_are_bits_of_their_own_that_fit_their_field() -> None:
    flags = [shm.GPU, shm.HOST, shm.SSD, shm.REMOTE]
    assert sum(flags) == 15
    assert all(flag & (flag - 1) == 0 for flag in flags)


def test_a_key_is_two_numbers_and_the_rest() -> None:
    assert shm.HASHES.size == kvstored.v1.KEY_BYTES == len(shm.EMPTY_KEY) == 32
    assert shm.HASHES.unpack(bytes(range(32))) == (0x0706050403020100, 0x0F0E0D0C0B0A0908)


@given(st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1))
def test_a_place_is_its_segment_and_its_slot(segment: int, slot: int) -> None:
    ref = shm.slot_ref(segment, slot)
    assert 0 <= ref < 1 << 64, "it travels as fixed64"
    assert (shm.ref_segment(ref), shm.ref_slot(ref)) == (segment, slot)


def test_an_index_is_its_header_and_its_slots() -> None:
    assert shm.index_bytes(0) == shm.HEADER_BYTES
    assert shm.index_bytes(1024) == 4096 + 1024 * 64


# -- messages


def operations(message: type[Message]) -> dict[str, str]:
    """The fields of `op` and the messages they are."""
    found = {}
    for field in message.DESCRIPTOR.oneofs_by_name["op"].fields:
        assert field.message_type is not None
        found[field.name] = field.message_type.name
    return found


def test_every_operation_has_a_call_and_a_reply_of_its_name() -> None:
    requests, replies = operations(pb.Request), operations(pb.Reply)
    assert requests.keys() == replies.keys() == CALLS.keys() | {"hello"}
    for name in requests:
        assert requests[name].removesuffix("Request") == replies[name].removesuffix("Reply")


def test_the_largest_legal_requests_fit_a_frame() -> None:
    keys = [b"k" * 32] * kvstored.v1.KEYS_MAX
    slots, depths = [2**64 - 1] * kvstored.v1.KEYS_MAX, [2**32 - 1] * kvstored.v1.KEYS_MAX
    largest = pb.Request(
        id=2**64 - 1,
        commit=pb.CommitRequest(namespace_id=2**32 - 1, keys=keys, slots=slots, parents=keys, depths=depths),
    )
    assert len(largest.SerializeToString()) < kvstored.v1.FRAME_BYTES_MAX


def test_versions_are_a_range() -> None:
    assert 1 <= kvstored.v1.PROTOCOL_OLDEST <= kvstored.v1.PROTOCOL


def test_a_release_reads_what_it_does_not_know_and_keeps_its_place() -> None:
    """Fields of a later release are skipped, so adding one is no new protocol."""
    later = pb.HelloRequest(protocol=1, client="x").SerializeToString() + b"\xf8\x3f\x07" + b"\xfa\x3f\x03new"
    assert pb.HelloRequest.FromString(later).client == "x"


# -- generated code


def test_the_generated_code_imports_without_a_warning() -> None:
    program = "import kvstored.v1.kvstore_pb2, kvstored.v1.kvstore_pb2_grpc"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_generated_code_needs_no_newer_runtime_than_the_package_asks_for() -> None:
    """protobuf refuses code of a later runtime at import; the package promises protobuf 6.31 and grpcio 1.76."""
    for node in ast.walk(ast.parse((CONTRACT / "kvstore_pb2.py").read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "ValidateProtobufRuntimeVersion":
            numbers = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            assert tuple(numbers[:3]) <= (6, 31, 99)
            break
    else:
        pytest.fail("the generated code names no runtime")
    assert "GRPC_GENERATED_VERSION = '1.76." in (CONTRACT / "kvstore_pb2_grpc.py").read_text()


def test_the_service_is_generated_for_both_sides() -> None:
    methods = {method.name for method in kvstore_pb2.DESCRIPTOR.services_by_name["KVStore"].methods}
    assert methods
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        channel = grpc.insecure_channel("127.0.0.1:1")
        stub = kvstore_pb2_grpc.KVStoreStub(channel)
        channel.close()
    assert methods <= set(vars(stub))
    assert methods <= set(dir(kvstore_pb2_grpc.KVStoreServicer))
