"""An SSD tier that is larger than its disk: said at the start, and wherever its size is shown."""

import os
from pathlib import Path

import pytest

from kvstore_client import Client
from tests.conftest import eventually
from tests.daemon.cli import within
from tests.nodes import running

SIZE_GIB = 1 << 20
"""More than the disks of tests have, whatever others write to them and remove meanwhile."""


@pytest.mark.parametrize("some", [True, False], ids=["some", "nothing"])
def test_a_size_that_the_disk_has_no_room_for_is_a_warning_with_what_there_is(tmp_path: Path, some: bool) -> None:
    disk = os.statvfs(tmp_path)
    floor_bytes = disk.f_bavail * disk.f_frsize // 2 if some else 1000 << 40
    settings = {"ssd__path": str(tmp_path / "ssd"), "ssd__size": f"{SIZE_GIB}GiB", "ssd__free_floor": f"{floor_bytes}B"}
    with running(host__size="8MiB", **settings) as node, Client(node.endpoint) as client:
        eventually(lambda: "the SSD tier is open" in node.output(), what="the SSD to be open")
        warned = [line for line in node.output().splitlines() if "more than its file system has room for" in line]
        assert len(warned) == 1
        assert f"size_mib={SIZE_GIB << 10}" in warned[0]
        assert "missing_mib=" in warned[0]
        ssd = client.stats()["ssd"]
        assert 0 <= ssd["room_bytes"] < ssd["size_bytes"] == SIZE_GIB << 30
        assert (ssd["room_bytes"] > 0) == some
        assert "its file system has room for" in within("stats", "--endpoint", node.endpoint).stdout


def test_a_size_that_there_is_room_for_is_shown_as_it_is(tmp_path: Path) -> None:
    settings = {"ssd__path": str(tmp_path / "ssd"), "ssd__size": "64MiB", "ssd__free_floor": "0B"}
    with running(host__size="8MiB", **settings) as node, Client(node.endpoint) as client:
        eventually(lambda: "the SSD tier is open" in node.output(), what="the SSD to be open")
        assert "more than its file system" not in node.output()
        assert client.stats()["ssd"]["room_bytes"] == 64 << 20
        assert "its file system has room for" not in within("stats", "--endpoint", node.endpoint).stdout
