"""Memory in systemd's store of descriptors: kept over restarts, with a stand-in for systemd that does what it does."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Client, Namespace
from tests.conftest import eventually
from tests.fdstore import DescriptorStore, Service
from tests.nodes import block, running

BLOCK = 16 << 10


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DescriptorStore]:
    made = DescriptorStore(tmp_path / "notify")
    yield made
    made.close()


@pytest.fixture
def service(tmp_path: Path, store: DescriptorStore) -> Iterator[Service]:
    """4 MiB: 64 segments of 4 slots."""
    directory = tmp_path / "d"
    directory.mkdir(mode=0o700)
    made = Service(
        directory, store, {"host.size": "4MiB", "host.persist": "fdstore", "evict.high": "1", "evict.low": "0.99"}
    )
    yield made
    made.kill()


def put(ns: Namespace, prefix: str, count: int) -> list[bytes]:
    keys = [ns.key(f"{prefix} {i}".encode()) for i in range(count)]
    for key in keys:
        assert ns.put([key], block(key, ns.block_bytes)).stored == 1
    return keys


def served(ns: Namespace, keys: list[bytes]) -> int:
    out, found = np.empty(ns.block_bytes, np.uint8), 0
    for key in keys:
        if ns.get_into([key], out):
            assert out.tobytes() == block(key, ns.block_bytes), "wrong bytes"
            found += 1
    return found


def back(client: Client) -> None:
    eventually(lambda: client.health().reachable, 20, "the client to attach again")


def test_what_systemd_keeps_is_served_by_the_next_process(service: Service, store: DescriptorStore) -> None:
    with Client(service.endpoint) as client:
        ns = client.raw_namespace("kept", BLOCK)
        keys = put(ns, "kept", 100)
        for end in (service.kill, service.stop, service.kill):
            end()
            store.settled()
            assert len(store.kept) == 1 + 2 * 64, "the ledger, and two of each segment"
            service.restart()
            back(client)
            assert served(ns, keys) == 100
            persist = client.stats()["persist"]
            assert (persist["kind"], persist["path"], persist["trouble"]) == ("fdstore", "", "")
            assert (persist["adopted_blocks"], persist["cold"]) == (100, "")
        assert all(os.fstat(fd).st_mode & 0o777 == 0o600 for fd in store.kept.values())


def test_segments_that_are_replaced_are_taken_out_of_the_store(service: Service, store: DescriptorStore) -> None:
    """Of two block sizes that need segments of other sizes each time: systemd keeps only what there is."""
    with Client(service.endpoint) as client:
        small, large = client.raw_namespace("small", BLOCK), client.raw_namespace("large", 1 << 20)
        small_keys = put(small, "small", 200)
        keys = [large.key(b"%d" % i) for i in range(2)]
        for key in keys:
            assert large.put([key], block(key, 1 << 20)).stored == 1
        eventually(
            lambda: len(store.kept) == 1 + 2 * client.stats()["host"]["segments"], 10, "what is gone to be let go"
        )
        assert {"kvstored-segment-1", "kvstored-rows-1"} - store.kept.keys() or len(store.kept) < 1 + 2 * 64
        before = (served(small, small_keys), served(large, keys))
        service.kill()
        service.restart()
        back(client)
        service.says("dropped=0")
        assert (served(small, small_keys), served(large, keys)) == before


def test_a_daemon_waits_until_the_one_before_is_gone_for_good(
    service: Service, store: DescriptorStore, tmp_path: Path
) -> None:
    """Its threads may write to a slot until then. That nobody holds its locks any more says nothing of that."""
    directory = tmp_path / "next"
    directory.mkdir(mode=0o700)
    with Client(service.endpoint) as client:
        keys = put(client.raw_namespace("waits", BLOCK), "waits", 20)
        service.pause()
        following = Service.__new__(Service)
        following.store, following.directory, following.log = store, directory, ""
        following.socket = directory / "s"
        following.endpoint = f"unix://{following.socket}"
        following.settings = {
            **service.settings,
            "server.socket": str(following.socket),
            "server.state_dir": str(directory / "state"),
        }
        following.begin()
        try:
            eventually(lambda: _polls(following.pid, service.pid), 20, "it to watch the one before")
            assert not following.ready()
            service.kill()
            eventually(following.ready, 20, "the next one to serve")
            with Client(following.endpoint) as other:
                assert served(other.raw_namespace("waits", BLOCK), keys) == 20
        finally:
            following.kill()


def _polls(pid: int, of: int) -> bool:
    """Whether a process has a pidfd of another one."""
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        try:
            if f"Pid:\t{of}\n" in info.read_text():
                return True
        except FileNotFoundError:
            continue
    return False


def test_descriptors_of_no_more_use_are_given_up(service: Service, store: DescriptorStore) -> None:
    """Where host.persist is something else by now, or what was kept cannot be used: memory is not kept for nobody."""
    service.stop()
    store.settled()
    assert store.kept
    service.restart(host__persist="none")
    store.settled()
    assert not store.kept
    service.stop()
    service.restart(host__persist="fdstore")
    service.stop()
    store.settled()
    os.close(store.kept.pop("kvstored-ledger"))
    service.restart()
    store.settled()
    assert "it has no ledger" in service.output()
    assert len(store.kept) == 1 + 2 * 64


def test_without_systemd_it_says_that_memory_ends_with_the_process() -> None:
    with running(host__size="4MiB", host__persist="fdstore") as daemon:
        assert "memory ends with this process" in daemon.output()
        with Client(daemon.endpoint) as client:
            stats = client.stats()
        assert "no service of systemd" in stats["persist"]["trouble"]
        assert any("no service of systemd" in why for why in stats["daemon"]["degraded"])
