"""The files of systemd/: systemd understands them, they leave little open, and the daemon runs within what they leave.

systemd is not the first process here, so the sandbox of the unit is built from its lines: the
same system calls, no capabilities, a read-only file system, no memory that is both writable
and executable.
"""

import configparser
import grp
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.config import as_written, load
from kvstore.daemon import GRPC_GRACE_S, SAVE_S
from kvstore.errors import ConfigError, StartupError
from kvstore.moving.life import CLOSE_S
from kvstore_client import Client, admin
from tests.conftest import KVSTORED, RunningDaemon
from tests.nodes import block, running

FILES = Path(__file__).parents[2] / "systemd"
UNIT = FILES / "kvstored.service"
EXPOSURE_MAX = 3.0
BLOCK = 64 << 10
GROUP = "nogroup"
"""On every Debian; here in place of the group kvstored."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces and gives sockets to groups")


def run(*command: str | Path) -> str:
    """What a program of systemd says; it must be there, and be content."""
    assert shutil.which(str(command[0])), (
        f"{command[0]} is not here: install the package systemd (make test does as root)"
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that is here."""
    text = UNIT.read_text()
    assert text.count("/opt/kvstored/bin/kvstored") == 1
    path = tmp_path / "kvstored.service"
    path.write_text(text.replace("/opt/kvstored/bin/kvstored", str(KVSTORED)))
    return path


def lines(key: str) -> list[str]:
    """All values of a key of the unit, in order."""
    return [line.partition("=")[2] for line in UNIT.read_text().splitlines() if line.partition("=")[0] == key]


# -- what systemd says of them


def test_systemd_finds_nothing_wrong_with_the_unit(unit: Path) -> None:
    assert run("systemd-analyze", "verify", unit) == ""


def test_the_unit_leaves_little_open() -> None:
    said = run("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_MAX * 10:.0f}", UNIT)
    (level,) = re.findall(r"Overall exposure level for kvstored.service: ([0-9.]+)", said)
    assert float(level) < EXPOSURE_MAX


def test_the_unit_is_what_the_daemon_counts_on() -> None:
    for key, value in {
        "Type": "notify",
        "NotifyAccess": "main",
        "User": "kvstored",
        "Restart": "on-failure",
        "RestartPreventExitStatus": str(ConfigError.exit_status),
        "LimitMEMLOCK": "infinity",
        "ProtectProc": "default",
    }.items():
        assert lines(key) == [value]
    (kept,) = lines("FileDescriptorStoreMax")
    assert int(kept) >= 1 + 2 * 1024 + 1024, "two descriptors a segment, the ledger, and room for large blocks"
    (stop,) = lines("TimeoutStopSec")
    assert int(stop.removesuffix("s")) > SAVE_S + CLOSE_S + GRPC_GRACE_S + 10, "the longest stop, and some seconds"
    assert StartupError.exit_status not in (0, ConfigError.exit_status), "what may pass is tried again"


def test_the_user_is_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    run("systemd-sysusers", f"--root={tmp_path}", FILES / "kvstored.sysusers.conf")
    passwd = (tmp_path / "etc/passwd").read_text()
    assert re.search(r"^kvstored:x:\d+:\d+:KV cache store:/var/lib/kvstored:/usr/sbin/nologin$", passwd, re.M)
    assert re.search(r"^kvstored:x:\d+:", (tmp_path / "etc/group").read_text(), re.M)


@needs_root
def test_the_configuration_s_directory_is_made_for_the_daemon_to_read(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    run("systemd-sysusers", f"--root={tmp_path}", FILES / "kvstored.sysusers.conf")
    run("systemd-tmpfiles", "--create", f"--root={tmp_path}", FILES / "kvstored.tmpfiles.conf")
    found = (tmp_path / "etc/kvstored").stat()
    (number,) = re.findall(r"^kvstored:x:(\d+):", (tmp_path / "etc/group").read_text(), re.M)
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o750, 0, int(number))
    assert lines("ConfigurationDirectoryMode") == ["0750"], "systemd warns at each start where the two differ"


# -- the configuration


def test_the_example_is_a_configuration_and_fits_the_unit() -> None:
    done = subprocess.run(
        [KVSTORED, "--config", FILES / "kvstored.toml", "config"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    settings = as_written(load(FILES / "kvstored.toml", [], {}))
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    assert str(settings["server.socket"]).startswith(f"/run/{service['RuntimeDirectory']}/")
    assert settings["server.state_dir"] == f"/var/lib/{service['StateDirectory']}"
    assert settings["server.socket_group"] == service["Group"] == service["User"]
    assert service["ExecStart"].endswith("--config /etc/kvstored/kvstored.toml")


@needs_root
def test_a_socket_for_a_group_is_open_to_it_and_to_nobody_else() -> None:
    before = os.umask(0)
    try:
        with tempfile.TemporaryDirectory(prefix="kvstored-test-") as place:
            path = Path(place) / "kv.sock"
            os.chown(place, -1, grp.getgrnam(GROUP).gr_gid)
            Path(place).chmod(0o750)
            with running(server__socket=str(path), server__socket_group=GROUP) as daemon:
                found = path.stat()
                assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, grp.getgrnam(GROUP).gr_gid)
                assert " warning " not in daemon.output()
                for group, let_in in ((found.st_gid, True), (12345, False)):
                    asked = subprocess.run(
                        ["setpriv", "--reuid=65534", f"--regid={group}", "--clear-groups", "/bin/bash", "-c",
                         f"[ -w {path} ]"],
                        timeout=20, check=False,
                    )  # fmt: skip
                    assert (asked.returncode == 0) == let_in
    finally:
        os.umask(before)


def test_without_a_group_the_socket_is_the_daemon_s_user_s() -> None:
    before = os.umask(0)
    try:
        with running() as daemon:
            assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
    finally:
        os.umask(before)


# -- the sandbox

SANDBOX = """
import ctypes, os, sys

allowed, families, program = sys.argv[1].split(), [int(n) for n in sys.argv[2].split()], sys.argv[3:]
libc, seccomp = ctypes.CDLL(None, use_errno=True), ctypes.CDLL("libseccomp.so.2")
PR_SET_MDWE, REFUSE_EXEC_GAIN = 65, 1
if libc.prctl(PR_SET_MDWE, REFUSE_EXEC_GAIN, 0, 0, 0) != 0 and ctypes.get_errno() != 22:  # EINVAL: before Linux 6.3
    sys.exit("no memory protection")

class Compare(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]

EPERM, ALLOW, EQUAL = 0x00050001, 0x7FFF0000, 4
seccomp.seccomp_init.restype = ctypes.c_void_p
rules = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(EPERM)))
for name in allowed:
    number = seccomp.seccomp_syscall_resolve_name(name.encode())
    if number < 0:
        continue  # of another architecture
    for family in families if name == "socket" else [None]:
        count, compare = (0, None) if family is None else (1, Compare(0, EQUAL, family, 0))
        argument = None if compare is None else ctypes.byref(compare)
        assert seccomp.seccomp_rule_add_array(rules, ctypes.c_uint32(ALLOW), number, count, argument) == 0, name
assert seccomp.seccomp_load(rules) == 0
os.execv(program[0], program)
"""


def system_calls(names: list[str]) -> set[str]:
    """Names and @sets of a SystemCallFilter= line, as system calls."""
    found: set[str] = set()
    for name in names:
        if name.startswith("@"):
            members = run("systemd-analyze", "syscall-filter", name).split("\n")[1:]
            found |= system_calls([line.strip() for line in members if line.strip() and "#" not in line])
        else:
            found.add(name)
    return found


def filtered() -> set[str]:
    """What SystemCallFilter= leaves: lines are added or (~) taken away in their order; @default is always there."""
    found = system_calls(["@default"])
    for line in lines("SystemCallFilter"):
        names = system_calls(line.removeprefix("~").split())
        found = found - names if line.startswith("~") else found | names
    return found | system_calls(["@default"])


class Confined(RunningDaemon):
    """The daemon as the unit confines it, as far as that goes without systemd: root's user without root's powers."""

    def command(self) -> list[str]:
        families = " ".join(str(int(getattr(socket, name))) for name in lines("RestrictAddressFamilies")[0].split())
        inside = [
            "setpriv", f"--regid={grp.getgrnam(GROUP).gr_gid}", "--clear-groups", "--bounding-set=-all",
            "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs",
            sys.executable, "-c", SANDBOX, " ".join(sorted(filtered())), families, *super().command(),
        ]  # fmt: skip
        script = (
            'mount --make-rprivate / && mount --bind "$1" "$1" && mount -o remount,ro,bind / && '
            'mount -t tmpfs -o ro none /home && umask "$2" && shift 2 && exec "$@"'
        )
        return ["unshare", "--mount", "sh", "-c", script, "sh", str(self.directory), lines("UMask")[0], *inside]


@pytest.fixture
def confined() -> Iterator[RunningDaemon]:
    with tempfile.TemporaryDirectory(prefix="kvstored-test-") as directory:
        settings = {"server.grpc": "127.0.0.1:0", "server.http": "localhost:0", "server.socket_group": GROUP}
        settings["host.size"] = "4MiB"  # what anybody may lock, wherever this runs
        settings |= {"ssd.path": f"{directory}/state/ssd", "ssd.size": "64MiB", "ssd.free_floor": "0B"}
        os.chown(directory, -1, grp.getgrnam(GROUP).gr_gid)
        Path(directory).chmod(0o750)
        daemon = Confined(Path(directory), settings)
        try:
            yield daemon
        finally:
            daemon.kill()


@needs_root
def test_the_daemon_serves_within_the_unit_s_sandbox(confined: RunningDaemon) -> None:
    status = Path(f"/proc/{confined.pid}/status").read_text()
    assert re.search(r"^CapEff:\t0+$", status, re.M)
    assert re.search(r"^CapBnd:\t0+$", status, re.M)
    assert re.search(r"^NoNewPrivs:\t1$", status, re.M)
    assert re.search(r"^Seccomp:\t2$", status, re.M)
    for endpoint in (confined.endpoint, confined.grpc_endpoint):
        with Client(endpoint) as client:
            ns = client.raw_namespace(endpoint, BLOCK)
            keys = [ns.key(b"%d" % i) for i in range(200)]  # three times the memory
            for i, key in enumerate(keys):
                assert ns.put([key], [block(i, BLOCK)]).stored == 1
            assert ns.get([keys[-1]]) == [block(199, BLOCK)]
            large = client.raw_namespace("another size", 1 << 20)
            assert large.put([large.key(endpoint.encode())], [bytes(1 << 20)]).stored == 1, (
                "segments are made and dropped"
            )
            stats = client.stats()
            assert stats["host"]["locked"], stats["host"]["locked_reason"]
            assert stats["daemon"]["healthy"], stats["daemon"]["problems"]
            assert not stats["daemon"]["degraded"], stats["daemon"]["degraded"]
            assert stats["ssd"]["counters"]["written"] > 0
            assert not stats["ssd"]["direct_refused"]
    with Client(confined.endpoint) as client:
        verified = admin.verify(client, 0, 1024)
        assert (verified.cursor, verified.bad, verified.failed) == (0, 0, 0)
        assert verified.blocks > 0
    with urllib.request.urlopen(f"{confined.http_url}/readyz", timeout=10) as answer:
        assert answer.status == 200
    said = confined.output()
    assert not re.search(r"Operation not permitted|Traceback| (error|warning) ", said), said
    assert confined.stop() == 0


@needs_root
def test_the_sandbox_of_the_test_is_one(confined: RunningDaemon) -> None:
    """Nothing but its own directory can be written to, and what the filter leaves out cannot be called."""
    mounts = Path(f"/proc/{confined.pid}/mountinfo").read_text().splitlines()
    assert any(line.split()[4] == "/" and line.split()[5].startswith("ro") for line in mounts)
    left = filtered()
    assert not left & {
        "mount",
        "ptrace",
        "setuid",
        "reboot",
        "bpf",
        "unshare",
        "init_module",
        "kexec_load",
        "keyctl",
    } - {"unshare"}
    assert left >= {"mlock", "memfd_create", "pidfd_open", "fallocate", "chown"}
