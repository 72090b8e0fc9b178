"""What a process read counts also where it ends without closing its client."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kvstore_client import Client, admin
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running

BLOCK, COUNT = 64 << 10, 5

READS = """
import sys
from kvstore_client import Client
client = Client(sys.argv[1])
ns = client.raw_namespace("last", 65536)
keys = [ns.key(b"%d" % i) for i in range(5)]
ns.get(keys[:1])  # tells of what was ahead of it, and of nothing afterwards for a while
assert len(ns.get(keys)) == 5
"""
WITHOUT_ITS_CLIENT = "def reads():\n" + "".join(f"    {line}\n" for line in READS.splitlines() if line) + "reads()\n"
IN_A_CALL = (
    READS
    + """
import threading
held = threading.Event()
def hold():
    with client._transport._keeper.session.lock:
        held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
"""
)


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(host__size="16MiB") as daemon:
        with Client(daemon.endpoint) as client:
            ns = client.raw_namespace("last", BLOCK)
            ns.put([ns.key(b"%d" % i) for i in range(COUNT)], [block(i, BLOCK) for i in range(COUNT)])
        yield daemon


def run(node: RunningDaemon, program: str) -> float:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program, node.endpoint], capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stderr) == (0, "")
    return time.monotonic() - began


def hits(client: Client) -> int:
    key = client.raw_namespace("last", BLOCK).key(b"4")
    return admin.inspect(client, pb.InspectRequest(key=key)).key.hits


@pytest.mark.parametrize("program", [READS, WITHOUT_ITS_CLIENT])
def test_reads_of_a_process_that_ends_without_close_are_counted(node: RunningDaemon, program: str) -> None:
    with Client(node.endpoint) as client:
        before = hits(client)
        run(node, program)
        eventually(lambda: hits(client) == before + 1, what="the last read to be counted")


def test_a_process_ends_in_time_and_without_a_word_while_a_thread_is_in_a_call(node: RunningDaemon) -> None:
    assert run(node, IN_A_CALL) < 45, "for ever, if it waited for that thread"
