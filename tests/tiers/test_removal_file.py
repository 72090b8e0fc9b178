"""The file of removals: what was acknowledged is there after a kill at any moment, and nothing else is believed."""

import errno
import os
from pathlib import Path

import pytest

from kvstore.moving.removals import Struck
from kvstore.tiers.removal_file import Entry, RemovalFile, pack, unpack

DIGEST, OTHER = bytes([1]) * 32, bytes([2]) * 32
KEYS = [bytes([number]) * 32 for number in range(3, 8)]
A = Entry("default", DIGEST, KEYS[:2], 7)
B = Entry("other", OTHER, [], 0)


def struck(*entries: Entry) -> Struck:
    return Struck(entries).of({4: ("default", DIGEST), 5: ("other", OTHER)})


def test_what_is_appended_is_read_in_its_order(tmp_path: Path) -> None:
    file = RemovalFile(tmp_path / "removals")
    assert file.read() == ([], 0)
    file.append(pack(A))
    file.append(pack(B) + pack(A))
    assert RemovalFile(tmp_path / "removals").read() == ([A, B, A], 0)
    assert (tmp_path / "removals").stat().st_mode & 0o777 == 0o600
    file.delete()
    file.delete()
    assert not (tmp_path / "removals").exists()
    file.append(pack(B))
    assert RemovalFile(tmp_path / "removals").read() == ([B], 0)


def test_an_entry_is_there_whole_or_not_at_all_and_the_next_one_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "removals"
    whole, torn = pack(A), pack(B)
    for length in range(len(torn)):
        path.write_bytes(whole + torn[:length])
        file = RemovalFile(path)
        assert file.read() == ([A], length)
        file.append(pack(B))
        assert RemovalFile(path).read() == ([A, B], 0)
    for at in range(len(torn)):
        path.write_bytes(whole + torn[:at] + bytes([torn[at] ^ 1]) + torn[at + 1 :])
        assert [entry for entry, _ in unpack(path.read_bytes())] == [A]


def test_what_an_earlier_daemon_wrote_is_kept_by_one_that_has_not_read_it(tmp_path: Path) -> None:
    """Its SSD may never open, and what it removes is written down all the same."""
    RemovalFile(tmp_path / "removals").append(pack(A))
    RemovalFile(tmp_path / "removals").append(pack(B))
    assert RemovalFile(tmp_path / "removals").read() == ([A, B], 0)


def test_an_entry_that_could_not_be_synced_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RemovalFile(tmp_path / "removals")
    file.append(pack(A))

    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fails)
        with pytest.raises(OSError, match="Input/output"):
            file.append(pack(B))
    assert RemovalFile(tmp_path / "removals").read() == ([A], 0)
    file.append(pack(B))
    assert RemovalFile(tmp_path / "removals").read() == ([A, B], 0)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"of somebody else")
    (tmp_path / "removals").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        RemovalFile(tmp_path / "removals").append(pack(A))
    assert (tmp_path / "elsewhere").read_bytes() == b"of somebody else"


def test_a_removal_speaks_of_the_records_that_there_were() -> None:
    found = struck(A)
    assert found.has(4, KEYS[0], 7)
    assert found.has(4, KEYS[1], 1)
    assert not found.has(4, KEYS[0], 8), "it was stored again since"
    assert not found.has(4, KEYS[2], 1)
    assert not found.has(5, KEYS[0], 1)
    assert not found.has(6, KEYS[0], 1)


def test_the_removal_of_all_blocks_speaks_of_every_record_of_its_namespace() -> None:
    found = struck(A, B._replace(upto=9))
    assert found.has(5, KEYS[3], 9)
    assert not found.has(5, KEYS[3], 10)
    assert not found.has(4, KEYS[3], 1)


def test_a_mark_says_of_which_records_those_ahead_of_it_speak() -> None:
    """They were written down before it was known which there are."""
    unknown, mark = A._replace(upto=0), Entry("", bytes(32), (), 20)
    assert struck(unknown).has(4, KEYS[0], 1 << 60)
    assert struck(unknown, mark).has(4, KEYS[0], 20)
    assert not struck(unknown, mark).has(4, KEYS[0], 21)
    assert struck(mark, unknown).has(4, KEYS[0], 21)
    assert struck(unknown, mark, mark._replace(upto=90)).has(4, KEYS[0], 20)
    assert not struck(unknown, mark, mark._replace(upto=90)).has(4, KEYS[0], 21)
    assert not struck(A, mark).has(4, KEYS[0], 8), "what it knew is not known less"


def test_records_of_later_blocks_are_numbered_behind_all_that_the_file_speaks_of() -> None:
    """The records that had these numbers may be deleted: a block stored again with one of them would be struck."""
    assert struck(A, B, Entry("", bytes(32), (), 20)).last == 20
    assert struck(A).last == 7
    assert struck().last == 0
