"""Shared memory that a device may copy from and to by itself: page-locked in the background, and let go in time.

A segment that is page-locked is mapped as long as that lasts, so each is unlocked when its session does not use it any
more, and when no copy does. What is refused (the memlock limit, a container, WSL) is staged: see staging.py.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

from kvstored.mapping import Mapping
from kvstored_cuda.devices.device import Device
from kvstored_cuda.devices.isolated import Isolated
from kvstored_cuda.devices.pagelock import PageLocks, Span

log = logging.getLogger("kvstore_client")


class _Segment:
    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.uses = 0
        self.going = False

    @property
    def span(self) -> Span:
        return Span(self.mapping.address, self.mapping.size_bytes)


class SlabUse:
    """One copy's use of a segment, from before it is enqueued until it has ended; `__del__` ends it."""

    __slots__ = ("_locks", "_segment")

    def __init__(self, locks: "SlabLocks", segment: _Segment) -> None:
        self._locks, self._segment = locks, segment

    def __del__(self) -> None:
        self._locks.ended(self._segment)


class SlabLocks:
    """Of one client and device. Thread-safe."""

    def __init__(self, device: Device, isolated: Isolated) -> None:
        self._locks = PageLocks(device)
        self._isolated = isolated
        self._owner = device.uuid
        self._lock = threading.RLock()
        self._segments: dict[int, _Segment] = {}
        self._ended: deque[_Segment] = deque()
        """Uses that have ended and are not counted yet: finalizers only append."""
        self._closed = False
        self._said = False

    def follow(self, mappings: Iterable[Mapping]) -> None:
        """Page-locks these in the background, and lets go of all others that no copy uses. Waits for nothing."""
        wanted = {mapping.address: mapping for mapping in mappings}
        with self._lock:
            self._count()
            if self._closed:
                wanted = {}
            new = [mapping for address, mapping in wanted.items() if address not in self._segments]
            for mapping in new:
                self._segments[mapping.address] = _Segment(mapping)
            going = [one for one in self._segments.values() if self._may_go(one, wanted)]
            for segment in going:
                segment.going = True
        for read_only in (False, True):
            spans = [Span(one.address, one.size_bytes) for one in new if one.writable is not read_only]
            if spans:
                self._locks.lock(spans, 0.0, read_only)
        for segment in going:
            self._isolated.dispose("ending a page-lock", partial(self._let_go, segment), owner=self._owner)
        self._say()

    def _may_go(self, segment: _Segment, wanted: dict[int, Mapping]) -> bool:
        if segment.going or segment.uses or wanted.get(segment.mapping.address) is segment.mapping:
            return False
        return self._settled(segment)

    def _settled(self, segment: _Segment) -> bool:
        """Whether its page-locking has ended, one way or the other."""
        span = segment.span
        refused = {refusal.span.address for refusal in self._locks.refused}
        return self._locks.covers(span.address, span.size_bytes) or span.address in refused

    def _let_go(self, segment: _Segment) -> None:
        for why in self._locks.unlock(segment.span):
            log.warning("%s", why)
        with self._lock:
            if self._segments.get(segment.mapping.address) is segment:
                del self._segments[segment.mapping.address]

    def use(self, mapping: Mapping) -> SlabUse | None:
        """Until it is dropped, all of the segment may be copied by the device; None where it may not (yet)."""
        with self._lock:
            segment = self._segments.get(mapping.address)
            if segment is None or segment.going or segment.mapping is not mapping:
                return None
            if not self._locks.covers(mapping.address, mapping.size_bytes):
                return None
            segment.uses += 1
            return SlabUse(self, segment)

    def ended(self, segment: _Segment) -> None:
        """A copy's use of it. Safe in finalizers."""
        self._ended.append(segment)

    def _count(self) -> None:
        """With the lock held."""
        while self._ended:
            self._ended.popleft().uses -= 1

    @property
    def any(self) -> bool:
        """Whether the device may copy from and to some of it."""
        return self._locks.locked_bytes > 0

    def state(self) -> dict[str, Any]:
        """For people: bytes page-locked, and why the others are not."""
        return {
            "page_locked_bytes": self._locks.locked_bytes,
            "page_lock_refused": sorted({refusal.why for refusal in self._locks.refused}),
        }

    def _say(self) -> None:
        refused = self._locks.refused
        if refused and not self._said:
            self._said = True
            log.warning(
                "%d segments of shared memory cannot be page-locked for device %s, and are copied through a staging "
                "buffer: %s",
                len(refused),
                self._owner,
                refused[0].why,
            )

    def close(self) -> bool:
        """Lets go of all that no copy uses; whether nothing is left."""
        self._closed = True
        self.follow(())
        with self._lock:
            return not self._segments
