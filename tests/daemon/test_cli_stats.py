"""What `kvstore-cli stats` makes of the daemon's answer: every figure it shows is one of StatsReply."""

import io
import json
from typing import Any

import pytest
from google.protobuf.message import Message
from rich.console import Console

from kvstore.cli.stats import hit_rate, print_stats, quantile, stats_json
from kvstore.cli.tables import human_bytes, human_seconds, human_time
from kvstored.v1 import kvstore_pb2 as pb


def as_dict(message: Message) -> dict[str, Any]:
    """A message as the SDK gives it: all fields by name, plain values."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.name in ("ssd", "persist"):
            found[field.name] = as_dict(value) if message.HasField(field.name) else None
        elif isinstance(value, Message):
            found[field.name] = as_dict(value)
        elif isinstance(value, str | bytes | int | float):
            found[field.name] = value
        else:
            found[field.name] = [as_dict(one) if isinstance(one, Message) else one for one in value]
    return found


def reply() -> pb.StatsReply:
    return pb.StatsReply(
        daemon=pb.DaemonStats(
            version="0.1.0", pid=4711, uptime_s=93784.5, socket="/run/kv.sock", healthy=True, rss_anon_bytes=85 << 20
        ),
        host=pb.HostStats(
            size_bytes=1 << 30,
            segment_bytes=16 << 20,
            segments=64,
            used_bytes=256 << 20,
            block_bytes=200 << 20,
            locked=True,
        ),
        pools=[pb.PoolStats(tenant="default", block_bytes=2 << 20, slots=512, free=384, blocks=100)],
        sessions=[
            pb.SessionStats(
                id=7, client="vllm [rank 0]", tenant="default", pid=815, local=True, age_s=65, held_bytes=4 << 20
            )
        ],
        counters=pb.Counters(
            stored=1234567,
            hits=60,
            misses=40,
            hit_bytes=3 << 30,
            hit_tokens=256,
            miss_tokens=768,
            conversations=50,
            conversations_evicted=1,
        ),
        loops=[pb.LoopStats(name="evict", runs=12, errors=1, last_error="ValueError: [no]", failing=True)],
        namespaces=[pb.NamespaceStats(label="llama", digest=b"\x01\xff", block_bytes=1 << 20, blocks=3)],
        operations=[
            pb.OperationStats(
                operation=pb.OPERATION_GET,
                tier=pb.TIER_HOST,
                calls=100,
                calls_hit=40,
                hits=60,
                misses=40,
                seconds=0.02,
                latencies=[0, 0, 0, 98, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
            ),
            pb.OperationStats(operation=pb.OPERATION_MATCH, tier=pb.TIER_HOST, calls=8, calls_hit=6),
        ],
        calls=[pb.CallStats(edge="session", call="commit", calls=2, seconds=3.0, latencies=[0] * 16 + [2, 0, 0, 0])],
    )


def shown(stats: pb.StatsReply, width: int = 200) -> str:
    file = io.StringIO()
    print_stats(as_dict(stats), Console(file=file, width=width))
    return file.getvalue()


def lines(text: str) -> dict[str, str]:
    """The lines of name and value."""
    pairs = (line.strip().split("  ", 1) for line in text.splitlines())
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def test_every_section_is_shown() -> None:
    text = shown(reply())
    titles = ["daemon", "host memory", "pools", "sessions", "namespaces", "reuse", "operations", "calls"]
    titles += ["counters", "background loops"]
    assert [line for line in text.splitlines() if line and not line.startswith(" ")] == titles


def test_figures_are_for_people() -> None:
    found = lines(shown(reply()))
    assert found["up"] == "1d 2h"
    assert found["size"] == "1.0 GiB"
    assert found["used"] == "256 MiB (25.0 %)"
    assert found["segments"] == "64 of 16.0 MiB"
    assert "bytes of blocks" in found
    assert found["own memory"] == "85.0 MiB"
    assert found["stored"] == "1,234,567"
    assert found["hit bytes"] == "3.0 GiB"
    assert found["hit rate"] == "60.0 %"
    assert found["grpc"] == "off"


def test_memory_that_outlives_the_daemon_is_told_of() -> None:
    stats = reply()
    stats.persist.kind, stats.persist.path, stats.persist.free_bytes = "directory", "/dev/shm/kvstored", 3 << 30
    stats.persist.adopted_blocks, stats.persist.adopted_segments, stats.persist.adopted_s = 65536, 64, 0.25
    found = lines(shown(stats).partition("memory over restarts")[2].partition("\npools")[0])
    assert found["host.persist"] == "/dev/shm/kvstored (directory)"
    assert found["state"] == "what is in memory outlives the daemon"
    assert found["room left"] == "3.0 GiB"
    assert found["at the start"].startswith("65536 blocks in 64 segments, 0 sessions, within ")
    assert "left out" not in found
    stats.persist.trouble, stats.persist.cold, stats.persist.lost_segments = "no room", "its ledger was not finished", 2
    found = lines(shown(stats).partition("memory over restarts")[2].partition("\npools")[0])
    assert found["state"] == "NOT ALL OF IT: no room"
    assert found["at the start"] == "empty: its ledger was not finished"
    assert found["left out"] == "0 blocks, 2 segments"


def test_what_needs_attention_is_said() -> None:
    stats = reply()
    stats.daemon.healthy = False
    stats.daemon.problems.append("evict fails")
    stats.host.locked = False
    stats.host.locked_reason = "RLIMIT_MEMLOCK is 8 MiB"
    found = lines(shown(stats))
    assert found["state"] == "UNHEALTHY; evict fails"
    assert found["locked"] == "NO, may be swapped out: RLIMIT_MEMLOCK is 8 MiB"
    assert "FAILING" in shown(stats)


def test_names_from_clients_are_shown_as_they_are() -> None:
    text = shown(reply())
    assert "vllm [rank 0]" in text
    assert "ValueError: [no]" in text


def test_every_counter_is_shown() -> None:
    text = shown(reply())
    for field in pb.Counters.DESCRIPTOR.fields:
        assert f"  {field.name.replace('_', ' ')} " in text


def test_an_idle_daemon_has_a_table_for_everything() -> None:
    text = shown(pb.StatsReply())
    assert lines(text)["hit rate"] == "-"
    assert text.count("  none") == 4


def test_a_narrow_terminal_loses_nothing() -> None:
    stats = reply()
    stats.daemon.socket = "/run/user/1000/kvstored/" + "x" * 60
    assert "x" * 60 in shown(stats, width=40).replace("\n", "").replace(" ", "")


def test_json_is_the_reply_itself_with_bytes_as_digits() -> None:
    stats = json.loads(stats_json(as_dict(reply())))
    assert stats["daemon"]["pid"] == 4711
    assert stats["counters"]["hits"] == 60
    assert stats["namespaces"][0]["digest"] == "01ff"
    assert set(stats) == {field.name for field in pb.StatsReply.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (100 << 20, "100 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_bytes_have_three_figures(size_bytes: int, text: str) -> None:
    assert human_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.9, "59s"), (60, "1m"), (3725, "1h 2m"), (86400 * 3 + 5, "3d 5s")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_the_hit_rate_is_of_all_lookups() -> None:
    assert hit_rate({"hits": 1, "misses": 3}) == "25.0 %"
    assert hit_rate({"hits": 0, "misses": 0}) == "-"


def test_shares_are_of_blocks_of_tokens_and_of_requests() -> None:
    found = lines(shown(reply()))
    assert found["hit rate"] == "60.0 %"
    assert found["hit rate in tokens"] == "25.0 %"
    assert found["reads that hit"] == "40.0 %"
    assert found["matches that hit"] == "75.0 %"
    assert found["conversations evicted alive"] == "2.0 %"


def test_calls_have_a_mean_and_two_quantiles() -> None:
    text = shown(reply())
    (operation,) = [line.split() for line in text.splitlines() if line.strip().startswith("get ")]
    assert operation[:4] == ["get", "host", "100", "40.0"]
    assert " ".join(operation[-8:]) == "200 µs ≤ 100 µs ≤ 1.0 ms"
    (call,) = [line for line in text.splitlines() if line.strip().startswith("session ")]
    assert call.split()[-8:] == ["1.5", "s", "≤", "2.0", "s", "≤", "2.0", "s"]


def test_a_quantile_is_the_end_of_its_bucket() -> None:
    assert quantile([], 0.5) == quantile([0] * 20, 0.99) == "-"
    assert quantile([1, 0, 1], 0.5) == "≤ 10 µs"
    assert quantile([1, 0, 1], 0.51) == "≤ 50 µs"
    assert quantile([0] * 19 + [1], 0.5) == "> 10.0 s"


def test_what_a_newer_daemon_counts_is_shown_by_its_number() -> None:
    stats = pb.StatsReply()
    stats.operations.add(operation=77, tier=9, calls=1)
    assert ["77", "9", "1"] in [line.split()[:3] for line in shown(stats).splitlines()]


def test_what_an_older_daemon_does_not_count_is_left_out() -> None:
    stats = as_dict(reply())
    del stats["operations"], stats["calls"], stats["daemon"]["http"], stats["counters"]["hit_tokens"]
    file = io.StringIO()
    print_stats(stats, Console(file=file, width=200))
    assert lines(file.getvalue())["reads that hit"] == "-"
    assert "operations" not in file.getvalue()


HOSTILE = '\x1b[2J\x1b]0;owned\x07\x9b31m\r\n[red]{"\u202egnp'


def test_hostile_names_cannot_steer_the_terminal() -> None:
    stats = reply()
    stats.sessions[0].client = stats.namespaces[0].label = stats.pools[0].tenant = HOSTILE
    stats.daemon.problems.append(HOSTILE)
    text = shown(stats)
    assert [c for c in text if not c.isprintable() and c != "\n"] == []
    assert "[red]{" in text


def test_hostile_names_cannot_break_the_json() -> None:
    stats = reply()
    stats.sessions[0].client = HOSTILE
    text = stats_json(as_dict(stats))
    assert json.loads(text)["sessions"][0]["client"] == HOSTILE
    assert text.isascii()


@pytest.mark.parametrize(
    ("seconds", "text"), [(2e-6, "2 µs"), (0.0015, "1.5 ms"), (0.25, "250 ms"), (2, "2.0 s"), (100, "100 s")]
)
def test_times_of_calls_have_their_unit(seconds: float, text: str) -> None:
    assert human_time(seconds) == text
