"""`python -m bench.peers`: installs the peers, runs them beside ours, prints a table, writes JSON.

The exit status is 0 whoever is ahead; a row in which ours is not says so.
"""

import argparse
import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import report
from bench.measure import machine
from bench.node import Node
from bench.peers import environments, servers
from bench.peers.rotation import ASKS, REFERENCE, Arm, Row, measured
from bench.peers.servers import Missing, Servers, connects, free_port, logged

CHECKOUT = Path(__file__).resolve().parents[2]
OURS = "kvstored"
ROUNDS, QUICK_ROUNDS = 12, 2
RUN_S = 1500.0
"""Rows that would begin later are left out, and said to be."""

START_S = 60.0
LMCACHE_START_S = 180.0
TABLE_WIDTH = 200
"""Where the output is no terminal."""

LMCACHE_GIB = "0.75"

SETTINGS = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
LMCACHE_SETTINGS = {"PYTHONHASHSEED": "0", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}


class Run:
    """The arms of one run and the servers behind them."""

    def __init__(self, running: Servers) -> None:
        self.servers = running
        self.arms: list[Arm] = []
        self.missing: dict[str, str] = {}

    def add(self, name: str, python: Path | str, script: str, *arguments: str, **libraries: str) -> None:
        """Starts an arm and waits for it. Raises Missing."""
        log = self.servers.logs / f"arm-{name.replace(' ', '-').replace(',', '')}.log"
        command = [str(python), "-m", f"bench.peers.{script}", *arguments]
        arm = Arm(name, command, log, {**SETTINGS, **LMCACHE_SETTINGS, **libraries})
        try:
            arm.begin()
            self.servers.check_addresses(name, arm.process.pid)
        except Missing:
            arm.end()
            raise
        self.arms.append(arm)

    def attempt(self, name: str, add: Callable[[], None]) -> None:
        """What cannot be had is missing, by name and reason."""
        try:
            add()
        except Missing as e:
            self.missing[name] = str(e)
            print(f"{name} is missing: {e}", flush=True)

    # -- the peers

    def redis(self, environment: environments.Environment, program: str) -> None:
        path = str(self.servers.logs / "redis.sock")
        limits = ["--port", "0", "--unixsocket", path, "--unixsocketperm", "700", "--save", "", "--appendonly", "no"]
        self.servers.start("redis", [program, *limits], connects(path), START_S, environment.libraries)
        self.add("Redis, redis-py", environment.python, "redis_arm", path, "redis-py")
        self.add("Redis, plain RESP", environment.python, "redis_arm", path, "resp")

    def mooncake(self, environment: environments.Environment, mode: str) -> None:
        """A master for each mode: otherwise blocks of one would lie in segments of another."""
        port, metrics = free_port(), free_port()
        master = f"127.0.0.1:{port}"
        command = [environment.program("mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
        command += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics}", "--default_kv_lease_ttl=500"]
        libraries = environment.libraries
        self.servers.start(f"mooncake-{mode}-master", [*command, "--logtostderr"], connects(port), START_S, libraries)
        arguments = [mode, master]
        if mode == "remote":
            name = "mooncake-remote-owner"
            owner = [str(environment.python), "-m", "bench.peers.mooncake_arm", "owner", master]
            ready = logged(self.servers.logs / f"{name}.log", "owner ready")
            self.servers.start(name, owner, ready, START_S, {**SETTINGS, **libraries})
        elif mode == "shared":
            rpc = free_port()
            client = [environment.program("mooncake_client"), "--host=127.0.0.1", f"--port={rpc}"]
            client += [f"--master_server_address={master}", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp"]
            client += ["--global_segment_size=671088640", "--local_buffer_size=0", "--logtostderr"]
            self.servers.start("mooncake-shared-client", client, connects(rpc), START_S, libraries)
            arguments.append(f"127.0.0.1:{rpc}")
        self.add(MOONCAKE[mode], environment.python, "mooncake_arm", *arguments, **libraries)

    def lmcache(self, environment: environments.Environment) -> None:
        urls = []
        for size in ("256k", "2m"):
            port, http = free_port(), free_port()
            command = [
                str(environment.folder / "bin" / "lmcache"),
                "server",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ]
            command += ["--http-host", "127.0.0.1", "--http-port", str(http), "--l1-size-gb", LMCACHE_GIB]
            command += ["--eviction-policy", "LRU", "--chunk-size", "256", "--supported-transfer-mode", "engine_driven"]
            name = f"lmcache-{size}"
            command += ["--shm-name", f"kvstored-bench-{port}"]
            self.servers.start(name, command, connects(http), LMCACHE_START_S, LMCACHE_SETTINGS)
            urls.append(f"tcp://127.0.0.1:{port}")
        self.add("lmcache server", environment.python, "lmcache_arm", *urls)


MOONCAKE = {
    "local": "Mooncake, same process",
    "shared": "Mooncake, shared memory",
    "remote": "Mooncake, TCP",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it works, not how fast it is")
    parser.add_argument("--only", action="append", choices=("redis", "mooncake", "lmcache"), help="these peers")
    parser.add_argument("--json", type=Path, default=report.LOCAL / "peers.json", help="where to write")
    parser.add_argument("--write", action="store_true", help="keep the result in bench/results/ and renew the README")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR", help="copy the logs of all processes there")
    arguments = parser.parse_args()
    wanted = arguments.only or ["redis", "mooncake", "lmcache"]
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name in wanted:
        try:
            found[name] = getattr(environments, name)()
        except Missing as e:
            missing[name] = str(e)
            print(f"{name} is missing: {e}", flush=True)
    contained = servers.own_network()
    with tempfile.TemporaryDirectory(prefix="kvstored-peers-") as folder:
        try:
            content = _run(Path(folder), found, missing, contained, QUICK_ROUNDS if arguments.quick else ROUNDS)
        finally:
            if arguments.keep_logs:
                shutil.copytree(folder, arguments.keep_logs, dirs_exist_ok=True, ignore=_only_logs)
    content["quick"] = arguments.quick
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(_table(content))
    for line in report.verdict(content):
        print(line)
    report.write(arguments.json, content)
    if arguments.write:
        report.keep(content)
    return 0


def _run(folder: Path, found: dict[str, Any], missing: dict[str, str], contained: bool, rounds: int) -> dict[str, Any]:
    """One run of everything that is there."""
    until = time.monotonic() + RUN_S
    with Node(grpc=True, host__size="1GiB") as node, Servers(folder, contained=contained) as running:
        run = Run(running)
        run.missing.update(missing)
        try:
            run.add(OURS, sys.executable, "kvstored_arm", node.endpoint)
            run.add(f"{OURS}, gRPC", sys.executable, "kvstored_arm", node.grpc_endpoint)
            run.add(REFERENCE, sys.executable, "memcpy_arm")
            _add_peers(run, found)
            rows = _rows(run, rounds, until)
        finally:
            for arm in run.arms:
                arm.end()
    return {
        "kind": "peers",
        "machine": machine(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": "make bench-peers",
        "rounds": rounds,
        "own_network": contained,
        "versions": {arm.name: arm.facts.get("version", "") for arm in run.arms},
        "listens_widely": running.wide,
        "missing": run.missing,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _add_peers(run: Run, found: dict[str, Any]) -> None:
    if "redis" in found:
        run.attempt("Redis", lambda: run.redis(*found["redis"]))
    if "mooncake" in found:
        for mode, name in MOONCAKE.items():
            run.attempt(name, lambda mode=mode: run.mooncake(found["mooncake"], mode))  # type: ignore[misc]
    if "lmcache" in found:
        run.attempt("lmcache server", lambda: run.lmcache(found["lmcache"]))


def _rows(run: Run, rounds: int, until: float) -> list[Row]:
    rows = []
    for ask in ASKS:
        if time.monotonic() > until:
            run.missing[f"the row {ask.name}"] = f"it would have begun after {RUN_S:g} s"
            continue
        print(f"{ask.name} ...", flush=True)
        rows.append(measured(ask, run.arms, rounds, run.missing))
    return rows


def _table(content: dict[str, Any]) -> Table:
    table = Table(title="kvstored and its peers: median µs a call (share of memcpy)", caption=content["machine"])
    for column in report.peer_columns(content):
        table.add_column(column)
    for cells in report.peer_cells(content):
        table.add_row(*cells)
    return table


def _only_logs(_: str, names: list[str]) -> set[str]:
    return {name for name in names if not name.endswith(".log")}


if __name__ == "__main__":
    raise SystemExit(main())
