"""Tests of the GPU tier: they run on HostDevice everywhere, and on a GPU under the marker `gpu` where there is one.

Without a GPU the tests of that marker are deselected; gpu_marker.py says how many and why.
"""

from collections.abc import Callable, Iterator

import pytest

from kvstored_cuda.devices import Device
from tests.cuda import gpu_marker
from tests.cuda.device_peer import Peer, make_device


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin(gpu_marker.NAME):
        config.pluginmanager.register(gpu_marker, gpu_marker.NAME)


KINDS = ["host", "standin", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Of device: the same body runs on HostDevice, on CudaDevice over a stand-in for the driver, and on a GPU."""
    return str(request.param)


@pytest.fixture
def device(kind: str) -> Iterator[Device]:
    """This process's side: the owner."""
    device = make_device(kind)
    yield device
    device.close()


@pytest.fixture
def spawn(request: pytest.FixtureRequest) -> Iterator[Callable[..., Peer]]:
    """Starts other processes with the device of the test: `spawn(faults="close:delay=60")`. All end with it."""
    running: list[Peer] = []
    kind = request.getfixturevalue("kind") if "kind" in request.fixturenames else "host"

    def start(faults: str = "", **settings: object) -> Peer:
        running.append(Peer(kind, faults, **settings))
        return running[-1]

    yield start
    for peer in running:
        peer.close()
