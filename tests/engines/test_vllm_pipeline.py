"""vLLM with its layers in two processes, one after the other: each keeps the blocks of its own layers."""

from collections.abc import Callable
from typing import Any

import pytest

from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually
from tests.engines.vllm_engines import BLOCK, Engine, prompt

Start = Callable[..., Engine]

pytestmark = pytest.mark.timeout(600)
"""Engines take their time to start on a machine that does other things."""

TOKENS = 1000
BLOCKS = TOKENS // BLOCK
STAGES: dict[str, Any] = {
    "processes": True,
    "pipeline_parallel_size": 2,
    # vLLM needs the pass that warms a compiled model up: on a CPU it makes what goes from stage to stage nowhere else.
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}


def test_two_stages_store_and_load_each_its_own_layers(daemon: RunningDaemon, start_engine: Start) -> None:
    """Three processes, so counters come with the steps of other prompts."""

    def counted(engine: Engine, name: str, value: int) -> dict[str, float]:
        def there() -> dict[str, float] | None:
            engine.generate(prompt(5), tokens=1)
            found: dict[str, float] = engine.do("counters")
            return found if found.get(name) == value else None

        found: dict[str, float] = eventually(there, 120, f"{name} to be {value}")
        return found

    first = start_engine(daemon.endpoint, **STAGES).ready()
    second = start_engine(daemon.endpoint, **STAGES)
    cold = first.generate(prompt(TOKENS))
    counted(first, "save_blocks", 2 * BLOCKS)
    with Client(daemon.endpoint) as client:
        (pool,) = client.stats()["pools"]
    assert (pool["blocks"], pool["block_bytes"]) == (2 * BLOCKS, 2 * 2 * BLOCK * 2 * 64 * 4), "two layers each"
    first.stop()
    second.ready()
    assert second.generate(prompt(TOKENS))["tokens"] == cold["tokens"]
    found = counted(second, "load_blocks", 2 * BLOCKS)
    assert (found["lookup_hits"], found["load_failures"]) == (1, 0)
    second.stop()
    # An engine with all layers in one process has blocks of another kind: nothing of this is for it.
    alone = start_engine(daemon.endpoint).ready()
    assert alone.generate(prompt(TOKENS))["tokens"] == cold["tokens"]
    assert alone.counters()["lookup_hits"] == 0
