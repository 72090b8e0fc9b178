"""Field fault A10: counters rose while nothing happened, and what scrapes left behind grew without end.

    LMCache#524, prometheus/client_python#275: totals were passed to inc(); files of dead
    workers were kept.

Every way to do something is compared with a ledger: what clients did, to the block, in
`stats` and in the text of the metrics. Clients come and go, and nothing grows with them.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore_client import Client, Hint, aio
from tests.conftest import RunningDaemon, eventually, wait_for_line
from tests.nodes import anonymous_bytes, running

BLOCK = 4096
PUTS, HITS, MISSES = 100, 60, 40
SCRAPES = 10
RESTARTS = 20
GROWTH_BYTES = 4 << 20
"""RssAnon that restarts may add: what one set of sessions and their buffers takes, not twenty."""

Samples = dict[str, float]


class Ledger:
    """A daemon with gRPC and metrics, and what its figures are."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.daemon = daemon
        self.client = Client(daemon.endpoint, name="ledger")

    def endpoint(self, way: str) -> str:
        return self.daemon.endpoint if way == "unix" else self.daemon.grpc_endpoint

    def counters(self) -> dict[str, int]:
        found: dict[str, int] = self.client.stats()["counters"]
        return found

    def operations(self) -> dict[str, tuple[int, int, int, int, int]]:
        """Calls, calls that hit, hits, misses and bytes of each operation."""
        names = ("calls", "calls_hit", "hits", "misses", "size_bytes")
        return {row["operation"]: tuple(row[n] for n in names) for row in self.client.stats()["operations"]}

    def scrape(self) -> Samples:
        """Every sample of the metrics."""
        with urllib.request.urlopen(f"{self.daemon.http_url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                samples[f"{sample.name}{{{labels}}}"] = sample.value
        return samples


@pytest.fixture(scope="module", params=["127.0.0.1:0", "unix"])
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """Once with gRPC over TCP, once over a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="kvstored-test-") as directory:
        grpc = f"unix:{directory}/grpc.sock" if request.param == "unix" else request.param
        with running(server__grpc=grpc, server__http="127.0.0.1:0", host__size="64MiB") as daemon:
            ledger = Ledger(daemon)
            yield ledger
            ledger.client.close()


def risen(before: Samples, after: Samples) -> Samples:
    """What counters and histograms grew by, of what clients did; calls of the daemon's own edges apart."""
    return {
        name: after[name] - before.get(name, 0)
        for name in after
        if name.partition("{")[0].endswith(("_total", "_count"))
        and not name.startswith(("kvstored_call_", "kvstored_loop_", "kvstored_sessions_"))
        and after[name] != before.get(name, 0)
    }


@contextlib.contextmanager
def told(ledger: Ledger, expected: Samples) -> Iterator[None]:
    """What happens within makes the metrics, and `stats`, rise by exactly this."""
    before, counters = ledger.scrape(), ledger.counters()
    yield
    after, later = ledger.scrape(), ledger.counters()
    assert risen(before, after) == expected
    for field, name in {
        "stored": "kvstored_put_blocks_total{result=stored}",
        "hits": "kvstored_read_blocks_total{result=hit}",
        "misses": "kvstored_read_blocks_total{result=miss}",
        "hit_bytes": "kvstored_read_bytes_total{}",
        "match_hits": "kvstored_match_blocks_total{result=hit}",
        "match_misses": "kvstored_match_blocks_total{result=miss}",
    }.items():
        assert later[field] - counters[field] == expected.get(name, 0), field


def operation(name: str, calls: int, hits: int, misses: int, size_bytes: int) -> Samples:
    """What calls of one operation add."""
    rise = {
        f"kvstored_operation_seconds_count{{operation={name},tier=host}}": calls,
        f"kvstored_operation_blocks_total{{operation={name},result=hit,tier=host}}": hits,
        f"kvstored_operation_blocks_total{{operation={name},result=miss,tier=host}}": misses,
        f"kvstored_operation_bytes_total{{operation={name},tier=host}}": size_bytes,
    }
    return {sample: value for sample, value in rise.items() if value}


def put_rise(calls: int, stored: int) -> Samples:
    return operation("put", calls, stored, 0, stored * BLOCK) | {"kvstored_put_blocks_total{result=stored}": stored}


def read_rise(name: str, calls: int, calls_hit: int, hits: int, misses: int) -> Samples:
    return operation(name, calls, hits, misses, hits * BLOCK) | {
        "kvstored_read_blocks_total{result=hit}": hits,
        "kvstored_read_blocks_total{result=miss}": misses,
        "kvstored_read_bytes_total{}": hits * BLOCK,
        "kvstored_requests_total{call=read}": calls,
        "kvstored_requests_hit_total{call=read}": calls_hit,
    }


def match_rise(calls: int, calls_hit: int, hits: int, misses: int) -> Samples:
    return operation("match", calls, hits, misses, 0) | {
        "kvstored_match_blocks_total{result=hit}": hits,
        "kvstored_match_blocks_total{result=miss}": misses,
        "kvstored_requests_total{call=match}": calls,
        "kvstored_requests_hit_total{call=match}": calls_hit,
    }


WAYS = ("unix", "grpc")


@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_puts_sixty_hits_and_forty_misses(ledger: Ledger, way: str) -> None:
    with (
        told(ledger, put_rise(PUTS, PUTS) | read_rise("get", HITS + MISSES, HITS, HITS, MISSES)),
        Client(ledger.endpoint(way)) as client,
    ):
        ns = client.raw_namespace(f"script {way}", BLOCK)
        out = np.empty(BLOCK, np.uint8)
        for i in range(PUTS):
            assert ns.put([ns.key(b"%d" % i)], bytes(BLOCK)).stored == 1
        for i in range(HITS):
            assert ns.get_into([ns.key(b"%d" % i)], out) == 1
        for i in range(MISSES):
            assert ns.get_into([ns.key(b"absent %d" % i)], out) == 0


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_read_and_write_counts_as_what_it_is(ledger: Ledger, way: str) -> None:
    expected = put_rise(3, 12)
    expected["kvstored_operation_blocks_total{operation=put,result=hit,tier=host}"] += 4  # found to exist
    get, acquire = read_rise("get", 3, 1, 12, 8), read_rise("acquire", 2, 1, 10, 3)
    expected |= get | acquire | {name: get[name] + acquire[name] for name in get.keys() & acquire.keys()}
    expected |= match_rise(3, 1, 12, 5)
    expected["kvstored_conversations_total{}"] = 1
    if way == "grpc":  # a local client looks itself what is there, and sends only the others
        expected["kvstored_put_blocks_total{result=existing}"] = 4
    with told(ledger, expected), Client(ledger.endpoint(way)) as client:
        ns = client.raw_namespace(f"kinds {way}", BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(14)]
        ns.put(keys[:4], bytes(4 * BLOCK))
        ns.put(keys[:10], bytes(10 * BLOCK), hint=Hint(conversation=f"ledger {ledger.daemon.grpc_endpoint} {way}"))
        with ns.reserve(2) as slots:
            slots.commit(keys[:12], start=10)
        assert len(ns.get(keys)) == 12  # two missing
        assert ns.get_into(keys[:6], np.empty((0, BLOCK), np.uint8), start=6) == 0  # names no block: no call
        assert ns.get_into([ns.key(b"none")] * 5, np.empty((5, BLOCK), np.uint8)) == 0
        assert ns.get_into(keys[12:13], np.empty(BLOCK, np.uint8)) == 0
        with ns.acquire(keys[2:12]) as lease:
            assert len(lease) == 10
        with ns.acquire([ns.key(b"none")] * 3) as lease:
            assert len(lease) == 0
        assert (ns.match(keys[:12]).blocks, ns.match(keys[12:]).blocks, ns.match([]).blocks) == (12, 0, 0)
        assert ns.match([ns.key(b"none")] * 3).blocks == 0
        assert ns.prefetch(keys).wait() == 12


@pytest.mark.parametrize("way", WAYS)
def test_calls_of_many_tasks_at_once(ledger: Ledger, way: str) -> None:
    async def script() -> None:
        async with aio.Client(ledger.endpoint(way)) as client:
            ns = await client.raw_namespace(f"tasks {way}", BLOCK)
            keys = [ns.key(b"%d" % i) for i in range(PUTS)]
            await asyncio.gather(*(ns.put([key], bytes(BLOCK)) for key in keys))
            gets = [ns.get([key]) for key in keys[:HITS]] + [ns.get([ns.key(b"x")]) for _ in range(MISSES)]
            found = await asyncio.gather(*gets)
            assert sum(map(len, found)) == HITS

    with told(ledger, put_rise(PUTS, PUTS) | read_rise("get", HITS + MISSES, HITS, HITS, MISSES)):
        asyncio.run(script())


def test_stats_tells_before_it_asks(ledger: Ledger) -> None:
    """A client's own calls are in the stats that it gets."""
    for way in WAYS:
        with Client(ledger.endpoint(way)) as client:
            ns = client.raw_namespace("told", BLOCK)
            before = client.stats()["counters"]["misses"]
            ns.get([ns.key(b"absent")])
            assert client.stats()["counters"]["misses"] == before + 1


def test_nothing_rises_while_nothing_happens(ledger: Ledger) -> None:
    before = ledger.scrape()
    for _ in range(SCRAPES):
        after = ledger.scrape()
        assert risen(before, after) == {}
        assert after.keys() == before.keys()
        edges = [name for name in after if name.startswith("kvstored_call_errors")]
        assert all(after[name] == before[name] for name in edges), "a scrape is no call of an edge"


WORKER = """
import sys
from kvstore_client import Client
client = Client(sys.argv[1], name=sys.argv[2])
ns = client.raw_namespace("workers", 4096)
keys = [ns.key(b"%d" % i) for i in range(5)]
ns.put(keys, bytes(5 * 4096))
assert len(ns.get(keys)) == 5
ns.match(keys)
client.close()
"""


def test_clients_that_come_and_go_leave_nothing_that_grows(ledger: Ledger) -> None:
    """No series, no file and no memory for each; their counts stay."""
    pid, state = ledger.daemon.pid, ledger.daemon.directory
    grpc = ledger.daemon.grpc_endpoint

    def restart(count: int) -> None:
        for i in range(count):
            endpoint = grpc if i % 2 else ledger.daemon.endpoint
            subprocess.run([sys.executable, "-c", WORKER, endpoint, f"worker-{os.urandom(4).hex()}"], check=True)

    def files() -> int:
        shared = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line]
        return sum(len(found) for _, _, found in os.walk(state)) + len(shared)

    def ours_in_tmp() -> set[Path]:
        return {path for path in Path(tempfile.gettempdir()).iterdir() if path.name.startswith("kvstored")} - {state}

    restart(2)
    before, was_files, was_bytes, was_ours = ledger.scrape(), files(), anonymous_bytes(pid), ours_in_tmp()
    restart(RESTARTS)
    after = ledger.scrape()
    assert after.keys() == before.keys()
    assert files() == was_files
    assert {path for path in ours_in_tmp() - was_ours if any(state.name in p for p in path.parts)} == set()
    assert anonymous_bytes(pid) - was_bytes < GROWTH_BYTES
    assert after["kvstored_sessions{state=open}"] == before["kvstored_sessions{state=open}"]
    found = "kvstored_read_blocks_total{result=hit}"
    assert after[found] - before[found] == 5 * RESTARTS


KILLED = """
import sys
from kvstore_client import Client
client = Client(sys.argv[1], name="killed")
ns = client.raw_namespace("killed", 4096)
keys = [ns.key(b"%d" % i) for i in range(5)]
ns.put(keys, bytes(5 * 4096))
ns.get(keys)
client.stats()
print("told", flush=True)
for _ in range(7):
    ns.get(keys)
print("untold", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("way", WAYS)
def test_what_a_killed_client_had_not_told_is_lost_and_never_doubled(ledger: Ledger, way: str) -> None:
    ledger.counters()
    before = ledger.counters()["hits"]
    command = [sys.executable, "-c", KILLED, ledger.endpoint(way)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert wait_for_line(process) == "told"
        assert wait_for_line(process) == "untold"
        process.kill()
        process.wait(60)
    # What it had sent before it was killed may be read after the first look.
    whole = {5 * (1 + calls) for calls in range(8)}
    eventually(lambda: not [row for row in ledger.client.stats()["sessions"] if row["client"] == "killed"])
    for _ in range(2):
        assert ledger.counters()["hits"] - before in whole, "a call was counted in part, or twice"


def test_calls_while_the_daemon_was_away_are_told_to_the_next(start_daemon: Callable[..., RunningDaemon]) -> None:
    """Once each; the keeper opens for them the namespaces that the new daemon does not know."""
    daemon = start_daemon()
    with Client(daemon.endpoint) as client, Client(daemon.endpoint) as other:
        ns = client.raw_namespace("away", BLOCK)
        ns.put([ns.key(b"a")], bytes(BLOCK))
        daemon.kill()
        for _ in range(3):
            assert ns.get([ns.key(b"a")]) == []
        daemon.restart()
        for _ in range(2):  # the first has the client connect
            misses: Any = client.stats()["counters"]["misses"]
        assert misses == 3
        client.close()
        assert other.stats()["counters"]["misses"] == 3
