"""How figures are taken: arms in turn, medians, and the figure as a ratio."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

QUICK = 10
"""Of so many rounds a quick run takes one: it shows that everything works, not how fast it is."""

PARTS = 5
"""A run is looked at in so many parts, to say how far a figure moves within it."""

Timed = Callable[[int], float]
"""One operation of an arm: takes the round's number, answers the seconds that count."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `ok` is whether the bar is met; `text` how the figure reads."""

    name: str
    figure: float
    bar: float | None
    """None: for orientation."""
    at_least: bool
    unit: str
    absolute: str
    reference: str
    low: float | None = None
    """The least figure of a part of the run, and the greatest."""
    high: float | None = None

    @property
    def ok(self) -> bool:
        if self.bar is None:
            return True
        return self.figure >= self.bar if self.at_least else self.figure <= self.bar


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Turns:
    """Seconds of arms that took turns."""

    def __init__(self, samples: dict[str, list[float]]) -> None:
        self._samples = samples

    def __getitem__(self, name: str) -> float:
        """The median of an arm."""
        return statistics.median(self._samples[name])

    def range(self, name: str, reference: str | None = None) -> tuple[float, float]:
        """The least and the greatest median of a part of the run, as a multiple of the reference's in that part."""
        each = []
        rounds = len(self._samples[name])
        for part in range(PARTS):
            at = slice(part * rounds // PARTS, (part + 1) * rounds // PARTS)
            if self._samples[name][at]:
                seconds = statistics.median(self._samples[name][at])
                each.append(seconds / statistics.median(self._samples[reference][at]) if reference else seconds)
        return min(each), max(each)


def in_turn(arms: dict[str, Timed], rounds: int, warm: int, *, quick: bool = False) -> Turns:
    """Runs the arms; they take turns in every round, so that drift meets all of them."""
    if quick:
        rounds, warm = max(rounds // QUICK, 2), max(warm // QUICK, 1)
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + warm):
        for name, arm in arms.items():
            seconds = arm(number)
            if number >= warm:
                samples[name].append(seconds)
    return Turns(samples)


def share(name: str, turns: Turns, ours: str, reference: str, bar: float | None, said: str = "") -> Row:
    """The speed of ours as a share of the reference's."""
    low, high = turns.range(reference, ours)
    absolute, other = micro(turns[ours]), f"{said or reference}, {micro(turns[reference])}"
    return Row(name, turns[reference] / turns[ours], bar, True, "", absolute, other, low, high)


def absolute(name: str, turns: Turns, arm: str, bar: float | None) -> Row:
    """The time of an arm by itself."""
    low, high = (seconds * 1e6 for seconds in turns.range(arm))
    return Row(name, turns[arm] * 1e6, bar, False, " µs", micro(turns[arm]), "none", low, high)


def micro(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"


def machine() -> str:
    """What the figures belong to."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}, Linux {platform.release()}, Python {platform.python_version()}"
