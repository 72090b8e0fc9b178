"""What clients report and what the daemon counts itself: whole, once, and never by a message that is wrong."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.server.figures import REPORTS_MAX
from kvstore_client import Client, FailedPrecondition, Hint, InvalidArgument, Layout
from kvstore_client.transport import Identity
from kvstored.v1 import KEYS_MAX
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.latency import BOUNDS_S, BUCKETS, bucket
from tests.conftest import RunningDaemon
from tests.nodes import block, running
from tests.server.grpc_edge import Scene as Edge
from tests.server.grpc_edge import block_of, key_of, with_edge
from tests.wire import Wire

BLOCK = 4096
COUNTED = ("counters", "operations")


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(host__size="16MiB") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def wire(node: RunningDaemon) -> Iterator[Wire]:
    with Wire(node.socket) as wire:
        yield wire


@pytest.fixture(scope="module")
def number(wire: Wire) -> int:
    request = pb.OpenNamespaceRequest(digest=block("reports", 32), block_bytes=BLOCK, label="", block_tokens=16)
    return wire.call(open_namespace=request).open_namespace.namespace_id


def report(number: int, **fields: Any) -> pb.Report:
    """A report as it should be: two calls, one of which found three blocks."""
    right: dict[str, Any] = {
        "operation": pb.OPERATION_GET,
        "calls": 2,
        "calls_hit": 1,
        "hits": 3,
        "misses": 4,
        "seconds": 0.25,
        "latencies": [1, 1, *[0] * (BUCKETS - 2)],
    }
    return pb.Report(namespace_id=number, **{**right, **fields})


def counted(wire: Wire) -> tuple[Any, ...]:
    stats = wire.call(stats=pb.StatsRequest()).stats
    return tuple(str(getattr(stats, part)) for part in COUNTED)


def test_a_report_is_added_to_its_operation_and_to_the_totals(wire: Wire, number: int) -> None:
    before = wire.call(stats=pb.StatsRequest()).stats
    reports = [report(number), report(number, operation=pb.OPERATION_MATCH)]
    wire.call(touch=pb.TouchRequest(reports=reports))
    after = wire.call(stats=pb.StatsRequest()).stats
    was = {row.operation: row for row in before.operations}
    for row in after.operations:
        old = was[row.operation]
        told = row.operation in (pb.OPERATION_GET, pb.OPERATION_MATCH)
        assert row.tier == pb.TIER_HOST
        assert (row.calls - old.calls, row.calls_hit - old.calls_hit) == ((2, 1) if told else (0, 0))
        assert (row.hits - old.hits, row.misses - old.misses) == ((3, 4) if told else (0, 0))
        assert row.seconds - old.seconds == pytest.approx(0.25 if told else 0)
        assert sum(row.latencies) == row.calls
    new, old_counters = after.counters, before.counters
    tokens = ("hit_tokens", "miss_tokens", "match_hit_tokens", "match_miss_tokens")
    assert [getattr(new, name) - getattr(old_counters, name) for name in tokens] == [48, 64, 48, 64]
    assert new.hit_bytes - old_counters.hit_bytes == 3 * BLOCK


WRONG: dict[str, tuple[Callable[[int], list[pb.Report]], str]] = {
    "unknown namespace": (lambda n: [report(n), report(n + 99)], r"report 1 is of namespace \d+, which tenant"),
    "namespace 0": (lambda n: [report(0)], "namespace 0"),
    "no operation": (lambda n: [report(n, operation=0)], "operation 0"),
    "unknown operation": (lambda n: [report(n), report(n, operation=99)], "report 1 is of operation 99"),
    "too few buckets": (lambda n: [report(n, latencies=[2])], f"1 latency buckets; {BUCKETS} are expected"),
    "too many buckets": (lambda n: [report(n, latencies=[2] + [0] * BUCKETS)], f"{BUCKETS} are expected"),
    "calls in no bucket": (lambda n: [report(n, calls=3)], "2 calls in its buckets and 3 in all"),
    "more hit than there were": (lambda n: [report(n, calls_hit=3)], "3 of 2 calls found something"),
    "not a number of seconds": (lambda n: [report(n, seconds=float("nan"))], "nan seconds"),
    "endless seconds": (lambda n: [report(n, seconds=float("inf"))], "inf seconds"),
    "negative seconds": (lambda n: [report(n, seconds=-1e-9)], "seconds, which is no number from 0 up"),
    "tier": (lambda n: [report(n, tier=9)], "report 0 is of tier 9, which this daemon does not know"),
    "too many": (lambda n: [report(n)] * (REPORTS_MAX + 1), f"257 reports in one message; at most {REPORTS_MAX}"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_report_that_cannot_be_is_refused_and_nothing_of_its_message_counts(
    wire: Wire, number: int, name: str
) -> None:
    make, says = WRONG[name]
    before = counted(wire)
    hint = pb.Hint(conversation="never seen")
    with pytest.raises(InvalidArgument, match=says):
        wire.call(touch=pb.TouchRequest(reports=make(number), hint=hint))
    assert counted(wire) == before


def test_wrong_keys_or_a_wrong_hint_count_nothing_either(wire: Wire, number: int) -> None:
    before = counted(wire)
    good = [report(number)]
    with pytest.raises(InvalidArgument, match="key 0 has 3 bytes"):
        wire.call(touch=pb.TouchRequest(keys=[b"abc"], reports=good))
    with pytest.raises(InvalidArgument, match="a conversation is at most 256 bytes"):
        wire.call(touch=pb.TouchRequest(reports=good, hint=pb.Hint(conversation="é" * 129)))
    assert counted(wire) == before


def test_namespaces_of_other_tenants_cannot_be_reported(node: RunningDaemon, wire: Wire, number: int) -> None:
    with Wire(node.socket, tenant="other") as other, pytest.raises(InvalidArgument, match="tenant 'other'"):
        other.call(touch=pb.TouchRequest(reports=[report(number)]))


def test_reports_of_two_tiers_are_two_rows_and_one_total(wire: Wire, number: int) -> None:
    before = wire.call(stats=pb.StatsRequest()).stats
    reports = [report(number), report(number, tier=pb.TIER_HOST), report(number, tier=pb.TIER_SSD)]
    wire.call(touch=pb.TouchRequest(reports=reports))
    after = wire.call(stats=pb.StatsRequest()).stats

    def rows(stats: pb.StatsReply, tier: int) -> list[int]:
        kind = reports[0].operation
        return [row.hits for row in stats.operations if (row.operation, row.tier) == (kind, tier)]

    hits = reports[0].hits
    assert sum(rows(after, pb.TIER_HOST)) - sum(rows(before, pb.TIER_HOST)) == 2 * hits
    assert sum(rows(after, pb.TIER_SSD)) - sum(rows(before, pb.TIER_SSD)) == hits
    assert after.counters.hits - before.counters.hits == 3 * hits


def test_as_many_reports_as_allowed_fit_with_as_many_keys(wire: Wire, number: int) -> None:
    keys = [block(i, 32) for i in range(KEYS_MAX)]
    wire.call(touch=pb.TouchRequest(keys=keys, reports=[report(number)] * REPORTS_MAX))


def test_tokens_of_a_block_are_what_the_first_who_knew_them_said(node: RunningDaemon) -> None:
    identity: Callable[[int], Identity] = lambda tokens: Identity(block("tokens", 32), BLOCK, "named", tokens)  # noqa: E731
    with Wire(node.socket) as wire:
        for tokens in (0, 16, 0, 16):
            wire.call(open_namespace=identity(tokens).opening())
        with pytest.raises(FailedPrecondition, match=r"\(named\) has blocks of 16 tokens, not 32"):
            wire.call(open_namespace=identity(32).opening())
        stats = wire.call(stats=pb.StatsRequest()).stats
        assert [n.block_tokens for n in stats.namespaces if n.label == "named"] == [16]


def test_hits_of_a_layout_are_counted_in_tokens_too(node: RunningDaemon) -> None:
    layout = Layout(model="m", dtype="float16", num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=32)
    with Client(node.endpoint) as client:
        before = client.stats()["counters"]
        ns = client.namespace(layout)
        keys = ns.keys(range(10 * 32))
        ns.put(keys[:6], bytes(6 * ns.block_bytes))
        assert (len(ns.get(keys)), ns.match(keys).blocks) == (6, 6)
        after = client.stats()["counters"]
        tokens = ("hit_tokens", "miss_tokens", "match_hit_tokens", "match_miss_tokens")
        assert [after[name] - before[name] for name in tokens] == [6 * 32, 4 * 32, 6 * 32, 4 * 32]


@pytest.mark.parametrize("scheme", ["unix", "grpc"])
def test_a_conversation_is_seen_through_every_kind_of_put(start_daemon: Any, scheme: str) -> None:
    daemon = start_daemon(server__grpc="127.0.0.1:0")
    with Client(daemon.endpoint if scheme == "unix" else daemon.grpc_endpoint) as client:
        ns = client.raw_namespace("talk", BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(2)]
        ns.put(keys, bytes(2 * BLOCK), hint=Hint(conversation="stored"))
        assert client.stats()["counters"]["conversations"] == 1
        ns.put(keys, bytes(2 * BLOCK), hint=Hint(conversation="all was there"))
        ns.put(keys, bytes(2 * BLOCK), hint=Hint(conversation="stored"))
        assert client.stats()["counters"]["conversations"] == 2


def test_calls_are_counted_by_edge_and_name_with_their_errors(node: RunningDaemon) -> None:
    with Wire(node.socket) as wire:

        def calls() -> dict[tuple[str, str], tuple[int, int]]:
            rows = wire.call(stats=pb.StatsRequest()).stats.calls
            assert all(sum(row.latencies) == row.calls and row.seconds > 0 for row in rows)
            return {(row.edge, row.call): (row.calls, row.errors) for row in rows}

        calls()
        before = calls()
        wire.call(health=pb.HealthRequest())
        for _ in range(2):
            with pytest.raises(FailedPrecondition):
                wire.call(match=pb.MatchRequest(namespace_id=999))
        with pytest.raises(FailedPrecondition):  # one that waits for memory, answered by a task
            wire.call(reserve=pb.ReserveRequest(namespace_id=999, count=1))
        after = calls()
        changed = {name: row for name, row in after.items() if before.get(name) != row}
        old = {name: before.get(name, (0, 0)) for name in changed}
        assert {name: (row[0] - old[name][0], row[1] - old[name][1]) for name, row in changed.items()} == {
            ("session", "Stats"): (1, 0),
            ("session", "Health"): (1, 0),
            ("session", "Match"): (2, 2),
            ("session", "Reserve"): (1, 1),
        }


def test_grpc_callers_that_do_not_tell_are_counted_by_the_daemon() -> None:
    async def scenario(scene: Edge) -> None:
        number, keys = await scene.namespace(BLOCK), [key_of(i) for i in range(5)]
        await scene.put(number, keys[:3], [block_of(i, BLOCK) for i in range(3)])
        assert (await scene.get(number, keys))[0] == 3
        assert await scene.match(number, keys[:4]) == 3
        assert await scene.match(number, []) == 0
        rows = {row.operation: row for row in scene.stats().operations}
        figures = {name: (row.calls, row.calls_hit, row.hits, row.misses) for name, row in rows.items()}
        assert figures == {
            pb.OPERATION_PUT: (1, 1, 3, 0),
            pb.OPERATION_GET: (1, 1, 3, 2),
            pb.OPERATION_MATCH: (1, 1, 3, 1),
            pb.OPERATION_ACQUIRE: (0, 0, 0, 0),
        }
        assert rows[pb.OPERATION_GET].size_bytes == rows[pb.OPERATION_PUT].size_bytes == 3 * BLOCK
        counters = scene.stats().counters
        assert (counters.hits, counters.misses, counters.match_hits, counters.match_misses) == (3, 2, 3, 1)

    with_edge(scenario)


def test_grpc_callers_that_tell_are_not_counted_twice() -> None:
    async def scenario(scene: Edge) -> None:
        number, keys = await scene.namespace(BLOCK), [key_of("k")]
        await scene.stub.Match(pb.MatchRequest(namespace_id=number, keys=keys), metadata=(("kvstored-reports", "1"),))
        assert scene.stats().counters.match_misses == 0

    with_edge(scenario)


def test_a_call_is_in_the_bucket_that_its_time_fits() -> None:
    assert [bucket(bound) for bound in BOUNDS_S] == list(range(len(BOUNDS_S)))
    assert (bucket(0.0), bucket(BOUNDS_S[0] * 1.01), bucket(1e9)) == (0, 1, BUCKETS - 1)
