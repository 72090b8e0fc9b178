"""Certificates and tokens for tests, made by the openssl program as an operator would make them."""

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.conftest import RunningDaemon

TOKENS = {
    "engine": ("token-of-an-engine-0001", "default", False),
    "other": ("token-of-another-0002", "other", False),
    "everybody": ("token-of-everybody-0003", "*", False),
    "operator": ("token-of-the-operator-04", "*", True),
    "head": ("token-of-another-head-06", "other", True),
    "foreman": ("token-of-a-foreman-0005", "default", True),
}
"""Name -> token, tenant, administrator."""


def token(name: str) -> str:
    return TOKENS[name][0]


def write_tokens(path: Path) -> Path:
    """The file of TOKENS, its owner's alone."""
    path.touch(0o600)
    path.write_text(
        "".join(
            f'[tokens.{name}]\ntoken = "{text}"\ntenant = "{tenant}"\nadmin = {str(admin).lower()}\n'
            for name, (text, tenant, admin) in TOKENS.items()
        )
    )
    return path


class Authority:
    """A certificate authority of its own directory."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self.directory = directory
        self.certificate, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", self._key, "-out", self.certificate),
        )

    def issue(
        self, name: str, names: str = "IP:127.0.0.1,DNS:localhost", valid: tuple[float, float] = (-1, 2)
    ) -> tuple[Path, Path]:
        """A certificate for those names, and its key. `valid`: from and to, in days from now."""
        certificate, key, request = (self.directory / f"{name}.{end}" for end in ("pem", "key", "csr"))
        extensions = self.directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\n")
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", key, "-out", request),
        )
        begin, end = (f"{datetime.now(UTC) + timedelta(days):%Y%m%d%H%M%SZ}" for days in valid)
        # `openssl x509` of this release takes no dates, so the authority is one with books.
        books, settings = self.directory / f"{name}.books", self.directory / f"{name}.conf"
        books.write_text("")
        settings.write_text(
            f"[ca]\ndefault_ca = it\n[it]\ndatabase = {books}\nnew_certs_dir = {self.directory}\n"
            "default_md = sha256\nrand_serial = yes\npolicy = any\n[any]\ncommonName = supplied\n"
        )
        _openssl(
            *("ca", "-batch", "-notext", "-config", settings, "-cert", self.certificate, "-keyfile", self._key),
            *("-in", request, "-startdate", begin, "-enddate", end, "-extfile", extensions, "-out", certificate),
        )
        return certificate, key


def guarded(directory: Path) -> dict[str, str]:
    """Settings of a daemon that others may reach, as keywords of `running`; the authority is directory/ca.pem."""
    certificate, key = Authority(directory).issue("kvstored")
    return {
        "server__tls_cert": str(certificate),
        "server__tls_key": str(key),
        "server__tokens": str(write_tokens(directory / "tokens.toml")),
    }


def secure_endpoint(node: RunningDaemon) -> str:
    """Where it is reached on this machine, whatever address it listens on."""
    return f"grpcs://127.0.0.1:{node.grpc_endpoint.rpartition(':')[2]}"


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(
        ["openssl", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
