"""Turns what the core wants moved into jobs for the SSD's workers.

The core names slots, extents and namespaces; a job has the bytes themselves, the place in the
directory, and the record as it is to be written. Times on disk are those of the wall clock, in
the core they are the loop's.
"""

from mmap import mmap

from kvstore.core.moves import ForgetRecords, Move, Name, ProbeTier, ReadBlock, VacateSlots, VerifyBlock, WriteBlock
from kvstore.core.segments import DropSegment, MakeSegment
from kvstore.moving.numbers import NamespaceNumbers
from kvstore.tiers.slab import Slab
from kvstore.tiers.ssd.format import Record, record_key
from kvstore.tiers.ssd.jobs import Describe, Drop, Forget, Job, Make, Probe, Read, Vacate, Write
from kvstore.tiers.ssd.payload import Place

OF_NOBODY = 0
"""Number of jobs whose end only matters if it is an error; the core counts from 1."""


class Jobs:
    """Of one slab and one directory at a time."""

    def __init__(self, slab: Slab, numbers: NamespaceNumbers, wall: float) -> None:
        """`wall` is what a time of the loop lacks to be one of the wall clock."""
        self.sequence = 0
        """Of the last record that was written."""
        self._slab = slab
        self._numbers = numbers
        self._wall = wall

    def of(self, move: Move) -> list[Job]:
        """In the order in which they are to be submitted."""
        match move:
            case WriteBlock():
                return self._write(move)
            case ReadBlock():
                return [_read(move, self._view(move.target, move.slot_bytes))]
            case VerifyBlock():
                return [_read(move, memoryview(mmap(-1, move.slot_bytes)))]  # the job's own: gone with it
            case ForgetRecords():
                return [Forget(move.number, tuple(map(self.record_key, move.names)))]
            case VacateSlots():
                places = (Place(ref >> 32, slot_bytes, ref & 0xFFFFFFFF, 1) for ref, slot_bytes in move.slots)
                return [Vacate(move.number, tuple(places))]
            case ProbeTier():
                return [Probe(OF_NOBODY)]
            case MakeSegment():
                return [Make(move.segment, move.size_bytes)]
            case DropSegment():
                return [Drop(move.segment)]

    def record_key(self, name: Name) -> bytes:
        return record_key(self._numbers[name[0]], name[1])

    def _write(self, move: WriteBlock) -> list[Job]:
        number, row = self._numbers.write(move.number, move.namespace)
        self.sequence += 1
        segment, slot = move.extent >> 32, move.extent & 0xFFFFFFFF
        record = Record(
            namespace=number,
            key=move.key,
            segment=segment,
            slot=slot,
            length=move.namespace.block_bytes,
            checksum=0,
            parent=move.parent,
            depth=move.depth,
            created=move.stored + self._wall,
            used=move.used + self._wall,
            hits=move.hits,
            until=move.until + self._wall if move.until else 0.0,
            sequence=self.sequence,
        )
        replaces = self.record_key(move.replaces) if move.replaces is not None else None
        view = self._view(move.source, move.slot_bytes)
        write = Write(move.number, record, view, slot * move.slot_bytes, replaces)
        return [Describe(number, (row,)), write] if row is not None else [write]

    def _view(self, ref: int, slot_bytes: int) -> memoryview:
        return self._slab.bytes_at(ref >> 32, (ref & 0xFFFFFFFF) * slot_bytes, slot_bytes)


def _read(move: ReadBlock | VerifyBlock, view: memoryview) -> Read:
    segment, slot = move.extent >> 32, move.extent & 0xFFFFFFFF
    return Read(move.number, segment, slot * move.slot_bytes, view, move.length, move.key, move.checksum)
