"""vLLM: whose blocks are whose. Salt, adapter and weights keep theirs apart; KV events say what is stored."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import RunningDaemon, eventually
from tests.engines.vllm_engines import BLOCK, Engine, prompt

Start = Callable[..., Engine]

pytestmark = pytest.mark.timeout(600)
"""Engines take their time to start on a machine that does other things."""

TOKENS = 1000
BLOCKS = TOKENS // BLOCK


def forget(engine: Engine) -> None:
    assert engine.do("reset", connector=False)


def loads(engine: Engine, **whose: str) -> tuple[list[int], int]:
    """Tokens after the prompt, and how many blocks of it were loaded."""
    before = engine.counters().get("load_blocks", 0)
    forget(engine)
    tokens = engine.generate(prompt(TOKENS), **whose)["tokens"][0]
    return tokens, int(engine.counters()["load_blocks"] - before)


def test_salts_keep_their_blocks_apart_and_share_within(daemon: RunningDaemon, start_engine: Start) -> None:
    engine = start_engine(daemon.endpoint).ready()
    plain, loaded = loads(engine)
    assert loaded == 0
    for salt in ("one", "two"):
        assert loads(engine, salt=salt) == (plain, 0)
    for salt in ("one", "two"):
        assert loads(engine, salt=salt) == (plain, BLOCKS)
    assert loads(engine) == (plain, BLOCKS)


def test_adapters_keep_their_blocks_apart_from_each_other_and_from_the_model(
    daemon: RunningDaemon, start_engine: Start, llama: Path
) -> None:
    engine = start_engine(daemon.endpoint, enable_lora=True, max_lora_rank=8, max_loras=2).ready()
    one, two = str(llama / "one"), str(llama / "two")
    plain, _ = loads(engine)
    tokens = {}
    for adapter in (one, two):
        tokens[adapter], loaded = loads(engine, adapter=adapter)
        assert loaded == 0
        assert tokens[adapter] != plain
    assert tokens[one] != tokens[two]
    for adapter in (one, two):
        assert loads(engine, adapter=adapter) == (tokens[adapter], BLOCKS)
        assert loads(engine, adapter=adapter, salt="mine") == (tokens[adapter], 0)
    assert loads(engine) == (plain, BLOCKS)


def test_other_weights_at_the_same_path_find_nothing(
    daemon: RunningDaemon, start_engine: Start, llama: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in llama.iterdir():
        if file.is_file():
            (model / file.name).write_bytes(file.read_bytes())
    engine = start_engine(daemon.endpoint, model=model).ready()
    first, _ = loads(engine)
    assert loads(engine) == (first, BLOCKS)
    engine.stop()
    weights = load_file(model / "model.safetensors")
    weights = {name: tensor * 1.01 for name, tensor in weights.items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    engine = start_engine(daemon.endpoint, model=model).ready()
    assert loads(engine)[1] == 0


def test_kv_events_say_what_is_stored_and_whose_it_is(daemon: RunningDaemon, start_engine: Start) -> None:
    engine = start_engine(daemon.endpoint, events=True).ready()
    engine.do("listen")
    asked = prompt(TOKENS)
    for seed in range(100, 130):  # a subscriber is late by what it takes to connect
        engine.generate(prompt(BLOCK, seed=seed))
        engine.counters()
        if engine.do("heard", medium="kvstored"):
            break
    engine.generate(asked)
    assert engine.counters()["save_blocks"] >= BLOCKS
    heard = eventually(
        lambda: [event for event in engine.do("heard", medium="kvstored") if event["tokens"][:BLOCK] == asked[:BLOCK]],
        10,
        "the event of the prompt's blocks",
    )
    (event,) = heard
    assert event["tokens"] == asked[: BLOCKS * BLOCK]
    assert len(event["hashes"]) == BLOCKS
    assert event["parent"] is None
    in_memory = [event for event in engine.do("heard", medium="GPU") if event["tokens"][:BLOCK] == asked[:BLOCK]]
    assert in_memory[0]["hashes"][0] == event["hashes"][0], "the engine's own name of the same block"
