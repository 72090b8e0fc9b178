"""Where the gRPC edge listens: every address that a name means, alone, and with TLS where there is a certificate."""

import ctypes
import errno
import os
from typing import Any

import grpc

from kvstore.instance import port_holder
from kvstore.server.addresses import addresses_of, shown
from kvstored.v1 import CHUNK_BYTES_MAX

MAPPED_FROM_BYTES = CHUNK_BYTES_MAX + (64 << 10)
"""Allocations as large as this get mappings of their own: just above the largest message with bytes."""

KEPT_BYTES = 16 << 20
"""Freed memory at the end of the heap that is not given back to the system."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From malloc.h."""

Certificate = tuple[bytes, bytes]
"""Key and chain, PEM."""


def credentials_of(certificate: Certificate | None) -> Any:
    """What a TCP port is opened with; None for plain text. TLS 1.2 or later, by gRPC's own default."""
    return grpc.ssl_server_credentials([certificate]) if certificate is not None else None


def keep_freed_memory() -> None:
    """Lets malloc keep the memory of one message for the next.

    Otherwise each message has a mapping of its own, or is cut off the heap's end when it is
    freed, and every page of the next one is new: half of a stream's time. Where gRPC is on
    this replaces the smaller threshold that keeps the tables' heap compact (daemon.py).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, musl does not need it
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def bind(server: Any, address: str, credentials: Any = None) -> str:
    """Binds every address that `address` means; answers it with the actual port. Raises OSError naming the holder.

    `credentials`: for TCP, see `credentials_of`.
    """
    if address.startswith("unix:"):
        before = os.umask(0o177)
        try:
            _add_port(server, address, None, None)
        finally:
            os.umask(before)
        return address
    host, _, port_text = address.rpartition(":")
    port = int(port_text)
    # One by one: of a name with two addresses gRPC is content with one, and who got the other would get our calls.
    for numeric in addresses_of(host, "server.grpc"):
        port = _add_port(server, shown(numeric, port), (numeric, port), credentials)
    return f"{host}:{port}"


def _add_port(server: Any, address: str, tcp: tuple[str, int] | None, credentials: Any) -> int:
    try:
        port: int = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError as e:
        holder = port_holder(*tcp) if tcp is not None else None
        why = f"{holder} listens there" if holder else "it is in use, or not ours to bind"
        message = f"server.grpc: cannot listen on {address}: {why}; stop it or choose another address"
        raise OSError(errno.EADDRINUSE, message) from e
    return port
