"""Engines, evictions, copies both ways, losses and deaths at once: whoever reads a block has its own bytes."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.gpu.gpu_nodes import GpuNode, host_device
from tests.gpu.raw_engine import EngineProcess

SEED = random.SystemRandom().randrange(1 << 32)
SOAK_S, READ_MIN = 12.0, 50
LONGER_S = 60.0
"""A slow machine goes on for so long until enough was read."""

CHAINS, CHAIN = 24, 6


@pytest.mark.stress
def test_no_engine_ever_reads_another_block_s_bytes(
    start_gpu_node: Callable[..., GpuNode], engine_process: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    """The device holds a third of the blocks, memory two thirds."""
    print("seed", SEED)
    chance = random.Random(SEED)
    node = start_gpu_node(
        [host_device(faults="transfer:delay=0.001")],
        host__size="6MiB",
        gpu__size="3MiB",
        ssd__path=str(tmp_path / "ssd"),
        ssd__size="64MiB",
        ssd__free_floor="1MiB",
        limits={"one_device.PROBE_S": 0.1},
    )
    engines = [engine_process(node) for _ in range(3)]
    until, read, losses, deaths = time.monotonic() + SOAK_S, 0, 0, 0
    while time.monotonic() < until or (read <= READ_MIN and time.monotonic() < until + LONGER_S):
        engine = chance.choice(engines)
        first = chance.randrange(CHAINS) * CHAIN
        chain = list(range(first, first + CHAIN))
        what = chance.random()
        if what < 0.45:
            engine("try_put", chain)
        elif what < 0.9:
            engine("try_prefetch", chain)
            read += int(engine("right", chain))
        elif what < 0.95 and losses < 5:
            losses += 1
            node.lose()
            node.come()
            for each in engines:
                each("again")
        elif deaths < 3:
            deaths += 1
            engine("begin_put", [1000 + deaths])
            engine.kill()
            engines[engines.index(engine)] = engine_process(node)
    stats = node.stats()
    print("read", read, "losses", losses, "deaths", deaths, dict(stats["gpus"][0]["counters"]))
    assert read > READ_MIN
    assert stats["daemon"]["healthy"], stats["daemon"]["problems"]
    assert stats["daemon"]["internal_errors"] == 0
    for engine in engines:
        engine.kill()
    eventually(lambda: node.stats_of()["granted"] == node.stats_of()["quarantined"] == node.stats_of()["leased"] == 0)
    eventually(lambda: not node.stats_of()["copying"])
    assert node.stats_of()["commits_pending"] == 0
    assert node.stop() == 0
