"""Settings: what is refused and how it is said, which source wins, and what a value means."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import Effective, Settings, describe, load
from kvstore.config.load import PLACES, VARIABLES
from kvstore.config.settings import SIZE
from kvstore.config.values import (
    DURATION_S_MAX,
    DURATION_S_MIN,
    format_duration,
    format_size,
    parse_duration_s,
    parse_size_bytes,
)
from kvstore.errors import ConfigError, StartupError


def settings(*overrides: str) -> Settings:
    return load(None, overrides, {}).settings


def problems(
    file: Path | None = None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(file, overrides, environ or {})
    return caught.value.problems


def problem(*overrides: str) -> str:
    found = problems(overrides=overrides)
    assert len(found) == 1, found
    return found[0]


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvstored.toml"
    path.write_text(text)
    return path


# -- defaults and sources


def test_without_sources_all_is_default() -> None:
    effective = load(None, [], {})
    assert set(effective.sources) == set(PLACES)
    assert set(effective.sources.values()) == {"default"}
    assert effective.settings.host.size_bytes == 1 << 30
    assert effective.settings.server.socket.name == "kvstored.sock"
    assert effective.settings.server.state_dir.name == "state"
    assert (effective.settings.server.grpc, effective.settings.server.http) == ("", "")
    assert (effective.settings.evict.low, effective.settings.evict.high) == (0.90, 0.95)
    assert effective.settings.lease.ttl_s == 30.0
    assert effective.settings.remote == []


def test_every_source_overrides_the_ones_below_and_is_named(tmp_path: Path) -> None:
    file = toml(tmp_path, '[host]\nsize = "1MiB"\nhuge_pages = "on"\n[evict]\nhigh = 0.5\nlow = 0.25\n')
    environ = {"KVSTORED_HOST__SIZE": "2MiB", "KVSTORED_EVICT__HIGH": "0.75", "PATH": "/bin"}
    effective = load(file, ["host.size=3MiB"], environ)
    assert effective.settings.host.size_bytes == 3 << 20
    assert effective.settings.evict.high == 0.75
    assert effective.settings.evict.low == 0.25
    assert effective.sources["host.size"] == "--set"
    assert effective.sources["evict.high"] == "environment variable KVSTORED_EVICT__HIGH"
    assert effective.sources["evict.low"] == effective.sources["host.huge_pages"] == str(file)
    assert effective.sources["lease.ttl"] == "default"


def test_only_the_given_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORED_HOST__SIZE", "lots")
    assert load(None, [], {}).sources["host.size"] == "default"
    assert load(None, [], {"KVSTORED_HOST__SIZE": "2MiB"}).settings.host.size_bytes == 2 << 20


def test_of_two_overrides_the_later_counts() -> None:
    assert settings("host.size=1MiB", "host.size=2MiB").host.size_bytes == 2 << 20


def test_a_wrong_value_is_refused_even_where_a_higher_source_overrides_it(tmp_path: Path) -> None:
    file = toml(tmp_path, '[host]\nsize = "lots"\n')
    assert str(file) in problems(file, ["host.size=1MiB"])[0]


@pytest.mark.parametrize("key", PLACES)
def test_every_setting_can_be_read_back_from_its_description(key: str, tmp_path: Path) -> None:
    shown = {name: value for name, value, _ in describe(load(None, [], {}))}
    variable = next(name for name, known in VARIABLES.items() if known == key)
    for effective in (load(None, [f"{key}={shown[key]}"], {}), load(None, [], {variable: shown[key]})):
        assert effective.settings == Settings()
        assert effective.sources[key] != "default"


def test_describe_lists_every_setting_once_in_order() -> None:
    assert [key for key, _, _ in describe(load(None, [], {}))] == list(PLACES)


# -- A4: what is unknown, of the wrong type or not there

UNKNOWN = {
    "a misspelt key": ("host.sise", "did you mean host.size?"),
    "a setting of another section": ("ssd.policy", "allowed in ssd: path"),
    "a setting of a later release": ("ssd.compression", "allowed in ssd: path, size, write_back, layout, free_floor"),
    "a misspelt section": ("hots.size", "did you mean host.size?"),
    "a section in capitals": ("Host.size", "did you mean host.size?"),
    "an unknown section": ("warp.factor", "allowed: server, host, ssd, gpu, evict, lease, remote"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_setting_is_refused_from_every_source(kind: str, tmp_path: Path) -> None:
    key, hint = UNKNOWN[kind]
    section, _, name = key.partition(".")
    file = toml(tmp_path, f'[{section}]\n{name} = "1GiB"\n')
    (in_file,) = problems(file)
    assert key in in_file or section in in_file
    assert str(file) in in_file
    assert hint in in_file
    (by_set,) = problems(overrides=[f"{key}=1GiB"])
    assert key in by_set
    assert '"1GiB"' in by_set
    assert "--set" in by_set
    assert hint in by_set
    variable = f"KVSTORED_{section}__{name}".upper()
    if variable not in VARIABLES:
        (by_variable,) = problems(environ={variable: "1GiB"})
        assert variable in by_variable
        assert "no such setting" in by_variable


@pytest.mark.parametrize("variable", ["KVSTORED_HOST_SIZE", "KVSTORED_HOSTSIZE", "kvstored_host__size"])
def test_a_variable_that_resembles_a_setting_is_refused(variable: str) -> None:
    assert "did you mean KVSTORED_HOST__SIZE?" in problems(environ={variable: "1GiB"})[0]


def test_variables_of_others_are_left_alone() -> None:
    effective = load(None, [], {"KVSTORED_ENDPOINT": "unix:///x", "HOST__SIZE": "1", "KVSTORED": "1", "PATH": "/bin"})
    assert set(effective.sources.values()) == {"default"}


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("[host]\nsize = 10737418240", "host.size"),
        ("[host]\nsize = 1.5", "host.size"),
        ("[host]\nsize = true", "host.size"),
        ('[host]\nsize = ["1GiB"]', "host.size"),
        ('[host.size]\nvalue = "1GiB"', "host.size"),
        ("[host]\nhuge_pages = true", "host.huge_pages"),
        ("[server]\nsocket = 3", "server.socket"),
        ("[server]\ngrpc = 50051", "server.grpc"),
        ("[server]\nlog_level = 1", "server.log_level"),
        ('[evict]\nhigh = "0.9"', "evict.high"),
        ("[evict]\nhigh = true", "evict.high"),
        ("[evict]\npolicy = 1", "evict.policy"),
        ("[lease]\nttl = true", "lease.ttl"),
        ("[lease]\nttl = 1979-05-27", "lease.ttl"),
        ("[gpu]\nsize = 0", "gpu.size"),
        ('remote = "redis://localhost"', "remote"),
        ("remote = {}", "remote"),
    ],
)
def test_a_wrong_type_is_refused_naming_key_file_and_what_is_allowed(line: str, key: str, tmp_path: Path) -> None:
    file = toml(tmp_path, line)
    (text,) = problems(file)
    assert text.startswith(f"{key} = ")
    assert str(file) in text
    assert "allowed: " in text


def test_a_section_must_be_a_table(tmp_path: Path) -> None:
    assert "write [host]" in problems(toml(tmp_path, 'host = "1GiB"'))[0]
    assert "write [host]" in problems(toml(tmp_path, '[[host]]\nsize = "1GiB"'))[0]


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    assert f"{missing} does not exist" in problems(missing)[0]
    assert f"{tmp_path} cannot be read: Is a directory" in problems(tmp_path)[0]
    assert f"{missing / 'x'}" in problems(missing / "x")[0]
    assert "/dev/null is not a regular file" in problems(Path("/dev/null"))[0]


@pytest.mark.parametrize(
    "data", [b"[host", b"size == 1", b'[host]\nsize = "1MiB"\nsize = "2MiB"', b"\xff\xfe", b"a = " + b"[" * 100_000]
)
def test_what_is_not_toml_is_refused_with_the_place(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(data)
    assert f"{file} is not valid TOML: " in problems(file)[0]


def test_a_file_without_an_end_is_refused() -> None:
    assert "larger than" in problems(Path("/dev/zero"))[0]


def test_all_problems_of_all_sources_are_reported_at_once(tmp_path: Path) -> None:
    file = toml(tmp_path, '[host]\nsise = "1GiB"\n[server]\nhttp = ":80"\n')
    found = problems(file, ["evict.high=2", "nonsense"], {"KVSTORED_LEASE__TTL": "soon"})
    assert len(found) == 5
    text = "\n".join(found)
    assert all(key in text for key in ("host.sise", "server.http", "evict.high", "nonsense", "lease.ttl"))
    with pytest.raises(StartupError, match="5 problems in the configuration"):
        load(file, ["evict.high=2", "nonsense"], {"KVSTORED_LEASE__TTL": "soon"})


def test_a_missing_file_does_not_hide_the_other_problems(tmp_path: Path) -> None:
    assert len(problems(tmp_path / "missing.toml", ["host.sise=1"])) == 2


def test_values_wrong_only_together_are_reported_with_the_others() -> None:
    assert len(problems(overrides=["host.size=lots", "evict.low=0.99"])) == 2
    assert len(problems(overrides=["evict.high=2", "evict.low=0.99"])) == 1


def test_an_override_that_is_not_utf8_is_refused() -> None:
    assert "no such setting" in problem("host.\udcff=1")
    assert "no such section" in problem("\udcff=1")


def test_an_override_without_a_value_is_refused() -> None:
    assert "write --set section.key=value" in problem("host.size")


def test_a_long_value_is_shortened_in_the_message() -> None:
    assert len(problem("host.size=" + "9" * 100_000)) < 500


# -- values


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1MiB", 1 << 20),
        ("10GiB", 10 << 30),
        ("10 GiB", 10 << 30),
        ("1.5GiB", 3 << 29),
        ("0.5 TiB", 1 << 39),
        ("512MB", 512 * 10**6),
        ("10GB", 10**10 // 4096 * 4096),
        ("1.1GiB", 1181116006 // 4096 * 4096),
        ("1048577B", 1 << 20),
        ("1.1MiB", 1 << 20 | 100 << 10),
        ("4096000KB", 4096 * 10**6),
        ("8388608B", 8 << 20),
        ("2048KiB", 2 << 20),
        ("1TB", 10**12),
    ],
)
def test_sizes_have_a_unit_and_are_rounded_down_to_pages(text: str, size_bytes: int) -> None:
    assert settings(f"host.size={text}").host.size_bytes == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "10",
        "1e9",
        "10G",
        "10gib",
        "10GIB",
        "ten GiB",
        "-1GiB",
        "+1GiB",
        " 1GiB",
        "1GiB ",
        "1  GiB",
        "1,5GiB",
        ".5GiB",
        *[
            "1.GiB",
            "GiB",
            "",
            "0",
            "1GiB\n",
            "\u0661GiB",
            "nan",
            "0x10MiB",
            "1023KiB",
            "1MB",
            "2097152.3B",
        ],
    ],
)
def test_a_size_that_is_not_one_is_refused_with_key_value_and_what_is_allowed(text: str) -> None:
    message = problem(f"host.size={text}")
    assert message.startswith("host.size = ")
    assert "allowed: a size such as 10GiB" in message


@pytest.mark.parametrize("text", re.findall(r"[0-9.]+[KMGT]i?B", SIZE))
def test_a_size_that_is_recommended_is_taken(text: str) -> None:
    assert settings(f"host.size={text}").host.size_bytes > 0


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("10G", "did you mean 10GiB (1024-fold) or 10GB (1000-fold)?"),
        ("1.5 t", "did you mean 1.5TiB (1024-fold) or 1.5TB (1000-fold)?"),
        ("10gb", "did you mean 10GiB (1024-fold) or 10GB (1000-fold)?"),
        ("10Gi", "did you mean 10GiB?"),
        ("10gib", "did you mean 10GiB?"),
    ],
)
def test_a_size_as_other_programs_write_it_is_not_guessed_and_told_how_to_write(text: str, hint: str) -> None:
    assert hint in problem(f"host.size={text}")


@given(st.integers(0, 1 << 60))
def test_a_size_as_written_reads_back_as_itself(size_bytes: int) -> None:
    assert parse_size_bytes(format_size(size_bytes)) == size_bytes


@given(st.floats(DURATION_S_MIN, DURATION_S_MAX))
def test_a_duration_as_written_reads_back_as_itself(seconds: float) -> None:
    assert parse_duration_s(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("0.5", 0.5), ("30s", 30), ("5m", 300), ("250ms", 0.25), ("1.5 h", 5400)]
)
def test_a_lease_lasts_as_written(text: str, seconds: float) -> None:
    assert settings(f"lease.ttl={text}").lease.ttl_s == seconds


@pytest.mark.parametrize("text", ["0", "-1", "0s", "nan", "inf", "25h", "90001", "soon", "30 sec", "1d", ""])
def test_a_lease_that_does_not_last_or_does_not_end_is_refused(text: str) -> None:
    assert "from 1ms to 24h" in problem(f"lease.ttl={text}")


def test_a_number_of_seconds_in_the_file_is_a_lease(tmp_path: Path) -> None:
    assert load(toml(tmp_path, "[lease]\nttl = 7\n"), [], {}).settings.lease.ttl_s == 7.0


@pytest.mark.parametrize("pair", [("0.9", "0.9"), ("0.5", "0.6"), ("0.1", "1")])
def test_the_low_mark_is_below_the_high_one(pair: tuple[str, str]) -> None:
    high, low = pair
    (text,) = problems(overrides=[f"evict.high={high}", f"evict.low={low}"])
    assert "evict.low" in text
    assert "evict.high" in text


def test_a_mark_is_compared_with_the_default_of_the_other() -> None:
    assert "(default) must be below evict.high = 0.5 (--set)" in problem("evict.high=0.5")


@pytest.mark.parametrize("text", ["0", "-0.1", "1.01", "nan", "inf", "90%", "high", ""])
def test_a_mark_is_a_fraction(text: str) -> None:
    assert "0 < evict.low < evict.high <= 1" in problem(f"evict.high={text}")


@pytest.mark.parametrize(
    ("text", "path"),
    [("none", None), ("fdstore", None), ("/dev/shm/kvstored", Path("/dev/shm/kvstored"))],
)
def test_memory_outlives_the_daemon_with_systemd_or_in_a_directory(text: str, path: Path | None) -> None:
    host = settings(f"host.persist={text}").host
    assert host.persist == text
    assert host.persist_path == path


@pytest.mark.parametrize("text", ["", "shm", "yes", "./here", "1"])
def test_a_place_for_memory_that_is_no_path_is_refused(text: str) -> None:
    assert "neither of the words nor an absolute path" in problem(f"host.persist={text}")


def test_files_have_no_huge_pages_of_their_own() -> None:
    """So "auto" does not ask for any, however large the slab."""
    assert settings("host.size=65GiB").host.huge_pages_on
    assert settings("host.size=65GiB", "host.persist=fdstore").host.huge_pages_on
    assert not settings("host.size=65GiB", "host.persist=/dev/shm/kvstored").host.huge_pages_on


@pytest.mark.parametrize(("override", "what"), [('remote=[{"url": "redis://localhost"}]', "stores on other nodes")])
def test_what_a_later_release_has_is_refused_by_name(override: str, what: str) -> None:
    message = problem(override)
    assert f"not part of this release; allowed: {PLACES[override.partition('=')[0]].description}" in message
    assert what in message


def test_huge_pages_are_automatic_above_64_gib() -> None:
    assert not settings("host.size=64GiB").host.huge_pages_on
    assert settings("host.size=65GiB").host.huge_pages_on
    assert not settings("host.size=65GiB", "host.huge_pages=off").host.huge_pages_on
    assert settings("host.huge_pages=on").host.huge_pages_on


# -- A15: closed by default


@pytest.mark.parametrize("address", ["127.0.0.1:50051", "127.1.2.3:1", "[::1]:50051", "localhost:0"])
def test_grpc_may_listen_on_loopback(address: str) -> None:
    server = settings(f"server.grpc={address}").server
    assert server.grpc == address
    assert server.grpc_socket is None
    host, _, port = address.rpartition(":")
    assert server.grpc_host_port == (host.strip("[]"), int(port))


@pytest.mark.parametrize("address", ["unix:/run/kv.grpc", "unix:///run/kv.grpc"])
def test_grpc_may_listen_on_a_socket(address: str) -> None:
    server = settings(f"server.grpc={address}").server
    assert (server.grpc, server.grpc_socket, server.grpc_host_port) == (
        "unix:/run/kv.grpc",
        Path("/run/kv.grpc"),
        None,
    )


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:50051",
        "[::]:50051",
        ":50051",
        "*:50051",
        "10.0.0.1:50051",
        "[fe80::1]:50051",
        "example.org:50051",
        *["localhost.example.org:50051", "[::ffff:0.0.0.0]:1", "0:50051", "127.1:50051", "2130706433:1", "[]:1"],
    ],
)
def test_grpc_never_listens_where_other_machines_reach_it(address: str) -> None:
    message = problem(f"server.grpc={address}")
    assert "neither TLS nor authentication" in message
    assert "allowed:" in message
    assert "127.0.0.1:PORT" in message


@pytest.mark.parametrize(
    "address",
    [
        "50051",
        "localhost",
        "localhost:",
        "localhost:65536",
        "localhost:-1",
        "localhost:http",
        "::1:50051",
        "[::1]",
        *["grpc://localhost:1", "unix:relative", "unix:", "unix:/" + "x" * 107, "localhost:1:2", "localhost:1\n"],
    ],
)
def test_a_grpc_address_that_is_none_is_refused(address: str) -> None:
    assert problem(f"server.grpc={address}").startswith("server.grpc = ")


def test_grpc_and_http_do_not_share_a_port() -> None:
    (text,) = problems(overrides=["server.grpc=127.0.0.1:7070", "server.http=127.0.0.1:7070"])
    assert "is server.grpc as well" in text
    assert settings("server.grpc=127.0.0.1:0", "server.http=127.0.0.1:0").server.http == "127.0.0.1:0"


def test_grpc_and_sessions_do_not_share_a_socket() -> None:
    (text,) = problems(overrides=["server.socket=/tmp/a.sock", "server.grpc=unix:/tmp/a.sock"])
    assert "server.socket" in text


# -- paths


def test_a_relative_path_is_taken_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings("server.state_dir=state").server.state_dir == tmp_path / "state"


@pytest.mark.parametrize("text", ["", "unix:///run/kv.sock", "unix:/run/kv.sock", "/run/\0", "/x" * 54, "/\udcff"])
def test_a_socket_path_that_cannot_be_one_is_refused(text: str) -> None:
    assert problem(f"server.socket={text}").startswith("server.socket = ")


def test_a_socket_path_of_107_bytes_is_taken() -> None:
    assert settings("server.socket=/" + "x" * 106).server.socket == Path("/" + "x" * 106)


def test_settings_do_not_change_after_loading() -> None:
    effective: Effective = load(None, [], {})
    with pytest.raises(ValueError, match="frozen"):
        effective.settings.host.size_bytes = 1
