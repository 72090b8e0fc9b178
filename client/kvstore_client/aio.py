"""The client for asyncio: the same names, as coroutines.

    async with Client() as client:
        ns = await client.namespace(Layout(model="llama", ...))
        keys = ns.keys(token_ids)
        copied = await ns.get_into(keys, out)
        async with ns.acquire(keys) as lease: ...        # or: lease = await ns.acquire(keys)

Calls run in threads of the client's own, at most THREADS_MAX at once, and besides at most
PATIENT_MAX that may wait for a disk: those never keep a read from memory waiting. What only
computes (`keys`, `key`) is as it was. A call ends in bounded time, so a cancelled one waits for its
thread before CancelledError goes on: nothing is written to a caller's buffer later. What
a cancelled `acquire` or `reserve` had got by then is given back.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from numpy.typing import DTypeLike, NDArray

from kvstore_client import client as sync
from kvstore_client import lease, namespace, tickets
from kvstore_client.layout import Layout
from kvstore_client.results import Health, Hint, Match, PutResult
from kvstored.v1.errors import FailedPrecondition

__all__ = ["Client", "Lease", "Namespace", "Slots", "Ticket"]

THREADS_MAX = 8
"""Calls of one client under way at once; one more waits for its turn."""

PATIENT_MAX = 32
"""The same of calls that may wait for a disk: reads of what is not in memory, durable puts."""

ASK_FIRST_S, ASK_MAX_S = 0.001, 0.02
"""Between two questions how far a prefetch is."""

T = TypeVar("T")


class _Threads:
    """Runs the calls of one client."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._executor = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="kvstore-aio")
        self._patient = ThreadPoolExecutor(PATIENT_MAX, thread_name_prefix="kvstore-aio-disk")
        self._running: set[asyncio.Future[Any]] = set()
        self.closed = False

    async def run(self, call: Callable[[], T], undo: Callable[[T], None] | None = None, *, patient: bool = False) -> T:
        """What `call` answers. Cancelled, it waits for the thread first, and undoes what nobody will get.

        `patient`: it may wait for a disk.
        """
        if self._pid != os.getpid():
            raise FailedPrecondition("this client was made before a fork; make a new Client in the child")
        if self.closed:
            raise FailedPrecondition("the client is closed")
        return await self._submit(call, undo, self._patient if patient else self._executor)

    async def read(
        self,
        may_wait: Callable[[], bool],
        call: Callable[[], T],
        undo: Callable[[T], None] | None = None,
    ) -> T:
        """What `call` reads: at once where all of it is in memory, else where only those wait that wait for a disk."""

        def in_memory() -> list[T]:
            return [] if may_wait() else [call()]

        def undo_read(read: list[T]) -> None:
            if undo is not None and read:
                undo(read[0])

        for read in await self.run(in_memory, undo_read):
            return read
        return await self.run(call, undo, patient=True)

    async def _submit(self, call: Callable[[], T], undo: Callable[[T], None] | None, executor: ThreadPoolExecutor) -> T:
        job = executor.submit(call)
        done = asyncio.wrap_future(job)
        self._running.add(done)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not job.cancel():
                await _finished(done)
                if undo is not None and done.exception() is None:
                    undo(done.result())
            raise
        finally:
            self._running.discard(done)

    async def close(self, last: Callable[[], None] | None) -> None:
        """Waits for the calls under way, runs `last`, and ends the threads."""
        if self.closed or self._pid != os.getpid():
            self.closed = True
            return
        self.closed = True
        cancelled = False
        for done in list(self._running):
            cancelled |= await _finished(done)
        try:
            if last is not None:
                await self._submit(last, None, self._executor)
        finally:
            self._executor.shutdown()  # every thread is idle
            self._patient.shutdown()
        if cancelled:
            raise asyncio.CancelledError


async def _finished(done: asyncio.Future[Any]) -> bool:
    """Waits for a future, however often the waiting is cancelled, and says whether it was.

    What the future raised counts as seen.
    """
    cancelled = False
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            cancelled = True
    if not done.cancelled():
        done.exception()
    return cancelled


class _Held(Protocol):
    """What `async with` gives back at its end."""

    async def _give_back(self) -> None: ...


H = TypeVar("H", bound=_Held)


class Pending(Generic[H]):
    """A lease or slots to come: `await` it, or enter it with `async with`, which gives it back at the end."""

    def __init__(self, get: Callable[[], Awaitable[H]]) -> None:
        self._get = get
        self._got: H | None = None

    def __await__(self) -> Generator[Any, None, H]:
        return self._get().__await__()

    async def __aenter__(self) -> H:
        self._got = await self._get()
        return self._got

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._got is not None:
            await self._got._give_back()


class Client:
    """As kvstore_client.Client, which it makes at its first call: that may take up to `timeout_s`.

    So what that refuses (an endpoint that is none, another protocol) is raised there, or by
    `async with`.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        tenant: str = "default",
        name: str = "",
        timeout_s: float = 2.0,
        read_only: bool = False,
        token: str | None = None,
        ca: str | os.PathLike[str] | None = None,
    ) -> None:
        self._make = lambda: sync.Client(
            endpoint, tenant=tenant, name=name, timeout_s=timeout_s, read_only=read_only, token=token, ca=ca
        )
        self._client: sync.Client | None = None
        self._making = asyncio.Lock()
        self._threads = _Threads()

    async def _made(self) -> sync.Client:
        async with self._making:
            if self._client is None:
                self._client = await self._threads.run(self._make, sync.Client.close)
            return self._client

    async def namespace(self, layout: Layout, salt: str = "", adapter: str = "") -> "Namespace":
        """Blocks of one model as one rank lays them out; `adapter` (LoRA) and `salt` keep theirs apart."""
        client = await self._made()
        return Namespace(self._threads, await self._threads.run(lambda: client.namespace(layout, salt, adapter)))

    async def raw_namespace(self, name: str, block_bytes: int, salt: str = "") -> "Namespace":
        """Opaque blocks of `block_bytes` each, named by `key(...)`."""
        client = await self._made()
        found = await self._threads.run(lambda: client.raw_namespace(name, block_bytes, salt))
        return Namespace(self._threads, found)

    @property
    def connected(self) -> bool:
        """Whether the daemon was there when it was last heard of; asks nobody and never waits."""
        return self._client is not None and self._client.connected

    async def stats(self) -> dict[str, Any]:
        """What the daemon says of itself, as nested dicts (StatsReply of the contract). Raises Unavailable."""
        client = await self._made()
        return await self._threads.run(client.stats)

    def device_stats(self) -> dict[str, Any]:
        """What this process does with GPUs, asked of nobody: empty where it has used none."""
        return {} if self._client is None else self._client.device_stats()

    async def health(self) -> Health:
        """Whether the daemon can be reached and is well; never raises because it is away."""
        client = await self._made()
        return await self._threads.run(client.health)

    async def close(self) -> None:
        """Waits for calls under way, ends the session and the threads. Leased views stay valid until they are gone."""
        await self._threads.close(None if self._client is None else self._client.close)

    async def __aenter__(self) -> Self:
        try:
            await self._made()
        except BaseException:
            await self._threads.close(None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Namespace:
    """As kvstore_client.Namespace."""

    def __init__(self, threads: _Threads, ns: namespace.Namespace) -> None:
        self._threads = threads
        self._ns = ns
        self.keys = ns.keys
        self.key = ns.key
        self.block_bytes = ns.block_bytes
        self.digest = ns.digest

    async def match(self, keys: Sequence[bytes]) -> Match:
        """How many leading blocks are present, and where. A hint that pins nothing."""
        return await self._threads.run(lambda: self._ns.match(keys))

    async def get_into(self, keys: Sequence[bytes], out: Any, start: int = 0) -> int:
        """Copies leading blocks of keys[start:] into `out`; answers how many. `out` is not written to afterwards."""
        return await self._threads.read(
            lambda: self._ns.may_wait(keys, start), lambda: self._ns.get_into(keys, out, start)
        )

    async def get(self, keys: Sequence[bytes]) -> list[bytes]:
        """The leading blocks as bytes."""
        return await self._threads.read(lambda: self._ns.may_wait(keys), lambda: self._ns.get(keys))

    async def may_wait(self, keys: Sequence[bytes], start: int = 0) -> bool:
        """Whether reading keys[start:] may have to wait for a disk. A hint."""
        return await self._threads.run(lambda: self._ns.may_wait(keys, start))

    def acquire(self, keys: Sequence[bytes], timeout_s: float = 1.0) -> "Pending[Lease]":
        """Holds the leading run in memory for reading in place: `await` it, or use it with `async with`."""

        async def get() -> Lease:
            return Lease(
                await self._threads.read(
                    lambda: self._ns.may_wait(keys),
                    lambda: self._ns.acquire(keys, timeout_s),
                    lease.Lease.release,
                )
            )

        return Pending(get)

    async def prefetch(
        self, keys: Sequence[bytes], deadline_s: float = 2.0, *, priority: int = 0, to: str = ""
    ) -> "Ticket":
        """Begins to bring the leading run into memory (`to="gpu:UUID"`: on that device); never waits for it."""
        begun = await self._threads.run(lambda: self._ns.prefetch(keys, deadline_s, priority=priority, to=to))
        return Ticket(self._threads, begun)

    async def put(
        self, keys: Sequence[bytes], blocks: Any, start: int = 0, *, durable: bool = False, hint: Hint | None = None
    ) -> PutResult:
        """Stores keys[start:]. A cancelled put may have stored all, some or none of them."""
        return await self._threads.run(
            lambda: self._ns.put(keys, blocks, start, durable=durable, hint=hint), patient=durable
        )

    def reserve(self, n: int) -> "Pending[Slots]":
        """`n` slots to fill in place: `await` it, or use it with `async with`, which aborts what is not committed."""

        async def get() -> Slots:
            return Slots(self._threads, await self._threads.run(lambda: self._ns.reserve(n), lease.Slots.abort))

        return Pending(get)

    async def remove(self, keys: Sequence[bytes]) -> int:
        """Drops these blocks, wherever in their chain, for good; answers how many were there. Raises Unavailable."""
        return await self._threads.run(lambda: self._ns.remove(keys), patient=True)

    async def pin(self, keys: Sequence[bytes], ttl_s: float) -> int:
        """Keeps present blocks from eviction for `ttl_s`; answers how many. Raises Unavailable."""
        return await self._threads.run(lambda: self._ns.pin(keys, ttl_s))

    async def unpin(self, keys: Sequence[bytes]) -> int:
        """Lets eviction have them again; answers how many were pinned. Raises Unavailable."""
        return await self._threads.run(lambda: self._ns.unpin(keys))

    async def clear(self) -> int:
        """Drops every block of this namespace, for good; answers how many. Raises Unavailable."""
        return await self._threads.run(self._ns.clear, patient=True)


class Lease:
    """As kvstore_client.Lease."""

    def __init__(self, held: lease.Lease) -> None:
        self._held = held

    def __len__(self) -> int:
        """How many blocks are held."""
        return len(self._held)

    @property
    def views(self) -> list[memoryview]:
        """One read-only memoryview a block, without a copy. They stay valid while they live."""
        return self._held.views

    def numpy(self, i: int, dtype: DTypeLike = "u1") -> NDArray[Any]:
        """Block `i` as a read-only array of `dtype`, one dimension, without a copy."""
        return self._held.numpy(i, dtype)

    def torch(self, i: int, dtype: Any = None) -> Any:
        """Block `i` as a CPU tensor of `dtype` (default uint8), without a copy. Not to be written to."""
        return self._held.torch(i, dtype)

    async def release(self) -> None:
        """Lets go. What was made from the views keeps its block until it is gone itself."""
        self._held.release()  # counts references and sends a message that nobody waits for: no thread needed

    _give_back = release

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


class Slots:
    """As kvstore_client.Slots."""

    def __init__(self, threads: _Threads, reserved: lease.Slots) -> None:
        self._threads = threads
        self._reserved = reserved

    def __len__(self) -> int:
        return len(self._reserved)

    @property
    def views(self) -> list[memoryview]:
        """One writable memoryview a slot; of no use after commit or abort."""
        return self._reserved.views

    async def commit(
        self, keys: Sequence[bytes], start: int = 0, *, hint: Hint | None = None, durable: bool = False
    ) -> PutResult:
        """Makes slot i visible as keys[start + i]; slots without a key are given back."""
        return await self._threads.run(
            lambda: self._reserved.commit(keys, start, hint=hint, durable=durable), patient=durable
        )

    async def abort(self) -> None:
        """Gives back what was not committed, as soon as nothing made from the views is alive."""
        self._reserved.abort()

    _give_back = abort

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.abort()


class Ticket:
    """As kvstore_client.Ticket, but that `state` answers at once, and has the daemon asked for the next time."""

    def __init__(self, threads: _Threads, ticket: tickets.Ticket) -> None:
        self._threads = threads
        self._ticket = ticket
        self._asking: asyncio.Future[None] | None = None

    @property
    def state(self) -> str:
        """ "running", "done", "failed" or "cancelled", as it was last heard of; the last three are final."""
        state = self.known_state
        if state == "running" and (self._asking is None or self._asking.done()):
            self._asking = asyncio.ensure_future(self._ask())
        return state

    async def _ask(self) -> None:
        with contextlib.suppress(FailedPrecondition):  # the client is closed: it ends by its deadline
            await self.refresh()

    @property
    def known_state(self) -> str:
        """The state as it was last heard of, without a question."""
        return self._ticket.known_state

    async def refresh(self) -> str:
        """Asks the daemon once; answers the state."""
        return await self._threads.run(self._ticket.refresh)

    @property
    def blocks(self) -> int:
        """Leading blocks in memory, as far as is known."""
        return self._ticket.blocks

    @property
    def loaded(self) -> int:
        """Blocks that were brought for it, as far as is known."""
        return self._ticket.loaded

    @property
    def waiting(self) -> int:
        """Blocks still on their way, as far as is known."""
        return self._ticket.waiting

    @property
    def why(self) -> str:
        """Why not all of the run that was there came; "" where it did."""
        return self._ticket.why

    async def wait(self) -> int:
        """Waits for its end, never longer than its deadline; answers how many leading blocks are in memory then.

        No thread waits with it: other calls go on.
        """
        pause_s = ASK_FIRST_S
        while await self.refresh() == "running":
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, ASK_MAX_S)
        return self._ticket.blocks

    async def cancel(self) -> None:
        """Ends a running prefetch; one that is final stays as it is. What has come stays in memory."""
        await self._threads.run(self._ticket.cancel)
