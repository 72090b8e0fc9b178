"""`python -m bench.gpu`: all that a machine with a GPU is needed for, in one run of at most eight minutes.

Parts run one after the other, each in a process of its own with a limit, and what they found is
written down as they end: a part that fails or hangs costs the others nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import report
from bench.measure import machine

BUDGET_S = 470.0
"""For all parts together: eight minutes, less what installing takes."""

PARTS = {"tests": 120.0, "copies": 60.0, "death": 60.0, "store": 90.0, "model": 150.0}
"""The order, and the most that each may take."""

WIDTH = 200


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the result in bench/results/ and renew the README")
    parser.add_argument("--json", type=Path, default=report.LOCAL / "gpu.json", help="where to write")
    parser.add_argument("--only", choices=tuple(PARTS), help="one part")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes: to see that it works")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        return _part(arguments.part, arguments.json, arguments.quick)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    content: dict[str, Any] = {
        "kind": "gpu",
        "command": "make gpu-check",
        "machine": machine(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "quick": arguments.quick,
        "rows": [],
        "facts": {},
        "failed": {},
    }
    until = time.monotonic() + BUDGET_S
    for name in (arguments.only,) if arguments.only else PARTS:
        console.print(f"{name} ...")
        _run(name, min(PARTS[name], until - time.monotonic()), arguments.quick, content)
        report.write(arguments.json, content)
    _say(console, content)
    if arguments.write and not arguments.quick and not arguments.only:
        report.keep(content)
    return 1 if content["failed"] else 0


def _run(name: str, limit_s: float, quick: bool, content: dict[str, Any]) -> None:
    """One part in a process of its own."""
    if limit_s <= 0:
        content["failed"][name] = "no time was left for it"
        return
    path = report.LOCAL / f"gpu-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.gpu", "--part", name, "--json", str(path), *(["--quick"] if quick else [])]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
        process.wait()
        content["failed"][name] = f"did not end within {limit_s:.0f} s"
    else:
        if status:
            content["failed"][name] = f"ended with status {status}"
    for line in path.read_text().splitlines() if path.exists() else ():
        found = json.loads(line)
        content["rows"] += found.get("rows", [])
        content["facts"] |= found.get("facts", {})


def _part(name: str, path: Path, quick: bool) -> int:
    """What the process of a part does: a line of JSON for each thing that it found, at once."""
    from bench.gpu import parts

    with path.open("a", buffering=1) as out:
        for found in getattr(parts, name)(quick):
            out.write(json.dumps(found) + "\n")
    return 0


def _say(console: Console, content: dict[str, Any]) -> None:
    table = Table(title="GPU tier", caption=str(content["facts"].get("device", content["machine"])))
    for column in report.FIGURE_COLUMNS:
        table.add_column(column)
    for cells in report.figure_cells(content):
        table.add_row(*("NO" if cell == "no" else cell for cell in cells))
    console.print(table)
    for name, fact in content["facts"].items():
        console.print(f"{name}: {fact}")
    for name, why in content["failed"].items():
        console.print(f"FAILED: {name}: {why}", style="bold red")


if __name__ == "__main__":
    sys.exit(main())
