"""Keeps a session with the daemon of this machine: opens it, tends it, and opens another when it has ended.

A thread wakes once a second: it tells what was read, gives back idle grants, answers the
daemon's notices, populates page tables of new segments, and reconnects with back-off
when the daemon went away, however many calls ask for it meanwhile.
"""

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from kvstore_client.session import Session
from kvstore_client.transport import Identity
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, KVStoreError, Unavailable

log = logging.getLogger("kvstore_client")

KEEPER_S = 1.0
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.05, 1.0

T = TypeVar("T")

_keepers: "weakref.WeakSet[Keeper]" = weakref.WeakSet()


class Keeper:
    """Sessions with one daemon, one after the other. `session` is the one of now, dead or alive, or None."""

    def __init__(self, path: str, client: str, tenant: str, timeout_s: float, read_only: bool) -> None:
        """Tries to connect once; a daemon that is away is no error here (it may come), another version is."""
        self._arguments = (path, client, tenant, timeout_s, read_only)
        self._path = path
        self._timeout_s = timeout_s
        self.session: Session | None = None
        self.down = ""
        """Why there is no session, when there is none."""
        self.closed = False
        self._failures = 0
        self._before: Session | None = None
        self._connecting = threading.Lock()
        self._wake = threading.Event()
        self._backoff_s = BACKOFF_FIRST_S
        self._retry_at = 0.0
        self._forked = False
        try:
            self.connect()
        except Unavailable as e:
            log.warning("%s. Until then every read misses and every put is rejected.", e)
        self._thread = threading.Thread(target=_keep, args=(weakref.ref(self), self._wake), daemon=True)
        self._thread.name = "kvstore-keeper"
        self._thread.start()
        _keepers.add(self)

    def connect(self) -> Session:
        """The live session, or a new one. Raises Unavailable, or what the daemon refuses Hello with.

        Threads that come while another one tries share its outcome: in a row, each would wait
        for its own time-out and those of all before it.
        """
        failures = self._failures
        with self._connecting:
            if self.closed:
                raise FailedPrecondition("the client is closed")
            session = self.session
            if session is not None and not session.hung_up():
                return session
            if failures != self._failures:
                raise Unavailable(self.down)
            if session is not None:
                self._before, self.session = session, None
                log.warning("kvstored on unix://%s: %s; reads miss until it is back", self._path, session.dead)
            if self._before is not None:
                _unmap_unused(self._before)
            try:
                session = Session(*self._arguments)
                session.on_attach = self._wake.set
                try:
                    session.open(self._before)
                except KVStoreError as e:
                    session.die(str(e))
                    if session.hello.nonce:  # it took over what was held, and the next must take that over from it
                        self._before = session
                    raise
            except KVStoreError as e:
                self.down = str(e)
                self._failures += 1
                raise
            if self.down:
                log.warning("kvstored on unix://%s is back", self._path)
            self._before, self.down, self._backoff_s = None, "", BACKOFF_FIRST_S
            self.session = session
            return session

    def now(self) -> Session | None:
        """The live session if there is one; otherwise the keeper is told to look for the daemon."""
        session = self.session
        if session is not None and not session.dead:
            return session
        if self._forked:
            raise FailedPrecondition("this client was made before a fork; make a new Client in the child")
        if self.closed:
            raise FailedPrecondition("the client is closed")
        self._wake.set()
        return None

    def need(self, call: Callable[[Session], T]) -> T:
        """For management: connects if need be, and once more where the session turns out to be dead."""
        self.now()
        until = time.monotonic() + self._timeout_s
        session = self.connect()
        try:
            return call(session)
        except Unavailable:
            if not session.dead or time.monotonic() >= until:
                raise
        return call(self.connect())

    def alone(self, call: Callable[[Session], T]) -> T:
        """For what may take long: on a session of its own, so that no other call waits for it."""
        self.now()
        session = Session(*self._arguments)
        try:
            session.open(None)
            return call(session)
        finally:
            session.leave()

    def opened(self, session: Session, ns: Identity) -> pb.OpenNamespaceReply:
        """The namespace in this session, opened and its segments attached at first use."""
        found = session.namespaces.get(ns.digest)
        if found is None:
            request = pb.OpenNamespaceRequest(digest=ns.digest, block_bytes=ns.block_bytes, label=ns.label)
            found = session.call(pb.Request(open_namespace=request)).open_namespace
            session.attach(found.segments)
            session.namespaces[ns.digest] = found
        return found

    def wake(self) -> None:
        """Has the thread look soon: a call has found the daemon gone, or there is something to populate."""
        self._wake.set()

    def close(self) -> None:
        """Gives back what is held, tells what was read, ends the session. Views that live keep theirs until they go."""
        if self._forked:
            return
        with self._connecting:
            self.closed = True
            session, self.session, self._before = self.session, None, None
        self._wake.set()
        if session is not None:
            session.leave()

    def __del__(self) -> None:
        """A client that is dropped without `close` leaves all the same: its process may live long."""
        session = getattr(self, "session", None)
        if session is not None and not self._forked and not sys.is_finalizing():
            session.leave(wait=False)

    def _tick(self) -> float:
        """One turn of the keeper; seconds until the next."""
        session = self.session
        if session is None or session.hung_up():
            return self._reconnect()
        while session.to_populate:
            _populate(session)
        try:
            session.tell(touches=True)
            notice = session.index.notice
            if notice != session.noticed or session.unmapping:
                session.noticed = notice
                session.sync()
            session.return_idle_grants(KEEPER_S)
            if not session.index.current() and not session.hung_up():
                session.refresh_index()
        except KVStoreError as e:
            log.debug("keeper: %s", e)
        return KEEPER_S

    def _reconnect(self) -> float:
        """Tries to connect, but not more often than the back-off allows, however many reads ask for it."""
        early = self._retry_at - time.monotonic()
        if early > 0:
            return early
        try:
            self.connect()
        except KVStoreError as e:
            log.debug("reconnecting: %s", e)
        else:
            return KEEPER_S
        pause, self._backoff_s = self._backoff_s, min(self._backoff_s * 2, BACKOFF_MAX_S)
        self._retry_at = time.monotonic() + pause
        return pause


def _unmap_unused(session: Session) -> None:
    """Of a dead session: lets go of all memory but what views and puts still use.

    A daemon that died gives its memory back only when the last client has unmapped it, and
    the next one may need it to start.
    """
    assert session.dead, "reads of a live session rely on its mappings"
    with session.lock:
        used = {slot >> 32 for slots in (*session.holds.values(), session.writing) for slot in slots}
        session.mappings = {number: mapping for number, mapping in session.mappings.items() if number in used}
        session.to_populate.clear()


def _populate(session: Session) -> None:
    try:
        mapping = session.to_populate.popleft()
        mapping.populate(write=False)
    except IndexError:
        return  # another thread of a session taken over was first
    except OSError as e:
        log.debug("page tables are made at first touch instead: %s", e)


def _keep(owner: "weakref.ref[Keeper]", wake: threading.Event) -> None:
    """The keeper thread: holds no reference to its client while it waits, so that the client can be collected."""
    pause = 0.0
    while True:
        wake.wait(pause)
        wake.clear()
        keeper = owner()
        if keeper is None or keeper.closed:
            return
        try:
            pause = keeper._tick()
        except Exception:
            log.exception("the keeper of a kvstored client failed; it goes on")
            pause = KEEPER_S
        del keeper


def _in_child() -> None:
    """Clients made before a fork are of no use in the child, where their keeper does not run."""
    for keeper in list(_keepers):
        keeper._forked = True
        keeper._connecting = threading.Lock()


os.register_at_fork(after_in_child=_in_child)
