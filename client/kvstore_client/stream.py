"""The socket under a session: frames out, replies and descriptors in, each with a deadline.

Who waits, polls with the time that is left. The kernel's own time-outs (SO_RCVTIMEO) would
save that microsecond, but begin anew with every signal that the process gets, and one with
a profiler's timer would wait for ever. What goes wrong here is an OSError; BlockingIOError
is "too late".
"""

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import time
from array import array
from collections.abc import Iterator

from google.protobuf.message import DecodeError

from kvstore_client import advice
from kvstored.v1 import DESCRIPTORS_MAX, FRAME_BYTES_MAX
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import Unavailable

log = logging.getLogger("kvstore_client")

POLLRDHUP = 0x2000
"""Linux; not in Python's select."""

CONNECT_AGAIN_S = 0.005
"""Pause before another try, where more clients wait to be accepted than the kernel queues."""

_POLL_MS_MAX = (1 << 31) - 1

RECEIVE_BYTES = 64 << 10
_INT_BYTES = array("i").itemsize
CONTROL_BYTES = socket.CMSG_LEN(DESCRIPTORS_MAX * _INT_BYTES)
REPLY_BYTES_MAX = 16 * FRAME_BYTES_MAX
LATE_MAX = 64
"""Times that what is there already is still taken when the time is over: an answer, but no endless one."""
LAST_READS_MAX = 64
"""Of a connection that has ended: more than the kernel keeps of one."""

NO_ROOM_AGAIN_S = 60.0
"""Between two warnings that this process has no room for the daemon's memory: every read may meet it."""

_LENGTH = struct.Struct("<I")


def frame(request: pb.Request) -> bytes:
    """A request as it goes over the socket."""
    payload = request.SerializeToString()
    return _LENGTH.pack(len(payload)) + payload


def release_frame(slots: list[int]) -> bytes:
    """Leases that have ended, as a request that wants no reply."""
    return frame(pb.Request(release=pb.ReleaseRequest(slots=slots)))


def abort_frame(slots: list[int]) -> bytes:
    """Slots that will not be committed, as a request that wants no reply."""
    return frame(pb.Request(abort=pb.AbortRequest(slots=slots)))


def close_all(descriptors: list[int]) -> None:
    """Closes received descriptors that nobody wants."""
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()


@contextlib.contextmanager
def to_be_mapped(descriptors: list[int], count: int) -> Iterator[None]:
    """Closes received descriptors when they are mapped, or were not.

    Raises Unavailable where this process has no room for a mapping, or for a descriptor: the
    kernel drops those that find no place in its table. To a read that is a miss, so it is logged here.
    """
    try:
        _require(descriptors, count)
        yield
    except OSError as e:
        why = f"this process cannot map the memory of kvstored: {e.strerror}"
        _no_room.say(why)
        raise Unavailable(why) from e
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _require(descriptors: list[int], count: int) -> None:
    if len(descriptors) != count:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class NoRoom:
    """Says that this process has none, but not of every read."""

    def __init__(self) -> None:
        self._again_at = 0.0

    def say(self, why: str) -> None:
        now = time.monotonic()
        if now >= self._again_at:
            self._again_at = now + NO_ROOM_AGAIN_S
            log.warning("%s; what is there counts as missing until it can", why)


_no_room = NoRoom()


def _ready(poll: select.poll, rest_s: float) -> bool:
    """Waits for what `poll` is for, in time.

    A signal handler in the middle of it may use up the time, whereupon poll answers without
    another look: so "no" means that the time is over, and whoever hears it looks once more.
    """
    return rest_s > 0 and bool(poll.poll(min(rest_s * 1000, _POLL_MS_MAX)))


class Stream:
    """A connection to the daemon's session socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """Connects. Raises Unavailable that says what to do next."""
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as e:
            raise Unavailable(f"this process cannot open a socket: {e.strerror}") from e
        self._buffer = bytearray()
        self._in_doubt = False
        """A send or a receive has begun and did not come to its end."""
        self.deadline_s = timeout_s
        try:
            self._socket.setblocking(False)
            self._connect(path, time.monotonic() + timeout_s)
        except OSError as e:
            self._socket.close()
            raise Unavailable(advice.no_answer(f"unix://{path}", path, e)) from e
        self._descriptor = self._socket.fileno()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._descriptor, select.POLLIN)
        self._writable.register(self._descriptor, select.POLLOUT)

    def _connect(self, path: str, until: float) -> None:
        while True:
            try:
                self._socket.connect(path)
            except BlockingIOError:
                # Its queue is full, of which no poll tells the end.
                if time.monotonic() >= until:
                    raise
                time.sleep(CONNECT_AGAIN_S)
            else:
                return

    def set_deadline(self, seconds: float) -> None:
        """How long a send or a receive may take from now on."""
        self.deadline_s = seconds

    def send(self, frames: bytes) -> None:
        """Sends all of it."""
        self._begin()
        sent = self._send_some(frames)
        if sent == len(frames):
            self._in_doubt = False
            return
        until = time.monotonic() + self.deadline_s
        rest = memoryview(frames)[sent:]
        late = 0
        while rest:
            if not _ready(self._writable, until - time.monotonic()):
                late += 1
                if late > LATE_MAX or not self._writable.poll(0):
                    raise BlockingIOError(errno.EAGAIN, "the daemon takes nothing")
            rest = rest[self._send_some(rest) :]
        self._in_doubt = False

    def _begin(self) -> None:
        """What an exception of a signal handler's left half sent or half read would be taken for another message."""
        if self._in_doubt:
            raise OSError(errno.ECANCELED, "an earlier call was interrupted")
        self._in_doubt = True

    def _send_some(self, frames: bytes | memoryview) -> int:
        try:
            return self._socket.send(frames)
        except BlockingIOError:
            return 0

    def receive(self, descriptors: list[int] | None) -> pb.Reply:
        """The next reply; descriptors that come with it are appended to the list, if there is one."""
        self._begin()
        buffer = self._buffer
        until, rest_s, late = 0.0, self.deadline_s, 0
        while True:
            reply = self._whole_reply()
            if reply is not None:
                self._in_doubt = False
                return reply
            if buffer:
                # It comes in pieces: each of them in time, and so must they all be.
                now = time.monotonic()
                until = until or now + self.deadline_s
                rest_s = until - now
            if not _ready(self._readable, rest_s):
                late += 1
                if late > LATE_MAX or not self._readable.poll(0):
                    raise BlockingIOError(errno.EAGAIN, "an answer in pieces" if buffer else "no answer")
            if descriptors is None:
                data = self._socket.recv(RECEIVE_BYTES)
            else:
                # Not socket.recv_fds, which drops its flags: programs started meanwhile would have the memory too.
                data, control, _, _ = self._socket.recvmsg(RECEIVE_BYTES, CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
                for _, kind, body in control:
                    if kind == socket.SCM_RIGHTS:
                        descriptors.extend(array("i", body[: len(body) // _INT_BYTES * _INT_BYTES]))
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            buffer += data

    def _whole_reply(self) -> pb.Reply | None:
        """The next reply, if all of it is here."""
        buffer = self._buffer
        if len(buffer) < 4:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        if length > REPLY_BYTES_MAX:
            raise OSError(f"an answer of {length} bytes")
        if len(buffer) < 4 + length:
            return None
        payload = bytes(buffer[4 : 4 + length])
        del buffer[: 4 + length]
        return pb.Reply.FromString(payload)

    def last_words(self) -> pb.Error | None:
        """Of a connection of no more use: the error that the daemon ended it with, if that is here. Waits for nothing.

        Who sends to a closed socket hears of a broken pipe, while the reason lies unread on
        this side of it. Other replies are dropped, and with them their descriptors.
        """
        for _ in range(LAST_READS_MAX):
            try:
                while (reply := self._whole_reply()) is not None:
                    if not reply.id and reply.HasField("error"):
                        return reply.error
                data = self._socket.recv(RECEIVE_BYTES)
            except (OSError, DecodeError):
                return None  # nothing more came, or nothing that can be read
            if not data:
                return None
            self._buffer += data
        return None

    def hung_up(self) -> bool:
        """Whether the other end is gone."""
        poll = select.poll()
        poll.register(self._descriptor, POLLRDHUP)
        return bool(poll.poll(0))

    def shut(self) -> None:
        """Ends the connection for everybody who uses it; the descriptor stays until `close`."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was first

    def close(self) -> None:
        """Closes this process's descriptor, and nothing else (a forked child's way out)."""
        self._socket.close()
