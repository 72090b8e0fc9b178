"""What the machine can give, compared before the start with what the settings ask for; and how the heap is kept small.

A slab that does not fit would otherwise show itself minutes later: the kernel's OOM killer
while the slab is touched, SIGBUS on a huge page, EMFILE at the first client. Nothing is
taken here but a higher soft limit of descriptors. Everything is read from files under
`proc` and `cgroup_root`.
"""

import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from kvstore.config.values import format_size
from kvstore.errors import ConfigError, StartupError

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

MEMORY_RESERVE_BYTES = 256 << 20
MEMORY_RESERVE_PERCENT = 5
"""The larger of the two is left free: for the daemon itself, for clients' page tables and buffers."""

MIB = 1 << 20

M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 128 << 10
"""mallopt(3): its default, but fixed."""

DESCRIPTORS_SPARE = 1024
"""Descriptors beside the segments': two a session, indexes, gRPC, the log."""

DESCRIPTORS_CLIENTS = 8192
"""For all connections that the listeners accept (two each of 2,048 sessions; gRPC, HTTP): with these, others that
connect and say nothing take none from those who are served. Had where the hard limit allows it."""


def check_memory(size_bytes: int, *, proc: Path = PROC, cgroup_root: Path = CGROUP) -> None:
    """Raises StartupError if a slab of `size_bytes` in ordinary pages does not fit into memory.

    What fits is the least of what the machine and each control group above this process
    still have, less a reserve. The message names it, and what set it; make `host.size`
    smaller or the limit larger. ConfigError where it would not fit if nobody else had any: a
    daemon before this one, or its clients, may give theirs back in a moment. Memory may go
    to others between this check and the slab.
    """
    rooms = list(_rooms(proc, cgroup_root))
    available_bytes, _, what = min(rooms)
    if size_bytes <= available_bytes - _reserve(available_bytes):
        return
    most_bytes = min(most for _, most, _ in rooms)
    kind = StartupError if size_bytes <= most_bytes - _reserve(most_bytes) else ConfigError
    # The numbers are rounded so that they add up as they are printed.
    available, reserve = max(available_bytes, 0) // MIB, -(-_reserve(available_bytes) // MIB)
    problem = f"host.size = {format_size(size_bytes)} does not fit"
    if available > reserve:
        raise kind(
            f"{problem}: {available}MiB are available ({what}), of which {reserve}MiB stay free for the daemon and "
            f"its clients; allowed: at most {available - reserve}MiB now"
        )
    wanted_bytes = max(size_bytes + MEMORY_RESERVE_BYTES, -(-size_bytes * 100 // (100 - MEMORY_RESERVE_PERCENT)))
    raise kind(
        f"{problem}, and nothing smaller would: {available}MiB are available ({what}), and {reserve}MiB must stay free "
        f"for the daemon and its clients; {-(-(wanted_bytes - available_bytes) // MIB)}MiB more are needed: end what "
        "has them, or raise what limits them"
    )


def _reserve(available_bytes: int) -> int:
    return max(MEMORY_RESERVE_BYTES, available_bytes * MEMORY_RESERVE_PERCENT // 100)


def check_huge_pages(size_bytes: int, *, proc: Path = PROC) -> None:
    """Raises StartupError if there are not enough free huge pages of the default size for the slab.

    ConfigError where there would not be if all were free. Huge pages are set aside by the
    administrator and are no part of available memory, so a slab in huge pages is checked here
    instead of by `check_memory`.
    """
    page_bytes = huge_page_bytes(proc)
    if page_bytes == 0:
        raise ConfigError('host.huge_pages: this kernel has no huge pages; set host.huge_pages = "off"')
    needed = -(-size_bytes // page_bytes)
    free = huge_pages_free(proc)
    if needed <= free:
        return
    total = _meminfo(proc).get("HugePages_Total", 0)
    smaller = f"make host.size at most {free * page_bytes // MIB}MiB, " if free else ""
    raise (StartupError if needed <= total else ConfigError)(
        f"host.huge_pages: host.size = {format_size(size_bytes)} needs {needed} huge pages of "
        f"{format_size(page_bytes)} and {free or 'none'} are free: set them aside (sysctl "
        f'vm.nr_hugepages={total + needed - free}), {smaller}or set host.huge_pages = "off"'
    )


def huge_pages_free(proc: Path = PROC) -> int:
    """Huge pages of the default size that are free and promised to nobody."""
    meminfo = _meminfo(proc)
    return max(meminfo.get("HugePages_Free", 0) - meminfo.get("HugePages_Rsvd", 0), 0)


def huge_page_bytes(proc: Path = PROC) -> int:
    """The default size of a huge page in bytes, which is what memfd_create gives; 0 where there are none."""
    return _meminfo(proc).get("Hugepagesize", 0)


def check_descriptors(segments: int) -> None:
    """Raises StartupError if the process cannot open a descriptor for each segment and some to spare.

    Raises the soft limit to the hard one where that is what all clients would take: the
    daemon uses no select(), for which the low soft limit exists.
    """
    needed = segments + DESCRIPTORS_SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed + DESCRIPTORS_CLIENTS:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise StartupError(
            f"{needed} file descriptors are needed ({segments} segments of the slab and {DESCRIPTORS_SPARE} to spare) "
            f"and the limit is {hard}: raise it (LimitNOFILE= in the unit, ulimit -Hn in a shell)"
        )
    # An infinite hard limit cannot be the soft one: the kernel bounds that by fs.nr_open.
    target = needed + DESCRIPTORS_CLIENTS if hard == resource.RLIM_INFINITY else hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (ValueError, OSError) as error:
        raise StartupError(f"cannot raise the limit of file descriptors from {soft} to {target}: {error}") from error


def _meminfo(proc: Path) -> dict[str, int]:
    """/proc/meminfo, sizes in bytes and counts as they are."""
    found = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if number.isdecimal():
            found[name] = int(number) << (10 if unit == "kB" else 0)
    return found


def _rooms(proc: Path, cgroup_root: Path) -> Iterator[tuple[int, int, str]]:
    """(bytes still to be had, bytes there are, who says so) of the machine and of every control group with a limit."""
    meminfo = _meminfo(proc)
    yield meminfo["MemAvailable"], meminfo["MemTotal"], "MemAvailable of the machine"
    try:
        groups = (proc / "self" / "cgroup").read_text().splitlines()
    except FileNotFoundError:
        return  # a kernel without control groups
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            # The unified hierarchy, alone or beside the old ones.
            for root in (cgroup_root, cgroup_root / "unified"):
                for path in _upwards(root, group):
                    yield from _room(path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for path in _upwards(cgroup_root / "memory", group):
                yield from _room(path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _upwards(root: Path, group: str) -> Iterator[Path]:
    """The group's directory and all above it up to the mounted root.

    In a container the root may be the group itself while /proc still tells the path outside
    (or one with `..`): directories that are not there have no files, and the root is
    always looked at.
    """
    parts = PurePosixPath(group).parts[1:]
    if ".." in parts:
        parts = ()
    for depth in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:depth])


def _room(path: Path, limit_name: str, used_name: str, cache_name: str) -> Iterator[tuple[int, int, str]]:
    try:
        limit = (path / limit_name).read_text().strip()
        used = int((path / used_name).read_text())
    except (FileNotFoundError, PermissionError):
        return  # not there: the root group has no limit, and a container does not see all
    if limit == "max":
        return
    # File cache that nobody used lately is charged to the group and given up on demand.
    yield int(limit) - used + _cache_bytes(path, cache_name), int(limit), f"limit of {path / limit_name}"


def _cache_bytes(path: Path, name: str) -> int:
    try:
        lines = (path / "memory.stat").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def keep_heap_compact() -> None:
    """Has glibc give columns and dicts mappings of their own, which go back when they have grown out of them.

    By itself it raises that threshold with each large block freed, and the holes that
    growing tables leave in the heap cost 20 % of the memory a block needs.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
