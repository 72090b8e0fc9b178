"""Device memory that crosses as a POSIX file descriptor: the second kind of handle.

For processes that share no IPC or PID namespace (containers). The descriptor travels over
the session's socket like a memfd. Wants cuda-bindings (`pip install cuda-bindings`), whose
driver calls release Python's lock; without it this kind is refused and the other one stays.

The memory lives until every process has unmapped it and every descriptor is closed, so
freeing what an importer maps is not undefined here: its bytes stay.
"""

import os
from typing import Any

from kvstored_cuda.devices.errors import IpcRefused, NoDevice, from_code


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise IpcRefused(f"memory as descriptors wants cuda-bindings: {e}") from e
    return driver


def _checked(answer: tuple[Any, ...], doing: str) -> Any:
    """The value beside the CUresult, None where there is none."""
    code = int(answer[0])
    if code:
        raise from_code(code, doing)
    return answer[1] if len(answer) > 1 else None


def _location(driver: Any, ordinal: int) -> Any:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = ordinal
    return location


def _properties(driver: Any, ordinal: int) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _location(driver, ordinal)
    properties.requestedHandleTypes = _descriptor_type(driver)
    return properties


def _descriptor_type(driver: Any) -> Any:
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def padded(size_bytes: int, ordinal: int) -> int:
    """The size rounded up to what the device maps at once (2 MiB on those of today)."""
    driver = _driver()
    option = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    try:
        answer = driver.cuMemGetAllocationGranularity(_properties(driver, ordinal), option)
    except RuntimeError as e:  # cuda-bindings' own, where it finds no driver's library
        raise NoDevice(str(e)) from e
    granule_bytes = int(_checked(answer, "asking for the granularity of device memory"))
    return -(-size_bytes // granule_bytes) * granule_bytes


def create(size_bytes: int, ordinal: int) -> tuple[int, int]:
    """New memory, mapped: (address, descriptor). The context is current. The caller closes the descriptor."""
    driver = _driver()
    whole_bytes = padded(size_bytes, ordinal)
    doing = f"allocating {whole_bytes} bytes of device {ordinal} as a descriptor"
    memory = _checked(driver.cuMemCreate(whole_bytes, _properties(driver, ordinal), 0), doing)
    try:
        address = _mapped(driver, memory, whole_bytes, ordinal)
        try:
            descriptor = int(
                _checked(
                    driver.cuMemExportToShareableHandle(memory, _descriptor_type(driver), 0), "exporting a segment"
                )
            )
        except BaseException:
            unmap(address, size_bytes, ordinal)
            raise
    finally:
        driver.cuMemRelease(memory)  # mapping and descriptor keep the memory
    os.set_inheritable(descriptor, False)
    return address, descriptor


def open_descriptor(descriptor: int, size_bytes: int, ordinal: int) -> int:
    """Maps another process's memory: the address. The descriptor stays the caller's."""
    driver = _driver()
    whole_bytes = padded(size_bytes, ordinal)
    answer = driver.cuMemImportFromShareableHandle(descriptor, _descriptor_type(driver))
    memory = _checked(answer, "opening a segment by its descriptor")
    try:
        return _mapped(driver, memory, whole_bytes, ordinal)
    finally:
        driver.cuMemRelease(memory)


def _mapped(driver: Any, memory: Any, whole_bytes: int, ordinal: int) -> int:
    address = int(_checked(driver.cuMemAddressReserve(whole_bytes, 0, 0, 0), "opening: reserving addresses"))
    try:
        _checked(driver.cuMemMap(address, whole_bytes, 0, memory, 0), "opening: mapping a segment")
        try:
            access = driver.CUmemAccessDesc()
            access.location = _location(driver, ordinal)
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _checked(driver.cuMemSetAccess(address, whole_bytes, [access], 1), "opening: granting access")
        except BaseException:
            driver.cuMemUnmap(address, whole_bytes)
            raise
    except BaseException:
        driver.cuMemAddressFree(address, whole_bytes)
        raise
    return address


def unmap(address: int, size_bytes: int, ordinal: int) -> None:
    """Takes a mapping of `create` or `open_descriptor` away; the memory goes with its last user."""
    driver = _driver()
    whole_bytes = padded(size_bytes, ordinal)
    _checked(driver.cuMemUnmap(address, whole_bytes), "closing: unmapping a segment")
    _checked(driver.cuMemAddressFree(address, whole_bytes), "closing: freeing addresses")
