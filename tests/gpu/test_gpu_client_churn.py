"""Engines in processes of their own that put and get more than fits, all at once: every block has its own bytes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.gpu.client_engine import Engine
from tests.gpu.gpu_nodes import GpuNode

SECONDS = 4.0
"""At least; they go on until each has got something, and the daemon that is killed is back."""
CHAINS, DEPTH = 20, 8


@pytest.mark.parametrize("faults", ["", "query:delay=0.002; open:delay=0.02"])
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed"])
def test_no_block_has_the_bytes_of_another_while_tiers_evict(
    start_gpu_node: Callable[..., GpuNode], tmp_path: Path, killed: bool, faults: str
) -> None:
    """160 blocks of 12 KiB in a pool and a memory of 1 MiB each; killed: the daemon is, and starts again."""
    node, enough = start_gpu_node(gpu__size="1MiB", host__size="1MiB"), tmp_path / "enough"
    engines = [
        Engine(node.endpoint, node.uuids[0], "nhd", "bf16", 64, seed=seed, device={"faults": faults})
        for seed in range(3)
    ]
    try:
        for seed, engine in enumerate(engines):
            engine.start("churn", seconds=SECONDS, seed=seed, chains=CHAINS, depth=DEPTH, enough=str(enough))
        if killed:
            eventually(lambda: node.stats_of()["counters"]["committed"] > 100, 20.0)
            node.kill()
            node.restart()
        eventually(lambda: node.stats_of()["counters"]["committed"] > 0)
        enough.touch()
        for engine in engines:
            got, wrong = engine.answer()
            assert not wrong
            assert got
        eventually(lambda: node.stats_of()["leased"] == node.stats_of()["granted"] == 0)
        for engine in engines:
            engine("close")
            eventually(lambda engine=engine: engine("opened") == 0, what="what was open to be closed")  # type: ignore[misc]
    finally:
        for engine in engines:
            engine.close()
