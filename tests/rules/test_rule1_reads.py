"""Rule 1: a read without a call counts only where number, index and daemon are afterwards as they were before."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore_client import Client, Namespace
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block
from tests.rules.processes import Program, exact, fill, names, store

BLOCK = 4096

Start = Callable[..., Program]


@pytest.fixture
def daemon(start_daemon: Callable[..., RunningDaemon]) -> RunningDaemon:
    """8 MiB: 2048 slots of 4 KiB, and an index that is too small for so many."""
    return start_daemon(host__size="8MiB")


@pytest.fixture
def ns(client: Client) -> Namespace:
    return client.raw_namespace("rule 1", BLOCK)


@pytest.fixture
def other(daemon: RunningDaemon) -> Iterator[Namespace]:
    """The same namespace through another client."""
    with Client(daemon.endpoint, name="other") as client:
        yield client.raw_namespace("rule 1", BLOCK)


class Between:
    """Does something between the copy of a block and the check that follows; `copies` counts all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies = 0
        self.then: Callable[[], object] | None = None
        self._copyto = np.copyto
        monkeypatch.setattr(np, "copyto", self.copy)

    def copy(self, target: Any, source: Any, *more: Any) -> None:
        self._copyto(target, source, *more)
        self.copies += 1
        if self.then is not None:
            then, self.then = self.then, None
            copies = self.copies
            then()
            self.copies = copies


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Between:
    return Between(monkeypatch)


def read(ns: Namespace, keys: list[bytes]) -> int:
    """Reads these blocks with one call; fails where one that counts has a wrong byte."""
    out = [np.empty(BLOCK, np.uint8) for _ in keys]
    count = ns.get_into(keys, out)
    for key, got in zip(keys[:count], out, strict=False):
        assert got.tobytes() == block(key, BLOCK)
    return count


def test_a_block_removed_between_copy_and_check_is_a_miss(ns: Namespace, other: Namespace, between: Between) -> None:
    keys = store(ns, names("block", 5))
    assert read(ns, keys) == 5
    between.then = lambda: other.remove(keys[:1])
    assert read(ns, keys) == 0
    assert read(ns, keys[1:]) == 4
    between.then = lambda: other.remove(keys[3:4])
    assert read(ns, keys[1:]) == 2, "the leading run up to the one that went"


def test_a_block_that_came_back_between_copy_and_check_is_copied_again(
    ns: Namespace, other: Namespace, between: Between
) -> None:
    """Same key, same bytes, perhaps the same slot: but what was copied may be half of something else."""
    keys = store(ns, names("block", 3))

    def replace() -> None:
        other.remove(keys[:1])
        other.put([other.key(b"in its place")], block("in its place", BLOCK))
        other.put(keys[:1], block(keys[0], BLOCK))

    between.then = replace
    between.copies = 0
    assert read(ns, keys) == 3
    assert between.copies == 6, "what was copied first does not count"


def test_a_block_evicted_between_copy_and_check_is_a_miss(
    client: Client, ns: Namespace, other: Namespace, between: Between
) -> None:
    keys = store(ns, names("block", 3))
    between.then = lambda: fill(client, other, "others")
    assert read(ns, keys) == 0
    assert ns.match(keys).blocks == 0


def generation(client: Client) -> int:
    return int(client.stats()["indexes"][0]["generation"])


def test_a_read_during_which_the_index_moves_is_done_again_in_the_new_one(
    client: Client, ns: Namespace, other: Namespace, between: Between
) -> None:
    keys = store(ns, names("block", 4))
    before = generation(client)

    def move() -> None:
        store(other, names("more", 900))
        eventually(lambda: generation(client) > before, 10, "the index to move")

    between.then = move
    between.copies = 0
    assert read(ns, keys) == 4
    assert between.copies == 8, "copied from the old one, which did not count, and again from the new one"
    assert ns.match(keys).blocks == 4
    assert read(ns, keys) == 4


def test_an_index_may_grow_under_a_reader_again_and_again(client: Client, ns: Namespace, other: Namespace) -> None:
    keys = store(ns, names("first", 8))
    before = generation(client)
    for i in range(1500):
        store(other, [f"grow {i}".encode()])
        assert read(ns, keys) == 8
        assert ns.match(keys).blocks == 8
    eventually(lambda: generation(client) > before, 10, "the index to move")
    assert read(ns, keys) == 8


def test_a_daemon_killed_between_copy_and_check_makes_it_a_miss(
    daemon: RunningDaemon, client: Client, ns: Namespace, between: Between
) -> None:
    """The next daemon has the socket's path and memory of its own, full of other blocks, when the check is made."""
    keys = store(ns, names("before", 16))
    before = client.stats()["daemon"]["epoch"]
    others: list[bytes] = []

    def die() -> None:
        daemon.kill()
        daemon.restart()
        with Client(daemon.endpoint, name="filler") as filler:
            others.extend(fill(filler, filler.raw_namespace("rule 1", BLOCK), "after"))

    between.then = die
    assert read(ns, keys) == 0
    assert others
    eventually(lambda: client.health().reachable, 10, "the client to be back")
    assert client.stats()["daemon"]["epoch"] != before
    assert ns.match(keys).blocks == 0
    assert read(ns, keys) == 0
    assert exact(ns, others) > 1000


def test_the_index_of_a_daemon_that_is_gone_is_not_believed(
    daemon: RunningDaemon, client: Client, ns: Namespace
) -> None:
    keys = store(ns, names("before", 8))
    old = client._transport._session.index  # type: ignore[attr-defined]
    daemon.kill()
    assert old.find(keys[0]) is not None, "its index still says so"
    assert old.current()
    assert ns.match(keys).blocks == 0
    assert read(ns, keys) == 0
    assert ns.get(keys) == []
    result = ns.put(keys, [block(key, BLOCK) for key in keys])
    assert (result.stored, result.existing, result.rejected) == (0, 0, 8)
    daemon.restart()
    eventually(lambda: client.health().reachable, 10, "the client to be back")
    new = client._transport._session.index  # type: ignore[attr-defined]
    assert new.epoch != old.epoch
    assert ns.match(keys).blocks == 0
    assert ns.put(keys[:4], [block(key, BLOCK) for key in keys[:4]]).stored == 4
    assert read(ns, keys) == 4
    assert old.find(keys[7]) is not None


def test_a_client_finds_the_next_daemon_without_being_used(daemon: RunningDaemon, client: Client) -> None:
    before = client._transport._session  # type: ignore[attr-defined]
    daemon.kill()
    daemon.restart()
    eventually(lambda: client._transport._session not in (None, before), 10, "another session")  # type: ignore[attr-defined]
    assert not client._transport._session.dead  # type: ignore[attr-defined]


def test_reads_stay_right_while_the_daemon_stands_still(daemon: RunningDaemon, ns: Namespace, other: Namespace) -> None:
    keys = store(other, names("still", 64))
    assert read(ns, keys) == 64
    daemon.pause()
    began = time.monotonic()
    for _ in range(200):
        assert read(ns, keys) == 64
        assert ns.match([*keys, ns.key(b"absent")]).blocks == 64
    assert time.monotonic() - began < 10
    daemon.resume()
    assert other.remove(keys[:1]) == 1
    assert read(ns, keys) == 0


CROWDED = """
import logging, resource
from logging.handlers import BufferingHandler
logging.getLogger("kvstore_client").addHandler(told := BufferingHandler(1000))
with Client(sys.argv[1], name="crowded") as client:
    ns = client.raw_namespace("rule 1", 4096)
    say("open")
    keys = [bytes.fromhex(hear())]
    out = np.empty(4096, np.uint8)
    crowd = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    try:
        while True:
            crowd.append(os.dup(0))
    except OSError:
        pass
    say(ns.get_into(keys, out), ns.match(keys).blocks)
    ns.put([ns.key(b"crowded")], out)
    say(len(ns.acquire(keys).views))
    say([record.getMessage() for record in told.buffer])
    for descriptor in crowd:
        os.close(descriptor)
    say(ns.get_into(keys, out), len(ns.acquire(keys).views), client.health().healthy)
    hear()
"""


def test_a_reader_without_a_descriptor_left_misses_and_says_why_once(
    daemon: RunningDaemon, ns: Namespace, start_program: Start
) -> None:
    """The kernel drops descriptors for which a process has no room, in silence. No read raises for that."""
    store(ns, names("first", 2))
    reader = start_program(CROWDED, daemon.endpoint)
    assert reader.hear() == "open"
    key = store(ns, names("in further segments", 200))[-1]
    assert reader.ask(key.hex()) == "0 1"
    assert reader.hear() == "0", "held, and not to be read"
    why = "this process cannot map the memory of kvstored: Too many open files"
    assert reader.hear() == str([f"{why}; what is there counts as missing until it can"])
    assert reader.hear() == "1 1 True"
    reader.say("end")
    assert reader.finish() == 0


# -- two readers that look at every byte, and a writer that rewrites as fast as it can

READS_EACH = 520_000
SECONDS_MAX = 300.0
"""Far more than it takes where nothing else runs."""

WRITER = """
import random
chance = random.Random(int(sys.argv[2]))
print("seed", sys.argv[2], file=sys.stderr)
with Client(sys.argv[1], name="writer") as client:
    ns = client.raw_namespace("rule 1", 4096)
    keys = [ns.key(b"rewritten %d" % i) for i in range(64)]
    blocks = {key: np.frombuffer(block(key, 4096), np.uint8) for key in keys}
    ns.put(keys, [blocks[key] for key in keys])
    say("writing")
    fresh = rounds = 0
    parent = os.getppid()
    while os.getppid() == parent:
        rounds += 1
        some = chance.sample(keys, 12)
        ns.remove(some[:8])
        chance.shuffle(some)  # what was freed by one is written by another
        ns.put(some, [blocks[key] for key in some])
        if not rounds % 8:  # evicts, and has the index shed tombstones
            new = [ns.key(b"fresh %d" % i) for i in range(fresh, fresh + 24)]
            fresh += 24
            ns.put(new, [np.frombuffer(block(key, 4096), np.uint8) for key in new])
"""

READER = """
import random, select, time
chance = random.Random(int(sys.argv[2]))
reads_wanted, until, careless = int(sys.argv[3]), time.monotonic() + float(sys.argv[4]), sys.argv[5] == "careless"
with Client(sys.argv[1], name="reader") as client:
    ns = client.raw_namespace("rule 1", 4096)
    if careless:
        # A reader that checks something which never changes: the first word of the header. It waits
        # a millisecond before it copies, so that the writer gets in between on every machine.
        session = client._transport._session
        find = type(session.index).find
        def find_and_forget(index, key):
            entry = find(index, key)
            select.select([], [], [], 0.001)
            return entry and (0, index.numbers[0], *entry[2:])
        type(session.index).find = find_and_forget
    keys = [ns.key(b"rewritten %d" % i) for i in range(64)]
    expected = np.frombuffer(b"".join(block(key, 4096) for key in keys), np.uint64).reshape(64, 512)
    out = np.empty((16, 4096), np.uint8)
    rows, words = list(out), out.view(np.uint64)
    reads = calls = short = wrong = 0
    generations, indexes = set(), 0
    while reads < reads_wanted and time.monotonic() < until and not (careless and wrong):
        for _ in range(5 if careless else 100):
            count = chance.choice((1, 1, 2, 4, 16))
            start = chance.randrange(0, 65 - count)
            got = ns.get_into(keys[start : start + count], rows[:count])
            calls += 1
            reads += got
            short += got < count
            if not np.array_equal(words[:got], expected[start : start + got]):
                wrong += int((words[:got] != expected[start : start + got]).any(axis=1).sum())
        generations.add(client._transport._session.index.generation)
    say(reads, calls, short, wrong, len(generations))
"""


@pytest.fixture
def small(start_daemon: Callable[..., RunningDaemon]) -> RunningDaemon:
    """1 MiB: 256 slots of 4 KiB."""
    return start_daemon(host__size="1MiB")


def result(reader: Program) -> list[int]:
    return [int(word) for word in reader.hear(SECONDS_MAX + 40).split()]


@pytest.mark.stress
@pytest.mark.timeout(450)
def test_every_byte_of_a_million_blocks_is_right_while_all_of_them_are_rewritten(
    small: RunningDaemon, start_program: Start
) -> None:
    assert start_program(WRITER, small.endpoint, 11).hear() == "writing"
    readers = [start_program(READER, small.endpoint, seed, READS_EACH, SECONDS_MAX, "careful") for seed in (12, 13)]
    results = [result(reader) for reader in readers]
    with Client(small.endpoint, name="test") as client:
        stats: dict[str, Any] = client.stats()
    reads, calls, short, wrong, generations = (sum(column) for column in zip(*results, strict=True))
    said = f"{reads} reads in {calls} calls, {short} short, {wrong} wrong, {stats['counters']}"
    assert wrong == 0, said
    assert reads >= 1_000_000, said
    assert short > 1000, said
    assert generations > 4, said
    assert stats["counters"]["evicted"] > 1000, said
    assert stats["counters"]["removed"] > 10_000, said
    assert stats["daemon"]["healthy"], stats["daemon"]["problems"]


@pytest.mark.stress
def test_a_reader_that_does_not_check_is_caught(small: RunningDaemon, start_program: Start) -> None:
    assert start_program(WRITER, small.endpoint, 21).hear() == "writing"
    reads, _, _, wrong, _ = result(start_program(READER, small.endpoint, 22, 1 << 40, 40.0, "careless"))
    assert wrong > 0, f"{reads} reads and none of them wrong"
