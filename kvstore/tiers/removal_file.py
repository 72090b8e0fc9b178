"""The file of removals that the SSD does not know of yet: what clients removed while it could not be told.

Read at the next start and applied to the records that are found there; deleted when the SSD has
deleted them. This module is the one place where its bytes are defined:

    entry    length, CRC-32 of the rest | up to which record, tenant, digest, number of keys | keys

A removal speaks of records whose sequence is at most `upto`, so that a block that was stored again
afterwards stays. 0: it was not known which records there are; a mark (an entry of no tenant) says
it afterwards, for all such entries ahead of it. A removal without keys is one of all blocks of its namespace.

Of the digest ANYWHERE it is one of all namespaces of its tenant, and of the tenant EVERYBODY of all tenants': what is
to go everywhere may be in a namespace that nobody can name before the records have been read.

An entry is there whole or not at all: what is behind the last whole one was never acknowledged.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvstored.v1 import KEY_BYTES

FRAME = struct.Struct("<II")
HEAD = struct.Struct("<QB64s32sI")
"""Up to which record, length of the tenant's name, name, digest, number of keys."""

ANYWHERE, EVERYBODY = bytes(KEY_BYTES), "*"

ENTRY_KEYS_MAX = 1 << 16
FILE_BYTES_MAX = 8 << 20
"""Some 250,000 keys."""

ENTRY_BYTES_MAX = HEAD.size + ENTRY_KEYS_MAX * KEY_BYTES
FILE_MODE = 0o600


class Entry(NamedTuple):
    """One removal, or (no tenant) a mark."""

    tenant: str
    digest: bytes
    keys: Sequence[bytes]
    """None of them: all blocks of the namespace."""
    upto: int


def pack(entry: Entry) -> bytes:
    """As it is in the file."""
    name = entry.tenant.encode()
    rest = HEAD.pack(entry.upto, len(name), name, entry.digest, len(entry.keys)) + b"".join(entry.keys)
    return FRAME.pack(len(rest), zlib.crc32(rest)) + rest


def unpack(content: bytes) -> Iterator[tuple[Entry, int]]:
    """Whole entries from the beginning on, each with where it ends."""
    at = 0
    while len(content) - at >= FRAME.size:
        length, checksum = FRAME.unpack_from(content, at)
        rest = content[at + FRAME.size : at + FRAME.size + length]
        if not HEAD.size <= length <= ENTRY_BYTES_MAX or len(rest) < length or zlib.crc32(rest) != checksum:
            return
        upto, name_bytes, name, digest, count = HEAD.unpack_from(rest)
        if length != HEAD.size + count * KEY_BYTES:
            return
        keys = [rest[start : start + KEY_BYTES] for start in range(HEAD.size, length, KEY_BYTES)]
        at += FRAME.size + length
        yield Entry(name[:name_bytes].decode(), digest, keys, upto), at


class RemovalFile:
    """Every call is one after the other, in a thread that may wait for the disk, and raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = -1
        """Behind the last whole entry; below 0 before the file was read."""

    @property
    def size_bytes(self) -> int:
        """Of its whole entries."""
        return max(self._end, 0)

    def read(self) -> tuple[list[Entry], int]:
        """What is there, and how many bytes lie behind it that are no whole entry."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            self._end = 0
            return [], 0
        with open(descriptor, "rb") as file:
            content = file.read(FILE_BYTES_MAX + ENTRY_BYTES_MAX)
        found = list(unpack(content))
        self._end = found[-1][1] if found else 0
        return [entry for entry, _ in found], len(content) - self._end

    def append(self, packed: bytes) -> None:
        """It is on the disk afterwards, behind what is there; or, where this raises, it is as if it had not been."""
        if self._end < 0:
            self.read()
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, FILE_MODE)
        try:
            os.ftruncate(descriptor, self._end)
            try:
                at = 0
                while at < len(packed):
                    at += os.pwrite(descriptor, packed[at:], self._end + at)
                os.fdatasync(descriptor)
                if not self._end:
                    self._sync_directory()
            except OSError:
                os.ftruncate(descriptor, self._end)
                raise
        finally:
            os.close(descriptor)
        self._end += len(packed)

    def delete(self) -> None:
        """Nothing of it is needed any more."""
        self._path.unlink(missing_ok=True)
        self._end = 0
        self._sync_directory()

    def _sync_directory(self) -> None:
        descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
