"""The listening end of the session socket: who is accepted, and which clients there are.

Whatever is wrong with one client, or with the daemon's own descriptors, the next is accepted.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kvstore.core import holds
from kvstore.core.holds import Session
from kvstore.instance import give_to_group
from kvstore.logs import logger
from kvstore.server.calls import Node
from kvstore.server.frames import Partial, watch
from kvstore.server.left import LeftSession
from kvstore.server.peer import Peer
from kvstore.server.session import ClientSession
from kvstored.v1 import kvstore_pb2 as pb

log = logger("kvstored.session")

BACKLOG = 1024
"""Connections that wait to be accepted; a client that does not wait (a time-out in Python) is refused above this."""

ACCEPTS_A_TURN = 128

ACCEPT_AGAIN_S = 1.0
"""Until it is tried again, where the daemon has no descriptor left."""

CLIENTS_MAX = 2 * holds.SESSIONS_MAX
"""Connections and dead sessions together. For a further one, that which has said no Hello for longest is ended:
there are fewer sessions than places, so silence is all that can take the last of them."""


class SessionServer:
    """Accepts sessions on one Unix socket."""

    def __init__(self, node: Node, path: Path, stats: Callable[[], pb.StatsReply]) -> None:
        self.node = node
        self.path = path
        self.stats = stats
        self.loop = asyncio.get_running_loop()
        self.pid = os.getpid()
        self.clients: dict[ClientSession | LeftSession, None] = {}
        """In the order in which they came."""
        self.by_nonce: dict[int, ClientSession | LeftSession] = {}
        self.partial = Partial()
        self._socket: socket.socket | None = None

    def bind(self, group: int | None = None) -> None:
        """Takes the path, mode 0600 from the start (0660 for `group`): who connects is refused until `listen`.

        Raises ConfigError where the socket cannot be given to that group, and OSError.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        before = os.umask(0o177)
        try:
            self._socket.bind(str(self.path))
        finally:
            os.umask(before)
        if group is not None:
            give_to_group(self.path, group, 0o660)

    def listen(self) -> None:
        """Accepts from now on. Raises OSError."""
        assert self._socket is not None, "bind comes first"
        self._socket.listen(BACKLOG)
        watch(self.loop, self._socket.fileno(), self._accept)

    def leave(self, session: Session, peer: Peer, names: set[int]) -> None:
        """A session of the daemon before this one, which has ended; `peer` is its process, and this object's."""
        left = LeftSession(self, session, peer, names)
        self.clients[left] = None
        left.start()

    def forget(self, client: "ClientSession | LeftSession") -> None:
        """Nobody finds it by a nonce any more, and its process is not watched."""
        for nonce in client.names:
            self.by_nonce.pop(nonce, None)
        client.names.clear()
        if client.peer.pidfd >= 0:
            self.loop.remove_reader(client.peer.pidfd)
            client.peer.close()
        self.clients.pop(client, None)
        self.node.jobs_ready()

    def make_place(self) -> None:
        """Where the table of sessions is full, forgets one that ended holding nothing."""
        if len(self.node.store.sessions) < holds.SESSIONS_MAX:
            return
        clients = self.node.device_clients
        for client in self.clients:
            session = client.session
            held = session is None or session.held_bytes or clients.held_bytes(session) or clients.maps(session)
            if client.connection.closed and session is not None and not held:
                clients.forget(session)
                client.forget()
                return

    def close(self) -> None:
        """Ends every session and unlinks the socket."""
        if self._socket is None:
            return
        self.loop.remove_reader(self._socket)
        self._socket.close()
        self.path.unlink(missing_ok=True)
        for client in list(self.clients):
            client.connection.close()
            client.forget()

    def _accept(self) -> None:
        assert self._socket is not None
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as e:
                # Out of descriptors: those who wait stay in the backlog; try again when some are closed.
                log.error("a client cannot be accepted", reason=e.strerror)  # noqa: TRY400
                self.loop.remove_reader(self._socket)
                self.loop.call_later(ACCEPT_AGAIN_S, self._accept_again)
                return
            if len(self.clients) >= CLIENTS_MAX:
                self._end_longest_silence()
            self._begin(sock)

    def _end_longest_silence(self) -> None:
        silent = next(c for c in self.clients if c.session is None and isinstance(c, ClientSession))
        silent.connection.refuse(f"no Hello yet, and {CLIENTS_MAX} clients are connected", pb.RESOURCE_EXHAUSTED)

    def _begin(self, sock: socket.socket) -> None:
        """One client more; whatever is wrong with it, the others are accepted."""
        try:
            client = ClientSession(self, sock)
        except OSError as e:
            log.warning("a client went away at once", reason=e.strerror)
            sock.close()
            return
        self.clients[client] = None
        try:
            client.start()
        except Exception:
            self.node.internal_errors += 1
            log.exception("a client cannot be watched")
            client.connection.close()

    def _accept_again(self) -> None:
        if self._socket is not None and self._socket.fileno() >= 0:
            watch(self.loop, self._socket.fileno(), self._accept)
