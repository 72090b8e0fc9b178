"""What is there is named, or one line says why nothing is; importing never fails and never starts a driver."""

import importlib.util
import subprocess
import sys

import pytest

from kvstored_cuda.devices.discovery import VARIABLE, device_of, devices
from kvstored_cuda.devices.errors import NoDevice
from kvstored_cuda.devices.host_device import HostDevice
from tests.cuda.device_peer import CHECKOUT

PROGRAM_S = 60.0


def said(program: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
        cwd=CHECKOUT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_devices_imports_neither_cupy_nor_torch_nor_the_driver() -> None:
    modules = "discovery, isolated, pagelock, staging, cuda_device, cuda_driver, cuda_descriptors"
    program = (
        f"import sys\nfrom kvstored_cuda.devices import {modules}\n"
        "heavy = {'cupy', 'cupy_backends', 'torch', 'cuda', 'kvstore', 'kvstore_client'}\n"
        "print(*sorted(heavy & set(sys.modules)), 'libcuda' in open('/proc/self/maps').read())"
    )
    assert said(program) == "False"


def test_without_cupy_it_says_so() -> None:
    program = (
        "import sys, importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'cupy' else find(name, package)\n"
        "from kvstored_cuda.devices.discovery import devices\n"
        "print(devices({}))"
    )
    assert "Devices(found=(), why='cupy is not installed" in said(program)


def test_a_cupy_that_cannot_be_imported_is_an_answer() -> None:
    program = (
        "import sys, types, importlib.machinery as m\n"
        "broken = types.ModuleType('cupy')\n"
        "broken.__spec__ = m.ModuleSpec('cupy', None); sys.modules['cupy'] = broken\n"
        "from kvstored_cuda.devices.discovery import _why_not_cupy\n"
        "print(_why_not_cupy())"
    )
    assert said(program).startswith("cupy cannot be imported: ")


def test_without_a_driver_cupy_is_not_even_imported() -> None:
    program = (
        "import sys\n"
        "from kvstored_cuda.devices import cuda_driver, discovery\n"
        "cuda_driver.Driver.__init__.__defaults__ = ('libnowhere.so.1',)\n"
        "print(discovery.devices({}).why, 'cupy' in sys.modules)"
    )
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    why = said(program)
    assert why.startswith("no driver: libnowhere.so.1")
    assert why.endswith(" False")


def test_what_is_found_can_be_had_and_the_reason_is_one_line() -> None:
    found = devices({})
    assert bool(found.found) != bool(found.why)
    assert "\n" not in found.why
    for one in found.found:
        assert device_of(one.uuid, {}).uuid == one.uuid
        assert one.uuid.startswith(("GPU-", "MIG-"))
        assert len(one.uuid) == 40
    with pytest.raises(NoDevice, match="no device GPU-elsewhere"):
        device_of("GPU-elsewhere", {})


def test_host_devices_are_named_by_the_environment() -> None:
    environment = {VARIABLE: "HOST-a=1048576, HOST-b=2097152"}
    assert [(one.uuid, one.total_bytes) for one in devices(environment).found] == [
        ("HOST-a", 1 << 20),
        ("HOST-b", 2 << 20),
    ]
    device = device_of("HOST-b", environment)
    assert isinstance(device, HostDevice)
    assert device.memory().total_bytes == 2 << 20
    with pytest.raises(NoDevice, match="there are HOST-a, HOST-b"):
        device_of("HOST-c", environment)
    for wrong in ("HOST-a", "=5", "HOST-a=5MiB", "HOST-a=-5"):
        with pytest.raises(ValueError, match=VARIABLE):
            devices({VARIABLE: wrong})
