"""What clients did, by operation, and what the daemon answered, by call: sums that only grow.

An operation (get, acquire, match, put) is counted once, by one of two:
  - a client that tells reports counts its own calls and says so by Touch, because most of
    them the daemon never sees (reads need no call) or sees only in part;
  - of a gRPC caller that does not tell, the daemon counts what it answers (`saw`).

Clients say what they like: a report is checked as a whole before anything is added, and
sums stay within what the messages of the contract can carry.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter

from kvstore.core.counts import COUNT_MAX, Counts
from kvstore.core.holds import Namespace, Tenant
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import InvalidArgument
from kvstored.v1.latency import BUCKETS, bucket

REPORTS_MAX = 256
"""Reports in one message."""

SECONDS_MAX = float(COUNT_MAX)
READS = (pb.OPERATION_GET, pb.OPERATION_ACQUIRE)
OPERATIONS = (*READS, pb.OPERATION_MATCH, pb.OPERATION_PUT)
TIERS = (pb.TIER_GPU, pb.TIER_HOST, pb.TIER_SSD, pb.TIER_REMOTE)
NAMES = dict.fromkeys(("Get", "Acquire", "Match", "Put"), pb.OPERATION_NONE)
NAMES.update(zip(NAMES, OPERATIONS, strict=True))
NAMES["Load"] = pb.OPERATION_ACQUIRE
"""Operations by the names of their calls over gRPC."""

CALLS_OF_OPS: dict[str | None, str] = {
    op.name: op.name.title().replace("_", "") for op in pb.Request.DESCRIPTOR.oneofs_by_name["op"].fields
}
"""Operations of the session socket, named as the calls of the gRPC service: one name for both edges."""


@dataclass(slots=True)
class Operation:
    """One operation over all clients, of the calls whose slowest block came from one tier."""

    calls: int = 0
    calls_hit: int = 0
    hits: int = 0
    misses: int = 0
    busy: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    latencies: list[int] = field(default_factory=lambda: [0] * BUCKETS)


@dataclass(slots=True)
class Answered:
    """One call of one edge."""

    calls: int = 0
    errors: int = 0
    seconds: float = 0.0
    latencies: list[int] = field(default_factory=lambda: [0] * BUCKETS)


class Figures:
    """All sums of one life of the daemon. `counts` are the store's, which have the totals over operations."""

    def __init__(self, counts: Counts) -> None:
        self.operations: dict[tuple[pb.Operation, pb.Tier], Operation] = {
            (number, pb.TIER_HOST): Operation() for number in OPERATIONS
        }
        """By operation and tier; rows of other tiers come with their first call."""
        self.answered: dict[tuple[str, str], Answered] = {}
        self._counts = counts

    # -- operations

    def told(self, tenant: Tenant, namespaces: list[Namespace], reports: Iterable[pb.Report]) -> None:
        """Adds what a client of `tenant` reports; InvalidArgument, and nothing is added, where one cannot be."""
        reports = list(reports)
        if len(reports) > REPORTS_MAX:
            raise InvalidArgument(f"{len(reports)} reports in one message; at most {REPORTS_MAX}: split it")
        found = [_checked(i, report, tenant, namespaces) for i, report in enumerate(reports)]
        for report, namespace in zip(reports, found, strict=True):
            self._add(report, namespace)

    def saw(
        self,
        name: str,
        namespace: Namespace,
        found: int,
        asked: int,
        seconds: float,
        tier: pb.Tier = pb.TIER_HOST,
        busy: int = 0,
    ) -> None:
        """The daemon itself answered a call that found `found` of `asked` blocks, for a caller that tells nothing.

        `tier`: the slowest that one of them came from. `busy`: blocks of the others that are there,
        and were not brought to memory as too much was being loaded or held.
        """
        if not asked:
            return
        latencies = [0] * BUCKETS
        latencies[bucket(seconds)] = 1
        report = pb.Report(
            operation=NAMES[name],
            calls=1,
            calls_hit=1 if found else 0,
            hits=found,
            misses=asked - found - busy,
            busy=busy,
            seconds=seconds,
            latencies=latencies,
            tier=tier,
        )
        self._add(report, namespace)

    def stored(self, size_bytes: int) -> None:
        """Bytes of blocks that a commit made visible: the daemon sees all of those itself."""
        self.operations[pb.OPERATION_PUT, pb.TIER_HOST].size_bytes += size_bytes

    def _add(self, report: pb.Report, namespace: Namespace) -> None:
        kept, counts = self._row(report.operation, report.tier or pb.TIER_HOST), self._counts
        kept.calls += report.calls
        kept.calls_hit += report.calls_hit
        kept.hits += report.hits
        kept.misses += report.misses
        kept.busy += report.busy
        kept.seconds = min(kept.seconds + report.seconds, SECONDS_MAX)
        for i, calls in enumerate(report.latencies):
            kept.latencies[i] += calls
        hit_tokens, miss_tokens = report.hits * namespace.block_tokens, report.misses * namespace.block_tokens
        if report.operation in READS:
            kept.size_bytes += report.hits * namespace.block_bytes
            counts.hits += report.hits
            counts.misses += report.misses
            counts.busy += report.busy
            counts.hit_bytes += report.hits * namespace.block_bytes
            counts.hit_tokens += hit_tokens
            counts.miss_tokens += miss_tokens
        elif report.operation == pb.OPERATION_MATCH:
            counts.match_hits += report.hits
            counts.match_misses += report.misses
            counts.match_hit_tokens += hit_tokens
            counts.match_miss_tokens += miss_tokens

    def _row(self, operation: pb.Operation, tier: pb.Tier) -> Operation:
        found = self.operations.get((operation, tier))
        if found is None:
            found = self.operations[operation, tier] = Operation()
        return found

    # -- calls

    def answer(self, edge: str, call: str, began: float, *, failed: bool) -> None:
        """A call that came at `began` (of time.perf_counter) is answered. Half a microsecond."""
        found = self.answered.get((edge, call))
        if found is None:
            found = self.answered[edge, call] = Answered()
        seconds = perf_counter() - began
        found.calls += 1
        found.seconds += seconds
        found.latencies[bucket(seconds)] += 1
        if failed:
            found.errors += 1

    # -- as messages

    def operation_stats(self) -> Iterable[pb.OperationStats]:
        """One row an operation and tier."""
        for (number, tier), kept in sorted(self.operations.items()):
            yield pb.OperationStats(
                operation=number,
                tier=tier,
                calls=_carried(kept.calls),
                calls_hit=_carried(kept.calls_hit),
                hits=_carried(kept.hits),
                misses=_carried(kept.misses),
                busy=_carried(kept.busy),
                size_bytes=_carried(kept.size_bytes),
                seconds=kept.seconds,
                latencies=map(_carried, kept.latencies),
            )

    def call_stats(self) -> Iterable[pb.CallStats]:
        """One row for each call that was made at all."""
        for (edge, call), kept in self.answered.items():
            yield pb.CallStats(
                edge=edge,
                call=call,
                calls=kept.calls,
                errors=kept.errors,
                seconds=kept.seconds,
                latencies=kept.latencies,
            )


def _carried(count: int) -> int:
    """A sum as the messages can carry it: clients say what they did, and it must not end all answers."""
    return min(count, COUNT_MAX)


def _checked(i: int, report: pb.Report, tenant: Tenant, namespaces: list[Namespace]) -> Namespace:
    """The namespace that a report speaks of."""
    number = report.namespace_id
    namespace = namespaces[number - 1] if 1 <= number <= len(namespaces) else None
    if namespace is None or namespace.tenant is not tenant:
        raise InvalidArgument(f"report {i} is of namespace {number}, which tenant {tenant.name!r} has not opened")
    if report.operation not in OPERATIONS:
        raise InvalidArgument(f"report {i} is of operation {report.operation}, which this daemon does not know")
    if report.tier not in (pb.TIER_NONE, *TIERS):
        raise InvalidArgument(f"report {i} is of tier {report.tier}, which this daemon does not know")
    if len(report.latencies) != BUCKETS:
        raise InvalidArgument(f"report {i} has {len(report.latencies)} latency buckets; {BUCKETS} are expected")
    if sum(report.latencies) != report.calls:
        raise InvalidArgument(f"report {i} has {sum(report.latencies)} calls in its buckets and {report.calls} in all")
    if report.calls_hit > report.calls:
        raise InvalidArgument(f"report {i} says that {report.calls_hit} of {report.calls} calls found something")
    if not 0 <= report.seconds < math.inf:
        raise InvalidArgument(f"report {i} took {report.seconds} seconds, which is no number from 0 up")
    return namespace
