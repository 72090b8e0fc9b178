"""The client for asyncio: the same results, and a cancelled call that leaves nothing behind."""

import asyncio
import gc
import inspect
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvstore_client
from kvstore_client import FailedPrecondition, InvalidArgument, Layout, Unavailable, aio
from kvstore_client import namespace as sync_namespace
from tests.conftest import RunningDaemon, eventually
from tests.nodes import block, running, totals

BLOCK = 64 << 10
WAIT_S = 30.0


@pytest.fixture(scope="module")
def node() -> Iterator[RunningDaemon]:
    with running(server__grpc="127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture(params=["endpoint", "grpc_endpoint"])
def endpoint(node: RunningDaemon, request: pytest.FixtureRequest) -> str:
    """By shared memory and by gRPC."""
    found: str = getattr(node, request.param)
    return found


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_awaited(scenario), 120.0))


async def _awaited(scenario: Callable[[], Awaitable[None]]) -> None:
    await scenario()


def some(ns: aio.Namespace, count: int, name: str = "k") -> tuple[list[bytes], list[bytes]]:
    """Keys and blocks."""
    keys = [ns.key(f"{name}{i}".encode()) for i in range(count)]
    return keys, [block((name, i), ns.block_bytes) for i in range(count)]


class Gate:
    """Makes one call of the synchronous client wait in its thread until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        real = getattr(sync_namespace.Namespace, name)

        def held(*arguments: Any, **options: Any) -> Any:
            self.entered.set()
            assert self.go.wait(WAIT_S)
            return real(*arguments, **options)

        monkeypatch.setattr(sync_namespace.Namespace, name, held)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, WAIT_S)


async def cancelled(task: "asyncio.Task[Any]") -> None:
    with pytest.raises(asyncio.CancelledError):
        await task


# -- the same calls


def test_every_call_of_the_synchronous_client_is_there() -> None:
    pairs = [
        (kvstore_client.Client, aio.Client),
        (kvstore_client.Namespace, aio.Namespace),
        (kvstore_client.Lease, aio.Lease),
        (kvstore_client.Slots, aio.Slots),
        (kvstore_client.Ticket, aio.Ticket),
    ]
    instance_attributes = {"keys", "key", "block_bytes", "digest"}
    for sync, ours in pairs:
        public = {name for name, _ in inspect.getmembers(sync) if not name.startswith("_")}
        missing = public - {name for name, _ in inspect.getmembers(ours)} - instance_attributes
        assert not missing, f"{ours.__name__} lacks {missing}"


def test_all_calls(endpoint: str) -> None:
    async def scenario() -> None:
        async with aio.Client(endpoint, name="aio") as client:
            ns = await client.raw_namespace(f"all {endpoint}", BLOCK)
            keys, blocks = some(ns, 4)
            assert (await ns.put(keys, blocks)).stored == 4
            assert (await ns.match(keys)).blocks == 4
            assert await ns.get(keys) == blocks
            out = np.empty((4, BLOCK), np.uint8)
            assert await ns.get_into(keys, out) == 4
            assert out.tobytes() == b"".join(blocks)
            async with ns.acquire(keys) as lease:
                assert [bytes(view) for view in lease.views] == blocks
                assert lease.numpy(1).tobytes() == blocks[1]
                assert len(lease) == 4
            lease = await ns.acquire(keys)
            assert len(lease) == 4
            await lease.release()
            with pytest.raises(FailedPrecondition):
                lease.views  # noqa: B018
            more, new = some(ns, 2, "more")
            async with ns.reserve(2) as slots:
                for view, bytes_ in zip(slots.views, new, strict=True):
                    view[:] = bytes_
                del view
                assert (await slots.commit(more)).stored == 2
            assert await ns.get(more) == new
            slots = await ns.reserve(1)
            await slots.abort()
            ticket = await ns.prefetch(keys)
            assert await ticket.wait() == 4
            assert ticket.state == "done"
            await ticket.cancel()
            assert await ns.pin(keys, 60) == 4
            assert await ns.unpin(keys) == 4
            assert await ns.remove(keys[:1]) == 1
            assert await ns.clear() == 5
            assert (await client.health()).healthy
            assert (await client.stats())["counters"]["stored"] >= 6

    run(scenario)


def test_token_keys_are_those_of_the_synchronous_client(endpoint: str) -> None:
    layout = Layout(model="m", dtype="float16", num_layers=2, num_kv_heads=1, head_dim=8, block_tokens=4)

    async def scenario() -> None:
        async with aio.Client(endpoint) as client:
            ns = await client.namespace(layout, salt="s")
            with kvstore_client.Client(endpoint) as sync:
                theirs = sync.namespace(layout, salt="s")
                assert ns.keys(range(9)) == theirs.keys(range(9))
                assert ns.digest == theirs.digest

    run(scenario)


def test_many_calls_at_once(endpoint: str) -> None:
    async def scenario() -> None:
        async with aio.Client(endpoint, timeout_s=20.0) as client:
            ns = await client.raw_namespace(f"many {endpoint}", BLOCK)

            async def one(i: int) -> bool:
                keys, blocks = some(ns, 2, f"{i}-")
                await ns.put(keys, blocks)
                return await ns.get(keys) == blocks

            assert all(await asyncio.gather(*map(one, range(4 * aio.THREADS_MAX))))
            await ns.clear()

    run(scenario)


def test_what_the_client_refuses_is_raised_at_its_first_call() -> None:
    async def scenario() -> None:
        client = aio.Client("nothing://x")
        with pytest.raises(InvalidArgument):
            await client.health()
        await client.close()
        with pytest.raises(InvalidArgument):
            await aio.Client("unix:///x", timeout_s=0).__aenter__()
        async with aio.Client("grpc://127.0.0.1:1", timeout_s=1.0) as away:
            assert not (await away.health()).reachable
            ns = await away.raw_namespace("x", BLOCK)
            assert await ns.get([ns.key(b"k")]) == []
            with pytest.raises(Unavailable):
                await ns.clear()

    run(scenario)


# -- cancelling


def test_a_cancelled_read_does_not_write_to_the_buffer_afterwards(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with aio.Client(endpoint) as client:
            ns = await client.raw_namespace(f"read {endpoint}", BLOCK)
            keys, blocks = some(ns, 2)
            await ns.put(keys, blocks)
            gate = Gate(monkeypatch, "get_into")
            out = np.zeros((2, BLOCK), np.uint8)
            task = asyncio.create_task(ns.get_into(keys, out))
            await gate.reached()
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=0.05)
            assert not done, "it went on before its thread"
            task.cancel()  # nor does a second time change that
            gate.go.set()
            await cancelled(task)
            # Whatever was written was written before; nothing comes later.
            assert out.tobytes() == b"".join(blocks)
            await ns.clear()

    run(scenario)


def test_a_cancelled_acquire_gives_its_lease_back(
    endpoint: str, node: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with aio.Client(endpoint) as client:
            ns = await client.raw_namespace(f"acquire {endpoint}", BLOCK)
            keys, blocks = some(ns, 2)
            await ns.put(keys, blocks)
            gate = Gate(monkeypatch, "acquire")
            task = asyncio.ensure_future(_entered(ns.acquire(keys)))
            await gate.reached()
            task.cancel()
            await asyncio.wait([task], timeout=0.02)
            task.cancel()
            gate.go.set()
            await cancelled(task)
            gc.collect()
            assert await ns.remove(keys) == 2
            await _nothing_held(client)

    run(scenario)


async def _entered(pending: "aio.Pending[Any]") -> None:
    async with pending:
        raise AssertionError("entered though it was cancelled")


async def _nothing_held(client: aio.Client) -> None:
    """Sooner or later: releases travel without an answer."""
    async with asyncio.timeout(WAIT_S):
        held = True
        while held:
            gc.collect()
            found = totals(await client.stats())
            held = any(found[name] for name in ("leased", "doomed", "quarantined"))


def test_a_cancelled_reserve_aborts(node: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with aio.Client(node.endpoint) as client:
            ns = await client.raw_namespace("reserve", BLOCK)
            gate = Gate(monkeypatch, "reserve")
            task = asyncio.ensure_future(_entered(ns.reserve(3)))
            await gate.reached()
            task.cancel()
            gate.go.set()
            await cancelled(task)
            async with asyncio.timeout(WAIT_S):
                while totals(await client.stats())["granted"]:
                    gc.collect()

    run(scenario)


def test_a_call_cancelled_before_its_turn_never_runs(node: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with aio.Client(node.endpoint) as client:
            ns = await client.raw_namespace("turn", BLOCK)
            keys, blocks = some(ns, 1)
            gate = Gate(monkeypatch, "match")
            busy = [asyncio.create_task(ns.match(keys)) for _ in range(aio.THREADS_MAX)]
            await gate.reached()
            waiting = asyncio.create_task(ns.put(keys, blocks))
            await asyncio.wait([waiting], timeout=0.02)
            waiting.cancel()
            await cancelled(waiting)
            gate.go.set()
            assert [(await task).blocks for task in busy] == [0] * aio.THREADS_MAX
            assert await ns.get(keys) == []

    run(scenario)


def test_an_error_behind_a_cancel_is_no_trouble(node: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with aio.Client(node.endpoint) as client:
            ns = await client.raw_namespace("error", BLOCK)
            gate = Gate(monkeypatch, "may_wait")
            task = asyncio.ensure_future(_entered(ns.acquire([b"short"])))
            await gate.reached()
            task.cancel()
            gate.go.set()
            await cancelled(task)
            gc.collect()

    run(scenario)


# -- the end


def test_close_waits_for_calls_ends_the_threads_and_refuses_others(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        before = set(threading.enumerate())
        client = aio.Client(endpoint)
        ns = await client.raw_namespace(f"close {endpoint}", BLOCK)
        keys, blocks = some(ns, 1)
        await ns.put(keys, blocks)
        gate = Gate(monkeypatch, "get")
        reading = asyncio.create_task(ns.get(keys))
        await gate.reached()
        closing = asyncio.create_task(client.close())
        await asyncio.wait([closing], timeout=0.02)
        with pytest.raises(FailedPrecondition, match="the client is closed"):
            await ns.match(keys)
        assert not closing.done()
        gate.go.set()
        await closing
        assert await reading == blocks
        await client.close()
        made = set(threading.enumerate()) - before
        assert not [thread for thread in made if thread.name.startswith("kvstore-aio")]
        with pytest.raises(FailedPrecondition, match="the client is closed"):
            await client.health()
        eventually(lambda: threading.active_count() <= len(before) + 2, WAIT_S, "the threads to end")

    run(scenario)


def test_a_lease_outlives_its_client(endpoint: str) -> None:
    async def scenario() -> None:
        async with aio.Client(endpoint) as client:
            ns = await client.raw_namespace(f"outlives {endpoint}", BLOCK)
            keys, blocks = some(ns, 1)
            await ns.put(keys, blocks)
            kept = (await ns.acquire(keys)).numpy(0)
        assert kept.tobytes() == blocks[0]

    run(scenario)


FORK = """
    import asyncio, os, sys
    from kvstore_client import FailedPrecondition, aio

    async def refused(client, ns):
        for call in (ns.match([ns.key(b"k")]), client.stats(), client.health()):
            try:
                await call
            except FailedPrecondition as e:
                assert "made before a fork" in str(e), e
            else:
                raise AssertionError("not refused")
        await client.close()

    async def main():
        client = aio.Client(sys.argv[1])
        ns = await client.raw_namespace("fork", 65536)
        await ns.match([ns.key(b"k")])
        return client, ns

    loop = asyncio.new_event_loop()
    client, ns = loop.run_until_complete(main())
    child = os.fork()
    if not child:
        asyncio.run(refused(client, ns))
        print("child: done", flush=True)
        os._exit(0)  # the end of the inherited loop would take the parent's wake-up out of their common epoll
    assert os.waitpid(child, 0)[1] == 0
    loop.run_until_complete(ns.match([ns.key(b"k")]))
    loop.run_until_complete(client.close())
    loop.close()
    print("parent: done")
"""


def test_a_forked_child_refuses_and_the_parent_goes_on(endpoint: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK), endpoint],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )
    assert {"child: done", "parent: done"} <= set(done.stdout.split("\n")), done.stdout + done.stderr
