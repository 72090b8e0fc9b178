"""Shared memory in a process: mapped, populated, locked and unmapped without `mmap.mmap`.

Why not the standard library's: its object keeps a duplicate of the descriptor that a
forked child cannot get rid of, unmaps on collection in whatever process that happens,
and its `madvise` holds the GIL for the whole call (0.12 to 0.66 s a GiB). Calls here go
through ctypes, which releases the GIL, in pieces of at most 64 MiB.
"""

import ctypes
import errno
import mmap
import os
import weakref
from typing import Any

import numpy as np

PIECE_BYTES = 64 << 20
MADV_DONTFORK = 10
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later (include/uapi/asm-generic/mman-common.h)."""

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


class _Region:
    """What is mapped: unmapped when the last of the arrays and views that refer to it is gone."""


def _unmap(address: int, size_bytes: int, pid: int) -> None:
    """A forked child must not unmap: the range was never mapped there, and may be its own by now."""
    if os.getpid() == pid:
        _libc.munmap(address, size_bytes)


class Mapping:
    """A shared mapping of a whole descriptor; the descriptor itself may be closed at once.

    The memory stays mapped while the mapping, or anything made from `bytes` or by `view`, is
    alive, in the process that made it.
    """

    def __init__(self, descriptor: int, size_bytes: int, *, writable: bool, fork: bool = False) -> None:
        """Maps `size_bytes` from the start; `fork=False` keeps it out of forked children.

        Raises OSError (EACCES, EPERM where the descriptor or its seals forbid writing).
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, size_bytes, protection, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"mapping {size_bytes} bytes of shared memory: {os.strerror(number)}")
        self.address: int = address
        self.size_bytes = size_bytes
        self.writable = writable
        self._region = _Region()
        # Not at exit: threads and exit handlers may still read; then the kernel unmaps.
        weakref.finalize(self._region, _unmap, address, size_bytes, os.getpid()).atexit = False
        if not fork:
            self._advise(MADV_DONTFORK)
        whole: Any = (ctypes.c_ubyte * size_bytes).from_address(address)
        whole.region = self._region
        self.bytes = np.frombuffer(memoryview(whole) if writable else memoryview(whole).toreadonly(), np.uint8)
        """Everything as one array of uint8."""

    def view(self, start: int, size_bytes: int) -> memoryview:
        """A memoryview of its own object, so that its lifetime can be told from that of others.

        Anything made from it (numpy arrays, slices) keeps that object, and so the mapping, alive.
        """
        return np.frombuffer(self.exporter(start, size_bytes), np.uint8).data

    def exporter(self, start: int, size_bytes: int) -> Any:
        """The object behind `view`: a weak reference to it dies with the last user of its bytes."""
        if start < 0 or size_bytes < 1 or start + size_bytes > self.size_bytes:
            raise ValueError(f"{size_bytes} bytes at {start} are not within a mapping of {self.size_bytes}")
        exporter: Any = (ctypes.c_ubyte * size_bytes).from_address(self.address + start)
        exporter.mapping = self
        return exporter

    def populate(self, *, write: bool, start: int = 0, size_bytes: int | None = None) -> None:
        """Makes the page tables of the mapping or of a part in whole pages, allocating them if `write`. Raises OSError.

        ENOSPC: there is no memory for a page, where touching it would end the process with SIGBUS.
        """
        end = self.size_bytes if size_bytes is None else start + size_bytes
        try:
            self._advise(MADV_POPULATE_WRITE if write else MADV_POPULATE_READ, start, end)
        except OSError as e:
            if e.errno != errno.EFAULT:
                raise
            why = f"no room for {end - start} bytes of shared memory: its file system, or memory, is full"
            raise OSError(errno.ENOSPC, why) from e

    def lock(self) -> None:
        """Keeps the pages out of swap. Raises OSError (ENOMEM or EPERM: RLIMIT_MEMLOCK)."""
        for at in range(0, self.size_bytes, PIECE_BYTES):
            _check(_libc.mlock(self.address + at, min(PIECE_BYTES, self.size_bytes - at)), "mlock")

    def _advise(self, advice: int, start: int = 0, end: int | None = None) -> None:
        end = self.size_bytes if end is None else end
        for at in range(start, end, PIECE_BYTES):
            piece = min(PIECE_BYTES, end - at)
            _check(_libc.madvise(self.address + at, piece, advice), f"madvise({advice})")
