"""What may be set in kv_connector_extra_config; anything else is refused when the engine starts."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore_client.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One engine's settings, the same in its scheduler and its workers.

    endpoint          of the daemon on this machine, unix:///path; "": as kvstore_client finds it
    tenant            whose blocks these are
    model             names the weights, for who knows better than their path and content
    min_tokens        below this many tokens computing is taken to be faster than loading from memory
    min_tokens_ssd    the same where some of them are on the SSD only
    load_s            a load that has not ended after so long has failed, and is computed
    save_s            a save that has not begun after so long is dropped
    timeout_s         for the daemon to answer a worker's thread; the scheduler never waits for it
    load_threads      loads under way at once in a worker
    pinned            at most this share of the engine's blocks is kept from reuse for saves
    save_generated    whether to save blocks of generated tokens, or prompts only
    layers            loads before the forward pass, layer by layer, instead of between steps
    """

    endpoint: str = ""
    tenant: str = "default"
    model: str = ""
    min_tokens: int = 1
    min_tokens_ssd: int = 1
    load_s: float = 2.0
    save_s: float = 1.0
    timeout_s: float = 1.0
    load_threads: int = 2
    pinned: float = 0.25
    save_generated: bool = True
    layers: bool = False

    def __post_init__(self) -> None:
        for name in ("load_s", "save_s", "timeout_s"):
            if not 0 < getattr(self, name) <= 60:
                raise InvalidArgument(f"{name}={getattr(self, name)!r} is not a number of seconds above 0, at most 60")
        for name in ("min_tokens", "min_tokens_ssd", "load_threads"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name}={getattr(self, name)!r} is not a whole number above 0")
        if not 0 < self.pinned <= 1:
            raise InvalidArgument(f"pinned={self.pinned!r} is not a fraction above 0, at most 1")
        if self.endpoint and not self.endpoint.startswith("unix:///"):
            raise InvalidArgument(
                f"endpoint={self.endpoint!r}: the connector copies to and from shared memory; expected unix:///path"
            )


def settings_of(extra: Mapping[str, Any]) -> Settings:
    """Checks names and types. Raises InvalidArgument saying what is allowed."""
    known = {field.name: field.default for field in fields(Settings)}
    found: dict[str, Any] = {}
    for name, value in extra.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise InvalidArgument(f"kv_connector_extra_config has no {name!r}{meant}; it may have {', '.join(known)}")
        kind = type(known[name])
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InvalidArgument(f"kv_connector_extra_config: {name}={value!r} is not a {kind.__name__}")
        found[name] = value
    return Settings(**found)
