"""A vLLM engine as a process of a test's: does what it is told, a line of JSON each, and answers with one.

    vllm_program.py run CONFIG       an engine; CONFIG is JSON: model, extra, role, llm, gates

Told to with `announce`, it says on its own when it is about to make a call that has a gate, a file GATES/NAME:
{"event": NAME}; the call goes on when the file is gone.
"""

import contextlib
import json
import os
import sys
import threading
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_HOST_IP="127.0.0.1", DO_NOT_TRACK="1")

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


def overlap_steps() -> None:
    """Has vLLM schedule a step while the one before runs, as it does by default where there is an accelerator."""
    from unittest.mock import MagicMock

    import torch
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def overlapping(platform: Any, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(overlapping)  # it says no: there is nothing to gain
    torch.cuda.Stream = torch.cuda.Event = torch.Event = torch.cuda.current_stream = MagicMock()  # waits of a device's
    torch.cuda.stream = lambda _: contextlib.nullcontext()


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
        self.saved: list[Any] = []
        if transfer is not None:
            self._time_hooks()
        llm = dict(config["llm"])
        if llm.pop("events", False):
            llm["kv_events_config"] = KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=f"ipc://{self.gates}/kv", topic="kv"
            )
        if llm.pop("overlap", False):
            overlap_steps()
        self.llm = LLM(
            model=config["model"],
            skip_tokenizer_init=True,
            disable_log_stats=False,
            kv_transfer_config=transfer,
            seed=0,
            **{"enforce_eager": True, "dtype": "float32", "max_model_len": 4096, "max_num_seqs": 8, **llm},
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

    def kept(self, tokens: list[int]) -> dict[str, str]:
        """Blocks of states that the store has, as the engine's worker names them: by tokens before, in base64."""
        groups, names = self._names(tokens)
        (group,) = (group for group in groups if "Mamba" in group.packing)
        space = self._space(group)
        blocks = [space.get([space.key(name)]) for name in names]
        return {
            str((i + 1) * group.block_tokens): b64encode(found[0]).decode() for i, found in enumerate(blocks) if found
        }

    def forget(self, tokens: list[int], after: int) -> int:
        """Takes out of the store, of every group, what it has after so many of the tokens."""
        groups, names = self._names(tokens)
        return sum(
            space.remove([space.key(name) for name in names[after // group.block_tokens :]])
            for group in groups
            for space in [self._space(group)]
        )

    def _space(self, group: Any) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from kvstore_client.connectors.vllm.messages import Space

        return get_kv_transfer_group()._worker._namespaces.of(group.number, Space())

    def _names(self, tokens: list[int]) -> tuple[Any, list[bytes]]:
        """The cache groups, all of one block size, and the names of blocks."""
        from vllm import SamplingParams
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.v1.request import Request

        hasher = self.llm.llm_engine.engine_core.engine_core.request_block_hasher
        request = Request("names", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        return get_kv_transfer_group()._worker.description.groups, [bytes(name) for name in request.block_hashes]

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

    def spoil_load(self, rows: int = 0, *, abort: bool = False) -> None:
        """The next load fails, a layered one after so many rows; what did not come is noise, as of others before.

        `abort`: its request is given up meanwhile, as by a client that has gone.
        """
        import torch

        from kvstore_client.connectors.vllm.copies import GroupMemory

        fill, by_rows = GroupMemory.fill, GroupMemory.fill_by_rows

        def spoil(memory: Any, blocks: list[int]) -> None:
            GroupMemory.fill, GroupMemory.fill_by_rows = fill, by_rows  # type: ignore[method-assign]
            with torch.inference_mode():
                for row in memory._rows:
                    noise = row.view(torch.float32)  # finite: a kernel may multiply what it masks by nothing
                    noise[list(blocks)] = torch.randn(len(blocks), noise.shape[1]) * 100
            if abort:
                engine = self.llm.llm_engine
                first = list(engine.output_processor.request_states)[:1]
                first = engine.output_processor.abort_requests(first, internal=True)
                engine.engine_core.engine_core.aborts_queue.put_nowait(first)

        def failing(memory: Any, blocks: Any, views: Any) -> None:
            spoil(memory, blocks)
            raise OSError("spoilt")

        def failing_after(memory: Any, blocks: Any, views: Any, begun: Any) -> None:
            def count(done: int) -> None:
                if done > rows:
                    raise OSError("spoilt")
                begun(done)

            spoil(memory, blocks)
            by_rows(memory, blocks, views, count)

        GroupMemory.fill, GroupMemory.fill_by_rows = failing, failing_after  # type: ignore[assignment, method-assign]

    def watch_saves(self) -> None:
        """Notes from now on which blocks are saved."""
        from kvstore_client.connectors.vllm.working import WorkerSide

        save = WorkerSide._save_run

        def noted(worker: Any, order: Any, run: Any, since: float, after: Any) -> Any:
            self.saved += [(order.space, run.group, name) for name in run.hashes]
            return save(worker, order, run, since, after)

        WorkerSide._save_run = noted  # type: ignore[assignment, method-assign]

    def stored(self, to: str) -> int:
        """Writes what the store has of each block whose save was noted to a file, by the block's hash."""
        import numpy as np
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        namespaces = get_kv_transfer_group()._worker._namespaces
        found = {}
        for space, group, name in self.saved:
            namespace = namespaces.of(group, space)
            with namespace.acquire([namespace.key(name)], timeout_s=5.0) as lease:
                if len(lease):
                    found[name.hex()] = lease.numpy(0, np.float32).copy()
        np.savez(to, **found)
        return len(found)

    def run(self) -> None:
        """Until told to stop, or nobody is there to tell."""
        for line in sys.stdin:
            asked = json.loads(line)
            what = asked.pop("do")
            if what == "stop":
                break
            say(answer=getattr(self, what)(**asked))


if __name__ == "__main__":
    program = Program(json.loads(sys.argv[2]))
    say(ready=True)
    program.run()
    program.llm.llm_engine.engine_core.shutdown()
    os._exit(0)
