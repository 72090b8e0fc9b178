"""What happened, in numbers that only grow."""

from dataclasses import dataclass

COUNT_MAX = (1 << 64) - 1
"""What a message can carry. Clients say what they read, so sums are cut here where they are answered."""


@dataclass
class Counts:
    """What happened since the start; names as in the contract's `Counters`."""

    stored: int = 0
    existing: int = 0
    rejected: int = 0
    hits: int = 0
    misses: int = 0
    busy: int = 0
    hit_bytes: int = 0
    match_hits: int = 0
    match_misses: int = 0
    hit_tokens: int = 0
    miss_tokens: int = 0
    match_hit_tokens: int = 0
    match_miss_tokens: int = 0
    evicted: int = 0
    evicted_inner: int = 0
    evicted_orphans: int = 0
    evicted_asked: int = 0
    expired: int = 0
    removed: int = 0
    sessions_opened: int = 0
    sessions_ended: int = 0
    exhausted: int = 0
    reservations_expired: int = 0
    conversations: int = 0
    conversations_evicted: int = 0
