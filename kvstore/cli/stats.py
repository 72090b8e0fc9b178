"""`kvstore-cli stats`: what the daemon holds, for whom, and what it has counted."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.connection import EXIT_HELP, Way, common_options, connected
from kvstore.cli.tables import (
    Column,
    Row,
    console,
    count,
    fields,
    human_bytes,
    human_seconds,
    human_time,
    percent,
    rows,
    section,
    yes_no,
)
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.latency import BOUNDS_S

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

NAMESPACES_SHOWN = 20
WATCH_S = 2.0
WATCH_S_MIN, WATCH_S_MAX = 0.1, 86400.0


def _number(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Not a NaN, which lies in every range as click compares."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("nan is not a number of seconds", context, parameter)
    return value


@click.command(epilog=EXIT_HELP)
@common_options
@click.option(
    "--watch",
    "interval_s",
    is_flag=False,
    flag_value=WATCH_S,
    type=click.FloatRange(WATCH_S_MIN, WATCH_S_MAX),
    callback=_number,
    metavar="[SECONDS]",
    help=f"Again and again, every {WATCH_S:.0f} s or as said, with rates, until Ctrl-C; "
    "with --json one object a line. Goes on when the daemon restarts.",
)
@click.pass_obj
def stats(
    above: Way, endpoint: str | None, token_file: str | None, ca: str | None, as_json: bool, interval_s: float | None
) -> None:
    """Shows what the daemon holds, for whom, and what it has counted."""
    with connected(Way(endpoint, token_file, ca).under(above)) as client:
        if interval_s is not None:
            from kvstore.cli.watch import watch

            watch(client, interval_s, as_json=as_json)
            return
        reply = client.stats()
    if as_json:
        click.echo(stats_json(reply))
    else:
        print_stats(reply, console())


def stats_json(reply: Mapping[str, Any]) -> str:
    """The reply as JSON; bytes as hexadecimal digits."""
    return json.dumps(reply, indent=2, default=lambda value: value.hex())


def print_stats(reply: Mapping[str, Any], console: "Console") -> None:
    """Tables for people, a section each."""
    for part in sections(reply):
        console.print(part)


def sections(reply: Mapping[str, Any]) -> "Iterable[RenderableType]":
    """What is shown of a reply, one after another; what only a newer daemon counts is left out where it is not."""
    yield section("daemon", fields(_daemon(reply["daemon"])))
    yield section("host memory", fields(_host(reply["host"])))
    if reply.get("persist"):
        yield section("memory over restarts", fields(_persist(reply["persist"])))
    if reply.get("ssd"):
        yield section("SSD", fields(_ssd(reply["ssd"])))
        yield section("to and from the SSD", rows(reply["ssd"]["queues"], QUEUE_COLUMNS))
    if reply.get("gpus_off"):
        yield section("devices", fields([("state", f"OFF: {reply['gpus_off']}")]))
    for gpu in reply.get("gpus", ()):
        yield section(f"device {gpu['uuid']}", fields(_gpu(gpu)))
    yield section("pools", rows(reply["pools"], POOL_COLUMNS))
    yield section("sessions", rows(reply["sessions"], SESSION_COLUMNS))
    yield section(*_namespaces(reply["namespaces"], with_ssd=bool(reply.get("ssd"))))
    yield section("reuse", fields(_reuse(reply)))
    if reply.get("operations"):
        yield section("operations", rows([_operation(row) for row in reply["operations"]], OPERATION_COLUMNS))
    if reply.get("calls"):
        yield section("calls", rows([_timed(row) for row in reply["calls"]], CALL_COLUMNS))
    yield section("counters", fields(_counters(reply["counters"])))
    yield section("background loops", rows(reply["loops"], LOOP_COLUMNS))


def _daemon(row: Row) -> list[tuple[str, str]]:
    health = "healthy" if row["healthy"] else "UNHEALTHY"
    return [
        ("version", row["version"]),
        ("pid", str(row["pid"])),
        ("up", human_seconds(row["uptime_s"])),
        ("socket", row["socket"]),
        ("grpc", row["grpc"] or "off"),
        ("http", row.get("http") or "off"),
        ("own memory", human_bytes(row["rss_anon_bytes"])),
        ("state", "; ".join([health, *row["problems"]])),
        *[("degraded", why) for why in row.get("degraded", ())],
    ]


def _host(row: Row) -> list[tuple[str, str]]:
    share = f" ({percent(row['used_bytes'], row['size_bytes'])})" if row["size_bytes"] else ""
    draining = row["draining_bytes"]
    return [
        ("size", human_bytes(row["size_bytes"])),
        ("used", human_bytes(row["used_bytes"]) + share),
        ("bytes of blocks", human_bytes(row["block_bytes"])),
        ("unassigned", human_bytes(row["unassigned_bytes"])),
        ("segments", f"{row['segments']} of {human_bytes(row['segment_bytes'])}"),
        *([("draining", human_bytes(draining))] if draining else []),
        ("locked", "yes" if row["locked"] else f"NO, may be swapped out: {row['locked_reason']}"),
        ("huge pages", yes_no(row["huge_pages"])),
    ]


def _persist(row: Row) -> list[tuple[str, str]]:
    adopted = (
        f"{row['adopted_blocks']} blocks in {row['adopted_segments']} segments, {row['adopted_sessions']} sessions, "
        f"within {human_seconds(row['adopted_s'])}"
    )
    left_out = f"{row['refused_blocks']} blocks, {row['lost_segments']} segments"
    return [
        ("host.persist", f"{row['path']} ({row['kind']})" if row["path"] else row["kind"]),
        ("state", f"NOT ALL OF IT: {row['trouble']}" if row["trouble"] else "what is in memory outlives the daemon"),
        *([("room left", human_bytes(row["free_bytes"]))] if row["kind"] == "directory" else []),
        ("at the start", f"empty: {row['cold']}" if row["cold"] else adopted),
        *([("left out", left_out)] if row["refused_blocks"] or row["lost_segments"] else []),
    ]


def _ssd(row: Row) -> list[tuple[str, str]]:
    count_of = row["counters"]
    share = f" ({percent(row['physical_bytes'], row['size_bytes'])})" if row["size_bytes"] else ""
    return [
        ("path", f"{row['path']} ({row['layout']})"),
        ("state", f"OUT OF USE: {row['trouble']}" if row["trouble"] else row["state"]),
        *([("cannot grow", row["no_file"])] if row["no_file"] else []),
        ("direct I/O", f"no: {row['direct_refused']}" if row["direct_refused"] else "yes"),
        ("size", human_bytes(row["size_bytes"]) + _less_room(row)),
        ("on the disk", human_bytes(row["physical_bytes"]) + share),
        ("free there", human_bytes(row["free_bytes"])),
        ("blocks", count(row["blocks"])),
        ("in slots", f"{human_bytes(row['used_bytes'])} of {human_bytes(row['file_bytes'])} that are laid out so far"),
        *([("set aside", f"{row['aside']}: look at them, then remove them")] if row["aside"] else []),
        ("evicted", count(row["evicted"])),
        ("waited for", count(row["tickets"])),
        *[
            (name.replace("_", " "), human_bytes(value) if name.endswith("_bytes") else count(value))
            for name, value in count_of.items()
        ],
    ]


def _gpu(row: Row) -> list[tuple[str, str]]:
    share = f" ({percent(row['used_bytes'], row['size_bytes'])})" if row["size_bytes"] else ""
    locked = human_bytes(row["page_locked_bytes"])
    draining, hanging = row["draining_bytes"], row["calls_hanging"]
    return [
        ("name", row["name"]),
        ("state", f"OUT OF USE: {row['trouble']}" if row["trouble"] else "in use"),
        *([("cannot grow", row["no_memory"])] if row["no_memory"] else []),
        ("generation", f"{row['generation']}, given to clients as {row['handle_kind']}"),
        ("size", human_bytes(row["size_bytes"])),
        ("used", f"{human_bytes(row['used_bytes'])}{share} in {row['segments']} segments"),
        *([("draining", human_bytes(draining))] if draining else []),
        ("blocks", count(row["blocks"])),
        ("slots", f"{row['granted']} granted, {row['leased']} leased, {row['quarantined']} quarantined"),
        ("under way", f"{row['copying']} copies, {row['commits_pending']} commits, {row['tickets']} prefetches"),
        ("slab page-locked", f"{locked}; NOT ALL: {row['not_page_locked']}" if row["not_page_locked"] else locked),
        *([("calls that hang", count(hanging))] if hanging else []),
        *_counters(row["counters"]),
    ]


def _less_room(row: Row) -> str:
    """Where the disk is smaller than `ssd.size`; nothing is known of one that was not measured."""
    if not row["physical_bytes"] or row["room_bytes"] >= row["size_bytes"]:
        return ""
    return f" (its file system has room for {human_bytes(row['room_bytes'])})"


def _namespaces(found: Sequence[Row], *, with_ssd: bool) -> "tuple[str, RenderableType]":
    """The largest; all are in the JSON."""
    largest = sorted(found, key=lambda row: (row["blocks"], row.get("ssd_blocks", 0)), reverse=True)[:NAMESPACES_SHOWN]
    title = "namespaces" if len(found) == len(largest) else f"namespaces (the {len(largest)} largest of {len(found)})"
    shown = [{**row, "size_bytes": row["blocks"] * row["block_bytes"]} for row in largest]
    return title, rows(shown, (*NAMESPACE_COLUMNS, *(SSD_COLUMNS if with_ssd else ())))


def hit_rate(counters: Row) -> str:
    """Hits of all lookups in percent; `-` before the first."""
    return percent(counters["hits"], counters["hits"] + counters["misses"])


def requests_hit(operations: Sequence[Row], kinds: Sequence[int]) -> str:
    """Calls that found anything at all, of all such calls."""
    of_kind = [row for row in operations if row["operation"] in kinds]
    return percent(sum(row["calls_hit"] for row in of_kind), sum(row["calls"] for row in of_kind))


def _reuse(reply: Row) -> list[tuple[str, str]]:
    row, operations = reply["counters"], reply.get("operations", ())
    tokens = row.get("hit_tokens", 0)
    return [
        ("hit rate", hit_rate(row)),
        ("hit rate in tokens", percent(tokens, tokens + row.get("miss_tokens", 0))),
        ("reads that hit", requests_hit(operations, (pb.OPERATION_GET, pb.OPERATION_ACQUIRE))),
        ("matches that hit", requests_hit(operations, (pb.OPERATION_MATCH,))),
        ("conversations evicted alive", percent(row.get("conversations_evicted", 0), row.get("conversations", 0))),
    ]


def _counters(row: Row) -> list[tuple[str, str]]:
    """All of them, also those of a newer daemon."""
    return [
        (name.replace("_", " "), human_bytes(value) if "bytes" in name else count(value)) for name, value in row.items()
    ]


# -- times


def quantile(latencies: Sequence[int], share: float) -> str:
    """The bucket that this share of the calls lies below the end of: `≤ 200 µs`."""
    wanted, seen = share * sum(latencies), 0
    if not wanted:
        return "-"
    for bound, calls in zip(BOUNDS_S, latencies, strict=False):
        seen += calls
        if seen >= wanted:
            return f"≤ {human_time(bound)}"
    return f"> {human_time(BOUNDS_S[-1])}"


def _timed(row: Row) -> dict[str, Any]:
    """With the mean and two quantiles of its calls."""
    return {
        **row,
        "mean": human_time(row["seconds"] / row["calls"]) if row["calls"] else "-",
        "p50": quantile(row["latencies"], 0.5),
        "p99": quantile(row["latencies"], 0.99),
    }


def _operation(row: Row) -> dict[str, Any]:
    return {
        **_timed(row),
        "operation": _name(pb.Operation, row["operation"]),
        "tier": _name(pb.Tier, row["tier"]),
        "rate": percent(row["hits"], row["hits"] + row["misses"]),
        "requests": percent(row["calls_hit"], row["calls"]),
    }


def _name(kind: Any, number: int) -> str:
    """A word for people: `get` of OPERATION_GET; the number where a newer daemon knows more of them."""
    try:
        name: str = kind.Name(number)
    except ValueError:
        return str(number)
    return name.partition("_")[2].lower()


POOL_COLUMNS: Sequence[Column] = (
    ("tenant", "tenant", str),
    ("block", "block_bytes", human_bytes),
    ("segments", "segments", str),
    ("slots", "slots", str),
    ("free", "free", str),
    ("blocks", "blocks", str),
    ("granted", "granted", str),
    ("leased", "leased", str),
    ("pinned", "pinned", str),
    ("doomed", "doomed", str),
    ("quarantined", "quarantined", str),
)
SESSION_COLUMNS: Sequence[Column] = (
    ("id", "id", str),
    ("client", "client", str),
    ("tenant", "tenant", str),
    ("pid", "pid", str),
    ("age", "age_s", human_seconds),
    ("local", "local", yes_no),
    ("read only", "read_only", yes_no),
    ("granted", "granted_slots", str),
    ("leased", "leased_slots", str),
    ("held", "held_bytes", human_bytes),
    ("ended", "ended", yes_no),
)
NAMESPACE_COLUMNS: Sequence[Column] = (
    ("id", "id", str),
    ("digest", "digest", lambda value: (value.hex() if isinstance(value, bytes) else value)[:12]),
    ("label", "label", str),
    ("tenant", "tenant", str),
    ("block", "block_bytes", human_bytes),
    ("blocks", "blocks", count),
    ("bytes", "size_bytes", human_bytes),
)
SSD_COLUMNS: Sequence[Column] = (("on the SSD", "ssd_blocks", count),)
QUEUE_COLUMNS: Sequence[Column] = (
    ("kind", "kind", str),
    ("waiting", "waiting", count),
    ("bytes", "waiting_bytes", human_bytes),
    ("running", "running", count),
    ("refused", "refused", count),
    ("moved", "moved_bytes", human_bytes),
)
TIME_COLUMNS: Sequence[Column] = (("mean", "mean", str), ("p50", "p50", str), ("p99", "p99", str))
OPERATION_COLUMNS: Sequence[Column] = (
    ("operation", "operation", str),
    ("tier", "tier", str),
    ("calls", "calls", count),
    ("that hit", "requests", str),
    ("hits", "hits", count),
    ("misses", "misses", count),
    ("busy", "busy", count),
    ("hit rate", "rate", str),
    ("bytes", "size_bytes", human_bytes),
    *TIME_COLUMNS,
)
CALL_COLUMNS: Sequence[Column] = (
    ("edge", "edge", str),
    ("call", "call", str),
    ("calls", "calls", count),
    ("errors", "errors", count),
    *TIME_COLUMNS,
)
LOOP_COLUMNS: Sequence[Column] = (
    ("name", "name", str),
    ("runs", "runs", str),
    ("errors", "errors", str),
    ("failing", "failing", lambda value: "FAILING" if value else "no"),
    ("last error", "last_error", lambda value: value or "-"),
)
