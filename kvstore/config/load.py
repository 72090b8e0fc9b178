"""Loads the settings with pydantic-settings, and keeps what that does not: refusals, and where a value came from.

Sources, highest first: `--set section.key=value` (of two for one key the later), the
environment (`KVSTORED_SECTION__KEY`), a TOML file, the defaults. Every value of every
source is checked, also one that a higher source overrides: it would be in force the day
the override goes. All that is wrong is collected, then raised as a whole.
"""

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource, InitSettingsSource, TomlConfigSettingsSource
from pydantic_settings import PydanticBaseSettingsSource as Source

from kvstore.config import values
from kvstore.config.settings import ROCKSDB_SIZE_BYTES_MIN, Settings, Tables
from kvstore.errors import ConfigError
from kvstored.v1.endpoint import CLIENT_VARIABLES

FILE_BYTES_MAX = 1 << 20
SHOWN_CHARS_MAX = 100
PREFIX = Settings.model_config["env_prefix"]
DEVICE_VARIABLES = ("KVSTORED_HOST_DEVICES", "KVSTORED_HOST_DEVICE_FAULTS")
"""Devices without a GPU, for trying (kvstored_cuda/devices/discovery.py, faults.py): no settings."""
NEAR = 0.6
"""Similarity (difflib ratio) from which a known name is suggested for an unknown one."""
NEAR_VARIABLE = 0.65
"""The same for variables without `__` (`KVSTORED_HOST_SIZE`), which only pass if they resemble no setting."""

Named = tuple[Source, str]
"""A source, and what messages call it."""


@dataclass(frozen=True)
class Effective:
    """The settings in force, and for each `section.key` the source it came from."""

    settings: Settings
    sources: Mapping[str, str]


def _places() -> dict[str, FieldInfo]:
    found: dict[str, FieldInfo] = {}
    for section, outer in Settings.model_fields.items():
        if isinstance(outer.annotation, type) and issubclass(outer.annotation, BaseModel):
            inner = outer.annotation.model_fields.items()
            found |= {f"{section}.{field.alias or name}": field for name, field in inner}
        else:
            found[section] = outer
    return found


PLACES = _places()
VARIABLES = {PREFIX + key.upper().replace(".", "__"): key for key in PLACES}


def load(config_file: Path | None, overrides: Sequence[str], environ: Mapping[str, str]) -> Effective:
    """The effective settings, from a TOML file, `section.key=value` texts and environment variables.

    Raises ConfigError with every problem of every source; correct them and start again.
    """
    problems: list[str] = []
    named = [
        *_from_file(config_file, problems),
        *_from_environment(environ, problems),
        *_from_overrides(overrides, problems),
    ]
    right: list[Source] = []
    wrong: set[str] = set()
    sources = dict.fromkeys(PLACES, "default")
    for source, name in named:
        content = source()
        # Only a file has types; what the environment and --set have is text.
        for key, problem in _take_out_wrong(content, name, strict=isinstance(source, TomlConfigSettingsSource)):
            problems.append(problem)
            wrong.add(key)
        right.insert(0, InitSettingsSource(Settings, content))
        sources.update(dict.fromkeys(_flat(content), name))
    effective = Effective(Settings(*right), sources)
    problems += [text for keys, text in _contradictions(effective) if not wrong.intersection(keys)]
    if problems:
        raise ConfigError(*problems)
    return effective


def describe(effective: Effective) -> list[tuple[str, str, str]]:
    """(key, value as text, source) of every setting, in the order of `Settings`."""
    return [
        (key, value if isinstance(value, str) else json.dumps(value), effective.sources[key])
        for key, value in as_written(effective).items()
    ]


def as_written(effective: Effective) -> dict[str, Any]:
    """The value of every setting as a file would have it: sizes and durations with their unit."""
    return _flat(effective.settings.model_dump(mode="json", by_alias=True))


def _from_file(path: Path | None, problems: list[str]) -> Iterator[Named]:
    if path is None:
        return
    try:
        with path.open("rb") as file:
            size_bytes = len(file.read(FILE_BYTES_MAX + 1))
        if size_bytes > FILE_BYTES_MAX:
            problems.append(f"config file {path} is larger than {FILE_BYTES_MAX} bytes")
        elif not path.is_file():  # such a one the library would pass over in silence
            problems.append(f"config file {path} is not a regular file")
        else:
            yield TomlConfigSettingsSource(Settings, path.absolute()), str(path)
    except FileNotFoundError:
        problems.append(
            f"config file {path} does not exist: name one that does, or leave out --config for the defaults"
        )
    except OSError as error:
        problems.append(f"config file {path} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        problems.append(f"config file {path} is not valid TOML: {error}")


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> Iterator[Named]:
    for variable in sorted(environ):
        if variable in VARIABLES:
            source = EnvSettingsSource(Settings, case_sensitive=False)
            source.env_vars = {variable.lower(): environ[variable]}
            yield source, f"environment variable {variable}"
        elif variable.upper().startswith(PREFIX) and variable not in (*CLIENT_VARIABLES, *DEVICE_VARIABLES):
            certain = "__" in variable
            names = [known.removeprefix(PREFIX) for known in VARIABLES]
            near = difflib.get_close_matches(
                variable.upper().removeprefix(PREFIX), names, 1, NEAR if certain else NEAR_VARIABLE
            )
            if certain or near:
                hint = f"did you mean {PREFIX}{near[0]}?" if near else f"allowed: {', '.join(VARIABLES)}"
                problems.append(
                    f"environment variable {variable} = {_shown(environ[variable])}: no such setting; {hint}"
                )


def _from_overrides(overrides: Sequence[str], problems: list[str]) -> Iterator[Named]:
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.encode(errors="backslashreplace").decode()  # pydantic cannot name one that is not UTF-8
        section, dot, name = key.partition(".")
        if not equals:
            problems.append(f"--set {_shown(text)}: no value; write --set section.key=value")
        else:
            content = {section: {name: value}} if dot and section in Settings.model_fields else {key: value}
            yield InitSettingsSource(Settings, content), "--set"


def _take_out_wrong(content: dict[str, Any], source: str, *, strict: bool) -> Iterator[tuple[str, str]]:
    """Leaves in the content of a source what is right there; yields key and problem of the rest."""
    try:
        Tables.model_validate(content, strict=strict)
    except ValidationError as failure:
        for error in failure.errors(include_url=False):
            *section, last = error["loc"]
            del (content[str(section[0])] if section else content)[str(last)]
            key = ".".join(map(str, error["loc"]))
            yield key, _problem(key, error, source)


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section, value in content.items():
        table = isinstance(value, dict)
        found |= {f"{section}.{name}": inner for name, inner in value.items()} if table else {section: value}
    return found


def _problem(key: str, error: ErrorDetails, source: str) -> str:
    what = f"{key if key.isprintable() else _shown(key)} = {_shown(error['input'])} ({source})"
    if error["type"] == "extra_forbidden":
        return f"{what}: {_unknown(key, error['input'])}"
    if key not in PLACES:
        return f"{what}: {key} is a section; write [{key}], then its settings"
    if error["type"] == "literal_error":
        reason = ""
    elif error["type"] == "value_error":
        reason = f"{error['ctx']['error']}; "
    else:
        reason = error["msg"].replace("Input should be", "must be") + "; "
    return f"{what}: {reason}allowed: {PLACES[key].description}"


def _unknown(key: str, value: object) -> str:
    section = key.partition(".")[0]
    siblings = [known for known in PLACES if known.startswith(f"{section}.")]
    if siblings:
        names = ", ".join(known.removeprefix(f"{section}.") for known in siblings)
        text = f"no such setting; allowed in {section}: {names}"
    else:
        text = f"no such section; allowed: {', '.join(Settings.model_fields)}"
        if isinstance(value, dict) and value:
            key = f"{key}.{next(iter(value))}"
    near = difflib.get_close_matches(key, siblings or PLACES, 1, NEAR)
    return text + (f"; did you mean {near[0]}?" if near else "")


def _contradictions(effective: Effective) -> Iterator[tuple[tuple[str, ...], str]]:
    """Values that are right alone and wrong together: the keys, and the problem."""
    settings, sources = effective.settings, effective.sources
    if not settings.evict.low < settings.evict.high:
        low = f"evict.low = {settings.evict.low} ({sources['evict.low']})"
        high = f"evict.high = {settings.evict.high} ({sources['evict.high']})"
        yield ("evict.low", "evict.high"), f"{low} must be below {high}; set both"
    if settings.server.grpc_socket == settings.server.socket:
        what = f"server.grpc = {_shown(settings.server.grpc)} ({sources['server.grpc']})"
        yield ("server.grpc", "server.socket"), f"{what} is server.socket as well; allowed: another path"
    if settings.server.http_socket in (settings.server.socket, settings.server.grpc_socket or Path()):
        what = f"server.http = {_shown(settings.server.http)} ({sources['server.http']})"
        yield ("server.http", "server.socket"), f"{what} is another listener's as well; allowed: another path"
    grpc, http = settings.server.grpc, settings.server.http
    if http == grpc and (values.host_and_port(http) or ("", 0))[1]:
        what = f"server.http = {_shown(http)} ({sources['server.http']})"
        yield ("server.grpc", "server.http"), f"{what} is server.grpc as well; allowed: another port"
    ssd = settings.ssd
    if ssd.path is not None and ssd.layout == "rocksdb" and ssd.size_bytes < ROCKSDB_SIZE_BYTES_MIN:
        what = f"ssd.size = {values.format_size(ssd.size_bytes)} ({sources['ssd.size']})"
        yield (
            ("ssd.size", "ssd.layout"),
            f'{what} is too small for ssd.layout = "rocksdb" ({sources["ssd.layout"]}), which keeps a log and garbage '
            f'in it; allowed: {values.format_size(ROCKSDB_SIZE_BYTES_MIN)} and more, or ssd.layout = "extents"',
        )
    yield from _shared_directories(effective)
    yield from _open_doors(effective)


def _shared_directories(effective: Effective) -> Iterator[tuple[tuple[str, ...], str]]:
    """Directories that must be one tier's own, and are not: each removes, or sets aside, what it does not know.

    As the kernel sees them, symbolic links followed: two names of one directory are one.
    """
    settings, sources = effective.settings, effective.sources
    state, ssd, host = settings.server.state_dir, settings.ssd.path, settings.host.persist_path
    keys = {"ssd.path": ssd, "host.persist": host, "server.state_dir": state}
    for key, other in (
        ("ssd.path", "server.state_dir"),
        ("host.persist", "server.state_dir"),
        ("ssd.path", "host.persist"),
    ):
        mine, theirs = keys[key], keys[other]
        if mine is None or theirs is None:
            continue
        own, another = Path(os.path.realpath(mine)), Path(os.path.realpath(theirs))
        if own == another:
            how = "is"
        elif own in another.parents:
            how = "has in it"
        elif another in own.parents and other != "server.state_dir":  # in that one each has its own
            how = "is within"
        else:
            continue
        instead = f", such as {state / 'ssd'}" if key == "ssd.path" else ""
        what = f"{key} = {_shown(str(mine))} ({sources[key]})"
        yield (key, other), f"{what} {how} {other} ({theirs}); allowed: a directory of the tier's own{instead}"


def _open_doors(effective: Effective) -> Iterator[tuple[tuple[str, ...], str]]:
    """Listeners that other machines reach without TLS and tokens, and half of a certificate."""
    server, sources = effective.settings.server, effective.sources
    guards = {"server.tls_cert": server.tls_cert, "server.tls_key": server.tls_key, "server.tokens": server.tokens}
    missing = [key for key, value in guards.items() if value is None]
    for key, address in (("server.grpc", server.grpc), ("server.http", server.http)):
        reached = values.reached_by_others(address)
        if reached and missing:
            what = f"{key} = {_shown(address)} ({sources[key]})"
            yield (
                (key, *guards),
                (
                    f"{what}: {reached}, with neither TLS nor authentication without {', '.join(guards)}; "
                    f"missing: {', '.join(missing)}; allowed: {PLACES[key].description}"
                ),
            )
    if (server.tls_cert is None) != (server.tls_key is None):
        there, lacks = ("tls_key", "tls_cert") if server.tls_cert is None else ("tls_cert", "tls_key")
        what = f"server.{there} = {_shown(getattr(server, there))} ({sources[f'server.{there}']})"
        yield tuple(guards), f"{what} is of no use without server.{lacks}; set both, or neither"


def _shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."
