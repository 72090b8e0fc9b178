"""`kvstore-cli`: looks into a running daemon.

Exit status: 0 done, 1 the daemon cannot be reached or refuses, 2 wrong usage.
"""

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvstored.v1.endpoint import ENDPOINT_VARIABLE, default_endpoint
from kvstored.v1.errors import InvalidArgument, KVStoreError, Unavailable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

EXIT_UNREACHABLE = 1
EXIT_USAGE = 2
PIPE_COLUMNS = 10_000
"""The width for a reader that is no terminal: lines are for its tools to break."""

F = TypeVar("F", bound=Callable[..., Any])
Row = Mapping[str, Any]


def common_options(command: F) -> F:
    """What every command takes: `--endpoint` (also before the command) and `--json`."""
    endpoint = click.option("--endpoint", metavar="ADDRESS", help="The daemon, as unix:///PATH or grpc://HOST:PORT.")
    return endpoint(click.option("--json", "as_json", is_flag=True, help="For programs.")(command))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--endpoint", metavar="ADDRESS", help=f"The daemon; default: ${ENDPOINT_VARIABLE}, then the usual socket."
)
@click.version_option(package_name="kvstored", prog_name="kvstore-cli")
@click.pass_context
def main(context: click.Context, endpoint: str | None) -> None:
    """Looks into a running kvstored."""
    context.obj = endpoint


@main.command()
@common_options
@click.pass_obj
def stats(above: str | None, endpoint: str | None, as_json: bool) -> None:
    """Shows what the daemon holds, for whom, and what it has counted."""
    reply = fetch_stats(endpoint or above or default_endpoint())
    if as_json:
        click.echo(stats_json(reply))
        return
    from rich.console import Console

    print_stats(reply, Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS))


def fetch_stats(endpoint: str) -> dict[str, Any]:
    """The daemon's StatsReply as a dict; ends the program with a message where there is none to be had."""
    try:
        from kvstore_client import Client

        logging.getLogger("kvstore_client").setLevel(logging.ERROR)  # what went wrong is said once, below
        client = Client(endpoint)
        try:
            reply: dict[str, Any] = client.stats()
        finally:
            client.close()
    except Unavailable as error:
        click.echo(
            f"kvstore-cli: no daemon at {endpoint}: {error}\n"
            f"Start one with `kvstored`, or name another with --endpoint or ${ENDPOINT_VARIABLE}.",
            err=True,
        )
        sys.exit(EXIT_UNREACHABLE)
    except InvalidArgument as error:
        click.echo(f"kvstore-cli: {error}", err=True)
        sys.exit(EXIT_USAGE)
    except KVStoreError as error:
        click.echo(f"kvstore-cli: the daemon at {endpoint} refused: {error}", err=True)
        sys.exit(EXIT_UNREACHABLE)
    return reply


def stats_json(reply: Mapping[str, Any]) -> str:
    """The reply as JSON; bytes as hexadecimal digits."""
    return json.dumps(reply, indent=2, default=lambda value: value.hex())


def print_stats(reply: Mapping[str, Any], console: "Console") -> None:
    """Tables for people, a section each."""
    for title, rendered in (
        ("daemon", _fields(_daemon(reply["daemon"]))),
        ("host memory", _fields(_host(reply["host"]))),
        ("pools", _rows(reply["pools"], POOL_COLUMNS)),
        ("sessions", _rows(reply["sessions"], SESSION_COLUMNS)),
        ("counters", _fields(_counters(reply["counters"]))),
        ("background loops", _rows(reply["loops"], LOOP_COLUMNS)),
    ):
        console.print(title, style="bold", markup=False, highlight=False)
        console.print(rendered)
        console.print()


def human_bytes(size_bytes: int) -> str:
    """`1.5 GiB`: three figures at most, for people."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        # 1023.95 and above would be printed as 1024.0
        if value < 1023.95 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def human_seconds(seconds: float) -> str:
    """`3d 4h`, `2m 5s`, `12s`: the two largest units."""
    left = int(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= length or (unit == "s" and not parts):
            parts.append(f"{left // length}{unit}")
            left %= length
    return " ".join(parts[:2])


def hit_rate(counters: Row) -> str:
    """Hits of all lookups in percent; `-` before the first."""
    asked = counters["hits"] + counters["misses"]
    return f"{100 * counters['hits'] / asked:.1f} %" if asked else "-"


def _daemon(row: Row) -> list[tuple[str, str]]:
    health = "healthy" if row["healthy"] else "UNHEALTHY"
    return [
        ("version", row["version"]),
        ("pid", str(row["pid"])),
        ("up", human_seconds(row["uptime_s"])),
        ("socket", row["socket"]),
        ("grpc", row["grpc"] or "off"),
        ("own memory", human_bytes(row["rss_anon_bytes"])),
        ("state", "; ".join([health, *row["problems"]])),
    ]


def _host(row: Row) -> list[tuple[str, str]]:
    share = f" ({100 * row['used_bytes'] / row['size_bytes']:.1f} %)" if row["size_bytes"] else ""
    draining = row["draining_bytes"]
    return [
        ("size", human_bytes(row["size_bytes"])),
        ("used", human_bytes(row["used_bytes"]) + share),
        ("blocks", human_bytes(row["block_bytes"])),
        ("unassigned", human_bytes(row["unassigned_bytes"])),
        ("segments", f"{row['segments']} of {human_bytes(row['segment_bytes'])}"),
        *([("draining", human_bytes(draining))] if draining else []),
        ("locked", "yes" if row["locked"] else f"NO, may be swapped out: {row['locked_reason']}"),
        ("huge pages", _yes(row["huge_pages"])),
    ]


def _counters(row: Row) -> list[tuple[str, str]]:
    """All of them, also those of a newer daemon."""
    counts = [
        (name.replace("_", " "), human_bytes(value) if name.endswith("_bytes") else f"{value:,}")
        for name, value in row.items()
    ]
    return [("hit rate", hit_rate(row)), *counts]


def _yes(value: Any) -> str:
    return "yes" if value else "no"


Column = tuple[str, str, Callable[[Any], str]]
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
    ("local", "local", _yes),
    ("read only", "read_only", _yes),
    ("granted", "granted_slots", str),
    ("leased", "leased_slots", str),
    ("held", "held_bytes", human_bytes),
    ("ended", "ended", _yes),
)
LOOP_COLUMNS: Sequence[Column] = (
    ("name", "name", str),
    ("runs", "runs", str),
    ("errors", "errors", str),
    ("failing", "failing", lambda value: "FAILING" if value else "no"),
    ("last error", "last_error", lambda value: value or "-"),
)


def _fields(pairs: Sequence[tuple[str, str]]) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2), pad_edge=True)
    for name, value in pairs:
        table.add_row(Text(name), Text(value, overflow="fold"))
    return table


def _rows(rows: Sequence[Row], columns: Sequence[Column]) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Text("  none")
    table = Table(box=None, header_style="dim", padding=(0, 2), pad_edge=True)
    for title, key, _ in columns:
        number = isinstance(rows[0][key], int | float) and not isinstance(rows[0][key], bool)
        table.add_column(title, justify="right" if number else "left")
    for row in rows:
        # Text, not str: names come from clients, and rich would read brackets in them as its markup.
        table.add_row(*(Text(show(row[key]), overflow="fold") for _, key, show in columns))
    return table
