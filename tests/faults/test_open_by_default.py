"""Field fault A15: an admin port on all interfaces ran uploaded code; the directory of the cache was world-readable.

Seen as LMCache issue 5128 and pull request 2757 and SynapseKit issue 1024. A daemon is started without a
setting but its size, under the widest umask: what it listens on, and every file and descriptor it makes.
"""

import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore_client import Client, Unauthenticated, admin
from kvstored.v1 import kvstore_pb2 as pb
from tests.certificates import Authority, guarded, secure_endpoint, token, write_tokens
from tests.conftest import KVSTORED, RunningDaemon, eventually
from tests.faults.conftest import Program
from tests.nodes import running

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1 as /proc/net shows it, and the same as an address of IPv6."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


class Default(RunningDaemon):
    """Started with nothing but a runtime directory, and a size that tests can afford."""

    def __init__(self, directory: Path) -> None:
        runtime = directory / "runtime"
        runtime.mkdir(mode=0o755)
        super().__init__(directory, {})
        self.socket = runtime / "kvstored" / "kvstored.sock"
        self.endpoint = f"unix://{self.socket}"

    def command(self) -> list[str]:
        program = "import os, sys\nos.umask(0)\nos.execv(sys.argv[1], sys.argv[1:])"
        runtime = f"XDG_RUNTIME_DIR={self.directory / 'runtime'}"
        return ["env", runtime, sys.executable, "-c", program, str(KVSTORED), "--set", "host.size=16MiB"]


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Default]:
    directory = tmp_path_factory.mktemp("default")
    for parent in (directory, *directory.parents):  # so that other users get as far as the daemon's own
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(parent.stat().st_mode | 0o055)
    daemon = Default(directory)
    try:
        with Client(daemon.endpoint) as client:
            ns = client.raw_namespace("secret", 4096)
            assert ns.put([ns.key(b"x")], b"s" * 4096).stored == 1
        yield daemon
    finally:
        daemon.kill()


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has."""
    found = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            match = re.fullmatch(r"socket:\[(\d+)\]", str(file.readlink()))
            if match:
                found.add(match[1])
    return found


def internet_sockets(pid: int) -> list[tuple[str, str]]:
    """(table, local address) of every socket of the process that other machines could know of."""
    mine, found = sockets_of(pid), []
    for table in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6", "udplite", "sctp/eps"):
        path = Path("/proc/net") / table
        if path.exists():
            for line in path.read_text().splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[9] in mine:
                    found.append((table, fields[1]))
    return found


def unix_listeners(pid: int) -> list[str]:
    """Paths that the process listens on; an abstract one, which has no permissions, begins with @."""
    mine, found = sockets_of(pid), []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in mine and int(fields[3], 16) & 0x10000:
            found.append(fields[7] if len(fields) > 7 else "")
    return found


def test_by_default_it_listens_on_one_unix_socket_and_nothing_else(default: Default) -> None:
    assert internet_sockets(default.pid) == []
    assert unix_listeners(default.pid) == [str(default.socket)]


def test_every_file_and_directory_is_the_users_alone_under_any_umask(default: Default) -> None:
    made = [default.socket.parent, *default.socket.parent.rglob("*")]
    assert {path.name for path in made} >= {"kvstored", "kvstored.sock", "kvstored.sock.lock", "state", "kvstored.lock"}
    for path in made:
        mode = path.lstat().st_mode
        assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), f"{path} is {stat.filemode(mode)}"
        assert path.lstat().st_uid == os.geteuid()


def test_its_memory_is_the_users_alone_and_closed_to_programs_it_would_start(default: Default) -> None:
    memory = 0
    for file in Path(f"/proc/{default.pid}/fd").iterdir():
        name = str(file.readlink())
        flags = Path(f"/proc/{default.pid}/fdinfo/{file.name}").read_text()
        close_on_exec = int(re.search(r"flags:\s+0?(\d+)", flags)[1], 8) & 0o2000000  # type: ignore[index]
        if name.startswith("/memfd:"):
            memory += 1
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, name
        if int(file.name) > 2:
            assert close_on_exec, name
    assert memory > 64, "the slab's segments and an index"


INTRUDER = """
import os, socket, sys
path, pid = sys.argv[1:]
os.setgroups([]); os.setgid(65534); os.setuid(65534)
assert os.access(os.path.dirname(os.path.dirname(path)), os.X_OK), "the way there is open"
for what in ("connect", "list", "memory"):
    try:
        if what == "connect":
            socket.socket(socket.AF_UNIX).connect(path)
        elif what == "list":
            os.listdir(os.path.dirname(path))
        else:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        print("got in by", what, flush=True)
    except PermissionError:
        print("refused", flush=True)
"""


@needs_root
def test_another_user_gets_neither_in_nor_at_the_memory(
    default: Default, start_program: Callable[..., Program]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTRUDER, str(default.socket), str(default.pid)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd="/",
    )
    assert done.stdout.split("\n") == ["refused", "refused", "refused", ""], done.stdout


def test_grpc_listens_on_loopback_only_and_only_when_asked_to(daemon: RunningDaemon) -> None:
    found = internet_sockets(daemon.pid)
    assert found
    for table, address in found:
        assert table in ("tcp", "tcp6")
        words = address.partition(":")[0]
        assert words in LOOPBACK, f"{address} is not 127.0.0.1"
    assert unix_listeners(daemon.pid) == [str(daemon.socket)]


def test_a_socket_for_grpc_is_the_users_alone(tmp_path: Path) -> None:
    with running(server__grpc=f"unix:{tmp_path}/grpc.sock") as daemon:
        assert internet_sockets(daemon.pid) == []
        assert sorted(unix_listeners(daemon.pid)) == sorted([str(daemon.socket), f"{tmp_path}/grpc.sock"])
        assert stat.S_IMODE((tmp_path / "grpc.sock").stat().st_mode) == 0o600


OPEN = ["0.0.0.0:50051", "[::]:50051", "*:50051", ":50051", "192.0.2.1:50051", "localhost.localdomain:50051"]
GUARDS = ("tls_cert", "tls_key", "tokens")


def started(directory: Path, **server: str) -> "subprocess.CompletedProcess[str]":
    """A daemon that does not start."""
    command = [str(KVSTORED), "--set", f"server.socket={directory}/kv.sock", "--set", "host.size=4MiB"]
    for key, value in {"state_dir": f"{directory}/state", **server}.items():
        command += ["--set", f"server.{key}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert not (directory / "kv.sock").exists()
    return done


@pytest.mark.parametrize("listener", ["grpc", "http"])
@pytest.mark.parametrize("address", OPEN)
def test_an_address_that_others_reach_is_refused(address: str, listener: str, tmp_path: Path) -> None:
    said = started(tmp_path, **{listener: address}).stderr
    assert f"server.{listener}" in said
    assert "loopback" in said
    assert "missing: server.tls_cert, server.tls_key, server.tokens" in said


@pytest.mark.parametrize("missing", GUARDS)
@pytest.mark.parametrize("listener", ["grpc", "http"])
def test_two_of_three_guards_are_not_enough_and_the_third_is_named(missing: str, listener: str, tmp_path: Path) -> None:
    there = {guard: str(tmp_path / guard) for guard in GUARDS if guard != missing}
    said = started(tmp_path, **{listener: "0.0.0.0:0"}, **there).stderr
    assert f"missing: server.{missing};" in said


def test_a_file_of_tokens_that_others_may_read_keeps_it_from_starting(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue("kvstored")
    tokens = write_tokens(tmp_path / "tokens")
    tokens.chmod(0o640)
    guards = {"tls_cert": str(certificate), "tls_key": str(key), "tokens": str(tokens)}
    assert "server.tokens" in started(tmp_path, grpc="0.0.0.0:0", **guards).stderr
    tokens.chmod(0o600)
    _, other = Authority(tmp_path).issue("other")
    said = started(tmp_path, grpc="0.0.0.0:0", **(guards | {"tls_key": str(other)})).stderr
    assert "server.tls_cert, server.tls_key" in said


def test_with_all_three_it_is_open_to_who_has_a_token_and_to_nobody_else(tmp_path: Path) -> None:
    """Unauthenticated evict and clear are what the reports were about."""
    with running(server__grpc="0.0.0.0:0", host__size="16MiB", **guarded(tmp_path)) as daemon:
        (_, address), *_ = internet_sockets(daemon.pid)
        assert set(address.partition(":")[0]) == {"0"}, "a wildcard, as was asked for"
        ca, endpoint = str(tmp_path / "ca.pem"), secure_endpoint(daemon)
        for token_said in ("", "0123456789abcdef"):
            with pytest.raises(Unauthenticated):
                Client(endpoint, ca=ca, token=token_said)
        with Client(endpoint, ca=ca, token=token("engine")) as client:
            ns = client.raw_namespace("secret", 4096)
            assert ns.put([ns.key(b"x")], b"s" * 4096).stored == 1
            with pytest.raises(Unauthenticated, match="admin = true"):
                admin.evict(client, pb.EvictRequest(all=True))
            assert ns.match([ns.key(b"x")]).blocks == 1
            ns.clear()
        with Client(endpoint, ca=ca, token=token("operator")) as operator:
            admin.evict(operator, pb.EvictRequest(all=True))


def test_it_opens_nothing_more_while_it_works(default: Default) -> None:
    ours = set(internet_sockets(os.getpid()))  # of tests before this one, if they have left any
    with Client(default.endpoint) as client:
        client.stats()
        client.health()
        ns = client.raw_namespace("secret", 4096)
        with ns.acquire([ns.key(b"x")]) as lease:
            assert bytes(lease.views[0]) == b"s" * 4096
            assert internet_sockets(default.pid) == []
            assert unix_listeners(default.pid) == [str(default.socket)]
            assert set(internet_sockets(os.getpid())) <= ours, "nor does the SDK"
    eventually(lambda: len(unix_listeners(default.pid)) == 1, 5.0, "one listener")
