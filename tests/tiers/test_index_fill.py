"""An index that is filled at once is the one that is filled block by block, as far as any reader can tell."""

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import pytest

from kvstore.tiers.index import Indexes
from kvstored.v1 import shm

PAGE = 4096
TENANT = 0


@pytest.fixture
def indexes() -> Iterator[Indexes]:
    made = Indexes(7, 0)
    yield made
    made.close()


def keys_of(count: int) -> list[bytes]:
    return [blake2b(b"%d" % n, digest_size=32).digest() for n in range(count)]


def collide(count: int) -> list[bytes]:
    """Keys with one probe: all of them look at the same places."""
    return [shm.HASHES.pack(5, 9)[:16] + n.to_bytes(16, "little") for n in range(1, count + 1)]


def fill(indexes: Indexes, keys: list[bytes]) -> None:
    slots = np.arange(len(keys), dtype=np.uint64)
    refs = slots % np.uint64(100) | (slots // np.uint64(100) + np.uint64(1)) << np.uint64(32)
    lengths = np.full(len(keys), PAGE - 96)
    indexes.fill(TENANT, keys, refs, slots % np.uint64(100) * np.uint64(PAGE), lengths, np.full(len(keys), 3))


def place(n: int) -> tuple[int, int, int]:
    return 1 + n // 100, n % 100 * PAGE, PAGE - 96


@pytest.mark.parametrize("count", [0, 1, 700, 5000])
def test_every_block_is_found_where_it_is_and_no_other(indexes: Indexes, count: int) -> None:
    keys = keys_of(count)
    indexes.expect(TENANT, count)
    fill(indexes, keys)
    assert [indexes.find(TENANT, key) for key in keys] == [place(n) for n in range(count)]
    assert indexes.find(TENANT, blake2b(b"other", digest_size=32).digest()) is None
    _, _, live, tombstones, waiting, _ = indexes.figures(TENANT)
    assert (live, tombstones, waiting) == (count, 0, 0)


def test_slots_are_as_a_publish_leaves_them(indexes: Indexes) -> None:
    one, many = Indexes(7, 0), indexes
    keys = keys_of(1)
    fill(many, keys)
    one.publish(TENANT, keys[0], 1 << 32, 0, PAGE - 96, 3)
    beginnings = [bytes(each.of(TENANT)._table.bytes[shm.HEADER_BYTES :]) for each in (one, many)]
    assert beginnings[0] == beginnings[1]
    one.close()


def test_what_comes_and_goes_afterwards_is_found_and_gone(indexes: Indexes) -> None:
    keys = keys_of(900)
    indexes.expect(TENANT, 1000)
    fill(indexes, keys[:600])
    for key in keys[::2][:200]:
        indexes.withdraw(TENANT, key)
    for n, key in enumerate(keys[600:], 600):
        indexes.publish(TENANT, key, (1 + n // 100) << 32 | n % 100, n % 100 * PAGE, PAGE - 96, 3)
    gone = set(keys[::2][:200])
    assert [indexes.find(TENANT, key) for key in keys] == [None if k in gone else place(n) for n, k in enumerate(keys)]


def test_more_than_a_probe_holds_wait_and_are_no_error(indexes: Indexes) -> None:
    keys = collide(shm.PROBE_MAX + 6)
    fill(indexes, keys)
    found = [indexes.find(TENANT, key) for key in keys]
    assert sum(at is not None for at in found) == shm.PROBE_MAX
    assert all(at in (None, place(n)) for n, at in enumerate(found))
    assert indexes.figures(TENANT)[4] == 6
    for key in keys:
        indexes.withdraw(TENANT, key)
    assert indexes.figures(TENANT)[2] == 0
