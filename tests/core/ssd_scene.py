"""Memory and an SSD that is two dicts, with everything that moves between them in the test's hands.

A slot's bytes are the key of the block that was written there, so a wrong byte is a wrong key.
A write is carried out in two steps (payload, then record) and a read in two (bytes, then
report): what happens between them is the test's to choose, a crash included.
"""

from collections.abc import Sequence
from zlib import crc32

from kvstore.core import segments
from kvstore.core.holds import Namespace, Session
from kvstore.core.link import Block
from kvstore.core.loads import Ticket
from kvstore.core.movement import Movement
from kvstore.core.moves import ForgetRecords, Move, Name, ProbeTier, ReadBlock, VacateSlots, VerifyBlock, WriteBlock
from kvstore.core.restore import Restore
from kvstore.core.schedule import Kind
from kvstore.core.segments import PAGE_BYTES, DropSegment, MakeSegment
from kvstore.core.store import Store
from kvstore.core.tiered import Joined
from kvstore.core.tree import Numbers
from kvstored.v1.shm import HOST, SSD
from tests.core.scene import key_of

PAGE = PAGE_BYTES
IN_SEGMENT = 4
UNWELL = "input/output error"
"""Of a file that could not be made, by a fault of the disk and not for want of room."""


def checksum_of(key: bytes) -> int:
    return crc32(key)


class Index:
    """What readers see: place, length, namespace and flags of each block."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, bytes], tuple[int, int, int, int, int]] = {}

    def publish(
        self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int, flags: int = HOST
    ) -> None:
        assert (tenant, key) not in self.seen, "published twice"
        self.seen[tenant, key] = (ref, offset, length, namespace, flags)

    def fill(
        self, tenant: int, keys: list[bytes], refs: Numbers, offsets: Numbers, lengths: Numbers, namespaces: Numbers
    ) -> None:
        columns = (numbers.tolist() for numbers in (refs, offsets, lengths, namespaces))
        for key, *place in zip(keys, *columns, strict=True):
            self.publish(tenant, key, *place)

    def withdraw(self, tenant: int, key: bytes) -> None:
        del self.seen[tenant, key]

    def move(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int, flags: int) -> None:
        assert (tenant, key) in self.seen, "moved and never published"
        self.seen[tenant, key] = (ref, offset, length, namespace, flags)

    def set_below(self, out: bool) -> None:
        self.below_out = out

    def flag(self, tenant: int, key: bytes, flags: int) -> None:
        *place, _ = self.seen[tenant, key]
        self.seen[tenant, key] = (place[0], place[1], place[2], place[3], flags)


class Disk:
    """What outlives a crash: bytes of extents, records, and files."""

    def __init__(self) -> None:
        self.bytes: dict[int, bytes] = {}
        self.cuts: dict[int, int] = {}
        """Extent -> bytes of the slot that was written there."""
        self.records: dict[tuple[bytes, bytes], tuple[int, int, bytes, int]] = {}
        """Digest of a namespace and key -> extent, checksum, parent, depth."""
        self.packed: dict[int, int] = {}
        """Extent -> what a record says that its block takes; 0: not known."""
        self.left: set[tuple[bytes, bytes]] = set()
        """Records that could not be deleted: their payload may be gone before them."""
        self.files: dict[int, int] = {}
        self.namespaces: dict[bytes, Namespace] = {}


class Node:
    """One life of the daemon over a disk."""

    def __init__(
        self,
        disk: Disk | None = None,
        *,
        memory_pages: int = 16,
        disk_pages: int = 24,
        policy: str = "through",
        queue_pages: int = 64,
        restored: bool = True,
        packed_pages: int = 0,
        packed_block_pages: int = 8,
    ) -> None:
        wanted, segments.SEGMENTS_WANTED = segments.SEGMENTS_WANTED, memory_pages // IN_SEGMENT
        self.index = Index()
        self.joined = Joined(self.index)
        self.memory = Store(memory_pages * PAGE, self.joined.host)
        segments.SEGMENTS_WANTED = disk_pages // IN_SEGMENT
        self.store = Store(disk_pages * PAGE, self.joined.ssd, lazily=True)
        segments.SEGMENTS_WANTED = wanted
        queue = queue_pages * PAGE
        self.moving = Movement(
            self.memory,
            self.store,
            self.joined,
            pid=1,
            policy=policy,
            queue_bytes=dict.fromkeys(Kind, queue),
            packed_bytes=packed_pages * PAGE,
            packed_block_max=packed_block_pages * PAGE,
        )
        self.packed_bytes = 0
        """What blocks that are written from now on take, where that is not their slot."""
        self.disk = disk or Disk()
        self.now = 1000.0
        self.slab: dict[int, bytes] = {}
        self.pending: list[Move] = []
        self.late: list[Move] = []
        """Jobs on a directory that was lost under them."""
        self.half: dict[int, str] = {}
        """Jobs whose first step is done -> what a read will report."""
        self.tickets: list[Ticket] = []
        self.durable: list[str] = []
        for job in self.memory.take_jobs():
            if isinstance(job, MakeSegment):
                self.memory.segments.made(job.segment)
        self.ns = self.namespace("ns", PAGE)
        self.session = self.open()
        if restored:
            self.restore()

    def namespace(self, name: str, size_bytes: int) -> Namespace:
        return self.memory.open_namespace(self.memory.tenant("default"), key_of(name), size_bytes, name)

    def open(self) -> Session:
        return self.memory.open_session(
            self.memory.tenant("default"), "client", self.now, local=True, read_only=False, pid=7, nonce=7
        )

    # -- clients

    def put(self, keys: Sequence[bytes], ns: Namespace | None = None, ttl_s: float = 0.0) -> list[int]:
        """Stores a chain; results. Stops where there is no room."""
        ns, results = ns or self.ns, []
        for at, key in enumerate(keys):
            refs = self.memory.reserve(self.session, ns, 1, self.now)
            self.slab[refs[0]] = key
            parent = keys[at - 1] if at else b""
            results += self.memory.commit(self.session, ns, [key], refs, [parent], [at], self.now, ttl_s)
            if self.session.granted:
                self.memory.abort(self.session, list(self.session.granted))
        return results

    def block(self, key: bytes, ns: Namespace | None = None) -> Block:
        return ((ns or self.ns).id, key)

    def load(self, keys: Sequence[bytes], seconds: float = 1.0, ns: Namespace | None = None) -> Ticket:
        ticket = self.moving.load(ns or self.ns, keys, self.now + seconds, lambda _: None)
        self.tickets.append(ticket)
        return ticket

    def prefetch(
        self, keys: Sequence[bytes], seconds: float = 1.0, ns: Namespace | None = None, priority: int = 0
    ) -> Ticket:
        ticket = self.moving.prefetch(ns or self.ns, keys, self.now + seconds, lambda _: None, priority)
        self.tickets.append(ticket)
        return ticket

    def tiers(self, key: bytes, ns: Namespace | None = None) -> int:
        """Flags as readers see them; 0 where the block is nowhere."""
        found = self.index.seen.get(((ns or self.ns).tenant.id, key))
        return found[4] if found else 0

    def evict_memory(self, blocks: int) -> None:
        """Evicts so many blocks of the first namespace's pool."""
        pool = self.memory.pool(self.ns)
        for _ in range(blocks):
            row = self.memory.policy.victim(pool.order)
            if row < 0:
                return
            self.memory.evict(row)

    # -- workers

    def take(self) -> list[Move]:
        """New jobs, added to those that wait."""
        new = self.moving.take_moves(self.now)
        self.pending += new
        return new

    def run(self, error: str = "") -> int:
        """Carries out all there is, and what follows from it; how many jobs."""
        count = 0
        while self.take() or self.pending:
            while self.pending:
                self.end(0, error)
                count += 1
        return count

    def run_all_but(self, job: Move) -> None:
        """Carries out everything else."""
        while self.take() or len(self.pending) > 1:
            while len(self.pending) > 1:
                self.end(0 if self.pending[0] is not job else 1)

    def step(self, at: int) -> None:
        """The first half of a job: bytes are moved, and nothing is reported."""
        job = self.pending[at]
        if isinstance(job, WriteBlock) and job.number not in self.half:
            if job.replaces is not None:
                self.disk.records.pop(self._catalogued(job.replaces), None)
            assert self.slab[job.source] == job.key, "a slot was given away while it was written out"
            self._cut(job.extent >> 32, slot_bytes := self.store.pool(job.namespace).slot_bytes)
            self.disk.bytes[job.extent] = self.slab[job.source]
            self.disk.cuts[job.extent] = slot_bytes
            self.half[job.number] = "ok"
        elif isinstance(job, ReadBlock) and job.number not in self.half:
            segment, slot = self.memory.segments.at(job.target)
            assert segment.state[slot] == segments.GRANTED, "a slot was given away while it was read into"
            found = self.disk.bytes.get(job.extent, b"")
            self.slab[job.target] = found
            right = found == job.key and checksum_of(found) == job.checksum
            self.half[job.number] = "ok" if right else "mismatch"
        elif isinstance(job, VerifyBlock) and job.number not in self.half:
            found = self.disk.bytes.get(job.extent, b"")
            right = found == job.key and checksum_of(found) == job.checksum
            self.half[job.number] = "ok" if right else "mismatch"

    def _cut(self, segment: int, slot_bytes: int) -> None:
        """The first write to a segment that was cut anew: what it had before is gone."""
        for extent in [extent for extent in self.disk.bytes if extent >> 32 == segment]:
            if self.disk.cuts[extent] != slot_bytes:
                del self.disk.bytes[extent]

    def end(self, at: int, error: str = "") -> None:
        """All of a job, and its report; with `error` its second half does not happen."""
        if isinstance(self.pending[at], VacateSlots):  # workers do so after the deletions that were asked for before
            at = next(n for n, job in enumerate(self.pending) if n == at or isinstance(job, ForgetRecords))
        if not error:
            self.step(at)
        job, moving = self.pending.pop(at), self.moving
        if isinstance(job, WriteBlock):
            self.half.pop(job.number, None)
            if not error:
                self.disk.namespaces[job.namespace.digest] = job.namespace
                self.disk.records[job.namespace.digest, job.key] = (
                    job.extent,
                    checksum_of(job.key),
                    job.parent,
                    job.depth,
                )
            self.disk.packed[job.extent] = self.packed_bytes
            moving.wrote(job.number, checksum_of(job.key), error, self.now, self.packed_bytes)
        elif isinstance(job, ReadBlock | VerifyBlock):
            moving.read(job.number, error or self.half.pop(job.number), self.now)
            self.half.pop(job.number, None)
        elif isinstance(job, ForgetRecords):
            self.disk.left.update(self._catalogued(name) for name in (job.names if error else ()))
            for name in () if error else job.names:
                self.disk.records.pop(self._catalogued(name), None)
            moving.forgotten(job.number, error)
        elif isinstance(job, VacateSlots):
            for extent, slot_bytes in () if error else job.slots:
                if self.disk.cuts.get(extent) == slot_bytes:
                    self.disk.bytes.pop(extent, None)
            moving.vacated(job.number, error)
        elif isinstance(job, ProbeTier):
            moving.probed(error)
        elif isinstance(job, MakeSegment):
            if not error:
                self.disk.files[job.segment] = job.size_bytes
            moving.made(job.segment, error, unwell=error == UNWELL)
        elif isinstance(job, DropSegment):
            del self.disk.files[job.segment]

    def _catalogued(self, name: Name) -> tuple[bytes, bytes]:
        """Numbers of namespaces are those of one life."""
        return self.store.namespaces[name[0] - 1].digest, name[1]

    # -- another life

    def restore(self) -> Restore:
        """What a new life does with what the last one left."""
        again = Restore(self.moving.link, self.now)
        for number, size_bytes in self.disk.files.items():
            again.segment(number, size_bytes)
        numbers = {digest: number for number, digest in enumerate(self.disk.namespaces, 1)}
        for digest, ns in self.disk.namespaces.items():
            again.namespace(numbers[digest], ns.tenant.name, digest, ns.block_bytes, ns.label, 0)
        for (digest, key), (extent, checksum, parent, depth) in sorted(self.disk.records.items()):
            name = (numbers[digest], key)
            place, taken = (extent >> 32, extent & 0xFFFFFFFF), self.disk.packed.get(extent, 0)
            if not again.record(name, *place, checksum, parent, depth, self.now - 5, 1, 0.0, taken):
                del self.disk.records[digest, key]
        for number in again.unused():
            del self.disk.files[number]
        while again.done():
            pass
        while again.order():
            pass
        self.moving.ready = True
        return again

    def lose(self) -> None:
        """Its directory is an empty one now; what is under way is left behind, and ends by `end_late`."""
        moving = self.moving
        moving.link.go_out_of_use("its directory is lost")
        moving.leave()
        moving.losing.leave_behind()
        self.late += [job for job in self.pending if isinstance(job, ReadBlock | WriteBlock)]
        self.pending.clear()
        self.half.clear()
        self.disk = Disk()
        while moving.losing.step(3):
            pass
        moving.come()
        self.restore()
        moving.link.removals.forget()

    def end_late(self, at: int, outcome: str) -> None:
        """A job on the directory that is lost ends; until now it had its slot."""
        job = self.late.pop(at)
        if isinstance(job, WriteBlock):
            assert self.slab[job.source] == job.key, "a slot was given away while it was written out"
            self.moving.wrote(job.number, checksum_of(job.key), outcome.replace("ok", ""), self.now)
        elif isinstance(job, ReadBlock):
            segment, slot = self.memory.segments.at(job.target)
            assert segment.state[slot] == segments.GRANTED, "a slot was given away while it was read into"
            self.slab[job.target] = b"of a directory that is lost"
            self.moving.read(job.number, outcome, self.now)

    def killed(self, **how: int | str) -> "Node":
        """The next life: of this one, only the disk is left."""
        return Node(self.disk, **how)  # type: ignore[arg-type]

    # -- the truth

    def truth(self) -> dict[tuple[int, bytes], tuple[int, int]]:
        """Tenant and key of every block -> its slot in memory (0: none there), and which tiers have it."""
        link = self.moving.link
        seen: dict[tuple[int, bytes], tuple[int, int]] = {}
        for tenant in self.memory.tenants.values():
            for key, row in tenant.rows.items():
                ref = self.memory.table.place[row]
                assert self.slab[ref] == key, "wrong bytes in memory"
                seen[tenant.id, key] = (ref, HOST)
        for tenant in self.store.tenants.values():
            here = self.joined.memory_tenants[tenant.id]
            for key, row in tenant.rows.items():
                extent = self.store.table.place[row]
                record = self.disk.records.get(self._catalogued((self.store.table.namespace[row], key)))
                assert record is not None, "on the SSD without a record"
                assert record[:2] == (extent, checksum_of(key)), "its record says something else"
                assert link.checksums[row] == checksum_of(key), "its checksum is kept wrong"
                ref, flags = seen.get((here.id, key), (0, 0))
                seen[here.id, key] = (ref, flags | SSD)
        return seen

    def check(self) -> None:
        """Everything against everything."""
        self.memory.check()
        self.store.check()
        link, seen = self.moving.link, self.truth()
        assert {name: (found[0], found[4]) for name, found in self.index.seen.items()} == seen, "readers see otherwise"
        reading = {loading.job.target for loading in self.moving.loads.loading.values() if loading.job}
        reading |= {job.target for job in self.late if isinstance(job, ReadBlock)}
        for tenant in self.memory.tenants.values():
            session = link.on_memory.session(tenant)
            assert set(session.granted) == {ref for ref in reading if self._tenant(ref) == tenant.id}
        writing = {w.job.extent for w in self.moving.writes.under_way.values()}
        granted = {ref for tenant in self.store.tenants.values() for ref in link.on_disk.session(tenant).granted}
        assert granted == writing, "extents are taken and nothing is written there"

    def _tenant(self, ref: int) -> int:
        tenant = self.memory.segments.live[ref >> 32].tenant
        assert tenant is not None
        return tenant
