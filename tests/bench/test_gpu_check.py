"""`make gpu-check` without a GPU: every part runs on host memory, so that a lent hour is not spent on mending it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PARTS = {
    "copies": [
        "slab to GPU, 16 x 2 MiB",
        "put to a pool by IPC, 16 x 2 MiB",
        "gather to the slab, 32 layers, 16 x 2 MiB",
    ],
    "death": [],
    "store": ["put, paged, 4 MiB, by the SDK", "get_into, paged, 16 MiB, by the SDK"],
}
"""And rows that each has to have. What wants torch is tried by tests/engines/test_gpu_check_model.py."""


def check(part: str, tmp_path: Path) -> dict[str, object]:
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "bench.gpu", "--quick", "--only", part, "--json", str(path)]
    environment = os.environ | {"KVSTORED_HOST_DEVICES": f"HOST-1={1 << 30}"}
    ran = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert not ran.returncode, ran.stdout + ran.stderr
    found: dict[str, object] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_on_host_memory_and_writes_down_what_it_found(part: str, tmp_path: Path) -> None:
    found = check(part, tmp_path)
    assert found["failed"] == {}
    rows = found["rows"]
    assert isinstance(rows, list)
    assert set(PARTS[part]) <= {row["name"] for row in rows}
    assert all(row["figure"] > 0 for row in rows)
    facts = found["facts"]
    assert isinstance(facts, dict)
    if part == "death":
        assert "none failed" in facts["a client whose daemon is killed while it copies from its pool"]
    if part == "copies":
        assert facts["page-locking, DONTFORK, writable"] == "page-locked"


def test_a_part_that_fails_is_told_and_the_check_fails_with_it(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "bench.gpu", "--quick", "--only", "store", "--json", str(path)]
    environment = os.environ | {"KVSTORED_HOST_DEVICES": "HOST-1=1048576"}  # no memory for anything
    ran = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert ran.returncode == 1
    assert "store" in json.loads(path.read_text())["failed"]
