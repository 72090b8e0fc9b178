"""What must be kept until a device has done its work: holds and slots that copies on a stream still use.

A slot that a kernel may touch is nobody else's (kvstore/README.md, rule 5), so whatever gives it back is kept here, by
reference, until the event behind the kernel has come. Then the reference is dropped, and finalizers do the rest; so
they do when the device is lost, since none of its kernels runs any more. A thread of its own asks the events.

`keep` and `keep_behind` may be called anywhere, also in a finalizer: they append and wake, no more.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvstore_client.marks import Mark
from kvstore_client.waiting import Wake
from kvstored.v1.errors import KVStoreError
from kvstored_cuda.devices.errors import DeviceError, DeviceLost

log = logging.getLogger("kvstore_client")

POLL_FIRST_S, POLL_MAX_S = 0.0005, 0.01
"""Between two looks at the events: what is kept is out of use meanwhile, and no more than that."""

IDLE_S = 60.0
"""A thread with nothing to watch looks up once in a while; `keep` wakes it."""


class _Kept:
    """Things, and the marks that have not come; `record`: makes more of them, by the thread."""

    def __init__(self, marks: list[Mark], record: Callable[[], Sequence[Mark]] | None, things: tuple[object, ...]):
        self.marks, self.record, self.things = marks, record, things
        self.said = False

    def surely_over(self) -> bool:
        """As `over`. An error that nobody foresaw is told once and says nothing of the device: `things` are kept."""
        try:
            return self.over()
        except Exception:
            if not self.said:
                log.exception("what is kept for a copy cannot be looked at, and is kept; it is tried again")
            self.said = True
            return False

    def over(self) -> bool:
        """Whether nothing is waited for any more. What cannot be recorded is tried again: `things` are kept."""
        if self.record is not None:
            try:
                self.marks.extend(self.record())
            except DeviceLost as e:
                log.debug("what is kept for a device goes, since nothing of it runs any more: %s", e)
            except KVStoreError as e:
                log.debug("a device cannot mark the end of its work, and is asked again: %s", e)
                return False
            self.record = None
        self.marks = [mark for mark in self.marks if not _over(mark)]
        return not self.marks


class Afterwards:
    """Of one client. `close` ends the thread once nothing is kept any more."""

    def __init__(self) -> None:
        self._new: deque[_Kept] = deque()
        self._kept: list[_Kept] = []
        self._wake = Wake()
        self._closed = False
        threading.Thread(target=self._work, name="kvstore-afterwards", daemon=True).start()

    def keep(self, mark: Mark, *things: object) -> None:
        """Refers to `things` until the mark has come."""
        self._new.append(_Kept([mark], None, things))
        self._wake.set()

    def keep_behind(self, record: Callable[[], Sequence[Mark]], *things: object) -> None:
        """Refers to `things` until all marks have come that `record` makes; the thread calls it, soon."""
        self._new.append(_Kept([], record, things))
        self._wake.set()

    def wait_empty(self, timeout_s: float) -> bool:
        """Whether nothing is kept any more, in time."""
        until, pause = time.monotonic() + timeout_s, threading.Event()
        while len(self):
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            pause.wait(min(left_s, POLL_FIRST_S))
        return True

    def __len__(self) -> int:
        return len(self._new) + len(self._kept)

    def close(self) -> None:
        """Nothing more will be kept."""
        self._closed = True
        self._wake.set()

    def _work(self) -> None:
        pause_s = IDLE_S
        while not (self._closed and not len(self)):
            self._wake.wait(pause_s)
            while self._new:
                self._kept.append(self._new[0])
                self._new.popleft()  # behind it: `len` never counts too few
            before = len(self._kept)
            self._kept = [kept for kept in self._kept if not kept.surely_over()]
            if not len(self):
                pause_s = IDLE_S
                continue
            quick = len(self._kept) < before or pause_s == IDLE_S
            pause_s = POLL_FIRST_S if quick else min(2 * pause_s, POLL_MAX_S)


def _over(mark: Mark) -> bool:
    if not ended(mark):
        return False
    try:
        mark.over()
    except DeviceError as e:
        log.debug("an event was not given back: %s", e)
    return True


def ended(mark: Mark) -> bool:
    """Whether that work has ended, or can never run again."""
    try:
        return mark.query()
    except DeviceLost as e:
        log.debug("what is kept for a copy goes, since nothing of it runs any more: %s", e)
        return True
    except DeviceError as e:
        log.debug("a device cannot say whether a copy has ended, and is asked again: %s", e)
        return False


def wait_for(mark: Mark, until: float) -> bool:
    """Whether that work ended in time. Raises DeviceLost, and what else the device says."""
    pause, pause_s = threading.Event(), POLL_FIRST_S / 10
    while not mark.query():
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        pause.wait(min(pause_s, left_s))
        pause_s = min(2 * pause_s, POLL_FIRST_S * 2)
    return True
