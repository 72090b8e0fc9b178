"""Reads the settings from their sources and says where each came from.

Sources, highest first: `--set section.key=value` (of two for one key the later), the
environment (`KVSTORED_SECTION__KEY`), a TOML file, the defaults. Every value of every
source is checked, also one that a higher source overrides: it would be in force the day
the override goes. Each reader appends what it finds wrong to one list of problems, and
the list is raised as a whole.
"""

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from kvstore.config.settings import Settings
from kvstore.config.values import format_duration, format_size
from kvstore.errors import ConfigError
from kvstored.v1.endpoint import ENDPOINT_VARIABLE

FILE_BYTES_MAX = 1 << 20
SHOWN_CHARS_MAX = 100
ENVIRONMENT_PREFIX = "KVSTORED_"
NEAR = 0.6
"""Similarity (difflib ratio) from which a known name is suggested for an unknown one."""
NEAR_VARIABLE = 0.65
"""The same for variables without `__` (`KVSTORED_HOST_SIZE`), which only pass if they resemble no setting."""


@dataclass(frozen=True)
class Effective:
    """The settings in force, and for each `section.key` the source it came from."""

    settings: Settings
    sources: Mapping[str, str]


@dataclass(frozen=True)
class _Place:
    """Where a key lives: the attribute of `Settings`, and the field within it (none for a setting without section)."""

    section: str
    field: FieldInfo
    name: str | None


@dataclass(frozen=True)
class _Given:
    key: str
    value: object
    source: str


def _places() -> dict[str, _Place]:
    found = {}
    for section, outer in Settings.model_fields.items():
        kind = outer.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            for name, field in kind.model_fields.items():
                found[f"{section}.{field.alias or name}"] = _Place(section, field, name)
        else:
            found[section] = _Place(section, outer, None)
    return found


PLACES = _places()
SECTIONS = {place.section: [key for key in PLACES if key.startswith(f"{place.section}.")] for place in PLACES.values()}
VARIABLES = {ENVIRONMENT_PREFIX + key.upper().replace(".", "__"): key for key in PLACES}


def load(config_file: Path | None, overrides: Sequence[str], environ: Mapping[str, str]) -> Effective:
    """The effective settings, from a TOML file, `section.key=value` texts and environment variables.

    Raises ConfigError with every problem of every source; correct them and start again.
    """
    problems: list[str] = []
    given = [
        *_from_file(config_file, problems),
        *_from_environment(environ, problems),
        *_from_overrides(overrides, problems),
    ]
    values: dict[str, object] = {}
    sources = dict.fromkeys(PLACES, "default")
    wrong = set()
    for one in given:
        problem = _check(one)
        if problem is None:
            values[one.key], sources[one.key] = one.value, one.source
        else:
            problems.append(problem)
            wrong.add(one.key)
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if name:
            nested.setdefault(section, {})[name] = value
        else:
            nested[section] = value
    effective = Effective(Settings.model_validate(nested), sources)
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
    found = {}
    for key, place in PLACES.items():
        value = getattr(effective.settings, place.section)
        if place.name is not None:
            value = getattr(value, place.name)
            if place.name.endswith("_bytes"):
                value = format_size(value)
            elif place.name.endswith("_s"):
                value = format_duration(value)
        found[key] = str(value) if isinstance(value, Path) else value
    return found


def _from_file(path: Path | None, problems: list[str]) -> Iterator[_Given]:
    if path is None:
        return
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ValueError(f"is larger than {FILE_BYTES_MAX} bytes")  # noqa: TRY301
        content = tomllib.loads(data.decode())
    except FileNotFoundError:
        problems.append(
            f"config file {path} does not exist: name one that does, or leave out --config for the defaults"
        )
        return
    except OSError as error:
        problems.append(f"config file {path} cannot be read: {error.strerror}")
        return
    except (ValueError, RecursionError) as error:
        problems.append(f"config file {path} is not valid TOML: {error}")
        return
    for name, value in content.items():
        if not SECTIONS.get(name):
            yield from _known(_Given(name, value, str(path)), problems)
        elif isinstance(value, dict):
            for key, inner in value.items():
                yield from _known(_Given(f"{name}.{key}", inner, str(path)), problems)
        else:
            problems.append(
                f"{name} = {_shown(value)} ({path}): {name} is a section; write [{name}], then its settings"
            )


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> Iterator[_Given]:
    for variable in sorted(environ):
        if variable in VARIABLES:
            key = VARIABLES[variable]
            yield _Given(key, _from_text(key, environ[variable]), f"environment variable {variable}")
        elif variable.upper().startswith(ENVIRONMENT_PREFIX) and variable != ENDPOINT_VARIABLE:
            certain = "__" in variable
            name = variable.upper().removeprefix(ENVIRONMENT_PREFIX)
            names = [known.removeprefix(ENVIRONMENT_PREFIX) for known in VARIABLES]
            near = difflib.get_close_matches(name, names, 1, NEAR if certain else NEAR_VARIABLE)
            if certain or near:
                hint = f"did you mean {ENVIRONMENT_PREFIX}{near[0]}?" if near else f"allowed: {', '.join(VARIABLES)}"
                problems.append(
                    f"environment variable {variable} = {_shown(environ[variable])}: no such setting; {hint}"
                )


def _from_overrides(overrides: Sequence[str], problems: list[str]) -> Iterator[_Given]:
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            problems.append(f"--set {_shown(text)}: no value; write --set section.key=value")
            continue
        yield from _known(_Given(key, _from_text(key, value), "--set"), problems)


def _from_text(key: str, text: str) -> object:
    """The value a text stands for, by the field's type; the text itself where it stands for none."""
    kind = PLACES[key].field.annotation if key in PLACES else str
    try:
        if kind is float:
            return float(text)
        if kind is not None and getattr(kind, "__origin__", None) is list:
            return json.loads(text)
    except (ValueError, RecursionError):
        pass  # not swallowed: the text fails the field's own check, whose message is the better one
    return text


def _known(given: _Given, problems: list[str]) -> Iterator[_Given]:
    if given.key in PLACES:
        yield given
        return
    what = f"{given.key if given.key.isprintable() else _shown(given.key)} = {_shown(given.value)} ({given.source})"
    section, dot, name = given.key.partition(".")
    if SECTIONS.get(section):
        near = difflib.get_close_matches(given.key, SECTIONS[section], 1, NEAR)
        allowed = f"allowed in {section}: {', '.join(key.partition('.')[2] for key in SECTIONS[section])}"
        text = f"{what}: no such setting; {allowed}"
    else:
        near = difflib.get_close_matches(given.key, PLACES, 1, NEAR)
        close = difflib.get_close_matches(section, SECTIONS, 1, NEAR)
        if close and not (near and dot):
            near = difflib.get_close_matches(f"{close[0]}.{name}", SECTIONS[close[0]], 1, NEAR) or [f"[{close[0]}]"]
        text = f"{what}: no such section; allowed: {', '.join(SECTIONS)}"
    problems.append(text + (f"; did you mean {near[0]}?" if near else ""))


def _check(given: _Given) -> str | None:
    """What is wrong with one value, checked alone."""
    place = PLACES[given.key]
    nested: dict[str, Any] = {given.key.rpartition(".")[2]: given.value}
    try:
        Settings.model_validate({place.section: nested} if place.name else nested)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "literal_error":
            reason = ""
        elif first["type"] == "value_error":
            reason = f"{first['ctx']['error']}; "
        else:
            reason = first["msg"].replace("Input should be", "must be") + "; "
        what = f"{given.key} = {_shown(given.value)} ({given.source})"
        return f"{what}: {reason}allowed: {place.field.description}"
    return None


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


def _shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."
