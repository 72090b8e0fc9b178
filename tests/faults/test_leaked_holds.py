"""Field fault A2: blocks that were looked up and never fetched stayed pinned until nothing could be stored.

Seen as LMCache issues 1034 and 987. A lookup here is `match` (pins nothing) and `acquire` (holds), and
every way in which an engine may forget what it holds is tried; then all of the memory is stored to once more.
"""

from collections.abc import Callable

import pytest

from kvstore_client import Client, Lease, ResourceExhausted
from tests.conftest import RunningDaemon, eventually
from tests.faults.conftest import Program
from tests.nodes import block, running, totals

BLOCK = 4096
CHAIN = 32
WORKERS = 8
LOOKUPS = 125

WORKER = """
import gc, sys
from kvstore_client import Client
endpoint, number, lookups, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
client = Client(endpoint, name=f"worker-{number}")
ns = client.raw_namespace("looked up", 4096)
keys = [ns.key(b"%d" % i) for i in range(32)]
leases, views = [], []
for i in range(lookups):
    assert ns.match(keys).blocks == 32
    lease = ns.acquire(keys[: 1 + i % 32])
    assert len(lease) == 1 + i % 32
    leases.append(lease)
    if how == "views":
        views += lease.views
print("held", flush=True)
word = sys.stdin.readline().strip()
if word == "forget":
    del lease, leases
    views.clear()
    gc.collect()
    print("forgotten", flush=True)
    sys.stdin.readline()
elif word == "raise":
    raise RuntimeError("the engine has failed")
# otherwise the program ends holding everything
"""


def held(client: Client) -> dict[str, int]:
    """Holds of every kind; none of them left is an empty dict."""
    stats = client.stats()
    found = totals(stats)
    found["held bytes"] = sum(session["held_bytes"] for session in stats["sessions"] if session["client"] != "watch")
    found["ended sessions"] = sum(session["ended"] for session in stats["sessions"])
    return {name: count for name, count in found.items() if count and name != "blocks"}


def all_memory_can_be_stored_to(client: Client, size_bytes: int) -> None:
    ns = client.raw_namespace("full size", BLOCK)
    keys = [ns.key(b"%d" % i) for i in range(size_bytes // BLOCK)]
    result = ns.put(keys, [block(i, BLOCK) for i in range(len(keys))])
    assert (result.rejected, result.error) == (0, None)
    for i, found in enumerate(ns.get(keys)):
        assert found == block(i, BLOCK)


def fail_within(lease: Lease) -> None:
    with lease:
        assert lease.views[0] == block(0, BLOCK)
        raise KeyError


@pytest.mark.parametrize("how", ["views", "no views"])
def test_a_thousand_lookups_without_a_fetch_leave_no_hold(start_program: Callable[..., Program], how: str) -> None:
    """Half of the clients are killed; of the others some forget, some fail and some just end."""
    size_bytes = 16 << 20
    with running(host__size=f"{size_bytes}B") as daemon, Client(daemon.endpoint, name="watch") as client:
        ns = client.raw_namespace("looked up", BLOCK)
        ns.put([ns.key(b"%d" % i) for i in range(CHAIN)], [block(i, BLOCK) for i in range(CHAIN)])
        workers = [start_program(WORKER, daemon.endpoint, i, LOOKUPS, how) for i in range(WORKERS)]
        assert [worker.line() for worker in workers] == ["held"] * WORKERS
        assert totals(client.stats())["leased"] == CHAIN
        for worker in workers[: WORKERS // 2]:
            worker.kill()
        workers[4].tell("forget")
        assert workers[4].line() == "forgotten"
        workers[5].tell("raise")
        workers[6].tell("end")
        assert [worker.finish() for worker in workers[5:]] == [1, 0, 0]
        eventually(lambda: not held(client), 10.0, "every hold to end")
        assert workers[4].process.poll() is None, "the one that forgot is alive"
        all_memory_can_be_stored_to(client, size_bytes)
        eventually(lambda: not held(client), 10.0, "what was granted ahead to go back")


@pytest.mark.parametrize("how", ["dropped", "released", "left by an exception", "kept by an array", "never looked at"])
def test_a_lease_ends_with_the_last_that_uses_it(node: RunningDaemon, how: str) -> None:
    with Client(node.endpoint, name="engine") as engine, Client(node.endpoint, name="watch") as watch:
        ns = engine.raw_namespace(f"lease {how}", BLOCK)
        keys = [ns.key(b"%d" % i) for i in range(8)]
        ns.put(keys, [block(i, BLOCK) for i in range(8)])
        for _ in range(10):
            lease = ns.acquire(keys)
            assert totals(watch.stats())["leased"] == 8
            if how == "released":
                lease.release()
            elif how == "left by an exception":
                with pytest.raises(KeyError):
                    fail_within(lease)
            elif how == "kept by an array":
                array = lease.numpy(3)
                lease.release()
                del lease
                assert totals(watch.stats())["leased"] == 8
                assert array.tobytes() == block(3, BLOCK)
                del array
            elif how == "dropped":
                assert len(lease.views) == 8
                del lease
            else:
                del lease
            # Without a collection of garbage: at once, but by another socket than the question.
            eventually(lambda: totals(watch.stats())["leased"] == 0, 2.0, "the lease to end")


def test_a_lease_that_is_refused_leaves_no_hold(node: RunningDaemon) -> None:
    """More than a quarter of the memory for one session is refused as a whole."""
    with Client(node.endpoint, name="engine") as engine, Client(node.endpoint, name="watch") as watch:
        ns = engine.raw_namespace("too much", 1 << 20)
        keys = [ns.key(b"%d" % i) for i in range(20)]
        ns.put(keys, [block(i, 1 << 20) for i in range(20)])
        for _ in range(20):
            with pytest.raises(ResourceExhausted, match=r"holds \d+ bytes of at most"):
                ns.acquire(keys)
        eventually(lambda: not held(watch), 5.0, "every hold to end")
        with ns.acquire(keys[:16]) as lease:
            assert len(lease) == 16
        ns.clear()


@pytest.mark.parametrize("what", ["reserved", "half written", "granted ahead"])
def test_slots_of_a_killed_writer_come_back(
    node: RunningDaemon, start_program: Callable[..., Program], what: str
) -> None:
    text = (
        "import sys\n"
        "from kvstore_client import Client\n"
        "client = Client(sys.argv[1], name='writer')\n"
        "ns = client.raw_namespace('writer', 4096)\n"
        "what = sys.argv[2]\n"
        "if what == 'granted ahead':\n"
        "    ns.put([ns.key(b'%d' % i) for i in range(16)], bytes(16 * 4096))\n"
        "else:\n"
        "    slots = ns.reserve(64)\n"
        "    if what == 'half written':\n"
        "        for view in slots.views: view[:100] = b'x' * 100\n"
        "print('holding', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with Client(node.endpoint, name="watch") as watch:
        for _ in range(3):
            writer = start_program(text, node.endpoint, what)
            assert writer.line() == "holding"
            writer.kill()
            eventually(lambda: not held(watch), 10.0, "every hold to end")
        assert watch.raw_namespace("writer", BLOCK).clear() == (16 if what == "granted ahead" else 0)
