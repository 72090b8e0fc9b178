"""Engines for the tests here. Those of vLLM run in an environment that has it: `make test-engines`."""

import fcntl
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_engines import Engine, environment_of
from tests.engines.vllm_nursery import Nursery

ENGINES = {"vllm": "test_vllm_*.py", "transformers": "test_transformers.py"}
collect_ignore_glob = [files for engine, files in ENGINES.items() if importlib.util.find_spec(engine) is None]
collect_ignore_glob += [
    f"test_{engine}.py"  # whose own environment a variable may name: see engine_process.py
    for engine in ("sglang", "lmcache")
    if importlib.util.find_spec(engine) is None and f"KVSTORED_{engine.upper()}_PYTHON" not in os.environ
]

MODELS, MAKE_S = Path(__file__).with_name("vllm_models.py"), 120.0


def pytest_report_header() -> str:
    return f"engines that are not here, and their tests left out: {collect_ignore_glob or 'none'}"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Llama, and LoRA adapters `one` and `two` in it."""
    return made("llama", tmp_path_factory, "one", "two")


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random model most of whose layers see a window of 256 tokens."""
    return made("windowed", tmp_path_factory)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random model half of whose layers have a state."""
    return made("hybrid", tmp_path_factory)


def made(kind: str, tmp_path_factory: pytest.TempPathFactory, *adapters: str) -> Path:
    """See vllm_models.py. Processes that share the tests share the model, which the first of them writes."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    directory, done = shared / f"random-{kind}", shared / f"random-{kind}.done"
    with (shared / f"random-{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            command = [sys.executable, str(MODELS), kind, str(directory), *adapters]
            subprocess.run(command, check=True, timeout=MAKE_S, stdout=subprocess.DEVNULL)
            done.touch()
    return directory


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where engines' processes come from."""
    nursery = Nursery(environment_of(processes=False), tmp_path_factory.mktemp("nursery") / "log")
    try:
        yield nursery
    finally:
        nursery.close()


@pytest.fixture
def start_engine(llama: Path, nursery: Nursery) -> Iterator[Callable[..., Engine]]:
    """Starts vLLM: `start_engine(daemon.endpoint, block_size=32)`, or None for one without the connector.

    `extra` are more settings of the connector. A `fresh` one is a Python of its own from its first import on.
    All engines are gone after the test.
    """
    running: list[Engine] = []
    with tempfile.TemporaryDirectory(prefix="kvstored-vllm-", ignore_cleanup_errors=True) as scratch:

        def start(
            endpoint: str | None,
            *,
            extra: dict[str, Any] | None = None,
            model: Path = llama,
            fresh: bool = False,
            **arguments: Any,
        ) -> Engine:
            settings = None if endpoint is None else {"endpoint": endpoint, **(extra or {})}
            running.append(Engine(model, Path(scratch), settings, nursery=None if fresh else nursery, **arguments))
            return running[-1]

        try:
            yield start
        finally:
            for engine in running:
                engine.stop()
