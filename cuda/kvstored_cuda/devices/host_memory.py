"""The memory of a HostDevice: memfds, mapped at addresses that fault once they are given back.

A segment is a memfd that its owner keeps open; a handle names it as /proc/<pid>/fd/<n>, or
travels as the descriptor itself. An importer holds a shared flock on an open file
description of its own for as long as it maps the segment: the kernel drops it when the
process dies, however it dies, and the owner who wants to free asks for an exclusive one.

Addresses are never used twice in a process: what is unmapped leaves a hole without access
(PROT_NONE), so that use after free or close faults at the place where it happens and never
meets the bytes of somebody else.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from kvstored_cuda.devices.errors import DeviceError, InvalidHandle, IpcRefused, OutOfDeviceMemory, StillOpen
from kvstored_cuda.devices.handles import TOKEN_BYTES

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
"""Linux, include/uapi/asm-generic/mman-common.h and mman.h (x86, arm64); not in Python's mmap."""

_MAP_FAILED = ctypes.c_void_p(-1).value

TOKEN = struct.Struct("<iIQ")
"""What the 64 bytes of a HostDevice's handle begin with: pid, descriptor, inode."""


def _map(address: int, size_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped: int | None = _libc.mmap(address or None, size_bytes, protection, flags, descriptor, 0)
    if mapped is None or mapped == _MAP_FAILED:
        code = ctypes.get_errno()
        kind = OutOfDeviceMemory if code == errno.ENOMEM else DeviceError
        raise kind(f"mapping {size_bytes} bytes: {os.strerror(code)}")
    return mapped


def map_memory(descriptor: int, size_bytes: int) -> int:
    """Maps a whole memfd for reading and writing; the address."""
    return _map(0, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor)


def segment_file(size_bytes: int) -> int:
    """A memfd of that size which nobody can shrink: who maps it must not be killed by SIGBUS."""
    descriptor = os.memfd_create("kvstored-device", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_anonymous(size_bytes: int) -> int:
    """Private memory, for reading and writing; the address."""
    return _map(0, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)


def leave_a_hole(address: int, size_bytes: int) -> None:
    """Takes the mapping away and keeps its addresses from being used again."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE
    assert _map(address, size_bytes, 0, flags, -1) == address


def token_of(descriptor: int) -> bytes:
    """The 64 bytes that name a descriptor of this process."""
    return TOKEN.pack(os.getpid(), descriptor, os.fstat(descriptor).st_ino).ljust(TOKEN_BYTES, b"\0")


def descriptor_of(token: bytes, exporter: int, size_bytes: int) -> int:
    """Opens what a token names: a descriptor of our own. Raises InvalidHandle where it is no longer there.

    exporter: the process that may be named. Raises IpcRefused where its descriptors are not for us.
    """
    pid, descriptor, inode = TOKEN.unpack_from(token)
    if pid != exporter:
        raise InvalidHandle(f"a handle of process {exporter} names process {pid}")
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as e:
        raise IpcRefused(f"segment {descriptor} of process {pid}: {e.strerror}; {IpcRefused.remedy}") from e
    except OSError as e:
        raise InvalidHandle(f"process {pid} has no segment {descriptor}: {e.strerror}") from e
    if os.fstat(opened).st_ino != inode:
        os.close(opened)
        raise InvalidHandle(f"descriptor {descriptor} of process {pid} is not that segment any more")
    return _checked(opened, size_bytes)


def reopened(descriptor: int, size_bytes: int) -> int:
    """An open file description of our own for a descriptor that came over a socket."""
    try:
        opened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as e:
        raise InvalidHandle(f"descriptor {descriptor}: {e.strerror}") from e
    return _checked(opened, size_bytes)


def _checked(opened: int, size_bytes: int) -> int:
    """Marks it as in use by this process. A mapping that is longer than its file would fault."""
    found = os.fstat(opened)
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(opened)
        raise InvalidHandle("the segment is being freed") from e
    if not stat.S_ISREG(found.st_mode) or found.st_size < size_bytes:
        os.close(opened)
        raise InvalidHandle(f"the segment has {found.st_size} bytes, its handle says {size_bytes}")
    if not _sealed(opened):
        os.close(opened)
        raise InvalidHandle("the segment could be shrunk under its users")
    return opened


def _sealed(opened: int) -> bool:
    try:
        return bool(fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # no memfd
        return False


@contextmanager
def claimed_for_freeing(descriptor: int) -> Iterator[None]:
    """Inside, nobody maps the memfd and nobody can; when it fails inside, it may be opened again.

    Raises StillOpen where a living process maps it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise StillOpen(f"a living process has the segment open: not freed; {StillOpen.remedy}") from e
    try:
        yield
    except BaseException:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        raise
