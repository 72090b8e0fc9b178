"""Where the gRPC edge listens: only where it says, alone, and closed to others."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from kvstore.server.grpc_service import GrpcEdge
from kvstored.v1 import kvstore_pb2 as pb
from tests.server.grpc_edge import Scene, directory, with_edge


def started(address: str) -> str:
    """Where an edge that was asked for `address` listened, or why it did not start."""

    async def run() -> str:
        scene = Scene(1 << 20, 30.0)
        edge = GrpcEdge(scene.node, address, scene.stats)
        try:
            await edge.start()
            async with grpc.aio.insecure_channel(edge.address) as channel:
                await channel.channel_ready()
        except OSError as e:
            return str(e)
        finally:
            await edge.stop()
        return edge.address

    return asyncio.run(asyncio.wait_for(run(), 30.0))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_address_names_the_port_that_was_chosen(host: str) -> None:
    named, _, port = started(f"{host}:0").rpartition(":")
    assert named == host
    assert int(port) > 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_in_use_is_refused_naming_who_has_it(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = started(f"{host}:{taken.getsockname()[1]}")
    assert f"pid {os.getpid()} " in said
    assert "server.grpc" in said


def test_two_edges_do_not_share_a_port() -> None:
    async def scenario(scene: Scene) -> None:
        second = GrpcEdge(scene.node, scene.edge.address, scene.stats)
        with pytest.raises(OSError, match=f"pid {os.getpid()} .*listens there"):
            await second.start()
        await second.stop()
        assert (await scene.stub.Health(pb.HealthRequest())).healthy

    with_edge(scenario)


def test_an_address_of_another_machine_is_refused() -> None:
    assert "192.0.2.1 is no address of this machine" in started("192.0.2.1:0")


def test_a_unix_socket_is_the_owners_whatever_the_umask() -> None:
    program = (
        "import asyncio, os, sys\n"
        "from kvstore.server.grpc_service import GrpcEdge\n"
        "from tests.server.grpc_edge import Scene\n"
        "async def main():\n"
        "    scene = Scene(1 << 20, 30.0)\n"
        "    edge = GrpcEdge(scene.node, 'unix:' + sys.argv[1], scene.stats)\n"
        "    await edge.start()\n"
        "    print(oct(os.stat(sys.argv[1]).st_mode & 0o777), oct(os.umask(0)), edge.address)\n"
        "    await edge.stop()\n"
        "    print(os.path.exists(sys.argv[1]))\n"
        "os.umask(0)\n"
        "asyncio.run(main())\n"
    )
    with directory() as path:
        done = subprocess.run(
            [sys.executable, "-c", program, str(path / "s")],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout.split() == ["0o600", "0o0", f"unix:{path / 's'}", "False"], done.stderr
