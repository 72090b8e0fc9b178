"""The SDK over grpcs://: whom it believes, what it sends, and what it says where it is not let in."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Client, InvalidArgument, KVStoreError, Unauthenticated, Unavailable, aio
from tests.certificates import Authority, guarded, secure_endpoint, token
from tests.conftest import RunningDaemon
from tests.nodes import block, running

BLOCK = 256 << 10


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def node(directory: Path) -> Iterator[RunningDaemon]:
    with running(server__grpc="127.0.0.1:0", **guarded(directory)) as daemon:
        yield daemon


def way(node: RunningDaemon, directory: Path, name: str = "engine") -> dict[str, Any]:
    return {"endpoint": secure_endpoint(node), "token": token(name), "ca": directory / "ca.pem"}


def test_blocks_go_both_ways_byte_exact(node: RunningDaemon, directory: Path) -> None:
    with Client(**way(node, directory)) as client, Client(node.endpoint) as local:
        ns, same = (one.raw_namespace("tls", BLOCK) for one in (client, local))
        keys = [ns.key(str(i).encode()) for i in range(8)]
        blocks = [block(i, BLOCK) for i in range(8)]
        assert ns.put(keys[:4], blocks[:4]).stored == 4
        assert same.put(keys, blocks[4:], start=4).stored == 4
        assert ns.get(keys) == same.get(keys) == blocks
        with ns.acquire(keys) as lease:
            assert [bytes(view) for view in lease.views] == blocks
        with ns.reserve(1) as slots:
            slots.views[0][:] = block("reserved", BLOCK)
            assert slots.commit([ns.key(b"reserved")]).stored == 1
        assert client.stats()["daemon"]["healthy"]
        assert client.health().healthy
        assert ns.remove(keys) == 8
        ns.clear()


def test_the_asyncio_client_takes_the_same(node: RunningDaemon, directory: Path) -> None:
    async def run() -> None:
        async with aio.Client(**way(node, directory)) as client:
            ns = await client.raw_namespace("aio", BLOCK)
            assert (await ns.put([ns.key(b"k")], block("k", BLOCK))).stored == 1
            assert await ns.get([ns.key(b"k")]) == [block("k", BLOCK)]
        with pytest.raises(Unauthenticated):
            async with aio.Client(**(way(node, directory) | {"token": "0123456789abcdef"})):
                pass

    asyncio.run(run())


def test_the_environment_says_what_was_not_given(
    node: RunningDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "token").write_text(token("engine") + "\n")
    monkeypatch.setenv("KVSTORED_TOKEN_FILE", str(directory / "token"))
    monkeypatch.setenv("KVSTORED_CA", str(directory / "ca.pem"))
    monkeypatch.setenv("KVSTORED_ENDPOINT", secure_endpoint(node))
    with Client() as client:
        assert client.health().healthy
    with pytest.raises(Unauthenticated):
        Client(token="")
    # Nor do they disturb a client that needs neither, or the daemon.
    with Client(node.endpoint) as local:
        assert local.health().healthy
    config = [str(Path(sys.executable).with_name("kvstored")), "config"]
    assert subprocess.run(config, capture_output=True, timeout=30, check=False).returncode == 0
    for content in ("", "two lines\nof a token", "é" * 16, "x" * 5000):
        (directory / "token").write_text(content)
        with pytest.raises(InvalidArgument, match="token"):
            Client()
    monkeypatch.setenv("KVSTORED_TOKEN_FILE", str(directory / "none"))
    with pytest.raises(InvalidArgument, match="No such file"):
        Client()


@pytest.mark.parametrize("said", ["", "0123456789abcdef", "wrong tenant"])
def test_who_is_not_let_in_hears_so_in_every_call_and_never_has_a_miss(
    node: RunningDaemon, directory: Path, said: str
) -> None:
    options = way(node, directory) | ({"tenant": "other"} if said == "wrong tenant" else {"token": said})
    with pytest.raises(Unauthenticated):
        Client(**options)
    with Client(**way(node, directory)) as client:
        ns = client.raw_namespace("closed", BLOCK)
        keys = [ns.key(b"k")]
        assert ns.put(keys, bytes(BLOCK)).rejected == 0
        # What the daemon thinks of this client changes under it.
        channel = client._transport._channel  # type: ignore[attr-defined]
        good, channel._metadata = (
            channel._metadata,
            tuple(
                (key, "Bearer 0123456789abcdef" if key == "authorization" else value)
                for key, value in channel._metadata
            ),
        )
        calls = (
            *(lambda: ns.match(keys), lambda: ns.get(keys), lambda: ns.put(keys, bytes(BLOCK)), client.stats),
            *(client.health, lambda: ns.acquire(keys), lambda: ns.remove(keys), lambda: ns.pin(keys, 1.0), ns.clear),
        )
        for call in calls:
            with pytest.raises(Unauthenticated, match="token is not known"):
                call()
        channel._metadata = good
        assert ns.get(keys) == [bytes(BLOCK)]
        ns.clear()


def test_another_authority_is_not_believed_and_the_certificate_is_named(
    node: RunningDaemon, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Authority(tmp_path, "stranger").certificate
    for ca, named in ((stranger, str(stranger)), (None, "gRPC's own list")):
        with Client(**(way(node, directory) | {"ca": ca}), timeout_s=5.0) as client:
            with pytest.raises(Unavailable, match="its certificate must name this host and be signed by") as raised:
                client.stats()
            assert named in str(raised.value)
            assert "which no waiting mends" in str(raised.value)
            assert "no kvstored answers" not in str(raised.value)
            health = client.health()
            assert not health.reachable
            assert "certificate" in health.problems[0]
            ns = client.raw_namespace("x", BLOCK)
            assert ns.get([ns.key(b"k")]) == []
            assert isinstance(ns.put([ns.key(b"k")], bytes(BLOCK)).error, Unavailable)
    assert "rejected until that is put right" in caplog.text
    assert "until it is back" not in caplog.text


def test_a_certificate_of_another_host_is_not_believed(tmp_path: Path) -> None:
    settings = guarded(tmp_path)
    certificate, key = Authority(tmp_path).issue("elsewhere", "DNS:elsewhere.example")
    settings |= {"server__tls_cert": str(certificate), "server__tls_key": str(key)}
    with (
        running(server__grpc="127.0.0.1:0", **settings) as node,
        Client(**way(node, tmp_path), timeout_s=5.0) as client,
        pytest.raises(Unavailable, match="certificate must name this host"),
    ):
        client.stats()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ca": "/no/such/file"}, "cannot be read"),
        ({"ca": "/"}, "cannot be read"),
        ({"token": "with space"}, "printable ASCII"),
        ({"token": "é" * 16}, "printable ASCII"),
        ({"token": "line\nbreak"}, "printable ASCII"),
        ({"endpoint": "grpc://192.0.2.1:50051"}, "plain text; use grpcs://"),
        ({"endpoint": "grpc://example.org:50051"}, "plain text; use grpcs://"),
    ],
)
def test_what_cannot_be_safe_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as raised:
        Client(**({"endpoint": "grpcs://127.0.0.1:1", "token": "0123456789abcdef"} | options))
    assert "0123456789" not in str(raised.value)


def test_plain_text_to_a_daemon_with_tls_is_unavailable(node: RunningDaemon) -> None:
    with Client(node.grpc_endpoint, timeout_s=5.0) as client, pytest.raises(KVStoreError) as raised:
        client.stats()
    assert isinstance(raised.value, Unavailable)


def test_the_shell_commands_take_token_and_authority(node: RunningDaemon, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(token("operator"))
    command = [str(Path(sys.executable).with_name("kvstore-cli")), "stats", "--json"]
    environment = {"KVSTORED_CA": str(directory / "ca.pem"), "KVSTORED_TOKEN_FILE": str(tmp_path / "token")}
    done = subprocess.run(
        [*command, "--endpoint", secure_endpoint(node)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
