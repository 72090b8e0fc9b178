"""Which blocks of memory are written to the SSD, when, and what has become of each.

`through`: as soon as they are stored. `evict`: when they are about to be evicted, ahead of it.
`hits:N`: once they were read N times, which spares the SSD what nobody reads again. A block
whose caller waits for it to be durable is written in any case, before others; and one of a
conversation that is idle for longer than usual (idle.py), when there is nothing else to write.

What is to be written waits as a name: it holds no memory, and a block that is evicted before
its turn is dropped and counted. From its turn to the report its slot is held; a block that
somebody waits for is held before, too, as far as HELD_SHARE goes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore.core.block import HINTED, NONE, SEALED
from kvstore.core.durable import Durable, Watched
from kvstore.core.forgetting import Forgetting
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.idle import IdleConversations
from kvstore.core.kept import Kept
from kvstore.core.link import OPENING, Block, Link
from kvstore.core.moves import Name, WriteBlock
from kvstore.core.schedule import PRIORITY_MAX, PRIORITY_MIN, Kind, Turn

FULL = "the queue of write-backs is full (it takes half of host.size): put less at a time, or again a little later"

AHEAD_SHARE = 0.15
"""Of a pool's slots, its coldest: written ahead by `evict`. More than one round of eviction takes between the
watermarks, or most of a round would be lost: with 64 blocks, all but 5 % of it was (bench/offload.py)."""

MIB = 1 << 20

AHEAD_BLOCKS = 4096
"""Cold blocks looked at in one turn: 1 ms. The next turn begins with the next pool."""

HELD_SHARE = 1 / 8
"""Of a tenant's memory: blocks that are being written, or that somebody waits for."""

OFFLOAD_ROWS = 1024
"""Rows looked at in one turn for blocks of idle conversations: 0.5 ms; a million are seen in two minutes."""

TTL_S_MIN = 0.001
"""Of a block whose life ended while it was on its way."""


@dataclass(eq=False, slots=True)
class Writing:
    """A write under way."""

    block: Block
    job: WriteBlock
    cancelled: bool = False
    """The block was removed meanwhile: its record must not stay."""
    again: bool = False
    """And then it was stored anew: it is to be written when that record is gone."""
    durables: list[Durable] = field(default_factory=list)
    """Who waited for it when it was removed."""
    kept: list[int] = field(default_factory=list)
    """The slots that were held for them."""


class WriteBack:
    """From memory to the SSD."""

    def __init__(self, link: Link, policy: str) -> None:
        """`policy`: "through", "evict" or "hits:N"."""
        self.link = link
        self.policy = policy
        self._hits = int(policy.removeprefix("hits:")) if policy.startswith("hits:") else 0
        self.under_way: dict[int, Writing] = {}
        self.numbers: dict[Block, int] = {}
        """Of blocks that are being written."""
        self._durables: dict[Block, list[Durable]] = {}
        self.watched = Watched()
        self._kept = Kept(link)
        """Blocks of `_durables`, as far as they may be held."""
        self.forgetting = Forgetting(link, self._may_be_written, self._unwanted)
        self._after: dict[Name, Block] = {}
        """Blocks to be written when their old record is gone: its deletion must not meet the new one."""
        self._waits_for_room = False
        self.last_dropped = ""
        """Why the last of them that was not written was not; for who asks what is left."""
        self._pool_hand = 0
        self._missed = 0
        """Rows to be looked at since a block was last left out: with `through` it may still be in memory."""
        self._hand = 0
        """Row at which the search for blocks of idle conversations goes on."""

    # -- what is to be written

    def stored(self, rows: Sequence[int]) -> None:
        """New blocks in memory."""
        if self.policy == "through":
            self.offer_rows(rows)

    def used(self, rows: Sequence[int]) -> None:
        """Blocks were read."""
        if self._hits:
            hits = self.link.memory.table.hits
            self.offer_rows([row for row in rows if hits[row] >= self._hits])

    def offer_rows(self, rows: Iterable[int]) -> None:
        """Queues blocks that are not on the SSD; what does not fit is counted."""
        table = self.link.memory.table
        for row in rows:
            key = table.key[row]
            assert key is not None, f"row {row} to be written has no key"
            self.offer((table.namespace[row], key))

    def offer(self, block: Block, priority: int = 0) -> bool:
        """Queues one block; False where it is not going to be written."""
        link, writing = self.link, self._writing(block)
        if writing is not None and writing.cancelled:
            writing.again = True
        if self._known(block):
            return True
        if link.trouble not in ("", OPENING) or not link.schedule.offer(Kind.WRITE, block, self._size(block), priority):
            link.counts.writes_dropped += 1
            self._missed = len(link.memory.table)
            return False
        return True

    def would_fit(self, block: Block) -> bool:
        """Whether `offer` would drop nothing."""
        return self._known(block) or self.link.schedule.fits(Kind.WRITE, self._size(block))

    def look_ahead(self, low: float) -> None:
        """For `evict`: what is about to go, a bounded number of a turn."""
        memory = self.link.memory
        room_to_grow = memory.segments.idle_bytes >= memory.segments.segment_bytes
        if self.policy != "evict" or self.link.trouble or room_to_grow:
            return
        pools = [pool for pool in {segment.pool: None for segment in memory.segments.live.values()} if pool is not None]
        self._pool_hand = (self._pool_hand + 1) % max(len(pools), 1)
        left = AHEAD_BLOCKS
        for pool in (*pools[self._pool_hand :], *pools[: self._pool_hand]):
            ahead = int(pool.slots * AHEAD_SHARE) + 1
            if left and pool.free < pool.slots * (1 - low) + ahead:
                self._write_ahead(memory.policy.coldest(pool.order, min(ahead, left)))
                left -= min(ahead, left)

    def _write_ahead(self, rows: list[int]) -> None:
        table = self.link.memory.table
        for row in rows:
            key = table.key[row]
            if key is None or not self.would_fit((table.namespace[row], key)):
                return
            self.offer((table.namespace[row], key))

    def offload(self, idle: IdleConversations, now: float) -> None:
        """When there is nothing else to write, a few rows of the table a turn.

        Blocks of conversations that are idle for longer than usual; with `through`, those that were to be
        written and were not (a full queue, an SSD out of use), until the table has been walked once since.
        """
        memory, schedule = self.link.memory, self.link.schedule
        through = self.policy == "through"
        if (through and not self._missed) or self.link.trouble or schedule.queues[Kind.WRITE].level:
            return
        table = memory.table
        rows = len(table)
        steps = min(OFFLOAD_ROWS, rows)
        self._missed = max(self._missed - steps, 0)
        for _ in range(steps):
            self._hand = (self._hand + 1) % rows
            row, key = self._hand, table.key[self._hand]
            if table.state[row] != SEALED or key is None:
                continue
            if through or idle.is_idle(table.conversation[row], now):
                block = (table.namespace[row], key)
                if not self._known(block) and self.offer(block, PRIORITY_MIN):
                    self.link.counts.offloaded += not through

    def _known(self, block: Block) -> bool:
        """On the SSD, or on its way there."""
        link = self.link
        return link.disk_row(block) != NONE or block in self.numbers or link.schedule.waits(Kind.WRITE, block)

    def _writing(self, block: Block) -> Writing | None:
        number = self.numbers.get(block)
        return None if number is None else self.under_way[number]

    def _size(self, block: Block) -> int:
        memory = self.link.memory
        return memory.pool(memory.namespaces[block[0] - 1]).slot_bytes

    # -- who waits for it

    def wait_durable(self, namespace: Namespace, keys: Sequence[bytes], ended: Callable[[Durable], None]) -> Durable:
        """`ended` is called when all of these are on the SSD or one cannot be; it may be before this returns.

        Whoever is told asks `why` again when he answers, and is forgotten then (`forget_waiter`).
        """
        link, waiter = self.link, Durable(ended)
        for key in keys:
            block = (namespace.id, key)
            if link.disk_row(block) != NONE:
                self.watched.add(waiter, block)
            elif link.memory_row(block) == NONE:
                waiter.why = "a block was evicted before it was written"
            elif link.trouble not in ("", OPENING):
                waiter.why = link.trouble  # also of one under way: it may take for ever
            elif self._queue_first(block):
                waiter.left.add(block)
            else:
                waiter.why = link.trouble or FULL
        for block in waiter.left:
            self._durables.setdefault(block, []).append(waiter)
        for key in keys:  # in their order: a chain is evicted from its end
            self._keep_memory(namespace, (namespace.id, key))
        if not waiter.left:
            ended(waiter)
        return waiter

    def _keep_memory(self, namespace: Namespace, block: Block) -> None:
        """Holds a block that somebody waits for: the tail of a long chain would be evicted before its turn."""
        on_memory, row = self.link.on_memory, self.link.memory_row(block)
        if block not in self._durables or block in self._kept or row == NONE:
            return
        if on_memory.may_hold(namespace, 1) and self._within_share(namespace):
            self._kept.keep(block, row)

    def forget_waiter(self, waiter: Durable) -> None:
        """Nobody waits any more, or he is answered."""
        self.watched.forget(waiter)
        for block in waiter.left:
            waiters = self._durables.get(block, [])
            if waiter not in waiters:  # it was removed while it was written
                self.under_way[self.numbers[block]].durables.remove(waiter)
                continue
            waiters.remove(waiter)
            if not waiters:
                del self._durables[block]
                self._kept.let_go(block)
        waiter.left.clear()

    def _queue_first(self, block: Block) -> bool:
        """Before all others; where the queue is full, those that nobody waits for make way, the last of them first."""
        schedule = self.link.schedule
        schedule.withdraw(Kind.WRITE, block)
        while not self.would_fit(block):
            last = schedule.queues[Kind.WRITE].last(below=PRIORITY_MAX)
            if last is None:
                break
            schedule.withdraw(Kind.WRITE, last)
            self._drop(last, "")
        return self.offer(block, PRIORITY_MAX)

    def _tell(self, block: Block, why: str) -> None:
        self._kept.let_go(block)
        self.watched.reached(block, self._durables.pop(block, ()), why)

    def _tell_removed(self, block: Block, writing: Writing) -> None:
        """Whoever waited for a block that was removed while it was written."""
        for ref in writing.kept:
            self.link.on_memory.release(self.link.memory.namespaces[block[0] - 1].tenant, ref)
        self.watched.reached(block, writing.durables, "a block was removed before it was written")

    # -- writing

    def begin(self, block: Block) -> Turn:
        """A write's turn has come."""
        link = self.link
        memory, row = link.memory, link.memory_row(block)
        if row == NONE:
            self._drop(block, "a block was evicted before it was written")
            return Turn.OVER
        if link.disk_row(block) != NONE:
            self._tell(block, "")
            return Turn.OVER
        source_namespace = memory.namespaces[block[0] - 1]
        namespace = link.disk_namespace(source_namespace)
        if namespace is None:
            why = "its namespace cannot be on the SSD (another block size there, or too many namespaces)"
            self._drop(block, self._too_large(self._size(block)) or why)
            return Turn.OVER
        name = (namespace.id, block[1])
        if name in self.forgetting:
            self._after[name] = block
            return Turn.OVER
        if not self._may_hold(source_namespace):
            return Turn.LATER
        extent = link.packed.take(namespace)
        if extent is None:
            return self._no_extent(block)
        table = memory.table
        parent = table.parent[row]
        job = WriteBlock(
            number=link.number(),
            source=link.on_memory.hold(source_namespace.tenant, row),
            extent=extent,
            slot_bytes=memory.tree.pool_of(row).slot_bytes,
            namespace=namespace,
            key=block[1],
            parent=(table.key[parent] or b"") if parent != NONE else b"",
            depth=table.depth[row],
            stored=table.stored[row],
            used=table.used[row],
            hits=table.hits[row],
            until=memory.tree.until.get(row * 4 + HINTED, 0.0),
            replaces=self.forgetting.write_begins(extent),
        )
        self.under_way[job.number] = Writing(block, job)
        self.numbers[block] = job.number
        link.moves.append(job)
        return Turn.BEGUN

    def _may_hold(self, namespace: Namespace) -> bool:
        """Write-backs keep at most HELD_SHARE of a tenant's memory from its sessions, but always one block."""
        return not self.under_way or self._within_share(namespace)

    def _within_share(self, namespace: Namespace) -> bool:
        """Of its own holds: those of loads, which hold twice as much, must not have it write one by one."""
        tenant, namespaces = namespace.tenant, self.link.memory.namespaces
        held_bytes = self._kept.bytes_of(tenant) + sum(
            writing.job.slot_bytes
            for writing in self.under_way.values()
            if writing.block not in self._kept and namespaces[writing.block[0] - 1].tenant is tenant
        )
        return held_bytes <= self.link.memory.segments.tenant_bytes(tenant.id) * HELD_SHARE

    def _no_extent(self, block: Block) -> Turn:
        """No place in the files: it waits while one is being made, else it is not written."""
        if self.link.packed.waits:
            return Turn.LATER
        if self.link.disk.room.pending:
            self._waits_for_room = True
            return Turn.LATER
        self._drop(block, self._no_room(self._size(block)))
        return Turn.OVER

    def _no_room(self, slot_bytes: int) -> str:
        """Why a block of that size has no place."""
        why = self.link.no_file or "all of it is held, or no file for them can be made within ssd.size"
        return self._too_large(slot_bytes) or f"no room on the SSD for blocks of {slot_bytes / MIB:.3g} MiB: {why}"

    def _too_large(self, slot_bytes: int) -> str:
        """Names the limit that no block of that size is within; "" where it may have a place."""
        packed, files = self.link.packed, self.link.disk.segments.size_bytes
        limit = min(packed.block_bytes_max, files) if packed.counts else files
        size, most = f"{slot_bytes / MIB:.3g}", f"{limit / MIB:.3g}"
        if slot_bytes <= limit:
            return ""
        return (
            f"blocks of {size} MiB are larger than the SSD takes: at most {most} MiB with this ssd.size and ssd.layout"
        )

    def room_came(self) -> None:
        """A file was made, or could not be."""
        self._waits_for_room = False

    @property
    def waits_for_room(self) -> bool:
        """The next write would find no extent: none begins until a file is made."""
        return self._waits_for_room and self.link.disk.room.pending

    def wrote(self, number: int, checksum: int, error: str, now: float, packed: int = 0) -> None:
        """The report of a WriteBlock."""
        link, writing = self.link, self.under_way.pop(number)
        job, block = writing.job, writing.block
        del self.numbers[block]
        link.schedule.ended(Kind.WRITE)
        link.packed.ended(job.extent, packed)
        link.on_memory.release(link.memory.namespaces[block[0] - 1].tenant, job.source)
        if job.replaces is not None:
            self.forgetting.write_ended(job.replaces)
        self._tell_removed(block, writing)
        if error:
            self._take_back(job)
            link.counts.write_errors += 1
            self._missed = len(link.memory.table)
            self._tell(block, f"the SSD is out of use: writing: {error}")
            link.go_out_of_use(f"writing: {error}")
        elif writing.cancelled:
            self._take_back(job)
            if writing.again:
                self._after[job.namespace.id, job.key] = block
        else:
            self._keep(block, job, checksum, packed, now)

    def _keep(self, block: Block, job: WriteBlock, checksum: int, packed: int, now: float) -> None:
        """The record is safe: the block is on the SSD."""
        disk, session = self.link.disk, self.link.on_disk.session(job.namespace.tenant)
        ttl_s = max(job.until - now, TTL_S_MIN) if job.until else 0.0
        _, new, _ = disk.place(session, job.namespace, [job.key], [job.extent], [job.parent], [job.depth], now, ttl_s)
        if not new:  # the key is another namespace's, which no digest allows: not to be served
            self._take_back(job)
            self._tell(block, "its key is another namespace's")
            return
        self.link.keep_checksum(new[0], checksum, packed)
        disk.table.hits[new[0]] = job.hits
        self.link.counts.written += 1
        self.link.counts.written_bytes += job.namespace.block_bytes
        self._tell(block, "")

    def _take_back(self, job: WriteBlock) -> None:
        """An extent that holds nothing; its record, if one was written, must go."""
        self.link.on_disk.give_back(job.namespace.tenant, job.extent)
        self.forgetting.left((job.namespace.id, job.key), job.extent)

    def _drop(self, block: Block, why: str) -> None:
        """A block that is not written after all."""
        self.link.counts.writes_dropped += 1
        self.last_dropped = why or self.last_dropped
        self._tell(block, why)

    def give_up_waited(self, why: str) -> None:
        """Nothing is written for now: whoever waits for it is told."""
        for block in list(self._durables):
            if self.link.schedule.waits(Kind.WRITE, block):
                self.link.schedule.withdraw(Kind.WRITE, block)
                self._drop(block, why)

    def give_up_queue(self) -> None:
        """The SSD is out of use: what waits is not written. It may be very many, so only who waits for it is met."""
        self.link.counts.writes_dropped += self.link.schedule.clear(Kind.WRITE) + len(self._after)
        self._after.clear()
        self._missed = len(self.link.memory.table)
        for block in [block for block in self._durables if block not in self.numbers]:
            self._tell(block, f"the SSD is out of use: {self.link.trouble}")

    # -- what goes

    def left_memory(self, block: Block) -> None:
        """A block leaves memory; one that is being written is held, so it was not evicted but removed."""
        writing = self._writing(block)
        if writing is None:
            return
        writing.cancelled, writing.again = True, False
        # Who waits from now on waits for another block. The slot is let go of with the write: this one is leaving.
        writing.durables += self._durables.pop(block, [])
        if block in self._kept:
            writing.kept.append(self._kept.take(block))

    def _unwanted(self) -> set[Name]:
        """Records that are being written and must not stay."""
        return {(w.job.namespace.id, w.job.key) for w in self.under_way.values() if w.cancelled}

    def _may_be_written(self, name: Name) -> None:
        """Nothing under way deletes that record any more: it may be written anew."""
        block = self._after.pop(name, None)
        if block is not None and not self.offer(block, PRIORITY_MAX):
            self._tell(block, self.link.trouble or FULL)

    def tell_under_way(self, why: str) -> None:
        """Whoever waits for what is being written waits no longer: it takes too long."""
        for writing in self.under_way.values():
            self._tell(writing.block, why)
            self.watched.reached(writing.block, writing.durables, why)
            writing.durables = []

    def leave_behind(self, why: str) -> dict[int, tuple[Tenant, int]]:
        """Gives up what is under way; number of each write -> the slot that it must keep until its report."""
        link, left = self.link, {}
        for number, writing in self.under_way.items():
            job, tenant = writing.job, link.memory.namespaces[writing.block[0] - 1].tenant
            left[number] = (tenant, job.source)
            link.schedule.ended(Kind.WRITE)
            if job.replaces is not None:
                self.forgetting.write_ended(job.replaces)
            link.on_disk.give_back(job.namespace.tenant, job.extent)
            if writing.cancelled:
                link.removals.remove(link.joined.memory_of[job.namespace.id], [job.key])
            self._tell_removed(writing.block, writing)
            self._tell(writing.block, why)
        self.under_way.clear()
        self.numbers.clear()
        return left

    def know_less(self, records_max: int) -> bool:
        """All records are gone with the directory they were in; forgets so many of them, True if there are more.

        Where it turns up again, what was to be deleted from it is not to be found there. Nothing may be under way.
        """
        assert not self.under_way, "records are lost while one is being written"
        self._missed = len(self.link.memory.table)
        link = self.link
        for space, key in self.forgetting.lose_step(records_max):
            link.removals.remove(link.joined.memory_of[space], [key])
        return bool(self.forgetting.names or self.forgetting.former)

    def is_coming(self, block: Block) -> bool:
        """Whether it waits to be written, is being written, or waits for its former record to be deleted."""
        return (
            block in self.numbers
            or self.link.schedule.waits(Kind.WRITE, block)
            or (bool(self._after) and block in self._after.values())
        )

    @property
    def idle(self) -> bool:
        """Nothing is to be written, and nothing under way."""
        return not (self.under_way or self._after or self.link.schedule.queues[Kind.WRITE].active)

    @property
    def forgets_nothing(self) -> bool:
        """Every record that was to be deleted is, and none is being written that will have to be."""
        return self.forgetting.nothing and not any(writing.cancelled for writing in self.under_way.values())
