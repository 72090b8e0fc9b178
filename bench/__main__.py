"""`python -m bench`: runs everything, prints a table, writes JSON, and with --write keeps it in bench/results/."""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import crowd, local, memory, remote, report, ssd, ssd_capacity, ssd_daemon, ssd_shares, warm
from bench.measure import Row, machine
from bench.node import Node
from kvstore_client import Client

TABLE_WIDTH = 200
"""Where the output is no terminal."""

PARTS = ("memory", "local", "crowd", "grpc", "ssd", "warm")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the result in bench/results/ and renew the README")
    parser.add_argument("--json", type=Path, default=report.LOCAL / "bench.json", help="where to write")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it works, not how fast it is")
    arguments = parser.parse_args()
    if arguments.write and (arguments.quick or arguments.only):
        parser.error("--write keeps whole runs only: without --quick and --only")
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    rows = _rows(console, (arguments.only,) if arguments.only else PARTS, arguments.quick)
    content = {
        "kind": "kvstored",
        "machine": machine(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "quick": arguments.quick,
        "rows": [{**vars(row), "met": row.ok} for row in rows],
    }
    table = Table(title="kvstored", caption=content["machine"])
    for column in report.FIGURE_COLUMNS:
        table.add_column(column)
    for cells in report.figure_cells(content):
        table.add_row(*("NO" if cell == "no" else cell for cell in cells))
    console.print(table)
    report.write(arguments.json, content)
    if arguments.write:
        report.keep(content)
    missed = [row.name for row in rows if not row.ok]
    console.print(f"missed: {', '.join(missed)}" if missed else "every bar is met")
    return 0


def _rows(console: Console, parts: tuple[str, ...], quick: bool) -> list[Row]:
    rows: list[Row] = []
    if "memory" in parts:
        console.print("memory of the daemon ...")
        rows += memory.rows()
    if "local" in parts or "crowd" in parts:
        console.print("starting kvstored with 3 GiB ...")
        with Node(host__size="3GiB") as node:
            if "local" in parts:
                with Client(node.endpoint, name="bench") as client:
                    for part in (local.get_rows, local.put_rows, local.lookup_rows):
                        console.print(f"{part.__name__.removesuffix('_rows')} ...")
                        rows += part(client, quick)
            if "crowd" in parts:
                console.print("16 clients ...")
                rows += crowd.rows(node.endpoint, quick)
    if "grpc" in parts:
        console.print("gRPC ...")
        with Node(grpc=True, host__size="1GiB") as node:
            rows += remote.rows(node.grpc_endpoint, quick)
    if "ssd" in parts:
        console.print("the SSD's bytes ...")
        rows += ssd.rows(quick)
        console.print("a daemon with an SSD ...")
        rows += ssd_capacity.rows(quick)
        rows += ssd_daemon.rows(quick)
        console.print("shares of the disk ...")
        rows += ssd_shares.rows(quick)
    if "warm" in parts:
        console.print("a slab that outlives its daemon ...")
        rows += warm.rows(quick)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
