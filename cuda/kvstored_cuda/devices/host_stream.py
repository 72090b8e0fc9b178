"""Streams of a HostDevice: one worker thread each, jobs in order, the queue bounded.

The first job that fails loses the device for the whole process: what is enqueued after it,
on whatever stream, does not run, and every later call answers with the same error, as the
sticky errors of CUDA do. Events after it are never complete.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvstored_cuda.devices.device import Event, Stream
from kvstored_cuda.devices.errors import DeviceError, DeviceLost, DeviceTimeout, InvalidHandle

log = logging.getLogger("kvstored_cuda")

JOBS_MAX = 1024
"""Jobs that a stream holds; the call that would enqueue one more waits, as CUDA's launch queue of 1024 does."""

ENQUEUE_S = 60.0
"""The longest such wait."""

Job = Callable[[], None]


class Owner(Protocol):
    """The device that a stream belongs to."""

    def meet(self, call: str) -> None: ...

    def require_alive(self) -> None: ...

    def lose(self, why: str) -> None: ...

    @property
    def lost(self) -> bool: ...


class HostStream(Stream):
    """`pointer` is a number that the device knows it by."""

    def __init__(self, owner: Owner, pointer: int) -> None:
        self.pointer = pointer
        self._owner = owner
        self._jobs: queue.Queue[tuple[Job, Job] | None] = queue.Queue(JOBS_MAX)
        self._changed = threading.Condition()
        self._enqueued = 0
        self._done = 0
        self.closed = False
        self._thread = threading.Thread(target=self._work, name=f"host-stream-{pointer:x}", daemon=True)
        self._thread.start()

    def enqueue(self, job: Job, after: Job = lambda: None) -> None:
        """Runs `job` after all that came before; what it raises loses the device. Also how a kernel is launched.

        after: done in any case when its turn has come, also where the job is skipped or was refused here.
        """
        try:
            self._put(job, after)
        except BaseException:
            after()
            raise

    def _put(self, job: Job, after: Job) -> None:
        self._owner.require_alive()
        if self.closed:
            raise InvalidHandle("the stream is closed")
        with self._changed:
            self._enqueued += 1
        try:
            self._jobs.put((job, after), timeout=ENQUEUE_S)
        except queue.Full:
            with self._changed:
                self._enqueued -= 1
            raise DeviceTimeout(f"{JOBS_MAX} jobs are enqueued and none ended within {ENQUEUE_S} s") from None

    def wait(self, event: Event) -> None:
        self._owner.require_alive()
        if not isinstance(event, Awaited):
            raise InvalidHandle("an event of another kind of device")
        self.enqueue(*event.waiter(lambda: self._owner.lost))

    def query(self) -> bool:
        self._owner.require_alive()
        with self._changed:
            return self._done == self._enqueued

    def drain(self, timeout_s: float) -> bool:
        """Waits until all is done that is enqueued now; whether that came in time. A stream that waits for itself is
        drained."""
        if threading.current_thread() is self._thread:
            return True
        with self._changed:
            due = self._enqueued
            return self._changed.wait_for(lambda: self._done >= min(due, self._enqueued), timeout_s)

    def close(self) -> None:
        if not self.closed and self.pointer:  # the default stream stays
            self.end()

    def end(self) -> None:
        """Ends the worker once all is done."""
        self.closed = True
        try:
            self._jobs.put_nowait(None)
        except queue.Full:
            threading.Thread(target=self._jobs.put, args=(None,), daemon=True).start()

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, after = entry
            try:
                if not self._owner.lost:
                    job()
            except DeviceError as e:
                self._owner.lose(str(e))
            except Exception as e:  # a thread must not die unseen: whatever a kernel raises is a fault of the device
                log.exception("a job on a stream of a HostDevice")
                self._owner.lose(f"{type(e).__name__}: {e}")
            finally:
                self._end(after)
                with self._changed:
                    self._done += 1
                    self._changed.notify_all()

    def _end(self, after: Job) -> None:
        try:
            after()
        except DeviceError as e:
            self._owner.lose(str(e))


class Awaited(Event):
    """An event that a HostStream can wait for."""

    def waiter(self, give_up: Callable[[], bool]) -> tuple[Job, Job]:
        """A job that ends when the work before the last `record` is done, or when it is to give up; and what to do
        after it."""
        raise NotImplementedError


def poll_until(done: Callable[[], bool], give_up: Callable[[], bool], pause_s: float) -> None:
    """For waits inside a stream, which the stream's own deadline bounds. Raises DeviceLost when it gives up."""
    pause = threading.Event()
    while not done():
        if give_up():
            raise DeviceLost("the device was lost while a stream waited for an event")
        pause.wait(pause_s)


def drain_all(streams: list[HostStream], timeout_s: float, what: str) -> None:
    """What CUDA does before it frees. Raises DeviceTimeout when work is still running then."""
    until = time.monotonic() + timeout_s
    for stream in streams:
        if not stream.drain(max(until - time.monotonic(), 0)):
            raise DeviceTimeout(f"{what}: work that was enqueued did not end within {timeout_s} s")
