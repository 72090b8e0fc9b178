"""`kvstore-cli stats --watch`: the same figures again and again, and what changed a second between two of them.

It outlives the daemon: while that is away it says so, and a daemon that has restarted is one
whose counts begin anew, so there are no rates across a restart.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import click

from kvstore.cli.stats import sections
from kvstore.cli.tables import console, fields, plain, section
from kvstored.v1.errors import Unavailable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvstore_client import Client

RATES = {"stored": "puts/s", "hits": "hits/s", "misses": "misses/s", "evicted": "evictions/s"}
"""Counters whose growth is shown, in blocks a second, and what people call it."""

SSD_RATES = {"written": "written to the SSD/s", "loaded": "loaded from it/s", "writes_dropped": "writes dropped/s"}
"""The same of a daemon with an SSD tier."""


@dataclass(frozen=True)
class Sample:
    """One look at the daemon; the fields of a line of `--watch --json`."""

    time: str
    """When it was, as RFC 3339 has it, in UTC."""
    note: str
    """What is not as it was: the daemon is away, or has restarted."""
    rates: dict[str, float] | None
    """Growth a second of the counters in RATES, and with an SSD of those in SSD_RATES (as `ssd_...`), since the sample
    before; None where there is none of the same life."""
    stats: Mapping[str, Any] | None
    """None while the daemon is away."""


class Sampler:
    """Takes samples of one daemon, which may come and go. The first must succeed: Unavailable otherwise."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._last: Mapping[str, Any] | None = None
        self._last_at = 0.0

    def sample(self) -> Sample:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            stats, at = self._client.stats(), time.monotonic()
        except Unavailable as error:
            if self._last is None:
                raise
            return Sample(now, f"the daemon is away: {error}", None, None)
        last, took_s = self._last, at - self._last_at
        self._last, self._last_at = stats, at
        if last is None:
            return Sample(now, "", None, stats)
        if last["daemon"]["epoch"] != stats["daemon"]["epoch"]:
            return Sample(now, "the daemon has restarted: its counts begin anew", None, stats)
        grown = {name: stats["counters"][name] - last["counters"][name] for name in RATES}
        if stats.get("ssd") and last.get("ssd"):
            here, before = stats["ssd"]["counters"], last["ssd"]["counters"]
            grown |= {f"ssd_{name}": here[name] - before[name] for name in SSD_RATES}
        return Sample(now, "", {f"{name}_per_s": count / took_s for name, count in grown.items()}, stats)


class Show(Protocol):
    """Shows one sample."""

    def __call__(self, sample: Sample) -> None: ...


def watch(client: "Client", interval_s: float, *, as_json: bool) -> None:
    """Until Ctrl-C, or until nobody reads what is written: neither is an error."""
    sampler, pause = Sampler(client), threading.Event()
    try:
        with _screen(sampler, as_json=as_json) as show:
            while True:
                pause.wait(interval_s)
                show(sampler.sample())
    except KeyboardInterrupt:
        return
    except BrokenPipeError:
        # Python flushes stdout once more at its end, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _screen(sampler: Sampler, *, as_json: bool) -> "Iterator[Show]":
    """Where samples go; the first is shown. A terminal is drawn over, anything else gets one after another."""
    first = sampler.sample()
    if as_json or not sys.stdout.isatty():
        show = _show_line if as_json else _show_tables
        show(first)
        yield show
        return
    from rich.live import Live

    with Live(_page(first), console=console(), screen=True, auto_refresh=False) as live:
        live.refresh()
        yield lambda sample: live.update(_page(sample), refresh=True)


def _show_line(sample: Sample) -> None:
    click.echo(json.dumps(asdict(sample), default=lambda value: value.hex()))


def _show_tables(sample: Sample) -> None:
    out = console()
    with out.capture() as captured:  # written by click: rich itself makes an error of a broken pipe
        out.print(_page(sample))
    click.echo(captured.get())


def _page(sample: Sample) -> "RenderableType":
    from rich.console import Group

    rates, titles = sample.rates or {}, dict(RATES)
    if sample.stats is not None and sample.stats.get("ssd"):
        titles |= {f"ssd_{name}": title for name, title in SSD_RATES.items()}
    shown = [
        (title, f"{rate:,.1f}" if (rate := rates.get(f"{name}_per_s")) is not None else "-")
        for name, title in titles.items()
    ]
    head = [("at", sample.time), *([("note", plain(sample.note))] if sample.note else []), *shown]
    return Group(section("rates", fields(head)), *(sections(sample.stats) if sample.stats is not None else ()))
