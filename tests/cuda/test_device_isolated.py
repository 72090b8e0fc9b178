"""A native call that hangs costs nobody else anything: field fault A25, with real processes and real threads."""

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from kvstored_cuda.devices import Handle
from kvstored_cuda.devices.errors import DeviceTimeout, InvalidHandle, TooManyCalls
from kvstored_cuda.devices.faults import Fault, FaultPlan
from kvstored_cuda.devices.host_device import HostDevice
from kvstored_cuda.devices.isolated import Isolated
from tests.conftest import eventually
from tests.cuda.device_peer import HOST_BYTES, HOST_UUID, Peer
from tests.cuda.standin import block, standin_device

MIB = 1 << 20
BUFFERS = 50
CALL_S = 30.0
HANG_S, BLOCK_S = 60.0, 4.0
HELD_UP_S = 2.0
"""Half of the shortest time that anybody would wait who waits for one of these calls; a slow machine takes less."""


def test_closing_fifty_buffers_of_a_killed_owner_that_hangs_holds_up_nobody(spawn: Callable[..., Peer]) -> None:
    plan = FaultPlan()
    device = HostDevice(HOST_UUID, HOST_BYTES, plan)
    owner, newcomer = spawn(), spawn()
    handles = [_exported(owner) for _ in range(BUFFERS)]
    handle = _exported(newcomer)
    isolated = Isolated()

    async def scene() -> None:
        gaps = Heartbeat()
        mappings = [
            await isolated.call("open", lambda h=one: device.open(h, owner.generation), timeout_s=CALL_S)  # type: ignore[misc]
            for one in handles
        ]
        assert device.use().opened == BUFFERS
        plan.add(Fault("close", delay_s=HANG_S))
        owner.kill()
        for mapping in mappings:
            isolated.dispose("close", mapping.close, owner="the dead one")

        assert isolated.state().abandoned == {"close": BUFFERS}
        began = time.monotonic()
        new = await isolated.call("open", lambda: device.open(handle, newcomer.generation), timeout_s=CALL_S)
        assert time.monotonic() - began < HELD_UP_S
        assert device.use().opened == BUFFERS + 1

        plan.release()  # the hour is over
        await isolated.call("close", new.close, timeout_s=CALL_S)
        assert gaps.longest_s < HELD_UP_S  # what a health check would have waited for

    asyncio.run(scene())
    eventually(lambda: device.use().opened == 0, CALL_S, "the handles to end at 0")
    eventually(lambda: isolated.state().running == 0, CALL_S, "the threads to end")
    state = isolated.state()
    assert (state.waiting, state.abandoned, state.reaped, state.failed_disposals) == (0, {}, BUFFERS, 0)


def test_cuda_closes_that_block_in_the_driver_hold_up_nobody_either() -> None:
    """The same with CudaDevice's own calls: fifty cuIpcCloseMemHandle, each blocking, none with Python's lock."""
    device, owner, newcomer, isolated = standin_device(), Peer("standin"), Peer("standin"), Isolated()

    async def scene() -> None:
        gaps = Heartbeat()
        mappings = [device.open(_exported(owner), owner.generation) for _ in range(BUFFERS)]
        handle = _exported(newcomer)
        owner.kill()
        block(BLOCK_S)
        gaps.longest_s = 0.0
        for mapping in mappings:
            isolated.dispose("close", mapping.close, owner="the dead one")
        began = time.monotonic()
        new = await isolated.call("open", lambda: device.open(handle, newcomer.generation), timeout_s=CALL_S)
        assert time.monotonic() - began < HELD_UP_S
        assert device.use().opened == BUFFERS + 1
        block(0)
        await isolated.call("close", new.close, timeout_s=CALL_S)
        assert gaps.longest_s < HELD_UP_S

    try:
        asyncio.run(scene())
        eventually(lambda: device.use().opened == 0, CALL_S, "the handles to end at 0")
        assert isolated.state().failed_disposals == 0
    finally:
        block(0)
        owner.close()
        newcomer.close()


class Heartbeat:
    """The longest time between two rounds of the running event loop, every 10 ms."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last = time.monotonic()
        self._beat()

    def _beat(self) -> None:
        now = time.monotonic()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now
        asyncio.get_running_loop().call_later(0.01, self._beat)


def _exported(peer: Peer) -> Handle:
    _, raw = peer("allocate", size_bytes=MIB)
    return Handle.from_bytes(bytes.fromhex(raw))


def test_a_call_that_is_late_is_a_timeout_and_its_result_is_closed(spawn: Callable[..., Peer]) -> None:
    plan = FaultPlan(Fault("open", delay_s=HANG_S))
    device, peer, isolated = HostDevice(HOST_UUID, HOST_BYTES, plan), spawn(), Isolated()
    handle = _exported(peer)

    async def scene() -> None:
        with pytest.raises(DeviceTimeout, match="open did not return"):
            await isolated.call(
                "open",
                lambda: device.open(handle, peer.generation),
                timeout_s=0.05,
                late=lambda mapping: mapping.close(),
            )

    asyncio.run(scene())
    assert isolated.state().abandoned == {"open": 1}
    assert isolated.state().oldest_s > 0
    plan.release()
    eventually(lambda: isolated.state().running == 0, CALL_S, "the call to return")
    assert device.use().nothing
    assert isolated.state().timeouts == isolated.state().reaped == 1


def test_results_and_errors_come_back_to_loops_and_to_threads() -> None:
    isolated = Isolated()

    def wrong() -> int:
        raise InvalidHandle("wrong")

    async def scene() -> None:
        assert await isolated.call("right", lambda: 7, timeout_s=CALL_S) == 7
        with pytest.raises(InvalidHandle, match="wrong"):
            await isolated.call("wrong", wrong, timeout_s=CALL_S)

    asyncio.run(scene())
    assert isolated.run("right", lambda: 8, timeout_s=CALL_S) == 8
    with pytest.raises(InvalidHandle, match="wrong"):
        isolated.run("wrong", wrong, timeout_s=CALL_S)
    eventually(lambda: isolated.state().running == 0, CALL_S, "the threads to end")


def test_an_owner_whose_calls_hang_is_refused_more_and_others_are_not() -> None:
    isolated, gate = Isolated(owner_calls_max=3), threading.Event()
    for _ in range(3):
        with pytest.raises(DeviceTimeout):
            isolated.run("close", lambda: gate.wait(HANG_S), timeout_s=0.01, owner="bad")
    with pytest.raises(TooManyCalls, match="3 calls of bad have not returned"):
        isolated.run("open", lambda: 1, timeout_s=CALL_S, owner="bad")
    assert isolated.run("open", lambda: 2, timeout_s=CALL_S, owner="good") == 2
    assert isolated.state().refused == 1
    gate.set()
    eventually(lambda: isolated.state().running == 0, CALL_S, "the calls to return")
    assert isolated.run("open", lambda: 3, timeout_s=CALL_S, owner="bad") == 3


def test_the_process_has_a_bound_over_all_owners() -> None:
    isolated, gate = Isolated(calls_max=2), threading.Event()
    for owner in ("a", "b"):
        with pytest.raises(DeviceTimeout):
            isolated.run("close", lambda: gate.wait(HANG_S), timeout_s=0.01, owner=owner)
    with pytest.raises(TooManyCalls):
        isolated.run("open", lambda: 1, timeout_s=CALL_S, owner="c")
    gate.set()


def test_a_disposal_is_never_refused_and_waits_for_its_owner_alone() -> None:
    isolated, gate, done = Isolated(owner_calls_max=2), threading.Event(), list[int]()
    for _ in range(2):
        isolated.dispose("close", lambda: gate.wait(HANG_S), owner="bad")
    for i in range(10):
        isolated.dispose("close", lambda i=i: done.append(i), owner="bad")  # type: ignore[misc]
    isolated.dispose("close", lambda: done.append(100), owner="good")
    eventually(lambda: done == [100], CALL_S, "the other owner's")
    assert (isolated.state().running, isolated.state().waiting) == (2, 10)
    gate.set()
    eventually(lambda: isolated.state().running == isolated.state().waiting == 0, CALL_S, "all of them")
    assert sorted(done) == [*range(10), 100]


def test_a_disposal_that_fails_is_counted() -> None:
    isolated = Isolated()

    def wrong() -> None:
        raise InvalidHandle("gone")

    isolated.dispose("close", wrong)
    eventually(lambda: isolated.state().running == 0, CALL_S, "it to end")
    assert isolated.state().failed_disposals == 1


class Held:
    """What a caller's frame refers to."""


@pytest.mark.parametrize("late", [False, True], ids=["in time", "too late"])
def test_an_error_keeps_nothing_of_its_caller_once_it_is_dropped(late: bool) -> None:
    """Engines switch the collection of rings off: what a caller holds has to go with its frame."""
    isolated, gate, seen = Isolated(), threading.Event(), list["weakref.ref[Held]"]()

    def caller() -> None:
        held = Held()
        seen.append(weakref.ref(held))

        def wrong() -> None:
            gate.wait(HANG_S)
            raise InvalidHandle(f"wrong: {type(held).__name__}")

        with contextlib.suppress(DeviceTimeout if late else InvalidHandle):
            isolated.run("wrong", wrong, timeout_s=0.01 if late else CALL_S)

    async def loop() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        with contextlib.suppress(InvalidHandle):
            await isolated.call("wrong", fails, timeout_s=CALL_S)
        del held

    def fails() -> None:
        raise InvalidHandle("wrong")

    gc.disable()
    try:
        if not late:
            gate.set()
        caller()
        asyncio.run(loop())
        gate.set()
        eventually(lambda: not any(one() for one in seen), CALL_S, "the callers' frames to go")
    finally:
        gc.enable()


def test_a_caller_that_is_cancelled_leaves_nothing_open() -> None:
    isolated, gate, closed = Isolated(), threading.Event(), list[str]()

    def opened() -> str:
        gate.wait(HANG_S)
        return "a mapping"

    async def scene() -> None:
        task = asyncio.create_task(isolated.call("open", opened, timeout_s=CALL_S, late=closed.append))
        while not isolated.state().running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert isolated.state().abandoned == {"open": 1}
        gate.set()

    asyncio.run(scene())
    eventually(lambda: closed == ["a mapping"], CALL_S, "the late result to be closed")


def test_a_result_that_comes_after_the_loop_is_gone_is_closed() -> None:
    isolated, gate, closed = Isolated(), threading.Event(), list[str]()

    def opened() -> str:
        gate.wait(HANG_S)
        return "a mapping"

    loop = asyncio.new_event_loop()
    task = loop.create_task(isolated.call("open", opened, timeout_s=CALL_S, late=closed.append))
    while not isolated.state().running:
        loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()
    gate.set()
    eventually(lambda: closed == ["a mapping"], CALL_S, "the late result to be closed")
