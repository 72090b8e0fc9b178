"""Asks whether work on a device has ended, on a thread of its own: who waits for that is not inside the driver.

A driver may hang in any call, also in one that takes a microsecond as a rule. What holds then:
  - Who waits for a mark (`Asker.wait`) is back by its deadline, and what it keeps stays kept (afterwards.py).
  - A thread that has been inside one question for HANGS_S is left there, and another goes on with all others: of ends
    of holds, and of puts, on that device. HANGING_MAX are left so, then they wait until one is back. What that one was
    at goes on as it was. Each device has its own Asker: another one does not notice.
  - What enqueues is called on the caller's thread, and no deadline helps who hangs in that: copies are launched there,
    the event behind them is made and recorded, as the engine launches its own kernels. Closing is nobody's to wait for.

For a put that is one change of threads, some 20 us, in the place of a first sleep of 50: its first question is asked by
the other thread at once, the next ones as soon as they were before. A get asks nothing.
"""

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from kvstore_client.waiting import Wake

if TYPE_CHECKING:
    from kvstore_client.marks import Mark

log = logging.getLogger("kvstore_client")

HANGS_S = 0.5
"""A question that takes so long hangs: it is left alone, and another thread asks the others."""

SURE_S = 0.1
"""It must still take so long after that was seen first: a process that stood still itself is no driver that hangs."""

HANGING_MAX = 8
"""Threads of one device that are left in a question."""

SLOW_S = 0.1
"""Who did not get an answer in time is told that the driver is slow, where a question has taken so long."""

WAIT_FIRST_S, WAIT_MAX_S = 0.00005, 0.001
"""Between two questions for somebody who waits."""

LAST_S = 0.002
"""When the deadline of a wait has come, the other thread has so long to ask once more."""

IDLE_S = 60.0
"""A thread with nothing to ask looks up once in a while; whoever has something wakes it."""

_order = count()


class Question:
    """Something that is asked again and again until it is over, with pauses that grow."""

    def __init__(self, pause_s: float, pause_max_s: float) -> None:
        self.due = 0.0
        self.left = False
        """Nobody wants to know any more."""
        self.said = False
        self._pause_s, self._pause_max_s = pause_s, pause_max_s

    def about(self) -> Sequence["Mark"]:
        """The marks that it asks; no two threads ask one mark."""
        raise NotImplementedError

    def ask(self) -> bool:
        """Whether it is over."""
        raise NotImplementedError

    def again(self, now: float) -> None:
        """It is asked after a pause."""
        self.due = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._pause_max_s)


class Wait(Question):
    """Of a thread that waits for a mark."""

    def __init__(self, mark: "Mark", until: float) -> None:
        super().__init__(WAIT_FIRST_S, WAIT_MAX_S)
        self._until = until
        self.answered = threading.Lock()
        """Free once there is an answer."""
        self.answered.acquire()
        self._mark = mark
        self._came = False
        self._error: Exception | None = None

    def about(self) -> Sequence["Mark"]:
        return (self._mark,)

    def ask(self) -> bool:
        try:
            self._came = self._mark.query()
        except Exception as e:  # noqa: BLE001  it is raised where it is waited for
            self._error = e.with_traceback(None)  # which refers to this frame
        if self._came or self._error is not None or time.monotonic() >= self._until:
            self.answered.release()
            return True
        return self.left

    def again(self, now: float) -> None:
        super().again(now)
        self.due = min(self.due, max(self._until, now))

    def outcome(self) -> bool:
        """Whether it came; raises what the device said instead."""
        error, self._error = self._error, None
        if error is None:
            return self._came
        try:
            raise error
        finally:
            del error  # it refers to this frame


class Asker:
    """Of one device of one client. `keep` may be called anywhere, also in a finalizer: it appends and wakes."""

    def __init__(self) -> None:
        self._waits: deque[Question] = deque()
        self._keeps: deque[Question] = deque()
        """Both: what the thread has not taken yet."""
        self._wake = Wake()
        self._lock = threading.Lock()
        """Of the threads that ask and the one that looks after them, no others: a signal handler's exception in
        whoever has it would end all asking."""
        self._open: list[tuple[float, int, Question]] = []
        """A heap, by when each is due."""
        self._kept: set[Question] = set()
        """Those of `keep` that have been taken."""
        self._asked: dict[int, tuple[Question, float]] = {}
        """By a thread's number: what it asks, and since when."""
        self._number = 0
        """Of the thread that asks; others are left in a question."""
        self._missing = False
        """That thread could not be started, or has ended by an error."""
        self._seen = 0.0, 0.0
        """Since when a question hung that `look` has seen, and when that was first."""
        self.closed = False
        """Its thread ends, or has ended."""
        self._start(0)

    def _start(self, number: int) -> None:
        threading.Thread(target=self._work, args=(number,), name="kvstore-afterwards", daemon=True).start()

    # -- calls

    def wait(self, mark: "Mark", until: float) -> bool:
        """Whether it came in time. Raises DeviceLost, and what else the device says."""
        wait = Wait(mark, until)
        try:
            self._waits.append(wait)
            self._wake.set()
            wait.answered.acquire(timeout=max(until - time.monotonic(), 0.0) + LAST_S)
        finally:
            wait.left = True
        return wait.outcome()

    def keep(self, question: Question) -> None:
        """Asks it until it is over, and refers to it so long."""
        self._keeps.append(question)
        self._wake.set()

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._keeps) + len(self._kept)

    def close(self) -> None:
        """Nothing more will be asked; its thread ends with what is kept."""
        self.closed = True
        self._wake.set()

    @property
    def hanging(self) -> int:
        """Threads that were left in a question."""
        return sum(number != self._number for number in list(self._asked))

    @property
    def slow(self) -> bool:
        """Whether a question has been without an answer for long."""
        now = time.monotonic()
        return any(now - since >= SLOW_S for _, since in list(self._asked.values()))

    def look(self) -> None:
        """Has another thread go on where the one that asks hangs. For the one thread that looks after all."""
        with self._lock:
            hangs = self._hangs()
            if not self._missing and not (hangs and len(self._asked) <= HANGING_MAX):
                return
            self._number += 0 if self._missing else 1
            number, self._missing = self._number, False
        if hangs:
            log.warning("a device's driver has not said for %.1f s whether a copy has ended; others are asked", HANGS_S)
        try:
            self._start(number)
        except RuntimeError as e:
            log.warning("no thread can be started to ask a device, and it is tried again: %s", e)
            self._missing = True

    def _hangs(self) -> bool:
        """With the lock held: whether the thread that asks does not come back."""
        asked, now = self._asked.get(self._number), time.monotonic()
        if asked is None or now - asked[1] < HANGS_S:
            return False
        if self._seen[0] != asked[1]:
            self._seen = asked[1], now
        return now - self._seen[1] >= SURE_S

    # -- the thread

    def _work(self, number: int) -> None:
        try:
            while (pause_s := self._turn(number)) >= 0:
                self._wake.wait(pause_s)
            self._wake.set()  # another one goes on with what this one was left in
        except Exception:
            log.exception("the thread that asks a device has ended; another one goes on")
            with self._lock:
                self._missing = number == self._number
                in_hand = self._asked.pop(number, None)
                if in_hand is not None:
                    self._again(in_hand[0])

    def _turn(self, number: int) -> float:
        """Asks all that is due, once. Seconds until more is; below zero: this thread is not needed any more."""
        began = time.monotonic()
        while True:
            with self._lock:
                if number != self._number:
                    return -1.0
                self._take()
                question = self._next(began)
                if question is None:
                    return self._pause_s()
                self._asked[number] = question, time.monotonic()
            over = _is_over(question)
            with self._lock:
                if over:
                    self._kept.discard(question)
                else:
                    self._again(question)
                del self._asked[number]
            del question  # without the lock: finalizers of what was kept run here

    def _take(self) -> None:
        """With the lock held."""
        while self._keeps:
            self._kept.add(self._keeps[0])
            self._push(self._keeps[0])
            self._keeps.popleft()  # behind it: `len` never counts too few
        while self._waits:
            self._push(self._waits.popleft())

    def _push(self, question: Question) -> None:
        heapq.heappush(self._open, (question.due, next(_order), question))

    def _again(self, question: Question) -> None:
        question.again(time.monotonic())
        self._push(question)

    def _next(self, began: float) -> Question | None:
        """With the lock held: one that is due. What another thread hangs in is not asked by this one as well."""
        hanging = {mark for question, _ in self._asked.values() for mark in question.about()}
        while self._open and self._open[0][0] <= began:
            question = heapq.heappop(self._open)[2]
            if question.left:
                continue
            if not hanging or hanging.isdisjoint(question.about()):
                return question
            self._again(question)
        return None

    def _pause_s(self) -> float:
        """With the lock held."""
        if self._open:
            return max(self._open[0][0] - time.monotonic(), 0.0)
        return -1.0 if self.closed and not self._kept and not self._waits else IDLE_S


def _is_over(question: Question) -> bool:
    """What it answers. An error that nobody foresaw says nothing of the device: it is told once, and asked again."""
    try:
        return question.ask()
    except Exception:
        if not question.said:
            log.exception("what is kept for a copy cannot be looked at, and is kept; it is tried again")
        question.said = True
        return False
