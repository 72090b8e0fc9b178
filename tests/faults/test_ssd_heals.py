"""Each small fault in the SSD's life is told, costs no hit in memory, and is over when its cause is."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.tiers.ssd.catalogue import Catalogue
from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import CATALOGUE_NAME
from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually
from tests.faults.faulty_disk import faulty
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
from tests.nodes import totals

BLOCK = 64 << 10
SOON_S = 20.0
LIMITS = {"movement.SILENT_WRITE_S": 2.5, "life.LEAVE_S": 0.5}


def in_background(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """A call that a test does not wait for, and where its answer will be."""
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    return thread, answers


def told(client: Client, words: str) -> str:
    """The trouble, once it has these words; it is in what is degraded, too."""
    why: str = eventually(lambda: (found := ssd(client)["trouble"]) and words in found and found, SOON_S, words)
    assert any(why in one for one in client.stats()["daemon"]["degraded"])
    assert client.health().healthy, "memory serves"
    return why


@pytest.mark.parametrize(("call", "words"), [("write", "a write has been"), ("sync", "a sync has been")])
def test_a_disk_that_takes_no_writes_is_told_answers_who_waits_and_is_used_again(call: str, words: str) -> None:
    with faulty(LIMITS) as daemon, Client(daemon.endpoint, timeout_s=30.0) as client:
        opened(client)
        ns = client.raw_namespace("hangs", BLOCK)
        durably(ns, keys_of(ns, "before", 4))
        keys = keys_of(ns, "hangs", 4)
        daemon.disk(**{call: {"hangs": True}})
        thread, answers = in_background(lambda: put(ns, keys, durable=True))
        told(client, words)
        thread.join(SOON_S)
        assert answers, "who waits for blocks to be durable waits for ever"
        assert answers[0], "what is not on the disk was said to be"
        again = put(ns, keys, durable=True)  # also who comes when it is known
        assert again, "a write under way that may never end was waited for"
        assert present(ns, keys) == keys
        daemon.disk()
        opened(client)
        durably(ns, keys)
        settled(client)
        nothing_held(client)


@pytest.mark.parametrize("layout", ["extents", "rocksdb"])
def test_a_catalogue_that_is_corrupt_while_it_is_used_is_set_aside_and_begun_anew(layout: str) -> None:
    with faulty(ssd__layout=layout, ssd__size="256MiB") as daemon, Client(daemon.endpoint, timeout_s=30.0) as client:
        opened(client)
        ns = client.raw_namespace("corrupt", BLOCK)
        lost, kept = keys_of(ns, "lost", 8), keys_of(ns, "kept", 8)
        durably(ns, lost)
        only_on_ssd(client, ns, lost)
        durably(ns, kept)
        daemon.disk(commits={"corrupt": True})
        put(ns, keys_of(ns, "meets it", 1), durable=True)
        eventually(lambda: ssd(client)["aside"] == 1, HEALED_S, "the directory to be set aside")
        opened(client)
        assert list(daemon.ssd.glob("aside-*/*/CURRENT")), "bytes were deleted"
        assert list(daemon.ssd.glob("aside-*/segment-*.kv")) or layout != "extents", "bytes were deleted"
        assert present(ns, lost) == []
        assert ns.match(lost).blocks == 0
        assert present(ns, kept) == kept
        assert ssd(client)["counters"]["lost"] >= len(lost)
        daemon.says("what was on the SSD only is lost")
        durably(ns, lost)
        settled(client)
        nothing_held(client)
        daemon.disk()
        daemon.kill()
        daemon.restart()
        with Client(daemon.endpoint, timeout_s=30.0) as again:
            opened(again)
            assert present(again.raw_namespace("corrupt", BLOCK), lost) == lost


def test_a_file_that_cannot_be_removed_counts_as_taken_and_is_removed_when_it_can_be() -> None:
    with faulty() as daemon, Client(daemon.endpoint, timeout_s=30.0) as client:
        opened(client)
        ns = client.raw_namespace("left", BLOCK)
        sick = {"errno": errno.EIO, "name": "segment-", "but": 1}
        daemon.disk(unlink=sick, sync_directory={"errno": errno.EIO})
        put(ns, keys_of(ns, "no file", 2), durable=True)

        def left() -> list[Path]:
            return list(daemon.ssd.glob("segment-*.kv"))

        eventually(left, SOON_S, "a file to be left behind")
        eventually(
            lambda: any("cannot be removed" in why for why in client.stats()["daemon"]["degraded"]),
            SOON_S,
            "it to be told",
        )
        stuck = left()
        taken = sum(file.stat().st_blocks * 512 for file in stuck)
        assert taken
        eventually(lambda: ssd(client)["physical_bytes"] >= taken, SOON_S, "it to be counted")
        daemon.disk()
        eventually(lambda: not any(file.exists() for file in stuck), HEALED_S, "it to be removed")
        eventually(lambda: not client.stats()["daemon"]["degraded"], HEALED_S, "nothing to be wrong")
        keys = keys_of(ns, "after", 4)
        durably(ns, keys)
        assert present(ns, keys) == keys


def test_an_error_of_our_own_while_it_is_opened_is_told_with_its_traceback_and_tried_again() -> None:
    with faulty() as daemon:
        with Client(daemon.endpoint, timeout_s=30.0) as client:
            opened(client)
            ns = client.raw_namespace("bug", BLOCK)
            keys = keys_of(ns, "block", 64)
            durably(ns, keys)
            settled(client)
        daemon.kill()
        daemon.disk(names={"bug": True})
        daemon.restart()
        with Client(daemon.endpoint, timeout_s=30.0) as client:
            told(client, "internal error of the daemon: RuntimeError")
            daemon.says("Traceback")
            ns = client.raw_namespace("bug", BLOCK)
            fresh = keys_of(ns, "fresh", 4)
            assert put(ns, fresh) == []
            assert present(ns, fresh) == fresh
            daemon.disk()
            opened(client)
            assert present(ns, keys) == keys
            settled(client)
            nothing_held(client)


def test_a_read_that_hangs_does_not_keep_a_replaced_directory_from_being_used_and_keeps_its_slot() -> None:
    with faulty(LIMITS, host__size="16MiB") as daemon, Client(daemon.endpoint, timeout_s=30.0) as client:
        opened(client)
        ns = client.raw_namespace("left behind", BLOCK)
        keys = keys_of(ns, "block", 2)
        durably(ns, keys)
        only_on_ssd(client, ns, keys)
        settled(client)
        daemon.disk(read={"hangs": True})
        ns.prefetch(keys, deadline_s=30.0)
        told(client, "a read has been under way")
        shutil.rmtree(daemon.ssd)
        eventually(lambda: "its slots wait for it" in daemon.output(), SOON_S, "the reads to be left behind")
        daemon.disk(read={"hangs": "begun"})  # the new directory answers
        eventually(lambda: ssd(client)["state"] == "open", HEALED_S, "the new directory to be open")
        granted = totals(client.stats())["granted"]
        assert granted >= len(keys), "a slot that a read may still fill was given away"
        daemon.disk()
        opened(client)
        eventually(lambda: totals(client.stats())["granted"] <= granted - len(keys), SOON_S, "the slots to be free")
        assert present(ns, keys) == []
        durably(ns, keys)
        settled(client)
        nothing_held(client)


def rows_of_namespaces(path: Path) -> list[str]:
    found = Catalogue(path / CATALOGUE_NAME, FileLayer())
    try:
        return sorted(row.label for row in found.namespaces())
    finally:
        found.close()


def test_namespaces_without_blocks_leave_the_catalogue_at_a_start_and_may_come_back(
    start_daemon: Callable[..., RunningDaemon], tmp_path: Path
) -> None:
    path = tmp_path / "ssd"
    daemon = start_daemon(ssd__path=str(path), ssd__size="128MiB", ssd__free_floor="1MiB", host__size="8MiB")
    with Client(daemon.endpoint, timeout_s=30.0) as client:
        opened(client)
        stays, goes = client.raw_namespace("stays", BLOCK), client.raw_namespace("goes", BLOCK)
        durably(stays, keys_of(stays, "block", 4))
        durably(goes, keys_of(goes, "block", 4))
        goes.remove(keys_of(goes, "block", 4))
        settled(client)
    daemon.stop()
    assert rows_of_namespaces(path) == ["goes", "stays"]
    daemon.restart()
    with Client(daemon.endpoint, timeout_s=30.0) as client:
        goes = client.raw_namespace("goes", BLOCK)  # in use from before it is known that nothing is of it
        opened(client)
        eventually(lambda: "namespaces without blocks are gone" in daemon.output(), SOON_S, "it to be said")
        keys = keys_of(goes, "again", 4)
        durably(goes, keys)
    daemon.kill()
    assert rows_of_namespaces(path) == ["goes", "stays"]
    daemon.restart()
    with Client(daemon.endpoint, timeout_s=30.0) as client:
        opened(client)
        assert present(client.raw_namespace("goes", BLOCK), keys) == keys
        stays = client.raw_namespace("stays", BLOCK)
        assert present(stays, keys_of(stays, "block", 4)) == keys_of(stays, "block", 4)


def test_a_path_whose_parent_is_not_there_is_said_and_used_once_it_is(tmp_path: Path) -> None:
    """Made with its parents it would lie in the file system around the one that is not mounted."""
    parent = tmp_path / "disk"
    with faulty(ssd__path=str(parent / "ssd")) as daemon, Client(daemon.endpoint, timeout_s=30.0) as client:
        told(client, f"{parent} is not there: mount its file system")
        assert not os.path.lexists(parent)
        ns = client.raw_namespace("memory", BLOCK)
        keys = keys_of(ns, "block", 4)
        assert put(ns, keys) == []
        assert present(ns, keys) == keys
        parent.mkdir()
        opened(client)
        durably(ns, keys)
