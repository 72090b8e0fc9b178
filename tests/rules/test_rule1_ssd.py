"""Rule 1 where blocks go to the SSD and come back: an entry that is not in memory is never copied from."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Client, Namespace
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, totals
from tests.rules.processes import Program, fill, names, store
from tests.rules.test_rule1_reads import Between

BLOCK = 4096
SECONDS, SECONDS_MAX = 5.0, 60.0
"""How long it goes on: at least, and at most where little has come from the SSD by then."""

Start = Callable[..., Program]


@pytest.fixture(params=["extents", "rocksdb"])
def daemon(start_daemon: Callable[..., RunningDaemon], tmp_path: Path, request: pytest.FixtureRequest) -> RunningDaemon:
    """1 MiB: 256 slots of 4 KiB, and an SSD, of either layout, for all that has none there."""
    settings = {"host__size": "1MiB", "ssd__size": "1GiB", "ssd__layout": request.param}
    return start_daemon(ssd__path=str(tmp_path / "ssd"), **settings)


@pytest.fixture
def ns(client: Client) -> Namespace:
    eventually(lambda: client.stats()["ssd"]["state"] == "open", 20, "the SSD to be open")
    return client.raw_namespace("rule 1", BLOCK)


@pytest.fixture
def other(daemon: RunningDaemon) -> Iterator[Namespace]:
    """The same namespace through another client."""
    with Client(daemon.endpoint, name="other") as client:
        yield client.raw_namespace("rule 1", BLOCK)


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Between:
    return Between(monkeypatch)


def kept(client: Client, ns: Namespace, count: int) -> list[bytes]:
    """Blocks in memory and on the SSD."""
    keys = store(ns, names("block", count))
    assert ns.put(keys, [block(key, BLOCK) for key in keys], durable=True) == (0, count, 0, None)
    return keys


def read(ns: Namespace, keys: list[bytes]) -> int:
    out = [np.empty(BLOCK, np.uint8) for _ in keys]
    count = ns.get_into(keys, out)
    for key, got in zip(keys[:count], out, strict=False):
        assert got.tobytes() == block(key, BLOCK)
    return count


def test_a_block_that_went_to_the_ssd_between_copy_and_check_is_loaded(
    client: Client, ns: Namespace, other: Namespace, between: Between
) -> None:
    """The slot has other bytes by then, and the entry still answers, from another tier."""
    keys = kept(client, ns, 5)
    between.copies = 0
    between.then = lambda: fill(client, other, "others")
    assert read(ns, keys) == 5
    assert between.copies > 5, "what was copied first does not count"
    assert client.stats()["ssd"]["counters"]["loaded"] > 0


def test_a_block_that_went_to_the_ssd_and_back_between_copy_and_check_is_not_believed(
    client: Client, ns: Namespace, other: Namespace, between: Between
) -> None:
    keys = kept(client, ns, 3)

    def there_and_back() -> None:
        fill(client, other, "others")
        assert other.get(keys[:1]) == [block(keys[0], BLOCK)]

    between.then = there_and_back
    assert read(ns, keys) in (0, 3), "a miss, or read again"
    assert read(ns, keys) == 3


def test_a_block_removed_everywhere_while_others_are_loaded_ends_the_run(
    client: Client, ns: Namespace, other: Namespace, between: Between
) -> None:
    keys = kept(client, ns, 40)
    fill(client, other, "others")
    assert ns.match(keys).tiers == ["ssd"] * 40
    between.then = lambda: other.remove(keys[30:31])
    assert read(ns, keys) in (30, 40), "removed before it came, or after"
    assert read(ns, keys) == 30


def test_flags_of_the_ssd_disturb_no_reader(client: Client, ns: Namespace, between: Between) -> None:
    """A write-back that ends between copy and check changes no byte in memory."""
    keys = store(ns, names("block", 3))
    between.copies = 0
    between.then = lambda: ns.put(keys, [block(key, BLOCK) for key in keys], durable=True)
    assert read(ns, keys) == 3
    assert between.copies == 3, "it was not read again"


READER = """
import os, random, time
chance, until = random.Random(int(sys.argv[2])), time.monotonic() + float(sys.argv[4])
with Client(sys.argv[1], name="reader", timeout_s=5.0) as client:
    ns = client.raw_namespace("rule 1", 4096)
    keys = [ns.key(b"stressed %d" % i) for i in range(1000)]
    expected = np.frombuffer(b"".join(block(key, 4096) for key in keys), np.uint8).reshape(1000, 4096)
    out = np.empty((16, 4096), np.uint8)
    rows, reads, calls, wrong = list(out), 0, 0, 0
    while time.monotonic() < until and not os.path.exists(sys.argv[3]):
        count = chance.choice((1, 2, 4, 16))
        start = chance.randrange(0, 1001 - count)
        some = keys[start : start + count]
        if chance.random() < 0.1:
            with ns.acquire(some, timeout_s=5.0) as lease:
                got = len(lease)
                for i in range(got):
                    rows[i][:] = lease.numpy(i)
        else:
            got = ns.get_into(some, rows[:count])
        calls, reads = calls + 1, reads + got
        wrong += int((out[:got] != expected[start : start + got]).any(axis=1).sum())
    say(reads, calls, wrong)
"""

CHANGER = """
import os, random, time
chance, until = random.Random(int(sys.argv[2])), time.monotonic() + float(sys.argv[4])
with Client(sys.argv[1], name="changer", timeout_s=5.0) as client:
    ns = client.raw_namespace("rule 1", 4096)
    keys = [ns.key(b"stressed %d" % i) for i in range(1000)]
    tickets, fresh = [], 0
    while time.monotonic() < until and not os.path.exists(sys.argv[3]):
        some = chance.sample(keys, 16)
        ns.remove(some[:4])
        ns.put(some[:4], [block(key, 4096) for key in some[:4]])
        new = [ns.key(b"fresh %d" % i) for i in range(fresh, fresh + 16)]
        fresh += 16
        ns.put(new, [block(key, 4096) for key in new])
        at = chance.randrange(0, 980)
        tickets.append(ns.prefetch(keys[at : at + 16], deadline_s=0.2))
        if len(tickets) > 8:
            chance.choice(tickets).cancel()
            tickets = tickets[-4:]
        if chance.random() < 0.5:
            tickets[-1].wait()
    say(fresh)
"""


def test_every_byte_is_right_while_blocks_go_to_the_ssd_and_come_back(
    daemon: RunningDaemon, client: Client, ns: Namespace, tmp_path: Path, start_program: Start
) -> None:
    seed, enough = random.randrange(1 << 30), tmp_path / "enough"
    print(f"seed {seed}")
    keys = [ns.key(b"stressed %d" % i) for i in range(1000)]
    for at in range(0, 1000, 50):
        some = keys[at : at + 50]
        assert ns.put(some, [block(key, BLOCK) for key in some], durable=True).error is None
    began = time.monotonic()
    changer = start_program(CHANGER, daemon.endpoint, seed, enough, SECONDS_MAX)
    readers = [start_program(READER, daemon.endpoint, seed + 1 + i, enough, SECONDS_MAX) for i in range(2)]

    def much() -> bool:
        return time.monotonic() - began > SECONDS and client.stats()["ssd"]["counters"]["loaded"] > 2000

    eventually(much, SECONDS_MAX, "blocks to come from the SSD")
    enough.touch()
    found = [[int(word) for word in reader.hear().split()] for reader in readers]
    assert int(changer.hear(60)) > 0
    reads, calls, wrong = (sum(column) for column in zip(*found, strict=True))
    stats = client.stats()
    moved = stats["ssd"]["counters"]
    said = f"seed {seed}: {reads} blocks in {calls} calls, {wrong} wrong, {moved}"
    assert wrong == 0, said
    assert reads > 1000, said
    assert moved["loaded"] > 1000, said
    assert moved["corrupt"] == 0, said
    assert stats["daemon"]["healthy"], stats["daemon"]["problems"]
    assert stats["ssd"]["trouble"] == ""
    eventually(lambda: client.stats()["ssd"]["tickets"] == 0, 20, "every load to end")
    eventually(lambda: totals(client.stats())["leased"] == 0, 20, "nothing to be leased any more")
