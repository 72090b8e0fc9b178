"""Where the daemon is found when nobody says where, and with what to come in: one rule for all of us."""

import os
from pathlib import Path

from kvstored.v1.errors import InvalidArgument

SYSTEM_RUNTIME_DIR = Path("/run/kvstored")
SOCKET_NAME = "kvstored.sock"
ENDPOINT_VARIABLE = "KVSTORED_ENDPOINT"
TOKEN_FILE_VARIABLE = "KVSTORED_TOKEN_FILE"  # noqa: S105 (the name of a variable)
CA_VARIABLE = "KVSTORED_CA"
TOKEN_BYTES_MAX = 4096
CLIENT_VARIABLES = (ENDPOINT_VARIABLE, TOKEN_FILE_VARIABLE, CA_VARIABLE)
"""Variables of clients; a daemon that finds them set is not meant."""


def user_runtime_dir() -> Path:
    """The user's own runtime directory for kvstored; need not exist.

    `$XDG_RUNTIME_DIR/kvstored`; root without one gets `/run/kvstored`, anybody else
    `/tmp/kvstored-UID`, which the daemon creates 0700 and refuses if another owns it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base:
        return Path(base) / "kvstored"
    uid = os.getuid()
    return SYSTEM_RUNTIME_DIR if uid == 0 else Path(f"/tmp/kvstored-{uid}")  # noqa: S108 (created 0700, owner checked)


def default_endpoint() -> str:
    """`$KVSTORED_ENDPOINT`, else the user's own socket if there is one, else the system's if there is one.

    Where neither exists the user's own is named, so that a message says where a daemon
    started by hand would have been.
    """
    named = os.environ.get(ENDPOINT_VARIABLE, "")
    if named:
        return named
    own = user_runtime_dir() / SOCKET_NAME
    system = SYSTEM_RUNTIME_DIR / SOCKET_NAME
    return f"unix://{system if system.exists() and not own.exists() else own}"


def token_of_file(name: str) -> str:
    """The token that is the one line of a file. Raises InvalidArgument."""
    try:
        with Path(name).open(encoding="ascii") as file:
            token = file.read(TOKEN_BYTES_MAX + 1).strip()
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidArgument(f"the token file {name} cannot be read: {e}") from e
    if not token or len(token) > TOKEN_BYTES_MAX or not token.isprintable():
        raise InvalidArgument(f"the token file {name} is not one line with a token")
    return token
