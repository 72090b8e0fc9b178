"""The workers: every job is answered once, and what is acknowledged is on the disk."""

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.tiers.ssd import tier as module
from kvstore.tiers.ssd.catalogue import Use
from kvstore.tiers.ssd.format import NamespaceRow, Record, SegmentRow, pack_record, record_key
from kvstore.tiers.ssd.jobs import (
    Describe,
    Described,
    Drop,
    Dropped,
    Forget,
    Forgotten,
    Job,
    Made,
    Make,
    Probe,
    Probed,
    Read,
    Touch,
    Touched,
    Write,
    Wrote,
)
from kvstore.tiers.ssd.tier import CLOSING, SsdTier
from tests.tiers.ssd.rig import (
    BLOCK_BYTES,
    SEGMENT_BYTES,
    SLOT_BYTES,
    SLOTS,
    FaultLayer,
    Rig,
    block_of,
    fill,
    key_of,
    record_of,
    until,
)

OpenRig = Callable[..., Rig]


class Gate:
    """Holds whoever comes through until it is opened."""

    def __init__(self) -> None:
        self.came, self._open = 0, threading.Event()

    def __call__(self) -> None:
        self.came += 1
        assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()


def record(rig: Rig, number: int) -> Record:
    return rig.records()[key_of(number)]


def test_blocks_come_back_byte_exact_also_after_a_restart(tmp_path: Path, layout: str) -> None:
    rig = Rig(tmp_path / "ssd", layout=layout)
    for slot in range(SLOTS):
        rig.tier.submit(rig.write(100 + slot, slot))
    answers = [rig.answer() for _ in range(SLOTS)]
    assert sorted(answer.number for answer in answers) == list(range(100, 100 + SLOTS))
    assert {answer.error for answer in answers} == {""}
    checksums = {answer.number: answer.checksum for answer in answers}
    found = rig.records()
    assert {r.sequence: r.checksum for r in found.values()} == checksums
    packed = {answer.number: answer.packed for answer in answers}
    assert found[key_of(103)] == record_of(103, 3, checksum=checksums[103], packed=packed[103])
    assert all(rig.good(r) for r in found.values())
    rig = rig.again()
    assert rig.records() == found
    assert all(rig.good(r) for r in found.values())
    rig.close()


def test_a_slot_taken_over_is_the_new_blocks_and_the_old_one_is_gone(each_rig: Rig) -> None:
    rig = each_rig
    assert rig.ask(rig.write(1, 5)) == ""
    old = record(rig, 1)
    assert rig.ask(rig.write(2, 5, replaces=1)) == ""
    assert set(rig.records()) == {key_of(2)}
    assert rig.good(record(rig, 2))
    assert rig.ask(rig.read(old)) == "mismatch"


def test_a_block_that_moved_keeps_its_record_when_its_old_slot_is_taken(each_rig: Rig) -> None:
    rig = each_rig
    assert rig.ask(rig.write(1, 5)) == ""
    assert rig.ask(rig.write(1, 6)) == ""
    assert rig.ask(rig.write(2, 5, replaces=1)) == ""
    assert record(rig, 1).slot == 6
    assert rig.good(record(rig, 1))
    assert rig.good(record(rig, 2))


def test_the_record_of_the_former_owner_goes_before_its_payload_is_touched(open_rig: OpenRig) -> None:
    layer = FaultLayer()
    rig = open_rig(layer)
    assert rig.ask(rig.write(1, 5)) == ""
    layer.writing = gate = Gate()
    rig.tier.submit(rig.write(2, 5, replaces=1))
    until(lambda: gate.came == 1, "the writer")
    assert rig.records() == {}
    gate.open()
    assert rig.answer().error == ""


def test_finished_writes_share_one_sync_and_one_commit(open_rig: OpenRig) -> None:
    layer = FaultLayer()
    rig = open_rig(layer)
    layer.syncing = gate = Gate()
    rig.tier.submit(rig.write(0, 0))
    until(lambda: gate.came == 1, "the first commit")
    for number in range(1, 10):
        rig.tier.submit(rig.write(number, number))
    until(lambda: rig.tier._commits.qsize() == 9, "nine finished writes")
    syncs = len(layer.synced)
    gate.open()
    for _ in range(10):
        assert rig.answer().error == ""
    assert rig.batches[-2:] == [1, 9]
    assert len(layer.synced) == syncs + 2


def test_a_commit_waits_for_writes_under_way_but_not_for_one_that_hangs(
    open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = FaultLayer()
    rig = open_rig(layer)
    early, gate = Gate(), Gate()
    gates = iter([early, gate])
    layer.writing = lambda: next(gates)()
    monkeypatch.setattr(module, "GATHER_S", 30.0)
    rig.tier.submit(rig.write(1, 1))
    until(lambda: early.came == 1, "the first writer")
    rig.tier.submit(rig.write(2, 2))
    until(lambda: gate.came == 1, "the second writer")
    early.open()
    until(lambda: rig.tier._unwritten == 1, "the committer to have the first write")
    assert rig.outcomes.empty()
    gate.open()
    assert {rig.answer().number, rig.answer().number} == {1, 2}
    assert rig.batches[-1] == 2
    monkeypatch.setattr(module, "GATHER_S", 0.01)
    early, gate = Gate(), Gate()
    gates = iter([early, gate])
    rig.tier.submit(rig.write(3, 3))
    until(lambda: early.came == 1, "the first writer")
    rig.tier.submit(rig.write(4, 4))
    until(lambda: gate.came == 1, "the second writer")
    early.open()
    answer = rig.answer()
    assert answer.error == ""
    gate.open()
    assert {answer.number, rig.answer().number} == {3, 4}


def test_a_commit_takes_no_more_than_its_limit(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP_MAX", 4)
    layer = FaultLayer()
    rig = open_rig(layer)
    layer.syncing = gate = Gate()
    rig.tier.submit(rig.write(0, 0))
    until(lambda: gate.came == 1, "the first commit")
    for number in range(1, 10):
        rig.tier.submit(rig.write(number, number))
    until(lambda: rig.tier._commits.qsize() == 9, "nine finished writes")
    gate.open()
    for _ in range(10):
        assert rig.answer().error == ""
    assert rig.batches[-4:] == [1, 4, 4, 1]


def test_reads_do_not_wait_behind_writes(open_rig: OpenRig) -> None:
    layer = FaultLayer()
    rig = open_rig(layer)
    assert rig.ask(rig.write(1, 1)) == ""
    there = record(rig, 1)
    layer.writing = gate = Gate()
    for number in range(2, 12):
        rig.tier.submit(rig.write(number, number))
    until(lambda: gate.came == 2, "both writers")
    assert rig.good(there)
    gate.open()
    for _ in range(10):
        assert rig.answer().error == ""


def test_a_file_is_made_before_what_waits_to_be_written(open_rig: OpenRig) -> None:
    """Behind thirty writes, all that had no room in the files there are waited for them."""
    layer = FaultLayer()
    rig = open_rig(layer)
    gate, made_at = Gate(), list[int]()
    layer.writing = gate
    for number in range(1, 11):
        rig.tier.submit(rig.write(number, number))
    until(lambda: gate.came == 2, "both writers")
    make = rig.extents.make

    def note(segment: int, size_bytes: int) -> None:
        made_at.append(gate.came)
        make(segment, size_bytes)

    rig.extents.make = note  # type: ignore[method-assign]
    rig.tier.submit(Make(2, SEGMENT_BYTES))
    gate.open()
    for _ in range(11):
        assert rig.answer().error == ""
    (came,) = made_at
    assert came < 10, "all were written first"


def test_two_swapped_records_are_two_mismatches(each_rig: Rig) -> None:
    rig = each_rig
    for number in (1, 2):
        assert rig.ask(rig.write(number, number)) == ""
    one, two = record(rig, 1), record(rig, 2)
    swapped = [
        one._replace(slot=two.slot, checksum=two.checksum, sequence=3),
        two._replace(slot=one.slot, checksum=one.checksum, sequence=4),
    ]
    rig.catalogue.write(dict(map(pack_record, swapped)))
    assert [rig.ask(rig.read(record(rig, number))) for number in (1, 2)] == ["mismatch", "mismatch"]


def test_two_swapped_payloads_are_two_mismatches(each_rig: Rig) -> None:
    rig = each_rig
    for number in (1, 2):
        assert rig.ask(rig.write(number, number)) == ""
    rig.extents.read(1, 1 * SLOT_BYTES, rig.view(1))
    rig.extents.read(1, 2 * SLOT_BYTES, rig.view(2))
    rig.extents.write(1, 1 * SLOT_BYTES, rig.view(2))
    rig.extents.write(1, 2 * SLOT_BYTES, rig.view(1))
    assert [rig.ask(rig.read(record(rig, number))) for number in (1, 2)] == ["mismatch", "mismatch"]


def test_one_changed_bit_is_a_mismatch_and_the_rest_of_the_slot_is_nobodys(each_rig: Rig) -> None:
    rig = each_rig
    assert rig.ask(rig.write(1, 1)) == ""
    for at, outcome in ((SLOT_BYTES - 1, "ok"), (BLOCK_BYTES - 1, "mismatch")):
        rig.extents.read(1, SLOT_BYTES, rig.view(1))
        rig.view(1)[at] ^= 1
        rig.extents.write(1, SLOT_BYTES, rig.view(1))
        assert rig.ask(rig.read(record(rig, 1))) == outcome


def test_a_truncated_segment_is_an_error_for_what_is_gone_and_for_nothing_else(rig: Rig) -> None:
    for number in (1, 9):
        assert rig.ask(rig.write(number, number)) == ""
    os.truncate(rig.path / "segment-00000001.kv", 4 * SLOT_BYTES)
    assert rig.good(record(rig, 1))
    assert "segment-00000001.kv: the file ends before" in rig.ask(rig.read(record(rig, 9)))


def test_errors_of_the_disk_are_outcomes_and_pass(open_rig: OpenRig) -> None:
    layer = FaultLayer()
    rig = open_rig(layer)
    assert rig.ask(rig.write(1, 1)) == ""
    there = record(rig, 1)
    layer.read_error = errno.EIO
    assert rig.ask(rig.read(there)).endswith("Input/output error")
    layer.write_error = errno.ENOSPC
    assert rig.ask(rig.write(2, 2)).endswith("No space left on device")
    assert "No space left on device" in rig.ask(Probe(1))
    layer.write_error, layer.sync_error = 0, errno.EIO
    assert rig.ask(rig.write(3, 3)) == "syncing segment-00000001.kv: Input/output error"
    layer.sync_error = layer.read_error = 0
    layer.allocate_error = errno.ENOSPC
    assert rig.ask(Make(2, SEGMENT_BYTES)).endswith("No space left on device")
    layer.allocate_error = 0
    assert set(rig.records()) == {key_of(1)}
    assert rig.ask(Probe(2)) == ""
    assert rig.ask(rig.write(2, 2)) == ""
    assert rig.ask(Make(2, SEGMENT_BYTES)) == ""
    assert all(rig.good(r) for r in rig.records().values())


def test_a_segment_that_cannot_be_synced_takes_no_other_with_it(open_rig: OpenRig) -> None:
    layer = FaultLayer()
    rig = open_rig(layer)
    assert rig.ask(Make(2, SEGMENT_BYTES, SLOT_BYTES, "tenant")) == ""
    layer.syncing = first = Gate()
    rig.tier.submit(rig.write(0, 0))
    until(lambda: first.came == 1, "the first commit")
    for number, segment in ((1, 1), (2, 2)):
        rig.tier.submit(rig.write(number, number, segment=segment))
    until(lambda: rig.tier._commits.qsize() == 2, "two finished writes")
    failing = iter([errno.EIO, 0])

    def syncing() -> None:
        """Segment 1 comes first."""
        layer.sync_error = next(failing)

    layer.syncing = syncing
    first.open()
    errors = {answer.number: answer.error for answer in (rig.answer() for _ in range(3))}
    assert errors == {0: "", 1: "syncing segment-00000001.kv: Input/output error", 2: ""}
    assert set(rig.records()) == {key_of(0), key_of(2)}


def test_a_full_disk_under_the_catalogue_is_an_error_and_a_probe_heals_it(
    mount: Callable[..., Path], open_rig: OpenRig, layout: str
) -> None:
    disk = mount("disk", size_bytes=64 << 20)
    rig = open_rig(path=disk, layout=layout)
    assert rig.ask(rig.write(0, 0)) == ""
    filler = fill(disk)
    row = NamespaceRow(1, "t", bytes(32), 1, 1, "x" * 100_000)
    errors = (rig.ask(Describe(n, (row._replace(number=n),))) for n in range(1000))
    assert "No space left on device" in next(error for error in errors if error)
    assert rig.ask(rig.write(1, 1)) != ""
    assert rig.good(record(rig, 0))
    assert "No space left on device" in rig.ask(Probe(1))
    filler.unlink()
    assert rig.ask(Probe(2)) == ""
    assert rig.ask(rig.write(2, 2)) == ""
    assert rig.good(record(rig, 0))
    assert rig.good(record(rig, 2))


def test_rows_uses_and_ends_of_records_are_written(each_rig: Rig) -> None:
    rig = each_rig
    for number in (1, 2):
        assert rig.ask(rig.write(number, number)) == ""
    rows = (NamespaceRow(1, "t", b"d" * 32, BLOCK_BYTES, 16, "model"), SegmentRow(1, SEGMENT_BYTES, 4096, "other"))
    jobs: list[tuple[Job, object]] = [
        (Describe(7, rows), Described(7)),
        (Touch(8, (Use(record_key(1, key_of(1)), 2000.0, 3),)), Touched(8)),
        (Forget(9, (record_key(1, key_of(2)),)), Forgotten(9)),
        (Probe(10), Probed(10)),
        (Make(2, SEGMENT_BYTES), Made(2)),
        (Drop(2), Dropped(2)),
    ]
    for job, answer in jobs:
        rig.tier.submit(job)
        assert rig.answer() == answer
    assert (rig.catalogue.namespaces(), rig.catalogue.segments()) == ([rows[0]], [rows[1]])
    (left,) = rig.records().values()
    assert (left.key, left.used, left.hits) == (key_of(1), 2000.0, 3)
    assert rig.extents.existing() == {1: SEGMENT_BYTES}


def test_a_segment_is_known_to_the_catalogue_exactly_while_it_has_a_file(open_rig: OpenRig) -> None:
    rig = open_rig()
    rig.catalogue.close()
    assert rig.ask(Make(2, SEGMENT_BYTES)) == "the catalogue is closed"
    assert rig.ask(Drop(1)) == "the catalogue is closed"
    assert rig.extents.existing() == {1: SEGMENT_BYTES}
    assert rig.ask(rig.write(1, 1)) == "the catalogue is closed"
    # The payload of a taken slot stays as it is where its record cannot be taken away.
    before = (rig.path / "segment-00000001.kv").read_bytes()
    assert rig.ask(rig.write(2, 1, replaces=1)) == "the catalogue is closed"
    assert (rig.path / "segment-00000001.kv").read_bytes() == before


def test_what_is_done_later_in_one_commit_counts(open_rig: OpenRig) -> None:
    layer = FaultLayer()
    rig = open_rig(layer)
    layer.syncing = gate = Gate()
    rig.tier.submit(rig.write(0, 0))
    until(lambda: gate.came == 1, "the first commit")
    rig.tier.submit(rig.write(1, 1))
    until(lambda: rig.tier._commits.qsize() == 1, "a finished write")
    rig.tier.submit(Forget(2, (record_key(1, key_of(1)), record_key(1, key_of(0)))))
    rig.tier.submit(rig.write(0, 3))
    until(lambda: rig.tier._commits.qsize() == 3, "all in one commit")
    gate.open()
    for _ in range(4):
        assert rig.answer().error == ""
    assert {key: found.slot for key, found in rig.records().items()} == {key_of(0): 3}


def test_a_bug_in_a_worker_is_an_outcome_and_the_thread_lives(each_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As the bindings of Rust raise it."""

    def broken(*_: object) -> None:
        raise Panic("made to fail")

    rig = each_rig
    assert rig.ask(rig.write(1, 1)) == ""
    there = record(rig, 1)
    with monkeypatch.context() as patched:
        patched.setattr(rig.extents, "read", broken)
        patched.setattr(rig.extents, "write", broken)
        patched.setattr(rig.catalogue, "write", broken)
        for _ in range(5):
            assert rig.ask(rig.read(there)) == "made to fail"
            assert rig.ask(rig.write(2, 2)) == "made to fail"
            assert rig.ask(Forget(3, (record_key(1, key_of(9)),))) == "made to fail"
    assert rig.good(there)
    assert rig.ask(rig.write(2, 2)) == ""


def test_more_jobs_than_the_limit_are_refused_at_once(open_rig: OpenRig, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FaultLayer()
    rig = open_rig(layer, writers=1)
    monkeypatch.setattr(module, "JOBS_MAX", 3)
    layer.writing = gate = Gate()
    for number in range(5):
        rig.tier.submit(rig.write(number, number))
    for number in (3, 4):
        assert rig.answer() == Wrote(number, 0, "3 jobs wait for the SSD")
    assert rig.tier.pending == 3
    gate.open()
    assert sorted(rig.answer().number for _ in range(3)) == [0, 1, 2]
    assert rig.ask(rig.write(3, 3)) == ""
    assert rig.tier.pending == 0


def test_close_finishes_what_is_under_way_and_answers_the_rest(open_rig: OpenRig) -> None:
    layer, before = FaultLayer(), set(threading.enumerate())
    rig = open_rig(layer, writers=2)
    layer.writing = gate = Gate()
    for number in range(6):
        rig.tier.submit(rig.write(number, number))
    until(lambda: gate.came == 2, "both writers")
    closed: list[object] = []
    closing = threading.Thread(target=lambda: closed.append(rig.tier.close(30)))
    closing.start()
    refused = [rig.answer() for _ in range(4)]
    assert refused == [Wrote(number, 0, CLOSING) for number in (2, 3, 4, 5)]
    rig.tier.submit(rig.read(record_of(0, 0)))
    assert rig.answer().outcome == CLOSING
    gate.open()
    done = [rig.answer() for _ in range(2)]
    assert {answer.number: answer.error for answer in done} == {0: "", 1: ""}
    closing.join(30)
    assert closed == [([], [])]
    assert set(rig.records()) == {key_of(0), key_of(1)}
    assert rig.tier.close(1) == ([], [])
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert not any(name.startswith("ssd-") for name in names)


def test_close_names_what_a_hanging_disk_keeps(open_rig: OpenRig) -> None:
    layer = FaultLayer()
    rig = open_rig(layer)
    layer.writing = gate = Gate()
    job = rig.write(1, 1)
    rig.tier.submit(job)
    until(lambda: gate.came == 1, "the writer")
    left = rig.tier.close(0.05)
    assert left == ([job], [])
    assert rig.outcomes.empty()
    gate.open()
    assert rig.answer().error == ""
    assert rig.tier.close(30) == ([], [])


def test_outcomes_that_nobody_takes_are_kept(open_rig: OpenRig) -> None:
    rig = open_rig()

    def closed(_: object) -> None:
        raise RuntimeError("Event loop is closed")

    tier = SsdTier(rig.extents, rig.catalogue, closed)
    tier.submit(Forget(1, ()))
    tier.submit(Probe(2))
    left = tier.close(30)
    assert left.jobs == []
    assert sorted(left.outcomes, key=str) == [Forgotten(1), Probed(2)]


def test_no_view_of_the_slab_is_held_between_two_jobs(each_rig: Rig) -> None:
    """A view keeps its segment mapped: a dropped one's addresses would stay for as long as nothing is read."""
    rig = each_rig
    memory = mmap.mmap(-1, SLOT_BYTES)
    view = memoryview(memory)
    view[:BLOCK_BYTES] = block_of(key_of(1))
    assert rig.ask(Write(1, record_of(1, 1), view, SLOT_BYTES)) == ""
    there = record(rig, 1)
    assert rig.ask(Read(2, 1, SLOT_BYTES, view, BLOCK_BYTES, there.key, there.checksum)) == "ok"
    view.release()

    def unmapped() -> bool:
        try:
            memory.close()
        except BufferError:
            return False
        return True

    until(unmapped, "the workers to let go")
