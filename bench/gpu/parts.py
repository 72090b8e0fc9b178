"""The parts of the check; each yields what it found, as it finds it: rows of the table, and facts."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from bench.gpu import copies as measured
from bench.gpu.death import killed_while_copying
from bench.gpu.model import rows as first_tokens
from bench.gpu.rig import Rig, open_rig
from bench.gpu.store import rows as requests
from bench.measure import Row

TESTS = ("tests/cuda", "tests/gpu")
TESTS_S = 110

Found = dict[str, Any]


def _rows(*rows: Row) -> Found:
    return {"rows": [{**vars(row), "met": row.ok} for row in rows]}


def _facts(**facts: object) -> Found:
    return {"facts": {name: str(fact) for name, fact in facts.items()}}


def tests(quick: bool) -> Iterator[Found]:
    """Those with the marker `gpu`; where there is no GPU, none."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *TESTS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TESTS_S, check=False)
    said = ran.stdout.strip().splitlines()
    print("\n".join(said[-40:]))
    yield _facts(tests=said[-1] if said else ran.stderr[-300:])
    if ran.returncode not in (0, 5):  # 5: none to run
        raise SystemExit(f"the tests ended with status {ran.returncode}")


def _named(rig: Rig) -> Found:
    return _facts(device=f"{rig.name} ({rig.uuid})" + ("" if rig.real else ": no figure here means anything"))


def copies(quick: bool) -> Iterator[Found]:
    rig = open_rig()
    yield _named(rig)
    for name, said in measured.registrations(rig).items():
        yield {"facts": {f"page-locking, {name}": said}}
    for row in measured.rows(rig, 5 if quick else 100):
        yield _rows(row)
    rig.close()


def death(quick: bool) -> Iterator[Found]:
    rig = open_rig()
    said = killed_while_copying(rig, quick)
    yield {"facts": {"a client whose daemon is killed while it copies from its pool": said}}
    rig.close()


def store(quick: bool) -> Iterator[Found]:
    rig = open_rig()
    for row in requests(rig, quick):
        yield _rows(row)
    rig.close()


def model(quick: bool) -> Iterator[Found]:
    rig = open_rig()
    for row in first_tokens(rig, quick):
        yield _rows(row)
    rig.close()
