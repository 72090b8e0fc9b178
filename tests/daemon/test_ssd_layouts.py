"""`ssd.layout`: a killed daemon serves what it had from either; another layout is a clean start."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.tiers.ssd.format import EXTENTS, ROCKSDB
from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running

BLOCK, BLOCKS = 64 << 10, 40


def settings(path: Path, layout: str) -> dict[str, str]:
    found = {"host__size": "16MiB", "ssd__path": str(path), "ssd__size": "128MiB", "ssd__free_floor": "0B"}
    return found | {"ssd__layout": layout}


def ssd_of(client: Client, daemon: RunningDaemon) -> dict[str, Any]:
    eventually(lambda: "the SSD tier is open" in daemon.output())
    found: dict[str, Any] = client.stats()["ssd"]
    return found


@pytest.mark.parametrize(("layout", "other"), [(EXTENTS, ROCKSDB), (ROCKSDB, EXTENTS)])
def test_a_killed_daemon_finds_its_blocks_and_one_of_another_layout_a_clean_start(
    tmp_path: Path, layout: str, other: str
) -> None:
    path, contents = tmp_path / "tier", [block(i, BLOCK) for i in range(BLOCKS)]
    with running(**settings(path, layout)) as daemon, Client(daemon.endpoint) as client:
        ns = client.raw_namespace("layouts", BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(BLOCKS)]
        assert ssd_of(client, daemon)["layout"] == layout
        assert ns.put(keys, contents, durable=True).error is None
        daemon.kill()
    with running(**settings(path, layout)) as daemon, Client(daemon.endpoint) as client:
        assert ssd_of(client, daemon)["blocks"] == BLOCKS
        ns = client.raw_namespace("layouts", BLOCK)
        targets = [np.zeros(BLOCK, np.uint8) for _ in range(BLOCKS)]
        assert ns.get_into(keys, targets) == BLOCKS
        assert [target.tobytes() for target in targets] == contents
        assert client.stats()["ssd"]["counters"]["corrupt"] == 0
    with running(**settings(path, other)) as daemon, Client(daemon.endpoint) as client:
        ssd = ssd_of(client, daemon)
        assert (ssd["layout"], ssd["blocks"], ssd["aside"]) == (other, 0, 0)
        (told,) = [line for line in daemon.output().splitlines() if "ssd.layout has changed" in line]
        assert f"before={layout} now={other} files=" in told
        assert "speaks of" not in daemon.output(), "said twice"
        ns = client.raw_namespace("layouts", BLOCK)
        assert ns.match(keys).blocks == 0
        assert ns.put(keys[:1], contents[:1], durable=True).error is None
    kept = {entry.name.rpartition("-")[0] or entry.name for entry in path.iterdir()}
    assert kept == {"lock", "ballast"} | ({"store"} if other == ROCKSDB else {"catalogue", "segment"})
