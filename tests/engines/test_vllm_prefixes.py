"""vLLM: what one engine process has computed, another loads, and goes on with the same tokens."""

from collections.abc import Callable

import pytest

from tests.conftest import RunningDaemon
from tests.engines.vllm_engines import BLOCK, Engine, prompt

Start = Callable[..., Engine]

pytestmark = pytest.mark.timeout(600)
"""Engines take their time to start on a machine that does other things."""


def test_a_second_process_loads_what_the_first_stored_and_has_the_same_tokens(
    daemon: RunningDaemon, start_engine: Start
) -> None:
    asked = prompt(1000)
    first = start_engine(daemon.endpoint, fresh=True).ready()
    cold = first.generate(asked, tokens=16)
    stored = first.counters()
    assert cold["cached"] == [0]
    assert stored["save_blocks"] == 1000 // BLOCK
    assert stored["lookup_hits"] == stored["load_blocks"] == 0
    first.stop()

    second = start_engine(daemon.endpoint, fresh=True).ready()
    hit = second.generate(asked, tokens=16)
    loaded = second.counters()
    assert hit["tokens"] == cold["tokens"]
    assert hit["cached"] == [1000 // BLOCK * BLOCK]
    assert loaded["load_blocks"] == 1000 // BLOCK
    assert loaded["load_failures"] == 0
    assert loaded["save_blocks"] == 0

    # A prompt that is all full blocks, and one that leaves the first on its way.
    for other in (asked[: 4 * BLOCK], asked[: 3 * BLOCK] + prompt(300, seed=5)):
        alone = second.generate(other)
        assert alone["tokens"] == second.generate(other)["tokens"]
