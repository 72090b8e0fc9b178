"""Where the daemon is found when nobody says where, and with what to come in: one rule for all of us."""

import os
import select
import stat
import time
from pathlib import Path

from kvstored.v1.errors import InvalidArgument

SYSTEM_RUNTIME_DIR = Path("/run/kvstored")
SOCKET_NAME = "kvstored.sock"
ENDPOINT_VARIABLE = "KVSTORED_ENDPOINT"
TOKEN_FILE_VARIABLE = "KVSTORED_TOKEN_FILE"  # noqa: S105 (the name of a variable)
CA_VARIABLE = "KVSTORED_CA"
TOKEN_BYTES_MAX = 4096
PIPE_WAIT_S = 5.0
"""For a token that comes through a pipe."""

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
    return f"unix://{system if _is_there(system) and not _is_there(own) else own}"


def _is_there(path: Path) -> bool:
    """Whether there is such a socket, also where we are not let to it: who connects is told why not."""
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def token_of_file(name: str, origin: str = "") -> str:
    """The token that is the one line of a file. Raises InvalidArgument, which says what to do and quotes nothing.

    `origin` stands behind the name in messages: who named it. Pipes are read, for shells
    that make one of a command. Others may read it (secrets of a container are often so
    mounted): which user this process is, is its keeper's to say.
    """
    where = f"the token file {name}{origin}"
    try:
        content = _content(name)
    except TimeoutError:
        raise InvalidArgument(f"{where} is a pipe that nobody has written to within {PIPE_WAIT_S:.0f} s") from None
    except OSError as e:
        raise InvalidArgument(f"{where} cannot be read: {e.strerror}{_unreadable(name, e)}") from e
    except ValueError as e:  # a zero byte in its name
        raise InvalidArgument(f"{where!r} cannot be read: {e}") from e
    token = content.decode("ascii", "replace").strip()
    if not token:
        raise InvalidArgument(f"{where} is empty: write the token into it that the daemon knows (server.tokens)")
    if len(content) > TOKEN_BYTES_MAX or not token.isascii() or not token.isprintable():
        raise InvalidArgument(
            f"{where} is not one line with a token: one line of printable ASCII, at most {TOKEN_BYTES_MAX} bytes"
        )
    return token


def _content(name: str) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        content, until, poll = b"", time.monotonic() + PIPE_WAIT_S, select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(content) <= TOKEN_BYTES_MAX:
            if not poll.poll(max(until - time.monotonic(), 0) * 1000):
                raise TimeoutError
            more = os.read(descriptor, TOKEN_BYTES_MAX + 1)
            if not more:
                break
            content += more
        return content
    finally:
        os.close(descriptor)


def _unreadable(name: str, error: OSError) -> str:
    """What to do about it."""
    if isinstance(error, FileNotFoundError):
        return "; write the token into it, or name another file"
    if not isinstance(error, PermissionError):
        return "; it must be a file with one line"
    try:
        found = Path(name).stat()
    except OSError:
        return "; this process may not look into its directory"
    mode = stat.S_IMODE(found.st_mode)
    return f"; it is uid {found.st_uid}'s with mode {mode:04o}, and this process is uid {os.geteuid()}: chown it"
