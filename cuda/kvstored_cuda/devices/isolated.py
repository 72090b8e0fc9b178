"""Native calls that may block, each on a thread of its own with a deadline; what hangs costs nobody else anything.

Not a pool: in a pool of n threads the n-th call that hangs stops everybody. Here each owner
(a session, a device) has so many calls of its own at most, and is refused more
(TooManyCalls); the process has a bound as well, many owners wide.

A call that is not back by its deadline is abandoned: its waiter gets DeviceTimeout, the
thread stays until the call returns. It is counted and named in `state` until then; its
result goes to `late` (a mapping that nobody waits for any more has to be closed).

What must not be refused, since nobody would do it again (closing what a dead client had
open), is given to `dispose`: it waits for a free call of its owner. Calls do not hold
Python's lock while they block (see `cuda_driver`), or this would all be for nothing.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvstored_cuda.devices.errors import DeviceTimeout, TooManyCalls

log = logging.getLogger("kvstored_cuda")

OWNER_CALLS_MAX = 64
"""Calls of one owner at a time: the close of all buffers of an engine with 50 devices fits."""

CALLS_MAX = 1024
"""Calls of all owners at a time: a thread each."""

T = TypeVar("T")


@dataclass(frozen=True)
class IsolatedState:
    """For stats. running: calls under way, abandoned ones among them; abandoned: by name; oldest_s: the longest.

    waiting: disposals that have not begun. The rest counts since the start.
    """

    running: int
    waiting: int
    abandoned: dict[str, int]
    oldest_s: float
    timeouts: int
    reaped: int
    refused: int
    failed_disposals: int


class _Call(Generic[T]):
    def __init__(self, name: str, owner: str, work: Callable[[], T], late: Callable[[T], object] | None) -> None:
        self.name, self.owner, self.work, self.late = name, owner, work, late
        self.since = time.monotonic()
        self.finished = threading.Event()
        self.abandoned = False
        self.value: T | None = None
        self.error: BaseException | None = None
        self.tell: Callable[[], object] = lambda: None

    def take_error(self) -> BaseException | None:
        """Once: an error refers to the frames it came through, and they to this call, which must not refer to it then.

        Such a ring would keep what those frames hold (slots, mappings) until a collection, which engines switch off.
        """
        error, self.error = self.error, None
        return error

    def outcome(self) -> T:
        error = self.take_error()
        if error is not None:
            try:
                raise error
            finally:
                del error
        value: Any = self.value
        result: T = value
        return result


class Isolated:
    """Of one process. Thread-safe; `call` is for an event loop, `run` for threads."""

    def __init__(self, owner_calls_max: int = OWNER_CALLS_MAX, calls_max: int = CALLS_MAX) -> None:
        self._owner_calls_max, self._calls_max = owner_calls_max, calls_max
        self._lock = threading.Lock()
        self._running: set[_Call[Any]] = set()
        self._of_owner: Counter[str] = Counter()
        self._disposals: deque[_Call[Any]] = deque()
        self._timeouts = self._reaped = self._refused = self._failed_disposals = 0

    def state(self) -> IsolatedState:
        now = time.monotonic()
        with self._lock:
            return IsolatedState(
                len(self._running),
                len(self._disposals),
                dict(Counter(call.name for call in self._running if call.abandoned)),
                max((now - call.since for call in self._running), default=0.0),
                self._timeouts,
                self._reaped,
                self._refused,
                self._failed_disposals,
            )

    async def call(
        self,
        name: str,
        work: Callable[[], T],
        *,
        timeout_s: float,
        owner: str = "",
        late: Callable[[T], object] | None = None,
    ) -> T:
        """What `work` returns or raises. Raises DeviceTimeout, or TooManyCalls (then it was not begun).

        A caller that is cancelled abandons the call as a deadline does.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        call = _Call(name, owner, work, late)
        call.tell = lambda: loop.call_soon_threadsafe(ended.set)
        self._begin(call)
        try:
            async with asyncio.timeout(timeout_s):
                await ended.wait()
        except TimeoutError:
            return self._overdue(call, timeout_s)
        except BaseException:
            self._forget(call)
            raise
        return call.outcome()

    def run(
        self,
        name: str,
        work: Callable[[], T],
        *,
        timeout_s: float,
        owner: str = "",
        late: Callable[[T], object] | None = None,
    ) -> T:
        """The same for a thread: it waits."""
        call = _Call(name, owner, work, late)
        self._begin(call)
        try:
            if not call.finished.wait(timeout_s):
                return self._overdue(call, timeout_s)
        except BaseException:  # the interpreter's interrupt
            self._forget(call)
            raise
        return call.outcome()

    def dispose(self, name: str, work: Callable[[], object], *, owner: str = "") -> None:
        """Does it when it can; nobody waits. What it raises is logged and counted."""
        call = _Call(name, owner, work, None)
        call.abandoned = True
        with self._lock:
            self._disposals.append(call)
        self._start_disposals()

    def _overdue(self, call: _Call[T], timeout_s: float) -> T:
        if not self._abandon(call):
            return call.outcome()
        with self._lock:
            self._timeouts += 1
        raise DeviceTimeout(f"{call.name} did not return within {timeout_s} s")

    def _abandon(self, call: _Call[T]) -> bool:
        """Whether it still runs: then its result goes to `late` when it returns."""
        with self._lock:
            if not call.finished.is_set():
                call.abandoned = True
                return True
        return False

    def _forget(self, call: _Call[Any]) -> None:
        """Its caller goes away. Where it has just ended, nobody else would take what it opened."""
        late = call.late
        if not self._abandon(call) and call.take_error() is None and late is not None:
            self.dispose(call.name, lambda: late(call.value), owner=call.owner)

    def _begin(self, call: _Call[Any]) -> None:
        with self._lock:
            why = self._full(call.owner)
            if why:
                self._refused += 1
                raise TooManyCalls(f"{call.name} was not begun: {why}; {TooManyCalls.remedy}")
            self._enter(call)
        self._start(call)
        self._start_disposals()

    def _full(self, owner: str) -> str:
        if self._of_owner[owner] >= self._owner_calls_max:
            return f"{self._owner_calls_max} calls of {owner or 'this process'} have not returned"
        if len(self._running) >= self._calls_max:
            return f"{self._calls_max} calls have not returned"
        return ""

    def _enter(self, call: _Call[Any]) -> None:
        call.since = time.monotonic()
        self._running.add(call)
        self._of_owner[call.owner] += 1

    def _leave(self, call: _Call[Any]) -> None:
        with self._lock:
            self._running.discard(call)
            self._of_owner[call.owner] -= 1
            if not self._of_owner[call.owner]:
                del self._of_owner[call.owner]

    def _start(self, call: _Call[Any]) -> None:
        try:
            threading.Thread(target=self._work, args=(call,), name=f"isolated-{call.name}", daemon=True).start()
        except RuntimeError as e:  # no more threads
            self._leave(call)
            raise TooManyCalls(f"{call.name} was not begun: {e}; {TooManyCalls.remedy}") from e

    def _start_disposals(self) -> None:
        while True:
            with self._lock:
                call = next((one for one in self._disposals if not self._full(one.owner)), None)
                if call is None:
                    return
                self._disposals.remove(call)
                self._enter(call)
            try:
                self._start(call)
            except TooManyCalls:
                with self._lock:
                    self._disposals.appendleft(call)
                return  # it is begun when another call returns

    def _work(self, call: _Call[Any]) -> None:
        try:
            call.value = call.work()
        except BaseException as e:  # noqa: BLE001  it is raised where the result is waited for
            call.error = e
        with self._lock:
            call.finished.set()
            abandoned = call.abandoned
        try:
            if abandoned:
                self._reap(call)
        finally:
            self._leave(call)
            if not abandoned:
                self._tell(call)
            self._start_disposals()

    def _reap(self, call: _Call[Any]) -> None:
        with self._lock:
            self._reaped += 1
        error = call.take_error()
        try:
            if error is None and call.late is not None:
                call.late(call.value)
        except Exception as e:  # noqa: BLE001  counted and logged below
            error = e
        if error is not None:
            with self._lock:
                self._failed_disposals += 1
            why = f"{type(error).__name__}: {error}"  # no record of a log keeps the error
            log.warning("%s, for which nobody waited any more, failed: %s", call.name, why)
        del error  # it may refer to this frame

    def _tell(self, call: _Call[Any]) -> None:
        try:
            call.tell()
        except RuntimeError:  # the event loop is closed: as if nobody waited
            self._reap(call)
