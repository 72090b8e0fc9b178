"""Who is at the other end of a session socket, and when that process is gone.

The end of a socket is not the end of a process: memory that a process may still write to
is reused only when the process itself is gone. A pidfd tells that without a race on
reused process numbers: SO_PEERPIDFD (Linux 6.5) gives it straight from the socket; before
that, pidfd_open on the peer's credentials.
"""

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass

from kvstore.instance import start_ticks

SO_PEERPIDFD = 77
"""Linux 6.5 and later, include/uapi/asm-generic/socket.h; not in Python's socket module."""

_CREDENTIALS = struct.Struct("iII")


@dataclass
class Peer:
    """A process: `pidfd` is -1 where the daemon cannot watch it (`why` says why), and is closed by the owner."""

    pid: int
    uid: int
    pidfd: int
    why: str = ""

    def gone(self) -> bool:
        """Whether the process has exited; a process that cannot be watched is never known to be gone."""
        if self.pidfd < 0:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def same(self, other: "Peer") -> bool:
        """Whether both are one process that lives; one without a number here (another PID namespace) is never known."""
        return self.pid > 0 and self.pid == other.pid and self.pidfd >= 0 and not self.gone()

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def process(pid: int, born: int) -> Peer | None:
    """The process of that number that began at that time (ticks since boot), to be watched; None where it is gone.

    Where its start cannot be read it may be the one, and is taken for it. Raises OSError where no
    descriptor is left to watch it with.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    found = Peer(pid, -1, pidfd)
    if found.gone() or start_ticks(pid) not in (born, None):
        found.close()
        return None
    return found


def peer_of(sock: socket.socket) -> Peer:
    """The process that connected this Unix socket. Raises OSError where no descriptor is left to watch it with."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        os.set_inheritable(pidfd, False)
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            raise  # a shortage of a moment is no reason to call the process unwatchable for good
        if e.errno != errno.ENOPROTOOPT:
            # The process is gone; by its number we might find another one.
            return Peer(pid, uid, -1, f"no pidfd of process {pid}: {e.strerror}")
        if pid <= 0:
            return Peer(pid, uid, -1, "the process is in another PID namespace and this kernel has no SO_PEERPIDFD")
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as e:
            return Peer(pid, uid, -1, f"no pidfd of process {pid}: {e.strerror}")
    return Peer(pid, uid, pidfd)
