"""What goes wrong with devices and with those who use them, and what it costs everybody else: nothing."""

import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from kvstored.v1 import errors
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import eventually
from tests.gpu.gpu_nodes import GpuNode, host_device
from tests.gpu.raw_engine import EngineProcess, RawEngine, bytes_of
from tests.wire import Wire

Start = Callable[..., GpuNode]
Raw = Callable[..., RawEngine]
Process = Callable[..., EngineProcess]

HEALTH_S, HANGS_S, ASKED = 0.5, 60.0, 5
LATE_S = 2.0
"""A limit of the daemon's for calls that hang; those that do not have the time on a slow machine, too."""


def healthy_in_time(asking: Wire) -> None:
    """The best of several counts, for this process may stand still itself; none waits for what hangs."""
    took = []
    for _ in range(ASKED):
        began = time.monotonic()
        assert asking.call(health=pb.HealthRequest()).health.healthy
        took.append(time.monotonic() - began)
    assert min(took) < HEALTH_S
    assert max(took) < HANGS_S / 6


def put_and_get(engine: RawEngine, start: int, count: int = 4) -> None:
    """By way of the device; all have their own bytes."""
    numbers = range(start, start + count)
    ended = engine.put(numbers)
    assert ended.state == pb.TICKET_DONE, ended.why
    assert engine.get(numbers) == [bytes_of(number) for number in numbers]


# -- field fault A25: cleaning up after a dead engine hangs


def test_a_dead_engine_whose_buffers_hang_as_they_are_closed_costs_nobody_anything(
    start_gpu_node: Start, raw_engine: Raw, engine_process: Process
) -> None:
    """A25: 50 buffers of a process that is killed, and closing each of them takes 60 s."""
    node = start_gpu_node()
    dead = engine_process(node, faults="transfer:delay=60")
    assert dead("more", 49) == 50
    for number in range(50):
        dead("begin_put", [number], engine=number)
    eventually(lambda: node.stats_of()["commits_pending"] == 50)
    node.faults("close_event:delay=60")
    dead.kill()
    eventually(lambda: node.stats_of()["calls_hanging"] == 50)
    with Wire(node.socket) as asking:
        healthy_in_time(asking)
    began = time.monotonic()
    put_and_get(raw_engine(node), 100)
    assert time.monotonic() - began < HANGS_S / 3, "a new engine waits for what a dead one has left"
    eventually(lambda: not node.stats_of()["quarantined"])
    node.faults("")
    eventually(lambda: node.stats_of()["calls_hanging"] == 0)
    assert node.stats_of()["commits_pending"] == 0


def test_an_event_that_does_not_answer_holds_up_no_other_process(
    start_gpu_node: Start, raw_engine: Raw, engine_process: Process
) -> None:
    node = start_gpu_node()
    slow = engine_process(node, faults="transfer:delay=60")
    slow("begin_put", [1])
    eventually(lambda: node.stats_of()["commits_pending"] == 1)
    node.faults("query:delay=60,times=1")
    eventually(lambda: node.stats_of()["calls_hanging"] == 1)
    put_and_get(raw_engine(node), 100)
    assert node.stats_of()["trouble"] == ""
    node.faults("")
    eventually(lambda: node.stats_of()["calls_hanging"] == 0)


def test_a_commit_whose_event_cannot_be_opened_in_time_fails_and_says_so(
    start_gpu_node: Start, raw_engine: Raw
) -> None:
    node = start_gpu_node(limits={"watching.OPEN_S": LATE_S})
    engine = raw_engine(node)
    node.faults("open_event:delay=60,times=1")
    ended = engine.put([1])
    assert ended.state == pb.TICKET_FAILED
    assert "did not return" in ended.why
    node.faults("")
    put_and_get(engine, 10)
    eventually(lambda: node.stats_of()["calls_hanging"] == 0)


# -- engines that die


@pytest.mark.parametrize("trusting", ["", "; trusting"])
def test_what_an_event_of_a_dead_process_says_makes_nothing_visible(
    start_gpu_node: Start, raw_engine: Raw, engine_process: Process, trusting: str
) -> None:
    """CUDA does not define what it says; `trusting`: that all is done."""
    node = start_gpu_node([host_device(faults=f"query:delay=0{trusting}")])
    other = raw_engine(node)
    dead = engine_process(node, faults="transfer:delay=60")
    ticket = dead("begin_put", [1, 2, 3])
    assert ticket
    eventually(lambda: node.stats_of()["commits_pending"] == 1)
    dead.kill()
    eventually(lambda: node.stats_of()["commits_pending"] == 0)
    eventually(lambda: node.stats_of()["quarantined"] == node.stats_of()["granted"] == 0)
    assert other.acquire([1, 2, 3]) == []
    assert node.stats_of()["counters"]["committed"] == 0
    assert node.stats_of()["counters"]["quiet_asked"] >= 1


def test_what_a_killed_engine_held_is_free_again(
    start_gpu_node: Start, raw_engine: Raw, engine_process: Process
) -> None:
    node = start_gpu_node()
    raw_engine(node).put(range(6))
    dead = engine_process(node)
    assert len(dead("hold", list(range(6)))) == 6
    assert node.stats_of()["leased"] == 6
    dead.kill()
    eventually(lambda: node.stats_of()["leased"] == 0)


# -- memory of the device


def test_a_device_without_memory_is_a_state_that_ends(start_gpu_node: Start, raw_engine: Raw) -> None:
    node = start_gpu_node([host_device(faults="allocate:fail=OutOfDeviceMemory")])
    engine = raw_engine(node)
    with pytest.raises(errors.ResourceExhausted):
        engine.reserve(1)
    assert "allocate" in node.stats_of()["no_memory"]
    assert "cannot grow" in node.degraded()[0]
    assert node.stats()["daemon"]["healthy"]
    node.faults("")

    def granted() -> list[int]:
        try:
            return engine.reserve(1)
        except errors.ResourceExhausted:
            return []

    (slot,) = eventually(granted)
    engine.ask(abort=pb.AbortRequest(slots=[slot]))
    put_and_get(engine, 10)
    eventually(lambda: not node.degraded())


def test_a_device_that_runs_out_of_memory_later_goes_on_with_what_it_has(
    start_gpu_node: Start, raw_engine: Raw
) -> None:
    node = start_gpu_node([host_device(size_bytes=1 << 20)], gpu__size="4MiB")
    engine = raw_engine(node)
    for start in range(0, 80, 8):
        put_and_get(engine, start, 8)
        eventually(lambda: not node.stats_of()["copying"])
    stats = node.stats_of()
    assert stats["counters"]["out_of_memory"] >= 1
    assert stats["used_bytes"] <= 1 << 20
    assert stats["counters"]["evicted"] >= 80 - 16
    assert stats["counters"]["evicted_only"] == 0


# -- a device that is lost


def test_a_lost_device_takes_its_blocks_along_and_nothing_else(
    start_gpu_node: Start, raw_engine: Raw, engine_process: Process
) -> None:
    node = start_gpu_node([host_device(0), host_device(1)], server__http="127.0.0.1:0")
    engine, other = raw_engine(node), raw_engine(node, uuid=node.uuids[1])
    put_and_get(engine, 0)
    put_and_get(other, 50)
    eventually(lambda: node.stats_of()["counters"]["copied_down"] == 4)
    node.lose(why="Xid 79")
    assert "Xid 79" in node.stats_of()["trouble"]
    with pytest.raises(errors.Unavailable, match="out of use"):
        engine.reserve(1)
    put_and_get(other, 60)
    assert len(engine.tiers(range(4))) == 4  # memory has them
    assert node.stats()["daemon"]["healthy"]
    assert any("Xid 79" in why for why in node.degraded())
    with urllib.request.urlopen(f"{node.http_url}/readyz", timeout=10) as answer:
        assert "degraded: device" in answer.read().decode()
    eventually(lambda: node.stats_of()["blocks"] == 0)
    node.come()
    assert node.stats_of()["generation"] == 2
    assert node.degraded() == []
    with pytest.raises(errors.FailedPrecondition, match="generation"):
        engine.reserve(1)
    again = raw_engine(node)
    assert again.acquire(range(4)) == []
    assert again.prefetch(range(4)).loaded == 4
    assert again.get(range(4)) == [bytes_of(number) for number in range(4)]
    put_and_get(again, 100)


def test_a_commit_that_waits_ends_when_its_device_is_lost(start_gpu_node: Start, raw_engine: Raw) -> None:
    from kvstored_cuda.devices.faults import Fault, FaultPlan
    from kvstored_cuda.devices.host_device import HostDevice

    node, plan = start_gpu_node(), FaultPlan(Fault("transfer", delay_s=60))
    engine = raw_engine(node, device=HostDevice(node.uuids[0], 64 << 20, plan))
    slots = engine.reserve(2)
    ticket = engine.commit(slots, [1, 2], engine.write(slots, [1, 2]))
    eventually(lambda: node.stats_of()["commits_pending"] == 1)
    node.lose()
    ended = engine.ticket(ticket, 20.0)  # the daemon waits 30 s for an event that does not come
    assert ended.state == pb.TICKET_FAILED
    assert "out of use" in ended.why
    plan.release()


def carrier_of(node: GpuNode) -> dict[str, Any]:
    """The session that has slots of memory which the device's copies write to."""
    return dict(next(row for row in node.stats()["sessions"] if row["client"].startswith("gpu ")))


def test_a_device_whose_copies_hang_is_lost_and_its_slots_stay_until_they_end(
    start_gpu_node: Start, raw_engine: Raw
) -> None:
    node = start_gpu_node(limits={"copier.BATCH_S": LATE_S})
    engine = raw_engine(node)
    node.faults("transfer:delay=60")
    assert engine.put(range(3)).state == pb.TICKET_DONE
    eventually(lambda: node.stats_of()["counters"]["losses"] == 1)
    stats = node.stats_of()
    assert stats["counters"]["left_behind"] >= 1
    assert stats["calls_hanging"] >= 1
    assert node.stats()["daemon"]["healthy"]
    # Slots of memory are the hanging copies' still: the daemon's own session has them.
    assert carrier_of(node)["granted_slots"] == stats["counters"]["left_behind"]
    node.faults("")
    eventually(lambda: node.stats_of()["calls_hanging"] == 0)
    eventually(lambda: carrier_of(node)["granted_slots"] == 0)
    eventually(lambda: not node.stats_of()["trouble"])
    put_and_get(raw_engine(node), 10)


def test_memory_of_a_device_that_only_hung_is_freed_when_its_clients_are_gone(
    start_gpu_node: Start, raw_engine: Raw, engine_process: Process
) -> None:
    node = start_gpu_node(limits={"device_memory.MAKE_S": LATE_S})
    engine = engine_process(node)
    assert engine("put", [1, 2])["state"] == pb.TICKET_DONE
    node.faults("allocate:delay=60,times=1")
    other = raw_engine(node, block_bytes=4096)

    def refused() -> bool:
        """At first it is only told that memory is being made ready."""
        with pytest.raises(errors.KVStoreError) as why:
            other.reserve(1)
        return "out of use" in str(why.value) or "generation" in str(why.value)

    eventually(refused)
    eventually(lambda: node.stats_of()["generation"] == 2)
    node.faults("")
    eventually(lambda: node.stats_of()["calls_hanging"] == 0)
    assert node.stats_of()["draining_bytes"] > 0, "memory is freed that an engine has mapped"
    put_and_get(raw_engine(node), 10)
    other.wire.close()
    engine.kill()
    eventually(lambda: node.stats_of()["draining_bytes"] == 0)


def test_a_daemon_that_stops_with_a_copy_that_hangs_stops_all_the_same(start_gpu_node: Start, raw_engine: Raw) -> None:
    node = start_gpu_node(limits={"one_device.CLOSE_S": 0.5, "pagelocks.END_S": 0.5})
    engine = raw_engine(node)
    node.faults("transfer:delay=60; unregister:delay=60")
    engine.put(range(3))
    assert node.stop() == 0
