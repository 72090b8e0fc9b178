"""A worker's side: loads and saves in threads of their own, and what came of them.

The engine's thread only puts jobs into queues and takes results out. A job always ends: what the daemon has
not answered in `load_s` or `timeout_s` is a block not loaded, or not saved. A load is reported when its
thread is done with it, never by a clock, so that nothing is written into a block that the engine has given
to somebody else; a save's blocks stay pinned until it is reported.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kvstore_client import Client, Hint, Namespace
from kvstore_client.connectors.vllm.copies import GroupMemory, expect_read_only_views, memory_of, rows_of
from kvstore_client.connectors.vllm.device_memory import DeviceMemory, Mark, mark
from kvstore_client.connectors.vllm.figures import Stats, Tally
from kvstore_client.connectors.vllm.groups import obstacle
from kvstore_client.connectors.vllm.layered import LayeredLoad, LayeredLoads
from kvstore_client.connectors.vllm.messages import Load, Orders, Report, Run, Save, Stored
from kvstore_client.connectors.vllm.settings import Settings
from kvstore_client.connectors.vllm.spaces import Description, Namespaces, Rank, describe_group
from kvstore_client.errors import InvalidArgument, KVStoreError, ResourceExhausted

log = logging.getLogger("kvstore_client")

PART_BYTES = 64 << 20
"""Held or reserved at once; a daemon that has less to give is asked for less."""

IDLE_WAIT_S = 0.005
"""How long a step that computes nothing waits for a job to end: without it the engine would only spin."""

CLOSE_S = 5.0


class Loaded(NamedTuple):
    """A load that has ended: how many leading blocks of each run are there."""

    order: Load
    blocks: tuple[int, ...]


class WorkerSide:
    """One worker's."""

    def __init__(self, client: Client, settings: Settings, vllm_config: Any, kv_cache_config: Any, rank: Rank) -> None:
        self._client = client
        self._settings = settings
        self._config = vllm_config
        self._kv_config = kv_cache_config
        self._rank = rank
        self.tally = Tally()
        self.description: Description | None = None
        self._memory: dict[int, GroupMemory | DeviceMemory] = {}
        self._namespaces: Namespaces
        self._loads: queue.SimpleQueue[tuple[Load | LayeredLoad, float, Mark] | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[tuple[Save, float, Mark] | None] = queue.SimpleQueue()
        self._loaded: deque[Loaded] = deque()
        self._saved: deque[tuple[int, Stored]] = deque()
        self._under_way = 0
        self._ended = threading.Event()
        self._report = Report()
        self._bad_blocks: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._layered = LayeredLoads()
        self._rows_until: dict[str, int] = {}
        self._rows = 0

    # -- the engine's memory

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Takes the engine's memory as it is. Raises InvalidArgument for a layout whose blocks cannot be copied.

        Of a model that cannot be kept nothing is taken: the scheduler, which knows it too, orders nothing.
        """
        if obstacle(self._config, self._kv_config):
            return
        expect_read_only_views()
        groups = []
        for number in self._kv_config.prefix_cacheable_group_ids:
            group = self._kv_config.kv_cache_groups[number]
            rows, names, layers = [], [], {}
            for name in group.layer_names:
                if name not in kv_caches:
                    continue  # of another rank, or one that shares the memory of a layer before it
                parts = kv_caches[name]
                parts = list(parts) if isinstance(parts, list | tuple) else [parts]
                mine = [rows_of(name, part, self._kv_config.num_blocks) for part in parts]
                rows += mine
                names += [name] * len(mine)
                layers[name] = [(p.shape[1:], p.dtype, row.shape[1]) for p, row in zip(parts, mine, strict=True)]
            if not rows:
                raise InvalidArgument(
                    f"this rank has no layers in cache group {number}: {', '.join(group.layer_names)}"
                )
            spec = group.kv_cache_spec
            groups.append(describe_group(self._config, self._settings, self._rank, number, spec, layers))
            self._memory[number] = memory = memory_of(rows, names)
            self._rows_until.update(memory.rows_until)
            self._rows = max(self._rows, len(rows))
        self.description = Description(tuple(groups))
        self._namespaces = Namespaces(self._client, self.description)
        for i in range(self._settings.load_threads):
            self._start(f"kvstore-load-{i}", self._load_all)
        self._start("kvstore-save", self._save_all)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    # -- what the engine's thread calls

    def begin_loads(self, orders: Orders) -> None:
        """Hands loads to their threads."""
        now, behind = time.monotonic(), mark() if orders.loads else None
        layered = []
        for order in orders.loads:
            if order.layered:
                layered.append(LayeredLoad(order))
                self._loads.put((layered[-1], now, behind))
            else:
                self._under_way += 1
                self._loads.put((order, now, behind))
        self._layered.begin(layered)

    def wait_for_layer(self, name: str) -> None:
        """Until what the step loads of this layer is there, or given up."""
        self._layered.wait(self._rows_until.get(name, self._rows))

    def begin_saves(self, orders: Orders) -> None:
        """Hands saves to their thread; the blocks are computed by now.

        None of them from what a layered load of this step has brought, or not: that is saved when all ranks have it.
        """
        now, behind = time.monotonic(), mark() if orders.saves else None
        for load in self._layered.take(self._rows):
            (run,) = load.order.runs
            if load.blocks < len(run.blocks):
                self._report.failed[load.order.request] = (load.blocks,)
                self._bad_blocks.update(run.blocks[load.blocks :])
        for order in orders.saves:
            self._under_way += 1
            self._saves.put((order, now, behind))

    def take_ended(self, orders: Orders) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, and of those the ones that failed.

        Waits a moment where the engine has nothing else to do.
        """
        if self._under_way and not orders.computing and not self._loaded and not self._saved:
            self._ended.wait(IDLE_WAIT_S)
        self._ended.clear()
        done: set[str] = set()
        failed: set[str] = set()
        while self._loaded:
            order, blocks = self._loaded.popleft()
            self._under_way -= 1
            done.add(order.request)
            if blocks != tuple(len(run.blocks) for run in order.runs):
                failed.add(order.request)
                self._report.failed[order.request] = blocks
                self._bad_blocks.update(
                    block for run, n in zip(order.runs, blocks, strict=True) for block in run.blocks[n:]
                )
        while self._saved:
            job, stored = self._saved.popleft()
            self._under_way -= 1
            self._report.saves[job] = stored
        return done, failed

    def take_bad_blocks(self) -> set[int]:
        """Blocks that failed to load, of the loads taken last; of a model with one group only."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad if len(self._kv_config.kv_cache_groups) == 1 else set()

    def take_report(self) -> Report | None:
        """For the scheduler's side."""
        report, self._report = self._report, Report()
        return report if report.saves or report.failed else None

    def take_stats(self) -> Stats | None:
        """What was counted since the last time."""
        return self.tally.take()

    def close(self) -> None:
        """Ends the threads, after the job each has; then the client."""
        for _ in self._threads:
            self._loads.put(None)
        self._saves.put(None)
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
        self._client.close()

    # -- loads, in their threads

    def _load_all(self) -> None:
        while (item := self._loads.get()) is not None:
            load, since, behind = item
            order = load.order if isinstance(load, LayeredLoad) else load
            if isinstance(load, LayeredLoad):
                blocks: tuple[int, ...] = (self._load_layered(load),)
            else:
                blocks = self._load(order, since + self._settings.load_s, behind)
            self.tally.took("load_seconds", order.prompt_tokens, time.monotonic() - since)
            self.tally.add("loads")
            if blocks != tuple(len(run.blocks) for run in order.runs):
                self.tally.add("load_failures")
            if not order.layered:
                self._loaded.append(Loaded(order, blocks))
                self._ended.set()

    def _load_layered(self, load: LayeredLoad) -> int:
        """All that is held at once, layer by layer; answers how many blocks.

        The daemon has `timeout_s` to answer, as always, though the step waits less: else it cost the session.
        """
        (run,) = load.order.runs
        copied = 0
        try:
            namespace, memory = self._namespaces.of(run.group, load.order.space), self._memory[run.group]
            assert isinstance(memory, GroupMemory), "loads by layers are of the host's memory"
            keys = [namespace.key(name) for name in run.hashes]
            with namespace.acquire(keys, timeout_s=self._settings.timeout_s) as lease:
                if len(lease) and load.begin(len(lease)):
                    memory.fill_by_rows(run.blocks[: len(lease)], lease.views, load.copied)
                    copied = len(lease)
        except KVStoreError as e:
            log.info("0 of %d blocks were loaded: %s", len(run.blocks), e)
        except Exception:
            log.exception("a load failed; %d blocks are computed", len(run.blocks))
        finally:
            load.end(failed=not copied)
        self.tally.add("load_blocks", copied)
        self.tally.add("load_bytes", copied * self._memory[run.group].block_bytes)
        return copied

    def _load(self, order: Load, until: float, after: Mark) -> tuple[int, ...]:
        blocks: list[int] = []
        for run in order.runs:
            complete = all(n == len(run.blocks) for n, run in zip(blocks, order.runs, strict=False))
            blocks.append(self._load_run(order, run, until, after) if complete else 0)
        return tuple(blocks)

    def _load_run(self, order: Load, run: Run, until: float, after: Mark) -> int:
        """How many leading blocks were loaded. Only this much of the engine's memory is as the store has it."""
        done = 0
        try:
            namespace, memory = self._namespaces.of(run.group, order.space), self._memory[run.group]
            keys = [namespace.key(name) for name in run.hashes]
            part = max(PART_BYTES // memory.block_bytes, 1)
            while done < len(keys) and (left_s := until - time.monotonic()) > 0 and self._client.connected:
                end = min(done + part, len(keys))
                try:
                    came = memory.load(namespace, keys[done:end], run.blocks[done:end], after, left_s)
                except ResourceExhausted:
                    if part == 1:
                        raise
                    part = max(part // 4, 1)
                    continue
                if not came:
                    break
                done += came
        except KVStoreError as e:
            log.info("%d of %d blocks were loaded: %s", done, len(run.blocks), e)
        except Exception:
            log.exception("a load failed; %d of %d blocks are computed", len(run.blocks) - done, len(run.blocks))
        if done:
            self.tally.add("load_blocks", done)
            self.tally.add("load_bytes", done * self._memory[run.group].block_bytes)
        return done

    # -- saves, in their thread

    def _save_all(self) -> None:
        while (item := self._saves.get()) is not None:
            order, since, behind = item
            began = time.thread_time()
            came = [self._save_run(order, run, since, behind) for run in order.runs]
            self.tally.add("saves")
            self.tally.add("save_cpu_seconds", time.thread_time() - began)
            self.tally.took("save_seconds", order.prompt_tokens, time.monotonic() - since)
            stored = Stored(1, tuple(done for done, _ in came), tuple(existing for _, existing in came))
            self._saved.append((order.job, stored))
            self._ended.set()

    def _save_run(self, order: Save, run: Run, since: float, after: Mark) -> tuple[int, int]:
        """How many leading blocks the store has by now, and how many of them it had before."""
        total = len(run.blocks)
        if time.monotonic() - since > self._settings.save_s:
            self.tally.add("save_dropped", total)
            return 0, 0
        done = existing = 0
        try:
            if self._client.connected:
                namespace = self._namespaces.of(run.group, order.space)
                keys = [namespace.key(name) for name in run.hashes]
                existing = namespace.match(keys).blocks
                self.tally.add("save_existing", existing)
                done = self._put(order, run, namespace, keys, existing, after)
        except KVStoreError as e:
            log.info("blocks are not saved: %s", e)
        except Exception:
            log.exception("a save failed")
        if done < total:
            self.tally.add("save_rejected", total - done)
        return done, existing

    def _put(self, order: Save, run: Run, namespace: Namespace, keys: list[bytes], done: int, after: Mark) -> int:
        """Stores what comes after the first `done`; answers how many leading blocks are stored."""
        memory = self._memory[run.group]
        # Of the chain before, only the parent of the first block and its depth matter.
        before = [namespace.key(run.parent)] * run.depth if run.depth else []
        hint = Hint(conversation=order.conversation, tokens_generated=order.tokens_generated)
        part = max(PART_BYTES // memory.block_bytes, 1)
        while done < len(keys):
            end = min(done + part, len(keys))
            try:
                result = memory.store(
                    namespace, before + keys[:end], run.depth + done, run.blocks[done:end], after, hint
                )
            except ResourceExhausted:
                if part == 1:
                    raise
                part = max(min(part, len(keys) - done) // 4, 1)
                continue
            self.tally.add("save_blocks", result.stored)
            self.tally.add("save_bytes", result.stored * memory.block_bytes)
            if result.existing:
                self.tally.add("save_existing", result.existing)
            if result.rejected:
                log.info("%d of %d blocks are not saved: %s", result.rejected, end - done, result.error)
                break
            done = end
        return done
