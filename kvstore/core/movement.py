"""Moves blocks between memory and the SSD.

Two stores decide what each tier keeps: memory's, and one over the files (segments are files,
slots are extents; its eviction, its accounting and its audit are the same code). This joins
them: it takes slots in both, hands `Move`s out, and hears how each ended. It knows no files and
no clock; reports are all it knows of a disk.

Rules
  - a block is in the SSD's store only once its record is safe on disk, and leaves it before its
    record is deleted; an extent is written again only with, or after, that deletion;
  - what is under way holds its slot and its extent until the report (rule 5); whatever happens
    to the block meanwhile changes what the report means, never what may be touched;
  - the SSD is optional: an error puts it out of use, memory goes on serving, and a probe that
    works brings it back.
"""

from collections.abc import Callable, Sequence

from kvstore.core.block import NONE, PINNED, SEALED
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.idle import IdleConversations
from kvstore.core.in_order import InOrder, Report
from kvstore.core.link import Block, Link, MoveCounts
from kvstore.core.loads import Loads, Ticket
from kvstore.core.losing import Losing
from kvstore.core.moves import Move, ProbeTier
from kvstore.core.schedule import Kind, Turn
from kvstore.core.store import Store
from kvstore.core.tiered import Joined
from kvstore.core.verify import Verification
from kvstore.core.writeback import WriteBack

PROBE_S = 5.0
"""Between two attempts to find an SSD well again that is out of use."""

LESS_SHARE = 1 / 32
"""Of a pool's blocks, dropped in one measure where the payload is too much."""

SILENT_S = 2.0
"""A read under way for longer puts the SSD out of use, so that nobody waits for it, until it answers."""

SILENT_WRITE_S = 20.0
"""The same of a write, a sync or a commit. A disk under load takes seconds for one, and nobody reads by it."""


class Movement:
    """Between two stores, for one SSD."""

    def __init__(
        self,
        memory: Store,
        disk: Store,
        joined: Joined,
        *,
        pid: int,
        policy: str,
        queue_bytes: dict[Kind, int],
        packed_bytes: int = 0,
        packed_block_max: int = 0,
    ) -> None:
        self.link = Link(
            memory,
            disk,
            joined,
            pid=pid,
            queue_bytes=queue_bytes,
            packed_bytes=packed_bytes,
            packed_block_max=packed_block_max,
        )
        self.writes = WriteBack(self.link, policy)
        self._reports = InOrder(self.writes)
        self.loads = Loads(self.link)
        self.verification = Verification(self.link, self.loads)
        self.losing = Losing(self.link, self.loads, self.writes, self._reports, self.verification)
        self.idle = IdleConversations()
        joined.left_host, joined.left_disk = self._left_memory, self._left_disk
        self.link.on_trouble = self._out_of_use
        memory.watcher = self
        self.ready = False
        """What was on the SSD is known (restore.py): nothing is written before."""
        self._probe_at = 0.0
        self._probing = False
        self._silent = False
        self.on_used: Callable[[Tenant, Sequence[bytes]], None] = lambda tenant, keys: None
        """Told which blocks on the SSD were used, with its tenant: records are to say so, too."""
        self._file_at = 0.0
        """When the next file may be asked for after one could not be made."""

    @property
    def counts(self) -> MoveCounts:
        return self.link.counts

    @property
    def trouble(self) -> str:
        """Why the SSD is out of use; "" where it is in use."""
        return self.link.trouble

    # -- what memory's store tells

    def stored(self, new: Sequence[int], known: Sequence[int]) -> None:
        if new:
            self.writes.stored(new)
        if known:
            self._use(known)

    def used(self, rows: Sequence[int]) -> None:
        self.writes.used(rows)
        self._use(rows)

    def _use(self, rows: Sequence[int]) -> None:
        """What is used in memory counts for its copy on the SSD, and is prefetched no more."""
        prefetched = self.loads.prefetched
        if prefetched:
            table = self.link.memory.table
            for row in rows:
                key = table.key[row]
                if key is not None and (table.namespace[row], key) in prefetched:
                    prefetched.used((table.namespace[row], key))

    def _left_memory(self, key: bytes, row: int) -> None:
        block = (self.link.memory.table.namespace[row], key)
        self.writes.left_memory(block)
        self.loads.prefetched.left_memory(block)

    def _left_disk(self, key: bytes, row: int) -> None:
        table, joined = self.link.disk.table, self.link.joined
        number = table.namespace[row]
        self.link.packed.left(row)
        if not self.link.away:
            self.writes.forgetting.left((number, key), table.place[row])
        block = (joined.memory_of[number].id, key)
        self.writes.watched.left_disk(block)
        self.loads.left_disk(block)

    def served(self, tenant: str, conversation: str, tokens_generated: int, now: float) -> None:
        """A hint: that conversation is being served, by a request that generated so many tokens."""
        self.idle.seen(self.link.memory.conversations.seen(tenant, conversation), tokens_generated, now)

    # -- both tiers at once

    def touch(self, tenant: Tenant, keys: Sequence[bytes], now: float) -> None:
        """Blocks were used: their copies on the SSD are as recent."""
        disk = self.link.joined.disk_tenants.get(tenant.id)
        if disk is not None:
            self.link.disk.touch(disk, keys, now)
            self.on_used(disk, keys)

    def match(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        """The leading run of `keys` that is in any tier: for each, whether it is in memory."""
        link, run = self.link, []
        for key in keys:
            block = (namespace.id, key)
            if link.memory_row(block) != NONE:
                run.append(True)
            elif link.disk_row(block) != NONE:
                run.append(False)
            else:
                break
        return run

    def run_on_disk(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """How many leading blocks have a copy on the SSD, whether memory has them or not."""
        there = (self.link.disk_row((namespace.id, key)) != NONE for key in keys)
        return next((i for i, on_disk in enumerate(there) if not on_disk), len(keys))

    def remove_from_disk(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Removes copies on the SSD, ahead of those in memory; how many blocks are gone that were there only."""
        if not self.ready:
            self.link.removals.remove(namespace, keys)
        disk = self.link.joined.disk_of.get(namespace.id)
        if disk is None:
            return 0
        only = sum(map(self._only_on_disk, ((namespace.id, key) for key in dict.fromkeys(keys))))
        self.link.disk.remove(disk, keys)
        return only

    def clear_step(self, namespace: Namespace, start: int, rows_max: int) -> tuple[int | None, int, int]:
        """Removes the namespace's copies among `rows_max` rows of the SSD's store from `start`.

        Answers where to go on (None at the end), how many copies, and of how many blocks they were the only ones.
        """
        if not self.ready and not start:
            self.link.removals.clear(namespace)
        link, found = self.link, self.link.joined.disk_of.get(namespace.id)
        if found is None:
            return None, 0, 0
        table, dropped, only = link.disk.table, 0, 0
        stop = min(start + rows_max, len(table))
        for row in range(start, stop):
            if table.state[row] == SEALED and table.namespace[row] == found.id:
                only += self._only_on_disk((namespace.id, table.key[row] or b""))
                link.disk.tree.drop(row)
                dropped += 1
        link.disk.counts.removed += dropped
        return stop if stop < len(table) else None, dropped, only

    def pin_on_disk(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float, now: float) -> int:
        """Keeps copies on the SSD from eviction; how many blocks are there only."""
        disk = self.link.joined.disk_of.get(namespace.id)
        if disk is None:
            return 0
        self.link.disk.pin(disk, keys, ttl_s, now)
        return sum(self._only_on_disk((namespace.id, key)) for key in keys)

    def unpin_on_disk(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Lets eviction have copies on the SSD again; how many blocks were pinned there, and not in memory."""
        disk, memory, unpinned = self.link.joined.disk_of.get(namespace.id), self.link.memory.table, 0
        if disk is None:
            return 0
        for key in keys:
            row = self.link.memory_row((namespace.id, key))
            in_memory = row != NONE and memory.marks[row] & PINNED
            unpinned += self.link.disk.unpin(disk, [key]) and not in_memory
        return unpinned

    def _only_on_disk(self, block: Block) -> bool:
        return self.link.memory_row(block) == NONE and self.link.disk_row(block) != NONE

    def prefetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        deadline: float,
        ended: Callable[[Ticket], None],
        priority: int = 0,
    ) -> Ticket:
        """Brings the leading run into memory ahead of use. Its owner must `close` it."""
        return self.loads.ask(namespace, keys, Kind.PREFETCH, deadline, ended, priority)

    def load(
        self, namespace: Namespace, keys: Sequence[bytes], deadline: float, ended: Callable[[Ticket], None]
    ) -> Ticket:
        """Brings the leading run into memory for somebody who waits, and holds it until the ticket is closed."""
        return self.loads.ask(namespace, keys, Kind.LOAD, deadline, ended)

    # -- time and reports

    def leave(self) -> None:
        """Its directory is about to be lost: nothing more is begun or known of it, until `come`."""
        assert self.link.trouble, "an SSD in use is left"
        self.link.away, self.ready = True, False

    def come(self) -> None:
        """A directory is open, and nothing of it is known yet."""
        self.link.away, self.link.trouble = False, ""
        self._silent = self._probing = False

    def tick(self, now: float, low: float, busy: tuple[float, str] | None = None) -> None:
        """Deadlines, an SSD that is silent or may be well again, and what should be written before it is evicted.

        `busy`: since when the worker that is longest at something else than a read is at it, and at what. What
        waits for a worker does not count: a long queue is no disk that hangs.
        """
        self.loads.expire(now)
        self._listen(now, busy)
        probe = not (self._probing or self._silent or self.link.away)
        if self.link.trouble and probe and now >= self._probe_at:
            self._probing = True
            self._probe_at = now + PROBE_S
            self.link.moves.append(ProbeTier())
        disk, segments = self.link.disk, self.link.disk.segments
        disk.expire(now)
        disk.room.go_on()
        if segments.none_made and now >= self._file_at:
            self._file_at = now + PROBE_S
            segments.none_made = False
            self.link.no_file = ""  # until the next one cannot be made either: nobody may want one any more
        self.writes.look_ahead(low)
        self.writes.offload(self.idle, now)

    def _listen(self, now: float, busy: tuple[float, str] | None) -> None:
        """An SSD that does not answer is out of use until it does; then a probe says whether it is well."""
        began, silent = self.loads.oldest_read(), ""
        if began is not None and now - began > SILENT_S:
            silent = f"a read has been under way for {SILENT_S:.0f} s"
        elif busy is not None and now - busy[0] > SILENT_WRITE_S:
            silent = f"{busy[1]} has been under way for {SILENT_WRITE_S:.0f} s"
        if self._silent and not silent:
            self._probe_at = now
        self._silent = bool(silent)
        if silent and not self.link.trouble:
            self.link.go_out_of_use(silent)
        if silent:
            self.writes.tell_under_way(f"the SSD is out of use: {silent}")

    def take_moves(self, now: float) -> list[Move]:
        """Jobs for the workers since the last call, in the order in which they are to be begun."""
        schedule = self.link.schedule
        if not self.link.trouble:
            self.writes.forgetting.hand_out()
            self.link.moves += self.link.packed.hand_out(self.link.number)
        without = [Kind.WRITE] if self.writes.waits_for_room or not self.ready or self.link.too_full else []

        def begin(kind: Kind, block: Block) -> Turn:
            return self.writes.begin(block) if kind is Kind.WRITE else self.loads.begin(block, now)

        self.loads.feed()
        schedule.run(begin, without)
        if not self.link.trouble:
            self.verification.hand_out(now)
        moves, self.link.moves = self.link.moves, []
        return [*moves, *self.link.disk.take_jobs()]

    def wrote(self, number: int, checksum: int, error: str, now: float, packed: int = 0) -> None:
        """The report of a WriteBlock; `packed`: what it takes on the disk, 0 where that is its slot."""
        if self.losing.ended_late(number):
            return
        self._reports.wrote(Report(number, checksum, error, now, packed))

    def vacated(self, number: int, error: str) -> None:
        """The report of a VacateSlots."""
        self.link.packed.vacated(number, error)
        if error:
            self.link.go_out_of_use(f"deleting payload: {error}")

    def read(self, number: int, outcome: str, now: float) -> None:
        """The report of a ReadBlock or VerifyBlock: "ok", "mismatch", or what went wrong."""
        if not self.losing.ended_late(number) and not self.verification.read(number, outcome):
            self.loads.read(number, outcome, now)

    def forgotten(self, number: int, error: str) -> None:
        """The report of a ForgetRecords."""
        self.writes.forgetting.reported(number, error)

    def probed(self, error: str) -> None:
        """The report of a ProbeTier."""
        self._probing = False
        if self.link.away:
            return
        if not error and not self._silent:
            self.link.trouble = ""
        elif error:
            self.link.trouble = error

    def made(self, segment: int, error: str, unwell: bool = False) -> None:
        """The report of a MakeSegment: a file is there, or could not be made.

        Where it could not, blocks go for new ones, except on a disk that is `unwell`: one that fails at this is
        tried as after any other error, and loses nothing that it has.
        """
        segments = self.link.disk.segments
        if segment not in segments.making:
            return  # given up with its directory
        limited = error if not unwell else ""
        self.link.no_file = limited
        segments.none_made = bool(limited)
        if error:
            segments.failed(segment, starved=not unwell)
            if unwell:
                self.link.go_out_of_use(f"making a file: {error}")
        else:
            segments.made(segment)
        self.writes.room_came()

    @property
    def under_way(self) -> bool:
        """Jobs that hold slots, or make files, have not been reported."""
        jobs = self.loads.under_way or self.writes.under_way or self.verification.jobs
        return bool(jobs or self.link.disk.segments.making)

    def make_less(self, too_full: str, evict: bool) -> None:
        """For a payload that no file bounds, measured now and then: nothing is written while it is `too_full`.

        With `evict` the coldest blocks go meanwhile, LESS_SHARE of each pool a call.
        """
        link = self.link
        link.too_full, link.no_file = bool(too_full), too_full
        if not too_full:
            return
        self.writes.give_up_waited(f"no room on the SSD: {too_full}")
        disk = link.disk
        for pool in disk.segments.filled() if evict and self.ready else ():
            for _ in range(int(pool.blocks * LESS_SHARE) + 1):
                row = disk.policy.victim(pool.order)
                if row == NONE:
                    break
                disk.evict(row)

    def is_only_in_memory(self, block: Block) -> bool:
        """Whether a block would be gone with memory."""
        return self.link.memory_row(block) != NONE and self.link.disk_row(block) == NONE

    def only_memory_step(self, start: int, rows_max: int, found: list[Block]) -> int | None:
        """Adds the blocks that only memory has among `rows_max` rows from `start`; where to go on, None at the end."""
        table, link = self.link.memory.table, self.link
        stop = min(start + rows_max, len(table))
        for row in range(start, stop):
            if table.state[row] == SEALED:
                block = (table.namespace[row], table.key[row] or b"")
                if link.disk_row(block) == NONE:
                    found.append(block)
        return stop if stop < len(table) else None

    def _out_of_use(self) -> None:
        self.loads.fail_all(f"the SSD is out of use: {self.link.trouble}")
        self.writes.give_up_queue()
        self.writes.forgetting.give_up_waiting(f"the SSD is out of use: {self.link.trouble}")
        self.verification.stop_all()
