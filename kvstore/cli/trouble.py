"""Why a daemon could not be reached, or did not take us for an administrator, and what to do next.

The SDK says what failed. Where more can be found out, it is said instead: that costs a
connection more, which is right for a person who waits for an answer and wrong in an engine.
"""

import os
import pwd
import socket
import ssl
from pathlib import Path

from kvstored.v1.endpoint import CA_VARIABLE

PROBE_S = 3.0

EXPIRED, NOT_YET_VALID = 10, 9
UNTRUSTED = (2, 18, 19, 20, 21)
OTHER_HOST = (62, 64)
"""X509_V_ERR_... of openssl's x509_vfy.h."""

NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
"""Openssl's reasons where what came is no TLS; which one, is up to its release."""


def unreachable(endpoint: str, ca: str | None) -> str:
    """Why the daemon at this address is not reached and what to do; "" where the SDK has said all there is."""
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("grpc", "grpcs"):
        return ""
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16):
        return f"it names no port: {scheme}://HOST:PORT is wanted"
    try:
        sock = socket.create_connection((host, int(port)), timeout=PROBE_S)
    except (OSError, UnicodeError):
        return ""
    with sock:
        return _of_tls(sock, host, rest, ca) if scheme == "grpcs" else _of_plain(sock, rest)


def with_another(said: str) -> str:
    """What the SDK says of a daemon that does not answer, and once how another is named: here by an option."""
    from kvstore_client import advice

    if advice.ANOTHER in said:
        return said.replace(advice.ANOTHER, "name another with --endpoint")
    return f"{said}{'' if said.endswith('?') else '.'} Another daemon is named with --endpoint."


def as_its_user(endpoint: str) -> str:
    """How to ask as the user whose daemon has this socket; "" where it is none, or ours, or cannot be told."""
    path = endpoint.partition("://")[2]
    found = _closest(Path(path)) if path.startswith("/") else None
    if found is None or found.st_uid == os.geteuid():
        return ""
    try:
        name = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        name = f"'#{found.st_uid}'"
    return f"; as the daemon's own user: `sudo -u {name} kvstore-cli ...`"


def _closest(path: Path) -> os.stat_result | None:
    """Of the socket, or of the directory that we are not let into, which is the daemon's too."""
    for place in (path, *path.parents[:-1]):
        try:
            return place.stat()
        except PermissionError:
            continue
        except OSError:
            return None
    return None


def _of_plain(sock: socket.socket, rest: str) -> str:
    """Somebody listens, and does not answer in plain text: in TLS?"""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is asked for its language, not for trust
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(sock).close()
    except OSError:
        return ""  # it may be a daemon that is busy, stopped or gone by now: nothing is known that was not before
    return f"it speaks TLS there: --endpoint grpcs://{rest}, with --ca FILE for the authority of its certificate"


def _of_tls(sock: socket.socket, host: str, rest: str, ca: str | None) -> str:
    """Why no trust came about: openssl says it exactly, gRPC does not."""
    authority = ca or os.environ.get(CA_VARIABLE) or None
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    if authority is not None:
        try:
            context = ssl.create_default_context(cafile=authority)
        except OSError as e:  # ssl.SSLError is one
            return f"--ca {authority} has no certificate that can be read ({e.strerror or e}): a PEM file is wanted"
    try:
        context.wrap_socket(sock, server_hostname=host).close()
    except ssl.SSLCertVerificationError as e:
        return _of_certificate(e, host, authority)
    except ssl.SSLError as e:
        if e.reason in NO_TLS:
            return f"it does not speak TLS there: --endpoint grpc://{rest} without --ca, or another port"
        return f"TLS does not come about there ({e.reason}): is it the port of server.grpc?"
    except OSError:
        return ""
    return ""


def _of_certificate(error: ssl.SSLCertVerificationError, host: str, authority: str | None) -> str:
    trusted = authority or "the authorities that this machine trusts"
    code, said = error.verify_code, error.verify_message
    if code == EXPIRED:
        return (
            f"its certificate has expired, or that of {trusted}: renew it (server.tls_cert, --ca) and restart kvstored"
        )
    if code == NOT_YET_VALID:
        return "its certificate is not valid yet: look at the clocks of both machines"
    if code in UNTRUSTED:
        return (
            f"its certificate is not signed by {trusted}: name the file of the right authority with --ca FILE "
            f"or ${CA_VARIABLE}"
        )
    if code in OTHER_HOST:
        return f"its certificate is for other names than {host}: use one of those in --endpoint; --ca is right"
    return f"its certificate is not trusted ({said}): --ca FILE names its authority"
