"""The pool of one device: its store, what its clients ask of it, and all that is under way on it.

Sessions here are of the device's own store, one for each session of memory's that uses it
(`session_of`); limits, leases, quarantine and accounts are that store's, so they are memory's.

Rules, beyond those of the shared memory (kvstore/README.md)
  - A block is visible once its copy is complete: by the client's event, or by a worker's report.
  - What a process that is gone could write to is kept until the device says that nothing of it
    runs any more (`AwaitQuiet`): its exit is seen before its last kernel has ended.
  - Memory of the device is freed when no importer has it mapped: a `DropSegment` is handed out
    once its segment drains no longer.
  - Out of memory is a state: the pool goes on with what it has, and tries again every RETRY_S.
  - A device that is lost takes its blocks along, and nothing else: whoever waits is answered at
    once, slots of memory under copies are free with their report, and memory and SSD go on.
"""

from collections.abc import Callable, Sequence
from typing import Any

from kvstore.core import leaving
from kvstore.core.block import NONE, SEALED
from kvstore.core.gpu_commits import PendingCommit, PendingCommits
from kvstore.core.gpu_down import WANTED_PRIORITY, CopyDowns
from kvstore.core.gpu_jobs import AwaitQuiet, CopyDown, CopyUp, GpuCounts, GpuJob
from kvstore.core.gpu_link import GpuLink
from kvstore.core.gpu_losing import GpuLosing
from kvstore.core.gpu_strays import Strays
from kvstore.core.gpu_tickets import GpuTicket, GpuTickets
from kvstore.core.holds import Namespace, Session, Tenant
from kvstore.core.link import Block
from kvstore.core.schedule import Kind, Turn
from kvstore.core.segments import DropSegment
from kvstored.v1.errors import FailedPrecondition, Unavailable

RETRY_S = 5.0
"""Between a segment that could not be made and the next attempt; and between two questions whether a device is quiet
that could not be answered."""


class GpuPool:
    """Of one device."""

    def __init__(self, link: GpuLink, write_back: str) -> None:
        """`write_back`: "through" or "evict", as gpu_down.py has them."""
        self.link = link
        self.store = link.store
        self.downs = CopyDowns(link, write_back)
        self.commits = PendingCommits(link, self.downs.stored)
        self.tickets = GpuTickets(link)
        self.ups = self.tickets.ups
        self._of: dict[int, Session] = {}
        """Session of memory's store -> the same client's here."""
        self._asking: dict[int, int] = {}
        """Number of an AwaitQuiet -> the session of memory's store it is about."""
        self._ask_again: dict[int, float] = {}
        """Session of memory's store whose process is gone -> when to ask (again)."""
        self._drops: dict[int, DropSegment] = {}
        """Segments that are to be freed and that somebody may have mapped."""
        self._make_at = 0.0
        self._evicted = 0
        self.no_memory = ""
        """Why the last segment could not be made; the pool goes on with what it has."""
        self.generation = 1
        """Of what is exported of the device: another one each time that it comes back."""
        self.on_quiet: Callable[[int], None] = lambda client: None
        """Told when nothing of a client (the number of its session in memory's store) can touch the device any more,
        after its process has gone."""
        self.strays = Strays(link)
        self.losing = GpuLosing(link, self.downs, self.tickets, self.commits)
        link.side.left_device, link.side.left_host = self._left_device, self._left_host

    @property
    def uuid(self) -> str:
        return self.link.uuid

    @property
    def counts(self) -> GpuCounts:
        return self.link.counts

    @property
    def trouble(self) -> str:
        """Why the device is out of use; "" where it is in use."""
        return self.link.trouble

    # -- sessions

    def session_of(self, client: Session) -> Session:
        """The device's session of a client of memory's store, made at first use.

        Raises Unavailable where the device is lost, and FailedPrecondition for a client that may not write to shared
        memory, or is not on this node: what is mapped of a device can always be written to.
        """
        if self.link.trouble:
            raise Unavailable(f"device {self.link.uuid} is out of use: {self.link.trouble}")
        found = self._of.get(client.id)
        if found is not None:
            return found
        if client.ended:
            raise FailedPrecondition(f"session {client.id} has ended; connect again")
        if client.read_only or not client.local:
            raise FailedPrecondition("memory of a device is only for sessions that may write to shared memory")
        found = self._of[client.id] = self.store.open_session(
            self.store.tenant(client.tenant.name),
            client.client,
            client.opened,
            local=client.local,
            read_only=client.read_only,
            pid=client.pid,
            nonce=client.nonce,
            born=client.born,
        )
        return found

    def session_here(self, client: Session) -> Session | None:
        """The same where there is one: its `detach` and `recall` are for the client."""
        return self._of.get(client.id)

    def mapped(self, client: Session, segments: Sequence[int]) -> None:
        """A client was given the handles of these segments: it may have them mapped until it says otherwise."""
        session = self.session_of(client)
        for number in segments:
            self.store.segments.live[number].sessions.add(session.id)

    def unmapped(self, client: Session, segments: Sequence[int]) -> None:
        """A client has closed these, as `Session.detach` of its session here asked it to."""
        session = self._of.get(client.id)
        if session is not None:
            session.detach.difference_update(segments)
            self.store.segments.forget_session(session.id, list(segments))

    def end_session(self, client: Session, *, process_gone: bool, writes: bool = False) -> None:
        """As `Store.end_session`, which is called for memory's, and as often.

        `writes`: kernels of its process may write straight to memory; its end is of interest though nothing is here.
        """
        session, process = self._of.get(client.id), (client.pid, client.born)
        if session is None or self.link.trouble:  # of a device that is lost all sessions end
            if process_gone:
                self.strays.gone(*process)
            return
        if not session.ended:
            self.store.end_session(session, process_gone=False)
            self.commits.session_ended(session)
        if process_gone and client.id not in self._ask_again and client.id not in self._asking.values():
            if writes or session.granted or session.leased or self._maps(session):
                self._ask_again[client.id] = 0.0
            else:
                self.strays.gone(*process)
                self._forget(client.id)

    def resume(self, old: Session, heir: Session, leased: Sequence[int], granted: Sequence[int]) -> None:
        """The process of `old` attached again as `heir`, and says what it still uses of this device; the rest is free.

        As `Store.resume`, and before it; but what a copy may be under way to is kept, though nobody names it.
        Raises what `check_resume` does.
        """
        self.check_resume(old, heir, leased, granted)
        before = self._of.get(old.id)
        if before is None:
            return
        session = self.session_of(heir)
        self.end_session(old, process_gone=False)
        kept = self.commits.kept_from(before, set(granted))
        table = self.store.segments
        for segment in (*table.live.values(), *table.draining.values()):
            if before.id in segment.sessions:
                segment.sessions.add(session.id)  # a process has mapped what it has mapped, whoever it is called
        self.store.resume(before, session, leased, [*granted, *(kept - set(granted))])
        self.commits.inherit(session, kept)
        self.commits.session_forgotten(before)
        del self._of[old.id]

    def check_resume(self, old: Session, heir: Session, leased: Sequence[int], granted: Sequence[int]) -> None:
        """All that `resume` raises: what `Store.resume` does, and Unavailable for what is named of a lost device.

        Nothing is changed, but that `heir` may have a session here that holds nothing.
        """
        before = self._of.get(old.id)
        if before is None and not (leased or granted):
            return
        session = self.session_of(heir)
        if before is None:
            raise FailedPrecondition(f"session {old.id} had nothing on device {self.uuid}")
        leaving.check_resume(self.store, before, session, leased, granted)

    def own(self, client: Session, refs: Sequence[int]) -> list[int]:
        """Those of these slots that are granted to this client and that no Commit has taken from it."""
        session = self._of.get(client.id)
        if session is None:
            return []
        taken = self.commits.taken_from(session)
        return [ref for ref in refs if ref in session.granted and ref not in taken]

    def held_bytes(self, client: Session) -> int:
        """Of slots that a client was granted, or holds; those in commits of its own that failed are among them."""
        session = self._of.get(client.id)
        return 0 if session is None else session.held_bytes

    def maps(self, client: Session) -> bool:
        """Whether a client was given memory that it has not said to have closed."""
        session = self._of.get(client.id)
        return session is not None and self._maps(session)

    def left(self, client: Session) -> None:
        """A client that holds nothing here says that it has closed all that it was given, and will use nothing."""
        session = self._of.get(client.id)
        if session is not None and not session.held_bytes:
            self._ask_again.pop(client.id, None)
            self._forget(client.id)

    def knows(self, pid: int, born: int) -> bool:
        """Whether a process may have work on the device: a session of its own has not ended, or it is not quiet yet."""
        return (pid, born) in self.strays.known or any(
            session.pid == pid and session.born == born for session in self._of.values()
        )

    def _maps(self, session: Session) -> bool:
        table = self.store.segments
        return any(session.id in segment.sessions for segment in (*table.live.values(), *table.draining.values()))

    def _forget(self, number: int) -> None:
        """Nothing of a client can touch the device any more."""
        session = self._of.pop(number)
        self.store.end_session(session, process_gone=True)
        self.commits.session_forgotten(session)
        self.on_quiet(number)

    def quiet(self, number: int, error: str, now: float) -> None:
        """The report of an AwaitQuiet: nothing of that process runs on the device, or it could not be found out."""
        client = self._asking.pop(number, None)
        if client is None:
            if self.strays.answered(number, error, now + RETRY_S) and not error:
                self.on_quiet(0)  # of no session
        elif error:
            self._ask_again[client] = now + RETRY_S
        else:
            self.strays.quiet(self._of[client].pid, self._of[client].born)
            self._forget(client)

    # -- writing and reading, as with memory's store; namespaces and clients are memory's

    def reserve(self, client: Session, namespace: Namespace, count: int, now: float) -> list[int]:
        """Slots of the device to write to; at least one, or ResourceExhausted says why not."""
        session = self.session_of(client)
        with self.link.named():
            return self.store.reserve(session, self.link.device_namespace(namespace), count, now)

    @property
    def room_is_coming(self) -> bool:
        """Whoever was refused a slot may get one in a moment: memory is being made or emptied, or blocks are copied
        down that may go then."""
        return self.store.room.pending or bool(self.downs.coming)

    def top_up(self, client: Session, namespace: Namespace, want: int) -> list[int]:
        """Slots ahead for the next put; none being legal."""
        session = self.session_of(client)
        return self.store.top_up(session, self.link.device_namespace(namespace), want)

    def commit(
        self,
        client: Session,
        namespace: Namespace,
        keys: Sequence[bytes],
        refs: Sequence[int],
        parents: Sequence[bytes],
        depths: Sequence[int],
        event: Any,
        now: float,
        ended: Callable[[PendingCommit], None],
        ttl_s: float = 0.0,
        conversation: str = "",
    ) -> PendingCommit:
        """Makes slots visible when `event` has come (gpu_commits.py); `ended` is told, and has the results."""
        session = self.session_of(client)
        return self.commits.commit(
            session, namespace, keys, refs, parents, depths, event, now, ended, ttl_s, conversation
        )

    def abort(self, client: Session, refs: Sequence[int]) -> None:
        """Gives granted slots back; nothing writes to them any more, also no kernel.

        Those whose event failed are among them: that its copies have ended is what their client says.
        """
        self.commits.abort(self.session_of(client), refs)

    def acquire(self, client: Session, namespace: Namespace, keys: Sequence[bytes], now: float) -> list[int]:
        """Holds the leading run that the device has; all of it, or ResourceExhausted and nothing."""
        session = self.session_of(client)
        device = self.link.side.device_of.get(namespace.id)
        if device is None:
            return []
        self._used(device.tenant, keys)
        return self.store.acquire(session, device, keys, now)

    def release(self, client: Session, refs: Sequence[int]) -> None:
        """Ends one hold for each reference named."""
        self.store.release(self.session_of(client), refs)

    def prefetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        deadline: float,
        ended: Callable[[GpuTicket], None],
        priority: int = 0,
    ) -> GpuTicket:
        """Brings the leading run to the device (gpu_tickets.py). Its owner must `tickets.close` it."""
        return self.tickets.ask(namespace, keys, deadline, ended, priority)

    # -- all tiers at once: what the device has of it

    def has(self, block: Block) -> bool:
        return self.link.device_row(block) != NONE

    def touch(self, tenant: Tenant, keys: Sequence[bytes], now: float) -> None:
        """Blocks of memory's tenant were used, on whichever tier."""
        device = self.link.side.device_tenants.get(tenant.id)
        if device is None:
            return
        self.store.touch(device, keys, now)
        self._used(device, keys)

    def _used(self, device: Tenant, keys: Sequence[bytes]) -> None:
        """What was brought ahead of use does not wait for it any more."""
        ahead, table = self.ups.ahead, self.store.table
        for key in keys if ahead else ():
            row = device.rows.get(key, NONE)
            if row != NONE:
                ahead.used((table.namespace[row], key))

    def remove(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Drops these blocks, and what is on its way to become one."""
        self.commits.remove(namespace, keys)
        device = self.link.side.device_of.get(namespace.id)
        if device is not None:
            self.store.remove(device, keys)
        self.link.settle()

    def clear_step(self, namespace: Namespace, start: int, rows_max: int) -> int | None:
        """Drops a namespace's blocks among `rows_max` rows from `start`; where to go on, None at the end."""
        if not start:
            self.commits.clear(namespace)
        device = self.link.side.device_of.get(namespace.id)
        after = None if device is None else self.store.clear_step(device, start, rows_max)
        self.link.settle()
        return after

    def bring_down(self, block: Block) -> bool:
        """Has a block copied to memory ahead of others; False where it is not going to be."""
        return not self.link.trouble and self.downs.offer(self.link.device_row(block), WANTED_PRIORITY)

    def pin(self, namespace: Namespace, keys: Sequence[bytes], ttl_s: float, now: float) -> None:
        """Keeps copies on the device from eviction."""
        device = self.link.side.device_of.get(namespace.id)
        if device is not None:
            self.store.pin(device, keys, ttl_s, now)

    def unpin(self, namespace: Namespace, keys: Sequence[bytes]) -> int:
        """Lets eviction have copies on the device again; how many were pinned."""
        device = self.link.side.device_of.get(namespace.id)
        return 0 if device is None else self.store.unpin(device, keys)

    def save_step(self, start: int, rows_max: int) -> int | None:
        """Queues to be copied down what no other tier has, among `rows_max` rows; where to go on, None at the end."""
        table = self.store.table
        stop = min(start + rows_max, len(table))
        for row in range(start, stop):
            if table.state[row] == SEALED and not self.link.trouble:
                self.downs.offer(row)
        return stop if stop < len(table) else None

    # -- time, jobs and reports

    def tick(self, now: float, low: float, rows_max: int) -> bool:
        """Deadlines, ends of lives, and what is to be copied ahead of eviction; True while there is more to do."""
        self.link.settle()
        self.tickets.expire(now)
        self.commits.expire(now)
        if self.link.trouble:
            return self.losing.step(rows_max)
        more = self.store.expire(now) | self.store.room.go_on()
        segments = self.store.segments
        if segments.none_made and now >= self._make_at:
            segments.none_made = False
            self.no_memory = ""  # until the next one cannot be made either: nobody may want one any more
        self.downs.look_ahead(low)
        return more

    def evict_step(self, high: float, low: float, blocks_max: int) -> bool:
        """As `Store.evict_step`."""
        return not self.link.trouble and self.store.evict_step(high, low, blocks_max)

    def take_jobs(self, now: float) -> list[GpuJob]:
        """Jobs for the workers since the last call, in the order in which they are to be begun."""
        self.link.settle()
        self.tickets.feed()
        if self.link.trouble:
            return []
        self.strays.ask(now)
        for client, at in list(self._ask_again.items()):
            if now >= at:
                del self._ask_again[client]
                number, session = self.link.number(), self._of[client]
                self._asking[number] = client
                self.counts.quiet_asked += 1
                self.link.jobs.append(AwaitQuiet(number, session.pid, session.born))
        self.link.schedule.run(self._begin)
        self.link.settle()
        jobs, self.link.jobs = self.link.jobs, []
        return [*self._segment_jobs(), *jobs]

    def _begin(self, kind: Kind, block: Block) -> Turn:
        return self.downs.begin(block) if kind is Kind.WRITE else self.ups.begin(block)

    def _segment_jobs(self) -> list[GpuJob]:
        """Those that free memory first; what somebody may have mapped is not freed yet."""
        makes: list[GpuJob] = []
        for job in self.store.take_jobs():
            if isinstance(job, DropSegment):
                self._drops[job.segment] = job
            else:
                makes.append(job)
        ready = [number for number in self._drops if number not in self.store.segments.draining]
        return [*(self._drops.pop(number) for number in ready), *makes]

    def made(self, segment: int, error: str, now: float) -> bool:
        """The report of a MakeSegment; False where nobody wants it any more, and its memory is to be freed."""
        segments = self.store.segments
        if segment not in segments.making:
            return False  # given up with the device
        segments.none_made = bool(error)
        self.no_memory = error
        if error:
            self._make_at = now + RETRY_S
            self.counts.out_of_memory += 1
            segments.failed(segment)
        else:
            segments.made(segment)
        return True

    def copied(self, job: CopyUp | CopyDown, error: str, now: float) -> None:
        """The report of a copy."""
        self.link.settle()
        if self.losing.ended_late(job.number):
            return
        if isinstance(job, CopyUp):
            self.ups.copied(job.number, error, now)
        else:
            self.downs.copied(job.number, error, now)

    def event_ended(self, number: int, error: str, now: float) -> None:
        """The report of a WatchEvent: the event is complete, or `error`."""
        self.link.settle()
        self.commits.event_ended(number, error, now)

    # -- a device that goes and comes

    def lose(self, why: str) -> list[int]:
        """The device is gone: everybody who waits is answered; sessions of memory's store that are to be told.

        `on_quiet` is not called for them; but their kernels may run on where the device hung for this daemon alone, so
        their processes are `strays` until it is back and quiet. `tick` drops its blocks in steps, until `losing.over`.
        """
        if self.link.trouble:
            return []
        told = list(self._of)
        self.link.settle()
        self.losing.begin(why, list(self._of.values()))
        asked = {*self._ask_again, *self._asking.values()}
        self.strays.lost((session, client in asked) for client, session in self._of.items())
        self._of.clear()
        self._asking.clear()
        self._ask_again.clear()
        self._drops.clear()
        self.no_memory, self.store.segments.none_made = "", False
        return told

    def come(self) -> None:
        """The device is there again, and empty. After `losing.over`."""
        assert self.losing.over, "a device comes back that still has blocks"
        self.link.trouble = ""
        self.generation += 1

    @property
    def under_way(self) -> bool:
        """Jobs that hold slots have not been reported."""
        return bool(self.ups.under_way or self.downs.under_way or self.losing.left_behind)

    # -- what goes, while a store drops it

    def _left_device(self, key: bytes, row: int) -> None:
        block = self.link.block_at(row)
        if self.store.counts.evicted != self._evicted:  # it counts an eviction right before the block goes
            self._evicted = self.store.counts.evicted
            self.counts.evicted_only += self.link.only_here(block)
        self.downs.left_device(block)
        self.ups.ahead.left_memory((self.store.table.namespace[row], key))

    def _left_host(self, key: bytes, row: int) -> None:
        self.ups.left_host((self.link.memory.table.namespace[row], key))
