"""paged.cu compiles for the devices that we name, with whichever compilers are here: the name of each test says
which, and those that are missing are skipped by name.

A GPU is not needed: NVRTC and nvcc are compilers. Warnings are errors where the compiler has a switch for it.
"""

import importlib
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstored_cuda.launching import OPTIONS, SOURCE
from kvstored_cuda.plans import LARGE_ENTRIES, SMALL_ENTRIES, WIDTHS, call_type, kernel_names
from tests.cuda.kernel_rig import COMPILE_S, build_shim

ARCHITECTURES = ("80", "90", "100")
"""A100; H100 and H200; B200."""

ELF = b"\x7fELF"


def is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of what it is part of
        return False


def nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def by_nvcc(architecture: str, folder: Path) -> bytes:
    found = nvcc()
    if found is None:
        pytest.skip("nvcc is not here: paged.cu was not compiled with it")
    out = folder / "paged.cubin"
    command = [found, f"-arch=sm_{architecture}", "-cubin", "-std=c++17", "-Werror=all-warnings", "-o", str(out)]
    done = subprocess.run([*command, str(SOURCE)], capture_output=True, text=True, timeout=COMPILE_S, check=False)
    assert done.returncode == 0, done.stderr
    return out.read_bytes()


def by_bindings(architecture: str, folder: Path) -> bytes:
    if not is_here("cuda.bindings.nvrtc"):
        pytest.skip("cuda-bindings and nvidia-cuda-nvrtc are not here: paged.cu was not compiled with that NVRTC")
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")

    error, program = nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"paged.cu", 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    options = [f"-arch=sm_{architecture}".encode(), *(option.encode() for option in OPTIONS)]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    assert not log.strip(b"\x00 \n"), f"warnings: {log.decode()}"
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = bytearray(size)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return bytes(cubin)


def by_cupy(architecture: str, folder: Path) -> bytes:
    """cupy's NVRTC with the options that cupy.RawModule adds; RawModule itself first asks the device what it is."""
    if not is_here("cupy"):
        pytest.skip("cupy is not here: paged.cu was not compiled with its NVRTC")
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(SOURCE.read_text(), "paged.cu", (), ())
    try:
        options = (*OPTIONS, f"-arch=sm_{architecture}", "--device-as-default-execution-space")
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as e:
        raise AssertionError(nvrtc.getProgramLog(program)) from e
    return bytes(nvrtc.getCUBIN(program))


Compiler = Callable[[str, Path], bytes]


@pytest.mark.parametrize("compile_with", [by_nvcc, by_bindings, by_cupy])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_compile(architecture: str, compile_with: Compiler, tmp_path: Path) -> None:
    cubin = compile_with(architecture, tmp_path)
    assert cubin.startswith(ELF)
    for name in kernel_names(LARGE_ENTRIES):
        assert name.encode() in cubin, f"{name} was not compiled"


def test_one_compiler_at_least_was_here() -> None:
    """So that CI cannot pass by skipping."""
    assert nvcc() or is_here("cuda.bindings.nvrtc") or is_here("cupy")


def test_a_machine_before_cuda_12_1_gets_arguments_of_4_kib() -> None:
    assert call_type(SMALL_ENTRIES).itemsize <= 4096
    assert call_type(LARGE_ENTRIES).itemsize <= 32764
    assert len(kernel_names(SMALL_ENTRIES)) == 2 * len(WIDTHS)
    assert len(kernel_names(LARGE_ENTRIES)) == 4 * len(WIDTHS)


def test_the_source_without_large_arguments_has_the_small_kernels_only(tmp_path: Path) -> None:
    """Which is what a compiler before 12.1 is given: it takes no more than 4 KiB."""
    symbols = build_shim(tmp_path, "-O1", "-DKVSTORED_SMALL_ARGUMENTS").read_bytes()
    small = set(kernel_names(SMALL_ENTRIES))
    assert all((name.encode() in symbols) == (name in small) for name in kernel_names(LARGE_ENTRIES))


def test_the_source_is_ascii() -> None:
    """cupy writes it to a file in the locale's encoding."""
    assert SOURCE.read_bytes().isascii()
