"""Requests end to end through daemon and SDK, by the clock: paged blocks to the pool and back, several sizes."""

import statistics
import time
from collections.abc import Callable, Iterator

from bench.gpu.copies import BLOCK, WITHIN, engine
from bench.gpu.rig import WAIT_S, Rig
from bench.measure import Row
from bench.node import Node
from kvstore_client import Client, Namespace
from kvstore_client.paged import PagedKV

SIZES_MIB = (4, 16, 64, 256)
TIMEOUT_S = 30.0
POOL, SLAB = "4GiB", "2GiB"
QUICK_POOL, QUICK_SLAB = "256MiB", "256MiB"


def node(quick: bool, ssd: str = "") -> Node:
    """A daemon with a pool on every device there is, and with a directory an SSD tier."""
    pool, slab, disk = (QUICK_POOL, QUICK_SLAB, "1GiB") if quick else (POOL, SLAB, "16GiB")
    if not ssd:
        return Node(host__size=slab, gpu__size=pool)
    return Node(host__size=slab, gpu__size=pool, ssd__path=ssd, ssd__size=disk)


def rows(rig: Rig, quick: bool) -> Iterator[Row]:
    sizes = SIZES_MIB[:2] if quick else SIZES_MIB
    pages = sizes[-1] * (1 << 20) // BLOCK
    cache, other = rig.device.allocate(pages * BLOCK), rig.device.allocate(pages * BLOCK)
    try:
        with node(quick) as daemon, Client(daemon.endpoint, name="gpu-check", timeout_s=TIMEOUT_S) as client:
            kv = PagedKV.of_layout(engine(cache.address, pages), f"gpu:{rig.uuid}")
            ns = client.raw_namespace("gpu-check", BLOCK)
            for mib in sizes:
                yield from _size(rig, ns, kv, mib, 3 if quick else 20, (cache.address, other.address))
    finally:
        rig.stream.synchronize(WAIT_S)
        cache.free()
        other.free()


def _size(rig: Rig, ns: Namespace, kv: PagedKV, mib: int, rounds: int, raw: tuple[int, int]) -> Iterator[Row]:
    count = mib * (1 << 20) // BLOCK
    blocks = kv.blocks(list(range(count)), stream=rig.stream)

    def keys(number: int) -> list[bytes]:
        return [ns.key(f"{mib} MiB {number} {i}".encode()) for i in range(count)]

    def copy(number: int) -> None:
        rig.device.copy(raw[1], raw[0], count * BLOCK, WITHIN, rig.stream)
        rig.stream.synchronize(WAIT_S)

    def put(number: int) -> None:
        result = ns.put(keys(number), blocks)
        assert result.stored == count, f"{result} of {count} blocks"

    def get(number: int) -> None:
        got = ns.get_into(keys(number), blocks)
        rig.stream.synchronize(WAIT_S)
        assert got == count, f"{got} of {count} blocks"

    arms: dict[str, Callable[[int], None]] = {"put": put, "get_into": get, "copy": copy}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, arm in arms.items():
            began = time.perf_counter()
            arm(number)
            if number:  # the first compiles kernels and opens segments
                seconds[name].append(time.perf_counter() - began)
    other = statistics.median(seconds["copy"])
    for name in ("put", "get_into"):
        took = statistics.median(seconds[name])
        yield Row(
            f"{name}, paged, {mib} MiB, by the SDK",
            other / took,
            None,
            True,
            "",
            f"{took * 1e6:.0f} µs, {count * BLOCK / took / 1e9:.1f} GB/s",
            f"a device-to-device copy, waited for, {other * 1e6:.0f} µs",
        )
