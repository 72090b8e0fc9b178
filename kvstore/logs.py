"""Logs: one line an event, as text for people or JSON for programs.

An event is a few constant words and fields: `log.warning("session closed", session=3,
reason="...")`. Whatever clients send is only ever in a field, and a field is one line
without control characters, whatever is in it. Bytes are shown by their first few only, so
that no block and no secret can end up here by mistake.

Who does something a thousand times writes a few lines and a count: of one event at most
LINES_MAX lines come through in WINDOW_S, and the next one says how many were left out
(`suppressed=123`; where there is no next one, `tell_suppressed` says it).

Between `configure` and the event loop, and after it, whoever logs writes; while the loop
runs, nobody waits for whoever reads (`queued`).
"""

import contextlib
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import structlog

from kvstore.logqueue import LogQueue

LINES_MAX = 50
WINDOW_S = 10.0
EVENTS_MAX = 512
"""Events that are told apart; beyond, those of one logger and level are counted as one."""

EVENT_CHARS_MAX = 1000
VALUE_CHARS_MAX = 2000
TRACEBACK_CHARS_MAX = 8000
"""Of a traceback the end is kept, which says what was raised."""

FLUSH_S = 1.0
"""For lines that are queued when the daemon ends; then it ends without them."""

BYTES_SHOWN = 6
JOURNAL_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""What systemd takes as `<N>` at the start of a line: sd-daemon(3)."""

_PLAIN = re.compile(r"[^\s\"'=\\]+")

Format = Literal["text", "json"]


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose calls take an event and fields; lines go where the standard library's logging sends them."""
    wrapped: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, structlog.processors.format_exc_info, _as_message],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return wrapped


def _as_message(_: Any, __: str, event: MutableMapping[str, Any]) -> tuple[tuple[dict[str, Any]], dict[str, Any]]:
    """The last step: event and fields are the message of an ordinary record, which `_Lines` writes."""
    return (dict(event),), {}


def configure(level: str, form: Format, stream: TextIO = sys.stderr) -> None:
    """Sends our logs from `level` up, and the libraries' and Python's own warnings, to one stream as lines."""
    handler = logging.StreamHandler(stream)
    journal = form == "text" and _is_journal(stream, os.environ.get("JOURNAL_STREAM", ""))
    handler.setFormatter(_Lines(form, journal=journal))
    handler.addFilter(_flood)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("kvstored").setLevel(level.upper())
    logging.captureWarnings(True)
    # What gRPC's C core writes to stderr itself is in no form at all, and all of it is raised in Python too.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


@contextlib.contextmanager
def queued(stream: TextIO = sys.stderr) -> Iterator[None]:
    """What `configure` set up goes on without ever waiting for the stream's reader (kvstore/logqueue.py)."""
    global _queue  # one process has one log
    root = logging.getLogger()
    before = root.handlers[:]
    (direct,) = before
    assert direct.formatter is not None
    stream.flush()
    _queue = queue = LogQueue(stream.fileno(), direct.formatter, stream.encoding)
    queue.addFilter(_flood)
    root.handlers[:] = [queue]
    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = _unraisable, _thread_ended
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = hooks
        if queue.finish(FLUSH_S):
            root.handlers[:] = before  # else a line more would wait for ever


def stuck() -> bool:
    """Whether `queued` has ended with lines that nobody took: who writes more to that stream waits for ever."""
    return any(isinstance(handler, LogQueue) for handler in logging.getLogger().handlers)


def dropped() -> int:
    """Lines that nobody took and for which there was no room, so far."""
    return _queue.dropped if _queue is not None else 0


def _unraisable(found: "sys.UnraisableHookArgs") -> None:
    """Python would write it to the stream by itself, and wait; it is a line like any other."""
    what = (found.exc_type, found.exc_value, found.exc_traceback)
    logging.getLogger("kvstored").error({"event": "an exception was ignored", "in": repr(found.object)}, exc_info=what)  # type: ignore[arg-type]


def _thread_ended(found: threading.ExceptHookArgs) -> None:
    what = (found.exc_type, found.exc_value, found.exc_traceback)
    name = found.thread.name if found.thread is not None else ""
    logging.getLogger("kvstored").error({"event": "a thread failed", "thread": name}, exc_info=what)  # type: ignore[arg-type]


def tell_suppressed(*, at_once: bool = False) -> None:
    """Says what was left out of events that have not come again; to be called every now and then, and at the end."""
    log = logger("kvstored.logs")
    for name, event, count in _flood.settle(math.inf if at_once else time.monotonic()):
        log.warning("lines were suppressed", of=event, by=name, suppressed=count)


@dataclass
class _Window:
    """One event's lines since `began`."""

    began: float
    lines: int = 0
    suppressed: int = 0


class Flood(logging.Filter):
    """Lets LINES_MAX lines of one event through in WINDOW_S and counts the rest."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[tuple[str, int, str], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether this line is written; one that is says what was left out before it."""
        event = record.msg.get("event", "") if isinstance(record.msg, dict) else record.msg
        key = (record.name, record.levelno, str(event)[:EVENT_CHARS_MAX])
        with self._lock:
            now = self._clock()
            if key not in self._windows and len(self._windows) >= EVENTS_MAX:
                self._forget(now)
            if key not in self._windows and len(self._windows) >= EVENTS_MAX:
                key = (record.name, record.levelno, "")
            window = self._windows.setdefault(key, _Window(now))
            suppressed = 0
            if now - window.began >= WINDOW_S:
                suppressed = window.suppressed
                self._windows[key] = window = _Window(now)
            window.lines += 1
            if window.lines > LINES_MAX:
                window.suppressed += 1
                return False
        if suppressed:
            record.suppressed = suppressed
        return True

    def settle(self, now: float) -> list[tuple[str, str, int]]:
        """(logger, event, lines left out) of windows that are over; each is told once."""
        with self._lock:
            over = [key for key, w in self._windows.items() if w.suppressed and now - w.began >= WINDOW_S]
            return [(key[0], key[2], self._windows.pop(key).suppressed) for key in over]

    def _forget(self, now: float) -> None:
        for key, window in list(self._windows.items()):
            if not window.suppressed and now - window.began >= WINDOW_S:
                del self._windows[key]


_flood = Flood()
_queue: LogQueue | None = None


class _Lines(logging.Formatter):
    """Writes a record, ours or a library's, as one line."""

    def __init__(self, form: Format, *, journal: bool) -> None:
        super().__init__()
        self._render = self._json if form == "json" else self._text
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.msg, dict):
            fields = {str(name): value for name, value in record.msg.items()}
            event = str(fields.pop("event", ""))
        else:
            event, fields = record.getMessage(), {}
        if record.exc_info and "exception" not in fields:
            fields["exception"] = self.formatException(record.exc_info)
        if "exception" in fields:
            fields["exception"] = str(fields["exception"])[-TRACEBACK_CHARS_MAX:]
        suppressed = getattr(record, "suppressed", 0)
        if suppressed:
            fields["suppressed"] = suppressed
        return self._render(record, event[:EVENT_CHARS_MAX], fields)

    def _json(self, record: logging.LogRecord, event: str, fields: dict[str, Any]) -> str:
        head = {"ts": _time(record), "level": record.levelname.lower(), "logger": record.name, "event": event}
        # ASCII only: U+2028 and its like end a line for some readers.
        return json.dumps(head | {name: _value(value, name) for name, value in fields.items() if name not in head})

    def _text(self, record: logging.LogRecord, event: str, fields: dict[str, Any]) -> str:
        level = record.levelname.lower()
        head = f"<{JOURNAL_PRIORITY.get(level, 6)}>" if self._journal else f"{_time(record)} {level:<7} "
        line = f"{head}{record.name}: {_one_line(event)}"
        return line + "".join(f" {name}={_shown(_value(value, name))}" for name, value in fields.items())


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _value(value: Any, name: str) -> Any:
    """A field as JSON has it: numbers, truth, None and bounded text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value[:BYTES_SHOWN]).hex()
        return f"{data}... ({len(value)} bytes)" if len(value) > BYTES_SHOWN else data
    text, most = str(value), TRACEBACK_CHARS_MAX if name == "exception" else VALUE_CHARS_MAX
    return text if len(text) <= most else f"{text[:most]}..."


def _shown(value: Any) -> str:
    """A field as text: quoted where it would not be read back as one word."""
    if isinstance(value, str):
        plain = value.isprintable() and _PLAIN.fullmatch(value)
        return value if plain else json.dumps(value, ensure_ascii=not value.isprintable())
    return json.dumps(value)


def _one_line(event: str) -> str:
    return event if event.isprintable() else json.dumps(event)[1:-1]


def _is_journal(stream: TextIO, journal: str) -> bool:
    """Whether the stream is the one that systemd connected to its journal: systemd.exec(5), $JOURNAL_STREAM."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return journal == f"{found.st_dev}:{found.st_ino}"
