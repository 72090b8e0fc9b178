"""What is on the disk: packed, unpacked, and the same as ever."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.ssd import format as disk
from kvstore.tiers.ssd.format import NamespaceRow, Record, SegmentRow

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
KEYS = st.binary(min_size=32, max_size=32)
SECONDS = st.floats(0, 1e11)
RECORDS = st.builds(
    Record, U32, KEYS, U32, U32, U32, U64, st.one_of(st.just(b""), KEYS), U32, SECONDS, SECONDS, U32, SECONDS, U64, U32
)


@given(RECORDS)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    assert disk.unpack_record(*disk.pack_record(record)) == record


@given(RECORDS, SECONDS, U32)
def test_a_use_changes_last_use_and_hits_only(record: Record, used: float, hits: int) -> None:
    key, value = disk.pack_record(record)
    assert disk.unpack_record(key, disk.with_use(value, used, hits)) == record._replace(used=used, hits=hits)
    assert disk.place_of(value) == (record.segment, record.slot)


def test_hits_beyond_what_is_counted_stay_at_the_most() -> None:
    record = Record(1, bytes(32), 1, 0, 1, 0, b"", 0, 0.0, 0.0, 2**40, 0.0, 1)
    packed = disk.pack_record(record)
    assert disk.unpack_record(*packed).hits == disk.HITS_MAX
    assert disk.unpack_record(packed[0], disk.with_use(packed[1], 0.0, 2**50)).hits == disk.HITS_MAX


def test_version_1_is_these_bytes() -> None:
    """A change of any of them is another FORMAT_VERSION."""
    assert disk.FORMAT_VERSION == 1
    record = Record(7, bytes(range(32)), 2, 3, 4, 5, b"p" * 32, 6, 1.0, 2.0, 9, 3.0, 8)
    key, value = disk.pack_record(record)
    assert key.hex() == "62" + "00000007" + bytes(range(32)).hex()
    assert value == struct.pack("<IIQQQIIddd", 2, 3, 4, 5, 8, 6, 9, 1.0, 2.0, 3.0) + b"p" * 32
    assert disk.PACKED_VERSION == 2
    assert disk.pack_record(record._replace(packed=10))[1][8:16] == struct.pack("<II", 4, 10)
    assert disk.pack_row(SegmentRow(1, 8192, 4096, "t")) == (
        b"s\0\0\0\1",
        b'{"number":1,"size_bytes":8192,"slot_bytes":4096,"tenant":"t"}',
    )
    row = NamespaceRow(1, "t", b"\xab" * 32, 4096, 16, "model")
    assert disk.pack_row(row) == (
        b"n\0\0\0\1",
        b'{"number":1,"tenant":"t","digest":"'
        + b"ab" * 32
        + b'","block_bytes":4096,"block_tokens":16,"label":"model"}',
    )
    assert disk.checksum_of(memoryview(b"block"), bytes(range(32))) == 0x34826A882E0637E3


def test_rows_come_back_as_they_were() -> None:
    namespace = NamespaceRow(2**32 - 1, "team, ä", bytes(range(32)), 2 << 20, 256, 'a "label"\n')
    segment = SegmentRow(2**32 - 1, 1 << 40, 0, "")
    assert disk.unpack_namespace(disk.pack_row(namespace)[1]) == namespace
    assert disk.unpack_segment(disk.pack_row(segment)[1]) == segment


def test_the_version_comes_after_every_other_key() -> None:
    """`Catalogue.records` relies on it: a key that is no record's says that all records were seen."""
    others = [disk.record_key(2**32 - 1, b"\xff" * 32), disk.namespace_key(2**32 - 1), disk.segment_key(2**32 - 1)]
    assert max(*others, disk.PROBE_KEY) < disk.VERSION_KEY
    assert others[0] == min(*others, disk.PROBE_KEY)


def test_one_block_under_two_keys_has_two_checksums() -> None:
    block = memoryview(bytes(4096))
    assert disk.checksum_of(block, b"a" * 32) != disk.checksum_of(block, b"b" * 32)


@pytest.mark.parametrize("number", [1, 99_999_999, 2**32 - 1])
def test_a_segment_is_found_by_its_name(number: int) -> None:
    assert disk.segment_number(disk.segment_name(number)) == number


@pytest.mark.parametrize(
    "name", ["segment-1.kv", "segment-00000001.kv.old", "segment-0000000001.kv", "lock", "catalogue", "segment-x.kv"]
)
def test_other_names_are_no_segments(name: str) -> None:
    assert disk.segment_number(name) is None
