"""A driver that does not answer whether work has ended: it holds up the call that asks, until its deadline, no others.

What the call used stays out of use meanwhile, and goes back when the driver has answered after all.
"""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore_client.asking import HANGING_MAX
from kvstored_cuda.devices.errors import DeviceTimeout
from kvstored_cuda.devices.faults import Fault
from kvstored_cuda.devices.host_stream import HostStream
from tests.conftest import eventually
from tests.gpu.client_engine import Cache, Served, keys_of, namespace_for, use_host_device
from tests.gpu.gpu_nodes import GpuNode, host_device

COUNT = 4
CALL_S = 2.0
HANG_S = 300.0
IN_TIME_S = 30.0
"""Longer than any call of these tests may take, on a slow machine too, and much shorter than the driver hangs."""

WAYS = {
    "device": "",
    "slab": "open:fail=IpcRefused",
    "staged": "open:fail=IpcRefused;register:fail=PageLockRefused",
}
Engines = Callable[..., Served]


@pytest.fixture
def engine() -> Iterator[Engines]:
    """Engines in this process: `engine(node, timeout_s=CALL_S)`."""
    running: list[Served] = []

    def start(node: GpuNode, timeout_s: float = IN_TIME_S, way: str = "device") -> Served:
        device = {"faults": WAYS[way]}
        running.append(Served(node.endpoint, node.uuids[0], "nhd", "bf16", 64, timeout_s=timeout_s, device=device))
        one = running[-1]
        put_and_get(one, "first")
        if way == "slab":
            one.page_locked()
        return one

    yield start
    for one in running:
        one.gate.set()
        one.device.plan.release()
        one.close()


def put_and_get(one: Served, name: str) -> None:
    """All of it comes, with its own bytes."""
    assert one.put(COUNT, list(range(COUNT)), name=name) == [COUNT, 0, 0, ""]
    expected = [one.cache.block([i]).hex() for i in range(COUNT)]
    assert one.get(COUNT, list(range(32, 32 + COUNT)), name=name) == [COUNT, expected]


def hang(one: Served, call: str = "query", times: int = 1) -> None:
    """The driver does not return from its next calls of that kind; nothing else is to be asked any more."""
    eventually(lambda: not one.stats()["kept_for_copies"])
    one.device.plan.add(Fault(call, delay_s=HANG_S, times=times))


def hanging(one: Served) -> int:
    """Threads that were left in the driver."""
    return int(one.stats()["devices"][one.device.uuid]["queries_hanging"])


def enqueue_a_get(one: Served) -> None:
    """One whose hold is kept for its copies when it returns."""
    out = one.kv.blocks(list(range(32, 32 + COUNT)), stream=one.stream)
    assert one.ns.get_into(keys_of(one.ns, COUNT, "first"), out) == COUNT


def late_put(one: Served, name: str) -> None:
    """One that hangs, and is back by its deadline."""
    began = time.monotonic()
    result = one.ns.put(keys_of(one.ns, COUNT, name), one.kv.blocks(list(range(COUNT)), stream=one.stream))
    assert time.monotonic() - began < IN_TIME_S
    assert (result.stored, result.existing, result.rejected) == (0, 0, COUNT)
    assert isinstance(result.error, DeviceTimeout), result


def nothing_kept(node: GpuNode, one: Served) -> None:
    eventually(lambda: not one.stats()["kept_for_copies"])
    figures = ("granted", "leased", "quarantined")
    eventually(lambda: not any(node.stats_of()[figure] for figure in figures), what="no slot of the device in use")


# -- the call that asks


@pytest.mark.parametrize("way", list(WAYS))
def test_a_put_is_back_by_its_deadline_and_what_it_wrote_to_is_kept(
    gpu_node: GpuNode, engine: Engines, way: str
) -> None:
    one = engine(gpu_node, CALL_S, way)
    hang(one)
    late_put(one, "late")
    halves = one.client._transport.pools.staging(one.device)._halves  # type: ignore[union-attr]
    assert one.stats()["kept_for_copies"] or [half for half in halves if half.mark is not None]
    eventually(lambda: hanging(one) == 1, what="another thread to go on")
    if way == "staged":  # the buffer is not to be had
        late_put(one, "meanwhile")
    else:
        put_and_get(one, "meanwhile")
    assert hanging(one) == 1
    one.device.plan.release()
    eventually(lambda: not hanging(one), what="the driver to be back")
    nothing_kept(gpu_node, one)
    put_and_get(one, "after")


def test_where_streams_are_asked_for_want_of_events_the_same_holds(
    gpu_node: GpuNode, engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(gpu_node, CALL_S)
    one.device.plan.add(Fault("record", fail=DeviceTimeout))
    query = HostStream.query

    def asked(stream: HostStream) -> bool:
        """As an event's: with what the plan has in store for it."""
        one.device.meet("query")
        return query(stream)

    monkeypatch.setattr(HostStream, "query", asked)
    hang(one)
    late_put(one, "late")
    eventually(lambda: hanging(one) == 1)
    put_and_get(one, "meanwhile")
    one.device.plan.release()
    nothing_kept(gpu_node, one)


def test_a_get_by_a_buffer_is_back_by_its_deadline(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, CALL_S, "staged")
    hang(one)  # a half of the buffer is asked for before it is filled again
    for _ in range(20):
        began = time.monotonic()
        with pytest.raises(DeviceTimeout):
            enqueue_a_get(one)
        assert time.monotonic() - began < IN_TIME_S
    one.device.plan.release()
    eventually(lambda: one.put(1, [0], name="again")[0] == 1, what="the buffer to be there again")
    put_and_get(one, "after")


# -- others


@pytest.mark.parametrize("call", ["query", "record"])
def test_ends_of_holds_on_another_device_are_told(
    start_gpu_node: Callable[..., GpuNode], engine: Engines, call: str
) -> None:
    node = start_gpu_node(devices=[host_device(0), host_device(1)])
    one = engine(node)
    device, cache = use_host_device(node.uuids[1]), Cache("nhd", "bf16", 64, 7)
    kv, stream = cache.kv(device.uuid), device.stream()
    ns = namespace_for(one.client, kv, "second")
    assert ns.put(keys_of(ns, COUNT), kv.blocks(range(COUNT), stream=stream)).stored == COUNT
    if call == "query":
        hang(one, times=-1)
        enqueue_a_get(one)
    else:
        lease = one.ns.acquire(keys_of(one.ns, 1, "first"), to=f"gpu:{one.device.uuid}")
        hang(one, "record", times=-1)
        del lease
    for _ in range(3):
        assert ns.get_into(keys_of(ns, COUNT), kv.blocks(range(32, 32 + COUNT), stream=stream)) == COUNT
        eventually(lambda: not node.stats_of(node.uuids[1])["leased"], what="the other device's hold to end")
    assert ns.put(keys_of(ns, COUNT, "more"), kv.blocks(range(COUNT), stream=stream)).stored == COUNT
    assert node.stats_of()["leased"], "the driver has not said that this one has ended"
    one.device.plan.release()
    nothing_kept(node, one)
    stream.close()


@pytest.mark.parametrize("call", ["query", "record"])
def test_ends_of_holds_on_the_same_device_are_told_and_puts_go_on(
    gpu_node: GpuNode, engine: Engines, call: str
) -> None:
    one = engine(gpu_node)
    lease = one.ns.acquire(keys_of(one.ns, 1, "first"), to=f"gpu:{one.device.uuid}")
    hang(one, call)
    del lease
    eventually(lambda: hanging(one) == 1)
    for number in range(3):
        put_and_get(one, f"meanwhile{number}")
        eventually(lambda: gpu_node.stats_of()["leased"] == 1, what="all holds to end but the one that is not known of")
    assert one.stats()["kept_for_copies"] == 1
    one.device.plan.release()
    nothing_kept(gpu_node, one)
    assert not hanging(one)


def test_a_driver_that_answers_nothing_takes_a_bounded_number_of_threads(gpu_node: GpuNode, engine: Engines) -> None:
    before = set(threading.enumerate())

    def asking() -> int:
        return sum(thread.name == "kvstore-afterwards" and thread not in before for thread in threading.enumerate())

    one = engine(gpu_node, CALL_S)
    hang(one, times=-1)
    for _ in range(HANGING_MAX + 4):
        enqueue_a_get(one)
    eventually(lambda: hanging(one) == HANGING_MAX, 60.0)
    late_put(one, "late")
    assert asking() == HANGING_MAX + 1
    assert gpu_node.stats_of()["leased"]
    one.device.plan.release()
    nothing_kept(gpu_node, one)
    eventually(lambda: asking() == 1, what="one thread to go on")
    put_and_get(one, "after")


# -- the end


def test_a_client_is_closed_in_time_and_leaves_when_the_driver_has_answered(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, CALL_S)
    hang(one, times=-1)
    enqueue_a_get(one)
    began = time.monotonic()
    one.client.close()
    assert time.monotonic() - began < IN_TIME_S
    assert gpu_node.stats_of()["leased"], "its kernel may read there"
    one.device.plan.release()
    eventually(lambda: one.device.use().nothing, what="nothing to be held of the device")
    eventually(lambda: not [row for row in gpu_node.stats()["sessions"] if row["client"] == "engine"])


def test_an_event_whose_closing_hangs_keeps_nothing_else_open(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, CALL_S, "slab")
    hang(one, "close_event", times=-1)
    one.client.close()
    eventually(lambda: not one.device.use().page_locked_bytes, what="shared memory not to be page-locked any more")
    eventually(lambda: not [row for row in gpu_node.stats()["sessions"] if row["client"] == "engine"])
