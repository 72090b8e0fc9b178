"""How sizes, durations, paths and addresses are written in the configuration.

Every `parse_*` takes whatever a source gave and returns the value in the unit its name
says, or raises Refused with the reason alone: the loader adds key, value, source and
what is allowed. Every `format_*` writes what its `parse_*` reads back as the same value.
"""

import ipaddress
import json
import os
import re
from fractions import Fraction
from pathlib import Path

PAGE_BYTES = 4096
HITS_MAX = 65535
"""Hits of a block are counted up to here."""
SOCKET_PATH_BYTES_MAX = 107
"""Linux's sun_path holds 108 bytes with the final NUL."""
ALL_DEVICES = "all"
DEVICES_MAX = 64
_ORDINAL = re.compile(r"(?:[A-Za-z]+:)?[0-9]+")
_UUID = re.compile(r"(?=.{1,64}\Z)[A-Za-z][A-Za-z0-9]*-[A-Za-z0-9-]+")
"""`GPU-...` or `MIG-...`; at most 64 characters, as handles have room for (kvstored_cuda/devices/handles.py)."""
PERSIST_WORDS = ("none", "fdstore")
DURATION_S_MIN = 0.001
DURATION_S_MAX = 24 * 3600.0

SIZE_UNITS = {
    "TiB": 1 << 40,
    "GiB": 1 << 30,
    "MiB": 1 << 20,
    "KiB": 1 << 10,
    "TB": 10**12,
    "GB": 10**9,
    "MB": 10**6,
    "KB": 10**3,
    "B": 1,
}
DURATION_UNITS_S = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}


class Refused(ValueError):
    """Why a value is not taken. A ValueError, since pydantic collects no other kind."""


# Digits are bounded so that a number cannot grow past what int() and Fraction do at once.
_NUMBER = r"([0-9]{1,24}(?:\.[0-9]{1,24})?)"
_SIZE = re.compile(rf"{_NUMBER} ?({'|'.join(SIZE_UNITS)})")
_OTHER_SIZE = re.compile(rf"{_NUMBER} ?([KMGT])(i?)B?", re.IGNORECASE)
"""What other programs take for a size. `10G` is 10^9 to some of them and 2^30 to others, so none is guessed here."""
_DURATION = re.compile(rf"{_NUMBER}(?: ?({'|'.join(DURATION_UNITS_S)}))?")
_GROUP = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
_HOST_PORT = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*):([0-9]{1,5})")


def parse_size_bytes(value: object) -> int:
    """Bytes of `10GiB`, `1.5 MB` or `0`, fractions of a byte cut off; Refused for anything else, bare numbers included.

    Units with an i are powers of 1024, those without powers of 1000.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        raise Refused("a number without a unit; write it as text with one")
    if not isinstance(value, str):
        raise Refused("not a size")
    if value == "0":
        return 0
    match = _SIZE.fullmatch(value)
    if match is None:
        raise Refused(_no_size(value))
    size = Fraction(match[1]) * SIZE_UNITS[match[2]]
    if match[2] == "B" and size.denominator != 1:
        raise Refused("not a whole number of bytes")
    return int(size)


def _no_size(text: str) -> str:
    """Why a text is no size, with what may have been meant."""
    if re.fullmatch(_NUMBER, text):
        return "a number without a unit"
    near = _OTHER_SIZE.fullmatch(text)
    if near is None:
        return "not a size"
    number, letter, binary = near[1], near[2].upper(), f"{near[1]}{near[2].upper()}iB"
    if near[3]:
        return f"not a size; did you mean {binary}?"
    return f"not a size; did you mean {binary} (1024-fold) or {number}{letter}B (1000-fold)?"


def format_size(size_bytes: int) -> str:
    """The shortest exact spelling, in the largest unit that divides it."""
    if size_bytes == 0:
        return "0"
    spellings = [f"{size_bytes // unit}{name}" for name, unit in SIZE_UNITS.items() if size_bytes % unit == 0]
    return min(spellings, key=len)


def parse_duration_s(value: object) -> float:
    """Seconds of a number, or of `30`, `30s`, `5m`, `250ms`, `1.5h`; from 1 ms to 24 h."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise Refused("not a duration")
        seconds = float(Fraction(match[1]) * DURATION_UNITS_S[match[2] or "s"])
    if not DURATION_S_MIN <= seconds <= DURATION_S_MAX:  # false for NaN too
        raise Refused("out of range")
    return seconds


def format_duration(seconds: float) -> str:
    """Seconds with their unit, as `parse_duration_s` reads them back."""
    return f"{int(seconds) if seconds.is_integer() else seconds!r}s"


def parse_path(value: object) -> Path:
    """An absolute path; a relative one is taken from the working directory."""
    if not isinstance(value, str | Path):
        raise Refused("not a path")
    text = str(value)
    if text in ("", "."):
        raise Refused("an empty path")
    if "\0" in text:
        raise Refused("a path with a NUL in it")
    if text.startswith("unix:"):
        raise Refused(f"an address; here the path alone is meant, {text.removeprefix('unix:').removeprefix('//')}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused("not UTF-8; clients are told this path as text") from None
    return Path(text).absolute()


def parse_persist(value: object) -> str:
    """A word of PERSIST_WORDS, or an absolute path."""
    if not isinstance(value, str) or (value not in PERSIST_WORDS and not value.startswith("/")):
        raise Refused("neither of the words nor an absolute path")
    return value if value in PERSIST_WORDS else str(parse_path(value))


def parse_devices(value: object) -> str:
    """`all`, or UUIDs with commas between them, of a list or of such a text; each once, as they are named."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            raise Refused("not a list of texts") from None
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise Refused("neither all nor a list of texts")
    if names == [ALL_DEVICES]:
        return ALL_DEVICES
    for name in names:
        if _ORDINAL.fullmatch(name):
            raise Refused(
                f"{name} is a device's number, which is another one's with each CUDA_VISIBLE_DEVICES; name it by its "
                "UUID"
            )
        if not _UUID.fullmatch(name):
            raise Refused(f"{name[:80]!r} is not a UUID")
    if len(set(names)) < len(names):
        raise Refused("a device is named twice")
    if len(names) > DEVICES_MAX:
        raise Refused(f"more than {DEVICES_MAX} devices")
    return ",".join(names)


def parse_socket_path(value: object) -> Path:
    """An absolute path that fits into a Unix socket address."""
    path = parse_path(value)
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise Refused(f"as a path {length} bytes long; a socket's path has at most {SOCKET_PATH_BYTES_MAX}")
    return path


def parse_group(value: object) -> str:
    """`""`, or a name that a group can have; whether there is one is seen at the start."""
    if not isinstance(value, str):
        raise Refused("not the name of a group")
    if value and not _GROUP.fullmatch(value):
        raise Refused("not a name that a group can have")
    return value


def parse_own_directory(value: object) -> Path | None:
    """None for `""`, else an absolute path: what is kept there must not depend on where a daemon was started."""
    if isinstance(value, str) and value and not value.startswith(("/", "unix:")):
        raise Refused("not an absolute path")
    return parse_optional_path(value)


def parse_optional_path(value: object) -> Path | None:
    """None for `""`, else as `parse_path`."""
    return None if value is None or value == "" else parse_path(value)


def format_optional_path(path: Path | None) -> str:
    """As `parse_optional_path` reads it back."""
    return "" if path is None else str(path)


def parse_listen_address(value: object) -> str:
    """`""`, `HOST:PORT` or `unix:/path`, returned as gRPC takes them; for who may reach it see `reached_by_others`."""
    if not isinstance(value, str):
        raise Refused("not an address")
    if value == "":
        return value
    if value.startswith("unix:"):
        path = value.removeprefix("unix:").removeprefix("//")
        if not path.startswith("/"):
            raise Refused("a socket path that is not absolute")
        return f"unix:{parse_socket_path(path)}"
    if "://" in value:
        raise Refused("an address with a scheme; only the part after :// is meant")
    match = _HOST_PORT.fullmatch(value)
    if match is None:
        raise Refused("not HOST:PORT (an IPv6 host is written [::1])")
    if int(match[2]) > 65535:
        raise Refused("a port above 65535")
    return value


def host_and_port(address: str) -> tuple[str, int] | None:
    """Host (without brackets) and port of a `HOST:PORT`; port 0 lets the kernel choose. None for any other address."""
    if not address or address.startswith("unix:"):
        return None
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def reached_by_others(address: str) -> str:
    """Why other machines may reach a listener on this address; "" where none can.

    Without TLS and authentication, whoever reaches the port reads every prompt's cache and
    may clear it. Only loopback is known to be closed: not wildcards, not other addresses,
    and not names, which may resolve to any (`localhost` excepted).
    """
    found = host_and_port(address)
    if found is None or found[0] == "localhost":
        return ""
    host = found[0]
    if host in ("", "*"):
        return "open to every machine that reaches this one"
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return "a host name, which may lead to other machines"
    if number.is_unspecified:
        return "open to every machine that reaches this one"
    return "" if number.is_loopback else "open to other machines"


def parse_write_back(text: str) -> str:
    """When blocks are written to the SSD."""
    kind, _, hits = text.partition(":")
    number = int(hits) if hits.isascii() and hits.isdecimal() else 0
    if text in ("through", "evict") or (kind == "hits" and 1 <= number <= HITS_MAX):
        return text
    raise Refused("not a way to write back")
