"""vLLM and a load that fails in the middle: what the engine computes from it meanwhile is wrong.

With `layers` this happens in every such step, and the engine has taken these blocks into its own prefix cache.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import RunningDaemon
from tests.engines.vllm_engines import BLOCK, Engine, prompt

Start = Callable[..., Engine]

pytestmark = pytest.mark.timeout(600)
"""Engines take their time to start on a machine that does other things."""

LAYERS = 4
SHARED = 5 * BLOCK
NOISE = 1e-3
"""The same block computed in other chunks differs by less, and nothing that was computed from noise does."""


def asked(shared: int, seed: int) -> list[int]:
    """Those of one number begin alike."""
    return prompt(SHARED, seed=100 + shared) + prompt(3 * BLOCK + 20, seed=seed)


def stored(engine: Engine, to: Path) -> dict[str, Any]:
    """What the store has of each block that the engine has saved."""
    engine.counters()
    engine.do("stored", to=str(to))
    with np.load(to) as found:
        return dict(found)


def afresh(one: Engine) -> None:
    """It stores what the prompts begin with, and has it in the store only."""
    one.ready().do("watch_saves")
    for shared in range(LAYERS + 1):
        one.generate([*prompt(SHARED, seed=100 + shared), 11])
        one.counters()
    assert one.do("reset", connector=False)


@pytest.mark.parametrize(
    ("layers", "llm"),
    [
        (True, {"max_num_batched_tokens": 256}),  # computed anew over several steps
        (True, {"max_num_batched_tokens": 4096}),  # two requests in one step
        (True, {"max_num_batched_tokens": 4096, "overlap": True}),  # layers are of no effect
        (False, {"max_num_batched_tokens": 4096, "overlap": True}),
        (False, {"max_num_batched_tokens": 256}),
    ],
)
def test_nothing_computed_from_a_load_that_failed_is_stored_or_answered(
    layers: bool,
    llm: dict[str, Any],
    start_daemon: Callable[..., RunningDaemon],
    start_engine: Start,
    tmp_path: Path,
) -> None:
    engine = start_engine(start_daemon().endpoint, extra={"layers": layers}, **llm)
    cold = start_engine(start_daemon().endpoint)
    afresh(engine)
    afresh(cold)
    for rows in range(LAYERS if layers else 1):
        both = [asked(rows, 40), asked(rows, 41)]
        engine.do("spoil_load", rows=rows)
        came = engine.generate(*both)
        assert engine.counters()["load_failures"] == rows + 1
        assert came["tokens"] == [cold.generate(one)["tokens"][0] for one in both]

    # Its client goes away meanwhile: nobody computes anew what is wrong, and nobody finds it.
    both = [asked(LAYERS, 40), asked(LAYERS, 41)]
    expected = [cold.generate(one)["tokens"][0] for one in both]
    failures = engine.counters()["load_failures"]
    engine.do("spoil_load", abort=True)
    came = engine.do("generate", prompts=both)
    assert engine.counters()["load_failures"] == failures + 1
    assert came["tokens"] == expected[1:], "one was given up"
    assert engine.generate(both[0])["tokens"] == expected[:1]

    right, found = stored(cold, tmp_path / "right.npz"), stored(engine, tmp_path / "found.npz")
    assert found.keys() == right.keys(), "what was lost is stored, when it was computed anew"
    wrong = {name: float(np.abs(found[name] - right[name]).max()) for name in right}
    assert all(much < NOISE for much in wrong.values()), wrong
