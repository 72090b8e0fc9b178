"""Memory serves whatever the SSD is: full, broken, gone, read-only; and the tier comes back by itself.

Of either layout where it means something there. What is injected into the calls of the file layer
reaches extents only; in RocksDB a small real file system that fills up, and damage to its files
while the daemon is down, stand in for it.

The field fault: a disk was filled and freed, and writes failed until a restart; an empty CURRENT
kept the daemon from starting.
"""

import contextlib
import errno
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.moving.space import SLACK_BYTES
from kvstore.tiers.ssd.format import EXTENTS, ROCKSDB, pack_record
from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually
from tests.faults.faulty_disk import FaultyDaemon, faulty
from tests.faults.tiers import (
    HEALED_S,
    LAYOUTS,
    catalogue,
    catalogue_of,
    durably,
    keys_of,
    metric,
    nothing_held,
    only_on_ssd,
    opened,
    present,
    put,
    settled,
    ssd,
    store_of,
)

BLOCK, LARGE = 64 << 10, 256 << 10
IMAGE_BYTES = 192 << 20


class Mounted(RunningDaemon):
    """A daemon whose ssd.path is a file system of 192 MiB that no other process sees mounted."""

    def __init__(self, directory: Path, settings: dict[str, str], then: str) -> None:
        self.then = then
        self.image = directory / "disk.img"
        self.mountpoint = directory / "disk"
        self.mountpoint.mkdir()
        with self.image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", self.image], check=True, timeout=30)
        super().__init__(directory, {"ssd.path": str(self.mountpoint / "ssd"), **settings})

    def command(self) -> list[str]:
        mounting = f'mount -o loop "$1" "$2" && {self.then} shift 2 && exec "$@"'
        return ["unshare", "-m", "sh", "-c", mounting, "sh", str(self.image), str(self.mountpoint), *super().command()]

    @property
    def seen(self) -> Path:
        """Its file system, from here."""
        return Path(f"/proc/{self.pid}/root{self.mountpoint}")

    def remount(self, how: str) -> None:
        self._inside("mount", "-o", f"remount,{how}", str(self.mountpoint))

    def _inside(self, *command: str) -> None:
        subprocess.run(["nsenter", "-m", "-t", str(self.pid), *command], check=True, timeout=30)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Whoever writes to its file system hangs, whichever way he does."""
        self._inside("fsfreeze", "-f", str(self.mountpoint))
        try:
            yield
        finally:
            self._inside("fsfreeze", "-u", str(self.mountpoint))


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Mounted]]:
    assert os.getuid() == 0, "only root can mount the small file system that this is about"
    started: list[Mounted] = []

    def start(then: str = "", **settings: str) -> Mounted:
        found = {"host.size": "8MiB", "ssd.size": "160MiB", "ssd.free_floor": "1MiB", "server.http": "127.0.0.1:0"}
        found.update((key.replace("__", "."), value) for key, value in settings.items())
        started.append(Mounted(tmp_path, found, then))
        return started[-1]

    yield start
    for daemon in started:
        daemon.kill()


def fill(path: Path) -> Path:
    """Somebody else takes all that is free."""
    hog = path / "hog"
    with hog.open("wb", buffering=0) as file:
        for piece in (1 << 20, 4 << 10):
            try:
                while True:
                    file.write(bytes(piece))
            except OSError as e:
                assert e.errno == errno.ENOSPC  # noqa: PT017 (it is how writing ends)
    return hog


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_filled_by_others_costs_writes_while_it_is_full_and_nothing_after(
    mounted: Callable[..., Mounted], layout: str
) -> None:
    daemon = mounted(ssd__layout=layout)
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("full", BLOCK)
        kept = keys_of(ns, "kept", 64)
        durably(ns, kept)
        hog = fill(daemon.seen)
        other = client.raw_namespace("met when it was full", BLOCK // 2)
        errors: list[str] = []
        for turn in range(200):  # until segment files or the log of the catalogue find no room
            errors += put(ns, keys_of(ns, f"lost {turn}", 16), durable=True)
            errors += put(other, keys_of(other, f"lost {turn}", 2), durable=True)
            if ssd(client)["trouble"] or ssd(client)["no_file"]:
                break
        assert errors
        assert client.stats()["daemon"]["degraded"]
        assert client.health().healthy, "memory serves"
        fresh = keys_of(ns, "fresh", 16)
        put(ns, fresh)
        assert present(ns, fresh) == fresh
        hog.unlink()
        after = keys_of(other, "after", 16)
        eventually(lambda: put(other, after, durable=True) == [], HEALED_S, "writes to go on")
        durably(ns, fresh)
        # In the layout "rocksdb", where others left less room than it had: only as many go as come.
        evicted, written = ssd(client)["evicted"], ssd(client)["counters"]["written"]
        assert evicted <= written - len(kept)
    daemon.kill()
    daemon.restart()
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("full", BLOCK)
        assert len(present(ns, kept)) >= len(kept) - evicted
        assert present(ns, fresh) == fresh
        other = client.raw_namespace("met when it was full", BLOCK // 2)
        # Found here: the row of a namespace that could not be written was never written again.
        assert present(other, after) == after
        settled(client)
        nothing_held(client)


FULL = '{ dd if=/dev/zero of="$2/hog" bs=1M; dd if=/dev/zero of="$2/rest" bs=4k; } 2>/dev/null;'
UNLOADED = 'rm -f "$2/ssd/ballast" && '


@pytest.mark.parametrize("before", ["with ballast", "without ballast"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_system_that_is_full_at_the_start_costs_nothing_that_was_there(
    mounted: Callable[..., Mounted], layout: str, before: str
) -> None:
    """With ballast it even opens while it is full, so that what is there is served, and could be made less."""
    daemon = mounted(ssd__layout=layout)
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("full", BLOCK)
        kept = keys_of(ns, "kept", 200)
        durably(ns, kept)
        eventually((daemon.seen / "ssd" / "ballast").exists, 10, "room that can be given back")
    daemon.kill()
    daemon.then = (UNLOADED if before == "without ballast" else "") + FULL
    daemon.restart()
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        ns = client.raw_namespace("full", BLOCK)
        if before == "with ballast":
            opened(client)
            assert present(ns, kept) == kept
            assert not (daemon.seen / "ssd" / "ballast").exists()
        else:
            eventually(lambda: "No space" in ssd(client)["trouble"], 10, "the reason to be said")
        assert client.health().healthy, "memory serves"
        for name in ("hog", "rest"):
            (daemon.seen / name).unlink()
        opened(client)
        assert present(ns, kept) == kept
        assert not list((daemon.seen / "ssd").glob("aside-*")), "a full disk was taken for a broken catalogue"
        fresh = keys_of(ns, "fresh", 16)
        eventually(lambda: put(ns, fresh, durable=True) == [], HEALED_S, "writes to go on")
        eventually((daemon.seen / "ssd" / "ballast").exists, 10, "room that can be given back, again")
        assert present(ns, fresh) == fresh


def test_a_file_system_smaller_than_ssd_size_is_used_up_to_its_floor_and_blocks_go_for_new_ones(
    mounted: Callable[..., Mounted],
) -> None:
    """Layout rocksdb, whose payload no file bounds: the floor holds all along, and nothing is refused."""
    floor = 24 << 20
    daemon = mounted(ssd__layout=ROCKSDB, ssd__size="512MiB", ssd__free_floor=f"{floor}B")
    with Client(daemon.endpoint, name="engine", timeout_s=20.0) as client:
        opened(client)
        ns = client.raw_namespace("small", LARGE)
        for turn in range(24):  # 240 MiB into 192, of which the floor keeps 24
            keys = keys_of(ns, f"turn {turn}", 40)
            assert put(ns, keys, durable=True, at_once=8) == []
            found = os.statvfs(daemon.seen)
            assert found.f_bavail * found.f_frsize >= floor - SLACK_BYTES
        now = settled(client)
        assert now["evicted"] > 0
        assert (now["trouble"], now["no_file"]) == ("", "")
        assert now["blocks"] * LARGE > 60 << 20
        assert present(ns, keys) == keys
    daemon.kill()
    daemon.restart()
    with Client(daemon.endpoint, name="engine", timeout_s=20.0) as client:
        opened(client)
        ns = client.raw_namespace("small", LARGE)
        assert present(ns, keys) == keys
        assert ssd(client)["blocks"] == now["blocks"]
        durably(ns, keys_of(ns, "after", 40))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_system_that_is_read_only_at_the_start_is_used_when_it_is_not_any_more(
    mounted: Callable[..., Mounted], layout: str
) -> None:
    daemon = mounted(then='mount -o remount,ro "$2" &&', ssd__layout=layout)
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        eventually(lambda: "ead-only" in ssd(client)["trouble"], 10, "the reason to be said")
        ns = client.raw_namespace("ro", BLOCK)
        keys = keys_of(ns, "kept", 16)
        assert put(ns, keys) == []
        assert present(ns, keys) == keys
        assert client.health().healthy
        daemon.remount("rw")
        opened(client)
        durably(ns, keys)
    daemon.kill()
    daemon.then = ""
    daemon.restart()
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        opened(client)
        assert present(client.raw_namespace("ro", BLOCK), keys) == keys


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_system_that_hangs_keeps_nobody_from_memory(mounted: Callable[..., Mounted], layout: str) -> None:
    """RocksDB writes to its log with the GIL held: nothing of the daemon went on until the disk did."""
    daemon = mounted(ssd__layout=layout)
    with Client(daemon.endpoint, name="engine") as client:
        opened(client)
        ns = client.raw_namespace("hangs", BLOCK)
        durably(ns, keys_of(ns, "before", 4))
        with daemon.frozen():
            until, turn = time.monotonic() + 3.0, 0
            while time.monotonic() < until:
                turn, keys = turn + 1, keys_of(ns, f"turn {turn % 40}", 2)
                assert put(ns, keys) == [], "an answer within the 2 s of a client"
                writes = ssd(client)["queues"][-1]
            assert present(ns, keys) == keys
            assert writes["running"] or writes["waiting"], "what the disk does not end"
        eventually(lambda: put(ns, keys, durable=True) == [], HEALED_S, "writes to go on")


def broken_current(path: Path) -> None:
    (store_of(path) / "CURRENT").write_bytes(b"")


def missing_current(path: Path) -> None:
    (store_of(path) / "CURRENT").unlink()


def broken_manifest(path: Path) -> None:
    for manifest in store_of(path).glob("MANIFEST-*"):
        manifest.write_bytes(b"\x00garbage" * 100)


def cut_manifest(path: Path) -> None:
    for manifest in store_of(path).glob("MANIFEST-*"):
        os.truncate(manifest, manifest.stat().st_size // 2)


def broken_tables(path: Path) -> None:
    """Whoever looked whether the catalogue is empty met the corruption, ahead of who could say what it means."""
    for table in store_of(path).glob("*.sst"):
        content = bytearray(table.read_bytes())
        content[:200] = bytes(byte ^ 0x5A for byte in content[:200])
        table.write_bytes(content)


def no_catalogue(path: Path) -> None:
    shutil.rmtree(store_of(path))


HARMS = [
    *(
        (layout, harm)
        for layout in LAYOUTS
        for harm in (broken_current, missing_current, broken_manifest, cut_manifest, broken_tables)
    ),
    (EXTENTS, no_catalogue),
]


@pytest.mark.parametrize(("layout", "harm"), HARMS)
def test_a_catalogue_that_cannot_be_opened_is_set_aside_and_the_start_succeeds(
    start_daemon: Callable[..., RunningDaemon], tmp_path: Path, layout: str, harm: Callable[[Path], None]
) -> None:
    path = tmp_path / "ssd"
    settings = {"ssd__size": "128MiB", "ssd__free_floor": "1MiB", "server__http": "127.0.0.1:0"}
    daemon = start_daemon(ssd__path=str(path), ssd__layout=layout, **settings)
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("aside", BLOCK)
        keys = keys_of(ns, "block", 16)
        durably(ns, keys)
    daemon.stop()
    harm(path)
    daemon.restart()
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("aside", BLOCK)
        eventually(lambda: ssd(client)["aside"] == 1, 10, "what was set aside to be counted")
        found = present(ns, keys)
        assert found == []
        assert client.stats()["daemon"]["degraded"]
        with urllib.request.urlopen(f"{daemon.http_url}/metrics", timeout=10) as reply:
            assert metric(reply.read().decode(), "kvstored_ssd_aside") == 1
        (aside,) = path.glob("aside-*")
        bytes_there = aside.glob("segment-*.kv") if layout == EXTENTS else (aside / "store").glob("*.sst")
        assert list(bytes_there), "bytes were deleted"
        assert (aside / "REASON").read_text().strip()
        durably(ns, keys)
        assert present(ns, keys) == keys


def test_swapped_records_and_cut_files_are_misses_that_are_counted_and_removed() -> None:
    with faulty() as daemon:
        swap_and_cut(daemon)


def swap_and_cut(daemon: FaultyDaemon) -> None:
    path = daemon.ssd
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("swapped", BLOCK)
        keys = keys_of(ns, "block", 48)
        durably(ns, keys)
    daemon.stop()
    records, _ = catalogue(path)
    first, second = sorted(records, key=lambda record: record.sequence)[:2]
    opened_catalogue = catalogue_of(path)
    swapped = [
        first._replace(segment=second.segment, slot=second.slot),
        second._replace(segment=first.segment, slot=first.slot),
    ]
    opened_catalogue.write(dict(map(pack_record, swapped)))
    opened_catalogue.close()
    last = max(records, key=lambda record: (record.segment, record.slot))
    file = path / f"segment-{last.segment:08d}.kv"
    os.truncate(file, last.slot * BLOCK + 4096)
    daemon.restart()
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("swapped", BLOCK)
        bad = {first.key, second.key, last.key}
        for key in (first.key, second.key):
            assert present(ns, [key]) == []
        assert ssd(client)["counters"]["corrupt"] == 2
        assert present(ns, [last.key]) == []
        eventually(
            lambda: present(ns, [key for key in keys if key not in bad]) == [k for k in keys if k not in bad], 30
        )
        eventually(lambda: present(ns, [last.key]) == [] and ns.match([last.key]).blocks == 0, 30, "it to be removed")
        opened(client)
        durably(ns, sorted(bad))
        only_on_ssd(client, ns, sorted(bad))
        assert present(ns, sorted(bad)) == sorted(bad)
        now = settled(client)
        assert now["used_bytes"] == now["blocks"] * BLOCK
        nothing_held(client)


def test_in_rocksdb_swapped_records_and_damaged_blob_files_are_misses_and_removed(
    start_daemon: Callable[..., RunningDaemon], tmp_path: Path
) -> None:
    path = tmp_path / "ssd"
    settings = {"ssd__layout": ROCKSDB, "ssd__size": "128MiB", "ssd__free_floor": "1MiB", "host__size": "8MiB"}
    daemon = start_daemon(ssd__path=str(path), **settings)
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("swapped", BLOCK)
        keys = keys_of(ns, "block", 160)  # 10 MiB, so that there are blob files
        durably(ns, keys)
    daemon.stop()
    records, _ = catalogue(path)
    first, second = sorted(records, key=lambda record: record.sequence)[-2:]
    opened_catalogue = catalogue_of(path)
    swapped = [
        first._replace(segment=second.segment, slot=second.slot),
        second._replace(segment=first.segment, slot=first.slot),
    ]
    opened_catalogue.write(dict(map(pack_record, swapped)))
    opened_catalogue.close()
    damaged = min((path / "store").glob("*.blob"))
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size // 2)
        file.write(os.urandom(256))
    daemon.restart()
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("swapped", BLOCK)
        found = present(ns, keys)
        assert not {first.key, second.key} & set(found)
        assert len(keys) - 4 <= len(found) <= len(keys) - 3, "the two, and the one that lay there"
        bad = [key for key in keys if key not in found]
        eventually(lambda: all(ns.match([key]).blocks == 0 for key in bad), 10, "them to be removed")
        assert ssd(client)["counters"]["corrupt"] == len(bad)
        durably(ns, bad)
        only_on_ssd(client, ns, bad)
        assert present(ns, bad) == bad
        now = settled(client)
        assert now["used_bytes"] == now["blocks"] * BLOCK
        nothing_held(client)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_directory_that_is_deleted_under_the_daemon_is_told_and_nothing_is_promised_by_it(
    start_daemon: Callable[..., RunningDaemon], tmp_path: Path, layout: str
) -> None:
    path = tmp_path / "ssd"
    settings = {"ssd__size": "128MiB", "ssd__free_floor": "1MiB", "host__size": "8MiB"}
    daemon = start_daemon(ssd__path=str(path), ssd__layout=layout, **settings)
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("deleted", BLOCK)
        keys = keys_of(ns, "block", 16)
        durably(ns, keys)
        subprocess.run(["rm", "-rf", path], check=True, timeout=30)  # RocksDB may remove files at the same time
        eventually(lambda: "deleted or replaced" in daemon.output(), 10, "the loss to be noticed")
        opened(client)
        durably(ns, keys)
    daemon.kill()
    daemon.restart()
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        opened(client)
        assert present(client.raw_namespace("deleted", BLOCK), keys) == keys


def test_a_file_system_unmounted_under_the_daemon_is_not_made_up_for_by_the_one_around_it(
    mounted: Callable[..., Mounted],
) -> None:
    daemon = mounted()
    with Client(daemon.endpoint, name="engine", timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("unmounted", BLOCK)
        keys = keys_of(ns, "block", 16)
        durably(ns, keys)
        settled(client)
        inside = ["nsenter", "-m", "-t", str(daemon.pid)]
        subprocess.run([*inside, "umount", "-l", str(daemon.mountpoint)], check=True, timeout=30)
        eventually(lambda: "is not mounted any more" in ssd(client)["trouble"], HEALED_S, "the reason to be said")
        fresh = keys_of(ns, "fresh", 4)
        assert put(ns, fresh) == []
        assert present(ns, fresh) == fresh
        assert list(daemon.mountpoint.iterdir()) == [], "blocks go to the file system around the mount point"

        def unused() -> bool:
            loops = subprocess.run(["losetup", "-j", str(daemon.image)], capture_output=True, check=True, timeout=30)
            return not loops.stdout

        eventually(unused, 30, "nothing of it to be held open any more")
        again = ["mount", "-o", "loop", str(daemon.image), str(daemon.mountpoint)]
        subprocess.run([*inside, *again], check=True, timeout=30)
        opened(client)
        assert present(ns, keys) == keys
        durably(ns, fresh)
        settled(client)
        nothing_held(client)
