"""Others fill the tmpfs of host.persist: the daemon serves on, says what would not survive, and heals by itself.

The tmpfs is in a mount namespace of the test's own, which a process keeps open that does nothing else.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from kvstore.tiers.place import Directory
from kvstore.tiers.slab import Slab
from kvstore_client import Client, Namespace, ResourceExhausted
from tests.conftest import RunningDaemon, eventually
from tests.daemon.cli import within
from tests.daemon.test_warm_restart import put, served
from tests.nodes import block

BLOCK = 16 << 10
HEALS_S = 60
PAGE = 4096

pytestmark = pytest.mark.usefixtures("only_root")


@pytest.fixture
def only_root() -> None:
    assert os.geteuid() == 0, "only root mounts file systems"


class Tmpfs:
    """A small one, that can be filled from outside."""

    def __init__(self, path: Path, size: str) -> None:
        self.path = path
        script = 'mount -t tmpfs -o size="$2" tmpfs "$1" && echo there && exec sleep infinity'
        self._keeper = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", script, "sh", str(path), size], stdout=subprocess.PIPE, text=True
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == "there\n"
        self.prefix = ["nsenter", "-t", str(self._keeper.pid), "-m"]
        self.seen = Path(f"/proc/{self._keeper.pid}/root{path}")
        """Where this process finds it."""

    def fill(self, left_bytes: int = 0) -> None:
        """As somebody else might."""
        with (self.seen / "others").open("ab", buffering=0) as file:
            while (free := os.statvfs(self.seen).f_bavail * PAGE - left_bytes) > 0:
                file.write(bytes(min(free, 1 << 20)))

    def clear(self) -> None:
        (self.seen / "others").unlink()

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait()
        assert self._keeper.stdout is not None
        self._keeper.stdout.close()


class InTmpfs(RunningDaemon):
    """A daemon that sees that file system."""

    prefix: list[str]

    def command(self) -> list[str]:
        return [*self.prefix, *super().command()]


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Tmpfs]:
    path = tmp_path / "tmpfs"
    path.mkdir()
    made = Tmpfs(path, "64M")
    yield made
    made.close()


@pytest.fixture
def start(tmpfs: Tmpfs, tmp_path: Path) -> Iterator[Callable[[], RunningDaemon]]:
    started: list[RunningDaemon] = []

    def begin() -> RunningDaemon:
        settings = {"host.size": "8MiB", "host.persist": str(tmpfs.path / "memory"), "server.http": "127.0.0.1:0"}
        kind = type("InThisTmpfs", (InTmpfs,), {"prefix": tmpfs.prefix})
        started.append(kind(tmp_path, settings))
        return started[-1]

    yield begin
    for daemon in started:
        daemon.kill()


def keys_of(ns: Namespace, name: str, count: int) -> list[bytes]:
    return [ns.key(f"{name} {n}".encode()) for n in range(count)]


def put_each(ns: Namespace, keys: list[bytes]) -> None:
    for at in range(0, len(keys), 8):
        assert put(ns, keys[at : at + 8]) == len(keys[at : at + 8])


def metric(daemon: RunningDaemon, name: str) -> float:
    with urlopen(f"{daemon.http_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def stats_of(daemon: RunningDaemon) -> str:
    """As `kvstore-cli stats` shows them."""
    done = within("--endpoint", daemon.endpoint, "stats")
    assert done.exit_code == 0, done.output
    return done.stdout


def well(client: Client) -> bool:
    return not client.stats()["persist"]["trouble"]


def test_what_was_not_written_down_is_told_and_is_written_down_when_there_is_room(
    start: Callable[[], RunningDaemon], tmpfs: Tmpfs
) -> None:
    daemon = start()
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("full", BLOCK)
        early, late, more = keys_of(ns, "early", 24), keys_of(ns, "late", 160), keys_of(ns, "more", 16)
        put_each(ns, early)
        assert well(client)
        tmpfs.fill()
        put_each(ns, late)
        with Client(daemon.endpoint, name="new") as newcomer:
            other = newcomer.raw_namespace("full", BLOCK)
            assert served(other, [*early, *late]) == [*early, *late], "whoever comes is served as ever"
            put_each(other, more)
        stats = client.stats()
        assert stats["persist"]["unwritten_segments"] > 0
        assert "no room" in stats["persist"]["trouble"]
        assert any("would not outlive" in why for why in stats["daemon"]["degraded"])
        assert stats["daemon"]["healthy"]
        with urlopen(f"{daemon.http_url}/readyz", timeout=10) as answer:  # 200: ready all the same
            assert b"degraded: memory would not outlive" in answer.read()
        assert metric(daemon, "kvstored_degraded") == 1
        assert metric(daemon, "kvstored_persist_healthy") == 0
        assert metric(daemon, "kvstored_persist_unwritten_bytes") == stats["persist"]["unwritten_bytes"]
        shown = stats_of(daemon)
        assert "NOT ALL OF IT" in shown
        tmpfs.clear()
        eventually(lambda: well(client), HEALS_S, "what was missing to be written down")
        assert not client.stats()["daemon"]["degraded"]
        assert ns.remove(late[:3]) == 3
        daemon.kill()
        daemon.restart()
        eventually(lambda: client.health().reachable, 20, "the client to attach again")
        assert served(ns, [*early, *late, *more]) == [*early, *late[3:], *more]
        blocks = len(early) + len(late) - 3 + len(more)
        assert (
            client.stats()["persist"]["adopted_blocks"] == metric(daemon, "kvstored_persist_adopted_blocks") == blocks
        )
        assert f"{blocks} blocks in " in stats_of(daemon)


def test_a_daemon_killed_meanwhile_leaves_what_was_written_down_and_nothing_false(
    start: Callable[[], RunningDaemon], tmpfs: Tmpfs
) -> None:
    """Blocks are stored, removed and replaced by others while nothing can be written down; the next daemon starts on
    the full tmpfs."""
    daemon = start()
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("full", BLOCK)
        early, late, last = keys_of(ns, "early", 24), keys_of(ns, "late", 400), keys_of(ns, "last", 100)
        put_each(ns, early)
        tmpfs.fill()
        put_each(ns, late)
        ns.remove(early[:5])
        ns.remove(late[-30:])
        put_each(ns, last)
        there = set(served(ns, [*early, *late, *last]))
        assert client.stats()["persist"]["unwritten_segments"] > 0
    daemon.kill()
    daemon.restart()
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("full", BLOCK)
        found = served(ns, [*early, *late, *last])
        assert set(found) <= there, "what was gone is back"
        assert len(found) == client.stats()["persist"]["adopted_blocks"]
        put_each(ns, last)
        assert served(ns, last) == last
    assert daemon.stop() == 0


def test_holds_that_cannot_be_written_down_are_refused_until_there_is_room(
    start: Callable[[], RunningDaemon], tmpfs: Tmpfs
) -> None:
    """Given and not written down, the next daemon would reuse what a client looks at."""
    daemon = start()
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("holds", BLOCK)
        keys = keys_of(ns, "k", 100)
        put_each(ns, keys)
        tmpfs.fill()
        first = ns.acquire(keys)
        assert len(first.views) == 100
        with pytest.raises(ResourceExhausted, match="no memory left to write down who holds what"):
            ns.acquire(keys)
        stats = client.stats()
        assert "are refused: no room" in stats["persist"]["trouble"]
        assert stats["persist"]["unwritten_segments"] == 0
        assert served(ns, keys) == keys
        tmpfs.clear()
        eventually(lambda: well(client), HEALS_S, "room for more")
        second = ns.acquire(keys)
        daemon.kill()
        daemon.restart()
        eventually(lambda: client.health().reachable, 20, "the client to attach again")
        assert [bytes(view) for view in second.views] == [block(key, BLOCK) for key in keys]
        assert client.stats()["sessions"][-1]["leased_slots"] == 100


def test_a_daemon_that_has_no_namespace_yet_starts_again_on_a_full_tmpfs(
    start: Callable[[], RunningDaemon], tmpfs: Tmpfs
) -> None:
    """To look at a page that was never made would be its end."""
    daemon = start()
    tmpfs.fill()
    for _ in range(2):
        daemon.kill()
        daemon.restart()
    with Client(daemon.endpoint) as client:
        assert client.stats()["persist"]["cold"] == ""
        ns = client.raw_namespace("first", BLOCK)
        put_each(ns, keys_of(ns, "k", 8))


def test_room_for_what_is_to_be_written_down_is_asked_for_at_the_start(
    start: Callable[[], RunningDaemon], tmpfs: Tmpfs
) -> None:
    """The slab alone would fit."""
    tmpfs.fill(left_bytes=(8 << 20) + (1 << 20))
    with pytest.raises(AssertionError, match=r"ended with 1:(.|\n)*have no room on the file system of host.persist"):
        start()
    tmpfs.clear()
    start()


def test_pages_that_somebody_has_mapped_are_not_punched_out_of_a_file() -> None:
    """He would be ended by looking at one, where others have filled the file system since."""
    with tempfile.TemporaryDirectory(prefix="kvstored-test-", dir="/dev/shm") as base:
        path = Path(base) / "memory"
        place = Directory(path)
        slab = Slab(huge_pages=False, place=place)
        slab.add(slab.make(1, 1 << 20))
        mapped = os.dup(slab.descriptor(1, read_only=False))
        try:
            slab.drop(1)
            assert not list(path.glob("segment-*"))
            assert os.fstat(mapped).st_blocks * 512 == 1 << 20
        finally:
            os.close(mapped)
            slab.close()
            place.close()
