"""The kernels' source under the address and undefined-behaviour sanitizers: no byte beyond a tensor or a slot.

Tensors and slots have no guard here, they end where their memory ends; alignment of the wide copies and overflow of
the index arithmetic are checked too.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.kernel_rig import build_shim

CHECKOUT = Path(__file__).resolve().parents[2]
SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
EXAMPLES = "60"
RUN_S = 150.0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("sanitized"), *SANITIZE)


def run(library: Path, what: str) -> "subprocess.CompletedProcess[str]":
    loaded = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, timeout=30, check=True)
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = dict(os.environ)
    environment["LD_PRELOAD"] = " ".join(found.stdout.strip() for found in loaded)
    environment["ASAN_OPTIONS"] = "detect_leaks=0"  # the interpreter's own
    environment["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), *sys.path])
    command = [sys.executable, "-m", "tests.cuda.kernel_sanitized", str(library), what]
    return subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
    )


def test_the_kernels_stay_within_tensors_and_slots(library: Path) -> None:
    done = run(library, EXAMPLES)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.split() == ["sound"]


def test_a_byte_beyond_a_slot_would_be_seen(library: Path) -> None:
    done = run(library, "beyond")
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "copy_tile" in done.stderr
