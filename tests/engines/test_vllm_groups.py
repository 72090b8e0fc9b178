"""vLLM with several cache groups, and with several ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import RunningDaemon, eventually
from tests.engines.vllm_engines import BLOCK, Engine, prompt

Start = Callable[..., Engine]

pytestmark = pytest.mark.timeout(900)

TOKENS = 1000
BLOCKS = TOKENS // BLOCK
WINDOW_BLOCKS = 2
"""That reach into a window of 256 tokens."""


def test_a_model_with_sliding_windows_loads_all_of_one_group_and_the_windows_of_others(
    daemon: RunningDaemon, start_engine: Start, windowed: Path
) -> None:
    engine = start_engine(daemon.endpoint, model=windowed).ready()
    cold = engine.generate(prompt(TOKENS), tokens=16)
    assert len(set(cold["tokens"][0])) > 4, "a model that says the same always shows nothing"
    assert engine.counters()["save_blocks"] == 3 * BLOCKS
    assert engine.do("reset", connector=False)
    hit = engine.generate(prompt(TOKENS), tokens=16)
    assert hit["tokens"] == cold["tokens"]
    assert hit["cached"] == [BLOCKS * BLOCK]
    assert engine.counters()["load_blocks"] == BLOCKS + 2 * WINDOW_BLOCKS

    # A load that fails is of no group: all is computed, and nobody waits.
    assert engine.do("reset", connector=False)
    engine.hold("acquire")
    engine.ask("generate", prompts=[prompt(TOKENS)], tokens=16)
    engine.until("acquire")
    daemon.kill()
    engine.let_go("acquire")
    assert engine.answer()["tokens"] == cold["tokens"]
    assert engine.counters()["load_failures"] == 1
    daemon.restart()
    eventually(lambda: engine.do("connected"), 20, "the engine to be connected again")
    assert engine.do("reset", connector=False)
    before = engine.counters()["save_blocks"]
    assert engine.generate(prompt(TOKENS), tokens=16)["tokens"] == cold["tokens"]
    assert engine.counters()["save_blocks"] == before + 3 * BLOCKS


def test_two_ranks_store_and_load_each_its_own_part(daemon: RunningDaemon, start_engine: Start) -> None:
    """Real tensor parallelism: three processes, so counters come with the steps of other prompts."""
    asked = prompt(300)

    def counted(engine: Engine, name: str, value: int) -> dict[str, float]:
        def there() -> dict[str, float] | None:
            engine.generate(prompt(5), tokens=1)
            found: dict[str, float] = engine.do("counters")
            return found if found.get(name) == value else None

        found: dict[str, float] = eventually(there, 120, f"{name} to be {value}")
        return found

    first = start_engine(daemon.endpoint, processes=True, tensor_parallel_size=2).ready()
    cold = first.generate(asked)
    counted(first, "save_blocks", 2 * (300 // BLOCK))
    first.stop()
    second = start_engine(daemon.endpoint, processes=True, tensor_parallel_size=2).ready()
    assert second.generate(asked)["tokens"] == cold["tokens"]
    found = counted(second, "load_blocks", 2 * (300 // BLOCK))
    assert (found["lookup_hits"], found["load_failures"]) == (1, 0)
    second.stop()
    # One rank alone has other halves of heads: nothing of this is for it.
    alone = start_engine(daemon.endpoint).ready()
    alone.generate(asked)
    assert alone.counters()["lookup_hits"] == 0
