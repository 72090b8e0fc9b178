"""What went wrong on the SSD, told apart: unreadable, which is set aside, and faults of the machine, which pass.

A healthy SSD that is taken for an unreadable one is lost. So unreadable is only what RocksDB
calls corrupt, or a file of it that is gone, and never what the operating system refused: no
right, no room, no descriptor, a read-only mount, a disk that does not answer. The binding says
all of it in text only, that of the operating system sometimes within a sentence about something
else ("Invalid argument: Found options incompatible with filesystem: IO error: ...").
"""

import errno
import os
import re
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_RIGHT = (errno.EACCES, errno.EPERM)
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
OF_FILES = (*NO_ROOM, *NO_RIGHT, *NO_DESCRIPTOR, errno.EROFS, errno.EFBIG, errno.EOPNOTSUPP)
"""What may be wrong with a new file while those that are there can be read and written."""

STALL_WORDS, CORRUPTION_WORDS, MACHINE_WORDS = "Write stall", "Corruption", "IO error"
"""How RocksDB names these: db/db_impl/db_impl_write.cc, util/status.cc."""

NOT_OURS_WORDS = ("Invalid argument", "Not implemented", "NotFound")
"""How RocksDB names files that it understands and that are not what this release writes."""

BINDING_WORDS = re.compile(r"\(os error \d+\)")
"""How the binding names what the operating system refused to itself: it writes a file of its own beside RocksDB's."""


class Unreadable(Exception):
    """What is on the disk is not a catalogue that we can read: set it aside. `str()` is the reason."""


class CatalogueError(Exception):
    """A call on the catalogue did not succeed, and might another time. `str()` is the reason."""


class StalledError(CatalogueError):
    """RocksDB would have to wait."""


def is_no_room(error: Exception) -> bool:
    """Whether the file system had none."""
    return _is_one_of(error, NO_ROOM)


def is_of_files(text: str) -> bool:
    """Whether no file can be made or grow, and the disk is well for all that."""
    return any(os.strerror(number) in text for number in OF_FILES)


def is_gone(text: str) -> bool:
    """Whether it is about a file that is not there."""
    return os.strerror(errno.ENOENT) in text


def fault(error: Exception, *, opening: bool = False) -> Exception:
    """What the binding raised, as what it means. `opening`: as it reads what must be there, a missing file included."""
    text = str(error)
    if STALL_WORDS in text:
        return StalledError(text)
    if isinstance(error, OSError) or MACHINE_WORDS in text or BINDING_WORDS.search(text):
        corrupt = MACHINE_WORDS in text and is_gone(text) and (opening or text.startswith(CORRUPTION_WORDS))
    else:
        corrupt = text.startswith(CORRUPTION_WORDS) or (opening and text.startswith(NOT_OURS_WORDS))
    return Unreadable(text) if corrupt else CatalogueError(text)


def with_next_step(error: BaseException, path: Path) -> str:
    """What it says, and what to do about it on the SSD at `path`, where that is not said yet."""
    text = _text(error)
    step = ""
    if _is_one_of(error, NO_RIGHT):
        step = f"check owner and mode of {path} and of what is in it (ls -lR, lsattr -R)"
    elif _is_one_of(error, (errno.EROFS,)):
        step = f"the file system of {path} is to be mounted for writing: dmesg says why it is not"
    elif _is_one_of(error, NO_DESCRIPTOR):
        step = "raise the daemon's limit of open files (LimitNOFILE=)"
    return text if not step or step in text else f"{text}; {step}"


def _text(error: BaseException) -> str:
    """An error as a sentence, never an empty one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    return f"{type(error).__name__}: {error}" if not str(error) else str(error)


def _is_one_of(error: BaseException, numbers: tuple[int, ...]) -> bool:
    return getattr(error, "errno", 0) in numbers or any(os.strerror(number) in str(error) for number in numbers)
