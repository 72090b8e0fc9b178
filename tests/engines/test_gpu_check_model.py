"""The part of `make gpu-check` that wants torch, on host memory: first tokens from pool, slab and SSD."""

import json
import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def test_first_tokens_come_from_every_tier_with_the_bytes_that_were_computed(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "bench.gpu", "--quick", "--only", "model", "--json", str(path)]
    environment = os.environ | {"KVSTORED_HOST_DEVICES": f"HOST-1={1 << 30}"}
    ran = subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert not ran.returncode, ran.stdout + ran.stderr
    names = [row["name"] for row in json.loads(path.read_text())["rows"]]
    assert names == [f"first token, 1024 tokens from the {tier}" for tier in ("pool", "slab", "SSD")]
