"""Events of clients, watched until they are complete: opened, asked again and again, closed.

All that enters the driver runs apart from the event loop. Opening and closing is on the account of
the client's process: what it leaves hanging is its own, and takes nothing from others. Events are
asked in one call for all of them, every ASK_FIRST_S growing to ASK_MAX_S; where one does not answer
within ANSWER_S, the others are asked without it, and without what else its process has, until it
does.

An event counts as complete only if its process was seen running after it had said so: what one of
a dead process says is not defined (`processes.lives` is what "dead" is). It is closed once no call
uses it.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from kvstore.core.holds import Session
from kvstore.gpu.processes import lives
from kvstore.gpu.tasks import Tasks
from kvstored_cuda.devices import Device, Event, Handle
from kvstored_cuda.devices.errors import DeviceError, DeviceLost, DeviceTimeout, InvalidHandle, TooManyCalls
from kvstored_cuda.devices.handles import start_ticks
from kvstored_cuda.devices.isolated import Isolated

ASK_FIRST_S, ASK_MAX_S = 0.001, 0.01
"""Pauses between two questions: short after something new came, since copies of a few blocks take a millisecond."""

ANSWER_S = 0.25
"""For one round of questions; cuEventQuery takes microseconds."""

OPEN_S = 5.0
"""For one event to be opened."""

OPENS_MAX = 8
"""Events of one process that are being opened at a time: it may have more commits at once than calls of the driver."""

STOPPED = "nobody waits for it any more"


@dataclass(eq=False)
class _Watched:
    """One event, from its job to its report and its close."""

    number: int
    pid: int
    born: int
    event: Event | None = None
    """None until it is open."""
    used: bool = False
    """A call has it in hands."""
    over: bool = False
    """It was reported."""

    @property
    def owner(self) -> str:
        return f"process {self.pid}"


class _Round:
    """One call that asks some events, and may be given up in the middle."""

    def __init__(self, watched: list[_Watched]) -> None:
        self.said: list[tuple[_Watched, str | None]] = []
        """Those that have an answer: "" (complete) or why they failed; None: not yet."""
        self.lost = ""
        self.silent: _Watched | None = None
        """The one that was being asked when the round was given up."""
        self._lock = threading.Lock()
        self._left = deque(watched)
        self._asked: _Watched | None = None
        self._given_up = False

    def ask(self) -> None:
        """In a thread."""
        while (one := self._next()) is not None:
            answer: str | None = None
            try:
                assert one.event is not None, "an event is asked that is not open"
                answer = "" if one.event.query() else None
            except DeviceLost as e:
                self.lost = str(e)
            except DeviceError as e:
                answer = str(e)
            except Exception as e:  # noqa: BLE001 (a bug: it is this event's answer, and the others are asked)
                answer = f"{type(e).__name__}: {e}"
            with self._lock:
                self.said.append((one, answer))
                self._asked = None

    def _next(self) -> _Watched | None:
        with self._lock:
            if not self._given_up and not self.lost and self._left:
                self._asked = self._left.popleft()
            return self._asked

    def give_up(self) -> None:
        """Asks no more than what is being asked."""
        with self._lock:
            self._given_up = True
            self.silent = self._asked


class Watching:
    """Of one life of one device."""

    def __init__(
        self,
        device: Device,
        isolated: Isolated,
        tasks: Tasks,
        *,
        ended: Callable[[int, str], None],
        changed: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        """`ended` is told how each watch ended, `changed` that some did, `lost` why the device is of no use."""
        self._device = device
        self._isolated = isolated
        self._tasks = tasks
        self._ended = ended
        self._changed = changed
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._watched: dict[int, _Watched] = {}
        self._silent: dict[int, _Watched] = {}
        """By process: the event that has been asked and has not answered."""
        self._turns: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()
        """By process, for its events to be opened."""
        self._asking: asyncio.Task[None] | None = None
        self._fresh = asyncio.Event()
        self._closed = ""

    @property
    def silent(self) -> int:
        """Processes with an event that does not answer."""
        return len(self._silent)

    # -- jobs

    def watch(self, number: int, event: bytes, session: Session | None) -> None:
        """Takes a WatchEvent; `session` is the client's, None where that has ended meanwhile. Never waits."""
        if self._closed or session is None:
            self._loop.call_soon(self._refuse, number, self._closed or STOPPED)
            return
        try:
            handle, born = self._checked(event, session)
        except DeviceError as e:
            self._loop.call_soon(self._refuse, number, str(e))
            return
        watched = self._watched[number] = _Watched(number, session.pid, born)
        self._tasks.start(self._open_in_turn(watched, handle), "opening an event")

    def _checked(self, event: bytes, session: Session) -> tuple[Handle, int]:
        """The handle, and when the session's process began. Raises InvalidHandle for one of another process.

        By its start alone where the numbers differ: a process in a PID namespace of its own has another one there.
        """
        handle = Handle.from_bytes(event)
        of, born = handle.generation, session.born or start_ticks(session.pid) or 0
        if of.born not in (born, 0) or not born:
            raise InvalidHandle(f"its event is of {of}, and process {session.pid} of its session is another one")
        return handle, born

    def _refuse(self, number: int, why: str) -> None:
        self._ended(number, why)
        self._changed()

    def stop(self, number: int) -> None:
        """A StopWatching: the watch ends now."""
        watched = self._watched.get(number)
        if watched is not None:
            self._end(watched, STOPPED)
            self._changed()

    def close(self, why: str) -> None:
        """The device is lost: every watch ends."""
        self._closed = why
        for watched in list(self._watched.values()):
            self._end(watched, why)

    # -- events

    async def _open_in_turn(self, watched: _Watched, handle: Handle) -> None:
        turn = self._turns.get(watched.pid)
        if turn is None:
            turn = self._turns[watched.pid] = asyncio.Semaphore(OPENS_MAX)
        async with turn:
            if not watched.over:
                await self._open(watched, handle)

    async def _open(self, watched: _Watched, handle: Handle) -> None:
        device = self._device
        try:
            event, complete = await self._isolated.call(
                f"opening an event on {device.uuid}",
                lambda: _opened(device, handle),
                timeout_s=OPEN_S,
                owner=watched.owner,
                late=lambda found: found[0].close(),
            )
        except DeviceLost as e:
            self._lost(str(e))
            return
        except DeviceError as e:
            self._end(watched, str(e))
            self._changed()
            return
        watched.event = event
        if watched.over:
            self._dispose(watched)
        elif complete:
            self._complete(watched)
            self._changed()
        else:
            self._fresh.set()
            if self._asking is None or self._asking.done():
                self._asking = self._tasks.start(self._ask(), f"events of {device.uuid}")

    async def _ask(self) -> None:
        pause_s = ASK_FIRST_S
        while not self._closed:
            waiting = [one for one in self._watched.values() if one.event is not None and one.pid not in self._silent]
            if not waiting and not self._watched:
                return
            if await self._round(waiting):
                self._changed()
            pause_s = ASK_FIRST_S if self._fresh.is_set() else min(2 * pause_s, ASK_MAX_S)
            self._fresh.clear()
            await asyncio.sleep(pause_s)

    async def _round(self, waiting: list[_Watched]) -> bool:
        """Asks all of these once; whether a watch ended."""
        if not waiting:
            return False
        for one in waiting:
            one.used = True
        asked = _Round(waiting)
        try:
            await self._isolated.call(
                f"asking events of {self._device.uuid}",
                asked.ask,
                timeout_s=ANSWER_S,
                owner="events",
                late=lambda _: self._loop.call_soon_threadsafe(self._answered, asked),
            )
        except TooManyCalls:
            pass  # 64 processes have an event that does not answer; asked again in a moment
        except DeviceTimeout:
            asked.give_up()
            if asked.silent is not None:
                self._silent[asked.silent.pid] = asked.silent
        for one in waiting:
            if one is not asked.silent:
                self._unused(one)
        return self._take(asked)

    def _answered(self, asked: _Round) -> None:
        """The call of a round that was given up has returned."""
        silent = asked.silent
        if silent is not None:
            del self._silent[silent.pid]
            self._unused(silent)
        if self._take(asked):
            self._changed()

    def _take(self, asked: _Round) -> bool:
        """What a round has found; whether a watch ended."""
        if asked.lost and not self._closed:
            self._lost(asked.lost)
            return False
        ended = False
        for one, answer in list(asked.said):
            if answer is None or one.over:
                continue
            ended = True
            if answer:
                self._end(one, answer)
            else:
                self._complete(one)
        return ended

    def _complete(self, watched: _Watched) -> None:
        """An event that says so."""
        gone = "" if lives(watched.pid, watched.born) else f"process {watched.pid} is gone, or cannot be seen from here"
        self._end(watched, gone)

    def _end(self, watched: _Watched, error: str) -> None:
        if not watched.over:
            watched.over = True
            del self._watched[watched.number]
            self._ended(watched.number, error)
            self._dispose(watched)

    def _unused(self, watched: _Watched) -> None:
        watched.used = False
        if watched.over:
            self._dispose(watched)

    def _dispose(self, watched: _Watched) -> None:
        """Closes it, once it is over, open, and no call uses it."""
        if watched.event is not None and not watched.used:
            event, watched.event = watched.event, None
            self._isolated.dispose(f"closing an event on {self._device.uuid}", event.close, owner=watched.owner)


def _opened(device: Device, handle: Handle) -> tuple[Event, bool]:
    """In a thread: opens it and asks it once, since most are complete by then."""
    event = device.open_event(handle, handle.generation)
    try:
        return event, event.query()
    except BaseException:
        event.close()
        raise
