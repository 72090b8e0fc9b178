"""Sessions of the daemon before this one, whose processes live: nothing that they hold is reused.

Each ends when its process does, or when that attaches again and says what it still uses of it.
"""

from typing import TYPE_CHECKING

from kvstore.core.holds import Session
from kvstore.logs import logger
from kvstore.server.frames import watch
from kvstore.server.peer import Peer

if TYPE_CHECKING:
    from kvstore.server.listener import SessionServer

log = logger("kvstored.session")


class NoConnection:
    """In place of the connection that ended with the daemon before this one."""

    closed = True

    def close(self) -> None: ...


class LeftSession:
    """What is left of one: a session that has ended, and the process it was of."""

    def __init__(self, server: "SessionServer", session: Session, peer: Peer, names: set[int]) -> None:
        self.server = server
        self.session: Session | None = session
        self.peer = peer
        self.names = names
        """Nonces by which the process may ask for it; none where not all that it held is here."""
        self.connection = NoConnection()

    def start(self) -> None:
        """Waits for the end of its process, if that has not ended already (`pidfd` is -1)."""
        assert self.session is not None, "a session of before that is over already"
        self.server.node.device_clients.adopted(self.session)
        if self.peer.pidfd < 0:
            self._exited()
            return
        self.server.by_nonce.update(dict.fromkeys(self.names, self))
        watch(self.server.loop, self.peer.pidfd, self._exited)

    def _exited(self) -> None:
        if self.session is not None:
            log.info("process gone", session=self.session.id, client=self.session.client, pid=self.peer.pid)
            self.server.node.device_clients.end_session(self.session, process_gone=True)
        self.forget()

    def forget(self) -> None:
        """Nothing of it is left."""
        self.session = None
        self.server.forget(self)
