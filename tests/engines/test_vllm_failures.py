"""vLLM and a store that fails: what is missing is computed, the tokens are the same, and the engine does not wait."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore_client import Client
from tests.conftest import RunningDaemon, eventually
from tests.engines.vllm_engines import BLOCK, Engine, prompt

Start = Callable[..., Engine]

pytestmark = pytest.mark.timeout(600)
"""Engines take their time to start on a machine that does other things."""

TOKENS = 1000
BLOCKS = TOKENS // BLOCK
BLOCK_BYTES = 4 * 2 * BLOCK * 2 * 64 * 4
STEP_MAX_S = 0.1


def stored(engine: Engine, seed: int = 13) -> list[int]:
    """Has the engine compute and store a prompt; answers the tokens that follow it."""
    before = engine.counters().get("save_blocks", 0)
    tokens: list[int] = engine.generate(prompt(TOKENS, seed))["tokens"][0]
    assert engine.counters()["save_blocks"] == before + BLOCKS
    return tokens


def forget(engine: Engine) -> None:
    """The engine's own cache, so that only the store has what it computed."""
    assert engine.do("reset", connector=False)


def hooks_are_quick(engine: Engine) -> None:
    slowest = engine.do("hooks")
    assert slowest, "no hook was called"
    assert max(slowest.values()) < STEP_MAX_S, slowest


def test_a_block_that_fails_to_load_is_computed_and_not_promised_again(
    start_daemon: Callable[..., RunningDaemon], start_engine: Start
) -> None:
    with tempfile.TemporaryDirectory(prefix="kvstored-ssd-") as disk:
        daemon = start_daemon(ssd__path=f"{disk}/ssd", ssd__size="256MiB", ssd__write_back="through")
        engine = start_engine(daemon.endpoint, extra={"load_s": 10.0}).ready()
        cold = stored(engine)
        with Client(daemon.endpoint) as client:
            eventually(lambda: client.stats()["ssd"]["blocks"] == BLOCKS, 20, "all blocks to be on the SSD")
        assert daemon.stop() == 0
        with min(Path(disk).rglob("segment-*.kv")).open("r+b") as file:
            at = 3 * BLOCK_BYTES + 100
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
        daemon.restart()
        forget(engine)
        with Client(daemon.endpoint) as client:
            eventually(lambda: client.stats()["ssd"]["state"] == "open", 20, "the SSD to be open")
        eventually(lambda: engine.do("connected"), 20, "the engine to be connected again")

        again = engine.generate(prompt(TOKENS))
        counted = engine.counters()
        assert again["tokens"] == [cold]
        assert (counted["lookup_hits"], counted["loads"], counted["load_failures"]) == (1, 1, 1), counted
        good = counted["load_blocks"]
        assert 0 <= good < BLOCKS
        # What was computed is stored where it was lost, and nothing else is.
        assert counted["save_blocks"] == BLOCKS + 1, counted

        forget(engine)
        third = engine.generate(prompt(TOKENS))
        counted = engine.counters()
        assert third["tokens"] == [cold]
        assert (counted["load_failures"], counted["load_blocks"]) == (1, good + BLOCKS), counted


@pytest.mark.parametrize(("call", "loaded"), [("acquire", 0), ("fill", BLOCKS)])
def test_a_daemon_killed_in_the_middle_of_a_load_costs_computing_only(
    call: str, loaded: int, daemon: RunningDaemon, start_engine: Start
) -> None:
    engine = start_engine(daemon.endpoint).ready()
    cold = stored(engine)
    forget(engine)
    engine.hold(call)
    engine.do("hooks")
    engine.ask("generate", prompts=[prompt(TOKENS)])
    engine.until(call)
    daemon.kill()
    engine.let_go(call)
    came = engine.answer()
    assert (came["tokens"], came["finished"]) == ([cold], ["length"])
    counted = engine.counters()
    assert (counted["loads"], counted["load_failures"]) == (1, int(not loaded)), counted
    assert counted["load_blocks"] == loaded, "what is held stays as it is, whatever becomes of the daemon"
    hooks_are_quick(engine)

    # It goes on without a daemon, and with the next one as before.
    assert engine.generate(prompt(300, seed=7))["finished"] == ["length"]
    daemon.restart()
    eventually(lambda: engine.do("connected"), 20, "the engine to be connected again")
    forget(engine)
    before = engine.counters()["save_blocks"]
    assert engine.generate(prompt(TOKENS))["tokens"] == [cold]
    assert engine.counters()["save_blocks"] == before + BLOCKS
    forget(engine)
    assert engine.generate(prompt(TOKENS))["tokens"] == [cold]
    assert engine.counters()["load_blocks"] == loaded + BLOCKS


def test_a_daemon_killed_in_the_middle_of_a_save_costs_the_save_only(
    daemon: RunningDaemon, start_engine: Start
) -> None:
    engine = start_engine(daemon.endpoint).ready()
    cold = stored(engine)
    for seed, call in ((21, "reserve"), (22, "drain"), (23, "commit")):
        engine.hold(call)
        engine.do("hooks")
        engine.ask("generate", prompts=[prompt(TOKENS, seed)])
        engine.until(call)
        daemon.kill()
        engine.let_go(call)
        came = engine.answer()
        assert came["finished"] == ["length"]
        counted = engine.counters()  # which waits until no block is pinned
        assert counted["save_rejected"] >= BLOCKS, counted
        hooks_are_quick(engine)
        daemon.restart()
        eventually(lambda: engine.do("connected"), 20, "the engine to be connected again")
        forget(engine)
        # Nothing half-written is there: it is all computed anew, then stored.
        before = engine.counters()
        again = engine.generate(prompt(TOKENS, seed))
        assert again["tokens"] == came["tokens"]
        counted = engine.counters()
        assert counted["save_blocks"] == before["save_blocks"] + BLOCKS
        assert counted["load_blocks"] == before["load_blocks"]
        forget(engine)
        assert engine.generate(prompt(TOKENS, seed))["tokens"] == came["tokens"]
        assert engine.counters()["load_blocks"] == before["load_blocks"] + BLOCKS
    forget(engine)
    assert engine.generate(prompt(TOKENS))["tokens"] == [cold]


def test_an_engine_starts_without_a_daemon_and_uses_it_when_it_comes(
    start_daemon: Callable[..., RunningDaemon], start_engine: Start
) -> None:
    daemon = start_daemon()
    daemon.kill()
    engine = start_engine(daemon.endpoint).ready()
    cold = engine.generate(prompt(TOKENS))
    assert engine.counters()["save_rejected"] == BLOCKS
    hooks_are_quick(engine)
    daemon.restart()
    eventually(lambda: engine.do("connected"), 20, "the engine to be connected")
    forget(engine)
    assert engine.generate(prompt(TOKENS))["tokens"] == cold["tokens"]
    assert engine.counters()["save_blocks"] == BLOCKS
    forget(engine)
    assert engine.generate(prompt(TOKENS))["tokens"] == cold["tokens"]
    assert engine.counters()["load_blocks"] == BLOCKS


def test_no_hook_waits_for_a_daemon_that_stands_still(daemon: RunningDaemon, start_engine: Start) -> None:
    engine = start_engine(daemon.endpoint).ready()
    cold = stored(engine)
    fresh = engine.generate(prompt(300, seed=30))
    engine.counters()
    forget(engine)
    engine.do("hooks")
    daemon.pause()
    try:
        # One to load, which the index in shared memory still has, and then others to compute and to save.
        assert engine.generate(prompt(TOKENS))["tokens"] == [cold]
        for seed in range(30, 34):
            came = engine.generate(prompt(300, seed=seed), salt=f"salt {seed}")
            assert came["tokens"] == fresh["tokens"] or seed > 30
        counted = engine.counters()
        hooks_are_quick(engine)
    finally:
        daemon.resume()
    assert counted["load_failures"] == 1, counted
    assert counted["save_rejected"] >= BLOCKS, counted
    eventually(lambda: engine.do("connected"), 20, "the engine to be connected again")
    forget(engine)
    assert engine.generate(prompt(TOKENS, seed=35))["finished"] == ["length"]
    assert engine.counters()["save_blocks"] > counted["save_blocks"]
