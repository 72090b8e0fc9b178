"""A session with the daemon of this machine: socket, index, mappings, and what is held through it.

One object captured once by every read, write and view. Nothing in it is closed or
unmapped while anything uses it: a session that has ended is only marked dead, and its
parts go when the last user lets go of them.

Calls are one request and one reply at a time, under a lock. A call that gets no answer
in time leaves the stream in doubt, so the session is dead from then on; the client opens
another, which takes over what this process still uses (`Resume`).

Lifetimes end in finalizers, which may run anywhere, also under the lock: they only append
to `_ended`, and whoever next has the lock tells the daemon.
"""

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, count

from google.protobuf.message import DecodeError

from kvstore_client.index import IndexReader
from kvstore_client.lease import Hold
from kvstore_client.numbers import Numbers
from kvstore_client.reads import Reads
from kvstore_client.stream import Stream, abort_frame, close_all, frame, release_frame, to_be_mapped
from kvstore_client.waiting import acquired, locked, seconds_left
from kvstore_client.writing import Owner, Writing
from kvstored.mapping import Mapping
from kvstored.v1 import DESCRIPTORS_MAX, FRAME_BYTES_MAX, PROTOCOL, errors
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, KVStoreError, Unavailable

RESERVE_TRIES = 3
CLOSED = "the daemon closed the connection"

TOUCH_S = 0.1
"""Touches ride on the next message, but not on every one of a burst."""

WRITTEN = -1
"""In place of a hold's number: slots that will not be written to any more."""

Steps = Iterable[tuple[pb.Request, list[int]]]
_hold_numbers = count()
sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()


class Session:
    """One connection. `dead` is "" while it lives, else why it does not."""

    def __init__(self, path: str, client: str, tenant: str, timeout_s: float, read_only: bool) -> None:
        self.dead = ""
        self.forked = False
        self.lock = threading.RLock()
        self.holds: dict[int, list[int]] = {}
        """Slots leased, by the number of their hold; guarded by the lock."""
        self.writing = Writing()
        self.grants: dict[int, list[int]] = {}
        """Slots granted ahead, by bytes of a block; guarded by the lock."""
        self.used_grants_at = 0.0
        self.mappings: dict[int, Mapping] = {}
        self.unmapping: dict[int, weakref.ref[Mapping] | None] = {}
        self.to_populate: deque[Mapping] = deque()
        self.on_attach: Callable[[], None] | None = None
        """Called when a segment was mapped: its page tables are to be made by somebody who has time."""
        self.reads = Reads(TOUCH_S)
        self.noticed = 0
        self.namespaces: Numbers[pb.OpenNamespaceReply] = Numbers()
        self.index: IndexReader
        self.hello = pb.HelloReply()
        self.timeout_s = timeout_s
        self._ended: deque[tuple[int, Owner, list[int]]] = deque()
        self._forward: Session | None = None
        self._abandoned = False
        self._last_id = 0
        self._said: KVStoreError | None = None
        """What the daemon ended the session with."""
        self._leaving = self._left = False
        self._recalled = False
        self._pid = os.getpid()
        self._identity = (client, tenant, read_only)
        self._stream = Stream(path, timeout_s)
        sessions.add(self)

    # -- opening

    def open(self, before: "Session | None", until: float) -> None:
        """Says Hello and gets the index, in time; takes over what this process still uses of `before`."""
        client, tenant, read_only = self._identity
        hello = pb.HelloRequest(protocol=PROTOCOL, client=client, tenant=tenant, read_only=read_only)
        if before is None:
            self.hello = self.call(pb.Request(hello=hello), seconds_left(until)).hello
        else:
            with locked(before.lock, seconds_left(until)):
                before._drain(resuming=True)
                hello.resume.nonce = before.hello.nonce
                hello.resume.leased.extend(chain.from_iterable(before.holds.values()))
                hello.resume.granted.extend(before.writing)
                self.hello = self.call(pb.Request(hello=hello), seconds_left(until)).hello
                if self.hello.resumed:
                    # What the daemon did not carry over was stored by a commit whose answer never came. Whoever
                    # wrote it must not give it back: by then the slot may be granted again, also to this session.
                    before.writing.keep(self.hello.granted)
                    self.holds, self.writing = before.holds, before.writing.copy()
                    before._forward = self
                else:
                    before._abandoned = True
            before.tell()  # what ended meanwhile
        self.refresh_index(seconds_left(until))

    def refresh_index(self, timeout_s: float | None = None) -> None:
        """Maps the tenant's index as it is now (it has moved, or this session is new)."""
        reply, descriptors = self._call_for_descriptors(pb.Request(index=pb.IndexRequest()), timeout_s)
        with to_be_mapped(descriptors, 1):
            self.index = IndexReader(descriptors[0], reply.index.size_bytes)

    def attach(self, segments: Iterable[int], timeout_s: float | None = None) -> None:
        """Maps these segments, if the tenant has them; page tables follow in the background."""
        wanted = [number for number in segments if number not in self.mappings]
        for at in range(0, len(wanted), DESCRIPTORS_MAX):
            request = pb.SegmentsRequest(ids=wanted[at : at + DESCRIPTORS_MAX])
            reply, descriptors = self._call_for_descriptors(pb.Request(segments=request), timeout_s)
            with to_be_mapped(descriptors, len(reply.segments.segments)):
                for segment, descriptor in zip(reply.segments.segments, descriptors, strict=True):
                    mapping = Mapping(descriptor, segment.size_bytes, writable=not self.hello.read_only)
                    self.mappings.setdefault(segment.id, mapping)
                    self.to_populate.append(mapping)
        if wanted and self.on_attach is not None:
            self.on_attach()

    def mapping(self, segment: int) -> Mapping | None:
        """The segment's mapping, attached at first sight; None where the tenant has no such segment."""
        if segment not in self.mappings:
            self.attach([segment])
        return self.mappings.get(segment)

    # -- calls

    def call(self, request: pb.Request, timeout_s: float | None = None) -> pb.Reply:
        """One request and its reply. Raises the error that the daemon answered, or Unavailable."""
        with locked(self.lock, timeout_s or self.timeout_s):
            return self._exchange(request, timeout_s)[0]

    def _call_for_descriptors(self, request: pb.Request, timeout_s: float | None = None) -> tuple[pb.Reply, list[int]]:
        with locked(self.lock, timeout_s or self.timeout_s):
            return self._exchange(request, timeout_s, descriptors=True)

    def _exchange(
        self, request: pb.Request, timeout_s: float | None, *, descriptors: bool = False
    ) -> tuple[pb.Reply, list[int]]:
        """With the lock held: one request and its reply."""
        number = self._request(request, timeout_s)
        received: list[int] = []
        return self._reply(number, received if descriptors else None), received

    def _request(self, request: pb.Request, timeout_s: float | None) -> int:
        """With the lock held: sends a request, what waits to be told ahead of it; answers its number."""
        if self.dead:
            raise self._death()
        self._last_id += 1
        request.id = self._last_id
        own = frame(request)
        if len(own) > FRAME_BYTES_MAX:
            raise errors.InvalidArgument(f"a request of {len(own)} bytes; at most {FRAME_BYTES_MAX}: split it")
        try:
            self._stream.set_deadline(timeout_s or self.timeout_s)
            self._stream.send((self._waiting_frames() if self.hello.protocol else b"") + own)  # nothing ahead of Hello
        except OSError as e:
            raise self._broken(e) from e
        return self._last_id

    def _reply(self, number: int, descriptors: list[int] | None = None) -> pb.Reply:
        """With the lock held: the reply to a request; replies come in the order of requests."""
        if self.dead:
            raise self._death()
        received: list[int] = [] if descriptors is None else descriptors
        try:
            reply = self._stream.receive(descriptors)
        except BaseException as e:
            close_all(received)
            if isinstance(e, OSError | DecodeError):
                raise self._broken(e) from e
            raise
        if reply.id != number:
            # A reply to nothing says why the daemon ends the connection.
            close_all(received)
            self.die(f"answer {reply.id} to request {number}")
            self._hear(reply.error)
            raise self._death()
        if reply.recall or reply.detach:
            self._recalled |= reply.recall
            self._start_unmapping(reply.detach)
        if reply.HasField("error"):
            close_all(received)
            raise errors.from_wire(reply.error.code, reply.error.message)
        return reply

    def _broken(self, error: Exception) -> KVStoreError:
        """The stream is in doubt: marks the session dead."""
        if isinstance(error, BlockingIOError):
            self.die(f"no answer within {self._stream.deadline_s:.3g} s")
        else:
            self.die(CLOSED if isinstance(error, ConnectionError) else f"the connection broke: {error}")
        return self._death()

    def hung_up(self) -> bool:
        """Whether the daemon's end is gone: the last thing a read checks. Marks the session dead."""
        if not self.dead and self._stream.hung_up():
            self.die(CLOSED)
            if acquired(self.lock, 0):  # else who has it hears why
                try:
                    self._hear(self._stream.last_words())
                finally:
                    self.lock.release()
        return bool(self.dead)

    def die(self, reason: str) -> None:
        """Marks the session dead; others that use it notice by `hung_up` or their next call."""
        if not self.dead:
            self.dead = reason
            if not self.forked:
                self._stream.shut()

    def _hear(self, said: pb.Error | None) -> None:
        """With the lock held, of a dead session: what the daemon ended it with says more than how we noticed."""
        if said is not None and said.message and not self._left:
            self._said = errors.from_wire(said.code, said.message)
            self.dead = said.message

    def _death(self) -> KVStoreError:
        """With the lock held: why there is no answer. Until Hello is answered, what the daemon refuses us with."""
        if self.forked:
            return FailedPrecondition("this client was made before a fork; make a new Client in the child")
        if self._said is None:
            self._hear(self._stream.last_words())
        if self._said is not None and not self.hello.nonce:
            return self._said
        return Unavailable(f"the session with kvstored has ended: {self.dead}")

    # -- slots to write to

    def take_granted(self, block_bytes: int, count: int, owner: Owner) -> None:
        """Adds up to `count` slots that were granted ahead; they count as being written to."""
        with locked(self.lock, self.timeout_s):
            self.used_grants_at = time.monotonic()
            ahead = self.grants.get(block_bytes)
            if ahead and not self.dead:
                taken = ahead[-count:]
                del ahead[-count:]
                self.writing.take(taken, owner)

    def reserve(self, namespace_id: int, count: int, owner: Owner) -> None:
        """Asks for slots and adds them; at least one, or the daemon's ResourceExhausted.

        Where the daemon lacks memory that this process has granted ahead or mapped, that goes
        back first.
        """
        request = pb.Request(reserve=pb.ReserveRequest(namespace_id=namespace_id, count=count))
        for left in reversed(range(RESERVE_TRIES)):
            with locked(self.lock, self.timeout_s):
                try:
                    reply = self._exchange(request, None)[0]
                except errors.ResourceExhausted:
                    if not left or not (self._recalled or self.unmapping):
                        raise
                else:
                    return self.writing.take(reply.reserve.slots, owner)
            self.sync()
        raise AssertionError("the last try answers or raises")

    def commit(self, steps: Steps, block_bytes: int, *, reuse: bool) -> list[pb.CommitReply]:
        """Makes written slots visible, step by step; each step writes its slots as it is asked for.

        The daemon works on one step while the next is being written; all answers are read
        at the end. Slots not needed are granted ahead from then on, if `reuse`. Raises the
        first error; slots of steps that were not answered are still their owner's then.
        """
        if self._forward is not None:  # which has what this session held
            return self._forward.commit(steps, block_bytes, reuse=reuse)
        sent: list[tuple[int, list[int]]] = []
        replies: list[pb.CommitReply] = []
        error: KVStoreError | None = None
        with locked(self.lock, self.timeout_s):
            try:
                for request, slots in steps:
                    sent.append((self._request(request, None), slots))
            finally:
                for number, slots in sent:
                    try:
                        replies.append(self._reply(number).commit)
                        self._committed(replies[-1], slots, block_bytes, reuse=reuse)
                    except KVStoreError as e:
                        error = error or e
            self.used_grants_at = time.monotonic()
            if self._recalled or self._leaving:
                self._give_back()
            self._leave_if_free()
        if error is not None:
            raise error
        return replies

    def _committed(self, reply: pb.CommitReply, slots: list[int], block_bytes: int, *, reuse: bool) -> None:
        unused = [slot for slot, result in zip(slots, reply.results, strict=True) if result != pb.STORED]
        self.writing.drop(slots if reuse else set(slots).difference(unused))
        self.writing.drop(reply.slots)
        self.grants.setdefault(block_bytes, []).extend([*unused, *reply.slots] if reuse else reply.slots)

    def give_up(self, owner: Owner) -> None:
        """It will not write to its slots any more: Abort, now or when there is a session to say it on."""
        if owner:
            self._ended.append((WRITTEN, owner, list(owner)))
            self.tell()

    def return_idle_grants(self, idle_s: float) -> None:
        """Gives back what was granted ahead and not used for `idle_s`."""
        with locked(self.lock, self.timeout_s):
            if self._recalled or time.monotonic() - self.used_grants_at >= idle_s:
                self._give_back()

    def _give_back(self) -> None:
        slots = [slot for ahead in self.grants.values() for slot in ahead]
        self.grants.clear()
        self._recalled = False
        if slots and not self.dead:
            self._send(abort_frame(slots))

    # -- slots under views

    def acquire(self, request: pb.Request, timeout_s: float | None) -> tuple[pb.Reply, Hold]:
        """Acquire or Load: the answer, and the hold that keeps the slots which it leases."""
        hold = Hold()
        with locked(self.lock, timeout_s or self.timeout_s):
            reply = self._exchange(request, timeout_s)[0]
            slots = list(reply.acquire.slots or reply.load.slots)
            if slots:
                self.holds[number := next(_hold_numbers)] = slots
                weakref.finalize(hold, self._release_later, number).atexit = False
        return reply, hold

    def _release_later(self, number: int) -> None:
        self._ended.append((number, [], []))
        self.tell()

    def write_hold(self, owner: Owner) -> Hold:
        """A hold for slots being written to, which are this one's from now on: given up when it ends."""
        hold = Hold()
        with locked(self.lock, self.timeout_s):
            self.writing.pass_on(owner)
        weakref.finalize(hold, self.give_up, owner).atexit = False
        return hold

    # -- telling the daemon what needs no answer

    def tell(self, *, touches: bool = False) -> None:
        """Sends what waits. Without `touches` only if nobody is in a call, who then sends it ahead of the next."""
        if os.getpid() != self._pid:
            return
        while acquired(self.lock, self.timeout_s if touches else 0):
            try:
                self._drain()
                if self._forward is None and not self.dead:
                    frames = self._waiting_frames(touches=touches)
                    if frames:
                        self._send(frames)
                    self._leave_if_free()
            finally:
                self.lock.release()
            if not self._ended or (self.dead and self._forward is None):
                return  # else: something ended while we had the lock, and its finalizer could not tell

    def _drain(self, *, resuming: bool = False) -> None:
        """With the lock held: ended holds go where they can be told from, or are settled here if nobody must know."""
        if self._forward is not None:
            while self._ended:
                number, owner, slots = self._ended.popleft()
                if number == WRITTEN:
                    slots = self._settle(number, owner, slots)
                    # One by one: a commit whose answer never came may have taken some, and an abort is all or nothing.
                    self._forward._ended.extend([(number, owner, [slot]) for slot in slots])
                else:
                    self._forward._ended.append((number, owner, slots))
            self._forward.tell()
        elif self._abandoned:
            self._ended.clear()
        elif resuming:
            while self._ended:
                self._settle(*self._ended.popleft())

    def _settle(self, number: int, owner: Owner, slots: list[int]) -> list[int]:
        """Forgets a hold, or slots that its owner wrote to; answers those that go back."""
        if number != WRITTEN:
            return self.holds.pop(number)
        slots = self.writing.of(owner, slots)
        self.writing.drop(slots)
        return slots

    def _waiting_frames(self, *, touches: bool = False) -> bytes:
        """With the lock held: releases, aborts and, if due, touches as frames that want no reply."""
        frames = b""
        while self._ended:
            number, owner, slots = self._ended.popleft()
            slots = self._settle(number, owner, slots)
            if slots:
                frames += abort_frame(slots) if number == WRITTEN else release_frame(slots)
        for touch in self.reads.due(self.namespaces, now=touches):
            frames += frame(pb.Request(touch=touch))
        return frames

    def _send(self, frames: bytes) -> None:
        try:
            self._stream.send(frames)
        except OSError as e:
            self._broken(e)

    # -- segments that the daemon wants back

    def _start_unmapping(self, segments: Iterable[int]) -> None:
        for number in segments:
            mapping = self.mappings.pop(number, None)
            if mapping is not None:
                with contextlib.suppress(ValueError):
                    self.to_populate.remove(mapping)
                self.unmapping[number] = weakref.ref(mapping)
            else:
                self.unmapping.setdefault(number, None)

    def sync(self) -> None:
        """Tells which segments are unmapped by now; the answer may ask for more. Raises like any call."""
        gone = [number for number, mapping in list(self.unmapping.items()) if mapping is None or mapping() is None]
        self.call(pb.Request(sync=pb.SyncRequest(detached=gone)))
        for number in gone:
            self.unmapping.pop(number, None)
        self.return_idle_grants(idle_s=1.0)

    # -- leaving

    def leave(self, *, wait: bool = True) -> None:
        """Ends the session for good; slots under living views keep the socket open until they are gone.

        Somebody in the middle of a call has the lock, and may be this thread, in a finalizer
        (`wait=False`) or a signal handler: then whoever sees the session off leaves for it.
        """
        self._leaving = True
        if not acquired(self.lock, self.timeout_s if wait else 0):
            return
        try:
            if self.dead:
                return
            self._give_back()
            self._drain()
            self._send(self._waiting_frames(touches=True))
            self._leave_if_free()
        finally:
            self.lock.release()
        self.tell()

    def _leave_if_free(self) -> None:
        """With the lock held: says that nothing is held or mapped any more, which lets the daemon forget us at once."""
        if not self._leaving or self.dead or self.holds or self.writing:
            return
        self.mappings.clear()
        self.to_populate.clear()
        self._send(frame(pb.Request(sync=pb.SyncRequest(leaving=True))))
        self._left = not self.dead
        self.die("closed")

    @property
    def settled(self) -> bool:
        """Whether the daemon has heard that this session is over, or has nothing of it (any more)."""
        return self._left or self._abandoned or self._forward is not None or not self.hello.nonce

    def __del__(self) -> None:
        stream = getattr(self, "_stream", None)
        if stream is not None:
            stream.close()


def _in_child() -> None:
    """A forked child has no part in its parent's sessions: marks them dead and closes its copies of their sockets.

    Mappings were never copied (MADV_DONTFORK) and are not unmapped here: the range may be
    the child's own by now.
    """
    for session in list(sessions):
        session.forked = True
        session.dead = "made before a fork"
        session.lock = threading.RLock()
        session._stream.close()


os.register_at_fork(after_in_child=_in_child)
