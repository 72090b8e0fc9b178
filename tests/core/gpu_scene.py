"""Memory, an SSD and devices that are dicts: copies, events, deaths and losses are in the test's hands.

A slot's bytes are the key of the block that was written there, so a wrong byte is a wrong key. A
client's copy into a slot of a device is a write that happens at some time until its event is
complete; of one whose event never is, or failed, until nothing of the process runs on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.core import segments
from kvstore.core.gpu_commits import PendingCommit
from kvstore.core.gpu_jobs import AwaitQuiet, CopyDown, CopyUp, GpuJob, StopWatching, WatchEvent
from kvstore.core.gpu_tickets import GpuTicket
from kvstore.core.gpu_tier import GpuTier
from kvstore.core.holds import Namespace, Session
from kvstore.core.schedule import Kind
from kvstore.core.segments import BLOCK, GRANTED, PAGE_BYTES, DropSegment, MakeSegment
from kvstored.v1.errors import ResourceExhausted
from kvstored.v1.shm import GPU
from tests.core import scene, ssd_scene
from tests.core.ssd_scene import IN_SEGMENT

PAGE = PAGE_BYTES

LOST = "the device is gone"


@dataclass(eq=False)
class Event:
    """What a client records behind its copies: `writes` are done by then."""

    pid: int
    writes: dict[int, bytes]
    """Slot -> what is being written there."""
    complete: bool = False
    failed: bool = False


@dataclass(eq=False)
class Client:
    """A process with a session."""

    session: Session
    mapped: dict[str, set[int]] = field(default_factory=dict)
    """Device -> segments that it has open."""
    hung_up: bool = False
    alive: bool = True


class Device:
    """One device's memory, index, and workers."""

    def __init__(self, node: "GpuNode", uuid: str, pages: int, write_back: str, queue_pages: int) -> None:
        self.node = node
        self.index = scene.Index()
        wanted, segments.SEGMENTS_WANTED = segments.SEGMENTS_WANTED, pages // IN_SEGMENT
        queue_bytes = dict.fromkeys(Kind, queue_pages * PAGE)
        self.pool = node.tier.add(
            uuid, self.index, size_bytes=pages * PAGE, queue_bytes=queue_bytes, write_back=write_back
        )
        segments.SEGMENTS_WANTED = wanted
        self.bytes: dict[int, bytes] = {}
        self.allocated: set[int] = set()
        self.pending: list[GpuJob] = []
        self.late: list[CopyUp | CopyDown | WatchEvent] = []
        """Jobs on a device that was lost under them."""
        self.half: set[int] = set()
        """Copies whose bytes are moved, and that are not reported."""
        self.sources: dict[int, bytes] = {}
        """Copy -> what was in its source when it was begun."""
        self.stopped: set[int] = set()
        self.events: list[Event] = []
        """Those whose writes may still happen."""

    # -- workers

    def take(self) -> list[GpuJob]:
        """New jobs, added to those that wait."""
        new = self.pool.take_jobs(self.node.now)
        for job in new:
            if isinstance(job, StopWatching):
                self.stopped.add(job.number)
            else:
                self.pending.append(job)
            if isinstance(job, CopyUp):
                self.sources[job.number] = self.node.slab[job.source]
            elif isinstance(job, CopyDown):
                self.sources[job.number] = self.bytes[job.source]
        return new

    def can_end(self, job: GpuJob) -> bool:
        """Whether what a job waits for has come."""
        if isinstance(job, WatchEvent):
            event = job.event
            assert isinstance(event, Event)
            return event.complete or event.failed or job.number in self.stopped
        return True

    def step(self, job: GpuJob) -> None:
        """The first half of a copy: bytes are moved, and nothing is reported."""
        node = self.node
        if not isinstance(job, CopyUp | CopyDown) or job.number in self.half:
            return
        up = isinstance(job, CopyUp)
        host_ref, device_ref = (job.source, job.target) if up else (job.target, job.source)
        host, host_slot = node.memory.segments.at(host_ref)
        assert host.state[host_slot] == (BLOCK if up else GRANTED), "a slot of memory was given away under a copy"
        if job not in self.late:
            device, device_slot = self.pool.store.segments.at(device_ref)
            assert device.state[device_slot] == (GRANTED if up else BLOCK), "a slot was given away under a copy"
        here, there = (node.slab, self.bytes) if up else (self.bytes, node.slab)
        if job in self.late and up:
            return  # to where nothing is any more
        found = here.get(job.source, b"of a device that is lost")
        assert found == self.sources[job.number] or job in self.late, "a slot was written to under a copy"
        there[job.target] = found
        self.half.add(job.number)

    def end(self, job: GpuJob, error: str = "") -> None:
        """All of a job, and its report; with `error` its second half does not happen."""
        if not error:
            self.step(job)
        now, pool = self.node.now, self.pool
        self.pending.remove(job)
        match job:
            case CopyUp() | CopyDown():
                self.half.discard(job.number)
                del self.sources[job.number]
                pool.copied(job, error, now)
            case WatchEvent():
                why = error or ("it failed" if job.event.failed else "" if job.event.complete else "stopped")
                self.stopped.discard(job.number)
                pool.event_ended(job.number, why, now)
            case AwaitQuiet():
                if not error:
                    assert all(c.session.pid != job.pid or not c.alive for c in self.node.clients), "of a live process"
                    self.events = [event for event in self.events if event.pid != job.pid]
                    for client in self.node.clients:
                        if client.session.pid == job.pid:
                            client.mapped.pop(pool.uuid, None)
                pool.quiet(job.number, error, now)
            case MakeSegment():
                if not error:
                    self.allocated.add(job.segment)
                assert pool.made(job.segment, error, now)
            case DropSegment():
                mapped = {number for client in self.node.clients for number in client.mapped.get(pool.uuid, ())}
                assert job.segment not in mapped, "memory is freed that an importer has mapped"
                self.allocated.remove(job.segment)
                self.bytes = {ref: found for ref, found in self.bytes.items() if ref >> 32 != job.segment}

    def run(self, error: str = "") -> int:
        """Carries out all there is and that can end, and what follows from it; how many jobs."""
        count = 0
        while self.take() or any(map(self.can_end, self.pending)):
            for job in [job for job in self.pending if self.can_end(job)]:
                self.end(job, error if isinstance(job, CopyUp | CopyDown) else "")
                count += 1
        return count

    # -- what happens to it

    def write(self, event: Event) -> None:
        """The copies before an event happen, all of them; they may, before it is complete."""
        for ref, key in event.writes.items():
            self.bytes[ref] = key

    def complete(self, event: Event) -> None:
        self.write(event)
        event.complete = True
        self.events.remove(event)

    def fail(self, event: Event) -> None:
        """Nobody knows what has been written, or will be."""
        for ref in event.writes:
            self.bytes[ref] = b"torn"
        event.failed = True

    def lose(self) -> None:
        pool, node = self.pool, self.node
        told = pool.lose(LOST)
        assert all(any(client.session.id == number for client in node.clients) for number in told)
        for client in node.clients:
            client.mapped.pop(pool.uuid, None)
        self.late += [job for job in self.pending if isinstance(job, CopyUp | CopyDown | WatchEvent)]
        makes = [job for job in self.pending if isinstance(job, MakeSegment)]
        asked = [job for job in self.pending if isinstance(job, AwaitQuiet)]
        self.pending.clear()
        self.bytes.clear()
        self.events.clear()
        self.allocated.clear()
        self.stopped.clear()
        assert not any(pool.made(job.segment, "", node.now) for job in makes), "memory of another life is taken"
        for job in asked:
            pool.quiet(job.number, "", node.now)

    def end_late(self, job: CopyUp | CopyDown | WatchEvent, error: str) -> None:
        """A job on the device that was lost ends; until now it had its slot of memory."""
        self.step(job)
        self.late.remove(job)
        if isinstance(job, WatchEvent):
            self.pool.event_ended(job.number, error, self.node.now)
        else:
            self.half.discard(job.number)
            del self.sources[job.number]
            self.pool.copied(job, error, self.node.now)

    def come(self) -> None:
        while self.pool.tick(self.node.now, 0.8, 3):
            pass
        assert self.pool.losing.over
        assert not self.index.published, "what is lost is promised"
        self.pool.come()

    def evict(self, blocks: int, ns: Namespace | None = None) -> int:
        """Evicts so many blocks of a namespace's pool; how many went."""
        store, device = self.pool.store, self.pool.link.side.device_of.get((ns or self.node.ns).id)
        if device is None:
            return 0
        for gone in range(blocks):
            row = store.policy.victim(store.pool(device).order)
            if row < 0:
                return gone
            store.evict(row)
        return blocks

    def has(self, key: bytes, ns: Namespace | None = None) -> bool:
        return ((ns or self.node.ns).tenant.id, key) in self.index.published


class GpuNode(ssd_scene.Node):
    """A node with memory, an SSD and devices; clients that come and die."""

    def __init__(
        self,
        *,
        devices: int = 1,
        device_pages: int = 16,
        write_back: str = "through",
        gpu_queue_pages: int = 64,
        memory_pages: int = 32,
        disk_pages: int = 24,
        ssd_policy: str = "through",
    ) -> None:
        super().__init__(memory_pages=memory_pages, disk_pages=disk_pages, policy=ssd_policy)
        self.tier = GpuTier(self.memory, self.moving, self.joined, pid=1)
        self.devices = [
            Device(self, f"GPU-{number}", device_pages, write_back, gpu_queue_pages) for number in range(devices)
        ]
        self.gpu = self.devices[0]
        self.clients: list[Client] = []
        self.commits: list[PendingCommit] = []
        self.gpu_tickets: list[GpuTicket] = []
        self.ended: list[PendingCommit | GpuTicket] = []
        self._last_pid = 100

    # -- clients

    def client(self) -> Client:
        self._last_pid += 1
        session = self.memory.open_session(
            self.memory.tenant("default"),
            f"client {self._last_pid}",
            self.now,
            local=True,
            read_only=False,
            pid=self._last_pid,
            nonce=self._last_pid,
        )
        made = Client(session)
        self.clients.append(made)
        return made

    def map(self, client: Client, device: Device, refs: Sequence[int]) -> None:
        numbers = {ref >> 32 for ref in refs}
        client.mapped.setdefault(device.pool.uuid, set()).update(numbers)
        device.pool.mapped(client.session, sorted(numbers))

    def unmap(self, client: Client, device: Device) -> None:
        """What the daemon asks a client to close, it closes."""
        session = device.pool.session_here(client.session)
        if session is not None and session.detach:
            client.mapped[device.pool.uuid] -= session.detach
            device.pool.unmapped(client.session, sorted(session.detach))

    def reserve(
        self, client: Client, count: int, device: Device | None = None, ns: Namespace | None = None
    ) -> list[int]:
        """Slots to write to; the client opens their segments."""
        device, ns = device or self.gpu, ns or self.ns
        refs = device.pool.reserve(client.session, ns, count, self.now)
        self.map(client, device, refs)
        return refs

    def put_on(
        self,
        keys: Sequence[bytes],
        client: Client,
        device: Device | None = None,
        *,
        refs: Sequence[int] | None = None,
        ns: Namespace | None = None,
        start: int = 0,
        ttl_s: float = 0.0,
    ) -> Event:
        """Begins to store keys[start:] on a device: copies are enqueued, the event is recorded, and Commit is sent."""
        device, ns = device or self.gpu, ns or self.ns
        refs = self.reserve(client, len(keys) - start, device, ns) if refs is None else refs
        here = range(start, min(len(keys), start + len(refs)))
        event = Event(client.session.pid, {ref: keys[at] for ref, at in zip(refs, here, strict=True)})
        commit = device.pool.commit(
            client.session,
            ns,
            [keys[at] for at in here],
            refs,
            [keys[at - 1] if at else b"" for at in here],
            list(here),
            event,
            self.now,
            self.ended.append,
            ttl_s,
        )
        device.events.append(event)
        self.commits.append(commit)
        return event

    def stored_on(self, keys: Sequence[bytes], client: Client, device: Device | None = None) -> None:
        """The same, in pieces, with its event and its report."""
        device = device or self.gpu
        for at in range(len(keys)):
            while True:
                try:
                    refs = self.reserve(client, 1, device)
                    break
                except ResourceExhausted:
                    assert device.run(), "there is no room on the device, and none is coming"
            device.complete(self.put_on(keys[: at + 1], client, device, refs=refs, start=at))
            for job in [job for job in device.take() if isinstance(job, WatchEvent) and device.can_end(job)]:
                device.end(job)

    def prefetch_to(
        self,
        keys: Sequence[bytes],
        device: Device | None = None,
        *,
        seconds: float = 1.0,
        ns: Namespace | None = None,
        priority: int = 0,
    ) -> GpuTicket:
        pool = (device or self.gpu).pool
        ticket = pool.prefetch(ns or self.ns, keys, self.now + seconds, self.ended.append, priority)
        self.gpu_tickets.append(ticket)
        return ticket

    def remove(self, keys: Sequence[bytes], ns: Namespace | None = None) -> int:
        """From every tier, as the server does; how many blocks there were."""
        ns = ns or self.ns
        only = self.tier.remove(ns, keys)
        return only + self.moving.remove_from_disk(ns, keys) + self.memory.remove(ns, keys)

    def hang_up(self, client: Client) -> None:
        """Its socket is gone, its process is not."""
        client.hung_up = True
        self.memory.end_session(client.session, process_gone=False)
        self.tier.end_session(client.session, process_gone=False)

    def die(self, client: Client) -> None:
        """Its process is gone; what it had enqueued may still run."""
        client.alive, client.hung_up = False, True
        self.memory.end_session(client.session, process_gone=True)
        self.tier.end_session(client.session, process_gone=True)

    def attach(self, client: Client, uses: dict[str, tuple[list[int], list[int]]]) -> None:
        """Its process comes back with a new session, and says which slots it has leased and was granted."""
        old = client.session
        heir = self.memory.open_session(
            old.tenant, old.client, self.now, local=True, read_only=False, pid=old.pid, nonce=old.nonce + 1000
        )
        self.tier.resume(old, heir, uses)
        self.memory.resume(old, heir, [], [])
        client.session, client.hung_up = heir, False

    # -- workers and time

    def run_all(self) -> None:
        """Everything there is to do on any tier, and what follows from it."""
        while self.make_memory() + self.run() + sum(device.run() for device in self.devices):
            pass

    def make_memory(self) -> int:
        """Carries out what memory's store wants done with the slab; how many segments were made."""
        jobs = [job for job in self.memory.take_jobs() if isinstance(job, MakeSegment)]
        for job in jobs:
            self.memory.segments.made(job.segment)
        return len(jobs)

    def tick(self, seconds: float = 0.1) -> None:
        self.now += seconds
        self.moving.tick(self.now, 0.8)
        self.tier.tick(self.now, 0.8)
        self.memory.expire(self.now)
        self.memory.room.go_on()
        self.make_memory()

    # -- the truth

    def truth(self) -> dict[tuple[int, bytes], tuple[int, int]]:
        seen = super().truth()
        for device in self.devices:
            side, store = device.pool.link.side, device.pool.store
            unfinished = {ref for event in device.events for ref in event.writes}
            found: dict[tuple[int, bytes], tuple[int, int, int, int]] = {}
            for tenant in filter(lambda tenant: tenant.rows, store.tenants.values()):
                here = side.memory_tenants[tenant.id]
                for key, row in tenant.rows.items():
                    ref, namespace = store.table.place[row], side.memory_of[store.table.namespace[row]]
                    if not device.pool.trouble:
                        assert device.bytes.get(ref) == key, "wrong bytes on a device"
                        assert ref not in unfinished, "a block is visible before its event"
                        assert ref >> 32 in device.allocated, "a block in memory that is not there"
                    offset = (ref & 0xFFFFFFFF) * store.tree.pool_of(row).slot_bytes
                    found[here.id, key] = (ref, offset, namespace.block_bytes, namespace.id)
                    place, flags = seen.get((here.id, key), (0, 0))
                    seen[here.id, key] = (place, flags | GPU)
            assert device.index.published == found, "readers of a device see otherwise"
        return seen

    def check(self) -> None:
        super().check()
        for device in self.devices:
            self._check_device(device)

    def _check_device(self, device: Device) -> None:
        pool, memory = device.pool, self.memory
        pool.link.settle()
        pool.store.check()
        link = pool.link
        ups = [c.job for c in (*pool.ups.under_way.values(), *pool.ups.order.waiting()) if c.job]
        downs = [c.job for c in (*pool.downs.under_way.values(), *pool.downs.order.waiting()) if c.job]
        late_ups = [job for job in device.late if isinstance(job, CopyUp)]
        late_downs = [job for job in device.late if isinstance(job, CopyDown)]
        under = {*pool.ups.under_way, *pool.downs.under_way}
        handed = {job.number for job in device.pending if isinstance(job, CopyUp | CopyDown)}
        assert under == handed, "a copy is under way that no worker has, or the other way round"
        for tenant in memory.tenants.values():
            session = link.on_memory.session(tenant)
            assert set(session.granted) == {job.target for job in (*downs, *late_downs)}, "slots taken for no copy"
            held = sorted(job.source for job in (*ups, *late_ups))
            held += [c.held for c in pool.ups.coming.values() if c.held is not None]
            assert session.leases == len(held), "blocks of memory are held for no copy"
        for tenant in pool.store.tenants.values():
            session = link.on_device.session(tenant)
            assert set(session.granted) == {job.target for job in ups}, "slots of the device are taken for no copy"
            held = [job.source for job in downs]
            held += [c.held for c in pool.downs.coming.values() if c.held is not None]
            assert session.leases == len(held), "blocks of the device are held for no copy"
        gone = {(block, number) for block, numbers, _ in pool.ups._gone for number in numbers}
        for ticket in pool.tickets.tickets.values():
            for block in ticket.waiting:
                copying = pool.ups.coming.get(block)
                comes = copying is not None and ticket.number in copying.tickets
                assert comes or (block, ticket.number) in gone, "a ticket waits for what does not come"
            waits = bool(ticket.waiting or ticket.below is not None)
            to_ask = ticket.state == "running" and ticket.at < len(ticket.keys)
            assert (ticket.state == "running") == (waits or to_ask), "a ticket runs that waits for nothing"
            assert not to_ask or ticket.below is not None or ticket.number in pool.tickets._listed, "it never goes on"
        ended = [*map(id, self.ended)]
        assert len(ended) == len(set(ended)), "somebody was told twice that it is over"
        mine: list[PendingCommit | GpuTicket] = [*self.commits, *self.gpu_tickets]
        finals = {id(each) for each in mine if each.state != "running"}
        assert finals == set(ended), "who was told that it is over, and whose it is, are not the same"
