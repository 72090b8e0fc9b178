"""Memory that outlives the daemon: what an earlier one left is adopted, or let go of.

    open    takes the place and reads what is there, when the daemon that wrote it is gone for good
    adopt   its segments are the slab's, its blocks and holds the store's; from then on it is written down again
    leave   at the end: the last uses

A free lock or port is no proof that the daemon before is gone: its threads may still write to a
slot, and its clients still read by its index. Its process is (pid and start). Where that cannot
be told (another machine, boot, or namespace of processes), and where anything else does not fit,
the start is a clean one with new memory, which is always safe: who has the old one keeps his own.
"""

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from kvstore import machine
from kvstore.config import Host, Settings
from kvstore.config.values import format_size
from kvstore.core.adopt import Adopted, Adoption, SessionFound, record, write_uses
from kvstore.core.block import NONE, SEALED
from kvstore.core.movement import Movement
from kvstore.core.segments import HUGE_PAGE_BYTES, PAGE_BYTES, MakeSegment
from kvstore.core.store import Store
from kvstore.errors import ConfigError, StartupError
from kvstore.instance import describe_process, start_ticks
from kvstore.logs import logger
from kvstore.mending import Mending
from kvstore.sdnotify import Notifier
from kvstore.server import peer
from kvstore.server.listener import SessionServer
from kvstore.server.peer import Peer
from kvstore.tiers import ledger as layout
from kvstore.tiers.index import Indexes
from kvstore.tiers.ledger import Ledger
from kvstore.tiers.ledger_reader import Header, Left, Unusable, namespaces_end, read, read_header, rows_name
from kvstore.tiers.place import DescriptorStore, Directory, Lasting
from kvstore.tiers.slab import Slab, SlabSegment, segment_name
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import KVStoreError

log = logger("kvstored.warm")

LEDGER = "ledger"
BEFORE_GONE_S = 20.0
"""The daemon before this one has this long to be gone; the end of a process takes some 10 ms a GiB of memory."""

OFFER_ROWS = 1024
USES_S, USES_ROWS = 1.0, 4096
"""How often last uses are written down, and how many in a turn (4 ms): what a SIGKILL forgets of them."""


def choose_pages(host: Host, left: Mapping[str, int], *, proc: Path = machine.PROC) -> bool:
    """Whether the slab is to be made of huge pages. `left`: what systemd has kept. Raises StartupError."""
    if not host.huge_pages_on:
        return False
    if host.persist_path is not None:
        raise ConfigError(
            f"host.huge_pages: files of host.persist = {host.persist_path} have no huge pages; set "
            'host.huge_pages = "off", or host.persist = "fdstore"'
        )
    found = [os.fstat(descriptor) for name, descriptor in left.items() if name.startswith(segment_name(0)[:-1])]
    # Pages of an earlier daemon's are not free, and are this one's: adopted, or given back before others are made.
    kept_bytes = sum(segment.st_size for segment in found if segment.st_blksize == HUGE_PAGE_BYTES)
    try:
        machine.check_huge_pages(max(host.size_bytes - kept_bytes, 0), proc=proc)
    except StartupError as e:
        if host.huge_pages == "on":
            raise
        log.warning("the slab uses 4 KiB pages", reason=str(e))
        return False
    return True


def place_for(settings: Settings, notifier: Notifier, left: Mapping[str, int]) -> Lasting | None:
    """Where memory outlives the daemon; None where it does not. Raises StartupError."""
    host = settings.host
    if host.persist == "fdstore":
        if not notifier.keeps:
            log.warning(
                "memory ends with this process", reason="host.persist is fdstore, and this is no service of systemd"
            )
        return DescriptorStore(notifier, left)
    store = DescriptorStore(notifier, left)  # of a time when that was set: it would be kept for nothing
    for name, descriptor in store.found().items():
        os.close(descriptor)
        store.remove(name)
    if host.persist_path is None:
        return None
    return Directory(host.persist_path)


class Warm:
    """One place, and the ledger in it."""

    def __init__(self, place: Lasting, size_bytes: int, *, huge_pages: bool, devices: bool = False) -> None:
        """`devices`: the daemon has memory of devices, and so may the one before it have had."""
        self.place = place
        self.adopted: Adopted | None = None
        self._size_bytes = size_bytes
        self._devices = devices
        self._page_bytes = HUGE_PAGE_BYTES if huge_pages else PAGE_BYTES
        self._world = _world()
        self._pid = os.getpid()
        self._born = start_ticks(self._pid) or 0
        self._memory: dict[str, int] = {}
        """Descriptors of what was found, by name, until it is adopted."""
        self._left: Left | None = None
        self._cold = "no daemon before this one has left anything"
        self._adopted_s = 0.0
        self._adopted_segments = self._lost_segments = 0
        self._mending: Mending | None = None
        self._holders: dict[int, Peer] = {}
        """Processes of earlier sessions, by the place where they are written down."""
        self._store: Store | None = None
        self._settling: asyncio.Task[None] | None = None
        self._through: Movement | None = None
        self._row = 0
        """The next one to be offered to it."""
        self._to_settle: list[int] = []
        """Segments that serve and whose page tables are not all there."""
        self.ledger: Ledger

    @property
    def found_bytes(self) -> int:
        """Memory that is there already."""
        return 0 if self._left is None else sum(segment.size_bytes for segment in self._left.found.segments)

    # -- open

    async def open(self) -> None:
        """Reads what is there. Raises StartupError where the daemon before this one does not go."""
        self._memory = self.place.found()
        try:
            if self._memory:
                await self._read()
        except Unusable as e:
            log.warning("what an earlier daemon left in memory is not used", reason=str(e))
            self._left, self._cold = None, str(e)
            self._let_go(set(self._memory) | {LEDGER})
        try:
            if self._left is None:
                self.place.check_room(self._size_bytes + layout.room_bytes(self._size_bytes))
                self.ledger = self._ledger(self.place.make(LEDGER, layout.LEDGER_BYTES))
                self.ledger.begin(self._size_bytes, self._page_bytes, self._pid, self._born, self._world)
            else:
                self._take_over(self._left)
        except OSError as e:
            raise StartupError(f"host.persist: no memory for the ledger: {e}") from e
        if self._left is not None:
            # And no more: what is there serves, even if nothing further can be written down.
            self.place.check_room(self._size_bytes - self.found_bytes)

    async def _read(self) -> None:
        if LEDGER not in self._memory:
            raise Unusable("it has no ledger")
        header = read_header(self._memory[LEDGER])
        self._check(header)
        await self._wait_until_gone(header)
        made_to = namespaces_end(self._memory[LEDGER])
        self.ledger = self._ledger(self._memory.pop(LEDGER))
        self._left = read(self.ledger, self._memory, header.last_segment, made_to)
        self._say_lost(self._left)

    def _say_lost(self, left: Left) -> None:
        self._lost_segments = len(left.lost)
        if left.lost:
            log.warning(
                "memory that an earlier daemon wrote down is not there, or not the same: what was in it is lost",
                segments=len(left.lost),
            )

    def _ledger(self, descriptor: int) -> Ledger:
        made = Ledger(descriptor)
        made.rows_for = lambda number, size_bytes: self.place.make(rows_name(number), layout.rows_bytes(size_bytes))
        made.rows_gone = lambda number: self.place.remove(rows_name(number))
        return made

    def _check(self, header: Header) -> None:
        if header.world != self._world:
            raise Unusable("it is of another boot, or of another namespace of processes: who uses it cannot be told")
        if header.size_bytes != self._size_bytes:
            raise Unusable(f"host.size was {format_size(header.size_bytes)} and is {format_size(self._size_bytes)} now")
        if header.page_bytes != self._page_bytes:
            raise Unusable("host.huge_pages has changed")

    async def _wait_until_gone(self, header: Header) -> None:
        """All threads of the daemon before this one, that is, and its sockets with them."""
        before = None if header.pid == self._pid else peer.process(header.pid, header.born)
        if before is None:
            return
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(before.pidfd, gone.set)
        try:
            await asyncio.wait_for(gone.wait(), BEFORE_GONE_S)
        except TimeoutError:
            raise StartupError(
                f"host.persist: {describe_process(header.pid)} still has its memory: stop it, and start again when it "
                "is gone"
            ) from None
        finally:
            loop.remove_reader(before.pidfd)
            before.close()

    def _take_over(self, left: Left) -> None:
        self.ledger.take_over(self._pid, self._born, len(left.found.namespaces))
        alive: list[SessionFound] = []
        for session in left.found.sessions:
            process = peer.process(session.pid, session.born)
            if process is None and self._devices and session.granted:  # a device may be writing there still
                process = Peer(session.pid, -1, -1, "it is gone")
            if process is None:
                self.ledger.strike_session(session.place)
            else:
                self._holders[session.place] = process
                alive.append(session)
        left.found.sessions = alive
        used = {name for number in left.rows for name in (segment_name(number), rows_name(number))}
        self._let_go(set(self._memory) - used)

    def _let_go(self, names: set[str]) -> None:
        for name in names:
            descriptor = self._memory.pop(name, -1)
            if descriptor >= 0:
                os.close(descriptor)
            self.place.remove(name)

    # -- adopt

    async def adopt(self, store: Store, slab: Slab, indexes: Indexes, progress: Callable[[int, int], None]) -> None:
        """Fills the store and the slab, and makes what memory is missing.

        Raises OSError where there is no memory, and StartupError where what was left contradicts
        itself: then the next start is a clean one.
        """
        slab.added, slab.dropping = self._added, self.ledger.dropping
        left, sizes = self._left, {}
        if left is not None:
            began = time.monotonic()
            try:
                await asyncio.get_running_loop().run_in_executor(None, self._fill, store, indexes, left)
            except (KVStoreError, AssertionError, LookupError) as e:
                self.ledger.numbers[0] = 0
                raise StartupError(
                    f"what an earlier daemon left in memory contradicts itself ({e}): the next start does without it"
                ) from e
            sizes = {s.id: s.size_bytes for s in left.found.segments if s.id in store.segments.live}
            self._adopted_s, self._adopted_segments, self._cold = time.monotonic() - began, len(sizes), ""
            self._say()
        new = {job.segment: job.size_bytes for job in store.take_jobs() if isinstance(job, MakeSegment)}
        memory = {number: self._memory.pop(segment_name(number)) for number in sizes}
        await asyncio.get_running_loop().run_in_executor(None, slab.make_all, {**sizes, **new}, progress, memory)
        self._forget_descriptors()
        self._to_settle = list(sizes)
        for number in new:
            store.segments.made(number)
        record(store, self.ledger)
        self._store, self._left = store, None
        self._mending = Mending(store, self.ledger)

    def _fill(self, store: Store, indexes: Indexes, left: Left) -> None:
        """In a thread, while nobody else has the store: a million blocks take some seconds."""
        store.segments.take_back()
        adoption = Adoption(store, left.found, time.monotonic())
        adoption.begin()
        for tenant, blocks in left.blocks_of().items():
            indexes.expect(tenant, blocks)
        for segment in left.found.segments:
            if segment.id in store.segments.live:
                rows = left.rows[segment.id]
                self.ledger.adopted(segment.id, rows, left.slots[segment.id])
        adoption.blocks(left.blocks())
        adoption.sessions()
        self.adopted = done = adoption.end()
        store.check()
        for ref in done.refused:
            self.ledger.gone(ref)
        for number in done.without:
            self.ledger.strike_segment(left.rows[number].place)
            self._let_go({segment_name(number), rows_name(number)})
        for found, session in done.sessions:
            self.ledger.kept(session, found.place)

    def _say(self) -> None:
        assert self.adopted is not None
        log.info(
            "memory of an earlier daemon adopted",
            blocks=self.adopted.blocks,
            dropped=len(self.adopted.refused),
            segments=self._adopted_segments,
            sessions=len(self.adopted.sessions),
            seconds=round(self._adopted_s, 3),
        )

    def _forget_descriptors(self) -> None:
        """Of rows: they are mapped."""
        for descriptor in self._memory.values():
            os.close(descriptor)
        self._memory.clear()

    def _added(self, segment: SlabSegment) -> None:
        if segment.id not in self.ledger.segments:
            inode = os.fstat(segment.descriptor).st_ino
            self.ledger.made(segment.id, segment.mapping.size_bytes, inode)

    def watch(self, sessions: SessionServer, slab: Slab, movement: Movement | None) -> None:
        """The sessions of before are known, and end with their processes; the slab settles while it serves."""
        if self.adopted is None:
            return
        if movement is not None and movement.writes.policy == "through":
            self._through = movement
        self._settling = asyncio.get_running_loop().create_task(self._settle(slab), name="settle")
        for found, session in self.adopted.sessions:
            names = {found.nonce, found.nonce_before} - {0} if session.id in self.adopted.whole else set()
            sessions.leave(session, self._holders.pop(found.place), names)

    async def _settle(self, slab: Slab) -> None:
        """Makes page tables of what was adopted, and locks it: 0.3 s a GiB."""
        for number in self._to_settle:
            segment = slab.settling(number)
            if segment is None:
                continue
            try:
                await asyncio.get_running_loop().run_in_executor(None, slab.settle, segment)
            except OSError as e:
                log.warning("page tables are made at first touch instead", segment=number, reason=str(e))
            finally:
                slab.settled(segment)
        if self._to_settle and slab.lock_error:
            log.warning("the slab is not locked in memory and may be swapped out", reason=slab.lock_error)
        self._to_settle = []

    def witness(self, pid: int, uid: int) -> tuple[int, str]:
        """When a process began, and why it must not write."""
        born = start_ticks(pid) if pid > 0 else None
        if born is None:
            return 0, "memory outlives the daemon (host.persist), and the next one could not tell whether you are gone"
        if isinstance(self.place, Directory) and uid != os.geteuid():
            return (
                0,
                "files of a tmpfs directory (host.persist) cannot be sealed: they are for the daemon's own user alone",
            )
        return born, ""

    # -- while it runs

    def step(self) -> bool:
        """One turn of the daemon's loop; True if there is more."""
        self.place.tidy()
        if self._store is None or self._mending is None:
            return False
        more = self._offer(self._through) if self._through is not None and self._through.ready else False
        more = self._mending.step() or more
        return write_uses(self._store, USES_ROWS) or more

    @property
    def trouble(self) -> str:
        """Why not all that changes now would be there for the next daemon; "": all would."""
        return self.place.trouble or self.ledger.trouble

    def degraded(self) -> list[str]:
        trouble = self.trouble
        return [f"memory would not outlive the daemon as it should: {trouble}"] if trouble else []

    def stats(self) -> pb.PersistStats:
        adopted, unwritten = self.adopted or Adopted(), self.ledger.unwritten
        return pb.PersistStats(
            kind=self.place.kind,
            path=str(self.place.path),
            trouble=self.trouble,
            unwritten_segments=len(unwritten),
            unwritten_bytes=sum(size_bytes for size_bytes, _ in unwritten.values()),
            free_bytes=self.place.free_bytes or 0,
            cold=self._cold,
            adopted_blocks=adopted.blocks,
            refused_blocks=len(adopted.refused),
            adopted_segments=self._adopted_segments,
            lost_segments=self._lost_segments,
            adopted_sessions=len(adopted.sessions),
            adopted_s=self._adopted_s,
        )

    def _offer(self, movement: Movement) -> bool:
        """Adopted blocks that an SSD written through has not got: a daemon that was killed had not come to them."""
        table, link = movement.link.memory.table, movement.link
        stop = min(self._row + OFFER_ROWS, len(table))
        while self._row < stop:
            key = table.key[self._row]
            if key is not None and table.state[self._row] == SEALED:
                block = table.namespace[self._row], key
                if link.disk_row(block) == NONE:
                    if not movement.writes.would_fit(block):
                        return False  # the next turn goes on
                    movement.writes.offer(block)
            self._row += 1
        if self._row < len(table):
            return True
        self._through = None
        return False

    async def close(self) -> None:
        """Writes down the last uses. The memory stays."""
        self._through = None
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.gather(self._settling, return_exceptions=True)
        while self.step():
            pass
        if self._store is not None:
            record(self._store, None)
        self.place.close()


def _world() -> bytes:
    """In which a pid and a start mean a process: a boot, and the namespaces of processes and of their clocks."""
    words = [Path("/proc/sys/kernel/random/boot_id").read_text()]
    for name in ("pid", "time"):
        with suppress(FileNotFoundError):
            words.append(str(Path(f"/proc/self/ns/{name}").readlink()))
    return hashlib.blake2b("\0".join(words).encode(), digest_size=16).digest()
