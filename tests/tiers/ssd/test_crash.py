"""After a crash every acknowledged block is there, byte-exact, and nothing else passes for one."""

import os
import random
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from kvstore.tiers.ssd.format import EXTENTS, record_key
from kvstore.tiers.ssd.jobs import Wrote
from tests.tiers.ssd.rig import SLOT_BYTES, SLOTS, CrashLayer, FaultLayer, Rig, key_of, until

CHECKOUT = Path(__file__).resolve().parents[3]
ROUNDS = 20
LINES_MAX = 60
"""After how many lines a child is killed at the latest."""


def seeded(number: int | None = None) -> random.Random:
    seed = number if number is not None else secrets.randbits(32)
    print(f"seed {seed}")
    return random.Random(seed)


def right_slots(rig: Rig) -> dict[int, int]:
    """Slot -> the block in it, of two that claim one the one written later; all others must not verify."""
    claims: dict[int, list[int]] = {}
    found = rig.records()
    for record in sorted(found.values(), key=lambda record: record.sequence):
        if rig.good(record):
            claims.setdefault(record.slot, []).append(record.sequence)
    assert all(len(numbers) == 1 for numbers in claims.values()), f"two blocks in one slot: {claims}"
    return {slot: numbers[0] for slot, numbers in claims.items()}


def test_what_was_not_synced_and_is_lost_or_torn_costs_no_acknowledged_block(tmp_path: Path) -> None:
    chance = seeded()
    acknowledged: dict[int, int] = {}
    last = 0
    for _ in range(12):
        layer = CrashLayer()
        rig = Rig(tmp_path / "ssd", layer)
        kept = right_slots(rig)
        assert {slot: kept.get(slot) for slot in acknowledged} == acknowledged
        for _ in range(chance.randrange(1, 12)):
            slot, last = chance.randrange(SLOTS), last + 1
            job = rig.write(last, slot, replaces=kept.get(slot))
            if chance.random() < 0.3:
                # A writer has it half done when the power goes: what the slot had is nobody's now.
                if job.replaces is not None:
                    rig.catalogue.unindex(job.replaces, 1, slot)
                rig.extents.write(1, job.offset, job.view)
                acknowledged.pop(slot, None)
                kept.pop(slot, None)
            else:
                assert rig.ask(job) == ""
                acknowledged[slot] = kept[slot] = last
        layer.crash(chance)
        rig.close()


def test_without_the_sync_before_the_record_blocks_would_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: it does where the payload is not synced."""
    layer = CrashLayer()
    rig = Rig(tmp_path / "ssd", layer)
    monkeypatch.setattr(rig.extents, "sync", lambda _: {})
    for number in range(1, 9):
        assert rig.ask(rig.write(number, number)) == ""
    layer.crash(random.Random(1))
    rig.close()
    again = Rig(tmp_path / "ssd")
    assert len(again.records()) == 8
    assert len(right_slots(again)) < 8
    again.close()


def test_a_record_that_came_back_over_a_slot_taken_anew_is_a_mismatch(tmp_path: Path, layout: str) -> None:
    """Its end was not synced: the log may have lost it, and the payload is the next one's, whole and sound."""
    rig = Rig(tmp_path / "ssd", layout=layout)
    assert rig.ask(rig.write(1, 5)) == ""
    old = rig.records()[key_of(1)]
    job = rig.write(2, 5)
    rig.extents.write(1, job.offset, job.view)
    assert rig.ask(rig.read(old)) == "mismatch"
    rig.close()


def test_after_a_power_cut_what_the_disk_has_is_every_acknowledged_block(
    tmp_path: Path, mount: Callable[..., Path], layout: str
) -> None:
    """The image of a mounted file system has what reached the device and nothing that was only cached.

    So the log of the catalogue is cut too: records that were deleted and not synced are back.
    """
    disk = mount("disk", size_bytes=48 << 20)
    rig = Rig(disk, layout=layout)
    for number in range(1, 9):
        assert rig.ask(rig.write(number, number)) == ""
    # Under way when the power goes: one has its former owner's record deleted, and half its payload written.
    job = rig.write(99, 8, replaces=8)
    rig.catalogue.unindex(record_key(1, key_of(8)), 1, 8)
    rig.extents.write(1, job.offset, job.view[: SLOT_BYTES // 3 // 4096 * 4096] if layout == EXTENTS else job.view)
    assert key_of(8) not in rig.records()
    (tmp_path / "cut.img").write_bytes((tmp_path / "disk.img").read_bytes())
    rig.close()
    cut = Rig(mount("cut"), segment=False, layout=layout)
    assert key_of(8) in cut.records(), "the delete had reached the disk: this test shows less than it should"
    # Extents are written over in place; of RocksDB's log the payload was cut with the deletion, and block 8 is whole.
    assert right_slots(cut) == {number: number for number in range(1, 8 if layout == EXTENTS else 9)}
    assert cut.directory.set_aside_now == []
    cut.close()


def test_a_segment_that_was_being_made_or_dropped_leaves_no_half(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "ssd")
    rig.extents.make(2, SLOTS * SLOT_BYTES)
    rig = rig.again()
    assert rig.directory.leftovers == ["segment-00000002.kv"]
    assert set(rig.extents.existing()) == {1}
    rig.close()


def follow(lines: IO[str], slots: dict[int, int], kill_after: int) -> set[int]:
    """Reads what a child says, kills it, and answers the slots with something under way; keeps `slots` as said."""
    what, pid = lines.readline().split()
    assert what == "open"
    begun: set[int] = set()
    for count, line in enumerate(lines):
        if count == kill_after:
            os.kill(int(pid), signal.SIGKILL)
        words = line.split()
        if words[0] == "gone":
            assert int(words[1]) == -signal.SIGKILL, f"the child ended by itself: {line}"
            break
        what, slot, number = words[0], int(words[1]), int(words[2])
        if what == "begin":
            begun.add(slot)
            slots.pop(slot, None)
        else:
            begun.discard(slot)
            if number:
                slots[slot] = number
    return begun


def test_a_process_killed_at_random_moments_loses_no_acknowledged_block(tmp_path: Path, layout: str) -> None:
    chance = seeded()
    path = tmp_path / "ssd"
    slots: dict[int, int] = {}
    command = [sys.executable, "-m", "tests.tiers.ssd.crash_child", str(path), layout]
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for round_number in range(ROUNDS):
            parent.stdin.write(f"{chance.randrange(2**32)}\n")
            parent.stdin.flush()
            begun = follow(parent.stdout, slots, chance.randrange(LINES_MAX))
            rig = Rig(path, layout=layout)
            found = right_slots(rig)
            assert rig.directory.set_aside_now == []
            assert rig.directory.damaged == {}
            rig.close()
            assert {slot: found.get(slot) for slot in slots} == slots, f"round {round_number}"
            # What was under way may have made it, or what was there before may have stayed.
            assert set(found) - set(slots) <= begun, f"round {round_number}"
            slots = found
        parent.stdin.close()


def test_a_crash_between_the_payload_and_its_record_leaves_no_record(tmp_path: Path) -> None:
    layer = FaultLayer()
    rig = Rig(tmp_path / "ssd", layer)
    assert rig.ask(rig.write(1, 1)) == ""
    came, go = threading.Event(), threading.Event()

    def syncing() -> None:
        came.set()
        assert go.wait(30)

    layer.syncing = syncing
    rig.tier.submit(rig.write(2, 2))
    assert came.wait(30)
    until(lambda: rig.tier._commits.empty(), "the committer to have it")
    assert set(rig.records()) == {key_of(1)}
    go.set()
    assert rig.answer() == Wrote(2, rig.records()[key_of(2)].checksum)
    rig.close()
