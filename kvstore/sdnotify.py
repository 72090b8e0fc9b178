"""What systemd is told of a start, a stop, and that the daemon lives: sd_notify(3), in a few lines.

Everything goes to the datagram socket that $NOTIFY_SOCKET names; without one nothing is
sent. A message that cannot be sent is logged once and stops nothing.

A start may take longer than the unit's TimeoutStartSec: while it makes progress, the event
loop itself asks for more time again and again, so that one slow step in a thread does not
end it. A step without progress for STEP_S_MAX is left to systemd to end.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping

from kvstore.logs import logger

log = logger("kvstored.systemd")

EXTEND_EVERY_S = 1.0
EXTEND_S = 15.0
"""Asked for each time: outlives a few ticks that come late."""

STEP_S_MAX = 600.0


class Notifier:
    """The connection to systemd, or to nobody."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self._socket: socket.socket | None = None
        self._failed = False
        self._status = ""
        self._progressed = time.monotonic()
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self.watchdog_s = _watchdog_s(environ)
        """Within this many seconds systemd wants to hear `alive`; 0 where it does not ask."""

    def tell(self, *assignments: str) -> None:
        """Sends one message, such as `READY=1`."""
        if self._socket is None:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            self._socket.sendto("\n".join(assignments).encode(), address)
        except OSError as e:
            if not self._failed:
                log.error("systemd cannot be told", socket=self._address, reason=e.strerror)  # noqa: TRY400
            self._failed = True

    def progress(self, status: str) -> None:
        """The start got on; safe in any thread. `status` is what `systemctl status` shows from the next tick on."""
        self._status = status
        self._progressed = time.monotonic()

    def ready(self, status: str) -> None:
        """A put and a get have worked, and clients can connect."""
        self.tell("READY=1", f"STATUS={_line(status)}")

    def stopping(self) -> None:
        """The daemon ends, by itself or as it was told."""
        self.tell("STOPPING=1", "STATUS=stopping")

    def alive(self) -> bool:
        """The step of the watchdog's loop: the event loop turns."""
        self.tell("WATCHDOG=1")
        return False

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Asks for more time while the body runs."""
        ticker = asyncio.get_running_loop().create_task(self._extend()) if self._socket is not None else None
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

    async def _extend(self) -> None:
        while time.monotonic() - self._progressed < STEP_S_MAX:
            self.tell(f"EXTEND_TIMEOUT_USEC={int(EXTEND_S * 1e6)}", f"STATUS={_line(self._status)}")
            await asyncio.sleep(EXTEND_EVERY_S)
        log.error("the start makes no progress", status=self._status, for_s=STEP_S_MAX)


def _watchdog_s(environ: Mapping[str, str]) -> float:
    """sd_watchdog_enabled(3): the interval, if it is meant for this process."""
    interval, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not interval.isdecimal() or (pid and pid != str(os.getpid())):
        return 0.0
    return int(interval) / 1e6


def _line(status: str) -> str:
    return status.replace("\n", " ")
