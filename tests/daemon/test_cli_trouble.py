"""`kvstore-cli` that does not get in: each cause by its name, and what to do next, once."""

import json
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore_client import Client
from kvstored.v1.endpoint import default_endpoint
from tests.certificates import Authority, guarded, secure_endpoint, token
from tests.conftest import KVSTORED, RunningDaemon
from tests.daemon.cli import WAIT_S, cli, environment, usage
from tests.nodes import running

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
NOBODY = 65534


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    directory = tmp_path_factory.mktemp("secure")
    with running(host__size="16MiB", server__grpc="0.0.0.0:0", **guarded(directory)) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def plain() -> Iterator[RunningDaemon]:
    with running(host__size="16MiB", server__grpc="127.0.0.1:0") as daemon:
        yield daemon


def authority(node: RunningDaemon) -> Path:
    return Path(node.settings["server.tls_cert"]).with_name("ca.pem")


def refused(*arguments: object, **variables: str) -> str:
    """What it says when it ends with 1, in one line, with nothing of gRPC's own beside it."""
    done = cli("stats", *arguments, **variables)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith("kvstore-cli: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@contextmanager
def tls_listener(certificate: Path, key: Path) -> Iterator[str]:
    """Something that shows this certificate to everybody who comes: a daemon would not start with every one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            sock.settimeout(WAIT_S)
            try:
                context.wrap_socket(sock, server_side=True).close()
            except OSError:
                sock.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"grpcs://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


# -- TLS


def test_the_right_authority_and_token_get_in(secure: RunningDaemon, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(token("operator"))
    way = ("--endpoint", secure_endpoint(secure), "--token-file", path)
    for done in (
        cli("stats", *way, "--ca", authority(secure)),
        cli("--ca", authority(secure), "stats", *way),
        cli("stats", *way, KVSTORED_CA=str(authority(secure))),
    ):
        assert (done.returncode, done.stderr) == (0, "")


def test_a_certificate_of_another_authority_is_told_with_the_file_that_was_trusted(
    secure: RunningDaemon, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other").certificate
    said = refused("--endpoint", secure_endpoint(secure), "--ca", other)
    assert f"its certificate is not signed by {other}: name the file of the right authority with --ca FILE" in said
    said = refused("--endpoint", secure_endpoint(secure))
    assert "not signed by the authorities that this machine trusts" in said
    assert "--ca FILE" in said


def test_a_certificate_for_another_host_is_told(tmp_path: Path) -> None:
    issuer = Authority(tmp_path)
    with tls_listener(*issuer.issue("elsewhere", "DNS:kv.example")) as endpoint:
        said = refused("--endpoint", endpoint, "--ca", issuer.certificate)
    assert "its certificate is for other names than 127.0.0.1" in said


@pytest.mark.parametrize(("valid", "said"), [((-3, -1), "has expired"), ((1, 3), "is not valid yet")])
def test_a_certificate_out_of_its_time_is_told(tmp_path: Path, valid: tuple[float, float], said: str) -> None:
    issuer = Authority(tmp_path)
    with tls_listener(*issuer.issue("untimely", valid=valid)) as endpoint:
        assert f"its certificate {said}" in refused("--endpoint", endpoint, "--ca", issuer.certificate)


def test_plain_text_where_tls_is_expected_is_told_and_the_reverse(secure: RunningDaemon, plain: RunningDaemon) -> None:
    port = secure_endpoint(secure).rpartition(":")[2]
    said = refused("--endpoint", f"grpc://127.0.0.1:{port}")
    assert f"it speaks TLS there: --endpoint grpcs://127.0.0.1:{port}, with --ca FILE" in said
    port = plain.grpc_endpoint.rpartition(":")[2]
    said = refused("--endpoint", f"grpcs://127.0.0.1:{port}")
    assert f"it does not speak TLS there: --endpoint grpc://127.0.0.1:{port} without --ca" in said


def test_a_file_that_is_no_authority_is_told(secure: RunningDaemon, tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.write_bytes(b"\x00nonsense")
    said = refused("--endpoint", secure_endpoint(secure), "--ca", junk)
    assert f"--ca {junk} has no certificate that can be read" in said
    done = cli("stats", "--endpoint", secure_endpoint(secure), "--ca", tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert "none" in done.stderr


def test_an_authority_for_what_has_no_certificate_is_wrong_usage() -> None:
    done = usage("stats", "--ca", "/some.pem")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--ca is for grpcs://" in done.stderr


# -- a token for one tenant


def test_a_token_for_one_tenant_needs_no_tenant_named(secure: RunningDaemon, tmp_path: Path) -> None:
    """Every command said that the token was not for "default", which nobody had named."""
    path = tmp_path / "token"
    path.write_text(token("head"))
    way = ("--endpoint", secure_endpoint(secure), "--token-file", path, "--ca", authority(secure))
    with Client(secure.endpoint, tenant="other") as theirs:
        ns = theirs.raw_namespace("theirs", 4096)
        keys = [ns.key(b"%d" % i) for i in range(100)]
        ns.put(keys, bytes(100 * 4096))
        shown = cli("stats", "--json", *way)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert {row["tenant"] for row in json.loads(shown.stdout)["namespaces"]} == {"other"}
        for command in (
            ("inspect", "key", keys[0].hex()),
            ("inspect", "namespace", ns.digest.hex()),
            ("evict", "--key", keys[99].hex()),  # a hundredth of what is the token's: it does not ask
            ("evict", "--bytes", "1KiB", "--tenant", "other"),
        ):
            done = cli(*command, *way)
            assert (done.returncode, done.stderr) == (0, ""), command
        assert ns.match(keys).blocks == 98


# -- an answer that cannot be written


@pytest.mark.parametrize("form", [("stats",), ("stats", "--json"), ("stats", "--watch"), ("--help",)])
def test_an_answer_that_cannot_be_written_is_told_in_a_line(plain: RunningDaemon, form: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [KVSTORED.with_name("kvstore-cli"), "--endpoint", plain.endpoint, *form],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
            check=False,
            env=environment(),
        )
    said = "kvstore-cli: what was to be shown cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


# -- the socket


def test_where_nobody_listens_it_is_said_once(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "dead"))
    for path in (tmp_path / "dead", tmp_path / "none"):
        said = refused("--endpoint", f"unix://{path}")
        assert said.count(str(path)) == 1
        assert said.count("kvstored answers") == 1
        assert said.count("--endpoint") == 1
        assert "KVSTORED_ENDPOINT" not in said, "it is by the option that one of ours is named"
    for endpoint in ("grpc://127.0.0.1:1", f"grpc+unix://{tmp_path}/none"):
        said = refused("--endpoint", endpoint)
        assert (said.count(endpoint), said.count("--endpoint")) == (1, 1)
        assert ("is it running, with server.grpc? Another" in said) == endpoint.startswith("grpc://")


def test_a_daemon_that_stands_still_is_not_taken_for_something_else(plain: RunningDaemon) -> None:
    plain.pause()
    try:
        endpoints = (plain.endpoint, plain.grpc_endpoint, plain.grpc_endpoint.replace("grpc:", "grpcs:"))
        with ThreadPoolExecutor(len(endpoints)) as at_once:
            messages = at_once.map(lambda endpoint: refused("--endpoint", endpoint), endpoints)
        for endpoint, said in zip(endpoints, messages, strict=True):
            assert endpoint in said
            assert "TLS there" not in said
            assert "grpcs://" not in said or endpoint.startswith("grpcs")
    finally:
        plain.resume()


def as_nobody(*arguments: object, **variables: str) -> tuple[int, str]:
    """Exit status and messages of a user who is nobody's friend; the program is read through this user's own eyes."""
    program = (
        "import os, sys, click, rich.console, kvstore_client, kvstore_client.local, kvstore.cli.admin as it\n"
        "import kvstore_client.admin, kvstore.cli.watch, rich.table\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "it.main(prog_name='kvstore-cli')\n"
    )
    done = subprocess.run(
        [KVSTORED.with_name("python"), "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env=environment(**variables),
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@needs_root
def test_whom_the_socket_does_not_let_in_is_told_of_its_group_and_user(plain: RunningDaemon) -> None:
    os.chown(plain.directory, 1, 1)  # a daemon of another user's
    try:
        for mode in (0o700, 0o711):
            plain.directory.chmod(mode)
            status, said = as_nobody("stats", "--endpoint", plain.endpoint)
            assert status == 1
            assert "permission denied" in said
            assert "server.socket_group" in said
            assert ("sudo -u daemon kvstore-cli" in said) == (mode == 0o700)
            assert "start `kvstored`" not in said
            assert "\n" not in said.rstrip("\n")
    finally:
        os.chown(plain.directory, 0, 0)
        plain.directory.chmod(0o700)


@needs_root
def test_who_may_not_administer_is_told_as_whom_to_ask(plain: RunningDaemon) -> None:
    plain.directory.chmod(0o711)
    plain.socket.chmod(0o666)
    try:
        assert as_nobody("stats", "--endpoint", plain.endpoint)[0] == 0
        status, said = as_nobody("evict", "--all", "--yes", "--endpoint", plain.endpoint)
        assert status == 1
        assert f"this process has uid {NOBODY}" in said
        assert "; as the daemon's own user: `sudo -u root kvstore-cli ...`" in said
    finally:
        plain.socket.chmod(0o600)
        plain.directory.chmod(0o700)


@needs_root
def test_a_daemon_of_the_system_behind_a_closed_directory_is_still_the_one_that_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may not look into /run/kvstored got a traceback of PermissionError instead of a message."""
    closed = tmp_path / "closed"
    closed.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    monkeypatch.delenv("KVSTORED_ENDPOINT", raising=False)
    monkeypatch.setattr("kvstored.v1.endpoint.SYSTEM_RUNTIME_DIR", closed)
    os.seteuid(NOBODY)
    try:
        assert default_endpoint() == f"unix://{closed}/kvstored.sock"
    finally:
        os.seteuid(0)
