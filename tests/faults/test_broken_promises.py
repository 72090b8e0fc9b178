"""Field fault A6: a lookup promised tokens, eviction took them before they were loaded, and the engine died.

Seen as vLLM issue 39702 and LMCache issue 4133. The promise here is the lease of `acquire`; `match` is a
hint, and what follows it may find less but never raises and never yields wrong bytes.
"""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore_client import Client
from kvstore_client.namespace import Namespace
from tests.conftest import RunningDaemon
from tests.faults.conftest import Program
from tests.nodes import block, running

SIZE_BYTES = 32 << 20
BLOCK = 64 << 10
PROMISED = 100
ROUNDS = 2


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(host__size=f"{SIZE_BYTES}B") as daemon:
        yield daemon


def store(ns: Namespace, count: int = PROMISED) -> list[bytes]:
    """A prefix of `count` blocks, all of them there: what was evicted meanwhile is stored again."""
    keys = [ns.key(b"%d" % i) for i in range(count)]
    blocks = [block((ns.digest, i), ns.block_bytes) for i in range(count)]
    for _ in range(20):
        assert ns.put(keys, blocks).rejected == 0
        if ns.match(keys).blocks == count:
            return keys
    raise AssertionError(f"{ns.match(keys).blocks} of {count} blocks are there after 20 puts")


def flood(ns: Namespace, times: int = ROUNDS) -> None:
    """Stores `times` as much as the memory holds, in prefixes of 8 blocks."""
    data = bytes(8 * ns.block_bytes)
    for i in range(times * SIZE_BYTES // len(data)):
        keys = [ns.key(b"flood %d/%d" % (i, j)) for j in range(8)]
        assert ns.put(keys, data).rejected == 0


@pytest.mark.parametrize("block_bytes", [BLOCK, 3 * 4096, 4097], ids=str)
@pytest.mark.parametrize("evicts", ["the same client", "another client", "another block size"])
def test_what_was_acquired_is_there_whatever_is_evicted(node: RunningDaemon, evicts: str, block_bytes: int) -> None:
    with Client(node.endpoint, name="engine") as engine, Client(node.endpoint, name="other") as other:
        ns = engine.raw_namespace(f"promised {evicts}", block_bytes)
        keys = store(ns)
        evicted = engine.stats()["counters"]["evicted"]
        with ns.acquire(keys) as lease:
            assert len(lease) == PROMISED
            flood(
                (engine if evicts == "the same client" else other).raw_namespace(
                    "flood", 128 << 10 if evicts == "another block size" else max(block_bytes, 16 << 10)
                )
            )
            assert engine.stats()["counters"]["evicted"] > evicted
            assert [bytes(view) for view in lease.views] == [
                block((ns.digest, i), block_bytes) for i in range(PROMISED)
            ]
            assert ns.get(keys) == [block((ns.digest, i), block_bytes) for i in range(PROMISED)]
        ns.clear()
        other.raw_namespace("flood", 128 << 10).clear()


def test_what_was_acquired_is_there_though_it_was_removed_or_its_time_is_over(node: RunningDaemon) -> None:
    with Client(node.endpoint) as client:
        ns = client.raw_namespace("removed", BLOCK)
        keys = store(ns)
        lease = ns.acquire(keys)
        assert ns.remove(keys[:50]) == 50
        assert ns.clear() == 50
        assert ns.match(keys).blocks == 0
        flood(client.raw_namespace("flood", BLOCK))
        fresh = [block(("again", i), BLOCK) for i in range(PROMISED)]
        assert ns.put(keys, fresh).stored == PROMISED, "the keys are free for other copies meanwhile"
        assert [bytes(view) for view in lease.views] == [block((ns.digest, i), BLOCK) for i in range(PROMISED)]
        lease.release()
        assert ns.get(keys) == fresh
        ns.clear()


@pytest.mark.parametrize("by", ["get_into", "get", "acquire"])
def test_after_a_match_the_rest_may_be_shorter_and_never_wrong(node: RunningDaemon, by: str) -> None:
    with Client(node.endpoint) as client, Client(node.endpoint, name="other") as other:
        ns = client.raw_namespace(f"hint {by}", BLOCK)
        keys = store(ns)
        assert ns.match(keys).blocks == PROMISED
        flood(other.raw_namespace("flood", BLOCK))
        if by == "get":
            found = ns.get(keys)
        elif by == "acquire":
            with ns.acquire(keys) as lease:
                found = [bytes(view) for view in lease.views]
        else:
            out = np.zeros(PROMISED * BLOCK, np.uint8)
            found = [out[i * BLOCK : (i + 1) * BLOCK].tobytes() for i in range(ns.get_into(keys, out))]
        assert len(found) < PROMISED
        assert found == [block((ns.digest, i), BLOCK) for i in range(len(found))]


def test_readers_beside_eviction_get_right_bytes_or_fewer(node: RunningDaemon) -> None:
    """No exception and no wrong byte, however match, get and acquire fall between the steps of eviction."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def evict() -> None:
        try:
            with Client(node.endpoint, name="flood") as client:
                ns = client.raw_namespace("flood", BLOCK)
                while not stop.is_set():
                    flood(ns, 1)
        except BaseException as e:  # noqa: BLE001 (told to the test)
            failures.append(e)

    thread = threading.Thread(target=evict)
    thread.start()
    try:
        with Client(node.endpoint) as client:
            ns = client.raw_namespace("beside", BLOCK)
            wanted = [block((ns.digest, i), BLOCK) for i in range(32)]
            counts = set()
            keys = store(ns, 32)
            for _ in range(60):
                ns.put(keys, wanted)
                promised = ns.match(keys).blocks
                found = ns.get(keys)
                assert found == wanted[: len(found)]
                counts.add((promised, len(found)))
                with ns.acquire(keys) as lease:
                    assert [bytes(view) for view in lease.views] == wanted[: len(lease)]
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert not failures
    assert counts


def test_a_promise_to_one_engine_holds_while_another_dies(
    node: RunningDaemon, start_program: Callable[..., Program]
) -> None:
    """Two leases on the same blocks: the end of one is not the end of the other."""
    with Client(node.endpoint) as client:
        ns = client.raw_namespace("shared promise", BLOCK)
        keys = store(ns)
        text = (
            "import sys\n"
            "from kvstore_client import Client\n"
            "ns = Client(sys.argv[1]).raw_namespace('shared promise', int(sys.argv[2]))\n"
            "lease = ns.acquire([ns.key(b'%d' % i) for i in range(100)])\n"
            "print(len(lease.views), flush=True)\n"
            "sys.stdin.readline()\n"
        )
        program = start_program(text, node.endpoint, BLOCK)
        assert program.line() == str(PROMISED)
        with ns.acquire(keys) as lease:
            program.kill()
            flood(client.raw_namespace("flood", BLOCK))
            assert [bytes(view) for view in lease.views] == [block((ns.digest, i), BLOCK) for i in range(PROMISED)]
        flood(client.raw_namespace("flood", BLOCK))
        assert ns.match(keys).blocks < PROMISED, "nobody holds it any more"
