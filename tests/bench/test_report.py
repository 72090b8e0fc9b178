"""What is committed of the benchmarks is what their results say, and what they say of peers is true."""

import copy
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from bench import plot, report
from bench.measure import Row, in_turn, share
from bench.peers import arm as arms
from bench.peers.rotation import Arm, Ask, figures, measured
from bench.peers.servers import Missing, Servers, listening


def figure(median_us: float, share_of_memcpy: float | None = None) -> dict[str, Any]:
    return {
        "median_us": median_us,
        "low_us": median_us * 0.9,
        "high_us": median_us * 1.2,
        "share_of_memcpy": share_of_memcpy,
    }


PEERS: dict[str, Any] = {
    "kind": "peers",
    "machine": "2 cores of a machine",
    "at": "2026-01-02T03:04:05Z",
    "command": "make bench-peers",
    "rounds": 3,
    "versions": {"kvstored": "", "memcpy": "numpy 2", "Fast & Co": "fast 1", "Slow": "slow 2"},
    "missing": {"Absent": "pip cannot install absent"},
    "listens_widely": {"Slow": ["0.0.0.0:1"]},
    "rows": [
        {
            "name": "put 2 MiB",
            "figures": {
                "kvstored": figure(200, 0.5),
                "memcpy": figure(100, 1.0),
                "Fast & Co": figure(150, 0.67),
                "Slow": figure(900, 0.11),
            },
            "failed": {},
        },
        {
            "name": "lookup of 100 keys",
            "figures": {"kvstored": figure(40), "Slow": figure(90)},
            "failed": {"Fast & Co": "gone"},
        },
    ],
}


def test_the_readme_and_the_plot_are_what_the_newest_results_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme, picture = tmp_path / "README.md", tmp_path / "peers.svg"
    readme.write_text(report.README.read_text())
    monkeypatch.setattr(report, "README", readme)
    monkeypatch.setattr(report, "PLOT", picture)
    report.renew()
    assert readme.read_text() == (report.HERE / "README.md").read_text()
    if report.newest("peers") is not None:
        assert picture.read_text() == (report.RESULTS / "peers.svg").read_text()


def test_the_newest_result_of_each_kind_is_shown(tmp_path: Path) -> None:
    for name, kind, at in (("b", "peers", "2026-01-02"), ("a", "peers", "2026-01-03"), ("c", "kvstored", "2026-02-01")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"kind": kind, "at": at}))
    assert (report.newest("peers", tmp_path) or {})["at"] == "2026-01-03"
    assert (report.newest("kvstored", tmp_path) or {})["at"] == "2026-02-01"
    assert report.newest("other", tmp_path) is None


def test_first_tokens_are_told_with_their_bars_and_with_who_was_missing() -> None:
    row = Row("hit", 112.0, 110.0, True, "x", "32.5 ms", "without a store 3640 ms", 109.0, 115.0)
    content = {
        "kind": "ttft",
        "command": "make bench-ttft",
        "machine": "2 cores of a machine",
        "at": "2026-01-02T03:04:05Z",
        "missing": {"lmcache": "there is no python"},
        "rows": [{**vars(row), "met": row.ok}],
    }
    said = list(report.figure_lines(content))
    assert said[0] == "`make bench-ttft` on 2 cores of a machine, 2026-01-02:"
    assert "| hit | 112x | 109x to 115x | >= 110x | yes | 32.5 ms | without a store 3640 ms |" in said
    assert said[-2:] == ["Every bar is met.", "Missing: lmcache: there is no python"]


def test_a_row_names_who_is_ahead_of_ours_and_who_could_not_do_it() -> None:
    first, second = report.peer_cells(PEERS)
    assert first == ("put 2 MiB", "200 (0.50)", "100", "150 (0.67)", "900 (0.11)", "no: Fast & Co")
    assert second == ("lookup of 100 keys", "40", "-", "failed", "90", "yes")
    said = list(report.verdict(PEERS))
    assert "Behind in put 2 MiB: Fast & Co." in said
    assert "Missing: Absent: pip cannot install absent" in said
    assert any(line.startswith("Slow listens on 0.0.0.0:1") for line in said)


def test_nobody_is_ahead_of_whom_was_not_measured() -> None:
    content = copy.deepcopy(PEERS)
    del content["rows"][0]["figures"]["kvstored"]
    said = list(report.verdict(content))
    assert "Ours has no figure in put 2 MiB: it was out by then." in said
    assert not any("in every row" in line for line in said)
    assert next(report.peer_cells(content))[-1] == "not measured"


def test_the_plot_is_well_formed_and_shows_every_arm() -> None:
    root = ElementTree.fromstring(plot.svg(PEERS))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"kvstored", "Fast & Co", "Slow", "put 2 MiB", "lookup of 100 keys"} <= set(texts)
    assert plot.svg(PEERS) == plot.svg(copy.deepcopy(PEERS))


def test_a_figure_says_how_far_it_moved_within_the_run() -> None:
    seconds = {"ours": [2.0] * 5 + [4.0] * 5, "memcpy": [1.0] * 10}
    turns = in_turn({name: lambda i, each=each: each[i] for name, each in seconds.items()}, 10, 0)  # type: ignore[misc]
    row = share("get", turns, "ours", "memcpy", 0.5)
    assert (row.low, row.high) == (0.25, 0.5)
    assert row.figure == pytest.approx(1 / 3)
    assert not row.ok
    assert Row("for orientation", 9.0, None, True, "", "", "").ok


ARM = "import json, sys\nprint(json.dumps({{'ready': {{}}}}), flush=True)\nfor line in sys.stdin:\n    {does}\n"
ANSWERS = "print(json.dumps({'seconds': [1e-3, 3e-3, 2e-3]}), flush=True)"


def an_arm(name: str, folder: Path, does: str) -> Arm:
    return Arm(name, [sys.executable, "-c", ARM.format(does=does)], folder / f"{name}.log")


def test_a_peer_that_fails_is_out_with_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    arms = [an_arm("memcpy", tmp_path, ANSWERS), an_arm("broken", tmp_path, "sys.exit('no such thing')")]
    out: dict[str, str] = {}
    try:
        for arm in arms:
            arm.begin()
        row = measured(Ask("put", 1, 4096), arms, 2, out)
    finally:
        for arm in arms:
            arm.end()
    assert row.failed == out == {"broken": "broken is gone: no such thing"}
    assert row.figures["memcpy"].median_us == pytest.approx(2000)
    assert row.figures["memcpy"].share_of_memcpy == 1.0


def test_shares_are_of_the_reference_of_the_same_row() -> None:
    found = figures({"memcpy": [[1e-4, 1e-4]], "one": [[4e-4, 4e-4], [2e-4, 2e-4]]})
    assert found["one"].share_of_memcpy == pytest.approx(1 / 3)
    assert (found["one"].low_us, found["one"].high_us) == pytest.approx((200, 400))


@pytest.mark.parametrize("wrong", [True, False])
def test_a_get_that_brings_wrong_bytes_or_none_ends_the_arm(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "DISTINCT", 4)

    class Forgetful(arms.Store):
        def __init__(self) -> None:
            size = 4 * arms.BLOCK_BYTES_MAX
            self.arena = arms.Arena(np.empty(size, np.uint8), np.empty(size, np.uint8))
            self.gets = 0

        def batch(self, tag: str, at: int, count: int) -> list[int]:
            return list(range(at, at + count))

        def get(self, batch: list[int], targets: Any) -> None:
            self.gets += 1
            if self.gets <= 4:  # the first turn is right, the next brings nothing, or something else
                np.copyto(targets[0], self.arena.sources(batch[0], 1)[0])
            elif wrong:
                targets[0][:] = 7

    turns = arms.Turns(Forgetful())
    assert len(turns.answer({"do": "get", "batch": 1})["seconds"]) == 4
    with pytest.raises(SystemExit, match="other bytes"):
        turns.answer({"do": "get", "batch": 1})


def test_where_a_process_listens_is_seen(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as four:
        port = four.getsockname()[1]
        assert f"127.0.0.1:{port}" in listening(os.getpid())
    assert f"127.0.0.1:{port}" not in listening(os.getpid())


def test_a_peer_on_all_addresses_needs_a_network_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.servers.listening", lambda pid: {"0.0.0.0:80", "127.0.0.1:81", "[::1]:82"})
    contained = Servers(tmp_path, contained=True)
    contained.check_addresses("peer", 1)
    assert contained.wide == {"peer": ["0.0.0.0:80"]}
    with pytest.raises(Missing, match=r"peer listens on 0\.0\.0\.0:80, and this machine allows no network namespace"):
        Servers(tmp_path, contained=False).check_addresses("peer", 1)
