"""Whether a process runs, and whether nothing of it runs on a device: what is believed, and what is not."""

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.gpu.processes import gone, lives
from kvstore.gpu.quiet import CannotTellError, NvmlLibrary, still_there
from kvstored_cuda.devices.handles import start_ticks
from kvstored_cuda.devices.host_device import HostDevice
from tests.conftest import eventually

GONE = 4_194_305
"""Above the largest number that a process can have on Linux (PID_MAX_LIMIT)."""


@pytest.fixture
def child() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait(60)
    assert child.stdin is not None
    child.stdin.close()


# -- processes


def test_a_process_lives_until_it_is_killed_and_a_zombie_does_not(child: "subprocess.Popen[bytes]") -> None:
    born = start_ticks(child.pid)
    assert born is not None
    assert lives(child.pid, born)
    assert not gone(child.pid, born)
    assert not gone(child.pid, 0)
    child.kill()
    eventually(lambda: not lives(child.pid, born))
    eventually(lambda: gone(child.pid, born))
    assert start_ticks(child.pid) == born, "it is not reaped yet, and its number is its own"
    end(child)
    assert not lives(child.pid, born)


def test_another_process_of_the_same_number_is_another_one(child: "subprocess.Popen[bytes]") -> None:
    born = start_ticks(child.pid)
    assert born is not None
    assert not lives(child.pid, born + 1)
    assert gone(child.pid, born + 1)
    end(child)
    assert gone(child.pid, born)


THREADS = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_first_thread_has_ended_says_nothing_that_counts_and_is_not_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    born = start_ticks(child.pid)
    assert born is not None
    eventually(lambda: not lives(child.pid, born))
    assert not gone(child.pid, born)
    child.stdout.close()
    end(child)
    assert gone(child.pid, born)


LARGE = "import mmap, sys; m = mmap.mmap(-1, 256 << 20); m.write(bytes(256 << 20)); print(flush=True); sys.stdin.read()"
"""A process whose memory takes some 100 ms to be given back."""


def test_a_process_that_is_being_killed_is_gone_before_its_pidfd_says_so() -> None:
    """Its contexts on devices end in between, and what its events say then is not defined."""

    def seen_exiting() -> bool:
        with subprocess.Popen([sys.executable, "-c", LARGE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            born, pidfd = start_ticks(child.pid), os.pidfd_open(child.pid)
            assert born is not None
            try:
                child.kill()
                eventually(lambda: not lives(child.pid, born))
                return not gone(child.pid, born) and not select.select([pidfd], [], [], 0)[0]
            finally:
                os.close(pidfd)

    assert any(seen_exiting() for _ in range(10)), "its end is never seen before that of its pidfd"


# -- what the driver says


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NVML's stand-in, compiled."""
    built = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    compiler = shutil.which("gcc") or shutil.which("cc") or "gcc"
    source = Path(__file__).with_name("standin_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", built, source], check=True, timeout=60)
    return built


@pytest.fixture
def says(library: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], NvmlLibrary]:
    """`says("1,2")`: an NVML that names these processes."""

    def make(text: str) -> NvmlLibrary:
        monkeypatch.setenv("STANDIN_NVML", text)
        return NvmlLibrary(str(library))

    return make


UUID = "GPU-00000000-1111-2222-3333-444444444444"


def test_nvml_names_the_processes_of_a_device(says: Callable[[str], NvmlLibrary]) -> None:
    assert says("7,42,4000000000")(UUID) == {7, 42, 4000000000}
    assert says("")(UUID) == set()
    assert len(says(",".join(map(str, range(1, 4097))))(UUID)) == 4096


@pytest.mark.parametrize(
    ("text", "uuid", "why"),
    [
        ("error 4", UUID, "Processes_v3 answered 4"),
        ("1", "MIG-none", "ByUUID answered 6"),
        (",".join(map(str, range(1, 4098))), UUID, "answered 7"),
    ],
)
def test_what_nvml_cannot_say_is_an_error(says: Callable[[str], NvmlLibrary], text: str, uuid: str, why: str) -> None:
    with pytest.raises(CannotTellError, match=why):
        says(text)(uuid)


def test_without_nvml_it_cannot_be_told(tmp_path: Path) -> None:
    with pytest.raises(CannotTellError, match="there is no NVML"):
        NvmlLibrary(str(tmp_path / "none.so"))(UUID)


class Named:
    """A device that is no HostDevice, by its name."""

    uuid = UUID


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ("{me}", ""),
        ("{me},{gone}", "has a context there"),
    ],
)
def test_a_dead_process_is_quiet_when_a_driver_that_knows_us_does_not_name_it(
    says: Callable[[str], NvmlLibrary], there: str, why: str
) -> None:
    nvml = says(there.format(me=os.getpid(), gone=GONE))
    found = still_there(Named(), GONE, 1, nvml)  # type: ignore[arg-type]
    assert (why in found) if why else found == ""


@pytest.mark.parametrize(
    ("there", "why"),
    [(str(GONE), "does not name this daemon"), ("", "does not name this daemon"), ("error 3", "answered 3")],
)
def test_a_driver_that_does_not_know_us_cannot_tell_of_others(
    says: Callable[[str], NvmlLibrary], there: str, why: str
) -> None:
    with pytest.raises(CannotTellError, match=why):
        still_there(Named(), GONE, 1, says(there))  # type: ignore[arg-type]


def test_a_process_that_runs_is_not_quiet_whatever_the_driver_says(
    says: Callable[[str], NvmlLibrary], child: "subprocess.Popen[bytes]"
) -> None:
    born = start_ticks(child.pid)
    assert born is not None
    assert "has not ended" in still_there(Named(), child.pid, born, says(str(os.getpid())))  # type: ignore[arg-type]
    end(child)


def test_on_a_host_device_a_process_is_quiet_when_it_is_gone(child: "subprocess.Popen[bytes]") -> None:
    device = HostDevice("HOST-1", 1 << 20)
    born = start_ticks(child.pid)
    assert born is not None
    assert "has not ended" in still_there(device, child.pid, born)
    assert "has not ended" in still_there(device, child.pid, 0), "whoever has that number may be it"
    end(child)
    assert still_there(device, child.pid, born) == ""
    assert still_there(device, child.pid, 0) == ""
    device.close()
