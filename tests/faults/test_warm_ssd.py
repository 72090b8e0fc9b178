"""What was on the SSD when the daemon ended is there for the next one, byte by byte; what cannot be used is free.

The field fault: after a restart files on disk were ignored and written again.
"""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.tiers.ssd.format import EXTENTS, VERSION_KEY
from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually
from tests.faults.faulty_disk import faulty
from tests.faults.tiers import (
    LAYOUTS,
    catalogue,
    catalogue_of,
    du,
    durably,
    keys_of,
    opened,
    pieces,
    present,
    put,
    settled,
    ssd,
)

SMALL, LARGE = 4 << 10, 64 << 10
BLOCKS = 10_000


def with_ssd(start_daemon: Callable[..., RunningDaemon], path: Path, **settings: str) -> RunningDaemon:
    found = {"host__size": "32MiB", "ssd__size": "256MiB", "ssd__free_floor": "1MiB", **settings}
    return start_daemon(ssd__path=str(path), **found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_thousand_blocks_outlive_a_clean_stop_and_a_kill(
    start_daemon: Callable[..., RunningDaemon], tmp_path: Path, layout: str
) -> None:
    daemon = with_ssd(start_daemon, tmp_path / "ssd", ssd__layout=layout)
    with Client(daemon.endpoint, name="writer", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("warm", SMALL)
        keys = keys_of(ns, "block", BLOCKS)
        for at in range(0, BLOCKS, 500):
            assert put(ns, keys[at : at + 500], durable=at + 500 >= BLOCKS or at % 1000 == 500, at_once=500) == []
            settled(client)
        written = ssd(client)["counters"]["written"]
        assert written == ssd(client)["blocks"] == BLOCKS
    for end in (daemon.stop, daemon.kill):
        end()
        daemon.restart()
        with Client(daemon.endpoint, name="reader", timeout_s=10.0) as client:
            opened(client)
            ns = client.raw_namespace("warm", SMALL)
            assert ssd(client)["blocks"] == BLOCKS
            assert len(present(ns, keys, at_once=200)) == BLOCKS
            assert ssd(client)["counters"]["written"] == 0, "what is there was written again"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_another_size_after_a_restart_are_a_clean_miss_and_take_the_place_of_the_old(
    start_daemon: Callable[..., RunningDaemon], tmp_path: Path, layout: str
) -> None:
    path, scale = tmp_path / "ssd", 1 if layout == EXTENTS else 2
    daemon = with_ssd(start_daemon, path, ssd__size=f"{64 * scale}MiB", ssd__layout=layout)
    with Client(daemon.endpoint, name="writer", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("engine", SMALL)
        old = keys_of(ns, "block", 9000 * scale)
        assert put(ns, old, durable=True, at_once=500) == []
        full = ssd(client)
        assert full["blocks"] > 7500 * scale
    daemon.kill()
    daemon.restart()
    with Client(daemon.endpoint, name="writer", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("engine", LARGE)
        keys = keys_of(ns, "block", 1000 * scale)
        assert present(ns, keys) == []
        durably(ns, keys)
        now = settled(client)
        old_ns = client.raw_namespace("engine", SMALL)
        left = len(present(old_ns, old[:1]))
        assert now["evicted"] >= full["blocks"] - 1 + left
        assert now["blocks"] * LARGE > full["used_bytes"] // 2, "the old bytes are not used again"
        last = keys[-100:]
        assert present(ns, last) == last
        assert du(path) <= scale * 64 << 20
    daemon.stop()
    records, _ = catalogue(path)
    assert len(records) == now["blocks"]
    places = {(record.segment, record.slot) for record in records}
    assert layout == EXTENTS or {(segment, slot) for segment, _, slot in pieces(path)} == places, (
        "the old is still there"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_format_of_another_version_is_set_aside_and_said(
    start_daemon: Callable[..., RunningDaemon], tmp_path: Path, layout: str
) -> None:
    path = tmp_path / "ssd"
    daemon = with_ssd(start_daemon, path, ssd__layout=layout)
    with Client(daemon.endpoint, name="writer") as client:
        opened(client)
        ns = client.raw_namespace("engine", SMALL)
        keys = keys_of(ns, "block", 10)
        durably(ns, keys)
    daemon.stop()
    found = catalogue_of(path)
    found.write({VERSION_KEY: struct.pack(">I", 99)})
    found.close()
    daemon.restart()
    with Client(daemon.endpoint, name="reader") as client:
        opened(client)
        ns = client.raw_namespace("engine", SMALL)
        assert present(ns, keys) == []
        assert eventually(lambda: ssd(client)["aside"], 10, "what was set aside to be counted") == 1
        assert any("aside" in why for why in client.stats()["daemon"]["degraded"])
        assert client.health().healthy
        durably(ns, keys)
        assert present(ns, keys) == keys
    daemon.kill()
    daemon.restart()
    with Client(daemon.endpoint, name="reader") as client:
        opened(client)
        assert present(client.raw_namespace("engine", SMALL), keys) == keys


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["a passing error", "a corrupt file"])
def test_records_that_cannot_all_be_read_at_once_cost_nothing_that_was_promised(kind: str, layout: str) -> None:
    """Found here: read again, each record met its own block and was deleted as a double of it."""
    rule = {"errno": 5} if kind == "a passing error" else {"corrupt": True}
    with faulty(host__size="8MiB", ssd__size="128MiB", ssd__layout=layout) as daemon:
        with Client(daemon.endpoint, name="writer", timeout_s=10.0) as client:
            opened(client)
            ns = client.raw_namespace("warm", SMALL)
            keys = keys_of(ns, "block", 200)
            durably(ns, keys)
        daemon.kill()
        daemon.disk(records=rule)
        daemon.restart()
        with Client(daemon.endpoint, name="reader", timeout_s=10.0) as client:
            eventually(lambda: "cannot be" in ssd(client)["trouble"] or ssd(client)["aside"], 10, "the error to be met")
            present(client.raw_namespace("warm", SMALL), keys)
            daemon.disk()
            opened(client)
            ns = client.raw_namespace("warm", SMALL)
            if kind == "a passing error":
                assert present(ns, keys) == keys
            else:
                eventually(lambda: ssd(client)["aside"] == 1, 10, "what was set aside to be counted")
                durably(ns, keys)
        # Found here: records of a namespace that only the catalogue which was set aside had described.
        daemon.kill()
        daemon.restart()
        with Client(daemon.endpoint, name="reader", timeout_s=10.0) as client:
            opened(client)
            assert present(client.raw_namespace("warm", SMALL), keys) == keys
