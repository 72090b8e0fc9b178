"""Daemons with devices, and engines that use them; all are gone after the test."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cuda import gpu_marker
from tests.gpu.client_engine import Engines, Served
from tests.gpu.gpu_nodes import UUIDS, GpuNode, host_device
from tests.gpu.raw_engine import EngineProcess, RawEngine

__all__ = ["UUIDS", "GpuNode", "host_device"]


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin(gpu_marker.NAME):
        config.pluginmanager.register(gpu_marker, gpu_marker.NAME)


@pytest.fixture
def start_gpu_node() -> Iterator[Callable[..., GpuNode]]:
    """Starts such daemons: `start_gpu_node(gpu__size="4MiB", devices=[host_device(0), host_device(1)])`."""
    running: list[GpuNode] = []
    with tempfile.TemporaryDirectory(prefix="kvstored-test-") as base:

        def start(
            devices: list[dict[str, Any]] | None = None, limits: dict[str, float] | None = None, **settings: str
        ) -> GpuNode:
            directory = Path(base) / str(len(running))
            directory.mkdir(mode=0o700)
            said = {key.replace("__", "."): value for key, value in settings.items()}
            running.append(GpuNode(directory, said, [host_device()] if devices is None else devices, limits))
            return running[-1]

        try:
            yield start
        finally:
            for node in running:
                node.kill()


@pytest.fixture
def gpu_node(start_gpu_node: Callable[..., GpuNode]) -> GpuNode:
    """A daemon with one device, a pool of 16 MiB on it, and 64 MiB of memory."""
    return start_gpu_node()


@pytest.fixture
def engine() -> Iterator[Engines]:
    """Engines in this process: `engine(node, timeout_s=2.0, faults="open:delay=1")`."""
    running: list[Served] = []

    def start(node: GpuNode, timeout_s: float = 5.0, **device: Any) -> Served:
        running.append(Served(node.endpoint, node.uuids[0], "nhd", "bf16", 64, timeout_s=timeout_s, device=device))
        return running[-1]

    yield start
    for one in running:
        one.gate.set()
        one.close()


@pytest.fixture
def engine_process() -> Iterator[Callable[..., EngineProcess]]:
    """Starts engines in processes of their own: `engine_process(node, faults="transfer:delay=60")`."""
    running: list[EngineProcess] = []

    def start(node: GpuNode, uuid: str = "", faults: str = "") -> EngineProcess:
        running.append(EngineProcess(node.socket, uuid or node.uuids[0], faults))
        return running[-1]

    yield start
    for engine in running:
        engine.close()


@pytest.fixture
def raw_engine() -> Iterator[Callable[..., RawEngine]]:
    """Engines in this process: `raw_engine(node)`; all hang up at the end."""
    running: list[RawEngine] = []

    def start(node: GpuNode, uuid: str = "", **settings: Any) -> RawEngine:
        running.append(RawEngine(node.socket, uuid or node.uuids[0], **settings))
        return running[-1]

    yield start
    for engine in running:
        engine.wire.close()
