"""What keeps the bytes of blocks by segment and offset: extents.py, or blobs.py."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Damaged(Exception):
    """What was read is not what was written, and known to be so without its checksum. `str()` says how."""


class Place(NamedTuple):
    """Slots that follow on each other in one segment."""

    segment: int
    slot_bytes: int
    first: int
    slots: int


class Payload(Protocol):
    """Safe in any thread. Views, offsets and sizes are whole pages."""

    direct_refused: str
    """Why bytes pass through the page cache although they should not; empty otherwise."""

    def make(self, segment: int, size_bytes: int) -> None:
        """A segment of this size. Raises OSError or CatalogueError, leaving none."""

    def drop(self, segment: int) -> None:
        """Removes a segment; nothing where there is none. Raises OSError or CatalogueError."""

    def existing(self) -> dict[int, int]:
        """Segment -> its bytes, as far as they are there. Raises OSError."""

    def physical_bytes(self) -> int:
        """What all segments take on the disk besides the catalogue. Raises OSError."""

    def write(self, segment: int, offset: int, view: memoryview) -> int:
        """Writes a whole slot; on the disk after `sync` and the next write to the catalogue. Raises as `make`.

        Answers what it takes on the disk with all that belongs to it; 0 where that is its slot.
        """

    def vacate(self, places: Iterable[Place]) -> None:
        """Slots that are nobody's need not keep their bytes. Raises as `make`."""

    def collect(self, size_bytes: int) -> None:
        """Gives back what slots had before, of about so much of the disk, which it takes once more meanwhile.

        Raises as `make`.
        """

    def read(self, segment: int, offset: int, view: memoryview) -> None:
        """Fills `view`, a whole slot. Raises as `make`, and Damaged."""

    def sync(self, segments: Iterable[int]) -> dict[int, str]:
        """Before records of what was written are: segment -> what went wrong, for those where it did."""

    def probe(self) -> None:
        """Writes something and reads it back the way blocks go. Raises as `make`."""

    def close(self) -> None:
        """To be called when no worker uses it."""
