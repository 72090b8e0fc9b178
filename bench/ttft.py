"""Time to the first token of vLLM with and without a store: `.venv-engines/bin/python -m bench.ttft`.

Every arm is an engine process of its own, on one core, with a random Llama of 28 million parameters in
float32; the daemon has another core. For each length the prompts of one arm differ, and a hit is measured
in a fresh process that has never seen them:

    none       no connector
    kvstored   our connector: cold, then a fresh process that loads
    example    vLLM's own ExampleConnector over a directory in shared memory, the same way; with one token more,
               since it finds nothing for a prompt that is one token longer than whole blocks

What a miss and its store cost drowns in the noise of two first tokens, so it is taken from the connector's
counters around its own code: its time in the engine's threads, and the CPU time of its thread that saves.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.node import Node

LENGTHS = (513, 2049, 6145)
ROUNDS = 3
START_S = 300.0
HIDDEN, LAYERS, VOCABULARY = 512, 8, 4096
BARS_PERCENT = {513: 2.0, 2049: 1.0, 6145: 0.5}
"""Of the first token: what a miss and its store may cost."""

BAR_HIT = 110.0
"""How many times sooner the first token of the longest prompt comes with a hit."""


def prompt(tokens: int, seed: int) -> list[int]:
    return [(i * 7919 + seed * 104729) % (VOCABULARY - 10) + 10 for i in range(tokens)]


def make_model(directory: Path) -> None:
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
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)


def engine(asked: dict[str, Any]) -> None:
    """In a process of its own: the first tokens of every prompt, and what the connector counted for each."""
    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(**asked["transfer"]) if asked["transfer"] else None
    llm = LLM(
        model=asked["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=False,
        kv_transfer_config=transfer,
    )
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)

    def counted() -> dict[str, float]:
        return {
            sample.name.removeprefix("vllm:kvstored_"): sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if "kvstored" in sample.name and sample.name.endswith("_total")
        }

    def first_token(ids: list[int]) -> dict[str, Any]:
        before = counted()
        (output,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        pause = time.monotonic() + 0.5
        while time.monotonic() < pause:  # the engine hears of what was saved in a step
            llm.llm_engine.step()
        return {
            "ms": output.metrics.first_token_latency * 1e3,
            "tokens": list(output.outputs[0].token_ids),
            "counted": {name: value - before.get(name, 0) for name, value in counted().items()},
        }

    for seed in (900, 901):
        first_token(prompt(max(LENGTHS), seed + asked["warm"]))
    for length, tokens, seed in asked["prompts"]:
        print("FIRST", json.dumps({"length": length, **first_token(prompt(tokens, seed))}), flush=True)


def run(asked: dict[str, Any], core: int, log: Path) -> list[dict[str, Any]]:
    """Starts an engine and waits for what it measured."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "OMP_NUM_THREADS": "1",
    }
    command = ["taskset", "-c", str(core), sys.executable, "-m", "bench.ttft", "--engine", json.dumps(asked)]
    with log.open("wb") as errors:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment, timeout=START_S, check=False
        )
    if done.returncode:
        raise SystemExit(f"an engine ended with {done.returncode}:\n{log.read_text(errors='replace')[-4000:]}")
    lines = done.stdout.decode().splitlines()
    return [json.loads(line.removeprefix("FIRST ")) for line in lines if line.startswith("FIRST ")]


def connector(name: str, **extra: Any) -> dict[str, Any]:
    transfer = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if name == "KVStoreConnector":
        transfer["kv_connector_module_path"] = "kvstore_client.connectors.vllm"
    return transfer


def median(rows: list[dict[str, Any]], length: int) -> float:
    return float(statistics.median(row["ms"] for row in rows if row["length"] == length))


def overhead_percent(rows: list[dict[str, Any]], length: int) -> float:
    """What a miss and its store took, of the first token."""
    mine = [row for row in rows if row["length"] == length]
    cost = [row["counted"]["engine_seconds_total"] + row["counted"]["save_cpu_seconds_total"] for row in mine]
    return float(statistics.median(seconds * 1e5 / row["ms"] for seconds, row in zip(cost, mine, strict=True)))


def measure(core: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Every arm, one engine after the other."""
    prompts = [(length, length + i) for i in range(rounds) for length in LENGTHS]  # none begins like another
    with tempfile.TemporaryDirectory(prefix="kvstored-ttft-") as base, Node(host__size="1GiB") as node:
        model = Path(base) / "model"
        make_model(model)
        log = Path(base) / "engine.log"
        shared = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvstored-ttft-"))
        ours = connector("KVStoreConnector", endpoint=node.endpoint)
        theirs = connector("ExampleConnector", shared_storage_path=str(shared))
        found: dict[str, list[dict[str, Any]]] = {}
        try:
            for warm, (arm, transfer) in enumerate(
                {"none": None, "cold": ours, "hit": ours, "example cold": theirs, "example hit": theirs}.items()
            ):
                print(f"{arm} ...", flush=True)
                more = int(transfer is theirs)
                mine = [(length, length + more, seed) for length, seed in prompts]
                asked = {"model": str(model), "transfer": transfer, "prompts": mine, "warm": 10 * warm}
                found[arm] = run(asked, core, log)
        finally:
            subprocess.run(["rm", "-rf", str(shared)], check=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ttft", description=__doc__)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the engine's")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    arguments = parser.parse_args()
    if arguments.engine:
        engine(json.loads(arguments.engine))
        return 0
    found = measure(arguments.core, arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(found))
    print(
        f"{'tokens':>8}"
        + "".join(f"{arm:>14}" for arm in found)
        + f"{'hit x':>8}{'example x':>11}{'miss %':>8}{'bar':>6}"
    )
    for length in LENGTHS:
        cold = median(found["none"], length)
        cells = "".join(f"{median(rows, length):>11.1f} ms" for rows in found.values())
        ours, example = cold / median(found["hit"], length), cold / median(found["example hit"], length)
        cost = overhead_percent(found["cold"], length)
        print(f"{length:>8}{cells}{ours:>8.1f}{example:>11.1f}{cost:>8.2f}{BARS_PERCENT[length]:>6}")
    same = all(a["tokens"] == b["tokens"] for a, b in zip(found["none"], found["hit"], strict=True))
    print("the same tokens with a hit as without a connector" if same else "TOKENS DIFFER")
    best = median(found["none"], LENGTHS[-1]) / median(found["hit"], LENGTHS[-1])
    print(f"a hit at {LENGTHS[-1]} tokens: {best:.0f}x, bar {BAR_HIT:.0f}x")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
