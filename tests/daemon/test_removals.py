"""Removals that the SSD cannot be told of: what is written down, for which records, and for how long."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvstore.core.moves import WriteBlock
from kvstore.core.segments import MakeSegment
from kvstore.moving import removals as removals_module
from kvstore.moving.removals import FILE_NAME, Removals, Struck
from kvstore.tiers.removal_file import FILE_BYTES_MAX, RemovalFile
from tests.core.scene import chain
from tests.core.ssd_scene import Node

TENANT, NUMBER = "default", 4
KEYS = chain("removed", 8)
LOOKS = 2000

Scenario = Callable[[Removals, Node], Awaitable[None]]


def on(path: Path, scenario: Scenario, node: Node | None = None) -> None:
    """A scenario on an event loop, over a core whose SSD is in use."""

    async def run() -> None:
        found = node or Node()
        removals = Removals(path, found.moving)
        removals.sequence = lambda: 100
        await scenario(removals, found)

    asyncio.run(run())


def struck(path: Path, node: Node) -> Struck:
    """As the next daemon has it."""
    return Struck(RemovalFile(path / FILE_NAME).read()[0]).of({NUMBER: (TENANT, node.ns.digest)})


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(LOOKS):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come about")


def test_what_was_removed_before_the_records_were_known_is_not_taken_for_what_is_written_later(tmp_path: Path) -> None:
    async def scenario(removals: Removals, node: Node) -> None:
        node.moving.ready = False
        assert removals.last_record() == 0
        assert await removals.note(TENANT, node.ns.digest, KEYS[:1], 0) == ""
        assert struck(tmp_path, node).has(NUMBER, KEYS[0], 1 << 50), "killed now, none is believed"
        await removals.mark(100)
        assert struck(tmp_path, node).has(NUMBER, KEYS[0], 100)
        assert not struck(tmp_path, node).has(NUMBER, KEYS[0], 101)

    on(tmp_path, scenario, Node(restored=False))


def test_a_removal_that_comes_as_the_records_become_known_is_marked_too(tmp_path: Path) -> None:
    async def scenario(removals: Removals, node: Node) -> None:
        node.moving.ready = False
        noted = [asyncio.ensure_future(removals.note(TENANT, node.ns.digest, [key], 0)) for key in KEYS[:1]]
        await asyncio.sleep(0)
        marking = asyncio.ensure_future(removals.mark(100))
        await asyncio.sleep(0)
        noted += [asyncio.ensure_future(removals.note(TENANT, node.ns.digest, [key], 0)) for key in KEYS[1:3]]
        await marking
        node.moving.ready = True  # in the step in which that ended, as the mover does it
        assert await asyncio.gather(*noted) == [""] * 3
        found = struck(tmp_path, node)
        assert all(found.has(NUMBER, key, 100) for key in KEYS[:3])
        assert not any(found.has(NUMBER, key, 101) for key in KEYS[:3])

    on(tmp_path, scenario, Node(restored=False))


def test_the_file_is_bounded_and_the_answer_says_so(tmp_path: Path) -> None:
    async def scenario(removals: Removals, node: Node) -> None:
        keys, written = KEYS * 512, 0
        while not (why := await removals.note(TENANT, node.ns.digest, keys, 7)):
            written += len(keys)
        assert "8 MiB of removals are written down already" in why
        assert written > 250_000
        assert (tmp_path / FILE_NAME).stat().st_size <= FILE_BYTES_MAX
        assert await removals.note(TENANT, node.ns.digest, None, 7) == "", "a small one fits"

    on(tmp_path, scenario)


def test_what_could_not_be_written_takes_no_room_of_the_file(tmp_path: Path) -> None:
    async def scenario(removals: Removals, node: Node) -> None:
        (tmp_path / FILE_NAME).mkdir()
        keys = KEYS * 512
        for _ in range(FILE_BYTES_MAX // (len(keys) * len(keys[0])) + 2):
            assert "cannot be written" in await removals.note(TENANT, node.ns.digest, keys, 7)
        (tmp_path / FILE_NAME).rmdir()
        assert await removals.note(TENANT, node.ns.digest, keys, 7) == ""

    on(tmp_path, scenario)


def test_the_file_goes_when_the_ssd_has_deleted_what_it_speaks_of_and_no_sooner(tmp_path: Path) -> None:
    """Also while other records come and go all the time, as on an SSD that is full."""

    async def scenario(removals: Removals, node: Node) -> None:
        keys, others = chain("a", 2), chain("others", 4)
        node.put([*keys, *others])
        node.run()
        node.moving.remove_from_disk(node.ns, keys)
        assert await removals.note_all(node.moving.writes.forgetting.not_deleted(None, None)) == ""
        node.take()
        removals.step()
        await asyncio.sleep(0.05)
        assert struck(tmp_path, node).has(NUMBER, keys[0], 100), "their records are there"
        assert await removals.note(TENANT, node.ns.digest, KEYS[:1], 100) == ""
        node.moving.remove_from_disk(node.ns, others[:2])
        node.end(0)
        await asyncio.sleep(0.05)
        assert struck(tmp_path, node).has(NUMBER, KEYS[0], 100), "it was written down meanwhile"
        node.take()
        removals.step()
        node.moving.remove_from_disk(node.ns, others[2:])
        node.end(0)
        assert not node.moving.writes.forgets_nothing
        await until(lambda: not (tmp_path / FILE_NAME).exists())
        assert await removals.note(TENANT, node.ns.digest, KEYS[1:2], 100) == ""
        found = struck(tmp_path, node)
        assert found.has(NUMBER, KEYS[1], 100)
        assert not found.has(NUMBER, keys[0], 1)

    on(tmp_path, scenario)


def test_the_end_of_the_daemon_waits_for_deletions(tmp_path: Path) -> None:
    async def scenario(removals: Removals, node: Node) -> None:
        keys = chain("a", 2)
        node.put(keys)
        node.run()
        node.moving.remove_from_disk(node.ns, keys)

        def pump() -> None:
            node.run()

        await removals.close(pump)
        assert not node.disk.records
        assert not (tmp_path / FILE_NAME).exists()

    on(tmp_path, scenario)


def test_the_end_of_the_daemon_writes_down_what_the_ssd_does_not_delete(tmp_path: Path) -> None:
    """A block that was removed while it was written, too: its record may come with the last work of the disk."""

    async def scenario(removals: Removals, node: Node) -> None:
        gone, coming = chain("gone", 1), chain("coming", 1)
        node.put(gone)
        node.run()
        node.put(coming)
        node.take()
        if isinstance(node.pending[0], MakeSegment):
            node.end(0)
            node.take()
        assert isinstance(node.pending[0], WriteBlock)
        node.memory.remove(node.ns, [*gone, *coming])
        node.moving.remove_from_disk(node.ns, [*gone, *coming])
        node.moving.link.go_out_of_use("of a test's")
        await removals.close(lambda: None)
        found = struck(tmp_path, node)
        assert found.has(NUMBER, gone[0], 100)
        assert found.has(NUMBER, coming[0], 100)

    on(tmp_path, scenario)


@pytest.mark.parametrize("what", ["directory", "nothing there"])
def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, what: str) -> None:
    path = tmp_path / "state"
    if what == "directory":
        (path / FILE_NAME).mkdir(parents=True)

    async def scenario(removals: Removals, node: Node) -> None:
        why = await removals.note(TENANT, node.ns.digest, KEYS, 7)
        assert str(path / FILE_NAME) in why
        assert "cannot be written" in why
        if what == "directory":
            with pytest.raises(OSError, match="which blocks were removed cannot be read"):
                await removals.known()

    on(path, scenario)


def test_a_file_that_cannot_be_deleted_is_tried_and_told_of_now_and_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was with every turn of the loop: ten lines a second, for good."""

    async def scenario(removals: Removals, node: Node) -> None:
        assert await removals.note(TENANT, node.ns.digest, KEYS, 7) == ""
        (tmp_path / FILE_NAME).unlink()
        (tmp_path / FILE_NAME).mkdir()
        for _ in range(50):
            removals.step()
            await asyncio.sleep(0.005)

    on(tmp_path, scenario)
    assert [record.getMessage().count("cannot be deleted") for record in caplog.records].count(1) == 1


def test_a_place_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SSD waited for it without an end, and nothing said so."""
    monkeypatch.setattr(removals_module, "MARK_S", 0.1)
    os.mkfifo(tmp_path / FILE_NAME)

    async def scenario(removals: Removals, node: Node) -> None:
        with pytest.raises(OSError, match="no answer within"):
            await removals.known()
        os.close(os.open(tmp_path / FILE_NAME, os.O_WRONLY))  # its thread goes on

    on(tmp_path, scenario)
