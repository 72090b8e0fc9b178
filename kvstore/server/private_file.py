"""Files with a secret in them: tokens, and the key of a certificate. One rule for all.

A regular file of the daemon's own user or root, with no right for anybody else. One that
others could have read is refused: the secret in it may be known by now.
"""

import os
import stat
from pathlib import Path

from kvstore.errors import ConfigError

FILE_BYTES_MAX = 1 << 20


def read_private(path: Path, setting: str) -> bytes:
    """The bytes of a secret file. Raises ConfigError that names the setting and what to do, and quotes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            why = _unfit(os.fstat(descriptor))
            content = b"" if why else _content(descriptor)
        finally:
            os.close(descriptor)
    except OSError as e:
        why = f"cannot be read: {e.strerror}"
    if why:
        raise ConfigError(f"{setting}: {path} {why}")
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{setting}: {path} is larger than {FILE_BYTES_MAX} bytes")
    return content


def _unfit(status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}: others may read it or write to it; chmod 0600 it"
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to uid {status.st_uid}, not to the daemon's own user or root; chown it"
    return ""


def _content(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read(FILE_BYTES_MAX + 1)
