"""vLLM's scheduler does with blocks what it likes; what is stored of them is right all the same."""

from collections.abc import Callable

import pytest

from tests.conftest import RunningDaemon
from tests.engines.vllm_engines import BLOCK, Engine, prompt

Start = Callable[..., Engine]

pytestmark = pytest.mark.timeout(600)
"""Engines take their time to start on a machine that does other things."""

TOKENS = 1000
BLOCKS = TOKENS // BLOCK


def forget(engine: Engine) -> None:
    assert engine.do("reset", connector=False)


@pytest.mark.parametrize("block_tokens", [32, 128])  # 16 has no kernel on a CPU: test_vllm_workers.py
def test_every_block_size_comes_back_and_none_is_taken_for_another(
    block_tokens: int, daemon: RunningDaemon, start_engine: Start
) -> None:
    asked = prompt(500)
    other = start_engine(daemon.endpoint, block_size=64).ready()
    cold = other.generate(asked)
    assert other.counters()["save_blocks"] == 500 // 64
    other.stop()
    engine = start_engine(daemon.endpoint, block_size=block_tokens).ready()
    assert engine.generate(asked)["tokens"] == cold["tokens"]
    counted = engine.counters()
    assert (counted["lookup_hits"], counted["save_blocks"]) == (0, 507 // block_tokens)
    forget(engine)
    assert engine.generate(asked)["tokens"] == cold["tokens"]
    assert engine.counters()["load_blocks"] == 500 // block_tokens


def test_a_prefill_in_chunks_is_stored_whole_and_loaded_whole(daemon: RunningDaemon, start_engine: Start) -> None:
    engine = start_engine(daemon.endpoint, max_num_batched_tokens=200, enable_chunked_prefill=True).ready()
    cold = engine.generate(prompt(TOKENS))
    counted = engine.counters()
    assert counted["save_blocks"] == BLOCKS
    assert counted["saves"] > 1
    forget(engine)
    assert engine.generate(prompt(TOKENS))["tokens"] == cold["tokens"]
    assert engine.counters()["load_blocks"] == BLOCKS


def test_what_requests_generate_is_stored_for_the_next_turn(daemon: RunningDaemon, start_engine: Start) -> None:
    engine = start_engine(daemon.endpoint, block_size=32).ready()
    first = prompt(100)
    answer = engine.generate(first, tokens=60)["tokens"][0]
    assert engine.counters()["save_blocks"] == (100 + 60 - 1) // 32
    forget(engine)
    turn = first + answer + prompt(20, seed=3)
    hit = engine.generate(turn)
    assert engine.counters()["load_blocks"] == (100 + 60 - 1) // 32
    forget(engine)
    alone = start_engine(None, block_size=32).ready()
    assert alone.generate(turn)["tokens"] == hit["tokens"]


def test_preempted_requests_come_to_the_same_tokens_and_store_no_others(
    daemon: RunningDaemon, start_engine: Start
) -> None:
    """Six requests that need 10 blocks each at their end, and a cache of 40."""
    asked = [prompt(230, seed=seed) for seed in range(6)]
    small = {"block_size": 32, "num_gpu_blocks_override": 40, "max_model_len": 1024}
    alone = start_engine(None, block_size=32).ready()
    expected = [alone.generate(one, tokens=80)["tokens"][0] for one in asked]
    alone.stop()
    engine = start_engine(daemon.endpoint, **small).ready()
    came = engine.generate(*asked, tokens=80)
    engine.counters()
    assert engine.do("metric", name="vllm:num_preemptions") > 0, "nobody was preempted"
    assert came["tokens"] == expected
    engine.stop()
    # Every block that was stored meanwhile is loaded by somebody else, who has room for all.
    other = start_engine(daemon.endpoint, block_size=32, max_model_len=1024).ready()
    assert [other.generate(one, tokens=80)["tokens"][0] for one in asked] == expected
    counted = other.counters()
    assert counted["load_failures"] == 0
    assert counted["load_blocks"] >= 6 * (230 // 32)


def test_after_a_reset_nothing_older_is_found_and_others_keep_what_they_have(
    daemon: RunningDaemon, start_engine: Start
) -> None:
    engine, other = start_engine(daemon.endpoint), start_engine(daemon.endpoint)
    cold = engine.ready().generate(prompt(TOKENS))
    assert engine.counters()["save_blocks"] == BLOCKS
    assert engine.do("reset", connector=True)
    assert engine.generate(prompt(TOKENS))["tokens"] == cold["tokens"]
    counted = engine.counters()
    assert (counted["lookup_hits"], counted["save_blocks"]) == (0, 2 * BLOCKS)
    forget(engine)
    assert engine.generate(prompt(TOKENS))["tokens"] == cold["tokens"]
    assert engine.counters()["load_blocks"] == BLOCKS
    other.ready()
    assert other.generate(prompt(TOKENS))["tokens"] == cold["tokens"]
    assert other.counters()["load_blocks"] == BLOCKS


def test_four_engines_at_once_on_one_daemon_load_what_any_of_them_has_stored(
    daemon: RunningDaemon, start_engine: Start
) -> None:
    engines = [start_engine(daemon.endpoint) for _ in range(4)]
    for engine in engines:
        engine.ready()
    shared = [prompt(TOKENS, seed=seed) for seed in range(4)]
    for i, engine in enumerate(engines):
        engine.ask("generate", prompts=shared[i:] + shared[:i])
    came = [engine.answer()["tokens"] for engine in engines]
    for i, tokens in enumerate(came):
        assert tokens == came[0][i:] + came[0][:i]
    for engine in engines:
        engine.counters()
        forget(engine)
    for engine in engines:
        engine.ask("generate", prompts=shared)
    for engine in engines:
        assert engine.answer()["tokens"] == came[0]
    for engine in engines:
        counted = engine.counters()
        assert counted["load_failures"] == 0
        assert counted["load_blocks"] >= len(shared) * BLOCKS


def test_a_prompt_shorter_than_it_pays_to_load_is_computed(daemon: RunningDaemon, start_engine: Start) -> None:
    engine = start_engine(daemon.endpoint, extra={"min_tokens": 4 * BLOCK}).ready()
    for tokens, loaded in ((3 * BLOCK + 5, 0), (4 * BLOCK + 5, 4)):
        cold = engine.generate(prompt(tokens, seed=tokens))
        before = engine.counters()["load_blocks"]
        forget(engine)
        assert engine.generate(prompt(tokens, seed=tokens))["tokens"] == cold["tokens"]
        assert engine.counters()["load_blocks"] - before == loaded
