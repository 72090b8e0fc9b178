"""A client that has the contract and the session socket alone, for tests of the tier below memory."""

import mmap
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from kvstored.v1 import PROTOCOL
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block
from tests.wire import Wire

BLOCK = 64 << 10
AT_ONCE = 8
"""Blocks put together."""


def keys_of(name: str, count: int) -> list[bytes]:
    """A chain's."""
    return [block((name, i), 32) for i in range(count)]


class Program:
    """One session, one namespace; a block's bytes follow from its key."""

    def __init__(self, daemon: RunningDaemon, namespace: str = "ns") -> None:
        self.wire = Wire(daemon.socket, hello=False)
        hello = pb.HelloRequest(protocol=PROTOCOL, client="wire")
        self.token = self.wire.call(hello=hello).hello.token
        self.maps: dict[int, mmap.mmap] = {}
        opened = self.wire.call(
            open_namespace=pb.OpenNamespaceRequest(digest=block(namespace, 32), block_bytes=BLOCK, label=namespace)
        ).open_namespace
        self.number, self.slot_bytes = opened.namespace_id, opened.slot_bytes

    def memory(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        segment, number = slot >> 32, slot & 0xFFFFFFFF
        if segment not in self.maps:
            (found,) = self.wire.call(segments=pb.SegmentsRequest(ids=[segment])).segments.segments
            self.maps[segment] = mmap.mmap(self.wire.descriptors[-1], found.size_bytes)
        at = number * self.slot_bytes
        return memoryview(self.maps[segment])[at : at + BLOCK]

    # -- putting

    def put(self, keys: Sequence[bytes], *, durable: bool = True) -> list[pb.CommitReply]:
        """Stores a chain, a few blocks at a time; each is on the SSD before the next comes, if `durable`."""
        replies = []
        for at in range(0, len(keys), AT_ONCE):
            replies.append(self.commit(keys, range(at, min(at + AT_ONCE, len(keys))), durable=durable))
            if durable:
                self.ended(replies[-1])
        return replies

    def commit(self, keys: Sequence[bytes], part: range, *, durable: bool = False) -> pb.CommitReply:
        slots: list[int] = []
        while len(slots) < len(part):
            want = pb.ReserveRequest(namespace_id=self.number, count=len(part) - len(slots))
            slots += self.wire.call(reserve=want).reserve.slots
        for i, slot in zip(part, slots, strict=True):
            self.memory(slot)[:] = block(keys[i], BLOCK)
        request = pb.CommitRequest(
            namespace_id=self.number,
            keys=[keys[i] for i in part],
            slots=slots,
            parents=[keys[i - 1] if i else b"" for i in part],
            depths=list(part),
            durable=durable,
        )
        reply = self.wire.call(commit=request).commit
        unused = [slot for slot, result in zip(slots, reply.results, strict=True) if result != pb.STORED]
        if unused:
            self.wire.call(abort=pb.AbortRequest(slots=unused))
        return reply

    def save(self, keys: Sequence[bytes]) -> pb.CommitReply:
        """Has blocks that are there made durable."""
        return self.wire.call(commit=pb.CommitRequest(namespace_id=self.number, keys=keys, durable=True)).commit

    def ended(self, reply: pb.CommitReply) -> None:
        """Waits until a durable commit is on the SSD."""
        assert not reply.not_durable, reply.not_durable
        if reply.ticket:
            found = eventually(lambda: self.ended_ticket(reply.ticket), what="a durable commit")
            assert (found.state, found.why) == (pb.TICKET_DONE, "")

    # -- tickets

    def ticket(self, number: int, wait_ms: int = 1000, *, cancel: bool = False) -> pb.TicketReply:
        return self.wire.call(ticket=pb.TicketRequest(ticket=number, wait_ms=wait_ms, cancel=cancel)).ticket

    def ended_ticket(self, number: int) -> pb.TicketReply | None:
        """Its end; None where that has not come within a call's time."""
        found = self.ticket(number)
        return found if found.state != pb.TICKET_RUNNING else None

    def prefetch(self, keys: Sequence[bytes], deadline_ms: int = 30_000) -> pb.PrefetchReply:
        request = pb.PrefetchRequest(namespace_id=self.number, keys=keys, deadline_ms=deadline_ms)
        return self.wire.call(prefetch=request).prefetch

    # -- reading

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The tier of each block of the leading run."""
        return list(self.wire.call(match=pb.MatchRequest(namespace_id=self.number, keys=keys)).match.tiers)

    def ask(self, keys: Sequence[bytes], wait_ms: int = 1000, deadline_ms: int = 30_000) -> pb.LoadReply:
        """A Load's first message."""
        return self.wire.call(load=self.load_request(keys, wait_ms, deadline_ms)).load

    def load_request(self, keys: Sequence[bytes], wait_ms: int = 1000, deadline_ms: int = 30_000) -> pb.LoadRequest:
        return pb.LoadRequest(namespace_id=self.number, keys=keys, wait_ms=wait_ms, deadline_ms=deadline_ms)

    def again(self, number: int, wait_ms: int = 0) -> pb.LoadReply:
        """Asks again: once, where it is said how long that waits, else until the answer is final."""
        if wait_ms:
            return self.wire.call(load=pb.LoadRequest(ticket=number, wait_ms=wait_ms)).load

        def final() -> pb.LoadReply | None:
            reply = self.wire.call(load=pb.LoadRequest(ticket=number, wait_ms=1000)).load
            return None if reply.ticket else reply

        found: pb.LoadReply = eventually(final, what="the end of a load")
        return found

    def load(self, keys: Sequence[bytes]) -> pb.LoadReply:
        """Asks until the answer is final."""
        reply = self.ask(keys)
        while reply.ticket:
            reply = self.again(reply.ticket)
        return reply

    def check(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Every byte is the key's own."""
        for key, slot in zip(keys, slots, strict=False):
            assert bytes(self.memory(slot)) == block(key, BLOCK), f"bytes of another block under {key.hex()[:12]}"

    def release(self, slots: Sequence[int]) -> None:
        self.wire.call(release=pb.ReleaseRequest(slots=slots))

    def release_all(self) -> None:
        self.wire.call(release=pb.ReleaseRequest(all=True))
        self.wire.call(abort=pb.AbortRequest(all=True))

    # -- the daemon

    def stats(self) -> pb.StatsReply:
        return self.wire.call(stats=pb.StatsRequest()).stats

    def leased(self) -> int:
        return sum(pool.leased for pool in self.stats().pools)

    def fill_memory(self, name: str) -> None:
        """Stores so much else that what was there before is evicted from memory."""
        self.put(keys_of(name, 80))

    def close(self) -> None:
        self.wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def row_of(stats: Any, operation: int, tier: int) -> Any:
    """One row of the operations; None where there is none."""
    found = [row for row in stats.operations if (row.operation, row.tier) == (operation, tier)]
    return found[0] if found else None


def nothing_held(daemon: RunningDaemon) -> None:
    """What loads and sessions held is given back, and no ticket is left."""
    with Program(daemon, "watch") as watch:

        def free() -> bool:
            stats = watch.stats()
            pools = stats.pools
            held = sum(pool.leased + pool.granted + pool.quarantined + pool.doomed for pool in pools)
            open_ = sum(session.client == "wire" and not session.ended for session in stats.sessions)
            seen.append(f"{held} slots held, {stats.ssd.tickets} tickets, {open_} sessions")
            return not held and not stats.ssd.tickets and open_ == 1

        seen: list[str] = []
        try:
            eventually(free, what="everything to be given back")
        except AssertionError as e:
            raise AssertionError(f"{e}: {seen[-1]}") from None
