"""An exception of a signal handler may come between any two lines: a slot under a copy is still nobody else's."""

import contextlib
import gc
import os
import sys
import time
from types import FrameType
from typing import Any

import pytest

from kvstore_client import Client, FailedPrecondition, devices
from kvstore_client.local import LocalTransport
from kvstore_client.pools import Pools
from tests.conftest import eventually
from tests.gpu.client_engine import Engines, Served, keys_of
from tests.gpu.gpu_nodes import GpuNode

COUNT = 4
LINES = 28
"""Lines of the client's behind the launch of a copy at which the interrupt comes, one after the other."""

WAYS = {
    "device": "",
    "slab": "open:fail=IpcRefused",
    "staged": "open:fail=IpcRefused;register:fail=PageLockRefused",
}


class Interrupt:
    """Raises KeyboardInterrupt as a signal handler would: before a line of the client's, the `line`th after a launch.

    Not at an `except`: what a tracer raises there leaves the interpreter with the exception that was being handled. Nor
    in a finalizer, of which Python ignores what it raises.
    """

    def __init__(self, line: int) -> None:
        self._left, self._launched, self.raised = line, False, False

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name, caller = frame.f_code.co_name, frame.f_back
        if event == "return" and name in ("gather", "scatter"):
            self._launched = True
        elif event == "line" and self._launched and not self.raised and "kvstore_client" in frame.f_code.co_filename:
            finalizer = "__del__" in (name, caller.f_code.co_name if caller is not None else "")
            self._left -= 0 if finalizer or sys.exc_info()[0] is not None else 1
            if self._left == 0:
                self.raised = True
                raise KeyboardInterrupt
        return self._trace


def interrupted(one: Served, line: int, get: bool) -> None:
    """A call that ends by an interrupt, if it has so many lines; its frames are gone behind it."""
    with contextlib.suppress(KeyboardInterrupt), Interrupt(line):
        if get:
            one.ns.get_into(keys_of(one.ns, COUNT, "there"), one.kv.blocks(range(32, 36), stream=one.stream))
        else:
            one.put(COUNT, list(range(COUNT)), name=f"k{line}")


def pools_of(one: Served) -> Pools:
    transport = one.client._transport
    assert isinstance(transport, LocalTransport)
    return transport.pools


def in_use(one: Served) -> bool:
    """Whether memory that a copy may touch is out of everybody's reach."""
    halves = pools_of(one).staging(one.device)._halves
    return bool(one.stats()["kept_for_copies"]) or any(
        half.mark is not None and not half.mark.query() for half in halves
    )


@pytest.mark.timeout(900)  # a call for each line of the client's that it comes by
@pytest.mark.parametrize("way", list(WAYS))
def test_slots_and_buffers_under_a_copy_stay_in_use_wherever_an_interrupt_comes(
    gpu_node: GpuNode, engine: Engines, way: str
) -> None:
    one = engine(gpu_node, timeout_s=1.0, faults=WAYS[way])
    assert one.put(COUNT, list(range(COUNT)), name="there")[0] == COUNT
    if way == "slab":
        one.page_locked()
    for line in range(1, LINES):
        for get in (False, True):
            one.gate = type(one.gate)()
            one.hold_stream()
            interrupted(one, line, get)
            gc.collect()
            assert in_use(one), (line, get)
            one.let_go()
            one.stream.synchronize(10)
            eventually(lambda: not one.stats()["kept_for_copies"])
    eventually(lambda: not gpu_node.stats_of()["granted"])
    assert one.get(COUNT, list(range(40, 44)), name="there")[0] == COUNT


def test_a_forked_child_closes_its_parents_client_at_once_and_makes_its_own(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, timeout_s=20.0)
    assert one.put(COUNT, list(range(COUNT))) == [COUNT, 0, 0, ""]
    one.hold_stream()
    one.ns.get_into(keys_of(one.ns, COUNT), one.kv.blocks(range(32, 32 + COUNT), stream=one.stream))

    with devices._lock, devices.isolated()._lock:  # as if another thread were at it just then
        child = os.fork()
        if not child:
            os._exit(in_the_child(one, gpu_node.endpoint))
    ended: list[int] = []

    def over() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] if pid else [])
        return bool(pid)

    try:
        eventually(over, 15, "the child to end")
    except BaseException:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise
    assert ended == [0]
    one.let_go()
    assert one.put(COUNT, list(range(COUNT)), name="after") == [COUNT, 0, 0, ""]


def in_the_child(one: Served, endpoint: str) -> int:
    """What is wrong there; 0: nothing."""
    try:
        began = time.monotonic()
        one.client.close()
        if time.monotonic() - began > 8:  # far less than the parent's time-out
            return 1
        with Client(endpoint, timeout_s=5.0) as client:
            client.device_stats()
            try:
                one.kv.blocks([0], stream=one.stream)
                client.raw_namespace("child", one.kv.block_bytes).acquire([b"k" * 32], to=f"gpu:{one.device.uuid}")
            except FailedPrecondition as e:
                return 0 if "before a fork" in str(e) else 2
            else:
                return 3
    except BaseException:  # noqa: BLE001  it must not come back into the tests
        return 4
