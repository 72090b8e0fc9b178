"""What the daemon says it keeps on the SSD is what is there, whatever came and went: churn of ten times the limit.

The field fault: a counter never went down on one of the ways out, so all puts were dropped with
the disk empty; elsewhere the disk held twice the limit.
"""

import errno
import random
from typing import Any

from kvstore_client import Client, Namespace
from tests.conftest import eventually
from tests.faults.faulty_disk import FaultyDaemon, faulty
from tests.faults.tiers import catalogue, du, keys_of, nothing_held, opened, present, put, settled, ssd

BLOCK = 64 << 10
LIMIT = 64 << 20
ROUNDS, A_ROUND = 10, 1024
SEED = 20260131


def check(client: Client, daemon: FaultyDaemon) -> dict[str, Any]:
    """Counters, index and disk say the same."""
    now = settled(client)
    assert now["used_bytes"] == now["blocks"] * BLOCK <= now["file_bytes"], now
    assert du(daemon.ssd) <= LIMIT
    files = sum(file.stat().st_size for file in daemon.ssd.glob("segment-*.kv"))
    assert files == now["file_bytes"]
    namespaces = client.stats()["namespaces"]
    assert sum(found["ssd_blocks"] for found in namespaces) == now["blocks"]
    return now


def churn(ns: Namespace, daemon: FaultyDaemon, number: int, rng: random.Random) -> None:
    """Puts, removals, blocks stored again, and writes that fail."""
    keys = keys_of(ns, f"round {number}", A_ROUND)
    put(ns, keys[: A_ROUND // 2], durable=True, at_once=64)
    ns.remove(rng.sample(keys[: A_ROUND // 2], 100))
    put(ns, keys[: A_ROUND // 4], at_once=64)
    if number % 2:
        daemon.disk(write={"errno": errno.EIO, "after_bytes": 4096})
        put(ns, keys[A_ROUND // 2 :][:64])
        daemon.disk()
    put(ns, keys[A_ROUND // 2 :], durable=True, at_once=64)
    ns.remove(keys[::7])
    present(ns, rng.sample(keys, 64))


def test_counters_files_and_catalogue_agree_through_ten_times_the_limit() -> None:
    rng, written = random.Random(SEED), 0
    with faulty(ssd__size="64MiB", host__size="8MiB") as daemon:
        for number in range(ROUNDS):
            with Client(daemon.endpoint, name="churn", timeout_s=10.0) as client:
                opened(client)
                ns = client.raw_namespace("churn", BLOCK)
                churn(ns, daemon, number, rng)
                opened(client)
                before = check(client, daemon)
                written += before["counters"]["written_bytes"]
            if number % 3 == 2:
                (daemon.kill if number % 2 else daemon.stop)()
                daemon.restart()
                with Client(daemon.endpoint, name="churn") as client:
                    opened(client)
                    assert check(client, daemon)["blocks"] >= before["blocks"]
        assert written >= 8 * LIMIT, f"only {written >> 20} MiB were written"
        with Client(daemon.endpoint, name="churn") as client:
            ns = client.raw_namespace("churn", BLOCK)
            assert put(ns, keys_of(ns, "after all that", 64), durable=True) == []
            ns.clear()
            nothing_held(client)
            now = check(client, daemon)
            assert (now["blocks"], now["used_bytes"]) == (0, 0)
            assert sum(pool["blocks"] for pool in client.stats()["pools"]) == 0
        daemon.stop()
        records, _ = catalogue(daemon.ssd)
        assert records == []


def test_what_a_kill_left_of_a_removal_is_found_and_counted_at_the_next_start() -> None:
    with faulty(ssd__size="64MiB", host__size="8MiB") as daemon:
        with Client(daemon.endpoint, name="churn", timeout_s=10.0) as client:
            opened(client)
            ns = client.raw_namespace("churn", BLOCK)
            keys = keys_of(ns, "gone", 256)
            assert put(ns, keys, durable=True) == []
            ns.clear()
            daemon.kill()
        daemon.restart()
        with Client(daemon.endpoint, name="churn") as client:
            opened(client)
            ns = client.raw_namespace("churn", BLOCK)
            now = check(client, daemon)
            assert len(present(ns, keys)) == now["blocks"]
            ns.clear()
            eventually(lambda: ssd(client)["blocks"] == 0, 10, "the blocks to be gone")
            assert check(client, daemon)["used_bytes"] == 0
