"""Rule 2: nothing that a live local process can still touch is reused, however long it stands still."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from kvstore_client import Client, Namespace, ResourceExhausted
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block
from tests.rules.processes import Program, exact, fill, names, pool, session, store, wait_for_loop
from tests.wire import Wire

BLOCK = 16 << 10
SLOTS = 512
GRANT_MAX = SLOTS // 64
SESSION_MAX = SLOTS // 4
TENANT_MAX = SLOTS * 3 // 4

Start = Callable[..., Program]


@pytest.fixture
def daemon(start_daemon: Callable[..., RunningDaemon]) -> RunningDaemon:
    """8 MiB: 512 slots of 16 KiB. Holds of callers without shared memory end after a millisecond."""
    return start_daemon(host__size="8MiB", lease__ttl="1ms")


@pytest.fixture
def ns(client: Client) -> Namespace:
    return client.raw_namespace("rule 2", BLOCK)


HOLDER = """
client = Client(sys.argv[1], name="holder")
ns = client.raw_namespace("rule 2", 16 << 10)
keys = [ns.key(b"held %d" % i) for i in range(20)]
assert ns.put(keys[:8], [block(key, 16 << 10) for key in keys[:8]]).stored == 8
slots = ns.reserve(6)
lease = ns.acquire(keys[:4])
views = lease.views
for view in slots.views:
    view[: 8 << 10] = b"half written " * 630 + b"!!"
say("holding")
while (word := hear()) != "end":
    if word == "commit":
        for view, key in zip(slots.views, keys[8:14]):
            view[:] = block(key, 16 << 10)
        done = slots.commit(keys[:14], start=8)
        say("stored", done.stored)
    elif word == "check":
        say("exact", [bytes(view) == block(key, 16 << 10) for view, key in zip(views, keys)].count(True))
    elif word == "put":
        done = ns.put(keys, [block(key, 16 << 10) for key in keys[14:]], start=14)
        say("stored", done.stored)
"""


@pytest.fixture
def holder(daemon: RunningDaemon, start_program: Start) -> Program:
    """A client with 8 slots granted ahead, 6 reserved and half written, and 4 blocks leased."""
    program = start_program(HOLDER, daemon.endpoint)
    assert program.hear() == "holding"
    return program


def test_a_client_stopped_past_every_limit_writes_only_where_it_may(
    holder: Program, client: Client, ns: Namespace
) -> None:
    holder.stop()
    before = pool(client, BLOCK)
    assert before["granted"] >= 6
    assert before["leased"] == 4
    others = fill(client, ns, "others")
    wait_for_loop(client, "expire", 5)
    wait_for_loop(client, "evict", 5)
    held = session(client, "holder")
    assert held is not None
    assert held["granted_slots"] == before["granted"]
    assert held["leased_slots"] == 4
    assert client.stats()["counters"]["reservations_expired"] == 0
    assert exact(ns, others) > SLOTS // 2
    holder.go_on()
    assert holder.ask("check") == "exact 4"
    assert holder.ask("commit") == "stored 6"
    assert holder.ask("put") == "stored 6"
    own = [ns.key(b"held %d" % i) for i in range(20)]
    assert exact(ns, own[8:]) == 12
    assert exact(ns, others) > SLOTS // 2
    assert holder.ask("check") == "exact 4"


def test_what_a_client_held_is_free_at_once_when_it_is_killed(holder: Program, client: Client, ns: Namespace) -> None:
    assert pool(client, BLOCK)["granted"] >= 6
    holder.kill()
    eventually(lambda: session(client, "holder") is None, 5, "the session to be forgotten")
    after = pool(client, BLOCK)
    assert [after[what] for what in ("granted", "leased", "quarantined", "doomed")] == [0, 0, 0, 0]
    assert all(s["held_bytes"] == 0 for s in client.stats()["sessions"])
    assert after["free"] + after["blocks"] == after["slots"]


def test_a_stopped_client_that_is_killed_gives_everything_back(holder: Program, client: Client) -> None:
    holder.stop()
    holder.kill()
    eventually(lambda: session(client, "holder") is None, 5, "the session to be forgotten")
    after = pool(client, BLOCK)
    assert [after[what] for what in ("granted", "leased", "quarantined", "doomed")] == [0, 0, 0, 0]


def test_a_half_written_reservation_is_seen_by_nobody(holder: Program, client: Client, ns: Namespace) -> None:
    keys = [ns.key(b"held %d" % i) for i in range(20)]
    assert ns.match(keys).blocks == 8
    assert [ns.match([key]).blocks for key in keys[8:14]] == [0] * 6
    assert len(ns.get(keys)) == 8
    assert pool(client, BLOCK)["blocks"] == 8
    holder.kill()
    eventually(lambda: pool(client, BLOCK)["granted"] == 0, 5, "the reservation to end")
    assert pool(client, BLOCK)["blocks"] == 8
    assert exact(ns, keys) == 8


def test_slots_granted_ahead_go_back_after_a_second_without_use(daemon: RunningDaemon, client: Client) -> None:
    with Client(daemon.endpoint, name="writer") as writer:
        store(writer.raw_namespace("rule 2", BLOCK), names("once", 1))
        ns = writer.raw_namespace("rule 2", BLOCK)
        keys = [ns.key(name) for name in names("batch", 16)]
        ns.put(keys, [block(key, BLOCK) for key in keys])
        held = session(client, "writer")
        assert held is not None
        assert 0 < held["granted_slots"] <= GRANT_MAX
        eventually(lambda: (session(client, "writer") or {})["granted_slots"] == 0, 5, "the grants to go back")
        assert exact(ns, keys) == 16


@pytest.fixture
def wire(daemon: RunningDaemon) -> Iterator[Wire]:
    with Wire(daemon.socket) as wire:
        yield wire


def open_namespace(wire: Wire, ns: Namespace) -> int:
    request = pb.OpenNamespaceRequest(digest=ns.digest, block_bytes=ns.block_bytes, label="wire")
    return wire.call(open_namespace=request).open_namespace.namespace_id


def commit(wire: Wire, number: int, key: bytes, slot: int, want: int) -> list[int]:
    """Commits one root (whatever is in its slot); the slots granted ahead with the answer."""
    request = pb.CommitRequest(namespace_id=number, keys=[key], slots=[slot], parents=[b""], depths=[0], want=want)
    reply = wire.call(commit=request).commit
    assert list(reply.results) == [pb.STORED]
    return list(reply.slots)


def test_no_more_is_granted_ahead_than_a_64th_of_the_memory(wire: Wire, ns: Namespace) -> None:
    number = open_namespace(wire, ns)
    slots = list(wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=4)).reserve.slots)
    ahead: list[int] = []
    for i, slot in enumerate(slots):
        ahead += commit(wire, number, ns.key(b"grant %d" % i), slot, 64)
    assert len(set(ahead)) == len(ahead) == GRANT_MAX
    assert commit(wire, number, ns.key(b"one more"), ahead.pop(), 64) != []


def test_a_block_larger_than_a_64th_of_the_memory_is_never_granted_ahead(wire: Wire, client: Client) -> None:
    large = client.raw_namespace("large", 256 << 10)
    number = open_namespace(wire, large)
    for i in range(2):
        (slot,) = wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=1)).reserve.slots
        assert commit(wire, number, large.key(b"%d" % i), slot, 64) == []


@pytest.fixture
def exhaust(daemon: RunningDaemon, ns: Namespace) -> Iterator[Callable[[], None]]:
    """Has sessions hold three quarters of the memory, together with whoever holds some of it already."""
    with contextlib.ExitStack() as wires:

        def exhaust() -> None:
            asking = wires.enter_context(Wire(daemon.socket))
            pools = asking.call(stats=pb.StatsRequest()).stats.pools
            wanted = TENANT_MAX - sum(pool.granted for pool in pools)
            while wanted:
                wire = wires.enter_context(Wire(daemon.socket))
                number = open_namespace(wire, ns)
                for count in (min(64, wanted), min(64, max(wanted - 64, 0))):
                    if count:
                        request = pb.ReserveRequest(namespace_id=number, count=count)
                        assert len(wire.call(reserve=request).reserve.slots) == count
                        wanted -= count

        yield exhaust


def test_grants_are_recalled_when_memory_is_short_and_none_are_given_until_they_are_back(
    daemon: RunningDaemon, wire: Wire, ns: Namespace, exhaust: Callable[[], None]
) -> None:
    number = open_namespace(wire, ns)
    (first,) = wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=1)).reserve.slots
    ahead = commit(wire, number, ns.key(b"first"), first, 64)
    assert len(ahead) == GRANT_MAX
    (second,) = wire.call(reserve=pb.ReserveRequest(namespace_id=number, count=1)).reserve.slots
    exhaust()
    assert not wire.call(health=pb.HealthRequest()).recall
    with Wire(daemon.socket) as late:
        with pytest.raises(ResourceExhausted):
            late.call(reserve=pb.ReserveRequest(namespace_id=open_namespace(late, ns), count=1))
        assert wire.call(health=pb.HealthRequest()).recall
        assert commit(wire, number, ns.key(b"second"), second, 64) == []
        wire.call(abort=pb.AbortRequest(slots=ahead))
        assert not wire.call(health=pb.HealthRequest()).recall
        request = pb.ReserveRequest(namespace_id=open_namespace(late, ns), count=64)
        assert len(late.call(reserve=request).reserve.slots) == GRANT_MAX + 1, "and what the commit of one freed"


def test_the_sdk_gives_back_what_is_recalled_though_it_is_not_idle(
    daemon: RunningDaemon,
    client: Client,
    ns: Namespace,
    exhaust: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [ns.key(name) for name in names("ahead", 16)]
    ns.put(keys, [block(key, BLOCK) for key in keys])
    own = client._transport._session  # type: ignore[attr-defined]
    monkeypatch.setattr(own, "used_grants_at", float("inf"))  # used this very moment, whenever somebody looks
    exhaust()
    with Wire(daemon.socket) as late:
        with pytest.raises(ResourceExhausted):
            late.call(reserve=pb.ReserveRequest(namespace_id=open_namespace(late, ns), count=1))
        eventually(lambda: (session(client, "test") or {})["granted_slots"] == 0, 10, "the grants to come back")


def test_one_session_holds_at_most_a_quarter(daemon: RunningDaemon, client: Client, ns: Namespace) -> None:
    keys = store(ns, names("leased", 200))
    with Client(daemon.endpoint, name="greedy") as greedy:
        mine = greedy.raw_namespace("rule 2", BLOCK)
        leases = [mine.acquire([key]) for key in keys[: SESSION_MAX - 20]]
        slots = mine.reserve(20)
        with pytest.raises(ResourceExhausted, match="of at most"):
            mine.reserve(1)
        with pytest.raises(ResourceExhausted, match="of at most"):
            mine.acquire([keys[-1]])
        with pytest.raises(ResourceExhausted, match="of at most"):
            mine.put([mine.key(b"new")], bytes(BLOCK))
        assert len(mine.acquire([keys[0]])) == 1, "a slot that it holds already is no further one"
        assert session(client, "greedy")["held_bytes"] == SESSION_MAX * BLOCK  # type: ignore[index]
        slots.abort()
        assert len(mine.acquire(keys[-1:])) == 1
        del leases
        mine.reserve(64).abort()
    ns.put([ns.key(b"new")], bytes(BLOCK))


def test_all_sessions_together_hold_at_most_three_quarters(
    daemon: RunningDaemon, client: Client, ns: Namespace, exhaust: Callable[[], None]
) -> None:
    present = store(ns, names("present", 64))
    exhaust()
    assert pool(client, BLOCK)["granted"] == TENANT_MAX
    with Client(daemon.endpoint, name="late") as late:
        mine = late.raw_namespace("rule 2", BLOCK)
        with pytest.raises(ResourceExhausted, match="all sessions of tenant 'default' hold"):
            mine.put([mine.key(b"new")], bytes(BLOCK))
        with pytest.raises(ResourceExhausted, match="all sessions of tenant 'default' hold"):
            mine.acquire(present[:1])
        assert exact(mine, present) == 64, "reads need no hold"


def test_the_quarter_that_nobody_may_hold_goes_on_serving(
    client: Client, ns: Namespace, exhaust: Callable[[], None]
) -> None:
    store(ns, names("first", 1))  # which leaves a slot granted ahead to this client, to go on with
    exhaust()
    keys = store(ns, names("more", SLOTS // 2))
    assert SLOTS // 8 < exact(ns, keys) <= SLOTS // 4 + GRANT_MAX
    assert pool(client, BLOCK)["granted"] == TENANT_MAX
