"""One vLLM of bench.ttft, in a process of its own and with its engine in it: `python -m bench.ttft_engine JSON`.

It needs vLLM only, so it also runs in a peer's environment. JSON has `model`, `transfer` (of KVTransferConfig, or
null), `warm` (seeds of prompts that are not measured) and `prompts` (length, tokens, seed). Each measured prompt is
one line "FIRST {...}" of the output: the first token's time, the tokens, how many were cached, and what our connector
counted meanwhile.
"""

import importlib.util
import json
import sys
import time
from typing import Any

MODEL_TOKENS = 8192
VOCABULARY = 4096
WARM_TOKENS = 6145
CACHE_BYTES = 1 << 30
GENERATED = 4
PAUSE_S = 0.5
"""Of steps without a prompt after each: what is saved is saved, and the engine has heard of it."""


def prompt(tokens: int, seed: int) -> list[int]:
    """Token ids; those of one seed begin alike."""
    return [(i * 7919 + seed * 104729) % (VOCABULARY - 10) + 10 for i in range(tokens)]


def counted() -> dict[str, float]:
    """By our connector, since the start."""
    from prometheus_client import REGISTRY

    return {
        sample.name.removeprefix("vllm:kvstored_"): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if "kvstored" in sample.name and sample.name.endswith("_total")
    }


class Measured:
    """An engine, and one prompt after the other."""

    def __init__(self, model: str, transfer: dict[str, Any] | None) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self._llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=MODEL_TOKENS,
            max_num_batched_tokens=MODEL_TOKENS,
            max_num_seqs=8,
            kv_cache_memory_bytes=CACHE_BYTES,
            disable_log_stats=False,
            seed=0,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        )
        self._sampling = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False)

    def first_token(self, ids: list[int]) -> dict[str, Any]:
        before = counted()
        (output,) = self._llm.generate([{"prompt_token_ids": ids}], self._sampling, use_tqdm=False)
        pause = time.monotonic() + PAUSE_S
        while time.monotonic() < pause:
            self._llm.llm_engine.step()
        return {
            "ms": output.metrics.first_token_latency * 1e3,
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "counted": {name: value - before.get(name, 0) for name, value in counted().items()},
        }


def hide_llvmlite() -> None:
    """vLLM looks into every module for its kernels, and stumbles over one that LMCache brings: it is in use by then."""
    if importlib.util.find_spec("llvmlite"):
        importlib.import_module("llvmlite.binding")
        sys.modules.pop("llvmlite.binding.ffi", None)


def main() -> None:
    asked = json.loads(sys.argv[1])
    hide_llvmlite()
    engine = Measured(asked["model"], asked["transfer"])
    for seed in asked["warm"]:
        engine.first_token(prompt(WARM_TOKENS, seed))
    for length, tokens, seed in asked["prompts"]:
        first = engine.first_token(prompt(tokens, seed))
        print("FIRST", json.dumps({"length": length, **first}), flush=True)


if __name__ == "__main__":
    main()
