"""Marks in streams: events behind what was enqueued, made once for a device and used again.

An event that another process may have open must outlive that use, and nobody says when it ends: so events are kept and
recorded anew, never closed while the client is used. Whoever still watches an older record of one only sees it later.
"""

import threading
from collections import deque
from collections.abc import Callable

from kvstored_cuda.devices.device import Device, Event, Stream
from kvstored_cuda.devices.errors import DeviceError, DeviceLost, IpcRefused

FREE_MAX = 64
"""Events of a device that are kept for the next; more are closed."""


class Mark:
    """The end of what was enqueued on a stream when it was made."""

    __slots__ = ("_give_back", "_work", "handle")

    def __init__(self, work: Event | Stream, handle: bytes = b"", give_back: Callable[[], None] | None = None) -> None:
        """`handle`: of an event, for other processes; empty where there is none."""
        self._work, self.handle = work, handle
        self._give_back = give_back

    def query(self) -> bool:
        """Whether that has ended. Raises DeviceLost."""
        return self._work.query()

    def over(self) -> None:
        """Nobody asks it any more."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Marks:
    """Of one device. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: deque[Event] = deque()
        self._closed = threading.Event()
        self.refused = ""
        """Why events are not to be had that other processes can open; "": they are."""

    def after(self, stream: Stream) -> Mark:
        """A mark behind all that is enqueued on the stream now. Raises DeviceLost.

        Where no event can be made or recorded, it is the stream itself, which ends no sooner.
        """
        try:
            event = self._event()
        except DeviceLost:
            raise
        except DeviceError:
            return Mark(stream)
        try:
            event.record(stream)
        except DeviceLost:
            raise
        except DeviceError:
            self._give_back(event)
            return Mark(stream)
        handle = event.handle
        return Mark(event, b"" if handle is None else handle.to_bytes(), lambda: self._give_back(event))

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
            _close(event)
        else:
            self._free.append(event)

    def close(self) -> None:
        """Closes what is not in use; the rest as it comes back. Raises what the device says."""
        self._closed.set()
        while self._free:
            _close(self._free.pop())


def _close(event: Event) -> None:
    try:
        event.close()
    except DeviceLost:
        return  # it went with the device
