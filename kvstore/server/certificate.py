"""The certificate by which the daemon shows itself over TCP, and its key.

Read once, at start: a renewed one is in force after a restart. A certificate that no client
would take is refused: a daemon that serves nobody is not ready, whatever else works.
"""

import datetime
import ssl
import stat
import warnings
from pathlib import Path

from cryptography import x509
from cryptography.utils import CryptographyDeprecationWarning

from kvstore.errors import ConfigError, StartupError
from kvstore.logs import logger
from kvstore.server.private_file import FILE_BYTES_MAX, read_private

log = logger("kvstored.tls")

EXPIRES_SOON = datetime.timedelta(days=14)
"""A certificate that ends within this is told of at start."""


def load(cert: Path, key: Path) -> tuple[bytes, bytes, ssl.SSLContext]:
    """Key and chain of `server.tls_key` and `server.tls_cert` in PEM, and both for servers that take a context.

    Raises ConfigError naming the setting and what is wrong, and StartupError for a
    certificate that is not valid yet, which the machine's clock may be the reason of.
    """
    try:
        if not stat.S_ISREG(cert.stat().st_mode):  # a FIFO would be waited for
            raise ConfigError(f"server.tls_cert: {cert} is not a regular file")
        with cert.open("rb") as file:
            chain = file.read(FILE_BYTES_MAX + 1)
    except OSError as e:
        raise ConfigError(f"server.tls_cert: {cert} cannot be read: {e.strerror}") from e
    if len(chain) > FILE_BYTES_MAX:
        raise ConfigError(f"server.tls_cert: {cert} is larger than {FILE_BYTES_MAX} bytes")
    secret = read_private(key, "server.tls_key")
    context = _context(cert, key)
    _check_dates(cert, chain, datetime.datetime.now(datetime.UTC))
    return secret, chain, context


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A key under a password would be asked for on the terminal otherwise.
        context.load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
        why = getattr(e, "reason", None) or str(e)
        raise ConfigError(
            f"server.tls_cert, server.tls_key: {cert} and {key} are not a PEM certificate and its own key, "
            f"without a password ({why})"
        ) from e
    return context


def _check_dates(path: Path, chain: bytes, now: datetime.datetime) -> None:
    """Refuses the daemon's own certificate out of its time.

    Of the others in the chain one that is out of it is only told of: clients may well have
    another way to an authority they trust.
    """
    try:
        with warnings.catch_warnings():
            # What is odd in it, such as a serial number of 0, is between its issuer and the clients.
            warnings.simplefilter("ignore", CryptographyDeprecationWarning)
            own, *others = x509.load_pem_x509_certificates(chain)
        begins, ends = own.not_valid_before_utc, own.not_valid_after_utc
    except ValueError as e:
        raise ConfigError(f"server.tls_cert: {path} is not a certificate that can be read ({e})") from e
    if ends < now:
        raise ConfigError(f"server.tls_cert: {path} expired at {_shown(ends)}: renew it, then start again")
    if begins > now:
        raise StartupError(
            f"server.tls_cert: {path} is not valid before {_shown(begins)}, and by this machine's clock it is "
            f"{_shown(now)}: set the clock, or use another certificate"
        )
    if ends - now < EXPIRES_SOON:
        log.warning("the certificate expires soon", file=str(path), expires=_shown(ends), days=(ends - now).days)
    for other in others:
        if not other.not_valid_before_utc <= now <= other.not_valid_after_utc:
            log.warning(
                "a certificate of the chain is out of its time",
                file=str(path),
                subject=other.subject.rfc4514_string(),
                expires=_shown(other.not_valid_after_utc),
            )


def _shown(moment: datetime.datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
