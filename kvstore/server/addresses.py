"""The addresses of this machine that the host of a listener means, and binding them; the same for gRPC and HTTP."""

import errno
import itertools
import socket

from kvstore.instance import port_holder

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


def bound(address: str, setting: str) -> tuple[list[socket.socket], str]:
    """Sockets on every address that a `HOST:PORT` means, not listening yet, and the address with the actual port.

    Raises OSError naming the setting, and who has the port. Never SO_REUSEPORT: two daemons would share it.
    """
    host, _, port_text = address.rpartition(":")
    port, sockets = int(port_text), list[socket.socket]()
    try:
        for numeric in addresses_of(host, setting):
            sockets.append(_bound(numeric, port, setting))
            port = sockets[-1].getsockname()[1]  # of a name with two addresses, both on one port
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets, f"{host}:{port}"


def _bound(numeric: str, port: int, setting: str) -> socket.socket:
    family = family_of(numeric)
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port is free as soon as its last owner is gone
        sock.bind((numeric, port))
    except OSError as e:
        sock.close()
        raise _taken(numeric, port, setting, e) from e
    return sock


def listen(sockets: list[socket.socket], setting: str, backlog: int) -> None:
    """Has all of them listen, or closes all and raises OSError: two may have bound one port until one listens."""
    try:
        for sock in sockets:
            sock.listen(backlog)
    except OSError as e:
        numeric, port = sock.getsockname()[:2]
        for each in sockets:
            each.close()
        raise _taken(numeric, port, setting, e) from e


def shared(some: list[socket.socket], others: list[socket.socket]) -> str:
    """An address that both would listen on, or ""; binding alone does not tell while neither listens."""
    for one, other in itertools.product(some, others):
        (host, port), (host_too, port_too) = one.getsockname()[:2], other.getsockname()[:2]
        everywhere = {host, host_too} & {EVERY, "::"}
        if one.family == other.family and port == port_too and (host == host_too or everywhere):
            return shown(host, port)
    return ""


def _taken(numeric: str, port: int, setting: str, error: OSError) -> OSError:
    holder = port_holder(numeric, port) if error.errno == errno.EADDRINUSE else None
    why = f"{holder} listens there" if holder else str(error.strerror)
    message = f"{setting}: cannot listen on {shown(numeric, port)}: {why}; stop it or choose another address"
    return OSError(error.errno, message)


def _is_ours(numeric: str) -> bool:
    try:
        with socket.socket(family_of(numeric), socket.SOCK_STREAM) as probe:
            probe.bind((numeric, 0))
    except OSError:
        return False
    return True
