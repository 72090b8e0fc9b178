"""Field fault A8: killed processes left their shared memory behind until restarts found none.

Seen as vLLM issues 51579 and 54002. The daemon's memory has no name anywhere, so nothing can be left but by
a process that still maps it; a client that outlives the daemon lets go of it by itself.
"""

import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually
from tests.faults.conftest import Program
from tests.nodes import block, running

RESTARTS = 10
SLAB_BYTES = 256 << 20
BLOCK = 64 << 10

IDLE = """
import sys
from kvstore_client import Client
client = Client(sys.argv[1], name="idle")
ns = client.raw_namespace("survivor", 65536)
print(ns.match([ns.key(b"0")]).blocks, flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "lease":
        lease = ns.acquire([ns.key(b"0")])
        print(len(lease.views), flush=True)
    elif word == "look":
        print(bytes(lease.views[0]).hex()[:16], flush=True)
    elif word == "get":
        print(len(ns.get([ns.key(b"0")])), flush=True)
"""


def memory_of(pid: int) -> set[int]:
    """Inodes of the shared memory that a process has open or mapped as a daemon makes it."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[5].startswith("/memfd:kvstored"):
            found.add(int(fields[4]))
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(file.readlink()).startswith("/memfd:kvstored"):
                found.add(file.stat().st_ino)
        except OSError:
            continue
    return found


def users_of(inodes: set[int]) -> set[int]:
    """Processes that have any of it open or mapped."""
    users = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if memory_of(int(process.name)) & inodes:
                users.add(int(process.name))
        except OSError:
            continue  # it ended, or is not ours to look into
    return users


def named_memory() -> set[str]:
    """What a daemon may have left where shared memory has names; directories of other tests are theirs."""
    found = (path for path in Path("/dev/shm").iterdir() if not path.name.startswith("kvstored-test-"))
    return {str(path) for path in found if "kvstore" in path.name}


def shared_bytes() -> int:
    """Shared memory of the whole machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no Shmem")


def store(client: Client, name: str) -> tuple[list[bytes], list[bytes]]:
    ns = client.raw_namespace(name, BLOCK)
    keys, data = [ns.key(b"%d" % i) for i in range(4)], [block((name, i), BLOCK) for i in range(4)]
    assert ns.put(keys, data).stored == 4
    assert ns.get(keys) == data
    return keys, data


def test_killed_and_started_ten_times_there_is_one_slab_at_most() -> None:
    """And another daemon beside it, with its client, never notices."""
    with running(host__size="16MiB") as other, Client(other.endpoint) as witness:
        keys, data = store(witness, "witness")
        epoch, names = witness.stats()["daemon"]["epoch"], named_memory()
        with running(host__size=f"{SLAB_BYTES}B") as daemon:
            given_back = 0
            for _ in range(RESTARTS):
                with Client(daemon.endpoint) as client:
                    store(client, "again")
                memory = memory_of(daemon.pid)
                assert len(memory) > 60, "a slab is some 64 segments"
                shared = shared_bytes()
                daemon.kill()
                eventually(lambda memory=memory: not users_of(memory), what="nobody to have its memory")  # type: ignore[misc]
                given_back += shared_bytes() < shared - SLAB_BYTES // 2
                daemon.restart()
                assert not memory_of(daemon.pid) & memory
            # Others use shared memory too, and may take as much in the moment of a kill, but not each time.
            assert given_back >= RESTARTS - 3
            assert named_memory() <= names
            assert witness.raw_namespace("witness", BLOCK).get(keys) == data
            assert witness.stats()["daemon"]["epoch"] == epoch


def test_what_a_killed_daemon_leaves_in_its_directories_does_not_grow(daemon: RunningDaemon) -> None:
    def files() -> dict[str, int]:
        found = {}
        for path in daemon.directory.rglob("*"):
            if path.name != "kvstored.log":
                mode = path.lstat().st_mode
                found[str(path)] = path.stat().st_size if stat.S_ISREG(mode) else 0
        return found

    first = None
    for _ in range(3):
        with Client(daemon.endpoint) as client:
            store(client, "again")
        daemon.kill()
        first = first or files()
        assert files().keys() == first.keys()
        assert sum(files().values()) < 4096
        daemon.restart()


def test_an_idle_client_lets_go_of_the_memory_of_a_dead_daemon(
    daemon: RunningDaemon, start_program: Callable[..., Program]
) -> None:
    """It has no reason to look, and the memory it maps may be what the next daemon lacks to start."""
    with Client(daemon.endpoint) as client:
        store(client, "survivor")
    idle = start_program(IDLE, daemon.endpoint)
    assert idle.line() == "1"
    memory = memory_of(daemon.pid)
    slab = {inode for inode in memory_of(idle.pid) if inode in memory}
    assert len(slab) > 1
    daemon.kill()
    # What remains is the index, through which reads notice that the daemon is gone.
    eventually(lambda: len(memory_of(idle.pid) & memory) <= 1, 5.0, "the client to unmap the slab")
    daemon.restart()
    eventually(lambda: memory_of(idle.pid) & memory_of(daemon.pid), 10.0, "the client to come back")
    eventually(lambda: not memory_of(idle.pid) & memory, 5.0, "the client to let go of the old index")
    idle.tell("get")
    assert idle.line() == "0"
    with Client(daemon.endpoint) as client:
        store(client, "survivor")
    idle.tell("get")
    assert idle.line() == "1"


def test_a_view_keeps_its_own_memory_and_no_more(daemon: RunningDaemon, start_program: Callable[..., Program]) -> None:
    with Client(daemon.endpoint) as client:
        store(client, "survivor")
        other = client.raw_namespace("much else", 1 << 20)
        other.put([other.key(b"%d" % i) for i in range(16)], np.zeros(16 << 20, np.uint8))
    idle = start_program(IDLE, daemon.endpoint)
    assert idle.line() == "1"
    idle.tell("lease")
    assert idle.line() == "1"
    memory = memory_of(daemon.pid)
    daemon.kill()
    eventually(lambda: len(memory_of(idle.pid) & memory) <= 2, 5.0, "all but one segment to be unmapped")
    daemon.restart()
    eventually(lambda: memory_of(idle.pid) & memory_of(daemon.pid), 10.0, "the client to come back")
    idle.tell("look")
    assert idle.line() == block(("survivor", 0), BLOCK).hex()[:16]
    idle.tell("get")
    assert idle.line() == "0"


def test_a_daemon_may_be_killed_at_any_moment_of_its_start(daemon: RunningDaemon) -> None:
    daemon.stop()
    for cut_s in (0.05, 0.2, 0.35, 0.5):
        with daemon.socket.with_name("cut.log").open("ab") as log:
            process = subprocess.Popen(daemon.command(), stdout=log, stderr=log)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(cut_s)
        memory = memory_of(process.pid)
        process.kill()
        process.wait(20)
        assert users_of(memory) == set()
    daemon.restart()
    with Client(daemon.endpoint) as client:
        store(client, "after")
