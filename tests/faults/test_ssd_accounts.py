"""What the daemon says it keeps on the SSD is what is there, whatever came and went: churn of ten times the limit.

Of either layout; writes that fail are met by extents only (tests/faults/tiers.py).

The field fault: a counter never went down on one of the ways out, so all puts were dropped with
the disk empty; elsewhere the disk held twice the limit.
"""

import errno
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import EXTENTS, ROCKSDB
from kvstore_client import Client, Namespace
from tests.conftest import eventually
from tests.faults.faulty_disk import FaultyDaemon, faulty
from tests.faults.tiers import (
    LAYOUTS,
    catalogue,
    du,
    keys_of,
    nothing_held,
    opened,
    pieces,
    present,
    put,
    settled,
    ssd,
)

BLOCK = 128 << 10
AT_ONCE = 32
LIMITS = {EXTENTS: 64 << 20, ROCKSDB: 128 << 20}
ROUNDS, A_ROUND = 10, {EXTENTS: 512, ROCKSDB: 256}
"""Ten times the limit; in RocksDB, where each byte costs more, two and a half times: garbage is collected all along."""
SEED = 20260131


def check(client: Client, daemon: FaultyDaemon) -> dict[str, Any]:
    """Counters, index and disk say the same."""
    now = settled(client)
    assert now["used_bytes"] == now["blocks"] * BLOCK <= now["file_bytes"], now
    assert du(daemon.ssd) <= LIMITS[now["layout"]]
    if now["layout"] == EXTENTS:
        files = sum(file.stat().st_size for file in daemon.ssd.glob("segment-*.kv"))
        assert files == now["file_bytes"]
    namespaces = client.stats()["namespaces"]
    assert sum(found["ssd_blocks"] for found in namespaces) == now["blocks"]
    return now


class Watched:
    """What a directory takes at its most, looked at all the time: no limit is passed between two checks either."""

    def __init__(self, path: Path) -> None:
        self.most = 0
        self._path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        layer = FileLayer()
        while not self._over.wait(0.05):
            self.most = max(self.most, layer.physical_bytes(self._path))

    def __enter__(self) -> "Watched":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def churn(ns: Namespace, daemon: FaultyDaemon, number: int, rng: random.Random, blocks: int) -> None:
    """Puts, removals, blocks stored again, and writes that fail."""
    keys = keys_of(ns, f"round {number}", blocks)
    put(ns, keys[: blocks // 2], durable=True, at_once=AT_ONCE)
    ns.remove(rng.sample(keys[: blocks // 2], 50))
    put(ns, keys[: blocks // 4], at_once=AT_ONCE)
    if number % 2:
        daemon.disk(write={"errno": errno.EIO, "after_bytes": 4096})
        put(ns, keys[blocks // 2 :][:AT_ONCE])
        daemon.disk()
    put(ns, keys[blocks // 2 :], durable=True, at_once=AT_ONCE)
    ns.remove(keys[::7])
    present(ns, rng.sample(keys, 32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_counters_files_and_catalogue_agree_through_many_times_the_limit(layout: str) -> None:
    rng, written, limit = random.Random(SEED), 0, LIMITS[layout]
    with (
        faulty(ssd__size=f"{limit}B", ssd__layout=layout, host__size="8MiB") as daemon,
        Watched(daemon.ssd) as watched,
    ):
        for number in range(ROUNDS):
            with Client(daemon.endpoint, name="churn", timeout_s=10.0) as client:
                opened(client)
                ns = client.raw_namespace("churn", BLOCK)
                churn(ns, daemon, number, rng, A_ROUND[layout])
                opened(client)
                before = check(client, daemon)
            if number % 3 == 2 or number == ROUNDS - 1:
                written += before["counters"]["written_bytes"]  # in that life
            if number % 3 == 2:
                (daemon.kill if number % 2 else daemon.stop)()
                daemon.restart()
                with Client(daemon.endpoint, name="churn") as client:
                    opened(client)
                    assert check(client, daemon)["blocks"] >= before["blocks"]
        assert written >= 0.8 * ROUNDS * A_ROUND[layout] * BLOCK, f"only {written >> 20} MiB were written"
        with Client(daemon.endpoint, name="churn") as client:
            ns = client.raw_namespace("churn", BLOCK)
            assert put(ns, keys_of(ns, "after all that", 32), durable=True) == []
            ns.clear()
            nothing_held(client)
            now = check(client, daemon)
            assert (now["blocks"], now["used_bytes"]) == (0, 0)
            assert sum(pool["blocks"] for pool in client.stats()["pools"]) == 0
        daemon.stop()
        records, _ = catalogue(daemon.ssd)
        assert records == []
        assert layout == EXTENTS or not pieces(daemon.ssd), "payload of nobody"
        assert limit // 2 < watched.most <= limit


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_kill_left_of_a_removal_is_found_and_counted_at_the_next_start(layout: str) -> None:
    with faulty(ssd__size=f"{LIMITS[layout]}B", ssd__layout=layout, host__size="8MiB") as daemon:
        with Client(daemon.endpoint, name="churn", timeout_s=10.0) as client:
            opened(client)
            ns = client.raw_namespace("churn", BLOCK)
            keys = keys_of(ns, "gone", 128)
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
