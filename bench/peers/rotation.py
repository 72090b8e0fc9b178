"""Turns of all arms in one run, and what the figures of a row are.

In every round each arm takes one turn, and another arm begins each round: drift, and
whatever the arm before leaves in the caches, meet all of them alike.
"""

import contextlib
import json
import os
import select
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.servers import Missing, end, last_line, wait_for_end

REFERENCE = "memcpy"
ANSWER_S = 120.0
"""A turn takes seconds; who says nothing for so long is out."""

DISTINCT = 64
LOOKUP_BLOCKS, LOOKUP_BLOCK_BYTES = 512, 4096


@dataclass(frozen=True)
class Ask:
    """One row: what each arm does in its turns. `blocks` is how many in one call."""

    what: str
    blocks: int
    block_bytes: int = LOOKUP_BLOCK_BYTES

    @property
    def name(self) -> str:
        if self.what == "lookup":
            return f"lookup of {self.blocks} keys"
        size = f"{self.block_bytes >> 20} MiB" if self.block_bytes >= 1 << 20 else f"{self.block_bytes >> 10} KiB"
        return f"{self.what} {size}" if self.blocks == 1 else f"{self.what} {self.blocks} x {size}"


ASKS = (
    *(Ask(what, n, size) for what in ("put", "get") for n, size in ((1, 256 << 10), (1, 2 << 20), (16, 2 << 20))),
    Ask("lookup", 100),
    Ask("lookup", 512),
)


class Arm:
    """A process that takes turns."""

    def __init__(self, name: str, command: list[str], log: Path, environment: Mapping[str, str] = {}) -> None:
        """Starts it; `begin` waits for it."""
        self.name = name
        self.log = log
        self.facts: dict[str, str] = {}
        self._buffer = b""
        with log.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def begin(self) -> None:
        """Raises Missing where it does not come up."""
        self.facts = self._answer()["ready"]

    def ask(self, **what: Any) -> list[float]:
        """Seconds of each operation of a turn. Raises Missing when the arm is out."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(what).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Missing(f"{self.name} is gone: {last_line(self.log)}") from None
        seconds: list[float] = self._answer().get("seconds", [])
        return seconds

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        source, until = self.process.stdout.fileno(), time.monotonic() + ANSWER_S
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([source], [], [], left)[0]:
                raise Missing(f"{self.name} does not answer within {ANSWER_S:g} s: {last_line(self.log)}")
            more = os.read(source, 1 << 20)
            if not more:
                wait_for_end(self.process, ANSWER_S)  # by then all that it had to say is in its log
                raise Missing(f"{self.name} is gone: {last_line(self.log)}")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """May be said twice."""
        end(self.name, self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@dataclass
class Figure:
    """What one arm needed in one row, in microseconds for each call; `low` and `high` are of single rounds."""

    median_us: float
    low_us: float
    high_us: float
    share_of_memcpy: float | None = None


@dataclass
class Row:
    """One row of the comparison. Who could not do it is in `failed`, with the reason."""

    name: str
    what: str
    blocks: int
    block_bytes: int
    figures: dict[str, Figure] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def measured(ask: Ask, arms: Sequence[Arm], rounds: int, out: dict[str, str]) -> Row:
    """One row. An arm that fails is out from then on: `out` says why."""
    row = Row(ask.name, ask.what, ask.blocks, ask.block_bytes)
    taken: dict[str, list[list[float]]] = {}
    able = [arm for arm in arms if ask.what != "lookup" or arm.name != REFERENCE]

    def attempt(arm: Arm, number: int | None, **what: Any) -> None:
        if arm.name in out:
            return
        try:
            seconds = arm.ask(**what)
        except Missing as e:
            out[arm.name] = row.failed[arm.name] = str(e)
            arm.end()
            return
        if number is not None and number >= 0:
            taken.setdefault(arm.name, []).append(seconds)

    kept = LOOKUP_BLOCKS if ask.what == "lookup" else DISTINCT
    for arm in able:
        attempt(arm, None, do="open", block_bytes=ask.block_bytes)
        if ask.what != "put":
            attempt(arm, None, do="fill", blocks=kept, batch=kept if ask.what == "lookup" else ask.blocks)
    for number in range(-1, rounds):  # the first one warms
        at = number % len(able)
        for arm in (*able[at:], *able[:at]):
            attempt(arm, number, do=ask.what, batch=ask.blocks)
    for arm in able:
        attempt(arm, None, do="forget")
    row.figures = figures({name: turns for name, turns in taken.items() if name not in out})
    return row


def figures(taken: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Figure]:
    """Medians over all calls, and their shares of memcpy's speed."""
    found = {}
    for name, turns in taken.items():
        each = [statistics.median(turn) * 1e6 for turn in turns]
        found[name] = Figure(statistics.median(second for turn in turns for second in turn) * 1e6, min(each), max(each))
    if REFERENCE in found:
        for figure in found.values():
            figure.share_of_memcpy = found[REFERENCE].median_us / figure.median_us
    return found
