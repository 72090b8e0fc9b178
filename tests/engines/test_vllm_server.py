"""vLLM's HTTP server with the connector: the same answers, and the connector's figures in its /metrics."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunningDaemon, eventually
from tests.engines.vllm_engines import BLOCK, Engine, prompt

TOKENS = 1000
START_S, ANSWER_S, END_S = 160.0, 60.0, 30.0


class Server:
    """vLLM as a user starts it, on a free port of this machine's own address."""

    def __init__(self, model: Path, endpoint: str, log: Path, port: int) -> None:
        transfer = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore_client.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"endpoint": endpoint},
        }
        self._log = log
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", "4096", "--max-num-seqs", "8", "--served-model-name", "random"]
        command += ["--kv-cache-memory-bytes", str(128 << 20), "--kv-transfer-config", json.dumps(transfer)]
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        with log.open("wb") as out:
            # A session of its own: its workers end with it, whatever becomes of it.
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)

    def ready(self) -> None:
        eventually(self._healthy, START_S, "the server")

    def _healthy(self) -> bool:
        assert self.process.poll() is None, self._log.read_text(errors="replace")[-8000:]
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def complete(self, tokens: list[int]) -> list[int]:
        asked = {"model": "random", "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**asked, "return_token_ids": True}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            found: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return found

    def metrics(self) -> dict[str, float]:
        """By name and labels, without vLLM's own labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=ANSWER_S) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line.startswith("vllm:kvstored_"):
                name, _, value = line.rpartition(" ")
                name, _, labels = name.partition("{")
                own = [label for label in labels.rstrip("}").split(",") if label.startswith(("prompt_tokens", "le="))]
                found[" ".join([name.removeprefix("vllm:kvstored_"), *own])] = float(value)
        return found

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            with contextlib.suppress(ProcessLookupError):  # what it has left behind
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def start_server(llama: Path, tmp_path: Path) -> Iterator[Callable[[str], Server]]:
    running: list[Server] = []

    def start(endpoint: str) -> Server:
        port = free_port()
        running.append(Server(llama, endpoint, tmp_path / f"server-{len(running)}.log", port))
        running[-1].ready()
        return running[-1]

    try:
        yield start
    finally:
        for server in running:
            server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def counted(server: Server, name: str, value: float) -> dict[str, float]:
    """The metrics, once this one has come to its value: vLLM takes them in with a step."""

    def there() -> Any:
        found = server.metrics()
        return found if found.get(name) == value else None

    found: dict[str, float] = eventually(there, 20, f"{name} to be {value}")
    return found


@pytest.mark.timeout(600)
def test_a_server_tells_in_its_metrics_what_was_loaded_and_stored_and_how_long_that_took(
    daemon: RunningDaemon, start_engine: Callable[..., Engine], start_server: Callable[[str], Server]
) -> None:
    engine = start_engine(daemon.endpoint).ready()
    cold = engine.generate(prompt(TOKENS))["tokens"]
    assert engine.counters()["save_blocks"] == TOKENS // BLOCK
    engine.stop()
    server = start_server(daemon.endpoint)
    assert [server.complete(prompt(TOKENS))] == cold
    found = counted(server, "load_blocks_total", TOKENS // BLOCK)
    assert found["lookup_hits_total"] == found["lookups_total"] == found["loads_total"] == 1
    assert found["load_failures_total"] == found["save_blocks_total"] == 0
    assert found['load_seconds_count prompt_tokens="<=2048"'] == 1
    assert 0 < found['load_seconds_sum prompt_tokens="<=2048"'] < 2
    server.complete(prompt(TOKENS, seed=2))
    found = counted(server, "save_blocks_total", TOKENS // BLOCK)
    assert found['save_seconds_count prompt_tokens="<=2048"'] >= 1
    assert found['save_seconds_sum prompt_tokens="<=2048"'] > 0
    assert (found["lookups_total"], found["lookup_hits_total"]) == (2, 1)
    assert 0 < found["engine_seconds_total"] < 2
