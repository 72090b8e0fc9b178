"""The way to a daemon by gRPC: the same calls as on its own machine, with the blocks' bytes streamed.

    match    Match
    put      one Put stream for each part; the daemon ends one early whose rest it has
    get      one Get stream for each part; a block counts when its checksum is right
    acquire  the same into private memory: nothing is held in the daemon

A namespace is opened at first use, and opened again when the daemon says that it does not
know it (any more). No thread of ours: what was read is told once a second, ahead of
whatever call comes then.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from kvstore_client import stats
from kvstore_client.buffers import Bytes
from kvstore_client.channel import Channel, Trust
from kvstore_client.lease import Lease, Slots
from kvstore_client.numbers import Numbers
from kvstore_client.reads import HOST, Reads
from kvstore_client.removals import LASTING_S, Removals
from kvstore_client.results import TIER_NAMES, Copied, Health, Hint, Match, PutResult
from kvstore_client.tickets import LEFT_AGAIN, STATES, Ticket, not_durable
from kvstore_client.transport import Identity
from kvstored.v1 import KEYS_MAX, chunks
from kvstored.v1 import kvstore_pb2 as pb
from kvstored.v1.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KVStoreError,
    ResourceExhausted,
    Unavailable,
)

log = logging.getLogger("kvstore_client")

LONG_CALL_S = 30.0
"""Deadline of clear and stats, which may take a busy daemon long."""

STREAM_BYTES_PER_S = 32 << 20
"""A stream may take `timeout_s` and the time of its bytes at this rate, a third of a 1 Gbit/s link."""

PART_BYTES = 256 << 20
"""Bytes of one stream; a larger put or get is several, so that what fails late does not undo what was done."""

TICKET_WAIT_S = 0.5
"""How long one question waits for the end of a prefetch."""

ANSWER_SHARE = 0.25
"""Of the time-out: the daemon has at least that long to answer, also when a prefetch's deadline is near."""

DURABLE_S = 35.0
"""How much longer a durable put may take: the daemon waits 30 s for its disk, and then says that it did."""

TOUCH_EVERY_S = 1.0
TOUCH_TIMEOUT_S = 0.5

T = TypeVar("T")

TIERS = tuple(str(tier) for tier in TIER_NAMES)
BUSY_DIGITS_MAX = 9
"""As metadata spell them."""

Take = Callable[[int, int, memoryview], None]
"""Takes bytes: of which block, from where in it, and the bytes."""


@dataclass(frozen=True)
class Opened:
    """A namespace as one life of the daemon numbers it."""

    number: int
    epoch: str


class GrpcTransport:
    """One daemon. Reads miss and puts are rejected while it is away; management raises Unavailable."""

    def __init__(
        self, scheme: str, rest: str, client: str, tenant: str, timeout_s: float, read_only: bool, trust: Trust
    ) -> None:
        """Says Health once; a daemon that is away is no error here (it may come), another version is."""
        self._timeout_s = timeout_s
        self._read_only = read_only
        self._namespaces: Numbers[Opened] = Numbers()
        self._epoch = ""
        """The life of the daemon that answered last."""
        self.reads = Reads(TOUCH_EVERY_S)
        self._removals = Removals()
        self._channel = Channel(scheme, rest, client, tenant, trust)
        try:
            self._call("Health", pb.HealthRequest())
        except (Unavailable, DeadlineExceeded) as e:
            log.debug("%s is not there yet: %s", self._channel.endpoint, e)
        except BaseException:
            self._channel.close()
            raise

    pools = None
    """Memory of devices is for processes of the daemon's machine."""

    def device_state(self) -> dict[str, Any]:
        return {}

    def _call(self, name: str, request: Any, timeout_s: float = 0.0, epoch: str = "") -> Any:
        return self._channel.call(name, request, timeout_s or self._timeout_s, epoch)

    # -- namespaces

    @property
    def connected(self) -> bool:
        """Not known without a call; a call that is in vain comes back in time."""
        return True

    def open(self, ns: Identity, ahead: bool) -> None:
        """Opens a namespace ahead of use, if the daemon is there."""
        if not ahead:
            return
        try:
            self._opened(ns)
        except (Unavailable, DeadlineExceeded) as e:
            log.debug("opened at first use: %s", e)
        except ResourceExhausted as e:
            log.warning("%s: nothing of this one is stored until there is room", e)

    def _opened(self, ns: Identity) -> Opened:
        """The namespace's number, asked for at first use."""
        found = self._namespaces.get(ns.digest)
        return found if found is not None else self._open_again(ns)

    def _open_again(self, ns: Identity) -> Opened:
        opened = Opened(*self._channel.open_namespace(ns.opening(), self._timeout_s))
        self._namespaces[ns.digest] = opened
        self._epoch = opened.epoch
        return opened

    def _in(self, ns: Identity, call: Callable[[Opened], T]) -> T:
        """`call` with the namespace opened; once more where the daemon is another by now and knows another number."""
        opened = self._opened(ns)
        try:
            return call(opened)
        except FailedPrecondition:
            self._channel.check_usable()
            again = self._open_again(ns)
            if again == opened:
                raise
            return call(again)

    # -- reading

    def match(self, ns: Identity, keys: Sequence[bytes], wait: bool) -> Match:
        if not wait:
            return Match(0, [])
        self._tell()
        tiers: list[str] = []
        try:
            for at in range(0, len(keys), KEYS_MAX):
                part = keys[at : at + KEYS_MAX]

                def call(opened: Opened, part: Sequence[bytes] = part) -> pb.MatchReply:
                    request = pb.MatchRequest(namespace_id=opened.number, keys=part)
                    reply: pb.MatchReply = self._call("Match", request, epoch=opened.epoch)
                    return reply

                reply = self._in(ns, call)
                tiers += [TIER_NAMES[tier] for tier in reply.tiers]
                if reply.blocks < len(part):
                    break
        except (Unavailable, DeadlineExceeded, ResourceExhausted) as e:
            log.debug("blocks from %d on count as missing: %s", len(tiers), e)
        return Match(len(tiers), tiers)

    def get_into(self, ns: Identity, keys: Sequence[bytes], start: int, out: list[Bytes]) -> Copied:
        def take(i: int, at: int, piece: memoryview) -> None:
            out[i][at : at + len(piece)] = np.frombuffer(piece, np.uint8)

        self._tell()
        until = time.monotonic() + self._stream_s(len(out) * ns.block_bytes)
        return self._fetch(ns, keys[start:], take, until)

    def acquire(self, ns: Identity, keys: Sequence[bytes], timeout_s: float) -> Lease:
        blocks: list[Bytes] = []

        def take(i: int, at: int, piece: memoryview) -> None:
            if i == len(blocks):
                blocks.append(np.empty(ns.block_bytes, np.uint8))
            blocks[i][at : at + len(piece)] = np.frombuffer(piece, np.uint8)

        self._tell()
        keys = keys[:KEYS_MAX]
        held, tier, busy = self._fetch(ns, keys, take, time.monotonic() + timeout_s)
        return Lease(lambda: [block.data.toreadonly() for block in blocks[:held]], held, tier, busy)

    def _fetch(self, ns: Identity, keys: Sequence[bytes], take: Take, until: float) -> Copied:
        """`take(i, at, piece)` for the bytes of leading blocks; answers how many blocks came whole and right.

        Of the one behind them some may have been taken. All in the calling thread: nothing is
        taken once this has returned.
        """
        part_keys, done, tier, busy = _part_keys(ns.block_bytes), 0, HOST, 0
        try:
            for at in range(0, len(keys), part_keys):
                part = keys[at : at + part_keys]

                def call(opened: Opened, at: int = at, part: Sequence[bytes] = part) -> Copied:
                    return self._fetch_part(opened, ns, part, lambda i, *what: take(at + i, *what), until)

                got, slowest, busy = self._in(ns, call)
                done, tier = done + got, max(tier, slowest)
                if got < len(part):
                    break
        except (Unavailable, DeadlineExceeded, ResourceExhausted) as e:
            log.debug("blocks from %d on count as missing: %s", done, e)
        return Copied(done, tier, busy)

    def _fetch_part(self, opened: Opened, ns: Identity, keys: Sequence[bytes], take: Take, until: float) -> Copied:
        channel, done, tier, busy = self._channel, 0, HOST, 0
        request = pb.GetRequest(namespace_id=opened.number, keys=keys).SerializeToString()

        def call() -> None:
            nonlocal done, tier, busy
            timeout_s = max(until - time.monotonic(), 0.0)
            stream = channel.get(request, timeout=timeout_s, metadata=channel.metadata(opened.epoch))
            try:
                for at, piece, whole in chunks.block_pieces(_behind_the_count(stream), ns.block_bytes, len(keys)):
                    take(done, at, piece)
                    del piece  # its memory is for the next one
                    done += whole
                said = dict(stream.trailing_metadata() or ())
                tier, busy = _tier_of(said), _busy_of(said, len(keys) - done)
            except InvalidArgument as e:
                stream.cancel()
                log.warning("from %s: %s; what is left of this stream counts as missing", channel.endpoint, e)
            except BaseException:
                stream.cancel()
                raise

        try:
            channel.reach(call)
        except (Unavailable, DeadlineExceeded, ResourceExhausted) as e:
            log.debug("a stream of blocks ended after %d of %d: %s", done, len(keys), e)
        return Copied(done, tier, busy)

    def may_wait(self, ns: Identity, keys: Sequence[bytes]) -> bool:
        """Nobody knows without asking."""
        return True

    # -- ahead of use

    def prefetch(self, ns: Identity, keys: Sequence[bytes], deadline_s: float, priority: int) -> Ticket:
        until, deadline_ms = time.monotonic() + deadline_s, max(int(deadline_s * 1000), 1)

        def call(opened: Opened) -> tuple[pb.PrefetchReply, str]:
            request = pb.PrefetchRequest(
                namespace_id=opened.number, keys=keys[:KEYS_MAX], deadline_ms=deadline_ms, priority=priority
            )
            return self._call("Prefetch", request, epoch=opened.epoch), opened.epoch

        self._tell()
        try:
            begun, epoch = self._in(ns, call)
        except (Unavailable, DeadlineExceeded, ResourceExhausted) as e:
            return Ticket("failed", 0, str(e))

        def ask(wait_s: float, cancel: bool) -> pb.TicketReply:
            request = pb.TicketRequest(ticket=begun.ticket, wait_ms=int(wait_s * 1000), cancel=cancel)
            timeout_s = min(self._timeout_s + wait_s, max(until - time.monotonic(), self._timeout_s * ANSWER_SHARE))
            reply: pb.TicketReply = self._call("Ticket", request, timeout_s, epoch)
            return reply

        if begun.state != pb.TICKET_RUNNING:
            return Ticket(STATES[begun.state], begun.blocks, begun.why)
        return Ticket("running", begun.blocks, ask=ask, wait_s=TICKET_WAIT_S, until=until)

    # -- writing

    def put(
        self, ns: Identity, keys: Sequence[bytes], start: int, blocks: list[Bytes], hint: Hint | None, durable: bool
    ) -> PutResult:
        self._check_writable()
        self._tell()
        stored, existing, why = 0, 0, ""
        error: KVStoreError | None = None
        try:
            for at in range(0, len(blocks), _part_keys(ns.block_bytes)):
                some = blocks[at : at + _part_keys(ns.block_bytes)]
                part = range(start + at, start + at + len(some))
                reply = self._put_part(ns, keys, part, some, hint, durable)
                results, why = list(reply.results), why or reply.not_durable
                stored, existing = stored + results.count(pb.STORED), existing + results.count(pb.EXISTS)
                if pb.REJECTED in results:
                    error = ResourceExhausted(f"the daemon had no room for {results.count(pb.REJECTED)} blocks")
                    break
        except (Unavailable, ResourceExhausted) as e:
            error = e
        except DeadlineExceeded as e:
            error = Unavailable(f"no answer from {self._channel.endpoint} in time: {e}")
        if isinstance(error, ResourceExhausted) and not stored and not existing:
            raise error
        if durable and error is None and not why and len(blocks) > _part_keys(ns.block_bytes):
            why = self._left_again(ns, keys[start:])
        return PutResult(stored, existing, len(blocks) - stored - existing, error or not_durable(why))

    def _left_again(self, ns: Identity, keys: Sequence[bytes]) -> str:
        """Each part was on the SSD when it was answered; one that came later may have taken its place."""
        try:
            for at in range(0, len(keys), KEYS_MAX):

                def call(opened: Opened, part: Sequence[bytes] = keys[at : at + KEYS_MAX]) -> bool:
                    request = pb.MatchRequest(namespace_id=opened.number, keys=part, tier=pb.TIER_SSD)
                    return bool(self._call("Match", request, epoch=opened.epoch).blocks < len(part))

                if self._in(ns, call):
                    return LEFT_AGAIN
        except (Unavailable, DeadlineExceeded, ResourceExhausted) as e:
            return f"nobody can be asked about it any more: {e}"
        return ""

    def _put_part(
        self, ns: Identity, keys: Sequence[bytes], part: range, blocks: list[Bytes], hint: Hint | None, durable: bool
    ) -> pb.PutReply:
        """One stream: a result for each of keys[part]."""
        channel = self._channel
        header = pb.PutHeader(
            keys=[keys[i] for i in part],
            parents=[keys[i - 1] if i else b"" for i in part],
            depths=part,
            hint=hint.message() if hint is not None else None,
            durable=durable,
        )
        # A durable one is answered when it is on the SSD, or when the daemon has waited long enough for that.
        timeout_s = self._stream_s(len(blocks) * ns.block_bytes) + (DURABLE_S if durable else 0.0)

        def call(opened: Opened) -> pb.PutReply:
            header.namespace_id = opened.number
            messages, metadata = _put_messages(header, blocks), channel.metadata(opened.epoch)
            reply: pb.PutReply = channel.reach(lambda: channel.put(messages, timeout=timeout_s, metadata=metadata))
            return reply

        reply = self._in(ns, call)
        if len(reply.results) != len(part):
            raise KVStoreError(
                f"{len(reply.results)} results for {len(part)} blocks: {channel.endpoint} is no kvstored"
            )
        return reply

    def reserve(self, ns: Identity, count: int) -> Slots:
        """Private memory; the bytes travel at commit."""
        self._check_writable()
        self._opened(ns)
        blocks = [np.empty(ns.block_bytes, np.uint8) for _ in range(count)]

        def commit(keys: Sequence[bytes], start: int, hint: Hint | None, durable: bool) -> PutResult:
            result = self.put(ns, keys, start, blocks[: len(keys) - start], hint, durable)
            if isinstance(result.error, Unavailable):
                raise result.error
            return result

        return Slots([memoryview(block.data) for block in blocks], commit)

    def _check_writable(self) -> None:
        self._channel.check_usable()
        if self._read_only:
            raise FailedPrecondition("this client is read-only: it has no slots to write to")

    # -- management

    def remove(self, ns: Identity, keys: Sequence[bytes]) -> int:
        def request(number: int, part: Any) -> pb.RemoveRequest:
            return pb.RemoveRequest(namespace_id=number, keys=part)

        replies = self._each("Remove", ns, keys, request, self._timeout_s + LASTING_S)
        for reply in replies:
            self._removals.said(reply.not_on_disk_yet)
        return sum(reply.removed for reply in replies)

    def pin(self, ns: Identity, keys: Sequence[bytes], ttl_s: float) -> int:
        replies = self._each("Pin", ns, keys, lambda n, part: pb.PinRequest(namespace_id=n, keys=part, ttl_s=ttl_s))
        return sum(reply.pinned for reply in replies)

    def unpin(self, ns: Identity, keys: Sequence[bytes]) -> int:
        replies = self._each("Unpin", ns, keys, lambda n, part: pb.UnpinRequest(namespace_id=n, keys=part))
        return sum(reply.unpinned for reply in replies)

    def _each(
        self,
        name: str,
        ns: Identity,
        keys: Sequence[bytes],
        request: Callable[[int, Any], Any],
        timeout_s: float = 0.0,
    ) -> list[Any]:
        """One call for as many keys as a message takes; the answers."""
        self._tell()
        replies = []
        for at in range(0, len(keys), KEYS_MAX):
            part = keys[at : at + KEYS_MAX]

            def call(opened: Opened, part: Sequence[bytes] = part) -> Any:
                return self._call(name, request(opened.number, part), timeout_s, opened.epoch)

            replies.append(self._in(ns, call))
        return replies

    def clear(self, ns: Identity) -> int:
        def call(opened: Opened) -> pb.ClearReply:
            reply: pb.ClearReply = self._call(
                "Clear", pb.ClearRequest(namespace_id=opened.number), LONG_CALL_S, opened.epoch
            )
            return reply

        self._tell()
        reply = self._in(ns, call)
        self._removals.said(reply.not_on_disk_yet)
        return reply.removed

    def administer(self, name: str, request: Any, timeout_s: float) -> Any:
        """A call of the administration, by its name in the contract."""
        return self._call(name, request, timeout_s)

    def stats(self) -> dict[str, Any]:
        self._tell(now=True)
        return stats.as_dict(self._call("Stats", pb.StatsRequest(), LONG_CALL_S))

    def health(self) -> Health:
        try:
            reply = self._call("Health", pb.HealthRequest())
        except (Unavailable, DeadlineExceeded) as e:
            return Health(reachable=False, healthy=False, problems=[str(e)])
        return Health(True, reply.healthy, list(reply.problems), reply.version, reply.uptime_s)

    def close(self) -> None:
        """Tells what was read and closes the channel. Calls under way in other threads end with FailedPrecondition."""
        self._tell(now=True)
        self._channel.close()

    def _tell(self, *, now: bool = False) -> None:
        """Says what was done since the last time, if that is a second ago; a daemon that is away is told later.

        Namespace numbers are of one life of the daemon: what was done in namespaces that were
        opened in another waits until they are opened again.
        """
        channel, epoch = self._channel, self._epoch
        if channel.forked or channel.closed or (channel.down and not now):
            return
        opened = {
            digest: pb.OpenNamespaceReply(namespace_id=found.number)
            for digest, found in self._namespaces.good().items()
            if found.epoch == epoch
        }
        for request in self.reads.due(opened, now=now):
            try:
                self._call("Touch", request, min(TOUCH_TIMEOUT_S, self._timeout_s), epoch)
            except KVStoreError as e:
                log.debug("not told, and lost: %s", e)

    def _stream_s(self, size_bytes: int) -> float:
        return self._timeout_s + size_bytes / STREAM_BYTES_PER_S


def _part_keys(block_bytes: int) -> int:
    """Blocks of one stream."""
    return max(1, min(KEYS_MAX, PART_BYTES // block_bytes))


def _tier_of(metadata: Mapping[str, str | bytes]) -> int:
    """Where the slowest block of a stream came from; memory, where nobody says."""
    said = str(metadata.get(chunks.TIER_METADATA, HOST))
    return int(said) if said in TIERS else HOST


def _busy_of(metadata: Mapping[str, str | bytes], missing: int) -> int:
    """How many blocks that did not come are there, and had no turn; none, where nobody says so believably."""
    said = str(metadata.get(chunks.BUSY_METADATA, 0))
    return min(int(said), missing) if said.isdecimal() and len(said) <= BUSY_DIGITS_MAX else 0


def _put_messages(header: pb.PutHeader, blocks: list[Bytes]) -> Iterator[bytes]:
    yield pb.PutChunk(header=header).SerializeToString()
    for block in blocks:
        yield from chunks.block_messages(block.data)


def _behind_the_count(stream: Iterator[bytes]) -> Iterator[bytes]:
    """All messages but the first, which says how many blocks there are; what counts is how many come."""
    next(stream, None)
    return stream
