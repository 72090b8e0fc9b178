"""Keeps a session with the daemon of this machine: opens it, tends it, and opens another when it has ended.

A thread wakes once a second: it tells what was read, gives back idle grants, answers the
daemon's notices, populates page tables of new segments, and reconnects with back-off
when the daemon went away, however many calls ask for it meanwhile.
"""

import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from kvstore_client.farewell import Arguments, see_off, unmap_unused
from kvstore_client.reads import Reads
from kvstore_client.session import TOUCH_S, Session
from kvstore_client.transport import Identity
from kvstore_client.waiting import InTheMiddle, Wake, acquired, is_mine
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import DeadlineExceeded, FailedPrecondition, KVStoreError, Unavailable

log = logging.getLogger("kvstore_client")

KEEPER_S = 1.0
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.05, 1.0
AWAY_S = 0.1
"""At most, while nobody listens: to be refused takes some 50 us of this process and nothing of the daemon, which is
back within a second and should not be waited for for another."""

LAST_SESSION_S = 30.0
"""How much longer than two calls a keeper's thread waits for the session that its closed client leaves to it."""

T = TypeVar("T")

_keepers: "weakref.WeakSet[Keeper]" = weakref.WeakSet()


class Keeper:
    """Sessions with one daemon, one after the other. `session` is the one of now, dead or alive, or None."""

    def __init__(self, path: str, client: str, tenant: str, timeout_s: float, read_only: bool) -> None:
        """Tries to connect once; a daemon that is away is no error here (it may come), another version is."""
        self.arguments: Arguments = (path, client, tenant, timeout_s, read_only)
        self._path = path
        self._timeout_s = timeout_s
        self.reads = Reads(TOUCH_S)
        self.known: dict[bytes, Identity] = {}
        """Namespaces that this client has, by digest."""
        self.session: Session | None = None
        self.down = ""
        """Why there is no session, when there is none."""
        self.closed = False
        self._failures = 0
        self._away = False
        """Nobody listened when it last tried."""
        self._before: Session | None = None
        self._last: queue.SimpleQueue[Session | None] = queue.SimpleQueue()
        """To the thread: the session that the client leaves behind. Its `put` is safe in finalizers."""
        self._connecting = threading.RLock()
        self._wake = Wake()
        self._backoff_s = BACKOFF_FIRST_S
        self._retry_at = 0.0
        self._forked = False
        try:
            self.connect()
        except (Unavailable, DeadlineExceeded) as e:
            why = str(e)  # not e itself: its frames have us, and a log may keep it
            log.warning("%s. Until then every read misses and every put is rejected.", why)
        arguments = (weakref.ref(self), self._wake, self._last, self.arguments)
        self._thread = threading.Thread(target=_keep, args=arguments, daemon=True)
        self._thread.name = "kvstore-keeper"
        self._thread.start()
        _keepers.add(self)

    def connect(self, until: float | None = None) -> Session:
        """The live session, or a new one. Raises Unavailable, or what the daemon refuses Hello with.

        Threads that come while another one tries share its outcome, or give up in time: in a
        row, each would wait for its own time-out and those of all before it.
        """
        until = until or time.monotonic() + self._timeout_s
        failures = self._failures
        if not acquired(self._connecting, max(until - time.monotonic(), 0)):
            if is_mine(self._connecting):
                raise InTheMiddle
            raise Unavailable(
                f"no session with kvstored within {self._timeout_s} s: another thread is still connecting"
            )
        try:
            session = self.session
            if self.closed:
                raise FailedPrecondition("the client is closed")
            if session is not None and not session.hung_up():
                return session
            if failures != self._failures:
                raise Unavailable(self.down)
            if session is not None:
                self._before, self.session = session, None
                log.warning("kvstored on unix://%s: %s; reads miss until it is back", self._path, session.dead)
            try:
                session = self._attach(until)
            except KVStoreError:
                if self.closed:
                    self._last.put(self._before)
                raise
            if self.closed:  # meanwhile, by who did not wait for us
                session.leave(wait=False)
                self._last.put(session)
                raise FailedPrecondition("the client is closed")
            if self.down:
                log.warning("kvstored on unix://%s is back", self._path)
            self._before, self.down, self._backoff_s = None, "", BACKOFF_FIRST_S
            self.session = session
            return session
        finally:
            self._connecting.release()

    def _attach(self, until: float) -> Session:
        """A new session that takes over what is used of the one before. Raises like `connect`; `down` says why."""
        try:
            if self._before is not None:
                unmap_unused(self._before)
            session = Session(*self.arguments)
            session.on_attach = self._wake.set
            session.reads = self.reads
            try:
                session.open(self._before, until)
            except KVStoreError as e:
                session.die(str(e))
                if session.hello.nonce:  # it took over what was held, and the next must take that over from it
                    self._before = session
                raise
        except KVStoreError as e:
            self.down = str(e)
            self._failures += 1
            self._away = isinstance(e.__cause__, FileNotFoundError | ConnectionRefusedError)
            raise
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
        session = self.connect(until)
        try:
            return call(session)
        except Unavailable:
            if not session.dead or time.monotonic() >= until:
                raise
        return call(self.connect())

    def alone(self, call: Callable[[Session], T]) -> T:
        """For what may take long: on a session of its own, so that no other call waits for it."""
        self.now()
        session = Session(*self.arguments)
        try:
            session.open(None, time.monotonic() + self._timeout_s)
            return call(session)
        finally:
            session.leave()

    def opened(self, session: Session, ns: Identity) -> pb.OpenNamespaceReply:
        """The namespace in this session, opened and its segments attached at first use."""
        found = session.namespaces.get(ns.digest)
        if found is None:
            found = session.call(pb.Request(open_namespace=ns.opening())).open_namespace
            session.attach(found.segments)
            session.namespaces[ns.digest] = found
        return found

    def tell(self, session: Session) -> None:
        """Says what was done until now; namespaces that this session has not opened yet are opened for it."""
        for digest in self.reads.namespaces():
            if session.namespaces.get(digest) is not None:
                continue
            try:
                self.opened(session, self.known[digest])
            except Unavailable:
                return
            except KVStoreError as e:
                log.debug("calls in namespace %s cannot be told: %s", digest.hex()[:12], e)
        session.tell(touches=True)

    def wake(self) -> None:
        """Has the thread look soon: a call has found the daemon gone, or there is something to populate."""
        self._wake.set()

    def close(self) -> None:
        """Gives back what is held, tells what was read, ends the session. Views that live keep theirs until they go.

        Where the session has died of a time-out, the daemon keeps what it held from others
        until this process is gone or says that it uses it no more: so it attaches once more,
        in the time of one call, to say that. Where that fails, the thread goes on trying.
        """
        if self._forked or self.closed:
            return
        self.closed = True
        self._wake.set()
        until = time.monotonic() + self._timeout_s
        if not acquired(self._connecting, self._timeout_s):
            return  # who is connecting will see that it is closed, and leave
        left: Session | None = None
        try:
            session, self.session = self.session, None
            if session is not None and session.hung_up():
                session, self._before = None, session
            left = session or self._before
            if session is None and self._before is not None:
                left = session = self._attach(until)
            if session is not None:
                self.tell(session)
                session.leave()
        except KVStoreError as e:
            left = self._before
            log.warning("what this client held stays out of use until kvstored hears that it is closed: %s", str(e))
        finally:
            self._before = None
            self._last.put(left)
            self._connecting.release()

    def __del__(self) -> None:
        """A client that is dropped without `close` leaves all the same: its process may live long."""
        if not hasattr(self, "_thread") or self._forked or self.closed or sys.is_finalizing():
            return
        self.closed = True  # the thread may have got hold of us just now
        session = self.session or self._before
        if session is not None and not session.dead:
            session.leave(wait=False)
        self._last.put(session)
        self._wake.set()

    def _tick(self) -> float:
        """One turn of the keeper; seconds until the next."""
        session = self.session
        if session is None or session.hung_up():
            return self._reconnect()
        while session.to_populate:
            _populate(session)
        try:
            self.tell(session)
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
        pause = min(self._backoff_s, AWAY_S if self._away else BACKOFF_MAX_S)
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_MAX_S)
        self._retry_at = time.monotonic() + pause
        return pause


def _populate(session: Session) -> None:
    try:
        mapping = session.to_populate.popleft()
        mapping.populate(write=False)
    except IndexError:
        return  # another thread of a session taken over was first
    except OSError as e:
        log.debug("page tables are made at first touch instead: %s", e)


def _keep(
    owner: "weakref.ref[Keeper]",
    wake: Wake,
    last: "queue.SimpleQueue[Session | None]",
    arguments: Arguments,
) -> None:
    """The keeper thread: holds no reference to its client while it waits, so that the client can be collected.

    Then it sees off the session that is left.
    """
    pause = 0.0
    while True:
        wake.wait(pause)
        keeper = owner()
        if keeper is None or keeper.closed:
            del keeper
            break
        try:
            pause = keeper._tick()
        except Exception:
            log.exception("the keeper of a kvstored client failed; it goes on")
            pause = KEEPER_S
        del keeper
    timeout_s = min(LAST_SESSION_S + 2 * arguments[3], threading.TIMEOUT_MAX)
    try:
        session = last.get(timeout=timeout_s)
        if session is not None:
            see_off(session, arguments)
    except queue.Empty:
        log.warning("a client took longer than %.0f s to close; its session ends with this process", timeout_s)
    except Exception:
        log.exception("what a client of kvstored held stays out of use until this process ends")


def _in_child() -> None:
    """Clients made before a fork are of no use in the child, where their keeper does not run."""
    for keeper in list(_keepers):
        keeper._forked = True
        keeper._connecting = threading.RLock()


os.register_at_fork(after_in_child=_in_child)
