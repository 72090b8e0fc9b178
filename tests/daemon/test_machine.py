"""What fits into a machine, on trees of files made here and on the machine the tests run on."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, StartupError
from kvstore.machine import (
    DESCRIPTORS_CLIENTS,
    DESCRIPTORS_SPARE,
    MEMORY_RESERVE_BYTES,
    MEMORY_RESERVE_PERCENT,
    check_descriptors,
    check_huge_pages,
    check_memory,
    huge_page_bytes,
    huge_pages_free,
)

MIB = 1 << 20
GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712


class Machine:
    """A fake /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path, available_bytes: int = 64 * GIB, total_bytes: int = 128 * GIB) -> None:
        self.proc = root / "proc"
        self.cgroup_root = root / "cgroup"
        self.write(
            self.proc / "meminfo", f"MemTotal: {total_bytes >> 10} kB\nMemAvailable: {available_bytes >> 10} kB\n"
        )
        self.groups("0::/")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def groups(self, *lines: str) -> None:
        self.write(self.proc / "self" / "cgroup", "\n".join(lines) + "\n")

    def v2(self, group: str, limit: str, used_bytes: int, cache_bytes: int = 0) -> None:
        path = self.cgroup_root / group
        self.write(path / "memory.max", f"{limit}\n")
        self.write(path / "memory.current", f"{used_bytes}\n")
        self.write(path / "memory.stat", f"anon 1\ninactive_file {cache_bytes}\n")

    def v1(self, group: str, limit_bytes: int, used_bytes: int) -> None:
        path = self.cgroup_root / "memory" / group
        self.write(path / "memory.limit_in_bytes", f"{limit_bytes}\n")
        self.write(path / "memory.usage_in_bytes", f"{used_bytes}\n")

    def fits(self, size_bytes: int) -> bool:
        try:
            check_memory(size_bytes, proc=self.proc, cgroup_root=self.cgroup_root)
        except StartupError:
            return False
        return True

    def refusal(self, size_bytes: int) -> str:
        with pytest.raises(StartupError) as caught:
            check_memory(size_bytes, proc=self.proc, cgroup_root=self.cgroup_root)
        self.refused_as = type(caught.value)
        return str(caught.value)

    def room_is(self, available_bytes: int) -> bool:
        """Whether exactly this much, less the reserve, may be had."""
        room = available_bytes - max(MEMORY_RESERVE_BYTES, available_bytes * MEMORY_RESERVE_PERCENT // 100)
        return self.fits(room) and not self.fits(room + 4096)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_what_is_available_less_a_reserve_fits(tmp_path: Path) -> None:
    assert Machine(tmp_path / "a", 64 * GIB).room_is(64 * GIB)
    assert Machine(tmp_path / "b", 1 * GIB).room_is(1 * GIB)


def test_the_refusal_names_the_setting_what_was_asked_and_what_there_is(tmp_path: Path) -> None:
    text = Machine(tmp_path, 8 * GIB).refusal(16 * GIB)
    for part in ("host.size = 16GiB", "8192MiB are available", "MemAvailable", "410MiB stay free", "at most 7782MiB"):
        assert part in text


@given(st.integers(0, 64 * GIB), st.integers(MIB, 128 * GIB))
def test_the_numbers_of_a_refusal_add_up_and_what_it_allows_fits(available: int, size_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        machine = Machine(Path(directory), available)
        if machine.fits(size_bytes):
            return
        text = machine.refusal(size_bytes)
        allowed = re.search(r"at most (\d+)MiB", text)
        there, kept, *needed = map(int, re.findall(r"(\d+)MiB (?:are available|stay free|must stay|more)", text))
        if allowed is None:
            assert not machine.fits(MIB)
            assert Machine(Path(directory) / "more", available + needed[0] * MIB).fits(size_bytes)
        else:
            assert there - kept == int(allowed[1]) > 0
            assert machine.fits(int(allowed[1]) * MIB)


def test_a_machine_with_less_than_the_reserve_has_room_for_nothing_and_says_what_is_needed(tmp_path: Path) -> None:
    text = Machine(tmp_path, 100 * MIB).refusal(1 * MIB)
    for part in ("nothing smaller would", "100MiB are available", "256MiB must stay free", "157MiB more are needed"):
        assert part in text
    assert "at most" not in text


def test_what_would_fit_if_others_ended_is_no_mistake_in_the_settings(tmp_path: Path) -> None:
    """A killed daemon's memory stays until its clients let go of it; then the next start succeeds."""
    machine = Machine(tmp_path, 8 * GIB, 64 * GIB)
    machine.refusal(16 * GIB)
    assert machine.refused_as is StartupError
    machine.refusal(64 * GIB)
    assert machine.refused_as is ConfigError
    machine.groups("0::/kube")
    machine.v2("kube", str(12 * GIB), 6 * GIB)
    machine.refusal(16 * GIB)
    assert machine.refused_as is ConfigError, "whatever ends, the group's limit is smaller"
    machine.refusal(10 * GIB)
    assert machine.refused_as is StartupError


def test_the_limit_of_the_own_group_counts(machine: Machine) -> None:
    machine.groups("0::/kube/pod")
    machine.v2("kube/pod", str(8 * GIB), 2 * GIB)
    assert machine.room_is(6 * GIB)
    assert f"limit of {machine.cgroup_root}/kube/pod/memory.max" in machine.refusal(16 * GIB)


@pytest.mark.parametrize("tight", ["", "kube", "kube/pod", "kube/pod/c"])
def test_the_tightest_group_on_the_way_up_counts(tight: str, machine: Machine) -> None:
    machine.groups("0::/kube/pod/c")
    for group in ("", "kube", "kube/pod", "kube/pod/c"):
        machine.v2(group, str(4 * GIB if group == tight else 16 * GIB), 1 * GIB)
    machine.v2("other", str(1 * MIB), 0)
    assert machine.room_is(3 * GIB)


def test_a_group_without_a_limit_does_not_count(machine: Machine) -> None:
    machine.groups("0::/kube")
    machine.v2("kube", "max", 60 * GIB)
    assert machine.room_is(64 * GIB)


def test_a_machine_with_less_than_the_groups_limit_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2 * GIB)
    machine.groups("0::/kube")
    machine.v2("kube", str(16 * GIB), 0)
    assert machine.room_is(2 * GIB)


def test_file_cache_that_goes_on_demand_is_not_in_use(machine: Machine) -> None:
    machine.groups("0::/kube")
    machine.v2("kube", str(8 * GIB), 7 * GIB, cache_bytes=5 * GIB)
    assert machine.room_is(6 * GIB)


def test_a_group_above_its_limit_has_room_for_nothing(machine: Machine) -> None:
    machine.groups("0::/kube")
    machine.v2("kube", str(1 * GIB), 2 * GIB)
    assert not machine.fits(1 * MIB)


@pytest.mark.parametrize("line", ["4:memory:/docker/1", "4:cpu,memory:/docker/1"])
def test_the_limits_of_version_1_count(line: str, machine: Machine) -> None:
    machine.groups("9:name=systemd:/", line, "0::/")
    machine.v1("docker/1", 3 * GIB, 1 * GIB)
    machine.v1("docker", V1_UNLIMITED, 1 * GIB)
    machine.v1("", V1_UNLIMITED, 1 * GIB)
    assert machine.room_is(2 * GIB)
    assert "memory.limit_in_bytes" in machine.refusal(16 * GIB)


@pytest.mark.parametrize("line", ["4:memory:/docker/1", "4:memory:/../../elsewhere"])
def test_in_a_container_the_root_is_the_own_group_whatever_the_path_says(line: str, machine: Machine) -> None:
    machine.groups(line)
    machine.v1("", 3 * GIB, 1 * GIB)
    assert machine.room_is(2 * GIB)


def test_the_unified_hierarchy_beside_the_old_ones_counts(machine: Machine) -> None:
    machine.groups("4:memory:/", "0::/kube")
    machine.v2("unified/kube", str(2 * GIB), 0)
    assert machine.room_is(2 * GIB)


def test_a_kernel_without_groups_has_only_its_memory(machine: Machine) -> None:
    (machine.proc / "self" / "cgroup").unlink()
    assert machine.room_is(64 * GIB)


def test_this_machine_has_room_for_a_mebibyte_and_not_for_an_exbibyte() -> None:
    check_memory(1 * MIB)
    with pytest.raises(ConfigError, match=r"host\.size = 1048576TiB does not fit"):
        check_memory(1 << 60)


# -- huge pages


def with_huge_pages(machine: Machine, total: int, free: int, reserved: int, page_kb: int = 2048) -> Path:
    machine.write(
        machine.proc / "meminfo",
        f"MemAvailable: 1 kB\nHugePages_Total: {total}\nHugePages_Free: {free}\nHugePages_Rsvd: {reserved}\n"
        f"Hugepagesize: {page_kb} kB\n",
    )
    return machine.proc


def test_pages_promised_to_others_are_not_free(machine: Machine) -> None:
    assert huge_pages_free(with_huge_pages(machine, 1000, 800, 300)) == 500


def test_a_slab_of_just_the_free_huge_pages_fits(machine: Machine) -> None:
    proc = with_huge_pages(machine, 512, 512, 0)
    check_huge_pages(1 * GIB, proc=proc)
    with pytest.raises(ConfigError):
        check_huge_pages(1 * GIB + 4096, proc=proc)


def test_huge_pages_that_others_have_now_are_no_mistake_in_the_settings(machine: Machine) -> None:
    with pytest.raises(StartupError) as caught:
        check_huge_pages(1 * GIB, proc=with_huge_pages(machine, 512, 0, 0))
    assert type(caught.value) is StartupError
    assert "none are free" in str(caught.value)
    assert "at most" not in str(caught.value), "a size of nothing is no advice"


def test_too_few_huge_pages_are_refused_with_the_number_to_set(machine: Machine) -> None:
    proc = with_huge_pages(machine, 100, 60, 10)
    with pytest.raises(ConfigError) as caught:
        check_huge_pages(1 * GIB, proc=proc)
    text = str(caught.value)
    # 512 needed, 50 to be had: the 50 in use or promised stay.
    for part in ("host.size = 1GiB", "512 huge pages of 2MiB", "50 are free", "vm.nr_hugepages=562", "at most 100MiB"):
        assert part in text


def test_the_default_page_size_counts(machine: Machine) -> None:
    proc = with_huge_pages(machine, 2, 2, 0, page_kb=1 << 20)
    assert huge_page_bytes(proc) == GIB
    check_huge_pages(2 * GIB, proc=proc)


def test_a_kernel_without_huge_pages_says_so(machine: Machine) -> None:
    assert huge_pages_free(machine.proc) == 0
    with pytest.raises(ConfigError, match="has no huge pages"):
        check_huge_pages(1 * GIB, proc=machine.proc)


def test_this_machine_has_a_number_of_huge_pages() -> None:
    assert huge_pages_free() >= 0
    with pytest.raises(ConfigError, match="huge_pages"):
        check_huge_pages(1 << 60)


# -- descriptors

LIMITED = """
import resource, sys
from kvstore.errors import StartupError
from kvstore.machine import check_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
try:
    check_descriptors(int(sys.argv[3]))
except StartupError as error:
    print(error)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limited(soft: int, hard: int, segments: int) -> list[str]:
    """What a process with these limits printed: the refusal, if any, and its limits afterwards."""
    command = [sys.executable, "-c", LIMITED, str(soft), str(hard), str(segments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_a_soft_limit_that_is_enough_stays() -> None:
    """For the segments and for as many clients as are accepted."""
    enough = 64 + DESCRIPTORS_SPARE + DESCRIPTORS_CLIENTS
    assert limited(enough, enough + 1000, 64) == [f"{enough} {enough + 1000}"]
    assert limited(enough - 1, enough + 1000, 64) == [f"{enough + 1000} {enough + 1000}"]


def test_a_soft_limit_that_is_too_low_is_raised_to_the_hard_one() -> None:
    assert limited(256, 4096, 64) == ["4096 4096"]
    assert limited(256, DESCRIPTORS_SPARE + 64, 64) == [f"{DESCRIPTORS_SPARE + 64} {DESCRIPTORS_SPARE + 64}"]


def test_a_hard_limit_that_is_too_low_is_refused_with_the_number_needed() -> None:
    refusal, limits = limited(256, 1024, 64)
    assert "1088 file descriptors are needed" in refusal
    assert "the limit is 1024" in refusal
    assert "LimitNOFILE" in refusal
    assert limits == "256 1024"


def test_no_segments_are_checked_too() -> None:
    check_descriptors(0)
