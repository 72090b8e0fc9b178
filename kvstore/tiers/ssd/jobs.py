"""What the SSD's workers are asked to do, and what they answer.

Every job is answered by one outcome, whatever happens, unless `SsdTier.close` returns it as
one that did not end. `error` is a sentence for people, empty where all went well. Until its
outcome is there a job's `view` belongs to the workers: its slot is not to be reused.
"""

from dataclasses import dataclass
from typing import Literal

from kvstore.tiers.ssd.catalogue import Use
from kvstore.tiers.ssd.format import NamespaceRow, Record, SegmentRow
from kvstore.tiers.ssd.payload import Place

OK, MISMATCH = "ok", "mismatch"


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Put a block into an extent. Answered by `Wrote` once payload and record are on the disk.

    After an error the extent has anything in it, and a restart may find the record or not:
    if it does, its bytes verify, or a record with a higher sequence has the slot.

    `record.checksum` is not looked at: the workers compute it. `view` is the whole slot of
    the slab, in whole pages; `offset` is where the extent begins in `record.segment`.
    `replaces` is the catalogue's key (`record_key`) of the block that had this very slot of
    this segment before, None where it had none or its record is gone already. Where a
    segment was cut anew, its former records go by `Forget`.
    """

    number: int
    record: Record
    view: memoryview
    offset: int
    replaces: bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Fetch an extent into `view` (a whole slot of the slab) and verify its first `length` bytes; `ReadDone`."""

    number: int
    segment: int
    offset: int
    view: memoryview
    length: int
    key: bytes
    checksum: int


@dataclass(frozen=True, slots=True, eq=False)
class Forget:
    """Delete records, by their keys in the catalogue; `Forgotten` once that is on the disk.

    Not for a block whose `Write` is under way: its record would come after.
    """

    number: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Touch:
    """Write last uses and hits into the records that are there, soon on the disk; `Touched`."""

    number: int
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Describe:
    """Put rows of namespaces, or of segments that are cut anew; `Described` once they are on the disk.

    In the log they come before the records of every `Write` that is submitted later.
    """

    number: int
    rows: tuple[NamespaceRow | SegmentRow, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Make:
    """Make a segment's file and its row; `Made`."""

    segment: int
    size_bytes: int
    slot_bytes: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Drop:
    """Remove a segment's row, then its file; `Dropped`. What is read from it at the time is read to its end."""

    segment: int


@dataclass(frozen=True, slots=True, eq=False)
class Vacate:
    """Slots that are nobody's give back what they had; `Vacated`. Until then nothing is to be written there.

    In the log it comes after every `Forget` that was submitted before.
    """

    number: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """See whether the disk takes and gives back bytes, and mend the catalogue if it does; `Probed`."""

    number: int


Job = Write | Read | Forget | Touch | Describe | Make | Drop | Vacate | Probe


@dataclass(frozen=True, slots=True)
class Wrote:
    number: int
    checksum: int
    error: str = ""
    packed: int = 0
    """As `Record.packed`."""


@dataclass(frozen=True, slots=True)
class ReadDone:
    number: int
    outcome: Literal["ok", "mismatch"] | str
    """`OK`, `MISMATCH`, or an error; the view has the block's bytes only where it is `OK`."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    number: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Touched:
    number: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Described:
    number: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Made:
    segment: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Dropped:
    segment: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Vacated:
    number: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Probed:
    number: int
    error: str = ""


Outcome = Wrote | ReadDone | Forgotten | Touched | Described | Made | Dropped | Vacated | Probed


def outcome_of(job: Job, error: str, checksum: int = 0, packed: int = 0) -> Outcome:
    """How `job` ended, if not as a read that went well."""
    match job:
        case Write():
            return Wrote(job.number, checksum, error, packed)
        case Read():
            return ReadDone(job.number, error)
        case Forget():
            return Forgotten(job.number, error)
        case Touch():
            return Touched(job.number, error)
        case Describe():
            return Described(job.number, error)
        case Make():
            return Made(job.segment, error)
        case Drop():
            return Dropped(job.segment, error)
        case Vacate():
            return Vacated(job.number, error)
        case Probe():
            return Probed(job.number, error)
