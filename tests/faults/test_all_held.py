"""Field fault A7: with nothing left to evict, allocation went round for ever and what had failed left pins behind.

Seen as LMCache issue 2942 and pull request 2951. Everything is pinned, leased or reserved to the limits,
in turn; a put is then refused within a second, without work, without a trace, and works again afterwards.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kvstore_client import Client, KVStoreError, ResourceExhausted
from kvstore_client.namespace import Namespace
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, cpu_s, running, totals
from tests.stopwatch import Stopwatch

SIZE_BYTES = 16 << 20
BLOCK = 64 << 10
SLOTS = SIZE_BYTES // BLOCK
REFUSED_WITHIN_S = 1.0
REFUSALS = 20
CPU_EACH_S = 0.05
"""Of daemon and client together, for one refusal: a loop that goes round for a second would use all of it."""

HELD = ("granted", "quarantined", "leased", "pinned", "doomed")


@pytest.fixture
def node() -> Iterator[RunningDaemon]:
    """The watermarks leave the last slot to the tests."""
    with running(host__size=f"{SIZE_BYTES}B", evict__high="1", evict__low="0.99") as daemon:
        yield daemon


def keys_of(ns: Namespace, count: int) -> list[bytes]:
    return [ns.key(b"%d" % i) for i in range(count)]


def fill(ns: Namespace) -> list[bytes]:
    """As many blocks as there are slots, in prefixes of 16, with no slot granted ahead."""
    keys = keys_of(ns, SIZE_BYTES // max(ns.block_bytes, 4096))
    for at in range(0, len(keys), 16):
        with ns.reserve(16) as slots:
            for i, view in enumerate(slots.views, at):
                view[:] = block(i, ns.block_bytes)
            assert slots.commit(keys[at : at + 16]).stored == 16
    assert ns.match(keys).blocks == len(keys)
    return keys


@contextmanager
def all_pinned(node: RunningDaemon, stack: ExitStack) -> Iterator[None]:
    owner = stack.enter_context(Client(node.endpoint, name="owner"))
    ns = owner.raw_namespace("pinned", BLOCK)
    keys = fill(ns)
    assert ns.pin(keys, ttl_s=3600) == SLOTS
    yield
    assert ns.match(keys).blocks == SLOTS, "pinned blocks are there"
    assert ns.unpin(keys) == SLOTS


@contextmanager
def leased_to_the_limits(node: RunningDaemon, stack: ExitStack) -> Iterator[None]:
    """A quarter each by three sessions, which is all that may be leased; the rest pinned."""
    owner = stack.enter_context(Client(node.endpoint, name="owner"))
    ns = owner.raw_namespace("leased", BLOCK)
    keys = fill(ns)
    leases = []
    for i in range(3):
        other = stack.enter_context(Client(node.endpoint, name=f"lessee-{i}"))
        part = keys[i * SLOTS // 4 : (i + 1) * SLOTS // 4]
        leases.append(other.raw_namespace("leased", BLOCK).acquire(part))
        assert len(leases[-1]) == SLOTS // 4
        with pytest.raises(ResourceExhausted):
            other.raw_namespace("leased", BLOCK).acquire(keys[-1:])
    rest = keys[3 * SLOTS // 4 :]
    with pytest.raises(ResourceExhausted):
        ns.acquire(rest)
    assert ns.pin(rest, ttl_s=3600) == SLOTS // 4
    yield
    for lease in leases:
        lease.release()
    assert ns.unpin(rest) == SLOTS // 4


@contextmanager
def reserved_to_the_limits(node: RunningDaemon, stack: ExitStack) -> Iterator[None]:
    """A quarter each by three sessions, which is all that may be reserved; the rest pinned."""
    owner = stack.enter_context(Client(node.endpoint, name="owner"))
    reserved = []
    for i in range(3):
        other = stack.enter_context(Client(node.endpoint, name=f"writer-{i}"))
        reserved.append(other.raw_namespace("reserved", BLOCK).reserve(SLOTS // 4))
        with pytest.raises(ResourceExhausted):
            other.raw_namespace("reserved", BLOCK).reserve(1)
    with pytest.raises(ResourceExhausted):
        owner.raw_namespace("reserved", BLOCK).reserve(1)
    yield
    for slots in reserved:
        slots.abort()


@contextmanager
def pinned_in_another_size(node: RunningDaemon, stack: ExitStack) -> Iterator[None]:
    owner = stack.enter_context(Client(node.endpoint, name="owner"))
    ns = owner.raw_namespace("another size", 4096)
    keys = fill(ns)
    assert ns.pin(keys, ttl_s=3600) == len(keys)
    yield
    assert ns.unpin(keys) == len(keys)


@contextmanager
def pinned_by_another_tenant(node: RunningDaemon, stack: ExitStack) -> Iterator[None]:
    owner = stack.enter_context(Client(node.endpoint, name="owner", tenant="other"))
    ns = owner.raw_namespace("other tenant", BLOCK)
    keys = fill(ns)
    assert ns.pin(keys, ttl_s=3600) == SLOTS
    yield
    assert ns.unpin(keys) == SLOTS


SITUATIONS: dict[str, Callable[..., object]] = {
    "all pinned": all_pinned,
    "leased to the limits": leased_to_the_limits,
    "reserved to the limits": reserved_to_the_limits,
    "pinned in another size": pinned_in_another_size,
    "pinned by another tenant": pinned_by_another_tenant,
}


def refused(client: Client, call: Callable[[], object]) -> None:
    watch = Stopwatch()
    with pytest.raises(ResourceExhausted):
        call()
    assert watch.seconds < REFUSED_WITHIN_S


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_put_is_refused_at_once_and_works_afterwards(node: RunningDaemon, situation: str) -> None:
    with ExitStack() as stack, Client(node.endpoint, name="victim") as victim:
        ns = victim.raw_namespace("victim", BLOCK)
        keys = keys_of(ns, 4)
        data = [block(("victim", i), BLOCK) for i in range(4)]
        with SITUATIONS[situation](node, stack):  # type: ignore[attr-defined]
            eventually(lambda: steady(victim), 10.0, "what is granted ahead to go back")
            before, cpu = totals(victim.stats()), cpu_s(node.pid) + time.process_time()
            for _ in range(REFUSALS):
                refused(victim, lambda: ns.put(keys, data))
                refused(victim, lambda: ns.reserve(1))
                assert ns.prefetch(keys).wait() == 0
            assert cpu_s(node.pid) + time.process_time() - cpu < REFUSALS * CPU_EACH_S
            after = totals(victim.stats())
            assert {name: after[name] for name in HELD} == {name: before[name] for name in HELD}
            assert victim.health().healthy
        result = eventually(lambda: stored(ns, keys, data), 5.0, "a put to succeed")
        assert result == 4
        assert ns.get(keys) == data


def steady(client: Client) -> bool:
    """Nobody but reservations of the situation itself has slots ahead."""
    sessions = client.stats()["sessions"]
    return not any(s["granted_slots"] for s in sessions if not s["client"].startswith("writer"))


def stored(ns: Namespace, keys: list[bytes], data: list[bytes]) -> int:
    try:
        return ns.put(keys, data).stored
    except KVStoreError:
        return 0


def test_a_put_that_finds_some_room_is_exact_and_counted(node: RunningDaemon) -> None:
    """All but a few slots pinned: what fits is stored, and of what does not no wrong byte is read."""
    with Client(node.endpoint) as client:
        ns = client.raw_namespace("pinned", BLOCK)
        pinned = fill(ns)
        assert ns.pin(pinned[:-8], ttl_s=3600) == SLOTS - 8
        keys = [ns.key(b"new %d" % i) for i in range(32)]
        data = [block(("new", i), BLOCK) for i in range(32)]
        assert ns.put(keys[:4], data[:4]).stored == 4
        assert ns.get(keys[:4]) == data[:4]
        result = ns.put(keys, data)
        assert result.stored + result.existing + result.rejected == 32
        found = ns.get(keys)
        assert found == data[: len(found)]
        assert ns.match(pinned[:-8]).blocks == SLOTS - 8


def test_a_pin_ends_by_itself(node: RunningDaemon) -> None:
    with Client(node.endpoint) as client:
        ns = client.raw_namespace("pinned", BLOCK)
        keys = fill(ns)
        assert ns.pin(keys, ttl_s=3.0) == SLOTS
        fresh = ns.key(b"fresh")
        with pytest.raises(ResourceExhausted):
            ns.put([fresh], bytes(BLOCK))
        eventually(lambda: stored(ns, [fresh], [bytes(BLOCK)]), 10.0, "the pins to end")
        eventually(lambda: totals(client.stats())["pinned"] == 0, 10.0, "all of them")
