"""Calls of an open session that are wrong: each is told what was expected, changes nothing, and the session goes on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvstore.core import holds
from kvstore_client import Client, FailedPrecondition, InvalidArgument, KVStoreError, ResourceExhausted
from kvstored.v1 import DESCRIPTORS_MAX, KEYS_MAX
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.latency import BUCKETS
from tests.conftest import RunningDaemon, eventually
from tests.nodes import Watch, block, running
from tests.wire import Wire

BLOCK = 4096
KEY, OTHER_KEY = block("key", 32), block("other key", 32)
PRESENT = block("present", 32)
TOO_MANY = [KEY] * (KEYS_MAX + 1)
NAN, INFINITY = float("nan"), float("inf")


@dataclass
class Scene:
    """A session with a namespace, two slots of its own, a block, and what belongs to others."""

    wire: Wire
    number: int
    mine: list[int]
    theirs: int
    other_size: int
    other_tenants: int


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(host__size="16MiB") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def watch(node: RunningDaemon) -> Watch:
    return Watch(node)


@pytest.fixture(scope="module")
def scene(node: RunningDaemon) -> Iterator[Scene]:
    with Wire(node.socket) as wire, Wire(node.socket) as other, Wire(node.socket, tenant="other") as tenant:
        number = opened(wire, "mine", BLOCK)
        larger = opened(wire, "larger", 3 * BLOCK)
        mine = list(wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=3)).reserve.slots)
        wire.call(commit=commit(number, [PRESENT], [mine.pop()]))
        (other_size,) = wire.call(reserve=pb.ReserveRequest(namespace_id=larger, count=1)).reserve.slots
        theirs = opened(other, "mine", BLOCK)
        (foreign,) = other.call(reserve=pb.ReserveRequest(namespace_id=theirs, count=1)).reserve.slots
        assert theirs == number, "one namespace has one number"
        yield Scene(wire, number, mine, foreign, other_size, opened(tenant, "mine", BLOCK))


def opened(wire: Wire, name: str, block_bytes: int) -> int:
    request = pb.OpenNamespaceRequest(digest=block(name, 32), block_bytes=block_bytes, label=name)
    return wire.call(open_namespace=request).open_namespace.namespace_id


def commit(number: int, keys: list[bytes], slots: list[int], **more: Any) -> pb.CommitRequest:
    roots: dict[str, Any] = {"parents": [b""] * len(keys), "depths": [0] * len(keys)}
    return pb.CommitRequest(namespace_id=number, keys=keys, slots=slots, **{**roots, **more})


Case = tuple[Callable[[Scene], dict[str, Any]], type[KVStoreError], str]

WRITING: dict[str, Case] = {
    "reserve nothing": (
        lambda s: {"reserve": pb.ReserveRequest(namespace_id=s.number, count=0)},
        InvalidArgument,
        f"count 0 is not between 1 and {holds.RESERVE_SLOTS_MAX}",
    ),
    "reserve too much": (
        lambda s: {"reserve": pb.ReserveRequest(namespace_id=s.number, count=holds.RESERVE_SLOTS_MAX + 1)},
        InvalidArgument,
        "is not between 1 and",
    ),
    "reserve without end": (
        lambda s: {"reserve": pb.ReserveRequest(namespace_id=s.number, count=2**32 - 1)},
        InvalidArgument,
        "is not between 1 and",
    ),
    "commit fewer slots than keys": (
        lambda s: {"commit": commit(s.number, [KEY, OTHER_KEY], s.mine[:1])},
        InvalidArgument,
        "2 keys, 1 slots, 2 parents and 2 depths",
    ),
    "commit fewer parents than keys": (
        lambda s: {"commit": commit(s.number, [KEY, OTHER_KEY], s.mine, parents=[b""])},
        InvalidArgument,
        "2 keys, 2 slots, 1 parents and 2 depths",
    ),
    "commit more depths than keys": (
        lambda s: {"commit": commit(s.number, [KEY], s.mine[:1], depths=[0, 1])},
        InvalidArgument,
        "1 parents and 2 depths",
    ),
    "commit a short key": (
        lambda s: {"commit": commit(s.number, [KEY[:31]], s.mine[:1])},
        InvalidArgument,
        "a key is 32 bytes, not 31",
    ),
    "commit a long key": (
        lambda s: {"commit": commit(s.number, [KEY, KEY + b"x"], s.mine)},
        InvalidArgument,
        "a key is 32 bytes, not 33",
    ),
    "commit an empty key": (
        lambda s: {"commit": commit(s.number, [b""], s.mine[:1])},
        InvalidArgument,
        "a key is 32 bytes, not 0",
    ),
    "commit zeros": (
        lambda s: {"commit": commit(s.number, [bytes(32)], s.mine[:1])},
        InvalidArgument,
        "32 zero bytes are no key",
    ),
    "commit a short parent": (
        lambda s: {"commit": commit(s.number, [KEY], s.mine[:1], parents=[b"x"])},
        InvalidArgument,
        "a parent also",
    ),
    "commit a block under itself": (
        lambda s: {"commit": commit(s.number, [KEY], s.mine[:1], parents=[KEY])},
        InvalidArgument,
        "own parent",
    ),
    "commit too many keys": (
        lambda s: {"commit": commit(s.number, TOO_MANY, s.mine[:1] * len(TOO_MANY))},
        InvalidArgument,
        f"at most {KEYS_MAX}",
    ),
    "commit a slot twice": (
        lambda s: {"commit": commit(s.number, [KEY, OTHER_KEY], s.mine[:1] * 2)},
        InvalidArgument,
        "named twice",
    ),
    "commit a slot that there is not": (
        lambda s: {"commit": commit(s.number, [KEY], [2**64 - 1])},
        FailedPrecondition,
        "slot 0xffffffffffffffff is not granted to this session",
    ),
    "commit a slot never granted": (
        lambda s: {"commit": commit(s.number, [KEY], [s.mine[0] - s.mine[0] % 2**32 + 200])},
        FailedPrecondition,
        "is not granted to this session",
    ),
    "commit another's slot": (
        lambda s: {"commit": commit(s.number, [KEY], [s.theirs])},
        FailedPrecondition,
        "is not granted to this session",
    ),
    "commit one's own and another's": (
        lambda s: {"commit": commit(s.number, [KEY, OTHER_KEY], [s.mine[0], s.theirs])},
        FailedPrecondition,
        "is not granted to this session",
    ),
    "commit a slot of another size": (
        lambda s: {"commit": commit(s.number, [KEY], [s.other_size])},
        InvalidArgument,
        f"is not of {BLOCK} bytes as this namespace needs",
    ),
    "commit for less than no time": (
        lambda s: {"commit": commit(s.number, [KEY], s.mine[:1], hint=pb.Hint(ttl_s=-1.0))},
        InvalidArgument,
        "ttl_s -1.0 is not a number of seconds from 0",
    ),
    "commit for no number of seconds": (
        lambda s: {"commit": commit(s.number, [KEY], s.mine[:1], hint=pb.Hint(ttl_s=NAN))},
        InvalidArgument,
        "ttl_s nan",
    ),
    "commit for endless seconds": (
        lambda s: {"commit": commit(s.number, [KEY], s.mine[:1], hint=pb.Hint(ttl_s=INFINITY))},
        InvalidArgument,
        "ttl_s inf",
    ),
    "commit durably without a disk": (
        lambda s: {"commit": commit(s.number, [KEY], s.mine[:1], durable=True)},
        FailedPrecondition,
        "needs an SSD tier",
    ),
    "give back another's slot": (
        lambda s: {"abort": pb.AbortRequest(slots=[s.theirs])},
        InvalidArgument,
        "not granted",
    ),
    "give a slot back twice": (
        lambda s: {"abort": pb.AbortRequest(slots=s.mine[:1] * 2)},
        InvalidArgument,
        "named twice",
    ),
    "release what is not leased": (
        lambda s: {"release": pb.ReleaseRequest(slots=s.mine[:1])},
        InvalidArgument,
        "is not leased",
    ),
    "release what there is not": (
        lambda s: {"release": pb.ReleaseRequest(slots=[0, 2**64 - 1])},
        InvalidArgument,
        "is not leased",
    ),
}

OTHERS: dict[str, Case] = {
    "pin for no time": (
        lambda s: {"pin": pb.PinRequest(namespace_id=s.number, keys=[PRESENT])},
        InvalidArgument,
        "ttl_s 0.0 is not above 0 and at most 2592000",
    ),
    "pin for less than no time": (
        lambda s: {"pin": pb.PinRequest(namespace_id=s.number, keys=[PRESENT], ttl_s=-5)},
        InvalidArgument,
        "ttl_s -5.0",
    ),
    "pin for no number of seconds": (
        lambda s: {"pin": pb.PinRequest(namespace_id=s.number, keys=[PRESENT], ttl_s=NAN)},
        InvalidArgument,
        "ttl_s nan",
    ),
    "pin for ever": (
        lambda s: {"pin": pb.PinRequest(namespace_id=s.number, keys=[PRESENT], ttl_s=INFINITY)},
        InvalidArgument,
        "ttl_s inf",
    ),
    "pin for years": (
        lambda s: {"pin": pb.PinRequest(namespace_id=s.number, keys=[PRESENT], ttl_s=1e9)},
        InvalidArgument,
        r"\(30 days\)",
    ),
    "ask for too many segments": (
        lambda s: {"segments": pb.SegmentsRequest(ids=range(DESCRIPTORS_MAX + 1))},
        InvalidArgument,
        f"{DESCRIPTORS_MAX + 1} segments in one message; at most {DESCRIPTORS_MAX}",
    ),
    "open a namespace with a short digest": (
        lambda s: {"open_namespace": pb.OpenNamespaceRequest(digest=b"x" * 31, block_bytes=1)},
        InvalidArgument,
        "a namespace digest is 32 bytes, not 31",
    ),
    "open a namespace of empty blocks": (
        lambda s: {"open_namespace": pb.OpenNamespaceRequest(digest=KEY)},
        InvalidArgument,
        f"block_bytes 0 is not between 1 and {16 << 20}",
    ),
    "open a namespace of blocks larger than the memory": (
        lambda s: {"open_namespace": pb.OpenNamespaceRequest(digest=KEY, block_bytes=(16 << 20) + 1)},
        InvalidArgument,
        f"is not between 1 and {16 << 20}",
    ),
    "open a namespace of endless blocks": (
        lambda s: {"open_namespace": pb.OpenNamespaceRequest(digest=KEY, block_bytes=2**64 - 1)},
        InvalidArgument,
        "is not between 1 and",
    ),
    "open a namespace with a long label": (
        lambda s: {"open_namespace": pb.OpenNamespaceRequest(digest=KEY, block_bytes=1, label="x" * 257)},
        InvalidArgument,
        "a label is at most 256 bytes",
    ),
    "open a namespace with another size": (
        lambda s: {"open_namespace": pb.OpenNamespaceRequest(digest=block("mine", 32), block_bytes=BLOCK + 1)},
        FailedPrecondition,
        f"has blocks of {BLOCK} bytes, not {BLOCK + 1}",
    ),
    "touch a short key": (
        lambda s: {"touch": pb.TouchRequest(keys=[KEY, KEY[:5]])},
        InvalidArgument,
        "key 1 has 5 bytes; a key has 32",
    ),
    "touch too many keys": (
        lambda s: {"touch": pb.TouchRequest(keys=TOO_MANY)},
        InvalidArgument,
        f"{KEYS_MAX + 1} keys in one message; at most {KEYS_MAX}",
    ),
}

NAMING: dict[str, Callable[..., Any]] = {
    "match": pb.MatchRequest,
    "acquire": pb.AcquireRequest,
    "remove": pb.RemoveRequest,
    "pin": lambda **fields: pb.PinRequest(**fields, ttl_s=5.0),
    "unpin": pb.UnpinRequest,
}


@pytest.mark.parametrize("kind", [*WRITING, *OTHERS])
def test_a_wrong_call_is_told_what_was_expected_and_changes_nothing(scene: Scene, watch: Watch, kind: str) -> None:
    make, error, message = (WRITING | OTHERS)[kind]
    refused(scene, watch, make(scene), error, message)


@pytest.mark.parametrize("kind", NAMING)
@pytest.mark.parametrize(
    "keys", [[KEY[:31]], [KEY, KEY + b"x"], [b""], TOO_MANY], ids=["short", "long", "empty", "many"]
)
def test_keys_are_32_bytes_and_not_too_many_in_every_call(
    scene: Scene, watch: Watch, kind: str, keys: list[bytes]
) -> None:
    message = f"at most {KEYS_MAX}" if keys is TOO_MANY else "a key has 32"
    refused(scene, watch, {kind: NAMING[kind](namespace_id=scene.number, keys=keys)}, InvalidArgument, message)


@pytest.mark.parametrize("kind", [*NAMING, "reserve", "commit", "clear"])
@pytest.mark.parametrize("whose", ["nobody's", "of number 0", "of another tenant"])
def test_a_namespace_is_one_that_the_tenant_opened(scene: Scene, watch: Watch, kind: str, whose: str) -> None:
    number = {"nobody's": 12345, "of number 0": 0, "of another tenant": scene.other_tenants}[whose]
    if kind == "reserve":
        request: Any = pb.ReserveRequest(namespace_id=number, count=1)
    elif kind == "commit":
        request = commit(number, [KEY], scene.mine[:1])
    elif kind == "clear":
        request = pb.ClearRequest(namespace_id=number)
    else:
        request = NAMING[kind](namespace_id=number, keys=[PRESENT])
    refused(scene, watch, {kind: request}, FailedPrecondition, "is not one that tenant 'default' has opened")


@pytest.mark.parametrize(
    "payload", [b"\x08\x09", b"\x08\x09\x92\x03\x00", b"\x08\x09\xfa\x07\x03abc"], ids=["none", "field 50", "field 127"]
)
def test_an_operation_of_another_release_is_refused_by_name_of_what_is_wrong(scene: Scene, payload: bytes) -> None:
    from tests.wire import frame

    scene.wire.send(frame(payload))
    with pytest.raises(InvalidArgument, match="a Request with no operation that this daemon knows"):
        scene.wire.answer(9)


def test_a_wrong_call_that_wants_no_reply_gets_none(scene: Scene, watch: Watch) -> None:
    before = watch.state()
    scene.wire.post(abort=pb.AbortRequest(slots=[scene.theirs]))
    scene.wire.post(release=pb.ReleaseRequest(slots=[1]))
    scene.wire.post(touch=pb.TouchRequest(keys=[b"x"]))
    assert scene.wire.call(health=pb.HealthRequest()).health.healthy
    assert watch.state() == before


def test_segments_of_nobody_and_of_another_tenant_are_left_out(scene: Scene) -> None:
    reply = scene.wire.call(segments=pb.SegmentsRequest(ids=[0, 2**32 - 1, 77, *range(1, 40)])).segments
    own = {ref >> 32 for ref in (*scene.mine, scene.other_size)}
    assert {segment.id for segment in reply.segments} == own
    assert len(scene.wire.descriptors) == len(own)


def test_counts_that_a_client_makes_up_do_not_break_the_stats(scene: Scene, watch: Watch) -> None:
    """They are 64 bits on the wire: a sum that does not fit would end every later answer."""
    most = 2**64 - 1
    calls: dict[str, Any] = {
        "calls": most,
        "calls_hit": most,
        "latencies": [most] + [0] * (BUCKETS - 1),
        "seconds": 1e308,
    }
    report: dict[str, Any] = {"namespace_id": scene.number, "hits": most, "misses": most, **calls}
    for operation in (pb.OPERATION_GET, pb.OPERATION_MATCH, pb.OPERATION_PUT):
        for _ in range(3):
            scene.wire.post(touch=pb.TouchRequest(reports=[pb.Report(operation=operation, **report)]))
    stats = scene.wire.call(stats=pb.StatsRequest()).stats
    assert stats.counters.hits == stats.counters.hit_bytes == stats.counters.match_misses == most
    assert {row.calls for row in stats.operations} == {0, most}
    assert all(0 <= row.seconds < INFINITY for row in stats.operations)
    assert watch.client.health().healthy


def test_a_depth_may_be_any_number(scene: Scene) -> None:
    """It decides who goes first when memory is short, and nothing else."""
    wire, number = scene.wire, scene.number
    slots = list(wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=2)).reserve.slots)
    keys = [block("deep", 32), block("deeper", 32)]
    results = wire.call(commit=commit(number, keys, slots, depths=[2**32 - 1, 0], parents=[OTHER_KEY, keys[0]]))
    assert list(results.commit.results) == [pb.STORED, pb.STORED]
    assert wire.call(remove=pb.RemoveRequest(namespace_id=number, keys=keys)).remove.removed == 2


def test_two_blocks_may_each_claim_to_be_the_parent_of_the_other(scene: Scene, watch: Watch) -> None:
    wire, number = scene.wire, scene.number
    slots = list(wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=3)).reserve.slots)
    keys = [block(f"circle {i}", 32) for i in range(3)]
    wire.call(commit=commit(number, keys, slots, parents=[keys[2], keys[0], keys[1]]))
    wire.post(touch=pb.TouchRequest(keys=keys))
    assert wire.call(match=pb.MatchRequest(namespace_id=number, keys=keys)).match.blocks == 3
    assert wire.call(remove=pb.RemoveRequest(namespace_id=number, keys=keys)).remove.removed == 3
    assert watch.client.health().healthy


def test_a_session_that_holds_all_it_may_is_refused_with_the_limit_and_goes_on(
    node: RunningDaemon, watch: Watch
) -> None:
    before = watch.state()
    with Wire(node.socket) as wire:
        number = opened(wire, "all", BLOCK)
        slots = all_it_may(wire, number)
        with pytest.raises(ResourceExhausted, match=f"of at most {4 << 20}"):
            wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=1))
        assert len(slots) == (4 << 20) // BLOCK
        assert wire.call(health=pb.HealthRequest()).health.healthy
        wire.call(abort=pb.AbortRequest(slots=slots))
        wire.leave()
    eventually(lambda: watch.state()["totals"] == before["totals"], 5.0, "all slots to be back")


def test_with_everything_held_the_daemon_still_answers_everybody(node: RunningDaemon, watch: Watch) -> None:
    before = watch.state()
    wires = [Wire(node.socket) for _ in range(3)]
    try:
        held = [all_it_may(wire, opened(wire, "all", BLOCK)) for wire in wires]
        assert sum(map(len, held)) * BLOCK >= (11 << 20)
        with Client(node.endpoint, name="late") as late:
            ns = late.raw_namespace("late", BLOCK)
            key = ns.key(b"late")
            assert late.health().healthy
            assert ns.match([key]).blocks == 0
            with pytest.raises(ResourceExhausted, match="release leases"):
                ns.put([key], block("late", BLOCK))
        for wire, slots in zip(wires, held, strict=True):
            wire.call(abort=pb.AbortRequest(slots=slots))
            wire.leave()
    finally:
        for wire in wires:
            wire.close()
    eventually(lambda: watch.state()["totals"] == before["totals"], 5.0, "all slots to be back")


def all_it_may(wire: Wire, number: int) -> list[int]:
    """Reserves until the session is refused."""
    slots: list[int] = []
    try:
        while True:
            slots += wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=64)).reserve.slots
    except ResourceExhausted:
        return slots


def refused(scene: Scene, watch: Watch, op: dict[str, Any], error: type[KVStoreError], message: str) -> None:
    before = watch.state()
    with pytest.raises(error, match=message):
        scene.wire.call(**op)
    assert scene.wire.call(health=pb.HealthRequest()).health.healthy, "the session goes on"
    after = watch.state()
    after["descriptors"] = before["descriptors"] = 0
    assert after == before
