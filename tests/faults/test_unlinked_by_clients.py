"""Field fault A9: a client ended and took the memory that everybody used with it.

Seen as CPython issue 82300: the resource tracker of an attaching process unlinked the segment at exit.
Three clients are attached at a time and end in every way there is; the memory stays, no word on stderr.
"""

import signal
from collections.abc import Callable

import pytest

from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually
from tests.faults.conftest import Program
from tests.nodes import block

BLOCK = 64 << 10
COUNT = 16

ATTACHED = """
import multiprocessing, os, signal, sys
from kvstore_client import Client
client = Client(sys.argv[1], name=sys.argv[2])
ns = client.raw_namespace("shared", 65536)
keys = [ns.key(b"%d" % i) for i in range(16)]
assert len(ns.get(keys)) == 16
lease = ns.acquire(keys)
views = lease.views
array = lease.numpy(3)
reserved = ns.reserve(2)
reserved.views[0][:] = b"x" * 65536
how = sys.argv[2]
if how in ("spawns", "forks"):
    context = multiprocessing.get_context("fork" if how == "forks" else "spawn")
    child = context.Process(target=os.getpid)
    child.start()
    child.join()
    assert child.exitcode == 0
print("attached", flush=True)
sys.stdin.readline()
if how == "exception":
    raise RuntimeError("the engine has failed")
if how == "exit":
    sys.exit(3)
if how == "hard exit":
    os._exit(4)
if how == "abort":
    os.kill(os.getpid(), signal.SIGABRT)
if how == "closed":
    reserved.abort()
    client.close()
if how == "kept by a global":
    import builtins
    builtins.kept = (client, ns, lease, views, array, reserved)
"""

ENDS = {
    "normal": 0,
    "exception": 1,
    "exit": 3,
    "hard exit": 4,
    "abort": -signal.SIGABRT,
    "closed": 0,
    "kept by a global": 0,
    "forks": 0,
    "spawns": 0,
}
QUIET = set(ENDS) - {"exception"}


@pytest.mark.parametrize("how", ENDS)
def test_the_memory_outlives_every_end_of_a_client(
    node: RunningDaemon, start_program: Callable[..., Program], how: str
) -> None:
    data = [block(("shared", i), BLOCK) for i in range(COUNT)]
    with Client(node.endpoint, name="stays") as client:
        ns = client.raw_namespace("shared", BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(COUNT)]
        ns.put(keys, data)
        programs = [start_program(ATTACHED, node.endpoint, name) for name in (how, "killed", "stays attached")]
        assert [program.line() for program in programs] == ["attached"] * 3
        ending, killed, staying = programs
        killed.kill()
        assert ending.finish() == ENDS[how]
        assert ns.get(keys) == data
        with ns.acquire(keys) as lease:
            assert [bytes(view) for view in lease.views] == data
        assert ns.put([ns.key(b"new " + how.encode())], [data[0]]).stored == 1
        assert staying.finish() == 0
        eventually(lambda: len(client.stats()["sessions"]) == 1, 10.0, "the others to be gone")
        assert ns.get(keys) == data
    for program in programs:
        said = program.errors
        assert "resource_tracker" not in said
        assert "leaked" not in said
        assert "Exception ignored" not in said
    assert (ending.errors == "") == (how in QUIET), ending.errors
    assert killed.errors == staying.errors == ""


def test_the_last_client_to_go_takes_nothing_with_it(
    node: RunningDaemon, start_program: Callable[..., Program]
) -> None:
    with Client(node.endpoint) as client:
        ns = client.raw_namespace("shared", BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(COUNT)]
        data = [block(("shared", i), BLOCK) for i in range(COUNT)]
        ns.put(keys, data)
    for _ in range(2):
        program = start_program(ATTACHED, node.endpoint, "normal")
        assert program.line() == "attached"
        assert program.finish() == 0
        with Client(node.endpoint) as client:
            assert client.raw_namespace("shared", BLOCK).get(keys) == data
