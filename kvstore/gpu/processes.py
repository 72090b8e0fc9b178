"""Whether the process that a session is of still runs, and whether it has ended.

There is a time when neither is so. A process that is being killed gives up its memory, its files
and with them its contexts on devices before it is a zombie, and is still seen under /proc
meanwhile, for as long as giving up its memory takes. It has begun to exit: what it says counts no
more, but it is not gone.
"""

import os

STATE, FLAGS, THREADS, BORN = 0, 6, 17, 19
"""Of proc_pid_stat(5), counted from the state, which follows the name in parentheses: fields 3, 9, 20 and 22."""

PF_EXITING = 0x4
"""include/linux/sched.h: set before a thread lets go of memory and files."""

ENDED = "ZXx"
"""States of a thread that has ended and was not waited for."""


def lives(pid: int, born: int) -> bool:
    """Whether that process runs and has not begun to exit; `born` in ticks since boot.

    False as well for one that cannot be seen from here, or whose first thread has ended.
    """
    fields = _stat(pid)
    if not fields or int(fields[BORN]) != born:
        return False
    return fields[STATE] not in ENDED and not int(fields[FLAGS]) & PF_EXITING


def gone(pid: int, born: int) -> bool:
    """Whether that process has ended, all threads of it; `born` as in `lives`, 0 for any of that number.

    False as well while there is one of that number that cannot be seen from here.
    """
    fields = _stat(pid)
    if not fields:
        return not _exists(pid)
    if born and int(fields[BORN]) != born:
        return True
    return fields[STATE] in ENDED and int(fields[THREADS]) <= 1


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _stat(pid: int) -> list[str]:
    """Fields from the state on; none where there is no such process, or it cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()
    except OSError:
        return []
