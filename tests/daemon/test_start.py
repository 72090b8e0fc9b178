"""A start that cannot succeed ends before the memory is made, which may take minutes, and its status says of what kind.

Status 2 is a mistake that stays until somebody mends it, status 1 what may be gone at the next attempt.
"""

import grp
import os
import pwd
import re
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.instance import check_way, give_to_group, private_directory
from tests.certificates import Authority, guarded, write_tokens
from tests.conftest import KVSTORED
from tests.nodes import running

GROUP = "nogroup"
"""On every Debian; root is not in it."""

ENDS_WITHIN_S = 60.0

Ports = tuple[int, int]
"""One that another process listens on, and one that is nobody's until the test is over."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to groups and users")


def start(directory: Path, server: dict[str, str], *, size: str = "16MiB") -> "subprocess.CompletedProcess[str]":
    """A daemon that must not start; `server`: settings of that section, or of another that they name."""
    settings = {"socket": f"{directory}/kv.sock", "state_dir": f"{directory}/state", **server}
    command = [str(KVSTORED), "--set", f"host.size={size}"]
    for key, value in settings.items():
        name = key.replace("__", ".") if "__" in key else f"server.{key}"
        command += ["--set", f"{name}={value}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=False)


@pytest.fixture
def ports() -> Iterator[Ports]:
    with socket.socket() as listener, socket.socket() as bound:
        for sock in (listener, bound):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1]), int(bound.getsockname()[1])


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody may go through; pytest's own are closed."""
    with tempfile.TemporaryDirectory(prefix="kvstored-test-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def with_file(name: str, change: Callable[[Path], object]) -> Callable[[Path, Ports], dict[str, str]]:
    """Settings of a daemon open to others, of which one file is changed."""

    def make(directory: Path, _: Ports) -> dict[str, str]:
        server = guarded(directory)
        change(Path(server[f"server__{name}"]))
        return {**server, "grpc": "0.0.0.0:0"}

    return make


def expired(directory: Path, _: Ports) -> dict[str, str]:
    cert, key = Authority(directory).issue("old", valid=(-3, -1))
    tokens = write_tokens(directory / "tokens.toml")
    return {"tls_cert": str(cert), "tls_key": str(key), "tokens": str(tokens), "grpc": "0.0.0.0:0"}


def closed(directory: Path, _: Ports) -> dict[str, str]:
    (directory / "closed").mkdir(0o700)
    return {"socket": f"{directory}/closed/kv.sock", "socket_group": GROUP}


def taken_path(directory: Path, _: Ports) -> dict[str, str]:
    (directory / "kv.sock").write_text("mine")
    return {}


def no_directory(directory: Path, _: Ports) -> dict[str, str]:
    (directory / "file").write_text("mine")
    return {"ssd__path": f"{directory}/file"}


MENDED, PASSES = 2, 1

KINDS: dict[str, tuple[int, Callable[[Path, Ports], dict[str, str]], str]] = {
    "no such group": (MENDED, lambda *_: {"socket_group": "no_such_group"}, "server.socket_group: there is no group"),
    "a directory that the group cannot enter": (MENDED, closed, f"chgrp {GROUP} .*/closed && chmod g\\+x"),
    "tokens that are not there": (MENDED, with_file("tokens", Path.unlink), "server.tokens: .* cannot be read"),
    "tokens that others may read": (MENDED, with_file("tokens", lambda p: p.chmod(0o644)), "tokens: .*chmod 0600"),
    "a certificate that is not there": (MENDED, with_file("tls_cert", Path.unlink), "tls_cert: .* cannot be read"),
    "a key that others may read": (MENDED, with_file("tls_key", lambda p: p.chmod(0o640)), "tls_key: .*chmod 0600"),
    "a key that is none": (MENDED, with_file("tls_key", lambda p: p.write_text("x")), "not a PEM certificate"),
    "a certificate that has expired": (MENDED, expired, "server.tls_cert: .* expired at 20"),
    "the port of gRPC": (
        PASSES,
        lambda _, ports: {"grpc": f"127.0.0.1:{ports[0]}"},
        r"server.grpc: .*pid \d+ .*listens",
    ),
    "the port of HTTP": (
        PASSES,
        lambda _, ports: {"http": f"127.0.0.1:{ports[0]}"},
        r"server.http: .*pid \d+ .*listens",
    ),
    "one port twice by two names": (
        MENDED,
        lambda _, ports: {"grpc": f"localhost:{ports[1]}", "http": f"127.0.0.1:{ports[1]}"},
        r"server.http: 127.0.0.1:\d+ is an address of server.grpc as well",
    ),
    "a file as the SSD's directory": (MENDED, no_directory, "ssd.path = .*/file is not a directory: move that away"),
    "a file on the way to the SSD's directory": (
        MENDED,
        lambda directory, ports: {"ssd__path": no_directory(directory, ports)["ssd__path"] + "/ssd"},
        "ssd.path = .* is below .*/file, which is not a directory",
    ),
    "something else at the socket's path": (PASSES, taken_path, "exists and is not a socket"),
}


@needs_root
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_with_a_start_is_found_before_the_memory_is_made(kind: str, place: Path, ports: Ports) -> None:
    status, settings, said = KINDS[kind]
    done = start(place, settings(place, ports))
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("kvstored: "), done.stderr
    assert re.search(said, last), last
    assert done.returncode == status
    assert "prefaulting" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (place / "kv.sock").is_socket()


def test_memory_that_no_machine_has_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    done = start(tmp_path, {}, size="1000000TiB")
    assert (done.returncode, "prefaulting" in done.stderr) == (2, False), done.stderr


# -- a socket for a group


@needs_root
def test_directories_that_are_made_for_a_group_s_socket_let_it_through(place: Path) -> None:
    """Whoever is in the group may open it; nobody else, and nobody lists the directory."""
    path = place / "a" / "b" / "kv.sock"
    number = grp.getgrnam(GROUP).gr_gid
    with running(server__socket=str(path), server__socket_group=GROUP) as daemon:
        assert "warning" not in daemon.output()
        for directory in (path.parent, path.parent.parent):
            found = directory.stat()
            assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o710, number)
        for group, let_in in ((number, True), (12345, False)):
            somebody = ["setpriv", "--reuid=65534", f"--regid={group}", "--clear-groups", "/bin/bash", "-c"]
            asked = subprocess.run([*somebody, f"[ -w {path} ]"], timeout=20, check=False)
            assert (asked.returncode == 0) == let_in
            asked = subprocess.run([*somebody, f"ls {path.parent}"], capture_output=True, timeout=20, check=False)
            assert asked.returncode != 0


@needs_root
def test_a_way_that_is_not_the_daemon_s_to_open_is_refused_wherever_it_ends(place: Path) -> None:
    number = grp.getgrnam(GROUP).gr_gid
    above = place / "above"
    (above / "below").mkdir(parents=True)
    socket_path = above / "below" / "kv.sock"
    for closed_directory in (above, above / "below"):
        closed_directory.chmod(0o700)
        with pytest.raises(ConfigError, match=f"{closed_directory} does not let group {GROUP} in"):
            check_way(socket_path, GROUP, number)
        os.chown(closed_directory, -1, number)
        with pytest.raises(ConfigError, match="does not let group"):
            check_way(socket_path, GROUP, number)
        closed_directory.chmod(0o710)
        check_way(socket_path, GROUP, number)
        closed_directory.chmod(0o701)  # open to all but the group
        with pytest.raises(ConfigError, match="does not let group"):
            check_way(socket_path, GROUP, number)
        closed_directory.chmod(0o755)


@needs_root
def test_a_way_that_another_group_may_go_is_told_of_and_left(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    (place / "others").mkdir(0o750)
    check_way(place / "others" / "kv.sock", GROUP, grp.getgrnam(GROUP).gr_gid)
    assert "lets in another group" in caplog.text


@needs_root
def test_a_group_that_the_daemon_s_user_is_not_in_is_a_mistake_that_is_told_with_its_mend(place: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    place.chmod(0o777 | stat.S_ISVTX)
    child = os.fork()
    if child == 0:  # who has given up root cannot take it back
        status = 1
        try:
            os.setgroups([])
            os.setgid(nobody.pw_gid)
            os.setuid(nobody.pw_uid)
            with pytest.raises(ConfigError, match="usermod -aG root "):
                private_directory(place / "made", 0)
            with pytest.raises(ConfigError, match="usermod -aG root "):
                give_to_group(place / "made", 0, 0o660)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
