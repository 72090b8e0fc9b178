"""Devices, memory and the SSD in any order of everything that can happen: no wrong byte, no hang, nothing leaked.

An example is a list of steps by name, each with a seed for what it draws: who, which keys, how far.
So steps are as frequent as their weights say, which rules of Hypothesis of their own are not, and
too little would come together; a failure shrinks to the steps that it takes.
"""

import contextlib
import itertools
from collections.abc import Callable
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.core import gpu_tickets
from kvstore.core.gpu_jobs import AwaitQuiet, CopyDown, CopyUp, WatchEvent
from kvstore.core.holds import Namespace
from kvstore.core.segments import MakeSegment
from kvstored.v1.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from kvstored.v1.shm import HOST, SSD
from tests.core.gpu_scene import PAGE, Client, Device, GpuNode
from tests.core.scene import chain

CHAINS = {name: chain(name, 5) for name in "ab"}
REFUSED = (ResourceExhausted, Unavailable)
CLIENTS_MAX = 4

WEIGHTS = {
    "put_on_a_device": 6,
    "reserve": 1,
    "use_a_slot": 2,
    "event": 6,
    "misuse_a_slot": 2,
    "abort_what_failed": 3,
    "failed_kernels_write_on": 1,
    "put_below": 4,
    "acquire": 1,
    "release": 1,
    "small_thing": 3,
    "hang_up_or_die": 2,
    "attach_again": 2,
    "prefetch": 6,
    "end_ticket": 1,
    "remove": 2,
    "clear": 1,
    "pin": 1,
    "work": 10,
    "half_a_job": 3,
    "work_all": 2,
    "ssd_work": 5,
    "ssd_work_all": 1,
    "tick": 3,
    "evict_from_a_device": 4,
    "evict_from_memory": 3,
    "lose_or_come": 1,
    "end_late": 2,
    "lose_the_ssd": 1,
    "all_ends": 1,
}
STEPS = [name for name, weight in WEIGHTS.items() for _ in range(weight)]


class Gpus(RuleBasedStateMachine):
    """A device, namespaces of three sizes; clients come and die; the workers of every tier are steps."""

    devices = 1
    write_back = "through"
    ssd_policy = "through"

    def __init__(self) -> None:
        super().__init__()
        self.node = GpuNode(
            devices=self.devices,
            device_pages=20,
            write_back=self.write_back,
            gpu_queue_pages=4,
            memory_pages=24,
            disk_pages=20,
            ssd_policy=self.ssd_policy,
        )
        self.portion, gpu_tickets.PORTION_BLOCKS = gpu_tickets.PORTION_BLOCKS, 2
        self.spaces = [self.node.ns, self.node.namespace("two", 2 * PAGE), self.node.namespace("large", 5 * PAGE)]
        """Blocks of the last are larger than an ordinary segment: others are dropped to make one."""
        self.clients: list[Client] = [self.node.client() for _ in range(3)]
        self.removed: set[tuple[int, bytes]] = set()
        """Blocks that were removed and not stored again."""
        self.leases: list[tuple[Client, Device, list[int], list[bytes]]] = []
        self.granted: list[tuple[Client, Device, int, int]] = []
        """Slots that a client has and has not used, with the namespace they are for."""
        self.make_memory()

    def teardown(self) -> None:
        gpu_tickets.PORTION_BLOCKS = self.portion

    def make_memory(self) -> None:
        """Devices make theirs when it is asked for, and that is not what most steps are to be about."""
        session = self.clients[0].session
        for device in self.node.devices:
            for space in self.spaces[:2]:
                for _ in range(2):
                    with contextlib.suppress(ResourceExhausted):
                        device.pool.abort(session, device.pool.reserve(session, space, 1, self.node.now))
                    device.run()

    # -- what steps draw

    def space(self, r: Random) -> int:
        return r.choice([0, 0, 0, 0, 1, 1, 2])

    def keys(self, name: str, length: int, space: int) -> list[bytes]:
        """Keys of different namespaces never meet: a digest is part of them."""
        return [bytes([space]) + key[1:] for key in CHAINS[name][:length]]

    def run_of(self, r: Random) -> tuple[int, Namespace, list[bytes]]:
        space = self.space(r)
        return space, self.spaces[space], self.keys(r.choice("ab"), r.randint(1, 5), space)

    def all_keys(self, space: int) -> set[tuple[int, bytes]]:
        return {(space, key) for name in CHAINS for key in self.keys(name, 5, space)}

    def device(self, r: Random) -> Device:
        return r.choice(self.node.devices)

    def client(self, r: Random) -> Client | None:
        able = [client for client in self.clients if not client.hung_up]
        if not able and len(self.clients) < CLIENTS_MAX:
            able.append(self.node.client())
            self.clients += able
        return r.choice(able) if able else None

    @rule(name=st.sampled_from(STEPS), seed=st.integers(0, (1 << 32) - 1))
    def step(self, name: str, seed: int) -> None:
        does: Callable[[Random], None] = getattr(self, name)
        does(Random(seed))

    # -- clients

    def put_on_a_device(self, r: Random) -> None:
        client, device, (space, ns, keys) = self.client(r), self.device(r), self.run_of(r)
        start, ttl_s = min(r.choice([0, 0, 0, 1, 2]), len(keys) - 1), r.choice([0, 0, 0, 5])
        far = r.choice(["begun", "complete", "seen", "copied"])
        if client is None:
            return
        with contextlib.suppress(*REFUSED):
            event = self.node.put_on(keys, client, device, ns=ns, start=start, ttl_s=ttl_s)
            self.removed -= {(space, key) for key in keys[start:]}
            if far != "begun":
                device.complete(event)
            if far == "seen":
                for job in [job for job in device.take() if isinstance(job, WatchEvent) and device.can_end(job)]:
                    device.end(job)
            elif far == "copied":
                device.run()
        if device.pool.store.segments.jobs and far != "begun":
            device.run()

    def reserve(self, r: Random) -> None:
        client, device, space = self.client(r), self.device(r), self.space(r)
        if client is not None:
            with contextlib.suppress(*REFUSED):
                refs = self.node.reserve(client, r.randint(1, 3), device, self.spaces[space])
                self.granted += [(client, device, ref, space) for ref in refs]

    def use_a_slot(self, r: Random) -> None:
        self.granted = [each for each in self.granted if each[0].alive]
        able = [each for each in self.granted if not each[0].hung_up and each[2] not in self.unfinished(each[1])]
        if not able:
            return
        chosen = r.choice(able)
        self.granted.remove(chosen)
        client, device, ref, space = chosen
        if r.random() < 0.5:
            device.pool.abort(client.session, [ref])
            return
        keys = self.keys(r.choice("ab"), r.randint(1, 5), space)
        self.node.put_on(keys, client, device, refs=[ref], ns=self.spaces[space], start=len(keys) - 1)
        self.removed.discard((space, keys[-1]))

    def unfinished(self, device: Device) -> set[int]:
        """Slots of a device that a kernel may still write to."""
        return {ref for event in device.events for ref in event.writes}

    def event(self, r: Random) -> None:
        """Its copies end, or fail, or have been made and it has not come yet."""
        device = self.device(r)
        able = [each for each in device.events if not each.failed]
        if able:
            how = r.choice([device.complete] * 4 + [device.fail, device.write])
            how(r.choice(able))

    def misuse_a_slot(self, r: Random) -> None:
        """A client gives back what it has committed: it gets that through where nothing writes there any more."""
        device, living = self.device(r), [client for client in self.clients if not client.hung_up]
        for commit, client in itertools.product(self.node.commits[-8:], living):
            refs, session = commit.refs, device.pool.session_here(client.session)
            if commit.session is session and not self.spoiled(device, client).intersection(refs):
                with contextlib.suppress(FailedPrecondition, InvalidArgument):
                    device.pool.abort(client.session, refs)
                    assert not self.unfinished(device).intersection(refs), "a slot that may be written to is free"
                    self.granted = [each for each in self.granted if each[2] not in refs]

    def spoiled(self, device: Device, client: Client) -> set[int]:
        session = device.pool.session_here(client.session)
        return device.pool.commits.spoiled.get(session.id, set()) if session is not None else set()

    def abort_what_failed(self, r: Random) -> None:
        """A client whose copies have ended, which no event has told the daemon, gives their slots back."""
        device, client = self.device(r), self.client(r)
        spoiled = self.spoiled(device, client) if client is not None else set()
        if client is not None and spoiled:
            ref = r.choice(sorted(spoiled))
            for event in [event for event in device.events if ref in event.writes]:
                device.complete(event)
            device.pool.abort(client.session, [ref])

    def failed_kernels_write_on(self, r: Random) -> None:
        device = self.device(r)
        for event in device.events:
            if event.failed:
                device.write(event)

    def put_below(self, r: Random) -> None:
        node, (space, ns, keys) = self.node, self.run_of(r)
        far = r.choice(["memory", "memory", "ssd", "ssd alone"])
        self.removed -= {(space, key) for key in keys}
        with contextlib.suppress(ResourceExhausted):
            node.put(keys, ns)
        if far != "memory":
            node.moving.writes.offer_rows(node.memory.match(ns, keys))
            node.run()
        if far == "ssd alone":
            for row in reversed(node.memory.match(ns, keys)):
                if not node.memory.table.held(row):
                    node.memory.evict(row)

    def acquire(self, r: Random) -> None:
        client, device, (_, ns, keys) = self.client(r), self.device(r), self.run_of(r)
        if client is not None:
            with contextlib.suppress(*REFUSED):
                refs = device.pool.acquire(client.session, ns, keys, self.node.now)
                self.node.map(client, device, refs)
                if refs:
                    self.leases.append((client, device, refs, keys))

    def release(self, r: Random) -> None:
        self.leases_that_last()
        able = [lease for lease in self.leases if not lease[0].hung_up]
        if able:
            client, device, refs, _ = lease = r.choice(able)
            self.leases.remove(lease)
            device.pool.release(client.session, refs)

    def leases_that_last(self) -> list[tuple[Client, Device, list[int], list[bytes]]]:
        self.leases = [each for each in self.leases if each[0].alive]
        return self.leases

    def small_thing(self, r: Random) -> None:
        client, device, node, (_, ns, keys) = self.client(r), self.device(r), self.node, self.run_of(r)
        what = r.choice(["come", "unmap", "watermarks", "touch", "load", "save"])
        if what == "come" and len(self.clients) < CLIENTS_MAX:
            self.clients.append(node.client())
        elif what == "unmap" and client is not None:
            node.unmap(client, device)
        elif what == "watermarks":
            device.pool.evict_step(0.8, 0.6, 2)
        elif what == "touch":
            node.memory.touch(ns.tenant, keys, node.now)
            node.moving.touch(ns.tenant, keys, node.now)
            node.tier.touch(ns.tenant, keys, node.now)
        elif what == "load":
            node.prefetch(keys, 2.0, ns)
        elif what == "save":
            device.pool.save_step(0, 1 << 16)

    def hang_up_or_die(self, r: Random) -> None:
        living = [client for client in self.clients if client.alive]
        if living:
            client = r.choice(living)
            if r.random() < 0.6:
                self.node.die(client)
                self.clients.remove(client)
            else:
                self.node.hang_up(client)

    def attach_again(self, r: Random) -> None:
        """A process whose session ended comes back; some of what it was granted it does not name, or has forgotten."""
        able = [client for client in self.clients if client.alive and client.hung_up]
        if not able:
            return
        client, uses = r.choice(able), dict[str, tuple[list[int], list[int]]]()
        for device in self.node.devices:
            leased = [ref for who, where, refs, _ in self.leases if (who, where) == (client, device) for ref in refs]
            mine = [each for each in self.granted if each[:2] == (client, device) and r.random() < 0.5]
            session = device.pool.session_here(client.session)
            for commit in self.node.commits:  # whose answer never arrived
                if session is not None and commit.session is session and r.random() < 0.5:
                    space = self.spaces.index(commit.namespace)
                    mine += [(client, device, ref, space) for ref in commit.refs if ref in session.granted]
            mine = [each for each in mine if session is not None and each[2] in session.granted]
            mine = list({each[2]: each for each in mine}.values())
            if session is not None:
                uses[device.pool.uuid] = (leased, [each[2] for each in mine])
            self.granted = [each for each in self.granted if each[:2] != (client, device)]
            self.granted += [each for each in mine if each[2] not in self.spoiled(device, client)]
        self.node.attach(client, uses)

    def prefetch(self, r: Random) -> None:
        """Mostly of what there is something to bring of."""
        device, (_, ns, keys) = self.device(r), self.run_of(r)
        below = [
            (ns, self.keys(name, 5, space))
            for space, ns in enumerate(self.spaces)
            for name in CHAINS
            if self.node.tiers(self.keys(name, 1, space)[0], ns) & (HOST | SSD)
        ]
        if below and r.random() < 0.7:
            ns, keys = r.choice(below)
        with contextlib.suppress(*REFUSED):
            self.node.prefetch_to(keys, device, seconds=2.0, ns=ns, priority=r.randint(0, 1))
        if r.random() < 0.5:
            device.take()

    def end_ticket(self, r: Random) -> None:
        every = [(device, ticket) for device in self.node.devices for ticket in device.pool.tickets.tickets.values()]
        if every:
            device, ticket = r.choice(every)
            (device.pool.tickets.close if r.random() < 0.5 else device.pool.tickets.cancel)(ticket)
            assert ticket.state != "running"

    def remove(self, r: Random) -> None:
        space, ns, keys = self.run_of(r)
        self.node.remove(keys[-1:], ns)
        self.removed.add((space, keys[-1]))

    def clear(self, r: Random) -> None:
        node, space = self.node, self.space(r)
        ns = self.spaces[space]
        if r.random() < 0.6:
            return
        at: int | None = 0
        while at is not None:
            at = node.tier.clear_step(ns, at, 3)[0]
        for _ in range(2):  # once more for what was written meanwhile, as the server does
            at = 0
            while at is not None:
                at = node.moving.clear_step(ns, at, 3)[0]
            at = 0
            while at is not None:
                at = node.memory.clear_step(ns, at, 3)
        self.removed |= self.all_keys(space)

    def pin(self, r: Random) -> None:
        node, (_, ns, keys) = self.node, self.run_of(r)
        if r.random() < 0.5:
            here = sum(bool(node.tiers(key, ns)) for key in keys)
            pinned = node.tier.pin(ns, keys, 5.0, node.now)
            pinned += node.memory.pin(ns, keys, 5.0, node.now) + node.moving.pin_on_disk(ns, keys, 5.0, node.now)
            assert pinned == here
        else:
            node.tier.unpin(ns, keys)
            node.moving.unpin_on_disk(ns, keys)
            node.memory.unpin(ns, keys)

    # -- workers and time

    def work(self, r: Random) -> None:
        device = self.device(r)
        device.take()
        able = [job for job in device.pending if device.can_end(job)]
        if able:
            job = r.choice(able)
            fails = isinstance(job, CopyUp | CopyDown | MakeSegment | AwaitQuiet) and r.random() < 0.2
            device.end(job, "an error" if fails else "")

    def half_a_job(self, r: Random) -> None:
        device = self.device(r)
        device.take()
        if device.pending:
            device.step(r.choice(device.pending))

    def work_all(self, r: Random) -> None:
        self.device(r).run()

    def ssd_work(self, r: Random) -> None:
        self.node.take()
        if self.node.pending:
            self.node.end(r.randrange(len(self.node.pending)), r.choice(["", "", "", "", "input/output error"]))

    def ssd_work_all(self, _: Random) -> None:
        self.node.run()

    def tick(self, r: Random) -> None:
        self.node.tick(r.choice([0.0, 0.1, 1.0, 1.0, 6.0, 6.0, 40.0]))

    def evict_from_a_device(self, r: Random) -> None:
        self.device(r).evict(r.randint(1, 4), self.spaces[self.space(r)])

    def evict_from_memory(self, r: Random) -> None:
        self.node.evict_memory(r.randint(1, 4))

    def lose_or_come(self, r: Random) -> None:
        device = self.device(r)
        if device.pool.trouble:
            device.come()
        elif r.random() < 0.4:
            device.lose()
            self.granted = [each for each in self.granted if each[1] is not device]
            self.leases = [each for each in self.leases if each[1] is not device]
            assert all(ticket.state != "running" for ticket in device.pool.tickets.tickets.values())
            assert not device.pool.commits.pending

    def end_late(self, r: Random) -> None:
        device = self.device(r)
        if device.late:
            device.end_late(r.choice(device.late), r.choice(["", "it is gone"]))

    def lose_the_ssd(self, r: Random) -> None:
        if r.random() < 0.1:
            self.node.lose()

    # -- how it all ends

    def all_ends(self, r: Random) -> None:
        """Every process ends and every job: nothing is left but blocks."""
        if r.random() < 0.3:
            self.everything_ends()

    def everything_ends(self) -> None:
        node = self.node
        for client, device, refs, _ in self.leases_that_last():
            if not client.hung_up:
                device.pool.release(client.session, refs)
        self.leases.clear()
        for client in self.clients:
            node.die(client)
        self.clients.clear()
        for _ in range(4):  # an SSD out of use, a segment that could not be made: each is tried again
            for device in node.devices:
                for late in list(device.late):
                    device.end_late(late, "it is gone")
                if device.pool.trouble:
                    device.come()
            node.run_all()
            node.tick(6)
        assert all(commit.state != "running" for commit in node.commits)
        assert all(ticket.state != "running" for ticket in node.gpu_tickets)
        own = set(map(id, node.tickets))
        assert all(id(ticket) in own for ticket in node.moving.loads.tickets.values()), "a load is never closed"
        for device in node.devices:
            self.nothing_is_left_on(device)
        node.check()
        self.clients.append(node.client())
        self.make_memory()

    def nothing_is_left_on(self, device: Device) -> None:
        pool, store, link = device.pool, device.pool.store, device.pool.link
        assert not pool.under_way
        commits = pool.commits
        assert not any((pool.ups.coming, pool.downs.coming, commits.watched, commits._given_up))
        assert not any((commits.spoiled, commits.orphaned, commits._refs, commits._of))
        assert not any((pool._drops, pool._asking, pool._ask_again, pool._of))
        own = {id(session) for session in link.on_device._of.values()}
        assert all(id(session) in own for session in store.sessions.values()), "a session is left of a client"
        assert not any(session.held_bytes for session in store.sessions.values()), "a slot is held by nobody"
        assert not any(session.held_bytes for session in link.on_memory._of.values()), "memory is held for no copy"
        assert not any((*link.held_memory._bytes.values(), *link.held_device._bytes.values())), "bytes counted as held"
        assert not store.segments.draining
        assert set(store.segments.live) == device.allocated, "memory is allocated that nobody knows"

    # -- the truth

    @invariant()
    def all_is_well(self) -> None:
        self.node.check()

    @invariant()
    def what_was_removed_does_not_come_back(self) -> None:
        for space, key in self.removed:
            assert not self.node.tiers(key, self.spaces[space]), "a block that was removed is found"

    @invariant()
    def what_is_leased_keeps_its_bytes(self) -> None:
        for _, device, refs, keys in self.leases_that_last():
            assert [device.bytes[ref] for ref in refs] == keys[: len(refs)]


class GpusEvict(Gpus):
    """Two devices, where blocks are copied down ahead of their eviction alone."""

    devices = 2
    write_back = "evict"
    ssd_policy = "evict"


TestGpus = Gpus.TestCase
TestGpus.settings = settings(max_examples=60, stateful_step_count=60)
TestGpusEvict = GpusEvict.TestCase
TestGpusEvict.settings = settings(max_examples=60, stateful_step_count=60)
