"""The addresses of this machine that the host of a listener means; the same for gRPC and HTTP."""

import errno
import socket

WILDCARDS = ("", "*")
"""Hosts that mean all addresses, besides 0.0.0.0 and [::]."""

EVERY = "0.0.0.0"  # noqa: S104 (asked for, behind TLS and tokens)


def addresses_of(host: str, setting: str) -> list[str]:
    """Numbers to listen on, in brackets or not as `host` may be. Raises OSError that names the setting."""
    host = host.removeprefix("[").removesuffix("]")
    try:
        infos = socket.getaddrinfo(EVERY if host in WILDCARDS else host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as e:
        raise OSError(errno.EADDRNOTAVAIL, f"{setting}: {host}: {e.strerror}") from e
    found = dict.fromkeys(str(info[4][0]) for info in infos)
    usable = [numeric for numeric in found if _is_ours(numeric)]
    if not usable:
        raise OSError(errno.EADDRNOTAVAIL, f"{setting}: {host} is no address of this machine")
    return usable


def family_of(numeric: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in numeric else socket.AF_INET


def shown(numeric: str, port: int) -> str:
    """As an address is written."""
    return f"[{numeric}]:{port}" if ":" in numeric else f"{numeric}:{port}"


def _is_ours(numeric: str) -> bool:
    try:
        with socket.socket(family_of(numeric), socket.SOCK_STREAM) as probe:
            probe.bind((numeric, 0))
    except OSError:
        return False
    return True
