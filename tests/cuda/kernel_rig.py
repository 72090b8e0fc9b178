"""What the tests of the copy kernels run on: drawn cases, memory to lay them out in, and paged.cu on the CPU.

A Case is numbers only. A World is a case in the memory of one place, with random bytes everywhere: the engine's
tensors and the slots, each with guard bytes around it. The same case in two worlds with the same seed has the same
bytes at different addresses, so what kernels leave in one can be compared, guards included, with what the twin leaves
in the other.
"""

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import kvstored_cuda
from kvstored_cuda.batches import Numbers, Way, check_batch
from kvstored_cuda.layouts import PagedLayout, Part, SlotOrder
from kvstored_cuda.plans import LARGE_ENTRIES, Launch, launches, plane_table

PACKAGE = Path(kvstored_cuda.__file__).parent
HERE = Path(__file__).parent
COMPILE_S = 120.0

Bytes = npt.NDArray[np.uint8]


# -- paged.cu on the CPU


def build_shim(folder: Path, *flags: str) -> Path:
    """paged.cu and the header that stands for CUDA, as a library."""
    library = folder / "paged.so"
    source = f'#include "{HERE / "kernel_shim.h"}"\n'
    command = ["g++", "-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fPIC"]
    command += ["-shared", "-fno-strict-aliasing", *(flags or ("-O1",)), f"-I{PACKAGE}", "-o", str(library), "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    assert done.returncode == 0, done.stderr
    return library


@cache
def plain_shim() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(build_shim(Path(folder))))


class ShimCopies:
    """As KernelCopies, the kernels run by the CPU, now."""

    def __init__(
        self,
        layout: PagedLayout,
        library: ctypes.CDLL,
        entries_max: int = LARGE_ENTRIES,
        launched: list[Launch] | None = None,
    ) -> None:
        self.layout, self.library, self.entries_max = layout, library, entries_max
        self.table = plane_table(layout)
        self.launched = [] if launched is None else launched

    def gather(self, pages: Numbers, slots: Numbers, *, multiprocessors: int = 2, **said: Any) -> int:
        return self.copy(Way.GATHER, pages, slots, multiprocessors, said)

    def scatter(self, pages: Numbers, slots: Numbers, *, multiprocessors: int = 2, **said: Any) -> int:
        return self.copy(Way.SCATTER, pages, slots, multiprocessors, said)

    def copy(self, way: Way, pages: Numbers, slots: Numbers, multiprocessors: int, said: dict[str, Any]) -> int:
        batch = check_batch(self.layout, way, pages, slots, **said)
        planned = list(launches(batch, self.table, self.table.ctypes.data, multiprocessors, self.entries_max))
        for launch in planned:
            self.run(launch)
        self.launched += planned
        return len(planned)

    def run(self, launch: Launch) -> None:
        kernel = ctypes.cast(getattr(self.library, launch.kernel), ctypes.c_void_p)
        call = ctypes.c_void_p(launch.call.ctypes.data)
        self.library.shim_launch.restype = ctypes.c_long
        misaligned = self.library.shim_launch(kernel, call, ctypes.c_uint(launch.grid), ctypes.c_uint(launch.threads))
        assert misaligned == 0, f"{misaligned} accesses of {launch.kernel} are not aligned to their width"


# -- places


class Place(Protocol):
    """Memory of some kind. `reserve` answers an address aligned to 256; it is gone with the place."""

    def reserve(self, size: int) -> int: ...

    def write(self, address: int, content: Bytes) -> None: ...

    def read(self, address: int, size: int) -> Bytes: ...


class HostPlace:
    """From malloc, so that a sanitizer knows where each piece begins and ends."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None)
        self.libc.free.argtypes = [ctypes.c_void_p]
        self.held: list[int] = []

    def reserve(self, size: int) -> int:
        address = ctypes.c_void_p()
        failed = self.libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(256), ctypes.c_size_t(size))
        assert not failed
        assert address.value is not None
        self.held.append(address.value)
        return address.value

    def write(self, address: int, content: Bytes) -> None:
        ctypes.memmove(address, content.ctypes.data, content.nbytes)

    def read(self, address: int, size: int) -> Bytes:
        return np.frombuffer(ctypes.string_at(address, size), dtype=np.uint8)

    def __del__(self) -> None:
        for address in self.held:
            self.libc.free(address)


# -- cases


@dataclass(frozen=True)
class Case:
    """One engine and one call. `axes` are those of one allocation, outermost first: of "LBKNH", then "D".

    L: all layers in one allocation, else one each. K: both parts in it, else one each. `padding`: for each of `axes`
    elements left out behind each step along it. `shift`: elements before the first one of an allocation.
    """

    element_bytes: int
    axes: str
    sizes: dict[str, int]
    head_elements: tuple[int, ...]
    padding: dict[str, int]
    shift: int
    order: SlotOrder
    pages_per_slot: int
    pages: tuple[int, ...]
    other_pages: tuple[int, ...]
    layers: range
    slot_shift: int
    multiprocessors: int
    seed: int

    @property
    def num_slots(self) -> int:
        return len(self.pages) // self.pages_per_slot

    def strides(self, number: int) -> tuple[dict[str, int], int]:
        """In bytes, of an allocation that has this part; and the bytes of it."""
        step, found = self.head_elements[number], {}
        for axis in reversed(self.axes):
            step += self.padding[axis]
            found[axis] = step * self.element_bytes
            step *= self.sizes[axis]
        return found, step * self.element_bytes


@st.composite
def cases(draw: st.DrawFn, numbers: int = 5) -> Case:
    """`numbers`: how large the counts get."""
    few = st.integers(1, numbers)
    axes = "".join(draw(st.permutations(draw(st.sampled_from(["BNH", "LBNH", "BKNH", "LBKNH", "BN", "BKN"])))))
    parts = 2 if "K" in axes else draw(st.integers(1, 2))
    pages_per_slot = draw(st.integers(1, 3))
    slots = draw(st.integers(0, numbers))
    used = slots * pages_per_slot
    sizes = {"L": draw(few), "B": draw(st.integers(max(used, 1), used + numbers)), "K": parts, "N": draw(few)}
    sizes["H"] = draw(few) if "H" in axes else 1
    elements = st.sampled_from([1, 2, 3, 4, 8, 12, 16, 32, 33, 64])
    heads = (draw(elements),) * parts if "K" in axes else tuple(draw(elements) for _ in range(parts))
    padding = {axis: draw(st.sampled_from([0, 0, 0, 1, 3, 8, 16])) for axis in axes}
    first = draw(st.integers(0, sizes["L"] - 1))
    ids = st.permutations(range(sizes["B"]))
    repeated = st.lists(st.integers(0, sizes["B"] - 1), min_size=used, max_size=used)  # a page may be read twice
    return Case(
        element_bytes=draw(st.sampled_from([1, 2, 4])),
        axes=axes,
        sizes=sizes,
        head_elements=heads,
        padding=padding,
        shift=draw(st.sampled_from([0, 0, 1, 2, 4, 8])),
        order=draw(st.sampled_from(list(SlotOrder))),
        pages_per_slot=pages_per_slot,
        pages=tuple(draw(st.one_of(ids.map(lambda found: found[:used]), repeated))),
        other_pages=tuple(draw(ids)[:used]),
        layers=range(first, draw(st.integers(first + 1, sizes["L"]))),
        slot_shift=draw(st.sampled_from([0, 0, 0, 1, 4])),
        multiprocessors=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


class World:
    """A case in memory. `guard`: bytes around each allocation and slot."""

    def __init__(self, case: Case, place: Place, slots_place: Place | None = None, guard: int = 64) -> None:
        self.case, self.place, self.slots_place, self.guard = case, place, slots_place or place, guard
        self.random = np.random.default_rng(case.seed)
        self.pieces: list[tuple[Place, int, int]] = []
        self.layout = self._layout()
        count = max(len(self.layout.bases), 1)
        assert count == case.sizes["L"]
        self.slots = [self._slot() for _ in range(case.num_slots)]
        self.other_slots = [self._slot() for _ in range(case.num_slots)]

    def _piece(self, place: Place, size: int, shift: int) -> int:
        whole = self.guard + shift + size + self.guard
        address = place.reserve(whole)
        place.write(address, self.random.integers(0, 256, whole, dtype=np.uint8))
        self.pieces.append((place, address, whole))
        return address + self.guard + shift

    def _slot(self) -> int:
        return self._piece(self.slots_place, self.layout.slot_bytes, self.case.slot_shift * self.case.element_bytes)

    def _layout(self) -> PagedLayout:
        case, size = self.case, self.case.element_bytes
        layers, parts = case.sizes["L"], case.sizes["K"]
        bases = [[0] * parts for _ in range(layers)]
        for layer in range(layers):
            for part in range(parts):
                strides, whole = case.strides(part)
                if (layer and "L" in case.axes) or (part and "K" in case.axes):
                    first = bases[0 if "L" in case.axes else layer][0 if "K" in case.axes else part]
                    bases[layer][part] = first + strides.get("L", 0) * layer + strides.get("K", 0) * part
                else:
                    bases[layer][part] = self._piece(self.place, whole, case.shift * size)
        found = []
        for part in range(parts):
            strides, _ = case.strides(part)
            found.append(
                Part(
                    heads=case.sizes["H"],
                    head_bytes=case.head_elements[part] * size,
                    page_stride=strides["B"],
                    token_stride=strides["N"],
                    head_stride=strides.get("H", 0),
                )
            )
        return PagedLayout(
            element_bytes=size,
            num_pages=case.sizes["B"],
            page_tokens=case.sizes["N"],
            parts=tuple(found),
            bases=tuple(map(tuple, bases)),
            order=case.order,
            pages_per_slot=case.pages_per_slot,
        )

    def content(self) -> list[bytes]:
        """All bytes of all pieces with their guards: the engine's, then the slots, then the other slots."""
        return [place.read(address, size).tobytes() for place, address, size in self.pieces]

    def slot_content(self, slots: list[int]) -> list[Bytes]:
        return [self.slots_place.read(address, self.layout.slot_bytes) for address in slots]

    def whole_slots(self) -> int:
        """Bytes of one round trip, to keep cases in bounds."""
        return prod((self.case.num_slots, self.layout.slot_bytes))
