"""Two daemons never share a socket, a state directory or a port; what a killed one left is cleaned up.

The other daemon is a process of its own. Field faults A8 (what a killed process left), A13
(a second start) and A15 (modes and owners), as far as the locks go.
"""

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import ConfigError, StartupError
from kvstore.instance import InstanceLocks, _take, port_holder, private_directory, remove_stale_socket, start_ticks

HOLDER = """
import os, socket, sys
from pathlib import Path
from kvstore.errors import StartupError
from kvstore.instance import InstanceLocks
os.umask(int(sys.argv[3], 8))
locks = InstanceLocks(Path(sys.argv[1]), Path(sys.argv[2]))
try:
    locks.acquire()
except StartupError as error:
    print("refused", error, flush=True)
    sys.exit(2)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("held", flush=True)
sys.stdin.read()
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


class Daemon:
    """A process that holds the locks and listens on its socket until it is ended."""

    def __init__(self, socket_path: Path, state_dir: Path, umask: str = "022") -> None:
        command = [sys.executable, "-c", HOLDER, str(socket_path), str(state_dir), umask]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid

    def answer(self) -> str:
        """`held`, or `refused` with the message."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate(timeout=30)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.end()


class Node:
    """A directory with daemons in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.daemons: list[Daemon] = []

    def socket(self, name: str) -> Path:
        return self.root / name / "kvstored.sock"

    def state(self, name: str) -> Path:
        return self.root / f"{name}-state"

    def begin(self, socket_of: str = "a", state_of: str = "a", umask: str = "022") -> Daemon:
        daemon = Daemon(self.socket(socket_of), self.state(state_of), umask)
        self.daemons.append(daemon)
        return daemon

    def start(self, socket_of: str = "a", state_of: str = "a", umask: str = "022") -> Daemon:
        daemon = self.begin(socket_of, state_of, umask)
        answer = daemon.answer()
        assert answer == "held", answer
        return daemon

    def locks(self, socket_of: str = "a", state_of: str = "a") -> InstanceLocks:
        return InstanceLocks(self.socket(socket_of), self.state(state_of))

    def refusal(self, socket_of: str = "a", state_of: str = "a") -> str:
        with pytest.raises(StartupError) as caught:
            self.locks(socket_of, state_of).acquire()
        return str(caught.value)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    for daemon in node.daemons:
        daemon.process.kill()
        with daemon.process:
            pass  # closes its pipes and waits for it


# -- the locks


def test_a_second_daemon_on_one_socket_is_refused_and_told_who_has_it(node: Node) -> None:
    first = node.start()
    refusal = node.refusal(state_of="b")
    assert f"pid {first.pid} (" in refusal
    assert sys.executable in refusal
    assert f"{node.socket('a')}.lock" in refusal


def test_a_second_daemon_on_one_state_directory_is_refused(node: Node) -> None:
    first = node.start()
    refusal = node.refusal(socket_of="b")
    assert f"pid {first.pid} (" in refusal
    assert str(node.state("a") / "kvstored.lock") in refusal


def test_a_refused_daemon_holds_nothing(node: Node) -> None:
    node.start()
    node.refusal(socket_of="b")
    node.start(socket_of="b", state_of="b")


def test_daemons_with_nothing_in_common_run_side_by_side(node: Node) -> None:
    node.start()
    node.start(socket_of="b", state_of="b")


def test_of_many_started_at_once_one_runs(node: Node) -> None:
    answers = [daemon.answer().split()[0] for daemon in [node.begin() for _ in range(6)]]
    assert sorted(answers) == ["held"] + ["refused"] * 5


def test_closed_locks_are_free_and_the_files_stay(node: Node) -> None:
    locks = node.locks()
    with locks:
        assert "pid" in node.refusal()
    assert (node.state("a") / "kvstored.lock").read_bytes() == b""
    locks.close()
    with locks:
        pass


def test_one_path_for_both_locks_is_locked_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with InstanceLocks(tmp_path / "kvstored", tmp_path / "link"):
        pass


def test_the_socket_of_grpc_is_locked_too(tmp_path: Path) -> None:
    grpc = tmp_path / "grpc.sock"
    with InstanceLocks(tmp_path / "a.sock", tmp_path / "a", grpc), pytest.raises(StartupError, match=f"{grpc}.lock"):
        InstanceLocks(tmp_path / "b.sock", tmp_path / "b", grpc).acquire()


def test_a_holder_whose_pid_is_somebody_elses_by_now_is_not_named(node: Node) -> None:
    path = node.state("a") / "kvstored.lock"
    with node.locks():
        pass
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{os.getppid()}\n12345 then\n")
        file.flush()
        refusal = node.refusal()
    assert "cannot be named" in refusal
    assert f"pid {os.getppid()}" not in refusal


def test_a_lock_on_a_file_that_was_replaced_is_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        path.unlink()
        assert not _take(fd, path)
        path.touch()
        assert not _take(fd, path)
    finally:
        os.close(fd)


def test_a_lock_file_that_is_a_symlink_or_no_file_is_refused(node: Node, tmp_path: Path) -> None:
    node.state("a").mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    lock = node.state("a") / "kvstored.lock"
    lock.symlink_to(victim)
    assert str(lock) in node.refusal()
    lock.unlink()
    os.mkfifo(lock)
    assert "not a regular file" in node.refusal()
    assert victim.read_text() == "precious"


def test_a_process_is_named_by_its_pid_and_start() -> None:
    assert start_ticks(os.getpid()) == start_ticks(os.getpid()) is not None
    assert start_ticks(1 << 30) is None


# -- A8: what a killed daemon left


def test_after_ten_kills_each_next_one_starts_and_a_live_other_is_untouched(node: Node) -> None:
    other = node.start(socket_of="b", state_of="b")
    for _ in range(10):
        node.start().kill()
        assert node.socket("a").is_socket()
    node.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(node.socket("b")))
    assert other.process.poll() is None


def test_a_socket_that_answers_is_not_taken_though_its_lock_is_free(node: Node) -> None:
    node.socket("a").parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(node.socket("a")))
        listener.listen()
        refusal = node.refusal()
        assert f"pid {os.getpid()} (" in refusal
        assert node.socket("a").is_socket()
    with node.locks():
        assert not node.socket("a").exists()


def test_a_socket_with_a_full_backlog_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(path))
        listener.listen(0)
        client.connect(str(path))
        with pytest.raises(StartupError, match="is in use"):
            remove_stale_socket(path)
    remove_stale_socket(path)
    assert not path.exists()


def test_a_datagram_socket_in_use_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(StartupError, match="is in use"):
            remove_stale_socket(path)
    assert path.exists()


@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "dangling symlink", "fifo"])
def test_what_is_not_a_socket_is_never_deleted(kind: str, node: Node) -> None:
    path = node.socket("a")
    path.parent.mkdir()
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("elsewhere")
        if kind == "symlink":
            (path.parent / "elsewhere").write_text("precious")
    before = path.lstat().st_mode
    assert "is not a socket" in node.refusal()
    assert path.lstat().st_mode == before


def test_a_socket_path_that_is_too_long_is_a_mistake_in_the_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 107"):
        InstanceLocks(tmp_path / ("x" * 107), tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []


# -- A15: modes and owners


@pytest.mark.parametrize("umask", ["000", "022", "077"])
def test_directories_are_0700_and_files_0600_whatever_the_umask(umask: str, node: Node) -> None:
    node.start(umask=umask)
    for directory in (node.socket("a").parent, node.state("a")):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for lock in (Path(f"{node.socket('a')}.lock"), node.state("a") / "kvstored.lock"):
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600


def test_parents_that_are_missing_are_made_private_too(tmp_path: Path) -> None:
    private_directory(tmp_path / "a" / "b" / "c")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_a_lock_file_that_others_could_open_is_closed_to_them(node: Node) -> None:
    node.state("a").mkdir()
    lock = node.state("a") / "kvstored.lock"
    lock.touch()
    lock.chmod(0o666)
    with node.locks():
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600


def test_a_directory_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StartupError, match="chmod o-w"):
        private_directory(tmp_path)
    tmp_path.chmod(0o1777)
    private_directory(tmp_path)


def test_a_symlink_is_followed_at_home_and_refused_where_everybody_may_put_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    private_directory(link)
    private_directory(link / "below")
    tmp_path.chmod(0o1777)
    for path in (link, link / "below"):
        with pytest.raises(StartupError, match="symlink"):
            private_directory(path)


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StartupError, match=str(tmp_path / "file")):
            private_directory(path)


@needs_root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    os.chown(mine, 12345, 12345)
    with pytest.raises(StartupError, match="belongs to user 12345"):
        private_directory(mine)
    tmp_path.chmod(0o1777)
    with pytest.raises(StartupError, match="belongs to user 12345"):
        private_directory(mine / "below")


@needs_root
def test_a_lock_file_of_another_user_is_refused(node: Node) -> None:
    node.state("a").mkdir()
    lock = node.state("a") / "kvstored.lock"
    lock.touch()
    os.chown(lock, 12345, 12345)
    assert "belongs to user 12345" in node.refusal()


# -- A13: who has the port


@pytest.mark.parametrize(
    ("bound", "asked"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("0.0.0.0", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0"),
        ("::1", "::1"),
        ("::1", "localhost"),
        ("::", "127.0.0.1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_listener_on_a_port_is_named(bound: str, asked: str) -> None:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((bound, 0))
        except OSError as error:
            pytest.skip(f"no {bound} here: {error}")
        port = listener.getsockname()[1]
        assert port_holder(asked, port) is None
        listener.listen()
        holder = port_holder(asked, port)
        assert holder is not None
        assert holder.startswith(f"pid {os.getpid()} (")
    assert port_holder(asked, port) is None


def test_a_listener_on_another_address_is_not_the_holder() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.2", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert port_holder("127.0.0.1", port) is None
        assert port_holder("127.0.0.2", port) is not None
