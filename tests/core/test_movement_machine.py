"""Memory, the SSD and a crash at any point, in any order: no wrong byte, nothing acknowledged lost, nothing leaked."""

import contextlib
from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.core.block import NONE
from kvstore.core.durable import Durable
from kvstore.core.forgetting import Deletion
from kvstore.core.holds import Namespace
from kvstore.core.loads import Ticket
from kvstore.core.moves import ForgetRecords, VacateSlots, VerifyBlock, WriteBlock
from kvstore.core.reclaim import Both, Reclaimed
from kvstore.core.schedule import Kind
from kvstore.core.verify import Sweep, blocks_step
from kvstored.v1.errors import ResourceExhausted
from kvstored.v1.shm import SSD
from tests.core.scene import chain
from tests.core.ssd_scene import PAGE, UNWELL, Node

CHAINS = {name: chain(name, 6) for name in "abc"}
PICK = st.integers(0, 1 << 16)
ROTTEN = b"rotten"
POLICIES = ["through", "evict", "hits:1"]


class Movements(RuleBasedStateMachine):
    """Two namespaces of two sizes, one tenant, one client; the workers are rules."""

    packed_pages = 0
    """Room for blocks in bytes, where the SSD counts what each takes."""

    def __init__(self) -> None:
        super().__init__()
        self.node = Node(memory_pages=24, disk_pages=20, queue_pages=4, packed_pages=self.packed_pages)
        self.waiters: list[Durable] = []
        self.gone: set[tuple[int, bytes]] = set()
        """Blocks that were removed for good, in whichever life, and not stored again."""
        self.life()

    def life(self) -> None:
        node = self.node
        self.spaces = [node.ns, node.namespace("two", 2 * PAGE)]
        self.waiters.clear()
        self.sweeps: list[Sweep] = []
        """Those that have ended."""
        self.removed: set[tuple[int, bytes]] = set()
        """Blocks that were removed, in this life, and not stored again."""
        self.deletions: dict[Deletion, set[tuple[int, bytes]]] = {}
        """Who waits for it to be for good, for which blocks."""
        self.excused: dict[Ticket, set[bytes]] = {}
        """What was removed, or came to the end of its life, while a ticket may have held it."""

    def keys(self, name: str, length: int) -> list[bytes]:
        return CHAINS[name][:length]

    # -- clients

    @rule(
        name=st.sampled_from("abc"), length=st.integers(1, 6), space=st.integers(0, 1), ttl=st.sampled_from([0, 0, 5])
    )
    def put(self, name: str, length: int, space: int, ttl: int) -> None:
        stored = {(space, self.named(key, space)) for key in self.keys(name, length)}
        self.removed -= stored
        self.gone -= stored
        for blocks in self.deletions.values():
            blocks -= stored
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
        self.went({(space, keys[0])})
        self.wait_removed([space], keys, {(space, keys[0])})

    def went(self, blocks: set[tuple[int, bytes]]) -> None:
        """Somebody has removed them."""
        self.removed |= blocks
        self.excuse({key for _, key in blocks})

    def excuse(self, keys: set[bytes]) -> None:
        for ticket in self.node.tickets:
            self.excused.setdefault(ticket, set()).update(keys)

    def wait_removed(self, spaces: list[int], keys: list[bytes] | None, blocks: set[tuple[int, bytes]]) -> None:
        """As the server does: what was removed is answered for good when this ends without a reason."""
        ended: list[Deletion] = []

        def end(waiter: Deletion) -> None:
            assert not ended, "told twice"
            ended.append(waiter)
            if not waiter.why:
                assert not waiter.left
                self.gone |= self.deletions.get(waiter, blocks)
            self.deletions.pop(waiter, None)

        waiter = self.node.moving.writes.forgetting.wait_removed([self.spaces[space].id for space in spaces], keys, end)
        if not ended:
            self.deletions[waiter] = blocks

    @rule(at=PICK)
    def wait_for_a_removal_no_more(self, at: int) -> None:
        if self.deletions:
            waiter = list(self.deletions)[at % len(self.deletions)]
            self.node.moving.writes.forgetting.stop(waiter)
            del self.deletions[waiter]

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
        self.went({(space, key) for key in keys})
        self.wait_removed([space], None, {(space, key) for key in keys})

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
        dropped = {(space, key) for key in keys if not self.node.tiers(key, self.spaces[space])}
        self.went(dropped)  # also what a ticket holds: for who asks for this, a load is a move
        self.wait_removed([space], None, dropped)

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

    @rule(at=PICK, error=st.sampled_from(["", "", "", "", UNWELL, "no room"]))
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
        before = self.in_memory()
        self.node.memory.expire(self.node.now)
        self.excuse(before - self.in_memory())
        self.node.store.expire(self.node.now)

    def in_memory(self) -> set[bytes]:
        return {key for tenant in self.node.memory.tenants.values() for key in tenant.rows}

    @rule(blocks=st.integers(1, 4))
    def evict(self, blocks: int) -> None:
        self.node.evict_memory(blocks)

    @rule(at=PICK)
    def rot(self, at: int) -> None:
        """A byte of an extent changes by itself."""
        extents = sorted(self.node.disk.bytes)
        if extents:
            self.node.disk.bytes[extents[at % len(extents)]] = ROTTEN

    @rule()
    def lose(self) -> None:
        self.node.lose()
        assert not any(self.node.tiers(key, ns) & SSD for key, ns in self.all_keys()), "what is lost is promised"
        assert not self.deletions, "somebody waits for what is deleted with its directory"

    def all_keys(self) -> Iterator[tuple[bytes, Namespace]]:
        for space, ns in enumerate(self.spaces):
            yield from ((self.named(key, space), ns) for chained in CHAINS.values() for key in chained)

    @rule(at=PICK, outcome=st.sampled_from(["ok", "mismatch", "input/output error"]))
    def end_late(self, at: int, outcome: str) -> None:
        if self.node.late:
            self.node.end_late(at % len(self.node.late), outcome)

    @rule(policy=st.sampled_from(POLICIES))
    def kill(self, policy: str) -> None:
        known = {
            (ns.id, key)
            for ns in self.node.moving.link.joined.disk_of.values()
            for key, row in ns.tenant.rows.items()
            if self.node.store.table.namespace[row] == ns.id
        }
        before = self.node
        self.node = before.killed(
            memory_pages=24, disk_pages=20, queue_pages=8, policy=policy, packed_pages=self.packed_pages
        )
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
        for space, key in self.gone:
            assert (self.spaces[space].digest, key) not in self.node.disk.records, "a removal was answered too early"
        for space, key in self.removed | self.gone:
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
        # Also of those whose report waits for that of their parent.
        names += [(writing.job.namespace.id, writing.job.key) for writing in writes.under_way.values()]
        names += [*writes.forgetting.names]
        for job in node.pending:
            if isinstance(job, ForgetRecords):
                assert writes.forgetting.names.keys() >= set(job.names)
        known = set(map(node._catalogued, names))
        assert set(node.disk.records) <= known, "a record that nobody will ever delete"

    @invariant()
    def who_waits_for_a_removal_waits_for_what_is_left_of_it(self) -> None:
        forgetting = self.node.moving.writes.forgetting
        for waiter in self.deletions:
            left = len(waiter.names) + sum(
                name[0] in waiter.spaces and number <= waiter.last and forgetting.is_there(name)
                for name, (_, number) in forgetting.names.items()
            )
            assert waiter.left == left > 0

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

    @invariant()
    def what_a_ticket_holds_keeps_its_bytes_and_is_there_but_for_what_was_removed(self) -> None:
        node = self.node
        for ticket in node.tickets:
            assert not ticket.held or ticket.kind is Kind.LOAD
            for ref in ticket.held:
                key = node.slab[ref]
                assert key in ticket.keys, "a slot was given away while a ticket holds it"
                assert node.moving.link.on_memory.holds(ticket.namespace.tenant, ref), "a ticket's hold is gone"
                if key not in self.excused.get(ticket, ()):
                    row = node.moving.link.memory_row((ticket.namespace.id, key))
                    assert row != NONE, "what a ticket holds was evicted"
                    assert node.memory.table.place[row] == ref, "what a ticket holds was moved"

    @invariant()
    def what_is_on_the_ssd_has_its_bytes(self) -> None:
        table, disk = self.node.store.table, self.node.disk
        for tenant in self.node.store.tenants.values():
            for key, row in tenant.rows.items():
                name = self.node._catalogued((table.namespace[row], key))
                assert name in disk.left or disk.bytes.get(table.place[row]) in (key, ROTTEN), "its bytes are others"


class PackedMovements(Movements):
    """The same where blocks take less than their slots, and what bounds them is the sum of that."""

    packed_pages = 9

    @rule(share=st.sampled_from([0.0, 0.3, 0.6, 1.0]))
    def what_is_written_from_now_on_takes(self, share: float) -> None:
        self.node.packed_bytes = int(share * PAGE)

    @rule(pages=st.integers(0, 8), behind=st.booleans())
    def look_at_the_disk(self, pages: int, behind: bool) -> None:
        """`behind`: what was written while it was looked at is not in what it shows."""
        packed = self.node.moving.link.packed
        before = packed.mark()
        if behind:
            self.node.run()
        packed.allow(pages * PAGE, before)

    @rule(pages=st.sampled_from([4, 6, 9]))
    def the_file_system_has_less_or_more(self, pages: int) -> None:
        self.node.moving.link.packed.limit_bytes = pages * PAGE

    @invariant()
    def what_is_counted_is_what_blocks_take(self) -> None:
        node, packed = self.node, self.node.moving.link.packed
        takes, slots, tenants = 0, 0, dict[int, int]()
        for tenant in node.store.tenants.values():
            for row in tenant.rows.values():
                slot_bytes = node.store.tree.pool_of(row).slot_bytes
                size_bytes = node.disk.packed[node.store.table.place[row]] or slot_bytes
                assert packed._sizes[row] == size_bytes
                takes, slots = takes + size_bytes, slots + slot_bytes
                tenants[tenant.id] = tenants.get(tenant.id, 0) + size_bytes
        assert (packed.bytes, packed._slot_bytes, packed._of_tenant) == (takes, slots, tenants)
        assert sum(packed._coming.values()) == packed._coming_bytes
        assert set(packed._coming) == {writing.job.extent for writing in node.moving.writes.under_way.values()}

    @invariant()
    def what_is_being_vacated_is_nobodys(self) -> None:
        node, packed = self.node, self.node.moving.link.packed
        writing = {write.job.extent for write in node.moving.writes.under_way.values()}
        in_use = {
            (ref, pool.slot_bytes)
            for ref in self.taken() | writing
            if (pool := node.store.segments.live[ref >> 32].pool) is not None
        }
        assert not packed._busy & in_use
        jobs = [job.number for job in node.pending if isinstance(job, VacateSlots)]
        assert set(jobs) == set(packed._vacating)

    @invariant()
    def what_no_block_has_is_vacated_or_known_to_be_left(self) -> None:
        """But for what another life left, which a start vacates as a whole."""
        node, packed = self.node, self.node.moving.link.packed
        known = self.taken() | set(packed._coming) | self.left_by_others
        known |= {
            extent for extent, slot_bytes in {*packed._left, *packed._busy} if node.disk.cuts.get(extent) == slot_bytes
        }
        known |= {slot for slot in node.disk.bytes if (slot >> 32) not in node.store.segments.live}
        assert set(node.disk.bytes) <= known, "garbage that nobody will ever collect"

    def taken(self) -> set[int]:
        store = self.node.store
        return {store.table.place[row] for tenant in store.tenants.values() for row in tenant.rows.values()}

    def life(self) -> None:
        super().life()
        self.left_by_others = set(self.node.disk.bytes)


TestMovements = Movements.TestCase
TestMovements.settings = settings(max_examples=60, stateful_step_count=60)
TestPackedMovements = PackedMovements.TestCase
TestPackedMovements.settings = settings(max_examples=60, stateful_step_count=60)
