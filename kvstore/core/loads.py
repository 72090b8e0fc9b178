"""What is brought from the SSD into memory, for whom, and until when.

A ticket is what one caller asked for: the leading run of its keys that is there. Blocks on the
SSD are loaded once, however many tickets want them. A ticket ends done, failed or cancelled,
by its deadline at the latest; slots under I/O end with their report, whatever became of the
tickets (rule 5), and a block that arrives late is in memory like any other.

A ticket of kind LOAD holds what it has got, so that nothing of it is evicted before its owner
has taken it: `close` it. Prefetched blocks are held by nobody; a burst of prefetches stops
(ahead.py) instead of evicting what it has just brought: such a ticket is done with its leading
run, and says that the rest was not tried. A prefetch that the queue does
not take as a whole is queued in portions (`feed`). Loads and prefetches have bounds of their
own: who waits for a block is never refused because of what is brought ahead.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.core.ahead import Prefetched
from kvstore.core.block import HINTED, NONE
from kvstore.core.holds import Namespace, Tenant
from kvstore.core.link import Block, Link
from kvstore.core.moves import ReadBlock
from kvstore.core.schedule import Kind, Turn
from kvstored.v1.errors import ResourceExhausted

TICKETS_MAX = {Kind.LOAD: 4096, Kind.PREFETCH: 4096}
TICKET_BLOCKS_MAX = 4096

NAMES = {Kind.LOAD: "loads", Kind.PREFETCH: "prefetches"}
TOO_MUCH = "half of the memory has been prefetched and not used"
NO_ROOM = "there is no more room for it in memory"
LATER = "later"
"""Of a prefetch: the queue takes no more of it at present."""

DEADLINES_SPARE = 1024
"""Of tickets that have ended before, and their portions: kept no longer than there are so many."""

SUSPECTS_MAX = 1024
"""Records that could not be read once and are still there; read in vain again, one is removed."""

RUNNING, DONE, FAILED, CANCELLED = "running", "done", "failed", "cancelled"


@dataclass(eq=False, slots=True)
class Ticket:
    """One caller's wish. `ended` is called once, when `state` is final."""

    number: int
    namespace: Namespace
    keys: list[bytes]
    kind: Kind
    priority: int
    deadline: float
    ended: Callable[["Ticket"], None]
    state: str = RUNNING
    why: str = ""
    """Why not all of the run came."""
    busy: bool = False
    """That may pass: too much was being loaded, or held, for all of it to come."""
    at: int = 0
    """Which of `keys` is to be asked for next."""
    rest: str = ""
    """Why the rest of a prefetch is not tried."""
    run: set[bytes] = field(default_factory=set)
    """All of `keys`, once that matters."""
    waiting: set[Block] = field(default_factory=set)
    unplaced: int = 0
    """Of those, as they were asked for, blocks that no slot was taken for yet."""
    loaded: int = 0
    held: list[int] = field(default_factory=list)
    """Slots in memory."""


@dataclass(eq=False, slots=True)
class Loading:
    """One block on its way."""

    block: Block
    namespace: Namespace
    size_bytes: int
    kind: Kind
    tickets: list[Ticket] = field(default_factory=list)
    job: ReadBlock | None = None
    """None while it waits for its turn."""
    began: float = 0.0
    parent: bytes = b""
    depth: int = 0
    until: float = 0.0
    hits: int = 0
    removed: bool = False
    """The record was removed while it was read."""


class Loads:
    """From the SSD to memory."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.tickets: dict[int, Ticket] = {}
        self._open = dict.fromkeys(TICKETS_MAX, 0)
        """How many of `tickets` there are of each kind."""
        self._portions: list[tuple[int, int]] = []
        """A heap of prefetches that are not all queued: priority, the highest first, and number."""
        self.loading: dict[Block, Loading] = {}
        self.under_way: dict[int, Loading] = {}
        self.prefetched = Prefetched(link.memory)
        self._early: dict[Block, list[Loading]] = {}
        """Blocks that were read before their parent, which is under way: they wait for it, in their slots."""
        self._suspects: dict[Block, None] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._last = 0

    # -- tickets

    def ask(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        kind: Kind,
        deadline: float,
        ended: Callable[[Ticket], None],
        priority: int = 0,
    ) -> Ticket:
        """Brings the leading run of `keys` into memory; `ended` may be called before this returns.

        Raises ResourceExhausted where there are too many tickets of that kind already.
        """
        if self._open[kind] >= TICKETS_MAX[kind]:
            raise ResourceExhausted(f"{TICKETS_MAX[kind]} {NAMES[kind]} are under way already")
        self._last += 1
        ticket = Ticket(self._last, namespace, list(keys[:TICKET_BLOCKS_MAX]), kind, priority, deadline, ended)
        self.tickets[ticket.number] = ticket
        self._open[kind] += 1
        self._go_on(ticket)
        if ticket.state == RUNNING:
            heapq.heappush(self._deadlines, (deadline, ticket.number))
        return ticket

    def _go_on(self, ticket: Ticket) -> None:
        """Asks for its blocks in their order, as many as are taken now; ends it where none is coming."""
        while ticket.at < len(ticket.keys):
            why = self._want(ticket, (ticket.namespace.id, ticket.keys[ticket.at]))
            if why == LATER:
                heapq.heappush(self._portions, (-ticket.priority, ticket.number))
                return
            if why == "":
                ticket.at += 1
                continue
            ticket.why = ticket.why or why or ""
            ticket.at = len(ticket.keys)
        self._end_if_over(ticket)

    def feed(self) -> None:
        """Prefetches that were larger than the queue go on, as far as it takes more.

        Ahead of each run of the queue.
        """
        self._cut_displaced()
        while self._portions:
            ticket = self.tickets.get(self._portions[0][1])
            if ticket is not None and ticket.state == RUNNING and ticket.at < len(ticket.keys):
                if not self.link.schedule.fits(Kind.PREFETCH, self._size_bytes(ticket)):
                    return
                heapq.heappop(self._portions)
                self._go_on(ticket)
            else:
                heapq.heappop(self._portions)

    def _size_bytes(self, ticket: Ticket) -> int:
        return self.link.memory.pool(ticket.namespace).slot_bytes

    def _want(self, ticket: Ticket, block: Block) -> str | None:
        """One block of a ticket: "" where it is there or coming, None where the run ends, or why it stops here."""
        link = self.link
        row = link.memory_row(block)
        if ticket.kind is Kind.LOAD and not self._may_add(ticket, block, row):
            ticket.busy = True
            return "it is more than may be held in memory at once"
        if row != NONE:
            self._hold(ticket, row)
            return ""
        if link.disk_row(block) == NONE:
            return None
        if link.trouble:
            return f"the SSD is out of use: {link.trouble}"
        loading = self.loading.get(block)
        if loading is None:
            size_bytes = self._size_bytes(ticket)
            if ticket.kind is Kind.PREFETCH and not link.schedule.fits(ticket.kind, size_bytes):
                return LATER
            if not link.schedule.offer(ticket.kind, block, size_bytes, ticket.priority):
                ticket.busy = True
                return "too much is being loaded already"
            loading = self.loading[block] = Loading(block, ticket.namespace, size_bytes, ticket.kind)
        elif ticket.kind < loading.kind and link.schedule.withdraw(loading.kind, block):
            # Somebody waits for what was to be brought ahead.
            if link.schedule.offer(ticket.kind, block, loading.size_bytes, ticket.priority):
                loading.kind = ticket.kind
            else:
                link.schedule.offer(loading.kind, block, loading.size_bytes, ticket.priority)
        loading.tickets.append(ticket)
        ticket.waiting.add(block)
        ticket.unplaced += loading.job is None
        return ""

    def _may_add(self, ticket: Ticket, block: Block, row: int) -> bool:
        """Whether one block more may be held; what is held or being read for others has its slot already."""
        on_memory, loading = self.link.on_memory, self.loading.get(block)
        if row != NONE:
            placed = on_memory.holds(ticket.namespace.tenant, self.link.memory.table.place[row]) > 0
        else:
            placed = loading is not None and loading.job is not None
        return placed or on_memory.may_hold(ticket.namespace, ticket.unplaced + 1)

    def cancel(self, ticket: Ticket) -> None:
        """Ends a ticket that is running; one that is final stays as it is."""
        self._abandon(ticket, CANCELLED, "cancelled")

    def close(self, ticket: Ticket) -> None:
        """Its owner has taken what it wanted, or gives up: nothing is held for it any more."""
        self.cancel(ticket)
        if self.tickets.pop(ticket.number, None) is not None:
            self._open[ticket.kind] -= 1
        if len(self._deadlines) > 2 * len(self.tickets) + DEADLINES_SPARE:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self.tickets]
            heapq.heapify(self._deadlines)
        if len(self._portions) > 2 * len(self.tickets) + DEADLINES_SPARE:
            self._portions = [entry for entry in self._portions if entry[1] in self.tickets]
            heapq.heapify(self._portions)
        tenant = ticket.namespace.tenant
        for ref in ticket.held:
            self.link.on_memory.release(tenant, ref)
        ticket.held.clear()

    def expire(self, now: float) -> None:
        """Ends tickets whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = self.tickets.get(heapq.heappop(self._deadlines)[1])
            if ticket is not None:
                self._abandon(ticket, FAILED, "its deadline passed")

    def fail_all(self, why: str) -> None:
        """The SSD is out of use: nobody waits for it."""
        for ticket in list(self.tickets.values()):
            self._abandon(ticket, FAILED, why)

    def blocks_now(self, ticket: Ticket) -> int:
        """How many leading blocks of a ticket are in memory now."""
        return len(self.link.memory.match(ticket.namespace, ticket.keys))

    def _abandon(self, ticket: Ticket, state: str, why: str) -> None:
        if ticket.state != RUNNING:
            return
        for block in ticket.waiting:
            self._want_no_more(ticket, self.loading[block])
        if ticket.waiting:
            self.link.counts.loads_failed += len(ticket.waiting)
        ticket.waiting.clear()
        ticket.why = ticket.why or why
        self._end(ticket, state)

    def _want_no_more(self, ticket: Ticket, loading: Loading) -> None:
        """One waits no longer for that block: it is not read where nobody else does."""
        loading.tickets.remove(ticket)
        if not loading.tickets and loading.job is None:
            self.link.schedule.withdraw(loading.kind, loading.block)
            del self.loading[loading.block]

    def _cut(self, ticket: Ticket, why: str) -> None:
        """The rest of a prefetch is not tried; what is being read for it comes."""
        ticket.rest, ticket.at = why, len(ticket.keys)
        rest = [block for block in ticket.waiting if self.loading[block].job is None]
        self.link.schedule.queues[Kind.PREFETCH].refused += len(rest)
        for block in rest:
            ticket.waiting.remove(block)
            self._want_no_more(ticket, self.loading[block])
        self._end_if_over(ticket)

    def _next_to_go(self, loading: Loading) -> bool:
        """Whether what would make room for it is of the same run: its end is not worth its beginning."""
        memory, ticket = self.link.memory, loading.tickets[0]
        pool = memory.pool(loading.namespace)
        if pool.free or memory.segments.idle_bytes >= memory.segments.segment_bytes:
            return False
        ticket.run.update(() if ticket.run else ticket.keys)
        coldest = memory.policy.coldest(pool.order, 1)
        return any(memory.table.key[row] in ticket.run for row in coldest)

    def _cut_displaced(self) -> None:
        """Prefetches that have begun to push out what they brought bring no more."""
        for number in self.prefetched.displaced():
            ticket = self.tickets.get(number)
            if ticket is not None and ticket.state == RUNNING:
                self._cut(ticket, NO_ROOM)

    def _end_if_over(self, ticket: Ticket) -> None:
        """Nothing is coming for it any more."""
        if ticket.waiting or ticket.at < len(ticket.keys) or ticket.state != RUNNING:
            return
        state = FAILED if ticket.why else DONE
        if ticket.rest and not ticket.why:
            ticket.why = f"the rest was not tried: {ticket.rest}"
            state = DONE if self.blocks_now(ticket) else FAILED
        self._end(ticket, state)

    def _end(self, ticket: Ticket, state: str) -> None:
        ticket.state = state
        ticket.run.clear()
        ticket.ended(ticket)

    def _hold(self, ticket: Ticket, row: int) -> None:
        if ticket.kind is Kind.LOAD:
            ticket.held.append(self.link.on_memory.hold(ticket.namespace.tenant, row))

    # -- reading

    def begin(self, block: Block, now: float) -> Turn:
        """A load's turn has come."""
        link, loading = self.link, self.loading[block]
        self._cut_displaced()
        if block not in self.loading:
            return Turn.OVER
        row = link.memory_row(block)
        if row != NONE:
            self._came(loading, row)
            return Turn.OVER
        disk_row = link.disk_row(block)
        if disk_row == NONE:
            self._failed(loading, "it was evicted from the SSD")
            return Turn.OVER
        if self._only_ahead(loading) and not self.prefetched.may_come(loading.namespace):
            return self._not_tried(loading, TOO_MUCH)
        if self._only_ahead(loading) and self._next_to_go(loading):
            return self._not_tried(loading, NO_ROOM)
        target = link.on_memory.take(loading.namespace)
        if target is None:
            if link.memory.room.pending or self.under_way:
                return Turn.LATER
            return self._not_tried(loading, NO_ROOM)
        disk, namespace = link.disk, link.joined.disk_of[block[0]]
        parent = disk.table.parent[disk_row]
        loading.parent = (disk.table.key[parent] or b"") if parent != NONE else b""
        loading.depth = disk.table.depth[disk_row]
        loading.hits = disk.table.hits[disk_row]
        loading.until = disk.tree.until.get(disk_row * 4 + HINTED, 0.0)
        loading.began = now
        loading.job = ReadBlock(
            number=link.number(),
            target=target,
            extent=link.on_disk.hold(namespace.tenant, disk_row),
            slot_bytes=loading.size_bytes,
            length=namespace.block_bytes,
            key=block[1],
            checksum=link.checksums[disk_row],
        )
        self.under_way[loading.job.number] = loading
        link.moves.append(loading.job)
        return Turn.BEGUN

    def read(self, number: int, outcome: str, now: float) -> None:
        """The report of a ReadBlock: "ok", "mismatch", or what went wrong."""
        link, loading = self.link, self.under_way.pop(number)
        job, block = loading.job, loading.block
        assert job is not None
        link.schedule.ended(loading.kind)
        disk_namespace = link.joined.disk_of[block[0]]
        link.on_disk.release(disk_namespace.tenant, job.extent)
        parent = self.loading.get((block[0], loading.parent)) if loading.parent else None
        if outcome == "ok" and not loading.removed and parent is not None and parent.job is not None:
            # Before its parent it would be an orphan in memory, the first to go when the next one needs a place.
            self._early.setdefault(parent.block, []).append(loading)
            return
        waiting = [(loading, outcome)]
        while waiting:
            loading, outcome = waiting.pop()
            self._place(loading, outcome, now)
            waiting += [(child, "ok") for child in self._early.pop(loading.block, ())]

    def _place(self, loading: Loading, outcome: str, now: float) -> None:
        """What was read becomes a block in memory, if it may."""
        link, job, block, namespace = self.link, loading.job, loading.block, loading.namespace
        assert job is not None
        if outcome == "ok" and not loading.removed:
            self._suspects.pop(block, None)
            ttl_s = max(loading.until - now, 0.001) if loading.until else 0.0
            session = link.on_memory.session(namespace.tenant)
            _, new, known = link.memory.place(
                session, namespace, [block[1]], [job.target], [loading.parent], [loading.depth], now, ttl_s
            )
            if new:
                link.memory.table.hits[new[0]] = loading.hits
                link.counts.loaded += 1
                link.counts.loaded_bytes += job.length
                if self._only_ahead(loading):
                    self.prefetched.came(block, tuple(ticket.number for ticket in loading.tickets))
            else:
                link.on_memory.give_back(namespace.tenant, job.target)
            if new or known:
                self._came(loading, (new or known)[0])
                return
            outcome = "its key is another namespace's"
        else:
            link.on_memory.give_back(namespace.tenant, job.target)
        if loading.removed:
            self._failed(loading, "it was removed")
        elif outcome == "mismatch":
            self.found_corrupt(block)
            self._failed(loading, "its record on the SSD was not its own and has been removed")
        else:
            self._failed(loading, f"reading it failed: {outcome}")
            self.found_unreadable(block, outcome)

    def found_corrupt(self, block: Block) -> None:
        """The bytes in its extent are not a block's own: it is not promised again."""
        self.link.counts.corrupt += 1
        row = self.link.disk_row(block)
        if row != NONE:
            self.link.on_corrupt(block[1], self.link.disk.table.place[row])
        self.link.disk.remove(self.link.joined.disk_of[block[0]], [block[1]])

    def found_unreadable(self, block: Block, why: str) -> None:
        """An error: of the whole SSD, until it has been tried; a block that is met by it twice is removed."""
        self.link.counts.read_errors += 1
        if block in self._suspects:
            del self._suspects[block]
            self.link.disk.remove(self.link.joined.disk_of[block[0]], [block[1]])
        elif len(self._suspects) < SUSPECTS_MAX:
            self._suspects[block] = None
        self.link.go_out_of_use(f"reading: {why}")

    def leave_behind(self, why: str) -> dict[int, tuple[Tenant, int]]:
        """Gives up what is under way; number of each read -> the slot that it must keep until its report."""
        link, left = self.link, {}
        for number, loading in self.under_way.items():
            assert loading.job is not None
            left[number] = (loading.namespace.tenant, loading.job.target)
            link.schedule.ended(loading.kind)
            link.on_disk.release(link.joined.disk_of[loading.block[0]].tenant, loading.job.extent)
            self._failed(loading, why)
        self.under_way.clear()
        for loading in [child for children in self._early.values() for child in children]:
            assert loading.job is not None
            link.on_memory.give_back(loading.namespace.tenant, loading.job.target)
            self._failed(loading, why)
        self._early.clear()
        return left

    def oldest_read(self) -> float | None:
        """When the oldest read under way began."""
        return min((loading.began for loading in self.under_way.values()), default=None)

    def _came(self, loading: Loading, row: int) -> None:
        """A block is in memory: whoever waited for it has it."""
        del self.loading[loading.block]
        for ticket in loading.tickets:
            ticket.loaded += 1
            self._hold(ticket, row)
            self._one_less(ticket, loading.block)

    def _failed(self, loading: Loading, why: str) -> None:
        del self.loading[loading.block]
        self.link.counts.loads_failed += 1
        for ticket in loading.tickets:
            ticket.why = ticket.why or why
            self._one_less(ticket, loading.block)

    def _not_tried(self, loading: Loading, why: str) -> Turn:
        """There is no room for it at present: nor for what prefetches want behind it."""
        for ticket in [ticket for ticket in loading.tickets if ticket.kind is Kind.PREFETCH]:
            self._cut(ticket, why)
        if loading.tickets:
            for ticket in loading.tickets:
                ticket.busy = True
            self._failed(loading, why)
        return Turn.OVER

    def _one_less(self, ticket: Ticket, block: Block) -> None:
        ticket.waiting.remove(block)
        self._end_if_over(ticket)

    @staticmethod
    def _only_ahead(loading: Loading) -> bool:
        """Nobody waits for it, also not somebody for whom the queue of demand loads was full."""
        return not any(ticket.kind is Kind.LOAD for ticket in loading.tickets)

    def left_disk(self, block: Block) -> None:
        """A record is removed or evicted; one that is being read cannot have been evicted."""
        self._suspects.pop(block, None)
        loading = self.loading.get(block)
        if loading is not None and loading.job is not None:
            loading.removed = True
