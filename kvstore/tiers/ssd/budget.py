"""How the bytes of `ssd.size` are divided where RocksDB has a part of them: buffers, log, garbage, what lives.

All by the size, so that a small one is kept, too. What RocksDB takes at its worst is what is in
it and its garbage, the log, a second time what the log has while that is written out, and the
live part of the blob files that are being collected, once more.
"""

from dataclasses import dataclass

MIB = 1 << 20
SIZE_BYTES = 64 << 30
"""Where nobody says."""

LIVE_SHARE = 0.82
"""Of what is left for blob files: blocks that are there, the rest is garbage. Blocks written over at random then cost
3.5 bytes written for each, log included (docs/decisions/0007); with 0.9 twice that."""

FIXED_BYTES = 6 * MIB
"""RocksDB's own logs, manifest, options, and tables of keys."""

CATALOGUE_BALLAST_MAX = 32 * MIB


@dataclass(frozen=True)
class Budget:
    """Of one size."""

    size_bytes: int
    catalogue_log_bytes: int
    """At most in the log of a catalogue alone, layout "extents"."""
    catalogue_ballast_bytes: int
    buffer_bytes: int
    """A write buffer of payload, and the blob file that it becomes."""
    log_bytes: int
    """At which RocksDB empties its log by writing the buffers out, layout "rocksdb"."""
    step_bytes: int
    """Blob files that are collected at once, and what is kept free for that."""
    ballast_bytes: int
    """A file that gives way where RocksDB cannot open for want of room: at the start it writes out its log."""

    @property
    def live_bytes(self) -> int:
        return self.live_in(self.size_bytes)

    def live_in(self, size_bytes: int) -> int:
        """For blocks as they are packed, with what each costs besides, where so much of the disk can be had."""
        rest = FIXED_BYTES + size_bytes // 256 + 2 * self.log_bytes + 2 * self.step_bytes + self.ballast_bytes
        return max(int((size_bytes - rest) * LIVE_SHARE), 0)


def budget_of(size_bytes: int) -> Budget:
    buffer = _between(size_bytes // 256, 1 * MIB, 32 * MIB)
    log = 3 * buffer
    step = _between(size_bytes // 32, 4 * MIB, 256 * MIB)
    return Budget(
        size_bytes=size_bytes,
        catalogue_log_bytes=_between(size_bytes // 16, 4 * MIB, 64 * MIB),
        catalogue_ballast_bytes=min(size_bytes // 32, CATALOGUE_BALLAST_MAX),
        buffer_bytes=buffer,
        log_bytes=log,
        step_bytes=step,
        ballast_bytes=4 * buffer,
    )


def _between(size_bytes: int, least: int, most: int) -> int:
    return max(least, min(size_bytes, most)) // 4096 * 4096
