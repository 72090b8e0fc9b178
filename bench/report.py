"""`python -m bench.report`: the tables of bench/README.md and the plot, from the newest results in bench/results/.

A result is one JSON file: of `make bench` (kind "kvstored"), of `make bench-peers` (kind "peers"),
of `make bench-ttft` (kind "ttft") or of `make gpu-check` (kind "gpu"). The same files give the same text,
so what is committed can be checked.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import plot

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LOCAL = RESULTS / "local"
"""Not kept: what the last run of anybody measured."""

README = HERE / "README.md"
PLOT = RESULTS / "peers.svg"
OURS = ("kvstored", "kvstored, gRPC")
REFERENCE = "memcpy"

Content = dict[str, Any]


def write(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def keep(content: Content) -> None:
    """Puts a result among those that are kept, and renews the README and the plot."""
    cores = content["machine"].partition(" ")[0]
    kind = "" if content["kind"] == "kvstored" else f"-{content['kind']}"
    write(RESULTS / f"{content['at'][:10]}-{cores}-cores{kind}.json", content)
    renew()


def newest(kind: str, folder: Path = RESULTS) -> Content | None:
    """The last kept result of a kind; None where there is none."""
    found: list[Content] = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    found = [content for content in found if content.get("kind", "kvstored") == kind]
    return max(found, key=lambda content: str(content["at"]), default=None)


def renew() -> None:
    """README.md and the plot, as the kept results say."""
    text = README.read_text()
    figures, peers, first_tokens = newest("kvstored"), newest("peers"), newest("ttft")
    if figures is not None:
        text = between(text, "figures", "\n".join(figure_lines(figures)))
    if first_tokens is not None:
        text = between(text, "ttft", "\n".join(figure_lines(first_tokens)))
    of_gpu = newest("gpu")
    if of_gpu is not None:
        text = between(text, "gpu", "\n".join([*figure_lines(of_gpu), "", *fact_lines(of_gpu)]))
    if peers is not None:
        text = between(text, "peers", "\n".join(peer_lines(peers)))
        PLOT.write_text(plot.svg(peers))
    README.write_text(text)


def between(text: str, name: str, lines: str) -> str:
    """`text` with what stands between the marks of that name replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, found, rest = text.partition(begin)
    _, ended, tail = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"bench/README.md has no {begin} ... {end}")
    return f"{head}{begin}\n{lines}\n{end}{tail}"


# -- make bench


def figure_text(row: Content, name: str = "figure") -> str:
    value, unit = row[name], row["unit"]
    return f"{value:.2f}{unit}" if value < 10 else f"{value:.0f}{unit}"


def bar_text(row: Content) -> str:
    return "none" if row["bar"] is None else f"{'>=' if row['at_least'] else '<='} {row['bar']:g}{row['unit']}"


def noise_text(row: Content) -> str:
    """How far the figure moved within the run."""
    return "" if row.get("low") is None else f"{figure_text(row, 'low')} to {figure_text(row, 'high')}"


def met_text(row: Content) -> str:
    return "" if row["bar"] is None else "yes" if row["met"] else "no"


FIGURE_COLUMNS = ("what", "figure", "within the run", "bar", "met", "absolute", "reference in the same run")


def figure_cells(content: Content) -> Iterator[tuple[str, ...]]:
    """One row of cells for each figure."""
    for row in content["rows"]:
        yield (
            row["name"],
            figure_text(row),
            noise_text(row),
            bar_text(row),
            met_text(row),
            row["absolute"],
            row["reference"],
        )


def figure_lines(content: Content) -> Iterator[str]:
    yield f"`{content.get('command', 'make bench')}` on {content['machine']}, {content['at'][:10]}:"
    yield ""
    yield from _markdown(FIGURE_COLUMNS, figure_cells(content))
    missed = [row["name"] for row in content["rows"] if not row["met"]]
    yield ""
    yield f"Missed: {'; '.join(missed)}." if missed else "Every bar is met."
    for name, why in content.get("missing", {}).items():
        yield f"Missing: {name}: {why}"


def fact_lines(content: Content) -> Iterator[str]:
    """What was found besides figures, and what could not be."""
    for name, fact in content.get("facts", {}).items():
        yield f"- {name}: {fact}"
    for name, why in content.get("failed", {}).items():
        yield f"- **failed**: {name}: {why}"


# -- make bench-peers


def peer_names(content: Content) -> list[str]:
    """Ours first, then memcpy, then the peers as they were started."""
    present = [name for name in content["versions"] if any(name in row["figures"] for row in content["rows"])]
    first = [name for name in (*OURS, REFERENCE) if name in present]
    return [*first, *(name for name in present if name not in first)]


def peer_columns(content: Content) -> list[str]:
    return ["what", *peer_names(content), "ours is ahead"]


def ahead(row: Content) -> list[str] | None:
    """Peers that are faster than ours in a row; None where ours has no figure."""
    if OURS[0] not in row["figures"]:
        return None
    mine = row["figures"][OURS[0]]["median_us"]
    peers = {name: figure for name, figure in row["figures"].items() if name not in (*OURS, REFERENCE)}
    return [name for name, figure in peers.items() if figure["median_us"] <= mine]


def peer_cells(content: Content) -> Iterator[tuple[str, ...]]:
    """One row of cells for each operation: median µs and, where there is one, the share of memcpy."""
    names = peer_names(content)
    for row in content["rows"]:
        cells = [row["name"]]
        for name in names:
            figure = row["figures"].get(name)
            if figure is None:
                cells.append("failed" if name in row["failed"] else "-")
                continue
            share = figure["share_of_memcpy"]
            text = f"{figure['median_us']:.0f}"
            cells.append(text if share is None or name == REFERENCE else f"{text} ({share:.2f})")
        behind = ahead(row)
        cells.append("not measured" if behind is None else f"no: {', '.join(behind)}" if behind else "yes")
        yield tuple(cells)


def verdict(content: Content) -> Iterator[str]:
    """In words: rows in which a peer is ahead, who is missing, who listens where it should not."""
    measured = [row for row in content["rows"] if ahead(row) is not None]
    lost = [row for row in measured if ahead(row)]
    for row in lost:
        yield f"Behind in {row['name']}: {', '.join(ahead(row) or [])}."
    for row in content["rows"]:
        if row not in measured:
            yield f"Ours has no figure in {row['name']}: {row['failed'].get(OURS[0], 'it was out by then')}."
    if measured and len(measured) == len(content["rows"]) and not lost:
        yield "Ours is ahead of every peer that was measured, in every row."
    for name, why in content["missing"].items():
        yield f"Missing: {name}: {why}"
    for name, addresses in content["listens_widely"].items():
        yield f"{name} listens on {', '.join(addresses)}; it was kept in a network namespace of the run's own."


def peer_lines(content: Content) -> Iterator[str]:
    yield f"`{content['command']}` on {content['machine']}, {content['at'][:10]}, {content['rounds']} rounds:"
    yield ""
    yield "![shares of memcpy's speed](results/peers.svg)"
    yield ""
    yield "Median µs a call; in brackets the share of memcpy's speed."
    yield ""
    yield from _markdown(peer_columns(content), peer_cells(content))
    yield ""
    for line in verdict(content):
        yield f"- {line}"
    yield f"- Versions: {'; '.join(f'{name}: {version}' for name, version in content['versions'].items() if version)}."
    worst = max(
        (figure["high_us"] / figure["low_us"] for row in content["rows"] for figure in row["figures"].values()),
        default=1.0,
    )
    yield f"- Noise: medians of single rounds of one cell differ by up to {worst:.1f}x."


def _markdown(columns: Sequence[str], cells: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in cells:
        yield f"| {' | '.join('**no**' if cell == 'no' else cell for cell in row)} |"


if __name__ == "__main__":
    renew()
