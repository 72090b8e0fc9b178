"""`kvstore-cli evict`: drops blocks that nobody holds, and asks before that is much."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvstore.cli.connection import (
    EXIT_HELP,
    EXIT_NOT_FOUND,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    Way,
    common_options,
    confirm,
    connected,
    fail,
    hex_bytes,
)
from kvstore.cli.inspect import ELSE_LOOK
from kvstore.cli.tables import count, human_bytes, percent, plain
from kvstore.config.values import Refused, parse_size_bytes
from kvstored.v1 import DIGEST_PREFIX_BYTES_MIN, KEY_BYTES, KEYS_MAX
from kvstored.v1 import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstore_client import Client

MUCH_BYTES = 1 << 30
MUCH_SHARE = 0.1
"""More than this, of bytes or of the blocks there are, is asked about."""

KEYS_FROM_MAX = 1_000_000
"""Keys of one file: 32 MB of them."""

LINE_CHARACTERS_MAX = 200
NAMED_MAX = 8
"""Tenants or sessions in a message; all are in `stats --json`."""

TIERS = {"all": pb.TIER_NONE, "gpu": pb.TIER_GPU, "host": pb.TIER_HOST, "ssd": pb.TIER_SSD}
FIELDS = {
    "gpu": ("gpu_bytes", "gpu_blocks", " on devices"),
    "host": ("size_bytes", "blocks", ""),
    "ssd": ("ssd_bytes", "ssd_blocks", " on the SSD"),
}
"""Of an answer: what it says of a tier, and what that is called."""

NOT_ON_DISK = "not_on_disk_yet"
NOT_KNOWN = "ssd_not_known"
WORDS = (NOT_ON_DISK, NOT_KNOWN)
"""Of an answer; the rest of it are numbers."""

DONE = tuple(field.name for field in pb.EvictReply.DESCRIPTOR.fields if field.name not in WORDS)


@dataclass(frozen=True)
class Plan:
    """What a command would destroy at most, as requests to the daemon."""

    requests: Sequence[pb.EvictRequest]
    blocks: int
    size_bytes: int
    of: str
    """Whose blocks, for people."""
    share: float
    """Of all those."""
    always_ask: bool = False
    what: str = "blocks"

    @property
    def much(self) -> bool:
        return self.always_ask or self.size_bytes > MUCH_BYTES or self.share > MUCH_SHARE


@click.command(epilog=EXIT_HELP)
@common_options
@click.option("--namespace", metavar="DIGEST", help="All blocks of a namespace; the first 8 digits do if no other has.")
@click.option("--key", "keys", metavar="HEX", multiple=True, help="One block; again for more.")
@click.option("--keys-from", metavar="FILE", help="Blocks whose keys stand in a file, one a line; - is stdin.")
@click.option("--bytes", "size", metavar="SIZE", help="At least so many bytes, such as 10GiB, the least useful first.")
@click.option("--all", "everything", is_flag=True, help="Everything.")
@click.option(
    "--tenant",
    metavar="NAME",
    help='Whose; default: everybody\'s for --bytes and --all, else that of the token, or "default".',
)
@click.option(
    "--tier",
    type=click.Choice(list(TIERS)),
    help="From which tier: gone everywhere (all), or copies on GPUs, in memory (host) or on the SSD alone. "
    "Default: host for --bytes, else all.",
)
@click.option("--yes", is_flag=True, help="Does not ask.")
@click.pass_obj
def evict(
    above: Way,
    endpoint: str | None,
    token_file: str | None,
    ca: str | None,
    as_json: bool,
    namespace: str | None,
    keys: tuple[str, ...],
    keys_from: str | None,
    size: str | None,
    everything: bool,
    tenant: str | None,
    tier: str | None,
    yes: bool,
) -> None:
    """Drops blocks that nobody holds: leased and pinned ones stay.

    What is named is gone from GPUs, memory and the SSD, unless --tier says otherwise; --bytes frees
    memory, and what the SSD has of it stays there (`kvstore-cli flush` first, and all of it does).

    Asks first where that is more than 1 GiB or more than a tenth of the blocks there are, and
    always with --all; without a terminal, --yes is wanted then. Ctrl-C stops it where it is.
    """
    forms = [namespace is not None, bool(keys or keys_from), size is not None, everything]
    if sum(forms) != 1:
        raise click.UsageError("one of --namespace, --key or --keys-from, --bytes and --all is wanted")
    if tenant == "":
        raise click.UsageError("--tenant is given, and empty: a name is wanted, or no --tenant")
    if size is not None and tier == "all":
        raise click.UsageError("--bytes are of one tier: --tier host, which is the default, --tier gpu or --tier ssd")
    tenant = tenant or ""
    tier = tier or ("host" if size is not None else "all")
    size_bytes = _size(size) if size is not None else 0
    names = _keys(keys, keys_from)
    prefix = hex_bytes(namespace, "namespace", DIGEST_PREFIX_BYTES_MIN, KEY_BYTES) if namespace is not None else b""
    done: dict[str, int] = dict.fromkeys(DONE, 0)
    words = dict.fromkeys(WORDS, "")
    with connected(Way(endpoint, token_file, ca).under(above)) as client:
        before = client.stats()
        if tier == "ssd" and not before.get("ssd"):
            fail("this daemon has no SSD tier (ssd.path is off)", EXIT_UNREACHABLE)
        if tier == "gpu" and not before.get("gpus"):
            why = before.get("gpus_off") or "gpu.size is off"
            fail(f"this daemon has no memory of devices ({why})", EXIT_UNREACHABLE)
        scope = Scope(before, tenant if size_bytes or everything else tenant or _unnamed(before), tier)
        if (size_bytes or everything) and tenant and not _has_tenant(client, before, tenant):
            if as_json:
                click.echo(json.dumps({**done, **words}, indent=2))
            fail(f"there is no tenant {tenant}; there are: {_tenants(before)}", EXIT_NOT_FOUND)
        if prefix:
            plan = _namespace_plan(client, scope, tenant, prefix)
        elif names:
            plan = _keys_plan(scope, tenant, names)
        else:
            plan = _bytes_plan(scope, tenant, size_bytes, everything=everything)
        for request in plan.requests:
            request.tier = TIERS[tier]
        if plan.much:
            whole = f", {percent(plan.share, 1)} of {plan.of}" if plan.blocks else ""
            about = f"up to {count(plan.blocks)} {plan.what} ({human_bytes(plan.size_bytes)}{whole})"
            confirm(f"This drops {about}{_what_stays(tier, before)}; leased and pinned blocks stay.", yes=yes)
        _carry_out(client, plan.requests, done, words)
        leasing = [] if as_json or not done["leased"] else _leasing(client.stats(), scope.tenant)
    if as_json:
        click.echo(json.dumps({**done, **words}, indent=2))
    else:
        click.echo("\n".join([*_sentences(done, leasing, tier), *_uncertain(words)]))
    found = any(done[blocks] for _, blocks, _ in FIELDS.values()) or done["held"]
    if names and not words[NOT_KNOWN] and not found:
        fail("none of these keys is here", EXIT_NOT_FOUND)


# -- what is wanted


def _size(text: str) -> int:
    try:
        size_bytes = parse_size_bytes(text)
    except Refused as error:
        raise click.UsageError(f"--bytes {text[:80]!r}: {error}; a size is written 10GiB or 10GB") from None
    if not 0 < size_bytes < 1 << 64:
        raise click.UsageError(f"--bytes {text[:80]!r} is not above 0 and below 2^64")
    return size_bytes


def _keys(keys: Sequence[str], keys_from: str | None) -> list[bytes]:
    found = [hex_bytes(key, "key", KEY_BYTES, KEY_BYTES) for key in keys]
    if keys_from is None:
        return found
    try:
        with click.open_file(keys_from, encoding="ascii", errors="replace") as file:
            number = 0
            while line := file.readline(LINE_CHARACTERS_MAX):
                number += 1
                if line.strip():
                    found.append(hex_bytes(line.strip(), f"{keys_from}, line {number}: key", KEY_BYTES, KEY_BYTES))
                if len(found) > KEYS_FROM_MAX:
                    raise click.UsageError(f"{keys_from} has more than {KEYS_FROM_MAX:,} keys: split it")
    except OSError as error:
        _no_file(keys_from, error)
    if not found:
        raise click.UsageError(f"there is no key in {keys_from}")
    return list(dict.fromkeys(found))


def _no_file(name: str, error: OSError) -> NoReturn:
    fail(f"--keys-from {name}: {error.strerror}", EXIT_USAGE)


# -- what it would destroy


class Scope:
    """The blocks that a command is about: a tenant's, or everybody's."""

    def __init__(self, stats: Mapping[str, Any], tenant: str, tier: str) -> None:
        self.tenant = tenant
        self.tier = tier
        self.of = f"those of tenant {tenant}" if tenant else "all"
        pools = [pool for pool in stats["pools"] if tenant in ("", pool["tenant"])] if tier in ("all", "host") else []
        on_ssd, ssd_bytes, largest = _on_ssd(stats, tenant) if tier in ("all", "ssd") else (0, 0, 0)
        gpus = stats.get("gpus", ()) if tier in ("all", "gpu") else ()
        self.on_devices = sum(gpu["blocks"] for gpu in gpus)
        """Of all tenants: nobody counts them apart."""
        device_bytes = sum(gpu["used_bytes"] for gpu in gpus)
        self.blocks = sum(pool["blocks"] for pool in pools) + on_ssd + self.on_devices
        self.size_bytes = sum(pool["blocks"] * pool["slot_bytes"] for pool in pools) + ssd_bytes + device_bytes
        largest = max(largest, device_bytes // max(self.on_devices, 1))
        self.largest_slot = max([largest, *(pool["slot_bytes"] for pool in pools if pool["blocks"])])
        there = {"on devices": self.on_devices, "in memory": len(pools), "on the SSD": on_ssd}
        where = [name for name, blocks in there.items() if blocks]
        self.what = f"copies {_and(where)}" if where and where != ["in memory"] else "blocks"
        self.copies = max(len(where), 1)
        """Of one block, at most."""

    def plan(
        self, requests: Sequence[pb.EvictRequest], blocks: int, size_bytes: int, *, always_ask: bool = False
    ) -> Plan:
        return Plan(requests, blocks, size_bytes, self.of, blocks / max(self.blocks, 1), always_ask, self.what)


def _and(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " and " * (len(words) > 1) + words[-1]


def _on_ssd(stats: Mapping[str, Any], tenant: str) -> tuple[int, int, int]:
    """Blocks there and their bytes, and the largest: of a tenant, where its namespaces are all shown, else of all."""
    ssd, found = stats.get("ssd"), stats["namespaces"]
    if not ssd or not ssd["blocks"]:
        return 0, 0, 0
    own = [row for row in found if tenant in ("", row["tenant"]) and row["ssd_blocks"]]
    largest = max((row["block_bytes"] for row in own), default=0)
    if not tenant or sum(row["ssd_blocks"] for row in found) < ssd["blocks"]:
        return ssd["blocks"], ssd["used_bytes"], largest
    return sum(row["ssd_blocks"] for row in own), sum(row["ssd_blocks"] * row["block_bytes"] for row in own), largest


def _namespace_plan(client: "Client", scope: Scope, tenant: str, prefix: bytes) -> Plan:
    """The daemon evicts by the whole digest only, so a prefix is looked up first."""
    from kvstore_client import admin

    reply = admin.inspect(client, pb.InspectRequest(tenant=tenant, namespace=prefix))
    if not reply.HasField("namespace"):
        where = f" of tenant {tenant}" if tenant else ""
        fail(f"there is no namespace {prefix.hex()}{where}. {ELSE_LOOK['namespace']}", EXIT_NOT_FOUND)
    stats, slot_bytes = reply.namespace.stats, reply.namespace.pool.slot_bytes
    request = pb.EvictRequest(tenant=tenant, namespace=stats.digest)
    blocks = stats.blocks * (scope.tier in ("all", "host")) + stats.ssd_blocks * (scope.tier in ("all", "ssd"))
    blocks += scope.on_devices  # at most: they are all tenants'
    return scope.plan([request], blocks, blocks * slot_bytes)


def _keys_plan(scope: Scope, tenant: str, keys: Sequence[bytes]) -> Plan:
    """At most: keys that are absent cost nothing, and not all blocks are the largest."""
    requests = [
        pb.EvictRequest(tenant=tenant, keys=pb.EvictKeys(keys=keys[at : at + KEYS_MAX]))
        for at in range(0, len(keys), KEYS_MAX)
    ]
    blocks = min(len(keys) * scope.copies, scope.blocks)
    return scope.plan(requests, blocks, min(blocks * scope.largest_slot, scope.size_bytes))


def _bytes_plan(scope: Scope, tenant: str, size_bytes: int, *, everything: bool) -> Plan:
    if everything:
        request = pb.EvictRequest(tenant=tenant, all=True)
        return scope.plan([request], scope.blocks, scope.size_bytes, always_ask=True)
    size = min(size_bytes, scope.size_bytes)
    blocks = -(-scope.blocks * size // max(scope.size_bytes, 1))
    return scope.plan([pb.EvictRequest(tenant=tenant, size_bytes=size_bytes)], blocks, size)


def _what_stays(tier: str, before: dict[str, Any]) -> str:
    """What becomes of the blocks: copies in other tiers stay, and a block without one is gone."""
    there = {"gpu": bool(before.get("gpus")), "host": True, "ssd": bool(before.get("ssd"))}
    others = [each for each, is_there in there.items() if is_there and each != tier]
    if tier == "all" or not others:
        return ", for good"
    names = {"gpu": "on devices", "host": "in memory", "ssd": "on the SSD"}
    return f"; copies {_and([names[each] for each in others])} stay, and a block that has none is gone"


def _unnamed(stats: Mapping[str, Any]) -> str:
    """Whom a command is about that names no tenant: a token's own, of which alone the daemon tells then."""
    shown = {index["tenant"] for index in stats["indexes"]}
    return shown.pop() if len(shown) == 1 else "default"


# -- doing it


def _carry_out(
    client: "Client", requests: Sequence[pb.EvictRequest], done: dict[str, int], words: dict[str, str]
) -> None:
    """All requests, one after another; adds up what they did, with the first reason why some of it is uncertain."""
    from kvstore_client import admin

    for request in requests:
        reply = admin.evict(client, request)
        for name in done:
            done[name] += getattr(reply, name)
        for name in words:
            words[name] = words[name] or getattr(reply, name)


def _has_tenant(client: "Client", stats: Mapping[str, Any], tenant: str) -> bool:
    """Whether anybody ever was that tenant. Raises Unauthenticated where we have nothing to do with it."""
    from kvstore_client import admin

    if any(index["tenant"] == tenant for index in stats["indexes"]):
        return True
    admin.inspect(client, pb.InspectRequest(tenant=tenant, key=bytes(KEY_BYTES)))
    return False


def _tenants(stats: Mapping[str, Any]) -> str:
    names = sorted(index["tenant"] for index in stats["indexes"])
    return ", ".join([*names[:NAMED_MAX], *["..."] * (len(names) > NAMED_MAX)]) or "none"


def _leasing(stats: Mapping[str, Any], tenant: str) -> list[str]:
    """The sessions that hold leases, which are whom to ask."""
    return [
        f"{session['id']} ({session['client']}, process {session['pid']})"
        for session in stats["sessions"]
        if session["leased_slots"] and tenant in ("", session["tenant"])
    ]


def _uncertain(words: Mapping[str, str]) -> Iterator[str]:
    """What could not be counted, and what may be back."""
    if words[NOT_KNOWN]:
        gone = "" if words[NOT_ON_DISK] else ", and written down: gone as soon as it is"
        yield f"what the SSD has is not known yet ({plain(words[NOT_KNOWN])}): not counted here{gone}"
    if why := plain(words[NOT_ON_DISK]):
        yield f"what was dropped from the SSD may be back if the daemon is killed now: {why}"


def _sentences(done: Mapping[str, int], leasing: Sequence[str], tier: str) -> Iterator[str]:
    """The tier that was asked for comes first."""
    left = f"{count(done['held'])} left" + (f" ({human_bytes(done['held_bytes'])})" if done["held"] else "")
    first = "host" if tier == "all" else tier
    size, blocks, where = FIELDS[first]
    yield (
        f"freed {human_bytes(done[size])}{where}: {count(done[blocks])} blocks dropped, "
        f"{left} because they are leased or pinned, {count(done['absent'])} not here"
    )
    for other in ("gpu", "ssd"):
        size, blocks, where = FIELDS[other]
        if done[blocks] and other != first:
            yield f"{where.strip()}: {count(done[blocks])} blocks dropped ({human_bytes(done[size])})"
    if done["pinned"]:
        yield (
            f"pinned: {count(done['pinned'])} ({human_bytes(done['pinned_bytes'])}), until the time of each pin is "
            "over (`kvstore-cli inspect key HEX`) or its client calls `ns.unpin(keys)`"
        )
    if done["leased"]:
        who = [*leasing[:NAMED_MAX], *["..."] * (len(leasing) > NAMED_MAX)]
        yield (
            f"leased: {count(done['leased'])} ({human_bytes(done['leased_bytes'])}), until the sessions that hold them "
            f"release them or their processes end: {plain(', '.join(who)) or 'none any more'} "
            "(`kvstore-cli inspect session ID`)"
        )
