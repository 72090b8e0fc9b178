"""A block is on the SSD whole, or it is not there: a write that fails at any byte, with readers that race it.

Layout "extents": writes that fail or end half-way are those of the file layer. In RocksDB a block is
whole because its record is behind it in one log, which tests/tiers/ssd/test_blobs.py cuts at any
byte and test_ssd_killed.py by kills; a disk that fills up is in test_ssd_optional.py.

The field fault: a disk store failed with a warning, or a read raced the write, and later hits
gave gibberish, because the key was published before the data was whole.
"""

import errno
import threading
from functools import partial
from typing import Any

from kvstore_client import Client
from tests.conftest import eventually
from tests.faults.faulty_disk import FaultyDaemon, faulty
from tests.faults.tiers import (
    HEALED_S,
    durably,
    keys_of,
    nothing_held,
    only_on_ssd,
    opened,
    present,
    put,
    settled,
    ssd,
)

BLOCK = 64 << 10

FAILURES = {
    "before the first byte": {"write": {"errno": errno.EIO}},
    "at byte 4096": {"write": {"errno": errno.EIO, "after_bytes": 4096}},
    "at the last page": {"write": {"errno": errno.ENOSPC, "after_bytes": BLOCK - 4096}},
    "when all bytes had gone": {"write": {"errno": errno.EIO, "after_bytes": BLOCK}},
    "at the sync": {"sync": {"errno": errno.EIO}},
}


def test_a_write_that_fails_at_any_byte_leaves_nothing_that_could_be_served() -> None:
    with faulty() as daemon, Client(daemon.endpoint, name="writer", timeout_s=5.0) as client:
        opened(client)
        ns = client.raw_namespace("whole", BLOCK)
        sound = keys_of(ns, "sound", 24)
        durably(ns, sound)
        failed = 0
        with Racing(daemon, keys_of(ns, "torn", 24 * len(FAILURES)) + sound) as racing:
            for n, (name, rule) in enumerate(FAILURES.items()):
                used = settled(client)["used_bytes"]
                daemon.disk(**rule)
                torn = keys_of(ns, "torn", 24 * (n + 1))[-24:]
                errors = put(ns, torn, durable=True)
                assert errors, f"{name}: it was said to be durable"
                now = eventually(partial(grown, client, failed), 10, f"{name}: write errors to be counted")
                failed = now["counters"]["write_errors"]
                assert now["used_bytes"] == used, f"{name}: extents stay taken"
                daemon.disk()
                opened(client)
                ns.remove(torn)  # or it is written now, while the next ones fail
        assert racing.read > 0
        only_on_ssd(client, ns, sound)
        assert present(ns, sound) == sound
        nothing_held(client)


def grown(client: Client, failed: int) -> dict[str, Any]:
    found = settled(client)
    return found if found["counters"]["write_errors"] > failed and found["trouble"] else {}


class Racing:
    """Readers that look at these blocks all the time, each hit byte by byte."""

    def __init__(self, daemon: FaultyDaemon, keys: list[bytes]) -> None:
        self.read = 0
        self._wrong: list[BaseException] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(daemon.endpoint, keys)) for _ in range(2)]

    def _run(self, endpoint: str, keys: list[bytes]) -> None:
        try:
            with Client(endpoint, name="reader", timeout_s=2.0) as client:
                ns = client.raw_namespace("whole", BLOCK)
                while not self._over.is_set():
                    self.read += len(present(ns, keys))
        except BaseException as e:  # noqa: BLE001 (told by __exit__)
            self._wrong.append(e)

    def __enter__(self) -> "Racing":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        assert not self._wrong, self._wrong[0]


def test_a_block_is_promised_by_the_ssd_only_when_all_of_it_is_there() -> None:
    with faulty(host__size="4MiB") as daemon, Client(daemon.endpoint, name="writer", timeout_s=5.0) as client:
        opened(client)
        ns = client.raw_namespace("whole", BLOCK)
        durably(ns, keys_of(ns, "first", 1))
        daemon.disk(sync={"hangs": True})
        half = keys_of(ns, "half", 8)
        put(ns, half)
        eventually(lambda: queue(client, "write")["running"] > 0, 10, "writes to be under way")
        put(ns, keys_of(ns, "more", 200))
        tiers = [ns.match([key]).tiers for key in half]
        assert all(tier in ([], ["host"]) for tier in tiers), "a block is promised that is not whole"
        assert ssd(client)["blocks"] == 1
        present(ns, half)
        daemon.kill()  # with all bytes written and no sync: nothing of it may be believed
        daemon.disk()
        daemon.restart()
        opened(client)
        found = present(client.raw_namespace("whole", BLOCK), half)
        assert len(found) == ssd(client)["blocks"] - 1 == 0


def queue(client: Client, kind: str) -> dict[str, Any]:
    (found,) = [queue for queue in ssd(client)["queues"] if queue["kind"] == kind]
    return dict(found)


def test_a_disk_that_moves_fewer_bytes_than_asked_for_is_asked_again() -> None:
    with faulty() as daemon, Client(daemon.endpoint, name="writer", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("whole", BLOCK)
        daemon.disk(write={"at_most": 8192}, read={"at_most": 4096})
        keys = keys_of(ns, "short", 8)
        durably(ns, keys)
        only_on_ssd(client, ns, keys)
        assert present(ns, keys) == keys


def test_the_tier_heals_by_itself_after_every_one_of_these() -> None:
    with faulty() as daemon, Client(daemon.endpoint, name="writer", timeout_s=5.0) as client:
        opened(client)
        ns = client.raw_namespace("whole", BLOCK)
        for n, rule in enumerate(({"any": {"errno": errno.EIO}}, {"write": {"errno": errno.ENOSPC}})):
            daemon.disk(**rule)
            assert put(ns, keys_of(ns, f"bad {n}", 4), durable=True)
            eventually(lambda: ssd(client)["trouble"], what="it to be told")
            daemon.disk()
            eventually(lambda: not (ssd(client)["trouble"] or ssd(client)["no_file"]), HEALED_S, "it to be well")
            durably(ns, keys_of(ns, f"good {n}", 4))
