"""The daemon: wires the parts, starts and stops them in order.

Start: files and groups that settings name, locks, checks of the machine, addresses, slab
(prefaulted), a put and a get of its own, listeners, READY. Making a large slab takes
minutes, so whatever can be found wrong is found before it. Nothing listens before it can
serve, and the session socket is the last to. Stop: listeners, sessions, memory, locks.
"""

import asyncio
import contextlib
import gc
import secrets
import signal
import socket
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from kvstore import logs, machine, two_stores
from kvstore.config import Effective, Settings
from kvstore.config.values import host_and_port
from kvstore.core.probe import PROBE_TENANT
from kvstore.core.segments import segment_bytes_for
from kvstore.errors import ConfigError, StartupError
from kvstore.instance import InstanceLocks, group_number
from kvstore.logs import logger
from kvstore.loops import Loop
from kvstore.moving.mover import TICK_S, Mover
from kvstore.moving.removals import Removals
from kvstore.moving.upkeep import Upkeep
from kvstore.sdnotify import Notifier, passed_descriptors
from kvstore.server import addresses, stats
from kvstore.server.auth import Access
from kvstore.server.calls import Node
from kvstore.server.listener import SessionServer
from kvstore.server.readiness import Readiness, Troubles
from kvstore.slab_work import SlabWork
from kvstore.tiers.index import Indexes
from kvstore.tiers.slab import PREFIX, Slab
from kvstore.tiers.ssd.mounts import refuse_no_directory
from kvstore.warm import USES_S, Warm, choose_pages, place_for
from kvstored.v1 import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstore.gpu.mover import Gpu
    from kvstore.server.grpc_service import GrpcEdge
    from kvstore.server.http import HttpEdge

log = logger("kvstored")

EXPECTED_BLOCK_BYTES = 64 << 10
"""The indexes start large enough for a slab full of blocks of this size; they grow for smaller ones."""

EVICT_BLOCKS = 128
INDEX_STEP_S = 0.002
PROGRESS_S = 0.5
HEARTBEAT_S = 1.0
WATCHDOG_SHARE = 3
"""The watchdog is told so many times in its interval: two in a row may come late."""

EXIT_FAILED = 1
SAVE_S, GPU_SAVE_S = 20.0, 10.0
"""For what only memory holds to reach the SSD when the daemon stops, and what only devices hold to reach memory."""

GRPC_GRACE_S = 1.0
"""For calls under way when the daemon stops."""


def run(effective: Effective) -> int:
    """Runs the daemon in the foreground until SIGTERM or SIGINT; answers the exit status.

    Raises StartupError before it serves; where logs are for programs, that is a line of the log like any other.
    """
    settings = effective.settings
    server = settings.server
    logs.configure(server.log_level, server.log_format)
    machine.keep_heap_compact()
    try:
        paths = server.socket, server.state_dir, server.grpc_socket, server.http_socket
        with InstanceLocks(*paths, group=server.socket_group), logs.queued():
            return asyncio.run(_serve(settings))
    except StartupError as e:
        if server.log_format == "text" and not logs.stuck():
            raise
        log.error("cannot start", reason=str(e))  # noqa: TRY400 (the reason is all there is to say)
        return e.exit_status
    except Exception:
        log.exception("the daemon failed")
        return EXIT_FAILED


async def _serve(settings: Settings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    notifier = Notifier()
    daemon = Daemon(settings, notifier)

    def stopping() -> None:
        log.info("stopping")
        daemon.stopping = True
        notifier.stopping()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping)
    try:
        async with notifier.asking_for_time("start"):
            await daemon.start()
        if not daemon.stopping:
            notifier.ready(f"serving on unix://{settings.server.socket}")
        await stop.wait()
    except StoppedError:
        log.info("stopped before it was ready")
    finally:
        notifier.stopping()
        async with notifier.asking_for_time("stop"):
            await daemon.stop()
        logs.tell_suppressed(at_once=True)
        notifier.close()
    log.info("stopped")
    return 0


class StoppedError(Exception):
    """Told to stop while it was starting."""


class Daemon:
    """One running kvstored."""

    def __init__(self, settings: Settings, notifier: Notifier) -> None:
        self.settings = settings
        self.notifier = notifier
        self.stopping = False
        """Told to stop: a start that is under way ends with the next segment."""
        server = settings.server
        self.access = Access.load(server.tls_cert, server.tls_key, server.tokens)
        if settings.ssd.path is not None:
            refuse_no_directory(settings.ssd.path)
        left = passed_descriptors(PREFIX)
        self._huge_pages = choose_pages(settings.host, left)
        self._started = time.monotonic()
        epoch = secrets.randbits(63) | 1
        place = place_for(settings, notifier, left)
        size_bytes, devices = settings.host.size_bytes, bool(settings.gpu.size_bytes)
        self.warm = None if place is None else Warm(place, size_bytes, huge_pages=self._huge_pages, devices=devices)
        self.slab = Slab(huge_pages=self._huge_pages, place=place)
        stored_bytes = settings.host.size_bytes + (settings.ssd.size_bytes if settings.ssd.path is not None else 0)
        self.indexes = Indexes(epoch, stored_bytes // EXPECTED_BLOCK_BYTES)
        self.indexes.make(PROBE_TENANT, 1)
        stores = two_stores.build(settings, self.indexes, huge_pages=self._huge_pages)
        self.store, self.movement, self._joined = stores.memory, stores.movement, stores.joined
        self.work = SlabWork(
            self.store,
            self.slab,
            self.indexes,
            index_grows=lambda: self.loops[2].wake(),
            trouble=lambda why: self.troubles.meet(why),
        )
        self.node = Node(
            store=self.store,
            slab=self.slab,
            indexes=self.indexes,
            epoch=epoch,
            version=version("kvstored"),
            problems=self.problems,
            jobs_ready=self._work_ready,
            memory_changed=self.work.memory_future,
            started=self._started,
            lease_ttl_s=settings.lease.ttl_s,
            moving=self.movement,
        )
        self.mover = self._make_mover()
        self.upkeep = None
        if self.mover is not None:
            ssd = settings.ssd
            self.node.removals = self.mover.removals
            self.upkeep = self.node.ssd = Upkeep(self.mover, size_bytes=ssd.size_bytes, layout=ssd.layout)
        self.gpu = self.node.gpu = self._make_gpu()
        if self.warm is not None:
            self.node.witness, self.node.persist = self.warm.witness, self.warm
        self.loops = self._make_loops(notifier)
        self.readiness = Readiness(self.node, self.late_s, settings.evict.high)
        self.troubles = Troubles(self.node, self.readiness.works)
        self._beat = time.monotonic()
        self._late_s = 0.0
        self.sessions: SessionServer | None = None
        self.grpc: GrpcEdge | None = None
        self.http: HttpEdge | None = None

    def _make_loops(self, notifier: Notifier) -> list[Loop]:
        loops = [
            Loop("evict", 0.1, self._evict),
            Loop("expire", 0.2, self._expire),
            Loop("index", 0.25, self._index),
            Loop("heartbeat", HEARTBEAT_S, self._heartbeat),
        ]
        if self.mover is not None:
            loops.append(Loop("ssd", TICK_S, self.mover.tick))
        if self.gpu is not None:
            self._gpu_loop = Loop("gpu", TICK_S, self.gpu.tick)
            loops.append(self._gpu_loop)
        if self.warm is not None:
            loops.append(Loop("ledger", USES_S, self.warm.step))
        if notifier.watchdog_s:
            loops.append(Loop("watchdog", notifier.watchdog_s / WATCHDOG_SHARE, notifier.alive))
        return loops

    async def start(self) -> None:
        """Makes the memory, sees that a put and a get work, and begins to serve. Raises StartupError."""
        self.notifier.progress("making memory")
        size_bytes = self.settings.host.size_bytes
        segments = size_bytes // segment_bytes_for(size_bytes, self._huge_pages)
        machine.check_descriptors(segments if self.warm is None else 2 * segments)
        if self.warm is not None:
            await self.warm.open()
        self._check_machine()
        self.sessions = SessionServer(self.node, self.settings.server.socket, self.stats)
        self._take_addresses(self.sessions)
        await self._make_slab()
        if self.warm is not None:
            self.warm.watch(self.sessions, self.slab, self.movement)
        if self.mover is not None:
            self.mover.start()
        if self.gpu is not None:
            self.notifier.progress("opening devices")
            await self.gpu.start()
        for loop in self.loops:
            loop.start()
        gc.collect()
        gc.freeze()
        gc.enable()
        self._beat = time.monotonic()  # the loop has not turned while this started, and nobody waits for it yet
        tried = self.readiness.check()
        if not tried.ready:
            raise StartupError(f"the store does not work: {tried.wrong()}")
        self.notifier.progress("opening listeners")
        await self._listen()
        log.info(f"ready: serving on unix://{self.settings.server.socket}")

    def _take_addresses(self, sessions: SessionServer) -> None:
        """Binds the session socket, and sees that the ports of the others can be had, all at once.

        They are given back: a port of gRPC cannot be bound without listening.
        """
        server = self.settings.server
        group = group_number(server.socket_group) if server.socket_group else None
        try:
            sessions.bind(group)
        except OSError as e:
            raise StartupError(f"server.socket: cannot listen on {server.socket}: {e.strerror}") from e
        with contextlib.ExitStack() as held:
            taken: list[list[socket.socket]] = []
            for setting, address in (("server.grpc", server.grpc), ("server.http", server.http)):
                try:
                    taken.append(addresses.bound(address, setting)[0] if host_and_port(address) else [])
                except OSError as e:
                    raise StartupError(e.strerror or str(e)) from e
                for sock in taken[-1]:
                    held.enter_context(sock)
            both = addresses.shared(*taken)
            if both:
                raise ConfigError(f"server.http: {both} is an address of server.grpc as well; choose another port")

    async def _listen(self) -> None:
        """The addresses that another process may have first, so that who cannot start has had no client."""
        server = self.settings.server
        assert self.sessions is not None
        if server.http:
            await self._start_http()
        if server.grpc:
            await self._start_grpc()
        try:
            self.sessions.listen()
        except OSError as e:
            raise StartupError(f"server.socket: cannot listen on {server.socket}: {e.strerror}") from e

    async def _start_grpc(self) -> None:
        from kvstore.server.grpc_service import GrpcEdge  # a daemon without gRPC does not pay for its memory

        self.grpc = GrpcEdge(self.node, self.settings.server.grpc, self.stats, self.access)
        try:
            await self.grpc.start()
        except OSError as e:
            raise StartupError(e.strerror or str(e)) from e

    async def _start_http(self) -> None:
        from kvstore.server.http import HttpEdge  # the same with HTTP
        from kvstore.server.metrics import Metrics

        server, tokens = self.settings.server, self.access.tokens
        # Of this machine anybody may look at counts; what others reach has both (kvstore/config sees to it).
        guarded = server.http_for_others
        self.http = HttpEdge(
            server.http,
            render=Metrics(self.stats).render,
            ready=self.readiness.check,
            bearer=(lambda token: tokens.check(token) is not None) if guarded and tokens is not None else None,
            tls=self.access.tls if guarded else None,
        )
        try:
            await self.http.start()
        except OSError as e:
            raise StartupError(e.strerror or str(e)) from e

    async def stop(self) -> None:
        """Ends sessions and loops and gives the memory back."""
        if self.http is not None:
            await self.http.stop()
        if self.grpc is not None:
            await self.grpc.stop(GRPC_GRACE_S)
        if self.sessions is not None:
            self.sessions.close()
        if self.gpu is not None and (self.upkeep is not None or self.warm is not None):
            await self._save_devices(self.gpu)
        if self.upkeep is not None:
            await self.upkeep.close()
            await self._save(self.upkeep)
        for loop in self.loops:
            await loop.stop()
        if self.gpu is not None:
            await self.gpu.close()
        if self.mover is not None:
            await self.mover.removals.close(self.mover.pump)
            await self.mover.close()
        await self.work.close()
        if self.warm is not None:
            await self.warm.close()
        self.indexes.close()
        self.slab.close()

    def _make_mover(self) -> Mover | None:
        path = self.settings.ssd.path
        if self.movement is None or path is None:
            return None
        return Mover(
            path,
            self.movement,
            self.slab,
            layout=self.settings.ssd.layout,
            size_bytes=self.settings.ssd.size_bytes,
            free_floor_bytes=self.settings.ssd.free_floor_bytes,
            low=self.settings.evict.low,
            memory_came=self._ssd_moved,
            removals=Removals(self.settings.server.state_dir, self.movement),
        )

    def _make_gpu(self) -> "Gpu | None":
        settings = self.settings
        if not settings.gpu.size_bytes:
            return None
        from kvstore.gpu import mover  # the same: nothing of it is there where it is off

        assert self._joined is not None, "a device's blocks are in no index"
        return mover.Gpu(
            settings.gpu,
            settings.evict,
            mover.Node(
                memory=self.store,
                moving=self.movement,
                joined=self._joined,
                slab=self.slab,
                queue_bytes=two_stores.queue_bytes(settings),
                after=self._after_devices,
                changed=self.work.memory_came,
                notify=self.indexes.notify,
                tell=self._tell,
            ),
        )

    def _ssd_moved(self) -> None:
        """Blocks came to memory, or slots in it are free again."""
        if self.gpu is not None:
            self.gpu.pump()
        self.work.run()
        self.work.memory_came()

    def _after_devices(self) -> None:
        """What is done on devices may want memory made, or blocks of the SSD."""
        self.work.run()
        if self.mover is not None:
            self.mover.pump()

    def _tell(self, sessions: list[int]) -> None:
        """The device of these is lost: what they hold is not its any more, and they look what there is."""
        for number in sessions:
            self.node.device_clients.quiet(number)
        for tenant in {self.store.sessions[each].tenant.id for each in sessions if each in self.store.sessions}:
            self.indexes.notify(tenant)

    async def _save_devices(self, gpu: "Gpu") -> None:
        lost = await gpu.save(GPU_SAVE_S, lambda left: self.notifier.progress(f"saving devices: {left} blocks left"))
        if lost:
            log.warning("blocks of devices were not saved to memory", blocks_not_saved=lost)

    async def _save(self, upkeep: Upkeep) -> None:
        """Writes out what only memory holds, as far as it gets in SAVE_S."""
        began = time.monotonic()

        def progress(left: int) -> None:
            self.notifier.progress(f"writing to the SSD: {left} blocks left")

        lost, took_s = await upkeep.save(SAVE_S, progress), time.monotonic() - began
        if lost:
            why = self.movement.trouble if self.movement is not None else ""
            log.warning(
                "blocks were not saved to the SSD", blocks_not_saved=lost, reason=why or "no time or room for them"
            )
        log.info("memory saved to the SSD", blocks_not_saved=lost, seconds=round(took_s, 2))

    def stats(self) -> pb.StatsReply:
        """What the daemon says of itself."""
        return stats.build(
            self.node,
            loops=[loop.stats() for loop in self.loops],
            lock_error=self.slab.lock_error,
            socket=str(self.settings.server.socket),
            grpc=self.grpc.address if self.grpc is not None else "",
            http=self.http.address if self.http is not None else "",
        )

    def problems(self) -> list[str]:
        """Why the daemon is not healthy; empty when it is."""
        found = [f"background loop {loop.name}: {loop.last_error}" for loop in self.loops if loop.failing]
        found += self.troubles.names()
        if self.stopping:
            found.append("the daemon is stopping")
        return found

    def late_s(self) -> float:
        """How much later than it should the event loop turned, last time or now."""
        return max(self._late_s, time.monotonic() - self._beat - HEARTBEAT_S, 0.0)

    # -- memory

    def _check_machine(self) -> None:
        size_bytes = self.settings.host.size_bytes
        if not self._huge_pages:
            machine.check_memory(size_bytes - (self.warm.found_bytes if self.warm is not None else 0))

    async def _make_slab(self) -> None:
        size_bytes = self.settings.host.size_bytes
        begun = said = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal said
            if self.stopping:
                raise StoppedError
            if done == total or time.monotonic() - said >= PROGRESS_S:
                said = time.monotonic()
                log.info("prefaulting memory", done_mib=done >> 20, of_mib=total >> 20)
            self.notifier.progress(f"prefaulting memory: {done >> 20} of {total >> 20} MiB")

        try:
            if self.warm is not None:
                await self.warm.adopt(self.store, self.slab, self.indexes, progress)
            else:
                await self.work.make_all(progress)
        except OSError as e:
            raise StartupError(
                f"host.size: {size_bytes} bytes of shared memory could not be made ({e}); choose a smaller host.size"
            ) from e
        if self.slab.lock_error:
            log.warning("the slab is not locked in memory and may be swapped out", reason=self.slab.lock_error)
        log.info("slab ready", size_mib=size_bytes >> 20, seconds=round(time.monotonic() - begun, 2))

    def _work_ready(self) -> None:
        """After a call that may have left jobs, or found a pool short of free slots."""
        self.work.run()
        if self.mover is not None:
            self.mover.pump()
        if self.gpu is not None:
            self.gpu.pump()
            self._gpu_loop.wake()
        self.loops[0].wake()

    # -- steps of the loops

    def _evict(self) -> bool:
        ended = self.store.room.waits_ended
        more = self.store.evict_step(self.settings.evict.high, self.settings.evict.low, EVICT_BLOCKS)
        if self.store.room.waits_ended != ended:
            self.work.memory_came()
        self.work.run()
        return more

    def _expire(self) -> bool:
        return self.store.expire(time.monotonic())

    def _index(self) -> bool:
        return self.indexes.step(time.monotonic, INDEX_STEP_S)

    def _heartbeat(self) -> bool:
        now = time.monotonic()
        self._late_s, self._beat = now - self._beat - HEARTBEAT_S, now
        self.indexes.beat(time.monotonic_ns())
        logs.tell_suppressed()
        self.troubles.settle(now)
        return False
