"""Rows: the table of states, and links that hold both ways."""

import pytest

from kvstore.core.block import GROW_ROWS, MOVES, NONE, PINNED, BlockTable, State


def sealed(table: BlockTable) -> int:
    row = table.take()
    table.move(row, "commit")
    return row


def test_every_move_of_the_table_is_made_and_no_other() -> None:
    for state in State:
        for event in {event for _, event in MOVES}:
            table = BlockTable()
            row = table.take()
            table.state[row] = state
            expected = MOVES.get((state, event))
            if expected is None:
                with pytest.raises(AssertionError, match=event):
                    table.move(row, event)
                assert table.state[row] == state
            else:
                table.move(row, event)
                assert table.state[row] == expected


def test_rows_are_used_again_and_growth_keeps_what_is_there() -> None:
    table = BlockTable()
    rows = [sealed(table) for _ in range(GROW_ROWS + 1)]
    table.key[rows[0]] = b"first"
    assert len(set(rows)) == len(rows) == table.rows_used
    assert len(table) == 2 * GROW_ROWS
    table.move(rows[7], "drop")
    table.give_back(rows[7])
    assert table.take() == rows[7]
    assert table.key[rows[0]] == b"first"


def test_a_row_with_a_lease_or_a_state_is_not_given_back() -> None:
    table = BlockTable()
    row = sealed(table)
    with pytest.raises(AssertionError, match="in state 1"):
        table.give_back(row)
    table.move(row, "drop")
    table.leases[row] = 1
    with pytest.raises(AssertionError, match="with 1 leases"):
        table.give_back(row)


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_child_is_cut_from_the_start_the_middle_and_the_end(cut: int) -> None:
    table = BlockTable()
    parent, *children = (sealed(table) for _ in range(4))
    for child in children:
        table.add_child(parent, child)
    assert sorted(table.children(parent)) == sorted(children)
    gone = table.children(parent)[cut]
    table.cut(gone)
    left = [child for child in children if child != gone]
    assert sorted(table.children(parent)) == sorted(left)
    assert (table.parent[gone], table.sibling[gone], table.sibling_before[gone]) == (NONE,) * 3
    for child in left:
        table.cut(child)
    assert table.child[parent] == NONE
    table.cut(gone)
    assert table.parent[gone] == NONE


def test_a_lease_or_a_pin_is_a_hold() -> None:
    table = BlockTable()
    row = sealed(table)
    assert not table.held(row)
    table.leases[row] = 2
    assert table.held(row)
    table.leases[row] = 0
    table.marks[row] = PINNED
    assert table.held(row)
