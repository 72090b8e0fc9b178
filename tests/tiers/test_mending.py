"""Where there is no room for rows, what is written down is whole or nothing at every moment, and whole in the end."""

import errno
import os
import random
from collections.abc import Iterator

import pytest

from kvstore import mending
from kvstore.core.block import SEALED
from kvstore.core.holds import Namespace
from kvstore.mending import Mending
from kvstore.tiers import ledger as layout
from kvstore.tiers.ledger_reader import rows_name
from kvstored.v1.errors import ResourceExhausted
from tests.core.scene import PAGE, key_of
from tests.tiers.test_ledger import Life

STEPS = 200


class Full(Life):
    """Its rows have no room while `full`."""

    full = False

    def rows_for(self, number: int, size_bytes: int) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "no room")
        if rows_name(number) in self.memory:
            os.close(self.memory.pop(rows_name(number)))
        return super().rows_for(number, size_bytes)

    def check(self) -> None:
        """Of a segment that is believed every block is known, where it is, and no other."""
        left, table = self.left(), self.scene.store.table
        believed = set(left.rows)
        found = {(row["key"].tobytes(), int(row["ref"])) for row in left.blocks()}
        there = {
            (table.key[row], table.place[row])
            for row in range(len(table))
            if table.state[row] == SEALED and table.place[row] >> 32 in believed
        }
        assert found == there
        assert believed.isdisjoint(self.ledger.unwritten)


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Iterator[Full]:
    monkeypatch.setattr(mending, "RETRY_S", 0.0)
    monkeypatch.setattr(mending, "ROWS", 2)
    made = Full()
    yield made
    made.close()


def change(life: Full, chance: random.Random, other: Namespace) -> None:
    """A block more or less, of one of two block sizes, so that segments go from one to the other."""
    scene, what = life.scene, chance.random()
    keys = list(scene.tenant.rows)
    if what < 0.3 and keys:
        for ns in (scene.ns, other):
            scene.store.remove(ns, chance.sample(keys, min(5, len(keys))))
        return
    ns = scene.ns if what < 0.7 else other
    try:
        (ref,) = scene.reserve(1, ns)
    except ResourceExhausted:
        return
    after = chance.choice(keys) if keys and chance.random() < 0.7 else b""
    depth = scene.store.table.depth[scene.tenant.rows[after]] + 1 if after in scene.tenant.rows else 0
    scene.commit([key_of(f"{chance.random()}")], [ref], after=after, depth=depth, ns=ns)


@pytest.mark.parametrize("seed", range(3))
def test_a_segment_is_believed_with_all_that_is_in_it_or_not_at_all(life: Full, seed: int) -> None:
    chance, mending = random.Random(seed), Mending(life.scene.store, life.ledger)
    print("seed", seed)
    other = life.scene.namespace("other", 2 * PAGE)
    for _ in range(STEPS):
        if chance.random() < 0.05:
            life.full = not life.full
        if chance.random() < 0.05 and life.ledger.segments:
            _loses(life, chance.choice(sorted(life.ledger.segments)))
        if chance.random() < 0.5:
            mending.step()
        change(life, chance, other)
        life.check()
    life.full = False
    while life.ledger.trouble:
        mending.step()
        life.check()
    assert set(life.left().rows) == set(life.scene.store.segments.live)
    life.scene.check()


def _loses(life: Full, number: int) -> None:
    """As where its rows have no room when it is given to a pool."""
    rows = life.ledger.segments[number]
    life.ledger._strike(number)
    life.ledger.unwritten[number] = rows.size_bytes, rows.inode


def test_a_number_that_was_had_is_known_also_where_its_segment_is_not_written_down(life: Full) -> None:
    """Given to another segment, a client's holds in the first would be taken for holds in that."""
    life.full = True
    life.ledger.made(900, 4096, 1)
    assert 900 in life.ledger.unwritten
    assert life.left().found.last_segment == 900


def test_a_session_is_written_down_without_further_memory(life: Full, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that may come have the beginning of their logs from the start: others may have filled the tmpfs."""
    made = []
    populate = type(life.ledger.mapping).populate

    def counted(mapping: object, *, write: bool, start: int = 0, size_bytes: int | None = None) -> None:
        made.append((start, size_bytes))
        populate(life.ledger.mapping, write=write, start=start, size_bytes=size_bytes)

    before = os.fstat(life.descriptor).st_blocks
    monkeypatch.setattr(type(life.ledger.mapping), "populate", counted)
    for nonce in range(100, 140):
        life.open(nonce)
    assert made
    assert os.fstat(life.descriptor).st_blocks == before
    assert layout.FIRST_BYTES <= before * 512 <= layout.FIRST_BYTES + (1 << 16)
