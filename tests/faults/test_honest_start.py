"""Field fault A13: a second server started on a used port without an error; a slow start was killed, never READY.

Seen as grpc issue 16920 and containerd issue 5142. Ready is said once, when a put and a get work
for whoever connects at that moment; who cannot serve ends, soon, and never says it.
"""

import json
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.sdnotify import EXTEND_S
from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running

BLOCK = 64 << 10
WAIT_S = 60.0


class Systemd:
    """The socket that a service tells how it is."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.told: list[list[str]] = []

    def take(self, timeout_s: float = 0.0) -> list[str]:
        """The next message's lines; none when none comes in time."""
        self.socket.settimeout(timeout_s or 0.001)
        try:
            lines = self.socket.recv(4096).decode().split("\n")
        except TimeoutError:
            return []
        self.told.append(lines)
        return lines

    def wait_for(self, line: str) -> None:
        """Takes messages up to one with that line."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            if line in self.take(0.1):
                return
        raise AssertionError(f"waited for {line}: {self.told}")

    def all(self) -> list[str]:
        """All that was told so far, line by line."""
        while self.take():
            pass
        return [line for lines in self.told for line in lines]


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    found = Systemd(str(tmp_path / "notify"))
    yield found
    found.socket.close()


class Service(RunningDaemon):
    """The daemon as systemd starts it, and `patches` within it; nobody waits until it is ready."""

    def __init__(
        self, directory: Path, settings: dict[str, str], systemd: Systemd, patches: str = "", **environ: str
    ) -> None:
        self._environ = {"NOTIFY_SOCKET": systemd.address, **environ}
        self._patches = patches
        super().__init__(directory, settings)

    def command(self) -> list[str]:
        program = [sys.executable, "-c", f"{self._patches}\nfrom kvstore.cli.entry import kvstored\nkvstored()"]
        return ["/usr/bin/env", *(f"{k}={v}" for k, v in self._environ.items()), *program, *super().command()[1:]]

    def _ready(self) -> bool:
        return True


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "daemon"
    path.mkdir(mode=0o700)
    return path


# -- a second one


@pytest.fixture(scope="module")
def first() -> Iterator[RunningDaemon]:
    with running(server__grpc="127.0.0.1:0", server__http="127.0.0.1:0") as daemon:
        yield daemon


def taken(first: RunningDaemon, what: str) -> str:
    return {
        "server.grpc": first.grpc_endpoint.removeprefix("grpc://"),
        "server.http": first.http_url.removeprefix("http://"),
        "server.socket": str(first.socket),
        "server.state_dir": first.settings["server.state_dir"],
    }[what]


@pytest.mark.parametrize("what", ["server.grpc", "server.http", "server.socket", "server.state_dir"])
def test_a_second_daemon_on_what_is_taken_ends_soon_and_is_never_ready(
    first: RunningDaemon, place: Path, systemd: Systemd, what: str
) -> None:
    service = Service(place, {what: taken(first, what)}, systemd)
    assert service.process.wait(WAIT_S) == 1, "another start may succeed"
    last = service.output().splitlines()[-1]
    assert f"pid {first.pid} (" in last, last
    assert "prefaulting" not in service.output(), "it was found before what takes long"
    assert "READY=1" not in systemd.all()
    with Client(first.endpoint) as client:
        assert client.health().healthy, "the first one serves on"
    assert first.socket.exists()


def test_one_that_cannot_serve_had_no_client(first: RunningDaemon, place: Path, systemd: Systemd) -> None:
    """Its own socket, which is free, takes nobody: the addresses that others may have come first."""
    service = Service(place, {"server.http": taken(first, "server.http")}, systemd)
    while service.process.poll() is None:
        assert not accepts(service)


def accepts(service: RunningDaemon) -> bool:
    """Whether somebody can connect."""
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(service.socket)) == 0


def test_a_store_that_loses_bytes_is_never_ready(place: Path, systemd: Systemd) -> None:
    patches = "from kvstore.tiers.slab import Slab\nSlab.bytes_at = lambda self, s, o, n: memoryview(bytearray(n))"
    service = Service(place, {}, systemd, patches)
    assert service.process.wait(WAIT_S) == 1
    assert "the store does not work: get: a block does not have the bytes" in service.output()
    assert "READY=1" not in systemd.all()
    assert not service.socket.exists()


# -- a slow one

SLOW = """
import os, threading
from kvstore import sdnotify
from kvstore.tiers.slab import Slab

sdnotify.EXTEND_EVERY_S = 0.1
make_all = Slab.make_all

def slow(self, sizes, progress):
    while not os.path.exists({go!r}):
        threading.Event().wait(0.01)
    make_all(self, sizes, progress)

Slab.make_all = slow
"""


def test_a_slow_start_asks_for_time_and_is_ready_when_a_put_and_a_get_work(
    place: Path, tmp_path: Path, systemd: Systemd
) -> None:
    """One step in a thread that takes long, as a large slab does; nothing listens so long."""
    go = tmp_path / "go"
    settings = {"server.grpc": "127.0.0.1:0", "server.http": "127.0.0.1:0"}
    service = Service(place, settings, systemd, SLOW.format(go=str(go)))
    try:
        for _ in range(5):
            systemd.wait_for(f"EXTEND_TIMEOUT_USEC={int(EXTEND_S * 1e6)}")
        assert "STATUS=making memory" in systemd.all()
        assert "READY=1" not in systemd.all()
        assert not accepts(service)
        assert "serving" not in service.output()
        go.touch()
        systemd.wait_for("READY=1")
        for endpoint in (service.endpoint, service.grpc_endpoint):
            with Client(endpoint) as client:
                ns = client.raw_namespace("at once", BLOCK)
                key = ns.key(endpoint.encode())
                assert ns.put([key], [block(endpoint, BLOCK)]).stored == 1
                assert ns.get([key]) == [block(endpoint, BLOCK)]
        with urllib.request.urlopen(f"{service.http_url}/healthz", timeout=10) as answer:
            assert answer.status == 200
        told = systemd.all()
        assert told.count("READY=1") == 1
        assert not any(line.startswith("EXTEND") for line in told[told.index("READY=1") :])
        assert service.stop() == 0
        assert "STOPPING=1" in systemd.all()
    finally:
        service.kill()


def test_a_start_without_progress_asks_for_no_more_time(place: Path, tmp_path: Path, systemd: Systemd) -> None:
    """What hangs is systemd's to end."""
    patches = SLOW.format(go=str(tmp_path / "never")) + "\nsdnotify.STEP_S_MAX = 2.0\n"
    service = Service(place, {}, systemd, patches)
    try:
        eventually(lambda: "the start makes no progress" in service.output(), WAIT_S)
        asked = systemd.all().count(f"EXTEND_TIMEOUT_USEC={int(EXTEND_S * 1e6)}")
        assert 2 <= asked <= 2.0 / 0.1 + 2
        assert "READY=1" not in systemd.all()
    finally:
        service.kill()


def test_told_to_stop_while_it_starts_it_stops_and_is_never_ready(
    place: Path, tmp_path: Path, systemd: Systemd
) -> None:
    go = tmp_path / "go"
    service = Service(place, {}, systemd, SLOW.format(go=str(go)))
    try:
        systemd.wait_for(f"EXTEND_TIMEOUT_USEC={int(EXTEND_S * 1e6)}")
        service.process.terminate()
        systemd.wait_for("STOPPING=1")
        go.touch()
        assert service.process.wait(WAIT_S) == 0
        assert "READY=1" not in systemd.all()
    finally:
        service.kill()


def test_the_status_says_how_far_the_memory_is(place: Path, systemd: Systemd) -> None:
    patches = "from kvstore import sdnotify\nsdnotify.EXTEND_EVERY_S = 0.01"
    service = Service(place, {"host.size": "512MiB"}, systemd, patches)
    try:
        systemd.wait_for("READY=1")
        said = {line for line in systemd.all() if line.startswith("STATUS=prefaulting memory: ")}
        assert len(said) > 3, said
        assert all(line.endswith(" of 512 MiB") for line in said)
        assert f"STATUS=serving on {service.endpoint}" in systemd.all()
    finally:
        service.kill()


# -- while it runs


def test_the_watchdog_hears_from_the_event_loop_and_not_when_that_stands_still(place: Path, systemd: Systemd) -> None:
    service = Service(place, {}, systemd, WATCHDOG_USEC="600000")
    try:
        systemd.wait_for("READY=1")
        for _ in range(3):
            systemd.wait_for("WATCHDOG=1")
        service.pause()
        eventually(lambda: Path(f"/proc/{service.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        systemd.all()
        assert systemd.take(1.0) == []
        service.resume()
        systemd.wait_for("WATCHDOG=1")
    finally:
        service.kill()


def test_a_watchdog_that_is_another_process_s_is_not_told(place: Path, systemd: Systemd) -> None:
    service = Service(place, {}, systemd, WATCHDOG_USEC="30000", WATCHDOG_PID="1")
    try:
        systemd.wait_for("READY=1")
        with Client(service.endpoint) as client:
            assert "watchdog" not in [loop["name"] for loop in client.stats()["loops"]]
        assert "WATCHDOG=1" not in systemd.all()
    finally:
        service.kill()


def test_an_abstract_socket_is_told_as_well(place: Path) -> None:
    systemd = Systemd(f"@kvstored-test-{os.getpid()}")
    service = Service(place, {}, systemd)
    try:
        systemd.wait_for("READY=1")
    finally:
        service.kill()
        systemd.socket.close()


def test_nobody_behind_the_socket_is_said_once_and_stops_nothing(place: Path, systemd: Systemd) -> None:
    systemd.socket.close()
    service = Service(place, {"server.log_format": "json"}, systemd)
    try:
        eventually(lambda: "ready: serving" in service.output(), WAIT_S)
        assert service.stop() == 0
        lines = [json.loads(line) for line in service.output().splitlines()]
        assert [line["reason"] for line in lines if line["event"] == "systemd cannot be told"] == ["Connection refused"]
    finally:
        service.kill()
