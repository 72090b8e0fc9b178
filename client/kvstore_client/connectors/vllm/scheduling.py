"""The scheduler's side: which blocks to load, which to save, and which are pinned meanwhile.

Nothing here waits: what the store has is read from shared memory, and orders go to the workers with the step.

A request's blocks are saved as they are computed. The order for them pins them in the engine's pool, so that
nobody writes to them, whatever becomes of the request, until every rank has reported the order. What failed to
load is not promised to the same request again, nor to others until it is stored anew or FAILED_S have passed;
what the engine computes from a load is saved when all of the load is known to have come.
"""

import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore_client import Client, Namespace
from kvstore_client.connectors.vllm.device_memory import on_device
from kvstore_client.connectors.vllm.events import stored_event, stored_of
from kvstore_client.connectors.vllm.figures import Stats, Tally
from kvstore_client.connectors.vllm.groups import need_of, obstacle
from kvstore_client.connectors.vllm.handoff import HANDOFF_S, answer_to, asks_for, promised_by, tail_name, tail_of
from kvstore_client.connectors.vllm.hits import MISS, Hit, longest
from kvstore_client.connectors.vllm.messages import Load, Orders, Report, Run, Save, Space, Stored
from kvstore_client.connectors.vllm.settings import Settings
from kvstore_client.connectors.vllm.spaces import Adapters, Description, Namespaces
from kvstore_client.connectors.vllm.unsure import Unsure
from kvstore_client.errors import KVStoreError

log = logging.getLogger("kvstore_client")

FAILED_MAX, FAILED_S = 65536, 60.0
"""Blocks that failed to load and are remembered, and for how long."""

FREED_SOON_S = 0.1
"""A save younger than this is expected to give its blocks back before preempting somebody would."""

NULL_BLOCK = 0
"""Stands in the engine's tables for blocks that a window has left behind."""


@dataclass
class Tracked:
    """One request of the engine's."""

    request: Any
    space: Space
    conversation: str
    saved: list[int]
    """For each group how many of its leading blocks need no save any more."""
    keys: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    """By rank and group: keys of its leading blocks."""
    hit: Hit = MISS
    waits_until: float = 0.0
    """For what a prefill engine promised."""
    loading: Load | None = None
    refused: bool = False
    """A load has failed: the rest is computed."""
    stale: bool = False
    """Computed before a reset of the cache, or with an adapter that nobody can name: not to be saved."""


@dataclass
class Pinned:
    """Blocks that the engine keeps for a save."""

    order: Save
    blocks: list[Any]
    ranks: int
    since: float
    events: list[Any]
    stored: tuple[int, ...] = ()
    existing: tuple[int, ...] = ()


class SchedulerSide:
    """One scheduler's."""

    def __init__(self, client: Client, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        self._client = client
        self._settings = settings
        self.tally = Tally()
        why = obstacle(vllm_config, kv_cache_config)
        if why:
            log.warning("kvstored: nothing of this model is stored or loaded: %s", why)
        self._groups: tuple[int, ...] = () if why else kv_cache_config.prefix_cacheable_group_ids
        self._needs = [need_of(kv_cache_config.kv_cache_groups[group].kv_cache_spec) for group in self._groups]
        self._hash_tokens: int = kv_cache_config.hash_block_size or vllm_config.cache_config.block_size
        self._stateful = any(need.state for need in self._needs)
        step: int = kv_cache_config.cache_hit_alignment_tokens or vllm_config.cache_config.block_size
        self._step = math.lcm(step, *(need.block_tokens for need in self._needs))
        self.layered: bool = settings.layers and len(self._groups) == len(kv_cache_config.kv_cache_groups) == 1
        """Loads happen in the step that computes the rest. A failure could not be told of one group among several."""
        if self.layered and (vllm_config.max_concurrent_batches > 1 or on_device(vllm_config)):
            self.layered = False  # a failure would be heard of when the next step computes from it already
        if settings.layers and not self.layered:
            log.warning("kvstored: layers is of no effect with several cache groups, overlapping steps, or on a GPU")
        transfer = vllm_config.kv_transfer_config
        self._saves: bool = transfer.is_kv_producer and bool(self._groups)
        self._ranks_all: int = vllm_config.parallel_config.world_size
        events = vllm_config.kv_events_config
        self._publish = bool(events and events.enable_kv_cache_events)
        self._ranks: list[Namespaces] = []
        self._pool: Any = None
        self._era = ""
        self._adapters = Adapters(vllm_config.lora_config)
        self._tracked: dict[str, Tracked] = {}
        self._failed: OrderedDict[bytes, float] = OrderedDict()
        self._loads: list[Load] = []
        self._unsure = Unsure()
        self._last_saves: list[Save] = []
        self._pins: dict[int, Pinned] = {}
        self._pinned_blocks = 0
        self._next_job = 0
        self._events: list[Any] = []

    # -- what the engine tells once

    def describe(self, descriptions: Sequence[Description]) -> None:
        """Every rank's memory, as its worker has described it; until then nothing is found."""
        self._ranks = [Namespaces(self._client, description) for description in descriptions]

    def bind(self, pool: Any) -> None:
        """The engine's pool of blocks."""
        self._pool = pool

    # -- lookups

    def lookup(self, request: Any, computed: int) -> int | None:
        """How many tokens after the `computed` ones can be loaded; None: ask again, they are being stored."""
        tracked = self._track(request)
        tracked.hit = MISS
        if not self._ranks or not self._groups or tracked.refused or request.skip_reading_prefix_cache:
            return 0
        if self._unsure and any(name in self._unsure for name in self._hashes(tracked, 0, 0, computed // self._step)):
            return None
        # The engine computes the last token of a prompt that is found whole; a state must not have had it yet.
        short = self.layered or self._stateful
        most = min(len(request.block_hashes) * self._hash_tokens, request.num_tokens - int(short))
        hit = longest(
            self._needs,
            len(self._ranks),
            computed,
            most,
            self._step,
            lambda rank, group, first, end: self._present(tracked, rank, group, first, end),
        )
        if promised := promised_by(request.kv_transfer_params or {}):
            hit = self._with_tail(tracked, hit if hit.tokens > computed else Hit(computed, slow=False))
            now = time.monotonic()
            tracked.waits_until = tracked.waits_until or now + HANDOFF_S
            wanted = min(promised, most // self._step * self._step if short else request.num_prompt_tokens)
            if hit.tokens < wanted and now < tracked.waits_until:
                return None
        self.tally.add("lookups")
        least = self._settings.min_tokens_ssd if hit.slow else self._settings.min_tokens
        if hit.tokens - computed < least:
            return 0
        tracked.hit = hit
        return hit.tokens - computed

    def _present(self, tracked: Tracked, rank: int, place: int, first: int, end: int) -> tuple[int, bool]:
        keys = self._keys(tracked, rank, place, end)[first:end]
        found = self._namespace(tracked, rank, place).match(keys, wait=False)
        blocks = found.blocks
        if self._failed:
            now = time.monotonic()
            blocks = next((i for i in range(blocks) if self._failed.get(keys[i], 0.0) > now), blocks)
        return blocks, "ssd" in found.tiers[:blocks]

    def _with_tail(self, tracked: Tracked, hit: Hit) -> Hit:
        """With the block at the prompt's end that is not full, if all before it, and it, are in the store."""
        tokens = self._tail(tracked, hit.tokens)
        if not tokens or self.layered:
            return hit
        run = self._tail_run(tracked, hit.tokens, tokens, [])
        for rank in range(len(self._ranks)):
            namespace = self._namespace(tracked, rank, 0)
            if not namespace.match([namespace.key(run.hashes[0])], wait=False).blocks:
                return hit
        return Hit(hit.tokens + len(tokens), hit.slow)

    def _tail(self, tracked: Tracked, full_tokens: int) -> list[int]:
        """Of a model with one group of full attention: what follows the prompt's full blocks."""
        whole = tracked.request.num_prompt_tokens // self._step * self._step
        if len(self._needs) > 1 or not self._needs[0].whole or full_tokens != whole:
            return []
        return tail_of(tracked.request, full_tokens)

    def _tail_run(self, tracked: Tracked, full_tokens: int, tokens: list[int], table: Sequence[int]) -> Run:
        at = full_tokens // self._step
        parent = self._hashes(tracked, 0, at - 1, at)[0] if at else b""
        return Run(self._groups[0], at, parent, [tail_name(parent, tokens)], list(table[at : at + 1]))

    def _namespace(self, tracked: Tracked, rank: int, place: int) -> Namespace:
        return self._ranks[rank].of(self._groups[place], tracked.space)

    def _keys(self, tracked: Tracked, rank: int, place: int, end: int) -> list[bytes]:
        keys = tracked.keys.setdefault((rank, place), [])
        if len(keys) < end:
            namespace = self._namespace(tracked, rank, place)
            keys += [namespace.key(name) for name in self._hashes(tracked, place, len(keys), end)]
        return keys

    def _hashes(self, tracked: Tracked, place: int, first: int, end: int) -> list[bytes]:
        """Of a group's blocks: the hash at the end of each, which stands for all before it."""
        scale = self._needs[place].block_tokens // self._hash_tokens
        return [bytes(name) for name in tracked.request.block_hashes[first * scale + scale - 1 : end * scale : scale]]

    # -- requests

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            parameters, adapter = request.kv_transfer_params or {}, self._adapters.name(request.lora_request)
            tracked = Tracked(
                request=request,
                space=Space(adapter or "", request.cache_salt or "", self._era),
                conversation=str(parameters.get("conversation", ""))[:64],
                saved=[0] * len(self._groups),
                refused=adapter is None,
                stale=adapter is None,
            )
            self._tracked[request.request_id] = tracked
        return tracked

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine has taken blocks for `tokens` that `lookup` promised."""
        tracked = self._track(request)
        if not tokens:
            return
        end = tracked.hit.tokens
        runs = [
            run
            for place, need in enumerate(self._needs)
            if (run := self._run(tracked, place, tables, max((end - tokens) // need.block_tokens, 0), end)) is not None
        ]
        if tail := end % self._step:
            runs.append(self._tail_run(tracked, end - tail, self._tail(tracked, end - tail), tables[self._groups[0]]))
        layered = self.is_layered(request)
        order = Load(request.request_id, request.num_prompt_tokens, tracked.space, runs, layered)
        if layered:
            self._unsure.expect(order, tables[self._groups[0]])
        tracked.loading = order
        tracked.saved = [end // need.block_tokens for need in self._needs]
        self._loads.append(order)
        self.tally.add("lookup_hits")
        self.tally.add("lookup_tokens", tokens)

    def is_layered(self, request: Any) -> bool:
        """Whether what was found for a request is loaded in the step that computes the rest; never from the SSD."""
        return self.layered and not self._tracked[request.request_id].hit.slow

    def _run(
        self, tracked: Tracked, place: int, tables: Sequence[Sequence[int]], first: int, tokens: int
    ) -> Run | None:
        """A group's blocks from `first` to the last full one of `tokens`, without those that a window left behind."""
        table = tables[self._groups[place]]
        end = min(tokens // self._needs[place].block_tokens, len(table))
        if NULL_BLOCK in table[first:end]:
            first = next(i + 1 for i in range(end - 1, first - 1, -1) if table[i] == NULL_BLOCK)
        if first >= end:
            return None
        names = self._hashes(tracked, place, max(first - 1, 0), end)
        parent = names.pop(0) if first else b""
        return Run(self._groups[place], first, parent, names, list(table[first:end]))

    # -- orders

    def orders(self, output: Any) -> Orders:
        """What the workers are to do with this step."""
        for name in output.preempted_req_ids or ():
            if (preempted := self._tracked.get(name)) is not None:
                preempted.saved, preempted.stale = [0] * len(self._groups), False
        saves, self._last_saves = self._last_saves, []
        loads, self._loads = self._loads, []
        if self._saves:
            cached = output.scheduled_cached_reqs
            computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            blocks = output.kv_connector_block_state
            for name, tokens in output.num_scheduled_tokens.items():
                tracked = self._tracked.get(name)
                if tracked is None or tracked.loading is not None:
                    continue  # what the step computes from a load is saved when every rank has it
                tokens += computed[name]
                states = self._states(tracked, blocks.boundary_state_offloads.get(name, ()), tokens)
                if not states and not self._due(tracked, tokens):
                    continue
                order = self._save(tracked, blocks.get_block_ids(name), tokens, states)
                if order is not None:
                    saves.append(order)
        return Orders(loads, saves, computing=output.total_num_scheduled_tokens > 0)

    def _due(self, tracked: Tracked, tokens: int) -> bool:
        """Whether some group has a full block, whose tokens are known, that was not saved yet."""
        tokens = self._saveable(tracked, tokens)
        return any(
            tokens // need.block_tokens > saved and not need.state
            for need, saved in zip(self._needs, tracked.saved, strict=True)
        )

    def _states(self, tracked: Tracked, offers: Sequence[tuple[int, int, int]], tokens: int) -> list[Run]:
        """Blocks that have, after this step, a state at the end of one of the request's blocks.

        The engine offers them: (group, block, tokens before). No table says it. Each is a root of its own: what
        comes before it in its group is mostly not kept.
        """
        tokens, runs = self._saveable(tracked, tokens), []
        for group, block, at in offers:
            place = self._groups.index(group)
            end, rest = divmod(at, self._needs[place].block_tokens)
            if rest or at > tokens or end <= tracked.saved[place]:
                continue
            tracked.saved[place] = end
            runs.append(Run(group, 0, b"", self._hashes(tracked, place, end - 1, end), [block]))
        return runs

    def _saveable(self, tracked: Tracked, tokens: int) -> int:
        if tracked.stale:
            return 0
        most = tokens if self._settings.save_generated else min(tokens, tracked.request.num_prompt_tokens)
        return min(most, len(tracked.request.block_hashes) * self._hash_tokens)

    def _save(
        self, tracked: Tracked, tables: Sequence[Sequence[int]], tokens: int, extra: Sequence[Run] = ()
    ) -> Save | None:
        """Pins what is to be saved of the first `tokens`; None where there is nothing, or too much is pinned."""
        assert self._pool is not None, "the engine binds its pool before it schedules"
        tokens = self._saveable(tracked, tokens)
        runs = [
            run
            for place, saved in enumerate(tracked.saved)
            if not self._needs[place].state and (run := self._run(tracked, place, tables, saved, tokens)) is not None
        ]
        named = list(runs)
        runs += extra
        count = sum(len(run.blocks) for run in runs)
        if not count:
            return None
        if self._pinned_blocks + count > self._settings.pinned * len(self._pool.blocks):
            self.tally.add("save_dropped", count)
            return None
        request = tracked.request
        order = Save(
            job=self._next_job,
            request=request.request_id,
            prompt_tokens=request.num_prompt_tokens,
            space=tracked.space,
            runs=runs,
            conversation=tracked.conversation,
            tokens_generated=request.num_output_tokens,
        )
        self._next_job += 1
        blocks = [self._pool.blocks[block] for run in runs for block in run.blocks]
        self._pool.touch(blocks)
        self._pinned_blocks += len(blocks)
        events = [stored_event(request, run, self._block_tokens(run)) for run in named] if self._publish else []
        self._pins[order.job] = Pinned(order, blocks, self._ranks_all, time.monotonic(), events)
        tracked.saved = [
            saved if need.state else max(saved, tokens // need.block_tokens)
            for need, saved in zip(self._needs, tracked.saved, strict=True)
        ]
        return order

    def _block_tokens(self, run: Run) -> int:
        return self._needs[self._groups.index(run.group)].block_tokens

    def finished(self, request: Any, tables: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """The request's last blocks are saved with the next step; answers what to tell who asked for the prefill."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or not self._saves or (tracked.loading is not None and not tracked.loading.layered):
            return None
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        handed_on = asks_for(request.kv_transfer_params or {}) and computed >= request.num_prompt_tokens
        tail: list[Run] = []
        if handed_on and not tracked.stale:
            whole = request.num_prompt_tokens // self._step * self._step
            if tokens := self._tail(tracked, whole):
                tail.append(self._tail_run(tracked, whole, tokens, tables[self._groups[0]]))
        if tail or self._due(tracked, computed):
            order = self._save(tracked, tables, computed, tail)
            if order is not None:
                self._last_saves.append(order)
            elif handed_on:
                return answer_to(0)  # too much is pinned: whoever decodes need not wait
        return (
            answer_to(request.num_prompt_tokens if tail else self._saveable(tracked, computed)) if handed_on else None
        )

    # -- what came of them

    def heard(self, report: Report | None, loaded: Sequence[str]) -> None:
        """What the workers say after a step; `loaded` are requests whose loads have ended."""
        settled, wrong = self._unsure.settle(report.failed if report is not None else {})
        if wrong:
            self._pool.evict_blocks(wrong)
        if report is not None:
            for request, blocks in report.failed.items():
                self._load_failed(request, blocks)
            for job, stored in report.saves.items():
                self._save_ended(job, stored)
        for request in (*loaded, *settled):
            tracked = self._tracked.get(request)
            if tracked is not None:
                tracked.loading = None

    def _load_failed(self, request: str, blocks: tuple[int, ...]) -> None:
        tracked = self._tracked.get(request)
        if tracked is None or tracked.loading is None:
            return
        tracked.refused = True
        until = time.monotonic() + FAILED_S
        for run, n in zip(tracked.loading.runs, blocks, strict=True):
            place = self._groups.index(run.group)
            if n < len(run.blocks):
                for rank in range(len(self._ranks)):
                    key = self._namespace(tracked, rank, place).key(run.hashes[n])
                    self._failed[key] = until
                    self._failed.move_to_end(key)
            tracked.saved[place] = min(tracked.saved[place], run.depth + n) if len(self._groups) == 1 else 0
        while len(self._failed) > FAILED_MAX:
            self._failed.popitem(last=False)

    def _save_ended(self, job: int, stored: Stored) -> None:
        pinned = self._pins[job]
        pinned.ranks -= stored.ranks
        pinned.stored = tuple(map(min, pinned.stored or stored.blocks, stored.blocks))
        pinned.existing = tuple(map(max, pinned.existing or stored.existing, stored.existing))
        if pinned.ranks > 0:
            return
        del self._pins[job]
        self._pinned_blocks -= len(pinned.blocks)
        self._pool.free_blocks(reversed(pinned.blocks))
        if pinned.events:
            self._events += stored_of(pinned.events, pinned.stored[: len(pinned.events)])
        if self._failed:
            self._forget_failed(pinned)

    def _forget_failed(self, pinned: Pinned) -> None:
        """What was stored anew can be loaded again; what is there as before, and failed to load, is not tried again."""
        for run, existing, n in zip(pinned.order.runs, pinned.existing, pinned.stored, strict=True):
            for rank in self._ranks:
                namespace = rank.of(run.group, pinned.order.space)
                for name in run.hashes[existing:n]:
                    self._failed.pop(namespace.key(name), None)

    def take_events(self) -> list[Any]:
        """KV events of blocks that were stored since the last time."""
        events, self._events = self._events, []
        return events

    def take_stats(self) -> Stats | None:
        """What was counted since the last time."""
        return self.tally.take()

    # -- the engine's other questions

    @property
    def saving(self) -> bool:
        """Whether blocks are pinned: the engine must go on stepping to hear when they are saved."""
        return bool(self._pins)

    @property
    def freeing_soon(self) -> bool:
        """Whether blocks that nobody but a save has are expected back at once."""
        old = time.monotonic() - FREED_SOON_S
        return any(
            pinned.since > old and any(block.ref_cnt == 1 for block in pinned.blocks) for pinned in self._pins.values()
        )

    def reset(self) -> bool:
        """From now on this engine finds nothing that it or others stored before, and others find nothing of its own.

        Others keep what they have: weights may have changed here and not there. What running requests have
        computed is not saved, unless they begin again.
        """
        self._era = secrets.token_hex(16)
        for tracked in self._tracked.values():
            tracked.space = tracked.space._replace(era=self._era)
            tracked.keys.clear()
            tracked.stale = tracked.request.num_computed_tokens > 0
        return True

    def close(self) -> None:
        """Ends the session with the daemon."""
        try:
            self._client.close()
        except KVStoreError as e:
            log.info("closing: %s", e)
