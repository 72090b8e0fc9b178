"""Memory, the SSD and a crash at any point, in any order: no wrong byte, nothing acknowledged lost, nothing leaked."""

import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.core.moves import ForgetRecords, VerifyBlock, WriteBlock
from kvstore.core.reclaim import Both, Reclaimed
from kvstore.core.verify import Sweep, blocks_step
from kvstore.core.writeback import Durable
from kvstored.v1.errors import ResourceExhausted
from kvstored.v1.shm import SSD
from tests.core.scene import chain
from tests.core.ssd_scene import PAGE, Node

CHAINS = {name: chain(name, 6) for name in "abc"}
PICK = st.integers(0, 1 << 16)
POLICIES = ["through", "evict", "hits:1"]


class Movements(RuleBasedStateMachine):
    """Two namespaces of two sizes, one tenant, one client; the workers are rules."""

    def __init__(self) -> None:
        super().__init__()
        self.node = Node(memory_pages=24, disk_pages=20, queue_pages=8)
        self.waiters: list[Durable] = []
        self.life()

    def life(self) -> None:
        node = self.node
        self.spaces = [node.ns, node.namespace("two", 2 * PAGE)]
        self.waiters.clear()
        self.sweeps: list[Sweep] = []
        """Those that have ended."""
        self.removed: set[tuple[int, bytes]] = set()
        """Blocks that were removed, in this life, and not stored again."""

    def keys(self, name: str, length: int) -> list[bytes]:
        return CHAINS[name][:length]

    # -- clients

    @rule(
        name=st.sampled_from("abc"), length=st.integers(1, 6), space=st.integers(0, 1), ttl=st.sampled_from([0, 0, 5])
    )
    def put(self, name: str, length: int, space: int, ttl: int) -> None:
        self.removed -= {(space, self.named(key, space)) for key in self.keys(name, length)}
        try:
            self.node.put([self.named(key, space) for key in self.keys(name, length)], self.spaces[space], ttl)
        except ResourceExhausted:
            assert self.node.memory.segments.making or self.node.memory.room.pending or self.full()

    def full(self) -> bool:
        """All that could make room is held by what moves, or pinned."""
        memory = self.node.memory
        pinned = any(pool.pinned for pool in memory.segments.pools.values())
        return pinned or any(memory.table.leases) or bool(self.node.session.granted)

    @staticmethod
    def named(key: bytes, space: int) -> bytes:
        """Keys of different namespaces never meet: a digest is part of them."""
        return bytes([space]) + key[1:]

    @rule(name=st.sampled_from("abc"), length=st.integers(1, 6), space=st.integers(0, 1))
    def touch(self, name: str, length: int, space: int) -> None:
        keys = [self.named(key, space) for key in self.keys(name, length)]
        self.node.memory.touch(self.spaces[space].tenant, keys, self.node.now)
        self.node.moving.touch(self.spaces[space].tenant, keys, self.node.now)

    @rule(name=st.sampled_from("abc"), at=st.integers(0, 5), space=st.integers(0, 1))
    def remove(self, name: str, at: int, space: int) -> None:
        keys = [self.named(CHAINS[name][at], space)]
        self.node.memory.remove(self.spaces[space], keys)
        self.node.moving.remove_from_disk(self.spaces[space], keys)
        self.removed.add((space, keys[0]))

    @rule(name=st.sampled_from("abc"), length=st.integers(1, 6), space=st.integers(0, 1), ahead=st.booleans())
    def load(self, name: str, length: int, space: int, ahead: bool) -> None:
        keys = [self.named(key, space) for key in self.keys(name, length)]
        if ahead:
            self.node.prefetch(keys, 2.0, self.spaces[space])
        else:
            self.node.load(keys, 2.0, self.spaces[space])

    @rule(at=PICK, closing=st.booleans())
    def end_ticket(self, at: int, closing: bool) -> None:
        tickets = self.node.tickets
        if not tickets:
            return
        ticket = tickets[at % len(tickets)]
        if closing:
            if ticket.state == "done" and ticket.held:
                run = self.node.memory.match(ticket.namespace, ticket.keys)
                assert len(run) == len(ticket.held), "what a ticket holds is there, but for what was removed"
            self.node.moving.loads.close(ticket)
            tickets.remove(ticket)
        else:
            self.node.moving.loads.cancel(ticket)
            assert ticket.state != "running"

    @rule(name=st.sampled_from("abc"), length=st.integers(1, 3), space=st.integers(0, 1))
    def durable(self, name: str, length: int, space: int) -> None:
        keys = [self.named(key, space) for key in self.keys(name, length)]
        here = [key for key in keys if self.node.tiers(key, self.spaces[space])]
        ended: list[Durable] = []
        waiter = self.node.moving.writes.wait_durable(self.spaces[space], here, ended.append)
        assert bool(ended) == (not waiter.left)
        self.waiters.append(waiter)
        if not waiter.why and ended:
            for key in here:
                assert self.node.tiers(key, self.spaces[space]) & SSD

    @rule(at=PICK)
    def wait_no_more(self, at: int) -> None:
        if self.waiters:
            self.node.moving.writes.forget_waiter(self.waiters.pop(at % len(self.waiters)))

    @rule(space=st.integers(0, 1))
    def clear(self, space: int) -> None:
        node, ns = self.node, self.spaces[space]
        for _ in range(2):  # once more for what was written meanwhile, as the server does
            at: int | None = 0
            while at is not None:
                at = node.moving.clear_step(ns, at, 3)[0]
            at = 0
            while at is not None:
                at = node.memory.clear_step(ns, at, 3)
        keys = [self.named(key, space) for chained in CHAINS.values() for key in chained]
        assert not any(node.tiers(key, ns) for key in keys), "a cleared block is found"
        self.removed |= {(space, key) for key in keys}

    @rule(name=st.sampled_from("abc"), length=st.integers(1, 6), space=st.integers(0, 1), pinned=st.booleans())
    def pin(self, name: str, length: int, space: int, pinned: bool) -> None:
        keys, ns, node = [self.named(key, space) for key in self.keys(name, length)], self.spaces[space], self.node
        here = sum(bool(node.tiers(key, ns)) for key in keys)
        if pinned:
            in_memory = node.memory.pin(ns, keys, 5.0, node.now)
            assert in_memory + node.moving.pin_on_disk(ns, keys, 5.0, node.now) == here
        else:
            assert node.moving.unpin_on_disk(ns, keys) + node.memory.unpin(ns, keys) <= here

    # -- the operator

    @rule(space=st.integers(0, 1))
    def evict_everywhere(self, space: int) -> None:
        done = Reclaimed()
        for walk in Both(self.node.moving.link).rows_steps(None, self.spaces[space]):
            assert walk(0, 1 << 16, done) is None
        keys = [self.named(key, space) for chained in CHAINS.values() for key in chained]
        assert done.held == sum(bool(self.node.tiers(key, self.spaces[space])) for key in keys)
        self.removed |= {(space, key) for key in keys if not self.node.tiers(key, self.spaces[space])}

    @rule(blocks=st.integers(0, 12), stopped=st.booleans())
    def verify(self, blocks: int, stopped: bool) -> None:
        found: list[tuple[int, tuple[int, bytes]]] = []
        blocks_step(self.node.store, 0, 1 << 16, found, blocks)
        with contextlib.suppress(ResourceExhausted):
            sweep = self.node.moving.verification.ask(found, self.sweeps.append)
            if stopped:
                self.node.take()
                self.node.moving.verification.stop(sweep)

    # -- workers and time

    @rule(at=PICK, error=st.sampled_from(["", "", "", "", "input/output error"]))
    def work(self, at: int, error: str) -> None:
        self.node.take()
        if self.node.pending:
            self.node.end(at % len(self.node.pending), error)

    @rule(at=PICK)
    def half_a_job(self, at: int) -> None:
        self.node.take()
        if self.node.pending:
            self.node.step(at % len(self.node.pending))

    @rule()
    def all_work(self) -> None:
        self.node.run()

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.node.now += seconds
        self.node.moving.tick(self.node.now, 0.8)
        self.node.memory.expire(self.node.now)
        self.node.store.expire(self.node.now)

    @rule(blocks=st.integers(1, 4))
    def evict(self, blocks: int) -> None:
        self.node.evict_memory(blocks)

    @rule(at=PICK)
    def rot(self, at: int) -> None:
        """A byte of an extent changes by itself."""
        extents = sorted(self.node.disk.bytes)
        if extents:
            self.node.disk.bytes[extents[at % len(extents)]] = b"rotten"

    @rule(policy=st.sampled_from(POLICIES))
    def kill(self, policy: str) -> None:
        known = {
            (ns.id, key)
            for ns in self.node.moving.link.joined.disk_of.values()
            for key, row in ns.tenant.rows.items()
            if self.node.store.table.namespace[row] == ns.id
        }
        before = self.node
        self.node = before.killed(memory_pages=24, disk_pages=20, queue_pages=8, policy=policy)
        self.life()
        for number, key in known:
            namespace = before.store.namespaces[number - 1]
            if (namespace.digest, key) in before.disk.records:
                again = next(ns for ns in self.spaces if ns.digest == namespace.digest)
                row = before.store.tenants["default"].rows.get(key, -1)
                ends = before.store.tree.until.get(row * 4 + 2, 0.0)
                assert ends or self.node.tiers(key, again) & SSD, "a block that was safe is gone after a restart"

    # -- the truth

    @invariant()
    def all_is_well(self) -> None:
        self.node.check()

    @invariant()
    def what_was_removed_does_not_come_back(self) -> None:
        for space, key in self.removed:
            assert not self.node.tiers(key, self.spaces[space]), "a block that was removed is found"

    @invariant()
    def no_record_is_lost_or_left(self) -> None:
        writes = self.node.moving.writes
        node = self.node
        names = [
            (node.store.table.namespace[row], key)
            for tenant in node.store.tenants.values()
            for key, row in tenant.rows.items()
        ]
        names += [(job.namespace.id, job.key) for job in node.pending if isinstance(job, WriteBlock)]
        names += [*writes._forgetting]
        for job in node.pending:
            if isinstance(job, ForgetRecords):
                assert writes._forgetting.keys() >= set(job.names)
        known = set(map(node._catalogued, names))
        assert set(node.disk.records) <= known, "a record that nobody will ever delete"

    @invariant()
    def sweeps_end_once_and_hold_nothing_then(self) -> None:
        assert len(self.sweeps) == len(set(map(id, self.sweeps)))
        assert not any(sweep.under_way or sweep.waiting for sweep in self.sweeps)
        verification = self.node.moving.verification
        assert all(sweep.under_way or sweep.waiting for sweep in verification.sweeps)
        assert sum(isinstance(job, VerifyBlock) for job in (*self.node.pending, *self.node.moving.link.moves)) == len(
            verification.jobs
        )

    @invariant()
    def running_tickets_wait_for_something(self) -> None:
        for ticket in self.node.tickets:
            assert (ticket.state == "running") == bool(ticket.waiting)


TestMovements = Movements.TestCase
TestMovements.settings = settings(max_examples=60, stateful_step_count=60)
