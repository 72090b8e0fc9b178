"""The plugin behind the marker `gpu`: without a GPU those tests are deselected, and it is said how many and why.

Registered by conftest.py files (once, by name). Under xdist the workers collect; they tell
the process that reports.
"""

import functools
from typing import Any

import pytest

from kvstored_cuda.devices.discovery import devices

NAME = "gpu-marker"
_COUNT = "gpu_deselected"

_deselected: list[int] = []


@functools.cache
def why_no_gpu() -> str:
    """Empty where there is a GPU."""
    found = devices(environment={})
    return "" if found.found else found.why


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU (deselected where there is none)")


def pytest_report_header() -> str:
    why = why_no_gpu()
    return f"gpu: {why}: tests marked gpu are deselected" if why else "gpu: there is one"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not why_no_gpu():
        return
    out = [item for item in items if item.get_closest_marker("gpu")]
    if out:
        _deselected.append(len(out))
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=out)


def pytest_sessionfinish(session: pytest.Session) -> None:
    told: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if told is not None:
        told[_COUNT] = sum(_deselected)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """xdist: each worker has collected all, so the last one's number is that of all."""
    count = getattr(node, "workeroutput", {}).get(_COUNT, 0)
    if count:
        _deselected[:] = [count]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _deselected:
        terminalreporter.write_line(f"gpu: {sum(_deselected)} tests need a GPU and were deselected: {why_no_gpu()}")
