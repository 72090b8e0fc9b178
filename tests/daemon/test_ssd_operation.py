"""What an operator sees of the SSD tier, and does with it: stats, metrics, inspect, evict, flush, verify."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.cli.connection import EXIT_NOT_FOUND, EXIT_NOT_WELL, EXIT_UNREACHABLE
from kvstore.cli.watch import Sampler
from kvstore.tiers.ssd.format import segment_name
from kvstore_client import Client, Namespace, admin
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument
from tests.conftest import RunningDaemon, eventually
from tests.daemon.cli import Terminal, within
from tests.daemon.test_http import ask
from tests.nodes import block, running, totals

BLOCK = 64 << 10
BLOCKS = 24


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """Nothing is written to its SSD unless somebody asks for it."""
    path = tmp_path_factory.mktemp("ssd")
    with running(
        host__size="16MiB",
        ssd__path=str(path / "tier"),
        ssd__size="128MiB",
        ssd__free_floor="0B",
        ssd__write_back="hits:1000",
        server__http="127.0.0.1:0",
        server__grpc="127.0.0.1:0",
    ) as daemon:
        eventually(lambda: "the SSD tier is open" in daemon.output())
        yield daemon


@pytest.fixture
def client(node: RunningDaemon) -> Iterator[Client]:
    with Client(node.endpoint) as client:
        yield client


@pytest.fixture
def ns(client: Client) -> Iterator[Namespace]:
    """BLOCKS blocks, in memory alone; nothing is left of them afterwards, in either tier."""
    ns = client.raw_namespace("blocks", BLOCK)
    assert ns.put(keys(ns), [block(i, BLOCK) for i in range(BLOCKS)]).stored == BLOCKS
    yield ns
    ns.clear()
    assert admin.evict(client, pb.EvictRequest(all=True)).held == 0


def keys(ns: Namespace, count: int = BLOCKS) -> list[bytes]:
    return [ns.key(b"%d" % i) for i in range(count)]


def as_json(node: RunningDaemon, *arguments: object) -> tuple[int, dict[str, Any]]:
    done = within(*arguments, "--json", "--endpoint", node.endpoint)
    return done.exit_code, json.loads(done.stdout)


def flushed(client: Client) -> None:
    """All that memory has is on the SSD."""
    reply = eventually(lambda: (found := admin.flush(client, 1000)).done and found)
    assert (reply.left, reply.trouble) == (0, "")


def samples(daemon: RunningDaemon) -> dict[str, float]:
    """Metrics of the SSD, with their one label if any."""
    found = {}
    status, _, body = ask(daemon, "/metrics")
    assert status == 200, body
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            if sample.name.startswith(("kvstored_ssd", "kvstored_degraded")):
                label = next(iter(sample.labels.values()), "")
                found[f"{sample.name} {label}".strip()] = sample.value
    return found


def tiers(client: Client, key: bytes) -> list[int]:
    return [copy.tier for copy in admin.inspect(client, pb.InspectRequest(key=key)).key.copies]


# -- figures


def test_stats_and_metrics_tell_the_same_of_the_ssd(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    before, was = client.stats()["ssd"], samples(node)
    assert (before["state"], before["trouble"], before["blocks"], before["aside"]) == ("open", "", 0, 0)
    flushed(client)
    after, now = client.stats(), samples(node)
    ssd = after["ssd"]
    assert (ssd["blocks"], ssd["used_bytes"]) == (BLOCKS, BLOCKS * BLOCK)
    assert ssd["counters"]["written"] - before["counters"]["written"] == BLOCKS
    assert ssd["counters"]["written_bytes"] - before["counters"]["written_bytes"] == BLOCKS * BLOCK
    assert ssd["used_bytes"] <= ssd["file_bytes"] < ssd["size_bytes"] == 128 << 20
    assert [queue["kind"] for queue in ssd["queues"]] == ["load", "prefetch", "write"]
    assert {row["ssd_blocks"] for row in after["namespaces"] if row["label"] == "blocks"} == {BLOCKS}
    assert after["daemon"]["degraded"] == []
    rise = "kvstored_ssd_moved_blocks_total written"
    assert was[rise] == before["counters"]["written"], "something was written that nobody had asked for"
    assert now[rise] == ssd["counters"]["written"], "something was written after all that there was"
    assert now["kvstored_ssd_blocks"] == BLOCKS
    assert now["kvstored_ssd_bytes used"] == ssd["used_bytes"]
    assert (now["kvstored_ssd_state open"], now["kvstored_ssd_state restoring"]) == (1, 0)
    assert (now["kvstored_ssd_in_use"], now["kvstored_ssd_aside"], now["kvstored_degraded"]) == (1, 0, 0)
    for counter in ("write_errors", "writes_dropped", "corrupt", "loads_failed", "read_errors", "troubles"):
        assert ssd["counters"][counter] == before["counters"][counter], counter


def test_what_the_ssd_takes_on_the_disk_is_told_within_seconds(client: Client, ns: Namespace) -> None:
    flushed(client)
    ssd = eventually(lambda: (found := client.stats()["ssd"])["physical_bytes"] >= found["file_bytes"] and found)
    assert ssd["free_bytes"] > 0
    assert ssd["physical_bytes"] < ssd["size_bytes"]


def test_the_tables_show_the_ssd_and_a_daemon_without_one_shows_none(
    node: RunningDaemon, client: Client, ns: Namespace
) -> None:
    flushed(client)
    shown = within("stats", "--endpoint", node.endpoint).stdout
    for text in ("SSD", "tier (extents)", "to and from the SSD", "prefetch", "on the SSD", "written bytes"):
        assert text in shown
    with running() as other:
        assert "SSD" not in within("stats", "--endpoint", other.endpoint).stdout
        with Client(other.endpoint) as bare:
            for call in (lambda: admin.flush(bare, 0), lambda: admin.verify(bare, 0, 1)):
                with pytest.raises(FailedPrecondition, match=r"ssd\.path is off"):
                    call()
        assert within("flush", "--endpoint", other.endpoint).exit_code == EXIT_UNREACHABLE
        done = within("evict", "--all", "--tier", "ssd", "--yes", "--endpoint", other.endpoint)
        assert (done.exit_code, "no SSD tier" in done.stderr) == (EXIT_UNREACHABLE, True)


def test_watching_shows_what_goes_to_the_ssd_and_comes_from_it(
    node: RunningDaemon, client: Client, ns: Namespace
) -> None:
    sampler = Sampler(client)
    assert sampler.sample().rates is None
    flushed(client)
    rates = sampler.sample().rates
    assert rates is not None
    assert rates["ssd_written_per_s"] > 0
    assert rates["ssd_loaded_per_s"] == rates["ssd_writes_dropped_per_s"] == 0


# -- inspect


def test_inspect_tells_where_each_copy_is(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    chain = keys(ns)
    assert tiers(client, chain[1]) == [pb.TIER_HOST]
    flushed(client)
    assert tiers(client, chain[1]) == [pb.TIER_HOST, pb.TIER_SSD]
    in_memory = admin.inspect(client, pb.InspectRequest(key=chain[1])).key
    admin.evict(client, pb.EvictRequest(namespace=ns.digest, tier=pb.TIER_HOST))
    _, found = as_json(node, "inspect", "key", chain[1].hex()[:16])
    key = found["key"]
    assert [copy["tier"] for copy in key["copies"]] == [pb.TIER_SSD]
    assert (key["copies"][0]["segment"], key["copies"][0]["slot"]) == (
        in_memory.copies[1].segment,
        in_memory.copies[1].slot,
    )
    assert key["parent"] == chain[0].hex()
    assert key["parent_present"]
    assert key["children"] == [chain[2].hex()]
    assert (key["depth"], key["namespace"]["blocks"], key["namespace"]["ssd_blocks"]) == (1, 0, BLOCKS)
    shown = within("inspect", "key", chain[1].hex(), "--endpoint", node.endpoint).stdout
    assert "ssd" in shown
    assert "host" not in shown.partition("copies")[2]
    of = within("inspect", "namespace", ns.digest.hex(), "--endpoint", node.endpoint).stdout
    assert [f"{BLOCKS} (1.5 MiB)" in line for line in of.splitlines() if "on the SSD" in line] == [True]


# -- evict


@pytest.mark.parametrize(
    ("tier", "left"),
    [
        (None, []),
        ("all", []),
        ("host", [pb.TIER_SSD]),
        ("ssd", [pb.TIER_HOST]),
    ],
)
def test_evict_takes_blocks_from_everywhere_or_from_the_tier_that_is_named(
    node: RunningDaemon, client: Client, ns: Namespace, tier: str | None, left: list[int]
) -> None:
    flushed(client)
    of = ["--tier", tier] if tier else []
    code, done = as_json(node, "evict", "--namespace", ns.digest.hex(), "--yes", *of)
    assert code == 0
    expected = (BLOCKS * (tier != "ssd"), BLOCKS * (tier != "host"))
    assert (done["blocks"], done["ssd_blocks"]) == expected
    assert (done["size_bytes"], done["ssd_bytes"]) == tuple(count * BLOCK for count in expected)
    assert tiers(client, keys(ns)[3]) == left


def test_evicting_bytes_frees_memory_and_leaves_the_ssd_alone(
    node: RunningDaemon, client: Client, ns: Namespace
) -> None:
    flushed(client)
    code, done = as_json(node, "evict", "--bytes", f"{4 * BLOCK}B", "--yes")
    assert (code, done["blocks"], done["ssd_blocks"]) == (0, 4, 0)
    assert client.stats()["ssd"]["blocks"] == BLOCKS
    code, done = as_json(node, "evict", "--bytes", f"{4 * BLOCK}B", "--yes", "--tier", "ssd")
    assert (code, done["blocks"], done["ssd_blocks"]) == (0, 0, 4)
    shown = within("evict", "--bytes", f"{2 * BLOCK}B", "--yes", "--tier", "ssd", "--endpoint", node.endpoint)
    assert shown.stdout == (
        "freed 128 KiB on the SSD: 2 blocks dropped, 0 left because they are leased or pinned, 0 not here\n"
    )
    wrong = within("evict", "--bytes", "1MiB", "--tier", "all", "--endpoint", node.endpoint)
    assert "--bytes are of one tier" in wrong.stderr


def test_evict_asks_with_the_copies_of_both_tiers_and_tells_both(
    node: RunningDaemon, client: Client, ns: Namespace
) -> None:
    flushed(client)
    refused = within("evict", "--all", "--endpoint", node.endpoint)
    assert f"up to {2 * BLOCKS} copies in memory and on the SSD (3.0 MiB" in refused.stderr
    done = within("evict", "--all", "--yes", "--endpoint", node.endpoint)
    assert f"{BLOCKS} blocks dropped" in done.stdout
    assert f"on the SSD: {BLOCKS} blocks dropped (1.5 MiB)" in done.stdout


def test_a_key_that_only_the_ssd_has_is_not_absent(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    flushed(client)
    admin.evict(client, pb.EvictRequest(namespace=ns.digest, tier=pb.TIER_HOST))
    last = keys(ns)[-1].hex()
    assert as_json(node, "evict", "--key", last)[1]["ssd_blocks"] == 1
    assert within("evict", "--key", last, "--endpoint", node.endpoint).exit_code == EXIT_NOT_FOUND


def test_a_tier_that_does_not_exist_is_refused(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="from devices, the host tier, the SSD, or everywhere"):
        admin.evict(client, pb.EvictRequest(all=True, tier=pb.TIER_REMOTE))
    with pytest.raises(FailedPrecondition, match="no memory of devices"):
        admin.evict(client, pb.EvictRequest(all=True, tier=pb.TIER_GPU))


# -- flush


def test_flush_waits_until_all_that_memory_has_is_on_the_ssd(
    node: RunningDaemon, client: Client, ns: Namespace
) -> None:
    assert client.stats()["ssd"]["blocks"] == 0
    done = within("flush", "--endpoint", node.endpoint)
    assert (done.exit_code, done.stdout) == (0, "all that memory has is on the SSD\n")
    assert client.stats()["ssd"]["blocks"] == BLOCKS
    assert as_json(node, "flush") == (0, {"left": 0, "trouble": ""})
    admin.evict(client, pb.EvictRequest(namespace=ns.digest, tier=pb.TIER_HOST))
    assert ns.get(keys(ns)) == [block(i, BLOCK) for i in range(BLOCKS)]


def test_flush_says_what_could_not_be_written_and_why(tmp_path: Path) -> None:
    with running(
        host__size="8MiB",
        ssd__path=str(tmp_path / "ssd"),
        ssd__size="64MiB",
        ssd__free_floor="1000TiB",
        server__http="127.0.0.1:0",
    ) as full:
        with Client(full.endpoint) as client:
            ns = client.raw_namespace("blocks", BLOCK)
            ns.put(keys(ns), [block(i, BLOCK) for i in range(BLOCKS)])
            done = within("flush", "--endpoint", full.endpoint)
            assert done.exit_code == EXIT_NOT_WELL
            assert f"{BLOCKS} blocks are in memory alone" in done.stderr
            degraded = client.stats()["daemon"]["degraded"]
            assert [why for why in degraded if "cannot grow" in why and "ssd.free_floor" in why]
        # On a busy machine the event loop may have been late a moment ago, which is another reason.
        body = eventually(lambda: (answer := ask(full, "/readyz"))[0] == 200 and answer[2])
        assert json.loads(body)["checks"]["ssd"].startswith("degraded: the SSD tier cannot grow")
        assert "blocks were not saved to the SSD" not in full.output()
        assert full.stop() == 0
        assert f"blocks_not_saved={BLOCKS}" in full.output()


def test_limits_of_flush_and_verify_are_told(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="wait_ms 1001 is above 1000"):
        admin.flush(client, 1001)
    for blocks_max in (0, 1025):
        with pytest.raises(InvalidArgument, match="is not between 1 and 1024"):
            admin.verify(client, 0, blocks_max)


# -- verify


def test_verify_reads_everything_back_and_puts_nothing_into_memory(
    node: RunningDaemon, client: Client, ns: Namespace
) -> None:
    flushed(client)
    admin.evict(client, pb.EvictRequest(namespace=ns.digest, tier=pb.TIER_HOST))
    before = client.stats()
    code, found = as_json(node, "verify")
    assert (code, found) == (0, {"blocks": BLOCKS, "size_bytes": BLOCKS * BLOCK, "bad": 0, "failed": 0, "trouble": ""})
    after = client.stats()
    assert totals(after)["blocks"] == totals(before)["blocks"] == 0
    assert after["ssd"]["counters"] == before["ssd"]["counters"]
    said = within("verify", "--endpoint", node.endpoint).stdout
    assert said == f"read {BLOCKS} blocks (1.5 MiB): {BLOCKS} good, 0 bad and removed, 0 could not be read\n"


def test_verify_goes_on_where_it_was(client: Client, ns: Namespace) -> None:
    flushed(client)
    cursor, blocks, calls = 0, 0, 0
    while True:
        reply = admin.verify(client, cursor, 7)
        assert reply.blocks <= 7
        assert reply.total == BLOCKS
        cursor, blocks, calls = reply.cursor, blocks + reply.blocks, calls + 1
        if not cursor:
            break
    assert (blocks, calls) == (BLOCKS, 4)


def test_verify_finds_what_has_changed_on_the_disk_and_removes_it(
    node: RunningDaemon, client: Client, ns: Namespace
) -> None:
    flushed(client)
    (bad,) = [
        copy
        for copy in admin.inspect(client, pb.InspectRequest(key=keys(ns)[5])).key.copies
        if copy.tier == pb.TIER_SSD
    ]
    with (Path(client.stats()["ssd"]["path"]) / segment_name(bad.segment)).open("r+b") as file:
        file.seek(bad.slot * BLOCK + 100)
        file.write(b"rotten")
    done = within("verify", "--endpoint", node.endpoint)
    assert done.exit_code == EXIT_NOT_WELL
    assert f"{BLOCKS - 1} good, 1 bad and removed" in done.stdout
    assert "never wrong bytes" in done.stderr
    assert tiers(client, keys(ns)[5]) == [pb.TIER_HOST], "the copy in memory stays"
    assert client.stats()["ssd"]["counters"]["corrupt"] == 1
    assert as_json(node, "verify")[0] == 0


def test_verify_shows_how_far_it_is_at_a_terminal(node: RunningDaemon, client: Client, ns: Namespace) -> None:
    flushed(client)
    terminal = Terminal("verify", "--endpoint", node.endpoint, out=False)
    try:
        terminal.until("reading")
        assert terminal.end() == 0
    finally:
        terminal.close()


# -- who may


def test_flush_and_verify_are_administration(node: RunningDaemon) -> None:
    with Client(node.grpc_endpoint) as remote:
        for call in (lambda: admin.flush(remote, 0), lambda: admin.verify(remote, 0, 1)):
            with pytest.raises(Exception, match="administration over TCP needs a token"):
                call()
