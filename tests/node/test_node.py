"""A client in another language, from the .proto files alone: what it puts the SDK gets, and the other way round."""

import base64
import json
import subprocess
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from kvstore_client import Client
from kvstored.v1 import keys as naming
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon
from tests.nodes import block, running

HERE = Path(__file__).parent
STORED = ["STORED"]
EXISTS = ["EXISTS"]

Node = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", params=["TCP", "Unix socket"])
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    address = "127.0.0.1:0" if request.param == "TCP" else f"unix:{tmp_path_factory.mktemp('grpc')}/s"
    with running(server__grpc=address) as daemon:
        yield daemon


@pytest.fixture
def node(daemon: RunningDaemon) -> Node:
    """Runs client.js; answers what it printed."""
    target = daemon.grpc_endpoint.replace("grpc+unix://", "unix:").removeprefix("grpc://")
    if not (HERE / "node_modules" / "@grpc").is_dir():
        pytest.fail("the Node client is not installed: `make tests/node/node_modules/.stamp`")

    def run(command: str, *arguments: object) -> dict[str, Any]:
        done = subprocess.run(
            ["node", "client.js", command, target, *map(str, arguments)],
            cwd=HERE,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    return run


def identity(name: str, size_bytes: int) -> str:
    """The digest of a raw namespace, in hex."""
    fields: dict[str, str | int] = {"kind": "raw", "name": name, "block_bytes": size_bytes, "salt": ""}
    return naming.namespace_digest(fields).hex()


@pytest.mark.parametrize(("size_bytes", "count"), [(1, 3), (2 << 20, 4), ((1 << 20) + 1, 2)])
def test_what_node_puts_the_sdk_gets_and_the_other_way_round(
    daemon: RunningDaemon, node: Node, tmp_path: Path, size_bytes: int, count: int
) -> None:
    file, digest = tmp_path / "blocks", identity("node", size_bytes)
    blocks = [block(("node", i), size_bytes) for i in range(2 * count)]
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("node", size_bytes)
        keys = [ns.key(f"{size_bytes} {i}".encode()) for i in range(2 * count)]
        names = [key.hex() for key in keys]
        file.write_bytes(b"".join(blocks[:count]))
        assert node("put", digest, size_bytes, file, *names[:count]) == {"results": STORED * count, "not_durable": ""}
        assert ns.put(keys, blocks[count:], start=count).stored == count
        assert ns.get(keys) == blocks
        absent = blake2b(b"absent", digest_size=32).hexdigest()
        found = node("get", digest, size_bytes, file, *names, absent)
        assert found == {"announced": 2 * count, "blocks": 2 * count}
        assert file.read_bytes() == b"".join(blocks)
        # The chain came over: each block's parent is the one before it.
        with Client(daemon.grpc_endpoint) as remote:
            assert remote.raw_namespace("node", size_bytes).get(keys) == blocks
        file.write_bytes(bytes(size_bytes) * count)
        assert node("put", digest, size_bytes, file, *names[:count]) == {"results": EXISTS * count, "not_durable": ""}
        assert ns.get(keys[:count]) == blocks[:count]


def test_what_is_wrong_is_an_error_of_its_kind(node: Node, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(10))
    digest, key = identity("wrong", 4096), blake2b(b"k", digest_size=32).hexdigest()
    said = node("put", digest, 4096, tmp_path / "short", key)
    assert said["code"] == "INVALID_ARGUMENT"
    assert "a checksum 4086 bytes before its end" in said["details"]
    said = node("call", "Match", json.dumps({"namespace_id": 4711}))
    assert said["code"] == "FAILED_PRECONDITION"
    assert "open it first" in said["details"]
    said = node("call", "Reserve", json.dumps({"namespace_id": 1, "count": 1}))
    assert said["code"] == "FAILED_PRECONDITION"
    assert "kvstored-session" in said["details"]
    assert node("call", "Nothing", "{}")["code"].startswith("TypeError")
    assert node("get", digest, 4096, tmp_path / "none", key) == {"announced": 0, "blocks": 0}


def test_node_prefetches_and_hears_how_it_ended(daemon: RunningDaemon, node: Node, tmp_path: Path) -> None:
    file, digest = tmp_path / "blocks", identity("prefetched", 4096)
    keys = [blake2b(bytes([i]), digest_size=32).digest() for i in range(3)]
    file.write_bytes(bytes(3 * 4096))
    assert node("put", digest, 4096, file, *(key.hex() for key in keys))["results"] == STORED * 3
    opened = node("call", "OpenNamespace", json.dumps({"digest": base64.b64encode(bytes.fromhex(digest)).decode(),
                                                       "block_bytes": 4096}))  # fmt: skip
    named = [base64.b64encode(key).decode() for key in keys]
    request = {"namespace_id": opened["namespace_id"], "keys": named, "deadline_ms": 5000}
    begun = node("call", "Prefetch", json.dumps(request))
    assert (begun["blocks"], begun["state"]) == (3, "TICKET_DONE")  # without an SSD it is done at once
    ended = node("call", "Ticket", json.dumps({"ticket": begun["ticket"], "wait_ms": 1000}))
    assert ended["state"] == "TICKET_NONE"
    said = node("call", "Load", json.dumps(request))
    assert (said["code"], "Load is for calls bound to a session" in said["details"]) == ("FAILED_PRECONDITION", True)


def test_health_by_both_services(node: Node) -> None:
    assert node("health", "") == {"status": "SERVING"}
    assert node("health", "kvstored.v1.KVStore") == {"status": "SERVING"}
    assert node("health", "another")["code"] == "NOT_FOUND"
    said = node("call", "Health", "{}")
    assert said["healthy"] is True
    assert node("call", "Stats", "{}")["daemon"]["healthy"] is True


def test_the_list_of_packages_names_no_place_to_get_them_from() -> None:
    """Where they come from is the business of whoever installs them."""
    packages = json.loads((HERE / "package-lock.json").read_text())["packages"]
    assert len(packages) > 3
    for name, package in packages.items():
        assert "resolved" not in package, name
        assert not name or package["integrity"], name
    assert "://" not in (HERE / ".npmrc").read_text()


def test_node_sees_every_call_of_the_contract() -> None:
    """It reads the files at run time, so what is asked of it here is that it can."""
    program = (
        "const l = require('@grpc/proto-loader');"
        "const d = l.loadSync('kvstored/v1/kvstore.proto', {includeDirs: ['../../protos']});"
        "console.log(Object.keys(d['kvstored.v1.KVStore']).join(' '))"
    )
    done = subprocess.run(["node", "-e", program], cwd=HERE, capture_output=True, text=True, timeout=60, check=False)
    assert set(done.stdout.split()) == set(pb.DESCRIPTOR.services_by_name["KVStore"].methods_by_name), done.stderr
