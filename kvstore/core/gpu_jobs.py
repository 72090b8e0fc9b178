"""What is to be done on a device: jobs for its workers, and what happened there in numbers that only grow.

Each job of a device is reported once to its `GpuPool`, also after a failure, a deadline of the
worker's own or the loss of the device: what a job names is nobody else's until then (rule 5 of
the shared memory). Jobs that make and drop segments are carried out in the order in which they
came. Slots are references (segment << 32 | slot), in the slab or in the device's memory.
"""

from dataclasses import dataclass, fields
from typing import Any

from kvstore.core.segments import DropSegment, MakeSegment


@dataclass(frozen=True, slots=True)
class CopyUp:
    """Copy a slot of the slab to one of the device, and wait for it; report to `GpuPool.copied`."""

    number: int
    source: int
    target: int
    slot_bytes: int
    length: int


@dataclass(frozen=True, slots=True)
class CopyDown:
    """Copy a slot of the device to one of the slab, and wait for it; report to `GpuPool.copied`."""

    number: int
    source: int
    target: int
    slot_bytes: int
    length: int


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """Open this event and wait until it is complete; close it, and report to `GpuPool.event_ended`.

    What an event of a dead process says is not defined. So it is reported as complete only if the
    process was seen alive after the event had said so; else it is an error that the process is gone.
    There is no deadline: a `StopWatching` of the same number ends it, and then it is reported too.
    """

    number: int
    event: Any
    """As the client named it; the core does not look into it."""


@dataclass(frozen=True, slots=True)
class StopWatching:
    """Nobody waits for that event any more: the report of its `WatchEvent` is due. Not reported itself."""

    number: int


@dataclass(frozen=True, slots=True)
class AwaitQuiet:
    """Find out that nothing of a process that is gone runs on the device; report to `GpuPool.quiet`.

    Its slots, and the segments that it had mapped, are kept until then. With the exit of a process
    the driver ends its contexts, but the exit is seen before that is done, and a kernel that it
    had launched may still write. So the answer is a driver's: that no context of that process is
    left on the device. A worker that cannot tell reports an error, and is asked again.
    """

    number: int
    pid: int
    born: int
    """When that process started, in ticks since boot; 0 where nobody asked."""


GpuJob = CopyUp | CopyDown | WatchEvent | StopWatching | AwaitQuiet | MakeSegment | DropSegment
"""Segments here are memory of the device: `MakeSegment` allocates it, clears it (it may have been another tenant's) and
exports it, and is reported to `GpuPool.made`; `DropSegment` frees it, which no importer has mapped any more."""


@dataclass
class GpuCounts:
    """Of one device since the start."""

    committed: int = 0
    """Blocks that became visible by a client's commit."""
    committed_bytes: int = 0
    commits_failed: int = 0
    """Commits that ended without being visible; those of the next two are among them."""
    events_failed: int = 0
    events_late: int = 0
    """Events that did not come within EVENT_S."""
    removed_pending: int = 0
    """Blocks that were removed before their event came."""
    copied_up: int = 0
    bytes_up: int = 0
    up_failed: int = 0
    """Blocks that a ticket waited for and that did not come."""
    copied_down: int = 0
    bytes_down: int = 0
    down_failed: int = 0
    down_dropped: int = 0
    """Blocks that were to be copied to memory and were not: no room in queue or memory, or gone meanwhile."""
    copies_vain: int = 0
    """Copies whose block was removed, or had come otherwise, while they were under way."""
    evicted_only: int = 0
    """Blocks that went for room and were in no other tier."""
    losses: int = 0
    """Times that the device was lost."""
    lost: int = 0
    """Blocks that only the device had when it was lost."""
    left_behind: int = 0
    """Copies that were under way when it was."""
    out_of_memory: int = 0
    """Segments that could not be made."""
    quiet_asked: int = 0
    """Times that the device was asked whether a dead process has ended there."""

    def add(self, other: "GpuCounts") -> None:
        """Sums, for figures of all devices."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
