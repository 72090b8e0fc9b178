"""What is to be done with bytes between memory and the SSD: jobs for workers, each with a number that its report names.

Slots are references (segment << 32 | slot), `source` and `target` in the slab, `extent` in the
files of the SSD. A slot and an extent named here are nobody else's until the report.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.core.holds import Namespace
from kvstore.core.segments import DropSegment, MakeSegment

Name = tuple[int, bytes]
"""Number of a namespace in the SSD's store, and key: what a record is found by."""


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """Write a slot to an extent, then its record; report to `Movement.wrote`. Times are the daemon's clock."""

    number: int
    source: int
    extent: int
    slot_bytes: int
    namespace: Namespace
    """As the SSD's store has it."""
    key: bytes
    parent: bytes
    depth: int
    stored: float
    used: float
    hits: int
    until: float
    """When its life ends; 0 never."""
    replaces: Name | None
    """Whose record may still say that it is in that extent."""


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """Read an extent into a slot and verify it; report to `Movement.read`."""

    number: int
    target: int
    extent: int
    slot_bytes: int
    length: int
    key: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class VerifyBlock:
    """Read an extent into memory of the worker's own and verify it; report to `Movement.read`."""

    number: int
    extent: int
    slot_bytes: int
    length: int
    key: bytes
    checksum: int
    namespace: Namespace
    """As the SSD's store has it."""


@dataclass(frozen=True, slots=True)
class ForgetRecords:
    """Delete records; report to `Movement.forgotten`."""

    number: int
    names: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class VacateSlots:
    """What is in these free slots is garbage: extent and slot_bytes of each; report to `Movement.vacated`."""

    number: int
    slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ProbeTier:
    """Try whether files and catalogue can be written and read again; report to `Movement.probed`."""


Move = WriteBlock | ReadBlock | VerifyBlock | ForgetRecords | VacateSlots | ProbeTier | MakeSegment | DropSegment
"""Segments here are files."""


class Watcher(Protocol):
    """Who moves blocks between this store and another tier is told of rows that came and were used."""

    def stored(self, new: Sequence[int], known: Sequence[int]) -> None:
        """New blocks, and blocks that somebody stored again."""

    def used(self, rows: Sequence[int]) -> None:
        """Blocks were read, or a client says so."""
