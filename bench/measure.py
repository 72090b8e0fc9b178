"""How figures are taken: arms in turn, medians, and the figure as a ratio."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Timed = Callable[[int], float]
"""One operation of an arm: takes the round's number, answers the seconds that count."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `ok` is whether the bar is met; `text` how the figure reads."""

    name: str
    figure: float
    bar: float
    at_least: bool
    unit: str
    absolute: str
    reference: str

    @property
    def ok(self) -> bool:
        return self.figure >= self.bar if self.at_least else self.figure <= self.bar

    @property
    def text(self) -> str:
        return f"{self.figure:.2f}{self.unit}" if self.figure < 10 else f"{self.figure:.0f}{self.unit}"

    @property
    def bar_text(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bar:g}{self.unit}"


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turn(arms: dict[str, Timed], rounds: int, warm: int) -> dict[str, float]:
    """Median seconds of each arm; the arms take turns in every round, so that drift meets all of them."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + warm):
        for name, arm in arms.items():
            seconds = arm(number)
            if number >= warm:
                samples[name].append(seconds)
    return {name: statistics.median(taken) for name, taken in samples.items()}


def micro(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"
