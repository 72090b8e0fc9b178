"""Events of a HostDevice: counters in a page that processes share.

A page is one memfd with EVENTS_MAX slots of 64 bytes (little-endian, aligned): serial number
(0: free), how often recorded, the last record whose work is done, the pid and start of the
process that recorded last, and whether its exporter has closed it. A closed event's slot is
used again only when the work before its last record is done: who waits for it already still
waits for that work, as in CUDA. An importer maps the page of the exporter. 64-bit stores are
single on the machines we run on, so a slot needs no lock; recording one event in two
processes at once is a race here as it is in CUDA.
"""

import ctypes
import os
import struct
import threading
from collections.abc import Callable

from kvstored_cuda.devices.device import POLL_MAX_S, Mapping, Stream
from kvstored_cuda.devices.errors import DeviceError, InvalidHandle
from kvstored_cuda.devices.faults import FaultPlan
from kvstored_cuda.devices.handles import TOKEN_BYTES, Generation, Handle, start_ticks
from kvstored_cuda.devices.host_memory import TOKEN, map_memory, segment_file, token_of
from kvstored_cuda.devices.host_stream import Awaited, HostStream, Job, Owner, poll_until

EVENTS_MAX = 1024
"""Live events of one device in one process."""

SLOT_BYTES = 64
PAGE_BYTES = EVENTS_MAX * SLOT_BYTES
_INDEX = struct.Struct("<I")


class Slot(ctypes.LittleEndianStructure):
    _fields_ = (
        ("serial", ctypes.c_uint64),
        ("recorded", ctypes.c_uint64),
        ("completed", ctypes.c_uint64),
        ("recorder_pid", ctypes.c_uint64),
        ("recorder_born", ctypes.c_uint64),
        ("closed", ctypes.c_uint64),
    )


def slot_at(page: int, index: int) -> Slot:
    return Slot.from_address(page + index * SLOT_BYTES)


def index_in(token: bytes) -> int:
    """Raises InvalidHandle for a number that no page has."""
    (index,) = _INDEX.unpack_from(token, TOKEN.size)
    if index >= EVENTS_MAX:
        raise InvalidHandle(f"event {index} of a page of {EVENTS_MAX}")
    return int(index)


class EventPage:
    """The page of this process's own events. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = list(range(EVENTS_MAX))[::-1]
        self._closed: list[int] = []
        self._descriptor = segment_file(PAGE_BYTES)
        self._page = map_memory(self._descriptor, PAGE_BYTES)

    @property
    def live(self) -> int:
        with self._lock:
            return EVENTS_MAX - len(self._free) - len(self._closed)

    def take(self, serial: int) -> tuple[Slot, bytes]:
        """A slot and the 64 bytes that name it. Raises DeviceError when there are EVENTS_MAX already."""
        with self._lock:
            self._reclaim()
            if not self._free:
                raise DeviceError(f"{EVENTS_MAX} events are in use")
            index = self._free.pop()
        slot = slot_at(self._page, index)
        slot.serial = 0  # first: who waited for the last one is done, and must not take these counts for its own
        slot.recorded = slot.completed = slot.recorder_pid = slot.recorder_born = slot.closed = 0
        slot.serial = serial
        token = token_of(self._descriptor)[: TOKEN.size] + _INDEX.pack(index)
        return slot, token.ljust(TOKEN_BYTES, b"\0")

    def give_back(self, token: bytes) -> None:
        index = index_in(token)
        slot_at(self._page, index).closed = 1
        with self._lock:
            self._closed.append(index)

    def _reclaim(self) -> None:
        waiting = self._closed
        self._closed = []
        for index in waiting:
            slot = slot_at(self._page, index)
            (self._free if slot.completed >= slot.recorded else self._closed).append(index)

    def close(self) -> None:
        """Again: nothing, since the descriptor may be somebody else's by then."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)  # the mapping stays: a stream may still be writing into it


class HostEvent(Awaited):
    """One of our own (`page`), or one of another process (`mapping` of its page)."""

    def __init__(
        self,
        slot: Slot,
        serial: int,
        plan: FaultPlan,
        owner: Owner,
        release: Callable[[], None],
        hold: Callable[[], Mapping] | None = None,
    ) -> None:
        """release: gives it back, once. hold: one more use of the mapping that the slot lies in, for a wait.

        `handle` is set by the device where the event is to cross.
        """
        self.handle: Handle | None = None
        self._slot, self._serial = slot, serial
        self._plan, self._owner = plan, owner
        self._release, self._hold = release, hold
        self._once = threading.Lock()
        self._closed = False

    def record(self, stream: Stream) -> None:
        self._owner.meet("record")
        self._owner.require_alive()
        slot = self._live()
        if not isinstance(stream, HostStream):
            raise InvalidHandle("a stream of another kind of device")
        mine = Generation.mine()
        slot.recorder_pid, slot.recorder_born = mine.pid, mine.born
        slot.recorded += 1
        due, serial = slot.recorded, self._serial

        def reached() -> None:
            if slot.serial == serial and slot.completed < due:
                slot.completed = due

        stream.enqueue(reached, self._held())

    def query(self) -> bool:
        self._owner.meet("query")
        self._owner.require_alive()
        slot = self._live()
        return self._reached(slot, slot.recorded)

    def waiter(self, give_up: Callable[[], bool]) -> tuple[Job, Job]:
        slot = self._live()
        due = slot.recorded
        return lambda: poll_until(lambda: self._reached(slot, due), give_up, POLL_MAX_S / 4), self._held()

    def _held(self) -> Job:
        """Keeps the slot mapped until it is called."""
        return self._hold().close if self._hold else lambda: None

    def close(self) -> None:
        if self._once.acquire(blocking=False):
            self._closed = True
            self._owner.meet("close_event")
            self._release()

    def _live(self) -> Slot:
        if self._closed or self._slot.closed or self._slot.serial != self._serial:
            raise InvalidHandle(f"event {self._serial} has been closed, here or by its exporter")
        return self._slot

    def _reached(self, slot: Slot, due: int) -> bool:
        if slot.serial != self._serial or slot.completed >= due:  # used again: it was done before that
            return True
        dead = start_ticks(slot.recorder_pid) != slot.recorder_born
        return dead and (self._plan.trusting or slot.completed >= due)
