"""Readers of an entry that the daemon is just writing: a block that moves between tiers is no miss."""

import struct
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

import pytest

from kvstore.tiers.index import CAPACITY_MIN, Location, TenantIndex
from kvstore_client.index import VECTOR_KEYS_MIN, WRITTEN_LOOKS, IndexReader
from kvstored.v1 import shm

LENGTH = 4096
COUNT = 2 * VECTOR_KEYS_MIN


def key_of(name: object) -> bytes:
    return blake2b(repr(name).encode(), digest_size=32).digest()


def at(number: int, flags: int = shm.HOST) -> Location:
    return (number, LENGTH, number * LENGTH, flags, 0, 1)


class Looked:
    """The reader's numbers; `done` is called at the n-th look at one of them."""

    def __init__(self, numbers: Any, word: int, looks: int, done: Callable[[], None]) -> None:
        self._numbers, self._word, self._left, self._done = numbers, word, looks, done

    def __getitem__(self, word: int) -> int:
        if word == self._word:
            self._left -= 1
            if not self._left:
                self._done()
        number: int = self._numbers[word]
        return number


@pytest.fixture
def index() -> Iterator[TenantIndex]:
    made = TenantIndex("kvstored-index-test", 77, CAPACITY_MIN)
    yield made
    made.close()


@pytest.fixture
def keys(index: TenantIndex) -> list[bytes]:
    """Published, each at its own number."""
    some = [key_of(i) for i in range(COUNT)]
    for i, key in enumerate(some):
        index.publish(key, at(i))
    return some


def being_written(index: TenantIndex, key: bytes, looks: int, done: Callable[[], None]) -> IndexReader:
    """A reader who comes in the middle of a write, which ends at its n-th look at the number (0: never)."""
    table = index._table
    word = table.find(key) >> 3
    table.numbers[word] += 1
    reader = IndexReader(index.descriptor, index.size_bytes)

    def written() -> None:
        table.numbers[word] -= 1
        done()

    reader.numbers = Looked(reader.numbers, word, looks, written)  # type: ignore[assignment]
    return reader


@pytest.mark.parametrize("place", [0, 5, COUNT - 1])
def test_an_entry_that_is_being_written_is_found_with_what_is_written(
    index: TenantIndex, keys: list[bytes], place: int
) -> None:
    key = keys[place]
    entry = being_written(index, key, 7, lambda: index.move(key, at(900, shm.SSD))).find(key)
    assert entry is not None
    assert entry[2:] == at(900, shm.SSD)[:4]
    assert not entry[1] & 1


@pytest.mark.parametrize("count", [VECTOR_KEYS_MIN - 1, COUNT])
@pytest.mark.parametrize("place", [0, 3, -1])
def test_a_run_does_not_end_at_an_entry_that_is_being_written(
    index: TenantIndex, keys: list[bytes], count: int, place: int
) -> None:
    some = keys[:count]
    key = some[place]
    reader = being_written(index, key, 7, lambda: index.move(key, at(900, shm.SSD)))
    flags = [shm.HOST] * count
    flags[place] = shm.SSD
    assert reader.leading(some, LENGTH) == (count, flags)


def test_a_block_that_is_withdrawn_meanwhile_is_a_miss(index: TenantIndex, keys: list[bytes]) -> None:
    key = keys[3]
    reader = being_written(index, key, 7, lambda: index.withdraw(key))
    assert reader.find(key) is None
    assert reader.leading(keys, LENGTH)[0] == 3


def test_a_slot_that_becomes_another_keys_meanwhile_is_a_miss(index: TenantIndex) -> None:
    """Two keys that are probed for at the same places: the second takes the place of the first."""
    first, second = (struct.pack("<QQ", 1, 3) + key_of(name)[:16] for name in "ab")

    def replaced() -> None:
        index.withdraw(first)
        index.publish(second, at(2))

    index.publish(first, at(1))
    reader = being_written(index, first, 5, replaced)
    assert reader.find(first) is None
    assert found_at(reader, second) == 2


def found_at(reader: IndexReader, key: bytes) -> int:
    entry = reader.find(key)
    assert entry is not None
    return entry[2]


def test_an_entry_whose_writer_is_gone_is_a_miss_after_a_bounded_number_of_looks(
    index: TenantIndex, keys: list[bytes]
) -> None:
    """As a daemon leaves it that was killed in the middle of a write."""
    reader = being_written(index, keys[2], 0, lambda: None)
    assert reader.find(keys[2]) is None
    assert -reader.numbers._left <= WRITTEN_LOOKS + 2  # type: ignore[attr-defined]
    assert reader.leading(keys, LENGTH)[0] == 2
