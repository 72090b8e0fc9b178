"""Marks in streams: events behind what was enqueued, made once for a device and used again.

An event that another process may have open must outlive that use, and nobody says when it ends: so events are kept and
recorded anew, never closed while the client is used. Whoever still watches an older record of one only sees it later.
"""

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from kvstore_client.asking import Asker
from kvstored.v1.errors import InvalidArgument
from kvstored_cuda.devices.device import Device, Event, Stream
from kvstored_cuda.devices.errors import DeviceError, DeviceLost, IpcRefused
from kvstored_cuda.devices.isolated import Isolated
from kvstored_cuda.launching import stream_address

log = logging.getLogger("kvstore_client")

DEFAULT, PER_THREAD = 0, 2
"""Pointers of the legacy default stream, and cudaStreamPerThread of driver_types.h: another one on each thread."""

FREE_MAX = 64
"""Events of a device that are kept for the next; more are closed."""


class Mark:
    """The end of what was enqueued on a stream when it was made; a stream itself: of what is ever enqueued on it."""

    __slots__ = ("_give_back", "_work", "asker", "handle")

    def __init__(
        self,
        work: Event | Stream,
        handle: bytes = b"",
        give_back: Callable[[], None] | None = None,
        asker: Asker | None = None,
    ) -> None:
        """`handle`: of an event, for other processes; empty where there is none. `asker`: who asks its device."""
        self._work, self.handle, self.asker = work, handle, asker
        self._give_back = give_back

    def query(self) -> bool:
        """Whether that has ended. Raises DeviceLost. Enters the driver: `wait_for` and `Afterwards` have it asked."""
        return self._work.query()

    def over(self) -> None:
        """Nobody asks it any more."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Marks:
    """Of one device. Thread-safe."""

    def __init__(self, device: Device, isolated: Isolated, asker: Asker) -> None:
        self._device, self._isolated, self.asker = device, isolated, asker
        self._free: deque[Event] = deque()
        self._closed = threading.Event()
        self.refused = ""
        """Why events are not to be had that other processes can open; "": they are."""

    def of(self, stream: Stream) -> Mark:
        """The end of all that is enqueued on the stream, now and from now on."""
        return Mark(stream, asker=self.asker)

    def after(self, stream: Stream) -> Mark:
        """A mark behind all that is enqueued on the stream now. Raises DeviceLost.

        Where no event can be made or recorded, it is the stream itself, which ends no sooner.
        """
        try:
            event = self._event()
        except DeviceLost:
            raise
        except DeviceError:
            return self.of(stream)
        try:
            event.record(stream)
        except DeviceLost:
            raise
        except DeviceError:
            self._give_back(event)
            return self.of(stream)
        handle = event.handle
        raw = b"" if handle is None else handle.to_bytes()
        return Mark(event, raw, partial(self._give_back, event), self.asker)

    def _event(self) -> Event:
        try:
            return self._free.pop()
        except IndexError:
            pass
        if not self.refused:
            try:
                return self._device.event()
            except IpcRefused as e:
                self.refused = str(e)
        return self._device.event(interprocess=False)

    def _give_back(self, event: Event) -> None:
        if self._closed.is_set() or len(self._free) >= FREE_MAX:
            self._dispose([event])
        else:
            self._free.append(event)

    def close(self) -> None:
        """Closes what is not in use; the rest as it comes back. Waits for nothing."""
        self._closed.set()
        free = []
        while self._free:
            free.append(self._free.pop())
        if free:
            self._dispose(free)

    def _dispose(self, events: list[Event]) -> None:
        self._isolated.dispose("closing events", partial(_close_all, events), owner=self._device.uuid)


class Uses:
    """Streams on which something is used that has no stream of its own, until `record` marks their ends.

    The default stream is always among them. Thread-safe, and safe in finalizers.
    """

    def __init__(self, marks: Marks, device: Device) -> None:
        self._marks, self._device, self.asker = marks, device, marks.asker
        self._streams: dict[int, tuple[Stream, Any]] = {DEFAULT: (device.wrap_stream(DEFAULT), None)}
        """By pointer, with the caller's object, which would destroy the stream when it goes."""

    def name(self, stream: Any) -> None:
        """It is used on that one (torch's, cupy's, its address). Raises InvalidArgument, and what the device says."""
        address = stream_address(stream)
        if address == PER_THREAD:
            raise InvalidArgument(
                "cudaStreamPerThread is another stream on each thread, so nobody else can wait for it: "
                "name a stream of your own"
            )
        if address not in self._streams:
            self._streams[address] = self._device.wrap_stream(address), stream

    def name_current(self) -> None:
        """On the current streams of torch and of cupy too, where this process uses them; never raises."""
        ordinal = getattr(self._device, "ordinal", None)
        if ordinal is None:
            return
        for current in (_current_of_torch, _current_of_cupy):
            try:
                stream = current(ordinal)
                # A thread's own default stream waits for the legacy one and that for it, which is marked always.
                if stream is not None and stream_address(stream) != PER_THREAD:
                    self.name(stream)
            except Exception as e:  # noqa: BLE001  of another library, in a finalizer
                log.warning("the current stream is not known, and is not waited for: %s", e)

    def record(self) -> list[Mark]:
        """A mark behind what is enqueued on each of them now. Raises DeviceLost."""
        return [self._marks.after(stream) for stream, _ in list(self._streams.values())]


def _current_of_torch(ordinal: int) -> Any:
    torch = sys.modules.get("torch")
    return torch.cuda.current_stream(ordinal) if torch is not None and torch.cuda.is_initialized() else None


def _current_of_cupy(ordinal: int) -> Any:
    cupy = sys.modules.get("cupy")
    return cupy.cuda.get_current_stream(ordinal) if cupy is not None else None


def _close_all(events: list[Event]) -> None:
    for event in events:
        try:
            event.close()
        except DeviceLost:
            return  # they went with the device
        except DeviceError as e:
            log.warning("an event was not closed, and stays with this process: %s", e)
