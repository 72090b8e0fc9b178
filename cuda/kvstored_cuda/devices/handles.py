"""Handles of device memory and events as they travel between processes: their bytes are defined here alone.

A handle names the life of the process that exported it (its generation), the device, the
driver, and what the driver needs to open it (64 bytes, or a descriptor that travels beside
it over a Unix socket). It names a whole allocation: who wants a slot adds an offset.
"""

import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from kvstored_cuda.devices.errors import InvalidHandle

TOKEN_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE, driver_types.h and cuda.h of CUDA 13.0."""

UUID_BYTES_MAX = 64
NONCE_BYTES = 8
VERSION = 1

_LAYOUT = struct.Struct(f"<2sBBBxxxIIQ{NONCE_BYTES}sQQ{UUID_BYTES_MAX}s{TOKEN_BYTES}s")
_MAGIC = b"kg"
HANDLE_BYTES = _LAYOUT.size
"""Length of a handle on the wire, of memory and of events alike."""

_GENERATION = struct.Struct(f"<IQ{NONCE_BYTES}s")
GENERATION_BYTES = _GENERATION.size
"""Length of a generation on the wire."""


class HandleKind(IntEnum):
    """How the memory crosses: the driver's 64 bytes (CUDA IPC), or a POSIX file descriptor."""

    IPC = 1
    DESCRIPTOR = 2


class Thing(IntEnum):
    """What a handle is of."""

    MEMORY = 1
    EVENT = 2


def start_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None where there is none (or it cannot be seen)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            line = stat.read()
    except OSError:
        return None
    # Field 22 of proc_pid_stat(5); the second, a name in parentheses, may hold anything.
    return int(line.rpartition(")")[2].split()[19])


@dataclass(frozen=True)
class Generation:
    """One life of one process: number, start (clock ticks since boot, 0 where unknown) and chance.

    The chance is what tells lives apart in containers, where numbers repeat; the other two are for people.
    """

    pid: int
    born: int
    nonce: bytes

    def __str__(self) -> str:
        return f"process {self.pid} ({self.nonce.hex()})"

    @classmethod
    def mine(cls) -> "Generation":
        """Of this process; the same for all its devices, another one after a fork."""
        return _mine.of(os.getpid())

    def to_bytes(self) -> bytes:
        """As the daemon says it to a client (and a client to the daemon): GENERATION_BYTES long."""
        return _GENERATION.pack(self.pid, self.born, self.nonce)

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Generation":
        """Raises InvalidHandle for bytes that are none."""
        if len(raw) != GENERATION_BYTES:
            raise InvalidHandle(f"a generation has {GENERATION_BYTES} bytes, this has {len(raw)}")
        return cls(*_GENERATION.unpack(raw))

    def alive(self) -> bool:
        """Whether that process lives, judged by number and start in this PID namespace."""
        return start_ticks(self.pid) == self.born


class _Mine:
    """This process's, made once whichever threads ask first: what is named by another one is stale to all others."""

    def __init__(self) -> None:
        self._of: dict[int, Generation] = {}

    def of(self, pid: int) -> Generation:
        found = self._of.get(pid)
        if found is None:
            made = Generation(pid, start_ticks(pid) or 0, os.urandom(NONCE_BYTES))
            found = self._of.setdefault(pid, made)  # one step: a thread that was faster has made it
        return found

    def forget(self) -> None:
        """In a forked child, whose number may have been an ancestor's."""
        self._of.clear()


_mine = _Mine()
os.register_at_fork(after_in_child=_mine.forget)


@dataclass(frozen=True)
class Handle:
    """Of memory or of an event. `descriptor` does not travel in the bytes; the receiver of a handle of kind
    DESCRIPTOR puts in the one that came with the message, and closes it once the handle has been opened.

    serial: names it within its generation. size_bytes: of the allocation, 0 for events.
    driver: CUDA's version as the driver says it (13000 for 13.0).
    """

    thing: Thing
    kind: HandleKind
    generation: Generation
    serial: int
    uuid: str
    driver: int
    size_bytes: int
    token: bytes
    descriptor: int = -1

    @property
    def identity(self) -> tuple[bytes, int, int]:
        """What makes two handles the same: life of the exporter, kind of thing, serial number."""
        return self.generation.nonce, int(self.thing), self.serial

    def to_bytes(self) -> bytes:
        """As it stands in a message: HANDLE_BYTES long."""
        assert len(self.token) == TOKEN_BYTES, len(self.token)
        return _LAYOUT.pack(
            _MAGIC,
            VERSION,
            self.thing,
            self.kind,
            self.driver,
            self.generation.pid,
            self.generation.born,
            self.generation.nonce,
            self.serial,
            self.size_bytes,
            self.uuid.encode("ascii"),
            self.token,
        )

    @classmethod
    def from_bytes(cls, raw: bytes, descriptor: int = -1) -> Self:
        """The handle in a message. Raises InvalidHandle for bytes that are none, or of another version."""
        if len(raw) != HANDLE_BYTES:
            raise InvalidHandle(f"a handle has {HANDLE_BYTES} bytes, this has {len(raw)}")
        magic, version, thing, kind, driver, pid, born, nonce, serial, size_bytes, uuid, token = _LAYOUT.unpack(raw)
        if magic != _MAGIC or version != VERSION:
            raise InvalidHandle(f"a handle of version {version}; this release reads version {VERSION}")
        try:
            name = uuid.rstrip(b"\0").decode("ascii")
            return cls(
                Thing(thing),
                HandleKind(kind),
                Generation(pid, born, nonce),
                serial,
                name,
                driver,
                size_bytes,
                token,
                descriptor,
            )
        except ValueError as e:
            raise InvalidHandle(f"not a handle: {e}") from e
