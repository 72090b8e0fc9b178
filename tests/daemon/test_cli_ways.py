"""`kvstore-cli` reaches the daemon by every kind of endpoint, named by option or variable, and with a token."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore_client import Client
from tests.conftest import RunningDaemon
from tests.daemon.cli import NOWHERE, cli, usage
from tests.nodes import running


@pytest.fixture(scope="module")
def tcp() -> Iterator[RunningDaemon]:
    with running(host__size="16MiB", server__grpc="127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def unix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(host__size="16MiB", server__grpc=f"unix:{tmp_path_factory.mktemp('grpc')}/s") as daemon:
        yield daemon


def test_stats_come_by_every_way(tcp: RunningDaemon, unix: RunningDaemon) -> None:
    for daemon, endpoint in ((tcp, tcp.endpoint), (tcp, tcp.grpc_endpoint), (unix, unix.grpc_endpoint)):
        done = cli("stats", "--json", "--endpoint", endpoint)
        assert (done.returncode, json.loads(done.stdout)["daemon"]["pid"]) == (0, daemon.pid)


def test_a_socket_for_grpc_is_a_way_to_administration(unix: RunningDaemon) -> None:
    assert unix.grpc_endpoint.startswith("grpc+unix://")
    with Client(unix.endpoint, name="victim") as client:
        ns = client.raw_namespace("x", 4096)
        key = ns.key(b"one")
        ns.put([key], bytes(4096))
        found = cli("inspect", "key", key.hex(), "--json", "--endpoint", unix.grpc_endpoint)
        assert (found.returncode, found.stderr) == (0, "")
        assert json.loads(found.stdout)["key"]["key"] == key.hex()
        done = cli("evict", "--key", key.hex(), "--yes", "--json", "--endpoint", unix.grpc_endpoint)
        freed = json.loads(done.stdout)
        assert (freed["blocks"], freed["size_bytes"], freed["held"], freed["absent"]) == (1, 4096, 0, 0)
        assert ns.match([key]).blocks == 0
        (number,) = [s["id"] for s in client.stats()["sessions"] if s["client"] == "victim"]
        ended = cli("inspect", "session", number, "--end", "--yes", "--endpoint", unix.grpc_endpoint)
        assert (ended.returncode, ended.stdout.split(":")[0]) == (0, f"ended session {number}")


def test_a_port_without_tokens_is_no_way_to_administration(tcp: RunningDaemon) -> None:
    with Client(tcp.endpoint) as client:
        ns = client.raw_namespace("x", 4096)
        ns.put([ns.key(b"one")], bytes(4096))
        for command in (("inspect", "session", 1), ("evict", "--all", "--yes")):
            done = cli(*command, "--endpoint", tcp.grpc_endpoint)
            assert (done.returncode, done.stdout) == (1, "")
            assert "refused" in done.stderr
        assert ns.match([ns.key(b"one")]).blocks == 1


def test_an_endpoint_behind_the_command_counts_more_than_one_before_and_that_more_than_the_variable(
    tcp: RunningDaemon,
) -> None:
    assert cli("--endpoint", NOWHERE, "stats", "--endpoint", tcp.endpoint).returncode == 0
    assert cli("--endpoint", tcp.endpoint, "stats", KVSTORED_ENDPOINT=NOWHERE).returncode == 0
    assert cli("stats", KVSTORED_ENDPOINT=tcp.endpoint).returncode == 0


@pytest.mark.parametrize("endpoint", ["nonsense", "http://x", "unix://relative", "\x1b[2J://x"])
def test_an_endpoint_that_is_none_is_exit_2(endpoint: str) -> None:
    done = cli("stats", "--endpoint", endpoint)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is none of unix:///path" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("content", [None, b"", b"\n", b"two\nlines\n", b"\xff\xfe"])
def test_a_token_file_that_has_none_is_exit_2(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    done = usage("stats", "--token-file", path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"token file {path}" in done.stderr
