"""Where there is no GPU or no cupy, and which streams are understood. What needs a GPU is in test_kernels_gpu.py."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstored.v1.errors import FailedPrecondition, InvalidArgument
from kvstored_cuda import Copies, PagedLayout, TwinCopies
from kvstored_cuda.devices.discovery import devices
from kvstored_cuda.devices.errors import DeviceLost, NoDevice, OutOfDeviceMemory
from kvstored_cuda.launching import KernelCopies, failure, stream_address
from tests.cuda.device_peer import make_device
from tests.cuda.test_kernels_batches import small_world

CHECKOUT = Path(__file__).resolve().parents[2]
RUN_S = 60.0


def run(program: str) -> str:
    path = [str(CHECKOUT), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{program}"],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
        cwd=CHECKOUT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy_and_neither_daemon_nor_client() -> None:
    found = run(
        "import kvstored_cuda\n"
        "heavy = {'cupy', 'torch', 'cuda', 'kvstore', 'kvstore_client', 'hypothesis'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    assert found.split() == []


REFUSED = """
from kvstored_cuda import Copies, PagedLayout, TwinCopies
from kvstored_cuda.devices.discovery import devices
from kvstored_cuda.devices.errors import NoDevice
from kvstored_cuda import KernelCopies, PagedLayout, Part
part = Part(heads=1, head_bytes=64, page_stride=64, token_stride=64, head_stride=64)
layout = PagedLayout(element_bytes=2, num_pages=4, page_tokens=1, parts=(part,), bases=((4096,),))
try:
    KernelCopies(layout)
except NoDevice as e:
    print(e)
"""


def test_without_cupy_the_error_says_so() -> None:
    assert "need cupy, which cannot be imported" in run(f"sys.modules['cupy'] = None\n{REFUSED}")


def test_without_a_gpu_the_error_says_so() -> None:
    """On a machine that has one, one that is hidden."""
    found = run(f"import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''\n{REFUSED}")
    assert "a GPU" in found or "cannot be imported" in found or "counting devices" in found


def test_no_device_is_a_failed_precondition() -> None:
    """The code on the wire: the call was right, the machine has not what it needs."""
    if devices(environment={}).found:
        pytest.skip("a GPU is here")
    with pytest.raises(NoDevice) as refused:
        KernelCopies(small_world().layout)
    assert isinstance(refused.value, FailedPrecondition)
    assert refused.value.code == FailedPrecondition.code


def test_kernels_and_twin_are_called_alike() -> None:
    """For the types of whoever takes either: mypy reads this."""
    made: list[Callable[[PagedLayout], Copies]] = [KernelCopies, TwinCopies]
    layout = small_world().layout
    assert made[1](layout).gather([], [], slot_bytes=layout.slot_bytes, stream=None, multiprocessors=2) == 0


class Failed(RuntimeError):
    """As cupy's errors of CUDA are: a RuntimeError with a code."""

    def __init__(self, status: int) -> None:
        super().__init__("said by CUDA")
        self.status = status


def test_codes_of_cuda_become_the_errors_of_devices() -> None:
    assert isinstance(failure(Failed(700), "a launch"), DeviceLost)
    assert isinstance(failure(Failed(2), "a table"), OutOfDeviceMemory)
    assert "no library" in str(failure(RuntimeError("no library"), "a launch"))


class Protocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0x55


class OfTorch:
    cuda_stream = 0x77


class OfCupy:
    ptr = 0x88


def test_streams_of_torch_and_cupy_and_ours_are_understood() -> None:
    """By name, for neither can make a stream without a GPU; test_kernels_gpu.py has real ones."""
    assert stream_address(0) == 0
    assert stream_address(0x1234) == 0x1234
    assert stream_address(OfTorch()) == 0x77
    assert stream_address(OfCupy()) == 0x88
    assert stream_address(Protocol()) == 0x55
    device = make_device("host")
    try:
        stream = device.stream()
        assert stream_address(stream) == stream.pointer
        stream.close()
    finally:
        device.close()
    for wrong in (None, True, "0", 1.0, object()):
        with pytest.raises(InvalidArgument, match="is not a stream"):
            stream_address(wrong)
