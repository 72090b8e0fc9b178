"""vLLM that loads layer by layer, in the step that computes the rest."""

from collections.abc import Callable

import pytest

from tests.conftest import RunningDaemon, eventually
from tests.engines.vllm_engines import BLOCK, Engine, prompt

Start = Callable[..., Engine]

pytestmark = pytest.mark.timeout(600)

TOKENS = 1000
BLOCKS = TOKENS // BLOCK


def test_layers_come_as_they_are_needed_or_the_blocks_are_computed(daemon: RunningDaemon, start_engine: Start) -> None:
    engine = start_engine(daemon.endpoint, extra={"layers": True}).ready()
    cold = engine.generate(prompt(TOKENS))
    full = engine.generate(prompt(4 * BLOCK, seed=3))
    assert engine.counters()["save_blocks"] == BLOCKS + 4
    assert engine.do("reset", connector=False)
    assert engine.generate(prompt(TOKENS))["tokens"] == cold["tokens"]
    assert engine.counters()["load_blocks"] == BLOCKS
    # A step must compute something: the last block of a prompt that is all full blocks.
    assert engine.generate(prompt(4 * BLOCK, seed=3))["tokens"] == full["tokens"]
    assert engine.counters()["load_blocks"] == BLOCKS + 3

    # What does not come in time is given up, and computed; nothing that was computed meanwhile is stored.
    assert engine.do("reset", connector=False)
    engine.hold("acquire")
    engine.do("hooks")
    before = engine.counters()
    came = engine.generate(prompt(TOKENS))
    engine.let_go("acquire")
    assert came["tokens"] == cold["tokens"]
    hooks = engine.do("hooks")
    assert max(hooks.values()) < 0.1, hooks
    assert hooks["wait_for_layer_load"] > 0.05
    counted = engine.counters()
    assert counted["load_blocks"] == before["load_blocks"], "a load that comes late writes nothing"
    assert counted["save_blocks"] == before["save_blocks"]
    assert engine.do("reset", connector=False)
    assert engine.generate(prompt(TOKENS))["tokens"] == cold["tokens"]

    daemon.kill()
    assert engine.do("reset", connector=False)
    assert engine.generate(prompt(TOKENS))["tokens"] == cold["tokens"]
    daemon.restart()
    eventually(lambda: engine.do("connected"), 20, "the engine to be connected again")
    assert engine.do("reset", connector=False)
    for _ in range(2):
        assert engine.generate(prompt(TOKENS, seed=4))["finished"] == ["length"]
        engine.counters()
        assert engine.do("reset", connector=False)
    assert engine.counters()["load_blocks"] >= before["load_blocks"] + BLOCKS
