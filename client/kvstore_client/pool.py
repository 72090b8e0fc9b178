"""The daemon's memory on one device, captured for one call: one session, one generation of the memory."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvstore_client import devices
from kvstore_client.device_commits import DeviceCommit
from kvstore_client.device_session import DeviceSession
from kvstore_client.holdings import DeviceHold, Holdings, Key
from kvstore_client.loads import TURN_MS, answer_s
from kvstore_client.stream import close_all
from kvstore_client.transport import Identity
from kvstore_client.waiting import seconds_left
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import FailedPrecondition, Unavailable
from kvstored_cuda.devices.device import Device
from kvstored_cuda.devices.errors import (
    DeviceLost,
    DeviceTimeout,
    InvalidHandle,
    IpcRefused,
    OtherDriver,
    StaleHandle,
    TooManyCalls,
)
from kvstored_cuda.devices.handles import Handle

if TYPE_CHECKING:
    from kvstore_client.pools import Pools

OPEN_S = 5.0
"""For one segment to be opened; what takes longer goes on behind, and its blocks are read from shared memory."""

OPENING_S = 0.001
"""Between two looks whether another thread has opened it."""

MEANS = (IpcRefused, OtherDriver, DeviceLost)
"""Errors after which nothing of that device can be opened here for a while."""


class Pool:
    """The daemon's memory on one device, for one call: one session, one generation. Raises as calls of a session do."""

    def __init__(self, pools: "Pools", session: DeviceSession, device: Device, found: pb.Device) -> None:
        self.pools, self.session, self.device = pools, session, device
        self.key: Key = (found.uuid, found.generation)
        self._page_bytes = max(found.page_bytes, 1)

    def _s(self, until: float) -> float:
        """How long the daemon has to answer: one that does not costs the session."""
        return answer_s(self.session, until)

    def slot_bytes(self, block_bytes: int) -> int:
        """Distance between slots of such blocks."""
        return -(-block_bytes // self._page_bytes) * self._page_bytes

    def _asked(self, call: Callable[[], Any]) -> Any:
        """What it answers; where the memory is of another generation by now, that is looked up for the next call."""
        try:
            return call()
        except FailedPrecondition as e:
            self.session.ask_devices(self.session.timeout_s, time.monotonic())
            if self.session.is_now(self.key):
                raise
            raise Unavailable(f"device {self.key[0]} has lost its memory meanwhile: {e}") from e
        except Unavailable:
            self.session.told_at = 0.0
            self.pools.wake()
            raise

    def reserve(self, ns: Identity, count: int, until: float) -> DeviceHold:
        """Slots to write to, at least one; the hold gives back those that no commit takes."""
        number = self.session.number_of(ns, self._s(until))
        request = pb.ReserveRequest(namespace_id=number, count=count)
        granted: DeviceHold = self._asked(lambda: self.session.grant(self.key, request, self._s(until)))
        return granted

    def acquire(self, ns: Identity, keys: Sequence[bytes], until: float) -> tuple[list[int], DeviceHold | None]:
        """The leading run that is on the device, and what holds it."""
        number = self.session.number_of(ns, self._s(until))
        request = pb.AcquireRequest(namespace_id=number, keys=keys)
        held: tuple[list[int], DeviceHold | None] = self._asked(
            lambda: self.session.lease(self.key, request, self._s(until))
        )
        return held

    def commit(self, request: pb.CommitRequest, event: bytes, hold: DeviceHold, until: float) -> DeviceCommit:
        """Begins it; with no event it is over at once."""
        whole = pb.DeviceCommitRequest(commit=request, event=event)
        begun: DeviceCommit = self._asked(lambda: self.session.commit_to(self.key, whole, hold, self._s(until)))
        return begun

    def ended(self, commit: DeviceCommit, until: float) -> bool:
        """Whether its end is known in time; else the client's thread goes on asking."""
        left_s = TURN_MS / 1000
        try:
            while left_s > 0 and not commit.ask(left_s, self._s(until)):
                left_s = min(until - time.monotonic(), TURN_MS / 1000)
        finally:
            if not commit.over:
                self.later(commit)
        return commit.over

    def later(self, commit: DeviceCommit) -> None:
        """Nobody waits for it: the client's thread asks how it ends, and gives back what is left of its slots."""
        self.session.holdings.unsettled.append(commit)

    def prefetch(self, request: pb.PrefetchRequest, timeout_s: float) -> pb.PrefetchReply:
        begun: pb.PrefetchReply = self._asked(lambda: self.session.ask(self.key, timeout_s, prefetch=request).prefetch)
        return begun

    def addresses(self, slots: Sequence[int], block_bytes: int, until: float) -> list[int]:
        """Where slots lie in this process, which holds them. Opens segments at first sight. Raises DeviceError."""
        slot_bytes = self.slot_bytes(block_bytes)
        base = {segment: self._base(segment, until) for segment in dict.fromkeys(slot >> 32 for slot in slots)}
        return [base[slot >> 32] + (slot & 0xFFFFFFFF) * slot_bytes for slot in slots]

    def _base(self, segment: int, until: float) -> int:
        held = self.session.holdings
        for left in (True, False):
            mapping = held.opened.get(self.key, {}).get(segment)
            if mapping is not None:
                return mapping.address
            try:
                return self._open(held, segment, until)
            except (InvalidHandle, StaleHandle):
                if not left:  # a fresh handle was refused as well
                    raise
            except MEANS as e:
                self.pools.refuse(self.key[0], e)
                raise devices.explained(e) from e
        raise AssertionError("the second try answers or raises")

    def _open(self, held: Holdings, segment: int, until: float) -> int:
        place = (self.key, segment)
        pause = threading.Event()
        while place in held.opening and time.monotonic() < until:  # by another thread
            pause.wait(OPENING_S)
        with held.lock:
            mapping = held.opened.get(self.key, {}).get(segment)
            if mapping is not None:
                return mapping.address
            if place in held.opening or place in held.closing:
                raise DeviceTimeout(f"segment {segment} of device {self.key[0]} is being opened, or closed")
            held.opening.add(place)
        try:
            handle = self._asked(lambda: self.session.handles(self.key, [segment], self._s(until))).get(segment)
        except BaseException:
            held.opening.discard(place)
            raise
        if handle is None:
            held.opening.discard(place)
            raise Unavailable(f"segment {segment} of device {self.key[0]} is gone")
        return self._map(held, segment, handle, until)

    def _map(self, held: Holdings, segment: int, handle: Handle, until: float) -> int:
        place, exporter = (self.key, segment), self.session.exporter
        assert exporter is not None, "a session without devices has no pools"

        def work() -> int:
            """Also where nobody waits any more: the next one finds it open."""
            try:
                mapping = self.device.open(handle, exporter)
                with held.lock:
                    held.opened.setdefault(self.key, {})[segment] = mapping
                return mapping.address
            finally:
                held.opening.discard(place)
                if handle.descriptor >= 0:
                    close_all([handle.descriptor])

        timeout_s = min(OPEN_S, seconds_left(until))
        try:
            return devices.isolated().run("opening a segment", work, timeout_s=timeout_s, owner=self.key[0])
        except TooManyCalls:
            held.opening.discard(place)
            if handle.descriptor >= 0:
                close_all([handle.descriptor])
            raise
