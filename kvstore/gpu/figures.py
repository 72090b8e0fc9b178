"""What is said of one device: its figures, and what is wrong with it."""

from collections.abc import Iterator

from kvstore.core.counts import COUNT_MAX
from kvstore.core.loads import RUNNING
from kvstore.gpu.one_device import OneDevice
from kvstore.gpu.pagelocks import SlabLocks
from kvstored.v1 import kvstore_pb2 as pb


def device_stats(one: OneDevice, locks: SlabLocks) -> pb.GpuStats:
    """As `kvstore-cli stats` and the metrics show it."""
    pool = one.pool
    segments, pools = pool.store.segments, pool.store.segments.filled()
    draining_bytes = sum(segment.size_bytes for segment in segments.draining.values())
    return pb.GpuStats(
        uuid=one.uuid,
        name=one.name,
        trouble=pool.trouble,
        no_memory=pool.no_memory,
        size_bytes=segments.size_bytes,
        segments=len(segments.live),
        blocks=sum(of.blocks for of in pools),
        used_bytes=sum((of.slots - of.free) * of.slot_bytes for of in pools),
        granted=sum(of.granted for of in pools),
        leased=sum(of.leased for of in pools),
        quarantined=sum(of.quarantined for of in pools),
        draining_bytes=draining_bytes + one.remaining_bytes,
        copying=len(pool.ups.coming) + len(pool.downs.coming),
        commits_pending=pool.commits.pending,
        tickets=sum(ticket.state == RUNNING for ticket in pool.tickets.tickets.values()),
        page_locked_bytes=locks.locked_bytes,
        not_page_locked=_not_page_locked(one, locks),
        calls_hanging=one.calls_hanging,
        counters=_counters(one),
        generation=pool.generation,
        handle_kind=one.kind.name.lower(),
    )


def _not_page_locked(one: OneDevice, locks: SlabLocks) -> str:
    life, why = one.life, locks.why_not()
    refused = "" if life is None else life.up.not_staged or life.down.not_staged
    return f"{why}; nor is there a staging buffer: {refused}" if why and refused else why


def _counters(one: OneDevice) -> pb.GpuCounters:
    """Those of the pool by their names, and evictions, which are its store's."""
    counted = {name: min(value, COUNT_MAX) for name, value in vars(one.pool.counts).items()}
    return pb.GpuCounters(**counted, evicted=min(one.pool.store.counts.evicted, COUNT_MAX))


def wrong_with(one: OneDevice) -> Iterator[str]:
    """What is not as it should be while all that is asked of the daemon works."""
    pool = one.pool
    if pool.trouble:
        again = f"; opening it again failed: {one.not_opened}" if one.not_opened else ""
        yield f"device {one.uuid} is out of use: {pool.trouble}{again}"
    if pool.no_memory:
        yield f"device {one.uuid}: its pool cannot grow: {pool.no_memory}"
    if one.cannot_tell:
        yield f"device {one.uuid}: what dead processes held is kept: {one.cannot_tell}"
