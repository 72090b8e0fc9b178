"""The figures as metrics for Prometheus, in its text format or OpenMetrics.

Built from the StatsReply, which `kvstore-cli stats` shows too: the two cannot disagree.
Totals are yielded as they are, never added to a counter, so nothing rises while nothing
happens. Everything is made anew for each scrape and nothing is kept between two.

Labels have few values: operations, tiers, calls of the contract, reasons, background loops,
devices, and at most TENANTS_MAX tenants. No namespace, key, client or conversation is one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvstore.core.holds import TENANTS_MAX
from kvstore.server import gpu_metrics
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.latency import BOUNDS_S, BUCKETS

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

LABELS_KEPT = 4096
"""Sets of labels whose text is kept for the next scrape: above what one has."""

CALL_BUCKETS = 2
"""Of the buckets of calls every second one is shown: there are some forty calls, and each bucket is a time series."""
assert BUCKETS % CALL_BUCKETS == 0, "the last bucket is the one of all calls"

_BOUNDS = [*map(str, BOUNDS_S), "+Inf"]
_READS = (pb.OPERATION_GET, pb.OPERATION_ACQUIRE)
_OPERATIONS = {number: name.removeprefix("OPERATION_").lower() for name, number in pb.Operation.items()}
_TIERS = {number: name.removeprefix("TIER_").lower() for name, number in pb.Tier.items()}


class Metrics:
    """What `/metrics` answers."""

    def __init__(self, stats: Callable[[], pb.StatsReply]) -> None:
        """`stats` is asked once a scrape."""
        self.registry = CollectorRegistry(auto_describe=False)  # of its own: nobody else's metrics are in it
        self.registry.register(_Families(stats))

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body, and its content type."""
        openmetrics = wants_openmetrics(accept)
        return exposition(self.registry.collect(), openmetrics=openmetrics), OPENMETRICS if openmetrics else TEXT


def wants_openmetrics(accept: str) -> bool:
    """Whether an Accept header names OpenMetrics, whatever else it says. Who keeps an answer for others asks this."""
    return any(part.partition(";")[0].strip().lower() == "application/openmetrics-text" for part in accept.split(","))


def exposition(families: Iterable[Metric], *, openmetrics: bool) -> bytes:
    """The families as text; as prometheus_client's own writers have it, in a fifth of their time.

    Theirs check every name of every sample against a pattern: 9 to 14 ms a scrape, on the
    loop that all clients wait for. (A test compares what parsers read from both.)
    """
    lines: list[str] = []
    for family in families:
        name, kind = family.name, family.type
        if not openmetrics:
            name += {"counter": "_total", "info": "_info"}.get(kind, "")
            kind = {"info": "gauge"}.get(kind, kind)
        lines.append(f"# HELP {name} {_escaped(family.documentation, quotes=openmetrics)}\n# TYPE {name} {kind}\n")
        for sample in family.samples:
            value = repr(sample.value if type(sample.value) is int else float(sample.value))
            if not sample.labels:
                lines.append(f"{sample.name} {value}\n")
                continue
            lines.append(f"{sample.name}{{{_label_text(tuple(sample.labels.items()))}}} {value}\n")
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode()


@lru_cache(LABELS_KEPT)
def _label_text(labels: tuple[tuple[str, str], ...]) -> str:
    return ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in sorted(labels))


def _escaped(text: str, *, quotes: bool) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


class _Families(Collector):
    """All metrics of one StatsReply."""

    def __init__(self, stats: Callable[[], pb.StatsReply]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of a scrape: registering must not ask for stats."""
        return ()

    def collect(self) -> Iterator[Metric]:
        reply = self._stats()
        for part in (_daemon, _host, _blocks, _requests, _operations, _leaving, _sessions, _indexes, _calls, _loops):
            yield from part(reply)
        if reply.HasField("ssd"):
            yield from _ssd(reply.ssd)
            yield from _ssd_moves(reply.ssd)
        if reply.HasField("persist"):
            yield from _persist(reply.persist)
        yield from gpu_metrics.families(reply.gpus)


def _counter(name: str, says: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvstored_{name}", says, value=value)


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvstored_{name}", says, value=value)


def _counters(name: str, says: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"kvstored_{name}", says, labels=[label])
    for of, value in values.items():
        family.add_metric([of], value)
    return family


def _gauges(name: str, says: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"kvstored_{name}", says, labels=[label])
    for of, value in values.items():
        family.add_metric([of], value)
    return family


def _buckets(latencies: Sequence[int], every: int = 1) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus has them; of every so many buckets the last."""
    rows: list[tuple[str, float]] = list(zip(_BOUNDS, accumulate(latencies), strict=True))
    return rows[every - 1 :: every]


def _daemon(reply: pb.StatsReply) -> Iterator[Metric]:
    daemon = reply.daemon
    yield InfoMetricFamily("kvstored_build", "The release that runs.", value={"version": daemon.version})
    yield _gauge("healthy", "1 while the daemon knows of no problem of its own, else 0.", daemon.healthy)
    yield _gauge("problems", "Problems that the daemon knows of; kvstore-cli stats names them.", len(daemon.problems))
    yield _gauge(
        "degraded",
        "What is out of use while the rest serves, such as the SSD tier; kvstore-cli stats names it.",
        len(daemon.degraded),
    )
    yield _gauge("uptime_seconds", "Since the daemon started.", daemon.uptime_s)
    yield _gauge(
        "process_anonymous_bytes", "Private memory of the daemon, without slab and index.", daemon.rss_anon_bytes
    )
    yield _gauge("process_open_fds", "Descriptors that the daemon has open.", daemon.open_descriptors)
    yield _counter("internal_errors", "Bugs of the daemon that calls met; each is in the log.", daemon.internal_errors)
    yield _counter(
        "log_lines_dropped",
        "Lines of the log that nobody took and for which no room was left.",
        daemon.log_lines_dropped,
    )


def _host(reply: pb.StatsReply) -> Iterator[Metric]:
    host = reply.host
    free = sum(pool.free * pool.slot_bytes for pool in reply.pools)
    known = host.used_bytes + free + host.unassigned_bytes + host.draining_bytes
    yield _gauge("host_size_bytes", "Size of the memory tier (host.size).", host.size_bytes)
    yield _gauges(
        "host_bytes",
        "Memory by what it is used for: used (slots with a block, granted or quarantined), free (empty slots of some "
        "block size), unassigned (of no block size yet), draining (taken back, still mapped by clients), other (being "
        "made, and ends of segments); together the size.",
        "state",
        {
            "used": host.used_bytes,
            "free": free,
            "unassigned": host.unassigned_bytes,
            "draining": host.draining_bytes,
            "other": max(host.size_bytes - known, 0),
        },
    )
    yield _gauge(
        "host_fragmentation_ratio",
        "Fragmentation of the slab: bytes of empty slots in segments that hold something, over the size; such memory "
        "is of use to one block size only.",
        host.partly_free_bytes / host.size_bytes if host.size_bytes else 0.0,
    )
    yield _gauge("host_slack_bytes", "Lost between the ends of blocks and the ends of their slots.", host.slack_bytes)
    yield _gauge("host_segments", "Segments that the memory is in.", host.segments)
    yield _gauge("host_locked", "1 where the memory is locked, 0 where it can be swapped out.", host.locked)
    tenants: Counter[str] = Counter({index.tenant: 0 for index in reply.indexes})  # also one without memory
    for pool in reply.pools:
        tenants[pool.tenant] += (pool.slots - pool.free) * pool.slot_bytes
    yield _gauges(
        "tenant_used_bytes", "Memory in used slots, by tenant.", "tenant", dict(tenants.most_common(TENANTS_MAX))
    )


def _blocks(reply: pb.StatsReply) -> Iterator[Metric]:
    pools = reply.pools
    yield _gauge("blocks", "Blocks that can be found.", sum(p.blocks for p in pools))
    yield _gauge("blocks_leased", "Blocks that a client holds for reading in place.", sum(p.leased for p in pools))
    yield _gauge("blocks_pinned", "Blocks that are pinned.", sum(p.pinned for p in pools))
    yield _gauge("blocks_doomed", "Removed while leased; gone with the last lease.", sum(p.doomed for p in pools))
    yield _gauges(
        "slots",
        "Slots of all block sizes: free, granted (a client may write there), quarantined (its session ended, its "
        "process did not), block (holds one).",
        "state",
        {
            "free": sum(p.free for p in pools),
            "granted": sum(p.granted for p in pools),
            "quarantined": sum(p.quarantined for p in pools),
            "block": sum(p.blocks + p.doomed for p in pools),
        },
    )


def _persist(persist: pb.PersistStats) -> Iterator[Metric]:
    yield _gauge(
        "persist_healthy",
        "0 while not all that changes in memory would be there after a restart (host.persist); stats says why.",
        not persist.trouble,
    )
    yield _gauge("persist_unwritten_bytes", "Memory whose blocks a restart would lose.", persist.unwritten_bytes)
    yield _gauge("persist_adopted_blocks", "Taken over from the daemon before, at the start.", persist.adopted_blocks)
    yield _gauge("persist_adopted_seconds", "That it took.", persist.adopted_s)
    yield _gauge("persist_cold", "1 where memory began empty at the start; stats says why.", bool(persist.cold))


def _ssd(ssd: pb.SsdStats) -> Iterator[Metric]:
    yield InfoMetricFamily("kvstored_ssd", "The SSD tier's directory.", value={"path": ssd.path, "layout": ssd.layout})
    yield _gauges(
        "ssd_state",
        "1 for the state that the SSD tier is in: opening, restoring (its records are being read), open, closed.",
        "state",
        {state: float(state == ssd.state) for state in ("opening", "restoring", "open", "closed")},
    )
    yield _gauge("ssd_in_use", "0 while the SSD tier is out of use; stats says why.", not ssd.trouble)
    yield _gauge("ssd_direct", "0 where its bytes go through the page cache.", not ssd.direct_refused)
    yield _gauge(
        "ssd_aside",
        "Directories set aside because they could not be read: above 0 somebody should look at them and remove them.",
        ssd.aside,
    )
    yield _gauge(
        "ssd_growing_refused", "1 where the last segment file that was wanted was not made.", bool(ssd.no_file)
    )
    yield _gauge("ssd_size_bytes", "Size of the SSD tier (ssd.size).", ssd.size_bytes)
    yield _gauge("ssd_room_bytes", "Of ssd.size, what its file system has room for.", ssd.room_bytes)
    yield _gauge("ssd_free_bytes", "What its file system has left.", ssd.free_bytes)
    yield _gauges(
        "ssd_bytes",
        "Bytes of the SSD tier: physical (on the disk, files and catalogue), files (of segment files), used (extents "
        "with a block or under I/O).",
        "kind",
        {"physical": ssd.physical_bytes, "files": ssd.file_bytes, "used": ssd.used_bytes},
    )
    yield _gauge("ssd_blocks", "Blocks on the SSD; those that memory has, too, are among them.", ssd.blocks)
    yield _counter("ssd_evictions", "Blocks that left the SSD for room.", ssd.evicted)
    yield _gauge("ssd_tickets", "Loads and prefetches that somebody waits for.", ssd.tickets)


def _ssd_moves(ssd: pb.SsdStats) -> Iterator[Metric]:
    """What moves between memory and the SSD, and what did not."""
    queues, count = {queue.kind: queue for queue in ssd.queues}, ssd.counters
    waiting = {kind: queue.waiting for kind, queue in queues.items()}
    yield _gauges("ssd_queue_blocks", "Blocks that wait for the SSD, by kind of job.", "kind", waiting)
    waiting_bytes = {kind: queue.waiting_bytes for kind, queue in queues.items()}
    yield _gauges("ssd_queue_bytes", "Bytes of their slots.", "kind", waiting_bytes)
    running = {kind: queue.running for kind, queue in queues.items()}
    yield _gauges("ssd_queue_running", "Blocks being read or written.", "kind", running)
    refused = {kind: queue.refused for kind, queue in queues.items()}
    yield _counters("ssd_queue_refused", "Blocks that found their queue full.", "kind", refused)
    moved = {kind: queue.moved_bytes for kind, queue in queues.items()}
    yield _counters("ssd_moved_bytes", "Bytes of slots that jobs were begun for, by kind of job.", "kind", moved)
    yield _counters(
        "ssd_moved_blocks",
        "Blocks that came: written (to the SSD), loaded (to memory).",
        "direction",
        {"written": count.written, "loaded": count.loaded},
    )
    yield _counters(
        "ssd_block_bytes",
        "Their bytes.",
        "direction",
        {"written": count.written_bytes, "loaded": count.loaded_bytes},
    )
    yield _counters(
        "ssd_errors",
        "Blocks that could not be written, or read.",
        "direction",
        {"write": count.write_errors, "read": count.read_errors},
    )
    yield _counter("ssd_corrupt", "Records whose bytes were not their own: removed, and a miss.", count.corrupt)
    yield _counter(
        "ssd_writes_dropped",
        "Blocks that were to be written and were not: no room in queue or files, gone meanwhile, or out of use.",
        count.writes_dropped,
    )
    yield _counter("ssd_loads_failed", "Blocks that somebody waited for and that did not come.", count.loads_failed)
    yield _counter("ssd_offloaded", "Blocks written because their conversation was idle.", count.offloaded)
    yield _counter(
        "ssd_lost", "Blocks that only the SSD had when its directory was set aside, deleted or replaced.", count.lost
    )
    yield _counter("ssd_troubles", "Times that the SSD tier went out of use.", count.troubles)


def _requests(reply: pb.StatsReply) -> Iterator[Metric]:
    count = reply.counters
    yield _counters(
        "read_blocks",
        "Blocks that reads (get, acquire) asked for, found or not; hit over all is the hit rate in blocks. busy: they "
        "were on the SSD, and too much was being loaded, or held, to bring them.",
        "result",
        {"hit": count.hits, "miss": count.misses, "busy": count.busy},
    )
    yield _counters(
        "read_tokens",
        "The same in tokens, for namespaces that know how many tokens a block has.",
        "result",
        {"hit": count.hit_tokens, "miss": count.miss_tokens},
    )
    yield _counter("read_bytes", "Bytes of the blocks that reads found.", count.hit_bytes)
    yield _counters(
        "match_blocks",
        "Blocks that match was asked about: in the leading run that is present, or behind it.",
        "result",
        {"hit": count.match_hits, "miss": count.match_misses},
    )
    yield _counters(
        "match_tokens",
        "The same in tokens, for namespaces that know how many tokens a block has.",
        "result",
        {"hit": count.match_hit_tokens, "miss": count.match_miss_tokens},
    )
    reads = [row for row in reply.operations if row.operation in _READS]
    matches = [row for row in reply.operations if row.operation == pb.OPERATION_MATCH]
    by_call = {"read": reads, "match": matches}
    yield _counters(
        "requests",
        "Calls of match, and of reads (get, acquire).",
        "call",
        {call: sum(row.calls for row in rows) for call, rows in by_call.items()},
    )
    yield _counters(
        "requests_hit",
        "Those that found at least one block; over kvstored_requests_total it is the share that hit at all.",
        "call",
        {call: sum(row.calls_hit for row in rows) for call, rows in by_call.items()},
    )
    yield _counter("conversations", "Conversations seen, by the hints of puts.", count.conversations)
    yield _counter(
        "conversations_evicted",
        "Times that a conversation came back after a block of it had been evicted for room: evicted while alive.",
        count.conversations_evicted,
    )


def _operations(reply: pb.StatsReply) -> Iterator[Metric]:
    blocks = CounterMetricFamily(
        "kvstored_operation_blocks",
        "Blocks by operation, tier and result; of a put: hit is stored or found to exist, miss is rejected. busy: "
        "there, but too much was being loaded or held.",
        labels=["operation", "tier", "result"],
    )
    size = CounterMetricFamily(
        "kvstored_operation_bytes", "Bytes of blocks read or stored.", labels=["operation", "tier"]
    )
    seconds = HistogramMetricFamily(
        "kvstored_operation_seconds",
        "Time of whole calls, as clients see them, by the slowest tier that a block of the call came from.",
        labels=["operation", "tier"],
    )
    for row in reply.operations:
        operation, tier = _OPERATIONS.get(row.operation, "other"), _TIERS.get(row.tier, "other")
        blocks.add_metric([operation, tier, "hit"], row.hits)
        blocks.add_metric([operation, tier, "miss"], row.misses)
        blocks.add_metric([operation, tier, "busy"], row.busy)
        size.add_metric([operation, tier], row.size_bytes)
        seconds.add_metric([operation, tier], buckets=_buckets(row.latencies), sum_value=row.seconds)
    yield from (blocks, size, seconds)


def _leaving(reply: pb.StatsReply) -> Iterator[Metric]:
    count = reply.counters
    yield _counters(
        "put_blocks",
        "Blocks that reached the daemon to be stored: stored, existing (local clients look first and do not send "
        "those that they find), rejected (the key is another namespace's).",
        "result",
        {"stored": count.stored, "existing": count.existing, "rejected": count.rejected},
    )
    yield _counters(
        "evictions",
        "Blocks that went by themselves: room (for others), inner (the same, before its children, where every leaf was "
        "held), orphan (the same, its parent was not here), expired (its time to live), asked (by an administrator).",
        "reason",
        {
            "room": count.evicted - count.evicted_inner - count.evicted_orphans,
            "inner": count.evicted_inner,
            "orphan": count.evicted_orphans,
            "expired": count.expired,
            "asked": count.evicted_asked,
        },
    )
    yield _counter("removed", "Blocks that clients removed or cleared.", count.removed)
    yield _counter("exhausted", "Calls that found no memory or were above a limit on holds.", count.exhausted)
    yield _counter(
        "reservations_expired",
        "Slots that a gRPC caller reserved and did not fill in time (lease.ttl).",
        count.reservations_expired,
    )
    yield _counter("segments_moved", "Segments that went to another block size.", count.segments_moved)


def _sessions(reply: pb.StatsReply) -> Iterator[Metric]:
    count, sessions = reply.counters, reply.sessions
    ended = sum(session.ended for session in sessions)
    yield _gauges(
        "sessions",
        "Sessions: open, or ended while the process behind them lives, which keeps what it held in quarantine.",
        "state",
        {"open": len(sessions) - ended, "ended": ended},
    )
    yield _counter("sessions_opened", "Sessions opened, also one for each Put and Get.", count.sessions_opened)
    yield _counter("sessions_ended", "Sessions that ended.", count.sessions_ended)
    yield _gauge("leases", "Slots leased, over all sessions.", sum(session.leased_slots for session in sessions))
    yield _gauge("held_bytes", "Bytes that sessions hold.", sum(session.held_bytes for session in sessions))
    yield _counter("protocol_errors", "Connections that broke the protocol.", count.protocol_errors)


def _indexes(reply: pb.StatsReply) -> Iterator[Metric]:
    indexes = reply.indexes
    yield _gauges(
        "index_entries",
        "Entries of the shared indexes of all tenants, by what is in them.",
        "state",
        {
            "live": sum(i.live for i in indexes),
            "tombstone": sum(i.tombstones for i in indexes),
            "free": sum(max(i.capacity - i.live - i.tombstones, 0) for i in indexes),
        },
    )
    yield _gauge("index_bytes", "Shared memory of the indexes.", sum(i.size_bytes for i in indexes))
    yield _gauge(
        "index_unpublished",
        "Blocks that are stored and that readers cannot find yet, for want of a place in the index.",
        sum(i.unpublished for i in indexes),
    )


def _calls(reply: pb.StatsReply) -> Iterator[Metric]:
    labels = ["edge", "call"]
    seconds = HistogramMetricFamily(
        "kvstored_call_seconds", "Time from a request's arrival to its answer, in the daemon.", labels=labels
    )
    errors = CounterMetricFamily("kvstored_call_errors", "Requests that were answered with an error.", labels=labels)
    for row in reply.calls:
        buckets = _buckets(row.latencies, CALL_BUCKETS)
        seconds.add_metric([row.edge, row.call], buckets=buckets, sum_value=row.seconds)
        errors.add_metric([row.edge, row.call], row.errors)
    yield from (seconds, errors)


def _loops(reply: pb.StatsReply) -> Iterator[Metric]:
    loops = reply.loops
    yield _counters("loop_runs", "Turns of a background loop.", "loop", {row.name: row.runs for row in loops})
    yield _counters("loop_errors", "Turns that failed.", "loop", {row.name: row.errors for row in loops})
    yield _gauges("loop_failing", "1 while the last turn failed.", "loop", {row.name: row.failing for row in loops})
