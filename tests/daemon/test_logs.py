"""Logs: one line an event, whoever is at work and whatever they send, as text or as JSON; and floods are counted."""

import io
import json
import logging
import os
import re
import socket
import struct
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kvstore import logs
from kvstore.logs import LINES_MAX, WINDOW_S, Flood, configure, logger
from kvstore_client import Client
from kvstored.v1 import PROTOCOL
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import KVStoreError
from tests.conftest import RunningDaemon, eventually
from tests.daemon.test_http import ask
from tests.wire import Wire

BLOCK = 64 << 10
HOSTILE = '\n{"level": "error"}\r\x1b[2J\x00 name="x" \u2028\u202e\u0085'
SECRET = b"block-bytes-that-nobody-may-see-"
TEXT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (debug|info|warning|error) +[a-z0-9._]+: .+")


# -- a daemon at work

FAULTY = """
import os, sys
from kvstore.cli.entry import kvstored
from kvstore.server import calls

def fail(*_):
    raise RuntimeError("injected\\n{ \\x1b[2J")

calls.pin = fail
kvstored()
"""


class FaultyDaemon(RunningDaemon):
    """The daemon itself, in which one call raises what no call should."""

    def command(self) -> list[str]:
        return [sys.executable, "-c", FAULTY, *super().command()[1:]]


def busy(daemon: RunningDaemon) -> None:
    """Puts and gets, and everything that is wrong."""
    with Client(daemon.endpoint, name=HOSTILE) as client, Client(daemon.grpc_endpoint, name="remote") as remote:
        for each in (client, remote):
            ns = each.raw_namespace(f"logs {HOSTILE}", BLOCK)
            key = ns.key(b"busy")
            ns.put([key], [SECRET * (BLOCK // len(SECRET))])
            assert ns.get([key]) == [SECRET * (BLOCK // len(SECRET))]
            ns.match([bytes(32)])
    for what in (b"\xff" * 100, struct.pack("<I", 1 << 31), struct.pack("<I", 4) + b"\xff\xff\xff\xff", b"\x01"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.socket))
            sock.sendall(what + SECRET)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    with Wire(daemon.socket, hello=False) as wire:
        wire.call(hello=pb.HelloRequest(protocol=PROTOCOL, client=HOSTILE))
        for _ in range(3):
            wire.post(0, commit=pb.CommitRequest(namespace_id=77, keys=[SECRET], slots=[1]))
        with pytest.raises(KVStoreError, match="internal error"):
            wire.call(pin=pb.PinRequest())
        wire.leave()
    for headers in ({"Authorization": "Bearer secret-of-a-scraper"}, {"X": "y"}):
        ask(daemon, "/metrics", headers=headers)
    with socket.create_connection(("127.0.0.1", int(daemon.http_url.rpartition(":")[2]))) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nAuthorization secret-of-a-scraper\x1b[2J\r\n\r\n")
        while sock.recv(4096):
            pass
    with socket.create_connection(("127.0.0.1", int(daemon.grpc_endpoint.rpartition(":")[2]))) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\n" + os.urandom(500) + SECRET)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


@pytest.fixture(scope="module", params=["text", "json"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The format, and all that a daemon said which had much to do and was told to stop."""
    settings = {
        "server.http": "127.0.0.1:0",
        "server.grpc": "127.0.0.1:0",
        "server.log_level": "debug",
        "server.log_format": request.param,
    }
    daemon = FaultyDaemon(tmp_path_factory.mktemp(request.param), settings)
    try:
        busy(daemon)
        assert daemon.stop() == 0
        yield request.param, daemon.output()
    finally:
        daemon.kill()


def test_every_event_is_one_line(said: tuple[str, str]) -> None:
    form, text = said
    lines = text.split("\n")
    assert lines.pop() == ""
    assert len(lines) > 15
    for line in lines:
        assert line.isprintable(), repr(line)
        if form == "text":
            assert TEXT.fullmatch(line), line
        else:
            found = json.loads(line)
            assert list(found)[:4] == ["ts", "level", "logger", "event"]
            assert datetime.fromisoformat(found["ts"]).utcoffset() == timedelta()
            assert found["level"] in ("debug", "info", "warning", "error")
            assert "\n" not in found["event"]


def test_what_went_wrong_is_there_with_who_did_it(said: tuple[str, str]) -> None:
    form, text = said
    if form == "text":
        assert re.search(r"warning kvstored\.session: connection closed pid=\d+ reason=", text)
        assert re.search(r"warning kvstored\.session: calls without a reply failed session=\d+ client=\"", text)
        assert 'exception="Traceback (most recent call last):\\n' in text
        assert re.search(r"kvstored: ready: serving on unix:///\S+\n", text)
        return
    events: dict[str, list[dict[str, Any]]] = {}
    for line in text.splitlines():
        found = json.loads(line)
        events.setdefault(found["event"], []).append(found)
    (failed,) = events["a call failed"]
    assert failed["level"] == "error"
    assert failed["call"] == "pin"
    assert "RuntimeError: injected\n{ \x1b[2J" in failed["exception"], "as it was, within the JSON"
    opened = events["session opened"]
    assert {"session", "client", "pid", "again"} <= opened[0].keys()
    assert not any(set(found["client"]) & set("\n\r\x1b\x00\u2028\u202e") for found in opened)
    assert events["stopped"]


def test_no_byte_of_a_block_and_no_secret_is_in_it(said: tuple[str, str]) -> None:
    _, text = said
    assert SECRET.decode() not in text
    assert SECRET.hex() not in text
    assert "secret-of-a-scraper" not in text


def test_a_daemon_that_cannot_start_says_so_in_the_form_that_is_asked_for(tmp_path: Path) -> None:
    settings = {"server.log_format": "json", "server.socket_group": "no_such_group"}
    with pytest.raises(AssertionError, match="ended with 2") as caught:
        RunningDaemon(tmp_path, settings)
    last = json.loads(str(caught.value).splitlines()[-1])
    assert (last["event"], last["level"]) == ("stopped", "info") or last["event"] == "cannot start"
    assert "server.socket_group: there is no group no_such_group" in str(caught.value)


def test_a_flood_of_bad_clients_is_some_lines_and_a_count(tmp_path: Path) -> None:
    daemon = RunningDaemon(tmp_path, {"server.log_format": "json"})
    try:
        for _ in range(4 * LINES_MAX):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(daemon.socket))
                sock.sendall(struct.pack("<I", 4) + b"\xff\xff\xff\xff")
                while sock.recv(4096):
                    pass
        assert daemon.stop() == 0
        lines = [json.loads(line) for line in daemon.output().splitlines()]
        closed = [line for line in lines if line["event"] == "connection closed"]
        left_out = [
            line["suppressed"]
            for line in lines
            if line.get("suppressed") and "connection closed" in (line["event"], line.get("of"))
        ]
        assert LINES_MAX <= len(closed) <= 2 * LINES_MAX
        assert len(closed) + sum(left_out) == 4 * LINES_MAX, "nothing is left out uncounted"
    finally:
        daemon.kill()


def test_in_the_journal_the_priority_stands_for_level_and_time(tmp_path: Path) -> None:
    log = tmp_path / "kvstored.log"
    log.touch()
    found = log.stat()

    class Service(RunningDaemon):
        def command(self) -> list[str]:
            return ["/usr/bin/env", f"JOURNAL_STREAM={found.st_dev}:{found.st_ino}", *super().command()]

    daemon = Service(tmp_path, {})
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.socket))
            sock.sendall(struct.pack("<I", 1 << 31))
            while sock.recv(4096):
                pass
        assert daemon.stop() == 0
    finally:
        daemon.kill()
    lines = daemon.output().splitlines()
    assert all(re.match(r"<[3-7]>kvstored[a-z.]*: ", line) for line in lines), lines
    assert any(line.startswith("<4>kvstored.session: connection closed") for line in lines)
    assert f"<6>kvstored: ready: serving on {daemon.endpoint}" in lines


# -- lines


@pytest.fixture
def restored() -> Iterator[None]:
    """The logging of the tests themselves comes back."""
    root = logging.getLogger()
    ours = logging.getLogger("kvstored")
    handlers, level, our_level = root.handlers[:], root.level, ours.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)


def written(form: logs.Format, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure(level, form, stream)
    return stream


@pytest.mark.usefixtures("restored")
def test_libraries_and_pythons_warnings_are_lines_too() -> None:
    stream = written("json")
    logging.getLogger("aiohttp.server").error("of %s\nand more", "a library", exc_info=ValueError("x\ny"))
    logging.getLogger("aiohttp.server").info("not asked for")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("something\nold", DeprecationWarning, stacklevel=1)
    library, python = map(json.loads, stream.getvalue().splitlines())
    assert (library["logger"], library["event"]) == ("aiohttp.server", "of a library\nand more")
    assert "ValueError: x\ny" in library["exception"]
    assert python["logger"] == "py.warnings"


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("form", ["text", "json"])
def test_bytes_are_shown_by_their_first_few_and_text_is_bounded(form: logs.Format) -> None:
    stream = written(form)
    logger("kvstored.test").info("shown", key=SECRET, view=memoryview(SECRET), short=b"\x01", long="x" * 100_000)
    line = stream.getvalue()
    assert SECRET[:6].hex() in line
    assert SECRET[:7].hex() not in line
    assert SECRET.decode()[:8] not in line
    assert len(line) < 4000


@pytest.mark.usefixtures("restored")
def test_a_field_is_read_back_as_it_was() -> None:
    values = ["plain", "two words", 'quo"ted', "a=b", "", "\n\x1b[0m", "\u2028", "back\\slash", 7, 1.5, True, None]
    stream = written("text")
    for value in values:
        logger("kvstored.test").info("field", value=value)
    for value, line in zip(values, stream.getvalue().splitlines(), strict=True):
        shown = line.partition(" value=")[2]
        assert shown == value if shown == "plain" else json.loads(shown) == value
    stream = written("json")
    for value in values:
        logger("kvstored.test").info("field", value=value, nan=float("nan"), level="not this one")
    for value, line in zip(values, stream.getvalue().splitlines(), strict=True):
        found = json.loads(line, parse_constant=lambda _: pytest.fail("not JSON"))
        assert (found["value"], found["nan"], found["level"]) == (value, "nan", "info")


@pytest.mark.usefixtures("restored")
def test_a_level_that_is_not_asked_for_writes_nothing() -> None:
    stream = written("text", "warning")
    logger("kvstored.test").info("quiet")
    assert stream.getvalue() == ""


# -- floods


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(event: str, level: int = logging.WARNING, name: str = "kvstored.test") -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, {"event": event}, (), None)


def test_so_many_lines_of_an_event_come_through_and_the_next_one_counts_the_rest() -> None:
    clock = Clock()
    flood = Flood(clock)
    assert sum(flood.filter(record("bad")) for _ in range(1000)) == LINES_MAX
    assert flood.filter(record("other")), "of another event nothing is left out"
    assert flood.settle(clock.now) == []
    clock.now += WINDOW_S
    first = record("bad")
    assert flood.filter(first)
    assert first.suppressed == 1000 - LINES_MAX  # type: ignore[attr-defined]
    again = record("bad")
    assert flood.filter(again)
    assert not hasattr(again, "suppressed"), "it is said once"


def test_what_does_not_come_again_is_told_once() -> None:
    clock = Clock()
    flood = Flood(clock)
    for _ in range(LINES_MAX + 7):
        flood.filter(record("bad"))
    clock.now += WINDOW_S
    assert flood.settle(clock.now) == [("kvstored.test", "bad", 7)]
    assert flood.settle(clock.now) == []


def test_events_that_are_all_different_are_bounded_too() -> None:
    clock = Clock()
    flood = Flood(clock)
    passed = sum(flood.filter(record(f"event {i}")) for i in range(10_000))
    assert passed == logs.EVENTS_MAX + LINES_MAX
    assert len(flood._windows) == logs.EVENTS_MAX + 1
    clock.now += WINDOW_S
    assert flood.filter(record("a new one"))
    assert sum(count for *_, count in flood.settle(clock.now)) == 10_000 - passed
    assert eventually(lambda: len(flood._windows) <= 2)
