"""The life of a block, and the table that all blocks are rows of.

    reserved --commit--> sealed --drop--> gone
        |                  |
        +--abort--> gone   +--drop while leased--> doomed --last release--> gone
                           |
                           +--drop while blocks hang from it--> missing --last child gone--> gone
                                                                   |
                                                                   +--commit--> sealed

A reserved block has no row: it is a slot granted to a session (segments.py), invisible
to everybody. A sealed block is a row, found by its key. A doomed one has lost its key
(removed, cleared or expired) and waits for its last lease. A missing one has no bytes and
no slot: it stands in for a parent that is not here (families.py); one that is leased too
leaves its row to its children and is doomed in another. `gone` is a free row.

Rows live in columns of machine numbers and one dict a tenant from key to row: a million
blocks are some 70 MB of columns and 170 MB of keys and dict, and nothing for the garbage
collector to walk. (A million slotted objects alone are 160 MB and a pause of 0.1 s.)
"""

from array import array
from enum import IntEnum

NONE = -1
"""No row: no parent, no child, no neighbour."""

GROW_ROWS = 1024

HITS_MAX = 0xFFFF
"""Hits are counted up to here."""


class State(IntEnum):
    """What a row is. `LIST` rows are list heads of an eviction policy, never blocks."""

    GONE = 0
    SEALED = 1
    DOOMED = 2
    LIST = 3
    MISSING = 4


MOVES = {
    (State.GONE, "commit"): State.SEALED,
    (State.SEALED, "drop"): State.GONE,
    (State.SEALED, "drop leased"): State.DOOMED,
    (State.DOOMED, "release"): State.GONE,
    (State.GONE, "list"): State.LIST,
    (State.GONE, "doom"): State.DOOMED,
    (State.GONE, "miss"): State.MISSING,
    (State.SEALED, "leave children"): State.MISSING,
    (State.MISSING, "commit"): State.SEALED,
    (State.MISSING, "forget"): State.GONE,
}
"""Every legal change of a row's state; anything else is a bug and asserts."""

_ILLEGAL = 0xFF
_NEXT = {
    event: bytes(MOVES.get((state, event), _ILLEGAL) for state in State) for event in sorted({e for _, e in MOVES})
}
"""`MOVES` by event, then by state as a number: a commit does not hash enums."""

SEALED, DOOMED, MISSING = int(State.SEALED), int(State.DOOMED), int(State.MISSING)
"""For loops over many rows: a name of this module is found faster than a member of an enum."""

PINNED, HINTED = 1, 2
"""Bits of `marks`: pinned until a time; has a time to live."""


class BlockTable:
    """Columns of all blocks; row numbers are reused.

    key        the block's key (list of bytes); None for rows that are neither sealed nor missing
    state      a State
    marks      PINNED and HINTED
    listed     which list of the eviction policy it is in (evict.py)
    place      slot reference in the slab (segment << 32 | slot)
    namespace  number of its namespace
    leases     holds on it, over all sessions
    used       when it was last used, seconds of the daemon's clock
    stored     when it was committed, the same in 32 bits: right to a second on a machine up for 100 days
    hits       times it was read or touched, up to HITS_MAX
    depth      place in its chain, root 0; more than its parent's, and of one that is missing less than its children's
    conversation   number of the one it was last stored or used for (conversations.py); 0 none
    parent, child, sibling, sibling_before   the prefix tree, as rows
    before, after                            the eviction policy's lists
    """

    def __init__(self) -> None:
        self.key: list[bytes | None] = []
        self.state = bytearray()
        self.marks = bytearray()
        self.listed = bytearray()
        self.place = array("Q")
        self.namespace = array("I")
        self.leases = array("I")
        self.hits = array("H")
        self.depth = array("I")
        self.conversation = array("I")
        self.used = array("d")
        self.stored = array("f")
        self.parent = array("i")
        self.child = array("i")
        self.sibling = array("i")
        self.sibling_before = array("i")
        self.before = array("i")
        self.after = array("i")
        self.free: array[int] = array("i")

    @property
    def rows_used(self) -> int:
        """Rows that are blocks or list heads."""
        return len(self.key) - len(self.free)

    def move(self, row: int, event: str) -> None:
        """Changes a row's state by the table above."""
        state = _NEXT[event][self.state[row]]
        assert state != _ILLEGAL, f"row {row}: {event!r} in state {self.state[row]}"
        self.state[row] = state

    def held(self, row: int) -> bool:
        """Whether a lease or a pin keeps a block from eviction."""
        return bool(self.leases[row] or self.marks[row] & PINNED)

    def take(self) -> int:
        """A free row, all links cleared."""
        if not self.free:
            self.free.extend(range(len(self) + GROW_ROWS - 1, len(self) - 1, -1))
            self._grow(GROW_ROWS)
        return self.free.pop()

    def take_run(self, count: int) -> int:
        """The first of so many free rows in a row, all links cleared; each is to be used."""
        first = len(self.key)
        self._grow(count)
        return first

    def give_back(self, row: int) -> None:
        """Frees a row that is GONE."""
        assert not self.state[row], f"row {row} freed in state {self.state[row]}"
        assert not self.leases[row], f"row {row} freed with {self.leases[row]} leases"
        self.key[row] = None
        self.marks[row] = 0
        self.free.append(row)

    def add_child(self, parent: int, row: int) -> None:
        """Hangs `row` under `parent`."""
        first = self.child[parent]
        self.parent[row] = parent
        self.sibling[row] = first
        if first != NONE:
            self.sibling_before[first] = row
        self.child[parent] = row

    def cut(self, row: int) -> None:
        """Takes `row` away from its parent, if it has one."""
        parent = self.parent[row]
        if parent == NONE:
            return
        before, after = self.sibling_before[row], self.sibling[row]
        if before == NONE:
            self.child[parent] = after
        else:
            self.sibling[before] = after
        if after != NONE:
            self.sibling_before[after] = before
        self.parent[row] = self.sibling[row] = self.sibling_before[row] = NONE

    def forget_conversations(self) -> None:
        """No row is of a conversation any more."""
        self.conversation = array("I", bytes(self.conversation.itemsize * len(self)))

    def children(self, row: int) -> list[int]:
        """Rows whose parent is `row`."""
        found = []
        child = self.child[row]
        while child != NONE:
            found.append(child)
            child = self.sibling[child]
        return found

    def __len__(self) -> int:
        return len(self.key)

    def _grow(self, count: int) -> None:
        self.key.extend([None] * count)
        for column in (self.state, self.marks, self.listed):
            column.extend(bytes(count))
        for numbers in (self.place, self.namespace, self.leases, self.hits, self.depth, self.conversation):
            numbers.frombytes(bytes(count * numbers.itemsize))
        for times in (self.used, self.stored):
            times.frombytes(bytes(count * times.itemsize))
        links = (self.parent, self.child, self.sibling, self.sibling_before, self.before, self.after)
        for link in links:
            link.frombytes(b"\xff" * (count * link.itemsize))  # NONE
