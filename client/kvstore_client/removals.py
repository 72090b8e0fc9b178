"""What a removal's answer says of a kill of the daemon that comes now, and who is told.

Over the session socket the answer names a ticket: a call has the session's lock, and nobody
else's call may wait for a disk. Over gRPC, and on a session of its own, the call itself waits.
"""

import logging
import threading
import time

from kvstore_client.session import Session
from kvstore_client.tickets import of_session
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import Unavailable

log = logging.getLogger("kvstore_client")

LASTING_S = 2.0
"""The daemon takes at most so long to see to it that a removal outlives a kill, or to say that it does not."""


class Removals:
    """Of one client: tells people once that something may be back."""

    def __init__(self) -> None:
        self._said = False
        self._saying = threading.Lock()

    def said(self, why: str) -> None:
        """The answer to a removal; "" where nothing of it will be back."""
        with self._saying:
            first, self._said = bool(why) and not self._said, self._said or bool(why)
        if first:
            log.warning("what was removed may be back if the daemon is killed now (said once): %s", why)

    def wait(self, session: Session, reply: pb.RemoveReply) -> None:
        """Waits until that is decided. Raises Unavailable where the daemon went away before."""
        why = reply.not_on_disk_yet
        if reply.ticket:
            ticket = of_session(session, reply.ticket, time.monotonic() + LASTING_S)
            ticket.wait()
            why = "" if ticket.known_state == "done" else ticket.why
            if why and session.hung_up():
                raise Unavailable(f"kvstored went away, and what was removed may be back ({why}): remove it again")
        self.said(why)
