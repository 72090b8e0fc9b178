"""Blocks that only memory has, the most recently used first: in what order they are to be saved.

Found and ordered in steps, since the event loop has others to serve: each step puts its own rows
in order, and what was found is merged as it is taken.
"""

import heapq
from array import array
from collections.abc import Iterator

from kvstore.core.block import NONE, SEALED
from kvstore.core.link import Block, Link


class Hottest:
    """As they are when they are looked at."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._at = 0
        self._runs: list[array[int]] = []
        """Rows, each run in order."""

    def look(self, rows_max: int) -> bool:
        """Looks at so many rows; True if there are more."""
        table, link = self._link.memory.table, self._link
        stop = min(self._at + rows_max, len(table))
        found: list[int] = []
        for row in range(self._at, stop):
            key = table.key[row]
            if table.state[row] == SEALED and link.disk_row((table.namespace[row], key or b"")) == NONE:
                found.append(row)
        found.sort(key=self._age)
        self._runs.append(array("i", found))
        self._at = stop
        return stop < len(table)

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def __iter__(self) -> Iterator[Block]:
        table = self._link.memory.table
        for row in heapq.merge(*self._runs, key=self._age):
            key = table.key[row]
            if table.state[row] == SEALED and key is not None:
                yield table.namespace[row], key

    def _age(self, row: int) -> float:
        return -self._link.memory.table.used[row]
