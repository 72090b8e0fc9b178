"""A durable put of more than the SSD has room for never says that all of it is there."""

from pathlib import Path

import pytest

from kvstore.cli.connection import EXIT_NOT_WELL
from kvstore.tiers.ssd.format import EXTENTS, ROCKSDB
from kvstore_client import Client
from kvstored.v1.errors import FailedPrecondition
from tests.conftest import RunningDaemon
from tests.daemon.cli import within
from tests.faults.tiers import LAYOUTS, keys_of, opened, settled
from tests.nodes import block, running

BLOCK, BLOCKS = 1 << 20, 100
SIZES = {EXTENTS: "96MiB", ROCKSDB: "128MiB"}
"""With room for some 70 and 84 blocks."""


def settings(path: Path, layout: str, **others: str) -> dict[str, str]:
    found = {"ssd__path": str(path), "ssd__layout": layout, "ssd__free_floor": "0B", "ssd__size": "128MiB"}
    return {**found, "host__size": "160MiB", "server__grpc": "127.0.0.1:0", **others}


def put(daemon: RunningDaemon, endpoint: str, name: str) -> tuple[int, Exception | None, int]:
    """Stored, why not durable, and how many blocks are on the SSD when all has been written."""
    with Client(daemon.endpoint) as local, Client(endpoint, timeout_s=60.0) as client:
        opened(local)
        ns = client.raw_namespace(name, BLOCK)
        keys = keys_of(ns, name, BLOCKS)
        result = ns.put(keys, [block(i % 8, BLOCK) for i in range(BLOCKS)], durable=True)
        return result.stored, result.error, settled(local)["blocks"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["session", "grpc"])
def test_a_put_whose_last_blocks_take_the_place_of_its_first_is_not_durable(
    tmp_path: Path, layout: str, way: str
) -> None:
    with running(**settings(tmp_path / "tier", layout, ssd__size=SIZES[layout])) as daemon:
        endpoint = daemon.endpoint if way == "session" else daemon.grpc_endpoint
        stored, error, there = put(daemon, endpoint, f"{layout} {way}")
        assert stored == BLOCKS
        assert there < BLOCKS, "the SSD has room for all: the test shows nothing"
        assert isinstance(error, FailedPrecondition), f"{there} of {BLOCKS} blocks are on the SSD: {error}"
        assert "ssd.size" in str(error)


@pytest.mark.parametrize(("layout", "block_mib", "most"), [(EXTENTS, 80, "72 MiB"), (ROCKSDB, 4, "2 MiB")])
def test_a_block_too_large_for_the_ssd_is_answered_with_the_limit_and_its_setting(
    tmp_path: Path, layout: str, block_mib: int, most: str
) -> None:
    with (
        running(**settings(tmp_path / "tier", layout, ssd__size=SIZES[layout])) as daemon,
        Client(daemon.endpoint) as client,
    ):
        opened(client)
        ns = client.raw_namespace("large", block_mib << 20)
        error = ns.put([ns.key(b"large")], [bytes(block_mib << 20)], durable=True).error
        flushed = within("flush", "--endpoint", daemon.endpoint)
        assert flushed.exit_code == EXIT_NOT_WELL
        for said in (str(error), flushed.stderr):
            assert f"blocks of {block_mib} MiB are larger than the SSD takes: at most {most} with this ssd.size" in said
