"""What workers say of calls that do not end, of a catalogue that cannot be read, and of files that stay."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from kvstore.core.holds import Tenant
from kvstore.core.store import Store
from kvstore.moving.drops import AT_ONCE, FIRST_S, LONGEST_S, Drops
from kvstore.moving.numbers import NamespaceNumbers
from kvstore.moving.uses import Uses
from kvstore.tiers.ssd.extents import Extents
from kvstore.tiers.ssd.faults import Unreadable
from kvstore.tiers.ssd.files import FileLayer
from kvstore.tiers.ssd.format import record_key
from kvstore.tiers.ssd.jobs import Forget
from tests.conftest import eventually
from tests.core.ssd_scene import Index
from tests.tiers.ssd.rig import SEGMENT_BYTES, FaultLayer, Rig, key_of


class Gate:
    """Holds who comes through until it is opened."""

    def __init__(self) -> None:
        self._came, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._came.set()
        assert self._open.wait(30)

    def reached(self) -> None:
        assert self._came.wait(30)

    def open(self) -> None:
        self._open.set()


class StickyLayer(FileLayer):
    """What is there cannot be removed while it `sticks`."""

    def __init__(self) -> None:
        self.sticks = False
        self.refused = 0

    def unlink(self, path: Path) -> None:
        if self.sticks and path.exists():
            self.refused += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        if self.sticks:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync_directory(path)


def test_how_long_a_call_takes_is_counted_from_when_a_worker_began_it(tmp_path: Path) -> None:
    layer = FaultLayer()
    rig = Rig(tmp_path / "ssd", layer, writers=1)
    layer.writing = gate = Gate()
    assert rig.tier.busy is None
    before = time.monotonic()
    rig.tier.submit(rig.write(0, 0))
    gate.reached()
    rig.tier.submit(rig.write(1, 1))  # waits for the one writer
    since, what = eventually(lambda: rig.tier.busy)
    assert before <= since <= time.monotonic()
    assert what == "a write"
    gate.open()
    layer.writing = None
    assert [rig.answer().error for _ in range(2)] == ["", ""]
    layer.syncing = gate = Gate()
    rig.tier.submit(rig.write(2, 2))
    gate.reached()
    later, what = eventually(lambda: rig.tier.busy)
    assert what == "a sync"
    assert later > since
    gate.open()
    assert rig.answer().error == ""
    eventually(lambda: rig.tier.busy is None, what="nothing to be under way")
    rig.close()


def test_a_catalogue_that_cannot_be_read_is_remembered_whichever_worker_met_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path / "ssd")

    def corrupt(*_: object) -> None:
        raise Unreadable("Corruption: of a test's")

    with monkeypatch.context() as patched:
        patched.setattr(rig.catalogue, "write", corrupt)
        assert "Corruption" in rig.ask(Forget(1, (record_key(1, key_of(1)),)))
    assert rig.tier.unreadable == "Corruption: of a test's"
    rig.close()


def test_files_that_should_be_gone_are_counted_until_they_are(tmp_path: Path) -> None:
    layer = StickyLayer()
    extents = Extents(tmp_path, layer)
    extents.make(1, SEGMENT_BYTES)
    alone = extents.physical_bytes()
    layer.sticks = True
    with pytest.raises(OSError, match="removing segment-00000001"):
        extents.drop(1)
    with pytest.raises(OSError, match="making segment-00000002"):
        extents.make(2, SEGMENT_BYTES)
    assert layer.refused == 2
    assert len(list(tmp_path.glob("segment-*"))) == 2
    assert extents.physical_bytes() == 2 * alone
    layer.sticks = False
    extents.drop(1)
    extents.drop(2)
    assert extents.physical_bytes() == 0
    assert not list(tmp_path.glob("segment-*"))
    extents.close()


def test_a_file_is_tried_again_with_growing_pauses_and_no_more_than_some_at_once() -> None:
    drops, now = Drops(), 100.0
    for number in range(AT_ONCE + 5):
        assert drops.failed(number, "input/output error", now)
    assert f"{AT_ONCE + 5} segment files" in drops.trouble
    assert drops.due(now + FIRST_S - 0.1) == []
    pauses: list[float] = []
    for _ in range(8):
        began = now
        while not (due := drops.due(now)):
            now += 0.5
        assert len(due) == AT_ONCE
        assert drops.due(now + 1000) == [], "asked for twice while it is under way"
        pauses.append(now - began)
        for number in due:
            assert not drops.failed(number, "input/output error", now)
    assert pauses[0] <= FIRST_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_S
    while drops.trouble:
        now += LONGEST_S
        for number in drops.due(now):
            drops.ended(number)


def test_uses_that_could_not_be_written_are_written_with_the_next_ones() -> None:
    store, uses = a_store_of_two()
    tenant = store.tenants["default"]
    uses.note(tenant, list(tenant.rows))
    (touch,) = uses.take(0.0, 0.0, lambda name: record_key(*name))
    assert len(touch.uses) == 2
    uses.touched(touch.number, "input/output error")
    (again,) = uses.take(1.0, 0.0, lambda name: record_key(*name))
    assert {use.db_key for use in again.uses} == {use.db_key for use in touch.uses}
    uses.touched(again.number, "")
    assert not uses.due(1000.0)


def a_store_of_two() -> tuple[Store, Uses]:
    store = Store(1 << 20, Index())
    for job in store.take_jobs():
        store.segments.made(job.segment)
    tenant: Tenant = store.tenant("default")
    session = store.open_session(tenant, "test", 0.0, local=True, read_only=False, pid=1, nonce=1)
    namespace = store.open_namespace(tenant, bytes(range(32)), 4096, "uses")
    keys = [key_of(1), key_of(2)]
    refs = store.reserve(session, namespace, 2, 0.0)
    store.commit(session, namespace, keys, refs, [b"", keys[0]], [0, 1], 0.0)
    return store, Uses(store)


def test_the_row_of_a_namespace_goes_ahead_of_its_records_again_where_it_could_not_be_written() -> None:
    store, _ = a_store_of_two()
    numbers, namespace = NamespaceNumbers(), store.namespaces[0]
    number, row = numbers.write(1, namespace)
    assert row is not None
    assert numbers.write(2, namespace) == (number, None), "it is on its way"
    numbers.described(number, "input/output error")
    assert numbers.wrote(1), "a record whose namespace has no row counts as being there"
    assert numbers.wrote(2)
    again, row = numbers.write(3, namespace)
    assert again == number
    assert row is not None, "its row is never written again"
    numbers.described(number, "")
    assert numbers.wrote(3) == ""
    assert numbers.write(4, namespace) == (number, None)
    numbers.clear()  # another catalogue
    other, row = numbers.write(5, namespace)
    assert other > number, "a number was used for two things"
    assert row is not None
