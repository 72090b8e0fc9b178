"""Carries out what the core wants done on devices, and tells it how each of it ended.

Devices are opened when the daemon starts: it waits OPEN_S for them, and serves without them
afterwards; those that come later are used from then on. Without a driver, cupy or a device the
tier is off, says why, and nothing else is different.

    core/gpu_* --jobs--> one_device.py (copier, watching, device_memory, quiet) --reports--> core/gpu_*
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.config import Evict
from kvstore.config import Gpu as Settings
from kvstore.core.block import SEALED
from kvstore.core.gpu_pool import GpuPool
from kvstore.core.gpu_tier import GpuTier
from kvstore.core.movement import Movement
from kvstore.core.schedule import Kind
from kvstore.core.store import Store
from kvstore.core.tiered import Joined
from kvstore.gpu import opening
from kvstore.gpu.figures import device_stats, wrong_with
from kvstore.gpu.one_device import OneDevice
from kvstore.gpu.pagelocks import SlabLocks
from kvstore.gpu.unread import Unread
from kvstore.logs import logger
from kvstore.tiers.slab import Slab, SlabSegment
from kvstored.v1 import kvstore_pb2 as pb
from kvstored_cuda.devices import Device, Generation, Handle, HandleKind
from kvstored_cuda.devices.errors import DeviceError
from kvstored_cuda.devices.isolated import Isolated

log = logger("kvstored.gpu")

OPEN_S = 10.0
"""That the daemon's start waits for its devices."""

OPEN_MAX_S = 600.0
"""For a driver that hangs to come back; then there is no such tier until the daemon is started again."""

TICK_S = 0.1

EVICT_BLOCKS = 128
"""Of one pool, in one turn."""

SAVE_ROWS = 64
"""Blocks queued at a time when the daemon stops."""

LOOK_S = 0.01


@dataclass(frozen=True)
class Node:
    """What the tier works beside."""

    memory: Store
    moving: Movement | None
    joined: Joined
    slab: Slab
    queue_bytes: dict[Kind, int]
    after: Callable[[], None]
    """To be called when jobs of memory and of the SSD may have come."""
    changed: Callable[[], None]
    """To be called when who waits for room may have it."""
    notify: Callable[[int], None]
    """Clients of a tenant, by memory's number, are to ask whether there is something for them."""
    tell: Callable[[list[int]], None]
    """Sessions of memory's store that are to look again, since their device is lost."""


class Gpu:
    """All devices of one daemon."""

    def __init__(self, settings: Settings, evict: Evict, node: Node) -> None:
        self._settings = settings
        self._marks = evict
        self._node = node
        self.tier = GpuTier(node.memory, node.moving, node.joined, pid=os.getpid())
        self.exporter = Generation.mine().to_bytes()
        self.locks = SlabLocks(node.slab, node.memory)
        self._kind = HandleKind[settings.handles.upper()]
        self._of: dict[str, OneDevice] = {}
        self._why = "its devices are being opened"
        self._missing: tuple[str, ...] = ()
        self._isolated = Isolated()
        self._opening: asyncio.Task[None] | None = None
        self._leaving = False

    # -- begin and end

    async def start(self) -> None:
        """Opens the devices, and waits OPEN_S for it; memory of the slab is there, and its hooks are set."""
        slab = self._node.slab
        added, dropping = slab.added, slab.dropping

        def also_added(segment: SlabSegment) -> None:
            added(segment)
            self.locks.added(segment.id, segment.mapping.size_bytes)

        def also_dropping(number: int) -> None:
            dropping(number)
            self.locks.dropping(number)

        slab.added, slab.dropping = also_added, also_dropping
        self._opening = asyncio.get_running_loop().create_task(self._open(), name="opening devices")
        await asyncio.wait({self._opening}, timeout=OPEN_S)

    async def _open(self) -> None:
        wanted = self._settings.wanted
        try:
            found = await self._isolated.call(
                "opening devices", lambda: opening.devices_of(wanted), timeout_s=OPEN_MAX_S
            )
            for device in found.devices:
                self._add(device)
        except DeviceError as e:
            self._why = f"{e}; start the daemon again when the driver answers"
        except Exception as e:
            log.exception("devices could not be opened")
            self._why = f"{type(e).__name__}: {e}"
        else:
            self._missing = found.missing
            self._why = "" if found.devices else "; ".join(found.missing)
        if self._why:
            log.warning("there is no GPU tier", reason=self._why)
        for why in self._missing if self._of else ():
            log.warning("a device is not there", reason=why)

    def _add(self, device: Device) -> None:
        pool = self.tier.add(
            device.uuid,
            Unread(),
            size_bytes=self._settings.size_bytes,
            queue_bytes=self._node.queue_bytes,
            policy=self._marks.policy,
        )
        self._of[device.uuid] = OneDevice(
            device,
            pool,
            self._kind,
            self._node.slab,
            self.locks,
            changed=self._changed,
            tell=self._node.tell,
            notify=self._node.notify,
        )
        log.info("a device is in use", device=device.uuid, name=device.name, pool_mib=self._settings.size_bytes >> 20)

    async def save(self, limit_s: float, progress: Callable[[int], None]) -> int:
        """Copies down to memory what only devices have, as far as it gets; how many blocks did not make it."""
        until = time.monotonic() + limit_s
        for pool in self.tier.pools.values():
            row: int | None = 0
            while row is not None and time.monotonic() < until and not pool.trouble:
                row = pool.save_step(row, SAVE_ROWS)
                self.pump()
                while len(pool.downs.coming) >= (SAVE_ROWS if row is not None else 1) and time.monotonic() < until:
                    progress(len(pool.downs.coming))
                    await asyncio.sleep(LOOK_S)
        return sum(_blocks_only_on(pool) for pool in self.tier.pools.values())

    async def close(self) -> None:
        """Ends the workers and the page-locks; memory of devices goes with the process."""
        self._leaving = True
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        for one in self._of.values():
            await one.close()
        await self.locks.close()

    # -- jobs and time

    def pump(self) -> None:
        """Hands the workers what there is to do."""
        if self._leaving:
            return
        for one in self._of.values():
            one.pump()
        self._node.after()

    def _changed(self) -> None:
        """A worker has reported: what can be done has changed."""
        self.pump()
        self._node.changed()

    def tick(self) -> bool:
        """One turn of the daemon's loop."""
        now = time.monotonic()
        more = self.tier.tick(now, self._marks.low)
        more |= self._evict_step()
        for one in self._of.values():
            one.tick(now)
            if one.life is not None and self.locks.wants_device:
                self.locks.begin(one.life.device)
        self.locks.say()
        self._changed()
        return more

    def _evict_step(self) -> bool:
        """Keeps devices between their watermarks; one that can still make a segment is not full."""
        more = False
        for pool in self.tier.pools.values():
            segments = pool.store.segments
            if segments.idle_bytes < segments.segment_bytes:
                more |= pool.evict_step(self._marks.high, self._marks.low, EVICT_BLOCKS)
        return more

    # -- the port of the edge (server/calls.py)

    def devices(self) -> list[pb.Device]:
        """Those that were opened, also where they are out of use now."""
        return [
            pb.Device(
                uuid=one.uuid,
                generation=one.pool.generation,
                size_bytes=one.pool.store.segments.size_bytes,
                page_bytes=one.pool.store.segments.page_bytes,
                driver=one.driver,
                trouble=one.pool.trouble,
            )
            for one in self._of.values()
        ]

    def handle(self, uuid: str, segment: int) -> Handle | None:
        """Of a segment that is live in that device's pool."""
        one = self._of.get(uuid)
        if one is None or one.life is None or segment not in one.pool.store.segments.live:
            return None
        return one.life.memory.handle(segment)

    def stats(self) -> list[pb.GpuStats]:
        return [device_stats(one, self.locks) for one in self._of.values()]

    def off(self) -> str:
        """Why there is no device; "" where there is one."""
        return self._why

    def degraded(self) -> list[str]:
        """What is not as it should be while the rest serves."""
        if self._why:
            return [f"there is no GPU tier: {self._why}"]
        missing = [f"a device of gpu.devices is not used: {why}" for why in self._missing]
        return [*missing, *(why for one in self._of.values() for why in wrong_with(one))]


def _blocks_only_on(pool: GpuPool) -> int:
    """What would be gone with the device."""
    table, link = pool.store.table, pool.link
    return sum(table.state[row] == SEALED and link.only_here(link.block_at(row)) for row in range(len(table)))
