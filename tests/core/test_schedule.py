"""In which order jobs run, and how much of the disk each kind gets."""

import random
import time
from itertools import count

import pytest

from kvstore.core.schedule import (
    BURST_BYTES,
    READS_BESIDE,
    READS_KEPT,
    READS_MAX,
    SHARES,
    WRITES_MAX,
    Kind,
    Scheduler,
    Turn,
)

BOUND = 1 << 40
BOUNDS = dict.fromkeys(Kind, BOUND)


class Device:
    """A disk that moves `rate` bytes a second, shared by what is under way; writes can be `slow` times as long."""

    def __init__(self, schedule: Scheduler[int], rate: float = 1e9, slow: float = 1.0) -> None:
        self.schedule = schedule
        self.now = 0.0
        self.moved = dict.fromkeys(Kind, 0)
        self.running: list[tuple[Kind, int, float]] = []
        self.sizes: dict[int, int] = {}
        self._rate = rate
        self._slow = slow

    def begin(self, kind: Kind, job: int) -> Turn:
        size = self.sizes[job]
        self.running.append((kind, size, size * (self._slow if kind is Kind.WRITE else 1.0)))
        return Turn.BEGUN

    def until_one_ends(self) -> None:
        least = min(left for *_, left in self.running)
        self.now += least * len(self.running) / self._rate
        ended = [(kind, size) for kind, size, left in self.running if left - least <= 1e-6]
        self.running = [(kind, size, left - least) for kind, size, left in self.running if left - least > 1e-6]
        for kind, size in ended:
            self.schedule.ended(kind)
            self.moved[kind] += size


KINDS = [list(Kind), [Kind.LOAD, Kind.PREFETCH], [Kind.LOAD, Kind.WRITE], [Kind.PREFETCH, Kind.WRITE]]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("sizes", [(2 << 20,), (64 << 10, 2 << 20), (512 << 10,)], ids=str)
def test_under_saturation_each_kind_gets_its_share_within_20_percent(kinds: list[Kind], sizes: tuple[int, ...]) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    schedule: Scheduler[int] = Scheduler(BOUNDS)
    device, names = Device(schedule), count()
    while sum(device.moved.values()) < 100 * BURST_BYTES and device.now < 1000:
        for kind in kinds:
            while len(schedule.queues[kind].level) < 32:
                job = next(names)
                device.sizes[job] = chance.choice(sizes)
                assert schedule.offer(kind, job, device.sizes[job])
        schedule.run(device.begin)
        device.until_one_ends()
    whole, shares = sum(device.moved.values()), sum(SHARES[kind] for kind in kinds)
    for kind in kinds:
        share = SHARES[kind] / shares
        assert 0.8 * share <= device.moved[kind] / whole <= 1.2 * share, (kind, device.moved)


@pytest.mark.parametrize("alone", list(Kind), ids=str)
def test_who_had_the_disk_alone_has_its_share_of_it_when_others_come(alone: Kind) -> None:
    """Writes that had filled an SSD were not begun for 15 s of loads and prefetches: they had all been counted."""
    schedule: Scheduler[int] = Scheduler(BOUNDS)
    device, names = Device(schedule), count()

    def keep_busy(kinds: list[Kind], size_bytes: int) -> dict[Kind, int]:
        before = dict(device.moved)
        while sum(device.moved.values()) < sum(before.values()) + size_bytes:
            for kind in kinds:
                while len(schedule.queues[kind].level) < 32:
                    job = next(names)
                    device.sizes[job] = 2 << 20
                    assert schedule.offer(kind, job, device.sizes[job])
            schedule.run(device.begin)
            device.until_one_ends()
        return {kind: device.moved[kind] - before[kind] for kind in Kind}

    keep_busy([alone], 200 * BURST_BYTES)
    while schedule.queues[alone].active:
        schedule.run(device.begin)
        device.until_one_ends()
    moved = keep_busy(list(Kind), 100 * BURST_BYTES)
    for kind in Kind:
        assert 0.8 * SHARES[kind] <= moved[kind] / sum(moved.values()) <= 1.2 * SHARES[kind], (kind, moved)


def test_a_disk_that_is_slow_to_write_keeps_no_reader_waiting() -> None:
    schedule: Scheduler[int] = Scheduler(BOUNDS)
    device = Device(schedule, slow=1e6)
    for job in range(5000):
        device.sizes[job] = 1 << 20
        schedule.offer(Kind.WRITE, job, 1 << 20)
    schedule.run(device.begin)
    assert schedule.queues[Kind.WRITE].running == WRITES_MAX
    for job in range(5000, 5100):
        device.sizes[job] = 1 << 20
        schedule.offer(Kind.LOAD, job, 1 << 20)
    schedule.run(device.begin)
    while schedule.queues[Kind.LOAD].active:
        assert schedule.queues[Kind.LOAD].running
        device.until_one_ends()
        schedule.run(device.begin)
    assert device.moved[Kind.LOAD] == 100 << 20
    assert device.moved[Kind.WRITE] == 0


def test_a_demand_load_goes_before_all_that_waits() -> None:
    schedule: Scheduler[int] = Scheduler(BOUNDS)
    device = Device(schedule)
    for job in range(200):
        device.sizes[job] = 1 << 20
        schedule.offer(Kind.PREFETCH if job % 2 else Kind.WRITE, job, 1 << 20)
    for _ in range(5):
        schedule.run(device.begin)
        device.until_one_ends()
    device.sizes[1000] = 1 << 20
    schedule.offer(Kind.LOAD, 1000, 1 << 20)
    begun: list[Kind] = []
    schedule.run(lambda kind, job: begun.append(kind) or device.begin(kind, job))  # type: ignore[func-returns-value]
    assert begun[0] is Kind.LOAD


def test_prefetches_leave_places_to_demand_loads_and_a_kind_alone_has_all() -> None:
    schedule: Scheduler[int] = Scheduler(BOUNDS)
    for job in range(100):
        schedule.offer(Kind.PREFETCH, job, 1)
    schedule.run(lambda kind, job: Turn.BEGUN)
    assert schedule.queues[Kind.PREFETCH].running == READS_MAX - READS_KEPT
    for job in range(100, 200):
        schedule.offer(Kind.LOAD, job, 1)
    schedule.run(lambda kind, job: Turn.BEGUN)
    assert schedule.queues[Kind.LOAD].running == READS_KEPT


@pytest.mark.parametrize(("kind", "places"), [(Kind.LOAD, READS_MAX), (Kind.PREFETCH, READS_MAX - READS_KEPT)])
def test_reads_give_way_to_writes_that_have_less_than_their_share_and_not_to_those_that_cannot_be(
    kind: Kind, places: int
) -> None:
    """With more at once, writes had half of their share of a real disk, also while they waited for a file."""
    schedule: Scheduler[int] = Scheduler(BOUNDS)
    device, names = Device(schedule, slow=100.0), count()

    def fill() -> None:
        for each in (kind, Kind.WRITE):
            while len(schedule.queues[each].level) < 32:
                job = next(names)
                device.sizes[job] = 2 << 20
                schedule.offer(each, job, device.sizes[job])

    for _ in range(200):
        fill()
        schedule.run(device.begin)
        device.until_one_ends()
    fill()
    schedule.run(device.begin)
    reads, writes = schedule.queues[kind], schedule.queues[Kind.WRITE]
    assert writes.served + BURST_BYTES < reads.served
    assert (reads.running, writes.running) == (READS_BESIDE, WRITES_MAX)
    schedule.run(device.begin, [Kind.WRITE])  # no file for more of them: those under way take their time all the same
    assert reads.running == READS_BESIDE
    for _ in range(WRITES_MAX):
        schedule.ended(Kind.WRITE)
    schedule.run(device.begin, [Kind.WRITE])  # nothing is gained by waiting
    assert reads.running == places


def test_higher_priority_goes_first_and_what_has_to_wait_keeps_its_place() -> None:
    schedule: Scheduler[str] = Scheduler(BOUNDS)
    for job, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 99), ("e", -99)):
        schedule.offer(Kind.WRITE, job, 1, priority)
    order: list[str] = []

    def begin(_: Kind, job: str) -> Turn:
        if job == "b" and not order.count("b"):
            order.append("b")
            return Turn.LATER
        order.append(job)
        return Turn.OVER

    schedule.run(begin)
    assert order == ["d", "b"]
    schedule.run(begin)
    assert order == ["d", "b", "b", "a", "c", "e"]
    assert not schedule.queues[Kind.WRITE].active


def test_a_full_queue_refuses_and_an_empty_one_takes_any_one_job() -> None:
    schedule: Scheduler[int] = Scheduler(dict.fromkeys(Kind, 100))
    assert schedule.offer(Kind.WRITE, 1, 1000)
    assert not schedule.offer(Kind.WRITE, 2, 1)
    assert schedule.queues[Kind.WRITE].refused == 1
    assert schedule.withdraw(Kind.WRITE, 1)
    assert not schedule.withdraw(Kind.WRITE, 1)
    assert schedule.offer(Kind.WRITE, 2, 60)
    assert not schedule.offer(Kind.WRITE, 3, 60)
    assert schedule.queues[Kind.WRITE].bytes == 60


def test_a_job_that_has_to_wait_costs_nothing_of_what_waits_behind_it() -> None:
    """Its whole queue was copied each time: 40 ms of half a million, with every report of a disk that had no room."""
    schedule: Scheduler[int] = Scheduler(BOUNDS)
    for job in range(200_000):
        assert schedule.offer(Kind.WRITE, job, 1)
    seen: list[int] = []

    def later(kind: Kind, job: int) -> Turn:
        seen.append(job)
        return Turn.LATER

    began = time.thread_time()
    for _ in range(500):
        schedule.run(later)
    assert time.thread_time() - began < 1.0, "seconds of this thread; with copies it takes 5 and more"
    assert seen == [0] * 500
    assert schedule.queues[Kind.WRITE].bytes == 200_000
