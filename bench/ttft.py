"""Time to the first token of vLLM with and without a store: `make bench-ttft`, or `python -m bench.ttft` in vLLM's
environment.

Every arm is an engine process of its own on one core, one after the other, with a random Llama of 28 million
parameters in float32, the engine in the same process as whoever asks it; stores have the other cores. For each length
the prompts of a run differ, and a hit is measured in a fresh process that has never seen them:

    none       no connector
    kvstored   our connector: cold, then a fresh process that loads
    example    vLLM's own ExampleConnector over a directory in shared memory, the same way; with one token more,
               since it finds nothing for a prompt that is one token longer than whole blocks
    lmcache    vLLM's LMCacheMPConnector and an `lmcache server`, in LMCache's environment: `$KVSTORED_LMCACHE_PYTHON`,
               by default .venv-engines/lmcache/bin/python

What a miss and its store cost drowns in the noise of two first tokens, so it is taken from the connector's
counters around its own code: its time in the engine's threads, and the CPU time of its thread that saves.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.measure import Row, machine
from bench.node import Node
from bench.peers.servers import Missing, Servers, connects, free_port
from bench.ttft_engine import MODEL_TOKENS, VOCABULARY

CHECKOUT = Path(__file__).resolve().parents[1]
LENGTHS = (513, 2049, 6145)
ROUNDS, QUICK_ROUNDS = 3, 1
ENGINE_S = 300.0
SERVER_S = 180.0
STORE_GIB = 1
HIDDEN, LAYERS = 512, 8
BARS_PERCENT = {513: 2.0, 2049: 1.0, 6145: 0.5}
"""Of the first token: what a miss and its store may cost."""

BAR_HIT = 110.0
"""How many times sooner the first token of the longest prompt comes with a hit."""

PEERS = {"example": "ExampleConnector", "lmcache": "lmcache server"}

Measured = list[dict[str, Any]]


@dataclass(frozen=True)
class Arm:
    """An engine to be measured."""

    name: str
    transfer: dict[str, Any] | None
    python: Path = Path(sys.executable)
    more: int = 0
    """Tokens that its prompts have beyond the length."""

    @property
    def hits(self) -> bool:
        return self.name.endswith("hit")


def make_model(directory: Path) -> None:
    """28 million parameters, so that a prefill takes long enough to be measured and not longer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 64 // 4,
        head_dim=64,
        max_position_embeddings=MODEL_TOKENS,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)


# -- the arms


def ours(endpoint: str) -> Iterator[Arm]:
    transfer = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore_client.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"endpoint": endpoint},
    }
    yield Arm("kvstored cold", transfer)
    yield Arm("kvstored hit", transfer)


def example(directory: str) -> Iterator[Arm]:
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": directory},
    }
    yield Arm("example cold", transfer, more=1)
    yield Arm("example hit", transfer, more=1)


def lmcache(servers: Servers) -> Iterator[Arm]:
    """Starts its server when it is asked for its first arm. Raises Missing."""
    python = CHECKOUT / os.environ.get("KVSTORED_LMCACHE_PYTHON", ".venv-engines/lmcache/bin/python")
    if not python.exists():
        raise Missing(f"there is no {python}: `make test-engines` installs it, or KVSTORED_LMCACHE_PYTHON names it")
    port, http = free_port(), free_port()
    options = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--http-host": "127.0.0.1",
        "--http-port": str(http),
        "--l1-size-gb": str(STORE_GIB),
        "--eviction-policy": "LRU",
        "--chunk-size": "128",
        "--supported-transfer-mode": "engine_driven",
        "--shm-name": f"kvstored-ttft-{port}",
    }
    command = [str(python.with_name("lmcache")), "server", *(word for option in options.items() for word in option)]
    servers.start("lmcache server", command, connects(http), SERVER_S, {**QUIET, "PYTHONPATH": ""})
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }
    yield Arm("lmcache cold", transfer, python)
    yield Arm("lmcache hit", transfer, python)


QUIET = {
    "PYTHONHASHSEED": "0",  # without it LMCache names the same chunk otherwise in every process
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def run(arm: Arm, asked: dict[str, Any], core: int, log: Path) -> Measured:
    """Starts an engine and waits for what it measured."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    environment |= QUIET | {
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),  # else it has one core without a connector and all with one
        "OMP_NUM_THREADS": "1",
    }
    command = ["taskset", "-c", str(core), str(arm.python), "-m", "bench.ttft_engine"]
    command.append(json.dumps({**asked, "transfer": arm.transfer}))
    with log.open("wb") as errors:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            cwd=CHECKOUT,
            timeout=ENGINE_S,
            check=False,
        )
    if done.returncode:
        raise SystemExit(
            f"{arm.name}: the engine ended with {done.returncode}:\n{log.read_text(errors='replace')[-4000:]}"
        )
    lines = done.stdout.decode(errors="replace").splitlines()
    found = [json.loads(line.removeprefix("FIRST ")) for line in lines if line.startswith("FIRST ")]
    short = [one["length"] for one in found if arm.hits and one["cached"] < one["length"] - 1]
    if short:
        raise SystemExit(f"{arm.name}: not all of the prompts of {short} tokens was found")
    return found


def measure(core: int, rounds: int) -> tuple[dict[str, Measured], dict[str, str]]:
    """What every arm measured, one engine after the other; and which are missing, and why."""
    prompts = [(length, 1 + length + i) for i in range(rounds) for length in LENGTHS]  # none begins like another
    found: dict[str, Measured] = {}
    missing: dict[str, str] = {}
    others = os.sched_getaffinity(0) - {core}
    if others:
        os.sched_setaffinity(0, others)  # and whatever is started here
    with tempfile.TemporaryDirectory(prefix="kvstored-ttft-") as folder:
        base = Path(folder)
        make_model(base / "model")
        shared = tempfile.mkdtemp(dir="/dev/shm", prefix="kvstored-ttft-")

        def measured(arms: Iterator[Arm]) -> None:
            for arm in arms:
                print(f"{arm.name} ...", flush=True)
                warm = [100 + 10 * len(found) + i for i in range(2)]
                mine = [(length, length + arm.more, 1000 + seed) for length, seed in prompts]
                asked = {"model": str(base / "model"), "prompts": mine, "warm": warm}
                found[arm.name] = run(arm, asked, core, base / "engine.log")

        try:
            measured(iter([Arm("none", None)]))
            with Node(host__size=f"{STORE_GIB}GiB") as node:
                measured(ours(node.endpoint))
            measured(example(shared))
            with Servers(base, contained=False) as servers:
                try:
                    measured(lmcache(servers))
                except Missing as e:
                    missing["lmcache"] = str(e)
                    print(f"lmcache is missing, and its rows with it: {e}", flush=True)
        finally:
            shutil.rmtree(shared)
    return found, missing


# -- the rows


def times(found: dict[str, Measured], arm: str, length: int) -> list[float]:
    return [one["ms"] for one in found[arm] if one["length"] == length]


def hit_row(found: dict[str, Measured], length: int) -> Row:
    """How many times sooner the first token comes."""
    cold, hits = statistics.median(times(found, "none", length)), times(found, "kvstored hit", length)
    hit = statistics.median(hits)
    bar = BAR_HIT if length == max(LENGTHS) else None
    name = f"first token, {length} tokens: hit"
    reference = f"without a store {cold:.0f} ms"
    return Row(name, cold / hit, bar, True, "x", f"{hit:.1f} ms", reference, cold / max(hits), cold / min(hits))


def peer_row(found: dict[str, Measured], length: int, peer: str) -> Row:
    """How many times sooner it comes with a hit of ours than with one of the peer's."""
    hit = statistics.median(times(found, "kvstored hit", length))
    each = times(found, f"{peer} hit", length)
    theirs, cold = statistics.median(each), statistics.median(times(found, "none", length))
    name = f"first token, {length} tokens: hit, against {PEERS[peer]}"
    reference = f"{theirs:.1f} ms, {cold / theirs:.0f}x"
    return Row(name, theirs / hit, 1.0, True, "x", f"{hit:.1f} ms", reference, min(each) / hit, max(each) / hit)


def miss_row(found: dict[str, Measured], length: int) -> Row:
    """What a miss and its store took of the first token."""
    mine = [one for one in found["kvstored cold"] if one["length"] == length]
    cost = [one["counted"]["engine_seconds_total"] + one["counted"]["save_cpu_seconds_total"] for one in mine]
    percent = [seconds * 1e5 / one["ms"] for seconds, one in zip(cost, mine, strict=True)]
    return Row(
        f"first token, {length} tokens: a miss and its store",
        statistics.median(percent),
        BARS_PERCENT[length],
        False,
        " %",
        f"{statistics.median(cost) * 1e3:.2f} ms",
        f"our counters, of {statistics.median(one['ms'] for one in mine):.0f} ms",
        min(percent),
        max(percent),
    )


def rows_of(found: dict[str, Measured]) -> list[Row]:
    peers = [peer for peer in PEERS if f"{peer} hit" in found]
    rows = []
    for length in LENGTHS:
        rows.append(hit_row(found, length))
        rows += [peer_row(found, length, peer) for peer in peers]
        rows.append(miss_row(found, length))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ttft", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the engine's")
    parser.add_argument("--quick", action="store_true", help="one round: to see that it works, not how fast it is")
    parser.add_argument("--json", type=Path, default=report.LOCAL / "ttft.json", help="where to write")
    parser.add_argument("--write", action="store_true", help="keep the result in bench/results/ and renew the README")
    arguments = parser.parse_args()
    if arguments.write and arguments.quick:
        parser.error("--write keeps whole runs only: without --quick")
    name = machine()  # before this process leaves the engine's core
    began = time.monotonic()
    found, missing = measure(arguments.core, QUICK_ROUNDS if arguments.quick else ROUNDS)
    wrong = [
        arm
        for arm in ("kvstored cold", "kvstored hit")
        if [one["tokens"] for one in found[arm]] != [one["tokens"] for one in found["none"]]
    ]
    content = {
        "kind": "ttft",
        "machine": name,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": "make bench-ttft",
        "quick": arguments.quick,
        "missing": missing,
        "rows": [{**vars(row), "met": row.ok} for row in rows_of(found)],
        "first_tokens": found,
    }
    print("\n".join(report.figure_lines(content)))
    print(f"{time.monotonic() - began:.0f} s")
    report.write(arguments.json, content)
    if wrong:
        print(f"OTHER TOKENS than without a connector: {', '.join(wrong)}")
        return 1
    print("the same tokens with a hit as without a connector")
    if arguments.write:
        report.keep(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
