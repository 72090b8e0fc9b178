"""Who may come in over TCP: tokens, and the certificate by which the daemon shows itself.

A Unix socket has the kernel to say who comes; TCP has nobody. So what other machines can
reach needs TLS and tokens (kvstore/config refuses it otherwise), and where there are no
tokens, TCP is for the ordinary calls of this machine and not for administration.

The file of tokens is the daemon's own: one that others could have read is refused.

    [tokens.vllm]
    token = "at least 16 characters"
    tenant = "default"      # or "*": any tenant
    admin = false           # may inspect, evict and end sessions, of its tenant
"""

import os
import re
import ssl
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from kvstore.errors import StartupError
from kvstore.server.calls import TENANT
from kvstored.v1.errors import Unauthenticated

TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 16, 1024
FILE_BYTES_MAX = 1 << 20
ANY_TENANT = "*"
SCHEME = "bearer"
FIELDS = {"token": str, "tenant": str, "admin": bool}
SPELLING = re.compile(rf"[!-~]{{{TOKEN_CHARS_MIN},{TOKEN_CHARS_MAX}}}\Z")
"""Printable ASCII without spaces, as a header takes it."""


@dataclass(frozen=True)
class Grant:
    """What one token allows."""

    name: str
    tenant: str
    admin: bool

    def check_tenant(self, tenant: str) -> None:
        """Raises Unauthenticated for a tenant that is not this token's."""
        if self.tenant not in (ANY_TENANT, tenant):
            raise Unauthenticated(f"this token is for tenant {self.tenant!r}, not for {tenant[:80]!r}")

    def check_admin(self) -> None:
        """Raises Unauthenticated for a token that is not an administrator's."""
        if not self.admin:
            raise Unauthenticated("administration needs a token with admin = true")


class Tokens:
    """All tokens, by their hash: a comparison tells nothing of the token itself by the time it takes."""

    def __init__(self, grants: Mapping[bytes, Grant]) -> None:
        self._grants = dict(grants)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Of a file. Raises StartupError that says what is wrong with it, and never what a token is."""
        try:
            tables = tomllib.loads(_private_text(path))
        except OSError as e:
            raise _refused(path, f"cannot be read: {e.strerror}") from e
        except (ValueError, RecursionError) as e:
            # Not the parser's own words: they may quote the file.
            raise _refused(path, f"is not TOML that can be read ({type(e).__name__})") from None
        named = tables.pop("tokens", None)
        if tables or not isinstance(named, dict) or not named:
            raise _refused(path, "has one or more tables [tokens.NAME] and nothing else")
        grants: dict[bytes, Grant] = {}
        for name, fields in named.items():
            hashed, grant = _grant(path, name, fields)
            if hashed in grants:
                raise _refused(path, f"[tokens.{name}] has the token of [tokens.{grants[hashed].name}]")
            grants[hashed] = grant
        return cls(grants)

    def check(self, bearer: str | None) -> Grant | None:
        """What this token allows; None for one that nobody was given."""
        return self._grants.get(_hash(bearer)) if bearer else None

    def of_header(self, authorization: str | None) -> Grant:
        """What `Authorization: Bearer TOKEN` allows. Raises Unauthenticated without one that is known."""
        scheme, _, bearer = (authorization or "").strip().partition(" ")
        grant = self.check(bearer.strip()) if scheme.lower() == SCHEME else None
        if grant is None:
            why = "this token is not known here" if authorization else "this daemon asks for a token"
            raise Unauthenticated(f"{why}: send authorization: Bearer TOKEN (server.tokens)")
        return grant


def _hash(token: str) -> bytes:
    return sha256(token.encode(errors="surrogatepass")).digest()


def _refused(path: Path, why: str) -> StartupError:
    return StartupError(f"server.tokens: {path} {why}")


def _private_text(path: Path) -> str:
    """The text of a regular file that is its owner's alone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(path, "is not a regular file")
        if status.st_mode & 0o077:
            raise _refused(
                path, f"has mode {stat.S_IMODE(status.st_mode):04o}: others may read it or write to it; chmod 600 it"
            )
        if status.st_uid not in (os.geteuid(), 0):
            raise _refused(path, f"belongs to uid {status.st_uid}, not to the daemon's own user or root")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    if len(content) > FILE_BYTES_MAX:
        raise _refused(path, f"is larger than {FILE_BYTES_MAX} bytes")
    return content.decode()


def _grant(path: Path, name: str, fields: Any) -> tuple[bytes, Grant]:
    """One table of the file, with its token hashed."""
    where = f"[tokens.{name}]" if name.isprintable() else f"[tokens.{name!r}]"
    if not isinstance(fields, dict):
        raise _refused(path, f"{where} is not a table")
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise _refused(path, f"{where} has {unknown[0]!r}; allowed: {', '.join(FIELDS)}")
    for field, kind in FIELDS.items():
        if field in fields and not isinstance(fields[field], kind):
            raise _refused(path, f"{where} {field} is not {'true or false' if kind is bool else 'text'}")
    if not SPELLING.match(fields.get("token", "")):
        raise _refused(
            path, f"{where} token is not {TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} printable ASCII characters, no spaces"
        )
    tenant = fields.get("tenant", "default")
    if tenant != ANY_TENANT and not TENANT.match(tenant):
        raise _refused(path, f"{where} tenant is neither '*' nor 1 to 64 of the characters A-Z a-z 0-9 _ . -")
    return _hash(fields["token"]), Grant(name, tenant, fields.get("admin", False))


@dataclass(frozen=True)
class Access:
    """What the listeners on TCP ask of callers and show them."""

    tokens: Tokens | None = None
    certificate: tuple[bytes, bytes] | None = None
    """Key and certificate chain, PEM."""
    tls: ssl.SSLContext | None = None
    """The same for servers that take a context."""

    @classmethod
    def load(cls, tls_cert: Path | None, tls_key: Path | None, tokens: Path | None) -> Self:
        """Reads the files that the settings name. Raises StartupError naming the setting."""
        loaded = Tokens.load(tokens) if tokens is not None else None
        if tls_cert is None or tls_key is None:
            return cls(loaded)
        read: dict[str, bytes] = {}
        for key, path in (("server.tls_cert", tls_cert), ("server.tls_key", tls_key)):
            try:
                read[key] = path.read_bytes()
            except OSError as e:
                raise StartupError(f"{key}: {path} cannot be read: {e.strerror}") from e
        return cls(loaded, (read["server.tls_key"], read["server.tls_cert"]), _context(tls_cert, tls_key))


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A key under a password would be asked for on the terminal otherwise.
        context.load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
        why = getattr(e, "reason", None) or str(e)
        raise StartupError(
            f"server.tls_cert, server.tls_key: {cert} and {key} are not a PEM certificate and its own key, "
            f"without a password ({why})"
        ) from e
    return context
