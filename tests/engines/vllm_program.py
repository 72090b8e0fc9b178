"""A vLLM engine as a process of a test's: does what it is told, a line of JSON each, and answers with one.

    vllm_program.py llama DIRECTORY [ADAPTER ...]    writes a random Llama, and LoRA adapters for it
    vllm_program.py windowed DIRECTORY               writes a random model with layers that see a window only
    vllm_program.py hybrid DIRECTORY                 writes a random model with layers that have a state
    vllm_program.py run CONFIG                       an engine; CONFIG is JSON: model, extra, role, llm, gates

Told to with `announce`, it says on its own when it is about to make a call that has a gate, a file GATES/NAME:
{"event": NAME}; the call goes on when the file is gone.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_HOST_IP="127.0.0.1", DO_NOT_TRACK="1")

VOCABULARY = 4096
HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_push_work",
    "has_pending_block_frees",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
    "take_events",
    "reset_cache",
)
"""Of the connector, called in a step."""

SETTLE_S = 30.0


def say(**what: Any) -> None:
    """One line, whole, to whoever started us."""
    os.write(OUT, (json.dumps(what) + "\n").encode())


def ready_s() -> float:
    """How long this thread has been ready to run while others had the processor: nobody's wait for the store."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


OUT = os.dup(1)
os.dup2(2, 1)  # what the engine prints is not an answer


def write_windowed(directory: Path) -> None:
    """A Gemma of 6 layers with random weights, two thirds of them with a window of 256 tokens."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=8192,
        sliding_window=256,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    Gemma3ForCausalLM(config).to(torch.float32).save_pretrained(directory)


def write_hybrid(directory: Path) -> None:
    """A Qwen3-Next of 4 layers with random weights, every other one of linear attention."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    model = Qwen3NextForCausalLM(config)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.A_log.data.fill_(-6)  # else it forgets within a few tokens, and any state would do
            layer.linear_attn.out_proj.weight.data *= 4
    model.to(torch.bfloat16).save_pretrained(directory)


def write_llama(directory: Path, adapters: list[str]) -> None:
    """A Llama of 4 layers with random weights, in float32."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2", unk_token="t0").save_pretrained(
        directory
    )
    for seed, name in enumerate(adapters):
        at = directory / name
        at.mkdir()
        torch.manual_seed(100 + seed)
        weights = {}
        for layer in range(4):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(8, 256)
            weights[f"{prefix}.lora_B.weight"] = torch.randn(256, 8)
        save_file(weights, at / "adapter_model.safetensors")
        settings = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "peft_type": "LORA", "bias": "none"}
        (at / "adapter_config.json").write_text(json.dumps(settings))


class Program:
    """The engine, and what it is told to do."""

    def __init__(self, config: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        transfer = None
        if config["extra"] is not None:
            transfer = KVTransferConfig(
                kv_connector="KVStoreConnector",
                kv_connector_module_path="kvstore_client.connectors.vllm",
                kv_role=config["role"],
                kv_connector_extra_config=config["extra"],
            )
        self.gates = Path(config["gates"])
        self.slowest: dict[str, float] = {}
        self.events: list[Any] = []
        self.announcing: set[str] = set()
        self.hints: list[list[Any]] = []
        if transfer is not None:
            self._time_hooks()
        llm = dict(config["llm"])
        if llm.pop("events", False):
            llm["kv_events_config"] = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=f"ipc://{self.gates}/kv", topic="kv"
            )
        self.llm = LLM(
            model=config["model"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,
            kv_transfer_config=transfer,
            seed=0,
            **{"dtype": "float32", "max_model_len": 4096, "max_num_seqs": 8, **llm},
        )

    def _time_hooks(self) -> None:
        from kvstore_client.connectors.vllm import KVStoreConnector

        def timed(name: str) -> None:
            hook = getattr(KVStoreConnector, name)

            def call(*arguments: Any, **named: Any) -> Any:
                began = time.perf_counter() - ready_s()
                try:
                    return hook(*arguments, **named)
                finally:
                    took = time.perf_counter() - ready_s() - began
                    self.slowest[name] = max(self.slowest.get(name, 0.0), took)

            setattr(KVStoreConnector, name, call)

        for name in HOOKS:
            timed(name)

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int = 8,
        salt: str | None = None,
        adapter: str | None = None,
        params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """All prompts at once."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        asked: list[Any] = [
            {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts
        ]
        lora = LoRARequest(Path(adapter).name, 1 + sum(Path(adapter).name.encode()), adapter) if adapter else None
        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        outputs = self.llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "finished": [output.outputs[0].finish_reason for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "ttft": [output.metrics.first_token_latency for output in outputs],
            "params": [output.kv_transfer_params for output in outputs],
        }

    def settle(self) -> dict[str, Any]:
        """Steps until nothing is being saved any more; answers the connector's counters since the start."""
        until = time.monotonic() + SETTLE_S
        engine = self.llm.llm_engine
        while engine.engine_core.engine_core.scheduler.has_requests():
            engine.step()
            if time.monotonic() > until:
                raise TimeoutError("the engine does not settle")
        return self.counters()

    def counters(self) -> dict[str, Any]:
        """As vLLM's own metrics have them."""
        return {
            metric.name.removeprefix("vllm:kvstored_"): metric.value
            for metric in self.llm.get_metrics()
            if "kvstored" in metric.name and hasattr(metric, "value")
        }

    def metric(self, name: str) -> float:
        """The sum of one of the engine's own."""
        return float(sum(metric.value for metric in self.llm.get_metrics() if metric.name == name))

    def reset(self, connector: bool) -> bool:
        """Empties the engine's own cache, and the connector's."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def connected(self) -> bool:
        """Whether both sides of the connector have a session with the daemon."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        return bool(scheduler._scheduler._client.connected and get_kv_transfer_group()._worker._client.connected)

    def hooks(self) -> dict[str, float]:
        """The longest call of each since the last question, in seconds that it ran or waited for something."""
        slowest, self.slowest = self.slowest, {}
        return slowest

    def listen(self) -> None:
        """Collects KV events from now on."""
        import msgspec
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        socket = zmq.Context.instance().socket(zmq.SUB)
        socket.connect(f"ipc://{self.gates}/kv")
        socket.setsockopt_string(zmq.SUBSCRIBE, "kv")
        decoder = msgspec.msgpack.Decoder(type=KVEventBatch)

        def collect() -> None:
            while True:
                _, _, payload = socket.recv_multipart()
                self.events.extend(decoder.decode(payload).events)

        threading.Thread(target=collect, daemon=True).start()

    def heard(self, medium: str) -> list[dict[str, Any]]:
        """Blocks that were stored there, as the events have it."""
        return [
            {
                "hashes": [name.hex() if isinstance(name, bytes) else name for name in event.block_hashes],
                "tokens": list(event.token_ids),
                "parent": event.parent_block_hash.hex() if isinstance(event.parent_block_hash, bytes) else None,
            }
            for event in self.events
            if type(event).__name__ == "BlockStored" and event.medium == medium
        ]

    def watch_hints(self) -> None:
        """Notes from now on what is told the store with each commit."""
        from kvstore_client import Slots

        commit = Slots.commit

        def noted(slots: Any, *arguments: Any, hint: Any, **named: Any) -> Any:
            self.hints.append([hint.conversation, hint.tokens_generated])
            return commit(slots, *arguments, hint=hint, **named)

        Slots.commit = noted  # type: ignore[assignment, method-assign]

    def hinted(self) -> list[list[Any]]:
        """Conversation and tokens generated, of each commit since the last question."""
        hints, self.hints = self.hints, []
        return hints

    def announce(self, names: list[str]) -> None:
        """Says when it is about to make these calls, and holds them while the gate is there."""
        from kvstore_client import Namespace, Slots
        from kvstore_client.connectors.vllm.copies import GroupMemory

        owners = {"commit": Slots, "fill": GroupMemory, "drain": GroupMemory}
        pause = threading.Event()

        def announced(owner: Any, name: str) -> None:
            original = getattr(owner, name)

            def call(*arguments: Any, **named: Any) -> Any:
                gate = self.gates / name
                if gate.exists():
                    say(event=name)
                while gate.exists():
                    pause.wait(0.005)
                return original(*arguments, **named)

            setattr(owner, name, call)

        for name in names:
            if name not in self.announcing:
                self.announcing.add(name)
                announced(owners.get(name, Namespace), name)

    def run(self) -> None:
        """Until told to stop, or nobody is there to tell."""
        for line in sys.stdin:
            asked = json.loads(line)
            what = asked.pop("do")
            if what == "stop":
                break
            say(answer=getattr(self, what)(**asked))


if __name__ == "__main__":
    if sys.argv[1] == "llama":
        write_llama(Path(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1] == "windowed":
        write_windowed(Path(sys.argv[2]))
    elif sys.argv[1] == "hybrid":
        write_hybrid(Path(sys.argv[2]))
    else:
        program = Program(json.loads(sys.argv[2]))
        say(ready=True)
        program.run()
        program.llm.llm_engine.engine_core.shutdown()
        os._exit(0)
