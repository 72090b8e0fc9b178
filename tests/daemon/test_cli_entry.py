"""The two programs as processes: exit status, messages, and how fast a mistake is told (field fault A4)."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvstore.config.load import PLACES

REFUSED_WITHIN_S = 2.0
"""Of processor time: what else the machine has to do is not the program's."""


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str
    cpu_s: float


def program(name: str, *args: str, before: str = "", env: dict[str, str] | None = None) -> Done:
    """Runs an entry point in a fresh process without variables of ours; `before` is run in it first."""
    command = [sys.executable, "-c", f"{before}\nfrom kvstore.cli.entry import {name}\n{name}()", *args]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORED_")} | (env or {})
    before_s = _children_cpu_s()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    return Done(done.returncode, done.stdout, done.stderr, _children_cpu_s() - before_s)


def _children_cpu_s() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


def kvstored(*args: str, env: dict[str, str] | None = None) -> Done:
    return program("kvstored", *args, env=env)


# -- A4: what is wrong in the settings ends the start at once

MISTAKES: dict[str, tuple[str | None, Sequence[str], dict[str, str], Sequence[str]]] = {
    "a misspelt key in the file": ('[host]\nsise = "1GiB"', [], {}, ["host.sise", "FILE", "did you mean host.size?"]),
    "a misspelt key in --set": (None, ["--set", "host.sise=1GiB"], {}, ["host.sise", "--set", "host.size"]),
    "a misspelt key in the environment": (
        None,
        [],
        {"KVSTORED_HOST__SISE": "1GiB"},
        ["KVSTORED_HOST__SISE", "did you mean KVSTORED_HOST__SIZE?"],
    ),
    "an unknown section": ('[hots]\nsize = "1GiB"', [], {}, ["hots", "FILE", "did you mean host.size?"]),
    "a wrong type in the file": ("[host]\nsize = 1024", [], {}, ["host.size = 1024", "FILE", "allowed: a size"]),
    "a wrong type in --set": (None, ["--set", "evict.high=often"], {}, ["evict.high", "often", "--set", "fraction"]),
    "a wrong type in the environment": (
        None,
        [],
        {"KVSTORED_LEASE__TTL": "soon"},
        ["lease.ttl", "soon", "KVSTORED_LEASE__TTL", "allowed: seconds"],
    ),
    "a setting of a later release": (
        None,
        ["--set", 'remote=[{"url": "x"}]'],
        {},
        ["remote", "not part of this release"],
    ),
    "a device by its number": (None, ["--set", "gpu.devices=0"], {}, ["gpu.devices", "by its UUID", "nvidia-smi -L"]),
    "a file that is missing": (None, ["--config", "/nowhere/kv.toml"], {}, ["/nowhere/kv.toml", "does not exist"]),
    "a file that is a directory": (None, ["--config", "/"], {}, ["config file /", "directory"]),
    "a file that is not TOML": ("[host\n", [], {}, ["FILE", "not valid TOML", "line 1"]),
}


@pytest.mark.parametrize("subcommand", ["start", "config"])
@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_in_the_settings_is_told_at_once(kind: str, subcommand: str, tmp_path: Path) -> None:
    text, args, env, expected = MISTAKES[kind]
    file = tmp_path / "kvstored.toml"
    if text is not None:
        file.write_text(text)
        args = ["--config", str(file), *args]
    done = kvstored(*args, *(["config"] if subcommand == "config" else []), env=env)
    assert done.status == 2, done.err
    assert done.err.startswith("kvstored: ")
    assert "Traceback" not in done.err
    for part in expected:
        assert part.replace("FILE", str(file)) in done.err
    assert done.out == ""
    assert done.cpu_s < REFUSED_WITHIN_S


def test_all_mistakes_are_told_in_one_run() -> None:
    done = kvstored("--set", "host.size=1", "--set", "evict.high=2", "--set", "what=ever")
    assert done.status == 2
    assert "3 problems in the configuration" in done.err
    assert done.err.count("\n  - ") == 3


@pytest.mark.parametrize("args", [["--sett", "x"], ["strat"], ["--config"], ["config", "--jsn"]])
def test_wrong_usage_is_status_2(args: list[str]) -> None:
    done = kvstored(*args)
    assert done.status == 2
    assert "Error: " in done.err
    assert "Traceback" not in done.err


def test_an_obstacle_to_the_start_is_status_1_without_a_traceback(tmp_path: Path) -> None:
    obstacle = tmp_path / "kvstored.sock"
    obstacle.write_text("precious")
    done = kvstored("--set", f"server.socket={obstacle}", "--set", f"server.state_dir={tmp_path / 'state'}")
    assert done.status == 1
    assert done.err == f"kvstored: {obstacle} exists and is not a socket: move it away or choose another path\n"
    assert obstacle.read_text() == "precious"


def test_the_daemon_gets_the_settings_and_its_status_is_the_programs() -> None:
    before = (
        "import sys, types\n"
        "def run(effective): print(effective.settings.host.size_bytes); return 7\n"
        "sys.modules['kvstore.daemon'] = types.ModuleType('kvstore.daemon')\n"
        "sys.modules['kvstore.daemon'].run = run"
    )
    done = program("kvstored", "--set", "host.size=2MiB", before=before)
    assert (done.status, done.out) == (7, f"{2 << 20}\n")


# -- `kvstored config`


def test_config_shows_every_setting_with_its_source(tmp_path: Path) -> None:
    file = tmp_path / "kvstored.toml"
    file.write_text('[server]\ngrpc = "[::1]:50051"\n')
    done = kvstored("--config", str(file), "config", "--set", "host.size=2GiB", env={"KVSTORED_EVICT__HIGH": "0.99"})
    assert (done.status, done.err) == (0, "")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in done.out.splitlines()[1:]}
    assert list(rows) == list(PLACES)
    assert [cell.strip() for cell in rows["server.grpc"]] == ["[::1]:50051", str(file)]
    assert [cell.strip() for cell in rows["host.size"]] == ["2GiB", "--set"]
    assert [cell.strip() for cell in rows["evict.high"]] == ["0.99", "environment variable KVSTORED_EVICT__HIGH"]
    assert [cell.strip() for cell in rows["server.http"]] == ['""', "default"]


def test_config_as_json_has_values_as_a_file_would() -> None:
    done = kvstored("config", "--json", "--set", "host.size=1536MiB", "--set", "lease.ttl=5m")
    assert done.status == 0
    shown = json.loads(done.out)
    assert list(shown) == list(PLACES)
    assert shown["host.size"] == {"value": "1536MiB", "source": "--set"}
    assert shown["lease.ttl"] == {"value": "300s", "source": "--set"}
    assert shown["evict.low"] == {"value": 0.9, "source": "default"}
    assert shown["remote"] == {"value": [], "source": "default"}


@pytest.mark.parametrize("before", [True, False])
def test_options_stand_before_or_after_the_subcommand(before: bool, tmp_path: Path) -> None:
    file = tmp_path / "kvstored.toml"
    file.write_text('[host]\nsize = "4MiB"\n')
    options = ["--config", str(file), "--set", "evict.low=0.5"]
    done = kvstored(*options, "config", "--json") if before else kvstored("config", "--json", *options)
    shown = json.loads(done.out)
    assert shown["host.size"] == {"value": "4MiB", "source": str(file)}
    assert shown["evict.low"]["value"] == 0.5


def test_two_files_are_wrong_usage(tmp_path: Path) -> None:
    done = kvstored("--config", str(tmp_path / "a"), "config", "--config", str(tmp_path / "b"))
    assert done.status == 2
    assert "--config is given twice" in done.err


@pytest.mark.parametrize("name", ["kvstored", "kvstore_cli"])
def test_the_version_is_the_packages(name: str) -> None:
    from importlib.metadata import version

    done = program(name, "--version")
    assert done.status == 0
    assert done.out.strip().endswith(version("kvstored"))


# -- without the `daemon` extra


@pytest.mark.parametrize(("name", "shown"), [("kvstored", "kvstored"), ("kvstore_cli", "kvstore-cli")])
@pytest.mark.parametrize("missing", [("click",), ("rich",), ("pydantic",), ("click", "rich", "pydantic")])
def test_without_its_packages_a_program_says_what_to_install(name: str, shown: str, missing: tuple[str, ...]) -> None:
    # None in sys.modules makes the import fail as it does for a package that is not there.
    before = "import sys\n" + "\n".join(f"sys.modules[{package!r}] = None" for package in missing)
    done = program(name, before=before)
    wanted = f"{shown} needs packages that are not installed ({', '.join(missing)}): pip install 'kvstored[daemon]'\n"
    assert (done.status, done.out, done.err) == (1, "", wanted)


@pytest.mark.parametrize("module", ["kvstore", "kvstore.cli.entry", "kvstore.cli.daemon"])
def test_modules_that_are_the_daemon_run_as_it(module: str) -> None:
    command = [sys.executable, "-m", module, "--set", "host.sise=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("kvstored: ")
    assert "did you mean host.size?" in done.stderr


@pytest.mark.parametrize("module", ["kvstore.cli", "kvstore.cli.admin"])
def test_modules_that_are_the_administration_run_as_it(module: str) -> None:
    command = [sys.executable, "-m", module, "inspect", "session", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Usage: kvstore-cli inspect" in done.stderr


# -- `kvstore-cli`, with a stand-in for the SDK: what its errors become

SDK = """
import sys, types
from kvstored.v1 import errors
class Client:
    def __init__(self, endpoint, **options): self.endpoint = endpoint
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def stats(self):
        if {error!r}: raise getattr(errors, {error!r})("as it is")
        return {{"endpoint": self.endpoint}}
sys.modules["kvstore_client"] = types.ModuleType("kvstore_client")
sys.modules["kvstore_client"].Client = Client
"""


@pytest.mark.parametrize(("error", "status"), [("Unavailable", 1), ("InvalidArgument", 2), ("FailedPrecondition", 1)])
def test_an_error_of_the_sdk_is_a_status_and_a_message(error: str, status: int) -> None:
    done = program("kvstore_cli", "stats", "--endpoint", "unix:///nowhere/kv.sock", before=SDK.format(error=error))
    assert (done.status, done.out) == (status, "")
    assert done.err.startswith("kvstore-cli: ")
    assert "as it is" in done.err
    assert "Traceback" not in done.err
    if error == "Unavailable":
        assert done.err == "kvstore-cli: the daemon at unix:///nowhere/kv.sock does not answer: as it is\n"


@pytest.mark.parametrize("args", [["--endpoint", "unix:///a", "stats", "--json"], ["stats", "--json"]])
def test_the_endpoint_is_given_before_the_command_or_by_the_environment(args: list[str]) -> None:
    environ = {} if "--endpoint" in args else {"KVSTORED_ENDPOINT": "unix:///a"}
    done = program("kvstore_cli", *args, before=SDK.format(error=""), env=environ)
    assert json.loads(done.out) == {"endpoint": "unix:///a"}
