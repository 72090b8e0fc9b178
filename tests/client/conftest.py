"""The three ways to a daemon, for tests of what is the same by all of them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore_client import Client
from tests.conftest import RunningDaemon
from tests.nodes import running

WAYS = ["unix", "grpc", "grpc+unix"]


class Daemons:
    """Started when first needed: one for shared memory and TCP, one for gRPC on a socket."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._stack = stack
        self._settings = {"tcp": "127.0.0.1:0", "socket": f"unix:{directory}/grpc.sock"}
        self._started: dict[str, RunningDaemon] = {}

    def endpoint(self, way: str) -> str:
        grpc = "socket" if way == "grpc+unix" else "tcp"
        if grpc not in self._started:
            self._started[grpc] = self._stack.enter_context(running(server__grpc=self._settings[grpc]))
        daemon = self._started[grpc]
        return daemon.endpoint if way == "unix" else daemon.grpc_endpoint


@pytest.fixture(scope="session")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    with ExitStack() as stack:
        yield Daemons(stack, tmp_path_factory.mktemp("sdk"))


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """How the client reaches the daemon."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def endpoint(daemons: Daemons, way: str) -> str:
    return daemons.endpoint(way)


@pytest.fixture
def client(endpoint: str) -> Iterator[Client]:
    with Client(endpoint, name="sdk", timeout_s=10.0) as client:
        yield client
