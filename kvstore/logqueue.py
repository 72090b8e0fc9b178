"""Lines of the log on their way to whoever reads them, so that nobody who logs waits for the reader.

Standard error is often a pipe, and who should read it may have stopped: a full pipe would
hold up the event loop, and with it all engines. So a line is written at once where that
takes no waiting, which is nearly always, and is then there whatever happens next. Else it
is queued for a thread that can wait, in order; where the queue is full, lines are dropped
and counted, and the first line that gets through afterwards says how many.

At the end the queue has a bounded time, and the thread is one that no exit waits for.
"""

import contextlib
import io
import logging
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from typing import Any, TextIO

LINES_MAX = 4096
BYTES_MAX = 8 << 20
"""Queued; a line more is dropped."""

RETRY_S = 1.0
"""After a line that could not be written (a full disk, a reader that is gone): so long, all are dropped."""

SAY_S = 1.0
"""For what is said outside the queue: of a start that fails, or by Python itself; the rest of it is left out."""

DESCRIPTORS = "/proc/self/fd"


class Sink:
    """A descriptor that is written to without waiting, whatever it is and whoever else has it.

    The flag that would do it is the open file's, so every process that shares our standard
    error would get it too: a pipe or a terminal is opened a second time instead.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._socket: socket.socket | None = None
        self._own = -1
        mode = os.fstat(descriptor).st_mode
        self._waits = False
        """It cannot be written to without waiting."""
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(descriptor))
        elif not stat.S_ISREG(mode):
            try:
                self._own = os.open(f"{DESCRIPTORS}/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                self._descriptor = self._own
            except OSError:  # another user's, as may be under a supervisor
                self._waits = True

    def offer(self, data: bytes) -> bytes:
        """Writes what can be written now; answers the rest. Raises OSError."""
        if self._waits:
            return data
        try:
            if self._socket is not None:
                return data[self._socket.send(data, socket.MSG_DONTWAIT) :]
            return data[os.write(self._descriptor, data) :]
        except BlockingIOError:
            return data

    def write(self, data: bytes) -> None:
        """Writes all of it, however long that takes. Raises OSError."""
        while data:
            if self._waits:
                data = data[os.write(self._descriptor, data) :]
            elif left := self.offer(data):
                data = left
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
            else:
                return

    def write_within(self, data: bytes, seconds: float) -> bytes:
        """Writes what finds a place in that time; answers the rest. Raises OSError."""
        until, poll = time.monotonic() + seconds, select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        while data:
            data = self.offer(data)
            if not data or not poll.poll(max(until - time.monotonic(), 0) * 1000):
                break
            if self._waits:  # so much a pipe that has room takes at once
                data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]
        return data

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._own >= 0:
            os.close(self._own)


class _Bounded(io.RawIOBase):
    """A descriptor as a file whose reader may have stopped: one wait of SAY_S, and none until it reads again."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._sink = Sink(descriptor)
        self._wait_s = SAY_S

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """All of it, or as much as finds a place in time: the rest is lost."""
        left = self._sink.write_within(bytes(data), self._wait_s)
        self._wait_s = 0.0 if left else SAY_S
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._sink.close()
        super().close()


def bounded(descriptor: int) -> TextIO:
    """A text stream in place of standard error that keeps nobody who writes to it."""
    # Straight to the descriptor: what a buffer kept would be written once more at the end.
    raw: Any = _Bounded(descriptor)
    return io.TextIOWrapper(raw, errors="backslashreplace", line_buffering=True, write_through=True)


class LogQueue(logging.Handler):
    """Writes records to a descriptor, as lines."""

    def __init__(self, descriptor: int, formatter: logging.Formatter, encoding: str = "utf-8") -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.dropped = 0
        """Lines that nobody will read."""
        self._untold = 0
        """Of those, how many have still to be told of; until then every further line is one more."""
        self._encoding = encoding
        self._sink = Sink(descriptor)
        assert self.lock is not None
        # The handler's own: with a second one, what is logged out of the garbage collector could lock both.
        self._changed = threading.Condition(self.lock)
        self._lines: deque[bytes] = deque()
        self._size_bytes = 0
        self._writing = False
        """The thread is at a line, and none may overtake it."""
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Writes, queues or drops one line; never waits for a reader."""
        line = self._line(record)
        with self._changed:
            if not (self._lines or self._writing or self._untold):
                with contextlib.suppress(OSError):  # which the thread will meet again, and deal with
                    line = self._sink.offer(line)
                if not line:
                    return
            full = len(self._lines) >= LINES_MAX or self._size_bytes + len(line) > BYTES_MAX
            if self._untold or full:
                self.dropped += 1
                self._untold += 1
                return
            self._lines.append(line)
            self._size_bytes += len(line)
            self._changed.notify()

    def finish(self, within_s: float) -> bool:
        """Writes what is queued, if that takes no longer; whether it has come to its end."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(within_s)
        if self._thread.is_alive():
            return False
        self._sink.close()
        return True

    def _line(self, record: logging.LogRecord) -> bytes:
        try:
            text = self.format(record)
        except Exception as e:  # noqa: BLE001 (a line that cannot be made must not end whoever logs)
            text = self.format(_record(logging.ERROR, "a line cannot be made", by=record.name, reason=repr(e)))
        return f"{text}\n".encode(self._encoding, "backslashreplace")

    # -- the thread

    def _run(self) -> None:
        while (work := self._next()) is not None:
            line, of = work
            try:
                self._sink.write(line)
            except OSError:
                self._failed(of)

    def _next(self) -> tuple[bytes, int] | None:
        """A line, and of how many dropped ones it tells; None at the end."""
        with self._changed:
            self._writing = False
            while not (self._lines or self._untold or self._ending):
                self._changed.wait()
            if self._lines:
                line, of = self._lines.popleft(), 0
                self._size_bytes -= len(line)
            elif self._untold:
                of, self._untold = self._untold, 0
                line = self._line(_record(logging.WARNING, "lines of the log were dropped", lines=of))
            else:
                return None
            self._writing = True
            return line, of

    def _failed(self, of: int) -> None:
        """What could not be written is told of later."""
        with self._changed:
            self.dropped += not of
            self._untold += of or 1
            if self._ending:
                self.dropped += len(self._lines)
                self._lines.clear()
                self._untold = 0
            else:
                self._changed.wait_for(lambda: self._ending, RETRY_S)


def _record(level: int, event: str, **fields: object) -> logging.LogRecord:
    return logging.LogRecord("kvstored.logs", level, "", 0, {"event": event, **fields}, (), None)
