"""What is said of devices: stats, tables for people, JSON, metrics, readiness. All from one message."""

import itertools
import json
import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families as text_families

from kvstore.cli.stats import sections
from kvstore.server.metrics import Metrics
from kvstored.v1 import kvstore_pb2 as pb
from tests.conftest import eventually
from tests.daemon.cli import within
from tests.gpu.gpu_nodes import GpuNode, host_device
from tests.gpu.raw_engine import BLOCK_BYTES, RawEngine, key_of

Start = Callable[..., GpuNode]
Raw = Callable[..., RawEngine]

TEXTS = ("uuid", "name", "trouble", "no_memory", "not_page_locked", "handle_kind")


def samples(body: str) -> dict[str, float]:
    """By name, with the values of its labels but for the device's."""
    return {
        " ".join([sample.name, *(value for name, value in sample.labels.items() if name != "device")]): sample.value
        for family in text_families(body)
        for sample in family.samples
        if sample.name.startswith("kvstored_gpu")
    }


def scrape(node: GpuNode) -> dict[str, float]:
    with urllib.request.urlopen(f"{node.http_url}/metrics", timeout=10) as answer:
        return samples(answer.read().decode())


def test_stats_metrics_and_tables_tell_the_same_of_a_device(start_gpu_node: Start, raw_engine: Raw) -> None:
    node = start_gpu_node(server__http="127.0.0.1:0")
    raw_engine(node).put(range(12))
    eventually(lambda: node.stats_of()["counters"]["copied_down"] == 12)
    stats, figures = node.stats_of(), scrape(node)
    assert stats["name"] == "host memory"
    assert figures["kvstored_gpu_blocks"] == stats["blocks"] == 12
    assert figures["kvstored_gpu_used_bytes"] == stats["used_bytes"] == 12 * BLOCK_BYTES
    assert figures["kvstored_gpu_size_bytes"] == stats["size_bytes"] == 16 << 20
    assert figures["kvstored_gpu_moved_blocks_total committed"] == 12
    assert figures["kvstored_gpu_moved_bytes_total down"] == stats["counters"]["bytes_down"] == 12 * BLOCK_BYTES
    assert (figures["kvstored_gpu_in_use"], figures["kvstored_gpu_page_locked"]) == (1, 1)
    shown = within("stats", "--endpoint", node.endpoint).stdout
    for text in (f"device {node.uuids[0]}", "host memory", "in use", "slab page-locked", "64.0 MiB", "committed bytes"):
        assert text in shown, text
    told = json.loads(within("stats", "--json", "--endpoint", node.endpoint).stdout)
    assert told["gpus"][0]["counters"]["committed"] == 12
    assert told["gpus_off"] == ""


def test_all_that_is_counted_of_a_device_is_a_metric_and_a_row() -> None:
    numbers = itertools.count(1001)
    gpu = pb.GpuStats(uuid="GPU-1", trouble="Xid 79", no_memory="none is left", not_page_locked="it was refused")
    for field in pb.GpuStats.DESCRIPTOR.fields:
        if field.name not in (*TEXTS, "counters"):
            setattr(gpu, field.name, next(numbers))
    for field in pb.GpuCounters.DESCRIPTOR.fields:
        setattr(gpu.counters, field.name, next(numbers))
    found = samples(Metrics(lambda: pb.StatsReply(gpus=[gpu])).render("")[0].decode())
    assert set(range(1001, next(numbers))) <= {int(value) for value in found.values()}
    assert (found["kvstored_gpu_in_use"], found["kvstored_gpu_growing_refused"]) == (0, 1)
    assert found["kvstored_gpu_page_locked"] == 0


def test_every_metric_of_a_device_says_what_it_is_and_has_it_as_a_label() -> None:
    reply = pb.StatsReply(gpus=[pb.GpuStats(uuid="GPU-1"), pb.GpuStats(uuid='MIG-"2\\')])
    families = list(text_families(Metrics(lambda: reply).render("")[0].decode()))
    ours = [family for family in families if family.name.startswith("kvstored_gpu")]
    assert len(ours) > 25
    for family in ours:
        assert family.documentation.endswith("."), family.name
        assert {sample.labels["device"] for sample in family.samples} == {"GPU-1", 'MIG-"2\\'}, family.name


def test_without_devices_there_is_no_metric_of_them() -> None:
    assert samples(Metrics(pb.StatsReply).render("")[0].decode()) == {}


def test_a_tier_that_is_off_is_a_section_that_says_why(start_gpu_node: Start) -> None:
    node = start_gpu_node([host_device(away=True)], server__http="127.0.0.1:0")
    shown = within("stats", "--endpoint", node.endpoint).stdout
    assert "OFF: no device: a test has none" in shown
    with urllib.request.urlopen(f"{node.http_url}/readyz", timeout=10) as answer:
        assert "degraded: there is no GPU tier" in answer.read().decode()
    assert scrape(node) == {}


def test_a_reply_of_an_older_daemon_has_no_such_section(gpu_node: GpuNode) -> None:
    reply = gpu_node.stats()
    with_device = len(list(sections(reply)))
    del reply["gpus"], reply["gpus_off"]
    assert len(list(sections(reply))) == with_device - 1


def test_what_is_wrong_with_a_device_is_in_its_section(start_gpu_node: Start, raw_engine: Raw) -> None:
    node = start_gpu_node([host_device(memlock_bytes=0)])
    eventually(lambda: "64 MiB were refused" in node.stats_of()["not_page_locked"])
    shown = " ".join(within("stats", "--endpoint", node.endpoint).stdout.split())
    assert "NOT ALL: 64 MiB were refused" in shown
    node.lose(why="Xid 48")
    shown = " ".join(within("stats", "--endpoint", node.endpoint).stdout.split())
    assert "OUT OF USE:" in shown
    assert "Xid 48" in shown
    assert "device" in shown


# -- administration from the command line


def test_copies_on_devices_are_shown_and_evicted_alone(start_gpu_node: Start, raw_engine: Raw) -> None:
    node = start_gpu_node()
    engine = raw_engine(node)
    engine.put(range(6))
    eventually(lambda: node.stats_of()["counters"]["copied_down"] == 6)
    way = ("--endpoint", node.endpoint)
    shown = within("inspect", "key", key_of(2).hex(), *way).stdout
    assert node.uuids[0][:8] in shown
    assert "gpu" in shown
    assert "host" in shown
    done = within("evict", "--key", key_of(5).hex(), "--tier", "gpu", "--yes", *way)
    assert done.exit_code == 0, done.output
    assert "freed 64.0 KiB on devices: 1 blocks dropped" in " ".join(done.stdout.split())
    assert node.stats_of()["blocks"] == 5
    assert len(engine.tiers(range(6))) == 6, "memory has it still"
    told = json.loads(within("evict", "--all", "--yes", "--json", *way).stdout)
    assert (told["gpu_blocks"], told["blocks"]) == (5, 6)
    assert engine.tiers(range(6)) == []


def test_what_stays_is_said_before_copies_on_devices_go(start_gpu_node: Start, raw_engine: Raw) -> None:
    node = start_gpu_node()
    raw_engine(node).put(range(3))
    eventually(lambda: node.stats_of()["counters"]["copied_down"] == 3)
    done = within("evict", "--all", "--tier", "gpu", "--endpoint", node.endpoint)
    assert done.exit_code != 0
    said = " ".join(done.output.split())
    assert "up to 3 copies on devices" in said
    assert "copies in memory stay, and a block that has none is gone" in said


def test_a_daemon_without_devices_says_so_to_who_would_evict_from_them(start_gpu_node: Start) -> None:
    node = start_gpu_node([host_device(away=True)])
    done = within("evict", "--all", "--tier", "gpu", "--yes", "--endpoint", node.endpoint)
    assert done.exit_code != 0
    assert "no memory of devices (no device: a test has none)" in " ".join(done.output.split())
