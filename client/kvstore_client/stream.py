"""The socket under a session: frames out, replies and descriptors in, each with a deadline.

Who waits, polls with the time that is left. The kernel's own time-outs (SO_RCVTIMEO) would
save that microsecond, but begin anew with every signal that the process gets, and one with
a profiler's timer would wait for ever. What goes wrong here is an OSError; BlockingIOError
is "too late".
"""

import contextlib
import errno
import os
import select
import socket
import struct
import time
from array import array
from collections.abc import Iterator

from kvstored.v1 import DESCRIPTORS_MAX, FRAME_BYTES_MAX
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import Unavailable

POLLRDHUP = 0x2000
"""Linux; not in Python's select."""

CONNECT_AGAIN_S = 0.005
"""Pause before another try, where more clients wait to be accepted than the kernel queues."""

_POLL_MS_MAX = (1 << 31) - 1

RECEIVE_BYTES = 64 << 10
_INT_BYTES = array("i").itemsize
CONTROL_BYTES = socket.CMSG_LEN(DESCRIPTORS_MAX * _INT_BYTES)
REPLY_BYTES_MAX = 16 * FRAME_BYTES_MAX

_LENGTH = struct.Struct("<I")


def frame(request: pb.Request) -> bytes:
    """A request as it goes over the socket."""
    payload = request.SerializeToString()
    return _LENGTH.pack(len(payload)) + payload


def close_all(descriptors: list[int]) -> None:
    """Closes received descriptors that nobody wants."""
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()


@contextlib.contextmanager
def to_be_mapped(descriptors: list[int], count: int) -> Iterator[None]:
    """Closes received descriptors when they are mapped, or were not.

    Raises Unavailable where this process has no room for a mapping, or for a descriptor: the
    kernel drops those that find no place in its table.
    """
    try:
        _require(descriptors, count)
        yield
    except OSError as e:
        raise Unavailable(f"this process cannot map the memory of kvstored: {e.strerror}") from e
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _require(descriptors: list[int], count: int) -> None:
    if len(descriptors) != count:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Stream:
    """A connection to the daemon's session socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        """Connects. Raises Unavailable that says what to do next."""
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as e:
            raise Unavailable(f"this process cannot open a socket: {e.strerror}") from e
        self._buffer = bytearray()
        self.deadline_s = timeout_s
        try:
            self._socket.setblocking(False)
            self._connect(path, time.monotonic() + timeout_s)
        except OSError as e:
            self._socket.close()
            raise Unavailable(
                f"no kvstored answers on unix://{path} ({e.strerror}); is it running? "
                "Start `kvstored`, or name its socket with KVSTORED_ENDPOINT"
            ) from e
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
        sent = self._send_some(frames)
        if sent == len(frames):
            return
        until = time.monotonic() + self.deadline_s
        rest = memoryview(frames)[sent:]
        while rest:
            rest_s = until - time.monotonic()
            if rest_s <= 0 or not self._writable.poll(min(rest_s * 1000, _POLL_MS_MAX)):
                raise BlockingIOError(errno.EAGAIN, "the daemon takes nothing")
            rest = rest[self._send_some(rest) :]

    def _send_some(self, frames: bytes | memoryview) -> int:
        try:
            return self._socket.send(frames)
        except BlockingIOError:
            return 0

    def receive(self, descriptors: list[int] | None) -> pb.Reply:
        """The next reply; descriptors that come with it are appended to the list, if there is one."""
        buffer = self._buffer
        until, rest_s = 0.0, self.deadline_s
        while True:
            if len(buffer) >= 4:
                (length,) = _LENGTH.unpack_from(buffer)
                if length > REPLY_BYTES_MAX:
                    raise OSError(f"an answer of {length} bytes")
                if len(buffer) >= 4 + length:
                    payload = bytes(buffer[4 : 4 + length])
                    del buffer[: 4 + length]
                    return pb.Reply.FromString(payload)
            if buffer:
                # It comes in pieces: each of them in time, and so must they all be.
                now = time.monotonic()
                until = until or now + self.deadline_s
                rest_s = until - now
            if rest_s <= 0 or not self._readable.poll(min(rest_s * 1000, _POLL_MS_MAX)):
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
                raise OSError("the daemon closed it")
            buffer += data

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
