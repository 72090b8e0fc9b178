"""The slab's memory, page-locked for the devices: segment by segment, in the background, and given back at the end.

What is page-locked is copied asynchronously; the rest goes through a staging buffer, and `why_not`
says what and why. A registration holds for all devices of the process, so one of them registers.

Rules
- Memory stays mapped until the driver has let go of it: its addresses must not be another
  segment's while a registration names them. So a segment that is dropped is kept by a view here
  until its registration has ended.
- PARALLEL calls at a time, each on a thread of its own; nothing here waits on the event loop.
"""

import threading
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvstore.core.store import Store
from kvstore.gpu.slabs import SlabBytes
from kvstore.logs import logger
from kvstored_cuda.devices import Device
from kvstored_cuda.devices.errors import DeviceError
from kvstored_cuda.devices.isolated import Isolated
from kvstored_cuda.devices.pagelock import PARALLEL, PageLocks, Span

log = logger("kvstored.gpu")

REGISTER_S = 600.0
"""For one segment; the driver's call goes on behind."""

END_S = 10.0
"""For all registrations to end when the daemon stops; what is left ends with the process."""

COPIES_S = 60.0
"""For copies of other devices to end, when the device that registered is lost."""


@dataclass(eq=False)
class _Piece:
    """One segment: its bytes are kept mapped while the driver may know of them."""

    locks: PageLocks
    span: Span
    kept: memoryview
    state: str = "waiting"
    """waiting, locking, locked, refused, or late: its call has not returned."""
    dropped: bool = False


_never_freed: list[memoryview] = []
"""Memory that the driver may know of for ever: its addresses are not used again."""


class SlabLocks:
    """Of one slab, by one device at a time."""

    def __init__(self, slab: SlabBytes, store: Store) -> None:
        self._slab = slab
        self._store = store
        self._lock = threading.Condition()
        self._users = 0
        """Batches of copies that were told what is page-locked and have not ended."""
        self._locks: PageLocks | None = None
        self.by: Device | None = None
        """The device that registers; None where there is none in use."""
        self._pieces: dict[int, _Piece] = {}
        self._waiting: deque[_Piece] = deque()
        self._workers = 0
        """Threads that register what waits, one after the other."""
        self._ending = False
        self._isolated = Isolated(owner_calls_max=PARALLEL)
        self._said = ""

    # -- which device, which segments

    @property
    def wants_device(self) -> bool:
        """None registers, and what the last one knew of has ended: it would be refused while it is known."""
        return self.by is None and not self._ending

    def begin(self, device: Device) -> None:
        """This device registers what there is, and what comes."""
        assert self.wants_device, "two devices register"
        self.by, self._locks = device, PageLocks(device)
        for number, segment in self._store.segments.live.items():
            self.added(number, segment.size_bytes)

    def added(self, number: int, size_bytes: int) -> None:
        """A segment that is part of the slab now."""
        locks = self._locks
        if locks is None or number in self._pieces:
            return
        kept = self._slab.bytes_at(number, 0, size_bytes)
        piece = self._pieces[number] = _Piece(locks, Span(address_of(kept), size_bytes), kept)
        with self._lock:
            self._waiting.append(piece)
            if self._workers == PARALLEL:
                return
            self._workers += 1
        self._isolated.dispose("page-locking", self._work, owner="slab")

    def dropping(self, number: int) -> None:
        """A segment that goes: nothing is copied from or to it any more."""
        with self._lock:
            piece = self._pieces.pop(number, None)
            if piece is None:
                return
            piece.dropped = True
            if piece.state in ("waiting", "locking"):
                return  # whoever registers it sees that it is dropped
        self._isolated.dispose("ending a page-lock", partial(_unregister, piece), owner="slab ends")

    def end(self) -> None:
        """The device that registered is gone; what it knows of ends in the background, as far as it can."""
        with self._lock:
            locks, self._locks, self.by = self._locks, None, None
            pieces, self._pieces = list(self._pieces.values()), {}
            for piece in pieces:
                piece.dropped = True
            self._ending = locks is not None
        if locks is not None:
            self._isolated.dispose("ending page-locks", partial(self._close, locks, pieces), owner="slab ends")

    async def close(self) -> None:
        """Ends all registrations, for at most END_S; the slab may be closed then."""
        with self._lock:
            locks, self._locks, self.by = self._locks, None, None
            pieces, self._pieces = list(self._pieces.values()), {}
            self._waiting.clear()
        if locks is None:
            return
        try:
            await self._isolated.call("ending page-locks", partial(self._close, locks, pieces), timeout_s=END_S)
        except DeviceError as e:
            log.warning("page-locks were not ended", reason=str(e))

    # -- in threads

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._workers -= 1
                    return
                piece = self._waiting.popleft()
                if piece.dropped:
                    continue
                piece.state = "locking"
            done = piece.locks.lock([piece.span], REGISTER_S)
            with self._lock:
                piece.state = "late" if done.pending_bytes else "refused" if done.refused else "locked"
                dropped = piece.dropped
            if dropped:
                _unregister(piece)
            del piece  # its memory is not kept while this waits for the lock

    def _close(self, locks: PageLocks, pieces: list[_Piece]) -> None:
        """`pieces` are kept mapped until it has returned."""
        with self._lock:
            left: tuple[str, ...] = ("copies are under way",)
            idle = self._lock.wait_for(lambda: not self._users, COPIES_S)
        if idle:
            left = locks.close()
        if left:
            log.warning("page-locks did not end", count=len(left), reason=left[0])
            _never_freed.extend(piece.kept for piece in pieces)
        self._ending = False

    # -- what is asked

    def enter(self) -> None:
        """A batch of copies begins: what `covers` tells it stays page-locked until it leaves."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            self._lock.notify_all()

    def covers(self, address: int, size_bytes: int) -> bool:
        """Whether a copy of these bytes may be asynchronous. In any thread."""
        locks = self._locks
        return locks is not None and locks.covers(address, size_bytes)

    @property
    def locked_bytes(self) -> int:
        locks = self._locks
        return 0 if locks is None else locks.locked_bytes

    def why_not(self) -> str:
        """Why some of the slab is copied through a staging buffer; "" where none is."""
        locks = self._locks
        if locks is None:
            return "no device is in use"
        with self._lock:
            states = Counter(piece.state for piece in self._pieces.values())
        refused = locks.refused
        if refused:
            refused_bytes = sum(one.span.size_bytes for one in refused)
            return f"{refused_bytes >> 20} MiB were refused: {refused[0].why}"
        if states["late"]:
            return f"{states['late']} segments: the driver's call has not returned"
        left = states["waiting"] + states["locking"]
        return f"{left} of {len(self._pieces)} segments are yet to be page-locked" if left else ""

    def say(self) -> None:
        """Tells the log, once, what was refused."""
        why = self.why_not() if self._locks is not None and self._locks.refused else ""
        if why and not self._said:
            log.warning("some of the slab is not page-locked: it is copied through a staging buffer", reason=why)
        self._said = why


def _unregister(piece: _Piece) -> None:
    """In a thread. Its call under way may still register it: then it stays mapped for ever."""
    left = piece.locks.unlock(piece.span)
    for why in left:
        log.warning("a page-lock did not end", reason=why)
    if left or piece.state == "late":
        _never_freed.append(piece.kept)


def address_of(view: memoryview) -> int:
    """Where these bytes lie."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
