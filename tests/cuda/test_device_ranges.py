"""Ranges against a set of bytes."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored_cuda.devices.errors import InvalidAddress
from kvstored_cuda.devices.ranges import Ranges

PLACES = 40
steps = st.lists(st.tuples(st.booleans(), st.integers(0, PLACES - 1), st.integers(1, 9)), max_size=30)


@given(steps)
def test_ranges_hold_what_was_added_and_nothing_across_two(steps: list[tuple[bool, int, int]]) -> None:
    ranges, owner = Ranges("here"), dict[int, int]()
    for add, address, size in steps:
        if add:
            free = not any(at in owner for at in range(address, address + size))
            with contextlib.nullcontext() if free else pytest.raises(InvalidAddress):
                ranges.add(address, size)
            owner.update(dict.fromkeys(range(address, address + size), address) if free else {})
        else:
            mine = [at for at, start in owner.items() if start == address]
            with contextlib.nullcontext() if mine else pytest.raises(InvalidAddress):
                assert ranges.remove(address) == len(mine)
            for at in mine:
                del owner[at]
        assert ranges.total_bytes == len(owner)
        assert len(ranges) == len(set(owner.values()))
        for at in range(PLACES):
            for length in (1, 2, 5):
                starts = {owner.get(byte) for byte in range(at, at + length)}
                assert ranges.holds(at, length) is (len(starts) == 1 and None not in starts)
