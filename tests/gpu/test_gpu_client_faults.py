"""What goes wrong with devices, as a client meets it: it goes on by shared memory, and leaves nothing behind."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvstore_client import Client, DeadlineExceeded, FailedPrecondition, admin
from kvstored.v1 import kvstore_pb2 as pb
from kvstored_cuda.devices.errors import DeviceLost, IpcRefused, OtherDriver
from tests.conftest import eventually
from tests.gpu.client_engine import Cache, Engine, Engines, Served, keys_of, namespace_for, use_host_device
from tests.gpu.gpu_nodes import GpuNode

COUNT = 6
CALL_S = 2.0
"""So long that what a call does before it waits for the daemon is nothing beside it, on a slow machine, too."""


def to(node: GpuNode) -> str:
    return f"gpu:{node.uuids[0]}"


def put_and_get(one: Served, name: str = "k", count: int = COUNT) -> None:
    assert one.put(count, list(range(count)), name=name) == [count, 0, 0, ""]
    get(one, name, count)


def get(one: Served, name: str = "k", count: int = COUNT) -> None:
    expected = [one.cache.block([i]).hex() for i in range(count)]
    assert one.get(count, list(range(32, 32 + count)), name=name) == [count, expected]


def committed(node: GpuNode) -> int:
    return int(node.stats_of()["counters"]["committed"])


# -- memory that may not be opened


@pytest.mark.parametrize(
    ("device", "error"),
    [({"faults": "open:fail=IpcRefused"}, IpcRefused), ({"driver": 2}, OtherDriver)],
    ids=["refused", "another driver"],
)
def test_where_memory_may_not_be_opened_blocks_go_by_shared_memory(
    gpu_node: GpuNode, engine: Engines, device: dict[str, Any], error: type[Exception]
) -> None:
    put_and_get(engine(gpu_node), "first")  # by who may
    one = engine(gpu_node, **device)
    with pytest.raises(error, match="through the slab"):
        one.ns.acquire(keys_of(one.ns, COUNT, "first"), to=to(gpu_node))
    put_and_get(one)
    assert committed(gpu_node) == COUNT, "of the other engine"
    eventually(lambda: not gpu_node.stats_of()["granted"])
    assert "through the slab" in one.stats()["pools"][gpu_node.uuids[0]]


def test_where_events_cannot_be_shared_a_put_waits_for_its_copies(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, faults="event:fail=IpcRefused,times=1")
    put_and_get(one)
    assert committed(gpu_node) == COUNT
    assert "on purpose" in one.stats()["devices"][gpu_node.uuids[0]]["events_refused"]


def test_where_no_event_can_be_made_the_stream_is_waited_for(gpu_node: GpuNode, engine: Engines) -> None:
    put_and_get(engine(gpu_node, faults="event:fail=DeviceError"))
    put_and_get(engine(gpu_node, faults="record:fail=DeviceError"), "other")
    assert committed(gpu_node) == 2 * COUNT


def test_memory_that_takes_long_to_open_is_waited_for_by_nobody(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, timeout_s=2.0, faults="open:delay=60,times=1")
    began = time.monotonic()
    assert one.put(COUNT, list(range(COUNT)))[0] in (0, COUNT)
    one.get(COUNT, list(range(32, 32 + COUNT)))
    assert time.monotonic() - began < 20, "not the 60 s that it takes"
    one.device.plan.release()
    eventually(lambda: one.stats()["segments_open"])
    put_and_get(one, "later")
    assert committed(gpu_node) == COUNT


# -- streams that do not come to their copies


def test_a_put_is_visible_when_its_event_has_come_and_not_before(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node)
    one.hold_stream()
    stored: list[Any] = []
    putting = threading.Thread(target=lambda: stored.extend(one.put(COUNT, list(range(COUNT)))))
    putting.start()
    eventually(lambda: gpu_node.stats_of()["commits_pending"] == 1)
    assert one.ns.match(keys_of(one.ns, COUNT)).blocks == 0
    one.let_go()
    putting.join(20)
    assert stored == [COUNT, 0, 0, ""]
    get(one)


def test_a_put_whose_stream_is_late_is_rejected_in_time_and_leaves_nothing(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, timeout_s=2.0)
    put_and_get(one, "first")
    one.hold_stream()
    began = time.monotonic()
    result = one.ns.put(keys_of(one.ns, COUNT), one.kv.blocks(list(range(COUNT)), stream=one.stream))
    assert time.monotonic() - began < 10, "nor the 30 s that the daemon waits for an event"
    assert (result.stored, result.rejected) == (0, COUNT)
    assert isinstance(result.error, DeadlineExceeded)
    assert one.ns.match(keys_of(one.ns, COUNT)).blocks == 0
    get_on_another_stream(one, "first")
    one.let_go()
    eventually(lambda: not gpu_node.stats_of()["commits_pending"])
    eventually(lambda: not one.stats()["kept_for_copies"])
    get(one)


def get_on_another_stream(one: Served, name: str) -> None:
    stream = one.device.stream()
    out = one.kv.blocks(list(range(40, 40 + COUNT)), stream=stream)
    assert one.ns.get_into(keys_of(one.ns, COUNT, name), out) == COUNT
    stream.synchronize(10)


# -- daemons and sessions that end


def test_a_daemon_that_stands_still_is_waited_for_no_longer_than_a_call_may_take(
    gpu_node: GpuNode, engine: Engines
) -> None:
    one = engine(gpu_node, timeout_s=CALL_S)
    put_and_get(one)
    gpu_node.pause()
    try:
        began = time.monotonic()
        assert one.put(COUNT, list(range(COUNT)), name="paused")[0] == 0
        assert time.monotonic() - began < 2 * CALL_S
        began = time.monotonic()
        assert one.get(2, [40, 41])[0] == 0
        assert time.monotonic() - began < 2 * CALL_S
    finally:
        gpu_node.resume()
    eventually(lambda: one.client.health().reachable)
    eventually(lambda: one.put(COUNT, list(range(COUNT)), name="after")[2] == 0)
    get(one, "after")
    eventually(lambda: gpu_node.stats_of()["granted"] == gpu_node.stats_of()["leased"] == 0)


def test_a_client_survives_daemons_that_are_killed_while_it_copies_from_their_pool(
    gpu_node: GpuNode, engine: Engines
) -> None:
    one = engine(gpu_node)
    put_and_get(one)
    expected = [one.cache.block([i]).hex() for i in range(COUNT)]
    for _ in range(3):
        until = time.monotonic() + 0.3
        killed = False
        while not killed or time.monotonic() < until:
            copied, blocks = one.get(COUNT, list(range(32, 32 + COUNT)))
            assert blocks == expected[:copied]
            if not killed and time.monotonic() > until - 0.15:
                gpu_node.kill()
                killed = True
        assert one.get(COUNT, list(range(32, 32 + COUNT))) == [0, []]
        eventually(lambda: one.device.use().opened == 0, what="what was open of the dead daemon to be closed")
        gpu_node.restart()
        eventually(lambda: one.client.health().reachable)
        assert one.put(COUNT, list(range(COUNT))) == [COUNT, 0, 0, ""]
        eventually(lambda: one.get(COUNT, list(range(32, 32 + COUNT))) == [COUNT, expected])
    assert committed(gpu_node), "by the pool of the new one"


def test_what_a_client_held_when_it_was_killed_is_free_again(gpu_node: GpuNode, engine: Engines) -> None:
    dead = Engine(gpu_node.endpoint, gpu_node.uuids[0], "nhd", "bf16", 64)
    try:
        assert dead("put", count=2, pages=[0, 1], name="first")[0] == 2
        dead("hold_stream")
        dead.start("put", count=COUNT, pages=list(range(COUNT)))
        eventually(lambda: gpu_node.stats_of()["commits_pending"] == 1)
    finally:
        dead.close()
    eventually(lambda: gpu_node.stats_of()["commits_pending"] == 0)
    eventually(lambda: gpu_node.stats_of()["granted"] == gpu_node.stats_of()["quarantined"] == 0)
    one = engine(gpu_node)
    assert one.ns.match(keys_of(one.ns, COUNT)).blocks == 0
    put_and_get(one)


def test_a_session_that_was_ended_is_taken_over_with_what_it_holds(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node)
    put_and_get(one)
    lease = one.ns.acquire(keys_of(one.ns, 2), to=to(gpu_node))
    before = [one.device.array(address, one.kv.block_bytes).tobytes() for address in lease.addresses]
    with Client(gpu_node.endpoint, name="admin") as client:
        sessions = [row["id"] for row in client.stats()["sessions"] if row["client"] == "engine"]
        assert len(sessions) == 2
        for number in sessions:
            admin.end_session(client, number)
        admin.evict(client, pb.EvictRequest(all=True, tier=pb.TIER_GPU))
    eventually(lambda: one.client.health().reachable)
    eventually(lambda: gpu_node.stats_of()["leased"] == 2)
    assert [one.device.array(address, one.kv.block_bytes).tobytes() for address in lease.addresses] == before
    lease.release()
    eventually(lambda: gpu_node.stats_of()["leased"] == gpu_node.stats_of()["quarantined"] == 0)
    put_and_get(one, "again")


def test_a_session_that_is_ended_in_a_put_loses_no_slot(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node)
    put_and_get(one, "first")
    one.hold_stream()
    results: list[Any] = []
    putting = threading.Thread(target=lambda: results.append(one.put(COUNT, list(range(COUNT)))))
    putting.start()
    eventually(lambda: gpu_node.stats_of()["commits_pending"] == 1)
    end_sessions(gpu_node)
    one.let_go()
    putting.join(20)
    assert results[0][0] + results[0][1] + results[0][2] == COUNT
    eventually(lambda: gpu_node.stats_of()["granted"] == gpu_node.stats_of()["commits_pending"] == 0)
    eventually(lambda: gpu_node.stats_of()["quarantined"] == 0)
    eventually(lambda: one.put(COUNT, list(range(COUNT)))[2] == 0)
    get(one)
    eventually(lambda: not one.stats()["kept_for_copies"])


def end_sessions(node: GpuNode) -> None:
    with Client(node.endpoint, name="admin") as client:
        for row in client.stats()["sessions"]:
            if row["client"] == "engine":
                admin.end_session(client, row["id"])


def test_a_client_that_may_only_read_gets_pages_by_a_buffer(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node)
    put_and_get(one)
    eventually(lambda: gpu_node.stats_of()["counters"]["copied_down"] == COUNT)
    with Client(gpu_node.endpoint, read_only=True) as client:
        ns = namespace_for(client, one.kv)
        out = one.kv.blocks(list(range(40, 40 + COUNT)), stream=one.stream)
        assert ns.get_into(keys_of(ns, COUNT), out) == COUNT
        one.stream.synchronize(10)
        assert [one.cache.block([40 + i]) for i in range(COUNT)] == [one.cache.block([i]) for i in range(COUNT)]
        assert client.device_stats()["devices"][gpu_node.uuids[0]]["staged_blocks"] == COUNT
        with pytest.raises(FailedPrecondition, match="read-only"):
            ns.acquire(keys_of(ns, COUNT), to=to(gpu_node))


def test_a_device_that_is_lost_and_comes_back_is_used_again(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node)
    put_and_get(one)
    eventually(lambda: gpu_node.stats_of()["counters"]["copied_down"] == COUNT)
    gpu_node.lose()
    get(one)  # by shared memory
    put_and_get(one, "without")
    eventually(lambda: one.stats()["pools"].get(gpu_node.uuids[0]), what="the client to be told of the loss")
    gpu_node.come()
    eventually(lambda: one.stats()["pools"].get(gpu_node.uuids[0]) == "")
    before = committed(gpu_node)
    put_and_get(one, "with")
    assert committed(gpu_node) == before + COUNT
    eventually(lambda: one.stats()["segments_open"] == 1, what="the segments of the old generation to be closed")


# -- memory that the daemon wants back, and the end


def test_memory_that_another_tenant_needs_is_closed(start_gpu_node: Callable[..., GpuNode]) -> None:
    node = start_gpu_node(gpu__size="2MiB")
    one = Served(node.endpoint, node.uuids[0], "nhd", "fp32", 64)
    put_and_get(one, count=24)
    opened = one.stats()["segments_open"]
    assert opened
    device = use_host_device(node.uuids[0])
    cache = Cache("nhd", "fp32", 64, 5)
    kv = cache.kv(device.uuid)
    with Client(node.endpoint, tenant="other") as client:
        ns = namespace_for(client, kv)
        stream = device.stream()

        def stored() -> int:
            ns.put(keys_of(ns, 24), kv.blocks(list(range(24)), stream=stream))
            return committed(node) > 24 + 12

        eventually(stored, 20.0, "the other tenant to have memory of the device")
        out = kv.blocks(list(range(32, 56)), stream=stream)
        assert ns.get_into(keys_of(ns, 24), out) == 24
        stream.synchronize(10)
        assert [cache.block([32 + i]) for i in range(24)] == [cache.block([i]) for i in range(24)]
    one.close()


def test_a_client_that_is_closed_has_nothing_open(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node)
    put_and_get(one)
    eventually(lambda: one.ns.get(keys_of(one.ns, COUNT)), what="blocks in shared memory")
    one.page_locked()
    one.client.close()
    eventually(lambda: one.device.use().nothing, what="nothing to be held of the device")
    eventually(lambda: not [row for row in gpu_node.stats()["sessions"] if row["client"] == "engine"])


def test_a_client_that_is_dropped_has_nothing_open_either(gpu_node: GpuNode) -> None:
    one = Served(gpu_node.endpoint, gpu_node.uuids[0], "nhd", "bf16", 64)
    put_and_get(one)
    device = one.device
    del one
    gc.collect()
    eventually(lambda: device.use().nothing, what="nothing to be held of the device")
    eventually(lambda: not [row for row in gpu_node.stats()["sessions"] if row["client"] == "engine"])


def test_a_lease_outlives_its_client(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node)
    put_and_get(one)
    lease = one.ns.acquire(keys_of(one.ns, 1), to=to(gpu_node))
    one.client.close()
    assert one.device.array(lease.addresses[0], 100).tobytes() == one.cache.block([0])[:100]
    assert gpu_node.stats_of()["leased"] == 1
    lease.release()
    eventually(lambda: not gpu_node.stats_of()["leased"])
    eventually(lambda: one.device.use().nothing, what="nothing to be held of the device")


def test_the_sdk_imports_nothing_of_devices_before_they_are_used() -> None:
    program = "import sys, kvstore_client; print(*sorted({'kvstored_cuda', 'cupy', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
    program = "import sys, kvstore_client.paged; print(*sorted({'cupy', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


# -- calls that hang


def test_closing_that_hangs_holds_up_nobody(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, timeout_s=2.0, faults="close:delay=60")
    put_and_get(one)
    began = time.monotonic()
    one.client.close()
    assert time.monotonic() - began < 20, "not the 60 s that it takes"
    put_and_get(engine(gpu_node), "other")
    one.device.plan.release()
    eventually(lambda: one.device.use().opened == 0)


def test_page_locking_that_hangs_holds_up_nobody(gpu_node: GpuNode, engine: Engines) -> None:
    one = engine(gpu_node, timeout_s=2.0, faults="register:delay=60")
    with Client(gpu_node.endpoint) as client:
        ns = namespace_for(client, one.kv)
        assert ns.put(keys_of(ns, COUNT), [one.cache.block([i]) for i in range(COUNT)]).stored == COUNT
    get(one)
    get(one)
    began = time.monotonic()
    one.client.close()
    assert time.monotonic() - began < 20, "not the 60 s that it takes"
    one.device.plan.release()
    eventually(lambda: one.device.use().nothing)


def test_a_device_that_fails_as_it_copies_costs_a_put_its_blocks_and_raises_in_a_get(
    gpu_node: GpuNode, engine: Engines
) -> None:
    one = engine(gpu_node)
    put_and_get(one)
    one.device.lose("an Xid of a test's")
    result = one.ns.put(keys_of(one.ns, 2, "lost"), one.kv.blocks([1, 2], stream=one.stream))
    assert (result.stored, result.rejected) == (0, 2)
    assert isinstance(result.error, DeviceLost)
    with pytest.raises(DeviceLost):
        one.ns.get_into(keys_of(one.ns, 2), one.kv.blocks([1, 2], stream=one.stream))
    eventually(lambda: gpu_node.stats_of()["leased"] == gpu_node.stats_of()["granted"] == 0)
    put_and_get(engine(gpu_node), "other")
