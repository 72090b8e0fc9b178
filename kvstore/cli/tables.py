"""How `kvstore-cli` shows things to people: figures with units, tables, and names that cannot steer a terminal.

Names and labels come from clients. They are shown character for character, except for those
that a terminal would act on; rich never reads them as its markup.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPE_COLUMNS = 10_000
"""The width for a reader that is no terminal: lines are for its tools to break."""

Row = Mapping[str, Any]
Column = tuple[str, str, Callable[[Any], str]]
"""Title, key in the row, and how its value is written."""


def console() -> "Console":
    """Where tables go: as wide as the terminal, or as wide as a line gets."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def plain(text: str) -> str:
    """A text from elsewhere without what moves a cursor, sets a colour or hides what is written."""
    return "".join(c if c.isprintable() else "?" for c in text)


def human_bytes(size_bytes: int) -> str:
    """`1.5 GiB`: three figures at most, for people."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        # 1023.95 and above would be printed as 1024.0
        if value < 1023.95 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def human_seconds(seconds: float) -> str:
    """`3d 4h`, `2m 5s`, `12s`: the two largest units."""
    left = int(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= length or (unit == "s" and not parts):
            parts.append(f"{left // length}{unit}")
            left %= length
    return " ".join(parts[:2])


def human_time(seconds: float) -> str:
    """`20 µs`, `1.5 ms`, `2.0 s`: how long a call takes."""
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            value = seconds / length
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def percent(part: float, whole: float) -> str:
    """A share in percent; `-` of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def yes_no(value: Any) -> str:
    return "yes" if value else "no"


def count(value: int) -> str:
    return f"{value:,}"


def fields(pairs: Sequence[tuple[str, str]]) -> "RenderableType":
    """A name and its value a line."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2), pad_edge=True)
    for name, value in pairs:
        table.add_row(Text(plain(name)), Text(plain(value), overflow="fold"))
    return table


def rows(items: Sequence[Row], columns: Sequence[Column]) -> "RenderableType":
    """A line for each item; numbers to the right."""
    from rich.table import Table
    from rich.text import Text

    if not items:
        return Text("  none")
    table = Table(box=None, header_style="dim", padding=(0, 2), pad_edge=True)
    for title, key, _ in columns:
        value = items[0].get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        table.add_column(title, justify="right" if number else "left")
    for item in items:
        table.add_row(*(Text(plain(show(item[key])), overflow="fold") for _, key, show in columns))
    return table


def section(title: str, body: "RenderableType") -> "RenderableType":
    """A title, what belongs to it, and an empty line."""
    from rich.console import Group
    from rich.text import Text

    return Group(Text(title, style="bold"), body, Text(""))
