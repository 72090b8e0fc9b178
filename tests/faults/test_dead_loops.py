"""Field fault A5: the eviction thread raised once and was gone; every later store failed.

Seen as LMCache issue 4817, with a documented policy, at the first watermark. Here each background loop of a
running daemon is made to raise, for a while or once, while the memory is overfilled.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.core.evict import POLICIES
from kvstore_client import Client
from kvstore_client.namespace import Namespace
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running

LOOPS = ["evict", "expire", "index", "heartbeat"]
SIZE_BYTES = 16 << 20
BLOCK = 64 << 10
SLOTS = SIZE_BYTES // BLOCK

FAULTY = """
import os, sys
from kvstore import loops
from kvstore.cli.entry import kvstored

directory = sys.argv.pop(1)
begin = loops.Loop.__init__

def faulty(self, name, interval_s, step):
    def fail_or_step():
        if os.path.exists(f"{directory}/fail {name}"):
            raise RuntimeError(f"injected into {name}")
        if os.path.exists(f"{directory}/fail once {name}"):
            os.unlink(f"{directory}/fail once {name}")
            raise RuntimeError(f"injected once into {name}")
        return step()
    begin(self, name, interval_s, fail_or_step)

loops.Loop.__init__ = faulty
kvstored()
"""


class FaultyDaemon(RunningDaemon):
    """The daemon itself; a step of one of its loops raises as long as a file of that name exists."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", FAULTY, str(self.directory), *super().command()[1:]]

    def fail(self, loop: str) -> Path:
        """The loop fails until the file is gone."""
        file = self.directory / f"fail {loop}"
        file.touch()
        return file

    def fail_once(self, loop: str) -> Path:
        """The loop fails once, and the file is gone then."""
        file = self.directory / f"fail once {loop}"
        file.touch()
        return file


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyDaemon]:
    daemon = FaultyDaemon(tmp_path_factory.mktemp("faulty"), {"host.size": f"{SIZE_BYTES}B"})
    try:
        yield daemon
    finally:
        daemon.kill()


def overfill(ns: Namespace, name: str, times: int = 2) -> None:
    """Every put is stored, though nobody makes room ahead."""
    for i in range(times * SLOTS // 8):
        keys = [ns.key(f"{name} {i}/{j}".encode()) for j in range(8)]
        assert ns.put(keys, [block((name, i, j), BLOCK) for j in range(8)]).rejected == 0
        if i % 16 == 0:
            assert ns.get(keys) == [block((name, i, j), BLOCK) for j in range(8)]


def loop_stats(client: Client, name: str) -> dict[str, object]:
    return next(loop for loop in client.stats()["loops"] if loop["name"] == name)


def test_the_loops_named_here_are_all_there_are(faulty: FaultyDaemon) -> None:
    with Client(faulty.endpoint) as client:
        assert [loop["name"] for loop in client.stats()["loops"]] == LOOPS


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_fails_for_a_while_is_seen_and_goes_on(faulty: FaultyDaemon, name: str) -> None:
    with Client(faulty.endpoint) as client:
        ns = client.raw_namespace("overfill", BLOCK)
        assert client.health().healthy
        errors, runs = loop_stats(client, name)["errors"], loop_stats(client, name)["runs"]
        file = faulty.fail(name)
        eventually(lambda: not client.health().healthy, 5.0, "the daemon to be unhealthy")
        health = client.health()
        assert health.reachable
        assert health.problems == [f"background loop {name}: RuntimeError: injected into {name}"]
        failing = loop_stats(client, name)
        assert failing["failing"]
        assert failing["errors"] > errors  # type: ignore[operator]
        overfill(ns, name)
        file.unlink()
        eventually(lambda: client.health().healthy, 5.0, "the daemon to be healthy again")
        after = loop_stats(client, name)
        assert not after["failing"]
        assert after["runs"] > runs  # type: ignore[operator]
        assert after["last_error"] == f"RuntimeError: injected into {name}"
        overfill(ns, name + " again")


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_raises_once_goes_on(faulty: FaultyDaemon, name: str) -> None:
    with Client(faulty.endpoint) as client:
        ns = client.raw_namespace("overfill", BLOCK)
        before = loop_stats(client, name)["errors"]
        file = faulty.fail_once(name)
        overfill(ns, name + " once")
        eventually(lambda: not file.exists(), 5.0, "the loop to raise")
        eventually(lambda: client.health().healthy, 5.0, "the daemon to be healthy again")
        assert loop_stats(client, name)["errors"] == before + 1  # type: ignore[operator]
        faulty.says(f"background loop {name} failed; it goes on")


def test_all_loops_failing_at_once_are_all_named_and_puts_succeed(faulty: FaultyDaemon) -> None:
    with Client(faulty.endpoint) as client:
        files = [faulty.fail(name) for name in LOOPS]
        eventually(lambda: len(client.health().problems) == len(LOOPS), 5.0, "all loops to fail")
        overfill(client.raw_namespace("overfill", BLOCK), "all")
        for file in files:
            file.unlink()
        eventually(lambda: client.health().healthy, 5.0, "the daemon to be healthy again")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_documented_policy_evicts_past_its_watermarks(policy: str) -> None:
    high, low = 0.8, 0.5
    settings = {
        "host__size": f"{SIZE_BYTES}B",
        "evict__policy": policy,
        "evict__high": str(high),
        "evict__low": str(low),
    }
    with running(**settings) as daemon, Client(daemon.endpoint) as client:
        ns = client.raw_namespace("overfill", BLOCK)
        overfill(ns, policy, times=4)
        assert client.stats()["counters"]["evicted"] > 2 * SLOTS
        more = iter(range(100_000))

        def low_mark_is_reached() -> bool:
            """Puts go on: between the marks nothing need be evicted."""
            assert ns.put([ns.key(b"more %d" % next(more))], bytes(BLOCK)).rejected == 0
            return blocks(client) <= low * SLOTS + 8

        eventually(low_mark_is_reached, 10.0, "use to come down to the low mark")
        assert blocks(client) >= (low - 0.1) * SLOTS, "no more than that goes"
        assert client.health().healthy
        assert all(not loop["errors"] for loop in client.stats()["loops"])


def blocks(client: Client) -> int:
    found: int = client.stats()["pools"][0]["blocks"]
    return found


def test_a_call_that_fails_is_told_counted_and_over(tmp_path: Path) -> None:
    """The same for the calls of clients: a bug of the daemon's costs one answer, not the daemon."""
    text = FAULTY.replace(
        "kvstored()\n",
        "from kvstore.server import calls\n"
        "def broken(*_): raise ZeroDivisionError('injected')\n"
        "calls.unpin = broken\n"
        "kvstored()\n",
    )
    daemon: RunningDaemon = type("Broken", (FaultyDaemon,), {"command": with_text(text)})(
        tmp_path, {"host.size": "4MiB"}
    )
    try:
        with Client(daemon.endpoint) as client:
            ns = client.raw_namespace("broken", BLOCK)
            with pytest.raises(Exception, match="internal error of the daemon: ZeroDivisionError; see its log"):
                ns.unpin([ns.key(b"x")])
            assert ns.put([ns.key(b"x")], bytes(BLOCK)).stored == 1
            health = client.health()
            assert not health.healthy
            assert health.problems == ["1 internal errors in calls; see the log"]
            daemon.says("ZeroDivisionError: injected")
    finally:
        daemon.kill()


def with_text(text: str) -> Callable[[RunningDaemon], list[str]]:
    def command(self: RunningDaemon) -> list[str]:
        return [sys.executable, "-c", text, str(self.directory), *RunningDaemon.command(self)[1:]]

    return command
