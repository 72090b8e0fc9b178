"""Blocks of one identity: the calls that an engine makes."""

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from kvstore_client import buffers
from kvstore_client.chain import checked_count, checked_keys
from kvstore_client.lease import Lease, Slots
from kvstore_client.paged_blocks import PagedBlocks
from kvstore_client.reads import ACQUIRE, GET, HOST, MATCH, PUT, SSD
from kvstore_client.results import Copied, Hint, Match, PutResult
from kvstore_client.tickets import Ticket
from kvstore_client.transport import Identity, Transport
from kvstored.v1 import KEYS_MAX
from kvstored.v1 import keys as naming
from kvstored.v1.errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from kvstore_client.device_lease import DeviceLease

TOKEN_MIN, TOKEN_MAX = -(1 << 63), (1 << 63) - 1

DEADLINE_S_MAX, PRIORITY_MAX = 600, 8
"""Of a prefetch."""

GET_BYTES = 1 << 30
"""What `get` asks for at once; memory is taken only for blocks that are found."""


class Namespace:
    """What `Client.namespace` and `Client.raw_namespace` give. Safe to use from many threads.

    Keys go in chain order: `keys[i - 1]` is the parent of `keys[i]`. Every call that names
    keys speaks of the leading run of them that is present, and a miss is a result.
    """

    def __init__(self, transport: Transport, identity: Identity) -> None:
        self._transport = transport
        self._identity = identity

    @property
    def block_bytes(self) -> int:
        """Bytes of every block here."""
        return self._identity.block_bytes

    @property
    def digest(self) -> bytes:
        """32 bytes that name this namespace on every machine and in every key."""
        return self._identity.digest

    def _done(self, operation: int, found: int, asked: int, began: float, tier: int = HOST, busy: int = 0) -> None:
        """For the daemon's figures. A call that names no block is none; one that raised is noted by who catches it."""
        if asked:
            self._transport.reads.done(operation, self._identity.digest, found, asked, began, tier, busy)

    # -- keys

    def keys(self, token_ids: Any) -> list[bytes]:
        """Keys of the full blocks of a prompt: any sequence, array or tensor of token ids, one dimension."""
        if not self._identity.block_tokens:
            raise InvalidArgument("a raw namespace has no tokens; name blocks with key()")
        on_device = hasattr(token_ids, "tolist") and not isinstance(token_ids, np.ndarray)
        try:
            ids = np.asarray(token_ids.tolist() if on_device else token_ids)
        except (TypeError, ValueError, RuntimeError) as e:
            raise InvalidArgument(f"token ids are one row of whole numbers: {e}") from e
        # Only what numpy itself takes for whole numbers: rounding would give two prompts one key.
        if ids.size and (ids.dtype.kind not in "iu" or (ids.dtype.kind == "u" and int(ids.max()) > TOKEN_MAX)):
            raise InvalidArgument(f"token ids are whole numbers from {TOKEN_MIN} to {TOKEN_MAX}, not {ids.dtype}")
        tokens = ids.astype("<i8")
        if tokens.ndim != 1:
            raise InvalidArgument(f"token ids have {tokens.ndim} dimensions; pass one sequence")
        return naming.token_keys(self.digest, tokens.tobytes(), self._identity.block_tokens)

    def key(self, name: bytes) -> bytes:
        """The key of a block that its engine has a name or hash of its own for."""
        if not isinstance(name, bytes):
            raise InvalidArgument(f"a name is bytes, not {type(name).__name__}")
        return naming.name_key(self.digest, name)

    # -- reading

    def match(self, keys: Sequence[bytes], *, wait: bool = True) -> Match:
        """How many leading blocks are present, and where. A hint that pins nothing.

        Without `wait` it is answered from shared memory alone, and never waits for the daemon:
        where that is not to be had at the moment (or at all, as over gRPC), nothing is present.
        While the SSD is out of use, what only it has is not present either: no read would get it.
        """
        began = perf_counter()
        keys = checked_keys(keys)
        found = self._transport.match(self._identity, keys, wait)
        self._done(MATCH, found.blocks, len(keys), began, SSD if "ssd" in found.tiers else HOST)
        return found

    def get_into(self, keys: Sequence[bytes], out: Any, start: int = 0) -> int:
        """Copies leading blocks of keys[start:] into `out`: one writable buffer or a list of one each.

        Answers how many were copied; what lies behind them in `out` is undefined. Blocks that
        are not in memory are waited for: as long as more of them come within the client's
        `timeout_s`. What does not is a miss; so it is where the daemon is too busy all that time to
        bring them, but its figures count those apart.

        `out` may be pages of an engine's KV cache (`PagedKV.blocks`): then copies are enqueued on its stream, and
        what is answered is how many blocks they are of; nobody waits for the stream.
        """
        began = perf_counter()
        keys = checked_keys(keys)
        count = checked_count(keys, start)
        if isinstance(out, PagedBlocks):
            found: Copied = self._paged().get(self._identity, keys, start, out)
            self._done(GET, found.blocks, count, began, found.tier, found.busy)
            return found.blocks
        if not count:
            return 0
        blocks = buffers.as_blocks(out, count, self.block_bytes, "out")
        buffers.require_writable(blocks, "out")
        copied, tier, busy = self._transport.get_into(self._identity, keys, start, blocks)
        self._done(GET, copied, count, began, tier, busy)
        return copied

    def get(self, keys: Sequence[bytes]) -> list[bytes]:
        """The leading blocks as bytes."""
        began = perf_counter()
        keys = checked_keys(keys)
        found: list[bytes] = []
        slowest, busy = HOST, 0
        at_once = max(GET_BYTES // self.block_bytes, 1)
        while len(found) < len(keys):
            part = keys[: len(found) + at_once]
            out = np.empty((len(part) - len(found), self.block_bytes), np.uint8)
            copied, tier, busy = self._transport.get_into(self._identity, part, len(found), list(out))
            slowest = max(slowest, tier)
            found += [block.tobytes() for block in out[:copied]]
            if copied < len(out):
                break
        self._done(GET, len(found), len(keys), began, slowest, busy)
        return found

    def _paged(self) -> Any:
        """What copies pages: imported with the first of them."""
        from kvstore_client.paged_calls import PagedCalls

        return PagedCalls(self._transport)

    @overload
    def acquire(  # type: ignore[overload-overlap]
        self, keys: Sequence[bytes], timeout_s: float = 1.0, *, to: Literal[""] = ""
    ) -> Lease: ...
    @overload
    def acquire(self, keys: Sequence[bytes], timeout_s: float = 1.0, *, to: str) -> "DeviceLease": ...
    def acquire(self, keys: Sequence[bytes], timeout_s: float = 1.0, *, to: str = "") -> "Lease | DeviceLease":
        """Holds the leading run, of at most 4,096 blocks, in memory for reading in place.

        What is not in memory is brought there first; what has not come within `timeout_s`, or is
        more than may be held besides, is not held. Raises ResourceExhausted where what is there
        already is more than one session (a quarter of the memory) or all together (three
        quarters) may hold. The daemon has at least a quarter of the client's `timeout_s` to answer.

        `to="gpu:UUID"`: on that device, by its UUID as nvidia-smi prints it: a DeviceLease, with addresses, tensors
        and DLPack in place of views. Raises also NoDevice where this process sees no such device, IpcRefused or
        OtherDriver where it may not map its memory, and FailedPrecondition where the daemon has none there.
        """
        began = perf_counter()
        keys = checked_keys(keys)[:KEYS_MAX]
        if not 0 < timeout_s < float("inf"):
            raise InvalidArgument(f"timeout_s={timeout_s!r} is not a number of seconds above 0")
        if to:
            held: DeviceLease = self._paged().acquire(self._identity, keys, timeout_s, to)
            self._done(ACQUIRE, len(held), len(keys), began, held.tier)
            return held
        lease = self._transport.acquire(self._identity, keys, timeout_s)
        self._done(ACQUIRE, len(lease), len(keys), began, lease.tier, lease.busy)
        return lease

    def may_wait(self, keys: Sequence[bytes], start: int = 0) -> bool:
        """Whether reading keys[start:] may have to wait for a disk: some are present, and not in memory. A hint."""
        return self._transport.may_wait(self._identity, checked_keys(keys)[start:])

    def prefetch(self, keys: Sequence[bytes], deadline_s: float = 2.0, *, priority: int = 0, to: str = "") -> Ticket:
        """Begins to bring the leading run, of at most 4,096 blocks, into memory ahead of use; never waits for it.

        Where all of it is there already, the ticket is done at once. Prefetches of higher
        `priority` (-8 to 8) go first. Nothing is held: a later `get_into` may find less. A prefetch
        larger than may be brought ahead (half of the memory, less what was prefetched and not used
        yet) is done with its leading run: `blocks` says how much that is, and `why` that the rest was
        not tried. Where that is nothing, it has failed.

        `to="gpu:UUID"`: into the daemon's memory on that device, from wherever it is; blocks are counted there.
        Where that cannot be, it has failed, and `why` says what to do. Raises InvalidArgument for what names no device.
        """
        if not 0 < deadline_s <= DEADLINE_S_MAX:
            raise InvalidArgument(f"deadline_s={deadline_s!r} is not a number of seconds above 0, at most 600")
        if not isinstance(priority, int) or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
            raise InvalidArgument(f"priority={priority!r} is not a whole number from -8 to 8")
        if to:
            begun: Ticket = self._paged().prefetch(self._identity, checked_keys(keys), deadline_s, priority, to)
            return begun
        return self._transport.prefetch(self._identity, checked_keys(keys), deadline_s, priority)

    # -- writing

    def put(
        self, keys: Sequence[bytes], blocks: Any, start: int = 0, *, durable: bool = False, hint: Hint | None = None
    ) -> PutResult:
        """Stores keys[start:]; `keys` is the whole chain, so that parents are known.

        `blocks`: one buffer or array of all of them in a row, or a list of one each; or pages of an engine's KV cache
        (`PagedKV.blocks`), which are copied on its stream, into memory of its device where the daemon has some there.
        Acknowledged means visible to every reader on the node, not kept: a put larger than what
        can be evicted makes its own end give way, as `match` tells afterwards. With `durable` it
        waits until all of keys[start:] that is stored, or was there, is on the SSD; where that
        does not come about, `error` says why, and nothing is rejected for it. What finds no room is
        counted as rejected; where nothing at all finds room, ResourceExhausted is raised.
        While the daemon is away everything is rejected.
        """
        began = perf_counter()
        keys = checked_keys(keys)
        count = checked_count(keys, start)
        paged = isinstance(blocks, PagedBlocks)
        if not count and not paged:
            return PutResult(0, 0, 0)
        arrays = [] if paged else buffers.as_blocks(blocks, count, self.block_bytes, "block")
        try:
            if paged:
                result: PutResult = self._paged().put(self._identity, keys, start, blocks, hint, durable)
            else:
                result = self._transport.put(self._identity, keys, start, arrays, hint, durable)
        except ResourceExhausted:
            self._done(PUT, 0, count, began)
            raise
        self._done(PUT, result.stored + result.existing, count, began)
        return result

    def reserve(self, n: int) -> Slots:
        """`n` slots to fill in place, all or none; use as a `with` block.

        Raises ResourceExhausted (a session holds at most a quarter of the memory) and Unavailable.
        """
        if not isinstance(n, int) or n < 1:
            raise InvalidArgument(f"n={n!r} is not a whole number above 0")
        slots = self._transport.reserve(self._identity, n)
        slots.on_commit = lambda stored, asked, began: self._done(PUT, stored, asked, began)
        return slots

    # -- management

    def remove(self, keys: Sequence[bytes]) -> int:
        """Drops these blocks, wherever in their chain and in whichever tier; answers how many were there.

        They are gone for every reader at once, and stay gone whatever becomes of the daemon: it answers when
        no start of it finds them again. Where its disks let it not see to that within some 2 s, the log says
        so, once a client. Raises Unavailable, also where the daemon goes away before it has answered that.
        """
        return self._transport.remove(self._identity, checked_keys(keys))

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> int:
        """Keeps present blocks from eviction for `ttl_s` (at most 30 days); answers how many. Raises Unavailable."""
        return self._transport.pin(self._identity, checked_keys(keys), ttl_s)

    def unpin(self, keys: Sequence[bytes]) -> int:
        """Lets eviction have them again; answers how many were pinned. Raises Unavailable."""
        return self._transport.unpin(self._identity, checked_keys(keys))

    def clear(self) -> int:
        """Drops every block of this namespace; answers how many. They stay gone (see `remove`). Raises Unavailable."""
        return self._transport.clear(self._identity)
