"""What it gains to write idle conversations to the SSD ahead of time: `python -m bench.offload`.

A trace of real requests runs through the daemon's own decisions (kvstore/core: both stores, the
movement between them, its scheduler) with a clock of its own and a disk that is a number: so many
blocks a second, no bytes. Memory is small against the trace, so that blocks leave it; one that
leaves before it was written is lost, and its conversation has to be computed again.

Three ways to write: everything at once (`through`), what is about to be evicted (`evict`), and
the latter with idle conversations written ahead. What counts is how many of the blocks that
requests ask for are found, and how many blocks the SSD has to write for that.
"""

import json
import lzma
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from kvstore.core.idle import IdleConversations
from kvstore.core.movement import Movement
from kvstore.core.moves import ForgetRecords, Move, WriteBlock
from kvstore.core.schedule import Kind
from kvstore.core.segments import PAGE_BYTES, MakeSegment
from kvstore.core.store import Store
from kvstore.core.tiered import Joined
from kvstore.core.tree import Numbers
from kvstored.v1.errors import ResourceExhausted

TRACE = Path(__file__).parent / "traces" / "mooncake_conversation.jsonl.xz"
SSD_BLOCKS = 200_000
CASES = [(30_000, 30.0), (30_000, 100.0)]
TICK_S = 0.1
HIGH, LOW, STEP = 0.95, 0.90, 128


class Request(NamedTuple):
    """One line of the trace, with the conversation it belongs to."""

    at: float
    keys: list[bytes]
    tokens: int
    conversation: int


def requests() -> Iterator[Request]:
    """The trace in order."""
    owner: dict[int, int] = {}
    ends: dict[int, list[int]] = {}
    names: dict[int, bytes] = {}
    with lzma.open(TRACE, "rt") as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            ids: list[int] = row["hash_ids"]
            last = next((i for i in reversed(ids) if i in owner), None)
            conversation = owner[last] if last is not None and last in ends[owner[last]] else number
            for i in ids:
                owner.setdefault(i, conversation)
                names.setdefault(i, blake2b(b"%d" % i, digest_size=32).digest())
            ends[conversation] = ids[-2:]
            yield Request(row["timestamp"] / 1000, [names[i] for i in ids], row["output_length"], conversation)


class Nothing:
    """An index that nobody reads."""

    def publish(
        self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int, flags: int = 0
    ) -> None: ...
    def fill(
        self, tenant: int, keys: list[bytes], refs: Numbers, offsets: Numbers, lengths: Numbers, namespaces: Numbers
    ) -> None: ...
    def withdraw(self, tenant: int, key: bytes) -> None: ...
    def move(self, tenant: int, key: bytes, ref: int, offset: int, length: int, namespace: int, flags: int) -> None: ...
    def flag(self, tenant: int, key: bytes, flags: int) -> None: ...
    def set_below(self, out: bool) -> None: ...


class NeverIdle(IdleConversations):
    """Nothing is written ahead."""

    def is_idle(self, number: int, now: float) -> bool:
        return False


class Run:
    """One way to write, over the whole trace."""

    def __init__(self, policy: str, memory_blocks: int, *, ahead: bool, blocks_a_second: float) -> None:
        joined = Joined(Nothing())
        self.memory = Store(memory_blocks * PAGE_BYTES, joined.host)
        self.disk = Store(SSD_BLOCKS * PAGE_BYTES, joined.ssd, lazily=True)
        queue = dict.fromkeys(Kind, memory_blocks * PAGE_BYTES)
        self.moving = Movement(self.memory, self.disk, joined, pid=1, policy=policy, queue_bytes=queue)
        self.moving.ready = True
        if not ahead:
            self.moving.idle = NeverIdle()
        for job in self.memory.take_jobs():
            if isinstance(job, MakeSegment):
                self.memory.segments.made(job.segment)
        self.ns = self.memory.open_namespace(self.memory.tenant("trace"), bytes(32), PAGE_BYTES, "trace")
        self.session = self.memory.open_session(
            self.ns.tenant, "engine", 0.0, local=True, read_only=False, pid=2, nonce=2
        )
        self.rate = blocks_a_second
        self.now = 0.0
        self.writes: deque[WriteBlock] = deque()
        self.credit = 0.0
        self.asked = self.in_memory = self.on_ssd = 0

    def go(self, until: float) -> None:
        """Time passes: the daemon's loops turn, the disk writes."""
        while self.now < until:
            self.now = min(self.now + TICK_S, until)
            self.moving.tick(self.now, LOW)
            while self.memory.evict_step(HIGH, LOW, STEP):
                pass
            self.credit = min(self.credit + self.rate * TICK_S, self.rate)
            self.work()

    def work(self) -> None:
        """What the disk does with what it is given, as fast as it can."""
        while True:
            moves: list[Move] = self.moving.take_moves(self.now)
            for move in moves:
                if isinstance(move, WriteBlock):
                    self.writes.append(move)
                elif isinstance(move, MakeSegment):
                    self.moving.made(move.segment, "")
                elif isinstance(move, ForgetRecords):
                    self.moving.forgotten(move.number, "")
            ended = 0
            while self.writes and self.credit >= 1:
                self.credit -= 1
                ended += 1
                self.moving.wrote(self.writes.popleft().number, 0, "", self.now)
            if not moves and not ended:
                return

    def serve(self, request: Request) -> None:
        """A request: what is there is used, what is not is computed and stored."""
        name = f"{request.conversation}"
        run = self.moving.match(self.ns, request.keys)
        self.asked += len(request.keys)
        self.in_memory += sum(run)
        self.on_ssd += len(run) - sum(run)
        self.moving.served("trace", name, request.tokens, self.now)
        self.memory.touch(self.ns.tenant, request.keys[: len(run)], self.now, name)
        self.moving.touch(self.ns.tenant, request.keys[: len(run)], self.now)
        here = [place for place, key in enumerate(request.keys) if key not in self.ns.tenant.rows]
        for place in here:  # also what the SSD had: it is brought back
            try:
                refs = self.memory.reserve(self.session, self.ns, 1, self.now)
            except ResourceExhausted:
                return
            parent = request.keys[place - 1] if place else b""
            key = request.keys[place]
            self.memory.commit(self.session, self.ns, [key], refs, [parent], [place], self.now, conversation=name)


def measure(policy: str, memory_blocks: int, *, ahead: bool, blocks_a_second: float) -> Run:
    """Runs the trace."""
    run = Run(policy, memory_blocks, ahead=ahead, blocks_a_second=blocks_a_second)
    for request in requests():
        run.go(request.at)
        run.serve(request)
    return run


def main() -> None:
    table = Table(title=f"{SSD_BLOCKS} blocks on the SSD; one hour, 12,031 requests")
    columns = ("memory, blocks", "SSD, blocks a second", "written", "found in memory", "on the SSD", "both", "writes")
    for column in columns:
        table.add_column(column, justify="left" if column == "written" else "right")
    console = Console(width=120)
    for memory_blocks, rate in CASES:
        for policy, ahead in (("through", False), ("evict", False), ("evict", True)):
            with console.status(f"{memory_blocks} blocks of memory, {rate:.0f} a second, {policy}"):
                run = measure(policy, memory_blocks, ahead=ahead, blocks_a_second=rate)
            found = run.in_memory + run.on_ssd
            table.add_row(
                f"{memory_blocks}",
                f"{rate:.0f}",
                policy + (", idle ones ahead" if ahead else ""),
                f"{run.in_memory / run.asked:.4f}",
                f"{run.on_ssd / run.asked:.4f}",
                f"{found / run.asked:.4f}",
                f"{run.moving.counts.written}",
            )
    console.print(table)


if __name__ == "__main__":
    main()
