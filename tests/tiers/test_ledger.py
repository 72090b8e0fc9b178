"""The ledger: whenever a process dies, an entry that is there is whole; too much may be held, never too little."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.adopt import record
from kvstore.core.holds import HOLDS_MAX, Session
from kvstore.tiers import ledger as layout
from kvstore.tiers.ledger import Ledger
from kvstore.tiers.ledger_reader import Left, Unusable, read, read_header, rows_name
from kvstore.tiers.slab import sealed_memfd, segment_name
from kvstored.v1.errors import ResourceExhausted
from tests.core.scene import Scene, key_of


class Died(BaseException):
    """In place of SIGKILL."""


class Life:
    """A scene that is written down, and what the next daemon would read of it."""

    def __init__(self) -> None:
        self.scene = Scene(64, 8, ready=False)
        self.memory: dict[str, int] = {}
        self.descriptor = sealed_memfd("kvstored-test-ledger", layout.LEDGER_BYTES)
        self.ledger = Ledger(os.dup(self.descriptor))
        self.ledger.rows_for = self.rows_for
        store = self.scene.store
        self.ledger.begin(store.segments.size_bytes, store.segments.page_bytes, os.getpid(), 1, bytes(16))
        self.ledger.tenant(self.scene.tenant)
        self.ledger.namespace(self.scene.ns)
        for job in store.take_jobs():
            size_bytes = store.segments.making[job.segment]
            found = self.memory[segment_name(job.segment)] = sealed_memfd("kvstored-test-segment", size_bytes)
            self.ledger.made(job.segment, size_bytes, os.fstat(found).st_ino)
            store.segments.made(job.segment)
        record(store, self.ledger)
        self.session = self.open(7)

    def rows_for(self, number: int, size_bytes: int) -> int:
        found = self.memory[rows_name(number)] = sealed_memfd("kvstored-test-rows", layout.rows_bytes(size_bytes))
        return os.dup(found)

    def open(self, nonce: int) -> Session:
        return self.scene.store.open_session(
            self.scene.tenant, "c", self.scene.now, local=True, read_only=False, pid=os.getpid(), nonce=nonce, born=9
        )

    def left(self) -> Left:
        return read(Ledger(os.dup(self.descriptor)), dict(self.memory), read_header(self.descriptor).last_segment)

    def keys(self) -> dict[bytes, int]:
        return {row["key"].tobytes(): int(row["ref"]) for row in self.left().blocks()}

    def close(self) -> None:
        for descriptor in (*self.memory.values(), self.descriptor):
            os.close(descriptor)


@pytest.fixture
def life() -> Iterator[Life]:
    made = Life()
    yield made
    made.close()


class Countdown:
    """A writer that dies at its n-th store; every store is seen by the next daemon, as a process's are."""

    def __init__(self, stores: int) -> None:
        self.left = stores

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Died


class Stores:
    """Words that are stored one by one, as long as the countdown lasts."""

    def __init__(self, words: "memoryview", countdown: Countdown) -> None:
        self._words = words
        self._countdown = countdown

    def __getitem__(self, at: int) -> int:
        return int(self._words[at])

    def __setitem__(self, at: "int | slice", value: "int | memoryview") -> None:
        if isinstance(at, slice):
            assert isinstance(value, memoryview)
            for place, word in zip(range(at.start, at.stop), value.tolist(), strict=True):
                self._countdown.step()
                self._words[place] = word
            return
        assert isinstance(value, int)
        self._countdown.step()
        self._words[at] = value


class Fields:
    """A struct of which, when the countdown ends, half is written."""

    def __init__(self, of: struct.Struct, countdown: Countdown) -> None:
        self._of = of
        self._countdown = countdown
        self.unpack_from = of.unpack_from

    def pack_into(self, buffer: memoryview, at: int, *values: object) -> None:
        try:
            self._countdown.step()
        except Died:
            whole = self._of.pack(*values)
            buffer[at : at + len(whole) // 2] = whole[: len(whole) // 2]
            raise
        self._of.pack_into(buffer, at, *values)


class Answered:
    """What clients were told, and have asked nothing else of since: the next daemon must know it."""

    def __init__(self) -> None:
        self.granted: set[int] = set()
        self.leased: set[int] = set()
        self.blocks: dict[bytes, int] = {}


def live(life: Life, told: Answered) -> None:
    """A session as it goes: reserves, commits, leases, removes, gives back; another one of its process takes over."""
    scene, session, keys = life.scene, life.session, [key_of(f"k{i}") for i in range(4)]

    def take(count: int) -> list[int]:
        refs = scene.reserve(count, session=session)
        told.granted.update(refs)
        return refs

    def give(refs: list[int]) -> None:
        told.granted.difference_update(refs)
        scene.store.abort(session, refs)

    def commit(some: list[bytes], refs: list[int]) -> None:
        told.granted.difference_update(refs)
        scene.commit(some, refs, session=session)
        told.blocks.update(zip(some, refs, strict=True))

    first = take(3)
    commit(keys[:2], first[:2])
    told.leased.update(scene.acquire(keys[:2], session=session))
    told.blocks.pop(keys[0])
    assert scene.store.remove(scene.ns, keys[:1]) == 1
    give(first[2:])
    again = take(60)  # all that is left, so also what was had before
    assert not told.leased & set(again)
    commit(keys[2:], again[:2])
    give(again[2:30])
    scene.store.pin(scene.ns, keys[2:3], 60.0, scene.now)
    leased = sorted(told.leased)
    heir = life.open(8)
    kept = again[30:34]
    told.granted.intersection_update(kept)
    told.leased.intersection_update(leased[:1])
    scene.store.resume(session, heir, leased[:1], kept)
    life.session = session = heir
    give(kept[:1])
    told.leased.clear()
    scene.store.release(session, leased[:1])
    take(16)


def check_what_is_left(life: Life, told: Answered) -> None:
    left = life.left()
    rows = {row["key"].tobytes(): row for row in left.blocks()}
    granted = {ref for session in left.found.sessions for ref in session.granted}
    leased = {ref for session in left.found.sessions for ref in session.leased}
    assert told.granted <= granted
    assert told.leased <= leased
    for key, ref in told.blocks.items():
        assert rows[key]["ref"] == ref
    names = {key_of(f"k{i}") for i in range(4)}
    for key, row in rows.items():
        assert key in names, "half of a row is a row"
        assert int(row["ref"]) not in told.granted, "a row of a slot that somebody writes to"
        assert (row["namespace"], row["parent"].tobytes() in {bytes(32), *names}) == (1, True)
    assert len({int(row["ref"]) for row in rows.values()}) == len(rows)
    for session in left.found.sessions:
        assert (session.pid, session.born, session.client) == (os.getpid(), 9, "c"), "half of a session is a session"


def test_whatever_store_a_daemon_dies_at_the_next_one_knows_all_that_was_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every store of a session's life in turn is the last; a store of fields is cut in half."""
    stores = 0
    monkeypatch.setattr(layout, "LOG_FIRST", 8)
    ended = False
    while not ended:
        life, told, countdown = Life(), Answered(), Countdown(stores)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(life.ledger, "numbers", Stores(life.ledger.numbers, countdown))
                for rows in life.ledger.segments.values():
                    rows.numbers = Stores(rows.numbers, countdown)  # type: ignore[assignment]
                for name in ("_ROW", "SESSION", "SEGMENT"):
                    patch.setattr(layout, name, Fields(getattr(layout, name), countdown))
                try:
                    live(life, told)
                    ended = True
                except Died:
                    pass
            check_what_is_left(life, told)
        finally:
            life.close()
        stores += 1
    assert stores > 60, f"only {stores} stores were seen"


def test_a_session_with_all_the_holds_it_may_have_is_written_down(life: Life) -> None:
    """Its log grows, and is written anew when it is full; what is released leaves it."""
    scene, keys = life.scene, [key_of(f"{i}") for i in range(16)]
    scene.put(keys, session=life.session)
    life.scene.store.abort(life.session, list(life.session.granted))
    for _ in range(HOLDS_MAX // 16):
        scene.acquire(keys, session=life.session)
    with pytest.raises(ResourceExhausted, match=f"at most {HOLDS_MAX} together"):
        scene.acquire(keys[:1], session=life.session)
    (found,) = life.left().found.sessions
    assert sum(found.leased.values()) == HOLDS_MAX
    refs = sorted(life.session.leased)
    for ref in refs:
        for _ in range(HOLDS_MAX // 16 // 64):
            life.scene.store.release(life.session, [ref] * 64)
    (found,) = life.left().found.sessions
    assert found.leased == {}
    life.scene.store.end_session(life.session, process_gone=True)
    assert life.left().found.sessions == []


def test_where_there_is_no_memory_for_a_log_nothing_is_held(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the other way round: a hold that is not written down would be reused."""
    scene, keys = life.scene, [key_of(f"{i}") for i in range(16)]
    scene.put(keys, session=life.session)

    def no_memory(**_: object) -> None:
        raise OSError(14, "Bad address")

    monkeypatch.setattr(life.ledger.mapping, "populate", no_memory)

    def acquire_on() -> None:
        for _ in range(100):
            scene.acquire(keys, session=life.session)

    with pytest.raises(ResourceExhausted, match="who holds what"):
        acquire_on()
    (found,) = life.left().found.sessions
    assert found.leased == life.session.leased
    with pytest.raises(ResourceExhausted, match="cannot be written down"):
        life.open(9)
    scene.check()


def test_a_segment_whose_rows_have_no_memory_is_not_left_to_the_next_daemon(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that cannot be struck out any more must not be read."""
    first = next(iter(life.scene.store.segments.unowned))

    def no_memory(**_: object) -> None:
        raise OSError(14, "Bad address")

    monkeypatch.setattr(life.ledger.segments[first].mapping, "populate", no_memory)
    keys = [key_of(f"{i}") for i in range(12)]
    life.scene.put(keys, session=life.session)
    left = life.left()
    assert first not in {segment.id for segment in left.found.segments}
    assert 0 < len(list(left.blocks())) < 12
    life.scene.check()


@pytest.mark.parametrize(("at", "word", "why"), [(0, 1, "not finished"), (8, 99, "version 99")])
def test_a_ledger_that_cannot_be_read_says_why(life: Life, at: int, word: int, why: str) -> None:
    life.ledger.numbers[at >> 3] = word
    with pytest.raises(Unusable, match=why):
        life.left()


def test_a_ledger_of_another_size_is_none(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(bytes(4096))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(Unusable, match="another release"):
            read_header(descriptor)
    finally:
        os.close(descriptor)
