"""The host slab: segments of shared memory, sealed memfds unless they have another place.

A segment is made, populated, locked and mapped here, and its descriptor handed to the
sessions of its tenant. At birth it gets mode 0600 and seals against shrinking, growing
and further seals: without them one client's `ftruncate` kills the daemon with SIGBUS,
and one client's seal locks the others out.
"""

import ctypes
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Protocol

from kvstored.mapping import Mapping

PREFAULT_THREADS_MAX = 8
MFD_HUGE_2MB = 21 << 26
"""log2(2 MiB) << MFD_HUGE_SHIFT, from linux/memfd.h."""

PREFIX = "kvstored-"
"""Of the names of memfds as /proc shows them, and of descriptors that systemd keeps."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
FALLOC_PUNCH_HOLE, FALLOC_KEEP_SIZE = 2, 1

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(eq=False)
class SlabSegment:
    """One piece of shared memory of the daemon's."""

    id: int
    descriptor: int
    mapping: Mapping
    lock_error: str
    read_only: int = -1
    """The same memory opened for reading only; made when first asked for."""
    busy: bool = False
    """Its page tables are being made in another thread."""


class Place(Protocol):
    """Memory by name."""

    punches: bool
    """Pages of what is let go are punched out, whoever has them mapped, who sees zeros from then on. Where they lie
    on a file system that may be full, that could be the end of him (SIGBUS): there they go with the last mapping."""

    def found(self) -> dict[str, int]:
        """Descriptors of what an earlier daemon left; the caller's from now on."""

    def make(self, name: str, size_bytes: int, *, huge_pages: bool = False) -> int:
        """New memory, zeros, in place of what had that name; the caller's descriptor. Raises OSError. In any thread."""

    def remove(self, name: str) -> None:
        """Keeps it no longer. Never raises; what cannot be removed now is tried again by `tidy`."""

    def tidy(self) -> None:
        """Tries again what could not be removed."""

    def check_room(self, size_bytes: int) -> None:
        """Raises StartupError where so much more has no room here."""

    def close(self) -> None: ...


def sealed_memfd(name: str, size_bytes: int, *, huge_pages: bool = False, seals: int = SEALS) -> int:
    """A memfd of fixed size, readable and writable by its owner only."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_pages:
        flags |= os.MFD_HUGETLB | MFD_HUGE_2MB
    descriptor = os.memfd_create(name, flags)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def segment_name(segment: int) -> str:
    """In its place."""
    return f"segment-{segment}"


def open_read_only(descriptor: int) -> int:
    """The same memory opened for reading only: it cannot be mapped writable through this descriptor."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class Nowhere:
    """Memory that ends with the process (and the last client that has it mapped)."""

    punches = True

    def found(self) -> dict[str, int]:
        return {}

    def make(self, name: str, size_bytes: int, *, huge_pages: bool = False) -> int:
        return sealed_memfd(PREFIX + name, size_bytes, huge_pages=huge_pages)

    def remove(self, name: str) -> None: ...
    def tidy(self) -> None: ...
    def check_room(self, size_bytes: int) -> None: ...
    def close(self) -> None: ...


class Slab:
    """All segments that exist, by id."""

    def __init__(self, *, huge_pages: bool, place: Place | None = None) -> None:
        self.huge_pages = huge_pages
        self.place: Place = Nowhere() if place is None else place
        self.added: Callable[[SlabSegment], None] = lambda segment: None
        self.dropping: Callable[[int], None] = lambda number: None
        """Told of each segment that is part of the slab from now on, and of each before its pages go."""
        self._segments: dict[int, SlabSegment] = {}

    def make(self, segment: int, size_bytes: int) -> SlabSegment:
        """Allocates, maps, prefaults and locks one segment; safe in any thread.

        Raises OSError where there is no memory. A segment that cannot be locked is
        usable and says why in `lock_error`. Call `add` with the result on the loop.
        """
        descriptor = self.place.make(segment_name(segment), size_bytes, huge_pages=self.huge_pages)
        made = self.take_over(segment, descriptor)
        try:
            self.settle(made)
        except BaseException:
            os.close(descriptor)
            raise
        return made

    def take_over(self, segment: int, descriptor: int) -> SlabSegment:
        """Maps memory that is there, of an earlier daemon; `settle` follows. The descriptor is the slab's then."""
        try:
            mapping = Mapping(descriptor, os.fstat(descriptor).st_size, writable=True)
        except BaseException:
            os.close(descriptor)
            raise
        return SlabSegment(segment, descriptor, mapping, "")

    def settle(self, segment: SlabSegment) -> None:
        """Makes page tables, and pages where there are none, and locks them; in any thread. Raises OSError."""
        segment.mapping.populate(write=True)
        try:
            segment.mapping.lock()
        except OSError as e:
            segment.lock_error = f"{e.strerror}; raise RLIMIT_MEMLOCK (LimitMEMLOCK=infinity under systemd)"

    def settling(self, number: int) -> SlabSegment | None:
        """Before `settle` of a segment that serves already; None where it is gone. `settled` must follow."""
        segment = self._segments.get(number)
        if segment is not None:
            segment.busy = True
        return segment

    def settled(self, segment: SlabSegment) -> None:
        """A segment that was dropped meanwhile goes now: pages that are made after they were punched out would stay."""
        segment.busy = False
        if self._segments.get(segment.id) is not segment:
            self._let_go(segment)

    def make_all(
        self, sizes: dict[int, int], progress: Callable[[int, int], None], left: dict[int, int] | None = None
    ) -> None:
        """Makes many segments in parallel; `progress(bytes done, bytes in all)` after each. Raises OSError.

        Those that `left` has a descriptor for are taken over.
        """
        left = left or {}
        total, done = sum(sizes.values()), 0
        threads = min(PREFAULT_THREADS_MAX, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, thread_name_prefix="prefault") as pool:
            futures = [
                pool.submit(self.take_over, segment, left[segment])
                if segment in left
                else pool.submit(self.make, segment, size)
                for segment, size in sizes.items()
            ]
            try:
                for future in as_completed(futures):
                    made = future.result()
                    self.add(made)
                    done += made.mapping.size_bytes
                    progress(done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def add(self, segment: SlabSegment) -> None:
        """The segment is part of the slab from now on."""
        self._segments[segment.id] = segment
        self.added(segment)

    def drop(self, segment: int) -> None:
        """Gives the pages back to the system (`Place.punches`: at once) and forgets the segment.

        Clients that still look at it may see zeros, and their reads do not count: every
        block in it was withdrawn from the index before.
        """
        gone = self._segments.pop(segment)
        self.dropping(segment)
        self.place.remove(segment_name(segment))
        if not gone.busy:
            self._let_go(gone)

    def _let_go(self, segment: SlabSegment) -> None:
        if self.place.punches:
            punch_hole(segment.descriptor, segment.mapping.size_bytes)
        _close(segment)

    def descriptor(self, segment: int, read_only: bool) -> int:
        """For sending; stays the slab's. Raises OSError where no further descriptor can be opened."""
        found = self._segments[segment]
        if not read_only:
            return found.descriptor
        if found.read_only < 0:
            found.read_only = open_read_only(found.descriptor)
        return found.read_only

    def bytes_at(self, segment: int, offset: int, length: int) -> memoryview:
        """A writable view for callers whose bytes pass through the daemon; keeps the memory mapped while it lives."""
        return self._segments[segment].mapping.view(offset, length)

    @property
    def lock_error(self) -> str:
        """Why some of the slab can be swapped out; empty when all of it is locked."""
        return next((s.lock_error for s in self._segments.values() if s.lock_error), "")

    def close(self) -> None:
        """Closes every descriptor; memory goes when the last client has unmapped it."""
        for segment in self._segments.values():
            _close(segment)
        self._segments.clear()


def punch_hole(descriptor: int, size_bytes: int) -> None:
    """Frees all pages of a memfd, in every process that maps it."""
    mode = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE
    if _libc.fallocate(descriptor, mode, ctypes.c_long(0), ctypes.c_long(size_bytes)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"punching {size_bytes} bytes out of a segment: {os.strerror(number)}")


def _close(segment: SlabSegment) -> None:
    os.close(segment.descriptor)
    if segment.read_only >= 0:
        os.close(segment.read_only)
