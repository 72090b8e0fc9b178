"""Who may come in over TCP: tokens, and the certificate by which the daemon shows itself.

A Unix socket has the kernel to say who comes; TCP has nobody. So what other machines can
reach needs TLS and tokens (kvstore/config refuses it otherwise), and where there are no
tokens, TCP is for the ordinary calls of this machine and not for administration.

The file of tokens is the daemon's own (private_file.py).

    [tokens.vllm]
    token = "at least 16 characters"
    tenant = "default"      # or "*": any tenant
    admin = false           # may inspect, evict and end sessions, of its tenant
"""

import re
import ssl
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from kvstore.errors import ConfigError
from kvstore.server.calls import TENANT
from kvstore.server.private_file import read_private
from kvstored.v1.errors import Unauthenticated

TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 16, 1024
ANY_TENANT = "*"
SCHEME = "bearer"
SAMPLE = "REPLACE-ME"
"""What stands in place of a token in docs/operating.md."""

FIELDS = {"token": str, "tenant": str, "admin": bool}
SPELLING = re.compile(rf"[!-~]{{{TOKEN_CHARS_MIN},{TOKEN_CHARS_MAX}}}\Z")
"""Printable ASCII without spaces, as a header takes it."""


@dataclass(frozen=True)
class Grant:
    """What one token allows."""

    name: str
    tenant: str
    admin: bool

    @property
    def own(self) -> str:
        """Whom it is of, or about, that names no tenant."""
        return "default" if self.tenant == ANY_TENANT else self.tenant

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
        """Of a file. Raises ConfigError that says what is wrong with it, and never what a token is."""
        try:
            tables = tomllib.loads(read_private(path, "server.tokens").decode())
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
            raise Unauthenticated(
                f"{why} (server.tokens): send authorization: Bearer TOKEN; "
                "Client(token=...) and kvstore-cli --token-file FILE do"
            )
        return grant


def _hash(token: str) -> bytes:
    return sha256(token.encode(errors="surrogatepass")).digest()


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(f"server.tokens: {path} {why}")


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
    if SAMPLE in fields["token"]:
        raise _refused(path, f"{where} token is the sample of the manual, which everybody knows; make one of your own")
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
        """Reads the files that the settings name. Raises StartupError naming the setting, mostly ConfigError."""
        loaded = Tokens.load(tokens) if tokens is not None else None
        if tls_cert is None or tls_key is None:
            return cls(loaded)
        from kvstore.server import certificate  # a daemon without TLS does not pay for reading certificates

        key, chain, context = certificate.load(tls_cert, tls_key)
        return cls(loaded, (key, chain), context)
