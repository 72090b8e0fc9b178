"""The socket under a session: frames out, replies and descriptors in, each with a deadline.

Deadlines are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO): a Python time-out costs a poll ahead
of every send and receive. What goes wrong here is an OSError; BlockingIOError is "too late".
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

RECEIVE_BYTES = 64 << 10
_INT_BYTES = array("i").itemsize
CONTROL_BYTES = socket.CMSG_LEN(DESCRIPTORS_MAX * _INT_BYTES)
REPLY_BYTES_MAX = 16 * FRAME_BYTES_MAX

_LENGTH = struct.Struct("<I")
_TIMEVAL = struct.Struct("ll")


def frame(request: pb.Request) -> bytes:
    """A request as it goes over the socket."""
    payload = request.SerializeToString()
    return _LENGTH.pack(len(payload)) + payload


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
        self.deadline_s = 0.0
        try:
            self.set_deadline(timeout_s)
            self._socket.connect(path)
        except OSError as e:
            self._socket.close()
            raise Unavailable(
                f"no kvstored answers on unix://{path} ({e.strerror}); is it running? "
                "Start `kvstored`, or name its socket with KVSTORED_ENDPOINT"
            ) from e
        self._descriptor = self._socket.fileno()

    def set_deadline(self, seconds: float) -> None:
        """How long a send or a receive may take from now on."""
        if seconds == self.deadline_s:
            return
        self.deadline_s = seconds
        value = _TIMEVAL.pack(*divmod(max(int(seconds * 1e6), 1), 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def send(self, frames: bytes) -> None:
        """Sends all of it."""
        self._socket.sendall(frames)

    def receive(self, descriptors: list[int] | None) -> pb.Reply:
        """The next reply; descriptors that come with it are appended to the list, if there is one."""
        buffer = self._buffer
        until = 0.0
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
                if now > until:
                    raise BlockingIOError(errno.EAGAIN, "an answer in pieces")
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
