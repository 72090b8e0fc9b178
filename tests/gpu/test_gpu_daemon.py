"""A daemon with devices and engines that map its memory, each a process of its own: where blocks come and go."""

import mmap
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore_client import Client
from kvstored.v1 import errors, shm
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.gpu.gpu_nodes import UUIDS, GpuNode, host_device
from tests.gpu.raw_engine import BLOCK_BYTES, EngineProcess, RawEngine, bytes_of

Start = Callable[..., GpuNode]
Raw = Callable[..., RawEngine]


def right(found: list[bytes]) -> bool:
    """Whether these are blocks 0, 1, 2..."""
    return found == [bytes_of(number) for number in range(len(found))]


# -- put, read, copies


def test_what_one_engine_puts_another_one_reads(
    gpu_node: GpuNode, raw_engine: Raw, engine_process: Callable[..., EngineProcess]
) -> None:
    ended = raw_engine(gpu_node).put(range(10))
    assert (ended.state, list(ended.results)) == (pb.TICKET_DONE, [pb.STORED] * 10)
    assert engine_process(gpu_node)("right", list(range(12))) == 10


def test_what_is_put_on_a_device_is_copied_to_memory(gpu_node: GpuNode, raw_engine: Raw) -> None:
    raw_engine(gpu_node).put(range(20))
    eventually(lambda: gpu_node.stats_of()["counters"]["copied_down"] == 20)
    stats = gpu_node.stats_of()
    assert stats["blocks"] == stats["counters"]["committed"] == 20
    assert stats["counters"]["bytes_down"] == 20 * BLOCK_BYTES
    assert stats["copying"] == stats["commits_pending"] == stats["counters"]["evicted"] == 0


@pytest.mark.parametrize("faults", ["", "register:fail=PageLockRefused", "register:fail=PageLockRefused; no staging"])
def test_what_memory_has_comes_to_a_device_with_its_own_bytes(
    start_gpu_node: Start, raw_engine: Raw, faults: str
) -> None:
    """Page-locked; through a staging buffer where that is refused; and by the device where that is refused, too."""
    refused = faults.replace("no staging", "host_allocate:fail=PageLockRefused")
    node = start_gpu_node([host_device(faults=refused), host_device(1)])
    engine = raw_engine(node)
    engine.put(range(40))
    eventually(lambda: node.stats_of()["counters"]["copied_down"] == 40)
    other = raw_engine(node, uuid=node.uuids[1])
    assert other.acquire(range(40)) == []
    ended = other.prefetch(range(40))
    assert (ended.state, ended.loaded, ended.blocks) == (pb.TICKET_DONE, 40, 40)
    found = other.get(range(41))
    assert len(found) == 40
    assert right(found)


def test_page_locks_that_are_refused_are_said_in_stats(start_gpu_node: Start, raw_engine: Raw) -> None:
    node = start_gpu_node([host_device(memlock_bytes=40 << 20)])
    eventually(lambda: "24 MiB were refused" in node.stats_of()["not_page_locked"])
    assert "RLIMIT_MEMLOCK" in node.stats_of()["not_page_locked"]
    assert node.stats_of()["page_locked_bytes"] == 40 << 20
    assert node.degraded() == []


def test_where_nothing_may_be_page_locked_blocks_are_copied_all_the_same(
    start_gpu_node: Start, raw_engine: Raw
) -> None:
    node = start_gpu_node([host_device(memlock_bytes=0)])
    raw_engine(node).put(range(4))
    eventually(lambda: node.stats_of()["counters"]["copied_down"] == 4)
    eventually(lambda: "64 MiB were refused" in node.stats_of()["not_page_locked"])
    stats = node.stats_of()
    assert "nor is there a staging buffer" in stats["not_page_locked"]
    assert stats["page_locked_bytes"] == 0


def test_all_of_the_slab_is_page_locked_in_the_background(start_gpu_node: Start) -> None:
    node = start_gpu_node([host_device(faults="register:delay=60")])
    assert "yet to be page-locked" in node.stats_of()["not_page_locked"]
    node.faults("")
    eventually(lambda: not node.stats_of()["not_page_locked"])
    assert node.stats_of()["page_locked_bytes"] == 64 << 20


def test_a_full_device_evicts_and_memory_keeps_what_it_had(start_gpu_node: Start, raw_engine: Raw) -> None:
    node = start_gpu_node(gpu__size="2MiB")
    engine = raw_engine(node)
    for start in range(0, 96, 8):
        engine.put(range(start, start + 8))
        eventually(lambda put=start + 8: node.stats_of()["counters"]["copied_down"] == put)  # type: ignore[misc]
    stats = node.stats_of()
    assert stats["used_bytes"] <= 2 << 20
    assert stats["counters"]["evicted"] >= 96 - (2 << 20) // BLOCK_BYTES
    assert stats["counters"]["copied_down"] == 96
    assert stats["counters"]["evicted_only"] == 0


def test_blocks_go_from_a_device_to_the_ssd_and_back(start_gpu_node: Start, raw_engine: Raw, tmp_path: Path) -> None:
    node = start_gpu_node(ssd__path=str(tmp_path / "ssd"), ssd__size="64MiB", ssd__free_floor="1MiB")
    engine = raw_engine(node)
    engine.put(range(30))
    eventually(lambda: node.stats()["ssd"]["counters"]["written"] == 30, 20.0)
    engine.close()
    assert node.stop() == 0
    node.restart()
    engine = raw_engine(node)
    eventually(lambda: len(engine.tiers(range(31))) == 30)
    ended = engine.prefetch(range(30))
    assert (ended.state, ended.loaded) == (pb.TICKET_DONE, 30)
    assert right(engine.get(range(30)))


def test_a_stop_saves_what_only_devices_have(start_gpu_node: Start, raw_engine: Raw, tmp_path: Path) -> None:
    node = start_gpu_node(ssd__path=str(tmp_path / "ssd"), ssd__size="64MiB", ssd__free_floor="1MiB")
    engine = raw_engine(node)
    eventually(lambda: node.stats()["ssd"]["state"] == "open")
    node.faults("transfer:delay=20")  # until it is told to stop
    engine.put(range(30))
    engine.close()
    assert node.stats_of()["counters"]["copied_down"] < 30
    node.faults("transfer:delay=0.02")
    assert node.stop() == 0
    assert "not saved" not in node.output()
    node.restart()
    eventually(lambda: node.stats()["ssd"]["blocks"] == 30)


def test_memory_comes_before_the_ssd_at_a_stop_that_is_bounded(
    start_gpu_node: Start, raw_engine: Raw, tmp_path: Path
) -> None:
    limits = {"daemon.GPU_SAVE_S": 0.5, "one_device.CLOSE_S": 0.5}
    node = start_gpu_node(limits=limits, ssd__path=str(tmp_path / "ssd"), ssd__size="64MiB", ssd__free_floor="1MiB")
    engine = raw_engine(node)
    node.faults("transfer:delay=60")
    engine.put(range(3))
    engine.close()
    assert node.stop() == 0
    assert "blocks of devices were not saved to memory blocks_not_saved=3" in node.output()


# -- which devices


def test_a_daemon_without_a_gpu_says_so_once_and_serves(
    start_daemon: Callable[..., RunningDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one is an ordinary `kvstored`: it looks for GPUs, and is shown none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    daemon = start_daemon(gpu__size="16MiB")
    with Client(daemon.endpoint, name="test") as client:
        stats = client.stats()
        assert stats["gpus_off"]
        assert stats["gpus"] == []
        assert stats["daemon"]["healthy"]
        assert stats["daemon"]["degraded"] == [f"there is no GPU tier: {stats['gpus_off']}"]
        assert client.health().healthy
    assert daemon.stop() == 0
    assert daemon.output().count("there is no GPU tier") == 1


def test_an_ordinary_daemon_may_have_devices_of_host_memory(
    start_daemon: Callable[..., RunningDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For trying the tier where there is no GPU."""
    monkeypatch.setenv("KVSTORED_HOST_DEVICES", f"{UUIDS[0]}=67108864, {UUIDS[1]}=67108864")
    daemon = start_daemon(gpu__size="16MiB", gpu__devices=f"{UUIDS[1]},{UUIDS[2]}")
    with RawEngine(daemon.socket, UUIDS[1]) as engine:
        assert engine.put(range(5)).state == pb.TICKET_DONE
        assert right(engine.get(range(5)))
    with Client(daemon.endpoint, name="test") as client:
        (why,) = client.stats()["daemon"]["degraded"]
    assert f"no device {UUIDS[2]}" in why
    assert UUIDS[0] in why


def test_devices_of_host_memory_that_are_written_wrongly_are_no_tier(
    start_daemon: Callable[..., RunningDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORED_HOST_DEVICES", "HOST-1=64MiB")
    daemon = start_daemon(gpu__size="16MiB")
    with Client(daemon.endpoint, name="test") as client:
        assert "expected UUID=bytes" in client.stats()["gpus_off"]
        assert client.health().healthy


@pytest.mark.gpu
def test_blocks_go_to_a_gpu_and_back(start_daemon: Callable[..., RunningDaemon]) -> None:
    daemon = start_daemon(gpu__size="256MiB")
    with Client(daemon.endpoint, name="test") as client:
        uuid = client.stats()["gpus"][0]["uuid"]
        eventually(lambda: client.stats()["gpus"][0]["page_locked_bytes"], 60.0)
        with RawEngine(daemon.socket, uuid) as engine:
            assert engine.put(range(20)).state == pb.TICKET_DONE
            eventually(lambda: client.stats()["gpus"][0]["counters"]["copied_down"] == 20)
            other = EngineProcess(daemon.socket, uuid)
            try:
                assert other("right", list(range(20))) == 20
                other.kill()
                eventually(lambda: client.stats()["gpus"][0]["leased"] == 0, 30.0)
            finally:
                other.close()
            assert right(engine.get(range(20)))
    assert daemon.stop() == 0


def test_a_daemon_without_devices_serves_from_memory(start_gpu_node: Start) -> None:
    node = start_gpu_node([host_device(away=True)])
    stats = node.stats()
    assert stats["gpus_off"] == "no device: a test has none"
    assert stats["gpus"] == []
    assert stats["daemon"]["healthy"]


def test_without_gpu_size_nothing_of_the_tier_is_imported() -> None:
    program = (
        "import sys, kvstore.daemon, kvstore.server.grpc_service, kvstore.server.http, kvstore.server.metrics\n"
        "print(*sorted(n for n in sys.modules if n.startswith(('kvstore.gpu', 'kvstore.core.gpu', 'kvstored_cuda'))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_a_device_that_is_named_and_missing_is_said_and_the_others_are_used(start_gpu_node: Start) -> None:
    node = start_gpu_node([host_device(0), host_device(1)], gpu__devices=f"{UUIDS[1]},{UUIDS[3]}")
    assert [row["uuid"] for row in node.stats()["gpus"]] == [UUIDS[1]]
    (why,) = node.degraded()
    assert UUIDS[3] in why
    assert "no device" in why


def test_a_driver_that_hangs_at_the_start_keeps_nobody_waiting(start_gpu_node: Start) -> None:
    node = start_gpu_node([host_device(hangs=True)], limits={"mover.OPEN_S": 0.3})
    assert node.stats()["gpus_off"] == "its devices are being opened"
    node.device(hangs=None)
    eventually(lambda: node.stats()["gpus"] and not node.stats()["gpus_off"])
    assert node.degraded() == []


def test_memory_as_descriptors_is_read_by_another_engine(
    start_gpu_node: Start, raw_engine: Raw, engine_process: Callable[..., EngineProcess]
) -> None:
    node = start_gpu_node(gpu__handles="descriptor")
    raw_engine(node).put(range(5))
    assert node.stats_of()["handle_kind"] == "descriptor"
    assert engine_process(node)("right", list(range(5))) == 5


def notices(engine: RawEngine) -> int:
    """How often idle clients of its tenant were told to ask."""
    engine.wire.call(index=pb.IndexRequest())
    descriptor = engine.wire.descriptors.pop()
    with mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ) as header:
        (count,) = struct.unpack_from("<Q", header, shm.AT_NOTICE)
    os.close(descriptor)
    return int(count)


def test_memory_that_goes_to_another_tenant_is_freed_when_its_holder_has_closed_it(
    start_gpu_node: Start, raw_engine: Raw
) -> None:
    node = start_gpu_node([host_device(size_bytes=1 << 20)], gpu__size="1MiB")
    first, second = raw_engine(node, tenant="a"), raw_engine(node, tenant="b")
    for number in range(16):
        first.put([number])
    eventually(lambda: not node.stats_of()["copying"])
    assert node.stats_of()["segments"] == 16
    before = notices(first)
    with pytest.raises(errors.ResourceExhausted):
        second.reserve(1)
    eventually(lambda: notices(first) > before)
    assert node.stats_of()["draining_bytes"] > 0
    reply = first.wire.call(health=pb.HealthRequest())
    (detach,) = reply.detach_devices
    assert (detach.device, detach.generation) == (node.uuids[0], 1)
    for segment in detach.segments:
        first.mapped.pop(segment).close()
    first.ask(closed=pb.DeviceClosedRequest(segments=detach.segments))
    assert eventually(lambda: second.reserve(1))
    eventually(lambda: node.stats_of()["draining_bytes"] == 0)


def test_memory_that_outlives_the_daemon_has_what_was_copied_down(start_gpu_node: Start, raw_engine: Raw) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvstored-test-") as place:
        node = start_gpu_node(host__persist=f"{place}/slab")
        engine = raw_engine(node)
        engine.put(range(12))
        eventually(lambda: node.stats_of()["counters"]["copied_down"] == 12)
        engine.close()
        node.kill()
        node.restart()
        assert node.stats()["persist"]["adopted_blocks"] == 12
        engine = raw_engine(node)
        assert engine.prefetch(range(12)).loaded == 12
        assert right(engine.get(range(12)))
        engine.put(range(20, 24))
        assert len(engine.get(range(20, 24))) == 4
        assert node.stop() == 0
