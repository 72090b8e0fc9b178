"""What must be kept until a device has done its work: holds and slots that copies on a stream still use.

A slot that a kernel may touch is nobody else's (kvstore/README.md, rule 5), so whatever gives it back is kept here, by
reference, until the event behind the kernel has come. Then the reference is dropped, and finalizers do the rest; so
they do when the device is lost, since none of its kernels runs any more. Threads of their own ask the events, one for
each device, and one whose driver hangs holds up no others (asking.py).

`keep` and `keep_behind` may be called anywhere, also in a finalizer: they append and wake, no more.
"""

import logging
import threading
import time
from collections.abc import Sequence

from kvstore_client.asking import WAIT_FIRST_S, WAIT_MAX_S, Asker, Question
from kvstore_client.marks import Mark, Uses
from kvstored.v1.errors import DeadlineExceeded, KVStoreError
from kvstored_cuda.devices.errors import DeviceError, DeviceLost, DeviceTimeout

log = logging.getLogger("kvstore_client")

POLL_FIRST_S, POLL_MAX_S = 0.0005, 0.01
"""Between two looks at an event: what is kept is out of use meanwhile, and no more than that."""


class _Kept(Question):
    """Things, and the marks that have not come; `uses`: has more of them recorded, by the thread."""

    def __init__(self, marks: list[Mark], uses: Uses | None, things: tuple[object, ...]) -> None:
        super().__init__(POLL_FIRST_S, POLL_MAX_S)
        self._marks, self._uses, self._things = marks, uses, things

    def about(self) -> Sequence[Mark]:
        return self._marks

    def ask(self) -> bool:
        """Whether nothing is waited for any more. What cannot be recorded is tried again: `things` are kept."""
        if self._uses is not None:
            try:
                self._marks = self._uses.record()
            except DeviceLost as e:
                log.debug("what is kept for a device goes, since nothing of it runs any more: %s", e)
            except KVStoreError as e:
                log.debug("a device cannot mark the end of its work, and is asked again: %s", e)
                return False
            self._uses = None
        for mark in list(self._marks):
            if ended(mark):
                self._marks = [other for other in self._marks if other is not mark]
                mark.over()
        return not self._marks


class Afterwards:
    """Of one client. `close` ends its threads once nothing is kept any more."""

    def __init__(self) -> None:
        self._first = Asker()
        """Of the first device, and of marks that name none."""
        self._askers: dict[str, Asker] = {}

    def asker(self, uuid: str) -> Asker:
        """Who asks that device. Not for finalizers; by one thread at a time."""
        if uuid not in self._askers:
            self._askers = {**self._askers, uuid: Asker() if self._askers else self._first}
        return self._askers[uuid]

    def keep(self, mark: Mark, *things: object) -> None:
        """Refers to `things` until the mark has come."""
        (mark.asker or self._first).keep(_Kept([mark], None, things))

    def keep_behind(self, uses: Uses, *things: object) -> None:
        """Refers to `things` until all marks have come that `uses` records; the thread has it do so, soon."""
        (uses.asker or self._first).keep(_Kept([], uses, things))

    def look(self) -> None:
        """Once in a while: has others go on with what a thread that hangs in the driver does not come to."""
        for asker in self._all():
            asker.look()

    def _all(self) -> set[Asker]:
        return {self._first, *self._askers.values()}

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
        return sum(map(len, self._all()))

    def close(self) -> None:
        """Nothing more will be kept."""
        for asker in self._all():
            asker.close()


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
    """Whether that work ended in time, also where the driver does not answer. Raises DeviceLost, and what else it says.

    A mark that names nobody who asks it, or one of a client that is closed, is asked here: with no deadline for the
    driver.
    """
    if mark.asker is not None and not mark.asker.closed:
        return mark.asker.wait(mark, until)
    pause, pause_s = threading.Event(), WAIT_FIRST_S
    while not mark.query():
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        pause.wait(min(pause_s, left_s))
        pause_s = min(2 * pause_s, WAIT_MAX_S)
    return True


def too_late(mark: Mark, why: str) -> DeadlineExceeded:
    """Of a mark that did not come in time: `why`, or DeviceTimeout where the driver does not say whether it did."""
    if mark.asker is not None and mark.asker.slow:
        return DeviceTimeout("the device's driver did not say in time whether copies have ended")
    return DeadlineExceeded(why)
