"""Mappings of shared memory: alive as long as anything uses them, gone afterwards, and never a forked child's."""

import ctypes
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers.slab import sealed_memfd
from kvstored.mapping import PIECE_BYTES, Mapping

CHECKOUT = Path(__file__).resolve().parents[2]
NAME = "kvstored-mapping-test"
SIZE = 1 << 20


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = sealed_memfd(NAME, SIZE)
    yield made
    os.close(made)


def mapped() -> int:
    """How often the test's memory is mapped in this process."""
    return Path("/proc/self/maps").read_text().count(f"/memfd:{NAME}")


def run(program: str) -> str:
    """Runs a program of its own; what it prints. Fails unless it ends well."""
    start = "import ctypes, gc, os, sys\nfrom kvstore.tiers.slab import sealed_memfd\n"
    start += "from kvstored.mapping import Mapping\n"
    done = subprocess.run(
        [sys.executable, "-c", start + program], cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout}{done.stderr}"
    assert done.stderr == ""
    return done.stdout


def resident_bytes(mapping: Mapping) -> int:
    """How much of a mapping has page tables in this process (Rss of /proc/self/smaps)."""
    rss, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            start, _, end = line.split(" ", 1)[0].partition("-")
            here = mapping.address <= int(start, 16) and int(end, 16) <= mapping.address + mapping.size_bytes
        elif here and line.startswith("Rss:"):
            rss += int(line.split()[1]) * 1024
    return rss


def test_memory_is_unmapped_when_the_mapping_goes(descriptor: int) -> None:
    mapping = Mapping(descriptor, SIZE, writable=True)
    assert mapped() == 1
    del mapping
    gc.collect()
    assert mapped() == 0


def test_the_descriptor_may_be_closed_at_once() -> None:
    made = sealed_memfd(NAME, SIZE)
    mapping = Mapping(made, SIZE, writable=True)
    os.close(made)
    mapping.bytes[:] = 3
    assert int(mapping.bytes.sum()) == 3 * SIZE


def test_whatever_is_made_from_a_view_keeps_the_memory_mapped(descriptor: int) -> None:
    mapping = Mapping(descriptor, SIZE, writable=True)
    mapping.bytes[4096:8192] = 5
    view = mapping.view(4096, 4096)
    array = np.frombuffer(view, np.uint64)
    part = array[10:20]
    other = mapping.view(0, 8)
    del mapping
    view.release()
    del view, array
    gc.collect()
    assert mapped() == 1
    assert (part == 0x0505050505050505).all()
    del part
    gc.collect()
    assert mapped() == 1, "another view is alive"
    del other
    gc.collect()
    assert mapped() == 0


def test_whatever_is_cut_from_the_whole_keeps_the_memory_mapped(descriptor: int) -> None:
    """A part of `bytes` outlived its mapping once, and reading it killed the process."""
    part = Mapping(descriptor, SIZE, writable=True).bytes[4096:8192].data
    gc.collect()
    assert mapped() == 1
    assert bytes(part) == bytes(4096)
    del part
    gc.collect()
    assert mapped() == 0


def test_a_view_has_an_exporter_of_its_own_that_dies_with_its_last_user(descriptor: int) -> None:
    mapping = Mapping(descriptor, SIZE, writable=True)
    exporters = [mapping.exporter(at, 4096) for at in (0, 4096)]
    gone = [weakref.ref(exporter) for exporter in exporters]
    arrays = [np.frombuffer(memoryview(exporter).cast("B"), np.uint8) for exporter in exporters]
    del exporters
    gc.collect()
    assert [ref() is None for ref in gone] == [False, False]
    del arrays[0]
    gc.collect()
    assert [ref() is None for ref in gone] == [True, False]


def test_views_see_the_bytes_of_their_place(descriptor: int) -> None:
    mapping = Mapping(descriptor, SIZE, writable=True)
    mapping.bytes[100:105] = np.frombuffer(b"hello", np.uint8)
    assert bytes(mapping.view(100, 5)) == b"hello"
    mapping.view(102, 1)[:] = b"L"
    assert os.pread(descriptor, 5, 100) == b"heLlo"


@pytest.mark.parametrize(("start", "size_bytes"), [(-1, 8), (0, 0), (0, SIZE + 1), (SIZE, 1), (SIZE - 8, 9)])
def test_a_view_beyond_the_mapping_is_refused(descriptor: int, start: int, size_bytes: int) -> None:
    with pytest.raises(ValueError, match="not within"):
        Mapping(descriptor, SIZE, writable=True).view(start, size_bytes)


def test_a_read_only_mapping_gives_read_only_bytes(descriptor: int) -> None:
    mapping = Mapping(descriptor, SIZE, writable=False)
    assert not mapping.bytes.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        mapping.bytes[0] = 1


def test_populate_makes_all_page_tables_in_pieces() -> None:
    size = PIECE_BYTES + (1 << 20)
    made = sealed_memfd(NAME, size)
    try:
        writer = Mapping(made, size, writable=True)
        assert os.fstat(made).st_blocks == 0
        writer.populate(write=True)
        assert os.fstat(made).st_blocks * 512 == size
        assert resident_bytes(writer) == size
        reader = Mapping(made, size, writable=False)
        assert resident_bytes(reader) == 0
        reader.populate(write=False)
        assert resident_bytes(reader) == size
    finally:
        os.close(made)


def test_what_cannot_be_mapped_says_how_much_it_was(descriptor: int) -> None:
    with pytest.raises(OSError, match=f"mapping {1 << 60} bytes"):
        Mapping(descriptor, 1 << 60, writable=True)


FORK = """
fd = sealed_memfd("kvstored-fork-test", 1 << 20)
mapping = Mapping(fd, 1 << 20, writable=True)
view = mapping.view(0, 4096)
mapping.bytes[:] = 1
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]

def mapped():
    return open("/proc/self/maps").read().count("/memfd:kvstored-fork-test")

print("before", mapped(), flush=True)
pid = os.fork()
if not pid:
    print("child", mapped())
    # The child's own memory, at the very place (MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE).
    at = libc.mmap(mapping.address, 1 << 20, 3, 0x100022, -1, 0)
    assert at == mapping.address, "the range was not free in the child"
    ctypes.memset(at, 7, 1 << 20)
    del mapping, view
    gc.collect()
    print("own memory", ctypes.string_at(at, 1 << 20) == b"\\7" * (1 << 20), flush=True)
    LEAVE
_, status = os.waitpid(pid, 0)
print("status", status)
print("parent", mapped(), bytes(view) == b"\\1" * 4096)
"""


@pytest.mark.parametrize("leave", ["os._exit(0)", "sys.exit(0)"])
def test_a_forked_child_has_no_part_in_the_mapping_and_does_not_unmap_what_is_its_own(leave: str) -> None:
    said = run(FORK.replace("LEAVE", leave)).splitlines()
    assert said == ["before 1", "child 0", "own memory True", "status 0", "parent 1 True"]


def test_memory_stays_mapped_until_the_very_end_of_the_process() -> None:
    """Arrays are read by exit handlers and by threads that outlive the interpreter's: only the kernel may unmap."""
    said = run(
        """
import atexit
atexit.register(lambda: print(bytes(view[:4])))  # runs after whatever the mapping itself had registered
mapping = Mapping(sealed_memfd("kvstored-exit-test", 1 << 20), 1 << 20, writable=True)
mapping.bytes[:4] = 65
view = mapping.view(0, 4096)
"""
    )
    assert said == "b'AAAA'\n"


def test_ctypes_arrays_take_weak_references() -> None:
    """What the lifetimes here are built on."""
    array = (ctypes.c_ubyte * 8)()
    ref = weakref.ref(array)
    del array
    gc.collect()
    assert ref() is None
