"""What keeps two daemons from sharing a socket, a state directory or a port.

Whoever holds the flock on `<socket>.lock` owns the socket's path; whoever holds the one on
`<state_dir>/kvstored.lock` owns the directory. A flock goes with its process, however that
ends, so a lock that is free proves that no daemon is behind the path, and what a killed one
left there may be removed. It is no proof that the killed one's memory is gone.

Directories are made 0700 and files 0600 whatever the umask; those on the way to a socket for
a group let that group through. Where others may write (/tmp), what they could have put in
the way is refused, never used and never deleted.
"""

import contextlib
import errno
import fcntl
import getpass
import grp
import ipaddress
import os
import shlex
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.config.values import Refused, parse_socket_path
from kvstore.errors import ConfigError, StartupError
from kvstore.logs import logger

log = logger("kvstored.instance")

PROC = Path("/proc")
TCP_LISTEN = "0A"
"""The state in /proc/net/tcp."""

COMMAND_CHARS_MAX = 200
LOCK_SUFFIX = ".lock"
STATE_LOCK_NAME = "kvstored.lock"
CONNECT_TIMEOUT_S = 1.0
ACCESS_LIST = "system.posix_acl_access"
"""The attribute of a file whose group bits are the mask of a list, acl(5)."""

LOCK_FILE_BYTES_MAX = 256
LOCK_ATTEMPTS_MAX = 16
"""How often a lock file may be replaced under our hands before we give up."""


class InstanceLocks:
    """The locks of one daemon on its socket paths and its state directory.

    `acquire` before anything is listened on or allocated; `close` when the sockets are
    unlinked and everything under `state_dir` is closed. Also a context manager.
    """

    def __init__(self, socket_path: Path, state_dir: Path, *others: Path | None, group: str = "") -> None:
        """`others`: paths of further listeners, None where one has no path. `group`: whom `socket_path` is for."""
        self._group = group
        self._sockets = [path for path in (socket_path, *others) if path is not None]
        self._state_dir = state_dir
        self._held: dict[Path, int] = {}

    def acquire(self) -> None:
        """Makes the directories, takes the locks, and removes sockets that a killed daemon left.

        Raises ConfigError for a socket path that is too long and for a group that is not there
        or cannot get to the socket, and StartupError, holding nothing, where another process
        is in the way (named with its pid) or a path is not safe to use.
        """
        assert not self._held, "acquired already"
        for path in self._sockets:
            check_socket_path(path)
        group = group_number(self._group) if self._group else None
        try:
            private_directory(self._sockets[0].parent, group)
            if group is not None:
                check_way(self._sockets[0], self._group, group)
            for directory in (*(path.parent for path in self._sockets), self._state_dir):
                private_directory(directory)
            for path in self._sockets:
                self._lock(path.with_name(path.name + LOCK_SUFFIX))
            self._lock(self._state_dir / STATE_LOCK_NAME)
            for path in self._sockets:
                remove_stale_socket(path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the locks back; safe to call twice. The lock files stay.

        Never unlinked: a process may have opened the file already and be about to lock it. It
        would then hold a lock on a file without a name, a third would create the file anew
        and lock that, and both would believe themselves alone.
        """
        for fd in self._held.values():
            os.ftruncate(fd, 0)
            os.close(fd)
        self._held.clear()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self, path: Path) -> None:
        # A flock of our own on a second descriptor would be in our way like anybody's.
        path = path.parent.resolve() / path.name
        if path not in self._held:
            self._held[path] = _locked_file(path)


def check_socket_path(path: Path) -> None:
    """Raises ConfigError if the path does not fit into a Unix socket address (107 bytes)."""
    try:
        parse_socket_path(path)
    except Refused as refused:
        raise ConfigError(f"socket {path}: {refused}; choose a shorter path") from refused


def group_number(name: str) -> int:
    """Of `server.socket_group`. Raises ConfigError where this machine has no such group."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(
            f"server.socket_group: there is no group {name} on this machine; make it (groupadd --system {name}), "
            "or name another"
        ) from None


def give_to_group(path: Path, group: int, mode: int) -> None:
    """Makes a path of our own a group's, with that mode. Raises ConfigError where we may not."""
    try:
        os.chown(path, -1, group)  # before the mode: until then it is its owner's alone
    except PermissionError:
        user, name = getpass.getuser(), grp.getgrgid(group).gr_name
        raise ConfigError(
            f"server.socket_group: {path} cannot be given to group {name} by user {user}, who is not in it: "
            f"usermod -aG {name} {user}, then start anew; or choose a group of that user"
        ) from None
    path.chmod(mode)


def check_way(path: Path, name: str, group: int) -> None:
    """Whoever may open the socket must be let through every directory above it, too.

    Raises ConfigError where a directory lets nobody in but its owner. Where it lets in another
    group, or an access control list decides, it is not known here who is in: the former is
    logged, the latter left to whoever made the list.
    """
    for directory in (*reversed(path.parent.resolve().parents), path.parent.resolve()):
        found = directory.stat()
        wanted = stat.S_IXGRP if found.st_gid == group else stat.S_IXOTH
        if found.st_mode & wanted or _has_access_list(directory):
            continue
        if found.st_gid != group and found.st_mode & stat.S_IXGRP:
            log.warning("the socket's directory lets in another group", group=name, directory=str(directory))
            continue
        raise ConfigError(
            f"server.socket_group: {directory} does not let group {name} in, so nobody of it could connect to {path}: "
            f"chgrp {name} {directory} && chmod g+x {directory}, or move server.socket where that group may go"
        )


def _has_access_list(path: Path) -> bool:
    try:
        return ACCESS_LIST in os.listxattr(path)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return False  # a file system without any


def private_directory(path: Path, group: int | None = None) -> None:
    """Makes the directory and its parents 0700, or checks the one that is there; raises StartupError.

    Those that it makes let `group` through (0710), if there is one.

    Refused: what is not a directory; what belongs to another user (root excepted, who could
    do anything anyway); what everybody may write to, unless sticky; and, below a directory
    that everybody may write to, a symlink or another user's directory on the way.
    """
    path = path.absolute()
    for directory in (*reversed(path.parents), path):
        try:
            _check_step(directory)
        except FileNotFoundError:
            # A umask only takes from this mode, so the directory is never wider.
            try:
                with contextlib.suppress(FileExistsError), _explained(directory):
                    directory.mkdir(0o700)
                    if group is not None:
                        give_to_group(directory, group, 0o710)
            except FileNotFoundError as e:  # /proc says so of all that it does not have
                raise StartupError(f"{directory} cannot be made ({e.strerror}): choose another path") from e
            _check_step(directory)
    with _explained(path):
        found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise StartupError(f"{path} is not a directory: move it away or choose another path")
    if found.st_uid not in (os.geteuid(), 0):
        raise StartupError(f"{path} belongs to user {found.st_uid}: use a directory of your own")
    if _open_to_all(found) and not found.st_mode & stat.S_ISVTX:
        raise StartupError(f"{path} may be written to by everybody: chmod o-w {path}")


def remove_stale_socket(path: Path) -> None:
    """Unlinks a socket that nobody listens on. Call with the lock held.

    Raises StartupError if somebody answers (named), or if something else is at the path.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"{path} exists and is not a socket: move it away or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_TIMEOUT_S)
        try:
            probe.connect(os.fsencode(path))
        except ConnectionRefusedError:
            # Bound and not listening yet would look the same; a daemon in that state holds the lock.
            with _explained(path):
                path.unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            # A full backlog, another kind of socket, no permission: somebody may be there.
            raise StartupError(f"{path} is in use ({error}): stop its owner or choose another path") from error
        peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid = struct.unpack("3i", peer)[0]
    raise StartupError(f"{describe_process(pid)} listens on {path}: stop it or choose another server.socket")


def _locked_file(path: Path) -> int:
    """An open descriptor of the lock file with the lock on it."""
    for _ in range(LOCK_ATTEMPTS_MAX):
        with _explained(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            if _take(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise StartupError(f"{path} is replaced again and again by another process: find it (fuser -v {path})")


def _take(fd: int, path: Path) -> bool:
    """Locks and signs the file; False if the path led elsewhere by the time the lock was ours."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise StartupError(f"{path} is not a regular file: move it away or choose another path")
    if found.st_uid not in (os.geteuid(), 0):
        raise StartupError(f"{path} belongs to user {found.st_uid}: remove it or choose another path")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartupError(
            f"another kvstored runs here: {_holder(fd, path)} holds {path}; stop it, or give this one a "
            "server.socket and a server.state_dir of its own"
        ) from None
    except OSError as error:
        raise StartupError(f"{path} cannot be locked ({error.strerror}): choose a local file system") from error
    # We never unlink it, but whoever cleans up the directory may.
    try:
        if not os.path.samestat(found, path.lstat()):
            return False
    except FileNotFoundError:
        return False
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with _explained(path):
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n{start_ticks(os.getpid())} {started}\n".encode(), 0)
    return True


def _holder(fd: int, path: Path) -> str:
    """The process that signed the lock file, if it is the one that runs under its pid now.

    The file is signed after it is locked, so for a moment it is empty or still has the
    signature of a daemon that was killed.
    """
    words = os.pread(fd, LOCK_FILE_BYTES_MAX, 0).decode(errors="replace").split()
    if len(words) >= 2 and words[0].isdecimal() and words[1] == str(start_ticks(int(words[0]))):
        return describe_process(int(words[0]))
    return "a process that cannot be named from here"


def _check_step(path: Path) -> None:
    """Refuses what others could have put here where all may write; FileNotFoundError if nothing is here."""
    with _explained(path):
        found = path.lstat()
        above = path.parent.stat()
    if path == path.parent or not _open_to_all(above):
        return
    if stat.S_ISLNK(found.st_mode):
        raise StartupError(f"{path} is a symlink in a directory open to all: remove it or choose another path")
    if found.st_uid not in (os.geteuid(), 0):
        raise StartupError(f"{path} belongs to user {found.st_uid}: remove it or choose another path")


def _open_to_all(found: os.stat_result) -> bool:
    return bool(found.st_mode & stat.S_IWOTH)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns what the kernel says about a path into a StartupError; what is or is not there is the caller's matter."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise StartupError(f"{path} cannot be used: {error.strerror}; mend that or choose another path") from error


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none. With the pid it names a process."""
    try:
        stat_line = (PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Field 22 of proc_pid_stat(5); the second, a name in parentheses, may hold anything.
    return int(stat_line.rpartition(")")[2].split()[19])


def describe_process(pid: int) -> str:
    """`pid N (command line)` for messages to people."""
    if pid <= 0:
        return "a process of another pid namespace"
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return f"pid {pid}"
    return f"pid {pid} ({shlex.join(words)[:COMMAND_CHARS_MAX]})"


def port_holder(host: str, port: int) -> str | None:
    """Who listens on a TCP port of this host or on all hosts, for the message when binding fails.

    `pid N (command line)`, or the user where the process is not ours to look into; None if
    nobody listens (any more).
    """
    try:
        wanted = {ipaddress.ip_address(host)}
    except ValueError:
        wanted = {ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")}
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except FileNotFoundError:
            continue  # a kernel without IPv6
        for fields in map(str.split, lines):
            address, at = _endpoint(fields[1])
            everywhere = address.is_unspecified or any(one.is_unspecified for one in wanted)
            if fields[3] == TCP_LISTEN and at == port and (everywhere or address in wanted):
                return _socket_owner(fields[9]) or f"a process of user {fields[7]}"
    return None


def _endpoint(text: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    """Address and port of `0100007F:C383`: the address in 32-bit words of the machine's byte order."""
    words, _, port = text.partition(":")
    packed = b"".join(int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address, int(port, 16)


def _socket_owner(inode: str) -> str | None:
    for process in PROC.glob("[0-9]*"):
        # Processes end and refuse while we look; those are not the one we can name.
        with contextlib.suppress(OSError):
            for fd in (process / "fd").iterdir():
                if _target(fd) == f"socket:[{inode}]":
                    return describe_process(int(process.name))
    return None


def _target(link: Path) -> str:
    """Of a link; "" where it is gone: a process closes descriptors, as we do the one that lists our own."""
    try:
        return str(link.readlink())
    except OSError:
        return ""
