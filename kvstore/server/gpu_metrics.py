"""The metrics of devices, each by the UUID of its device."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from kvstored.v1 import kvstore_pb2 as pb

Figure = Callable[[pb.GpuStats], float]

GAUGES: Mapping[str, tuple[str, Figure]] = {
    "in_use": ("0 while the device is out of use; stats says why.", lambda gpu: not gpu.trouble),
    "growing_refused": (
        "1 where the last segment that was wanted was not made: the device has no memory left.",
        lambda gpu: bool(gpu.no_memory),
    ),
    "generation": ("Of its memory: it rises each time that it was lost and came back.", lambda gpu: gpu.generation),
    "size_bytes": ("Size of the device's pool (gpu.size).", lambda gpu: gpu.size_bytes),
    "used_bytes": ("In slots with a block, granted or quarantined.", lambda gpu: gpu.used_bytes),
    "draining_bytes": ("Taken back, and still mapped by clients.", lambda gpu: gpu.draining_bytes),
    "segments": ("Segments that its memory is in.", lambda gpu: gpu.segments),
    "blocks": ("Blocks on the device; those that other tiers have, too, are among them.", lambda gpu: gpu.blocks),
    "copying": ("Copies that are under way or wait.", lambda gpu: gpu.copying),
    "commits_pending": ("Commits that wait for their event.", lambda gpu: gpu.commits_pending),
    "tickets": ("Prefetches to the device that somebody waits for.", lambda gpu: gpu.tickets),
    "page_locked_bytes": (
        "Of host.size, what is page-locked: the rest is copied through a staging buffer.",
        lambda gpu: gpu.page_locked_bytes,
    ),
    "page_locked": (
        "0 where some of the slab is not page-locked; stats says why.",
        lambda gpu: not gpu.not_page_locked,
    ),
    "calls_hanging": ("Calls of the driver that are not back by their deadline.", lambda gpu: gpu.calls_hanging),
}

COUNTERS: Mapping[str, tuple[str, Figure]] = {
    "commits_failed": ("Commits that ended and made nothing visible.", lambda gpu: gpu.counters.commits_failed),
    "events_failed": ("Those whose event failed, or whose process was gone.", lambda gpu: gpu.counters.events_failed),
    "events_late": ("Those whose event did not come in time.", lambda gpu: gpu.counters.events_late),
    "removed_pending": (
        "Blocks that were removed before their event came.",
        lambda gpu: gpu.counters.removed_pending,
    ),
    "down_dropped": (
        "Blocks that were to be copied to memory and were not: no room in queue or memory, or gone meanwhile.",
        lambda gpu: gpu.counters.down_dropped,
    ),
    "copies_vain": (
        "Copies of blocks that were gone, or had come, when they ended.",
        lambda gpu: gpu.counters.copies_vain,
    ),
    "evictions": ("Blocks that left the device for room.", lambda gpu: gpu.counters.evicted),
    "evicted_only": ("Those of them that no other tier had.", lambda gpu: gpu.counters.evicted_only),
    "losses": ("Times that the device was lost.", lambda gpu: gpu.counters.losses),
    "lost": ("Blocks that only the device had when it was lost.", lambda gpu: gpu.counters.lost),
    "left_behind": ("Copies that were under way when it was.", lambda gpu: gpu.counters.left_behind),
    "out_of_memory": ("Segments that could not be made.", lambda gpu: gpu.counters.out_of_memory),
    "quiet_asked": (
        "Times that the device was asked whether a dead process has ended there.",
        lambda gpu: gpu.counters.quiet_asked,
    ),
}


def families(gpus: Sequence[pb.GpuStats]) -> Iterator[Metric]:
    """All of them; nothing where there is no device."""
    if not gpus:
        return
    info = InfoMetricFamily("kvstored_gpu", "Devices whose memory is a tier.", labels=["device"])
    for gpu in gpus:
        info.add_metric([gpu.uuid], {"name": gpu.name, "handles": gpu.handle_kind})
    yield info
    for name, (says, figure) in GAUGES.items():
        gauge = GaugeMetricFamily(f"kvstored_gpu_{name}", says, labels=["device"])
        for gpu in gpus:
            gauge.add_metric([gpu.uuid], figure(gpu))
        yield gauge
    for name, (says, figure) in COUNTERS.items():
        counter = CounterMetricFamily(f"kvstored_gpu_{name}", says, labels=["device"])
        for gpu in gpus:
            counter.add_metric([gpu.uuid], figure(gpu))
        yield counter
    yield from _slots(gpus)
    yield from _moves(gpus)


def _slots(gpus: Sequence[pb.GpuStats]) -> Iterator[Metric]:
    slots = GaugeMetricFamily(
        "kvstored_gpu_slots",
        "Slots of the device: granted (a client may write there), quarantined (its session ended, its process or a "
        "kernel of it perhaps did not), leased (a client holds the block).",
        labels=["device", "state"],
    )
    for gpu in gpus:
        for state, count in (("granted", gpu.granted), ("quarantined", gpu.quarantined), ("leased", gpu.leased)):
            slots.add_metric([gpu.uuid, state], count)
    yield slots


def _moves(gpus: Sequence[pb.GpuStats]) -> Iterator[Metric]:
    """Blocks that came to a tier, and their bytes."""
    blocks = CounterMetricFamily(
        "kvstored_gpu_moved_blocks",
        "Blocks that came: committed (by clients), up (from memory), down (to memory).",
        labels=["device", "direction"],
    )
    size = CounterMetricFamily("kvstored_gpu_moved_bytes", "Their bytes.", labels=["device", "direction"])
    failed = CounterMetricFamily(
        "kvstored_gpu_moves_failed",
        "Blocks that somebody waited for and that did not come (up), and that could not be copied to memory (down).",
        labels=["device", "direction"],
    )
    for gpu in gpus:
        count = gpu.counters
        for direction, came, came_bytes in (
            ("committed", count.committed, count.committed_bytes),
            ("up", count.copied_up, count.bytes_up),
            ("down", count.copied_down, count.bytes_down),
        ):
            blocks.add_metric([gpu.uuid, direction], came)
            size.add_metric([gpu.uuid, direction], came_bytes)
        failed.add_metric([gpu.uuid, "up"], count.up_failed)
        failed.add_metric([gpu.uuid, "down"], count.down_failed)
    yield from (blocks, size, failed)
