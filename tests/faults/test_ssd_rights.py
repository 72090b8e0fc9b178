"""A daemon that may not write what is on its SSD: told with what to do, healed by itself, and nothing lost."""

import contextlib
import errno
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore_client import Client
from tests.conftest import eventually
from tests.faults.faulty_disk import FaultyDaemon, faulty
from tests.faults.tiers import HEALED_S, LAYOUTS, durably, keys_of, nothing_held, opened, present, put, ssd, store_of

BLOCK = 64 << 10
SOON_S = 15.0


class Unprivileged(FaultyDaemon):
    """A daemon for which modes of files count, as they do for one that is not root."""

    def command(self) -> list[str]:
        return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *super().command()]


@pytest.fixture
def unprivileged(tmp_path: Path) -> Iterator[Callable[[str], Unprivileged]]:
    started: list[Unprivileged] = []

    def start(layout: str) -> Unprivileged:
        settings = {"host.size": "8MiB", "ssd.size": "128MiB"}
        started.append(Unprivileged(tmp_path, settings | {"ssd.free_floor": "1MiB", "ssd.layout": layout}))
        return started[-1]

    yield start
    for daemon in started:
        daemon.kill()


def told(client: Client, words: str) -> str:
    why: str = eventually(lambda: (found := ssd(client)["trouble"]) and words in found and found, SOON_S, words)
    assert client.health().healthy, "memory serves"
    return why


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_whose_mode_is_wrong_are_told_and_used_again_when_it_is_right(
    unprivileged: Callable[[str], Unprivileged], tmp_path: Path, layout: str
) -> None:
    path, daemon = tmp_path / "ssd", unprivileged(layout)
    with Client(daemon.endpoint, timeout_s=30.0) as client:
        opened(client)
        ns = client.raw_namespace("rights", BLOCK)
        kept = keys_of(ns, "kept", 16)
        durably(ns, kept)
    daemon.stop()
    store = store_of(path)
    for file in store.iterdir():
        file.chmod(0o400)
    daemon.restart()
    with Client(daemon.endpoint, timeout_s=30.0) as client:
        why = told(client, "Permission denied")
        assert f"check owner and mode of {path}" in why
        for file in store.iterdir():
            file.chmod(0o600)
        opened(client)
        assert present(client.raw_namespace("rights", BLOCK), kept) == kept
        assert ssd(client)["counters"]["lost"] == ssd(client)["aside"] == 0
    assert not list(path.glob("aside-*"))
    assert "set aside" not in daemon.output()


@contextlib.contextmanager
def unwritable(store: Path) -> Iterator[None]:
    """All files in it, but for those that RocksDB removes before it is their turn."""
    held: list[Path] = []
    try:
        for file in store.iterdir():
            if file.name != "LOCK":
                done = subprocess.run(["chattr", "+i", file], capture_output=True, text=True, check=False, timeout=60)
                if done.returncode == 0:
                    held.append(file)
                else:
                    assert not file.exists(), done.stderr
        yield
    finally:
        subprocess.run(["chattr", "-i", *held], check=True, timeout=60)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_catalogue_that_may_not_be_written_any_more_under_a_daemon_is_not_set_aside(layout: str) -> None:
    with faulty(ssd__layout=layout, ssd__size="128MiB") as daemon, Client(daemon.endpoint, timeout_s=30.0) as client:
        opened(client)
        ns = client.raw_namespace("rights", BLOCK)
        kept = keys_of(ns, "kept", 16)
        durably(ns, kept)
        with unwritable(store_of(daemon.ssd)):
            assert put(ns, keys_of(ns, "refused", 4), durable=True)
            why = told(client, "(os error 1)")  # a probe has tried to open it again
            assert f"check owner and mode of {daemon.ssd}" in why
            assert present(ns, kept) == kept, "memory serves"
        opened(client)
        after = keys_of(ns, "after", 4)
        eventually(lambda: put(ns, after, durable=True) == [], HEALED_S, "writes to go on")
        assert ssd(client)["counters"]["lost"] == ssd(client)["aside"] == 0
        assert not list(daemon.ssd.glob("aside-*"))
        nothing_held(client)
        daemon.kill()
        daemon.restart()
        with Client(daemon.endpoint, timeout_s=30.0) as again:
            opened(again)
            ns = again.raw_namespace("rights", BLOCK)
            assert present(ns, kept + after) == kept + after


def test_what_could_not_be_set_aside_and_comes_back_is_not_said_to_be_lost() -> None:
    with faulty() as daemon, Client(daemon.endpoint, timeout_s=30.0) as client:
        opened(client)
        ns = client.raw_namespace("back", BLOCK)
        kept = keys_of(ns, "kept", 200)  # more than memory has
        durably(ns, kept)
        daemon.disk(commits={"corrupt": True}, rename={"errno": errno.EACCES})
        put(ns, keys_of(ns, "meets it", 1), durable=True)
        eventually(lambda: daemon.output().count("the SSD tier is open") == 2, SOON_S, "it to be opened again")
        daemon.says("Corruption: of a test's")
        opened(client)
        assert present(ns, kept) == kept
        assert ssd(client)["counters"]["lost"] == 0
        assert "on the SSD only is lost" not in daemon.output()
        assert not list(daemon.ssd.glob("aside-*"))
        daemon.disk()
        assert ssd(client)["aside"] == 0


def test_a_directory_without_the_right_to_write_is_told_as_files_that_cannot_be_made() -> None:
    with faulty() as daemon, Client(daemon.endpoint, timeout_s=30.0) as client:
        opened(client)
        daemon.disk(
            open={"errno": errno.EACCES, "name": "segment-"}, unlink={"errno": errno.ENOENT, "name": "segment-"}
        )
        ns = client.raw_namespace("no file", BLOCK)
        keys = keys_of(ns, "block", 4)
        assert put(ns, keys, durable=True)

        def degraded() -> str:
            return "; ".join(client.stats()["daemon"]["degraded"])

        why = eventually(lambda: "cannot grow" in (found := degraded()) and found, SOON_S, "it to be told")
        assert f"Permission denied; check owner and mode of {daemon.ssd}" in why
        assert "cannot be removed" not in why
        assert "cannot be removed" not in daemon.output()
        daemon.disk()
        eventually(lambda: put(ns, keys, durable=True) == [], HEALED_S, "files to be made")
        eventually(lambda: "the SSD tier can grow again" in daemon.output(), SOON_S, "it to be logged")
        assert degraded() == ""
