"""The index against a dict: what is published is what readers find, through growth, tombstones and collisions."""

import os
import struct
import time
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from kvstore.tiers import index as indexes
from kvstore.tiers.index import CAPACITY_MIN, COPY_ROWS, Indexes, Location, TenantIndex, capacity_for
from kvstore_client.index import IndexReader
from kvstored.v1 import shm
from kvstored.v1.errors import FailedPrecondition

LENGTH = 4096
EPOCH = 77


def key_of(name: object) -> bytes:
    return blake2b(repr(name).encode(), digest_size=32).digest()


def colliding(name: int, *, first: int = 1, second: int = 3) -> bytes:
    """Keys of one first and one second number: all of them are probed for at the same places."""
    return struct.pack("<QQ", first, second) + key_of(name)[:16]


def where(number: int, length: int = LENGTH) -> Location:
    return (number % 1000, length, number * 4096, shm.HOST, 0, number % 7)


def reader_of(index: TenantIndex) -> IndexReader:
    return IndexReader(index.descriptor, index.size_bytes)


def found(reader: IndexReader, key: bytes) -> tuple[int, int, int, int] | None:
    """segment, length, offset, flags, as a reader sees them."""
    entry = reader.find(key)
    return None if entry is None else entry[2:]


def sequences(reader: IndexReader) -> NDArray[np.uint64]:
    return np.frombuffer(reader.raw[shm.HEADER_BYTES :], "<u8")[:: shm.SLOT_BYTES // 8].copy()


def finish(index: TenantIndex) -> int:
    """Carries a move through; how many steps it took."""
    steps = 0
    while index.step(lambda: 0.0, -1.0):
        steps += 1
    return steps


@pytest.fixture
def index() -> Iterator[TenantIndex]:
    made = TenantIndex("kvstored-index-test", EPOCH, CAPACITY_MIN)
    yield made
    made.close()


class IndexAgainstADict(RuleBasedStateMachine):
    """Publish, withdraw and step in any order; a fresh look by the client's reader after each."""

    NAMES = st.one_of(
        st.integers(0, 300).map(key_of),
        st.integers(0, 90).map(colliding),
        st.integers(0, 30).map(lambda i: colliding(i, second=5 + 2 * (i % 3))),
    )

    def __init__(self) -> None:
        super().__init__()
        self.index = TenantIndex("kvstored-index-test", EPOCH, CAPACITY_MIN)
        self.model: dict[bytes, Location] = {}
        self.reader = reader_of(self.index)
        self.before = sequences(self.reader)
        self.writes = 0
        self.count = 0

    def publish(self, key: bytes) -> None:
        self.count += 1
        self.model[key] = where(self.count, LENGTH if self.count % 5 else 2 * LENGTH)
        waiting = self.index.figures[4]
        self.index.publish(key, self.model[key])
        self.writes += self.index.figures[4] == waiting

    def withdraw(self, key: bytes) -> None:
        del self.model[key]
        waiting = self.index.figures[4]
        self.index.withdraw(key)
        self.writes += self.index.figures[4] == waiting

    @initialize(keys=st.integers(0, 720))
    def start_with(self, keys: int) -> None:
        for i in range(keys):
            self.publish(key_of(("start", i)))

    @rule(key=NAMES)
    def publish_move_or_withdraw(self, key: bytes) -> None:
        if key in self.model:
            self.withdraw(key)
            if self.count % 2:
                self.publish(key)
        else:
            self.publish(key)

    @rule(start=st.integers(0, 90), count=st.integers(1, 80))
    def publish_many_that_collide(self, start: int, count: int) -> None:
        for i in range(start, start + count):
            if colliding(i) not in self.model:
                self.publish(colliding(i))

    @rule(count=st.integers(1, 400))
    def come_and_go(self, count: int) -> None:
        """Leaves tombstones."""
        for i in range(count):
            key = key_of(("passing", self.count, i))
            self.publish(key)
            self.withdraw(key)

    @rule(count=st.integers(1, 900))
    def fill(self, count: int) -> None:
        for i in range(count):
            self.publish(key_of(("fill", self.count, i)))

    @rule(keep=st.integers(0, 100))
    def empty(self, keep: int) -> None:
        for key in list(self.model)[keep:]:
            self.withdraw(key)

    @precondition(lambda self: self.index.growing)
    @rule(pieces=st.integers(1, 40))
    def step(self, pieces: int) -> None:
        ticks = iter(range(pieces, -2, -1))
        self.index.step(lambda: -next(ticks), pieces - 1.0)

    @precondition(lambda self: self.index.growing)
    @rule()
    def finish(self) -> None:
        finish(self.index)
        assert not self.index.growing

    @invariant()
    def index_and_readers_agree_with_the_model(self) -> None:
        self.sequence_numbers_change_only_when_bytes_move()
        self.readers_find_what_the_model_has()
        self.many_at_once_is_the_same_as_one_by_one()

    def sequence_numbers_change_only_when_bytes_move(self) -> None:
        """Each publish or withdrawal moves one number on by two; none goes back, and nothing else moves them."""
        after = sequences(self.reader)
        assert (after >= self.before).all()
        assert not (after & np.uint64(1)).any()
        assert int((after - self.before).sum()) == 2 * self.writes
        self.before, self.writes = after, 0
        if not self.reader.current():
            self.reader = reader_of(self.index)
            self.before = sequences(self.reader)

    def readers_find_what_the_model_has(self) -> None:
        generation, capacity, live, tombstones, waiting = self.index.figures
        assert self.reader.generation == generation
        assert live + waiting == len(self.model)
        assert live + tombstones == np.count_nonzero(self.before)
        assert capacity <= capacity_for(4 * max(self.peak(), 1))
        missing = 0
        for key, (segment, length, offset, flags, _, _) in self.model.items():
            entry = found(self.reader, key)
            if entry is None:
                missing += 1
                assert self.index.growing or key.startswith(colliding(0)[:8]), "only chosen collisions stay unpublished"
            else:
                assert entry == (segment, length, offset, flags)
        assert missing == waiting
        for i in range(40):
            assert found(self.reader, key_of(("never", i))) is None

    def peak(self) -> int:
        self._peak = max(getattr(self, "_peak", 0), len(self.model))
        return self._peak

    def many_at_once_is_the_same_as_one_by_one(self) -> None:
        known = list(self.model)
        for keys in (known, known[:9], known[::-1], [*known[:50], key_of("never"), *known[50:60]], known[3:200:3]):
            for length in (LENGTH, 2 * LENGTH):
                wanted = self.reader._leading_one_by_one(keys, length)
                assert self.reader.leading(keys, length) == wanted
            alike = [key for key in keys if self.model.get(key, where(0))[1] == LENGTH]
            assert self.reader.leading(alike, LENGTH) == self.reader._leading_one_by_one(alike, LENGTH)

    def teardown(self) -> None:
        self.index.close()


TestIndexAgainstADict = IndexAgainstADict.TestCase
TestIndexAgainstADict.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_number_survives_deletion_and_reuse(index: TenantIndex) -> None:
    reader = reader_of(index)
    key, other = colliding(1), colliding(2)
    index.publish(key, where(1))
    first = reader.find(key)
    assert first is not None
    index.withdraw(key)
    index.publish(other, where(2))
    second = reader.find(other)
    assert second is not None
    assert second[0] == first[0], "the same slot of the index"
    assert second[1] == first[1] + 4


def test_a_reader_misses_while_an_entry_is_being_written(index: TenantIndex) -> None:
    reader = reader_of(index)
    keys = [key_of(i) for i in range(20)]
    for i, key in enumerate(keys):
        index.publish(key, where(i))
    entry = reader.find(keys[10])
    assert entry is not None
    index._table.numbers[entry[0]] += 1
    assert reader.find(keys[10]) is None
    assert reader.leading(keys, LENGTH)[0] == reader._leading_one_by_one(keys, LENGTH)[0] == 10
    index._table.numbers[entry[0]] += 1
    assert reader.leading(keys, LENGTH)[0] == 20


def test_growth_keeps_every_block_and_tells_the_readers_of_the_old_one(index: TenantIndex) -> None:
    old = reader_of(index)
    keys = [key_of(i) for i in range(5000)]
    for i, key in enumerate(keys):
        index.publish(key, where(i))
        index.step(lambda: 0.0, 0.0)
    finish(index)
    assert not old.current()
    assert old.generation == 1
    new = reader_of(index)
    assert new.generation == index.figures[0] > 1
    assert new.epoch == old.epoch == EPOCH
    assert old.numbers[shm.AT_MOVED >> 3] > 1
    assert new.leading(keys, LENGTH)[0] == len(keys)
    assert [found(new, key) for key in keys] == [where(i)[:4] for i in range(len(keys))]


def test_an_old_index_is_never_written_again(index: TenantIndex) -> None:
    keys = [key_of(i) for i in range(800)]
    for i, key in enumerate(keys):
        index.publish(key, where(i))
    old = reader_of(index)
    finish(index)
    frozen = bytes(old.raw)
    for key in keys:
        index.withdraw(key)
    index.beat(123)
    index.notify()
    assert bytes(old.raw) == frozen
    assert reader_of(index).notice == 1


def test_more_published_during_a_move_than_it_was_made_for_is_all_found_after_it(index: TenantIndex) -> None:
    keys = [key_of(i) for i in range(20_000)]
    for i, key in enumerate(keys):
        index.publish(key, where(i))  # and nobody steps
    assert index.growing
    finish(index)
    assert index.figures[2:] == (len(keys), 0, 0)
    assert reader_of(index).leading(keys, LENGTH)[0] == len(keys)


def test_tombstones_are_shed_and_the_index_does_not_grow_without_need(index: TenantIndex) -> None:
    kept = [key_of(("kept", i)) for i in range(100)]
    for i, key in enumerate(kept):
        index.publish(key, where(i))
    for i in range(20_000):
        index.publish(key_of(i), where(i))
        index.withdraw(key_of(i))
        if index.growing:
            index.step(lambda: 0.0, 0.0)
    generation, capacity, live, _, waiting = index.figures
    assert generation > 2
    assert (capacity, live, waiting) == (CAPACITY_MIN, 100, 0)
    assert reader_of(index).leading(kept, LENGTH)[0] == 100


def test_keys_that_share_their_first_or_their_second_number_are_all_found(index: TenantIndex) -> None:
    same_first = [colliding(i, second=1 + 2 * i) for i in range(300)]
    same_second = [colliding(i, first=i * 7) for i in range(300)]
    for i, key in enumerate([*same_first, *same_second]):
        index.publish(key, where(i))
        index.step(lambda: 0.0, 0.0)
    finish(index)
    reader = reader_of(index)
    assert index.figures[4] == 0
    assert reader.leading(same_first, LENGTH)[0] == 300
    assert reader.leading(same_second, LENGTH)[0] == 300


def test_keys_made_to_collide_cost_neither_memory_nor_the_blocks_of_others(index: TenantIndex) -> None:
    """Only 64 keys of one probe fit, whatever the size: growing for the others took all memory there is."""
    others = [key_of(i) for i in range(200)]
    for i, key in enumerate(others):
        index.publish(key, where(i))
    made_up = [colliding(i) for i in range(3000)]
    for i, key in enumerate(made_up):
        index.publish(key, where(i))
        index.step(lambda: 0.0, 0.0)
    finish(index)
    reader = reader_of(index)
    _, capacity, live, _, waiting = index.figures
    assert capacity <= capacity_for(4 * 3200)
    published = [key for key in made_up if reader.find(key) is not None]
    assert len(published) + waiting == 3000
    assert shm.PROBE_MAX // 2 <= len(published) <= shm.PROBE_MAX
    assert live == 200 + len(published)
    assert reader.leading(others, LENGTH)[0] == 200
    for key in made_up:
        index.withdraw(key)
    assert index.figures[2] == 200
    assert index.figures[4] == 0
    assert reader_of(index).leading(others, LENGTH)[0] == 200


def test_a_block_that_waits_is_found_once_there_is_a_larger_index(index: TenantIndex) -> None:
    """Published into a full index while its successor is being made."""
    keys = [key_of(i) for i in range(CAPACITY_MIN + 200)]
    for i, key in enumerate(keys):
        index.publish(key, where(i))
    assert index.figures[4] >= 200
    old = reader_of(index)
    assert sum(old.find(key) is None for key in keys) == index.figures[4]
    gone = [key for key in keys if old.find(key) is None][:50]
    for key in gone:
        index.withdraw(key)
    finish(index)
    assert index.figures[4] == 0
    new = reader_of(index)
    assert {key for key in keys if new.find(key) is None} == set(gone)


def test_a_daemon_without_descriptors_goes_on_with_the_index_it_has(
    index: TenantIndex, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [key_of(i) for i in range(1500)]
    with monkeypatch.context() as m:

        def no_descriptor(*_: object, **__: object) -> int:
            raise OSError(24, "Too many open files")

        m.setattr(indexes, "sealed_memfd", no_descriptor)
        for i, key in enumerate(keys[:-1]):
            index.publish(key, where(i))
        assert not index.growing
        assert index.figures[2] + index.figures[4] == len(keys) - 1
    assert len([r for r in caplog.records if "cannot grow" in r.message]) == 1
    index.publish(keys[-1], where(len(keys) - 1))
    finish(index)
    assert reader_of(index).leading(keys, LENGTH)[0] == len(keys)


def test_a_step_looks_at_the_clock_after_a_bounded_number_of_entries(index: TenantIndex) -> None:
    keys = [key_of(i) for i in range(30_000)]
    for i, key in enumerate(keys):
        index.publish(key, where(i))
    assert index.growing
    successor = index._next
    assert successor is not None
    more, steps = True, 0
    while more:
        looked: list[float] = []

        def clock(looked: list[float] = looked) -> float:
            looked.append(0.001 * len(looked))
            return looked[-1]

        before = successor.live
        more = index.step(clock, 0.002)
        steps += 1
        assert len(looked) <= 3
        assert successor.live - before <= 2 * COPY_ROWS
    assert steps > 5


def test_steps_take_about_their_budget() -> None:
    """In processor time of this thread, so that other processes do not count."""
    index = TenantIndex("kvstored-index-test", EPOCH, 1 << 16)
    i = 0
    while not index.growing:
        index.publish(key_of(i), where(i))
        i += 1
    took = []
    more = True
    while more:
        began = time.thread_time()
        more = index.step(time.thread_time, 0.002)
        took.append(time.thread_time() - began)
    index.close()
    assert len(took) > 20
    assert sorted(took)[len(took) // 2] < 0.004
    assert max(took) < 0.030


def test_moves_of_several_tenants_share_one_budget() -> None:
    made = Indexes(EPOCH, 1)
    for tenant in range(8):
        for i in range(800):
            made.publish(tenant, key_of(i), shm.slot_ref(1, i), i * 4096, LENGTH, 1)
    assert all(made.of(tenant).growing for tenant in range(8))
    looked: list[int] = []

    def clock() -> float:
        looked.append(1)
        return 0.001 * len(looked)

    steps = 0
    while made.step(clock, 0.002):
        steps += 1
        assert len(looked) <= 6
        looked.clear()
    assert steps >= 8
    for tenant in range(8):
        descriptor, size_bytes, _ = made.descriptor(tenant)
        assert IndexReader(descriptor, size_bytes).leading([key_of(i) for i in range(800)], LENGTH)[0] == 800
    made.close()


def test_heartbeat_and_notice_are_what_readers_see_also_after_a_move(index: TenantIndex) -> None:
    index.beat(123_456)
    index.notify()
    index.notify()
    for i in range(800):
        index.publish(key_of(i), where(i))
    finish(index)
    reader = reader_of(index)
    assert reader.numbers[shm.AT_HEARTBEAT >> 3] == 123_456
    assert reader.notice == 2


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (shm.AT_MAGIC, int.from_bytes(b"KVSTIDX2", "little"), "reads layout 1"),
        (shm.AT_MAGIC, 0, "reads layout 1"),
        (shm.AT_VERSION, 2, "has layout 2; this release of the client reads layout 1"),
        (shm.AT_CAPACITY, 2 * CAPACITY_MIN, "2048 slots does not fit"),
        (shm.AT_CAPACITY, CAPACITY_MIN - 1, "1023 slots does not fit"),
        (shm.AT_CAPACITY, 0, "0 slots does not fit"),
    ],
)
def test_an_index_of_another_layout_is_refused(at: int, value: int, says: str) -> None:
    descriptor = os.memfd_create("kvstored-index-test")
    size_bytes = shm.index_bytes(CAPACITY_MIN)
    os.ftruncate(descriptor, size_bytes)
    header = {
        shm.AT_MAGIC: shm.MAGIC,
        shm.AT_VERSION: shm.LAYOUT_VERSION,
        shm.AT_EPOCH: EPOCH,
        shm.AT_GENERATION: 1,
        shm.AT_CAPACITY: CAPACITY_MIN,
    }
    for place, number in header.items():
        os.pwrite(descriptor, struct.pack("<Q", number), place)
    assert IndexReader(descriptor, size_bytes).current()
    os.pwrite(descriptor, struct.pack("<Q", value), at)
    with pytest.raises(FailedPrecondition, match=says):
        IndexReader(descriptor, size_bytes)
    os.close(descriptor)


def test_an_index_shorter_or_longer_than_its_slots_is_refused() -> None:
    made = TenantIndex("kvstored-index-test", EPOCH, 2 * CAPACITY_MIN)
    with pytest.raises(FailedPrecondition, match="2048 slots does not fit its 69632 bytes"):
        IndexReader(made.descriptor, shm.index_bytes(CAPACITY_MIN))
    with pytest.raises(FailedPrecondition, match="does not fit"):
        IndexReader(made.descriptor, made.size_bytes + 4096)
    made.close()
