"""The stores of a node, memory's and the SSD's, by its settings: how large each is, and what may wait between them."""

import os

from kvstore.config import Settings
from kvstore.core.movement import Movement
from kvstore.core.schedule import Kind
from kvstore.core.segments import PAGE_BYTES
from kvstore.core.store import Store
from kvstore.core.tiered import Joined, TieredIndex
from kvstore.tiers.ssd.format import EXTENTS, ROCKSDB

CATALOGUE_BYTES, CATALOGUE_SHARE = 96 << 20, 256
"""Of ssd.size, kept for the catalogue: its log and buffers, and some 170 bytes for each block of 64 KiB and less."""

PAYLOAD_SHARES = {EXTENTS: 1.0, ROCKSDB: 0.5}
"""By layout: RocksDB takes up to twice what is in it, and more, while slots are written again (docs/decisions)."""

QUEUE_SHARES = {Kind.LOAD: 0.25, Kind.PREFETCH: 0.25, Kind.WRITE: 0.5}
"""Of host.size: bytes of blocks that may wait for the SSD. A name that waits holds no memory."""


def build(settings: Settings, indexes: TieredIndex, *, huge_pages: bool) -> tuple[Store, Movement | None]:
    """Memory's store, and what moves blocks between it and the SSD where there is one."""
    host, ssd, policy = settings.host.size_bytes, settings.ssd, settings.evict.policy
    if ssd.path is None:
        return Store(host, indexes, policy=policy, huge_pages=huge_pages), None
    joined = Joined(indexes)
    memory = Store(host, joined.host, policy=policy, huge_pages=huge_pages)
    disk = Store(file_bytes(ssd.size_bytes, ssd.layout), joined.ssd, policy=policy, lazily=True)
    queue_bytes = {kind: int(host * share) for kind, share in QUEUE_SHARES.items()}
    return memory, Movement(memory, disk, joined, pid=os.getpid(), policy=ssd.write_back, queue_bytes=queue_bytes)


def file_bytes(size_bytes: int, layout: str) -> int:
    """What segments may take of `ssd.size`: all but what the catalogue is expected to take, and garbage."""
    catalogue = min(CATALOGUE_BYTES + size_bytes // CATALOGUE_SHARE, size_bytes // 4)
    return int((size_bytes - catalogue) * PAYLOAD_SHARES[layout]) // PAGE_BYTES * PAGE_BYTES
