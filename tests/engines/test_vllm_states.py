"""vLLM with layers that have a state (linear attention) beside layers of attention.

A prefix ends where both are in the store: attention in whole blocks, a state where the engine has kept one. With
its defaults that is at a prompt's last full block; told so, wherever a step of it ends with a block. What the
store has of states is compared by its numbers (vllm_states.py): tokens would not tell a wrong one.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.conftest import RunningDaemon, eventually
from tests.engines.vllm_engines import Engine, prompt
from tests.engines.vllm_states import apart, states_of

Start = Callable[..., Engine]

pytestmark = pytest.mark.timeout(900)
"""Engines take their time to start on a machine that does other things."""

BLOCK = 256
"""Tokens of this model's blocks: as many as make a block of attention as large as a state."""

HYBRID = {"dtype": "bfloat16"}
"""The only one that linear attention has on a CPU."""

PATIENT = {"save_s": 30.0, "load_s": 30.0, "timeout_s": 10.0}
"""On a machine that does other things nothing is given up: a state that was not saved does not come again."""


def loads(engine: Engine, asked: Sequence[int], tokens: int = 16) -> tuple[list[int], int, int]:
    """What follows a prompt that the engine itself does not know, how many tokens were found, and blocks loaded."""
    before = engine.counters().get("load_blocks", 0)
    assert engine.do("reset", connector=False)
    came = engine.generate(asked, tokens=tokens)
    return came["tokens"][0], came["cached"][0], int(engine.counters()["load_blocks"] - before)


def test_a_state_is_loaded_with_the_attention_before_it_in_another_process(
    daemon: RunningDaemon, start_engine: Start, hybrid: Path
) -> None:
    asked, whole = prompt(1000), prompt(2 * BLOCK, seed=14)
    alone = start_engine(None, model=hybrid, **HYBRID).ready()
    expected = {len(one): alone.generate(one, tokens=16)["tokens"][0] for one in (asked, whole)}
    assert len(set(expected[1000])) > 4, "a model that says the same always shows nothing"
    alone.stop()

    first = start_engine(daemon.endpoint, model=hybrid, **HYBRID).ready()
    assert first.generate(asked, tokens=16)["tokens"] == [expected[1000]]
    assert first.counters()["save_blocks"] == 3 + 1, "three blocks of attention, and the state at their end"
    assert first.generate(whole, tokens=16)["tokens"] == [expected[2 * BLOCK]]
    assert first.counters()["save_blocks"] == 4 + 2 + 1, "here at the end of the first: one token must be left"
    first.stop()

    second = start_engine(daemon.endpoint, model=hybrid, **HYBRID).ready()
    assert loads(second, asked) == (expected[1000], 3 * BLOCK, 3 + 1)
    # The last token is computed, from a state that has not had it yet.
    assert loads(second, whole) == (expected[2 * BLOCK], BLOCK, 1 + 1)
    counted = second.counters()
    assert (counted["load_failures"], counted["lookup_hits"]) == (0, 2)

    # A load that fails is of no group: all is computed, and nobody waits.
    assert second.do("reset", connector=False)
    second.hold("acquire")
    second.ask("generate", prompts=[asked], tokens=16)
    second.until("acquire")
    daemon.kill()
    second.let_go("acquire")
    assert second.answer()["tokens"] == [expected[1000]]
    assert second.counters()["load_failures"] == 1
    daemon.restart()
    eventually(lambda: second.do("connected"), 20, "the engine to be connected again")
    saved = second.counters()["save_blocks"]
    assert loads(second, asked)[1:] == (0, 0)
    assert second.counters()["save_blocks"] == saved + 3 + 1


def test_a_prefix_ends_where_a_step_has_left_a_state(daemon: RunningDaemon, start_engine: Start, hybrid: Path) -> None:
    chunks = {"max_num_batched_tokens": 2 * BLOCK, "prefix_cache_retention_interval": None, **HYBRID}
    asked = prompt(1000)
    fork = asked[: 2 * BLOCK + 90] + prompt(300, seed=5)
    early = asked[: BLOCK + 44] + prompt(300, seed=6)
    short = prompt(BLOCK - 6, seed=7)
    alone = start_engine(None, model=hybrid, **chunks).ready()
    expected = [alone.generate(one, tokens=16)["tokens"][0] for one in (fork, early, short)]
    turn = short + expected[2] + prompt(30, seed=8)
    expected.append(alone.generate(turn, tokens=16)["tokens"][0])
    alone.stop()

    engine = start_engine(daemon.endpoint, model=hybrid, **chunks).ready()
    engine.generate(asked, tokens=16)
    assert engine.counters()["save_blocks"] == 3 + 2, "steps have ended at two and at three blocks"
    assert loads(engine, fork) == (expected[0], 2 * BLOCK, 2 + 1)
    assert loads(engine, early) == (expected[1], 0, 0), "nobody has the state at the end of the first block"
    # What is generated ends blocks too, and the next turn begins there.
    assert loads(engine, short) == (expected[2], 0, 0)
    assert loads(engine, turn) == (expected[3], BLOCK, 1 + 1)


def test_a_decode_engine_goes_on_from_the_state_that_a_prefill_engine_has_left(
    daemon: RunningDaemon, start_engine: Start, hybrid: Path
) -> None:
    prefill = start_engine(daemon.endpoint, model=hybrid, role="kv_producer", extra=PATIENT, **HYBRID).ready()
    decode = start_engine(daemon.endpoint, model=hybrid, role="kv_consumer", extra=PATIENT, **HYBRID).ready()
    found = loaded = 0
    for length, blocks in ((2 * BLOCK + 88, 2), (2 * BLOCK, 1)):
        asked = prompt(length, seed=length)
        told = prefill.generate(asked, tokens=1, params={"do_remote_decode": True})["params"][0]
        prefill.counters()
        tokens = decode.generate(asked, tokens=12, params=told)["tokens"]
        counted = decode.counters()
        found, loaded = found + blocks * BLOCK, loaded + blocks + 1
        # What vLLM says was cached is what the prefill engine had.
        assert (counted["lookup_tokens"], counted["load_blocks"], counted["load_failures"]) == (found, loaded, 0)
        assert tokens == prefill.generate(asked, tokens=12)["tokens"]
    assert counted.get("save_blocks", 0) == 0, "a consumer stores nothing"


def test_a_state_in_the_store_is_that_of_its_tokens(
    start_daemon: Callable[..., RunningDaemon], start_engine: Start, hybrid: Path
) -> None:
    """Of prompts and of what was generated, in batches and chunks, preempted, gone on from a state that was loaded.

    Each is compared with what an engine stores that computes one prompt after the other, a block a step.
    """
    dense = {"prefix_cache_retention_interval": None, "extra": {"pinned": 1.0, **PATIENT}, **HYBRID}
    small = {"num_gpu_blocks_override": 16, "max_model_len": 1024, **dense}
    crowd = start_daemon()
    asked = [prompt(2 * BLOCK + 200, seed=seed) for seed in range(5)]

    one = start_engine(crowd.endpoint, model=hybrid, max_num_batched_tokens=BLOCK + 44, **small).ready()
    texts = said_by(one, asked, 120)
    found = [states_of(one, text) for text in texts]
    assert [sorted(ends) for ends in found] == [[BLOCK, 2 * BLOCK, 3 * BLOCK]] * 5
    for text in texts:
        one.do("forget", tokens=text, after=2 * BLOCK)
    one.stop()

    two = start_engine(crowd.endpoint, model=hybrid, max_num_batched_tokens=BLOCK // 2, **small).ready()
    texts += said_by(two, [text[: 2 * BLOCK + 210] for text in texts], 100)
    assert two.counters()["lookup_hits"] >= 5
    found += [states_of(two, text) for text in texts[5:]]
    assert [sorted(ends) for ends in found[5:]] == [[BLOCK, 2 * BLOCK, 3 * BLOCK]] * 5

    # What waits to be saved is in blocks of nobody else, though its request has ended, and all others are used anew.
    texts.append(prompt(2 * BLOCK + 30, seed=20))
    two.hold("drain")
    two.generate(texts[-1], tokens=1)
    for seed in range(21, 25):
        two.generate(prompt(2 * BLOCK - 30, seed=seed), tokens=1)
    two.let_go("drain")
    assert two.counters()["save_dropped"] == 0
    found.append(states_of(two, texts[-1]))
    assert sorted(found[-1]) == [BLOCK, 2 * BLOCK]
    two.stop()

    calm = start_daemon()
    alone = start_engine(calm.endpoint, model=hybrid, max_num_batched_tokens=BLOCK, **dense).ready()
    other = [*asked[0][: 2 * BLOCK - 1], 5]
    for text in (*texts, [*other, 5]):
        alone.generate(text, tokens=1)
    assert alone.counters()["save_dropped"] == 0
    for text, ends in zip(texts, found, strict=True):
        last, first, deep = apart(ends, states_of(alone, text))
        assert (last < 0.02, first < 0.02, deep < 0.3) == (True, True, True), (last, first, deep)
    # So far apart are states that have had another token at the end, and those of other texts.
    wrong = apart(states_of(alone, other), states_of(alone, asked[0]))
    assert (wrong.last > 0.5, wrong.first > 0.05) == (True, True), wrong


def said_by(engine: Engine, asked: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Prompts and what follows, of an engine with too little room for all at once."""
    before = engine.do("metric", name="vllm:num_preemptions")
    came = engine.generate(*asked, tokens=tokens)["tokens"]
    counted = engine.counters()
    assert (counted["load_failures"], counted["save_dropped"]) == (0, 0)
    assert engine.do("metric", name="vllm:num_preemptions") > before, "nobody was preempted"
    return [[*one, *more] for one, more in zip(asked, came, strict=True)]
