"""What happened, in numbers that only grow."""

from dataclasses import dataclass


@dataclass
class Counts:
    """What happened since the start; names as in the contract's `Counters`."""

    stored: int = 0
    existing: int = 0
    rejected: int = 0
    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    match_hits: int = 0
    match_misses: int = 0
    evicted: int = 0
    evicted_inner: int = 0
    evicted_orphans: int = 0
    expired: int = 0
    removed: int = 0
    sessions_opened: int = 0
    sessions_ended: int = 0
    exhausted: int = 0
    reservations_expired: int = 0
