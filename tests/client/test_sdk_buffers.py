"""What callers may hand over as blocks and as room for them, in every size, by every way; and what is refused how."""

import array
import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore_client import Client, Hint, InvalidArgument, Layout, Namespace, Slots
from kvstored.v1.errors import KVStoreError
from tests.nodes import block, running

BLOCK = 4096
COUNT = 4


@pytest.fixture
def ns(client: Client, request: pytest.FixtureRequest) -> Namespace:
    return client.raw_namespace(request.node.name, BLOCK)


def keys_of(ns: Namespace, count: int = COUNT) -> list[bytes]:
    return [ns.key(b"%d" % i) for i in range(count)]


def contents(count: int = COUNT, size_bytes: int = BLOCK) -> list[bytes]:
    return [block(i, size_bytes) for i in range(count)]


def whole(data: list[bytes]) -> bytes:
    return b"".join(data)


def mapped(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


BLOCKS: dict[str, Callable[[list[bytes]], Any]] = {
    "bytes": whole,
    "bytearray": lambda data: bytearray(whole(data)),
    "memoryview": lambda data: memoryview(whole(data)),
    "memoryview of shape": lambda data: memoryview(whole(data)).cast("d", shape=[COUNT, BLOCK // 8]),
    "array.array": lambda data: array.array("d", whole(data)),
    "ctypes": lambda data: (ctypes.c_double * (COUNT * BLOCK // 8)).from_buffer_copy(whole(data)),
    "mmap": lambda data: mapped(whole(data)),
    "array of bytes": lambda data: np.frombuffer(whole(data), np.uint8),
    "array of floats": lambda data: np.frombuffer(whole(data), np.float32),
    "array of halves": lambda data: np.frombuffer(whole(data), np.float16).reshape(COUNT, 2, -1),
    "array of big-endian": lambda data: np.frombuffer(whole(data), ">i8"),
    "array of five dimensions": lambda data: np.frombuffer(whole(data), np.int16).reshape(COUNT, 2, 2, 4, -1),
    "array that cannot be written to": lambda data: np.frombuffer(whole(data), np.uint8),
    "slice of a larger array": lambda data: np.frombuffer(b"x" * BLOCK + whole(data), np.uint8)[BLOCK:],
    "array off its alignment": lambda data: np.frombuffer(b"x" + whole(data), np.uint8)[1:],
    "list of bytes": lambda data: data,
    "tuple of bytes": tuple,
    "list of arrays": lambda data: [np.frombuffer(one, np.float64).reshape(8, -1) for one in data],
    "list of all kinds": lambda data: [
        data[0],
        bytearray(data[1]),
        np.frombuffer(data[2], np.uint16),
        memoryview(data[3]),
    ],
}

OUTS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(COUNT * BLOCK),
    "memoryview": lambda: memoryview(bytearray(COUNT * BLOCK)),
    "array.array": lambda: array.array("b", bytes(COUNT * BLOCK)),
    "ctypes": lambda: (ctypes.c_ubyte * (COUNT * BLOCK))(),
    "ctypes of doubles": lambda: (ctypes.c_double * (COUNT * BLOCK // 8))(),
    "mmap": lambda: mmap.mmap(-1, COUNT * BLOCK),
    "array of bytes": lambda: np.zeros(COUNT * BLOCK, np.uint8),
    "array of floats": lambda: np.zeros((COUNT, BLOCK // 4), np.float32),
    "array of halves": lambda: np.zeros((COUNT, 2, 2, BLOCK // 8), np.float16),
    "slice of a larger array": lambda: np.zeros((COUNT + 2, BLOCK), np.uint8)[1 : COUNT + 1],
    "list of bytearrays": lambda: [bytearray(BLOCK) for _ in range(COUNT)],
    "list of rows": lambda: list(np.zeros((COUNT, BLOCK), np.uint8)),
    "list of far rows": lambda: list(np.zeros((2 * COUNT, BLOCK), np.uint8)[::2]),
    "tuple of all kinds": lambda: (
        bytearray(BLOCK),
        np.zeros(BLOCK // 2, np.int16),
        memoryview(bytearray(BLOCK)),
        array.array("q", bytes(BLOCK)),
    ),
}


def bytes_of(out: Any) -> bytes:
    if isinstance(out, list | tuple):
        return b"".join(bytes_of(one) for one in out)
    if isinstance(out, np.ndarray):
        return out.tobytes()
    return bytes(memoryview(out).cast("B") if not isinstance(out, ctypes.Array) else bytes(out))


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_come_in_every_kind_of_memory(ns: Namespace, kind: str) -> None:
    assert ns.put(keys_of(ns), BLOCKS[kind](contents())).stored == COUNT
    assert ns.get(keys_of(ns)) == contents()
    assert ns.clear() == COUNT


@pytest.mark.parametrize("kind", OUTS)
def test_blocks_go_into_every_kind_of_memory(ns: Namespace, kind: str) -> None:
    ns.put(keys_of(ns), contents())
    out = OUTS[kind]()
    assert ns.get_into(keys_of(ns), out) == COUNT
    assert bytes_of(out) == whole(contents())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "uint8", "int64", "float8_e4m3fn", "bool"])
def test_tensors_are_blocks_and_room_for_them(ns: Namespace, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    data = torch.frombuffer(bytearray(whole(contents())), dtype=torch.uint8)
    if dtype == "bool":
        data = data & 1
    tensor = data.view(kind).reshape(COUNT, 2, -1)
    assert ns.put(keys_of(ns), tensor).stored == COUNT
    out = torch.zeros(COUNT, 2, tensor.shape[2], dtype=kind)
    assert ns.get_into(keys_of(ns), out) == COUNT
    assert torch.equal(out.view(torch.uint8), tensor.view(torch.uint8))
    rows = [torch.zeros(tensor.shape[1:], dtype=kind) for _ in range(COUNT)]
    assert ns.get_into(keys_of(ns), rows) == COUNT
    assert torch.equal(torch.stack(rows).view(torch.uint8), tensor.view(torch.uint8))
    assert ns.clear() == COUNT
    assert ns.put(keys_of(ns), list(tensor)).stored == COUNT
    with ns.acquire(keys_of(ns)) as lease:
        assert torch.equal(lease.torch(1, kind).view(torch.uint8), tensor[1].reshape(-1).view(torch.uint8))


def test_a_tensor_that_learns_is_read_as_it_is(ns: Namespace) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(COUNT, BLOCK // 4, requires_grad=True)
    assert ns.put(keys_of(ns), tensor).stored == COUNT
    assert ns.get(keys_of(ns)) == [np.ones(BLOCK // 4, np.float32).tobytes()] * COUNT


def test_a_short_run_leaves_the_room_behind_it_alone_in_a_list(ns: Namespace) -> None:
    ns.put(keys_of(ns)[:2], contents()[:2])
    out = [bytearray(b"\x07" * BLOCK) for _ in range(COUNT)]
    assert ns.get_into(keys_of(ns), out) == 2
    assert out[:2] == contents()[:2]
    assert out[2:] == [b"\x07" * BLOCK] * 2


# -- what is refused

WRONG_BLOCKS: dict[str, tuple[Callable[[], Any], str]] = {
    "too few bytes": (lambda: bytes(COUNT * BLOCK - 1), rf"has {COUNT * BLOCK - 1} bytes; .* have {COUNT * BLOCK}"),
    "too many bytes": (lambda: bytes(COUNT * BLOCK + 1), rf"has {COUNT * BLOCK + 1} bytes; .* have {COUNT * BLOCK}"),
    "no bytes": (lambda: b"", rf"has 0 bytes; .* have {COUNT * BLOCK}"),
    "one block": (lambda: bytes(BLOCK), rf"has {BLOCK} bytes; .* have {COUNT * BLOCK}"),
    "too few in a list": (lambda: [bytes(BLOCK)] * 3, r"3 \w+ for 4 keys"),
    "too many in a list": (lambda: [bytes(BLOCK)] * 5, r"5 \w+ for 4 keys"),
    "an empty list": (list, r"0 \w+ for 4 keys"),
    "one short in a list": (
        lambda: [bytes(BLOCK), bytes(BLOCK), bytes(BLOCK - 1), bytes(BLOCK)],
        rf"2 has {BLOCK - 1} bytes; .* has {BLOCK}",
    ),
    "every second byte": (lambda: np.zeros(2 * COUNT * BLOCK, np.uint8)[::2], "contiguous"),
    "columns": (lambda: np.zeros((BLOCK, COUNT), np.uint8).T, "contiguous"),
    "a strided view": (lambda: memoryview(bytes(2 * COUNT * BLOCK))[::2], "contiguous"),
    "text": (lambda: "x" * COUNT * BLOCK, "expected a buffer, array or CPU tensor"),
    "a number": (lambda: 7, "expected a buffer, array or CPU tensor"),
    "nothing": (lambda: None, "expected a buffer, array or CPU tensor"),
    "a list of numbers": (lambda: [1, 2, 3, 4], "expected a buffer, array or CPU tensor"),
    "an array of objects": (lambda: np.array([object()] * (COUNT * BLOCK // 8)), "objects"),
}


@pytest.mark.parametrize("kind", WRONG_BLOCKS)
def test_what_are_no_blocks_is_refused_naming_what_was_expected(ns: Namespace, kind: str) -> None:
    make, message = WRONG_BLOCKS[kind]
    with pytest.raises(InvalidArgument, match=message):
        ns.put(keys_of(ns), make())
    with pytest.raises(InvalidArgument, match=message):
        ns.get_into(keys_of(ns), make())
    assert ns.match(keys_of(ns)).blocks == 0


@pytest.mark.parametrize("what", ["sparse", "meta", "strided"])
def test_a_tensor_without_plain_memory_is_refused(ns: Namespace, what: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = {
        "sparse": lambda: torch.eye(COUNT, BLOCK // 4).to_sparse(),
        "meta": lambda: torch.zeros(COUNT, BLOCK // 4, device="meta"),
        "strided": lambda: torch.zeros(BLOCK // 4, COUNT).T,
    }[what]()
    with pytest.raises(InvalidArgument):
        ns.put(keys_of(ns), tensor)


@pytest.mark.parametrize(
    "out",
    [bytes(COUNT * BLOCK), memoryview(bytearray(COUNT * BLOCK)).toreadonly(), [bytes(BLOCK)] * COUNT, "array"],
    ids=["bytes", "a read-only view", "a list of bytes", "a read-only array"],
)
def test_room_that_cannot_be_written_to_is_refused(ns: Namespace, out: Any) -> None:
    ns.put(keys_of(ns), contents())
    if isinstance(out, str):
        out = np.zeros(COUNT * BLOCK, np.uint8)
        out.flags.writeable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        ns.get_into(keys_of(ns), out)


WRONG_KEYS: dict[str, tuple[Any, str]] = {
    "short": ([b"k" * 31], "key 0 is 31 bytes; a key is 32 bytes"),
    "long": ([b"k" * 32, b"k" * 33], "key 1 is 33 bytes; a key is 32 bytes"),
    "text": (["k" * 32], "key 0 is str; a key is 32 bytes"),
    "numbers": ([7], "key 0 is int"),
    "bytearrays": ([bytearray(32)], "key 0 is bytearray"),
    "one key": (b"k" * 32, "keys are a list of bytes, not bytes"),
    "one text": ("k" * 32, "keys are a list of bytes, not str"),
    "a set": ({b"k" * 32}, "keys are a list of bytes, not set"),
    "nothing": (None, "keys are a list of bytes, not NoneType"),
    "an iterator": (iter([b"k" * 32]), "keys are a list of bytes"),
}


def commit(slots: Slots, keys: Any) -> None:
    with slots:
        slots.commit(keys)


@pytest.mark.parametrize("kind", WRONG_KEYS)
def test_what_are_no_keys_is_refused_by_every_call(ns: Namespace, kind: str) -> None:
    keys, message = WRONG_KEYS[kind]
    calls: list[Callable[[], Any]] = [
        lambda: ns.match(keys),
        lambda: ns.get(keys),
        lambda: ns.get_into(keys, bytearray(BLOCK)),
        lambda: ns.put(keys, bytes(BLOCK)),
        lambda: ns.acquire(keys),
        lambda: ns.prefetch(keys),
        lambda: ns.remove(keys),
        lambda: ns.pin(keys, ttl_s=1.0),
        lambda: ns.unpin(keys),
        lambda: commit(ns.reserve(2), keys),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match=message):
            call()


def test_keys_in_a_tuple_are_keys(ns: Namespace) -> None:
    keys = tuple(keys_of(ns))
    assert ns.put(keys, contents()).stored == COUNT
    assert ns.match(keys).blocks == COUNT
    assert ns.get(keys) == contents()
    assert ns.remove(keys) == COUNT


@pytest.mark.parametrize("start", [-1, COUNT + 1, 1.0, None, "0"], ids=repr)
def test_a_start_outside_the_chain_is_refused(ns: Namespace, start: Any) -> None:
    for call in (
        lambda: ns.put(keys_of(ns), contents(), start=start),
        lambda: ns.get_into(keys_of(ns), bytearray(BLOCK), start=start),
    ):
        with pytest.raises(InvalidArgument, match="start="):
            call()


@pytest.mark.parametrize("n", [0, -1, 1.5, None, "2"], ids=repr)
def test_a_number_of_slots_that_is_none_is_refused(ns: Namespace, n: Any) -> None:
    with pytest.raises(InvalidArgument, match="n="):
        ns.reserve(n)


def test_a_commit_of_more_keys_than_slots_is_refused(ns: Namespace) -> None:
    with ns.reserve(2) as slots:
        for keys, start in ((keys_of(ns, 3), 0), (keys_of(ns, 2), 2), ([], 0)):
            with pytest.raises(InvalidArgument, match="for 2 slots"):
                slots.commit(keys, start)
        for view in slots.views:
            view[:] = bytes(BLOCK)
        assert slots.commit(keys_of(ns, 2)).stored == 2, "a refused call has changed nothing"


NUMBERS = [0, -1.0, float("nan"), float("inf")]


@pytest.mark.parametrize("seconds", NUMBERS)
def test_times_that_are_none_are_refused(ns: Namespace, seconds: float) -> None:
    ns.put(keys_of(ns), contents())
    with pytest.raises(InvalidArgument):
        ns.pin(keys_of(ns), ttl_s=seconds)
    with pytest.raises(InvalidArgument, match="timeout_s="):
        ns.acquire(keys_of(ns), timeout_s=seconds)
    with pytest.raises(InvalidArgument, match="deadline_s="):
        ns.prefetch(keys_of(ns), deadline_s=seconds)
    if seconds:
        with pytest.raises(InvalidArgument, match="ttl_s"):
            Hint(ttl_s=seconds)


@pytest.mark.parametrize(
    "fields",
    [{"conversation": "x" * 257}, {"tokens_generated": -1}, {"tokens_generated": 1 << 32}, {"priority": 1 << 31}],
    ids=str,
)
def test_hints_that_cannot_travel_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Hint(**fields)


@pytest.mark.parametrize("size", [0, -1, 1 << 32, 1.5, None, "4096"], ids=repr)
def test_a_block_size_that_is_none_is_refused(client: Client, size: Any) -> None:
    with pytest.raises(InvalidArgument, match="block_bytes="):
        client.raw_namespace("wrong", size)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "float99"),
        ("num_layers", 0),
        ("num_kv_heads", -1),
        ("head_dim", 1.5),
        ("block_tokens", None),
        ("tp_rank", 2),
        ("tp_rank", -1),
        ("pp_size", 0),
    ],
)
def test_a_layout_that_cannot_be_is_refused_naming_its_field(field: str, value: Any) -> None:
    right: dict[str, Any] = {"model": "m", "dtype": "int8", "num_layers": 1, "num_kv_heads": 1, "head_dim": 1}
    right |= {"block_tokens": 1, "tp_size": 2, field: value}
    with pytest.raises(InvalidArgument, match=field):
        Layout(**right)


# -- sizes


@pytest.mark.parametrize("size_bytes", [1, 2, 63, 4095, 4096, 4097, 12345, (1 << 20) - 1, 1 << 20, (3 << 20) + 1])
def test_blocks_of_any_size_come_back_exact(client: Client, size_bytes: int) -> None:
    ns = client.raw_namespace(f"size {size_bytes}", size_bytes)
    count = 5
    data = contents(count, size_bytes)
    assert ns.put(keys_of(ns, count), data).stored == count
    assert ns.get(keys_of(ns, count)) == data
    out = np.zeros(count * size_bytes, np.uint8)
    assert ns.get_into(keys_of(ns, count), out) == count
    assert out.tobytes() == whole(data)
    with ns.acquire(keys_of(ns, count)) as lease:
        assert [bytes(view) for view in lease.views] == data
    assert ns.clear() == count


def test_a_block_larger_than_an_ordinary_segment_has_one_of_its_own(client: Client) -> None:
    segment_bytes = client.stats()["host"]["segment_bytes"]
    ns = client.raw_namespace("large", 5 * segment_bytes + 17)
    data = contents(2, ns.block_bytes)
    assert ns.put(keys_of(ns, 2), data).stored == 2
    assert ns.get(keys_of(ns, 2)) == data
    assert ns.clear() == 2


def test_a_block_as_large_as_the_memory_is_stored_and_a_larger_one_refused() -> None:
    with running(host__size="8MiB") as daemon, Client(daemon.endpoint) as client:
        small = client.raw_namespace("small", 4096)
        assert small.put(keys_of(small, 100), contents(100)).stored == 100
        ns = client.raw_namespace("all of it", 8 << 20)
        data = contents(2, 8 << 20)
        for i in range(2):
            assert ns.put([ns.key(b"%d" % i)], data[i]).stored == 1
            assert ns.get([ns.key(b"%d" % i)]) == [data[i]]
        with pytest.raises(InvalidArgument, match=f"is not between 1 and {8 << 20}"):
            client.raw_namespace("more", (8 << 20) + 1)


SIZES = [1, 100, 4096, 5000, 8192, 12288, 16384, 20000, 32768, 40000, 65536, 81920, 98304, 131072, 200000, 262144]
SIZES += [400000, 524288, 1 << 20, 3 << 20]


@pytest.fixture(scope="module")
def crowded() -> Iterator[Client]:
    """64 MiB for all the sizes there are."""
    with running() as daemon, Client(daemon.endpoint, timeout_s=10.0) as client:
        yield client


def test_twenty_block_sizes_share_a_memory_too_small_for_them(crowded: Client) -> None:
    """Each in turn gets room from the others, every put is stored, and no byte is another's."""
    assert len(set(SIZES)) == 20
    namespaces = [crowded.raw_namespace(f"size {size}", size) for size in SIZES]
    for turn in range(3):
        for ns in namespaces:
            count = max(2, min(64, (6 << 20) // ns.block_bytes))
            keys = [ns.key(b"%d/%d" % (turn, i)) for i in range(count)]
            data = [block((turn, ns.block_bytes, i), ns.block_bytes) for i in range(count)]
            assert ns.put(keys, data).rejected == 0
            found = ns.get(keys)
            assert found == data[: len(found)]
            for other in namespaces:
                theirs = [other.key(b"%d/%d" % (turn, i)) for i in range(2)]
                for i, one in enumerate(other.get(theirs)):
                    assert one == block((turn, other.block_bytes, i), other.block_bytes)
    assert crowded.health().healthy
    assert crowded.stats()["host"]["segments"] >= 40


def test_a_refused_call_is_of_the_tree_of_errors() -> None:
    assert issubclass(InvalidArgument, KVStoreError)
