"""One connection on the session socket: frames in, frames and descriptors out.

A frame is a 4-byte little-endian length and one protobuf message. asyncio's transports
cannot send descriptors, and a reader callback on the raw socket is also the shortest way
from a request to its reply.

Bounds: a frame is at most FRAME_BYTES_MAX and whole within FRAME_S of its first byte, all
frames that are not whole yet are at most PARTIAL_BYTES_MAX; while replies wait to be taken,
nothing more is read from that client (a client that stops reading stops itself, and only
itself), and no clock runs against it.
"""

import asyncio
import errno
import fcntl
import os
import select
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable

from kvstore.logs import logger
from kvstored.v1 import FRAME_BYTES_MAX
from kvstored.v1 import kvstore_pb2 as pb

log = logger("kvstored.session")

READ_BYTES = 256 << 10
FRAMES_A_TURN = 64
"""Requests of one client answered before others get their turn."""

FRAME_S = 10.0
"""From the first byte of a frame to its last. A client writes it in one go: one that takes longer was stopped."""

PARTIAL_BYTES_MAX = 64 << 20
"""Kept of frames that are not whole yet, of all connections; the connection that wants more is ended."""

RETRY_S = 0.005
"""Until descriptors that could not be sent are tried again."""

_LENGTH = struct.Struct("<I")
_INT = struct.Struct("i")


class FrameError(Exception):
    """The peer does not speak this protocol; its connection is of no more use."""


class Partial:
    """What connections keep of frames that are not whole yet, all together."""

    def __init__(self) -> None:
        self.size_bytes = 0


class Connection:
    """A non-blocking stream socket of frames, on the event loop."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        partial: Partial,
        on_frame: Callable[["Connection", bytes], None],
        on_closed: Callable[["Connection", str], None],
    ) -> None:
        """`on_frame` gets each payload; `on_closed` is called once, with the reason ("" for a plain end)."""
        self._socket = sock
        self._loop = loop
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._in = bytearray()
        self._partial = partial
        self._counted = 0
        """Bytes of ours in `partial`."""
        self._late: asyncio.TimerHandle | None = None
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._reading = False
        self._turn: asyncio.Handle | None = None
        self.closed = False
        self.violated = False
        """It was ended for what the peer said, not for the peer's end or silence."""
        sock.setblocking(False)

    def start(self) -> None:
        """Begins to read."""
        watch(self._loop, self._socket.fileno(), self._readable)
        self._reading = True

    def send(self, payload: bytes, descriptors: list[int] | None = None) -> None:
        """Sends one frame, now or as soon as the peer takes it; descriptors stay the caller's."""
        if self.closed:
            return
        frame = _LENGTH.pack(len(payload)) + payload
        if not descriptors and not self._out:
            try:
                sent = self._socket.send(frame)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as e:
                self.close(f"sending: {e.strerror}")
                return
            if sent == len(frame):
                return
            frame = frame[sent:]
        if descriptors:
            # Duplicates, since the originals may be closed before the peer is ready.
            descriptors = _duplicates(descriptors)
        self._out.append((memoryview(frame), descriptors or []))
        if len(self._out) == 1:
            self._flush()

    def hung_up(self) -> bool:
        """Whether the peer has closed its end, although frames of it may still wait here."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def refuse(self, reason: str, code: int = pb.INVALID_ARGUMENT) -> None:
        """Ends the connection; the peer's last frame says why, as an error in a reply to nothing (id 0)."""
        self.violated = code == pb.INVALID_ARGUMENT
        if not self._out:
            self.send(_last_words(reason, code))
        self.close(reason)

    def close(self, reason: str = "") -> None:
        """Ends the connection; what was not sent is dropped."""
        if self.closed:
            return
        self.closed = True
        self._read_more(False)
        if self._turn is not None:
            self._turn.cancel()
        self._loop.remove_writer(self._socket)
        for _, descriptors in self._out:
            _close_all(descriptors)
        self._out.clear()
        self._in = bytearray()
        self._count_partial()
        self._socket.close()
        self._on_closed(self, reason)

    def _read_more(self, wanted: bool) -> None:
        if wanted != self._reading:
            self._reading = wanted
            if wanted:
                self._loop.add_reader(self._socket, self._readable)
            else:
                self._loop.remove_reader(self._socket)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as e:
            self.close(f"receiving: {e.strerror}")
            return
        if not data:
            self.close("cut short in the middle of a message" if self._in else "")
            return
        if not self._in and len(data) >= 4 and _LENGTH.unpack_from(data)[0] == len(data) - 4:
            self._handle(data[4:])
            return
        self._in += data
        self._frames()

    def _frames(self) -> None:
        self._turn = None
        buffer = self._in
        at = 0
        for _ in range(FRAMES_A_TURN):
            if self.closed or self._out or len(buffer) - at < 4:
                break
            (length,) = _LENGTH.unpack_from(buffer, at)
            if length > FRAME_BYTES_MAX:
                self.refuse(f"a frame of {length} bytes; at most {FRAME_BYTES_MAX} are allowed")
                return
            if len(buffer) - at - 4 < length:
                break
            payload = bytes(buffer[at + 4 : at + 4 + length])
            at += 4 + length
            self._handle(payload)
        if self.closed:
            return
        del buffer[:at]
        if at and len(buffer) >= 4 and not self._out:
            self._turn = self._loop.call_soon(self._frames)
        # A turn under way, or replies not taken: let the kernel hold what else the client sends.
        self._read_more(self._turn is None and not self._out)
        self._count_partial(begun=bool(at))

    def _count_partial(self, *, begun: bool = True) -> None:
        """Counts what is kept, and runs the clock of a frame that is not whole: anew where it has just `begun`."""
        more = len(self._in) - self._counted
        self._partial.size_bytes += more
        self._counted += more
        waiting = self._reading and bool(self._in)
        if self._late is not None and (begun or not waiting):
            self._late.cancel()
            self._late = None
        if more > 0 and self._partial.size_bytes > PARTIAL_BYTES_MAX:
            self.refuse(
                f"unfinished frames of all clients come to more than {PARTIAL_BYTES_MAX} bytes", pb.RESOURCE_EXHAUSTED
            )
        elif waiting and self._late is None:
            self._late = self._loop.call_later(FRAME_S, self._too_late)

    def _too_late(self) -> None:
        self._late = None
        if self._reading:  # else it waits for us, or we for it to take replies: no fault of the frame's
            self.refuse(f"a frame that was not whole within {FRAME_S:.0f} s", pb.DEADLINE_EXCEEDED)

    def _handle(self, payload: bytes) -> None:
        try:
            self._on_frame(self, payload)
        except FrameError as e:
            self.refuse(str(e))

    def _flush(self) -> None:
        while self._out:
            data, descriptors = self._out[0]
            if descriptors and self._unread():
                self._retry_soon()
                return
            try:
                sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else self._socket.send(data)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as e:
                if e.errno == errno.ETOOMANYREFS:
                    self._retry_soon()  # others' descriptors are in flight: not this client's fault
                    return
                self.close(f"sending: {e.strerror}")
                return
            _close_all(descriptors)
            if sent < len(data):
                self._out[0] = (data[sent:], [])
                break
            self._out.popleft()
        if self._out:
            self._loop.add_writer(self._socket, self._writable)
            self._read_more(False)

    def _unread(self) -> bool:
        """Whether the peer has not taken all that was sent: descriptors wait until it has.

        The kernel bounds the descriptors that a user has in flight, over all sockets, so one
        client that asks for segments and reads nothing would shut out every other.
        """
        (waiting,) = _INT.unpack(fcntl.ioctl(self._socket, termios.TIOCOUTQ, _INT.pack(0)))
        return bool(waiting)

    def _retry_soon(self) -> None:
        self._read_more(False)
        self._turn = self._loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._turn = None
        self._flush()
        if not self.closed and not self._out:
            self._frames()

    def _writable(self) -> None:
        self._loop.remove_writer(self._socket)
        self._flush()
        if not self.closed and not self._out:
            self._frames()


def watch(loop: asyncio.AbstractEventLoop, descriptor: int, callback: Callable[[], None]) -> None:
    """`loop.add_reader` for a descriptor that was just opened.

    Were one of this number closed while the loop still watched it, the kernel would have
    forgotten it and the loop not, and the new one would be taken for watched and never be
    heard: a daemon that accepts nobody, or a client without answers.
    """
    try:
        stale = loop.remove_reader(descriptor) | loop.remove_writer(descriptor)
    except OSError:
        stale = True  # watched for both: the kernel does not know it, and by this failure the loop does not either
    if stale:
        log.error("a descriptor was closed while it was watched; it is another's now", descriptor=descriptor)
    loop.add_reader(descriptor, callback)


def _last_words(reason: str, code: int) -> bytes:
    return pb.Reply(error=pb.Error(code=code, message=reason)).SerializeToString()  # type: ignore[arg-type]


def _duplicates(descriptors: list[int]) -> list[int]:
    made: list[int] = []
    try:
        for descriptor in descriptors:
            made.append(os.dup(descriptor))  # noqa: PERF401 (those made so far are closed on failure)
    except OSError:
        _close_all(made)
        raise
    return made


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
