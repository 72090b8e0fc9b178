"""One socket, one port, one state directory: one daemon. The second says who has them; a killed one is taken over."""

import re
import socket
import subprocess
from pathlib import Path

import pytest

from kvstore_client import Client
from tests.conftest import KVSTORED, RunningDaemon, eventually
from tests.nodes import block, running

REFUSED_WITHIN_S = 60.0


def start_beside(daemon: RunningDaemon, directory: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """A second daemon that shares with `daemon` what `settings` name; must end by itself."""
    wanted = {
        "server.socket": str(directory / "second.sock"),
        "server.state_dir": str(directory / "state"),
        "host.size": "4MiB",
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    command = [str(KVSTORED)]
    for key, value in wanted.items():
        command += ["--set", f"{key}={value}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=REFUSED_WITHIN_S, check=False)


def refused(done: subprocess.CompletedProcess[str], daemon: RunningDaemon, what: str) -> None:
    assert done.returncode == 1, done.stderr
    assert "ready: serving" not in done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kvstored: ")
    assert what in last
    assert re.search(rf"\bpid {daemon.pid}\b.*kvstored", last), last


def works(daemon: RunningDaemon) -> None:
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("works", 4096)
        keys = [ns.key(b"works")]
        assert ns.put(keys, block("works", 4096)).rejected == 0
        assert ns.get(keys) == [block("works", 4096)]
        assert client.health().healthy


@pytest.mark.parametrize("shared", ["socket", "state_dir", "grpc"])
def test_a_second_daemon_ends_naming_the_first(daemon: RunningDaemon, tmp_path: Path, shared: str) -> None:
    if shared == "grpc":
        address = daemon.grpc_endpoint.removeprefix("grpc://")
        refused(start_beside(daemon, tmp_path, server__grpc=address), daemon, address)
    else:
        place = daemon.settings[f"server.{shared}"]
        refused(start_beside(daemon, tmp_path, **{f"server__{shared}": place}), daemon, place)
    works(daemon)
    assert daemon.process.poll() is None


def test_a_port_that_somebody_else_listens_on_is_named(daemon: RunningDaemon, tmp_path: Path) -> None:
    """A port may be shared by mistake (SO_REUSEPORT): then each would get half of the calls."""
    for option in (None, socket.SO_REUSEPORT):
        with socket.socket() as listener:
            if option is not None:
                listener.setsockopt(socket.SOL_SOCKET, option, 1)
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            done = start_beside(daemon, tmp_path, server__grpc=address)
        assert done.returncode == 1, done.stderr
        assert address in done.stderr.strip().splitlines()[-1]
        assert "ready: serving" not in done.stderr


def test_what_a_killed_daemon_left_is_taken_over(daemon: RunningDaemon) -> None:
    daemon.kill()
    assert daemon.socket.exists()
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(daemon.socket))
    daemon.restart()
    works(daemon)


def test_a_stopped_daemon_leaves_no_socket(daemon: RunningDaemon) -> None:
    works(daemon)
    assert daemon.stop() == 0
    assert not daemon.socket.exists()
    assert "Traceback" not in daemon.output()
    daemon.restart()
    works(daemon)


def test_a_stop_while_clients_are_connected_takes_no_longer(daemon: RunningDaemon) -> None:
    clients = [Client(daemon.endpoint) for _ in range(5)]
    namespaces = [client.raw_namespace("stop", 4096) for client in clients]
    leases = []
    for i, ns in enumerate(namespaces):
        keys = [ns.key(b"%d" % i)]
        ns.put(keys, block(i, 4096))
        leases.append(ns.acquire(keys))
    assert daemon.stop() == 0
    for i, lease in enumerate(leases):
        assert lease.views[0] == block(i, 4096), "memory under a view outlives the daemon"
    for client, ns in zip(clients, namespaces, strict=True):
        assert ns.match([ns.key(b"0")]).blocks == 0
        assert not client.health().reachable
        client.close()


def test_two_daemons_with_nothing_in_common_do_not_meet() -> None:
    with running(host__size="8MiB") as one, running(host__size="8MiB") as other:
        with Client(one.endpoint) as client:
            ns = client.raw_namespace("works", 4096)
            keys = [ns.key(b"here only")]
            ns.put(keys, block("here", 4096))
            assert ns.match(keys).blocks == 1
        with Client(other.endpoint) as client:
            assert client.raw_namespace("works", 4096).match(keys).blocks == 0
        works(other)
        other.kill()
        works(one)
        eventually(lambda: one.process.poll() is None, 1.0, "the first to live")
