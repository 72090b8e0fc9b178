"""What a client can and cannot do with the memory it is given: seals, modes, read-only descriptors, punched pages."""

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.tiers import index, slab
from kvstore.tiers.slab import Slab, SlabSegment, open_read_only, sealed_memfd
from kvstored.mapping import Mapping

SIZE = 1 << 20
NOBODY = 65534
CHECKOUT = Path(__file__).resolve().parents[2]
HUGE_PAGE = 2 << 20

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")


@pytest.fixture
def memory() -> Iterator[Slab]:
    """A slab with one segment, number 1."""
    made = Slab(huge_pages=False)
    made.add(made.make(1, SIZE))
    yield made
    made.close()


BECOME_NOBODY = f"""
import ctypes, fcntl, mmap, os, resource, sys
from kvstore.tiers.slab import Slab
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: or /proc/self/fd would be root's, and refuse for that
"""


def as_nobody(program: str, *descriptors: int) -> list[str]:
    """Runs a program as another user (who may lock no memory) with these descriptors; the lines that it prints.

    It changes its user itself: the interpreter may be where only root may look.
    """
    done = subprocess.run(
        [sys.executable, "-c", BECOME_NOBODY + program, *map(str, descriptors)],
        cwd=CHECKOUT,
        pass_fds=descriptors,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def mprotect_writable(address: int, size_bytes: int) -> int:
    """Tries to make an existing mapping writable; 0 or the error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    done: int = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), mmap.PROT_READ | mmap.PROT_WRITE)
    return ctypes.get_errno() if done else 0


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nobody_who_has_the_descriptor_can_shrink_grow_or_seal_it(memory: Slab) -> None:
    descriptor = memory.descriptor(1, read_only=False)
    for size in (0, SIZE - 4096, SIZE + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with pytest.raises(PermissionError):
        os.posix_fallocate(descriptor, SIZE, 4096)
    assert os.fstat(descriptor).st_size == SIZE


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_memory_belongs_to_its_owner_alone_whatever_the_umask(umask: int) -> None:
    before = os.umask(umask)
    try:
        descriptor = sealed_memfd("kvstored-test", SIZE)
    finally:
        os.umask(before)
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    os.close(descriptor)


def test_memory_does_not_pass_to_programs_that_are_started(memory: Slab) -> None:
    assert not os.get_inheritable(memory.descriptor(1, read_only=False))
    assert not os.get_inheritable(memory.descriptor(1, read_only=True))


def test_a_read_only_descriptor_gives_no_way_to_write(memory: Slab) -> None:
    writable, descriptor = memory.descriptor(1, read_only=False), memory.descriptor(1, read_only=True)
    os.pwrite(writable, b"block", 0)
    with pytest.raises(PermissionError):
        Mapping(descriptor, SIZE, writable=True)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, SIZE, mmap.MAP_SHARED, mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(descriptor, b"other", 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        slab.punch_hole(descriptor, SIZE)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(descriptor, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    mapping = Mapping(descriptor, SIZE, writable=False)
    assert mprotect_writable(mapping.address, SIZE)
    assert not mapping.bytes.flags.writeable
    assert bytes(mapping.bytes[:5]) == b"block"


def test_one_read_only_descriptor_serves_all_sessions(memory: Slab) -> None:
    assert memory.descriptor(1, read_only=True) == memory.descriptor(1, read_only=True)


@needs_root
def test_another_user_cannot_open_read_only_memory_again(memory: Slab) -> None:
    other = sealed_memfd("kvstored-test", SIZE)
    os.fchmod(other, 0o666)
    said = as_nobody(
        """
given, control = map(int, sys.argv[1:])
for fd in given, control:
    for how in (os.O_RDWR, os.O_WRONLY, os.O_RDONLY):
        try:
            os.open(f"/proc/self/fd/{fd}", how)
            print("opened")
        except PermissionError:
            print("refused")
try:
    os.fchmod(given, 0o666)
    print("changed")
except PermissionError:
    print("refused")
print(mmap.mmap(given, 5, mmap.MAP_SHARED, mmap.PROT_READ)[:5].hex())
""",
        memory.descriptor(1, read_only=True),
        other,
    )
    os.close(other)
    assert said == ["refused"] * 3 + ["opened"] * 3 + ["refused", bytes(5).hex()]


def test_an_index_cannot_be_written_by_who_has_its_descriptor() -> None:
    """F_SEAL_FUTURE_WRITE: neither through the descriptor itself nor by opening it again through /proc."""
    made = index.TenantIndex("kvstored-test", 1, 1024)
    try:
        again = os.open(f"/proc/self/fd/{made.descriptor}", os.O_RDWR)
        for descriptor in (made.descriptor, again):
            with pytest.raises(PermissionError):
                Mapping(descriptor, made.size_bytes, writable=True)
            with pytest.raises(PermissionError):
                os.pwrite(descriptor, bytes(8), 0)
            with pytest.raises(PermissionError):
                slab.punch_hole(descriptor, made.size_bytes)
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 0)
            mapping = Mapping(descriptor, made.size_bytes, writable=False)
            assert mprotect_writable(mapping.address, made.size_bytes)
        os.close(again)
        made.publish(b"k" * 32, (1, 2, 3, 4, 5, 6))  # the daemon's own mapping is from before
        assert made.figures[2] == 1
    finally:
        made.close()


@needs_root
def test_another_user_with_an_index_descriptor_can_only_read() -> None:
    made = index.TenantIndex("kvstored-test", 1, 1024)
    try:
        said = as_nobody(
            """
fd = int(sys.argv[1])
for how in (mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_WRITE):
    try:
        mmap.mmap(fd, 4096, mmap.MAP_SHARED, how)
        print("mapped")
    except PermissionError:
        print("refused")
print(mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ)[:8].decode())
""",
            made.descriptor,
        )
    finally:
        made.close()
    assert said == ["refused", "refused", "KVSTIDX1"]


def test_a_dropped_segment_gives_its_pages_back_and_shows_zeros_to_who_still_maps_it(memory: Slab) -> None:
    held = os.dup(memory.descriptor(1, read_only=False))
    client = Mapping(held, SIZE, writable=True)
    client.bytes[:] = 7
    assert os.fstat(held).st_blocks * 512 == SIZE
    memory.drop(1)
    assert os.fstat(held).st_blocks == 0
    assert not client.bytes.any()
    os.close(held)


def test_bytes_that_a_worker_still_copies_survive_the_end_of_their_segment(memory: Slab) -> None:
    """A view of the slab keeps it mapped: a segment dropped under a worker must not kill the daemon."""
    view = memory.bytes_at(1, 4096, 4096)
    view[:] = b"x" * 4096
    memory.drop(1)
    assert bytes(view) == bytes(4096)
    view[:] = b"y" * 4096


def test_segments_are_prefaulted_in_parallel_and_say_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    together = threading.Barrier(4)
    real_make = Slab.make

    def make(self: Slab, segment: int, size_bytes: int) -> SlabSegment:
        together.wait(30)  # breaks unless four are being made at the same time
        return real_make(self, segment, size_bytes)

    monkeypatch.setattr(Slab, "make", make)
    memory = Slab(huge_pages=False)
    said: list[tuple[int, int]] = []
    memory.make_all({number: SIZE * (1 + number % 2) for number in range(8)}, lambda *how_far: said.append(how_far))
    assert [total for _, total in said] == [12 * SIZE] * 8
    assert [done for done, _ in said] == sorted({done for done, _ in said})
    assert said[-1][0] == 12 * SIZE
    for number in range(8):
        assert os.fstat(memory.descriptor(number, read_only=False)).st_blocks * 512 == SIZE * (1 + number % 2)
    memory.close()


def test_a_segment_that_does_not_fit_is_an_error_and_leaves_nothing_behind() -> None:
    before = open_descriptors()
    with pytest.raises(OSError, match="Cannot allocate memory"):
        Slab(huge_pages=False).make(1, 1 << 60)
    assert open_descriptors() == before


@needs_root
def test_memory_that_cannot_be_locked_is_usable_and_says_why() -> None:
    said = as_nobody(
        """
slab = Slab(huge_pages=False)
slab.add(slab.make(1, 1 << 20))
slab.bytes_at(1, 0, 5)[:] = b"bytes"
print(slab.lock_error)
"""
    )
    assert len(said) == 1
    assert "RLIMIT_MEMLOCK" in said[0]


def test_memory_that_is_locked_says_nothing(memory: Slab) -> None:
    if memory.lock_error:
        pytest.skip(f"this process may not lock a MiB: {memory.lock_error}")
    with open("/proc/self/smaps") as smaps:
        parts = smaps.read().split("/memfd:kvstored-segment-1 ")
    assert any("lo" in part.split("VmFlags:")[1].split("\n")[0].split() for part in parts[1:])


def huge_pages_now(kind: str) -> int:
    """How many this machine has, "Total" or "Free"."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"HugePages_{kind}:"))


@pytest.fixture
def huge_pages() -> Iterator[int]:
    """Reserves four huge pages for a test, if this machine lets us."""
    setting = Path("/proc/sys/vm/nr_hugepages")
    try:
        before = setting.read_text()
        setting.write_text(f"{huge_pages_now('Total') + 4}\n")
    except OSError as e:
        pytest.skip(f"huge pages cannot be reserved here: {e}")
    try:
        if huge_pages_now("Free") < 4:
            pytest.skip("this machine has no four huge pages in one piece to spare")
        yield 4
    finally:
        setting.write_text(before)


def test_huge_pages_carry_a_segment_with_the_same_seals(huge_pages: int) -> None:
    memory = Slab(huge_pages=True)
    try:
        memory.add(memory.make(1, huge_pages * HUGE_PAGE))
    except OSError:
        if huge_pages_now("Free") >= huge_pages:
            raise
        pytest.skip("somebody else on this machine took the huge pages")
    descriptor = memory.descriptor(1, read_only=False)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, HUGE_PAGE)
    assert os.fstat(descriptor).st_blksize == HUGE_PAGE
    client = Mapping(descriptor, huge_pages * HUGE_PAGE, writable=True)
    client.bytes[:] = 9
    client.populate(write=False)
    reader = Mapping(memory.descriptor(1, read_only=True), huge_pages * HUGE_PAGE, writable=False)
    assert int(np.min(reader.bytes)) == 9
    memory.drop(1)
    assert not client.bytes[::4096].any()


def test_huge_pages_that_are_not_there_are_an_error() -> None:
    if huge_pages_now("Free"):
        pytest.skip("this machine has huge pages free")
    with pytest.raises(OSError, match="Cannot allocate memory"):
        Slab(huge_pages=True).make(1, HUGE_PAGE)


def test_the_same_memory_opened_for_reading_is_the_same_memory(memory: Slab) -> None:
    descriptor = open_read_only(memory.descriptor(1, read_only=False))
    memory.bytes_at(1, 100, 3)[:] = b"abc"
    assert os.pread(descriptor, 3, 100) == b"abc"
    os.close(descriptor)
