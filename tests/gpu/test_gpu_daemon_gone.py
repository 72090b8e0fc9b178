"""What dead processes were granted of memory, where the device that may write to it is lost, or its daemon was."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.conftest import eventually, wait_for_line
from tests.gpu.gpu_nodes import GpuNode

Start = Callable[..., GpuNode]

SLOTS = 3

PROCESS = f"""
import sys
from pathlib import Path
from kvstored.v1 import kvstore_pb2 as pb
from tests.gpu.raw_engine import RawEngine
engine = RawEngine(Path(sys.argv[1]), sys.argv[2])
request = pb.ReserveRequest(namespace_id=engine.namespace, count={SLOTS})
print(len(engine.wire.call(reserve=request).reserve.slots), flush=True)
sys.stdin.read()
"""
"""It was told of the device and was granted memory, and has nothing on the device."""

ANSWER_S = 60.0


@contextmanager
def granted_memory(node: GpuNode) -> "Iterator[subprocess.Popen[str]]":
    """Such a process; it is gone afterwards."""
    command = [sys.executable, "-c", PROCESS, str(node.socket), node.uuids[0]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert wait_for_line(process, ANSWER_S).strip() == str(SLOTS)
            yield process
        finally:
            process.kill()


def quarantined(node: GpuNode) -> int:
    """Slots of memory."""
    return sum(pool["quarantined"] for pool in node.stats()["pools"])


def kept(node: GpuNode) -> list[str]:
    return [why for why in node.degraded() if "memory granted to dead processes" in why]


def test_who_was_only_told_of_a_device_leaves_its_memory_when_the_device_is_quiet(gpu_node: GpuNode) -> None:
    with granted_memory(gpu_node) as process:
        process.kill()
        eventually(lambda: gpu_node.stats_of()["counters"]["quiet_asked"] >= 1, what="the device to be asked")
        eventually(lambda: quarantined(gpu_node) == 0 and not gpu_node.stats()["sessions"][1:])
    assert not kept(gpu_node)


def test_a_loss_frees_nothing_of_who_is_gone_and_the_device_that_is_back_does(gpu_node: GpuNode) -> None:
    with granted_memory(gpu_node) as process:
        gpu_node.lose()
        process.kill()
        eventually(lambda: quarantined(gpu_node) == SLOTS, what="its slots to be kept")
        (why,) = kept(gpu_node)
        assert f"device {gpu_node.uuids[0]} is out of use" in why
        gpu_node.come()
        eventually(lambda: quarantined(gpu_node) == 0, what="its slots to be free")
    assert gpu_node.stats_of()["counters"]["quiet_asked"] >= 1
    assert not kept(gpu_node)


@pytest.mark.parametrize("dies", ["before the restart", "after it"])
def test_after_a_restart_memory_of_who_is_gone_is_kept_until_the_devices_that_come_are_quiet(
    start_gpu_node: Start, dies: str
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvstored-test-") as place:
        node = start_gpu_node(limits={"mover.OPEN_S": 0.2}, host__persist=f"{place}/slab")
        eventually(lambda: node.stats()["gpus"], what="its devices, for which it waits so briefly")
        with granted_memory(node) as process:
            node.kill()
            if dies == "before the restart":
                process.kill()
                process.wait(ANSWER_S)
            node.device(hangs=True)
            node.restart()
            process.kill()
            eventually(lambda: bool(kept(node)), what="it to be said that memory is kept")
            assert quarantined(node) == SLOTS
            node.device(hangs=None)
            eventually(lambda: quarantined(node) == 0, what="its slots to be free")
            assert node.stats_of()["counters"]["quiet_asked"] >= 1
        assert not kept(node)
        node.kill()
