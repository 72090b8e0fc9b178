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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from kvstore_client import stats
from kvstore_client.buffers import Bytes
from kvstore_client.channel import Channel, Trust
from kvstore_client.lease import Lease, Slots
from kvstore_client.reads import Reads
from kvstore_client.results import TIER_NAMES, Health, Hint, Match, PutResult
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

TOUCH_EVERY_S = 1.0
TOUCH_TIMEOUT_S = 0.5

T = TypeVar("T")

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
        self._namespaces: dict[bytes, Opened] = {}
        self._epoch = ""
        """The life of the daemon that answered last."""
        self.reads = Reads(TOUCH_EVERY_S)
        self._channel = Channel(scheme, rest, client, tenant, trust)
        try:
            self._call("Health", pb.HealthRequest())
        except (Unavailable, DeadlineExceeded) as e:
            log.debug("%s is not there yet: %s", self._channel.endpoint, e)
        except BaseException:
            self._channel.close()
            raise

    def _call(self, name: str, request: Any, timeout_s: float = 0.0, epoch: str = "") -> Any:
        return self._channel.call(name, request, timeout_s or self._timeout_s, epoch)

    # -- namespaces

    def open(self, ns: Identity) -> None:
        """Opens a namespace ahead of use, if the daemon is there."""
        try:
            self._opened(ns)
        except (Unavailable, DeadlineExceeded) as e:
            log.debug("opened at first use: %s", e)

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

    def match(self, ns: Identity, keys: Sequence[bytes]) -> Match:
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

    def get_into(self, ns: Identity, keys: Sequence[bytes], start: int, out: list[Bytes]) -> int:
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
        held = self._fetch(ns, keys, take, time.monotonic() + timeout_s)
        return Lease(lambda: [block.data.toreadonly() for block in blocks[:held]], held)

    def _fetch(self, ns: Identity, keys: Sequence[bytes], take: Take, until: float) -> int:
        """`take(i, at, piece)` for the bytes of leading blocks; answers how many blocks came whole and right.

        Of the one behind them some may have been taken. All in the calling thread: nothing is
        taken once this has returned.
        """
        part_keys, done = _part_keys(ns.block_bytes), 0
        try:
            for at in range(0, len(keys), part_keys):
                part = keys[at : at + part_keys]

                def call(opened: Opened, at: int = at, part: Sequence[bytes] = part) -> int:
                    return self._fetch_part(opened, ns, part, lambda i, *what: take(at + i, *what), until)

                got = self._in(ns, call)
                done += got
                if got < len(part):
                    break
        except (Unavailable, DeadlineExceeded, ResourceExhausted) as e:
            log.debug("blocks from %d on count as missing: %s", done, e)
        return done

    def _fetch_part(self, opened: Opened, ns: Identity, keys: Sequence[bytes], take: Take, until: float) -> int:
        channel, done = self._channel, 0
        request = pb.GetRequest(namespace_id=opened.number, keys=keys).SerializeToString()

        def call() -> None:
            nonlocal done
            timeout_s = max(until - time.monotonic(), 0.0)
            stream = channel.get(request, timeout=timeout_s, metadata=channel.metadata(opened.epoch))
            try:
                for at, piece, whole in chunks.block_pieces(_behind_the_count(stream), ns.block_bytes, len(keys)):
                    take(done, at, piece)
                    del piece  # its memory is for the next one
                    done += whole
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
        return done

    # -- writing

    def put(
        self, ns: Identity, keys: Sequence[bytes], start: int, blocks: list[Bytes], hint: Hint | None, durable: bool
    ) -> PutResult:
        self._check_writable()
        self._tell()
        stored = existing = 0
        error: KVStoreError | None = None
        try:
            for at in range(0, len(blocks), _part_keys(ns.block_bytes)):
                some = blocks[at : at + _part_keys(ns.block_bytes)]
                part = range(start + at, start + at + len(some))
                results = self._put_part(ns, keys, part, some, hint, durable)
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
        return PutResult(stored, existing, len(blocks) - stored - existing, error)

    def _put_part(
        self, ns: Identity, keys: Sequence[bytes], part: range, blocks: list[Bytes], hint: Hint | None, durable: bool
    ) -> list[int]:
        """One stream: a result for each of keys[part]."""
        channel = self._channel
        header = pb.PutHeader(
            keys=[keys[i] for i in part],
            parents=[keys[i - 1] if i else b"" for i in part],
            depths=part,
            hint=hint.message() if hint is not None else None,
            durable=durable,
        )
        timeout_s = self._stream_s(len(blocks) * ns.block_bytes)

        def call(opened: Opened) -> list[int]:
            header.namespace_id = opened.number
            messages, metadata = _put_messages(header, blocks), channel.metadata(opened.epoch)
            return list(channel.reach(lambda: channel.put(messages, timeout=timeout_s, metadata=metadata)).results)

        results = self._in(ns, call)
        if len(results) != len(part):
            raise KVStoreError(f"{len(results)} results for {len(part)} blocks: {channel.endpoint} is no kvstored")
        return results

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
        return self._each("Remove", ns, keys, lambda n, part: pb.RemoveRequest(namespace_id=n, keys=part))

    def pin(self, ns: Identity, keys: Sequence[bytes], ttl_s: float) -> int:
        return self._each("Pin", ns, keys, lambda n, part: pb.PinRequest(namespace_id=n, keys=part, ttl_s=ttl_s))

    def unpin(self, ns: Identity, keys: Sequence[bytes]) -> int:
        return self._each("Unpin", ns, keys, lambda n, part: pb.UnpinRequest(namespace_id=n, keys=part))

    def _each(self, name: str, ns: Identity, keys: Sequence[bytes], request: Callable[[int, Any], Any]) -> int:
        """One call for as many keys as a message takes; answers the sum of what they did."""
        self._tell()
        done = 0
        for at in range(0, len(keys), KEYS_MAX):
            part = keys[at : at + KEYS_MAX]

            def call(opened: Opened, part: Sequence[bytes] = part) -> Any:
                return self._call(name, request(opened.number, part), epoch=opened.epoch)

            done += sum(value for _, value in self._in(ns, call).ListFields())
        return done

    def clear(self, ns: Identity) -> int:
        def call(opened: Opened) -> int:
            request = pb.ClearRequest(namespace_id=opened.number)
            removed: int = self._call("Clear", request, LONG_CALL_S, opened.epoch).removed
            return removed

        self._tell()
        return self._in(ns, call)

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
            for digest, found in list(self._namespaces.items())
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


def _put_messages(header: pb.PutHeader, blocks: list[Bytes]) -> Iterator[bytes]:
    yield pb.PutChunk(header=header).SerializeToString()
    for block in blocks:
        yield from chunks.block_messages(block.data)


def _behind_the_count(stream: Iterator[bytes]) -> Iterator[bytes]:
    """All messages but the first, which says how many blocks there are; what counts is how many come."""
    next(stream, None)
    return stream
