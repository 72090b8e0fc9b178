"""Engines for tests, each a process of its own (vllm_program.py), which the test talks to."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines.vllm_nursery import PROGRAM, Forked, Nursery

START_S, ANSWER_S, END_S = 240.0, 120.0, 20.0
VOCABULARY = 4096
BLOCK = 128
"""Tokens of vLLM's blocks on a CPU, unless told otherwise."""


def prompt(tokens: int, seed: int = 13) -> list[int]:
    """Token ids; those of one seed begin alike."""
    return [(i * 7919 + seed * 104729) % (VOCABULARY - 10) + 10 for i in range(tokens)]


def environment_of(*, processes: bool) -> dict[str, str]:
    """Of an engine's process."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    return environment | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


class Engine:
    """One vLLM, in one process with its worker. Answers are bounded; what it writes goes to a file."""

    def __init__(
        self,
        model: Path,
        scratch: Path,
        extra: dict[str, Any] | None,
        *,
        role: str = "kv_both",
        cache_mib: int = 128,
        nursery: Nursery | None = None,
        processes: bool = False,
        **llm: Any,
    ) -> None:
        """Starts it; `ready` waits for it. Without a nursery it is a Python that shares nothing with any other.

        `processes`: scheduler and workers in their own, as vLLM does.
        """
        self.gates = Path(tempfile.mkdtemp(dir=scratch))
        self._errors = self.gates / "log"
        config = {"model": str(model), "extra": extra, "role": role, "gates": str(self.gates)}
        config["llm"] = {"kv_cache_memory_bytes": cache_mib << 20, **llm}
        self.process: subprocess.Popen[bytes] | Forked
        with self._errors.open("wb") as errors:
            if nursery is not None and not processes:
                self.process = nursery.fork(json.dumps(config), errors.fileno())
            else:
                self.process = subprocess.Popen(
                    [sys.executable, str(PROGRAM), "run", json.dumps(config)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment_of(processes=processes),
                    start_new_session=True,
                )
        self._left = b""
        self._stopped = False
        self.announced: list[str] = []
        self._answers: list[Any] = []

    def ready(self) -> "Engine":
        """Waits until it takes prompts."""
        assert self._line(START_S) == {"ready": True}, self.log()
        return self

    def log(self) -> str:
        """What it has written."""
        return self._errors.read_text(errors="replace")[-8000:]

    def _line(self, timeout_s: float) -> Any:
        assert self.process.stdout is not None
        until = time.monotonic() + timeout_s
        while b"\n" not in self._left:
            ready, _, _ = select.select([self.process.stdout], [], [], max(until - time.monotonic(), 0))
            assert ready, f"the engine said nothing within {timeout_s} s:\n{self.log()}"
            some = os.read(self.process.stdout.fileno(), 1 << 16)
            assert some, f"the engine ended:\n{self.log()}"
            self._left += some
        line, _, self._left = self._left.partition(b"\n")
        return json.loads(line)

    def ask(self, what: str, **arguments: Any) -> None:
        """Tells it what to do; `answer` has what comes of it."""
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps({"do": what, **arguments}) + "\n").encode())
        self.process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """Of what was asked last."""
        while not self._answers:
            self._hear(timeout_s)
        return self._answers.pop()

    def _hear(self, timeout_s: float) -> None:
        said = self._line(timeout_s)
        if "event" in said:
            self.announced.append(said["event"])
        else:
            self._answers.append(said["answer"])

    def answers_within(self, timeout_s: float) -> bool:
        """Whether it says something meanwhile; `answer` has it."""
        assert self.process.stdout is not None
        return bool(self._left or self._answers or select.select([self.process.stdout], [], [], timeout_s)[0])

    def until(self, event: str, timeout_s: float = ANSWER_S) -> None:
        """Waits until it says that it is about to make this call, maybe when it has answered: a save is late."""
        while event not in self.announced:
            self._hear(timeout_s)
        self.announced.remove(event)

    def hold(self, *calls: str) -> None:
        """These calls of the SDK wait from now on, and say so, until `let_go`."""
        for call in calls:
            (self.gates / call).touch()
        self.do("announce", names=list(calls))

    def let_go(self, call: str) -> None:
        (self.gates / call).unlink()

    def do(self, what: str, **arguments: Any) -> Any:
        """Asks, and waits for the answer."""
        self.ask(what, **arguments)
        return self.answer()

    def generate(self, *prompts: Sequence[int], **arguments: Any) -> dict[str, Any]:
        """See vllm_program.Program.generate; all of them must have come to their end."""
        came: dict[str, Any] = self.do("generate", prompts=list(prompts), **arguments)
        assert came["finished"] == ["length"] * len(prompts), came
        return came

    def counters(self) -> dict[str, float]:
        """The connector's, when all that is under way has ended."""
        found: dict[str, float] = self.do("settle")
        return found

    def stop(self) -> None:
        """Ends it, in time, with all that it has started."""
        if self._stopped:
            return
        self._stopped = True
        if self.process.poll() is None and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.ask("stop")
            watch = threading.Timer(END_S, self.process.kill)
            watch.start()
            self.process.wait()
            watch.cancel()
        with contextlib.suppress(ProcessLookupError):  # what it has left behind, which is in its session alone
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
