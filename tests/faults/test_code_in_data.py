"""Field fault A16: pickles read from an open socket ran as code.

Seen as LMDeploy issue 4804 and ktransformers issue 2087. A pickle that would leave a marker is sent wherever
bytes from outside come in, to the daemon and to its clients: it is stored as bytes or refused, never run.
tests/test_shape.py finds no call that could run it.
"""

import json
import marshal
import pickle
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvstore_client import Client, Hint, KVStoreError
from kvstored.v1 import PROTOCOL
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import KVSTORED, RunningDaemon
from tests.nodes import running
from tests.wire import Wire, frame

BLOCK = 4096


class Bomb:
    """Leaves a marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(host__size="16MiB", server__grpc="127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture
def marker(node: RunningDaemon) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvstored-test-") as scratch:  # a short path: texts have limits
        marker = Path(scratch) / "marker"
        pickle.loads(pickle.dumps(Bomb(marker)))  # it would work
        marker.unlink()
        yield marker
        assert not marker.exists()
    with Client(node.endpoint) as client:
        assert client.health().healthy


def bombs(marker: Path) -> dict[str, bytes]:
    code = marshal.dumps(compile(f"open({str(marker)!r}, 'w')", "x", "exec"))
    found = {f"pickle {version}": pickle.dumps(Bomb(marker), version) for version in range(6)}
    found["marshal"] = code
    found["yaml"] = f'!!python/object/apply:os.mkdir ["{marker}"]'.encode()
    found["shell"] = f"$(touch {marker}) `touch {marker}`; touch {marker}".encode()
    found["python"] = f"__import__('pathlib').Path({str(marker)!r}).touch()".encode()
    found["json"] = json.dumps({"py/reduce": [{"py/function": "os.mkdir"}, [str(marker)]]}).encode()
    return found


KINDS = list(bombs(Path("x")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hello", [False, True], ids=["before Hello", "after Hello"])
@pytest.mark.parametrize("framed", [False, True], ids=["as it is", "in a frame"])
def test_on_the_session_socket_it_is_no_request(
    node: RunningDaemon, marker: Path, kind: str, hello: bool, framed: bool
) -> None:
    data = bombs(marker)[kind]
    with Wire(node.socket, hello=hello) as wire:
        with suppress(BrokenPipeError, ConnectionResetError):
            wire.send(frame(data) if framed else data)
            wire.send(b"\xff" * 8 + frame(b"\xff\xff"))
        wire.last_words()


@pytest.mark.parametrize("kind", KINDS)
def test_as_text_of_a_message_it_is_text(node: RunningDaemon, marker: Path, kind: str) -> None:
    text = bombs(marker)[kind].decode("latin-1")
    with Wire(node.socket, hello=False) as wire:
        for hello in (pb.HelloRequest(protocol=PROTOCOL, tenant=text), pb.HelloRequest(protocol=PROTOCOL, client=text)):
            with suppress(KVStoreError):
                wire.call(hello=hello)
        with suppress(KVStoreError):
            wire.call(hello=pb.HelloRequest(protocol=PROTOCOL))
        digest = bombs(marker)[kind][:32].ljust(32, b"\0")
        request = pb.OpenNamespaceRequest(digest=digest, block_bytes=BLOCK, label=text[:120])
        number = wire.call(open_namespace=request).open_namespace.namespace_id
        (slot,) = wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=1)).reserve.slots
        commit = pb.CommitRequest(
            namespace_id=number,
            keys=[digest],
            slots=[slot],
            parents=[digest[::-1]],
            depths=[1],
            hint=pb.Hint(conversation=text),
        )
        assert list(wire.call(commit=commit).commit.results) == [pb.STORED]
        assert wire.call(match=pb.MatchRequest(namespace_id=number, keys=[digest])).match.blocks == 1
        assert wire.call(stats=pb.StatsRequest()).stats.daemon.healthy
        wire.call(clear=pb.ClearRequest(namespace_id=number))
        wire.leave()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["unix", "grpc"])
def test_as_a_block_it_is_bytes(node: RunningDaemon, marker: Path, kind: str, way: str) -> None:
    data = bombs(marker)[kind].ljust(BLOCK, b"\0")
    endpoint = node.endpoint if way == "unix" else node.grpc_endpoint
    with Client(endpoint, name="bomber") as client:
        ns = client.raw_namespace(f"bombs {kind} {way}"[:60], BLOCK)
        keys = [ns.key(data)]
        hint = Hint(conversation=data[:200].decode("latin-1")[:100])
        assert ns.put(keys, data, hint=hint).stored == 1
        assert ns.get(keys) == [data]
        out = np.empty(BLOCK, np.uint8)
        assert ns.get_into(keys, out) == 1
        assert out.tobytes() == data
        with ns.acquire(keys) as lease:
            assert bytes(lease.views[0]) == data
        assert ns.clear() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_port_of_grpc_it_is_no_call(node: RunningDaemon, marker: Path, kind: str) -> None:
    data = bombs(marker)[kind]
    address = node.grpc_endpoint.removeprefix("grpc://")
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw, suppress(OSError):
        raw.sendall(data)
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + data)
        raw.settimeout(0.2)
        raw.recv(1 << 16)
    with grpc.insecure_channel(address) as channel:
        for method in ("Match", "Put", "OpenNamespace"):
            call = channel.unary_unary(f"/kvstored.v1.KVStore/{method}")
            with pytest.raises(grpc.RpcError):
                call(data, timeout=5, metadata=(("kvstored-protocol", str(PROTOCOL)),))


@pytest.mark.parametrize("kind", ["pickle 0", "pickle 2", "pickle 5", "marshal"])
@pytest.mark.parametrize("framed", [False, True], ids=["as it is", "in a frame"])
def test_from_a_hostile_daemon_it_is_no_reply(marker: Path, tmp_path: Path, kind: str, framed: bool) -> None:
    data = bombs(marker)[kind]
    path = tmp_path / "hostile.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(frame(data) if framed else data)
                connection.recv(1 << 16)

        thread = threading.Thread(target=serve)
        thread.start()
        with Client(f"unix://{path}", timeout_s=0.1) as client:
            ns = client.raw_namespace("hostile", BLOCK)
            assert ns.match([ns.key(b"x")]).blocks == 0
            assert not client.health().reachable
        thread.join(60)
        assert not thread.is_alive()


def test_as_a_setting_it_is_text(marker: Path, tmp_path: Path) -> None:
    """Config files and environment variables come from outside too."""
    for kind in ("pickle 0", "yaml", "python"):
        data = bombs(marker)[kind]
        file = tmp_path / "kvstored.toml"
        file.write_bytes(b"[host]\nsize = " + data)
        for arguments in (["--config", str(file)], ["--set", "host.size=" + data.decode("latin-1").replace("\0", "?")]):
            done = subprocess.run([str(KVSTORED), *arguments, "config"], capture_output=True, timeout=60, check=False)
            assert done.returncode == 2, kind
            assert b"Traceback" not in done.stderr
