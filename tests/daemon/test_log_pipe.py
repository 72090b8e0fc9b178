"""Nobody reads the log: the daemon goes on, counts what is lost, says so later, and ends when it is told to."""

import contextlib
import fcntl
import json
import logging
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import logqueue
from kvstore.logqueue import LogQueue
from kvstore.logs import FLUSH_S
from kvstore_client import Client
from tests.conftest import START_S, STOP_S, RunningDaemon, eventually
from tests.nodes import block

BLOCK = 64 << 10
PIPE_BYTES = 4096
QUEUED = 32


class Unread(RunningDaemon):
    """The daemon with its standard error in a small pipe that is read only when the test says so."""

    def __init__(self, directory: Path, program: str, **settings: str) -> None:
        self.program = program
        self.got = b""
        super().__init__(directory, {"server.log_format": "json", "server.log_level": "debug", **settings})

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program, *super().command()[1:]]

    def _start(self) -> None:
        self.reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        try:
            self.process = subprocess.Popen(
                self.command(), stdout=subprocess.DEVNULL, stderr=writer, stdin=subprocess.DEVNULL
            )
        finally:
            os.close(writer)
        try:
            eventually(self._serves, START_S, "the daemon to serve")
        except BaseException:
            self.kill()
            raise

    def _serves(self) -> bool:
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
            sock.connect(str(self.socket))
            return True
        return False

    def read(self) -> bool:
        """Takes what is there; whether that is the end."""
        while select.select([self.reader], [], [], 0)[0]:
            data = os.read(self.reader, 1 << 16)
            self.got += data
            if not data:
                return True
        return False

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.got.decode().splitlines()]


PROGRAM = f"""
from kvstore import logqueue, logs
from kvstore.cli.entry import kvstored

logqueue.LINES_MAX = {QUEUED}
logs.LINES_MAX = 1 << 30  # nothing is suppressed: it is the queue that bounds
kvstored()
"""


@pytest.fixture
def unread(tmp_path: Path) -> Iterator[Unread]:
    daemon = Unread(tmp_path, PROGRAM)
    try:
        yield daemon
    finally:
        daemon.kill()
        os.close(daemon.reader)


def say(daemon: RunningDaemon, times: int) -> None:
    """One warning each time, once the daemon has seen what is wrong."""
    for _ in range(times):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.socket))
            sock.sendall(b"\x04\0\0\0\xff\xff\xff\xff")
            while sock.recv(4096):
                pass


def dropped(client: Client) -> int:
    found: int = client.stats()["daemon"]["log_lines_dropped"]
    return found


def test_who_reads_no_log_holds_up_nobody_and_later_hears_how_much_was_lost(unread: Unread) -> None:
    with Client(unread.endpoint) as client:
        ns = client.raw_namespace("unread", BLOCK)
        say(unread, 200 + QUEUED)
        assert dropped(client) > 0
        for i in range(20):
            assert client.health().reachable
            assert ns.put([ns.key(b"%d" % i)], [block(i, BLOCK)]).stored == 1
            assert ns.get([ns.key(b"%d" % i)]) == [block(i, BLOCK)]
        lost = dropped(client)

        def told() -> list[dict[str, Any]]:
            unread.read()
            whole = [json.loads(line) for line in unread.got.decode().splitlines(keepends=True) if line.endswith("\n")]
            return [line for line in whole if line["event"] == "lines of the log were dropped"]

        (notice,) = eventually(told)
        assert (notice["lines"], notice["level"]) == (lost, "warning")
        say(unread, 5)
        assert dropped(client) == lost
    assert unread.stop() == 0
    eventually(unread.read, what="the end of the pipe")
    closed = [i for i, line in enumerate(unread.lines()) if line["event"] == "connection closed"]
    at = next(i for i, line in enumerate(unread.lines()) if line["event"] == "lines of the log were dropped")
    assert sum(i < at for i in closed) >= QUEUED, "those that were in the queue are before it"
    assert sum(i > at for i in closed) == 5, "and those of later behind it"
    times = [line["ts"] for line in unread.lines()[:at]]
    assert times == sorted(times)
    assert unread.lines()[-1]["event"] == "stopped"


def test_a_full_pipe_keeps_no_daemon_from_ending(unread: Unread) -> None:
    say(unread, 100)
    unread.process.send_signal(signal.SIGTERM)
    assert unread.process.wait(FLUSH_S + STOP_S) == 0
    assert not unread.socket.exists()


def test_a_daemon_whose_reader_is_gone_serves_on(unread: Unread) -> None:
    """Nothing can be written any more, to nobody."""
    os.close(unread.reader)
    try:
        with Client(unread.endpoint) as client:
            say(unread, 50)
            eventually(lambda: dropped(client) > 0)
            ns = client.raw_namespace("unread", BLOCK)
            assert ns.put([ns.key(b"x")], [block("x", BLOCK)]).stored == 1
        assert unread.stop() == 0
    finally:
        unread.reader = os.open("/dev/null", os.O_RDONLY)


def test_what_is_wrong_at_the_start_still_comes_out(tmp_path: Path) -> None:
    """Though the event loop had begun, and the lines go through the queue."""
    for form in ("text", "json"):
        settings = {"server.log_format": form, "server.state_dir": "/proc/kvstored-nowhere"}
        directory = tmp_path / form
        directory.mkdir()
        with pytest.raises(AssertionError, match=r"ended with \d") as caught:
            RunningDaemon(directory, settings)
        assert "kvstored-nowhere" in str(caught.value)


def test_a_crash_comes_out_whole_and_as_one_line(tmp_path: Path) -> None:
    """Of the daemon, of a thread of its, and of what Python itself ignores."""
    program = """
import threading
from kvstore import daemon
from kvstore.cli.entry import kvstored

class Left:
    def __del__(self):
        raise RuntimeError("left behind")

def broken(self):
    left = Left()
    del left
    thread = threading.Thread(target=lambda: 1 / 0, name="a worker")
    thread.start()
    thread.join()
    raise RuntimeError("the end of it")

daemon.Daemon.start = broken
kvstored()
"""
    crashing = type("Crashing", (RunningDaemon,), {"command": with_program(program)})
    with pytest.raises(AssertionError, match="ended with 1") as caught:
        crashing(tmp_path, {"server.log_format": "json"})
    lines = [json.loads(line) for line in str(caught.value).splitlines()[1:]]
    said = {line["event"]: line.get("exception", "") for line in lines}
    assert "RuntimeError: left behind" in said["an exception was ignored"]
    assert "ZeroDivisionError" in said["a thread failed"]
    assert "RuntimeError: the end of it" in said["the daemon failed"]


def with_program(program: str) -> Any:
    return lambda self: [sys.executable, "-c", program, *RunningDaemon.command(self)[1:]]


# -- the queue alone

PLAIN = logging.Formatter("%(message)s")


def record(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("kvstored.test", logging.INFO, "", 0, text, arguments, None)


@pytest.fixture(params=["pipe", "socket", "terminal", "file", "pipe that cannot be opened again"])
def ends(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A descriptor to read from and one to write to, of every kind that a standard error is."""
    if request.param == "socket":
        here, there = socket.socketpair()
        pair = here.detach(), there.detach()
    elif request.param == "terminal":
        pair = os.openpty()
    elif request.param == "file":
        path = tmp_path / "log"
        writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        pair = os.open(path, os.O_RDONLY), writer
    else:
        pair = os.pipe()
        if request.param != "pipe":
            monkeypatch.setattr(logqueue, "DESCRIPTORS", str(tmp_path))
    flags = fcntl.fcntl(pair[1], fcntl.F_GETFL)
    yield pair
    assert fcntl.fcntl(pair[1], fcntl.F_GETFL) == flags, "others have the same open file: it stays as it is"
    for descriptor in pair:
        os.close(descriptor)


def take(descriptor: int) -> bytes:
    """What there is to read, now."""
    got = b""
    while select.select([descriptor], [], [], 0)[0] and (data := os.read(descriptor, 1 << 16)):
        got += data
    return got.replace(b"\r\n", b"\n")  # of a terminal


def test_no_line_waits_and_each_is_written_whole_in_order_or_counted(ends: tuple[int, int]) -> None:
    reader, writer = ends
    queue = LogQueue(writer, PLAIN)
    text = "x" * 100
    begun = [f"{i} {text}" for i in range(3 * logqueue.LINES_MAX)]
    for line in begun:
        queue.emit(record(line))
    lost = queue.dropped
    if stat.S_ISREG(os.fstat(writer).st_mode):
        assert not lost
    else:
        assert 0 < lost < 3 * logqueue.LINES_MAX
    got = b""

    def all_read() -> bool:
        nonlocal got
        got += take(reader)
        return got.count(b"\n") == len(begun) - lost + (lost > 0)

    eventually(all_read, 20)
    found = got.decode().splitlines()
    if lost:
        assert found.pop() == str({"event": "lines of the log were dropped", "lines": lost})
    assert found == begun[: len(begun) - lost]
    queue.emit(record("afterwards"))
    eventually(lambda: take(reader) == b"afterwards\n")
    assert queue.dropped == lost
    assert queue.finish(5)


def test_a_line_is_there_when_who_logs_goes_on(ends: tuple[int, int], request: pytest.FixtureRequest) -> None:
    """A crash right after it takes nothing away. (Where the pipe is another user's, it is a moment later.)"""
    reader, writer = ends
    queue = LogQueue(writer, PLAIN)
    for i in range(10):
        queue.emit(record(f"line {i}"))
        if "cannot" in request.node.name:
            eventually(lambda n=i: take(reader) == f"line {n}\n".encode())  # type: ignore[misc]
        else:
            assert take(reader) == f"line {i}\n".encode()
    assert queue.finish(5)


def test_a_line_longer_than_a_pipe_is_cut_nowhere() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    queue = LogQueue(writer, PLAIN)
    lines = ["a" * 50_000, "b", "c" * 9_000]
    for line in lines:
        queue.emit(record(line))
    got = b""
    while got.count(b"\n") < len(lines):
        got += os.read(reader, 1 << 16)
    assert got.decode().splitlines() == lines
    assert queue.finish(30)
    os.close(reader)
    os.close(writer)


def test_bytes_are_bounded_as_well_as_lines() -> None:
    reader, writer = os.pipe()
    queue = LogQueue(writer, PLAIN)
    size = logqueue.BYTES_MAX // 8
    for _ in range(20):
        queue.emit(record("x" * size))
    assert queue.dropped >= 20 - 9
    assert not queue.finish(0.05), "nobody reads"
    os.close(reader)
    eventually(lambda: not queue._thread.is_alive(), what="the thread to see that")
    os.close(writer)


def test_a_line_that_cannot_be_made_is_a_line_that_says_so() -> None:
    reader, writer = os.pipe()
    queue = LogQueue(writer, PLAIN)
    queue.emit(record("%d of them", "no number"))
    said = take(reader).decode()
    assert "a line cannot be made" in said
    assert "kvstored.test" in said
    assert "TypeError" in said
    assert said.count("\n") == 1
    assert queue.finish(30)
    os.close(reader)
    os.close(writer)


FULL_DISK = """
import logging, os, resource, signal, sys
from kvstore import logqueue
from tests.conftest import eventually
from tests.daemon.test_log_pipe import PLAIN, record

logqueue.RETRY_S = 0.05
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
queue = logqueue.LogQueue(writer, PLAIN)
for line in ("fits", "is above what there is room for", "the same"):
    queue.emit(record(line))
eventually(lambda: queue.dropped)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
eventually(lambda: "were dropped" in open(sys.argv[1]).read())
queue.emit(record("room again"))
assert queue.finish(5)
print(queue.dropped)
"""


def test_a_disk_that_is_full_for_a_while_costs_lines_and_says_how_many(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the same call fails the same way."""
    path = tmp_path / "log"
    command = [sys.executable, "-c", FULL_DISK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = path.read_text().splitlines()
    assert lines[0] == "fits"
    assert lines[-1] == "room again"
    told = [int(n) for line in lines for n in re.findall(r"'lines': (\d+)", line)]
    assert sum(told) == int(done.stdout) >= 1


def test_threads_that_log_at_once_lose_nothing() -> None:
    reader, writer = os.pipe()
    queue = LogQueue(writer, PLAIN)
    threads = [
        threading.Thread(target=lambda n=n: [queue.handle(record(f"{n} {i}")) for i in range(500)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    got = b""
    while got.count(b"\n") < 2000:
        got += os.read(reader, 1 << 16)
    for thread in threads:
        thread.join()
    assert queue.finish(5)
    found = got.decode().splitlines()
    for n in range(4):
        assert [line for line in found if line.startswith(f"{n} ")] == [f"{n} {i}" for i in range(500)]
    os.close(reader)
    os.close(writer)


# -- before and after the queue

ENDS_WITHIN_S = 60.0
BEFORE = {
    "a setting that is wrong": ("--set", "host.size=much"),
    "an option that there is not": ("--nonsense",),
    "a directory that cannot be": ("--set", "server.state_dir=/dev/null/state"),
    "the same, as a line of the log": ("--set", "server.state_dir=/dev/null/state", "--set", "server.log_format=json"),
}


@pytest.mark.parametrize("what", BEFORE)
def test_a_start_that_fails_ends_though_nobody_reads_why(what: str) -> None:
    """It hung for as long as the pipe was full: for ever, beside a supervisor that reads nothing more."""
    reader, writer = os.pipe()
    try:
        size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.write(writer, bytes(size))
        command = [sys.executable, "-m", "kvstore", *BEFORE[what]]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=writer, timeout=ENDS_WITHIN_S, check=False)
        assert done.returncode in (1, 2)
    finally:
        os.close(reader)
        os.close(writer)


def test_what_is_said_outside_the_queue_waits_once_and_comes_again_when_somebody_reads(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = ends
    monkeypatch.setattr(logqueue, "SAY_S", 0.05)
    stream = logqueue.bounded(writer)
    for _ in range(5000):
        print("x" * 100, file=stream)
    take(reader)
    print("read again", file=stream)
    stream.close()
    assert take(reader).endswith(b"read again\n")


class Silent(RunningDaemon):
    """Standard descriptors closed, as `kvstored <&- >&- 2>&-` does it."""

    closed: tuple[int, ...] = ()

    def _start(self) -> None:
        closing = " ".join(f"{number}>&-" for number in self.closed)
        command = ["sh", "-c", f'exec "$@" {closing}', "sh", *self.command()]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            eventually(self._serves, START_S, "the daemon to serve")
        except BaseException:
            self.kill()
            raise

    def _serves(self) -> bool:
        with Client(self.endpoint, timeout_s=5.0) as client:
            return client.health().healthy


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)], ids=str)
def test_a_daemon_whose_standard_descriptors_are_closed_starts_and_says_nothing_to_anybody(
    tmp_path: Path, closed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not start; and what is opened first would have got the number that messages go to."""
    monkeypatch.setattr(Silent, "closed", closed)
    daemon = Silent(tmp_path, {})
    try:
        for number in closed:
            assert Path(f"/proc/{daemon.process.pid}/fd/{number}").readlink() == Path("/dev/null")
        say(daemon, 5)
        assert daemon._serves()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(STOP_S) == 0
    finally:
        daemon.kill()
