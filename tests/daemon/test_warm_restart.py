"""Memory that outlives the daemon (A20): stopped or killed and started again, it serves what it had, byte for byte."""

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers import ledger as layout
from kvstore_client import Client, Hint, Namespace
from tests.conftest import KVSTORED, RunningDaemon, eventually
from tests.nodes import block, running

BLOCK = 16 << 10
SMALL = 4 << 10

Start = Callable[..., RunningDaemon]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory on a tmpfs, for one daemon."""
    with tempfile.TemporaryDirectory(prefix="kvstored-test-", dir="/dev/shm") as base:
        yield Path(base) / "memory"


def put(ns: Namespace, keys: Sequence[bytes]) -> int:
    """How many of these are stored for sure; each says who it is."""
    result = ns.put(keys, [block(key, ns.block_bytes) for key in keys])
    return result.stored + result.existing if result.error is None and not result.rejected else 0


def served(ns: Namespace, keys: Sequence[bytes]) -> list[bytes]:
    """Those of the keys that are there; fails at a wrong byte."""
    out, found = np.empty(ns.block_bytes, np.uint8), []
    for key in keys:
        if ns.get_into([key], out):
            assert out.tobytes() == block(key, ns.block_bytes), f"wrong bytes under {key.hex()[:12]}"
            found.append(key)
    return found


def back(client: Client) -> None:
    eventually(lambda: client.health().reachable, 20, "the client to attach again by itself")


def end(daemon: RunningDaemon, how: str) -> None:
    if how == "killed":
        daemon.kill()
    else:
        assert daemon.stop() == 0


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_ten_thousand_blocks_are_served_again_after_it_was(start_daemon: Start, place: Path, how: str) -> None:
    """10,000 in chains of 100, and not one is missing; the client is the same, and does nothing for it."""
    daemon = start_daemon(host__size="64MiB", host__persist=str(place))
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("warm", SMALL)
        keys = [ns.key(b"%d" % i) for i in range(10_000)]
        for at in range(0, len(keys), 100):
            assert put(ns, keys[at : at + 100]) == 100
        end(daemon, how)
        daemon.restart()
        back(client)
        assert served(ns, keys) == keys
        assert ns.match(keys[:100]).blocks == 100
        assert client.stats()["counters"]["stored"] == 0
        persist = client.stats()["persist"]
        assert (persist["kind"], persist["path"], persist["trouble"]) == ("directory", str(place), "")
        assert (persist["adopted_blocks"], persist["refused_blocks"], persist["cold"]) == (10_000, 0, "")
        assert 0 < persist["adopted_s"] < 20


def test_what_was_acknowledged_under_load_is_there_after_every_kill(start_daemon: Start, place: Path) -> None:
    """Four clients store as fast as they can, and the daemon is killed in the middle, again and again."""
    daemon = start_daemon(host__size="64MiB", host__persist=str(place))
    stop, stored, failed = threading.Event(), [], []

    def store(number: int) -> None:
        try:
            with Client(daemon.endpoint, name=f"writer {number}", timeout_s=10) as client:
                ns = client.raw_namespace("load", SMALL)
                for i in itertools.count():
                    keys = [ns.key(b"%d %d %d" % (number, i, j)) for j in range(1 + i % 7)]
                    if stop.is_set():
                        return
                    if put(ns, keys) == len(keys):
                        stored.extend(keys)
        except Exception as e:
            failed.append(e)
            raise

    def more_than(wanted: int) -> bool:
        return len(stored) > wanted or bool(failed)

    writers = [threading.Thread(target=store, args=(i,)) for i in range(4)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(3):
            wanted = len(stored) + 200
            eventually(partial(more_than, wanted), 30, "blocks to be stored")
            daemon.kill()
            daemon.restart()
            assert "contradicts" not in daemon.output()
    finally:
        stop.set()
        for writer in writers:
            writer.join(30)
    assert not failed
    assert len(stored) < 14_000, "nothing was evicted, so that all of it must be there"
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("load", SMALL)
        assert served(ns, stored) == stored
        for pool in client.stats()["pools"]:
            assert (pool["doomed"], pool["leased"]) == (0, 0)


def test_what_was_known_of_a_block_is_known_again(start_daemon: Start, place: Path) -> None:
    """Which was used last, which is pinned, and whose life ends."""
    daemon = start_daemon(host__size="4MiB", host__persist=str(place), evict__high="1", evict__low="0.99")
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("known", BLOCK)
        used, pinned, old = (
            [ns.key(b"%s %d" % (what, i)) for i in range(n)] for what, n in ((b"u", 8), (b"p", 8), (b"o", 32))
        )
        for key in (*used, *pinned, *old):
            assert put(ns, [key])
        brief = [ns.key(b"brief")]
        assert ns.put(brief, [block(brief[0], BLOCK)], hint=Hint(ttl_s=0.5)).stored == 1
        assert ns.pin(pinned, ttl_s=600) == 8
        daemon.stop()
        daemon.restart()
        back(client)
        assert served(ns, used) == used
        client.stats()  # what was read is told
        daemon.stop()
        daemon.restart()
        back(client)
        eventually(lambda: not ns.match(brief).blocks, 5, "its life to end")
        for i in range(256 - 48 + 16):
            assert put(ns, [ns.key(b"more %d" % i)])
        assert served(ns, pinned) == pinned
        assert served(ns, used) == used, "used later than what came after it"
        assert served(ns, old) == old[-len(served(ns, old)) :]
        assert len(served(ns, old)) <= 16
        assert ns.unpin(pinned) == 8


def test_other_settings_are_a_clean_start_and_the_old_memory_goes(start_daemon: Start, place: Path) -> None:
    daemon = start_daemon(host__size="4MiB", host__persist=str(place))
    with Client(daemon.endpoint) as client:
        assert client.stats()["persist"]["cold"] == "no daemon before this one has left anything"
        ns = client.raw_namespace("size", BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(32)]
        assert put(ns, keys) == 32
        daemon.stop()
        assert sum(path.stat().st_size for path in place.glob("segment-*")) == 4 << 20
        daemon.restart(host__size="8MiB")
        assert "what an earlier daemon left in memory is not used" in daemon.output()
        assert "host.size was 4MiB and is 8MiB now" in daemon.output()
        assert sum(path.stat().st_size for path in place.glob("segment-*")) == 8 << 20
        back(client)
        assert client.stats()["persist"]["cold"] == "host.size was 4MiB and is 8MiB now"
        assert served(ns, keys) == []
        assert put(ns, keys) == 32
        daemon.stop()
        daemon.restart(evict__high="0.8", evict__low="0.5")
        back(client)
        assert served(ns, keys) == keys, "how memory is evicted says nothing of what is in it"


def test_a_ledger_of_another_version_is_a_clean_start(start_daemon: Start, place: Path) -> None:
    daemon = start_daemon(host__size="4MiB", host__persist=str(place))
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("version", BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(32)]
        assert put(ns, keys) == 32
        daemon.stop()
        with (place / "ledger").open("r+b") as ledger:
            ledger.seek(8)
            ledger.write((layout.VERSION + 1).to_bytes(8, "little"))
        daemon.restart()
        assert f"its ledger has version {layout.VERSION + 1}, this release writes {layout.VERSION}" in daemon.output()
        back(client)
        assert served(ns, keys) == []
        assert put(ns, keys) == 32


def test_a_segment_that_is_not_the_one_that_was_written_down_is_left_out(start_daemon: Start, place: Path) -> None:
    """Somebody has put another file in its place: what was in it is a miss, and never that file's bytes."""
    daemon = start_daemon(host__size="4MiB", host__persist=str(place))
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("replaced", BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(64)]
        for key in keys:
            assert put(ns, [key])
        daemon.stop()
        paths = sorted(place.glob("segment-*"))
        for path in paths[::2]:
            shutil.copy(path, place / "copy")
            (place / "copy").rename(path)
        paths[1].unlink()
        daemon.restart()
        back(client)
        assert client.stats()["persist"]["lost_segments"] == len(paths[::2]) + 1
        assert daemon.output().count("memory that an earlier daemon wrote down is not there") == 1
        assert len(served(ns, keys)) < 64
        assert put(ns, keys) == 64
        assert served(ns, keys) == keys
        assert sum(path.stat().st_size for path in place.glob("segment-*")) == 4 << 20
        daemon.kill()
        daemon.restart()
        back(client)
        assert served(ns, keys) == keys
        assert client.stats()["persist"]["lost_segments"] == 0, "it is told of once"


def test_another_block_size_has_all_of_the_memory_after_a_restart(start_daemon: Start, place: Path) -> None:
    """A20's other half: a clean miss, and the bytes of the old blocks are counted and had again."""
    daemon = start_daemon(host__size="4MiB", host__persist=str(place))
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("old", BLOCK)
        old = [ns.key(b"%d" % i) for i in range(200)]
        for key in old:
            assert put(ns, [key])
        daemon.stop()
        daemon.restart()
        back(client)
        (pool,) = client.stats()["pools"]
        assert (pool["block_bytes"], pool["blocks"]) == (BLOCK, 200)
        other = client.raw_namespace("old", 2 * BLOCK)
        new = [other.key(b"new %d" % i) for i in range(110)]
        for key in new:
            assert put(other, [key])
        assert served(other, new) == new
        assert client.stats()["host"]["size_bytes"] == 4 << 20


@pytest.mark.parametrize("mode", [0o1777, 0o755])
def test_a_directory_that_others_use_is_refused_and_left_as_it_is(place: Path, mode: int) -> None:
    """By root it was made 0700, whatever it was: with /dev/shm or /run that ends other programs."""
    shared = place.parent / "shared"
    shared.mkdir()
    shared.chmod(mode)
    (shared / "segment-1").write_bytes(b"somebody's")
    daemon = running(host__persist=str(shared), host__size="4MiB")
    with pytest.raises(AssertionError, match=r"ended with 2:(.|\n)*is not the daemon's alone"), daemon:
        pass
    assert shared.stat().st_mode & 0o7777 == mode
    assert [path.name for path in shared.iterdir()] == ["segment-1"]


def test_a_place_that_cannot_be_used_is_refused_by_name(start_daemon: Start, place: Path, tmp_path: Path) -> None:
    disk = tmp_path / "memory"
    daemon = running(host__persist=str(disk), host__size="4MiB")
    with pytest.raises(AssertionError, match=r"ended with 2:(.|\n)*is not on a tmpfs"), daemon:
        pass
    assert not disk.exists()
    daemon = running(host__persist="shm", host__size="4MiB")
    with pytest.raises(AssertionError, match=r"ended with 2:(.|\n)*nor an absolute path"), daemon:
        pass
    running_one = start_daemon(host__persist=str(place), host__size="4MiB")
    daemon = running(host__persist=str(place), host__size="4MiB")
    with pytest.raises(AssertionError, match=rf"ended with 1:(.|\n)*is used by pid {running_one.pid}"), daemon:
        pass
    assert place.stat().st_mode & 0o777 == 0o700


def test_memory_of_no_more_use_is_let_go(start_daemon: Start, place: Path) -> None:
    """Files that no ledger names (a daemon was killed while it made them) are removed; what is not ours stays."""
    place.mkdir(mode=0o700)
    for name in ("segment-1", "rows-1", "segment-77", "notes"):
        (place / name).write_bytes(bytes(1 << 16))
    daemon = start_daemon(host__size="4MiB", host__persist=str(place))
    assert "it has no ledger" in daemon.output()
    assert not (place / "segment-77").exists()
    assert (place / "notes").read_bytes() == bytes(1 << 16)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts file systems")
def test_a_tmpfs_that_is_too_small_is_said_at_the_start(tmp_path: Path) -> None:
    """In a mount namespace of its own."""
    program = (
        f"mount -t tmpfs -o size=3M tmpfs {tmp_path} && exec {KVSTORED} --set server.socket={tmp_path}/s "
        f"--set server.state_dir={tmp_path}/state --set host.size=4MiB --set host.persist={tmp_path}/memory"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "have no room on the file system of host.persist" in done.stderr
    assert done.returncode != -signal.SIGBUS


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_memory_and_the_ssd_come_back_together(start_daemon: Start, place: Path, tmp_path: Path, how: str) -> None:
    """More than memory holds: what is in both, in one or the other is found where it is, and what is only in memory
    reaches the SSD after all."""
    daemon = start_daemon(
        host__size="4MiB", host__persist=str(place), ssd__path=str(tmp_path / "ssd"), ssd__size="128MiB"
    )
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("both", BLOCK)
        old, new = ([ns.key(b"%s %d" % (what, i)) for i in range(n)] for what, n in ((b"old", 300), (b"new", 150)))
        eventually(lambda: client.stats()["ssd"]["state"] == "open", 20, "the SSD")
        for key in old:
            assert ns.put([key], block(key, BLOCK), durable=True).error is None
        for key in new:
            assert put(ns, [key])
        end(daemon, how)
        daemon.restart()
        back(client)
        assert served(ns, new) == new, "memory serves before the SSD does"
        eventually(lambda: client.stats()["ssd"]["blocks"] == 450, 20, "all that is in memory to be on the SSD as well")
        assert served(ns, old) == old
        assert served(ns, new) == new
        daemon.kill()
        shutil.rmtree(place)
        daemon.restart()
        back(client)
        eventually(lambda: client.stats()["ssd"]["state"] == "open", 20, "the SSD")
        assert served(ns, [*old, *new]) == [*old, *new]
