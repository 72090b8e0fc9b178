"""`kvstore-cli stats --watch`: rates, the end by Ctrl-C or a closed pipe, and a daemon that restarts."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from kvstore_client import Client
from tests.conftest import RunningDaemon, wait_for_line
from tests.daemon.cli import CLI, WAIT_S, Terminal, cli, environment, usage

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def watching() -> Iterator[Start]:
    """Starts `stats --watch` with a pipe for its output; gone with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(endpoint: str, *arguments: str) -> "subprocess.Popen[str]":
        command = [str(CLI), "stats", "--watch", *arguments, "--endpoint", endpoint]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, bufsize=0, env=environment())
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=WAIT_S)


def sample(process: "subprocess.Popen[str]") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(wait_for_line(process))
    return found


def sample_that(process: "subprocess.Popen[str]", condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The first that it is true of; fails where it is of none of very many."""
    for _ in range(1000):
        found = sample(process)
        if condition(found):
            return found
    raise AssertionError("no such sample")


def test_each_line_is_one_object_with_rates_from_the_second_on(daemon: RunningDaemon, watching: Start) -> None:
    process = watching(daemon.endpoint, "0.1", "--json")
    first = sample(process)
    assert list(first) == ["time", "note", "rates", "stats"]
    assert (first["note"], first["rates"]) == ("", None)
    assert first["stats"]["daemon"]["pid"] == daemon.pid
    second = sample(process)
    assert second["rates"] == {"stored_per_s": 0, "hits_per_s": 0, "misses_per_s": 0, "evicted_per_s": 0}
    assert second["time"] > first["time"]
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("x", 4096)
        ns.put([ns.key(b"%d" % i) for i in range(50)], bytes(50 * 4096))
    samples = [second]

    def stored(found: dict[str, Any]) -> bool:
        samples.append(found)
        return bool(found["rates"]["stored_per_s"] > 0)

    busy = sample_that(process, stored)
    assert busy["stats"]["counters"]["stored"] == 50
    began, ended = (datetime.fromisoformat(found["time"]) for found in (samples[-2], sample(process)))
    at_most_s = (ended - began).total_seconds() + 0.01
    assert 50 / at_most_s <= busy["rates"]["stored_per_s"] <= 500, "fifty in a tenth of a second, or in longer"


def test_ctrl_c_is_a_clean_end(daemon: RunningDaemon, watching: Start) -> None:
    process = watching(daemon.endpoint, "3600", "--json")
    sample(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("form", [["--json"], []], ids=["json", "tables"])
def test_a_reader_that_goes_away_is_a_clean_end(daemon: RunningDaemon, watching: Start, form: list[str]) -> None:
    process = watching(daemon.endpoint, "0.1", *form)
    wait_for_line(process)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(WAIT_S) == 0
    assert process.stderr.read() == ""
    process.stdout = None


def test_it_goes_on_when_the_daemon_restarts_and_says_so(daemon: RunningDaemon, watching: Start) -> None:
    process = watching(daemon.endpoint, "0.1", "--json")
    before = sample(process)
    daemon.stop()
    away = sample_that(process, lambda found: found["stats"] is None)
    assert away["note"].startswith("the daemon is away")
    daemon.restart()
    again = sample_that(process, lambda found: found["stats"] is not None)
    assert (again["note"], again["rates"]) == ("the daemon has restarted: its counts begin anew", None)
    assert again["stats"]["daemon"]["epoch"] != before["stats"]["daemon"]["epoch"]
    assert sample(process)["rates"] is not None


def test_without_a_terminal_tables_come_one_after_another(daemon: RunningDaemon, watching: Start) -> None:
    process = watching(daemon.endpoint, "0.1")
    seen: list[str] = []
    while seen.count("rates") < 2:
        seen.append(wait_for_line(process))
    assert "daemon" in seen
    assert not any("\x1b" in line for line in seen)


def test_at_a_terminal_it_is_drawn_over_and_the_terminal_is_given_back(daemon: RunningDaemon) -> None:
    terminal = Terminal("stats", "--watch", "0.1", "--endpoint", daemon.endpoint)
    try:
        assert "\x1b[?1049h" in terminal.until("puts/s")
        terminal.shown = ""
        terminal.until("puts/s")
        terminal.interrupt()
        terminal.until("\x1b[?1049l")
        assert terminal.end() == 0
    finally:
        terminal.close()


def test_no_daemon_at_the_start_is_exit_1(daemon: RunningDaemon) -> None:
    done = cli("stats", "--watch", "--endpoint", "unix:///nowhere/kvstored.sock")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no kvstored answers on" in done.stderr


@pytest.mark.parametrize("seconds", ["0", "nan", "often", "1e9"])
def test_an_interval_that_cannot_be_is_exit_2(seconds: str) -> None:
    done = usage("stats", "--watch", seconds)
    assert done.exit_code == 2
    assert "--watch" in done.stderr
