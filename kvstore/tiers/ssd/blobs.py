"""The payload in RocksDB (BlobDB): for capacity, and for file systems without O_DIRECT.

A block's bytes are split into planes, all even bytes and then all odd ones (of 2-byte floats
the exponents come together), and compressed; what does not shrink is stored as it is. Lossless
whatever the bytes are.

Crash order: payload and records go through one write-ahead log, in the order in which they are
written, and the sync of a record's write is the sync of all that was written before it. So the
former owner's record, the payload and the new record need no sync between them.

Segments are numbers here and take no room by themselves. What a slot had before is garbage in
a blob file, which goes when nothing in it lives. RocksDB would collect garbage with every
compaction, its oldest files each time and however little of them is garbage; here `collect` is
told when, and how much at once.
"""

import threading
from collections.abc import Iterable

import numpy as np
import zstandard
from numpy.typing import NDArray
from rocksdict import BottommostLevelCompaction, CompactOptions, Rdict

from kvstore.core.segments import PAGE_BYTES
from kvstore.tiers.ssd.catalogue import Catalogue
from kvstore.tiers.ssd.faults import CatalogueError, Unreadable
from kvstore.tiers.ssd.format import PIECE_BYTES, PLAIN, PLANES, piece_key, segment_of_piece
from kvstore.tiers.ssd.options import AGE_CUTOFF
from kvstore.tiers.ssd.payload import Damaged, Place

ZSTD_LEVEL = 1
"""Level 3 was never better on KV caches."""

PIECE_COSTS, BLOCK_COSTS = 128, 320
"""Bytes on the disk besides the packed ones: a piece's key in its blob file and in tables; a block's record, twice
while tables are compacted."""

NUMBERS = 1 << 32
"""Of segments, and of pages in one."""

DELETES_MAX = 1024
"""Of pieces in one batch: 0.3 ms with the GIL held."""

PROBE_SEGMENT = 0
"""The core counts from 1."""


class Blobs:
    """All segments of one catalogue."""

    direct_refused = ""

    def __init__(self, catalogue: Catalogue) -> None:
        """Removes payload of segments that the catalogue has no row of, as a crash leaves it."""
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._sizes = {row.number: row.size_bytes for row in catalogue.segments()}
        self._cuts: dict[int, int] = {}
        """Segment -> pages of its slots, since something was written to it in this life."""
        self._codecs = threading.local()
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        key = self._catalogue.payload_from(b"")
        while key is not None:
            segment = segment_of_piece(key)
            if segment not in self._sizes:
                self._drop_payload(segment)
            if segment == NUMBERS - 1:
                return
            key = self._catalogue.payload_from(piece_key(segment + 1, 0, 0))

    # -- segments

    def make(self, segment: int, size_bytes: int) -> None:
        assert size_bytes % PAGE_BYTES == 0, f"a segment of {size_bytes} bytes"
        assert segment not in self._sizes, f"segment {segment} made twice"
        self._drop_payload(segment)
        with self._lock:
            self._sizes[segment] = size_bytes

    def drop(self, segment: int) -> None:
        with self._lock:
            self._sizes.pop(segment, None)
            self._cuts.pop(segment, None)
        self._drop_payload(segment)

    def _drop_payload(self, segment: int) -> None:
        self._catalogue.drop_payload(piece_key(segment, 0, 0), _end(segment))

    def existing(self) -> dict[int, int]:
        with self._lock:
            return dict(self._sizes)

    def physical_bytes(self) -> int:
        return 0  # the catalogue's directory has it all

    # -- bytes

    def write(self, segment: int, offset: int, view: memoryview) -> int:
        self._check(segment, offset, view)
        self._cut(segment, len(view) // PAGE_BYTES)
        taken = BLOCK_COSTS
        for key, piece in _pieces(segment, offset, len(view)):
            packed = self._packed(view[piece])
            self._catalogue.put_payload(key, packed)
            taken += len(packed) + PIECE_COSTS
        return taken

    def vacate(self, places: Iterable[Place]) -> None:
        keys: list[bytes] = []
        for segment, slot_bytes, first, slots in places:
            slot_pages = slot_bytes // PAGE_BYTES
            if slots > 1:
                begin, end = first * slot_pages, (first + slots) * slot_pages
                self._catalogue.drop_payload(piece_key(segment, slot_pages, begin), piece_key(segment, slot_pages, end))
            else:
                keys += [key for key, _ in _pieces(segment, first * slot_bytes, slot_bytes)]
        for at in range(0, len(keys), DELETES_MAX):
            self._catalogue.delete_payload(keys[at : at + DELETES_MAX])

    def collect(self, size_bytes: int) -> None:
        self._catalogue.compact_payload(lambda payload: _collect(payload, size_bytes))

    def read(self, segment: int, offset: int, view: memoryview) -> None:
        self._check(segment, offset, view)
        pieces = [(key, view[piece]) for key, piece in _pieces(segment, offset, len(view))]
        try:
            found = self._catalogue.payload([key for key, _ in pieces])
        except Unreadable as e:
            raise Damaged(str(e)) from e
        for value, (_, piece) in zip(found, pieces, strict=True):
            if value is None:
                raise Damaged(f"{len(view)} bytes at {offset} of segment {segment} are not there")
            self._unpack(value, piece)

    def sync(self, segments: Iterable[int]) -> dict[int, str]:
        return {}  # the log, which the catalogue syncs, has it all

    def probe(self) -> None:
        # The catalogue's first: it opens RocksDB again, which takes nothing after an error.
        self._catalogue.probe()
        key, said = piece_key(PROBE_SEGMENT, 1, 0), np.random.default_rng().bytes(PAGE_BYTES)
        self._catalogue.put_payload(key, PLAIN + said)
        if self._catalogue.payload([key]) != [PLAIN + said]:
            raise CatalogueError("a page written to RocksDB as a probe came back as another")

    def close(self) -> None:
        """The catalogue is closed by who opened it."""

    def _check(self, segment: int, offset: int, view: memoryview) -> None:
        assert offset % PAGE_BYTES == 0, f"offset {offset} is not on a page"
        assert len(view) > 0, "an empty view"
        assert len(view) % PAGE_BYTES == 0, f"a view of {len(view)} bytes is not whole pages"
        with self._lock:
            size_bytes = self._sizes.get(segment)
        if size_bytes is None:
            raise CatalogueError(f"segment {segment} is not there")
        assert offset + len(view) <= size_bytes, f"{offset + len(view)} is beyond segment {segment}"

    def _cut(self, segment: int, slot_pages: int) -> None:
        """Slots of another size are nobody's any more once one of this size is written: they would take room for ever.

        The core cuts a segment anew only when none of it is in use.
        """
        with self._lock:
            if self._cuts.get(segment) == slot_pages:
                return
        # Without the lock, since it may wait: what two writers of one cut delete is the same, and not theirs.
        self._catalogue.drop_payload(piece_key(segment, 0, 0), piece_key(segment, slot_pages, 0))
        self._catalogue.drop_payload(piece_key(segment, slot_pages + 1, 0), _end(segment))
        with self._lock:
            if segment in self._sizes:
                self._cuts[segment] = slot_pages

    # -- the codec

    def _packed(self, piece: memoryview) -> bytes:
        block = np.frombuffer(piece, np.uint8)
        half = len(block) // 2
        planes = np.empty(len(block), np.uint8)
        planes[:half] = block[0::2]
        planes[half:] = block[1::2]
        compressor, _ = self._codec()
        frame: bytes = compressor.compress(planes.data)
        if len(frame) < len(block):
            return PLANES + frame
        return b"".join((PLAIN, piece))

    def _unpack(self, value: bytes, piece: memoryview) -> None:
        """Fills `piece`. Raises Damaged where `value` is not as many bytes."""
        target = np.frombuffer(piece, np.uint8)
        tag, content = value[:1], memoryview(value)[1:]
        if tag == PLANES:
            _, decompressor = self._codec()
            try:
                # Before so much memory is asked for.
                if zstandard.frame_content_size(content) == len(target):
                    _join(np.frombuffer(decompressor.decompress(content), np.uint8), target)
                    return
            except zstandard.ZstdError as e:
                raise Damaged(f"payload that cannot be decompressed: {e}") from e
        elif tag == PLAIN and len(content) == len(target):
            np.copyto(target, np.frombuffer(content, np.uint8))
            return
        raise Damaged(f"payload of {len(value)} bytes, tag {tag.hex()}, for {len(target)} bytes")

    def _codec(self) -> tuple[zstandard.ZstdCompressor, zstandard.ZstdDecompressor]:
        """This thread's own: they must not be shared."""
        found: tuple[zstandard.ZstdCompressor, zstandard.ZstdDecompressor] | None
        found = getattr(self._codecs, "both", None)
        if found is None:
            found = zstandard.ZstdCompressor(level=ZSTD_LEVEL), zstandard.ZstdDecompressor()
            self._codecs.both = found
        return found


def _join(planes: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    """In 2-byte words: three times faster than byte by byte."""
    half, words = len(target) // 2, target.view("<u2")
    np.left_shift(planes[half:], 8, out=words, dtype=np.uint16)
    np.bitwise_or(words, planes[:half], out=words)


def _collect(payload: Rdict, size_bytes: int) -> None:
    """Writes what lives in the oldest blob files anew, so that they go; without the GIL."""
    files = payload.property_int_value("rocksdb.num-blob-files") or 0
    total = payload.property_int_value("rocksdb.live-blob-file-size") or 0
    if not files or not total:
        return
    oldest = max(round(size_bytes * files / total), 1)
    payload.set_options({AGE_CUTOFF: f"{min((oldest + 0.5) / files, 1.0):.6f}"})
    try:
        every = CompactOptions()
        every.set_bottommost_level_compaction(BottommostLevelCompaction.force())
        payload.compact_range(None, None, every)
    finally:
        payload.set_options({AGE_CUTOFF: "0"})


def _pieces(segment: int, offset: int, slot_bytes: int) -> Iterable[tuple[bytes, slice]]:
    """Key of each, and where it is in the slot."""
    slot_pages = slot_bytes // PAGE_BYTES
    for at in range(0, slot_bytes, PIECE_BYTES):
        yield piece_key(segment, slot_pages, (offset + at) // PAGE_BYTES), slice(at, at + PIECE_BYTES)


def _end(segment: int) -> bytes:
    """After the last piece of a segment."""
    return piece_key(segment + 1, 0, 0) if segment < NUMBERS - 1 else b"\xff" * 13
