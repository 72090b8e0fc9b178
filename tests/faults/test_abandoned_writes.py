"""Field fault A24: a client was killed after it began a put, and every later put of that key failed.

Seen as Mooncake issue 849. Two clients put one key; the first is killed at every place where it can be,
or both live and race: one copy is stored, both are told success, and no byte of the other is in it.
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvstore_client import Client
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.faults.conftest import Program
from tests.nodes import block, totals
from tests.wire import Wire

BLOCK = 64 << 10

FIRST = """
import sys
from kvstore_client import Client
endpoint, name, how = sys.argv[1:]
client = Client(endpoint, name="first")
ns = client.raw_namespace(name, 65536)
keys = [ns.key(b"%d" % i) for i in range(8)]
slots = ns.reserve(8)
if how != "reserved":
    for view in slots.views:
        size = len(view) // 2 if how == "half written" else len(view)
        view[:size] = b"F" * size
if how == "committed":
    assert slots.commit(keys).stored == 8
print("holding", flush=True)
sys.stdin.readline()
"""


def data(name: str, count: int = 8) -> list[bytes]:
    return [block((name, i), BLOCK) for i in range(count)]


def named(client: Client, name: str) -> list[dict[str, Any]]:
    """Sessions of clients of that name."""
    return [session for session in client.stats()["sessions"] if session["client"] == name]


@pytest.mark.parametrize("how", ["reserved", "half written", "written"])
@pytest.mark.parametrize("end", ["killed before", "killed after", "stopped", "alive"])
def test_a_second_writer_commits_whatever_became_of_the_first(
    node: RunningDaemon, start_program: Callable[..., Program], how: str, end: str
) -> None:
    name = f"{how}, {end}"
    with Client(node.endpoint, name="second") as client:
        ns = client.raw_namespace(name, BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(8)]
        before = totals(client.stats())
        first = start_program(FIRST, node.endpoint, name, how)
        assert first.line() == "holding"
        if end == "killed before":
            first.kill()
        elif end == "stopped":
            os.kill(first.pid, signal.SIGSTOP)
        result = ns.put(keys, data("second"))
        assert (result.stored, result.existing, result.rejected) == (8, 0, 0)
        assert ns.get(keys) == data("second")
        if end in ("alive", "stopped"):
            assert totals(client.stats())["granted"] >= 8, "a live process may still write: its slots are not reused"
        first.kill()
        eventually(lambda: not named(client, "first"), 10.0, "the slots of the first to come back")
        stats = client.stats()
        (second,) = [session for session in stats["sessions"] if session["client"] == "second"]
        assert totals(stats)["granted"] == second["granted_slots"], "nobody else has any"
        assert totals(stats)["quarantined"] == 0
        assert ns.get(keys) == data("second")
        assert ns.clear() == 8
        assert totals(client.stats())["blocks"] == before["blocks"]


def test_what_a_killed_client_had_committed_stays(node: RunningDaemon, start_program: Callable[..., Program]) -> None:
    with Client(node.endpoint, name="second") as client:
        ns = client.raw_namespace("committed", BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(8)]
        first = start_program(FIRST, node.endpoint, "committed", "committed")
        assert first.line() == "holding"
        first.kill()
        assert ns.get(keys) == [b"F" * BLOCK] * 8
        result = ns.put(keys, data("second"))
        assert (result.stored, result.existing, result.rejected) == (0, 8, 0), "the first commit wins"
        assert ns.get(keys) == [b"F" * BLOCK] * 8
        ns.clear()


@pytest.mark.parametrize("api", ["put", "reserve"])
def test_of_two_live_writers_one_stores_and_both_are_told_success(node: RunningDaemon, api: str) -> None:
    """Clients that begin at one moment, 40 times: the answers add up to one copy, and the copy is one of the two."""
    rounds, count = 40, 4
    barrier = threading.Barrier(2)
    results: dict[str, list[tuple[int, int, int]]] = {"a": [], "b": []}
    failures: list[BaseException] = []

    def write(who: str) -> None:
        try:
            with Client(node.endpoint, name=who) as client:
                ns = client.raw_namespace(f"race by {api}", BLOCK)
                for i in range(rounds):
                    keys = [ns.key(b"%d/%d" % (i, j)) for j in range(count)]
                    barrier.wait(30)
                    if api == "put":
                        result = ns.put(keys, data(who, count))
                    else:
                        with ns.reserve(count) as slots:
                            for view, content in zip(slots.views, data(who, count), strict=True):
                                view[:] = content
                            barrier.wait(30)
                            result = slots.commit(keys)
                    results[who].append((result.stored, result.existing, result.rejected))
        except BaseException as e:  # noqa: BLE001 (told to the test)
            failures.append(e)
            barrier.abort()

    threads = [threading.Thread(target=write, args=(who,)) for who in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    with Client(node.endpoint, name="reader") as client:
        ns = client.raw_namespace(f"race by {api}", BLOCK)
        for i, (one, other) in enumerate(zip(results["a"], results["b"], strict=True)):
            assert one[0] + other[0] == count, "each block was stored once"
            assert one[1] + other[1] == count
            assert one[2] == other[2] == 0, "both were told success"
            for j in range(count):
                (found,) = ns.get([ns.key(b"%d/%d" % (i, j))])
                assert found in (data("a", count)[j], data("b", count)[j])
        assert (
            sum(n["blocks"] for n in client.stats()["namespaces"] if n["label"] == f"race by {api}") == rounds * count
        )
        assert ns.clear() == rounds * count
        eventually(lambda: totals(client.stats())["granted"] == 0, 10.0, "no slot to stay behind")


def test_a_writer_that_hangs_up_and_lives_keeps_its_slots_from_everybody(node: RunningDaemon) -> None:
    """The end of a socket is not the end of a process: it may write the moment it goes on."""
    with Client(node.endpoint, name="watch") as client:
        wire = Wire(node.socket)
        request = pb.OpenNamespaceRequest(digest=block("hangs up", 32), block_bytes=BLOCK)
        number = wire.call(open_namespace=request).open_namespace.namespace_id
        nonce_hello = pb.HelloRequest(protocol=1, client="again")
        slots = list(wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=5)).reserve.slots)
        mine = next(s for s in client.stats()["sessions"] if s["client"] == "wire")
        wire.close()
        eventually(lambda: totals(client.stats())["quarantined"] == 5, 5.0, "its slots to be set aside")
        assert [s["ended"] for s in client.stats()["sessions"] if s["id"] == mine["id"]] == [True]
        with Wire(node.socket, hello=False) as stranger:
            nonce_hello.resume.nonce = 12345
            nonce_hello.resume.granted.extend(slots)
            assert not stranger.call(hello=nonce_hello).hello.resumed, "only who knows the nonce takes it over"
            stranger.leave()
        assert totals(client.stats())["quarantined"] == 5


def test_a_writer_that_comes_back_goes_on_or_gives_up(node: RunningDaemon) -> None:
    with Client(node.endpoint, name="watch") as client:
        before = totals(client.stats())["quarantined"]
        wire = Wire(node.socket, hello=False)
        nonce = wire.call(hello=pb.HelloRequest(protocol=1, client="wire")).hello.nonce
        request = pb.OpenNamespaceRequest(digest=block("comes back", 32), block_bytes=BLOCK)
        number = wire.call(open_namespace=request).open_namespace.namespace_id
        slots = list(wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=5)).reserve.slots)
        wire.close()
        eventually(lambda: totals(client.stats())["quarantined"] == before + 5, 5.0, "its slots to be set aside")
        hello = pb.HelloRequest(protocol=1, client="again", resume=pb.Resume(nonce=nonce, granted=slots[:2]))
        with Wire(node.socket, hello=False) as again:
            assert again.call(hello=hello).hello.resumed
            assert totals(client.stats())["quarantined"] == before
            assert totals(client.stats())["granted"] == 2
            keys = [block("one", 32)]
            commit = pb.CommitRequest(namespace_id=number, keys=keys, slots=slots[:1], parents=[b""], depths=[0])
            assert list(again.call(commit=commit).commit.results) == [pb.STORED]
            again.call(abort=pb.AbortRequest(slots=slots[1:2]))
            again.call(remove=pb.RemoveRequest(namespace_id=number, keys=keys))
            again.leave()
        eventually(lambda: totals(client.stats())["granted"] == 0, 5.0, "all to be back")
