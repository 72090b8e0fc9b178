"""The session socket as bytes: what a client of another language, a broken or a hostile one may send.

Every wait is bounded: a daemon that does not answer fails the test, it does not hang it.
"""

import array
import os
import select
import socket
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstored.v1 import DESCRIPTORS_MAX, PROTOCOL, errors
from kvstored.v1 import kvstore_pb2 as pb

WAIT_S = 60.0
RECEIVE_BYTES = 256 << 10
LENGTH = struct.Struct("<I")


def frame(payload: bytes) -> bytes:
    """A payload as it goes over the socket."""
    return LENGTH.pack(len(payload)) + payload


class Wire:
    """One connection to the session socket that says what it is told to."""

    def __init__(self, path: Path, *, hello: bool = True, tenant: str = "") -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(WAIT_S)
        self._socket.connect(str(path))
        self._buffer = b""
        self._last_id = 0
        self.descriptors: list[int] = []
        """Every descriptor that rode on a reply; closed with the connection."""
        if hello:
            try:
                self.call(hello=pb.HelloRequest(protocol=PROTOCOL, client="wire", tenant=tenant))
            except BaseException:
                self.close()
                raise

    # -- sending

    def send(self, data: bytes, descriptors: list[int] | None = None) -> None:
        """Bytes as they are, and descriptors with the first of them."""
        if descriptors:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            sent = self._socket.sendmsg([data], rights)
            data = data[sent:]
        if data:
            self._socket.sendall(data)

    def stuff(self, payload: bytes, idle_s: float = 0.3) -> tuple[int, bytes]:
        """Sends the same frame again and again until the daemon takes nothing for a while.

        Answers how many whole frames went, and what is missing of the last one.
        """
        one, sent = frame(payload), 0
        many = one * (1 + (64 << 10) // len(one))
        self._socket.setblocking(False)
        while select.select([], [self._socket], [], idle_s)[1]:
            sent += self._socket.send(many[sent % len(one) :])
        self._socket.settimeout(WAIT_S)
        return sent // len(one), one[sent % len(one) :] if sent % len(one) else b""

    def post(self, number: int = 0, /, **op: Any) -> None:
        """One request, by default one that wants no reply."""
        self.send(frame(pb.Request(id=number, **op).SerializeToString()))

    def call(self, **op: Any) -> pb.Reply:
        """One request and its reply; raises the error that it carries."""
        self._last_id += 1
        self.post(self._last_id, **op)
        return self.answer(self._last_id)

    def answer(self, number: int) -> pb.Reply:
        """The next reply, which must be to request `number`; raises the error that it carries."""
        reply = self.receive()
        assert reply is not None, "the daemon closed the connection"
        assert reply.id == number, f"reply to {reply.id} instead of {number}"
        if reply.HasField("error"):
            assert reply.WhichOneof("op") is None, "an error and an answer"
            raise errors.from_wire(reply.error.code, reply.error.message)
        return reply

    # -- receiving

    def receive(self) -> pb.Reply | None:
        """The next reply; None where the daemon has closed the connection. Fails when neither comes in time."""
        while True:
            if len(self._buffer) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(self._buffer)
                end = LENGTH.size + length
                if len(self._buffer) >= end:
                    payload, self._buffer = self._buffer[LENGTH.size : end], self._buffer[end:]
                    return pb.Reply.FromString(payload)
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, RECEIVE_BYTES, DESCRIPTORS_MAX)
            except ConnectionResetError:
                return None  # it closed with bytes of ours unread
            self.descriptors += descriptors
            if not data:
                return None
            self._buffer += data

    def last_words(self) -> str:
        """The error that the daemon ends this connection with; "" for none. Fails where it does not end it."""
        said = ""
        while (reply := self.receive()) is not None:
            said = reply.error.message
        return said

    # -- ending

    def leave(self) -> None:
        """Says that nothing is held or mapped any more, and closes."""
        self.post(sync=pb.SyncRequest(leaving=True))
        self.close()

    def close(self) -> None:
        """Hangs up without a word."""
        self._socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
