"""What is removed stays removed: no kill after the answer brings it back, from either tier.

A removal was answered while the deletion of its records was on its way: a daemon that was killed
then found the blocks again when it started, with bytes that somebody had wanted to be gone.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.moving.removals import FILE_NAME
from kvstore.tiers.removal_file import Entry, RemovalFile, pack
from kvstore_client import Client, Namespace, aio
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import Unavailable
from kvstored.v1.kvstore_pb2_grpc import KVStoreStub
from tests.conftest import eventually
from tests.daemon.cli import within
from tests.faults.faulty_disk import FaultyDaemon, faulty
from tests.faults.tiers import durably, keys_of, opened, present, put
from tests.nodes import block
from tests.server.ssd_program import Program

BLOCK = 64 << 10
HELD = {"sync": {"hangs": True}}
BROKEN = {"any": {"errno": 5}}
NEVER_OPENS = {"names": {"hangs": True}}
HALF_READ = {"records": {"errno": 5}}

QUICK = {"removing.REMOVED_S": 0.2, "removing.CLEARED_S": 0.2, "removals.END_S": 0.2}
"""A removal is written down after that, also as the daemon stops."""

PATIENT = {"removing.REMOVED_S": 15.0, "removing.CLEARED_S": 15.0}


def raw(client: Client, name: str = "removed") -> Namespace:
    return client.raw_namespace(name, BLOCK)


# -- every way to remove; each has a namespace of its name


def sdk(daemon: FaultyDaemon, name: str, keys: list[bytes]) -> None:
    with Client(daemon.endpoint) as client:
        assert raw(client, name).remove(keys) in (0, len(keys))  # 0: it is not known yet what is there


def sdk_over_grpc(daemon: FaultyDaemon, name: str, keys: list[bytes]) -> None:
    with Client(daemon.grpc_endpoint) as client:
        assert raw(client, name).remove(keys) in (0, len(keys))


def aio_sdk(daemon: FaultyDaemon, name: str, keys: list[bytes]) -> None:
    async def remove() -> None:
        async with aio.Client(daemon.endpoint) as client:
            await (await client.raw_namespace(name, BLOCK)).remove(keys)

    asyncio.run(remove())


def clear(daemon: FaultyDaemon, name: str, keys: list[bytes]) -> None:
    with Client(daemon.endpoint) as client:
        raw(client, name).clear()


def clear_over_grpc(daemon: FaultyDaemon, name: str, keys: list[bytes]) -> None:
    with Client(daemon.grpc_endpoint) as client:
        raw(client, name).clear()


def evict_keys(daemon: FaultyDaemon, name: str, keys: list[bytes]) -> None:
    evict(daemon, *[part for key in keys for part in ("--key", key.hex())], "--yes")


def evict_namespace(daemon: FaultyDaemon, name: str, keys: list[bytes]) -> None:
    with Client(daemon.endpoint) as client:
        evict(daemon, "--namespace", raw(client, name).digest.hex(), "--yes")


def evict(daemon: FaultyDaemon, *what: str) -> None:
    done = within("evict", *what, "--endpoint", daemon.endpoint)
    assert done.exit_code == 0, done.output
    assert "may be back" not in done.output, done.output


CLIENTS = [sdk, sdk_over_grpc, aio_sdk, clear, clear_over_grpc]
ALL = [*CLIENTS, evict_keys, evict_namespace]
Ways = Sequence[Callable[[FaultyDaemon, str, list[bytes]], None]]


@pytest.fixture(scope="module")
def quick() -> Iterator[FaultyDaemon]:
    with faulty(QUICK, server__grpc="127.0.0.1:0") as started:
        yield started


@pytest.fixture(scope="module")
def warm() -> Iterator[FaultyDaemon]:
    """Its memory outlives it, too; and a removal has the time that a slow machine takes."""
    with (
        tempfile.TemporaryDirectory(prefix="kvstored-test-", dir="/dev/shm") as place,
        faulty(PATIENT, server__grpc="127.0.0.1:0", host__persist=f"{place}/memory") as started,
    ):
        yield started


@pytest.fixture
def daemon(quick: FaultyDaemon) -> FaultyDaemon:
    return at_rest(quick)


def at_rest(daemon: FaultyDaemon) -> FaultyDaemon:
    """With a disk that is well and nothing to be done, whatever the test before left behind."""
    daemon.disk()
    if daemon.process.poll() is not None:
        daemon.restart()
    with Client(daemon.endpoint) as client:
        opened(client)
    eventually(lambda: not journal(daemon).exists(), what="removals of another test to be done")
    return daemon


def stored(daemon: FaultyDaemon, name: str = "removed", count: int = 4) -> list[bytes]:
    """Blocks that are on the SSD, and in memory."""
    with Client(daemon.endpoint) as client:
        opened(client)
        ns = raw(client, name)
        keys = keys_of(ns, "old", count)
        durably(ns, keys)
    return keys


def stored_for(daemon: FaultyDaemon, ways: Ways) -> dict[str, list[bytes]]:
    return {way.__name__: stored(daemon, way.__name__) for way in ways}


def journal(daemon: FaultyDaemon) -> Path:
    return daemon.directory / "state" / FILE_NAME


def written_down(daemon: FaultyDaemon) -> set[bytes]:
    return {key for entry in RemovalFile(journal(daemon)).read()[0] for key in entry.keys}


def kill(daemon: FaultyDaemon) -> None:
    """And starts another, with a disk that is well."""
    daemon.kill()
    daemon.disk()
    daemon.restart()


def found(daemon: FaultyDaemon, blocks: dict[str, list[bytes]]) -> dict[str, int]:
    """How many of these there are."""
    with Client(daemon.endpoint) as client:
        opened(client)
        return {name: len(present(raw(client, name), keys)) for name, keys in blocks.items()}


@contextlib.contextmanager
def busy(daemon: FaultyDaemon, **disk: Any) -> Iterator[Client]:
    """A write under way, with such a disk: whatever else is to be committed waits behind it."""
    with Client(daemon.endpoint) as client:
        ns = raw(client, "busy")
        first = [ns.key(os.urandom(8))]
        durably(ns, first)
        assert ns.remove(first) == 1, "a slot that is free: a file for one could not be made on such a disk"
        daemon.disk(**disk)
        assert put(ns, [ns.key(os.urandom(8))]) == []
        eventually(lambda: client.stats()["ssd"]["queues"][-1]["running"], what="a write under way")
        yield client


def test_a_removal_is_answered_when_its_records_are_deleted(warm: FaultyDaemon) -> None:
    """The disk is slow: a kill right after the answer met the deletion on its way."""
    blocks = stored_for(at_rest(warm), ALL)
    kept = {"kept": stored(warm, "kept")}
    for way in ALL:
        with busy(warm, sync={"delay_s": 0.15}):
            way(warm, way.__name__, blocks[way.__name__])
    assert not journal(warm).exists(), "a removal was not deleted in time"
    kill(warm)
    assert found(warm, {**blocks, **kept}) == {**dict.fromkeys(blocks, 0), "kept": 4}


def test_a_removal_whose_daemon_is_killed_before_it_is_for_good_is_no_success(warm: FaultyDaemon) -> None:
    """It answered as if all were well, and the blocks were back."""
    keys = stored(at_rest(warm), "cut short")
    with busy(warm, **HELD) as watch, Client(warm.endpoint) as client, ThreadPoolExecutor(1) as threads:
        removing = threads.submit(raw(client, "cut short").remove, keys)
        eventually(lambda: not raw(watch, "cut short").match(keys).blocks, what="them to be gone for readers")
        warm.kill()
        with pytest.raises(Unavailable, match="remove it again"):
            removing.result(60)
    warm.disk()
    warm.restart()


def test_a_removal_that_the_disk_does_not_take_in_time_is_written_down(daemon: FaultyDaemon) -> None:
    blocks = stored_for(daemon, ALL)
    kept = {"kept": stored(daemon, "kept")}
    with busy(daemon, **HELD):
        for way in ALL:
            way(daemon, way.__name__, blocks[way.__name__])
        assert journal(daemon).exists()
    kill(daemon)
    assert found(daemon, {**blocks, **kept}) == {**dict.fromkeys(blocks, 0), "kept": 4}
    eventually(lambda: not journal(daemon).exists(), what="the file of removals to go")


def test_a_removal_while_the_ssd_is_out_of_use_outlives_the_daemon(daemon: FaultyDaemon) -> None:
    blocks = stored_for(daemon, ALL)
    with Client(daemon.endpoint) as client:
        daemon.disk(**BROKEN)
        put(raw(client), keys_of(raw(client), "failing", 1))
        eventually(lambda: client.stats()["ssd"]["trouble"], what="an SSD out of use")
    for way in ALL:
        way(daemon, way.__name__, blocks[way.__name__])
    kill(daemon)
    assert found(daemon, blocks) == dict.fromkeys(blocks, 0)
    assert stored_for(daemon, ALL) == blocks
    kill(daemon)
    assert found(daemon, blocks) == dict.fromkeys(blocks, 4), "what is stored again stays"


def test_a_removal_before_the_records_are_known_outlives_the_daemon(daemon: FaultyDaemon) -> None:
    """While the directory is being opened, and while its records are being read: two lives, each killed."""
    lives: dict[str, dict[str, Any]] = {"opening": NEVER_OPENS, "restoring": HALF_READ}
    names = {(life, way): f"{life} {way.__name__}" for life in lives for way in ALL}
    blocks = {name: stored(daemon, name) for name in names.values()}
    for life, disk in lives.items():
        daemon.kill()
        daemon.disk(**disk)
        daemon.restart()
        for way in ALL:
            way(daemon, names[life, way], blocks[names[life, way]])
    kill(daemon)
    assert found(daemon, blocks) == dict.fromkeys(blocks, 0)


@pytest.mark.parametrize("whose", [(), ("--tenant", "default")])
def test_all_goes_also_what_nobody_can_name_before_the_records_are_known(
    daemon: FaultyDaemon, whose: tuple[str, ...]
) -> None:
    """No client has opened its namespace in that life, which is killed; what is stored again afterwards stays."""
    blocks = {name: stored(daemon, name) for name in ("one", "two")}
    daemon.kill()
    daemon.disk(**NEVER_OPENS)
    daemon.restart()
    done = within("evict", "--all", *whose, "--yes", "--json", "--endpoint", daemon.endpoint)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["ssd_not_known"]
    assert (answer["not_on_disk_yet"], answer["ssd_blocks"]) == ("", 0)
    kill(daemon)
    assert found(daemon, blocks) == dict.fromkeys(blocks, 0)
    assert {name: stored(daemon, name) for name in blocks} == blocks
    kill(daemon)
    assert found(daemon, blocks) == dict.fromkeys(blocks, 4)


def test_all_goes_in_the_life_in_which_the_records_become_known(daemon: FaultyDaemon) -> None:
    blocks = {name: stored(daemon, name) for name in ("one", "two")}
    daemon.kill()
    daemon.disk(**HALF_READ)
    daemon.restart()
    done = within("evict", "--all", "--yes", "--endpoint", daemon.endpoint)
    assert done.exit_code == 0, done.output
    assert "not known yet" in done.output
    assert "written down" in done.output
    daemon.disk()
    assert found(daemon, blocks) == dict.fromkeys(blocks, 0)


def test_what_is_stored_again_in_the_life_in_which_it_was_removed_before_it_was_known_stays(
    daemon: FaultyDaemon,
) -> None:
    keys = stored(daemon)
    daemon.kill()
    daemon.disk(**NEVER_OPENS)
    daemon.restart()
    sdk(daemon, "removed", keys)
    assert journal(daemon).exists()
    daemon.disk()
    assert stored(daemon) == keys
    kill(daemon)
    assert found(daemon, {"removed": keys}) == {"removed": 4}


def test_a_block_stored_again_is_not_struck_by_the_removal_of_the_one_before(daemon: FaultyDaemon) -> None:
    """A start found no record with the numbers that the removal speaks of, and gave them to new ones."""
    keys = stored(daemon)
    with Client(daemon.endpoint) as client:
        removal = pack(Entry("default", raw(client).digest, keys, 1000))
    for wanted in (0, 4):
        daemon.kill()
        RemovalFile(journal(daemon)).append(removal)  # killed again before the file was deleted
        daemon.restart()
        assert found(daemon, {"removed": keys}) == {"removed": wanted}
        assert stored(daemon) == keys


def test_a_removal_that_can_be_kept_nowhere_says_so(daemon: FaultyDaemon, caplog: pytest.LogCaptureFixture) -> None:
    keys = stored(daemon, count=9)
    journal(daemon).mkdir()
    with busy(daemon, **HELD) as client, Program(daemon, "other") as program:
        program.number = program.wire.call(
            open_namespace=pb.OpenNamespaceRequest(digest=raw(client).digest, block_bytes=BLOCK)
        ).open_namespace.namespace_id

        def removed(key: bytes, *, ticket: bool = False) -> pb.RemoveReply:
            request = pb.RemoveRequest(namespace_id=program.number, keys=[key], ticket=ticket)
            return program.wire.call(remove=request).remove

        said = removed(keys[0])  # as a client does that knows of no ticket
        assert said.removed == 1
        assert not said.ticket
        assert "removals cannot be written" in said.not_on_disk_yet
        said = removed(keys[1], ticket=True)
        assert said.removed == 1
        assert said.ticket
        assert not said.not_on_disk_yet
        ended = eventually(lambda: program.ended_ticket(said.ticket), what="the end of a removal")
        assert ended.state == pb.TICKET_FAILED
        assert ended.waiting == 1
        assert "removals cannot be written" in ended.why
        with grpc.insecure_channel(daemon.grpc_endpoint.removeprefix("grpc://")) as channel:
            request = pb.RemoveRequest(namespace_id=program.number, keys=[keys[2]], ticket=True)
            over_grpc = KVStoreStub(channel).Remove(request, timeout=30)
        assert over_grpc.removed == 1
        assert "cannot be written" in over_grpc.not_on_disk_yet
        with caplog.at_level(logging.WARNING, logger="kvstore_client"):
            assert raw(client).remove([keys[3]]) == 1
            assert raw(client).remove([keys[4]]) == 1
        assert [record.message.count("may be back") for record in caplog.records] == [1], "once a client"
        done = within("evict", "--key", keys[5].hex(), "--yes", "--endpoint", daemon.endpoint)
        assert done.exit_code == 0, done.output
        assert "may be back if the daemon is killed now" in done.output, done.output
        done = within("evict", "--key", keys[6].hex(), "--json", "--yes", "--endpoint", daemon.endpoint)
        assert done.exit_code == 0, done.output
        assert "removals cannot be written" in json.loads(done.stdout)["not_on_disk_yet"]
        assert program.match([keys[7]]), "the daemon serves"
    journal(daemon).rmdir()
    daemon.disk()


def test_nobody_waits_for_a_removal_of_somebody_else(daemon: FaultyDaemon) -> None:
    """In one session, and while the disk does not answer: reads, puts and pins go on."""
    keys = stored(daemon)
    with busy(daemon, **HELD) as client:
        ns = raw(client)
        threads = [threading.Thread(target=ns.remove, args=([key],)) for key in keys[:3]]
        for thread in threads:
            thread.start()
        eventually(lambda: not ns.match(keys[:1]).blocks, what="the removal to be seen")
        assert ns.pin(keys[3:], 60) == 1
        assert ns.get(keys[3:]) == [block(keys[3], BLOCK)]
        assert put(ns, keys_of(ns, "meanwhile", 2)) == []
        for thread in threads:
            thread.join()


def test_more_removals_than_a_session_may_wait_for_are_carried_out_and_say_what_they_are_not(
    daemon: FaultyDaemon,
) -> None:
    keys = stored(daemon, count=20)
    with busy(daemon, **HELD) as client, Program(daemon, "other") as program:
        opening = pb.OpenNamespaceRequest(digest=raw(client).digest, block_bytes=BLOCK)
        number = program.wire.call(open_namespace=opening).open_namespace.namespace_id
        for i, key in enumerate(keys):
            program.wire.post(1000 + i, remove=pb.RemoveRequest(namespace_id=number, keys=[key]))
        replies = [program.wire.receive() for _ in keys]
        said = [reply.remove for reply in replies if reply is not None]
        assert [reply.removed for reply in said] == [1] * 20
        assert sum("wait already" in reply.not_on_disk_yet for reply in said) == 4
        assert sum(not reply.not_on_disk_yet for reply in said) == 16
        # Those go on, too, answered or not.
        eventually(lambda: written_down(daemon) >= set(keys), what="all of them to be written down")


def test_what_was_written_while_its_namespace_was_cleared_does_not_come_back() -> None:
    """Those records have later numbers than the last one when the clear began, which was written down for all of it."""
    with faulty({**QUICK, "removing.CLEAR_ROWS": 1}, host__size="32MiB") as daemon, Client(daemon.endpoint) as client:
        opened(client)
        others, ns = (client.raw_namespace(name, 16 << 10) for name in ("others", "cleared"))
        durably(others, keys_of(others, "others", 1000))  # a clear looks at these first, one at a time
        daemon.disk(sync={"delay_s": 0.002})
        keys = keys_of(ns, "queued", 800)
        assert put(ns, keys) == []
        clearing = threading.Thread(target=ns.clear)
        clearing.start()
        eventually(lambda: not ns.match(keys[:1]).blocks, what="the first to be cleared")
        daemon.disk(**HELD)
        clearing.join()
        daemon.kill()
        daemon.disk()
        daemon.restart()
        opened(client)
        assert present(ns, keys) == []


@pytest.mark.parametrize("disk", [HELD, BROKEN, {}], ids=["held", "broken", "well"])
def test_what_is_removed_as_the_daemon_is_told_to_stop_does_not_come_back(
    daemon: FaultyDaemon, disk: dict[str, Any]
) -> None:
    keys = stored(daemon)
    with Client(daemon.endpoint) as client, Program(daemon, "other") as program:
        daemon.disk(**disk)
        ns = raw(client)
        assert put(ns, keys_of(ns, "others", 2)) == []
        opening = pb.OpenNamespaceRequest(digest=ns.digest, block_bytes=BLOCK)
        number = program.wire.call(open_namespace=opening).open_namespace.namespace_id
        program.wire.post(remove=pb.RemoveRequest(namespace_id=number, keys=keys))  # nobody waits for it
        eventually(lambda: not ns.match(keys[:1]).blocks, what="the removal to be seen")
        daemon.process.send_signal(signal.SIGTERM)
    daemon.stop()
    kill(daemon)
    assert found(daemon, {"removed": keys}) == {"removed": 0}


@pytest.mark.parametrize("lost", ["memory", "the SSD"])
def test_a_removed_block_comes_back_from_neither_tier_and_one_stored_again_stays(warm: FaultyDaemon, lost: str) -> None:
    keys = stored(at_rest(warm), lost, count=6)
    gone, again = keys[:3], keys[3:]
    sdk(warm, lost, keys)
    with Client(warm.endpoint) as client:
        durably(raw(client, lost), again)
    warm.kill()
    shutil.rmtree(warm.ssd if lost == "the SSD" else warm.settings["host.persist"])
    warm.restart()
    with Client(warm.endpoint) as client:
        opened(client)
        assert present(raw(client, lost), keys) == again
        assert present(raw(client, lost), gone) == []
