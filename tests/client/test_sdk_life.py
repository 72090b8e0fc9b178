"""Clients over time: where they look for the daemon, threads, restarts, long chains, more than the memory holds."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Client, InvalidArgument, Namespace, Unavailable
from kvstored.v1 import KEYS_MAX, endpoint
from tests.client.conftest import WAYS
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running

BLOCK = 4096
THREADS = 8


def some(ns: Namespace, count: int = 8, name: str = "k") -> tuple[list[bytes], list[bytes]]:
    keys = [ns.key(f"{name} {i}".encode()) for i in range(count)]
    return keys, [block((ns.digest, name, i), ns.block_bytes) for i in range(count)]


# -- where the daemon is

NOWHERE = ["unix:///nowhere/kvstored.sock", "grpc://127.0.0.1:1", "grpc+unix:///nowhere/grpc.sock", "unix:///"]


@pytest.mark.parametrize("where", NOWHERE)
def test_without_a_daemon_reads_miss_puts_are_rejected_and_management_says_so(where: str) -> None:
    with Client(where, timeout_s=0.3) as client:
        ns = client.raw_namespace("nowhere", BLOCK)
        keys, data = some(ns, 3)
        assert ns.match(keys).blocks == 0
        assert ns.get(keys) == []
        assert ns.get_into(keys, bytearray(3 * BLOCK)) == 0
        assert ns.prefetch(keys).wait() == 0
        with ns.acquire(keys) as lease:
            assert lease.views == []
        result = ns.put(keys, data)
        assert (result.stored, result.existing, result.rejected) == (0, 0, 3)
        assert isinstance(result.error, Unavailable)
        for call in (
            lambda: ns.reserve(1),
            lambda: ns.remove(keys),
            lambda: ns.pin(keys, ttl_s=1),
            lambda: ns.unpin(keys),
            lambda: ns.clear(),
            lambda: client.stats(),
        ):
            with pytest.raises(Unavailable):
                call()
        health = client.health()
        assert (health.reachable, health.healthy) == (False, False)
        assert health.problems


@pytest.mark.parametrize(
    "wrong",
    [
        "unix://relative/kvstored.sock",
        "unix:/one/slash",
        "unix://",
        "http://localhost:1",
        "grpc://",
        "grpc:localhost:1",
        "localhost:50051",
        "unix:///" + "x" * 200,
        "unix:///nul\0byte",
    ],
    ids=lambda wrong: repr(wrong[:30]),
)
def test_an_endpoint_that_cannot_be_one_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidArgument):
        Client(wrong)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The user's own socket and the system's, in directories of the test."""
    monkeypatch.delenv("KVSTORED_ENDPOINT", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(endpoint, "SYSTEM_RUNTIME_DIR", tmp_path / "system")
    places = {"own": tmp_path / "user" / "kvstored" / "kvstored.sock", "system": tmp_path / "system" / "kvstored.sock"}
    for path in places.values():
        path.parent.mkdir(parents=True)
    return places


def test_a_variable_says_where_the_daemon_is(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for path in places.values():
        path.touch()
    for value in ("unix:///elsewhere/kv.sock", "grpc://127.0.0.1:1"):
        monkeypatch.setenv("KVSTORED_ENDPOINT", value)
        with Client(timeout_s=0.2) as client:
            assert client.endpoint == value
        with Client("unix:///given/kv.sock") as client:
            assert client.endpoint == "unix:///given/kv.sock", "what is given is above the variable"


@pytest.mark.parametrize(
    ("there", "chosen"), [([], "own"), (["own"], "own"), (["system"], "system"), (["own", "system"], "own")], ids=str
)
def test_without_one_it_is_the_users_own_socket_then_the_systems(
    places: dict[str, Path], there: list[str], chosen: str
) -> None:
    for name in there:
        places[name].touch()
    for given in (None, ""):
        with Client(given) as client:
            assert client.endpoint == f"unix://{places[chosen]}"


def test_without_a_runtime_directory_it_is_one_of_the_users_own(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("", None):
        monkeypatch.setenv("XDG_RUNTIME_DIR", "") if value == "" else monkeypatch.delenv("XDG_RUNTIME_DIR")
        monkeypatch.setattr("os.getuid", lambda: 4711)
        assert endpoint.default_endpoint() == "unix:///tmp/kvstored-4711/kvstored.sock"
        monkeypatch.setattr("os.getuid", lambda: 0)
        assert endpoint.default_endpoint() == f"unix://{places['system']}"


def test_a_client_with_no_endpoint_finds_the_users_daemon(daemon: RunningDaemon, places: dict[str, Path]) -> None:
    places["own"].parent.rmdir()
    places["own"].parent.symlink_to(daemon.directory)
    with Client() as client:
        assert client.stats()["daemon"]["pid"] == daemon.pid


# -- many threads


@pytest.mark.parametrize("clients", [1, THREADS], ids=["one client", "one each"])
def test_threads_put_and_get_byte_exact(endpoint: str, clients: int) -> None:
    """Each thread writes chains of its own and one that all of them write, and reads those of the others."""
    shared = [Client(endpoint, name=f"threads-{i}", timeout_s=10.0) for i in range(clients)]
    failures: list[BaseException] = []
    barrier = threading.Barrier(THREADS)

    def work(number: int) -> None:
        try:
            ns = shared[number % clients].raw_namespace(f"threads {clients}", BLOCK)
            barrier.wait(30)
            for turn in range(8):
                keys, data = some(ns, 8, f"{number}/{turn}")
                assert ns.put(keys, data).rejected == 0
                assert ns.get(keys) == data
                common, same = some(ns, 8, f"all/{turn}")
                assert ns.put(common, same).rejected == 0
                assert ns.get(common) == same
                for other in range(THREADS):
                    theirs, wanted = some(ns, 8, f"{other}/{turn}")
                    out = np.zeros(8 * BLOCK, np.uint8)
                    found = ns.get_into(theirs, out)
                    assert out[: found * BLOCK].tobytes() == b"".join(wanted[:found])
                with ns.acquire(keys) as lease:
                    assert [bytes(view) for view in lease.views] == data
                assert ns.remove(keys[4:]) == 4
                assert ns.match(keys).blocks == 4
        except BaseException as e:  # noqa: BLE001 (told to the test)
            failures.append(e)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    ns = shared[0].raw_namespace(f"threads {clients}", BLOCK)
    assert ns.clear() == THREADS * 8 * 4 + 8 * 8
    for client in shared:
        client.close()


# -- restarts


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_a_client_survives_a_restart_of_the_daemon(
    start_daemon: Callable[..., RunningDaemon], tmp_path: Path, way: str, end: str
) -> None:
    """Misses and rejections meanwhile, never an error of a read; then it is connected again by itself."""
    address = f"unix:{tmp_path}/grpc.sock" if way == "grpc+unix" else "127.0.0.1:0"
    daemon = start_daemon(server__grpc=address, host__size="16MiB")
    if way == "grpc":
        daemon.settings["server.grpc"] = daemon.grpc_endpoint.removeprefix("grpc://")
    with Client(daemon.endpoint if way == "unix" else daemon.grpc_endpoint, timeout_s=5.0) as client:
        ns = client.raw_namespace("restarted", BLOCK)
        keys, data = some(ns)
        for _ in range(2):
            assert ns.put(keys, data).stored == 8
            assert ns.get(keys) == data
            pid = client.stats()["daemon"]["pid"]
            if end == "stopped":
                assert daemon.stop() == 0
            else:
                daemon.kill()
            assert ns.get(keys) == []
            assert ns.match(keys).blocks == 0
            assert ns.put(keys, data).rejected == 8
            assert not client.health().reachable
            daemon.restart()
            eventually(lambda: client.health().reachable, 10.0, "the client to be connected again")
            assert client.stats()["daemon"]["pid"] != pid
            assert ns.get(keys) == [], "memory does not outlive the daemon in this release"


def test_a_namespace_made_while_the_daemon_is_away_works_when_it_comes(daemon: RunningDaemon) -> None:
    daemon.kill()
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("before", BLOCK)
        keys, data = some(ns)
        assert ns.put(keys, data).rejected == 8
        daemon.restart()
        eventually(lambda: ns.put(keys, data).stored == 8, 10.0, "a put to succeed")
        assert ns.get(keys) == data


def test_what_was_held_before_a_restart_is_refused_and_harms_nothing(daemon: RunningDaemon) -> None:
    with Client(daemon.endpoint) as client:
        ns = client.raw_namespace("held", BLOCK)
        keys, data = some(ns)
        ns.put(keys, data)
        lease, slots = ns.acquire(keys), ns.reserve(2)
        views = lease.views
        daemon.kill()
        daemon.restart()
        eventually(lambda: client.health().reachable, 10.0, "the client to be connected again")
        assert [bytes(view) for view in views] == data, "what is looked at stays as it is"
        for view in slots.views:
            view[:] = bytes(BLOCK)
        with pytest.raises(Exception, match=r"session|granted"):
            slots.commit(keys[:2])
        assert ns.match(keys).blocks == 0
        lease.release()
        assert ns.put(keys, data).stored == 8
        assert ns.get(keys) == data
        assert client.health().healthy


# -- long chains


@pytest.mark.parametrize("way", ["unix", "grpc"])
def test_a_chain_longer_than_a_message_takes(way: str) -> None:
    with (
        running(server__grpc="127.0.0.1:0") as daemon,
        Client(daemon.endpoint if way == "unix" else daemon.grpc_endpoint, timeout_s=10.0) as client,
    ):
        put_get_and_remove(client.raw_namespace("long", 1024), KEYS_MAX + 1000)


def put_get_and_remove(ns: Namespace, count: int) -> None:
    keys, data = some(ns, count)
    result = ns.put(keys, b"".join(data))
    assert (result.stored, result.existing, result.rejected) == (count, 0, 0)
    assert ns.match(keys).blocks == count
    out = np.zeros(count * 1024, np.uint8)
    assert ns.get_into(keys, out) == count
    assert out.tobytes() == b"".join(data)
    assert ns.get_into(keys, out[: 1000 * 1024], start=KEYS_MAX) == 1000
    assert out[: 1000 * 1024].tobytes() == b"".join(data[KEYS_MAX:])
    assert ns.pin(keys, ttl_s=60) == ns.unpin(keys) == count
    assert ns.put(keys, data).existing == count
    assert ns.remove(keys) == count
    assert ns.match(keys).blocks == 0


# -- more than the memory holds


@pytest.mark.parametrize(
    ("way", "block_bytes"), [("unix", 4096), ("unix", 65536), ("unix", 1 << 20), ("grpc", 65536), ("grpc", 1 << 20)]
)
def test_a_chain_larger_than_the_memory_keeps_its_beginning(way: str, block_bytes: int) -> None:
    """Every block is stored and perhaps evicted, or rejected; what is found leads, and no byte of it is wrong."""
    slots = (16 << 20) // block_bytes
    with (
        running(host__size="16MiB", server__grpc="127.0.0.1:0") as daemon,
        Client(daemon.endpoint if way == "unix" else daemon.grpc_endpoint, timeout_s=10.0) as client,
    ):
        ns = client.raw_namespace("larger", block_bytes)
        keys, data = some(ns, 2 * slots)
        for _ in range(2):
            result = ns.put(keys, data)
            assert result.stored + result.existing + result.rejected == 2 * slots
            found = ns.get(keys)
            assert found == data[: len(found)]
            assert slots // 2 <= len(found) <= slots
        assert ns.put(keys[:4], data[:4]).rejected == 0
        assert ns.get(keys[:4]) == data[:4]
        assert client.health().healthy


def test_a_new_block_size_takes_the_room_of_colder_blocks_rather_than_its_own() -> None:
    """A put much smaller than the memory is all there when it returns, whatever sizes were stored before."""
    with running(host__size="32MiB") as daemon, Client(daemon.endpoint) as client:
        old = client.raw_namespace("old", 16 << 10)
        for i in range(512):
            assert old.put([old.key(b"%d/%d" % (i, j)) for j in range(8)], bytes(8 * (16 << 10))).rejected == 0
        new = client.raw_namespace("new", 64 << 10)
        keys, data = some(new, 100)
        assert new.put(keys, data).stored == 100
        assert new.match(keys).blocks == 100
        assert new.get(keys) == data


def test_prefixes_that_are_used_outlive_those_that_are_not() -> None:
    with running(host__size="16MiB") as daemon, Client(daemon.endpoint, timeout_s=10.0) as client:
        ns = client.raw_namespace("used", 64 << 10)
        used, data = some(ns, 16, "used")
        ns.put(used, data)
        for i in range(100):
            keys, content = some(ns, 8, f"flood {i}")
            assert ns.put(keys, content).rejected == 0
            assert ns.get(used) == data
            client.stats()  # tells the daemon what was read
        assert ns.match([ns.key(b"flood 0 0")]).blocks == 0
        assert client.stats()["counters"]["evicted"] > 0
