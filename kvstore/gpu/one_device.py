"""One device from one opening to the next: its workers, what becomes of them when it is lost, and how it comes back.

A device is lost when a call says so, and when one does not return within its limit. Its pool is
told first, so that everybody who waits is answered; then its workers report what they have in
hands, as they come to it. After that it is opened again, every PROBE_S, and begins with everything
made anew; nothing of an earlier life is used.

Memory of a life that is over goes with a context that has ended. Where it is still there, since a
call hung only, it is kept until every process that could have mapped it is gone and nothing of it
runs on the device: to free what somebody has mapped is undefined.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.core.gpu_jobs import AwaitQuiet, CopyDown, CopyUp, GpuJob, StopWatching, WatchEvent
from kvstore.core.gpu_pool import GpuPool
from kvstore.core.segments import DropSegment, MakeSegment
from kvstore.gpu import opening, quiet
from kvstore.gpu.copier import Copier, Copy
from kvstore.gpu.device_memory import SegmentMemory
from kvstore.gpu.pagelocks import SlabLocks
from kvstore.gpu.slabs import SlabBytes
from kvstore.gpu.tasks import Tasks
from kvstore.gpu.watching import Watching
from kvstore.logs import logger
from kvstored_cuda.devices import Device, HandleKind
from kvstored_cuda.devices.errors import DeviceError, TooManyCalls
from kvstored_cuda.devices.isolated import Isolated

log = logger("kvstored.gpu")

PROBE_S = 5.0
"""Between two looks at a device in use, two attempts to open one that was lost, or to free what is left of it."""

PROBE_MAX_S = 30.0
"""For one look: a registration of page-locked memory may hold the driver's locks for seconds."""

OPEN_S = 30.0
"""For one attempt: a context takes a second, a driver that starts longer."""

QUIET_S = 5.0
"""For the driver to say what runs on a device."""

QUESTIONS_MAX = 4
"""Dead processes that the driver is asked about at a time."""

CLOSE_S = 5.0
"""For copies under way to end when the daemon stops."""

LOOK_S = 0.01


@dataclass(eq=False)
class Life:
    """An open device and its workers."""

    device: Device
    isolated: Isolated = field(default_factory=Isolated)
    """Calls of our own."""
    clients: Isolated = field(default_factory=Isolated)
    """Those that are made for clients: however many hang, they take no place from the others."""
    looking: bool = False
    tasks: Tasks = field(init=False)
    memory: SegmentMemory = field(init=False)
    up: Copier = field(init=False)
    down: Copier = field(init=False)
    watching: Watching = field(init=False)

    @property
    def copying(self) -> bool:
        return self.up.busy or self.down.busy

    @property
    def calling(self) -> bool:
        """Calls have not returned, or not begun."""
        states = self.isolated.state(), self.clients.state()
        return any(state.running or state.waiting for state in states)


@dataclass(eq=False)
class _Remains:
    """A life that is over, and whose processes may have its memory mapped."""

    life: Life
    processes: set[tuple[int, int]]
    busy: bool = False


class OneDevice:
    """Of one UUID, under one pool."""

    def __init__(
        self,
        device: Device,
        pool: GpuPool,
        kind: HandleKind,
        slab: SlabBytes,
        locks: SlabLocks,
        *,
        changed: Callable[[], None],
        tell: Callable[[list[int]], None],
        notify: Callable[[int], None],
    ) -> None:
        """`changed` is called when what can be done has; `tell` with the sessions whose device was lost; `notify` with
        tenants, by memory's number, whose clients are to close memory."""
        self.uuid, self.name, self.driver = device.uuid, device.name, device.driver
        self.pool = pool
        self.kind = kind
        self._slab = slab
        self._locks = locks
        self._changed = changed
        self._tell = tell
        self._notify = notify
        self.remains: list[_Remains] = []
        self.cannot_tell = ""
        """Why it could not be found out, when it was asked last, whether a dead process has ended on the device."""
        self.not_opened = ""
        """Why the last attempt to open it again failed."""
        self._questions = asyncio.Semaphore(QUESTIONS_MAX)
        self._isolated = Isolated()
        self._tasks = Tasks(lambda why: None)  # an attempt that met a bug is made again
        self._probe_at = 0.0
        self._opening = False
        self.life: Life | None = None
        self._live(device)

    def _live(self, device: Device) -> None:
        pool, life = self.pool, Life(device)

        def lost(why: str) -> None:
            self._lose(life, why)

        def made(segment: int, error: str) -> bool:
            wanted = pool.made(segment, error, time.monotonic()) if self.life is life else False
            self._changed()
            return wanted

        def copied(job: Copy, error: str) -> None:
            pool.copied(job, error, time.monotonic())

        def ended(number: int, error: str) -> None:
            pool.event_ended(number, error, time.monotonic())

        isolated, changed = life.isolated, self._changed
        tasks = life.tasks = Tasks(lambda why: lost(f"a worker failed: {why}"))
        life.memory = SegmentMemory(device, self.kind, isolated, tasks, made=made, lost=lost)
        life.up, life.down = (
            Copier(
                device,
                self._slab,
                self._locks,
                life.memory,
                isolated,
                tasks,
                copied=copied,
                ended=changed,
                lost=lost,
            )
            for _ in range(2)
        )
        life.watching = Watching(device, life.clients, tasks, ended=ended, changed=changed, lost=lost)
        self.life = life

    # -- jobs

    def pump(self) -> None:
        """Hands the workers what there is to do."""
        for job in self.pool.take_jobs(time.monotonic()):
            assert self.life is not None, "a device that is lost has jobs"
            self._submit(self.life, job)
        side, sessions = self.pool.link.side, self.pool.store.sessions.values()
        for tenant in {session.tenant.id for session in sessions if session.detach}:
            self._notify(side.memory_tenants[tenant].id)

    def _submit(self, life: Life, job: GpuJob) -> None:
        match job:
            case CopyUp():
                life.up.submit(job)
            case CopyDown():
                life.down.submit(job)
            case WatchEvent():
                commit = self.pool.commits.watched.get(job.number)
                life.watching.watch(job.number, job.event, None if commit is None else commit.session)
            case StopWatching():
                life.watching.stop(job.number)
            case AwaitQuiet():
                life.tasks.start(self._await_quiet(life, job), "asking whether a process has ended")
            case MakeSegment() | DropSegment():
                life.memory.submit(job)

    async def _await_quiet(self, life: Life, job: AwaitQuiet) -> None:
        async with self._questions:
            why = await self._still_there(life, job.pid, job.born)
        if self.life is life:
            self.pool.quiet(job.number, why, time.monotonic())
            self._changed()

    async def _still_there(self, life: Life, pid: int, born: int) -> str:
        """Why a process may still have something running there; "" where it has not."""
        try:
            why = await life.isolated.call(
                f"asking what runs on {self.uuid}",
                lambda: quiet.still_there(life.device, pid, born),
                timeout_s=QUIET_S,
                owner="quiet",
            )
        except DeviceError as e:
            self.cannot_tell = why = str(e)
        else:
            self.cannot_tell = ""
        return why

    # -- when it is lost

    def _lose(self, life: Life, why: str) -> None:
        if self.life is not life:
            return  # a worker of an earlier life
        log.error("a device is out of use", device=self.uuid, reason=why)
        processes = self._processes()
        self.life = None
        self.cannot_tell = self.not_opened = ""
        told = self.pool.lose(why)
        self._probe_at = time.monotonic() + PROBE_S
        life.memory.close()
        life.up.close(why)
        life.down.close(why)
        life.watching.close(why)
        self.remains.append(_Remains(life, processes))
        if self._locks.by is life.device:
            self._locks.end()
        self._tell(told)
        self._changed()

    def _processes(self) -> set[tuple[int, int]]:
        """Those that may have some of the device's memory mapped: number and start of each."""
        segments, sessions = self.pool.store.segments, self.pool.store.sessions
        mapped = (each.sessions for each in (*segments.live.values(), *segments.draining.values()))
        found = (sessions[number] for number in set().union(*mapped) if number in sessions)
        return {(session.pid, session.born) for session in found}

    def tick(self, now: float) -> None:
        """Tries again what is due."""
        if now < self._probe_at:
            return
        self._probe_at = now + PROBE_S
        for remains in self.remains:
            if not remains.busy:
                remains.busy = True
                self._tasks.start(self._clear_away(remains), "freeing a lost device")
        life = self.life
        if life is not None and not life.looking:
            life.looking = True
            life.tasks.start(self._look_after(life), "looking at a device")
        if life is None and self.pool.losing.over and not self._opening:
            self._opening = True
            self._tasks.start(self._open_again(), "opening a lost device")

    async def _look_after(self, life: Life) -> None:
        """A device that nobody uses may be lost as well; and what could not be freed may be by now."""
        device = life.device
        try:
            await life.isolated.call(f"looking at {self.uuid}", device.memory, timeout_s=PROBE_MAX_S, owner=self.uuid)
            if life.memory.unfreed:
                await life.memory.free_again()
        except TooManyCalls as e:
            log.warning("a device was not looked at", device=self.uuid, reason=str(e))
        except DeviceError as e:
            self._lose(life, str(e))
        finally:
            life.looking = False

    async def _open_again(self) -> None:
        try:
            found = await self._isolated.call(
                f"opening {self.uuid}",
                lambda: opening.devices_of([self.uuid]),
                timeout_s=OPEN_S,
                owner=self.uuid,
                late=lambda late: [device.close() for device in late.devices],
            )
        except DeviceError as e:
            self.not_opened = str(e)
        else:
            if found.devices:
                self._live(found.devices[0])
                self.pool.come()
                self.not_opened = ""
                log.info("a device is in use again", device=self.uuid)
            else:
                self.not_opened = "; ".join(found.missing)
        finally:
            self._opening = False
        self._changed()

    async def _clear_away(self, remains: _Remains) -> None:
        """Frees what a life has left, once nobody can touch it."""
        life = remains.life
        try:
            for pid, born in list(remains.processes):
                if await self._still_there(life, pid, born):
                    return
                remains.processes.remove((pid, born))
            if life.copying or not await life.memory.free_again() or life.calling:
                return
            self.remains.remove(remains)
            life.isolated.dispose(f"closing {self.uuid}", lambda: _close(life), owner=self.uuid)
        finally:
            remains.busy = False

    async def close(self) -> None:
        """Waits for copies under way, for at most CLOSE_S. Memory goes with the process."""
        life, until = self.life, time.monotonic() + CLOSE_S
        while life is not None and life.copying and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        if life is not None:
            life.tasks.cancel()
        self._tasks.cancel()

    # -- figures

    @property
    def calls_hanging(self) -> int:
        """Calls that are not back by their deadline, of all lives."""
        lives = [remains.life for remains in self.remains]
        if self.life is not None:
            lives.append(self.life)
        calls = [self._isolated, *(calls for life in lives for calls in (life.isolated, life.clients))]
        return sum(sum(isolated.state().abandoned.values()) for isolated in calls)

    @property
    def remaining_bytes(self) -> int:
        """Memory that is not the pool's any more and cannot be freed yet."""
        memories = [remains.life.memory for remains in self.remains]
        if self.life is not None:
            memories.append(self.life.memory)
        return sum(allocation.size_bytes for memory in memories for allocation in memory.unfreed)


def _close(life: Life) -> None:
    """In a thread."""
    life.up.end(CLOSE_S)
    life.down.end(CLOSE_S)
    life.device.close()
