"""`python -m bench`: runs everything, prints a table, writes JSON, and with --write the table in bench/README.md."""

import argparse
import json
import platform
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import crowd, local, memory
from bench.measure import Row
from bench.node import Node
from kvstore_client import Client

HERE = Path(__file__).parent
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into bench/README.md")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "local" / "bench.json", help="where to write")
    parser.add_argument("--only", choices=("local", "crowd", "memory"), help="one part")
    arguments = parser.parse_args()
    console = Console()
    rows: list[Row] = []
    if arguments.only in (None, "memory"):
        console.print("memory of the daemon ...")
        rows += memory.rows()
    if arguments.only in (None, "local", "crowd"):
        console.print("starting kvstored with 3 GiB ...")
        with Node(host__size="3GiB") as node:
            if arguments.only != "crowd":
                with Client(node.endpoint, name="bench") as client:
                    for name, part in (
                        ("get_into", local.get_rows),
                        ("put", local.put_rows),
                        ("lookup", local.lookup_rows),
                    ):
                        console.print(f"{name} ...")
                        rows += part(client)
            if arguments.only != "local":
                console.print("16 clients ...")
                rows += crowd.rows(node.endpoint)
    console.print(_table(rows))
    _write_json(arguments.json, rows)
    if arguments.write:
        _write_readme(rows)
    missed = [row.name for row in rows if not row.ok]
    console.print(f"missed: {', '.join(missed)}" if missed else "every bar is met")
    return 0


def _machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{len(set(_cpus()))} cores of {model}, Linux {platform.release()}, Python {platform.python_version()}"


def _cpus() -> set[int]:
    import os

    return os.sched_getaffinity(0)


def _table(rows: list[Row]) -> Table:
    table = Table(title="kvstored", caption=_machine())
    for column in ("what", "figure", "bar", "met", "absolute", "reference in the same run"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.name, row.text, row.bar_text, "yes" if row.ok else "NO", row.absolute, row.reference)
    return table


def _write_json(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figures = [{**vars(row), "met": row.ok} for row in rows]
    content = {"machine": _machine(), "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "rows": figures}
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_readme(rows: list[Row]) -> None:
    lines = [
        f"`make bench` on {_machine()}, {time.strftime('%Y-%m-%d')}:",
        "",
        "| what | figure | bar | met | absolute | reference in the same run |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        met = "yes" if row.ok else "**no**"
        lines.append(f"| {row.name} | {row.text} | {row.bar_text} | {met} | {row.absolute} | {row.reference} |")
    readme = HERE / "README.md"
    head, _, rest = readme.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    readme.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{tail}")


if __name__ == "__main__":
    raise SystemExit(main())
