"""What else happens to a node with an SSD: clocks set back, thousands of tickets, daemons stopped in the middle.

Of either layout, but for what needs a slow read, which the file layer is made to have and RocksDB is not.
"""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers.ssd.format import pack_record
from kvstore_client import Client, Hint
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import ResourceExhausted
from tests.conftest import RunningDaemon, eventually
from tests.faults.conftest import Program
from tests.faults.faulty_disk import faulty
from tests.faults.tiers import (
    LAYOUTS,
    catalogue,
    catalogue_of,
    durably,
    keys_of,
    nothing_held,
    only_on_ssd,
    opened,
    present,
    put,
    settled,
    ssd,
)
from tests.nodes import anonymous_bytes, block
from tests.wire import Wire

BLOCK = 64 << 10
DAY_S = 86400.0
TICKETS = 65_536
AGAIN = 4000


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clock_that_was_set_back_or_forth_between_two_lives_loses_nothing_that_does_not_expire(
    start_daemon: Callable[..., RunningDaemon], tmp_path: Path, layout: str
) -> None:
    path = tmp_path / "ssd"
    settings = {"ssd__size": "128MiB", "ssd__free_floor": "1MiB", "host__size": "8MiB"}
    daemon = start_daemon(ssd__path=str(path), ssd__layout=layout, **settings)
    with Client(daemon.endpoint, timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("clock", BLOCK)
        keys = keys_of(ns, "block", 40)
        durably(ns, keys)
        mortal = keys_of(ns, "mortal", 4)
        ns.put(mortal, [block(key, BLOCK) for key in mortal], durable=True, hint=Hint(ttl_s=3600))
    daemon.stop()
    records, _ = catalogue(path)
    strange = (0.0, -1e300, 1e300, float("inf"), float("-inf"), float("nan"), 10 * DAY_S, -DAY_S)
    found = catalogue_of(path)
    changed = [
        record._replace(used=record.used + strange[n % len(strange)], created=record.created + strange[n % 3])
        for n, record in enumerate(records)
    ]
    found.write(dict(map(pack_record, changed)))
    found.close()
    daemon.restart()
    with Client(daemon.endpoint, timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("clock", BLOCK)
        assert present(ns, keys) == keys
        assert present(ns, mortal) == mortal
        only_on_ssd(client, ns, keys)
        put(ns, keys_of(ns, "more", 2000), durable=True)  # eviction goes by these times
        now = settled(client)
        assert now["evicted"] > 0
        assert now["used_bytes"] == now["blocks"] * BLOCK
        assert client.health().healthy, client.health().problems


def test_a_daemon_stopped_in_the_middle_of_a_load_costs_its_client_a_miss_and_goes_on_where_it_was() -> None:
    with faulty() as daemon, Client(daemon.endpoint, timeout_s=3.0) as client:
        opened(client)
        ns = client.raw_namespace("stopped", BLOCK)
        keys = keys_of(ns, "block", 16)
        durably(ns, keys)
        only_on_ssd(client, ns, keys)
        daemon.disk(read={"delay_s": 0.2})
        ticket = ns.prefetch(keys, deadline_s=30.0)
        daemon.pause()
        out = np.empty((16, BLOCK), np.uint8)
        found = ns.get_into(keys, list(out))
        for key, got in zip(keys[:found], out, strict=False):
            assert got.tobytes() == block(key, BLOCK)
        daemon.resume()
        daemon.disk()
        eventually(lambda: present(ns, keys) == keys, 20, "the blocks to be read")
        assert ticket.state in ("done", "failed")
        settled(client)
        nothing_held(client)


def asked(wire: Wire, request: pb.PrefetchRequest) -> int:
    """How many prefetches are taken until one is refused."""
    for begun in range(TICKETS):
        try:
            wire.call(prefetch=request)
        except ResourceExhausted:
            return begun
    return TICKETS


def test_more_tickets_than_anybody_may_have_are_refused_and_none_is_kept() -> None:
    with faulty(host__size="16MiB") as daemon, Client(daemon.endpoint, timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("tickets", BLOCK)
        keys = keys_of(ns, "block", 8)
        durably(ns, keys)
        only_on_ssd(client, ns, keys)
        daemon.disk(read={"hangs": True})
        wire = Wire(daemon.socket)
        try:
            opening = pb.OpenNamespaceRequest(digest=ns.digest, block_bytes=BLOCK)
            number = wire.call(open_namespace=opening).open_namespace.namespace_id
            request = pb.PrefetchRequest(namespace_id=number, keys=keys, deadline_ms=600_000)
            begun = asked(wire, request)
            assert 0 < begun <= 4096
            assert ssd(client)["tickets"] == begun
            memory = anonymous_bytes(daemon.pid)
            tickets = [wire.call(ticket=pb.TicketRequest(ticket=1 + n, cancel=True)).ticket for n in range(begun)]
            assert len(tickets) == begun
            for _ in range(AGAIN):  # begun and cancelled at once, with a deadline that is far away
                ticket = wire.call(prefetch=request).prefetch.ticket
                wire.call(ticket=pb.TicketRequest(ticket=ticket, cancel=True))
            assert anonymous_bytes(daemon.pid) - memory < 32 << 20
        finally:
            wire.close()
        eventually(lambda: ssd(client)["tickets"] == 0, 10, "the tickets to go with their session")
        daemon.disk()
        opened(client)
        assert present(ns, keys) == keys
        nothing_held(client)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_block_size_that_another_life_had_under_that_digest_is_refused_or_missed_but_never_read_as_this(
    end: str, layout: str
) -> None:
    """A digest that means two sizes is a caller's fault, met while the catalogue is still being read."""
    with faulty(ssd__size="128MiB", ssd__layout=layout) as daemon:
        with Client(daemon.endpoint, timeout_s=10.0) as client:
            opened(client)
            ns = client.raw_namespace("sizes", BLOCK)
            keys = keys_of(ns, "block", 64)
            durably(ns, keys)
        getattr(daemon, end)()
        daemon.disk(names={"hangs": True})
        daemon.restart()
        wire = Wire(daemon.socket)
        try:
            opening = pb.OpenNamespaceRequest(digest=ns.digest, block_bytes=2 * BLOCK)
            number = wire.call(open_namespace=opening).open_namespace.namespace_id
            daemon.disk()
            with Client(daemon.endpoint, timeout_s=10.0) as client:
                opened(client)
                match = pb.MatchRequest(namespace_id=number, keys=keys)
                assert list(wire.call(match=match).match.tiers) == []
                assert ssd(client)["blocks"] == 0
                other = client.raw_namespace("others", BLOCK)
                more = keys_of(other, "block", 700)
                durably(other, more)
                now = settled(client)
                assert now["used_bytes"] == now["blocks"] * BLOCK
        finally:
            wire.close()
        daemon.stop()
        records, _ = catalogue(daemon.ssd)
        assert len(records) == now["blocks"], "what could not be used was not forgotten"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_puts_while_the_directory_is_opened_are_written_when_it_is(layout: str) -> None:
    with faulty(host__size="16MiB", ssd__size="128MiB", ssd__layout=layout) as daemon:
        daemon.kill()
        daemon.disk(names={"hangs": True})
        daemon.restart()
        with Client(daemon.endpoint, timeout_s=10.0) as client:
            ns = client.raw_namespace("early", BLOCK)
            keys = keys_of(ns, "block", 32)
            assert put(ns, keys) == []
            daemon.disk()
            opened(client)
            eventually(lambda: ssd(client)["blocks"] == len(keys), 10, "them to be written")


def test_a_client_stopped_in_the_middle_of_a_load_keeps_its_slots_from_everybody_and_reads_the_right_bytes(
    start_program: Callable[..., Program],
) -> None:
    with faulty(host__size="8MiB") as daemon, Client(daemon.endpoint, timeout_s=10.0) as client:
        opened(client)
        ns = client.raw_namespace("paused", BLOCK)
        keys = keys_of(ns, "block", 16)
        durably(ns, keys)
        only_on_ssd(client, ns, keys)
        daemon.disk(read={"delay_s": 0.05})
        reader = start_program(READER, daemon.endpoint, BLOCK, *(key.hex() for key in keys))
        assert reader.line() == "reading"
        eventually(lambda: ssd(client)["counters"]["loaded"] > 0, 10, "its load to be under way")
        os.kill(reader.pid, signal.SIGSTOP)
        daemon.disk()
        put(ns, keys_of(ns, "others", 600), at_once=8)
        os.kill(reader.pid, signal.SIGCONT)
        assert json.loads(reader.line()) >= 0, "wrong bytes"
        reader.finish()
        settled(client)
        nothing_held(client)


READER = """
import sys
import numpy as np
from kvstore_client import Client
from tests.nodes import block
endpoint, size, keys = sys.argv[1], int(sys.argv[2]), list(map(bytes.fromhex, sys.argv[3:]))
client = Client(endpoint, name="reader", timeout_s=20.0)
ns = client.raw_namespace("paused", size)
ns.match(keys)
out = np.empty((len(keys), size), np.uint8)
print("reading", flush=True)
found = ns.get_into(keys, list(out))
right = all(got.tobytes() == block(key, size) for key, got in zip(keys[:found], out))
print(found if right else -1, flush=True)
sys.stdin.read()
client.close()
"""
