"""Reads go before writes, and nothing piles up, on a disk that takes 200 ms for each write with 5,000 queued.

The field fault: reads waited behind writes in one pool, and write jobs piled up until memory ran out.
"""

from functools import partial
from typing import Any

import numpy as np

from kvstore_client import Client
from tests.conftest import eventually
from tests.faults.faulty_disk import faulty
from tests.faults.tiers import durably, keys_of, only_on_ssd, opened, put, settled, ssd
from tests.nodes import anonymous_bytes, block
from tests.stopwatch import took

BLOCK = 16 << 10
PUTS = 5000
HIT_S, READ_S = 0.020, 1.0
HITS, READS = 1000, 40


def queue(client: Client, kind: str) -> dict[str, Any]:
    (found,) = [queue for queue in ssd(client)["queues"] if queue["kind"] == kind]
    return dict(found)


def test_hits_and_reads_stay_fast_while_five_thousand_slow_writes_wait() -> None:
    # Memory for all of them and more: what it evicts waits no longer, and they would be fewer at times.
    with faulty(host__size="128MiB", ssd__size="512MiB") as daemon, Client(daemon.endpoint, timeout_s=20.0) as client:
        opened(client)
        ns = client.raw_namespace("first", BLOCK)
        below = keys_of(ns, "below", READS)
        durably(ns, below)
        only_on_ssd(client, ns, below)
        settled(client)
        before = ssd(client)["counters"]
        memory = anonymous_bytes(daemon.pid)
        daemon.disk(write={"delay_s": 0.2})
        assert put(ns, keys_of(ns, "queued", PUTS), at_once=50) == []
        now = ssd(client)
        (waiting,) = [queue for queue in now["queues"] if queue["kind"] == "write"]
        assert waiting["running"]
        assert waiting["waiting"] > 1000
        assert waiting["waiting_bytes"] <= 64 << 20, "more waits than the half of host.size"
        done = sum(now["counters"][name] - before[name] for name in ("written", "writes_dropped"))
        assert done >= PUTS - waiting["waiting"] - waiting["running"] - 64, "what did not fit was not counted"
        assert anonymous_bytes(daemon.pid) - memory < 32 << 20
        out = np.empty(BLOCK, np.uint8)
        hot = ns.key(b"hot")
        ns.put([hot], block(hot, BLOCK))
        hits = sorted(took(lambda: ns.get_into([hot], out)) for _ in range(HITS))
        leases = sorted(took(lambda: ns.acquire([hot]).release()) for _ in range(HITS // 4))
        late = [keys_of(ns, f"late {n}", 1) for n in range(HITS // 4)]
        puts = sorted(took(partial(put, ns, keys)) for keys in late)
        reads = []
        for key in below:
            reads.append(took(lambda key=key: ns.get_into([key], out)))  # type: ignore[misc]
            assert out.tobytes() == block(key, BLOCK), "a read was a miss"
        assert queue(client, "write")["waiting"], "the disk was not busy all the time"
        p99 = {"hits": hits[-HITS // 100], "leases": leases[-3], "puts": puts[-3]}
        print({name: round(value * 1e3, 2) for name, value in p99.items()}, round(max(reads) * 1e3, 1), "ms")
        assert p99["hits"] < HIT_S, p99
        assert max(p99.values()) < 0.1, p99
        assert max(reads) < READ_S
        daemon.disk()
        eventually(lambda: queue(client, "write")["waiting"] == 0, 30, "the queue to be written")


def test_a_burst_of_prefetches_is_bounded_and_demand_reads_pass_it() -> None:
    with faulty(host__size="32MiB", ssd__size="256MiB") as daemon, Client(daemon.endpoint, timeout_s=20.0) as client:
        opened(client)
        ns = client.raw_namespace("first", BLOCK)
        below = keys_of(ns, "below", 600)
        durably(ns, below)
        only_on_ssd(client, ns, below)
        settled(client)
        daemon.disk(read={"delay_s": 0.05})
        tickets = [ns.prefetch(below[at : at + 20], deadline_s=20.0) for at in range(0, 500, 20)]
        assert queue(client, "prefetch")["waiting_bytes"] <= 8 << 20
        out = np.empty(BLOCK, np.uint8)
        for key in below[560:580]:
            assert took(lambda key=key: ns.get_into([key], out)) < READ_S  # type: ignore[misc]
            assert out.tobytes() == block(key, BLOCK), "a read was a miss"
        assert any(ticket.state == "running" for ticket in tickets), "the burst was over before"
        for ticket in tickets:
            ticket.cancel()
        assert settled(client)["tickets"] == 0
