"""What systemd is told of a start, a stop, and that the daemon lives: sd_notify(3), in a few lines.

Everything goes to the datagram socket that $NOTIFY_SOCKET names; without one nothing is
sent. A message that cannot be sent is logged once and stops nothing.

A start may take longer than the unit's TimeoutStartSec, and a stop that writes memory to the
SSD longer than TimeoutStopSec: while it makes progress, the event loop itself asks for more
time again and again, so that one slow step in a thread does not end it. A step without progress
for STEP_S_MAX is left to systemd to end.
"""

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from array import array
from collections.abc import AsyncIterator, Mapping, MutableMapping

from kvstore.logs import logger

log = logger("kvstored.systemd")

EXTEND_EVERY_S = 1.0
EXTEND_S = 15.0
"""Asked for each time: outlives a few ticks that come late."""

INSIST_S = 600.0
"""For systemd to take the word that the daemon is ready: without it the unit's start fails."""

STEP_S_MAX = 600.0
KEEP_S = 5
_TIMEVAL = struct.Struct("ll")
FIRST_PASSED = 3
"""SD_LISTEN_FDS_START: the first descriptor that systemd hands over."""


class Notifier:
    """The connection to systemd, or to nobody."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._where = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        self._socket: socket.socket | None = None
        self._keeper: socket.socket | None = None
        """One that waits where systemd is slow: a start sends thousands of descriptors, and none may be lost."""
        self._failed = False
        self._status = ""
        self._progressed = time.monotonic()
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            self._keeper = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._keeper.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(KEEP_S, 0))
        self.watchdog_s = _watchdog_s(environ)
        """Within this many seconds systemd wants to hear `alive`; 0 where it does not ask."""

    def tell(self, *assignments: str) -> None:
        """Sends one message, such as `READY=1`."""
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(assignments).encode(), self._where)
        except OSError as e:
            self._cannot(e)

    def _cannot(self, error: OSError) -> None:
        if not self._failed:
            log.error("systemd cannot be told", socket=self._address, reason=error.strerror)
        self._failed = True

    def _tell_surely(self, *assignments: str) -> None:
        """What is said once: where systemd is slow, by a thread that waits until it has room."""
        if self._socket is None or self._keeper is None:
            return
        message = "\n".join(assignments).encode()
        try:
            self._socket.sendto(message, self._where)
        except BlockingIOError:
            threading.Thread(target=self._insist, args=(message,), name="systemd", daemon=True).start()
        except OSError as e:
            self._cannot(e)

    def _insist(self, message: bytes) -> None:
        until, keeper = time.monotonic() + INSIST_S, self._keeper
        while keeper is not None:
            try:
                keeper.sendto(message, self._where)
            except BlockingIOError as e:  # not within KEEP_S
                if time.monotonic() < until:
                    keeper = self._keeper
                    continue
                self._cannot(e)
            except OSError as e:
                self._cannot(e)
            break

    def progress(self, status: str) -> None:
        """The start, or the stop, got on; safe in any thread. `status` is what `systemctl status` shows by then."""
        self._status = status
        self._progressed = time.monotonic()

    def keep(self, name: str, descriptor: int) -> None:
        """Has systemd keep a descriptor by that name (FDSTORE=1), until the unit stops; in any thread.

        Nobody says whether it did: more than FileDescriptorStoreMax= are closed at once. Raises
        OSError where it could not even be told within KEEP_S.
        """
        if self._keeper is None:
            return
        message = f"FDSTORE=1\nFDNAME={name}".encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]
        self._keeper.sendmsg([message], rights, 0, self._where)

    def keep_no_more(self, name: str) -> bool:
        """Undoes `keep`; never waits. False where it has to be said again."""
        if self._keeper is None:
            return True
        try:
            message = f"FDSTOREREMOVE=1\nFDNAME={name}".encode()
            self._keeper.sendmsg([message], [], socket.MSG_DONTWAIT, self._where)
        except OSError as e:
            log.debug("systemd cannot be told to let go of memory", name=name, reason=e.strerror)
            return False
        return True

    @property
    def keeps(self) -> bool:
        """Whether there is anybody to keep descriptors."""
        return self._keeper is not None

    def ready(self, status: str) -> None:
        """A put and a get have worked, and clients can connect."""
        self._tell_surely("READY=1", f"STATUS={_line(status)}")

    def stopping(self) -> None:
        """The daemon ends, by itself or as it was told."""
        self.tell("STOPPING=1", "STATUS=stopping")
        self.progress("stopping")

    def alive(self) -> bool:
        """The step of the watchdog's loop: the event loop turns."""
        self.tell("WATCHDOG=1")
        return False

    @contextlib.asynccontextmanager
    async def asking_for_time(self, what: str) -> AsyncIterator[None]:
        """Asks for more time while the body runs."""
        ticker = asyncio.get_running_loop().create_task(self._extend(what)) if self._socket is not None else None
        try:
            yield
        finally:
            if ticker is not None:
                ticker.cancel()
                await asyncio.gather(ticker, return_exceptions=True)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    async def _extend(self, what: str) -> None:
        while time.monotonic() - self._progressed < STEP_S_MAX:
            self.tell(f"EXTEND_TIMEOUT_USEC={int(EXTEND_S * 1e6)}", f"STATUS={_line(self._status)}")
            await asyncio.sleep(EXTEND_EVERY_S)
        log.error(f"the {what} makes no progress", status=self._status, for_s=STEP_S_MAX)


def _watchdog_s(environ: Mapping[str, str]) -> float:
    """sd_watchdog_enabled(3): the interval, if it is meant for this process."""
    interval, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not interval.isdecimal() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(interval) / 1e6


def _line(status: str) -> str:
    return status.replace("\n", " ")


def passed_descriptors(prefix: str, environ: MutableMapping[str, str] = os.environ) -> dict[str, int]:
    """sd_listen_fds_with_names(3): what systemd kept of a process before this one, by name without `prefix`.

    Others that were passed (sockets of a socket unit) stay as they are. No child gets any of them.
    """
    count, names = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_FDNAMES", "")
    pid = environ.pop("LISTEN_PID", "")
    if not count.isdecimal() or pid != str(os.getpid()):
        return {}
    found: dict[str, int] = {}
    for descriptor, name in enumerate(names.split(":")[: int(count)], FIRST_PASSED):
        os.set_inheritable(descriptor, False)
        if name.startswith(prefix):
            twice = found.pop(name.removeprefix(prefix), -1)  # whoever reads it sees whether it is the right one
            if twice >= 0:
                os.close(twice)
            found[name.removeprefix(prefix)] = descriptor
    return found
