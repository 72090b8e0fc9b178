"""The settings of the SSD tier: what is taken, what is refused, and with which words."""

from pathlib import Path

import pytest

from kvstore.config import describe, load
from kvstore.config.load import PLACES
from kvstore.errors import ConfigError
from tests.daemon.test_config import problem, problems, settings


def test_the_ssd_tier_is_off_until_it_has_a_path_and_its_settings_are_shown() -> None:
    assert settings().ssd.path is None
    found = settings(
        "ssd.path=/mnt/nvme/kvstored",
        "ssd.size=2TB",
        "ssd.write_back=hits:2",
        "ssd.layout=extents",
        "ssd.free_floor=10GiB",
    ).ssd
    assert (found.path, found.size_bytes) == (Path("/mnt/nvme/kvstored"), 2 * 10**12)
    assert (found.write_back, found.layout, found.free_floor_bytes) == ("hits:2", "extents", 10 << 30)
    shown = {key: value for key, value, _ in describe(load(None, ["ssd.path=/mnt/nvme/kvstored", "ssd.size=2TB"], {}))}
    assert {key: value for key, value in shown.items() if key.startswith("ssd.")} == {
        "ssd.path": "/mnt/nvme/kvstored",
        "ssd.size": "2TB",
        "ssd.write_back": "through",
        "ssd.layout": "extents",
        "ssd.free_floor": "1GiB",
    }


@pytest.mark.parametrize("text", ["through", "evict", "hits:1", "hits:65535"])
def test_a_way_to_write_back_is_taken(text: str) -> None:
    assert settings(f"ssd.write_back={text}").ssd.write_back == text


@pytest.mark.parametrize(
    "override",
    [
        "ssd.write_back=",
        "ssd.write_back=hits",
        "ssd.write_back=hits:",
        "ssd.write_back=hits:0",
        "ssd.write_back=hits:65536",
        "ssd.write_back=hits:-1",
        "ssd.write_back=hits:٣",
        "ssd.write_back=never",
        "ssd.size=63MiB",
        "ssd.size=0B",
        "ssd.size=10G",
        "ssd.free_floor=some",
        "ssd.layout=files",
        "ssd.path=unix:/ssd",
        "ssd.path=ssd",
        "ssd.path=./ssd",
        "ssd.path=~/ssd",
        "host.persist=shm/kvstored",
    ],
)
def test_a_wrong_value_of_the_ssd_tier_is_refused_with_what_is_allowed(override: str) -> None:
    key = override.partition("=")[0]
    assert f"allowed: {PLACES[key].description}" in problem(override)


def test_the_smallest_ssd_tier_is_64_mib() -> None:
    assert settings("ssd.size=64MiB").ssd.size_bytes == 64 << 20
    assert "smaller than 64MiB" in problem("ssd.size=63MiB")


def test_a_size_in_which_the_layout_rocksdb_cannot_keep_its_log_and_garbage_is_refused() -> None:
    (said,) = problems(overrides=["ssd.path=/mnt/ssd", "ssd.layout=rocksdb", "ssd.size=127MiB"])
    for part in ("ssd.size", "127MiB", "ssd.layout", "log", "garbage", "128MiB", "extents"):
        assert part in said
    assert settings("ssd.path=/mnt/ssd", "ssd.layout=rocksdb", "ssd.size=128MiB").ssd.size_bytes == 128 << 20
    assert settings("ssd.layout=rocksdb", "ssd.size=64MiB").ssd.path is None, "it is off"


@pytest.mark.parametrize(
    ("path", "state_dir", "how"),
    [("/var/lib/kv", "/var/lib/kv", "is server.state_dir"), ("/var", "/var/lib/kv", "has in it server.state_dir")],
)
def test_the_ssd_tier_has_a_directory_of_its_own(path: str, state_dir: str, how: str) -> None:
    """What it cannot read it sets aside, and that must not be the state of the daemon."""
    with pytest.raises(ConfigError) as caught:
        settings(f"ssd.path={path}", f"server.state_dir={state_dir}")
    message = str(caught.value)
    assert f'ssd.path = "{path}" (--set) {how}' in message
    assert "such as /var/lib/kv/ssd" in message


def test_the_ssd_tier_may_be_within_the_state_directory() -> None:
    found = settings("ssd.path=/var/lib/kv/ssd", "server.state_dir=/var/lib/kv")
    assert found.ssd.path == found.server.state_dir / "ssd"


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        (["ssd.path=/m/kv", "host.persist=/m/kv"], 'ssd.path = "/m/kv" (--set) is host.persist (/m/kv)'),
        (["ssd.path=/m/kv/ssd", "host.persist=/m/kv"], 'ssd.path = "/m/kv/ssd" (--set) is within host.persist (/m/kv)'),
        (["ssd.path=/m", "host.persist=/m/kv"], 'ssd.path = "/m" (--set) has in it host.persist (/m/kv)'),
        (["ssd.path=/m/x/../kv", "host.persist=/m/kv"], "is host.persist (/m/kv)"),
        (
            ["host.persist=/m/kv", "server.state_dir=/m/kv"],
            'host.persist = "/m/kv" (--set) is server.state_dir (/m/kv)',
        ),
        (
            ["host.persist=/m", "server.state_dir=/m/kv"],
            'host.persist = "/m" (--set) has in it server.state_dir (/m/kv)',
        ),
    ],
)
def test_no_two_tiers_share_a_directory(settings_: list[str], said: str) -> None:
    """Each removes, or sets aside, what it does not know."""
    with pytest.raises(ConfigError) as caught:
        settings(*settings_)
    assert said in str(caught.value)
    assert "allowed: a directory of the tier's own" in str(caught.value)


def test_two_names_of_one_directory_are_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match=r"ssd\.path .* is host\.persist"):
        settings(f"ssd.path={tmp_path}/link", f"host.persist={tmp_path}/real")


def test_directories_beside_each_other_and_within_the_state_directory_are_taken() -> None:
    found = settings("ssd.path=/m/ssd", "host.persist=/m/ssd-memory", "server.state_dir=/m")
    assert found.host.persist_path == Path("/m/ssd-memory")
