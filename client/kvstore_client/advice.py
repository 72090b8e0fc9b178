"""Why a socket of the daemon's cannot be opened, in words that say what to do next. One place for all who connect.

Nothing here decides anything: it looks at what the file system shows to this process, after
the failure, and only then.
"""

import errno
import functools
import grp
import os
import pwd
import stat
from pathlib import Path

from kvstored.v1.endpoint import ENDPOINT_VARIABLE

ANOTHER = f"name another: as the endpoint where one is given, else with {ENDPOINT_VARIABLE}"
"""Of programs that have no option for it."""

FIRST_OF_SOCKETS = (errno.ENOENT, errno.EACCES, errno.ECONNREFUSED)


def no_answer(endpoint: str, path: str, error: OSError, how: str = "") -> str:
    """The whole message, of an error of connect(2) to a Unix socket; names the path once. `how` to start a daemon."""
    start = f"start `kvstored` {how}(a service: `systemctl status kvstored`), or {ANOTHER}"
    return f"no kvstored answers on {endpoint}: {_why(path, error, start)}"


def _why(path: str, error: OSError, start: str) -> str:
    if error.errno == errno.ENOENT:
        return f"there is no such socket; {start}"
    if error.errno == errno.EACCES:
        return f"permission denied: {_denied(Path(path))}"
    if error.errno == errno.ECONNREFUSED:
        if _is_socket(path):
            return f"nobody listens on the socket that is there: its daemon is starting, or gone; {start}"
        return f"what is there is no socket; {start}"
    if error.errno == errno.EAGAIN:
        return "it takes no connection in time: it stands still, or too many wait (`systemctl status kvstored`)"
    return f"{error.strerror}; {start}"


def in_words(details: str) -> OSError | None:
    """The error of connect(2) that gRPC speaks of in its own words; None where it is none of a socket's."""
    for number in FIRST_OF_SOCKETS:
        if os.strerror(number).lower() in details.lower():
            return OSError(number, os.strerror(number))
    return None


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return True  # gone meanwhile, or not for us to see


def _denied(path: Path) -> str:
    """Which of the directories on the way, or the socket itself, does not let this process in, and who may help."""
    place, needed, what = path, stat.S_IWGRP, "the socket"
    for directory in reversed(path.parents):
        if not os.access(directory, os.X_OK, effective_ids=True):
            place, needed, what = directory, stat.S_IXGRP, f"the directory {directory}"
            break
    try:
        found = place.stat()
    except OSError as e:
        return f"{what} cannot be looked at ({e.strerror}); ask who runs kvstored which group may use it"
    owner, group, mode = _user(found.st_uid), _group(found.st_gid), stat.S_IMODE(found.st_mode)
    whose = f"{what} is {owner}:{group} with mode {mode:04o}"
    mine = found.st_gid in (os.getegid(), *os.getgroups())
    if found.st_gid and mode & needed and not mine:
        me = _user(os.geteuid())
        return f"{whose}; join that group with `sudo usermod -aG {group} {me}` and log in again, or run as {owner}"
    return f"{whose}, which lets in {owner} alone; run as {owner}, or name a group in the daemon's server.socket_group"


@functools.cache
def _user(number: int) -> str:
    """Looked up once: a directory service may take its time, and a client tries again every second."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"


@functools.cache
def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return f"gid {number}"
