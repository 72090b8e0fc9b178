"""The session socket: handshake, descriptors, calls, and the death of clients.

A session is a connection and the process behind it. When either ends the session ends:
what it held goes back to the store if the process is gone, and is quarantined until then
if it is not (a process that closed its socket can still write to what it has mapped).
A process that attaches again names its old session and what it still uses of it.
"""

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from kvstore.core.holds import Session
from kvstore.instance import start_ticks
from kvstore.logs import logger
from kvstore.server import calls, devices, loads, removing, session_admin
from kvstore.server.figures import CALLS_OF_OPS
from kvstore.server.frames import Connection, FrameError, watch
from kvstore.server.left import LeftSession
from kvstore.server.peer import Peer, peer_of
from kvstored.v1 import DESCRIPTORS_MAX, PROTOCOL, PROTOCOL_OLDEST
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, KVStoreError, ResourceExhausted

if TYPE_CHECKING:
    from kvstore.server.listener import SessionServer

log = logger("kvstored.session")

HELLO_WAIT_S = 5.0
"""A connection that has not said Hello by then is closed."""

FAILURES_SAID_S = 10.0
"""A client whose calls without a reply fail in a loop has one line in the log in this time."""

UNANSWERED_MAX = 16
"""Calls of one session that may be waiting for memory at once."""


@dataclass
class WithDescriptors:
    """A reply and the descriptors that ride on it (which stay their owner's)."""

    reply: Any
    descriptors: list[int]


class ClientSession:
    """One connection from accept to the death of its process."""

    def __init__(self, server: "SessionServer", sock: socket.socket) -> None:
        self.server = server
        self.peer: Peer = peer_of(sock)
        self.session: Session | None = None
        self.names: set[int] = set()
        """Nonces by which a process may ask for this session again."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.connection = Connection(sock, server.loop, server.partial, self._frame, self._closed)
        self.leaving = False
        self._failures = 0
        """Calls without a reply that failed and are not in the log yet."""
        self._say_failures_at = 0.0
        self._hello_timer = server.loop.call_later(HELLO_WAIT_S, self._no_hello)

    def start(self) -> None:
        """Listens to the client, and for the end of its process."""
        if self.peer.pidfd >= 0:
            watch(self.server.loop, self.peer.pidfd, self._exited)
        self.connection.start()

    # -- frames

    def _frame(self, connection: Connection, payload: bytes) -> None:
        began = time.perf_counter()
        try:
            request = pb.Request.FromString(payload)
        except DecodeError as e:
            raise FrameError(f"{len(payload)} bytes that are not a Request") from e
        kind, failed = request.WhichOneof("op"), True
        try:
            answer = self._call(kind, request)
            if type(answer) is CoroutineType:
                self._later(request.id, kind or "", answer, began)
                return
            if request.id:
                self._send(request.id, kind or "", answer)
            failed = False
        except KVStoreError as e:
            self._reply(request.id, error=e)
        except OSError as e:
            log.error("no descriptor is left", **self._who(), call=kind, reason=e.strerror)  # noqa: TRY400
            self._reply(request.id, error=ResourceExhausted(f"the daemon has no descriptor left: {e.strerror}"))
        except Exception as e:
            self.server.node.internal_errors += 1
            log.exception("a call failed", **self._who(), call=kind)
            self._reply(
                request.id, error=KVStoreError(f"internal error of the daemon: {type(e).__name__}; see its log")
            )
        self._answered(kind, began, failed=failed)

    def _answered(self, kind: str | None, began: float, *, failed: bool) -> None:
        self.server.node.figures.answer("session", CALLS_OF_OPS.get(kind, "unknown"), began, failed=failed)

    def _call(self, kind: str | None, request: pb.Request) -> Any:
        if kind is None:
            raise InvalidArgument("a Request with no operation that this daemon knows")
        if self.session is None:
            if kind != "hello":
                raise FailedPrecondition("the first request of a session is Hello")
            return self._hello(request.hello)
        call = CALLS.get(kind)
        if call is None:
            raise FailedPrecondition(f"{kind} is not a call of an open session")
        answer = call(self, self.session, getattr(request, kind))
        node = self.server.node
        if node.store.segments.jobs:
            node.jobs_ready()
        return answer

    def _send(self, number: int, kind: str, answer: Any) -> None:
        descriptors: list[int] = []
        if isinstance(answer, WithDescriptors):
            answer, descriptors = answer.reply, answer.descriptors
        if type(answer) is pb.Reply:
            reply = answer
            reply.id = number
        else:
            reply = pb.Reply(id=number, **{kind: answer})
        self._send_reply(reply, descriptors)

    def _reply(self, number: int, *, error: KVStoreError) -> None:
        if number:
            reply = pb.Reply(id=number, error=pb.Error(code=error.code, message=str(error)))  # type: ignore[arg-type]
            self._send_reply(reply)
            return
        self._failures += 1
        now = time.monotonic()
        if now >= self._say_failures_at:
            log.warning("calls without a reply failed", **self._who(), calls=self._failures, reason=str(error))
            self._failures, self._say_failures_at = 0, now + FAILURES_SAID_S

    def _send_reply(self, reply: pb.Reply, descriptors: list[int] | None = None) -> None:
        """With what is wanted of this client, also on an error: what it gives back may be just what was lacking."""
        session = self.session
        if session is not None and (session.recall or session.detach):
            reply.recall = session.recall
            reply.detach.extend(session.detach)
        if session is not None:
            reply.detach_devices.extend(self.server.node.device_clients.detaching(session))
        self.connection.send(reply.SerializeToString(), descriptors)

    def _later(self, number: int, kind: str, work: Coroutine[Any, Any, Any], began: float) -> None:
        if len(self.tasks) >= UNANSWERED_MAX:
            work.close()
            self._answered(kind, began, failed=True)
            self._reply(number, error=ResourceExhausted(f"{UNANSWERED_MAX} calls of this session are waiting already"))
            return
        task = self.server.loop.create_task(self._finish(number, kind, work, began))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _finish(self, number: int, kind: str, work: Coroutine[Any, Any, Any], began: float) -> None:
        failed = True
        try:
            answer = await work
        except KVStoreError as e:
            self._reply(number, error=e)
        except Exception as e:
            self.server.node.internal_errors += 1
            log.exception("a call failed", **self._who(), call=kind)
            self._reply(number, error=KVStoreError(f"internal error of the daemon: {type(e).__name__}; see its log"))
        else:
            self._send(number, kind, answer)
            failed = False
        self._answered(kind, began, failed=failed)

    # -- the life of a session

    def _hello(self, hello: pb.HelloRequest) -> pb.HelloReply:
        node, server = self.server.node, self.server
        if not PROTOCOL_OLDEST <= hello.protocol <= PROTOCOL:
            raise FailedPrecondition(
                f"the client speaks protocol {hello.protocol}, this daemon (kvstored {node.version}) speaks "
                f"{PROTOCOL_OLDEST} to {PROTOCOL}: install the same release of kvstored on both sides"
            )
        if len(hello.client.encode()) > calls.NAME_BYTES_MAX:
            raise InvalidArgument(f"a client's name is at most {calls.NAME_BYTES_MAX} bytes")
        tenant = calls.tenant_named(node.store, hello.tenant)
        old = server.by_nonce.get(hello.resume.nonce) if hello.HasField("resume") else None
        if old is not None and self.connection.hung_up():
            # It waited in the socket until nobody waited for the answer; the next attempt must find the old session.
            raise FailedPrecondition("who asks for the old session is gone")
        server.make_place()
        born, why = node.witness(self.peer.pid, self.peer.uid) if self.peer.pidfd >= 0 else (0, self.peer.why)
        if node.gpu is not None and not born:
            born = start_ticks(self.peer.pid) or 0  # what an event says counts only while this process lives
        read_only = hello.read_only or bool(why)
        session = node.store.open_session(
            tenant,
            calls.printable(hello.client) or "unnamed",
            time.monotonic(),
            local=True,
            read_only=read_only,
            pid=self.peer.pid,
            nonce=secrets.randbits(64),
            born=born,
        )
        try:
            resumed = old is not None and old.session is not None and self._resume(old, session, hello.resume)
        except KVStoreError:
            node.device_clients.forget(session)
            raise
        self.session = session
        # By its old name too: if this reply is lost, the client knows no other.
        self.names = {session.nonce, hello.resume.nonce} if resumed else {session.nonce}
        server.by_nonce.update(dict.fromkeys(self.names, self))
        node.closers[session.id] = self.end
        self._hello_timer.cancel()
        self._say("session opened", again=resumed)
        return pb.HelloReply(
            protocol=hello.protocol,
            nonce=session.nonce,
            epoch=node.epoch,
            version=node.version,
            pid=server.pid,
            read_only=read_only,
            read_only_reason=why,
            tenant_bytes=node.store.segments.tenant_bytes(tenant.id),
            oldest_protocol=PROTOCOL_OLDEST,
            resumed=resumed,
            granted=session.granted,
            token=node.bindings.bind(session),
            devices=node.device_clients.kept(session, hello.resume.devices) if resumed else (),
        )

    def _resume(self, old: "ClientSession | LeftSession", heir: Session, resume: pb.Resume) -> bool:
        """Only the same process may take over what a session held."""
        was = old.session
        assert was is not None
        if was.tenant is not heir.tenant or heir.read_only or not old.peer.same(self.peer):
            return False
        self.server.node.device_clients.resume(was, heir, resume)
        log.info("session taken over by a new connection", session=was.id, pid=self.peer.pid)
        self._unlist(was)
        old.session = None
        old.connection.close()
        old.forget()
        return True

    def _no_hello(self) -> None:
        self.connection.refuse(f"no Hello within {HELLO_WAIT_S:.0f} s", pb.DEADLINE_EXCEEDED)

    def _closed(self, _: Connection, reason: str) -> None:
        """The socket is gone."""
        self._hello_timer.cancel()
        if reason:
            # A client that was killed or stopped, also in the middle of a message, has broken no rule.
            self.server.node.protocol_errors += self.connection.violated
            if self.connection.violated:
                log.warning("connection closed", **self._who(), reason=reason)
            else:
                self._say("connection closed", reason=reason)
        for task in self.tasks:
            task.cancel()
        if self.session is None:
            self.forget()
            return
        self._unlist(self.session)
        clients = self.server.node.device_clients
        held_bytes = self.session.held_bytes + clients.held_bytes(self.session)
        clean = not held_bytes and (self.leaving or not self._has_mappings())
        gone = clean or self.peer.gone()
        self._say("session ended", quarantined=0 if gone else held_bytes)
        if clean:
            clients.forget(self.session)
        else:
            clients.end_session(self.session, process_gone=gone)
        if gone:
            self.forget()

    def _unlist(self, session: Session) -> None:
        """Nobody may find this session any more, to close it or to make calls as it; what it waited for goes."""
        self.server.node.closers.pop(session.id, None)
        self.server.node.bindings.end(session)
        self.server.node.tickets.end(session)

    def _has_mappings(self) -> bool:
        """Whether this session was given memory that its process may still have mapped, or has used a device."""
        assert self.session is not None
        number, segments = self.session.id, self.server.node.store.segments
        return self.server.node.device_clients.knows(self.session) or any(
            number in segment.sessions for table in (segments.live, segments.draining) for segment in table.values()
        )

    def _exited(self) -> None:
        """The process is gone: nothing it held can be written to any more."""
        if not self.connection.closed:
            self.connection.close()
        if self.session is not None:
            self._say("process gone")
            self.server.node.device_clients.end_session(self.session, process_gone=True)
        self.forget()

    def forget(self) -> None:
        """Nothing of this client is left."""
        self.session = None
        self.server.forget(self)

    def _say(self, event: str, **fields: Any) -> None:
        """A line about the life of this session; of one that only administers, for who looks for it."""
        say = log.debug if session_admin.is_quiet(self) else log.info
        say(event, **self._who(), **fields)

    def _who(self) -> dict[str, Any]:
        """Fields of the log that say whose line it is; before Hello, the process alone."""
        if self.session is None:
            return {"pid": self.peer.pid}
        return {"session": self.session.id, "client": self.session.client, "pid": self.peer.pid}

    # -- calls that only a session has

    def index(self, session: Session, _: pb.IndexRequest) -> WithDescriptors:
        descriptor, size_bytes, generation = self.server.node.indexes.descriptor(session.tenant.id)
        return WithDescriptors(pb.IndexReply(size_bytes=size_bytes, generation=generation), [descriptor])

    def segments(self, session: Session, request: pb.SegmentsRequest) -> WithDescriptors:
        """Descriptors of the tenant's own segments; those that are gone meanwhile are left out."""
        node = self.server.node
        if len(request.ids) > DESCRIPTORS_MAX:
            raise InvalidArgument(f"{len(request.ids)} segments in one message; at most {DESCRIPTORS_MAX}")
        reply, descriptors = pb.SegmentsReply(), []
        for number in dict.fromkeys(request.ids):
            segment = node.store.segments.live.get(number)
            if segment is None or segment.tenant != session.tenant.id:
                continue
            descriptors.append(node.slab.descriptor(number, session.read_only))
            segment.sessions.add(session.id)
            reply.segments.add(id=number, size_bytes=segment.size_bytes, huge_pages=node.store.segments.huge_pages)
        return WithDescriptors(reply, descriptors)

    def open_namespace(self, session: Session, request: pb.OpenNamespaceRequest) -> pb.OpenNamespaceReply:
        return calls.open_namespace(self.server.node, session.tenant, request)

    async def reserve(self, session: Session, request: pb.ReserveRequest) -> pb.ReserveReply:
        node = self.server.node
        namespace = node.store.namespace(session.tenant, request.namespace_id)
        slots = await calls.reserve(node, session, namespace, request.count, float("inf"))
        return pb.ReserveReply(slots=slots)

    def commit(self, session: Session, request: pb.CommitRequest) -> pb.Reply:
        reply = pb.Reply()
        reply.commit.SetInParent()
        calls.commit_into(reply.commit, self.server.node, session, request)
        return reply

    def abort(self, session: Session, request: pb.AbortRequest) -> pb.AbortReply:
        return calls.abort(self.server.node, session, request)

    def match(self, session: Session, request: pb.MatchRequest) -> pb.MatchReply:
        return calls.match(self.server.node, session.tenant, request)

    def acquire(self, session: Session, request: pb.AcquireRequest) -> pb.Reply:
        node = self.server.node
        namespace = node.store.namespace(session.tenant, request.namespace_id)
        keys = calls.checked_keys(request.keys)
        reply = pb.Reply()
        reply.acquire.SetInParent()
        reply.acquire.slots.extend(loads.acquire(node, session, namespace, keys))
        return reply

    def load(self, session: Session, request: pb.LoadRequest) -> pb.LoadReply | Coroutine[Any, Any, pb.LoadReply]:
        return loads.load(self.server.node, session, request, counted=False)

    def prefetch(self, session: Session, request: pb.PrefetchRequest) -> pb.PrefetchReply:
        return loads.prefetch(self.server.node, session.tenant, session, request)

    def ticket(
        self, session: Session, request: pb.TicketRequest
    ) -> pb.TicketReply | Coroutine[Any, Any, pb.TicketReply]:
        return loads.ticket(self.server.node, session.tenant, session, request)

    def release(self, session: Session, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        return calls.release(self.server.node, session, request)

    def touch(self, session: Session, request: pb.TouchRequest) -> pb.TouchReply:
        return calls.touch(self.server.node, session.tenant, request)

    def remove(
        self, session: Session, request: pb.RemoveRequest
    ) -> pb.RemoveReply | Coroutine[Any, Any, pb.RemoveReply]:
        _check_changes(session)
        node, may_wait = self.server.node, len(self.tasks) < UNANSWERED_MAX
        tickets = node.tickets.of_session(session) if node.moving is not None and request.ticket else None
        return removing.remove(node, session.tenant, request, tickets, may_wait=may_wait)

    def pin(self, session: Session, request: pb.PinRequest) -> pb.PinReply:
        _check_changes(session)
        return calls.pin(self.server.node, session.tenant, request)

    def unpin(self, session: Session, request: pb.UnpinRequest) -> pb.UnpinReply:
        _check_changes(session)
        return calls.unpin(self.server.node, session.tenant, request)

    async def clear(self, session: Session, request: pb.ClearRequest) -> pb.ClearReply:
        _check_changes(session)
        return await removing.clear(self.server.node, session.tenant, request)

    def sync(self, session: Session, request: pb.SyncRequest) -> pb.SyncReply:
        """The client unmapped segments, or is leaving with nothing held and nothing mapped."""
        detached = list(request.detached)
        session.detach.difference_update(detached)
        self.server.node.store.segments.forget_session(session.id, detached)
        self.leaving = request.leaving
        self.server.node.jobs_ready()
        return pb.SyncReply()

    def devices(self, session: Session, _: pb.DevicesRequest) -> pb.DevicesReply:
        return devices.devices(self.server.node, session)

    def device(self, session: Session, request: pb.DeviceRequest) -> Any:
        answer, descriptors = devices.device(self.server.node, session, request)
        return WithDescriptors(answer, descriptors) if descriptors else answer

    def stats(self, _: Session, __: pb.StatsRequest) -> pb.StatsReply:
        return self.server.stats()

    def health(self, _: Session, __: pb.HealthRequest) -> pb.HealthReply:
        return calls.health(self.server.node)

    def end(self) -> None:
        """An administrator ends this session; the client is told why, and may connect again."""
        self._send_reply(pb.Reply(error=pb.Error(code=pb.UNAVAILABLE, message="an administrator ended this session")))
        self.connection.close()


def _check_changes(session: Session) -> None:
    if session.read_only:
        raise FailedPrecondition("this session is read-only: it may not remove, pin or clear")


CALLS: dict[str, Callable[[ClientSession, Session, Any], Any]] = {
    "index": ClientSession.index,
    "segments": ClientSession.segments,
    "open_namespace": ClientSession.open_namespace,
    "reserve": ClientSession.reserve,
    "commit": ClientSession.commit,
    "abort": ClientSession.abort,
    "match": ClientSession.match,
    "acquire": ClientSession.acquire,
    "load": ClientSession.load,
    "prefetch": ClientSession.prefetch,
    "ticket": ClientSession.ticket,
    "release": ClientSession.release,
    "touch": ClientSession.touch,
    "remove": ClientSession.remove,
    "pin": ClientSession.pin,
    "unpin": ClientSession.unpin,
    "clear": ClientSession.clear,
    "sync": ClientSession.sync,
    "devices": ClientSession.devices,
    "device": ClientSession.device,
    "stats": ClientSession.stats,
    "health": ClientSession.health,
    **session_admin.CALLS,
}
