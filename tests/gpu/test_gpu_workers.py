"""The workers of one device, each alone: with a HostDevice, a slab of memfds, and other processes."""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.core.gpu_jobs import CopyDown, CopyUp
from kvstore.core.segments import DropSegment, MakeSegment
from kvstore.core.store import Store
from kvstore.gpu import copier, device_memory
from kvstore.gpu.copier import Copier, Copy
from kvstore.gpu.device_memory import SegmentMemory
from kvstore.gpu.pagelocks import SlabLocks, address_of
from kvstore.gpu.tasks import Tasks
from kvstore.gpu.watching import Watching
from kvstore.tiers.slab import Slab
from kvstored_cuda.devices import Device, HandleKind
from kvstored_cuda.devices.faults import Fault, FaultPlan
from kvstored_cuda.devices.host_device import HostDevice
from kvstored_cuda.devices.isolated import Isolated
from tests.cuda.device_peer import HOST_UUID, Peer, make_device, pattern, read

MIB = 1 << 20
SLOT = 64 << 10
SEGMENTS = 4
WAIT_S = 60.0


@pytest.fixture(params=["host", "standin", pytest.param("cuda", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> str:
    """Of device: HostDevice, CudaDevice over a stand-in for the driver, and a GPU."""
    return str(request.param)


async def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Waits for it, in turns of the event loop."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.002)


class Rig:
    """A device, a slab of SEGMENTS segments of 1 MiB, and what workers tell."""

    def __init__(self, *faults: Fault, kind: str = "host", **settings: Any) -> None:
        self.plan = FaultPlan(*faults)
        host = kind == "host"
        self.device = HostDevice(HOST_UUID, 64 * MIB, self.plan, **settings) if host else make_device(kind)
        self.slab = Slab(huge_pages=False)
        self.slab.make_all(dict.fromkeys(range(1, SEGMENTS + 1), MIB), lambda done, total: None)
        # Of the store the locks want its segments alone.
        live = {number: SimpleNamespace(size_bytes=MIB) for number in range(1, SEGMENTS + 1)}
        self.store: Store = SimpleNamespace(segments=SimpleNamespace(live=live))  # type: ignore[assignment]
        self.locks = SlabLocks(self.slab, self.store)
        self.isolated = Isolated()
        self.lost: list[str] = []
        self.tasks = Tasks(self.lost.append)
        self.made: dict[int, str] = {}
        self.wanted = True
        self.copied: dict[int, str] = {}
        self.ended: dict[int, str] = {}
        self.memory = SegmentMemory(
            self.device, HandleKind.IPC, self.isolated, self.tasks, made=self._made, lost=self.lost.append
        )
        self.copier = Copier(
            self.device,
            self.slab,
            self.locks,
            self.memory,
            self.isolated,
            self.tasks,
            copied=self._copied,
            ended=lambda: None,
            lost=self.lost.append,
        )
        self.watching = Watching(
            self.device,
            self.isolated,
            self.tasks,
            ended=self._ended,
            changed=lambda: None,
            lost=self.lost.append,
        )

    def _made(self, segment: int, error: str) -> bool:
        assert segment not in self.made, "reported twice"
        self.made[segment] = error
        return self.wanted

    def _copied(self, job: Copy, error: str) -> None:
        assert job.number not in self.copied, "reported twice"
        self.copied[job.number] = error

    def _ended(self, number: int, error: str) -> None:
        assert number not in self.ended, "reported twice"
        self.ended[number] = error

    async def make(self, *segments: int) -> None:
        for segment in segments:
            self.memory.submit(MakeSegment(segment, MIB))
        await until(lambda: all(segment in self.made for segment in segments))

    def host(self, slot: int) -> memoryview:
        return self.slab.bytes_at(slot >> 32, (slot & 0xFFFFFFFF) * SLOT, SLOT)

    def on_device(self, slot: int) -> bytes:
        stream = self.device.stream()
        try:
            return read(self.device, self.memory.address(slot, SLOT), SLOT, stream)
        finally:
            stream.close()


@asynccontextmanager
async def rig(*faults: Fault, **settings: Any) -> AsyncIterator[Rig]:
    made = Rig(*faults, **settings)
    try:
        yield made
    finally:
        made.plan.release()
        await until(lambda: not made.isolated.state().running, "all calls to end")
        await made.locks.close()
        made.device.close()
        made.slab.close()


def lose(device: Device) -> None:
    assert isinstance(device, HostDevice)
    device.lose("an Xid")


def slot(segment: int, number: int) -> int:
    return segment << 32 | number


# -- memory of the device


async def memory_is_made_and_freed(kind: str) -> None:
    async with rig(kind=kind) as of:
        await of.make(1, 2)
        assert of.made == {1: "", 2: ""}
        assert of.device.use().allocations == 2
        assert not any(of.on_device(slot(1, 3)))
        assert of.memory.handle(1) is not None
        of.memory.submit(DropSegment(1))
        await until(lambda: of.device.use().allocations == 1)
        assert of.memory.handle(1) is None


def test_segments_are_made_exported_and_freed(kind: str) -> None:
    asyncio.run(memory_is_made_and_freed(kind))


async def memory_comes_in_order() -> None:
    async with rig() as of:
        await of.make(*range(1, 65))
        assert of.device.memory().free_bytes == 0
        of.memory.submit(DropSegment(5))
        await of.make(65)
        assert of.made[65] == "", "what was freed before is there for what is made after"
        await of.make(66)
        assert "are free" in of.made[66]
        assert of.lost == []


def test_what_is_freed_first_is_there_for_what_is_made_next() -> None:
    asyncio.run(memory_comes_in_order())


async def late_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "MAKE_S", 0.1)
    async with rig(Fault("allocate", delay_s=60)) as of:
        of.wanted = False
        await of.make(1)
        assert "did not return" in of.made[1]
        assert "did not return" in of.lost[0]
        of.memory.close()
        of.plan.release()
        await until(lambda: bool(of.memory.unfreed))
        assert await of.memory.free_again()
        assert of.device.use().allocations == 0


def test_memory_that_comes_after_its_deadline_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(late_memory_is_freed(monkeypatch))


async def kept_while_mapped() -> None:
    async with rig() as of:
        await of.make(1)
        handle = of.memory.handle(1)
        assert handle is not None
        peer = Peer()
        peer.open(handle, of.device.generation)
        of.memory.submit(DropSegment(1))
        await until(lambda: bool(of.memory.unfreed))
        assert not await of.memory.free_again()
        await asyncio.to_thread(peer.close)
        assert await of.memory.free_again()


def test_memory_that_cannot_be_freed_is_kept_and_tried_again() -> None:
    asyncio.run(kept_while_mapped())


# -- copies


async def copies_both_ways(**settings: Any) -> None:
    async with rig(**settings) as of:
        of.locks.begin(of.device)
        await until(lambda: "yet to be" not in of.locks.why_not())
        await of.make(1, 2)
        blocks = range(16)
        for n in blocks:
            of.host(slot(1, n))[:] = pattern(n, SLOT)
            of.copier.submit(CopyUp(n, slot(1, n), slot(2, n), SLOT, SLOT))
        await until(lambda: len(of.copied) == 16)
        assert all(of.on_device(slot(2, n)) == pattern(n, SLOT) for n in blocks)
        for n in blocks:
            of.copier.submit(CopyDown(100 + n, slot(2, n), slot(3, n), SLOT, SLOT - 100))
        await until(lambda: len(of.copied) == 32)
        assert set(of.copied.values()) == {""}
        for n in blocks:
            assert bytes(of.host(slot(3, n))) == pattern(n, SLOT)[:-100] + bytes(100), "more than the block was copied"


@pytest.mark.parametrize("memlock_bytes", [None, 33 * MIB, 0])
def test_copies_have_the_right_bytes_whatever_is_page_locked(memlock_bytes: int | None) -> None:
    asyncio.run(copies_both_ways(memlock_bytes=memlock_bytes))


def test_copies_have_the_right_bytes_on_every_kind_of_device(kind: str) -> None:
    asyncio.run(copies_both_ways(kind=kind))


async def reported_when_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "BATCH_S", 0.2)
    async with rig() as of:
        of.locks.begin(of.device)
        await until(lambda: not of.locks.why_not())
        await of.make(1)
        of.plan.add(Fault("transfer", delay_s=60))
        ctypes.memset(of.memory.address(slot(1, 0), SLOT), 7, SLOT)
        of.copier.submit(CopyDown(1, slot(1, 0), slot(1, 0), SLOT, SLOT))
        await until(lambda: bool(of.lost))
        of.copier.close("lost")
        of.copier.submit(CopyDown(2, slot(1, 1), slot(1, 1), SLOT, SLOT))
        await until(lambda: 2 in of.copied)
        assert of.copied == {2: "lost"}, "a copy is reported that may still write"
        assert bytes(of.host(slot(1, 0))) != bytes([7]) * SLOT
        of.plan.release()
        await until(lambda: 1 in of.copied)
        assert bytes(of.host(slot(1, 0))) == bytes([7]) * SLOT


def test_a_copy_that_takes_too_long_is_reported_when_it_has_ended_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asyncio.run(reported_when_ended(monkeypatch))


async def no_place() -> None:
    async with rig() as of:
        of.locks.begin(of.device)
        await until(lambda: not of.locks.why_not())
        await of.make(1)
        ctypes.memset(of.memory.address(slot(1, 0), SLOT), 7, SLOT)
        of.copier.submit(CopyDown(1, slot(1, 0), slot(1, 0), SLOT, SLOT))
        of.copier.submit(CopyDown(2, slot(1, 1), slot(SEGMENTS + 1, 0), SLOT, SLOT))
        of.copier.submit(CopyDown(3, slot(9, 0), slot(1, 2), SLOT, SLOT))
        await until(lambda: len(of.copied) == 3)
        assert of.copied[1] == ""
        assert bytes(of.host(slot(1, 0))) == bytes([7]) * SLOT
        assert of.copied[2]
        assert of.copied[3]
        assert not of.copier.busy
        assert not of.lost
        of.copier.submit(CopyDown(4, slot(1, 0), slot(1, 3), SLOT, SLOT))
        await until(lambda: of.copied.get(4) == "")


def test_a_copy_that_has_no_place_is_reported_and_those_beside_it_are_made() -> None:
    asyncio.run(no_place())


async def lost_in_the_middle() -> None:
    async with rig() as of:
        of.locks.begin(of.device)
        await until(lambda: not of.locks.why_not())
        await of.make(1)
        ctypes.memset(of.memory.address(slot(1, 0), SLOT), 7, SLOT)
        of.plan.add(Fault("transfer", delay_s=60))
        of.copier.submit(CopyDown(1, slot(1, 0), slot(1, 0), SLOT, SLOT))
        await until(lambda: bytes(of.host(slot(1, 0))[:1]) == b"\x07")
        lose(of.device)
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not of.copied, "half of it is still to be written"
        of.plan.release()
        await until(lambda: 1 in of.copied)
        assert "an Xid" in of.copied[1]
        assert of.lost


def test_a_copy_of_a_device_that_is_lost_is_reported_when_nothing_of_it_runs() -> None:
    asyncio.run(lost_in_the_middle())


# -- page-locks


async def dropped_segments() -> None:
    async with rig(Fault("register", delay_s=60, times=1)) as of:
        of.locks.begin(of.device)
        await until(lambda: of.locks.locked_bytes == 3 * MIB)
        addresses = {number: address_of(of.slab.bytes_at(number, 0, MIB)) for number in range(1, SEGMENTS + 1)}
        (hanging,) = [number for number, address in addresses.items() if not of.locks.covers(address, MIB)]
        other = hanging % SEGMENTS + 1
        of.slab.dropping = of.locks.dropping
        for number in (hanging, other):
            del of.store.segments.live[number]
            of.slab.drop(number)
        await until(lambda: of.device.use().page_locked_bytes == 2 * MIB)
        fresh = of.slab.make(9, MIB), of.slab.make(10, MIB)
        assert addresses[hanging] not in [each.mapping.address for each in fresh], "the driver has it in hands still"
        for each in fresh:
            of.slab.add(each)
            of.locks.added(each.id, MIB)
        await until(lambda: of.device.use().page_locked_bytes == 4 * MIB)
        of.plan.release()
        await until(lambda: not of.isolated.state().running and "yet to be" not in of.locks.why_not())
        await until(lambda: of.device.use().page_locked_bytes == 4 * MIB)
        assert not of.locks.covers(addresses[hanging], 1)
        assert of.locks.why_not() == ""
    assert of.device.use().page_locked_bytes == 0


def test_a_segment_that_is_dropped_while_it_is_page_locked_is_let_go_of() -> None:
    asyncio.run(dropped_segments())


async def another_device_registers() -> None:
    async with rig() as of:
        of.locks.begin(of.device)
        await until(lambda: of.locks.locked_bytes == 4 * MIB)
        of.locks.enter()
        of.locks.end()
        assert of.locks.locked_bytes == 0
        assert "no device" in of.locks.why_not()
        await asyncio.sleep(0.05)
        assert of.device.use().page_locked_bytes == 4 * MIB, "a copy is under way that was told it is page-locked"
        assert not of.locks.wants_device
        of.locks.leave()
        await until(lambda: of.locks.wants_device)
        assert of.device.use().page_locked_bytes == 0
        of.locks.begin(of.device)
        await until(lambda: of.locks.locked_bytes == 4 * MIB)


def test_page_locks_end_with_their_device_once_no_copy_uses_them_and_another_one_begins_anew() -> None:
    asyncio.run(another_device_registers())


# -- events


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer(faults="transfer:delay=60")
    yield made
    made.close()


def session_of(peer: Peer, born: int | None = None) -> Any:
    generation = peer.generation
    return SimpleNamespace(pid=generation.pid, born=generation.born if born is None else born)


def recorded(peer: Peer, *, slow: bool, address: int = 0) -> bytes:
    """An event of the peer's, behind a copy that never ends or behind nothing."""
    peer("event")
    if slow:
        peer("write", address=address, seed=1, size_bytes=SLOT)
    return bytes.fromhex(peer("record"))


async def fifty_handles(peer: Peer) -> None:
    async with rig() as of:
        await of.make(1)
        handle = of.memory.handle(1)
        assert handle is not None
        address = peer.open(handle, of.device.generation)
        for number in range(50):
            of.watching.watch(number, recorded(peer, slow=number == 0, address=address), session_of(peer))
        await until(lambda: of.device.use().opened == 50)
        assert of.ended == {}
        of.plan.add(Fault("close_event", delay_s=60))
        peer.kill()
        for number in range(50):
            of.watching.stop(number)
        assert len(of.ended) == 50
        await until(lambda: of.isolated.state().running == 50)
        assert of.device.use().opened == 50
        of.plan.release()
        await until(lambda: of.device.use().opened == 0, "all handles to be closed")
        assert of.lost == []


def test_the_handles_of_a_dead_process_end_at_none(peer: Peer) -> None:
    """A25, at the worker."""
    asyncio.run(fifty_handles(peer))


async def many_at_once(kind: str, peer: Peer) -> None:
    async with rig(kind=kind) as of:
        event = recorded(peer, slow=False)
        for number in range(200):
            of.watching.watch(number, event, session_of(peer))
        await until(lambda: len(of.ended) == 200)
        assert set(of.ended.values()) == {""}
        await until(lambda: of.device.use().opened == 0)


def test_a_process_may_have_more_commits_than_calls_of_the_driver(kind: str) -> None:
    peer = Peer(kind)
    try:
        asyncio.run(many_at_once(kind, peer))
    finally:
        peer.close()


async def of_another(peer: Peer) -> None:
    async with rig() as of:
        event = recorded(peer, slow=False)
        of.watching.watch(1, event, session_of(peer, born=7))
        of.watching.watch(2, b"no handle", session_of(peer))
        of.watching.watch(3, event, None)
        await until(lambda: len(of.ended) == 3)
        assert "another one" in of.ended[1]
        assert "bytes" in of.ended[2]
        assert "nobody waits" in of.ended[3]
        assert of.device.use().opened == 0


def test_an_event_of_another_process_than_the_session_s_is_refused(peer: Peer) -> None:
    asyncio.run(of_another(peer))


async def after_loss(peer: Peer) -> None:
    async with rig() as of:
        await of.make(1)
        handle = of.memory.handle(1)
        assert handle is not None
        address = peer.open(handle, of.device.generation)
        of.watching.watch(1, recorded(peer, slow=True, address=address), session_of(peer))
        await until(lambda: of.device.use().opened == 1)
        lose(of.device)
        await until(lambda: bool(of.lost))
        of.watching.close("lost")
        of.watching.watch(2, b"", session_of(peer))
        await until(lambda: len(of.ended) == 2)
        assert of.ended == {1: "lost", 2: "lost"}
        await until(lambda: of.device.use().opened == 0)


def test_every_watch_ends_when_the_device_is_lost(peer: Peer) -> None:
    asyncio.run(after_loss(peer))
