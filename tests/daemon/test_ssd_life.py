"""The SSD tier while the daemon starts, stops, and cannot use it: memory serves, and it is said what is wrong."""

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.cli.connection import EXIT_NOT_WELL
from kvstore.sdnotify import EXTEND_S
from kvstore.tiers.ssd.catalogue import Catalogue
from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import (
    CATALOGUE_NAME,
    NamespaceRow,
    Record,
    SegmentRow,
    pack_record,
    pack_row,
    segment_name,
)
from kvstore_client import Client, Namespace, admin
from tests.conftest import RunningDaemon, eventually
from tests.daemon.cli import within
from tests.daemon.test_http import ask
from tests.faults.test_honest_start import Service, Systemd
from tests.nodes import anonymous_bytes, block, running

BLOCK = 64 << 10
BLOCKS = 200
RECORDS = 200_000
SLOT = 4096


def settings(path: Path, **more: str) -> dict[str, str]:
    return {
        "host__size": "32MiB",
        "ssd__path": str(path),
        "ssd__size": "256MiB",
        "ssd__free_floor": "0B",
        "server__http": "127.0.0.1:0",
        **more,
    }


def opened(daemon: RunningDaemon) -> None:
    eventually(lambda: "the SSD tier is open" in daemon.output(), 30, "the SSD tier to be open")


def put(client: Client, blocks: int = BLOCKS) -> tuple[Namespace, list[bytes]]:
    ns = client.raw_namespace("blocks", BLOCK)
    keys = [ns.key(b"%d" % i) for i in range(blocks)]
    assert ns.put(keys, [block(i, BLOCK) for i in range(blocks)]).stored == blocks
    return ns, keys


@pytest.mark.parametrize("how", ["missing", "short"])
def test_a_segment_file_that_is_not_what_it_was_is_told_of_once(tmp_path: Path, how: str) -> None:
    """At the start that finds it; what was in it is a miss, and the rest is served."""
    with running(**settings(tmp_path / "ssd", ssd__size="64MiB")) as daemon:
        opened(daemon)
        with Client(daemon.endpoint) as client:
            _, keys = put(client)
        assert daemon.stop() == 0
        file = sorted((tmp_path / "ssd").glob("segment-*"))[0]
        if how == "missing":
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size // 2 // SLOT * SLOT)
        for told in (1, 0, 0):
            daemon.restart()
            opened(daemon)
            eventually(lambda told=told: daemon.output().count("a segment file is damaged") == told)  # type: ignore[misc]
            with Client(daemon.endpoint) as client:
                ns = client.raw_namespace("blocks", BLOCK)
                out = np.empty(BLOCK, np.uint8)
                found = [
                    i for i, key in enumerate(keys) if ns.get_into([key], out) and out.tobytes() == block(i, BLOCK)
                ]
                assert 0 < len(found) < BLOCKS
            assert daemon.stop() == 0


def checks(daemon: RunningDaemon) -> tuple[int, dict[str, str]]:
    status, _, body = ask(daemon, "/readyz")
    return status, json.loads(body)["checks"]


def metric(daemon: RunningDaemon, name: str) -> float:
    (line,) = [line for line in ask(daemon, "/metrics")[2].decode().splitlines() if line.startswith(f"{name} ")]
    return float(line.rpartition(" ")[2])


# -- out of use


def test_a_directory_that_another_daemon_has_is_named_and_taken_over_when_it_is_free(tmp_path: Path) -> None:
    with running(**settings(tmp_path / "ssd")) as first, running(**settings(tmp_path / "ssd")) as second:
        opened(first)
        # Not at once: on a busy machine the event loop may have been late a moment ago.
        _, found = eventually(
            lambda: (told := checks(second))[1]["ssd"] != "ok" and told[0] == 200 and told,
            what="a daemon that is ready, as memory serves, and says what is wrong",
        )
        assert found["ssd"].startswith("degraded: the SSD tier is out of use")
        assert str(first.pid) in found["ssd"]
        assert found["health"] == "ok"
        assert metric(second, "kvstored_degraded") == 1
        assert metric(second, "kvstored_ssd_in_use") == 0
        with Client(second.endpoint) as client:
            stats = client.stats()
            assert stats["daemon"]["healthy"]
            assert [str(first.pid) in why for why in stats["daemon"]["degraded"]] == [True]
            assert client.health().healthy
            ns, keys = put(client, 3)
            assert ns.get(keys) == [block(i, BLOCK) for i in range(3)]
            for command in ("flush", "verify"):
                began = time.monotonic()
                done = within(command, "--endpoint", second.endpoint)
                assert done.exit_code == EXIT_NOT_WELL
                assert str(first.pid) in done.stderr
                assert "waiting" not in done.stderr
                assert time.monotonic() - began < 9, f"{command} waits for an SSD that is out of use"
            named = ("evict", "--namespace", ns.digest.hex(), "--yes", "--endpoint", second.endpoint)
            refused = within(*named, "--tier", "ssd")
            assert "what the SSD has is not known yet" in refused.stderr
            done = within(*named)
            assert "3 blocks dropped" in done.stdout
            assert "what the SSD has is not known yet" in done.stdout
            assert "written down" in done.stdout
        assert "degraded" in within("stats", "--endpoint", second.endpoint).stdout
        assert first.stop() == 0
        opened(second)
        assert checks(second)[1]["ssd"] == "ok"
        assert metric(second, "kvstored_degraded") == 0


def test_what_cannot_be_read_is_set_aside_with_an_alarm_until_somebody_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "ssd"
    with running(**settings(path)) as node:
        opened(node)
        with Client(node.endpoint) as client:
            put(client, 3)
        assert node.stop() == 0
        (path / CATALOGUE_NAME / "CURRENT").write_text("")
        node.restart()
        opened(node)
        _, found = eventually(lambda: (told := checks(node))[1]["ssd"] != "ok" and told)
        assert found["ssd"].startswith(f"degraded: 1 set aside in {path}")
        assert metric(node, "kvstored_ssd_aside") == metric(node, "kvstored_degraded") == 1
        with Client(node.endpoint) as client:
            ssd = client.stats()["ssd"]
            assert (ssd["aside"], ssd["blocks"], ssd["trouble"]) == (1, 0, "")
            _, keys = put(client, 3)
            eventually(lambda: client.stats()["ssd"]["blocks"] == len(keys), what="the new one to be written to")
        (aside,) = [name for name in path.iterdir() if name.name.startswith("aside")]
        aside.rename(tmp_path / "looked at")
        eventually(lambda: checks(node)[1]["ssd"] == "ok", what="the alarm to end")
        assert metric(node, "kvstored_ssd_aside") == 0


# -- stop


def test_what_only_memory_has_is_written_when_the_daemon_stops(tmp_path: Path) -> None:
    """Nothing is written before: blocks go to the SSD once they were read nine times."""
    with running(**settings(tmp_path / "ssd", ssd__write_back="hits:9")) as node:
        opened(node)
        with Client(node.endpoint) as client:
            ns, keys = put(client)
            assert client.stats()["ssd"]["blocks"] == 0
        assert node.stop() == 0
        assert "memory saved to the SSD blocks_not_saved=0" in node.output()
        node.restart()
        opened(node)
        with Client(node.endpoint) as client:
            ns = client.raw_namespace("blocks", BLOCK)
            assert client.stats()["ssd"]["blocks"] == BLOCKS
            assert ns.match(keys).blocks == BLOCKS
            got = [ns.get(keys[at : at + 20]) for at in range(0, BLOCKS, 20)]
            assert [data for part in got for data in part] == [block(i, BLOCK) for i in range(BLOCKS)]


SLOWLY = """
import os, pathlib, time
from kvstore.tiers.ssd import files
sync = files.FileLayer.sync
def slow(self, descriptor):
    while os.path.exists({hold!r}):
        time.sleep(0.01)
    sync(self, descriptor)
files.FileLayer.sync = slow
"""


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    found = Systemd(str(tmp_path / "notify"))
    yield found
    found.socket.close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "daemon"
    path.mkdir(mode=0o700)
    return path


def started(place: Path, systemd: Systemd, patches: str, **more: str) -> Service:
    wanted = {
        key.replace("__", "."): value
        for key, value in settings(place / "ssd", ssd__write_back="hits:9", server__http="", **more).items()
    }
    service = Service(place, wanted, systemd, patches)
    systemd.wait_for("READY=1")
    opened(service)
    return service


def test_systemd_is_asked_for_time_while_memory_is_saved(place: Path, tmp_path: Path, systemd: Systemd) -> None:
    hold = tmp_path / "hold"
    service = started(place, systemd, SLOWLY.format(hold=str(hold)))
    try:
        with Client(service.endpoint) as client:
            put(client)
        hold.touch()
        before = systemd.all()
        service.process.terminate()
        systemd.wait_for(f"EXTEND_TIMEOUT_USEC={int(EXTEND_S * 1e6)}")
        eventually(lambda: any("blocks left" in line for line in systemd.all()[len(before) :]), 20, "a status")
        assert service.process.poll() is None, "it waits for the disk"
        hold.unlink()
        assert service.process.wait(60) == 0
        assert "memory saved to the SSD blocks_not_saved=0" in service.output()
    finally:
        hold.unlink(missing_ok=True)
        service.kill()


def test_a_disk_that_does_not_end_keeps_the_daemon_only_so_long_and_what_is_lost_is_counted(
    place: Path, tmp_path: Path, systemd: Systemd
) -> None:
    hold = tmp_path / "hold"
    patches = SLOWLY.format(hold=str(hold)) + (
        "from kvstore import daemon\nfrom kvstore.moving import life\ndaemon.SAVE_S = life.CLOSE_S = 0.5\n"
    )
    service = started(place, systemd, patches)
    try:
        with Client(service.endpoint) as client:
            put(client)
        hold.touch()
        assert service.stop() == 0
        assert f"blocks_not_saved={BLOCKS}" in service.output()
        assert "no time or room for them" in service.output()
    finally:
        hold.unlink(missing_ok=True)
        service.kill()


HANGING = """
import os, time
from kvstore.moving import upkeep
from kvstore.tiers.ssd import files
read = files.FileLayer.read
def hang(self, descriptor, view, offset):
    while os.path.exists({hold!r}):
        time.sleep(0.01)
    return read(self, descriptor, view, offset)
files.FileLayer.read = hang
upkeep.VERIFY_S = upkeep.VERIFY_END_S = 0.3
"""


def test_a_read_that_does_not_end_keeps_verify_only_so_long_and_it_goes_on_where_it_was(
    place: Path, tmp_path: Path, systemd: Systemd
) -> None:
    hold = tmp_path / "hold"
    service = started(place, systemd, HANGING.format(hold=str(hold)))
    try:
        with Client(service.endpoint) as client:
            ns, keys = put(client, 20)
            eventually(lambda: admin.flush(client, 1000).done)
            hold.touch()
            reply = admin.verify(client, 0, 1024)
            assert "a read has been under way" in reply.trouble
            assert (reply.blocks, reply.bad, reply.failed) == (0, 0, 0)
            assert reply.cursor, "it is not over"
            assert ns.get(keys) == [block(i, BLOCK) for i in range(20)], "memory serves"
            hold.unlink()
            rest = eventually(lambda: not (found := admin.verify(client, reply.cursor, 1024)).trouble and found)
            assert (rest.blocks, rest.cursor) == (20, 0), "nothing was passed over"
            assert client.stats()["ssd"]["trouble"] == ""
        assert service.stop() == 0
    finally:
        hold.unlink(missing_ok=True)
        service.kill()


# -- start

NAMESPACE = NamespaceRow(1, "default", bytes(range(32)), SLOT, 0, "records")
IN_A_SEGMENT = 16384


def write_records(path: Path, records: int) -> None:
    """A directory as a daemon leaves it, with holes for blocks: nobody reads them here."""
    path.mkdir(mode=0o700)
    catalogue = Catalogue(path / CATALOGUE_NAME, FileLayer())
    try:
        segments = -(-records // IN_A_SEGMENT)
        for number in range(1, segments + 1):
            with (path / segment_name(number)).open("wb") as file:
                file.truncate(IN_A_SEGMENT * SLOT)
            (path / segment_name(number)).chmod(0o600)
        rows = [pack_row(SegmentRow(number, IN_A_SEGMENT * SLOT, 0, "")) for number in range(1, segments + 1)]
        catalogue.write(dict([pack_row(NAMESPACE), *rows]), [])
        for at in range(0, records, 10_000):
            batch = dict(
                pack_record(
                    Record(
                        namespace=1,
                        key=struct.pack(">Q", number * 0x9E3779B97F4A7C15 % (1 << 64)) + b"record".rjust(24),
                        segment=1 + number // IN_A_SEGMENT,
                        slot=number % IN_A_SEGMENT,
                        length=SLOT,
                        checksum=number,
                        parent=b"",
                        depth=0,
                        created=1e9,
                        used=1e9 + number,
                        hits=number % 7,
                        until=0.0,
                        sequence=number + 1,
                    )
                )
                for number in range(at, min(at + 10_000, records))
            )
            catalogue.write(batch, [])
    finally:
        catalogue.close()


def test_a_large_catalogue_is_read_while_memory_serves(tmp_path: Path) -> None:
    """Ready at once; records come in turns of the loop that hold up nobody."""
    path = tmp_path / "ssd"
    write_records(path, RECORDS)
    with running(**settings(path, ssd__size="2GiB")) as node:
        assert "the SSD tier is open" not in node.output().partition("ready: serving")[0]
        with Client(node.endpoint) as client:
            ns, keys = put(client, 8)
            before = anonymous_bytes(node.pid)
            states: set[str] = set()

            def is_open() -> bool:
                assert ns.get(keys) == [block(i, BLOCK) for i in range(8)]
                states.add(client.stats()["ssd"]["state"])
                return "open" in states

            eventually(is_open, 60, "all records to be read")
            ssd = client.stats()["ssd"]
            assert "restoring" in states
            assert ssd["blocks"] >= RECORDS
            assert (ssd["counters"]["corrupt"], ssd["trouble"]) == (0, "")
            per_record = (anonymous_bytes(node.pid) - before) / RECORDS
            assert per_record < 600, "bytes a record"
            print(f"{per_record:.0f} bytes a record; {os.cpu_count()} cores")
