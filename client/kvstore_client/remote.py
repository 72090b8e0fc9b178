"""The way to a daemon by gRPC: the same calls as on its own machine, with the blocks' bytes streamed.

    match    Match
    put      Match (what leads is not sent), then one Put stream for each part
    get      one Get stream for each part; a block counts when its checksum is right
    acquire  the same into private memory: nothing is held in the daemon

The channel connects by itself and again after a restart. A namespace is opened at first use
and opened again when the daemon says that it does not know it (any more). No thread of
ours: what was read is told once a second, ahead of whatever call comes then.

gRPC's own threads do not survive a fork, and a channel touched in the child can hang: a
client made before a fork refuses every call there, and so does the making of a new one,
once this process has used gRPC.
"""

import ctypes
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import numpy as np

from kvstore_client import stats
from kvstore_client.buffers import Bytes
from kvstore_client.lease import Lease, Slots
from kvstore_client.results import TIER_NAMES, Health, Hint, Match, PutResult
from kvstore_client.transport import Identity
from kvstored.v1 import KEYS_MAX, PROTOCOL, chunks, errors
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

SERVICE = "/kvstored.v1.KVStore/"
SMALL_CALLS = ("OpenNamespace", "Match", "Touch", "Remove", "Pin", "Unpin", "Clear", "Stats", "Health")

LONG_CALL_S = 30.0
"""Deadline of clear and stats, which may take a busy daemon long."""

STREAM_BYTES_PER_S = 32 << 20
"""A stream may take `timeout_s` and the time of its bytes at this rate, a third of a 1 Gbit/s link."""

PART_BYTES = 256 << 20
"""Bytes of one stream; a larger put or get is several, so that what fails late does not undo what was done."""

MATCH_FIRST_BYTES = 1 << 20
"""A put of fewer bytes is sent without asking first what is there: asking costs more."""

MESSAGE_BYTES_MAX = 4 << 20
FRAME_BYTES = 4 << 20
TOUCH_EVERY_S = 1.0
TOUCH_TIMEOUT_S = 0.5
TOUCH_KEYS_MAX = 4096
TOUCHED_CHAINS_MAX = 256
"""Reads remembered between two messages; older ones lose their recency, never their count."""

RECONNECT_FIRST_S, RECONNECT_MAX_S = 0.05, 0.5
KEEPALIVE_S, KEEPALIVE_TIMEOUT_S = 5.0, 3.0
"""A connection whose other end is gone without a word is given up after so long, and made anew."""

T = TypeVar("T")

_transports: "weakref.WeakSet[GrpcTransport]" = weakref.WeakSet()
_forked_from: list[int] = []
"""The process that used gRPC and forked this one, if one did."""


@dataclass(frozen=True)
class Opened:
    """A namespace as one life of the daemon numbers it."""

    number: int
    epoch: str


class GrpcTransport:
    """One channel to one daemon."""

    def __init__(self, scheme: str, rest: str, client: str, tenant: str, timeout_s: float, read_only: bool) -> None:
        """Says Health once; a daemon that is away is no error here (it may come), another version is."""
        if _forked_from:
            raise FailedPrecondition(
                "this process was forked from one that used gRPC, which does not work in the child; fork before the "
                "first grpc:// client is made, use spawn instead, or reach a daemon of this machine by unix://"
            )
        for what, value in (("tenant", tenant), ("name", client)):
            if not value.isascii() or not value.isprintable() or value != value.strip():
                raise InvalidArgument(f"{what}={value!r} is not printable ASCII, as gRPC metadata must be")
        self._endpoint = f"{scheme}://{rest}"
        self._timeout_s = timeout_s
        self._read_only = read_only
        self._metadata = (
            ("kvstored-tenant", tenant),
            ("kvstored-client", client),
            ("kvstored-protocol", str(PROTOCOL)),
        )
        self._forked = self._closed = False
        self._down = ""
        self._namespaces: dict[bytes, Opened] = {}
        self._touched: deque[tuple[bytes, ...]] = deque(maxlen=TOUCHED_CHAINS_MAX)
        self._counted = [0, 0, 0]
        self._count_lock = threading.Lock()
        self._told_at = time.monotonic()
        self._channel = _channel(scheme, rest)
        self._calls = {
            name: self._channel.unary_unary(SERVICE + name, None, getattr(pb, f"{name}Reply").FromString)
            for name in SMALL_CALLS
        }
        self._put = self._channel.stream_unary(SERVICE + "Put", None, pb.PutReply.FromString)
        self._get = self._channel.unary_stream(SERVICE + "Get", None, None)
        _transports.add(self)
        try:
            self._call("Health", pb.HealthRequest())
        except (Unavailable, DeadlineExceeded) as e:
            log.warning("%s. Until then every read misses and every put is rejected.", e)
        except BaseException:
            self._channel.close()
            raise

    # -- calls

    def _usable(self) -> None:
        if self._forked:
            raise FailedPrecondition("this client was made before a fork; make a new Client in the child")
        if self._closed:
            raise FailedPrecondition("the client is closed")

    def _call(self, name: str, request: Any, timeout_s: float = 0.0, epoch: str = "") -> Any:
        """One small call. Raises the error that the daemon answered, Unavailable or DeadlineExceeded."""
        return self._reach(
            lambda: self._calls[name](
                request.SerializeToString(), timeout=timeout_s or self._timeout_s, metadata=self._with(epoch)
            )
        )

    def _with(self, epoch: str) -> tuple[tuple[str, str], ...]:
        return (*self._metadata, ("kvstored-epoch", epoch)) if epoch else self._metadata

    def _reach(self, call: Callable[[], T]) -> T:
        """Runs a gRPC call; what it raises becomes an error of ours, and what it means for the daemon is noted."""
        self._usable()
        try:
            answer = call()
        except grpc.RpcError as e:
            error = self._error(e)
            if isinstance(error, Unavailable) and not self._down:
                log.warning("%s; reads miss until it is back", error)
            if isinstance(error, Unavailable):
                self._down = str(error)
            raise error from e
        except ValueError:
            self._usable()  # a channel that was closed meanwhile says so by ValueError
            raise
        if self._down:
            log.warning("kvstored on %s is back", self._endpoint)
            self._down = ""
        return answer

    def _error(self, e: Any) -> KVStoreError:
        """The error of ours that a status of gRPC's stands for."""
        code, details = e.code(), e.details() or ""
        if self._closed:
            return FailedPrecondition("the client is closed")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return Unavailable(
                f"no kvstored answers on {self._endpoint} ({details}); is it running, with server.grpc set?"
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return FailedPrecondition(f"what answers on {self._endpoint} is not a kvstored of this release: {details}")
        if code is grpc.StatusCode.PERMISSION_DENIED:
            return errors.Unauthenticated(details)
        return errors.from_wire(code.value[0], details)

    def _opened(self, ns: Identity) -> Opened:
        """The namespace's number, asked for at first use."""
        found = self._namespaces.get(ns.digest)
        return found if found is not None else self._open_again(ns)

    def _open_again(self, ns: Identity) -> Opened:
        request = pb.OpenNamespaceRequest(digest=ns.digest, block_bytes=ns.block_bytes, label=ns.label)

        def call() -> Opened:
            reply, call = self._calls["OpenNamespace"].with_call(
                request.SerializeToString(), timeout=self._timeout_s, metadata=self._metadata
            )
            return Opened(reply.namespace_id, dict(call.initial_metadata()).get("kvstored-epoch", ""))

        opened = self._namespaces[ns.digest] = self._reach(call)
        return opened

    def _in(self, ns: Identity, call: Callable[[Opened], T]) -> T:
        """`call` with the namespace opened; once more where the daemon is another by now and knows another number."""
        opened = self._opened(ns)
        try:
            return call(opened)
        except FailedPrecondition:
            again = self._open_again(ns)
            if again == opened:
                raise
            return call(again)

    def open(self, ns: Identity) -> None:
        """Opens a namespace ahead of use, if the daemon is there."""
        try:
            self._opened(ns)
        except (Unavailable, DeadlineExceeded) as e:
            log.debug("opened at first use: %s", e)

    # -- reading

    def match(self, ns: Identity, keys: Sequence[bytes]) -> Match:
        self._tell()
        try:
            return self._match(ns, keys)
        except (Unavailable, DeadlineExceeded, ResourceExhausted) as e:
            log.debug("a match counts as a miss: %s", e)
            return Match(0, [])

    def _match(self, ns: Identity, keys: Sequence[bytes]) -> Match:
        tiers: list[str] = []
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
        return Match(len(tiers), tiers)

    def get_into(self, ns: Identity, keys: Sequence[bytes], start: int, out: list[Bytes]) -> int:
        def take(i: int, pieces: list[memoryview]) -> None:
            target, at = out[i], 0
            for piece in pieces:
                target[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)

        self._tell()
        until = time.monotonic() + self._stream_s(len(out) * ns.block_bytes)
        copied = self._fetch(ns, keys[start:], take, until)
        self._count(keys, start, copied, ns.block_bytes)
        return copied

    def acquire(self, ns: Identity, keys: Sequence[bytes], timeout_s: float) -> Lease:
        blocks: list[Bytes] = []

        def take(_: int, pieces: list[memoryview]) -> None:
            blocks.append(np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces]))

        self._tell()
        keys = keys[:KEYS_MAX]
        held = self._fetch(ns, keys, take, time.monotonic() + timeout_s)
        self._count(keys, 0, held, ns.block_bytes)
        return Lease(lambda: list(blocks), held)

    def _fetch(
        self, ns: Identity, keys: Sequence[bytes], take: Callable[[int, list[memoryview]], None], until: float
    ) -> int:
        """`take(i, pieces)` for each leading block, once it is whole and right; answers how many.

        All in the calling thread: nothing is taken once this has returned.
        """
        part_keys, done = _part_keys(ns.block_bytes), 0
        try:
            for at in range(0, len(keys), part_keys):
                part = keys[at : at + part_keys]

                def call(opened: Opened, at: int = at, part: Sequence[bytes] = part) -> int:
                    return self._fetch_part(opened, ns, part, lambda i, pieces: take(at + i, pieces), until)

                got = self._in(ns, call)
                done += got
                if got < len(part):
                    break
        except (Unavailable, DeadlineExceeded, ResourceExhausted) as e:
            log.debug("blocks from %d on count as missing: %s", done, e)
        return done

    def _fetch_part(
        self,
        opened: Opened,
        ns: Identity,
        keys: Sequence[bytes],
        take: Callable[[int, list[memoryview]], None],
        until: float,
    ) -> int:
        request = pb.GetRequest(namespace_id=opened.number, keys=keys).SerializeToString()
        timeout_s = max(until - time.monotonic(), 0.0)
        done = 0

        def call() -> None:
            nonlocal done
            stream = self._get(request, timeout=timeout_s, metadata=self._with(opened.epoch))
            try:
                for pieces in _whole_blocks(stream, ns.block_bytes):
                    if done == len(keys):
                        break
                    take(done, pieces)
                    done += 1
            finally:
                stream.cancel()

        try:
            self._reach(call)
        except (Unavailable, DeadlineExceeded) as e:
            log.debug("a stream of blocks ended after %d of %d: %s", done, len(keys), e)
        return done

    # -- writing

    def put(
        self, ns: Identity, keys: Sequence[bytes], start: int, blocks: list[Bytes], hint: Hint | None, durable: bool
    ) -> PutResult:
        self._tell()
        if self._read_only:
            self._usable()
            raise FailedPrecondition("this client is read-only: it has no slots to write to")
        stored = existing = done = 0
        error: KVStoreError | None = None
        try:
            if len(blocks) * ns.block_bytes >= MATCH_FIRST_BYTES:
                existing = done = self._match(ns, keys[start:]).blocks
            if existing:
                self._touched.append(tuple(keys))
            if durable and done == len(blocks):
                self._put_part(ns, keys, range(0), [], hint, durable)
            while done < len(blocks) and error is None:
                some = range(done, min(done + _part_keys(ns.block_bytes), len(blocks)))
                part = range(start + some.start, start + some.stop)
                results = self._put_part(ns, keys, part, blocks[some.start : some.stop], hint, durable)
                done = some.stop
                stored, existing = stored + results.count(pb.STORED), existing + results.count(pb.EXISTS)
                if pb.REJECTED in results:
                    error = ResourceExhausted(f"the daemon had no room for {results.count(pb.REJECTED)} blocks")
        except (Unavailable, ResourceExhausted) as e:
            error = e
        except DeadlineExceeded as e:
            error = Unavailable(f"no answer from {self._endpoint} in time: {e}")
        if isinstance(error, ResourceExhausted) and not stored and not existing:
            raise error
        return PutResult(stored, existing, len(blocks) - stored - existing, error)

    def _put_part(
        self, ns: Identity, keys: Sequence[bytes], part: range, blocks: list[Bytes], hint: Hint | None, durable: bool
    ) -> list[int]:
        """One stream: a result for each of keys[part]."""
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
            messages = _put_messages(header, blocks)
            reply = self._reach(lambda: self._put(messages, timeout=timeout_s, metadata=self._with(opened.epoch)))
            return list(reply.results)

        results = self._in(ns, call)
        if len(results) != len(part):
            raise KVStoreError(f"{len(results)} results for {len(part)} blocks: {self._endpoint} is no kvstored")
        return results

    def reserve(self, ns: Identity, count: int) -> Slots:
        """Private memory; the bytes travel at commit."""
        if self._read_only:
            self._usable()
            raise FailedPrecondition("this client is read-only: it has no slots to write to")
        self._usable()
        self._opened(ns)
        blocks = [np.empty(ns.block_bytes, np.uint8) for _ in range(count)]

        def commit(keys: Sequence[bytes], start: int, hint: Hint | None, durable: bool) -> PutResult:
            result = self.put(ns, keys, start, blocks[: len(keys) - start], hint, durable)
            if isinstance(result.error, Unavailable):
                raise result.error
            return result

        return Slots(list(blocks), commit)

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
            reply = self._in(ns, lambda o, part=part: self._call(name, request(o.number, part), epoch=o.epoch))  # type: ignore[misc]
            done += sum(value for _, value in reply.ListFields())
        return done

    def clear(self, ns: Identity) -> int:
        self._tell()
        removed: int = self._in(
            ns, lambda o: self._call("Clear", pb.ClearRequest(namespace_id=o.number), LONG_CALL_S, o.epoch)
        ).removed
        return removed

    def stats(self) -> dict[str, Any]:
        self._tell(now=True)
        return stats.as_dict(self._call("Stats", pb.StatsRequest(), LONG_CALL_S))

    def health(self) -> Health:
        self._tell()
        try:
            reply = self._call("Health", pb.HealthRequest())
        except (Unavailable, DeadlineExceeded) as e:
            return Health(reachable=False, healthy=False, problems=[str(e)])
        return Health(True, reply.healthy, list(reply.problems), reply.version, reply.uptime_s)

    def close(self) -> None:
        """Tells what was read and closes the channel. Calls under way in other threads end with FailedPrecondition."""
        if self._forked or self._closed:
            return
        self._tell(now=True)
        self._closed = True
        self._channel.close()

    # -- telling what was read

    def _count(self, keys: Sequence[bytes], start: int, copied: int, block_bytes: int) -> None:
        if copied:
            self._touched.append(tuple(keys[: start + copied]))
        with self._count_lock:
            self._counted[0] += copied
            self._counted[1] += len(keys) - start - copied
            self._counted[2] += copied * block_bytes

    def _tell(self, *, now: bool = False) -> None:
        """Sends what was read since the last time, if that is a second ago. A daemon that is away is not told."""
        if self._forked or self._closed or not (now or time.monotonic() - self._told_at >= TOUCH_EVERY_S):
            return
        with self._count_lock:
            if not self._touched and not any(self._counted):
                return
            (hits, misses, hit_bytes), self._counted = self._counted, [0, 0, 0]
            self._told_at = time.monotonic()
        chains: dict[bytes, None] = {}
        while self._touched:
            newest = self._touched.pop()
            if len(chains) + len(newest) <= TOUCH_KEYS_MAX:
                chains.update(dict.fromkeys(newest))
        request = pb.TouchRequest(keys=list(chains), hits=hits, misses=misses, hit_bytes=hit_bytes)
        try:
            self._call("Touch", request, min(TOUCH_TIMEOUT_S, self._timeout_s))
        except KVStoreError as e:
            log.debug("not told: %s", e)

    def _stream_s(self, size_bytes: int) -> float:
        return self._timeout_s + size_bytes / STREAM_BYTES_PER_S


def _channel(scheme: str, rest: str) -> Any:
    options = [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.http2.max_frame_size", FRAME_BYTES),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", int(RECONNECT_FIRST_S * 1000)),
        ("grpc.min_reconnect_backoff_ms", int(RECONNECT_MAX_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(RECONNECT_MAX_S * 1000)),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Channels of one target share a connection otherwise, and one client's close would be another's cancel.
        ("grpc.use_local_subchannel_pool", 1),
        (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
    ]
    if scheme == "grpcs":
        return grpc.secure_channel(rest, grpc.ssl_channel_credentials(), options=options)
    return grpc.insecure_channel(f"unix:{rest}" if scheme == "grpc+unix" else rest, options=options)


def _part_keys(block_bytes: int) -> int:
    """Blocks of one stream."""
    return max(1, min(KEYS_MAX, PART_BYTES // block_bytes))


def _put_messages(header: pb.PutHeader, blocks: list[Bytes]) -> Iterator[bytes]:
    yield pb.PutChunk(header=header).SerializeToString()
    for block in blocks:
        yield from chunks.block_messages(block.data)


def _in_child() -> None:
    """A forked child has none of gRPC's threads: its parent's channels are never touched there, not even freed."""
    for transport in list(_transports):
        transport._forked = True
        transport._count_lock = threading.Lock()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(transport.__dict__))
        if not _forked_from:
            _forked_from.append(os.getppid())


os.register_at_fork(after_in_child=_in_child)
