"""What vLLM's connector tells the store of a request, and which of the engine's blocks it keeps for saves."""

import tempfile
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually
from tests.engines.vllm_engines import BLOCK, Engine, prompt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM imports says that it is deprecated
    from vllm import SamplingParams
    from vllm.config import CacheConfig
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        MambaSpec,
    )
    from vllm.v1.request import Request

    from kvstore_client.connectors.vllm import scheduling
    from kvstore_client.connectors.vllm.messages import Report, Space, Stored
    from kvstore_client.connectors.vllm.settings import Settings
    from kvstore_client.connectors.vllm.spaces import Description, Group, Namespaces

Start = Callable[..., Engine]

pytestmark = pytest.mark.timeout(600)
"""Engines take their time to start on a machine that does other things."""


def forget(engine: Engine) -> None:
    assert engine.do("reset", connector=False)


def test_the_store_is_told_which_conversation_it_is_and_how_much_was_generated(
    daemon: RunningDaemon, start_engine: Start
) -> None:
    engine = start_engine(daemon.endpoint, block_size=32).ready()
    engine.do("watch_hints")
    with Client(daemon.endpoint) as client:

        def conversations() -> int:
            return int(client.stats()["counters"]["conversations"])

        for seed, name, known in ((1, "", 0), (2, "one", 1), (3, "two", 2), (4, "two", 2)):
            params = {"conversation": name} if name else None
            engine.generate(prompt(100, seed=seed), tokens=60, params=params)
            engine.counters()
            assert conversations() == known
            # The prompt is stored when it is computed, then a block for every 32 tokens that are generated.
            hints = engine.do("hinted")
            assert [of for of, _ in hints] == [name] * len(hints)
            generated = [tokens for _, tokens in hints]
            assert generated[0] == 0
            assert generated[1:] == sorted(set(generated[1:]))
            assert generated[-1] > 25


def test_below_a_length_of_its_own_a_prompt_is_computed_rather_than_loaded_from_the_ssd(
    start_daemon: Callable[..., RunningDaemon], start_engine: Start
) -> None:
    blocks = 4
    longer = prompt(blocks * BLOCK + 5)
    shorter = longer[: (blocks - 1) * BLOCK + 5]
    with tempfile.TemporaryDirectory(prefix="kvstored-ssd-") as disk:
        daemon = start_daemon(ssd__path=f"{disk}/ssd", ssd__size="256MiB", ssd__write_back="through")
        extra = {"min_tokens_ssd": blocks * BLOCK, "load_s": 10.0}
        engine = start_engine(daemon.endpoint, extra=extra).ready()
        expected = {len(one): engine.generate(one)["tokens"] for one in (longer, shorter)}
        engine.counters()
        with Client(daemon.endpoint) as client:
            eventually(lambda: client.stats()["ssd"]["blocks"] == blocks, 20, "all blocks to be on the SSD")
        assert daemon.stop() == 0
        daemon.restart()
        with Client(daemon.endpoint) as client:
            eventually(lambda: client.stats()["ssd"]["state"] == "open", 20, "the SSD to be open")
        eventually(lambda: engine.do("connected"), 20, "the engine to be connected again")
        for asked, loaded in ((shorter, 0), (longer, blocks), (shorter, blocks - 1)):
            before = engine.counters().get("load_blocks", 0)
            forget(engine)
            assert engine.generate(asked)["tokens"] == expected[len(asked)]
            assert engine.counters().get("load_blocks", 0) - before == loaded, "in memory, less is worth a load"


def test_what_is_more_than_the_share_of_the_engines_blocks_for_saves_is_not_saved(
    daemon: RunningDaemon, start_engine: Start
) -> None:
    small = {"block_size": 32, "num_gpu_blocks_override": 64, "max_model_len": 1024}
    engine = start_engine(daemon.endpoint, extra={"pinned": 0.1}, **small).ready()
    engine.generate(prompt(7 * 32 + 5, seed=1))
    counted = engine.counters()
    assert (counted.get("save_blocks", 0), counted["save_dropped"] >= 7) == (0, True), "of 64 blocks, 6 may be kept"
    engine.generate(prompt(6 * 32 + 5, seed=2))
    assert engine.counters()["save_blocks"] == 6


def request_of(tokens: list[int], block_tokens: int, params: dict[str, Any] | None = None) -> Any:
    """A request as the engine has it."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(block_tokens, sha256)
    sampling = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": params} if params else None)
    return Request("one", tokens, sampling, None, block_hasher=hasher)


def step_of(request: Any, tables: tuple[list[int], ...], tokens: int, *states: tuple[int, int, int]) -> Any:
    """A step of the engine that computes a prompt whole, and what it offers of states: (group, block, tokens)."""
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    blocks = SimpleNamespace(get_block_ids=lambda _: tables, boundary_state_offloads={request.request_id: states})
    return SimpleNamespace(
        preempted_req_ids=None,
        scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id, num_computed_tokens=0)],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={request.request_id: tokens},
        total_num_scheduled_tokens=tokens,
        kv_connector_block_state=blocks,
    )


FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
STATE = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")


def side_of(client: Client, *specs: KVCacheSpec) -> scheduling.SchedulerSide:
    """The scheduler's side for a model with these cache groups."""
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    config = SimpleNamespace(
        cache_config=CacheConfig(block_size=16),
        kv_transfer_config=SimpleNamespace(is_kv_producer=True),
        parallel_config=SimpleNamespace(world_size=1),
        lora_config=None,
        kv_events_config=None,
    )
    kv_config = KVCacheConfig(num_blocks=17, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=16)
    return scheduling.SchedulerSide(client, Settings(pinned=0.5), config, kv_config)


def test_of_states_those_are_saved_that_the_engine_names_at_the_end_of_a_block(daemon: RunningDaemon) -> None:
    """vLLM's own pool and request. What else is in its table of states is never taken for one."""
    with Client(daemon.endpoint) as client:
        side = side_of(client, FULL, STATE)
        pool = BlockPool(num_gpu_blocks=17, enable_caching=True, hash_block_size=16)
        side.bind(pool)
        request = request_of(list(range(70)), 16)
        assert side.lookup(request, 0) == 0
        numbers = [block.block_id for block in pool.get_new_blocks(8)]
        tables = (numbers[:5], [0, numbers[5], numbers[6]])
        offers = (1, numbers[5], 64), (1, numbers[6], 70), (1, numbers[6], 48), (1, numbers[6], 96)
        (order,) = side.orders(step_of(request, tables, 70, *offers)).saves
        attention, state = order.runs
        assert list(attention.blocks) == numbers[:4]
        assert (state.group, state.depth, list(state.blocks)) == (1, 0, [numbers[5]])
        assert list(state.hashes) == [request.block_hashes[3]], "the name of all 64 tokens before"
        assert [pool.blocks[number].ref_cnt for number in numbers] == [2, 2, 2, 2, 1, 2, 1, 1]
        assert not side.orders(step_of(request, tables, 70, offers[0])).saves, "once is enough"
        side.heard(Report({order.job: Stored(1, (4, 1), (0, 0))}), [])
        assert [pool.blocks[number].ref_cnt for number in numbers] == [1] * 8
        # Preempted, it begins again in other blocks: what the engine offers then is not taken for saved.
        anew = step_of(request, (numbers[:4], [0, numbers[7]]), 64, (1, numbers[7], 64))
        anew.preempted_req_ids = [request.request_id]
        (order,) = side.orders(anew).saves
        assert [list(run.blocks) for run in order.runs] == [numbers[:4], [numbers[7]]]
        # Of a request that has ended nothing is taken any more, and what is being saved of it stays pinned.
        side.finished(request, tables)
        assert not side.orders(step_of(request, tables, 96, (1, numbers[6], 96))).saves
        pool.free_blocks([pool.blocks[number] for number in numbers])
        assert [number for number in numbers if pool.blocks[number].ref_cnt] == [*numbers[:4], numbers[7]]


def test_a_decode_engine_waits_for_the_last_state_that_is_of_use_and_for_none_after(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at the very end of a prompt is not: it has had the token that gives the next."""
    monkeypatch.setattr(scheduling, "HANDOFF_S", 600.0)
    description = Description((Group(0, 16, 64, {}, "attention"), Group(1, 32, 64, {}, "states")))
    with Client(daemon.endpoint) as client:
        side = side_of(client, FULL, STATE)
        side.describe([description])
        spaces = Namespaces(client, description)
        attention, states = (spaces.of(group, Space()) for group in (0, 1))
        for tokens, end in ((70, 64), (64, 32), (65, 64)):
            promised = {"do_remote_prefill": True, "stored_tokens": tokens}
            request = request_of(list(range(tokens, 2 * tokens)), 16, promised)
            names = [bytes(name) for name in request.block_hashes]
            assert side.lookup(request, 0) is None
            keys = [attention.key(name) for name in names]
            assert attention.put(keys, bytes(64 * len(keys))).stored == 4
            assert side.lookup(request, 0) is None, "attention alone is of no use"
            states.put([states.key(names[end // 16 - 1])], bytes(64))
            assert side.lookup(request, 0) == end


def test_the_engine_is_told_to_wait_a_moment_for_blocks_that_nobody_but_a_save_has(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own pool and request; rather than preempt somebody it asks whether blocks are about to be free."""
    monkeypatch.setattr(scheduling, "FREED_SOON_S", 60.0)
    with Client(daemon.endpoint) as client:
        side = side_of(client, FULL)
        pool = BlockPool(num_gpu_blocks=17, enable_caching=True, hash_block_size=16)
        side.bind(pool)
        request = request_of(list(range(70)), 16)
        assert side.lookup(request, 0) == 0
        blocks = pool.get_new_blocks(5)
        (order,) = side.orders(step_of(request, ([block.block_id for block in blocks],), 70)).saves
        assert list(order.runs[0].blocks) == [block.block_id for block in blocks[:4]], "whole blocks"
        assert (side.saving, side.freeing_soon) == (True, False), "the request has them itself"
        side.finished(request, ([block.block_id for block in blocks],))
        pool.free_blocks(reversed(blocks))
        assert pool.get_num_free_blocks() == 16 - 4
        assert side.freeing_soon
        monkeypatch.setattr(scheduling, "FREED_SOON_S", 0.0)
        assert not side.freeing_soon, "a save that takes long is not waited for"
        monkeypatch.setattr(scheduling, "FREED_SOON_S", 60.0)
        side.heard(Report({order.job: Stored(1, (4,), (0,))}), [])
        assert (side.saving, side.freeing_soon) == (False, False)
        assert pool.get_num_free_blocks() == 16
