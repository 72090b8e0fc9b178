"""The SDK as its users are promised it: every call, its names, and what it means, by every way to the daemon."""

import inspect
from collections.abc import Callable

import numpy as np
import pytest

import kvstore_client
from kvstore_client import (
    Client,
    FailedPrecondition,
    Hint,
    InvalidArgument,
    Layout,
    Namespace,
    PutResult,
    ResourceExhausted,
    Slots,
)
from kvstored.v1 import KEY_BYTES
from tests.conftest import eventually
from tests.nodes import block

BLOCK = 8192


@pytest.fixture
def ns(client: Client, request: pytest.FixtureRequest) -> Namespace:
    """A namespace of the test's own."""
    return client.raw_namespace(request.node.name, BLOCK)


def some(ns: Namespace, count: int = 8, name: str = "k") -> tuple[list[bytes], list[bytes]]:
    """Keys of a chain, and the block of each."""
    keys = [ns.key(f"{name} {i}".encode()) for i in range(count)]
    return keys, [block((ns.digest, name, i), ns.block_bytes) for i in range(count)]


def counts(result: PutResult) -> tuple[int, int, int]:
    return result.stored, result.existing, result.rejected


# -- names

PROMISED: dict[str, tuple[Callable[..., object], list[str]]] = {
    "Client": (Client.__init__, ["endpoint"]),
    "namespace": (Client.namespace, ["layout", "salt", "adapter"]),
    "raw_namespace": (Client.raw_namespace, ["name", "block_bytes"]),
    "stats": (Client.stats, []),
    "health": (Client.health, []),
    "close": (Client.close, []),
    "keys": (Namespace.keys, ["token_ids"]),
    "key": (Namespace.key, ["name"]),
    "match": (Namespace.match, ["keys"]),
    "put": (Namespace.put, ["keys", "blocks", "start"]),
    "get_into": (Namespace.get_into, ["keys", "out", "start"]),
    "get": (Namespace.get, ["keys"]),
    "acquire": (Namespace.acquire, ["keys", "timeout_s"]),
    "reserve": (Namespace.reserve, ["n"]),
    "prefetch": (Namespace.prefetch, ["keys", "deadline_s"]),
    "remove": (Namespace.remove, ["keys"]),
    "pin": (Namespace.pin, ["keys", "ttl_s"]),
    "unpin": (Namespace.unpin, ["keys"]),
    "clear": (Namespace.clear, []),
    "commit": (Slots.commit, ["keys"]),
}


@pytest.mark.parametrize("name", PROMISED)
def test_arguments_have_their_names_and_order(name: str) -> None:
    function, wanted = PROMISED[name]
    parameters = list(inspect.signature(function).parameters)[1:]
    assert parameters[: len(wanted)] == wanted


def test_keyword_arguments_have_their_names() -> None:
    assert {"durable", "hint"} <= set(inspect.signature(Namespace.put).parameters)
    assert inspect.signature(Namespace.put).parameters["start"].default == 0
    assert inspect.signature(Namespace.get_into).parameters["start"].default == 0
    assert inspect.signature(Namespace.acquire).parameters["timeout_s"].default == 1.0
    fields = ["model", "dtype", "num_layers", "num_kv_heads", "head_dim", "block_tokens"]
    fields += ["revision", "tp_rank", "tp_size", "pp_rank", "pp_size", "packing"]
    assert list(inspect.signature(Layout).parameters) == fields
    assert list(inspect.signature(Hint).parameters) == ["conversation", "tokens_generated", "priority", "ttl_s"]
    for name in ("Client", "Layout", "Hint", "KVStoreError", "Unavailable", "ResourceExhausted", "InvalidArgument"):
        assert name in kvstore_client.__all__


def test_a_layout_knows_the_size_of_its_blocks(client: Client) -> None:
    sizes = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
    for dtype, size in sizes.items():
        layout = Layout(model="m", dtype=dtype, num_layers=3, num_kv_heads=2, head_dim=8, block_tokens=16)
        assert layout.block_bytes == 2 * 3 * 16 * 2 * 8 * size
        assert client.namespace(layout).block_bytes == layout.block_bytes


# -- put, match, get


def test_what_is_put_is_matched_and_got(ns: Namespace) -> None:
    keys, data = some(ns)
    assert ns.match(keys).blocks == 0
    assert ns.get(keys) == []
    assert counts(ns.put(keys, data)) == (8, 0, 0)
    found = ns.match(keys)
    assert found.blocks == 8
    assert found.tiers == ["host"] * 8
    out = np.zeros(8 * BLOCK, np.uint8)
    assert ns.get_into(keys, out) == 8
    assert out.tobytes() == b"".join(data)
    assert ns.get(keys) == data
    assert all(type(one) is bytes for one in ns.get(keys))


def test_tokens_name_blocks_by_all_that_came_before(client: Client) -> None:
    layout = Layout(model="tokens", dtype="int8", num_layers=1, num_kv_heads=1, head_dim=16, block_tokens=32)
    ns = client.namespace(layout, salt=client.endpoint)
    keys = ns.keys(range(100))
    assert len(keys) == 3
    data = [block(i, ns.block_bytes) for i in range(3)]
    assert counts(ns.put(keys, data)) == (3, 0, 0)
    assert ns.match(ns.keys(range(1000))).blocks == 3
    assert ns.get(ns.keys([*range(64), *range(500, 600)])) == data[:2]
    assert ns.match(ns.keys([7, *range(1, 100)])).blocks == 0
    assert ns.clear() == 3


def test_a_second_put_finds_what_is_there(ns: Namespace) -> None:
    keys, data = some(ns)
    assert counts(ns.put(keys[:3], data[:3])) == (3, 0, 0)
    assert counts(ns.put(keys, data)) == (5, 3, 0)
    assert counts(ns.put(keys, [bytes(BLOCK)] * 8)) == (0, 8, 0), "the first to commit wins"
    assert ns.get(keys) == data


@pytest.mark.parametrize("start", [0, 1, 5, 8])
def test_start_says_where_in_the_chain_the_blocks_begin(ns: Namespace, start: int) -> None:
    keys, data = some(ns)
    assert counts(ns.put(keys[:start], data[:start])) == (start, 0, 0)
    assert counts(ns.put(keys, data[start:], start=start)) == (8 - start, 0, 0)
    assert ns.get(keys) == data
    out = np.full((8 - start) * BLOCK, 7, np.uint8)
    assert ns.get_into(keys, out, start=start) == 8 - start
    assert out.tobytes() == b"".join(data[start:])


@pytest.mark.parametrize("missing", [[0], [3], [7], [0, 1, 2], [2, 5], range(8)], ids=str)
def test_only_the_leading_run_is_found(ns: Namespace, missing: list[int]) -> None:
    keys, data = some(ns)
    ns.put(keys, data)
    assert ns.remove([keys[i] for i in missing]) == len(missing)
    leading = missing[0]
    assert ns.match(keys).blocks == leading
    assert ns.get(keys) == data[:leading]
    out = np.full(8 * BLOCK, 7, np.uint8)
    assert ns.get_into(keys, out) == leading
    assert out[: leading * BLOCK].tobytes() == b"".join(data[:leading])
    with ns.acquire(keys) as lease:
        assert [bytes(view) for view in lease.views] == data[:leading]
    for start in range(8):
        run = next((i for i in range(start, 8) if i in missing), 8) - start
        assert ns.get_into(keys, [bytearray(BLOCK) for _ in range(8 - start)], start) == run
    assert counts(ns.put(keys, data)) == (len(missing), 8 - len(missing), 0), "what is missing is filled in"
    assert ns.get(keys) == data


def test_nothing_asked_is_nothing_done(ns: Namespace) -> None:
    keys, data = some(ns)
    ns.put(keys, data)
    assert ns.match([]).blocks == 0
    assert ns.match([]).tiers == []
    assert ns.get([]) == []
    assert ns.get_into([], []) == 0
    assert ns.get_into([], bytearray()) == 0
    assert ns.get_into(keys, [], start=8) == 0
    assert counts(ns.put([], [])) == (0, 0, 0)
    assert counts(ns.put(keys, [], start=8)) == (0, 0, 0)
    assert ns.remove([]) == ns.pin([], ttl_s=1) == ns.unpin([]) == 0
    assert ns.prefetch([]).wait() == 0
    with ns.acquire([]) as lease:
        assert (len(lease), lease.views) == (0, [])
    assert ns.get(keys) == data


def test_a_key_may_be_asked_for_twice(ns: Namespace) -> None:
    keys, data = some(ns, 2)
    ns.put(keys, data)
    again = [keys[0], keys[1], keys[0], keys[0]]
    wanted = [data[0], data[1], data[0], data[0]]
    assert ns.match(again).blocks == 4
    assert ns.get(again) == wanted
    with ns.acquire(again) as lease:
        assert [bytes(view) for view in lease.views] == wanted
    assert ns.remove([keys[0], keys[0]]) == 1


def test_two_namespaces_and_two_tenants_do_not_meet(client: Client, ns: Namespace, endpoint: str) -> None:
    keys, data = some(ns)
    ns.put(keys, data)
    other = client.raw_namespace("another", BLOCK)
    assert other.match([other.key(b"k %d" % i) for i in range(8)]).blocks == 0
    salted = client.raw_namespace("another", BLOCK, salt="s")
    assert salted.digest != other.digest
    with Client(endpoint, tenant="other-tenant") as stranger:
        theirs = stranger.raw_namespace("another", BLOCK)
        assert theirs.digest == other.digest
        assert theirs.match(keys).blocks == 0
        assert theirs.get(keys) == []
    assert ns.get(keys) == data


# -- leases


def test_a_lease_shows_blocks_in_place_and_read_only(ns: Namespace) -> None:
    keys, data = some(ns)
    ns.put(keys, data)
    with ns.acquire([*keys, ns.key(b"absent")], timeout_s=5.0) as lease:
        assert len(lease) == 8
        assert [bytes(view) for view in lease.views] == data
        for view in lease.views:
            assert isinstance(view, memoryview)
            assert view.readonly
            with pytest.raises(TypeError):
                view[0] = 1
        array = lease.numpy(2)
        assert array.tobytes() == data[2]
        assert not array.flags.writeable
        assert lease.numpy(3, np.float32).shape == (BLOCK // 4,)
        with pytest.raises(IndexError):
            lease.numpy(8)
    assert array.tobytes() == data[2], "what was made from a view keeps its block"
    with pytest.raises(FailedPrecondition, match="released"):
        _ = lease.views


def test_a_lease_outlives_its_block_and_its_client(ns: Namespace, endpoint: str) -> None:
    keys, data = some(ns)
    ns.put(keys, data)
    with Client(endpoint) as other:
        theirs = other.raw_namespace("x", BLOCK)
        theirs._identity = ns._identity
        array = theirs.acquire(keys).numpy(5)
    assert ns.remove(keys) == 8
    assert array.tobytes() == data[5]


def test_a_tensor_of_a_lease_shares_its_memory(ns: Namespace) -> None:
    torch = pytest.importorskip("torch")
    keys, data = some(ns)
    ns.put(keys, data)
    with ns.acquire(keys) as lease:
        tensor = lease.torch(1)
        assert tensor.dtype is torch.uint8
        assert tensor.numpy().tobytes() == data[1]
        assert lease.torch(1, torch.bfloat16).shape == (BLOCK // 2,)
    assert tensor.numpy().tobytes() == data[1]


# -- reservations


def test_reserved_slots_are_filled_and_committed(ns: Namespace) -> None:
    keys, data = some(ns)
    with ns.reserve(8) as slots:
        assert len(slots) == len(slots.views) == 8
        for view, content in zip(slots.views, data, strict=True):
            assert not view.readonly
            assert len(view) == BLOCK
            view[:] = content
        assert ns.match(keys).blocks == 0, "nothing is there before the commit"
        assert counts(slots.commit(keys)) == (8, 0, 0)
        with pytest.raises(FailedPrecondition, match="committed or aborted"):
            slots.commit(keys)
        with pytest.raises(FailedPrecondition, match="committed or aborted"):
            _ = slots.views
    assert ns.get(keys) == data


def test_a_commit_may_begin_within_a_chain_and_need_fewer_slots(ns: Namespace) -> None:
    keys, data = some(ns)
    ns.put(keys[:5], data[:5])
    with ns.reserve(6) as slots:
        for view, content in zip(slots.views, data[5:], strict=False):
            view[:] = content
        assert counts(slots.commit(keys, 5, hint=Hint(conversation="c"))) == (3, 0, 0)
    assert ns.get(keys) == data


def test_of_what_exists_already_nothing_is_overwritten(ns: Namespace) -> None:
    keys, data = some(ns)
    ns.put(keys[:3], data[:3])
    with ns.reserve(8) as slots:
        for i, view in enumerate(slots.views):
            view[:] = data[i] if i >= 3 else bytes(BLOCK)
        assert counts(slots.commit(keys)) == (5, 3, 0)
    assert ns.get(keys) == data


@pytest.mark.parametrize("how", ["leaving", "abort", "an exception"])
def test_without_a_commit_it_is_as_if_nothing_was_reserved(ns: Namespace, how: str) -> None:
    keys, data = some(ns)
    slots = ns.reserve(8)
    if how == "abort":
        slots.views[0][:] = data[0]
        slots.abort()
        slots.abort()
    elif how == "leaving":
        with slots:
            slots.views[0][:] = data[0]
    else:
        with pytest.raises(ZeroDivisionError):
            fail_within(slots)
    with pytest.raises(FailedPrecondition):
        slots.commit(keys)
    assert ns.match(keys).blocks == 0
    assert counts(ns.put(keys, data)) == (8, 0, 0)


def fail_within(slots: Slots) -> None:
    with slots:
        slots.views[0][:10] = bytes(10)
        raise ZeroDivisionError


# -- hints, pins, prefetch, removal


def test_a_time_to_live_ends(ns: Namespace) -> None:
    keys, data = some(ns)
    assert counts(ns.put(keys[:4], data[:4], hint=Hint(ttl_s=3.0))) == (4, 0, 0)
    assert counts(ns.put(keys, data[4:], start=4)) == (4, 0, 0)
    assert ns.match(keys).blocks == 8
    eventually(lambda: ns.match(keys).blocks == 0, 5.0, "the time to be over")
    assert ns.get_into(keys, bytearray(4 * BLOCK), start=4) == 4, "others stay"
    assert counts(ns.put(keys, data)) == (4, 4, 0)
    assert ns.get(keys) == data


def test_hints_travel_and_change_no_byte(ns: Namespace) -> None:
    keys, data = some(ns, 3)
    hint = Hint(conversation="abc é", tokens_generated=17, priority=-3, ttl_s=3600.0)
    assert counts(ns.put(keys, data, hint=hint)) == (3, 0, 0)
    assert ns.get(keys) == data


def test_pins_are_counted_and_end(ns: Namespace) -> None:
    keys, data = some(ns)
    ns.put(keys[:5], data[:5])
    assert ns.pin(keys, ttl_s=60) == 5
    assert ns.pin(keys[:2], ttl_s=60) == 2, "a second pin replaces the first"
    assert ns.unpin(keys) == 5
    assert ns.unpin(keys) == 0
    assert ns.pin(keys[:1], ttl_s=60) == 1
    assert ns.remove(keys) == 5, "a pin keeps from eviction, not from its owner"


def test_a_prefetch_ends_done_and_says_what_is_in_memory(ns: Namespace) -> None:
    keys, data = some(ns)
    ns.put(keys[:5], data[:5])
    ticket = ns.prefetch(keys, deadline_s=2.0)
    assert ticket.wait() == 5
    assert ticket.state == "done"
    ticket.cancel()
    assert ticket.state == "done"


def test_removal_and_clearing_are_counted(client: Client, ns: Namespace) -> None:
    keys, data = some(ns)
    ns.put(keys, data)
    other = client.raw_namespace("beside it", BLOCK)
    mine, theirs = some(other)
    other.put(mine, theirs)
    assert ns.remove([keys[1], ns.key(b"absent")]) == 1
    assert ns.clear() == 7
    assert ns.clear() == 0
    assert ns.match(keys).blocks == 0
    assert other.get(mine) == theirs
    assert other.clear() == 8
    assert counts(ns.put(keys, data)) == (8, 0, 0)


def test_durable_is_refused_without_a_disk(ns: Namespace) -> None:
    keys, data = some(ns, 2)
    with pytest.raises(FailedPrecondition, match="needs an SSD tier"):
        ns.put(keys, data, durable=True)
    assert ns.match(keys).blocks == 0
    ns.put(keys, data)
    with pytest.raises(FailedPrecondition, match="needs an SSD tier"):
        ns.put(keys, data, durable=True)  # also for keys that exist already


# -- what the daemon says of itself


def test_stats_and_health(client: Client, ns: Namespace) -> None:
    before = client.stats()["counters"]
    keys, data = some(ns)
    ns.put(keys, data)
    ns.get([*keys, ns.key(b"absent")])
    stats = client.stats()
    after = stats["counters"]
    assert after["stored"] - before["stored"] == 8
    assert {"daemon", "host", "pools", "sessions", "counters", "indexes", "loops", "namespaces"} <= stats.keys()
    assert stats["host"]["size_bytes"] == 64 << 20
    assert any(n["digest"] == ns.digest.hex() and n["blocks"] == 8 for n in stats["namespaces"])
    health = client.health()
    assert (health.reachable, health.healthy, health.problems) == (True, True, [])
    assert health.version == stats["daemon"]["version"]
    assert health.uptime_s > 0


def test_a_closed_client_refuses_every_call(endpoint: str) -> None:
    client = Client(endpoint)
    ns = client.raw_namespace("closed", BLOCK)
    keys, data = some(ns, 2)
    client.close()
    client.close()
    for call in (
        lambda: ns.put(keys, data),
        lambda: ns.match(keys),
        lambda: ns.get(keys),
        lambda: ns.reserve(1),
        lambda: ns.remove(keys),
        lambda: ns.clear(),
        lambda: client.stats(),
        lambda: client.raw_namespace("other", BLOCK),
    ):
        with pytest.raises(FailedPrecondition, match="closed"):
            call()
    assert len(ns.key(b"x")) == KEY_BYTES, "naming needs no daemon"


def test_a_read_only_client_reads_and_writes_nothing(ns: Namespace, endpoint: str) -> None:
    keys, data = some(ns)
    ns.put(keys[:4], data[:4])
    with Client(endpoint, read_only=True) as reader:
        theirs = reader.raw_namespace("x", BLOCK)
        theirs._identity = ns._identity
        assert theirs.match(keys).blocks == 4
        assert theirs.get(keys) == data[:4]
        for write in (lambda: theirs.put(keys, data), lambda: theirs.reserve(1)):
            with pytest.raises(FailedPrecondition, match="read-only"):
                write()
    assert ns.match(keys).blocks == 4


def test_more_than_may_be_held_is_refused_as_a_whole(client: Client, way: str) -> None:
    ns = client.raw_namespace("too much", 1 << 20)
    if way == "unix":
        with pytest.raises(ResourceExhausted, match="of at most"):
            ns.reserve(17)
        with ns.reserve(16) as slots:
            assert len(slots) == 16
    with pytest.raises(InvalidArgument):
        ns.reserve(0)
