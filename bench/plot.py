"""The comparison as a picture: a panel for each row, a bar for each arm. SVG written by hand: no library needed.

Bars are times on a logarithmic axis, shortest is best; ours are the dark ones, memcpy is the line.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

NAME_WIDTH, BAR_WIDTH, VALUE_WIDTH = 170, 230, 80
PANEL_WIDTH = NAME_WIDTH + BAR_WIDTH + VALUE_WIDTH
BAR_HEIGHT, PANEL_GAP, TITLE_HEIGHT, HEAD_HEIGHT = 18, 22, 24, 56
COLUMNS = 2
OURS_COLOUR, GRPC_COLOUR, PEER_COLOUR, TEXT_COLOUR = "#1f5fa8", "#7fa9d6", "#b9b9b9", "#222"
REFERENCE = "memcpy"


def svg(content: dict[str, Any]) -> str:
    """The whole picture; nothing in it depends on anything but the result."""
    names = [name for name in content["versions"] if name != REFERENCE]
    panels = [row for row in content["rows"] if row["figures"]]
    bars = max((sum(name in row["figures"] for name in names) for row in panels), default=0)
    panel_height = TITLE_HEIGHT + bars * BAR_HEIGHT + PANEL_GAP
    width = COLUMNS * PANEL_WIDTH + 20
    height = HEAD_HEIGHT + math.ceil(len(panels) / COLUMNS) * panel_height
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" fill="{TEXT_COLOUR}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-size="15" font-weight="bold">µs a call, shorter is better (logarithmic)</text>',
        f'<text x="10" y="38">the line is memcpy of the same bytes; {escape(content["machine"])}, '
        f"{content['at'][:10]}</text>",
    ]
    for number, row in enumerate(panels):
        x = 10 + number % COLUMNS * PANEL_WIDTH
        y = HEAD_HEIGHT + number // COLUMNS * panel_height
        lines += _panel(row, names, x, y)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(row: dict[str, Any], names: Sequence[str], x: int, y: int) -> Iterator[str]:
    times = {name: figure["median_us"] for name, figure in row["figures"].items()}
    low = 10 ** math.floor(math.log10(min(times.values())) - 0.1)
    high = max(times.values()) * 1.05
    left = x + NAME_WIDTH

    def length(time_us: float) -> float:
        return BAR_WIDTH * math.log(time_us / low) / math.log(high / low)

    yield f'<text x="{x}" y="{y + 14}" font-weight="bold">{escape(row["name"])}</text>'
    shown = [name for name in names if name in times]
    for i, name in enumerate(shown):
        top = y + TITLE_HEIGHT + i * BAR_HEIGHT
        colour = OURS_COLOUR if name == "kvstored" else GRPC_COLOUR if name.startswith("kvstored") else PEER_COLOUR
        wide = length(times[name])
        yield f'<text x="{left - 6}" y="{top + 12}" text-anchor="end">{escape(name)}</text>'
        yield f'<rect x="{left}" y="{top}" width="{wide:.1f}" height="{BAR_HEIGHT - 4}" fill="{colour}"/>'
        yield f'<text x="{left + wide + 5:.1f}" y="{top + 12}">{times[name]:.0f}</text>'
    if REFERENCE in times:
        at, bottom = left + length(times[REFERENCE]), y + TITLE_HEIGHT + len(shown) * BAR_HEIGHT
        yield (
            f'<line x1="{at:.1f}" y1="{y + TITLE_HEIGHT - 4}" x2="{at:.1f}" y2="{bottom}" stroke="#c0392b" '
            'stroke-dasharray="4 3"/>'
        )
