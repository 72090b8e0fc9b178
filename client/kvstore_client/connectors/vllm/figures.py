"""Counters of the connector, for vLLM's log and its /metrics.

Plain numbers in a dict, since vLLM carries them between processes. Times of loads and saves are told by the
length of the prompt, so that a slow first token of a long prompt can be told apart into computing and loading.
`engine_seconds` is what the connector took of the engine's own threads, in all its hooks.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "lookups": "Prompts looked up in the store",
    "lookup_hits": "Prompts of which the store had enough to load",
    "lookup_tokens": "Tokens that were to be loaded instead of computed",
    "loads": "Requests whose load has ended",
    "load_failures": "Requests whose load ended before all was there; the rest was computed",
    "load_blocks": "Blocks loaded into the engine",
    "load_bytes": "Bytes loaded into the engine",
    "saves": "Saves that have ended; a prefill in chunks has several",
    "save_blocks": "Blocks stored",
    "save_bytes": "Bytes stored",
    "save_existing": "Blocks that were stored already",
    "save_rejected": "Blocks that the store had no room for, or was away for",
    "save_dropped": "Blocks not saved because too many were waiting",
    "save_cpu_seconds": "CPU time of the threads that save",
    "engine_seconds": "Time that the connector took of the engine's own threads",
}

SECONDS = {"load_seconds": "From a load's order to its end", "save_seconds": "From a save's order to its end"}

PROMPT_TOKENS = (512, 2048, 8192, 32768, 131072)
"""Upper ends of the lengths of prompts that times are told for."""

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

OBSERVED_MAX = 4096
"""Times kept until the engine takes them; of more the last ones are not kept."""


def length_of(prompt_tokens: int) -> str:
    """The label of a prompt of this length."""
    return next((f"<={end}" for end in PROMPT_TOKENS if prompt_tokens <= end), f">{PROMPT_TOKENS[-1]}")


class Stats(KVConnectorStats):  # type: ignore[misc]
    """What was counted since the engine last took it: numbers by name, and for each of SECONDS lists by length."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=dict(data or {}))

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "Stats":
        for name, value in other.data.items():
            if name in SECONDS:
                mine = self.data.setdefault(name, {})
                for length, seconds in value.items():
                    mine[length] = [*mine.get(length, ()), *seconds]
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        short: dict[str, int | float] = {}
        for name, value in self.data.items():
            if name in SECONDS:
                every = [seconds for some in value.values() for seconds in some]
                short[f"worst_{name}"] = round(max(every, default=0.0), 4)
            else:
                short[name] = round(value, 4)
        return short

    def is_empty(self) -> bool:
        return not self.data


class Tally:
    """Counts from any thread, until somebody takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = Stats()
        self._observed = 0

    def add(self, name: str, value: float = 1) -> None:
        """Raises KeyError for a name that is none of COUNTERS."""
        assert name in COUNTERS, name
        with self._lock:
            self._stats.data[name] = self._stats.data.get(name, 0) + value

    def took(self, name: str, prompt_tokens: int, seconds: float) -> None:
        """One of SECONDS."""
        with self._lock:
            if self._observed < OBSERVED_MAX:
                self._observed += 1
                lengths = self._stats.data.setdefault(name, {})
                lengths.setdefault(length_of(prompt_tokens), []).append(seconds)

    def take(self) -> Stats | None:
        """What there is, and begins anew; None where there is nothing."""
        with self._lock:
            taken, self._stats, self._observed = self._stats, Stats(), 0
        return None if taken.is_empty() else taken


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters as `vllm:kvstored_*_total`, and the times as histograms with a label `prompt_tokens`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, words in COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:kvstored_{name}", documentation=words, labelnames=labelnames)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }
        self._histograms = {
            name: self._histogram_cls(
                name=f"vllm:kvstored_{name}",
                documentation=words,
                labelnames=[*labelnames, "prompt_tokens"],
                buckets=BUCKETS,
            )
            for name, words in SECONDS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in SECONDS:
                labels = self.per_engine_labelvalues[engine_idx]
                for length, seconds in value.items():
                    histogram = self._histograms[name].labels(*labels, length)
                    for each in seconds:
                        histogram.observe(each)
            elif name in self._counters:
                self._counters[name][engine_idx].inc(value)
