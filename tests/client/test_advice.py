"""A client that does not get in says once where, why, and what to do next."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore_client import Client, InvalidArgument
from kvstored.v1.endpoint import token_of_file
from tests.nodes import running
from tests.rules.processes import CHECKOUT

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
DAEMON = 1
"""A user and group that every Debian has."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a daemon's socket would be."""
    return tmp_path / "kv.sock"


def left_behind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def below_a_file(path: Path) -> None:
    path.parent.rename(f"{path.parent}.d")
    path.parent.touch()


CAUSES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "there is no such socket; start `kvstored`"),
    "stale": (left_behind, "nobody listens on the socket that is there: its daemon is starting, or gone;"),
    "file": (lambda path: path.write_text(""), "what is there is no socket; start `kvstored`"),
    "below a file": (below_a_file, "Not a directory"),
}


@pytest.mark.parametrize("scheme", ["unix", "grpc+unix"])
@pytest.mark.parametrize(("prepare", "said"), CAUSES.values(), ids=CAUSES)
def test_a_socket_that_cannot_be_connected_to_is_said_with_its_cause(
    path: Path, prepare: Callable[[Path], object], said: str, scheme: str
) -> None:
    prepare(path)
    with Client(f"{scheme}://{path}", timeout_s=1.0) as client:
        (problem,) = client.health().problems
    if scheme == "unix" or said != "Not a directory":
        assert problem.startswith(f"no kvstored answers on {scheme}://{path}: {said}")
        assert problem.count(str(path)) == 1
        assert "systemctl status kvstored" in problem
        assert ("server.grpc" in problem) == (scheme == "grpc+unix")
    else:
        assert said in problem


def test_a_daemon_that_accepts_nobody_is_said_to_stand_still(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as waits:
        full.bind(str(path))
        full.listen(0)
        waits.connect(str(path))
        with Client(f"unix://{path}", timeout_s=0.2) as client:
            assert not client.health().reachable
    assert "it takes no connection in time: it stands still" in caplog.text


# -- permission


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A socket of the user and group `daemon`, in a directory of theirs, that everybody finds the way to."""
    with running() as daemon:
        os.chown(daemon.directory, DAEMON, DAEMON)
        os.chown(daemon.socket, DAEMON, DAEMON)
        yield daemon.socket
        os.chown(daemon.directory, 0, 0)


AS_NOBODY = """
import sys, os
from kvstore_client import Client
from kvstore_client.remote import GrpcTransport
groups = [int(group) for group in sys.argv[2:]]
os.setgroups(groups); os.setgid(65534); os.setuid(65534)
with Client(sys.argv[1], timeout_s=3.0) as client:
    print(*client.health().problems)
"""


def as_nobody(endpoint: str, *groups: int) -> str:
    """What another user's client says."""
    arguments = [sys.executable, "-c", AS_NOBODY, endpoint, *map(str, groups)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True, cwd=CHECKOUT)
    return done.stdout.strip()


@needs_root
@pytest.mark.parametrize("scheme", ["unix", "grpc+unix"])
def test_who_is_not_in_the_sockets_group_is_told_which_and_how_to_join(open_path: Path, scheme: str) -> None:
    open_path.parent.chmod(0o755)
    open_path.chmod(0o660)
    said = as_nobody(f"{scheme}://{open_path}")
    assert "permission denied: the socket is daemon:daemon with mode 0660" in said
    assert "`sudo usermod -aG daemon nobody` and log in again, or run as daemon" in said
    assert "start `kvstored`" not in said
    assert said.count(str(open_path)) == 1


@needs_root
def test_who_is_not_let_into_the_directory_is_told_which(open_path: Path) -> None:
    open_path.chmod(0o660)
    open_path.parent.chmod(0o750)
    said = as_nobody(f"unix://{open_path}")
    assert f"the directory {open_path.parent} is daemon:daemon with mode 0750; join that group with" in said
    assert as_nobody(f"unix://{open_path}", DAEMON) == "", "its group gets in"


@needs_root
def test_where_no_group_may_come_in_none_is_named(open_path: Path) -> None:
    open_path.parent.chmod(0o755)
    open_path.chmod(0o600)
    for groups in ([], [DAEMON]):
        said = as_nobody(f"unix://{open_path}", *groups)
        assert "with mode 0600, which lets in daemon alone; run as daemon, or name a group in the daemon's" in said
        assert "usermod" not in said


# -- the token file


def test_a_token_is_the_one_line_of_a_file_or_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for content in ("secret", "secret\n", "  secret\r\n\n"):
        path.write_text(content)
        assert token_of_file(str(path)) == "secret"
    reading, writing = os.pipe()
    try:
        os.write(writing, b"secret\n")
        end = threading.Timer(0.05, os.close, [writing])  # as of a program that is not done yet
        end.start()
        assert token_of_file(f"/dev/fd/{reading}") == "secret"
        end.join()
    finally:
        os.close(reading)


TOKENS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "cannot be read: No such file or directory; write the token into it"),
    "empty": (lambda path: path.write_text(" \n"), "is empty: write the token into it that the daemon knows"),
    "two lines": (lambda path: path.write_text("sec\nret\n"), "is not one line with a token"),
    "no ASCII": (lambda path: path.write_bytes(b"\xff\xfesecret"), "is not one line with a token"),
    "too long": (lambda path: path.write_text("s" * 5000), "at most 4096 bytes"),
    "directory": (lambda path: path.mkdir(), "cannot be read: Is a directory; it must be a file"),
    "silent pipe": (lambda path: os.mkfifo(path), "is a pipe that nobody has written to within"),
}


@pytest.mark.parametrize(("prepare", "said"), TOKENS.values(), ids=TOKENS)
def test_a_token_file_of_no_use_is_refused_with_its_name_where_it_was_named_and_what_to_do(
    tmp_path: Path, prepare: Callable[[Path], object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstored.v1.endpoint.PIPE_WAIT_S", 0.2)
    path = tmp_path / "token"
    prepare(path)
    monkeypatch.setenv("KVSTORED_TOKEN_FILE", str(path))
    with pytest.raises(InvalidArgument) as caught:
        Client("grpcs://127.0.0.1:1", timeout_s=0.2)
    message = str(caught.value)
    assert message.startswith(f"the token file {path} ($KVSTORED_TOKEN_FILE) ")
    assert said in message
    assert "sec" not in message.replace(str(path), ""), "no part of a secret is quoted"


@needs_root
def test_a_token_file_that_is_anothers_is_refused_with_its_mode_and_who_we_are(tmp_path: Path) -> None:
    for place in (tmp_path, *tmp_path.parents[:-2]):
        place.chmod(place.stat().st_mode | 0o011)
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(0o600)
    os.seteuid(65534)
    try:
        with pytest.raises(
            InvalidArgument, match="it is uid 0's with mode 0600, and this process is uid 65534: chown it"
        ):
            token_of_file(str(path))
    finally:
        os.seteuid(0)
