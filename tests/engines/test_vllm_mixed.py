"""vLLM with requests that load, save and preempt each other, and a daemon that stands still or dies meanwhile."""

import random
import time
from collections.abc import Callable

import pytest

from tests.conftest import RunningDaemon, eventually
from tests.engines.vllm_engines import ANSWER_S, Engine, prompt

Start = Callable[..., Engine]

pytestmark = pytest.mark.timeout(600)
"""Engines take their time to start on a machine that does other things."""

ASKED = [prompt(230, seed=seed) for seed in range(6)]
SMALL = {"block_size": 32, "num_gpu_blocks_override": 40, "max_model_len": 1024}
"""Each request needs 10 blocks at its end."""
STEP_MAX_S = 0.1


def trouble(daemon: RunningDaemon, engine: Engine, chance: random.Random, *, kill: bool) -> None:
    """Until the engine answers, at moments that nobody has chosen."""
    until = time.monotonic() + ANSWER_S
    while not engine.answers_within(chance.uniform(0, 0.4)) and time.monotonic() < until:
        if kill and chance.random() < 0.5:
            daemon.kill()
            engine.answers_within(chance.uniform(0, 0.2))
            daemon.restart()
        else:
            daemon.pause()
            engine.answers_within(chance.uniform(0, 0.6))
            daemon.resume()


@pytest.mark.parametrize("seed", [1])
def test_a_daemon_that_stops_or_dies_at_any_moment_costs_no_token_and_holds_no_step_up(
    seed: int, daemon: RunningDaemon, start_engine: Start
) -> None:
    alone = start_engine(None, block_size=32).ready()
    expected = [alone.generate(one, tokens=80)["tokens"][0] for one in ASKED]
    alone.stop()
    engine = start_engine(daemon.endpoint, extra={"load_s": 0.5, "timeout_s": 0.5}, **SMALL).ready()
    for _ in range(2):
        assert engine.generate(*ASKED, tokens=80)["tokens"] == expected
        counted = engine.counters()
        assert engine.do("reset", connector=False)
    assert counted["load_blocks"] > 0
    assert engine.do("metric", name="vllm:num_preemptions") > 0, "nobody was preempted"

    chance = random.Random(seed)
    for kill in (False, False, True, True):
        engine.do("hooks")
        engine.ask("generate", prompts=ASKED, tokens=80)
        trouble(daemon, engine, chance, kill=kill)
        came = engine.answer()
        assert (came["tokens"], came["finished"]) == (expected, ["length"] * len(ASKED))
        engine.counters()  # which waits until no block is pinned
        slowest = engine.do("hooks")
        assert max(slowest.values()) < STEP_MAX_S, slowest
        assert engine.do("reset", connector=False)

    eventually(lambda: engine.do("connected"), 20, "the engine to be connected again")
    for _ in range(2):
        before = engine.counters()["load_blocks"]
        assert engine.generate(*ASKED, tokens=80)["tokens"] == expected
        assert engine.do("reset", connector=False) or engine.counters()
    assert engine.counters()["load_blocks"] > before, "it stores and loads as before"
