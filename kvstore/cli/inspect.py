"""`kvstore-cli inspect`: one key, namespace, session or segment; and the end of a session."""

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvstore.cli.connection import (
    EXIT_HELP,
    EXIT_NOT_FOUND,
    Way,
    common_options,
    confirm,
    connected,
    fail,
    hex_bytes,
)
from kvstore.cli.tables import (
    Column,
    Row,
    console,
    count,
    fields,
    human_bytes,
    human_seconds,
    plain,
    rows,
    section,
    yes_no,
)
from kvstored.v1 import DIGEST_PREFIX_BYTES_MIN, KEY_BYTES
from kvstored.v1 import kvstore_pb2 as pb

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvstore_client import Client

NUMBER_MAX = {"session": (1 << 64) - 1, "segment": (1 << 32) - 1}
NUMBER = re.compile(r"0|[1-9][0-9]{0,19}")
ELSE_LOOK = {
    "key": "It was evicted or never stored, or is another tenant's: --tenant NAME",
    "namespace": "`kvstore-cli stats` lists the namespaces, with --json all; one of another tenant: --tenant NAME",
    "session": "`kvstore-cli stats` lists the sessions there are",
    "segment": "`kvstore-cli inspect key` and `inspect session` name those there are",
}
"""What to do next where there is no such thing."""

CHILDREN_SHOWN = 8
SLOTS_SHOWN = 16


@click.command(epilog=EXIT_HELP)
@common_options
@click.option(
    "--tenant",
    default="",
    metavar="NAME",
    help='Whose key or namespace; default: that of the token, or "default".',
)
@click.option("--end", is_flag=True, help="Ends the session. Asks first.")
@click.option("--yes", is_flag=True, help="Does not ask.")
@click.argument("kind", type=click.Choice(["key", "namespace", "session", "segment"]))
@click.argument("name")
@click.pass_obj
def inspect(
    above: Way,
    endpoint: str | None,
    token_file: str | None,
    ca: str | None,
    as_json: bool,
    tenant: str,
    end: bool,
    yes: bool,
    kind: str,
    name: str,
) -> None:
    """Shows one thing closely.

    \b
    key HEX           where its copies are, parent and children, hits, age
    namespace DIGEST  what is stored in it
    session ID        what it holds; with --end, ends it
    segment ID        what lies in it, and who has it

    Of a key or digest, the first 8 digits or more will do where no other begins so.

    A session that is ended is closed by the daemon. Its client opens another one at its next call
    and goes on with what it held; what nobody takes over is used again when the process has exited.
    """
    request = _request(kind, name, tenant)
    if end and kind != "session":
        raise click.UsageError("--end is for a session")
    with connected(Way(endpoint, token_file, ca).under(above)) as client:
        found = _look(client, request)
        if end and found is not None:
            _end(client, found["session"], as_json=as_json, yes=yes)
            return
    if as_json:
        click.echo(json.dumps(found or {}, indent=2))
    if found is None:
        where = f" of tenant {tenant}" if tenant else ""
        fail(f"there is no {kind} {name}{where}. {ELSE_LOOK[kind]}", EXIT_NOT_FOUND)
    if not as_json:
        out = console()
        for title, part in SECTIONS[kind](found[kind]):
            out.print(section(title, part))


def _request(kind: str, name: str, tenant: str) -> pb.InspectRequest:
    if kind == "key":
        return pb.InspectRequest(tenant=tenant, key=hex_bytes(name, "key", DIGEST_PREFIX_BYTES_MIN, KEY_BYTES))
    if kind == "namespace":
        return pb.InspectRequest(
            tenant=tenant, namespace=hex_bytes(name, "namespace", DIGEST_PREFIX_BYTES_MIN, KEY_BYTES)
        )
    if not NUMBER.fullmatch(name) or int(name) > NUMBER_MAX[kind]:
        raise click.UsageError(f"{kind} {plain(name[:80])!r} is not a number as `kvstore-cli` shows them, such as 12")
    number = int(name)
    return pb.InspectRequest(session=number) if kind == "session" else pb.InspectRequest(segment=number)


def _look(client: "Client", request: pb.InspectRequest) -> dict[str, Any] | None:
    """What was found, under the name of its kind; None for nothing."""
    from kvstore_client import admin
    from kvstore_client.stats import as_dict

    reply = admin.inspect(client, request)
    kind = reply.WhichOneof("found")
    return {kind: as_dict(getattr(reply, kind))} if kind else None


def _end(client: "Client", found: Row, *, as_json: bool, yes: bool) -> None:
    from kvstore_client import admin
    from kvstore_client.stats import as_dict

    stats = found["stats"]
    if stats["ended"]:
        _not_there(stats)
    confirm(
        f"This ends session {stats['id']} of {stats['client']!r} (process {stats['pid']}), which holds "
        f"{human_bytes(stats['held_bytes'])}.",
        yes=yes,
    )
    reply = admin.end_session(client, stats["id"])
    if as_json:
        click.echo(json.dumps(as_dict(reply), indent=2))
    if not reply.found:
        _not_there(stats)
    if not as_json:
        click.echo(_what_it_did(stats, reply.quarantined))


def _what_it_did(stats: Row, quarantined: int) -> str:
    """People expect more of it than it can do: the process lives."""
    number, process, leased = stats["id"], f"process {stats['pid']}", stats["leased_slots"]
    holds = [f"{count(slots)} {what}" for slots, what in ((quarantined, "granted"), (leased, "leased")) if slots]
    stays = (
        f"What {process} may still look at or write to ({' and '.join(holds)} slots) is given to others when it exits, "
        "or connects again without it."
        if holds
        else "It held nothing."
    )
    return (
        f"ended session {number}: its connection is closed\n{stays}\n"
        f"A client that lives connects again at its next call, under another number, and goes on with what it held. "
        f"To keep it away, end {process}."
    )


def _not_there(stats: Row) -> NoReturn:
    fail(
        f"there is no session {stats['id']} any more. What it held is given to others when process {stats['pid']}, "
        f"if it lives, exits; {ELSE_LOOK['session']}",
        EXIT_NOT_FOUND,
    )


# -- tables

Parts = list[tuple[str, Any]]


def _key(row: Row) -> Parts:
    parent = row["parent"]
    if not parent:
        above = "none: the beginning of a chain"
    else:
        above = parent if row["parent_present"] else f"{parent} (not here: nothing leads to this block)"
    children = row["children"][:CHILDREN_SHOWN]
    further = row["children_count"] - len(children)
    return [
        (
            "key",
            fields(
                [
                    ("key", row["key"]),
                    *_of(row["namespace"]),
                    ("place in its chain", str(row["depth"])),
                    ("parent", above),
                    ("children", count(row["children_count"])),
                    *[("", child) for child in children],
                    *([("", f"and {count(further)} more")] if children and further else []),
                    ("hits", count(row["hits"])),
                    ("age", human_seconds(row["age_s"])),
                    ("last used", f"{human_seconds(row['idle_s'])} ago"),
                    ("leases", str(row["leases"])),
                    ("pinned", f"for {human_seconds(row['pinned_s'])} more" if row["pinned_s"] else "no"),
                    ("ends", f"in {human_seconds(row['ttl_s'])}" if row["ttl_s"] else "never"),
                ]
            ),
        ),
        ("copies", _copies(row["copies"])),
    ]


def _of(namespace: Row) -> list[tuple[str, str]]:
    return [
        ("namespace", f"{namespace['digest']} ({namespace['label']})"),
        ("tenant", namespace["tenant"]),
        ("block", human_bytes(namespace["block_bytes"])),
    ]


def _copies(found: Sequence[Row]) -> "RenderableType":
    on_devices = any(copy.get("device") for copy in found)
    shown = [{**copy, "tier": _tier(copy["tier"])} for copy in found]
    return rows(shown, (*COPY_COLUMNS, *(DEVICE_COLUMNS if on_devices else ())))


def _tier(number: int) -> str:
    return pb.Tier.Name(number).removeprefix("TIER_").lower() if number in pb.Tier.values() else str(number)


def _namespace(row: Row) -> Parts:
    stats, pool = row["stats"], row["pool"]
    return [
        (
            "namespace",
            fields(
                [
                    *_of(stats),
                    ("blocks", f"{count(stats['blocks'])} ({human_bytes(stats['blocks'] * stats['block_bytes'])})"),
                    *([("on the SSD", _on_ssd(stats))] if stats.get("ssd_blocks") else []),
                    *[(name, count(row[name])) for name in ("leased", "pinned", "roots", "orphans")],
                    ("longest chain", count(row["deepest"] + 1 if stats["blocks"] else 0)),
                    ("last used", f"{human_seconds(row['idle_s'])} ago" if stats["blocks"] else "-"),
                    ("oldest block used", f"{human_seconds(row['oldest_s'])} ago" if stats["blocks"] else "-"),
                ]
            ),
        ),
        (
            "its pool",
            fields(
                [
                    ("slots", count(pool["slots"])),
                    *[(name, count(pool[name])) for name in ("free", "blocks", "granted", "leased", "pinned")],
                    ("quarantined", count(pool["quarantined"])),
                    ("segments", count(pool["segments"])),
                ]
            ),
        ),
    ]


def _on_ssd(stats: Row) -> str:
    return f"{count(stats['ssd_blocks'])} ({human_bytes(stats['ssd_blocks'] * stats['block_bytes'])})"


def _session(row: Row) -> Parts:
    stats = row["stats"]
    return [
        (
            "session",
            fields(
                [
                    ("id", str(stats["id"])),
                    ("client", stats["client"]),
                    ("tenant", stats["tenant"]),
                    ("pid", str(stats["pid"])),
                    ("age", human_seconds(stats["age_s"])),
                    ("local", yes_no(stats["local"])),
                    ("read only", yes_no(stats["read_only"])),
                    ("ended", "yes: its process lives on" if stats["ended"] else "no"),
                    ("held", human_bytes(stats["held_bytes"])),
                    ("granted", _slots(stats["granted_slots"], row["granted"])),
                    ("leased", _slots(stats["leased_slots"], row["leased"])),
                    ("segments", " ".join(map(str, row["segments"])) or "none"),
                ]
            ),
        )
    ]


def _slots(number: int, refs: Sequence[int]) -> str:
    """How many, and the first as SEGMENT:SLOT."""
    places = [f"{ref >> 32}:{ref & 0xFFFFFFFF}" for ref in refs[:SLOTS_SHOWN]]
    return " ".join([count(number), *(["at", *places] if places else []), *(["..."] if number > len(places) else [])])


def _segment(row: Row) -> Parts:
    states = ("free", "blocks", "granted", "leased", "pinned", "doomed", "quarantined")
    return [
        (
            "segment",
            fields(
                [
                    ("id", str(row["id"])),
                    ("size", human_bytes(row["size_bytes"])),
                    ("tenant", row["tenant"] or "nobody's"),
                    ("block", human_bytes(row["block_bytes"]) if row["block_bytes"] else "in no pool"),
                    ("slots", count(row["slots"])),
                    *[(name, count(row[name])) for name in states],
                    ("last used", f"{human_seconds(row['idle_s'])} ago" if row["blocks"] else "-"),
                    ("sessions", " ".join(map(str, row["sessions"])) or "none"),
                    ("draining", yes_no(row["draining"])),
                ]
            ),
        )
    ]


SECTIONS: dict[str, Callable[[Row], Parts]] = {
    "key": _key,
    "namespace": _namespace,
    "session": _session,
    "segment": _segment,
}
DEVICE_COLUMNS: Sequence[Column] = (("device", "device", lambda value: value or "-"),)
COPY_COLUMNS: Sequence[Column] = (
    ("tier", "tier", str),
    ("segment", "segment", str),
    ("slot", "slot", str),
    ("bytes", "size_bytes", human_bytes),
)
