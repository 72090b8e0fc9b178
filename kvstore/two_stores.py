"""The stores of a node, memory's and the SSD's, by its settings: how large each is, and what may wait between them.

Those of devices come when these are open (kvstore/gpu).
"""

import os
import time
from dataclasses import dataclass

from kvstore.config import Settings
from kvstore.core.movement import Movement
from kvstore.core.schedule import Kind
from kvstore.core.segments import PAGE_BYTES
from kvstore.core.store import Store
from kvstore.core.tiered import Joined, TieredIndex
from kvstore.tiers.ssd.budget import budget_of
from kvstore.tiers.ssd.format import ROCKSDB

CATALOGUE_BYTES, CATALOGUE_SHARE = 96 << 20, 256
"""Of ssd.size, kept for the catalogue: its log and buffers, and some 170 bytes for each block of 64 KiB and less."""

SLOTS_PER_BYTE = 4
"""Layout "rocksdb": blocks are bounded by what they are packed to, so there are more slots than `ssd.size` has room
for; of blocks that shrink to less than a fourth there are so many."""

QUEUE_SHARES = {Kind.LOAD: 0.25, Kind.PREFETCH: 0.25, Kind.WRITE: 0.5}
"""Of host.size: bytes of blocks that may wait for the SSD, or for a device. A name that waits holds no memory."""


@dataclass(frozen=True)
class Stores:
    """What a node is made of."""

    memory: Store
    movement: Movement | None
    """Between memory and the SSD, where there is one."""
    joined: Joined | None
    """What the index says of blocks, where there are tiers besides memory."""


def queue_bytes(settings: Settings) -> dict[Kind, int]:
    """What may wait, by kind of job: between memory and the SSD, and between memory and each device."""
    return {kind: int(settings.host.size_bytes * share) for kind, share in QUEUE_SHARES.items()}


def build(settings: Settings, indexes: TieredIndex, *, huge_pages: bool) -> Stores:
    """Memory's store, and what moves blocks between it and the SSD where there is one."""
    host, ssd, policy = settings.host.size_bytes, settings.ssd, settings.evict.policy
    if ssd.path is None and not settings.gpu.size_bytes:
        memory = Store(host, indexes, policy=policy, huge_pages=huge_pages)
        memory.spaces.kept = lambda namespace: False
        memory.spaces.now = time.monotonic()
        return Stores(memory, None, None)
    joined = Joined(indexes)
    memory = Store(host, joined.host, policy=policy, huge_pages=huge_pages)
    memory.spaces.kept = joined.keeps
    memory.spaces.now = time.monotonic()
    if ssd.path is None:
        return Stores(memory, None, joined)
    disk = Store(file_bytes(ssd.size_bytes, ssd.layout), joined.ssd, policy=policy, lazily=True)
    budget, packed = budget_of(ssd.size_bytes), ssd.layout == ROCKSDB
    movement = Movement(
        memory,
        disk,
        joined,
        pid=os.getpid(),
        policy=ssd.write_back,
        queue_bytes=queue_bytes(settings),
        packed_bytes=budget.live_bytes if packed else 0,
        packed_block_max=budget.step_bytes // 2,
    )
    return Stores(memory, movement, joined)


def file_bytes(size_bytes: int, layout: str) -> int:
    """Segments of all sizes together: of `ssd.size` all but what the catalogue is expected to take."""
    if layout == ROCKSDB:
        return SLOTS_PER_BYTE * size_bytes // PAGE_BYTES * PAGE_BYTES
    catalogue = min(CATALOGUE_BYTES + size_bytes // CATALOGUE_SHARE, size_bytes // 4)
    return (size_bytes - catalogue) // PAGE_BYTES * PAGE_BYTES
